"""Shared by the tests of ``sample_filter``: an independent truth, its comparison, and cases for Triton's interpreter.

This file is also the script of the child process that runs the cases (see ``tests/interpreted.py``).
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from cutekernels.kernels.triton import sampling as kernels
from cutekernels.ops.sampling.op import SAMPLE_FILTER
from tests.interpreted import DTYPES, interpret, serve

FILTERS = ("by_k", "by_p", "by_min_p")


def kept_of(row: list[float], temperature: float, top_k: int, top_p: float, min_p: float) -> tuple[set[int], bool]:
    """The columns that stay, straight from the definition, one token after another in fp64.

    The flag tells whether a running sum or a mass is within 1e-6 of its bound: there the masses' own definition
    decides, and this one cannot tell.
    """
    ranks = [math.inf if math.isnan(x) else x for x in row]  # of rows without both NaN and inf
    most = max(ranks)
    if temperature <= 0:
        return {ranks.index(most)}, False
    mass = [1.0 if x == most else math.exp((x - most) / temperature) for x in ranks]
    kept, close = set(range(len(row))), False
    if 0 < top_k < len(row):
        kth = sorted(ranks, reverse=True)[top_k - 1]
        kept = {i for i in kept if ranks[i] >= kth}
    if top_p < 1:
        total, running, least = math.fsum(mass[i] for i in kept), 0.0, most
        for i in sorted(kept, key=lambda i: -ranks[i]):
            running += mass[i]
            least = ranks[i]
            close |= abs(running / total - top_p) < 1e-6
            if running >= top_p * total:
                break
        kept = {i for i in kept if ranks[i] >= least}
    if min_p > 0:
        close |= any(abs(m - min_p) < 1e-6 for m in mass if m < 1)
        kept = {i for i in kept if mass[i] >= min(min_p, 1.0)}
    return kept, close


def fault(out: Tensor, logits: Tensor, parameters: list[list[float]]) -> str:
    """The fault of a filtered matrix, "" for none. ``parameters``: four numbers for each row."""
    kind = torch.finfo(out.dtype)
    for r, (row, got) in enumerate(zip(logits.tolist(), out.tolist(), strict=True)):
        temperature, top_k, top_p, min_p = parameters[r]
        kept, close = kept_of(row, temperature, int(top_k), top_p, min_p)
        if close:
            continue
        for i, (x, y) in enumerate(zip(row, got, strict=True)):
            wanted = (x / temperature if temperature > 0 else x) if i in kept else -math.inf
            if math.isnan(wanted) or math.isinf(wanted):
                right = y == wanted or (math.isnan(y) and math.isnan(wanted))
            else:
                right = abs(y - wanted) <= kind.eps * abs(wanted) + kind.smallest_normal  # the interpreter truncates
            if not right:
                return f"row {r}, column {i}: {y}, not {wanted}"
    return ""


def numbers_of(case: dict[str, Any], rows: int) -> tuple[list[Tensor | None], list[Any], list[list[float]]]:
    """A case's parameters by row, those that are numbers, and all of them for each row."""
    tensors: list[Tensor | None] = []
    scalars: list[Any] = []
    each: list[list[float]] = [[] for _ in range(rows)]
    for name, neutral in (("temperature", 1.0), ("top_k", 0), ("top_p", 1.0), ("min_p", 0.0)):
        value = case.get(name, neutral)
        if isinstance(value, list):
            tensors.append(torch.tensor(value, dtype=torch.int32 if name == "top_k" else torch.float32))
            scalars.append(neutral)
        else:
            tensors.append(None)
            scalars.append(value)
        for r in range(rows):
            given = value[r] if isinstance(value, list) else value
            each[r].append(given if name == "top_k" else torch.tensor(float(given)).item())
    return tensors, scalars, each


def options_of(case: dict[str, Any]) -> dict[str, bool]:
    neutral = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
    return {f: case.get(n, v) != v for f, (n, v) in zip(FILTERS, neutral.items(), strict=True)}


def logits_of(case: dict[str, Any]) -> Tensor:
    draw = torch.Generator().manual_seed(case.get("seed", 3))
    dtype = DTYPES[case.get("dtype", "fp32")]
    if "values" in case:
        logits = torch.tensor([[float(v) for v in row] for row in case["values"]]).to(dtype)
    else:
        logits = torch.randn((case["rows"], case["cols"]), generator=draw) * 3
        logits = (logits.round() if case.get("ties") else logits).to(dtype)
    if case.get("kind") == "transposed":
        return logits.t().contiguous().t()
    if case.get("kind") == "sliced":
        return torch.full((logits.shape[0], logits.shape[1] + 5), 50.0, dtype=dtype)[:, 3:-2].copy_(logits)
    return logits


def child_case(case: dict[str, Any]) -> dict[str, Any]:
    logits = logits_of(case)
    tensors, scalars, each = numbers_of(case, logits.shape[0])
    memory = torch.full((logits.numel() + 64,), 7.0, dtype=logits.dtype)
    out = memory[: logits.numel()].view(logits.shape)
    inputs = [logits, *tensors]
    options: dict[str, Any] = options_of(case)
    problem = interpret(
        SAMPLE_FILTER, [out], inputs, scalars, config=case.get("config"), edit=case.get("edit"), **options
    )
    (expected,) = SAMPLE_FILTER.evaluate(*inputs, *scalars, **options)
    return {
        "problem": problem,
        "fault": fault(out, logits, each),
        "as on the CPU": torch.equal(out.isneginf(), expected.isneginf()),
        "outside": bool((memory[logits.numel() :] == 7).all()),
    }


@triton.jit
def _coarse(d):
    """Masses one per cent off: a planted bug."""
    return (tl.exp(0.99 * d) * 1099511627776.0).to(tl.int64)


@triton.jit
def _forgetful(span, candidates, sums, wanted):
    """A span above which, after a second pass, no mass lies: a planted bug."""
    enough = sums >= wanted
    low = tl.max(tl.where(enough, candidates, kernels.LOWEST), axis=0)
    high = tl.min(tl.where(enough, kernels._HIGHEST, candidates - 1), axis=0)
    beyond = tl.max(tl.where(enough, 0, sums), axis=0)
    within = tl.min(tl.where(enough, sums, span.within), axis=0)
    return kernels.Span(tl.maximum(span.low, low), tl.minimum(span.high, high), beyond, within)


ALL = {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "min_p": 0.02}
_WHOLE = "block=1024 warps=16 depth=1 splits=1"
_DEEP = "block=1024 warps=8 depth=4 splits=1"
_SPLIT = "block=1024 warps=8 depth=2 splits=8"
_ODD = [
    ["-inf"] * 8,
    ["nan", "0", "1", "2", "3", "3", "4", "5"],
    ["inf", "1", "inf", "-inf", "2", "3", "4", "5"],
    ["0", "-0", "0", "-0", "-1", "-2", "-3", "-4"],
    ["-1", "-2", "-3", "-inf", "-5", "-1", "-2", "-3"],
    ["1e-30", "-1e-30", "0", "-0", "1", "1", "1", "1"],
]
BY_ROW = {
    "temperature": [0.7, 1, 1, 2, 0.5, 0, 1, 1, -1],
    "top_k": [0, 5, 3, 7, 300, 4, 1, 0, 3],
    "top_p": [0.9, 0.5, 0.3, 1, 0.2, 0.4, 0.7, 0.8, 0],
    "min_p": [0, 0.1, 0.3, 0, 0.2, 0, 0.05, 1, 0],
}

_TIED = {"rows": 3, "cols": 5000, "ties": True, "dtype": "bf16", "config": _SPLIT}

_NARROWED = {
    "values": [[-math.log(i + 1) for i in range(6000)]],
    "top_p": 0.1,
    "temperature": 2.0,
    "config": _SPLIT,
}

CASES: dict[str, dict[str, Any]] = {
    "all, fp32": {"rows": 3, "cols": 300, **ALL, "config": _WHOLE},
    "all, bf16, ties": {"rows": 3, "cols": 300, **ALL, "dtype": "bf16", "ties": True, "config": _WHOLE},
    "all, fp16": {
        "rows": 3,
        "cols": 1500,
        **ALL,
        "dtype": "fp16",
        "config": _WHOLE,
    },
    "all, larger blocks": {"rows": 1, "cols": 5000, **ALL, "config": "block=4096 warps=16 depth=1 splits=1"},
    "by row": {"rows": 9, "cols": 40, **BY_ROW, "ties": True},
    "by row, sliced": {"rows": 9, "cols": 41, **BY_ROW, "dtype": "bf16", "kind": "sliced"},
    "top-k": {"rows": 3, "cols": 300, "top_k": 5, "dtype": "bf16", "kind": "transposed"},
    "top-k, ties": {"rows": 3, "cols": 300, "top_k": 5, "ties": True},
    "top-k 1": {"rows": 3, "cols": 100, "top_k": 1, "dtype": "fp16"},
    "top-k of all": {"rows": 3, "cols": 100, "top_k": 100, "dtype": "fp16"},
    "top-p": {"rows": 3, "cols": 300, "top_p": 0.7},
    "top-p, ties": {"rows": 3, "cols": 300, "top_p": 0.7, "ties": True, "dtype": "bf16"},
    "top-p 0": {"rows": 2, "cols": 50, "top_p": 0.0},
    "min-p": {"rows": 3, "cols": 300, "min_p": 0.05, "kind": "transposed"},
    "min-p 1": {"rows": 3, "cols": 50, "min_p": 1.0, "ties": True},
    "temperature": {"rows": 3, "cols": 300, "temperature": 0.3, "dtype": "fp16"},
    "greedy": {"rows": 3, "cols": 300, **ALL, "temperature": 0.0, "ties": True},
    "one token": {"rows": 2, "cols": 1, **ALL},
    "odd values": {"values": _ODD, **ALL, "top_k": 4},
    "odd values, bf16": {"values": _ODD, **ALL, "top_k": 0, "dtype": "bf16"},
    "deep, fp32": {"rows": 2, "cols": 9000, **ALL, "config": _DEEP},
    "deep, top-p": {"rows": 2, "cols": 9000, "top_p": 0.4, "min_p": 0.001, "config": _DEEP},
    "deep, much of the mass": {"rows": 2, "cols": 9000, "top_p": 0.995, "temperature": 5.0, "config": _DEEP},
    "deep, more than lanes": {"rows": 1, "cols": 4100, "top_k": 1500, "top_p": 0.9, "config": _DEEP},
    "split, fp32": {"rows": 1, "cols": 4100, **ALL, "config": _SPLIT},
    "split, top-p": {"rows": 2, "cols": 9000, "top_p": 0.9, "temperature": 3.0, "config": _SPLIT},
    "split, by row": {
        **BY_ROW,
        "rows": 9,
        "cols": 4100,
        "dtype": "fp16",
        "ties": True,
        "config": "block=1024 warps=16 depth=1 splits=8",
    },
    "split, odd values": {
        "values": [row * 520 for row in _ODD],
        **ALL,
        "top_k": 0,
        "config": _SPLIT,
    },
    "split, min-p": {"rows": 2, "cols": 4100, "min_p": 0.1, "config": _SPLIT},
    "split, narrowed four times": _NARROWED,
    "split, ties at a bound": {**_TIED, "top_p": 0.9},
    "split, all but the tail": {**_TIED, "top_p": 0.999999, "temperature": 0.3},
    "split, equal but one": {"values": [[0.0] * 3000 + [5.0] + [0.0] * 1100], "top_p": 0.9, "config": _SPLIT},
    "split, greedy below zero": {
        "values": [[-5.0, -3.0, -4.0, -3.0] * 1030],
        "temperature": 0.0,
        "top_p": 0.9,
        "config": _SPLIT,
    },
    "split, fewer than top-k": {
        "values": [[-math.inf] * 2000 + [1.0, 3.0, 2.0, 2.0] + [-math.inf] * 2100],
        "top_k": 20,
        "top_p": 0.9,
        "config": _SPLIT,
    },
}
PLANTED: dict[str, dict[str, Any]] = {
    "a token forgotten": {"rows": 2, "cols": 64, "top_p": 0.999, "edit": {"cols": -1}},
    "another pitch": {"rows": 2, "cols": 64, "top_p": 0.9, "edit": {"logits_row": 4}},
    "masses one per cent off": {"rows": 8, "cols": 600, "top_p": 0.9, "planted": "mass"},
    "a token more": {"rows": 4, "cols": 64, "top_k": 5, "edit": {"top_k": 1}},
    "masses forgotten": {**_NARROWED, "planted": "_narrow"},
    "a chunk skipped": {"rows": 1, "cols": 4100, **ALL, "config": _SPLIT, "edit": {"chunk": -256}},
}


if __name__ == "__main__":
    serve(child_case, {"mass": (kernels, _coarse), "_narrow": (kernels, _forgetful)})
