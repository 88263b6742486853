"""The Triton backend on a machine without a GPU: compiling, facts, recipes and the launch protocol."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("triton")

from cutekernels import gpu
from cutekernels.backends import triton as backend
from cutekernels.backends.cubin import resource_usage
from cutekernels.backends.triton import Binary, Recipe, TritonArtifact, TritonKernel, Values, compile_kernel
from cutekernels.errors import CompileError
from cutekernels.kernels.triton import activations, sampling

STRIDES = ("out_row", "out_col", "gate_row", "gate_col", "up_row", "up_col")
POINTERS = ("out_ptr", "gate_ptr", "up_ptr")
CONSTANTS = {"ACT": "silu", "BLOCK_ROWS": 1, "BLOCK_COLS": 512, "VEC": 8, "PRECISE": False, "EVICT": "", "DENSE": False}
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


def test_compiling_leaves_the_process_and_triton_s_cache_as_they_were(cache: Path, artifact: TritonArtifact) -> None:
    from triton import knobs

    before = dict(vars(knobs.cache)), dict(vars(knobs.compilation)), dict(os.environ)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(cache / "users"))
        build()
    assert (dict(vars(knobs.cache)), dict(vars(knobs.compilation)), dict(os.environ)) == before
    assert list(cache.iterdir()) == [], "neither Triton's cache nor a folder of ours"


def test_what_another_thread_compiles_meanwhile_goes_to_its_own_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch.compile reads back from the cache what it compiled in a thread of its own."""
    from triton.runtime.cache import get_cache_manager

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "users"))
    with ThreadPoolExecutor(1) as thread, backend._kept_in(str(tmp_path)):
        put = thread.submit(lambda: get_cache_manager("00ff").put(b"theirs", "k.cubin")).result()
        assert thread.submit(lambda: get_cache_manager("00ff").get_file("k.cubin")).result() == put
        assert get_cache_manager("00ff").get_file("k.cubin") is None
        ours = get_cache_manager("00ff").put(b"ours", "k.cubin")
    assert Path(put).is_relative_to(tmp_path / "users") and Path(put).read_bytes() == b"theirs"
    assert Path(ours) == tmp_path / "k.cubin" and Path(ours).read_bytes() == b"ours"


def test_what_users_ask_triton_for_they_get(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_STORE_BINARY_ONLY", "1")
    monkeypatch.setenv("TRITON_KERNEL_DUMP", "1")
    monkeypatch.setenv("TRITON_DUMP_DIR", str(tmp_path))
    assert build().binary.cubin
    assert list(tmp_path.rglob("glu.ptx"))


def test_shared_memory_and_spills_are_counted(artifact: TritonArtifact) -> None:
    facts = resource_usage(artifact.binary.cubin)
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


def test_a_saved_kernel_is_loaded_without_compiling(
    artifact: TritonArtifact, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "kernel.triton"
    artifact.save(path)
    read = Binary.parse(path.read_bytes())
    assert read == artifact.binary

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("nothing is to be compiled")

    monkeypatch.setattr("triton.compile", refuse)
    assert callable(TritonArtifact.load(path))
    compiled = read.compiled()
    assert compiled.kernel == compiled.asm["cubin"] == artifact.binary.cubin
    assert compiled.packed_metadata == (4, 1, 0)
    assert compiled.metadata.name == compiled.name == "glu"
    assert compiled.metadata.launch_pdl is True
    assert list(compiled.src.signature) == [*SIGNATURE, "DEPENDENT"]


def test_what_triton_calls_a_kernel_does_not_depend_on_what_was_compiled_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Triton's hash of a function leaves out the globals of functions it calls that were not hashed before, to 3.7."""
    import triton
    from triton.runtime.jit import JITFunction

    from cutekernels.kernels.triton.moe import route
    from cutekernels.ops.sampling.op import SAMPLE_FILTER

    problem = SAMPLE_FILTER.Problem.parse("rows=1 cols=1024")
    config = SAMPLE_FILTER.default(problem, gpu.lookup("h200"))
    saved = []
    for first in (False, True):
        for fn in [*vars(route).values(), *vars(sampling).values()]:
            if isinstance(fn, JITFunction):
                monkeypatch.setattr(fn, "hash", None)
                monkeypatch.setattr(fn, "used_global_vals", {})
        if first:
            assert route.ordered.cache_key and sampling._columns.cache_key
        SAMPLE_FILTER.build(problem, config, gpu.lookup("h200")).save(tmp_path / "kernel")
        saved.append(((tmp_path / "kernel").read_bytes(), sampling.sample_filter.cache_key))
    assert saved[0][0] == saved[1][0]
    before = tuple(map(int, triton.__version__.split(".")[:2])) < (3, 8)
    assert (saved[0][1] != saved[1][1]) is before, "Triton's own hash differs: this test would see it"


def test_a_kernel_takes_its_values_in_groups_and_is_launched_without_them() -> None:
    """Names and order are a launch's; fields with defaults may be missing, and others may not."""
    from cutekernels.kernels.triton.norms import forward
    from cutekernels.ops.norms.op import ADD_RMS_NORM, RMS_NORM

    made = {}
    for op in (RMS_NORM, ADD_RMS_NORM):
        problem = op.Problem.parse("rows=16 cols=4096")
        made[op.name] = op.build(problem, op.default(problem, gpu.lookup("h200")), gpu.lookup("h200")).binary.recipe
    recipe = made["rms_norm"]
    values = Values.of(forward.rms_norm)
    assert [n for n in made["add_rms_norm"].signature if not n.isupper()] == [
        *("y_ptr", "u_ptr", "x_ptr", "residual_ptr", "weight_ptr", "rows", "heads", "cols"),
        *[f"{name}_{step}" for name in ("y", "u", "x", "residual") for step in ("row", "head", "col")],
        *("eps", "weight_offset"),
    ]
    assert values.paths["x_ptr"] == (0, 2) and values.paths["x_col"] == (2, 2, 2) and values.paths["DEPENDENT"] == (5,)
    assert not {"u_ptr", "residual_row", "bias_ptr", "BIAS"} & set(recipe.signature)
    assert values.defaults["u_ptr"] == values.defaults["u_col"] == 0 and values.defaults["BIAS"] is False
    grouped = recipe.grouped_source()
    assert grouped.signature["by"].x.row == "i64" and grouped.signature["by"].u == ("constexpr",) * 3
    assert grouped.constants[values.paths["u_row"]] == 0 and values.paths["y_ptr"] not in grouped.constants
    assert list(recipe.source().signature) == list(recipe.signature), "a launch passes its values in a row"
    for signature in (
        {name: kind for name, kind in recipe.signature.items() if name != "rows"},
        dict(reversed(recipe.signature.items())),
    ):
        with pytest.raises(CompileError, match="rms_norm takes"):
            replace(recipe, signature=signature).grouped_source()


HOSTILE = {
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
}


NO_KERNEL: dict[str, Callable[[dict[str, Any]], object]] = {
    "no metadata": lambda header: header.pop("metadata"),
    "metadata that is a list": lambda header: header.update(metadata=[]),
    "no name": lambda header: header["metadata"].pop("name"),
    "shared memory that is text": lambda header: header["metadata"].update(shared="64"),
    "no target": lambda header: header["metadata"].pop("target"),
    "a target Triton lacks": lambda header: header["metadata"].update(target={"backend": "abacus"}),
    "no hash": lambda header: header["metadata"].pop("hash"),
    "a field that is no name": lambda header: header["metadata"].update({"not a name": 1}),
    "a field missing": lambda header: header["recipe"].pop("options"),
    "a field too many": lambda header: header["recipe"].update(sha256=""),
    **{name: lambda header, change=change: header["recipe"].update(change) for name, change in HOSTILE.items()},  # type: ignore[misc]
}


@pytest.mark.parametrize("change", NO_KERNEL.values(), ids=NO_KERNEL.keys())
def test_a_hostile_file_is_refused(artifact: TritonArtifact, tmp_path: Path, change: Callable[..., object]) -> None:
    path = tmp_path / "kernel.triton"
    text, end, cubin = artifact.binary.dump().partition(b"\n")
    header = json.loads(text)
    change(header)
    path.write_bytes(json.dumps(header).encode() + end + cubin)
    with pytest.raises(CompileError):
        TritonArtifact.load(path)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"{}", b'{"module": "x"}', b"\xff\xfe", b"[" * 100_000, b"\n"])
def test_a_damaged_file_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "kernel.triton"
    path.write_bytes(content)
    with pytest.raises(CompileError):
        TritonArtifact.load(path)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CompileError, match="readable"):
        TritonArtifact.load(tmp_path / "absent.triton")


def test_a_kernel_outside_the_package_is_refused() -> None:
    import triton.language.standard as elsewhere

    with pytest.raises(CompileError, match="inside cutekernels.kernels.triton"):
        build(fn=elsewhere.sigmoid, signature={}, constexprs={}, divisible={})


def test_launching_without_a_gpu_says_so(artifact: TritonArtifact, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(CompileError, match="no CUDA device"):
        artifact.kernel()((1, 1, 1))


class Compiled:
    """The part of Triton's CompiledKernel that the launcher uses."""

    def __init__(self, device: list[int]) -> None:
        self.device = device
        self.calls: list[tuple[Any, ...]] = []

    @property
    def run(self) -> Any:
        self.function = 100 + self.device[0]  # loaded on whichever device is current

    def __getitem__(self, grid: tuple[int, int, int]) -> Callable[..., None]:
        return lambda *args, stream: self.calls.append((*grid, stream, self.function, *args))


def kernel_of(recipe: Recipe, compiled: Callable[[], Any]) -> TritonKernel:
    binary = SimpleNamespace(recipe=recipe, compiled=compiled, spread=lambda *args: args)
    return TritonKernel(binary)  # type: ignore[arg-type]


def test_launch_protocol(artifact: TritonArtifact, monkeypatch: pytest.MonkeyPatch) -> None:
    """Grid, current stream of the current device, that device's own binary, all arguments in order."""
    current = [0]
    made: list[Compiled] = []

    def compiled() -> Compiled:
        made.append(Compiled(current))
        return made[-1]

    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.is_initialized", lambda: False)
    monkeypatch.setattr("cutekernels.torch_names.current_device", lambda: current[0])
    monkeypatch.setattr("cutekernels.torch_names.current_stream", lambda device: 7000 + device)

    kernel = kernel_of(artifact.binary.recipe, compiled)
    args = tuple(range(11))
    tail = (None,) * (len(CONSTANTS) + 1)  # and DEPENDENT
    kernel((5, 2, 1), *args)
    kernel((6, 1, 1), *args)
    current[0] = 1
    kernel((5, 1, 1), *args)
    assert [one.calls for one in made] == [
        [
            (5, 2, 1, 7000, 100, *args, *tail),
            (6, 1, 1, 7000, 100, *args, *tail),
        ],
        [(5, 1, 1, 7001, 101, *args, *tail)],
    ]


def test_a_binary_is_loaded_early_where_cuda_is_up(artifact: TritonArtifact, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.is_initialized", lambda: True)
    monkeypatch.setattr("cutekernels.torch_names.current_device", lambda: 0)
    compiled = Compiled([0])
    kernel_of(artifact.binary.recipe, lambda: compiled)
    assert compiled.function == 100


def test_constexprs_in_the_middle_keep_their_place(artifact: TritonArtifact) -> None:
    """Dense operands turn middle arguments into constexprs; only those at the end may be left out."""
    dense = SIGNATURE | dict.fromkeys(("rows", *STRIDES), "constexpr")
    values = CONSTANTS | dict.fromkeys(STRIDES, 0) | dict.fromkeys([s for s in STRIDES if "col" in s], 1)
    made = build(signature=dense, constexprs=values | {"rows": 1, "DENSE": True})
    calls = SimpleNamespace(args=())

    class Recorder(Compiled):
        def __getitem__(self, grid: tuple[int, int, int]) -> Callable[..., None]:
            return lambda *args, stream: setattr(calls, "args", args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torch.cuda.is_available", lambda: True)
        patch.setattr("torch.cuda.is_initialized", lambda: False)
        patch.setattr("cutekernels.torch_names.current_device", lambda: 0)
        patch.setattr("cutekernels.torch_names.current_stream", lambda device: 0)
        kernel_of(made.binary.recipe, lambda: Recorder([0]))((1, 1, 1), 10, 20, 30, 1, 4096)
    assert calls.args == (10, 20, 30, 1, 4096, *([None] * (len(made.binary.recipe.signature) - 5)))
