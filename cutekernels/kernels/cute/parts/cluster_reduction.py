"""Partial accumulators of a tile whose keys the CTAs of a cluster split among them, added up through shared memory.

Every CTA owns some columns of the result: each group sends each CTA of the cluster, its own included, that CTA's
columns of its accumulators, and the references and totals of its rows.

Barriers:
    One mbarrier for each group, in each CTA: one arrival (thread 0 announces all messages' bytes), then the bytes.
    Messages may arrive before they are announced: the phase waits for the arrival too. It has one phase, since a CTA of
    a split tile has no second tile.
    The cluster's barrier: all threads arrive once their CTA's mbarriers are set up, and wait before they send.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from cutekernels.kernels.cute.parts.attention_smem import WarpgroupAttentionSmem
from cutekernels.kernels.cute.parts.groups import ConsumerThread
from cutekernels.kernels.cute.parts.mask import Blocks
from cutekernels.kernels.cute.parts.softmax import LN_2, NO_REFERENCE, RowStates, quad_sum
from cutekernels.kernels.cute.parts.warp_groups import GROUP


@dataclass(frozen=True)
class ResultRows:
    """A group's rows in global memory."""

    out: cute.Pointer  # the first row
    stride: Int32  # from row to row, in elements
    valid: Int32  # rows that exist
    lse_at: Int64  # the place of the first one's log-sum-exp


@dataclass(frozen=True)
class ClusterReduction:
    """The exchange of a group's 64 rows. The same thread of each CTA holds the same rows and columns of its part.

    Stores arrive on the receiver's barrier, as in skinny_warpgroup's (docs/notes/gemm.md#clusters). A CTA's inbox has
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
        """Blocks of 8 columns that a CTA adds up: four accumulators of each thread, 16 bytes."""
        return self.padded // 8 // self.ctas

    @cute.jit
    def blocks(self, rank: Int32, seen: Blocks) -> Blocks:
        """The share of CTA ``rank`` in the blocks of keys that its tile sees."""
        count = seen.end - seen.first
        begin, end = seen.first + rank * count // self.ctas, seen.first + (rank + 1) * count // self.ctas
        whole_first = cutlass.min(cutlass.max(seen.whole_first, begin), end)
        whole_end = cutlass.min(cutlass.max(seen.whole_end, begin), end)
        return Blocks(begin, whole_first, whole_end, end)

    @cute.jit
    def inbox(self, own: ConsumerThread, source: Int32, vector: int) -> cute.Pointer:
        """Four numbers of a thread from CTA ``source``: statistics (``vector`` 0), or accumulators of one block."""
        at = ((own.group * self.ctas + source) * (1 + self.vectors) + vector) * GROUP + own.thread
        return cute.recast_ptr(own.storage + self.smem.inbox_at, dtype=Float32).align(16) + 4 * at

    @cute.jit
    def init(self, full: cute.Pointer):
        """Initialize the groups' barriers; one thread's work."""
        for group in cutlass.range_constexpr(self.smem.groups):
            cute.arch.mbarrier_init(full + group, 1)

    @cute.jit
    def send(self, own: ConsumerThread, rank: Int32, acc: cute.Tensor, states: RowStates, full: cute.Pointer):
        """Sends each CTA its columns of ``acc``, and the rows' references and totals."""
        statistics = cute.make_rmem_tensor(4, Float32)
        for r in cutlass.range_constexpr(2):
            statistics[r] = states.reference[r]
            statistics[2 + r] = quad_sum(states.total[r])
        bits, mine = cute.recast_tensor(acc, Int32), cute.recast_tensor(statistics, Int32)
        # All threads of the cluster have arrived in the kernel's setup: every CTA's barriers are initialized.
        cute.arch.cluster_wait()
        for part in cutlass.range_constexpr(self.ctas):
            four = tuple([mine[j] for j in range(4)])
            cute.arch.store_async_dsmem(self.inbox(own, rank, 0).align(16), four, full + own.group, part)
            for v in cutlass.range_constexpr(self.vectors):
                four = tuple([bits[4 * (part * self.vectors + v) + j] for j in range(4)])
                target = self.inbox(own, rank, 1 + v).align(16)
                cute.arch.store_async_dsmem(target, four, full + own.group, part)

    @cute.jit
    def receive(self, own: ConsumerThread, source: int, vector: int) -> cute.Tensor:
        """Four numbers from CTA ``source``, in registers."""
        four = cute.make_rmem_tensor(4, Float32)
        place = self.inbox(own, Int32(source), vector).align(16)
        cute.autovec_copy(cute.make_tensor(place, cute.make_layout(4)), four)
        return four

    @cute.jit
    def store(
        self,
        own: ConsumerThread,
        rank: Int32,
        rows: ResultRows,
        mLse: cute.Tensor | None,
        acc: cute.Tensor,
        states: RowStates,
    ):
        """Adds up, divides, rounds and stores this CTA's columns; CTA 0 stores the rows' log-sum-exp."""
        full = cute.recast_ptr(own.storage + self.smem.inbox_barriers_at, dtype=Int64)
        if own.thread == 0:
            # The one arrival on this group's barrier: the bytes that its threads in all CTAs send here.
            bytes_ = const_expr(16 * GROUP * self.ctas * (1 + self.vectors))
            cute.arch.mbarrier_arrive_and_expect_tx(full + own.group, bytes_)
        self.send(own, rank, acc, states, full)
        # The group waits for the parts of all CTAs.
        cute.arch.mbarrier_wait(full + own.group, 0)
        # Factors that bring the parts to the greatest of their references, and the total of all.
        weight = cute.make_rmem_tensor((2, self.ctas), Float32)
        most, whole = [cute.make_rmem_tensor(2, Float32) for _ in range(2)]
        most.fill(NO_REFERENCE)
        whole.fill(0.0)
        for source in cutlass.range_constexpr(self.ctas):
            statistics = self.receive(own, source, 0)
            for r in cutlass.range_constexpr(2):
                weight[r, source] = statistics[r]
                most[r] = cute.arch.fmax(most[r], statistics[r])
        for source in cutlass.range_constexpr(self.ctas):
            statistics = self.receive(own, source, 0)
            for r in cutlass.range_constexpr(2):
                weight[r, source] = cute.math.exp2(weight[r, source] - most[r], fastmath=True)
                whole[r] = whole[r] + weight[r, source] * statistics[2 + r]
        # A row that sees nothing in any part has 0, and -inf as log-sum-exp.
        inverse, lse = [cute.make_rmem_tensor(2, Float32) for _ in range(2)]
        inverse.fill(0.0)
        lse.fill(-Float32.inf)
        for r in cutlass.range_constexpr(2):
            if whole[r] != 0.0:
                inverse[r] = 1.0 / whole[r]
                lse[r] = (most[r] + cute.math.log2(whole[r])) * LN_2
        lane = own.thread % 32
        row = own.thread // 32 * 16 + lane // 4
        target = rows.out + Int64(row) * Int64(rows.stride) + lane % 4 * 2
        # This CTA's columns, 8 at a time: two rows of this thread, a pair of columns each.
        for v in cutlass.range_constexpr(self.vectors):
            acc_all = cute.make_rmem_tensor(4, Float32)
            acc_all.fill(0.0)
            for source in cutlass.range_constexpr(self.ctas):
                four = self.receive(own, source, 1 + v)
                for i in cutlass.range_constexpr(4):
                    acc_all[i] = acc_all[i] + weight[i // 2, source] * four[i]
            column = (rank * self.vectors + v) * 8
            for r in cutlass.range_constexpr(2):
                if row + 8 * r < rows.valid and column < self.head_dim:
                    pair = cute.make_rmem_tensor(2, rows.out.dtype)
                    for c in cutlass.range_constexpr(2):
                        pair[c] = (acc_all[2 * r + c] * inverse[r]).to(rows.out.dtype)
                    at = target + (Int64(8 * r) * Int64(rows.stride) + column)
                    cute.autovec_copy(pair, cute.make_tensor(at.align(4), cute.make_layout(2)))
        if const_expr(mLse is not None):  # noqa: SIM102  known when compiled
            if rank == 0 and lane % 4 == 0:
                for r in cutlass.range_constexpr(2):
                    if row + 8 * r < rows.valid:
                        mLse[rows.lse_at + row + 8 * r] = lse[r]
