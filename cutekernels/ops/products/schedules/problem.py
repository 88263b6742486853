"""Problems and configs of ``gemm``: their fields, and what each schedule searches.

Operands are as the caller has them: a ``([B,] M, K)``, b ``([B,] K, N)``, c and out ``([B,] M, N)``. A field like
``b_major=k`` names the contiguous extent, so ``weight.t()`` of an ``(N, K)`` weight is ``b_major=k``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

from cutekernels.columns import Columns, where
from cutekernels.errors import UnsupportedProblem
from cutekernels.kernels.activations import ACTIVATIONS
from cutekernels.op import Problem, extent, knob, ladder, plain, respell
from cutekernels.rules import EVERY, Among, BodiesConfig, foreign

ELEMENT_BYTES = 2
WIDEST = 8  # elements in 16 bytes
MOST_TOKENS = 128  # of the skinny schedule, and of a product with a norm in its kernel


# ---- problems -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class GemmProblem(Problem):
    """Extents, majors, alignments (elements), epilogue.

    ``wide`` selects 64-bit strides: some operand spans 2^31 elements or more. ``c`` names C's contiguous extent.
    Alignments divide the address, every stride but the contiguous one, and the contiguous extent.
    """

    m: int = extent(ladder)
    n: int = extent()
    k: int = extent()
    batch: int = extent(default=1)
    dtype: str = plain("bf16", "fp16")
    a_major: str = plain("k", "m")
    b_major: str = plain("n", "k")
    out_major: str = plain("n", "m")
    c: str = plain("none", "n", "m")
    bias: str = plain("none", "same", "fp32")
    activation: str = plain(*ACTIVATIONS)
    accumulate: str = plain("fp32", "fp16")
    a_align: int = plain(8, 4, 2, 1)
    b_align: int = plain(8, 4, 2, 1)
    c_align: int = plain(8, 4, 2, 1)
    out_align: int = plain(8, 4, 2, 1)
    batched: bool = plain(False, True)
    wide: bool = plain(False, True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.accumulate == "fp16" and self.dtype != "fp16":
            raise UnsupportedProblem(f"accumulate='fp16' is for fp16 operands; they are {self.dtype}")
        if self.batch != 1 and not self.batched:
            raise UnsupportedProblem(f"batch={self.batch} needs batched=1")
        for operand, major, align in self._contiguous():
            length = getattr(self, major)
            if length % align:
                fits = math.gcd(length, WIDEST)
                raise UnsupportedProblem(
                    f"{major}={length} is contiguous in {operand}, so {operand}_align must divide it; "
                    f"it is {align}: write {operand}_align={fits}"
                )

    def _contiguous(self) -> list[tuple[str, str, int]]:
        """Each operand with its contiguous extent and its alignment."""
        found = [
            ("a", self.a_major, self.a_align),
            ("b", self.b_major, self.b_align),
            ("out", self.out_major, self.out_align),
        ]
        return found if self.c == "none" else [*found, ("c", self.c, self.c_align)]

    def bucket(self) -> GemmProblem:
        """One tuning serves every bias, activation and C, which hardly move the best tile, and both dtypes, which take
        the same time: docs/notes/gemm.md#buckets (H200, 2026-11).
        """
        plain = super().bucket().replace(bias="none", activation="none", c="none", c_align=WIDEST, wide=False)
        return plain if self.accumulate == "fp16" else plain.replace(dtype="bf16")

    def divisibility(self, name: str) -> int:
        """A divisor of extent ``name`` that a compiled kernel may assume: the widest vector along it."""
        return max((align for _, major, align in self._contiguous() if major == name), default=1)

    @property
    def transposed(self) -> bool:
        """Computed as ``out^T = b^T a^T``, so that the kernel's output rows are contiguous."""
        return self.out_major == "m"

    @property
    def addressed(self) -> bool:
        """Whether addresses, extents and pitches say all of it, as ``kernels/cute/addressed.py`` takes them."""
        return self.c == "none" and not self.batched and not self.wide

    @property
    def along(self) -> tuple[int, int, int]:
        """The contiguous extents of out, a and b, 0 or 1."""
        return int(self.out_major == "n"), int(self.a_major == "k"), int(self.b_major == "n")

    @cached_property
    def operands(self) -> tuple[Side, Side]:
        """a and b."""
        return Side(self.m, self.a_major == "k", self.a_align), Side(self.n, self.b_major == "k", self.b_align)

    @cached_property
    def sides(self) -> tuple[Side, Side]:
        """The operand of the kernel's tile rows and that of its columns: where it computes ``out^T``, b and a."""
        a, b = self.operands
        return (b, a) if self.transposed else (a, b)


@dataclass(frozen=True, slots=True)
class Side:
    """One multiplied operand as the kernel sees it."""

    extent: int
    k_major: bool
    align: int


HEIGHTS = (64, 128, 192, 256)  # of a tile of the warpgroup schedule along the MMA's 64 rows
WIDTHS = (*range(64, 225, 8), 240, 256)  # along the MMA's columns
BY_SIXTEENS = tuple(width for width in WIDTHS if width % 16 == 0)  # half of which may be gates


# ---- configs --------------------------------------------------------------------------------------------


GATED: Final = "silu_mul"  # the activation of a weight with a gate's rows before up's: out has half as many columns
VENDOR = "vendor"  # the value of ``body`` that launches cuBLAS, through torch


# Values that each schedule searches; a knob that is missing keeps its first. Of warpgroup, ``tile_m`` and ``tile_n``
# are those of swap_ab=0: see :meth:`GemmConfig.span`.
BODIES: dict[str, dict[str, tuple[Any, ...]]] = {
    "multistage": {
        "tile_m": (32, 64, 128, 256),
        "tile_n": (32, 64, 128, 256),
        "tile_k": (32, 64, 128),
        "warps_m": (1, 2, 4),
        "warps_n": (1, 2, 4),
        "stages": (2, 3, 4, 6),
        "raster": (1, 8, 16),
        "ctas_per_sm": (1, 2, 3),
        "persistent": (False, True),
    },
    "skinny": {
        "tile_m": (8, 16, 24, 32, 48, 64, 96, 128),
        "tile_n": (16, 32, 64, 128),
        "tile_k": (64, 128, 256),
        "warps_n": (1, 2, 4),
        "warps_k": (1, 2, 4, 8),
        "stages": (3, 4, 5, 6, 8),
        "split_k": (1, 2, 4),
        "pdl": (False, True),
        "prefetch_l2": (0, 2, 4),
    },
    "skinny_warpgroup": {
        "tile_m": (8, 16, 32, 48, 64, 96, 128, 192, 256),
        "tile_n": tuple(range(32, 257, 8)),
        "tile_k": (64, 128),
        "stages": (2, 3, 4, 5, 6, 8, 12),
        "ctas_per_sm": (1, 2),
        "split_k": (1, 2, 4, 8),
        "pdl": (False, True),
        "prefetch_l2": (0, 1, 2, 4, 8),
    },
    "warpgroup": {
        "tile_m": HEIGHTS,
        "tile_n": WIDTHS,
        "tile_k": (64,),
        "stages": (3, 4, 5, 6, 7, 8, 9, 10, 12),
        "raster": (1, 8, 16),
        "pdl": (False, True),
        "pingpong": (False, True),
        "cluster_m": (1, 2),
        "cluster_n": (1, 2),
        "swap_ab": (False, True),
        "split_k": (1, 2, 3, 4),
    },
    VENDOR: {},
}


@dataclass(frozen=True)
class GemmConfig(BodiesConfig):
    """The knobs of all schedules; ``body`` names the one that gives them a meaning.

    ``tile_m``, ``warps_m`` and ``cluster_m`` are along rows of out, ``tile_n``, ``warps_n`` and ``cluster_n`` along its
    columns, also where a body computes ``out^T = b^T a^T``.
    """

    tile_m: int = knob(8, 16, 24, 32, 48, *WIDTHS)
    tile_n: int = knob(16, *range(32, 257, 8))
    tile_k: int = knob(32, 64, 128, 256)
    warps_m: int = knob(1, 2, 4)
    warps_n: int = knob(1, 2, 4)
    stages: int = knob(2, 3, 4, 5, 6, 7, 8, 9, 10, 12)
    raster: int = knob(1, 8, 16)
    ctas_per_sm: int = knob(1, 2, 3)
    persistent: bool = knob(False, True, added=True)
    body: str = knob("multistage", "skinny", "skinny_warpgroup", "warpgroup", "vendor", added=True)
    warps_k: int = knob(1, 2, 4, 8, added=True)
    split_k: int = knob(1, 2, 3, 4, 8, added=True)
    pdl: bool = knob(False, True, added=True)
    prefetch_l2: int = knob(0, 1, 2, 4, 8, added=True)
    pingpong: bool = knob(False, True, added=True)
    cluster_m: int = knob(1, 2, added=True)
    cluster_n: int = knob(1, 2, added=True)
    swap_ab: bool = knob(False, True, added=True)
    bodies = BODIES

    @classmethod
    def span(cls, body: str, among: Among = EVERY) -> Columns:
        """Every config of ``body``, some knobs confined to ``among``, which names those of ``out^T`` for ``swap_ab``;
        ``prefetch_l2`` is for ``pdl`` alone, and so is warpgroup's ``split_k``, without ``pingpong``.
        """
        c = super().span(body, among)
        c = c.taken((c.prefetch_l2 == 0) | (c.pdl == 1))
        if body == "warpgroup":
            c = c.taken((c.split_k == 1) | ((c.pdl == 1) & (c.pingpong == 0)))
            across = {
                name: where(c.swap_ab, getattr(c, ACROSS[name]), own) for name, own in c.knobs.items() if name in ACROSS
            }
            c = c.drawn((c.knobs | across).items())
        return c

    def foreign(self, narrowed: Among = EVERY) -> Iterator[str]:
        if not self.swap_ab:
            return super().foreign(narrowed)
        values = {**self.values(self.body), **narrowed}
        return foreign(self, {ACROSS.get(name, name): allowed for name, allowed in values.items()})

    @property
    def vendors(self) -> bool:
        return self.body == VENDOR

    @property
    def warps(self) -> int:
        return self.warps_m * self.warps_n * self.warps_k

    @property
    def warp_tile(self) -> tuple[int, int]:
        return self.tile_m // self.warps_m, self.tile_n // self.warps_n

    @property
    def mma_tile(self) -> tuple[int, int]:
        """The tile along the MMA's rows and its columns: out's own, or with ``swap_ab`` those of ``out^T``."""
        return where(self.swap_ab, self.tile_n, self.tile_m), where(self.swap_ab, self.tile_m, self.tile_n)

    @property
    def mma_cluster(self) -> tuple[int, int]:
        """The cluster, likewise."""
        return where(self.swap_ab, self.cluster_n, self.cluster_m), where(self.swap_ab, self.cluster_m, self.cluster_n)

    @property
    def transposed(self) -> GemmConfig:
        """The same tiles, warps and clusters of ``out^T``."""
        return self.drawn((name, getattr(self, ACROSS.get(name, name))) for name in GemmConfig.space())


ACROSS = {f"{what}_{a}": f"{what}_{b}" for what in ("tile", "warps", "cluster") for a, b in ("mn", "nm")}

# ---- texts of earlier revisions ---------------------------------------------------------------------------

RENAMED = {
    "body=specialized": "body=skinny_warpgroup",
    "ahead": "prefetch_l2",
    "swapped": "swap_ab",
}  # since revision 1
_TRANSPOSED = {"skinny", "specialized", VENDOR}  # bodies of which revision 1 named the tile of out^T


def since_revision_1(problem: str, config: str) -> str:
    """Revision 1 named tiles, warps and clusters as the MMA sees them: of ``out^T``, where a body computes that."""
    words = dict(word.partition("=")[::2] for word in config.split())
    body = words.get("body", "multistage")
    transposed = body in _TRANSPOSED or words.get("swapped") == "1"
    transposed |= body == "multistage" and "out_major=m" in problem.split()
    return respell(config, RENAMED | ACROSS if transposed else RENAMED)
