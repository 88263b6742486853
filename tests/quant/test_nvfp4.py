"""NVFP4: compressed-tensors' and ModelOpt's tensors, each library's arithmetic bit for bit, refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from cutekernels import quant
from cutekernels.errors import UnsupportedProblem
from cutekernels.quant.join import padded
from tests.quant import golden

VALUES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
WEIGHTS = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "symmetric": True}
CONFIGS: dict[str, dict[str, Any]] = {
    "compressed-tensors": {
        "quant_method": "compressed-tensors",
        "format": "nvfp4-pack-quantized",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": WEIGHTS, "input_activations": WEIGHTS}},
    },
    "modelopt": {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head", "model.layers.0.self_attn*"]},
}
NAMES_CT = "compressed-tensors"
NAMES = {
    "compressed-tensors": ("weight_packed", "weight_scale", "weight_global_scale", "input_global_scale"),
    "modelopt": ("weight", "weight_scale", "weight_scale_2", "input_scale"),
}


def tensors(n: int, k: int, form: str, seed: int = 0) -> dict[str, Tensor]:
    """Every code and every e4m3 number from 0 on, and a factor of 24 bits."""
    draw = torch.Generator().manual_seed(seed)
    packed = torch.randint(0, 256, (n, k // 2), generator=draw, dtype=torch.uint8)
    scales = torch.randint(0, 127, (n, k // 16), generator=draw, dtype=torch.uint8).view(torch.float8_e4m3fn)
    factor = torch.rand(1, generator=draw) * (9000.0 if form == "compressed-tensors" else 1e-3) + 1e-6
    shape = (1,) if form == "compressed-tensors" else ()
    return dict(zip(NAMES[form], (packed, scales, factor.reshape(shape), torch.ones(shape)), strict=True))


def exact(packed: Tensor, scales: Tensor, factor: Tensor, form: str) -> Tensor:
    """The libraries' arithmetic, fp32: the scale with the factor first, then the element."""
    codes = torch.stack((packed & 15, packed >> 4), -1).flatten(-2).long()
    values = torch.where(codes > 7, -VALUES[codes & 7], VALUES[codes & 7])
    scale = scales.float() / factor if form == "compressed-tensors" else scales.float() * factor
    return (values.unflatten(1, (-1, 16)) * scale[..., None]).flatten(1)


@pytest.mark.parametrize("form", NAMES)
@pytest.mark.parametrize(("n", "k"), [(1, 16), (17, 96), (130, 256), (320, 2880)])
def test_a_matrix(n: int, k: int, form: str) -> None:
    for seed in range(5):
        given = tensors(n, k, form, seed)
        weight = quant.read(given, CONFIGS[form])
        assert (weight.code, weight.group, weight.dtype) == ("e2m1", 16, torch.bfloat16)
        wanted = exact(*list(given.values())[:3], form)
        assert torch.equal(weight.dequantize(torch.float32).view(torch.int32), wanted.view(torch.int32))
        golden.holds(weight, wanted.bfloat16(), given)
        again = quant.read(weight.tensors(), quant.write_config(weight))
        assert torch.equal(again.dequantize(), weight.dequantize())


def test_rows_of_several_are_one_weight() -> None:
    """q, k and v have factors of their own, and either library's."""
    parts = [quant.read(tensors(n, 96, form, n), CONFIGS[form]) for n, form in ((64, "modelopt"), (100, NAMES_CT))]
    whole = quant.concatenate(parts)
    assert whole is not None
    assert torch.equal(whole.dequantize(), torch.cat([part.dequantize() for part in parts]))
    wide = padded(parts[1], 192, 256).dequantize(torch.float32)
    assert torch.equal(wide[:100, :96], parts[1].dequantize(torch.float32))
    assert not bool(wide[100:].any())
    assert not bool(wide[:, 96:].any())
    stack = quant.stack([quant.read(tensors(64, 128, NAMES_CT, e), CONFIGS[NAMES_CT]) for e in range(3)])
    given = tensors(64, 128, NAMES_CT, 2)
    assert torch.equal(stack.dequantize()[2], exact(*list(given.values())[:3], NAMES_CT).bfloat16())


def test_configs() -> None:
    scheme = quant.read_config(CONFIGS["modelopt"])
    assert scheme.quantizes("model.layers.0.mlp.up_proj")
    assert not scheme.quantizes("lm_head")
    assert not scheme.quantizes("model.layers.0.self_attn.q_proj")
    older = {"quant_method": "modelopt", "quantization": {"quant_algo": "NVFP4", "exclude_modules": ["lm_head"]}}
    assert not quant.read_config(older).quantizes("lm_head")
    mixed = CONFIGS[NAMES_CT] | {"config_groups": dict(CONFIGS[NAMES_CT]["config_groups"])}
    fp8 = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}
    mixed["config_groups"] |= {"group_1": {"targets": ["re:.*down"], "weights": fp8, "format": "float-quantized"}}
    given = tensors(17, 96, NAMES_CT)
    assert quant.read(given, mixed).code == "e2m1"
    eight = {"weight": torch.randn(17, 96).to(torch.float8_e4m3fn), "weight_scale": torch.rand(17, 1)}
    assert quant.read(eight, mixed).code == "e4m3"


@pytest.mark.parametrize(
    ("form", "change", "said"),
    [
        ("modelopt", {"weight": torch.zeros(17, 48)}, "weight is uint8, not float32"),
        ("modelopt", {"weight": torch.zeros(17, 44, dtype=torch.uint8)}, "groups of 16 elements of K, not 88"),
        ("modelopt", {"weight_scale": torch.ones(17, 6)}, "weight_scale is float8_e4m3fn, not float32"),
        ("modelopt", {"weight_scale_2": torch.ones(17)}, r"weight_scale_2 has shape \(1,\)"),
        ("modelopt", {"weight_scale_2": torch.tensor(float("nan"))}, "its weight_scale_2 one above"),
        ("modelopt", {"pre_quant_scale": torch.ones(96)}, "has no tensor pre_quant_scale"),
        (NAMES_CT, {"weight_global_scale": torch.zeros(1)}, "its weight_global_scale one above"),
        (NAMES_CT, {"weight_scale": (-torch.ones(17, 6)).to(torch.float8_e4m3fn)}, "e4m3 numbers from 0 on"),
        (NAMES_CT, {"weight_scale": torch.full((17, 6), 127, dtype=torch.uint8).view(torch.float8_e4m3fn)}, "from 0"),
    ],
)
def test_refusals(form: str, change: dict[str, Tensor], said: str) -> None:
    with pytest.raises(UnsupportedProblem, match=said):
        quant.read(tensors(17, 96, form) | change, CONFIGS[form])


@pytest.mark.parametrize("algo", ["FP8", "NVFP4_AWQ", "MIXED_PRECISION", None])
def test_other_algorithms_of_modelopt_are_refused(algo: str | None) -> None:
    with pytest.raises(UnsupportedProblem, match="quant_algo of modelopt is NVFP4 or W4A16_NVFP4, not"):
        quant.read_config(CONFIGS["modelopt"] | {"quant_algo": algo})
