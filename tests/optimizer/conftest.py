"""The GPU's path of ``FusedAdamW`` without a GPU."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from cutekernels.ops.optimizer.op import ADAMW_STEP, AdamWConfig, AdamWProblem
from cutekernels.optim.operands import clip_scale
from tests.optimizer.cases import DTYPES, H200


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The GPU's path on CPU tensors: kernels that read the table as the real ones do. Records updates' tensors."""
    return stand_ins(monkeypatch)


def stand_ins(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """``launches`` for as long as ``monkeypatch`` lasts."""
    from cutekernels.optim import plan

    seen: list[tuple[int, ...]] = []

    def at(address: int, n: int, dtype: torch.dtype) -> Tensor:
        return torch.frombuffer((ctypes.c_char * (n * dtype.itemsize)).from_address(address), dtype=dtype)

    def get(op: Any, problem: AdamWProblem, config: AdamWConfig, spec: Any) -> Any:
        def tensors(table: int, grads: int, chunks: int, count: int) -> Iterator[tuple[list[int], int, slice]]:
            for i, j in at(chunks, 2 * count, torch.int32).view(-1, 2).tolist():
                row = at(table + 64 * i, 8, torch.int64).tolist()
                yield row, int(at(grads + 8 * i, 1, torch.int64)), slice(j * config.block, (j + 1) * config.block)

        def update(
            grid: Any, table: int, grads: int, chunks: int, lr: int, norm: int, most: float, *hyper: Any
        ) -> None:
            kinds = [DTYPES[k] for k in (problem.dtype, problem.grad_dtype, *[problem.moments] * 2, "fp32")]
            sizes: dict[int, int] = {}
            scale = float(clip_scale(at(norm, 1, torch.float32)[0], most)) if norm else 1.0
            for (param, avg, sq, master, step, n, *_), grad, part in tensors(table, grads, chunks, grid[0]):
                if grad:
                    sizes[step] = n
                    addresses = (param, grad, avg, sq, master)
                    runs: Any = [at(a, n, k)[part] if a else None for a, k in zip(addresses, kinds, strict=True)]
                    rate = at(lr, 1, torch.float32) if lr else None
                    clipped = runs[1] if scale == 1.0 else runs[1].float() * scale
                    operands = (runs[0], clipped, *runs[2:], at(step, 1, torch.float32), rate)
                    values = ADAMW_STEP.evaluate(*operands, *hyper, maximize=problem.maximize)
                    for place, value in zip((runs[0], *runs[2:]), values, strict=True):
                        if place is not None:
                            assert place.numel()
                            place.copy_(value)
            seen.append(tuple(sizes.values()))

        def squares(grid: Any, table: int, grads: int, chunks: int, sums: int, count: int) -> None:
            total = at(sums, grid[0], torch.float32).zero_()
            for i, ((*_, n, _, _), grad, part) in enumerate(tensors(table, grads, chunks, count)):
                if grad:
                    run = at(grad, n, DTYPES[problem.grad_dtype])[part]
                    total[i % grid[0]] += run.float().square().sum()

        def count_steps(grid: Any, table: int, grads: int, count: int) -> None:
            for i in range(count):
                if int(at(grads + 8 * i, 1, torch.int64)):
                    at(int(at(table + 64 * i + 32, 1, torch.int64)), 1, torch.float32).add_(1)

        return {"adamw_table": update, "adamw_squares": squares, "adamw_count": count_steps}[op.name]

    monkeypatch.setattr(plan, "has_kernels", lambda param: True)
    monkeypatch.setattr(plan.compiler, "get", get)
    monkeypatch.setattr(plan.gpus, "detect", lambda index=None: H200)
    monkeypatch.setattr(torch.cuda, "device", lambda index: nullcontext())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self)
    real = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *a, pin_memory=False, **more: real(*a, **more))
    return seen


@pytest.fixture(params=["alone", "launches", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    """The device of each way that a step takes: parameter by parameter, by launches of stand-ins, by launches."""
    if request.param == "cuda":
        request.getfixturevalue("one_seed")
        return "cuda"
    if request.param == "launches":
        request.getfixturevalue("launches")
    return "cpu"


@pytest.fixture
def mesh(request: pytest.FixtureRequest) -> Iterator[Any]:
    """A mesh of one rank, on the GPU where the test is marked so."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    gpu = request.node.get_closest_marker("gpu") is not None
    own: dict[str, Any] = {"device_id": torch.device("cuda", 0)} if gpu else {}
    dist.init_process_group("nccl" if gpu else "gloo", store=dist.HashStore(), rank=0, world_size=1, **own)
    try:
        yield init_device_mesh("cuda" if gpu else "cpu", (1,))
    finally:
        dist.destroy_process_group()
