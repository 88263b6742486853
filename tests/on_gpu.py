"""What tests on a GPU share: operands, which configs to try, launches, and the memory that they need."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from cutekernels import compile as compiler
from cutekernels import gpu, verify

# Warnings of torch's own, where it traces a function or checks an op.
traced = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning")


def normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=dtype)


def drawn(op: Any, problem: Any, count: int, seed: str) -> list[Any]:
    """The default config of ``problem`` and ``count`` random ones, or all that there are."""
    spec = gpu.detect()
    valid = list(op.valid(problem, spec))
    return [op.default(problem, spec), *random.Random(seed).sample(valid, min(count, len(valid)))]


def computed(op: Any, problem: Any, config: Any, args: tuple[Any, ...]) -> tuple[Tensor, ...]:
    """The results of the kernel of ``config``, in poisoned memory."""
    results = op.outputs(problem, *args)
    verify.poison(results)
    op.bind(problem, config, compiler.get(op, problem, config, gpu.detect()))(*results, *args)
    return tuple(results)


def needs_memory(gib: int) -> None:
    if torch.cuda.mem_get_info()[0] < gib << 30:
        pytest.skip(f"needs {gib} GiB of free device memory")
