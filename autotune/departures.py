"""Where a prediction departs from the default, why, and whether it may serve calls.

``python -m cutekernels.autotune.departures demo l40s`` tells it of stored predictions.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from cutekernels import gpu as gpus
from cutekernels.autotune.job import Job, Task, load
from cutekernels.db.storage.store import Store
from cutekernels.dispatch import LEAST_GAIN
from cutekernels.gpu import GpuSpec
from cutekernels.op import Config, Op, Problem


@dataclass(frozen=True)
class Departure:
    """A predicted winner beside the default. ``why``: for each knob that differs, the model's slowdown without it."""

    task: Task
    default: Config
    predicted: Config
    default_us: float
    predicted_us: float
    why: tuple[str, ...]


def departures(job: Job, spec: GpuSpec, store: Store) -> list[Departure]:
    """The job's stored predictions for ``spec``, those that gain most first; those equal to the default last."""
    found = []
    for task in job.tasks:
        op, problem = task.op, task.problem
        for winner in store.winners(gpu=spec.name, op=op.name, problem=str(problem)):
            if winner.revision not in op.revisions:
                continue
            text = op.spell(winner.revision, winner.problem, winner.config)
            default, chosen = op.default(problem, spec), op.Config.parse(text)
            times = [op.estimate_us(problem, c, spec) for c in (default, chosen)]
            why = tuple(_reasons(op, problem, spec, default, chosen))
            found.append(Departure(task, default, chosen, times[0], times[1], why))
    return sorted(found, key=lambda d: d.predicted_us / d.default_us if d.default_us else 1.0)


def reason(op: Op[Any, Any], problem: Problem, spec: GpuSpec, default: Config, chosen: Config) -> str:
    """Why calls should take ``chosen``, which nobody measured; empty where the model is not that sure."""
    best_us = op.estimate_us(problem, chosen, spec)
    gain = op.estimate_us(problem, default, spec) / best_us if best_us else 1.0
    if chosen == default or gain < LEAST_GAIN:
        return ""
    return f"{gain:.2f} times as fast by the model; " + "; ".join(_reasons(op, problem, spec, default, chosen))


def _reasons(op: Op[Any, Any], problem: Problem, spec: GpuSpec, default: Config, chosen: Config) -> Iterator[str]:
    """Ablation: reset one knob at a time; knobs that cannot be reset alone are reported together."""
    best_us = op.estimate_us(problem, chosen, spec)
    tied = []
    for name in chosen.space():
        mine, other = getattr(chosen, name), getattr(default, name)
        if mine == other:
            continue
        change = f"{name} {other} -> {mine}"
        back = replace(chosen, **{name: other})
        if op.why_not(problem, back, spec) is not None:
            tied.append(change)
            continue
        times = op.estimate_us(problem, back, spec) / best_us
        same = abs(times - 1) < 0.005
        yield f"{change}: {'the same to the model' if same else f'{other} would take {times:.2f} times as long'}"
    if tied:
        yield f"only together: {', '.join(tied)}"


def _tell(job: str, gpu: str) -> None:
    spec = gpus.lookup(gpu)
    with Store(readonly=True) as store:
        found = departures(load(job), spec, store)
    for d in found:
        gain = d.default_us / d.predicted_us
        print(f"\n{d.task} on {spec.name}")
        print(f"  default    {d.default_us:10.1f} us  {d.default}")
        if d.predicted == d.default:
            print("  predicted  the default: no config that compiled is faster by the model")
            continue
        print(f"  predicted  {d.predicted_us:10.1f} us  {d.predicted}")
        print(
            f"  why        {gain:.2f} times as fast by the model: "
            + ("it serves calls" if gain >= LEAST_GAIN else f"calls take the default, below {LEAST_GAIN}")
            + "".join(f"\n             {reason}" for reason in d.why)
        )


if __name__ == "__main__":
    _tell(*sys.argv[1:])
