"""Routing without a GPU: kernels under Triton's interpreter, the declarations, the CPU path, gradients, tracing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

import cutekernels
from cutekernels.errors import UnsupportedProblem
from cutekernels.ops.moe.permute import MoePermuteProblem
from cutekernels.ops.moe.route import MoeRouteProblem
from cutekernels.ops.moe.rows import MoeDispatchProblem, MoeMoveProblem
from tests.interpreted import kernel_tests, of_each_dtype
from tests.moe import cases as routing_cases
from tests.moe.cases import CASES, H200, OPS, PLANTED
from tests.refusals import Calls, refused

moe_route, moe_permute = cutekernels.moe_route, cutekernels.moe_permute
moe_gather, moe_combine = cutekernels.moe_gather, cutekernels.moe_combine


# ---- kernels, interpreted -------------------------------------------------------------------------------


interpreted, test_kernel_numerics, test_a_planted_bug_is_caught = kernel_tests(routing_cases.__file__, CASES, PLANTED)


def test_every_layout_was_among_the_cases(interpreted: dict[str, dict[str, Any]]) -> None:
    problems = [OPS[CASES[c]["op"]].Problem.parse(interpreted[c]["problem"]) for c in CASES]
    laid = [p for p in problems if not isinstance(p, MoePermuteProblem)]
    assert {p.layout for p in laid} == {"rows", "strided"}
    assert {p.align for p in laid if p.layout == "rows"} == {2, 4, 8, 16}


# ---- the declarations -----------------------------------------------------------------------------------


def aligned(problem: Callable[..., Any], **fields: Any) -> Any:
    """A problem with the best alignment that its rows allow."""
    size = 4 if fields["dtype"] == "fp32" else 2
    bits = 16 | fields.get("cols", fields.get("experts")) * size
    return problem(**fields, align=bits & -bits)


@pytest.mark.parametrize("op", OPS.values(), ids=OPS.keys())
def test_spaces_are_small(op: Any) -> None:
    for text in op.suite:
        assert 2 <= len(list(op.valid(op.Problem.parse(text), H200))) <= 60, text


@pytest.mark.parametrize(
    ("kind", "text", "rule"),
    [
        (MoeRouteProblem, "tokens=4 experts=513 align=2", "1 to 512 experts; it has 513"),
        (MoeRouteProblem, "tokens=4 experts=4 align=8", "top_k is from 1 to 4 for 4 experts; it is 8"),
        (MoeRouteProblem, "tokens=4 experts=100", "rows of 200 bytes are not aligned to 16"),
        (MoeRouteProblem, "tokens=4 experts=128 layout=strided align=2", "leave it at 16"),
        (MoePermuteProblem, "pairs=4 experts=1024", "1 to 1023 experts"),
        (MoeDispatchProblem, "tokens=4 cols=8 experts=1024", "1 to 1023 experts"),
        (MoeDispatchProblem, "tokens=33 cols=8 experts=64", "up to 256 pairs .* got 33 times 8"),
        (MoeMoveProblem, "tokens=1 cols=8 dtype=fp32 align=2", "one element of fp32, 4 bytes"),
    ],
)
def test_problems_say_what_is_wrong(kind: Any, text: str, rule: str) -> None:
    with pytest.raises(UnsupportedProblem, match=rule):
        kind.parse(text)


# ---- the functions, on the CPU --------------------------------------------------------------------------


@of_each_dtype
@pytest.mark.parametrize("renormalize", [True, False])
def test_routing_is_softmax_and_topk(dtype: torch.dtype, renormalize: bool) -> None:
    logits = torch.randn(2, 9, 64, dtype=torch.float64).to(dtype).unique(dim=-1)
    weights, ids = moe_route(logits, 6, renormalize=renormalize)
    p, index = torch.topk(torch.softmax(logits.double(), -1), 6)
    torch.testing.assert_close(weights.double(), p / p.sum(-1, keepdim=True) if renormalize else p)
    assert ids.dtype is torch.int32
    assert weights.dtype is (torch.float64 if dtype is torch.float64 else torch.float32)
    if dtype.itemsize > 2:
        assert torch.equal(ids.long(), index)


def test_ids_are_distinct_whatever_the_logits_are() -> None:
    inf, nan = float("inf"), float("nan")
    logits = torch.tensor([[-inf] * 4, [nan] * 4, [inf, -inf, nan, 1.0], [0.0, -0.0, 0.0, 1.0]])
    weights, ids = moe_route(logits, 3)
    assert ids.tolist() == [[0, 1, 2], [0, 1, 2], [2, 0, 3], [3, 0, 1]]
    assert weights[:3].isnan().all()
    torch.testing.assert_close(weights[3].sum(), torch.tensor(1.0))


def test_the_whole_dance() -> None:
    """A mixture of experts, step by step, against every expert on every token."""
    tokens, hidden, experts, top_k = 13, 6, 5, 2
    x, router = torch.randn(tokens, hidden), torch.randn(experts, hidden)
    w = torch.randn(experts, hidden, hidden)
    weights, ids = moe_route(x @ router.T, top_k)
    order, offsets, inverse = moe_permute(ids, experts)
    rows = moe_gather(x, inverse)
    assert torch.equal(rows, x[order // top_k])
    y = torch.cat([rows[offsets[e] : offsets[e + 1]] @ w[e] for e in range(experts)])
    out = moe_combine(y, inverse, weights)
    dense = torch.einsum("th,eho->teo", x, w)
    expected = (dense.gather(1, ids.long().unsqueeze(-1).expand(-1, -1, hidden)) * weights.unsqueeze(-1)).sum(1)
    torch.testing.assert_close(out, expected)


def test_permutation_is_stable_and_keeps_strangers_last() -> None:
    ids = torch.tensor([[2, 0], [-1, 2], [0, 9], [2, 1]], dtype=torch.int64)
    order, offsets, inverse = moe_permute(ids, 3)
    assert order.tolist() == [1, 4, 7, 0, 3, 6, 2, 5]
    assert offsets.tolist() == [0, 2, 3, 6]
    assert inverse.tolist() == [[3, 0], [6, 4], [1, 7], [5, 2]]
    assert {order.dtype, offsets.dtype, inverse.dtype} == {torch.int32}


def test_nothing_to_route() -> None:
    weights, ids = moe_route(torch.randn(0, 8), 2)
    assert weights.shape == ids.shape == (0, 2)
    order, offsets, inverse = moe_permute(ids, 8)
    assert order.shape == (0,)
    assert offsets.tolist() == [0] * 9
    rows = moe_gather(torch.randn(0, 6), inverse)
    assert rows.shape == (0, 6)
    assert moe_combine(rows, inverse, weights).shape == (0, 6)
    assert moe_combine(torch.randn(8, 0), torch.zeros(4, 2, dtype=torch.int32)).shape == (4, 0)


@refused
def test_refusals_say_the_rule() -> Calls:
    x, inverse, weights = torch.randn(4, 6), torch.arange(8, dtype=torch.int32).view(4, 2), torch.rand(4, 2)
    return {
        "1 to 512 experts; it has 513": lambda: moe_route(torch.randn(4, 513), 2),
        "top_k is from 1 to 6 for 6 experts; it is 7": lambda: moe_route(x, 7),
        "top_k must be one of .* it is 0": lambda: moe_route(x, 0),
        "got torch.int32": lambda: moe_route(x.int(), 2),
        "ids in int32 or int64; got torch.float32": lambda: moe_permute(x, 2),
        "1 to 1023 experts; got 0": lambda: moe_permute(inverse, 0),
        "takes inverse in int32; got torch.int64": lambda: moe_gather(x, inverse.long()),
        "a permutation of 0 to 7.*entries from -1": lambda: moe_gather(x, inverse - 1),
        "it has entries from 1 to 8": lambda: moe_combine(torch.randn(8, 6), inverse + 1),
        "got x .4, 6., inverse .3, 2.": lambda: moe_gather(x, inverse[:3]),
        "got rows .4, 6., inverse .4, 2.: pairs = tokens . top_k": lambda: moe_combine(x, inverse),
        "takes weights in float32; got torch.float16": lambda: moe_combine(torch.randn(8, 6), inverse, weights.half()),
        "of one device": lambda: moe_gather(x.to("meta"), inverse),
        "ids, numbered in int32; got": lambda: moe_permute(inverse[0, :1].expand(1 << 31), 2),
        "rows are numbered in int32; got": lambda: moe_gather(
            x[:1, :1].expand(1 << 30, 1), inverse[:1].expand(1 << 30, 2)
        ),
    }


def test_results_are_written_front_to_back() -> None:
    logits, whole = torch.randn(4, 8), torch.empty(4, 6)
    ids = torch.empty(4, 2, dtype=torch.int32)
    torch.ops.cutekernels.moe_route_out(logits, whole[:, :2], ids, 2, True)  # by way of a copy on a GPU
    assert torch.equal(whole[:, :2], moe_route(logits, 2)[0])
    with pytest.raises(UnsupportedProblem, match="takes ids in int32; got torch.float32"):
        torch.ops.cutekernels.moe_route_out(logits, torch.empty(4, 2), torch.empty(4, 2), 2, True)


# ---- gradients and tracing ------------------------------------------------------------------------------


@pytest.mark.parametrize("renormalize", [True, False])
def test_gradients_of_routing(renormalize: bool) -> None:
    logits = torch.randn(3, 7, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: moe_route(x, 3, renormalize=renormalize)[0], (logits,))


def test_gradients_of_moving() -> None:
    inverse = torch.randperm(6).int().view(3, 2)
    x, rows = (torch.randn(n, 4, dtype=torch.float64, requires_grad=True) for n in (3, 6))
    weights = torch.rand(3, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(moe_gather, (x, inverse))
    assert torch.autograd.gradcheck(moe_combine, (rows, inverse))
    assert torch.autograd.gradcheck(moe_combine, (rows, inverse, weights))
    assert torch.autograd.gradcheck(moe_combine, (rows.detach(), inverse, weights))
    assert torch.autograd.gradgradcheck(moe_gather, (x, inverse))
