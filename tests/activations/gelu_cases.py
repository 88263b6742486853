"""Shared by the tests of ``gelu_mul`` and ``bias_gelu``: truth, arrangements of operands, and interpreted cases.

This file is also the script of the child process that runs the cases (see ``tests/interpreted.py``). ``gelu_mul``
shares its schedule with ``silu_mul``, whose tests cover it: here are its activations, and all of ``bias_gelu``.
"""

from __future__ import annotations

import math
import random
from itertools import product
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from cutekernels.kernels.triton import activations as kernels
from cutekernels.ops.activations.op import (
    BIAS_GELU,
    BIAS_GELU_BACKWARD,
    GELU_MUL,
    GELU_MUL_BACKWARD,
    BiasGeluProblem,
    slab_rows,
    slabs,
)
from tests.activations import silu_mul_cases
from tests.activations.silu_mul_cases import case_of
from tests.interpreted import DTYPES, H200, interpret, nan_outside, serve
from tests.tolerance import FP32_ULP, worst_ratio

OPS = {op.name: op for op in (GELU_MUL, GELU_MUL_BACKWARD, BIAS_GELU, BIAS_GELU_BACKWARD)}
APPROXIMATE = ("none", "tanh")


# ---- tolerances -----------------------------------------------------------------------------------------


def gelu(x: Tensor, approximate: str) -> tuple[Tensor, Tensor, Tensor]:
    """The share of ``x`` that passes, its part of the slope, and the size of the slope's terms, in fp64.

    The formulas are written in another way than the reference's.
    """
    if approximate == "none":
        share = torch.special.ndtr(x)
        rest = x * torch.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)
    else:
        share = 1 / (1 + torch.exp(-2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
        rest = x * share * (1 - share) * 2 * math.sqrt(2 / math.pi) * (1 + 3 * 0.044715 * x**2)
    return share, rest, share + rest.abs()


def truth(
    op: str, inputs: list[Tensor], approximate: str, slab: int | None = None
) -> list[tuple[Tensor, Tensor, Tensor]]:
    """For each result: its value in fp64, the magnitude of its terms, and what multiplies the normal distribution.

    ``slab``: rows per partial sum, given where ``inputs`` are only a part of a call's operands.
    """
    wide = [t.double() for t in inputs]
    if op in ("bias_gelu", "bias_gelu_backward"):
        *d, x, bias = wide
        z = x + bias
        share, rest, size = gelu(z, approximate)
        if not d:  # the sum is rounded to fp32, by torch as well
            return [(z * share, (z * share).abs(), z.abs() + x.abs() + bias.abs())]
        dx, magnitude = d[0] * (share + rest), d[0].abs() * size
        factor = d[0].abs() * (1 + x.abs() + bias.abs())
        if not len(dx):
            return [(dx, magnitude, factor)] * 2
        sums = [torch.stack([p.sum(0) for p in t.split(slab or slab_rows(len(dx)))]) for t in (dx, magnitude, factor)]
        return [(dx, magnitude, factor), (sums[0], sums[1], sums[2])]
    *d, g, u = wide
    share, rest, size = gelu(g, approximate)
    if not d:
        return [(g * share * u, (g * share * u).abs(), (g * u).abs())]
    return [
        (d[0] * u * (share + rest), (d[0] * u).abs() * size, (d[0] * u).abs()),
        (d[0] * g * share, (d[0] * g * share).abs(), (d[0] * g).abs()),
    ]


def error_ratio(actual: Tensor, exact: Tensor, magnitude: Tensor, factor: Tensor, precise: bool) -> float:
    """The largest error over its tolerance: an ulp, and 16 ulp of fp32 of the terms for a ``precise`` (fp32) result.

    A half's terms grant 2^-16, a 16th of its own rounding. ``factor``, what multiplies the distribution function,
    grants 2^-23, which torch loses as well where 1 + erf or 1 + tanh cancels.
    """
    return worst_ratio(actual, exact, (16 * FP32_ULP if precise else 2.0**-16) * magnitude + FP32_ULP * factor)


# ---- operands -------------------------------------------------------------------------------------------


def operands(
    kind: str, op: str, rows: int, cols: int, dtype: torch.dtype, bias_dtype: torch.dtype
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """As those of ``silu_mul``, with partial sums and a bias."""

    def special(name: str) -> tuple[Tensor, Tensor] | None:
        if name == "partials":
            whole = torch.full((slabs(rows) * cols + 64,), float("nan"))
            return whole, whole[: slabs(rows) * cols].view(slabs(rows), cols)
        if name == "bias":
            whole = torch.full((2 * cols + 64,), float("nan"), dtype=bias_dtype)
            step = 2 if kind == "every other" else 1
            return whole, whole.as_strided((cols,), (step,), 1 if kind == "misaligned" else 0)
        return None

    return silu_mul_cases.operands(kind, OPS[op], rows, cols, dtype, special)


# ---- the child process ----------------------------------------------------------------------------------


def child_case(case: dict[str, Any]) -> dict[str, Any]:
    op, dtype = OPS[case["op"]], DTYPES[case["dtype"]]
    if "values" in case:
        values = torch.tensor([float(v) for v in case["values"]], dtype=dtype)
        out = torch.full_like(values, 7.0)
        other = torch.zeros_like(values) if op is BIAS_GELU else torch.ones_like(values)
        shaped = [t if op is BIAS_GELU and t is other else t[None] for t in (out, values, other)]
        interpret(op, shaped[:1], shaped[1:], approximate=case["approximate"])
        return {"results": [str(v) for v in out.tolist()]}
    bias_dtype = torch.float32 if case.get("bias") == "fp32" else dtype
    results, inputs, memory = operands(case["kind"], case["op"], case["rows"], case["cols"], dtype, bias_dtype)
    if case.get("inplace"):
        results = [inputs[0], *results[1:]]
    exact = truth(case["op"], [t.clone() for t in inputs], case["approximate"])
    problem = interpret(
        op, results, inputs, config=case.get("config"), edit=case.get("edit"), approximate=case["approximate"]
    )
    outside = bool(case.get("inplace")) or all(map(nan_outside, results, memory))
    ratios = [error_ratio(r, *e, precise=dtype is torch.float32) for r, e in zip(results, exact, strict=True)]
    return {"ratio": max(ratios), "outside": outside, "problem": problem}


@triton.jit
def slightly_off(x, PRECISE):
    return 0.5 + 0.5 * tl.erf(x * 0.7)


def _case(op: str, kind: str, rows: int, cols: int, dtype: str, approximate: str, **more: Any) -> dict[str, Any]:
    return case_of(op, kind, rows, cols, dtype, approximate=approximate, **more)


def numerics_cases() -> dict[str, dict[str, Any]]:
    cases: dict[str, dict[str, Any]] = {}
    for op, approximate, dtype in product(OPS, APPROXIMATE, DTYPES):
        cases[f"{op} {approximate} {dtype}"] = _case(op, "dense", 7, 130, dtype, approximate)
    for op in ("gelu_mul", "gelu_mul_backward"):
        cases[f"{op} halves"] = _case(op, "halves", 5, 100, "bf16", "none")
    kinds = ("misaligned", "padded", "every other", "transposed", "expanded rows", "expanded everywhere")
    for i, (op, kind) in enumerate(product(("bias_gelu", "bias_gelu_backward"), kinds)):
        bias = ("same", "fp32")[i % 2]
        for rows, cols in ((3, 100), (37, 43)):
            name = f"{op} {kind} {rows}x{cols} bias={bias}"
            cases[name] = _case(op, kind, rows, cols, "bf16", APPROXIMATE[i // 2 % 2], bias=bias)
    for rows, cols in ((0, 8), (8, 0), (1, 1), (300, 9)):
        for op in ("bias_gelu", "bias_gelu_backward"):
            cases[f"{op} {rows}x{cols}"] = _case(op, "dense", rows, cols, "bf16", "none")
    cases["bias_gelu inplace"] = _case("bias_gelu", "dense", 4, 300, "fp16", "none", inplace=True)
    rng = random.Random(21)
    for op, layout in product((BIAS_GELU, BIAS_GELU_BACKWARD), ("rows", "strided")):
        kind = {"rows": "padded", "strided": "every other"}[layout]
        problem = BiasGeluProblem(37, 75, layout=layout)
        for config in rng.sample(list(op.valid(problem, H200)), 3):
            cases[f"{op.name} [{config}]"] = _case(op.name, kind, 37, 75, "bf16", "tanh", config=str(config))
    return cases


VALUES = ["-inf", "inf", "nan", "-100", "-6", "-3", "-0.75", "100", "-0.0", "0.0", "1e-30", "-1e30", "1e30", "2.5"]
CASES = numerics_cases()
SPECIAL = {
    f"values {op} {approximate} {dtype}": {"op": op, "dtype": dtype, "approximate": approximate, "values": VALUES}
    for op, approximate, dtype in product(("gelu_mul", "bias_gelu"), APPROXIMATE, ("bf16", "fp32"))
}
_FORWARD = _case("bias_gelu", "padded", 11, 100, "bf16", "none")
_BACKWARD = _case("bias_gelu_backward", "padded", 11, 100, "bf16", "none")
PLANTED = {
    "a column forgotten": _FORWARD | {"edit": {"cols": -1}},
    "written past the rows": _FORWARD | {"edit": {"cols": 1}},
    "x read by another pitch": _FORWARD | {"edit": {"x_row": -4}},
    "a slab one row short": _BACKWARD | {"edit": {"slab": -1}},
    "a slab one row long": _BACKWARD | {"edit": {"slab": 1}},
    "a row forgotten": _BACKWARD | {"edit": {"rows": -1}},
    "the bias read by another step": _case("bias_gelu", "every other", 3, 40, "bf16", "none", edit={"bias_col": -1}),
    "the distribution one per cent off": _FORWARD | {"planted": "_normal_cdf"},
    "the slope one per cent off": _case("gelu_mul_backward", "dense", 5, 100, "fp16", "none", planted="_normal_cdf"),
}


if __name__ == "__main__":
    serve(child_case, {"_normal_cdf": (kernels, slightly_off)})
