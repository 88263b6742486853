"""The skinny_warpgroup schedule of ``gemm`` on a GPU that has it: numerics, ragged edges, clusters, dependents."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

import cutekernels as ck
from cutekernels import gpu
from cutekernels.ops.products.dense import GEMM
from cutekernels.ops.products.schedules.problem import GemmConfig, GemmProblem
from tests.compiled import having
from tests.gemm.test_gpu import assert_configs_right, assert_launch_right, assert_right, launch
from tests.gemm.test_skinny_gpu import assert_dependents_wait, assert_same_every_time, posed

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("warpgroups")]
TOKENS = (1, 2, 7, 8, 9, 16, 17, 31, 33, 48, 63, 64, 65, 96, 97, 128, 129, 200, 513)


def skinny_warpgroup(problem: GemmProblem, **values: Any) -> list[GemmConfig]:
    return having(GEMM.valid(problem, gpu.detect()), body="skinny_warpgroup", **values)


@pytest.mark.parametrize("m", TOKENS)
def test_random_problems_and_configs(m: int) -> None:
    rng = random.Random(m)
    for seed in range(2):
        problem = posed(rng, m, ("none", "n", "m"))
        assert_configs_right(problem, *rng.sample(skinny_warpgroup(problem), 2), seed=seed)


@pytest.mark.parametrize("tile_m", [8, 16, 32, 48, 64, 96, 128])
def test_nothing_beyond_the_tokens_reaches_the_result(tile_m: int) -> None:
    """The MMA multiplies 64 rows whatever lies in shared memory: NaN of a launch before, with more tokens, say."""
    rng = random.Random(tile_m)
    problem = GemmProblem.parse(f"m={tile_m} n=1000 k=1032 b_major=k")
    for config in rng.sample(skinny_warpgroup(problem, tile_m=tile_m), 3):
        x, w = (torch.full((rows, 1032), float("nan"), device="cuda", dtype=torch.bfloat16) for rows in (512, 1000))
        ck.gemm(x, w.t())
        args = GEMM.sample(problem, "cuda", 1)
        assert_launch_right(problem, args, config)


@pytest.mark.parametrize("split", [2, 4, 8])
def test_a_cluster_s_sum_is_the_same_every_time(split: int) -> None:
    problem = GemmProblem.parse(f"m=64 n={3584 // split} k=3584 b_major=k")
    assert_same_every_time(problem, random.Random(0).sample(skinny_warpgroup(problem, split_k=split), 4))


@pytest.mark.parametrize("split", [4, 8])
@pytest.mark.parametrize(
    "text",
    [
        "m=13 n=257 k=2056 out_align=1 bias=fp32 activation=gelu",
        "m=64 n=512 k=2048 c=n bias=same activation=silu",
        "m=100 n=1000 k=3592 dtype=fp16 bias=same",
        "m=333 n=1000 k=2168 c=n c_align=1",
        "m=513 n=514 k=1096 out_align=2 c=m c_align=1 bias=fp32 activation=relu",
        "m=300 n=768 k=4096",
    ],
)
def test_many_ctas_to_a_tile(split: int, text: str) -> None:
    """Ragged extents and every epilogue; the narrowest, the widest and the tallest tile, of which CTAs of a cluster may
    have no columns, and any others.
    """
    problem = GemmProblem.parse(f"{text} b_major=k")
    found = skinny_warpgroup(problem, split_k=split)
    shapes = [min(found, key=lambda c: c.tile_n), max(found, key=lambda c: (c.tile_n, c.stages))]
    shapes += [max(found, key=lambda c: (c.tile_m, c.tile_k)), *random.Random(split).sample(found, 2)]
    assert_configs_right(problem, *dict.fromkeys(shapes), seed=split)


def test_default_of_many_sizes() -> None:
    rng = random.Random(3)
    for m in (40, 64, 100, 128, 300, 1024, 2048):
        n, k = rng.choice((768, 3584, 4096, 11008)), rng.choice((896, 4096))
        problem = GemmProblem(m, n, k, b_major="k", dtype=rng.choice(("bf16", "fp16")))
        assert GEMM.default(problem, gpu.detect()).body in ("skinny_warpgroup", "warpgroup")
        args = GEMM.sample(problem, "cuda", m)
        assert_right(launch(problem, args), problem, args, "default")


def test_strides() -> None:
    """Rows of a wider matrix, one row repeated, one row of a transposed matrix, an out that is a slice."""
    wide = torch.randn(70, 4096, device="cuda", dtype=torch.bfloat16)
    w = torch.randn(1024, 2048, device="cuda", dtype=torch.bfloat16)
    config = str(random.Random(5).choice(skinny_warpgroup(GemmProblem.parse("m=64 n=1024 k=2048 b_major=k"))))
    for x in (wide[:64, 1024:3072], wide[1:2, :2048].expand(64, 2048), wide[::2, :2048][:33]):
        out = torch.zeros(64, 2048, device="cuda", dtype=torch.bfloat16)
        ck.gemm(x, w.t(), out=out[: x.shape[0], 512:1536], config=config if x.shape[0] == 64 else None)
        expected = (x.double() @ w.t().double()).to(torch.bfloat16)
        torch.testing.assert_close(out[: x.shape[0], 512:1536], expected, rtol=2**-7, atol=0.05)
        assert not out[:, :512].any() and not out[:, 1536:].any()
    one = wide[:, :1].t()[:, :64]  # (1, 64), whose rows would be 1 apart
    narrow = torch.randn(40, 64, device="cuda", dtype=torch.bfloat16)
    torch.testing.assert_close(ck.gemm(one, narrow.t()), one @ narrow.t(), rtol=2**-6, atol=0.05)


def test_weights_without_rows_apart() -> None:
    """A weight of one row repeated: all columns of the result are the same."""
    x = torch.randn(64, 512, device="cuda", dtype=torch.bfloat16)
    w = torch.randn(1, 512, device="cuda", dtype=torch.bfloat16).expand(256, 512)
    torch.testing.assert_close(ck.gemm(x, w.t()), x @ w.t(), rtol=2**-6, atol=0.05)


@pytest.mark.parametrize("split", [1, 4])
def test_dependent_launches_see_what_came_before(split: int) -> None:
    problem = GemmProblem.parse("m=64 n=2048 k=2048 b_major=k")
    assert_dependents_wait(64, str(skinny_warpgroup(problem, pdl=True, split_k=split)[-1]))
