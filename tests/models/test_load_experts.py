"""Checkpoints of experts by ``load``: gpt-oss in MXFP4 beside transformers, others quantized in each format."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from cutekernels import quant
from cutekernels.errors import UnsupportedProblem
from cutekernels.models import Decoder, load
from cutekernels.quant import QuantizedStack
from tests.integrations import tiny
from tests.models.test_decoder import prompts
from tests.models.test_load import SIZES, assert_close, logits, one_thread, saved, store
from tests.models.test_load_quantized import FORMATS

__all__ = ["one_thread"]
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


def gpt_oss(folder: Path, width: int = 128) -> Any:
    """A tiny model of transformers, its weights as OpenAI's checkpoint has them in ``folder``."""
    torch.manual_seed(0)
    config = transformers.GptOssConfig(
        hidden_size=64, intermediate_size=width, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=16, num_local_experts=4, num_experts_per_tok=2, vocab_size=131, sliding_window=8,
        attn_implementation="eager",
    )  # fmt: skip
    model, tensors = transformers.GptOssForCausalLM(config).eval(), {}
    for name, p in model.named_parameters():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            experts, k, n = p.shape
            blocks = torch.randint(0, 256, (experts, n, k // 32, 16), dtype=torch.uint8)
            scales = torch.randint(121, 125, (experts, n, k // 32), dtype=torch.uint8)
            p.data.copy_(quant.experts_from_mxfp4(blocks, scales, dtype=torch.float32).dequantize().mT)
            tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
            continue
        if name.endswith(("bias", "sinks", "router.weight", "embed_tokens.weight", "lm_head.weight")):
            torch.nn.init.normal_(p, 0.0, 2.0 if "sinks" in name else 0.5)
        tensors[name] = p.data.clone()
    folder.mkdir(exist_ok=True)
    save_file({name: t.contiguous() for name, t in tensors.items()}, folder / "model.safetensors")
    given = {key: value for key, value in config.to_dict().items() if key != "dtype"}
    given["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (folder / "config.json").write_text(json.dumps(given, default=str))
    return model


@pytest.mark.parametrize("width", [128, 96])  # 96 gates fill a tile and a half: zeros fill the other half
def test_gpt_oss_is_what_transformers_computes(width: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, prompt = gpt_oss(tmp_path, width), list(range(3, 24))
    decoder = Decoder.from_pretrained(tmp_path, device="cpu", dtype=torch.float32, **SIZES)
    tokens, found = logits(decoder, monkeypatch)
    assert len({*tokens[0]}) > 2, "a model that repeats itself would hide errors"
    gate_up = decoder._w.layers[0].mlp.gate_up  # type: ignore[union-attr]
    assert isinstance(gate_up, QuantizedStack) and gate_up.shape == (4, 256, 64)
    own = decoder.generate([prompt], max_new_tokens=12).tokens[0]
    with torch.no_grad():
        exact = model(torch.tensor([prompt + own])).logits[0, len(prompt) - 1 : -1]
    assert own == exact.argmax(-1).tolist()
    found = []
    take = decoder._choices.take
    monkeypatch.setattr(decoder._choices, "take", lambda t, *r, **i: (found.append(t.clone()), take(t, *r, **i))[1])
    decoder.generate([prompt], max_new_tokens=12)
    torch.testing.assert_close(torch.cat(found)[:12, : exact.shape[1]], exact, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("edited", "said"),
    [
        (lambda t: t.pop("model.layers.1.mlp.experts.down_proj_bias"), "has blocks, scales, and MXFP4 is"),
        (lambda t: t.pop("model.layers.1.mlp.experts.down_proj_blocks"), "has them otherwise"),
        (lambda t: t.update({"model.layers.0.self_attn.other": torch.zeros(3)}), "of no module of a gpt_oss"),
        (lambda t: t.pop("model.layers.0.self_attn.sinks"), "lacks model.layers.0.self_attn.weight"),
        (
            lambda t: t.update(
                {"model.layers.0.mlp.experts.gate_up_proj_scales": torch.zeros(4, 3, dtype=torch.uint8)}
            ),
            "config.json asks for",
        ),
    ],
)
def test_tensors_that_are_not_gpt_oss_s_are_refused(edited: Any, said: str, tmp_path: Path) -> None:
    gpt_oss(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    edited(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(UnsupportedProblem, match=said):
        load(tmp_path, device="cpu")


def quantized(name: str, folder: Path, model: Any) -> Path:
    """A checkpoint of ``model`` with experts quantized one by one, and itself given what those mean."""
    torch.manual_seed(7)
    make, config = FORMATS[name]
    scheme = quant.read_config(config)
    tensors = load_file(saved(model, folder) / "model.safetensors")
    for number, layer in enumerate(model.model.layers):
        if not hasattr(layer.mlp, "experts"):
            continue
        experts = layer.mlp.experts
        for e in range(experts.gate_up_proj.shape[0]):
            gate, up = experts.gate_up_proj.data[e].chunk(2)
            for kind, place in (("gate_proj", gate), ("up_proj", up), ("down_proj", experts.down_proj.data[e])):
                path = f"model.layers.{number}.mlp.experts.{e}.{kind}"
                held = make(*place.shape)
                held.pop("bias", None)
                if "g_idx" in held:  # without act-order
                    held["g_idx"] = torch.arange(place.shape[1], dtype=torch.int32) // 32
                place.copy_(quant.read(held, scheme, dtype=model.dtype).dequantize())
                del tensors[f"{path}.weight"]
                tensors |= {f"{path}.{suffix}": t for suffix, t in held.items()}
    store(folder, tensors, config)
    return folder


@pytest.mark.parametrize(
    ("family", "name"),
    [("qwen3-moe", name) for name in FORMATS if name != "gptq-orders"]
    + [("glm4-moe", "fp8"), ("glm4-moe", "compressed-tensors-fp8"), ("glm4-moe", "awq")],
)
def test_a_decoder_multiplies_by_what_the_format_defines(
    family: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny.model(family, hidden_size=128, moe_intermediate_size=128)
    quantized(name, tmp_path, model)
    ours = Decoder.from_pretrained(tmp_path, **SIZES)
    mlp: Any = getattr(ours._w.layers[1].mlp, "routed", ours._w.layers[1].mlp)
    assert isinstance(mlp.gate_up, QuantizedStack) and mlp.gate_up.shape[1:] == (256, 128)
    assert torch.equal(mlp.down.dequantize(), model.model.layers[1].mlp.experts.down_proj)
    assert_close(model, ours, monkeypatch)


@pytest.mark.parametrize("family", ["qwen3-moe", "glm4-moe"])
def test_experts_in_fp8_that_transformers_has_loaded(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of Qwen3-30B-A3B-FP8: packed where they are, and the same as decoded ones."""
    fp8 = pytest.importorskip("transformers.integrations.finegrained_fp8")
    model = tiny.model(family, torch.bfloat16, hidden_size=128, moe_intermediate_size=128)
    decoded = copy.deepcopy(model)
    for layer, other in zip(model.model.layers, decoded.model.layers, strict=True):
        if not hasattr(layer.mlp, "experts"):
            continue
        held = fp8.FP8Experts(model.config, block_size=(128, 128))
        for name in ("gate_up_proj", "down_proj"):
            dense = getattr(other.mlp.experts, name).data
            for e, w in enumerate(dense):
                weight = quant.quantize(w, "fp8_block")
                codes = quant.unpack(weight.packed, "e4m3", *w.shape)
                getattr(held, name).data[e] = codes.view(torch.float8_e4m3fn)
                getattr(held, f"{name}_scale_inv").data[e] = weight.scales.t()
                w.copy_(weight.dequantize())
        layer.mlp.experts = held
    decoder = Decoder.from_transformers(model, **SIZES)
    mlp: Any = getattr(decoder._w.layers[1].mlp, "routed", decoder._w.layers[1].mlp)
    assert isinstance(mlp.gate_up, QuantizedStack) and mlp.gate_up.weight.scale_rows == 128
    assert torch.equal(mlp.down.dequantize(), decoded.model.layers[1].mlp.experts.down_proj)
    tokens, found = logits(decoder, monkeypatch)
    expected = logits(Decoder.from_transformers(decoded, **SIZES), monkeypatch)
    assert tokens[0][:4] == expected[0][0][:4]
    torch.testing.assert_close(found[0], expected[1][0], rtol=0.05, atol=0.05)
    model.model.layers[1].mlp.experts.limit = 7.0
    with pytest.raises(UnsupportedProblem, match="clamp theirs: load the checkpoint itself"):
        Decoder.from_transformers(model, **SIZES)


@pytest.mark.gpu
@pytest.mark.parametrize("width", [128, 96])
def test_gpt_oss_on_a_gpu(width: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first logits, before rounding sends a token elsewhere; steps are graphs, and the same each time."""
    gpt_oss(tmp_path, width)
    exact = logits(Decoder.from_pretrained(tmp_path, device="cpu", dtype=torch.float32, **SIZES), monkeypatch)[1]
    decoder = Decoder.from_pretrained(tmp_path, dtype=torch.bfloat16, **SIZES)
    tokens, found = logits(decoder, monkeypatch)
    error = (found[0].cpu().float() - exact[0]).square().mean().sqrt() / exact[0].square().mean().sqrt()
    assert error.item() < 0.1
    assert decoder.generate(list(prompts(21, 3)), max_new_tokens=12).tokens == tokens
