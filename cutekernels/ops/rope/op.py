"""Rotary position embedding of queries and keys in one launch: the declaration. :func:`rope` is in ``api.py``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cutekernels.errors import UnsupportedProblem
from cutekernels.op import Scalar, Work, exact, extent, ladder, plain
from cutekernels.ops.rope.rotary import (
    DEPTH,
    Heads,
    RotaryConfig,
    RotaryOp,
    RotaryProblem,
    Table,
    turned,
)
from cutekernels.ops.shared.operands import Array, Sizes
from cutekernels.ops.shared.triton_op import TritonOp

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from cutekernels.gpu import GpuSpec

_WASTE, _WASTE_TORN = 1.25, 1.5  # heads of a tile for each that is there
_START = 5  # of a sample's positions


@dataclass(frozen=True)
class RopeProblem(RotaryProblem):
    """q of (batch, seq, heads_q, head_dim) and k of heads_kv heads; the first ``rotary`` channels of a head turn.

    ``positions``: from one start, from a start per batch entry, or one per token, in integers of type ``index``.
    The rest: :class:`~cutekernels.ops.rope.rotary.RotaryProblem`.
    """

    batch: int = extent(ladder)
    seq: int = extent(ladder)
    heads_q: int = extent(exact)
    head_dim: int = extent(exact)
    rotary: int = extent(exact)
    heads_kv: int = extent(exact, default=0)
    dtype: str = plain("bf16", "fp16", "fp32")
    table: str = plain("fp32", "same")
    interleaved: bool = plain(False, True)
    inverse: bool = plain(False, True)
    positions: str = plain("start", "batch", "token")
    index: str = plain("i64", "i32")
    layout: str = plain("rows", "strided")
    align: int = plain(16, 8, 4, 2)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.positions == "start" and self.index != "i64":
            raise UnsupportedProblem("positions=start has no index tensor: leave index out")


class Rope(RotaryOp[RopeProblem, RotaryConfig], TritonOp[RopeProblem, RotaryConfig]):
    """``(x1 cos - x2 sin, x2 cos + x1 sin)`` over pairs. ``k`` may have no heads."""

    name = "rope"
    revision = 1
    Problem = RopeProblem
    Config = RotaryConfig
    suite = (
        "batch=1 seq=1 heads_q=32 head_dim=128 rotary=128 heads_kv=8",
        "batch=16 seq=1 heads_q=28 head_dim=128 rotary=128 heads_kv=4 positions=batch",
        "batch=64 seq=1 heads_q=32 head_dim=128 rotary=128 heads_kv=8 positions=token index=i32",
        "batch=3 seq=77 heads_q=5 head_dim=80 rotary=20 heads_kv=1 align=4 dtype=fp16",
        "batch=2 seq=33 heads_q=3 head_dim=64 rotary=64 heads_kv=3 layout=strided",
        "batch=2 seq=130 heads_q=6 head_dim=128 rotary=64 interleaved=1 table=same",
        "batch=1 seq=512 heads_q=32 head_dim=128 rotary=128 dtype=fp16",
        "batch=1 seq=2048 heads_q=32 head_dim=128 rotary=128 heads_kv=8",
        "batch=1 seq=2048 heads_q=28 head_dim=128 rotary=128 heads_kv=4 inverse=1",
        "batch=1 seq=2048 heads_q=28 head_dim=128 rotary=128 heads_kv=4 dtype=fp32",
        "batch=4 seq=4096 heads_q=32 head_dim=128 rotary=128 heads_kv=8",
        "batch=8 seq=1024 heads_q=48 head_dim=128 rotary=64 dtype=fp16",
        "batch=8 seq=1024 heads_q=48 head_dim=128 rotary=64 dtype=fp16 interleaved=1",
    )
    kernel = "rope:rope"
    out_q = Heads("heads_q", result=True)
    out_k = Heads("heads_kv", result=True)
    q = Heads("heads_q")
    k = Heads("heads_kv")
    cos = Table()
    sin = Table()
    positions = Array("batch", "seq?", dtype="index", strides=("batch", "seq"), optional=True)
    options = ("interleaved", "inverse")
    sizes = RotaryOp.sizes | {"table_rows": "i64"}
    scalar_types = {"start": "i64"}
    scalar_samples = {"start": _START}
    steps = ((4, 2, 8), (4, 1, 1), (2, 1, 1), (1, 1, 1))
    most_registers = 96

    # -- from tensors to problems

    def facts(self, named: Mapping[str, Tensor | None], sizes: Sizes) -> dict[str, Scalar]:
        positions = named["positions"]
        return super().facts(named, sizes) | {
            "positions": "start" if positions is None else ("batch", "token")[positions.dim() - 1]
        }

    def evaluate(self, *args: Any, **options: Any) -> tuple[Tensor, ...]:
        import torch

        q, k, cos, sin, positions, start = args
        wide = torch.float64  # the two terms of an element may cancel, and leave nothing but the reference's own error
        tables = []
        for table in (cos, sin):
            if table.dim() == 3:
                chosen = table[..., : table.shape[2] // 2]
            else:
                chosen = table[_rows(q, table, positions, start)]
            tables.append(chosen.to(wide).unsqueeze(-2))
        c, s = tables
        return tuple(turned(t, c, -s if options["inverse"] else s, options["interleaved"]) for t in (q, k))

    # -- configs

    def default(self, p: RopeProblem, gpu: GpuSpec) -> RotaryConfig:
        # Where a tile reads its tokens in part, all heads of a token, which lie together: docs/notes/rope.md.
        if p.rotary < p.head_dim and p.layout == "rows":
            return self.tile(p, gpu, _WASTE_TORN, taller=2)
        return self.tile(p, gpu, _WASTE)

    def grid(self, p: RopeProblem, c: RotaryConfig) -> tuple[int, int, int]:
        return p.batch * -(-p.seq // c.tokens) * p.parts, self.blocks(p, c.heads), 1

    def work(self, p: RopeProblem) -> Work:
        elements = p.batch * p.seq * (p.heads_q + p.heads_kv)
        table = 2 * p.seq * p.half * (4 if p.table == "fp32" else p.itemsize)
        moved = float(2 * elements * p.head_dim * p.itemsize + table)
        return Work(flops=float(elements * p.half * 6), bytes=moved, depth=DEPTH)

    # -- kernels

    def kind(self, p: RopeProblem, name: str) -> str | None:
        return None if name == "positions" and p.positions == "start" else super().kind(p, name)

    def measure_sizes(self, named: Mapping[str, Tensor | None]) -> tuple[int, ...]:
        cos = named["cos"]
        assert cos is not None
        return (cos.shape[-2],)

    def constants(self, p: RopeProblem, c: RotaryConfig) -> dict[str, int | bool | str]:
        return super().constants(p, c) | {"POSITIONS": p.positions, "INVERSE": p.inverse}

    # -- samples

    def sizes_in(self, p: RopeProblem) -> Sizes:
        rows = _START + p.seq * (1 if p.positions == "start" else 2)
        return super().sizes_in(p) | {"tables": 1, "table_rows": rows, "width": p.half}

    def draw(self, p: RopeProblem, name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor | None:
        import torch

        if name == "positions":
            some = shape[:1] if p.positions == "batch" else shape
            return torch.randint(0, p.seq + _START, some, generator=generator, device=generator.device)
        values = super().draw(p, name, shape, generator)
        return None if values is None else values[0]


def _rows(q: Tensor, table: Tensor, positions: Tensor | None, start: int) -> Tensor:
    """Each token's row of the table, (S,) or (B, S). Raises UnsupportedProblem for one that is not there."""
    import torch

    steps = torch.arange(q.shape[1], device=q.device)
    if positions is None:
        rows = start + steps
    else:
        rows = positions.long() if positions.dim() == 2 else positions.long()[:, None] + steps
    if rows.numel() and (int(rows.min()) < 0 or int(rows.max()) >= table.shape[0]):
        raise UnsupportedProblem(
            f"positions {int(rows.min())} to {int(rows.max())} leave a table of {table.shape[0]} rows: "
            "build a longer one (RotaryEmbedding: max_positions)"
        )
    return rows


ROPE = Rope()
