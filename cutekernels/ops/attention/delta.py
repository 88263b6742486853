"""``attention_delta``: the row statistics that attention's gradients start from; called by ``gradient.py``."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from cutekernels import rates
from cutekernels.errors import UnsupportedProblem
from cutekernels.op import Problem, Work, extent, knob, ladder, plain, power_of_two
from cutekernels.ops.attention.coefficients import FEW
from cutekernels.ops.attention.problem import HEAD_DIMS, LOG2_E, WIDEST, WarpsConfig
from cutekernels.ops.shared.dtypes import DTYPES
from cutekernels.ops.shared.operands import Array, Matrix, Named, Sizes
from cutekernels.ops.shared.tile_rules import idle_rule
from cutekernels.ops.shared.triton_op import TritonOp
from cutekernels.rules import of_both

if TYPE_CHECKING:
    from torch import Tensor

    from cutekernels.gpu import GpuSpec

_MAX_ELEMENTS = 64  # elements of out, and of dout, per thread
_MOST_PROGRAMS = 2**31 - 1


@dataclass(frozen=True)
class DeltaProblem(Problem):
    """``batch`` sequences of ``seq`` queries (varlen sequences are one), whose rows are 16-byte aligned.

    ``dlse``: whether the log-sum-exp has a gradient of its own.
    """

    batch: int = extent(ladder)
    seq: int = extent(ladder)
    heads: int = extent()
    head_dim: int = plain(*HEAD_DIMS)
    dtype: str = plain("bf16", "fp16")
    dlse: bool = plain(False, True)
    align: ClassVar[int] = 16  # bytes that divide each address and stride of out and dout

    @property
    def rows(self) -> int:
        return self.batch * self.seq * self.heads


@dataclass(frozen=True)
class DeltaConfig(WarpsConfig):
    """A program takes ``block_rows`` queries of one head."""

    block_rows: int = knob(4, 8, 16, 32, 64, 128)
    warps: int = knob(1, 2, 4, 8)


def _steps(t: Tensor) -> list[int]:
    """Strides between sequences, queries and heads; 0 where there is one."""
    found = [s if n != 1 else 0 for n, s in zip(t.shape[:-1], t.stride()[:-1], strict=True)]
    return found if t.dim() == 4 else [0, *found]


class AttentionDelta(TritonOp[DeltaProblem, DeltaConfig]):
    """``(2, rows)`` in fp32: each query's lse to base 2 (inf for -inf), and ``sum(out * dout) - dlse``.

    Arguments: out and dout ``(B, S, H, D)``, lse and dlse or None ``(B, H, S)`` in fp32; without B where varlen.
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
    kernel = "attention.delta:attention_delta"
    in_place = False
    stats = Matrix("statistics", "rows", dtype="fp32", strides=(), result=True)
    out = Array("*batch", "seq", "heads", "head_dim", strides=("batch", "row", "head"))
    dout = Array("*batch", "seq", "heads", "head_dim", strides=("batch", "row", "head"))
    lse = Array("*batch", "heads", "seq", dtype="fp32", strides=())
    dlse = Array("*batch", "heads", "seq", dtype="fp32", strides=(), given="dlse")
    sizes = {"seq": "i32", "heads": "i32", "rows": "i64"}
    constexprs = ("head_dim", "dlse", "block_rows")

    # -- calls

    def derive(self, sizes: Sizes, **options: Any) -> None:
        sizes |= {"statistics": 2, "rows": sizes["batch"] * sizes["seq"] * sizes["heads"]}

    def refuse(self, named: Named, sizes: Sizes, **options: Any) -> None:
        out = named["out"]
        assert out is not None
        if out.dim() > 4 or out.dtype not in DTYPES.values():
            raise UnsupportedProblem(
                f"out is (B, S, H, D) or (TOTAL, H, D), fp16 or bf16; it is {tuple(out.shape)} {out.dtype}"
            )

    def takes(self, name: str, t: Tensor) -> bool:
        if name not in ("out", "dout"):
            return t.is_contiguous()
        return t.stride(-1) == 1 and all(s % WIDEST == 0 for s in _steps(t)) and t.data_ptr() % 16 == 0

    def strides(self, p: DeltaProblem, name: str, t: Tensor) -> list[int]:
        return _steps(t)

    def evaluate(self, *args: Any, **options: Any) -> tuple[Tensor, ...]:
        import torch

        out, dout, lse, dlse = args
        delta = (out.double() * dout.double()).sum(-1).transpose(-1, -2)
        if dlse is not None:
            delta = delta - dlse.double()
        blind = lse == -math.inf
        stats = [(lse.double() * LOG2_E).masked_fill(blind, math.inf), delta.masked_fill(blind, 0.0)]
        return (torch.stack([t.flatten() for t in stats]).float(),)

    # -- configs

    @of_both
    def elements_of_a_thread(self, p: DeltaProblem, c: DeltaConfig, gpu: GpuSpec) -> str | None:
        each = c.block_rows * power_of_two(p.head_dim) // c.threads
        if WIDEST <= each <= _MAX_ELEMENTS:
            return None
        return f"a thread has {each} elements of a row's {p.head_dim}: take from {WIDEST} to {_MAX_ELEMENTS}"

    no_idle_rows = idle_rule("block_rows", "seq", "{} queries", least=64)

    @of_both
    def most_programs(self, p: DeltaProblem, c: DeltaConfig, gpu: GpuSpec) -> str | None:
        programs = self.grid(p, c)[0]
        if programs <= _MOST_PROGRAMS:
            return None
        return f"{programs} programs are more than a grid's {_MOST_PROGRAMS}: take larger blocks"

    def default(self, p: DeltaProblem, gpu: GpuSpec) -> DeltaConfig:
        """Two accesses per thread of 4 warps."""
        rows = 32 * 4 * 2 * WIDEST // power_of_two(p.head_dim)
        return DeltaConfig(min(rows, 64), 4 if rows <= 64 else 2 if rows <= 128 else 1)

    def estimate_us(self, p: DeltaProblem, c: DeltaConfig, gpu: GpuSpec) -> float:
        """The time of the bytes, longer where threads have few in flight."""
        in_flight = c.block_rows * power_of_two(p.head_dim) / c.threads
        return rates.of(gpu).launch_us + self.work(p).bytes / (gpu.dram_gbps * 1e3) * (1.0 + FEW / in_flight)

    def grid(self, p: DeltaProblem, c: DeltaConfig) -> tuple[int, int, int]:
        return p.batch * p.heads * -(-p.seq // c.block_rows), 1, 1

    def constants(self, p: DeltaProblem, c: DeltaConfig) -> dict[str, int | bool | str]:
        return super().constants(p, c) | {"BLOCK_COLS": power_of_two(p.head_dim)}

    def arrange(self, p: DeltaProblem, name: str, values: Tensor) -> Tensor:
        return values

    def work(self, p: DeltaProblem) -> Work:
        # lse and delta are judged together; a delta is a sum that cancels, of terms as large as its typical size.
        return Work(flops=2.0 * p.rows * p.head_dim, bytes=self.bytes(p), depth=float(max(64, p.head_dim)))


ATTENTION_DELTA = AttentionDelta()
