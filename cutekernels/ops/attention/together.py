"""``attention_gradients``: all three gradients of attention as one problem, by one kernel or by one for each.

``path=chain`` launches the kernels of ``attention_backward``, each as it is tuned; ``path=fused`` is one kernel for
Hopper that computes scores once (``kernels/cute/attention/fused_backward.py``). No GPU has run the fused kernel yet:
``gradient.py`` does not pose this problem, and the default is the chain. docs/notes/attention.md#fused-backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from cutekernels import dispatch, rates
from cutekernels.errors import UnsupportedProblem
from cutekernels.kernels.cute.parts.attention_smem import FusedBackwardSmem
from cutekernels.op import Config, Work, knob
from cutekernels.ops.attention import reference
from cutekernels.ops.attention.backward import ATTENTION_BACKWARD, depth
from cutekernels.ops.attention.backward_config import AttentionBackwardProblem, passes
from cutekernels.ops.attention.config import GROUP_ROWS
from cutekernels.ops.attention.problem import EXPONENTS_PER_CLOCK, AttentionOp, AttentionProblem, score_factors
from cutekernels.ops.shared.occupancy import no_warpgroups
from cutekernels.ops.shared.per_stream import Workspace

if TYPE_CHECKING:
    from cutekernels.backends import Artifact
    from cutekernels.gpu import GpuSpec

OWN, GROUPS = 128, 2  # keys of a CTA, warp groups
WALKED = {64: 128, 128: 64}  # queries of a tile, by padded head dim: what a thread's registers hold
MOST_TILES = 1 << 18  # of queries, of all heads: each has a number in memory
# Guesses until a GPU has run it: shares of warpgroup_flops_per_us, and of the time of 16 exponents a clock.
_MMA, _EXPONENTS = 1.03, 0.5
_LAUNCH, _NEXT, _TILE = 3.0 / 1.5, 2.5 / 0.8, 0.5 / 0.08  # of launch_us, dram_latency_us, barrier_us


@dataclass(frozen=True)
class AttentionGradientsProblem(AttentionProblem):
    """The forward pass's problem."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.lse or self.sinks != "none":
            raise UnsupportedProblem("lse and sinks change nothing in gradients of q, k and v: leave them out")

    def part(self, of: str) -> AttentionBackwardProblem:
        """The problem of one kernel of the chain."""
        named = {f.name: getattr(self, f.name) for f in fields(AttentionProblem)}
        return AttentionBackwardProblem(**named, of=of)

    @property
    def tiles(self) -> int:
        """Tiles of queries, of all heads."""
        return self.batch * self.heads_q * -(-self.seq_q // WALKED.get(self.width, GROUP_ROWS))


@dataclass(frozen=True)
class AttentionGradientsConfig(Config):
    """``chain``, or the fused kernel's stages of walked tiles and its order of tiles."""

    path: str = knob("chain", "fused")
    stages: int = knob(2, 3)
    order: str = knob("rows", "l2", "heads")


CHAIN = AttentionGradientsConfig("chain", 2, "rows")


class AttentionGradients(AttentionOp[AttentionGradientsProblem, AttentionGradientsConfig]):
    """Arguments: those of ``attention_backward``. Results: dq, dk, dv."""

    name = "attention_gradients"
    revision = 1
    Problem = AttentionGradientsProblem
    Config = AttentionGradientsConfig
    suite = (
        "batch=4 seq_q=4096 seq_kv=4096 heads_q=16 heads_kv=16",
        "batch=4 seq_q=4096 seq_kv=4096 heads_q=16 heads_kv=16 causal=1",
        "batch=4 seq_q=2048 seq_kv=2048 heads_q=32 heads_kv=32 head_dim=64 causal=1",
        "batch=1 seq_q=1024 seq_kv=1024 heads_q=28 heads_kv=4 causal=1",
        "batch=2 seq_q=300 seq_kv=777 heads_q=12 heads_kv=2 causal=1 window_left=200 window=left dtype=fp16",
        "batch=2 seq_q=257 seq_kv=130 heads_q=4 heads_kv=1 head_dim=40 causal=1",
        "batch=3 seq_q=200 seq_kv=200 heads_q=8 heads_kv=2 head_dim=256 causal=1 softcap=1",
    )

    # -- rules and choice

    def unfit(self, p: AttentionGradientsProblem, c: AttentionGradientsConfig, gpu: GpuSpec) -> Iterator[str]:
        if c.path == "chain":
            if c != CHAIN:
                yield f"path=chain has no knobs: take [{CHAIN}]"
            return
        yield from no_warpgroups(gpu)
        if p.width not in WALKED:
            yield f"path=fused is for head dims of 40 to 64 and of 104 to 128; it is {p.head_dim}"
            return
        for name in ("mask", "varlen", "softcap"):
            if getattr(p, name):
                yield f"path=fused takes no {name}"
        need = smem(p, c).total_bytes
        if need > gpu.smem_per_block_bytes:
            yield f"{need} bytes of shared memory are more than a block's {gpu.smem_per_block_bytes}"

    def unsuited(self, p: AttentionGradientsProblem, c: AttentionGradientsConfig, gpu: GpuSpec) -> Iterator[str]:
        if c.path == "fused" and p.tiles > MOST_TILES:
            yield f"path=fused keeps a number for each of {p.tiles} tiles of queries; it has room for {MOST_TILES}"
        if c.order != "rows" and p.seq_kv <= OWN:
            yield f"order={c.order} needs more than one tile of keys"

    def default(self, p: AttentionGradientsProblem, gpu: GpuSpec) -> AttentionGradientsConfig:
        """The chain, until the fused kernel has been measured."""
        return CHAIN

    def estimate_us(self, p: AttentionGradientsProblem, c: AttentionGradientsConfig, gpu: GpuSpec) -> float:
        """The chain's estimates, or walked tiles: products, and the exponents that these do not hide."""
        if c.path == "chain":
            parts = [p.part(of) for of in passes(p.head_dim)]
            return sum(ATTENTION_BACKWARD.estimate_us(q, ATTENTION_BACKWARD.default(q, gpu), gpu) for q in parts)
        rate = rates.of(gpu)
        walked = WALKED[p.width]
        tiles = -(-p.seq_kv // OWN) * p.batch * p.heads_kv
        if tiles == 0 or p.seq_q == 0:
            return _LAUNCH * rate.launch_us
        steps = max(1.0, p.pairs / p.seq_kv / walked + 0.5) * p.group
        products = 10.0 * OWN * walked * p.width / (_MMA * rate.warpgroup_flops_per_us)
        exponents = _EXPONENTS * OWN * walked / (EXPONENTS_PER_CLOCK * rate.clock_mhz)
        step = products + exponents + _TILE * rate.barrier_us
        per_sm = max(1.0, tiles / gpu.sm_count)
        return float(_LAUNCH * rate.launch_us + per_sm * (steps * step + _NEXT * rate.dram_latency_us))

    # -- kernel

    def build(self, p: AttentionGradientsProblem, c: AttentionGradientsConfig, gpu: GpuSpec) -> Artifact:
        if c.path == "chain":
            from cutekernels.backends.chained import Chained

            return Chained()
        from cutlass import Float32, Int32
        from cutlass.cute import sym_int

        from cutekernels.backends import cute as backend
        from cutekernels.ops.attention import fakes

        batch, number, limit = fakes.Batch(p.dtype, p.head_dim, False), Float32(1.0), Int32(0)
        return backend.compile(
            self._body(p, c, gpu),
            *(fakes.vector(Float32, sym_int(64)), fakes.vector(Int32)),
            *(batch.kv(), batch.kv()),
            *(batch.q(), batch.q(), batch.kv(), batch.kv()),
            *(fakes.vector(Float32, sym_int(64)), fakes.vector(Int32)),
            *(number, number, number, number),
            *(limit, limit),
            gpu=gpu,
        )

    def _body(self, p: AttentionGradientsProblem, c: AttentionGradientsConfig, gpu: GpuSpec) -> Any:
        from cutekernels.kernels.cute.attention.fused_backward import FusedAttentionBackward
        from cutekernels.kernels.cute.parts.mask import BandMask
        from cutekernels.kernels.cute.parts.sequences import HeadOrder, Sequences
        from cutekernels.kernels.cute.parts.softmax import OnlineSoftmax

        walked = WALKED[p.width]
        return FusedAttentionBackward(
            of="qkv",
            groups=GROUPS,
            tile_walked=walked,
            head_dim=p.head_dim,
            padded=p.width,
            stages=c.stages,
            mask=BandMask(OWN, walked, p.limited_right, p.limited_left, False),
            softmax=OnlineSoftmax(0.0, False),
            order=HeadOrder(c.order, gpu.l2_bytes // 2),
            sequences=Sequences(False),
            resident=gpu.sm_count,
        )

    def bind(
        self, p: AttentionGradientsProblem, c: AttentionGradientsConfig, kernel: Callable[..., Any]
    ) -> Callable[..., Any]:
        if c.path == "chain":
            return self._chain(p)
        limits = p.limits
        empty = p.seq_q == 0 or p.seq_kv == 0
        blind = p.limited_right and p.seq_kv - p.seq_q + limits[1] < 0  # some queries see no key
        numbers = Workspace(0, 1 + p.tiles)  # the counter of tiles, and whose turn it is at each tile of queries

        def launch(*args: Any) -> None:
            dq, dk, dv, dout, q, k, v, stats, _, _, _, scale, softcap = args
            if dq.numel() == 0 or empty:
                for t in (dq, dk, dv):
                    t.zero_()
                return
            make = torch.zeros if blind else torch.empty
            sums = make(p.tiles * WALKED[p.width] * p.width, device=q.device, dtype=torch.float32)
            ours = numbers.get()[1]
            factors = (*score_factors(scale, softcap), scale)
            kernel(sums, ours[1:], dk, dv, dout, q, k, v, stats.view(-1), ours[:1], *factors, *limits)
            unfold(sums, dq)

        return launch

    def _chain(self, p: AttentionGradientsProblem) -> Callable[..., Any]:
        parts = [p.part(of) for of in passes(p.head_dim)]
        for part in parts:
            dispatch.plan(ATTENTION_BACKWARD, part, torch.cuda.current_device())  # compiled now

        def launch(*args: Any) -> None:
            named = dict(zip("qkv", args[:3], strict=True))
            for part in parts:
                plan = dispatch.plan(ATTENTION_BACKWARD, part, args[3].get_device())
                plan.launch(*[named[name] for name in part.of], *args[3:])

        return launch

    # -- mathematics

    def outputs(self, p: AttentionGradientsProblem, *args: Any) -> tuple[Tensor, ...]:
        return tuple([t.new_empty(t.shape) for t in args[1:4]])

    def sample(self, p: AttentionGradientsProblem, device: str, seed: int) -> tuple[Any, ...]:
        return ATTENTION_BACKWARD.sample(p.part("q"), device, seed)

    def reference(self, p: AttentionGradientsProblem, *args: Any) -> tuple[Tensor, ...]:
        dout, q, k, v, _, *options = args
        return reference.gradients(dout, None, q, k, v, *options, **p.sides)

    def work(self, p: AttentionGradientsProblem) -> Work:
        """Five products, each operand and each gradient once."""
        rows_q, rows_kv = p.batch * p.seq_q * p.heads_q, p.batch * p.seq_kv * p.heads_kv
        moved = 2 * (3 * rows_q + 4 * rows_kv) * p.head_dim + 8 * rows_q
        if p.mask:
            moved += p.batch * p.seq_q * p.seq_kv
        flops = 10.0 * p.batch * p.heads_q * p.pairs * p.head_dim
        return Work(flops=flops, bytes=float(moved), depth=depth(p.part("q")))


ATTENTION_GRADIENTS = AttentionGradients()


def smem(p: AttentionGradientsProblem, c: AttentionGradientsConfig) -> FusedBackwardSmem:
    """The fused kernel's shared memory."""
    return FusedBackwardSmem(GROUPS, WALKED[p.width], p.head_dim, c.stages, owned=2, stats=True)


def unfold(sums: Tensor, dq: Tensor) -> None:
    """Rounds dQ's sums to ``dq`` ``(B, S, H, D)``.

    They lie as the fused kernel's threads had them, ``(B, H, tile, group, D / 8 in a group, warp, row, pair of columns,
    row / 8, column in the pair)``; a group has 64 rows or 64 columns of a tile.
    """
    batch, seq, heads, head_dim = dq.shape
    by_rows = head_dim <= GROUP_ROWS
    parts = sums.view(batch, heads, -1, GROUPS, 8, 4, 8, 4, 2, 2)
    order = (0, 2, 3, 5, 8, 6, 1, 4, 7, 9) if by_rows else (0, 2, 5, 8, 6, 1, 3, 4, 7, 9)
    rows = parts.permute(*order).reshape(batch, -1, heads, GROUP_ROWS if by_rows else 2 * GROUP_ROWS)
    dq.copy_(rows[:, :seq, :, :head_dim])
