"""quantization_config and layers: what is read, which modules are quantized, and one sentence for everything else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from cutekernels import quant
from cutekernels.errors import UnsupportedProblem
from cutekernels.quant import Scheme
from tests.quant import golden

AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": True, "sym": False}
FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}


def group(targets: list[str], form: str | None = None, **weights: Any) -> dict[str, Any]:
    return {"targets": targets, "format": form, "weights": {"symmetric": True, **weights}}


W4 = group(["Linear"], num_bits=4, type="int", strategy="group", group_size=32)
PACKED = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "ignore": ["lm_head", "re:.*mlp[.]gate$"],
    "config_groups": {"group_0": W4},
}
MIXED = {
    "quant_method": "compressed-tensors",
    "format": "mixed-precision",
    "ignore": ["lm_head"],
    "config_groups": {
        "a": group(["re:.*mlp.*"], "pack-quantized", num_bits=4, type="int", strategy="group", group_size=32),
        "b": group(["re:.*self_attn.*"], "float-quantized", num_bits=8, type="float", strategy="channel"),
    },
}
AUTO_ROUND = {"quant_method": "auto-round", "bits": 4, "group_size": 32, "sym": True}
LAYER = "model.layers.11.self_attn.q_proj"


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (AWQ, ("awq", "int4", 4, 32, None, False)),
        (GPTQ, ("gptq", "int4", 4, 32, None, False)),
        (FP8, ("fp8", "e4m3", 8, 128, (128, 128), True)),
        (FP8 | {"weight_block_size": None}, ("fp8", "e4m3", 8, -1, None, True)),
        (PACKED, ("compressed-tensors", "int4", 4, 32, None, True)),
        ({"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, ("bitsandbytes", "nf4", 4, 64, None, True)),
        (
            {"quant_method": "torchao", "quant_type": {"default": {"_type": "Float8WeightOnlyConfig", "_data": {}}}},
            ("torchao", "e4m3", 8, -1, None, False),
        ),
        ({"quant_method": "cutekernels", "scheme": "fp8_block"}, ("cutekernels", "e4m3", 8, 128, (128, 128), True)),
    ],
)
def test_what_a_config_says(config: dict[str, Any], expected: tuple[Any, ...]) -> None:
    scheme = quant.read_config(config)
    assert (scheme.format, scheme.code, scheme.bits, scheme.group, scheme.block, scheme.symmetric) == expected
    assert quant.why_not(scheme, (8, 0)) is None
    assert quant.read_config(config) == scheme


def test_transformers_objects_are_taken() -> None:
    from transformers import AwqConfig, BitsAndBytesConfig, FineGrainedFP8Config

    assert quant.read_config(AwqConfig(bits=4, group_size=64)).group == 64
    assert quant.read_config(FineGrainedFP8Config()).block == (128, 128)
    assert quant.read_config(AWQ | {"q_group_size": 64, "group_size": 32}).group == 64, "as vLLM has it"
    assert quant.read_config(BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")).code == "nf4"


def test_versions_of_gptq() -> None:
    assert quant.read_config(GPTQ).version == 1
    assert quant.read_config(GPTQ | {"checkpoint_format": "gptq"}).version == 1
    assert quant.read_config(GPTQ | {"checkpoint_format": "gptq_v2"}).version == 2
    assert quant.read_config(GPTQ | {"format": "gptq_v2"}).version == 2


@pytest.mark.parametrize(
    ("config", "module", "quantized"),
    [
        (AWQ, LAYER, True),
        (AWQ, "lm_head", False),
        (AWQ | {"modules_to_not_convert": ["self_attn"]}, LAYER, True),  # no whole part from the start, no end
        (AWQ | {"modules_to_not_convert": ["q_proj"]}, LAYER, False),
        (AWQ | {"modules_to_not_convert": ["model.layers.1"]}, LAYER, True),
        (AWQ | {"modules_to_not_convert": ["model.layers.11"]}, LAYER, False),
        (AWQ | {"modules_to_not_convert": ["model.layers.*.self_attn"]}, LAYER, False),
        (FP8, "lm_head", False),
        (FP8 | {"modules_to_not_convert": ["model.layers.0.mlp.gate"]}, "lm_head", True),
        (FP8 | {"modules_to_not_convert": ["model.layers.0.mlp.gate"]}, "model.layers.0.mlp.gate", False),
        (FP8 | {"modules_to_not_convert": ["model.layers.0.mlp.gate"]}, "model.layers.0.mlp.gate_proj", True),
        (FP8 | {"ignored_layers": ["lm_head"]}, "lm_head", False),
        (GPTQ, "lm_head", False),
        (GPTQ | {"lm_head": True}, "lm_head", True),
        (GPTQ | {"dynamic": {r"-:.*\.q_proj": {}}}, LAYER, False),
        (GPTQ | {"modules_in_block_to_quantize": [["self_attn.k_proj"]]}, LAYER, False),
        (GPTQ | {"modules_in_block_to_quantize": [["self_attn.q_proj"], ["mlp.up_proj"]]}, LAYER, True),
        (PACKED, LAYER, True),
        (PACKED, "lm_head", False),
        (PACKED, "model.layers.3.mlp.gate", False),
        (PACKED, "model.layers.3.mlp.gate_proj", True),
        (AUTO_ROUND, LAYER, True),
        (AUTO_ROUND, "lm_head", False),
        (AUTO_ROUND | {"extra_config": {LAYER: {"bits": 16}}}, LAYER, False),
        (AUTO_ROUND | {"extra_config": {r".*\.q_proj": {"bits": 16}}}, LAYER, False),
        (AUTO_ROUND | {"extra_config": {"lm_head": {"bits": 4}}}, "lm_head", True),
        (AUTO_ROUND | {"block_name_to_quantize": "model.layers, model.visual"}, LAYER, True),
        (AUTO_ROUND | {"to_quant_block_names": [["model.visual.blocks"]]}, LAYER, False),
        (MIXED, LAYER, True),
        (MIXED, "model.embed_tokens", False),
        ({"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "llm_int8_skip_modules": ["q_proj"]}, LAYER, False),
    ],
)
def test_which_modules_are_quantized(config: dict[str, Any], module: str, quantized: bool) -> None:
    assert quant.read_config(config).quantizes(module) == quantized


def test_names_match_as_in_transformers() -> None:
    from transformers.quantizers.quantizers_utils import should_convert_module

    patterns = ["lm_head", "model.layers.1", "mlp.gate", "model.layers.*.mlp.down", "fc1", "a|b"]
    modules = [f"model.layers.{i}.mlp.{name}" for i in (1, 11) for name in ("gate", "gate_proj", "down", "fc1", "xfc1")]
    for pattern in patterns:
        scheme = quant.read_config(FP8 | {"modules_to_not_convert": [pattern]})
        for module in [*modules, "lm_head", "a", "b", "ab", "a.b", "model.a"]:
            assert scheme.quantizes(module) == should_convert_module(module, [pattern]), (pattern, module)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({}, "quant_method is one of awq, gptq"),
        ({"quant_method": "awk"}, "Did you mean 'awq'"),
        ({"quant_method": "modelopt"}, "quant_algo of modelopt is NVFP4 or W4A16_NVFP4, not None"),
        ({"quant_method": "gguf"}, "take the safetensors checkpoint"),
        (AWQ | {"bits": 8}, "bits of awq is 4, not 8"),
        (AWQ | {"version": "gemv"}, "version of awq is gemm, not 'gemv'"),
        (AWQ | {"group_size": "many"}, "an entry of another type"),
        (AWQ | {"modules_to_not_convert": ["("]}, "one is not \\("),
        (GPTQ | {"bits": 3}, "bits of gptq is 4, not 3"),
        (GPTQ | {"checkpoint_format": "marlin"}, "checkpoint_format of gptq is gptq or gptq_v2"),
        (GPTQ | {"is_marlin_format": True}, "not in Marlin's"),
        (
            GPTQ | {"dynamic": {"+:.*": {"bits": 8}}},
            "bits of .* of gptq is 4, not 8; quantize all layers with four bits",
        ),
        (PACKED | {"format": "mxfp4-pack-quantized"}, "format of compressed-tensors is pack-quantized or"),
        (PACKED | {"format": "nvfp4-pack-quantized"}, "quantize with NVFP4A16"),
        (PACKED | {"sparsity_config": {"format": "sparse-24"}}, "has sparsity_config"),
        (PACKED | {"transform_config": {"config_groups": {"a": {}}}}, "has transform_config"),
        (PACKED | {"config_groups": {"a": group(["Linear"], num_bits=3, type="int")}}, "not int of 3"),
        (AWQ | {"w_bit": 8}, "w_bit of awq is 4, not 8"),
        (
            {"quant_method": "auto-round", "bits": 4, "packing_format": "auto_round"},
            "packing_format of auto-round is auto",
        ),
        (
            {"quant_method": "intel/auto-round", "bits": 4, "packing_format": "auto_round:llm_compressor"},
            "of intel/auto-round is auto_round:auto_gptq or auto_round:auto_awq, not .*llm_compressor.; export",
        ),
        ({"quant_method": "auto-round", "bits": 2}, "bits of auto-round is 4, not 2"),
        ({"quant_method": "auto-round", "bits": 4, "data_type": "mx_fp"}, "data_type of auto-round is int"),
        (
            {"quant_method": "auto-round", "bits": 4, "extra_config": {"lm_head": {"bits": 8}}},
            "bits of 'lm_head' of auto-round is 4, not 8",
        ),
        (PACKED | {"config_groups": ["a"]}, "an entry of another type"),
        ({"load_in_8bit": True}, "not in LLM.int8"),
        ({"load_in_4bit": True}, "bnb_4bit_quant_type of bitsandbytes is nf4, not 'fp4'"),
        (
            {"quant_method": "torchao", "quant_type": {"default": {"_type": "Int8WeightOnlyConfig"}}},
            "quant_type of torchao",
        ),
        ({"quant_method": "cutekernels", "scheme": "int2"}, "scheme of cutekernels"),
        ([], "quantization_config is a dict, not list"),
    ],
)
def test_configs_that_are_refused(config: Any, said: str) -> None:
    with pytest.raises(UnsupportedProblem, match=said) as caught:
        quant.read_config(config)
    assert "\n" not in str(caught.value)


def test_layers_are_read_by_config() -> None:
    case = golden.case(16, 128, 32, act_order=True)
    bias = torch.zeros(16)
    layer = golden.gptq(case, 1) | {"bias": bias}
    for config in (GPTQ, quant.read_config(GPTQ)):
        weight = quant.read(layer, config, dtype=torch.bfloat16)
        assert torch.equal(weight.dequantize(), case.values(torch.bfloat16))
    assert torch.equal(quant.read(layer, GPTQ).dequantize(), case.values(torch.float16))
    case = golden.case(16, 128, 32, zeros="v2")
    weight = quant.read(golden.awq(case), AWQ, dtype=torch.bfloat16)
    assert torch.equal(weight.dequantize(), case.values(torch.bfloat16))
    case = golden.case(16, 128, 32, zeros="none")
    weight = quant.read(golden.packed(case, symmetric=True), PACKED, dtype=torch.bfloat16)
    assert torch.equal(weight.dequantize(), case.values(torch.bfloat16))


@pytest.mark.parametrize("named", [True, False])
def test_layers_of_mixed_precision_are_told_by_name_or_tensors(named: bool) -> None:
    case = golden.case(16, 128, 32, zeros="none")
    weight = quant.read(
        golden.packed(case, symmetric=True), MIXED, module="model.layers.0.mlp.up_proj" if named else None
    )
    assert weight.code == "int4"
    assert torch.equal(weight.dequantize(), case.values(torch.float16))
    layer = {"weight": torch.ones(16, 128).to(torch.float8_e4m3fn), "weight_scale": torch.ones(16, 1).bfloat16()}
    weight = quant.read(layer, MIXED, module=LAYER if named else None)
    assert (weight.code, weight.group) == ("e4m3", 0)


def test_a_scheme_says_what_a_file_holds() -> None:
    assert quant.read_config(GPTQ).holds(["qweight", "bias"])
    assert not quant.read_config(GPTQ).holds(["weight", "bias"])
    assert isinstance(quant.read_config(FP8), Scheme)
    with pytest.raises(UnsupportedProblem, match="has a weight in bfloat16; take it as it is"):
        quant.read({"weight": torch.zeros(2, 2).bfloat16(), "weight_scale_inv_": torch.zeros(1)}, FP8)


def layers() -> dict[str, tuple[dict[str, Any], dict[str, Tensor]]]:
    case = golden.case(16, 128, 32, zeros="v2")
    data = torch.ones(130, 256).to(torch.float8_e4m3fn)
    return {
        "awq": (AWQ, golden.awq(case)),
        "gptq": (GPTQ, golden.gptq(golden.case(16, 128, 32), 1)),
        "packed": (PACKED, golden.packed(case, symmetric=False)),
        "asymmetric": (
            PACKED | {"config_groups": {"a": group(["Linear"], **W4["weights"] | {"symmetric": False})}},
            golden.packed(case, symmetric=False),
        ),
        "fp8": (FP8, {"weight": data, "weight_scale_inv": torch.ones(2, 2)}),
        "own": (
            {"quant_method": "cutekernels", "scheme": "int4_g32"},
            quant.quantize(torch.randn(16, 128), "int4_g32", symmetric=False).tensors(),
        ),
    }


def cut(name: str) -> Callable[[dict[str, Tensor]], Any]:
    return lambda t: t.update({name: t[name][:-1].clone()})


def cut_last(name: str) -> Callable[[dict[str, Tensor]], Any]:
    return lambda t: t.update({name: t[name][..., :-1].clone()})


def typed(name: str, dtype: torch.dtype) -> Callable[[dict[str, Tensor]], Any]:
    return lambda t: t.update({name: t[name].to(dtype)})


def filled(name: str, value: float) -> Callable[[dict[str, Tensor]], Any]:
    return lambda t: t[name][-1:].fill_(value)


CORRUPT = [
    ("awq", cut("qweight"), "AWQ's groups of 32 divide K, and qweight has 127 rows"),
    ("awq", cut("qzeros"), "AWQ's qzeros has shape \\(4, 2\\) for K=128, N=16 and groups of 32, not \\(3, 2\\)"),
    ("awq", cut_last("scales"), "AWQ's scales has shape"),
    ("awq", typed("qweight", torch.int64), "AWQ's qweight is int32, not int64"),
    ("awq", typed("scales", torch.float64), "AWQ's scales is float16 or bfloat16 or float32, not float64"),
    ("awq", filled("scales", float("nan")), "NaN or infinite"),
    ("awq", filled("scales", float("inf")), "NaN or infinite"),
    ("awq", lambda t: t.pop("qzeros"), "has qzeros, and this one has qweight, scales"),
    ("awq", lambda t: t.update(g_idx=torch.zeros(1)), "a layer of AWQ has no tensor g_idx"),
    ("awq", lambda t: t.update(qweight=t["qweight"].flatten()), "is a matrix, not of shape"),
    ("gptq", cut("qweight"), "g_idx has shape \\(120,\\) for K=120"),
    ("gptq", cut("g_idx"), "GPTQ's g_idx has shape \\(128,\\)"),
    ("gptq", cut_last("qweight"), "N is a multiple of 8, not 15"),
    ("gptq", cut("scales"), "GPTQ's scales has shape"),
    ("gptq", filled("g_idx", 0), "each group of GPTQ's g_idx has 32 members"),
    ("gptq", filled("g_idx", 99), "each group of GPTQ's g_idx has 32 members"),
    ("gptq", typed("g_idx", torch.float32), "g_idx is int32 or int64, not float32"),
    ("gptq", filled("scales", float("inf")), "NaN or infinite"),
    ("packed", cut("weight_packed"), "weight_shape says \\(16, 128\\)"),
    ("packed", cut_last("weight_packed"), "weight_shape says \\(16, 128\\)"),
    ("packed", cut("weight_shape"), "weight_shape says \\(16,\\)"),
    ("packed", cut_last("weight_scale"), "weight_scale has shape \\(16, 4\\)"),
    ("packed", cut("weight_zero_point"), "weight_zero_point has shape \\(2, 4\\)"),
    ("packed", typed("weight_packed", torch.int64), "weight_packed is int32, not int64"),
    ("packed", filled("weight_scale", float("nan")), "NaN or infinite"),
    ("packed", lambda t: t.pop("weight_shape"), "has weight_shape, and this one has"),
    ("asymmetric", lambda t: t.pop("weight_zero_point"), "has weight_zero_point, and this one has not"),
    ("fp8", cut("weight_scale_inv"), "scales have shape \\(2, 2\\) for a weight of 130 x 256, not \\(1, 2\\)"),
    ("fp8", lambda t: t.update(weight_scale_inv=torch.ones(2)), "FP8's scales have shape"),
    ("fp8", cut_last("weight_scale_inv"), "FP8's scales have shape"),
    ("fp8", typed("weight", torch.float8_e5m2), "weight is float8_e4m3fn, not float8_e5m2"),
    ("fp8", typed("weight_scale_inv", torch.int32), "scales are fp16, bf16 or fp32, not torch.int32"),
    ("fp8", filled("weight_scale_inv", float("nan")), "NaN or infinite"),
    ("fp8", lambda t: t["weight"].view(torch.uint8)[0].fill_(0x7F), "NaN codes"),
    ("own", cut("weight.scales"), "scales of a 16 x 128 weight"),
    ("own", cut("weight.shape"), "weight.shape is \\(N, K\\)"),
    ("own", filled("weight.zeros", 17), "zeros are 0 to 16, not 17"),
    ("own", typed("weight.shape", torch.complex64), "weight.shape holds whole numbers, not complex64"),
    ("own", lambda t: t.update({"weight.scales": torch.zeros(0, 16)}), "has scales, and here are none"),
    ("awq", lambda t: t.update(scales=None), "awq's scales is a dense tensor with values, not NoneType"),
    ("gptq", lambda t: t.update(scales=t["scales"].to("meta")), "with values, not one of torch.strided on meta"),
    ("fp8", lambda t: t.update(weight=t["weight"].float().to_sparse()), "with values, not one of torch.sparse_coo"),
    ("own", filled("weight.scales", float("nan")), "NaN or infinite"),
]


@pytest.mark.parametrize("block", [[0, 0], [128, 0], [0, 128], [-128, 128]])
def test_blocks_without_elements_are_refused(block: list[int]) -> None:
    config, tensors = layers()["fp8"]
    with pytest.raises(UnsupportedProblem, match=f"one row and one column at least, not {block[0]} x {block[1]}"):
        quant.read(tensors, config | {"weight_block_size": block})


@pytest.mark.parametrize(("name", "change", "said"), CORRUPT)
def test_corrupt_layers_get_one_sentence(name: str, change: Callable[[dict[str, Tensor]], Any], said: str) -> None:
    config, tensors = layers()[name]
    quant.read(tensors, config)
    change(tensors)
    with pytest.raises(UnsupportedProblem, match=said) as caught:
        quant.read(tensors, config)
    assert "\n" not in str(caught.value)
