"""Sinks on a GPU: every body and split against fp64, queries that see nothing, gradients, and a planted bug."""

from __future__ import annotations

import math
import random

import pytest
import torch
from torch import Tensor

from cutekernels import gpu
from cutekernels.ops.attention.api import attention
from cutekernels.ops.attention.decode import DECODE_ATTENTION, DecodeProblem
from cutekernels.ops.attention.op import ATTENTION
from cutekernels.ops.attention.problem import AttentionProblem
from tests.attention import cases, decode_cases
from tests.attention.cases import judge
from tests.attention.test_cached_gpu import bodies
from tests.seeds import seeds

pytestmark = pytest.mark.gpu
KINDS = ("same", "fp32")


@pytest.mark.parametrize("seed", seeds(30))
def test_random_problems_and_configs(seed: int) -> None:
    rng = random.Random(seed)
    p = cases.random_problem(rng, sinks=KINDS)
    args = ATTENTION.sample(p, "cuda", seed)
    for body in bodies():
        config = rng.choice([c for c in ATTENTION.valid(p, gpu.detect()) if c.body == body])
        judge(ATTENTION, p, args, cases.launched(ATTENTION, p, args, config))


@pytest.mark.parametrize("seed", seeds(30))
def test_random_decode_problems_and_configs(seed: int) -> None:
    """With several splits too: the sink counts once."""
    rng = random.Random(seed)
    p = decode_cases.random_problem(rng, sinks=KINDS)
    args = decode_cases.arguments(p, cases.lengths_of(rng, p, "cuda"), seed)
    config = decode_cases.random_config(rng, p, gpu.detect())
    judge(DECODE_ATTENTION, p, args, cases.launched(DECODE_ATTENTION, p, args, config))


@pytest.mark.parametrize("splits", [1, 2, 8, 16])
def test_a_sink_counts_once_whatever_the_splits(splits: int) -> None:
    p = DecodeProblem(3, 2048, 28, 4, lse=True, sinks="same", page_size=16)
    lengths = torch.tensor([2048, 0, 65], device="cuda", dtype=torch.int32)
    args = decode_cases.arguments(p, lengths, splits)
    some = [c for c in DECODE_ATTENTION.valid(p, gpu.detect()) if c.splits == splits]
    for cluster in sorted({c.cluster for c in some}):
        config = next(c for c in some if c.cluster == cluster)
        judge(DECODE_ATTENTION, p, args, cases.launched(DECODE_ATTENTION, p, args, config))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("sink", [-40.0, -5.0, 0.0, 5.0, 12.0, 60.0])
def test_sinks_far_from_the_scores(sink: float, dtype: torch.dtype) -> None:
    """fp16 probabilities keep their digits where the sink is far above them."""
    p = AttentionProblem(1, 200, 1000, 4, 2, head_dim=64, dtype="bf16" if dtype == torch.bfloat16 else "fp16", lse=True)
    q, k, v, *_ = ATTENTION.sample(p, "cuda", 0)
    sinks = torch.full((4,), sink, device="cuda")
    for body in bodies():
        config = next(c for c in ATTENTION.valid(p, gpu.detect()) if c.body == body)
        out, lse = attention(q, k, v, sinks=sinks, return_lse=True, config=config)
        args = (q, k, v, None, None, None, sinks, 64**-0.5, 0.0)
        judge(ATTENTION, p.replace(sinks="fp32"), args, (out, lse))


def test_minus_infinity_is_no_sink_and_nan_is_not_hidden() -> None:
    q, k, v = (torch.randn(1, 100, h, 64, device="cuda", dtype=torch.bfloat16) for h in (4, 2, 2))
    sinks = torch.tensor([-math.inf, 0.0, math.nan, -math.inf], device="cuda")
    out, lse = attention(q, k[:, :50], v[:, :50], causal=True, sinks=sinks, return_lse=True)
    plain, plain_lse = attention(q, k[:, :50], v[:, :50], causal=True, return_lse=True)
    for h in (0, 3):
        assert torch.equal(out[:, :, h], plain[:, :, h])
        assert torch.equal(lse[:, h], plain_lse[:, h])
    assert out[:, 50:, 2].isnan().all()
    assert (out[:, :50, 1] == 0).all()
    assert (lse[:, 1, :50].abs() < 1e-5).all()


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("seq", [(300, 300), (77, 200), (150, 60)])
def test_gradients(seq: tuple[int, int], kind: torch.dtype) -> None:
    shapes = ((2, seq[0], 8, 64), (2, seq[1], 2, 64), (2, seq[1], 2, 64))
    q, k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for shape in shapes)
    given = [t.requires_grad_() for t in (q, k, v, torch.randn(8, device="cuda").to(kind))]
    wide = [t.detach().double().requires_grad_() for t in given]
    dout, dlse = torch.randn_like(q), torch.randn(2, 8, seq[0], device="cuda")

    def run() -> tuple[Tensor, ...]:
        out, lse = attention(*given[:3], causal=True, sinks=given[3], return_lse=True)
        return torch.autograd.grad((out, lse), given, (dout, dlse))

    mine = run()
    exact = torch.autograd.grad(cases.written_out(*wide, causal=True), wide, (dout.double(), dlse.double()))  # type: ignore[arg-type]
    for name, a, b in zip(("q", "k", "v", "sinks"), mine, exact, strict=True):
        error = float((a.double() - b).norm() / b.norm())
        assert error < 2.0**-7, f"d{name}: {error}"
    assert mine[3].dtype == kind
    assert all(torch.equal(a, b) for a, b in zip(mine, run(), strict=True)), "the same bits each time"


def test_a_planted_bug_is_caught() -> None:
    """A neighbour's sink."""
    p = AttentionProblem(1, 100, 200, 4, 2, head_dim=64, sinks="fp32")
    args = ATTENTION.sample(p, "cuda", 0)
    judge(ATTENTION, p, args, cases.launched(ATTENTION, p, args))
    wrong = (*args[:6], args[6].roll(1), *args[7:])
    with pytest.raises(AssertionError, match="times what rounding explains"):
        judge(ATTENTION, p, args, cases.launched(ATTENTION, p, wrong))
