"""The fields of problems of a packed weight; problems and configs of ``quantized_linear``:
``out = activation(x @ dequantized(weight)^T + bias)``.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

from cutekernels.columns import Columns
from cutekernels.errors import UnsupportedProblem
from cutekernels.kernels.activations import ACTIVATIONS
from cutekernels.op import Problem, extent, knob, ladder, plain, respell
from cutekernels.ops.products.schedules.problem import GATED
from cutekernels.quant import layout
from cutekernels.rules import EVERY, Among, BodiesConfig

SCALE_BYTES = {"fp16": 2, "bf16": 2, "fp32": 4, "e8m0": 1, "ue5m3": 4}
E2M1 = {("e8m0", 32, 1, False), ("ue5m3", 16, 1, True)}  # scale, group, scale_rows, factors: MXFP4, NVFP4
# Instructions of a thread for 8 weights, as the models were fitted. e4m3 has 14 since, with which 12 of 14 other
# choices were slower, 0.78 to 1.08 times as fast (H200, 2026-11-30).
DECODE_INSTRUCTIONS = {"int4": 11, "int8": 14, "e4m3": 18, "nf4": 30, "e2m1": 17}


@dataclass(frozen=True, kw_only=True)
class PackedWeight(Problem):
    """The type of activations, and the packing of a weight.

    ``code``, ``group`` (0: all of K) and ``scale_rows`` are those of :class:`cutekernels.quant.QuantizedWeight`;
    ``scale`` is the type of its scales, ``zeros`` whether it has zero points, ``factors`` whether its rows have
    factors.
    """

    dtype: str = plain("bf16", "fp16")
    code: str = plain("int4", "int8", "e4m3", "nf4", "e2m1")
    group: int = plain(128, 64, 32, 0, 16)
    scale_rows: int = plain(1, 128)
    scale: str = plain("fp16", "bf16", "fp32", "e8m0", "ue5m3")
    zeros: bool = plain(False, True)
    factors: bool = plain(False, True)

    def __post_init__(self) -> None:
        super().__post_init__()
        code, group, scale_rows, zeros = self.code, self.group, self.scale_rows, self.zeros
        own = (self.scale, group, scale_rows, self.factors)
        if own not in E2M1 if code == "e2m1" else self.scale in ("e8m0", "ue5m3") or group == 16 or self.factors:
            raise UnsupportedProblem(
                "code=e2m1 goes with scale=e8m0 group=32 scale_rows=1, or scale=ue5m3 group=16 scale_rows=1 factors=1; "
                f"got code={code} scale={self.scale} group={group} factors={int(self.factors)}"
            )
        if zeros and code != "int4":
            raise UnsupportedProblem(f"zero points are of int4 weights; code={code}")
        if scale_rows > 1 and (group != 128 or zeros):
            raise UnsupportedProblem(f"scale_rows={scale_rows} are blocks of 128 x 128: they take group=128 zeros=0")

    @property
    def packing(self) -> dict[str, Any]:
        """These fields by name."""
        return {f.name: getattr(self, f.name) for f in fields(PackedWeight)}

    @property
    def bits(self) -> int:
        """Bits of an element."""
        return layout.BITS[self.code]

    @property
    def step(self) -> int:
        """Elements of K that a number of the table of scales is for."""
        return layout.step_of(self.group)

    def packed_bytes(self, n: int, k: int) -> float:
        """Bytes of the codes, scales and zero points of ``n`` rows and ``k`` columns."""
        groups = -(-k // self.step) if self.step else 1
        return n * k * self.bits / 8 + groups * -(-n // self.scale_rows) * (SCALE_BYTES[self.scale] + self.zeros)


@dataclass(frozen=True)
class QuantizedProblem(PackedWeight):
    """``m`` tokens of ``k`` elements times a packed weight of ``n`` rows.

    ``out_align``: elements that divide the address, the pitch and the columns of out.
    """

    m: int = extent(ladder)
    n: int = extent()
    k: int = extent()
    bias: str = plain("none", "same", "fp32")
    activation: str = plain(*ACTIVATIONS, GATED)
    out_align: int = plain(8, 1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.k % 8 or self.columns % self.out_align:
            raise UnsupportedProblem(f"8 must divide k={self.k}, and out_align={self.out_align} n={self.columns}")
        if self.gated and (self.n % 128 or self.bias != "none"):
            raise UnsupportedProblem(f"activation={GATED} takes n divisible by 128, not {self.n}, and no bias")

    def bucket(self) -> QuantizedProblem:
        """One tuning serves every bias and activation, both dtypes, and both 16-bit types of scales."""
        scale = "fp16" if self.scale == "bf16" else self.scale
        activation = GATED if self.gated else "none"
        return super().bucket().replace(bias="none", activation=activation, dtype="bf16", scale=scale)

    one = property(lambda self: self)  # the product of one weight, as experts' problems have it too
    beside = None  # nothing is asked beside it

    @property
    def gated(self) -> bool:
        return self.activation == GATED

    @property
    def columns(self) -> int:
        """Columns of out."""
        return self.n // 2 if self.gated else self.n

    @cached_property
    def least(self) -> QuantizedProblem:
        """The least problem of those that differ in extents alone."""
        return self.replace(m=1, n=128, k=128)

    @property
    def weight_bytes(self) -> float:
        return self.packed_bytes(self.n, self.k)


# Values that each schedule searches; a knob that is missing keeps its first value.
BODIES: dict[str, dict[str, tuple[Any, ...]]] = {
    "skinny": {
        "tile_m": (8, 16, 24, 32, 48, 64),
        "tile_n": (16, 32, 64, 128),
        "tile_k": (64, 128, 256, 512, 1024),
        "stages": (3, 4, 6, 8),
        "stream_k": (False, True),
        "pdl": (False, True),
        "warps_n": (1, 2, 4),
        "warps_k": (1, 2, 4, 8),
        "ctas_per_sm": (1, 2, 3, 4),
        "prefetch_l2": (0, 2, 4),
    },
    "warpgroup": {
        "tile_m": (16, 32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256),
        "tile_n": (64, 128, 192),
        "tile_k": (64, 128),
        "stages": (2, 3, 4, 5, 6, 7, 8),
        "stream_k": (False, True),
        "pdl": (False, True),
        "scaled": ("accumulators", "weights"),
        "raster": (1, 8),
        "split_k": (1, 2, 3, 4, 5, 6, 8),
        "ctas_per_sm": (1, 2),
        "warps_k": (1, 2),
    },
}


@dataclass(frozen=True)
class QuantizedConfig(BodiesConfig):
    """The knobs of both schedules; ``body`` names the one that gives them a meaning.

    ``tile_m`` are tokens, ``tile_n`` weight rows. ``stream_k``: CTAs share the k-tiles of tiles that would not fill
    the GPU's last wave. ``split_k``: CTAs of a cluster that share a tile's K. ``scaled``: whether scales multiply fp32
    accumulators or decoded weights. ``warps_k``: groups of warps that divide each k-tile (skinny), or consumer groups
    that take k-tiles in turn (warpgroup).
    """

    body: str = knob("skinny", "warpgroup")
    tile_m: int = knob(8, 16, 24, 32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256)
    tile_n: int = knob(16, 32, 64, 128, 192)
    tile_k: int = knob(64, 128, 256, 512, 1024)
    stages: int = knob(2, 3, 4, 5, 6, 7, 8)
    stream_k: bool = knob(False, True)
    pdl: bool = knob(False, True)
    warps_n: int = knob(1, 2, 4)
    warps_k: int = knob(1, 2, 4, 8)
    ctas_per_sm: int = knob(1, 2, 3, 4)
    prefetch_l2: int = knob(0, 2, 4)
    scaled: str = knob("accumulators", "weights")
    raster: int = knob(1, 8)
    split_k: int = knob(1, 2, 3, 4, 5, 6, 8, added=True)
    bodies = BODIES

    @classmethod
    def span(cls, body: str, among: Among = EVERY) -> Columns:
        """Every config of ``body``, some knobs confined to ``among``; ``prefetch_l2`` is for ``pdl`` alone."""
        c = super().span(body, among)
        return c.taken((c.prefetch_l2 == 0) | (c.pdl == 1))


def since_revision_1(problem: str, config: str) -> str:
    """Revision 1 had other names for a knob and for a value."""
    return respell(config, {"ahead": "prefetch_l2", "scaled=sums": "scaled=accumulators"})
