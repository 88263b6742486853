"""Numbers and limits that help and pages state are those of the code; every table fits into 80 columns."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from cutekernels import cli, dispatch
from cutekernels.autotune import calibrate, card, final, fleet, space, study
from cutekernels.db.storage import sqlite
from cutekernels.terminal import Format
from tests.command_line import invoke

ROOT = Path(__file__).parents[1]
WORDS = {2: "two", 3: "three", 8: "eight", 12: "twelve"}

# (page, what it says with the value left out, the value in the code)
STATED = [
    ("docs/tune.md", "or after {} attempts in a row without an improvement", study.PATIENCE),
    ("docs/tune.md", "of at least {:.1%}", study.IMPROVEMENT),
    ("docs/tune.md", "and {} configs of different tile", WORDS[space.MODEL_SEEDS]),
    ("docs/tune.md", "a *final*: {} fresh processes", WORDS[final.PROCESSES]),
    ("docs/tune.md", "more than {:.1%} faster", final.EFFECT - 1),
    ("docs/tune.md", "up to {} tasks in progress (`--lanes`)", WORDS[fleet.LANES]),
    ("docs/tune.md", "A lane takes {} GiB", fleet._LANE_BYTES >> 30),
    ("docs/tune.md", "at least {} times the default's speed", dispatch.LEAST_GAIN),
    ("docs/tune.md", "for up to {:.0f} s", calibrate.BUDGET_S),
    ("docs/guides/your-card.md", "in int4: {} problems", sum(round(f.share) for f in card.families())),
    ("docs/fleet.md", "up to {} tasks in progress (`--lanes`)", WORDS[fleet.LANES]),
    ("docs/fleet.md", "that loses its GPU {} times fails", WORDS[fleet.MOST_LOSSES]),
    ("docs/architecture.md", "within {} octaves", dispatch.MAX_OCTAVES),
    ("docs/architecture.md", "more than {} times as far behind the default", dispatch.MOST_BEHIND),
    ("docs/database.md", "at least {} times as fast as the default", dispatch.LEAST_GAIN),
    ("docs/database.md", "ends after {:.0f} s", sqlite.READ_LIMIT_S),
]
HELP = [
    (("tune",), "up to {}", fleet.LANES),
    (("tune",), "the {} predicted best", WORDS[space.MODEL_SEEDS]),
]
TABLES = [
    "gpus",
    "jobs",
    "doctor",
    "bench attention --dry-run",
    "bench gemm --suite alphabeta --dry-run",
    "tune demo --list",
    "tune llama-3-8b --op rope --dry-run --gpu rtx5090",
    "calibrate --dry-run --gpu l40s",
    'explain gemm "m=333 n=4096 k=4096 b_major=k" --gpu h200',
    "db query --gpu h200 --op silu_mul",
    'db show "rows=1 cols=18944" --gpu h200 --op silu_mul',
]


def unwrapped(text: str) -> str:
    return " ".join(text.replace("│", " ").split())


@pytest.mark.parametrize(("page", "words", "value"), STATED)
def test_pages_state_the_values_of_the_code(page: str, words: str, value: object) -> None:
    assert words.format(value) in unwrapped((ROOT / page).read_text())


@pytest.mark.parametrize(("verb", "words", "value"), HELP)
def test_help_states_the_values_of_the_code(verb: tuple[str, ...], words: str, value: object) -> None:
    told = invoke(cli.app, *verb, "--help", env={"COLUMNS": "200"})
    assert words.format(value) in unwrapped(told.output)


@pytest.mark.parametrize("line", TABLES)
def test_tables_fit_into_80_columns(line: str, narrow_terminal: None) -> None:
    told = invoke(cli.app, *shlex.split(line))
    assert told.exit_code == 0, told.output
    widest = max(told.stdout.splitlines(), key=len)
    assert len(widest.rstrip()) <= 80, widest


def test_rates_just_measured_fit_too(narrow_terminal: None, capsys: pytest.CaptureFixture[str]) -> None:
    row = {"rate": "warpgroup_flops_per_us", "unit": "of data sheet", "scaled": 6220000.0, "reading": 1.0}
    calibrate._write([row | {"calibrated": 1.0, "note": "not reached in 30 s " * 3}], Format.table, calibrate.MEASURED)
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 80


NAMED_FILE = re.compile(r"`([\w./-]+\.(?:py|md))(?:#[\w.-]+)?`")
FOLDERS = ("cutekernels", "db", "autotune", "bench", "docs", "tests", "examples")
OTHERS = {"modeling_rope_utils.py": "of transformers", "mine.py": "a user's own"}


def test_files_named_in_docstrings_and_pages_exist() -> None:
    """From its own folder on upwards for a file of code; anywhere for a bare name and for a page."""
    files = [f for folder in FOLDERS for f in (ROOT / folder).rglob("*.*") if f.suffix in (".py", ".md")]
    files += [*ROOT.glob("*.md"), ROOT / "setup.py"]
    names = {"/".join(f.parts[at:]) for f in files for at in range(len(ROOT.parts), len(f.parts))}
    lost = []
    for file in files:
        above = [base for base in file.parents if base.is_relative_to(ROOT)] + [ROOT / "cutekernels"]
        room = file.relative_to(ROOT).parts[0]
        if room not in ("cutekernels", "db", "autotune", "docs", "DECISIONS.md"):
            continue
        for name in set(NAMED_FILE.findall(file.read_text())) - OTHERS.keys():
            near = "/" in name and room != "docs" and file.suffix == ".py"
            if not (any((base / name).is_file() for base in above) if near else name in names):
                lost.append(f"{file.relative_to(ROOT)}: {name}")
    assert not lost
