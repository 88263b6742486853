"""Trials as lines: a slim file says what a full one says, and neither is trusted."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest

from cutekernels.db.storage import lines, snapshot
from cutekernels.db.storage.store import Store, Trial
from cutekernels.errors import StoreError
from tests.db.trials import L40S, trial
from tests.shipping import ship, text_of

ROWS = [
    trial("a=1", gpu=L40S, problem="m=1", origin="predicted", median_us=43.839999, message="twice as fast"),
    trial("a=2", gpu=L40S, problem="m=2", origin="predicted", median_us=1.5, message=""),
]


def read(text: str) -> list[Trial]:
    found = [t for _, t in lines.parsed(text.splitlines())]
    assert all(isinstance(t, Trial) for t in found), found
    return found  # type: ignore[return-value]


def test_slim_lines_hold_the_same_trials() -> None:
    text = "\n".join(lines.slim(ROWS))
    first, second = read(text)
    assert first.median_us == 43.84 and second == ROWS[1], "five digits of a number"
    assert (first.key, first.config, first.message, first.id) == (ROWS[0].key, "a=1", "twice as fast", ROWS[0].id)


def test_what_all_share_stands_once() -> None:
    written = lines.slim(ROWS)
    common = json.loads(written[0])["common"]
    assert {"gpu", "environment", "op", "revision", "origin", "status"} <= common.keys()
    assert not common.keys() & {"id", "problem", "config", "median_us", "message"}
    assert not {"gpu", "environment"} & set(json.loads(written[0])["columns"])
    assert all(isinstance(json.loads(line), list) for line in written[1:])
    assert lines.slim([]) == []


def test_full_lines_are_read_as_before() -> None:
    assert read("\n".join(t.as_line() for t in ROWS)) == ROWS


@pytest.mark.parametrize(
    "header",
    [
        '{"common": {"shell": "rm"}, "columns": []}', '{"common": 5, "columns": []}', '{"common": {}}',
        '{"common": {}, "columns": ["id", "id"]}', '{"common": {}, "columns": [["id"]]}',
        '{"common": {}, "columns": 3}',
        '{"common": {"status": "fine"}, "columns": ["id", "problem", "config", "median_us", "message"]}',
    ],
)  # fmt: skip
def test_a_hostile_header_breaks_its_rows(header: str) -> None:
    rest = "\n".join(lines.slim(ROWS)[1:])
    found = [t for _, t in lines.parsed(f"{header}\n{rest}".splitlines())]
    assert found and all(isinstance(t, StoreError) for t in found)


def test_an_export_is_imported_and_shipped(tmp_path: Path, shipped: Path) -> None:
    with Store(tmp_path / "a.db") as a, Store(tmp_path / "b.db") as b:
        a._import(ROWS, ROWS)
        assert a.export(shipped / "l40s.jsonl.xz", slim=True) == a.export(tmp_path / "plain.jsonl", slim=True) == 2
        b.import_(shipped / "l40s.jsonl.xz")
        assert [t.key for t in b.winners()] == [t.key for t in a.winners()]
    assert [t.key for t in snapshot.shipped("l40s")] == [t.key for t in ROWS]
    text = text_of(shipped / "l40s.jsonl.xz")
    assert text == (tmp_path / "plain.jsonl").read_text()
    text = text.replace('"a=2"', '"a=\\u0007"')
    with Store(tmp_path / "c.db") as c, pytest.raises(StoreError, match=r"line 3: config must be"):
        c.import_(io.StringIO(text))


def test_a_cut_export_is_not_imported(tmp_path: Path) -> None:
    with Store(tmp_path / "a.db") as a:
        a._import(ROWS, ROWS)
        a.export(tmp_path / "all.gz")
        cut = tmp_path / "cut.gz"
        cut.write_bytes((tmp_path / "all.gz").read_bytes()[:-9])
        with pytest.raises(StoreError, match=r"cut.gz.*; name another file"):
            a.import_(cut)


def test_the_dispatcher_gets_the_reason(shipped: Path, tmp_path: Path) -> None:
    ship(shipped, "l40s", "\n".join(lines.slim(ROWS)))
    table: Any = snapshot.load("l40s", str(tmp_path / "none.db")).table["gemm", 1]
    assert (table["m=1"].reason, table["m=2"].reason) == ("twice as fast", "")
    assert {w.source for w in table.values()} == {"shipped"}


def test_a_shared_field_is_repeated_where_it_is_another() -> None:
    """Winners of several runs: what most share is in the header, and what a row lacks no header gives it."""
    rows = [trial(f"a={i}", problem=f"m={i}", median_us=1.0 + i, ratio=1.25) for i in range(1, 6)]
    rows[4] = trial("a=5", gpu=L40S, problem="m=5", median_us=6.0, ratio=2.0)
    bare = trial("a=6", gpu=L40S, problem="m=6", origin="predicted", median_us=1.7976931348623157e308)
    for some in (rows, [*rows, bare], [rows[0], bare]):
        written = lines.slim(some)
        assert read("\n".join(written)) == some
    assert "gpu" in json.loads(lines.slim(rows)[0])["common"]


def test_a_full_line_after_a_header_is_complete_in_itself() -> None:
    header, *rest = lines.slim([trial(f"a={i}", problem=f"m={i}", median_us=1.0, ratio=1.25) for i in range(3)])
    bare = trial("a=9", problem="m=9", status="crashed")
    assert "ratio" in json.loads(header)["common"]
    assert read("\n".join([header, *rest, json.dumps(bare.as_row())]))[-1] == bare


def test_an_unknown_field_of_a_header_is_named_there() -> None:
    ((number, error),) = lines.parsed(['{"common": {"nonsense": 1}, "columns": []}'])
    assert number == 1 and "nonsense" in str(error)


def test_a_line_of_too_many_values_is_named() -> None:
    header, first, second = lines.slim(ROWS)
    found = dict(lines.parsed([header, first, json.dumps([*json.loads(second), *range(9)])]))
    assert isinstance(found[2], Trial) and "columns" in str(found[3])


def test_lines_are_bounded_and_each_trial_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A few bytes of a compressed file may stand for millions of lines."""
    file = tmp_path / "rows.jsonl"
    file.write_text(f"{ROWS[0].as_line()}\n" * 3)
    with Store(tmp_path / "tuned.db") as store:
        report = store.import_(file)
        assert (report.added, len(report.winners), report.kept) == (1, 1, 0)
        monkeypatch.setattr(lines, "_MOST_LINES", 5)
        file.write_text("\n" * 6)
        with pytest.raises(StoreError, match="line 6: a file has 5 lines at most: split it; nothing was imported"):
            store.import_(file)
