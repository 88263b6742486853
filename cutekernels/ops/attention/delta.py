"""``attention_delta``: the row statistics that come before attention's gradients; called by ``attend_backward.py``."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from cutekernels import rates
from cutekernels.errors import UnsupportedProblem
from cutekernels.op import Config, Problem, Work, extent, knob, ladder, plain, power_of_two
from cutekernels.ops.attention.problem import DTYPES, LOG2_E, WIDEST
from cutekernels.ops.shared.tensor_op import Launch, TensorOp

if TYPE_CHECKING:
    from cutekernels.backends import Artifact
    from cutekernels.gpu import GpuSpec

_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_MAX_ELEMENTS = 64  # of out and of dout, a thread
_MOST_PROGRAMS = 2**31 - 1


@dataclass(frozen=True)
class DeltaProblem(Problem):
    """``batch`` sequences of ``seq`` queries (packed sequences are one), whose rows are 16-byte aligned.

    ``dlse``: whether the log-sum-exp has a gradient of its own.
    """

    batch: int = extent(ladder)
    seq: int = extent(ladder)
    heads: int = extent()
    head_dim: int = plain(128, *range(8, 128, 8), *range(136, 264, 8))
    dtype: str = plain("bf16", "fp16")
    dlse: bool = plain(False, True)

    @property
    def rows(self) -> int:
        return self.batch * self.seq * self.heads


@dataclass(frozen=True)
class DeltaConfig(Config):
    """A program takes ``block_rows`` queries of one head."""

    block_rows: int = knob(4, 8, 16, 32, 64, 128)
    warps: int = knob(1, 2, 4, 8)


class AttentionDelta(TensorOp[DeltaProblem, DeltaConfig]):
    """``(2, rows)`` in fp32: each query's lse to base 2 (inf for -inf), and ``sum(out * dout) - dlse``.

    Arguments: out and dout ``(B, S, H, D)``, lse and dlse or None ``(B, H, S)`` in fp32; without B where packed.
    """

    name = "attention_delta"
    revision = 1
    Problem = DeltaProblem
    Config = DeltaConfig
    suite = (
        "batch=1 seq=1 heads=1",
        "batch=2 seq=300 heads=5 head_dim=80 dtype=fp16",
        "batch=3 seq=77 heads=2 head_dim=256 dlse=1",
        "batch=4 seq=2048 heads=32 head_dim=64",
        "batch=4 seq=4096 heads=16",
    )
    results = ("stats",)
    inputs = ("out", "dout", "lse", "dlse")
    schema = "Tensor out, Tensor dout, Tensor lse, Tensor? dlse"
    in_place = False
    flattens = False

    # -- calls

    def takes(self, name: str, t: Tensor) -> bool:
        if name not in ("out", "dout"):
            return t.is_contiguous()
        steps = [s for n, s in zip(t.shape[:-1], t.stride()[:-1], strict=True) if n != 1]
        return t.stride(-1) == 1 and all(s % WIDEST == 0 for s in steps) and t.data_ptr() % 16 == 0

    def admit(self, inputs: Sequence[Tensor | None], results: Sequence[Tensor] = (), **options: Any) -> None:
        out, dout, lse, dlse = inputs
        assert out is not None and dout is not None and lse is not None
        if out.dim() not in (3, 4) or out.shape != dout.shape or out.dtype not in _NAMES or dout.dtype != out.dtype:
            raise UnsupportedProblem(
                f"out and dout are (B, S, H, D) or (TOTAL, H, D) of one shape, fp16 or bf16; they are "
                f"{tuple(out.shape)} {out.dtype} and {tuple(dout.shape)} {dout.dtype}"
            )
        rows = (*out.shape[:-3], out.shape[-2], out.shape[-3])
        for name, t in (("lse", lse), ("dlse", dlse)):
            if t is not None and (tuple(t.shape) != rows or t.dtype != torch.float32):
                raise UnsupportedProblem(f"{name} must be {rows}, fp32; it is {tuple(t.shape)}, {t.dtype}")
        if any(t is not None and t.device != out.device for t in inputs):
            raise UnsupportedProblem(f"out, dout, lse and dlse must be on one device; out is on {out.device}")
        for t in results:
            if tuple(t.shape) != (2, lse.numel()) or t.dtype != torch.float32 or not t.is_contiguous():
                raise UnsupportedProblem(f"stats must be {(2, lse.numel())}, contiguous, fp32; it is {tuple(t.shape)}")

    def fresh(self, *inputs: Tensor | None, **options: Any) -> tuple[Tensor, ...]:
        lse = inputs[2]
        assert lse is not None
        return (lse.new_empty((2, lse.numel())),)

    def problem(self, *operands: Tensor | None, **options: Any) -> DeltaProblem:
        _, out, _, _, dlse = operands
        assert out is not None
        batch = out.shape[0] if out.dim() == 4 else 1
        seq, heads, head_dim = out.shape[-3:]
        return DeltaProblem(batch, seq, heads, head_dim, _NAMES[out.dtype], dlse is not None)

    def evaluate(self, *args: Any, **options: Any) -> tuple[Tensor, ...]:
        out, dout, lse, dlse = args
        delta = (out.double() * dout.double()).sum(-1).transpose(-1, -2)
        if dlse is not None:
            delta = delta - dlse.double()
        blind = lse == -math.inf
        stats = [(lse.double() * LOG2_E).masked_fill(blind, math.inf), delta.masked_fill(blind, 0.0)]
        return (torch.stack([t.flatten() for t in stats]).float(),)

    # -- configs

    def why_not(self, p: DeltaProblem, c: DeltaConfig, gpu: GpuSpec) -> str | None:
        per_thread = c.block_rows * power_of_two(p.head_dim) // (32 * c.warps)
        if not WIDEST <= per_thread <= _MAX_ELEMENTS:
            return f"a thread has {per_thread} elements of a row's {p.head_dim}: take from {WIDEST} to {_MAX_ELEMENTS}"
        if c.block_rows > max(64, power_of_two(p.seq)):
            return f"block_rows={c.block_rows} idles most of a tile over {p.seq} queries"
        if self.grid(p, c)[0] > _MOST_PROGRAMS:
            return f"{self.grid(p, c)[0]} programs are more than a grid's {_MOST_PROGRAMS}: take larger blocks"
        return None

    def default(self, p: DeltaProblem, gpu: GpuSpec) -> DeltaConfig:
        """Two accesses a thread of 4 warps."""
        rows = 32 * 4 * 2 * WIDEST // power_of_two(p.head_dim)
        return DeltaConfig(min(rows, 64), 4 if rows <= 64 else 2 if rows <= 128 else 1)

    def estimate_us(self, p: DeltaProblem, c: DeltaConfig, gpu: GpuSpec) -> float:
        """The bytes, stretched where threads have few in flight."""
        in_flight = c.block_rows * power_of_two(p.head_dim) / (32 * c.warps)
        return rates.of(gpu).launch_us + self.work(p).bytes / (gpu.dram_gbps * 1e3) * (1.0 + 1.6 / in_flight)

    def grid(self, p: DeltaProblem, c: DeltaConfig) -> tuple[int, int, int]:
        return p.batch * p.heads * -(-p.seq // c.block_rows), 1, 1

    def build(self, p: DeltaProblem, c: DeltaConfig, gpu: GpuSpec) -> Artifact:
        from cutekernels.backends.triton import compile_kernel
        from cutekernels.kernels.triton.attention import delta as kernels

        constants: dict[str, int | bool | str | float] = {
            "HEAD_DIM": p.head_dim,
            "DLSE": p.dlse,
            "BLOCK_ROWS": c.block_rows,
            "BLOCK_COLS": power_of_two(p.head_dim),
        }
        steps = [f"{name}_{step}" for name in ("out", "dout") for step in ("batch", "row", "head")]
        signature = {f"{name}_ptr": "*fp32" for name in ("stats", "out", "dout", "lse", "dlse")}
        signature |= dict.fromkeys(("out_ptr", "dout_ptr"), f"*{p.dtype}")
        signature |= {"seq": "i32", "heads": "i32", "rows": "i64"} | dict.fromkeys(steps, "i64")
        if not p.dlse:
            constants["dlse_ptr"] = 0
        return compile_kernel(
            kernels.attention_delta,
            signature=signature | dict.fromkeys(constants, "constexpr"),
            constexprs=constants,
            divisible={"out_ptr": 16, "dout_ptr": 16} | dict.fromkeys(steps, WIDEST),
            options={"num_warps": c.warps},
            gpu=gpu,
        )

    def bind(self, p: DeltaProblem, c: DeltaConfig, kernel: Callable[..., Any]) -> Callable[..., None]:
        def steps(t: Tensor) -> list[int]:
            """Between sequences, queries and heads; 0 where there is one."""
            found = [s if n != 1 else 0 for n, s in zip(t.shape[:-1], t.stride()[:-1], strict=True)]
            return found if t.dim() == 4 else [0, *found]

        def numbers(stats: Tensor, out: Tensor, dout: Tensor, *rest: Tensor | None) -> tuple[int, ...]:
            return (p.seq, p.heads, stats.shape[1], *steps(out), *steps(dout))

        grid = self.grid(p, c)
        return Launch(kernel, grid, 5, numbers) if grid[0] else lambda *operands: None

    # -- mathematics

    def outputs(self, p: DeltaProblem, *args: Any) -> tuple[Tensor, ...]:
        return self.fresh(*args)

    def sample(self, p: DeltaProblem, device: str, seed: int) -> tuple[Any, ...]:
        generator = torch.Generator(device).manual_seed(seed)
        shape, rows = (p.batch, p.seq, p.heads, p.head_dim), (p.batch, p.heads, p.seq)
        out, dout = (torch.randn(shape, generator=generator, device=device).to(DTYPES[p.dtype]) for _ in range(2))
        lse, dlse = (torch.randn(rows, generator=generator, device=device) for _ in range(2))
        return out, dout, lse, dlse if p.dlse else None

    def work(self, p: DeltaProblem) -> Work:
        moved = p.rows * (4 * p.head_dim + 12 + 4 * p.dlse)
        # lse and delta are judged together; a delta is a sum that cancels, of terms as large as its typical size.
        return Work(flops=2.0 * p.rows * p.head_dim, bytes=float(moved), depth=float(max(64, p.head_dim)))


ATTENTION_DELTA = AttentionDelta()
