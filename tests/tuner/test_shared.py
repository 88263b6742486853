"""Two runs of one job at a time: each config is made once, and nothing is timed beside the other's timings."""

from __future__ import annotations

import signal
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest

from cutekernels.autotune.turns import Turns
from cutekernels.db import leases
from cutekernels.db.engine import url_of
from cutekernels.db.store import Store
from tests.db.test_store import postgres  # noqa: F401  a fixture
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
            made = Counter((t.problem, t.config) for t in store.trials() if t.certificate is None)
        finals = 4  # a task's final measures the default and three others again
        assert sum(n - 1 for n in made.values()) <= 2 * finals and max(made.values()) == 2


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
