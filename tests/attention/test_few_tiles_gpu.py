"""Attention of few tiles on a GPU that has warpgroups: split keys, folded tiles and two CTAs to an SM against fp64."""

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

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("warpgroups")]
launched = partial(cases.launched, ATTENTION)
check = partial(cases.check, ATTENTION, judge)
LENGTHS = (1, 65, 129, 300, 1000, 1024)


def few(p: AttentionProblem, **values: Any) -> list[AttentionConfig]:
    return having(ATTENTION.valid(p, gpu.detect()), body="few", **values)


@pytest.mark.parametrize("seed", range(8))
def test_random_problems_and_configs(seed: int) -> None:
    rng, fit = random.Random(seed), []
    while len(fit) < 2:
        p = random_problem(rng, LENGTHS, ("none", "same", "fp32")).replace(mask=False, varlen=False)
        fit = few(p)
    check(p, *rng.sample(fit, 2), seed=seed)


@pytest.mark.parametrize("split", [2, 4])
@pytest.mark.parametrize(
    "options", ["", "causal=1 lse=1", "window=both window_left=70 window_right=9 lse=1", "softcap=1"]
)
def test_splits_and_shares_without_a_key(split: int, options: str) -> None:
    """The first causal rows see fewer blocks than a cluster has CTAs; 900 keys are no multiple of a block."""
    p = AttentionProblem.parse(f"batch=1 seq_q=900 seq_kv=900 heads_q=4 heads_kv=2 head_dim=64 {options}")
    check(p, random.Random(f"{split} {options}").choice(few(p, split=split)), seed=1)


@pytest.mark.parametrize("seq_q", [65, 128, 129, 192, 200, 512, 1000])
@pytest.mark.parametrize("seq_kv", [64, 200, 512])
def test_folded_tiles(seq_q: int, seq_kv: int) -> None:
    """An odd number of 64 rows has its middle ones in both groups; rows ahead of the first key see nothing."""
    p = AttentionProblem(2, seq_q, seq_kv, 4, 2, head_dim=64, causal=True, lse=True)
    check(p, *few(p, order="paired", lazy=True, stages=2), seed=seq_q + seq_kv)


@pytest.mark.parametrize("options", ["", "causal=1 lse=1", "window=left window_left=200 sinks=same"])
def test_two_ctas_to_an_sm(options: str) -> None:
    p = AttentionProblem.parse(f"batch=2 seq_q=1000 seq_kv=900 heads_q=9 heads_kv=3 {options}")
    check(p, few(p, split=1, ctas_per_sm=2)[0], seed=2)


def test_the_same_bits_every_time() -> None:
    p = AttentionProblem.parse("batch=1 seq_q=1000 seq_kv=1000 heads_q=4 heads_kv=2 causal=1 lse=1")
    args = ATTENTION.sample(p, "cuda", 0)
    for config in random.Random(0).sample([c for c in few(p) if c.split > 1], 2):
        first = [t.clone() for t in launched(p, args, config)]
        for _ in range(20):
            assert all(map(torch.equal, first, launched(p, args, config)))


def test_nan_reaches_who_sees_it() -> None:
    """A value of NaN reaches the rows that see it, whichever CTA has it, and none of the blocks ahead of it."""
    p = AttentionProblem.parse("batch=1 seq_q=512 seq_kv=512 heads_q=2 heads_kv=2 head_dim=64 causal=1")
    q, k, v, *rest = ATTENTION.sample(p, "cuda", 0)
    v = v.clone()
    v[:, 300] = float("nan")
    for config in random.Random(1).sample(few(p), 3):
        (out,) = launched(p, (q, k, v, *rest), config)
        assert not out[:, :256].isnan().any() and out[:, 300:].isnan().all()


def test_in_a_graph_behind_the_kernel_that_makes_its_operands() -> None:
    """A dependent launch sets up early, and reads nothing before the kernels ahead of it are done."""
    p = AttentionProblem.parse("batch=1 seq_q=1024 seq_kv=1024 heads_q=2 heads_kv=2 head_dim=64 causal=1")
    args = [ATTENTION.sample(p, "cuda", seed)[:3] for seed in range(3)]
    for config in map(str, random.Random(2).sample(few(p), 2)):
        expected = [attention(*a, causal=True, config=config) for a in args]
        chained = [attention(want, *a[1:], causal=True, config=config) for want, a in zip(expected, args, strict=True)]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            first = [attention(*a, causal=True, config=config) for a in args]
            second = [attention(x, *a[1:], causal=True, config=config) for x, a in zip(first, args, strict=True)]
        for _ in range(5):
            for t in (*first, *second):
                t.fill_(float("nan"))
            graph.replay()
            assert all(map(torch.equal, first, expected)) and all(map(torch.equal, second, chained))
