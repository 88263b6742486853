"""Common ground of attention's declarations: problems, tolerance, and the rules and model of tiles that walk tiles."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypedDict, TypeVar

from cutekernels import rates
from cutekernels.columns import Columns, among, ceil, larger, pick, smaller, where
from cutekernels.errors import UnsupportedProblem
from cutekernels.kernels.cute.parts.attention_smem import padded
from cutekernels.op import C, Config, P, Problem, extent, ladder, plain, power_of_two, respell
from cutekernels.ops.attention.coefficients import EXPONENTS_PER_CLOCK, MULTISTAGE, ORDER
from cutekernels.ops.shared.dtypes import DTYPES
from cutekernels.rules import EVERY, Among, Broken, Schedule, foreign, occupancy_rules, of_both, of_config

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from cutekernels.gpu import GpuSpec

WIDEST = 8  # elements in 16 bytes
HEAD_DIMS = (128, *range(8, 128, 8), *range(136, 264, 8))
UNLIMITED = 2**30  # a window's side that reaches to the end
LOG2_E = math.log2(math.e)
SINKS = ("none", "same", "fp32")
# Types of a cache: that of q, or e4m3 with a scale of each head, or of each token and head (``token_scales.py``).
CACHES = ("same", "fp8", "fp8_tokens")
E4M3_MAX = 448.0
NO_SCALES = (None, None)  # of k and v in a cache that is not in FP8
SLACK = 8.0  # slack of lazy rescaling, base 2: fp16 probabilities up to 256
MAX_CTAS = 3  # per SM, of tiles that walk tiles


class Sides(TypedDict):
    """The band of keys seen around a query's own; None where nothing limits."""

    left: int | None
    right: int | None


def sides_of(causal: bool, window: str, window_left: int, window_right: int, **others: Any) -> Sides:
    """The sides of a problem, or of a call's options."""
    right = 0 if causal else window_right if window in ("right", "both") else None
    return {"left": window_left if window in ("left", "both") else None, "right": right}


class HeadsProblem(Problem):
    """Query heads in groups that share a head of K and V. Subclasses declare the fields: each text has its order."""

    heads_q: int
    heads_kv: int
    head_dim: int
    dtype: str

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.heads_kv == 0 or self.heads_q % self.heads_kv:
            raise UnsupportedProblem(
                f"heads_q={self.heads_q} must be a multiple of heads_kv={self.heads_kv}: each K and V head serves a "
                "group of query heads"
            )

    def bucket(self) -> Self:
        """The bucket shared by results with and without lse or sinks, and by the head dims of one padded size."""
        return super().bucket().replace(lse=False, sinks="none", head_dim=self.width)

    @property
    def width(self) -> int:
        """The padded head dim."""
        return padded(self.head_dim)

    @property
    def group(self) -> int:
        """Query heads to a head of K and V."""
        return self.heads_q // self.heads_kv


@dataclass(frozen=True)
class AttentionProblem(HeadsProblem):
    """Extents, and the properties that kernels are compiled for.

    Packed sequences (``varlen``) have lengths of their own; ``seq_q`` and ``seq_kv`` are then their means, rounded up.
    ``window`` names its sides that limit, by ``window_left`` and ``window_right`` keys; ``causal`` limits the right
    side at the query's own key, where the last query is aligned with the last key. ``sinks`` is the dtype of a logit
    for each query head that takes part in the softmax and has no value: that of q, or fp32.
    """

    batch: int = extent(ladder)
    seq_q: int = extent(ladder)
    seq_kv: int = extent(ladder)
    heads_q: int = extent()
    heads_kv: int = extent()
    window_left: int = extent(ladder, default=0)
    window_right: int = extent(ladder, default=0)
    head_dim: int = plain(*HEAD_DIMS)
    dtype: str = plain("bf16", "fp16")
    causal: bool = plain(False, True)
    window: str = plain("none", "left", "right", "both")
    softcap: bool = plain(False, True)
    mask: bool = plain(False, True)
    varlen: bool = plain(False, True)
    lse: bool = plain(False, True)
    sinks: str = plain(*SINKS)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.causal and self.window in ("right", "both"):
            raise UnsupportedProblem(f"causal=1 limits the right side already: window={self.window} must leave it out")
        for side in ("left", "right"):
            if getattr(self, f"window_{side}") and self.window not in (side, "both"):
                raise UnsupportedProblem(f"window_{side} needs window={side} or both; it is {self.window}")
        if self.mask and self.varlen:
            raise UnsupportedProblem("a mask is for a batch of one length: packed sequences take none")

    @property
    def limited_left(self) -> bool:
        return self.window in ("left", "both")

    @property
    def limited_right(self) -> bool:
        return self.causal or self.window in ("right", "both")

    @property
    def sides(self) -> Sides:
        return sides_of(self.causal, self.window, self.window_left, self.window_right)

    @property
    def limits(self) -> tuple[int, int]:
        """:attr:`sides` as kernels take them."""
        left, right = self.sides["left"], self.sides["right"]
        return UNLIMITED if left is None else left, UNLIMITED if right is None else right

    @property
    def bytes_moved(self) -> int:
        """The least bytes through device memory."""
        rows_q, rows_kv = self.batch * self.seq_q * self.heads_q, self.batch * self.seq_kv * self.heads_kv
        mask = self.batch * self.seq_q * self.seq_kv if self.mask else 0
        return 4 * (rows_q + rows_kv) * self.head_dim + mask + (4 * rows_q if self.lse else 0)

    @property
    def work_bytes(self) -> int:
        """Those, and what else this problem's op has to move."""
        return self.bytes_moved

    @property
    def pairs(self) -> int:
        """(query, key) pairs of one head and sequence inside the band."""
        shift = self.seq_kv - self.seq_q
        ends = _clipped_sum(self.seq_q, shift + self.window_right + 1, self.seq_kv) if self.limited_right else None
        begins = _clipped_sum(self.seq_q, shift - self.window_left, self.seq_kv) if self.limited_left else 0
        return max(0, (self.seq_q * self.seq_kv if ends is None else ends) - begins)

    @property
    def edges(self) -> float:
        """Sides of the band that hide something from an owned row, on average: 0 to 2."""
        left, right = self.limits
        cut = self.seq_kv - 1 - left, self.seq_q - 1 - right  # rows, of either side
        return sum(min(max(0, rows), self.seq_own) for rows in cut) / max(1, self.seq_own)

    @property
    def most_seen(self) -> int:
        """Most keys that a query sees, of one sequence."""
        if self.limited_right:  # the first query that sees the last key
            row = max(0, self.seq_q - 1 - self.limits[1])
        else:  # the last one that sees the first key
            row = min(max(0, self.window_left - (self.seq_kv - self.seq_q)), max(0, self.seq_q - 1))
        own = row + self.seq_kv - self.seq_q
        left, right = self.limits
        return max(0, min(self.seq_kv, own + right + 1) - max(0, own - left))

    @property
    def page(self) -> int | None:
        """Tokens in a page of the cache that K and V are in, 0 in a contiguous one; None where they are in none."""
        return None

    @property
    def cached_in(self) -> str:
        """The type of that cache, of ``CACHES``."""
        return "same"

    @property
    def by_keys(self) -> bool:
        """Whether a CTA owns keys and walks queries, not the reverse."""
        return False

    @property
    def seq_own(self) -> int:
        return self.seq_kv if self.by_keys else self.seq_q

    @property
    def seq_walked(self) -> int:
        return self.seq_q if self.by_keys else self.seq_kv


def _clipped_sum(rows: int, first: int, most: int) -> int:
    """``sum(min(max(first + r, 0), most) for r in range(rows))``."""

    def up_to(n: int) -> int:  # the sum of clip(x, 0, most) for x < n
        if n <= 0:
            return 0
        rising = min(n, most)
        return rising * (rising - 1) // 2 + (n - rising) * most

    return up_to(first + rows) - up_to(first)


def depth(p: AttentionProblem) -> float:
    """The depth whose fp32 sums lose as much as rounding probabilities to 16 bits: six standard deviations, which one
    element in 5e8 exceeds.

    A row's error is ``u * sqrt(sum (p v)^2)``, about ``u`` of the row's own typical result. Rows that see few keys have
    results larger than the whole output's typical one, by the root of how many fewer.
    """
    # Relative error of rounding, for numbers spread evenly over an octave: 0.735 eps / sqrt(12).
    deviation = 0.735 * {"bf16": 2.0**-7, "fp16": 2.0**-10}[p.dtype] / math.sqrt(12)
    keys = p.pairs / max(1, p.seq_q)
    uneven = p.limited_left or p.limited_right or p.mask or p.varlen
    larger = math.sqrt(max(1.0, keys)) if uneven else 1.0
    return max(keys, 8 * 2.0**23 * 6 * deviation * larger)


def score_factors(scale: float, softcap: float) -> tuple[float, float, float]:
    """The factor of scores, to base 2, and the inner and outer factors of a cap; both are 0 without one."""
    if not softcap:
        return scale * LOG2_E, 0.0, 0.0
    return 1.0, 2 * LOG2_E * scale / softcap, softcap * LOG2_E


def sample_sinks(kind: str, dtype: str, heads: int, keys: float, generator: torch.Generator) -> Tensor | None:
    """Sinks that weigh as much as a row of ``keys`` scores, on average; None where ``kind`` is none."""
    import torch

    if kind == "none":
        return None
    sinks = torch.randn(heads, generator=generator, device=generator.device) + math.log(max(1.0, keys))
    return sinks.to(DTYPES[dtype] if kind == "same" else torch.float32)


def tuned_cache(cache: str) -> str:
    """The type of cache that a bucket has: one tuning serves both kinds of scales, which cost nearly the same."""
    return "fp8" if cache == "fp8_tokens" else cache


def launch_blind(lse: bool, sinks: int = -3) -> Callable[..., None]:
    """The launch for queries without a single key: 0, and as lse their sink, -inf without one.

    ``sinks``: their place among the arguments, by default right ahead of scale and softcap.
    """

    def launch(*args: Any) -> None:
        args[0].zero_()
        if lse:
            args[1].copy_(args[1].new_full((), -math.inf) if args[sinks] is None else args[sinks].unsqueeze(-1))

    return launch


# ---- ops ------------------------------------------------------------------------------------------------


class AttentionSchedule(Schedule[P, C, P]):
    """Rules and model of one body. ``x`` is the problem again, of which the rules of configs read no extent: what fits
    one fits all that differ in extents alone.
    """

    config: ClassVar[type[Config]]

    def class_of(self, p: P, x: P) -> P:
        """The problem with the least extents among those that differ from ``p`` in them alone."""
        return p.replace(**{name: min(1, getattr(p, name)) for name in p.extent_names()})

    def span(self, among: Among = EVERY) -> Columns:
        return Columns.span(self.config, self.values() | dict(among))

    def values(self) -> dict[str, tuple[Any, ...]]:
        """The values of every knob."""
        return self.config.space()

    def foreign_knobs(self, c: C) -> Iterator[str]:
        return foreign(c, self.values())


class WarpsConfig(Config):
    """Threads of a config whose unit is the warp."""

    warps: int

    @property
    def threads(self) -> int:
        return 32 * self.warps


class TilesConfig(WarpsConfig):
    """Config of CTAs that own a tile of one side's rows and walk tiles of the other side's: the knobs ``tiles``."""

    tiles: ClassVar[tuple[str, str]]
    stages: int
    ctas_per_sm: int
    order: str

    @property
    def own(self) -> int:
        return getattr(self, self.tiles[0])  # type: ignore[no-any-return]

    @property
    def walked(self) -> int:
        return getattr(self, self.tiles[1])  # type: ignore[no-any-return]

    @property
    def rows(self) -> int:
        """Owned rows of a warp."""
        return self.own // self.warps


_RENAMED = {"body=warps": "body=multistage", "order=folded": "order=paired", "grid=counted": "grid=dynamic"}


def since_revision_1(problem: str, config: str) -> str:
    """Revision 1 had other names for some values."""
    return respell(config, _RENAMED)


Q = TypeVar("Q", bound=AttentionProblem)
T = TypeVar("T", bound=TilesConfig)


class BodySchedule(AttentionSchedule[Q, T]):
    """One of a config with several bodies."""

    least_walked: ClassVar = 64  # rows of a walked tile, whatever there is to walk

    def values(self) -> dict[str, tuple[Any, ...]]:
        return self.config.values(self.name)  # type: ignore[attr-defined,no-any-return]

    @of_both
    def tile_rows(self, p: Q, c: T, gpu: GpuSpec, x: Q) -> Broken:
        sides = (c.tiles[0], c.own, p.seq_own, 64), (c.tiles[1], c.walked, p.seq_walked, self.least_walked)
        for name, tile, seq, least in sides:
            yield tile > max(least, power_of_two(seq)), "{}={} idles most of a tile over {} rows", name, tile, seq

    @of_both
    def order(self, p: Q, c: T, gpu: GpuSpec, x: Q) -> Broken:
        yield (c.order != "rows") & (p.seq_own <= c.own), "order={} needs more than one tile of rows", c.order


class TilesSchedule(BodySchedule[Q, T]):
    """Rules and model of CTAs that own a tile of rows and walk the other side's tiles."""

    least_walked = 32

    @abstractmethod
    def registers(self, p: Q, c: T) -> int:
        """An estimate of what a thread needs."""

    @abstractmethod
    def smem_bytes(self, p: Q, c: T) -> int:
        """The shared memory of a CTA."""

    @of_config
    def rows_of_warps(self, c: T, gpu: GpuSpec, x: Q) -> Broken:
        odd = among(c.rows, (16, 32, 64)) == 0
        yield odd, "{} warps of {}={} have {} rows each: take 16, 32 or 64", c.warps, c.tiles[0], c.own, c.rows

    @of_config
    def copies(self, c: T, gpu: GpuSpec, x: Q) -> Broken:
        across = c.threads // vectors_along(x.width)
        for name, tile in zip(c.tiles, (c.own, c.walked), strict=True):
            why = "{} threads copy {} rows at a time, which does not divide {}={}"
            yield tile % across > 0, why, c.threads, across, name, tile

    @of_config
    def occupancy(self, c: T, gpu: GpuSpec, x: Q) -> Broken:
        registers, smem = self.registers(x, c), self.smem_bytes(x, c)
        return occupancy_rules(gpu, ctas=c.ctas_per_sm, most=MAX_CTAS, warps=c.warps, registers=registers, smem=smem)

    def tiles_us(
        self, p: Q, c: Any, gpu: GpuSpec, *, products: int, read_rows: Any, exponents: Any, fixed: Any,
        crowd_power: float, uneven: bool,
    ) -> Any:  # fmt: skip
        """Rounds of CTAs, each walked tile as slow as tensor cores or shared memory; or DRAM, or the longest tile.

        A pair of tiles takes ``products``, and ``read_rows`` owned rows of each warp from shared memory again.
        ``exponents``: the share of their time that products do not hide. ``fixed``: a walked tile's cost, whatever its
        size, in ``barrier_us``. Up to ``CROWD_WARPS`` the speed grows by ``crowd_power`` of an SM's warps. ``uneven``:
        tiles have unlike work.
        """
        rate, model = rates.of(gpu), MULTISTAGE
        own, walked = c.own, c.walked
        if 0 in (p.batch, p.heads_kv if p.by_keys else p.heads_q, p.seq_own, p.seq_walked):
            return rate.launch_us
        # Rows that an owned tile walks, on average: at an edge of the band half a tile more, and what masks cost there.
        edges = p.edges
        seen = smaller(p.pairs / p.seq_own + 0.5 * edges * own, p.seq_walked) + 0.5 * max(1, edges) * walked
        masked = model.edge * edges * larger(own, walked)
        steps = larger(1.0, (seen + masked) / walked) * (p.group if p.by_keys else 1)
        multiply = 2.0 * products * own * walked * p.width / (model.fed * rate.mma_flops_per_us)
        feed = c.warps * (products * walked + read_rows) * p.width * 2 / rate.smem_bytes_per_us
        exponent_us = own * walked / (EXPONENTS_PER_CLOCK * rate.clock_mhz)
        per_sm = tiles_of_sm(p, c, gpu)
        together = smaller(c.ctas_per_sm, ceil(per_sm))  # CTAs that an SM runs at once

        def step_us(ctas: Any) -> Any:
            """An SM's time for a tile that one of so many CTAs walks. A third one hides no more."""
            fed = smaller(1.0, ctas * c.warps / model.CROWD_WARPS) ** crowd_power
            return (larger(multiply, feed) + exponents * exponent_us) / fed + fixed * rate.barrier_us / smaller(ctas, 2)

        def cta_us(ctas: Any) -> Any:
            return steps * step_us(ctas) + model.cta * rate.dram_latency_us / smaller(ctas, 2)

        step, cta = step_us(together), cta_us(together)
        if not uneven:
            rounds, rest = divmod(ceil(per_sm), c.ctas_per_sm)
            last = where(rest > 0, rest * cta_us(larger(1, rest)), 0.0)
            busy = where(per_sm > model.many, cta * per_sm, rounds * c.ctas_per_sm * cta + last)
        else:
            busy = cta * larger(1.0, per_sm)
        if uneven and not p.by_keys:
            # The longest of an SM's first tiles shares it with neighbours, evenly spaced by length, then has it alone.
            longest = larger(steps, (min(p.most_seen, p.seq_walked) + masked) / walked)
            spacing = 2.0 * (longest - steps) / larger(1.0, per_sm)
            neighbours = together - 1
            shared = neighbours * larger(0.0, longest - 0.5 * spacing * (neighbours + 1))
            exclusive = where(neighbours > 0, smaller(spacing, longest), 0.0)
            busy = larger(busy, cta + (longest - steps + shared) * step + exclusive * (step_us(1) - step))
        busy = busy * pick(c.order, ORDER[uneven])
        dram = larger(p.work_bytes, walked_bytes(p, c, gpu)) / (model.dram * rate.dram_share * gpu.dram_gbps * 1e3)
        return rate.launch_us + larger(busy, dram) + model.unhidden * smaller(busy, dram)


def tiles_of_sm(p: Q, c: TilesConfig, gpu: GpuSpec) -> Any:
    """Owned tiles of each SM."""
    return -(-p.seq_own // c.own) * p.batch * (p.heads_kv if p.by_keys else p.heads_q) / gpu.sm_count


def walked_bytes(p: AttentionProblem, c: Any, gpu: GpuSpec) -> Any:
    """DRAM bytes of the walked side where CTAs take all heads' heaviest tiles first (``order=heads``) and the L2 does
    not hold all heads: each row of tiles, or as many as run at once, reads anew what it lacks. Else 0.
    """
    own_heads, heads = p.batch * p.heads_q, p.batch * p.heads_kv
    if p.by_keys:
        own_heads, heads = heads, own_heads
    row_bytes = 4.0 * p.width * heads  # of two operands
    whole = row_bytes * p.seq_walked
    if whole <= gpu.l2_bytes or not p.seq_own:
        return 0.0
    at_once = larger(1.0, c.ctas_per_sm * gpu.sm_count / own_heads)
    rows = larger(1.0, -(-p.seq_own // c.own) / at_once)
    missed = min(1.0, 2.0 * (1.0 - gpu.l2_bytes / whole))
    return where(c.order == "heads", missed * row_bytes * p.pairs / p.seq_own * rows, 0.0)


def vectors_along(width: int) -> int:
    """Threads side by side in a row of a padded head dim: the 16-byte vectors of a swizzle pattern."""
    return 8 if width % 64 == 0 else 4
