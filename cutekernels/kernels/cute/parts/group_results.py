"""The end of a tile of attention by warp groups: a group's accumulators become rows of out and their log-sum-exp."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, const_expr

from cutekernels.kernels.cute.parts.attention_smem import WarpgroupAttentionSmem
from cutekernels.kernels.cute.parts.cluster_reduction import ClusterReduction, ResultRows
from cutekernels.kernels.cute.parts.groups import ConsumerThread, as_warps, round_to, store_rows
from cutekernels.kernels.cute.parts.heads import HeadRows
from cutekernels.kernels.cute.parts.pipeline import StagePipeline
from cutekernels.kernels.cute.parts.sequences import Sequences
from cutekernels.kernels.cute.parts.softmax import OnlineSoftmax, RowStates, by_rows
from cutekernels.kernels.cute.parts.warp_groups import GROUP, ROWS


@dataclass(frozen=True)
class ResultTile:
    """Where a group's 64 rows belong."""

    layer: Int32  # head, counted over the batch too
    batch: Int32
    head: Int32
    row: Int32  # the first one, in its sequence
    begin_q: Int32  # of the sequence, in varlen tensors
    seq_q: Int32


@dataclass(frozen=True)
class GroupResults:
    """Stores ``rows`` of a group; ``first_barrier`` is the named barrier of group 0."""

    smem: WarpgroupAttentionSmem
    rows: HeadRows
    softmax: OnlineSoftmax
    sequences: Sequences
    queries: StagePipeline
    first_barrier: int

    @cute.jit
    def store(
        self,
        own: ConsumerThread,
        tile: ResultTile,
        mO: cute.Tensor,
        mLse: cute.Tensor | None,
        acc_o: cute.Tensor,
        states: RowStates,
        empty_q: cute.Pointer,
    ):
        """Results by way of the queries' shared memory, or of their own, or added up with those of the cluster.

        Rows that do not exist are not stored. Unless results have shared memory of their own, the group's queries are
        released here, at the very end: their bytes hold results until these are read. (A split tile has no next one.)
        """
        dtype = mO.element_type
        valid = cutlass.min(cutlass.max(tile.seq_q - tile.row, Int32(0)), Int32(ROWS))
        if const_expr(self.smem.split > 1):
            reduction = ClusterReduction(self.smem, self.rows.padded, self.rows.head_dim)
            out = self.sequences.head(mO, tile.batch, tile.begin_q, tile.head)
            first = out.rows + Int64(tile.row) * Int64(out.stride)
            place = ResultRows(first, out.stride, valid, Int64(tile.layer) * tile.seq_q + tile.row)
            reduction.store(own, cute.arch.block_idx_in_cluster(), place, mLse, acc_o, states)
        else:
            # Registers: divide by the totals, round.
            self.softmax.finish(as_warps(acc_o), states)
            rO = cute.make_fragment_like(acc_o, dtype)
            round_to(acc_o, rO)
            thr_mma = own.warp_mma.get_slice(own.thread)
            barrier = self.first_barrier + own.group
            if const_expr(not self.smem.separate_output):
                # The group's threads wait for one another: all have read Q, whose bytes results replace.
                cute.arch.barrier(barrier_id=barrier, number_of_threads=GROUP)
            buffer = own.storage + (self.smem.results_at + own.group * self.smem.group_bytes)
            store_rows(own.thread, rO, buffer.toint().to(Int32), self.rows.padded)
            # Orders these writes before those of TMA, which loads the next tile's queries into the same bytes.
            cute.arch.fence_proxy("async.shared", space="cta")
            # The group waits until all its results are in shared memory; then whole rows leave, 16 bytes a thread.
            cute.arch.barrier(barrier_id=barrier, number_of_threads=GROUP)
            out = self.sequences.head(mO, tile.batch, tile.begin_q, tile.head)
            self.rows.store(own.thread, out.rows, out.stride, tile.row, self.rows.address(own.thread, buffer), valid)
            if const_expr(mLse is not None):
                lse_at = Int64(tile.layer) * tile.seq_q + tile.row
                if const_expr(self.sequences.varlen):
                    lse_at = Int64(tile.head) * mO.shape[0] + (tile.begin_q + tile.row)
                # The thread of column 0, among the four of a row, stores its log-sum-exp.
                places = by_rows(thr_mma.partition_C(cute.make_identity_tensor((ROWS, self.rows.padded))))
                if places[0, 0][1] == 0:
                    for r in cutlass.range_constexpr(2):
                        row = places[r, 0][0]
                        if row < valid:
                            mLse[lse_at + row] = states.reference[r]
            # The group waits until results are read from shared memory, before the next tile's replace them,
            cute.arch.barrier(barrier_id=barrier, number_of_threads=GROUP)
            if const_expr(not self.smem.separate_output):
                # or before the producer, which waits for this arrival, loads the next tile's queries there.
                self.queries.release(own.thread, empty_q, own.group, Boolean(True))
