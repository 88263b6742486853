"""``warmup``: compiling ahead, side by side, in processes that may crash, hang or be interrupted."""

from __future__ import annotations

import logging
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from cutekernels import compile as compiler
from cutekernels import compilers, dispatch, introspection
from cutekernels import gpu as gpus
from cutekernels.backends import Facts
from cutekernels.errors import CacheUnusable, CompileError, CompilerKilled, UnsupportedProblem
from tests.processes import python
from tests.trunk.test_isolate import gone

ROOT = Path(__file__).parents[2]
H200 = gpus.lookup("h200")
TARGET = f"{__name__}:pretend"
PROBLEMS = [
    ("silu_mul", f"rows={rows} cols=512 dtype={dtype}") for dtype in ("bf16", "fp16", "fp32") for rows in (1, 64)
]


def pretend(request: tuple[str, str, str, Any]) -> Facts:
    """A stand-in for a compiler: it does what a file orders for some words of a problem, and notes all others."""
    cache = os.environ["CUTEKERNELS_CACHE"]
    if Path(cache + ".orders").exists():
        for line in Path(cache + ".orders").read_text().splitlines():
            words, verb = line.split(":")
            if words in request[1]:
                {"abort": os.abort, "raise": _fail, "exit": lambda: os._exit(3), "hang": _hang}[verb]()
    with Path(cache + ".compiled").open("a") as file:
        file.write(f"{os.getpid()} {os.environ['CUDA_VISIBLE_DEVICES']}. {request[1]}\n")
    return Facts(1, 0, 0)


def _hang() -> None:
    with Path(os.environ["CUTEKERNELS_CACHE"] + ".hanging").open("a") as file:
        file.write(f"{os.getpid()}\n")
    time.sleep(120)


def _fail() -> None:
    raise CompilerKilled("ptxas said no")


@pytest.fixture(autouse=True)
def _gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "detect", lambda device=None: H200)


@pytest.fixture
def orders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of :func:`pretend`'s orders. Kernels are none, and get is not reached by problems that fail."""
    monkeypatch.syspath_prepend(str(ROOT))
    monkeypatch.setattr(compilers, "TARGET", TARGET)
    monkeypatch.setattr(compiler, "get", lambda op, p, c, gpu: lambda *args: None)
    dispatch.reload()
    return tmp_path / "cache.orders"


@pytest.fixture(autouse=True)
def _no_plan_stays() -> Iterator[None]:
    yield
    dispatch.reload()


def compiled(tmp_path: Path) -> list[list[str]]:
    file = tmp_path / "cache.compiled"
    return [line.split(maxsplit=2) for line in file.read_text().splitlines()] if file.exists() else []


def test_each_kernel_is_compiled_once_in_processes_that_see_no_gpu(orders: Path, tmp_path: Path) -> None:
    plans = introspection.warmup(PROBLEMS, 0, jobs=2)
    assert [plan.origin for plan in plans] == ["default"] * 6
    done = compiled(tmp_path)
    assert len(done) == 3, "those of 1 and of 64 rows share a kernel"
    assert {visible for _, visible, _ in done} == {"."}
    assert 1 <= len({pid for pid, _, _ in done} - {str(os.getpid())}) <= 2
    assert list(compiler.directory().iterdir()) == [], "no folder or lock of the processes stays"


FAILURES = {
    "aborts": ("abort", CompileError, "SIGABRT"),
    "exits": ("exit", CompileError, "exited with code 3"),
    "hangs": ("hang", CompilerKilled, "no answer within 0.3 s.*fewer jobs"),  # asleep: it had no CPU time
    "raises": ("raise", CompilerKilled, "ptxas said no"),
}


@pytest.mark.parametrize(("verb", "kind", "words"), FAILURES.values(), ids=FAILURES.keys())
def test_a_compiler_that_fails_fails_its_kernel_only(
    verb: str, kind: type[Exception], words: str, orders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    orders.write_text(f"dtype=fp16:{verb}\n")
    if verb == "hang":
        monkeypatch.setattr(compilers, "COMPILE_DEADLINE_S", 0.3)
    with pytest.raises(CompileError, match=rf"silu_mul \[rows=1 cols=512 dtype=fp16.*{words}") as raised:
        introspection.warmup(PROBLEMS, 0, jobs=2)
    assert type(raised.value) is kind
    assert len(compiled(tmp_path)) == 2, "the others are compiled"
    assert len(dispatch._plans) == 4, "and planned, but for the two problems of the kernel that is missing"


def test_several_failures_are_one_error(orders: Path) -> None:
    orders.write_text("dtype=fp16:raise\ndtype=fp32:abort\n")
    with pytest.raises(
        CompileError, match="(?s)2 kernels were not compiled, all others are ready: .*said no; .*SIGABRT"
    ):
        introspection.warmup(PROBLEMS, 0, jobs=1)


def test_where_no_process_starts_the_caller_compiles(
    orders: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    assert len(introspection.warmup(PROBLEMS, 0, jobs=2)) == 6
    (message,) = [message for message in caplog.messages if "database" not in message]
    assert message.startswith("3 kernels are compiled in the calling process: no process")


def test_parts_of_a_chain_are_compiled_ahead_too(orders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from cutekernels.ops.products.fused import CHAIN
    from cutekernels.ops.products.norm import RMS_NORM_LINEAR

    monkeypatch.setattr(type(RMS_NORM_LINEAR), "default", lambda self, p, gpu: CHAIN)
    monkeypatch.setattr("torch.cuda.current_device", lambda: 0)
    introspection.warmup([("rms_norm_linear", "m=64 n=512 k=512")], 0, jobs=1)
    assert len(compiled(tmp_path)) == 3, "the chain itself, the norm and the product"


def test_a_cache_that_cannot_be_written_says_so_at_once(orders: Path) -> None:
    compiler.directory().chmod(0o777)
    with pytest.raises(CacheUnusable, match="mode 777"):
        introspection.warmup(PROBLEMS, 0)


def test_a_call_that_waits_for_a_compiler_names_it_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.trunk import test_compile as toys  # here: compiling processes import this file

    monkeypatch.setitem(compiler._BACKENDS, "text", "tests.trunk.test_compile:TextArtifact")
    monkeypatch.setattr(compiler, "_loaded", {})
    monkeypatch.setattr(compiler, "_told", False)
    caplog.set_level(logging.INFO, logger="cutekernels")
    toys.get()
    assert caplog.messages == [], "a short one goes unsaid"
    monkeypatch.setattr(compiler, "_LONG_S", 0.01)
    toys.get()
    toys.forget()
    toys.get()
    compiler.prepare(toys.OP, toys.PROBLEM, toys.CONFIG.replace(warps=4), H200)
    assert caplog.messages == [], "what is in memory or on disk took no time, and no call waited for the other"
    toys.get(config=toys.CONFIG.replace(tile=64))
    (record,) = caplog.records
    toys.get(toys.PROBLEM.replace(dtype="fp16"))
    assert caplog.records == [record]
    assert record.levelno == logging.INFO
    assert re.match(r"a call waited 0\.\d s for toy \[", record.getMessage())
    assert f"cutekernels.warmup([('toy', '{toys.PROBLEM}'), ...]) compiles ahead of calls" in record.getMessage()


@pytest.mark.parametrize("jobs", [0, -1, 2.0, True, "2"])
def test_jobs_are_a_number_of_processes(jobs: Any, orders: Path) -> None:
    with pytest.raises(UnsupportedProblem, match="a number of jobs, processes from 1 up; .*leave it out"):
        introspection.warmup(PROBLEMS, 0, jobs=jobs)


# ---- how many -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cpus", "quota", "free_gib", "limit", "expected"),
    [
        (4, None, 100, None, 4),
        (128, None, 500, None, compilers.MOST),
        (128, "max 100000", 500, None, compilers.MOST),
        (128, "250000 100000", 500, None, 2),
        (128, "50000 100000", 500, None, 1),
        (8, None, 3, None, 3),
        (8, None, 0, None, 1),
        (8, None, 500, (6, 2), 4),
        (8, None, 500, ("max", 2), 8),
    ],
)
def test_processes_are_as_many_as_cpus_and_memory_allow(
    cpus: int,
    quota: str | None,
    free_gib: int,
    limit: tuple[int | str, int] | None,
    expected: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(compilers, "_CGROUP", tmp_path)
    monkeypatch.setattr(compilers, "_available_bytes", lambda: free_gib << 30)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cpus)))
    if quota is not None:
        (tmp_path / "cpu.max").write_text(quota + "\n")
    for name, value in zip(("max", "current"), limit or (), strict=False):
        (tmp_path / f"memory.{name}").write_text(str(value << 30 if isinstance(value, int) else value) + "\n")
    assert compilers.affordable() == expected


def test_this_machine_has_memory() -> None:
    assert compilers._available_bytes() > 1 << 24


# ---- programs -------------------------------------------------------------------------------------------

HEAD = """
import os, signal, sys, threading, time
from pathlib import Path
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell ignores it for what runs in the background
sys.path.append(Path("elsewhere"))
print("main", flush=True)
import cutekernels as ck
from cutekernels import compilers, dispatch, gpu
gpu.detect = lambda device=None: gpu.lookup("h200")
"""
WORKS = """
found = []
rope = "batch=1 seq=1 heads_q=2 head_dim=64 rotary=64"
problems = [("silu_mul", "rows=1 cols=512"), ("rope", rope)]
thread = threading.Thread(target=lambda: found.extend(ck.warmup(problems, 0)), daemon=True)
thread.start()
thread.join()
assert len(found) == 2, found
dispatch.reload()
compilers.Compilers = None
assert len(ck.warmup([("silu_mul", "rows=64 cols=512")], 0)) == 1, "from the disk"
print("done", flush=True)
"""
HANGS = f"""
compilers.TARGET = {TARGET!r}
def ahead():
    ck.warmup([("silu_mul", "rows=1 cols=512"), ("silu_mul", "rows=1 cols=512 dtype=fp16")], 0, jobs=2)
"""
ENDS = """
threading.Thread(target=ahead, daemon=True).start()
while not Path(os.environ["CUTEKERNELS_CACHE"] + ".go").exists():
    time.sleep(0.02)
"""


@contextmanager
def program(text: str, tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A script without a guard, which Python reads from stdin as from a notebook: it has no file."""
    with subprocess.Popen(
        [sys.executable, "-"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    ) as process:
        try:
            assert process.stdin is not None
            process.stdin.write(HEAD + textwrap.dedent(text))
            process.stdin.close()
            process.stdin = None
            yield process
        finally:
            process.kill()


@pytest.mark.slow
def test_a_script_without_a_guard_may_warm_up_from_a_daemon_thread(tmp_path: Path) -> None:
    with program(WORKS, tmp_path) as process:
        out, err = process.communicate(timeout=240)
    assert out.split() == ["main", "done"], (out, err)
    assert len(list((tmp_path / "cache" / "objects").glob("*.triton"))) == 2


@pytest.mark.parametrize("interrupted", [True, False], ids=["ctrl-c", "the end of a program whose thread compiles"])
def test_no_compiler_outlives_its_program(interrupted: bool, tmp_path: Path) -> None:
    (tmp_path / "cache.orders").write_text("rows:hang\n")
    with program(HANGS + ("ahead()" if interrupted else ENDS), tmp_path) as process:
        hanging = tmp_path / "cache.hanging"
        while not hanging.exists() or len(found := hanging.read_text().split()) < 2:
            assert process.poll() is None, process.communicate()
            time.sleep(0.05)
        if interrupted:
            process.send_signal(signal.SIGINT)
        else:
            (tmp_path / "cache.go").touch()
        _, err = process.communicate(timeout=60)
    assert ("KeyboardInterrupt" in err) is interrupted
    assert all(gone(int(pid)) for pid in found)


def test_what_is_there_is_not_compiled_again(
    orders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(compiler, "ready", lambda key: True)
    with caplog.at_level(logging.INFO, logger="cutekernels"):
        introspection.warmup(PROBLEMS, 0, jobs=2)
    assert compiled(tmp_path) == []
    assert [message for message in caplog.messages if "database" not in message] == []


def test_the_longest_compile_begins_first_and_in_this_process(
    orders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here: list[str] = []
    monkeypatch.setattr(compilers, "compile_candidate", lambda request: here.append(request[1]))
    short = [(op, problem, "", H200) for op, problem in PROBLEMS[:3]]
    attention = ("attention", "batch=1 seq_q=64 seq_kv=64 heads_q=2 heads_kv=2", "", H200)
    done: list[int] = []
    found = compilers.side_by_side([*short, attention], jobs=1, advance=lambda: done.append(1), here=True)
    assert found == [None] * 4 and len(done) == 4
    assert here == [attention[1]]
    assert [line[2] for line in compiled(tmp_path)] == [problem for _, problem, _, _ in short]
    assert compilers.side_by_side([*short, attention], jobs=1) == [None] * 4
    assert compiled(tmp_path)[3][2] == attention[1], "in another process too"


def test_a_compiling_process_does_not_import_torch(tmp_path: Path) -> None:
    """It would take as long as the compile."""
    code = """
        import sys
        from cutekernels import compilers, dispatch, gpu
        from cutekernels.ops import registry
        op, spec = registry.get("gemm"), gpu.lookup("h200")
        p = op.Problem.parse("m=16 n=64 k=64 b_major=k")
        print(compilers.answer((op.name, str(p), str(dispatch.resolve(op, p, spec).config), spec)))
        assert "torch" not in sys.modules and "tvm_ffi" in sys.modules
        import torch
    """
    env = os.environ | compilers.cute.WITHOUT_GPU | {"CUTEKERNELS_CACHE": str(tmp_path)}
    done = python(textwrap.dedent(code), check=False, env=env)
    assert done.returncode == 0 and "registers" in done.stdout, done.stderr
