"""The end of a tile of attention by warp groups: a group's sums in registers become rows of out and their lse."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, const_expr

from cutekernels.kernels.cute.parts.attention_smem import WarpgroupAttentionSmem
from cutekernels.kernels.cute.parts.cluster_sums import ClusterSums
from cutekernels.kernels.cute.parts.groups import ROWS, THREADS, as_warps, round_to, store_rows
from cutekernels.kernels.cute.parts.heads import HeadRows
from cutekernels.kernels.cute.parts.pipeline import StagePipeline
from cutekernels.kernels.cute.parts.sequences import Sequences
from cutekernels.kernels.cute.parts.softmax import OnlineSoftmax, by_rows


@dataclass(frozen=True)
class GroupResults:
    """``rows`` of a group; ``first_barrier`` is the named barrier of group 0."""

    smem: WarpgroupAttentionSmem
    rows: HeadRows
    softmax: OnlineSoftmax
    sequences: Sequences
    queries: StagePipeline
    first_barrier: int

    @cute.jit
    def deliver(
        self, member: Int32, group: Int32, tile: tuple, mO: cute.Tensor, mLse: cute.Tensor | None, acc_o: cute.Tensor,
        state: tuple, mmas: tuple, storage: cute.Pointer, empty_q: cute.Pointer,
    ):  # fmt: skip
        """Results by way of the queries' shared memory, or of their own, or added up with those of the cluster."""
        layer, batch, head, row, begin_q, seq_q = tile
        reference, total, _ = state
        warp_mma = mmas[2]
        dtype = mO.element_type
        divide, release, pointer = self.softmax.finish, self.queries.release, self.sequences.pointer
        store, into = self.rows.store, self.rows.address
        alive = cutlass.min(cutlass.max(seq_q - row, Int32(0)), Int32(ROWS))
        if const_expr(self.smem.split > 1):
            add_up = ClusterSums(self.smem, self.rows.padded, self.rows.head_dim).deliver
            o_head, o_stride, _ = pointer(mO, batch, begin_q, head)
            place = (o_head + Int64(row) * Int64(o_stride), o_stride, alive, Int64(layer) * seq_q + row)
            add_up(member, group, cute.arch.block_idx_in_cluster(), place, mLse, acc_o, state, storage)
        else:
            sums = as_warps(acc_o)
            divide(sums, reference, total)
            rO = cute.make_fragment_like(acc_o, dtype)
            round_to(acc_o, rO)
            thr_mma = warp_mma.get_slice(member)
            if const_expr(not self.smem.apart):
                cute.arch.barrier(barrier_id=self.first_barrier + group, number_of_threads=THREADS)  # all have read Q
            buffer = storage + (self.smem.results_at + group * self.smem.group_bytes)
            store_rows(member, rO, buffer.toint().to(Int32), self.rows.padded)
            cute.arch.fence_proxy("async.shared", space="cta")
            cute.arch.barrier(barrier_id=self.first_barrier + group, number_of_threads=THREADS)
            o_head, o_stride, _ = pointer(mO, batch, begin_q, head)
            store(member, o_head, o_stride, row, into(member, buffer), alive)
            if const_expr(mLse is not None):
                lse_at = Int64(layer) * seq_q + row
                if const_expr(self.sequences.packed):
                    lse_at = Int64(head) * mO.shape[0] + (begin_q + row)
                places = by_rows(thr_mma.partition_C(cute.make_identity_tensor((ROWS, self.rows.padded))))
                if places[0, 0][1] == 0:
                    for r in cutlass.range_constexpr(2):
                        own = places[r, 0][0]
                        if own < alive:
                            mLse[lse_at + own] = reference[r]
            cute.arch.barrier(barrier_id=self.first_barrier + group, number_of_threads=THREADS)  # results are read
            if const_expr(not self.smem.apart):
                release(member, empty_q, group, Boolean(True))
