"""The warpgroup body of ``attention``: TMA and warpgroup MMA, 64 queries a group. Rules, model, parts.

``tile_q`` advances by a group's 64 queries, ``warps`` are those that multiply. ``grid`` gives each tile a CTA
("tiles"), walks over the tiles in a persistent grid ("persistent"), or draws them from a counter there ("counted").
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from cutekernels import rates
from cutekernels.kernels.cute.parts.attention_smem import WarpgroupAttentionSmem
from cutekernels.ops.attention.problem import ORDER, SLACK, AttentionProblem, power_of_two
from cutekernels.ops.shared.per_stream import Workspace

if TYPE_CHECKING:
    from cutekernels.gpu import GpuSpec
    from cutekernels.ops.attention.op import AttentionConfig

GROUP_ROWS = WarpgroupAttentionSmem.GROUP_ROWS
GROUP_WARPS = 4
BODY: dict[str, tuple[Any, ...]] = {
    "tile_q": (64, 128, 192),
    "tile_kv": (48, 64, 80, 96, 112, 128, 144, 160, 176),
    "warps": (4, 8, 12),
    "stages": (1, 2),
    "lazy": (True, False),
    "order": ("rows", "l2", "heads"),
    "turns": (False, True),
    "grid": ("tiles", "persistent", "counted"),
}
# Accumulators and probabilities that a thread keeps without spilling: docs/notes/attention.md#warpgroup-registers.
MOST_VALUES = {1: 200, 2: 200, 3: 136}

# Of the model: docs/notes/attention.md#warpgroup-model. Not fitted: this body has not run on a GPU yet.
_MMA, _EXPONENTS, _EXPONENTS_PER_CLOCK = 0.97, 0.35, 16
_LAUNCH, _CTA, _NEXT = 2.0 / 1.5, 2.75 / 0.8, 1.5 / 0.8  # of launch_us; of dram_latency_us: a CTA, a further tile
_BLOCK = {2: 1.0, 1: 5.0}  # of barrier_us, by stages: a block of keys, whatever its size


def smem(p: AttentionProblem, c: AttentionConfig) -> WarpgroupAttentionSmem:
    return WarpgroupAttentionSmem(c.tile_q // GROUP_ROWS, c.tile_kv, p.head_dim, c.stages)


def broken(p: AttentionProblem, c: AttentionConfig, gpu: GpuSpec) -> Iterator[str]:
    """The rules that ``c`` breaks."""
    groups = c.tile_q // GROUP_ROWS
    if not (gpu.has_tma and gpu.has_wgmma):
        yield f"{gpu.name} has no warpgroup MMA"
    if c.warps != GROUP_WARPS * groups:
        yield f"body=warpgroup has {GROUP_WARPS} warps for {GROUP_ROWS} queries: tile_q={c.tile_q} takes {4 * groups}"
        return
    values = (p.width + c.tile_kv) // 2 + c.tile_kv // 4
    if values > MOST_VALUES[groups]:
        yield f"a thread has {values} sums and probabilities; {groups} groups leave room for {MOST_VALUES[groups]}"
    need = smem(p, c).total_bytes
    if need > gpu.smem_per_block_bytes:
        yield f"{need} bytes of shared memory are more than a block's {gpu.smem_per_block_bytes}"
    for name, tile, seq, least in (("tile_q", c.tile_q, p.seq_q, 64), ("tile_kv", c.tile_kv, p.seq_kv, 64)):
        if tile > max(least, power_of_two(seq)):
            yield f"{name}={tile} idles most of a tile over {seq} rows"
    if c.turns and groups == 1:
        yield "turns=1 is for two groups or more"
    if c.order != "rows" and p.seq_q <= c.tile_q:
        yield f"order={c.order} needs more than one tile of rows"
    if c.grid != "tiles" and tiles(p, c) <= gpu.sm_count:
        yield f"grid={c.grid} is for more tiles than SMs"


def tiles(p: AttentionProblem, c: AttentionConfig) -> int:
    """Tiles of queries, all heads together."""
    return -(-p.seq_q // c.tile_q) * p.batch * p.heads_q


def estimate_us(p: AttentionProblem, c: AttentionConfig, gpu: GpuSpec) -> float:
    """Tiles of an SM, block by block: products, and the exponents that they do not hide; or DRAM, if slower."""
    rate = rates.of(gpu)
    count = tiles(p, c)
    if count == 0 or p.seq_kv == 0:
        return _LAUNCH * rate.launch_us
    uneven = p.limited_left or p.limited_right
    seen = p.pairs / p.seq_q + (0.5 * (c.tile_q + c.tile_kv) if uneven else 0)
    blocks = max(1.0, min(seen, p.seq_kv) / c.tile_kv + 0.5)
    multiply = 4.0 * c.tile_q * c.tile_kv * p.width / (_MMA * rate.warpgroup_flops_per_us)
    exponents = c.tile_q * c.tile_kv / (_EXPONENTS_PER_CLOCK * rate.clock_mhz)
    step = multiply + _EXPONENTS * exponents * (1.0 if c.turns or c.tile_q == GROUP_ROWS else 1.1)
    step += _BLOCK[c.stages] * rate.barrier_us
    between = (_CTA if c.grid == "tiles" else _NEXT) * rate.dram_latency_us
    per_sm = max(1.0, count / gpu.sm_count) if c.grid == "counted" or uneven else -(-count // gpu.sm_count)
    late = 0.5 * blocks * step if uneven and c.grid == "persistent" else 0.0  # the last wave's heavy tiles
    dram = p.bytes_moved / (rate.dram_share * gpu.dram_gbps * 1e3)
    busy = (per_sm * (blocks * step + between) + late) * ORDER[uneven][c.order]
    return float(_LAUNCH * rate.launch_us + max(busy, dram))


def body(p: AttentionProblem, c: AttentionConfig, gpu: GpuSpec) -> Any:
    """The kernel with its parts."""
    from cutekernels.kernels.cute.attention.warpgroup import WarpgroupAttention
    from cutekernels.kernels.cute.parts.mask import BandMask
    from cutekernels.kernels.cute.parts.sequences import HeadOrder, Sequences
    from cutekernels.kernels.cute.parts.softmax import OnlineSoftmax

    return WarpgroupAttention(
        groups=c.tile_q // GROUP_ROWS,
        tile_kv=c.tile_kv,
        head_dim=p.head_dim,
        padded=p.width,
        stages=c.stages,
        turns=c.turns,
        mask=BandMask(c.tile_q, c.tile_kv, p.limited_left, p.limited_right, p.mask),
        softmax=OnlineSoftmax(SLACK if c.lazy else 0.0, p.softcap),
        order=HeadOrder(c.order, gpu.l2_bytes // 2),
        sequences=Sequences(p.varlen),
        resident=0 if c.grid == "tiles" else gpu.sm_count,
        counted=c.grid == "counted",
    )


def counter(c: AttentionConfig) -> Workspace | None:
    """The counter of tiles, in the tickets of a workspace without partial sums."""
    return Workspace(0, 1) if c.grid == "counted" else None
