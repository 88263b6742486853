"""Gradients of ``attention`` without a GPU: mathematics, autograd, errors, registration, what the declarations say."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from cutekernels import gpu, verify
from cutekernels.errors import UnsupportedProblem
from cutekernels.ops.attention.api import attention
from cutekernels.ops.attention.backward import ATTENTION_BACKWARD
from cutekernels.ops.attention.backward_config import AttentionBackwardProblem, passes
from cutekernels.ops.attention.delta import ATTENTION_DELTA, DeltaProblem
from cutekernels.ops.attention.reference import gradients
from tests.attention import backward_cases, cases
from tests.attention.backward_cases import CASES, PLANTED, random_backward, torch_gradients
from tests.interpreted import replies

GPUS = ("a100", "l40s", "h200", "rtx5090", "rtx3090", "h200-as-l40s")


def rows(*shape: int, seed: int = 0) -> torch.Tensor:
    return cases.rows(*shape, seed=seed).requires_grad_()


def qkv(*extents: int) -> Any:
    return tuple([t.requires_grad_() for t in cases.qkv(*extents)])


# ---- mathematics ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(40))
def test_the_reference_is_torch_s_autograd_in_fp64(seed: int) -> None:
    p = random_backward(random.Random(seed), lengths=(1, 2, 7, 20, 33))
    args = cases.wide(ATTENTION_BACKWARD.sample(p, "cpu", seed))
    ours = gradients(args[0], None, *args[1:4], *args[5:], **p.sides)
    for mine, theirs in zip(ours, torch_gradients(p, args, plain=True), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": True, "window": (4, None)},
        {"softcap": 2.0, "window": (3, 2)},
        {"scale": 1.5, "causal": True},
    ],
)
def test_gradcheck(options: dict[str, Any]) -> None:
    def both(*args: torch.Tensor) -> Any:
        out, lse = attention(*args, return_lse=True, **options)
        return out, lse.nan_to_num(neginf=0.0)

    q, k, v = qkv(1, 6, 5, 2, 1, 8)
    assert torch.autograd.gradcheck(lambda *args: attention(*args, **options), (q, k, v))
    assert torch.autograd.gradcheck(both, (q, k[:, 1:], v[:, 1:]))  # lse has a gradient too


def test_packed_sequences_are_differentiated_one_by_one() -> None:
    q, k, v = rows(11, 4, 16), rows(20, 2, 16, seed=1), rows(20, 2, 16, seed=2)
    ends_q, ends_kv = torch.tensor([0, 4, 4, 11], dtype=torch.int32), torch.tensor([0, 6, 13, 20], dtype=torch.int32)
    weights = rows(11, 4, 16, seed=5).detach()
    out = attention(q, k, v, causal=True, cu_seqlens_q=ends_q, cu_seqlens_kv=ends_kv)
    packed = torch.autograd.grad((out * weights).sum(), (q, k, v))
    for begin_q, end_q, begin_kv, end_kv in ((0, 4, 0, 6), (4, 11, 13, 20)):
        own = [q[None, begin_q:end_q], k[None, begin_kv:end_kv], v[None, begin_kv:end_kv]]
        alone = torch.autograd.grad((attention(*own, causal=True)[0] * weights[begin_q:end_q]).sum(), own)
        torch.testing.assert_close(packed[0][begin_q:end_q], alone[0][0])
        for together, one in zip(packed[1:], alone[1:], strict=True):
            torch.testing.assert_close(together[begin_kv:end_kv], one[0])
    assert (packed[1][6:13] == 0).all()  # the second sequence has no queries


def test_queries_that_see_nothing_have_no_gradient() -> None:
    q, k, v = qkv(1, 5, 2, 2, 1)
    out, lse = attention(q, k, v, causal=True, return_lse=True)
    dq, dk, dv = torch.autograd.grad(out.square().sum() + lse[:, :, 3:].sum(), (q, k, v))
    assert (dq[:, :3] == 0).all()
    assert (dq[:, 3:] != 0).any()
    assert all(t.isfinite().all() for t in (dk, dv))


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_nothing_sees_may_hold_anything(bad: float, softcap: float | None) -> None:
    """Key 3, which no query sees, and query 1, which sees no key."""
    mask = torch.ones(1, 1, 3, 4, dtype=torch.bool)
    mask[..., 3] = mask[..., 1, :] = False
    found = []
    for value in (0.0, bad):
        q, k, v = (t.detach() for t in qkv(1, 3, 4, 2, 1))
        q[:, 1] = k[:, 3] = v[:, 3] = value
        leaves = tuple([t.requires_grad_() for t in (q, k, v)])
        out = attention(*leaves, mask=mask, softcap=softcap)
        found.append((out, *torch.autograd.grad(out.square().sum(), leaves)))
    for clean, one in zip(*found, strict=True):
        assert torch.equal(clean, one)


@pytest.mark.filterwarnings("ignore::UserWarning")  # vmap has no rule for the op
@pytest.mark.parametrize("return_lse", [False, True])
def test_gradients_pass_through_vmap(return_lse: bool) -> None:
    def of(q: torch.Tensor) -> torch.Tensor:
        made = attention(q[None], q[None], q[None], return_lse=return_lse)
        return made[0] if return_lse else made

    x = rows(2, 3, 2, 8)
    expected = torch.autograd.grad(attention(x, x, x).square().sum(), x)[0]
    torch.testing.assert_close(torch.autograd.grad(torch.vmap(of)(x).square().sum(), x)[0], expected)
    with torch.no_grad():
        assert not torch.vmap(of)(x).requires_grad


@cases.of_nothing
def test_empty_extents_give_zeros(seq_q: int, seq_kv: int, batch: int) -> None:
    q, k, v = qkv(batch, seq_q, seq_kv)
    for t, grad in zip((q, k, v), torch.autograd.grad(attention(q, k, v).sum(), (q, k, v)), strict=True):
        assert grad.shape == t.shape
        assert (grad == 0).all()


def test_half_precision_is_rounded_once() -> None:
    q, k, v = (t.detach().bfloat16().requires_grad_() for t in qkv())
    dout = rows(*q.shape, seed=7).detach().bfloat16()
    wide = [t.detach().double().requires_grad_() for t in (q, k, v)]
    narrow = torch.autograd.grad(attention(q, k, v, causal=True), (q, k, v), dout)
    exact = torch.autograd.grad(attention(*wide, causal=True), wide, dout.double())
    for mine, truth in zip(narrow, exact, strict=True):
        assert mine.dtype == torch.bfloat16
        assert torch.equal(mine, truth.bfloat16())


# ---- autograd -------------------------------------------------------------------------------------------


def test_only_what_is_asked_for_has_a_gradient() -> None:
    q, k, v = qkv()
    whole = torch.autograd.grad(attention(q, k, v).square().sum(), (q, k, v))
    out = attention(q.detach(), k, v.detach())
    assert out.requires_grad
    torch.testing.assert_close(torch.autograd.grad(out.square().sum(), k)[0], whole[1])
    with torch.no_grad():
        assert not attention(q, k, v).requires_grad
    assert not attention(q.detach(), k.detach(), v.detach()).requires_grad


def test_lse_alone_has_a_gradient() -> None:
    q, k, v = qkv()
    lse = attention(q, k, v, return_lse=True)[1]
    dq, dv = torch.autograd.grad(lse.sum(), (q, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k.repeat_interleave(2, 2)) / 4
    torch.testing.assert_close(dq, torch.autograd.grad(scores.logsumexp(-1).sum(), q)[0])
    assert (dv == 0).all()


def test_a_mask_and_its_broadcasts() -> None:
    q, k, v = qkv()
    seen = torch.rand(1, 4, 9, 13, generator=torch.Generator().manual_seed(4)) < 0.6
    grads = torch.autograd.grad(attention(q, k, v, mask=seen).square().sum(), (q, k, v))
    again = torch.autograd.grad(
        attention(q, k, v, mask=seen.expand(2, -1, -1, -1).contiguous()).square().sum(), (q, k, v)
    )
    assert all(map(torch.equal, grads, again))


def refused(message: str, *args: Any) -> None:
    with pytest.raises(UnsupportedProblem, match=message):
        torch.ops.cutekernels.attention_backward(*args)


def test_errors_name_rule_value_and_remedy() -> None:
    q, k, v = (t.detach() for t in qkv())
    out, lse = attention(q, k, v, return_lse=True)
    rest = (None, None, None, None, False, -1, -1, 0.25, 0.0)
    torch.ops.cutekernels.attention_backward(out, lse, q, k, v, out, lse, *rest)
    refused(r"dout must be \(2, 9, 4, 16\), .*, as q is", out[:, :-1], None, q, k, v, out, lse, *rest)
    refused("out must be .* it is .*float32, on cpu, as q is", out, None, q, k, v, out.float(), lse, *rest)
    refused("call attention with return_lse", out, None, q, k, v, out, lse[:0], *rest)
    refused("dlse must be", out, lse.float(), q, k, v, out, lse, *rest)
    refused("takes k in float64; got torch.float32", out, None, q, k.float(), v.float(), out, lse, *rest)


def test_what_has_no_gradient_says_so() -> None:
    q, k, v = qkv()
    (dq,) = torch.autograd.grad(attention(q, k, v).square().sum(), q, create_graph=True)
    with pytest.raises(UnsupportedProblem, match="differentiable once"):
        dq.sum().backward()
    bare = torch.ops.cutekernels.attention(q, k, v, None, None, None, None, False, -1, -1, 0.25, 0.0, False)[0]
    with pytest.raises(UnsupportedProblem, match="return_lse=True"):
        bare.sum().backward()


# ---- torch ----------------------------------------------------------------------------------------------


def test_opcheck() -> None:
    q, k, v = qkv()
    options = (True, 4, -1, 0.25, 5.0)
    with torch.no_grad():
        out, lse = attention(q, k, v, causal=True, window=(4, None), softcap=5.0, return_lse=True)
    given = [t.detach() for t in (q, k, v)]
    ops, nothing = torch.ops.cutekernels, [None] * 4
    cases.opcheck(ops.attention_backward, (out, None, *given, out, lse, *nothing, *options))
    cases.opcheck(ops.attention, (q, k, v, *nothing, *options, True), "test_autograd_registration")


# ---- attention_delta ------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def interpreted() -> dict[str, dict[str, Any]]:
    given = CASES | PLANTED
    return dict(zip(given, replies(backward_cases.__file__, list(given.values())), strict=True))


@pytest.mark.parametrize("case", CASES)
def test_delta_s_kernel_is_right(interpreted: dict[str, dict[str, Any]], case: str) -> None:
    reply = interpreted[case]
    assert reply["error"] < 1e-4, reply  # sums of 256 fp32 products
    assert reply["outside"], "wrote outside of its result"


@pytest.mark.parametrize("bug", PLANTED)
def test_a_planted_bug_in_delta_is_caught(interpreted: dict[str, dict[str, Any]], bug: str) -> None:
    assert interpreted[bug]["error"] > 1e-3


@pytest.mark.parametrize("name", GPUS)
def test_delta_has_a_default_for_every_problem(name: str) -> None:
    spec = gpu.lookup(name)
    for head_dim in (8, 40, 64, 128, 256):
        for seq in (0, 1, 1000, 100_000):
            p = DeltaProblem(2, seq, 8, head_dim)
            config = ATTENTION_DELTA.default(p, spec)
            assert ATTENTION_DELTA.why_not(p, config, spec) is None


# ---- the declaration ------------------------------------------------------------------------------------


@pytest.mark.parametrize("head_dim", [8, 32, 64, 96, 128, 192, 200, 256])
def test_the_passes_give_each_gradient_once(head_dim: int) -> None:
    assert sorted("".join(passes(head_dim))) == ["k", "q", "v"]


def test_problems_that_are_none() -> None:
    base = "batch=1 seq_q=4096 seq_kv=4096 heads_q=16 heads_kv=16"
    with pytest.raises(UnsupportedProblem, match="ask for of=k and of=v"):
        AttentionBackwardProblem.parse(f"{base} head_dim=256")
    with pytest.raises(UnsupportedProblem, match="leave it out"):
        AttentionBackwardProblem.parse(f"{base} lse=1")
    for words in ("varlen=1", "softcap=1", "head_dim=192"):
        with pytest.raises(UnsupportedProblem, match="ask for of=kv and of=q"):
            AttentionBackwardProblem.parse(f"{base} of=qkv {words}")


@pytest.mark.parametrize("words", ["", "causal=1"])
@pytest.mark.parametrize("of", ["kv", "q"])
def test_the_tolerance_catches_a_tile_left_out(of: str, words: str) -> None:
    p = AttentionBackwardProblem.parse(f"batch=1 seq_q=512 seq_kv=512 heads_q=2 heads_kv=1 {words} of={of}")
    args = ATTENTION_BACKWARD.sample(p, "cpu", 0)
    expected, depth = ATTENTION_BACKWARD.reference(p, *args), ATTENTION_BACKWARD.work(p).depth
    walked = (0, 1) if p.by_keys else (2, 3)  # dout and q, or k and v
    read = [t.clone() if i in walked else t for i, t in enumerate(args[:4])]
    for i in walked:
        read[i][:, 256:288] = 0.0
    wrong = ATTENTION_BACKWARD.reference(p, *read, *args[4:])
    assert verify.worst_error(wrong, expected, 0.0, depth=depth) > 2
    assert verify.worst_error(expected, expected, 0.0, depth=depth) == 0


def test_work_counts_the_products_of_the_pass() -> None:
    base = "batch=2 seq_q=100 seq_kv=70 heads_q=4 heads_kv=2 causal=1"
    flops = {of: ATTENTION_BACKWARD.work(AttentionBackwardProblem.parse(f"{base} of={of}")).flops for of in "qkv"}
    together = ATTENTION_BACKWARD.work(AttentionBackwardProblem.parse(base)).flops
    assert flops["q"] == flops["k"] == together * 3 / 4
    assert flops["v"] == together / 2
    assert ATTENTION_BACKWARD.work(AttentionBackwardProblem.parse(f"{base} of=qkv")).flops == together * 5 / 4
