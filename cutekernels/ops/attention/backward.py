"""Gradients of attention: the declaration. Called by ``gradient.py``, which autograd calls.

Operands are those of ``op.py``, and the results of its forward pass. Always deterministic: every element of a
gradient is one thread's sum in a fixed order, so there is no option for it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from cutekernels import gpu as gpus
from cutekernels.columns import where
from cutekernels.op import Work
from cutekernels.ops.attention import problem
from cutekernels.ops.attention.backward_config import (
    BESIDE,
    BLOCK,
    AttentionBackwardConfig,
    AttentionBackwardProblem,
    Launches,
    WarpgroupBackward,
)
from cutekernels.ops.attention.coefficients import MULTISTAGE
from cutekernels.ops.attention.config import GROUP_ROWS
from cutekernels.ops.attention.delta import ATTENTION_DELTA
from cutekernels.ops.attention.op import ATTENTION, Attention
from cutekernels.ops.attention.operands import VarlenOp, numbers, rows, workspace
from cutekernels.ops.attention.problem import TilesSchedule, score_factors, since_revision_1
from cutekernels.ops.shared.cute_op import CuteOp
from cutekernels.ops.shared.operands import Array, Matrix, Sizes
from cutekernels.rules import of_problem

if TYPE_CHECKING:
    from torch import Tensor

    from cutekernels.gpu import GpuSpec

# Registers beside accumulators, owned operands and one per row of the warp, for fragments: addresses, statistics; and
# more with one stage, since a tile is fetched while all sums are alive (docs/notes/attention.md#backward-registers).
OTHER_REGISTERS, LATE_REGISTERS = 15, 17


class MultistageBackward(TilesSchedule[AttentionBackwardProblem, AttentionBackwardConfig]):
    """cp.async and warp MMA."""

    name = "multistage"
    config = AttentionBackwardConfig

    @of_problem
    def dq_by_itself(self, p: AttentionBackwardProblem, gpu: GpuSpec, x: object) -> str | None:
        return "body=multistage does not hand dS on: ask for of=kv and of=q" if p.hands_on else None

    def registers(self, p: AttentionBackwardProblem, c: AttentionBackwardConfig) -> int:
        """An estimate of the compiler's need: sums, scores and their gradients, owned operands, and the rest."""
        sums = c.rows * p.width // 32 * len(p.of)
        scores = c.rows * c.tile_walked // 32 * p.operands
        owned = where(c.in_registers, c.rows * p.width // 64 * p.operands, 0)
        late = where(c.stages == 1, LATE_REGISTERS, 0)
        return sums + scores + owned + c.rows + late + OTHER_REGISTERS

    def smem_bytes(self, p: AttentionBackwardProblem, c: AttentionBackwardConfig) -> int:
        return c.smem_bytes(p)

    def times_us(self, p: AttentionBackwardProblem, c: Any, gpu: GpuSpec, x: object) -> Any:
        """See :meth:`TilesSchedule.tiles_us`; not fitted to measurements of its own."""
        own = MULTISTAGE
        return self.tiles_us(
            p, c, gpu, products=p.products, read_rows=where(c.in_registers, 0, c.rows * p.operands),
            exponents=own.slopes, fixed=own.tile + where(c.stages == 1, own.wait, 0.0),
            crowd_power=own.crowd,
            uneven=p.limited_left or p.limited_right,
        )  # fmt: skip


class AttentionBackward(
    VarlenOp[AttentionBackwardProblem, AttentionBackwardConfig],
    CuteOp[AttentionBackwardProblem, AttentionBackwardConfig],
):
    """``stats`` is ``attention_delta``'s: ``(2, rows)`` in fp32, each query's log-sum-exp to base 2 and its delta.

    Results: (dk, dv), (dq,), (dk,), (dv,) or (dq, dk, dv).
    """

    name = "attention_backward"
    revision = 2
    earlier = {1: since_revision_1}
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

    schedules = (MultistageBackward(), WarpgroupBackward())

    dk = dv = Array("batch?", "seq_kv", "heads_kv", "head_dim", result=True, align=16, bits=64)
    dq = Array("batch?", "seq_q", "heads_q", "head_dim", result=True, align=16, bits=64)
    dout = q = rows("batch?", "seq_q", "heads_q")
    k = v = rows("batch?", "seq_kv", "heads_kv")
    stats = Matrix("statistics", "rows", dtype="fp32", strides=(), flat=True, bits=64)
    mask = Attention.mask
    cu_seqlens_q = Attention.cu_seqlens_q
    cu_seqlens_kv = Attention.cu_seqlens_kv
    options = ("of", "causal", "window", "window_left", "window_right", "softcap")

    # -- calls

    def results_of(self, **options: Any) -> tuple[str, ...]:
        return tuple([f"d{name}" for name in options["of"]])

    def derive(self, sizes: Sizes, **options: Any) -> None:
        sizes |= {"statistics": 2, "rows": sizes.get("batch", 1) * sizes["seq_q"] * sizes["heads_q"]}

    # -- kernel

    def kind(self, p: AttentionBackwardProblem, name: str) -> str | None:
        return None if name in self.results and name[1:] not in p.of else super().kind(p, name)

    def fakes(self, p: AttentionBackwardProblem, c: AttentionBackwardConfig) -> list[Any]:
        """Behind dK, or dQ in its place, there is dV."""
        dk, dv, dq, *inputs = super().fakes(p, c)
        return [dq if dk is None else dk, dv, *inputs]

    def further(self, p: AttentionBackwardProblem, c: AttentionBackwardConfig) -> list[Any]:
        if c.body == "multistage":
            return numbers(4, 2)
        handed: list[Any] = [None] * 3
        if p.hands_on:
            from cutlass import Int32

            from cutekernels.backends import cute as backend

            blocks = backend.dense(backend.type_of(p.dtype), None, None, None, BLOCK, align=128, bits=64)
            handed = [super().fakes(p, c)[2], blocks, Int32(0)]
        return [*workspace(sums=False, tickets=c.grid == "dynamic")[1:], *handed, *numbers(4, 2)]

    def body(self, p: AttentionBackwardProblem, c: AttentionBackwardConfig, gpu: GpuSpec) -> Any:
        """The kernel of ``c.body`` with its parts."""
        from cutekernels.kernels.cute.attention.multistage_backward import MultistageAttentionBackward
        from cutekernels.kernels.cute.attention.warpgroup_backward import WarpgroupAttentionBackward
        from cutekernels.kernels.cute.parts.heads import HeadRows
        from cutekernels.kernels.cute.parts.mask import BandMask
        from cutekernels.kernels.cute.parts.products import warp_products
        from cutekernels.kernels.cute.parts.sequences import HeadOrder, Sequences
        from cutekernels.kernels.cute.parts.softmax import OnlineSoftmax

        limits = (p.limited_left, p.limited_right)
        shared: dict[str, Any] = {
            "of": p.of,
            "mask": BandMask(c.tile_own, c.tile_walked, *(limits[::-1] if p.by_keys else limits), p.mask),
            "softmax": OnlineSoftmax(0.0, p.softcap),
            "order": HeadOrder(c.order, gpu.l2_bytes // 2),
            "sequences": Sequences(p.varlen),
        }
        if c.body == "warpgroup":
            return WarpgroupAttentionBackward(
                groups=c.tile_own // GROUP_ROWS,
                tile_walked=c.tile_walked,
                head_dim=p.head_dim,
                padded=p.width,
                stages=c.stages,
                resident=gpu.sm_count if c.grid == "dynamic" else 0,
                **shared,
            )
        return MultistageAttentionBackward(
            own=HeadRows(c.tile_own, p.head_dim, p.width, 1, c.threads),
            walked=HeadRows(c.tile_walked, p.head_dim, p.width, c.stages, c.threads),
            products=warp_products(c.warps, c.in_registers),
            ctas_per_sm=c.ctas_per_sm,
            **shared,
        )

    def bind(
        self, p: AttentionBackwardProblem, c: AttentionBackwardConfig, kernel: Callable[..., Any]
    ) -> Callable[..., Any]:
        import torch

        from cutekernels.ops.shared.per_stream import StreamWorkspace

        limits, results = p.limits, len(p.of)
        empty = p.seq_q == 0 or p.seq_kv == 0
        launches = Launches.of(p, c, gpus.detect()) if p.hands_on and not empty else None
        counter = StreamWorkspace(0, 1) if c.grid == "dynamic" else None  # one ticket, no partial sums

        def launch(*args: Any) -> None:
            dout, q, k, v, stats, mask, cu_q, cu_kv, scale, softcap = args[results:]
            if args[0].numel() == 0:
                return
            if empty:
                for t in args[:results]:
                    t.zero_()
                return
            first, second = {"kv": args[:2], "v": (None, args[0]), "qkv": args[1:3]}.get(p.of, (args[0], None))
            given = None if mask is None else mask.view(torch.uint8)
            factors = (*score_factors(scale, softcap), scale)
            inputs = first, second, dout, q, k, v, stats.view(-1), given, cu_q, cu_kv
            tickets = () if c.body == "multistage" else (None if counter is None else counter.get()[1],)
            if launches is None:
                kernel(*inputs, *tickets, *(() if c.body == "multistage" else (None,) * 3), *factors, *limits)
                return
            blocks = q.new_empty(launches.elements)[BESIDE:-BESIDE].view(launches.shape)
            for layer in range(0, launches.layers, launches.each):
                heads = min(launches.each, launches.layers - layer) * p.group
                kernel(*inputs, *tickets, args[0], blocks[:heads], layer, *factors, *limits)

        return launch

    # -- mathematics

    def sample(self, p: AttentionBackwardProblem, device: str, seed: int) -> tuple[Any, ...]:
        """The forward pass's sample, a random dout, and statistics of what the forward pass would have left."""
        import torch

        whole = p.forward()
        q, *rest = ATTENTION.sample(whole, device, seed)
        generator = torch.Generator(device=device).manual_seed(seed + 1)
        dout = torch.randn(q.shape, generator=generator, device=device, dtype=torch.float32).to(q.dtype)
        out, lse = ATTENTION.reference(whole, q, *rest)
        (stats,) = ATTENTION_DELTA.evaluate(out, dout, lse, None)
        k, v, mask, cu_q, cu_kv, _, *factors = rest
        return (dout, q, k, v, stats, mask, cu_q, cu_kv, *factors)

    def evaluate(self, *args: Any, **options: Any) -> tuple[Tensor, ...]:
        from cutekernels.ops.attention import reference

        of = options.pop("of")
        dout, q, k, v, _, *rest = args
        found = reference.gradients(dout, None, q, k, v, *rest, **problem.sides_of(**options))
        named = dict(zip("qkv", found, strict=True))
        return tuple([named[name] for name in of])

    def work(self, p: AttentionBackwardProblem) -> Work:
        """The work of this kernel, which computes S and dP again for each of ``of``."""
        flops = 2.0 * p.products * p.batch * p.heads_q * p.pairs * p.head_dim
        return Work(flops=flops, bytes=float(p.work_bytes), depth=depth(p))


ATTENTION_BACKWARD = AttentionBackward()


def depth(p: AttentionBackwardProblem) -> float:
    """Three times the forward pass's: P and dS are rounded, out was, and gradients of keys differ in size.

    Where queries see few keys, gradients are the rest of terms that cancel; with one key nothing is left, and no
    tolerance follows from a result's size.
    """
    return 3 * problem.depth(p) * (1 + 16 * p.seq_q / max(1, p.pairs))
