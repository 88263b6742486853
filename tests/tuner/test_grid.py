"""``tune grid``: points that fill the space, an order by regret removed, runs that add up."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from cutekernels import dispatch
from cutekernels import gpu as gpus
from cutekernels.autotune import cli, fleet, grid, run, search
from cutekernels.autotune.fleet import OneSlot
from cutekernels.autotune.grid import FAMILIES, ProductFamily, plan, points
from cutekernels.autotune.run import tune
from cutekernels.db.storage import snapshot
from cutekernels.db.storage.snapshot import Snapshot, TunedConfig
from cutekernels.db.storage.store import Store
from cutekernels.errors import JobError
from cutekernels.ops import registry
from cutekernels.ops.products.dense import GEMM
from tests.command_line import invoke
from tests.tuner.toys import H200, TOY, ToyMachine

NOTHING = Snapshot({})
SIZES = (64, 128, 256, 512)


def _toys() -> Iterator[str]:
    for m, n in product(SIZES, SIZES):
        yield f"m={m} n={n}"


TOYS = ProductFamily("toy", _toys, 1.0, 0.1)


@pytest.fixture(autouse=True)
def _on_h200(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(registry._loaded, "toy", TOY)
    monkeypatch.setattr(gpus, "detect", lambda device=None: H200)
    points.cache_clear()
    yield
    points.cache_clear()


def measured(op: Any, *problems: str, config: str = "", ratio: float = 1.0) -> Snapshot:
    rows = {p: TunedConfig(op.name, op.revision, p, config, "measured", 10.0, ratio, "", "database") for p in problems}
    return Snapshot({(op.name, op.revision): rows})


def texts(found: grid.GridPlan) -> list[str]:
    return [str(task.problem) for task in found.job.tasks]


# ---- points -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES, ids=lambda f: f"{f.op}-{f.regret}")
def test_every_point_is_a_bucket_of_its_own_with_a_default(family: ProductFamily) -> None:
    tasks = points(family)
    assert len({task.problem for task in tasks}) == len(tasks) > 40
    for task in random.Random(0).sample(tasks, 8):
        assert task.problem.bucket() == task.problem
        assert task.op.why_not(task.problem, task.op.default(task.problem, H200), H200) is None


def test_shares_are_of_one_whole() -> None:
    assert sum(family.share for family in FAMILIES) == pytest.approx(1)


def test_products_fill_the_space_in_four_layouts() -> None:
    problems = [task.problem for family in FAMILIES if family.op == "gemm" for task in points(family)]
    linear = [p for p in problems if (p.a_major, p.b_major) == ("k", "k")]  # type: ignore[attr-defined]
    assert len(linear) == 12 * 8 * 8
    layouts = Counter((p.a_major, p.b_major) for p in problems)  # type: ignore[attr-defined]
    assert len(layouts) == 4 and all(count >= 5 * 64 for count in layouts.values())
    widths = {p.n for p in linear} | {p.k for p in linear}  # type: ignore[attr-defined]
    assert (min(widths), max(widths)) == (512, 32768)
    assert len(widths) > 100, "few points share an extent"
    assert all(width % 64 == 0 for width in widths)


def test_between_measured_points_a_neighbour_serves() -> None:
    """All but a few random products in the grid's range have a winner of it within the dispatcher's reach."""
    linear = [str(t.problem) for family in FAMILIES[:4] for t in points(family)]
    config = str(GEMM.default(GEMM.Problem.parse("m=64 n=4096 k=4096 b_major=k"), H200))
    known = measured(GEMM, *linear, config=config)
    draw = random.Random(7)

    def width() -> int:
        return round(2 ** draw.uniform(9, 15) / 8) * 8

    asked = [f"m={round(2 ** draw.uniform(0, 13))} n={width()} k={width()} b_major=k" for _ in range(200)]
    near = 0
    for text in asked:
        problem = GEMM.Problem.parse(text)
        near += any(
            True
            for _ in dispatch._neighbours(
                GEMM, problem.bucket(), H200, known.table[GEMM.name, GEMM.revision], "measured"
            )
        )
    assert near >= 196


# ---- order ------------------------------------------------------------------------------------------------------


def test_the_first_ones_are_far_apart_and_gains_fall() -> None:
    found = plan(NOTHING, families=[TOYS])
    assert len(found.job.tasks) == 16 and found.job.ranked and found.known == 0
    first = [task.problem for task in found.job.tasks[:3]]
    apart = min(dispatch.octaves(a, b) for a in first for b in first if a != b)
    assert apart >= 2, "none of the first is a neighbour of another"
    assert list(found.removed) == sorted(found.removed, reverse=True)
    assert sum(found.removed) == pytest.approx(found.regret) == pytest.approx(0.1)


def test_a_measured_neighbourhood_waits() -> None:
    known = measured(TOY, "m=64 n=64", "m=64 n=128")
    found = plan(known, families=[TOYS])
    assert found.known == 2 and len(found.job.tasks) == 14
    assert "m=64 n=64" not in texts(found)
    far, beside = texts(found).index("m=512 n=512"), texts(found).index("m=128 n=64")
    assert far < beside, "what a neighbour serves already removes less"
    assert found.regret < plan(NOTHING, families=[TOYS]).regret


def test_a_winner_that_calls_refuse_is_measured_again() -> None:
    """A rule that came later, without a new revision: calls run the default at that point."""
    rows = {
        problem: TunedConfig(
            TOY.name, TOY.revision, "", f"tile=128 warps={warps} fast=1", "measured", 10.0, 1.2, "", "database"
        )
        for problem, warps in (("m=64 n=64", 1), ("m=64 n=128", 4))
    }
    found = plan(Snapshot({(TOY.name, TOY.revision): rows}), H200, families=[TOYS])
    assert found.known == 1 and "m=64 n=64" in texts(found) and "m=64 n=128" not in texts(found)


def test_where_defaults_lose_comes_first() -> None:
    """Two measured corners: where the default was far behind its neighbours are expected to be, too."""
    rows = measured(TOY, "m=64 n=64", ratio=1.5).table[TOY.name, TOY.revision] | dict(
        measured(TOY, "m=512 n=512").table[TOY.name, TOY.revision]
    )
    order = texts(plan(Snapshot({(TOY.name, TOY.revision): rows}), families=[TOYS]))
    assert order.index("m=128 n=128") < order.index("m=256 n=256")


def test_families_are_merged_by_what_a_second_removes() -> None:
    cheap = ProductFamily("toy", _toys, 0.5, 0.2)
    norms = next(family for family in FAMILIES if family.op == "rms_norm")
    other = ProductFamily("rms_norm", norms.texts, 0.5, 0.01)
    ops = [task.op.name for task in plan(NOTHING, families=[cheap, other]).job.tasks]
    assert ops[:4] == ["toy"] * 4 and Counter(ops) == {"toy": 16, "rms_norm": 48}


def test_parts_and_limits() -> None:
    assert {task.op.name for task in plan(NOTHING, op="decode_attention").job.tasks} == {"decode_attention"}
    with pytest.raises(JobError, match="no points of an op 'rope'; it has some of gemm"):
        plan(NOTHING, op="rope")
    both = [texts(plan(measured(TOY, "m=64 n=64"), families=[TOYS], shard=f"{i}/2")) for i in (1, 2)]
    assert sorted(both[0] + both[1]) == sorted(set(_toys()) - {"m=64 n=64"})
    short = plan(NOTHING, families=[TOYS], budget_s=10)
    assert (
        0 < len(short.job.tasks) < 16 and texts(short) == texts(plan(NOTHING, families=[TOYS]))[: len(short.job.tasks)]
    )
    two = plan(NOTHING, families=[TOYS], budget_s=10, gpus=2)
    assert len(short.job.tasks) < len(two.job.tasks) <= 2 * len(short.job.tasks), "two GPUs begin more"
    assert {task.trials for task in plan(NOTHING, families=[TOYS], trials=5).job.tasks} == {5}


def test_the_whole_order_takes_a_moment() -> None:
    found = plan(snapshot.load("h200"))
    assert len(found.job.tasks) > 2000
    assert str(found).startswith(f"grid: {found.known} points have a measured winner; expected regret of a call")


# ---- runs -------------------------------------------------------------------------------------------------------


def test_runs_of_a_budget_add_up(tmp_path: Path) -> None:
    """Three runs: each takes the next problems in order and measures none again."""
    db, seen = str(tmp_path / "grid.db"), []
    for number in range(1, 4):
        found = plan(snapshot.load("h200", db) if Path(db).exists() else NOTHING, families=[TOYS], trials=4)
        machine = ToyMachine()
        report = tune(found.job, db=db, budget_s=30, runtime=machine, clock=machine.clock)
        began = [task.problem for task in report.tasks if task.measured]
        assert began == texts(found)[: len(began)], "in the order of the plan"
        assert not set(began) & set(seen)
        seen += began
        assert all(t.winner is not None for t in report.tasks if t.measured), "what began has its own time"
        assert machine.now < 30 + 10
        assert len(seen) >= 3 * number
    assert len(seen) < 16
    with Store(db) as store:
        assert len(store.winners(op="toy")) == len(seen)
    rest = plan(snapshot.load("h200", db), families=[TOYS])
    assert rest.known == len(seen) and set(texts(rest)) == set(_toys()) - set(seen)


def test_a_task_begins_with_time_to_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine, enumerated = ToyMachine(), []
    real = search.space
    monkeypatch.setattr(search, "space", lambda *task: enumerated.append(task) or real(*task))
    found = plan(NOTHING, families=[TOYS], trials=4)
    report = tune(found.job, db=str(tmp_path / "g.db"), budget_s=20, runtime=machine, clock=machine.clock)
    begun = [task for task in report.tasks if task.measured]
    assert begun and all(task.state == "tuned" for task in begun[:-1])
    left = [task for task in report.tasks if not task.measured]
    assert {task.message for task in left} == {"no time was left to begin"}
    assert len(enumerated) == len(begun), "those left are not even looked at"


class TestCommandLine:
    @pytest.fixture(autouse=True)
    def _toys_alone(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(grid, "FAMILIES", (TOYS,))
        monkeypatch.setattr(run, "LocalFleet", lambda *rest: OneSlot(H200, ToyMachine()))

    def invoke(self, *words: str) -> Any:
        return invoke(cli.app, "grid", *words)

    def test_it_goes_on_and_ends(self) -> None:
        first = self.invoke("--trials", "2", "--format", "json")
        assert first.exit_code == 0, first.output
        assert len(json.loads(first.stdout)["tasks"]) == 16
        assert "0 points have a measured winner" in first.stderr
        again = self.invoke("--trials", "2", "--format", "json")
        assert again.exit_code == 0 and json.loads(again.stdout)["tasks"] == []
        assert "16 points have a measured winner; expected regret of a call 0.0%" in " ".join(again.stderr.split())
        forced = self.invoke("--trials", "2", "--force", "--format", "json")
        assert len(json.loads(forced.stdout)["tasks"]) == 16

    def test_its_order_is_listed_anywhere_and_measured_where_the_gpu_is(self) -> None:
        listed = self.invoke("--gpu", "l40s", "--list", "--format", "json")
        assert listed.exit_code == 0 and len(json.loads(listed.stdout)) == 16
        assert "compiled and predicted" not in listed.stderr and "one task at a time" in " ".join(listed.stderr.split())
        refused = self.invoke("--gpu", "l40s")
        assert refused.exit_code == 2 and "run it on a machine with the l40s" in " ".join(refused.stderr.split())

    def test_a_dry_run_lists_what_the_next_run_takes(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(fleet, "visible", lambda: ["0", "1"])
        dry = self.invoke("--budget-s", "10", "--dry-run", "--format", "json")
        assert dry.exit_code == 0, dry.output
        assert 0 < len(json.loads(dry.stdout)) < 16
        two = self.invoke("--budget-s", "10", "--dry-run", "--gpus", "0,1", "--format", "json")
        assert len(json.loads(two.stdout)) > len(json.loads(dry.stdout))

    def test_a_job_that_is_called_so_is_a_job(self, tmp_path: Path) -> None:
        file = tmp_path / "mine.toml"
        file.write_text('name = "grid"\n[[tasks]]\nop = "toy"\nproblems = ["m=64 n=64"]\n')
        done = invoke(cli.app, str(file), "--budget-s", "0")
        assert done.exit_code == 1, "its task has no winner yet"

    def test_an_end_of_the_time_is_no_failure(self) -> None:
        done = self.invoke("--budget-s", "0", "--format", "json")
        assert done.exit_code == 0, done.output
