"""The dispatcher: sources of configs, explanations, and broken databases that never break a call."""

from __future__ import annotations

import logging
import math
import os
import sqlite3
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from cutekernels import compile as compiler
from cutekernels import dispatch, introspection
from cutekernels import gpu as gpus
from cutekernels.db.storage import snapshot as snapshots
from cutekernels.db.storage.snapshot import Snapshot, TunedConfig
from cutekernels.db.storage.store import Store
from cutekernels.errors import InvalidConfig, StoreError, UnknownGpu, UnsupportedProblem
from cutekernels.ops import registry
from tests.db.trials import edit, trial
from tests.tuner.toys import H200, TOY, ToyConfig, ToyOp, ToyProblem

PROBLEM = ToyProblem(16, 64)
DEFAULT = TOY.default(PROBLEM, H200)
A, B, C = ToyConfig(32, 1, False), ToyConfig(32, 2, False), ToyConfig(64, 4, True)


@pytest.fixture(autouse=True)
def _a_dispatcher_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshots, "_held", {})
    monkeypatch.setattr(dispatch, "_plans", {})
    monkeypatch.setattr(snapshots, "_said", set())


def winner(problem: str, config: Any, origin: str = "measured", **changes: Any) -> TunedConfig:
    reason = "2.00 times as fast by the model" if origin == "predicted" else ""
    values: dict[str, Any] = {"op": TOY.name, "revision": TOY.revision, "median_us": 10.0, "ratio": 1.25}
    values |= {"source": "database", "reason": reason} | changes
    return TunedConfig(problem=problem, config=str(config), origin=origin, **values)


def snapshot(*rows: TunedConfig, op: ToyOp = TOY, revision: int | None = None) -> Snapshot:
    table = {row.problem: row for row in rows}
    return Snapshot(MappingProxyType({(op.name, op.revision if revision is None else revision): table}))


def origin(*rows: TunedConfig, problem: ToyProblem = PROBLEM, op: ToyOp = TOY) -> tuple[str, Any]:
    choice = dispatch.resolve(op, problem, H200, snapshot(*rows, op=op))
    return choice.origin, choice.config


class SmallTiles(ToyOp):
    """A tile may be no larger than m: a rule that the bucket, rounded up, may satisfy and the problem not."""

    def why_not(self, p: ToyProblem, c: ToyConfig, gpu: Any) -> str | None:
        if c.tile > max(16, p.m):
            return f"tile={c.tile} is larger than m={p.m}"
        return super().why_not(p, c, gpu)


# ---- where a config comes from --------------------------------------------------------------------------


class TestOrder:
    def test_nothing_known_is_the_default(self) -> None:
        choice = dispatch.resolve(TOY, PROBLEM, H200, snapshot())
        assert (choice.origin, choice.config, choice.winner) == ("default", DEFAULT, None)
        assert origin() == ("default", DEFAULT)

    def test_each_source_hides_those_behind_it(self) -> None:
        tuned = winner("m=16 n=64", A)
        nearest = winner("m=32 n=64", B)
        predicted = winner("m=16 n=64", C, "predicted", median_us=None, ratio=None)
        assert origin(tuned, nearest) == ("tuned", A)
        assert origin(nearest, predicted) == ("nearest", B)
        assert origin(predicted) == ("predicted", C)
        assert origin(winner("m=32 n=64", C, "predicted")) == ("predicted", C)
        everything = snapshot(tuned, nearest)
        choice = dispatch.resolve(TOY, PROBLEM, H200, everything, forced=C)
        assert (choice.origin, choice.config) == ("forced", C)

    @pytest.mark.parametrize(("ratio", "serves"), [(1.25, True), (1.1, True), (1.099, False), (None, False)])
    def test_a_siblings_winner_serves_where_it_gained_enough(
        self, ratio: float | None, serves: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        own: list[TunedConfig] = []
        held: dict[str, Any] = {
            "h200-as-l40s": snapshot,
            "h200": lambda: snapshot(*own),
            "h100-sxm": lambda: snapshot(winner("m=16 n=64", A, ratio=ratio)),
        }
        monkeypatch.setattr(dispatch, "winners", lambda gpu: held[gpu.name]())
        choice = dispatch.resolve(TOY, PROBLEM, H200)
        assert (choice.origin, choice.config) == (("sibling", A) if serves else ("default", DEFAULT))
        assert dispatch.resolve(TOY, ToyProblem(24, 64), H200).origin == "default", "a neighbour's does not serve"
        assert "on h100-sxm" in dict(dispatch.explain(TOY, PROBLEM, H200).considered)["sibling"]
        own.append(winner("m=40 n=64", B))
        assert dispatch.resolve(TOY, PROBLEM, H200).origin == "nearest"
        assert dispatch.resolve(TOY, PROBLEM, H200, snapshot()).origin == "default"
        assert dispatch.resolve(TOY, PROBLEM, gpus.lookup("h200-as-l40s"), None).origin == "default"

    def test_a_siblings_gain_over_another_default_says_nothing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        held = {"h200": snapshot(), "h100-sxm": snapshot(winner("m=16 n=64", A))}
        monkeypatch.setattr(dispatch, "winners", lambda gpu: held[gpu.name])
        own = TOY.default
        monkeypatch.setattr(TOY, "default", lambda p, gpu: own(p, gpu) if gpu == H200 else B)
        assert dispatch.resolve(TOY, PROBLEM, H200).origin == "default"
        assert "is another here" in dict(dispatch.explain(TOY, PROBLEM, H200).considered)["sibling"]

    def test_explain_names_the_siblings_gpu(self, monkeypatch: pytest.MonkeyPatch) -> None:
        held = {"h200": snapshot(), "h100-sxm": snapshot(winner("m=16 n=64", A))}
        monkeypatch.setattr(dispatch, "winners", lambda gpu: held[gpu.name])
        rows = dict(dispatch.explain(TOY, PROBLEM, H200).rows)
        assert "its bucket on h100-sxm" in rows["measured"]
        assert "note" not in rows

    def test_a_sibling_has_the_sms_of_the_gpu(self) -> None:
        for name, other in gpus.SIBLINGS.items():
            one, two = gpus.lookup(name), gpus.lookup(other)
            assert (one.capability, one.sm_count, gpus.sibling(one)) == (two.capability, two.sm_count, two)
        assert gpus.sibling(gpus.lookup("h200-as-l40s")) is None

    def test_a_problem_stands_under_its_bucket(self) -> None:
        assert origin(winner("m=16 n=64", A), problem=ToyProblem(13, 64)) == ("tuned", A)
        assert origin(winner("m=16 n=64", A), problem=ToyProblem(12, 64)) == ("nearest", A)

    def test_a_row_of_another_revision_op_or_type_is_not_for_us(self) -> None:
        row = winner("m=16 n=64", A)
        assert dispatch.resolve(TOY, PROBLEM, H200, snapshot(row, revision=2)).origin == "default"
        assert origin(row, problem=PROBLEM.replace(dtype="fp16")) == ("default", DEFAULT)
        other = Snapshot(MappingProxyType({("other", TOY.revision): {row.problem: row}}))
        assert dispatch.resolve(TOY, PROBLEM, H200, other).origin == "default"

    def test_a_winner_that_is_no_config_any_more_is_passed_over(self) -> None:
        for text in ("tile=48 warps=1 fast=0", "tile=32", "", "tile=32 warps=1 fast=0 depth=2", "drop table trial"):
            assert origin(winner("m=16 n=64", text)) == ("default", DEFAULT)
            assert origin(winner("m=16 n=64", text), winner("m=32 n=64", B)) == ("nearest", B)
            assert origin(winner("m=32 n=64", text), winner("m=40 n=64", B)) == ("nearest", B)

    def test_a_row_whose_problem_is_none_is_passed_over(self) -> None:
        odd = [winner(text, C) for text in ("m=16", "rows=16 n=64", "m=-1 n=64", "", "m=16 n=64 dtype=fp8")]
        assert origin(*odd) == ("default", DEFAULT)
        assert origin(*odd, winner("m=32 n=64", B)) == ("nearest", B)

    def test_rules_are_asked_again_for_the_exact_problem(self) -> None:
        op, exact = SmallTiles(), ToyProblem(25, 64)
        row = winner("m=32 n=64", ToyConfig(32, 1, False))
        assert exact.bucket() == ToyProblem(32, 64)
        assert origin(row, problem=ToyProblem(32, 64), op=op)[0] == "tuned"
        assert origin(row, problem=exact, op=op) == ("default", DEFAULT)
        assert origin(row, winner("m=24 n=64", A.replace(tile=16)), problem=exact, op=op)[0] == "nearest"
        predicted = winner("m=32 n=64", ToyConfig(32, 1, False), "predicted")
        assert origin(predicted, problem=exact, op=op) == ("default", DEFAULT)

    def test_a_broken_rule_moves_on_to_the_next_neighbour(self) -> None:
        op = SmallTiles()
        rows = [winner("m=24 n=64", ToyConfig(32, 1, False)), winner("m=32 n=64", ToyConfig(16, 2, False))]
        assert origin(*rows, op=op) == ("nearest", ToyConfig(16, 2, False))


class TestNearest:
    @pytest.mark.parametrize(
        ("problem", "found"),
        [
            ("m=32 n=64", True),  # an octave
            ("m=8 n=64", True),
            ("m=64 n=64", False),
            ("m=24 n=96", True),  # 0.58 and 0.58
            ("m=32 n=128", False),
            ("m=16 n=181", True),
            ("m=16 n=182", False),
            ("m=0 n=64", False),
        ],
    )
    def test_neighbours_are_within_an_octave_and_a_half_in_all(self, problem: str, found: bool) -> None:
        assert origin(winner(problem, A))[0] == ("nearest" if found else "default")

    def test_the_closest_comes_first_whatever_the_order(self) -> None:
        rows = [winner("m=40 n=64", A), winner("m=24 n=64", B), winner("m=16 n=128", C)]
        for _ in range(3):
            rows = [*rows[1:], rows[0]]
            assert origin(*rows) == ("nearest", B)

    def test_ten_thousand_rows_are_read_once_and_few_are_tried(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Texts are split once for a table; problems are made of those alone that are tried."""
        parsed, tried = [], []
        parse, adopt = ToyProblem.parse.__func__, dispatch._adopt  # type: ignore[attr-defined]
        monkeypatch.setattr(ToyProblem, "parse", classmethod(lambda cls, t: parsed.append(t) or parse(cls, t)))  # type: ignore[func-returns-value]
        monkeypatch.setattr(dispatch, "_adopt", lambda *a: tried.append(a[3].problem) or adopt(*a))  # type: ignore[func-returns-value]
        rows = [winner(f"m={m} n={n}", "no config") for m in (8, 16, 32, 64) for n in range(50, 2550)]
        table = snapshot(*rows)
        for m in (16, 32):
            choice = dispatch.resolve(TOY, ToyProblem(m, 5000), H200, table)
            assert choice.origin == "default"
            assert len(tried) == len(parsed) == dispatch.MOST_TRIED
            parsed.clear()
            tried.clear()

    def test_a_problem_is_no_neighbour_of_its_own(self) -> None:
        """Its own row was refused already; the fourth neighbour is the last one tried."""
        broken = [winner(f"m=16 n={n}", "no config") for n in (64, 65, 66, 67)]
        assert origin(*broken, winner("m=16 n=68", B)) == ("nearest", B)
        assert origin(*broken, winner("m=16 n=68", "no config"), winner("m=16 n=69", B))[0] == "default"

    @pytest.mark.parametrize(
        "text", ["m=16", "m=x n=64", "m=-1 n=64", "nonsense", "m=1 n=64 m=2", "m=99999 n=64 gone=1", ""]
    )
    def test_a_text_that_is_no_problem_is_nobody_s_neighbour(self, text: str) -> None:
        assert origin(winner(text, A), winner("m=32 n=64", B)) == ("nearest", B)

    def test_a_tie_is_broken_by_the_text(self) -> None:
        rows = [winner("m=32 n=64", A), winner("m=16 n=128", B), winner("m=8 n=64", C)]
        assert {origin(*rows), origin(*reversed(rows))} == {("nearest", B)}

    def test_a_prediction_without_a_reason_displaces_nothing(self) -> None:
        mute = winner("m=16 n=64", C, "predicted", reason="")
        assert origin(mute) == ("default", DEFAULT)
        assert origin(winner("m=32 n=64", C, "predicted", reason="")) == ("default", DEFAULT), "nor for a neighbour"
        snapshots._held["h200"] = snapshot(mute)
        told = dispatch.explain(TOY, PROBLEM, H200)
        assert "less than 1.5 times as fast as the default" in dict(told.rows)["asked: predicted"]

    def test_the_reason_is_told(self) -> None:
        choice = dispatch.resolve(TOY, PROBLEM, H200, snapshot(winner("m=16 n=64", C, "predicted")))
        assert "2.00 times as fast by the model" in choice.note

    def test_measured_far_beats_predicted_near(self) -> None:
        assert origin(winner("m=24 n=64", A, "predicted"), winner("m=40 n=64", B)) == ("nearest", B)

    def test_what_the_model_has_far_behind_here_and_not_there_is_passed_over(self) -> None:
        class Fading(ToyOp):
            """A takes ``us`` with 32 rows, and by a power of them more with fewer; all others 10."""

            def estimate_us(self, p: ToyProblem, c: ToyConfig, gpu: Any) -> float:
                return us * (32 / p.m) ** power if c == A else 10.0

        row = winner("m=32 n=64", A)
        for us, power, found in (
            (10.0, 0.05, ("nearest", A)),
            (10.0, 0.5, ("default", DEFAULT)),
            (30.0, 0.0, ("nearest", A)),  # the model never thought much of it, and it won
            (5.0, 0.5, ("nearest", A)),  # nor of the default
            (10.0, math.log2(1.049), ("nearest", A)),
            (10.0, math.log2(1.051), ("default", DEFAULT)),
            (30.0, 0.5, ("default", DEFAULT)),
        ):
            assert origin(row, op=Fading()) == found, (us, power)
        assert origin(row, winner("m=40 n=64", B), op=Fading()) == ("nearest", B)
        assert origin(row, problem=ToyProblem(32, 64), op=Fading()) == ("tuned", A), "what was measured is not asked"

    def test_distance_is_a_metric_and_knows_zero(self) -> None:
        extents = [0, 1, 2, 3, 16, 4096]
        problems = [ToyProblem(m, n) for m in extents for n in extents]
        for p in problems:
            assert dispatch.octaves(p, p) == 0
            for q in problems[::5]:
                assert dispatch.octaves(p, q) == pytest.approx(dispatch.octaves(q, p))
                assert (dispatch.octaves(p, q) > 0) == (p != q)
        assert dispatch.octaves(ToyProblem(0, 1), ToyProblem(1, 1)) == 1
        assert dispatch.octaves(ToyProblem(2, 3), ToyProblem(8, 12)) == 4


class TestForced:
    def test_text_and_config_are_one(self) -> None:
        for forced in (C, str(C)):
            assert dispatch.resolve(TOY, PROBLEM, H200, snapshot(), forced).config == C

    @pytest.mark.parametrize(
        ("forced", "said"),
        [
            ("tile=7 warps=1 fast=0", "tile must be one of 16, 32, 64, 128; got '7'"),
            ("tile=128 warps=1 fast=0", "a tile of 128 needs 4 warps"),
            (ToyConfig(128, 2, False), "a tile of 128 needs 4 warps"),
            (7, "toy takes a ToyConfig or its text; got 7"),
            ("", "ToyConfig needs tile, warps, fast; got ''"),
        ],
    )
    def test_a_bad_one_is_refused_not_replaced(self, forced: Any, said: str) -> None:
        with pytest.raises(InvalidConfig) as raised:
            dispatch.resolve(TOY, PROBLEM, H200, snapshot(), forced)
        assert said in str(raised.value)


# ---- explain --------------------------------------------------------------------------------------------


class TestExplain:
    def explain(self, *rows: TunedConfig, **options: Any) -> dispatch.Explanation:
        snapshots._held["h200"] = snapshot(*rows)
        return dispatch.explain(TOY, ToyProblem(13, 64), H200, **options)

    def test_it_tells_the_choice_and_its_certificate(self) -> None:
        told = self.explain(winner("m=16 n=64", A))
        rows = dict(told.rows)
        assert rows["op"] == "toy (revision 3)"
        assert rows["problem"] == "m=13 n=64"
        assert rows["bucket"] == "m=16 n=64"
        assert rows["gpu"] == "h200 (NVIDIA H200)"
        assert rows["config"] == str(A)
        assert rows["origin"] == "tuned"
        assert "database" in rows["why"]
        assert rows["measured"] == "10.00 us at its bucket, 1.250 times as fast as the default then"
        assert rows["model"] == "31.25 us (analytical)"
        assert rows["floor"].endswith("us (roofline)")
        assert told.considered == (("tuned", rows["why"]),)

    def test_it_tells_who_was_asked_before_and_why_not(self) -> None:
        rows = dict(self.explain().rows)
        assert rows["origin"] == "default"
        assert rows["asked: tuned"] == "nobody tuned the bucket m=16 n=64"
        assert rows["asked: nearest"] == "no measured neighbour within 1.5 octaves"
        assert rows["asked: predicted"] == "no predicted neighbour within 1.5 octaves"
        assert "measured" not in rows
        rows = dict(self.explain(winner("m=16 n=64", "tile=48 warps=1 fast=0"), winner("m=32 n=64", B)).rows)
        assert "tile must be one of 16, 32, 64, 128; got '48'" in rows["asked: tuned"]
        assert rows["why"] == "measured for m=32 n=64, 1.00 octaves away (database)"

    def test_a_prediction_is_never_called_measured(self) -> None:
        rows = dict(self.explain(winner("m=16 n=64", C, "predicted", median_us=3.0)).rows)
        assert rows["origin"] == "predicted"
        assert rows["asked: tuned"] == "the bucket has only a prediction"
        assert "measured" not in rows

    def test_a_forced_config_is_explained_or_refused(self) -> None:
        told = self.explain(winner("m=16 n=64", A), config=str(C))
        assert (told.choice.origin, told.choice.config, told.considered) == ("forced", C, ())
        with pytest.raises(InvalidConfig):
            self.explain(config="tile=128 warps=1 fast=0")

    def test_its_text_is_a_table(self) -> None:
        told = self.explain()
        lines = str(told).splitlines()
        assert len(lines) == len(told.rows)
        starts = {line.index(value) for line, (_, value) in zip(lines, told.rows, strict=True)}
        assert len(starts) == 1, "values stand in one column"

    def test_the_public_function_names_op_problem_and_gpu(self) -> None:
        told = introspection.explain("gemm", "m=16 n=4096 k=4096 b_major=k", gpu="l40s")
        assert (told.op, told.gpu, told.choice.origin) == ("gemm", "l40s", "default")
        for words in (("conv", "m=1"), ("gemm", "m=1")):
            with pytest.raises(UnsupportedProblem):
                introspection.explain(*words, gpu="h200")
        with pytest.raises(UnknownGpu):
            introspection.explain("gemm", "m=1 n=8 k=8", gpu="h300")


# ---- the database behind it -----------------------------------------------------------------------------


def tune(config: ToyConfig, url: str | Path | None = None) -> None:
    with Store(url) as store:
        row = trial(str(config), op="toy", revision=TOY.revision, problem="m=16 n=64")
        store.record([row])
        assert store.crown(row.id)


class TestDatabase:
    def test_reload_sees_what_was_tuned_since(self) -> None:
        assert dispatch.resolve(TOY, PROBLEM, H200).origin == "default"
        tune(A)
        assert dispatch.resolve(TOY, PROBLEM, H200).origin == "default", "the winners were read once"
        dispatch.reload()
        choice = dispatch.resolve(TOY, PROBLEM, H200)
        assert (choice.origin, choice.config) == ("tuned", A)
        tune(B)
        dispatch.reload()
        assert dispatch.resolve(TOY, PROBLEM, H200).config == B

    def test_winners_of_another_gpu_stay_there(self) -> None:
        tune(A)
        assert dispatch.resolve(TOY, PROBLEM, gpus.lookup("l40s")).origin == "default"

    def broken(self, kind: str) -> Iterator[None]:
        path = Path(os.environ["CUTEKERNELS_DB"])
        if kind == "missing":
            yield
            return
        tune(A)
        if kind == "corrupt":
            path.write_bytes(b"SQLite format 3\0" + os.urandom(8192))
            yield
        elif kind == "newer":
            edit(path, "UPDATE alembic_version SET version_num = '9999'")
            yield
        elif kind == "locked":
            with closing(sqlite3.connect(path, isolation_level=None)) as connection:
                connection.execute("PRAGMA journal_mode = DELETE")
                connection.execute("BEGIN EXCLUSIVE")
                yield
        elif kind == "directory":
            path.unlink()
            path.mkdir()
            yield

    @pytest.mark.parametrize("kind", ["missing", "corrupt", "newer", "locked", "directory"])
    def test_a_broken_one_means_defaults_and_one_line(self, kind: str, caplog: pytest.LogCaptureFixture) -> None:
        for _ in self.broken(kind):
            with caplog.at_level(logging.WARNING, logger="cutekernels"):
                for gpu in (H200, gpus.lookup("l40s")):
                    for _ in range(2):
                        dispatch.reload()
                        assert dispatch.resolve(TOY, PROBLEM, gpu).origin == "default"
            (line,) = caplog.messages
            assert "only shipped winners and defaults are used" in line

    def test_it_recovers_with_a_reload(self) -> None:
        path = Path(os.environ["CUTEKERNELS_DB"])
        path.write_bytes(b"nonsense" * 1000)
        assert dispatch.resolve(TOY, PROBLEM, H200).origin == "default"
        path.unlink()
        tune(C)
        dispatch.reload()
        assert dispatch.resolve(TOY, PROBLEM, H200).config == C


# ---- plans ----------------------------------------------------------------------------------------------


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Configs requested from a compiler stub."""
    asked: list[str] = []

    def get(op: Any, p: Any, c: Any, gpu: Any) -> Callable[..., Any]:
        asked.append(str(c))
        return lambda *args: c

    monkeypatch.setattr(compiler, "get", get)
    monkeypatch.setattr(gpus, "detect", lambda device=None: H200)
    return asked


class TestPlan:
    def test_it_is_made_once(self, built: list[str]) -> None:
        first = dispatch.plan(TOY, PROBLEM, 0)
        assert (first.origin, first.config, first.launch()) == ("default", DEFAULT, DEFAULT)
        assert dispatch.plan(TOY, ToyProblem(16, 64), 0) is first, "an equal problem, not the same object"
        assert built == [str(DEFAULT)]

    def test_problem_device_and_config_each_have_their_own(self, built: list[str]) -> None:
        plans = [
            dispatch.plan(TOY, PROBLEM, 0),
            dispatch.plan(TOY, PROBLEM, 1),
            dispatch.plan(TOY, ToyProblem(17, 64), 0),
            dispatch.plan(TOY, PROBLEM, 0, C),
        ]
        assert len({id(p) for p in plans}) == len(built) == 4
        assert dispatch.plan(TOY, PROBLEM, 0, str(C)) is plans[3]
        assert plans[3].origin == "forced"

    def test_a_refused_config_leaves_no_plan(self, built: list[str]) -> None:
        for _ in range(2):
            with pytest.raises(InvalidConfig):
                dispatch.plan(TOY, PROBLEM, 0, "tile=128 warps=1 fast=0")
        assert built == []
        assert dispatch._plans == {}

    def test_what_was_met_untuned_is_reported_once(
        self, built: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        monkeypatch.setattr(dispatch, "_missed", {})
        tune(A)
        for problem in (PROBLEM, ToyProblem(48, 64), ToyProblem(47, 64), ToyProblem(500, 8192)):
            dispatch.plan(TOY, problem, 0)
            dispatch.plan(TOY, problem, 0)
        dispatch.plan(TOY, ToyProblem(3, 3), 0, C)  # forced: nobody's to tune
        missed = [("toy", "m=48 n=64", 2), ("toy", "m=512 n=8192", 1)]
        with pytest.raises(StoreError):
            introspection.report_misses(str(tmp_path))  # a folder
        database = str(tmp_path / "tuned.db")
        assert introspection.report_misses(database) == 2
        assert introspection.report_misses(database) == 0
        with Store(database) as store:
            assert [(r.op, r.problem, r.hits) for r in store.requests()] == missed
        dispatch.reload()
        dispatch.plan(TOY, ToyProblem(48, 64), 0)
        assert introspection.report_misses(database) == 1
        with Store(database) as store:
            assert store.requests()[0].hits == 3

    def test_what_could_not_be_reported_joins_what_came_meanwhile(self, monkeypatch: pytest.MonkeyPatch) -> None:
        miss = ("h200", "toy", 3, "m=16 n=64")
        monkeypatch.setattr(dispatch, "_missed", {miss: 1})
        dispatch.give_back_missed({miss: 2})
        assert dispatch.take_missed() == {miss: 3}

    def test_reload_forgets_plans_and_tells_the_ops(self, built: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
        told: list[int] = []
        monkeypatch.setattr(dispatch, "_listeners", [])
        dispatch.on_reload(lambda: told.append(1))
        before = dispatch.plan(TOY, PROBLEM, 0)
        tune(A)
        dispatch.reload()
        after = dispatch.plan(TOY, PROBLEM, 0)
        assert told == [1]
        assert (before.origin, after.origin, after.config) == ("default", "tuned", A)

    def test_racing_threads_make_it_once(self, built: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
        barrier = threading.Barrier(8)
        slow = compiler.get

        def get(*arguments: Any) -> Any:
            threading.Event().wait(0.05)
            return slow(*arguments)

        monkeypatch.setattr(compiler, "get", get)

        def call(_: int) -> dispatch.Plan:
            barrier.wait()
            return dispatch.plan(TOY, PROBLEM, 0)

        with ThreadPoolExecutor(8) as pool:
            plans = list(pool.map(call, range(8)))
        assert len(built) == 1
        assert len({id(p) for p in plans}) == 1

    @pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # this process has threads: that is the point
    def test_a_fork_during_a_build_can_plan(self, built: list[str]) -> None:
        """The lock is held by a thread that does not exist in the child."""
        release, held = threading.Event(), threading.Event()

        def hold() -> None:
            with dispatch._lock:
                held.set()
                release.wait(100)

        thread = threading.Thread(target=hold)
        thread.start()
        assert held.wait(30)
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                code = 0 if dispatch.plan(TOY, PROBLEM, 0).origin == "default" else 2
            finally:
                os._exit(code)
        release.set()
        thread.join()
        deadline = threading.Event()
        for _ in range(1200):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                break
            deadline.wait(0.05)
        else:
            os.kill(pid, 9)
            os.waitpid(pid, 0)
            pytest.fail("the child hangs")
        assert os.waitstatus_to_exitcode(status) == 0

    def test_warmup_compiles_ahead(self, built: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(registry, "_loaded", {"toy": TOY})
        plans = introspection.warmup([("toy", "m=16 n=64"), ("toy", "m=500 n=64 dtype=fp16")], 0)
        assert [p.origin for p in plans] == ["default", "default"]
        assert len(built) == 2
        assert dispatch.plan(TOY, PROBLEM, 0) is plans[0], "the call finds what was warmed up"
        for bad in (("conv", "m=1"), ("toy", "m=1")):
            with pytest.raises(UnsupportedProblem):
                introspection.warmup([("toy", "m=3 n=3"), bad], 0)
        assert len(built) == 2, "nothing is compiled for a list with a mistake in it"

    def test_no_gpu_is_an_error_that_says_so(self, monkeypatch: pytest.MonkeyPatch) -> None:
        import torch

        if torch.cuda.is_available():
            pytest.skip("there is one")
        gpus._detect.cache_clear()
        with pytest.raises(UnknownGpu, match="no CUDA device is visible"):
            dispatch.plan(TOY, PROBLEM, 0)
