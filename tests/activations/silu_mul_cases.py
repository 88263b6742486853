"""Shared by the tests of ``silu_mul``: tolerances, arrangements of operands, and cases for Triton's interpreter.

This file is also the script of the child process that runs the cases (see ``tests/interpreted.py``).
"""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import product
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from cutekernels.kernels.triton import activations as kernels
from cutekernels.ops.activations.op import SILU_MUL, SILU_MUL_BACKWARD, GluProblem
from tests.interpreted import DTYPES, fill, in_triton, interpret, nan_outside, serve
from tests.tolerance import FP32_ULP, worst_ratio

OPS = {op.name: op for op in (SILU_MUL, SILU_MUL_BACKWARD)}


# ---- tolerances -----------------------------------------------------------------------------------------


OVERFLOWN = 88.8 / torch.finfo(torch.float32).max


def error_ratio(actual: Tensor, exact: Tensor, magnitude: Tensor, factor: Tensor) -> float:
    """The largest error over its tolerance: an ulp, and 8 ulp of fp32 of the largest term (dgate's may cancel).

    ``factor``, what silu or its derivative is multiplied by, grants what PyTorch loses too where e^-x overflows fp32,
    below gate = -88.7.
    """
    return worst_ratio(actual, exact, 8 * FP32_ULP * magnitude + OVERFLOWN * factor)


def truth(op: str, inputs: list[Tensor]) -> list[tuple[Tensor, Tensor, Tensor]]:
    """For each result: its value in fp64, the magnitude of its terms, and what silu or its slope is multiplied by."""
    *d, g, u = [t.double() for t in inputs]
    s = torch.sigmoid(g)
    if op == "silu_mul":
        return [(g * s * u, (g * s * u).abs(), u.abs())]
    slope = s + g * s * (1 - s)
    return [
        (d[0] * u * slope, (d[0] * u).abs() * s * (1 + g.abs() * (1 - s)), (d[0] * u).abs()),
        (d[0] * g * s, (d[0] * g * s).abs(), d[0].abs()),
    ]


# ---- operands -------------------------------------------------------------------------------------------


def laid(kind: str, i: int, rows: int, cols: int, dtype: torch.dtype, results: int) -> tuple[Tensor, Tensor]:
    """Memory full of NaN, and the view of it that is operand ``i`` of an op with so many ``results``."""
    pitch, col, offset = {
        "dense": (cols, 1, 0),
        "misaligned": (cols, 1, i + 1),
        "halves": (2 * cols, 1, i % 2 * cols),
        "padded": (cols + 16 - cols % 8, 1, 8 * i),
        "every other": (2 * cols, 2, i),
        "transposed": (1, rows, 0) if i % 2 else (cols, 1, 0),
        "expanded rows": (0, 1, 0) if i == results else (cols, 1, 0),
        "expanded everywhere": (0, 0, 0) if i == results else (cols, 1, 0),
    }[kind]
    memory = torch.full((max(1, rows * max(pitch, cols * col) + offset + 64),), float("nan"), dtype=dtype)
    return memory, memory.as_strided((rows, cols), (pitch, col), offset)


def operands(
    kind: str,
    op: Any,
    rows: int,
    cols: int,
    dtype: torch.dtype,
    special: Callable[[str], tuple[Tensor, Tensor] | None] = lambda name: None,
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """(results filled with NaN, inputs, the memory behind each result) in one of several arrangements.

    ``special``: memory and view of an operand that is no matrix of ``rows`` and ``cols``.
    """
    generator = torch.Generator().manual_seed(rows * 1009 + cols)
    n = len(op.results)
    names = enumerate((*op.results, *op.inputs))
    placed = [special(name) or laid(kind, i, rows, cols, dtype, n) for i, name in names]
    for memory, _ in placed[n:]:
        fill(memory, generator)
    views = [view for _, view in placed]
    return views[:n], views[n:], [memory for memory, _ in placed[:n]]


# ---- the child process ----------------------------------------------------------------------------------


def child_case(case: dict[str, Any]) -> dict[str, Any]:
    if "values" in case:
        results = [
            torch.full((len(case["values"]),), 7.0, dtype=DTYPES[case["dtype"]]) for _ in OPS[case["op"]].results
        ]
        inputs = [torch.ones_like(results[0]) for _ in OPS[case["op"]].inputs]
        inputs[-2].copy_(torch.tensor([float(v) for v in case["values"]]))
        interpret(OPS[case["op"]], results, inputs)
        return {"results": [[str(v) for v in r.tolist()] for r in results]}
    results, inputs, memory = operands(case["kind"], OPS[case["op"]], case["rows"], case["cols"], DTYPES[case["dtype"]])
    if case.get("inplace"):
        results = [inputs[-2], *results[1:]]
    exact = truth(case["op"], inputs)
    problem = interpret(OPS[case["op"]], results, inputs, config=case.get("config"), edit=case.get("edit"))
    outside = bool(case.get("inplace")) or all(map(nan_outside, results, memory))
    ratios = [error_ratio(r, *e) for r, e in zip(results, exact, strict=True)]
    return {"ratio": max(ratios), "outside": outside, "problem": problem}


@triton.jit
def slightly_off(x, y, PRECISE):
    return x / (1.0 + tl.exp(-1.01 * y))


def case_of(op: str, kind: str, rows: int, cols: int, dtype: str = "bf16", **more: Any) -> dict[str, Any]:
    return {"op": op, "kind": kind, "rows": rows, "cols": cols, "dtype": dtype} | more


def numerics_cases() -> dict[str, dict[str, Any]]:
    cases: dict[str, dict[str, Any]] = {}
    kinds = [
        "dense",
        "misaligned",
        "halves",
        "padded",
        "every other",
        "transposed",
        "expanded rows",
        "expanded everywhere",
    ]
    for op, kind, (rows, cols) in product(OPS, kinds, [(3, 100), (5, 37), (1, 515)]):
        cases[f"{op} {kind} {rows}x{cols}"] = case_of(op, kind, rows, cols)
    for op, dtype, kind in product(OPS, ("fp16", "fp32"), ("dense", "halves", "every other")):
        cases[f"{op} {kind} {dtype}"] = case_of(op, kind, 7, 130, dtype)
    for op, (rows, cols) in product(OPS, [(0, 8), (8, 0), (1, 1), (9, 1)]):
        cases[f"{op} {rows}x{cols}"] = case_of(op, "dense", rows, cols)
    for name in OPS:
        cases[f"{name} inplace"] = case_of(name, "dense", 4, 300, "fp16", inplace=True)
    rng = random.Random(20)
    for op, text in product(
        OPS.values(), ["rows=9 cols=75 layout=rows", "rows=9 cols=75 layout=strided", "rows=9 cols=75"]
    ):
        problem = GluProblem.parse(text)
        kind = {"rows": "padded", "strided": "every other", "dense": "dense"}[problem.layout]
        for config in rng.sample(in_triton(op, problem), 4):
            cases[f"{op.name} {kind} [{config}]"] = case_of(op.name, kind, 9, 75, config=str(config))
    return cases


VALUES = ["-inf", "inf", "nan", "-100", "-88.7", "-87", "88.5", "100", "-0.0", "0.0", "1e-30", "-2.5"]
CASES = numerics_cases()
SPECIAL = {
    f"{op} {dtype}": {"op": op, "dtype": dtype, "values": VALUES} for op, dtype in product(OPS, ("bf16", "fp32"))
}
ROOT = [str(-1.30 + 0.05 * i / 400) for i in range(401)]
AT_THE_ROOT = {"root": {"op": "silu_mul_backward", "dtype": "fp32", "values": ROOT}}
_SMALL = {"op": "silu_mul", "rows": 5, "cols": 100, "dtype": "bf16"}
PLANTED = {
    "a column forgotten": _SMALL | {"kind": "halves", "edit": {"cols": -1}},
    "a row forgotten": _SMALL | {"kind": "halves", "edit": {"rows": -1}},
    "written past the rows": _SMALL | {"kind": "halves", "edit": {"cols": 1}},
    "up read by gate's pitch": _SMALL | {"kind": "padded", "edit": {"up_row": -4}},
    "out written by another pitch": _SMALL | {"kind": "padded", "edit": {"out_row": -4}},
    "the exponent one per cent off": _SMALL | {"kind": "dense", "planted": "_over_one_plus_exp"},
    "the gradient one per cent off": _SMALL
    | {"op": "silu_mul_backward", "kind": "dense", "planted": "_over_one_plus_exp"},
}


if __name__ == "__main__":
    serve(child_case, {"_over_one_plus_exp": (kernels, slightly_off)})
