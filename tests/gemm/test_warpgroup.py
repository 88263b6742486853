"""The warpgroup schedule: its rules, its choice, and its kernels compiled for a GPU that is not there."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from cutekernels import gpu
from cutekernels.ops.products.dense import GEMM
from cutekernels.ops.products.schedules.problem import GemmConfig, GemmProblem
from cutekernels.ops.products.schedules.schedule import PLAIN, Extras, extras_of
from cutekernels.ops.products.schedules.warpgroup import WARPGROUP, cluster_tiles, groups, sharing
from tests import compiled

H200, A100 = gpu.lookup("h200"), gpu.lookup("a100")
SQUARE = GemmProblem.parse("m=4096 n=4096 k=4096 b_major=k")
BASE = GemmConfig.parse(
    "tile_m=128 tile_n=256 tile_k=64 warps_m=1 warps_n=1 stages=4 raster=8 ctas_per_sm=1 body=warpgroup"
)


def broken(p: GemmProblem, c: GemmConfig) -> str:
    return "; ".join(WARPGROUP.failures(p, c, H200, extras_of(p)))


# ---- rules ----------------------------------------------------------------------------------------------


def test_the_base_is_valid() -> None:
    assert GEMM.why_not(SQUARE, BASE, H200) is None


def test_without_warpgroup_mma_there_is_none() -> None:
    assert "no warpgroup MMA" in str(GEMM.why_not(SQUARE, BASE, A100))
    assert all(c.body != "warpgroup" for c in GEMM.valid(SQUARE, A100))


@pytest.mark.parametrize(
    ("words", "rule"),
    [
        ("m=4096 n=4096 k=4096 b_major=k b_align=4", "16-byte aligned"),
        ("m=4096 n=4096 k=4096 out_align=2", "16-byte aligned"),
        ("m=4096 n=4096 k=4096 c=m", "contiguous extent is out's"),
        ("m=4096 n=4096 k=4096 c=n c_align=4", "contiguous extent is out's"),
        ("m=4096 n=4096 k=4096 wide=1", "64-bit strides"),
        ("m=4096 n=4096 k=0", "a K of 1 or more"),
        ("m=31 n=4096 k=4096", "32 rows and columns"),
        ("m=4096 n=16 k=4096", "32 rows and columns"),
    ],
)
def test_refuses_what_it_cannot_do(words: str, rule: str) -> None:
    problem = GemmProblem.parse(words)
    assert rule in broken(problem, BASE)
    assert GEMM.default(problem, H200).body != "warpgroup"


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"cluster_m": 2, "cluster_n": 2}, "two CTAs at most"),
        ({"pingpong": True, "tile_m": 256, "tile_n": 96}, "a tile of its own"),
        ({"tile_m": 256, "tile_n": 208, "stages": 3}, "208 accumulators a thread"),
        ({"pingpong": True, "tile_n": 208}, "208 accumulators a thread"),
        ({"tile_m": 192, "tile_n": 192, "stages": 3}, "96 accumulators a thread; 3 groups keep 80"),
        ({"stages": 8}, "shared memory"),
        ({"tile_n": 64, "stages": 3}, "leaves room for 5"),
    ],
)
def test_a_config_breaks_a_rule(change: dict[str, object], rule: str) -> None:
    assert rule in broken(SQUARE, BASE.replace(**change))


def test_fp16_sums_take_half_the_registers() -> None:
    half = replace(SQUARE, dtype="fp16", accumulate="fp16")
    large = BASE.replace(tile_m=256, stages=3)
    assert "256 accumulators a thread" in broken(SQUARE, large)
    assert GEMM.why_not(half, large, H200) is None
    assert GEMM.why_not(half, BASE.replace(tile_m=192, stages=3), H200) is None, "three groups"
    assert large in set(GEMM.valid(half, H200))
    assert large not in set(GEMM.valid(SQUARE, H200))
    for extent in (1024, 4096):
        assert GEMM.default(replace(half, m=extent, n=extent, k=extent), H200).body == "warpgroup"


def test_a_gate_takes_whole_boxes_of_both_and_rows_that_stay_rows() -> None:
    gated = Extras(gated=True)
    for change in ({"tile_n": 112}, {"swap_ab": True}):
        assert "a gate takes" in "; ".join(WARPGROUP.failures_of("config", BASE.replace(**change), H200, gated))
        assert "a gate" not in "; ".join(WARPGROUP.failures_of("config", BASE.replace(**change), H200, PLAIN))
    assert not list(WARPGROUP.failures_of("config", BASE, H200, gated))
    most = BASE.replace(tile_m=256, tile_n=192, stages=3)
    assert "or a gate" in "; ".join(WARPGROUP.failures_of("both", SQUARE, most, H200, gated))
    assert not list(WARPGROUP.failures_of("both", SQUARE, most, H200, PLAIN))


def test_the_columns_of_a_gate_come_by_sixteens() -> None:
    gated, odd = Extras(gated=True), BASE.replace(tile_n=136, stages=6)
    assert "in steps of 16" in "; ".join(WARPGROUP.failures_of("config", odd, H200, gated))
    assert not list(WARPGROUP.failures_of("config", odd, H200, PLAIN))
    assert not list(WARPGROUP.failures_of("config", odd.replace(tile_n=144), H200, gated))


def test_results_leave_by_two_boxes_where_those_leave_room_for_the_stages() -> None:
    narrow = BASE.replace(tile_n=104)
    boxes = {stages: WARPGROUP.smem(narrow.replace(stages=stages)).boxes for stages in (5, 6, 7)}
    assert boxes == {5: 2, 6: 2, 7: 1}
    problem = GemmProblem.parse("m=200 n=8192 k=8192 b_major=k")
    assert not broken(problem, narrow.replace(stages=7, raster=1))
    assert "shared memory" in broken(problem, narrow.replace(stages=8, raster=1))
    few = GEMM.default(problem, H200)
    assert (few.tile_m, few.tile_n, few.stages) == (104, 128, 7), "200 tokens in two tiles, as deep as they go"


def test_operands_that_are_not_k_major_come_in_whole_swizzled_lines() -> None:
    problem = GemmProblem.parse("m=4096 n=4096 k=4096")
    assert "by 64 elements" in broken(problem, BASE.replace(tile_n=160, stages=5))
    assert "by 64 elements" in broken(problem, BASE.replace(tile_n=192, cluster_m=2))
    assert not broken(problem, BASE.replace(cluster_m=2))


def test_bias_and_c_take_shared_memory_too() -> None:
    problem = GemmProblem.parse("m=4096 n=4096 k=4096 b_major=k c=n bias=same")
    assert "shared memory" in broken(problem, BASE)
    assert not broken(problem, BASE.replace(stages=3))


def test_c_comes_by_whole_boxes_since_out_may_be_c() -> None:
    problem = GemmProblem.parse("m=4096 n=4096 k=4096 b_major=k c=n")
    assert "whole boxes" in broken(problem, BASE.replace(tile_n=160, stages=4))
    assert not broken(problem, BASE.replace(tile_n=192, stages=4))


@pytest.mark.parametrize("c", ["none", "n"])
def test_the_default_is_chosen_among_the_deepest_of_every_tile(c: str) -> None:
    """C comes in through more boxes, which leave room for fewer stages."""
    problem = GemmProblem.parse(f"m=4096 n=4096 k=4096 b_major=k c={c}")
    depths: dict[tuple[int, int], set[int]] = {}
    x = extras_of(problem)
    for config in WARPGROUP.fitting(H200, x, WARPGROUP.usual(problem, H200, x)):
        depths.setdefault(config.mma_tile, set()).add(config.stages)
    assert depths[192, 64] == ({4, 5, 6} if c == "none" else {3, 4}), "with 6 a group has one box of results"
    assert depths[128, 256] == ({3, 4} if c == "none" else {3})


# ---- choice ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["", "b_major=k", "a_major=m", "a_major=m b_major=k", "out_major=m"])
@pytest.mark.parametrize("extent", [1024, 2048, 8192])
def test_it_is_the_default_of_large_products_in_every_layout(layout: str, extent: int) -> None:
    assert GEMM.default(GemmProblem.parse(f"m={extent} n={extent} k={extent} {layout}"), H200).body == "warpgroup"


@pytest.mark.parametrize("tokens", [1, 16, 64, 128])
def test_few_tokens_go_to_the_other_schedules(tokens: int) -> None:
    assert GEMM.default(GemmProblem.parse(f"m={tokens} n=4096 k=4096 b_major=k"), H200).body in (
        "skinny_warpgroup",
        "skinny",
    )


def test_the_model_prefers_what_was_measured_faster() -> None:
    """Times of an H200, 2026-11-23, us: docs/notes/gemm.md#warpgroup-model."""
    one, two = BASE, BASE.replace(tile_n=128, stages=5, pingpong=True)
    measured = [(one.replace(cluster_m=2), 173.2), (one, 184.0), (two.replace(cluster_m=2), 179.8), (two, 227.0)]
    estimates = [WARPGROUP.estimate_us(SQUARE, c, H200, PLAIN) for c, _ in measured]
    for estimate, (_, us) in zip(estimates[:3], measured, strict=False):
        assert 0.9 < estimate / us < 1.1
    assert max(estimates[:3]) < estimates[3]
    assert 0.8 < estimates[3] / 227.0 < 1.1  # loads that nobody shares: slow that day, not in two runs of 2026-11-24


def test_a_batch_counts_its_tiles() -> None:
    batched = replace(GemmProblem.parse("m=1024 n=1024 k=1024 batch=8 batched=1"))
    single = GemmProblem.parse("m=1024 n=1024 k=1024")
    c = BASE.replace(tile_n=128, stages=6)
    assert cluster_tiles(batched, c) == cluster_tiles(single, c) == (8, 8)
    assert WARPGROUP.estimate_us(batched, c, H200, PLAIN) > 2 * WARPGROUP.estimate_us(single, c, H200, PLAIN)


# ---- kernels --------------------------------------------------------------------------------------------

COMPILED = {
    "halves of 128 rows": ("m=4096 n=4096 k=4096", "tile_m=256 tile_n=128 stages=4 raster=8 cluster_m=2 pdl=1"),
    "three groups": ("m=4096 n=4096 k=4096 b_major=k bias=same", "tile_m=192 tile_n=160 stages=3 raster=1"),
    "one group": ("m=200 n=3584 k=3584 b_major=k", "tile_m=64 tile_n=112 stages=8 raster=1"),
    "columns by eights": (
        "m=200 n=8192 k=8192 b_major=k",
        "tile_m=104 tile_n=128 stages=7 raster=8 cluster_m=2 swap_ab=1",
    ),
    "an odd half each": (
        "m=333 n=4096 k=4096 b_major=k bias=same",
        "tile_m=168 tile_n=128 stages=5 raster=8 cluster_n=2 swap_ab=1 pingpong=1",
    ),
    "pingpong": ("m=4096 n=4096 k=4096 a_major=m", "tile_m=128 tile_n=192 stages=4 raster=8 pingpong=1"),
    "most sums": ("m=4096 n=4096 k=4096 b_major=k", "tile_m=256 tile_n=192 stages=3 raster=8 cluster_n=2"),
    "c": ("m=4096 n=4096 k=4096 c=n bias=same activation=gelu", "tile_m=128 tile_n=256 stages=3 raster=8 cluster_m=2"),
    "out_major=m": (
        "m=512 n=512 k=512 batch=3 batched=1 out_major=m c=m dtype=fp16",
        "tile_m=128 tile_n=128 stages=4 raster=1",
    ),
    "fp16 sums in turns": (
        "m=4096 n=4096 k=4096 b_major=k bias=fp32 activation=gelu dtype=fp16 accumulate=fp16",
        "tile_m=128 tile_n=208 stages=4 raster=8 pingpong=1",
    ),
    "fp16 sums and c": (
        "m=4096 n=4096 k=4096 c=n bias=same activation=gelu_tanh dtype=fp16 accumulate=fp16",
        "tile_m=192 tile_n=128 stages=3 raster=8 cluster_n=2",
    ),
}


def assert_compiled(built: Any, schedule: Any, config: GemmConfig, extras: Extras) -> Counter[str]:
    """Checks opcodes that every kernel of the schedule has, and returns them."""
    assert built.facts.stack_bytes == 0
    assert built.facts.smem_bytes == schedule.smem(config, extras).total_bytes
    found = compiled.opcodes(built)
    products = {i: count for i, count in found.items() if i.startswith("HGMMA")}
    rows, columns = config.mma_tile
    assert sum(products.values()) == rows // (64 * sharing(config)) * config.tile_k // 16
    assert all(re.search(rf"64x{columns}x16", i) for i in products), products
    assert not any(i.startswith(("HMMA", "LDGSTS", "LDL", "STL")) for i in found)
    moved = sum(count for i, count in found.items() if i.startswith("USETMAXREG"))
    assert moved == 2, "registers move from the loading group to the others"
    shared = config.cluster_m * config.cluster_n > 1
    assert any(i.startswith("UTMALDG") and "MULTICAST" in i for i in found) is shared
    assert any(i.startswith("UTMASTG") for i in found)
    assert ("PREEXIT" in found) is config.pdl
    assert schedule.threads(config) == 128 * (groups(config) + 1)
    return found


@pytest.mark.parametrize("name", COMPILED)
def test_compiles_as_it_says(name: str) -> None:
    words, knobs = COMPILED[name]
    problem = GemmProblem.parse(words)
    config = GemmConfig.parse(f"{knobs} tile_k=64 warps_m=1 warps_n=1 ctas_per_sm=1 body=warpgroup")
    assert GEMM.why_not(problem, config, H200) is None
    built = GEMM.build(problem, config, H200)
    found = assert_compiled(built, WARPGROUP, config, extras_of(problem))
    products = [i for i in found if i.startswith("HGMMA")]
    assert all((".F32" in i) is (problem.accumulate == "fp32") for i in products), products
    assert found["WARPGROUP.DEPBAR.LE"] == 2, "no wait but ours: one in the loop, one behind it"
    if problem.accumulate == "fp16":
        read = re.findall(r"HADD2\.F32 R\d+, -RZ, R\d+\S*\.H([01])_H\1", compiled.sass(compiled.cubin(built)))
        pairs = config.tile_m * config.tile_n // (128 * sharing(config)) // 2
        assert min(read.count("0"), read.count("1")) >= pairs, "both halves of every register"
        assert found["PRMT"] < 8, "sums stay packed in the loop"


# ---- roles ----------------------------------------------------------------------------------------------


def test_a_body_whose_barriers_do_not_fit_its_roles_is_refused() -> None:
    from cutekernels.kernels.cute.parts.pipeline import StagePipeline

    body = GEMM.body(SQUARE, BASE, H200)
    with pytest.raises(ValueError, match="1 stage: the producer loads one while another is read"):
        replace(body, smem=replace(body.smem, stages=1))
    with pytest.raises(ValueError, match="ping-pong has two consumer groups, not 3"):
        type("Odd", (type(body),), {"groups": 3})(**{**vars(body), "pingpong": True})
    with pytest.raises(ValueError, match=r"empty\[stage\] expects 1 groups, 2 read it"):
        type("Odd", (type(body),), {"pipeline": StagePipeline(4, 0, 1, 1)})(**vars(body))
    with pytest.raises(ValueError, match="setmaxnreg gives out 66560 registers of an SM's 65536"):
        type("Odd", (type(body),), {"registers": (40, 240)})(**vars(body))
