"""Rows of earlier revisions: one translation, wherever a stored config is read; stored texts stay as they are."""

from __future__ import annotations

import io
import json
import lzma
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

import cutekernels
from bench import judge
from cutekernels import cli, dispatch, gpu, lock
from cutekernels.autotune import departures, shards
from cutekernels.autotune.history import TaskHistory
from cutekernels.autotune.job import Job, Task
from cutekernels.db.questions.reader import Database, diff
from cutekernels.db.storage import migrations, snapshot
from cutekernels.db.storage.certificate import Certificate
from cutekernels.db.storage.store import Environment, ImportReport, Store
from cutekernels.db.storage.trial import Trial
from cutekernels.errors import InvalidConfig
from cutekernels.ops import registry
from tests.command_line import invoke
from tests.db.test_store import fresh, postgres, url  # noqa: F401  fixtures
from tests.db.trials import trial
from tests.shipping import ship

H200 = gpu.lookup("h200")
GEMM = registry.get("gemm")
PROBLEM = "m=16 n=4096 k=4096 b_major=k"
COMMON = "raster=1 ctas_per_sm=1 body"
OLD = f"tile_m=64 tile_n=16 tile_k=128 warps_m=1 warps_n=1 stages=6 {COMMON}=specialized split_k=2 pdl=1 ahead=2"
NEW = (
    OLD.replace("m=64 tile_n=16", "m=16 tile_n=64")
    .replace("specialized", "skinny_warpgroup")
    .replace("ahead", "prefetch_l2")
)

OTHER = NEW.replace("stages=6", "stages=5")

# op, problem, the text of revision 1, today's
SPELLED = (
    ("gemm", PROBLEM, OLD, NEW),
    (
        "gemm",
        "m=16 n=4096 k=4096 b_major=k",
        f"tile_m=32 tile_n=16 tile_k=256 warps_m=2 warps_n=1 stages=3 {COMMON}=skinny warps_k=2",
        f"tile_m=16 tile_n=32 tile_k=256 warps_m=1 warps_n=2 stages=3 {COMMON}=skinny warps_k=2",
    ),
    (
        "gemm",
        "m=200 n=8192 k=8192 b_major=k",
        f"tile_m=128 tile_n=104 tile_k=64 warps_m=1 warps_n=1 stages=7 {COMMON}=warpgroup cluster_n=2 swapped=1",
        f"tile_m=104 tile_n=128 tile_k=64 warps_m=1 warps_n=1 stages=7 {COMMON}=warpgroup cluster_m=2 swap_ab=1",
    ),
    (
        "gemm",
        "m=4096 n=4096 k=4096",
        f"tile_m=128 tile_n=256 tile_k=64 warps_m=1 warps_n=1 stages=4 {COMMON}=warpgroup cluster_m=2",
        f"tile_m=128 tile_n=256 tile_k=64 warps_m=1 warps_n=1 stages=4 {COMMON}=warpgroup cluster_m=2",
    ),
    (
        "gemm",
        "m=256 n=4096 k=4096 out_major=m",
        "tile_m=128 tile_n=64 tile_k=32 warps_m=4 warps_n=1 stages=4 raster=8 ctas_per_sm=2",
        "tile_m=64 tile_n=128 tile_k=32 warps_m=1 warps_n=4 stages=4 raster=8 ctas_per_sm=2",
    ),
    (
        "grouped_gemm",
        "rows=128 n=1536 k=2048 experts=128",
        f"tile_m=128 tile_n=16 tile_k=64 warps_m=1 warps_n=1 stages=8 {COMMON}=warpgroup pdl=1 swapped=1",
        f"tile_m=16 tile_n=128 tile_k=64 warps_m=1 warps_n=1 stages=8 {COMMON}=warpgroup pdl=1 swap_ab=1",
    ),
    ("rms_norm_linear", "m=1 n=3584 k=3584", "path=fused tile_m=32 warps_m=2", "path=fused tile_n=32 warps_n=2"),
    ("linear_silu_mul", "m=1 n=18944 k=3584", "path=fused tile_k=256 warps_k=4", None),
    ("linear_silu_mul", "m=256 n=512 k=1024", "path=fused tile_m=128 body=warpgroup", None),
    ("attention", "batch=1 seq_q=64 seq_kv=64 heads_q=1 heads_kv=1", "order=folded body=few", "order=paired body=few"),
    ("attention_backward", "", "tile_own=64 body=warps grid=counted", "tile_own=64 body=multistage grid=dynamic"),
    ("quantized_linear", "", "body=skinny ahead=2 scaled=sums", "body=skinny prefetch_l2=2 scaled=accumulators"),
)  # fmt: skip


def row(config: str = OLD, revision: int = 1, **changes: Any) -> Trial:
    return trial(config, revision=revision, problem=PROBLEM, **changes)


def crowned(place: str | Path, *rows: Trial) -> None:
    with Store(place) as store:
        store.record(rows)
        for t in rows:
            store.crown(t.id)


def served(**changes: Any) -> Any:
    cutekernels.reload()
    return dispatch.resolve(GEMM, GEMM.Problem.parse(PROBLEM), H200, **changes)


@pytest.mark.parametrize(("op", "problem", "before", "after"), SPELLED)
def test_an_earlier_text_in_todays_words(op: str, problem: str, before: str, after: str | None) -> None:
    found, after = registry.get(op), after or before
    assert found.spell(1, problem, before) == after
    assert found.spell(found.revision, problem, after) == after
    assert "strange" in found.spell(1, problem, "strange words=1 tile_m"), "for the parser to refuse"


@pytest.fixture
def db(tmp_path: Path) -> Path:
    """The database in the settings."""
    return tmp_path / "tuned.db"


@pytest.mark.usefixtures("shipped")
class TestServing:
    def test_an_earlier_row_serves(self, db: Path) -> None:
        crowned(db, row())
        assert (served().origin, str(served().config)) == ("tuned", NEW)
        near = dispatch.resolve(GEMM, GEMM.Problem.parse(PROBLEM.replace("4096 b", "4608 b")), H200)
        assert (near.origin, str(near.config)) == ("nearest", NEW)

    @pytest.mark.parametrize(
        ("local", "shipped_rows", "wins"),
        [
            ([row(), row(OTHER, 2)], [], OTHER),
            ([row(), row(OTHER, 2, origin="predicted", message="faster")], [], NEW),
            ([row()], [row(OTHER, 2)], NEW),
            ([row(OTHER, 2)], [row()], OTHER),
            ([row(origin="predicted", message="faster")], [row(OTHER, 2)], OTHER),
        ],
    )
    def test_measured_then_local_then_later(
        self, db: Path, shipped: Path, local: list[Trial], shipped_rows: list[Trial], wins: str
    ) -> None:
        crowned(db, *local)
        ship(shipped, "h200", "".join(f"{t.as_line()}\n" for t in shipped_rows))
        assert str(served().config) == wins
        (one,) = [w for w in Database(None).winners(gpu="h200", op="gemm") if w.serves]
        assert one.config_text == wins
        idle = [w.reason for w in Database(None).winners(gpu="h200", op="gemm") if not w.serves]
        assert len(idle) == 1 and "precedes it" in idle[0]

    def test_a_lock_freezes_the_row_that_serves(
        self, db: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shipped: Path
    ) -> None:
        ship(shipped, "h200", f"{row(OTHER, 2).as_line()}\n")
        crowned(db, row())
        before = served()
        lock.write(str(tmp_path / "w.lock"), ["h200"])
        (frozen,) = [json.loads(line) for line in (tmp_path / "w.lock").read_text().splitlines()[1:]]
        assert (frozen[3], frozen[5]) == (1, OLD), "as it is stored"
        monkeypatch.setenv("CUTEKERNELS_DB", str(tmp_path / "w.lock"))
        assert served().config == before.config and served().origin == "tuned"

    def test_queries_give_todays_words(self, db: Path) -> None:
        times = (1.0,) * 7
        crowned(db, row(certificate=Certificate(OLD, (OLD,), 1, 2, times)))
        (w,) = Database(None).winners(gpu="h200", op="gemm")
        assert (w.revision, w.config["tile_m"], w.config["body"]) == (1, 16, "skinny_warpgroup")
        assert w.config_text == w.certificate["default"] == w.certificate["tied"][0] == NEW
        (t,) = Database(None).trials(gpu="h200")
        columns = Database(None).columns(t)
        assert (t.config, columns["config_text"], columns["config"]["tile_m"]) == (OLD, NEW, 16)
        assert columns["certificate"]["default"] == NEW
        found = invoke(cli.app, "db", "doctor", "--format", "json").stdout
        assert all(line["state"] == "ok" for line in json.loads(found)), found

    def test_pruning_stale_rows_leaves_those_that_serve(self, db: Path) -> None:
        crowned(db, row(), row("tile_m=1", 0))
        result = invoke(cli.app, "db", "prune", "--stale", "--yes")
        assert "1 trials deleted" in result.stderr
        assert served().origin == "tuned"

    def test_doctor_advises_what_helps(self, db: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """An earlier revision is tuned again or pruned; no prune deletes a newer one, which other versions use."""
        monkeypatch.setattr(type(GEMM), "revision", 5)
        monkeypatch.setattr(type(GEMM), "earlier", {2: lambda problem, config: config})
        crowned(db, *(row(NEW, revision) for revision in (1, 2, 3, 5, 6, 99)))
        found = invoke(cli.app, "db", "doctor").stdout
        assert "2 of an earlier revision: tune again, or prune --stale" in found
        assert "2 of a newer revision: upgrade cutekernels" in found
        result = invoke(cli.app, "db", "prune", "--stale", "--yes")
        assert "2 trials deleted" in result.stderr
        with Store(db) as store:
            assert sorted(t.revision for t in store.trials()) == [2, 5, 6, 99]

    def test_databases_compare_by_what_serves(self, tmp_path: Path) -> None:
        for name, rows in (("a", [row()]), ("b", [row(NEW, 2)]), ("c", [row(), row(OTHER, 2)])):
            crowned(tmp_path / f"{name}.db", *rows)
        a, b, c = (Database(tmp_path / f"{name}.db", shipped=False) for name in "abc")
        assert diff(a, b) == []
        (one,) = diff(a, c)
        assert (one.state, one.revision, one.a_config_text, one.b_config_text) == ("other config", 2, NEW, OTHER)


@pytest.mark.usefixtures("shipped")
class TestTwoVersions:
    def test_on_one_database(self, url: str, tmp_path: Path) -> None:  # noqa: F811
        """The one that knows revision 1 alone crowns and reads its rows; neither touches the other's."""
        crowned(url, row())
        with Store(url) as store:
            assert store.crown(store.winners(revision=1)[0].id)
            store.record([later := row(OTHER, 2)])
            assert store.crown(later.id)
            assert [t.config for t in store.winners()] == [OLD, OTHER]
            store.record([again := row(OLD.replace("stages=6", "stages=5"))])
            assert store.crown(again.id), "the earlier version tunes on"
        before = snapshot.load("h200", url)
        assert before.table["gemm", 1][PROBLEM].config == again.config
        assert before.table["gemm", 2][PROBLEM].config == OTHER
        assert str(served(snapshot=before).config) == OTHER
        assert migrations.HEAD == "0004", "a new schema would shut earlier versions out"

    def test_merging_twice_changes_nothing(self, url: str, tmp_path: Path) -> None:  # noqa: F811
        crowned(tmp_path / "old.db", row(), trial("order=folded", op="attention", problem="seq_q=1"))
        crowned(url, row(OTHER, 2))
        with Store(url) as store:
            assert store.merge(str(tmp_path / "old.db")) == ImportReport(2, 2, 0)
            before = store.trials(), store.winners()
            assert store.merge(str(tmp_path / "old.db")) == ImportReport(0, 0, 2)
            assert (store.trials(), store.winners()) == before
            assert {t.config for t in store.trials()} == {OLD, OTHER, "order=folded"}, "as they were stored"
            out = io.StringIO()
            store.export(out)
        with Store(tmp_path / "back.db") as back:  # and into an earlier version's, which passes over what it lacks
            assert back.import_(io.StringIO(out.getvalue())).added == 3


class TestTuning:
    def history(self, store: Store) -> TaskHistory:
        return TaskHistory(store, GEMM, GEMM.Problem.parse(PROBLEM), H200, Environment(), "measured")

    def test_earlier_rows_are_the_tasks_own(self, tmp_path: Path, shipped: Path) -> None:
        ship(shipped, "h200", f"{row(OLD.replace('stages=6', 'stages=4')).as_line()}\n")
        crowned(tmp_path / "t.db", row(created_at=row().created_at - timedelta(hours=1)))
        with Store(tmp_path / "t.db") as store:
            history = self.history(store)
            (stored,) = history.stored()
            assert (stored.config, str(history.config_of(stored))) == (OLD, NEW)
            assert list(map(str, history.serving())) == [NEW, NEW.replace("stages=6", "stages=4")]
            assert NEW in map(str, history.seeds())
            assert history.winner() == stored
            store.record([later := row(OTHER, 2)])
            store.crown(later.id)
            assert history.winner() == later
            assert [t.config for t in history.stored()] == [OLD, OTHER]

    def test_earlier_requests_and_predictions(self, tmp_path: Path) -> None:
        p = GEMM.Problem.parse(PROBLEM)
        crowned(tmp_path / "t.db", row(origin="predicted", message="x", median_us=9.0))
        with Store(tmp_path / "t.db") as store:
            store.note_requests([("h200", "gemm", 1, PROBLEM, 3), ("h200", "gemm", 0, "m=1 n=8 k=8", 9)])
            assert [str(t.problem) for t in shards.requested(store.requests(), H200).tasks] == [PROBLEM]
            (found,) = departures.departures(Job("j", (Task(GEMM, p, 1),)), H200, store)
            assert str(found.predicted) == NEW
            assert list(map(str, self.history(store).predicted(3))) == [NEW]

    def test_a_sweep_without_revisions_is_of_the_first(self, tmp_path: Path) -> None:
        lines = [{"op": "gemm", "problem": PROBLEM, "config": OLD, "us": 1.0}]
        lines += [lines[0] | {"revision": 2, "config": OTHER}]
        (tmp_path / "s.jsonl.xz").write_bytes(lzma.compress("\n".join(map(json.dumps, lines)).encode()))
        assert [line["config"] for line in judge.recorded(tmp_path)] == [NEW, OTHER]


def earlier(config: Any) -> str:
    """``config`` of a body that computes ``out^T``, as revision 1 spelled it."""
    text = str(config.transposed).replace("body=skinny_warpgroup", "body=specialized")
    return text.replace("swap_ab", "swapped").replace("prefetch_l2", "ahead")


@pytest.mark.parametrize(
    ("problem", "body"),
    [(PROBLEM, "skinny"), (PROBLEM, "skinny_warpgroup"), (PROBLEM.replace("16", "200"), "warpgroup")],
)
def test_a_call_in_an_earlier_spelling_is_told_todays(problem: str, body: str) -> None:
    p = GEMM.Problem.parse(problem)
    found = [c for c in GEMM.valid(p, H200) if c.body == body and (c.warps_n > 1 or c.swap_ab or c.prefetch_l2)]
    text = earlier(found[-1])
    assert GEMM.spell(1, problem, text) == str(found[-1])
    with pytest.raises(InvalidConfig) as refused:
        dispatch.resolve(GEMM, p, H200, forced=text)
    assert f"Revision 1 spelled it so; now write [{found[-1]}]" in str(refused.value)
    result = invoke(cli.app, "explain", "gemm", problem, "--gpu", "h200", "--config", text)
    assert result.exit_code and "now write" in f"{result.stderr} {result.exception}"
