"""Which tokens may be sampled: ``sample_filter``."""

from __future__ import annotations

from cutekernels.ops.sampling.op import SAMPLE_FILTER

OPS = (SAMPLE_FILTER,)
