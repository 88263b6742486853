"""``tune card``: the check of every op, the order, the page, the file to send; on a machine with a card and without."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

import pytest

from cutekernels import cli as commands
from cutekernels import gpu as gpus
from cutekernels import installation
from cutekernels.autotune import card, check, cli, grid, run, runtime
from cutekernels.autotune.fleet import OneSlot
from cutekernels.autotune.grid import ProductFamily, points
from cutekernels.autotune.job import load
from cutekernels.db.storage.snapshot import Snapshot
from cutekernels.isolate import ChildDied
from cutekernels.ops import registry
from tests.command_line import invoke
from tests.tuner.toys import BEST, DEFAULT, H200, TOY, ToyMachine

TOYS = ProductFamily("toy", lambda: iter([f"m={m} n=64" for m in (16, 64, 256)]), 1.0, 0.1)


class Machine(ToyMachine):
    """One that is closed after use, as the runtime of a check is."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        pass


@pytest.fixture(autouse=True)
def _on_h200(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(registry._loaded, "toy", TOY)
    monkeypatch.setattr(card, "registry", SimpleNamespace(OPS=(TOY,)))
    monkeypatch.setattr(card, "families", lambda: (TOYS,))
    monkeypatch.setattr(gpus, "detect", lambda device=None: H200)
    monkeypatch.setattr(installation, "problems", lambda machine: [])
    monkeypatch.setattr(runtime, "LocalRuntime", lambda jobs: Machine())
    monkeypatch.setattr(run, "LocalFleet", lambda *rest: OneSlot(H200, ToyMachine()))
    points.cache_clear()
    yield
    points.cache_clear()


def card_of(out: Path, *words: str) -> Any:
    return invoke(cli.app, "card", "--out", str(out), *words)


# ---- what is tuned ----------------------------------------------------------------------------------------------


def test_it_tunes_what_the_models_call() -> None:
    """All problems of the bundled jobs, each once, and the small products that defaults lose before norms."""
    families = _families()
    wanted = {(t.op.name, str(t.problem)) for model in card.MODELS for t in load(model).tasks}
    found = grid.plan(Snapshot({}), gpus.lookup("l40s"), families=families, name=card.NAME)
    assert {(t.op.name, str(t.problem)) for t in found.job.tasks} == wanted and len(found.job.tasks) == len(wanted)
    assert found.job.name == "card" and found.job.ranked
    assert Counter(t.op.name for t in found.job.tasks[:20]).keys() <= {"gemm", "quantized_linear"}


_families = card.families


# ---- the check of every op --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("machine", "state"),
    [
        (ToyMachine(), "right"),
        (ToyMachine(wrong={DEFAULT: 7.0}), "wrong, 7 times the tolerance"),
        (ToyMachine(failures={DEFAULT: ChildDied("w", -11, "")}), "failed: "),
        (ToyMachine(compile_failures={DEFAULT: ChildDied("c", -11, "")}), "failed: "),
    ],
)
def test_an_op_is_right_or_says_how_it_is_not(machine: ToyMachine, state: str) -> None:
    (row,) = check.check_ops([TOY], H200, machine, 60.0, machine.clock)
    assert row["state"].startswith(state)
    assert (row["op"], row["config"]) == ("toy", str(TOY.default(TOY.Problem.parse(row["problem"]), H200)))


def test_ops_that_the_time_is_too_short_for_say_so() -> None:
    machine = ToyMachine(seconds_per_measure=40.0)
    states = [row["state"] for row in check.check_ops([TOY, TOY, TOY], H200, machine, 60.0, machine.clock)]
    assert states == ["right", "right", "not reached in 60 s"]


def test_every_op_has_a_sample_to_be_checked_on() -> None:
    """The least work of its suite, which the default takes on each of the named cards."""
    for spec in (gpus.lookup(name) for name in ("rtx5090", "l40s", "a100")):
        machine = ToyMachine()
        machine.compile = lambda op, problem, config, gpu: op.check(problem, config, gpu)  # type: ignore[assignment,method-assign]
        rows = check.check_ops(registry.OPS, spec, machine, -1.0, lambda: 0.0)
        with pytest.raises(AttributeError, match="cancel"):  # all are posed before the first is measured
            next(rows)


# ---- the whole command ------------------------------------------------------------------------------------------


def test_a_run_ends_with_a_page_and_a_file_that_import_takes(tmp_path: Path) -> None:
    done = card_of(tmp_path, "--trials", "40")
    assert done.exit_code == 0, done.output
    assert "1 of 1 ops are right on this GPU" in done.stderr
    page = (tmp_path / "cutekernels-h200.md").read_text()
    assert page.startswith("# NVIDIA H200 (h200), ")
    for line in (
        "3 of the models' 3 problems",
        "3 of all 3 winners are faster",
        "0 problems failed",
        "finals: 1700 to",
    ):
        assert line in page
    assert str(BEST) in page and "stood in" not in page
    sent = tmp_path / "cutekernels-h200.jsonl"
    rows = [json.loads(line) for line in sent.read_text().splitlines()]
    assert {row["problem"] for row in rows} == {"m=16 n=64", "m=64 n=64", "m=256 n=64"}
    shown = invoke(
        commands.app, "db", "import", str(sent), "--dry-run", "--db", str(tmp_path / "other.db"), "--format", "json"
    )
    assert [row["state"] for row in json.loads(shown.stdout)] == ["only in b"] * 3
    again = card_of(tmp_path, "--trials", "40", "--format", "json")
    assert json.loads(again.stdout)["tasks"] == [], "a second run has nothing left"
    assert "3 of the models' 3 problems" in (tmp_path / "cutekernels-h200.md").read_text()


def test_a_run_that_ends_early_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "LocalFleet", lambda *rest: OneSlot(H200, _Interrupted()))
    first = card_of(tmp_path)
    assert first.exit_code == 1 and "the same command resumes" in " ".join(first.stderr.split())
    assert list(tmp_path.glob("*.md")) == []
    monkeypatch.setattr(run, "LocalFleet", lambda *rest: OneSlot(H200, ToyMachine()))
    done = card_of(tmp_path, "--format", "json")
    assert sorted(row["resumed"] > 0 for row in json.loads(done.stdout)["tasks"]) == [False, False, True]


class _Interrupted(ToyMachine):
    """Ctrl-C at the fifth measurement."""

    def measure(self, request: Any) -> Any:
        if len(self.measured) == 5:
            raise KeyboardInterrupt
        return super().measure(request)


def test_the_page_names_what_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "LocalRuntime", lambda jobs: Machine(wrong={DEFAULT: 3.0}))
    monkeypatch.setattr(run, "LocalFleet", lambda *rest: OneSlot(H200, ToyMachine(wrong={DEFAULT: 3.0})))
    assert card_of(tmp_path, "--trials", "2").exit_code == 1
    page = (tmp_path / "cutekernels-h200.md").read_text()
    assert "0 of 1 ops are right" in page and "3 times the tolerance" in page


def test_a_stand_ins_page_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = gpus.lookup("h200-as-l40s")
    monkeypatch.setattr(gpus, "detect", lambda device=None: spec)
    monkeypatch.setattr(run, "LocalFleet", lambda *rest: OneSlot(spec, ToyMachine()))
    assert card_of(tmp_path, "--trials", "2").exit_code == 0
    assert "It stood in for l40s: its times are no l40s's" in (tmp_path / "cutekernels-h200-as-l40s.md").read_text()


def test_a_machine_whose_parts_do_not_go_together_measures_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    misfit = installation.Misfit("driver", "broken", "550 runs CUDA 12.2", "install 580")
    monkeypatch.setattr(installation, "problems", lambda machine: [misfit])
    done = card_of(tmp_path)
    assert done.exit_code == 1 and "driver, broken: 550 runs CUDA 12.2; install 580" in " ".join(done.stderr.split())


def test_without_the_card_it_says_what_it_would_do_and_predicts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "LocalRuntime", lambda jobs: Machine())
    monkeypatch.chdir(tmp_path)
    listed = invoke(cli.app, "card", "--gpu", "l40s", "--list", "--format", "json")
    assert [row["problem"] for row in json.loads(listed.stdout)] == ["m=16 n=64", "m=64 n=64", "m=256 n=64"]
    dry = invoke(cli.app, "card", "--gpu", "l40s", "--dry-run", "--limit", "2", "--format", "json")
    assert [(row["origin"], row["to_do"]) for row in json.loads(dry.stdout)] == [("predicted", 2)] * 3
    done = invoke(cli.app, "card", "--gpu", "l40s", "--format", "json")
    assert done.exit_code == 0, done.output
    assert "no l40s is here: nothing is checked or measured" in " ".join(done.stderr.split())
    assert {task["origin"] for task in json.loads(done.stdout)["tasks"]} == {"predicted"}
    assert list(tmp_path.glob("cutekernels-*")) == []


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--minutes", "3", "--budget-s", "9"], "both say how long"),
        (["--ray", "auto"], "leave --ray out"),
        (["--as", "h100"], "h200 has what h100-sxm has"),
        (["--gpu", "l40s"], "--out is where `card` puts what it measured on a card that is here: leave it out"),
        (["--gpu", "a100", "--as", "l40s"], "a100-sxm-80gb cannot stand in for l40s"),
    ],
)
def test_misuse(tmp_path: Path, words: list[str], why: str) -> None:
    done = card_of(tmp_path, *words)
    assert done.exit_code == 2 and why in " ".join(done.stderr.split())
