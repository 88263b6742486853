"""Suites ``headtohead``: an op's bodies beside each other, each by the fastest of its valid configs. Those of
``silu_mul`` and ``rope`` in CuTe are none of the ops' but examples: ``examples/silu_mul_cute.py``, ``rope_cute.py``.

All of a body's configs are timed, one after the other; the fastest few then interleaved. Rows of the suite are of the
one that is left, timed again beside everything else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from bench.baselines import Launch
from cutekernels import compilers, measure
from cutekernels.gpu import GpuSpec

SUITE = "headtohead"
ROUGH, FINAL = 5, 15  # rounds
FINALISTS = 3
_LEAST_US = 200.0  # of a replay
_BUDGET_US = 1e6  # of a final


def chosen(
    op: Any, problem: Any, gpu: GpuSpec, bind: Callable[[Any], Sequence[Launch]], prepare: measure.MakeRound
) -> Iterator[tuple[str, Any, str]]:
    """Each body with its fastest config, and of how many; or with None, and why it has none."""
    valid = list(op.valid(problem, gpu))
    failures = compilers.side_by_side([(op.name, str(problem), str(c), gpu) for c in valid])
    for body in op.Config.space().get("body", ("triton",)):
        own = [(c, failure) for c, failure in zip(valid, failures, strict=True) if getattr(c, "body", body) == body]
        compiled = [c for c, failure in own if failure is None]
        if compiled:
            yield body, fastest(compiled, bind, prepare), f"fastest of {len(own)}"
        elif own:
            yield body, None, f"none of {len(own)} configs compiles: {own[0][1]}"
        else:
            refused = op.why_not(problem, op.default(problem, gpu).replace(body=body), gpu)
            yield body, None, f"no config takes it: {refused}"


def fastest(configs: Sequence[Any], bind: Callable[[Any], Sequence[Launch]], prepare: measure.MakeRound) -> Any:
    """The config whose launches take the least time."""

    def rough(c: Any) -> float:
        # One graph at a time: the results that graphs keep would not fit into memory together.
        return measure.time_interleaved({"": prepare(bind(c), _LEAST_US)}, rounds=ROUGH)[""].median

    some = sorted(configs, key=rough)[:FINALISTS]
    ready = {str(c): prepare(bind(c), _LEAST_US) for c in some}
    final = measure.time_interleaved(ready, rounds=FINAL, budget_us=_BUDGET_US)
    return min(some, key=lambda c: final[str(c)].median)
