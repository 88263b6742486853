"""The judge on a GPU: configs of every op are compiled, launched and verified, and none that is right is rejected.

``CUTEKERNELS_JUDGE=2400 python -m pytest -q -s tests/tuner/test_judge.py`` judges as many configs, with a compiler for
each CPU but two. All valid configs are taken to be right; a rejected one is listed with its error in tolerances.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import Future, as_completed
from typing import Any

import pytest

from cutekernels import gpu as gpus
from cutekernels.autotune.runtime import LocalRuntime, Measure, Prepare
from cutekernels.autotune.search import prune_reason
from cutekernels.backends import Facts
from cutekernels.isolate import ChildFailure
from cutekernels.op import Config, Op, Problem
from cutekernels.ops import registry

COUNT = int(os.environ.get("CUTEKERNELS_JUDGE", "2400"))
WHOLE = (  # their spaces in full: many outputs, long sums
    "batch=32 seq_kv=4096 heads_q=32 heads_kv=8",
    "batch=1 seq_kv=4096 heads_q=32 heads_kv=8",
)


def chosen(gpu: gpus.GpuSpec) -> Iterator[tuple[Op[Any, Any], Problem, list[Config]]]:
    """Problems with their configs: decode in full, then an equal, evenly spaced share for each other one."""
    decode = registry.get("decode_attention")
    left = COUNT
    for text in WHOLE:
        problem = decode.Problem.parse(text)
        configs = list(decode.valid(problem, gpu))
        left -= len(configs)
        yield decode, problem, configs
    problems = [(op, op.Problem.parse(text)) for op in registry.OPS for text in op.suite]
    spaces = [(op, problem, list(op.valid(problem, gpu))) for op, problem in problems]
    for number, (op, problem, configs) in enumerate(sorted(spaces, key=lambda space: len(space[2]))):
        share = max(1, left // (len(spaces) - number))  # small spaces leave theirs to large ones
        step = max(1.0, len(configs) / share)
        some = [configs[int(i * step)] for i in range(min(share, len(configs)))]
        left -= len(some)
        yield op, problem, some


def test_the_share_of_each_problem_adds_up() -> None:
    found = list(chosen(gpus.lookup("h200")))
    assert sum(len(configs) for _, _, configs in found) >= 0.9 * COUNT >= 1800
    assert {op.name for op, _, _ in found} == {op.name for op in registry.OPS}
    assert all(len(set(configs)) == len(configs) > 0 for _, _, configs in found)


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_no_right_config_is_rejected() -> None:
    gpu = gpus.detect()
    judged, rejected, failed = 0, [], []
    with LocalRuntime(max(1, len(os.sched_getaffinity(0)) - 2)) as runtime:
        tasks = list(chosen(gpu))
        compiling: list[dict[Future[Facts], Config]] = [
            {runtime.compile(op, problem, config, gpu): config for config in configs} for op, problem, configs in tasks
        ]
        for (op, problem, _), futures in zip(tasks, compiling, strict=True):
            prepare = Prepare(op.name, str(problem), gpu)
            for future in as_completed(futures):
                text = str(futures[future])
                try:
                    if prune_reason(future.result(), op, gpu) is not None:
                        continue
                    (outcome,) = runtime.measure(Measure(prepare, (text,), rounds=5, budget_us=1000.0)).values()
                except ChildFailure as error:
                    failed.append(f"{op.name} [{problem}] [{text}]: {str(error)[:200]}")
                    continue
                judged += 1
                if outcome.error > 1:
                    rejected.append(f"{op.name} [{problem}] [{text}]: {outcome.error:.3f} tolerances")
            print(
                f"{judged} judged, {len(rejected)} rejected, {len(failed)} failed after {op.name} [{problem}]",
                flush=True,
            )
    print(f"{judged} judged, {len(rejected)} rejected, {len(failed)} failed")
    assert rejected == [] and failed == []
    assert judged >= 0.8 * COUNT
