"""A whole run killed at random moments and resumed: no false row, no false winner, each study the rows of its task,
nothing locked, nothing left over.

``CUTEKERNELS_KILLS=40`` kills more often; two kills, one of each kind, take about 10 s.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import optuna
import pytest

from cutekernels.autotune.studies import Studies
from cutekernels.db.storage.engine import url_of
from cutekernels.db.storage.store import Store
from tests.tuner.kills import BAD, WRONG
from tests.tuner.toys import BEST, ToyConfig, true_us

KILLS = int(os.environ.get("CUTEKERNELS_KILLS", "2"))
TIMINGS = 60  # about as many as a whole run makes


def begin(db: str | Path, home: Path) -> subprocess.Popen[str]:
    env = os.environ | {"CUTEKERNELS_CACHE": str(home / "cache"), "TMPDIR": str(home / "tmp"), "PYTHONHASHSEED": "0"}
    return subprocess.Popen(
        [sys.executable, "-m", "tests.tuner.kills", str(db)],
        cwd=Path(__file__).parents[2],
        env=env | {"PYTHONPATH": str(Path(__file__).parents[2])},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_killed_at_random_moments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tmp").mkdir()
    timed = tmp_path / "timed"
    monkeypatch.setenv("TOY_TIMED", str(timed))
    chance = random.Random(19)
    kills = runs = 0
    while kills < KILLS:
        db = tmp_path / f"{runs}.db"
        runs += 1
        for _ in range(2):  # kills of one run, each resumed
            timed.write_text("")
            process = begin(db, tmp_path)
            moment = chance.randrange(-5, TIMINGS)  # below 0: while it starts
            while process.poll() is None and timed.read_text().count("\n") < moment:
                time.sleep(0.01)
            time.sleep(chance.uniform(0, 2.0 if moment < 0 else 0.1))
            if kills % 2 == 0 and process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)  # all that is in its group
            else:
                process.kill()  # the coordinator alone
            process.communicate()
            if process.returncode >= 0:  # it had ended before
                break
            kills += 1
        last = begin(db, tmp_path)
        told = last.communicate(timeout=300)
        assert last.returncode == 0, told
        check(db)
        left = [p.name for p in (tmp_path / "cache").rglob("*") if p.suffix in (".lock", ".new")]
        assert left == [] and list((tmp_path / "tmp").iterdir()) == [], "left over after the next run"
        beside = {p.name for p in tmp_path.glob(f"{db.name}*")} - {
            f"{db.name}{end}" for end in ("", "-wal", "-shm", ".lock", ".studies", ".leases")
        }
        assert beside == set(), "left beside the database, whose lock file stays"
    print(f"{kills} kills in {runs} runs")


def check(db: str | Path) -> None:
    """Every row says what the toy GPU does, and each task's winner is its best config."""
    with Store(db) as store:
        assert store.broken_rows() == []
        trials, winners = store.trials(), store.winners()
    kept = Studies(url_of(db))
    for problem in {t.problem for t in trials}:
        study = optuna.load_study(study_name=f"h200 toy r3 [{problem}]", storage=kept.storage)
        told = Counter(t.user_attrs["row"] for t in study.trials if "row" in t.user_attrs)
        assert told == Counter(t.id for t in trials if t.problem == problem)
        assert all(t.state.is_finished() for t in study.trials)
    kept.close()
    wanted = {str(WRONG): "wrong_result", str(BAD): "compile_error"}
    for trial in trials:
        config = ToyConfig.parse(trial.config)
        assert trial.status == wanted.get(trial.config, "ok"), (trial.config, trial.status, trial.message)
        if trial.status == "ok":
            assert trial.median_us == pytest.approx(true_us(config), rel=0.003)
            assert trial.ratio == pytest.approx(true_us(ToyConfig(16, 1, False)) / true_us(config), rel=0.006)
    assert [(w.problem, w.config) for w in winners] == [("m=16 n=64", str(BEST)), ("m=32 n=64", str(BEST))]
