"""Quantized models of transformers: a Decoder takes over what it can read, all else names ``models.load``."""

from __future__ import annotations

import copy
import functools
import json
from collections.abc import Callable
from types import MethodType, SimpleNamespace
from typing import Any

import pytest
import torch
from transformers.integrations.finegrained_fp8 import FP8Linear

import cutekernels as ck
from cutekernels.errors import UnsupportedProblem
from cutekernels.integrations.transformers import projections
from cutekernels.integrations.transformers import quantized as module_of_quantized
from cutekernels.integrations.transformers.checkpoints import layout_of, quantized_weight
from cutekernels.integrations.transformers.quantized import decoded
from cutekernels.kernels.cute.parts.nf4 import NF4
from cutekernels.models import Decoder
from cutekernels.models.weights import Projection, Projections
from tests.integrations import tiny
from tests.models.test_load import SIZES, assert_close, one_thread
from tests.models.test_load_quantized import compressed, fp8

__all__ = ["one_thread"]
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")
Made = tuple[torch.nn.Module, torch.Tensor]  # a projection, and what it multiplies by


def fp8_blocks(n: int, k: int) -> Made:
    made, tensors = FP8Linear(k, n, block_size=(128, 128)), fp8(n, k)
    made.weight.data, made.weight_scale_inv.data = tensors["weight"], tensors["weight_scale_inv"]
    scale = tensors["weight_scale_inv"].repeat_interleave(128, 0)[:n].repeat_interleave(128, 1)[:, :k]
    return made, tensors["weight"].float() * scale


def fp8_tensor(n: int, k: int) -> Made:
    made = FP8Linear(k, n, block_size=None)
    made.weight.data = torch.randn(n, k).to(torch.float8_e4m3fn)
    made.weight_scale_inv.data = torch.tensor(0.03)
    return made, made.weight.float() * 0.03


def fp8_rows(n: int, k: int) -> Made:
    newer = pytest.importorskip("transformers.integrations.compressed_tensors")
    made = newer.CompressedTensorsFP8Linear(k, n)
    made.weight.data = torch.randn(n, k).to(torch.float8_e4m3fn)
    made.weight_scale.data = torch.rand(1, n) * 0.1
    return made, made.weight.float() * made.weight_scale.t()


def packed(n: int, k: int) -> Made:
    """compressed-tensors before the first call: parameters in the place of ``weight``, and a forward of its own."""
    made, tensors = torch.nn.Linear(k, n, bias=False), compressed(n, k)
    del made.weight
    for name, tensor in tensors.items():
        made.register_parameter(name, torch.nn.Parameter(tensor, requires_grad=False))
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True}
    made.quantization_scheme = SimpleNamespace(weights=SimpleNamespace(model_dump=lambda mode: weights))  # type: ignore[assignment]
    made.forward = MethodType(lambda self, x: pytest.fail("called"), made)  # type: ignore[method-assign]
    codes = torch.stack([(tensors["weight_packed"] >> (4 * i)) & 15 for i in range(8)], -1).flatten(1)
    return made, (codes - 8).float() * tensors["weight_scale"].float().repeat_interleave(32, 1)


class Linear4bit(torch.nn.Linear):
    """A class of bitsandbytes, by its name."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        pytest.fail("called")


def nf4(n: int, k: int) -> Made:
    made, codes, absmax = Linear4bit(k, n, bias=False), torch.randint(0, 16, (n, k)), torch.rand(n, k // 64)
    flat = codes.to(torch.uint8).flatten()
    made.weight = torch.nn.Parameter((flat[0::2] << 4 | flat[1::2])[:, None], requires_grad=False)
    said = {"blocksize": 64, "dtype": "float32", "shape": [n, k], "quant_type": "nf4"}
    state = {
        "absmax": absmax.flatten(),
        "quant_map": torch.tensor(NF4),
        "quant_state.bitsandbytes__nf4": torch.tensor(list(json.dumps(said).encode()), dtype=torch.uint8),
    }
    made.weight.quant_state = SimpleNamespace(as_dict=lambda packed: state)  # type: ignore[attr-defined]
    return made, torch.tensor(NF4)[codes] * absmax.repeat_interleave(64, 1)


def words(codes: torch.Tensor, places: tuple[int, ...]) -> torch.Tensor:
    """int32 of eight codes along the last dimension; that of ``places[i]`` becomes nibble i."""
    eight = codes.long().unflatten(-1, (-1, 8))[..., list(places)]
    packed = (eight << torch.arange(0, 32, 4)).sum(-1)
    return torch.where(packed >= 2**31, packed - 2**32, packed).int()


def gptqmodel(kind: str, n: int, k: int, **tensors: torch.Tensor) -> torch.nn.Module:
    """A projection of gptqmodel, by its name and attributes."""
    names: dict[str, Any] = {
        "__module__": "gptqmodel.nn_modules.qlinear",
        "forward": lambda self, x: pytest.fail("called"),
    }
    made: Any = type(kind, (torch.nn.Module,), names)()
    made.bits, made.group_size, made.in_features, made.out_features, made.bias = 4, 32, k, n, None
    made.adapter = made.had_K = None
    made.qzero_format = functools.partial(int, 2)
    for name, tensor in tensors.items():
        made.register_buffer(name, tensor)
    return made  # type: ignore[no-any-return]


def quantized(n: int, k: int) -> tuple[torch.Tensor, ...]:
    """Codes (N, K), zeros and scales (groups, N), and what they are."""
    codes, zeros = torch.randint(0, 16, (n, k)), torch.randint(0, 16, (k // 32, n))
    scales = torch.rand(k // 32, n).half() * 0.05
    exact = (codes - zeros.t().repeat_interleave(32, 1)) * scales.t().float().repeat_interleave(32, 1)
    return codes, zeros, scales, exact


def gptq(n: int, k: int) -> Made:
    codes, zeros, scales, exact = quantized(n, k)
    straight = tuple(range(8))
    tensors = {"qweight": words(codes, straight).t().contiguous(), "qzeros": words(zeros, straight), "scales": scales}
    return gptqmodel("TorchLinear", n, k, **tensors, g_idx=(torch.arange(k) // 32).int()), exact


def awq(n: int, k: int) -> Made:
    codes, zeros, scales, exact = quantized(n, k)
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    tensors = {"qweight": words(codes.t(), order), "qzeros": words(zeros, order), "scales": scales}
    return gptqmodel("AwqGEMMLinear", n, k, **tensors), exact


LAYOUTS: dict[str, Callable[[int, int], Made]] = {
    "fp8": fp8_blocks, "fp8-tensor": fp8_tensor, "fp8-rows": fp8_rows, "packed": packed, "nf4": nf4, "gptq": gptq,
    "awq": awq,
}  # fmt: skip


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("shape", [(64, 64), (200, 192)])
def test_weights_are_read_as_their_layout_defines(name: str, shape: tuple[int, int]) -> None:
    torch.manual_seed(3)
    module, expected = LAYOUTS[name](*shape)
    weight = quantized_weight(module, torch.float32)
    assert weight is not None and weight.shape == shape
    assert torch.equal(weight.dequantize(), expected)
    assert quantized_weight(torch.nn.Linear(*shape)) is None and layout_of(torch.nn.Linear(*shape)) == ""


def small() -> Any:
    return tiny.model("llama", num_key_value_heads=4, intermediate_size=128)


def replaced(model: Any, make: Callable[[int, int], Made], seed: int = 3) -> Any:
    """``model`` with its projections made by ``make``, and a plain twin of it."""
    torch.manual_seed(seed)
    twin = small()
    for path, linear in list(twin.named_modules()):
        if type(linear) is torch.nn.Linear and path != "lm_head":
            parent, _, name = path.rpartition(".")
            made, linear.weight.data = make(*linear.weight.shape)
            setattr(model.get_submodule(parent), name, made)
    return twin


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_decoder_takes_over_what_transformers_has_loaded(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = small()
    twin = replaced(model, LAYOUTS[name])
    ours = Decoder.from_transformers(model, **SIZES)
    assert_close(twin, ours, monkeypatch)
    attention = ours._w.layers[0].attention
    assert isinstance(attention.qkv, Projections if name == "fp8" else Projection), "64 rows are half a block"


def looks(model: Any) -> dict[str, Any]:
    """The classes, attributes and hooks that unpatch has to restore."""
    projections = {name: (type(m), set(m.__dict__)) for name, m in model.named_modules() if hasattr(m, "in_features")}
    return {"hooks": list(model._forward_pre_hooks), **projections}


@pytest.mark.parametrize("name", LAYOUTS)
def test_patch_multiplies_by_what_transformers_has_loaded(name: str) -> None:
    model, ids = small(), tiny.tokens()
    expected = replaced(model, LAYOUTS[name])(ids).logits
    before, state = looks(model), {key: t.clone() for key, t in model.state_dict().items()}
    with ck.patch(model) as report:
        torch.testing.assert_close(model(ids).logits, expected)
        if name == "packed":
            compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
            torch.testing.assert_close(compiled(ids, use_cache=False).logits, expected)
        assert model.state_dict().keys() == state.keys()
        projection = model.model.layers[0].mlp.up_proj
        assert quantized_weight(projection) is projection.packed, "not packed twice"
        model.bfloat16()
        assert model(ids).logits.dtype == torch.bfloat16
    assert report.patched["quantized"] == 14 and not report.left
    assert looks(model) == before


@pytest.mark.parametrize("name", LAYOUTS)
def test_nothing_is_in_memory_twice_and_everything_comes_back(name: str) -> None:
    model = tiny.model("llama", num_key_value_heads=4, hidden_size=512, intermediate_size=512)
    replaced(model, LAYOUTS[name])
    projection = model.model.layers[0].mlp.up_proj
    torch.manual_seed(5)
    projection, _ = LAYOUTS[name](512, 512)
    model.model.layers[0].mlp.up_proj = projection
    state = {key: t.clone() for key, t in projection.state_dict().items()}
    own = lambda: sum(t.nbytes for t in (*projection.parameters(), *projection.buffers()))  # noqa: E731
    before = own()
    with ck.patch(model):
        assert own() + projection.packed.nbytes <= 1.2 * before, "codes once; a scale for 32 is a fifth of them"
        found = [projection.state_dict(), copy.deepcopy(projection).state_dict()]
    for after in (*found, projection.state_dict()):
        assert after.keys() == state.keys()
        assert all(torch.equal(after[key], t) and after[key].dtype == t.dtype for key, t in state.items())
    assert own() == before


@pytest.mark.parametrize("assign", [False, True])
def test_a_loaded_state_dict_is_multiplied_by(assign: bool) -> None:
    model, other, ids = small(), small(), tiny.tokens()
    replaced(model, gptq)
    twin = replaced(other, gptq, seed=9)
    with ck.patch(model):
        state = other.state_dict()
        model.load_state_dict(state, assign=assign)
        assert all(t.numel() for t in state.values()), "what the caller holds stays"
        torch.testing.assert_close(model(ids).logits, twin(ids).logits)


@pytest.mark.parametrize("assign", [False, True])
def test_a_state_dict_that_is_refused_changes_nothing(assign: bool) -> None:
    model, ids = small(), tiny.tokens()
    expected = replaced(model, fp8_rows)(ids).logits
    state = {key: t.clone() for key, t in model.state_dict().items()}
    state["model.layers.0.mlp.up_proj.weight_scale"] = torch.full((1, 128), float("nan"))
    with ck.patch(model):
        with pytest.raises(RuntimeError, match=r"up_proj\.weight: .*finite"):
            model.load_state_dict(state, assign=assign)
        torch.testing.assert_close(model(ids).logits, expected)
    assert all(t.isfinite().all() for name, t in model.state_dict().items() if name.endswith("weight_scale"))


def test_a_weight_without_bitsandbytes_state_is_refused_when_it_is_loaded() -> None:
    model, ids = small(), tiny.tokens()
    expected = replaced(model, nf4)(ids).logits
    with ck.patch(model):
        with pytest.raises(RuntimeError, match=r"up_proj\.weight: .*quant_state.*from_pretrained"):
            model.load_state_dict({key: t.clone() for key, t in model.state_dict().items()}, assign=True)
        torch.testing.assert_close(model(ids).logits, expected)


@pytest.mark.parametrize("name", ["fp8-rows", "packed", "nf4"])
def test_who_reads_the_weight_gets_it_and_one_in_its_place_is_multiplied_by(name: str) -> None:
    """PEFT's DoRA reads the weight at each call, its merge puts another one there."""
    model = small()
    replaced(model, LAYOUTS[name])
    projection, x = model.model.layers[0].mlp.up_proj, torch.randn(3, 64)
    other, exact = LAYOUTS[name](*quantized_weight(projection).shape)  # type: ignore[union-attr]
    codes = "weight_packed" if name == "packed" else "weight"
    own = {key: t.clone() for key, t in projection.state_dict().items()}
    with ck.patch(model):
        read = getattr(projection, codes)
        assert torch.equal(read, own[codes]) and hasattr(read, "quant_state") == (name == "nf4")
        assert not projection._parameters[codes].numel(), "still once in memory"
        assert all(t.numel() for t in projection.state_dict(keep_vars=True).values())
        for key, t in other._parameters.items():
            setattr(projection, key, t)
        torch.testing.assert_close(projection(x), torch.nn.functional.linear(x, exact))
        assert not projection._parameters[codes].numel() and getattr(other, codes).numel(), "the caller's stays"
    found, given = projection.state_dict(), other.state_dict()
    assert all(torch.equal(found[key], t) for key, t in given.items())


def test_a_graph_multiplies_by_the_weight_that_is_there() -> None:
    """Made before the weight is replaced and after it, before any other call."""
    model, x = small(), torch.randn(3, 64)
    replaced(model, fp8_rows)
    projection = model.model.layers[0].mlp.up_proj
    with ck.patch(model):
        compiled = torch.compile(projection, backend="aot_eager")
        compiled(x)
        for run in (compiled, torch.compile(projection, backend="aot_eager")):
            other, exact = fp8_rows(*projection.packed.shape)
            projection.weight, projection.weight_scale = other.weight, other.weight_scale
            torch.testing.assert_close(run(x), torch.nn.functional.linear(x, exact))
        assert not projection._parameters["weight"].numel()


def test_a_weight_in_two_projections_stays_for_the_other_one() -> None:
    model, ids = small(), tiny.tokens()
    twin = replaced(model, fp8_rows)
    (first, second), plain = (layer.mlp for layer in model.model.layers), [layer.mlp for layer in twin.model.layers]
    second.up_proj.weight, second.up_proj.weight_scale = first.up_proj.weight, first.up_proj.weight_scale
    plain[1].up_proj.weight = plain[0].up_proj.weight
    second.up_proj.forward = lambda x: torch.nn.functional.linear(x, first.up_proj.weight.float() * scale.t())
    scale = first.up_proj.weight_scale
    with ck.patch(model) as report:
        assert report.patched["quantized"] == 13
        torch.testing.assert_close(model(ids).logits, twin(ids).logits)


@pytest.mark.parametrize("name", ["packed", "gptq"])
def test_hooks_of_accelerate_survive_unpatch(name: str) -> None:
    hooks = pytest.importorskip("accelerate.hooks")
    model, ids = small(), tiny.tokens()
    expected = replaced(model, LAYOUTS[name])(ids).logits
    projection = model.model.layers[0].mlp.up_proj
    own = projection.forward
    ck.patch(model)
    hooks.add_hook_to_module(projection, hooks.ModelHook())
    model.load_state_dict(model.state_dict())
    torch.testing.assert_close(model(ids).logits, expected)
    hooked = projection.forward
    ck.unpatch(model)
    assert projection.forward is hooked and projection._old_forward == own


def test_activations_that_no_kernel_takes_are_multiplied_by_the_decoded_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    """As fp32 on a GPU, of which the CPU stands in here; bitsandbytes casts them to its own type."""
    peft, model = pytest.importorskip("peft"), small()
    twin = replaced(model, nf4)
    x, weight = torch.randn(3, 64), twin.model.layers[0].mlp.up_proj.weight
    with ck.patch(model):
        projection = model.model.layers[0].mlp.up_proj
        monkeypatch.setattr(module_of_quantized, "computes", lambda device, dtype: dtype == torch.bfloat16)
        monkeypatch.setattr(projections, "multiplied", lambda x, weight: x.dtype == weight.dtype == torch.bfloat16)
        assert torch.equal(projection(x), torch.nn.functional.linear(x, weight))
        projection.compute_dtype = torch.bfloat16
        found = projection(x)
        assert found.dtype == x.dtype and torch.equal(found, found.bfloat16().float())
    with ck.patch(model) as report:
        left = [why for _, why in report.left if "torch.float32: load it with dtype=torch.bfloat16" in why]
        assert report.patched["quantized"] == 1 and len(left) == 14, "13 projections, and attention's core"
        assert model.config._attn_implementation != "cutekernels"
    model.bfloat16().config.dtype = torch.float32  # the embeddings' type counts
    ck.patch(peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"])))
    assert model.config._attn_implementation == "cutekernels", "an adapter's weights may have any type"


@pytest.mark.parametrize("patched", [False, True])
def test_compare_decodes_the_weights(patched: bool) -> None:
    """Copies run: at the plain model's first call compressed-tensors would decompress it for good."""
    model, ids = small(), tiny.tokens()
    replaced(model, packed)
    model.is_quantized = True  # of which transformers refuses float()

    def decompress(model: Any, args: Any) -> None:
        decoded(model)
        del model.ct_decompress_hook
        model._forward_pre_hooks.clear()

    model.ct_decompress_hook = model.register_forward_pre_hook(decompress)
    if patched:
        ck.patch(model)
    found = ck.compare(model, ids)
    assert found.patched["logits"] < 1e-5 and found.plain["logits"] < 1e-5
    ck.unpatch(model)
    assert ck.patch(model).patched["quantized"] == 14


def test_compare_refuses_what_it_cannot_decode() -> None:
    model = tiny.model("llama")
    model.model.layers[1].mlp.up_proj = machete(in_features=64)
    with pytest.raises(UnsupportedProblem, match=r"up_proj are in a layout that is not decoded \(.*MacheteLinear"):
        ck.compare(model, tiny.tokens())


def test_a_copy_does_not_read_the_original() -> None:
    """gptqmodel compiles a bound method, which copies would share."""
    model = small()
    replaced(model, gptq)
    projection = model.model.layers[0].mlp.up_proj
    projection.dequantize_weight = lambda: projection.qweight
    with ck.patch(model):
        assert "dequantize_weight" not in copy.deepcopy(projection).__dict__
    assert "dequantize_weight" in projection.__dict__


def test_quantized_experts_are_reported() -> None:
    from transformers.integrations.finegrained_fp8 import FP8Experts

    model = tiny.model("mixtral")
    model.model.layers[0].mlp.experts = FP8Experts(model.config)
    with ck.patch(model) as report:
        assert report.patched["experts"] == 1
        assert dict(report.left)["model.layers.0.mlp.experts"].endswith("a models.Decoder multiplies by them")


def test_compressed_tensors_decompresses_nothing_that_is_patched() -> None:
    model, ids = small(), tiny.tokens()
    expected = replaced(model, packed)(ids).logits
    model.ct_decompress_hook = model.register_forward_pre_hook(lambda *args: pytest.fail("decompressed"))
    before = looks(model)
    with ck.patch(model):
        torch.testing.assert_close(model(ids).logits, expected)
    assert looks(model) == before and before["hooks"]


def test_compressed_tensors_is_patched_whole_or_not() -> None:
    model = small()
    replaced(model, packed)
    model.model.layers[1].mlp.up_proj.quantization_scheme.weights.model_dump = lambda mode: {"num_bits": 3}
    model.ct_decompress_hook = model.register_forward_pre_hook(lambda *args: None)
    with ck.patch(model) as report:
        hooks = [hook for hook in model._forward_pre_hooks.values() if hook.__module__ == __name__]
        assert "quantized" not in report.patched and len(hooks) == 1
        assert {name for name, why in report.left if "num_bits" in why} >= {"model.layers.0.self_attn.q_proj"}
        assert len([why for _, why in report.left if "num_bits" in why]) == 14


def test_a_module_that_device_map_has_hooked_is_left() -> None:
    model = small()
    replaced(model, fp8_rows)
    linear = model.model.layers[0].mlp.up_proj
    linear.forward, linear._hf_hook = linear.forward, object()
    with ck.patch(model) as report:
        assert dict(report.left)["model.layers.0.mlp.up_proj"].startswith("its forward has been replaced")
        assert report.patched["quantized"] == 13


@pytest.mark.parametrize("spoil", [{"bits": 8}, {"adapter": object()}, {"had_K": torch.eye(2)}])
def test_what_gptqmodel_adds_to_a_weight_is_not_dropped(spoil: dict[str, Any]) -> None:
    made, _ = gptq(64, 64)
    for name, value in spoil.items():
        setattr(made, name, value)
    with pytest.raises(UnsupportedProblem, match=r"read with .*: load the checkpoint itself"):
        quantized_weight(made)


def test_adapters_on_quantized_projections_train() -> None:
    """QLoRA: the adapter stays PEFT's, the projection that it stands before is ours, and gradients pass through it."""
    peft = pytest.importorskip("peft")
    ids, found = tiny.tokens(), []
    for quantize in (False, True):
        torch.manual_seed(3)
        model = small()
        twin = replaced(model, nf4)
        torch.manual_seed(4)
        options = {"r": 4, "target_modules": ["q_proj", "down_proj"], "init_lora_weights": False}
        model = peft.get_peft_model(model if quantize else twin, peft.LoraConfig(**options))
        if quantize:
            report = ck.patch(model)
            assert report.patched["quantized"] == 14 and not [why for _, why in report.left if "quantized" in why]
        model(ids, labels=ids).loss.backward()
        found.append({name: p.grad for name, p in model.named_parameters() if p.requires_grad})
    assert found[0].keys() == found[1].keys() and len(found[0]) == 8
    for name, grad in found[0].items():
        torch.testing.assert_close(found[1][name], grad, msg=name)


def machete(**names: Any) -> torch.nn.Module:
    """A projection of gptqmodel that has repacked its weight."""
    cls = type("MacheteLinear", (torch.nn.Module,), {"__module__": "gptqmodel.nn_modules.qlinear.machete", **names})
    return cls()  # type: ignore[no-any-return]


def test_layouts_that_cannot_be_read_are_refused_with_the_remedy() -> None:
    model = tiny.model("llama")
    model.model.layers[1].mlp.up_proj = machete(in_features=64)
    rule = (
        r"cannot read model\.layers\.1\.mlp\.up_proj as .*machete\.MacheteLinear\): load .* cutekernels\.models\.load"
    )
    with pytest.raises(UnsupportedProblem, match=rule):
        Decoder.from_transformers(model, **SIZES)
    with ck.patch(model) as report:
        assert "machete.MacheteLinear" in dict(report.left)["model.layers.1.mlp.up_proj"]


def test_a_decompressed_model_is_refused_with_a_remedy_that_works() -> None:
    """compressed-tensors leaves its forward, which rounds activations, in front of the weight that it has decompressed.

    Its own offloading has replaced every other forward too: deleting those would lead to the next refusal.
    """
    model = tiny.model("llama")
    linear, table = model.model.layers[0].self_attn.o_proj, model.model.embed_tokens
    linear.quantization_scheme, linear.quantization_status = SimpleNamespace(), "decompressed"
    linear.forward = linear.forward
    table.forward = MethodType(lambda self, x: torch.nn.Embedding.forward(self, x), table)
    rule = r"o_proj any more.* first call: load the model anew by from_pretrained and do this before its first call, or"
    with pytest.raises(UnsupportedProblem, match=rule):
        Decoder.from_transformers(model, **SIZES)
    with ck.patch(model) as report:
        why = dict(report.left)["model.layers.0.self_attn.o_proj"]
        assert why.startswith("compressed-tensors has decompressed it at the model's first call: load the model anew")
    del linear.quantization_status
    with pytest.raises(UnsupportedProblem, match=r"embed_tokens has a forward of its own"):
        Decoder.from_transformers(model, **SIZES)
    del table.forward
    with pytest.raises(UnsupportedProblem, match=r"o_proj as .*quantized \(by compressed_tensors\): load"):
        Decoder.from_transformers(model, **SIZES)


def test_experts_that_cannot_be_stacked_are_named() -> None:
    """Experts of transformers: blocks of 128 rows, and 192 of both gate and up."""
    fp8_module = pytest.importorskip("transformers.integrations.finegrained_fp8")
    model = tiny.model("qwen3-moe", hidden_size=128, moe_intermediate_size=96)
    layer = model.model.layers[1].mlp
    layer.experts = fp8_module.FP8Experts(model.config, block_size=(128, 128))
    for name, p in layer.experts.named_parameters():
        p.data = torch.ones_like(p.data) if name.endswith("scale_inv") else torch.zeros_like(p.data)
    with pytest.raises(
        UnsupportedProblem, match=r"^model\.layers\.1\.mlp\.experts: .* multiples of 128 rows in blocks"
    ):
        Decoder.from_transformers(model, **SIZES)


def test_a_weight_of_a_strange_class() -> None:
    """torchao's subclasses stand in a plain Linear."""
    model = tiny.model("llama")
    made = type("AffineQuantizedTensor", (torch.Tensor,), {"__module__": "torchao.dtypes"})
    linear = model.model.layers[0].self_attn.o_proj
    linear.weight = torch.nn.Parameter(linear.weight.data.as_subclass(made), requires_grad=False)
    with pytest.raises(UnsupportedProblem, match=r"quantized \(torchao\.dtypes\.AffineQuantizedTensor\): load"):
        Decoder.from_transformers(model, **SIZES)
    with ck.patch(model) as report:
        assert "torchao.dtypes.AffineQuantizedTensor" in dict(report.left)["model.layers.0.self_attn.o_proj"]


def test_quantized_experts_are_refused_with_the_remedy() -> None:
    """In transformers they are one parameter of all experts, beside their scales."""
    model = tiny.model("qwen3-moe")
    experts = model.model.layers[0].mlp.experts
    experts.gate_up_proj = torch.nn.Parameter(experts.gate_up_proj.to(torch.float8_e4m3fn), requires_grad=False)
    with pytest.raises(UnsupportedProblem, match=r"experts\.gate_up_proj as .*quantized: load the model dequantized"):
        Decoder.from_transformers(model, **SIZES)
