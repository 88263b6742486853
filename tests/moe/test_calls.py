"""The GPU's path of routing and sampling on CPU tensors: what a call of any strides poses, launches and returns."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from cutekernels.errors import UnsupportedProblem
from cutekernels.ops.moe.permute import MOE_PERMUTE
from cutekernels.ops.moe.route import MOE_ROUTE
from cutekernels.ops.moe.rows import MOE_COMBINE, MOE_COMBINE_BACKWARD, MOE_DISPATCH, MOE_GATHER
from cutekernels.ops.sampling.op import SAMPLE_FILTER
from cutekernels.ops.shared import calls


def route(logits: Tensor, top_k: int = 3) -> tuple[Tensor, ...]:
    return calls.run(MOE_ROUTE, None, (logits,), options=(top_k, True))


def test_logits_of_any_strides(launches: list[str]) -> None:
    whole = torch.randn(6, 5, 48)
    for logits in (
        whole,
        whole[..., 1:33],
        whole[..., ::2],
        whole.transpose(0, 1),
        whole[0, 0],
        whole[:1].expand(4, 5, 48),
    ):
        weights, ids = route(logits)
        expected = MOE_ROUTE.evaluate(logits, top_k=3, renormalize=True)
        assert torch.equal(weights, expected[0])
        assert torch.equal(ids, expected[1])
    assert launches == [
        "moe_route tokens=30 experts=48 top_k=3 dtype=fp32",
        "moe_route tokens=30 experts=32 top_k=3 dtype=fp32 align=4",
        "moe_route tokens=30 experts=24 top_k=3 dtype=fp32 layout=strided",
        "moe_route tokens=30 experts=48 top_k=3 dtype=fp32",
        "moe_route tokens=1 experts=48 top_k=3 dtype=fp32",
        "moe_route tokens=20 experts=48 top_k=3 dtype=fp32",
    ]


def test_ids_and_rows_of_any_strides(launches: list[str]) -> None:
    ids = torch.randint(0, 9, (2, 5, 3)).transpose(0, 1)
    order, offsets, inverse = calls.run(MOE_PERMUTE, None, (ids,), options=(9,))
    expected = MOE_PERMUTE.evaluate(ids, experts=9)
    assert all(torch.equal(a, b) for a, b in zip((order, offsets, inverse), expected, strict=True))
    x, places = torch.randn(2, 5, 16).transpose(0, 1), inverse.transpose(0, 1).contiguous().transpose(0, 1)
    (rows,) = calls.run(MOE_GATHER, None, (x, places))
    assert torch.equal(rows, x.reshape(10, 16)[order.long() // 3])
    weights = torch.rand(3, 5, 2).permute(1, 2, 0)
    for given in (None, weights):
        (out,) = calls.run(MOE_COMBINE, None, (rows.t().contiguous().t(), places, given))
        assert torch.equal(out, MOE_COMBINE.evaluate(rows, places, given)[0])
    drows, dweights = calls.run(MOE_COMBINE_BACKWARD, None, (x, rows, places, weights))
    assert drows.shape == rows.shape
    assert dweights.shape == weights.shape
    assert launches == [
        "moe_permute pairs=30 experts=9 index=i64",
        "moe_gather tokens=10 cols=16 top_k=3 dtype=fp32",
        "moe_combine tokens=10 cols=16 top_k=3 dtype=fp32 layout=strided",
        "moe_combine tokens=10 cols=16 top_k=3 dtype=fp32 weighted=1 layout=strided",
        "moe_combine_backward tokens=10 cols=16 top_k=3 dtype=fp32 weighted=1",
    ]


def test_few_pairs_of_any_strides(launches: list[str]) -> None:
    x, ids = torch.randn(5, 2, 32)[..., ::2], torch.randint(0, 9, (5, 2, 6))[..., ::2]
    for part in (slice(0, 5), slice(0, 0)):
        grouped = calls.run(MOE_DISPATCH, None, (x[part], ids[part]), options=(9,))
        expected = MOE_DISPATCH.evaluate(x[part], ids[part], experts=9)
        assert all(torch.equal(a, b) for a, b in zip(grouped, expected, strict=True))
    assert launches == [
        "moe_dispatch tokens=10 cols=16 experts=9 top_k=3 dtype=fp32 index=i64 layout=strided",
        "moe_dispatch tokens=0 cols=16 experts=9 top_k=3 dtype=fp32 index=i64",
    ]


def test_no_pairs_still_have_offsets(launches: list[str]) -> None:
    order, offsets, _ = calls.run(MOE_PERMUTE, None, (torch.empty(0, 2, dtype=torch.int32),), options=(4,))
    assert order.shape == (0,)
    assert offsets.tolist() == [0] * 5
    assert route(torch.empty(0, 8))[0].shape == (0, 3)
    assert launches == ["moe_permute pairs=0 experts=4"]


def test_filtered_logits_of_any_strides(launches: list[str]) -> None:
    whole, top_p = torch.randn(3, 4, 40), torch.rand(4, 3).t()
    options, scalars = (True, True, False), (0.8, 5, 1.0, 0.0)
    for logits in (whole, whole.transpose(0, 1).contiguous().transpose(0, 1), whole[..., ::2], whole[..., 1:]):
        inputs = (logits, None, None, top_p, None)
        (out,) = calls.run(SAMPLE_FILTER, None, inputs, options=options, scalars=scalars)
        (expected,) = SAMPLE_FILTER.evaluate(*inputs, *scalars, by_k=True, by_p=True, by_min_p=False)
        assert torch.equal(out, expected)
        assert out.is_contiguous()
    assert [p.partition("top_ps=1")[2] for p in launches] == ["", "", " layout=strided", " align=4"]


def test_results_do_not_overlap_the_logits(launches: list[str]) -> None:
    logits = torch.randn(4, 40)
    with pytest.raises(UnsupportedProblem, match="overlaps an operand"):
        calls.run(
            SAMPLE_FILTER,
            (logits,),
            (logits, None, None, None, None),
            options=(True, False, False),
            scalars=(1, 5, 1, 0),
        )
