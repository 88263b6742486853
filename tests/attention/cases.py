"""Seeded attention problems for tests: ragged lengths, every option, every kind of head dim."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from cutekernels import dispatch, verify
from cutekernels.gpu import GpuSpec
from cutekernels.op import Config, Op, Problem
from cutekernels.ops.attention.api import decode_attention
from cutekernels.ops.attention.config import AttentionConfig
from cutekernels.ops.attention.op import ATTENTION
from cutekernels.ops.attention.problem import AttentionProblem
from cutekernels.ops.attention.reference import band
from tests.on_gpu import graph_of

LENGTHS = (1, 7, 64, 65, 129, 1000)
HEAD_DIMS = (32, 40, 64, 72, 80, 96, 128, 192, 256)
GROUPS = (1, 4, 7, 8)
of_nothing = pytest.mark.parametrize(("seq_q", "seq_kv", "batch"), [(0, 5, 2), (5, 0, 2), (0, 0, 1), (3, 3, 0)])
ROUNDING = {"bf16": 2.0**-9, "fp16": 2.0**-12}  # relative error, at most


def rows(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def qkv(
    batch: int = 2, seq_q: int = 9, seq_kv: int = 13, heads_q: int = 4, heads_kv: int = 2, head_dim: int = 16
) -> tuple[Tensor, Tensor, Tensor]:
    k, v = (rows(batch, seq_kv, heads_kv, head_dim, seed=s) for s in (1, 2))
    return rows(batch, seq_q, heads_q, head_dim), k, v


def wide(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments of an op with floating-point tensors in fp64."""
    return tuple([t.double() if isinstance(t, Tensor) and t.is_floating_point() else t for t in args])


def launched(op: Op[Any, Any], p: Problem, args: tuple[Any, ...], config: Config | None = None) -> tuple[Tensor, ...]:
    """The results of a launch on the current GPU, in poisoned memory."""
    results = op.outputs(p, *args)
    verify.poison(results)
    dispatch.plan(op, p, torch.cuda.current_device(), config).launch(*results, *args)
    return results


def check(op: Op[Any, Any], judge: Callable[..., object], p: Any, *configs: Any, seed: int = 0) -> None:
    """Judges launches of ``configs``, or of the default, on a sample of the problem."""
    args = op.sample(p, "cuda", seed)
    for config in configs or (None,):
        judge(p, args, launched(op, p, args, config))


def truth(p: AttentionProblem, args: tuple[Any, ...]) -> tuple[Tensor, Tensor]:
    """``(out, lse)`` in fp64."""
    out, lse = ATTENTION.reference(p.replace(lse=True), *wide(args))
    return out, lse


def judge(op: Op[Any, Any], p: Any, args: tuple[Any, ...], results: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
    """At most twice what rounding of probabilities and of the result explains, row by row; ``(out, lse)`` in fp64."""
    out, lse = op.reference(p.replace(lse=True), *wide(args))
    errors = row_errors(results[0], out)
    assert errors.isfinite().all(), f"NaN in {p}"
    # Rounding of the result (uniform, half an ulp at most) and of probabilities, whose worst row has few of them: a
    # row of few keys rounds few, whose errors then do not average out.
    explained = 2 * ROUNDING[p.dtype] * out.square().mean(-1).sqrt() + 1e-6
    assert (errors <= 2 * explained).all(), f"{p}: {float((errors / explained).max())} times what rounding explains"
    if p.lse:
        blind = lse == -math.inf
        assert torch.equal(results[1] == -math.inf, blind)
        # Scores of 16-bit products in fp32, and exp2's two ulps.
        torch.testing.assert_close(results[1].double()[~blind], lse[~blind], rtol=1e-5, atol=1e-4)
    return out, lse


def assert_a_graph_follows(
    p: Any,
    args: tuple[Any, ...],
    attend: Callable[[], tuple[Tensor, Tensor]],
    judge: Callable[..., object],
    renew: Callable[[], object] = lambda: None,
) -> None:
    """A captured call is right whatever the lengths, queries and what else is renewed; the same bits each time."""
    attend()
    graph, (out, lse) = graph_of(attend)
    for seed in range(6):
        args[3].copy_(lengths_of(random.Random(seed), p, "cuda"))
        args[0].normal_()
        renew()
        out.fill_(math.nan)
        graph.replay()
        judge(p, args, (out, lse))
        once = out.clone()
        graph.replay()
        assert torch.equal(out, once)


def in_pages(*caches: Tensor) -> tuple[list[Tensor], Tensor]:
    """Caches of (2, 512, 2, 128) on the GPU in 64 pages in a random order, and their page table."""
    order = torch.randperm(64, device="cuda")
    pages = [torch.empty(64, 16, 2, 128, device="cuda", dtype=torch.bfloat16) for _ in caches]
    for cache, whole in zip(pages, caches, strict=True):
        cache[order] = whole.view(64, 16, 2, 128)
    return pages, order.view(2, 32).to(torch.int32)


def lengths_of(rng: random.Random, p: Any, device: str = "cpu") -> Tensor:
    """Random lengths, among them the whole room, nothing, one token, fewer than there are queries."""
    kinds = (p.seq_kv, 0, 1, min(p.seq_kv, p.seq_q - 1), rng.randint(0, p.seq_kv), rng.randint(0, p.seq_kv))
    return torch.tensor([rng.choice(kinds) for _ in range(p.batch)], dtype=torch.int32, device=device)


def over_a_cache(p: Any, args: tuple[Any, ...], **options: Any) -> Any:
    """The public function on an op's arguments."""
    q, k, v, lengths, table, sinks, _, _, scale, softcap = args
    window = (p.window_left, None) if p.window in (True, "left") else None
    return decode_attention(
        q, k, v, lengths, page_table=table, scale=scale, window=window, softcap=softcap or None, sinks=sinks, **options
    )


def opcheck(op: Any, args: tuple[Any, ...], *more: str) -> None:
    tests = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic", *more)
    torch.library.opcheck(op, args, test_utils=tests)


def written_out(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, *, causal: bool = False, softcap: float | None = None
) -> tuple[Tensor, Tensor]:
    """``(out, lse)`` as gpt-oss's eager attention has it: one more column of scores, dropped behind the softmax."""
    group = q.shape[2] // k.shape[2]
    k, v = (t.repeat_interleave(group, 2) for t in (k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(q.shape[-1])
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    seen = band(q.shape[1], k.shape[1], None, 0 if causal else None, q.device)
    column = sinks.to(scores.dtype).view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
    whole = torch.cat([scores.masked_fill(~seen, -math.inf), column], dim=-1)
    weights = whole.softmax(-1)[..., :-1]
    return torch.einsum("bhqk,bkhd->bqhd", weights, v), whole.logsumexp(-1)


def row_errors(actual: Tensor, expected: Tensor) -> Tensor:
    """Each row's root mean square error."""
    return (actual.double() - expected).square().mean(-1).sqrt()


def random_problem(
    rng: random.Random, lengths: tuple[int, ...] = LENGTHS, sinks: tuple[str, ...] = ("none",)
) -> AttentionProblem:
    causal = rng.random() < 0.5
    window = rng.choice(("none", "none", "left") if causal else ("none", "none", "left", "right", "both"))
    kind = rng.choice(("batch", "batch", "mask", "varlen"))
    heads_kv = rng.choice((1, 2))
    return AttentionProblem(
        batch=rng.choice((1, 2, 3)),
        seq_q=rng.choice(lengths),
        seq_kv=rng.choice(lengths),
        heads_q=heads_kv * rng.choice(GROUPS),
        heads_kv=heads_kv,
        window_left=rng.choice((0, 5, 64, 200)) if window in ("left", "both") else 0,
        window_right=rng.choice((0, 5, 64)) if window in ("right", "both") else 0,
        head_dim=rng.choice(HEAD_DIMS),
        dtype=rng.choice(("bf16", "fp16")),
        causal=causal,
        window=window,
        softcap=rng.random() < 0.2,
        mask=kind == "mask",
        varlen=kind == "varlen",
        lse=rng.random() < 0.5,
        sinks=rng.choice(sinks),
    )


def random_config(rng: random.Random, problem: AttentionProblem, gpu: GpuSpec) -> AttentionConfig:
    return rng.choice(list(ATTENTION.valid(problem, gpu)))


def torch_attention(p: AttentionProblem, args: tuple[object, ...]) -> Tensor:
    """The result of torch's scaled_dot_product_attention; NaN for queries that see nothing."""
    q, k, v, mask, *_, scale, _ = args
    assert isinstance(q, Tensor) and isinstance(k, Tensor) and isinstance(v, Tensor) and isinstance(scale, float)
    seen = band(q.shape[1], k.shape[1], **p.sides, device=q.device)[None, None]
    if isinstance(mask, Tensor):
        seen = seen & mask
    group = q.shape[2] // k.shape[2]
    k, v = (t.repeat_interleave(group, 2).transpose(1, 2) for t in (k, v))
    seen = seen.expand(q.shape[0], q.shape[2], -1, -1)
    return (
        functional.scaled_dot_product_attention(q.transpose(1, 2), k, v, attn_mask=seen, scale=scale)
        .transpose(1, 2)
        .masked_fill(~seen.any(-1).transpose(1, 2).unsqueeze(-1), torch.nan)
    )
