"""Timing of cases: all contenders of one case interleaved, by the tuner's own timer.

For each case: input sets are drawn, each contender is bound to them, run once and judged against fp64, captured,
then all are timed in interleaved rounds. A contender's failure becomes its row.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench import headtohead, stream, workloads
from bench.baselines import Contender, Inputs, Launch, Shapes, Workload, absent
from bench.rows import Row, write
from bench.suites import Case
from bench.workloads import parse_case
from cutekernels import dispatch, measure, verify
from cutekernels.errors import CompileError
from cutekernels.gpu import GpuSpec
from cutekernels.measure import Samples
from cutekernels.op import Work

ROUNDS = 30
CASE_BUDGET_US = 3e6  # timed device time of one case, all contenders together
# A row is wrong when an element is off by more than WRONG times the tolerance *and* the whole by more than NORM of
# itself: a peer that rounds the product before it adds C misses elements that cancel, and no more than those. Ours is
# held to the tolerance itself by the tests.
WRONG = 4.0
NORM = 0.02
_CPU_BUDGET_US = 20_000.0  # device time behind one round of the host's timing


@dataclass(frozen=True, slots=True)
class RunPlan:
    """Settings of a run, besides its cases."""

    suite: str
    gpu: GpuSpec
    stamp: dict[str, str]
    warm: bool = False
    rest_ms: float = 0.0
    rounds: int = ROUNDS
    device: str = "cuda"
    example: Path | None = None  # NVIDIA's tensorop_gemm.py
    alone: bool = False  # without peers, so nothing is compared


@dataclass(frozen=True, slots=True)
class Timer:
    """Clocks for the device and the host; tests replace them."""

    prepare: measure.MakeRound = measure.GraphRound
    cpu_us: Callable[..., Samples] = measure.cpu_us_per_call


def run(cases: Sequence[Case], plan: RunPlan, path: Path, timer: Timer, say: Callable[[list[Row]], None]) -> list[Row]:
    """Time ``cases`` and write ``path`` after each, so that an interrupted run keeps its measurements."""
    rows: list[Row] = []
    for case in cases:
        of_case = run_case(case, plan, contenders(case, plan, timer), timer)
        rows += of_case
        write(path, rows)
        say(of_case)
    return rows


# ---- contenders -----------------------------------------------------------------------------------------


def contenders(case: Case, plan: RunPlan, timer: Timer | None = None) -> list[Contender]:
    """Contenders of a case: the peers, baseline first; streaming kernels; then ours as dispatched, the default config
    where that differs. A winner that is the vendor's call is none of our kernels: the default takes its place. Of a
    suite ``headtohead`` ours are each body's fastest by ``timer``.
    """
    workload = workloads.get(case.op)
    if plan.suite == headtohead.SUITE:
        found = _bodies(case, plan, timer or Timer())
    else:
        found = _by_config(case, plan) if workload.configured else [ours("cutekernels")]
    if plan.alone:
        return found
    example = [workload.example(plan.example)] if plan.example is not None and workload.example is not None else []
    streams = [] if workload.streams is None else stream.contenders(*workload.streams(case), plan.gpu)
    return [*_peers(workload, plan.gpu), *example, *streams, *found]


def _peers(workload: Workload, gpu: GpuSpec) -> Sequence[Contender]:
    """Peers of a case; of a stand-in those alone that keep to what the other GPU has, the others absent."""
    if gpu.confined_to is None:
        return workload.peers
    kept, why = {peer.name for peer in workload.confined}, f"its kernels are not known to keep to what {gpu.name} has"
    return [*workload.confined, *(absent(peer.name, why) for peer in workload.peers if peer.name not in kept)]


def _by_config(case: Case, plan: RunPlan) -> list[Contender]:
    op, problem = parse_case(case)
    launches = workloads.get(case.op).launches
    if launches is not None:
        problem = launches(problem, plan.gpu)
    choice = dispatch.resolve(op, problem, plan.gpu)
    default = op.default(problem, plan.gpu)
    if choice.config.vendors:
        found = [ours("cutekernels", default, "default")]
    else:
        found = [dataclasses.replace(ours("cutekernels"), config=str(choice.config), origin=choice.origin)]
        if default != choice.config:
            found.append(ours("cutekernels (default)", default, "default"))
    return found


def _bodies(case: Case, plan: RunPlan, timer: Timer) -> list[Contender]:
    op, problem = parse_case(case)
    sets = _input_sets(case, problem, plan)

    def bind(config: Any) -> Sequence[Launch]:
        return workloads.get(case.op).ours(case, sets, config)

    found = [
        absent(f"cutekernels ({body})", origin) if config is None else ours(f"cutekernels ({body})", config, origin)
        for body, config, origin in headtohead.chosen(op, problem, plan.gpu, bind, timer.prepare)
    ]
    cute = workloads.get(case.op).cute
    return found if cute is None else [*found, _in_cute(cute, case, sets, timer)]


def _in_cute(cute: Shapes, case: Case, sets: Sequence[Inputs], timer: Timer) -> Contender:
    """The body in CuTe of an op that has none, in its fastest shape."""
    name = "cutekernels (cute)"
    try:
        shapes = cute(case, sets)
        best = headtohead.fastest(list(shapes), shapes.__getitem__, timer.prepare)
    except (CompileError, ImportError) as error:
        return absent(name, str(error))
    return Contender(name, lambda case, sets: cute(case, sets)[best], config=best, origin=f"fastest of {len(shapes)}")


def ours(name: str, config: Any = None, origin: str = "") -> Contender:
    """The public function, with ``config`` or the config that the dispatcher finds."""

    def bind(case: Case, sets: Sequence[Inputs]) -> Sequence[Launch]:
        return workloads.get(case.op).ours(case, sets, config)

    return Contender(name, bind, config="" if config is None else str(config), origin=origin)


# ---- one case -------------------------------------------------------------------------------------------


def run_case(case: Case, plan: RunPlan, who: Sequence[Contender], timer: Timer) -> list[Row]:
    """A row for each of ``who``, in their order."""
    _, problem = parse_case(case)
    sets = _input_sets(case, problem, plan)
    first = tuple([t.clone() for t in sets[0].updated])
    accumulate = getattr(problem, "accumulate", "fp32")
    truth = workloads.get(case.op).truth(case, sets[0])
    judge = partial(errors_of, truth=truth, work=workloads.work(case), accumulate=accumulate)
    with _accumulation(accumulate):
        candidates = [_Candidate(case, plan, w, sets, timer) for w in who]
        for candidate in candidates:
            for t, value in zip(sets[0].updated, first, strict=True):
                t.copy_(value)
            candidate.make_ready(judge)
        ready = {c.name: c.round for c in candidates if c.round is not None}
        limits: dict[str, Any] = {"budget_us": CASE_BUDGET_US, "rest_s": plan.rest_ms / 1e3}
        samples = {}
        if ready:
            samples = measure.time_interleaved(ready, rounds=plan.rounds, prepare=timer.prepare, **limits)
        baseline = None if plan.alone else samples.get(candidates[0].name)
        torch_error = None if plan.alone else candidates[0].error_abs
        streamed = min((s.median for n, s in samples.items() if n.startswith(stream.NAME)), default=None)
        return [c.row(samples.get(c.name), baseline, torch_error, streamed) for c in candidates]


def _input_sets(case: Case, problem: Any, plan: RunPlan) -> list[Inputs]:
    draw = workloads.get(case.op).inputs
    first = draw(case, problem, plan.device, 0)
    count = 1 if plan.warm else measure.l2_rotation(first.bytes, plan.gpu.l2_bytes)
    return [first, *(draw(case, problem, plan.device, seed) for seed in range(1, count))]


@contextlib.contextmanager
def _accumulation(accumulate: str) -> Iterator[None]:
    """cuBLAS's accumulation type for the duration of a case: fp16 where the case has it, else fp32."""
    flags: Any = torch.backends.cuda.matmul
    before = flags.allow_fp16_accumulation
    flags.allow_fp16_accumulation = accumulate == "fp16"
    try:
        yield
    finally:
        flags.allow_fp16_accumulation = before


def errors_of(
    written: tuple[Tensor, ...], truth: tuple[Tensor, ...], work: Work, accumulate: str
) -> tuple[float, float, bool]:
    """The worst error over its tolerance, the largest error, and whether the results are right."""
    expected = [t.to(w.dtype) for w, t in zip(written, truth, strict=True)]
    error = verify.worst_error(written, expected, work.flops, accumulate, work.depth)
    # Equal infinities have distance 0.
    off = [
        (torch.where(w == t, 0.0, w.double() - t), t.double().nan_to_num(posinf=0.0, neginf=0.0))
        for w, t in zip(written, truth, strict=True)
        if w.numel()
    ]
    largest = max((float(distance.abs().max()) for distance, _ in off), default=0.0)
    norms = [float(distance.norm() / value.norm().clamp_min(1e-30)) for distance, value in off]
    # Both are NaN where an element was left unwritten.
    return error, largest, error <= WRONG or all(norm <= NORM for norm in norms)


class _Candidate:
    """A contender of one case: bound, judged and timed, then turned into a row."""

    def __init__(self, case: Case, plan: RunPlan, who: Contender, sets: Sequence[Inputs], timer: Timer) -> None:
        self.contender = who
        self.name = who.name
        self.round: measure.Round | None = None
        self.error_abs: float | None = None
        self._launches: Sequence[Launch] = ()
        self._case, self._plan, self._sets, self._timer = case, plan, sets, timer
        self._row: dict[str, Any] = {
            **dataclasses.asdict(case),
            "suite": plan.suite,
            "contender": who.name,
            "config": who.config,
            "origin": who.origin,
            "status": "ok",
            "l2": "warm" if plan.warm else "cold",
            "rest_ms": plan.rest_ms,
            "sets": len(sets),
            "stamp": plan.stamp,
        }

    def make_ready(self, judge: Callable[[tuple[Tensor, ...]], tuple[float, float, bool]]) -> None:
        first = self._sets[0]
        try:
            self._launches = self.contender.bind(self._case, self._sets)
            verify.poison([t for t in first.results if all(t is not u for u in first.updated)])
            written = self._launches[0]()
            if self.contender.judged:
                error, self.error_abs, right = judge(written if isinstance(written, tuple) else (written,))
                self._row["error"] = error if error < float("inf") else None
                if not right:
                    self._fail("wrong_result", f"off by {error:.3g} times the tolerance")
            if self._row["status"] == "ok":
                self.round = self._timer.prepare(self._launches, 200.0)
        except ImportError as reason:
            self._fail("absent", str(reason))
        except Exception as error:  # noqa: BLE001  a peer may fail in any way; that is a result, and has its row
            self._fail("failed", f"{type(error).__name__}: {error}")

    def _fail(self, status: str, reason: str) -> None:
        self._row |= {"status": status, "reason": " ".join(reason.split())[:500]}

    def row(
        self, samples: Samples | None, baseline: Samples | None, torch_error: float | None, streamed_us: float | None
    ) -> Row:
        if self.error_abs is not None and torch_error:
            self._row["error_vs_torch"] = self.error_abs / torch_error
        if samples is None:
            return Row(**self._row)
        gpu, us, work = self._plan.gpu, samples.median, workloads.work(self._case)
        calls = int(min(200.0, max(20.0, _CPU_BUDGET_US / us)))
        self._row |= {
            "rounds": len(samples.us),
            "median_us": us,
            "p20_us": samples.p20,
            "p80_us": samples.p80,
            "tflops": work.flops / us / 1e6,
            "gbps": work.bytes / us / 1e3,
            "roofline_fraction": work.floor_us(gpu) / us,
            "mma_fraction": work.flops / us / 1e6 / gpu.mma_tflops if self._row["op"] == "gemm" else None,
            "stream_fraction": None if streamed_us is None else streamed_us / us,
            "cpu_us": self._timer.cpu_us(self._launches[0], calls=calls, rounds=5).median,
        }
        if baseline is not None:
            ratio = samples.ratio(baseline)
            self._row |= {"speedup": ratio.value, "speedup_low": ratio.low, "speedup_high": ratio.high}
        return Row(**self._row)
