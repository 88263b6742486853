"""Attention's operands, from their checks to the problem they pose, and calls of it that repeat."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from cutekernels import torch_names
from cutekernels.ops.attention.arguments import check_scale
from cutekernels.ops.attention.operands import AttentionOp
from cutekernels.ops.shared.call_cache import CallCache, Inputs
from cutekernels.ops.shared.calls import run
from cutekernels.ops.shared.checks import check_overlap
from cutekernels.ops.shared.registration import Implementation, direct

_is_compiling = torch.compiler.is_compiling
_autocast = torch_names.autocasting
_function_modes = torch_names.function_modes


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


def implementations(
    op: AttentionOp[Any, Any], split: Callable[..., tuple[Any, Any, Any]]
) -> tuple[Implementation, Implementation, Implementation]:
    """``op`` on a GPU, on the CPU and of fakes. It returns an empty lse where none is wanted, and that alone with out.

    Args:
        op: with results out and lse.
        split: options, scalars and the config of torch's arguments behind the tensors. Refuses a scale.
    """

    def returned(given: tuple[Tensor] | None, q: Tensor, made: Sequence[Tensor]) -> Any:
        wide = torch.promote_types(q.dtype, torch.float32)
        lse = made[1] if len(made) > 1 else q.new_empty((0,), dtype=wide)
        return (made[0], lse) if given is None else lse

    def admit(given: tuple[Tensor] | None, inputs: Any, rest: Any) -> tuple[dict[str, Any], Any]:
        options, scalars, _ = split(*rest)
        chosen = dict(zip(op.options, options, strict=True))
        op.admit(inputs, given or (), **chosen)
        return chosen, scalars

    def cuda(given: tuple[Tensor] | None, inputs: Any, *rest: Any) -> Any:
        options, scalars, config = split(*rest)
        made = run(op, given, inputs, options=options, scalars=scalars, config=config)
        return returned(given, inputs[0], made)

    def cpu(given: tuple[Tensor] | None, inputs: Any, *rest: Any) -> Any:
        chosen, scalars = admit(given, inputs, rest)
        check_overlap(op, given or (), inputs)
        op.check_indices(inputs, **chosen)
        made = op.evaluate(*inputs, *scalars, **chosen)
        if given is not None:
            given[0].copy_(made[0])
        return returned(given, inputs[0], made)

    def fake(given: tuple[Tensor] | None, inputs: Any, *rest: Any) -> Any:
        chosen, _ = admit(given, inputs, rest)
        return returned(given, inputs[0], op.fresh(*inputs, **chosen))

    return cuda, cpu, fake


LIMITS = {(False, False): "none", (True, False): "left", (False, True): "right", (True, True): "both"}
NO_WINDOW = ("none", 0, 0)


def window_of(left: int, right: int) -> tuple[str, int, int]:
    """The options ``window``, ``window_left`` and ``window_right`` of sides, -1 for no limit."""
    return LIMITS[left >= 0, right >= 0], max(left, 0), max(right, 0)
