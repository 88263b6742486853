"""A whole job and its command line, on a toy machine: paths, budgets, reports, exit codes."""

from __future__ import annotations

import csv
import io
import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from cutekernels.autotune import cli, run
from cutekernels.autotune.fleet import OneSlot
from cutekernels.autotune.job import Job, Task
from cutekernels.autotune.run import tune
from cutekernels.db.storage import engine
from cutekernels.db.storage.store import Store
from cutekernels.errors import JobError, UnknownGpu
from cutekernels.isolate import RemoteError
from tests.command_line import invoke
from tests.tuner.toys import BEST, H200, TOY, VALID, ToyMachine, ToyProblem

JOB = Job("toys", (Task(TOY, ToyProblem(16, 64), 8), Task(TOY, ToyProblem(32, 64), 8)))
JOB_TEXT = 'name = "toys"\ntrials = 8\n[[tasks]]\nop = "toy"\nproblems = ["m=16 n=64", "m=32 n=64"]\n'


@pytest.mark.usefixtures("on_h200")
class TestMeasured:
    def test_auto_measures_every_task(self, db: str) -> None:
        report = tune(JOB, db=db, runtime=ToyMachine())
        assert (report.job, report.gpu, report.origin, report.ok) == ("toys", "h200", "measured", True)
        assert [t.state for t in report.tasks] == ["tuned", "tuned"]
        with Store(db) as store:
            winners = store.winners()
        assert [w.problem for w in winners] == ["m=16 n=64", "m=32 n=64"]
        assert {w.origin for w in winners} == {"measured"}
        assert winners[0].environment.torch, "a certificate names its environment"

    def test_a_second_run_measures_nothing(self, db: str) -> None:
        tune(JOB, db=db, runtime=ToyMachine())
        machine = ToyMachine()
        report = tune(JOB, db=db, runtime=machine)
        assert report.measured == 0 and machine.measured == [] and machine.compiled == []
        assert "nothing measured" in report.headline()

    def test_another_gpu_is_predicted(self, db: str) -> None:
        machine = ToyMachine()
        report = tune(JOB, "l40s", db=db, runtime=machine, limit=3)
        assert (report.gpu, report.origin) == ("l40s", "predicted")
        assert machine.measured == [] and len(machine.compiled) == 6

    def test_overrides(self, db: str) -> None:
        assert [t.measured for t in tune(JOB, db=db, runtime=ToyMachine(), trials=5).tasks] == [9, 9]

    def test_the_budget_is_shared_so_that_later_tasks_get_their_turn(self, db: str) -> None:
        machine = ToyMachine(width=1)
        report = tune(JOB, db=db, runtime=machine, trials=100, budget_s=12, clock=machine.clock)
        assert [t.state for t in report.tasks] == ["unfinished", "unfinished"]
        assert all(t.winner is not None for t in report.tasks)
        first, second = (t.measured for t in report.tasks)
        assert abs(first - second) <= 2


@pytest.mark.usefixtures("no_gpu")
class TestPredicted:
    def test_the_same_job_predicts(self, db: str) -> None:
        report = tune(JOB, "h200", db=db, runtime=ToyMachine())
        assert report.origin == "predicted"
        assert [t.attempts for t in report.tasks] == [{"ok": JOB.tasks[0].trials}] * 2

    def test_there_is_nothing_to_confirm_with(self, db: str) -> None:
        with pytest.raises(JobError, match="on a machine with that GPU"):
            tune(JOB, "a100", db=db, runtime=ToyMachine(), confirm=True)

    def test_auto_without_a_gpu_asks_for_a_name(self, db: str) -> None:
        with pytest.raises(UnknownGpu):
            tune(JOB, db=db, runtime=ToyMachine())


class TestCommandLine:
    @pytest.fixture(autouse=True)
    def _toys(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from cutekernels.autotune import job

        self.machine = ToyMachine()
        monkeypatch.setattr(job, "_find_op", lambda name: TOY)
        monkeypatch.setattr(run, "LocalRuntime", lambda jobs: nullcontext(self.machine))
        monkeypatch.setattr(run, "LocalFleet", lambda *rest: OneSlot(H200, self.machine))

    def invoke(self, tmp_path: Path, *arguments: str) -> Any:
        file = tmp_path / "toys.toml"
        file.write_text(JOB_TEXT)
        return invoke(cli.app, str(file), "--db", str(tmp_path / "t.db"), *arguments)

    @pytest.mark.usefixtures("on_h200")
    def test_table(self, tmp_path: Path) -> None:
        result = self.invoke(tmp_path, "--trials", "100")
        assert result.exit_code == 0, result.output
        table = " ".join(result.stdout.split())
        for words in ("toys on h200, measured: 2 tasks", "toy m=16 n=64", "tile=64", "measured", "tuned", "ok"):
            assert words in table

    @pytest.mark.usefixtures("on_h200")
    def test_json_is_all_there_is_on_stdout(self, tmp_path: Path) -> None:
        result = self.invoke(tmp_path, "--trials", "100", "--format", "json")
        report = json.loads(result.stdout)
        task = report["tasks"][0]
        assert (report["gpu"], report["origin"], task["config"]) == ("h200", "measured", str(BEST))
        assert task["ratio_low"] > 1 and task["is_default"] is False
        assert task["attempts"]["ok"] == len(VALID) + 4

    @pytest.mark.usefixtures("on_h200")
    def test_csv(self, tmp_path: Path) -> None:
        rows = list(csv.DictReader(io.StringIO(self.invoke(tmp_path, "--format", "csv").stdout)))
        assert [row["problem"] for row in rows] == ["m=16 n=64", "m=32 n=64"]
        assert float(rows[0]["ratio"]) > 0

    @pytest.mark.usefixtures("on_h200")
    def test_a_failed_task_exits_1_and_says_why(self, tmp_path: Path) -> None:
        self.machine.wrong[TOY.default(ToyProblem(16, 64), H200)] = 5.0
        result = self.invoke(tmp_path, "--format", "json")
        assert result.exit_code == 1
        assert "wrong_result" in json.loads(result.stdout)["tasks"][0]["message"]

    @pytest.mark.usefixtures("on_h200")
    def test_a_run_without_time_exits_1_and_says_so(self, tmp_path: Path) -> None:
        result = self.invoke(tmp_path, "--budget-s", "0")
        assert result.exit_code == 1
        said = " ".join(result.stdout.split())
        assert "nothing done, 2 unfinished" in said and "resumed" not in said
        assert self.machine.measured == []
        assert self.invoke(tmp_path).exit_code == 0
        again = self.invoke(tmp_path)
        assert again.exit_code == 0 and "all of it resumed" in " ".join(again.stdout.split())

    @pytest.mark.usefixtures("on_h200")
    @pytest.mark.parametrize("budget", ["nan", "inf", "-1", "1e300"])
    def test_a_budget_that_is_no_time_exits_2(self, tmp_path: Path, budget: str) -> None:
        result = self.invoke(tmp_path, "--budget-s", budget)
        assert (result.exit_code, self.machine.measured) == (2, [])

    @pytest.mark.usefixtures("on_h200")
    def test_an_unusable_cache_exits_1_with_one_line(self, tmp_path: Path) -> None:
        broken = RemoteError("CacheUnusable", "the kernel cache /x cannot be written: No space left on device")
        self.machine.compile_failures = dict.fromkeys(VALID, broken)
        result = self.invoke(tmp_path)
        assert result.exit_code == 1
        assert result.stderr.strip() == broken.message

    @pytest.mark.usefixtures("on_h200")
    def test_ctrl_c_exits_1_and_says_how_to_resume(self, tmp_path: Path) -> None:
        def interrupt(request: Any) -> None:
            raise KeyboardInterrupt

        self.machine.on_measure = interrupt
        for told, *words in (["resumes the run"], ["begins anew; without", "--force"]):
            result = self.invoke(tmp_path, *words)
            assert result.exit_code == 1
            assert told in result.stderr and result.stdout == ""

    @pytest.mark.usefixtures("on_h200")
    def test_a_database_that_is_deleted_meanwhile_exits_1(self, tmp_path: Path) -> None:
        self.machine.on_measure = lambda request: (tmp_path / "t.db").unlink(missing_ok=True)
        result = self.invoke(tmp_path)
        assert result.exit_code == 1 and "t.db was deleted while in use: put it back" in result.stderr, result.output
        assert not (tmp_path / "t.db").exists()

    @pytest.mark.usefixtures("on_h200")
    def test_one_that_is_deleted_while_it_is_opened_likewise(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(engine, "_upgrade", lambda made: (tmp_path / "t.db").unlink())
        result = self.invoke(tmp_path)
        assert result.exit_code == 1 and "t.db was deleted while in use: put it back" in result.stderr, result.output

    @pytest.mark.usefixtures("no_gpu")
    def test_wrong_requests_exit_2(self, tmp_path: Path) -> None:
        assert self.invoke(tmp_path, "--gpu", "h300").exit_code == 2
        assert "h300" in self.invoke(tmp_path, "--gpu", "h300").stderr
        assert self.invoke(tmp_path).exit_code == 2, "auto without a GPU"
        assert self.invoke(tmp_path, "--trials", "0").exit_code == 2
        missing = invoke(cli.app, "no-such-job")
        assert missing.exit_code == 2
        assert "demo" in missing.stderr

    @pytest.mark.usefixtures("no_gpu")
    def test_predicted(self, tmp_path: Path) -> None:
        result = self.invoke(tmp_path, "--gpu", "a100", "--limit", "4")
        assert result.exit_code == 0, result.output
        assert "predicted (no such GPU here)" in " ".join(result.stdout.split())
        assert len(self.machine.compiled) == 8


@pytest.mark.slow
def test_real_compilers_predict_for_an_absent_gpu_and_resume(tmp_path: Path) -> None:
    """Both languages, through processes of their own; the second run compiles nothing."""
    job = tmp_path / "two.toml"
    job.write_text(
        'name = "two"\n[[tasks]]\nop = "gemm"\nproblems = ["m=512 n=512 k=512"]\n'
        '[[tasks]]\nop = "silu_mul"\nproblems = ["rows=512 cols=512"]\n'
    )
    first = tune(job, "rtx5090", db=str(tmp_path / "t.db"), jobs=1, limit=1)
    assert [(t.state, dict(t.attempts)) for t in first.tasks] == [("predicted", {"ok": 1})] * 2
    for task in first.tasks:
        w = task.winner
        assert w is not None and w.origin == "predicted" and w.gpu.target == "sm_120a"
        assert w.registers is not None and 0 < w.registers <= 255
    assert tune(job, "rtx5090", db=str(tmp_path / "t.db"), jobs=1, limit=1).measured == 0
