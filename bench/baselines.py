"""Against whom: each contender is a name and a function that binds it to input sets.

A binding returns one no-argument launch per input set; the launch returns the tensor it wrote. A peer that cannot
take part raises :class:`Absent` with the reason, which becomes a row. The first contender is the baseline that
speed-ups refer to. To add a peer, write its binding and put it into ``PEERS``.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.suites import Case
from cutekernels.ops.activations import silu_mul
from cutekernels.ops.matmul import gemm

Launch = Callable[[], Tensor]

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


class Absent(Exception):
    """A peer cannot take part: not installed, or it has no such operation."""


@dataclass(frozen=True, slots=True)
class Inputs:
    """The operands of one call. ``b`` is (K, N); where the weight lies as (N, K), it is that weight transposed."""

    operands: tuple[Tensor, ...]
    out: Tensor

    @property
    def bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (*self.operands, self.out))


@dataclass(frozen=True, slots=True)
class Contender:
    """A name in the tables, and what binds it to input sets."""

    name: str
    bind: Callable[[Case, Sequence[Inputs]], Sequence[Launch]]


# ---- operands -------------------------------------------------------------------------------------------


def inputs(case: Case, problem: Any, device: str, seed: int) -> Inputs:
    """Standard normal operands that pose ``case``; ``problem`` is its parsed text."""
    draw = torch.Generator(device).manual_seed(seed)
    normal = partial(torch.randn, generator=draw, device=device, dtype=DTYPES[problem.dtype])
    if case.op == "silu_mul":
        shape = (problem.rows, problem.cols)
        return Inputs((normal(shape), normal(shape)), torch.empty(shape, device=device, dtype=DTYPES[problem.dtype]))
    m, n, k = problem.m, problem.n, problem.k
    b = normal((n, k)).t() if problem.b_major == "k" else normal((k, n))
    operands = (normal((m, k)), b) + ((normal((m, n)),) if case.beta else ())
    return Inputs(operands, torch.empty((m, n), device=device, dtype=DTYPES[problem.dtype]))


def truth(case: Case, i: Inputs) -> Tensor:
    """The result in fp64."""
    wide = [t.double() for t in i.operands]
    if case.op == "silu_mul":
        return F.silu(wide[0]) * wide[1]
    product = case.alpha * (wide[0] @ wide[1])
    return product + case.beta * wide[2] if case.beta else product


# ---- ours -----------------------------------------------------------------------------------------------


def ours(name: str, config: Any = None, accumulate: str = "fp32") -> Contender:
    """The public function: with the config its dispatcher finds, or with ``config``."""
    return Contender(name, partial(_ours, config, accumulate))


def _ours(config: Any, accumulate: str, case: Case, sets: Sequence[Inputs]) -> Sequence[Launch]:
    if case.op == "silu_mul":
        return [partial(silu_mul, *i.operands, out=i.out, config=config) for i in sets]
    options = {"alpha": case.alpha, "beta": case.beta, "accumulate": accumulate, "config": config}
    return [partial(gemm, *i.operands, out=i.out, **options) for i in sets]


# ---- peers ----------------------------------------------------------------------------------------------


def _cublas(case: Case, sets: Sequence[Inputs]) -> Sequence[Launch]:
    if (case.alpha, case.beta) == (1.0, 0.0):
        return [partial(torch.mm, *i.operands, out=i.out) for i in sets]
    scale = {"alpha": case.alpha, "beta": case.beta}  # beta=0 leaves addmm's first operand unread
    thirds = [i.operands[2] if case.beta else i.out for i in sets]
    return [partial(torch.addmm, c, *i.operands[:2], **scale, out=i.out) for c, i in zip(thirds, sets, strict=True)]


def _quack(case: Case, sets: Sequence[Inputs]) -> Sequence[Launch]:
    try:
        from quack import gemm_interface
    except ImportError as error:
        raise Absent(f"quack-kernels does not import: {error}") from error
    if not case.beta:
        scaled = partial(gemm_interface.gemm, alpha=case.alpha, tuned=False)
        return [partial(scaled, *i.operands, out=i.out) for i in sets]
    added = partial(gemm_interface.gemm_add, alpha=case.alpha, beta=case.beta, tuned=False)
    return [partial(added, *i.operands, out=i.out) for i in sets]


def nvidia_example(file: Path) -> Contender:
    """NVIDIA's CuTe DSL example ``ampere/.../tensorop_gemm.py``, from a CUTLASS checkout: mma.sync, as ours is."""
    return Contender("nvidia tensorop_gemm", partial(_nvidia, file))


def _nvidia(file: Path, case: Case, sets: Sequence[Inputs]) -> Sequence[Launch]:
    if (case.alpha, case.beta) != (1.0, 0.0):
        raise Absent("the example has neither alpha nor beta")
    import cuda.bindings.driver as cuda  # type: ignore[import-untyped]
    import cutlass
    import cutlass.cute as cute
    from cutlass.cute.runtime import from_dlpack

    spec = importlib.util.spec_from_file_location("nvidia_tensorop_gemm", file)
    if spec is None or spec.loader is None:
        raise Absent(f"{file} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    kinds = {torch.bfloat16: cutlass.BFloat16, torch.float16: cutlass.Float16}

    def posed(t: Tensor) -> Any:
        lead = 1 if t.stride(1) == 1 else 0
        dynamic = from_dlpack(t.unsqueeze(-1), assumed_align=16).mark_layout_dynamic(leading_dim=lead)
        return dynamic.mark_compact_shape_dynamic(mode=lead, stride_order=(2, 1 - lead, lead), divisibility=8)

    kind = kinds[sets[0].out.dtype]
    kernel = module.TensorOpGemm(kind, kind, cutlass.Float32, (2, 2, 1))
    posed_sets = [(posed(i.operands[0]), posed(i.operands[1].t()), posed(i.out)) for i in sets]
    compiled = cute.compile(kernel, *posed_sets[0], cuda.CUstream(torch.cuda.current_stream().cuda_stream))

    def launch(i: Inputs, tensors: tuple[Any, ...]) -> Tensor:
        compiled(*tensors, cuda.CUstream(torch.cuda.current_stream().cuda_stream))
        return i.out

    return [partial(launch, i, tensors) for i, tensors in zip(sets, posed_sets, strict=True)]


def _swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


def _eager(case: Case, sets: Sequence[Inputs]) -> Sequence[Launch]:
    return [partial(_swiglu, *i.operands) for i in sets]


def _compiled(case: Case, sets: Sequence[Inputs]) -> Sequence[Launch]:
    torch.compiler.reset()  # or the shapes of earlier cases count against the limit of recompilations
    fused = torch.compile(_swiglu, dynamic=False)
    return [partial(fused, *i.operands) for i in sets]


def _liger(case: Case, sets: Sequence[Inputs]) -> Sequence[Launch]:
    try:
        from liger_kernel.ops.swiglu import LigerSiLUMulFunction
    except ImportError as error:
        raise Absent(f"liger-kernel does not import: {error}") from error
    return [partial(LigerSiLUMulFunction.apply, *i.operands) for i in sets]


PEERS: dict[str, tuple[Contender, ...]] = {
    "gemm": (Contender("cublas", _cublas), Contender("quack (untuned)", _quack)),
    "silu_mul": (Contender("torch.compile", _compiled), Contender("eager", _eager), Contender("liger", _liger)),
}
