"""Replay of recorded sweeps: the tuner's order finds good configs no later than it did."""

from __future__ import annotations

import json
import lzma
import math
import random
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from statistics import mean

import pytest
from typer.testing import CliRunner

from bench import replay, sweep
from cutekernels.autotune import samplers
from cutekernels.errors import CuteKernelsError
from cutekernels.ops import registry
from tests.tuner.toys import DEFAULT, H200, PROBLEM, TOY, VALID, ToyConfig, ToyMachine


@pytest.fixture(scope="module")
def sweeps() -> list[replay.Sweep]:
    return replay.load()


@pytest.mark.parametrize("order", ["chance", "model", "random", "tpe"])
def test_every_order_tries_each_config_once(order: str, sweeps: list[replay.Sweep]) -> None:
    sweep = min(sweeps, key=lambda s: len(s.rows))
    tried = list(replay.order_of(order)(sweep, random.Random(1)))
    assert tried[0] == sweep.default
    assert sorted(tried) == list(range(len(sweep.rows)))


def test_the_tuners_order_does_not_regress(sweeps: list[replay.Sweep]) -> None:
    """Means over 62 sweeps of 12 to 45 configs (2026-11-26): 1.005 at 16 attempts, 1.001 at 32."""
    assert len(sweeps) >= 62
    tunes = [replay.tune(sweep, replay.order_of(samplers.DEFAULT), seed) for sweep in sweeps[::2] for seed in (0,)]
    assert mean(t.at(16) for t in tunes) < 1.015 and mean(t.at(32) for t in tunes) < 1.005
    assert all(a >= b for t in tunes for a, b in zip(t.found, t.found[1:], strict=False) if a > 1.2)


def test_a_sweep_is_recorded_and_replayed(tmp_path: Path) -> None:
    machine = ToyMachine(wrong={ToyConfig(64, 1, False): 5.0})
    lines = list(sweep.sweep(machine, TOY, PROBLEM, H200, most=100, rounds=20, until=math.inf))
    assert [line["config"] for line in lines][:1] == [str(DEFAULT)]
    assert {line["config"] for line in lines} == set(map(str, VALID))
    with lzma.open(tmp_path / "toy.jsonl.xz", "wt") as file:
        file.write("".join(f"{json.dumps(line)}\n" for line in lines))
    (found,) = replay.load(tmp_path)
    assert (len(found.rows), found.us.count(None), found.knobs) == (len(VALID), 1, ("tile", "warps", "fast"))
    tune = replay.tune(found, replay.order_of("random"), 0, most=len(VALID))
    assert tune.at(len(VALID)) == 1.0 < tune.at(1) and tune.ended <= len(VALID)


def test_a_sweep_ends_at_its_cap_and_its_deadline() -> None:
    assert len(list(sweep.sweep(ToyMachine(), TOY, PROBLEM, H200, most=5, rounds=20, until=math.inf))) == 5
    assert list(sweep.sweep(ToyMachine(), TOY, PROBLEM, H200, most=5, rounds=20, until=-math.inf)) == []


def test_the_command_lines() -> None:
    words = ["--seeds", "1", "--orders", "chance,random", "--format", "json"]
    shown = CliRunner().invoke(
        replay.app, [*words, "--folder", str(replay.SWEEPS / "h200/attention_warpgroup.jsonl.xz")]
    )
    assert [row["order"] for row in json.loads(shown.stdout)] == ["chance", "random"]
    assert CliRunner().invoke(replay.app, ["--orders", "best"]).exit_code == 2
    assert "no sampler" in CliRunner().invoke(replay.app, ["--orders", "grid"]).stderr
    assert CliRunner().invoke(replay.app, ["--least", "9999"]).exit_code == 2


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
    ],
)
def test_a_broken_sweep_is_named_with_its_line(tmp_path: Path, line: str) -> None:
    good = {"op": "toy", "problem": "m=1 n=1", "config": "a=1", "us": 1.0, "model_us": 1.0, "default": True}
    with lzma.open(tmp_path / "toy.jsonl.xz", "wt") as file:
        file.write(f"{json.dumps(good)}\n{line}\n{json.dumps(good)}\n")
    result = CliRunner().invoke(replay.app, ["--folder", str(tmp_path)])
    assert result.exit_code == 1
    assert "toy.jsonl.xz, line 2" in " ".join(result.stderr.split())


def test_half_a_file_is_named(tmp_path: Path) -> None:
    whole = lzma.compress(b'{"op": "toy"}\n' * 1000)
    (tmp_path / "toy.jsonl.xz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(CuteKernelsError, match=r"toy\.jsonl\.xz, line \d+"):
        list(replay.recorded(tmp_path))


def test_a_slim_sweep_is_replayed_like_a_whole_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep, "LocalRuntime", lambda jobs: nullcontext(ToyMachine()))
    monkeypatch.setattr(sweep.gpus, "lookup", lambda name: H200)
    monkeypatch.setattr(registry, "get", lambda name: TOY)
    for words in ([], ["--slim"]):
        out = str(tmp_path / f"{len(words)}.jsonl.xz")
        assert CliRunner().invoke(sweep.app, ["toy", "--problem", str(PROBLEM), "--out", out, *words]).exit_code == 0
    whole, slim = (replay.load(tmp_path / f"{n}.jsonl.xz") for n in (0, 1))
    assert slim == whole and len(slim[0].rows) == len(VALID)
    assert (tmp_path / "1.jsonl.xz").stat().st_size < (tmp_path / "0.jsonl.xz").stat().st_size / 2


def test_a_sweep_that_is_stopped_keeps_the_problems_that_were_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lines(runtime: object, op: object, problem: object, gpu: object, **options: object) -> Iterator[dict[str, str]]:
        yield {"problem": str(problem)}
        if "m=2" in str(problem):
            raise KeyboardInterrupt

    monkeypatch.setattr(sweep, "sweep", lines)
    monkeypatch.setattr(sweep, "LocalRuntime", lambda jobs: nullcontext())
    monkeypatch.setattr(sweep.gpus, "lookup", lambda name: H200)
    out = tmp_path / "gemm.jsonl.xz"
    for m in (1, 4):
        problems = ["--problem", f"m={m} n=8 k=8", "--problem", "m=2 n=8 k=8"]
        CliRunner().invoke(sweep.app, ["gemm", *problems, "--out", str(out)])
    assert [row["problem"] for row in replay.recorded(out)] == ["m=1 n=8 k=8", "m=4 n=8 k=8"]
    out.write_bytes(out.read_bytes()[:-9])
    broken = out.read_bytes()
    result = CliRunner().invoke(sweep.app, ["gemm", "--problem", "m=1 n=8 k=8", "--out", str(out)])
    assert result.exit_code == 1 and out.read_bytes() == broken
