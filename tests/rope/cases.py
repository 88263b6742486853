"""Shared by the tests of ``rope``: tolerances, arrangements of operands, and cases for Triton's interpreter.

This file is also the script of the child process that runs the cases (see ``tests/interpreted.py``).
"""

from __future__ import annotations

import random
from itertools import product
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from cutekernels.kernels.triton import rope as kernels
from cutekernels.ops.rope.op import ROPE, RopeProblem
from tests.interpreted import DTYPES, in_triton, interpret, serve
from tests.tolerance import FP32_ULP, worst_ratio

# ---- tolerances -----------------------------------------------------------------------------------------


def truth(
    x: Tensor, cos: Tensor, sin: Tensor, rows: Tensor, *, interleaved: bool = False, inverse: bool = False
) -> tuple[Tensor, Tensor]:
    """The rotation in fp64 as a complex product, and the size of each element's terms. ``rows``: (B, S) positions."""
    x, half = x.double(), cos.shape[-1]
    angle = torch.complex(cos.double(), -sin.double() if inverse else sin.double())[rows].unsqueeze(2)
    head = x[..., : 2 * half]
    pairs = head.unflatten(-1, (half, 2)) if interleaved else head.unflatten(-1, (2, half)).transpose(-1, -2)
    turned = torch.view_as_real(torch.complex(*pairs.unbind(-1)) * angle)
    real, imag = angle.real.abs(), angle.imag.abs()
    a, b = pairs.abs().unbind(-1)
    sizes = torch.stack((a * real + b * imag, b * real + a * imag), dim=-1)
    if not interleaved:
        turned, sizes = turned.transpose(-1, -2), sizes.transpose(-1, -2)
    rest = x[..., 2 * half :]
    return torch.cat((turned.flatten(-2), rest), -1), torch.cat((sizes.flatten(-2), rest.abs()), -1)


def error_ratio(actual: Tensor, exact: Tensor, magnitude: Tensor) -> float:
    """The largest error over its tolerance: an ulp, and 4 ulp of fp32 of the terms, which may cancel."""
    return worst_ratio(actual, exact, 4 * FP32_ULP * magnitude, equal_nan=True)


def rows_of(batch: int, seq: int, positions: Tensor | None, start: int) -> Tensor:
    """Each token's row of the table, (B, S)."""
    steps = torch.arange(seq, device=None if positions is None else positions.device)
    if positions is None:
        return (start + steps).expand(batch, seq)
    return positions.long() if positions.dim() == 2 else positions.long()[:, None] + steps


def worst(results: Any, args: Any, *, interleaved: bool = False, inverse: bool = False) -> float:
    """The error ratio of a launch with ``args`` = (q, k, cos, sin, positions, start)."""
    q, k, cos, sin, positions, start = args
    rows = rows_of(*q.shape[:2], positions, start).to(q.device)
    flags = {"interleaved": interleaved, "inverse": inverse}
    pairs = zip(results, (q, k), strict=True)
    return max(error_ratio(r, *truth(x, cos, sin, rows, **flags)) for r, x in pairs)


# ---- operands -------------------------------------------------------------------------------------------


def table(rows: int, half: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> tuple[Tensor, Tensor]:
    angles = torch.rand(rows, half, device=device) * 6.28
    return angles.cos().to(dtype), angles.sin().to(dtype)


KINDS = ("dense", "joint", "heads first", "misaligned", "every other", "expanded", "transposed channels")


def arrange(kind: str, batch: int, seq: int, heads: tuple[int, int], width: int, dtype: torch.dtype) -> list[Tensor]:
    """q and k in one of several arrangements, standard normal with outliers."""

    def normal(*shape: int) -> Tensor:
        values = torch.randn(shape)
        values[torch.rand(shape) < 0.02] *= 100
        return values.to(dtype)

    hq, hk = heads
    if kind == "joint":
        joint = normal(batch, seq, hq + 2 * hk, width)
        return [joint[:, :, :hq], joint[:, :, hq : hq + hk]]
    if kind == "heads first":
        return [normal(batch, h, seq, width).transpose(1, 2) for h in heads]
    if kind == "misaligned":
        return [normal(batch * seq * h * width + 1)[1:].view(batch, seq, h, width) for h in heads]
    if kind == "every other":
        return [normal(batch, seq, h, 2 * width)[..., ::2] for h in heads]
    if kind == "expanded":
        return [normal(1, seq, 1, width).expand(batch, seq, h, width) for h in heads]
    if kind == "transposed channels":
        return [normal(batch, width, h, seq).transpose(1, 3) for h in heads]
    return [normal(batch, seq, h, width) for h in heads]


# ---- the child process ----------------------------------------------------------------------------------


def child_case(case: dict[str, Any]) -> dict[str, Any]:
    torch.manual_seed(5)
    batch, seq, heads, width, rotary = (case[name] for name in ("batch", "seq", "heads", "width", "rotary"))
    dtype = DTYPES[case["dtype"]]
    flags = {name: bool(case.get(name)) for name in ("interleaved", "inverse")}
    q, k = arrange(case["kind"], batch, seq, heads, width, dtype)
    cos, sin = table(case.get("rows", 2 * seq + 9), rotary // 2, DTYPES[case.get("table", "fp32")])
    if case.get("nan table"):  # what is outside must not be read
        whole = torch.full((cos.shape[0] + 2, cos.shape[1]), 1e9)
        whole[1:-1] = cos
        cos = whole[1:-1]
    start, positions = case.get("start", 0), None
    mode = case.get("positions", "start")
    if mode != "start":
        shape = (batch,) if mode == "batch" else (batch, seq)
        positions = torch.randint(0, seq + 9, shape).to(torch.int32 if case.get("index") == "i32" else torch.int64)
        for at, value in case.get("wild", []):
            positions.view(-1)[at] = value
    args = (q, k, cos, sin, positions)
    rows = rows_of(batch, seq, positions, start)
    legal = (rows >= 0) & (rows < cos.shape[0])
    exact = [truth(x, cos, sin, rows.where(legal, 0), **flags) for x in (q, k)]
    for value, _ in exact:
        value[..., :rotary].masked_fill_(~legal[:, :, None, None], float("nan"))
    memory = [torch.full((batch, seq + 2, x.shape[2], width), 7.0, dtype=dtype) for x in (q, k)]
    results = [m[:, 1:-1] for m in memory]
    if case.get("dense out"):
        results = [torch.full_like(r, float("nan"), memory_format=torch.contiguous_format) for r in results]
    if case.get("inplace"):
        results = [q, k]
    problem = interpret(ROPE, results, args, (start,), config=case.get("config"), edit=case.get("edit"), **flags)
    outside = all(bool((m[:, [0, -1]] == 7).all()) for m in memory)
    ratios = [error_ratio(r, *e) for r, e in zip(results, exact, strict=True)]
    return {"ratio": max(ratios), "outside": outside, "problem": problem}


@triton.jit
def another_position(positions_ptr, start, s, at, inside, POSITIONS: tl.constexpr):
    return start + s + 1


_BASE = {"batch": 2, "seq": 5, "heads": (3, 2), "width": 16, "rotary": 16, "dtype": "bf16", "kind": "dense"}


def numerics_cases() -> dict[str, dict[str, Any]]:
    cases: dict[str, dict[str, Any]] = {}
    for kind, interleaved in product(KINDS, (False, True)):
        cases[f"{kind} {interleaved=}"] = _BASE | {"kind": kind, "interleaved": interleaved}
    for rotary, interleaved in product((2, 6, 10, 22, 24), (False, True)):
        cases[f"{rotary} of 24 {interleaved=}"] = _BASE | {"rotary": rotary, "width": 24, "interleaved": interleaved}
    for width, rotary in ((15, 6), (1030, 1024), (56, 16)):  # of the last, 40 channels stay: three blocks of 16
        cases[f"{rotary} of {width}"] = _BASE | {"rotary": rotary, "width": width, "seq": 2}
    for mode, index, kind in product(("start", "batch", "token"), ("i64", "i32"), ("dense", "every other")):
        if (mode, index) != ("start", "i32"):
            cases[f"{mode} {index} {kind}"] = _BASE | {"positions": mode, "index": index, "kind": kind}
    cases["a start"] = _BASE | {"start": 4}
    cases["a far start"] = _BASE | {"start": 131066, "rows": 131072}
    cases["starts outside"] = _BASE | {"positions": "batch", "wild": [(1, 16)], "nan table": True}
    wild = [(0, -1), (3, 19), (4, 1 << 40), (7, -(1 << 40))]
    cases["in place 16 of 56"] = _BASE | {"rotary": 16, "width": 56, "kind": "joint", "inplace": True}
    cases["positions outside"] = _BASE | {"positions": "token", "wild": wild, "nan table": True}
    for dtype, t, inverse in product(("fp16", "fp32", "bf16"), ("fp32", "same"), (False, True)):
        if (dtype, t) != ("fp32", "same"):
            more = {"dtype": dtype, "table": dtype if t == "same" else t, "inverse": inverse}
            cases[f"{dtype} {t} {inverse=}"] = _BASE | more
    for kind, rotary in product(("joint", "heads first", "every other"), (16, 10)):
        cases[f"inplace {kind} {rotary}"] = _BASE | {"kind": kind, "rotary": rotary, "inplace": True}
    for heads, seq, batch in (((3, 0), 5, 2), ((1, 1), 1, 1), ((1, 5), 17, 1), ((9, 1), 1, 3)):
        cases[f"heads {heads} seq {seq}"] = _BASE | {"heads": heads, "seq": seq, "batch": batch, "dense out": True}
    rng = random.Random(11)
    for kind, rotary, interleaved in product(("dense", "every other"), (16, 32), (False, True)):
        shape = _BASE | {"width": 40, "rotary": rotary, "seq": 7, "kind": kind, "interleaved": interleaved}
        layout = "rows" if kind == "dense" else "strided"
        p = RopeProblem(2, 7, 3, 40, rotary, 2, layout=layout, interleaved=interleaved)
        for config in rng.sample(in_triton(ROPE, p), 3):
            cases[f"{kind} {rotary} {interleaved=} [{config}]"] = shape | {"config": str(config)}
    return cases


CASES = numerics_cases()
PLANTED = {
    "a head forgotten": _BASE | {"edit": {"heads_q": -1}, "dense out": True},
    "a token forgotten": _BASE | {"edit": {"seq": -1}, "dense out": True},
    "k read by q's pitch": _BASE | {"edit": {"k_seq": 16}},
    "a channel forgotten": _BASE | {"edit": {"half": -1}},
    "what does not turn forgotten": _BASE | {"edit": {"head_dim": -1}, "rotary": 8, "dense out": True},
    "the last block of what stays forgotten": _BASE
    | {"edit": {"parts": -1}, "rotary": 16, "width": 56, "seq": 1, "batch": 1, "dense out": True},
    "written past the tokens": _BASE | {"edit": {"seq": 1}},
    "the position of the next token": _BASE | {"planted": "_position"},
    "one sequence's start for all": _BASE | {"positions": "batch", "edit": {"positions_batch": -1}},
    "turned the wrong way": _BASE | {"edit": {"sin_row": 1}},
}


if __name__ == "__main__":
    serve(child_case, {"_position": (kernels, another_position)})
