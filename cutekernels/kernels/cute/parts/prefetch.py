"""Asking memory for what a kernel will read while it still waits for its turn.

A prefetch brings lines to the L2 cache, which is where all SMs meet: what the kernel ahead writes to them later is what
is read later. So it is right whatever the kernel ahead writes.
"""

from cutlass import Int32, Int64
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import dsl_user_op


@dsl_user_op
def prefetch_bulk(address: Int64, count: Int32, *, loc: object = None, ip: object = None) -> None:
    """Asks for ``count`` bytes of global memory from ``address`` on, both multiples of 16. For sm_90 on."""
    llvm.inline_asm(
        None,
        [address.ir_value(loc=loc, ip=ip), count.ir_value(loc=loc, ip=ip)],
        "cp.async.bulk.prefetch.L2.global [$0], $1;",
        "l,r",
        has_side_effects=True,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
        loc=loc,
        ip=ip,
    )
