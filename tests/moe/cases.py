"""Shared by the tests of routing: truths in fp64 with their tolerances, and cases for Triton's interpreter.

This file is also the script of the child process that runs the cases (see ``tests/interpreted.py``).
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from cutekernels.kernels.triton.moe import route as kernels
from cutekernels.ops.moe.permute import MOE_PERMUTE
from cutekernels.ops.moe.route import MOE_ROUTE, MOE_ROUTE_BACKWARD
from cutekernels.ops.moe.rows import MOE_COMBINE, MOE_COMBINE_BACKWARD, MOE_DISPATCH, MOE_GATHER
from tests.interpreted import DTYPES, H200, interpret, serve
from tests.tolerance import FP32_ULP, worst_ratio

ROUTING = {op.name: op for op in (MOE_ROUTE, MOE_ROUTE_BACKWARD)}
MOVING = {op.name: op for op in (MOE_GATHER, MOE_COMBINE, MOE_COMBINE_BACKWARD)}
OPS: dict[str, Any] = {**ROUTING, "moe_permute": MOE_PERMUTE, **MOVING, "moe_dispatch": MOE_DISPATCH}
OPTIONS = {
    "moe_route": ("top_k", "renormalize"),
    "moe_route_backward": ("top_k", "renormalize"),
    "moe_permute": ("experts",),
    "moe_dispatch": ("experts",),
}

# ---- tolerances -----------------------------------------------------------------------------------------


def ratio(actual: Tensor, exact: Tensor, magnitude: Tensor | None = None) -> float:
    """The largest error over its tolerance: an ulp, and 16 ulp of fp32 of the terms. Integers must agree."""
    if actual.shape != exact.shape:
        return float("inf")
    if not actual.is_floating_point():
        return 0.0 if torch.equal(actual.long(), exact.long()) else float("inf")
    exact = exact.double()
    size = exact.abs() if magnitude is None else magnitude.double()
    return worst_ratio(actual, exact, 16 * FP32_ULP * size, equal_nan=True)


def truth(op: str, inputs: Sequence[Any], **options: Any) -> list[tuple[Tensor, Tensor | None]]:
    """For each result: its value, in fp64 where it is a real number, and the magnitude of the terms it is made of."""
    wide = [t.double() if isinstance(t, Tensor) and t.is_floating_point() else t for t in inputs]
    if op == "moe_route":
        # fp32 subtracts the maximum first: half an ulp of the difference, as a factor.
        weights, ids = MOE_ROUTE.evaluate(wide[0], **options)
        distance = wide[0].amax(-1, keepdim=True) - wide[0].gather(-1, ids.long())
        return [(weights, weights * (1 + distance.nan_to_num(0, 0, 0) / 16)), (ids, None)]
    if op == "moe_permute":
        return [(t, None) for t in MOE_PERMUTE.evaluate(*inputs, **options)]
    if op == "moe_route_backward":
        d, w, ids, logits = wide
        (exact,) = MOE_ROUTE_BACKWARD.evaluate(d, w, ids, logits, **options)
        p = torch.softmax(logits, -1)
        p = torch.zeros_like(p).scatter(-1, ids.long(), w) if options["renormalize"] else p
        spread = torch.zeros_like(p).scatter(-1, ids.long(), d.abs())
        return [(exact, p * (spread + (w * d).abs().sum(-1, keepdim=True)) * (1 + logits.abs().amax() / 16))]
    if op == "moe_gather":
        return [(MOE_GATHER.evaluate(*wide)[0], None)]
    if op == "moe_dispatch":
        return [(t, None) for t in MOE_DISPATCH.evaluate(*wide, **options)]
    if op == "moe_combine":
        rows, inverse, weights = wide
        positive = None if weights is None else weights.abs()
        return [
            (MOE_COMBINE.evaluate(*wide)[0], MOE_COMBINE.evaluate(rows.abs(), inverse, positive)[0]),
        ]
    dout, rows, inverse, weights = wide
    exact = MOE_COMBINE_BACKWARD.evaluate(*wide)
    size = MOE_COMBINE_BACKWARD.evaluate(dout.abs(), rows.abs(), inverse, weights.abs())
    return list(zip(exact, size, strict=True))


def worst(op: str, results: Sequence[Tensor], inputs: Sequence[Any], **options: Any) -> float:
    return max(ratio(r, *t) for r, t in zip(results, truth(op, inputs, **options), strict=True))


# ---- operands -------------------------------------------------------------------------------------------


def arranged(t: Tensor, kind: str) -> Tensor:
    """A copy of the matrix ``t`` laid out in memory as ``kind`` says."""
    rows, cols = t.shape
    if kind == "transposed":
        return t.t().contiguous().t()
    if kind == "padded":
        return torch.full((rows, cols + 8 - cols % 8 + 8), float("nan"), dtype=t.dtype)[:, 8 : 8 + cols].copy_(t)
    if kind == "odd":  # off any alignment
        return torch.full((rows, cols + 3), float("nan"), dtype=t.dtype)[:, 1 : 1 + cols].copy_(t)
    if kind == "every other":
        return torch.full((rows, 2 * cols), float("nan"), dtype=t.dtype)[:, ::2].copy_(t)
    if kind == "expanded":
        return t[:1].expand(rows, cols)
    assert kind == "dense"
    return t


def logits_of(case: dict[str, Any], draw: torch.Generator) -> Tensor:
    logits = torch.randn((case["rows"], case["cols"]), generator=draw)
    if case.get("ties"):
        logits = (2 * logits).round() / 2
    logits = logits.to(DTYPES[case["dtype"]])
    for row, values in enumerate(case.get("values", [])):
        logits[row] = torch.tensor([float(v) for v in values])
    return arranged(logits, case["kind"])


def posed(case: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """The inputs and options of a case."""
    op, draw = case["op"], torch.Generator().manual_seed(case.get("seed", 7))
    options = {name: case[name] for name in OPTIONS.get(op, ())}
    if op == "moe_permute":
        kind = torch.int64 if case.get("index") == "i64" else torch.int32
        ids = torch.randint(-1, case["experts"] + 1, (case["pairs"],), generator=draw, dtype=kind)
        return [ids], options
    if op == "moe_route":
        return [logits_of(case, draw)], options
    if op == "moe_dispatch":
        kind = torch.int64 if case.get("index") == "i64" else torch.int32
        ids = torch.randint(-2, case["experts"] + 2, (case["rows"], case["top_k"]), generator=draw, dtype=kind)
        return [logits_of(case, draw), ids], options
    if op == "moe_route_backward":
        logits = logits_of(case, draw)
        weights, ids = MOE_ROUTE.evaluate(logits, **options)
        dweights = arranged(torch.randn(weights.shape, generator=draw), case["kind"])
        return [dweights, arranged(weights, case["kind"]), ids, logits], options
    rows, cols, top_k, dtype = case["rows"], case["cols"], case["top_k"], DTYPES[case["dtype"]]
    tokens = arranged(torch.randn((rows, cols), generator=draw).to(dtype), case["kind"])
    pairs = torch.randn((rows * top_k, cols), generator=draw).to(dtype)
    pairs = arranged(pairs, "dense" if case["kind"] == "expanded" else case["kind"])
    inverse = torch.randperm(rows * top_k, generator=draw).int().view(rows, top_k)
    inverse = arranged(inverse, "transposed" if case["kind"] == "transposed" else "dense")
    weights = torch.randn((rows, top_k), generator=draw)
    weights = None if case.get("unweighted") else arranged(weights, case["kind"])
    if op == "moe_gather":
        return [tokens, inverse], options
    return ([pairs, inverse, weights] if op == "moe_combine" else [tokens, pairs, inverse, weights]), options


# ---- the child process ----------------------------------------------------------------------------------


def child_case(case: dict[str, Any]) -> dict[str, Any]:
    op = OPS[case["op"]]
    inputs, options = posed(case)
    results = list(op.fresh(*inputs, **options))
    guards = []
    for i, r in enumerate(results):
        memory = torch.full((r.numel() + 64,), -77).to(r.dtype)  # what lies behind a result is not written
        results[i] = memory[: r.numel()].view(r.shape)
        guards.append(memory[r.numel() :])
    problem = interpret(op, results, inputs, config=case.get("config"), edit=case.get("edit"), **options)
    found = [ratio(r, *t) for r, t in zip(results, truth(case["op"], inputs, **options), strict=True)]
    outside = all(bool((g == -77).all()) for g in guards)
    return {"problem": problem, "ratio": max(found), "ratios": found, "outside": outside}


@triton.jit
def _unordered(x):
    """Negative floats left in the order of their bits: a planted bug."""
    return x.to(tl.float32).to(tl.int32, bitcast=True) >> (16 if x.dtype.primitive_bitwidth == 16 else 0)


@triton.jit
def _off(x):
    """1 % off: a planted bug."""
    return tl.exp(1.01 * x)


def _named(cases: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {" ".join(f"{k}={v}" for k, v in c.items() if k != "values"): c for c in cases}


_ODD = [  # rows of special values: NaN, infinities, ties, zeros of both signs, nothing but -inf
    ["-inf"] * 8,
    ["nan", "0", "1", "2", "nan", "3", "4", "5"],
    ["inf", "1", "inf", "-inf", "2", "3", "4", "5"],
    ["0", "-0", "0", "-0", "0", "-0", "0", "-0"],
    ["-1", "-2", "-3", "-inf", "-5", "-1", "-2", "-3"],
    ["1e-30", "-1e-30", "0", "-0", "1", "1", "1", "1"],
]


def numerics_cases() -> dict[str, dict[str, Any]]:
    cases: list[dict[str, Any]] = []
    route = {"rows": 5, "cols": 20, "top_k": 3, "renormalize": True, "kind": "dense"}
    for method in ("rounds", "sort"):
        config = f"tokens=4 warps=1 method={method}"
        for dtype in DTYPES:
            cases += [
                {"op": "moe_route", **route, "dtype": dtype, "ties": True, "config": config},
                {"op": "moe_route", **route, "dtype": dtype, "renormalize": False, "kind": "odd", "config": config},
                {"op": "moe_route", **route, "dtype": dtype, "rows": 6, "cols": 8, "values": _ODD, "config": config},
            ]
    for kind in ("transposed", "padded", "every other", "expanded"):
        cases.append({"op": "moe_route", **route, "dtype": "bf16", "kind": kind})
    for rows, cols, top_k in [(1, 1, 1), (3, 7, 7), (9, 8, 2), (2, 33, 32), (2, 512, 10), (1, 300, 1)]:
        cases.append({"op": "moe_route", **route, "rows": rows, "cols": cols, "top_k": top_k, "dtype": "fp32"})
    for kind in ("dense", "odd", "transposed", "padded"):
        for renormalize in (True, False):
            back = route | {"op": "moe_route_backward", "renormalize": renormalize, "kind": kind}
            cases.append({**back, "dtype": "bf16" if kind == "odd" else "fp32"})
    cases.append({"op": "moe_route_backward", **route, "kind": "expanded", "dtype": "fp16"})

    for pairs, experts in [(0, 5), (1, 1), (77, 6)]:
        cases.append({"op": "moe_permute", "pairs": pairs, "experts": experts})
    cases.append({"op": "moe_permute", "pairs": 300, "experts": 70, "index": "i64"})
    for config in (
        "block=256 programs=1 passes=1 warps=4",
        "block=256 programs=32 passes=1 warps=4",
        "block=256 programs=32 passes=2 warps=4",
    ):
        cases.append({"op": "moe_permute", "pairs": 600, "experts": 6, "config": config})

    for op in MOVING:
        move = {"op": op, "rows": 5, "cols": 70, "top_k": 3, "dtype": "bf16"}
        for kind in ("dense", "odd", "transposed", "expanded"):
            cases.append({**move, "kind": kind})
        cases.append({**move, "kind": "dense", "rows": 2, "cols": 300, "dtype": "fp32", "config": "block=256 warps=1"})
        cases.append({**move, "kind": "every other", "dtype": "fp16", "top_k": 1})
    cases.append({"op": "moe_combine", "rows": 4, "cols": 33, "top_k": 2, "dtype": "bf16", "kind": "dense"})
    cases[-1]["unweighted"] = True

    sent = {"op": "moe_dispatch", "rows": 7, "cols": 300, "top_k": 3, "experts": 5, "kind": "dense", "dtype": "bf16"}
    cases += [{**sent, "dtype": "fp16", "index": "i64"}, {**sent, "cols": 600, "config": "block=512 warps=2"}]
    cases += [{**sent, "kind": kind} for kind in ("odd", "transposed", "every other", "expanded")]
    for rows, cols, top_k, experts in [(0, 8, 2, 4), (1, 0, 2, 4), (1, 1, 1, 1), (8, 4, 32, 70), (128, 24, 2, 1023)]:
        cases.append({**sent, "rows": rows, "cols": cols, "top_k": top_k, "experts": experts, "dtype": "fp32"})

    rng = random.Random(5)
    for name, text in (
        ("moe_route", "tokens=5 experts=20 top_k=3 dtype=fp32"),
        ("moe_route_backward", "tokens=5 experts=20 top_k=3 dtype=fp32"),
        ("moe_gather", "tokens=5 cols=300 top_k=3 dtype=fp32"),
        ("moe_combine", "tokens=5 cols=300 top_k=3 dtype=fp32 weighted=1"),
        ("moe_combine_backward", "tokens=5 cols=300 top_k=3 dtype=fp32 weighted=1"),
    ):
        op = OPS[name]
        problem = op.Problem.parse(text)
        for config in rng.sample(list(op.valid(problem, H200)), 2):
            case = {"op": name, **route, "cols": 20 if "route" in name else 300, "dtype": "fp32"}
            cases.append(case | {"config": str(config)})
    return _named(cases)


CASES = numerics_cases()
_ROUTE = {"op": "moe_route", "rows": 5, "cols": 20, "top_k": 3, "renormalize": True, "kind": "padded", "dtype": "fp32"}
_PERMUTE = {"op": "moe_permute", "pairs": 300, "experts": 6, "config": "block=256 programs=32 passes=2 warps=4"}
_MOVE = {"rows": 5, "cols": 70, "top_k": 3, "dtype": "fp32", "kind": "padded"}
PLANTED = {
    "an expert forgotten": _ROUTE | {"edit": {"experts": -1}, "top_k": 20, "kind": "dense"},
    "a token forgotten": _ROUTE | {"edit": {"tokens": -1}},
    "a token too many": _ROUTE | {"edit": {"tokens": 1}},
    "read by another pitch": _ROUTE | {"edit": {"logits_row": -4}},
    "negative logits out of order": _ROUTE | {"planted": "ordered", "top_k": 20},
    "one per cent off": _ROUTE | {"planted": "_exp"},
    "the gradient of a token forgotten": _ROUTE | {"op": "moe_route_backward", "edit": {"tokens": -1}},
    "dweights by another pitch": _ROUTE | {"op": "moe_route_backward", "edit": {"dweights_row": 1}},
    "a pair forgotten": _PERMUTE | {"edit": {"pairs": -1}},
    "an expert fewer": _PERMUTE | {"edit": {"experts": -1}},
    "programs out of step": _PERMUTE | {"edit": {"run": -256}},
    "a column not copied": _MOVE | {"op": "moe_gather", "edit": {"cols": -4}, "cols": 72},
    "rows by another pitch": _MOVE | {"op": "moe_combine", "edit": {"rows_row": -4}},
    "a pair uncounted": _MOVE | {"op": "moe_dispatch", "experts": 5, "edit": {"tokens": -1}},
    "strangers among experts": _MOVE | {"op": "moe_dispatch", "experts": 5, "edit": {"experts": 2}},
    "a column not sent": _MOVE | {"op": "moe_dispatch", "experts": 5, "edit": {"cols": -4}, "cols": 72},
    "weights by another pitch": _MOVE | {"op": "moe_combine", "edit": {"weights_row": 1}},
    "dout by another pitch": _MOVE | {"op": "moe_combine_backward", "edit": {"dout_row": -4}},
}


if __name__ == "__main__":
    serve(child_case, {"ordered": (kernels, _unordered), "_exp": (kernels, _off)})
