"""An op is one declaration: ``scale``, written below, is tuned, dispatched, explained and looked up with no other code.

Its kernels run on the CPU and one of its configs is wrong on purpose; the only other line it needs anywhere is that of
the registry. (The name of its toy DSL stands in ``compile`` as the real ones do.)
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from bench import run as bench_run
from bench.suites import Case
from cutekernels import cli, dispatch, introspection, verify
from cutekernels import compile as compiler
from cutekernels import gpu as gpus
from cutekernels.autotune import run as autotune_run
from cutekernels.autotune.fleet import OneSlot
from cutekernels.autotune.requests import Measure, Outcome, Prepare
from cutekernels.backends import Artifact, Facts
from cutekernels.compilers import compile_candidate
from cutekernels.db.storage import snapshot as snapshots
from cutekernels.db.storage.store import Store
from cutekernels.errors import CompileError, InvalidConfig, UnsupportedProblem
from cutekernels.gpu import GpuSpec
from cutekernels.op import Config, Op, Problem, Work, extent, knob, ladder, plain
from cutekernels.ops import registry
from tests.command_line import invoke

H200, L40S = gpus.lookup("h200"), gpus.lookup("l40s")


# ---- the declaration ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ScaleProblem(Problem):
    rows: int = extent(ladder)
    cols: int = extent()
    sign: str = plain("plus", "minus")


@dataclass(frozen=True)
class ScaleConfig(Config):
    block: int = knob(1, 2, 4, 8)
    ends: str = knob("all", "cut")


class Scale(Op[ScaleProblem, ScaleConfig]):
    """``out = +-factor * x``, ``block`` rows at a time. ``ends="cut"`` is fast and forgets the last row."""

    name = "scale"
    revision = 1
    suite = ("rows=4 cols=8", "rows=9 cols=5 sign=minus", "rows=0 cols=3")
    Problem = ScaleProblem
    Config = ScaleConfig

    def why_not(self, p: ScaleProblem, c: ScaleConfig, gpu: GpuSpec) -> str | None:
        return f"block={c.block} is more than the {p.rows} rows there are" if c.block > max(1, p.rows) else None

    def default(self, p: ScaleProblem, gpu: GpuSpec) -> ScaleConfig:
        return ScaleConfig(1, "all")

    def estimate_us(self, p: ScaleProblem, c: ScaleConfig, gpu: GpuSpec) -> float:
        return 1.0 + 40.0 / c.block - (c.ends == "cut")

    def build(self, p: ScaleProblem, c: ScaleConfig, gpu: GpuSpec) -> Artifact:
        return Listing({"sign": -1 if p.sign == "minus" else 1, "block": c.block, "ends": c.ends})

    def bind(self, p: ScaleProblem, c: ScaleConfig, kernel: Callable[..., Any]) -> Callable[..., Any]:
        return kernel

    def outputs(self, p: ScaleProblem, *args: Any) -> tuple[Tensor, ...]:
        return (torch.empty_like(args[0]),)

    def sample(self, p: ScaleProblem, device: str, seed: int) -> tuple[Any, ...]:
        generator = torch.Generator(device).manual_seed(seed)
        return torch.randn(p.rows, p.cols, generator=generator, device=device), 1.5

    def reference(self, p: ScaleProblem, *args: Any) -> tuple[Tensor, ...]:
        x, factor = args
        return ((x.double() * (-factor if p.sign == "minus" else factor)).to(x.dtype),)

    def work(self, p: ScaleProblem) -> Work:
        return Work(1.0 * p.rows * p.cols, 8.0 * p.rows * p.cols)


class Listing(Artifact):
    """Code of the toy's compiler: a few words in JSON, and an interpreter for them."""

    backend: ClassVar[str] = "listing"
    facts = Facts(registers=16, stack_bytes=0, smem_bytes=0)

    def __init__(self, program: dict[str, Any]) -> None:
        self.program = program

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(self.program))

    @classmethod
    def load(cls, path: Path) -> Callable[..., Any]:
        try:
            return cls(json.loads(path.read_text())).kernel()
        except ValueError as error:
            raise CompileError(f"{path} is no listing") from error

    def kernel(self) -> Callable[..., Any]:
        def launch(out: Tensor, x: Tensor, factor: float) -> None:
            rows = len(x) - (self.program["ends"] == "cut")
            for at in range(0, rows, self.program["block"]):
                end = min(rows, at + self.program["block"])
                torch.mul(x[at:end], self.program["sign"] * factor, out=out[at:end])

        return launch


SCALE = Scale()


# ---- a machine to tune on -------------------------------------------------------------------------------


class Here:
    """A tuning Runtime in this process: compiles and verifies for real, by the declaration alone; time is the model."""

    width = 2

    def __init__(self) -> None:
        self.measured: list[str] = []

    def compile(self, op: Any, problem: Any, config: Any, gpu: Any) -> Future[Facts]:
        future: Future[Facts] = Future()
        future.set_result(compiler.prepare(op, problem, config, gpu))
        return future

    def prepare(self, request: Prepare) -> None:
        self.op = registry.get(request.op)
        self.problem = self.op.Problem.parse(request.problem)
        self.args = self.op.sample(self.problem, "cpu", request.seed)
        self.outputs = self.op.outputs(self.problem, *self.args)

    def measure(self, request: Measure) -> dict[str, Outcome]:
        self.prepare(request.prepare)
        spec = request.prepare.gpu
        outcomes = {}
        for text in request.configs:
            config = self.op.Config.parse(text)
            launch = self.op.bind(self.problem, config, compiler.get(self.op, self.problem, config, spec))
            verify.poison(self.outputs)
            launch(*self.outputs, *self.args)
            expected = self.op.reference(self.problem, *self.args)
            error = verify.worst_error(self.outputs, expected, self.op.work(self.problem).flops)
            noise = random.Random(f"{text} {len(self.measured)}")
            us = self.op.estimate_us(self.problem, config, spec)
            times = tuple(us * noise.uniform(0.998, 1.002) for _ in range(request.rounds))
            outcomes[text] = Outcome(error, times if error <= 1 else ())
            self.measured.append(text)
        return outcomes

    def refresh(self) -> None:
        pass

    def __enter__(self) -> Here:
        return self

    def __exit__(self, *exc: object) -> None:
        pass


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Registers the toy op on a machine with an H200."""
    monkeypatch.setattr(registry, "OPS", (*registry.OPS, SCALE))
    monkeypatch.setattr(registry, "_loaded", {op.name: op for op in registry.OPS})
    monkeypatch.setitem(compiler._BACKENDS, "listing", f"{__name__}:Listing")
    monkeypatch.setattr(gpus, "detect", lambda device=None: H200)
    monkeypatch.setattr(snapshots, "_held", {})
    monkeypatch.setattr(dispatch, "_plans", {})
    monkeypatch.setattr(compiler, "_loaded", {})


@pytest.fixture
def job(tmp_path: Path) -> Path:
    file = tmp_path / "scales.toml"
    file.write_text(
        'name = "scales"\ntrials = 8\n[[tasks]]\nop = "scale"\nproblems = ["rows=32 cols=8", "rows=1 cols=8"]\n'
    )
    return file


def run(*words: str) -> Any:
    return invoke(cli.app, *words)


# ---- what follows from the declaration ------------------------------------------------------------------


@pytest.mark.parametrize("text", Scale.suite)
def test_a_plan_computes_the_reference(text: str) -> None:
    problem = ScaleProblem.parse(text)
    plan = dispatch.plan(SCALE, problem, 0)
    args = SCALE.sample(problem, "cpu", 0)
    outputs = SCALE.outputs(problem, *args)
    verify.poison(outputs)
    plan.launch(*outputs, *args)
    assert verify.worst_error(outputs, SCALE.reference(problem, *args), SCALE.work(problem).flops) <= 1
    assert plan.origin == "default"


def test_the_dispatcher_and_the_cache_know_it() -> None:
    (plan,) = introspection.warmup([("scale", "rows=4 cols=8")], 0)
    assert dispatch.plan(SCALE, ScaleProblem(4, 8), 0) is plan
    minus = dispatch.plan(SCALE, ScaleProblem(4, 8, "minus"), 0)
    assert minus.launch is not plan.launch
    assert len(list(compiler.directory().glob("*.listing"))) == 2
    assert compile_candidate(("scale", "rows=4 cols=8", "block=2 ends=all", L40S)) == Listing.facts
    with pytest.raises(InvalidConfig, match="block=8 is more than the 4 rows there are"):
        dispatch.plan(SCALE, ScaleProblem(4, 8), 0, "block=8 ends=all")


def test_it_is_tuned_and_the_dispatcher_uses_the_winner(job: Path) -> None:
    assert dispatch.plan(SCALE, ScaleProblem(30, 8), 0).origin == "default"
    report = autotune_run.tune(job, runtime=Here())
    assert report.ok
    assert [(t.problem, t.state) for t in report.tasks] == [("rows=32 cols=8", "tuned"), ("rows=1 cols=8", "tuned")]
    best = ScaleConfig(8, "all")  # "cut" is faster by the model, and wrong
    winner = report.tasks[0].winner
    assert winner is not None
    assert winner.config == str(best)
    assert winner.ratio is not None
    assert winner.ratio > 5
    with Store(readonly=True) as store:
        wrong = store.trials(op="scale", status="wrong_result")
        assert {ScaleConfig.parse(t.config).ends for t in wrong} == {"cut"}
        assert {ScaleConfig.parse(t.config).ends for t in store.trials(op="scale", status="ok")} == {"all"}
    dispatch.reload()
    tuned = dispatch.plan(SCALE, ScaleProblem(30, 8), 0)  # of the bucket rows=32
    assert (tuned.origin, tuned.config) == ("tuned", best)
    near = dispatch.resolve(SCALE, ScaleProblem(60, 8), H200)
    assert (near.origin, near.config) == ("nearest", best)
    one = dispatch.resolve(SCALE, ScaleProblem(1, 8), H200)
    assert (one.origin, one.config) == ("tuned", ScaleConfig(1, "all"))
    again = Here()
    assert autotune_run.tune(job, runtime=again).measured == 0
    assert again.measured == []


def test_it_is_predicted_for_an_absent_gpu(job: Path) -> None:
    report = autotune_run.tune(job, "l40s", runtime=Here())
    assert (report.origin, [t.state for t in report.tasks]) == ("predicted", ["predicted", "predicted"])
    dispatch.reload()
    choice = dispatch.resolve(SCALE, ScaleProblem(32, 8), L40S)
    assert (choice.origin, choice.config) == ("predicted", ScaleConfig(8, "cut"))  # nobody has run it yet
    assert dispatch.resolve(SCALE, ScaleProblem(32, 8), H200).origin == "default"


def test_explain_knows_it() -> None:
    told = introspection.explain("scale", "rows=30 cols=8 sign=minus", gpu_name="a100")
    rows = dict(told.rows)
    assert rows["bucket"] == "rows=32 cols=8 sign=minus"
    assert rows["config"] == "block=1 ends=all"
    assert rows["model"] == "41.00 us (analytical)"
    with pytest.raises(UnsupportedProblem, match="ScaleProblem needs cols"):
        introspection.explain("scale", "rows=30", gpu_name="a100")


def test_the_command_line_knows_it(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (row,) = json.loads(run("explain", "scale", "rows=30 cols=8", "--gpu", "h200", "--format", "json").stdout)
    assert (row["origin"], row["config"]) == ("default", "block=1 ends=all")
    monkeypatch.setattr(autotune_run, "LocalFleet", lambda *rest: OneSlot(H200, Here()))
    done = run("tune", str(job), "--format", "json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["tasks"][0]["config"] == "block=8 ends=all"
    winners = json.loads(run("db", "query", "--op", "scale", "--format", "json").stdout)
    assert {(w["problem"]["rows"], w["problem"]["cols"]) for w in winners} == {(32, 8), (1, 8)}
    dispatch.reload()
    (row,) = json.loads(run("explain", "scale", "rows=30 cols=8", "--gpu", "h200", "--format", "json").stdout)
    assert (row["origin"], row["config"]) == ("tuned", "block=8 ends=all")
    assert "asked: tuned" in row
    told = run("explain", "scale", "rows=2 cols=8", "--gpu", "h200", "--config", "block=4 ends=all")
    assert isinstance(told.exception, InvalidConfig)


@pytest.mark.parametrize("text", Scale.suite)
def test_the_bench_reads_its_suite_as_cases(text: str) -> None:
    op, problem = bench_run.parse_case(Case("scale", text, text))
    assert op is SCALE
    assert str(problem) == text


def test_without_its_line_in_the_registry_nobody_knows_it(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_loaded", {op.name: op for op in registry.OPS if op is not SCALE})
    result = run("explain", "scale", "rows=1 cols=1", "--gpu", "h200")
    assert isinstance(result.exception, UnsupportedProblem)
    assert "no op is called 'scale'" in str(result.exception)
    assert run("tune", str(job), "--gpu", "h200").exit_code == 2
