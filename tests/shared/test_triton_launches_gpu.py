"""Launches of every Triton op on a GPU: the current stream, graphs, another device. The same bits each way."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from cutekernels.ops.shared import calls
from tests.on_gpu import graph_of
from tests.shared.test_declarations import OPS, posed

pytestmark = pytest.mark.gpu
every_op = pytest.mark.parametrize("op", [op for op in OPS if op.name != "kv_append"], ids=lambda op: op.name)


def run(op: Any, inputs: Sequence[Any], options: dict[str, Any], numbers: tuple[Any, ...]) -> tuple[Tensor, ...]:
    return calls.run(op, None, tuple(inputs), options=tuple(options.values()), scalars=numbers)


def first(inputs: Sequence[Any]) -> int:
    """The input that a test changes: the first of numbers, or of all."""
    floating = (i for i, t in enumerate(inputs) if t is not None and t.is_floating_point())
    return next(floating, 0)


def same(found: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    torch.testing.assert_close(list(found), list(expected), rtol=0, atol=0, equal_nan=True)


@every_op
def test_runs_on_the_current_stream(op: Any) -> None:
    inputs, options, numbers = posed(op, device="cuda")
    expected = run(op, inputs, options, numbers)
    at, side = first(inputs), torch.cuda.Stream()
    filled = inputs[at].clone()
    inputs[at].zero_()
    run(op, inputs, options, numbers)
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)  # a launch on any other stream would overtake the copy behind this
        inputs[at].copy_(filled)
        found = run(op, inputs, options, numbers)
    side.synchronize()
    same(found, expected)


@every_op
def test_captured_in_a_graph(op: Any) -> None:
    inputs, options, numbers = posed(op, device="cuda")
    run(op, inputs, options, numbers)
    graph, found = graph_of(lambda: run(op, inputs, options, numbers))
    changed = inputs[first(inputs)]
    changed.copy_(changed.flip(0))
    graph.replay()
    same(found, run(op, inputs, options, numbers))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@every_op
def test_tensors_of_another_device_than_the_current(op: Any) -> None:
    inputs, options, numbers = posed(op, device="cuda")
    expected = [t.cpu() for t in run(op, inputs, options, numbers)]
    for index in (1, 0, 1):
        moved = [None if t is None else t.to(f"cuda:{index}") for t in inputs]
        found = run(op, moved, options, numbers)
        assert all(t.device.index == index for t in found)
        same([t.cpu() for t in found], expected)
        assert torch.cuda.current_device() == 0
