"""The fused kernel of ``rms_norm_linear`` and ``linear_silu_mul`` on a GPU.

Numbers are held to the ops one after the other: no further from fp64 than 1.25 times as far, over several draws, since
one rounding may be lucky. Shapes, edges, split-K and graphs are held to the tolerance the tuner applies.
"""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch
from torch import Tensor

import cutekernels as ck
from cutekernels import dispatch, gpu
from cutekernels.kernels.activations import ACTIVATIONS
from cutekernels.ops.products.fused import (
    CHAIN,
    LinearSiluMulProblem,
    NormLinearConfig,
    NormLinearProblem,
    RmsNormLinearProblem,
)
from cutekernels.ops.products.norm import LINEAR_SILU_MUL, RMS_NORM_LINEAR, NormLinear
from cutekernels.verify import poison, worst_error
from tests.compiled import having
from tests.on_gpu import assert_no_workspace_is_shared

pytestmark = pytest.mark.gpu
TOKENS = (1, 2, 3, 4, 7, 8, 9, 16, 17, 31, 32, 33, 64, 65, 100, 128)
OPS: tuple[NormLinear, ...] = (RMS_NORM_LINEAR, LINEAR_SILU_MUL)


def fused(op: NormLinear, p: NormLinearProblem, **values: Any) -> list[NormLinearConfig]:
    return having(op.valid(p, gpu.detect()), path="fused", **values)


def some(op: NormLinear, p: NormLinearProblem, rng: random.Random, count: int = 1) -> list[NormLinearConfig]:
    """``count`` configs of each body that takes ``p``."""
    by_body = [fused(op, p, body=body) for body in ("skinny", "skinny_warpgroup")]
    return [c for configs in by_body for c in rng.sample(configs, min(count, len(configs)))]


def launch(op: NormLinear, p: NormLinearProblem, args: tuple[Any, ...], config: NormLinearConfig) -> Tensor:
    outputs = op.outputs(p, *args)
    poison(outputs)
    dispatch.plan(op, p, torch.cuda.current_device(), config).launch(*outputs, *args)
    torch.cuda.synchronize()
    return outputs[0]


def error(op: NormLinear, p: NormLinearProblem, args: tuple[Any, ...], y: Tensor) -> float:
    work = op.work(p)
    return worst_error((y,), op.reference(p, *args), work.flops, depth=work.depth)


def truth(op: NormLinear, p: NormLinearProblem, args: tuple[Any, ...]) -> Tensor:
    """In fp64, not rounded."""
    wide = [t.double() if isinstance(t, Tensor) else t for t in args]
    return op.reference(p, *wide)[0]


def posed(op: NormLinear, rng: random.Random, m: int) -> NormLinearProblem:
    k, dtype = rng.choice((8, 72, 264, 512, 1000, 2048, 3592)), rng.choice(("bf16", "fp16"))
    weight = rng.choice(("same", "none", "fp32"))
    if op is LINEAR_SILU_MUL:
        norm = rng.random() < 0.7
        n = rng.choice((8, 24, 512, 1000, 1864))
        return LinearSiluMulProblem(m=m, n=n, k=k, dtype=dtype, norm=norm, norm_weight=weight if norm else "none")
    return RmsNormLinearProblem(
        m=m,
        n=rng.choice((1, 9, 64, 257, 1000, 1024, 3584)),
        k=k,
        dtype=dtype,
        norm_weight=weight,
        rstd=rng.choice(("computed", "computed", "given")),
        bias=rng.choice(("none", "same", "fp32")),
        activation=rng.choice(tuple(ACTIVATIONS)),
    )


@pytest.mark.parametrize("m", TOKENS)
@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_random_problems_and_configs(op: NormLinear, m: int) -> None:
    rng = random.Random(m)
    for seed in range(2):
        p = posed(op, rng, m)
        args = op.sample(p, "cuda", seed)
        for config in some(op, p, rng, 2):
            found = error(op, p, args, launch(op, p, args, config))
            assert found <= 1, f"{op.name} [{p}] [{config}]: {found:.3g} times the tolerance"


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("outliers", [False, True])
@pytest.mark.parametrize("eps", [1e-6, 1e-12])
@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_no_further_from_the_truth_than_the_chain(op: NormLinear, eps: float, outliers: bool, dtype: str) -> None:
    more = "" if op is RMS_NORM_LINEAR else "norm=1 norm_weight=same"
    for m in (1, 5, 16, 64, 128):
        p = op.Problem.parse(f"m={m} n=1024 k=1536 dtype={dtype} {more}")
        configs = some(op, p, random.Random(f"{m} {dtype}"), 2)
        ours: dict[str, float] = {}
        theirs = 0.0
        for seed in range(12 if m < 64 else 4):
            args = list(op.sample(p, "cuda", seed))
            if outliers:
                args[0][:, seed % 97 :: 97] *= 1e4 if dtype == "bf16" else 1e3
            args[-1] = eps
            exact = truth(op, p, tuple(args))
            for config in configs:
                found = float((launch(op, p, tuple(args), config).double() - exact).square().mean())
                ours[config.body] = ours.get(config.body, 0.0) + found / sum(c.body == config.body for c in configs)
            theirs += float((launch(op, p, tuple(args), CHAIN).double() - exact).square().mean())
        assert "skinny" in ours
        for body, found in ours.items():
            assert math.isfinite(found)
            assert math.sqrt(found) <= 1.25 * math.sqrt(theirs), f"m={m} {body}: {math.sqrt(found / theirs):.3f} times"


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_every_token_has_its_own_statistics(dtype: str) -> None:
    """Rows a thousand times apart, in every place of a tile; a weight that picks single elements."""
    kind = torch.bfloat16 if dtype == "bf16" else torch.float16
    for m in (8, 40, 64, 128):
        p = RmsNormLinearProblem(m=m, n=64, k=512, dtype=dtype)
        scale = torch.logspace(-2, 1, m, device="cuda")[torch.randperm(m, device="cuda")]
        x = (torch.randn(m, 512, device="cuda") * scale[:, None]).to(kind)
        gamma = torch.rand(512, device="cuda").to(kind) + 0.5
        args = x, gamma, torch.eye(64, 512, device="cuda", dtype=kind), None, None, 1e-9
        for config in some(RMS_NORM_LINEAR, p, random.Random(m), 4):
            y = launch(RMS_NORM_LINEAR, p, args, config)
            assert error(RMS_NORM_LINEAR, p, args, y) <= 1, config


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_large_and_small_weights_of_the_norm(dtype: str) -> None:
    """In fp16, outliers of 6e4 times a weight of 30 have no number; nothing here needs one."""
    p = RmsNormLinearProblem(m=16, n=512, k=1024, dtype=dtype)
    for low, high in ((1e-3, 1e-2), (10.0, 30.0)):
        x, gamma, w, *rest = RMS_NORM_LINEAR.sample(p, "cuda", 3)
        gamma = (low + (high - low) * torch.rand(1024, device="cuda")).to(x.dtype)
        x[:, ::101] = 6e4
        exact = truth(RMS_NORM_LINEAR, p, (x, gamma, w, *rest))
        theirs = (launch(RMS_NORM_LINEAR, p, (x, gamma, w, *rest), CHAIN).double() - exact).norm()
        for config in some(RMS_NORM_LINEAR, p, random.Random(0), 4):
            y = launch(RMS_NORM_LINEAR, p, (x, gamma, w, *rest), config)
            assert y.isfinite().all(), config
            # Few terms carry the sum here, so luck weighs more than over many.
            assert (y.double() - exact).norm() <= 2 * theirs, config


@pytest.mark.parametrize("split_k", [2, 4, 8])
@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_split_k_is_the_same_every_time(op: NormLinear, split_k: int) -> None:
    more = "" if op is RMS_NORM_LINEAR else " norm=1 norm_weight=same"
    p = op.Problem.parse(f"m=16 n=512 k=4096{more}")
    args = op.sample(p, "cuda", 0)
    args[0][:, ::97] *= 1e4
    rng = random.Random(split_k)
    by_body = [fused(op, p, split_k=split_k, body=body) for body in ("skinny", "skinny_warpgroup")]
    if not any(by_body):
        pytest.skip(f"{op.name} has no split_k={split_k} here")
    for config in [c for configs in by_body for c in rng.sample(configs, min(3, len(configs)))]:
        results = [launch(op, p, args, config) for _ in range(20)]
        assert all(torch.equal(results[0], r) for r in results[1:]), config


@pytest.mark.parametrize(
    ("m", "knobs"),
    [
        (8, {"body": "skinny", "split_k": 1}),
        (8, {"body": "skinny", "split_k": 4}),
        (8, {"body": "skinny_warpgroup", "split_k": 2}),
    ],
    ids=str,
)
def test_graphs_and_streams_do_not_share_a_workspace(m: int, knobs: dict[str, Any]) -> None:
    p = RmsNormLinearProblem(m=m, n=512, k=4096)
    found = fused(RMS_NORM_LINEAR, p, **knobs)
    if not found:
        pytest.skip(f"no {knobs} here")
    config = str(found[0])
    xs = [torch.randn(m, 4096, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
    g = torch.randn(4096, device="cuda", dtype=torch.bfloat16)
    w = torch.randn(512, 4096, device="cuda", dtype=torch.bfloat16)
    assert_no_workspace_is_shared(xs, lambda x, out=None: ck.rms_norm_linear(x, g, w, out=out, config=config))


@pytest.mark.parametrize("body", ["skinny", "skinny_warpgroup"])
def test_dependent_launches_see_what_came_before(body: str) -> None:
    p = RmsNormLinearProblem(m=4, n=2048, k=2048)
    found = fused(RMS_NORM_LINEAR, p, body=body, pdl=True, split_k=1)
    if not found:
        pytest.skip(f"no dependent launch of body={body} here")
    config = found[-1]  # skinny_warpgroup: one that prefetches
    x0 = torch.randn(4, 2048, device="cuda", dtype=torch.bfloat16)
    g = torch.randn(2048, device="cuda", dtype=torch.bfloat16)
    ws = [torch.randn(2048, 2048, device="cuda", dtype=torch.bfloat16) / 45 for _ in range(4)]
    weight, gamma = torch.empty_like(ws[0]), torch.empty_like(g)

    def chain(x: Any, how: NormLinearConfig) -> Any:
        for w in ws * 3:
            torch.mul(w, 2.0, out=weight)
            torch.mul(g, 0.5, out=gamma)
            x = ck.rms_norm_linear(x, gamma, weight, config=how)
            x = ck.rms_norm_linear(x, gamma, w, config=how)
        return x

    want = chain(x0, config.replace(pdl=False, prefetch_l2=0))
    torch.cuda.synchronize()
    for _ in range(10):
        assert torch.equal(chain(x0, config), want)


def test_any_tensors_through_the_public_functions() -> None:
    """Leading dimensions, slices of a joint projection, out= with a pitch, rows that are not aligned."""
    torch.manual_seed(3)
    joint = torch.randn(2, 5, 640, device="cuda", dtype=torch.bfloat16)
    g, w = torch.randn(512, device="cuda", dtype=torch.bfloat16), torch.randn(256, 512, device="cuda").bfloat16() / 20
    for x in (
        joint[..., :512],
        joint[..., 128:],
        joint[..., 3:515],
        joint[0, 0, :512],
        joint.transpose(0, 1)[..., :512],
    ):
        p = RmsNormLinearProblem(m=10, n=256, k=512)
        config = None if x.data_ptr() % 16 else str(fused(RMS_NORM_LINEAR, p.replace(m=max(1, x.numel() // 512)))[0])
        want = RMS_NORM_LINEAR.evaluate(x, g, w, None, None, 1e-6, activation="none")[0]
        y = ck.rms_norm_linear(x, g, w, config=config)
        assert isinstance(y, Tensor)
        assert y.shape == want.shape
        assert (y.double() - want.double()).norm() <= 1e-2 * want.double().norm()
        place = torch.full((*x.shape[:-1], 300), 7.0, device="cuda", dtype=torch.bfloat16)
        ck.rms_norm_linear(x, g, w, out=place[..., :256], config=config)
        assert torch.equal(place[..., :256], y)
        assert (place[..., 256:] == 7).all()
        gated = ck.linear_silu_mul(x, w, norm_weight=g, config=config)
        want = LINEAR_SILU_MUL.evaluate(x, w, g, 1e-6, norm=True)[0]
        assert (gated.double() - want.double()).norm() <= 1e-2 * want.double().norm()


def test_a_planted_bug_is_caught() -> None:
    """Bugs that each test above must see: a norm's weight forgotten, squares of a k-slice missed, tokens swapped."""
    p = RmsNormLinearProblem(m=16, n=512, k=1024)
    args = RMS_NORM_LINEAR.sample(p, "cuda", 0)
    x, gamma, w, bias, rstd, eps = args
    config = fused(RMS_NORM_LINEAR, p)[0]
    assert error(RMS_NORM_LINEAR, p, args, launch(RMS_NORM_LINEAR, p, args, config)) <= 1
    almost = gamma.clone()
    almost[512:528] = 1.0
    short = torch.rsqrt(x[:, :-128].double().square().sum(-1) / 1024 + eps)
    for wrong in (
        (x, None, w, bias, rstd, eps),
        (x, almost, w, bias, rstd, eps),
        (x, gamma, w, bias, short, eps),
        (x.flip(0), gamma, w, bias, rstd, eps),
    ):
        y = RMS_NORM_LINEAR.evaluate(*wrong, activation="none")[0]
        assert error(RMS_NORM_LINEAR, p, args, y) > 1
