"""Shared parts of tests on a GPU: operands, which configs to try, launches, and the memory that they need."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor

from cutekernels import compile as compiler
from cutekernels import gpu, verify

T = TypeVar("T")
# Warnings of torch's own, where it traces a function or checks an op.
traced = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning")


def normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=dtype)


def drawn(op: Any, problem: Any, count: int, seed: str) -> list[Any]:
    """The default config of ``problem`` and ``count`` random ones, or all that there are."""
    spec = gpu.detect()
    valid = list(op.valid(problem, spec))
    return [op.default(problem, spec), *random.Random(seed).sample(valid, min(count, len(valid)))]


def computed(op: Any, problem: Any, config: Any, args: tuple[Any, ...]) -> tuple[Tensor, ...]:
    """The results of the kernel of ``config``, in poisoned memory."""
    results = op.outputs(problem, *args)
    verify.poison(results)
    op.bind(problem, config, compiler.get(op, problem, config, gpu.detect()))(*results, *args)
    return tuple(results)


def needs_memory(gib: int) -> None:
    if torch.cuda.mem_get_info()[0] < gib << 30:
        pytest.skip(f"needs {gib} GiB of free device memory")


def slice_written(begin: int, write: Callable[[Tensor], Tensor]) -> Tensor:
    """65 rows of 1001 columns, which ``write`` was given to write: it returns them, and has left those beside them."""
    whole = torch.full((65, 1200), 3.0, device="cuda", dtype=torch.bfloat16)
    out = whole[:, begin : begin + 1001]
    before = out._version
    assert write(out) is out
    assert (whole[:, :begin] == 3).all()
    assert (whole[:, begin + 1001 :] == 3).all()
    assert out._version > before
    return out


def graph_of(call: Callable[[], T]) -> tuple[torch.cuda.CUDAGraph, T]:
    """A graph of ``call``, and what it returned as it was captured."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = call()
    return graph, result


def assert_no_workspace_is_shared(
    xs: Sequence[Tensor], *calls: Callable[..., Tensor]
) -> tuple[list[torch.cuda.CUDAGraph], list[list[Tensor]]]:
    """Each of ``xs`` on a stream of its own: ``calls``, in a graph and out of it, give what they give alone.

    Returns the graphs, and the results that each writes.
    """
    expected = [[call(x) for call in calls] for x in xs]
    outs = [[torch.empty_like(want) for want in each] for each in expected]
    torch.cuda.synchronize()
    graphs = []
    for x, into in zip(xs, outs, strict=True):  # captured one after another: one capture stream
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(5):
                for call, out in zip(calls, into, strict=True):
                    call(x, out=out)
        graphs.append(graph)
    streams, eager = [torch.cuda.Stream() for _ in xs], [list[Tensor]() for _ in xs]
    for _ in range(20):
        for x, graph, stream, found in zip(xs, graphs, streams, eager, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
                found += [call(x) for call in calls]
    torch.cuda.synchronize()
    for want, into, found in zip(expected, outs, eager, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(into, want, strict=True))
        assert all(torch.equal(y, want[i % len(calls)]) for i, y in enumerate(found))
    return graphs, outs
