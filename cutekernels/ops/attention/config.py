"""The configs of ``attention``: both bodies' knobs and their values; the warpgroup body's rules and model."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from cutekernels import rates
from cutekernels.kernels.cute.parts.attention_smem import PrefillSmem, WarpgroupAttentionSmem
from cutekernels.op import knob, power_of_two
from cutekernels.ops.attention.problem import (
    EAGER,
    EXPONENTS,
    EXPONENTS_PER_CLOCK,
    ORDER,
    AttentionProblem,
    BodiesConfig,
)

if TYPE_CHECKING:
    from cutekernels.gpu import GpuSpec

GROUP_ROWS = WarpgroupAttentionSmem.GROUP_ROWS
GROUP_WARPS = 4
# Accumulators and probabilities that a thread keeps without spilling: docs/notes/attention.md#warpgroup-registers.
MOST_VALUES = {1: 212, 2: 212, 3: 132}

# Constants of the model: docs/notes/attention.md#warpgroup-model (H200, 2026-11-23).
_MMA = 0.97  # of warpgroup_flops_per_us
_LAUNCH, _CTA, _NEXT = 2.0 / 1.5, 3.9 / 0.8, 2.5 / 0.8  # of launch_us; of dram_latency_us: a CTA, a further tile
_BLOCK = {2: 1.0, 1: 5.0}  # of barrier_us, by stages: a block of keys, whatever its size
_NO_TURNS, _DEALT = 1.04, 1.07  # groups that do not take turns; tiles dealt out before the heavy ones are done
_ODD = 1.05  # blocks of keys that are no multiple of 64


@dataclass(frozen=True)
class AttentionConfig(BodiesConfig):
    """The knobs of both bodies: ``prefill.py`` (warps) and ``warpgroup.py`` in ``kernels/cute/attention/``.

    ``lazy`` rescales sums only where a block's scores exceed the row's reference by far. ``order`` is that of tiles.
    Of the warpgroup body alone: ``turns`` lets its groups multiply one after another, ``grid`` gives each tile a CTA
    ("tiles"), walks over the tiles in a persistent grid ("persistent"), or draws them from a counter there ("counted").
    """

    tiles: ClassVar = ("tile_q", "tile_kv")
    bodies: ClassVar = {
        "warps": {
            "tile_q": (64, 128, 256),
            "tile_kv": (32, 64, 128),
            "warps": (4, 8),
            "stages": (1, 2),
            "ctas_per_sm": (1, 2, 3),
            "q_in_registers": (False, True),
            "lazy": (True, False),
            "order": ("rows", "l2", "heads"),
        },
        "warpgroup": {
            "tile_q": (64, 128, 192),
            "tile_kv": (48, 64, 80, 96, 112, 128, 144, 160, 176),
            "warps": (4, 8, 12),
            "stages": (1, 2),
            "lazy": (True, False),
            "order": ("rows", "l2", "heads"),
            "turns": (False, True),
            "grid": ("tiles", "persistent", "counted"),
        },
    }
    tile_q: int = knob(64, 128, 192, 256)
    tile_kv: int = knob(32, 48, 64, 80, 96, 112, 128, 144, 160, 176)
    warps: int = knob(4, 8, 12)
    stages: int = knob(1, 2)
    ctas_per_sm: int = knob(1, 2, 3)
    q_in_registers: bool = knob(False, True)
    lazy: bool = knob(True, False)
    order: str = knob("rows", "l2", "heads")
    body: str = knob("warps", "warpgroup", added=True)
    turns: bool = knob(False, True, added=True)
    grid: str = knob("tiles", "persistent", "counted", added=True)

    def smem(self, p: AttentionProblem) -> PrefillSmem | WarpgroupAttentionSmem:
        if self.body == "warpgroup":
            return WarpgroupAttentionSmem(self.tile_q // GROUP_ROWS, self.tile_kv, p.head_dim, self.stages)
        return PrefillSmem(self.tile_q, self.tile_kv, p.head_dim, self.stages)


# ---- the warpgroup body ----------------------------------------------------------------------------------


def warpgroup_unfit(p: AttentionProblem, c: AttentionConfig, gpu: GpuSpec) -> Iterator[str]:
    """The rules that ``c`` breaks whatever the extents of ``p``."""
    groups = c.tile_q // GROUP_ROWS
    if p.page and p.page % c.tile_kv and c.tile_kv % p.page:
        yield f"tile_kv={c.tile_kv} is neither part nor multiple of a page of {p.page} keys"
    if not (gpu.has_tma and gpu.has_wgmma):
        yield f"{gpu.name} has no warpgroup MMA"
    if c.warps != GROUP_WARPS * groups:
        yield f"body=warpgroup has {GROUP_WARPS} warps for {GROUP_ROWS} queries: tile_q={c.tile_q} takes {4 * groups}"
        return
    values = (p.width + c.tile_kv) // 2 + c.tile_kv // 4
    if values > MOST_VALUES[groups]:
        yield f"a thread has {values} sums and probabilities; {groups} groups leave room for {MOST_VALUES[groups]}"
    need = c.smem(p).total_bytes
    if need > gpu.smem_per_block_bytes:
        yield f"{need} bytes of shared memory are more than a block's {gpu.smem_per_block_bytes}"
    if c.turns and groups == 1:
        yield "turns=1 is for two groups or more"


def warpgroup_unsuited(p: AttentionProblem, c: AttentionConfig, gpu: GpuSpec) -> Iterator[str]:
    """The other rules that ``c`` breaks."""
    for name, tile, seq, least in (("tile_q", c.tile_q, p.seq_q, 64), ("tile_kv", c.tile_kv, p.seq_kv, 64)):
        if tile > max(least, power_of_two(seq)):
            yield f"{name}={tile} idles most of a tile over {seq} rows"
    if c.order != "rows" and p.seq_q <= c.tile_q:
        yield f"order={c.order} needs more than one tile of rows"
    if c.grid != "tiles" and tiles(p, c) <= gpu.sm_count:
        yield f"grid={c.grid} is for more tiles than SMs"


def tiles(p: AttentionProblem, c: AttentionConfig) -> int:
    """Tiles of queries, all heads together."""
    return -(-p.seq_q // c.tile_q) * p.batch * p.heads_q


def warpgroup_us(p: AttentionProblem, c: AttentionConfig, gpu: GpuSpec) -> float:
    """Tiles of an SM, block by block: products, and the exponents that they do not hide; or DRAM, if slower."""
    rate = rates.of(gpu)
    count = tiles(p, c)
    if count == 0 or p.seq_kv == 0:
        return _LAUNCH * rate.launch_us
    uneven = p.limited_left or p.limited_right
    seen = min(p.pairs / p.seq_q + (0.5 * c.tile_q if uneven else 0), p.seq_kv)
    shared = math.gcd(c.tile_q if uneven else p.seq_kv, c.tile_kv)  # the last block is half empty, on average
    blocks = max(1.0, seen / c.tile_kv + 0.5 * (1.0 - shared / c.tile_kv))
    multiply = 4.0 * c.tile_q * c.tile_kv * p.width / (_MMA * rate.warpgroup_flops_per_us)
    exponents = c.tile_q * c.tile_kv / (EXPONENTS_PER_CLOCK * rate.clock_mhz)
    step = multiply + EXPONENTS * exponents * (1.0 if c.lazy else EAGER) + _BLOCK[c.stages] * rate.barrier_us
    step *= (1.0 if c.turns else _NO_TURNS) * (1.0 if c.tile_kv % 64 == 0 else _ODD)
    between = (_CTA if c.grid == "tiles" else _NEXT) * rate.dram_latency_us
    per_sm = max(1.0, count / gpu.sm_count) if c.grid == "counted" or uneven else -(-count // gpu.sm_count)
    busy = per_sm * (blocks * step + between) * ORDER[uneven][c.order]
    if uneven and c.grid == "persistent":
        busy *= _DEALT
    dram = p.bytes_moved / (rate.dram_share * gpu.dram_gbps * 1e3)
    return float(_LAUNCH * rate.launch_us + max(busy, dram))
