"""Attention's arguments, and calls of it that repeat. Every refusal names rule, value and remedy."""

from __future__ import annotations

import math
from operator import index
from typing import Any

import torch
from torch import Tensor

from cutekernels import torch_names
from cutekernels.errors import UnsupportedProblem
from cutekernels.ops.attention.operands import AttentionOp
from cutekernels.ops.attention.problem import UNLIMITED
from cutekernels.ops.shared.checks import quote
from cutekernels.ops.shared.paths import CallCache, Inputs, direct

_is_compiling = torch.compiler.is_compiling
_autocast = torch_names.autocasting
_function_modes = torch_names.function_modes

# What torch raises for arguments that fit no schema or backend, and Python for those that are no tensors.
FOREIGN = (AttributeError, TypeError, RuntimeError)
LIMITS = {(False, False): "none", (True, False): "left", (False, True): "right", (True, True): "both"}
NO_WINDOW = ("none", 0, 0)


# ---- arguments ----------------------------------------------------------------------------------------


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


def window_of(left: int, right: int) -> tuple[str, int, int]:
    """The options ``window``, ``window_left`` and ``window_right`` of sides, -1 for no limit."""
    return LIMITS[left >= 0, right >= 0], max(left, 0), max(right, 0)


# ---- calls --------------------------------------------------------------------------------------------


def replay(
    calls: CallCache, out: Tensor | None, operands: Inputs, options: tuple[object, ...],
    scalars: tuple[float, float], config: str | None,
) -> tuple[Tensor, ...] | None:  # fmt: skip
    """``(out[, lse])`` of a call that repeats one; None, and nothing was done, where it must go through torch.

    ``scalars`` are scale and softcap, of which the caller has checked the second.
    """
    if _is_compiling() or _function_modes() or _autocast() or not 0.0 < scalars[0] < math.inf:
        return None
    if type(operands[0]) is not Tensor:  # a fake's address is not to be read
        return None
    results = None if out is None else (out,)
    call = results, operands, options, scalars, config
    made = calls.replay(*call)
    if made is None and direct(*operands, out):
        made = calls.recall(call)
    return made


def tensors_of(op: AttentionOp[Any, Any]) -> str:
    """The tensors of an op's schema, without its options, which torch's op has in another form."""
    return ", ".join(op.schema.split(", ")[: len(op.inputs)])


def check_values(op: AttentionOp[Any, Any], operands: Any, options: Any, scale: float) -> None:
    """Refuses operands, and index tensors by their values, for which the host waits."""
    check_scale(scale)
    chosen = dict(zip(op.options, options, strict=True))
    op.admit(operands, **chosen)
    op.check_indices(operands, on_gpu=True, **chosen)
