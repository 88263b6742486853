"""An op that has no workload of its own: its declaration's suite, beside its mathematics in fp64."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import Tensor

from bench.baselines import Contender, Inputs, Launch, Workload
from bench.suites import Case
from cutekernels.ops.shared.calls import call
from cutekernels.ops.shared.triton_op import TritonOp


def workload(op: TritonOp[Any, Any]) -> Workload:
    """How ``op`` is benchmarked. Its peers are none of its rivals': write a Workload to compare it with those."""
    tensors, options = len(op.inputs), len(op.options)
    given: dict[str, tuple[Any, ...]] = {}  # options and scalars of a problem, as its sample has them

    def inputs(case: Case, problem: Any, device: str, seed: int) -> Inputs:
        args = op.sample(problem, device, seed)
        given[case.problem] = args[tensors:]
        return Inputs(args[:tensors], op.outputs(problem, *args))

    def truth(case: Case, i: Inputs) -> tuple[Tensor, ...]:
        wide = [t.double() if t.is_floating_point() else t for t in i.operands]
        return tuple(op.evaluate(*wide, *given[case.problem]))

    def ours(case: Case, sets: Sequence[Inputs], config: Any) -> Sequence[Launch]:
        rest = given[case.problem]
        return [
            partial(call, op, i.operands, rest[:options], rest[options:], config=config, out=i.results) for i in sets
        ]

    def reference(case: Case, sets: Sequence[Inputs]) -> Sequence[Launch]:
        return [partial(op.evaluate, *i.operands, *given[case.problem]) for i in sets]

    return Workload(
        op=op.name,
        suites={"suite": lambda dtype, accumulate: [Case(op.name, text, text) for text in op.suite]},
        inputs=inputs,
        truth=truth,
        ours=ours,
        peers=(Contender("reference in fp64", reference),),
        streams=lambda case: (tensors, len(op.results)),
    )
