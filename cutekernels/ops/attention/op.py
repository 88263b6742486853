"""Attention: the declaration. ``out = softmax(scale * q k^T + mask) v``; public function in ``attend.py``.

Operands are as the caller has them: q and out ``(B, SQ, HQ, D)``, k and v ``(B, SKV, HKV, D)``, or packed without the
batch, ``(TOTAL, H, D)``, with the sequences' ends in ``cu_seqlens``. Head dims are contiguous and rows 16-byte aligned.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from cutekernels.errors import UnsupportedProblem
from cutekernels.kernels.cute.parts.attention_smem import PrefillSmem, padded
from cutekernels.op import Config, Op, Problem, Work, extent, knob, ladder, plain, power_of_two
from cutekernels.ops.shared.occupancy import crowding

if TYPE_CHECKING:
    from cutekernels.backends import Artifact
    from cutekernels.gpu import GpuSpec

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
WIDEST = 8  # elements in 16 bytes
UNLIMITED = 2**30  # a window's side that reaches to the end
LOG2_E = math.log2(math.e)


@dataclass(frozen=True)
class AttentionProblem(Problem):
    """Extents, and what kernels are compiled for.

    Packed sequences (``varlen``) have lengths of their own; ``seq_q`` and ``seq_kv`` are then their means, rounded up.
    ``window`` says which of its sides limits, by ``window_left`` and ``window_right`` keys; ``causal`` limits the right
    side at the query's own key, where the last query is aligned with the last key.
    """

    batch: int = extent(ladder)
    seq_q: int = extent(ladder)
    seq_kv: int = extent(ladder)
    heads_q: int = extent()
    heads_kv: int = extent()
    window_left: int = extent(ladder, default=0)
    window_right: int = extent(ladder, default=0)
    head_dim: int = plain(128, *range(8, 128, 8), *range(136, 264, 8))
    dtype: str = plain("bf16", "fp16")
    causal: bool = plain(False, True)
    window: str = plain("none", "left", "right", "both")
    softcap: bool = plain(False, True)
    mask: bool = plain(False, True)
    varlen: bool = plain(False, True)
    lse: bool = plain(False, True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.heads_kv == 0 or self.heads_q % self.heads_kv:
            raise UnsupportedProblem(
                f"heads_q={self.heads_q} must be a multiple of heads_kv={self.heads_kv}: each K and V head serves a "
                "group of query heads"
            )
        if self.causal and self.window in ("right", "both"):
            raise UnsupportedProblem(f"causal=1 limits the right side already: window={self.window} must leave it out")
        for side in ("left", "right"):
            if getattr(self, f"window_{side}") and self.window not in (side, "both"):
                raise UnsupportedProblem(f"window_{side} needs window={side} or both; it is {self.window}")
        if self.mask and self.varlen:
            raise UnsupportedProblem("a mask is for a batch of one length: packed sequences take none")

    def bucket(self) -> AttentionProblem:
        """One tuning serves results with and without lse, and the head dims of one padded size."""
        return super().bucket().replace(lse=False, head_dim=padded(self.head_dim))

    @property
    def limited_left(self) -> bool:
        return self.window in ("left", "both")

    @property
    def limited_right(self) -> bool:
        return self.causal or self.window in ("right", "both")

    @property
    def pairs(self) -> int:
        """(query, key) pairs of one head and sequence that the band leaves."""
        shift = self.seq_kv - self.seq_q
        ends = _clipped_sum(self.seq_q, shift + self.window_right + 1, self.seq_kv) if self.limited_right else None
        begins = _clipped_sum(self.seq_q, shift - self.window_left, self.seq_kv) if self.limited_left else 0
        return max(0, (self.seq_q * self.seq_kv if ends is None else ends) - begins)


def _clipped_sum(rows: int, first: int, most: int) -> int:
    """``sum(min(max(first + r, 0), most) for r in range(rows))``."""

    def up_to(n: int) -> int:  # of clip(x, 0, most) for x < n
        if n <= 0:
            return 0
        rising = min(n, most)
        return rising * (rising - 1) // 2 + (n - rising) * most

    return up_to(first + rows) - up_to(first)


@dataclass(frozen=True)
class AttentionConfig(Config):
    """The knobs of ``kernels/cute/attention_prefill.py``.

    ``lazy`` rescales sums only where a block's scores exceed the row's reference by far. ``order`` is that of CTAs.
    """

    tile_q: int = knob(64, 128, 256)
    tile_kv: int = knob(32, 64, 128)
    warps: int = knob(4, 8)
    stages: int = knob(1, 2)
    ctas_per_sm: int = knob(1, 2, 3)
    q_in_registers: bool = knob(False, True)
    lazy: bool = knob(True, False)
    order: str = knob("rows", "l2", "heads")

    @property
    def threads(self) -> int:
        return 32 * self.warps

    @property
    def rows(self) -> int:
        """Queries of a warp."""
        return self.tile_q // self.warps

    def smem(self, p: AttentionProblem) -> PrefillSmem:
        return PrefillSmem(self.tile_q, self.tile_kv, p.head_dim, self.stages)


MAX_CTAS = 3
SLACK = 8.0  # of lazy rescaling, base 2: fp16 probabilities up to 256
# Registers beside accumulators and Q: fragments, row statistics, addresses. sm_90a, 2026-11-21: 32 rows by 64 keys of
# head dim 128 (192 accumulators) compile without spilling into 255 in bf16, and leave 104 bytes on the stack in fp16.
OTHER_REGISTERS = {"bf16": 56, "fp16": 64}

# The model's constants (see ``estimate_us``): guesses, to be fitted.
_LAUNCH_US = 2.0
_CTA_US = 2.75
_BLOCK_US = 0.17  # of a block of keys, whatever its size
_CLOCKS_PER_US = 1700
_SMEM_BYTES_PER_CLOCK = 128
_SOFTMAX = 0.35  # the share of the exponents' time that products do not hide
_ORDER = {False: {"rows": 1.0, "l2": 1.01, "heads": 1.02}, True: {"rows": 1.05, "l2": 1.05, "heads": 1.0}}
_FED = 0.83  # of the tensor cores' rate that a full SM of warps reaches


class Attention(Op[AttentionProblem, AttentionConfig]):
    """Arguments: q, k, v, mask or None, cu_seqlens_q or None, cu_seqlens_kv or None, scale, softcap (0: none).

    Results: out, and the rows' log-sum-exp in fp32 where ``lse``: ``(B, HQ, SQ)``, or ``(HQ, TOTAL_Q)`` of packed ones.
    """

    name = "attention"
    revision = 1
    most_stack_bytes = 0  # at the register limit all of it is spilled
    Problem = AttentionProblem
    Config = AttentionConfig
    suite = (
        "batch=4 seq_q=4096 seq_kv=4096 heads_q=16 heads_kv=16",
        "batch=4 seq_q=4096 seq_kv=4096 heads_q=16 heads_kv=16 causal=1",
        "batch=4 seq_q=2048 seq_kv=2048 heads_q=32 heads_kv=32 head_dim=64 causal=1",
        "batch=1 seq_q=1024 seq_kv=1024 heads_q=28 heads_kv=4 causal=1 lse=1",
        "batch=2 seq_q=300 seq_kv=777 heads_q=48 heads_kv=8 causal=1 window_left=200 window=left dtype=fp16",
        "batch=2 seq_q=257 seq_kv=257 heads_q=4 heads_kv=1 head_dim=80 window_left=30 window_right=9 window=both",
        "batch=2 seq_q=130 seq_kv=200 heads_q=6 heads_kv=3 head_dim=96 mask=1 dtype=fp16 lse=1",
        "batch=3 seq_q=200 seq_kv=200 heads_q=8 heads_kv=2 head_dim=256 causal=1 softcap=1",
        "batch=5 seq_q=150 seq_kv=150 heads_q=8 heads_kv=2 causal=1 varlen=1 lse=1",
    )

    # -- rules

    def why_not(self, p: AttentionProblem, c: AttentionConfig, gpu: GpuSpec) -> str | None:
        return next(self._broken(p, c, gpu), None)

    def _broken(self, p: AttentionProblem, c: AttentionConfig, gpu: GpuSpec) -> Iterator[str]:
        if c.rows not in (16, 32, 64):
            yield f"{c.warps} warps of tile_q={c.tile_q} have {c.rows} queries each: take 16, 32 or 64"
        across = c.threads // vectors_along(p.head_dim)
        for name, tile in (("q", c.tile_q), ("kv", c.tile_kv)):
            if tile % across:
                yield f"{c.threads} threads copy {across} rows at a time, which does not divide tile_{name}={tile}"
        if c.tile_q > max(64, power_of_two(p.seq_q)):
            yield f"tile_q={c.tile_q} idles most of a tile over {p.seq_q} queries"
        if c.tile_kv > max(32, power_of_two(p.seq_kv)):
            yield f"tile_kv={c.tile_kv} idles most of a tile over {p.seq_kv} keys"
        registers, smem = registers_per_thread(p, c), c.smem(p).total_bytes
        yield from crowding(gpu, ctas=c.ctas_per_sm, most=MAX_CTAS, warps=c.warps, registers=registers, smem=smem)
        if c.order != "rows" and p.seq_q <= c.tile_q:
            yield f"order={c.order} needs more than one tile of queries"

    # -- choice

    def default(self, p: AttentionProblem, gpu: GpuSpec) -> AttentionConfig:
        """The model's best."""
        return _default(self, p, gpu)

    def estimate_us(self, p: AttentionProblem, c: AttentionConfig, gpu: GpuSpec) -> float:
        """Waves of CTAs, each block of keys as slow as tensor cores or shared memory; or DRAM, if slower.

        Fitted to 59 runs of four shapes on an H200, from 64x64 to 256x64 tiles: 4.4 % off in the root mean square
        (2026-11-22).
        """
        tiles = -(-p.seq_q // c.tile_q) * p.heads_q * p.batch
        if tiles == 0 or p.seq_kv == 0:
            return _LAUNCH_US
        width = padded(p.head_dim)
        # Blocks of keys a tile of queries walks, on average: those its band touches; the ones at its edge cost more.
        keys = p.pairs / p.seq_q + (1.7 * c.tile_q if p.limited_left or p.limited_right else 0)
        blocks = max(1.0, min(keys, p.seq_kv) / c.tile_kv + 0.5)
        multiply = 4.0 * c.tile_q * c.tile_kv * width / (_FED * gpu.mma_tflops * 1e6 / gpu.sm_count)
        read = c.warps * (2 * c.tile_kv + (0 if c.q_in_registers else c.rows)) * width * 2
        feed = read / (_SMEM_BYTES_PER_CLOCK * _CLOCKS_PER_US)
        exponents = c.tile_q * c.tile_kv / (16 * _CLOCKS_PER_US) * (1.0 if c.lazy else 1.7)
        # One stage was 1 % faster where both were timed, and spills 32 bytes instead of none (bf16, head dim 128).
        overhead = _BLOCK_US * (1.0 if c.stages > 1 else 1.05)
        step = max(multiply, feed) + _SOFTMAX * exponents + overhead / c.ctas_per_sm
        cta = blocks * step + _CTA_US / c.ctas_per_sm
        per_sm = tiles / gpu.sm_count
        even = p.limited_right or per_sm > 8  # short CTAs last, or many: no wave is left half empty
        busy = cta * (max(1.0, per_sm) if even else math.ceil(per_sm))
        # Under a causal mask a heavy tile had better not be the last; without, K and V had better stay in the L2.
        busy *= _ORDER[p.limited_right][c.order]
        dram = self.work(p).bytes / (0.9 * gpu.dram_gbps * 1e3)
        return float(_LAUNCH_US + max(busy, dram) + 0.05 * min(busy, dram))

    # -- kernel

    def build(self, p: AttentionProblem, c: AttentionConfig, gpu: GpuSpec) -> Artifact:
        import cutlass

        from cutekernels.backends import cute as backend
        from cutekernels.ops.attention import fakes

        batch, seq_q, seq_kv, heads_q, heads_kv, ends = [cutlass.cute.sym_int() for _ in range(6)]

        def rows(seq: Any, heads: Any) -> Any:
            return fakes.rows(p.dtype, p.head_dim, *(() if p.varlen else (batch,)), seq, heads)

        mask = fakes.mask(batch, heads_q, seq_q, seq_kv) if p.mask else None
        number, limit = cutlass.Float32(1.0), cutlass.Int32(0)
        return backend.compile(
            self._body(p, c, gpu),
            rows(seq_q, heads_q),
            fakes.vector(cutlass.Float32) if p.lse else None,
            rows(seq_q, heads_q),
            rows(seq_kv, heads_kv),
            rows(seq_kv, heads_kv),
            mask,
            fakes.vector(cutlass.Int32, ends) if p.varlen else None,
            fakes.vector(cutlass.Int32, ends) if p.varlen else None,
            number,
            number,
            number,
            limit,
            limit,
            gpu=gpu,
        )

    def _body(self, p: AttentionProblem, c: AttentionConfig, gpu: GpuSpec) -> Any:
        """The prefill body with its parts."""
        import cutlass

        from cutekernels.kernels.cute.attention.prefill import HeadOrder, PrefillAttention
        from cutekernels.kernels.cute.parts.heads import HeadRows
        from cutekernels.kernels.cute.parts.mask import BandMask
        from cutekernels.kernels.cute.parts.mma import WarpMma
        from cutekernels.kernels.cute.parts.sequences import Sequences
        from cutekernels.kernels.cute.parts.softmax import OnlineSoftmax

        width = padded(p.head_dim)
        return PrefillAttention(
            rows_q=HeadRows(c.tile_q, p.head_dim, width, 1, c.threads),
            rows_kv=HeadRows(c.tile_kv, p.head_dim, width, c.stages, c.threads),
            mma_qk=WarpMma(c.warps, 1, cutlass.Float32, True, True),
            mma_pv=WarpMma(c.warps, 1, cutlass.Float32, True, False),
            mask=BandMask(c.tile_q, c.tile_kv, p.limited_left, p.limited_right, p.mask),
            softmax=OnlineSoftmax(SLACK if c.lazy else 0.0, p.softcap),
            order=HeadOrder(c.order, gpu.l2_bytes // 2),
            q_in_registers=c.q_in_registers,
            sequences=Sequences(p.varlen),
            ctas_per_sm=c.ctas_per_sm,
        )

    def bind(self, p: AttentionProblem, c: AttentionConfig, kernel: Callable[..., Any]) -> Callable[..., Any]:
        left = p.window_left if p.limited_left else UNLIMITED
        right = p.window_right if p.window in ("right", "both") else 0 if p.causal else UNLIMITED
        empty = p.seq_kv == 0

        def launch(*args: Any) -> None:
            out, lse = args[0], args[1] if p.lse else None
            q, k, v, mask, cu_q, cu_kv, scale, softcap = args[2 if p.lse else 1 :]
            if out.numel() == 0:
                return
            if empty:
                out.zero_()
                if lse is not None:
                    lse.fill_(-math.inf)
                return
            flat = None if lse is None else lse.view(-1)
            given = None if mask is None else mask.view(torch.uint8)
            kernel(out, flat, q, k, v, given, cu_q, cu_kv, *score_factors(scale, softcap), left, right)

        return launch

    # -- mathematics

    def outputs(self, p: AttentionProblem, *args: Any) -> tuple[Tensor, ...]:
        q = args[0]
        out = q.new_empty(q.shape)
        if not p.lse:
            return (out,)
        rows = (p.heads_q, q.shape[0]) if p.varlen else (p.batch, p.heads_q, p.seq_q)
        return out, q.new_empty(rows, dtype=torch.float32)

    def sample(self, p: AttentionProblem, device: str, seed: int) -> tuple[Any, ...]:
        generator = torch.Generator(device=device).manual_seed(seed)

        def rows(seq: int, heads: int) -> Tensor:
            shape = (p.batch * seq, heads, p.head_dim) if p.varlen else (p.batch, seq, heads, p.head_dim)
            t = torch.randn(shape, generator=generator, device=device, dtype=torch.float32)
            return t.to(DTYPES[p.dtype])

        q, k, v = rows(p.seq_q, p.heads_q), rows(p.seq_kv, p.heads_kv), rows(p.seq_kv, p.heads_kv)
        mask = None
        if p.mask:
            noise = torch.rand((p.batch, 1, p.seq_q, p.seq_kv), generator=generator, device=device)
            mask = (noise < 0.7).expand(-1, p.heads_q, -1, -1)
        cu_q = cu_kv = None
        if p.varlen:
            cu_q, cu_kv = (_ends(p.batch, seq, generator, device) for seq in (p.seq_q, p.seq_kv))
        return q, k, v, mask, cu_q, cu_kv, p.head_dim**-0.5, 2.0 if p.softcap else 0.0

    def reference(self, p: AttentionProblem, *args: Any) -> tuple[Tensor, ...]:
        out, lse = reference(
            *args,
            left=p.window_left if p.limited_left else None,
            right=0 if p.causal else p.window_right if p.limited_right else None,
        )
        return (out, lse) if p.lse else (out,)

    def work(self, p: AttentionProblem) -> Work:
        rows_q, rows_kv = p.batch * p.seq_q * p.heads_q, p.batch * p.seq_kv * p.heads_kv
        moved = 2 * (rows_q + rows_kv) * p.head_dim * 2
        if p.mask:
            moved += p.batch * p.seq_q * p.seq_kv
        flops = 4.0 * p.batch * p.heads_q * p.pairs * p.head_dim
        return Work(flops=flops, bytes=float(moved + (4 * rows_q if p.lse else 0)), depth=depth(p))


ATTENTION = Attention()


def reference(
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
) -> tuple[Tensor, Tensor]:
    """The same mathematics in plain PyTorch, in fp64, rounded once: ``(out, lse)``; a head of a sequence at a time."""
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    group = q.shape[-2] // max(1, k.shape[-2])
    kind = torch.promote_types(q.dtype, torch.float32)
    if cu_seqlens_q is None or cu_seqlens_kv is None:
        lse = q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=kind)
        sequences = [(q[b], k[b], v[b], out[b], lse[b], None if mask is None else mask[b]) for b in range(q.shape[0])]
    else:
        lse = q.new_empty((q.shape[1], q.shape[0]), dtype=kind)
        at_q, at_kv = cu_seqlens_q.tolist(), cu_seqlens_kv.tolist()
        sequences = []
        for i in range(len(at_q) - 1):
            of_q, of_kv = slice(at_q[i], at_q[i + 1]), slice(at_kv[i], at_kv[i + 1])
            sequences.append((q[of_q], k[of_kv], v[of_kv], out[of_q], lse[:, of_q], None))
    for q1, k1, v1, out1, lse1, mask1 in sequences:
        seen = band(q1.shape[0], k1.shape[0], left, right, q.device)
        for h in range(q1.shape[1]):
            scores = scale * (q1[:, h].double() @ k1[:, h // group].double().T)
            if softcap:
                scores = softcap * torch.tanh(scores / softcap)
            visible = seen if mask1 is None else seen & mask1[h]
            scores = scores.masked_fill(~visible, -math.inf)
            lse1[h] = torch.logsumexp(scores, dim=-1)
            weights = torch.softmax(scores, dim=-1).masked_fill(~visible.any(dim=-1, keepdim=True), 0.0)
            # Keys that nobody sees add nothing, whatever their V: 0 * NaN is NaN.
            values = v1[:, h // group].double().masked_fill(~visible.any(dim=0).unsqueeze(-1), 0.0)
            out1[:, h] = (weights @ values).to(out.dtype)
    return out, lse


def band(seq_q: int, seq_kv: int, left: int | None, right: int | None, device: torch.device) -> Tensor:
    """Which keys a query sees, ``(seq_q, seq_kv)``; the last query is aligned with the last key, None is no limit."""
    ahead = torch.arange(seq_kv, device=device) - torch.arange(seq_q, device=device).unsqueeze(-1) - (seq_kv - seq_q)
    seen = torch.ones_like(ahead, dtype=torch.bool)
    if left is not None:
        seen &= ahead >= -left
    if right is not None:
        seen &= ahead <= right
    return seen


# ---- arithmetic of the rules ----------------------------------------------------------------------------


def score_factors(scale: float, softcap: float) -> tuple[float, float, float]:
    """What kernels multiply scores by, to base 2, and the two factors of a cap (0: none) that leave them so."""
    if not softcap:
        return scale * LOG2_E, 0.0, 0.0
    return 1.0, 2 * LOG2_E * scale / softcap, softcap * LOG2_E


def vectors_along(head_dim: int) -> int:
    """Threads side by side in a row: the 16-byte vectors of a swizzle pattern."""
    return 8 if padded(head_dim) % 64 == 0 else 4


def registers_per_thread(p: AttentionProblem, c: AttentionConfig) -> int:
    """About what the compiler will need: accumulators of both products, queries, and the rest."""
    width = padded(p.head_dim)
    accumulators = c.rows * (width + c.tile_kv) // 32
    queries = c.rows * width // 64 if c.q_in_registers else 0
    return accumulators + queries + OTHER_REGISTERS[p.dtype]


def depth(p: AttentionProblem) -> float:
    """What sums of this depth lose in fp32, probabilities rounded to 16 bits make ours lose: six standard deviations,
    which one element in 5e8 exceeds.

    A row's error is ``u * sqrt(sum (p v)^2)``, about ``u`` of the row's own typical result. Rows that see few keys have
    results larger than the whole output's typical one, by the root of how many fewer.
    """
    # Relative error of rounding, for numbers spread evenly over an octave: 0.735 eps / sqrt(12).
    deviation = 0.735 * {"bf16": 2.0**-7, "fp16": 2.0**-10}[p.dtype] / math.sqrt(12)
    keys = p.pairs / max(1, p.seq_q)
    uneven = p.limited_left or p.limited_right or p.mask or p.varlen
    larger = math.sqrt(max(1.0, keys)) if uneven else 1.0
    return max(keys, 8 * 2.0**23 * 6 * deviation * larger)


def _ends(sequences: int, mean: int, generator: torch.Generator, device: str) -> Tensor:
    """Ends of ``sequences`` random lengths whose mean is ``mean``, from 0: ``(sequences + 1,)``."""
    total = sequences * mean
    cuts = torch.randint(0, total + 1, (max(0, sequences - 1),), generator=generator, device=device)
    edges = [torch.zeros(1, device=device), cuts.sort().values, torch.full((1,), total, device=device)]
    return torch.cat(edges if sequences else edges[:1]).to(torch.int32)


@cache
def _every() -> tuple[AttentionConfig, ...]:
    return tuple(AttentionConfig.every())


@cache
def _default(op: Attention, p: AttentionProblem, gpu: GpuSpec) -> AttentionConfig:
    candidates = [c for c in _every() if op.why_not(p, c, gpu) is None]
    best = min(candidates, key=lambda c: (op.estimate_us(p, c, gpu), str(c)), default=None)
    assert best is not None, f"no config for {p} on {gpu.name}"
    return best
