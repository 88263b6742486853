"""Attention's gradients on a GPU: judged against fp64 and beside torch's own error, options crossed with lengths."""

from __future__ import annotations

import math
import random
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from cutekernels import dispatch, gpu, verify
from cutekernels.ops.attention.api import attention
from cutekernels.ops.attention.backward import ATTENTION_BACKWARD
from cutekernels.ops.attention.backward_config import AttentionBackwardProblem, passes
from cutekernels.ops.attention.delta import ATTENTION_DELTA, DeltaProblem
from tests.attention import cases
from tests.attention.backward_cases import chosen, random_backward, random_config, torch_gradients
from tests.attention.cases import ROUNDING, of_nothing, row_errors
from tests.on_gpu import graph_of
from tests.seeds import seeds

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("one_seed")]


launched = partial(cases.launched, ATTENTION_BACKWARD)


def truth(p: AttentionBackwardProblem, args: tuple[Any, ...]) -> tuple[Tensor, ...]:
    """The gradients in fp64."""
    return ATTENTION_BACKWARD.reference(p, *cases.wide(args))


def judge(p: AttentionBackwardProblem, args: tuple[Any, ...], results: tuple[Tensor, ...]) -> None:
    """Each gradient's worst row and whole are off by at most twice torch's own error and a tenth of its rounding."""
    peers = chosen(p.of, torch_gradients(p, args, plain=p.softcap))
    for name, mine, theirs, exact in zip(p.of, results, peers, truth(p, args), strict=True):
        assert mine.isfinite().all(), f"d{name} of {p} is not finite"
        if exact.numel() == 0:
            continue
        errors, peer = row_errors(mine, exact), row_errors(theirs, exact)
        rounding = ROUNDING[p.dtype] * exact.square().mean(-1).sqrt()
        worst, allowed = float(errors.max()), 2 * float(peer.max()) + 0.1 * float(rounding.max()) + 1e-6
        assert worst <= allowed, f"d{name} of {p}: a row is off by {worst} > {allowed}"
        whole = float(errors.square().mean().sqrt())
        allowed = 2 * float(peer.square().mean().sqrt()) + 0.1 * float(rounding.square().mean().sqrt()) + 1e-6
        assert whole <= allowed, f"d{name} of {p}: off by {whole} > {allowed}"


check = partial(cases.check, ATTENTION_BACKWARD, judge)


@pytest.mark.parametrize("text", ATTENTION_BACKWARD.suite[6:])
def test_the_suite_is_right_and_as_exact_as_torch(text: str) -> None:
    p = AttentionBackwardProblem.parse(text)
    check(p)


@pytest.mark.parametrize("seed", seeds(30))
def test_random_configs_are_right(seed: int) -> None:
    rng = random.Random(seed)
    p = random_backward(rng)
    check(p, random_config(rng, p, gpu.detect()), seed=seed)


@pytest.mark.parametrize("of", ["kv", "q"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("seq_kv", [1, 7, 64, 65, 129, 300])
@pytest.mark.parametrize("seq_q", [1, 7, 64, 65, 129, 300])
def test_ragged_lengths(seq_q: int, seq_kv: int, causal: bool, of: str) -> None:
    p = AttentionBackwardProblem(2, seq_q, seq_kv, 4, 2, head_dim=64, causal=causal, of=of)
    check(p, seed=seq_q + seq_kv)


@pytest.mark.parametrize("text", ATTENTION_DELTA.suite)
def test_statistics_are_right(text: str) -> None:
    p = DeltaProblem.parse(text)
    args = ATTENTION_DELTA.sample(p, "cuda", 0)
    (stats,) = ATTENTION_DELTA.outputs(p, *args)
    verify.poison((stats,))
    dispatch.plan(ATTENTION_DELTA, p, torch.cuda.current_device()).launch(stats, *args)
    torch.testing.assert_close(stats, ATTENTION_DELTA.evaluate(*args)[0], rtol=1e-5, atol=1e-4)


# ---- the whole way --------------------------------------------------------------------------------------


def qkv(
    batch: int = 2, seq_q: int = 300, seq_kv: int = 333, heads_q: int = 8, heads_kv: int = 2, head_dim: int = 128
) -> list[Tensor]:
    shapes = (batch, seq_q, heads_q, head_dim), *[(batch, seq_kv, heads_kv, head_dim)] * 2
    return [torch.randn(shape, device="cuda", dtype=torch.bfloat16).requires_grad_() for shape in shapes]


def against_fp64(tensors: list[Tensor], **options: Any) -> None:
    """All three gradients of a weighted sum, compared with the CPU's in fp64."""
    wide = [t.detach().double().cpu().requires_grad_() for t in tensors]
    moved = {name: o.cpu() if isinstance(o, Tensor) else o for name, o in options.items()}
    dout = torch.randn_like(tensors[0])
    ours = torch.autograd.grad(attention(*tensors, **options), tensors, dout)
    exact = torch.autograd.grad(attention(*wide, **moved), wide, dout.double().cpu())
    for name, mine, right in zip("qkv", ours, exact, strict=True):
        size = float(right.square().mean().sqrt())
        error = float((mine.cpu().double() - right).square().mean().sqrt())
        assert error <= 4 * 2.0**-9 * size + 1e-6, f"d{name}: {error} of {size}"


@pytest.mark.parametrize(
    ("head_dim", "options"),
    [
        (40, {"causal": True}),
        (64, {}),
        (64, {"window": (30, 9), "softcap": 5.0}),
        (128, {"causal": True, "window": (100, None), "scale": 0.2}),
        (192, {"causal": True}),
        (256, {}),
        (256, {"causal": True, "softcap": 5.0}),
    ],
)
def test_autograd_gives_the_gradients(head_dim: int, options: dict[str, Any]) -> None:
    against_fp64(qkv(1, 130, 200, 4, 2, head_dim), **options)


def test_packed_sequences_and_masks() -> None:
    q, k, v = [torch.randn(500, h, 64, device="cuda", dtype=torch.bfloat16).requires_grad_() for h in (4, 2, 2)]
    ends_q = torch.tensor([0, 0, 200, 200, 201, 500], device="cuda", dtype=torch.int32)
    ends_kv = torch.tensor([0, 100, 100, 130, 333, 500], device="cuda", dtype=torch.int32)
    against_fp64([q, k, v], causal=True, cu_seqlens_q=ends_q, cu_seqlens_kv=ends_kv)
    grads = torch.autograd.grad(
        attention(q, k, v, cu_seqlens_q=ends_q, cu_seqlens_kv=ends_kv).float().square().sum(), (q, k, v)
    )
    assert (grads[0][:200] == 0).all()  # the second sequence has no keys
    assert (grads[1][:130] == 0).all()  # the first and the third have no queries
    seen = torch.rand(1, 8, 300, 333, device="cuda") < 0.5
    seen[:, :, 17] = False
    tensors = qkv()
    against_fp64(tensors, mask=seen)
    (dq,) = torch.autograd.grad(attention(*tensors, mask=seen).float().sum(), tensors[0])
    assert (dq[:, 17] == 0).all()


def test_the_log_sum_exp_has_a_gradient_too() -> None:
    q, k, v = qkv()
    wide = [t.detach().double().cpu().requires_grad_() for t in (q, k, v)]

    def loss(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out, lse = attention(q, k, v, causal=True, return_lse=True)
        return out.double().square().sum() + lse.double().square().sum()

    ours = torch.autograd.grad(loss(q, k, v), (q, k, v))
    for mine, right in zip(ours, torch.autograd.grad(loss(*wide), wide), strict=True):
        error = float((mine.cpu().double() - right).square().mean().sqrt())
        assert error <= 6 * 2.0**-9 * float(right.square().mean().sqrt())


def test_gradients_are_the_same_each_time() -> None:
    tensors = qkv(4, 777, 777, 8, 2)
    dout = torch.randn_like(tensors[0])
    first = torch.autograd.grad(attention(*tensors, causal=True), tensors, dout)
    for _ in range(5):
        again = torch.autograd.grad(attention(*tensors, causal=True), tensors, dout)
        assert all(map(torch.equal, first, again))


def test_operands_may_lie_anyhow() -> None:
    fused = torch.randn(2, 129, 12, 128, device="cuda", dtype=torch.bfloat16).requires_grad_()
    parts = fused[:, :, :8], fused[:, :, 8:10], fused[:, :, 10:]
    (whole,) = torch.autograd.grad(attention(*parts, causal=True).sum(), fused)  # an expanded dout
    dense = [t.detach().clone().requires_grad_() for t in parts]
    apart = torch.autograd.grad(attention(*dense, causal=True), dense, torch.ones_like(dense[0]))
    assert torch.equal(whole, torch.cat(apart, dim=2))
    dout = torch.randn(2, 8, 129, 128, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
    ours = torch.autograd.grad(attention(*dense), dense, dout)
    assert all(map(torch.equal, ours, torch.autograd.grad(attention(*dense), dense, dout.contiguous())))


@of_nothing
def test_empty_extents_give_zeros(seq_q: int, seq_kv: int, batch: int) -> None:
    tensors = qkv(batch, seq_q, seq_kv, 4, 2, 64)
    for t, grad in zip(tensors, torch.autograd.grad(attention(*tensors).sum(), tensors), strict=True):
        assert grad.shape == t.shape
        assert (grad == 0).all()


def test_queries_that_see_nothing_and_large_logits_leave_no_nan() -> None:
    q, k, v = qkv(1, 200, 77, 4, 2)  # causal: the first 123 queries see nothing
    loud = [(t * 16).detach().requires_grad_() for t in (q, k)]
    out = attention(*loud, v, causal=True)
    grads = torch.autograd.grad(out, [*loud, v], torch.randn_like(out))
    assert all(t.isfinite().all() for t in grads)
    assert (grads[0][:, :123] == 0).all()


def test_what_lies_behind_the_ends_may_be_anything() -> None:
    """NaN behind the last key and the last query, in memory that tiles cover."""
    memory = [torch.full((1, 300, 4, 64), math.nan, device="cuda", dtype=torch.bfloat16) for _ in range(4)]
    with torch.no_grad():
        for t in memory:
            t[:, :77] = torch.randn(1, 77, 4, 64, device="cuda", dtype=torch.bfloat16)
    short = [t[:, :77].requires_grad_() for t in memory[:3]]
    grads = torch.autograd.grad(attention(*short, causal=True), short, memory[3][:, :77])
    dense = [t.detach().clone().requires_grad_() for t in short]
    again = torch.autograd.grad(attention(*dense, causal=True), dense, memory[3][:, :77].clone())
    assert all(map(torch.equal, grads, again))


def test_captures_into_a_graph_and_compiles() -> None:
    tensors = qkv(1, 200, 200, 4, 4, 64)
    dout = torch.randn_like(tensors[0])

    def gradients() -> tuple[Tensor, ...]:
        return torch.autograd.grad(attention(*tensors, causal=True), tensors, dout)

    expected = gradients()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        gradients()
    torch.cuda.current_stream().wait_stream(side)
    graph, captured = graph_of(gradients)
    for t in captured:
        t.fill_(math.nan)
    graph.replay()
    assert all(map(torch.equal, captured, expected))
    compiled = torch.compile(lambda *t: attention(*t, causal=True), fullgraph=True, backend="aot_eager")
    assert all(map(torch.equal, torch.autograd.grad(compiled(*tensors), tensors, dout), expected))


@pytest.mark.parametrize("of", ["kv", "q"])
def test_a_planted_bug_is_caught(of: str) -> None:
    """A key too many for each query of a causal problem."""
    p = AttentionBackwardProblem(1, 200, 200, 2, 2, head_dim=64, causal=True, of=of)
    assert of in passes(64)
    args = ATTENTION_BACKWARD.sample(p, "cuda", 0)
    judge(p, args, launched(p, args))
    wrong = p.replace(causal=False, window="right", window_right=1)
    with pytest.raises(AssertionError, match="off by"):
        judge(p, args, launched(wrong, args))
