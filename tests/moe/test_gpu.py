"""Routing on a GPU: numerics against fp64, awkward memory, streams, graphs, tracing, gradients."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

import cutekernels
from cutekernels import verify
from cutekernels.errors import InvalidConfig, UnsupportedProblem
from cutekernels.ops.moe.permute import MOE_PERMUTE
from cutekernels.ops.moe.route import MOE_ROUTE, MOE_ROUTE_BACKWARD
from cutekernels.ops.moe.rows import MOE_COMBINE, MOE_COMBINE_BACKWARD, MOE_DISPATCH, MOE_GATHER
from tests.moe.cases import DTYPES, OPS, ratio, truth, worst
from tests.on_gpu import computed, drawn, graph_of, needs_memory, normal, traced

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("one_seed")]

moe_route, moe_permute = cutekernels.moe_route, cutekernels.moe_permute
moe_gather, moe_combine = cutekernels.moe_gather, cutekernels.moe_combine

AWKWARD = [
    (MOE_ROUTE, "tokens=1 experts=1 top_k=1 align=2"),
    (MOE_ROUTE, "tokens=7 experts=7 top_k=7 dtype=fp32 align=4"),
    (MOE_ROUTE, "tokens=1000 experts=33 top_k=32 dtype=fp16 renormalize=0 align=2"),
    (MOE_ROUTE, "tokens=77 experts=512 top_k=32"),
    (MOE_ROUTE, "tokens=77 experts=500 top_k=17 dtype=fp32 layout=strided"),
    (MOE_ROUTE_BACKWARD, "tokens=1000 experts=33 top_k=32 dtype=fp16 renormalize=0 align=2"),
    (MOE_ROUTE_BACKWARD, "tokens=77 experts=512 top_k=10 dtype=fp32"),
    (MOE_PERMUTE, "pairs=1 experts=1"),
    (MOE_PERMUTE, "pairs=1025 experts=1023 index=i64"),
    (MOE_PERMUTE, "pairs=70001 experts=31"),
    (MOE_GATHER, "tokens=3 cols=1 top_k=1 align=2"),
    (MOE_GATHER, "tokens=31 cols=8191 top_k=5 dtype=fp32 align=4"),
    (MOE_DISPATCH, "tokens=1 cols=1 experts=1 top_k=1 align=2"),
    (MOE_DISPATCH, "tokens=8 cols=8191 experts=1023 top_k=32 dtype=fp32 index=i64 align=4"),
    (MOE_COMBINE, "tokens=3 cols=1 top_k=32 weighted=1 align=2"),
    (MOE_COMBINE, "tokens=31 cols=65536 top_k=3 dtype=fp16 weighted=1"),
    (MOE_COMBINE_BACKWARD, "tokens=31 cols=8191 top_k=5 dtype=fp32 weighted=1 align=4"),
]
_JUDGED_BYTES = 1 << 28  # what fp64 copies of a whole problem may come from


def inverse_of(tokens: int, top_k: int) -> Tensor:
    return torch.randperm(tokens * top_k, device="cuda").int().view(tokens, top_k)


# ---- kernels --------------------------------------------------------------------------------------------

SUITES = [(op, text) for op in OPS.values() for text in op.suite] + AWKWARD


@pytest.mark.parametrize(("op", "text"), SUITES, ids=str)
def test_every_suite_with_default_and_random_configs(op: Any, text: str) -> None:
    problem = op.Problem.parse(text)
    inputs = op.sample(problem, "cuda", 11)
    options = {name: getattr(problem, name) for name in op.options}
    results = op.outputs(problem, *inputs)
    assert op.problem(*results, *inputs, **options) == problem
    small = sum(t.numel() * t.element_size() for t in (*results, *inputs) if t is not None) < _JUDGED_BYTES
    exact = truth(op.name, inputs, **options) if small else []
    expected = [] if small else op.reference(problem, *inputs)
    for config in drawn(op, problem, 5, text):
        results = computed(op, problem, config, inputs)
        if small:
            found = max(ratio(r, *t) for r, t in zip(results, exact, strict=True))
        else:
            work = op.work(problem)
            found = verify.worst_error(results, expected, work.flops, depth=work.depth)
        assert found <= 1, f"{op.name} [{problem}] [{config}] is off by {found:.3g} tolerances"


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
@pytest.mark.parametrize("method", ["rounds", "sort"])
def test_special_values(dtype: torch.dtype, method: str) -> None:
    inf, nan = float("inf"), float("nan")
    rows = [[-inf] * 4, [nan] * 4, [inf, -inf, nan, 1.0], [0.0, -0.0, 0.0, 1.0], [inf, 1.0, inf, 0.0]]
    logits = torch.tensor(rows, device="cuda").to(dtype)
    weights, ids = moe_route(logits, 3, config=f"tokens=4 warps=1 method={method}")
    assert ids.tolist() == [[0, 1, 2], [0, 1, 2], [2, 0, 3], [3, 0, 1], [0, 2, 1]]
    expected = torch.softmax(logits.float(), -1).gather(-1, ids.long())
    assert torch.equal(weights.isnan(), expected.isnan())


def test_as_exact_as_torch() -> None:
    """The largest error is at most twice that of torch."""
    logits = normal(4096, 128, dtype=torch.float32) * 4
    exact, _ = torch.softmax(logits.double(), -1).topk(8)
    ours, _ = moe_route(logits, 8, renormalize=False)
    torchs, _ = torch.softmax(logits, -1).topk(8)
    worst_ours, worst_torchs = (((t.double() - exact).abs() / exact).max() for t in (ours, torchs))
    assert worst_ours <= 2 * worst_torchs


def test_the_whole_dance() -> None:
    tokens, hidden, experts, top_k = 300, 256, 16, 4
    x, w = normal(tokens, hidden), normal(experts, hidden, hidden) / 16
    weights, ids = moe_route(normal(tokens, experts), top_k)
    order, offsets, inverse = moe_permute(ids, experts)
    rows = moe_gather(x, inverse)
    assert torch.equal(rows, x[order.long() // top_k])
    edges = offsets.tolist()
    y = torch.cat([rows[a:b] @ w[e] for e, (a, b) in enumerate(pairwise(edges))])
    out = moe_combine(y, inverse, weights)
    each = y.double()[inverse.long()] * weights.double().unsqueeze(-1)
    assert ratio(out, each.sum(1), each.abs().sum(1)) <= 1


@pytest.mark.parametrize("tokens", [0, 1, 3, 16, 32])
@pytest.mark.parametrize(("experts", "top_k"), [(8, 2), (60, 4), (128, 8), (7, 7)])
def test_few_pairs_are_grouped_as_by_two_ops(tokens: int, experts: int, top_k: int) -> None:
    """Strides, and ids that name no expert: every row and place bit for bit."""
    wide = normal(tokens, 2 * 320)
    ids = torch.randint(-2, experts + 2, (tokens, top_k), device="cuda")
    for x in (wide[:, :320], wide[:, ::2]):
        for given in (ids.int(), torch.where(ids < 0, 1 << 40, ids), ids.t().clone().t()):
            rows, offsets, inverse = torch.ops.cutekernels.moe_dispatch(x, given, experts)
            _, *expected = moe_permute(given, experts)
            assert torch.equal(offsets, expected[0])
            assert torch.equal(inverse, expected[1])
            assert torch.equal(rows, moe_gather(x, inverse))


# ---- memory ---------------------------------------------------------------------------------------------


def test_any_strides() -> None:
    square = normal(128, 128, dtype=torch.float32)
    for logits in (
        square.t(),
        square[::2, 1::3],
        square[:1].expand(128, 128),
        normal(6, 5, 40).transpose(0, 1),
        normal(5, 1, 40).expand(5, 6, 40),
        normal(64, 200)[:, 3:131],
        normal(7),
    ):
        weights, ids = moe_route(logits, 5)
        assert weights.shape == ids.shape == (*logits.shape[:-1], 5)
        assert worst("moe_route", (weights, ids), (logits,), top_k=5, renormalize=True) <= 1
    inverse = inverse_of(30, 2)
    for x in (normal(64, 30).t(), normal(30, 200)[:, 3:67], normal(1, 64).expand(30, 64)):
        assert worst("moe_gather", (moe_gather(x, inverse),), (x, inverse)) <= 1
    lying = inverse_of(2, 30).view(2, 30).t()
    for rows in (normal(64, 60).t(), normal(60, 200)[:, 3:67]):
        weights = torch.rand(2, 30, device="cuda").t()
        assert worst("moe_combine", (moe_combine(rows, lying, weights),), (rows, lying, weights)) <= 1
    ids = torch.randint(0, 9, (64, 50), device="cuda").t()
    assert worst("moe_permute", moe_permute(ids, 9), (ids,), experts=9) == 0


@pytest.mark.parametrize("tokens", [0, 3])
def test_empty(tokens: int) -> None:
    weights, ids = moe_route(normal(0, 8), 2)
    order, offsets, inverse = moe_permute(ids, 8)
    assert offsets.tolist() == [0] * 9
    assert order.numel() == 0
    assert moe_combine(normal(0, 6), inverse, weights).shape == (0, 6)
    width = torch.zeros(tokens, 2, device="cuda", dtype=torch.int32)
    assert moe_gather(normal(tokens, 0), width).shape == (2 * tokens, 0)


def test_places_outside_are_left_alone() -> None:
    """A damaged ``inverse`` reads and writes nothing it should not: such rows count as zero."""
    x, inverse = normal(4, 64), inverse_of(4, 2)
    inverse[1, 1] = 8
    inverse[2, 0] = -1
    moe_gather(x, inverse)
    rows = normal(8, 64)
    out = moe_combine(rows, inverse)
    kept = rows[inverse.clamp(0, 7).long()].float() * ((inverse >= 0) & (inverse < 8)).unsqueeze(-1)
    torch.testing.assert_close(out, kept.sum(1).to(out.dtype))
    torch.cuda.synchronize()


@pytest.mark.slow
def test_more_than_two_billion_elements() -> None:
    needs_memory(40)
    logits = normal(4_500_000, 512)
    weights, ids = moe_route(logits, 2)
    part = slice(-300, None)
    assert worst("moe_route", (weights[part], ids[part]), (logits[part],), top_k=2, renormalize=True) <= 1
    far = logits.view(-1)[: (1 << 31) + 2048].as_strided((3, 512), (1 << 30, 1))
    assert worst("moe_route", moe_route(far, 4), (far,), top_k=4, renormalize=True) <= 1
    del weights, ids, far
    x = logits.view(-1)[: 70_000 * 32_768].view(70_000, 32_768)
    inverse = torch.arange(70_000, device="cuda", dtype=torch.int32).flip(0).view(-1, 1)
    rows = moe_gather(x, inverse)
    assert torch.equal(rows[:300], x[-300:].flip(0))
    assert torch.equal(rows[-300:], x[:300].flip(0))
    out = moe_combine(rows, inverse)
    assert torch.equal(out[-300:], x[-300:])


# ---- launches -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [5, 4096])
def test_captured_in_a_graph(tokens: int) -> None:
    """One graph of all ops, with moe_dispatch or two launches in moe_permute, is replayed on other logits."""
    logits, x = normal(tokens, 64), normal(tokens, 256)

    def dance() -> tuple[Tensor, ...]:
        weights, ids = moe_route(logits, 4)
        order, offsets, inverse = moe_permute(ids, 64)
        rows = moe_gather(x, inverse)
        if tokens == 5:
            rows, offsets, inverse = torch.ops.cutekernels.moe_dispatch(x, ids, 64)
        return weights, ids, order, offsets, inverse, moe_combine(rows, inverse, weights)

    dance()
    graph, (weights, ids, order, offsets, inverse, out) = graph_of(dance)
    logits.normal_()
    graph.replay()
    assert worst("moe_route", (weights, ids), (logits,), top_k=4, renormalize=True) <= 1
    assert worst("moe_permute", (order, offsets, inverse), (ids,), experts=64) == 0
    torch.testing.assert_close(out, x, rtol=2.0**-7, atol=1e-3)


def test_same_bits_every_time() -> None:
    logits, rows, inverse = normal(4096, 128), normal(8192, 512), inverse_of(4096, 2)
    weights = torch.rand(4096, 2, device="cuda").requires_grad_()
    first: list[Tensor] = []
    for _ in range(3):
        found = [*moe_route(logits, 8), *moe_permute(moe_route(logits, 8)[1], 128)]
        out = moe_combine(rows.requires_grad_(), inverse, weights)
        found += [out.detach(), *torch.autograd.grad(out.float().square().sum(), (rows, weights))]
        first = first or found
        assert all(torch.equal(a, b) for a, b in zip(first, found, strict=True))


def test_refusals() -> None:
    with pytest.raises(UnsupportedProblem, match=r"got torch.float64"):
        moe_route(normal(4, 8).double(), 2)
    with pytest.raises(UnsupportedProblem, match="is on cpu, not cuda"):
        moe_combine(normal(8, 6), inverse_of(4, 2), torch.rand(4, 2))
    with pytest.raises(InvalidConfig, match="idles most of a tile"):
        moe_route(normal(2, 8), 2, config="tokens=32 warps=1 method=sort")


# ---- gradients and tracing ------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize("kind", ["dense", "strided", "expanded gradient"])
def test_gradients_of_routing(dtype: torch.dtype, renormalize: bool, kind: str) -> None:
    logits = normal(5, 130, 60, dtype=dtype)
    logits = (logits.transpose(0, 1) if kind == "strided" else logits).detach().requires_grad_()
    weights, ids = moe_route(logits, 4, renormalize=renormalize)
    dweights = (
        torch.randn_like(weights[..., :1]).expand_as(weights) if "expanded" in kind else torch.randn_like(weights)
    )
    weights.backward(dweights)
    assert logits.grad is not None
    inputs = (dweights, weights.detach(), ids, logits.detach())
    assert worst("moe_route_backward", (logits.grad,), inputs, top_k=4, renormalize=renormalize) <= 1


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
@pytest.mark.parametrize("kind", ["dense", "transposed", "expanded gradient"])
def test_gradients_of_moving(dtype: torch.dtype, kind: str) -> None:
    inverse = inverse_of(50, 3)
    x, rows = normal(50, 136, dtype=dtype), normal(150, 136, dtype=dtype)
    if kind == "transposed":
        x, rows = x.t().contiguous().t(), rows.t().contiguous().t()
    x, rows = x.detach().requires_grad_(), rows.detach().requires_grad_()
    weights = torch.rand(50, 3, device="cuda").requires_grad_()
    for out, leaves in ((moe_gather(x, inverse), (x,)), (moe_combine(rows, inverse, weights), (rows, weights))):
        dout = torch.ones_like(out[:1, :1]).expand_as(out) if "expanded" in kind else torch.randn_like(out)
        grads = torch.autograd.grad(out, leaves, dout)
        name = "moe_combine" if len(leaves) == 1 else "moe_combine_backward"
        inputs = (dout, inverse, None) if len(leaves) == 1 else (dout, rows.detach(), inverse, weights.detach())
        assert worst(name, grads, inputs) <= 1


@traced
def test_compiled_whole() -> None:
    @torch.compile(fullgraph=True)
    def mixture(x: Tensor, logits: Tensor) -> Tensor:
        weights, ids = moe_route(logits, 2)
        _, _, inverse = moe_permute(ids, 8)
        return moe_combine(moe_gather(x, inverse) * 2, inverse, weights)

    x, logits = normal(64, 128).requires_grad_(), normal(64, 8).requires_grad_()
    out = mixture(x, logits)
    torch.testing.assert_close(out, 2 * x, rtol=2.0**-7, atol=1e-3)
    out.sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, torch.full_like(x, 2.0), rtol=2.0**-7, atol=1e-3)
