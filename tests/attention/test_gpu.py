"""Attention on a GPU: judged against fp64 and beside torch's own error, options crossed with ragged lengths."""

from __future__ import annotations

import math
import random
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from cutekernels import gpu
from cutekernels.ops.attention.api import attention
from cutekernels.ops.attention.op import ATTENTION
from cutekernels.ops.attention.problem import AttentionProblem
from cutekernels.ops.attention.reference import attention as reference
from tests.attention import cases
from tests.attention.cases import (
    LENGTHS,
    ROUNDING,
    of_nothing,
    random_config,
    random_problem,
    row_errors,
    torch_attention,
    truth,
)
from tests.on_gpu import graph_of, needs_memory
from tests.seeds import seeds

pytestmark = pytest.mark.gpu


launched = partial(cases.launched, ATTENTION)


def judge(p: AttentionProblem, args: tuple[Any, ...], results: tuple[Tensor, ...]) -> None:
    """At most twice torch's own error, row by row; where torch has none, twice what rounding P and out explains."""
    out, _ = cases.judge(ATTENTION, p, args, results)
    if not p.varlen and not p.softcap and p.sinks == "none":
        errors, theirs = row_errors(results[0], out), row_errors(torch_attention(p, args), out)
        explained = 2 * ROUNDING[p.dtype] * out.square().mean(-1).sqrt() + 1e-6
        seen = ~theirs.isnan()
        worst = float(theirs[seen].max()) if seen.any() else 0.0
        assert float(errors.max()) <= 2 * worst + float(explained.max()) * 0.1, (
            f"{p}: {float(errors.max())} > 2x{worst}"
        )


check = partial(cases.check, ATTENTION, judge)


@pytest.mark.parametrize("text", ATTENTION.suite[3:])
def test_the_suite_is_right_and_as_exact_as_torch(text: str) -> None:
    p = AttentionProblem.parse(text)
    check(p)


@pytest.mark.parametrize("seed", seeds(30))
def test_random_configs_are_right(seed: int) -> None:
    rng = random.Random(seed)
    p = random_problem(rng)
    check(p, random_config(rng, p, gpu.detect()), seed=seed)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("seq_kv", LENGTHS)
@pytest.mark.parametrize("seq_q", LENGTHS)
def test_ragged_lengths(seq_q: int, seq_kv: int, causal: bool) -> None:
    p = AttentionProblem(2, seq_q, seq_kv, 4, 2, head_dim=64, causal=causal, lse=True)
    check(p, seed=seq_q + seq_kv)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_large_logits_neither_overflow_nor_lose_their_way(dtype: torch.dtype) -> None:
    """|q k| up to about 1e3 after scaling: a row's softmax is nearly one key's value."""
    name = {torch.bfloat16: "bf16", torch.float16: "fp16"}[dtype]
    p = AttentionProblem(1, 300, 1000, 4, 4, dtype=name, causal=True, lse=True)
    q, k, *rest = ATTENTION.sample(p, "cuda", 3)
    args = (q * 16, k * 16, *rest)
    out, lse = launched(p, args)
    expected, expected_lse = truth(p, args)
    assert out.isfinite().all()
    seen = expected_lse.isfinite()
    assert float(expected_lse[seen].max()) > 500
    torch.testing.assert_close(lse.double()[seen], expected_lse[seen], rtol=1e-5, atol=1e-2)
    theirs = row_errors(torch_attention(p, args).nan_to_num(), expected)
    assert float(row_errors(out, expected).max()) <= 2 * float(theirs.max()) + 1e-3


def test_scores_that_climb_block_by_block_move_the_reference() -> None:
    """Lazy rescaling: each block of keys exceeds the ones before by more, or by less, than its slack."""
    for step in (0.5, 3.0, 20.0):
        q = torch.ones(1, 64, 1, 64, device="cuda", dtype=torch.bfloat16)
        blocks = torch.arange(1024, device="cuda").flip(0) // 64 * step  # blocks are walked from the last
        k = (blocks / 64).view(1, -1, 1, 1).expand(1, -1, 1, 64).to(torch.bfloat16).contiguous()
        v = torch.randn(1, 1024, 1, 64, device="cuda", dtype=torch.bfloat16)
        out = attention(q, k, v, scale=1.0)
        expected, _ = reference(q.double(), k.double(), v.double(), *[None] * 4, 1.0, 0.0, left=None, right=None)
        assert float(row_errors(out, expected).max()) <= 2.0**-8 * float(expected.square().mean().sqrt()) + 1e-4


def test_slices_of_a_fused_projection_are_read_in_place() -> None:
    fused = torch.randn(2, 129, 12, 128, device="cuda", dtype=torch.bfloat16)
    q, k, v = fused[:, :, :8], fused[:, :, 8:10], fused[:, :, 10:]
    before = torch.cuda.memory_allocated()
    out = attention(q, k, v, causal=True)
    assert torch.equal(out, attention(q.contiguous(), k.contiguous(), v.contiguous(), causal=True))
    transposed = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k, v)]
    assert torch.equal(out, attention(*transposed, causal=True))
    odd = [torch.nn.functional.pad(t, (1, 1))[..., 1:-1] for t in (q, k, v)]
    assert torch.equal(out, attention(*odd, causal=True))
    into = torch.full((2, 8, 129, 128), math.nan, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
    attention(q, k, v, causal=True, out=into)
    assert torch.equal(out, into)
    assert before > 0


@of_nothing
def test_empty_extents(seq_q: int, seq_kv: int, batch: int) -> None:
    q = torch.randn(batch, seq_q, 4, 64, device="cuda", dtype=torch.bfloat16)
    k = torch.randn(batch, seq_kv, 2, 64, device="cuda", dtype=torch.bfloat16)
    out, lse = attention(q, k, k, return_lse=True)
    assert out.shape == q.shape
    assert (out == 0).all()
    assert lse.shape == (batch, 4, seq_q)
    assert (lse == -math.inf).all()


def test_packed_sequences_with_empty_ones_among_them() -> None:
    q, k, v = (torch.randn(500, h, 64, device="cuda", dtype=torch.bfloat16) for h in (4, 2, 2))
    ends_q = torch.tensor([0, 0, 200, 200, 201, 500], device="cuda", dtype=torch.int32)
    ends_kv = torch.tensor([0, 100, 100, 130, 333, 500], device="cuda", dtype=torch.int32)
    out, lse = attention(q, k, v, causal=True, cu_seqlens_q=ends_q, cu_seqlens_kv=ends_kv, return_lse=True)
    assert (out[:200] == 0).all()  # the second sequence has no keys
    assert (lse[:, :200] == -math.inf).all()
    for begin, end, begin_kv, end_kv in ((200, 201, 130, 333), (201, 500, 333, 500)):
        alone = attention(q[None, begin:end], k[None, begin_kv:end_kv], v[None, begin_kv:end_kv], causal=True)
        torch.testing.assert_close(out[begin:end], alone[0], rtol=2e-2, atol=2e-3)


def test_what_no_query_sees_may_be_anything() -> None:
    """NaN behind the last visible key, and behind the tensors' ends."""
    memory = torch.full((2, 300, 2, 64), math.nan, device="cuda", dtype=torch.bfloat16)
    memory[:, :77] = torch.randn(2, 77, 2, 64, device="cuda", dtype=torch.bfloat16)
    q = torch.randn(2, 33, 4, 64, device="cuda", dtype=torch.bfloat16)
    short = memory[:, :77]
    out = attention(q, short, short, causal=True)
    assert out.isfinite().all()
    assert torch.equal(out, attention(q, short.clone(), short.clone(), causal=True))


def test_captures_into_a_graph_and_compiles() -> None:
    q, k, v = (torch.randn(1, 200, 4, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    expected = attention(q, k, v, causal=True)
    graph, out = graph_of(lambda: attention(q, k, v, causal=True))
    out.fill_(math.nan)
    graph.replay()
    assert torch.equal(out, expected)
    compiled = torch.compile(lambda q: attention(q, k, v, causal=True), fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(q), expected)


def test_a_planted_bug_is_caught() -> None:
    """A key too many in one row of a causal problem."""
    p = AttentionProblem(1, 200, 200, 2, 2, head_dim=64, causal=True)
    args = ATTENTION.sample(p, "cuda", 0)
    (out,) = launched(p, args)
    judge(p, args, (out,))
    wrong = p.replace(causal=False, window="right", window_right=1)
    (late,) = launched(wrong, args)
    out[:, 150] = late[:, 150]
    with pytest.raises(AssertionError, match="times what rounding explains|> 2x"):
        judge(p, args, (out,))


@pytest.mark.slow
def test_more_than_2_to_the_31_elements() -> None:
    """Keys and values of 2^31 elements and more, of which the last rows matter."""
    needs_memory(24)
    seq = 2**31 // (8 * 128) + 192
    k = torch.zeros(1, seq, 8, 128, device="cuda", dtype=torch.bfloat16)
    v = torch.zeros(1, seq, 8, 128, device="cuda", dtype=torch.bfloat16)
    q = torch.randn(1, 64, 8, 128, device="cuda", dtype=torch.bfloat16)
    k[:, -96:], v[:, -96:] = torch.randn(2, 1, 96, 8, 128, device="cuda", dtype=torch.bfloat16)
    out = attention(q, k, v, causal=True, window=(31, None))
    tail = attention(q, k[:, -96:].clone(), v[:, -96:].clone(), causal=True, window=(31, None))
    torch.testing.assert_close(out, tail, rtol=2e-2, atol=2e-3)
