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
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
import typer
from rich.table import Table
from torch import Tensor

import cutekernels as ck
from bench import wall
from bench.rows import Row
from bench.wall import Commit, DryRun, Match, Out, Rounds
from cutekernels import environment, terminal

PACKAGE = str(Path(ck.__file__).parent)
CALLS, CHAIN = 16, 32
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

Function = Callable[..., Any]
Maker = Callable[[int, torch.device, torch.dtype], Tensor]


@dataclass(frozen=True)
class HostCase:
    """One op. Every maker gives one operand of ``(step, device, dtype)``: weights are shared by each other step."""

    op: str
    makers: Sequence[Maker]
    theirs: Function  # torch's
    ours: Function
    others: dict[str, Callable[[], Function]] = field(default_factory=dict)
    """Other contenders: a function without arguments gives each, or raises ImportError."""
    out: dict[str, Function] = field(default_factory=dict)
    """Contenders of the way ``out``, called with a result in front."""
    chained: bool = False
    """Whether it has the way ``graph``: the result is then the next call's first operand."""
    tables: int = 0
    """How many operands, the last ones, have no gradient; the first result is then of the first operand alone."""

    @property
    def ways(self) -> tuple[str, ...]:
        return ("no_grad", "forward", "backward", *(["out"] if self.out else []), *(["graph"] if self.chained else []))

    def contenders(self, way: str) -> dict[str, Function]:
        """Functions by name; those of ``others`` are to be called for a contender, except of the way ``out``."""
        return self.out if way == "out" else {"torch": self.theirs, **self.others, "cutekernels": self.ours}

    def operands(self, step: int, device: torch.device, dtype: torch.dtype) -> tuple[Any, ...]:
        return tuple([make(step, device, dtype) for make in self.makers])

    def leaves(self, operands: Sequence[Tensor], *, of_first: bool = False) -> list[Tensor]:
        """Those that have gradients; ``of_first``: on which the first result depends."""
        some = operands[:1] if of_first and self.tables else operands[: len(operands) - self.tables]
        return [t for t in some if t.is_floating_point()]


def _weights(*shape: int) -> Maker:
    made: dict[tuple[int, str], Tensor] = {}

    def weight(step: int, device: torch.device, dtype: torch.dtype) -> Tensor:
        key = step % 2, device.type
        if key not in made:
            made[key] = torch.nn.Parameter(torch.randn(shape, device=device, dtype=dtype) / shape[-1] ** 0.5)
        return made[key]

    return weight


def _rows(*shape: int, rows: int = 512, batched: bool = False) -> Maker:
    """Activations of ``rows``, or half of them at each other pair of steps."""
    lead = (1,) if batched else ()
    return lambda step, device, dtype: torch.randn(
        (*lead, rows if step // 2 % 2 else rows // 2, *shape), device=device, dtype=dtype
    )


def _ids(step: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    return torch.randint(0, 32000, (512 if step // 2 % 2 else 256,), device=device)


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


def _liger_norm() -> Function:
    from liger_kernel.ops import rms_norm

    apply = rms_norm.LigerRMSNormFunction.apply
    return lambda x, w: apply(x, w, 1e-6, 0.0, "llama", False)


def _liger_gate() -> Function:
    from liger_kernel.ops import swiglu

    function: Function = swiglu.LigerSiLUMulFunction.apply
    return function


def _rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    c, s = (torch.cat([t, t], -1)[: q.shape[1], None].to(q.dtype) for t in (cos, sin))
    half = [torch.cat([-t[..., 64:], t[..., :64]], -1) for t in (q, k)]
    return q * c + half[0] * s, k * c + half[1] * s


def _gate(x: Tensor, w: Tensor) -> Tensor:
    return F.silu((y := F.linear(x, w))[..., :896]) * y[..., 896:]


def cases() -> list[HostCase]:
    """Every case; weights are made when one runs."""
    x, square, norm, bias = _rows(3584), _weights(3584, 3584), _weights(3584), _weights(3584)

    def heads(length: int, *counts: int) -> list[Maker]:
        return [_rows(count, 128, rows=length, batched=True) for count in counts]

    def angles(step: int, device: torch.device, dtype: torch.dtype) -> Tensor:
        return torch.rand(512, 64, device=device).mul_(2).sub_(1)  # cosines and sines: any numbers do

    def attention(length: int) -> HostCase:
        others = {"flash-attn-4": _flash}
        ours = lambda q, k, v: ck.attention(q, k, v, causal=True)  # noqa: E731
        return HostCase(f"attention {length}", heads(length, 32, 8, 8), _sdpa, ours, others)

    into = {"torch": lambda out, a, b: torch.mm(a, b, out=out), "cutekernels": lambda out, a, b: ck.gemm(a, b, out=out)}
    normed = {"cutekernels": lambda out, x, w: ck.rms_norm(x, w, out=out)}
    liger, gates = {"liger": _liger_norm}, {"liger": _liger_gate}
    table, gate_up = _weights(32000, 1024), _weights(1792, 3584)
    return [
        HostCase("linear", (x, square), F.linear, ck.linear, chained=True),
        HostCase("linear bias", (x, square, bias), F.linear, ck.linear),
        HostCase("gemm", (x, square), torch.mm, ck.gemm, out=into, chained=True),
        HostCase("rms_norm", (x, norm), lambda x, w: F.rms_norm(x, (3584,), w, 1e-6), ck.rms_norm, liger, normed, True),
        HostCase("layer_norm", (x, norm, bias), lambda x, w, b: F.layer_norm(x, (3584,), w, b), ck.layer_norm),
        HostCase("silu_mul", (x, x), lambda g, u: F.silu(g) * u, ck.silu_mul, gates, chained=True),
        HostCase("linear_silu_mul", (x, gate_up), _gate, ck.linear_silu_mul),
        HostCase("embedding", (_ids, table), F.embedding, ck.embedding),
        HostCase("rope", (*heads(512, 32, 8), angles, angles), _rotate, ck.rope, tables=2),
        attention(128),
        attention(1024),
    ]


# ---- timing ---------------------------------------------------------------------------------------------


def _samples(
    case: HostCase, way: str, function: Function, device: torch.device, dtype: torch.dtype
) -> Callable[[], float]:
    """A function that takes one sample, in µs a call."""
    graded = way in ("forward", "backward")

    def timed(calls: Sequence[Callable[[], object]], count: int) -> float:
        wall.wait(device)
        begin = time.perf_counter_ns()
        for call in calls:
            call()
        taken = time.perf_counter_ns() - begin
        wall.wait(device)
        return taken / (count * 1e3)

    if way == "graph":
        torch.compiler.reset()

        def chain(x: Any, *rest: Any) -> Any:
            for _ in range(CHAIN):
                x = function(x, *rest)
            return x

        compiled = torch.no_grad()(torch.compile(chain, dynamic=False))
        sets = [[t.detach() for t in case.operands(2 * i, device, dtype)] for i in range(2)]
        graphs = [partial(compiled, *operands) for operands in sets]
        return lambda: timed(graphs, len(sets) * CHAIN)

    def sample() -> float:
        calls = []
        for step in range(CALLS):
            operands = case.operands(step, device, dtype)
            if graded:
                for leaf in case.leaves(operands):
                    leaf.requires_grad_()
            calls.append((torch.empty_like(operands[0]), *operands) if way == "out" else operands)
        with torch.set_grad_enabled(graded):
            bound = [partial(function, *operands) for operands in calls]
            if way == "backward":
                made = [y[0] if isinstance(y := call(), tuple) else y for call in bound]
                leaves = [case.leaves(operands, of_first=True) for operands in calls]
                given = [torch.randn_like(y) for y in made]
                bound = [partial(torch.autograd.grad, *one) for one in zip(made, leaves, given, strict=True)]
            return timed(bound, CALLS)

    return sample


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
    some: Sequence[HostCase], rounds: int, device: torch.device, dtype: torch.dtype, stamp: dict[str, str]
) -> Iterator[Row]:
    """A row of each case, way and contender. ``config`` holds how many functions were entered, for ours."""
    for case in some:
        for way in case.ways:
            place = (case.op, "host", way, case.op)
            samplers: dict[str, Callable[[], float]] = {}
            for name, function in case.contenders(way).items():
                try:
                    function = function() if way != "out" and name in case.others else function
                except ImportError as error:
                    yield wall.untimed(place, name, error, stamp=stamp)
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
            for name, us in times.items():
                count = ""
                if name == "cutekernels" and way in ("no_grad", "forward"):
                    with torch.set_grad_enabled(way == "forward"):
                        call = partial(case.ours, *case.operands(0, device, dtype))
                        call()
                        count = f"entered={entered(call)}"
                yield wall.timed(place, name, us, config=count, cpu_us=median(us), stamp=stamp)


# ---- command line ---------------------------------------------------------------------------------------


@app.command()
def command(
    match: Match = None, rounds: Rounds = 15, out: Out = None, dry_run: DryRun = False, commit: Commit = None
) -> None:
    """Time the host's part of our ops beside their peers, and record a row of each case, way and contender."""
    some = wall.chosen(cases(), match, lambda case: case.op)
    if dry_run:
        for case in some:
            terminal.show(f"{case.op}: {', '.join(case.contenders(''))}")
        return
    gpu = wall.detect_gpu()
    path = (out or wall.RESULTS / gpu.name / "host") / "host.jsonl"
    stamp = environment.stamp(gpu.name, commit)
    wall.record(run(some, rounds, torch.device("cuda"), torch.bfloat16, stamp), path, table)


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
