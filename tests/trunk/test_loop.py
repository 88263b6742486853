"""The loop from a missed problem to its winner: reports at an interval, pulled winners, a watched database."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cutekernels import dispatch, introspection
from cutekernels.db.questions import cli
from cutekernels.db.storage import snapshot as snapshots
from cutekernels.db.storage.store import Store
from cutekernels.interval import Interval
from tests.command_line import invoke
from tests.db.trials import trial
from tests.processes import python, until
from tests.tuner.toys import H200, TOY, ToyConfig, ToyProblem

MISS = ("h200", "toy", 3, "m=16 n=64")


def threads(name: str) -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name == name]


@pytest.fixture(autouse=True)
def _quiet(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(snapshots, "_held", {})
    monkeypatch.setattr(dispatch, "_plans", {})
    monkeypatch.setattr(dispatch, "_missed", {})
    monkeypatch.setattr(snapshots, "_said", set())
    yield
    introspection._reporter.every(None)
    dispatch._watcher.every(None)


class TestInterval:
    def test_every_and_never(self) -> None:
        done: list[int] = []
        interval = Interval("test", lambda: done.append(1))
        assert interval.seconds is None
        interval.every(0.01)
        until(lambda: len(done) > 2)
        interval.every(None)
        assert interval.seconds is None
        until(lambda: not threads("test"))

    @pytest.mark.parametrize("seconds", [0, -1, float("nan"), float("inf"), 1e300, 1e-300, True, "1", [1]])
    def test_no_interval(self, seconds: Any) -> None:
        with pytest.raises(ValueError, match="number of seconds from 0.01 up"):
            Interval("test", lambda: None).every(seconds)

    def test_an_error_is_told_and_ends_nothing(self, caplog: pytest.LogCaptureFixture) -> None:
        done: list[int] = []

        def fail() -> None:
            done.append(1)
            raise KeyError("gone")

        interval = Interval("test-failing", fail)
        with caplog.at_level(logging.WARNING, "cutekernels"):
            interval.every(0.01)
            until(lambda: len(done) > 2)
            interval.every(None)
        assert "test-failing: KeyError: 'gone'" in caplog.text


class TestReports:
    def test_misses_are_reported_at_an_interval(self, tmp_path: Path) -> None:
        introspection.report_misses(every_s=0.02)
        dispatch.give_back_missed({MISS: 2})
        until(lambda: not dispatch._missed)
        with Store() as store:
            until(lambda: [(r.problem, r.hits) for r in store.requests()] == [("m=16 n=64", 2)])
        introspection.report_misses()
        until(lambda: not threads("cutekernels-report"))  # a call without every_s ends it

    def test_what_cannot_be_stored_is_kept_and_told(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        with caplog.at_level(logging.WARNING, "cutekernels"):
            introspection.report_misses(str(tmp_path), every_s=0.02)  # a folder; nothing to store yet
            dispatch.give_back_missed({MISS: 2})
            until(lambda: "could not be reported" in caplog.text)
        introspection._reporter.every(None)
        until(lambda: dispatch._missed == {MISS: 2})

    def test_only_where_a_database_is_named(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("CUTEKERNELS_DB")
        with pytest.raises(ValueError, match="set CUTEKERNELS_DB"):
            introspection.report_misses(every_s=1)
        assert introspection._reporter.seconds is None

    @pytest.mark.parametrize("words", [{"every_s": True}, {"every_s": "1"}, {"database": 1}, {"database": ["t.db"]}])
    def test_misuse_is_refused_though_there_is_nothing_to_report(self, words: Any) -> None:
        with pytest.raises(ValueError, match=r"seconds from 0\.01 up; it is|a path or a URL; it is"):
            introspection.report_misses(**words)
        assert introspection._reporter.seconds is None

    def test_the_end_of_a_process_and_its_forked_child_report_once_each(self, tmp_path: Path) -> None:
        program = """
import os, time
from cutekernels import dispatch, introspection
from cutekernels.db.storage.store import Store
Store().close()
introspection.report_misses(every_s=3600)
dispatch.give_back_missed({("h200", "toy", 3, "m=16 n=64"): 1})
child = os.fork()
if child == 0:
    introspection._reporter.every(0.05)
    dispatch.give_back_missed({("h200", "toy", 3, "m=32 n=64"): 1})
    for _ in range(1200):
        time.sleep(0.05)
        with Store(readonly=True) as store:
            if "m=32 n=64" in [r.problem for r in store.requests()]:
                os._exit(0)
    os._exit(1)
os.waitpid(child, 0)
"""
        env = os.environ | {"CUTEKERNELS_DB": str(tmp_path / "q.db")}
        done = python(program, check=False, env=env)
        assert done.returncode == 0, done.stderr
        with Store(tmp_path / "q.db", readonly=True) as store:
            assert [(r.problem, r.hits) for r in store.requests()] == [("m=16 n=64", 1), ("m=32 n=64", 1)]


def crown(config: str, problem: str = "m=16 n=64", db: Any = None, **changes: Any) -> str:
    t = trial(config, op="toy", revision=3, problem=problem, **changes)
    with Store(db) as store:
        store.record([t])
        store.crown(t.id)
    return t.id


class TestWatch:
    def test_new_winners_are_taken_up(self) -> None:
        crown("tile=32 warps=1 fast=0")
        assert str(dispatch.resolve(TOY, ToyProblem(16, 64), H200).config) == "tile=32 warps=1 fast=0"
        dispatch.reload(watch_s=0.02)
        before = dispatch.winners(H200)
        time.sleep(0.1)
        assert dispatch.winners(H200) is before, "an unchanged database is not read again"
        crown("tile=64 warps=4 fast=1")
        until(lambda: dispatch.winners(H200) is not before)
        assert dispatch.resolve(TOY, ToyProblem(16, 64), H200).config == ToyConfig(64, 4, True)

    def test_rows_that_change_no_winner_forget_no_plan(self) -> None:
        crown("tile=32 warps=1 fast=0")
        dispatch.winners(H200)
        dispatch.reload(watch_s=0.02)
        dispatch.winners(H200)
        dispatch._plans[("kept",)] = None  # type: ignore[assignment]
        stamp = dispatch._watched
        with Store() as store:
            store.record([trial("tile=16 warps=1 fast=0", op="toy", revision=3, problem="m=16 n=64")])
        until(lambda: dispatch._watched != stamp)
        time.sleep(0.1)
        assert ("kept",) in dispatch._plans

    def test_a_server_is_pulled_not_watched(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("CUTEKERNELS_DB", "postgresql+psycopg://nobody@nowhere/tuned")
        with pytest.raises(ValueError, match="db pull"):
            dispatch.reload(watch_s=1)

    def test_no_thread_is_left(self) -> None:
        dispatch.reload(watch_s=0.02)
        dispatch.reload()
        until(lambda: not threads("cutekernels-watch"))


class TestPull:
    @pytest.fixture
    def fleet(self, tmp_path: Path) -> str:
        return str(tmp_path / "fleet.db")

    def pull(self, fleet: str, *words: str) -> str:
        result = invoke(cli.app, "pull", fleet, *words)
        assert result.exit_code == 0, result.output
        return " ".join(result.stderr.split())

    def test_winners_and_nothing_else(self, fleet: str) -> None:
        crown("tile=32 warps=1 fast=0", db=fleet)
        winner = crown("tile=64 warps=1 fast=0", db=fleet)
        assert "1 trials added, 1 winners set" in self.pull(fleet)
        with Store() as store:
            assert [t.id for t in store.trials()] == [winner] == [t.id for t in store.winners()]
        assert "0 trials added" in self.pull(fleet)

    def test_the_fleets_winner_serves_and_nothing_is_deleted(self, fleet: str) -> None:
        theirs = crown("tile=32 warps=1 fast=0", db=fleet)
        mine = crown("tile=64 warps=1 fast=0")
        other = crown("tile=64 warps=1 fast=0", "m=32 n=64")
        self.pull(fleet)
        with Store() as store:
            assert [t.id for t in store.winners()] == [theirs, other]
            assert {t.id for t in store.trials()} == {theirs, mine, other}

    def test_a_prediction_replaces_no_measurement(self, fleet: str) -> None:
        crown("tile=32 warps=1 fast=0", db=fleet, origin="predicted")
        mine = crown("tile=64 warps=1 fast=0")
        assert "1 winners kept" in self.pull(fleet)
        with Store() as store:
            assert [t.id for t in store.winners()] == [mine]

    def test_only_some(self, fleet: str) -> None:
        crown("tile=32 warps=1 fast=0", db=fleet)
        assert "0 trials added" in self.pull(fleet, "--gpu", "l40s")
        assert "1 trials added" in self.pull(fleet, "--gpu", "h200", "--op", "toy")

    def test_all_or_nothing(self, fleet: str, monkeypatch: pytest.MonkeyPatch) -> None:
        from cutekernels.db.storage import statements

        crown("tile=32 warps=1 fast=0", db=fleet)

        def fail(*rest: object, **more: object) -> None:
            raise KeyboardInterrupt

        with pytest.MonkeyPatch.context() as patch, Store() as store:
            patch.setattr(statements, "set_winners", fail)
            with pytest.raises(KeyboardInterrupt):
                store.pull(fleet)
        with Store() as store:
            assert store.trials() == []
