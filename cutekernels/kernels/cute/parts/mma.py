"""Shared memory to tensor cores: ``ldmatrix`` fragments and the warp-level ``mma.sync.m16n8k16``."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import warp


@dataclass(frozen=True)
class WarpMma:
    """``warps_m x warps_n`` warps, each multiplying m16n8k16.

    N advances by 16, which one ldmatrix.x4 feeds; ``atom_n=8`` is for tiles that are no multiple of 16.
    """

    warps_m: int
    warps_n: int
    accumulate: type[cutlass.Numeric]
    a_k_major: bool
    b_k_major: bool
    atom_n: int = 16

    def tiled_mma(self, dtype: type[cutlass.Numeric]) -> cute.TiledMma:
        return cute.make_tiled_mma(
            warp.MmaF16BF16Op(dtype, self.accumulate, (16, 8, 16)),
            cute.make_layout((self.warps_m, self.warps_n, 1)),
            permutation_mnk=(self.warps_m * 16, self.warps_n * self.atom_n, 16),
        )

    def fragment_copies(
        self, mma: cute.TiledMma, dtype: type[cutlass.Numeric]
    ) -> tuple[cute.TiledCopy, cute.TiledCopy]:
        """The tiled copies that fill A and B fragments by ldmatrix, transposing what is not K-major."""
        a = cute.make_copy_atom(warp.LdMatrix8x8x16bOp(not self.a_k_major, 4), dtype)
        b = cute.make_copy_atom(warp.LdMatrix8x8x16bOp(not self.b_k_major, self.atom_n // 4), dtype)
        return cute.make_tiled_copy_A(a, mma), cute.make_tiled_copy_B(b, mma)
