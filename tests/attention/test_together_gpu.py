"""All gradients of attention in one kernel, on a GPU with warpgroup MMA."""

from __future__ import annotations

import random
from functools import partial

import pytest
import torch

from cutekernels import gpu
from cutekernels.ops.attention.together import ATTENTION_GRADIENTS, AttentionGradientsConfig, AttentionGradientsProblem
from cutekernels.verify import worst_error
from tests.attention import cases

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("one_cache_one_seed")]
launched = partial(cases.launched, ATTENTION_GRADIENTS)
OPTIONS = ("", "causal=1", "window=left window_left=70", "window=both window_left=300 window_right=20", "dtype=fp16")


@pytest.fixture(autouse=True)
def _needs_warpgroups() -> None:
    if not gpu.detect().has_wgmma:
        pytest.skip("no warpgroup MMA here")


def judge(p: AttentionGradientsProblem, config: AttentionGradientsConfig, seed: int = 0) -> None:
    args = ATTENTION_GRADIENTS.sample(p, "cuda", seed)
    expected, work = ATTENTION_GRADIENTS.reference(p, *args), ATTENTION_GRADIENTS.work(p)
    for _ in range(3):  # the numbers are zero again
        assert worst_error(launched(p, args, config), expected, work.flops, depth=work.depth) <= 1


def fused(p: AttentionGradientsProblem) -> list[AttentionGradientsConfig]:
    return [c for c in ATTENTION_GRADIENTS.valid(p, gpu.detect()) if c.path == "fused"]


@pytest.mark.parametrize("head_dim", [48, 64, 112, 128])
@pytest.mark.parametrize("options", OPTIONS)
def test_ragged_lengths(head_dim: int, options: str) -> None:
    rng = random.Random(options + str(head_dim))
    for _ in range(4):
        lengths = rng.choice([1, 64, 129, 500, 1000]), rng.choice([1, 127, 128, 300, 1025])
        p = AttentionGradientsProblem.parse(
            f"batch=2 seq_q={lengths[0]} seq_kv={lengths[1]} heads_q=4 heads_kv={rng.choice([1, 2, 4])} "
            f"head_dim={head_dim} {options}"
        )
        judge(p, rng.choice(fused(p)))


@pytest.mark.parametrize("order", ["rows", "l2", "heads"])
@pytest.mark.parametrize("options", OPTIONS[:2])
def test_many_tiles(order: str, options: str) -> None:
    for head_dim in (64, 128):
        p = AttentionGradientsProblem.parse(
            f"batch=3 seq_q=2000 seq_kv=2100 heads_q=24 heads_kv=8 head_dim={head_dim} {options}"
        )
        judge(p, AttentionGradientsConfig("fused", 2, order))


def test_the_same_bits_every_time() -> None:
    p = AttentionGradientsProblem.parse("batch=2 seq_q=2000 seq_kv=2000 heads_q=16 heads_kv=4 causal=1")
    args = ATTENTION_GRADIENTS.sample(p, "cuda", 0)
    for config in fused(p):
        first = [t.clone() for t in launched(p, args, config)]
        for _ in range(10):
            assert all(map(torch.equal, first, launched(p, args, config)))


def test_the_chain_gives_the_same_gradients_as_its_kernels() -> None:
    p = AttentionGradientsProblem.parse("batch=2 seq_q=300 seq_kv=300 heads_q=8 heads_kv=2 head_dim=256 causal=1")
    judge(p, AttentionGradientsConfig("chain", 2, "rows"))


def test_keys_that_do_not_exist_leave_no_nan() -> None:
    """Scores of -300 everywhere: a missing key's probability, exp(0 - lse), would be infinite."""
    p = AttentionGradientsProblem.parse("batch=1 seq_q=200 seq_kv=200 heads_q=2 heads_kv=2")
    dout, q, k, v, stats, *rest = ATTENTION_GRADIENTS.sample(p, "cuda", 0)
    q, k = torch.full_like(q, 5.0), torch.full_like(k, -5.0)
    stats = stats.clone()
    stats[0] = -5.0 * 5.0 * 128 * rest[-2] * 1.4426950408889634 + torch.log2(torch.tensor(200.0))
    for config in fused(p):
        assert all(t.isfinite().all() for t in launched(p, (dout, q, k, v, stats, *rest), config))
