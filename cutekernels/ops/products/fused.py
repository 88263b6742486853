"""Problems and configs of ``rms_norm_linear`` and ``linear_silu_mul``, and the schedules of their fused kernels: those
of ``gemm``, with rules of their own.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, ClassVar

from cutekernels.columns import Columns
from cutekernels.errors import UnsupportedProblem
from cutekernels.gpu import GpuSpec
from cutekernels.kernels.activations import ACTIVATIONS
from cutekernels.op import Config, Problem, extent, knob, ladder, plain, respell
from cutekernels.ops.products.schedules.problem import (
    ACROSS,
    BODIES,
    BY_SIXTEENS,
    ELEMENT_BYTES,
    MOST_TOKENS,
    RENAMED,
    WIDEST,
    GemmConfig,
    GemmProblem,
)
from cutekernels.ops.products.schedules.schedule import Extras
from cutekernels.ops.products.schedules.skinny import Skinny
from cutekernels.ops.products.schedules.skinny_warpgroup import SkinnyWarpgroup
from cutekernels.ops.products.schedules.warpgroup import Warpgroup
from cutekernels.rules import Among, Broken, of_problem

GATE_ROWS = 8  # weight rows of the gate, then as many of up, in an MMA's 16

# ---- problems -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class NormLinearProblem(Problem):
    """m tokens, n outputs of each, k.

    ``layout``: ``aligned`` where all operands are 16-byte aligned with K contiguous; ``inputs`` where rows of the
    result are not, though n is a multiple of 8; ``any`` elsewhere, where no fused kernel is possible.
    """

    m: int = extent(ladder)
    n: int = extent()
    k: int = extent()
    dtype: str = plain("bf16", "fp16")
    layout: str = plain("aligned", "any", "inputs")

    norm_weight = bias = activation = "none"  # fields of those that have them

    @property
    @abstractmethod
    def extras(self) -> Extras:
        """Work of a fused body beside the product."""

    @property
    def epilogue(self) -> GemmProblem:
        """The product with what follows it, and with the weight in the layout of ``nn.Linear``."""
        rows = self.n * (2 if self.extras.gated else 1)
        align, out_align = WIDEST if self.layout != "any" and self.k % WIDEST == 0 else 1, math.gcd(rows, WIDEST)
        return GemmProblem(
            self.m, rows, self.k, dtype=self.dtype, b_major="k", bias=self.bias, activation=self.activation,
            a_align=align, b_align=align, out_align=out_align,
        )  # fmt: skip

    @property
    def gamma_bytes(self) -> int:
        return {"none": 0, "same": ELEMENT_BYTES, "fp32": 4}[self.norm_weight]


@dataclass(frozen=True)
class RmsNormLinearProblem(NormLinearProblem):
    """``rstd`` of each token is computed or given."""

    norm_weight: str = plain("same", "none", "fp32")
    rstd: str = plain("computed", "given")
    bias: str = plain("none", "same", "fp32")
    activation: str = plain(*ACTIVATIONS)

    def bucket(self) -> RmsNormLinearProblem:
        """One tuning serves every epilogue and both types, as in ``gemm``."""
        return super().bucket().replace(bias="none", activation="none", dtype="bf16")

    @property
    def extras(self) -> Extras:
        return Extras(norm=True, gamma_bytes=self.gamma_bytes, squares=self.rstd == "computed", layout=self.layout)


@dataclass(frozen=True)
class LinearSiluMulProblem(NormLinearProblem):
    """``norm``: whether an RMS norm stands in front."""

    norm: bool = plain(False, True)
    norm_weight: str = plain("none", "same", "fp32")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.norm_weight != "none" and not self.norm:
            raise UnsupportedProblem(f"norm_weight={self.norm_weight} needs norm=1")

    def bucket(self) -> LinearSiluMulProblem:
        """One tuning serves both types, as in ``gemm``."""
        return super().bucket().replace(dtype="bf16")

    @property
    def extras(self) -> Extras:
        return Extras(self.norm, self.gamma_bytes, self.norm, gated=True, layout=self.layout)


# ---- fused kernels ---------------------------------------------------------------------------------------


@lru_cache(maxsize=256)
def product_of(p: NormLinearProblem) -> GemmProblem:
    """The product as a fused body computes it; rows of out are aligned where N is."""
    return p.epilogue.replace(out_align=math.gcd(p.n, WIDEST))


class Fused:
    """One kernel by a schedule of gemm's; the rules of its own are asked before those of the product."""

    def class_of(self, p: GemmProblem, x: Extras) -> Extras:
        return replace(x, layout="aligned")

    def drawn(self, c: GemmConfig) -> Any:
        return NormLinearConfig.fused(c)


class FusedRules:
    """Rules of all fused kernels."""

    name: ClassVar[str]

    @of_problem
    def fused_operands(self, p: GemmProblem, gpu: GpuSpec, x: Extras) -> Broken:
        why = "path=fused takes rows of x and weight 16-byte aligned, K contiguous, of less than 2^31 elements"
        yield x.layout == "any", why
        yield p.k == 0, "path=fused needs a K to sum over"
        rows, why = p.n // 2, "path=fused takes the gate's rows {} at a time; there are {}"
        yield x.gated and rows % GATE_ROWS > 0, why, GATE_ROWS, rows


class NormInFront(FusedRules):
    """Rules of skinny_warpgroup's: a norm in front of the product."""

    @of_problem
    def norm_in_front(self, p: GemmProblem, gpu: GpuSpec, x: Extras) -> Broken:
        other = x.gated or not x.norm
        yield other, "body={} has a norm in front of the product and no gate behind it", self.name
        why = "body={} scales x by norm_weight before rstd is known: it may leave the range of fp16"
        yield p.dtype == "fp16" and x.gamma_bytes > 0, why, self.name
        yield p.m > MOST_TOKENS, "path=fused takes {} tokens or fewer; there are {}", MOST_TOKENS, p.m
        why = "body={} stores {} outputs at a time, aligned: n={}, layout={}"
        yield p.n % WIDEST > 0 or x.layout == "inputs", why, self.name, WIDEST, p.n, x.layout


class GateBehind(FusedRules):
    """Rules of warpgroup's: a gate behind the product."""

    @of_problem
    def gate_behind(self, p: GemmProblem, gpu: GpuSpec, x: Extras) -> Broken:
        other = x.norm or not x.gated
        yield other, "body={} has a gate behind the product and no norm in front", self.name
        why = "body={} stores {} outputs at a time, aligned: layout={}"
        yield x.layout == "inputs", why, self.name, WIDEST, x.layout


class FusedSkinny(Fused, Skinny, FusedRules):
    """A norm in front of the product, a gate behind it."""

    narrowed: ClassVar = {"prefetch_l2": (0,)}


class FusedSkinnyWarpgroup(Fused, SkinnyWarpgroup, NormInFront):
    """A norm in front of the product."""

    narrowed: ClassVar = {
        "tile_m": tuple(tile for tile in BODIES["skinny_warpgroup"]["tile_m"] if tile <= MOST_TOKENS),
        "ctas_per_sm": (1,),
    }

    def usual(self, p: GemmProblem, gpu: GpuSpec, x: Extras) -> Among:
        """More than two CTAs to a tile, whose times nobody measured behind a norm, are for the tuner."""
        return {**super().usual(p, gpu, x), "tile_m": (self.fitting_tiles(p)[0],), "split_k": (1, 2)}

    def usually(self, p: GemmProblem, c: Columns, gpu: GpuSpec, x: Extras) -> Any:
        """Those that run all of their CTAs at once."""
        return -(-p.n // c.tile_n) * c.split_k <= gpu.sm_count


class FusedWarpgroup(Fused, Warpgroup, GateBehind):
    """A gate behind the product. Tiles are of 128 columns or more, so that the deepest pipelines have no room."""

    narrowed: ClassVar = {
        "tile_n": tuple(tile for tile in BY_SIXTEENS if tile >= 128),
        "stages": (3, 4, 5, 6, 7, 8, 9),
        "split_k": (1,),
        "swap_ab": (False,),
    }


FUSED_SCHEDULES = {schedule.name: schedule for schedule in (FusedSkinny(), FusedSkinnyWarpgroup(), FusedWarpgroup())}


# ---- configs --------------------------------------------------------------------------------------------


def _either(knob: str) -> tuple[Any, ...]:
    """The values that any body takes; skinny's first."""
    own = [BODIES[name] | schedule.narrowed for name, schedule in FUSED_SCHEDULES.items()]
    return tuple(dict.fromkeys(value for values in own for value in values.get(knob, ())))


@dataclass(frozen=True)
class NormLinearConfig(Config):
    """``path``, and the knobs of the fused kernel, which are those of ``gemm``'s body of that name.

    A chain keeps the knobs' defaults: its text is ``path=chain``.
    """

    path: str = knob("chain", "fused")
    tile_m: int = knob(*_either("tile_m"), added=True)
    tile_n: int = knob(*_either("tile_n"), added=True)
    tile_k: int = knob(*_either("tile_k"), added=True)
    warps_n: int = knob(*_either("warps_n"), added=True)
    warps_k: int = knob(*_either("warps_k"), added=True)
    stages: int = knob(*_either("stages"), added=True)
    split_k: int = knob(*_either("split_k"), added=True)
    pdl: bool = knob(*_either("pdl"), added=True)
    body: str = knob("skinny", "skinny_warpgroup", "warpgroup", added=True)
    prefetch_l2: int = knob(0, 2, 4, 1, 8, added=True)
    raster: int = knob(*_either("raster"), added=True)
    pingpong: bool = knob(*_either("pingpong"), added=True)
    cluster_m: int = knob(*_either("cluster_m"), added=True)
    cluster_n: int = knob(*_either("cluster_n"), added=True)

    @classmethod
    def every(cls) -> Iterator[NormLinearConfig]:
        yield CHAIN
        for schedule in FUSED_SCHEDULES.values():
            yield from map(schedule.drawn, schedule.span())

    @classmethod
    def fused(cls, product: GemmConfig) -> NormLinearConfig:
        """One kernel, by that config of the product alone."""
        return cls.drawn([("path", "fused"), *((name, getattr(product, name)) for name in KNOBS)])

    @cached_property
    def product(self) -> GemmConfig:
        """The config of the product alone."""
        return GemmConfig(warps_m=1, ctas_per_sm=1, **{name: getattr(self, name) for name in KNOBS})


def since_revision_1(problem: str, config: str) -> str:
    """Revision 1 named the tile of ``out^T`` where the body was skinny, which no text says, or specialized."""
    return respell(config, RENAMED if "body=warpgroup" in config.split() else RENAMED | ACROSS)


CHAIN = NormLinearConfig("chain")
KNOBS = {name: values for name, values in NormLinearConfig.space().items() if name != "path"}
