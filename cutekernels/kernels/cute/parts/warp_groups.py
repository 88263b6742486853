"""A CTA of warp groups: consumers, which multiply 64 rows each by wgmma, and behind them a producer, which loads.

The producer's first warp works, its other three are idle; setmaxnreg moves their registers to the consumers.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int16, Int32, Int64, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup
from cutlass.utils import hopper_helpers

GROUP = 128  # threads of a warp group
ROWS = 64  # that it multiplies at once


@dataclass(frozen=True)
class BoxLoad:
    """The loads of a box's k-tiles. A gated operand has two boxes in a stage: ``half`` says which."""

    tma: cute.CopyAtom
    source: cute.Tensor  # (TMA, k)
    target: cute.Tensor  # (TMA, STAGE), or (TMA, 2 * STAGE) of halves
    mask: Int16 | None = None  # CTAs of the cluster that get it
    half: Int32 | None = None


@dataclass(frozen=True)
class TmaTensor:
    """A TMA copy, and the coordinates that it is given in the tensor it copies from or to."""

    tma: cute.CopyAtom
    coordinates: cute.Tensor

    @cute.jit
    def loads(
        self,
        sX: cute.Tensor,  # (rows, K, STAGE)
        first: Int32,
        shape: tuple[int, int],
        part: int | Int32 = 0,
        parts: cutlass.Constexpr[int] = 1,
    ) -> BoxLoad:
        """The loads of boxes of ``shape`` along K, from row ``first`` on; ``part`` of each, where CTAs load parts."""
        gX = cute.local_tile(cute.domain_offset((first, 0), self.coordinates), shape, (0, None))  # (rows, K, k)
        target, source = cpasync.tma_partition(
            self.tma, part, cute.make_layout(parts), cute.group_modes(sX, 0, 2), cute.group_modes(gX, 0, 2)
        )
        return BoxLoad(self.tma, source, target)


class WarpGroupBody:
    """The common part of bodies of ``groups`` consumer warp groups and the producer behind them."""

    groups: int
    REGISTERS: ClassVar[dict[int, tuple[int, int]]] = {1: (40, 232), 2: (40, 232), 3: (32, 160)}

    @property
    def registers(self) -> tuple[int, int]:
        """Registers of a producer's thread and of a consumer's."""
        return self.REGISTERS[self.groups]

    @property
    def threads(self) -> int:
        return GROUP * (self.groups + 1)

    @cute.jit
    def role(self) -> tuple[Int32, Int32, Int32]:
        """This thread, its warp group and its warp, each one value for all of its threads. The producer's group is
        number ``groups``.
        """
        tid, _, _ = cute.arch.thread_idx()
        return tid, cute.arch.make_warp_uniform(tid // GROUP), cute.arch.make_warp_uniform(tid // 32)

    @cute.jit
    def initialize(self, warp: Int32, tmas: tuple[cute.CopyAtom, ...], barriers: Callable[[], None]):
        """Before the caller's barrier, of the CTA or the cluster: the producer's first warp fetches the descriptors of
        ``tmas``, and one of its threads initializes the mbarriers by calling ``barriers``.
        """
        if warp == 4 * self.groups:
            for tma in tmas:
                cpasync.prefetch_descriptor(tma)
            with cute.arch.elect_one():
                barriers()
            # Initialized barriers become visible to the TMA and to the cluster's other CTAs.
            cute.arch.mbarrier_init_fence()

    @cute.jit
    def blank(self, tid: Int32, mD: cute.Tensor, lead: Int32, tail: Int32):
        """Zeros for the rows of no group, before ``lead`` and from ``tail`` on: this CTA's share, by its consumers."""
        block, _, _ = cute.arch.block_idx()
        blocks, _, _ = cute.arch.grid_dim()
        rows, columns = mD.shape
        warps = const_expr(4 * self.groups)
        zeros = cute.make_rmem_tensor(8, mD.element_type)
        zeros.fill(0.0)
        # A row to a warp, 16 bytes to a lane; the grid's warps take rows in turns.
        for i in cutlass.range(block * warps + tid // 32, lead + (rows - tail), blocks * warps, unroll=1):
            row = i if i < lead else i - lead + tail
            for column in cutlass.range(tid % 32 * 8, columns, 32 * 8, unroll=1):
                to = mD.iterator + (Int64(row) * mD.stride[0] + column)
                cute.autovec_copy(zeros, cute.make_tensor(to.align(16), cute.make_layout(8)))


def wgmma(
    dtype: type[cutlass.Numeric],
    columns: int,
    majors: tuple[OperandMajorMode, OperandMajorMode] = (OperandMajorMode.K, OperandMajorMode.K),
    groups: int = 1,
    accumulate: type[cutlass.Numeric] = Float32,
    source: warpgroup.OperandSource = warpgroup.OperandSource.SMEM,
) -> cute.TiledMma:
    """The product of ``groups`` warp groups, 64 rows each, by ``columns``; A from ``source``, B from shared memory."""
    return hopper_helpers.make_trivial_tiled_mma(
        dtype, dtype, *majors, accumulate, (groups, 1, 1), (ROWS, columns), source
    )
