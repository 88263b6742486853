"""Quantized models of transformers: a Decoder takes over what it can read, all else names ``models.load``."""

from __future__ import annotations

import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers.integrations.finegrained_fp8 import FP8Linear

import cutekernels as ck
from cutekernels.errors import UnsupportedProblem
from cutekernels.integrations.transformers.checkpoints import layout_of, quantized_weight
from cutekernels.kernels.cute.parts.nf4 import NF4
from cutekernels.models import Decoder
from cutekernels.models.weights import Projection, Projections
from tests.integrations import tiny
from tests.models.test_load import SIZES, logits, one_thread
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
    made.forward = lambda x: pytest.fail("called")  # type: ignore[method-assign,assignment]
    codes = torch.stack([(tensors["weight_packed"] >> (4 * i)) & 15 for i in range(8)], -1).flatten(1)
    return made, (codes - 8).float() * tensors["weight_scale"].float().repeat_interleave(32, 1)


class Linear4bit(torch.nn.Linear):
    """Of bitsandbytes, by its name."""

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


LAYOUTS: dict[str, Callable[[int, int], Made]] = {
    "fp8": fp8_blocks, "fp8-tensor": fp8_tensor, "fp8-rows": fp8_rows, "packed": packed, "nf4": nf4,
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


def replaced(model: Any, make: Callable[[int, int], Made]) -> Any:
    """``model`` with its projections made by ``make``, and a plain twin of it."""
    torch.manual_seed(3)
    twin = tiny.model("llama", num_key_value_heads=4, intermediate_size=128)
    for path, linear in list(twin.named_modules()):
        if type(linear) is torch.nn.Linear and path != "lm_head":
            parent, _, name = path.rpartition(".")
            made, linear.weight.data = make(*linear.weight.shape)
            setattr(model.get_submodule(parent), name, made)
    return twin


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_decoder_takes_over_what_transformers_has_loaded(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny.model("llama", num_key_value_heads=4, intermediate_size=128)
    twin = replaced(model, LAYOUTS[name])
    expected = logits(Decoder.from_transformers(twin, **SIZES), monkeypatch)
    ours = Decoder.from_transformers(model, **SIZES)
    tokens, found = logits(ours, monkeypatch)
    assert tokens == expected[0]
    torch.testing.assert_close(found, expected[1])
    attention = ours._w.layers[0].attention
    assert isinstance(attention.qkv, Projections if name == "fp8" else Projection), "64 rows are half a block"


@pytest.mark.parametrize("name", LAYOUTS)
def test_patch_leaves_quantized_projections_and_names_load(name: str) -> None:
    model = tiny.model("llama", num_key_value_heads=4, intermediate_size=128)
    replaced(model, LAYOUTS[name])
    with ck.patch(model) as report:
        reasons = dict(report.left)
    for path in ("self_attn.q_proj", "mlp.down_proj"):
        assert "quantized" in reasons[f"model.layers.0.{path}"]
        assert r"cutekernels.models.load(path)" in reasons[f"model.layers.0.{path}"]
    assert report.patched["linear"] == 1, "the head"


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


def test_a_decompressed_layer_is_refused_with_the_remedy() -> None:
    """compressed-tensors leaves its forward, which rounds anew, in front of the weight that it has decompressed."""
    model = tiny.model("llama")
    linear = model.model.layers[0].self_attn.o_proj
    linear.quantization_scheme, linear.forward = SimpleNamespace(), linear.forward
    with pytest.raises(UnsupportedProblem, match=r"o_proj as .*quantized \(by compressed_tensors\): load"):
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
