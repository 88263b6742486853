"""The judge on a GPU: configs of every op are compiled, launched and verified, and none that is right is rejected.

``CUTEKERNELS_JUDGE=2400 python -m pytest -q tests/tuner/test_judge.py`` judges as many configs, with a compiler for
each CPU but two. All valid configs are taken to be right; a rejected one is listed with its error in tolerances.
Times do not count here: several workers share the GPU, with few input sets and one timed round per config.
"""

from __future__ import annotations

import os
import queue
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import pytest

from cutekernels import gpu as gpus
from cutekernels import measure
from cutekernels.autotune import runtime
from cutekernels.autotune.requests import Load, Measure, Outcome, Prepare, Warm
from cutekernels.autotune.runtime import CompilerPool, LocalRuntime, Runtime
from cutekernels.autotune.search import prune_reason
from cutekernels.backends import Facts
from cutekernels.isolate import OUT_OF_MEMORY, ChildFailure, RemoteError
from cutekernels.op import Config, Op, Problem
from cutekernels.ops import registry
from tests.tuner.toys import H200, PROBLEM, TOY, VALID, ToyMachine

COUNT = int(os.environ.get("CUTEKERNELS_JUDGE", "2400"))
WORKERS = 4  # processes that share the GPU
CHUNK = 32  # configs of one problem that a worker takes at a time, so that a large space occupies all workers
MOST_SETS = 2  # input sets; a tuner that keeps the L2 cold makes up to 512
WHOLE = (  # their spaces in full: many outputs, long sums
    "batch=32 seq_kv=4096 heads_q=32 heads_kv=8",
    "batch=1 seq_kv=4096 heads_q=32 heads_kv=8",
)

Space = tuple[Op[Any, Any], Problem, list[Config]]


def chosen(gpu: gpus.GpuSpec) -> Iterator[Space]:
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


def few(set_bytes: int, l2_bytes: int) -> int:
    return min(MOST_SETS, measure.l2_rotation(set_bytes, l2_bytes))


def answer(request: Warm | Prepare | Load | Measure) -> dict[str, Outcome] | None:
    """Target of the measuring processes: the tuner's worker, with :func:`few` input sets."""
    from cutekernels.autotune import worker

    worker.l2_rotation = few
    return worker.answer(request)


@dataclass
class Verdict:
    """Outcome of the configs judged so far."""

    judged: int = 0
    pruned: int = 0
    rejected: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    crowded: list[tuple[Op[Any, Any], Problem, Config]] = field(default_factory=list)  # no memory beside the others

    def __iadd__(self, other: Verdict) -> Verdict:
        for name in vars(self):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        return self

    def __str__(self) -> str:
        return f"{self.judged} judged, {len(self.rejected)} rejected, {len(self.failed)} failed, {self.pruned} pruned"


def judge(space: Space, compiles: Sequence[Future[Facts]], machine: Runtime, gpu: gpus.GpuSpec) -> Verdict:
    """Verify the configs of ``space`` on ``machine``, in the order in which they are compiled."""
    op, problem, configs = space
    prepare = Prepare(op.name, str(problem), gpu)
    config_of = dict(zip(compiles, configs, strict=True))
    found = Verdict()
    for future in as_completed(config_of):
        config = config_of[future]
        name = f"{op.name} [{problem}] [{config}]"
        try:
            if prune_reason(future.result(), op, gpu) is not None:
                found.pruned += 1
                continue
            (outcome,) = machine.measure(Measure(prepare, (str(config),), rounds=1, duty=1.0)).values()
        except ChildFailure as error:
            if OUT_OF_MEMORY.search(str(error)):
                found.crowded.append((op, problem, config))
            else:
                found.failed.append(f"{name}: {str(error)[:200]}")
            continue
        found.judged += 1
        if not outcome.right:
            found.rejected.append(f"{name}: {outcome.error:.3f} tolerances")
    return found


def judge_all(spaces: Sequence[Space], machines: Sequence[Runtime], gpu: gpus.GpuSpec) -> Verdict:
    """All spaces, in chunks, on ``machines`` that take turns; what had no memory beside others is judged alone.

    The count so far is printed after each chunk, so that a run that is cut off has told how far it came.
    """
    begun = time.monotonic()
    chunks = [(op, p, cs[i : i + CHUNK]) for op, p, cs in spaces for i in range(0, len(cs), CHUNK)]
    compiles = [[machines[0].compile(op, p, c, gpu) for c in cs] for op, p, cs in chunks]
    idle: queue.SimpleQueue[Runtime] = queue.SimpleQueue()
    for machine in machines:
        idle.put(machine)

    def work(space: Space, futures: Sequence[Future[Facts]]) -> Verdict:
        machine = idle.get()
        try:
            return judge(space, futures, machine, gpu)
        finally:
            idle.put(machine)

    found = Verdict()
    threads = ThreadPoolExecutor(len(machines))
    try:
        tasks = {threads.submit(work, *task): task[0] for task in zip(chunks, compiles, strict=True)}
        for done in as_completed(tasks):
            found += done.result()
            op, problem, _ = tasks[done]
            bad = "".join(f"\n  {line}" for line in (*done.result().rejected, *done.result().failed))
            print(f"{time.monotonic() - begun:.0f} s: {found} after {op.name} [{problem}]{bad}", flush=True)
    finally:
        threads.shutdown(wait=False, cancel_futures=True)  # the caller ends the processes they wait for
    crowded, found.crowded = found.crowded, []
    for machine in machines if crowded else ():
        machine.refresh()
    for op, problem, config in crowded:
        compiled = machines[0].compile(op, problem, config, gpu)
        found += judge((op, problem, [config]), [compiled], machines[0], gpu)
    found.failed += [f"{op.name} [{problem}] [{config}]: out of memory" for op, problem, config in found.crowded]
    print(f"{time.monotonic() - begun:.0f} s: {found} in all, {len(crowded)} of them alone", flush=True)
    return found


def test_workers_that_share_a_gpu_find_what_is_wrong_and_what_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("tests.tuner.test_judge.CHUNK", 5)
    wrong, faulting, spilling, late, greedy = VALID[3:8]
    memory = RemoteError("OutOfMemoryError", "CUDA out of memory")
    once = {late: [memory]}
    machines = [
        ToyMachine(
            wrong={wrong: 1.5},
            failures={faulting: ChildFailure("an illegal access"), greedy: memory},
            facts={spilling: Facts(255, 4096, 1024)},
            spoiled_measures=once,
        )
        for _ in range(3)
    ]
    found = judge_all([(TOY, PROBLEM, list(VALID))], machines, H200)
    assert (found.judged, found.pruned) == (len(VALID) - 3, 1)
    assert found.rejected == [f"toy [{PROBLEM}] [{wrong}]: 1.500 tolerances"]
    assert found.failed == [
        f"toy [{PROBLEM}] [{faulting}]: an illegal access",
        f"toy [{PROBLEM}] [{greedy}]: out of memory",
    ]
    assert once == {late: []} and all(machine.measured for machine in machines)
    assert f"{found} in all, 2 of them alone" in capsys.readouterr().out


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_no_right_config_is_rejected(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    gpu = gpus.detect()
    monkeypatch.setattr(runtime, "WORKER_TARGET", f"{__name__}:answer")
    monkeypatch.setattr(runtime, "SPARES", 0)
    with ExitStack() as open_, capsys.disabled():
        compilers = open_.enter_context(CompilerPool(max(1, len(os.sched_getaffinity(0)) - 2)))
        machines = [open_.enter_context(LocalRuntime(0, compilers=compilers)) for _ in range(WORKERS)]
        spaces = list(chosen(gpu))
        assert {op.name for op, _, _ in spaces} == {op.name for op in registry.OPS}
        assert all(len(set(configs)) == len(configs) > 0 for _, _, configs in spaces)
        found = judge_all(spaces, machines, gpu)
    assert found.rejected == [] and found.failed == []
    assert found.judged >= 0.8 * COUNT
