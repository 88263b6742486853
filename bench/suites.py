"""Cases of suites, and sizes that several families share. The suites themselves are in ``bench/workloads``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Case:
    """One call. ``problem`` is the op's text form; ``alpha`` and ``beta`` are data, which no problem holds."""

    op: str
    problem: str
    label: str
    alpha: float = 1.0
    beta: float = 0.0


Suite = Callable[[str, str], list[Case]]  # (dtype of the operands, what a matrix product sums in) -> cases


def suite(op: str, problem: Callable[..., object], shapes: Mapping[str, Mapping[str, Any]]) -> Suite:
    """Cases by label, of each type of operands: ``problem`` makes their problems of the words that ``shapes`` have."""
    return lambda dtype, accumulate: [
        Case(op, str(problem(**words, dtype=dtype)), label) for label, words in shapes.items()
    ]


HIDDEN = {"llama-3-8b": 4096, "qwen2.5-7b": 3584}
INTERMEDIATE = {"llama-3-8b": 14336, "qwen2.5-7b": 18944}
TOKENS = (16, 256, 2048)
EVERY_FEW = tuple(range(1, 129))  # every number of tokens that decoding uses
