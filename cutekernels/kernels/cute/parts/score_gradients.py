"""From scores to probabilities, and to the gradients of scores: the elementwise half of attention's backward pass."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from cutekernels.kernels.cute.parts.groups import ROWS, as_warps
from cutekernels.kernels.cute.parts.mask import BandMask
from cutekernels.kernels.cute.parts.softmax import OnlineSoftmax, by_rows

BLIND = float("inf")  # the log-sum-exp that leaves no probability


@dataclass(frozen=True)
class ScoreGradients:
    """A warp group's tile of scores: 64 owned rows by ``mask``'s columns, whose statistics belong to queries.

    ``by_keys``: queries are columns, and their statistics in shared memory; else they are rows, in registers.
    ``sloped``: whether the gradients of scores are asked for, and with them the slopes of capped ones.
    """

    mask: BandMask
    softmax: OnlineSoftmax
    by_keys: bool
    sloped: bool

    @cute.jit
    def weigh(
        self, member: Int32, block: Int32, masked: cutlass.Constexpr, acc_s: cute.Tensor, cLse: cute.Tensor,
        factors: tuple, seen: tuple, warp_mma: cute.TiledMma,
    ):  # fmt: skip
        """Scores to probabilities. Returns the slopes of capped scores, 0 where hidden; None if not needed."""
        scale, cap_inner, cap_outer, _ = factors
        row, *edges = seen
        cap, hide = self.softmax.cap, self.mask.apply
        if const_expr(self.softmax.capped):
            cap(acc_s, cap_inner, cap_outer)
        if const_expr(masked):
            hide(member, as_warps(acc_s), row, block * self.mask.tile_kv, edges, warp_mma)
        slopes = None
        if const_expr(self.softmax.capped and self.sloped):
            inverse = cute.arch.rcp_approx(cap_outer)
            slopes = cute.make_fragment_like(acc_s)
            for i in cutlass.range_constexpr(cute.size(acc_s)):
                t = acc_s[i] * inverse
                slopes[i] = 1.0 - cute.arch.fmin(t * t, Float32(1.0))
        scores = by_rows(as_warps(acc_s))
        for r in cutlass.range_constexpr(cute.size(scores, mode=[0])):
            for c in cutlass.range_constexpr(cute.size(scores, mode=[1])):
                at = const_expr(c if self.by_keys else r)
                scores[r, c] = cute.math.exp2(scores[r, c] * scale - cLse[at], fastmath=True)
        return slopes

    @cute.jit
    def slope(self, acc_s: cute.Tensor, acc_dp: cute.Tensor, cDelta: cute.Tensor, slopes: cute.Tensor | None):
        """``dS = P * (dP - delta)`` in place of dP, times the slopes of capped scores."""
        if const_expr(slopes is not None):
            acc_s.store(acc_s.load() * slopes.load())
        weights, gradients = by_rows(as_warps(acc_s)), by_rows(as_warps(acc_dp))
        for r in cutlass.range_constexpr(cute.size(weights, mode=[0])):
            for c in cutlass.range_constexpr(cute.size(weights, mode=[1])):
                at = const_expr(c if self.by_keys else r)
                gradients[r, c] = weights[r, c] * (gradients[r, c] - cDelta[at])

    @cute.jit
    def row_stats(
        self, member: Int32, row: Int32, seq_x: Int32, stats: tuple, rLse: cute.Tensor, rDelta: cute.Tensor,
        warp_mma: cute.TiledMma,
    ):  # fmt: skip
        """lse and delta of this thread's two queries, whose group's begin at ``row``."""
        begin, _, to_delta = stats
        tile = cute.make_identity_tensor((ROWS, self.mask.tile_kv))
        places = by_rows(warp_mma.get_slice(member).partition_C(tile))
        for r in cutlass.range_constexpr(2):
            own = row + places[r, 0][0]
            rLse[r], rDelta[r] = Float32(BLIND), Float32(0.0)
            if own < seq_x:
                rLse[r] = (begin + own).load()
                rDelta[r] = (begin + (to_delta + own)).load()

    @cute.jit
    def column_stats(
        self, member: Int32, which: cutlass.Constexpr[int], stage: Int32, shared: cute.Pointer
    ) -> cute.Tensor:
        """lse (0) or delta (1) of the columns of this thread's accumulators: pairs, 8 columns apart."""
        columns = const_expr(self.mask.tile_kv)
        source = (shared + ((2 * stage + which) * columns + member % 4 * 2)).align(8)
        own = cute.make_rmem_tensor((2, columns // 8), Float32)
        cute.autovec_copy(cute.make_tensor(source, cute.make_layout((2, columns // 8), stride=(1, 8))), own)
        return own
