"""The Triton backend on a machine without a GPU: compiling, facts, recipes and the launch protocol."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("triton")

from cutekernels import gpu
from cutekernels.backends import Facts
from cutekernels.backends.cubin import resource_usage
from cutekernels.backends.triton import Recipe, TritonArtifact, compile_kernel, launcher
from cutekernels.errors import CompileError
from cutekernels.kernels.triton import activations

STRIDES = ("out_row", "out_col", "gate_row", "gate_col", "up_row", "up_col")
POINTERS = ("out_ptr", "gate_ptr", "up_ptr")
CONSTANTS = {"ACT": "silu", "DENSE": False, "BLOCK_ROWS": 1, "BLOCK_COLS": 512, "VEC": 8, "PRECISE": False, "EVICT": ""}
SIGNATURE = (
    dict.fromkeys(POINTERS, "*bf16")
    | dict.fromkeys(("rows", "cols", *STRIDES), "i64")
    | dict.fromkeys(CONSTANTS, "constexpr")
)


@pytest.fixture(autouse=True, scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory):
    with pytest.MonkeyPatch.context() as patch:
        directory = tmp_path_factory.mktemp("cache")
        patch.setenv("CUTEKERNELS_CACHE", str(directory))
        yield directory


def build(name: str = "h200", **changes: Any) -> TritonArtifact:
    given = {
        "signature": SIGNATURE,
        "constexprs": CONSTANTS,
        "divisible": dict.fromkeys(POINTERS, 16),
        "options": {"num_warps": 4},
        "gpu": gpu.lookup(name),
    }
    return compile_kernel(changes.pop("fn", activations.glu), **(given | changes))


@pytest.fixture(scope="module")
def artifact(cache: Path) -> TritonArtifact:
    return build()


@pytest.mark.parametrize("name", ["a100", "rtx3090", "l40s", "h200", "rtx5090"])
def test_compiles_for_a_gpu_that_is_not_there(name: str) -> None:
    made = build(name)
    major, minor = gpu.lookup(name).capability
    assert f".target sm_{major}{minor}" in made.ptx
    assert 8 <= made.facts.registers <= 255
    assert made.facts.stack_bytes == 0
    assert made.facts.smem_bytes == 0  # the driver's reserved KiB on 9.0 and up is not the kernel's


def test_compiling_leaves_the_process_as_it_was(cache: Path, artifact: TritonArtifact) -> None:
    from triton import knobs

    assert "TRITON_CACHE_DIR" not in os.environ
    assert not knobs.cache.dir.startswith(str(cache))
    assert list((cache / "triton").rglob("glu.cubin"))
    assert (cache / "triton").stat().st_mode & 0o077 == 0


def test_a_cache_others_may_write_to_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Binaries in it are loaded and run."""
    monkeypatch.setenv("CUTEKERNELS_CACHE", str(tmp_path))
    (tmp_path / "triton").mkdir()
    (tmp_path / "triton").chmod(0o777)
    with pytest.raises(CompileError, match=r"mode 777.*CUTEKERNELS_CACHE"):
        build()


def test_shared_memory_and_spills_are_counted(artifact: TritonArtifact) -> None:
    facts = resource_usage(artifact.compiled.asm["cubin"])
    assert facts == {"glu": artifact.facts}
    # 64 elements of each operand per thread, with run-time strides, in 32 registers must spill.
    narrow = build(constexprs=CONSTANTS | {"BLOCK_COLS": 8192, "VEC": 1}, options={"num_warps": 4, "maxnreg": 32})
    assert narrow.facts.registers <= 32
    assert narrow.facts.stack_bytes > 0


def test_resource_usage_refuses_what_is_no_binary() -> None:
    with pytest.raises(CompileError, match="no kernel"):
        resource_usage(b"\x7fELF and then nothing")


def test_ptxas_or_front_end_failure_is_a_compile_error() -> None:
    with pytest.raises(CompileError, match="(?s)could not compile glu.*power of 2"):
        build(constexprs=CONSTANTS | {"BLOCK_COLS": 500})


def test_recipe_round_trip(artifact: TritonArtifact, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "kernel.json"
    artifact.save(path)
    assert Recipe.parse(path.read_text()) == artifact.recipe
    compiled = []
    monkeypatch.setattr("cutekernels.backends.triton.launcher", lambda recipe, kernel: compiled.append(kernel))
    TritonArtifact.load(path)
    assert compiled[0].asm["cubin"] == artifact.compiled.asm["cubin"]


DAMAGE = {
    "a bit of the binary": ("glu.cubin", lambda old: old[:-9] + bytes([old[-9] ^ 1]) + old[-8:]),
    "half the binary": ("glu.cubin", lambda old: old[: len(old) // 2]),
    "another kernel's metadata": ("glu.json", lambda old: old.replace(b'"shared": 0', b'"shared": 64')),
    "no metadata": ("glu.json", lambda old: b""),
}


@pytest.mark.parametrize(("name", "damage"), DAMAGE.values(), ids=DAMAGE.keys())
def test_a_damaged_binary_in_tritons_cache_is_compiled_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, damage: Any
) -> None:
    artifact = build()
    path = tmp_path / "kernel.json"
    artifact.save(path)
    monkeypatch.setattr("cutekernels.backends.triton.launcher", lambda recipe, kernel: kernel)
    file = Path(artifact.compiled.metadata_group[name])
    whole = file.read_bytes()
    assert damage(whole) != whole
    for load in (lambda: TritonArtifact.load(path), lambda: build().compiled):
        file.write_bytes(damage(whole))
        loaded = load()
        assert loaded.asm["cubin"] == artifact.compiled.asm["cubin"]
        assert loaded.metadata == artifact.compiled.metadata
        assert file.read_bytes() == whole


def test_a_recipe_of_another_binary_is_refused(artifact: TritonArtifact, tmp_path: Path) -> None:
    path = tmp_path / "kernel.json"
    path.write_text(replace(artifact.recipe, sha256="0" * 64).dump())
    with pytest.raises(CompileError, match="another binary"):
        TritonArtifact.load(path)


HOSTILE = {
    "a checksum that is a number": {"sha256": 3},
    "another package": {"module": "os"},
    "a parent package": {"module": "cutekernels.kernels"},
    "a prefix that is no package": {"module": "cutekernels.kernels.triton_evil"},
    "a relative path": {"module": "cutekernels.kernels.triton..os"},
    "no such module": {"module": "cutekernels.kernels.triton.absent"},
    "a module's attribute that is no kernel": {"function": "tl"},
    "a private kernel": {"function": "_tile"},
    "a dotted function": {"function": "glu.fn"},
    "no such kernel": {"function": "absent"},
    "a module that is a number": {"module": 3},
    "an argument missing": {"signature": {k: v for k, v in SIGNATURE.items() if k != "rows"}},
    "a type Triton lacks": {"signature": SIGNATURE | {"rows": "PyObject*"}},
    "a type that is a list": {"signature": SIGNATURE | {"rows": ["i64"]}},
    "a signature that is a list": {"signature": ["i64"]},
    "a constexpr unvalued": {"constexprs": {k: v for k, v in CONSTANTS.items() if k != "VEC"}},
    "a constexpr that is an object": {"constexprs": CONSTANTS | {"VEC": {"__reduce__": "os.system"}}},
    "an absurd divisor": {"divisible": {"rows": 3}},
    "a divisor of nothing": {"divisible": {"absent": 16}},
    "an unknown option": {"options": {"ir_override": "/tmp/evil.ptx"}},
    "an option of another type": {"options": {"num_warps": "4"}},
    "an unknown target": {"capability": 10},
    "a target that is a bool": {"capability": True},
    "negative facts": {"facts": [-1, 0, 0]},
    "two facts": {"facts": [1, 0]},
}


@pytest.mark.parametrize("change", HOSTILE.values(), ids=HOSTILE.keys())
def test_hostile_recipe_is_refused(artifact: TritonArtifact, tmp_path: Path, change: dict[str, Any]) -> None:
    path = tmp_path / "kernel.json"
    path.write_text(json.dumps(json.loads(artifact.recipe.dump()) | change))
    with pytest.raises(CompileError):
        TritonArtifact.load(path)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"{}", b'{"module": "x"}', b"\xff\xfe", b"[" * 100_000])
def test_damaged_recipe_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "kernel.json"
    path.write_bytes(content)
    with pytest.raises(CompileError):
        TritonArtifact.load(path)


def test_missing_recipe_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CompileError, match="readable"):
        TritonArtifact.load(tmp_path / "absent.json")


def test_a_kernel_outside_the_package_is_refused() -> None:
    import triton.language.standard as elsewhere

    with pytest.raises(CompileError, match="inside cutekernels.kernels.triton"):
        build(fn=elsewhere.sigmoid, signature={}, constexprs={}, divisible={})


def test_launching_without_a_gpu_says_so(artifact: TritonArtifact, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(CompileError, match="no CUDA device"):
        artifact.kernel()((1, 1, 1))


class Binary:
    """What the launcher uses of Triton's CompiledKernel."""

    def __init__(self, device: list[int]) -> None:
        self.device = device
        self.packed_metadata = (4, 1, 0)
        self.calls: list[tuple[Any, ...]] = []

    @property
    def run(self) -> Any:
        self.function = 100 + self.device[0]  # loaded on whichever device is current
        return lambda *args: self.calls.append(args)


def test_launch_protocol(artifact: TritonArtifact, monkeypatch: pytest.MonkeyPatch) -> None:
    """Grid, current stream of the current device, that device's own binary, no hooks, all arguments in order."""
    current = [0]
    made: list[Binary] = []

    def compiled_again(recipe: Recipe) -> Binary:
        made.append(Binary(current))
        return made[-1]

    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.is_initialized", lambda: False)
    monkeypatch.setattr("torch._C._cuda_getDevice", lambda: current[0], raising=False)
    monkeypatch.setattr("torch._C._cuda_getCurrentRawStream", lambda device: 7000 + device, raising=False)
    monkeypatch.setattr("cutekernels.backends.triton._verified", compiled_again)

    first = Binary(current)
    kernel = launcher(artifact.recipe, first)
    args = tuple(range(11))
    tail = (None,) * (len(CONSTANTS) + 1)  # and DEPENDENT
    kernel((5, 2, 1), *args)
    kernel((6, 1, 1), *args)
    current[0] = 1
    kernel((5, 1, 1), *args)
    assert first.calls == [
        (5, 2, 1, 7000, 100, (4, 1, 0), None, None, None, *args, *tail),
        (6, 1, 1, 7000, 100, (4, 1, 0), None, None, None, *args, *tail),
    ]
    assert [binary.calls for binary in made] == [[(5, 1, 1, 7001, 101, (4, 1, 0), None, None, None, *args, *tail)]]


def test_a_binary_is_loaded_early_where_cuda_is_up(artifact: TritonArtifact, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.is_initialized", lambda: True)
    monkeypatch.setattr("torch._C._cuda_getDevice", lambda: 0, raising=False)
    binary = Binary([0])
    launcher(artifact.recipe, binary)
    assert binary.function == 100


def test_constexprs_in_the_middle_keep_their_place(artifact: TritonArtifact) -> None:
    """Dense operands turn middle arguments into constexprs; only those at the end may be left out."""
    dense = SIGNATURE | dict.fromkeys(("rows", *STRIDES), "constexpr")
    values = CONSTANTS | dict.fromkeys(STRIDES, 0) | dict.fromkeys([s for s in STRIDES if "col" in s], 1)
    made = build(signature=dense, constexprs=values | {"rows": 1, "DENSE": True})
    calls = SimpleNamespace(args=())

    class Recorder(Binary):
        @property
        def run(self) -> Any:
            self.function = 1
            return lambda *args: setattr(calls, "args", args[9:])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torch.cuda.is_available", lambda: True)
        patch.setattr("torch.cuda.is_initialized", lambda: False)
        patch.setattr("torch._C._cuda_getDevice", lambda: 0, raising=False)
        patch.setattr("torch._C._cuda_getCurrentRawStream", lambda device: 0, raising=False)
        launcher(made.recipe, Recorder([0]))((1, 1, 1), 10, 20, 30, 1, 4096)
    assert calls.args == (10, 20, 30, 1, 4096, *([None] * (len(made.recipe.signature) - 5)))


def test_facts_of_a_recipe_are_the_compiler_s(artifact: TritonArtifact) -> None:
    assert artifact.recipe.facts == artifact.facts
    assert isinstance(artifact.facts, Facts)
