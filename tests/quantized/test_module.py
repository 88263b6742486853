"""``nn.QuantizedLinear``: what it computes, and how it is moved, copied, saved, loaded, sharded and compiled."""

from __future__ import annotations

import copy
import pickle
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import cutekernels as ck
from cutekernels import quant
from cutekernels.errors import UnsupportedProblem
from cutekernels.nn import QuantizedLinear
from cutekernels.quant import QuantizedWeight
from tests.integrations import tiny
from tests.models.test_load_quantized import FORMATS, small, words
from tests.quant.test_bitsandbytes import checkpoint as nf4
from tests.quantized.cases import BF16, COMMON, FP16, FP32, Kind, make

HELD = ("packed", "scales", "zeros", "order")


ANY = Kind(group=32, zeros=True, order=True)


def module(kind: Kind = ANY, bias: bool = True) -> QuantizedLinear:
    return QuantizedLinear(make(72, 136, kind).weight(), torch.randn(72) if bias else None)


def read_weight(name: str, n: int = 64, k: int = 128, seed: int = 0) -> QuantizedWeight:
    """A weight of a checkpoint in a format."""
    torch.manual_seed(seed)
    maker, config = FORMATS[name]
    held = maker(n, k)
    held.pop("bias", None)
    return quant.read(held, config, dtype=BF16)


def same(a: QuantizedWeight, b: QuantizedWeight) -> bool:
    pairs = [(getattr(a, name), getattr(b, name)) for name in HELD]
    return all((x is None and y is None) or (x is not None and y is not None and torch.equal(x, y)) for x, y in pairs)


# ---- what it computes -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", COMMON.values(), ids=str)
@pytest.mark.parametrize("bias", [False, True])
def test_it_is_linear(kind: Kind, bias: bool) -> None:
    layer, x = module(kind, bias), torch.randn(2, 3, 136)
    assert torch.equal(layer(x), ck.linear(x, layer.weight, layer.bias))
    assert (layer.in_features, layer.out_features) == (136, 72)


def test_from_linear_quantizes_and_keeps_the_bias() -> None:
    linear = torch.nn.Linear(136, 72)
    for scheme, symmetric in (("int4_g128", True), ("int4_g32", False), ("fp8_block", True), ("int8_channel", True)):
        layer = QuantizedLinear.from_linear(linear, scheme, symmetric=symmetric)
        assert same(layer.weight, quant.quantize(linear.weight.detach(), scheme, symmetric=symmetric))
        assert layer.bias is linear.bias
    assert QuantizedLinear.from_linear(torch.nn.Linear(136, 72, bias=False)).bias is None
    assert "int4 g128, 72 x 136" in repr(QuantizedLinear.from_linear(linear))


def test_gradients_reach_x_and_a_bias_that_is_a_parameter() -> None:
    weight = make(72, 136).weight()
    frozen, trained = (
        QuantizedLinear(weight, torch.randn(72)),
        QuantizedLinear(weight, torch.nn.Parameter(torch.randn(72))),
    )
    assert [p.requires_grad for p in frozen.parameters()] == [False]
    x = torch.randn(3, 136, requires_grad=True)
    trained(x).sum().backward()
    assert torch.equal(trained.bias.grad, torch.full((72,), 3.0))
    torch.testing.assert_close(x.grad, torch.ones(3, 72) @ weight.dequantize(FP32))


REFUSED: dict[str, tuple[Callable[[QuantizedWeight], Any], str]] = {
    "a tensor": (lambda w: QuantizedLinear(torch.ones(3, 3)), "takes a QuantizedWeight; got"),  # type: ignore[arg-type]
    "a short bias": (lambda w: QuantizedLinear(w, torch.ones(3)), r"a floating bias of \(72,\) on cpu"),
    "a bias of integers": (lambda w: QuantizedLinear(w, torch.ones(72).int()), "a floating bias"),
    "a bias elsewhere": (lambda w: QuantizedLinear(w, torch.ones(72, device="meta")), "a floating bias"),
    "no tensor as bias": (lambda w: QuantizedLinear(w, 3.0), "takes bias as a torch.Tensor"),  # type: ignore[arg-type]
    "offsets": (
        lambda w: QuantizedLinear(
            QuantizedWeight("int4", 128, 1, w.shape, w.packed, w.scales, offsets=torch.ones_like(w.scales))
        ),
        "without torchao's offsets",
    ),
    "no Linear": (lambda w: QuantizedLinear.from_linear(torch.nn.ReLU()), "from_linear takes a torch.nn.Linear"),
    "no scheme": (lambda w: QuantizedLinear.from_linear(torch.nn.Linear(8, 8), "int3"), "a scheme is one of"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_are_one_sentence(name: str) -> None:
    call, message = REFUSED[name]
    with pytest.raises(UnsupportedProblem, match=message) as error:
        call(make(72, 136).weight())
    assert "\n" not in str(error.value)


# ---- moved and copied -----------------------------------------------------------------------------------


CASTS: dict[str, Callable[[torch.nn.Module], object]] = {
    "half": lambda m: m.half(),
    "to": lambda m: m.to(FP16),
    "to a device and a type": lambda m: m.to("cpu", FP16),
    "type": lambda m: m.type(FP16),
    "of a whole": lambda m: torch.nn.Sequential(m).to(FP16),
}


@pytest.mark.parametrize("kind", [*COMMON.values(), Kind(group=32, zeros=True, order=True, scale=BF16)], ids=str)
@pytest.mark.parametrize("how", CASTS)
def test_a_type_is_that_of_activations(how: str, kind: Kind) -> None:
    layer = module(kind)
    before, address = copy.deepcopy(layer.weight), layer.packed.data_ptr()
    CASTS[how](layer)
    assert layer.weight.dtype == FP16
    assert layer.bias is not None and layer.bias.dtype == FP16
    assert same(layer.weight, before)
    assert layer.packed.data_ptr() == address
    assert layer.scales.dtype == kind.scale
    assert layer(torch.randn(3, 136).half()).dtype == FP16
    assert layer.double().weight.dtype == FP32, "the widest that weights are decoded to"
    assert layer.float().bias.dtype == FP32


def test_devices() -> None:
    layer = module()
    meta = copy.deepcopy(layer).to("meta")
    assert {t.device.type for t in (*meta.buffers(), *meta.parameters())} == {"meta"}
    assert meta.weight.device.type == "meta"
    assert meta(torch.randn(3, 136, device="meta")).shape == (3, 72)
    empty = meta.to_empty(device="cpu")
    assert {name: t.dtype for name, t in empty.named_buffers()} == {name: t.dtype for name, t in layer.named_buffers()}
    empty.load_state_dict(layer.state_dict())
    x = torch.randn(3, 136)
    assert torch.equal(empty(x), layer(x))
    layer.share_memory()
    assert layer.packed.is_shared() and layer.scales.is_shared()


def test_copies() -> None:
    layer, x = module(), torch.randn(3, 136)
    expected = layer(x)
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(other(x), expected)
        assert other.packed.data_ptr() != layer.packed.data_ptr()
        assert other.weight.packed is other.packed
        other.packed.zero_()
        assert not torch.equal(other(x), expected)
    assert torch.equal(layer(x), expected)


def test_buffers_are_what_is_multiplied() -> None:
    layer, x = module(), torch.randn(3, 136)
    expected = layer(x)
    scales = layer.scales * 2
    doubled = torch.func.functional_call(layer, {"scales": scales, "bias": layer.bias * 2}, (x,))
    torch.testing.assert_close(doubled, expected * 2)
    assert torch.equal(layer(x), expected)
    layer.scales = scales
    torch.testing.assert_close(layer(x) - layer.bias, (expected - layer.bias) * 2)


# ---- saved and loaded -----------------------------------------------------------------------------------


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("name", FORMATS)
def test_the_state_dict_has_the_checkpoints_tensors(name: str, assign: bool) -> None:
    weight = read_weight(name)
    layer = QuantizedLinear(weight, torch.randn(64))
    state = torch.nn.Sequential(layer).state_dict()
    expected = {f"0.{key}" for key in weight.tensors()}
    assert set(state) == expected | {"0.bias"}
    torch.manual_seed(0)
    other = QuantizedLinear(read_weight(name, seed=1), torch.zeros(64))
    assert not same(other.weight, weight)
    packed = other.packed
    result = torch.nn.Sequential(other).load_state_dict(state, assign=assign)
    assert not result.missing_keys and not result.unexpected_keys
    assert same(other.weight, weight)
    assert (other.packed is packed) == (not assign), "in place, where graphs may have its address"
    assert other.weight.packed is other.packed
    x = torch.randn(3, 128)
    assert torch.equal(other(x), layer(x))
    again = other.state_dict()
    assert all(torch.equal(again[key], state[f"0.{key}"]) for key in again)


def test_what_has_zeros_now_and_had_none_is_loaded_by_copies() -> None:
    plain, zeros = (quant.quantize(torch.randn(64, 128), "int4_g32", symmetric=s) for s in (True, False))
    layer = QuantizedLinear(plain)
    state = copy.deepcopy(QuantizedLinear(zeros).state_dict())
    layer.load_state_dict(state)
    assert same(layer.weight, zeros)
    for t in state.values():
        t.zero_()
    assert same(layer.weight, zeros)


def _without(name: str) -> Callable[[dict[str, Tensor]], object]:
    return lambda state: state.pop(name)


BROKEN: dict[str, tuple[str, Callable[[dict[str, Tensor]], object], str]] = {
    "nothing": ("gptq", lambda s: s.clear(), r'Missing key\(s\) in state_dict: "bias", "qweight"|"qweight", "bias"'),
    "no scales": ("gptq", _without("scales"), "weight: .*has scales, and this one has"),
    "no zeros": ("awq", _without("qzeros"), "weight: .*has qzeros, and this one has"),
    "no packed": ("cutekernels", _without("weight.packed"), "weight: the state dict lacks weight.packed"),
    "another shape": (
        "gptq",
        lambda s: s.update(QuantizedLinear(read_weight("gptq", 128, 128)).state_dict()),
        r"weight: the module is of \(64, 128\), and the state dict has \(128, 128\)",
    ),
    "another shape of our own": (
        "cutekernels",
        lambda s: s.update(QuantizedLinear(read_weight("cutekernels", 128, 128)).state_dict()),
        r"weight: the module is of \(64, 128\), and the state dict has \(128, 128\)",
    ),
    "short": ("fp8", lambda s: s.update(weight_scale_inv=torch.ones(3, 3)), "weight: FP8's scales have shape"),
    "a name too many": ("fp8", lambda s: s.update(weight_scale=torch.ones(1)), "FP8 has no tensor weight_scale"),
    "of a plain layer": ("gptq", lambda s: (s.clear(), s.update(torch.nn.Linear(128, 64).state_dict())), "Unexpected"),
    "no tensor": ("cutekernels", lambda s: s.update({"weight.packed": [1]}), "the state dict's weight.packed is a"),
    "nothing there": ("gptq", lambda s: s.update(qweight=None), "the state dict's qweight is a dense tensor"),
    "no values": ("awq", lambda s: s.update(scales=s["scales"].to("meta")), "the state dict's scales is a dense"),
    "zeros that are none": (
        "cutekernels",
        lambda s: s.update({"weight.zeros": torch.full((4, 64), 17, dtype=torch.uint8)}),
        "zeros are 0 to 16",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_broken_state_dicts_are_refused(name: str) -> None:
    form, change, message = BROKEN[name]
    layer = QuantizedLinear(read_weight(form), torch.randn(64))
    before = copy.deepcopy(layer.weight)
    state = dict(layer.state_dict())
    change(state)
    with pytest.raises(RuntimeError, match=message):
        layer.load_state_dict(state)
    assert same(layer.weight, before)


@pytest.mark.parametrize("schemes", [("fp8_channel", "int8_channel"), ("int8_channel", "fp8_channel")])
def test_elements_of_another_kind_are_not_taken_for_the_layer_s_own(schemes: tuple[str, str]) -> None:
    """Bytes and scales of both have one shape; every e4m3 byte is an int8 too."""
    given, layer = (QuantizedLinear(quant.quantize(torch.rand(64, 128) + 0.5, scheme)) for scheme in schemes)
    before = copy.deepcopy(layer.weight)
    with pytest.raises(RuntimeError, match=r"weight.packed of \w+ elements is torch.\w+, not torch"):
        layer.load_state_dict(given.state_dict())
    assert same(layer.weight, before)
    with pytest.raises(UnsupportedProblem, match="load what was saved with this scheme"):
        quant.read(given.weight.tensors(), {"quant_method": "cutekernels", "scheme": schemes[1]})
    layer.load_state_dict(QuantizedLinear(quant.quantize(torch.randn(64, 128), schemes[1])).state_dict())
    assert not same(layer.weight, before)


def test_loading_into_meta_asks_for_assign() -> None:
    layer = module(bias=False)
    meta = copy.deepcopy(layer).to("meta")
    with pytest.raises(RuntimeError, match="weight is on the meta device: pass assign=True"):
        meta.load_state_dict(layer.state_dict())
    meta.load_state_dict(layer.state_dict(), assign=True)
    assert same(meta.weight, layer.weight)


@pytest.mark.parametrize("name", FORMATS)
def test_the_config_that_is_written_reads_the_tensors_again(name: str) -> None:
    weight = read_weight(name)
    config = quant.write_config(weight)
    assert config["quant_method"] == FORMATS[name][1]["quant_method"]
    assert same(quant.read(weight.tensors(), config, dtype=BF16), weight)
    assert quant.write_config([weight, weight]) == config


def _compressed(form: str, weights: dict[str, Any]) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
    }


def _plain(kind: torch.dtype, name: str, *shape: int) -> dict[str, Tensor]:
    return {"weight": (torch.randn(200, 256) * 9).to(kind), name: torch.rand(shape) + 0.5}


_E4M3 = torch.float8_e4m3fn
FURTHER: dict[str, tuple[dict[str, Tensor], dict[str, Any]]] = {
    "nf4": (
        nf4(64, 128, 64, nested=False),
        {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    ),
    "nested nf4": (
        nf4(64, 128, 64, nested=True),
        {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    ),
    "torchao fp8": (
        {"_weight_qdata": torch.randn(64, 128).to(_E4M3), "_weight_scale": torch.rand(64, 1) + 0.5},
        {"quant_method": "torchao", "quant_type": {"default": {"_type": "Float8WeightOnlyConfig"}}},
    ),
    "fp8, one scale": (_plain(_E4M3, "weight_scale_inv"), {"quant_method": "fp8", "weight_block_size": None}),
    "fp8, blocks of one row": (
        _plain(_E4M3, "weight_scale_inv", 200, 2), {"quant_method": "fp8", "weight_block_size": [1, 128]}
    ),
    "fp8, large blocks": (
        _plain(_E4M3, "weight_scale_inv", 1, 2), {"quant_method": "fp8", "weight_block_size": [256, 128]}
    ),
    "compressed fp8, one scale": (
        _plain(_E4M3, "weight_scale", 1),
        _compressed("float-quantized", {"num_bits": 8, "type": "float", "strategy": "tensor"}),
    ),
    "compressed fp8, blocks": (
        _plain(_E4M3, "weight_scale", 2, 2),
        _compressed(
            "float-quantized",
            {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 128]},
        ),
    ),
    "compressed int8, groups": (
        _plain(torch.int8, "weight_scale", 200, 4),
        _compressed("int-quantized", {"num_bits": 8, "type": "int", "strategy": "group", "group_size": 64}),
    ),
    "gptq v2, one group": (
        {"qweight": words(16, 64), "qzeros": words(1, 8) & 0x77777777, "scales": small(1, 64)},
        {"quant_method": "gptq", "bits": 4, "group_size": -1, "checkpoint_format": "gptq_v2"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FURTHER)
def test_further_layouts_come_back(name: str) -> None:
    tensors, config = FURTHER[name]
    weight = quant.read(tensors, config, dtype=BF16)
    again = quant.read(weight.tensors(), quant.write_config(weight), dtype=BF16)
    assert same(again, weight) and again.details.keys() == weight.details.keys()
    layer = QuantizedLinear(weight)
    state = layer.state_dict()
    assert set(state) == set(tensors)
    assert all(torch.equal(state[key].view(torch.uint8), t.view(torch.uint8)) for key, t in tensors.items() if t.dim())
    expected = copy.deepcopy(weight)
    state = {key: t.clone() for key, t in state.items()}
    layer.packed.zero_()
    layer.load_state_dict(state)
    assert same(layer.weight, expected)


def test_configs_of_one_model_agree() -> None:
    ordered, plain = (
        read_weight("gptq"),
        quant.read({k: v for k, v in read_weight("gptq").tensors().items() if k != "g_idx"}, FORMATS["gptq"][1]),
    )
    assert [quant.write_config(w)["desc_act"] for w in (ordered, plain)] == [True, False]
    assert quant.write_config([plain, ordered])["desc_act"] is True
    with pytest.raises(UnsupportedProblem, match="one quantization_config is of layers that are quantized alike"):
        quant.write_config([ordered, read_weight("awq")])
    with pytest.raises(UnsupportedProblem, match="this one has none"):
        quant.write_config(torch.nn.Linear(8, 8))
    with pytest.raises(UnsupportedProblem, match="no scheme has nf4 in groups of 64"):
        quant.write_config(make(72, 136, Kind("nf4", 64)).weight())


def quantized_model(scheme: str, seed: int = 0) -> Any:
    """A model of transformers; q, k and v can be one, and gate and up."""
    model = tiny.model("llama", num_key_value_heads=4, intermediate_size=128)
    torch.manual_seed(seed)
    for path, linear in [*model.named_modules()]:
        if type(linear) is torch.nn.Linear and path != "lm_head":
            torch.nn.init.normal_(linear.weight)
            model.set_submodule(path, QuantizedLinear.from_linear(linear, scheme))
    return model


def test_a_decoder_follows_what_is_loaded_in_place() -> None:
    """Into copies of weights too, which lie side by side for one product."""
    model, other = quantized_model("int4_g32"), quantized_model("int4_g32", seed=1)
    decoders = [ck.models.Decoder.from_transformers(m, max_batch=1, max_tokens=64) for m in (model, other)]
    first, expected = (d.generate([[1, 2, 3]], max_new_tokens=16, stop=()).tokens for d in decoders)
    assert first != expected
    assert not decoders[0]._source.moved()
    model.load_state_dict(other.state_dict())
    assert decoders[0].generate([[1, 2, 3]], max_new_tokens=16, stop=()).tokens == expected


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("scheme", ["int4_g32", "fp8_block"])
def test_a_model_with_such_layers_is_saved_and_loaded(scheme: str, tmp_path: Path) -> None:
    model = quantized_model(scheme)
    model.config.quantization_config = quant.write_config(model)
    ids = torch.tensor([[1, 2, 3, 4]])
    expected = model.generate(ids, max_new_tokens=6, do_sample=False)[0, 4:].tolist()
    model.save_pretrained(tmp_path)
    for decoder in (
        ck.models.Decoder.from_transformers(model, max_batch=1, max_tokens=64),
        ck.models.Decoder.from_pretrained(tmp_path, max_batch=1, max_tokens=64),
    ):
        assert decoder.generate(ids.tolist(), max_new_tokens=6, stop=()).tokens[0] == expected[:6]
    with ck.patch(model) as report:
        assert model.generate(ids, max_new_tokens=6, do_sample=False)[0, 4:].tolist() == expected
    assert not any("models.load" in str(reason) for _, reason in report.left)


# ---- compiled, sharded, adapted -------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [Kind(group=32, zeros=True, order=True), Kind("e4m3", 128, 128, scale=FP32)], ids=str)
def test_compiled_and_exported(kind: Kind) -> None:
    layer, x, y = module(kind), torch.randn(3, 136), torch.randn(5, 136)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True, dynamic=True)
    leaf = x.clone().requires_grad_()
    compiled(leaf).sum().backward()
    torch.testing.assert_close(leaf.grad, torch.ones(3, 72) @ layer.weight.dequantize(FP32))
    assert torch.equal(compiled(y), layer(y))
    program = torch.export.export(layer, (x,), dynamic_shapes=({0: torch.export.Dim("tokens")},))
    assert "cutekernels.quantized_linear" in str(program.graph)
    assert set(program.graph_signature.buffers) >= {"packed", "scales"}
    assert torch.equal(program.module()(y), layer(y))
    layer.half()
    assert compiled(y.half()).dtype == FP16


class Adapted(torch.nn.Module):
    """A LoRA, as docs/quantized.md has it."""

    def __init__(self, base: QuantizedLinear, rank: int = 4) -> None:
        super().__init__()
        self.base = base
        self.down = torch.nn.Linear(base.in_features, rank, bias=False)
        self.up = torch.nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.base(x) + self.up(self.down(x))
        return y


def test_fsdp_keeps_packed_weights_whole() -> None:
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    whole = torch.nn.Sequential(Adapted(module()), torch.nn.Linear(72, 8))
    sharded = copy.deepcopy(whole)
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=1)
    try:
        fully_shard(sharded[0])
        fully_shard(sharded)
        x = torch.randn(3, 136)
        for model in (whole, sharded):
            model(x).square().sum().backward()
        packed = sharded[0].base.packed
        assert type(packed) is Tensor and torch.equal(packed, whole[0].base.packed)
        for ours, theirs in zip(sharded.parameters(), whole.parameters(), strict=True):
            assert (ours.grad is None) == (theirs.grad is None)
            if ours.grad is not None:
                torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad)
        state = sharded.state_dict()
        assert torch.equal(sharded(x), whole(x))
        assert torch.equal(state["0.base.weight.packed"], packed)
    finally:
        dist.destroy_process_group()


@pytest.mark.filterwarnings("ignore:Unsupported layer type")
def test_peft_trains_a_lora() -> None:
    peft = pytest.importorskip("peft")
    model = torch.nn.Sequential(module(Kind(group=32)))
    config = peft.LoraConfig(r=4, target_modules=["0"], init_lora_weights=False)
    config._register_custom_module({QuantizedLinear: peft.tuners.lora.Linear})
    x = torch.randn(3, 136)
    plain = model(x)
    adapted = peft.get_peft_model(model, config)
    y = adapted(x)
    assert not torch.equal(y, plain)
    y.sum().backward()
    assert all((p.grad is not None) == ("lora_" in name) for name, p in adapted.named_parameters())
