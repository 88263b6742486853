"""Groups of rows: their offsets, and how samples spread rows over them.

A group is the rows of one expert, from ``offsets[e]`` to ``offsets[e + 1]``, as :func:`moe_permute` returns them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from cutekernels.errors import UnsupportedProblem
from cutekernels.op import Problem, extent, ladder
from cutekernels.ops.products.epilogue import GATES

if TYPE_CHECKING:
    import torch
    from torch import Tensor

MAX_GROUPS = 1023
MAX_PAIRS = (1 << 31) - (1 << 20)  # what int32 numbers, with room for the last block
SPREADS = ("uniform", "zipf", "one")  # how a sample's rows spread over experts, by its seed


@dataclass(frozen=True)
class ExpertRows(Problem):
    """``rows`` of ``k`` in ``experts`` groups, times matrices of ``(n, k)``, or ``(2 * n, k)`` where gated."""

    rows: int = extent(ladder)
    n: int = extent()
    k: int = extent()
    experts: int = extent()

    activation = "none"  # a field of both problems

    def __post_init__(self) -> None:
        super().__post_init__()
        check_extents(self.rows, self.experts)

    @property
    def gated(self) -> bool:
        return self.activation in GATES

    @property
    def weight_rows(self) -> int:
        """Rows of an expert's weight: a gate's, then as many of up's, or those of out."""
        return self.n * (1 + self.gated)


def check_extents(rows: int, experts: int) -> None:
    if not 1 <= experts <= MAX_GROUPS or rows > MAX_PAIRS:
        raise UnsupportedProblem(
            f"grouped products take 1 to {MAX_GROUPS} experts and up to {MAX_PAIRS} rows; got {experts} and {rows}"
        )


def groups_of(offsets: Tensor, rows: int) -> list[tuple[int, int]]:
    """``(begin, end)`` of each group. Refuses offsets that fall or leave the rows. Waits once."""
    ends = offsets.tolist()
    at = next((i for i in range(1, len(ends)) if ends[i] < ends[i - 1]), None)
    if at is not None or ends[0] < 0 or ends[-1] > rows:
        found = (
            f"it runs from {ends[0]} to {ends[-1]}"
            if at is None
            else f"entry {at} is {ends[at]}, behind {ends[at - 1]}"
        )
        raise UnsupportedProblem(
            f"offsets must stay from 0 to {rows}, its rows, and never fall; {found}: pass those of moe_permute"
        )
    return list(pairwise(ends))


def other_rows(op: Any, p: Any, args: tuple[Any, ...], seed: int) -> tuple[Any, ...]:
    """A sample's ``args`` with other rows ``x`` and ``offsets``."""
    import torch

    x, at = args[0], op.inputs.index("offsets")
    draw = torch.Generator(device=x.device).manual_seed(seed)
    other = op.arrange(p, "x", torch.randn(x.shape, generator=draw, device=draw.device).to(x.dtype))
    return other, *args[1:at], op.draw(p, "offsets", (), draw), *args[at + 1 :]


def by_group(x: Tensor, offsets: Tensor, columns: int, product: Callable[[int, Tensor], Tensor]) -> Tensor:
    """``(T, columns)``: ``product(e, rows)`` of each group's rows, 0 for those of none."""
    out = x.new_zeros((x.shape[0], columns))
    for e, (begin, end) in enumerate(groups_of(offsets, x.shape[0])):
        if begin < end:
            out[begin:end] = product(e, x[begin:end])
    return out


def shares(spread: str, experts: int) -> list[float]:
    """The experts' shares of a sample's rows, the largest first: all alike, by Zipf's law, or all to one expert."""
    if spread == "one":
        return [1.0] + [0.0] * (experts - 1)
    parts = [1.0 if spread == "uniform" else 1 / place for place in range(1, experts + 1)]
    total = math.fsum(parts)
    return [part / total for part in parts]


def draw_offsets(p: Any, draw: torch.Generator) -> Tensor:
    """A sample's offsets, of another spread for each seed."""
    return sample_offsets(p.rows, p.experts, SPREADS[draw.initial_seed() % len(SPREADS)], draw)


def sample_offsets(rows: int, experts: int, spread: str, draw: torch.Generator) -> Tensor:
    """``(experts + 1,)``: each row chooses its expert by :func:`shares`; which expert has which share is drawn too."""
    import torch

    edges = torch.tensor(shares(spread, experts), device=draw.device, dtype=torch.float64)
    edges = edges[torch.randperm(experts, generator=draw, device=draw.device)].cumsum(0)
    drawn = torch.rand(rows, generator=draw, device=draw.device, dtype=torch.float64) * edges[-1]
    counts = torch.bincount(torch.searchsorted(edges, drawn, right=True).clamp_(max=experts - 1), minlength=experts)
    return torch.cat([counts.new_zeros(1), counts.cumsum(0)]).int()


@lru_cache(4096)
def expected_experts(spread: str, rows: int, experts: int) -> float:
    """Experts that have rows in a sample of this spread, in expectation."""
    return math.fsum(1.0 - (1.0 - share) ** rows for share in shares(spread, experts))


def sampled_experts(rows: int, experts: int) -> float:
    """Experts that have rows, on the mean of the spreads: a timing takes as many samples of each."""
    return math.fsum(expected_experts(spread, rows, experts) for spread in SPREADS) / len(SPREADS)


def check_offsets(offsets: Tensor, x: Tensor) -> None:
    import torch

    if offsets.dim() != 1 or offsets.dtype != torch.int32 or offsets.device != x.device:
        raise UnsupportedProblem(
            f"offsets must be int32 (E + 1,) on {x.device}; it is {offsets.dtype} {tuple(offsets.shape)} on "
            f"{offsets.device}: pass those of moe_permute"
        )
    check_extents(x.shape[0], offsets.shape[0] - 1)
