"""Elementwise activations: ``silu_mul``, ``gelu_mul`` and ``bias_gelu``."""

from __future__ import annotations

from cutekernels.ops.activations.op import OPS as OPS
