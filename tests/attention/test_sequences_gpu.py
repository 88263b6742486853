"""Ends of packed sequences, lengths and page tables that are wrong on the device: nothing out of range, no garbage."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from cutekernels import dispatch
from cutekernels.errors import UnsupportedProblem
from cutekernels.op import Op, Problem
from cutekernels.ops.attention.api import attention, decode_attention
from cutekernels.ops.attention.backward import ATTENTION_BACKWARD, AttentionBackwardProblem
from cutekernels.ops.attention.delta import ATTENTION_DELTA
from cutekernels.ops.attention.op import ATTENTION
from cutekernels.ops.attention.problem import AttentionProblem
from tests.attention.test_sequences import ENDS, TILE

pytestmark = pytest.mark.gpu
ROWS, SEQUENCES = 400, 4
WRONG = {name: [n if abs(n) > 99 else n * ROWS // 40 for n in ends] for name, ends in ENDS.items() if len(ends) < 5}
WRONG |= {"noise": [-(2**31), 2**31 - 1, 70, -50, ROWS], "all behind": [2**30] * 5, "all before": [-1] * 5}


def ints(values: Sequence[int]) -> Tensor:
    return torch.tensor(values, device="cuda", dtype=torch.int32)


def guarded(t: Tensor) -> Tensor:
    """A copy in the middle of NaN."""
    whole = torch.full((3, *t.shape), math.nan, device="cuda", dtype=t.dtype)
    whole[1] = t
    return whole[1]


def intact(t: Tensor) -> bool:
    """Whether the NaN around :func:`guarded` memory is still there."""
    around = t._base
    assert around is not None
    return bool(around[0].isnan().all() and around[2].isnan().all())


def launch(op: Op[Any, Any], p: Problem, args: tuple[Any, ...]) -> list[Tensor]:
    results = [guarded(torch.full_like(t, math.nan)) for t in op.outputs(p, *args)]
    dispatch.plan(op, p, torch.cuda.current_device()).launch(*results, *args)
    assert all(map(intact, results))
    return results


def covered(ends: list[int]) -> Tensor:
    """Rows of some sequence: from the first end to the greatest."""
    at = torch.arange(ROWS, device="cuda")
    return (at >= max(0, ends[0])) & (at < max(ends))


def operands(heads_q: int = 4, head_dim: int = 64) -> list[Tensor]:
    generator = torch.Generator("cuda").manual_seed(0)
    heads = (heads_q, 2, 2, heads_q)
    return [
        guarded(torch.randn(ROWS, h, head_dim, device="cuda", generator=generator, dtype=torch.float32).bfloat16())
        for h in heads
    ]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("side", ["q", "kv", "both"])
@pytest.mark.parametrize("wrong", WRONG)
def test_forward_and_backward_stay_in_range_and_leave_zeros_elsewhere(wrong: str, side: str, causal: bool) -> None:
    ends = WRONG[wrong]
    right = [ROWS * i // (len(ends) - 1) for i in range(len(ends))]
    cu_q, cu_kv = (ends if side in (s, "both") else right for s in ("q", "kv"))
    q, k, v, dout = operands()
    p = AttentionProblem(
        len(ends) - 1, -(-ROWS // (len(ends) - 1)), -(-ROWS // (len(ends) - 1)), 4, 2, head_dim=64,
        causal=causal, varlen=True, lse=True,
    )  # fmt: skip
    mask, sinks, numbers, cu = None, None, (0.125, 0.0), (ints(cu_q), ints(cu_kv))
    out, lse = launch(ATTENTION, p, (q, k, v, mask, *cu, sinks, *numbers))
    seen = covered(cu_q)
    assert out.isfinite().all()
    assert not lse.isnan().any()
    assert (out[~seen] == 0).all()
    assert (lse[:, ~seen] == -math.inf).all()
    (stats,) = ATTENTION_DELTA.evaluate(out, dout, lse, None)
    named = {name: getattr(p, name) for name in type(p).__dataclass_fields__} | {"lse": False}
    for of in ("kv", "q"):
        problem = AttentionBackwardProblem(**named, of=of)
        results = launch(ATTENTION_BACKWARD, problem, (dout, q, k, v, stats, mask, *cu, *numbers))
        unseen = ~covered(cu_q if of == "q" else cu_kv)
        for t in results:
            assert t.isfinite().all()
            assert (t[unseen] == 0).all()


def test_gaps_before_and_behind_change_nothing_between() -> None:
    q, k, v, dout = operands()
    ends = ints([30, 130, 130, 390])
    inside = slice(30, 390)
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    out = attention(*leaves, causal=True, cu_seqlens_q=ends, cu_seqlens_kv=ends)
    parts = [t[inside].clone().requires_grad_() for t in (q, k, v)]
    alone = attention(*parts, causal=True, cu_seqlens_q=ends - 30, cu_seqlens_kv=ends - 30, check=True)
    assert isinstance(out, Tensor)
    assert isinstance(alone, Tensor)
    torch.testing.assert_close(out[inside], alone, rtol=2e-2, atol=4e-3)  # configs may differ
    out.backward(dout)
    alone.backward(dout[inside])
    for whole, part in zip(leaves, parts, strict=True):
        assert whole.grad is not None
        torch.testing.assert_close(whole.grad[inside], part.grad, rtol=2e-2, atol=2e-2)
        assert (whole.grad[:30] == 0).all()
        assert (whole.grad[390:] == 0).all()


@pytest.mark.parametrize("wrong", WRONG)
def test_a_check_reads_the_ends_back(wrong: str) -> None:
    q, k, v, _ = operands()
    ends = ints(WRONG[wrong])
    with pytest.raises(UnsupportedProblem, match="must run from 0 to 400"):
        attention(q, k, v, cu_seqlens_q=ends, cu_seqlens_kv=ends, check=True)


@pytest.mark.parametrize("entry", [-1, -(2**31), 40, 2**31 - 1])
@pytest.mark.parametrize("seq_q", [1, 4])
def test_pages_that_do_not_exist_are_never_read(entry: int, seq_q: int) -> None:
    q = torch.randn(2, seq_q, 8, 64, device="cuda", dtype=torch.bfloat16)
    k, v = (guarded(torch.randn(40, TILE, 2, 64, device="cuda", dtype=torch.bfloat16)) for _ in range(2))
    table = torch.arange(40, device="cuda", dtype=torch.int32).view(2, 20)
    lengths = ints([320, 100])
    whole = decode_attention(q, k, v, lengths, page_table=table)
    table[1, 7:] = entry  # of no token
    assert torch.equal(decode_attention(q, k, v, lengths, page_table=table, check=True), whole)
    table[1, 3] = entry
    found = decode_attention(q, k, v, lengths, page_table=table)
    assert isinstance(found, Tensor)
    assert found.isfinite().all()
    assert torch.equal(found[:1], whole[:1])
    with pytest.raises(UnsupportedProblem, match="entry 3 of sequence 1"):
        decode_attention(q, k, v, lengths, page_table=table, check=True)


@pytest.mark.parametrize("length", [-1, -(2**31), 101, 2**31 - 1])
def test_lengths_out_of_range_are_checked(length: int) -> None:
    q = torch.randn(2, 8, 64, device="cuda", dtype=torch.bfloat16)
    k, v = (guarded(torch.randn(2, 100, 2, 64, device="cuda", dtype=torch.bfloat16)) for _ in range(2))
    found = decode_attention(q, k, v, ints([100, length]))
    nearest = decode_attention(q, k, v, ints([100, min(max(length, 0), 100)]), check=True)
    assert torch.equal(found, nearest)
    with pytest.raises(UnsupportedProblem, match="from 0 to 100"):
        decode_attention(q, k, v, ints([100, length]), check=True)


def test_a_cache_of_no_pages_has_no_tokens() -> None:
    q = torch.randn(2, 8, 64, device="cuda", dtype=torch.bfloat16)
    k = torch.empty(0, TILE, 2, 64, device="cuda", dtype=torch.bfloat16)
    out, lse = decode_attention(q, k, k, ints([5, 0]), page_table=ints([0, 0]).view(2, 1), return_lse=True)
    assert (out == 0).all()
    assert (lse == -math.inf).all()
