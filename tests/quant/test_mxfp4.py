"""MXFP4: gpt-oss's tensors, the order of gate and up, exponents at both ends, stacks of experts."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from cutekernels import quant
from cutekernels.errors import UnsupportedProblem
from tests.quant import golden

VALUES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def exact(blocks: Tensor, scales: Tensor) -> Tensor:
    """The format's definition, fp32: the low nibble is the even element, bit 3 its sign."""
    codes = torch.stack((blocks & 15, blocks >> 4), -1).flatten(-2).long()
    values = VALUES[codes & 7] * (1 - 2 * (codes >> 3))
    return torch.ldexp(values, scales.int()[..., None] - 127).flatten(-2)


def tensors(*shape: int, low: int = 100, high: int = 140) -> tuple[Tensor, Tensor]:
    *rows, k = shape
    blocks = torch.randint(0, 256, (*rows, k // 32, 16), dtype=torch.uint8)
    return blocks, torch.randint(low, high, (*rows, k // 32), dtype=torch.uint8)


@pytest.mark.parametrize(("n", "k"), [(1, 32), (17, 96), (100, 256), (2880, 64)])
def test_a_matrix(n: int, k: int) -> None:
    blocks, scales = tensors(n, k)
    weight = quant.read({"blocks": blocks, "scales": scales}, {"quant_method": "mxfp4"})
    assert (weight.code, weight.group, weight.dtype) == ("e2m1", 32, torch.bfloat16)
    assert torch.equal(weight.dequantize(), exact(blocks, scales).bfloat16())
    assert torch.equal(weight.dequantize().float(), exact(blocks, scales)), "bf16 holds each number"
    golden.same(weight.tensors(), {"blocks": blocks, "scales": scales})


def test_exponents_at_their_ends() -> None:
    blocks, scales = tensors(64, 64, low=0, high=1)
    weight = quant.from_mxfp4(blocks, scales)
    assert torch.equal(weight.dequantize(torch.float32), exact(blocks, scales))
    scales[:] = 152
    assert torch.equal(quant.from_mxfp4(blocks, scales).dequantize(torch.float32), exact(blocks, scales))
    for byte in (153, 255):
        scales[3, 1] = byte
        with pytest.raises(UnsupportedProblem, match=f"bytes of up to 152 for 2 \\*\\* 25, not {byte}"):
            quant.from_mxfp4(blocks, scales)


@pytest.mark.parametrize("interleaved", [False, True])
def test_experts(interleaved: bool) -> None:
    blocks, scales = tensors(3, 128, 96)
    stack = quant.experts_from_mxfp4(blocks, scales, interleaved=interleaved)
    assert stack.shape == (3, 128, 96)
    assert stack.nbytes == blocks.numel() * 2 // 3 * 2 + scales.numel(), "K is padded to 64 alone"
    expected = exact(blocks, scales)
    if interleaved:
        expected = torch.cat((expected[:, 0::2], expected[:, 1::2]), 1)
    assert torch.equal(stack.dequantize(torch.float32), expected)
    golden.same(stack.weight.tensors(), {"blocks": blocks, "scales": scales})
    assert torch.equal(stack.to(torch.float32).dequantize(), expected)


def test_stacks_of_what_is_quantized_alike() -> None:
    dense = torch.randn(3, 128, 256).bfloat16()
    for scheme in ("int4_g128", "fp8_block", "fp8_channel", "mxfp4"):
        weights = [quant.quantize(w, scheme) for w in dense]
        stack = quant.stack(weights)
        assert torch.equal(stack.dequantize(), torch.stack([w.dequantize() for w in weights]))
    with pytest.raises(UnsupportedProblem, match=r"quantized alike; number 1 is .*int4 g128.*, and number 0 is .*e2m1"):
        quant.stack([weights[0], quant.quantize(dense[1], "int4_g128")])
    with pytest.raises(UnsupportedProblem, match="have multiples of 64 rows, and these have 100"):
        quant.stack([quant.quantize(w[:100], "mxfp4") for w in dense])
    with pytest.raises(UnsupportedProblem, match="have multiples of 128 rows in blocks, and these have 64"):
        quant.stack([quant.quantize(dense[0, :64], "fp8_block")])
    with pytest.raises(UnsupportedProblem, match="an expert at least"):
        quant.stack([])
    with pytest.raises(UnsupportedProblem, match="takes a list of QuantizedWeight"):
        quant.stack([*dense])  # type: ignore[list-item]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda b, s: (b[..., :8], s), "shape"),
        (lambda b, s: (b, s[:, :1]), "scales has shape"),
        (lambda b, s: (b.int(), s), "uint8"),
        (lambda b, s: (b[0], s), "blocks are"),
    ],
)
def test_refusals(change: object, said: str) -> None:
    with pytest.raises(UnsupportedProblem, match=said):
        quant.from_mxfp4(*change(*tensors(8, 64)))  # type: ignore[operator]


def test_ties_go_to_the_even_code() -> None:
    w = torch.tensor([[0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 4.0] + [0.0] * 24])
    assert quant.quantize(torch.cat((w, -w)), "mxfp4").dequantize()[:, :8].tolist() == [
        [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 4.0],
        [-0.0, -1.0, -1.0, -2.0, -2.0, -4.0, -4.0, -4.0],
    ]
