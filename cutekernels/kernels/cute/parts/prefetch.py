"""Prefetches into the L2 cache by a kernel that has not passed ``pdl_wait`` (griddepcontrol.wait).

All SMs share the L2, so a later write of the previous kernel is seen by a later read: a prefetch is always safe.
"""

import cutlass.cute as cute
from cutlass import Int32, Int64

from cutekernels.kernels.cute.parts.ptx import instruction


def prefetch_bulk(address: Int64, count: Int32) -> None:
    """Prefetch of ``count`` bytes of global memory at ``address``, both multiples of 16; sm_90 and later."""
    instruction("cp.async.bulk.prefetch.L2.global [$0], $1;", "l,r", address, count)


def prefetch_line(address: cute.Pointer) -> None:
    """Prefetch of the cache line of global memory that ``address`` lies in."""
    instruction("prefetch.global.L2 [$0];", "l", Int64(address.toint()))
