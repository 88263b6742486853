"""Which winners calls use, as queries and both doctors tell it; and that a query leaves every file as it was."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from cutekernels import cli, dispatch
from cutekernels import gpu as gpus
from cutekernels.db.storage.store import Store
from cutekernels.db.storage.uuid7 import uuid7
from cutekernels.ops import registry
from cutekernels.ops.products.schedules.problem import GemmProblem
from tests.db.test_cli import GEMM, SILU, SKINNY, ok, rows, run
from tests.db.trials import H200, edit, trial
from tests.shipping import ship

HUGE = GEMM.config.replace("tile_m=128", "tile_m=999999999")
WASTEFUL = GEMM.config.replace("ctas_per_sm=2", "ctas_per_sm=1")


@pytest.fixture
def db(tmp_path: Path) -> Path:
    """The database in the settings, with three winners, of which calls refuse SILU."""
    path = tmp_path / "tuned.db"
    with Store(path) as store:
        store.record([GEMM, SKINNY, SILU])
        for winner in (GEMM, SKINNY, SILU):
            store.crown(winner.id)
    return path


@pytest.mark.parametrize(
    ("config", "why"),
    [
        (HUGE, "its config is not one of this version's: tile_m must be one of"),
        (WASTEFUL, "ctas_per_sm=1 leaves room for one more CTA"),
    ],
    ids=["a value that no knob has", "a rule of the problem"],
)
@pytest.mark.parametrize("edited", ["local", "shipped"])
def test_a_winner_that_calls_refuse_is_shown_so(edited: str, config: str, why: str, db: Path, shipped: Path) -> None:
    """As the dispatcher refuses it, whose own words are the reason."""
    if edited == "local":
        edit(db, ("UPDATE trial SET config = ? WHERE id = ?", (config, GEMM.id)))
    else:
        db.unlink()
        with Store(db) as store:
            store.record([SKINNY])
            store.crown(SKINNY.id)
        ship(shipped, "h200", replace(GEMM, config=config).as_line() + "\n")
    dispatch.reload()
    (row,) = rows("query", "--gpu", "h200", "--op", "gemm", "--problem", "m=4096")
    assert (row["source"], row["serves"], row["config_text"]) == (edited, False, config)
    assert row["reason"].startswith(why)
    asked = dispatch.explain(registry.get("gemm"), GemmProblem.parse(GEMM.problem), gpus.lookup("h200"))
    assert asked.choice.origin == "default" and row["reason"] in dict(asked.considered)["tuned"]
    table = ok("query", "--gpu", "h200", "--op", "gemm", "--problem", "m=4096").stdout
    assert why.split()[0] in table and f"{edited} *" not in table
    (unused,) = [r for r in rows("doctor") if r["state"] == "unused" and r["what"] == f"{edited} winners"]
    assert "that calls refuse" in unused["found"] and ("1 " if edited == "shipped" else "2 ") == unused["found"][:2]
    if edited == "local":
        assert "(3 winners, of which calls refuse 2)" in cli._database(f"sqlite:///{db}").value


@pytest.mark.parametrize(("mode", "folder", "told"), [(0o644, 0o755, 0), (0o666, 0o1777, 1), (0o600, 0o777, 1)])
def test_a_database_that_everybody_may_write_is_named(
    mode: int, folder: int, told: int, db: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUTEKERNELS_DB", str(db))
    db.chmod(mode)
    db.parent.chmod(folder)
    found = cli._database(f"sqlite:///{db}")
    db.parent.chmod(0o700)
    assert found.state == "ok" and found.remedy.count("every user may write winners there: chmod o-w") == told


def test_a_time_below_the_roofline_serves_no_call(db: Path) -> None:
    """However it got there; but a board may run a little above its stated clock."""
    edit(db, ("UPDATE trial SET median_us = 0.0001 WHERE id = ?", (GEMM.id,)))
    dispatch.reload()
    (row,) = [r for r in rows("query", "--problem", "m=4096") if r["source"] == "local"]
    assert not row["serves"] and "0.0001 us is below the roofline of 138.9 us" in row["reason"]
    asked = dispatch.explain(registry.get("gemm"), GemmProblem.parse(GEMM.problem), gpus.lookup("h200"))
    assert asked.choice.origin != "tuned" and row["reason"] in dict(asked.considered)["tuned"]
    assert any(row["reason"] in r["found"] for r in rows("doctor"))
    assert dispatch.too_fast(120.0, 138.9) == "" != dispatch.too_fast(110.0, 138.9)


@pytest.mark.parametrize("verb", ["import", "merge", "pull"])
def test_what_is_taken_in_is_judged_by_its_op(verb: str, tmp_path: Path) -> None:
    """A false time is refused, with all other rows; what calls refuse is taken with a warning."""
    rows_ = [
        replace(GEMM, id=uuid7(), config=HUGE),
        replace(GEMM, id=uuid7(), revision=99),
        replace(GEMM, id=uuid7(), op="gone", problem="m=1"),
        replace(GEMM, id=uuid7(), problem="m=4096 n=8192 k=8192", median_us=0.0001),
    ]
    for count, wanted in ((4, 1), (3, 0)):
        source = tmp_path / f"{count}.db"
        with Store(source) as store:
            store.record(rows_[:count])
            for t in rows_[:count]:
                store.crown(t.id)
            store.export(tmp_path / f"{count}.jsonl")
        file = tmp_path / f"{count}.jsonl" if verb == "import" else source
        done = run(verb, str(file), "--db", str(tmp_path / "to.db"))
        assert done.exit_code == wanted and done.stdout == ""
        told = " ".join(done.stderr.split())
        if wanted:
            for part in ("[m=4096 n=8192 k=8192]: its time of 0.0001 us", "below the roofline of 555.6 us", "leave"):
                assert part in told
            assert Store(tmp_path / "to.db").count() == 0
    assert "3 trials added, 3 winners set" in told and "refuse 3 of the winners. The first: h200" in told
    found = rows("query", "--local", "--op", "gemm", "--db", str(tmp_path / "to.db"))
    why = {r["revision"]: r["reason"] for r in found}
    assert "tile_m must be one of" in why[1] and why[99].startswith("a newer cutekernels wrote it, and here")


def test_rows_that_serve_nobody_say_why(db: Path, shipped: Path) -> None:
    old = replace(GEMM, revision=0, id=uuid7(), problem="m=8192 n=64 k=64")
    gone = trial("x=1", op="gone", problem="m=1")
    with Store(db) as store:
        store.record([old, gone])
        store.crown(old.id)
        store.crown(gone.id)
    little = replace(SKINNY, id=uuid7(), problem="m=32 n=4096 k=4096", ratio=1.25)
    with Store(db) as store:
        store.record([little])
        store.crown(little.id)
    ship(shipped, "h200", replace(GEMM, id=uuid7()).as_line() + "\n")
    dispatch.reload()
    asked = dispatch.explain(registry.get("gemm"), GemmProblem.parse(little.problem), gpus.lookup("h200"))
    assert "best 1.25, less than 1.5 times as fast" in dict(asked.considered)["predicted"]
    found = {(row["source"], row["id"][-6:]): row["reason"] for row in rows("query", "--gpu", "h200")}
    assert found["local", GEMM.id[-6:]] == ""
    assert "earlier" not in found["local", old.id[-6:]] and "revision 1" in found["local", old.id[-6:]]
    assert found["local", gone.id[-6:]] == "this version has no such op"
    assert found["local", SKINNY.id[-6:]] == "its predicted gain is too small"
    assert found["local", little.id[-6:]] == "its predicted gain of 1.25, below 1.5, is too small"
    assert [why for (source, _), why in found.items() if source == "shipped"] == ["a local winner precedes it"]


def test_a_gpu_outside_the_table_has_its_knobs_looked_at(db: Path) -> None:
    odd = [
        trial(config, gpu=replace(H200, name="h300"), problem=f"m={m} n=64 k=64")
        for m, config in ((64, GEMM.config), (128, HUGE))
    ]
    with Store(db) as store:
        store.record(odd)
        for t in odd:
            store.crown(t.id)
    found = {row["problem"]["m"]: (row["serves"], row["reason"][:14]) for row in rows("query", "--gpu", "h300")}
    assert found == {64: (True, ""), 128: (False, "tile_m must be")}
