"""Steps of optimizers: ``adamw_step``."""

from __future__ import annotations

from cutekernels.ops.optimizer.op import ADAMW_STEP

OPS = (ADAMW_STEP,)
