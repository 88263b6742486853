"""Rules of attention's configs: which of them read a problem's extents, and which do not."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import pytest

from cutekernels import gpu
from cutekernels.ops.attention.backward import ATTENTION_BACKWARD
from cutekernels.ops.attention.backward_config import passes
from cutekernels.ops.attention.cache import CACHE_ATTENTION
from cutekernels.ops.attention.decode import DECODE_ATTENTION
from cutekernels.ops.attention.op import ATTENTION
from tests.attention import cached_cases, cases, decode_cases
from tests.attention.backward_cases import random_backward

GPUS = [gpu.lookup(name) for name in ("h200", "a100", "l40s")]


@pytest.mark.parametrize(
    "op", [ATTENTION, ATTENTION_BACKWARD, DECODE_ATTENTION, CACHE_ATTENTION], ids=lambda op: op.name
)
def test_what_is_unfit_is_so_whatever_the_extents(op: Any) -> None:
    """The default's search relies on it: it asks once for all problems that differ in extents alone."""
    rng = random.Random(op.name)
    every = list(op.Config.every())
    for text in op.suite:
        problem = op.Problem.parse(text)
        least = problem.replace(**{name: min(1, getattr(problem, name)) for name in problem.extent_names()})
        for config in rng.sample(every, 150):
            for spec in GPUS:
                rules = op.schedule(config)
                found = [list(rules.failures_of("config", config, spec, p)) for p in (problem, least)]
                assert found[0] == found[1], (text, config)


@pytest.mark.parametrize(
    "op", [ATTENTION, ATTENTION_BACKWARD, DECODE_ATTENTION, CACHE_ATTENTION], ids=lambda op: op.name
)
def test_the_default_is_the_model_s_best_of_all_that_is_valid(op: Any) -> None:
    for text in op.suite[:3]:
        problem = op.Problem.parse(text)
        for spec in GPUS[:2]:
            ranked = ((op.estimate_us(problem, c, spec), str(c)) for c in op.valid(problem, spec))
            assert str(op.default(problem, spec)) == min(ranked)[1]


def test_a_window_that_hides_nothing_changes_no_default() -> None:
    for op in (ATTENTION, ATTENTION_BACKWARD):
        for tokens in (128, 1000, 4096):
            plain = op.Problem.parse(f"batch=2 seq_q={tokens} seq_kv={tokens} heads_q=16 heads_kv=4 causal=1")
            wide = plain.replace(window="left", window_left=4095)
            for spec in GPUS:
                assert op.default(wide, spec) == op.default(plain, spec)
                assert op.default(wide.replace(window_left=63), spec) is not None


LENGTHS = (0, 1, 7, 64, 1000, 100_000)
POSED: dict[Any, Callable[[random.Random], Any]] = {
    ATTENTION: lambda rng: cases.random_problem(rng, lengths=LENGTHS),
    ATTENTION_BACKWARD: lambda rng: random_backward(rng, lengths=LENGTHS),
    DECODE_ATTENTION: lambda rng: decode_cases.random_problem(rng, rooms=LENGTHS),
    CACHE_ATTENTION: lambda rng: cached_cases.random_problem(rng, rooms=LENGTHS, queries=(17, 512, 100_000)),
}


def test_a_large_head_dim_has_two_warps_a_scheduler() -> None:
    p = ATTENTION.Problem.parse("batch=4 seq_q=4096 seq_kv=4096 heads_q=8 heads_kv=8 head_dim=256")
    for name in ("a100", "h200-as-a100"):
        default = ATTENTION.default(p, gpu.lookup(name))
        assert (default.tile_q, default.tile_kv, default.warps * default.ctas_per_sm) == (128, 64, 8)


@pytest.mark.parametrize("name", ["a100", "l40s", "h200", "rtx5090", "rtx3090", "h200-as-l40s"])
@pytest.mark.parametrize("op", POSED, ids=lambda op: op.name)
def test_there_is_a_default_for_every_problem_and_gpu(op: Any, name: str) -> None:
    spec = gpu.lookup(name)
    for seed in range(4):
        posed = POSED[op](random.Random(f"{name} {seed}"))
        for p in [posed.replace(of=of) for of in passes(posed.head_dim)] if op is ATTENTION_BACKWARD else [posed]:
            config = op.default(p, spec)
            assert op.why_not(p, config, spec) is None, p
            assert math.isfinite(op.estimate_us(p, config, spec)), p
            assert p.bucket().bucket() == p.bucket(), p
            assert getattr(p.bucket(), "of", None) == getattr(p, "of", None), p
