"""Elementwise activations at the widths of two models' MLPs."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.baselines import DTYPES, Absent, Contender, Inputs, Launch, Workload, compiled, eager
from bench.suites import INTERMEDIATE, TOKENS, Case, unless
from cutekernels.ops.activations import silu_mul


def _llm(dtype: str, accumulate: str) -> list[Case]:
    return [
        Case("silu_mul", f"rows={rows} cols={cols}" + unless("dtype", dtype, "bf16"), f"{model} rows={rows}")
        for model, cols in INTERMEDIATE.items()
        for rows in (*TOKENS, 8192)
    ]


def _inputs(case: Case, problem: Any, device: str, seed: int) -> Inputs:
    draw = torch.Generator(device).manual_seed(seed)
    normal = partial(torch.randn, generator=draw, device=device, dtype=DTYPES[problem.dtype])
    shape = (problem.rows, problem.cols)
    operands = (normal(shape), normal(shape))
    return Inputs(operands, (torch.empty_like(operands[0]),))


def _truth(case: Case, i: Inputs) -> tuple[Tensor, ...]:
    gate, up = (t.double() for t in i.operands)
    return (F.silu(gate) * up,)


def _ours(case: Case, sets: Sequence[Inputs], config: Any) -> Sequence[Launch]:
    return [partial(silu_mul, *i.operands, out=i.out, config=config) for i in sets]


def _swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


def _liger(case: Case, sets: Sequence[Inputs]) -> Sequence[Launch]:
    try:
        from liger_kernel.ops.swiglu import LigerSiLUMulFunction
    except ImportError as error:
        raise Absent(f"liger-kernel does not import: {error}") from error
    return [partial(LigerSiLUMulFunction.apply, *i.operands) for i in sets]


WORKLOADS = (
    Workload(
        op="silu_mul",
        suites={"llm": _llm},
        inputs=_inputs,
        truth=_truth,
        ours=_ours,
        peers=(compiled(lambda case: _swiglu), eager(lambda case: _swiglu), Contender("liger", _liger)),
    ),
)
