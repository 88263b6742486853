"""A CTA of warp groups: consumers, which multiply 64 rows each by wgmma, and behind them a producer, which loads.

The producer's first warp works, its other three are idle; setmaxnreg moves their registers to the consumers.
"""

from collections.abc import Callable
from typing import ClassVar

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup
from cutlass.utils import hopper_helpers

GROUP = 128  # threads of a warp group
ROWS = 64  # that it multiplies at once


class WarpGroupBody:
    """What bodies of ``groups`` consumer warp groups, and the producer behind them, have in common."""

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
