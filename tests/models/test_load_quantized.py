"""Quantized checkpoints by ``load``: each layer is what its format defines, and a decoder multiplies by just that."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from cutekernels import quant
from cutekernels.errors import UnsupportedProblem
from cutekernels.models import Decoder, load
from cutekernels.models.loaded import Apart
from cutekernels.models.weights import Projection
from tests.integrations import tiny
from tests.models.test_load import SIZES, assert_close, edit, logits, one_thread, store

__all__ = ["one_thread"]
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")
Tensors = dict[str, torch.Tensor]
GROUP = 32


def words(*shape: int) -> torch.Tensor:
    return torch.randint(-(2**31), 2**31, shape, dtype=torch.int32)


def small(*shape: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    return (torch.rand(shape) * 0.02 + 0.01).to(dtype)


def gptq(n: int, k: int) -> Tensors:
    order = torch.randperm(k, generator=torch.Generator().manual_seed(k))
    return {
        "qweight": words(k // 8, n), "qzeros": words(k // GROUP, n // 8), "scales": small(k // GROUP, n),
        "g_idx": (torch.arange(k, dtype=torch.int32) // GROUP)[order],
        "bias": torch.zeros(n, dtype=torch.float16),  # which old quantizers store for every layer
    }  # fmt: skip


def gptq_of_any_order(n: int, k: int) -> Tensors:
    return gptq(n, k) | {"g_idx": (torch.arange(k, dtype=torch.int32) // GROUP)[torch.randperm(k)]}


def awq(n: int, k: int) -> Tensors:
    return {"qweight": words(k, n // 8), "qzeros": words(k // GROUP, n // 8), "scales": small(k // GROUP, n)}


def compressed(n: int, k: int) -> Tensors:
    return {
        "weight_packed": words(n, k // 8), "weight_scale": small(n, k // GROUP, dtype=torch.bfloat16),
        "weight_shape": torch.tensor([n, k]),
    }  # fmt: skip


def fp8(n: int, k: int) -> Tensors:
    scale = small(-(-n // 128), -(-k // 128), dtype=torch.float32)
    return {"weight": torch.randn(n, k).to(torch.float8_e4m3fn), "weight_scale_inv": scale}


def fp8_rows(n: int, k: int) -> Tensors:
    return {
        "weight": torch.randn(n, k).to(torch.float8_e4m3fn), "weight_scale": small(n, 1, dtype=torch.bfloat16),
        "input_scale": torch.ones(1),
    }  # fmt: skip


def own(n: int, k: int) -> Tensors:
    return dict(quant.quantize(torch.randn(n, k) * 0.1, "int4_g32").tensors())


def nvfp4(n: int, k: int) -> Tensors:
    """ModelOpt's; the factor is the layer's own."""
    codes, scales = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8), torch.randint(64, 120, (n, k // 16)).byte()
    return {
        "weight": codes, "weight_scale": scales.view(torch.float8_e4m3fn), "weight_scale_2": small(1)[0].float() / 1e3,
        "input_scale": torch.ones(()),
    }  # fmt: skip


def nvfp4_packed(n: int, k: int) -> Tensors:
    """compressed-tensors', whose factor divides."""
    codes, scale, factor, _ = nvfp4(n, k).values()
    return {
        "weight_packed": codes, "weight_scale": scale, "weight_global_scale": 1 / factor.reshape(1),
        "input_global_scale": torch.ones(1),
    }  # fmt: skip


_WEIGHTS = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": GROUP}
FORMATS: dict[str, tuple[Callable[[int, int], Tensors], dict[str, Any]]] = {
    "gptq": (gptq, {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": True, "sym": False}),
    "gptq-orders": (gptq_of_any_order, {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": True}),
    "awq": (awq, {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm"}),
    "compressed-tensors": (
        compressed,
        {
            "quant_method": "compressed-tensors", "quantization_status": "compressed", "format": "pack-quantized",
            "ignore": ["lm_head"],
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": _WEIGHTS}},
        },
    ),
    "compressed-tensors-fp8": (
        fp8_rows,
        {
            "quant_method": "compressed-tensors", "format": "float-quantized", "ignore": ["lm_head"],
            "config_groups": {
                "group_0": {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "float", "strategy": "channel"}}
            },
        },
    ),
    "modelopt": (nvfp4, {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]}),
    "compressed-tensors-nvfp4": (
        nvfp4_packed,
        {
            "quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized", "ignore": ["lm_head"],
            "config_groups": {
                "group_0": {
                    "targets": ["Linear"],
                    "weights": {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16},
                }
            },
        },
    ),
    "fp8": (fp8, {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}),
    "cutekernels": (own, {"quant_method": "cutekernels", "scheme": "int4_g32"}),
}  # fmt: skip


def quantized(name: str, folder: Path, model: Any, but: tuple[str, ...] = ("lm_head",)) -> Path:
    """A checkpoint of ``model`` with other weights: its projections quantized, and itself given what those mean."""
    torch.manual_seed(7)
    make, config = FORMATS[name]
    model.save_pretrained(folder)
    tensors, scheme = load_file(folder / "model.safetensors"), quant.read_config(config)
    for path, linear in model.named_modules():
        if type(linear) is torch.nn.Linear and not path.endswith(but) and "visual" not in path:
            held = make(*linear.weight.shape)
            if linear.bias is not None:
                held["bias"] = linear.bias.data.clone()
            linear.weight.data = quant.read(held, scheme, dtype=model.dtype).dequantize()
            del tensors[f"{path}.weight"]
            tensors |= {f"{path}.{suffix}": t for suffix, t in held.items()}
    first = next(path for path, _ in model.named_modules() if path.endswith("layers.0.self_attn.k_proj"))
    tensors[f"{first}.k_scale"] = torch.ones(())  # of a cache in FP8, which this one is not
    store(folder, tensors, config)
    return folder


def llama(**changes: Any) -> Any:
    """A model of whole tiles: q, k and v can be one, and gate and up."""
    return tiny.model("llama", **({"num_key_value_heads": 4, "intermediate_size": 128} | changes))


def test_a_language_model_among_towers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny.model("qwen3-vl", num_key_value_heads=4, intermediate_size=128)
    quantized("compressed-tensors", tmp_path, model)
    assert_close(model, Decoder.from_pretrained(tmp_path, **SIZES), monkeypatch)


def test_a_quantizer_s_own_file_stands_for_the_config(tmp_path: Path) -> None:
    model = llama()
    quantized("modelopt", tmp_path, model)
    said = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4", "exclude_modules": ["lm_head"]}}
    edit(tmp_path / "config.json", lambda c: c.pop("quantization_config"))
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(said))
    found = load(tmp_path, device="cpu").get_submodule("model.layers.0.mlp.down_proj").weight
    assert torch.equal(found.dequantize(), model.get_submodule("model.layers.0.mlp.down_proj").weight)


@pytest.mark.parametrize("name", FORMATS)
def test_a_decoder_multiplies_by_what_the_format_defines(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = llama()
    quantized(name, tmp_path, model)
    ours = Decoder.from_pretrained(tmp_path, **SIZES)
    layer = ours._source.model.model.layers[1]
    apart = name == "gptq-orders"
    assert isinstance(layer.mlp.gate_up_proj, Apart) == apart
    assert isinstance(layer.self_attn.qkv_proj, Apart) == (apart or name == "fp8"), "64 rows are half a block"
    assert type(layer.self_attn.o_proj.weight) is quant.QuantizedWeight
    assert isinstance(ours._w.head, Projection) and isinstance(ours._w.head.weight, torch.Tensor)
    assert torch.equal(layer.self_attn.o_proj.weight.dequantize(), model.model.layers[1].self_attn.o_proj.weight)
    # Weights are alike in every bit; here they are multiplied packed, by a reference that sums in fp64, there in fp32.
    assert_close(model, ours, monkeypatch)


def test_a_decoder_follows_what_is_loaded_into_its_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The state dict of a quantized model is whole: another model takes it, and so does its decoder."""
    folder = quantized("gptq", tmp_path, llama())
    first, second = load(folder), load(folder)
    state = {name: t.clone() for name, t in first.state_dict().items()}
    own = [name.rpartition(".")[2] for name in state if "layers.0.self_attn.o_proj" in name]
    assert sorted(own) == ["g_idx", "qweight", "qzeros", "scales"]
    assert all(f"model.layers.1.mlp.gate_up_proj.weight.{name}" in state for name in ("packed", "scales", "zeros"))
    expected = logits(Decoder.from_transformers(first, **SIZES), monkeypatch)
    with torch.no_grad():
        for layer in second.model.layers:
            for module in (layer.self_attn.qkv_proj, layer.self_attn.o_proj, layer.mlp.gate_up_proj):
                module.weight.packed.zero_()
    decoder = Decoder.from_transformers(second, **SIZES)
    assert not torch.equal(logits(decoder, monkeypatch)[1], expected[1])
    packed = second.model.layers[0].self_attn.o_proj.weight.packed
    second.load_state_dict(state)
    assert second.model.layers[0].self_attn.o_proj.weight.packed is packed
    assert torch.equal(logits(decoder, monkeypatch)[1], expected[1])
    del state["model.layers.0.self_attn.o_proj.qweight"]
    with pytest.raises(RuntimeError, match="o_proj.weight: .*qweight"):
        second.load_state_dict(state)


@pytest.mark.parametrize("family", ["qwen2", "gemma3"])
def test_biases_and_rows_that_fill_no_tile(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads of 16 channels: keys have 32 rows, and plain layers stand beside quantized ones."""
    model = tiny.model(family, tie_word_embeddings=False)
    quantized("awq", tmp_path, model, but=("lm_head", "0.self_attn.v_proj", "1.mlp.gate_proj", "1.mlp.up_proj"))
    assert_close(model, Decoder.from_pretrained(tmp_path, **SIZES), monkeypatch)


def test_a_quantized_head(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = llama(vocab_size=128)
    quantized("fp8", tmp_path, model, but=())
    assert_close(model, Decoder.from_pretrained(tmp_path, **SIZES), monkeypatch)


def test_a_model_moves_with_its_quantized_weights(tmp_path: Path) -> None:
    model = load(quantized("fp8", tmp_path, llama()))
    decoder = Decoder.from_transformers(model, **SIZES)
    decoder.generate([[1, 2]], max_new_tokens=2)
    out = model.model.layers[0].self_attn.o_proj
    before = out.weight
    assert not decoder._source.moved()
    out.weight = before.to(dtype=torch.bfloat16)
    assert decoder._source.moved()
    model.to(torch.float16)
    assert out.weight.dtype == torch.float16 and out.weight.packed.data_ptr() == before.packed.data_ptr()
    with pytest.raises(UnsupportedProblem, match="the model has changed since this decoder was made"):
        decoder.generate([[1, 2]], max_new_tokens=2)


# ---- joined ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("rows", [(64, 128, 40), (128, 128, 256)])
def test_joined_weights_are_the_rows_of_all(name: str, rows: tuple[int, ...]) -> None:
    make, config = FORMATS[name]
    weights = [quant.read(make(n, 128), config, dtype=torch.bfloat16) for n in rows]
    whole = quant.concatenate(weights)
    if name == "gptq-orders" or (name == "fp8" and rows[0] == 64):
        assert whole is None
        return
    assert whole is not None and whole.shape == (sum(rows), 128)
    assert torch.equal(whole.dequantize(), torch.cat([w.dequantize() for w in weights]))


def test_weights_that_differ_are_not_joined() -> None:
    w = torch.randn(64, 128)
    first = quant.quantize(w, "int4_g32")
    zeros = quant.quantize(w, "int4_g32", symmetric=False)
    both = quant.concatenate([first, zeros])
    assert both is not None and torch.equal(both.dequantize(), torch.cat([first.dequantize(), zeros.dequantize()]))
    for other in ("int4_g64", "fp8_channel"):
        assert quant.concatenate([first, quant.quantize(w, other)]) is None
    assert quant.concatenate([first, first.to(dtype=torch.float16)]) is None
    assert quant.concatenate([first, quant.quantize(torch.randn(64, 64), "int4_g32")]) is None
    assert quant.concatenate([first]) is first


# ---- refusals -------------------------------------------------------------------------------------------


def tensors(change: Callable[[Tensors], Any]) -> Callable[[Path], None]:
    def broken(folder: Path) -> None:
        held = load_file(folder / "model.safetensors")
        change(held)
        save_file(held, folder / "model.safetensors")

    return broken


Q = "model.layers.0.self_attn.q_proj"
BROKEN: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no config": (
        lambda f: edit(f / "config.json", lambda c: c.pop("quantization_config")),
        "quantized, and config.json has no quantization_config",
    ),
    "another format": (
        lambda f: edit(f / "config.json", lambda c: c.update(quantization_config={"quant_method": "hqq"})),
        "quant_method is one of .*, not 'hqq'",
    ),
    "no config at all": (
        lambda f: edit(f / "config.json", lambda c: c.update(quantization_config=[1])),
        "quantization_config is a dict, not list",
    ),
    "a config of other types": (
        lambda f: edit(f / "config.json", lambda c: c["quantization_config"].update(group_size=1e400)),
        "quantization_config of awq has an entry of another type",
    ),
    "lacking scales": (tensors(lambda t: t.pop(f"{Q}.scales")), rf"{Q}: .* has scales, and this one has"),
    "short": (tensors(lambda t: t.update({f"{Q}.qweight": words(64, 4)})), rf"{Q}: AWQ's qzeros has shape"),
    "of another layer": (
        tensors(lambda t: t.update({f"{Q}.{k}": v for k, v in awq(32, 64).items()})),
        r"q_proj is quantized from \(32, 64\), and config.json asks for \(64, 64\)",
    ),
    "a bias too many": (tensors(lambda t: t.update({f"{Q}.bias": torch.ones(64)})), f"{Q} has a bias, and config"),
    "an embedding": (
        tensors(lambda t: t.update({f"model.embed_tokens.{k}": v for k, v in awq(64, 64).items()})),
        "model.embed_tokens is quantized",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_quantized_checkpoints_are_refused_in_one_sentence(name: str, tmp_path: Path) -> None:
    quantized("awq", tmp_path, llama(num_hidden_layers=1))
    change, message = BROKEN[name]
    change(tmp_path)
    with pytest.raises(UnsupportedProblem, match=message) as error:
        load(tmp_path)
    assert "\n" not in str(error.value)
    assert json.loads((tmp_path / "config.json").read_text())
