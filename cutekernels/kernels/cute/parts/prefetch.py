"""Asking memory for what a kernel will read while it still waits for its turn.

A prefetch brings lines to the L2 cache, which is where all SMs meet: what the kernel ahead writes to them later is what
is read later. So it is right whatever the kernel ahead writes.
"""

from cutlass import Int32, Int64

from cutekernels.kernels.cute.parts.ptx import instruction


def prefetch_bulk(address: Int64, count: Int32) -> None:
    """Asks for ``count`` bytes of global memory from ``address`` on, both multiples of 16. For sm_90 on."""
    instruction("cp.async.bulk.prefetch.L2.global [$0], $1;", "l,r", address, count)
