"""Sweeps: how one is measured and read, and the models' estimates against the recorded ones."""

from __future__ import annotations

import json
import lzma
import math
from collections.abc import Iterator
from contextlib import nullcontext
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest

from bench import judge
from cutekernels import cli, gpu
from cutekernels.backends import Facts
from cutekernels.errors import CuteKernelsError
from cutekernels.isolate import ChildFailure
from cutekernels.ops import registry
from tests.tuner.toys import BEST, DEFAULT, H200, PROBLEM, TOY, VALID, ToyConfig, ToyMachine


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        ([1, 2, 3], [10, 20, 30], 1.0),
        ([1, 2, 3], [3, 2, 1], -1.0),
        ([1, 1, 2, 2], [1, 2, 3, 4], 0.894427),
        ([1, 1, 1], [1, 2, 3], None),
    ],
)
def test_rank_correlation(a: list[float], b: list[float], expected: float | None) -> None:
    found = judge.spearman(a, b)
    assert found == (expected if expected is None else pytest.approx(expected))


load = cache(judge.load)
real = judge.judge


@cache
def once(op: str, problem: str, us: tuple[tuple[str, float], ...], spec: gpu.GpuSpec) -> judge.Quality | None:
    return real(op, problem, dict(us), spec)


def quality(op: str, problem: str, us: dict[str, float], spec: gpu.GpuSpec) -> judge.Quality | None:
    """Quality of one problem's estimates, computed once for all tests that read the same rows."""
    return once(op, problem, tuple(us.items()), spec)


def of_sweeps(body: str = "", file: str = "", spec: gpu.GpuSpec = H200) -> list[judge.Quality]:
    """Today's models on the recorded sweeps or those of one file, of gemm's configs those of one body."""
    found = []
    for (op, problem), us in load(judge.SWEEPS / spec.name / file).items():
        own = us if op != "gemm" else {config: t for config, t in us.items() if body in config}
        found.append(quality(op, problem, own, spec))
    return [q for q in found if q]


def test_eight_favourites_hold_a_config_within_5_percent_nine_times_in_ten() -> None:
    """On an H200: gemm and attention on warp groups, and every memory-bound op."""
    found = of_sweeps("body=warpgroup")
    assert len(found) >= 125
    assert sum(q.top <= judge.NEAR for q in found) / len(found) >= 0.9
    for op, least in (("gemm", 0.8), ("attention", 0.65)):
        ranks = sorted(q.correlation or 0.0 for q in found if q.op == op)
        assert ranks[len(ranks) // 2] >= least, op


@pytest.mark.parametrize(("spec", "least"), [(H200, 0.8), (gpu.lookup("h100"), 0.5)], ids=lambda v: str(v))
def test_the_model_of_few_tokens_ranks(spec: gpu.GpuSpec, least: float) -> None:
    """Fitted to half of these problems, it ranks the other half as well: docs/notes/gemm.md#skinny_warpgroup-model."""
    found = [q for q in of_sweeps("body=skinny_warpgroup", spec=spec) if q.op == "gemm"]
    assert len(found) >= 15
    ranks = sorted(q.correlation or 0.0 for q in found)
    assert ranks[len(ranks) // 2] >= least
    assert all(q.top <= judge.NEAR for q in found)


def test_favourites_hold_on_an_h100() -> None:
    """Eight favourites hold a config within 5 % of the best that searches tried for 139 of 152 problems."""
    found = of_sweeps(spec=gpu.lookup("h100"))
    assert len(found) >= 150
    assert sum(q.top <= judge.NEAR for q in found) / len(found) >= 0.9
    defaults = sorted(q.default for q in found if q.op == "gemm" and q.default)
    assert len(defaults) >= 50
    assert defaults[len(defaults) // 2] <= 1.012
    assert defaults[int(0.95 * len(defaults))] <= 1.09


@pytest.mark.parametrize(
    ("of_searches", "defaults", "choices"),
    [(False, (30, 1.01, 1.06), (100, 1.01, 1.07)), (True, (55, 1.01, 1.08), (25, 1.03, 1.10))],
)
def test_gemms_defaults_are_near_the_best(
    of_searches: bool, defaults: tuple[int, float, float], choices: tuple[int, float, float]
) -> None:
    """On an H200. Of sweeps: nothing behind in the median, 3.4 % at the 95th percentile, sweeps of narrower spaces lack
    most; the model's choice among a sweep's configs on warp groups 0.3 and 6.7 %. Of searches, which go on from the
    model's favourites: 0.8 and 7.5 %, 2.9 and 9.5 %.
    """
    searched = {q.problem for q in of_sweeps(file="tuned.jsonl.xz")}

    def behind(body: str) -> list[judge.Quality]:
        return [q for q in of_sweeps(body) if q.op == "gemm" and (q.problem in searched) == of_searches]

    for found, (least, middle, most) in (
        ([q.default for q in behind("") if q.default], defaults),
        ([q.choice for q in behind("body=warpgroup")], choices),
    ):
        assert len(found) >= least
        assert sorted(found)[len(found) // 2] <= middle
        assert sorted(found)[int(0.95 * len(found))] <= most


def test_configs_of_older_sweeps_are_passed_over() -> None:
    rows = {"block=256 gone=1": 1.0, "nonsense": 2.0}
    assert judge.judge("rms_norm", "rows=16 cols=3584", rows, H200) is None


def command(*words: str) -> int:
    """The exit code of ``python -m bench`` with ``words``."""
    with pytest.raises(SystemExit) as end:
        cli.ended(partial(judge.app, list(words)))
    return int(end.value.code or 0)


def test_the_models_on_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(judge, "judge", quality)
    assert command("estimates", "--format", "json") == 0
    by_op = json.loads(capsys.readouterr().out)
    assert {"gemm", "attention", "rms_norm"} <= {row["op"] for row in by_op}
    assert command("estimates", "--every", "--format", "json") == 0
    assert len(json.loads(capsys.readouterr().out)) > len(by_op)
    assert command("estimates", "--gpu", "nonsense") == command("estimates", "--folder", str(tmp_path)) == 2


# ---- a sweep is measured and read -----------------------------------------------------------------------


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> None:
    """The toy op on a machine that finds one of its configs wrong, in the place of any op on this GPU."""
    machine = ToyMachine(wrong={ToyConfig(64, 1, False): 5.0})
    monkeypatch.setattr(judge, "LocalRuntime", lambda jobs: nullcontext(machine))
    monkeypatch.setattr(judge.gpus, "lookup", lambda name: H200)
    monkeypatch.setattr(registry, "get", lambda name: TOY)


@pytest.mark.usefixtures("toy")
def test_a_sweep_is_recorded_and_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "toy.jsonl.xz"
    assert command("sweep", "toy", "--problem", str(PROBLEM), "--out", str(out)) == 0
    lines = list(judge.recorded(out))
    assert [line["config"] for line in lines if line["default"]] == [lines[0]["config"]] == [str(DEFAULT)]
    assert {line["config"] for line in lines} == set(map(str, VALID))
    assert [line["failure"] for line in lines if "us" not in line] == ["error 5 times the tolerance"]
    assert all(line["p20"] <= line["us"] <= line["p80"] and line["ratio"] for line in lines if "us" in line)
    assert lines[0]["stamp"]["gpu"] == "h200"
    ((key, us),) = judge.load(out).items()
    assert key == ("toy", str(PROBLEM)) and len(us) == len(VALID) - 1
    said = capsys.readouterr().err
    assert f"{len(VALID)} configs in" in said and min(us, key=lambda config: us[config]) in " ".join(said.split())


def swept(machine: ToyMachine, most: int, until: float = math.inf) -> list[dict[str, Any]]:
    futures = judge.compile_some(machine, TOY, PROBLEM, H200, most)
    return list(judge.sweep(machine, TOY, PROBLEM, H200, futures, rounds=20, until=until))


def test_a_sweep_begins_with_the_default_and_what_the_model_likes() -> None:
    """The default is measured even where it spills, since calls run it."""
    spills = {DEFAULT: Facts(64, 4096, 0), BEST: Facts(64, 4096, 0)}
    lines = swept(ToyMachine(facts=spills), 99)
    assert lines[0]["default"] and "us" in lines[0]
    estimates = [line["model_us"] for line in lines[1:]]
    assert estimates[: judge.TOP] == sorted(estimates)[: judge.TOP]
    assert ["spills" in line.get("failure", "") for line in lines if line["config"] == str(BEST)] == [True]


def test_a_sweep_ends_at_its_cap_and_its_deadline_and_outlives_a_fault() -> None:
    assert len(swept(ToyMachine(), 5)) == 5
    assert swept(ToyMachine(), 5, until=-math.inf) == []
    machine = ToyMachine(failures={VALID[3]: ChildFailure("an illegal access")})
    lines = swept(machine, 99)
    assert [line["config"] for line in lines if "us" not in line] == [str(VALID[3])]
    assert all(len(request.configs) <= judge.AT_ONCE + 1 for request in machine.measured)
    assert len(machine.measured) < len(VALID)


@pytest.mark.usefixtures("toy")
def test_a_sweep_that_is_stopped_keeps_the_problems_that_were_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lines(runtime: object, op: object, problem: object, *others: object, **options: object) -> Iterator[Any]:
        yield {"problem": str(problem)}
        if "m=2" in str(problem):
            raise KeyboardInterrupt

    monkeypatch.setattr(judge, "sweep", lines)
    out = tmp_path / "toy.jsonl.xz"
    for m in (1, 4):
        with pytest.raises((KeyboardInterrupt, SystemExit)):
            judge.app(["sweep", "toy", "--problem", f"m={m} n=8", "--problem", "m=2 n=8", "--out", str(out)])
    assert [row["problem"] for row in judge.recorded(out)] == ["m=1 n=8", "m=4 n=8"]
    out.write_bytes(out.read_bytes()[:-9])
    broken = out.read_bytes()
    assert command("sweep", "toy", "--problem", "m=1 n=8", "--out", str(out)) == 1 and out.read_bytes() == broken


@pytest.mark.parametrize(
    "line",
    [
        "{oops",
        "[1, 2]",
        "",
        '{"config": "a=1", "us": true}',
        '{"config": "a=1", "us": NaN}',
        '{"config": "a=1", "us": 0.0}',
        '{"config": 5}',
        '{"config": "a=1", "p20": "1"}',
        '{"revision": 1.5}',
    ],
)
def test_a_broken_sweep_is_named_with_its_line(tmp_path: Path, line: str) -> None:
    good = {"op": "toy", "problem": "m=1 n=1", "config": "a=1", "us": 1.0}
    with lzma.open(tmp_path / "toy.jsonl.xz", "wt") as file:
        file.write(f"{json.dumps(good)}\n{line}\n{json.dumps(good)}\n")
    with pytest.raises(CuteKernelsError, match=r"toy\.jsonl\.xz, line 2"):
        judge.load(tmp_path)


def test_half_a_file_is_named(tmp_path: Path) -> None:
    whole = lzma.compress(b'{"op": "toy"}\n' * 1000)
    (tmp_path / "toy.jsonl.xz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(CuteKernelsError, match=r"toy\.jsonl\.xz, line \d+"):
        list(judge.recorded(tmp_path))
