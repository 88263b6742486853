"""Gradients of attention: the declaration. Called by ``gradient.py``, which autograd calls.

Operands are those of ``op.py``, and the results of its forward pass. Always deterministic: every element of a
gradient is one thread's sum in a fixed order, so there is no option for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from cutekernels.errors import UnsupportedProblem
from cutekernels.kernels.cute.parts.attention_smem import padded
from cutekernels.op import Work, knob, plain
from cutekernels.ops.attention import problem, reference
from cutekernels.ops.attention.delta import ATTENTION_DELTA
from cutekernels.ops.attention.op import ATTENTION
from cutekernels.ops.attention.problem import AttentionProblem, TilesConfig, TilesOp, score_factors

if TYPE_CHECKING:
    from cutekernels.backends import Artifact
    from cutekernels.gpu import GpuSpec

WIDEST_TOGETHER = 192  # padded head dims whose dK and dV fit one thread's registers
# Registers beside accumulators, owned operands and one per row of the warp, for fragments: addresses, statistics; and
# more with one stage, since a tile is fetched while all sums are alive (docs/notes/attention.md#backward-registers).
OTHER_REGISTERS, LATE_REGISTERS = 15, 17
# Constants of the model, the forward pass's and guesses: docs/notes/attention.md#backward-model.
_TILE = 0.17 / 0.08  # of barrier_us: a walked tile, whatever its size
_WAIT = 0.4 / 0.08  # of the same: waiting for the next tile, with one stage
_EXPONENTS = 0.5  # the share of the exponents' time that products do not hide
_CROWD_WARPS, _CROWD = 8, 0.3  # speed falls by this power of the SM's warps where there are fewer: they hide less


@dataclass(frozen=True)
class AttentionBackwardProblem(AttentionProblem):
    """The forward pass's problem, and ``of``: the gradients that one kernel computes, dK with dV, or any one alone."""

    of: str = plain("kv", "q", "k", "v")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.lse:
            raise UnsupportedProblem("lse=1 asks attention for a result; its gradients have none: leave it out")
        if self.of == "kv" and self.width > WIDEST_TOGETHER:
            raise UnsupportedProblem(
                f"of=kv sums dK and dV of a head of {self.head_dim} in registers, which {WIDEST_TOGETHER} fill: "
                "ask for of=k and of=v"
            )

    @property
    def by_keys(self) -> bool:
        return self.of != "q"

    @property
    def products(self) -> int:
        """Products per pair of tiles: S, dP where it is needed, and a sum for each gradient."""
        return {"kv": 4, "q": 3, "k": 3, "v": 2}[self.of]

    @property
    def operands(self) -> int:
        """Owned operands: K and V, Q and dO, or K alone."""
        return 1 if self.of == "v" else 2

    def forward(self) -> AttentionProblem:
        """The problem of the forward pass, with lse."""
        named = {f.name: getattr(self, f.name) for f in fields(AttentionProblem)}
        return AttentionProblem(**named | {"lse": True})


def passes(head_dim: int) -> tuple[str, ...]:
    """The problems, by ``of``, whose kernels together give all gradients of heads of ``head_dim``."""
    return ("kv", "q") if padded(head_dim) <= WIDEST_TOGETHER else ("k", "v", "q")


@dataclass(frozen=True)
class AttentionBackwardConfig(TilesConfig):
    """The knobs of ``kernels/cute/attention/backward.py``.

    A CTA owns ``tile_own`` rows (keys for dK and dV, queries for dQ) and walks the others ``tile_walked`` at a time.
    ``in_registers``: the owned operands stay there. ``order`` is that of CTAs.
    """

    tiles: ClassVar = ("tile_own", "tile_walked")
    tile_own: int = knob(64, 128, 256)
    tile_walked: int = knob(32, 64, 128)
    warps: int = knob(4, 8)
    stages: int = knob(1, 2)
    ctas_per_sm: int = knob(1, 2, 3)
    in_registers: bool = knob(False, True)
    order: str = knob("rows", "l2", "heads")

    def smem_bytes(self, p: AttentionBackwardProblem) -> int:
        """A CTA's shared memory: the owned operands, the walked ones' stages, and walked queries' statistics."""
        row_bytes = 2 * p.width
        stats = 2 * 4 * self.tile_walked if p.by_keys else 0
        return p.operands * self.tile_own * row_bytes + self.stages * (2 * self.tile_walked * row_bytes + stats)


class AttentionBackward(TilesOp[AttentionBackwardProblem, AttentionBackwardConfig]):
    """Arguments: dout, q, k, v, stats, mask or None, cu_seqlens_q or None, cu_seqlens_kv or None, scale, softcap or 0.

    ``stats`` is ``attention_delta``'s: ``(2, rows)`` in fp32, each query's log-sum-exp to base 2 and its delta.
    Results: (dk, dv), (dq,), (dk,) or (dv,).
    """

    name = "attention_backward"
    revision = 1
    Problem = AttentionBackwardProblem
    Config = AttentionBackwardConfig
    suite = (
        "batch=4 seq_q=4096 seq_kv=4096 heads_q=16 heads_kv=16",
        "batch=4 seq_q=4096 seq_kv=4096 heads_q=16 heads_kv=16 of=q",
        "batch=4 seq_q=4096 seq_kv=4096 heads_q=16 heads_kv=16 causal=1",
        "batch=4 seq_q=4096 seq_kv=4096 heads_q=16 heads_kv=16 causal=1 of=q",
        "batch=4 seq_q=2048 seq_kv=2048 heads_q=32 heads_kv=32 head_dim=64 causal=1",
        "batch=4 seq_q=2048 seq_kv=2048 heads_q=32 heads_kv=32 head_dim=64 causal=1 of=q",
        "batch=1 seq_q=1024 seq_kv=1024 heads_q=28 heads_kv=4 causal=1",
        "batch=2 seq_q=300 seq_kv=777 heads_q=12 heads_kv=2 causal=1 window_left=200 window=left dtype=fp16",
        "batch=2 seq_q=257 seq_kv=257 heads_q=4 heads_kv=1 head_dim=80 window_left=30 window_right=9 window=both of=q",
        "batch=2 seq_q=130 seq_kv=200 heads_q=6 heads_kv=3 head_dim=96 mask=1 dtype=fp16",
        "batch=3 seq_q=200 seq_kv=200 heads_q=8 heads_kv=2 head_dim=256 causal=1 softcap=1 of=k",
        "batch=3 seq_q=200 seq_kv=200 heads_q=8 heads_kv=2 head_dim=256 causal=1 softcap=1 of=v",
        "batch=5 seq_q=150 seq_kv=150 heads_q=8 heads_kv=2 causal=1 varlen=1",
    )

    # -- rules and choice

    def unfit(self, p: AttentionBackwardProblem, c: AttentionBackwardConfig, gpu: GpuSpec) -> Iterator[str]:
        return self.unfit_tiles(p, c, gpu, registers_per_thread(p, c), c.smem_bytes(p))

    def estimate_us(self, p: AttentionBackwardProblem, c: AttentionBackwardConfig, gpu: GpuSpec) -> float:
        """See :meth:`TilesOp.tiles_us`; not fitted to measurements of its own."""
        return self.tiles_us(
            p, c, gpu, products=p.products, read_rows=0 if c.in_registers else c.rows * p.operands,
            exponents=_EXPONENTS, fixed=_TILE + (_WAIT if c.stages == 1 else 0.0),
            crowd=min(1.0, c.ctas_per_sm * c.warps / _CROWD_WARPS) ** _CROWD, uneven=p.limited_left or p.limited_right,
        )  # fmt: skip

    # -- kernel

    def build(self, p: AttentionBackwardProblem, c: AttentionBackwardConfig, gpu: GpuSpec) -> Artifact:
        from cutlass import Float32, Int32
        from cutlass.cute import sym_int

        from cutekernels.backends import cute as backend
        from cutekernels.ops.attention import fakes

        batch, number, limit = fakes.Batch(p.dtype, p.head_dim, p.varlen), Float32(1.0), Int32(0)
        return backend.compile(
            self._body(p, c, gpu),
            None if p.of == "v" else batch.kv() if p.by_keys else batch.q(),
            batch.kv() if "v" in p.of else None,
            *(batch.q(), batch.q(), batch.kv(), batch.kv()),
            fakes.vector(Float32, sym_int(64)),
            batch.mask() if p.mask else None,
            *(batch.ends(), batch.ends()),
            *(number, number, number, number),
            *(limit, limit),
            gpu=gpu,
        )

    def _body(self, p: AttentionBackwardProblem, c: AttentionBackwardConfig, gpu: GpuSpec) -> Any:
        """The body with its parts."""
        from cutekernels.kernels.cute.attention.backward import AttentionBackward
        from cutekernels.kernels.cute.parts.heads import HeadRows
        from cutekernels.kernels.cute.parts.mask import BandMask
        from cutekernels.kernels.cute.parts.products import warp_products
        from cutekernels.kernels.cute.parts.sequences import HeadOrder, Sequences
        from cutekernels.kernels.cute.parts.softmax import OnlineSoftmax

        limits = (p.limited_left, p.limited_right)
        return AttentionBackward(
            of=p.of,
            own=HeadRows(c.tile_own, p.head_dim, p.width, 1, c.threads),
            walked=HeadRows(c.tile_walked, p.head_dim, p.width, c.stages, c.threads),
            products=warp_products(c.warps, c.in_registers),
            mask=BandMask(c.tile_own, c.tile_walked, *(limits[::-1] if p.by_keys else limits), p.mask),
            softmax=OnlineSoftmax(0.0, p.softcap),
            order=HeadOrder(c.order, gpu.l2_bytes // 2),
            sequences=Sequences(p.varlen),
            ctas_per_sm=c.ctas_per_sm,
        )

    def bind(
        self, p: AttentionBackwardProblem, c: AttentionBackwardConfig, kernel: Callable[..., Any]
    ) -> Callable[..., Any]:
        limits, results = p.limits, len(p.of)
        empty = p.seq_q == 0 or p.seq_kv == 0

        def launch(*args: Any) -> None:
            dout, q, k, v, stats, mask, cu_q, cu_kv, scale, softcap = args[results:]
            if args[0].numel() == 0:
                return
            if empty:
                for t in args[:results]:
                    t.zero_()
                return
            first, second = {"kv": args[:2], "v": (None, args[0])}.get(p.of, (args[0], None))
            given = None if mask is None else mask.view(torch.uint8)
            factors = (*score_factors(scale, softcap), scale)
            kernel(first, second, dout, q, k, v, stats.view(-1), given, cu_q, cu_kv, *factors, *limits)

        return launch

    # -- mathematics

    def outputs(self, p: AttentionBackwardProblem, *args: Any) -> tuple[Tensor, ...]:
        named = dict(zip("qkv", args[1:4], strict=True))
        return tuple([named[name].new_empty(named[name].shape) for name in p.of])

    def sample(self, p: AttentionBackwardProblem, device: str, seed: int) -> tuple[Any, ...]:
        """The forward pass's sample, a random dout, and statistics of what the forward pass would have left."""
        whole = p.forward()
        q, *rest = ATTENTION.sample(whole, device, seed)
        generator = torch.Generator(device=device).manual_seed(seed + 1)
        dout = torch.randn(q.shape, generator=generator, device=device, dtype=torch.float32).to(q.dtype)
        out, lse = ATTENTION.reference(whole, q, *rest)
        (stats,) = ATTENTION_DELTA.evaluate(out, dout, lse, None)
        k, v, *options = rest
        return (dout, q, k, v, stats, *options)

    def reference(self, p: AttentionBackwardProblem, *args: Any) -> tuple[Tensor, ...]:
        dout, q, k, v, _, *options = args
        named = dict(zip("qkv", reference.gradients(dout, None, q, k, v, *options, **p.sides), strict=True))
        return tuple([named[name] for name in p.of])

    def work(self, p: AttentionBackwardProblem) -> Work:
        """The work of this kernel, which computes S and dP again for each of ``of``."""
        rows_q, rows_kv = p.batch * p.seq_q * p.heads_q, p.batch * p.seq_kv * p.heads_kv
        written = {"q": rows_q, "k": rows_kv, "v": rows_kv, "kv": 2 * rows_kv}[p.of]
        moved = 2 * (2 * rows_q + 2 * rows_kv + written) * p.head_dim + 8 * rows_q
        if p.mask:
            moved += p.batch * p.seq_q * p.seq_kv
        flops = 2.0 * p.products * p.batch * p.heads_q * p.pairs * p.head_dim
        return Work(flops=flops, bytes=float(moved), depth=depth(p))


ATTENTION_BACKWARD = AttentionBackward()


def depth(p: AttentionBackwardProblem) -> float:
    """Three times the forward pass's: P and dS are rounded, out was, and gradients of keys differ in size.

    Where queries see few keys, gradients are the rest of terms that cancel; with one key nothing is left, and no
    tolerance follows from a result's size.
    """
    return 3 * problem.depth(p) * (1 + 16 * p.seq_q / max(1, p.pairs))


def registers_per_thread(p: AttentionBackwardProblem, c: AttentionBackwardConfig) -> int:
    """An estimate of the compiler's need: sums, scores and their gradients, owned operands, and the rest."""
    sums = c.rows * p.width // 32 * len(p.of)
    scores = c.rows * c.tile_walked // 32 * p.operands
    owned = c.rows * p.width // 64 * p.operands if c.in_registers else 0
    late = LATE_REGISTERS if c.stages == 1 else 0
    return sums + scores + owned + c.rows + late + OTHER_REGISTERS
