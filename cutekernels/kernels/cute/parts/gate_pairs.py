"""Gates and what they multiply, of two consumer groups: one has 64 rows of gates, the other the rows of up.

Their threads hold a pair at the same place. The second group leaves its accumulators in shared memory, ``left`` of each
thread at a time, and goes on to the next tile; the first takes them and applies the gate.

Named barriers of 256 threads, behind those of the groups: ``TAKEN``, the first group arrives and the second waits
before it leaves; ``LEFT``, the second arrives and the first waits.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from cutekernels.kernels.cute.parts.boxes import FIRST_BARRIER
from cutekernels.kernels.cute.parts.epilogue import Epilogue, EpilogueOperands
from cutekernels.kernels.cute.parts.warp_groups import GROUP

TAKEN, LEFT = FIRST_BARRIER + 2, FIRST_BARRIER + 3


@dataclass(frozen=True)
class PairCoordinates:
    """Coordinates of eight of a thread's gates and of what they multiply, ((2, 2, 2), 2): rows are the second mode."""

    biases: cute.Tensor | None  # of rows r and r + 8, of both halves
    gated: bool = True

    def columns(self, vector: cute.Tensor) -> cute.TensorSSA:
        """Biases, which the thread has loaded."""
        layout = cute.make_layout(((2, 2, 2), 2), stride=((0, 1, 0), 2))
        return cute.make_tensor(self.biases.iterator, layout).load()

    @cute.jit
    def halves(self, x: cute.TensorSSA) -> tuple[cute.TensorSSA, cute.TensorSSA]:
        rX = cute.make_rmem_tensor(x.shape, Float32)
        rX.store(x)
        return rX[(None, None, None), 0].load(), rX[(None, None, None), 1].load()


@dataclass(frozen=True)
class GatePairs:
    """Pairs that meet ``at`` bytes from the beginning of shared memory."""

    gate: Epilogue
    at: int
    left: int

    def open(self):
        """The second group may leave its accumulators, since nobody's lie there yet; the first group's work."""
        cute.arch.barrier_arrive(barrier_id=TAKEN, number_of_threads=2 * GROUP)

    @cute.jit
    def meet(
        self,
        storage: cute.Pointer,
        thread: Int32,
        group: Int32,
        acc: cute.Tensor,
        operands: EpilogueOperands,
        biases: cute.Tensor | None,
    ):
        """The first group's ``acc`` are then results."""
        count = const_expr(cute.size(acc))
        place = cute.recast_ptr(storage + self.at, dtype=Float32)
        parts = cute.make_tensor(
            place, cute.make_layout((GROUP, self.left), stride=(1, GROUP))
        )  # (THREAD, ACCUMULATOR)
        if group == 1:
            for first in cutlass.range_constexpr(0, count, self.left):
                # The second group waits until the first has taken what lay there.
                cute.arch.barrier(barrier_id=TAKEN, number_of_threads=2 * GROUP)
                for i in cutlass.range_constexpr(self.left):
                    parts[thread, i] = acc[first + i]
                # They are in shared memory for the first group.
                cute.arch.barrier_arrive(barrier_id=LEFT, number_of_threads=2 * GROUP)
        else:
            values = cute.make_rmem_tensor(((2, 2, 2), 2), Float32)
            results = cute.make_rmem_tensor((2, 2, 2), Float32)
            for first in cutlass.range_constexpr(0, count, self.left):
                # The first group waits for the second's accumulators.
                cute.arch.barrier(barrier_id=LEFT, number_of_threads=2 * GROUP)
                for i in cutlass.range_constexpr(0, self.left, 8):
                    for j in cutlass.range_constexpr(8):
                        values[j] = acc[first + i + j]
                        values[8 + j] = parts[thread, i + j]
                    results.store(self.gate.apply(values.load(), PairCoordinates(biases), operands))
                    for j in cutlass.range_constexpr(8):
                        acc[first + i + j] = results[j]
                # All have been read: the second group may leave more.
                cute.arch.barrier_arrive(barrier_id=TAKEN, number_of_threads=2 * GROUP)
