"""What is timed: cases by op and suite. A new suite is a function here and a line in ``SUITES``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Case:
    """One call. ``problem`` is the op's text form; ``alpha`` and ``beta`` are data, which no problem holds."""

    op: str
    problem: str
    label: str
    alpha: float = 1.0
    beta: float = 0.0


# Weights as nn.Linear keeps them: (N, K) of every projection in a layer.
PROJECTIONS = {
    "llama-3-8b": {"qkv": (6144, 4096), "out": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)},
    "qwen2.5-7b": {"qkv": (4608, 3584), "out": (3584, 3584), "gate_up": (37888, 3584), "down": (3584, 18944)},
}
INTERMEDIATE = {"llama-3-8b": 14336, "qwen2.5-7b": 18944}
TOKENS = (16, 256, 2048)
SQUARES = (512, 1024, 2048, 4096, 8192)
SCALES = ((1.0, 0.0), (1.0, 1.0), (2.0, 3.0), (0.5, 2.0))  # (alpha, beta), as minfer's table has them


def _square(dtype: str, accumulate: str) -> list[Case]:
    return [Case("gemm", _gemm(s, s, s, dtype, accumulate), str(s)) for s in SQUARES]


def _llm(dtype: str, accumulate: str) -> list[Case]:
    return [
        Case("gemm", _gemm(m, n, k, dtype, accumulate, b_major="k"), f"{model} {name} m={m}")
        for model, projections in PROJECTIONS.items()
        for name, (n, k) in projections.items()
        for m in TOKENS
    ]


def _alphabeta(dtype: str, accumulate: str) -> list[Case]:
    return [
        Case("gemm", _gemm(s, s, s, dtype, accumulate, c=beta != 0), f"{s} ({alpha:g}, {beta:g})", alpha, beta)
        for s in SQUARES
        for alpha, beta in SCALES
    ]


def _silu_mul(dtype: str, accumulate: str) -> list[Case]:
    return [
        Case("silu_mul", f"rows={rows} cols={cols}" + _unless("dtype", dtype, "bf16"), f"{model} rows={rows}")
        for model, cols in INTERMEDIATE.items()
        for rows in (*TOKENS, 8192)
    ]


SUITES: dict[str, dict[str, Callable[[str, str], list[Case]]]] = {
    "gemm": {"square": _square, "llm": _llm, "alphabeta": _alphabeta},
    "silu_mul": {"llm": _silu_mul},
}


def cases(op: str, suite: str, *, dtype: str = "bf16", accumulate: str = "fp32", match: str = "") -> list[Case]:
    """The cases of ``suite`` whose label or problem contains ``match``. ValueError for a name there is none of."""
    suites = SUITES.get(op)
    if suites is None:
        raise ValueError(f"no suite for {op!r}; there are some for {', '.join(SUITES)}")
    if suite not in suites:
        raise ValueError(f"{op} has no suite {suite!r}; it has {', '.join(suites)}")
    return [c for c in suites[suite](dtype, accumulate) if match in c.label or match in c.problem]


def _gemm(m: int, n: int, k: int, dtype: str, accumulate: str, *, b_major: str = "n", c: bool = False) -> str:
    words = f"m={m} n={n} k={k}" + _unless("dtype", dtype, "bf16") + _unless("b_major", b_major, "n")
    return words + (" c=n" if c else "") + _unless("accumulate", accumulate, "fp32")


def _unless(name: str, value: str, default: str) -> str:
    return "" if value == default else f" {name}={value}"
