"""Shared by the tests of the norms: tolerances, arrangements of operands, and cases for Triton's interpreter.

This file is also the script of the child process that runs the cases (see ``tests/interpreted.py``).
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from cutekernels.kernels.triton.norms import forward, gradients
from cutekernels.ops.norms.gradients import LAYER_NORM_BACKWARD, RMS_NORM_BACKWARD
from cutekernels.ops.norms.op import ADD_RMS_NORM, LAYER_NORM, RMS_NORM
from tests.interpreted import DTYPES, H200, fill, in_triton, interpret, nan_outside, serve
from tests.tolerance import FP32_ULP, worst_ratio

OPS: dict[str, Any] = {
    op.name: op for op in (RMS_NORM, ADD_RMS_NORM, LAYER_NORM, RMS_NORM_BACKWARD, LAYER_NORM_BACKWARD)
}
FEW_SMS = replace(H200, sm_count=1)  # programs then stride over many tiles
AFFINE = ("weight", "bias", "dweight", "dbias")


# ---- tolerances -----------------------------------------------------------------------------------------


def error_ratio(actual: Tensor, exact: Tensor, magnitude: Tensor, rounded_before: Tensor | None = None) -> float:
    """The largest error over its tolerance: an ulp, and 16 ulp of fp32 of the terms, for statistics and arithmetic.

    A value ``rounded_before`` it was used grants an ulp of its own.
    """
    slack = 16 * FP32_ULP * magnitude
    if rounded_before is not None:
        slack = slack + torch.finfo(actual.dtype).eps * rounded_before.abs()
    return worst_ratio(actual, exact, slack)


def truth(op: str, results: list[Tensor], args: dict[str, Any]) -> list[tuple[Tensor, ...]]:
    """For each result: its value in fp64, the magnitude of its terms, and what was rounded on the way."""
    a = {name: t.double() if isinstance(t, Tensor) else t for name, t in args.items()}
    eps, offset = a["eps"], a.get("weight_offset", 0.0)
    w = 1.0 if a.get("weight") is None else a["weight"] + offset
    found: list[tuple[Tensor, ...]] = []
    x = a["x"]
    if op == "add_rms_norm":
        u = x + a["residual"]
        found.append((u, u.abs()))
        x = results[1].double()  # y is the norm of the u that was stored
    size = x.abs()
    if op.startswith("layer"):
        size = size + size.mean(-1, keepdim=True)
        x = x - x.mean(-1, keepdim=True)
    rstd = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    v, size = x * rstd, size * rstd
    if not op.endswith("backward"):
        bias = 0.0 if a.get("bias") is None else a["bias"]
        y = v * w + bias
        terms = size * abs(w) + abs(bias)
        once = args.get("rounding", "once") == "once"
        if once:
            return [(y, terms), *found]
        least = torch.finfo(results[0].dtype).smallest_normal  # below it, an ulp of v no longer shrinks with v
        return [(y, terms, v.abs().clamp_min(least) * w), *found]
    d = a["dy"]
    g = d * w
    mean = g.mean(-1, keepdim=True) if op.startswith("layer") else torch.zeros_like(g)
    dx = rstd * (g - mean - v * (g * v).mean(-1, keepdim=True))
    terms = rstd * (
        g.abs() + mean.abs() + g.abs().mean(-1, keepdim=True) + size * (g.abs() * size).mean(-1, keepdim=True)
    )
    if a.get("du") is not None:
        dx, terms = dx + a["du"], terms + a["du"].abs()
    found = [(dx, terms)]
    for result, term, largest in ((results[1], d * v, d.abs() * size), (results[-1], d, d.abs())):
        if result is results[1] and len(found) == 2:
            break
        if result.numel() == 0 and x.shape[-1] > 0:
            found.append((result.double(), result.double()))
        else:
            found.append(tuple(t.reshape(-1, *result.shape).sum(0) for t in (term, largest)))
    return found


# ---- operands -------------------------------------------------------------------------------------------


def arrangement(kind: str, i: int, rows: int, heads: int, cols: int) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    """Shape, strides and offset of operand ``i``."""
    flat, cube = (rows * heads, cols), (rows, heads, cols)
    joint = (heads + i + 1) * cols
    arrange: dict[str, Callable[[], tuple[tuple[int, ...], tuple[int, ...], int]]] = {
        "dense": lambda: (flat, (cols, 1), 0),
        "misaligned": lambda: (flat, (cols, 1), i + 1),
        "padded": lambda: (flat, (cols + 8 + 8 * i, 1), 8 * i),
        "every other": lambda: (flat, (2 * cols, 2), i),
        "transposed": lambda: (flat, (1, rows * heads) if i % 2 else (cols, 1), 0),
        "expanded": lambda: (flat, (0, 1) if i == 3 else (cols, 1), 0),
        "expanded everywhere": lambda: (flat, (0, 0) if i == 3 else (cols, 1), 0),
        "cube": lambda: (cube, (heads * cols, cols, 1), 0),
        "heads of a projection": lambda: (cube, (joint, cols, 1), 0),
        "batch transposed": lambda: (cube, (cols, rows * cols, 1) if i % 2 else (heads * cols, cols, 1), 0),
        "wide columns": lambda: (cube, (1, rows, rows * heads), 0),
    }
    return arrange[kind]()


def operands(case: dict[str, Any]) -> tuple[list[Tensor], list[Any], list[float], list[Tensor]]:
    """(results filled with NaN, inputs, scalars, the memory behind each result of x's shape)."""
    op, dtype = OPS[case["op"]], DTYPES[case["dtype"]]
    rows, heads, cols = case["rows"], case.get("heads", 1), case["cols"]
    generator = torch.Generator().manual_seed(rows * 1009 + cols)
    absent = case.get("absent", ["du"])

    def place(i: int) -> tuple[Tensor, Tensor]:
        shape, strides, offset = arrangement(case["kind"], i, rows, heads, cols)
        reach = sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) if rows * cols else 0
        memory = torch.full((reach + offset + 64,), float("nan"), dtype=dtype)
        return memory, memory.as_strided(shape, strides, offset)

    inputs: list[Any] = []
    for i, name in enumerate(op.inputs):
        if name in absent:
            inputs.append(None)
        elif name in AFFINE:
            wide = (heads, cols) if case.get("per_head") else (cols,)
            kind = torch.float32 if case.get("weight") == "fp32" else dtype
            inputs.append(fill(torch.empty(wide, dtype=kind), generator))
        else:
            memory, view = place(i + 3)
            fill(memory, generator, 3.0 if name == "x" and case.get("off_centre") else 0.0)
            inputs.append(view)
    options = {name: case.get(name, op.Problem.__dataclass_fields__[name].default) for name in op.options}
    memories, results = [], []
    for i, like in enumerate(op.fresh(*inputs, **options)):
        if like.shape == inputs[0].shape and i < (2 if op.name == "add_rms_norm" else 1):
            memory, view = place(i)
            memories.append(memory)
            results.append(view)
        else:
            results.append(torch.full_like(like, float("nan")))
    scalars = {"eps": 1e-5, "weight_offset": case.get("weight_offset", 0.0)}
    return results, inputs, [scalars[name] for name in op.scalars], memories


# ---- the child process ----------------------------------------------------------------------------------


def child_case(case: dict[str, Any]) -> dict[str, Any]:
    op = OPS[case["op"]]
    results, inputs, scalars, memories = operands(case)
    options = {name: case.get(name, op.Problem.__dataclass_fields__[name].default) for name in op.options}
    if "values" in case:
        x = inputs[op.inputs.index("x")]
        x.view(-1)[: len(case["values"])] = torch.tensor([float(v) for v in case["values"]])
    args = {n: t.clone() if isinstance(t, Tensor) else t for n, t in zip(op.inputs, inputs, strict=True)}
    args |= dict(zip(op.scalars, scalars, strict=True)) | options
    if case.get("inplace"):
        results = [inputs[0], *results[1:]]
        if op.name == "add_rms_norm":
            results[1] = inputs[1]
    spec = FEW_SMS if case.get("few_sms") else H200
    problem = interpret(
        op, results, inputs, scalars, config=case.get("config"), edit=case.get("edit"), spec=spec, **options
    )
    if "values" in case:
        return {"results": [[str(v) for v in r.flatten().tolist()] for r in results], "problem": problem}
    outside = bool(case.get("inplace")) or all(map(nan_outside, results, memories))
    ratios = [error_ratio(r, *e) for r, e in zip(results, truth(op.name, results, args), strict=True)]
    return {"ratio": max(ratios), "outside": outside, "problem": problem}


_healthy_affine, _healthy_at, _healthy_sums = forward._affine, forward._at, gradients._sums


@triton.jit
def unrounded(given, how, row, head, r, c, inside, EVICT):
    value = tl.load(_healthy_at(given.x, row, head, r, c), mask=inside, other=0.0).to(tl.float32)
    return value + tl.load(_healthy_at(given.residual, row, head, r, c), mask=inside, other=0.0).to(tl.float32)


@triton.jit
def next_head(operand, head, c, inside, PRESENT):
    return _healthy_affine(operand, (head + 1) % 4, c, inside, PRESENT)


@triton.jit
def one_per_cent_off(a, b):
    first, second = _healthy_sums(a, b)
    return first, second * 1.01


# ---- the cases ------------------------------------------------------------------------------------------

KINDS = ["dense", "misaligned", "padded", "every other", "transposed", "expanded", "expanded everywhere"]
CUBES = ["cube", "heads of a projection", "batch transposed", "wide columns"]


def numerics_cases() -> dict[str, dict[str, Any]]:
    cases: dict[str, dict[str, Any]] = {}
    small = {"rows": 5, "cols": 72, "dtype": "bf16"}
    for op, kind in product(OPS, KINDS):
        cases[f"{op} {kind}"] = small | {"op": op, "kind": kind}
    for op, kind in product(OPS, CUBES):
        per_head = kind != "batch transposed" and op != "add_rms_norm"
        cases[f"{op} {kind}"] = small | {"op": op, "kind": kind, "rows": 3, "heads": 4, "per_head": per_head}
    for op, dtype in product(OPS, ("fp16", "fp32")):
        cases[f"{op} {dtype}"] = small | {"op": op, "kind": "padded", "dtype": dtype, "off_centre": True}
        cases[f"{op} {dtype} few SMs"] = small | {
            "op": op,
            "kind": "dense",
            "dtype": dtype,
            "rows": 11,
            "few_sms": True,
        }
    for op in OPS:
        cases[f"{op} fp32 weight"] = small | {"op": op, "kind": "dense", "weight": "fp32", "off_centre": True}
        cases[f"{op} no weight"] = small | {"op": op, "kind": "dense", "absent": ["weight", "bias", "du"]}
        cases[f"{op} no rows"] = small | {"op": op, "kind": "dense", "rows": 0}
        cases[f"{op} one column"] = small | {"op": op, "kind": "dense", "cols": 1}
        for cols in (37, 70, 68):
            cases[f"{op} {cols} columns"] = small | {"op": op, "kind": "dense", "rows": 2, "cols": cols}
        cases[f"{op} heads, few SMs"] = small | {
            "op": op, "kind": "cube", "rows": 7, "heads": 3, "cols": 40, "per_head": True, "few_sms": True
        }  # fmt: skip
        cases[f"{op} in place"] = small | {"op": op, "kind": "dense", "inplace": True, "dtype": "fp16"}
        chunk = f"block_rows=1 block_cols=1024 resident=0 warps=4 per_sm={int('back' in op)} stages=1"
        wide = {"config": chunk, "op": op, "kind": "dense", "rows": 2, "cols": 8300, "dtype": "fp16", "few_sms": True}
        cases[f"{op} in chunks"] = wide
        cases[f"{op} in chunks, in place"] = wide | {"rows": 1, "inplace": True, "weight": "fp32"}
        cases[f"{op} in chunks, strided"] = wide | {"cols": 1100, "kind": "every other", "config": None}
    for op in ("rms_norm", "add_rms_norm", "rms_norm_backward"):
        cases[f"{op} offset"] = small | {"op": op, "kind": "dense", "weight_offset": 1.0, "shifted": True}
    for op, dtype in product(("rms_norm", "add_rms_norm"), ("bf16", "fp16")):
        cases[f"{op} huggingface {dtype}"] = small | {
            "op": op, "kind": "dense", "dtype": dtype, "rounding": "huggingface"
        }  # fmt: skip
    residual = small | {"op": "rms_norm_backward", "absent": []}
    cases["rms_norm_backward du"] = residual | {"kind": "padded"}
    cases["rms_norm_backward du, few SMs"] = residual | {"kind": "dense", "few_sms": True, "rows": 11}
    cases["rms_norm_backward du, in chunks"] = residual | {"kind": "every other", "rows": 2, "cols": 1100}
    for op in ("rms_norm_backward", "layer_norm_backward"):
        cases[f"{op} frozen"] = small | {"op": op, "kind": "dense", "dweight": False, "dbias": "none"}
    for wanted in ({"dweight": False}, {"dbias": "none"}):
        cases[f"layer_norm_backward {wanted}"] = small | {"op": "layer_norm_backward", "kind": "padded"} | wanted
    cases["layer_norm_backward fp32 bias"] = small | {"op": "layer_norm_backward", "kind": "dense", "dbias": "fp32"}
    return cases | config_cases()


def config_cases() -> dict[str, dict[str, Any]]:
    """Random valid configs, persistent programs among them."""
    cases: dict[str, dict[str, Any]] = {}
    rng = random.Random(20)
    for name, op in OPS.items():
        problem = op.Problem(rows=19, cols=75, dtype="bf16", align=2)
        chosen = rng.sample(in_triton(op, problem, FEW_SMS), 3)
        problem = op.Problem(rows=19, cols=72, dtype="bf16")
        stay = [c for c in in_triton(op, problem, FEW_SMS) if c.stages > 1]
        for cols, config in [*((75, c) for c in chosen), *((72, c) for c in rng.sample(stay, min(2, len(stay))))]:
            cases[f"{name} {cols} [{config}]"] = {
                "op": name, "kind": "dense", "rows": 19, "cols": cols, "dtype": "bf16", "config": str(config),
                "few_sms": True,
            }  # fmt: skip
    return cases


CASES = numerics_cases()
VALUES = ["-inf", "inf", "nan", "1e30", "1", "-2", "0", "3"]
SPECIAL = {
    f"{op} {dtype} {value}": {
        "op": op,
        "kind": "dense",
        "rows": 2,
        "cols": 40,
        "dtype": dtype,
        "values": ["1", value, "-2"],
    }
    for (op, dtype), value in product(
        [("rms_norm", "bf16"), ("layer_norm", "bf16"), ("rms_norm", "fp32")], ["-inf", "inf", "nan", "1e30"]
    )
}
_SMALL = {"op": "rms_norm", "rows": 5, "cols": 100, "dtype": "bf16", "kind": "padded"}
_BACK = _SMALL | {"op": "rms_norm_backward", "kind": "dense"}
PLANTED = {
    "a column forgotten": _SMALL | {"edit": {"cols": -1}},
    "a row forgotten": _SMALL | {"edit": {"rows": -1}},
    "written past the columns": _SMALL | {"edit": {"cols": 1}},
    "x read by another pitch": _SMALL | {"edit": {"x_row": -8}},
    "y written by another pitch": _SMALL | {"edit": {"y_row": -8}},
    "another head's weights": _SMALL | {"kind": "cube", "heads": 4, "rows": 3, "per_head": True, "planted": "_affine"},
    "the sum normalised before it is rounded": _SMALL | {"op": "add_rms_norm", "planted": "_summed", "rows": 40},
    "the gradient one per cent off": _BACK | {"planted": "_sums", "dtype": "fp32"},
    "a gradient's row forgotten": _BACK | {"edit": {"rows": -1}},
    "a part forgotten": _BACK | {"edit": {"then.parts": -1}},
    "a part of two forgotten": _BACK | {"op": "layer_norm_backward", "edit": {"then.parts": -1}},
    "a column of the parts forgotten": _BACK | {"edit": {"then.cols": -1}},
}


if __name__ == "__main__":
    serve(
        child_case,
        {"_affine": (forward, next_head), "_summed": (forward, unrounded), "_sums": (gradients, one_per_cent_off)},
    )
