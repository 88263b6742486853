"""Guests end to end: tuned by the real processes on the CPU, their rows kept apart from what calls use."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from cutekernels import cli, dispatch, guests
from cutekernels import compile as compiler
from cutekernels import gpu as gpus
from cutekernels.autotune import job as jobs
from cutekernels.autotune import runtime
from cutekernels.autotune.job import Job, Task
from cutekernels.autotune.run import tune
from cutekernels.autotune.runtime import LocalRuntime, Spares
from cutekernels.autotune.turns import Turns
from cutekernels.backends import Facts
from cutekernels.db import snapshot
from cutekernels.db.store import Store
from cutekernels.errors import JobError, UnsupportedProblem
from cutekernels.ops import registry
from tests.guests.toy import BEST, COMPILER, GPU, NAME, REFUSED, WRONG, SumsConfig, SumsProblem
from tests.tuner.toys import ToyMachine

ROOT = Path(__file__).parents[2]
H200 = gpus.lookup("h200")
JOB = f'name = "sums"\ntrials = 8\n[[tasks]]\nop = "{NAME}"\nproblems = ["m=4 k=8"]\n'


@pytest.fixture(autouse=True)
def _on_h200(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT))
    monkeypatch.setattr(gpus, "detect", lambda device=None: H200)
    monkeypatch.setattr(runtime, "WORKER_TARGET", "tests.guests.toy:answer")


def cutekernels(*words: str) -> Any:
    return CliRunner().invoke(cli.app, list(words))


@pytest.mark.slow
def test_a_candidate_that_crashes_costs_itself_only(tmp_path: Path) -> None:
    """The compiler aborts on one, the GPU's process dies of another, two more are wrong or refused: four still race."""
    sums = guests.load(NAME)
    db = str(tmp_path / "tuned.db")
    with LocalRuntime(1, spares=Spares(0, {}, Turns())) as machine:
        report = tune(Job("sums", (Task(sums, SumsProblem(4, 8), 8),)), db=db, runtime=machine)
    (task,) = report.tasks
    assert (report.ok, task.state) == (True, "tuned")
    assert task.winner is not None and task.winner.config == str(SumsConfig(BEST))
    assert task.winner.certificate is not None and task.winner.certificate.default == "parts=1"
    with Store(db) as store:
        rows = {SumsConfig.parse(t.config).parts: t for t in store.trials(op=NAME)}
        (winner,) = store.winners(op=NAME)
    assert {parts: rows[parts].status for parts in (COMPILER, GPU, WRONG, REFUSED)} == {
        COMPILER: "compile_error",
        GPU: "crashed",
        WRONG: "wrong_result",
        REFUSED: "compile_error",
    }
    assert "SIGABRT" in rows[COMPILER].message and "shared memory" in rows[REFUSED].message
    assert all(rows[parts].status == "ok" for parts in (1, 2, 4, BEST))
    assert winner.id == task.winner.id

    # No call reads the row, and the database says so.
    known, without = snapshot.load("h200", db, strict=True), snapshot.load("h200", str(_empty(tmp_path)))
    assert known.table.keys() == without.table.keys()
    assert dispatch.resolve(sums, SumsProblem(4, 8), H200, snapshot.load("h200", db)).origin == "default"
    (listed,) = json.loads(cutekernels("db", "query", "--op", NAME, "--local", "--format", "json", "--db", db).stdout)
    assert (listed["serves"], listed["problem"]) == (False, {"m": 4, "k": 8})
    assert "a guest's" in listed["reason"]
    assert "unknown op" not in cutekernels("db", "doctor", "--db", db).output

    # It travels like any other row.
    exported = tmp_path / "winners.jsonl"
    assert cutekernels("db", "export", str(exported), "--db", db).exit_code == 0
    assert cutekernels("db", "import", str(exported), "--db", str(tmp_path / "other.db")).exit_code == 0
    with Store(str(tmp_path / "other.db")) as other:
        assert [t.op for t in other.winners()] == [NAME]


def _empty(folder: Path) -> Path:
    with Store(str(folder / "empty.db")):
        return folder / "empty.db"


def test_a_faulty_description_costs_its_task_only(tmp_path: Path) -> None:
    guest = guests.load("tests.guests.toy:faulty")
    job = Job("sums", tuple(Task(guest, SumsProblem(m, 8), 8) for m in (5, 6)))
    report = tune(job, db=str(tmp_path / "tuned.db"), runtime=ToyMachine())
    assert [task.state for task in report.tasks] == ["failed", "failed"]
    assert not guests.fault(guest, SumsProblem(7, 8), H200)
    assert "breaks a rule of its own" in report.tasks[0].message and "m must not be 5" in report.tasks[0].message
    assert "ZeroDivisionError at" in report.tasks[1].message and "toy.py:" in report.tasks[1].message


def test_a_job_file_names_ready_guests_and_those_that_its_user_allows(tmp_path: Path) -> None:
    file = tmp_path / "sums.toml"
    file.write_text(JOB)
    with pytest.raises(JobError, match=f"allow it with --guest {NAME}"):
        jobs.load(file)
    (task,) = jobs.load(file, guests=[NAME]).tasks
    assert task.op is guests.load(NAME) and str(task) == f"{NAME} [m=4 k=8]"
    ready = JOB.replace(NAME, "cutekernels.guests.vllm:fused_moe").replace("m=4 k=8", "m=4 experts=8 n=64 k=64 top_k=2")
    (task,) = jobs.parse(ready, "ready.toml").tasks
    assert task.op.name == "cutekernels.guests.vllm:fused_moe"
    refused = cutekernels("tune", str(file), "--gpu", "h200", "--list")
    assert refused.exit_code == 2 and "--guest" in refused.output
    for words in ((str(file), "--guest", NAME), ("grid",), ("--requests",)):  # allowed, and named nowhere
        unnamed = cutekernels("tune", *words, "--guest", "mine:other", "--gpu", "h200", "--list")
        assert unnamed.exit_code == 2 and "allows a kernel that" in unnamed.output
    listed = cutekernels("tune", str(file), "--guest", NAME, "--gpu", "h200", "--list", "--format", "json")
    assert [row["op"] for row in json.loads(listed.stdout)] == [NAME]
    absent = cutekernels("tune", str(file), "--guest", NAME, "--gpu", "l40s", "--list")
    assert absent.exit_code == 0 and "predicted" not in absent.output, "a guest never is"


def test_a_guest_is_never_predicted(tmp_path: Path) -> None:
    job = Job("sums", (Task(guests.load(NAME), SumsProblem(4, 8), 8),))
    with pytest.raises(JobError, match="measured, never predicted"):
        tune(job, "l40s", db=str(tmp_path / "tuned.db"))
    file = tmp_path / "sums.toml"
    file.write_text(JOB)
    assert cutekernels("tune", str(file), "--guest", NAME, "--gpu", "l40s", "--dry-run").exit_code == 2


def test_a_ready_guest_without_its_engine_is_refused_before_anything_starts(tmp_path: Path) -> None:
    problem = jobs.parse(
        'name = "x"\n[[tasks]]\nop = "cutekernels.guests.vllm:fused_moe"\n'
        'problems = ["m=4 experts=8 n=64 k=64 top_k=2"]\n',
        "x.toml",
    )
    with pytest.raises(JobError, match="needs vllm, which is not installed here: pip install vllm"):
        tune(problem, db=str(tmp_path / "tuned.db"))
    assert not (tmp_path / "tuned.db").exists()


def test_a_row_of_a_database_imports_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stranger's row may name any module; only a user's word or a run's request loads one."""
    monkeypatch.setattr(guests, "import_module", lambda name: pytest.fail(f"{name} was imported"))
    assert registry.find("os:abort") is None
    with pytest.raises(UnsupportedProblem, match="no op is called"):
        registry.get("os:abort")


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("tests.guests.toy:not_a_guest", "must be a function that returns a Guest; it gave str"),
        ("tests.guests.toy:absent", "must be a function that returns a Guest; it gave NoneType"),
        ("tests.guests.nowhere:sums", "must be on Python's path"),
        ("tests/guests/toy.py:sums", "is named module:function"),
        (f"a{'b' * 127}:c", "in at most 128 characters"),
        ("tests.guests.toy:answer", r"cannot be described: TypeError at .*missing 1 required positional argument"),
        ("cutekernels.guests:Guest", "cannot be described: TypeError at .*abstract"),
        ("tests.guests.toy:unfinished", "has no revision: Unfinished must set it"),
        ("tests.guests.toy:numbered", "revision is a whole number from 0 to 2147483647; it is '1'"),
        (
            "tests.guests.toy:problemless",
            "Problem is a frozen dataclass that extends cutekernels.op.Problem; it is None",
        ),
        (
            "tests.guests.toy:configless",
            "Config is a frozen dataclass that extends cutekernels.op.Config; it is <class",
        ),
        ("tests.guests.toy:ending", "cannot be described: SystemExit at "),
    ],
)
def test_what_is_no_guest_is_refused(name: str, why: str) -> None:
    with pytest.raises(UnsupportedProblem, match=why):
        guests.load(name)


def test_a_job_of_a_guest_whose_work_is_none_is_listed(tmp_path: Path) -> None:
    """``--list`` needs no work; the run says, for each task, what the description lacks."""
    name = "tests.guests.toy:workless"
    file = tmp_path / "job.toml"
    file.write_text(f'name = "mine"\n[[tasks]]\nop = "{name}"\nproblems = ["m=4 k=8"]\n')
    listed = CliRunner().invoke(cli.app, ["tune", str(file), "--guest", name, "--list"])
    assert listed.exit_code == 0, listed.output
    assert "1 tasks" in listed.stderr
    assert "NoneType" in guests.fault(guests.load(name), SumsProblem(4, 8), H200)
    with pytest.raises(JobError, match="holds no problem: give problems = "):
        jobs.parse(f'name = "mine"\n[[tasks]]\nop = "{name}"\n', "job.toml", find=lambda name: guests.load(name))


def test_problems_of_other_extents_compile_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """A guest's compiler may specialize on any extent: what it said of one problem is not what it says of another."""
    sums = guests.load(NAME)
    monkeypatch.setattr(type(sums), "compile", lambda self, p, c, gpu: Facts(p.k, 0, 0))
    own = [compiler.prepare(sums, SumsProblem(4, k), SumsConfig(1), H200).registers for k in (8, 16, 8)]
    assert own == [8, 16, 8]


def test_one_object_may_have_two_names() -> None:
    """Rows of the first are not stored under the second's name."""
    first, second = guests.load("tests.guests.toy:ONE"), guests.load("tests.guests.toy:same")
    assert (first.name, second.name) == ("tests.guests.toy:ONE", "tests.guests.toy:same")


def test_the_page_s_job_is_one() -> None:
    page = (ROOT / "docs" / "moe-tables.md").read_text()
    (text,) = re.findall(r"^```toml\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    found = jobs.parse(text, "page")
    assert [task.problem.m for task in found.tasks][-1] == 4096 and len(found.tasks) == 18  # type: ignore[attr-defined]
    fp8 = text + 'dtype = "fp8_w8a8"\nblock_n = 128\nblock_k = 128\n'
    assert len(jobs.parse(fp8, "page").tasks) == 18
