"""CPU time of a call, for tests that limit it on machines of any speed whose cores are shared.

The unit is the least work of any dispatcher for one tensor: make a key of its shape, strides, dtype and address and
look it up.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

import torch

from cutekernels.ops.shared import paths


def host_cost(call: Callable[[], object], *, calls: int, chunks: int) -> float:
    """CPU time of ``call`` in keys of a tensor: the least of seven ratios of medians, timed side by side."""
    keyed = torch.empty(4, 8, 16)
    known: dict[object, object] = {}

    def key() -> object:
        t = keyed
        return known.get((t.shape, t.stride(), t.dtype, t.get_device(), t.data_ptr()))

    found = []
    for _ in range(7):
        both = [(_ns(call, calls), _ns(key, 20)) for _ in range(chunks)]
        found.append(median(taken for taken, _ in both) / median(unit for _, unit in both))
    return min(found)


def _ns(call: Callable[[], object], calls: int) -> float:
    begin = time.perf_counter_ns()
    for _ in range(calls):
        call()
    return (time.perf_counter_ns() - begin) / calls


def direct_anywhere() -> Callable[..., bool]:
    """``paths.direct``, but for tensors on the CPU too."""
    return lambda *tensors: paths.undisturbed(*tensors) is not None
