"""Programmatic dependent launch: how a kernel starts while the one ahead of it still runs.

Every kernel of this package has DEPENDENT as its last parameter and begins with :func:`await_turn`; the backend sets
DEPENDENT and the launch attribute where the GPU knows them (``GpuSpec.has_pdl``).
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def await_turn(DEPENDENT: tl.constexpr):
    """Lets the next kernel's programs be placed as soon as SMs have room, then waits until the kernel ahead is done.

    Nothing may touch memory before it, in any program: a kernel is done when its programs are, so that the next one's
    wait covers everything ahead of it.

    H200, in CUDA graphs of one op, default configs, in runs before and after: one row of 4096 rms_norm 1.65 -> 1.16 us,
    silu_mul of 16 x 14336 2.25 -> 1.60, of 256 x 14336 7.16 -> 6.88 (2026-11-21).
    """
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()


@triton.jit
def ask(pointer, elements):
    """Asks memory for ``elements`` from ``pointer`` on, before the turn has come. For sm_90 on.

    A prefetch brings lines to the L2 cache, which is where all SMs meet: right whatever the kernel ahead writes there.
    """
    begin = pointer.to(tl.int64)
    end = begin + elements * (pointer.dtype.element_ty.primitive_bitwidth // 8)
    begin = begin // 16 * 16
    count = ((end - begin + 15) // 16 * 16).to(tl.int32)
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
