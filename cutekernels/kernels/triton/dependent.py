"""Programmatic dependent launch (PDL): how a kernel starts while the one ahead of it still runs.

Every kernel of this package has DEPENDENT as its last parameter and begins with :func:`pdl_wait`; the backend sets
DEPENDENT and the launch attribute where the GPU knows them (``GpuSpec.has_pdl``).
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def pdl_wait(DEPENDENT: tl.constexpr):
    """Lets the next kernel's programs be placed as soon as SMs have room, then waits until the kernel ahead is done.

    Nothing may touch memory before it, in any program: a kernel is done when its programs are, so that the next one's
    wait covers everything ahead of it.

    H200, in CUDA graphs of one op, default configs, in runs before and after: one row of 4096 rms_norm 1.65 -> 1.16 us,
    silu_mul of 16 x 14336 2.25 -> 1.60, of 256 x 14336 7.16 -> 6.88 (2026-11-21).
    """
    if DEPENDENT:
        # griddepcontrol.launch_dependents first: the next kernel's wait does not depend on when this one signals.
        gdc_launch_dependents()
        # griddepcontrol.wait: all programs of the kernel ahead have ended, and their stores are visible.
        gdc_wait()


@triton.jit
def prefetch_l2(pointer, elements):
    """Prefetches ``elements`` from ``pointer`` on into the L2 cache, ahead of :func:`pdl_wait`. For sm_90 on.

    All SMs meet in the L2 cache: the prefetch is right whatever the kernel ahead still writes there.
    """
    # The instruction takes whole units of 16 bytes: from the one that holds the first byte to the one after the last.
    begin = pointer.to(tl.int64)
    end = begin + elements * (pointer.dtype.element_ty.primitive_bitwidth // 8)
    begin = begin // 16 * 16
    count = ((end - begin + 15) // 16 * 16).to(tl.int32)
    # One thread's work. The result is not used: an inline instruction has one.
    tl.inline_asm_elementwise(
        """{
        .reg .pred first; .reg .u32 thread;
        mov.u32 thread, %tid.x;
        setp.eq.u32 first, thread, 0;
        @first cp.async.bulk.prefetch.L2.global [$1], $2;
        mov.u32 $0, 0;
        }""",
        "=r,l,r",
        [begin, count],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
