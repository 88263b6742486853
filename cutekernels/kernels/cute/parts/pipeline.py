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


@cute.jit
def next_stage(stage: Int32, stages: cutlass.Constexpr[int]) -> Int32:
    """The stage behind ``stage`` in a ring of so many."""
    stage = stage + 1
    if stage == stages:
        stage = Int32(0)
    return stage


@dataclass(frozen=True)
class StagePipeline:
    """``stages`` buffers with two mbarriers each: full (bytes have landed) and empty (readers are done).

    full[stage]: 1 arrival, the producer's with the stage's bytes; the TMA completes it. Readers wait on it.
    empty[stage]: 1 arrival of each reader, in all ``ctas`` of a cluster that multicast to each other. The producer
    waits.
    The producer begins at phase 1, which a fresh barrier counts as complete, readers at phase 0.
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
        # The producer waits for the readers of what lay in the stage; the first time around this passes at once.
        cute.arch.mbarrier_wait(empty + stage, phase)
        with cute.arch.elect_one():
            # The readers wait for this arrival and for so many bytes.
            cute.arch.mbarrier_arrive_and_expect_tx(full + stage, self.stage_bytes)

    @cute.jit
    def release(self, thread: Int32, empty: cute.Pointer, stage: Int32, ready: cutlass.Boolean):
        """Say that the group of ``thread`` (0 to 127) has read ``stage``, if it is ``ready``."""
        if const_expr(self.ctas == 1):
            if ready and thread == 0:
                cute.arch.mbarrier_arrive(empty + stage)
        elif ready and thread < self.ctas:
            # One thread for each CTA of the cluster, whose producers all write to this CTA's stage.
            cute.arch.mbarrier_arrive(empty + stage, thread)
