"""A GEMM body called with addresses, extents and pitches in the place of tensors.

TVM-FFI passes an int in a fraction of a tensor's time, and callers have read the addresses already:
docs/notes/gemm.md#launch-by-addresses. Nothing is checked here: the numbers must be those of tensors that have the
layout the body was compiled for.
"""

from dataclasses import dataclass
from typing import Any

import cuda.bindings.driver as cuda
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr


@dataclass(frozen=True)
class Operand:
    """Layout of a matrix: its contiguous extent, 0 or 1, and a number of elements that divides its pitch."""

    along: int
    align: int


@dataclass(frozen=True)
class Addressed:
    """``body`` without C. ``divisors`` divide m, n and k."""

    body: Any
    out: Operand
    a: Operand
    b: Operand
    divisors: tuple[int, int, int]

    @cute.jit
    def __call__(
        self,
        out: cute.Pointer,
        a: cute.Pointer,
        b: cute.Pointer,
        bias: cute.Pointer | None,
        m: Int32,
        n: Int32,
        k: Int32,
        out_pitch: Int32,
        a_pitch: Int32,
        b_pitch: Int32,
        alpha: Float32,
        beta: Float32,
        stream: cuda.CUstream,
    ):
        # Divisors that the body was compiled for, promised of the launch's numbers.
        m = cute.assume(m, divby=self.divisors[0])
        n = cute.assume(n, divby=self.divisors[1])
        k = cute.assume(k, divby=self.divisors[2])
        mD = self.matrix(out, m, n, out_pitch, self.out)
        mA = self.matrix(a, m, k, a_pitch, self.a)
        mB = self.matrix(b, k, n, b_pitch, self.b)
        mBias = None
        if const_expr(bias is not None):
            mBias = cute.make_tensor(bias, cute.make_layout((n,), stride=(1,)))
        self.body(mD, mA, mB, None, mBias, alpha, beta, stream)

    @cute.jit
    def matrix(self, address: cute.Pointer, rows: Int32, columns: Int32, pitch: Int32, lies: Operand):
        pitch = cute.assume(pitch, divby=lies.align)
        if const_expr(lies.along == 1):
            return cute.make_tensor(address, cute.make_layout((rows, columns), stride=(pitch, 1)))
        return cute.make_tensor(address, cute.make_layout((rows, columns), stride=(1, pitch)))
