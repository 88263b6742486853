"""Losses over a vocabulary whose logits never exist as a whole."""

import torch

from cutekernels.ops.loss import cross_entropy, logprob
from cutekernels.ops.loss.rows import OPS
from cutekernels.ops.shared import tensor_op

__all__ = ["OPS", "register"]


def register(library: torch.library.Library) -> None:
    """Defines the family's torch ops in ``library``, with their gradients."""
    for op in OPS:
        tensor_op.register(library, op)
    logprob.register(library)
    cross_entropy.register(library)
