"""Sinks: a logit for each query head that takes its share of the softmax. Mathematics, gradients, refusals, kernels."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from cutekernels import gpu
from cutekernels.errors import UnsupportedProblem
from cutekernels.op import Op
from cutekernels.ops.attention.api import attention, decode_attention
from cutekernels.ops.attention.backward import AttentionBackwardProblem
from cutekernels.ops.attention.config import AttentionConfig
from cutekernels.ops.attention.decode import DECODE_ATTENTION, DecodeProblem
from cutekernels.ops.attention.op import ATTENTION
from cutekernels.ops.attention.problem import AttentionProblem, launch_blind
from tests.attention import compiled
from tests.attention.cases import opcheck, qkv, rows, written_out
from tests.attention.compiled import H200
from tests.compiled import area

# ---- mathematics ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"softcap": 2.0}, {"causal": True, "softcap": 1.0}])
@pytest.mark.parametrize("sinks", [torch.zeros(4), rows(4, seed=8) * 4, rows(4, seed=8).float()])
def test_is_one_more_column_of_scores(sinks: Tensor, options: dict[str, Any]) -> None:
    q, k, v = qkv(seq_q=15)
    out, lse = attention(q, k, v, sinks=sinks, return_lse=True, **options)
    expected, expected_lse = written_out(q, k, v, sinks, **options)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(lse, expected_lse)
    assert not torch.allclose(out, attention(q, k, v, **options), rtol=1e-3)


def test_a_query_that_sees_nothing_has_its_sink_as_lse() -> None:
    q, k, v = qkv(1, 5, 2, 4, 2)
    sinks = torch.tensor([1.0, -2.0, -math.inf, 30.0], dtype=torch.float64)
    out, lse = attention(q, k, v, causal=True, sinks=sinks, return_lse=True)
    assert (out[:, :3] == 0).all()
    assert torch.equal(lse[0, :, :3], sinks.unsqueeze(-1).expand(-1, 3))
    plain = attention(q, k, v, causal=True, return_lse=True)
    torch.testing.assert_close(out[:, 3:, 2], plain[0][:, 3:, 2])  # -inf is no sink
    torch.testing.assert_close(lse[:, 2], plain[1][:, 2])


def test_no_keys_at_all() -> None:
    q, k, v = qkv(2, 5, 0)
    sinks = rows(4, seed=3)
    out, lse = attention(q, k, v, sinks=sinks, return_lse=True)
    assert (out == 0).all()
    assert torch.equal(lse, sinks[:, None].expand(2, 4, 5))
    blank, filled = q.new_full(q.shape, math.nan), lse.new_full(lse.shape, math.nan)
    launch_blind(True)(blank, filled, q, k, v, None, None, None, sinks, 0.25, 0.0)
    assert torch.equal(blank, out)
    assert torch.equal(filled, lse)
    launch_blind(True)(blank, filled, q, k, v, None, None, None, None, 0.25, 0.0)
    assert (filled == -math.inf).all()


def test_packed_sequences_and_rows_of_none() -> None:
    q, k, v, sinks = rows(11, 4, 16), rows(20, 2, 16, seed=1), rows(20, 2, 16, seed=2), rows(4, seed=4)
    ends_q, ends_kv = torch.tensor([0, 4, 4, 11], dtype=torch.int32), torch.tensor([0, 6, 20, 20], dtype=torch.int32)
    options: dict[str, Any] = {"causal": True, "return_lse": True, "sinks": sinks}
    out, lse = attention(q, k, v, cu_seqlens_q=ends_q, cu_seqlens_kv=ends_kv, **options)
    alone, own = attention(q[None, :4], k[None, :6], v[None, :6], **options)
    torch.testing.assert_close(out[:4], alone[0])
    torch.testing.assert_close(lse[:, :4], own[0])
    assert torch.equal(lse[:, 4:], sinks[:, None].expand(4, 7))  # the last sequence has no keys


@pytest.mark.parametrize("seq_q", [1, 3])
def test_decode_agrees_with_attention(seq_q: int) -> None:
    q, k, v, sinks = rows(2, seq_q, 4, 16), rows(2, 20, 2, 16, seed=1), rows(2, 20, 2, 16, seed=2), rows(4, seed=5)
    lengths = torch.tensor([20, 0], dtype=torch.int32)
    out, lse = decode_attention(q, k, v, lengths, sinks=sinks, return_lse=True)
    expected, expected_lse = attention(q[:1], k[:1], v[:1], causal=True, sinks=sinks, return_lse=True)
    torch.testing.assert_close(out[:1], expected)
    torch.testing.assert_close(lse[:1], expected_lse)
    assert (out[1] == 0).all()
    assert torch.equal(lse[1], sinks[:, None].expand(4, seq_q))


# ---- gradients ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (2, 1)}, {"softcap": 1.5, "causal": True}])
def test_gradcheck(options: dict[str, Any]) -> None:
    q, k, v = (t.requires_grad_() for t in qkv(1, 6, 5, 2, 1, 8))
    sinks = rows(2, seed=6).requires_grad_()

    def run(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Any:
        return attention(q, k, v, sinks=sinks, return_lse=True, **options)

    assert torch.autograd.gradcheck(run, (q, k, v, sinks))  # of out and lse, and of queries that see nothing
    assert torch.autograd.gradcheck(lambda *args: run(*args)[0], (q, k, v, sinks))


def test_sinks_alone_have_a_gradient() -> None:
    q, k, v = qkv()
    sinks = rows(4, seed=6).float().requires_grad_()
    (mine,) = torch.autograd.grad(attention(q, k, v, sinks=sinks).square().sum(), sinks)
    (theirs,) = torch.autograd.grad(written_out(q, k, v, sinks)[0].square().sum(), sinks)
    assert mine.dtype == torch.float32
    torch.testing.assert_close(mine, theirs)


def test_gradients_of_packed_sequences_and_of_no_keys() -> None:
    q, k, v = (t.requires_grad_() for t in (rows(7, 2, 8), rows(9, 1, 8, seed=1), rows(9, 1, 8, seed=2)))
    sinks, ends = rows(2, seed=6).requires_grad_(), torch.tensor([0, 3, 7], dtype=torch.int32)
    ends_kv = torch.tensor([0, 9, 9], dtype=torch.int32)
    assert torch.autograd.gradcheck(
        lambda *args: attention(
            *args[:3], sinks=args[3], causal=True, cu_seqlens_q=ends, cu_seqlens_kv=ends_kv, return_lse=True
        ),
        (q, k, v, sinks),
    )
    none = [t.detach()[None, :0].requires_grad_() for t in (k, v)]
    lse = attention(q[None], *none, sinks=sinks, return_lse=True)[1]
    assert torch.equal(torch.autograd.grad(lse.sum(), sinks)[0], torch.full((2,), 7.0, dtype=torch.float64))


def test_a_gradient_of_minus_infinity_is_zero() -> None:
    q, k, v = qkv(1, 5, 2, 2, 1)
    sinks = torch.tensor([-math.inf, 0.5], dtype=torch.float64).requires_grad_()
    out, lse = attention(q, k, v, causal=True, sinks=sinks, return_lse=True)
    (dsinks,) = torch.autograd.grad(out.sum() + lse[lse.isfinite()].sum(), sinks)
    assert dsinks[0] == 0
    assert dsinks[1].isfinite()


# ---- arguments ------------------------------------------------------------------------------------------

WRONG: dict[str, Any] = {
    "shape": torch.zeros(2),
    "rank": torch.zeros(1, 4),
    "dtype": torch.zeros(4).half(),
    "integers": torch.zeros(4).int(),
    "device": torch.zeros(4, device="meta"),
    "list": [0.0] * 4,
    "number": 0.0,
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_sinks_are_refused(name: str) -> None:
    q, k, v = qkv()
    with pytest.raises(UnsupportedProblem, match="sinks"):
        attention(q, k, v, sinks=WRONG[name])
    with pytest.raises(UnsupportedProblem, match="sinks"):
        decode_attention(q, k, v, torch.tensor([13, 13], dtype=torch.int32), sinks=WRONG[name])


def test_the_message_names_rule_and_value() -> None:
    q, k, v = qkv()
    with pytest.raises(UnsupportedProblem, match="sinks does not fit: its heads_q is 2, q's 4"):
        attention(q, k, v, sinks=torch.zeros(2))
    with pytest.raises(UnsupportedProblem, match="takes sinks in float64 or float32; got torch.float16"):
        attention(q, k, v, sinks=torch.zeros(4).half())


def test_neither_out_nor_decode_is_differentiable() -> None:
    q, k, v = qkv()
    sinks = torch.zeros(4, requires_grad=True)
    with pytest.raises(UnsupportedProblem, match="out= is not differentiable"):
        attention(q, k, v, sinks=sinks, out=torch.empty_like(q))
    lengths = torch.tensor([13, 13], dtype=torch.int32)
    with pytest.raises(UnsupportedProblem, match="no gradient"):
        decode_attention(q, k, v, lengths, sinks=sinks).sum().backward()
    with pytest.raises(UnsupportedProblem):
        decode_attention(q, k, v, lengths, sinks=sinks, out=torch.empty_like(q))


def test_autocast_leaves_fp32_sinks_as_they_are() -> None:
    q, k, v = (t.float() for t in qkv())
    sinks = torch.full((4,), 1.0 + 2.0**-20)
    with torch.autocast("cpu", torch.bfloat16):
        mine = attention(q, k, v, sinks=sinks, return_lse=True)
    narrow = [t.bfloat16() for t in (q, k, v)]
    for a, b in zip(mine, attention(*narrow, sinks=sinks, return_lse=True), strict=True):
        assert torch.equal(a, b)
    assert mine[0].dtype == torch.bfloat16


# ---- torch ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("grad", [False, True])
def test_opcheck(grad: bool) -> None:
    q, k, v = (t.requires_grad_(grad) for t in qkv())
    sinks, ops = torch.zeros(4, requires_grad=grad), torch.ops.cutekernels
    given = (q, k, v, None, None, None, sinks, True, -1, -1, 0.2, 0.0, True)
    opcheck(ops.attention, given, *["test_autograd_registration"] * grad)
    if grad:
        with torch.no_grad():
            out, lse = attention(q, k, v, causal=True, sinks=sinks, return_lse=True)
        bare = [t.detach() for t in (q, k, v)]
        rest = (None, None, None, sinks.detach(), True, -1, -1, 0.25, 0.0)
        opcheck(ops.attention_backward, (out, lse, *bare, out, lse, *rest))
    else:
        lengths = torch.tensor([13, 7], dtype=torch.int32)
        given = (q, k, v, lengths, None, sinks, None, None, -1, 0.2, 0.0, True)
        opcheck(ops.decode_attention, given)


def test_compiles_without_graph_breaks() -> None:
    q, k, v = qkv()
    sinks = rows(4, seed=2).requires_grad_()

    def loss(sinks: Tensor) -> Tensor:
        return attention(q, k, v, causal=True, sinks=sinks * 2).square().sum()

    model = torch.compile(loss, fullgraph=True, backend="aot_eager")
    mine, theirs = (torch.autograd.grad(f(sinks), sinks)[0] for f in (model, loss))
    torch.testing.assert_close(mine, theirs)


# ---- the declaration ------------------------------------------------------------------------------------


def test_one_tuning_serves_calls_with_and_without() -> None:
    for op, text in ((ATTENTION, "seq_q=64 seq_kv=64"), (DECODE_ATTENTION, "seq_kv=64")):
        p = op.Problem.parse(f"batch=1 {text} heads_q=4 heads_kv=2")
        assert op.Problem.parse(f"{p} sinks=fp32").bucket() == p.bucket()
    with pytest.raises(UnsupportedProblem, match="leave them out"):
        AttentionBackwardProblem.parse("batch=1 seq_q=64 seq_kv=64 heads_q=4 heads_kv=2 sinks=same")


def test_samples_weigh_enough_to_be_seen() -> None:
    for op in (ATTENTION, DECODE_ATTENTION):
        (text,) = (text for text in op.suite if "sinks" in text)
        p = op.Problem.parse(text)
        args, at = op.sample(p, "cpu", 0), 6 if op is ATTENTION else 5
        sinks = args[at]
        assert sinks.shape == (p.heads_q,)
        (out,) = op.reference(p, *args)
        (without,) = op.reference(p.replace(sinks="none"), *args[:at], None, *args[at + 1 :])
        assert float((out - without).abs().mean()) > 0.2 * float(without.abs().mean())


# ---- kernels --------------------------------------------------------------------------------------------

PREFILL = "batch=2 seq_q=4096 seq_kv=4096 heads_q=16 heads_kv=2 causal=1"
DECODE = "batch=2 seq_kv=4096 heads_q=16 heads_kv=2"
KERNELS: dict[str, tuple[Op[Any, Any], str]] = {
    "prefill": (ATTENTION, f"{PREFILL} head_dim=64 window=left window_left=127 sinks=same"),
    "lse": (ATTENTION, f"{PREFILL} lse=1 sinks=fp32 dtype=fp16"),
    "decode": (DECODE_ATTENTION, f"{DECODE} sinks=same"),
    "pages": (DECODE_ATTENTION, f"{DECODE} head_dim=64 seq_q=4 page_size=16 lse=1 sinks=fp32"),
}


@compiled.paired(KERNELS)
def test_compiles_for_every_architecture_as_why_not_predicts(name: str, spec: gpu.GpuSpec) -> None:
    op, text = KERNELS[name]
    p = op.Problem.parse(text)
    config = op.default(p, spec)
    facts = compiled.facts(op, p, config, spec, config.smem(p).total_bytes)
    if facts.stack_bytes > 16:
        assert facts.stack_bytes <= compiled.built(op, p.replace(sinks="none"), config, spec.name).facts.stack_bytes + 8


@pytest.mark.parametrize(("change", "body"), [("sinks=same", "multistage"), ("sinks=fp32", "warpgroup")])
def test_sinks_change_the_code_of_both_bodies(change: str, body: str) -> None:
    prefill = f"{PREFILL} head_dim=32"
    p = AttentionProblem.parse(prefill)
    valid = [c for c in ATTENTION.valid(p, H200) if c.body == body]
    config = min(valid, key=lambda c: (area(c), str(c)))  # compiles fast
    assert isinstance(config, AttentionConfig)
    plain, other = (compiled.kernel(ATTENTION, q, config) for q in (p, AttentionProblem.parse(f"{prefill} {change}")))
    assert plain != other


@pytest.mark.parametrize("change", ["sinks=same", "sinks=fp32"])
def test_both_kinds_change_decode_s_code(change: str) -> None:
    compiled.changes_the_code(DECODE_ATTENTION, DecodeProblem.parse(f"{DECODE} head_dim=32"), change)
