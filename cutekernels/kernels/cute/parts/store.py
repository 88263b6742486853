"""Stores with an eviction policy: the L2 cache keeps small results for the next kernel: docs/notes/gemm.md#kept."""

import cutlass
import cutlass.cute as cute
from cutlass import Int64

from cutekernels.kernels.cute.parts.ptx import instruction

# Encoded eviction policies, as `createpolicy.fractional.L2` returns them for all of a store's bytes.
_NORMAL, _LAST = 0x1000000000000000, 0x14F0000000000000


@cute.jit
def eviction(size: Int64, kept_bytes: cutlass.Constexpr[int]) -> Int64:
    """The policy for results of ``size`` bytes in all: at most ``kept_bytes`` are evicted last."""
    policy = Int64(_NORMAL)
    if size <= kept_bytes:
        policy = Int64(_LAST)
    return policy


def store_16(target: cute.Pointer, words: cute.Tensor, policy: Int64) -> None:
    """Four 32-bit ``words`` to global memory, at a multiple of 16 bytes; sm_80 and later."""
    text = "st.global.L2::cache_hint.v4.b32 [$0], {$1, $2, $3, $4}, $5;"
    instruction(text, "l,r,r,r,r,l", target.toint(), *[words[i] for i in range(4)], policy)
