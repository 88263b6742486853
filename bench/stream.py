"""The practical limit of memory: a kernel that only loads and stores as many bytes as the op, in the same proportion.

torch's copy is no reference (docs/notes/trunk.md#streaming). The best shape depends on size and proportion, so each of
``VARIANTS`` is a contender of its own, timed in the same rounds as the others; ``stream_fraction`` in a row refers
to the best of them. Its launches depend on each other as those of our kernels do.
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
from cutekernels.kernels.triton.dependent import pdl_wait

NAME = "streaming"
_UNIT = 16  # words: Triton keeps masked accesses 16 bytes wide where the size is a multiple of 16


@dataclass(frozen=True, slots=True)
class Variant:
    """Shape of one streaming kernel: 4-byte words per program and array, warps, and programs per SM.

    ``per_sm`` 0 launches one program for each block; otherwise that many are persistent.
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
    """Fill each of WRITES arrays with the exclusive or of READS arrays, all of ``words`` words.

    Without WRITES: only that of each block's words is stored, or no load would be needed.

    Schedule: programs take blocks of BLOCK words in turns; all inputs of a block are loaded before its stores.
    """
    pdl_wait(DEPENDENT)
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
        if WRITES == 0:
            tl.store(target_ptr + block, tl.xor_sum(tl.where(inside, mixed, 0), 0))
        block += tl.num_programs(0)


def move(variant: Variant, source: Tensor, target: Tensor, programs: int, dependent: bool) -> Tensor:
    """Stream ``source`` (reads, words) into ``target`` (writes, words), both int32; or (blocks,), a word for each.

    ``programs``: number of persistent programs. ``dependent``: launched while the preceding kernel still runs.
    """
    (reads, words), writes = source.shape, target.shape[0] if target.dim() == 2 else 0
    blocks = -(-words // variant.block)
    grid = (min(blocks, programs) if variant.per_sm else blocks,)
    options = {"num_warps": variant.warps, "launch_pdl": dependent}
    stream[grid](source, target, words, blocks, reads, writes, variant.block, dependent, **options)
    return target


def contenders(reads: int, writes: int, gpu: GpuSpec) -> list[Contender]:
    """One contender per variant: ``reads`` arrays in and ``writes`` out, together the least bytes a case moves.

    ``writes`` may be 0: a weight's bytes are nearly all that few tokens times it move.
    """
    drawn: list[tuple[Tensor, Tensor]] = []  # made by the first variant that is bound, shared by all

    def bind(variant: Variant, case: Case, sets: Sequence[Inputs]) -> Sequence[Launch]:
        if not drawn:
            device = sets[0].operands[0].device
            drawn.extend(arrays(case, reads, writes, device, seed) for seed in range(len(sets)))
        programs = gpu.sm_count * variant.per_sm
        return [partial(move, variant, source, target, programs, gpu.has_pdl) for source, target in drawn]

    return [Contender(f"{NAME} {reads}:{writes} ({v})", partial(bind, v), judged=False) for v in VARIANTS]


def arrays(case: Case, reads: int, writes: int, device: torch.device, seed: int) -> tuple[Tensor, Tensor]:
    """Random words ``(reads, n)``, each a pair of 16-bit floats, and room for ``(writes, n)``, or a word a block.

    Together they have the least number of bytes that ``case`` moves, and up to 64 more for each array.
    """
    words = -(-int(work(case).bytes) // (4 * (reads + writes) * _UNIT)) * _UNIT
    draw = torch.Generator(device).manual_seed(seed)
    halves = torch.randn((reads, 2 * words), generator=draw, device=device, dtype=torch.bfloat16)
    source = halves.view(torch.int32)
    shape = (writes, words) if writes else (-(-words // min(v.block for v in VARIANTS)),)
    return source, source.new_empty(shape)
