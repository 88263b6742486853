"""``dequantize``: columns of a packed weight as a matrix, for products that no packed body computes (gradients)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cutekernels import rates
from cutekernels.errors import UnsupportedProblem
from cutekernels.op import C, Config, P, Work, extent, knob, plain
from cutekernels.ops.products.schedules import coefficients
from cutekernels.ops.products.schedules.packed_problem import PackedWeight
from cutekernels.ops.products.schedules.problem import ELEMENT_BYTES
from cutekernels.ops.shared.cute_op import CuteOp, CutePart
from cutekernels.ops.shared.dtypes import DTYPES, TYPES
from cutekernels.ops.shared.operands import Array, Matrix, Named, Operand, Sizes
from cutekernels.quant import layout
from cutekernels.rules import Broken, Ruled, of_both, of_config

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from cutekernels.gpu import GpuSpec

BLOCK = 128  # rows and columns of a block that shares a scale


@dataclass(frozen=True)
class DequantizeProblem(PackedWeight):
    """``columns`` of a weight of ``n`` rows and ``k`` columns. ``out_align`` as of ``quantized_linear``."""

    n: int = extent()
    columns: int = extent()
    k: int = extent()
    out_align: int = plain(8, 1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.columns % self.out_align:
            raise UnsupportedProblem(f"out_align={self.out_align} must divide columns={self.columns}")


@dataclass(frozen=True)
class DequantizeConfig(Config):
    """``tiles``: packed tiles of 64 x 64 that a CTA has, neighbours along K."""

    tiles: int = knob(1, 2, 4)
    pdl: bool = knob(False, True)


def weight_operands(rows: str, tiles: str) -> tuple[Operand, Operand, Operand, Operand]:
    """Packed codes, scales, zeros and factors of a weight of so many ``rows``, whose ``tiles`` of 64 lie packed."""
    own = dict[str, Any](strides=(), align=16)
    return (
        Array(tiles, "k/64", "tile_bytes", dtype="u8", **own),
        Array("k/step", f"{rows}^64|{rows}/128", dtype="scale", **own),
        Array("k/step", f"{rows}^64", dtype="u8", given="zeros", **own),
        Array("pair", f"{rows}^64", dtype="fp32", given="factors", **own),
    )


class PackedPart(CutePart[P, C]):
    """The common part of ops of a packed weight, whose operands are those of :func:`weight_operands`."""

    in_place = False
    beyond = ("group",)
    fixed = ("tile_bytes",)

    def refuse(self, named: Named, sizes: Sizes, **options: Any) -> None:
        """Refuses scales of another type than the code's, and factors of other groups than 16."""
        scales, factors, code = named["scales"], named["factors"], options["code"]
        assert scales is not None
        if (factors is not None) != (options["group"] == 16):
            raise UnsupportedProblem("factors are those of groups of 16: pass both, or neither")
        own = TYPES["e8m0" if factors is None else "ue5m3"] if code == "e2m1" else None
        if scales.dtype != own if own else not scales.is_floating_point():
            kinds = own or "fp16, bf16 or fp32"
            raise UnsupportedProblem(f"scales of {code} must be {kinds}; they are {scales.dtype}")

    def facts(self, named: Named, sizes: Sizes) -> dict[str, Any]:
        return {"scale_rows": rows_of_scale(named["scales"], sizes.get("total", sizes["n"]))}

    def draw(self, p: Any, name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor | None:
        """Random packed, scales or zeros that pose ``p``; a product with standard normal tokens is near 1."""
        import torch

        device = generator.device
        if name == "packed":
            packed = torch.randint(0, 256, shape, generator=generator, device=device, dtype=torch.uint8)
            if p.code == "e4m3":
                packed = layout.spread(torch.where(packed % 128 == 127, packed - 1, packed), "e4m3")  # no NaN
            return packed
        if name == "zeros":
            return torch.randint(0, 17, shape, generator=generator, device=device).to(torch.uint8)
        if name == "factors":
            factors = torch.rand(shape, generator=generator, device=device) + 0.5
            factors[1, ::2] = 1.0  # nothing divides those rows
            factors[1, 1::2] *= 400.0 * max(1, p.k) ** 0.5
            factors[0, ::2] /= 400.0 * max(1, p.k) ** 0.5
            factors[0, 1::2] = 1.0 / factors[1, 1::2]
            return factors
        if name != "scales":
            return None
        if p.scale == "ue5m3":  # of 2 ** -9 to 448
            numbers = torch.randint(48, 191, (4 * shape[0], shape[1]), generator=generator, device=device)
            return layout.pack_scales(numbers.to(torch.uint8))
        if p.scale_rows > 1:
            shape = shape[0], -(-shape[1] // p.scale_rows)
        size = {"int4": 5.0, "int8": 74.0, "e4m3": 130.0, "nf4": 0.5, "e2m1": 2.9}[p.code] * max(1, p.k) ** 0.5
        scales = (torch.rand(shape, generator=generator, device=device) + 0.5) / size
        return (torch.frexp(scales).exponent + 126).to(torch.uint8) if p.scale == "e8m0" else scales


class Dequantize(Ruled, PackedPart[DequantizeProblem, DequantizeConfig], CuteOp[DequantizeProblem, DequantizeConfig]):
    """A QuantizedWeight's packed, scales, zeros and factors; ``first`` is the first column, a multiple of 64."""

    name = "dequantize"
    revision = 2
    Problem = DequantizeProblem
    Config = DequantizeConfig
    suite = (
        "n=4096 columns=4096 k=4096",
        "n=1000 columns=128 k=1096 code=e4m3 scale_rows=128 scale=fp32",
        "n=200 columns=72 k=200 group=64 zeros=1 scale=bf16 dtype=fp16",
        "n=130 columns=64 k=64 code=int8 group=0 scale=fp32",
        "n=100 columns=100 k=164 group=32 zeros=1 out_align=1",
        "n=64 columns=256 k=256 code=nf4 group=64 scale=fp32",
        "n=192 columns=256 k=256 code=e2m1 group=32 scale=e8m0",
        "n=192 columns=256 k=256 code=e2m1 group=16 scale=ue5m3 factors=1",
    )
    out = Matrix("n", "columns", result=True, align="out_align")
    packed, scales, zeros, factors = weight_operands("n", "n/64")
    options = ("code", "group", "n", "k", "columns", "dtype")
    scalar_types = {"first": "i32"}

    @of_config
    def dependent_launch(self, c: DequantizeConfig, gpu: GpuSpec) -> Broken:
        yield c.pdl and not gpu.has_pdl, "pdl=1 needs programmatic dependent launch, which {} lacks", gpu.name

    @of_both
    def most_tiles(self, p: DequantizeProblem, c: DequantizeConfig, gpu: GpuSpec) -> Broken:
        many = c.tiles > 1 and p.columns <= (c.tiles - 1) * layout.TILE
        yield many, "tiles={} are more than {} columns have: take fewer", c.tiles, p.columns

    def default(self, p: DequantizeProblem, gpu: GpuSpec) -> DequantizeConfig:
        return DequantizeConfig(2 if p.columns > layout.TILE else 1, gpu.has_pdl)

    def estimate_us(self, p: DequantizeProblem, c: DequantizeConfig, gpu: GpuSpec) -> float:
        busy = self.work(p).bytes / (gpu.dram_gbps * 1e3)
        own = coefficients.DEQUANTIZE
        odds = own.odd * (abs(c.tiles - 2) + (not c.pdl))
        return float(rates.of(gpu).launch_us + own.dram * busy * (1.0 + odds))

    def body(self, p: DequantizeProblem, c: DequantizeConfig, gpu: GpuSpec) -> Any:
        from cutekernels.backends import cute as backend
        from cutekernels.kernels.cute.parts.packed import PackedWeights
        from cutekernels.kernels.cute.products.dequantize import Dequantize as Body

        fp16, scale = backend.type_of("fp16"), backend.type_of(p.scale)
        weights = PackedWeights(p.code, fp16, scale, p.group, p.scale_rows, p.zeros, p.factors)
        return Body(weights, c.tiles, p.out_align, c.pdl)

    def divisors(self, p: DequantizeProblem, c: DequantizeConfig) -> dict[str, int]:
        return {"columns": p.out_align}

    def derive(self, sizes: Sizes, **options: Any) -> None:
        sizes |= steps(options)

    def refuse(self, named: Named, sizes: Sizes, **options: Any) -> None:
        super().refuse(named, sizes, **options)
        if not 0 < sizes["columns"] <= -(-sizes["k"] // 64) * 64:
            raise UnsupportedProblem(f"columns must be 1 to {sizes['k']}; they are {sizes['columns']}")

    def draw_scalars(self, p: DequantizeProblem, generator: torch.Generator) -> tuple[int]:
        last = max(0, (p.k - p.columns) // 64)
        return (generator.initial_seed() % (last + 1) * 64,)

    def evaluate(self, *args: Any, **options: Any) -> tuple[Tensor, ...]:
        *weight, first = args
        first, end = int(first), int(first) + options["columns"]
        whole = decode_codes(weight, *[options[name] for name in ("code", "group", "n", "k")])
        return (whole[:, first:end].to(DTYPES[options["dtype"]]),)

    def work(self, p: DequantizeProblem) -> Work:
        share = min(1.0, p.columns / max(1, p.k))
        moved = share * p.packed_bytes(p.n, p.k) + p.n * p.columns * ELEMENT_BYTES
        return Work(2.0 * p.n * p.columns, float(moved), 1.0)


DEQUANTIZE = Dequantize()


def rows_of_scale(scales: Tensor | None, n: int) -> int:
    """Rows of a weight of ``n`` that share a scale: 1, or 128."""
    assert scales is not None
    return 1 if scales.shape[1] == -(-n // layout.TILE) * layout.TILE else BLOCK


def decode_codes(weight: Sequence[Any], code: str, group: int, n: int, k: int) -> Tensor:
    """A weight of ``(n, k)`` in fp32, from its packed codes, scales, zeros and factors."""
    import torch

    from cutekernels.quant.weight import QuantizedWeight

    packed, scales, zeros, factors = weight
    rows = rows_of_scale(scales, n)
    whole = QuantizedWeight(code, group, rows, (n, k), packed, scales, zeros, factors=factors)
    return whole.dequantize(torch.float32)


def steps(options: Mapping[str, Any]) -> Sizes:
    """Bytes of a packed tile of 64 x 64, elements of K that a number of the scales is for, and rows of factors."""
    tile_bytes = layout.packed_shape((1, 1), options["code"])[-1]
    return {"tile_bytes": tile_bytes, "step": layout.step_of(options["group"]), "pair": 2}


OPS = (DEQUANTIZE,)
