"""Sums of one m16 tile whose keys the CTAs of a cluster share: each CTA adds up its own groups of columns."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from cutekernels.kernels.cute.parts.attention_smem import DecodeSmem
from cutekernels.kernels.cute.parts.softmax import NO_REFERENCE

STATISTICS_BYTES = DecodeSmem.STATISTICS_BYTES
GROUP_BYTES = DecodeSmem.GROUP_BYTES


@dataclass(frozen=True)
class ClusterRows:
    """The exchange of a decode tile. CTA ``rank`` owns the groups of 8 columns ``rank, rank + ctas, ...``.

    Stores arrive on the receiver's barrier, as in the specialized GEMM (docs/notes/gemm.md#clusters). An inbox has one
    place for each CTA: references and totals of 16 rows, then the owned groups, four sums of each lane. Sources are
    added in their order, so the bits are the same every time.
    """

    smem: DecodeSmem
    eighths: int

    @property
    def ctas(self) -> int:
        return self.smem.meeting

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
            cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        cute.arch.cluster_arrive_relaxed()
        return full

    @cute.jit
    def expect(self, tid: Int32, rank: Int32, sources: Int32, full: cute.Pointer):
        """Says how much ``sources`` CTAs send to this one, and waits until all have set up their barriers.

        Bytes may arrive before they are expected: the barrier's phase waits for this arrival too.
        """
        if tid == 0:
            groups = (self.eighths - rank + self.ctas - 1) // self.ctas
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
        self, warp: Int32, lane: Int32, rank: Int32, sums: cute.Tensor, reference: cute.Tensor, total: cute.Tensor,
        storage: cute.Pointer, full: cute.Pointer,
    ):  # fmt: skip
        """Sends ``sums`` (2, 2, k), the groups ``warp + k * warps``, to their owners, and statistics to all."""
        warps, place = self.smem.warps, self.place
        bits = cute.recast_tensor(sums, Int32)
        for k in cutlass.range_constexpr(-(-self.eighths // warps)):
            group = k * warps + warp
            if group < self.eighths:
                target = place(storage, rank, STATISTICS_BYTES // 16 + group // self.ctas * 32 + lane)
                four = (bits[0, 0, k], bits[1, 0, k], bits[0, 1, k], bits[1, 1, k])
                cute.arch.store_async_dsmem(target, four, full, group % self.ctas)
        statistics = cute.make_rmem_tensor(4, Float32)
        for r in cutlass.range_constexpr(2):
            statistics[r], statistics[2 + r] = reference[r], total[r]
        mine = cute.recast_tensor(statistics, Int32)
        four = tuple([mine[i] for i in range(4)])
        if lane % 4 == 0:
            for some in cutlass.range_constexpr(0, self.ctas, warps):
                if some + warp < self.ctas:
                    cute.arch.store_async_dsmem(place(storage, rank, lane // 4), four, full, some + warp)

    @cute.jit
    def taken(self, storage: cute.Pointer, source: Int32, at: Int32) -> cute.Tensor:
        place = self.place
        four = cute.make_rmem_tensor(4, Float32)
        cute.autovec_copy(cute.make_tensor(place(storage, source, at), cute.make_layout(4)), four)
        return four

    @cute.jit
    def collect(self, warp: Int32, lane: Int32, sources: Int32, storage: cute.Pointer, full: cute.Pointer):
        """Waits, and adds up: ``(sums (2, 2, k) of the owned groups warp + k * warps, references, totals)``.

        A CTA with fewer groups than ``owned`` has garbage in the last sums, of columns that do not exist.
        """
        taken, warps = self.taken, self.smem.warps
        sums = cute.make_rmem_tensor((2, 2, self.share), Float32)
        reference, total = cute.make_rmem_tensor(2, Float32), cute.make_rmem_tensor(2, Float32)
        sums.fill(0.0)
        reference.fill(NO_REFERENCE)
        total.fill(0.0)
        cute.arch.mbarrier_wait(full, 0)
        for source in cutlass.range(sources, unroll=1):
            statistics = taken(storage, source, lane // 4)
            for r in cutlass.range_constexpr(2):
                reference[r] = cute.arch.fmax(reference[r], statistics[r])
        for source in cutlass.range(sources, unroll=1):
            statistics = taken(storage, source, lane // 4)
            weight = cute.make_rmem_tensor(2, Float32)
            for r in cutlass.range_constexpr(2):
                weight[r] = cute.math.exp2(statistics[r] - reference[r], fastmath=True)
                total[r] = total[r] + weight[r] * statistics[2 + r]
            for k in cutlass.range_constexpr(self.share):
                at = k * warps + warp
                if at < self.owned:
                    four = taken(storage, source, STATISTICS_BYTES // 16 + at * 32 + lane)
                    for r in cutlass.range_constexpr(2):
                        for c in cutlass.range_constexpr(2):
                            sums[c, r, k] = sums[c, r, k] + weight[r] * four[2 * r + c]
        return sums, reference, total
