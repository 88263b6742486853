"""``dequantize``: columns of a packed weight as a matrix, for products that no packed body computes (gradients)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cutekernels import rates
from cutekernels.errors import UnsupportedProblem
from cutekernels.op import Config, Problem, Work, extent, knob, plain
from cutekernels.ops.gemm.layouts import alignment
from cutekernels.ops.gemm.problem import ELEMENT_BYTES
from cutekernels.ops.quantized import coefficients
from cutekernels.ops.quantized.problem import BITS, SCALE_BYTES, check_scaling
from cutekernels.ops.shared.checks import check_results
from cutekernels.ops.shared.dtypes import DTYPES, GPU_DTYPES
from cutekernels.ops.shared.tensor_op import TensorOp
from cutekernels.rules import Ruled, of_both, of_config

if TYPE_CHECKING:
    from torch import Tensor

    from cutekernels.backends import Artifact
    from cutekernels.gpu import GpuSpec

EXPONENT = "e8m0"
BLOCK = 128  # rows and columns of a block that shares a scale


@dataclass(frozen=True)
class DequantizeProblem(Problem):
    """``columns`` of a weight of ``n`` rows and ``k`` columns; the other fields as of ``quantized_linear``."""

    n: int = extent()
    columns: int = extent()
    k: int = extent()
    dtype: str = plain("bf16", "fp16")
    code: str = plain("int4", "int8", "e4m3", "nf4", "e2m1")
    group: int = plain(128, 64, 32, 0)
    scale_rows: int = plain(1, 128)
    scale: str = plain("fp16", "bf16", "fp32", "e8m0")
    zeros: bool = plain(False, True)
    out_align: int = plain(8, 1)  # elements that divide the address, the pitch and the columns of out

    def __post_init__(self) -> None:
        super().__post_init__()
        check_scaling(self)
        if self.columns % self.out_align:
            raise UnsupportedProblem(f"out_align={self.out_align} must divide columns={self.columns}")


@dataclass(frozen=True)
class DequantizeConfig(Config):
    """``tiles``: packed tiles of 64 x 64 that a CTA has, neighbours along K."""

    tiles: int = knob(1, 2, 4)
    pdl: bool = knob(False, True)


class Dequantize(Ruled, TensorOp[DequantizeProblem, DequantizeConfig]):
    """Arguments: packed, scales, zeros or None of a QuantizedWeight, and the first column, a multiple of 64."""

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
    )
    results = ("out",)
    inputs = ("packed", "scales", "zeros")
    options = ("code", "group", "n", "k", "columns", "dtype")
    scalars = ("first",)
    schema = (
        "Tensor packed, Tensor scales, Tensor? zeros, "
        "str code, int group, int n, int k, int columns, str dtype, int first"
    )
    in_place = False
    flattens = False

    @of_config
    def pdl_where_there_is(self, c: DequantizeConfig, gpu: GpuSpec) -> str | None:
        if not c.pdl or gpu.has_pdl:
            return None
        return f"pdl=1 needs programmatic dependent launch, which {gpu.name} lacks"

    @of_both
    def most_tiles(self, p: DequantizeProblem, c: DequantizeConfig, gpu: GpuSpec) -> str | None:
        from cutekernels.quant import layout

        if c.tiles == 1 or p.columns > (c.tiles - 1) * layout.TILE:
            return None
        return f"tiles={c.tiles} are more than {p.columns} columns have: take fewer"

    def default(self, p: DequantizeProblem, gpu: GpuSpec) -> DequantizeConfig:
        from cutekernels.quant import layout

        return DequantizeConfig(2 if p.columns > layout.TILE else 1, gpu.has_pdl)

    def estimate_us(self, p: DequantizeProblem, c: DequantizeConfig, gpu: GpuSpec) -> float:
        busy = self.work(p).bytes / (gpu.dram_gbps * 1e3)
        own = coefficients.DEQUANTIZE
        odds = own.odd * (abs(c.tiles - 2) + (not c.pdl))
        return float(rates.of(gpu).launch_us + own.dram * busy * (1.0 + odds))

    def build(self, p: DequantizeProblem, c: DequantizeConfig, gpu: GpuSpec) -> Artifact:
        from cutlass import Int32
        from cutlass.cute import sym_int

        from cutekernels.backends import cute as backend
        from cutekernels.kernels.cute.quantized.dequantize import Dequantize as Body

        scale, align = backend.scale_of(p.scale), p.out_align
        body = Body(p.code, scale, p.group, p.scale_rows, p.zeros, c.tiles, align, c.pdl)
        out = backend.matrix(backend.dtype_of(p.dtype), sym_int(), sym_int(divisibility=align), align)
        return backend.compile(body, out, *weight_fakes(p), Int32(64), gpu=gpu)

    def bind(self, p: DequantizeProblem, c: DequantizeConfig, kernel: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args: kernel(*args)

    def takes(self, name: str, t: Tensor) -> bool:
        if name == "out":
            return t.stride(-1) == 1
        return t.is_contiguous() and (t.device.type == "meta" or t.data_ptr() % 16 == 0)

    def admit(self, inputs: Sequence[Tensor | None], results: Sequence[Tensor] = (), **options: Any) -> None:
        from cutekernels.quant import layout

        packed, scales, zeros = inputs
        assert packed is not None and scales is not None
        check_weight(packed, scales, zeros, options["code"], options["group"], options["n"], options["k"])
        if options["dtype"] not in DTYPES:
            raise UnsupportedProblem(f"dtype must be {' or '.join(DTYPES)}; it is {options['dtype']!r}")
        if not 0 < options["columns"] <= packed.shape[1] * layout.TILE:
            raise UnsupportedProblem(f"columns must be 1 to {options['k']}; they are {options['columns']}")
        for out in results:
            if tuple(out.shape) != (options["n"], options["columns"]) or out.dtype != DTYPES[options["dtype"]]:
                raise UnsupportedProblem(f"out must be {(options['n'], options['columns'])} {options['dtype']}")
        check_results(results)

    def fresh(self, *inputs: Tensor | None, **options: Any) -> tuple[Tensor, ...]:
        packed = inputs[0]
        assert packed is not None
        return (packed.new_empty((options["n"], options["columns"]), dtype=DTYPES[options["dtype"]]),)

    def problem(self, *operands: Tensor | None, **options: Any) -> DequantizeProblem:
        out, packed, scales, zeros = operands
        assert out is not None and packed is not None and scales is not None
        return DequantizeProblem(
            **options,
            scale_rows=rows_of_scale(scales, options["n"]),
            scale=scale_of(scales),
            zeros=zeros is not None,
            out_align=8 if alignment(out) == 8 else 1,
        )

    def outputs(self, p: DequantizeProblem, *args: Any) -> tuple[Tensor, ...]:
        pitch = p.columns if p.out_align == 8 else -(-p.columns // 8) * 8 + 1
        return (args[0].new_empty((p.n, pitch), dtype=DTYPES[p.dtype])[:, : p.columns],)

    def sample(self, p: DequantizeProblem, device: str, seed: int) -> tuple[Any, ...]:
        from cutekernels.quant import layout

        packed, scales, zeros = random_weight(p, device, seed)
        last = max(0, (p.k - p.columns) // layout.TILE)
        return packed, scales, zeros, seed % (last + 1) * layout.TILE

    def evaluate(self, *args: Any, **options: Any) -> tuple[Tensor, ...]:
        packed, scales, zeros, first = args
        first, end = int(first), int(first) + options["columns"]
        whole = decode_codes(packed, scales, zeros, *[options[name] for name in ("code", "group", "n", "k")])
        return (whole[:, first:end].to(DTYPES[options["dtype"]]),)

    def work(self, p: DequantizeProblem) -> Work:
        share = min(1.0, p.columns / max(1, p.k))
        groups = -(-p.k // p.group) if p.group else 1
        scales = groups * p.n / p.scale_rows * (SCALE_BYTES[p.scale] + p.zeros)
        moved = p.n * p.columns * (BITS[p.code] / 8 + ELEMENT_BYTES) + share * scales
        return Work(2.0 * p.n * p.columns, float(moved), 1.0)


DEQUANTIZE = Dequantize()


def scale_of(scales: Tensor) -> str:
    """The name of their type in problems; exponents are bytes."""
    return EXPONENT if scales.element_size() == 1 else GPU_DTYPES.names[scales.dtype]


def rows_of_scale(scales: Tensor, n: int) -> int:
    """Rows that share a scale: 1, or 128."""
    from cutekernels.quant import layout

    return 1 if scales.shape[1] == -(-n // layout.TILE) * layout.TILE else BLOCK


def decode_codes(packed: Tensor, scales: Tensor, zeros: Tensor | None, code: str, group: int, n: int, k: int) -> Tensor:
    """A packed weight of ``(n, k)`` in fp32."""
    import torch

    from cutekernels.quant.weight import QuantizedWeight

    rows = rows_of_scale(scales, n)
    weight = QuantizedWeight(
        code=code, group=group, scale_rows=rows, shape=(n, k), packed=packed, scales=scales, zeros=zeros
    )
    return weight.dequantize(torch.float32)


def weight_fakes(p: Any) -> tuple[Any, Any, Any]:
    """Packed, scales and zeros of a weight of ``p`` as compilers see them."""
    from cutlass import Uint8

    from cutekernels.backends import cute as backend
    from cutekernels.quant import layout

    packed = backend.dense(Uint8, None, None, layout.TILE_BYTES[BITS[p.code]], align=16)
    scales = backend.dense(backend.scale_of(p.scale), None, None, align=16)
    return packed, scales, backend.dense(Uint8, None, None, align=16) if p.zeros else None


def check_weight(packed: Tensor, scales: Tensor, zeros: Tensor | None, code: str, group: int, n: int, k: int) -> None:
    """Raises UnsupportedProblem for tensors that are no packed weight of ``(n, k)``."""
    import torch

    from cutekernels.quant import layout

    if code not in BITS:
        raise UnsupportedProblem(f"code must be one of {', '.join(BITS)}; it is {code!r}")
    expected = layout.packed_shape((n, k), BITS[code])
    if packed.dtype != torch.uint8 or tuple(packed.shape) != expected:
        raise UnsupportedProblem(
            f"packed must be uint8 {expected} for a weight of {n} x {k}; it is {packed.dtype} {tuple(packed.shape)}"
        )
    groups = -(-k // group) if group else 1
    columns = (expected[0] * layout.TILE, -(-n // BLOCK))
    kinds = (torch.uint8,) if code == "e2m1" else tuple(GPU_DTYPES.values())
    if scales.dtype not in kinds or scales.dim() != 2 or scales.shape[0] != groups or scales.shape[1] not in columns:
        raise UnsupportedProblem(
            f"scales must be ({groups}, {columns[0]}), {'uint8' if code == 'e2m1' else 'fp16, bf16 or fp32'}, for "
            f"{n} x {k} in groups of {group}; they are {tuple(scales.shape)} {scales.dtype}"
        )
    if zeros is not None and (zeros.dtype != torch.uint8 or zeros.shape != scales.shape):
        raise UnsupportedProblem(
            f"zeros must be uint8 of the scales' shape; they are {tuple(zeros.shape)} {zeros.dtype}"
        )
    for name, t in (("scales", scales), ("zeros", zeros)):
        if t is not None and t.device != packed.device:
            raise UnsupportedProblem(f"{name} must be on packed's device {packed.device}; it is on {t.device}")


def random_weight(p: Any, device: str, seed: int) -> tuple[Tensor, Tensor, Tensor | None]:
    """Random packed, scales and zeros that pose ``p``; a product with standard normal tokens is near 1."""
    import torch

    from cutekernels.quant import layout

    draw = torch.Generator(device=device).manual_seed(seed)
    shape: tuple[int, ...] = layout.packed_shape((p.n, p.k), BITS[p.code])
    packed = torch.randint(0, 256, shape, generator=draw, device=device, dtype=torch.uint8)
    if p.code == "e4m3":
        packed = torch.where(packed % 128 == 127, packed - 1, packed)  # those codes are NaN
    groups = -(-p.k // p.group) if p.group else 1
    shape = (groups, -(-p.n // 64) * 64) if p.scale_rows == 1 else (groups, -(-p.n // BLOCK))
    size = {"int4": 5.0, "int8": 74.0, "e4m3": 130.0, "nf4": 0.5, "e2m1": 2.9}[p.code] * max(1, p.k) ** 0.5
    scales = (torch.rand(shape, generator=draw, device=device) + 0.5) / size
    if p.scale == EXPONENT:
        scales = (torch.frexp(scales).exponent + 126).to(torch.uint8)
    else:
        scales = scales.to(GPU_DTYPES[p.scale])
    zeros = None
    if p.zeros:
        zeros = torch.randint(0, 17, shape, generator=draw, device=device).to(torch.uint8)
    return packed, scales, zeros
