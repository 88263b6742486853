"""quantize: nearest codes, by the equations of its docstring."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cutekernels import quant
from cutekernels.errors import UnsupportedProblem
from cutekernels.quant.formats.own import SCHEMES
from tests.quant import golden

GRID = {"int4_g32": 32, "int4_g64": 64, "int4_g128": 128, "mxfp4": 32}


@pytest.mark.parametrize(("n", "k"), [(1, 64), (17, 100), (130, 300)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("scheme", sorted(SCHEMES))
def test_no_code_is_nearer(scheme: str, dtype: torch.dtype, n: int, k: int) -> None:
    w = torch.randn(n, k).to(dtype)
    weight = quant.quantize(w, scheme)
    assert weight.dtype == dtype
    assert weight.format == "cutekernels"
    found = weight.dequantize(torch.float32).double()
    exact = w.double()
    if scheme == "fp8_block":
        size = torch.empty(n, k, dtype=torch.float64)
        for i in range(0, n, 128):
            for j in range(0, k, 128):
                size[i : i + 128, j : j + 128] = exact[i : i + 128, j : j + 128].abs().max()
    else:
        group = GRID.get(scheme, k)
        size = torch.cat([part.abs().amax(1, keepdim=True).expand_as(part) for part in exact.split(group, 1)], 1)
    if scheme.startswith("int"):
        steps = 7.5 if scheme.startswith("int4") else 127
        bound = size / steps * (0.5 + steps / 2048) + 1e-12  # half a step, and the scale rounded to fp16
    elif scheme == "mxfp4":
        bound = exact.abs() / 4 + torch.exp2(size.log2().floor() - 2) / 4  # above 6 scales it is 6; a bit of mantissa
    else:
        bound = exact.abs() / 16 * 1.001 + size / 448 * 2.0**-10  # three bits of mantissa, subnormals
    assert bool(((found - exact).abs() <= bound).all())


def test_zeros_of_the_group_s_own_are_better_for_lopsided_weights() -> None:
    w = torch.rand(20, 256) + 0.5
    errors = []
    for symmetric in (True, False):
        weight = quant.quantize(w, "int4_g64", symmetric=symmetric)
        assert (weight.zeros is None) == symmetric
        errors.append(float((weight.dequantize() - w).abs().max()))
    assert errors[1] < errors[0]


def test_asymmetric_codes_are_those_of_the_equations() -> None:
    w = torch.tensor([[-1.0, 0.0, 0.45, 2.0] * 16])  # s = 0.2, z = 5
    weight = quant.quantize(w, "int4_g64", symmetric=False)
    assert weight.zeros is not None
    assert weight.zeros[0, 0] == 5
    s = float(torch.tensor(0.2).half())
    assert weight.dequantize()[0, :4].tolist() == pytest.approx([-5 * s, 0, 2 * s, 10 * s])


@pytest.mark.parametrize("scheme", sorted(SCHEMES))
def test_zero_weights(scheme: str) -> None:
    weight = quant.quantize(torch.zeros(3, 130), scheme)
    assert not weight.dequantize().any()


def test_scales_beyond_fp16_are_kept_in_fp32() -> None:
    assert quant.quantize(torch.randn(2, 64), "int4_g32").scales.dtype == torch.float16
    for factor in (1e-6, 1e7):
        w = torch.randn(2, 64) * factor
        weight = quant.quantize(w, "int4_g32")
        assert weight.scales.dtype == torch.float32
        assert float((weight.dequantize() - w).abs().max()) < 0.4 * factor


def test_a_quantized_weight_is_a_fixed_point() -> None:
    w = quant.quantize(torch.randn(40, 256), "fp8_channel").dequantize()
    assert torch.equal(quant.quantize(w, "fp8_channel").dequantize(), w)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("scheme", sorted(SCHEMES))
def test_round_trip_through_a_file(scheme: str, symmetric: bool) -> None:
    if not symmetric and not scheme.startswith("int4"):
        with pytest.raises(UnsupportedProblem, match="has no zeros"):
            quant.quantize(torch.randn(2, 64), scheme, symmetric=False)
        return
    weight = quant.quantize(torch.randn(50, 200).bfloat16(), scheme, symmetric=symmetric)
    config = {"quant_method": "cutekernels", "scheme": scheme}
    read = quant.read(weight.tensors(), config, dtype=torch.bfloat16)
    golden.holds(read, weight.dequantize(), weight.tensors())


@pytest.mark.parametrize(
    ("weight", "scheme", "said"),
    [
        (torch.zeros(2, 2), "int4_g12", "Did you mean 'int4_g128'"),
        (torch.zeros(2, 2), "int5", "a scheme is one of"),
        (torch.zeros(2), "int4", "takes a matrix of fp16, bf16 or fp32, not torch.float32 \\(2,\\)"),
        (torch.zeros(0, 4), "int4", "takes a matrix of .*, not an empty one of"),
        (torch.zeros(2, 2, dtype=torch.int8), "int4", "not torch.int8"),
        (torch.full((2, 2), float("nan")), "int4", "NaN or infinite"),
        (torch.full((2, 2), float("inf")), "fp8_channel", "NaN or infinite"),
        (torch.zeros(2, 2, device="meta"), "int4", "a dense tensor with values, not one of torch.strided on meta"),
        ([[1.0]], "int4", "a dense tensor with values, not list"),
        (torch.zeros(2, 2), ["int4"], "a scheme is one of"),
    ],
)
def test_what_is_refused(weight: Any, scheme: Any, said: str) -> None:
    with pytest.raises(UnsupportedProblem, match=said):
        quant.quantize(weight, scheme)
