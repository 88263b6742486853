"""GEMM on a GPU: numerics against fp64, for the default and random configs, over every layout and odd shape.

The bar is twice torch's own error (root mean square and maximum) on the same inputs, with half an ulp of the
output's type granted to the maximum of a result that torch happens to have exactly.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

import cutekernels as ck
from cutekernels import dispatch, gpu, verify
from cutekernels.errors import UnsupportedProblem
from cutekernels.kernels.activations import ACTIVATIONS, activated
from cutekernels.ops.products.dense import GEMM
from cutekernels.ops.products.schedules.problem import GemmProblem
from tests.gemm.cases import random_config, random_problem
from tests.seeds import seeds

pytestmark = pytest.mark.gpu


def launch(problem: GemmProblem, args: tuple[Any, ...], config: str | None = None) -> Tensor:
    plan = dispatch.plan(GEMM, problem, torch.cuda.current_device(), config)
    (out,) = GEMM.outputs(problem, *args)
    verify.poison([out])
    plan.launch(out, *args)
    return out


def torch_result(problem: GemmProblem, a: Tensor, b: Tensor, c: Any, bias: Any, alpha: float, beta: float) -> Tensor:
    """Torch's result in the same types: one matmul, then the epilogue in fp32, rounded once."""
    x = alpha * (a @ b).float() + (0.0 if c is None else beta * c.float()) + (0.0 if bias is None else bias.float())
    return activated(x, problem.activation).to(a.dtype)


def assert_right(actual: Tensor, problem: GemmProblem, args: tuple[Any, ...], label: str = "") -> None:
    (expected,) = GEMM.reference(problem, *args)
    ratio = verify.worst_error([actual], [expected], GEMM.work(problem).flops, problem.accumulate)
    assert ratio <= 1.0, f"[{problem}] {label}: error is {ratio:.2f} of the tolerance"
    if problem.accumulate == "fp32":
        truth = expected.double()
        ours = (actual.double() - truth).norm()
        theirs = (torch_result(problem, *args).double() - truth).norm()
        slack = truth.norm() * torch.finfo(actual.dtype).eps * 0.05
        assert ours <= 2 * theirs + slack, f"[{problem}] {label}: {ours:.3g} against torch's {theirs:.3g}"


def assert_launch_right(problem: GemmProblem, args: tuple[Any, ...], config: object = None) -> None:
    text = "" if config is None else str(config)
    assert_right(launch(problem, args, text or None), problem, args, text)


def assert_configs_right(problem: GemmProblem, *configs: object, seed: int = 0) -> None:
    args = GEMM.sample(problem, "cuda", seed)
    for config in configs:
        assert_launch_right(problem, args, config)


@pytest.mark.parametrize("text", GEMM.suite)
def test_suite_by_default(text: str) -> None:
    problem = GemmProblem.parse(text)
    assert_configs_right(problem, None)


@pytest.mark.parametrize("seed", seeds(160))
def test_random_problems_and_configs(seed: int) -> None:
    rng = random.Random(seed)
    problem = random_problem(rng)
    spec = gpu.detect()
    assert_configs_right(problem, None if seed % 4 == 0 else str(random_config(rng, problem, spec)), seed=seed)


def test_larger_random_configs() -> None:
    spec, rng = gpu.detect(), random.Random(7)
    for seed in range(8):
        problem = random_problem(rng, (512, 640, 1000, 1024, 1536))
        assert_configs_right(problem, str(random_config(rng, problem, spec)), seed=seed)


@pytest.mark.parametrize("seed", range(12))
def test_persistent_configs_over_many_tiles(seed: int) -> None:
    """Several tiles a CTA, of any layout and epilogue; the last wave is partial."""
    rng, spec = random.Random(seed), gpu.detect()
    problem = random_problem(rng, (1991, 2056, 2304)).replace(k=rng.choice((40, 200, 328)))
    persistent = [c for c in GEMM.valid(problem, spec) if c.persistent]
    assert_configs_right(problem, str(rng.choice(persistent)), seed=seed)


def test_a_planted_bug_fails() -> None:
    problem = GemmProblem.parse("m=256 n=256 k=512")
    a, b, c, bias, alpha, beta = GEMM.sample(problem, "cuda", 0)
    out = launch(problem, (a, b, c, bias, alpha, beta))
    broken = out.clone()
    broken[17, 33] += 0.05 * out.float().abs().mean().item()  # one element, off by a twentieth of the typical
    with pytest.raises(AssertionError):
        assert_right(broken, problem, (a, b, c, bias, alpha, beta))
    short = alpha * (a[:, :-1].double() @ b[:-1].double())  # one product of 512 left out everywhere
    with pytest.raises(AssertionError):
        assert_right(short.to(out.dtype), problem, (a, b, c, bias, alpha, beta))


# ---- the public functions -------------------------------------------------------------------------------


def randn(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.float32).to(dtype)


def close(actual: Tensor, expected: Tensor, ulps: float = 2.0) -> None:
    eps = torch.finfo(actual.dtype).eps
    error = (actual.double() - expected.double()).abs()
    bound = ulps * eps * (expected.double().abs() + expected.double().square().mean().sqrt())
    assert not torch.isnan(actual).any()
    assert (error <= bound).all(), f"worst {(error / bound).max().item():.2f} times the bound"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_layouts_views_and_slices(dtype: torch.dtype) -> None:
    x, w = randn(300, 260, dtype=dtype), randn(260, 420, dtype=dtype)
    expected = x.double() @ w.double()
    big = torch.full((310, 500), 7.0, device="cuda", dtype=dtype)
    wide = randn(300, 1000, dtype=dtype)
    for a in (x, x.t().contiguous().t()):
        for b in (w, w.t().contiguous().t()):
            close(ck.gemm(a, b), expected)
            out = big[5:305, 40:460]
            assert ck.gemm(a, b, out=out) is out
            close(out, expected)
            transposed = torch.empty(420, 300, device="cuda", dtype=dtype).t()
            close(ck.gemm(a, b, out=transposed), expected)
            strided = torch.empty(300, 840, device="cuda", dtype=dtype)[:, ::2]
            close(ck.gemm(a, b, out=strided), expected)
    assert (big[:5] == 7).all() and (big[305:] == 7).all() and (big[:, :40] == 7).all() and (big[:, 460:] == 7).all()
    close(ck.gemm(wide[:, 1:261], w), wide[:, 1:261].double() @ w.double())
    close(ck.gemm(wide[:, ::2][:, :260], w), wide[:, ::2][:, :260].double() @ w.double())
    close(ck.gemm(x[::3], w), x[::3].double() @ w.double())
    close(ck.gemm(x[:1].expand(40, 260), w), x[:1].expand(40, 260).double() @ w.double())
    close(ck.gemm(x.flip(0), w), x.flip(0).double() @ w.double())


def test_batches_and_broadcast() -> None:
    a, b = randn(6, 70, 96), randn(6, 96, 130)
    close(ck.gemm(a, b), a.double() @ b.double())
    close(ck.gemm(a.transpose(0, 1).contiguous().transpose(0, 1), b.mT.contiguous().mT), a.double() @ b.double())
    close(ck.gemm(a, b[0]), a.double() @ b[0].double())
    close(ck.gemm(a[0], b), a[0].double() @ b.double())
    many, one = randn(70000, 8, 16), randn(16, 8)  # more than a grid's y and z axes hold
    close(ck.gemm(many, one), many.double() @ one.double())


def test_epilogue_of_the_public_call() -> None:
    a, b, c, bias = randn(200, 136), randn(136, 264), randn(200, 264), randn(264)
    z = 1.5 * (a.double() @ b.double()) + 0.25 * c.double() + bias.double()
    close(ck.gemm(a, b, c, alpha=1.5, beta=0.25, bias=bias), z)
    close(ck.gemm(a, b, c, alpha=1.5, beta=0.25, bias=bias.float(), activation="relu"), z.relu())
    close(ck.gemm(a, b, c.t().contiguous().t(), alpha=1.5, beta=0.25, bias=bias), z)
    poisoned = torch.full_like(c, float("nan"))
    close(ck.gemm(a, b, poisoned, beta=0.0), a.double() @ b.double())
    inplace = c.clone()
    close(ck.gemm(a, b, inplace, alpha=1.5, beta=0.25, bias=bias, out=inplace), z)
    assert torch.isnan(ck.gemm(a, b, poisoned, beta=1.0, activation="relu")).all()


def test_empty_extents() -> None:
    assert ck.gemm(randn(0, 8), randn(8, 5)).shape == (0, 5)
    assert ck.gemm(randn(4, 8), randn(8, 0)).shape == (4, 0)
    assert ck.gemm(randn(0, 4, 8), randn(8, 5)).shape == (0, 4, 5)
    zero = ck.gemm(randn(4, 0), randn(0, 5))
    assert (zero == 0).all() and zero.shape == (4, 5)
    c, bias = randn(40, 24), randn(24)
    close(ck.gemm(randn(40, 0), randn(0, 24), c, beta=2.0, bias=bias), 2 * c.double() + bias.double())
    close(ck.linear(randn(3, 0), randn(24, 0), bias), bias.double().expand(3, 24))
    assert ck.linear(randn(2, 0, 16), randn(24, 16)).shape == (2, 0, 24)


def test_more_than_two_to_the_31_elements() -> None:
    tall = torch.randn(70001, 64, device="cuda", dtype=torch.bfloat16).repeat(1, 512)  # 2.29e9 elements
    b = randn(32768, 8)
    out = ck.gemm(tall, b)
    rows = torch.tensor([0, 1, 34567, 65535, 65536, 69999, 70000], device="cuda")
    close(out[rows], tall[rows].double() @ b.double(), 4.0)
    del tall
    x, w = randn(70001, 16), randn(16, 32768)
    out = ck.gemm(x, w)
    close(out[rows], x[rows].double() @ w.double())
    assert not torch.isnan(out).any()


@pytest.mark.parametrize("shape", [(700, 650, 777), (641, 1024, 643), (1000, 999, 1001), (642, 700, 1030)])
def test_large_unaligned_operands_go_through_aligned_copies(shape: tuple[int, int, int]) -> None:
    m, n, k = shape
    for a in (randn(m, k), randn(k, m).t(), randn(m, k + 3)[:, 1 : k + 1]):
        for b in (randn(k, n), randn(n, k).t()):
            expected = a.double() @ b.double()
            out = torch.full((m, n + 2), 7.0, device="cuda", dtype=torch.bfloat16)
            for _ in range(2):  # copies are not remembered: new data, new result
                close(ck.gemm(a, b), expected)
                close(ck.gemm(a, b, out=out[:, 1 : n + 1]), expected)
            assert (out[:, 0] == 7).all() and (out[:, -1] == 7).all()
    x = randn(3, m, k)
    close(ck.gemm(x, b), x.double() @ b.double())
    close(ck.gemm(x[0], b.expand(3, k, n)), x[:1].double() @ b.double().expand(3, k, n))


def test_a_warm_call_still_refuses() -> None:
    a, b, out = randn(64, 64), randn(64, 64), randn(64, 64)
    for _ in range(2):
        ck.gemm(a, b, out=out)
        ck.gemm(a, b)
    for bad in (
        lambda: ck.gemm(a, b[:32], out=out),
        lambda: ck.gemm(a, b.half(), out=out),
        lambda: ck.gemm(a, b.cpu(), out=out),
        lambda: ck.gemm(a, b, out=out.half()),
        lambda: ck.gemm(a, b, out=out.cpu()),
        lambda: ck.gemm(a, b.half()),
        lambda: ck.gemm(a, b.cpu()),
        lambda: ck.gemm(a.cpu(), b),
        lambda: ck.gemm(a, b, out=b),
    ):
        with pytest.raises(UnsupportedProblem):
            bad()
    close(ck.gemm(a, b, out=out), a.double() @ b.double())


def test_outliers_and_non_finite() -> None:
    a, b = randn(128, 256), randn(256, 128)
    a[:, 7] *= 1e4
    expected = a.double() @ b.double()
    assert (ck.gemm(a, b).double() - expected).norm() <= 2 * ((a @ b).double() - expected).norm() + 1e-9
    a[3, 3] = float("nan")
    a[5, 5] = float("inf")
    out, theirs = ck.gemm(a, b), a @ b
    assert torch.equal(torch.isnan(out), torch.isnan(theirs)) and torch.equal(torch.isinf(out), torch.isinf(theirs))


def test_refusals() -> None:
    a, b = randn(32, 32), randn(32, 32)
    for bad in (
        lambda: ck.gemm(a, b, out=a),
        lambda: ck.gemm(a, b, out=b),
        lambda: ck.gemm(a, b, out=torch.empty(32, 32, device="cuda")),
        lambda: ck.gemm(a, b, out=torch.empty(32, 1, device="cuda", dtype=a.dtype).expand(32, 32)),
        lambda: ck.gemm(a, b.half()),
        lambda: ck.gemm(a, randn(31, 32)),
        lambda: ck.gemm(a.float(), b.float()),
        lambda: ck.gemm(a, b, beta=1.0),
        lambda: ck.gemm(a, b, accumulate="fp16"),
        lambda: ck.gemm(a, b, activation="swish"),
        lambda: ck.gemm(a, b.cpu()),
        lambda: ck.gemm(a, b, bias=randn(31)),
    ):
        with pytest.raises(UnsupportedProblem):
            bad()
    buffer = randn(64, 64)
    with pytest.raises(UnsupportedProblem):
        ck.gemm(buffer[:32, :32], b, out=buffer[16:48, :32])
    close(ck.gemm(buffer[:32, :32], b, out=buffer[:32, 32:]), buffer[:32, :32].double() @ b.double())


@pytest.mark.parametrize("activation", [None, *ACTIVATIONS[1:]])
def test_gradients(activation: str | None) -> None:
    x, w, bias = randn(2, 50, 64), randn(96, 64), randn(96)
    leaves = [t.clone().requires_grad_() for t in (x, w, bias)]
    wide = [t.double().requires_grad_() for t in (x, w, bias)]
    grad = randn(2, 50, 96)
    ck.linear(*leaves, activation=activation).backward(grad)
    z = torch.nn.functional.linear(*wide)
    activated(z, activation or "none").backward(grad.double())
    for leaf, truth in zip(leaves, wide, strict=True):
        relative = (leaf.grad.double() - truth.grad).norm() / truth.grad.norm()
        assert relative < 1.2e-2, relative


@pytest.mark.filterwarnings("default::DeprecationWarning")  # Inductor's own
def test_cuda_graph_side_stream_and_compile() -> None:
    a, b, out = randn(256, 512), randn(512, 384), torch.empty(256, 384, device="cuda", dtype=torch.bfloat16)
    ck.gemm(a, b, out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ck.gemm(a, b, out=out)
        twice = ck.gemm(out, b.t(), alpha=0.1)
    a.copy_(randn(256, 512))
    out.zero_()
    graph.replay()
    torch.cuda.synchronize()
    close(out, a.double() @ b.double())
    close(twice, 0.1 * (out.double() @ b.t().double()))
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(10_000_000)
        late = a * 2
        result = ck.gemm(late, b)
    stream.synchronize()
    close(result, late.double() @ b.double())

    def block(x: Tensor, w: Tensor) -> Tensor:
        return ck.linear(x * 2, w, activation="silu") + 1

    compiled = torch.compile(block, fullgraph=True)
    w = randn(384, 512)
    close(compiled(a, w), block(a, w))
    x = a.clone().requires_grad_()
    compiled(x, w).sum().backward()
    y = a.clone().requires_grad_()
    block(y, w).sum().backward()
    close(x.grad, y.grad, 4.0)


def test_opcheck() -> None:
    a, b, c, bias = (t.requires_grad_() for t in (randn(32, 48), randn(48, 64), randn(32, 64), randn(64)))
    torch.library.opcheck(torch.ops.cutekernels.gemm.default, (a, b, c, bias, 1.5, 0.5, "silu", "fp32"))
    out = torch.empty(32, 64, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        torch.library.opcheck(
            torch.ops.cutekernels.gemm_out.default, (a.detach(), b.detach(), None, None, out, 1.0, 0.0)
        )


def test_threads() -> None:
    from concurrent.futures import ThreadPoolExecutor

    a, b = randn(320, 320), randn(320, 320)
    expected = a.double() @ b.double()

    def call(i: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            close(ck.gemm(a[: 160 + i], b), expected[: 160 + i])

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(call, range(16)))
