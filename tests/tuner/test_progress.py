"""Progress: what the bars and the log say, with the right totals and the time that is left."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console

from cutekernels.autotune.progress import Bars, Lines, Pace, duration
from cutekernels.autotune.report import TaskReport
from cutekernels.db.storage.trial import Trial
from tests.db.trials import trial
from tests.tuner.toys import TOY, ToyConfig, task

TASKS = [task(10, f"m={m} n=64") for m in (1, 2, 4, 8)]


def ended(number: int, *, measured: bool = True, gpu: str = "h200") -> TaskReport:
    attempts = {"ok": 9, "pruned": 1} if measured else {}
    return TaskReport(
        "toy", str(TASKS[number].problem), "tuned" if measured else "done", None, "", attempts, seconds=12, gpu=gpu
    )


class TestPace:
    def test_time_left_follows_from_the_tasks_that_did_something(self) -> None:
        now = [0.0]
        pace = Pace(TASKS, lambda: now[0])
        assert pace.left_s() is None
        pace.begin(str(TASKS[0]), 4)
        pace.end(ended(0, measured=False))
        assert pace.left_s() is None, "a resumed task says nothing of the speed"
        pace.begin(str(TASKS[1]), 4)
        now[0] = 30.0
        pace.end(ended(1))
        assert pace.left_s() == pytest.approx(60), "two of the same cost are left"

    def test_tasks_in_work_count_as_half_done(self) -> None:
        now = [0.0]
        pace = Pace(TASKS, lambda: now[0])
        for each in TASKS:
            pace.begin(str(each), 4)
        now[0] = 30.0
        pace.end(ended(0))
        assert pace.left_s() == pytest.approx(18), "one and three halves done in 30 s, three halves left"

    def test_what_the_first_tasks_compiled_costs_no_more_time(self) -> None:
        """A job of one product at many row counts: the first task compiles what all others find in the cache."""
        now = [0.0]
        tasks = [task(10, f"m={2**i} n=64") for i in range(12)]
        pace = Pace(tasks, lambda: now[0])
        for i, each in enumerate(tasks[:6]):
            pace.begin(str(each), 12)
            now[0] += 100.0 if i == 0 else 2.0
            pace.end(TaskReport("toy", str(each.problem), "predicted", None, "", {"ok": 10}))
        assert pace.left_s() == pytest.approx(12), "not 110, the mean of all six"

    def test_a_fleet_of_two_kinds_does_everything_twice(self) -> None:
        now = [0.0]
        pace = Pace(TASKS, lambda: now[0])
        pace.begin(str(TASKS[0]), 8)
        now[0] = 10.0
        pace.end(ended(0))
        assert pace.left_s() == pytest.approx(70)


@pytest.mark.parametrize(("seconds", "text"), [(0, "0 s"), (89, "89 s"), (600, "10 min"), (9000, "2.5 h")])
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def row(status: str = "ok", ratio: float | None = 1.5, **more: object) -> Trial:
    text = str(TASKS[0].problem)
    return trial(str(ToyConfig(16, 1, False)), op=TOY.name, problem=text, status=status, ratio=ratio, **more)


def test_lines() -> None:
    out = io.StringIO()
    lines = Lines(out, TASKS)
    for number in range(4):
        lines.begin(TASKS[number], number + 1, 4)
        lines.trial(row(), 1, 10)
        lines.end(ended(number))
    lines.trial(row("wrong_result", None, message="error 3 times the tolerance\nmore"), 1, 10)
    written = out.getvalue().splitlines()
    assert len(written) == 5
    for number, line in enumerate(written[:4], 1):
        assert re.match(rf"\d{{4}}-\d\d-\d\d \d\d:\d\d:\d\d \[{number}/4\] h200 toy \[m=\d+ n=64\]: tuned; ", line)
        assert "9 ok, 1 pruned" in line and "12.0 s" in line and ("left" in line) == (number < 4)
    assert "wrong_result: toy [m=1 n=64]" in written[4] and "more" not in written[4]


def test_bars() -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=160)
    with Bars(console, TASKS) as bars:

        def shown() -> str:
            page = io.StringIO()
            Console(file=page, width=160).print(bars._progress.get_renderable())
            return page.getvalue()

        bars.begin(TASKS[0], 1, 4)
        bars.trial(row(), 1, 3)  # --limit 3, or a space of three
        bars.trial(row(ratio=1.2), 2, 3)
        assert "2/3" in shown() and "best 1.50x the default" in shown() and "0/4" in shown()
        bars.begin(TASKS[1], 2, 4)  # two GPUs at once
        assert "toy [m=1 n=64]" in shown() and "toy [m=2 n=64]" in shown()
        bars.trial(row(ratio=None, median_us=88.0, origin="predicted"), 3, 3)
        bars.end(ended(0))
        assert "toy [m=1 n=64]" not in shown() and "1/4" in shown() and "left" in shown()
        bars.trial(row("crashed", None, median_us=None, message="segfault [red]\x1b[2J"), 3, 3)
    assert "crashed: toy" in out.getvalue() and "segfault [red]" in out.getvalue() and "\x1b[2J" not in out.getvalue()
