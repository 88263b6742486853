"""Few tokens, routed and grouped in one launch: beside the chain of ops, in graphs, with gradients, and refusals."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

import cutekernels as ck
from bench.host import entered
from cutekernels import nn
from cutekernels.errors import UnsupportedProblem
from cutekernels.ops.moe.dispatch import MAX_PAIRS, MOE_DISPATCH, MOE_ROUTE_DISPATCH, most_routed
from cutekernels.ops.moe.dispatch_api import dispatched, route_dispatched
from cutekernels.ops.moe.ffn import routed_ffn
from cutekernels.ops.moe.permute import MOE_PERMUTE
from cutekernels.ops.moe.route import MOE_ROUTE
from cutekernels.ops.moe.rows import MOE_GATHER
from cutekernels.ops.shared import calls
from tests.gpu_path import launching
from tests.traced import Graphs

CHAIN = ["linear", "moe_route", "moe_permute", "moe_gather", "grouped_gemm", "grouped_gemm", "moe_combine"]
FEW = ["linear", "moe_route_dispatch", "grouped_gemm", "grouped_gemm", "moe_combine"]
ROUTED_ALONE = ["linear", "moe_route", "moe_dispatch", "grouped_gemm", "grouped_gemm", "moe_combine"]


def layer() -> tuple[Tensor, Tensor, Tensor]:
    """The experts' matrices and the router's."""
    draw = torch.Generator().manual_seed(4)
    shapes = (9, 12, 8), (9, 8, 6), (9, 8)
    up, down, router = (torch.randn(shape, generator=draw, dtype=torch.float64) for shape in shapes)
    return up, down, router


@pytest.mark.parametrize("renormalize", [True, False])
def test_few_tokens_get_what_they_get_among_many(renormalize: bool) -> None:
    up, down, router = layer()
    x = torch.randn(200, 8, dtype=torch.float64)
    weights, ids = ck.moe_route(x @ router.T, 3, renormalize=renormalize)
    many = routed_ffn(x, up, down, x @ router.T, 3, renormalize=renormalize)
    torch.testing.assert_close(many, ck.moe_ffn(x, up, down, ids, weights))
    for part in (slice(0, 1), slice(5, 12), slice(0, 85), slice(0, 86)):  # 86 tokens of three experts are too many
        few = x[part]
        found = routed_ffn(few, up, down, few @ router.T, 3, renormalize=renormalize)
        torch.testing.assert_close(found, many[part])
        torch.testing.assert_close(ck.moe_ffn(few, up, down, ids[part], weights[part]), many[part])


@pytest.mark.parametrize("tokens", [0, 1, 85, 86])
def test_rows_are_those_of_permute_and_gather(tokens: int) -> None:
    ids, x = torch.randint(-2, 11, (tokens, 3)), torch.randn(tokens, 5)
    rows, offsets, inverse = dispatched(x, ids, 9)
    _, *expected = ck.moe_permute(ids, 9)
    assert torch.equal(offsets, expected[0])
    assert torch.equal(inverse, expected[1])
    assert torch.equal(rows, ck.moe_gather(x, inverse))


def test_tensors_of_any_strides_reach_the_kernel_as_they_lie(launches: list[str]) -> None:
    x, logits = torch.randn(5, 2, 32)[..., ::2], torch.randn(5, 2, 40)[..., 3:23]
    ids = torch.randint(0, 9, (5, 2, 6))[..., ::2]
    assert all(MOE_DISPATCH.takes(name, t) for name, t in (("x", x), ("ids", ids)))
    assert MOE_ROUTE_DISPATCH.takes("logits", logits)
    grouped = calls.run(MOE_DISPATCH, None, (x, ids), options=(9,))
    assert [t.shape for t in grouped] == [(30, 16), (10,), (5, 2, 3)]
    assert all(torch.equal(a, b) for a, b in zip(grouped, MOE_DISPATCH.evaluate(x, ids, experts=9), strict=True))
    whole = calls.run(MOE_ROUTE_DISPATCH, None, (x, logits), options=(3, True))
    expected = MOE_ROUTE_DISPATCH.evaluate(x, logits, top_k=3, renormalize=True)
    assert all(torch.equal(a, b) for a, b in zip(whole, expected, strict=True))
    _, offsets, _ = calls.run(MOE_DISPATCH, None, (x[:0], ids[:0]), options=(9,))
    assert offsets.tolist() == [0] * 10
    assert launches == [
        "moe_dispatch tokens=10 cols=16 experts=9 top_k=3 dtype=fp32 index=i64 layout=strided",
        "moe_route_dispatch tokens=10 cols=16 experts=20 top_k=3 dtype=fp32 layout=strided",
        "moe_dispatch tokens=0 cols=16 experts=9 top_k=3 dtype=fp32 index=i64",
    ]


def test_logits_rows_take_part_in_the_alignment(launches: list[str]) -> None:
    x = torch.randn(3, 16).bfloat16()
    for logits in (torch.randn(3, 64), torch.randn(3, 61), torch.randn(3, 61).bfloat16(), torch.randn(1, 61)):
        calls.run(MOE_ROUTE_DISPATCH, None, (x[: len(logits)], logits), options=(8, True))
    assert [text.partition("experts=")[2] for text in launches] == [
        "64 router=fp32", "61 router=fp32 align=4", "61 align=2", "61 router=fp32 align=4",
    ]  # fmt: skip


def test_fewer_functions_are_entered() -> None:
    """Repeated calls: one replay in the place of three, and what chooses it."""
    x, logits = torch.randn(4, 16), torch.randn(4, 9)
    with launching(lambda op, problem: lambda *given: None):
        _, ids = calls.run(MOE_ROUTE, None, (logits,), options=(2, True))
        _, _, inverse = calls.run(MOE_PERMUTE, None, (ids,), options=(9,))
        calls.run(MOE_GATHER, None, (x, inverse))
        calls.run(MOE_DISPATCH, None, (x, ids), options=(9,))
        calls.run(MOE_ROUTE_DISPATCH, None, (x, logits), options=(2, True))

        def chain() -> None:
            ck.moe_route(logits, 2)
            ck.moe_permute(ids, 9)
            ck.moe_gather(x, inverse)

        routed, grouped = entered(lambda: route_dispatched(x, logits, 2, True)), entered(lambda: dispatched(x, ids, 9))
        assert (routed, grouped) == (7, 6)
        assert entered(chain) >= 14


# ---- gradients and graphs -------------------------------------------------------------------------------


def test_gradients() -> None:
    x, logits = (torch.randn(4, n, dtype=torch.float64, requires_grad=True) for n in (3, 6))
    ids = torch.randint(-1, 7, (4, 2))
    assert torch.autograd.gradcheck(lambda x: dispatched(x, ids, 6)[0], (x,))
    for renormalize in (True, False):

        def real(x: Tensor, logits: Tensor, renormalize: bool = renormalize) -> tuple[Tensor, Tensor]:
            rows, _, _, weights, _ = route_dispatched(x, logits, 2, renormalize)
            return rows, weights

        assert torch.autograd.gradcheck(real, (x, logits))
        assert torch.autograd.gradcheck(lambda x: real(x, logits.detach())[0], (x,))
        assert torch.autograd.gradcheck(lambda logits: real(x.detach(), logits)[1], (logits,))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("gradient", [False, True])
def test_opcheck(gradient: bool) -> None:
    ops = torch.ops.cutekernels
    x, logits = torch.randn(4, 5, requires_grad=gradient), torch.randn(4, 6, requires_grad=gradient)
    torch.library.opcheck(ops.moe_dispatch.default, (x, torch.randint(0, 6, (4, 2)), 6))
    torch.library.opcheck(ops.moe_route_dispatch.default, (x, logits, 2, True))
    if not gradient:
        fresh = MOE_ROUTE_DISPATCH.fresh(x, logits, top_k=2, renormalize=True)
        torch.library.opcheck(ops.moe_route_dispatch_out.default, (x, logits, *fresh, 2, True))


@pytest.mark.parametrize(("tokens", "ops"), [(16, FEW), (129, CHAIN)])
def test_graphs_of_a_size_take_what_calls_of_it_take(tokens: int, ops: list[str]) -> None:
    module, graphs = nn.MoE(16, 24, 100, 2), Graphs()
    x = torch.randn(tokens, 16)
    with torch.no_grad():
        found = torch.compile(module, backend=graphs.backend, fullgraph=True, dynamic=False)(x)
        torch.testing.assert_close(found, module(x))
    assert graphs.ops() == ops


def test_one_graph_serves_any_number_of_tokens() -> None:
    module, graphs = nn.MoE(16, 24, 100, 2), Graphs()
    made = torch.compile(module, backend=graphs.backend, fullgraph=True, dynamic=True)
    with torch.no_grad():
        for tokens in (5, 300, 64):
            x = torch.randn(tokens, 16)
            torch.testing.assert_close(made(x), module(x))
    assert len(graphs.seen) == 1
    assert graphs.ops() == CHAIN


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("strict", [True, False])
def test_exported_for_any_number_of_tokens(strict: bool) -> None:
    module = nn.MoE(16, 24, 100, 2)
    tokens = torch.export.Dim("tokens", min=2, max=4096)
    with torch.no_grad():
        exported = torch.export.export(module, (torch.randn(5, 16),), dynamic_shapes={"x": {0: tokens}}, strict=strict)
        for x in (torch.randn(3, 16), torch.randn(300, 16)):
            torch.testing.assert_close(exported.module()(x), module(x))


# ---- the module, and refusals ---------------------------------------------------------------------------


def test_a_route_of_somebody_elses_is_taken() -> None:
    class First(nn.MoE):
        def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return torch.ones(len(x), 1), torch.zeros(len(x), 1, dtype=torch.int32)

    module, x = First(16, 24, 4, 1), torch.randn(3, 16)
    expected = ck.moe_ffn(
        x, module.experts.gate_up_proj, module.experts.down_proj, module.route(x)[1], torch.ones(3, 1)
    )
    torch.testing.assert_close(module(x), expected)
    other = nn.MoE(16, 24, 4, 1)
    other.load_state_dict(module.state_dict())
    assert not torch.equal(other(x), expected)
    other.route = module.route  # type: ignore[method-assign]
    torch.testing.assert_close(other(x), expected)


def refusals() -> dict[str, Callable[[], Any]]:
    up, down, router = layer()
    x = torch.randn(4, 8, dtype=torch.float64)
    logits = x @ router.T
    return {
        "routed by logits .*9.*; got .4, 8. and .4, 8.": lambda: routed_ffn(x, up, down, x, 2),
        "routed by logits .*; got .3, 9. and .4, 8.": lambda: routed_ffn(x, up, down, logits[:3], 2),
        "takes logits as a torch.Tensor; got None": lambda: routed_ffn(x, up, down, None, 2),  # type: ignore[arg-type]
        "top_k must be one of .* it is 0": lambda: routed_ffn(x, up, down, logits, 0),
        "top_k is from 1 to 9 for 9 experts; it is 10": lambda: routed_ffn(x, up, down, logits, 10),
        "top_k .*got True": lambda: routed_ffn(x, up, down, logits, True),
        "got torch.int64": lambda: routed_ffn(x, up, down, logits.long(), 2),
        "w_gate_up .E, 2 . I, H.": lambda: routed_ffn(x[:, :7], up, down, logits, 2),
        "1 to 1023 experts; got 0": lambda: dispatched(x, torch.zeros(4, 2, dtype=torch.int32), 0),
        "K from 1 to 32; K is 33": lambda: dispatched(x, torch.zeros(4, 33, dtype=torch.int32), 9),
        "takes ids in int32 or int64; got torch.float64": lambda: dispatched(x, x[:, :2], 9),
    }


@pytest.mark.parametrize("rule", refusals())
def test_refusals_say_the_rule(rule: str) -> None:
    with pytest.raises(UnsupportedProblem, match=rule):
        refusals()[rule]()


def test_the_ops_themselves_refuse_many_tokens() -> None:
    ops, x = torch.ops.cutekernels, torch.randn(200, 8)
    most = most_routed(100, 2)
    assert (MAX_PAIRS, most, most_routed(512, 10), most_routed(8, 2)) == (256, 16, 4, 128)
    with pytest.raises(UnsupportedProblem, match="up to 256 pairs of a token and an expert; got 129 times 2"):
        ops.moe_dispatch(x[:129], torch.zeros(129, 2, dtype=torch.int32), 9)
    with pytest.raises(UnsupportedProblem, match="up to 16 tokens that choose 2 of 100 experts; got 17"):
        ops.moe_route_dispatch(x[:17], torch.randn(17, 100), 2, True)
