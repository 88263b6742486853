"""A toy op, a toy GPU machine and a toy clock, for tests of the tuner."""

from __future__ import annotations

import random
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from cutekernels import gpu as gpus
from cutekernels.autotune.job import Task
from cutekernels.autotune.requests import VENDOR, Measure, Outcome, Prepare
from cutekernels.backends import Facts
from cutekernels.conditions import Conditions
from cutekernels.errors import UnsupportedProblem
from cutekernels.isolate import ChildFailure
from cutekernels.op import Config, Op, Problem, Work, extent, knob, ladder, plain

H200 = gpus.lookup("h200")
A100 = gpus.lookup("a100")


@dataclass(frozen=True)
class ToyProblem(Problem):
    m: int = extent(ladder)
    n: int = extent()
    dtype: str = plain("bf16", "fp16")


@dataclass(frozen=True)
class ToyConfig(Config):
    tile: int = knob(16, 32, 64, 128)
    warps: int = knob(1, 2, 4, 8)
    fast: bool = knob(False, True)


class ToyOp(Op[ToyProblem, ToyConfig]):
    """Faster with larger tiles, up to 64; ``tile=128`` needs 4 warps; the default is the slowest valid one."""

    name = "toy"
    revision = 3
    suite = ("m=16 n=64",)
    Problem = ToyProblem
    Config = ToyConfig

    def why_not(self, p: ToyProblem, c: ToyConfig, gpu: Any) -> str | None:
        if c.tile == 128 and c.warps < 4:
            return f"a tile of 128 needs 4 warps; there are {c.warps}"
        return None

    def default(self, p: ToyProblem, gpu: Any) -> ToyConfig:
        return ToyConfig(16, 1, False)

    def estimate_us(self, p: ToyProblem, c: ToyConfig, gpu: Any) -> float:
        return 1000.0 / (c.tile * c.warps)

    def build(self, p: ToyProblem, c: ToyConfig, gpu: Any) -> Any:
        raise NotImplementedError

    def bind(self, p: ToyProblem, c: ToyConfig, kernel: Callable[..., Any]) -> Callable[..., Any]:
        return kernel

    def outputs(self, p: ToyProblem, *args: Any) -> Any:
        raise NotImplementedError

    def sample(self, p: ToyProblem, device: str, seed: int) -> Any:
        raise NotImplementedError

    def reference(self, p: ToyProblem, *args: Any) -> Any:
        raise NotImplementedError

    def work(self, p: ToyProblem) -> Work:
        return Work(2.0 * p.m * p.n, 2.0 * (p.m + p.n))


TOY = ToyOp()
PROBLEM = ToyProblem(m=16, n=64)
VALID = tuple(TOY.valid(PROBLEM, H200))
DEFAULT = TOY.default(PROBLEM, H200)
BEST = ToyConfig(64, 8, True)


SEEN, VENDOR_US = Conditions(1700.0, 51.0, 480.0), 80.0


def find(name: str) -> ToyOp:
    if name != "toy":
        raise UnsupportedProblem(f"no op is called {name!r}; known: toy")
    return TOY


def task(trials: int = 10, text: str = "m=16 n=64") -> Task:
    return Task(TOY, ToyProblem.parse(text), trials)


def true_us(config: Config) -> float:
    """The toy GPU's time for a config: distinct for each, BEST the fastest."""
    assert isinstance(config, ToyConfig)
    reach = min(config.tile, 64) - (config.tile == 128) * 8
    return 100.0 - reach * 0.5 - config.warps * 2.0 - config.fast * 5.0


@dataclass
class ToyMachine:
    """A Runtime whose kernels take ``law(config)`` µs; chosen configs fail in chosen ways. Advances its own clock.

    ``spoiled_compiles`` and ``spoiled_measures``: failures of a config's first compiles and measurements, in order.
    """

    law: Callable[[Config], float] = true_us
    noise: float = 0.002
    width: int = 3
    facts: dict[Config, Facts] = field(default_factory=dict)
    compile_failures: dict[Config, ChildFailure] = field(default_factory=dict)
    failures: dict[Config, ChildFailure] = field(default_factory=dict)
    final_failures: dict[Config, ChildFailure] = field(default_factory=dict)
    spoiled_compiles: dict[Config, list[ChildFailure]] = field(default_factory=dict)
    spoiled_measures: dict[Config, list[ChildFailure]] = field(default_factory=dict)
    wrong: dict[Config, float] = field(default_factory=dict)
    now: float = 0.0
    seconds_per_measure: float = 1.0
    compiled: list[Config] = field(default_factory=list)
    measured: list[Measure] = field(default_factory=list)
    prepared: list[Prepare] = field(default_factory=list)
    refreshed: int = 0
    on_measure: Callable[[Measure], None] = lambda request: None

    def clock(self) -> float:
        return self.now

    def compile(self, op: Any, problem: Any, config: Config, gpu: Any) -> Future[Facts]:
        self.compiled.append(config)
        future: Future[Facts] = Future()
        future.set_running_or_notify_cancel()
        if self.spoiled_compiles.get(config):
            future.set_exception(self.spoiled_compiles[config].pop(0))
        elif config in self.compile_failures:
            future.set_exception(self.compile_failures[config])
        else:
            future.set_result(self.facts.get(config, Facts(64, 0, 1024)))
        return future

    def prepare(self, request: Prepare) -> None:
        self.prepared.append(request)

    def measure(self, request: Measure) -> dict[str, Outcome]:
        self.measured.append(request)
        self.now += self.seconds_per_measure
        self.on_measure(request)
        configs = [ToyConfig.parse(text) for text in request.configs]
        for config in configs:
            failures = self.final_failures if request.prepare.seed else self.failures
            if config in failures:
                raise failures[config]
            if self.spoiled_measures.get(config):
                raise self.spoiled_measures[config].pop(0)
        outcomes = {}
        drift = random.Random(len(self.measured)).uniform(0.8, 1.2)  # each measurement finds other clocks
        for text, config in zip(request.configs, configs, strict=True):
            noise = random.Random(f"{text} {len(self.measured)}")
            us = tuple(
                self.law(config) * drift * noise.uniform(1 - self.noise, 1 + self.noise) for _ in range(request.rounds)
            )
            error = self.wrong.get(config, 0.3)
            outcomes[text] = Outcome(error, us if error <= 1 else (), SEEN if request.final else None)
        if request.final:
            outcomes[VENDOR] = Outcome(0.0, (VENDOR_US * drift,) * request.rounds)
        return outcomes

    def refresh(self) -> None:
        self.refreshed += 1
