"""Sums of a tile whose keys the CTAs of a cluster split among them: each CTA adds up its own columns of all parts."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from cutekernels.kernels.cute.parts.attention_smem import WarpgroupAttentionSmem
from cutekernels.kernels.cute.parts.groups import THREADS
from cutekernels.kernels.cute.parts.softmax import LN_2, NO_REFERENCE, quad_sum


@dataclass(frozen=True)
class ClusterSums:
    """The exchange of a group's 64 rows. Thread ``member`` of each CTA holds the same rows and columns of its part.

    Stores arrive on the receiver's barrier, as in the specialized GEMM (docs/notes/gemm.md#clusters). A CTA's inbox has
    the parts of all CTAs, its own too, which are added in the order of the CTAs: the same bits every time.
    """

    smem: WarpgroupAttentionSmem
    padded: int
    head_dim: int

    @property
    def ctas(self) -> int:
        return self.smem.split

    @property
    def vectors(self) -> int:
        """Blocks of 8 columns that a CTA adds up: four sums of each thread, 16 bytes."""
        return self.padded // 8 // self.ctas

    @cute.jit
    def blocks(self, rank: Int32, first: Int32, open_: Int32, closed: Int32, end: Int32):
        """The share of CTA ``rank`` in the blocks of keys."""
        count = end - first
        begin, end = first + rank * count // self.ctas, first + (rank + 1) * count // self.ctas
        open_ = cutlass.min(cutlass.max(open_, begin), end)
        closed = cutlass.min(cutlass.max(closed, begin), end)
        return begin, open_, closed, end

    @cute.jit
    def inbox(self, storage: cute.Pointer, group: Int32, source: Int32, vector: int, member: Int32) -> cute.Pointer:
        """Four numbers of a thread from CTA ``source``: statistics (``vector`` 0), or the sums of one block."""
        at = ((group * self.ctas + source) * (1 + self.vectors) + vector) * THREADS + member
        return cute.recast_ptr(storage + self.smem.inbox_at, dtype=Float32).align(16) + 4 * at

    @cute.jit
    def init(self, full: cute.Pointer):
        """Initialize the groups' barriers; one thread's work."""
        for group in cutlass.range_constexpr(self.smem.groups):
            cute.arch.mbarrier_init(full + group, 1)

    @cute.jit
    def send(
        self, member: Int32, group: Int32, rank: Int32, acc: cute.Tensor, state: tuple, storage: cute.Pointer,
        full: cute.Pointer,
    ):  # fmt: skip
        """Sends each CTA its columns of ``acc``, and the rows' references and totals."""
        reference, total, _ = state
        statistics = cute.make_rmem_tensor(4, Float32)
        for r in cutlass.range_constexpr(2):
            statistics[r] = reference[r]
            statistics[2 + r] = quad_sum(total[r])
        bits, mine = cute.recast_tensor(acc, Int32), cute.recast_tensor(statistics, Int32)
        inbox = self.inbox
        cute.arch.cluster_wait()  # all have set up their barriers
        for part in cutlass.range_constexpr(self.ctas):
            four = tuple([mine[j] for j in range(4)])
            cute.arch.store_async_dsmem(inbox(storage, group, rank, 0, member).align(16), four, full + group, part)
            for v in cutlass.range_constexpr(self.vectors):
                four = tuple([bits[4 * (part * self.vectors + v) + j] for j in range(4)])
                target = inbox(storage, group, rank, 1 + v, member).align(16)
                cute.arch.store_async_dsmem(target, four, full + group, part)

    @cute.jit
    def taken(self, storage: cute.Pointer, group: Int32, source: int, vector: int, member: Int32) -> cute.Tensor:
        inbox = self.inbox
        four = cute.make_rmem_tensor(4, Float32)
        left = inbox(storage, group, Int32(source), vector, member).align(16)
        cute.autovec_copy(cute.make_tensor(left, cute.make_layout(4)), four)
        return four

    @cute.jit
    def deliver(
        self, member: Int32, group: Int32, rank: Int32, rows: tuple, mLse: cute.Tensor | None, acc: cute.Tensor,
        state: tuple, storage: cute.Pointer,
    ):  # fmt: skip
        """Adds up, divides, rounds and stores this CTA's columns; CTA 0 stores the rows' log-sum-exp.

        ``rows``: the first row of out, the stride of rows, rows that exist, and the place of the first one's lse.
        """
        o_head, o_stride, alive, lse_at = rows
        full = cute.recast_ptr(storage + self.smem.inbox_barriers_at, dtype=Int64)
        send, taken = self.send, self.taken
        if member == 0:
            bytes_ = const_expr(16 * THREADS * self.ctas * (1 + self.vectors))
            cute.arch.mbarrier_arrive_and_expect_tx(full + group, bytes_)
        send(member, group, rank, acc, state, storage, full)
        cute.arch.mbarrier_wait(full + group, 0)
        weight = cute.make_rmem_tensor((2, self.ctas), Float32)
        most, whole = [cute.make_rmem_tensor(2, Float32) for _ in range(2)]
        most.fill(NO_REFERENCE)
        whole.fill(0.0)
        for source in cutlass.range_constexpr(self.ctas):
            statistics = taken(storage, group, source, 0, member)
            for r in cutlass.range_constexpr(2):
                weight[r, source] = statistics[r]
                most[r] = cute.arch.fmax(most[r], statistics[r])
        for source in cutlass.range_constexpr(self.ctas):
            statistics = taken(storage, group, source, 0, member)
            for r in cutlass.range_constexpr(2):
                weight[r, source] = cute.math.exp2(weight[r, source] - most[r], fastmath=True)
                whole[r] = whole[r] + weight[r, source] * statistics[2 + r]
        inverse, lse = [cute.make_rmem_tensor(2, Float32) for _ in range(2)]
        inverse.fill(0.0)
        lse.fill(-Float32.inf)
        for r in cutlass.range_constexpr(2):
            if whole[r] != 0.0:
                inverse[r] = 1.0 / whole[r]
                lse[r] = (most[r] + cute.math.log2(whole[r])) * LN_2
        lane = member % 32
        row = member // 32 * 16 + lane // 4
        target = o_head + Int64(row) * Int64(o_stride) + lane % 4 * 2
        for v in cutlass.range_constexpr(self.vectors):
            sums = cute.make_rmem_tensor(4, Float32)
            sums.fill(0.0)
            for source in cutlass.range_constexpr(self.ctas):
                four = taken(storage, group, source, 1 + v, member)
                for i in cutlass.range_constexpr(4):
                    sums[i] = sums[i] + weight[i // 2, source] * four[i]
            column = (rank * self.vectors + v) * 8
            for r in cutlass.range_constexpr(2):
                if row + 8 * r < alive and column < self.head_dim:
                    pair = cute.make_rmem_tensor(2, o_head.dtype)
                    for c in cutlass.range_constexpr(2):
                        pair[c] = (sums[2 * r + c] * inverse[r]).to(o_head.dtype)
                    at = target + (Int64(8 * r) * Int64(o_stride) + column)
                    cute.autovec_copy(pair, cute.make_tensor(at.align(4), cute.make_layout(2)))
        if const_expr(mLse is not None):  # noqa: SIM102  known when compiled
            if rank == 0 and lane % 4 == 0:
                for r in cutlass.range_constexpr(2):
                    if row + 8 * r < alive:
                        mLse[lse_at + row + 8 * r] = lse[r]
