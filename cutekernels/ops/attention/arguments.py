"""Arguments of attention's public functions: numbers, windows, configs and the values of index tensors.

Every refusal names rule, value and remedy. :func:`refuse_others` runs only after a call has failed, so that good calls
pay nothing for it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from operator import index
from typing import Any

import torch
from torch import Tensor

from cutekernels.errors import InvalidConfig, UnsupportedProblem
from cutekernels.op import Config
from cutekernels.ops.attention.problem import UNLIMITED
from cutekernels.ops.shared.checks import check_tensor, quote
from cutekernels.ops.shared.dtypes import DTYPES

# What torch raises for arguments that fit no schema or backend, and Python for those that are no tensors.
FOREIGN = (AttributeError, TypeError, RuntimeError)


# ---- numbers --------------------------------------------------------------------------------------------


def default_scale(q: Tensor) -> float:
    return 1.0 / math.sqrt(q.shape[-1]) if q.dim() and q.shape[-1] else 1.0


def check_scale(scale: float) -> None:
    if not 0.0 < scale < math.inf:
        raise UnsupportedProblem(f"scale must be above 0 and finite; it is {scale}: negate q for the opposite sign")


def cap_of(softcap: float) -> float:
    cap = number("softcap", softcap)
    if not 0.0 < cap < math.inf:
        raise UnsupportedProblem(f"softcap must be above 0 and finite; it is {softcap}: leave it out for none")
    return cap


def number(name: str, value: Any) -> float:
    if isinstance(value, Tensor):  # float() would drop its gradient and wait for its GPU
        raise UnsupportedProblem(
            f"{name} must be a number, and has no gradient; it is {quote(value)}: pass its item()"
            + (", or multiply q by it" if name == "scale" else "")
        )
    if not isinstance(value, (bool, str, bytes)):
        try:
            return float(value)
        except (TypeError, ValueError, OverflowError, RuntimeError):
            pass
    raise UnsupportedProblem(f"{name} must be a number; it is {quote(value)}: pass a float, or None for the default")


def sides_of(window: Any, *, later: bool = True) -> tuple[int, int]:
    """The window's ``(left, right)``, -1 for no limit. ``later``: whether there are keys behind a query's own."""
    if not isinstance(window, (tuple, list)) or len(window) != 2:
        form = "(left, right), each" if later else "(left, None), left"
        raise UnsupportedProblem(f"window must be {form} a number of keys or None; it is {window!r}")
    left, right = _side(window[0]), _side(window[1])
    if right > 0 and not later:
        raise UnsupportedProblem(f"window's right side must be None: there are no later keys; it is {right}")
    return left, right


def _side(side: Any) -> int:
    if side is None:
        return -1
    if not isinstance(side, bool):
        try:
            keys = index(side)
        except TypeError:
            keys = -1
        if 0 <= keys < UNLIMITED:
            return keys
    raise UnsupportedProblem(
        f"a side of window must be an integer from 0 up to 2^30; it is {side!r}: write None for no limit"
    )


def text_of(config: Config | str, kind: type[Config]) -> str:
    check_config(config, kind)
    return str(config)


def check_config(config: object, kind: type[Config]) -> None:
    if not isinstance(config, (str, kind)):
        raise InvalidConfig(f"config must be of {kind.__name__} or its text; it is {config!r}: leave it out to choose")


def check_dtype(op: str, q: Tensor) -> None:
    """Refuses a type that no kernel takes; the CPU takes wider ones too."""
    wide = (torch.float32, torch.float64) if q.device.type == "cpu" else ()
    if q.dtype not in (*DTYPES.values(), *wide):
        names = "fp16, bf16, fp32 and fp64" if wide else "fp16 and bf16"
        raise UnsupportedProblem(f"{op} on {q.device.type} takes {names}; got {q.dtype}: convert the operands")


def check_sinks(sinks: Tensor, q: Tensor) -> None:
    """Refuses sinks that are not one for each of q's heads."""
    heads = q.shape[-2]
    if sinks.shape != (heads,) or sinks.dtype not in (q.dtype, torch.float32) or sinks.device != q.device:
        raise UnsupportedProblem(
            f"sinks must be ({heads},), one for each of q's heads, {q.dtype} or fp32, on {q.device}; they are "
            f"{tuple(sinks.shape)}, {sinks.dtype}, on {sinks.device}"
        )


def refuse_others(op: str, tensors: Mapping[str, object], optional: Mapping[str, object]) -> None:
    """Refuses what is no dense tensor."""
    for names, absent in ((tensors, False), (optional, True)):
        for name, t in names.items():
            check_tensor(op, name, t, optional=absent)


# ---- values of index tensors ----------------------------------------------------------------------------


def check_ends(q: Tensor, k: Tensor, cu_q: Tensor, cu_kv: Tensor) -> None:
    """Refuses varlen sequences' ends that do not run from 0 to the tensors' rows without falling. Waits once."""
    both = torch.stack((cu_q, cu_kv)).tolist()
    for name, ends, rows in zip(("cu_seqlens_q", "cu_seqlens_kv"), both, (q.shape[0], k.shape[0]), strict=True):
        falls = next((i for i in range(1, len(ends)) if ends[i] < ends[i - 1]), None)
        if falls is not None:
            value = f"entry {falls} is {ends[falls]}, behind {ends[falls - 1]}"
        elif ends[0] != 0 or ends[-1] != rows:
            value = f"it runs from {ends[0]} to {ends[-1]}"
        else:
            continue
        raise UnsupportedProblem(
            f"{name} must run from 0 to {rows}, the tensor's rows, and never fall; {value}: pass the cumulative "
            "sums of the sequences' lengths, and slices of the tensors without the rows of no sequence"
        )


def check_pages(table: Tensor, lengths: Tensor, pages: int, size: int, seq_q: int, left: int) -> None:
    """Refuses a page table that names no page where a query sees a token. Waits once."""
    begins = torch.arange(table.shape[1], device=table.device) * size
    ends = lengths.clamp(0, table.shape[1] * size).unsqueeze(-1)
    used = begins < ends
    if left >= 0:
        used &= begins + size > ends - seq_q - left
    bad = used & ((table < 0) | (table >= pages))
    if bad.any():
        b, entry = bad.nonzero()[0].tolist()
        raise UnsupportedProblem(
            f"page_table must name one of {pages} pages for each that cache_seqlens uses; entry {entry} of sequence "
            f"{b} is {int(table[b, entry])}, and the sequence has {int(lengths[b])} tokens: reserve pages first"
        )


def check_lengths(lengths: Tensor, room: int) -> None:
    """Refuses lengths that a cache has no room for. Waits once."""
    bad = (lengths < 0) | (lengths > room)
    if bad.any():
        b = int(bad.nonzero()[0])
        raise UnsupportedProblem(
            f"cache_seqlens must be from 0 to {room}, the cache's room; sequence {b} has {int(lengths[b])} tokens: "
            "make room for more"
        )
