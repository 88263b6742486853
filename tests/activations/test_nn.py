"""``cutekernels.nn.SwiGLU`` beside a twin of Hugging Face's ``LlamaMLP``: results, gradients, state dicts."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytest.importorskip("triton")

import cutekernels
from cutekernels.errors import UnsupportedProblem
from cutekernels.nn import SwiGLU
from tests.processes import python


class Twin(torch.nn.Module):
    """The modules, names and order of ``LlamaMLP``."""

    def __init__(self, hidden: int, intermediate: int, bias: bool = False, **kind: Any) -> None:
        super().__init__()
        self.gate_proj = torch.nn.Linear(hidden, intermediate, bias, **kind)
        self.up_proj = torch.nn.Linear(hidden, intermediate, bias, **kind)
        self.down_proj = torch.nn.Linear(intermediate, hidden, bias, **kind)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))  # type: ignore[no-any-return]


def pair(bias: bool = False, **kind: Any) -> tuple[SwiGLU, Twin]:
    torch.manual_seed(3)
    twin = Twin(16, 24, bias, **kind)
    ours = SwiGLU(16, 24, bias=bias, **kind)
    ours.load_state_dict(twin.state_dict())
    return ours, twin


@pytest.mark.parametrize("bias", [False, True])
def test_state_dicts_are_the_twin_s_both_ways(bias: bool) -> None:
    ours, twin = pair(bias)
    saved = ours.state_dict()
    assert set(saved) == set(twin.state_dict())
    for name, value in twin.state_dict().items():
        assert torch.equal(saved[name], value), name
    other = Twin(16, 24, bias)
    other.load_state_dict(saved)
    x = torch.randn(2, 5, 16)
    torch.testing.assert_close(ours(x), other(x))
    assert len(list(ours.parameters())) == (4 if bias else 2)


def test_what_is_saved_is_views() -> None:
    ours, _ = pair()
    gate = ours.state_dict(prefix="mlp.")["mlp.gate_proj.weight"]
    assert gate.data_ptr() == ours.gate_up_proj.weight.data_ptr()
    assert not gate.requires_grad


def test_inside_a_model_through_a_file() -> None:
    kind = {"dtype": torch.bfloat16}
    model, twins = (torch.nn.ModuleDict({f"{i}": make(16, 24, **kind) for i in range(2)}) for make in (SwiGLU, Twin))
    file = io.BytesIO()
    torch.save(twins.state_dict(), file)
    file.seek(0)
    model.load_state_dict(torch.load(file))
    for name, value in twins.state_dict().items():
        assert torch.equal(model.state_dict()[name], value)


def test_loading_onto_meta_assigns() -> None:
    ours, twin = SwiGLU(16, 24, device="meta"), Twin(16, 24, dtype=torch.bfloat16)
    ours.load_state_dict(twin.state_dict(), assign=True)
    assert ours.gate_up_proj.weight.dtype is torch.bfloat16
    x = torch.randn(3, 16, dtype=torch.bfloat16)
    torch.testing.assert_close(ours(x), twin(x), rtol=2.0**-6, atol=2.0**-6)


def test_a_state_dict_that_does_not_fit_is_refused() -> None:
    ours, twin = pair()
    state = twin.state_dict()
    with pytest.raises(RuntimeError, match=r"gate_proj.weight and up_proj.weight must be .24, 16.; they are .23, 16."):
        ours.load_state_dict(state | {"gate_proj.weight": torch.zeros(23, 16)})
    with pytest.raises(RuntimeError, match="come together"):
        ours.load_state_dict({k: v for k, v in state.items() if "up" not in k})
    with pytest.raises(RuntimeError, match=r"Missing key.*gate_up_proj.weight"):
        ours.load_state_dict({k: v for k, v in state.items() if "down" in k})
    with pytest.raises(RuntimeError, match=r"Unexpected key.*gate_up_proj.bias"):
        ours.load_state_dict(Twin(16, 24, True).state_dict())
    with pytest.raises(RuntimeError, match="Unexpected key.*else"):
        ours.load_state_dict(state | {"else": torch.zeros(1)})


@pytest.mark.parametrize("bias", [False, True])
def test_results_and_gradients_are_the_twin_s(bias: bool) -> None:
    ours, twin = pair(bias, dtype=torch.float64)
    x, y = (torch.randn(2, 3, 16, dtype=torch.float64).requires_grad_() for _ in range(2))
    y.data.copy_(x.data)
    torch.testing.assert_close(ours(x), twin(y))
    ours(x).square().sum().backward()
    twin(y).square().sum().backward()
    torch.testing.assert_close(x.grad, y.grad)
    for kind in ("weight", "bias") if bias else ("weight",):
        halves = [getattr(twin.gate_proj, kind).grad, getattr(twin.up_proj, kind).grad]
        torch.testing.assert_close(getattr(ours.gate_up_proj, kind).grad, torch.cat(halves))
        torch.testing.assert_close(getattr(ours.down_proj, kind).grad, getattr(twin.down_proj, kind).grad)
    assert torch.autograd.gradcheck(ours, (torch.randn(2, 16, dtype=torch.float64, requires_grad=True),))


def test_copies_keep_loading_and_saving() -> None:
    ours, twin = pair()
    file = io.BytesIO()
    torch.save(ours, file)
    file.seek(0)
    for copied in (copy.deepcopy(ours), torch.load(file, weights_only=False)):
        with torch.no_grad():
            copied.gate_up_proj.weight.zero_()
        copied.load_state_dict(twin.state_dict())
        assert torch.equal(copied.gate_up_proj.weight, ours.gate_up_proj.weight)
        assert set(copied.state_dict()) == set(twin.state_dict())


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_traced_whole() -> None:
    ours, _ = pair()
    traced = torch.compile(ours, fullgraph=True, backend="aot_eager")
    x = torch.randn(4, 16, requires_grad=True)
    torch.testing.assert_close(traced(x), ours(x))
    traced(x).sum().backward()
    assert ours.gate_up_proj.weight.grad is not None


def test_it_is_fetched_when_asked_for() -> None:
    script = (
        "import sys, cutekernels; dir(cutekernels.nn); assert 'torch' not in sys.modules; cutekernels.nn.SwiGLU(8, 8)"
    )
    python(script)
    assert cutekernels.nn.SwiGLU is SwiGLU
    with pytest.raises(AttributeError, match="no attribute 'Swish'"):
        cutekernels.nn.Swish  # noqa: B018
    assert repr(SwiGLU(8, 16)).startswith("SwiGLU(\n  8, 16, bias=False")


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 700])
def test_on_a_gpu(rows: int) -> None:
    torch.manual_seed(5)
    kind = {"device": "cuda", "dtype": torch.bfloat16}
    twin, ours = Twin(512, 1024, **kind), SwiGLU(512, 1024, **kind)
    ours.load_state_dict(twin.state_dict())
    exact = Twin(512, 1024, device="cuda", dtype=torch.float64)
    exact.load_state_dict(twin.state_dict())
    x = torch.randn(2, rows, 512, **kind)
    results = []
    for module in (ours, twin, exact):
        t = x.detach().to(module.down_proj.weight.dtype).requires_grad_()
        out = module(t)
        out.sum().backward()
        gate = module.gate_up_proj if module is ours else module.gate_proj
        results.append([out, t.grad, gate.weight.grad[:1024], module.down_proj.weight.grad])
    for mine, torchs, truth in zip(*results, strict=True):
        error, torch_error = ((t.double() - truth).norm() / truth.norm() for t in (mine, torchs))
        assert error <= 1.5 * torch_error


@pytest.mark.gpu
def test_fp32_on_a_gpu_is_refused() -> None:
    with pytest.raises(UnsupportedProblem, match="float"):
        SwiGLU(64, 64, device="cuda")(torch.randn(3, 64, device="cuda"))


def test_functional_call_takes_the_saved_names() -> None:
    torch.manual_seed(0)
    module, other, x = SwiGLU(8, 6, bias=True), SwiGLU(8, 6, bias=True), torch.randn(3, 8)
    before = module(x)
    given = {name: t.clone().requires_grad_() for name, t in other.state_dict().items()}
    y = torch.func.functional_call(module, given, (x,))
    assert torch.equal(y, other(x))
    y.sum().backward()
    other(x).sum().backward()
    halves = [given[f"{name}.weight"].grad for name in ("gate_proj", "up_proj")]
    assert all(t is not None for t in halves)
    torch.testing.assert_close(torch.cat(halves), other.gate_up_proj.weight.grad)  # type: ignore[arg-type]
    assert torch.equal(module(x), before) and not module._replaced
    one = {"gate_proj.weight": given["gate_proj.weight"]}  # one half alone: the other is the module's own
    assert not torch.equal(torch.func.functional_call(module, one, (x,)), before)
    packed = dict(other.named_parameters())
    assert torch.equal(torch.func.functional_call(module, packed, (x,)), other(x))
    assert torch.equal(module(x), before)


def test_a_half_alone_is_not_replaced() -> None:
    module, other, x = SwiGLU(8, 6), SwiGLU(8, 6), torch.randn(3, 8)
    before = module(x)
    zeros = torch.nn.Parameter(torch.zeros(6, 8))
    for half in (module.gate_proj, copy.deepcopy(module).up_proj):
        for value in (zeros, zeros.detach(), other.gate_proj.weight, None):
            with pytest.raises(UnsupportedProblem, match=r"of gate_up_proj.weight, .*_proj.weight.copy_\(new\)"):
                half.weight = value  # type: ignore[misc, assignment]
        with pytest.raises(UnsupportedProblem, match="gate_up_proj.bias"):
            half.bias = torch.zeros(6)  # type: ignore[misc]
        with pytest.raises(UnsupportedProblem, match=r"copy_\(new\)"):
            half.register_parameter("weight", zeros)
    assert torch.equal(module(x), before) and not module._replaced
    with torch.no_grad():
        module.gate_proj.weight *= 0  # type: ignore[misc]
    assert not module.state_dict()["gate_proj.weight"].any() and not module(x).any()
    given = {"gate_proj.weight": other.gate_proj.weight, "up_proj.weight": torch.nn.Parameter(other.up_proj.weight)}
    y = torch.func.functional_call(module, given | {"down_proj.weight": other.down_proj.weight}, (x,))
    assert torch.equal(y, other(x)) and not module._replaced


def test_a_copy_has_halves_of_its_own() -> None:
    module = SwiGLU(8, 6)
    twin = pickle.loads(pickle.dumps(copy.deepcopy(module)))
    with torch.no_grad():
        twin.gate_proj.weight.zero_()
    assert not twin.gate_up_proj.weight[:6].any() and module.gate_up_proj.weight[:6].any()
    assert [name for name, _ in module.named_parameters()] == ["gate_up_proj.weight", "down_proj.weight"]
    assert len(list(module.modules())) == 3


@pytest.mark.parametrize("name", ["gate_up_proj", "down_proj"])
def test_hooks_and_adapters_on_projections_run(name: str) -> None:
    """PEFT puts an adapter in a projection's place."""
    ours, x = SwiGLU(16, 24, bias=True), torch.randn(3, 16)
    expected = ours(x)
    hook = ours.get_submodule(name).register_forward_hook(lambda module, args, out: 0 * out)
    assert not torch.equal(ours(x), expected)
    hook.remove()
    assert torch.equal(ours(x), expected)

    class Adapter(torch.nn.Module):
        def __init__(self, base: torch.nn.Linear) -> None:
            super().__init__()
            self.base, self.more = base, torch.nn.Linear(base.in_features, base.out_features)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.base(x) + self.more(x)  # type: ignore[no-any-return]

    adapter = Adapter(ours.get_submodule(name))  # type: ignore[arg-type]
    setattr(ours, name, adapter)
    hidden = ours.gate_up_proj(x)
    gate, up = hidden.chunk(2, dim=-1)
    torch.testing.assert_close(ours(x), ours.down_proj(torch.nn.functional.silu(gate) * up))
    ours(x).sum().backward()
    assert adapter.more.weight.grad is not None


def test_another_half_beside_a_hook_is_refused() -> None:
    ours, x = SwiGLU(16, 24), torch.randn(3, 16)
    ours.gate_up_proj.register_forward_hook(lambda module, args, out: out)
    with pytest.raises(UnsupportedProblem, match="do not see: pass gate_up_proj's weight"):
        torch.func.functional_call(ours, {"gate_proj.weight": torch.zeros(24, 16)}, (x,))


def test_x_of_another_dtype_is_named() -> None:
    with pytest.raises(UnsupportedProblem, match=r"SwiGLU multiplies torch\.bfloat16 by a weight of torch\.float32"):
        SwiGLU(16, 24, bias=True)(torch.randn(3, 16).bfloat16())
