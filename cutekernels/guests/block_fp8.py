"""Triton's block FP8 product as serving engines configure it: problem, space, inputs, reference."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar
from unittest.mock import patch

from cutekernels.errors import UnsupportedProblem
from cutekernels.gpu import GpuSpec
from cutekernels.guests import Guest
from cutekernels.guests.fused_moe import FusedMoeConfig
from cutekernels.guests.roundings import BLOCKS, depth_of, dequantized, quantized
from cutekernels.op import Problem, Work, extent, plain, power_of_two

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class BlockFp8Problem(Problem):
    """``m`` tokens times a weight ``(n, k)`` in e4m3, with scales of its blocks and of each ``block_k`` of a token."""

    m: int = extent()
    n: int = extent()
    k: int = extent()
    dtype: str = plain("fp8_w8a8")
    block_n: int = plain(*BLOCKS[1:])
    block_k: int = plain(*BLOCKS[1:])

    def __post_init__(self) -> None:
        super().__post_init__()
        if not min(self.m, self.n, self.k):
            raise UnsupportedProblem(f"m, n and k are at least 1; they are {self.m}, {self.n} and {self.k}")
        if self.k % self.block_k:
            raise UnsupportedProblem(f"k is whole blocks of block_k={self.block_k}, which scale tokens; it is {self.k}")


class BlockFp8Linear(Guest[BlockFp8Problem, FusedMoeConfig]):
    """``out[t, j] = sum_i x[t, i] sx[t, i // block_k] * w[j, i] sw[j // block_n, i // block_k]``, in bf16.

    ``sample`` gives ``x``, ``w``, ``sx`` and ``sw``. The engines' products take their config from a table alone: here
    from one of one entry.
    """

    product: ClassVar[str]
    """The engine's module that has the product."""
    renamed: ClassVar[str]
    """The name of the product in newer versions; ``w8a8_block_fp8_matmul`` in others."""
    revision = 1
    suite = ("m=1 n=4096 k=7168", "m=1024 n=4096 k=7168")
    Problem = BlockFp8Problem
    Config = FusedMoeConfig

    def why_not(self, p: BlockFp8Problem, c: FusedMoeConfig, gpu: GpuSpec) -> str | None:
        if c == self.default(p, gpu):
            return None
        if p.block_k % c.BLOCK_SIZE_K:
            return f"a step of k has one scale: BLOCK_SIZE_K={c.BLOCK_SIZE_K} must divide block_k={p.block_k}"
        if max(16, power_of_two(2 * p.m)) < c.BLOCK_SIZE_M:
            return f"BLOCK_SIZE_M={c.BLOCK_SIZE_M} is mostly padding for m={p.m}"
        if max(1, power_of_two(-(-p.m // c.BLOCK_SIZE_M))) < c.GROUP_SIZE_M:
            return f"GROUP_SIZE_M={c.GROUP_SIZE_M} exceeds the {-(-p.m // c.BLOCK_SIZE_M)} blocks of rows there are"
        accumulators = c.BLOCK_SIZE_M * c.BLOCK_SIZE_N // (32 * c.num_warps)
        if 2 * accumulators >= gpu.MAX_REGISTERS_PER_THREAD:  # of a step, and of all steps with their scales
            return f"2 x {accumulators} accumulators a thread leave no register of {gpu.MAX_REGISTERS_PER_THREAD}"
        stage = (c.BLOCK_SIZE_M + c.BLOCK_SIZE_N) * c.BLOCK_SIZE_K
        if (c.num_stages - 1) * stage > gpu.smem_per_block_bytes:
            return f"{c.num_stages} stages of {stage} B exceed {gpu.smem_per_block_bytes} B of shared memory"
        return None

    def default(self, p: BlockFp8Problem, gpu: GpuSpec) -> FusedMoeConfig:
        """What vLLM runs where it finds no table."""
        return FusedMoeConfig(64, p.block_n, p.block_k, 32, 4, 2)

    def sample(self, p: BlockFp8Problem, device: str, seed: int) -> tuple[Any, ...]:
        import torch

        draw = torch.Generator(device).manual_seed(seed)
        x, sx = quantized(torch.randn((p.m, p.k), generator=draw, device=device), 1, p.block_k)
        w, sw = quantized(torch.randn((p.n, p.k), generator=draw, device=device).mul_(p.k**-0.5), p.block_n, p.block_k)
        return x, w, sx, sw

    def outputs(self, p: BlockFp8Problem, *args: Any) -> tuple[Tensor, ...]:
        import torch

        return (torch.empty((p.m, p.n), dtype=torch.bfloat16, device=args[0].device),)

    def reference(self, p: BlockFp8Problem, *args: Any) -> tuple[Tensor, ...]:
        x, w, sx, sw = args
        wide = dequantized(w, sw, None, p.block_n, p.block_k).double()
        return ((dequantized(x, sx, None, 1, p.block_k).double() @ wide.T).bfloat16(),)

    def work(self, p: BlockFp8Problem) -> Work:
        """The depth stands for sums of fp8 in tensor cores, of some 13 bits: like one rounding of each term to fp16."""
        return Work(2.0 * p.m * p.n * p.k, float(p.m * p.k + p.n * p.k + 2 * p.m * p.n), depth=depth_of({"fp16": 1}))

    def begin(self) -> None:
        import_module(self.product)

    def call(self, p: BlockFp8Problem, c: FusedMoeConfig, *tensors: Any) -> None:
        import torch

        module = import_module(self.product)
        out, x, w, sx, sw = tensors
        multiply = getattr(module, self.renamed, None) or module.w8a8_block_fp8_matmul
        with c.handed() as config, patch.object(module, "get_w8a8_block_fp8_configs", lambda *shape: {p.m: config}):
            out.copy_(multiply(x, w, sx, sw, [p.block_n, p.block_k], torch.bfloat16))
