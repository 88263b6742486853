"""``rope``: rotary position embedding of queries and keys in one launch.

The rotation is orthogonal, so its gradient is the same op with the angles negated (``inverse``): there is no backward
op, and the op is differentiable any number of times. Below the declaration stand the public function and its
registration with torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, overload

import torch
from torch import Tensor

from cutekernels.errors import UnsupportedProblem
from cutekernels.op import Scalar, Work, exact, extent, ladder, plain
from cutekernels.ops.shared import tensor_op
from cutekernels.ops.shared.checks import check_flag, said
from cutekernels.ops.shared.operands import Array, Sizes
from cutekernels.ops.shared.rotary import (
    DEPTH,
    Heads,
    RotaryConfig,
    RotaryOp,
    RotaryProblem,
    Table,
    turned,
)
from cutekernels.ops.shared.tensor_op import register_inplace
from cutekernels.ops.shared.triton_op import call, refuse_others

if TYPE_CHECKING:
    from cutekernels.gpu import GpuSpec

_WASTE, _WASTE_TORN = 1.25, 1.5  # heads of a tile for each that is there
_START = 5  # of a sample's positions


# ---- declaration ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RopeProblem(RotaryProblem):
    """q of (batch, seq, heads_q, head_dim) and k of heads_kv heads; the first ``rotary`` channels of a head turn.

    ``positions``: from one start, from a start per batch entry, or one per token, in integers of type ``index``.
    The rest: :class:`~cutekernels.ops.shared.rotary.RotaryProblem`.
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


@dataclass(frozen=True)
class RopeConfig(RotaryConfig):
    """One tile of ``tokens`` x ``heads`` x ``block`` pairs of channels per program."""


class Rope(RotaryOp[RopeProblem, RopeConfig]):
    """``(x1 cos - x2 sin, x2 cos + x1 sin)`` over pairs. ``k`` may have no heads."""

    name = "rope"
    revision = 1
    Problem = RopeProblem
    Config = RopeConfig
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

    def default(self, p: RopeProblem, gpu: GpuSpec) -> RopeConfig:
        # Where a tile reads its tokens in part, all heads of a token, which lie together: docs/notes/rope.md.
        if p.rotary < p.head_dim and p.layout == "rows":
            return self.tile(p, gpu, _WASTE_TORN, taller=2)
        return self.tile(p, gpu, _WASTE)

    def grid(self, p: RopeProblem, c: RopeConfig) -> tuple[int, int, int]:
        return p.batch * -(-p.seq // c.tokens) * p.parts, self.blocks(p, c.heads), 1

    def work(self, p: RopeProblem) -> Work:
        elements = p.batch * p.seq * (p.heads_q + p.heads_kv)
        table = 2 * p.seq * p.half * (4 if p.table == "fp32" else p.itemsize)
        moved = float(2 * elements * p.head_dim * p.itemsize + table)
        return Work(flops=float(elements * p.half * 6), bytes=moved, depth=DEPTH)

    # -- kernels

    def kind(self, p: RopeProblem, name: str) -> str | None:
        return None if name == "positions" and p.positions == "start" else super().kind(p, name)

    def measured(self, named: Mapping[str, Tensor | None]) -> tuple[int, ...]:
        cos = named["cos"]
        assert cos is not None
        return (cos.shape[-2],)

    def constants(self, p: RopeProblem, c: RopeConfig) -> dict[str, int | bool | str]:
        return super().constants(p, c) | {"POSITIONS": p.positions, "INVERSE": p.inverse}

    # -- samples

    def sizes_in(self, p: RopeProblem) -> Sizes:
        rows = _START + p.seq * (1 if p.positions == "start" else 2)
        return super().sizes_in(p) | {"tables": 1, "table_rows": rows, "width": p.half}

    def draw(self, p: RopeProblem, name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor | None:
        if name == "positions":
            some = shape[:1] if p.positions == "batch" else shape
            return torch.randint(0, p.seq + _START, some, generator=generator, device=generator.device)
        values = super().draw(p, name, shape, generator)
        return None if values is None else values[0]


def _rows(q: Tensor, table: Tensor, positions: Tensor | None, start: int) -> Tensor:
    """Each token's row of the table, (S,) or (B, S). Raises UnsupportedProblem for one that is not there."""
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
OPS = (ROPE,)


# ---- the function ---------------------------------------------------------------------------------------


# fmt: off
@overload
def rope(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = ...,
    positions: Tensor | int | None = ..., inplace: bool = ..., config: RopeConfig | str | None = ...,
) -> tuple[Tensor, Tensor]: ...
@overload
def rope(
    q: Tensor, k: None, cos: Tensor, sin: Tensor, *, interleaved: bool = ...,
    positions: Tensor | int | None = ..., inplace: bool = ..., config: RopeConfig | str | None = ...,
) -> tuple[Tensor, None]: ...
@overload
def rope(
    q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, *, interleaved: bool = ...,
    positions: Tensor | int | None = ..., inplace: bool = ..., config: RopeConfig | str | None = ...,
) -> tuple[Tensor, Tensor | None]: ...
# fmt: on
def rope(
    q: Tensor,
    k: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    *,
    interleaved: bool = False,
    positions: Tensor | int | None = None,
    inplace: bool = False,
    config: RopeConfig | str | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Turns each pair ``(x1, x2)`` of channels into ``(x1 cos - x2 sin, x2 cos + x1 sin)``: in fp32, rounded once.

    The cosines and sines are those of the token's position. A pair is channels ``i`` and ``i + R/2`` of a head, or
    ``2i`` and ``2i + 1`` if interleaved; channels from R on are copied.

    Args:
        q: ``(B, S, Hq, D)``, fp16, bf16 or fp32 (on the CPU fp64 too). Any strides: views of a joint QKV projection
            and of ``(B, Hq, S, D)`` storage are fast.
        k: ``(B, S, Hkv, D)``, dtype and device of ``q``; None to turn ``q`` alone.
        cos: ``(T, R/2)`` with R <= D, fp32 or of q's dtype: a row per position. Or ``(B or 1, S, R)``, a row per
            token whose halves repeat, as Hugging Face's modules make it; its second half is not read.
        sin: shape and dtype of ``cos``.
        interleaved: pairs of neighbours (GPT-J, Llama's original) instead of halves (NeoX, Hugging Face).
        positions: of the tokens. None: 0 to S - 1; an int: from there on; ``(B,)``: from there on in each batch
            entry; ``(B, S)``: of each token. Tensors are int32 or int64 on q's device and are not waited for: a
            position outside of the table gives NaN on a GPU, and raises on the CPU.
        inplace: write to ``q`` and ``k`` themselves. Not differentiable.
        config: overrides the tuned choice, as a :class:`RopeConfig` or its text. Ignored on the CPU.

    Returns:
        Contiguous ``(B, S, Hq, D)`` and ``(B, S, Hkv, D)``, or ``q`` and ``k``; None in the place of None.
        Differentiable in ``q`` and ``k``.

    Raises:
        UnsupportedProblem: a dtype no kernel takes, shapes, dtypes or devices that do not fit, a position outside of
            the table (where it is an int), a gradient of ``cos`` or ``sin``, gradients in place.
        InvalidConfig: ``config`` breaks a rule of the op.
    """
    if not (isinstance(q, Tensor) and isinstance(cos, Tensor) and isinstance(sin, Tensor)):
        refuse_others(ROPE, (q, q if k is None else k, cos, sin, None), None)  # type: ignore[unreachable]
    if q.is_nested or cos.is_nested:
        refuse_others(ROPE, (q, q, cos, cos, None), None)
    if inplace is not False:
        check_flag("rope", "inplace", inplace)
    start, places = (0, positions) if positions is None or isinstance(positions, Tensor) else (positions, None)
    if not isinstance(start, int | torch.SymInt) or isinstance(start, bool):
        raise UnsupportedProblem(f"positions are an int or a torch.Tensor; got {said(start)}: convert them")
    if places is None and cos.dim() == 2 and q.dim() == 4 and (start < 0 or start + q.shape[1] > cos.shape[0]):
        raise UnsupportedProblem(
            f"positions {said(start)} to {said(start + q.shape[1] - 1)} leave a table of {cos.shape[0]} rows: "
            "build a longer one (RotaryEmbedding: max_positions)"
        )
    if start and cos.dim() == 3:
        raise UnsupportedProblem("a (B or 1, S, R) table is gathered already: pass a (T, R/2) table beside positions")
    refuse_table_gradient(cos, sin)
    keys = q.new_empty((*q.shape[:2], 0, *q.shape[3:])) if k is None else k
    results = (q, keys) if inplace else None
    options, operands = (interleaved, False), (q, keys, cos, sin, places)
    found = call(ROPE, operands, options, (start,), config=config, out=results, in_place=inplace)
    return found[0], None if k is None else found[1]


def refuse_table_gradient(cos: Tensor, sin: Tensor) -> None:
    if torch.is_grad_enabled() and (cos.requires_grad or sin.requires_grad):
        raise UnsupportedProblem("rope has no gradient for cos and sin: detach them")


# ---- torch.library --------------------------------------------------------------------------------------


def register(library: torch.library.Library) -> None:
    """Defines the ops of this file in ``library``: ``rope``, its gradient, and ``rope_inplace``."""
    tensor_op.register(library, ROPE, gradient=_gradient, remember=_remember)
    register_inplace(library, ROPE, updated=(0, 1))


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    _, _, cos, sin, positions, ctx.interleaved, ctx.inverse, ctx.start, *_ = inputs
    ctx.save_for_backward(cos, sin, positions)


def _gradient(ctx: Any, dq: Tensor, dk: Tensor) -> tuple[Any, ...]:
    cos, sin, positions = ctx.saved_tensors
    if ctx.needs_input_grad[2] or ctx.needs_input_grad[3]:
        refuse_table_gradient(cos, sin)
    tables = (cos, sin, positions, ctx.interleaved, not ctx.inverse, ctx.start)
    return (*ROPE.path(dq, dk, *tables, None), *[None] * 7)
