"""Rules of attention's configs: which of them read a problem's extents, and which do not."""

from __future__ import annotations

import random
from typing import Any

import pytest

from cutekernels import gpu
from cutekernels.ops.attention.backward import ATTENTION_BACKWARD
from cutekernels.ops.attention.cached import CACHE_ATTENTION
from cutekernels.ops.attention.decode import DECODE_ATTENTION
from cutekernels.ops.attention.op import ATTENTION

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
