"""A tile whose K several groups of warps, or several CTAs, have parts of: accumulators are added up, in a fixed order.

Groups of warps leave theirs in shared memory, and the first adds them up (:class:`WarpSums`). CTAs leave theirs in a
workspace, and one of them, which keeps its own, waits for the others' and adds them (:class:`TileOwner`; warp groups
each on their own: :class:`GroupParts`). Where nobody may wait for another CTA the last to arrive adds them all up
(:func:`arrive_last`).
"""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, const_expr

from cutekernels.kernels.cute.parts.boxes import FIRST_BARRIER
from cutekernels.kernels.cute.parts.ptx import count_released, load_acquired
from cutekernels.kernels.cute.parts.warp_groups import GROUP


@dataclass(frozen=True)
class WarpSums:
    """``groups`` of ``threads`` each, which have multiplied different k-blocks; ``barrier``: of them alone, if not all
    of the CTA's threads are theirs.
    """

    threads: int
    groups: int
    barrier: int = 0

    @cute.jit
    def add_up(self, storage: cute.Pointer, thread: Int32, group: Int32, acc: cute.Tensor):
        """The first group's ``acc`` is all groups' sum; for ``thread`` of ``group``, with shared memory at ``storage``
        that nobody reads any more.
        """
        left = parts_at(cute.recast_ptr(storage, dtype=Float32), self.threads, acc, self.groups - 1)
        if group > 0:
            leave(acc, left, thread, group - 1)
        # The first group waits until all others have left theirs.
        if const_expr(self.barrier == 0):
            cute.arch.sync_threads()
        else:
            cute.arch.barrier(barrier_id=self.barrier, number_of_threads=self.threads * self.groups)
        if group == 0:
            for s in cutlass.range_constexpr(self.groups - 1):
                add_part(acc, left, thread, s)


VECTOR = 4  # accumulators in 16 bytes


def parts_at(at: cute.Pointer, threads: int, acc: cute.Tensor, parts: int) -> cute.Tensor:
    """``parts`` of a tile from ``at`` on, (THREAD, (4, ACCUMULATORS / 4), PART): 16 bytes of a thread lie together."""
    count = cute.size(acc)
    shape, stride = (threads, (VECTOR, count // VECTOR), parts), (VECTOR, (1, VECTOR * threads), threads * count)
    return cute.make_tensor(at.align(16), cute.make_layout(shape, stride=stride))


@cute.jit
def leave(acc: cute.Tensor, parts: cute.Tensor, thread: Int32, number: Int32):
    """A thread's accumulators to part ``number``."""
    own = cute.make_tensor(acc.iterator, cute.make_layout((VECTOR, cute.size(acc) // VECTOR)))
    cute.autovec_copy(own, parts[thread, None, number])


@cute.jit
def add_part(acc: cute.Tensor, parts: cute.Tensor, thread: Int32, number: Int32):
    """``acc`` plus part ``number``."""
    theirs = cute.make_rmem_tensor(VECTOR, Float32)
    for i in cutlass.range_constexpr(cute.size(acc) // VECTOR):
        cute.autovec_copy(parts[thread, (None, i), number], theirs)
        for v in cutlass.range_constexpr(VECTOR):
            acc[VECTOR * i + v] = acc[VECTOR * i + v] + theirs[v]


@cute.jit
def add_parts(acc: cute.Tensor, parts: cute.Tensor, thread: Int32, begin: Int32, end: Int32):
    """``acc`` plus parts ``begin`` to ``end - 1``, in this order; several are on their way at once, if it is small."""
    for number in cutlass.range(begin, end, unroll=4 if cute.size(acc) <= 32 else 1):
        add_part(acc, parts, thread, number)


@dataclass(frozen=True)
class Workspace:
    """Partial results of CTAs that share a tile, for the one that adds them up; None where none do."""

    mPartials: cute.Tensor | None = None
    mCounters: cute.Tensor | None = None  # zero before and after


@cute.jit
def arrive_last(ticket: cute.Pointer, flag: cute.Pointer, thread: Int32, ctas: Int32) -> Boolean:
    """Whether this CTA is the last of the ``ctas`` of a tile; for all threads, which have left what that one reads.

    ``ticket``: in global memory, zero before and after. ``flag``: a word of shared memory.
    """
    number = cute.make_tensor(flag, cute.make_layout(1))
    # All threads' parts, written before the barrier, become visible to the GPU with thread 0's ticket.
    cute.arch.sync_threads()
    if thread == 0:
        cute.arch.fence_acq_rel_gpu()
        number[0] = cute.arch.atomic_add(ticket, Int32(1), sem="acq_rel", scope="gpu")
    # All threads wait for the ticket.
    cute.arch.sync_threads()
    last = number[0] == ctas - 1
    if last:
        # All others' parts, released before their tickets, are visible from here on.
        cute.arch.fence_acq_rel_gpu()
        if thread == 0:
            cute.make_tensor(ticket, cute.make_layout(1))[0] = Int32(0)  # for the next launch
    return last


@dataclass(frozen=True)
class TileOwner:
    """One CTA of a tile, its owner, waits for all others, and adds what they have left to its own part (stream-K's
    fixup).

    It waits for CTAs of lower numbers alone, none of which waits before it has left its part. GPUs start CTAs in the
    order of their numbers, so these run or have run, whatever else the GPU is busy with. CUDA does not promise that
    order; decoupled look-back (CUB's scans) stands on it too.

    For all threads of a CTA, or those of a consumer warp ``group``, which have a barrier of their own.
    """

    group: Int32 | None = None

    @cute.jit
    def meet(self):
        """The threads wait for one another."""
        if const_expr(self.group is None):
            cute.arch.sync_threads()
        else:
            cute.arch.barrier(barrier_id=FIRST_BARRIER + self.group, number_of_threads=GROUP)

    @cute.jit
    def run(self) -> Int32:
        """The number of this CTA's run of work: the last CTA has the first, so an owner waits for later runs."""
        cta, _, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        return ctas - 1 - cta

    @cute.jit
    def post(self, counter: cute.Pointer, thread: Int32):
        """Counts this CTA, whose threads have left their parts; for all threads."""
        self.meet()
        if thread == 0:
            # All threads' parts, written before the barrier, become visible to the GPU with this count.
            count_released(counter.toint())

    @cute.jit
    def wait(self, counter: cute.Pointer, thread: Int32, others: Int32):
        """Waits until so many have left their parts; for all threads."""
        if thread == 0:
            seen = Int32(0)
            while seen < others:
                seen = load_acquired(counter.toint())
            cute.make_tensor(counter, cute.make_layout(1))[0] = Int32(0)  # for the next launch
        # All threads see what thread 0 has acquired.
        self.meet()


@dataclass(frozen=True)
class GroupParts:
    """Parts of tiles of ``groups`` consumer warp groups, each on its own, in a workspace: of a thread ``count``
    accumulators. Parts have numbers, by CTAs or by their runs.
    """

    groups: int
    count: int

    @cute.jit
    def leave(self, workspace: Workspace, consumer: Any, number: Int32):
        """Leaves a group's accumulators as part ``number``; the caller posts it."""
        parts, thread = self.parts(workspace), consumer.thread + consumer.group * GROUP
        for i in cutlass.range_constexpr(self.count // VECTOR):
            own = cute.make_tensor(consumer.acc.iterator + VECTOR * i, cute.make_layout(VECTOR))
            cute.autovec_copy(own, parts[None, thread, i, number])

    @cute.jit
    def add(self, workspace: Workspace, consumer: Any, numbers: tuple[Int32, int], others: Int32):
        """A group's accumulators plus so many ``others``, for which the caller has waited: from the first of
        ``numbers`` on, the second further each.
        """
        parts, thread, acc = self.parts(workspace), consumer.thread + consumer.group * GROUP, consumer.acc
        first, step = numbers
        loaded = cute.make_rmem_tensor(VECTOR, Float32)
        for other in cutlass.range(others, unroll=1):
            for i in cutlass.range_constexpr(self.count // VECTOR):
                cute.autovec_copy(parts[None, thread, i, first + other * step], loaded)
                for v in cutlass.range_constexpr(VECTOR):
                    acc[VECTOR * i + v] = acc[VECTOR * i + v] + loaded[v]

    def parts(self, workspace: Workspace) -> cute.Tensor:
        """All parts, (VECTOR, THREAD, ACCUMULATOR / VECTOR, NUMBER)."""
        threads = GROUP * self.groups
        shape = (VECTOR, threads, self.count // VECTOR, 1 << 12)
        layout = cute.make_layout(shape, stride=(1, VECTOR, VECTOR * threads, threads * self.count))
        return cute.make_tensor(workspace.mPartials.iterator, layout)

    def counter(self, workspace: Workspace, consumer: Any, tile: Int32) -> cute.Pointer:
        """The counter of a group's parts of ``tile``."""
        return workspace.mCounters.iterator + (tile * self.groups + consumer.group)


@dataclass(frozen=True)
class ClusterSums:
    """The ``ctas`` of a cluster have a part of a tile's K each; the first ``owners`` add up equal shares of its sums.

    Each sends every owner its accumulators of that one's columns, through shared memory there. The stores arrive on the
    owner's mbarrier, which has one arrival and one phase: a CTA has one tile. An owner adds in a fixed order, so the
    result is the same each time.
    """

    ctas: int
    owners: int
    threads: int  # of a group, which has an inbox and a barrier of its own
    count: int  # accumulators of a thread

    @property
    def share(self) -> int:
        """Accumulators of a thread that an owner adds up."""
        return self.count // self.owners

    @property
    def received(self) -> int:
        """Accumulators that a thread receives."""
        return (self.ctas - 1) * self.share

    @cute.jit
    def send(self, acc: cute.Tensor, inbox: cute.Pointer, full: cute.Pointer, thread: Int32, rank: Int32):
        """Sends the owners their columns; behind the wait for the cluster, whose barriers are initialized then."""
        bits = cute.recast_tensor(acc, Int32)
        for owner in cutlass.range_constexpr(self.owners):
            if rank != owner:
                # As seen from there, this CTA is so many behind it.
                slot = (rank + const_expr(self.ctas - 1 - owner)) % self.ctas
                for i in cutlass.range_constexpr(0, self.share, VECTOR):
                    four = tuple([bits[owner * self.share + i + j] for j in range(VECTOR)])
                    cute.arch.store_async_dsmem(self.place(inbox, thread, slot, i), four, full, owner)

    @cute.jit
    def add_up(self, acc: cute.Tensor, inbox: cute.Pointer, full: cute.Pointer, thread: Int32, rank: Int32):
        """The first of ``acc`` = an owner's columns of it plus what the others send; for all threads of a group."""
        if thread == 0:
            cute.arch.mbarrier_arrive_and_expect_tx(full, const_expr(4 * self.threads * self.received))
        for owner in cutlass.range_constexpr(1, self.owners):
            if rank == owner:
                for i in cutlass.range_constexpr(self.share):
                    acc[i] = acc[owner * self.share + i]
        # Wait for all that the other CTAs send to this one's group.
        cute.arch.mbarrier_wait(full, 0)
        theirs = cute.make_rmem_tensor(VECTOR, Float32)
        for slot in cutlass.range_constexpr(self.ctas - 1):
            for i in cutlass.range_constexpr(0, self.share, VECTOR):
                left = self.place(inbox, thread, slot, i)
                cute.autovec_copy(cute.make_tensor(left, cute.make_layout(VECTOR)), theirs)
                for j in cutlass.range_constexpr(VECTOR):
                    acc[i + j] = acc[i + j] + theirs[j]

    @cute.jit
    def place(self, inbox: cute.Pointer, thread: Int32, slot: Int32 | int, i: cutlass.Constexpr[int]) -> cute.Pointer:
        """A thread's accumulators ``i`` to ``i + 4`` from the CTA that is ``slot + 1`` behind this one."""
        return (inbox + self.threads * (self.share * slot + i) + VECTOR * thread).align(16)
