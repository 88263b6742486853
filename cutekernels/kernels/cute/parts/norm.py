"""RMSNorm within a GEMM for few tokens: its weight on fragments, sums of squares on the way, rstd in the epilogue.

``rstd[token] * sum_k (x[token, k] * gamma[k]) * weight[n, k]``: gamma multiplies one operand's fragments between shared
memory and the MMA, rstd the fp32 accumulators. Two arrangements, one for each GEMM that takes a norm:

- :class:`RowNorm` (skinny_warpgroup): gamma multiplies the tokens; other warps sum their squares (``statistics.py``).
- :class:`TokenNorm` (skinny): gamma multiplies the weight; the MMA itself sums the tokens' squares.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, const_expr
from cutlass.cute.nvgpu import cpasync
from cutlass.cute.nvgpu.warp import LdMatrix8x8x16bOp

VECTOR_BITS = 128


@dataclass(frozen=True)
class GammaCopies:
    """One thread's copies of gamma's k-tiles."""

    copy: cute.TiledCopy
    source: cute.Tensor  # (CPY, 1, k)
    target: cute.Tensor  # (CPY, 1, STAGE)
    exists: Boolean  # whether this thread's vector of the first k-tile, which starts before K does, is inside
    copies: Boolean  # whether this thread copies at all


@dataclass(frozen=True, kw_only=True)
class NormWeight:
    """gamma, multiplied into one operand's fragments; in fp16 scaled by ``scale``, a power of two."""

    tile_k: int
    stages: int
    weighted: bool
    statistics: bool  # sums squares; else rstd is given
    scale: float = 1.0

    @cute.jit
    def of_fragments(self, lane: Int32, sG: cute.Tensor) -> cute.Tensor:
        """gamma beside this thread's fragments: ``((2, 2), k-block, STAGE)``, neighbours in k and their eighth next."""
        layout = cute.make_layout(((2, 2), self.tile_k // 16, self.stages), stride=((1, 8), 16, self.tile_k))
        return cute.make_tensor(sG.iterator + lane % 4 * 2, layout)

    @cute.jit
    def weigh(self, rA: cute.Tensor, rG: cute.Tensor, weighed: cute.Tensor):
        """``weighed = rA * gamma``, rounded once: A fragments ((2, 2, 2), MMA_M) of one k-block, rG ((2, 2)) beside."""
        dtype = rA.element_type
        g = rG.load()
        if const_expr(self.scale != 1.0):
            g = g * rG.element_type(self.scale)
        scaled = cute.make_rmem_tensor(rG.shape, rG.element_type)
        scaled.store(g)
        # gamma depends on k alone: rows 8 further on have the same.
        spread = cute.make_tensor(scaled.iterator, cute.make_layout(rA.shape, stride=((1, 0, 2), 0)))
        if const_expr(rG.element_type is dtype):
            weighed.store(rA.load() * spread.load())
        else:
            weighed.store((rA.load().to(Float32) * spread.load()).to(dtype))


@dataclass(frozen=True, kw_only=True)
class RowNorm(NormWeight):
    """``sum_k (x[token, k] * gamma[k]) * weight[n, k] * rstd[token]``, with tokens on the MMA's 64 rows.

    gamma multiplies fragments of the tokens on their way from shared memory, rounded once. Other warps sum their
    squares (``statistics.py``).
    """

    @cute.jit
    def fetch(self, lane: Int32, sG: cute.Tensor, stage: Int32, begin: cutlass.Constexpr[int], rG: cute.Tensor):
        """gamma beside this thread's fragments from k-block ``begin`` on: rG ((2, 2), k-block)."""
        blocks = const_expr(cute.size(rG, mode=[1]))
        if const_expr(sG.element_type.width == 16 and blocks % 2 == 0):
            for i in cutlass.range_constexpr(blocks // 2):  # two at once: eight times the same row is one for all
                ldmatrix = cute.make_copy_atom(LdMatrix8x8x16bOp(False, 4), sG.element_type)
                at = sG.iterator + stage * self.tile_k + lane // 8 * 8 + (begin + 2 * i) * 16
                at = cute.make_ptr(sG.element_type, at.toint(), cute.AddressSpace.smem, assumed_align=16)
                target = cute.make_tensor(rG.iterator + 8 * i, cute.make_layout(8))
                cute.copy(ldmatrix, cute.make_tensor(at, cute.make_layout(8)), target)
        else:
            tCsG = self.of_fragments(lane, sG)
            for i in cutlass.range_constexpr(blocks):
                cute.autovec_copy(tCsG[None, begin + i, stage], rG[None, i])


@dataclass(frozen=True, kw_only=True)
class TokenNorm(NormWeight):
    """``rstd[token] * sum_k (weight[n, k] * gamma[k]) * x[token, k]``, with the tokens as they lie in memory.

    gamma multiplies fragments of the *weight*, rounded once: each is in one warp of the CTA, where tokens' are in all
    ``warps_m``, and a token's outlier times gamma could leave the range of fp16. There, gamma is scaled by ``scale``, a
    power of two, so that small products of weights and gamma stay normal numbers.

    The MMA itself sums squares in fp32, as the diagonal of ``x x^T``: a thread's B fragment of 8 tokens, used for rows
    8 to 15 as well, is an A fragment of them. The ``warps_m`` warps that hold the same tokens take turns, so each
    k-block is counted once.
    """

    tokens: int  # of a tile
    warps_m: int

    def vector(self, dtype: type[cutlass.Numeric]) -> int:
        return VECTOR_BITS // dtype.width

    def load_threads(self, dtype: type[cutlass.Numeric]) -> int:
        return self.tile_k // self.vector(dtype)

    @cute.jit
    def copies(self, tid: Int32, mG: cute.Tensor, sG: cute.Tensor) -> GammaCopies:
        """Thread ``tid``'s copies of gamma's k-tiles."""
        dtype = mG.element_type
        vector, k = self.vector(dtype), cute.size(mG)
        # Shifted as the operands are, so that the first k-tile is the partial one.
        residue = k - cute.ceil_div(k, self.tile_k) * self.tile_k  # <= 0
        moved = cute.domain_offset((residue,), mG)
        moved = cute.make_tensor(moved.iterator.align(VECTOR_BITS // 8), moved.layout)
        atom = cute.make_copy_atom(
            cpasync.CopyG2SOp(cache_mode=cpasync.LoadCacheMode.GLOBAL), dtype, num_bits_per_copy=VECTOR_BITS
        )
        copy = cute.make_tiled_copy_tv(atom, cute.make_layout(self.load_threads(dtype)), cute.make_layout(vector))
        thr = copy.get_slice(tid % self.load_threads(dtype))
        tiles = cute.local_tile(moved, (self.tile_k,), (None,))  # (tile_k, k)
        exists = (tid % self.load_threads(dtype)) * vector + residue >= 0
        source, target = thr.partition_S(tiles), thr.partition_D(sG)  # (CPY, 1, k), (CPY, 1, STAGE)
        return GammaCopies(copy, source, target, exists, tid < self.load_threads(dtype))

    @cute.jit
    def start(self, gamma: GammaCopies, copies: Boolean, k_tile: Int32, stage: Int32):
        """Starts the copy of ``k_tile`` into ``stage``, where this thread ``copies`` it."""
        source, target = gamma.source[None, None, k_tile], gamma.target[None, None, stage]
        if copies:
            cute.copy(gamma.copy, source, target)

    @cute.jit
    def clear(self, gamma: GammaCopies):
        """Zeros the first stage: what lies before K must add nothing, and no NaN."""
        if gamma.copies:
            gamma.target[None, None, 0].fill(0.0)

    @cute.jit
    def square(self, tiled_mma: cute.TiledMma, warp: Int32, block: Int32, squares: cute.Tensor, rX: cute.Tensor):
        """``squares += x x^T`` of 8 tokens each, if k-block ``block`` is ``warp``'s of the ``warps_m`` that hold it.

        squares ((2, 2), MMA_M); rX ((2, 2), MMA_M), of that k-block.
        """
        if block % self.warps_m == warp:
            for j in cutlass.range_constexpr(cute.size(rX, mode=[1])):
                # The B fragment of 8 tokens, as A (rows 8 to 15 repeat them) and as B.
                x, d = rX[None, j].iterator, squares[None, j].iterator
                rA = cute.make_tensor(x, cute.make_layout(((2, 2, 2), 1), stride=((1, 0, 2), 0)))
                rB = cute.make_tensor(x, cute.make_layout(((2, 2), 1), stride=((1, 2), 0)))
                rD = cute.make_tensor(d, cute.make_layout(((2, 2), 1, 1), stride=((1, 2), 0, 0)))
                cute.gemm(tiled_mma, rD, rA, rB, rD)

    @cute.jit
    def leave(self, tid: Int32, squares: cute.Tensor, sQ: cute.Tensor):
        """Diagonals, which some lanes of each warp hold, into shared memory: sQ (tokens, warps)."""
        warp, lane = tid // 32, tid % 32
        row = lane // 4
        # Of row r's products the lane that holds columns r and r + 1, or r - 1 and r, has the diagonal.
        if lane % 4 == row // 2:
            for j in cutlass.range_constexpr(cute.size(squares, mode=[1])):
                diagonal = squares[0, j]
                if row % 2 == 1:
                    diagonal = squares[1, j]
                sQ[8 * j + row, warp] = diagonal

    @cute.jit
    def leave_rstd(self, tid: Int32, squares: cute.Tensor, sQ: cute.Tensor, k: Int32, eps: Float32):
        """rstd of each token, from its row of ``squares``, into sQ's first column, for all threads of the CTA."""
        if tid < self.tokens:
            sQ[tid, 0] = cute.math.rsqrt(self.total(squares, tid) / k + eps)
        # Wait until the threads above have left rstd for all.
        cute.arch.sync_threads()

    @cute.jit
    def total(self, sQ: cute.Tensor, token: Int32) -> Float32:
        """The sum of a row of ``sQ``, in a fixed order."""
        whole = sQ[token, 0]
        for i in cutlass.range_constexpr(1, cute.size(sQ, mode=[1])):
            whole = whole + sQ[token, i]
        return whole
