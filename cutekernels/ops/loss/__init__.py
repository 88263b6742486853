"""Losses over a vocabulary whose logits never exist as a whole."""

from cutekernels.ops.loss.rows import LOGIT_GRADIENT, LOGIT_STATISTICS, SCALE_GRADIENT

OPS = (LOGIT_STATISTICS, LOGIT_GRADIENT, SCALE_GRADIENT)
