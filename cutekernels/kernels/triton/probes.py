"""Kernels that do one thing each, for its speed to be timed: ``autotune/probes.py`` reads a GPU's rates with them."""

import triton
import triton.language as tl

from cutekernels.kernels.triton.dependent import pdl_wait


@triton.jit
def alone(target_ptr):
    """Starts and ends, not before the kernel ahead has ended: what a launch, and a block, cost by themselves.

    Grid: any number of programs, as for all probes but :func:`exchange`.
    """
    tl.program_id(0)


@triton.jit
def dependent(target_ptr, DEPENDENT: tl.constexpr):
    """Starts while the kernel ahead still runs, waits for its end, and ends."""
    pdl_wait(DEPENDENT)


@triton.jit
def walk(source_ptr, target_ptr, steps, stride, span, BLOCK: tl.constexpr, CHAINED: tl.constexpr):
    """Each program loads ``steps`` blocks of BLOCK words, ``stride`` words apart, walking around in ``span`` words.

    The exclusive or of all is stored.

    CHAINED: the words are zeros, and each thread's address is that of its next word plus the word before: a step takes
    the time from a load to its data, whatever could be loaded at once.
    """
    # The program's place in the source, taken modulo ``span``; 16 words divide it, so that loads stay wide.
    own = tl.arange(0, BLOCK)
    base = tl.program_id(0).to(tl.int64) * BLOCK
    mixed = tl.zeros((BLOCK,), tl.int32)
    for _ in range(steps):
        at = source_ptr + tl.multiple_of(base % span, 16) + own
        if CHAINED:
            # Plus zero, which only the load before can tell.
            at += mixed
        mixed ^= tl.load(at, cache_modifier=".cg")
        base += stride
    tl.store(target_ptr + tl.program_id(0).to(tl.int64) * BLOCK + own, mixed)


@triton.jit
def gather(target_ptr, rounds):
    """All threads of a program wait for each other, ``rounds`` times."""
    for _ in range(rounds):
        tl.debug_barrier()
    tl.store(target_ptr + tl.program_id(0), rounds)


@triton.jit
def exchange(boxes_ptr, rounds, most):
    """Two programs: each adds one to the other's box, then looks at its own until the other has, ``rounds`` times.

    ``boxes_ptr``: two boxes, 32 words apart, that hold what all launches before left, the same in both. ``most`` looks
    end a wait, so that nothing hangs where only one of the programs runs.
    """
    mine = boxes_ptr + 32 * tl.program_id(0)
    other = boxes_ptr + 32 * (1 - tl.program_id(0))
    for _ in range(rounds):
        # The other program's box counts what this one has sent; its own box shows what the other has.
        sent = tl.atomic_add(other, 1, sem="release", scope="gpu") + 1
        looks = 0
        while (tl.atomic_add(mine, 0, sem="acquire", scope="gpu") < sent) & (looks < most):
            looks += 1
