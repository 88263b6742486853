"""Types as callers see them; ``make types`` checks it with mypy --strict; it is never run."""

from __future__ import annotations

from pathlib import Path
from typing import Any, assert_type

import torch
from torch import Tensor

import cutekernels as ck


def tensors(x: Tensor, flag: bool, maybe: Tensor | None) -> None:
    assert_type(ck.attention(x, x, x, causal=True), Tensor)
    assert_type(ck.attention(x, x, x, return_lse=True), tuple[Tensor, Tensor])
    assert_type(ck.attention(x, x, x, return_lse=flag), Tensor | tuple[Tensor, Tensor])
    assert_type(ck.decode_attention(x, x, x, x), Tensor)
    assert_type(ck.decode_attention(x, x, x, x, return_lse=True), tuple[Tensor, Tensor])
    assert_type(ck.rms_norm_linear(x, x, x), Tensor)
    assert_type(ck.rms_norm_linear(x, x, x, residual=x), tuple[Tensor, Tensor])
    assert_type(ck.rope(x, x, x, x), tuple[Tensor, Tensor])
    assert_type(ck.rope(x, None, x, x), tuple[Tensor, None])
    assert_type(ck.rope(x, maybe, x, x), tuple[Tensor, Tensor | None])
    assert_type(ck.linear(x, x, activation="silu"), Tensor)


def models(path: Path) -> None:
    assert_type(ck.models.Decoder.from_pretrained(path, dtype=torch.bfloat16, max_batch=2), ck.models.Decoder)
    assert_type(ck.models.Decoder.from_transformers(ck.models.load("folder", progress=False)), ck.models.Decoder)


def quantized(x: Tensor) -> None:
    weight = ck.quant.quantize(x, "int4_g128", symmetric=False)
    assert_type(weight, ck.quant.QuantizedWeight)
    assert_type(weight.dequantize(), Tensor)
    assert_type(weight.tensors(), dict[str, Tensor])
    assert_type(ck.quant.read({"qweight": x}, {"quant_method": "awq"}), ck.quant.QuantizedWeight)
    assert_type(ck.quant.why_not(weight), str | None)
    assert_type(ck.quant.write_config(weight), dict[str, Any])
    assert_type(ck.linear(x, weight, x, activation="silu"), Tensor)
    assert_type(ck.rms_norm_linear(x, None, weight), Tensor)
    assert_type(ck.rms_norm_linear(x, x, weight, x, residual=x), tuple[Tensor, Tensor])
    assert_type(ck.linear_silu_mul(x, weight, norm_weight=x), Tensor)
    assert_type(ck.nn.QuantizedLinear(weight).weight, ck.quant.QuantizedWeight)
    assert_type(ck.nn.QuantizedLinear.from_linear(torch.nn.Linear(8, 8)), ck.nn.QuantizedLinear)


def words_that_do_not_exist(x: Tensor) -> None:
    ck.linear(x, x, activation="swish")  # type: ignore[arg-type]
    ck.gemm(x, x, accumulate="bf16")  # type: ignore[arg-type]
    ck.rms_norm(x, rounding="twice")  # type: ignore[arg-type]
    ck.gelu_mul(x, approximate="erf")  # type: ignore[arg-type]
