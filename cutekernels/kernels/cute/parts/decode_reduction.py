"""Partial accumulators of an m16 tile whose keys the CTAs of a cluster share, added up through shared memory.

Every CTA owns some groups of 8 columns: each CTA sends each of the others, and itself, those that the receiver owns,
and all CTAs the references and totals of the 16 rows.

Barriers:
    One mbarrier in each CTA, one phase: one arrival (thread 0 announces the bytes that all sources send here), then the
    bytes. Bytes may arrive before they are announced: the phase waits for the arrival too.
    The cluster's barrier: all threads arrive once their CTA's mbarrier is set up, and wait before anybody sends.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from cutekernels.kernels.cute.parts.attention_smem import DecodeSmem
from cutekernels.kernels.cute.parts.softmax import NO_REFERENCE, RowStates

STATISTICS_BYTES = DecodeSmem.STATISTICS_BYTES
GROUP_BYTES = DecodeSmem.GROUP_BYTES


@dataclass(frozen=True)
class DecodeReduction:
    """The exchange of a decode tile. CTA ``rank`` owns the groups of 8 columns ``rank, rank + ctas, ...``.

    Stores arrive on the receiver's barrier, as in skinny_warpgroup's (docs/notes/gemm.md#clusters). An inbox has one
    place for each CTA: references and totals of 16 rows, then the owned groups, four accumulators of each lane. Sources
    are added in their order, so the bits are the same every time.
    """

    smem: DecodeSmem
    n8_groups: int  # of the tile

    @property
    def ctas(self) -> int:
        return self.smem.clustered

    @property
    def owned(self) -> int:
        """Groups that a CTA owns, at most."""
        return self.smem.owned

    @property
    def share(self) -> int:
        """Groups that a warp adds up, at most."""
        return -(-self.owned // self.smem.warps)

    @cute.jit
    def init(self, warp: Int32, storage: cute.Pointer) -> cute.Pointer:
        """Sets up the barrier, and tells the cluster."""
        full = cute.recast_ptr(storage + self.smem.flag_at, dtype=Int64)
        if warp == 0:
            with cute.arch.elect_one():
                cute.arch.mbarrier_init(full, 1)
            # Visible to the cluster's other CTAs, which store onto it,
            cute.arch.mbarrier_init_fence()
        # and initialized before any thread of this CTA goes on.
        cute.arch.sync_threads()
        # This CTA's barrier is ready; announce() waits for all CTAs'.
        cute.arch.cluster_arrive_relaxed()
        return full

    @cute.jit
    def announce(self, tid: Int32, rank: Int32, sources: Int32, full: cute.Pointer):
        """Says how many bytes ``sources`` CTAs send to this one, and waits until all have set up their barriers."""
        if tid == 0:
            groups = (self.n8_groups - rank + self.ctas - 1) // self.ctas
            cute.arch.mbarrier_arrive_and_expect_tx(full, sources * (STATISTICS_BYTES + groups * GROUP_BYTES))
        cute.arch.cluster_wait()

    @cute.jit
    def place(self, storage: cute.Pointer, source: Int32, at: Int32) -> cute.Pointer:
        """A pointer to four fp32 of the inbox: number ``at`` of those in the place of CTA ``source``."""
        each = const_expr(STATISTICS_BYTES + self.owned * GROUP_BYTES)
        inbox = cute.recast_ptr(storage + self.smem.inbox_at, dtype=Float32)
        return (inbox + (source * (each // 4) + at * 4)).align(16)

    @cute.jit
    def send(
        self,
        thread: tuple[Int32, Int32],  # warp, lane
        rank: Int32,
        acc: cute.Tensor,
        states: RowStates,
        storage: cute.Pointer,
        full: cute.Pointer,
    ):
        """Sends ``acc`` (2, 2, k), the groups ``warp + k * warps``, to their owners, and statistics to all."""
        warp, lane = thread
        warps = self.smem.warps
        bits = cute.recast_tensor(acc, Int32)
        for k in cutlass.range_constexpr(-(-self.n8_groups // warps)):
            group = k * warps + warp
            if group < self.n8_groups:
                target = self.place(storage, rank, STATISTICS_BYTES // 16 + group // self.ctas * 32 + lane)
                four = (bits[0, 0, k], bits[1, 0, k], bits[0, 1, k], bits[1, 1, k])
                cute.arch.store_async_dsmem(target, four, full, group % self.ctas)
        statistics = cute.make_rmem_tensor(4, Float32)
        for r in cutlass.range_constexpr(2):
            statistics[r], statistics[2 + r] = states.reference[r], states.total[r]
        mine = cute.recast_tensor(statistics, Int32)
        four = tuple([mine[i] for i in range(4)])
        # One lane of the four that share two rows; the warps divide the receivers.
        if lane % 4 == 0:
            for some in cutlass.range_constexpr(0, self.ctas, warps):
                if some + warp < self.ctas:
                    cute.arch.store_async_dsmem(self.place(storage, rank, lane // 4), four, full, some + warp)

    @cute.jit
    def receive(self, storage: cute.Pointer, source: Int32, at: Int32) -> cute.Tensor:
        """Four numbers from CTA ``source``, in registers."""
        four = cute.make_rmem_tensor(4, Float32)
        cute.autovec_copy(cute.make_tensor(self.place(storage, source, at), cute.make_layout(4)), four)
        return four

    @cute.jit
    def collect(
        self, warp: Int32, lane: Int32, sources: Int32, storage: cute.Pointer, full: cute.Pointer
    ) -> tuple[cute.Tensor, RowStates]:
        """Adds up what ``sources`` CTAs send: ``(2, 2, k)`` of the owned groups ``warp + k * warps``, and row states.

        A CTA with fewer groups than ``owned`` has garbage in the last accumulators, of columns that do not exist.
        """
        warps = self.smem.warps
        acc = cute.make_rmem_tensor((2, 2, self.share), Float32)
        states = RowStates(cute.make_rmem_tensor(2, Float32), cute.make_rmem_tensor(2, Float32))
        acc.fill(0.0)
        states.reference.fill(NO_REFERENCE)
        states.total.fill(0.0)
        # Every thread waits for the messages of all sources.
        cute.arch.mbarrier_wait(full, 0)
        # The greatest reference of each row, then the parts relative to it.
        for source in cutlass.range(sources, unroll=1):
            statistics = self.receive(storage, source, lane // 4)
            for r in cutlass.range_constexpr(2):
                states.reference[r] = cute.arch.fmax(states.reference[r], statistics[r])
        for source in cutlass.range(sources, unroll=1):
            statistics = self.receive(storage, source, lane // 4)
            weight = cute.make_rmem_tensor(2, Float32)
            for r in cutlass.range_constexpr(2):
                weight[r] = cute.math.exp2(statistics[r] - states.reference[r], fastmath=True)
                states.total[r] = states.total[r] + weight[r] * statistics[2 + r]
            for k in cutlass.range_constexpr(self.share):
                at = k * warps + warp
                if at < self.owned:
                    four = self.receive(storage, source, STATISTICS_BYTES // 16 + at * 32 + lane)
                    for r in cutlass.range_constexpr(2):
                        for c in cutlass.range_constexpr(2):
                            acc[c, r, k] = acc[c, r, k] + weight[r] * four[2 * r + c]
        return acc, states
