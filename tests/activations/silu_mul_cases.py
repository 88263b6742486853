"""What the tests of ``silu_mul`` share: a judge, arrangements of operands, and cases for Triton's interpreter.

Triton decides at decoration time whether a kernel is interpreted, so interpreted cases run in a child process:
this file as a script, cases as JSON on stdin and one reply each on stdout (see ``interpreted.py``).
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable
from itertools import product
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from cutekernels.ops.activations.op import SILU_MUL, SILU_MUL_BACKWARD, GluProblem
from tests.interpreted import H200, interpret

OPS = {op.name: op for op in (SILU_MUL, SILU_MUL_BACKWARD)}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


# ---- the judge ------------------------------------------------------------------------------------------


OVERFLOWN = 88.8 / torch.finfo(torch.float32).max


def error_ratio(actual: Tensor, exact: Tensor, magnitude: Tensor, factor: Tensor) -> float:
    """Worst error over its tolerance. ``exact`` in fp64, ``magnitude`` the size of the terms it is made of,
    ``factor`` what silu or its derivative is multiplied by.

    Rounding once costs half an ulp of the output's type; twice that is granted (the interpreter truncates to
    bf16), plus 8 ulp of fp32 for the arithmetic, relative to the largest term (dgate crosses zero between terms
    that do not), plus what PyTorch loses too where e^-x overflows fp32, below gate = -88.7.
    """
    kind = torch.finfo(actual.dtype)
    rounded = exact.to(actual.dtype).double()
    _, exponent = torch.frexp(exact.abs().clamp(kind.smallest_normal, kind.max))
    ulp = torch.ldexp(torch.full_like(exact, kind.eps), exponent - 1)
    ratio = (actual.double() - exact).abs() / (ulp + 8 * 2.0**-23 * magnitude + OVERFLOWN * factor)
    ratio = torch.where(rounded.isinf() & (actual.double() == rounded), 0.0, ratio)
    return float(torch.nan_to_num(ratio, nan=1e30, posinf=1e30).max()) if ratio.numel() else 0.0


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


def fill(memory: Tensor, generator: torch.Generator) -> Tensor:
    values = torch.randn(memory.shape, generator=generator)
    values[torch.rand(memory.shape, generator=generator) < 0.02] *= 40  # outliers: exp overflows for half of them
    return memory.copy_(values)


def operands(
    kind: str, op: str, rows: int, cols: int, dtype: torch.dtype
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """(results filled with NaN, inputs, the memory behind each result) in one of several arrangements."""
    generator = torch.Generator().manual_seed(rows * 1009 + cols)
    declared = OPS[op]

    def place(pitch: int, col: int = 1, offset: int = 0) -> tuple[Tensor, Tensor]:
        memory = torch.full((max(1, rows * max(pitch, cols * col) + offset + 64),), float("nan"), dtype=dtype)
        return memory, memory.as_strided((rows, cols), (pitch, col), offset)

    arrange: dict[str, Callable[[int], tuple[int, int, int]]] = {
        "dense": lambda i: (cols, 1, 0),
        "misaligned": lambda i: (cols, 1, i + 1),
        "halves": lambda i: (2 * cols, 1, i % 2 * cols),
        "padded": lambda i: (cols + 16 - cols % 8, 1, 8 * i),
        "every other": lambda i: (2 * cols, 2, i),
        "transposed": lambda i: (1, rows, 0) if i % 2 else (cols, 1, 0),
        "expanded rows": lambda i: (0, 1, 0) if i == len(declared.results) else (cols, 1, 0),
        "expanded everywhere": lambda i: (0, 0, 0) if i == len(declared.results) else (cols, 1, 0),
    }
    placed = [place(*arrange[kind](i)) for i in range(len(declared.results) + len(declared.inputs))]
    results, inputs = placed[: len(declared.results)], placed[len(declared.results) :]
    for memory, _ in inputs:
        fill(memory, generator)
    return [view for _, view in results], [view for _, view in inputs], [memory for memory, _ in results]


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
    results, inputs, memory = operands(case["kind"], case["op"], case["rows"], case["cols"], DTYPES[case["dtype"]])
    if case.get("inplace"):
        results = [inputs[-2], *results[1:]]
    exact = truth(case["op"], inputs)
    problem = interpret(OPS[case["op"]], results, inputs, config=case.get("config"), edit=case.get("edit"))
    outside = True
    for view, whole in zip(results, memory, strict=True):
        if not case.get("inplace"):
            untouched = torch.ones_like(whole, dtype=torch.bool)
            untouched.as_strided(view.shape, view.stride(), view.storage_offset()).fill_(False)
            outside &= bool(whole[untouched].isnan().all())
    ratios = [error_ratio(r, *e) for r, e in zip(results, exact, strict=True)]
    return {"ratio": max(ratios), "outside": outside, "problem": problem}


def child() -> None:
    from cutekernels.kernels.triton import activations as kernels

    cases = json.load(sys.stdin)
    healthy = kernels._over_one_plus_exp
    replies = []
    for case in cases:
        kernels._over_one_plus_exp = slightly_off if case.get("planted") else healthy
        replies.append(child_case(case))
    json.dump(replies, sys.stdout)


@triton.jit
def slightly_off(x, y, PRECISE):
    return x / (1.0 + tl.exp(-1.01 * y))


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
        cases[f"{op} {kind} {rows}x{cols}"] = {"op": op, "kind": kind, "rows": rows, "cols": cols, "dtype": "bf16"}
    for op, dtype, kind in product(OPS, ("fp16", "fp32"), ("dense", "halves", "every other")):
        cases[f"{op} {kind} {dtype}"] = {"op": op, "kind": kind, "rows": 7, "cols": 130, "dtype": dtype}
    for op, (rows, cols) in product(OPS, [(0, 8), (8, 0), (1, 1), (9, 1)]):
        cases[f"{op} {rows}x{cols}"] = {"op": op, "kind": "dense", "rows": rows, "cols": cols, "dtype": "bf16"}
    for name in OPS:
        cases[f"{name} inplace"] = {
            "op": name,
            "kind": "dense",
            "rows": 4,
            "cols": 300,
            "dtype": "fp16",
            "inplace": True,
        }
    rng = random.Random(20)
    for op, text in product(
        OPS.values(), ["rows=9 cols=75 layout=rows", "rows=9 cols=75 layout=strided", "rows=9 cols=75"]
    ):
        problem = GluProblem.parse(text)
        kind = {"rows": "padded", "strided": "every other", "dense": "dense"}[problem.layout]
        for config in rng.sample(list(op.valid(problem, H200)), 4):
            key = f"{op.name} {kind} [{config}]"
            cases[key] = {"op": op.name, "kind": kind, "rows": 9, "cols": 75, "dtype": "bf16", "config": str(config)}
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
    "the exponent one per cent off": _SMALL | {"kind": "dense", "planted": True},
    "the gradient one per cent off": _SMALL | {"op": "silu_mul_backward", "kind": "dense", "planted": True},
}


if __name__ == "__main__":
    child()
