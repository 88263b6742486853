"""The real processes behind a search: compilers that see no GPU, a worker prepared once per problem."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cutekernels import compile as compiler
from cutekernels import compilers
from cutekernels.autotune import runtime
from cutekernels.autotune.requests import Load, Measure, Outcome, Prepare, Warm
from cutekernels.autotune.runtime import LocalRuntime, NotPrepared
from cutekernels.backends import Facts
from cutekernels.errors import CacheUnusable
from cutekernels.isolate import ChildDied, StartFailed
from cutekernels.ops.norms.op import RMS_NORM
from cutekernels.ops.products.dense import GEMM
from tests.tuner.toys import BEST, DEFAULT, H200, PROBLEM, TOY

_prepared: list[Prepare] = []


def fake_compile(request: tuple[str, str, str, Any]) -> Facts:
    """A stand-in for a compiler: aborts on one config, reports its environment on the others."""
    _op, _problem, config, gpu = request
    if config == str(BEST):
        tempfile.NamedTemporaryFile(delete=False)  # noqa: SIM115  (left behind, as by a compiler that is killed)
        os.abort()
    return Facts(gpu.sm_count, len(os.environ["CUDA_VISIBLE_DEVICES"]), os.getpid() != os.getppid())


def counted_compile(request: tuple[str, str, str, Any]) -> int:
    """A real compile; how often it asked the driver or torch for a GPU."""
    import torch
    from cuda.bindings import driver

    asked = []
    for module, name in ((torch.cuda, "is_available"), (torch.cuda, "device_count"), (driver, "cuInit")):
        real = getattr(module, name)
        setattr(module, name, lambda *args, real=real, name=name: asked.append(name) or real(*args))
    compilers.compile_candidate(request)
    return len(asked)


def fake_worker(request: Warm | Prepare | Load | Measure) -> Any:
    """A stand-in for the worker: dies on one config, reports how often it was prepared on the others."""
    if isinstance(request, Warm | Load):
        return None
    if isinstance(request, Prepare):
        if request.seed == 13:
            raise RuntimeError("no reference")
        _prepared.append(request)
        return None
    assert _prepared[-1] == request.prepare
    if str(BEST) in request.configs:
        os._exit(70)
    return {text: Outcome(0.5, (float(len(_prepared)), float(os.getpid()))) for text in request.configs}


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalRuntime]:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2]))
    monkeypatch.setattr(runtime, "COMPILE_TARGET", "tests.tuner.test_runtime:fake_compile")
    monkeypatch.setattr(runtime, "WORKER_TARGET", "tests.tuner.test_runtime:fake_worker")
    with LocalRuntime(2) as one:
        yield one


def test_compiles_see_no_gpu_and_an_abort_costs_one(machine: LocalRuntime) -> None:
    good, bad, again = (machine.compile(TOY, PROBLEM, c, H200) for c in (DEFAULT, BEST, DEFAULT))
    assert good.result(60) == again.result(60) == Facts(H200.sm_count, 0, True)
    with pytest.raises(ChildDied, match="SIGABRT"):
        bad.result(60)


def test_temporary_files_of_killed_processes_go_with_the_run(machine: LocalRuntime) -> None:
    (folder,) = compiler.directory().glob("run-*.new")
    with pytest.raises(ChildDied):
        machine.compile(TOY, PROBLEM, BEST, H200).result(60)
    assert list(folder.iterdir())
    machine.close()
    assert list(compiler.directory().iterdir()) == []


def test_an_unusable_cache_is_told_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler.directory().chmod(0o777)
    with pytest.raises(CacheUnusable, match="mode 777"):
        LocalRuntime(2)


def test_a_problem_that_cannot_be_prepared_is_no_verdict_on_a_config(machine: LocalRuntime) -> None:
    with pytest.raises(NotPrepared, match="no reference"):
        machine.measure(Measure(Prepare("toy", str(PROBLEM), H200, seed=13), (str(DEFAULT),)))


def test_the_worker_is_prepared_once_per_problem_and_process(machine: LocalRuntime) -> None:
    first = Prepare("toy", str(PROBLEM), H200)
    second = Prepare("toy", str(PROBLEM), H200, seed=1)

    def ask(prepare: Prepare, config: Any = DEFAULT) -> tuple[float, ...]:
        return machine.measure(Measure(prepare, (str(config),)))[str(config)].us

    preparations, pid = ask(first)
    assert preparations == 1
    assert ask(first) == (1, pid)
    assert ask(second) == (2, pid)
    with pytest.raises(ChildDied, match="code 70"):
        ask(second, BEST)
    preparations, other = ask(second)
    assert preparations == 1 and other != pid, "a fresh process, prepared again"
    machine.refresh()
    assert ask(second)[1] not in (pid, other)


def test_compiles_ask_no_driver_for_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2]))
    monkeypatch.setattr(runtime, "COMPILE_TARGET", "tests.tuner.test_runtime:counted_compile")
    with LocalRuntime(1) as machine:
        for op, text in ((GEMM, "m=64 n=64 k=64"), (RMS_NORM, "rows=16 cols=64")):
            problem = op.Problem.parse(text)
            assert machine.compile(op, problem, op.default(problem, H200), H200).result(120) == 0


def test_an_environment_that_cannot_compile_is_no_verdict_on_a_config(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "COMPILE_TARGET", "no_such_package:f")
    with LocalRuntime(1) as machine, pytest.raises(StartFailed, match="no_such_package"):
        machine.compile(TOY, PROBLEM, DEFAULT, H200).result(60)
