"""``linear_silu_mul`` of many tokens in one kernel on a GPU that has warpgroup MMA."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch

import cutekernels as ck
from cutekernels import gpu
from cutekernels.ops.products.fused import CHAIN, LinearSiluMulProblem, NormLinearConfig
from cutekernels.ops.products.norm import LINEAR_SILU_MUL
from tests.compiled import having
from tests.norm_linear.test_gpu import error, launch, truth

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("warpgroups")]
ARRANGEMENTS: tuple[dict[str, Any], ...] = (
    {"pingpong": True},
    {"cluster_m": 2},
    {"cluster_n": 2},
    {"tile_m": 192},
    {"tile_m": 64, "pingpong": False},
    {"tile_m": 256},
)


def fused(p: LinearSiluMulProblem, **values: Any) -> list[NormLinearConfig]:
    return having(LINEAR_SILU_MUL.valid(p, gpu.detect()), path="fused", **values)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("m", [129, 200, 333, 1000])
def test_random_problems_and_configs(m: int, dtype: str) -> None:
    rng = random.Random(f"{m} {dtype}")
    for seed in range(2):
        n, k = rng.choice((136, 520, 1000, 1864, 3000)), rng.choice((8, 72, 264, 1000, 2048))
        p = LinearSiluMulProblem(m=m, n=n, k=k, dtype=dtype)
        args = LINEAR_SILU_MUL.sample(p, "cuda", seed)
        for config in rng.sample(fused(p), 2):
            found = error(LINEAR_SILU_MUL, p, args, launch(LINEAR_SILU_MUL, p, args, config))
            assert found <= 1, f"[{p}] [{config}]: {found:.3g} times the tolerance"


@pytest.mark.parametrize("arrangement", ARRANGEMENTS, ids=str)
def test_arrangements_over_many_tiles(arrangement: dict[str, Any]) -> None:
    """More tiles than CTAs, the last of them partial: barriers go round several times; the same bits every time."""
    rng = random.Random(str(arrangement))
    p = LinearSiluMulProblem(m=3000, n=2504, k=328)
    args = LINEAR_SILU_MUL.sample(p, "cuda", 0)
    for config in rng.sample(fused(p, **arrangement), 3):
        first = launch(LINEAR_SILU_MUL, p, args, config)
        assert error(LINEAR_SILU_MUL, p, args, first) <= 1, config
        assert all(torch.equal(first, launch(LINEAR_SILU_MUL, p, args, config)) for _ in range(5)), config


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_no_further_from_the_truth_than_the_chain(dtype: str) -> None:
    p = LinearSiluMulProblem(m=333, n=1024, k=1536, dtype=dtype)
    configs = random.Random(dtype).sample(fused(p), 3)
    ours, theirs = dict.fromkeys(configs, 0.0), 0.0
    for seed in range(4):
        args = LINEAR_SILU_MUL.sample(p, "cuda", seed)
        exact = truth(LINEAR_SILU_MUL, p, args)
        for config in configs:
            ours[config] += float((launch(LINEAR_SILU_MUL, p, args, config).double() - exact).square().mean())
        theirs += float((launch(LINEAR_SILU_MUL, p, args, CHAIN).double() - exact).square().mean())
    for config, found in ours.items():
        assert math.sqrt(found) <= 1.1 * math.sqrt(theirs), config


def test_each_gate_meets_its_own_up() -> None:
    """Rows of both halves scaled by numbers of their own, large ones among them; ups that are zero give zeros."""
    p = LinearSiluMulProblem(m=264, n=1000, k=256)
    x, w, _, eps = LINEAR_SILU_MUL.sample(p, "cuda", 0)
    w = (w * torch.logspace(-2, 1.5, 2000, device="cuda")[torch.randperm(2000, device="cuda")].unsqueeze(1)).bfloat16()
    w[1000:][torch.arange(1000, device="cuda") % 7 == 0] = 0
    want = LINEAR_SILU_MUL.evaluate(x, w, None, eps, norm=False)[0].double()
    for config in random.Random(0).sample(fused(p), 6):
        y = launch(LINEAR_SILU_MUL, p, (x, w, None, eps), config).double()
        assert (y[:, ::7] == 0).all(), config
        assert ((y - want).abs() <= 2.0**-7 * want.abs() + 1e-2).all(), config


def test_a_nan_stays_in_its_row_and_in_its_column() -> None:
    p = LinearSiluMulProblem(m=333, n=1000, k=520)
    x, w, _, eps = LINEAR_SILU_MUL.sample(p, "cuda", 0)
    bad_x, bad_w = x.clone(), w.clone()
    bad_x[200, 3] = float("nan")
    bad_w[1000 + 77, 3] = float("inf")
    for config in random.Random(1).sample(fused(p), 4):
        want = launch(LINEAR_SILU_MUL, p, (x, w, None, eps), config)
        y = launch(LINEAR_SILU_MUL, p, (bad_x, w, None, eps), config)
        rows = torch.arange(333, device="cuda") != 200
        assert y[200].isnan().all() and torch.equal(y[rows], want[rows]), config
        y = launch(LINEAR_SILU_MUL, p, (x, bad_w, None, eps), config)
        columns = torch.arange(1000, device="cuda") != 77
        assert not y[:, 77].isfinite().any() and torch.equal(y[:, columns], want[:, columns]), config


def test_the_public_function() -> None:
    """Leading dimensions, slices, out= with a pitch, a norm in front, rows that are not aligned, gradients."""
    joint = torch.randn(2, 150, 1100, device="cuda", dtype=torch.bfloat16)
    w = torch.randn(1200, 1024, device="cuda").bfloat16() / 32
    g = torch.rand(1024, device="cuda").bfloat16() + 0.5
    for x in (joint[..., :1024], joint[..., 64:1088], joint[..., 3:1027], joint.transpose(0, 1)[..., :1024]):
        for norm_weight in (None, g):
            want = LINEAR_SILU_MUL.evaluate(x, w, norm_weight, 1e-6, norm=norm_weight is not None)[0].double()
            y = ck.linear_silu_mul(x, w, norm_weight=norm_weight)
            assert y.shape == (*x.shape[:-1], 600)
            assert (y.double() - want).norm() <= 1e-2 * want.norm()
            place = torch.full((*x.shape[:-1], 640), 7.0, device="cuda", dtype=torch.bfloat16)
            ck.linear_silu_mul(x, w, norm_weight=norm_weight, out=place[..., :600])
            assert torch.equal(place[..., :600], y)
            assert (place[..., 600:] == 7).all()
    leaf = w.clone().requires_grad_()
    ck.linear_silu_mul(joint[..., :1024], leaf, norm_weight=g).sum().backward()
    assert leaf.grad is not None and leaf.grad.isfinite().all()


def test_dependent_launches_see_what_came_before() -> None:
    p = LinearSiluMulProblem(m=256, n=2048, k=2048)
    x0 = torch.randn(256, 2048, device="cuda", dtype=torch.bfloat16)
    ws = [torch.randn(4096, 2048, device="cuda", dtype=torch.bfloat16) / 30 for _ in range(4)]
    weight = torch.empty_like(ws[0])

    def chained(how: NormLinearConfig) -> torch.Tensor:
        x = x0
        for w in ws * 3:
            torch.mul(w, 2.0, out=weight)
            x = ck.linear_silu_mul(ck.linear_silu_mul(x, weight, config=how), w, config=how).tanh()
        return x

    for pingpong in (False, True):
        config = fused(p, pdl=True, pingpong=pingpong)[-1]
        want = chained(config.replace(pdl=False))
        torch.cuda.synchronize()
        assert all(torch.equal(chained(config), want) for _ in range(5))


def test_captured_in_a_graph() -> None:
    x = torch.randn(512, 1024, device="cuda", dtype=torch.bfloat16)
    w = torch.randn(2048, 1024, device="cuda", dtype=torch.bfloat16) / 32
    want = ck.linear_silu_mul(x, w)
    graph, out = torch.cuda.CUDAGraph(), torch.empty_like(want)
    with torch.cuda.graph(graph):
        ck.linear_silu_mul(x, w, out=out)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, want)


def test_a_planted_bug_is_caught() -> None:
    p = LinearSiluMulProblem(m=256, n=512, k=1024)
    x, w, _, eps = args = LINEAR_SILU_MUL.sample(p, "cuda", 0)
    assert error(LINEAR_SILU_MUL, p, args, launch(LINEAR_SILU_MUL, p, args, fused(p)[0])) <= 1
    for wrong in (w.roll(512, 0), torch.cat([w[:512], w[512:].roll(8, 0)])):
        y = LINEAR_SILU_MUL.evaluate(x, wrong, None, eps, norm=False)[0]
        assert error(LINEAR_SILU_MUL, p, args, y) > 1
