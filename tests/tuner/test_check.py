"""``cutekernels db check``: winners beside defaults, timed by a fake GPU on which one has become slow."""

from __future__ import annotations

import json
from concurrent.futures import Future
from typing import Any, Self

import pytest

from cutekernels import cli, db, environment, gpu, introspection
from cutekernels.autotune import runtime
from cutekernels.autotune.requests import Measure, Outcome
from cutekernels.backends import Facts
from cutekernels.isolate import ChildFailure
from cutekernels.ops import registry
from tests.command_line import invoke

H200 = gpu.lookup("h200")
OP = registry.get("silu_mul")


class Machine:
    """A runtime on which each problem's default takes ``default_us``, and another config what ``us`` says."""

    def __init__(self, us: dict[str, Any], default_us: dict[str, float]) -> None:
        self.us, self.default_us = us, default_us

    def __call__(self, jobs: int) -> Self:
        return self

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        pass

    def compile(self, op: Any, problem: Any, config: Any, spec: Any) -> Future[Facts]:
        done: Future[Facts] = Future()
        done.set_result(Facts(32, 0, 0))
        return done

    def measure(self, request: Measure) -> dict[str, Outcome]:
        text = request.prepare.problem
        found = self.us[text]
        if isinstance(found, Exception):
            raise found
        default, *rest = request.configs
        assert default == str(OP.default(OP.Problem.parse(text), H200))
        outcomes = {other: Outcome(3.0 if found == 0 else 0.5, (found,) * request.rounds) for other in rest}
        return outcomes | {default: Outcome(0.5, (self.default_us[text],) * request.rounds)}


@pytest.fixture
def winners(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Those that serve on the GPU which is here, other configs than the default first."""
    monkeypatch.setattr(gpu, "detect", lambda *args: H200)
    with db.open() as opened:
        found = [w for w in opened.winners(gpu="h200", op="silu_mul", origin="measured") if w.serves]
    return sorted(found, key=lambda w: w.config_text == str(OP.default(OP.Problem.parse(w.problem_text), H200)))


def test_a_winner_that_became_slow_is_found(winners: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    then = {w.problem_text: w.median_us for w in winners}

    def check(us: dict[str, Any], *words: str) -> tuple[int, dict[str, str], str]:
        monkeypatch.setattr(runtime, "LocalRuntime", Machine(then | us, {text: 1.05 * t for text, t in then.items()}))
        done = invoke(cli.app, "db", "check", "--op", "silu_mul", "--format", "json", *words)
        return done.exit_code, {row["problem"]: row["state"] for row in json.loads(done.stdout)}, done.stderr

    assert check({}) == (0, {}, f"0 of {len(then)} winners of h200 fell behind or failed\n")
    assert check({}, "--all")[1] == dict.fromkeys(then, "holds")
    slow, slower, lost, wrong, *_ = then
    us = {slow: 1.2 * then[slow], slower: 1.12 * then[slower], lost: ChildFailure("died\nof it"), wrong: 0.0}
    code, states, told = check(us)
    assert code == 1 and told.startswith(f"4 of {len(then)} winners") and "tune JOB --force" in told
    assert states.pop(wrong).endswith("is wrong, 3 times the tolerance")
    assert states.pop(slower).startswith("slower than it was")
    assert states == {slow: "behind the default", lost: "failed: died"}
    assert check(us, "--bound", "1.3")[1].keys() == {lost, wrong}


def test_without_a_gpu_nothing_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    done = invoke(cli.app, "db", "check")
    assert (done.exit_code, done.stdout) == (2, "")
    assert "no CUDA device is visible" in done.stderr


# ---- versions -----------------------------------------------------------------------------------------------


def test_another_compiler_is_one_note(winners: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """In ``explain`` of the winner's own compiler, in ``doctor`` of all of the GPU's winners."""
    here = dict(winners[0].environment)
    monkeypatch.setattr(environment, "compilers", lambda: here | {"triton": "3.8.0"})

    def notes(op: str, problem: str) -> list[str]:
        return [value for name, value in introspection.explain(op, problem, gpu="h200").rows if name == "note"]

    told = f"measured under Triton {here['triton']}, here 3.8.0"
    assert notes("silu_mul", winners[0].problem_text) == [told]
    assert notes("gemm", "m=16 n=4096 k=4096") == []
    assert notes("silu_mul", "rows=3 cols=24") == []
    monkeypatch.setattr(gpu, "lookup", lambda name, lookup=gpu.lookup: lookup("h200" if name == "auto" else name))
    (finding,) = cli._drift()
    assert finding.value.endswith(f" {told}") and "db check" in finding.remedy
    monkeypatch.setattr(environment, "compilers", lambda: here)
    assert cli._drift() == [] and notes("silu_mul", winners[0].problem_text) == []
