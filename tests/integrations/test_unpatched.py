"""``ck.unpatch`` of wrappers, of parts, and of modules that others have changed since; models with no plain weights."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.utils import parametrizations, parametrize

import cutekernels as ck
from cutekernels.errors import UnsupportedProblem
from cutekernels.integrations.transformers import modules
from tests.integrations import tiny
from tests.integrations.test_transformers import close
from tests.integrations.tiny import tokens

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")  # transformers' and peft's own


def in_peft(model: Any) -> Any:
    peft = pytest.importorskip("peft")
    return peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj"]))


def in_a_list(model: Any) -> Any:
    return torch.nn.ModuleList([torch.nn.Linear(2, 2), torch.nn.Sequential(model)])


def same(model: Any) -> Any:
    return model


def compiled(model: Any) -> Any:
    return torch.compile(model, backend="aot_eager")


def is_plain(model: Any, attention: str = "sdpa") -> bool:
    left = any(isinstance(m, modules.Patched) or "_cutekernels_attention" in m.__dict__ for m in model.modules())
    return not left and model.config._attn_implementation == attention


# ---- attention ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrap", [same, in_peft, compiled, in_a_list])
def test_what_holds_a_patched_model_is_unpatched(wrap: Callable[[Any], Any]) -> None:
    model = tiny.model("llama")
    ck.patch(model)
    ck.unpatch(wrap(model))
    assert is_plain(model)


@pytest.mark.parametrize("wrap", [same, in_peft, compiled])
@pytest.mark.parametrize("whole", [False, True])
def test_a_wrapper_is_patched_and_what_it_holds_unpatched(wrap: Callable[[Any], Any], whole: bool) -> None:
    model = tiny.model("llama")
    wrapper = wrap(model)
    ck.patch(wrapper)
    assert model.config._attn_implementation == "cutekernels"
    ck.unpatch(wrapper if whole else model)
    assert is_plain(model)


def test_a_part_is_patched_and_the_whole_unpatched() -> None:
    model = tiny.model("llama")
    ck.patch(model.model)
    ck.unpatch(model)
    assert is_plain(model)
    with ck.patch(model):
        assert model.config._attn_implementation == "cutekernels"
    assert is_plain(model)


def test_the_whole_is_patched_and_a_part_unpatched() -> None:
    """The name that patch gave is not taken for the attention before."""
    model = tiny.model("llama")
    ck.patch(model)
    ck.unpatch(model.model)
    with ck.patch(model.model):
        pass
    ck.unpatch(model)
    assert is_plain(model)


def test_the_attention_of_the_outer_model_counts() -> None:
    model = tiny.model("llama")
    ck.patch(model)
    ck.unpatch(model.model)
    model.set_attn_implementation("eager")
    ck.patch(model.model)
    ck.unpatch(model)
    assert is_plain(model)


def test_attention_that_the_user_chose_stays() -> None:
    with ck.patch(tiny.model("llama")):  # which registers it
        model = tiny.model("llama")
    model.set_attn_implementation("cutekernels")
    with ck.patch(model):
        pass
    assert is_plain(model, "cutekernels")


# ---- classes of others ----------------------------------------------------------------------------------


def test_parametrizations_stay() -> None:
    model, ids = tiny.model("llama"), tokens()
    expected = model(ids).logits
    linears = model.lm_head, model.model.layers[0].self_attn.k_proj
    with ck.patch(model):
        for linear in linears:
            parametrizations.weight_norm(linear)
    assert is_plain(model)
    for linear in linears:
        assert parametrize.is_parametrized(linear, "weight") and isinstance(linear.weight, Tensor)
        assert type(linear).__name__ == "ParametrizedLinear"
    close(model(ids).logits, expected)
    for linear in linears:
        parametrize.remove_parametrizations(linear, "weight")
        assert type(linear) is torch.nn.Linear
    close(model(ids).logits, expected)


class Read(torch.nn.Module):
    """A parametrization that counts its evaluations."""

    calls = 0

    def forward(self, weight: Tensor) -> Tensor:
        self.calls += self.training
        return weight


def test_parametrizations_are_evaluated_once_a_forward_and_not_by_patch() -> None:
    names = ("self_attn.q_proj", "self_attn.o_proj", "mlp.up_proj", "mlp.down_proj")
    for patched_first in (False, True):
        model, reads = tiny.model("llama").train(), [Read() for _ in names]
        if patched_first:
            ck.patch(model)
        for name, read in zip(names, reads, strict=True):
            parametrize.register_parametrization(model.model.layers[0].get_submodule(name), "weight", read)
            read.calls = 0
        if not patched_first:
            ck.patch(model)
        assert [read.calls for read in reads] == [0] * 4
        model(tokens(), labels=tokens())
        assert [read.calls for read in reads] == [1] * 4


class Merged(torch.nn.Linear):
    """A layer that merges where it leaves training, as loralib's."""

    merges = 0

    def train(self, mode: bool = True) -> Any:
        self.merges += not mode
        return super().train(mode)


def test_patch_changes_no_mode_by_a_module_s_own_train() -> None:
    model = tiny.model("llama").train()
    model.model.layers[0].self_attn.q_proj.__class__ = Merged
    with ck.patch(model):
        assert all(module.training for module in model.modules())
    assert model.model.layers[0].self_attn.q_proj.merges == 0


def test_what_keeps_a_patched_forward_or_a_copy_of_a_layer_is_unpatched() -> None:
    model, ids = tiny.model("llama"), tokens()
    expected = model(ids).logits
    ck.patch(model)
    holder = torch.nn.Sequential(model)
    holder.forward = model.forward  # type: ignore[method-assign]  # as PEFT's AdaptionPromptModel
    model.model.layers.append(copy.deepcopy(model.model.layers[1]))
    ck.unpatch(holder)
    assert {layer.self_attn.config._attn_implementation for layer in model.model.layers} == {"sdpa"}
    del model.model.layers[2]
    assert torch.equal(holder(ids).logits, expected)


class Counted:
    """A user's class in front of a module's own."""

    calls = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        return super().__call__(*args, **kwargs)  # type: ignore[misc]


def test_classes_in_front_stay() -> None:
    model, ids = tiny.model("llama"), tokens()
    layer = model.model.layers[0]
    original = type(layer)
    with ck.patch(model):
        layer.__class__ = type("CountedLayer", (Counted, type(layer)), {"name": "mine"})
    assert is_plain(model)
    assert [c.__name__ for c in type(layer).__mro__[:3]] == ["CountedLayer", "Counted", "LlamaDecoderLayer"]
    assert type(layer).__mro__[2] is original
    model(ids)
    assert layer.calls == 1 and layer.name == "mine"


def by_method(base: Any) -> Any:
    class Mine(base):  # type: ignore[misc]
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return super().forward(*args, **kwargs)

    return Mine


def by_property(base: Any) -> Any:
    class Mine(base):  # type: ignore[misc]
        @property
        def forward(self) -> Any:
            return super().forward

    return Mine


@pytest.mark.parametrize("make", [by_method, by_property])
def test_classes_bound_to_a_patched_one_are_refused_before_anything_is_changed(make: Callable[[Any], Any]) -> None:
    model, ids = tiny.model("llama"), tokens()
    expected = model(ids).logits
    ck.patch(model)
    norm = model.model.layers[1].input_layernorm
    patched, classes = type(norm), [type(m) for m in model.modules()]
    norm.__class__ = make(patched)
    with pytest.raises(UnsupportedProblem, match=r"call super\(\).*Mine\.forward does: .*back to LlamaRMSNorm"):
        ck.unpatch(model)
    close(model(ids).logits, expected)
    norm.__class__ = patched
    assert [type(m) for m in model.modules()] == classes
    assert model.config._attn_implementation == "cutekernels"
    ck.unpatch(model)
    assert is_plain(model)


# ---- weights that no kernel multiplies ------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch.ao's own
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("attention_only", [False, True])
def test_quantized_projections_are_left_and_named(attention_only: bool) -> None:
    plain, ids = tiny.model("llama"), tokens()
    names = [n for n, m in plain.named_modules() if type(m) is torch.nn.Linear and ("attn" in n or not attention_only)]
    which: Any = set(names) if attention_only else {torch.nn.Linear}
    model: Any = torch.ao.quantization.quantize_dynamic(plain, which, dtype=torch.qint8)
    with torch.no_grad():
        expected = model(ids).logits
        with ck.patch(model) as report:
            close(model(ids).logits, expected)
    assert is_plain(model)
    left = dict(report.left)
    kind = "torch.ao.nn.quantized.dynamic.modules.linear.Linear"
    assert all(left[name] == f"it is no torch.nn.Linear but a {kind}" for name in names)
    assert left["model.layers.1.self_attn.q_proj/k_proj/v_proj"] == f"its projections are of {kind}"
    assert left["model.layers.0.self_attn's core"] == "its weights are no tensors (quantized, say)"
    assert report.patched["norm"] == 5 and report.patched["linear"] == 15 - len(names)
    assert report.fused["mlp"] == (2 if attention_only else 0)


@pytest.mark.parametrize("moved", ["before", "after"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["llama-bias", "gemma2", "mistral"])
def test_a_patched_model_on_meta_has_shapes(family: str, dtype: torch.dtype, moved: str) -> None:
    """On meta kernels take what they take on a GPU."""
    model = tiny.model(family, dtype)
    if moved == "before":
        model.to("meta")
    ck.patch(model)
    out = model.to("meta")(tokens().to("meta"), labels=tokens().to("meta"))
    assert out.logits.is_meta and out.logits.shape == (2, 20, 131) and out.logits.dtype is dtype
    out.loss.backward()
