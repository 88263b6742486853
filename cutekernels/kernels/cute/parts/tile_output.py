"""A tile's results to out through shared memory, 16 bytes a thread, for MMAs whose accumulators lie two neighbours to a
thread.

They pass through a tile in shared memory, from which each thread then takes up to 16 contiguous bytes of a row; C comes
in by the same tile where its contiguous extent is out's. Vectors beyond the ends of out are masked when C is read and
when the result is stored, nowhere else.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, const_expr
from cutlass.tensor_utils import LayoutEnum
from cutlass.utils import hopper_helpers

from cutekernels.kernels.cute.parts.epilogue import Epilogue, EpilogueOperands, FragmentCoordinates
from cutekernels.kernels.cute.parts.load import load_threads, vectors


@dataclass(frozen=True)
class TileOutput:
    """Where a tile's result goes, and what is added to it on the way."""

    gD: cute.Tensor  # (tile_m, tile_n)
    cD: cute.Tensor  # (tile_m, tile_n), coordinates in out
    sD: cute.Tensor  # (tile_m, tile_n)
    extents: tuple  # (M, N)
    gC: cute.Tensor | None  # (tile_m, tile_n)
    operands: EpilogueOperands


@dataclass(frozen=True)
class TileStore:
    """``epilogue`` of one ``(tile_m, tile_n)`` tile, then its way through shared memory.

    ``alignment`` and ``source_alignment`` are the widest vectors (elements) into out and out of C. ``source`` is the
    way C is read: ``"none"``, ``"staged"`` through the tile in shared memory (its N is contiguous), or ``"direct"``
    element by element. ``out_columns``: the mode of the tile that runs along out's columns, 0 where it is transposed.
    """

    tile_m: int
    tile_n: int
    threads: int
    alignment: int
    source: str
    source_alignment: int
    out_columns: int
    epilogue: Epilogue

    def smem_layout(self, dtype: type[cutlass.Numeric]) -> cute.ComposedLayout:
        """``(tile_m, tile_n)``, swizzled: neither fragment writes nor 16-byte row reads conflict in banks."""
        atom = hopper_helpers.make_smem_layout_atom(
            hopper_helpers.get_smem_layout_atom(LayoutEnum.ROW_MAJOR, dtype, self.tile_n), dtype
        )
        return cute.tile_to_shape(atom, (self.tile_m, self.tile_n), order=(0, 1))

    def tiled_copy(self, dtype: type[cutlass.Numeric], alignment: int) -> cute.TiledCopy:
        along, across = load_threads(self.tile_m, self.tile_n, True, alignment, self.threads)
        return cute.make_tiled_copy_tv(
            cute.make_copy_atom(cute.nvgpu.CopyUniversalOp(), dtype, num_bits_per_copy=alignment * dtype.width),
            cute.make_layout((across, along), stride=(along, 1)),
            cute.make_layout((1, alignment)),
        )

    @cute.jit
    def mask(self, tc: cute.Tensor, extents: cute.Shape) -> cute.Tensor:
        """Mask of this thread's vectors inside the matrix: ``(REST_V, CPY_M, CPY_N)``."""
        inside = cute.make_rmem_tensor(cute.make_layout(vectors(tc)), Boolean)
        for v in cutlass.range_constexpr(inside.shape[0]):
            for i in cutlass.range_constexpr(inside.shape[1]):
                for j in cutlass.range_constexpr(inside.shape[2]):
                    inside[v, i, j] = cute.elem_less(tc[(0, v), i, j], extents)
        return inside

    @cute.jit
    def stage_source(self, tid: cutlass.Int32, out: TileOutput):
        """C's tile into shared memory, where each thread then reads the elements that it will overwrite."""
        thr = self.tiled_copy(out.gC.element_type, self.source_alignment).get_slice(tid)
        tCgC, tCsD = thr.partition_S(out.gC), thr.partition_D(out.sD)  # (CPY, CPY_M, CPY_N)
        rC = cute.make_fragment_like(tCsD)
        inside = self.mask(thr.partition_S(out.cD), out.extents)
        cute.copy(thr, tCgC, rC, pred=inside)
        cute.copy(thr, rC, tCsD)
        # All threads wait until C is whole in shared memory: they read it in the MMA's layout, not in that of the copy.
        cute.arch.sync_threads()

    @cute.jit
    def finish(self, tid: cutlass.Int32, thr_mma: cute.TiledMma, acc: cute.Tensor, out: TileOutput):
        """Finishes and stores a tile: ``acc`` ((2, 2), MMA_M, MMA_N). Nobody may read ``out.sD`` any more."""
        tCcD = thr_mma.partition_C(out.cD)  # ((2, 2), MMA_M, MMA_N)
        tCsD = thr_mma.partition_C(out.sD)  # ((2, 2), MMA_M, MMA_N)
        if const_expr(self.source == "staged"):
            self.stage_source(tid, out)
        staged = tCsD if const_expr(self.source == "staged") else None
        coordinates = FragmentCoordinates(tCcD, out.extents, self.out_columns, staged=staged)
        # In fp32, then one rounding.
        x = self.epilogue.apply(acc.load().to(Float32), coordinates, out.operands)
        rD = cute.make_fragment_like(acc, out.gD.element_type)
        rD.store(x.to(out.gD.element_type))
        cute.autovec_copy(rD, tCsD)
        # All threads wait until the tile is whole in shared memory: each stores rows that others have computed.
        cute.arch.sync_threads()
        self._store(tid, out)

    @cute.jit
    def _store(self, tid: cutlass.Int32, out: TileOutput):
        thr = self.tiled_copy(out.gD.element_type, self.alignment).get_slice(tid)
        tDsD, tDgD = thr.partition_S(out.sD), thr.partition_D(out.gD)  # (CPY, CPY_M, CPY_N)
        rD = cute.make_fragment_like(tDsD)
        # All of a thread's vectors are read before the first is stored, so that the reads overlap.
        cute.copy(thr, tDsD, rD)
        inside = self.mask(thr.partition_D(out.cD), out.extents)
        cute.copy(thr, rD, tDgD, pred=inside)
