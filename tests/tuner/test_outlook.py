"""Where predictions depart from defaults, and why: what ``make demo`` shows without a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from cutekernels import gpu as gpus
from cutekernels.autotune import departures
from cutekernels.autotune.job import Job, load
from cutekernels.autotune.run import tune
from cutekernels.autotune.space import space
from cutekernels.db.storage.store import Store
from tests.tuner.toys import DEFAULT, ToyConfig, ToyMachine, task

L40S = gpus.lookup("l40s")
pytestmark = pytest.mark.usefixtures("no_gpu")
DEMO = Path(__file__).parents[2] / "examples" / "absent-gpu.toml"


def test_each_knob_has_its_reason(tmp_path: Path) -> None:
    job = Job("one", (task(4), task(4, "m=32 n=64")))
    tune(job, "l40s", db=str(tmp_path / "t.db"), runtime=ToyMachine())
    with Store(tmp_path / "t.db") as store:
        first, second = departures.departures(job, L40S, store)
        stored = store.winners()
    assert first.default == DEFAULT and first.predicted == ToyConfig(128, 8, False)
    assert first.why == (
        "tile 16 -> 128: 16 would take 8.00 times as long",
        "only together: warps 1 -> 8",
    )
    assert {str(second.predicted), str(first.predicted)} == {w.config for w in stored}


@pytest.mark.slow
def test_the_demo_shows_both_kinds() -> None:
    """Demo job on an L40S, by the model alone: a better config than the default for some problems, none for others."""
    gains = {}
    for t in load(DEMO).tasks:
        found = space(t.op, t.problem, L40S)
        gains[str(t)] = t.op.estimate_us(t.problem, t.op.default(t.problem, L40S), L40S) / min(found.estimates_us)
    assert 2 <= sum(gain > 1.0 for gain in gains.values()) < len(gains) and min(gains.values()) == 1.0, gains


def test_the_demo_tells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(departures, "load", lambda name: Job(name, (task(4),)))
    tune(Job("one", (task(4),)), "l40s", runtime=ToyMachine())
    departures._tell("one", "l40s")
    said = capsys.readouterr().out
    assert "toy [m=16 n=64] on l40s" in said and "64.00 times as fast by the model: it serves calls" in said
    assert "16 would take 8.00 times as long" in said
