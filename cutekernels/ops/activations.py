"""``silu_mul``: the elementwise half of SwiGLU, and its gradient.

Two ops share one Problem, one Config and one schedule (:class:`_SiluMulOp`); they differ in operands,
kernel and reference. Below the declarations stand the public function and its registration with torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from cutekernels.errors import UnsupportedProblem
from cutekernels.op import Config, Problem, Work, exact, extent, knob, ladder, plain
from cutekernels.ops import calls
from cutekernels.ops.calls import DTYPE_NAMES, GPU_DTYPES, WIDEST_BYTES, ElementwiseOp, Launch, present
from cutekernels.ops.strides import matrix

if TYPE_CHECKING:
    from cutekernels.backends import Artifact
    from cutekernels.gpu import GpuSpec


# ---- declarations ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SiluMulProblem(Problem):
    """An elementwise pass over matrices of one shape, leading dimensions flattened into rows.

    ``layout``: "dense" where every operand is contiguous, "rows" where the elements of each row are,
    "strided" for the rest. ``align``: bytes that divide every operand's address and, unless dense, its row
    pitch; nothing depends on it where the layout is strided.
    """

    rows: int = extent(ladder)
    cols: int = extent(exact)
    dtype: str = plain("bf16", "fp16", "fp32")
    layout: str = plain("dense", "rows", "strided")
    align: int = plain(16, 8, 4, 2)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.align < self.itemsize:
            raise UnsupportedProblem(
                f"align covers one element of {self.dtype}, {self.itemsize} bytes; it is {self.align}"
            )

    @property
    def itemsize(self) -> int:
        return GPU_DTYPES[self.dtype].itemsize

    @property
    def vec(self) -> int:
        """Elements in one access."""
        return 1 if self.layout == "strided" else self.align // self.itemsize


@dataclass(frozen=True)
class SiluMulConfig(Config):
    """One tile per program; ``evict="first"`` asks the caches to drop the inputs, which are read once."""

    block_rows: int = knob(1, 2, 4, 8, 16, 32)
    block_cols: int = knob(32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
    warps: int = knob(1, 2, 4, 8, 16)
    evict: str = knob("normal", "first")


_EVICT = {"normal": "", "first": "evict_first"}
_MAX_OPERAND_REGISTERS = 160
_GRID_AXIS = 1 << 30


def _power_of_two(n: int) -> int:
    """The smallest power of two from ``n`` up; 1 for nothing."""
    return 1 << max(0, n - 1).bit_length()


def _matrix_strides(t: Tensor) -> tuple[int, int]:
    found = matrix(t.shape, t.stride())
    assert found is not None, "problem() refuses operands that are no matrix"
    return found[2:]


class _SiluMulOp(ElementwiseOp[SiluMulProblem, SiluMulConfig]):
    """What both passes have in common."""

    Problem = SiluMulProblem
    Config = SiluMulConfig
    flops_per_element: ClassVar[int]

    def problem(self, *operands: Tensor | None, **options: Any) -> SiluMulProblem:
        given = present(operands)
        dtype = given[0].dtype
        if dtype not in DTYPE_NAMES:
            raise UnsupportedProblem(f"{self.name} on a GPU takes {', '.join(DTYPE_NAMES.values())}; got {dtype}")
        matrices = []
        for t in given:
            m = matrix(t.shape, t.stride())
            if m is None:
                raise UnsupportedProblem(
                    f"leading dimensions must be walked by one stride; strides {t.stride()} of shape "
                    f"{tuple(t.shape)} are not: pass a contiguous copy"
                )
            matrices.append(m)
        rows, cols = matrices[0][:2]
        if any(col_stride != 1 for *_, col_stride in matrices):
            return SiluMulProblem(rows, cols, DTYPE_NAMES[dtype], "strided")
        dense = rows == 1 or all(pitch == cols for _, _, pitch, _ in matrices)
        bits = WIDEST_BYTES
        for t, (_, _, pitch, _) in zip(given, matrices, strict=True):
            bits |= t.data_ptr() | (0 if dense else pitch * dtype.itemsize)
        return SiluMulProblem(rows, cols, DTYPE_NAMES[dtype], "dense" if dense else "rows", bits & -bits)

    def why_not(self, p: SiluMulProblem, c: SiluMulConfig, gpu: GpuSpec) -> str | None:
        threads = 32 * c.warps
        per_thread = c.block_rows * c.block_cols // threads
        if per_thread < p.vec:
            return f"{threads} threads of {p.vec} elements an access need a tile of {threads * p.vec} elements"
        # fp32 values and, where nothing is known of the strides, 64-bit addresses.
        registers = per_thread * (len(self.inputs) + len(self.results)) * (3 if p.layout == "strided" else 1)
        if registers > _MAX_OPERAND_REGISTERS:
            return f"a thread's tile takes {registers} registers; at most {_MAX_OPERAND_REGISTERS}"
        if p.layout == "dense" and c.block_rows > 1:
            return "a dense problem is one long row: block_rows must be 1"
        if p.layout != "dense" and c.block_cols > max(256, _power_of_two(p.cols)):
            return f"block_cols={c.block_cols} idles most of a tile in rows of {p.cols}"
        if c.block_rows > _power_of_two(p.rows):
            return f"block_rows={c.block_rows} idles most of a tile with {p.rows} rows"
        return None

    def default(self, p: SiluMulProblem, gpu: GpuSpec) -> SiluMulConfig:
        if p.layout == "strided":
            # Square tiles: whichever dimension is contiguous, neighbouring threads use up the sectors they fetch.
            rows = min(32, _power_of_two(p.rows))
            return SiluMulConfig(rows, 32, min(4, rows), "normal")
        # 32 bytes of each operand per thread where that still fills the GPU four times over, else 16; where even
        # that leaves SMs idle, smaller blocks.
        wave = gpu.sm_count * (gpu.max_warps // 4)
        for warps, accesses in ((4, 2), (4, 1), (2, 1), (1, 1)):
            c = self._tile(p, 32 * warps * accesses * WIDEST_BYTES // p.itemsize, warps)
            if self._tiles(p, c) >= (4 * wave if accesses == 2 else gpu.sm_count):
                break
        return c

    def _tile(self, p: SiluMulProblem, elements: int, warps: int) -> SiluMulConfig:
        """A tile of about ``elements``, as wide as a row and as high as is left."""
        widths = [w for w in self.Config.space()["block_cols"] if isinstance(w, int)]
        if p.layout == "dense":
            return SiluMulConfig(1, max(widths[0], elements), warps, "normal")
        width = min(elements, max(widths[0], _power_of_two(p.cols)))
        height = min(32, elements // width, _power_of_two(p.rows))
        if width * height < 32 * p.vec:  # too little for one warp: let lanes idle
            width = max(widths[0], 32 * p.vec // height)
        return SiluMulConfig(height, width, max(1, min(warps, width * height // (32 * p.vec))), "normal")

    def _tiles(self, p: SiluMulProblem, c: SiluMulConfig) -> int:
        if p.layout == "dense":
            return -(-p.rows * p.cols // c.block_cols)
        return -(-p.rows // c.block_rows) * -(-p.cols // c.block_cols)

    def estimate_us(self, p: SiluMulProblem, c: SiluMulConfig, gpu: GpuSpec) -> float:
        """Bytes over bandwidth, stretched where too few bytes are in flight or the last wave is thin."""
        tiles, tile = self._tiles(p, c), c.block_rows * c.block_cols
        resident = min(32, gpu.max_warps // c.warps)  # blocks on one SM
        waves = max(1.0, tiles / (gpu.sm_count * resident))
        busy = min(1.0, tiles / gpu.sm_count) if waves == 1 else waves / -(-waves // 1)
        # Little's law: bandwidth times a loaded memory latency of 0.8 µs must be in flight.
        in_flight = gpu.sm_count * min(resident, tiles / gpu.sm_count) * tile * p.itemsize * len(self.inputs)
        needed = gpu.dram_gbps * 1e3 * 0.8
        narrow = 1.0 if p.layout != "strided" else 4.0
        memory = self.work(p).bytes / (gpu.dram_gbps * 1e3 * 0.92) * narrow
        issue = tiles / gpu.sm_count * 0.05  # an SM starts a block about every 50 ns
        return 1.5 + max(issue, memory / max(0.05, min(1.0, in_flight / needed) * max(0.5, busy)))

    def build(self, p: SiluMulProblem, c: SiluMulConfig, gpu: GpuSpec) -> Artifact:
        from cutekernels.backends.triton import compile_kernel
        from cutekernels.kernels.triton import activations

        operands = (*self.results, *self.inputs)
        signature = dict.fromkeys([f"{name}_ptr" for name in operands], f"*{p.dtype}") | {"rows": "i64", "cols": "i64"}
        divisible = {} if p.layout == "strided" else dict.fromkeys(signature, p.align)
        divisible = {name: n for name, n in divisible.items() if name.endswith("_ptr")}
        constants: dict[str, int | bool | str] = {}
        for name in operands:
            signature |= {f"{name}_row": "i64", f"{name}_col": "i64"}
            if p.layout == "rows":
                divisible[f"{name}_row"] = p.vec
            if p.layout == "dense":
                constants[f"{name}_row"] = 0
            if p.layout != "strided":
                constants[f"{name}_col"] = 1
        if p.layout == "dense":
            constants["rows"] = 1
        constants |= {
            "BLOCK_ROWS": c.block_rows,
            "BLOCK_COLS": c.block_cols,
            "VEC": p.vec,
            "DENSE": p.layout == "dense",
            "PRECISE": p.dtype == "fp32",
            "EVICT": _EVICT[c.evict],
        }
        return compile_kernel(
            getattr(activations, self.name),
            signature=signature | dict.fromkeys(constants, "constexpr"),
            constexprs=constants,
            divisible=divisible,
            options={"num_warps": c.warps},
            gpu=gpu,
        )

    def grid(self, p: SiluMulProblem, c: SiluMulConfig) -> tuple[int, int, int]:
        tiles = self._tiles(p, c)
        return min(tiles, _GRID_AXIS), -(-tiles // _GRID_AXIS), 1

    def bind(self, p: SiluMulProblem, c: SiluMulConfig, kernel: Callable[..., Any]) -> Callable[..., None]:
        grid, rows, cols = self.grid(p, c), p.rows, p.cols
        if rows == 0 or cols == 0:
            return lambda *operands: None
        if p.layout == "dense":
            return Launch(kernel, grid, len(self.results) + len(self.inputs), lambda *operands: (1, rows * cols))
        return Launch(
            kernel,
            grid,
            len(self.results) + len(self.inputs),
            lambda *operands: (rows, cols, *[s for t in operands for s in _matrix_strides(t)]),
        )

    def outputs(self, p: SiluMulProblem, *args: Tensor) -> tuple[Tensor, ...]:
        shape, vec = args[0].shape, p.vec
        # Rows of an odd length cannot be both contiguous and aligned; a padded pitch keeps what the problem promises.
        pitch = -(-p.cols // vec) * vec if p.layout == "rows" else p.cols
        if pitch == p.cols:
            return tuple(args[0].new_empty(shape) for _ in self.results)
        return tuple(args[0].new_empty((*shape[:-1], pitch))[..., : p.cols] for _ in self.results)

    def sample(self, p: SiluMulProblem, device: str, seed: int) -> tuple[Tensor, ...]:
        generator = torch.Generator(device).manual_seed(seed)
        dtype, skew = GPU_DTYPES[p.dtype], p.align % WIDEST_BYTES // p.itemsize  # elements off a 16-byte boundary
        samples = []
        for i, _ in enumerate(self.inputs):
            if p.layout == "dense":
                size, strides = p.rows * p.cols, (p.cols, 1)
            elif p.layout == "rows":  # as one half of a joint gate-and-up projection lies
                pitch = 2 * (-(-p.cols // p.vec) * p.vec)
                size, strides = p.rows * pitch, (pitch, 1)
            else:  # the first one transposed, the others every other element
                size, strides = (p.rows * p.cols, (1, p.rows)) if i == 0 else (2 * p.rows * p.cols, (2 * p.cols, 2))
            memory = torch.randn(size + skew, generator=generator, device=device, dtype=dtype)
            samples.append(memory.as_strided((p.rows, p.cols), strides, skew))
        return tuple(samples)

    def work(self, p: SiluMulProblem) -> Work:
        elements = p.rows * p.cols
        operands = len(self.inputs) + len(self.results)
        return Work(flops=float(self.flops_per_element * elements), bytes=float(operands * p.itemsize * elements))


class SiluMul(_SiluMulOp):
    """``out = silu(gate) * up``. Arguments: gate, up."""

    name = "silu_mul"
    revision = 1
    suite = (
        "rows=1 cols=14336",
        "rows=16 cols=3584",
        "rows=333 cols=1001 layout=rows align=2",
        "rows=257 cols=130 layout=strided",
        "rows=2048 cols=4096",
        "rows=2048 cols=11008",
        "rows=2048 cols=11008 layout=rows",
        "rows=2048 cols=14336 dtype=fp16",
        "rows=2048 cols=5120 dtype=fp32",
        "rows=2048 cols=18944",
        "rows=16384 cols=18944",
    )
    results = ("out",)
    inputs = ("gate", "up")
    schema = "Tensor gate, Tensor up"
    flops_per_element = 5

    def evaluate(self, *args: Any, **options: Any) -> tuple[Tensor, ...]:
        gate, up = args
        wide = torch.float32 if gate.dtype.itemsize == 2 else torch.float64
        return ((torch.nn.functional.silu(gate.to(wide)) * up.to(wide)).to(gate.dtype),)


class SiluMulBackward(_SiluMulOp):
    """The gradient of :class:`SiluMul`: (dgate, dup). Arguments: dout, gate, up."""

    name = "silu_mul_backward"
    revision = 1
    suite = (
        "rows=16 cols=3584",
        "rows=333 cols=1001 layout=rows align=2",
        "rows=257 cols=130 layout=strided",
        "rows=2048 cols=11008",
        "rows=2048 cols=11008 layout=rows",
        "rows=2048 cols=14336 dtype=fp16",
        "rows=2048 cols=5120 dtype=fp32",
    )
    results = ("dgate", "dup")
    inputs = ("dout", "gate", "up")
    schema = "Tensor dout, Tensor gate, Tensor up"
    flops_per_element = 11

    def evaluate(self, *args: Any, **options: Any) -> tuple[Tensor, ...]:
        # fp64 throughout: dgate crosses zero near gate = -1.278, where fp32 would leave nothing but its own error.
        dout, gate, up = args
        d, g, u = dout.double(), gate.double(), up.double()
        s = torch.sigmoid(g)
        return (d * u * (s * (1 + g * (1 - s)))).to(gate.dtype), (d * (g * s)).to(up.dtype)


SILU_MUL = SiluMul()
SILU_MUL_BACKWARD = SiluMulBackward()


# ---- the function ---------------------------------------------------------------------------------------


def silu_mul(
    gate: Tensor, up: Tensor, *, out: Tensor | None = None, config: SiluMulConfig | str | None = None
) -> Tensor:
    """``out = silu(gate) * up`` with ``silu(x) = x / (1 + exp(-x))``: in fp32, rounded once.

    Args:
        gate: ``(..., N)``, fp16, bf16 or fp32 (on the CPU fp64 too). Any strides: operands whose rows are
            contiguous are fast, the two halves of a joint projection included. Leading dimensions that no
            single stride walks (say, a transposed batch) cost a contiguous copy of that operand.
        up: shape, dtype and device of ``gate``; nothing is broadcast or cast.
        out: where to write: shape, dtype and device of ``gate``, any strides. It may be ``gate`` or ``up``
            itself, element upon element; any other overlap is refused. Not differentiable.
        config: overrides the tuned choice, as a :class:`SiluMulConfig` or its text. Ignored on the CPU.

    Returns:
        ``(..., N)``, contiguous, or ``out``. Differentiable in ``gate`` and ``up``, once.

    Raises:
        UnsupportedProblem: a dtype no kernel takes, mismatched shapes, dtypes or devices, an ``out`` that
            overlaps an input or itself, ``out`` together with gradients.
        InvalidConfig: ``config`` breaks a rule of the op.
    """
    if calls.direct(gate, up, out):
        if out is None:
            return calls.run(SILU_MUL, None, (gate, up), config=config)[0]
        torch.autograd.graph.increment_version(out)
        return calls.run(SILU_MUL, (out,), (gate, up), config=config)[0]
    text = None if config is None else str(config)
    if out is None:
        return torch.ops.cutekernels.silu_mul(gate, up, text)  # type: ignore[no-any-return]
    calls.refuse_gradient(gate, up, out)
    torch.ops.cutekernels.silu_mul_out(gate, up, out, text)
    return out


# ---- torch.library --------------------------------------------------------------------------------------


def register(library: torch.library.Library) -> None:
    """Defines the ops of this file in ``library``, with their gradients."""
    calls.register(library, SILU_MUL, backward=_silu_mul_gradient, setup_context=_remember)
    calls.register(library, SILU_MUL_BACKWARD)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    gate, up, _ = inputs
    ctx.save_for_backward(gate, up)


def _silu_mul_gradient(ctx: Any, dout: Tensor) -> tuple[Tensor, Tensor, None]:
    return (*torch.ops.cutekernels.silu_mul_backward(dout, *ctx.saved_tensors), None)
