"""Gradients of attention: their problems and configs, both bodies' knobs, and the warpgroup body's rules and model."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar

from cutekernels import rates
from cutekernels.columns import ceil, gcd, larger, pick, smaller, where
from cutekernels.errors import UnsupportedProblem
from cutekernels.kernels.cute.parts.attention_smem import (
    BLOCK_KEYS,
    BLOCK_QUERIES,
    QueryGradientSmem,
    WarpgroupBackwardSmem,
    padded,
)
from cutekernels.op import knob, plain
from cutekernels.ops.attention.coefficients import HIDDEN, ORDER, WARPGROUP_BACKWARD
from cutekernels.ops.attention.config import GROUP_ROWS, GROUP_WARPS, MOST_VALUES
from cutekernels.ops.attention.problem import AttentionProblem, BodySchedule, TilesConfig, walked_bytes
from cutekernels.rules import BodiesConfig, Broken, no_warpgroups, of_both, of_config, of_problem

if TYPE_CHECKING:
    from cutekernels.gpu import GpuSpec

WIDEST_TOGETHER = 192  # padded head dims whose dK and dV fit one thread's registers
WIDEST_HANDED, WIDEST_CAPPED = 128, 64  # padded head dims beside whose sums 64 walked queries fit
NARROWEST_HANDED = 128  # for fewer, the bytes of dS outweigh two products: docs/notes/attention.md#ds-through-memory
BLOCK = BLOCK_KEYS * BLOCK_QUERIES
BESIDE = 8 * BLOCK  # elements that may be read beside dS: those of 128 queries, of which one was asked for
LEAST_WAVES = 1.5  # tiles of an SM in a launch, where there are several because of what dS needs


@dataclass(frozen=True)
class AttentionBackwardProblem(AttentionProblem):
    """The forward pass's problem, and ``of``: the gradients of one launch, dK with dV, any one alone, or all three.

    Of all three, dS goes through memory to the kernel of dQ.
    """

    of: str = plain("kv", "q", "k", "v", "qkv")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.lse:
            raise UnsupportedProblem("lse=1 asks attention for a result; its gradients have none: leave it out")
        if self.sinks != "none":
            raise UnsupportedProblem("sinks change nothing here, since lse has them in it: leave them out")
        if "kv" in self.of and self.width > WIDEST_TOGETHER:
            raise UnsupportedProblem(
                f"of={self.of} sums dK and dV of a head of {self.head_dim} in registers, which {WIDEST_TOGETHER} fill: "
                "ask for of=k and of=v"
            )
        if self.hands_on and not self.may_hand_on:
            raise UnsupportedProblem(
                f"of=qkv is for a batch of one length and heads up to {WIDEST_HANDED}, {WIDEST_CAPPED} with softcap=1: "
                "ask for of=kv and of=q"
            )

    @property
    def by_keys(self) -> bool:
        return self.of != "q"

    @property
    def products(self) -> int:
        """Products per pair of tiles: S, dP where it is needed, and a sum for each gradient."""
        return {"kv": 4, "q": 3, "k": 3, "v": 2, "qkv": 5}[self.of]

    @property
    def hands_on(self) -> bool:
        """Whether dS goes through memory."""
        return self.of == "qkv"

    @property
    def may_hand_on(self) -> bool:
        """Whether dS may go through memory."""
        return not self.varlen and self.width <= (WIDEST_CAPPED if self.softcap else WIDEST_HANDED)

    @property
    def operands(self) -> int:
        """Owned operands: K and V, Q and dO, or K alone."""
        return 1 if self.of == "v" else 2

    @property
    def work_bytes(self) -> int:
        rows_q, rows_kv = self.batch * self.seq_q * self.heads_q, self.batch * self.seq_kv * self.heads_kv
        written = sum([rows_q if name == "q" else rows_kv for name in self.of])
        mask = self.batch * self.seq_q * self.seq_kv if self.mask else 0
        return 2 * (2 * rows_q + 2 * rows_kv + written) * self.head_dim + 8 * rows_q + mask

    def forward(self) -> AttentionProblem:
        """The problem of the forward pass, with lse."""
        named = {f.name: getattr(self, f.name) for f in fields(AttentionProblem)}
        return AttentionProblem(**named | {"lse": True})


def passes(head_dim: int) -> tuple[str, ...]:
    """The problems, by ``of``, whose kernels together give all gradients of heads of ``head_dim``."""
    return ("kv", "q") if padded(head_dim) <= WIDEST_TOGETHER else ("k", "v", "q")


@dataclass(frozen=True)
class AttentionBackwardConfig(BodiesConfig, TilesConfig):
    """The knobs of both bodies in ``kernels/cute/attention/``.

    A CTA owns ``tile_own`` rows (keys for dK and dV, queries for dQ) and walks the others ``tile_walked`` at a time.
    ``in_registers``: the owned operands stay there. ``order`` is that of tiles. Of the warpgroup body alone: ``grid``
    gives each tile a CTA ("tiles"), or lets the CTAs of a persistent grid draw them from a counter ("dynamic").
    """

    tiles: ClassVar = ("tile_own", "tile_walked")
    bodies: ClassVar = {
        "multistage": {
            "tile_own": (64, 128, 256),
            "tile_walked": (32, 64, 128),
            "warps": (4, 8),
            "stages": (1, 2),
            "ctas_per_sm": (1, 2, 3),
            "in_registers": (False, True),
            "order": ("rows", "l2", "heads"),
        },
        "warpgroup": {
            "tile_own": (64, 128, 192),
            "tile_walked": (32, 48, 64, 80, 96, 112, 128),
            "warps": (4, 8, 12),
            "stages": (2, 3),
            "order": ("rows", "l2", "heads"),
            "grid": ("tiles", "dynamic"),
        },
    }
    tile_own: int = knob(64, 128, 192, 256)
    tile_walked: int = knob(32, 48, 64, 80, 96, 112, 128)
    warps: int = knob(4, 8, 12)
    stages: int = knob(1, 2, 3)
    ctas_per_sm: int = knob(1, 2, 3)
    in_registers: bool = knob(False, True)
    order: str = knob("rows", "l2", "heads")
    body: str = knob("multistage", "warpgroup", added=True)
    grid: str = knob("tiles", "dynamic", added=True)

    def smem_bytes(self, p: AttentionBackwardProblem) -> int:
        """A CTA's shared memory: the owned operands, the walked ones' stages, and walked queries' statistics."""
        if self.body == "warpgroup":
            groups = self.tile_own // GROUP_ROWS
            operands = (p.operands, p.by_keys)
            need = WarpgroupBackwardSmem(groups, self.tile_walked, p.head_dim, self.stages, *operands).total_bytes
            return larger(need, QueryGradientSmem(p.head_dim).total_bytes) if p.hands_on else need
        row_bytes = 2 * p.width
        stats = 2 * 4 * self.tile_walked if p.by_keys else 0
        return p.operands * self.tile_own * row_bytes + self.stages * (2 * self.tile_walked * row_bytes + stats)


# ---- the warpgroup body ----------------------------------------------------------------------------------

_CAP = 8  # registers of a cap's factors and intermediate values


class WarpgroupBackward(BodySchedule[AttentionBackwardProblem, AttentionBackwardConfig]):
    """TMA and warpgroup MMA."""

    name = "warpgroup"
    config = AttentionBackwardConfig

    warpgroup_mma = of_problem(no_warpgroups)

    @of_config
    def whole_blocks(self, c: AttentionBackwardConfig, gpu: GpuSpec, x: AttentionBackwardProblem) -> Broken:
        odd = (c.tile_walked % GROUP_ROWS > 0) & x.hands_on
        yield odd, "of=qkv hands dS on by {} queries, which do not divide tile_walked={}", GROUP_ROWS, c.tile_walked

    @of_config
    def warps_of_groups(self, c: AttentionBackwardConfig, gpu: GpuSpec, x: AttentionBackwardProblem) -> Broken:
        warps = GROUP_WARPS * (c.tile_own // GROUP_ROWS)
        why = "body=warpgroup has {} warps for {} rows: tile_own={} takes {}"
        yield c.warps != warps, why, GROUP_WARPS, GROUP_ROWS, c.tile_own, warps

    @of_config
    def registers(self, c: AttentionBackwardConfig, gpu: GpuSpec, x: AttentionBackwardProblem) -> Broken:
        values, groups = warpgroup_values(x, c), c.tile_own // GROUP_ROWS
        most, why = (
            pick(groups, MOST_VALUES),
            "a thread has {} accumulators and probabilities; {} groups leave room for {}",
        )
        yield values > most, why, values, groups, most

    @of_config
    def shared_memory(self, c: AttentionBackwardConfig, gpu: GpuSpec, x: AttentionBackwardProblem) -> Broken:
        need, most = c.smem_bytes(x), gpu.smem_per_block_bytes
        yield need > most, "{} bytes of shared memory are more than a block's {}", need, most

    @of_both
    def grid(self, p: AttentionBackwardProblem, c: AttentionBackwardConfig, gpu: GpuSpec, x: object) -> Broken:
        few = (c.grid != "tiles") & (own_tiles(p, c) <= gpu.sm_count)
        yield few, "grid={} is for more tiles than SMs", c.grid

    def times_us(self, p: AttentionBackwardProblem, c: Any, gpu: GpuSpec, x: object) -> Any:
        return warpgroup_us(p, c, gpu)


def warpgroup_values(p: AttentionBackwardProblem, c: AttentionBackwardConfig) -> int:
    """A thread's accumulators and 16-bit operands: sums, S and dP, slopes of capped scores, P in flight."""
    scores = c.tile_walked // 2
    slopes = scores + _CAP if p.softcap and p.of != "v" else 0
    flying = scores // 2 if "kv" in p.of else 0
    return len(p.of.replace("qkv", "kv")) * p.width // 2 + p.operands * scores + slopes + flying


def warpgroup_us(p: AttentionBackwardProblem, c: Any, gpu: GpuSpec) -> Any:
    """Tiles of an SM, walked tile by walked tile: products, which hide the exponents, and a constant.

    Uneven tiles take at least as long as the heaviest, and longer where the last heads' heavy ones start late.
    """
    rate, own = rates.of(gpu), WARPGROUP_BACKWARD
    tiles, heads = -(-p.seq_own // c.tile_own), p.batch * (p.heads_kv if p.by_keys else p.heads_q)
    if 0 in (p.seq_own, heads, p.heads_q, p.seq_walked):
        return rate.launch_us
    uneven = p.limited_left or p.limited_right
    most = smaller(p.pairs / p.seq_own + (0.5 * c.tile_own if uneven else 0), p.seq_walked)
    turns = p.group if p.by_keys else 1
    shared = gcd(c.tile_own if uneven else p.seq_walked, c.tile_walked)
    steps = larger(1.0, most / c.tile_walked + 0.5 * (1.0 - shared / c.tile_walked)) * turns
    multiply = 2.0 * p.products * c.tile_own * c.tile_walked * p.width / rate.warpgroup_flops_per_us
    step = multiply + own.tile * rate.barrier_us
    between = where(c.grid == "tiles", own.cta, own.next) * rate.dram_latency_us
    per_sm = tiles * heads / gpu.sm_count
    smooth = (c.grid == "dynamic") | (per_sm > own.many) | uneven
    busy = where(smooth, per_sm, ceil(per_sm)) * (steps * step + between)
    if uneven:
        if p.limited_left != p.limited_right:  # one triangle: some rows see all
            steps = p.seq_walked / c.tile_walked * turns
        heaviest = steps * step + between
        fitting = max(1, gpu.l2_bytes // 2 // (4 * p.seq_walked * p.width * turns)) * (1 if p.by_keys else p.group)
        band = pick(c.order, {"rows": 1, "l2": min(heads, fitting), "heads": heads})
        last = where(heads % band > 0, heads % band, band)
        late = (band < heads) & (per_sm > 1) & (tiles * last < own.full * gpu.sm_count)
        busy = larger(busy, heaviest) + where(late, own.late * heaviest, 0.0)
    busy = busy * pick(c.order, ORDER[False]) * where(c.grid == "dynamic", own.drawn, 1.0)
    busy = busy * where(c.stages > 2, 1.0, own.tight)
    dram = walked_bytes(p, c, gpu) / (rate.dram_share * gpu.dram_gbps * 1e3)
    return rate.launch_us + rates.both_us(busy, dram, HIDDEN)


def own_tiles(p: AttentionBackwardProblem, c: AttentionBackwardConfig) -> int:
    """Tiles of owned rows, all heads together."""
    return -(-p.seq_own // c.tile_own) * p.batch * (p.heads_kv if p.by_keys else p.heads_q)


# ---- dS in memory ----------------------------------------------------------------------------------------


def score_blocks(p: AttentionBackwardProblem, tile_own: int, tile_walked: int) -> tuple[int, int]:
    """Rows and columns of blocks of dS for a query head, as of ``ScoreBlocks.place``."""
    left, right = p.limits
    shift, tiles = p.seq_q - p.seq_kv, -(-p.seq_kv // tile_own)
    before, behind = right - shift, left + shift

    def walked(tile: int) -> int:
        """Walked tiles of a tile of keys."""
        last = min((tile + 1) * tile_own, p.seq_kv) - 1
        seen = -(-p.seq_q // tile_walked)
        if p.limited_left:  # queries right behind it
            seen = min(seen, -(-max(0, last + behind + 1) // tile_walked))
        first = max(0, tile * tile_own - before) // tile_walked if p.limited_right else 0
        return max(0, seen - first)

    half = -(-tiles // 2)
    most = max([walked(t) + (walked(tiles - 1 - t) if t != tiles - 1 - t else 0) for t in range(half)])
    return half * tile_own // BLOCK_KEYS, most * tile_walked // BLOCK_QUERIES


@dataclass(frozen=True)
class Launches:
    """The launches of a call that hands dS on, each for ``each`` of all ``layers`` heads of K, the last for fewer.

    ``shape``: of dS of a launch, query heads by blocks. It takes at most a 64th of the GPU's memory.
    """

    layers: int
    each: int
    shape: tuple[int, int, int, int]

    @property
    def elements(self) -> int:
        return math.prod(self.shape) + 2 * BESIDE

    @classmethod
    def of(cls, p: AttentionBackwardProblem, c: Any, gpu: GpuSpec) -> Launches:
        """As few as there may be, of equal size."""
        rows, columns = score_blocks(p, c.tile_own, c.tile_walked)
        layers = p.batch * p.heads_kv
        most = gpu.memory_bytes // 64 // (2 * rows * columns * BLOCK * p.group)
        each = -(-layers // -(-layers // max(1, most)))
        return cls(layers, each, (each * p.group, rows, columns, BLOCK))

    def worth_it(self, p: AttentionBackwardProblem, c: Any, gpu: GpuSpec) -> bool:
        """Whether dS fits, and no launch leaves SMs idle that a larger one would keep busy."""
        fits = 2 * self.elements <= gpu.memory_bytes // 64 + 4 * BESIDE
        few = self.each * -(-p.seq_kv // c.tile_own) < LEAST_WAVES * gpu.sm_count
        return fits and (self.each == self.layers or not few)
