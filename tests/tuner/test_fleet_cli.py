"""``tune`` for fleets as a user runs it: shards as processes, several GPUs, SIGTERM, logs, listings."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text

from cutekernels import gpu as gpus
from cutekernels.autotune import cli, job, run
from cutekernels.autotune.fleet import OneSlot
from cutekernels.autotune.report import TaskReport
from cutekernels.db.storage.store import Store
from cutekernels.errors import StoreError
from tests.command_line import invoke
from tests.processes import python
from tests.tuner.toys import H200, TOY, ToyMachine

ROOT = Path(__file__).parents[2]
EIGHT = "m=1 n=64", "m=2 n=64", "m=4 n=64", "m=8 n=64", "m=16 n=64", "m=32 n=64", "m=64 n=64", "m=128 n=64"


@pytest.fixture
def toml(tmp_path: Path) -> Path:
    return job_of(EIGHT, tmp_path)


@pytest.fixture
def four(tmp_path: Path) -> Path:
    return job_of(EIGHT[:4], tmp_path)


def job_of(problems: Sequence[str], folder: Path) -> Path:
    file = folder / "toys.toml"
    file.write_text(f'name = "toys"\ntrials = 4\n[[tasks]]\nop = "toy"\nproblems = {json.dumps(problems)}\n')
    return file


_ON_TERMINAL = (
    "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execv(sys.argv[1], sys.argv[1:])"
)


def begin(home: Path, *words: str, terminal: int | None = None, **env: str) -> subprocess.Popen[str]:
    """The command in a process of its own; all its streams are ``terminal``, if one is given."""
    home.mkdir(exist_ok=True)
    own = {"CUTEKERNELS_CACHE": str(home / "cache"), "TMPDIR": str(home), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "tests.tuner.fleets", *words]
    return subprocess.Popen(
        command if terminal is None else [sys.executable, "-c", _ON_TERMINAL, *command],
        cwd=ROOT,
        env=os.environ | own | env,
        stdin=terminal,
        stdout=subprocess.PIPE if terminal is None else terminal,
        stderr=subprocess.PIPE if terminal is None else terminal,
        text=True,
        start_new_session=True,
    )


def done(process: subprocess.Popen[str], code: int = 0) -> tuple[str, str]:
    out, err = process.communicate(timeout=250)
    assert process.returncode == code, (process.returncode, out, err)
    return out, err


def stored(db: Path) -> tuple[list[str], list[str]]:
    """The problems that have a winner, and the ids of all trials."""
    with Store(db) as store:
        return sorted(w.problem for w in store.winners()), sorted(t.id for t in store.trials())


def test_sigterm_stores_everything_and_the_same_command_resumes(tmp_path: Path, four: Path) -> None:
    db, log = tmp_path / "t.db", tmp_path / "log"
    words = f"{four} --gpus 0,1 --jobs 1 --db {db} --format json --log {log}".split()
    process = begin(tmp_path / "home", *words, TOY_MEASURE_S="0.1")
    limit = time.monotonic() + 120
    while not log.exists() or "[1/4]" not in log.read_text():
        assert time.monotonic() < limit and process.poll() is None, process.communicate()
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGTERM)  # as SLURM does: to every process of the step
    os.killpg(process.pid, signal.SIGTERM)
    out, err = done(process, 143)
    assert out == "" and "the same command resumes the run" in err
    before = stored(db)[1]
    assert before and list((tmp_path / "home").rglob("*.new")) == [], "nothing is left over"
    left = subprocess.run(["pgrep", "-f", str(tmp_path)], capture_output=True, text=True, check=False).stdout
    assert left == "", "no process either"
    report = json.loads(done(begin(tmp_path / "home", *words))[0])
    assert [t["state"] for t in report["tasks"]].count("done") >= 1
    winners, after = stored(db)
    assert winners == sorted(EIGHT[:4]) and set(before) <= set(after)
    assert log.read_text().count("[1/4]") == 2 and "[4/4]" in log.read_text(), "a resumed run continues its log"


def test_a_closed_terminal_ends_the_run_and_keeps_what_was_measured(tmp_path: Path, four: Path) -> None:
    ours, theirs = os.openpty()
    words = [str(four), "--gpus", "0,1", "--jobs", "1", "--db", str(tmp_path / "t.db"), "--log", str(tmp_path / "log")]
    process = begin(tmp_path / "home", *words, terminal=theirs, TOY_MEASURE_S="0.1")
    os.close(theirs)
    os.set_blocking(ours, False)
    limit = time.monotonic() + 120
    while not (tmp_path / "log").exists() or "[1/4]" not in (tmp_path / "log").read_text():
        assert time.monotonic() < limit and process.poll() is None
        with suppress(BlockingIOError):  # or its output would fill the terminal
            os.read(ours, 65536)
        time.sleep(0.05)
    os.close(ours)
    assert process.wait(120) == 128 + signal.SIGHUP
    assert stored(tmp_path / "t.db")[1]


@pytest.fixture
def plain_signals() -> Iterator[tuple[signal.Signals, ...]]:
    """Signals as a shell leaves them: tests may run in the background, or under nohup."""
    plain = {signal.SIGTERM: signal.SIG_DFL, signal.SIGHUP: signal.SIG_DFL, signal.SIGINT: signal.default_int_handler}
    before = {number: signal.signal(number, handler) for number, handler in plain.items()}
    yield tuple(plain)
    for number, handler in before.items():
        signal.signal(number, handler)


def test_while_one_signal_is_obeyed_others_wait(plain_signals: tuple[signal.Signals, ...]) -> None:
    before = list(map(signal.getsignal, plain_signals))
    for number in (signal.SIGTERM, signal.SIGHUP):
        with pytest.raises(cli._Terminated) as caught, cli._signals_raise():
            try:
                signal.raise_signal(number)
                time.sleep(5)  # until Python gets round to it
            finally:
                for other in plain_signals:
                    signal.raise_signal(other)
        assert caught.value.signal is number
        assert list(map(signal.getsignal, plain_signals)) == before


def test_a_signal_waits_for_the_end_of_a_transaction(tmp_path: Path, plain_signals: tuple[signal.Signals, ...]) -> None:
    with Store(tmp_path / "t.db") as store:
        for i, number in enumerate(plain_signals):
            error = KeyboardInterrupt if number is signal.SIGINT else cli._Terminated
            with pytest.raises(StoreError) as caught, cli._signals_raise():
                try:
                    with store._writing() as session:
                        signal.raise_signal(number)
                        session.execute(text(f"CREATE TABLE kept{i} (x INT)"))
                finally:
                    raise StoreError("the last rows were not stored")
            assert type(caught.value.__context__) is error
            assert cli._ended_by(caught.value) == (1 if error is KeyboardInterrupt else 128 + number)
        with pytest.raises(KeyboardInterrupt), cli._signals_raise(), store._writing() as session:
            for _ in range(2):  # the second waits for nothing
                signal.raise_signal(signal.SIGINT)
            session.execute(text("CREATE TABLE kept_too (x INT)"))
        with store._writing() as session:  # nobody holds the database
            assert session.scalar(text("SELECT count(*) FROM sqlite_master WHERE name LIKE 'kept%'")) == 3


def test_a_signal_that_nohup_ignores_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with cli._signals_raise():
            signal.raise_signal(signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.slow
def test_all_gpus_of_a_host_take_part(tmp_path: Path) -> None:
    seen = tmp_path / "seen"
    seen.mkdir()
    job = str(job_of(EIGHT[:4], tmp_path))
    words = [job, "--jobs", "1", "--db", str(tmp_path / "t.db"), "--format", "json", "--gpus", "0,1,3"]
    report = json.loads(done(begin(tmp_path / "home", *words, TOY_SEEN=str(seen), TOY_MEASURE_S="0.1"))[0])
    assert [t["problem"] for t in report["tasks"]] == list(EIGHT[:4])
    assert stored(tmp_path / "t.db")[0] == sorted(EIGHT[:4])
    assert sorted(p.name for p in seen.iterdir()) == ["0", "1", "3"], "each worker sees its own GPU alone"


class TestCommandLine:
    @pytest.fixture(autouse=True)
    def _toys(self, monkeypatch: pytest.MonkeyPatch, toml: Path, tmp_path: Path) -> None:
        self.machine = ToyMachine()
        self.toml, self.db = str(toml), tmp_path / "t.db"
        monkeypatch.setattr(job, "_find_op", lambda name: TOY)
        monkeypatch.setattr(gpus, "detect", lambda device=None: H200)
        monkeypatch.setattr(run, "_compilers", lambda *rest: nullcontext(self.machine))
        monkeypatch.setattr(run, "LocalFleet", lambda *rest: OneSlot(H200, self.machine))

    def invoke(self, *words: str) -> Any:
        return invoke(cli.app, *words, "--db", str(self.db))

    def dry_run(self, *words: str) -> Any:
        return json.loads(self.invoke(self.toml, "--dry-run", *words, "--format", "json").stdout)

    def test_list_measures_nothing(self) -> None:
        result = self.invoke(self.toml, "--list", "--format", "json")
        rows = json.loads(result.stdout)
        assert [row["problem"] for row in rows] == list(EIGHT) and rows[0]["expected_s"] > 0
        assert self.machine.measured == [] and not self.db.exists()
        assert "8 tasks" in result.stderr

    def test_list_of_a_shard_and_an_op(self) -> None:
        both = [self.invoke(self.toml, "--list", "--format", "json", "--shard", f"{i}/2").stdout for i in (1, 2)]
        assert sorted(row["problem"] for out in both for row in json.loads(out)) == sorted(EIGHT)
        assert self.invoke(self.toml, "--list", "--op", "toy").exit_code == 0
        queue = self.invoke("--requests", "--shard", "1/2")
        assert queue.exit_code == 2 and "share its --requests by themselves: leave it out" in queue.stderr
        refused = self.invoke(self.toml, "--op", "gemm")
        assert refused.exit_code == 2 and "its ops: toy" in refused.stderr

    def test_dry_run_says_what_is_left(self) -> None:
        rows = self.dry_run()
        assert {(r["state"], r["stored"], r["to_do"], r["winner"]) for r in rows} == {("new", 0, 4, None)}
        assert not self.db.exists()
        self.invoke(self.toml, "--shard", "1/2")
        rows = self.dry_run()
        assert sorted(r["state"] for r in rows) == ["done"] * 4 + ["new"] * 4
        measured = len(self.machine.measured)
        more = self.dry_run("--trials", "9")
        assert {(r["state"], r["to_do"]) for r in more} == {("resumes", 5), ("new", 9)}
        assert len(self.machine.measured) == measured

    def test_dry_run_of_a_forced_run_repeats_all(self) -> None:
        self.invoke(self.toml, "--shard", "1/2")
        rows = self.dry_run("--force")
        assert sorted((r["state"], r["to_do"]) for r in rows) == [("new", 4)] * 4 + [("repeats", 4)] * 4

    def test_dry_run_repeats_what_other_kernels_took(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.invoke(self.toml, "--shard", "1/2")
        monkeypatch.setattr("cutekernels.autotune.history.source_fingerprint", lambda op: "ab" * 32)
        rows = self.dry_run()
        assert sorted((r["state"], r["to_do"]) for r in rows) == [("new", 4)] * 4 + [("repeats", 4)] * 4

    def test_a_database_in_nobodys_home_is_one_line(self) -> None:
        for words in ((), ("--dry-run",)):
            result = invoke(cli.app, self.toml, *words, "--db", "~nobody-at-all/t.db")
            assert result.exit_code == 1 and isinstance(result.exception, SystemExit)
            assert len(result.stderr.splitlines()) == 1 and "names a home directory" in result.stderr

    def test_a_log_that_cannot_be_written_does_not_end_the_run(self) -> None:
        result = self.invoke(self.toml, "--log", "/dev/full", "--format", "json")
        assert result.exit_code == 0, result.output
        assert {t["state"] for t in json.loads(result.stdout)["tasks"]} == {"tuned"}
        assert result.stderr.count("the log /dev/full cannot be written any more (No space left on device)") == 1

    def test_dry_run_under_limit_has_right_totals(self) -> None:
        rows = self.dry_run("--gpu", "l40s", "--limit", "3")
        assert {(r["origin"], r["to_do"]) for r in rows} == {("predicted", 3)}

    def test_a_list_for_an_absent_gpu_has_no_seconds_of_another(self) -> None:
        result = self.invoke(self.toml, "--list", "--gpu", "l40s", "--format", "json")
        assert all("expected_s" not in row and row["trials"] == 4 for row in json.loads(result.stdout))
        assert "of each the best by model, as many as its trials" in result.stderr and "H200" not in result.stderr
        assert "expected_s" not in self.invoke(self.toml, "--list", "--gpu", "l40s").stdout

    def test_more_shards_than_tasks(self) -> None:
        result = self.invoke(self.toml, "--shard", "9/9", "--format", "json")
        assert result.exit_code == 0 and json.loads(result.stdout)["tasks"] == []
        assert "no task" in result.stderr

    def test_misuse_exits_2(self, tmp_path: Path) -> None:
        os.mkfifo(tmp_path / "pipe")
        before = Path(self.toml).read_text()
        for words in (
            "--shard 0/4",
            "--gpus all --device 0",
            "--gpus first",
            "--requests",
            "--log /no/such/folder/log",
            f"--log {self.toml}",
            f"--log {tmp_path / 'pipe'}",  # nobody reads it
            "--list --gpu foo",
            "--list --gpus first",
            "--dry-run --gpus all --device 0",
            "--dry-run --gpus 0,0",
            "--dry-run --sampler best",
        ):
            result = self.invoke(self.toml, *words.split())
            assert result.exit_code == 2, (words, result.output)
        assert self.machine.measured == [] and Path(self.toml).read_text() == before

    def test_requests_take_the_queue(self) -> None:
        from cutekernels.ops import registry

        nothing = self.invoke("--requests", "--format", "json")
        assert nothing.exit_code == 0 and json.loads(nothing.stdout)["tasks"] == []
        assert "no request is waiting for h200" in nothing.stderr
        with Store(self.db) as store:
            store.note_requests([("h200", "toy", 3, "m=16 n=64", 2), ("h200", "toy", 3, "m=32 n=64", 5)])
            store.note_requests([("h200", "toy", 9, "m=16 n=64", 2), ("l40s", "toy", 3, "m=16 n=64", 1)])
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(registry, "get", {"toy": TOY}.__getitem__)
            patch.setattr(registry, "find", {"toy": TOY}.get)
            predicted = self.invoke("--requests", "--gpu", "l40s", "--trials", "2", "--format", "json")
            assert "stay in the queue: only a measurement on a l40s ends one" in predicted.stderr
            result = self.invoke("--requests", "--trials", "4", "--format", "json")
        assert result.exit_code == 0, result.output
        assert [t["problem"] for t in json.loads(result.stdout)["tasks"]] == ["m=32 n=64", "m=16 n=64"]
        with Store(self.db) as store:
            left = [(r.gpu, r.revision) for r in store.requests()]
            assert left == [("h200", 9), ("l40s", 3)], "a measured problem leaves the queue"
        assert "1 requests are left out, the first because a newer cutekernels wrote it" in result.stderr

    def test_the_log_has_hostile_texts_as_escapes(self, tmp_path: Path) -> None:
        from cutekernels.autotune.progress import Lines

        with (tmp_path / "log").open("w") as stream:
            Lines(stream, ()).end(TaskReport("toy", "m=1", "failed", None, "", message="\x1b[31mred\nnew line"))
        assert (tmp_path / "log").read_text().count("\n") == 1
        assert "\\x1b[31mred new line" in (tmp_path / "log").read_text()


def test_the_first_query_after_a_tune_knows_its_rates(tmp_path: Path) -> None:
    """The ops say what work a problem is; nothing is written for later queries."""
    from cutekernels.autotune.job import parse
    from cutekernels.autotune.run import tune

    own = parse('name = "one"\n[[tasks]]\nop = "silu_mul"\nproblems = ["rows=3072 cols=1234"]\n', "one")
    machine = ToyMachine()
    machine.compile = lambda op, problem, config, gpu: _compiled()  # type: ignore[method-assign,assignment,misc]
    report = tune(own, "a100", db=str(tmp_path / "t.db"), runtime=machine, limit=1)
    assert report.ok
    program = (
        "import sys; from cutekernels.db.questions import cli; "
        "sys.argv[1:] = ['query', '--gpu', 'a100', '--format', 'json', "
        f"'--db', {str(tmp_path / 't.db')!r}]\n"
        "cli.app()"
    )
    before = sorted(p for p in tmp_path.rglob("*") if p.is_file())
    ended = python(program, check=False, cwd=ROOT)
    assert sorted(p for p in tmp_path.rglob("*") if p.is_file()) == before
    row = next(r for r in json.loads(ended.stdout) if r["problem_text"] == "rows=3072 cols=1234")
    assert row["gbps"] is not None


def _compiled() -> Any:
    from concurrent.futures import Future

    from cutekernels.backends import Facts

    future: Future[Facts] = Future()
    future.set_result(Facts(64, 0, 1024))
    return future
