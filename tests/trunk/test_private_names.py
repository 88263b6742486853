"""Private names of other packages: where they stand, and what calls do under versions that lack them."""

from __future__ import annotations

import ast
import importlib.util
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from cutekernels import cli, torch_names
from cutekernels.backends import Facts, cute
from cutekernels.backends import triton as backend

ROOT = Path(__file__).parents[2]
HOMES = ("cutekernels/torch_names.py", "cutekernels/backends/triton.py")


_MAY_BE = re.compile(r"torch[\w.]*\._|forward_ad\._|triton\.(backends|compiler|knobs|runtime)|from triton import")


def private(tree: ast.AST) -> Iterator[str]:
    """Names of torch's with a part that begins with an underscore, and of Triton's outside its language."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Attribute):
            names = [ast.unparse(node)]
        else:
            continue
        for name in names:
            root, *parts = name.replace("forward_ad.", "torch.autograd.forward_ad.").split(".")
            inside = [part for part in parts if part.startswith("_") and part != "__version__"]
            hidden = root == "torch" and bool(inside) and parts[:2] != ["ops", "cutekernels"]
            if hidden or (root == "triton" and parts and parts[0] in ("backends", "compiler", "knobs", "runtime")):
                yield name


def test_each_package_s_private_names_stand_in_one_file() -> None:
    for folder in ("cutekernels", "autotune", "db"):
        for path in (ROOT / folder).rglob("*.py"):
            file = str(path.relative_to(ROOT))
            if file not in HOMES:
                text = path.read_text()
                assert not _MAY_BE.search(text) or not set(private(ast.parse(text))), file
    assert set(private(ast.parse("from torch._C import x; forward_ad._current_level; triton.knobs.cache"))) >= {
        "torch._C.x", "forward_ad._current_level", "triton.knobs.cache",
    }  # fmt: skip


def without(*names: str) -> ModuleType:
    """``torch_names`` as it is under a torch without ``names``; without any of its private ones by default."""
    spec = importlib.util.find_spec("cutekernels.torch_names")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    last = {name.rpartition(".")[2] for name in names}

    def lacking(owner: object, name: str, *default: object) -> object:
        taken = name in last if last else name.startswith("_") and name not in ("_C", "_functorch", "_dynamo")
        return default[0] if taken and default else getattr(owner, name, *default)

    vars(module)["getattr"] = lacking  # before builtins' in the module's eyes
    spec.loader.exec_module(module)
    return module


class Mode(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def in_transforms(ask: Callable[[], bool]) -> list[bool]:
    """Answers of ``ask`` outside of torch.func, and in its transforms."""
    said: list[bool] = [ask()]

    def noting(x: Tensor) -> Tensor:
        said.append(ask())
        return x.sum()

    x = torch.ones(2, 3)
    torch.func.grad(noting)(x), torch.func.vmap(noting)(x)
    return [*said, ask()]


def requires_grad(names: ModuleType) -> None:
    x = torch.ones(1, requires_grad=True)
    assert names.any_requires_grad(None, x) and not names.any_requires_grad(None, x.detach())


def autocast(names: ModuleType) -> None:
    said = [names.autocasting()]
    for kind in ("cpu", "cuda"):
        with torch.autocast(kind, dtype=torch.bfloat16, enabled=kind == "cpu" or torch.cuda.is_available()):
            said.append(names.autocasting())
    assert said == [False, True, torch.cuda.is_available()]


def modes(names: ModuleType) -> None:
    assert not names.function_modes()
    with Mode():
        assert names.function_modes()


def transforms(names: ModuleType) -> None:
    assert in_transforms(lambda: names.transforms() is not None) == [False, True, True, False]


def gradients(names: ModuleType) -> None:
    """Where torch does not say which transform it is, each counts."""
    assert in_transforms(names.differentiated_by_transform) == [False, True, True, False]


def zero(names: ModuleType) -> None:
    assert names.is_zero(torch.ones(1))


def level(names: ModuleType) -> None:
    assert names.levels._current_level >= 0


def keys(names: ModuleType) -> None:
    assert names.included().raw_repr() not in names.QUIET


def versions(names: ModuleType) -> None:
    x = torch.ones(1)
    names.increment_version((x,))
    assert x._version == 1


def wrappers(names: ModuleType) -> None:
    kept: list[Tensor] = []
    torch.func.grad(lambda x: (kept.append(y := x * 2), y.sum())[1])(torch.ones(3))
    assert names.unwrap(kept[0]).data_ptr() == torch_names.unwrap(kept[0]).data_ptr()


def function(names: ModuleType) -> None:
    class Twice(torch.autograd.Function):
        forward = staticmethod(lambda ctx, x: 2 * x)
        backward = staticmethod(lambda ctx, grad: 2 * grad)

    x = torch.ones(3, requires_grad=True)
    names.eager_apply(Twice)(x).sum().backward()
    assert x.grad is not None and x.grad.tolist() == [2, 2, 2]


def overrides(names: ModuleType) -> None:
    with names.without_overrides():
        assert torch.ones(1).data_ptr()


def view(names: ModuleType) -> None:
    x = torch.arange(6.0, requires_grad=True)
    shaped = names.unsafe_view(2 * x, (2, 3))
    assert not shaped._is_view() and shaped.tolist() == [[0, 2, 4], [6, 8, 10]]
    shaped.sum().backward()
    assert x.grad is not None and x.grad.tolist() == [2] * 6


def graphs(names: ModuleType) -> None:
    assert names.keeps_graph()


def fakes(names: ModuleType) -> None:
    assert names.fake_tensors is None


def guards(names: ModuleType) -> None:
    assert names.TensorGuards is None


TAKEN: dict[str, Callable[[ModuleType], None]] = {
    "_C._any_requires_grad": requires_grad,
    "_C._is_any_autocast_enabled": autocast,
    "_C._len_torch_function_stack": modes,
    "_C._functorch.peek_interpreter_stack": transforms,
    "_C._functorch.TransformType.Grad": gradients,
    "_C._functorch.get_interpreter_stack": gradients,
    "Tensor._is_zerotensor": zero,
    "autograd.forward_ad._current_level": level,
    "_C.DispatchKey": keys,
    "_C.DispatchKeySet": keys,
    "_C._dispatch_tls_local_include_set": keys,
    "_C._increment_version": versions,
    "_C._functorch.unwrap_if_dead": wrappers,
    "_C._FunctionBase.apply": function,
    "_C.DisableTorchFunction": overrides,
    "ops.aten._unsafe_view": view,
    "_C._autograd._get_current_graph_task_keep_graph": graphs,
    "_subclasses.fake_tensor": fakes,
    "_C._dynamo.guards.TensorGuards": guards,
}


OF_CUDA = ("_C._cuda_getDevice", "_C._cuda_getCurrentRawStream")  # a CPU build has neither


@pytest.mark.parametrize("name", TAKEN)
def test_a_public_way_stands_in_for_a_private_name(name: str) -> None:
    names = without(name)
    assert set(names.ABSENT) == {f"torch.{name}"}
    TAKEN[name](names)


def test_all_private_names_are_planted() -> None:
    names = without()
    assert torch_names.absent() == {}
    assert set(names.ABSENT) <= {f"torch.{name}" for name in (*TAKEN, *OF_CUDA)}
    assert len(names.ABSENT) >= 10


@pytest.mark.parametrize("name", OF_CUDA)
def test_no_launch_goes_to_device_0_in_silence(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.backends.cuda.is_built", lambda: True)
    monkeypatch.setattr("torch.cuda.current_device", lambda: 3)
    monkeypatch.setattr("torch.cuda.current_stream", lambda device: SimpleNamespace(cuda_stream=40 + device))
    names = without(name)
    assert f"torch.{name}" in names.ABSENT
    assert names.current_device() == 3 if "Device" in name else names.current_stream(3) == 43


_CALLS = """
import sys, types
from tests.trunk.test_private_names import without
import cutekernels
for one in [name for name in sys.modules if name.startswith("cutekernels.")]:
    del sys.modules[one]
cutekernels.torch_names = sys.modules["cutekernels.torch_names"] = names = without()
import torch
import cutekernels as ck
from cutekernels import cli
from cutekernels.errors import UnsupportedProblem
from torch.autograd import forward_ad

x, w = torch.randn(3, 8, requires_grad=True), torch.randn(8, 8, requires_grad=True)
def close(a, b): torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
close(ck.linear(x, w), x @ w.T)
close(torch.autograd.grad(ck.linear(x, w).sum(), (x, w)), torch.autograd.grad((x @ w.T).sum(), (x, w)))
close(torch.func.vmap(lambda a: ck.silu_mul(a, a))(x), torch.nn.functional.silu(x) * x)
loss = lambda f: torch.func.grad(lambda a: f(a).sum())
close(loss(lambda a: ck.silu_mul(a, a))(x), loss(lambda a: torch.nn.functional.silu(a) * a)(x))
with torch.autocast("cpu", dtype=torch.bfloat16):
    assert ck.linear(x, w).dtype == torch.bfloat16
targets = torch.tensor([1, 2, 3])
made, expected = ck.linear_cross_entropy(x, w, targets), torch.nn.functional.cross_entropy(x @ w.T, targets)
close(made, expected)
close(torch.autograd.grad(made, x), torch.autograd.grad(expected, x))
with torch.no_grad():
    q = torch.randn(1, 4, 2, 16)
    sdpa = torch.nn.functional.scaled_dot_product_attention
    close(ck.attention(q, q, q), sdpa(*[q.transpose(1, 2)] * 3).transpose(1, 2))
    out = torch.empty(3, 8)
    assert ck.linear(x, w, out=out) is out and out._version
with forward_ad.dual_level():
    try:
        ck.silu_mul(forward_ad.make_dual(x.detach(), x.detach()), x)
    except UnsupportedProblem as error:
        print(error)
print(*[f.value for f in cli._private_names()], sep="\\n")
"""


def test_calls_are_right_without_any_private_name() -> None:
    command = [sys.executable, "-W", "ignore", "-c", _CALLS]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    refused, *lines = done.stdout.splitlines()
    assert "no forward-mode derivative" in refused
    assert [line.partition(": ")[0] for line in lines] == list(without().ABSENT)


# ---- Inductor, Triton, the DSL --------------------------------------------------------------------------


def test_inductor_s_names_are_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_names, "_INDUCTOR", {"ir": ("FallbackKernel", "moved_on"), "elsewhere": ("V",)})
    assert list(torch_names.absent()) == ["torch._inductor.ir.moved_on", "torch._inductor.elsewhere.V"]
    assert torch_names.inductor() is None


@pytest.mark.parametrize("lacking", ["version", "names"])
def test_an_unknown_launcher_of_triton_s_is_left_alone(lacking: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The launch itself is tested in tests/shared/test_tensor_op.py."""
    import triton

    assert backend._form() is not None and not backend.absent()
    if lacking == "version":
        monkeypatch.setattr(triton, "__version__", "3.10.0")
    else:
        monkeypatch.setattr("triton.backends.nvidia.driver.CudaLauncher", Path)
    assert backend._form() is None
    assert [f.value for f in cli._private_names()] == [
        f"the launcher of Triton {triton.__version__}: each launch goes Triton's public, slower way"
    ]


def flat(values: Any) -> Iterator[Any]:
    for value in values:
        yield from flat(value) if isinstance(value, tuple) else (value,)


def test_without_a_kernel_of_files_it_is_compiled_again(monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.trunk.test_backend_triton import build

    made = build()
    monkeypatch.setattr("triton.compiler.CompiledKernel", lambda source, files: None)
    assert list(backend.absent()) == ["triton.compiler.CompiledKernel of files"]
    assert made.binary.compiled().asm["cubin"] == made.binary.cubin
    count = len(made.binary.recipe.signature)
    assert sorted(n for n in flat(made.binary.spread(*range(count))) if n is not None) == list(range(count))


def test_without_a_cache_of_ours_nothing_is_read_from_triton_s(monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.trunk.test_backend_triton import build

    made = build()
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "triton.knobs", SimpleNamespace())  # type: ignore[arg-type]
        assert list(backend.absent()) == ["triton.knobs.cache.manager_class"]
    monkeypatch.setattr(backend, "_managers", lambda: None)
    for _ in range(2):
        assert build().binary.cubin == made.binary.cubin


def test_an_unknown_dsl_compiles_without_its_launch_s_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    function = SimpleNamespace(artifacts=SimpleNamespace(CUBIN=b""), ir_module="another form")
    monkeypatch.setattr(cute, "resource_usage", lambda cubin: {"kernel": Facts(40, 0, 1024)})
    with pytest.raises(cute.CompileError, match="has the DSL changed"):
        cute._facts(function)
    monkeypatch.setattr(cute, "package_version", lambda name: "4.9.0")
    assert cute._facts(function) == Facts(40, 0, 1024)
    assert list(cute.absent()) == ["the host program of CuTe DSL 4.9.0"]


def test_a_fresh_kernel_is_loaded_as_it_was_saved(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """One export, for the cache and for this process."""
    exported: list[str] = []
    loaded: list[bytes] = []

    def export(path: str, symbol: str) -> None:
        exported.append(symbol)
        Path(path).write_bytes(b"an object")

    def load(path: Path) -> type:
        loaded.append(path.read_bytes())
        return str

    monkeypatch.setattr(cute.CuteArtifact, "load", staticmethod(load))
    artifact = cute.CuteArtifact(SimpleNamespace(export_to_c=export), Facts(1, 0, 0))
    assert artifact.kernel() is str
    artifact.save(tmp_path / "saved")
    assert artifact.kernel() is str
    assert (len(exported), loaded) == (2, [b"an object"] * 2)
