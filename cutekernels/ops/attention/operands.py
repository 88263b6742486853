"""Common ground of attention's ops: operands, checks, arguments of kernels, rules and choice."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from cutekernels import rates
from cutekernels.errors import UnsupportedProblem
from cutekernels.op import C, P, Problem
from cutekernels.ops.attention.problem import HEAD_DIMS, WIDEST, AttentionSchedule
from cutekernels.ops.shared.cute_op import CutePart
from cutekernels.ops.shared.operands import Array, Named, Operand, Sizes

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from cutekernels.gpu import GpuSpec

_MOST_ROW_STRIDE = 2**23  # elements; a tile's offsets have 32 bits


def rows(*axes: str, **more: Any) -> Operand:
    """``(*axes, D)``: rows that kernels read 16 bytes at a time, any strides between them."""
    return Array(*axes, "head_dim", align=16, bits=64, canonical=True, **more)


def numbers(factors: int, limits: int) -> list[Any]:
    """Arguments for the compiler: factors of scores, and limits of what a query sees."""
    from cutlass import Float32, Int32

    return [Float32(1.0)] * factors + [Int32(0)] * limits


def workspace(*, sums: bool, tickets: bool) -> list[Any]:
    """Arguments for the compiler: partial sums, and tickets that CTAs draw; None of those that are not there."""
    from cutlass import Float32, Int32

    from cutekernels.backends import cute as backend

    return [backend.dense(kind, None) if there else None for kind, there in ((Float32, sums), (Int32, tickets))]


class AttentionOp(CutePart[P, C]):
    """The part of an op whose default is its model's best, over all configs that no rule forbids.

    Its operands lie as the caller has them: head dims contiguous, rows 16-byte aligned.
    """

    in_place = False
    fixed: ClassVar[tuple[str, ...]] = ("head_dim",)
    suffix: ClassVar[str] = ""  # of the names of k and v
    any_rows: ClassVar[tuple[str, ...]] = ()  # operands whose rows may lie apart as far as they like
    scalar_types: ClassVar[Mapping[str, str]] = {"scale": "fp32", "cap": "fp32"}  # the cap is 0 without one
    most_stack_bytes = 0  # at the register limit any stack is spills
    compile_s = 3.0
    schedules: ClassVar[tuple[AttentionSchedule[Any, Any], ...]]

    # -- calls

    def _integers(self, options: Mapping[str, Any]) -> Sizes:
        return {}  # a window's sides are no extents of operands

    def _pose(self, named: Named, **options: Any) -> tuple[Sizes, dict[str, torch.Size]]:
        self.refuse_shapes(named)
        return super()._pose(named, **options)

    def refuse_shapes(self, named: Named) -> None:
        """Raises UnsupportedProblem for shapes of which more is to be said than that they do not fit together."""
        k, v = (named[f"{name}{self.suffix}"] for name in "kv")
        if k is not None and v is not None and k.dim() == v.dim() and k.shape != v.shape:
            raise UnsupportedProblem(
                f"k{self.suffix} and v{self.suffix} must have one shape; they have {tuple(k.shape)} and "
                f"{tuple(v.shape)}: where v's heads are narrower (DeepSeek's v_head_dim), pad them with zeros and drop "
                "those channels of the result"
            )

    def takes(self, name: str, t: Tensor) -> bool:
        tiled = self.operands[name].canonical and t.dim() > 2 and name not in self.any_rows
        far = tiled and t.shape[-3] > 1 and t.stride(-3) >= _MOST_ROW_STRIDE
        return super().takes(name, t) and not far

    def results_of(self, **options: Any) -> tuple[str, ...]:
        return ("out", "lse")[: 1 + options["lse"]]

    def refuse(self, named: Named, sizes: Sizes, **options: Any) -> None:
        head_dim, heads_q, heads_kv = sizes["head_dim"], sizes["heads_q"], sizes["heads_kv"]
        if head_dim % WIDEST or not 0 < head_dim <= HEAD_DIMS[-1]:
            most = f"a multiple of {WIDEST} up to {HEAD_DIMS[-1]}"
            raise UnsupportedProblem(f"q's head dim must be {most}; it is {head_dim}")
        if heads_kv == 0 or heads_q % heads_kv:
            raise UnsupportedProblem(f"k{self.suffix}'s {heads_kv} heads must divide q's {heads_q}")

    def draw_scalars(self, p: P, generator: torch.Generator) -> tuple[float, float]:
        return p.head_dim**-0.5, 2.0 if p.softcap else 0.0  # type: ignore[attr-defined]

    # -- rules and choice

    def schedule(self, c: C) -> AttentionSchedule[P, C]:
        """Rules and model of ``c``."""
        body = getattr(c, "body", self.schedules[0].name)
        return next(schedule for schedule in self.schedules if schedule.name == body)

    def why_not(self, p: P, c: C, gpu: GpuSpec) -> str | None:
        return self.schedule(c).why_not(p, c, gpu, p)

    def valid(self, p: P, gpu: GpuSpec) -> Iterator[C]:
        for schedule in self.schedules:
            yield from schedule.valid(p, gpu, p)

    def default(self, p: P, gpu: GpuSpec) -> C:
        """The model's best."""
        return _default(self, p, gpu)  # type: ignore[no-any-return]

    def estimate_us(self, p: P, c: C, gpu: GpuSpec) -> float:
        return float(self.schedule(c).estimate_us(p, c, gpu, p))


class VarlenOp(AttentionOp[P, C]):
    """An op over a batch of one length, or over varlen sequences, whose tensors have no batch but all rows."""

    def refuse_shapes(self, named: Named) -> None:
        ends = [named["cu_seqlens_q"] is not None, named["cu_seqlens_kv"] is not None]
        form, rank = ("(TOTAL, H, D)", 3) if any(ends) else ("(B, S, H, D)", 4)
        for name in "qkv":
            t = named[name]
            if t is not None and t.dim() != rank:
                raise UnsupportedProblem(
                    f"{name} must be {form}; its shape is {tuple(t.shape)}"
                    + ("" if rank == 3 else ": packed sequences need cu_seqlens_q and cu_seqlens_kv")
                )
        if any(ends) and named["mask"] is not None:
            raise UnsupportedProblem("mask is for a batch of one length: packed sequences take none")
        if any(ends) and not all(ends):
            raise UnsupportedProblem("packed sequences need both cu_seqlens_q and cu_seqlens_kv; one is missing")
        super().refuse_shapes(named)

    def refuse(self, named: Named, sizes: Sizes, **options: Any) -> None:
        super().refuse(named, sizes, **options)
        ends = sizes.get("ends", 2)
        if ends == 0 or (ends == 1 and sizes["seq_q"]):
            raise UnsupportedProblem(f"cu_seqlens_q of length {ends} has no sequence, yet q has {sizes['seq_q']} rows")

    def check_indices(self, inputs: Any, **options: Any) -> None:
        named = dict(zip(self.inputs, inputs, strict=True))
        if named["cu_seqlens_q"] is not None:
            check_ends(named["q"], named["k"], named["cu_seqlens_q"], named["cu_seqlens_kv"])

    def facts(self, named: Named, sizes: Sizes) -> dict[str, Any]:
        """The batch of varlen sequences, and their mean lengths."""
        if "ends" not in sizes:
            return {}
        batch = sizes["ends"] - 1
        return {"batch": batch} | {name: -(-sizes[name] // max(1, batch)) for name in ("seq_q", "seq_kv")}

    def missing(self, p: P) -> tuple[str, ...]:
        return ("batch",) if p.varlen else ()  # type: ignore[attr-defined]

    def sizes_in(self, p: P) -> Sizes:
        sizes = super().sizes_in(p)
        if not p.varlen:  # type: ignore[attr-defined]
            return sizes
        batch = sizes["batch"]
        return sizes | {"ends": batch + 1, "seq_q": batch * sizes["seq_q"], "seq_kv": batch * sizes["seq_kv"]}


@rates.remember
def _default(op: AttentionOp[Any, Any], p: Problem, gpu: GpuSpec) -> Any:
    found = [choice for s in op.schedules if (choice := s.best(p, gpu, p)) is not None]
    if not found:
        why = dict.fromkeys(schedule.refusal(p, gpu, p) for schedule in op.schedules)
        raise UnsupportedProblem(f"{op.name} on {gpu.name}: {'; '.join(map(str, why))}")
    return min(found, key=lambda choice: (choice[0], str(choice[1])))[1]


def check_ends(q: Tensor, k: Tensor, cu_q: Tensor, cu_kv: Tensor) -> None:
    """Refuses varlen sequences' ends that do not run from 0 to the tensors' rows without falling. Waits once."""
    import torch

    both = torch.stack((cu_q, cu_kv)).tolist()
    for name, ends, rows in zip(("cu_seqlens_q", "cu_seqlens_kv"), both, (q.shape[0], k.shape[0]), strict=True):
        falls = next((i for i in range(1, len(ends)) if ends[i] < ends[i - 1]), None)
        if falls is not None:
            value = f"entry {falls} is {ends[falls]}, behind {ends[falls - 1]}"
        elif ends[0] != 0 or ends[-1] != rows:
            value = f"it runs from {ends[0]} to {ends[-1]}"
        else:
            continue
        raise UnsupportedProblem(
            f"{name} must run from 0 to {rows}, the tensor's rows, and never fall; {value}: pass the cumulative "
            "sums of the sequences' lengths, and slices of the tensors without the rows of no sequence"
        )
