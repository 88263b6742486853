"""From scores to probabilities, and to the gradients of scores: the elementwise half of attention's backward pass."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from cutekernels.kernels.cute.parts.groups import ConsumerThread, as_warps
from cutekernels.kernels.cute.parts.mask import BandMask
from cutekernels.kernels.cute.parts.softmax import OnlineSoftmax, by_rows
from cutekernels.kernels.cute.parts.warp_groups import ROWS

BLIND = float("inf")  # the log-sum-exp of a query that sees no key: every probability is exp2(-inf), 0


@dataclass(frozen=True)
class ScoreFactors:
    """Numbers of a launch that scores meet."""

    scale: Float32  # from products to scores of base 2
    cap_inner: Float32
    cap_outer: Float32


@dataclass(frozen=True)
class GradientNumbers:
    """Numbers of a launch of gradients."""

    factors: ScoreFactors
    factor: Float32  # of dQ and dK
    left: Int32
    right: Int32
    tiles: Int32  # of a head
    layers: Int32  # heads, counted over the batch too
    band: Int32  # heads of a band of the tiles' order


@dataclass(frozen=True)
class QueryStatistics:
    """log-sum-exp (base 2) and delta of queries in global memory, as two arrays of all queries of all heads."""

    begin: cute.Pointer  # the log-sum-exp of the first query of the first head
    between: Int64  # from a head to the next
    to_delta: Int64  # from a query's log-sum-exp to its delta


@dataclass(frozen=True)
class ScoreGradients:
    """The elementwise work on a warp group's tile of scores: 64 owned rows by ``mask``'s columns.

    ``by_keys``: queries are columns, and their statistics in shared memory; else they are rows, in registers.
    ``sloped``: whether the gradients of scores are asked for, and with them the slopes of capped ones.
    """

    mask: BandMask
    softmax: OnlineSoftmax
    by_keys: bool
    sloped: bool

    @cute.jit
    def cap(self, acc_s: cute.Tensor, factors: ScoreFactors):
        """Caps scores, where they are capped."""
        if const_expr(self.softmax.capped):
            self.softmax.cap(acc_s, factors.cap_inner, factors.cap_outer)

    @cute.jit
    def probabilities(self, acc_s: cute.Tensor, rLse: cute.Tensor, factors: ScoreFactors) -> cute.Tensor | None:
        """Scores, capped and masked, to probabilities. Returns the slopes of capped ones, 0 where hidden, if needed.

        ``rLse`` holds one value for each row of this thread's, or for each column. A query that sees no key, or does
        not exist, has a log-sum-exp of ``BLIND``: its probabilities are 0.
        """
        slopes = None
        if const_expr(self.softmax.capped and self.sloped):
            # Of a hidden score, -inf, the square is clamped: slope 0.
            inverse = cute.arch.rcp_approx(factors.cap_outer)
            slopes = cute.make_fragment_like(acc_s)
            for i in cutlass.range_constexpr(cute.size(acc_s)):
                t = acc_s[i] * inverse
                slopes[i] = 1.0 - cute.arch.fmin(t * t, Float32(1.0))
        scores = by_rows(as_warps(acc_s))  # ((2, 1), (2, MMA_KV))
        for r in cutlass.range_constexpr(cute.size(scores, mode=[0])):
            for c in cutlass.range_constexpr(cute.size(scores, mode=[1])):
                at = const_expr(c if self.by_keys else r)
                scores[r, c] = cute.math.exp2(scores[r, c] * factors.scale - rLse[at], fastmath=True)
        return slopes

    @cute.jit
    def gradients(self, acc_s: cute.Tensor, acc_dp: cute.Tensor, rDelta: cute.Tensor, slopes: cute.Tensor | None):
        """``dS = P * (dP - delta)`` in place of dP, times the slopes of capped scores."""
        # The cap's slope belongs to dS alone: P has been rounded for its own product before.
        if const_expr(slopes is not None):
            acc_s.store(acc_s.load() * slopes.load())
        weights, gradients = by_rows(as_warps(acc_s)), by_rows(as_warps(acc_dp))
        for r in cutlass.range_constexpr(cute.size(weights, mode=[0])):
            for c in cutlass.range_constexpr(cute.size(weights, mode=[1])):
                at = const_expr(c if self.by_keys else r)
                gradients[r, c] = weights[r, c] * (gradients[r, c] - rDelta[at])

    @cute.jit
    def row_stats(
        self,
        own: ConsumerThread,
        row: Int32,
        seq_x: Int32,
        statistics: QueryStatistics,
        rLse: cute.Tensor,
        rDelta: cute.Tensor,
    ):
        """Loads log-sum-exp and delta of this thread's two queries, whose group's begin at ``row``."""
        tile = cute.make_identity_tensor((ROWS, self.mask.tile_kv))
        places = by_rows(own.warp_mma.get_slice(own.thread).partition_C(tile))  # ((2, 1), (2, MMA_KV))
        # Queries that do not exist are blind.
        for r in cutlass.range_constexpr(2):
            query = row + places[r, 0][0]
            rLse[r], rDelta[r] = Float32(BLIND), Float32(0.0)
            if query < seq_x:
                rLse[r] = (statistics.begin + query).load()
                rDelta[r] = (statistics.begin + (statistics.to_delta + query)).load()

    @cute.jit
    def column_stats(
        self, thread: Int32, which: cutlass.Constexpr[int], stage: Int32, shared: cute.Pointer
    ) -> cute.Tensor:
        """Log-sum-exp (0) or delta (1) of the columns of this thread's accumulators: pairs, 8 columns apart."""
        # Four threads of a row hold pairs of columns: 8 bytes a load, 8 columns apart.
        columns = const_expr(self.mask.tile_kv)
        source = (shared + ((2 * stage + which) * columns + thread % 4 * 2)).align(8)
        own = cute.make_rmem_tensor((2, columns // 8), Float32)
        cute.autovec_copy(cute.make_tensor(source, cute.make_layout((2, columns // 8), stride=(1, 8))), own)
        return own
