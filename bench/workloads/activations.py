"""Gated and biased activations at the widths of models' MLPs, and at the sizes that others published; both passes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import import_module
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.baselines import Absent, Contender, Inputs, Launch, Workload, compiled, each, eager
from bench.suites import INTERMEDIATE, TOKENS, Case, Suite, suite
from bench.workloads import parse_case
from bench.workloads.declared import draw_inputs, exact, launches, of_rows, workload
from cutekernels.ops.activations.api import bias_gelu, gelu_mul, silu_mul
from cutekernels.ops.activations.op import (
    BIAS_GELU,
    BIAS_GELU_BACKWARD,
    GELU_MUL,
    GELU_MUL_BACKWARD,
    SILU_MUL,
    SILU_MUL_BACKWARD,
    GluProblem,
)

# ---- cases ----------------------------------------------------------------------------------------------

ROWS = (1, *TOKENS, 8192)
GEGLU = {"gemma-2-9b": 14336, "gemma-7b": 24576}  # gelu by tanh
BIASED = {"gpt-2-xl": 6400, "phi-2": 10240}
Cases = Callable[[Any], Suite]  # of an op


def _shapes(shapes: Mapping[str, tuple[int, int]], **words: str) -> Cases:
    """Rows and columns by label; ``words`` are the problem's."""
    named = {label: {"rows": rows, "cols": cols, **words} for label, (rows, cols) in shapes.items()}
    return lambda op: suite(op.name, op.Problem, named)


def _sizes(rows: Sequence[int], widths: Mapping[str, int], **words: str) -> Cases:
    """Every number of rows at every width."""
    return _shapes({f"{name} rows={r}": (r, n) for name, n in widths.items() for r in rows}, **words)


# MemoryWorld's SwiGLU rows, and the bias-GELU rows of triton-llm-kernels (batch x tokens x width): published in fp16.
_PUBLISHED = _sizes((2048,), {f"ffn={n}": n for n in (4096, 8192, 11008, 14336, 18944)})
_BIAS_SHAPES = ((2, 256, 4096), (2, 512, 4096), (2, 1024, 4096), (2, 1024, 16384))
_PUBLISHED_BIAS = _shapes({f"{b}x{t}x{n}": (b * t, n) for b, t, n in _BIAS_SHAPES})


def _inputs(op: Any, case: Case, problem: Any, device: str, seed: int) -> Inputs:
    """The declaration's in contiguous memory; gate and up as halves of one tensor where their rows are not dense."""
    i = draw_inputs(op, {}, case, problem, device, seed)
    operands = [t.contiguous() for t in i.operands]
    if isinstance(problem, GluProblem) and problem.layout == "rows":
        operands = [*torch.cat(operands, -1).chunk(2, -1)]
    return Inputs(tuple(operands), i.results)


# ---- contenders -----------------------------------------------------------------------------------------


def _approximate(case: Case) -> str:
    return str(getattr(parse_case(case)[1], "approximate", "none"))


def _swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


def _geglu(approximate: str, gate: Tensor, up: Tensor) -> Tensor:
    return F.gelu(gate, approximate=approximate) * up


def _swiglu_backward(dout: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    return torch.ops.aten.silu_backward(dout * up, gate), dout * F.silu(gate)


def _geglu_backward(approximate: str, dout: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    slope = torch.ops.aten.gelu_backward(dout * up, gate, approximate=approximate)
    return slope, dout * F.gelu(gate, approximate=approximate)


def _bias_gelu(approximate: str, x: Tensor, bias: Tensor) -> Tensor:
    return F.gelu(x + bias, approximate=approximate)


def _wide_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """A kernel for each operation, in fp32, rounded at the end."""
    return _swiglu(gate.float(), up.float()).to(gate.dtype)


def _erf_chain(case: Case) -> Callable[..., Tensor]:
    """Exact GELU as it is written down, a kernel for each operation."""
    if _approximate(case) != "none":
        raise Absent("erf is of the exact GELU")

    def chain(x: Tensor, bias: Tensor) -> Tensor:
        y = x + bias
        return 0.5 * y * (1.0 + torch.erf(y * 0.5**0.5))

    return chain


def _bias_gelu_backward(approximate: str, dout: Tensor, x: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    dx = torch.ops.aten.gelu_backward(dout, x + bias, approximate=approximate)
    return dx, dx.sum(dim=0)


PLAIN: dict[str, Callable[[Case], Callable[..., Any]]] = {
    "silu_mul": lambda case: _swiglu,
    "gelu_mul": lambda case: partial(_geglu, _approximate(case)),
    "silu_mul_backward": lambda case: _swiglu_backward,
    "gelu_mul_backward": lambda case: partial(_geglu_backward, _approximate(case)),
    "bias_gelu": lambda case: partial(_bias_gelu, _approximate(case)),
    "bias_gelu_backward": lambda case: partial(_bias_gelu_backward, _approximate(case)),
}


def _with_bias(case: Case, sets: Sequence[Inputs], config: Any) -> Sequence[Launch]:
    """dx, and the sum of what the kernel leaves of each slab: the bias's gradient."""

    def launch(own: Launch, i: Inputs) -> tuple[Tensor, ...]:
        dx, partials = own()
        return dx, partials.sum(dim=0).to(i.operands[2].dtype)

    bound = launches(BIAS_GELU_BACKWARD, None, case, sets, config)
    return [partial(launch, own, i) for own, i in zip(bound, sets, strict=True)]


def _with_sum(case: Case, i: Inputs) -> tuple[Tensor, ...]:
    dx, partials = exact(BIAS_GELU_BACKWARD, case, i)
    return dx, partials.sum(dim=0)


def _liger(case: Case) -> Callable[..., Launch]:
    if _approximate(case) == "none" and case.op == "gelu_mul":
        raise Absent("liger-kernel has GELU by tanh only")
    from liger_kernel.ops.geglu import LigerGELUMulFunction
    from liger_kernel.ops.swiglu import LigerSiLUMulFunction

    function = LigerSiLUMulFunction if case.op == "silu_mul" else LigerGELUMulFunction

    def bind(gate: Tensor, up: Tensor) -> Launch:
        if not (gate.is_contiguous() and up.is_contiguous()):
            raise Absent("liger-kernel copies operands that are not contiguous")
        return partial(function.apply, gate, up)

    return bind


def _cute(case: Case, sets: Sequence[Inputs]) -> Mapping[str, Sequence[Launch]]:
    """The example's kernel with 8 to 32 elements of each operand a thread; compiled at its first launch."""
    silu_mul = import_module("examples.silu_mul_cute").silu_mul
    return {
        f"block={32 * warps * each} warps={warps}": [
            partial(silu_mul, *i.operands, i.out, block=32 * warps * each, warps=warps) for i in sets
        ]
        for warps, each in product((1, 4, 16), (8, 16, 32))
    }


def _workload(
    op: Any,
    function: Callable[..., Tensor] | None,
    *peers: Contender,
    changes: Mapping[str, Any] | None = None,
    **cases: Cases,
) -> Workload:
    peers = (compiled(PLAIN[op.name]), eager(PLAIN[op.name]), *peers)
    suites = {name: made(op) for name, made in cases.items()}
    more = {"inputs": partial(_inputs, op), "streams": partial(of_rows, op)} | dict(changes or {})
    return workload(op, suites, peers, function, **more)


_LIGER = each("liger", _liger)
WORKLOADS = (
    _workload(
        SILU_MUL,
        silu_mul,
        _LIGER,
        eager(lambda case: _wide_swiglu, "eager (fp32 chain)"),
        llm=_sizes(ROWS, INTERMEDIATE),
        published=_PUBLISHED,
        headtohead=_PUBLISHED,
        packed=_sizes(ROWS[1:], INTERMEDIATE, layout="rows"),
        changes={"cute": _cute},
    ),
    _workload(
        GELU_MUL,
        gelu_mul,
        _LIGER,
        llm=_sizes(ROWS, GEGLU, approximate="tanh"),
        exact=_sizes(ROWS, GEGLU),
        packed=_sizes(ROWS[1:], GEGLU, layout="rows", approximate="tanh"),
    ),
    _workload(
        BIAS_GELU,
        bias_gelu,
        eager(_erf_chain, "eager (erf chain)"),
        llm=_sizes(ROWS, BIASED),
        published=_PUBLISHED_BIAS,
        tanh=_sizes(ROWS, BIASED, approximate="tanh"),
    ),
    _workload(SILU_MUL_BACKWARD, None, llm=_sizes(TOKENS, INTERMEDIATE), published=_PUBLISHED),
    _workload(GELU_MUL_BACKWARD, None, llm=_sizes(TOKENS, GEGLU, approximate="tanh"), exact=_sizes(TOKENS, GEGLU)),
    _workload(
        BIAS_GELU_BACKWARD,
        None,
        changes={"ours": _with_bias, "truth": _with_sum},
        llm=_sizes(TOKENS, BIASED),
        published=_PUBLISHED_BIAS,
    ),
)
