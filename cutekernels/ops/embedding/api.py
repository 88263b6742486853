"""``embedding``: the public function, its gradient, its registration with torch."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from cutekernels.ops.embedding.op import EMBEDDING, EMBEDDING_BACKWARD, EmbeddingConfig, grouped
from cutekernels.ops.shared.calls import call, register


def embedding(ids: Tensor, table: Tensor, *, config: EmbeddingConfig | str | None = None) -> Tensor:
    """``out[..., :] = table[ids[...]]``.

    Args:
        ids: any shape, int32 or int64. One outside the table gives a row of NaN on a GPU, and raises on the CPU.
        table: ``(V, D)``, fp16, bf16 or fp32 (on the CPU fp64 too). Any strides; contiguous rows are fast.
        config: overrides the tuned choice, as an :class:`EmbeddingConfig` or its text. Ignored on the CPU.

    Returns:
        ``(..., D)``, contiguous. Differentiable once, in ``table``: summed in fp32 in the order of ``ids``, bitwise
        reproducible.

    Raises:
        UnsupportedProblem: a type no kernel takes, a table that is no matrix, two devices, an id outside the table.
        InvalidConfig: ``config`` breaks a rule of the op.
    """
    return call(EMBEDDING, (ids, table), config=config)[0]


def _remember(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.vocabulary = inputs[1].shape[0]
    ctx.save_for_backward(inputs[0])


def _gradient(ctx: Any, dout: Tensor) -> tuple[None, Tensor, None]:
    order, starts = grouped(ctx.saved_tensors[0], ctx.vocabulary)
    return None, EMBEDDING_BACKWARD.path(dout, order, starts, None), None


register(EMBEDDING, gradient=_gradient, remember=_remember)
register(EMBEDDING_BACKWARD)
