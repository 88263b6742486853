"""Global to shared memory by ``cp.async``, 4 to 16 bytes a thread, or element by element where nothing is aligned.

A ragged K is handled once, at its *front*: the k-tiles are shifted so that the last one ends where K does, and the
first one begins before K does (``copies``). That first tile alone is masked along K (``first_mask``) over a zero-filled
buffer; all others are whole along K. Rows beyond the extent are masked in every k-tile (``row_mask``) and never copied.
"""

import math
from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32
from cutlass.cute.nvgpu import cpasync
from cutlass.tensor_utils import LayoutEnum
from cutlass.utils import hopper_helpers


@dataclass(frozen=True)
class TileCopies:
    """One thread's copies of the k-tiles of a row panel, from global to shared memory."""

    copy: cute.TiledCopy
    source: cute.Tensor  # (CPY, CPY_ROWS, CPY_K, k)
    target: cute.Tensor  # (CPY, CPY_ROWS, CPY_K, STAGE)
    coordinates: cute.Tensor  # (row, k) of the source's elements, shaped as the source
    mask: cute.Tensor  # (REST_V, CPY_ROWS, CPY_K): the rows that exist


@dataclass(frozen=True)
class OperandLoad:
    """Loads of ``(rows, tile_k)`` tiles of one GEMM operand into a swizzled pipeline of ``stages`` buffers.

    ``rows`` runs along M for A and along N for B. ``k_major``: K is the contiguous mode in global memory; shared
    memory keeps the same major, and ``ldmatrix`` transposes on the way to registers where needed. ``alignment``
    (elements) is the widest vector that the pointer, the strides and the contiguous extent allow.
    """

    rows: int
    tile_k: int
    stages: int
    threads: int
    k_major: bool
    alignment: int

    def smem_layout(self, dtype: type[cutlass.Numeric]) -> cute.ComposedLayout:
        """``(rows, tile_k, STAGE)``, swizzled so that neither 16-byte copies nor ldmatrix conflict in banks."""
        major = LayoutEnum.ROW_MAJOR if self.k_major else LayoutEnum.COL_MAJOR
        return hopper_helpers.make_smem_layout_a(major, (self.rows, 0, self.tile_k), dtype, self.stages)

    def vector_bits(self, dtype: type[cutlass.Numeric]) -> int:
        return self.alignment * dtype.width

    def tiled_copy(self, dtype: type[cutlass.Numeric]) -> cute.TiledCopy:
        """The copy of one tile; threads run along the contiguous mode first, so that a warp reads whole sectors."""
        bits = self.vector_bits(dtype)
        if bits >= 32:
            # Only 16-byte copies may bypass L1, which is of no use to a tile on its way to shared memory.
            cache = cpasync.LoadCacheMode.GLOBAL if bits == 128 else cpasync.LoadCacheMode.ALWAYS
            atom = cute.make_copy_atom(cpasync.CopyG2SOp(cache_mode=cache), dtype, num_bits_per_copy=bits)
        else:
            # cp.async moves 4 bytes at least: a lone 2-byte element is loaded and stored by the thread itself.
            atom = cute.make_copy_atom(cute.nvgpu.CopyUniversalOp(), dtype, num_bits_per_copy=bits)
        # A vector lies along the contiguous mode.
        along, across = load_threads(self.rows, self.tile_k, self.k_major, self.alignment, self.threads)
        if self.k_major:
            threads = cute.make_layout((across, along), stride=(along, 1))
            values = cute.make_layout((1, self.alignment))
        else:
            threads = cute.make_layout((along, across), stride=(1, along))
            values = cute.make_layout((self.alignment, 1))
        return cute.make_tiled_copy_tv(atom, threads, values)

    @cute.jit
    def copies(self, tid: Int32, mX: cute.Tensor, sX: cute.Tensor, panel: Int32, layer: Int32) -> TileCopies:
        """Thread ``tid``'s copies of all k-tiles of row panel ``panel`` of ``mX`` (rows, K, L)."""
        extent, k = cute.size(mX, mode=[0]), cute.size(mX, mode=[1])
        # The k-tiles are shifted back by -residue, so that the *first* is the partial one.
        residue = k - cute.ceil_div(k, self.tile_k) * self.tile_k  # <= 0
        gX = self.shifted(cute.local_tile(mX[None, None, layer], (self.rows, self.tile_k), (panel, None)), residue)
        identity = cute.make_identity_tensor((extent, k))
        cX = cute.domain_offset((0, residue, 0), cute.local_tile(identity, (self.rows, self.tile_k), (panel, None)))
        copy = self.tiled_copy(mX.element_type)
        thr = copy.get_slice(tid)
        tXcX = thr.partition_S(cX)  # (CPY, CPY_ROWS, CPY_K, k)
        return TileCopies(copy, thr.partition_S(gX), thr.partition_D(sX), tXcX, self.row_mask(tXcX, extent))

    @cute.jit
    def start(self, copies: TileCopies, k_tile: Int32, stage: Int32, mask: cute.Tensor):
        """Starts this thread's part of the load of ``k_tile`` into ``stage``; the caller commits the group."""
        source, target = copies.source[None, None, None, k_tile], copies.target[None, None, None, stage]
        cute.copy(copies.copy, source, target, pred=mask)

    @cute.jit
    def clear(self, copies: TileCopies, stage: Int32):
        """Zeros this thread's part of ``stage``: what a masked copy leaves out must add nothing to the product."""
        copies.target[None, None, None, stage].fill(0.0)

    @cute.jit
    def shifted(self, g: cute.Tensor, residue: Int32) -> cute.Tensor:
        """``g`` moved by ``residue`` (<= 0) along K, so that the *first* k-tile is the partial one."""
        moved = cute.domain_offset((0, residue, 0), g)
        return cute.make_tensor(moved.iterator.align(self.alignment * g.element_type.width // 8), moved.layout)

    @cute.jit
    def row_mask(self, tc: cute.Tensor, extent: Int32) -> cute.Tensor:
        """Mask of this thread's vectors inside along ``rows``: ``(REST_V, CPY_ROWS, CPY_K)``, K broadcast."""
        mask = cute.make_rmem_tensor(
            cute.make_layout(vectors(tc), stride=(cute.size(tc, mode=[1]), 1, 0)),
            Boolean,
        )
        # K is broadcast: all k-tiles but the first are whole along K.
        for v in cutlass.range_constexpr(mask.shape[0]):
            for i in cutlass.range_constexpr(mask.shape[1]):
                mask[v, i, 0] = cute.elem_less(tc[(0, v), i, 0, 0][0], extent)
        return mask

    @cute.jit
    def first_mask(self, copies: TileCopies, extent: Int32) -> cute.Tensor:
        """The mask of the first k-tile, which starts before K does: ``(REST_V, CPY_ROWS, CPY_K)``, dense."""
        tc = copies.coordinates
        mask = cute.make_rmem_tensor(cute.make_layout(vectors(tc)), Boolean)
        for v in cutlass.range_constexpr(mask.shape[0]):
            for i in cutlass.range_constexpr(mask.shape[1]):
                for k in cutlass.range_constexpr(mask.shape[2]):
                    at = tc[(0, v), i, k, 0]
                    # The row exists, and k is not before the beginning: a shifted coordinate there is negative.
                    mask[v, i, k] = cute.elem_less(at[0], extent) and cute.elem_less(Int32(-1), at[1])
        return mask


def vectors(tc: cute.Tensor) -> tuple[int, int, int]:
    """Vectors a thread copies of a partitioned tile: ``(REST_V, CPY_ROWS, CPY_COLUMNS)``, inner modes merged."""
    return cute.size(tc.shape[0][1]), cute.size(tc, mode=[1]), cute.size(tc, mode=[2])


def load_threads(rows: int, tile_k: int, k_major: bool, alignment: int, threads: int) -> tuple[int, int]:
    """Threads along and across the contiguous mode of a tile: as many along as divide both tile and CTA."""
    along = math.gcd((tile_k if k_major else rows) // alignment, threads)
    return along, threads // along
