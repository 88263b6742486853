"""Parts of a job: one of n shards for machines that share nothing, the tasks of one op, the tasks that calls missed.

A split depends on the job alone: neither on a database nor on a GPU, so that n machines that never met agree on it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from cutekernels import gpu as gpus
from cutekernels.autotune.job import DEFAULT_TRIALS, Job, Task, checked_trials, is_empty
from cutekernels.errors import JobError
from cutekernels.gpu import GpuSpec

if TYPE_CHECKING:
    from cutekernels.db.storage.store import Request

MOST_SHARDS = 10_000
# Only proportions count. 0.55 s an attempt: docs/fleet.md#expected-cost (H200, 16 cores, 2026-11).
_PREPARE_S, _ATTEMPT_S, _RACE_S = 5.0, 0.55, 0.15
_RACE_LAUNCHES = 60  # 20 rounds of three configs
_REFERENCE = "h200"


def expected_s(task: Task) -> float:
    """Seconds that tuning ``task`` is expected to take on one GPU, the same on every machine."""
    space = math.prod(len(values) for values in task.op.Config.space().values())
    race_s = _RACE_LAUNCHES * task.op.work(task.problem).floor_us(gpus.lookup(_REFERENCE)) / 1e6
    return _PREPARE_S + min(task.trials, space) * (_ATTEMPT_S + min(_RACE_S, race_s))


def longest_first(tasks: Sequence[Task]) -> list[int]:
    """Positions of ``tasks`` by expected cost: handed out so, several workers end at about the same time."""
    costs = [expected_s(task) for task in tasks]
    return sorted(range(len(tasks)), key=lambda i: (-costs[i], i))


def part(job: Job, shard: str) -> Job:
    """The tasks of shard ``"i/n"``, i from 1 to n, in the job's order. The n shards are disjoint and cover the job.

    Raises:
        JobError: ``shard`` is not such a text.
    """
    found = re.fullmatch(r"([0-9]{1,6})/([0-9]{1,6})", shard.strip())
    index, count = (int(found[1]), int(found[2])) if found else (0, 0)
    if not 1 <= index <= count <= MOST_SHARDS:
        raise JobError(
            f"a shard is i/n with i from 1 to n, at most {MOST_SHARDS}, as 3/8 for --array=1-8; it is {shard[:40]!r}"
        )
    loads = [0.0] * count
    mine = []
    for position in longest_first(job.tasks):
        lightest = min(range(count), key=lambda i: (loads[i], i))
        loads[lightest] += expected_s(job.tasks[position])
        if lightest == index - 1:
            mine.append(position)
    return replace(job, tasks=tuple(job.tasks[i] for i in sorted(mine)))


def only(job: Job, op: str) -> Job:
    """The tasks of one op.

    Raises:
        JobError: the job has none.
    """
    tasks = tuple(task for task in job.tasks if task.op.name == op)
    if not tasks:
        known = ", ".join(sorted({task.op.name for task in job.tasks}))
        raise JobError(f"{job.name} has no task of an op {op[:60]!r}; its ops: {known}")
    return replace(job, tasks=tasks)


def left_out(request: Request, gpu: GpuSpec) -> str:
    """Why no run of this version tunes a request for ``gpu``; "" where one does."""
    from cutekernels.db.questions import query
    from cutekernels.ops import registry

    why = query.foreign(request.op, request.revision, request.problem)
    if request.gpu != gpu.name:
        return f"it is for {request.gpu}"
    if not why and is_empty(registry.get(request.op).Problem.parse(request.problem)):
        return "it has nothing to compute"
    return why


def requested(requests: Iterable[Request], gpu: GpuSpec, trials: int | None = None) -> Job:
    """The queue of missed problems as a job: most GPU time per tuning second first.

    A problem's worth is its hits times the model's time of the default, over the expected cost of its task. Requests
    with a reason (:func:`left_out`) are not in it.
    """
    from cutekernels.ops import registry

    wanted = DEFAULT_TRIALS if trials is None else checked_trials(trials, "trials")
    found: dict[str, tuple[float, Task]] = {}
    for request in requests:
        if left_out(request, gpu):
            continue
        op = registry.get(request.op)
        problem = op.Problem.parse(request.problem).bucket()
        task = Task(op, problem, wanted)
        worth = request.hits * op.estimate_us(problem, op.default(problem, gpu), gpu) / expected_s(task)
        known = found.get(str(task), (0.0, task))
        found[str(task)] = (known[0] + worth, task)
    ranked = sorted(found.items(), key=lambda item: (-item[1][0], item[0]))
    return Job("requests", tuple(task for _, (_, task) in ranked), ranked=True)
