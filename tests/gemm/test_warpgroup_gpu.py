"""The warpgroup schedule of ``gemm`` on a GPU that has it: layouts, ragged ends, C in place, clusters, dependents."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

import cutekernels as ck
from cutekernels import gpu
from cutekernels.kernels.activations import ACTIVATIONS
from cutekernels.ops.products.dense import GEMM
from cutekernels.ops.products.schedules.problem import GemmConfig, GemmProblem
from cutekernels.ops.products.schedules.schedule import extras_of
from cutekernels.ops.products.schedules.warpgroup import WARPGROUP
from tests.compiled import having
from tests.gemm.test_gpu import assert_configs_right, assert_launch_right, assert_right, launch
from tests.gemm.test_skinny_gpu import assert_dependents_wait, assert_same_every_time

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("warpgroups")]
LAYOUTS = [(a, b, out) for a in ("k", "m") for b in ("k", "n") for out in ("n", "m")]


def warpgroup(problem: GemmProblem, **values: Any) -> list[GemmConfig]:
    return having(GEMM.valid(problem, gpu.detect()), body="warpgroup", **values)


def posed(rng: random.Random, layout: tuple[str, str, str], c: str = "none", **fixed: Any) -> GemmProblem:
    """Ragged extents, any epilogue, batched or not; some fields ``fixed``."""
    batch = rng.choice((1, 1, 3))
    m, n = (rng.choice((136, 200, 264, 520, 1000, 1304)) for _ in range(2))
    return GemmProblem(
        m=m,
        n=n,
        k=rng.choice((8, 72, 264, 512, 1000)),
        batch=batch,
        batched=batch > 1,
        a_major=layout[0],
        b_major=layout[1],
        out_major=layout[2],
        dtype=rng.choice(("bf16", "fp16")),
        c=c,
        bias=rng.choice(("none", "same", "fp32")),
        activation=rng.choice(tuple(ACTIVATIONS)),
    ).replace(**fixed)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("c", ["none", "out"])
def test_random_problems_and_configs(layout: tuple[str, str, str], c: str) -> None:
    rng = random.Random(f"{layout}{c}")
    problem = posed(rng, layout, layout[2] if c == "out" else c)
    assert_configs_right(problem, *rng.sample(warpgroup(problem), 4))


@pytest.mark.parametrize("c", ["none", "out"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_fp16_sums(layout: tuple[str, str, str], c: str) -> None:
    rng = random.Random(f"half {layout}{c}")
    problem = posed(rng, layout, layout[2] if c == "out" else c, dtype="fp16", accumulate="fp16")
    assert_configs_right(problem, *rng.sample(warpgroup(problem), 2))


def test_fp16_sums_of_large_tiles() -> None:
    """Tiles that only fp16 sums allow; the same bits every time, and a NaN stays in its row."""
    problem = GemmProblem.parse("m=1000 n=2304 k=520 b_major=k dtype=fp16 accumulate=fp16 bias=same")
    a, *others = GEMM.sample(problem, "cuda", 0)
    for shape in ({"tile_m": 256, "tile_n": 256}, {"tile_m": 128, "tile_n": 256, "pingpong": True}, {"tile_m": 192}):
        config = random.Random(0).choice(warpgroup(problem, **shape))
        first = launch(problem, (a, *others), str(config))
        assert_right(first, problem, (a, *others), str(config))
        assert all(torch.equal(first, launch(problem, (a, *others), str(config))) for _ in range(5))
        spoiled = a.clone()
        spoiled[333, 7] = float("nan")
        out = launch(problem, (spoiled, *others), str(config))
        assert out[333].isnan().all()
        rest = torch.arange(1000, device="cuda") != 333
        assert torch.equal(out[rest], first[rest])


@pytest.mark.parametrize("arrangement", [{"pingpong": True}, {"cluster_m": 2}, {"cluster_n": 2}, {"swap_ab": True}])
def test_arrangements_over_many_tiles(arrangement: dict[str, Any]) -> None:
    """More tiles than CTAs, the last of them partial: barriers go round several times."""
    rng = random.Random(str(arrangement))
    for seed, layout in enumerate(rng.sample(LAYOUTS, 3)):
        problem = GemmProblem(3000, 2504, 328, a_major=layout[0], b_major=layout[1], out_major=layout[2])
        assert_configs_right(problem, *rng.sample(warpgroup(problem, **arrangement), 2), seed=seed)


@pytest.mark.parametrize("out_major", ["n", "m"])
def test_columns_by_eights_and_a_single_box(out_major: str) -> None:
    """Widths that 16 does not divide, shared by a cluster in parts of four rows; results leave by one box or two."""
    rng = random.Random(out_major)
    problem = GemmProblem(520, 1304, 328, b_major="k", out_major=out_major, bias="fp32", activation="gelu")
    args = GEMM.sample(problem, "cuda", 0)
    found = [c for width in (72, 104, 168, 200) for c in rng.sample(warpgroup(problem, tile_n=width), 2)]
    single = [c for c in warpgroup(problem, pingpong=True) if WARPGROUP.smem(c, extras_of(problem)).boxes == 1]
    for config in [*found, *rng.sample(warpgroup(problem, tile_n=104, cluster_m=2), 1), *rng.sample(single, 2)]:
        assert_launch_right(problem, args, config)


@pytest.mark.parametrize("out_major", ["n", "m"])
def test_out_may_be_c(out_major: str) -> None:
    rng = random.Random(out_major)
    problem = GemmProblem(1000, 1304, 264, c=out_major, out_major=out_major)
    a, b, c, _, _, _ = GEMM.sample(problem, "cuda", 0)
    expected = (0.5 * (a.double() @ b.double()) + 2.0 * c.double()).to(c.dtype)
    for config in rng.sample(warpgroup(problem), 4):
        kept = c.clone(memory_format=torch.preserve_format)
        assert ck.gemm(a, b, kept, alpha=0.5, beta=2.0, out=kept, config=str(config)) is kept
        torch.testing.assert_close(kept, expected, rtol=2**-7, atol=0.05)


def test_the_default_in_every_layout() -> None:
    for a_major, b_major, out_major in LAYOUTS:
        problem = GemmProblem(1024, 1536, 2048, a_major=a_major, b_major=b_major, out_major=out_major)
        assert GEMM.default(problem, gpu.detect()).body == "warpgroup"
        args = GEMM.sample(problem, "cuda", 0)
        assert_right(launch(problem, args), problem, args, "default")


def test_views_keep_what_lies_around_them() -> None:
    wide = torch.randn(600, 4096, device="cuda", dtype=torch.bfloat16)
    x, w = wide[:520, 1024:2048], torch.randn(1024, 1304, device="cuda", dtype=torch.bfloat16)
    problem = GemmProblem(520, 1304, 1024)
    for config in random.Random(1).sample(warpgroup(problem), 4):
        out = torch.full((522, 2000), 7.0, device="cuda", dtype=torch.bfloat16)
        ck.gemm(x, w, out=out[1:521, 8:1312], config=str(config))
        expected = (x.double() @ w.double()).to(torch.bfloat16)
        torch.testing.assert_close(out[1:521, 8:1312], expected, rtol=2**-7, atol=0.1)
        assert (out[0] == 7).all() and (out[521:] == 7).all()
        assert (out[:, :8] == 7).all() and (out[:, 1312:] == 7).all()


def test_what_a_launch_before_left_in_shared_memory_does_not_matter() -> None:
    problem = GemmProblem.parse("m=136 n=264 k=72")
    args = GEMM.sample(problem, "cuda", 1)
    for config in random.Random(2).sample(warpgroup(problem), 4):
        bad = [torch.full((s, s), float("nan"), device="cuda", dtype=torch.bfloat16) for s in (1024, 1024)]
        ck.gemm(*bad, config=str(config))
        assert_launch_right(problem, args, config)


def test_the_same_bits_every_time() -> None:
    problem = GemmProblem.parse("m=1000 n=1304 k=2048 b_major=k")
    assert_same_every_time(problem, random.Random(0).sample(warpgroup(problem), 4))


def test_dependent_launches_see_what_came_before() -> None:
    problem = GemmProblem.parse("m=256 n=2048 k=2048 b_major=k")
    for config in (warpgroup(problem, pdl=True, pingpong=False)[0], warpgroup(problem, pdl=True, pingpong=True)[-1]):
        assert_dependents_wait(256, str(config))
