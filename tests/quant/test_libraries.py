"""Dequantized weights beside the libraries that define the formats, where they are installed: equal bit for bit."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from cutekernels import quant
from tests.quant import golden

SHAPES = [(17, 128), (100, 256), (192, 512)]


@pytest.mark.parametrize(("n", "k"), SHAPES)
@pytest.mark.parametrize("scheme", ["int4", "int4 asymmetric", "int4 channel", "int8 packed"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_compressed_tensors_packed(n: int, k: int, scheme: str, dtype: torch.dtype) -> None:
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    bits = 8 if "8" in scheme else 4
    channel, symmetric = "channel" in scheme, "asymmetric" not in scheme
    groups = 1 if channel else k // 64
    args = QuantizationArgs(
        num_bits=bits,
        type="int",
        symmetric=symmetric,
        strategy="channel" if channel else "group",
        group_size=None if channel else 64,
    )
    state = {"weight": torch.randn(n, k).to(dtype), "weight_scale": (torch.rand(n, groups) / 8 + 0.01).to(dtype)}
    if not symmetric:
        state["weight_zero_point"] = torch.randint(-8, 8, (n, groups), dtype=torch.int8)
    how = QuantizationScheme(targets=["Linear"], weights=args)
    tensors = PackedQuantizationCompressor.compress(state, how)
    expected = PackedQuantizationCompressor.decompress(tensors, how)["weight"]
    weight = quant.from_compressed_tensors(tensors, args.model_dump())
    golden.holds(weight, expected, tensors)


@pytest.mark.parametrize(("n", "k"), [*SHAPES, (300, 200)])
@pytest.mark.parametrize("strategy", ["channel", "tensor", "block"])
@pytest.mark.parametrize("kind", ["float", "int"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_compressed_tensors_plain(n: int, k: int, strategy: str, kind: str, dtype: torch.dtype) -> None:
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors.naive_quantized.base import NaiveQuantizationCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    if strategy == "block" and kind == "int":
        return
    shape = {"channel": (n, 1), "tensor": (1,), "block": (-(-n // 128), -(-k // 128))}[strategy]
    block = [128, 128] if strategy == "block" else None
    args = QuantizationArgs(num_bits=8, type=kind, symmetric=True, strategy=strategy, block_structure=block)
    state = {"weight": torch.randn(n, k).to(dtype), "weight_scale": (torch.rand(shape) / 64 + 0.01).to(dtype)}
    how = QuantizationScheme(targets=["Linear"], weights=args)
    tensors = NaiveQuantizationCompressor.compress(state, how)
    expected = NaiveQuantizationCompressor.decompress(tensors, how)["weight"]
    weight = quant.from_compressed_tensors(tensors, args.model_dump())
    golden.holds(weight, expected, tensors)


@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_compressed_tensors_nvfp4(n: int, k: int) -> None:
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors.nvfp4.base import NVFP4PackedCompressor
    from compressed_tensors.quantization import QuantizationScheme

    from tests.quant.test_nvfp4 import WEIGHTS, tensors

    how = QuantizationScheme(targets=["Linear"], weights=WEIGHTS)
    for seed in range(10):
        given = tensors(n, k, "compressed-tensors", seed)
        expected = NVFP4PackedCompressor.decompress(given, how)["weight"]
        weight = quant.from_compressed_tensors(given, how.weights.model_dump())
        assert weight.dtype == expected.dtype
        assert torch.equal(weight.dequantize(), expected)


def test_compressed_tensors_groups() -> None:
    """Which group a module is of: names, regular expressions, classes, groups without weights, what is left out."""
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.utils.match import match_named_modules, match_targets

    model = torch.nn.ModuleDict({"mlp": torch.nn.ModuleDict({k: torch.nn.Linear(8, 8) for k in ("up", "down")})})
    model["attn"] = torch.nn.ModuleDict({k: torch.nn.Linear(8, 8) for k in ("q", "k")})
    names = [name for name, module in model.named_modules() if type(module) is torch.nn.Linear]
    pool = ["Linear", "Module", "ModuleDict", "re:.*down", "re:mlp.*", "re:.*attn$", "re:.*[qk]$", "re:.*", *names]
    kinds: list[Any] = [{"num_bits": 4, "type": "int", "group_size": size} for size in (32, 64, 128)] + [None]
    choose = random.Random(0)
    for _ in range(100):
        groups = {
            str(i): {"targets": choose.sample(pool, choose.randint(1, 3)), "weights": choose.choice(kinds)}
            for i in range(choose.randint(1, 4))
        }
        ignore = choose.sample(pool[2:], choose.randint(0, 2))
        config = {"quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ignore}
        scheme = quant.read_config(config | {"config_groups": groups})
        of_target = {target: group["weights"] for group in groups.values() for target in group["targets"]}
        modules = dict(match_named_modules(model, of_target, ignore))
        for name in names:
            said = of_target[match_targets(name, modules[name], of_target)[0]] if name in modules else None
            found = scheme.of(name)
            assert (said and said["group_size"]) == (found and found.group), (name, groups, ignore)


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("block", [64, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.filterwarnings("ignore")
def test_bitsandbytes(nested: bool, block: int, dtype: torch.dtype) -> None:
    pytest.importorskip("bitsandbytes")
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    for n, k in SHAPES:
        data, state = quantize_4bit(
            torch.randn(n, k).to(dtype), blocksize=block, quant_type="nf4", compress_statistics=nested
        )
        weight = quant.from_bitsandbytes(data, state)
        assert weight.dtype == dtype
        assert torch.equal(weight.dequantize(), dequantize_4bit(data, state))
        named = {f"weight.{name}": tensor for name, tensor in state.as_dict(packed=True).items()} | {"weight": data}
        golden.same(weight.tensors(), named)
        again = quant.read(named, {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"})
        assert torch.equal(again.dequantize(), weight.dequantize())


@pytest.mark.filterwarnings("ignore")
def test_bitsandbytes_parameter() -> None:
    bnb = pytest.importorskip("bitsandbytes")
    parameter = bnb.nn.Params4bit(torch.randn(17, 128).bfloat16(), quant_type="nf4").to("cpu")
    weight = quant.from_bitsandbytes(parameter)
    expected = bnb.functional.dequantize_4bit(parameter.data, parameter.quant_state)
    assert torch.equal(weight.dequantize(), expected)


@pytest.mark.parametrize("granularity", ["PerRow", "PerTensor", "PerBlock"])
@pytest.mark.filterwarnings("ignore")
def test_torchao_float8(granularity: str) -> None:
    pytest.importorskip("torchao")
    from torchao.quantization import PerBlock, PerRow, PerTensor
    from torchao.quantization.quantize_.workflows import Float8Tensor

    kinds = {"PerRow": PerRow(), "PerTensor": PerTensor(), "PerBlock": PerBlock([128, 128])}
    tensor: Any = Float8Tensor.from_hp(torch.randn(256, 384).bfloat16(), granularity=kinds[granularity])
    weight = quant.from_torchao(tensor)
    golden.holds(weight, tensor.dequantize(), {"_weight_qdata": tensor.qdata, "_weight_scale": tensor.scale})
    read = quant.read({"weight": tensor}, {"quant_method": "torchao", "quant_type": "Float8WeightOnlyConfig"})
    assert torch.equal(read.dequantize(), tensor.dequantize())


@pytest.mark.filterwarnings("ignore")
def test_torchao_int4() -> None:
    pytest.importorskip("torchao")
    from torchao.quantization.quant_primitives import _dequantize_affine_tinygemm
    from torchao.quantization.quantize_.workflows import Int4Tensor, Int4TilePackedTo4dTensor

    from tests.quant.test_plain import tile_packed

    n, k, group = 16, 1024, 128
    q, both = torch.randint(0, 16, (n, k)), torch.randn(k // group, n, 2).bfloat16()
    scale, zero = both[..., 0].t().contiguous(), both[..., 1].t().contiguous()
    expected = _dequantize_affine_tinygemm(
        q.int(), (1, group), scale, zero, torch.int32, 0, 15, output_dtype=torch.bfloat16
    )
    tiles = Int4TilePackedTo4dTensor(tile_packed(q), both, [1, group], torch.Size((n, k)))
    assert torch.equal(quant.from_torchao(tiles).dequantize(), expected)
    signed = q - 8
    data = ((signed[:, 0::2] & 15) | ((signed[:, 1::2] & 15) << 4)).to(torch.uint8)
    rows = Int4Tensor(data, both[..., 0].contiguous(), both[..., 1].contiguous(), [1, group], torch.Size((n, k)))
    assert torch.equal(quant.from_torchao(rows).dequantize(), expected)


@pytest.mark.parametrize(("n", "k"), [(256, 384), (128, 128)])
def test_transformers_fp8(n: int, k: int) -> None:
    integration = pytest.importorskip("transformers.integrations.finegrained_fp8")
    data = torch.randn(n, k).to(torch.float8_e4m3fn)
    for scale in (torch.rand(n // 128, k // 128), torch.randint(1, 255, (n // 128, k // 128), dtype=torch.uint8)):
        expected = integration.Fp8Dequantize(None)._dequantize_one(data, scale, torch.bfloat16)
        weight = quant.read({"weight": data, "weight_scale_inv": scale}, {"quant_method": "fp8"}, dtype=torch.bfloat16)
        assert torch.equal(weight.dequantize(), expected)
