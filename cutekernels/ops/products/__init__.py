"""Matrix products: of all rows or of groups of them, with dense or packed weights, behind a norm or none."""

from __future__ import annotations

from typing import Any

from cutekernels.op import Op
from cutekernels.ops.products.dense import GEMM
from cutekernels.ops.products.dequantize import DEQUANTIZE
from cutekernels.ops.products.grouped import GROUPED_GEMM, GROUPED_GEMM_WGRAD
from cutekernels.ops.products.norm import LINEAR_SILU_MUL, RMS_NORM_LINEAR
from cutekernels.ops.products.packed import QUANTIZED_GROUPED_GEMM, QUANTIZED_LINEAR

OPS: tuple[Op[Any, Any], ...] = (
    GEMM,
    GROUPED_GEMM,
    GROUPED_GEMM_WGRAD,
    QUANTIZED_LINEAR,
    QUANTIZED_GROUPED_GEMM,
    DEQUANTIZE,
    RMS_NORM_LINEAR,
    LINEAR_SILU_MUL,
)
