"""``rope``: the public function, and its registration with torch.

The rotation is orthogonal, so its gradient is the same op with the angles negated (``inverse``): there is no backward
op, and the op is differentiable any number of times.
"""

from __future__ import annotations

from typing import Any, TypedDict, Unpack, overload

import torch
from torch import Tensor

from cutekernels.errors import UnsupportedProblem
from cutekernels.ops.rope.op import ROPE
from cutekernels.ops.rope.rotary import RotaryConfig
from cutekernels.ops.shared.calls import call, refuse_others, register, register_inplace
from cutekernels.ops.shared.checks import check_flag, quote


class _Options(TypedDict, total=False):
    interleaved: bool
    positions: Tensor | int | None
    inplace: bool
    config: RotaryConfig | str | None


# fmt: off
@overload
def rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, **options: Unpack[_Options]) -> tuple[Tensor, Tensor]: ...
@overload
def rope(q: Tensor, k: None, cos: Tensor, sin: Tensor, **options: Unpack[_Options]) -> tuple[Tensor, None]: ...
@overload
def rope(
    q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, **options: Unpack[_Options]
) -> tuple[Tensor, Tensor | None]: ...
# fmt: on
def rope(
    q: Tensor,
    k: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    *,
    interleaved: bool = False,
    positions: Tensor | int | None = None,
    inplace: bool = False,
    config: RotaryConfig | str | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Turns each pair ``(x1, x2)`` of channels into ``(x1 cos - x2 sin, x2 cos + x1 sin)``: in fp32, rounded once.

    The cosines and sines are those of the token's position. A pair is channels ``i`` and ``i + R/2`` of a head, or
    ``2i`` and ``2i + 1`` if interleaved; channels from R on are copied.

    Args:
        q: ``(B, S, Hq, D)``, fp16, bf16 or fp32 (on the CPU fp64 too). Any strides: views of a joint QKV projection
            and of ``(B, Hq, S, D)`` storage are fast.
        k: ``(B, S, Hkv, D)``, dtype and device of ``q``; None to turn ``q`` alone.
        cos: ``(T, R/2)`` with R <= D, fp32 or of q's dtype: a row per position. Or ``(B or 1, S, R)``, a row per
            token whose halves repeat, as Hugging Face's modules make it; its second half is not read.
        sin: shape and dtype of ``cos``.
        interleaved: pairs of neighbours (GPT-J, Llama's original) instead of halves (NeoX, Hugging Face).
        positions: of the tokens. None: 0 to S - 1; an int: from there on; ``(B,)``: from there on in each batch
            entry; ``(B, S)``: of each token. Tensors are int32 or int64 on q's device and are not waited for: a
            position outside of the table gives NaN on a GPU, and raises on the CPU.
        inplace: write to ``q`` and ``k`` themselves. Not differentiable.
        config: overrides the tuned choice, as a :class:`RotaryConfig` or its text. Ignored on the CPU.

    Returns:
        Contiguous ``(B, S, Hq, D)`` and ``(B, S, Hkv, D)``, or ``q`` and ``k``; None in the place of None.
        Differentiable in ``q`` and ``k``.

    Raises:
        UnsupportedProblem: a dtype no kernel takes, shapes, dtypes or devices that do not fit, a position outside of
            the table (where it is an int), a gradient of ``cos`` or ``sin``, gradients in place.
        InvalidConfig: ``config`` breaks a rule of the op.
    """
    if not (isinstance(q, Tensor) and isinstance(cos, Tensor) and isinstance(sin, Tensor)):
        refuse_others(ROPE, (q, q if k is None else k, cos, sin, None), None)  # type: ignore[unreachable]
    if q.is_nested or cos.is_nested:
        refuse_others(ROPE, (q, q, cos, cos, None), None)
    if type(interleaved) is not bool or inplace is not False:  # keys take 1 for True
        check_flag("rope", "interleaved", interleaved)
        check_flag("rope", "inplace", inplace)
    start, places = (0, positions) if positions is None or isinstance(positions, Tensor) else (positions, None)
    if not isinstance(start, int | torch.SymInt) or isinstance(start, bool):
        raise UnsupportedProblem(f"positions are an int or a torch.Tensor; got {quote(start)}: convert them")
    if places is None and cos.dim() == 2 and q.dim() == 4 and (start < 0 or start + q.shape[1] > cos.shape[0]):
        raise UnsupportedProblem(
            f"positions {quote(start)} to {quote(start + q.shape[1] - 1)} leave a table of {cos.shape[0]} rows: "
            "build a longer one (RotaryEmbedding: max_positions)"
        )
    if start and cos.dim() == 3:
        raise UnsupportedProblem("a (B or 1, S, R) table is gathered already: pass a (T, R/2) table beside positions")
    refuse_table_gradient(cos, sin)
    keys = q.new_empty((*q.shape[:2], 0, *q.shape[3:])) if k is None else k
    results = (q, keys) if inplace else None
    options, operands = (interleaved, False), (q, keys, cos, sin, places)
    found = call(ROPE, operands, options, (start,), config=config, out=results, in_place=inplace)
    return found[0], None if k is None else found[1]


def refuse_table_gradient(cos: Tensor, sin: Tensor) -> None:
    if torch.is_grad_enabled() and (cos.requires_grad or sin.requires_grad):
        raise UnsupportedProblem("rope has no gradient for cos and sin: detach them")


# ---- torch.library --------------------------------------------------------------------------------------


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    _, _, cos, sin, positions, ctx.interleaved, ctx.inverse, ctx.start, *_ = inputs
    ctx.save_for_backward(cos, sin, positions)


def _gradient(ctx: Any, dq: Tensor, dk: Tensor) -> tuple[Any, ...]:
    cos, sin, positions = ctx.saved_tensors
    if ctx.needs_input_grad[2] or ctx.needs_input_grad[3]:
        refuse_table_gradient(cos, sin)
    tables = (cos, sin, positions, ctx.interleaved, not ctx.inverse, ctx.start)
    return (*ROPE.path(dq, dk, *tables, None), *[None] * 7)


register(ROPE, gradient=_gradient, remember=_remember)
register_inplace(ROPE, updated=(0, 1))
