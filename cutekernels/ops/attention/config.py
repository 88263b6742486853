"""The configs of ``attention``: both bodies' knobs and their values; the warpgroup body's rules and model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from cutekernels import rates
from cutekernels.columns import ceil, gcd, larger, pick, smaller, where
from cutekernels.kernels.cute.parts.attention_smem import MultistageAttentionSmem, WarpgroupAttentionSmem
from cutekernels.op import knob
from cutekernels.ops.attention.coefficients import EAGER, EXPONENTS, EXPONENTS_PER_CLOCK, HIDDEN, ORDER, WARPGROUP
from cutekernels.ops.attention.problem import AttentionProblem, BodySchedule, TilesConfig, walked_bytes
from cutekernels.rules import BodiesConfig, Broken, no_warpgroups, of_both, of_config, of_problem

if TYPE_CHECKING:
    from cutekernels.gpu import GpuSpec

GROUP_ROWS = WarpgroupAttentionSmem.GROUP_ROWS
GROUP_WARPS = 4
# Accumulators and probabilities that a thread keeps without spilling: docs/notes/attention.md#warpgroup-registers.
MOST_VALUES = {1: 212, 2: 212, 3: 132, 4: 0}
FEW_VALUES = 160  # of body=few: docs/notes/attention.md#few-tiles


@dataclass(frozen=True)
class AttentionConfig(BodiesConfig, TilesConfig):
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
        return (self.grid == "dynamic") | (self.grid == "ahead")

    @property
    def dependent(self) -> bool:
        """Whether a launch sets up behind the kernel ahead of it: programmatic dependent launch."""
        return (self.body == "few") | (self.grid == "ahead")

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
    def pages(self, c: AttentionConfig, gpu: GpuSpec, x: AttentionProblem) -> Broken:
        if x.page:
            odd = (x.page % c.tile_kv > 0) & (c.tile_kv % x.page > 0)
            yield odd, "tile_kv={} is neither part nor multiple of a page of {} keys", c.tile_kv, x.page

    @of_config
    def warps_of_groups(self, c: AttentionConfig, gpu: GpuSpec, x: AttentionProblem) -> Broken:
        warps = GROUP_WARPS * (c.tile_q // GROUP_ROWS)
        why = "body=warpgroup has {} warps for {} queries: tile_q={} takes {}"
        yield c.warps != warps, why, GROUP_WARPS, GROUP_ROWS, c.tile_q, warps

    @of_config
    def registers(self, c: AttentionConfig, gpu: GpuSpec, x: AttentionProblem) -> Broken:
        groups = c.tile_q // GROUP_ROWS
        values, most = (x.width + c.tile_kv) // 2 + c.tile_kv // 4, pick(groups, self.most_values)
        why = "a thread has {} accumulators and probabilities; {} groups of body={} leave room for {}"
        yield values > most, why, values, groups, c.body, most

    @of_config
    def shared_memory(self, c: AttentionConfig, gpu: GpuSpec, x: AttentionProblem) -> Broken:
        need, most = c.smem(x).total_bytes, gpu.smem_per_block_bytes
        yield need > most, "{} bytes of shared memory are more than a block's {}", need, most
        beyond = c.ctas_per_sm * (need + gpu.SMEM_RESERVED_BYTES) > gpu.smem_per_sm_bytes
        yield beyond, "{} CTAs of {} bytes of shared memory do not fit an SM", c.ctas_per_sm, need

    @of_config
    def turns(self, c: AttentionConfig, gpu: GpuSpec, x: AttentionProblem) -> Broken:
        yield c.turns & (c.tile_q == GROUP_ROWS), "turns=1 is for two groups or more"

    @of_both
    def order(self, p: AttentionProblem, c: AttentionConfig, gpu: GpuSpec, x: object) -> Broken:
        lone = (c.order != "rows") & (p.seq_q <= where(c.order == "paired", GROUP_ROWS, c.tile_q))
        yield lone, "order={} needs more than one tile of rows", c.order

    @of_both
    def grid(self, p: AttentionProblem, c: AttentionConfig, gpu: GpuSpec, x: object) -> Broken:
        few = (c.grid != "tiles") & (tiles(p, c) <= gpu.sm_count)
        yield few, "grid={} is for more tiles than SMs", c.grid

    def times_us(self, p: AttentionProblem, c: Any, gpu: GpuSpec, x: object) -> Any:
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
    def some_way(self, c: AttentionConfig, gpu: GpuSpec, x: AttentionProblem) -> Broken:
        none = (c.split == 1) & (c.ctas_per_sm == 1) & (c.order != "paired")
        yield none, "body=few without split, ctas_per_sm or order=paired is body=warpgroup"

    @of_config
    def two_ctas(self, c: AttentionConfig, gpu: GpuSpec, x: AttentionProblem) -> Broken:
        large = (c.ctas_per_sm > 1) & (c.tile_q > GROUP_ROWS)
        yield large, "ctas_per_sm={} leaves registers for one group, tile_q={}", c.ctas_per_sm, GROUP_ROWS

    @of_config
    def paired_tiles(self, c: AttentionConfig, gpu: GpuSpec, x: AttentionProblem) -> Broken:
        paired = c.order == "paired"
        apart = paired & ((c.tile_q != 2 * GROUP_ROWS) | (c.split > 1))
        yield apart, "order=paired is for two groups that see the same keys: tile_q=128 split=1"
        even = x.limited_left or not x.limited_right
        why = "order=paired is for rows that see more keys the later they are: causal or window=right"
        yield paired & even, why

    @of_both
    def several_ctas(self, p: AttentionProblem, c: AttentionConfig, gpu: GpuSpec, x: object) -> Broken:
        few = (c.split == 1) & (c.order != "paired") & (tiles(p, c) <= gpu.sm_count)
        yield few, "ctas_per_sm={} without split is for more tiles than SMs", c.ctas_per_sm

    @of_both
    def splits(self, p: AttentionProblem, c: AttentionConfig, gpu: GpuSpec, x: object) -> Broken:
        idle = (c.split > 1) & (p.seq_kv < c.split * c.tile_kv)
        yield idle, "split={} leaves CTAs without one of {} blocks of keys", c.split, -(-p.seq_kv // c.tile_kv)

    @of_both
    def few_tiles(self, p: AttentionProblem, c: AttentionConfig, gpu: GpuSpec, x: object) -> Broken:
        at_once = c.ctas_per_sm * gpu.sm_count
        yield tiles(p, c) * c.split > 2 * at_once, "body=few is for few tiles: at most two of {} CTAs at once", at_once


def tiles(p: AttentionProblem, c: AttentionConfig) -> int:
    """Tiles of queries, all heads together."""
    return -(-p.seq_q // c.tile_q) * p.batch * p.heads_q


def blocks_of(p: AttentionProblem, c: Any) -> tuple[Any, Any]:
    """Blocks of keys that a tile walks, on average, and those of the longest walk; a paired CTA's are both groups'."""
    paired = c.order == "paired"
    rows = where(paired, GROUP_ROWS, c.tile_q)
    uneven = p.limited_left or p.limited_right
    seen = smaller(p.pairs / p.seq_q + (0.5 * rows if uneven else 0), p.seq_kv)
    most = smaller(p.most_seen + rows, p.seq_kv) if uneven else p.seq_kv
    shared = gcd(rows if uneven else p.seq_kv, c.tile_kv)  # the last block is half empty, on average
    blocks = larger(1.0, seen / c.tile_kv + 0.5 * (1.0 - shared / c.tile_kv))
    return blocks * where(paired, 2, 1), larger(blocks, most / c.tile_kv)


def warpgroup_us(p: AttentionProblem, c: Any, gpu: GpuSpec) -> Any:
    """Tiles of an SM, block by block: the products of its groups, and the exponents that they do not hide; or DRAM.

    No less than the longest tile takes, with a second one beside it where two CTAs share the SM.
    """
    rate, own = rates.of(gpu), WARPGROUP
    if 0 in (p.batch, p.heads_q, p.seq_q, p.seq_kv):
        return rate.launch_us
    paired, split = c.order == "paired", c.split > 1
    uneven = (p.limited_left or p.limited_right) & (c.order != "paired")
    per_sm = tiles(p, c) * c.split / (where(c.split > 2, own.room, 1.0) * gpu.sm_count)
    # CTAs of a cluster share an SM even where others are idle.
    together = where(split, c.ctas_per_sm, smaller(c.ctas_per_sm, ceil(per_sm)))
    per_sm = larger(per_sm, where(split, together, 1.0))
    late = split & (per_sm > together)  # clusters that wait for room begin late, on few SMs
    per_sm = where(uneven, per_sm + where(late, 0.5 * together, 0.0), ceil(per_sm))
    blocks, longest = blocks_of(p, c)
    blocks, longest = blocks / c.split, where(split, ceil(longest / c.split), longest)
    groups = where(paired, 1, c.tile_q // GROUP_ROWS)  # a paired CTA's walks are in turn, mostly
    multiply = 4.0 * GROUP_ROWS * c.tile_kv * p.width / rate.warpgroup_flops_per_us
    exponents = GROUP_ROWS * c.tile_kv / (EXPONENTS_PER_CLOCK * rate.clock_mhz) * where(c.lazy, 1.0, EAGER)
    step = groups * together * (multiply + EXPONENTS * exponents)  # a block of each tile of the SM
    step = step + pick(c.stages, dict(enumerate(own.block, 1))) * rate.barrier_us
    in_turn = c.turns | (together > 1)
    step = step * where(in_turn, 1.0, own.no_turns) * where(c.tile_kv % 64 == 0, 1.0, own.odd)
    exchanged = where(split, 4 * c.tile_q * p.width, 0)
    moved = 2 * (2 * c.tile_q + c.tile_kv) * p.width  # queries and results, the first block of keys
    edges = rate.dram_latency_us + (moved + exchanged) / (own.port * rate.sm_bytes_per_us)
    further = pick(c.grid, {"tiles": own.again, "persistent": own.next, "dynamic": own.next, "ahead": own.ahead})
    more = where(c.grid == "tiles", larger(0.0, per_sm - together) / together, ceil(per_sm) - 1)
    busy = per_sm * blocks * step / together + edges + more * further * rate.dram_latency_us
    busy = busy * where(uneven, pick(c.order, ORDER[True]), pick(c.order, ORDER[False]))
    busy = busy * where(uneven & (c.grid == "persistent"), own.dealt, 1.0)
    busy = larger(busy, longest * step + edges)
    bytes_per_us = rate.dram_share * gpu.dram_gbps * 1e3
    busy = rates.both_us(busy, walked_bytes(p, c, gpu) / bytes_per_us, HIDDEN)
    early = where(c.dependent, rate.dependent_us, 0.0)
    return rate.launch_us - early + larger(busy, p.bytes_moved / bytes_per_us)
