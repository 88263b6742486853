"""Published numbers: each is of a case in a suite here, and is compared with rows of a single run."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from bench import __main__ as command
from bench import published, rows, workloads
from bench.published import Published
from bench.rows import Row
from cutekernels.ops import registry
from tests.command_line import invoke

ALL = published.load()
OF_OPS = [p for p in ALL if p.op in workloads.OPS]
ADAMW = published.load("adamw_step")


def row(p: Published, contender: str, us: float, *, date: str = "2026-11-21", **changes: Any) -> Row:
    values: dict[str, Any] = {"op": p.op, "suite": p.suite, "problem": p.problem, "label": p.case}
    values |= {"alpha": 1.0, "beta": 0.0, "contender": contender, "status": "ok", "median_us": us}
    return Row(**values | {"stamp": {"gpu": "h200", "date": date}} | changes)


def run(p: Published, baseline: float, strong: float, ours: float, **changes: Any) -> list[Row]:
    peers = [peer.name for peer in workloads.get(p.op).peers]
    times = {peers[0]: strong, p.peer: baseline, "cutekernels": ours}
    return [row(p, name, us, **changes) for name, us in times.items()]


def test_every_row_is_a_fact_about_a_case_here() -> None:
    assert (len(ALL), len(OF_OPS)) == (136, 122)
    for p in OF_OPS:
        assert p.gpu
        assert p.baseline
        assert p.problem, "raises where no suite has the case"
        assert p.unit in published.UNITS
        assert (p.baseline_value is None) == (p.system_value is None) == (p.speedup is None)
        assert p.speedup is None or p.speedup > 0
        assert p.peer in [peer.name for peer in workloads.get(p.op).peers]
        assert registry.get(workloads.get(p.op).poses or p.op).Problem.parse(p.problem).dtype == p.dtype


def test_every_other_row_is_of_a_model_or_says_why_it_is_not_measured() -> None:
    from bench import models

    prompts = [p for p in ALL if p.op in published.MODELS]
    assert [p.problem for p in prompts] == list(map(str, models.PUBLISHED)) and {p.dtype for p in prompts} == {"fp16"}
    assert {p.op for p in prompts} <= models.CONFIGS.keys()
    assert {name for p in prompts for name in (p.peer, p.ours)} <= models.PUBLISHED_CONTENDERS.keys()
    others = [p for p in ALL if p not in OF_OPS and p not in prompts]
    assert len(prompts) == 5 and len(others) == 9 and all(p.unmeasured for p in others)
    assert not any(p.unmeasured for p in OF_OPS + prompts)


def test_a_case_that_no_suite_has_is_named() -> None:
    with pytest.raises(ValueError, match=r"adamw_step sizes has no case '2M'; it has 1M, 10M, 50M"):
        _ = dataclasses.replace(ADAMW[0], case="2M").problem


def test_speedups_are_of_the_system_whatever_the_unit() -> None:
    by_unit = {p.unit: p for p in published.load("rms_norm") if p.gpu in ("L4", "T4")}
    assert by_unit["us"].speedup == pytest.approx(818 / 270)
    assert by_unit["tokens/s"].speedup == pytest.approx(36447 / 21752)


class TestReproduce:
    def test_rows_of_the_case_stand_beside_it(self, tmp_path: Path) -> None:
        rows.write(tmp_path / "a.jsonl", [*run(ADAMW[0], 120.0, 40.0, 8.0), *run(ADAMW[2], 1300.0, 400.0, 325.0)])
        first, second, third = published.reproduce(ADAMW, tmp_path)
        assert (first.speedup(first.strongest), first.speedup(first.ours)) == (3.0, 15.0)
        assert third.speedup(third.ours) == 4.0
        assert (second.baseline, second.strongest, second.ours) == (None, None, None)
        assert second.speedup(second.ours) is None
        assert published.missing([first, second]) == ["python -m bench adamw_step --suite sizes --dtype fp32"]

    def test_the_strongest_peer_is_the_fastest_that_is_right_and_not_ours(self, tmp_path: Path) -> None:
        p = ADAMW[0]
        fast = row(p, "cutekernels FusedAdamW", 1.0)
        streams = row(p, "streaming 4:3 (1024x4)", 1.0)
        wrong = row(p, "torch AdamW(fused)", 2.0, status="wrong_result", median_us=None, reason="off")
        rows.write(tmp_path / "a.jsonl", [fast, streams, wrong, row(p, p.peer, 120.0)])
        (found,) = published.reproduce([p], tmp_path)
        assert found.strongest is not None
        assert found.strongest.contender == p.peer

    def test_the_latest_run_counts_and_runs_are_not_mixed(self, tmp_path: Path) -> None:
        p = ADAMW[0]
        rows.write(tmp_path / "z.jsonl", run(p, 120.0, 40.0, 8.0, date="2026-11-20"))
        rows.write(tmp_path / "a.jsonl", [row(p, "cutekernels", 7.0, date="2026-11-22")])
        (found,) = published.reproduce([p], tmp_path)
        assert found.ours is not None
        assert found.ours.median_us == 7.0
        assert found.baseline is None
        assert published.missing([found])

    def test_other_conditions_are_other_tables(self, tmp_path: Path) -> None:
        p = ADAMW[0]
        rows.write(tmp_path / "warm.jsonl", run(p, 120.0, 40.0, 8.0, l2="warm"))
        rows.write(tmp_path / "rested.jsonl", run(p, 120.0, 40.0, 8.0, rest_ms=50.0))
        assert published.reproduce([p], tmp_path)[0].ours is None
        (warm,) = published.reproduce([p], tmp_path, warm=True)
        assert warm.ours is not None


class TestCommand:
    def run(self, *words: str) -> Any:
        return invoke(command.app, *words)

    def test_tables_and_a_picture(self, tmp_path: Path) -> None:
        rows.write(tmp_path / "a.jsonl", run(ADAMW[0], 120.0, 40.0, 8.0))
        result = self.run("adamw_step", "--published", "--out", str(tmp_path))
        assert result.exit_code == 0, result.output
        here, theirs = result.stdout.split("published by others, on their GPUs")
        assert "h200, cold L2" in here
        assert "15.00" in here
        assert here.count("not measured") == 6, "two cases, three rows each"
        assert "27279" in theirs
        assert "27279" not in here, "a time of theirs never stands beside one of ours"
        assert "measure with: python -m bench adamw_step --suite sizes --dtype fp32\n" in result.stderr
        assert (tmp_path / "adamw_step_published.png").read_bytes().startswith(b"\x89PNG")

    def test_nothing_is_drawn_of_nothing(self, tmp_path: Path) -> None:
        result = self.run("rope", "--published", "--warm", "--out", str(tmp_path))
        assert result.exit_code == 0, result.output
        assert "not published" in result.stdout
        assert "--suite reference --dtype fp16 --warm" in result.stderr
        assert list(tmp_path.iterdir()) == []

    def test_all_ops_and_what_is_not_measured_of_each(self, tmp_path: Path) -> None:
        result = self.run("all", "--published", "--out", str(tmp_path))
        assert result.exit_code == 0, result.output
        told = " ".join(result.stdout.split())
        for op in {p.op for p in ALL}:
            assert f"{op}, published by others" in told, op
        for op in {p.op for p in OF_OPS}:
            assert f"measure with: python -m bench {op} --suite" in result.stderr, op
        assert "measure with: python -m bench models --model qwen2.5-7b --published" in result.stderr
        assert "136 published rows: 0 beside ours here, 9 that no case here reproduces, 127 not measured yet" in told
        assert "9 of minfer (tg-128): 128 tokens decoded on an Apple M2 Pro" in told
        assert self.run("all").exit_code == 2, "there is no suite of all ops"

    def test_prompts_of_a_model_stand_beside_theirs_and_are_counted(self, tmp_path: Path) -> None:
        from bench import models

        def prompt(tokens: int, contender: str, us: float) -> Row:
            text = f"batch=1 tokens={tokens}"
            return Row("qwen2.5-7b", "prefill", text, text, 1.0, 0.0, contender, "ok", l2="warm", median_us=us)

        first, second = (case.tokens for case in models.PUBLISHED[:2])
        timed = [prompt(first, "transformers", 30.0), prompt(first, "cutekernels, norms and MLPs", 24.0)]
        fast, alone = prompt(first, "cutekernels", 2.0), prompt(second, "transformers", 50.0)
        rows.write(tmp_path / "models" / "qwen2.5-7b_published.jsonl", [*timed, fast, alone])
        found = published.reproduce(published.load("qwen2.5-7b"), tmp_path)
        assert [line.measured for line in found] == [True, False, False, False, False]
        assert found[0].speedup(found[0].ours) == 1.25, "what others patched, not the whole decoder"
        assert found[0].published.speedup == pytest.approx(19.85 / 18.03)
        assert published.account([tmp_path])[0].startswith("136 published rows: 1 beside ours here, 9 that")
        assert "4 wait for: python -m bench models --model qwen2.5-7b --published" in published.account([tmp_path])

    def test_an_op_of_which_nothing_is_published(self) -> None:
        result = self.run("moe_route", "--published")
        assert result.exit_code == 2
        assert "nothing is published of moe_route" in result.stderr
