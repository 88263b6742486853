"""Models that are put together otherwise than usual: stray options, shared weights, what wrappers put on modules."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers

import cutekernels as ck
from cutekernels.errors import UnsupportedProblem
from tests.integrations import tiny
from tests.integrations.test_transformers import close
from tests.integrations.tiny import tokens
from tests.models.test_decoder import decoder, greedy

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(tokens(), use_cache=False).logits  # type: ignore[no-any-return]


# ---- options that a family does not have ----------------------------------------------------------------


@pytest.mark.parametrize(
    "stray", [{"sliding_window": 4}, {"final_logit_softcapping": 0.5}, {"attn_logit_softcapping": 1.0}]
)
def test_options_of_other_families_mean_nothing(stray: dict[str, Any]) -> None:
    model = tiny.model("llama", **stray)
    expected = logits(model)
    with ck.patch(model):
        close(logits(model), expected)
    plain, prompt = tiny.model("llama"), tokens(1, 12)[0].tolist()
    assert decoder(model).generate([prompt], max_new_tokens=12).tokens == [greedy(plain, prompt, 12)]
    assert decoder(model)._w.softcap is None


def several_modes() -> Any:
    config = transformers.Gemma3Config(
        text_config=tiny.TEXT, vision_config=tiny.VISION | {"image_size": 28, "patch_size": 14}
    )
    return transformers.Gemma3ForConditionalGeneration(config)


@pytest.mark.parametrize(
    ("make", "part", "patched", "decoded"),
    [
        (lambda: torch.nn.DataParallel(tiny.model("llama")), "module", "pass model.module", "pass model.module"),
        (
            several_modes,
            "model.language_model",
            "pass model.model.language_model",
            r"call the model itself, with cutekernels.patch\(model.model.language_model\)",
        ),
        (
            lambda: torch.nn.Sequential(tiny.model("llama")),
            "0",
            r"pass model.get_submodule\('0'\)",
            r"pass model.get_submodule\('0'\)",
        ),
    ],
    ids=["wrapper", "multimodal", "list"],
)
def test_the_part_to_pass_is_named(make: Callable[[], Any], part: str, patched: str, decoded: str) -> None:
    model = make()
    with pytest.raises(UnsupportedProblem, match=f"patch takes models of transformers .*: {patched}$"):
        ck.patch(model, unlisted=False)
    with pytest.raises(UnsupportedProblem, match=f"Decoder takes models of transformers .*: {decoded}$"):
        decoder(model)
    if hasattr(model, "lm_head"):
        assert ck.compare(model, tokens()).patched["logits"] < 1e-5
    else:
        with pytest.raises(UnsupportedProblem, match=f"compare takes models of transformers; .*: {decoded}$"):
            ck.compare(model, tokens())
    assert ck.patch(model.get_submodule(part)).patched["attention"] == 2


@pytest.mark.parametrize(
    ("options", "rule"),
    [
        ({"num_experts": 40, "num_experts_per_tok": 33}, "K from 1 to 32; K is 33"),
        ({"num_experts": 1024, "moe_intermediate_size": 4}, "1 to 1023 experts; got 1024"),
    ],
    ids=["top-k", "experts"],
)
def test_experts_that_kernels_do_not_take_are_left_and_named(options: dict[str, Any], rule: str) -> None:
    model = tiny.model("qwen3-moe", **options)
    expected = logits(model)
    with ck.patch(model) as report:
        close(logits(model), expected)
    assert "experts" not in report.patched and report.patched["attention"] == 2
    assert [name for name, reason in report.left if rule in reason] == [f"model.layers.{i}.mlp.experts" for i in (0, 1)]
    with pytest.raises(UnsupportedProblem, match=r"MoE takes .*: call the block itself"):
        decoder(model)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_modules_of_a_type_that_kernels_do_not_take_are_left_and_named(family: str) -> None:
    """On meta ops take what they take on a GPU."""
    model = tiny.model(family, torch.float64).to("meta")
    report = ck.patch(model)
    assert model(tokens().to("meta")).logits.dtype is torch.float64
    assert set(report.patched) == {"layer", "causal"}
    assert any(name == "model.norm" and "rms_norm on meta takes" in reason for name, reason in report.left)


# ---- weights of several modules -------------------------------------------------------------------------


def tie_gate(model: Any) -> None:
    for layer in model.model.layers:
        layer.mlp.up_proj.weight = layer.mlp.gate_proj.weight


def one_module(model: Any) -> None:
    for layer in model.model.layers:
        layer.self_attn.v_proj = layer.self_attn.k_proj


def tie_layers(model: Any) -> None:
    first, second = (layer.self_attn for layer in model.model.layers)
    second.k_proj.weight = first.k_proj.weight


@pytest.mark.parametrize("tie", [tie_gate, one_module, tie_layers])
@pytest.mark.parametrize("compiled", [False, True])
def test_shared_weights_stay_current(tie: Callable[[Any], None], compiled: bool) -> None:
    """One parameter cannot lie in two places, so such projections are left apart, and the report says so."""
    ours = tiny.model("llama")
    tie(ours)
    expected = copy.deepcopy(ours)
    with ck.patch(ours) as report:
        assert "its weights belong to other modules too" in str(report)
        call = torch.compile(ours, backend="eager") if compiled else ours
        logits(call)
        for model in (ours, expected):
            with torch.no_grad():
                for name in ("mlp.gate_proj", "self_attn.k_proj"):
                    model.get_submodule(f"model.layers.0.{name}").weight.mul_(2)
        close(logits(call), logits(expected))


@pytest.mark.parametrize("tie", [tie_gate, one_module, tie_layers])
def test_a_decoder_refuses_shared_projections(tie: Callable[[Any], None]) -> None:
    model = tiny.model("llama")
    tie(model)
    with pytest.raises(UnsupportedProblem, match=r"belongs to another module too.*cutekernels\.patch"):
        decoder(model)


def one_mlp(model: Any) -> None:
    model.model.layers[1].mlp = model.model.layers[0].mlp


def other_name(model: Any) -> None:
    model.alias, model.tied = model.model.layers, model.lm_head.weight


@pytest.mark.parametrize("change", [one_mlp, other_name])
def test_modules_in_two_places_are_no_shared_weights(change: Callable[[Any], None]) -> None:
    ours = tiny.model("llama")
    change(ours)
    expected, prompt = logits(ours), tokens(1, 12)[0].tolist()
    assert decoder(ours).generate([prompt], max_new_tokens=6).tokens == [greedy(ours, prompt, 6)]
    with ck.patch(ours) as report:
        assert "belong to other modules" not in str(report)
        close(logits(ours), expected)


# ---- put on modules while patched -----------------------------------------------------------------------


def doubled(name: str) -> Callable[[Any], None]:
    def change(layer: Any) -> None:
        module = layer.get_submodule(name)
        module.forward = lambda x, before=module.forward: before(x) * 2

    return change


def give_bias(layer: Any) -> None:
    linear = layer.self_attn.v_proj
    linear.bias = torch.nn.Parameter(torch.ones(linear.out_features))


def other_gate(layer: Any) -> None:
    layer.mlp.experts.act_fn = torch.nn.ReLU()


@pytest.mark.parametrize(
    ("family", "change"),
    [
        *[("llama", doubled(n)) for n in ("self_attn.v_proj", "mlp.gate_proj", "post_attention_layernorm")],
        ("gemma2", doubled("pre_feedforward_layernorm")),
        ("llama", give_bias),
        ("mixtral", other_gate),
    ],
)
def test_what_is_put_on_a_patched_module_counts(family: str, change: Callable[[Any], None]) -> None:
    ours, expected = tiny.model(family), tiny.model(family)
    with ck.patch(ours):
        logits(ours)
        for model in (ours, expected):
            change(model.model.layers[0])
        close(logits(ours), logits(expected))


def test_offloading_a_patched_model() -> None:
    accelerate = pytest.importorskip("accelerate")
    model, expected = tiny.model("llama"), logits(tiny.model("llama"))
    ck.patch(model)
    accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
    close(logits(model), expected)


def test_a_hook_that_kept_the_patched_forward_is_unpatched_with_it() -> None:
    hooks = pytest.importorskip("accelerate.hooks")
    model, expected = tiny.model("llama"), logits(tiny.model("llama"))
    ck.patch(model)
    for name in ("mlp", "self_attn", "input_layernorm"):
        hooks.add_hook_to_module(model.get_submodule(f"model.layers.0.{name}"), hooks.ModelHook())
    close(logits(model), expected)
    ck.unpatch(model)
    assert torch.equal(logits(model), expected)


def test_hooks_on_an_activation_of_experts_run() -> None:
    model = tiny.model("qwen3-moe")
    for layer in model.model.layers:
        layer.mlp.experts.act_fn.register_forward_hook(lambda module, args, output: output * -2)
    expected = logits(model)
    with ck.patch(model):
        close(logits(model), expected)
