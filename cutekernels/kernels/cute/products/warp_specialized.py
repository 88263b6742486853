"""Products whose CTAs have a producer warp and consumer warp groups: the loops of both over a source's shares.

One share, producer: ``load``, which waits for empty stages.
One share, consumer: ``begin``, ``multiply``, ``store``. In ping-pong two groups have every second share each, and
    multiply in turns: ``order[group]`` has one arrival, by thread 0 of the other group, which has issued its products.
"""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, const_expr
from cutlass.memory import SmemAllocator

from cutekernels.kernels.cute.parts.boxes import BoxBuffers, BoxOperands, Corner, ResultBoxes
from cutekernels.kernels.cute.parts.dependent import pdl_launch
from cutekernels.kernels.cute.parts.launch import Launched
from cutekernels.kernels.cute.parts.pipeline import Position, StagePipeline
from cutekernels.kernels.cute.parts.schedule import TileRing
from cutekernels.kernels.cute.parts.smem import ALIGNMENT, BoxesSmem
from cutekernels.kernels.cute.parts.tile_source import Share, TileSource
from cutekernels.kernels.cute.parts.warp_groups import GROUP, ROWS, WarpGroupBody

REGISTERS_OF_SM = 1 << 16


@dataclass(frozen=True)
class Shared:
    """Stages and mbarriers of a CTA in shared memory."""

    storage: cute.Pointer
    sR: cute.Tensor | None  # (M, K, STAGE); of a packed weight none
    sS: cute.Tensor  # (N, K, STAGE)
    full: cute.Pointer  # of each stage
    empty: cute.Pointer  # of each stage
    c_full: cute.Pointer  # of each box of each group
    order: cute.Pointer  # of each group
    ring: cute.Pointer  # of tiles that the producer finds


@dataclass(frozen=True)
class Progress:
    """Where a consumer group stands between two shares."""

    order_phase: Int32  # in ping-pong
    at: Position
    boxes_used: Int32


class WarpSpecialized(WarpGroupBody, Launched):
    """The common part of the bodies; ``cta`` is what they hand to their roles, ``consumer`` a group's state with it."""

    source: type[TileSource]
    pingpong: bool
    smem: BoxesSmem
    results: ResultBoxes
    pipeline: StagePipeline

    @property
    def readers(self) -> int:
        """Consumer groups that read a stage."""
        return 1 if self.pingpong else self.groups

    @property
    def ring(self) -> TileRing:
        """Tiles that the producer finds; each warp of the groups that share one says that it has read it."""
        return TileRing(self.smem.PLACES, 4 * self.pipeline.readers)

    def __post_init__(self) -> None:
        """Holds pipelines and arrivals against the roles: where they differ the kernel would hang."""
        producer, consumer = self.registers
        held = GROUP * (producer + self.groups * consumer) * self.ctas_per_sm
        checks = [
            (self.pingpong and self.groups != 2, f"ping-pong has two consumer groups, not {self.groups}"),
            (
                self.pipeline.readers != self.readers,
                f"empty[stage] expects {self.pipeline.readers} groups, {self.readers} read it",
            ),
            (self.pipeline.stages < 2, f"{self.pipeline.stages} stage: the producer loads one while another is read"),
            (held > REGISTERS_OF_SM, f"setmaxnreg gives out {held} registers of an SM's {REGISTERS_OF_SM}"),
        ]
        for wrong, why in checks:
            if wrong:
                raise ValueError(f"{type(self).__name__}: {why}")

    @cute.jit
    def set_up(self, warp: Int32, tmas: tuple[cute.CopyAtom, ...]) -> Shared:
        """Stages and mbarriers in the CTA's shared memory, initialized; the caller's barrier is behind it, before
        anybody touches them.
        """
        storage = SmemAllocator().allocate(self.smem.total_bytes, byte_alignment=ALIGNMENT)
        sR, sS = self.stages_at(storage)
        # Full, then empty of each stage; then c_full of each box and order of each group, where a body has those.
        full = cute.recast_ptr(storage + self.smem.barriers_at, dtype=Int64)
        c_full = full + 2 * self.smem.stages
        shared = Shared(
            storage=storage,
            sR=sR,
            sS=sS,
            full=full,
            empty=full + self.smem.stages,
            c_full=c_full,
            order=c_full + self.groups * self.smem.boxes,
            ring=cute.recast_ptr(storage + self.smem.ring_at, dtype=Int64),
        )
        if const_expr(not self.source.counted):  # noqa: SIM102  known when compiled
            if warp == 4 * self.groups:
                with cute.arch.elect_one():
                    self.ring.init(shared.ring)
        self.initialize(warp, tmas, lambda: self.init_barriers(shared))
        return shared

    @cute.jit
    def divide(self, source: Any, cta: Any, role: tuple[Int32, Int32, Int32]):
        """Each warp group to its role."""
        tid, group, warp = role
        producer = const_expr(self.groups)  # the warp group that loads
        if group == producer:
            # -- producer: one warp loads share after share, without regard to where one ends
            cute.arch.setmaxregister_decrease(self.registers[0])
            if warp == 4 * producer:
                self.produce(source, cta)
                if const_expr(self.dependent):
                    # The next kernel's set-up runs behind our last products.
                    pdl_launch()
            else:
                self.stand_by(source, cta, tid - (GROUP * producer + 32))
            self.end_producer()
        else:
            # -- consumers
            cute.arch.setmaxregister_increase(self.registers[1])
            self.consume(source, cta, tid, group)

    @cute.jit
    def buffers(self, consumer: Any) -> BoxBuffers:
        """A group's boxes and biases in shared memory, and its first row of a tile."""
        group, shared = consumer.group, consumer.cta.shared
        boxes = shared.storage + self.smem.boxes_at + group * (self.smem.boxes * self.smem.BOX_BYTES)
        bias = cute.recast_ptr(shared.storage + self.smem.biases_at + group * (self.smem.BIASES * 4), dtype=Float32)
        return BoxBuffers(
            thread=consumer.thread,
            group=group,
            boxes=boxes,
            bias=bias,
            c_full=shared.c_full + group * self.smem.boxes,
            first_row=group * ROWS if const_expr(not self.pingpong) else Int32(0),
        )

    def stand_by(self, source: Any, cta: Any, thread: Int32):
        """The work of the 96 threads of the producer's group that load nothing."""

    def end_producer(self):
        """What the producer's group owes others at its end."""

    @cute.jit
    def produce(self, source: Any, cta: Any):
        """The loads of all shares; one warp's work."""
        at = Position(Int32(0), Int32(1))  # a fresh empty barrier counts as complete at phase 1
        if const_expr(source.counted):
            for index in cutlass.range(source.first, source.count, source.step, unroll=1):
                at = self.load(cta, source, source.to_load(index), at)
        else:
            source = source.locate()
            # The walk's chunk of groups lies in the warp's registers: each lane has the ends of four.
            rHigh = cute.make_rmem_tensor(4, Int32)
            state, lead = source.start(rHigh)
            entry, tile, group = Int32(0), source.first, Int32(0)
            while group >= 0:
                state, found = source.find(rHigh, state, tile)
                group = found.group
                if group >= 0:
                    share = source.publish(entry, found)
                    at = self.load(cta, source, share, at)
                    entry, tile = entry + 1, tile + source.step
            # No more tiles, for each group that takes entries of its own.
            for i in cutlass.range_constexpr(2 if self.pingpong else 1):
                source.end(entry + i, lead, state)

    @cute.jit
    def consume(self, source: Any, cta: Any, tid: Int32, group: Int32):
        """A consumer group's shares, one after the other."""
        consumer = self.consumer(cta, tid, group)
        buffers = self.buffers(consumer)
        # In ping-pong the first group finds its order at once (phase 1 of a fresh barrier); the second waits for it.
        progress = Progress(Int32(1) - group, Position(Int32(0), Int32(0)), Int32(0))
        if const_expr(source.counted):
            first, step = source.first, source.step
            if const_expr(self.pingpong):
                # Ping-pong: every second share. The second group passes over the stages of the CTA's first.
                if group == 1:
                    progress = self.pass_over(source, first, progress)
                    first = first + step
                step = step * 2
            for index in cutlass.range(first, source.count, step, unroll=1):
                progress = self.take(source, consumer, buffers, index, source.share(index), progress)
            self.results.drain(consumer.thread)
        else:
            entry = Int32(0)
            if const_expr(self.pingpong):
                entry = group
                if group == 1:
                    progress = self.pass_over(source, entry, progress)
            # -- tile after tile, until an entry says that there is none
            tile = source.receive(entry)
            while tile.group >= 0:
                progress = self.take(source, consumer, buffers, entry, source.share(tile), progress)
                entry = entry + const_expr(2 if self.pingpong else 1)
                tile = source.receive(entry)
            # -- rows of no group, of which every CTA has a share
            self.results.drain(consumer.thread)
            self.blank(tid, source.given.mD, tile.row, tile.column)

    @cute.jit
    def take(
        self, source: Any, consumer: Any, buffers: BoxBuffers, number: Int32, share: Share, progress: Progress
    ) -> Progress:
        """One share."""
        corner = self.results.corner(buffers, share.corner)
        own = source.outputs(consumer.cta.outputs, share)
        if share.owner:
            # C's first boxes and the bias, for the one who stores.
            self.results.load_inputs(buffers, own, share.corner, corner, progress.boxes_used)
        ahead = self.read_ahead(consumer, share.corner)
        order_phase = progress.order_phase
        if const_expr(self.pingpong):
            # Wait until the other group has issued all products of its share. The first group's first wait passes.
            cute.arch.mbarrier_wait(consumer.cta.shared.order + consumer.group, order_phase)
            order_phase = order_phase ^ 1
        consumer.acc.fill(0.0)
        # All products are done when this returns: accumulators may leave.
        at = self.multiply(consumer, source.deepen(share), progress.at)
        behind = Progress(order_phase, at, progress.boxes_used)
        if const_expr(self.pingpong):
            behind = self.pass_over(source, source.following(number), behind)
        return self.store(source, consumer, (buffers, own, corner), share, ahead, behind)

    @cute.jit
    def pass_over(self, source: Any, number: Int32, progress: Progress) -> Progress:
        """Behind the stages of share ``number``, which is the other group's."""
        at = self.pipeline.after(progress.at, source.passed(number))
        return Progress(progress.order_phase, at, progress.boxes_used)

    def read_ahead(self, consumer: Any, corner: Corner) -> Any:
        """What :meth:`store` needs and is to be on its way while products run."""
        return None

    @cute.jit
    def store(
        self,
        source: Any,
        consumer: Any,
        target: tuple[BoxBuffers, BoxOperands, Corner],
        share: Share,
        ahead: Any,
        progress: Progress,
    ) -> Progress:
        """The end of a share: its results, or what its tile's owner needs of it."""
        buffers, outputs, corner = target
        boxes_used = progress.boxes_used
        if self.gather(source, consumer, share):
            self.results.store_tile(buffers, outputs, consumer.acc, corner, boxes_used)
            boxes_used = boxes_used + self.results.count
        return Progress(progress.order_phase, progress.at, boxes_used)

    def gather(self, source: Any, consumer: Any, share: Share) -> bool | Boolean:
        """Whether accumulators are the tile's whole sum, and this group's to store."""
        return share.owner
