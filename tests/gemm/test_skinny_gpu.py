"""The skinny schedule of ``gemm`` on a GPU: numerics for every token count, configs, ragged edges, split-K, PDL."""

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
from cutekernels.ops.products.schedules.skinny import SKINNY
from tests.compiled import having
from tests.gemm.test_gpu import assert_configs_right, launch
from tests.on_gpu import assert_no_workspace_is_shared, graph_of

pytestmark = pytest.mark.gpu
TOKENS = (1, 2, 3, 4, 7, 8, 9, 16, 17, 24, 31, 32, 33, 48, 64, 65, 96, 127, 128)


def skinny_configs(problem: GemmProblem, **values: Any) -> list[GemmConfig]:
    return having(GEMM.valid(problem, gpu.detect()), body="skinny", **values)


def posed(rng: random.Random, m: int, sources: tuple[str, ...] = ("none", "n")) -> GemmProblem:
    """A linear layer of ``m`` tokens with any epilogue, C among ``sources``."""
    n = rng.choice((1, 9, 64, 257, 1000, 1024, 3584))
    return GemmProblem(
        m=m,
        n=n,
        k=rng.choice((8, 72, 264, 512, 1000, 2048, 3592)),
        b_major="k",
        dtype=rng.choice(("bf16", "fp16")),
        c=rng.choice(sources),
        c_align=1,
        out_align=rng.choice([a for a in (8, 4, 2, 1) if n % a == 0]),
        bias=rng.choice(("none", "same", "fp32")),
        activation=rng.choice(tuple(ACTIVATIONS)),
    )


@pytest.mark.parametrize("m", TOKENS)
def test_random_problems_and_configs(m: int) -> None:
    rng = random.Random(m)
    for seed in range(2):
        problem = posed(rng, m)
        assert_configs_right(problem, *rng.sample(skinny_configs(problem), 2), seed=seed)


@pytest.mark.parametrize("m", [17, 24, 33, 47, 48, 65, 96, 97, 128])
def test_tiles_that_are_no_power_of_two(m: int) -> None:
    rng = random.Random(m)
    for seed, tile in enumerate(SKINNY.fitting_tiles(posed(rng, m))):
        problem = posed(rng, m)
        assert_configs_right(problem, *rng.sample(skinny_configs(problem, tile_m=tile), 3), seed=seed)


def assert_same_every_time(problem: GemmProblem, configs: list[GemmConfig]) -> None:
    """Which CTA is last differs from run to run; the order of the sum does not. Outliers make it matter."""
    a, b, *rest = GEMM.sample(problem, "cuda", 0)
    a[:, ::97] *= 1e4
    for config in configs:
        results = [launch(problem, (a, b, *rest), str(config)).clone() for _ in range(20)]
        assert all(torch.equal(results[0], r) for r in results[1:]), config


@pytest.mark.parametrize("split_k", [2, 4])
def test_split_k_is_the_same_every_time(split_k: int) -> None:
    problem = GemmProblem.parse("m=16 n=1024 k=4096 b_major=k")
    assert_same_every_time(problem, random.Random(split_k).sample(skinny_configs(problem, split_k=split_k), 3))


@pytest.mark.parametrize("split_k", [1, 4])
def test_graphs_and_streams_do_not_share_a_workspace(split_k: int) -> None:
    problem = GemmProblem.parse("m=8 n=512 k=4096 b_major=k")
    config = str(skinny_configs(problem, split_k=split_k)[0])
    xs = [torch.randn(8, 4096, device="cuda", dtype=torch.bfloat16) for _ in range(4)]
    w = torch.randn(512, 4096, device="cuda", dtype=torch.bfloat16)
    assert_no_workspace_is_shared(xs, lambda x, out=None: ck.gemm(x, w.t(), out=out, config=config))


def assert_dependents_wait(m: int, config: str) -> None:
    """A chain through activations and through a weight, in one stream and in one graph."""
    x0 = torch.randn(m, 2048, device="cuda", dtype=torch.bfloat16)
    ws = [torch.randn(2048, 2048, device="cuda", dtype=torch.bfloat16) / 45 for _ in range(4)]
    weight = torch.empty_like(ws[0])

    def chain(x: torch.Tensor, config: str) -> torch.Tensor:
        for w in ws * 3:
            torch.mul(w, 2.0, out=weight)
            ck.gemm(w[:m], w.t(), out=weight[:m], config=config)  # by a kernel that lets the next one start early
            x = ck.gemm(x, weight.t(), config=config)
            x = ck.gemm(x, w.t(), config=config) * 0.5
        return x

    want = chain(x0, config.partition(" pdl=1")[0])
    torch.cuda.synchronize()
    for _ in range(10):
        assert torch.equal(chain(x0, config), want)
    graph, out = graph_of(lambda: chain(x0, config))
    for _ in range(10):
        out.zero_()
        graph.replay()
        assert torch.equal(out, want)


def test_dependent_launches_see_what_came_before() -> None:
    if not gpu.detect().has_pdl:
        pytest.skip("no programmatic dependent launch here")
    problem = GemmProblem.parse("m=4 n=2048 k=2048 b_major=k")
    assert_dependents_wait(4, str(skinny_configs(problem, pdl=True, split_k=1)[-1]))
