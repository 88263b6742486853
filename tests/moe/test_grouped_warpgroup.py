"""The warpgroup schedule of grouped products: its rules, its choice, its model, and its kernels compiled for a GPU
that is not there.
"""

from __future__ import annotations

import random
from itertools import product

import pytest

from cutekernels import gpu
from cutekernels.ops.products.grouped import GROUPED_GEMM, GROUPED_GEMM_WGRAD
from cutekernels.ops.products.grouped import GroupedProblem as Problem
from cutekernels.ops.products.schedules.grouped import DEPTH_WARPGROUP, GROUPED_WARPGROUP
from cutekernels.ops.products.schedules.groups import tile_rows
from cutekernels.ops.products.schedules.problem import GemmConfig
from cutekernels.ops.products.schedules.warpgroup import sharing
from tests import compiled
from tests.gemm.test_warpgroup import assert_compiled

H200, A100 = gpu.lookup("h200"), gpu.lookup("a100")
LAYER = Problem.parse("rows=2048 n=1536 k=2048 experts=128")
COMMON = "tile_k=64 warps_m=1 warps_n=1 ctas_per_sm=1 body=warpgroup"
BASE = GemmConfig.parse(f"tile_m=128 tile_n=256 stages=4 raster=8 {COMMON}")
NARROW = GemmConfig.parse(f"tile_m=16 tile_n=128 stages=8 raster=1 swap_ab=1 {COMMON}")


# ---- rules ----------------------------------------------------------------------------------------------


def test_the_bases_are_valid_and_survive_their_text() -> None:
    for config in (BASE, NARROW):
        assert GROUPED_GEMM.why_not(LAYER, config, H200) is None
        assert GemmConfig.parse(str(config)) == config


def test_all_it_names_are_valid() -> None:
    found = [c for c in GROUPED_GEMM.valid(LAYER, H200) if c.body == "warpgroup"]
    assert {c.swap_ab for c in found} == {False, True}
    assert {c.tile_m for c in found if c.swap_ab} >= {16, 32, 48, 64, 256}
    assert all(GROUPED_GEMM.why_not(LAYER, c, H200) is None for c in random.Random(0).sample(found, 50))


def test_without_warpgroup_mma_there_is_none() -> None:
    assert "no warpgroup MMA" in str(GROUPED_GEMM.why_not(LAYER, BASE, A100))
    assert all(c.body == "multistage" for c in GROUPED_GEMM.valid(LAYER, A100))


@pytest.mark.parametrize(
    ("words", "rule"),
    [
        ("rows=2048 n=1540 k=2048 experts=8 align=4", "16-byte aligned"),
        ("rows=2048 n=1536 k=0 experts=8", "a K of 1 or more"),
        ("rows=2048 n=16 k=64 experts=8", "32 columns"),
    ],
)
def test_refuses_what_it_cannot_do(words: str, rule: str) -> None:
    problem = Problem.parse(words)
    assert rule in str(GROUPED_GEMM.why_not(problem, BASE, H200))
    assert GROUPED_GEMM.default(problem, H200).body == "multistage"


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"tile_n": 32, "stages": 8}, "take swap_ab=1"),
        ({"tile_m": 24, "tile_n": 128, "swap_ab": True, "stages": 8}, "takes tile_m from"),
        ({"stages": 8}, "shared memory"),
        ({"cluster_m": 2, "cluster_n": 2}, "two CTAs at most"),
    ],
)
def test_a_config_breaks_a_rule(change: dict[str, object], rule: str) -> None:
    assert rule in str(GROUPED_GEMM.why_not(LAYER, BASE.replace(**change), H200))


@pytest.mark.parametrize(
    ("words", "change", "rule"),
    [
        ("", {"tile_n": 144, "stages": 5}, "takes tile_n from 64, 128, 192, 256"),
        ("", {"tile_n": 64, "stages": 8, "cluster_m": 2}, "loaded in 2 parts"),
        ("", {"tile_n": 16}, "takes tile_n from 64"),
        ("rows=0 n=1536 k=2048 experts=128", {}, "a row or more"),
        ("rows=64 n=1536 k=24 experts=8", {}, "32 rows and columns"),
    ],
)
def test_a_gradient_of_weights_has_rules_of_its_own(words: str, change: dict[str, object], rule: str) -> None:
    problem = Problem.parse(words) if words else LAYER
    assert GROUPED_GEMM_WGRAD.why_not(LAYER, BASE, H200) is None
    assert rule in str(GROUPED_GEMM_WGRAD.why_not(problem, BASE.replace(**change), H200))


def test_dense_products_keep_their_tiles() -> None:
    from cutekernels.ops.products.dense import GEMM
    from cutekernels.ops.products.schedules.problem import GemmProblem

    problem = GemmProblem.parse("m=4096 n=4096 k=4096")
    assert "takes tile_m from 64" in str(GEMM.why_not(problem, NARROW, H200))


GATE = LAYER.replace(n=768, activation="silu_mul")


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"tile_m": 256, "tile_n": 192, "stages": 3}, "or a gate it keeps 176"),
        ({"tile_n": 96, "stages": 6}, "half of them gates"),
        ({"swap_ab": True, "tile_m": 256, "tile_n": 128}, "meet in a thread"),
    ],
)
def test_a_gate_has_rules_of_its_own(change: dict[str, object], rule: str) -> None:
    assert GROUPED_GEMM.why_not(GATE, BASE, H200) is None
    assert rule in str(GROUPED_GEMM.why_not(GATE, BASE.replace(**change), H200))


@pytest.mark.parametrize("changes", [{"weight": "n"}, {"bias": "same"}, {"align": 4}])
def test_other_gates_are_a_chain(changes: dict[str, object]) -> None:
    problem = GATE.replace(**changes)
    config = GROUPED_GEMM.default(problem, H200)
    assert config.body == "multistage"
    assert any(c.body == "warpgroup" for c in GROUPED_GEMM.valid(GATE, H200))
    assert "warpgroup takes" in str(GROUPED_GEMM.why_not(problem, BASE, H200))
    assert GROUPED_GEMM.estimate_us(GATE, config, H200) > GROUPED_GEMM.estimate_us(
        GATE.replace(n=1536, activation="none"), config, H200
    )


@pytest.mark.parametrize("knobs", ["tile_m=32 tile_n=256 stages=4", "tile_m=128 tile_n=128 stages=6 pingpong=1"])
def test_swapped_gates_and_ups_meet_in_a_thread(knobs: str) -> None:
    """A box of gates and one of ups fill the stage that the MMA reads; row r and r + tile_n / 2 share a thread."""
    import cutlass
    import cutlass.cute as cute
    from cutlass.cute.nvgpu import OperandMajorMode
    from cutlass.utils import hopper_helpers

    config = GemmConfig.parse(f"{knobs} raster=8 swap_ab=1 {COMMON}")
    problem, extras = GROUPED_GEMM.one(GATE, most=True), GROUPED_GEMM.extras(GATE)
    body = GROUPED_WARPGROUP.body(problem, config, H200, extras)
    half, apart = config.tile_n // 2, body.results.gate_distance
    lies, held = [], []

    def collect() -> None:
        stages, _ = body.layouts(cutlass.BFloat16)
        halves = body.halves(body.of_rows)
        for row, k, stage in product((0, 1, 7, 8, half - 1, half, half + 9, 2 * half - 1), (0, 1, 63), range(3)):
            loaded = cute.crd2idx((row % half, k, 2 * stage + row // half), halves)
            lies.append((loaded, cute.crd2idx((row, k, stage), stages.outer)))
        k_major = OperandMajorMode.K
        mma = hopper_helpers.make_trivial_tiled_mma(
            cutlass.BFloat16, cutlass.BFloat16, k_major, k_major, cutlass.Float32, (body.sharing, 1, 1),
            (64, config.tile_m),
        )  # fmt: skip
        for thread in (0, 5, 37, 127):
            c = mma.get_slice(thread).partition_C(cute.make_identity_tensor(config.mma_tile))
            assert cute.size(c) == 2 * apart
            held.extend((c[i], c[i + apart]) for i in range(apart))

    compiled.run_static(collect)
    assert len(lies) == 72
    assert all(int(loaded) == int(read) for loaded, read in lies)
    assert held
    assert all((int(gate[0]) + half, int(gate[1])) == (int(up[0]), int(up[1])) for gate, up in held)


# ---- choice ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [1, 4, 16, 64, 256, 1024, 4096, 16384])
@pytest.mark.parametrize("layer", ["n=1536 k=2048 experts=128", "n=2048 k=768 experts=128", "n=28672 k=4096 experts=8"])
def test_it_is_the_default_where_it_can_be(layer: str, tokens: int) -> None:
    problem = Problem.parse(f"rows={8 * tokens} {layer}")
    for op in (GROUPED_GEMM, GROUPED_GEMM_WGRAD):
        assert op.default(problem, H200).body == "warpgroup"
        assert op.default(problem, A100).body == "multistage"


def test_the_tile_of_tokens_follows_the_rows_of_an_expert() -> None:
    def tokens(rows: int) -> int:
        c = GROUPED_GEMM.default(LAYER.replace(rows=rows), H200)
        return c.tile_m

    few, some, many = tokens(128), tokens(8192), tokens(131072)
    assert few == 16
    assert few < some < many


@pytest.mark.parametrize("experts", [1, 7, 128])
@pytest.mark.parametrize("unit", [16, 64, 256])
def test_expected_tiles_are_those_of_random_rows(experts: int, unit: int) -> None:
    rng = random.Random(experts * unit)
    for rows in (1, 40, 900, 20000):
        draws = 200 if rows < 1000 else 20
        total = 0
        for _ in range(draws):
            counts = [0] * experts
            for _ in range(rows):
                counts[rng.randrange(experts)] += 1
            total += sum(-(-count // unit) for count in counts)
        assert tile_rows(rows, experts, unit) == pytest.approx(total / draws, rel=0.1, abs=0.1)


# ---- kernels --------------------------------------------------------------------------------------------

COMPILED = {
    "three groups": (
        "rows=2048 n=1536 k=2048 experts=8 bias=same activation=silu",
        "tile_m=192 tile_n=160 stages=3 raster=1",
    ),
    "halves of 128 rows": (
        "rows=2048 n=1536 k=2048 experts=8 weight=n",
        "tile_m=256 tile_n=128 stages=4 raster=8 cluster_m=2",
    ),
    "most sums": ("rows=2048 n=1536 k=2048 experts=8", "tile_m=256 tile_n=192 stages=3 raster=8 cluster_n=2"),
    "swapped": (
        "rows=2048 n=1536 k=2048 experts=8 weight=n bias=fp32 activation=gelu dtype=fp16",
        "tile_m=112 tile_n=128 stages=6 raster=8 swap_ab=1",
    ),
    "fewest tokens": ("rows=8 n=1536 k=2048 experts=128", "tile_m=16 tile_n=128 stages=8 raster=1 swap_ab=1 pdl=1"),
    "gated, odd boxes": (
        "rows=64 n=768 k=2048 experts=128 activation=silu_mul dtype=fp16",
        "tile_m=64 tile_n=160 stages=6 raster=1 cluster_m=2",
    ),
    "gated, an odd number of swizzled lines": (
        "rows=2048 n=768 k=2048 experts=128 activation=silu_mul",
        "tile_m=128 tile_n=144 stages=5 raster=8",
    ),
    "gated, swapped, rows shared": (
        "rows=2048 n=768 k=2048 experts=128 activation=silu_mul",
        "tile_m=64 tile_n=256 stages=4 raster=8 swap_ab=1 cluster_m=2",
    ),
    "gated, swapped, in turns": (
        "rows=2048 n=768 k=2048 experts=128 activation=silu_mul",
        "tile_m=128 tile_n=128 stages=6 raster=8 swap_ab=1 pingpong=1",
    ),
    "few tokens in turns": (
        "rows=64 n=1536 k=2048 experts=128",
        "tile_m=32 tile_n=64 stages=8 raster=1 swap_ab=1 pingpong=1",
    ),
}


@pytest.mark.parametrize("name", COMPILED)
def test_compiles_as_it_says(name: str) -> None:
    words, knobs = COMPILED[name]
    problem, config = Problem.parse(words), GemmConfig.parse(f"{knobs} {COMMON}")
    assert GROUPED_GEMM.why_not(problem, config, H200) is None
    built = GROUPED_GEMM.build(problem, config, H200)
    found = assert_compiled(built, GROUPED_WARPGROUP, config, GROUPED_GEMM.extras(problem))
    assert found["WARPGROUP.ARRIVE"] == 1, "ptxas has put the products of a stage in a row"
    assert any(i.startswith("UTMALDG.3D") for i in found), "an expert is a coordinate"


DEEP = {
    "cooperative": "tile_m=128 tile_n=256 stages=4 raster=8 cluster_n=2 pdl=1",
    "pingpong": "tile_m=128 tile_n=192 stages=4 raster=8 pingpong=1 cluster_m=1",
    "swapped": "tile_m=128 tile_n=256 stages=4 raster=8 swap_ab=1 cluster_n=2",
}


@pytest.mark.parametrize("name", DEEP)
def test_a_gradient_of_weights_compiles_as_it_says(name: str) -> None:
    config = GemmConfig.parse(f"{DEEP[name]} {COMMON}")
    assert GROUPED_GEMM_WGRAD.why_not(LAYER, config, H200) is None
    built = GROUPED_GEMM_WGRAD.build(LAYER, config, H200)
    assert built.facts.stack_bytes == 0
    assert built.facts.smem_bytes == DEPTH_WARPGROUP.smem(config).total_bytes
    found = compiled.opcodes(built)
    rows, columns = config.mma_tile
    products = sum(count for i, count in found.items() if i.startswith(f"HGMMA.64x{columns}x16.F32"))
    steps = config.tile_k // 16 + 1  # a whole k-tile's, and one of the last, which is a loop
    assert products == rows // (64 * sharing(config)) * steps
    assert not any(i.startswith(("HMMA", "LDGSTS", "LDL", "STL")) for i in found)
    assert any(i.startswith("UTMASTG.3D") for i in found), "an expert is a coordinate"
    assert ("PREEXIT" in found) is config.pdl


def test_code_depends_on_no_extent() -> None:
    other = Problem.parse("rows=8192 n=4096 k=14336 experts=8")
    first, second = (compiled.program(GROUPED_GEMM.build, p, BASE, H200) for p in (LAYER, other))
    assert first == second
