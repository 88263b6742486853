"""From accumulators to the result: scale, add C, add bias, activate, round once, store 16 bytes a thread.

The accumulators of an MMA lie two neighbours to a thread. They pass through a tile in shared memory, from which each
thread then takes up to 16 contiguous bytes of a row; C comes in by the same tile where its contiguous extent is out's.
Vectors beyond the ends of out are masked when C is read and when the result is stored, nowhere else.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, const_expr
from cutlass.tensor_utils import LayoutEnum
from cutlass.utils import hopper_helpers

from cutekernels.kernels.cute.parts.load import load_threads, vectors

SQRT_HALF = 0.7071067811865476
SQRT_2_OVER_PI = 0.7978845608028654


@dataclass(frozen=True)
class Activation:
    """``"none" | "relu" | "gelu" | "gelu_tanh" | "silu"`` in fp32, by PyTorch's definitions; NaN stays NaN."""

    name: str

    @cute.jit
    def apply(self, x: cute.TensorSSA) -> cute.TensorSSA:
        y = x
        if const_expr(self.name == "relu"):
            y = cute.where(x < 0.0, cute.full_like(x, 0.0), x)  # false for NaN, which passes through
        elif const_expr(self.name == "silu"):
            y = x / (1.0 + cute.math.exp(-x, fastmath=True))
        elif const_expr(self.name == "gelu"):
            y = 0.5 * x * (1.0 + cute.math.erf(x * SQRT_HALF))
        elif const_expr(self.name == "gelu_tanh"):
            y = 0.5 * x * (1.0 + cute.math.tanh(SQRT_2_OVER_PI * (x + 0.044715 * x * x * x)))
        return y


@cute.jit
def silu_mul(gate: Float32, up: Float32) -> Float32:
    """``silu(gate) * up``, by the approximate reciprocal: a division is ten instructions, and a branch."""
    return gate * cute.arch.rcp_approx(1.0 + cute.math.exp(-gate, fastmath=True)) * up


@dataclass(frozen=True)
class TileOutput:
    """Where a tile's result goes, and what is added to it on the way."""

    gD: cute.Tensor  # (tile_m, tile_n)
    cD: cute.Tensor  # (tile_m, tile_n), coordinates in out
    sD: cute.Tensor  # (tile_m, tile_n)
    extents: tuple  # (M, N)
    mC: cute.Tensor | None  # (M, N)
    gC: cute.Tensor | None  # (tile_m, tile_n)
    mBias: cute.Tensor | None  # (N,), or (M,)
    alpha: Float32
    beta: Float32


@dataclass(frozen=True)
class GemmEpilogue:
    """``out = activation(alpha * acc + beta * c + bias)`` for one ``(tile_m, tile_n)`` tile, through shared memory.

    ``alignment`` and ``source_alignment`` are the widest vectors (elements) into out and out of C. ``source`` is the
    way C is read: ``"none"``, ``"staged"`` through the tile in shared memory (its N is contiguous), or ``"direct"``
    element by element. ``bias`` runs along ``"n"``, ``"m"``, or is ``"none"``.
    """

    tile_m: int
    tile_n: int
    threads: int
    alignment: int
    source: str
    source_alignment: int
    bias: str
    activation: Activation

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
    def gather(self, mC: cute.Tensor, tCcD: cute.Tensor, extents: cute.Shape) -> cute.Tensor:
        """This thread's elements of a C that no vector fits: ((2, 2), MMA_M, MMA_N)."""
        rC = cute.make_rmem_tensor(tCcD.shape, mC.element_type)
        rC.fill(0.0)
        for i in cutlass.range_constexpr(cute.size(tCcD)):
            if cute.elem_less(tCcD[i], extents):
                rC[i] = mC[tCcD[i]]
        return rC

    @cute.jit
    def spread_bias(self, mBias: cute.Tensor, tCcD: cute.Tensor, extents: cute.Shape) -> cute.Tensor:
        """The bias of this thread's elements in fp32, each value loaded once: ((2, 2), MMA_M, MMA_N), broadcast."""
        along = const_expr(1 if self.bias == "n" else 0)  # the matrix mode the bias runs along
        repeats = cute.size(tCcD, mode=[2 if along == 1 else 1])
        rBias = cute.make_rmem_tensor(cute.make_layout((2, repeats)), Float32)
        rBias.fill(0.0)
        # Along N two neighbours of each repeat are a thread's, along M rows r and r + 8.
        for j in cutlass.range_constexpr(repeats):
            for v in cutlass.range_constexpr(2):
                at = (tCcD[(v, 0), 0, j] if along == 1 else tCcD[(0, v), j, 0])[along]
                if at < extents[along]:
                    rBias[v, j] = mBias[at].to(Float32)
        stride = ((1, 0), 0, 2) if along == 1 else ((0, 1), 2, 0)
        return cute.make_tensor(rBias.iterator, cute.make_layout(tCcD.shape, stride=stride))

    @cute.jit
    def finish(self, tid: cutlass.Int32, thr_mma: cute.TiledMma, acc: cute.Tensor, out: TileOutput):
        """Finishes and stores a tile: ``acc`` ((2, 2), MMA_M, MMA_N). Nobody may read ``out.sD`` any more."""
        tCcD = thr_mma.partition_C(out.cD)  # ((2, 2), MMA_M, MMA_N)
        tCsD = thr_mma.partition_C(out.sD)  # ((2, 2), MMA_M, MMA_N)
        if const_expr(self.source == "staged"):
            self.stage_source(tid, out)
        x = out.alpha * acc.load().to(Float32)
        if const_expr(self.source == "staged"):
            rC = cute.make_fragment_like(acc, out.gC.element_type)
            cute.autovec_copy(tCsD, rC)
            x = x + out.beta * rC.load().to(Float32)
        elif const_expr(self.source == "direct"):
            x = x + out.beta * self.gather(out.mC, tCcD, out.extents).load().to(Float32)
        # Bias and activation in fp32, then one rounding.
        if const_expr(self.bias != "none"):
            x = x + self.spread_bias(out.mBias, tCcD, out.extents).load()
        rD = cute.make_fragment_like(acc, out.gD.element_type)
        rD.store(self.activation.apply(x).to(out.gD.element_type))
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
