"""Triton's fused MoE as serving engines configure it: problem, space, inputs, reference. A subclass calls a kernel.

The kernel multiplies blocks of ``BLOCK_SIZE_M`` (token, expert) pairs, sorted by expert and padded, with an expert's
gate and up projections, applies SwiGLU, multiplies with its down projection, and sums each token's experts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cutekernels.errors import CompileError, UnsupportedProblem
from cutekernels.gpu import GpuSpec
from cutekernels.guests import Guest
from cutekernels.guests.roundings import BLOCKS, depth_of, dequantized, quantized
from cutekernels.op import Config, Problem, Work, extent, knob, plain, power_of_two

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class FusedMoeProblem(Problem):
    """A layer's experts on ``m`` tokens.

    ``n`` is an expert's intermediate size behind SwiGLU, ``k`` the hidden size: of one GPU's share, where a layer is
    split. ``block_n`` and ``block_k`` are the weights' scale blocks of ``fp8_w8a8``.
    """

    m: int = extent()
    experts: int = extent()
    n: int = extent()
    k: int = extent()
    top_k: int = extent()
    dtype: str = plain("bf16", "fp16", "fp8_w8a8")
    block_n: int = plain(*BLOCKS)
    block_k: int = plain(*BLOCKS)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.top_k <= self.experts:
            raise UnsupportedProblem(f"top_k is from 1 to the number of experts, {self.experts}; it is {self.top_k}")
        if not min(self.m, self.n, self.k):
            raise UnsupportedProblem(f"m, n and k are at least 1; they are {self.m}, {self.n} and {self.k}")
        if {self.dtype == "fp8_w8a8"} != {bool(self.block_n), bool(self.block_k)}:
            raise UnsupportedProblem(
                f"dtype=fp8_w8a8 comes with block_n and block_k, the extents of a scale's block, no other dtype does; "
                f"got dtype={self.dtype} block_n={self.block_n} block_k={self.block_k}"
            )
        if self.block_k and (self.n % self.block_k or self.k % self.block_k):
            raise UnsupportedProblem(
                f"n and k are whole blocks of block_k={self.block_k}, which scale tokens; "
                f"they are {self.n} and {self.k}"
            )

    @property
    def itemsize(self) -> int:
        return 1 if self.dtype == "fp8_w8a8" else 2

    @property
    def pairs(self) -> int:
        """(token, expert) pairs."""
        return self.m * self.top_k

    @property
    def hit(self) -> float:
        """Experts with a token, in expectation: a token's experts are different ones, drawn evenly."""
        return self.experts * (1 - (1 - self.top_k / max(1, self.experts)) ** self.m)

    @property
    def mean_rows(self) -> float:
        """Pairs of an expert that is hit."""
        return self.pairs / max(1.0, self.hit)


@dataclass(frozen=True)
class FusedMoeConfig(Config):
    """The keys of an entry in vLLM's and SGLang's tables."""

    BLOCK_SIZE_M: int = knob(16, 32, 64, 128, 256)
    BLOCK_SIZE_N: int = knob(32, 64, 128, 256)
    BLOCK_SIZE_K: int = knob(32, 64, 128, 256)
    GROUP_SIZE_M: int = knob(1, 8, 16, 32, 64)
    num_warps: int = knob(4, 8)
    num_stages: int = knob(2, 3, 4, 5)

    def as_dict(self) -> dict[str, Any]:
        """As the engines' functions take it."""
        return {name: getattr(self, name) for name in self.space()}

    @contextmanager
    def handed(self) -> Iterator[dict[str, Any]]:
        """:meth:`as_dict` for an engine's call. Raises CompileError where the call left it unread: another one ran."""
        config = _Handed(self.as_dict())
        yield config
        if not config.read:
            raise CompileError(f"the engine did not read the config [{self}]: this version takes it in another place")


class _Handed(dict[str, Any]):
    """A dict that knows whether it was read."""

    read = False

    def __getitem__(self, key: str) -> Any:
        self.read = True
        return super().__getitem__(key)

    def __iter__(self) -> Iterator[str]:  # ``**config`` and dict(config) too, which then go by keys
        self.read = True
        return super().__iter__()

    def copy(self) -> dict[str, Any]:
        return dict(self)


class FusedMoe(Guest[FusedMoeProblem, FusedMoeConfig]):
    """``out[t] = sum_j weights[t, j] * down_e(silu(gate_e(x[t])) * up_e(x[t]))`` with ``e = ids[t, j]``.

    ``sample`` gives ``x (m, k)``, ``w1 (experts, 2 n, k)`` with gate's rows before up's, ``w2 (experts, k, n)``,
    ``weights (m, top_k)`` in fp32, ``ids (m, top_k)`` in int32, and the scales of w1 and w2, None unless fp8.
    """

    revision = 1
    suite = (
        "m=1 experts=128 n=768 k=2048 top_k=8",
        "m=4096 experts=128 n=768 k=2048 top_k=8",
        "m=64 experts=256 n=256 k=7168 top_k=8 dtype=fp8_w8a8 block_n=128 block_k=128",
    )
    Problem = FusedMoeProblem
    Config = FusedMoeConfig

    def why_not(self, p: FusedMoeProblem, c: FusedMoeConfig, gpu: GpuSpec) -> str | None:
        if c == self.default(p, gpu):
            return None
        if p.block_k and p.block_k % c.BLOCK_SIZE_K:
            return f"a step of k has one scale: BLOCK_SIZE_K={c.BLOCK_SIZE_K} must divide block_k={p.block_k}"
        most_rows = max(16, power_of_two(math.ceil(4 * p.mean_rows)))
        if most_rows < c.BLOCK_SIZE_M:
            return f"BLOCK_SIZE_M={c.BLOCK_SIZE_M} is mostly padding where an expert has {p.mean_rows:.1f} rows"
        if max(1, power_of_two(math.ceil(self._blocks(p, c)))) < c.GROUP_SIZE_M:
            return f"GROUP_SIZE_M={c.GROUP_SIZE_M} exceeds the {self._blocks(p, c):.0f} blocks of rows there are"
        accumulators = c.BLOCK_SIZE_M * c.BLOCK_SIZE_N // (32 * c.num_warps)
        if accumulators >= gpu.MAX_REGISTERS_PER_THREAD:
            return f"{accumulators} accumulators a thread leave no register of {gpu.MAX_REGISTERS_PER_THREAD}"
        stage = (c.BLOCK_SIZE_M + c.BLOCK_SIZE_N) * c.BLOCK_SIZE_K * p.itemsize
        if (c.num_stages - 1) * stage > gpu.smem_per_block_bytes:  # Triton may keep one stage in registers
            return f"{c.num_stages} stages of {stage} B exceed {gpu.smem_per_block_bytes} B of shared memory"
        return None

    def default(self, p: FusedMoeProblem, gpu: GpuSpec) -> FusedMoeConfig:
        """What SGLang runs where it finds no table."""
        if p.block_k:
            return FusedMoeConfig(64, p.block_n, p.block_k, 32, 4, 3)
        if p.m <= p.experts:
            return FusedMoeConfig(16, 32, 64, 1, 4, 3)
        return FusedMoeConfig(64, 64, 32, 8, 4, 3)

    def _blocks(self, p: FusedMoeProblem, c: FusedMoeConfig) -> float:
        """Blocks of rows, in expectation: the last of each expert is half padding."""
        rows = p.mean_rows / c.BLOCK_SIZE_M
        return p.hit * max(1.0, rows + (0.5 if rows > 0.5 else 0.0))

    def estimate_us(self, p: FusedMoeProblem, c: FusedMoeConfig, gpu: GpuSpec) -> float:
        """A coarse model that orders the first candidates: padded arithmetic, traffic of the L2, waves of blocks."""
        blocks, size = self._blocks(p, c), p.itemsize
        flops = 6.0 * blocks * c.BLOCK_SIZE_M * p.n * p.k
        share = 0.7 * min(1.0, c.BLOCK_SIZE_M / 64) ** 0.5 * min(1.0, c.BLOCK_SIZE_N / 128) ** 0.5  # of the peak
        columns = 2 * p.n / c.BLOCK_SIZE_N + p.k / c.BLOCK_SIZE_N
        l2 = blocks * size * (3.0 * p.n * p.k + c.BLOCK_SIZE_M * columns * (p.k + p.n) / 2)
        resident = blocks * columns / 2 / gpu.sm_count  # blocks of one product, per SM
        waves = math.ceil(resident) / resident if resident > 1 else 1.0
        in_flight = (c.num_stages - 1) * (c.BLOCK_SIZE_M + c.BLOCK_SIZE_N) * c.BLOCK_SIZE_K * size
        hidden = min(1.0, in_flight / 48e3) ** 0.25  # of the latency of memory
        moved = max(self.work(p).bytes / (gpu.dram_gbps * 1e3), l2 / (2.5 * gpu.dram_gbps * 1e3)) / hidden
        return float(waves * max(flops / (share * gpu.peak_tflops * 1e6), moved))

    def sample(self, p: FusedMoeProblem, device: str, seed: int) -> tuple[Any, ...]:
        import torch

        draw = torch.Generator(device).manual_seed(seed)
        dtype = torch.float16 if p.dtype == "fp16" else torch.bfloat16
        w1 = torch.randn((p.experts, 2 * p.n, p.k), generator=draw, device=device, dtype=dtype).mul_(p.k**-0.5)
        w2 = torch.randn((p.experts, p.k, p.n), generator=draw, device=device, dtype=dtype).mul_(p.n**-0.5)
        s1 = s2 = None
        if p.block_k:
            (w1, s1), (w2, s2) = quantized(w1, p.block_n, p.block_k), quantized(w2, p.block_n, p.block_k)
        x, weights, ids = self._tokens(p, device, draw, dtype)
        return x, w1, w2, weights, ids, s1, s2

    def variant(self, p: FusedMoeProblem, args: tuple[Any, ...], seed: int) -> tuple[Any, ...]:
        """Other tokens on the same weights, of which few tokens read few experts'."""
        import torch

        x, w1, w2, _, _, s1, s2 = args
        x, weights, ids = self._tokens(p, x.device, torch.Generator(x.device).manual_seed(seed), x.dtype)
        return x, w1, w2, weights, ids, s1, s2

    @staticmethod
    def _tokens(p: FusedMoeProblem, device: Any, draw: Any, dtype: Any) -> tuple[Tensor, Tensor, Tensor]:
        import torch

        x = torch.randn((p.m, p.k), generator=draw, device=device, dtype=dtype)
        scores = torch.rand((p.m, p.experts), generator=draw, device=device)
        weights, ids = scores.softmax(-1).topk(p.top_k, dim=-1)
        return x, weights / weights.sum(-1, keepdim=True), ids.int()

    def outputs(self, p: FusedMoeProblem, *args: Any) -> tuple[Tensor, ...]:
        import torch

        return (torch.empty_like(args[0]),)

    def reference(self, p: FusedMoeProblem, *args: Any) -> tuple[Tensor, ...]:
        """In fp32, rounded once; the kernel's own roundings are the judge's tolerance (:meth:`work`)."""
        import torch
        import torch.nn.functional as F

        x, w1, w2, weights, ids, s1, s2 = args
        out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        for e in ids.unique().tolist():
            token, slot = torch.where(ids == e)
            gate, up = F.linear(x[token].float(), dequantized(w1, s1, e, p.block_n, p.block_k)).chunk(2, -1)
            y = F.linear(F.silu(gate) * up, dequantized(w2, s2, e, p.block_n, p.block_k))
            out.index_add_(0, token, weights[token, slot, None] * y)
        return (out.to(x.dtype),)

    def work(self, p: FusedMoeProblem) -> Work:
        """The depth stands for what is rounded: gate, up, their product, each expert's result; for fp8 twice more."""
        moved = p.hit * 3 * p.n * p.k * p.itemsize + 4.0 * p.m * p.k
        roundings = {"fp8": 2, "bf16": 4} if p.block_k else {p.dtype: 4}
        return Work(6.0 * p.pairs * p.n * p.k, moved, depth=max(float(p.k), depth_of(roundings)))
