"""Rows of one attention head between global and shared memory, 16 bytes a thread; only shared memory pads head dims.

Nothing here waits: :meth:`HeadRows.fetch` starts cp.async copies, which the caller commits, waits for and makes visible
by a barrier.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int16, Int32, Int64, const_expr
from cutlass.cute.nvgpu import cpasync

from cutekernels.kernels.cute.parts.fragments import span_bytes, swizzled
from cutekernels.kernels.cute.parts.load import OperandLoad

WIDEST = 8  # elements in 16 bytes


@dataclass(frozen=True)
class SwizzledRows:
    """``stages`` swizzled buffers of tiles ``(rows, padded)``; rows in global memory have ``head_dim`` elements."""

    rows: int
    head_dim: int
    padded: int
    stages: int

    @property
    def copying(self) -> int:
        """Threads that copy a tile together."""
        raise NotImplementedError

    @property
    def along(self) -> int:
        """Threads side by side in a row: the vectors of a swizzle pattern."""
        return span_bytes(self.padded) // 16

    @property
    def across(self) -> int:
        return self.copying // self.along

    def smem_layout(self, dtype: type[cutlass.Numeric]) -> cute.ComposedLayout:
        """``(rows, padded, STAGE)``."""
        return OperandLoad(self.rows, self.padded, self.stages, self.copying, True, WIDEST).smem_layout(dtype)

    @cute.jit
    def address(self, tid: Int32, base: cute.Pointer) -> Int32:
        """The address of this thread's first vector in the buffer at ``base``."""
        return swizzled(base.toint().to(Int32) + tid * 16, span_bytes(self.padded))

    def ragged(self, column: int) -> bool:
        """Whether vectors from ``column`` on may lie beyond the head."""
        return column + self.along * WIDEST > self.head_dim


@dataclass(frozen=True)
class HeadRows(SwizzledRows):
    """Tiles copied by ``threads``.

    A head is a pointer to its first row and a stride between rows (elements). The pointer is 64 bits wide and moves by
    whole tiles; within a tile, offsets have 32. A thread's rows are multiples of 8 apart, so that one address in shared
    memory leads to all its vectors by constant offsets (see ``parts/fragments.py``).
    """

    threads: int

    @property
    def copying(self) -> int:
        return self.threads

    def vectors(self) -> list[tuple[int, int, int]]:
        """This thread's vectors, relative to its first: ``(row, column, offset in the buffer in bytes)``."""
        # A swizzle pattern of columns is a block of all rows; patterns follow one another.
        span = span_bytes(self.padded)
        return [
            (i, j * self.along * WIDEST, (j * self.rows + i) * span)
            for j in range(self.padded // (self.along * WIDEST))
            for i in range(0, self.rows, self.across)
        ]

    @cute.jit
    def fetch(self, tid: Int32, head: cute.Pointer, stride: Int32, row: Int32, address: Int32, rows: Int32 | None):
        """Starts the copy of the tile at ``row`` into the buffer of ``address``.

        The first ``rows`` rows of the tile exist (None: all do); the others become zeros.
        """
        dtype = head.dtype
        atom = cute.make_copy_atom(cpasync.CopyG2SOp(cpasync.LoadCacheMode.GLOBAL), dtype, num_bits_per_copy=128)
        own, column = tid // self.along, tid % self.along * WIDEST
        source = head + (Int64(row + own) * Int64(stride) + column)
        for i, j, offset in self.vectors():
            gX, sX = vector(source + (i * stride + j)), shared_vector(dtype, address + offset)
            # A row that does not exist is zeros; columns beyond the head are left to clear_padding.
            if const_expr(rows is not None):
                if own + i < rows:
                    if const_expr(self.ragged(j)):
                        if column + j < self.head_dim:
                            cute.copy(atom, gX, sX)
                    else:
                        cute.copy(atom, gX, sX)
                else:
                    sX.fill(0.0)
            elif const_expr(self.ragged(j)):
                if column + j < self.head_dim:
                    cute.copy(atom, gX, sX)
            else:
                cute.copy(atom, gX, sX)

    @cute.jit
    def clear_padding(self, tid: Int32, dtype: cutlass.Constexpr, address: Int32):
        """Zeros the columns of a buffer that no copy fills."""
        column = tid % self.along * WIDEST
        for _, j, offset in self.vectors():
            if const_expr(self.ragged(j)):
                beyond = column + j >= self.head_dim
                if beyond:
                    shared_vector(dtype, address + offset).fill(0.0)

    @cute.jit
    def clear_rows(self, tid: Int32, address: Int32, rows: Int32, first: Int32 | None = None):
        """Zeros a buffer's rows from ``rows`` on, and those before ``first``."""
        # Zeros of 16 bits have the same bits in all types.
        own = tid // self.along
        for i, _, offset in self.vectors():
            dead = own + i >= rows
            if const_expr(self.rows % self.across):  # the last step reaches beyond the buffer
                dead = dead and own + i < self.rows
            if const_expr(first is not None):
                dead = dead or own + i < first
            if dead:
                shared_vector(Int16, address + offset).fill(0)

    @cute.jit
    def store(self, tid: Int32, head: cute.Pointer, stride: Int32, row: Int32, address: Int32, rows: Int32):
        """Copies the first ``rows`` rows of the buffer of ``address`` to the tile at ``row``."""
        dtype = head.dtype
        own, column = tid // self.along, tid % self.along * WIDEST
        target = head + (Int64(row + own) * Int64(stride) + column)
        for i, j, offset in self.vectors():
            if own + i < rows and column + j < self.head_dim:
                cute.autovec_copy(shared_vector(dtype, address + offset), vector(target + (i * stride + j)))


def vector(pointer: cute.Pointer) -> cute.Tensor:
    return cute.make_tensor(pointer.align(16), cute.make_layout(WIDEST))


def shared_vector(dtype: type[cutlass.Numeric], address: Int32) -> cute.Tensor:
    pointer = cute.make_ptr(dtype, address, cute.AddressSpace.smem, assumed_align=16)
    return cute.make_tensor(pointer, cute.make_layout(WIDEST))
