"""``python -m bench host``: host time of our ops beside torch's, FlashAttention-4's and Liger's.

Each call of a case alternates between two shapes, two weights and fresh activations, so that no call merely repeats
the one before. A sample is the wall time of ``CALLS`` calls that the GPU has not been waited for, over their number;
contenders take turns, and medians are over the rounds. Ways:

- ``no_grad``: without gradients; ``out``: the same, written to a given tensor;
- ``forward`` and ``backward``: with gradients for all floating-point operands, by ``torch.autograd.grad``;
- ``graph``: a chain of ``CHAIN`` calls compiled by Inductor without gradients, per call.

``entered``: functions of this package entered by a warm call.
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
import torch.nn.functional as F
import typer
from rich.table import Table
from torch import Tensor

import cutekernels as ck
from bench.rows import Row, write
from cutekernels import environment, terminal
from cutekernels import gpu as gpus
from cutekernels.errors import UnknownGpu

HERE = Path(__file__).parent
PACKAGE = str(Path(ck.__file__).parent)
CALLS, CHAIN = 16, 32
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

Function = Callable[..., Any]
Operands = tuple[Any, ...]


@dataclass(frozen=True)
class Case:
    """One op: ``operands(step, device, dtype)`` are fresh activations beside weights that two steps in turn share."""

    op: str
    operands: Callable[[int, torch.device, torch.dtype], Operands]
    contenders: dict[str, Callable[[], Function]]
    """Contenders by name: a function without arguments gives each, or raises ImportError."""
    ways: tuple[str, ...] = ("no_grad", "forward", "backward")
    chained: Callable[..., Any] | None = None
    """``(function, operands) -> result`` of the same shape as the first operand, for the way ``graph``."""
    out: dict[str, Callable[[], Function]] = field(default_factory=dict)
    """Contenders of the way ``out``, called with a result in front."""


def _weights(*shape: int) -> Callable[[int, torch.device, torch.dtype], Tensor]:
    made: dict[tuple[int, str], Tensor] = {}

    def weight(step: int, device: torch.device, dtype: torch.dtype) -> Tensor:
        key = step % 2, device.type
        if key not in made:
            made[key] = torch.nn.Parameter(torch.randn(shape, device=device, dtype=dtype) / shape[-1] ** 0.5)
        return made[key]

    return weight


def _rows(step: int, cols: int, device: torch.device, dtype: torch.dtype, rows: int = 512) -> Tensor:
    return torch.randn(rows if step // 2 % 2 else rows // 2, cols, device=device, dtype=dtype)


def _flash() -> Function:
    from flash_attn.cute import flash_attn_func

    return lambda q, k, v: flash_attn_func(q, k, v, causal=True)[0]


def _sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION if q.is_cuda else SDPBackend.MATH):
        y = F.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True, enable_gqa=True
        )
    return y.transpose(1, 2)


def _liger(name: str) -> Callable[[], Function]:
    def load() -> Function:
        from liger_kernel.ops import rms_norm, swiglu

        if name == "rms_norm":
            apply = rms_norm.LigerRMSNormFunction.apply
            return lambda x, w: apply(x, w, 1e-6, 0.0, "llama", False)
        function: Function = swiglu.LigerSiLUMulFunction.apply
        return function

    return load


def _attention(length: int) -> Case:
    def operands(step: int, device: torch.device, dtype: torch.dtype) -> Operands:
        heads = (32, 8, 8)
        rows = length if step // 2 % 2 else length // 2
        return tuple([torch.randn(1, rows, h, 128, device=device, dtype=dtype) for h in heads])

    return Case(
        f"attention {length}",
        operands,
        {
            "torch": lambda: _sdpa,
            "flash-attn-4": _flash,
            "cutekernels": lambda: lambda q, k, v: ck.attention(q, k, v, causal=True),
        },
    )


def cases() -> list[Case]:
    """Every case; weights are made when one runs."""
    square, norm, table, gate_up = _weights(3584, 3584), _weights(3584), _weights(32000, 1024), _weights(1792, 3584)
    bias = _weights(3584)

    def ids(step: int, device: torch.device, dtype: torch.dtype) -> Operands:
        return torch.randint(0, 32000, (512 if step // 2 % 2 else 256,), device=device), table(step, device, dtype)

    def rope_of(step: int, device: torch.device, dtype: torch.dtype) -> Operands:
        rows = 512 if step // 2 % 2 else 256
        q, k = (torch.randn(1, rows, h, 128, device=device, dtype=dtype) for h in (32, 8))
        angles = torch.randn(512, 64, device=device)
        return q, k, angles.cos(), angles.sin()

    def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        c, s = (torch.cat([t, t], -1)[: q.shape[1], None].to(q.dtype) for t in (cos, sin))
        half = [torch.cat([-t[..., 64:], t[..., :64]], -1) for t in (q, k)]
        return q * c + half[0] * s, k * c + half[1] * s

    return [
        Case(
            "linear",
            lambda step, device, dtype: (_rows(step, 3584, device, dtype), square(step, device, dtype)),
            {"torch": lambda: F.linear, "cutekernels": lambda: ck.linear},
            chained=lambda f, x, w: f(x, w),
        ),
        Case(
            "linear bias",
            lambda step, device, dtype: (
                _rows(step, 3584, device, dtype),
                square(step, device, dtype),
                bias(step, device, dtype),
            ),
            {"torch": lambda: F.linear, "cutekernels": lambda: ck.linear},
        ),
        Case(
            "gemm",
            lambda step, device, dtype: (_rows(step, 3584, device, dtype), square(step, device, dtype)),
            {"torch": lambda: torch.mm, "cutekernels": lambda: ck.gemm},
            chained=lambda f, x, w: f(x, w),
            out={
                "torch": lambda: lambda out, a, b: torch.mm(a, b, out=out),
                "cutekernels": lambda: lambda out, a, b: ck.gemm(a, b, out=out),
            },
        ),
        Case(
            "rms_norm",
            lambda step, device, dtype: (_rows(step, 3584, device, dtype), norm(step, device, dtype)),
            {
                "torch": lambda: lambda x, w: F.rms_norm(x, (3584,), w, 1e-6),
                "liger": _liger("rms_norm"),
                "cutekernels": lambda: ck.rms_norm,
            },
            chained=lambda f, x, w: f(x, w),
            out={"cutekernels": lambda: lambda out, x, w: ck.rms_norm(x, w, out=out)},
        ),
        Case(
            "layer_norm",
            lambda step, device, dtype: (
                _rows(step, 3584, device, dtype),
                norm(step, device, dtype),
                bias(step, device, dtype),
            ),
            {
                "torch": lambda: lambda x, w, b: F.layer_norm(x, (3584,), w, b),
                "cutekernels": lambda: ck.layer_norm,
            },
        ),
        Case(
            "silu_mul",
            lambda step, device, dtype: (
                _rows(step, 3584, device, dtype),
                _rows(step, 3584, device, dtype),
            ),
            {
                "torch": lambda: lambda g, u: F.silu(g) * u,
                "liger": _liger("silu_mul"),
                "cutekernels": lambda: ck.silu_mul,
            },
            chained=lambda f, x, u: f(x, u),
        ),
        Case(
            "linear_silu_mul",
            lambda step, device, dtype: (_rows(step, 3584, device, dtype), gate_up(step, device, dtype)),
            {
                "torch": lambda: lambda x, w: F.silu((y := F.linear(x, w))[..., :896]) * y[..., 896:],
                "cutekernels": lambda: ck.linear_silu_mul,
            },
        ),
        Case("embedding", ids, {"torch": lambda: F.embedding, "cutekernels": lambda: ck.embedding}),
        Case("rope", rope_of, {"torch": lambda: rotate, "cutekernels": lambda: ck.rope}),
        _attention(128),
        _attention(1024),
    ]


# ---- timing ---------------------------------------------------------------------------------------------


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _leaves(operands: Operands, op: str) -> list[Tensor]:
    fixed = 1 if op == "rope" else len(operands)  # tables have no gradient, and the first result is of q alone
    return [t for t in operands[:fixed] if t.is_floating_point()]


def _samples(case: Case, way: str, function: Function, device: torch.device, dtype: torch.dtype) -> Callable[[], float]:
    """A function that takes one sample, in µs a call."""
    if way == "graph":
        torch.compiler.reset()
        assert case.chained is not None
        chained = case.chained

        def chain(*operands: Any) -> Any:
            x, *rest = operands
            for _ in range(CHAIN):
                x = chained(function, x, *rest)
            return x

        compiled = torch.compile(chain, dynamic=False)
        sets = [tuple([t.detach() for t in case.operands(2 * i, device, dtype)]) for i in range(2)]
        for operands in sets:
            with torch.no_grad():
                compiled(*operands)

        def sample_graph() -> float:
            _wait()
            with torch.no_grad():
                begin = time.perf_counter_ns()
                for operands in sets:
                    compiled(*operands)
                taken = time.perf_counter_ns() - begin
            _wait()
            return taken / (len(sets) * CHAIN * 1e3)

        return sample_graph

    def sample() -> float:
        calls = []
        for step in range(CALLS):
            operands = case.operands(step, device, dtype)
            if way in ("forward", "backward"):
                operands = tuple([t if isinstance(t, torch.nn.Parameter) else _graded(t) for t in operands])
                if case.op == "rope":
                    operands = (*operands[:2], *[t.detach() for t in operands[2:]])
            elif way == "out":
                operands = (torch.empty_like(operands[0]), *operands)
            calls.append(operands)
        graded = way in ("forward", "backward")
        with torch.set_grad_enabled(graded):
            if way == "backward":
                made = [_first(function(*operands)) for operands in calls]
                given = [torch.randn_like(y) for y in made]
                leaves = [_leaves(operands, case.op) for operands in calls]
                _wait()
                begin = time.perf_counter_ns()
                for y, inputs, g in zip(made, leaves, given, strict=True):
                    torch.autograd.grad(y, inputs, g)
            else:
                _wait()
                begin = time.perf_counter_ns()
                for operands in calls:
                    function(*operands)
            taken = time.perf_counter_ns() - begin
        _wait()
        return taken / (CALLS * 1e3)

    return sample


def _graded(t: Tensor) -> Tensor:
    return t.requires_grad_() if t.is_floating_point() else t


def _first(made: Any) -> Tensor:
    y: Tensor = made[0] if isinstance(made, tuple) else made
    return y


def entered(call: Callable[[], object]) -> int:
    """Functions of this package that ``call`` enters."""
    count = 0

    def see(frame: Any, event: str, arg: object) -> None:
        nonlocal count
        count += event == "call" and frame.f_code.co_filename.startswith(PACKAGE)

    sys.setprofile(see)
    try:
        call()
    finally:
        sys.setprofile(None)
    return count


def run(
    some: Sequence[Case], rounds: int, device: torch.device, dtype: torch.dtype, stamp: dict[str, str]
) -> Iterator[Row]:
    """A row of each case, way and contender. ``config`` holds how many functions were entered, for ours."""
    for case in some:
        ways = (*case.ways, *(("out",) if case.out else ()), *(("graph",) if case.chained else ()))
        for way in ways:
            samplers: dict[str, Callable[[], float]] = {}
            for name, load in (case.out if way == "out" else case.contenders).items():
                common = (case.op, "host", way, case.op, 1.0, 0.0, name)
                try:
                    function = load()
                except ImportError as error:
                    yield Row(*common, "absent", str(error)[:200], stamp=stamp)
                    continue
                samplers[name] = _samples(case, way, function, device, dtype)
                for _ in range(3):
                    samplers[name]()
            times: dict[str, list[float]] = {name: [] for name in samplers}
            gc.collect()
            gc.disable()
            for _ in range(rounds):
                for name, sampler in samplers.items():
                    times[name].append(sampler())
            gc.enable()
            for name, found in times.items():
                found.sort()
                count = ""
                if name == "cutekernels" and way in ("no_grad", "forward"):
                    operands = case.operands(0, device, dtype)
                    with torch.set_grad_enabled(way == "forward"):
                        function = case.contenders[name]()
                        function(*operands)
                        count = f"entered={entered(lambda: function(*operands))}"  # noqa: B023
                yield Row(
                    case.op,
                    "host",
                    way,
                    case.op,
                    1.0,
                    0.0,
                    name,
                    "ok",
                    config=count,
                    l2="warm",
                    rounds=rounds,
                    median_us=median(found),
                    p20_us=found[len(found) // 5],
                    p80_us=found[-1 - len(found) // 5],
                    cpu_us=median(found),
                    stamp=stamp,
                )


# ---- command line ---------------------------------------------------------------------------------------


@app.command()
def command(
    match: Annotated[list[str] | None, typer.Option(help="Only ops with one of these in their name.")] = None,
    rounds: Annotated[int, typer.Option(min=5, help="Samples of each contender.")] = 15,
    out: Annotated[Path | None, typer.Option(help="Folder; default bench/results/<gpu>/host.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List the cases and contenders; time nothing.")] = False,
    commit: Annotated[str | None, typer.Option(help="The commit under test, where .git was left behind.")] = None,
) -> None:
    """Time the host's part of our ops beside their peers, and record a row of each case, way and contender."""
    some = [case for case in cases() if not match or any(each in case.op for each in match)]
    if not some:
        terminal.fail(f"no op has {' or '.join(map(repr, match or ()))} in its name; --dry-run lists them", code=2)
    if dry_run:
        for case in some:
            terminal.show(f"{case.op}: {', '.join(case.contenders)}")
        return
    try:
        gpu = gpus.lookup("auto")
    except UnknownGpu:
        terminal.fail("no CUDA device is visible, and launches are part of a call; --dry-run lists what would be timed")
    path = (out or HERE / "results" / gpu.name / "host") / "host.jsonl"
    rows: list[Row] = []
    for row in run(some, rounds, torch.device("cuda"), torch.bfloat16, environment.stamp(gpu.name, commit)):
        rows.append(row)
        write(path, rows)
    terminal.show(table(rows))
    terminal.say(f"{len(rows)} rows in {path}")


def table(rows: list[Row]) -> Table:
    """A line of each op and way: µs of each contender, and ours over torch's."""
    names = list(dict.fromkeys(row.contender for row in rows))
    title = f"µs of host time a call on {rows[0].stamp.get('gpu', '?')}'s host"
    shown = Table("op", "way", *names, "ours / torch", "entered", title=title)
    for op, way in dict.fromkeys((row.op, row.problem) for row in rows):
        found = {row.contender: row for row in rows if (row.op, row.problem) == (op, way)}
        times = {name: row.median_us for name, row in found.items() if row.median_us is not None}
        ratio = times["cutekernels"] / times["torch"] if {"cutekernels", "torch"} <= times.keys() else None
        count = found["cutekernels"].config.removeprefix("entered=") if "cutekernels" in found else ""
        cells = ["" if name not in found else f"{t:.1f}" if (t := times.get(name)) else "-" for name in names]
        shown.add_row(op, way, *cells, "" if ratio is None else f"{ratio:.2f}", count)
    return shown
