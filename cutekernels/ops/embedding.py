"""``embedding``: rows of a table by number, and the table's gradient, which is the same each time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from cutekernels.errors import UnsupportedProblem
from cutekernels.op import Config, Problem, Work, exact, extent, knob, ladder, plain, power_of_two
from cutekernels.ops.shared import tensor_op
from cutekernels.ops.shared.strides import matrix
from cutekernels.ops.shared.tensor_op import DTYPE_NAMES, GPU_DTYPES, WIDEST_BYTES, TensorOp

if TYPE_CHECKING:
    from cutekernels.backends import Artifact
    from cutekernels.gpu import GpuSpec


# ---- declarations ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class EmbeddingProblem(Problem):
    """``rows`` numbers of type ``index`` into a table of ``vocabulary`` rows of ``cols``.

    ``layout``: "rows" where the elements of each row are contiguous, else "strided". ``align``: bytes that divide the
    address and pitch of every matrix; nothing depends on it where the layout is strided.
    """

    rows: int = extent(ladder)
    vocabulary: int = extent(exact)
    cols: int = extent(exact)
    dtype: str = plain("bf16", "fp16", "fp32")
    index: str = plain("i64", "i32")
    layout: str = plain("rows", "strided")
    align: int = plain(16, 8, 4, 2)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.align < self.itemsize:
            raise UnsupportedProblem(
                f"align covers one element of {self.dtype}, {self.itemsize} bytes; it is {self.align}"
            )
        if self.cols > _MOST_COLS or max(self.rows, self.vocabulary) > _MOST_ROWS:
            raise UnsupportedProblem(
                f"up to {_MOST_ROWS} rows of up to {_MOST_COLS} columns; got {self.rows} and {self.vocabulary} rows of "
                f"{self.cols}: split them"
            )

    @property
    def itemsize(self) -> int:
        return GPU_DTYPES[self.dtype].itemsize

    @property
    def vec(self) -> int:
        """Elements in one access."""
        return 1 if self.layout == "strided" else self.align // self.itemsize


@dataclass(frozen=True)
class EmbeddingConfig(Config):
    """A tile of ``block_rows`` x ``block_cols``: of the result; or of the rows that a table's row adds up."""

    block_rows: int = knob(1, 2, 4, 8)
    block_cols: int = knob(64, 128, 256, 512, 1024, 2048, 4096)
    warps: int = knob(1, 2, 4, 8)


_MOST_ROWS = (1 << 31) - 1  # the grid's first axis
_MOST_COLS = (1 << 16) * 64 - 64  # and its second, in the narrowest blocks
_MAX_REGISTERS = 96


def _strides(t: Tensor) -> tuple[int, int]:
    found = matrix(t.shape, t.stride())
    assert found is not None
    return found[2:]


class _EmbeddingOp(TensorOp[EmbeddingProblem, EmbeddingConfig]):
    """What both passes have in common."""

    Problem = EmbeddingProblem
    Config = EmbeddingConfig

    def _problem(self, rows: int, vocabulary: int, index: torch.dtype, matrices: Sequence[Tensor]) -> EmbeddingProblem:
        """Of ``matrices`` of one type and width."""
        first = matrices[0]
        if first.dtype not in DTYPE_NAMES:
            raise UnsupportedProblem(f"{self.name} on a GPU takes {', '.join(DTYPE_NAMES.values())}; got {first.dtype}")
        cols, item = first.shape[-1], first.element_size()
        layout, bits = "rows", WIDEST_BYTES
        for t in matrices:
            row, col = _strides(t)
            if col != 1:
                layout = "strided"
            bits |= t.data_ptr() | (row * item if t.shape[0] > 1 else 0)
        facts: dict[str, Any] = {"layout": layout} | ({"align": bits & -bits} if layout == "rows" else {})
        names = {torch.int64: "i64", torch.int32: "i32"}
        return EmbeddingProblem(rows, vocabulary, cols, DTYPE_NAMES[first.dtype], names[index], **facts)

    def why_not(self, p: EmbeddingProblem, c: EmbeddingConfig, gpu: GpuSpec) -> str | None:
        threads = 32 * c.warps
        per_thread = c.block_rows * c.block_cols // threads
        if c.warps > 1 and per_thread < p.vec:
            return f"{threads} threads of {p.vec} elements an access need a tile of {threads * p.vec} elements"
        registers = max(1, per_thread) * (5 if p.layout == "strided" else 2)
        if registers > _MAX_REGISTERS:
            return f"a thread's tile takes {registers} registers; at most {_MAX_REGISTERS}"
        if c.block_cols > max(64, power_of_two(p.cols)):
            return f"block_cols={c.block_cols} idles most of a tile in rows of {p.cols}"
        if c.block_rows > power_of_two(p.rows):
            return f"block_rows={c.block_rows} idles most of a tile with {p.rows} rows"
        return None

    def default(self, p: EmbeddingProblem, gpu: GpuSpec) -> EmbeddingConfig:
        width = max(64, min(32 * 4 * max(2, p.vec), power_of_two(p.cols)))
        height = max(1, min(8, power_of_two(p.rows), 32 * 4 * p.vec // width))
        if p.rows * -(-p.cols // width) < gpu.sm_count * 4 * height:
            height = 1
        warps = max(1, min(4, height * width // (32 * p.vec)))
        return EmbeddingConfig(height, width, power_of_two(warps + 1) // 2 if warps & (warps - 1) else warps)

    def estimate_us(self, p: EmbeddingProblem, c: EmbeddingConfig, gpu: GpuSpec) -> float:
        x, y, _ = self.grid(p, c)
        blocks = max(1, x * y)
        resident = min(32, gpu.max_warps // c.warps)
        in_flight = gpu.sm_count * min(resident, blocks / gpu.sm_count) * c.block_rows * c.block_cols * p.itemsize
        busy = min(1.0, in_flight / (gpu.dram_gbps * 1e3 * 1.2), blocks / gpu.sm_count)
        memory = self.work(p).bytes / (gpu.dram_gbps * 1e3 * 0.9) * (1.0 if p.layout == "rows" else 4.0)
        return 2.2 + max(blocks / gpu.sm_count * 0.05, memory / max(0.05, busy))

    def grid(self, p: EmbeddingProblem, c: EmbeddingConfig) -> tuple[int, int, int]:
        return -(-p.rows // c.block_rows), -(-p.cols // c.block_cols), 1

    def _compile(
        self, p: EmbeddingProblem, c: EmbeddingConfig, gpu: GpuSpec, types: dict[str, str], sizes: Sequence[str]
    ) -> Artifact:
        """``types``: each operand's; those of p.dtype are matrices, the others walk by one stride."""
        from cutekernels.backends.triton import compile_kernel
        from cutekernels.kernels.triton import embedding as kernels

        signature = {f"{name}_ptr": f"*{kind}" for name, kind in types.items()} | dict.fromkeys(sizes, "i64")
        divisible: dict[str, int] = {}
        constants: dict[str, int | bool | str] = {}
        for name, kind in types.items():
            signature[f"{name}_row"] = "i64"
            if kind == p.dtype:
                signature[f"{name}_col"] = "i64"
                if p.layout == "rows":
                    divisible |= {f"{name}_ptr": p.align, f"{name}_row": p.vec}
                    constants[f"{name}_col"] = 1
        constants |= {"BLOCK_ROWS": c.block_rows, "BLOCK_COLS": c.block_cols, "VEC": p.vec}
        return compile_kernel(
            getattr(kernels, self.name),
            signature=signature | dict.fromkeys(constants, "constexpr"),
            constexprs=constants,
            divisible=divisible,
            options={"num_warps": c.warps},
            gpu=gpu,
        )

    def _table(self, p: EmbeddingProblem, rows: int, generator: torch.Generator, device: str) -> Tensor:
        """A random matrix whose pitch and address are what the problem promises."""
        skew = p.align % WIDEST_BYTES // p.itemsize
        step = 2 if p.layout == "strided" else 1
        pitch = step * -(-p.cols // p.vec) * p.vec
        kind = GPU_DTYPES[p.dtype]
        memory = torch.randn(rows * pitch + skew, generator=generator, device=device, dtype=kind)
        return memory.as_strided((rows, p.cols), (pitch, step), skew)

    def _empty(self, p: EmbeddingProblem, rows: int, like: Tensor) -> Tensor:
        return like.new_empty((rows, -(-p.cols // p.vec) * p.vec))[:, : p.cols]


class Embedding(_EmbeddingOp):
    """``out[r] = table[ids[r]]``. Arguments: ids, table."""

    name = "embedding"
    revision = 1
    suite = (
        "rows=1 vocabulary=128256 cols=4096",
        "rows=16 vocabulary=152064 cols=3584",
        "rows=333 vocabulary=77 cols=1001 align=2 index=i32",
        "rows=57 vocabulary=9 cols=130 layout=strided",
        "rows=2048 vocabulary=128256 cols=4096",
        "rows=16384 vocabulary=32000 cols=1024 dtype=fp32",
    )
    results = ("out",)
    inputs = ("ids", "table")
    schema = "Tensor ids, Tensor table"

    def admit(self, inputs: Sequence[Tensor | None], results: Sequence[Tensor] = (), **options: Any) -> None:
        ids, table = inputs
        assert ids is not None and table is not None
        tensor_op.check_dtype(self, table)
        tensor_op.check_alike(self, table, [ids, *results], ("device",))
        if table.dim() != 2 or ids.dim() != 1 or ids.dtype not in (torch.int64, torch.int32):
            raise UnsupportedProblem(
                f"embedding takes int32 or int64 numbers and a (V, D) table; got {ids.dtype} and {tuple(table.shape)}"
            )
        for out in results:
            tensor_op.check_alike(self, table, [out], ("dtype",))
            if out.shape != (ids.shape[0], table.shape[1]):
                raise UnsupportedProblem(f"out must be {(ids.shape[0], table.shape[1])}; it is {tuple(out.shape)}")
        tensor_op.check_results(results)

    def fresh(self, *inputs: Tensor | None, **options: Any) -> tuple[Tensor, ...]:
        ids, table = inputs
        assert ids is not None and table is not None
        return (table.new_empty((ids.shape[0], table.shape[1])),)

    def problem(self, *operands: Tensor | None, **options: Any) -> EmbeddingProblem:
        out, ids, table = operands
        assert out is not None and ids is not None and table is not None
        return self._problem(ids.shape[0], table.shape[0], ids.dtype, (out, table))

    def evaluate(self, *args: Any, **options: Any) -> tuple[Tensor, ...]:
        ids, table = args
        if ids.numel() and not (int(ids.min()) >= 0 and int(ids.max()) < table.shape[0]):
            raise UnsupportedProblem(
                f"numbers {int(ids.min())} to {int(ids.max())} leave a table of {table.shape[0]} rows"
            )
        return (table[ids.long()],)

    def build(self, p: EmbeddingProblem, c: EmbeddingConfig, gpu: GpuSpec) -> Artifact:
        types = {"out": p.dtype, "ids": p.index, "table": p.dtype}
        return self._compile(p, c, gpu, types, ("rows", "vocabulary", "cols"))

    def bind(self, p: EmbeddingProblem, c: EmbeddingConfig, kernel: Callable[..., Any]) -> Callable[..., None]:
        def numbers(out: Tensor, ids: Tensor, table: Tensor) -> tuple[int, ...]:
            return (p.rows, p.vocabulary, p.cols, *_strides(out), ids.stride(0), *_strides(table))

        grid = self.grid(p, c)
        return tensor_op.Launch(kernel, grid, 3, numbers) if 0 not in grid else lambda *operands: None

    def outputs(self, p: EmbeddingProblem, *args: Any) -> tuple[Tensor, ...]:
        return (self._empty(p, p.rows, args[1]),)

    def sample(self, p: EmbeddingProblem, device: str, seed: int) -> tuple[Any, ...]:
        generator = torch.Generator(device).manual_seed(seed)
        kind = torch.int32 if p.index == "i32" else torch.int64
        ids = torch.randint(0, max(1, p.vocabulary), (p.rows,), generator=generator, device=device, dtype=kind)
        return ids, self._table(p, p.vocabulary, generator, device)

    def work(self, p: EmbeddingProblem) -> Work:
        return Work(flops=0.0, bytes=float(2 * p.rows * p.cols * p.itemsize + p.rows * (8 if p.index == "i64" else 4)))


class EmbeddingBackward(_EmbeddingOp):
    """The gradient of the table. Arguments: dout; ``order``, which lists its rows by number; ``starts``, where in that
    list each row of the table begins, and behind them where the last one ends.
    """

    name = "embedding_backward"
    revision = 1
    suite = (
        "rows=16 vocabulary=1520 cols=3584",
        "rows=333 vocabulary=77 cols=1001 align=2",
        "rows=57 vocabulary=9 cols=130 layout=strided",
        "rows=2048 vocabulary=128256 cols=4096",
        "rows=16384 vocabulary=32000 cols=1024 dtype=fp32",
    )
    results = ("dtable",)
    inputs = ("dout", "order", "starts")
    schema = "Tensor dout, Tensor order, Tensor starts"

    def admit(self, inputs: Sequence[Tensor | None], results: Sequence[Tensor] = (), **options: Any) -> None:
        dout, order, starts = inputs
        assert dout is not None and order is not None and starts is not None
        tensor_op.check_dtype(self, dout)
        tensor_op.check_alike(self, dout, [order, starts, *results], ("device",))
        if dout.dim() != 2 or order.shape != dout.shape[:1] or starts.dim() != 1 or starts.shape[0] < 1:
            raise UnsupportedProblem(
                f"dout is (N, D), order (N,), starts (V + 1,); got {tuple(dout.shape)}, {tuple(order.shape)}, "
                f"{tuple(starts.shape)}"
            )
        if order.dtype != torch.int64 or starts.dtype != torch.int64:
            raise UnsupportedProblem(f"order and starts are int64; got {order.dtype} and {starts.dtype}")
        for out in results:
            tensor_op.check_alike(self, dout, [out], ("dtype",))
            if out.shape != (starts.shape[0] - 1, dout.shape[1]):
                raise UnsupportedProblem(f"out must have {starts.shape[0] - 1} rows; it is {tuple(out.shape)}")
        tensor_op.check_results(results)

    def fresh(self, *inputs: Tensor | None, **options: Any) -> tuple[Tensor, ...]:
        dout, _, starts = inputs
        assert dout is not None and starts is not None
        return (dout.new_empty((starts.shape[0] - 1, dout.shape[1])),)

    def problem(self, *operands: Tensor | None, **options: Any) -> EmbeddingProblem:
        dtable, dout, order, starts = operands
        assert dtable is not None and dout is not None and order is not None and starts is not None
        return self._problem(dout.shape[0], starts.shape[0] - 1, order.dtype, (dtable, dout))

    def evaluate(self, *args: Any, **options: Any) -> tuple[Tensor, ...]:
        dout, order, starts = args
        counts = starts.diff()
        rows = torch.repeat_interleave(torch.arange(len(counts), device=dout.device), counts)
        total = dout.new_zeros((len(counts), dout.shape[1]), dtype=torch.float64)
        total.index_add_(0, rows, dout[order[int(starts[0]) : int(starts[-1])]].double())
        return (total.to(dout.dtype),)

    def grid(self, p: EmbeddingProblem, c: EmbeddingConfig) -> tuple[int, int, int]:
        return p.vocabulary, -(-p.cols // c.block_cols), 1

    def build(self, p: EmbeddingProblem, c: EmbeddingConfig, gpu: GpuSpec) -> Artifact:
        types = {"dtable": p.dtype, "dout": p.dtype, "order": "i64", "starts": "i64"}
        return self._compile(p, c, gpu, types, ("cols",))

    def bind(self, p: EmbeddingProblem, c: EmbeddingConfig, kernel: Callable[..., Any]) -> Callable[..., None]:
        def numbers(dtable: Tensor, dout: Tensor, order: Tensor, starts: Tensor) -> tuple[int, ...]:
            return (p.cols, *_strides(dtable), *_strides(dout), order.stride(0), starts.stride(0))

        grid = self.grid(p, c)
        return tensor_op.Launch(kernel, grid, 4, numbers) if 0 not in grid else lambda *operands: None

    def outputs(self, p: EmbeddingProblem, *args: Any) -> tuple[Tensor, ...]:
        return (self._empty(p, p.vocabulary, args[0]),)

    def sample(self, p: EmbeddingProblem, device: str, seed: int) -> tuple[Any, ...]:
        generator = torch.Generator(device).manual_seed(seed)
        ids = torch.randint(0, max(1, p.vocabulary), (p.rows,), generator=generator, device=device)
        return self._table(p, p.rows, generator, device), *grouped(ids, p.vocabulary)

    def work(self, p: EmbeddingProblem) -> Work:
        moved = (p.rows + p.vocabulary) * p.cols * p.itemsize + 8 * (p.rows + p.vocabulary)
        return Work(flops=float(p.rows * p.cols), bytes=float(moved), depth=_DEPTH)


_DEPTH = 64.0  # tokens that a row of the table adds up: several times what is typical of random ones
EMBEDDING = Embedding()
EMBEDDING_BACKWARD = EmbeddingBackward()
OPS = (EMBEDDING, EMBEDDING_BACKWARD)


def grouped(ids: Tensor, vocabulary: int) -> tuple[Tensor, Tensor]:
    """``(order, starts)`` of ids ``(N,)``: positions by id, earlier ones first, and where each id's positions begin.

    Ids that are not in the vocabulary are before the first start or behind the last.
    """
    by_id, order = torch.sort(ids.long(), stable=True)
    return order, torch.searchsorted(by_id, torch.arange(vocabulary + 1, device=ids.device))


# ---- the function ---------------------------------------------------------------------------------------


def embedding(ids: Tensor, table: Tensor, *, config: EmbeddingConfig | str | None = None) -> Tensor:
    """``out[..., :] = table[ids[...]]``.

    Args:
        ids: any shape, int32 or int64. One that is not in the table gives a row of NaN on a GPU, which waits for
            nobody and reads nothing out of bounds, and raises on the CPU.
        table: ``(V, D)``, fp16, bf16 or fp32 (on the CPU fp64 too). Any strides; contiguous rows are fast.
        config: overrides the tuned choice, as an :class:`EmbeddingConfig` or its text. Ignored on the CPU.

    Returns:
        ``(..., D)``, contiguous. Differentiable in ``table``, once: the gradient adds up in fp32, in the order of
        ``ids``, and is the same each time.

    Raises:
        UnsupportedProblem: a type no kernel takes, a table that is no matrix, two devices, an id that is not in the
            table (on the CPU).
        InvalidConfig: ``config`` breaks a rule of the op.
    """
    flat = ids.reshape(-1)
    found = tensor_op.eager(EMBEDDING, None, (flat, table), (), (), config)
    rows = found[0] if found else torch.ops.cutekernels.embedding(flat, table, None if config is None else str(config))
    return rows.view(*ids.shape, table.shape[-1])


# ---- torch.library --------------------------------------------------------------------------------------


def register(library: torch.library.Library) -> None:
    """Defines the ops of this file in ``library``, with their gradients."""
    tensor_op.register(library, EMBEDDING, backward=_gradient, setup_context=_remember)
    tensor_op.register(library, EMBEDDING_BACKWARD)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ids, table, *_ = inputs
    ctx.vocabulary = table.shape[0]
    ctx.save_for_backward(ids)


def _gradient(ctx: Any, dout: Tensor) -> tuple[None, Tensor, None]:
    order, starts = grouped(ctx.saved_tensors[0], ctx.vocabulary)
    return None, torch.ops.cutekernels.embedding_backward(dout, order, starts), None
