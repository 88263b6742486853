"""Pictures: one colour for each contender, lines or bars as the rows have it, nothing wider than a page."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from PIL import Image

from bench import plots, rows
from bench.rows import Row
from tests.bench.test_bench import STAMP


def steps() -> list[Row]:
    """Six token counts of one weight, ours beside one peer."""
    stamp = {"gpu": "h200", "commit": "abc", "date": "2026-11-23T00:00:00"}
    return [
        Row(
            op="gemm", suite="decode", problem=f"m={m} n=8 k=8", label=f"m={m}", alpha=1.0, beta=0.0, contender=name,
            status="ok", median_us=us, roofline_fraction=0.5, stamp=stamp,
        )
        for m in (1, 2, 4, 8, 16, 32)
        for name, us in (("cublas", 9.0), ("cutekernels", 4.0 + m))
    ]  # fmt: skip


def test_each_contender_has_one_colour_and_ours_no_other() -> None:
    found = {r.contender for path in plots.RESULTS.rglob("*.jsonl") for r in rows.read(path)}
    peers = {name for name in found if not rows.is_ours(name) and not name.startswith("streaming")}
    assert plots.color("cutekernels") not in {plots.color(name) for name in peers}
    assert {name for name in peers if plots.color(name) == plots.color("no such contender")} == set()
    assert plots.color("quack") == plots.color("quack (untuned)")


def test_no_two_contenders_of_a_picture_share_a_colour() -> None:
    for path in plots.RESULTS.rglob("*.jsonl"):
        names = {name for name, _ in plots._best_streams(rows.read(path))}
        assert len({plots.color(name) for name in names}) == len(names), f"{path.stem}: {sorted(names)}"


def test_steps_of_tokens_are_lines_above_the_least_time() -> None:
    timed = plots._best_streams(steps())
    (lines,) = plots._over_tokens(timed).values()
    assert sorted(lines) == ["cublas", "cutekernels", plots.FLOOR]
    assert lines[plots.FLOOR][0] == (1, 2.5)
    assert plots._over_tokens(timed[:6]) == {}, "three steps are bars"


def test_a_speedup_has_its_own_interval_only() -> None:
    base, ours = steps()[:2]
    ratio = pytest.approx(9 / 5)
    assert plots._speedup(ours, base) == (ratio, ratio, ratio)
    assert plots._speedup(ours, None) == (0.0, 0.0, 0.0)
    measured = dataclasses.replace(ours, speedup=1.8, speedup_low=1.7, speedup_high=1.9)
    assert plots._speedup(measured, base) == (ratio, 1.7, 1.9)
    other = dataclasses.replace(measured, speedup=3.0)
    assert plots._speedup(other, base) == (ratio, ratio, ratio)


@pytest.mark.parametrize("kind", ["lines", "bars"])
def test_a_picture_is_at_most_1600_wide(kind: str, tmp_path: Path) -> None:
    from PIL import Image

    some = (
        steps() if kind == "lines" else [dataclasses.replace(r, label=f"a long name, {r.label}") for r in steps()[:6]]
    )
    plots.draw(some, tmp_path / "x.png")
    with Image.open(tmp_path / "x.png") as picture:
        assert picture.width <= 1600


def test_the_tracked_overview_is_small() -> None:
    for path in plots.RESULTS.rglob(plots.OVERVIEW):
        assert path.stat().st_size < 200_000


def test_a_plot_of_rows_that_failed_too(tmp_path: Path) -> None:
    values = {"op": "silu_mul", "suite": "llm", "problem": "p", "alpha": 1.0, "beta": 0.0, "stamp": STAMP}
    some = [
        Row(**values, label=str(i), contender=name, status="ok", median_us=1.0, gbps=100.0 * i)
        for i in range(12)
        for name in ("torch.compile", "cutekernels")
    ]
    some.append(Row(**values, label="0", contender="liger", status="absent", reason="not installed"))
    plots.draw(some, tmp_path / "deep" / "x.png")
    drawn = Image.open(tmp_path / "deep" / "x.png").convert("RGB")
    colors = sorted(count for count, _ in drawn.getcolors() or ())
    assert min(drawn.size) > 200 and len(colors) > 4, "bars, their names and axes, not paper alone"
    assert colors[-1] < 0.98 * drawn.width * drawn.height


def test_an_overview_compares_ours_with_the_best_peer_of_each_case(tmp_path: Path) -> None:
    values = {"op": "silu_mul", "suite": "llm", "problem": "p", "alpha": 1.0, "beta": 0.0, "stamp": STAMP}

    def row(label: str, contender: str, us: float) -> Row:
        return Row(**values, label=label, contender=contender, status="ok", median_us=us)

    some = [row("a", "torch.compile", 9.0), row("a", "liger", 8.0), row("a", "streaming 2:1", 1.0)]
    some += [row("a", "cutekernels", 4.0), row("b", "liger", 2.0), row("b", "cutekernels", 4.0)]
    some += [row("c", "cutekernels", 1.0), row("a", "our ops one by one", 1.0)]
    assert list(plots.against_best_peer(some).values()) == [2.0, 0.5]  # a, b; c has no peer
    rows.write(tmp_path / "silu_mul_llm.jsonl", some)
    rows.write(tmp_path / "silu_mul_alone.jsonl", some[-2:])
    assert plots.draw_all(tmp_path) == 3
    assert sorted(p.name for p in tmp_path.glob("*.png")) == ["overview.png", "silu_mul_alone.png", "silu_mul_llm.png"]
