"""Triton kernels compiled in any order, by several processes at once, and launched by one that compiles nothing."""

from __future__ import annotations

import logging
import os
import random
import time
from pathlib import Path
from typing import Any, NamedTuple

import pytest

pytest.importorskip("triton")

from cutekernels import compile as compiler
from cutekernels import dispatch
from cutekernels import gpu as gpus
from cutekernels.backends.cute import WITHOUT_GPU
from cutekernels.compilers import compile_candidate
from cutekernels.isolate import Child, Pool
from cutekernels.ops import registry
from cutekernels.ops.shared.triton_op import TritonOp

ROOT = Path(__file__).parents[2]
PROCESSES = 2
KERNELS = 24
HERE = f"{__name__}:"
TRITON_OPS = [op for op in registry.OPS if isinstance(op, TritonOp)]
Kernel = tuple[str, str, str]  # op, problem, config


class Order(NamedTuple):
    """Request: obtain ``kernels`` in this order from ``cache``, once ``company`` processes are ready to."""

    kernels: list[Kernel]
    cache: str
    company: int = 1
    may_compile: bool = True


class Report(NamedTuple):
    """Account of a process: kernels it compiled, and what it warned of."""

    compiled: list[str]
    warnings: list[str]


def obtain(order: Order) -> Report:
    """In a process of its own: gets the kernels, from the cache where they are there."""
    import triton

    compiled: list[str] = []
    warnings: list[str] = []
    real = triton.compile

    def counted(source: Any, **rest: Any) -> Any:
        assert order.may_compile, f"{source.name} is compiled again"
        compiled.append(source.name)
        return real(source, **rest)

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            warnings.append(record.getMessage())

    triton.compile = counted
    os.environ["CUTEKERNELS_CACHE"] = order.cache
    log = logging.getLogger("cutekernels")
    log.addHandler(Listener(logging.WARNING))
    compiler._loaded.clear()
    spec = gpus.lookup("h200")
    ready = Path(order.cache + ".ready")
    ready.mkdir(exist_ok=True)
    (ready / str(os.getpid())).touch()
    deadline = time.monotonic() + 100
    while len(list(ready.iterdir())) < order.company:
        assert time.monotonic() < deadline, "the other processes do not start"
        time.sleep(0.01)
    try:
        for name, problem, config in order.kernels:
            op = registry.get(name)
            compiler.get(op, op.Problem.parse(problem), op.Config.parse(config), spec)
    finally:
        triton.compile = real
        log.handlers.clear()
    return Report(compiled, warnings)


def kernels() -> list[Kernel]:
    """One of each Triton op, then more of those whose functions share constants, in small configs."""
    spec = gpus.lookup("h200")
    found: dict[str, Kernel] = {}
    first = ["sample_filter", "rms_norm", "moe_route"]
    more = sorted(TRITON_OPS, key=lambda one: (first.index(one.name) if one.name in first else 9, one.name))
    every = [(one, one.suite[0]) for one in TRITON_OPS] + [(one, text) for one in more for text in one.suite]
    for op, text in every:
        p = op.Problem.parse(text)
        c = op.default(p, spec)
        if len(found) < KERNELS:
            found.setdefault(compiler.cache_key(op, p, c, spec), (op.name, str(p), str(c)))
    return list(found.values())


def content(cache: Path) -> dict[str, bytes]:
    """The files of a cache, by name."""
    return {file.name: file.read_bytes() for file in (cache / "objects").iterdir()}


@pytest.mark.slow
def test_any_order_and_any_number_of_processes_make_the_same_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Triton's own hash of a kernel depends on what was compiled before it; nothing of ours may."""
    monkeypatch.syspath_prepend(str(ROOT))
    wanted = kernels()
    assert len(wanted) == KERNELS
    shared, alone = tmp_path / "shared", tmp_path / "alone"
    orders = [random.Random(seed).sample(wanted, KERNELS) for seed in range(PROCESSES)]
    with Pool(HERE + "obtain", PROCESSES, env=WITHOUT_GPU) as pool:
        asked = [pool.submit(Order(order, str(shared), PROCESSES), 300) for order in orders]
        reports = [future.result() for future in asked]
    compiled = [name for report in reports for name in report.compiled]
    assert [report.warnings for report in reports] == [[]] * PROCESSES
    assert len(compiled) == KERNELS, "each once, by whichever process came first; the others took it over"
    assert sum(bool(report.compiled) for report in reports) > 1
    with Child(HERE + "obtain", env=WITHOUT_GPU) as fresh:
        assert fresh.ask(Order(wanted, str(shared), may_compile=False), 300) == Report([], [])
        again = fresh.ask(Order(wanted[::-2], str(alone)), 300)
    assert (len(again.compiled), again.warnings) == (KERNELS // 2, [])
    assert content(alone).items() <= content(shared).items()
    assert len(content(shared)) == 2 * KERNELS == 2 * len(content(alone))


# ---- on a GPU -------------------------------------------------------------------------------------------


class Launches(NamedTuple):
    """Request: compile, or launch, these problems of ops as calls on the GPU would."""

    problems: list[tuple[str, str]]
    gpu: gpus.GpuSpec


def prepared(request: Launches) -> None:
    """In a process that sees no GPU: compiles."""
    for name, text in request.problems:
        op = registry.get(name)
        p = op.Problem.parse(text)
        config = dispatch.resolve(op, p, request.gpu).config
        for one, problem in ((op, p), *op.chained(p, config, request.gpu)):
            chosen = dispatch.resolve(one, problem, request.gpu).config
            compile_candidate((one.name, str(problem), str(chosen), request.gpu))


def launched(request: Launches) -> dict[str, float]:
    """In a fresh process on the GPU, which cannot compile: the error of each launch, as a share of the tolerance."""
    import torch
    import triton

    import cutekernels as ck
    from cutekernels.verify import Judge, poison

    def refuse(*args: Any, **rest: Any) -> Any:
        raise AssertionError("it is compiled again")

    triton.compile = refuse
    errors = {}
    for name, text in request.problems:
        op = registry.get(name)
        p = op.Problem.parse(text)
        args = op.sample(p, "cuda", 0)
        outputs = op.outputs(p, *args)
        work = op.work(p)
        judge = Judge(op.reference(p, *args), work.flops, getattr(p, "accumulate", "fp32"), work.depth, op.partial)
        launch = dispatch.plan(op, p, 0).launch
        poison(outputs)
        torch.cuda.synchronize()
        launch(*outputs, *args)
        torch.cuda.synchronize()
        errors[f"{name} [{text}]"] = judge.worst_error(outputs)
    # Through the public function too: from the second call on by addresses, on each device with a binary of its own.
    for device in range(torch.cuda.device_count()):
        gate, up = (torch.randn(64, 512, device=f"cuda:{device}", dtype=torch.bfloat16) for _ in range(2))
        truth = torch.nn.functional.silu(gate.double()) * up.double()
        for call in range(3):
            found = ck.silu_mul(gate, up)
            ratio = (found.double() - truth).abs() / (2.0**-7 * truth.abs() + 1e-6)
            errors[f"silu_mul on cuda:{device}, call {call}"] = float(ratio.max())
    return errors


@pytest.mark.gpu
def test_what_one_process_compiles_another_launches_without_compiling(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.syspath_prepend(str(ROOT))
    silu_mul = registry.get("silu_mul")
    called = silu_mul.problem(*[torch.empty(64, 512, dtype=torch.bfloat16, device="meta") for _ in range(3)])
    problems = [(op.name, op.suite[0]) for op in TRITON_OPS] + [(silu_mul.name, str(called))]
    request = Launches(problems, gpus.detect(0))
    with Child(HERE + "prepared", env=WITHOUT_GPU) as first:
        first.ask(request, 300)
    with Child(HERE + "launched") as second:
        errors = second.ask(request, 300)
    assert len(errors) >= len(problems) + 3
    assert {name: error for name, error in errors.items() if not error <= 1} == {}
