"""The skinny_warpgroup schedule of ``gemm``, without a GPU: whom it takes, its tiles, what the compiler makes of it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from cutekernels import dispatch, gpu, rates
from cutekernels.db.storage import snapshot
from cutekernels.kernels.cute.parts.smem import SkinnyWarpgroupSmem
from cutekernels.op import ladder
from cutekernels.ops.products.dense import GEMM
from cutekernels.ops.products.schedules import schedule, skinny_warpgroup
from cutekernels.ops.products.schedules.problem import GemmConfig, GemmProblem
from cutekernels.ops.products.schedules.schedule import PLAIN
from cutekernels.ops.products.schedules.skinny_warpgroup import SKINNY_WARPGROUP
from tests.shipping import ship, text_of

H100, H200 = gpu.lookup("h100-sxm"), gpu.lookup("h200")
MANY_CTAS = (4, 8)  # to a tile: those that send into the place of stages


def linear(m: int, n: int = 3584, k: int = 3584, words: str = "") -> GemmProblem:
    return GemmProblem.parse(f"m={m} n={n} k={k} b_major=k {words}")


def valid(p: GemmProblem, spec: gpu.GpuSpec = H200) -> list[GemmConfig]:
    return [c for c in GEMM.valid(p, spec) if c.body == "skinny_warpgroup"]


@pytest.mark.parametrize("name", ["a100", "l40s", "rtx5090"])
def test_without_warpgroup_mma_there_is_none(name: str) -> None:
    spec = gpu.lookup(name)
    assert not valid(linear(64), spec)
    config = valid(linear(64))[0]
    assert "no warpgroup MMA" in str(GEMM.why_not(linear(64), config, spec))


@pytest.mark.parametrize(
    ("words", "rule"),
    [
        ("a_align=4", "16-byte aligned rows"),
        ("b_align=2", "16-byte aligned rows"),
        ("batch=2 batched=1", "no batch"),
        ("wide=1", "no 64-bit strides"),
        ("dtype=fp16 accumulate=fp16", "fp32"),
    ],
)
def test_refuses_what_the_tma_cannot_load(words: str, rule: str) -> None:
    problem, config = linear(64, words=words), valid(linear(64))[0]
    assert rule in str(GEMM.why_not(problem, config, H200))
    assert not valid(problem)
    assert GEMM.default(problem, H200).body != "skinny_warpgroup"


def test_no_k_is_refused() -> None:
    empty = linear(64, k=0)
    assert "K of 8 or more" in str(SKINNY_WARPGROUP.refusal(empty, H200, PLAIN))
    assert GEMM.why_not(empty, GEMM.default(empty, H200), H200) is None


def test_tokens_choose_the_tile() -> None:
    tokens = (1, 8, 9, 16, 17, 33, 49, 64, 65, 97, 128, 129, 200, 300, 4096)
    tiles = {m: SKINNY_WARPGROUP.fitting_tiles(linear(m)) for m in tokens}
    assert tiles == {
        1: [8], 8: [8], 9: [16], 16: [16], 17: [32], 33: [48], 49: [64], 64: [64],
        65: [96, 128], 97: [128], 128: [128], 129: [128, 192], 200: [128, 256], 300: [64, 128, 256], 4096: [128, 256],
    }  # fmt: skip
    for m in range(1, 700):
        for tile in SKINNY_WARPGROUP.fitting_tiles(linear(m)):
            assert tile >= min(m, 64), m  # all tokens in one tile, or whole groups of 64
            assert tile >= m or tile % 64 == 0, m
        bucket = set(SKINNY_WARPGROUP.fitting_tiles(linear(ladder(m))))
        assert bucket <= set(SKINNY_WARPGROUP.fitting_tiles(linear(m))), "what a bucket was tuned with serves all of it"


def test_columns_are_dealt_out_evenly() -> None:
    """132 SMs: 144 columns each of 18944 are one wave; no tile makes as many waves with more."""
    tiles = {c.tile_n for c in valid(linear(64, 18944)) if c.ctas_per_sm == 1}
    assert 144 in tiles
    assert not tiles & {160, 176, 192, 208, 224, 240, 256}
    one_wave = GemmConfig.parse(str(next(c for c in valid(linear(64, 18944)) if c.tile_n == 144)))
    assert "as many waves" in str(GEMM.why_not(linear(64, 18944), one_wave.replace(tile_n=160), H200))


def test_a_neighbour_s_tile_is_not_taken_where_it_idles_the_gpu(shipped: Path) -> None:
    """18944 columns are 132 tiles of 144, one for each SM; 4608 would be 32, where 64 of 72 go to two SMs each. Of 32
    they would be 144, and most SMs would have one while some have two.
    """
    header, *rows = text_of(Path(snapshot.__file__).parents[1] / "shipped/h200.jsonl.xz").splitlines()
    (one,) = [row for row in rows if str(linear(128, 18944)) in json.loads(row)]
    ship(shipped, "h200", f"{header}\n{one}\n")
    tuned = dispatch.resolve(GEMM, linear(128, 18944), H200)
    assert (tuned.origin, tuned.config.tile_n) == ("tuned", 144)
    for m in (48, 64, 96, 128):
        found = dispatch.resolve(GEMM, linear(m, 4608), H200)
        assert (found.origin, found.config.tile_n, found.config.split_k) == ("default", 72, 2), found
    assert "as many waves of CTAs" in str(GEMM.why_not(linear(128, 4608), tuned.config, H200))
    narrow = GEMM.default(linear(64, 4096), H200).replace(tile_n=32, split_k=1)
    assert GEMM.why_not(linear(64, 4096), narrow, H200) is None
    assert "of the GPU at work where" in str(GEMM.why_not(linear(64, 4608), narrow, H200))


def test_sums_and_results_lie_within_the_shared_memory() -> None:
    """Results take the place of the stages; sums of the others, of whole groups of 64 rows, lie behind both."""
    split = [c for m in (64, 80, 96, 128) for c in valid(linear(m)) if c.split_k == 2]
    assert any(c.tile_m == 96 and c.stages == 2 for c in split)
    for c in split:
        frame = SKINNY_WARPGROUP.smem(c)
        sums = 128 * skinny_warpgroup.groups(c) * frame.share * 4  # bytes: threads, sums of each
        assert c.split_k * frame.share >= c.tile_n // 2, "all of a thread's sums are somebody's share"
        assert frame.inbox_at >= c.stages * frame.stage_bytes
        assert frame.inbox_at >= c.tile_m * frame.out_pitch * 2
        assert frame.inbox_at % 16 == 0, "sums are sent 16 bytes at a time"
        assert frame.barriers_at >= frame.inbox_at + (c.split_k - 1) * sums
        assert frame.total_bytes >= frame.barriers_at + 8 * (2 * c.stages + 1)


@pytest.mark.parametrize("split", MANY_CTAS)
def test_many_ctas_deal_out_all_columns_and_send_into_the_stages(split: int) -> None:
    """Each accumulator is one CTA's to add up, in whole blocks of 8 columns; some CTAs of a narrow tile have none."""
    for tile_n in skinny_warpgroup.TILES:
        for rows in (16, 64, 96, 256):
            frame = SkinnyWarpgroupSmem(rows, tile_n, 64, 4, split, gamma_bytes=2, squares=True)
            counts = [frame.count(cta) for cta in range(split)]
            assert sum(counts) == tile_n // 2
            assert max(counts) == frame.share < frame.ACCUMULATORS_PER_BLOCK + tile_n // 2 / split
            assert all(count % frame.ACCUMULATORS_PER_BLOCK == 0 for count in counts)
            assert frame.inbox_at % 16 == 0
            assert frame.inbox_at == rows * frame.out_pitch * 2, "results are written while the inbox is read"
            inbox_end = frame.inbox_at + (split - 1) * frame.share * frame.consumer_threads * 4
            assert frame.squares_at == max(inbox_end, 4 * frame.stage_bytes), "sums of squares outlive the stages"


def test_many_ctas_to_a_tile_are_for_few_tiles_and_a_long_k() -> None:
    few = linear(256, 1024, 4096)
    found = {c.split_k: c for c in valid(few, H100) if c.tile_n == 72 and c.tile_k == 64}
    config = found[4]
    assert all(c.ctas_per_sm == 1 for c in valid(few, H100) if c.split_k > 2)
    assert "take ctas_per_sm=1" in str(GEMM.why_not(few, config.replace(ctas_per_sm=2, stages=3), H100))
    assert "less than two k-tiles" in str(GEMM.why_not(linear(256, 1024, 448), config, H100))
    assert GEMM.why_not(linear(256, 1024, 456), config, H100) is None
    # 30 clusters of four run at once, not 33.
    assert skinny_warpgroup.resident(config, H100) == skinny_warpgroup.resident(config.replace(split_k=8), H100) == 120
    assert skinny_warpgroup.resident(config.replace(split_k=2), H100) == H100.sm_count
    assert "fill the GPU" in str(GEMM.why_not(linear(256, 8192, 4096), config, H100))


def test_the_model_takes_many_ctas_where_two_leave_narrow_tiles() -> None:
    """Few tiles and a long K: the default's estimate is below any of two CTAs, above what its MMAs alone take."""
    for m, n, k in ((128, 512, 10816), (256, 1664, 9536), (512, 896, 31872), (600, 1152, 6912)):
        problem = linear(m, n, k)
        config = min(valid(problem, H100), key=lambda c: GEMM.estimate_us(problem, c, H100))
        assert config.split_k in MANY_CTAS, problem
        chosen = GEMM.estimate_us(problem, config, H100)
        two = min(GEMM.estimate_us(problem, c, H100) for c in valid(problem, H100) if c.split_k <= 2)
        assert chosen < two
        flops = 2 * 64 * skinny_warpgroup.groups(config) * config.tile_n * k / config.split_k
        assert chosen > flops / rates.of(H100).warpgroup_flops_per_us + rates.of(H100).launch_us
    for m, n, k in ((64, 4096, 4096), (128, 14336, 4096), (256, 4864, 32768), (128, 512, 1024), (1024, 4096, 4096)):
        config = GEMM.default(linear(m, n, k), H100)
        assert config.body == "warpgroup" or config.split_k <= 2, (m, n, k)


def test_prefetches_only_as_a_dependent_and_little() -> None:
    config = GEMM.default(linear(64), H200)
    assert config.pdl
    assert config.prefetch_l2
    assert "is for pdl=1" in str(GEMM.why_not(linear(64), config.replace(pdl=False), H200))
    much = GEMM.default(linear(64, 18944), H200).replace(tile_n=144, tile_k=128, stages=4, prefetch_l2=8)
    assert f"asks for {8 * 144 * 128 * 2} bytes" in str(GEMM.why_not(linear(64, 18944), much, H200))
    assert all(c.pdl or not c.prefetch_l2 for c in GemmConfig.every())
    by_ahead = {
        a: schedule.saved_us(config.replace(tile_n=32, prefetch_l2=a), H200, 1.0) for a in (0, 2, 4, 8)
    }  # of 8 KiB each
    assert by_ahead[0] == 0.0 < by_ahead[2] < by_ahead[8] < by_ahead[4], "64 KiB are more than pays"


def test_two_ctas_to_a_tile_have_their_sms_to_themselves() -> None:
    """Unless the config asks for two to an SM; one CTA to a tile takes what it needs."""
    for c in valid(linear(16)):
        total, used = (
            SKINNY_WARPGROUP.smem(c).total_bytes,
            replace(SKINNY_WARPGROUP.smem(c), exclusive=False).total_bytes,
        )
        together = 2 * (total + H200.SMEM_RESERVED_BYTES) <= H200.smem_per_sm_bytes
        if c.split_k > 1 and c.ctas_per_sm == 1:
            assert not together, c
        else:
            assert total == used, c


def test_a_norm_s_sums_lie_behind_the_others() -> None:
    """Rows' sums by each CTA of the cluster, whole groups of rows, and three barriers more than stages have."""
    for tile_n, split in ((8, 1), (48, 2), (64, 1), (96, 2), (128, 2)):
        frame = SkinnyWarpgroupSmem(tile_n, 56, 128, 4, split, gamma_bytes=2, squares=True)
        assert frame.squares_at >= frame.inbox_at + (split - 1) * frame.share * frame.consumer_threads * 4
        assert frame.barriers_at == frame.squares_at + 4 * split * -(-tile_n // 64) * 64
        assert frame.barriers_at % 8 == 0
        assert frame.inbox_barrier_at == frame.barriers_at + 2 * 8 * frame.stages
        assert frame.squares_barrier_at == frame.inbox_barrier_at + (8 if split > 1 else 0)
        assert frame.total_bytes == frame.squares_barrier_at + 8


def test_default_beyond_a_few_tokens() -> None:
    bodies = {m: GEMM.default(linear(m, 512), H200).body for m in (1, 7, 8, 33, 64, 128, 8192)}
    assert bodies == dict.fromkeys((1, 7), "skinny") | dict.fromkeys((8, 33, 64, 128), "skinny_warpgroup") | {
        8192: "warpgroup"
    }
    assert GEMM.default(linear(1), H200).body == "skinny_warpgroup"
    assert GEMM.default(linear(1, 18944), H200).body == "skinny_warpgroup"
    assert GEMM.default(linear(129), gpu.lookup("l40s")).body == "multistage"


@pytest.mark.parametrize(
    ("text", "knobs"),
    [
        ("m=600 n=1152 k=6912 b_major=k", "tile_m=128 tile_n=192 stages=5 split_k=4"),
        ("m=600 n=1000 k=4096 b_major=k c=n bias=same out_align=1", "tile_m=192 tile_n=88 stages=6 split_k=4"),
        ("m=64 n=512 k=9216 b_major=k dtype=fp16 bias=fp32 activation=gelu", "tile_m=64 tile_n=40 stages=8 split_k=8"),
    ],
)
def test_many_ctas_compile_without_spills(text: str, knobs: str) -> None:
    problem = GemmProblem.parse(text)
    values = {name: int(value) for name, value in (word.split("=") for word in knobs.split())}
    config = next(iter(SKINNY_WARPGROUP.span())).replace(tile_k=64, pdl=True, **values)
    assert not list(SKINNY_WARPGROUP.foreign_knobs(config))
    assert not list(SKINNY_WARPGROUP.failures_of("config", config, H100, PLAIN))
    facts = GEMM.build(problem, config, H100).facts
    assert facts.stack_bytes == 0
    assert facts.smem_bytes == SKINNY_WARPGROUP.smem(config).total_bytes
    assert facts.registers * SKINNY_WARPGROUP.threads(config) <= H100.REGISTERS_PER_SM


def test_compiles_without_spills() -> None:
    """The model's choice beside the widest tiles, in both types, with every epilogue."""
    words = ["", "dtype=fp16", "bias=fp32 activation=gelu", "c=n bias=same activation=silu out_align=1"]
    for i, (m, n) in enumerate([(300, 4096), (48, 1000), (64, 18944), (96, 3584)]):
        problem = linear(m, n, words=words[i % len(words)])
        found = valid(problem)
        chosen = min(found, key=lambda c: (GEMM.estimate_us(problem, c, H200), SKINNY_WARPGROUP.preference(problem, c)))
        widest = max(found, key=lambda c: (c.tile_n, c.tile_m))
        for config in {chosen} if i else {widest, chosen}:
            facts = GEMM.build(problem, config, H200).facts
            assert facts.stack_bytes == 0, config
            assert facts.smem_bytes == SKINNY_WARPGROUP.smem(config).total_bytes, config
            threads = SKINNY_WARPGROUP.threads(config) * config.ctas_per_sm
            assert facts.registers * threads <= H200.REGISTERS_PER_SM, (config, facts)
            if not words[i % len(words)]:
                assert facts.registers <= skinny_warpgroup.registers_per_thread(config) + 8, (config, facts)
