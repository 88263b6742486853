"""What memory can do: a kernel that only loads and stores, as many bytes as the op beside it and in its proportion.

torch's copy is no reference: inside a CUDA graph it is a memcpy node, whose rate swings between 2.7 and 4.2 TB/s on an
H200 (2026-11-21), and it writes as much as it reads. Which shape streams best depends on size and proportion, so each
of ``VARIANTS`` is a contender of its own, timed in the same rounds as the others; the best of them is what rows refer
to as ``stream_fraction``. Its launches depend on each other as those of our kernels do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from bench.baselines import Contender, Inputs, Launch
from bench.suites import Case
from bench.workloads import work
from cutekernels.gpu import GpuSpec
from cutekernels.kernels.triton.dependent import await_turn

NAME = "streaming"
_UNIT = 16  # words: a size that Triton sees to be a multiple of 16 keeps masked accesses 16 bytes wide


@dataclass(frozen=True, slots=True)
class Variant:
    """Words of 4 bytes that a program moves of each array at a time, its warps, and programs per SM.

    ``per_sm`` 0: one program for each block; else so many stay and take turns.
    """

    block: int
    warps: int
    per_sm: int = 0

    def __str__(self) -> str:
        return f"{self.block}x{self.warps}" + (f" x{self.per_sm} per SM" if self.per_sm else "")


# From two 16-byte accesses per thread and array to eight.
VARIANTS = (Variant(1024, 4), Variant(2048, 4), Variant(4096, 4), Variant(4096, 8, per_sm=4))


@triton.jit  # type: ignore[untyped-decorator]
def stream(  # type: ignore[no-untyped-def]
    source_ptr,
    target_ptr,
    words,
    blocks,
    READS: tl.constexpr,
    WRITES: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Each of WRITES arrays becomes the exclusive or of READS arrays, all of ``words`` words.

    Schedule: programs take blocks of BLOCK words in turns; whatever a block needs is loaded before it is stored.
    """
    await_turn(DEPENDENT)
    block = tl.program_id(0).to(tl.int64)
    pitch = words.to(tl.int64)
    while block < blocks:
        at = block * BLOCK + tl.arange(0, BLOCK)
        inside = at < words
        mixed = tl.load(source_ptr + at, mask=inside)
        for i in tl.static_range(1, READS):
            mixed ^= tl.load(source_ptr + i * pitch + at, mask=inside)
        for i in tl.static_range(WRITES):
            tl.store(target_ptr + i * pitch + at, mixed, mask=inside)
        block += tl.num_programs(0)


def move(variant: Variant, source: Tensor, target: Tensor, programs: int, dependent: bool) -> Tensor:
    """Streams ``source`` (reads, words) into ``target`` (writes, words), both int32.

    ``programs``: how many of those that stay. ``dependent``: launched while the kernel ahead still runs.
    """
    (reads, words), writes = source.shape, target.shape[0]
    blocks = -(-words // variant.block)
    grid = (min(blocks, programs) if variant.per_sm else blocks,)
    options = {"num_warps": variant.warps, "launch_pdl": dependent}
    stream[grid](source, target, words, blocks, reads, writes, variant.block, dependent, **options)
    return target


def contenders(reads: int, writes: int, gpu: GpuSpec) -> list[Contender]:
    """One for each variant: ``reads`` arrays in and ``writes`` out, together the bytes that a case needs to move."""
    drawn: list[tuple[Tensor, Tensor]] = []  # by the first that is bound; the variants share them

    def bind(variant: Variant, case: Case, sets: Sequence[Inputs]) -> Sequence[Launch]:
        if not drawn:
            device = sets[0].operands[0].device
            drawn.extend(arrays(case, reads, writes, device, seed) for seed in range(len(sets)))
        programs = gpu.sm_count * variant.per_sm
        return [partial(move, variant, source, target, programs, gpu.has_pdl) for source, target in drawn]

    return [Contender(f"{NAME} {reads}:{writes} ({v})", partial(bind, v), judged=False) for v in VARIANTS]


def arrays(case: Case, reads: int, writes: int, device: torch.device, seed: int) -> tuple[Tensor, Tensor]:
    """Random words ``(reads, n)``, each a pair of halves, and room for ``(writes, n)``.

    Together they are the bytes that the op says ``case`` moves at least, and up to 64 more for each array.
    """
    words = -(-int(work(case).bytes) // (4 * (reads + writes) * _UNIT)) * _UNIT
    draw = torch.Generator(device).manual_seed(seed)
    halves = torch.randn((reads, 2 * words), generator=draw, device=device, dtype=torch.bfloat16)
    source = halves.view(torch.int32)
    return source, source.new_empty((writes, words))
