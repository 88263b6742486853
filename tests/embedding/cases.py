"""Shared by the tests of ``embedding``: tolerances, operands, and cases for Triton's interpreter.

This file is also the script of the child process that runs the cases (see ``tests/interpreted.py``).
"""

from __future__ import annotations

import math
import random
from itertools import product
from typing import Any

import torch
from torch import Tensor

from cutekernels.ops.embedding.op import EMBEDDING, EMBEDDING_BACKWARD, EmbeddingProblem, grouped
from tests.interpreted import DTYPES, H200, interpret, serve
from tests.tolerance import FP32_ULP, worst_ratio

OPS = {op.name: op for op in (EMBEDDING, EMBEDDING_BACKWARD)}


def gradient(ids: Tensor, dout: Tensor, vocabulary: int) -> tuple[Tensor, Tensor]:
    """The table's gradient in fp64 and, for each element, the size of all its terms together."""
    kept = (ids >= 0) & (ids < vocabulary)
    found = []
    for t in (dout.double(), dout.double().abs()):
        total = torch.zeros(vocabulary, dout.shape[1], dtype=torch.float64, device=dout.device)
        found.append(total.index_add_(0, ids[kept].long(), t[kept]))
    return found[0], found[1]


def error_ratio(actual: Tensor, exact: Tensor, magnitude: Tensor, terms: int) -> float:
    """The largest error over its tolerance: an ulp, and for each of ``terms`` additions an ulp of fp32 of their sum."""
    return worst_ratio(actual, exact, terms * FP32_ULP * magnitude)


def laid(kind: str, rows: int, cols: int, dtype: torch.dtype) -> Tensor:
    if kind == "sliced":
        return torch.randn(rows, cols + 8 - cols % 8 + 8)[:, 8 : 8 + cols].to(dtype)
    if kind == "misaligned":
        return torch.randn(rows * cols + 1).to(dtype)[1:].view(rows, cols)
    if kind == "transposed":
        return torch.randn(cols, rows).to(dtype).t()
    return torch.randn(rows, cols).to(dtype)


KINDS = ("dense", "sliced", "misaligned", "transposed")


def child_case(case: dict[str, Any]) -> dict[str, Any]:
    torch.manual_seed(6)
    rows, vocabulary, cols, dtype = case["rows"], case["vocabulary"], case["cols"], DTYPES[case["dtype"]]
    ids = torch.randint(0, max(1, vocabulary), (rows,)).to(torch.int32 if case.get("index") == "i32" else torch.int64)
    for at, value in case.get("wild", []):
        ids[at] = value
    how = {"config": case.get("config"), "edit": case.get("edit")}
    if case["op"] == "embedding":
        table = laid(case["kind"], vocabulary, cols, dtype)
        memory = torch.full((rows + 2, cols), 7.0, dtype=dtype)
        out = memory[1:-1]
        problem = interpret(EMBEDDING, (out,), (ids, table), **how)
        known = (ids >= 0) & (ids < vocabulary)
        expected = table[ids.long().where(known, 0)].masked_fill(~known[:, None], float("nan"))
        wrong = not torch.equal(out.nan_to_num(nan=1e9), expected.nan_to_num(nan=1e9))
        return {"ratio": math.inf if wrong else 0.0, "outside": bool((memory[[0, -1]] == 7).all()), "problem": problem}
    dout = laid(case["kind"], rows, cols, dtype)
    memory = torch.full((vocabulary + 2, cols), 7.0, dtype=dtype)
    out = memory[1:-1]
    problem = interpret(EMBEDDING_BACKWARD, (out,), (dout, *grouped(ids, vocabulary)), **how)
    ratio = error_ratio(out, *gradient(ids, dout, vocabulary), rows)
    return {"ratio": ratio, "outside": bool((memory[[0, -1]] == 7).all()), "problem": problem}


def numerics_cases() -> dict[str, dict[str, Any]]:
    cases: dict[str, dict[str, Any]] = {}
    base = {"rows": 7, "vocabulary": 4, "cols": 76, "dtype": "bf16", "kind": "dense"}
    for op, kind, cols in product(OPS, KINDS, (76, 37)):
        cases[f"{op} {kind} {cols}"] = base | {"op": op, "kind": kind, "cols": cols}
    for op, dtype in product(OPS, ("fp16", "fp32")):
        cases[f"{op} {dtype}"] = base | {"op": op, "dtype": dtype}
    for op, rows, vocabulary in product(OPS, (1, 17), (1, 9)):
        cases[f"{op} {rows} of {vocabulary}"] = base | {"op": op, "rows": rows, "vocabulary": vocabulary}
    wild = [(0, -1), (3, 4), (4, 1 << 40), (6, -(1 << 40))]
    for op in OPS:
        cases[f"{op} ids outside"] = base | {"op": op, "wild": wild}
    cases["int32 ids"] = base | {"op": "embedding", "index": "i32", "wild": [(3, -1), (4, 1 << 30)]}
    cases["int32 gradient"] = base | {"op": "embedding_backward", "index": "i32", "wild": [(3, -1)]}
    rng = random.Random(8)
    for op, kind in product(OPS, ("dense", "transposed")):
        layout = "rows" if kind == "dense" else "strided"
        p = EmbeddingProblem(7, 4, 152, layout=layout)
        for config in rng.sample(list(OPS[op].valid(p, H200)), 3):
            cases[f"{op} {kind} [{config}]"] = base | {"op": op, "kind": kind, "cols": 152, "config": str(config)}
    return cases


CASES = numerics_cases()
_SMALL = {"rows": 7, "vocabulary": 4, "cols": 76, "dtype": "bf16", "kind": "dense"}
PLANTED = {
    "a column forgotten": _SMALL | {"op": "embedding", "edit": {"cols": -1}},
    "a row forgotten": _SMALL | {"op": "embedding", "edit": {"rows": -1}},
    "the last row of the table forgotten": _SMALL | {"op": "embedding", "edit": {"vocabulary": -1}},
    "written past the rows": _SMALL
    | {"op": "embedding", "edit": {"rows": 1}, "config": "block_rows=4 block_cols=128 warps=1"},
    "the gradient's column forgotten": _SMALL | {"op": "embedding_backward", "edit": {"cols": -1}},
    "another order": _SMALL | {"op": "embedding_backward", "edit": {"order_row": -1}},
    "starts of nothing": _SMALL | {"op": "embedding_backward", "edit": {"starts_row": -1}},
}


if __name__ == "__main__":
    serve(child_case)
