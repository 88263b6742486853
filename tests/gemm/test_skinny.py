"""The skinny schedule's tiles: rules, the default's choice, compiled code."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from cutekernels import gpu
from cutekernels.autotune.search import prune_reason
from cutekernels.autotune.space import MODEL_SEEDS
from cutekernels.op import ladder
from cutekernels.ops.products.dense import GEMM
from cutekernels.ops.products.schedules import skinny, skinny_warpgroup
from cutekernels.ops.products.schedules.multistage import MULTISTAGE
from cutekernels.ops.products.schedules.problem import GemmConfig, GemmProblem
from cutekernels.ops.products.schedules.schedule import PLAIN
from cutekernels.ops.products.schedules.skinny import SKINNY
from tests.compiled import area, having, pairs
from tests.gemm.test_compiled import built, kernel

H200 = gpu.lookup("h200")
NEW_TILES = (24, 48, 96, 128)


def decode(m: int, n: int = 18944, k: int = 3584) -> GemmProblem:
    return GemmProblem.parse(f"m={m} n={n} k={k} b_major=k")


@cache
def valid(p: GemmProblem, target: str) -> tuple[GemmConfig, ...]:
    return tuple(GEMM.valid(p, gpu.lookup(target)))


def candidates(p: GemmProblem, spec: gpu.GpuSpec, **values: Any) -> list[GemmConfig]:
    """Valid configs of the skinny schedule with ``values``."""
    return having(valid(p, spec.name), body="skinny", **values)


# ---- rules ----------------------------------------------------------------------------------------------


def test_a_bucket_and_its_problems_take_the_same_tiles() -> None:
    for m in range(1, 129):
        p = decode(m)
        fitting = set(SKINNY.fitting_tiles(p))
        assert fitting - {skinny.usual_tile(p)} <= set(SKINNY.fitting_tiles(decode(ladder(m)))), m
        assert any(tile >= min(m, 64) for tile in fitting)
    assert {m: SKINNY.fitting_tiles(decode(m)) for m in (1, 16, 17, 24, 33, 48, 64, 65, 96, 97, 128)} == {
        1: [8], 16: [16], 17: [24, 32], 24: [24, 32], 33: [48, 64], 48: [48, 64], 64: [64], 65: [48, 64, 96],
        96: [48, 64, 96], 97: [64, 128], 128: [64, 128],
    }  # fmt: skip


@pytest.mark.parametrize("spec", gpu.GPUS, ids=lambda g: g.name)
def test_the_default_chooses_among_the_usual(spec: gpu.GpuSpec) -> None:
    for m in (1, 8, 17, 24, 32, 48, 64, 96, 128):
        for n, k in ((3584, 3584), (18944, 3584), (520, 328)):
            problem = decode(m, n, k)
            default = GEMM.default(problem, spec)
            if spec.has_wgmma and m >= skinny_warpgroup.least_tokens(problem, spec):
                assert default.body == "skinny_warpgroup"
            else:
                assert default.body == "multistage" or skinny.usual(default)


@pytest.mark.parametrize("spec", [g for g in gpu.GPUS if not g.has_wgmma], ids=lambda g: g.name)
def test_without_warpgroups_the_models_choose_the_body(spec: gpu.GpuSpec) -> None:
    for m in (1, 16, 24, 48, 96, 128):
        for n, k in ((4096, 4096), (24576, 4096), (4096, 12288)):
            problem = decode(m, n, k)
            found = [body.best(problem, spec, PLAIN) for body in (SKINNY, MULTISTAGE)]
            assert (min(us for us, _ in found), GEMM.default(problem, spec)) in found


def test_neither_body_has_all_numbers_of_tokens() -> None:
    bodies = {m: GEMM.default(decode(m, 4096, 4096), gpu.lookup("a100")).body for m in (16, 24)}
    assert bodies == {16: "skinny", 24: "multistage"}
    assert GEMM.default(decode(128, 4096, 12288), gpu.lookup("h200-as-a100")).body == "skinny"


def test_registers_limit_the_blocks_of_an_sm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four splits need two waves of blocks with 160 registers a thread: 63 us to 50 (bench/sweeps/h200-as-a100)."""
    problem, spec = decode(128, 4096, 12288), gpu.lookup("h200-as-a100")
    tile = "tile_m=64 tile_n=128 tile_k=64 warps_m=1 warps_n=4 raster=1 ctas_per_sm=1 body=skinny warps_k=2"
    two, four = (GemmConfig.parse(f"{tile} {rest}") for rest in ("stages=6 split_k=2", "stages=3 split_k=4"))
    assert GEMM.estimate_us(problem, two, spec) < GEMM.estimate_us(problem, four, spec)
    monkeypatch.setattr(skinny, "registers_per_thread", lambda c, extras: 32)
    assert GEMM.estimate_us(problem, two, spec) > GEMM.estimate_us(problem, four, spec)


@pytest.mark.parametrize("tile", NEW_TILES)
def test_loaders_divide_every_tile(tile: int) -> None:
    for c in candidates(decode(tile), H200, tile_m=tile):
        for rows in (c.tile_n, c.tile_m):
            threads = skinny.loaders(rows, c)
            assert 0 < threads <= SKINNY.threads(c)
            assert threads % (c.tile_k // 8) == 0
            assert rows % (threads // (c.tile_k // 8)) == 0


@pytest.mark.parametrize("m", [48, 64, 96, 128])
@pytest.mark.parametrize("n", [3584, 18944])
def test_the_tuner_is_led_to_warpgroups(m: int, n: int) -> None:
    """By the model's seeds; what it then crowns, measurements say."""
    p = decode(m, n)
    by_model = sorted(valid(p, H200.name), key=lambda c: (GEMM.estimate_us(p, c, H200), str(c)))
    assert "skinny_warpgroup" in {c.body for c in by_model[:MODEL_SEEDS]}


@pytest.mark.parametrize("split_k", [1, 2])
def test_a_launch_that_shares_tiles_has_a_workspace(split_k: int) -> None:
    p = decode(16, 256, 8192)
    config = candidates(p, H200, split_k=split_k)[0]
    assert SKINNY.shares_tiles(config) == (split_k > 1)
    types = SKINNY.workspace_types(config)
    assert len(types) == (2 if split_k > 1 else 0), "partial sums and tickets"


# ---- compiled code --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("tile", "spec"), pairs(NEW_TILES), ids=lambda x: getattr(x, "target", x))
def test_compiles_as_predicted(tile: int, spec: gpu.GpuSpec) -> None:
    p = decode(tile)
    fitting = candidates(p, spec, tile_m=tile)
    if not fitting:
        assert spec.smem_per_block_bytes < H200.smem_per_block_bytes, "smem is what large tiles lack"
        return
    config = min(fitting, key=lambda c: (GEMM.estimate_us(p, c, spec), str(c)))
    facts = built(p, config, spec.name).facts
    assert facts.smem_bytes == SKINNY.smem(config).total_bytes, config
    assert prune_reason(facts, GEMM, spec) is None, config
    assert facts.stack_bytes <= 64, f"spills: {config}"
    assert -(-facts.registers // 8) * 8 * SKINNY.threads(config) * config.ctas_per_sm <= spec.REGISTERS_PER_SM


@pytest.mark.parametrize("tile", NEW_TILES[::2])
def test_a_tile_of_its_own_is_code_of_its_own(tile: int) -> None:
    p = decode(tile)
    config = min(candidates(p, H200, tile_m=tile), key=area)
    usual = config.replace(tile_m=skinny.usual_tile(p))
    assert kernel(p, config) != kernel(p, usual)
