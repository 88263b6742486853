"""The path of a Triton op's call on a GPU, walked by CPU tensors: a stand-in launch takes the kernel's place.

Calls reach it through :func:`cutekernels.ops.shared.calls.run`; public functions send CPU tensors to the reference.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cutekernels import gpu
from cutekernels.ops.shared import calls, paths

H200 = gpu.lookup("h200")


@contextmanager
def launching(launch_of: Callable[[Any, Any], Callable[..., None]]) -> Iterator[None]:
    """CPU tensors count as those of the current device; ``launch_of(op, problem)`` stands in for a planned launch."""

    def plan(op: Any, problem: Any, device: int, config: object = None) -> Any:
        return SimpleNamespace(launch=launch_of(op, problem))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(calls.dispatch, "plan", plan)
        patch.setattr(paths, "_current_device", lambda: -1)  # the index of CPU tensors
        patch.setattr("cutekernels.torch_names.current_stream", lambda device: 0)
        patch.setattr(torch.cuda, "device_count", lambda: 2)
        patch.setattr(torch.cuda, "device", lambda index: nullcontext())
        paths.forget()
        try:
            yield
        finally:
            paths.forget()


@contextmanager
def recorded() -> Iterator[list[str]]:
    """Each launch computes the op's reference; the list holds its name and problem: ``"silu_mul rows=6 cols=16"``.

    A launch fails unless its operands pose the problem it was planned for and the op's ``bind`` can pass them to a
    kernel, always with as many arguments.
    """
    seen: list[str] = []

    def launch_of(op: Any, problem: Any) -> Callable[..., None]:
        passed: list[tuple[Any, ...]] = []
        bound = op.bind(problem, op.default(problem, H200), lambda grid, *args: passed.append(args))

        def launch(*given: Any) -> None:
            n, m = len(op.results), len(op.results) + len(op.inputs)
            results, inputs = given[:n], given[n:m]
            options = {name: getattr(problem, name) for name in op.options}
            assert op.problem(*results, *inputs, **options) == problem
            passed.clear()
            bound(*given)
            assert len({len(args) for args in passed}) == 1
            seen.append(f"{op.name} {problem}")
            op.update(results, given[n:], **options)

        return launch

    with launching(launch_of):
        yield seen
