"""``attention`` without a GPU: errors, mathematics, options, registration, the declaration's arithmetic."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch
from torch import Tensor

from cutekernels.errors import UnsupportedProblem
from cutekernels.ops.attention import api
from cutekernels.ops.attention.api import attention
from cutekernels.ops.attention.op import ATTENTION
from cutekernels.ops.attention.problem import AttentionProblem
from cutekernels.ops.attention.reference import band
from cutekernels.ops.shared.calls import implementations, ways_of
from cutekernels.ops.shared.paths import CallCache
from tests.attention.cases import of_nothing, opcheck, qkv, random_problem, rows, torch_attention, wide

# ---- mathematics ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(30))
def test_agrees_with_torch_in_fp64(seed: int) -> None:
    p = random_problem(random.Random(seed), lengths=(1, 2, 7, 20, 33)).replace(varlen=False, softcap=False, lse=False)
    args = wide(ATTENTION.sample(p, "cpu", seed))
    window = (p.sides["left"], p.sides["right"])
    out, lse = attention(*args[:3], mask=args[3], causal=p.causal, window=window, scale=args[-2], return_lse=True)
    expected = torch_attention(p, args)
    blind = expected.isnan()
    torch.testing.assert_close(out[~blind], expected[~blind], rtol=1e-12, atol=1e-12)
    assert (out[blind] == 0).all()
    assert torch.equal(lse == -math.inf, blind[..., 0].transpose(1, 2))


def test_the_last_query_is_aligned_with_the_last_key() -> None:
    q, k, v = qkv(1, 2, 5, 1, 1)
    out = attention(q, k, v, causal=True)
    torch.testing.assert_close(out[:, 1:], attention(q[:, 1:], k, v))
    torch.testing.assert_close(out[:, :1], attention(q[:, :1], k[:, :4], v[:, :4]))


def test_queries_before_the_first_key_get_zero_and_minus_infinity() -> None:
    q, k, v = qkv(1, 5, 2, 2, 1)
    out, lse = attention(q, k, v, causal=True, return_lse=True)
    assert (out[:, :3] == 0).all()
    assert (lse[:, :, :3] == -math.inf).all()
    assert lse[:, :, 3:].isfinite().all()


def test_packed_sequences_are_attended_one_by_one() -> None:
    q, k, v = rows(11, 4, 16), rows(20, 2, 16, seed=1), rows(20, 2, 16, seed=2)
    ends_q, ends_kv = torch.tensor([0, 4, 4, 11], dtype=torch.int32), torch.tensor([0, 6, 13, 20], dtype=torch.int32)
    out, lse = attention(q, k, v, causal=True, cu_seqlens_q=ends_q, cu_seqlens_kv=ends_kv, return_lse=True)
    assert lse.shape == (4, 11)
    for begin_q, end_q, begin_kv, end_kv in ((0, 4, 0, 6), (4, 11, 13, 20)):
        alone, own = attention(
            q[None, begin_q:end_q], k[None, begin_kv:end_kv], v[None, begin_kv:end_kv], causal=True, return_lse=True
        )
        torch.testing.assert_close(out[begin_q:end_q], alone[0])
        torch.testing.assert_close(lse[:, begin_q:end_q], own[0])


def test_softcap_bounds_scores() -> None:
    q, k, v = qkv()
    capped = attention(q * 100, k, v, softcap=2.0, return_lse=True)[1]
    assert (capped <= 2.0 + math.log(k.shape[1])).all()
    scores = 2.0 * torch.tanh(torch.einsum("bqhd,bkhd->bhqk", q, k.repeat_interleave(2, 2)) / 4 / 2.0)
    torch.testing.assert_close(attention(q, k, v, softcap=2.0, return_lse=True)[1], scores.logsumexp(-1))


def test_window_sides_none_and_causal_combine() -> None:
    q, k, v = qkv(seq_q=13)
    torch.testing.assert_close(attention(q, k, v, window=(None, None)), attention(q, k, v))
    torch.testing.assert_close(attention(q, k, v, window=(None, 0)), attention(q, k, v, causal=True))
    both = attention(q, k, v, causal=True, window=(3, 5))
    torch.testing.assert_close(both, attention(q, k, v, window=(3, 0)))
    assert not torch.equal(both, attention(q, k, v, causal=True))


def test_values_that_nobody_sees_do_no_harm() -> None:
    q, k, v = qkv(1, 4, 4, 2, 2)
    seen = torch.tensor([True, True, False, True]).expand(1, 1, 4, 4)
    v[:, 2] = math.nan
    assert attention(q, k, v, mask=seen).isfinite().all()


@of_nothing
def test_empty_extents(seq_q: int, seq_kv: int, batch: int) -> None:
    q, k, v = qkv(batch, seq_q, seq_kv)
    out, lse = attention(q, k, v, return_lse=True)
    assert out.shape == q.shape
    assert lse.shape == (batch, 4, seq_q)
    if seq_kv == 0:
        assert (out == 0).all()
        assert (lse == -math.inf).all()


def test_half_precision_is_rounded_once() -> None:
    q, k, v = (t.bfloat16() for t in qkv())
    out = attention(q, k, v)
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, attention(q.double(), k.double(), v.double()).bfloat16())


# ---- arguments ------------------------------------------------------------------------------------------


def refused(message: str, *args: Any, **options: Any) -> None:
    with pytest.raises(UnsupportedProblem, match=message):
        attention(*args, **options)


def test_errors_name_rule_value_and_remedy() -> None:
    q, k, v = qkv()
    refused(r"q must be \(B, S, H, D\)", q[0], k, v)
    refused(r"q must be \(TOTAL, H, D\)", q, k, v, cu_seqlens_q=torch.zeros(2, dtype=torch.int32))
    refused("takes k in float64; got torch.float32: convert it", q, k.float(), v.float())
    refused("k and v must have one shape", q, k, v[:, :-1])
    refused(r"v_head_dim\), pad them with zeros and drop", q, k, v[..., :-1])
    refused("k does not fit: its head_dim is 8, q's 16", q, k[..., :8], v[..., :8])
    refused("k does not fit: its batch is 1, q's 2", q, k[:1], v[:1])
    refused("multiple of 8 up to 256; it is 12", q[..., :12], k[..., :12], v[..., :12])
    refused("k's 3 heads must divide q's 4", q, *(t.repeat(1, 1, 3, 1)[:, :, :3] for t in (k, v)))
    refused("scale must be above 0", q, k, v, scale=-1.0)
    refused("scale must be above 0", q, k, v, scale=0.0)
    refused("softcap must be above 0", q, k, v, softcap=0.0)
    refused(r"window must be \(left, right\)", q, k, v, window=3)
    refused("write None for no limit", q, k, v, window=(-1, 0))
    refused("takes mask in bool; got torch.float32", q, k, v, mask=torch.ones(2, 4, 9, 13))
    refused("mask does not fit: its seq_q is 1, q's 9", q, k, v, mask=torch.ones(2, 4, 1, 13, dtype=torch.bool))
    refused(r"= \(2 or 1, 4 or 1, 9, 13\); got \(2, 3, 9, 13\)", q, k, v, mask=torch.ones(2, 3, 9, 13).bool())
    refused("out must be", q, k, v, out=torch.empty(2, 9, 4, 8, dtype=q.dtype))
    refused("out= overlaps an operand", q, k, v, out=q)
    refused("out must not overlap itself", q, k, v, out=q.new_empty(1, 9, 4, 16).expand(2, -1, -1, -1))


def test_packed_errors() -> None:
    q, k, v = rows(4, 2, 16), rows(4, 2, 16), rows(4, 2, 16)
    ends = torch.tensor([0, 4], dtype=torch.int32)
    refused("one is missing", q, k, v, cu_seqlens_q=ends)
    refused("takes cu_seqlens_kv in int32", q, k, v, cu_seqlens_q=ends, cu_seqlens_kv=ends.long())
    longer = torch.tensor([0, 2, 4], dtype=torch.int32)
    refused("its ends is 3, cu_seqlens_q's 2", q, k, v, cu_seqlens_q=ends, cu_seqlens_kv=longer)
    refused("has no sequence", q, k, v, cu_seqlens_q=ends[:1], cu_seqlens_kv=ends[:1])
    refused("take none", q, k, v, cu_seqlens_q=ends, cu_seqlens_kv=ends, mask=torch.ones(1, 1, 4, 4, dtype=torch.bool))


def test_out_is_written_and_returned() -> None:
    q, k, v = qkv()
    wide = q.new_full((2, 9, 4, 32), math.nan)
    out = wide[..., :16]
    assert attention(q, k, v, out=out) is out
    assert torch.equal(out, attention(q, k, v))
    assert wide[..., 16:].isnan().all()
    result, lse = attention(q, k, v, out=out, return_lse=True)
    assert result is out
    assert lse.shape == (2, 4, 9)


def test_out_is_not_differentiable() -> None:
    q, k, v = qkv()
    q.requires_grad_()
    refused("out= is not differentiable", q, k, v, out=torch.empty_like(q))


def test_canonical_copies_only_what_kernels_cannot_read() -> None:
    fused = rows(2, 8, 3 * 4 * 16, dtype=torch.bfloat16).view(2, 8, 12, 16)
    part = fused[:, :, 4:8]

    def canonical(t: Tensor) -> Tensor:
        way = ways_of(ATTENTION, dict.fromkeys(ATTENTION.inputs) | dict.fromkeys("qkv", t))[0]
        return t if way is None else way(t)

    assert canonical(part) is part
    assert canonical(part.transpose(1, 2).contiguous().transpose(1, 2)).data_ptr() != part.data_ptr()
    odd = rows(2, 8, 4, 17, dtype=torch.bfloat16)[..., :16]
    assert canonical(odd).is_contiguous()
    assert torch.equal(canonical(odd), odd)
    shifted = rows(2 * 8 * 4 * 16 + 1, dtype=torch.bfloat16)[1:].view(2, 8, 4, 16)
    assert canonical(shifted).data_ptr() % 16 == 0
    single = part[:, :1]
    assert canonical(single).stride()[1] == 0
    assert canonical(single).data_ptr() == single.data_ptr()


# ---- torch ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [(True, -1, -1, 0.2, 0.0, True), (False, 3, 2, 0.2, 5.0, False)])
def test_opcheck(options: tuple[Any, ...]) -> None:
    q, k, v = qkv()
    given, ops = (q, k, v, *[None] * 4), torch.ops.cutekernels
    opcheck(ops.attention, (*given, *options))
    opcheck(ops.attention_out, (*given, torch.empty_like(q), *options))


# ---- the declaration ------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(40))
def test_pairs_are_those_of_the_band(seed: int) -> None:
    p = random_problem(random.Random(seed), lengths=(0, 1, 2, 5, 9, 16))
    assert p.pairs == int(band(p.seq_q, p.seq_kv, **p.sides, device=torch.device("cpu")).sum())


def test_problems_that_contradict_themselves_are_refused() -> None:
    base = "batch=1 seq_q=8 seq_kv=8 heads_q=4 heads_kv=4"
    for words, message in {
        "causal=1 window=right": "limits the right side already",
        "window_left=3": "needs window=left",
        "mask=1 varlen=1": "take none",
    }.items():
        with pytest.raises(UnsupportedProblem, match=message):
            AttentionProblem.parse(f"{base} {words}")
    with pytest.raises(UnsupportedProblem, match="must be a multiple of heads_kv"):
        AttentionProblem.parse("batch=1 seq_q=8 seq_kv=8 heads_q=4 heads_kv=3")


def test_torchs_op_looks_a_call_up_before_it_checks_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled graphs and autograd call the op. No key holds the scale."""

    def unwanted(*args: Any) -> Any:
        raise AssertionError("checked")

    q, k, v = qkv()
    known = q.clone(), q.new_empty(0)
    monkeypatch.setattr(CallCache, "recall", lambda *args: known)
    monkeypatch.setattr(type(ATTENTION), "admit", unwanted)
    inputs, run = (q, k, v, None, None, None, None), implementations(ATTENTION, 0, api._read)[0]
    assert run(*inputs, True, -1, -1, 0.25, 0.0, True) == known
    for scale in (math.nan, math.inf, 0.0, -1.0):
        with pytest.raises(UnsupportedProblem, match="scale must be above 0"):
            run(*inputs, True, -1, -1, scale, 0.0, True)
