"""A workload from an op's declaration: operands, their mathematics in fp64, and the call.

An op that has no workload of its own is timed over its declaration's suite, beside that mathematics.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from inspect import Parameter, signature
from typing import Any

from torch import Tensor

from bench.baselines import Contender, Inputs, Launch, Workload
from bench.suites import Case, Suite
from cutekernels.op import Op
from cutekernels.ops.shared.calls import call
from cutekernels.ops.shared.triton_op import TritonOp


def workload(
    op: Op[Any, Any],
    suites: Mapping[str, Suite],
    peers: Sequence[Contender],
    function: Callable[..., Any] | None = None,
    numbers: Mapping[str, float] | None = None,
    /,
    **changes: Any,
) -> Workload:
    """How ``op`` is benchmarked, less ``changes``: by its public ``function``, or as autograd calls it; with those of
    its ``numbers`` that are not its sample's.
    """
    inputs, ours = partial(draw_inputs, op, numbers or {}), partial(launches, op, function)
    made = Workload(op.name, suites, inputs, partial(exact, op), ours, tuple(peers))
    return dataclasses.replace(made, **changes)


def of_rows(op: TritonOp[Any, Any], case: Case) -> tuple[int, int]:
    """How many operands a call reads and writes whose rows are the problem's: what streaming contenders move."""
    problem = op.Problem.parse(case.problem)
    full = [o.result for n, o in op.operands.items() if o.axes[0] == "*rows" and op.kind(problem, n) is not None]
    return full.count(False), full.count(True)


def of_suite(op: TritonOp[Any, Any]) -> Workload:
    """An op that nobody wrote a workload for. Its peers are none of its rivals': write one to compare it with those."""
    suite = {"suite": lambda dtype, accumulate: [Case(op.name, text, text) for text in op.suite]}
    reference = Contender("reference in fp64", lambda case, sets: [partial(exact, op, case, i) for i in sets])
    return workload(op, suite, (reference,), streams=lambda case: (len(op.inputs), len(op.results)))


def draw_inputs(op: Any, numbers: Mapping[str, float], case: Case, problem: Any, device: str, seed: int) -> Inputs:
    """The declaration's sample: its tensors are the operands."""
    args = op.sample(problem, device, seed)
    if numbers:
        count = len(op.inputs)
        args = (*args[:count], *[numbers.get(n, v) for n, v in zip(op.scalars, args[count:], strict=True)])
    return Inputs(tuple([t for t in args if isinstance(t, Tensor)]), op.outputs(problem, *args), args=args)


def exact(op: Op[Any, Any], case: Case, i: Inputs) -> tuple[Tensor, ...]:
    """The declaration's reference on operands in fp64."""
    wide = [t.double() if isinstance(t, Tensor) and t.is_floating_point() else t for t in i.args or i.operands]
    return op.reference(op.Problem.parse(case.problem), *wide)


def launches(
    op: Any, function: Callable[..., Any] | None, case: Case, sets: Sequence[Inputs], config: Any
) -> Sequence[Launch]:
    """One call for each of ``sets``: of ``function``, whose parameters have the names of the op's inputs, options and
    numbers, into a given result where it takes one; without it into given results, as torch's op does.
    """
    problem, count = op.Problem.parse(case.problem), len(op.inputs)
    chosen = {name: getattr(problem, name) for name in op.options}
    taken = {} if function is None else signature(function).parameters

    def bind(i: Inputs) -> Launch:
        args: tuple[Any, ...] = i.args or i.operands
        if function is None:
            options = tuple(chosen.values())
            return partial(call, op, args[:count], options, args[count:], config=config, out=i.results)
        given = dict(zip((*op.inputs, *op.scalars), args, strict=False)) | chosen
        given |= {"out": i.results[0], "config": config}
        first = [given[name] for name, p in taken.items() if p.kind is not Parameter.KEYWORD_ONLY]
        named = {name: given[name] for name in [*taken][len(first) :] if name in given}
        return partial(function, *first, **named)

    return [bind(i) for i in sets]
