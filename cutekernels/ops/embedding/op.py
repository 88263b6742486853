"""Rows of a table by id, and the gradient of the table, which is deterministic: the declarations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from cutekernels.errors import UnsupportedProblem
from cutekernels.op import Config, Problem, Work, exact, extent, knob, ladder, plain, power_of_two
from cutekernels.ops.shared import streaming
from cutekernels.ops.shared.dtypes import BYTES
from cutekernels.ops.shared.laid_out import LaidOut
from cutekernels.ops.shared.operands import Matrix, Vector
from cutekernels.ops.shared.tile_rules import accesses_rule, idle_rule
from cutekernels.ops.shared.triton_op import TritonOp, TritonPart
from cutekernels.rules import of_both

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from cutekernels.gpu import GpuSpec

_MAX_REGISTERS = 96
_DEPTH = 64.0  # tokens that share a row of the table: several times what is typical of random ids


@dataclass(frozen=True)
class EmbeddingProblem(LaidOut, Problem):
    """``rows`` ids of type ``index`` into a table of ``vocabulary`` rows of ``cols``."""

    # The first axis of a grid, and its second in the narrowest blocks.
    most: ClassVar = {"rows": (1 << 31) - 1, "vocabulary": (1 << 31) - 1, "cols": (1 << 16) * 64 - 64}
    rows: int = extent(ladder)
    vocabulary: int = extent(exact)
    cols: int = extent(exact)
    dtype: str = plain("bf16", "fp16", "fp32")
    index: str = plain("i64", "i32")
    layout: str = plain("rows", "strided")
    align: int = plain(16, 8, 4, 2)


@dataclass(frozen=True)
class EmbeddingConfig(Config):
    """A tile of ``block_rows`` x ``block_cols``: of the result, or of the rows that the gradient adds up."""

    block_rows: int = knob(1, 2, 4, 8)
    block_cols: int = knob(64, 128, 256, 512, 1024, 2048, 4096)
    warps: int = knob(1, 2, 4, 8)


class EmbeddingRows(TritonPart[EmbeddingProblem, EmbeddingConfig]):
    """What both passes share: tiles of rows."""

    Problem = EmbeddingProblem
    Config = EmbeddingConfig
    constexprs = ("block_rows", "block_cols", "vec")

    accesses = accesses_rule("block_rows", "block_cols", one_warp=True)

    @of_both
    def registers_of_operands(self, p: EmbeddingProblem, c: EmbeddingConfig, gpu: GpuSpec) -> str | None:
        each = max(1, c.block_rows * c.block_cols // (32 * c.warps))
        need = each * (5 if p.layout == "strided" else 2)
        return f"a thread's tile takes {need} registers; at most {_MAX_REGISTERS}" if need > _MAX_REGISTERS else None

    no_idle_columns = idle_rule("block_cols", "cols", "rows of {}", least=64)
    no_idle_rows = idle_rule("block_rows", "rows", "{} rows")

    def default(self, p: EmbeddingProblem, gpu: GpuSpec) -> EmbeddingConfig:
        width = max(64, min(32 * 4 * max(2, p.vec), power_of_two(p.cols)))
        height = max(1, min(8, power_of_two(p.rows), 32 * 4 * p.vec // width))
        if p.rows * -(-p.cols // width) < gpu.sm_count * 4 * height:
            height = 1
        warps = max(1, min(4, height * width // (32 * p.vec)))
        c = EmbeddingConfig(height, width, power_of_two(warps + 1) // 2)
        # Wider where programs take longer to start than to move: docs/notes/streaming.md#embedding (H200, 2026-11-23).
        slow = height == 1 and width < p.cols and streaming.start_bound(gpu, self.work(p).bytes, self.grid(p, c))
        return c.replace(block_cols=2 * width) if slow else c

    def estimate_us(self, p: EmbeddingProblem, c: EmbeddingConfig, gpu: GpuSpec) -> float:
        tile, moved = c.block_rows * c.block_cols * p.itemsize, self.work(p).bytes
        return streaming.estimate_us(gpu, moved, self.grid(p, c), c.warps, tile, coalesced=p.layout == "rows")


class Embedding(EmbeddingRows, TritonOp[EmbeddingProblem, EmbeddingConfig]):
    """``out[r] = table[ids[r]]``."""

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
    kernel = "embedding:embedding"
    out = Matrix("*rows", "cols", result=True)
    ids = Vector("*rows", dtype="index")
    table = Matrix("vocabulary", "cols")
    sizes = {"rows": "i64", "vocabulary": "i64", "cols": "i64"}

    def grid(self, p: EmbeddingProblem, c: EmbeddingConfig) -> tuple[int, int, int]:
        return -(-p.rows // c.block_rows), -(-p.cols // c.block_cols), 1

    def draw(self, p: EmbeddingProblem, name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor | None:
        import torch

        if name != "ids":
            return None
        return torch.randint(0, max(1, p.vocabulary), shape, generator=generator, device=generator.device)

    def variant(self, p: EmbeddingProblem, args: tuple[Any, ...], seed: int) -> tuple[Any, ...]:
        import torch

        ids, table = args
        draw = torch.Generator(device=ids.device).manual_seed(seed)
        other = ids.new_empty_strided(ids.shape, ids.stride())
        return other.copy_(torch.randint(0, max(1, p.vocabulary), ids.shape, generator=draw, device=ids.device)), table

    def evaluate(self, *args: Any, **options: Any) -> tuple[Tensor, ...]:
        ids, table = args
        if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < len(table):
            raise UnsupportedProblem(f"ids {int(ids.min())} to {int(ids.max())} leave a table of {table.shape[0]} rows")
        return (table[ids.long()],)

    def work(self, p: EmbeddingProblem) -> Work:
        return Work(flops=0.0, bytes=float(p.rows * (2 * p.cols * p.itemsize + BYTES[p.index])))


class EmbeddingBackward(EmbeddingRows, TritonOp[EmbeddingProblem, EmbeddingConfig]):
    """``dtable[v]`` sums the rows of dout with id v, in the order and from the starts that :func:`grouped` gives."""

    name = "embedding_backward"
    revision = 1
    suite = (
        "rows=16 vocabulary=1520 cols=3584",
        "rows=333 vocabulary=77 cols=1001 align=2",
        "rows=57 vocabulary=9 cols=130 layout=strided",
        "rows=2048 vocabulary=128256 cols=4096",
        "rows=16384 vocabulary=32000 cols=1024 dtype=fp32",
    )
    kernel = "embedding:embedding_backward"
    dtable = Matrix("vocabulary", "cols", result=True)
    dout = Matrix("*rows", "cols")
    order = Vector("rows", dtype="i64")
    starts = Vector("vocabulary+1", dtype="i64")
    sizes = {"cols": "i64"}

    def grid(self, p: EmbeddingProblem, c: EmbeddingConfig) -> tuple[int, int, int]:
        return p.vocabulary, -(-p.cols // c.block_cols), 1

    def sample(self, p: EmbeddingProblem, device: str, seed: int) -> tuple[Any, ...]:
        import torch

        dout, *_ = super().sample(p, device, seed)
        draw = torch.Generator(device).manual_seed(seed + 1)
        ids = torch.randint(0, max(1, p.vocabulary), (p.rows,), generator=draw, device=device)
        return dout, *grouped(ids, p.vocabulary)

    def evaluate(self, *args: Any, **options: Any) -> tuple[Tensor, ...]:
        import torch

        dout, order, starts = args
        counts = starts.diff()
        rows = torch.repeat_interleave(torch.arange(len(counts), device=dout.device), counts)
        dout = dout[None] if dout.dim() == 1 else dout.flatten(0, -2)  # of a lone id
        total = dout.new_zeros((len(counts), dout.shape[1]), dtype=torch.float64)
        total.index_add_(0, rows, dout[order[int(starts[0]) : int(starts[-1])]].double())
        return (total.to(dout.dtype),)

    def work(self, p: EmbeddingProblem) -> Work:
        return Work(flops=float(p.rows * p.cols), bytes=self.bytes(p), depth=_DEPTH)


EMBEDDING = Embedding()
EMBEDDING_BACKWARD = EmbeddingBackward()


def grouped(ids: Tensor, vocabulary: int) -> tuple[Tensor, Tensor]:
    """``(order, starts)`` of flattened ids: positions sorted by id, stably, and where each id's positions begin.

    Ids outside the vocabulary lie before the first start or behind the last.
    """
    import torch

    by_id, order = torch.sort(ids.flatten().long(), stable=True)
    return order, torch.searchsorted(by_id, torch.arange(vocabulary + 1, device=ids.device))
