"""What the documents say is so: examples run or parse, every verb and every room is described, links lead somewhere."""

from __future__ import annotations

import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from test_floors import FLOORS
from typer.testing import CliRunner

from cutekernels import cli

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
DOCUMENTS = ("README.md", "CONTRIBUTING.md", "DECISIONS.md", "CHANGELOG.md")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


def commands() -> list[str]:
    lines = [line for block in blocks("console") for line in block.splitlines() if line.startswith("$ ")]
    return [line[2:].partition("#")[0].strip() for line in lines]


def verbs(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Every command of the tree that does something."""
    if not hasattr(command, "list_commands"):
        yield path
        return
    context = typer.Context(command)
    for name in command.list_commands(context):
        _, found, _ = command.resolve_command(context, [name])
        yield from verbs(found, (*path, name))


def parse(command: Any, words: list[str], parent: Any = None) -> None:
    """Reads ``words`` as the command line would, without running anything."""
    context = command.make_context(words[0] if words else "cutekernels", words[1:], parent=parent)
    if hasattr(command, "resolve_command"):
        name, found, rest = command.resolve_command(context, [*context._protected_args, *context.args])
        parse(found, [name, *rest], context)


@pytest.mark.parametrize("number", range(len(blocks("python"))))
def test_python_examples_run(number: int) -> None:
    exec(compile(blocks("python")[number], "README.md", "exec"), {"__name__": "readme"})


@pytest.mark.parametrize("line", commands())
def test_console_examples_parse(line: str) -> None:
    program, *words = shlex.split(line)
    if program == "make":
        targets = re.findall(r"^([\w-]+):(?!=)", (ROOT / "Makefile").read_text(), re.MULTILINE)
        assert words[0] in targets
    else:
        assert program == "cutekernels"
        parse(typer.main.get_command(cli.app), [program, *words])


def test_a_wrong_example_would_be_seen() -> None:
    root = typer.main.get_command(cli.app)
    for words in (["db", "query", "--gpus", "l40s"], ["frobnicate"], ["explain", "gemm"], ["bench", "gemm", "more"]):
        with pytest.raises(Exception, match=r"(?i)no such|missing|unexpected"):
            parse(root, ["cutekernels", *words])


@pytest.mark.parametrize("line", [line for line in commands() if line.split()[1] in ("explain", "bench")])
def test_quick_console_examples_run(line: str) -> None:
    result = CliRunner().invoke(cli.app, shlex.split(line)[1:])
    assert result.exit_code == 0, result.output
    assert result.stdout


def test_every_verb_is_in_the_readme() -> None:
    shown = "\n".join(commands())
    for path in verbs(typer.main.get_command(cli.app)):
        assert re.search(rf"^cutekernels {' '.join(path)}\b", shown, re.MULTILINE), f"no example of {' '.join(path)}"


def test_every_room_is_in_the_readme() -> None:
    table = README[README.index("| floor | room |") : README.index("A file imports only lower floors")]
    for key, floor in FLOORS.items():
        name = key.removeprefix("cutekernels/")
        if Path(key).parts[1:2] == ("backends",) and not key.endswith("/"):
            continue  # a file of a room that has its row
        row = next((r for r in table.splitlines() if re.search(rf"`(cutekernels/)?{re.escape(name)}`", r)), None)
        assert row is not None, f"the README's table lacks {key}"
        assert row.startswith(f"| {floor} |"), f"{key} is on floor {floor}: {row}"


def test_every_bundled_job_is_in_the_readme() -> None:
    for job in (ROOT / "autotune" / "jobs").glob("*.toml"):
        assert f"`{job.stem}`" in README
        assert tomllib.loads(job.read_text())["name"] == job.stem


@pytest.mark.parametrize("name", DOCUMENTS)
def test_links_and_paths_lead_somewhere(name: str) -> None:
    text = (ROOT / name).read_text()
    for target in re.findall(r"\]\(([^)#]+)\)", text):
        assert target.startswith("http") or (ROOT / target).exists(), f"{name} links to {target}"
    for path in re.findall(r"`((?:cutekernels|tests|autotune|db|bench)/[\w/.-]+)`", text):
        if not path.startswith("bench/results/"):  # there once a GPU has measured
            assert (ROOT / path).exists(), f"{name} speaks of {path}"


def test_decisions_are_short_and_dated() -> None:
    _, *entries = re.split(r"^## ", (ROOT / "DECISIONS.md").read_text(), flags=re.MULTILINE)
    assert entries
    for entry in entries:
        title, *lines = entry.strip().splitlines()
        assert re.match(r"\d{4}-\d\d-\d\d: ", title), title
        assert len(lines) <= 10, title
