"""A pipeline of shared-memory stages between the warp that loads by TMA and the warp groups that multiply."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr


@dataclass(frozen=True)
class Position:
    """A stage of a pipeline and the phase of its barriers; the same ring may be walked at several positions."""

    stage: Int32
    phase: Int32


@dataclass(frozen=True)
class StagePipeline:
    """``stages`` buffers with two barriers each: full (bytes have landed) and empty (readers are done).

    A position is ``(stage, phase)``. The producer begins at phase 1, which a fresh barrier counts as complete, readers
    at phase 0. With ``ctas`` in a cluster that multicast to each other, a stage is empty when all their readers say so.
    """

    stages: int
    stage_bytes: int
    readers: int  # groups that read a stage, of one CTA
    ctas: int  # of the cluster

    @cute.jit
    def init(self, full: cute.Pointer, empty: cute.Pointer):
        """Initialize the barriers; one thread's work."""
        for stage in cutlass.range_constexpr(self.stages):
            cute.arch.mbarrier_init(full + stage, 1)
            cute.arch.mbarrier_init(empty + stage, self.readers * self.ctas)

    @cute.jit
    def advance(self, stage: Int32, phase: Int32) -> tuple[Int32, Int32]:
        """The next position."""
        stage = stage + 1
        if stage == self.stages:
            stage = Int32(0)
            phase = phase ^ 1
        return stage, phase

    @cute.jit
    def skip(self, stage: Int32, phase: Int32, count: Int32) -> tuple[Int32, Int32]:
        """The position ``count`` stages on."""
        end = stage + count
        return end % self.stages, phase ^ ((end // self.stages) & 1)

    @cute.jit
    def next(self, at: Position) -> Position:
        """The position behind ``at``; the phase changes where the ring begins anew."""
        stage, phase = at.stage + 1, at.phase
        if stage == self.stages:
            stage = Int32(0)
            phase = phase ^ 1
        return Position(stage, phase)

    @cute.jit
    def after(self, at: Position, count: Int32) -> Position:
        """The position ``count`` stages behind ``at``, for a reader that passes stages over."""
        end = at.stage + count
        return Position(end % self.stages, at.phase ^ ((end // self.stages) & 1))

    @cute.jit
    def acquire(self, full: cute.Pointer, empty: cute.Pointer, stage: Int32, phase: Int32):
        """Wait until ``stage`` is empty, and announce its bytes; a whole warp's work."""
        cute.arch.mbarrier_wait(empty + stage, phase)
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(full + stage, self.stage_bytes)

    @cute.jit
    def release(self, member: Int32, empty: cute.Pointer, stage: Int32, ready: cutlass.Boolean):
        """Say that the group of thread ``member`` (0 to 127) has read ``stage``, if it is ``ready``."""
        if const_expr(self.ctas == 1):
            if ready and member == 0:
                cute.arch.mbarrier_arrive(empty + stage)
        elif ready and member < self.ctas:
            cute.arch.mbarrier_arrive(empty + stage, member)
