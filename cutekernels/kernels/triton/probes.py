"""A kernel that only reads, for the speed of DRAM to be timed (``autotune/probes.py``)."""

import triton
import triton.language as tl


@triton.jit
def read(source_ptr, target_ptr, steps, stride, BLOCK: tl.constexpr):
    """Each program reads ``steps`` blocks of BLOCK words, ``stride`` words apart. The exclusive or of all is stored.

    Grid: any number of programs.
    """
    own = tl.arange(0, BLOCK)
    base = tl.program_id(0).to(tl.int64) * BLOCK
    target = target_ptr + base + own
    mixed = tl.zeros((BLOCK,), tl.int32)
    for _ in range(steps):
        mixed ^= tl.load(source_ptr + base + own, cache_modifier=".cg")
        base += stride
    tl.store(target, mixed)
