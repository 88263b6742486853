"""Two runs of one job at a time: each config is made once, and nothing is timed beside the other's timings."""

from __future__ import annotations

import json
import signal
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest

from cutekernels.autotune.search import RACE_ROUNDS
from cutekernels.autotune.turns import Turns
from cutekernels.db import leases
from cutekernels.db.engine import url_of
from cutekernels.db.store import Store
from tests.db.test_store import postgres  # noqa: F401  a fixture
from tests.tuner import test_fleet_cli
from tests.tuner.test_kills import begin, check


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("kind", "kill"), [("sqlite", False), ("postgres", True)])
def test_two_runs_of_one_job(
    kind: str, kill: bool, tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = str(request.getfixturevalue("postgres")()) if kind == "postgres" else str(tmp_path / "t.db")
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("TOY_TIMED", str(tmp_path / "timed"))
    runs: list[subprocess.Popen[str]] = [begin(url, tmp_path) for _ in range(2)]
    if kill:
        while not (tmp_path / "timed").exists():
            time.sleep(0.02)
        runs[0].send_signal(signal.SIGKILL)
    told = [run.communicate(timeout=200) for run in runs]
    assert [run.returncode for run in runs] == [-signal.SIGKILL if kill else 0, 0], told
    check(url)
    spans = sorted(tuple(map(float, line.split())) for line in (tmp_path / "timed").read_text().splitlines())
    overlaps = sum(later[0] < earlier[1] for earlier, later in pairwise(spans))
    assert overlaps == 0, "timed beside the other run"
    if not kill:
        with Store(url) as store:
            searched = [t for t in store.trials() if (t.samples or 0) <= RACE_ROUNDS]  # a final times more rounds
        assert len(searched) == len({(t.problem, t.config) for t in searched}) > 0, "made twice"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_shards_and_a_whole_run_share_one_postgres(postgres: Callable[[], str], tmp_path: Path) -> None:  # noqa: F811
    """Each task is searched once, by whichever of the three runs has it first, and each run knows all its winners."""
    url, job = postgres(), tmp_path / "toys.toml"
    problems = [f"m={2**i} n=64" for i in range(4)]
    job.write_text(f'name = "toys"\ntrials = 4\n[[tasks]]\nop = "toy"\nproblems = {json.dumps(problems)}\n')
    words = [str(job), "--gpu", "auto", "--jobs", "1", "--format", "json", "--db", url]
    parts = [["--shard", "1/2"], ["--shard", "2/2"], []]
    runs = [test_fleet_cli.begin(tmp_path / str(i), *words, *part) for i, part in enumerate(parts)]
    told = [json.loads(test_fleet_cli.done(run)[0])["tasks"] for run in runs]
    assert sorted(t["problem"] for tasks in told[:2] for t in tasks) == sorted(problems) and len(told[2]) == 4
    tuned = Counter(t["problem"] for tasks in told for t in tasks if t["state"] == "tuned")
    assert tuned == dict.fromkeys(problems, 1) and {t["state"] for tasks in told for t in tasks} == {"tuned", "done"}
    with Store(url) as store:
        searched = [t for t in store.trials() if (t.samples or 0) <= RACE_ROUNDS]
        assert len(searched) == len({(t.problem, t.config) for t in searched}) >= 4 * len(problems)
        assert sorted(w.problem for w in store.winners()) == sorted(problems)


@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
def test_a_lease_is_one_holders_until_it_is_released_or_its_holder_is_gone(
    kind: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    url = str(request.getfixturevalue("postgres")()) if kind == "postgres" else url_of(tmp_path / "t.db")
    mine, other = leases.of(url), leases.of(url)
    assert mine.take("a") and not other.take("a") and other.take("b") and not mine.take("b")
    mine.release("a")
    assert other.take("a")
    other.close()
    limit = time.monotonic() + 60
    while not (mine.take("a") and mine.take("b")):  # a server takes a moment to notice that a session ended
        assert time.monotonic() < limit
        time.sleep(0.02)
    mine.close()


def test_turns_are_kept_among_processes(tmp_path: Path) -> None:
    """Two objects on one file stand for two processes: who waits to be alone goes before newcomers."""
    here, there = Turns(tmp_path / "gpu-x"), Turns(tmp_path / "gpu-x")
    order: list[str] = []

    def run(name: str, turn: Callable[[], object]) -> threading.Thread:
        def work() -> None:
            with turn():  # type: ignore[attr-defined]
                order.append(name)

        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        return thread

    with here.together():
        run("beside", there.together).join(60)
        assert order == ["beside"]
        alone = run("alone", there.alone)
        while not there._timed:
            time.sleep(0.005)
        time.sleep(0.05)
        late = run("late", Turns(tmp_path / "gpu-x").together)
        time.sleep(0.05)
        assert order == ["beside"], "neither beside the first, nor before who waits"
    alone.join(60)
    late.join(60)
    assert order == ["beside", "alone", "late"]
