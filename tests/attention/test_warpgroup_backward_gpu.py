"""The warpgroup body of attention's gradients on a GPU that has it: options crossed with ragged lengths and grids."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from cutekernels import compile as compiler
from cutekernels import gpu
from cutekernels.ops.attention.api import attention
from cutekernels.ops.attention.backward import ATTENTION_BACKWARD
from cutekernels.ops.attention.backward_config import (
    AttentionBackwardConfig,
    AttentionBackwardProblem,
    Launches,
    passes,
)
from tests.attention import cases
from tests.attention.backward_cases import random_backward
from tests.attention.test_backward_gpu import judge
from tests.compiled import having
from tests.seeds import seeds

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("warpgroups", "one_seed")]
launched = partial(cases.launched, ATTENTION_BACKWARD)
check = partial(cases.check, ATTENTION_BACKWARD, judge)


def warpgroup(p: AttentionBackwardProblem, **values: Any) -> list[AttentionBackwardConfig]:
    return having(ATTENTION_BACKWARD.valid(p, gpu.detect()), body="warpgroup", **values)


@pytest.fixture
def _nan_in_fresh_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """dS that nobody wrote is NaN."""
    fresh = torch.Tensor.new_empty
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda *args, **named: fresh(*args, **named).fill_(math.nan))


@pytest.mark.parametrize("seed", seeds(40))
def test_random_problems_and_configs(seed: int) -> None:
    rng = random.Random(seed)
    p = random_backward(rng)
    configs = warpgroup(p)
    check(p, *rng.sample(configs, min(2, len(configs))), seed=seed)


@pytest.mark.usefixtures("_nan_in_fresh_memory")
@pytest.mark.parametrize("seed", seeds(40))
def test_all_gradients_of_random_problems(seed: int) -> None:
    rng = random.Random(seed)
    p = next(p for p in iter(lambda: random_backward(rng), None) if p.may_hand_on).replace(of="qkv")
    check(p, *rng.sample(warpgroup(p), 2), seed=seed)


@pytest.mark.usefixtures("_nan_in_fresh_memory")
@pytest.mark.parametrize("options", ["", "causal=1", "window=both window_left=100 window_right=30"])
@pytest.mark.parametrize("seq_kv", [1, 65, 333, 1000])
@pytest.mark.parametrize("seq_q", [1, 65, 333, 1000])
def test_all_gradients_of_ragged_lengths(seq_q: int, seq_kv: int, options: str) -> None:
    p = AttentionBackwardProblem.parse(f"batch=2 seq_q={seq_q} seq_kv={seq_kv} heads_q=4 heads_kv=2 {options} of=qkv")
    check(p, seed=seq_q + seq_kv)


@pytest.mark.usefixtures("_nan_in_fresh_memory")
def test_several_launches_give_the_bits_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    p = AttentionBackwardProblem(2, 900, 900, 12, 6, causal=True, of="qkv")
    args, config = ATTENTION_BACKWARD.sample(p, "cuda", 0), ATTENTION_BACKWARD.default(p, gpu.detect())
    whole = launched(p, args, config)
    own = gpu.detect()
    for heads in (1, 5):
        room = heads * 2 * Launches.of(p, config, own).elements // p.heads_q // p.batch * p.group * 64
        monkeypatch.setattr(gpu, "detect", lambda device=None, room=room: replace(own, memory_bytes=room))
        assert Launches.of(p, config, gpu.detect()).each == {1: 1, 5: 4}[heads]
        launch = ATTENTION_BACKWARD.bind(p, config, compiler.get(ATTENTION_BACKWARD, p, config, own))
        results = ATTENTION_BACKWARD.outputs(p, *args)
        launch(*results, *args)
        assert all(map(torch.equal, whole, results))


@pytest.mark.parametrize("of", ["kv", "q", "qkv"])
@pytest.mark.parametrize("options", ["causal=1", "varlen=1 causal=1", "window=left window_left=70"])
def test_a_persistent_grid_over_many_tiles(of: str, options: str) -> None:
    """Several tiles a CTA: barriers go round, and the counter is zero again for the next launch."""
    if of == "qkv" and "varlen" in options:
        pytest.skip("for a batch of one length")
    rng = random.Random(of + options)
    p = AttentionBackwardProblem.parse(
        f"batch=5 seq_q=700 seq_kv=900 heads_q=24 heads_kv=8 head_dim=64 {options} of={of}"
    )
    args = ATTENTION_BACKWARD.sample(p, "cuda", 1)
    for config in rng.sample(warpgroup(p, grid="dynamic"), 3):
        for _ in range(3):
            judge(p, args, launched(p, args, config))


@pytest.mark.parametrize("head_dim", [8, 40, 64, 72, 96, 128, 136, 192, 256])
def test_head_dims(head_dim: int) -> None:
    rng = random.Random(head_dim)
    for of in (*passes(head_dim), *(["qkv"] if head_dim <= 128 else [])):
        p = AttentionBackwardProblem(2, 300, 500, 4, 2, head_dim=head_dim, causal=True, of=of)
        args = ATTENTION_BACKWARD.sample(p, "cuda", 0)
        configs = warpgroup(p)
        assert configs or (of == "kv" and p.width == 192)  # whose sums leave no room for scores
        for config in rng.sample(configs, min(2, len(configs))):
            judge(p, args, launched(p, args, config))


@pytest.mark.parametrize("of", ["kv", "q", "qkv"])
def test_the_same_bits_every_time(of: str) -> None:
    p = AttentionBackwardProblem.parse(f"batch=2 seq_q=2000 seq_kv=2000 heads_q=16 heads_kv=4 causal=1 of={of}")
    args = ATTENTION_BACKWARD.sample(p, "cuda", 0)
    for config in random.Random(0).sample(warpgroup(p), 3):
        first = [t.clone() for t in launched(p, args, config)]
        for _ in range(10):
            assert all(map(torch.equal, first, launched(p, args, config)))


def test_nan_behind_a_sequence_reaches_nobody() -> None:
    """Packed: walked tiles run on into the next sequence, whose values are NaN."""
    tensors = [torch.randn(600, h, 128, device="cuda", dtype=torch.bfloat16) for h in (8, 2, 2)]
    ends = torch.tensor([0, 150, 420, 600], device="cuda", dtype=torch.int32)
    dout = torch.randn_like(tensors[0])

    def gradients(dirty: bool) -> tuple[torch.Tensor, ...]:
        leaves = [t.clone() for t in (*tensors, dout)]
        if dirty:
            for t in leaves:
                t[150:] = float("nan")
        *leaves, gradient = leaves
        leaves = [t.requires_grad_() for t in leaves]
        out = attention(*leaves, cu_seqlens_q=ends, cu_seqlens_kv=ends)
        return torch.autograd.grad(out, leaves, gradient)

    for clean, dirty in zip(gradients(False), gradients(True), strict=True):
        assert clean[:150].isfinite().all()
        assert torch.equal(clean[:150], dirty[:150])
