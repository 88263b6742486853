"""Stores that tell the L2 cache how long to keep what they store."""

import cutlass.cute as cute
from cutlass import Int64
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import dsl_user_op

from cutekernels.kernels.cache import KEPT_BYTES

# Encoded eviction policies, as `createpolicy.fractional.L2` makes them for all of a store's bytes.
_NORMAL, _LAST = 0x1000000000000000, 0x14F0000000000000


@cute.jit
def eviction(size: Int64) -> Int64:
    """The policy for results of ``size`` bytes in all."""
    policy = Int64(_NORMAL)
    if size <= KEPT_BYTES:
        policy = Int64(_LAST)
    return policy


@dsl_user_op
def store_16(target: cute.Pointer, words: cute.Tensor, policy: Int64, *, loc: object = None, ip: object = None) -> None:
    """Stores four 32-bit ``words`` to global memory, at a multiple of 16 bytes. For sm_80 on."""
    values = [words[i].ir_value(loc=loc, ip=ip) for i in range(4)]
    llvm.inline_asm(
        None,
        [target.toint(loc=loc, ip=ip).ir_value(loc=loc, ip=ip), *values, policy.ir_value(loc=loc, ip=ip)],
        "st.global.L2::cache_hint.v4.b32 [$0], {$1, $2, $3, $4}, $5;",
        "l,r,r,r,r,l",
        has_side_effects=True,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
        loc=loc,
        ip=ip,
    )
