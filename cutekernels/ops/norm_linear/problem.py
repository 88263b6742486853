"""Problems and configs of ``rms_norm_linear`` and ``linear_silu_mul``; the ops are in ``op.py``."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

from cutekernels.columns import Columns
from cutekernels.errors import UnsupportedProblem
from cutekernels.kernels.activations import ACTIVATIONS
from cutekernels.op import Config, Problem, extent, knob, ladder, plain, respell
from cutekernels.ops.gemm import problem as gemm
from cutekernels.ops.gemm.problem import (
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
from cutekernels.ops.gemm.schedule import Extras
from cutekernels.rules import EVERY, Among, values_of

_SKINNY, _SKINNY_WARPGROUP = BODIES["skinny"], dict(BODIES["skinny_warpgroup"])
_SKINNY_WARPGROUP["tile_m"] = tuple(tile for tile in _SKINNY_WARPGROUP["tile_m"] if tile <= MOST_TOKENS)
# Behind a gate, whose tiles are of 128 columns or more, so that the deepest pipelines have no room.
_WARPGROUP = BODIES["warpgroup"] | {
    "tile_n": tuple(tile for tile in BY_SIXTEENS if tile >= 128),
    "stages": (3, 4, 5, 6, 7, 8, 9),
    "split_k": (1,),
}


def _either(knob: str) -> tuple[int, ...]:
    """The values that any body takes; skinny's first."""
    return tuple(dict.fromkeys((*_SKINNY[knob], *_SKINNY_WARPGROUP[knob], *_WARPGROUP.get(knob, ()))))


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

    @property
    @abstractmethod
    def weight(self) -> str:
        """The norm's weight: ``same`` type as x, ``fp32`` or ``none``."""

    @property
    @abstractmethod
    def extras(self) -> Extras:
        """Work of a fused body beside the product."""

    @property
    def product(self) -> GemmProblem:
        """The product alone, with the weight in the layout of ``nn.Linear``."""
        rows = self.n * (2 if self.extras.gated else 1)
        align = WIDEST if self.layout != "any" and self.k % WIDEST == 0 else 1
        return GemmProblem(
            m=self.m, n=rows, k=self.k, dtype=self.dtype, b_major="k", a_align=align, b_align=align, out_align=1
        )

    @property
    def epilogue(self) -> GemmProblem:
        """The product with what follows it."""
        return self.product

    @property
    def gamma_bytes(self) -> int:
        return {"none": 0, "same": ELEMENT_BYTES, "fp32": 4}[self.weight]


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
    def weight(self) -> str:
        return self.norm_weight

    @property
    def epilogue(self) -> GemmProblem:
        return self.product.replace(bias=self.bias, activation=self.activation)

    @property
    def extras(self) -> Extras:
        return Extras(norm=True, gamma_bytes=self.gamma_bytes, squares=self.rstd == "computed")


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
    def weight(self) -> str:
        return self.norm_weight

    @property
    def extras(self) -> Extras:
        return Extras(norm=self.norm, gamma_bytes=self.gamma_bytes, squares=self.norm, gated=True)


# ---- configs --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class NormLinearConfig(Config):
    """``path``, and the knobs of the fused kernel, which are those of ``gemm``'s body of that name.

    A chain keeps the knobs' defaults: its text is ``path=chain``.
    """

    path: str = knob("chain", "fused")
    tile_m: int = knob(*_either("tile_m"), added=True)
    tile_n: int = knob(*_either("tile_n"), added=True)
    tile_k: int = knob(*_either("tile_k"), added=True)
    warps_n: int = knob(*_SKINNY["warps_n"], added=True)
    warps_k: int = knob(*_SKINNY["warps_k"], added=True)
    stages: int = knob(*_either("stages"), added=True)
    split_k: int = knob(*_either("split_k"), added=True)
    pdl: bool = knob(*_SKINNY["pdl"], added=True)
    body: str = knob("skinny", "skinny_warpgroup", "warpgroup", added=True)
    prefetch_l2: int = knob(*_either("prefetch_l2"), added=True)
    raster: int = knob(*_WARPGROUP["raster"], added=True)
    pingpong: bool = knob(*_WARPGROUP["pingpong"], added=True)
    cluster_m: int = knob(*_WARPGROUP["cluster_m"], added=True)
    cluster_n: int = knob(*_WARPGROUP["cluster_n"], added=True)

    @classmethod
    def every(cls) -> Iterator[NormLinearConfig]:
        return iter(_every())

    @classmethod
    def fused(cls, product: GemmConfig) -> NormLinearConfig:
        """One kernel, by that config of the product alone."""
        return cls.drawn([("path", "fused"), *((name, getattr(product, name)) for name in KNOBS)])

    @property
    def product(self) -> GemmConfig:
        """The config of the product alone."""
        return _product(self)


def since_revision_1(problem: str, config: str) -> str:
    """Revision 1 named the tile of ``out^T`` where the body was skinny, which no text says, or specialized."""
    return respell(config, RENAMED if "body=warpgroup" in config.split() else RENAMED | ACROSS)


CHAIN = NormLinearConfig("chain")
KNOBS = {name: values for name, values in NormLinearConfig.space().items() if name != "path"}
# What each body searches; a knob that is missing keeps its first value.
FUSED: dict[str, dict[str, tuple[Any, ...]]] = {
    body: {name: values for name, values in own.items() if name in KNOBS and name != left_out} | {"body": (body,)}
    for body, own, left_out in (
        ("skinny", _SKINNY, "prefetch_l2"),
        ("skinny_warpgroup", _SKINNY_WARPGROUP, ""),
        ("warpgroup", _WARPGROUP, "swap_ab"),
    )
}


def span(body: str, among: Among = EVERY) -> Columns:
    """The products' configs of fused ``body``, some knobs confined to ``among``."""
    return gemm.span(body, values_of(GemmConfig, **FUSED[body]) | dict(among))


@cache
def _every() -> tuple[NormLinearConfig, ...]:
    return CHAIN, *(NormLinearConfig.fused(c) for body in FUSED for c in span(body))


@cache
def _product(c: NormLinearConfig) -> GemmConfig:
    return GemmConfig(
        tile_m=c.tile_m, tile_n=c.tile_n, tile_k=c.tile_k, warps_m=1, warps_n=c.warps_n, stages=c.stages,
        raster=c.raster, ctas_per_sm=1, body=c.body, warps_k=c.warps_k, split_k=c.split_k, pdl=c.pdl,
        prefetch_l2=c.prefetch_l2, pingpong=c.pingpong, cluster_m=c.cluster_m, cluster_n=c.cluster_n,
    )  # fmt: skip
