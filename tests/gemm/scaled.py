"""A product whose columns are scaled, as a kernel. Imported where it is compiled: it needs the DSL."""

from dataclasses import dataclass
from typing import Any

import cuda.bindings.driver as cuda
import cutlass.cute as cute
from cutlass import Float32

from cutekernels.kernels.cute.parts.epilogue import EpilogueOperands
from cutekernels.kernels.cute.parts.gemm_arguments import GemmOperands


@dataclass(frozen=True)
class Scaled:
    """``body``, whose epilogue is a ColumnScale."""

    body: Any

    @cute.jit
    def __call__(
        self,
        mD: cute.Tensor,  # (M, N)
        mA: cute.Tensor,  # (M, K)
        mB: cute.Tensor,  # (K, N)
        mFactors: cute.Tensor,  # (N,)
        alpha: Float32,
        stream: cuda.CUstream,
    ):
        self.body.extend(GemmOperands(mD, mA, mB, EpilogueOperands(alpha=alpha, own=mFactors)), stream)
