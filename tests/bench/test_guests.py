"""``bench guests`` up to the GPU: its tasks, how a table is read back, what it prints of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from bench import guests as bench
from cutekernels.db.store import Store
from cutekernels.guests import load
from cutekernels.guests.fused_moe import FusedMoe, FusedMoeConfig
from tests.guests.test_tables import QWEN, VLLM, row

ROOT = Path(__file__).parents[2]
SMALL = FusedMoeConfig(16, 32, 64, 1, 4, 3)
LARGE = FusedMoeConfig(128, 128, 64, 16, 8, 4)
TABLE = {"1": SMALL.as_dict(), "64": SMALL.as_dict(), "256": LARGE.as_dict()}


@pytest.fixture(autouse=True)
def _from_a_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT))


def test_it_tunes_powers_of_two_and_asks_between_them() -> None:
    done = CliRunner().invoke(bench.app, ["--dry-run", "--format", "json"])
    assert done.exit_code == 0, done.output
    tasks = json.loads(done.stdout)
    assert [t["problem"].partition(" ")[0] for t in tasks] == [f"m={1 << i}" for i in range(13)]
    assert {t["problem"].partition(" ")[2] for t in tasks} == {bench.LAYER}
    assert sum(t["expected_s"] for t in tasks) / 8 < 120, "eight lanes share the budget"
    assert not set(bench.BETWEEN) & set(bench.TUNED)
    assert isinstance(load(bench.EXAMPLE), FusedMoe)


def test_the_nearest_batch_size_serves() -> None:
    assert [bench.entry(TABLE, m) for m in (1, 100, 160, 161, 9999)] == [SMALL, SMALL, SMALL, LARGE, LARGE]


def test_one_row_a_batch_and_a_line_that_tells_a_loss() -> None:
    def line(m: int, ratio: float, *, tuned: bool = True, error: float = 0.2) -> bench.Line:
        return bench.Line(m, tuned, 10.0 * ratio, 10.0, ratio, ratio - 0.01, ratio + 0.01, error, str(SMALL))

    lines = [line(1, 1.0), line(64, 1.21), line(100, 0.9, tuned=False, error=2.0)]
    assert [row["m"] for row in bench.rows(lines)] == [1, 64, 100]
    assert bench.rows(lines)[2] | {"tuned at": "nearest", "default us": 9.0} == bench.rows(lines)[2]
    told = bench.summary(lines)
    assert told.startswith("1.100 times") and "worst 0.900 at m=100; 1 of 3 slower with confidence, 1 wrong" in told


def test_a_database_that_is_kept_may_hold_other_layers_and_gpus(tmp_path: Path) -> None:
    db, other = str(tmp_path / "kept.db"), "experts=128 n=768 k=4096 top_k=8"
    kinds = ((1, QWEN, "h200"), (2, other, "h200"), (4, QWEN, "l40s"))
    rows = [row(f"m={m} {layer}", gpu=gpu) for m, layer, gpu in kinds]
    with Store(db) as store:
        store.record(rows)
        for t in rows:
            store.crown(t.id)
    name, table = bench.table_of("vllm", db, VLLM, "h200", QWEN)
    assert (name, list(table)) == ("E=128,N=768,device_name=NVIDIA_H200.json", ["1"])
    assert CliRunner().invoke(bench.app, ["--table", "nosuch", "--dry-run"]).exit_code == 2
