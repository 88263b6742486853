"""The warpgroup body of attention on a GPU that has it: every option crossed with ragged lengths, grids and turns."""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import pytest
import torch

from cutekernels import gpu
from cutekernels.ops.attention.api import attention
from cutekernels.ops.attention.config import AttentionConfig
from cutekernels.ops.attention.op import ATTENTION
from cutekernels.ops.attention.problem import AttentionProblem
from tests.attention import cases
from tests.attention.cases import random_problem
from tests.attention.test_gpu import judge
from tests.compiled import having
from tests.seeds import seeds

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("warpgroups")]
launched = partial(cases.launched, ATTENTION)
check = partial(cases.check, ATTENTION, judge)


def warpgroup(p: AttentionProblem, **values: Any) -> list[AttentionConfig]:
    return having(ATTENTION.valid(p, gpu.detect()), body="warpgroup", **values)


@pytest.mark.parametrize("seed", seeds(40))
def test_random_problems_and_configs(seed: int) -> None:
    rng = random.Random(seed)
    p = random_problem(rng)
    check(p, *rng.sample(warpgroup(p), 2), seed=seed)


@pytest.mark.parametrize("grid", ["tiles", "persistent", "dynamic", "ahead"])
@pytest.mark.parametrize("options", ["", "causal=1 lse=1", "varlen=1 causal=1 lse=1", "window=left window_left=70"])
def test_grids_over_many_tiles(grid: str, options: str) -> None:
    """Several tiles a CTA: barriers go round, and the counter is zero again for the next launch."""
    rng = random.Random(grid + options)
    p = AttentionProblem.parse(f"batch=5 seq_q=700 seq_kv=900 heads_q=12 heads_kv=4 head_dim=64 {options}")
    args = ATTENTION.sample(p, "cuda", 1)
    for config in rng.sample(warpgroup(p, grid=grid), 3):
        for _ in range(3):
            judge(p, args, launched(p, args, config))


@pytest.mark.parametrize("head_dim", [8, 40, 64, 72, 96, 128, 136, 192, 256])
def test_head_dims(head_dim: int) -> None:
    rng = random.Random(head_dim)
    p = AttentionProblem(2, 300, 500, 4, 2, head_dim=head_dim, causal=True, lse=True)
    check(p, *rng.sample(warpgroup(p), 3))


def test_the_same_bits_every_time() -> None:
    p = AttentionProblem.parse("batch=2 seq_q=2000 seq_kv=2000 heads_q=16 heads_kv=4 causal=1")
    args = ATTENTION.sample(p, "cuda", 0)
    for config in random.Random(0).sample(warpgroup(p, grid="dynamic"), 3):
        first = launched(p, args, config)[0].clone()
        assert all(torch.equal(first, launched(p, args, config)[0]) for _ in range(10))


def test_nan_behind_a_sequence_reaches_nobody() -> None:
    """Packed: the tile of V runs on into the next sequence, whose values are NaN."""
    q, k, v = (torch.randn(600, h, 128, device="cuda", dtype=torch.bfloat16) for h in (8, 2, 2))
    ends = torch.tensor([0, 150, 420, 600], device="cuda", dtype=torch.int32)
    p = AttentionProblem.parse("batch=3 seq_q=200 seq_kv=200 heads_q=8 heads_kv=2 varlen=1")
    for config in random.Random(1).sample(warpgroup(p), 4):
        clean = attention(q, k, v, cu_seqlens_q=ends, cu_seqlens_kv=ends, config=str(config))
        dirty_v = v.clone()
        dirty_v[150:] = float("nan")
        dirty = attention(q, k, dirty_v, cu_seqlens_q=ends, cu_seqlens_kv=ends, config=str(config))
        assert torch.equal(clean[:150], dirty[:150])


def test_views_keep_what_lies_around_them() -> None:
    """Slices of a fused projection, heads ahead of rows, one head of K for all, and an out within a larger tensor."""
    fused = torch.randn(2, 333, 12, 128, device="cuda", dtype=torch.bfloat16)
    q, k, v = fused[:, :, :8], fused[:, :, 8:10], fused[:, :, 10:]
    p = AttentionProblem.parse("batch=2 seq_q=333 seq_kv=333 heads_q=8 heads_kv=2 causal=1")
    for config in random.Random(2).sample(warpgroup(p), 3):
        text = str(config)
        expected = attention(q.contiguous(), k.contiguous(), v.contiguous(), causal=True, config=text)
        assert torch.equal(attention(q, k, v, causal=True, config=text), expected)
        ahead = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k, v)]
        assert torch.equal(attention(*ahead, causal=True, config=text), expected)
        out = torch.full((2, 335, 10, 128), 7.0, device="cuda", dtype=torch.bfloat16)
        attention(q, k, v, causal=True, out=out[:, 1:334, 1:9], config=text)
        assert torch.equal(out[:, 1:334, 1:9], expected)
        assert (out[:, 0] == 7).all() and (out[:, 334] == 7).all() and (out[:, :, 0] == 7).all()
        shared = [t[:1, :, :1].expand(2, -1, 2, -1) for t in (k, v)]  # strides of 0
        whole = [t.contiguous() for t in shared]
        assert torch.equal(
            attention(q, *shared, causal=True, config=text), attention(q, *whole, causal=True, config=text)
        )


def test_in_a_graph_and_on_two_streams() -> None:
    """The counter of tiles is a launch's own."""
    p = AttentionProblem.parse("batch=4 seq_q=1024 seq_kv=1024 heads_q=16 heads_kv=4 causal=1")
    config = str(warpgroup(p, grid="dynamic")[-1])
    args = [ATTENTION.sample(p, "cuda", seed)[:3] for seed in range(2)]
    expected = [attention(*a, causal=True, config=config) for a in args]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = [attention(*a, causal=True, config=config) for a in args for _ in range(3)]
    streams = [torch.cuda.Stream() for _ in range(2)]
    for _ in range(5):
        graph.replay()
        for stream, a, want in zip(streams, args, expected, strict=True):
            with torch.cuda.stream(stream):
                assert torch.equal(attention(*a, causal=True, config=config), want)
    torch.cuda.synchronize()
    assert all(torch.equal(got, expected[i // 3]) for i, got in enumerate(captured))
