"""From accumulators to results: ``out = activation(alpha * rows * acc + beta * c + bias)``, or a gate times up.

:class:`Epilogue` is the arithmetic, in fp32, of whatever part of a tile a body gives it: fragments of an MMA, a box, a
pair. The body says where those accumulators belong by *coordinates*, which fetch what epilogues ask for, each as a
vector beside the accumulators, zero where out ends:

- ``columns(vector)``: values of ``vector`` (N,) for each accumulator's column of out;
- ``rows(vector)``: values of ``vector`` (M,) for its row;
- ``elements(matrix)``: values of ``matrix`` (M, N);
- ``gated`` and ``halves(x)``: whether accumulators are gates and what they multiply, and those apart.

Stores are apart: whole lines through shared memory (``tile_output.py``, ``results.py``), TMA boxes (``boxes.py``), or
element by element in the bodies for few tokens. A further epilogue is a class like ``column_scale.py``.
"""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from cutekernels.kernels.activations import KERNELS, clamped_gate


class Registers:
    """The operations of the table of activations, on vectors of registers."""

    where, full_like = staticmethod(cute.where), staticmethod(cute.full_like)
    erf, tanh, precise_exp = staticmethod(cute.math.erf), staticmethod(cute.math.tanh), staticmethod(cute.math.exp)

    @staticmethod
    def exp(x: cute.TensorSSA) -> cute.TensorSSA:
        return cute.math.exp(x, fastmath=True)

    @staticmethod
    @cute.jit
    def reciprocal(x: cute.TensorSSA) -> cute.TensorSSA:
        """1 / x, approximately."""
        inverse = cute.make_rmem_tensor(x.shape, Float32)
        inverse.store(x)
        for i in cutlass.range_constexpr(cute.size(inverse)):
            inverse[i] = cute.arch.rcp_approx(inverse[i])
        return inverse.load()


@dataclass(frozen=True)
class Activation:
    """One of ``KERNELS`` by name, in fp32."""

    name: str

    def apply(self, x: cute.TensorSSA) -> cute.TensorSSA:
        return KERNELS[self.name](Registers, x)


@dataclass(frozen=True)
class EpilogueOperands:
    """Operands of an epilogue beside the accumulators; None for those that are left out."""

    mC: cute.Tensor | None = None  # as out
    mBias: cute.Tensor | None = None  # along out's columns
    alpha: Float32 | None = None
    beta: Float32 | None = None
    row_factors: cute.Tensor | None = None
    clamp: tuple[Float32, Float32] | None = None  # alpha and limit of a clamped gate
    own: Any = None  # of a further epilogue


@dataclass(frozen=True)
class Epilogue:
    """``activation(alpha * rows * acc + beta * c + bias)``; of gates and up, ``activation(gate) * up`` of those."""

    activation: Activation

    def product(self, acc: Any, at: Any, operands: EpilogueOperands) -> Any:
        """The scaled product; accumulators in fp32."""
        x = acc if operands.alpha is None else operands.alpha * acc
        return x if operands.row_factors is None else x * at.rows(operands.row_factors)

    def apply(self, acc: Any, at: Any, operands: EpilogueOperands) -> Any:
        """Results in fp32, which the caller rounds once; ``acc`` in fp32, ``at`` its coordinates."""
        x = self.product(acc, at, operands)
        if operands.mC is not None:
            x = x + operands.beta * at.elements(operands.mC)
        if operands.mBias is not None:
            x = x + at.columns(operands.mBias)
        if at.gated:
            gate, up = at.halves(x)
            if operands.clamp is not None:
                return clamped_gate(Registers, gate, up, *operands.clamp)
            return self.activation.apply(gate) * up
        return self.activation.apply(x)


def is_shared(t: cute.Tensor) -> bool:
    """Whether ``t`` lies in shared memory, where a vector has the values of a tile alone."""
    return t.memspace == cute.AddressSpace.smem


@dataclass(frozen=True)
class FragmentCoordinates:
    """Coordinates of a thread's accumulators ((2, 2), MMA_M, MMA_N), as m16n8 MMAs hold them.

    Rows r and r + 8 of each 16 are a thread's, and two neighbours of each 8 columns; so a vector along either has two
    values for each repeat, each loaded once.
    """

    tCcD: cute.Tensor  # coordinates in out, or in out's transpose
    extents: tuple  # of those
    out_columns: int = 1  # the mode that counts out's columns; 0 where the product is transposed
    origin: tuple = (0, 0)  # of the tile
    staged: cute.Tensor | None = None  # C in shared memory, as the accumulators
    gated: bool = False  # rows r are gates, rows r + 8 what they multiply

    @cute.jit
    def columns(self, vector: cute.Tensor) -> cute.TensorSSA:
        return self.along(self.out_columns, vector)

    @cute.jit
    def rows(self, vector: cute.Tensor) -> cute.TensorSSA:
        return self.along(1 - self.out_columns, vector)

    def coordinate(self, of: tuple, mode: int) -> Int32:
        return of[mode]

    @cute.jit
    def along(self, mode: cutlass.Constexpr[int], vector: cute.Tensor) -> cute.TensorSSA:
        """Values for each accumulator's coordinate of ``mode``."""
        repeats = cute.size(self.tCcD, mode=[1 + mode])
        shared = const_expr(is_shared(vector))
        found = cute.make_rmem_tensor(cute.make_layout((2, repeats)), Float32)
        found.fill(0.0)
        for j in cutlass.range_constexpr(repeats):
            for v in cutlass.range_constexpr(2):
                at = self.coordinate(self.tCcD[(v, 0), 0, j] if mode == 1 else self.tCcD[(0, v), j, 0], mode)
                if const_expr(shared):
                    found[v, j] = vector[at - self.origin[mode]].to(Float32)
                else:
                    if at < self.extents[mode]:
                        found[v, j] = vector[at].to(Float32)
        shape = ((2, 2), cute.size(self.tCcD, mode=[1]), cute.size(self.tCcD, mode=[2]))
        stride = ((1, 0), 0, 2) if mode == 1 else ((0, 1), 2, 0)
        return cute.make_tensor(found.iterator, cute.make_layout(shape, stride=stride)).load()

    @cute.jit
    def elements(self, mC: cute.Tensor) -> cute.TensorSSA:
        """C from shared memory, or each element that exists from global memory."""
        rC = cute.make_rmem_tensor(self.tCcD.shape, mC.element_type)
        if const_expr(self.staged is not None):
            cute.autovec_copy(self.staged, rC)
        else:
            rC.fill(0.0)
            for i in cutlass.range_constexpr(cute.size(self.tCcD)):
                if cute.elem_less(self.tCcD[i], self.extents):
                    rC[i] = mC[self.tCcD[i]]
        return rC.load().to(Float32)

    @cute.jit
    def halves(self, x: cute.TensorSSA) -> tuple[cute.TensorSSA, cute.TensorSSA]:
        """Gates and what they multiply, (2, MMA_M, MMA_N) each."""
        rX = cute.make_rmem_tensor(self.tCcD.shape, Float32)
        rX.store(x)
        return rX[(None, 0), None, None].load(), rX[(None, 1), None, None].load()
