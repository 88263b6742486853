"""Gated and biased activations at the widths of models' MLPs, and at the sizes that others published; both passes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.baselines import DTYPES, Absent, Contender, Inputs, Launch, Workload, compiled, eager
from bench.suites import INTERMEDIATE, TOKENS, Case, Suite, unless
from bench.workloads import posed
from cutekernels.kernels.activations import gelu_slope, gelu_tanh_slope
from cutekernels.ops.activations.api import bias_gelu, gelu_mul, silu_mul
from cutekernels.ops.activations.op import BIAS_GELU_BACKWARD

# ---- cases ----------------------------------------------------------------------------------------------

ROWS = (1, *TOKENS, 8192)
GEGLU = {"gemma-2-9b": 14336, "gemma-7b": 24576}  # gelu by tanh
BIASED = {"gpt-2-xl": 6400, "phi-2": 10240}


def _sizes(op: str, rows: Sequence[int], widths: dict[str, int], more: str = "", before: str = "") -> Suite:
    """Every number of rows at every width; ``before`` and ``more`` are the last words of the problem."""

    def suite(dtype: str, accumulate: str) -> list[Case]:
        words = unless("dtype", dtype, "bf16") + before + more
        return [Case(op, f"rows={r} cols={n}{words}", f"{name} rows={r}") for name, n in widths.items() for r in rows]

    return suite


def _published(op: str) -> Suite:
    """MemoryWorld's SwiGLU rows. They were published in fp16."""
    return _sizes(op, (2048,), {f"ffn={n}": n for n in (4096, 8192, 11008, 14336, 18944)})


def _published_bias(op: str) -> Suite:
    """The bias-GELU rows of triton-llm-kernels, batch x tokens x width. They were published in fp16."""

    def suite(dtype: str, accumulate: str) -> list[Case]:
        shapes = ((2, 256, 4096), (2, 512, 4096), (2, 1024, 4096), (2, 1024, 16384))
        words = unless("dtype", dtype, "bf16")
        return [Case(op, f"rows={b * t} cols={n}{words}", f"{b}x{t}x{n}") for b, t, n in shapes]

    return suite


# ---- operands and truth ---------------------------------------------------------------------------------


def _normal(problem: Any, device: str, seed: int) -> Callable[..., Tensor]:
    return partial(
        torch.randn, generator=torch.Generator(device).manual_seed(seed), device=device, dtype=DTYPES[problem.dtype]
    )


def _gate_and_up(case: Case, problem: Any, device: str, seed: int) -> Inputs:
    """Two tensors, or the halves of one where rows are not dense."""
    normal, shape = _normal(problem, device, seed), (problem.rows, problem.cols)
    if problem.layout == "dense":
        operands = (normal(shape), normal(shape))
    else:
        gate, up = normal((problem.rows, 2 * problem.cols)).chunk(2, dim=-1)
        operands = (gate, up)
    return Inputs(operands, (normal(shape),))


def _gate_and_up_backward(case: Case, problem: Any, device: str, seed: int) -> Inputs:
    normal, shape = _normal(problem, device, seed), (problem.rows, problem.cols)
    return Inputs((normal(shape), normal(shape), normal(shape)), (normal(shape), normal(shape)))


def _x_and_bias(case: Case, problem: Any, device: str, seed: int) -> Inputs:
    normal, shape = _normal(problem, device, seed), (problem.rows, problem.cols)
    return Inputs((normal(shape), normal(problem.cols)), (normal(shape),))


def _x_and_bias_backward(case: Case, problem: Any, device: str, seed: int) -> Inputs:
    normal, shape = _normal(problem, device, seed), (problem.rows, problem.cols)
    operands = (normal(shape), normal(shape), normal(problem.cols))
    return Inputs(operands, BIAS_GELU_BACKWARD.fresh(*operands))


def _approximate(case: Case) -> str:
    return str(getattr(posed(case)[1], "approximate", "none"))


def _truth(case: Case, i: Inputs) -> tuple[Tensor, ...]:
    """Of any of the ops: by the torch functions that its eager peer is made of, in fp64."""
    wide = [t.double() for t in i.operands]
    if case.op == "bias_gelu_backward":
        slope = gelu_slope if _approximate(case) == "none" else gelu_tanh_slope
        dx = wide[0] * slope(wide[1] + wide[2])
        return dx, dx.sum(dim=0)
    found = PLAIN[case.op](case)(*wide)
    return found if isinstance(found, tuple) else (found,)


# ---- contenders -----------------------------------------------------------------------------------------


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


def _wide_swiglu(case: Case, sets: Sequence[Inputs]) -> Sequence[Launch]:
    """A kernel for each operation, in fp32, rounded at the end."""

    def chain(gate: Tensor, up: Tensor) -> Tensor:
        return _swiglu(gate.float(), up.float()).to(gate.dtype)

    return [partial(chain, *i.operands) for i in sets]


def _erf_chain(case: Case, sets: Sequence[Inputs]) -> Sequence[Launch]:
    """Exact GELU as it is written down, a kernel for each operation."""
    if _approximate(case) != "none":
        raise Absent("erf is of the exact GELU")

    def chain(x: Tensor, bias: Tensor) -> Tensor:
        y = x + bias
        return 0.5 * y * (1.0 + torch.erf(y * 0.5**0.5))

    return [partial(chain, *i.operands) for i in sets]


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


def _ours(function: Callable[..., Tensor]) -> Callable[[Case, Sequence[Inputs], Any], Sequence[Launch]]:
    def bind(case: Case, sets: Sequence[Inputs], config: Any) -> Sequence[Launch]:
        options = {} if case.op == "silu_mul" else {"approximate": _approximate(case)}
        return [partial(function, *i.operands, out=i.out, config=config, **options) for i in sets]

    return bind


def _ours_backward(case: Case, sets: Sequence[Inputs], config: Any) -> Sequence[Launch]:
    """What autograd runs, into given results; for a bias with the sum over the slabs."""
    op = getattr(torch.ops.cutekernels, f"{case.op}_out")
    options = () if case.op == "silu_mul_backward" else (_approximate(case),)
    text = None if config is None else str(config)

    def launch(i: Inputs) -> tuple[Tensor, ...]:
        op(*i.operands, *i.results, *options, text)
        if case.op == "bias_gelu_backward":
            return i.results[0], i.results[1].sum(dim=0).to(i.operands[2].dtype)
        return i.results

    return [partial(launch, i) for i in sets]


def _liger(case: Case, sets: Sequence[Inputs]) -> Sequence[Launch]:
    if _approximate(case) == "none" and case.op == "gelu_mul":
        raise Absent("liger-kernel has GELU by tanh only")
    try:
        from liger_kernel.ops.geglu import LigerGELUMulFunction
        from liger_kernel.ops.swiglu import LigerSiLUMulFunction
    except ImportError as error:
        raise Absent(f"liger-kernel does not import: {error}") from error
    function = LigerSiLUMulFunction if case.op == "silu_mul" else LigerGELUMulFunction
    if not all(t.is_contiguous() for t in sets[0].operands):
        raise Absent("liger-kernel copies operands that are not contiguous")
    return [partial(function.apply, *i.operands) for i in sets]


# Operands and results of full size.
_STREAMS = {
    "silu_mul": (2, 1),
    "gelu_mul": (2, 1),
    "bias_gelu": (1, 1),
    "silu_mul_backward": (3, 2),
    "gelu_mul_backward": (3, 2),
    "bias_gelu_backward": (2, 1),
}


def _workload(op: str, suites: dict[str, Suite], inputs: Any, ours: Any, *more: Contender) -> Workload:
    peers = (compiled(PLAIN[op]), eager(PLAIN[op]), *more)
    streams = _STREAMS[op]
    return Workload(op, suites, inputs, _truth, ours, peers, streams=lambda case: streams)


_TANH = " approximate=tanh"
_LIGER = Contender("liger", _liger)

WORKLOADS = (
    _workload(
        "silu_mul",
        {
            "llm": _sizes("silu_mul", ROWS, INTERMEDIATE),
            "published": _published("silu_mul"),
            "headtohead": _published("silu_mul"),
            "packed": _sizes("silu_mul", ROWS[1:], INTERMEDIATE, before=" layout=rows"),
        },
        _gate_and_up,
        _ours(silu_mul),
        _LIGER,
        Contender("eager (fp32 chain)", _wide_swiglu),
    ),
    _workload(
        "gelu_mul",
        {
            "llm": _sizes("gelu_mul", ROWS, GEGLU, _TANH),
            "exact": _sizes("gelu_mul", ROWS, GEGLU),
            "packed": _sizes("gelu_mul", ROWS[1:], GEGLU, _TANH, " layout=rows"),
        },
        _gate_and_up,
        _ours(gelu_mul),
        _LIGER,
    ),
    _workload(
        "bias_gelu",
        {
            "llm": _sizes("bias_gelu", ROWS, BIASED),
            "published": _published_bias("bias_gelu"),
            "tanh": _sizes("bias_gelu", ROWS, BIASED, _TANH),
        },
        _x_and_bias,
        _ours(bias_gelu),
        Contender("eager (erf chain)", _erf_chain),
    ),
    _workload(
        "silu_mul_backward",
        {"llm": _sizes("silu_mul_backward", TOKENS, INTERMEDIATE), "published": _published("silu_mul_backward")},
        _gate_and_up_backward,
        _ours_backward,
    ),
    _workload(
        "gelu_mul_backward",
        {
            "llm": _sizes("gelu_mul_backward", TOKENS, GEGLU, _TANH),
            "exact": _sizes("gelu_mul_backward", TOKENS, GEGLU),
        },
        _gate_and_up_backward,
        _ours_backward,
    ),
    _workload(
        "bias_gelu_backward",
        {"llm": _sizes("bias_gelu_backward", TOKENS, BIASED), "published": _published_bias("bias_gelu_backward")},
        _x_and_bias_backward,
        _ours_backward,
    ),
)
