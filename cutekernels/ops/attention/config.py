"""The configs of ``attention``: both bodies' knobs and their values; the warpgroup body's rules and model."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from cutekernels import rates
from cutekernels.kernels.cute.parts.attention_smem import MultistageAttentionSmem, WarpgroupAttentionSmem
from cutekernels.op import knob, power_of_two
from cutekernels.ops.attention.coefficients import EAGER, EXPONENTS, EXPONENTS_PER_CLOCK, HIDDEN, ORDER, WARPGROUP
from cutekernels.ops.attention.problem import (
    AttentionProblem,
    BodiesConfig,
    BodySchedule,
    walked_bytes,
)
from cutekernels.ops.shared.occupancy import no_warpgroups
from cutekernels.rules import of_both, of_config, of_problem

if TYPE_CHECKING:
    from cutekernels.gpu import GpuSpec

GROUP_ROWS = WarpgroupAttentionSmem.GROUP_ROWS
GROUP_WARPS = 4
# Accumulators and probabilities that a thread keeps without spilling: docs/notes/attention.md#warpgroup-registers.
MOST_VALUES = {1: 212, 2: 212, 3: 132}
FEW_VALUES = 160  # of body=few: docs/notes/attention.md#few-tiles


@dataclass(frozen=True)
class AttentionConfig(BodiesConfig):
    """The knobs of both bodies: ``multistage_forward.py`` and ``warpgroup_forward.py`` in ``kernels/cute/attention/``.

    ``lazy`` rescales sums only where a block's scores exceed the row's reference by far. ``order`` is that of tiles.
    Of the warpgroup body alone: ``turns`` lets its groups multiply one after another, ``grid`` gives each tile a CTA
    ("tiles"), walks over the tiles in a persistent grid ("persistent"), or draws them from a counter there ("dynamic"),
    which with "ahead" loads the next tile's queries behind this tile's last products.
    ``body="few"`` is the warpgroup body for few tiles: ``split`` CTAs of a cluster share a tile's keys, two CTAs of one
    group share an SM, or the groups of a CTA have the i-th and the i-th last 64 rows of a head (``order="paired"``).
    """

    tiles: ClassVar = ("tile_q", "tile_kv")
    bodies: ClassVar = {
        "multistage": {
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
            "grid": ("tiles", "persistent", "dynamic", "ahead"),
        },
        "few": {
            "tile_q": (64, 128),
            "tile_kv": (64, 128),
            "warps": (4, 8),
            "stages": (1, 2),
            "ctas_per_sm": (1, 2),
            "lazy": (True, False),
            "order": ("rows", "heads", "paired"),
            "split": (1, 2, 4),
        },
    }
    tile_q: int = knob(64, 128, 192, 256)
    tile_kv: int = knob(32, 48, 64, 80, 96, 112, 128, 144, 160, 176)
    warps: int = knob(4, 8, 12)
    stages: int = knob(1, 2)
    ctas_per_sm: int = knob(1, 2, 3)
    q_in_registers: bool = knob(False, True)
    lazy: bool = knob(True, False)
    order: str = knob("rows", "l2", "heads", "paired")
    body: str = knob("multistage", "warpgroup", "few", added=True)
    turns: bool = knob(False, True, added=True)
    grid: str = knob("tiles", "persistent", "dynamic", "ahead", added=True)
    split: int = knob(1, 2, 4, added=True)

    @property
    def by_groups(self) -> bool:
        """Whether warp groups multiply."""
        return self.body != "multistage"

    @property
    def dynamic_scheduler(self) -> bool:
        """Whether CTAs draw their tiles from a counter."""
        return self.grid in ("dynamic", "ahead")

    @property
    def dependent(self) -> bool:
        """Whether a launch sets up behind the kernel ahead of it: programmatic dependent launch."""
        return self.body == "few" or self.grid == "ahead"

    def smem(self, p: AttentionProblem) -> MultistageAttentionSmem | WarpgroupAttentionSmem:
        if self.by_groups:
            groups, separate = self.tile_q // GROUP_ROWS, self.grid == "ahead"
            return WarpgroupAttentionSmem(groups, self.tile_kv, p.head_dim, self.stages, separate, self.split)
        return MultistageAttentionSmem(self.tile_q, self.tile_kv, p.head_dim, self.stages)


# ---- the warpgroup body ----------------------------------------------------------------------------------


class WarpgroupForward(BodySchedule[Any, AttentionConfig]):
    """TMA and warpgroup MMA."""

    name = "warpgroup"
    config = AttentionConfig
    most_values: ClassVar = MOST_VALUES

    warpgroup_mma = of_problem(no_warpgroups)

    @of_problem
    def cache(self, p: AttentionProblem, gpu: GpuSpec, x: object) -> str | None:
        if p.cached_in != "same":
            return f"body={self.name} copies keys as they are: body=multistage converts a cache in FP8"
        return None

    @of_config
    def pages(self, c: AttentionConfig, gpu: GpuSpec, x: AttentionProblem) -> str | None:
        if x.page and x.page % c.tile_kv and c.tile_kv % x.page:
            return f"tile_kv={c.tile_kv} is neither part nor multiple of a page of {x.page} keys"
        return None

    @of_config
    def warps_of_groups(self, c: AttentionConfig, gpu: GpuSpec, x: AttentionProblem) -> str | None:
        groups = c.tile_q // GROUP_ROWS
        if c.warps != GROUP_WARPS * groups:
            takes = f"tile_q={c.tile_q} takes {GROUP_WARPS * groups}"
            return f"body=warpgroup has {GROUP_WARPS} warps for {GROUP_ROWS} queries: {takes}"
        return None

    @of_config
    def registers(self, c: AttentionConfig, gpu: GpuSpec, x: AttentionProblem) -> str | None:
        groups = c.tile_q // GROUP_ROWS
        values, most = (x.width + c.tile_kv) // 2 + c.tile_kv // 4, self.most_values.get(groups, 0)
        if values > most:
            room = f"{groups} groups of body={c.body} leave room for {most}"
            return f"a thread has {values} accumulators and probabilities; {room}"
        return None

    @of_config
    def shared_memory(self, c: AttentionConfig, gpu: GpuSpec, x: AttentionProblem) -> str | None:
        need = c.smem(x).total_bytes
        if need > gpu.smem_per_block_bytes:
            return f"{need} bytes of shared memory are more than a block's {gpu.smem_per_block_bytes}"
        if c.ctas_per_sm * (need + gpu.SMEM_RESERVED_BYTES) > gpu.smem_per_sm_bytes:
            return f"{c.ctas_per_sm} CTAs of {need} bytes of shared memory do not fit an SM"
        return None

    @of_config
    def turns(self, c: AttentionConfig, gpu: GpuSpec, x: AttentionProblem) -> str | None:
        return "turns=1 is for two groups or more" if c.turns and c.tile_q == GROUP_ROWS else None

    @of_both
    def tile_rows(self, p: AttentionProblem, c: AttentionConfig, gpu: GpuSpec, x: object) -> str | None:
        for name, tile, seq in (("tile_q", c.tile_q, p.seq_q), ("tile_kv", c.tile_kv, p.seq_kv)):
            if tile > max(64, power_of_two(seq)):
                return f"{name}={tile} idles most of a tile over {seq} rows"
        return None

    @of_both
    def order(self, p: AttentionProblem, c: AttentionConfig, gpu: GpuSpec, x: object) -> str | None:
        if c.order != "rows" and p.seq_q <= (GROUP_ROWS if c.order == "paired" else c.tile_q):
            return f"order={c.order} needs more than one tile of rows"
        return None

    @of_both
    def grid(self, p: AttentionProblem, c: AttentionConfig, gpu: GpuSpec, x: object) -> str | None:
        if c.grid != "tiles" and tiles(p, c) <= gpu.sm_count:
            return f"grid={c.grid} is for more tiles than SMs"
        return None

    def estimate_us(self, p: AttentionProblem, c: AttentionConfig, gpu: GpuSpec, x: object) -> float:
        return warpgroup_us(p, c, gpu)


class FewForward(WarpgroupForward):
    """The same for few tiles."""

    name = "few"
    most_values: ClassVar = {groups: min(most, FEW_VALUES) for groups, most in MOST_VALUES.items()}

    @of_problem
    def plain_batches(self, p: AttentionProblem, gpu: GpuSpec, x: object) -> str | None:
        if p.varlen or p.mask or p.page is not None:
            return "body=few takes batches of one length without a mask, and no cache"
        return None

    @of_config
    def some_way(self, c: AttentionConfig, gpu: GpuSpec, x: AttentionProblem) -> str | None:
        if c.split == 1 and c.ctas_per_sm == 1 and c.order != "paired":
            return "body=few without split, ctas_per_sm or order=paired is body=warpgroup"
        return None

    @of_config
    def two_ctas(self, c: AttentionConfig, gpu: GpuSpec, x: AttentionProblem) -> str | None:
        if c.ctas_per_sm > 1 and c.tile_q > GROUP_ROWS:
            return f"ctas_per_sm={c.ctas_per_sm} leaves registers for one group, tile_q={GROUP_ROWS}"
        return None

    @of_config
    def paired_tiles(self, c: AttentionConfig, gpu: GpuSpec, x: AttentionProblem) -> str | None:
        if c.order != "paired":
            return None
        if c.tile_q != 2 * GROUP_ROWS or c.split > 1:
            return "order=paired is for two groups that see the same keys: tile_q=128 split=1"
        if x.limited_left or not x.limited_right:
            return "order=paired is for rows that see more keys the later they are: causal or window=right"
        return None

    @of_both
    def several_ctas(self, p: AttentionProblem, c: AttentionConfig, gpu: GpuSpec, x: object) -> str | None:
        if c.split == 1 and c.order != "paired" and tiles(p, c) <= gpu.sm_count:
            return f"ctas_per_sm={c.ctas_per_sm} without split is for more tiles than SMs"
        return None

    @of_both
    def splits(self, p: AttentionProblem, c: AttentionConfig, gpu: GpuSpec, x: object) -> str | None:
        if c.split > 1 and p.seq_kv < c.split * c.tile_kv:
            return f"split={c.split} leaves CTAs without one of {-(-p.seq_kv // c.tile_kv)} blocks of keys"
        return None

    @of_both
    def few_tiles(self, p: AttentionProblem, c: AttentionConfig, gpu: GpuSpec, x: object) -> str | None:
        if tiles(p, c) * c.split > 2 * c.ctas_per_sm * gpu.sm_count:
            return f"body=few is for few tiles: at most two of {c.ctas_per_sm * gpu.sm_count} CTAs at once"
        return None


def tiles(p: AttentionProblem, c: AttentionConfig) -> int:
    """Tiles of queries, all heads together."""
    return -(-p.seq_q // c.tile_q) * p.batch * p.heads_q


def blocks_of(p: AttentionProblem, c: AttentionConfig) -> tuple[float, float]:
    """Blocks of keys that a tile walks, on average, and those of the longest walk; a paired CTA's are both groups'."""
    rows = GROUP_ROWS if c.order == "paired" else c.tile_q
    uneven = p.limited_left or p.limited_right
    seen = min(p.pairs / p.seq_q + (0.5 * rows if uneven else 0), p.seq_kv)
    most = min(p.most_seen + rows if uneven else p.seq_kv, p.seq_kv)
    shared = math.gcd(rows if uneven else p.seq_kv, c.tile_kv)  # the last block is half empty, on average
    blocks = max(1.0, seen / c.tile_kv + 0.5 * (1.0 - shared / c.tile_kv))
    return blocks * (2 if c.order == "paired" else 1), max(blocks, most / c.tile_kv)


def warpgroup_us(p: AttentionProblem, c: AttentionConfig, gpu: GpuSpec) -> float:
    """Tiles of an SM, block by block: the products of its groups, and the exponents that they do not hide; or DRAM.

    No less than the longest tile takes, with a second one beside it where two CTAs share the SM.
    """
    rate, own = rates.of(gpu), WARPGROUP
    count = tiles(p, c)
    if count == 0 or p.seq_kv == 0:
        return rate.launch_us
    paired = c.order == "paired"
    uneven = (p.limited_left or p.limited_right) and not paired
    per_sm = count * c.split / ((own.room if c.split > 2 else 1.0) * gpu.sm_count)
    # CTAs of a cluster share an SM even where others are idle.
    together = c.ctas_per_sm if c.split > 1 else min(c.ctas_per_sm, math.ceil(per_sm))
    per_sm = max(per_sm, together if c.split > 1 else 1.0)
    if not uneven:
        per_sm = math.ceil(per_sm)
    elif c.split > 1 and per_sm > together:  # clusters that wait for room begin late, on few SMs
        per_sm += 0.5 * together
    blocks, longest = blocks_of(p, c)
    if c.split > 1:
        blocks, longest = blocks / c.split, math.ceil(longest / c.split)
    groups = 1 if paired else c.tile_q // GROUP_ROWS  # a paired CTA's walks are in turn, mostly
    multiply = 4.0 * GROUP_ROWS * c.tile_kv * p.width / rate.warpgroup_flops_per_us
    exponents = GROUP_ROWS * c.tile_kv / (EXPONENTS_PER_CLOCK * rate.clock_mhz) * (1.0 if c.lazy else EAGER)
    step = groups * together * (multiply + EXPONENTS * exponents)  # a block of each tile of the SM
    step += own.block[c.stages - 1] * rate.barrier_us
    step *= (1.0 if c.turns or together > 1 else own.no_turns) * (1.0 if c.tile_kv % 64 == 0 else own.odd)
    exchanged = 4 * c.tile_q * p.width if c.split > 1 else 0
    moved = 2 * (2 * c.tile_q + c.tile_kv) * p.width  # queries and results, the first block of keys
    edges = rate.dram_latency_us + (moved + exchanged) / (own.port * rate.sm_bytes_per_us)
    further = {"tiles": own.again, "ahead": own.ahead}.get(c.grid, own.next) * rate.dram_latency_us
    more = max(0.0, per_sm - together) / together if c.grid == "tiles" else math.ceil(per_sm) - 1
    busy = (per_sm * blocks * step / together + edges + more * further) * ORDER[uneven]["rows" if paired else c.order]
    if uneven and c.grid == "persistent":
        busy *= own.dealt
    busy = max(busy, longest * step + edges)
    bytes_per_us = rate.dram_share * gpu.dram_gbps * 1e3
    busy = rates.both_us(busy, walked_bytes(p, c, gpu) / bytes_per_us, HIDDEN)
    early = rate.dependent_us if c.dependent else 0.0
    return float(rate.launch_us - early + max(busy, p.bytes_moved / bytes_per_us))
