"""FP8 and int8 matrices with scales beside them: Hugging Face's, compressed-tensors' and torchao's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from cutekernels import quant
from cutekernels.errors import UnsupportedProblem
from cutekernels.quant import layout
from cutekernels.quant.formats import plain
from tests.quant import golden

SHAPES = [(1, 64), (17, 100), (100, 256), (192, 300), (3, 4096)]
NUMBERS = [b for b in range(256) if b & 0x7F != 0x7F]


def e4m3(n: int, k: int) -> Tensor:
    """All of e4m3's numbers, at random."""
    bytes_ = torch.tensor(NUMBERS, dtype=torch.uint8)[torch.randint(0, len(NUMBERS), (n, k))]
    return bytes_.view(torch.float8_e4m3fn)


def spread(scale: Tensor, n: int, k: int, rows: int, columns: int) -> Tensor:
    """The scale of each element, fp32."""
    table = scale.float()
    return torch.stack([table[i // rows][torch.arange(k) // columns] for i in range(n)])


@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_blocks(n: int, k: int) -> None:
    scale = torch.rand(-(-n // 128), -(-k // 128)) + 0.01
    tensors = {"weight": e4m3(n, k), "weight_scale_inv": scale}
    config = {"quant_method": "fp8", "weight_block_size": [128, 128], "scale_fmt": "ue8m0"}  # which the scales decide
    weight = quant.read(tensors, config, dtype=torch.bfloat16)
    assert (weight.code, weight.group, weight.scale_rows) == ("e4m3", 128, 128)
    golden.holds(weight, (tensors["weight"].float() * spread(scale, n, k, 128, 128)).bfloat16(), tensors)


def test_larger_blocks_are_repeated() -> None:
    scale = torch.rand(2, 3) + 0.01
    tensors = {"weight": e4m3(300, 700), "weight_scale_inv": scale}
    weight = quant.from_fp8(*tensors.values(), (256, 256))
    expected = tensors["weight"].float() * spread(scale, 300, 700, 256, 256)
    assert torch.equal(weight.dequantize(torch.float32), expected)
    golden.same(weight.tensors(), tensors)


def test_blocks_of_one_row_are_groups() -> None:
    bytes_ = torch.randint(100, 140, (17, 4), dtype=torch.uint8)
    tensors = {"weight": e4m3(17, 128), "weight_scale_inv": bytes_}
    weight = quant.from_fp8(*tensors.values(), (1, 32))
    assert (weight.group, weight.scale_rows) == (32, 1)
    expected = tensors["weight"].float() * spread(2.0 ** (bytes_.float() - 127), 17, 128, 1, 32)
    assert torch.equal(weight.dequantize(torch.float32), expected)
    golden.same(weight.tensors(), tensors)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e8m0fnu])
def test_exponents(dtype: torch.dtype) -> None:
    """Byte 0 is 2 ** -127, byte 254 is 2 ** 127."""
    bytes_ = torch.tensor([[0, 1, 127], [130, 100, 254]], dtype=torch.uint8)
    tensors = {"weight": e4m3(200, 384), "weight_scale_inv": bytes_.view(dtype)}
    weight = quant.from_fp8(*tensors.values())
    scale = torch.tensor([[2.0 ** (b - 127) for b in row] for row in bytes_.tolist()])
    expected = tensors["weight"].double() * spread(scale, 200, 384, 128, 128).double()
    assert torch.equal(weight.dequantize(torch.float32), expected.float())
    golden.same(weight.tensors(), tensors)
    bytes_[1, 1] = 255
    with pytest.raises(UnsupportedProblem, match="byte 255, which is NaN"):
        quant.from_fp8(tensors["weight"], bytes_.view(dtype))


@pytest.mark.parametrize("shape", [(), (1,)])
def test_one_scale_for_all(shape: tuple[int, ...]) -> None:
    tensors = {
        "weight": e4m3(70, 96),
        "weight_scale_inv": torch.full(shape, 0.3),
        "activation_scale": torch.tensor(2.0),
    }
    weight = quant.read(tensors, {"quant_method": "fp8", "weight_block_size": None}, dtype=torch.float16)
    assert (weight.group, weight.scale_rows) == (0, 1)
    golden.holds(weight, (tensors["weight"].float() * 0.3).half(), tensors)


@pytest.mark.parametrize(("n", "k"), SHAPES)
@pytest.mark.parametrize(
    ("kind", "strategy"),
    [(kind, strategy) for kind in ("float", "int") for strategy in ("channel", "tensor", "group")]
    + [("float", "block")],
)
def test_compressed_tensors(kind: str, n: int, k: int, strategy: str) -> None:
    values = e4m3(n, k) if kind == "float" else torch.randint(-128, 128, (n, k), dtype=torch.int8)
    shape = {
        "channel": (n, 1),
        "tensor": (1,),
        "group": (n, -(-k // 32)),
        "block": (-(-n // 128), -(-k // 128)),
    }[strategy]
    scale = (torch.rand(shape) + 0.01).bfloat16()
    rows, columns = {"channel": (1, k), "tensor": (n, k), "group": (1, 32), "block": (128, 128)}[strategy]
    tensors = {"weight": values, "weight_scale": scale}
    args: dict[str, Any] = {"num_bits": 8, "type": kind, "strategy": strategy, "symmetric": True}
    args |= {"group_size": 32 if strategy == "group" else None, "block_structure": [128, 128]}
    weight = quant.from_compressed_tensors(tensors, args)
    grid = scale.reshape(1, 1) if strategy == "tensor" else scale
    exact = values.double() * spread(grid, n, k, rows, columns).double()
    golden.holds(weight, exact.bfloat16(), tensors)


def test_zero_points_of_zero_are_kept_and_others_refused() -> None:
    tensors = {
        "weight": torch.randint(-128, 128, (8, 64), dtype=torch.int8),
        "weight_scale": torch.rand(8, 1),
        "weight_zero_point": torch.zeros(8, 1, dtype=torch.int8),
    }
    args = {"num_bits": 8, "type": "int", "strategy": "channel"}
    golden.same(quant.from_compressed_tensors(tensors, args).tensors(), tensors)
    tensors["weight_zero_point"][3] = 1
    with pytest.raises(UnsupportedProblem, match="8-bit weights are symmetric"):
        quant.from_compressed_tensors(tensors, args)


def test_a_row_of_scales_is_a_scale_per_row() -> None:
    """As a loaded module of compressed-tensors holds them."""
    tensors = {"weight": e4m3(17, 64), "weight_scale": torch.rand(1, 17)}
    weight = quant.from_compressed_tensors(tensors, {"num_bits": 8, "type": "float", "strategy": "channel"})
    golden.holds(weight, tensors["weight"].float() * tensors["weight_scale"].t(), tensors)


@pytest.mark.parametrize("code", [0x7F, 0xFF])
def test_nan_codes_are_found(code: int) -> None:
    weight = e4m3(130, 260)
    weight.view(torch.uint8)[129, 259] = code
    with pytest.raises(UnsupportedProblem, match="NaN codes 0x7f and 0xff"):
        quant.from_fp8(weight, torch.ones(2, 3))


@pytest.mark.parametrize(
    ("bug", "value"),
    [
        ("exponents", lambda scale, *, by: scale.view(torch.uint8).float()),
        ("exponents", lambda scale, *, by: (scale.view(torch.uint8).int() << 23).view(torch.float32)),
    ],
)
def test_a_planted_bug_of_exponents_is_seen(bug: str, value: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain, bug, value)
    with pytest.raises(AssertionError):
        test_exponents(torch.uint8)


@pytest.mark.parametrize(
    "wrong",
    [lambda table: table.flip(0), lambda table: table.flip(1), lambda table: table.roll(1, 1)],
    ids=["rows of blocks", "columns of blocks", "a block's edge"],
)
def test_a_planted_bug_of_blocks_is_seen(wrong: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    test_blocks(192, 300)
    assemble = plain.assemble
    monkeypatch.setattr(plain, "assemble", lambda codes, code, scales, **o: assemble(codes, code, wrong(scales), **o))
    with pytest.raises(AssertionError):
        test_blocks(192, 300)


def test_a_swapped_byte_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes 1 and 2 of a word of eight bits hold the second pair's low and the first pair's high element."""
    test_blocks(130, 256)
    swapped = layout.pack

    def pack(codes: Tensor, code: str) -> Tensor:
        return swapped(codes, code).unflatten(-1, (-1, 4))[..., [0, 2, 1, 3]].flatten(-2)

    monkeypatch.setattr(layout, "pack", pack)
    with pytest.raises(AssertionError):
        test_blocks(130, 256)


@dataclass
class Float8Tensor:
    """Stand-in for torchao's class of this name."""

    qdata: Tensor
    scale: Tensor
    block_size: list[int]
    dtype: torch.dtype = torch.bfloat16


@dataclass
class Int4Tensor:
    """Stand-in for torchao's class of this name."""

    qdata: Tensor
    scale: Tensor
    zero_point: Tensor
    block_size: list[int]
    shape: torch.Size
    act_pre_scale: Tensor | None = None
    dtype: torch.dtype = torch.bfloat16


@dataclass
class Int4TilePackedTo4dTensor:
    """Stand-in for torchao's class of this name."""

    qdata: Tensor
    scale_and_zero: Tensor
    block_size: list[int]
    shape: torch.Size
    act_pre_scale: Tensor | None = None
    dtype: torch.dtype = torch.bfloat16


@pytest.mark.parametrize(
    ("n", "k", "block", "shape"),
    [(17, 100, [1, 100], (17, 1)), (256, 384, [128, 128], (2, 3)), (9, 64, [], ()), (9, 64, [9, 64], (1, 1))],
)
def test_torchao_float8(n: int, k: int, block: list[int], shape: tuple[int, ...]) -> None:
    scale = torch.rand(shape) + 0.01
    tensor = Float8Tensor(e4m3(n, k), scale, block)
    weight = quant.from_torchao(tensor)
    rows, columns = block or (n, k)
    expected = tensor.qdata.float() * spread(scale.reshape(-1, shape[1] if shape else 1), n, k, rows, columns)
    golden.holds(weight, expected.bfloat16(), {"_weight_qdata": tensor.qdata, "_weight_scale": scale})
    again = quant.read(weight.tensors(), {"quant_method": "torchao", "quant_type": "Float8WeightOnlyConfig"})
    assert torch.equal(again.dequantize(), expected.bfloat16())


@pytest.mark.parametrize("zero", [True, False])
def test_torchao_int4(zero: bool) -> None:
    n, k = 17, 128
    q = torch.randint(-8, 8, (n, k))
    data = ((q[:, 0::2] & 15) | ((q[:, 1::2] & 15) << 4)).to(torch.uint8)
    scale, point = torch.rand(2, n).bfloat16(), torch.randn(2, n).bfloat16() * (0 if zero else 1)
    weight = quant.from_torchao(Int4Tensor(data, scale, point, [1, 64], torch.Size((n, k))))
    assert (weight.offsets is None) == zero
    per = [t.t().repeat_interleave(64, 1) for t in (scale, point)]
    assert torch.equal(weight.dequantize(), q.bfloat16() * per[0] + per[1])
    tensors = {"_weight_qdata": data, "_weight_scale": scale, "_weight_zero_point": point}
    golden.same(weight.tensors(), tensors)
    config = {"quant_method": "torchao", "quant_type": {"default": {"_type": "Int4WeightOnlyConfig"}}}
    golden.same(quant.read(tensors, config).tensors(), tensors)
    reason = quant.why_not(weight, (9, 0))
    assert (reason is None) == zero
    if reason is not None:
        with pytest.raises(UnsupportedProblem, match="act_pre_scale"):
            quant.from_torchao(Int4Tensor(data, scale, point, [1, 64], torch.Size((n, k)), torch.ones(k)))


def tile_packed(q: Tensor) -> Tensor:
    """torch's ``_convert_weight_to_int4pack`` with eight inner k-tiles, word by word."""
    n, k = q.shape
    table = q.tolist()
    out = torch.empty(n // 8, k // 128, 32, 4, dtype=torch.int64)
    for tile in range(n // 8):
        for outer in range(k // 128):
            for lane in range(32):
                row = table[tile * 8 + lane // 4]
                for pair in range(4):
                    first = outer * 128 + pair * 32 + lane % 4 * 2
                    v = [row[first + at] for at in (0, 1, 8, 9, 16, 17, 24, 25)]
                    out[tile, outer, lane, pair] = sum(v[i] << (4 * j) for j, i in enumerate((0, 2, 4, 6, 1, 3, 5, 7)))
    return torch.where(out >= 1 << 31, out - (1 << 32), out).to(torch.int32)


def test_torchao_tiles() -> None:
    n, k, group = 24, 1024, 64
    q = torch.randint(0, 16, (n, k))
    both = torch.randn(k // group, n, 2).bfloat16()
    tensor = Int4TilePackedTo4dTensor(tile_packed(q), both, [1, group], torch.Size((n, k)))
    per = [both[..., i].t().repeat_interleave(group, 1) for i in range(2)]
    expected = (q - 8).bfloat16() * per[0] + per[1]
    weight = quant.from_torchao(tensor)
    golden.holds(weight, expected, {"_weight_qdata": tensor.qdata, "_weight_scale_and_zero": both})
    config = {"quant_method": "torchao", "quant_type": {"default": {"_type": "Int4WeightOnlyConfig"}}}
    assert torch.equal(quant.read(weight.tensors(), config).dequantize(), expected)
    tensor.shape = torch.Size((20, 700))  # padded to 24 x 1024
    weight = quant.from_torchao(tensor)
    assert torch.equal(weight.dequantize(), expected[:20, :700])
    with pytest.raises(UnsupportedProblem, match="padding"):
        weight.tensors()


def test_other_classes_of_torchao_are_refused() -> None:
    with pytest.raises(UnsupportedProblem, match="not Tensor; quantize with Int4WeightOnlyConfig"):
        quant.from_torchao(torch.zeros(2, 2))
