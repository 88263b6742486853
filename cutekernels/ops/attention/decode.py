"""Attention of few queries over a cache, whose operands ``cache.py`` has: the declaration."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from cutekernels import rates
from cutekernels.columns import among, ceil, larger, smaller, where
from cutekernels.errors import UnsupportedProblem
from cutekernels.kernels.cute.parts.attention_smem import DecodeSmem, padded
from cutekernels.op import Work, extent, knob, ladder, plain, power_of_two
from cutekernels.ops.attention import token_scales
from cutekernels.ops.attention.cache import (
    CACHE_ATTENTION,
    PAGE_SIZES,
    CachedOp,
    cache_bytes,
    check_cache_dim,
    check_room,
    elements,
)
from cutekernels.ops.attention.coefficients import DECODE
from cutekernels.ops.attention.operands import numbers, workspace
from cutekernels.ops.attention.problem import (
    CACHES,
    HEAD_DIMS,
    SINKS,
    SLACK,
    UNLIMITED,
    AttentionProblem,
    AttentionSchedule,
    HeadsProblem,
    WarpsConfig,
    depth,
    launch_blind,
    score_factors,
    tuned_cache,
)
from cutekernels.ops.shared.cute_op import CuteOp
from cutekernels.rules import Broken, occupancy_rules, of_both, of_config

if TYPE_CHECKING:
    from torch import Tensor

    from cutekernels.gpu import GpuSpec

MOST_QUERIES = 16  # per sequence
TILE_Q = DecodeSmem.ROWS
_MOST_CTAS = 2**31 - 1


@dataclass(frozen=True)
class DecodeProblem(HeadsProblem):
    """Extents, and the properties that kernels are compiled for.

    ``seq_kv`` is the longest sequence that the cache has room for; ``page_size=0`` is a contiguous cache. With
    ``window``, a query sees ``window_left`` keys before its own. ``cache="fp8"``: k and v are e4m3,
    with a scale of each head; ``"fp8_tokens"``: of each token and head.
    """

    batch: int = extent(ladder)
    seq_kv: int = extent(ladder)
    heads_q: int = extent()
    heads_kv: int = extent()
    seq_q: int = extent(default=1)
    window_left: int = extent(ladder, default=0)
    head_dim: int = plain(*HEAD_DIMS)
    dtype: str = plain("bf16", "fp16")
    page_size: int = plain(0, *PAGE_SIZES)
    window: bool = plain(False, True)
    softcap: bool = plain(False, True)
    lse: bool = plain(False, True)
    sinks: str = plain(*SINKS)
    cache: str = plain(*CACHES)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_cache_dim(self.cache, self.head_dim)
        if not 1 <= self.seq_q <= MOST_QUERIES:
            raise UnsupportedProblem(
                f"a sequence has from 1 to {MOST_QUERIES} queries here, not {self.seq_q}: cache_attention takes more"
            )
        if self.window_left and not self.window:
            raise UnsupportedProblem("window_left needs window=1")
        check_room(self.seq_kv)
        if self.tiles > _MOST_CTAS:
            raise UnsupportedProblem(
                f"a launch has at most {_MOST_CTAS} tiles of {TILE_Q} queries, not {self.tiles}: attend to parts of "
                "the batch one after the other"
            )

    def bucket(self) -> Self:
        return super().bucket().replace(cache=tuned_cache(self.cache))

    @property
    def width(self) -> int:
        """The padded head dim; of a cache in e4m3 a multiple of 64, for rows of a swizzle pattern."""
        return padded(self.head_dim) if self.cache == "same" else -(-self.head_dim // 64) * 64

    @property
    def row_bytes(self) -> int:
        """Bytes of a key and its value, with their scales where each has one."""
        return 2 * (cache_bytes(self.cache) * self.head_dim + self.of_tokens)

    @property
    def of_tokens(self) -> bool:
        """Whether each token and head has a scale."""
        return self.cache == "fp8_tokens"

    @property
    def keys(self) -> int:
        """Keys of the longest sequence that some query sees."""
        return min(self.seq_kv, self.window_left + self.seq_q) if self.window else self.seq_kv

    @property
    def tiles(self) -> int:
        """Tiles of queries, each with all keys of its sequence and head."""
        return self.batch * self.heads_kv * -(-self.seq_q * self.group // TILE_Q)


@dataclass(frozen=True)
class DecodeConfig(WarpsConfig):
    """The knobs of ``kernels/cute/attention/decode.py``.

    ``splits`` CTAs share the keys of a tile of queries; with ``cluster`` they form one thread block cluster, and
    exchange their sums through shared memory instead of global memory.
    """

    tile_kv: int = knob(32, 64, 128, 256)
    warps: int = knob(2, 4, 8)
    stages: int = knob(2, 3, 4, 6)
    ctas_per_sm: int = knob(1, 2, 3, 4)
    splits: int = knob(1, 2, 3, 4, 6, 8, 11, 16, 24, 33, 48, 66, 96, 132)
    pdl: bool = knob(False, True, added=True)
    cluster: bool = knob(False, True, added=True)

    @property
    def rows(self) -> int:
        """Keys of a warp in a block."""
        return self.tile_kv // self.warps

    def smem(self, p: DecodeProblem) -> DecodeSmem:
        clustered = where(self.cluster, self.splits, 0)
        return DecodeSmem(
            self.tile_kv, p.width, self.stages, self.warps, clustered, cache_bytes=cache_bytes(p.cache),
            token_scales=p.of_tokens,
        )  # fmt: skip


MAX_CTAS = 4
MOST_CLUSTERED = 8  # CTAs of a cluster that every GPU with clusters takes
WIDEST_IN_REGISTERS = 192  # padded head dims whose queries stay in registers
MOST_WAVES = 16  # of one CTA per SM, the most that splits may make
OTHER_REGISTERS = 72  # beside accumulators and Q: fragments, row statistics, addresses, pages
_MOST_TICKETS = 2**20  # of ``Workspace``


class SplitDecode(AttentionSchedule[DecodeProblem, DecodeConfig]):
    """Splits of the keys, met by ticket or in a cluster."""

    name = "decode"
    config = DecodeConfig

    @of_config
    def keys_of_warps(self, c: DecodeConfig, gpu: GpuSpec, x: DecodeProblem) -> Broken:
        why = "{} warps of tile_kv={} have {} keys each: take 16 or 32"
        yield among(c.rows, (16, 32)) == 0, why, c.warps, c.tile_kv, c.rows

    @of_config
    def dependent_launch(self, c: DecodeConfig, gpu: GpuSpec, x: DecodeProblem) -> Broken:
        yield c.pdl & (not gpu.has_pdl), "{} has no programmatic dependent launch", gpu.name

    @of_config
    def clusters(self, c: DecodeConfig, gpu: GpuSpec, x: DecodeProblem) -> Broken:
        yield c.cluster & (not gpu.has_wgmma), "cluster=1 is for GPUs like the H100, which {} is not", gpu.name
        odd = c.cluster & ((c.splits < 2) | (c.splits > MOST_CLUSTERED))
        yield odd, "cluster=1 is for 2 to {} splits, not {}", MOST_CLUSTERED, c.splits

    @of_config
    def occupancy(self, c: DecodeConfig, gpu: GpuSpec, x: DecodeProblem) -> Broken:
        registers, smem = registers_per_thread(x, c), c.smem(x).total_bytes
        return occupancy_rules(gpu, ctas=c.ctas_per_sm, most=MAX_CTAS, warps=c.warps, registers=registers, smem=smem)

    @of_both
    def tile_of_keys(self, p: DecodeProblem, c: DecodeConfig, gpu: GpuSpec, x: object) -> Broken:
        idle = c.tile_kv > max(32, power_of_two(p.keys))
        yield idle, "tile_kv={} idles most of a block over {} keys", c.tile_kv, p.keys

    @of_both
    def splits(self, p: DecodeProblem, c: DecodeConfig, gpu: GpuSpec, x: object) -> Broken:
        blocks, split = -(-p.keys // c.tile_kv), c.splits > 1
        why = "splits={} are more than the {} blocks of tile_kv={} keys"
        yield split & (c.splits > blocks), why, c.splits, blocks, c.tile_kv
        full = split & (p.tiles * c.splits > MOST_WAVES * gpu.sm_count)
        yield full, "splits={}: {} tiles of queries fill the GPU with fewer", c.splits, p.tiles
        many = split & (c.cluster == 0) & (p.tiles > _MOST_TICKETS)
        yield many, "{} tiles of queries are more than the {} that splits can meet in", p.tiles, _MOST_TICKETS

    @of_both
    def grid(self, p: DecodeProblem, c: DecodeConfig, gpu: GpuSpec, x: object) -> Broken:
        ctas = p.tiles * c.splits
        yield ctas > _MOST_CTAS, "{} CTAs are more than a grid's {}", ctas, _MOST_CTAS

    def times_us(self, p: DecodeProblem, c: Any, gpu: GpuSpec, x: object) -> Any:
        """Waves of CTAs at the rate of their bytes in flight, or a block's latency; or DRAM, if slower."""
        rate, own = rates.of(gpu), DECODE
        if p.tiles == 0 or p.keys == 0:
            return rate.launch_us
        row_bytes = p.row_bytes
        column_cycles = (own.float8 if gpu.has_fp8 else own.converted) if p.cache != "same" else 0.0
        block_cycles = own.block + column_cycles * p.width
        blocks = ceil(-(-p.keys // c.tile_kv) / c.splits)
        cta_bytes = blocks * c.tile_kv * row_bytes
        cta_us = rate.dram_latency_us  # the beginning and end of a CTA

        def wave_us(together: Any) -> Any:
            in_flight = together * (c.stages - 1) * c.tile_kv * row_bytes
            port = smaller(own.port * rate.sm_bytes_per_us, in_flight / (own.latency * rate.dram_latency_us))
            warp_us = blocks * c.rows / 16 * block_cycles / rate.clock_mhz
            return together * cta_bytes / port + warp_us + cta_us

        sms = gpu.sm_count * where(c.cluster & (c.splits > 2), own.clustered, 1.0) // 1
        waves, rest = divmod(p.tiles * c.splits, sms * c.ctas_per_sm)
        last = wave_us(larger(1, -(-rest // sms)))
        busy = waves * wave_us(c.ctas_per_sm) + where(rest > 0, last, 0.0)
        dram = DECODE_ATTENTION.work(p).bytes / (rate.dram_share * gpu.dram_gbps * 1e3) + cta_us
        met = where(c.splits > 1, own.ticket + own.partial * c.splits / c.warps, 0.0)
        met = where(c.cluster, 1.0 + own.message * c.splits, met) * rate.exchange_us
        early = where(c.pdl, rate.dependent_us, 0.0)
        return rate.launch_us - early + larger(busy, dram) + (1.0 - own.hidden) * smaller(busy, dram) + met


class DecodeAttention(CachedOp[DecodeProblem, DecodeConfig], CuteOp[DecodeProblem, DecodeConfig]):
    """q, k and v caches, lengths, page table, sinks, and the scales of caches in e4m3."""

    name = "decode_attention"
    revision = 1
    Problem = DecodeProblem
    Config = DecodeConfig
    suite = (
        "batch=32 seq_kv=4096 heads_q=32 heads_kv=8",
        "batch=64 seq_kv=2048 heads_q=28 heads_kv=4",
        "batch=1 seq_kv=32768 heads_q=32 heads_kv=8",
        "batch=1 seq_kv=4096 heads_q=28 heads_kv=4",
        "batch=2 seq_kv=1024 heads_q=28 heads_kv=4 page_size=16 lse=1",
        "batch=3 seq_kv=777 heads_q=8 heads_kv=8 head_dim=64 dtype=fp16 lse=1",
        "batch=2 seq_kv=2000 heads_q=32 heads_kv=1 seq_q=4 window_left=300 window=1 page_size=64",
        "batch=2 seq_kv=500 heads_q=8 heads_kv=2 seq_q=16 head_dim=80 softcap=1",
        "batch=2 seq_kv=600 heads_q=8 heads_kv=2 head_dim=256 page_size=256 dtype=fp16",
        "batch=3 seq_kv=900 heads_q=16 heads_kv=2 head_dim=64 page_size=16 window_left=127 window=1 sinks=same",
        "batch=32 seq_kv=4096 heads_q=32 heads_kv=8 cache=fp8",
        "batch=1 seq_kv=32768 heads_q=32 heads_kv=8 cache=fp8",
        "batch=3 seq_kv=784 heads_q=16 heads_kv=2 seq_q=3 head_dim=80 dtype=fp16 page_size=16 softcap=1 cache=fp8",
    )

    schedules = (SplitDecode(),)

    # -- kernel

    def further(self, p: DecodeProblem, c: DecodeConfig) -> list[Any]:
        split = c.splits > 1 and not c.cluster
        return [*numbers(3, 1), *workspace(sums=split, tickets=split)]

    def body(self, p: DecodeProblem, c: DecodeConfig, gpu: GpuSpec) -> Any:
        """The body with its parts."""
        from cutekernels.kernels.cute.attention.decode import DecodeAttentionBody
        from cutekernels.kernels.cute.parts.cache import CacheRows
        from cutekernels.kernels.cute.parts.float8 import Float8, Float8Products, Float8Queries
        from cutekernels.kernels.cute.parts.products import warp_products
        from cutekernels.kernels.cute.parts.softmax import SINK_BITS, OnlineSoftmax
        from cutekernels.kernels.cute.parts.token_scales import TokenScales

        products, queries = warp_products(1, p.width <= WIDEST_IN_REGISTERS), None
        per_element = 2 // cache_bytes(p.cache)  # numbers in 16 bits
        if p.cache != "same":
            float8 = Float8(gpu.has_fp8)
            products = Float8Products(products.xy, products.py, products.x_in_registers, float8, c.rows, p.width)
            queries = Float8Queries(float8, c.threads, p.width)
        return DecodeAttentionBody(
            rows_kv=CacheRows(c.rows, p.head_dim // per_element, p.width // per_element, c.stages, p.page_size),
            head_dim=p.head_dim,
            padded=p.width,
            products=products,
            softmax=OnlineSoftmax(SLACK, p.softcap, SINK_BITS + (p.of_tokens and -token_scales.LEAST)),
            warps=c.warps,
            splits=c.splits,
            limited=p.window,
            ctas_per_sm=c.ctas_per_sm,
            dependent=c.pdl,
            clustered=c.cluster,
            queries=queries,
            token_scales=TokenScales(c.rows, c.stages, p.page_size) if p.of_tokens else None,
        )

    def bind(self, p: DecodeProblem, c: DecodeConfig, kernel: Callable[..., Any]) -> Callable[..., Any]:
        from cutekernels.ops.shared.per_stream import StreamWorkspace

        if p.seq_kv == 0:
            return launch_blind(p.lse, 6 + p.lse)
        left = min(p.window_left, UNLIMITED) if p.window else UNLIMITED
        shared = None
        if c.splits > 1 and p.tiles and not c.cluster:
            shared = StreamWorkspace(p.tiles * c.splits * TILE_Q * (p.width + 2), p.tiles)

        def launch(*args: Any) -> None:
            out, lse = args[0], args[1].view(-1) if p.lse else None
            q, k, v, lengths, table, sinks, k_scale, v_scale, scale, softcap = args[1 + p.lse :]
            if out.numel() == 0:
                return
            workspace = (None, None) if shared is None else shared.get()
            kernel(
                out, lse, q, *elements(k, v), lengths, table, sinks, k_scale, v_scale,
                *score_factors(scale, softcap), left, *workspace,
            )  # fmt: skip

        return launch

    def serving(self, inputs: Sequence[Tensor | None]) -> CachedOp[Any, Any]:
        q = inputs[0]
        return self if q is None or q.dim() < 2 or q.shape[1] <= MOST_QUERIES else CACHE_ATTENTION

    def work(self, p: DecodeProblem) -> Work:
        queries = p.batch * p.seq_q * p.heads_q
        moved = p.batch * p.keys * p.heads_kv * p.row_bytes + 4 * queries * p.head_dim + 4 * p.batch
        if p.page_size:
            moved += 4 * p.batch * -(-p.keys // p.page_size)
        whole = AttentionProblem(p.batch, p.seq_q, p.keys, p.heads_q, p.heads_kv, head_dim=p.head_dim, dtype=p.dtype)
        return Work(
            flops=4.0 * queries * p.keys * p.head_dim,
            bytes=float(moved + (4 * queries if p.lse else 0)),
            depth=depth(whole),
        )


DECODE_ATTENTION = DecodeAttention()


def registers_per_thread(p: DecodeProblem, c: DecodeConfig) -> int:
    """An estimate of the compiler's need: accumulators of both products, queries, and the rest."""
    queries = p.width // 4 if p.width <= WIDEST_IN_REGISTERS else 0
    return p.width // 2 + c.rows // 2 + queries + OTHER_REGISTERS
