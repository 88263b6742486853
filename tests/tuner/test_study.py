"""A task's Optuna study: what it proposes, where it is stored, and that it follows the rows."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen

import optuna
import pytest
from optuna.trial import FrozenTrial, TrialState

from cutekernels.autotune import samplers, studies, studies_cli
from cutekernels.autotune.history import TaskHistory
from cutekernels.autotune.search import Search
from cutekernels.autotune.space import Space, space
from cutekernels.autotune.studies import Studies, place
from cutekernels.autotune.study import PATIENCE, Attempt, Study
from cutekernels.db.storage.engine import url_of
from cutekernels.db.storage.store import Environment, Store
from cutekernels.errors import JobError
from cutekernels.ops import registry
from tests.command_line import invoke
from tests.db.test_store import postgres  # noqa: F401  a fixture
from tests.tuner.toys import BEST, DEFAULT, H200, PROBLEM, TOY, VALID, ToyConfig, ToyMachine, find, task, true_us

SPACE = space(TOY, PROBLEM, H200)
# Two bodies with knobs of their own; thin's third value of b needs a=1.
ROWS = (*(("wide", a, 0) for a in (1, 2, 4)), *(("thin", a, b) for a in (1, 2) for b in (0, 1, 2) if b < 2 or a == 1))
BRANCHED = Space(ROWS, ("body", "a", "b"), ROWS, lambda row: float(ROWS.index(row)))


def begun(found: Space = SPACE, seeds: Any = (), sampler: str = "random", known: Any = None) -> Study:
    study = optuna.create_study()
    return Study(study, samplers.make(sampler, 7, found.branches), found, seeds, known or {})


def given(study: Study, value: Callable[[Any], float | None]) -> Iterator[Any]:
    while (config := study.next()) is not None:
        study.observe(config, Attempt(value(config), "ok", str(config)))
        yield config


class TestProposals:
    def test_parameters_carry_their_branch_and_have_one_distribution(self) -> None:
        assert BRANCHED.params[ROWS[0]] == {"body": "wide", "wide.a": 1}
        assert BRANCHED.params[ROWS[-1]] == {"body": "thin", "thin.a": 2, "thin.b": 1}
        shown = {name: d.choices for name, d in BRANCHED.distributions.items()}
        assert shown == {"body": ("wide", "thin"), "wide.a": (1, 2, 4), "thin.a": (1, 2), "thin.b": (0, 1, 2)}
        assert SPACE.params[BEST] == {"tile": 64, "warps": 8, "fast": True}, "one body: no branch"

    @pytest.mark.parametrize("sampler", ["random", "tpe"])
    def test_all_come_from_ask_and_are_valid_and_new(self, sampler: str) -> None:
        """Without a seed, and with none of them."""
        for found in (SPACE, BRANCHED):
            study = begun(found, sampler=sampler)
            tried = list(given(study, lambda config: 1.0))
            assert max(Counter(tried).values()) == 1 and set(tried) <= set(found.valid)
            assert len(tried) > len(found.valid) * 0.6
            asked = study._study.trials
            assert {t.state for t in asked if t.user_attrs["status"] == "invalid"} <= {TrialState.FAIL}
            assert not any("fixed_params" in t.system_attrs for t in asked)

    def test_seeds_come_first_in_their_order_as_enqueued_trials(self) -> None:
        seeds = [BEST, DEFAULT, ToyConfig(32, 4, True)]
        study = begun(seeds=seeds)
        assert [study.next() for _ in seeds] == seeds and study.seeded
        assert all("fixed_params" in t.system_attrs for t in study._study.trials)

    def test_one_that_was_tried_is_told_the_value_that_it_has(self) -> None:
        study = begun(BRANCHED)
        list(given(study, lambda config: 1.5))
        repeats = [t for t in study._study.trials if "repeats" in t.user_attrs]
        assert repeats and {t.value for t in repeats} == {1.5}

    def test_a_rule_is_kept_by_samplers_that_draw_all_parameters_together(self) -> None:
        study = begun(SPACE, sampler="nsgaii")
        list(given(study, true_us))
        states = Counter((t.user_attrs["status"], t.state) for t in study._study.trials)
        assert states["ok", TrialState.COMPLETE] and {s for k, s in states if k == "invalid"} <= {TrialState.FAIL}

    def test_equal_seeds_propose_alike(self) -> None:
        def first(count: int) -> list[Any]:
            study = begun()
            return [study.next() for _ in range(count)]

        assert first(9) == first(9)

    def test_openers_are_of_different_shapes(self) -> None:
        assert [c.tile for c in SPACE.openers([])] == [128, 64, 32, 16] * 2
        assert SPACE.openers([BEST, ToyConfig(128, 1, False)])[0] == BEST, "what is not valid is left out"

    def test_a_space_of_one_config(self) -> None:
        study = begun(Space(("x",), ("body",), (("one",),), lambda config: 1.0))
        assert study.next() == "x" and study.next() is None and study.converged()


class TestEnd:
    def test_attempts_without_an_improvement_end_a_search(self) -> None:
        study = begun(seeds=[DEFAULT])
        number = 0
        while not study.converged():
            number += 1
            study.observe(study.next(), Attempt(1.0 if number < 3 else 0.9, "ok", str(number)))
        assert number == 3 + PATIENCE

    def test_an_untried_seed_prolongs_it(self) -> None:
        known = {c: Attempt(1.0) for c in VALID[: PATIENCE + 5]}
        assert begun(known=known).converged()
        assert not begun(known=known, seeds=[VALID[-1]]).converged()


class TestSamplers:
    @pytest.mark.parametrize(
        ("name", "words"),
        [
            ("cmaes", "numbers alone"),
            ("qmc", "numbers alone"),
            ("bruteforce", "ends its study itself"),
            ("grid", "no sampler 'grid'.*Known: .*random.*tpe"),
            ("tpee", "Did you mean 'tpe'"),
            ("nsgaii", "each body has its own \\(wide, thin\\): use random or tpe"),
            ("gp", "each body has its own|not installed"),
        ],
    )
    def test_what_cannot_take_the_space_is_refused(self, name: str, words: str) -> None:
        with pytest.raises(JobError, match=words):
            samplers.make(name, 0, BRANCHED.branches)

    def test_names_of_optuna_are_taken(self) -> None:
        assert {samplers.checked(name) for name in ("TPESampler", "tpe", "TPE")} == {"tpe"}
        assert type(samplers.make("NSGAIISampler", 0, []).inner) is optuna.samplers.NSGAIISampler


# ---- stored studies -----------------------------------------------------------------------------------------


def searched(store: Store, kept: Studies, **more: Any) -> TaskHistory:
    machine = ToyMachine(wrong={VALID[5]: 4.0})
    history = TaskHistory(store, TOY, PROBLEM, H200, Environment(driver="580"), "measured")
    Search(task(20), H200, history, machine, studies=kept, clock=machine.clock, **more).run()
    return history


def agrees(url: str, history: TaskHistory) -> list[FrozenTrial]:
    """The trials of the stored study. Those with a row are the rows: the same ids, states and values."""
    kept = Studies(url)
    trials = optuna.load_study(study_name=history.name, storage=kept.storage).trials
    kept.close()
    stored = {row.id: studies.attempt_of(row) for row in history.stored()}
    found = [t for t in trials if "row" in t.user_attrs]
    assert len(found) == len(stored) and {t.user_attrs["row"] for t in found} == set(stored)
    for trial in found:
        attempt = stored[trial.user_attrs["row"]]
        assert (trial.state, trial.value, trial.user_attrs["status"]) == (attempt.state, attempt.value, attempt.status)
    assert all(t.state.is_finished() for t in trials)
    return trials


class TestStored:
    @pytest.mark.parametrize("kind", ["sqlite", "postgres"])
    def test_a_study_is_its_tasks_rows_and_is_resumed(
        self, kind: str, request: pytest.FixtureRequest, tmp_path: Path
    ) -> None:
        url = str(request.getfixturevalue("postgres")()) if kind == "postgres" else str(tmp_path / "t.db")
        with Store(url) as store:
            for _ in range(2):
                kept = Studies(store.url)
                history = searched(store, kept)
                kept.close()
                trials = agrees(store.url, history)
                assert history.name == "h200 toy r3 [m=16 n=64]"
            kept = Studies(store.url)
            searched(store, kept)
            kept.close()
            assert len(agrees(store.url, history)) == len(trials), "a task that is done adds nothing"

    def test_rows_rebuild_a_study(self, tmp_path: Path) -> None:
        with Store(tmp_path / "t.db") as store:
            kept = Studies(store.url)
            history = searched(store, kept)
            names = [s.study_name for s in optuna.get_all_study_summaries(kept.storage)]
            optuna.delete_study(study_name=history.name, storage=kept.storage)
            kept.study(history, SPACE, history.earlier())
            kept.close()
            agrees(store.url, history)
            assert names == [history.name]

    def test_a_trial_whose_row_was_lost_is_forgotten(self, tmp_path: Path) -> None:
        """The ledger writes rows a second later than the study its trials, and a kill may come between."""
        with Store(tmp_path / "t.db") as store:
            kept = Studies(store.url)
            history = searched(store, kept)
            rows = history.earlier()
            study = kept.study(history, SPACE, rows[:-3])
            assert {t.user_attrs["row"] for t in study.trials} == {row.id for row in rows[:-3]}
            kept.close()

    def test_force_begins_anew_and_the_next_run_has_all_rows(self, tmp_path: Path) -> None:
        with Store(tmp_path / "t.db") as store:
            for force in (False, True, False):
                kept = Studies(store.url)
                history = searched(store, kept, force=force)
                kept.close()
            agrees(store.url, history)

    def test_what_optuna_shows_of_a_running_and_of_a_finished_study(self, tmp_path: Path) -> None:
        from optuna import visualization

        with Store(tmp_path / "t.db") as store:
            kept = Studies(store.url)
            seen: list[Counter[TrialState]] = []

            def look(*_: object) -> None:
                storage = optuna.storages.JournalStorage(optuna.storages.journal.JournalFileBackend(place(store.url)))
                study = optuna.load_study(study_name=None, storage=storage)  # there is one
                seen.append(Counter(t.state for t in study.trials))
                for plot in (visualization.plot_optimization_history, visualization.plot_parallel_coordinate):
                    assert plot(study).data

            machine = ToyMachine()
            history = TaskHistory(store, TOY, PROBLEM, H200, Environment(), "measured")
            told = lambda trial, done, wanted: look() if done in (3, 20) else None  # noqa: E731
            Search(task(20), H200, history, machine, studies=kept, clock=machine.clock, on_trial=told).run()
            kept.close()
        assert seen[0][TrialState.RUNNING] and seen[0][TrialState.COMPLETE] >= 3
        look()
        assert not seen[-1][TrialState.RUNNING] + seen[-1][TrialState.WAITING]


@pytest.mark.skipif(shutil.which("optuna-dashboard") is None, reason="pip install optuna-dashboard")
def test_optunas_dashboard_opens_a_study_that_another_process_writes(tmp_path: Path) -> None:
    with Store(tmp_path / "t.db") as store:
        kept, machine = Studies(store.url), ToyMachine()
        history = TaskHistory(store, TOY, PROBLEM, H200, Environment(driver="580"), "measured")
        Search(task(3), H200, history, machine, studies=kept, clock=machine.clock).run()
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        shown = subprocess.Popen(["optuna-dashboard", place(store.url), "--port", str(port)], stderr=subprocess.DEVNULL)
        try:

            def answer(path: str) -> Any:
                return json.loads(urlopen(f"http://127.0.0.1:{port}/api/studies{path}", timeout=60).read())

            limit = time.monotonic() + 60
            while True:
                try:
                    (study,) = answer("")["study_summaries"]
                    break
                except URLError:
                    assert shown.poll() is None and time.monotonic() < limit
                    time.sleep(0.1)
            assert study["study_name"] == history.name
            few = len(answer(f"/{study['study_id']}?after=0")["trials"])
            searched(store, kept)
            while len(answer(f"/{study['study_id']}?after=0")["trials"]) <= few:  # it reads anew after some seconds
                assert time.monotonic() < limit, "resumed in the same study"
                time.sleep(0.1)
        finally:
            shown.kill()
            shown.wait()
            kept.close()


class TestJournal:
    def test_a_torn_line_is_cut_off(self, tmp_path: Path) -> None:
        with Store(tmp_path / "t.db") as store:
            kept = Studies(store.url)
            searched(store, kept)
            with open(place(store.url), "ab") as file:
                file.write(b'{"op_code":5,"worker_id":"' + b"x" * 5000)  # a killed writer's
            other = Studies(store.url)
            searched(store, other, force=True)
            assert len(kept.storage.get_all_studies()) == 1, "a run that lived meanwhile reads on"
            other.close()
            kept.close()
            assert b"xx" not in Path(place(store.url)).read_bytes()
            assert Path(place(store.url)).read_bytes().endswith(b"\n")

    def test_one_that_cannot_be_read_begins_anew(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        for trash in (b"\x00\xff\n{}\n", b'{"op_code": 77}\n', b"[1]\n[2]\n", b"{oops\n{}\n"):
            with Store(tmp_path / "t.db") as store:
                Path(place(store.url)).write_bytes(trash)
                kept = Studies(store.url)
                history = searched(store, kept)
                kept.close()
                agrees(store.url, history)
        assert "begins anew" in caplog.text

    def test_a_large_one_begins_anew_unless_another_run_has_it(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(studies, "MOST_BYTES", 1000)
        with Store(tmp_path / "t.db") as store:
            first = Studies(store.url)
            searched(store, first)
            size = Path(place(store.url)).stat().st_size
            Studies(store.url).close()
            assert Path(place(store.url)).stat().st_size == size > 1000
            first.close()
            Studies(store.url).close()
            assert Path(place(store.url)).stat().st_size == 0

    def test_lines_are_optunas(self, tmp_path: Path) -> None:
        with Store(tmp_path / "t.db") as store:
            kept = Studies(store.url)
            searched(store, kept)
            kept.close()
            lines = Path(place(store.url)).read_text().splitlines()
            assert all("op_code" in json.loads(line) for line in lines)


def test_the_command_brings_back_the_studies_of_all_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "get", find)
    url = url_of(tmp_path / "t.db")
    with Store(url) as store:
        histories = []
        for text in ("m=16 n=64", "m=32 n=64"):
            machine = ToyMachine()
            job = task(8, text)
            histories.append(TaskHistory(store, TOY, job.problem, H200, Environment(), "measured"))
            Search(job, H200, histories[-1], machine, clock=machine.clock).run()
        assert not Path(place(url)).exists()
        shown = invoke(studies_cli.app, "--db", url, "--format", "json")
        assert shown.exit_code == 0 and f"2 studies; optuna-dashboard {place(url)}" in shown.stderr
        assert [row["trials"] for row in json.loads(shown.stdout)] == [len(h.stored()) for h in histories]
        for history in histories:
            agrees(url, history)
        invoke(studies_cli.app, "--db", url, "--op", "toy", "--gpu", "h200")
        for history in histories:
            agrees(url, history)
