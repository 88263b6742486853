"""The cache of compiled kernels: hits, rebuilds, refusals, and concurrent builds."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import pickle
import stat
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest

from cutekernels import cli
from cutekernels import compile as compiler
from cutekernels import gpu as gpus
from cutekernels.autotune import runtime
from cutekernels.backends import Artifact, Facts
from cutekernels.errors import CacheUnusable, CompileError, CompilerKilled, InvalidConfig, UnsupportedProblem
from cutekernels.isolate import Child, Pool, RemoteError
from cutekernels.ops import registry
from cutekernels.ops.products.dense import GEMM, SCHEDULES
from cutekernels.ops.products.schedules.problem import GemmProblem
from cutekernels.ops.products.schedules.schedule import extras_of
from tests.tuner.toys import A100, H200, ToyConfig, ToyOp, ToyProblem

PROBLEM = ToyProblem(16, 64)
CONFIG = ToyConfig(32, 2, True)
FACTS = Facts(registers=32, stack_bytes=0, smem_bytes=1024)


def checksum(facts: dict[str, int]) -> str:
    """Checksum of the one compiled object and of ``facts``."""
    return hashlib.sha256(only("*.text").read_bytes() + json.dumps(facts, sort_keys=True).encode()).hexdigest()


class TextArtifact(Artifact):
    """A kernel that is a line of text, and whose launch returns it."""

    backend: ClassVar[str] = "text"

    def __init__(self, text: str) -> None:
        self.text = text
        self.facts = FACTS

    def save(self, path: Path) -> None:
        path.write_text(self.text)

    @classmethod
    def load(cls, path: Path) -> Callable[..., Any]:
        text = path.read_text()
        if not text.startswith("toy"):
            raise CompileError(f"{path} holds no toy kernel")
        return lambda: f"loaded {text}"

    def kernel(self) -> Callable[..., Any]:
        return lambda: f"fresh {self.text}"


class Compiled(ToyOp):
    """A toy op that records each compile."""

    def build(self, p: ToyProblem, c: ToyConfig, gpu: Any) -> Any:
        with built_log().open("a") as log:
            log.write(f"{os.getpid()} {c}\n")
        time.sleep(0.05)  # long enough for others to arrive meanwhile
        return TextArtifact(f"toy [{c}] for {gpu.target}")


OP = Compiled()


def built_log() -> Path:
    return Path(os.environ["CUTEKERNELS_CACHE"] + ".builds")


def builds() -> int:
    return len(built_log().read_text().splitlines()) if built_log().exists() else 0


@pytest.fixture(autouse=True)
def _toy_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(compiler._BACKENDS, "text", f"{__name__}:TextArtifact")
    monkeypatch.setattr(compiler, "_loaded", {})


def files(pattern: str) -> list[Path]:
    return sorted(compiler.directory().glob(pattern))


def only(pattern: str) -> Path:
    (file,) = files(pattern)
    return file


def get(problem: Any = PROBLEM, config: Any = CONFIG, gpu: Any = H200) -> str:
    return compiler.get(OP, problem, config, gpu)()  # type: ignore[no-any-return]


def forget() -> None:
    """Clears memory, as in a new process."""
    compiler._loaded.clear()


# ---- hits -----------------------------------------------------------------------------------------------


class TestHits:
    def test_built_once_then_from_memory_then_from_disk(self) -> None:
        assert get().startswith("fresh toy")
        assert get().startswith("fresh toy")
        forget()
        assert get() == "loaded toy [tile=32 warps=2 fast=1] for sm_90a"
        assert builds() == 1

    def test_prepare_builds_without_loading(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuse(path: Path) -> Any:
            raise AssertionError("nothing is to be loaded")

        with monkeypatch.context() as patch:
            patch.setattr(TextArtifact, "load", refuse)
            patch.setattr(TextArtifact, "kernel", refuse)
            for _ in range(2):
                assert compiler.prepare(OP, PROBLEM, CONFIG, H200) == FACTS
        assert get().startswith("loaded")
        assert builds() == 1

    def test_an_entry_says_what_it_was_made_from(self) -> None:
        compiler.prepare(OP, PROBLEM, CONFIG, H200)
        key = compiler.cache_key(OP, PROBLEM, CONFIG, H200)
        assert sorted(f.name for f in files("[!.]*")) == [f"{key}.json", f"{key}.text"]
        record = json.loads(only("*.json").read_text())
        assert record["made_from"] == {
            "op": "toy",
            "static": {"dtype": "bf16"},
            "config": str(CONFIG),
            "target": "sm_90a",
        }
        assert record["sha256"] == checksum(record["facts"])

    def test_a_build_that_fails_leaves_nothing_and_is_tried_again(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def fail(p: Any, c: Any, gpu: Any) -> Any:
            raise CompileError("ptxas said no")

        with monkeypatch.context() as patch:
            patch.setattr(OP, "build", fail)
            for call in (compiler.get, compiler.prepare):
                with pytest.raises(CompileError, match="ptxas said no"):
                    call(OP, PROBLEM, CONFIG, H200)
        assert not files("*.text")
        assert not files("*.json")
        assert get().startswith("fresh")


# ---- keys -----------------------------------------------------------------------------------------------


class TestKey:
    def key(self, problem: Any = PROBLEM, config: Any = CONFIG, gpu: Any = H200, op: Any = OP) -> str:
        return compiler.cache_key(op, problem, config, gpu)

    def test_extents_are_not_in_it(self) -> None:
        assert self.key(ToyProblem(4096, 128)) == self.key()
        assert get() == get(ToyProblem(7, 9))
        assert builds() == 1

    def test_each_gpu_has_a_key_of_its_own(self) -> None:
        """A build may read sizes and rates of the GPU, not only its target."""
        assert len({self.key(gpu=gpu) for gpu in (gpus.lookup("h100"), H200, A100)}) == 3

    def test_each_static_field_and_knob_is_in_it(self) -> None:
        keys = {self.key(), self.key(PROBLEM.replace(dtype="fp16"))}
        for name, values in ToyConfig.space().items():
            keys |= {self.key(config=CONFIG.replace(**{name: value})) for value in values}
        assert len(keys) == 2 + 3 + 3 + 1

    def test_the_op_is_in_it(self) -> None:
        class Other(Compiled):
            name = "other"

        assert self.key(op=Other()) != self.key()

    def test_every_static_field_of_gemm_is_in_it(self) -> None:
        base = GemmProblem(64, 64, 64, dtype="fp16", c="n")
        config = GEMM.default(base, H200)
        values = {
            name: next(v for v in field.metadata["values"] if v != getattr(base, name))
            for name, field in GemmProblem.__dataclass_fields__.items()
            if "values" in field.metadata
        }
        keys = {compiler.cache_key(GEMM, base.replace(**{name: v}), config, H200) for name, v in values.items()}
        assert len(keys | {compiler.cache_key(GEMM, base, config, H200)}) == 1 + len(base.static())

    def test_a_gpu_that_differs_in_anything_is_another_key(self) -> None:
        """``build`` may read all of a GpuSpec."""
        op = registry.get("rms_norm")
        p = op.Problem.parse("rows=16 cols=4096")
        c = op.default(p, H200)
        specs = [*gpus.GPUS, gpus.lookup("h200-as-l40s")]
        specs += [replace(H200, sm_count=131), replace(H200, l2_bytes=1), replace(H200, dram_gbps=1.0)]
        assert len({compiler.cache_key(op, p, c, spec) for spec in specs}) == len(specs)


# ---- damage ---------------------------------------------------------------------------------------------


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:5])


DAMAGE: dict[str, Callable[[], object]] = {
    "object truncated": lambda: cut(only("*.text")),
    "object empty": lambda: only("*.text").write_bytes(b""),
    "object changed": lambda: only("*.text").write_text("toy [something else]"),
    "object gone": lambda: only("*.text").unlink(),
    "json truncated": lambda: cut(only("*.json")),
    "json binary": lambda: only("*.json").write_bytes(b"\xff\x00\xfe"),
    "json a list": lambda: only("*.json").write_text("[]"),
    "json empty": lambda: only("*.json").write_text("{}"),
    "json gone": lambda: only("*.json").unlink(),
    "backend unknown": lambda: edit(backend="../../etc/passwd"),
    "backend no text": lambda: edit(backend=["text"]),
    "facts of another version": lambda: edit(facts={"registers": 1, "barriers": 2}),
    "checksum of another": lambda: edit(sha256="0" * 64),
    "facts of another": lambda: edit(facts={"registers": 32, "stack_bytes": 4096, "smem_bytes": 1024}),
    "nested without end": lambda: only("*.json").write_text("[" * 100_000),
}


def edit(**changes: Any) -> None:
    file = only("*.json")
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())
def test_a_damaged_entry_is_built_again(damage: Callable[[], object], caplog: pytest.LogCaptureFixture) -> None:
    get()
    forget()
    damage()
    with caplog.at_level(logging.WARNING, logger="cutekernels"):
        assert get().startswith("fresh")
    assert builds() == 2
    forget()
    assert get().startswith("loaded"), "and then it is whole"
    assert builds() == 2
    assert all("building it again" in message for message in caplog.messages)


def test_an_object_that_does_not_load_is_built_again(caplog: pytest.LogCaptureFixture) -> None:
    """The checksum is valid, but the object is one that this process cannot load."""
    get()
    forget()
    only("*.text").write_text("another loader's format")
    edit(sha256=checksum(json.loads(only("*.json").read_text())["facts"]))
    with caplog.at_level(logging.WARNING, logger="cutekernels"):
        assert get().startswith("fresh")
    assert "holds no toy kernel" in caplog.text
    forget()
    assert get().startswith("loaded")
    assert builds() == 2


def test_a_save_that_fails_half_way_shows_nobody_half_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[str]] = []

    def half(self: TextArtifact, path: Path) -> None:
        path.write_text(self.text[:6])
        seen.append([f.name for f in files("*") if f.suffix not in (".lock", ".new")])
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(TextArtifact, "save", half)
        with pytest.raises(CompileError, match="No space left on device") as raised:
            get()
    assert "CUTEKERNELS_CACHE" in str(raised.value)
    assert seen == [[]], "it is written beside its place"
    assert files("*") == [], "nothing is left behind"
    assert get().startswith("fresh")
    assert len(files("*.text")) == len(files("*.json")) == 1


def test_an_index_that_cannot_be_written_leaves_no_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    real = compiler._replace

    def replace(path: Path, write: Any) -> None:
        if path.suffix == ".json":
            raise OSError(5, "Input/output error")
        real(path, write)

    with monkeypatch.context() as patch:
        patch.setattr(compiler, "_replace", replace)
        with pytest.raises(CompileError, match="cannot be written"):
            get()
    assert not files("*.json")
    assert get().startswith("fresh"), "an object without its checksum is not believed"
    assert builds() == 2


# ---- failures of the machine ----------------------------------------------------------------------------


def chained(outer: Exception, *causes: Exception) -> Exception:
    """``outer``, raised from the causes in turn."""
    link = outer
    for cause in causes:
        link.__cause__ = cause
        link = cause
    return outer


SPOILS: dict[str, tuple[Exception, type[Exception]]] = {
    "full": (OSError(28, "No space left on device"), CacheUnusable),
    "full, told by the compiler": (chained(CompileError("no"), OSError(122, "Disk quota exceeded")), CacheUnusable),
    "full, in the compiler's words": (CompileError("LLVM ERROR: IO failure: No space left on device"), CacheUnusable),
    "a missing tool": (FileNotFoundError(2, "No such file", "/tmp/x"), CacheUnusable),
    "no memory": (MemoryError(), CompilerKilled),
    "no memory for a tool": (chained(CompileError("no"), OSError(12, "Cannot allocate memory")), CompilerKilled),
    "ptxas killed": (chained(CompileError("no"), RuntimeError("`ptxas` failed with error code -9")), CompilerKilled),
    "no compiler": (ModuleNotFoundError("No module named 'cutlass'"), CompilerKilled),
    "ptxas refused": (chained(CompileError("no"), RuntimeError("`ptxas` failed with error code 255")), CompileError),
    "a file looked for meanwhile": (chained(CompileError("no"), FileNotFoundError(2, "No such file")), CompileError),
}


@pytest.mark.parametrize(("failure", "kind"), SPOILS.values(), ids=SPOILS.keys())
def test_what_the_machine_spoils_is_no_plain_compile_error(
    failure: Exception, kind: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(p: Any, c: Any, gpu: Any) -> Any:
        raise failure

    monkeypatch.setattr(OP, "build", fail)
    with pytest.raises(CompileError) as raised:
        get()
    assert type(raised.value) is kind
    assert files("*") == []


def spoiled_in_child(order: str) -> str:
    """Compiles the default of gemm or silu_mul with files limited to 2 KiB, as on a full disk; the error's name."""
    import resource

    resource.setrlimit(resource.RLIMIT_FSIZE, (2048, 2048))
    op = registry.get(order.partition(" ")[0])
    p = op.Problem.parse(order.partition(" ")[2])
    try:
        compiler.prepare(op, p, op.default(p, H200), H200)
    except CompileError as error:
        return type(error).__name__
    return "compiled"


@pytest.mark.parametrize("order", ["gemm m=64 n=64 k=64", "silu_mul rows=64 cols=512"])
def test_a_full_disk_is_told_apart_by_the_real_compilers(order: str) -> None:
    env = {"CUDA_VISIBLE_DEVICES": "", "PYTHONDONTWRITEBYTECODE": "1"}  # a first import would leave half a .pyc
    with Child(f"{__name__}:spoiled_in_child", env=env) as child:
        assert child.ask(order, 120) == "CacheUnusable"
    assert files("*") == []


def build_and_hang(config: str) -> None:
    compiler._BACKENDS["text"] = f"{__name__}:TextArtifact"
    with compiler.scratch() as folder, compiler._hold_key("c" * 32):
        (folder / "tmp.ptx").write_text("half")
        (compiler.directory() / ("c" * 32 + ".new") / "half.text").write_text("half")
        (compiler.directory() / "ready").touch()
        time.sleep(60)


def test_what_a_killed_build_leaves_is_removed_and_what_a_living_one_holds_is_not() -> None:
    with Child(f"{__name__}:build_and_hang") as child, ThreadPoolExecutor(1) as thread:
        asked = thread.submit(child.ask, "", 60)
        while not (compiler.directory() / "ready").exists():
            time.sleep(0.02)
        compiler.tidy()
        held = [f.name for f in files("*")]
        assert len(held) == 5, "a lock and a folder each, and the mark"
        child.kill()
        assert asked.exception() is not None
    assert [f.name for f in files("*")] == held
    compiler.tidy()
    assert [f.name for f in files("*")] == ["ready"]


def test_a_lock_of_another_name_is_somebody_elses() -> None:
    lock, folder = compiler.directory() / "poetry.lock", compiler.directory() / "poetry.new"
    lock.touch()
    folder.mkdir()
    abandoned = compiler.directory() / f"{'ab' * 16}.lock"
    abandoned.touch()
    compiler.tidy()
    assert lock.exists() and folder.exists() and not abandoned.exists()


def test_a_killed_build_does_not_spoil_the_next_of_its_key() -> None:
    key = compiler.cache_key(OP, PROBLEM, CONFIG, H200)
    (compiler.directory() / f"{key}.lock").touch()
    folder = compiler.directory() / f"{key}.new"
    folder.mkdir()
    (folder / f"{key}.text").mkdir()
    assert get().startswith("fresh")
    assert [f.suffix for f in files("*")] == [".json", ".text"]


# ---- the directory --------------------------------------------------------------------------------------


class TestDirectory:
    def test_it_is_private_from_the_start(self) -> None:
        get()
        for place in (compiler.directory(), compiler.directory().parent):
            assert stat.S_IMODE(place.stat().st_mode) == 0o700

    @pytest.mark.parametrize("mode", [0o700, 0o755, 0o750, 0o711, 0o770, 0o702, 0o777])
    def test_the_doctor_agrees_with_the_compiler(self, mode: int) -> None:
        place = compiler.directory().parent
        place.chmod(mode)
        try:
            usable = bool(compiler.directory())
        except CacheUnusable:
            usable = False
        found = cli._cache_dir(place)
        assert (found.state == "ok") is usable and ("chmod 700" in found.remedy) is (mode != 0o700)

    @pytest.mark.parametrize("mode", [0o770, 0o702, 0o777])
    @pytest.mark.parametrize("which", ["objects", ""])
    def test_one_that_others_can_write_is_refused(self, mode: int, which: str) -> None:
        get()
        forget()
        place = compiler.directory().parent / which
        place.chmod(mode)
        for call in (compiler.get, compiler.prepare):
            with pytest.raises(CompileError) as raised:
                call(OP, PROBLEM, CONFIG, H200)
            for part in (str(place), f"mode {mode:o}", "chmod", "CUTEKERNELS_CACHE"):
                assert part in str(raised.value)
        place.chmod(0o700)
        assert get().startswith("loaded")

    def test_one_of_somebody_else_is_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        get()
        forget()
        monkeypatch.setattr(os, "getuid", lambda: 54321)
        with pytest.raises(CompileError, match="must be this user's own"):
            get()

    def test_one_that_cannot_be_made_is_an_error_with_a_remedy(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "file").write_text("")
        for place in (tmp_path / "file", tmp_path / "file" / "below"):
            monkeypatch.setenv("CUTEKERNELS_CACHE", str(place))
            with pytest.raises(CompileError, match="cannot be used: .*; set CUTEKERNELS_CACHE"):
                get()

    def test_a_read_only_one_still_serves_what_it_has(self, monkeypatch: pytest.MonkeyPatch) -> None:
        get()
        forget()

        real = os.open

        def refuse(path: Any, flags: int, *rest: Any) -> int:  # what a read-only mount does first
            if flags & os.O_CREAT:
                raise OSError(30, "Read-only file system")
            return real(path, flags, *rest)

        monkeypatch.setattr(compiler.os, "open", refuse)
        assert get().startswith("loaded")
        with pytest.raises(CompileError, match="cannot be written: .*Read-only file system; .*CUTEKERNELS_CACHE"):
            get(config=CONFIG.replace(tile=64))


# ---- processes ------------------------------------------------------------------------------------------


def prepare_in_child(config: str) -> tuple[int, Facts]:
    """A request to a process of its own, which begins when three processes have one: see :class:`TestProcesses`."""
    compiler._BACKENDS["text"] = f"{__name__}:TextArtifact"
    ready = Path(os.environ["CUTEKERNELS_CACHE"] + ".ready")
    ready.mkdir(exist_ok=True)
    (ready / str(os.getpid())).touch()
    deadline = time.monotonic() + 60
    while len(list(ready.iterdir())) < 3 and time.monotonic() < deadline:
        time.sleep(0.01)
    return os.getpid(), compiler.prepare(OP, PROBLEM, ToyConfig.parse(config), H200)


class TestProcesses:
    def test_they_build_a_key_once_between_them(self) -> None:
        with Pool(f"{__name__}:prepare_in_child", 3) as pool:
            replies = dict(enumerate(f.result(150) for f in [pool.submit(str(CONFIG), 120) for _ in range(9)]))
        assert len({pid for pid, _ in replies.values()}) == 3
        assert len(replies) == 9
        assert {facts for _, facts in replies.values()} == {FACTS}
        assert builds() == 1
        assert get().startswith("loaded")

    def test_a_blind_child_compiles_gemm_and_this_process_loads_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
        problem = GemmProblem.parse("m=64 n=64 k=64")
        config = GEMM.default(problem, H200)
        with Child(runtime.COMPILE_TARGET, env={"CUDA_VISIBLE_DEVICES": ""}) as child:
            facts = child.ask(("gemm", str(problem), str(config), H200), 120)
            for request, error in (
                (("conv", "", "", H200), UnsupportedProblem),
                (("gemm", str(problem), "tile_m=1", H200), InvalidConfig),
            ):
                with pytest.raises(RemoteError) as raised:
                    child.ask(request, 60)
                assert raised.value.type_name.endswith(error.__name__)
        assert facts.smem_bytes == SCHEDULES[config.body].smem(config, extras_of(problem)).total_bytes
        assert pickle.loads(pickle.dumps(facts)) == facts

        def refuse(*args: Any) -> Any:
            raise AssertionError("it is in the cache")

        monkeypatch.setattr(type(GEMM), "build", refuse)
        assert compiler.prepare(GEMM, problem, config, H200) == facts
        assert callable(compiler.get(GEMM, problem, config, H200))
        assert callable(compiler.get(GEMM, GemmProblem(128, 96, 32), config, H200)), "other extents, the same kernel"

    def test_a_truncated_cute_object_is_refused_by_its_loader(self, tmp_path: Path) -> None:
        problem = GemmProblem.parse("m=32 n=32 k=32")
        artifact = GEMM.build(problem, GEMM.default(problem, A100), A100)
        whole, half = tmp_path / "whole.cute", tmp_path / "half.cute"
        artifact.save(whole)
        half.write_bytes(whole.read_bytes()[:3000])
        loader = type(artifact)
        assert callable(loader.load(whole))
        for bad in (half, tmp_path / "none.cute"):
            with pytest.raises(CompileError, match="is not a compiled kernel this DSL can load"):
                loader.load(bad)


def test_threads_build_a_key_once() -> None:
    with ThreadPoolExecutor(8) as pool:
        answers = set(pool.map(lambda _: get(), range(32)))
    assert len(answers) == 1
    assert builds() == 1
