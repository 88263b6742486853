"""Two runs of one job at a time: each config is made once, and nothing is timed beside the other's timings."""

from __future__ import annotations

import json
import signal
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from itertools import pairwise
from pathlib import Path

import pytest

from cutekernels import cli
from cutekernels.autotune import ledger
from cutekernels.autotune.ledger import Ledger
from cutekernels.autotune.search import RACE_ROUNDS
from cutekernels.autotune.turns import Turns
from cutekernels.db.storage import engine, leases
from cutekernels.db.storage.engine import url_of
from cutekernels.db.storage.store import Store
from cutekernels.errors import StoreUnreachable
from tests.command_line import invoke
from tests.db.postgres import Postgres
from tests.db.test_store import postgres  # noqa: F401  a fixture
from tests.db.trials import trial
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
def test_a_shard_and_a_whole_run_share_one_postgres(postgres: Callable[[], str], tmp_path: Path) -> None:  # noqa: F811
    """Each task is searched once, by whichever of the two runs has it first, and each run knows all its winners."""
    url, job = postgres(), tmp_path / "toys.toml"
    problems = [f"m={2**i} n=64" for i in range(4)]
    job.write_text(f'name = "toys"\ntrials = 4\n[[tasks]]\nop = "toy"\nproblems = {json.dumps(problems)}\n')
    words = [str(job), "--gpu", "auto", "--jobs", "1", "--format", "json", "--db", url]
    parts = [["--shard", "1/2"], []]
    runs = [test_fleet_cli.begin(tmp_path / str(i), *words, *part) for i, part in enumerate(parts)]
    told = [json.loads(test_fleet_cli.done(run)[0])["tasks"] for run in runs]
    assert {t["problem"] for t in told[0]} < {t["problem"] for t in told[1]} == set(problems)
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


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_run_outlives_a_restart_of_its_server(
    postgres: Postgres,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    url = postgres()
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("TOY_TIMED", str(tmp_path / "timed"))
    run = begin(url, tmp_path)
    while not (tmp_path / "timed").exists():
        time.sleep(0.02)
    with postgres.stopped():
        time.sleep(2.0)
        assert run.poll() is None
    told = run.communicate(timeout=200)
    assert run.returncode == 0 and "waiting up to 120 s for it" in told[1], told
    check(url)


def test_rows_and_leases_outlive_a_restart_of_the_server(
    postgres: Postgres,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rows gather while it is away; a lease is its holder's again before anybody else may have it."""
    url = postgres()
    monkeypatch.setattr(leases, "KEEP_S", 0.05)
    monkeypatch.setattr(ledger, "FLUSH_S", 0.0)
    with Ledger(url) as store:
        store.record([trial("a=1")])
        mine, other = leases.of(url), leases.of(url)
        assert mine.take("a")
        with postgres.stopped():
            writer = threading.Thread(target=store.record, args=([trial("a=2")],), daemon=True)
            writer.start()
            assert not mine.take("b") and not other.take("a")
        writer.join(60)
        assert [t.config for t in store.trials()] == ["a=1", "a=2"]
        assert not other.take("a") and not other.take("b"), "holders come first"
        monkeypatch.setattr(leases, "HOLDERS_FIRST_S", 0.0)
        limit = time.monotonic() + 60
        while not other.take("b"):
            assert time.monotonic() < limit
        assert not other.take("a")
        mine.close()
        other.close()


def test_a_server_that_stays_away_ends_a_run_with_a_code_of_its_own(
    postgres: Postgres,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ledger, "FLUSH_S", 1e9)  # stopping a server takes a slow machine longer
    store, interrupted = Ledger(postgres()), Ledger(postgres())
    lease = leases.of(store.url)
    with postgres.stopped():
        interrupted.record([trial()])
        with pytest.raises(KeyboardInterrupt), interrupted.hurry_on_signal():
            raise KeyboardInterrupt
        begun = time.monotonic()
        with pytest.raises(StoreUnreachable, match="1 attempts were not stored"), closing(interrupted):
            interrupted.flush()
        assert time.monotonic() - begun < engine.AWAY_S / 4
        monkeypatch.setattr(engine, "AWAY_S", 0.2)
        store.record([trial()])
        with pytest.raises(StoreUnreachable, match=r"did not come back within 0 s$"):
            store.flush()
        with pytest.raises(StoreUnreachable, match="1 attempts were not stored"):
            store.close()
        time.sleep(0.3)
        assert not lease.take("a")
        time.sleep(0.3)
        with pytest.raises(StoreUnreachable):
            lease.take("a")
        job = tmp_path / "toys.toml"
        job.write_text('name = "j"\n[[tasks]]\nop = "rms_norm"\nproblems = ["rows=16 cols=64"]\n')
        done = invoke(cli.app, "tune", str(job), "--gpu", "a100", "--db", store.url)
        assert done.exit_code == 75 and "the same command resumes" in done.stderr, done.output
    lease.close()


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
