"""Checkpoints as the libraries that wrote them, and vLLM, read them: odd configs, names and leftovers."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from cutekernels import quant
from cutekernels.errors import UnsupportedProblem
from cutekernels.models import Decoder, load
from cutekernels.models.loaded import Apart, LoadedModel
from cutekernels.quant import QuantizedWeight
from tests.integrations import tiny
from tests.models import test_load_experts as of_experts
from tests.models.test_load import SIZES, edit, logits, one_thread, store
from tests.models.test_load_quantized import Tensors, awq, compressed, fp8, fp8_rows, gptq, llama, small, words

__all__ = ["one_thread"]
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")
Q, UP = "model.layers.0.self_attn.q_proj", "model.layers.0.mlp.up_proj"
CHANNEL = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}


def group(targets: list[str], form: str = "pack-quantized", **weights: Any) -> dict[str, Any]:
    told = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True} | weights
    return {"targets": targets, "format": form, "weights": told, "input_activations": None}


def compressed_config(*groups: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors", "quantization_status": "compressed", "format": "mixed-precision",
        "ignore": ["lm_head"], "config_groups": {f"group_{i}": each for i, each in enumerate(groups)},
    } | more  # fmt: skip


def asymmetric(n: int, k: int) -> Tensors:
    return compressed(n, k) | {"weight_zero_point": words(n // 8, k // 32)}


def group64(n: int, k: int) -> Tensors:
    return compressed(n, k) | {"weight_scale": small(n, k // 64, dtype=torch.bfloat16)}


def int8(n: int, k: int) -> Tensors:
    return {
        "weight_packed": words(n, k // 4), "weight_scale": small(n, 1, dtype=torch.bfloat16),
        "weight_shape": torch.tensor([n, k]),
    }  # fmt: skip


def auto_fp8(n: int, k: int) -> Tensors:
    """Static: a scale of all of the weight, and one of its activations."""
    scale = torch.rand(()) * 0.02 + 0.01
    return {"weight": torch.randn(n, k).to(torch.float8_e4m3fn), "weight_scale": scale, "input_scale": torch.ones(())}


def straight(n: int, k: int) -> Tensors:
    return gptq(n, k) | {"g_idx": torch.arange(k, dtype=torch.int32) // 32}


def no_index(n: int, k: int) -> Tensors:
    return {name: t for name, t in straight(n, k).items() if name not in ("g_idx", "bias")}


def of_64(make: Callable[[int, int], Tensors]) -> Callable[[int, int], Tensors]:
    """GPTQ or AWQ in groups of 64."""

    def made(n: int, k: int) -> Tensors:
        tensors = {name: t for name, t in make(n, k).items() if name != "g_idx"}
        return tensors | {name: tensors[name][::2].contiguous() for name in ("qzeros", "scales")}

    return made


def checkpoint(
    folder: Path, config: dict[str, Any], made: dict[str, Callable[[int, int], Tensors]], but: tuple[str, ...] = ()
) -> Any:
    """A llama whose projections are of the first of ``made`` whose pattern is in their name; given what those mean."""
    torch.manual_seed(7)
    model = llama()
    model.save_pretrained(folder)
    tensors, scheme = load_file(folder / "model.safetensors"), quant.read_config(config)
    for path, linear in model.named_modules():
        if type(linear) is not torch.nn.Linear or path in ("lm_head", *but):
            continue
        make = next(make for pattern, make in made.items() if re.search(pattern, path))
        held = make(*linear.weight.shape)
        weight = quant.read(held, scheme, dtype=model.dtype, module=path)
        linear.weight.data = weight.dequantize()
        del tensors[f"{path}.weight"]
        tensors |= {f"{path}.{suffix}": t for suffix, t in held.items()}
    store(folder, tensors, config)
    return model


def change(folder: Path, changed: Callable[[Tensors], Any]) -> None:
    held = load_file(folder / "model.safetensors")
    changed(held)
    save_file({key: t.contiguous() for key, t in held.items()}, folder / "model.safetensors")


def same(folder: Path, model: Any) -> LoadedModel:
    """The model that ``load`` makes of a folder, whose projections hold the weights of ``model`` in every bit."""
    found = load(folder, dtype=model.dtype)
    for path, part in found.parts.items():
        if path.endswith(("proj", "lm_head")):
            front, module = path.removesuffix(part.path), found.get_submodule(path)
            parts = [m.weight for m in (module.parts if isinstance(module, Apart) else [module])]
            held = torch.cat([w if isinstance(w, torch.Tensor) else w.dequantize() for w in parts])
            expected = torch.cat([model.get_submodule(front + name).weight for name in part.stored])
            assert torch.equal(held, expected), path
    return found


# ---- what is read ---------------------------------------------------------------------------------------

AUTO_ROUND = {"quant_method": "auto-round", "bits": 4, "group_size": 32, "sym": True, "data_type": "int"}
READ: dict[str, tuple[dict[str, Any], dict[str, Callable[[int, int], Tensors]], dict[str, tuple[str, int]]]] = {
    "a class before a regular expression": (
        compressed_config(
            group(["Linear"]), group(["re:.*down_proj"], num_bits=8, strategy="channel", group_size=None)
        ),
        {"down": int8, "": compressed},
        {"0.mlp.down_proj": ("int8", 0), "0.self_attn.o_proj": ("int4", 32)},
    ),
    "a regular expression before a name": (
        compressed_config(
            group(["Linear"]), group([r"re:.*_proj$"], group_size=64), group(["model.layers.1.mlp.down_proj"]),
        ),
        {"1.mlp.down": compressed, "": group64},
        {"0.mlp.down_proj": ("int4", 64), "1.mlp.down_proj": ("int4", 32), "0.self_attn.o_proj": ("int4", 0)},
    ),
    "FP8 beside int4, not symmetric": (
        compressed_config(
            group(["Linear"], symmetric=False),
            {"targets": ["re:.*self_attn.*"], "format": "float-quantized", "weights": CHANNEL},
        ),
        {"self_attn": fp8_rows, "": asymmetric},
        {"0.self_attn.o_proj": ("e4m3", 0), "0.mlp.down_proj": ("int4", 32)},
    ),
    "a group that leaves weights as they are": (
        compressed_config(
            group(["Linear"]), {"targets": ["re:.*self_attn$"], "weights": None, "input_activations": {}}
        ),
        {"": compressed},
        {"0.self_attn.o_proj": ("int4", 32)},
    ),
    "AutoFP8, static": (
        {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]},
        {"": auto_fp8},
        {"0.self_attn.o_proj": ("e4m3", 0)},
    ),
    "AutoFP8, dynamic": (
        {"quant_method": "fp8", "activation_scheme": "dynamic", "kv_cache_scheme": "static"},
        {"": lambda n, k: {name: t for name, t in auto_fp8(n, k).items() if name != "input_scale"}},
        {"0.self_attn.o_proj": ("e4m3", 0)},
    ),
    "AutoAWQ's own names": (
        {"quant_method": "awq", "w_bit": 4, "q_group_size": 32, "zero_point": True, "version": "GEMM"},
        {"": awq},
        {"0.self_attn.o_proj": ("int4", 32)},
    ),
    "zeros for g_idx": (
        {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False},
        {"": lambda n, k: straight(n, k) | {"g_idx": torch.zeros(k, dtype=torch.int32)}},
        {"0.self_attn.o_proj": ("int4", 32)},
    ),
    "AutoRound as GPTQ": (AUTO_ROUND, {"": no_index}, {"0.self_attn.o_proj": ("int4", 32)}),
    "AutoRound as AWQ, by its older name": (
        AUTO_ROUND | {"quant_method": "intel/auto-round", "sym": False, "packing_format": "auto_round:auto_awq"},
        {"": awq},
        {"0.self_attn.o_proj": ("int4", 32)},
    ),
    "AutoRound with layers of their own": (
        AUTO_ROUND | {
            "packing_format": "auto_round:auto_gptq", "block_name_to_quantize": "model.layers",
            "extra_config": {
                "model.layers.0.mlp.down_proj": {"bits": 4, "group_size": 64}, Q: {"bits": 16},
                r".*\.1\.mlp\.up_proj$": {"group_size": 64},
            },
        },
        {r"0.mlp.down|1.mlp.up": of_64(no_index), "": no_index},
        {"0.mlp.down_proj": ("int4", 64), "1.mlp.down_proj": ("int4", 32)},
    ),
    "gptqmodel's dynamic": (
        {
            "quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False,
            "dynamic": {r"-:.*0\.self_attn\.q_proj": {}, r"+:.*\.down_proj": {"bits": 4, "group_size": 64}},
        },
        {"down": of_64(no_index), "": straight},
        {"0.mlp.down_proj": ("int4", 64), "0.self_attn.o_proj": ("int4", 32)},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", READ)
def test_checkpoints_are_read_as_their_libraries_read_them(name: str, tmp_path: Path) -> None:
    config, made, kinds = READ[name]
    plain = (Q,) if Q in str(config) or "0\\\\.self_attn\\\\.q_proj" in str(config) else ()
    model = same(tmp_path, checkpoint(tmp_path, config, made, plain)).model
    for path, kind in kinds.items():
        weight = model.get_submodule(f"layers.{path}").weight
        assert (weight.code, weight.group) == kind, path


def rounded(folder: Path, config: dict[str, Any], tensors: Tensors) -> Any:
    """A plain llama with further tensors and a quantization_config."""
    model = llama()
    model.save_pretrained(folder)
    change(folder, lambda t: t.update(tensors))
    edit(folder / "config.json", lambda c: c.update(quantization_config=config))
    return model


CACHE = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
PLAIN: dict[str, tuple[dict[str, Any], Tensors]] = {
    "a cache's scales alone": (
        compressed_config(kv_cache_scheme=CACHE, format="dense"),
        {f"model.layers.{i}.self_attn.{kind}_scale": torch.ones(1).bfloat16() for i in (0, 1) for kind in "kv"},
    ),
    "groups of attention alone": (
        compressed_config({"targets": ["LlamaAttention"], "weights": None, "input_activations": CACHE}, format=None),
        {f"model.layers.0.self_attn.{kind}_scale": torch.ones(4, 1, 1) for kind in "qkv"},
    ),
    "activations alone": (
        compressed_config({"targets": ["Linear"], "weights": None, "input_activations": CACHE}),
        {f"{Q}.input_scale": torch.ones(1), f"{Q}.input_zero_point": torch.zeros(1, dtype=torch.int8)},
    ),
    "vLLM's names, zero, NaN and of one side": (
        compressed_config(kv_cache_scheme=CACHE),
        {
            "model.layers.0.self_attn.k_proj.output_scale": torch.zeros(()),
            "model.layers.0.self_attn.v_scale": torch.tensor(float("nan")),
            "model.layers.1.self_attn.attn.k_scale": torch.ones(()),
            "model.layers.1.self_attn.prob_output_scale": torch.ones(()),
        },
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PLAIN)
def test_models_of_16_bits_with_a_quantization_config_are_loaded(name: str, tmp_path: Path) -> None:
    config, tensors = PLAIN[name]
    scheme = quant.read_config(config)
    assert (scheme.code, scheme.bits, quant.why_not(scheme), scheme.of(UP)) == ("", 16, None, None)
    with pytest.raises(UnsupportedProblem, match="says that weights are plain, and this one has a weight in float32"):
        quant.read({"weight": torch.ones(8, 8)}, scheme)
    same(tmp_path, rounded(tmp_path, config, tensors))


@pytest.mark.parametrize("form", ["pack-quantized", "float-quantized"])
def test_a_model_that_was_saved_after_its_first_call(form: str, tmp_path: Path) -> None:
    """compressed-tensors 0.20: plain weights, beside them all but the codes, and the groups as they were."""
    left = {"weight_scale": small(64, 2), "weight_shape": torch.tensor([64, 64])} if form[0] == "p" else {}
    left |= {"weight_scale": small(64, 1), "input_zero_point": torch.zeros(1)} if not left else {}
    which = group(["Linear"]) if form[0] == "p" else {"targets": ["Linear"], "weights": CHANNEL}
    config = compressed_config(which | {"format": form}, format=form, quantization_status="decompressed")
    tensors = {f"model.layers.{i}.self_attn.o_proj.{name}": t.clone() for i in (0, 1) for name, t in left.items()}
    same(tmp_path, rounded(tmp_path, config, tensors))


def indexed(folder: Path, surplus: Callable[[Tensors], Tensors]) -> None:
    """The folder's tensors in a first shard, which the index names; ``surplus`` of them in a second one."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    own, other = {**tensors}, surplus(tensors)
    norm = own.pop("model.norm.weight")
    save_file(own, folder / "a.safetensors")
    save_file({"model.norm.weight": norm} | {k: t.contiguous() for k, t in other.items()}, folder / "b.safetensors")
    places = dict.fromkeys(own, "a.safetensors") | {"model.norm.weight": "b.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))


@pytest.mark.parametrize(
    "surplus",
    [
        lambda t: {"model.embed_tokens.weight": t["model.embed_tokens.weight"] * 0},  # the index names the other one
        lambda t: {"model.layers.7.mlp.up_proj.weight": torch.ones(2), "visual.proj": torch.ones(3)},
    ],
)
def test_tensors_that_the_index_does_not_name_there_are_no_error(
    surplus: Callable[[Tensors], Tensors], tmp_path: Path
) -> None:
    model = llama()
    model.save_pretrained(tmp_path)
    indexed(tmp_path, surplus)
    same(tmp_path, model)


def test_tensors_that_no_index_names_are_taken_where_they_are_needed(tmp_path: Path) -> None:
    """As transformers and vLLM, which read all of each shard; two of a name leave nothing to choose by."""
    model = llama()
    model.save_pretrained(tmp_path)
    indexed(tmp_path, lambda t: {})
    path = tmp_path / "model.safetensors.index.json"
    edit(path, lambda c: c["weight_map"].pop(f"{UP}.weight"))
    same(tmp_path, model)
    held = load_file(tmp_path / "b.safetensors")
    save_file(held | {f"{UP}.weight": torch.ones(128, 64)}, tmp_path / "b.safetensors")
    with pytest.raises(UnsupportedProblem, match=f"lacks {UP}.weight"):
        load(tmp_path)


# ---- experts --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["awq", "compressed-tensors", "compressed-tensors-fp8", "fp8", "cutekernels"])
@pytest.mark.parametrize("width", [96, 192])
def test_experts_whose_width_fills_no_tile(
    name: str, width: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """96 rows are a tile and a half, 192 a block of 128 and a half: zeros fill the rest."""
    if name == "fp8" and width == 96:
        width = 224
    model = tiny.model("qwen3-moe", hidden_size=128, moe_intermediate_size=width)
    of_experts.quantized(name, tmp_path, model)
    tokens, expected = logits(Decoder.from_transformers(model, **SIZES), monkeypatch)
    decoder = Decoder.from_pretrained(tmp_path, **SIZES)
    found = logits(decoder, monkeypatch)
    assert found[0] == tokens
    torch.testing.assert_close(found[1], expected)
    mlp: Any = decoder._w.layers[1].mlp
    unit = 128 if name == "fp8" else 64
    wide = -(-width // unit) * unit
    assert mlp.gate_up.shape == (4, 2 * wide, 128) and mlp.down.shape == (4, 128, wide)
    gate_up = mlp.gate_up.dequantize().unflatten(1, (2, wide))
    assert torch.equal(gate_up[:, :, :width].flatten(1, 2), model.model.layers[1].mlp.experts.gate_up_proj)
    assert not gate_up[:, :, width:].any()
    assert torch.equal(mlp.down.dequantize()[..., :width], model.model.layers[1].mlp.experts.down_proj)


def expert(folder: Path, which: int, changed: Callable[[int, int], Tensors]) -> None:
    path = f"model.layers.1.mlp.experts.{which}.up_proj."

    def swap(tensors: Tensors) -> None:
        for name in [name for name in tensors if name.startswith(path)]:
            del tensors[name]
        tensors |= {path + name: t for name, t in changed(128, 128).items()}

    change(folder, swap)


def test_groups_of_experts_by_their_names(tmp_path: Path) -> None:
    """Experts in int4 beside attention in FP8, of a class that stands first."""
    model = tiny.model("qwen3-moe", hidden_size=128, moe_intermediate_size=128)
    of_experts.quantized("compressed-tensors", tmp_path, model)
    config = compressed_config(
        {"targets": ["Linear"], "format": "float-quantized", "weights": CHANNEL}, group(["re:.*experts.*"])
    )
    edit(tmp_path / "config.json", lambda c: c.update(quantization_config=config))
    out, path = model.model.layers[0].self_attn.o_proj, "model.layers.0.self_attn.o_proj"
    held = fp8_rows(*out.weight.shape)
    out.weight.data = quant.read(held, config, dtype=model.dtype, module=path).dequantize()
    change(tmp_path, lambda t: (t.pop(f"{path}.weight"), t.update({f"{path}.{k}": v for k, v in held.items()})))
    found: Any = load(tmp_path)
    assert found.model.layers[0].self_attn.o_proj.weight.code == "e4m3"
    assert torch.equal(found.model.layers[0].self_attn.o_proj.weight.dequantize(), out.weight)
    assert found.model.layers[1].mlp.experts.down_proj.weight.code == "int4"
    expert(tmp_path, 2, int8)
    with pytest.raises(UnsupportedProblem, match=r"experts\.2\.up_proj: weight_packed of 128 x 32 words holds"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("odd", "said"),
    [
        (lambda n, k: {"weight": torch.randn(n, k)}, "2.up_proj is in 16 bits, and model.layers.1.mlp.experts.0.gate"),
        (group64, r"2.up_proj: compressed-tensors's weight_scale has shape \(128, 4\)"),
    ],
)
def test_one_odd_expert_is_named(odd: Callable[[int, int], Tensors], said: str, tmp_path: Path) -> None:
    model = tiny.model("qwen3-moe", hidden_size=128, moe_intermediate_size=128)
    of_experts.quantized("compressed-tensors", tmp_path, model)
    expert(tmp_path, 2, odd)
    with pytest.raises(UnsupportedProblem, match=r"^model\.layers\.1\.mlp\.experts\." + said):
        load(tmp_path)


def test_experts_with_an_order_each_are_refused_by_name(tmp_path: Path) -> None:
    model = tiny.model("qwen3-moe", hidden_size=128, moe_intermediate_size=128)
    of_experts.quantized("gptq", tmp_path, model)
    path = "model.layers.0.mlp.experts.1.up_proj.g_idx"
    change(tmp_path, lambda t: t.update({path: t[path].flip(0)}))
    with pytest.raises(UnsupportedProblem, match=r"0\.mlp\.experts\.1\.up_proj orders its columns .*desc_act=false"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("name", "hidden", "said"),
    [
        ("awq", 96, r"0\.down_proj has 96 rows, and quantized experts have multiples of 64: take"),
        ("fp8", 192, r"0\.down_proj has 192 rows, .* multiples of 128 in blocks of 128 x 128: .*a scale for each row"),
    ],
)
def test_experts_of_a_model_that_fills_no_tile_are_refused(name: str, hidden: int, said: str, tmp_path: Path) -> None:
    model = tiny.model("qwen3-moe", hidden_size=hidden, moe_intermediate_size=128)
    with pytest.raises(UnsupportedProblem, match=r"^model\.layers\.0\.mlp\.experts\." + said):
        load(of_experts.quantized(name, tmp_path, model))


# ---- what is refused, by its name -----------------------------------------------------------------------

FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
REFUSED: dict[str, tuple[dict[str, Any], Callable[[int, int], Tensors], Callable[[Tensors], Any], str]] = {
    "FP8 without its scale": (
        FP8, fp8, lambda t: t.pop(f"{Q}.weight_scale_inv"),
        f"^{Q} has no weight_scale_inv or weight_scale, and has weight in torch.float8_e4m3fn: download",
    ),
    "AutoFP8 without its scale": (
        {"quant_method": "fp8", "activation_scheme": "static"}, auto_fp8, lambda t: t.pop(f"{Q}.weight_scale"),
        f"^{Q} has no weight_scale or weight_scale_inv, and has weight in torch.float8_e4m3fn: download",
    ),
    "FP8 with both scales": (
        FP8, fp8, lambda t: t.update({f"{Q}.weight_scale": torch.ones(())}), f"^{Q}: .*FP8 has no tensor weight_scale",
    ),
    "packed without codes": (
        compressed_config(group(["Linear"])), compressed, lambda t: t.pop(f"{Q}.weight_packed"),
        f"^{Q} has no weight_packed, and has weight_scale, weight_shape",
    ),
    "GPTQ without codes": (
        {"quant_method": "gptq", "bits": 4, "group_size": 32}, no_index, lambda t: t.pop(f"{Q}.qweight"),
        f"^{Q} has no qweight, and has qzeros, scales",
    ),
    "zeros of GPTQ alone, and a bias": (
        {"quant_method": "gptq", "bits": 4, "group_size": 32},
        straight,
        lambda t: [t.pop(f"{Q}.{name}") for name in ("qweight", "scales", "g_idx")],
        f"^{Q} has no qweight, and has qzeros: download",
    ),
    "FP8 in blocks of 192 rows": (
        FP8 | {"weight_block_size": [192, 128]}, fp8, lambda t: None,
        f"^{Q}: blocks of scales have multiples of 128 rows and columns, not 192 x 128; .*fp8_block",
    ),
    "a tensor that no layer has": (
        FP8, fp8, lambda t: t.update({f"{Q}.input_shift": torch.ones(())}),
        f"^{Q}: a layer of FP8 has no tensor input_shift, and this one has: pass",
    ),
    "int4 in a config of a cache alone": (
        compressed_config(group(["Linear"])), compressed, lambda t: None, f"^{Q} is quantized against its quant",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_a_layer_that_lacks_a_tensor_is_named_with_it(name: str, tmp_path: Path) -> None:
    config, make, changed, said = REFUSED[name]
    checkpoint(tmp_path, FP8 if "blocks" in name else config, {"": make})
    change(tmp_path, changed)
    if name.endswith("cache alone"):
        config = compressed_config(kv_cache_scheme=CACHE)
    edit(tmp_path / "config.json", lambda c: c.update(quantization_config=config))
    with pytest.raises(UnsupportedProblem, match=said) as error:
        load(tmp_path)
    assert "\n" not in str(error.value)


def test_what_is_read_is_written_again() -> None:
    for config, tensors in (
        ({"quant_method": "fp8", "activation_scheme": "static"}, auto_fp8(64, 128)),
        ({"quant_method": "gptq", "bits": 4, "group_size": 32}, straight(64, 128) | {"g_idx": torch.zeros(128).int()}),
    ):
        tensors.pop("bias", None)
        weight = quant.read(tensors, config)
        found = weight.tensors()
        assert found.keys() == tensors.keys() and all(torch.equal(found[name], t) for name, t in tensors.items())
        again: QuantizedWeight = quant.read(found, quant.write_config(weight))
        assert torch.equal(again.dequantize(), weight.dequantize())
