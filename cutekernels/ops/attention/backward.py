"""Gradients of attention: the declaration. Called by ``attend_backward.py``, which autograd calls.

Operands are those of ``attention.py``, and what its forward pass left. Deterministic always: every element of a
gradient is one thread's sum in a fixed order, so there is no option for it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from cutekernels import rates
from cutekernels.errors import UnsupportedProblem
from cutekernels.kernels.cute.parts.attention_smem import padded
from cutekernels.op import Config, Op, Work, knob, plain, power_of_two
from cutekernels.ops.attention.delta import ATTENTION_DELTA
from cutekernels.ops.attention.op import ATTENTION
from cutekernels.ops.attention.problem import UNLIMITED, AttentionProblem, band, score_factors, vectors_along
from cutekernels.ops.attention.problem import depth as forward_depth
from cutekernels.ops.shared.occupancy import occupancy_rules

if TYPE_CHECKING:
    from cutekernels.backends import Artifact
    from cutekernels.gpu import GpuSpec

WIDEST_TOGETHER = 192  # padded head dims whose dK and dV fit one thread's registers
_PRODUCTS = {"kv": 4, "q": 3, "k": 3, "v": 2}


@dataclass(frozen=True)
class AttentionBackwardProblem(AttentionProblem):
    """That of the forward pass, and ``of``: the gradients that one kernel computes, dK with dV, or any one alone."""

    of: str = plain("kv", "q", "k", "v")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.lse:
            raise UnsupportedProblem("lse=1 asks attention for a result; its gradients have none: leave it out")
        if self.of == "kv" and padded(self.head_dim) > WIDEST_TOGETHER:
            raise UnsupportedProblem(
                f"of=kv sums dK and dV of a head of {self.head_dim} in registers, which {WIDEST_TOGETHER} fill: "
                "ask for of=k and of=v"
            )

    @property
    def by_keys(self) -> bool:
        """Whether a CTA owns keys and walks queries."""
        return self.of != "q"

    @property
    def seq_own(self) -> int:
        return self.seq_kv if self.by_keys else self.seq_q

    @property
    def seq_walked(self) -> int:
        return self.seq_q if self.by_keys else self.seq_kv


def passes(head_dim: int) -> tuple[str, ...]:
    """Which problems' kernels together give all gradients of heads of ``head_dim``."""
    return ("kv", "q") if padded(head_dim) <= WIDEST_TOGETHER else ("k", "v", "q")


@dataclass(frozen=True)
class AttentionBackwardConfig(Config):
    """The knobs of ``kernels/cute/attention_backward.py``.

    A CTA owns ``tile_own`` rows (keys for dK and dV, queries for dQ) and walks the others ``tile_walked`` at a time.
    ``in_registers``: the owned operands stay there. ``order`` is that of CTAs.
    """

    tile_own: int = knob(64, 128, 256)
    tile_walked: int = knob(32, 64, 128)
    warps: int = knob(4, 8)
    stages: int = knob(1, 2)
    ctas_per_sm: int = knob(1, 2, 3)
    in_registers: bool = knob(False, True)
    order: str = knob("rows", "l2", "heads")

    @property
    def threads(self) -> int:
        return 32 * self.warps

    @property
    def rows(self) -> int:
        """Owned rows of a warp."""
        return self.tile_own // self.warps

    def smem_bytes(self, p: AttentionBackwardProblem) -> int:
        """Of a CTA: the owned operands, the walked ones' stages, and walked queries' statistics."""
        row_bytes = 2 * padded(p.head_dim)
        owned = self.tile_own * row_bytes * (1 if p.of == "v" else 2)
        stats = 2 * 4 * self.tile_walked if p.by_keys else 0
        return owned + self.stages * (2 * self.tile_walked * row_bytes + stats)


MAX_CTAS = 3

# The model's constants (see ``estimate_us``): the forward pass's, fitted there, and guesses.
# Clocks per CTA, per walked tile whatever its size, and of a wait for the next one with one stage.
_CTA_CLOCKS, _TILE_CLOCKS, _WAIT_CLOCKS = 4675, 289, 680
_SOFTMAX = 0.5  # the share of the exponents' time that products do not hide
_ORDER = {False: {"rows": 1.0, "l2": 1.01, "heads": 1.02}, True: {"rows": 1.05, "l2": 1.05, "heads": 1.0}}
_FED = 0.83  # of the tensor cores' rate that a full SM of warps reaches


class AttentionBackward(Op[AttentionBackwardProblem, AttentionBackwardConfig]):
    """Arguments: dout, q, k, v, stats, mask or None, cu_seqlens_q or None, cu_seqlens_kv or None, scale, softcap or 0.

    ``stats`` is ``attention_delta``'s: ``(2, rows)`` in fp32, each query's log-sum-exp to base 2 and its delta.
    Results: (dk, dv), (dq,), (dk,) or (dv,).
    """

    name = "attention_backward"
    revision = 1
    most_stack_bytes = 0  # at the register limit all of it is spilled
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

    # -- rules

    def why_not(self, p: AttentionBackwardProblem, c: AttentionBackwardConfig, gpu: GpuSpec) -> str | None:
        return next(self._broken(p, c, gpu), None)

    def _broken(self, p: AttentionBackwardProblem, c: AttentionBackwardConfig, gpu: GpuSpec) -> Iterator[str]:
        if c.rows not in (16, 32, 64):
            yield f"{c.warps} warps of tile_own={c.tile_own} have {c.rows} rows each: take 16, 32 or 64"
        across = c.threads // vectors_along(p.head_dim)
        for name, tile, seq in (("own", c.tile_own, p.seq_own), ("walked", c.tile_walked, p.seq_walked)):
            if tile % across:
                yield f"{c.threads} threads copy {across} rows at a time, which does not divide tile_{name}={tile}"
            if tile > max(64 if name == "own" else 32, power_of_two(seq)):
                yield f"tile_{name}={tile} idles most of a tile over {seq} rows"
        registers, smem = registers_per_thread(p, c), c.smem_bytes(p)
        yield from occupancy_rules(
            gpu, ctas=c.ctas_per_sm, most=MAX_CTAS, warps=c.warps, registers=registers, smem=smem
        )
        if c.order != "rows" and p.seq_own <= c.tile_own:
            yield f"order={c.order} needs more than one tile of rows"

    # -- choice

    def default(self, p: AttentionBackwardProblem, gpu: GpuSpec) -> AttentionBackwardConfig:
        """The model's best."""
        return _default(self, p, gpu)

    def estimate_us(self, p: AttentionBackwardProblem, c: AttentionBackwardConfig, gpu: GpuSpec) -> float:
        """Waves of CTAs, each walked tile as slow as tensor cores or shared memory; or DRAM, if slower.

        The forward pass's model; not yet fitted to measurements of its own.
        """
        rate = rates.of(gpu)
        group = p.heads_q // p.heads_kv
        tiles = -(-p.seq_own // c.tile_own) * p.batch * (p.heads_kv if p.by_keys else p.heads_q)
        if tiles == 0 or p.seq_walked == 0:
            return rate.launch_us
        width, products = padded(p.head_dim), _PRODUCTS[p.of]
        uneven = p.limited_left or p.limited_right
        # Walked tiles of an owned one, on average: those its band touches; the ones at its edge cost more.
        seen = p.pairs / p.seq_own + (1.7 * c.tile_own if uneven else 0)
        steps = max(1.0, min(seen, p.seq_walked) / c.tile_walked + 0.5) * (group if p.by_keys else 1)
        multiply = 2.0 * products * c.tile_own * c.tile_walked * width / (_FED * gpu.mma_tflops * 1e6 / gpu.sm_count)
        owned = 0 if c.in_registers else c.rows * (1 if p.of == "v" else 2)
        read = c.warps * (products * c.tile_walked + owned) * width * 2
        feed = read / rate.smem_bytes_per_us
        exponents = c.tile_own * c.tile_walked / (16 * rate.clock_mhz)
        fixed = _TILE_CLOCKS / rate.clock_mhz + (_WAIT_CLOCKS / rate.clock_mhz if c.stages == 1 else 0.0)
        crowd = min(1.0, c.ctas_per_sm * c.warps / 8) ** 0.3  # a warp of each scheduler hides nothing
        step = (max(multiply, feed) + _SOFTMAX * exponents) / crowd + fixed / c.ctas_per_sm
        cta = steps * step + _CTA_CLOCKS / rate.clock_mhz / c.ctas_per_sm
        per_sm = tiles / gpu.sm_count
        busy = cta * (max(1.0, per_sm) if uneven or per_sm > 8 else math.ceil(per_sm))
        busy *= _ORDER[uneven][c.order]
        dram = self.work(p).bytes / (rate.dram_share * gpu.dram_gbps * 1e3)
        return float(rate.launch_us + max(busy, dram) + 0.05 * min(busy, dram))

    # -- kernel

    def build(self, p: AttentionBackwardProblem, c: AttentionBackwardConfig, gpu: GpuSpec) -> Artifact:
        import cutlass

        from cutekernels.backends import cute as backend
        from cutekernels.ops.attention import fakes

        batch, seq_q, seq_kv, heads_q, heads_kv, ends = [cutlass.cute.sym_int() for _ in range(6)]

        def rows(seq: Any, heads: Any) -> Any:
            return fakes.rows(p.dtype, p.head_dim, *(() if p.varlen else (batch,)), seq, heads)

        mask = fakes.mask(batch, heads_q, seq_q, seq_kv) if p.mask else None
        first = {"q": (seq_q, heads_q), "kv": (seq_kv, heads_kv), "k": (seq_kv, heads_kv), "v": None}[p.of]
        number, limit = cutlass.Float32(1.0), cutlass.Int32(0)
        return backend.compile(
            self._body(p, c, gpu),
            None if first is None else rows(*first),
            rows(seq_kv, heads_kv) if p.of in ("v", "kv") else None,
            rows(seq_q, heads_q),
            rows(seq_q, heads_q),
            rows(seq_kv, heads_kv),
            rows(seq_kv, heads_kv),
            fakes.vector(cutlass.Float32, cutlass.cute.sym_int(64)),
            mask,
            fakes.vector(cutlass.Int32, ends) if p.varlen else None,
            fakes.vector(cutlass.Int32, ends) if p.varlen else None,
            number,
            number,
            number,
            number,
            limit,
            limit,
            gpu=gpu,
        )

    def _body(self, p: AttentionBackwardProblem, c: AttentionBackwardConfig, gpu: GpuSpec) -> Any:
        """The body with its parts."""
        import cutlass

        from cutekernels.kernels.cute.attention.backward import AttentionBackward
        from cutekernels.kernels.cute.attention.prefill import HeadOrder
        from cutekernels.kernels.cute.parts.heads import HeadRows
        from cutekernels.kernels.cute.parts.mask import BandMask
        from cutekernels.kernels.cute.parts.mma import WarpMma
        from cutekernels.kernels.cute.parts.sequences import Sequences
        from cutekernels.kernels.cute.parts.softmax import OnlineSoftmax

        width = padded(p.head_dim)
        limits = (p.limited_left, p.limited_right)
        return AttentionBackward(
            of=p.of,
            own=HeadRows(c.tile_own, p.head_dim, width, 1, c.threads),
            walked=HeadRows(c.tile_walked, p.head_dim, width, c.stages, c.threads),
            mma_scores=WarpMma(c.warps, 1, cutlass.Float32, True, True),
            mma_sums=WarpMma(c.warps, 1, cutlass.Float32, True, False),
            mask=BandMask(c.tile_own, c.tile_walked, *(limits[::-1] if p.by_keys else limits), p.mask),
            softmax=OnlineSoftmax(0.0, p.softcap),
            order=HeadOrder(c.order, gpu.l2_bytes // 2),
            sequences=Sequences(p.varlen),
            in_registers=c.in_registers,
            ctas_per_sm=c.ctas_per_sm,
        )

    def bind(
        self, p: AttentionBackwardProblem, c: AttentionBackwardConfig, kernel: Callable[..., Any]
    ) -> Callable[..., Any]:
        left = p.window_left if p.limited_left else UNLIMITED
        right = p.window_right if p.window in ("right", "both") else 0 if p.causal else UNLIMITED
        results = len(p.of)
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
            factors = score_factors(scale, softcap)
            given = None if mask is None else mask.view(torch.uint8)
            kernel(
                first, second, dout, q, k, v, stats.view(-1), given, cu_q, cu_kv, *factors, scale, left, right
            )  # fmt: skip

        return launch

    # -- mathematics

    def outputs(self, p: AttentionBackwardProblem, *args: Any) -> tuple[Tensor, ...]:
        q, k, v = args[1:4]
        like = {"q": (q,), "k": (k,), "v": (v,), "kv": (k, v)}[p.of]
        return tuple([t.new_empty(t.shape) for t in like])

    def sample(self, p: AttentionBackwardProblem, device: str, seed: int) -> tuple[Any, ...]:
        """The forward pass's sample, a random dout, and statistics of what the forward pass would have left."""
        whole = _forward(p)
        q, *rest = ATTENTION.sample(whole, device, seed)
        generator = torch.Generator(device=device).manual_seed(seed + 1)
        dout = torch.randn(q.shape, generator=generator, device=device, dtype=torch.float32).to(q.dtype)
        out, lse = ATTENTION.reference(whole, q, *rest)
        (stats,) = ATTENTION_DELTA.evaluate(out, dout, lse, None)
        k, v, *options = rest
        return (dout, q, k, v, stats, *options)

    def reference(self, p: AttentionBackwardProblem, *args: Any) -> tuple[Tensor, ...]:
        dout, q, k, v, _, *options = args
        dq, dk, dv = reference(
            dout, None, q, k, v, *options,
            left=p.window_left if p.limited_left else None,
            right=0 if p.causal else p.window_right if p.limited_right else None,
        )  # fmt: skip
        return {"q": (dq,), "k": (dk,), "v": (dv,), "kv": (dk, dv)}[p.of]

    def work(self, p: AttentionBackwardProblem) -> Work:
        """The products of this kernel: S and dP again for each of ``of``."""
        rows_q, rows_kv = p.batch * p.seq_q * p.heads_q, p.batch * p.seq_kv * p.heads_kv
        written = {"q": rows_q, "k": rows_kv, "v": rows_kv, "kv": 2 * rows_kv}[p.of]
        moved = 2 * (2 * rows_q + 2 * rows_kv + written) * p.head_dim + 8 * rows_q
        if p.mask:
            moved += p.batch * p.seq_q * p.seq_kv
        flops = 2.0 * _PRODUCTS[p.of] * p.batch * p.heads_q * p.pairs * p.head_dim
        return Work(flops=flops, bytes=float(moved), depth=depth(p))


ATTENTION_BACKWARD = AttentionBackward()


def _forward(p: AttentionBackwardProblem) -> AttentionProblem:
    """The problem whose gradients ``p`` asks for, with lse."""
    fields = {name: getattr(p, name) for name in AttentionProblem.__dataclass_fields__}
    return AttentionProblem(**{**fields, "lse": True})


def reference(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_kv: Tensor | None,
    scale: float,
    softcap: float,
    *,
    left: int | None,
    right: int | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """``(dq, dk, dv)`` in plain PyTorch, in fp64, rounded once; a head of a sequence at a time."""
    dq, dk, dv = (torch.zeros_like(t, memory_format=torch.contiguous_format) for t in (q, k, v))
    group = q.shape[-2] // max(1, k.shape[-2])
    if cu_seqlens_q is None or cu_seqlens_kv is None:
        sequences = [
            (dout[b], None if dlse is None else dlse[b], q[b], k[b], v[b], dq[b], dk[b], dv[b], b)
            for b in range(q.shape[0])
        ]
    else:
        at_q, at_kv = cu_seqlens_q.tolist(), cu_seqlens_kv.tolist()
        sequences = []
        for i in range(len(at_q) - 1):
            a, c = slice(at_q[i], at_q[i + 1]), slice(at_kv[i], at_kv[i + 1])
            steep = None if dlse is None else dlse[:, a]
            sequences.append((dout[a], steep, q[a], k[c], v[c], dq[a], dk[c], dv[c], i))
    for do1, dlse1, q1, k1, v1, dq1, dk1, dv1, i in sequences:
        seen = band(q1.shape[0], k1.shape[0], left, right, q.device)
        for head in range(k1.shape[1]):
            wide_k, wide_v = k1[:, head].double(), v1[:, head].double()
            sum_k, sum_v = torch.zeros_like(wide_k), torch.zeros_like(wide_v)
            for h in range(head * group, (head + 1) * group):
                visible = seen if mask is None else seen & mask[i, h]
                steep = None if dlse1 is None else dlse1[h].double()
                one = _one_head(do1[:, h].double(), steep, q1[:, h].double(), wide_k, wide_v, visible, scale, softcap)
                dq1[:, h] = one[0].to(q.dtype)
                sum_k += one[1]
                sum_v += one[2]
            dk1[:, head], dv1[:, head] = sum_k.to(k.dtype), sum_v.to(v.dtype)
    return dq, dk, dv


def _one_head(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float, softcap: float
) -> tuple[Tensor, Tensor, Tensor]:
    scores = scale * (q @ k.T)
    slope = torch.ones((), dtype=scores.dtype, device=scores.device)
    if softcap:
        capped = torch.tanh(scores / softcap)
        scores, slope = softcap * capped, 1.0 - capped.square()
    weights = torch.softmax(scores.masked_fill(~visible, -math.inf), dim=-1)
    weights = weights.masked_fill(~visible.any(dim=-1, keepdim=True), 0.0)
    # Keys that nobody sees add nothing, whatever their V: 0 * NaN is NaN.
    values = v.masked_fill(~visible.any(dim=0).unsqueeze(-1), 0.0)
    dweights = dout @ values.T
    delta = (weights * dweights).sum(dim=-1, keepdim=True)
    if dlse is not None:
        delta = delta - dlse.masked_fill(~visible.any(dim=-1), 0.0).unsqueeze(-1)
    dscores = weights * (dweights - delta) * slope
    return scale * (dscores @ k), scale * (dscores.T @ q), weights.T @ dout


# ---- arithmetic of the rules ----------------------------------------------------------------------------


def depth(p: AttentionBackwardProblem) -> float:
    """That of the forward pass, three times: P and dS are rounded, out was, and gradients of keys differ in size.

    Where queries see few keys, gradients are what is left of terms that cancel; of one key, nothing is, and no
    tolerance follows from a result's size.
    """
    return 3 * forward_depth(p) * (1 + 16 * p.seq_q / max(1, p.pairs))


def registers_per_thread(p: AttentionBackwardProblem, c: AttentionBackwardConfig) -> int:
    """About what the compiler will need: sums, scores and their gradients, owned operands, and the rest."""
    width = padded(p.head_dim)
    sums = c.rows * width // 32 * len(p.of)
    scores = c.rows * c.tile_walked // 32 * (1 if p.of == "v" else 2)
    owned = c.rows * width // 64 * (1 if p.of == "v" else 2) if c.in_registers else 0
    late = LATE_REGISTERS if c.stages == 1 else 0
    return sums + scores + owned + c.rows + late + OTHER_REGISTERS


# Beside those and a register a row of the warp, for fragments: addresses, statistics. sm_90a, 2026-11-22: 16 rows by 32
# walked ones of head dim 192 (224 accumulators) compile into 255, with 32 bytes kept apart for what loops do not touch.
OTHER_REGISTERS = 15
# With one stage, a tile is fetched while all sums are alive. Of 466 configs that this leaves (causal, three GPUs from
# sm_89 to sm_120a) 382 keep nothing apart and one more than 32 bytes; of the 100 it prunes most do (2026-11-22).
LATE_REGISTERS = 17


@cache
def _every() -> tuple[AttentionBackwardConfig, ...]:
    return tuple(AttentionBackwardConfig.every())


@cache
def _default(op: AttentionBackward, p: AttentionBackwardProblem, gpu: GpuSpec) -> AttentionBackwardConfig:
    candidates = [c for c in _every() if op.why_not(p, c, gpu) is None]
    best = min(candidates, key=lambda c: (op.estimate_us(p, c, gpu), str(c)), default=None)
    assert best is not None, f"no config for {p} on {gpu.name}"
    return best
