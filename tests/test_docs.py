"""The documents are true: examples run or parse, every verb, room and decision is listed, links lead somewhere."""

from __future__ import annotations

import re
import shlex
import tomllib
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import typer

import cutekernels
from cutekernels import cli
from cutekernels.autotune import job
from tests.command_line import invoke
from tests.test_floors import FLOORS, OWN_FLOOR

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
README_LINES = 170
WIDTH = 110  # columns of prose; tables and the lines of generated pages may be longer
DOCS = ROOT / "docs"
PAGES = sorted(str(path.relative_to(ROOT)) for path in (*DOCS.glob("*.md"), *DOCS.glob("guides/*.md")))
NOTES = sorted(str(path.relative_to(ROOT)) for path in DOCS.glob("notes/*.md"))
OTHERS = ("bench/sweeps/README.md", "db/shipped/README.md")
HISTORY = ("DECISIONS.md", "CHANGELOG.md")
DOCUMENTS = ("README.md", "CONTRIBUTING.md", *HISTORY, *PAGES)


def blocks(language: str) -> list[str]:
    text = "\n".join((ROOT / name).read_text() for name in ("README.md", *PAGES))
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def anchors(text: str) -> list[str]:
    """The names by which a link reaches each heading, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return [re.sub(r"\s", "-", re.sub(r"[^\w\s-]", "", heading.lower())) for heading in headings]


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


def examples() -> list[tuple[str, str]]:
    """Each Python block, and the text block behind it, which is what it prints."""
    text = "\n".join((ROOT / name).read_text() for name in ("README.md", *PAGES))
    found = re.findall(r"^```python\n(.*?)^```\n(?:\n```text\n(.*?)^```)?", text, re.MULTILINE | re.DOTALL)
    assert len(found) == len(blocks("python"))
    return found


@pytest.mark.parametrize("number", range(len(examples())))
def test_python_examples_run_and_print_what_stands_below(number: int, capsys: pytest.CaptureFixture[str]) -> None:
    code, expected = examples()[number]
    exec(compile(code, "example", "exec", dont_inherit=True), {"__name__": "example"})
    printed = capsys.readouterr().out
    for line in expected.splitlines():
        assert line in printed.splitlines(), f"{line!r} is not printed:\n{printed}"


def test_console_examples_parse() -> None:
    root = typer.main.get_command(cli.app)
    for line in commands():
        program, *words = shlex.split(line)
        if program == "make":
            targets = re.findall(r"^([\w-]+):(?!=)", (ROOT / "Makefile").read_text(), re.MULTILINE)
            assert words[0] in targets, line
        elif program == "pip":
            assert words[0] == "install", line
        elif program == "python":
            path = words[0] if words[0] != "-m" else words[1].replace(".", "/") + ".py"
            assert (ROOT / path).is_file(), "which a test of its own runs"
        else:
            assert program == "cutekernels"
            parse(root, [program, *words])


def test_a_wrong_example_would_be_seen() -> None:
    root = typer.main.get_command(cli.app)
    for words in (["db", "query", "--gpus", "l40s"], ["frobnicate"], ["explain", "gemm"], ["bench", "gemm", "more"]):
        with pytest.raises(Exception, match=r"(?i)no such|missing|unexpected"):
            parse(root, ["cutekernels", *words])


@pytest.mark.parametrize("line", [line for line in commands() if line.split()[1] in ("explain", "bench")])
def test_quick_console_examples_run(line: str) -> None:
    result = invoke(cli.app, *shlex.split(line)[1:])
    assert result.exit_code == 0, result.output
    assert result.stdout


def test_every_verb_has_an_example() -> None:
    shown = "\n".join(commands())
    for path in verbs(typer.main.get_command(cli.app)):
        assert re.search(rf"^cutekernels {' '.join(path)}\b", shown, re.MULTILINE), f"no example of {' '.join(path)}"


def shown() -> list[tuple[str, str]]:
    """Commands of console blocks and what stands below them, where anything does."""
    parts = [part for block in blocks("console") for part in block.split("$ ")[1:]]
    return [(line, rest) for line, _, rest in (part.partition("\n") for part in parts) if rest.strip()]


@pytest.mark.parametrize(("line", "expected"), shown())
def test_output_on_a_page_is_what_the_command_prints(line: str, expected: str) -> None:
    result = invoke(cli.app, *shlex.split(line, comments=True)[1:])
    assert result.exit_code == 0, result.output
    printed = [text.split() for text in result.stdout.splitlines()]
    assert all(text.split() in printed for text in expected.splitlines()), f"{line} prints\n{result.stdout}"


def test_the_readme_shows_output_of_each_use() -> None:
    for verb in ("tune", "db query", "explain"):
        assert any(line.startswith(f"cutekernels {verb}") and line in README for line, _ in shown()), verb


@pytest.mark.parametrize("number", range(len(blocks("toml"))))
def test_job_files_on_pages_are_jobs(number: int, tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_text(blocks("toml")[number])
    assert job.load(str(path)).tasks


def test_the_readme_is_short() -> None:
    assert len(README.splitlines()) <= README_LINES


def test_lines_are_short_but_in_tables() -> None:
    for name in (*DOCUMENTS, *NOTES, "SECURITY.md", *OTHERS):
        lines = (ROOT / name).read_text().splitlines()
        assert [line for line in lines if len(line) > WIDTH and not line.startswith("|")] == [], name


def test_the_readme_counts_the_winners_that_are_shipped() -> None:
    from cutekernels.db import open as opened

    names = {"h200": "| H200 |", "h100-sxm": "| H100 SXM |"}
    with opened() as database:
        counts = Counter(w.gpu for w in database.winners() if w.source == "shipped")
    for gpu, count in counts.items():
        row = next(line for line in README.splitlines() if line.startswith(names[gpu]))
        assert re.search(rf"\| {count}\b", row), f"{count} winners of the {gpu} are shipped: {row}"


def test_every_public_function_is_in_the_readme() -> None:
    for name in set(cutekernels.__all__) - {"autotune", "db", "models", "nn", "optim", "fold"}:
        assert re.search(rf"`(ck\.)?{name}\b", README), f"the README does not mention {name}"


def test_every_room_is_in_the_architecture_from_the_top_floor_down() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    rows = re.findall(r"^\| (`.*?) \|", text, re.MULTILINE)
    named = [[key for key in FLOORS if f"`{key}`" in row] for row in rows]
    backends = "cutekernels/backends/__init__.py"  # a file of a room that has its row
    assert set(FLOORS) - OWN_FLOOR - {backends} == {key for keys in named for key in keys}
    assert "`cutekernels/ops/<family>/`" in text, "which stands for OWN_FLOOR"
    floors = [[FLOORS[key] for key in keys] for keys in named if keys]
    for above, below in pairwise(floors):
        assert min(above) >= max(below), f"{above} stands above {below}"


def test_every_bundled_job_is_on_the_tuners_page() -> None:
    text = (DOCS / "tune.md").read_text()
    section = text[text.index("## Bundled jobs") : text.index("## A job of your own")]
    for path in (ROOT / "autotune" / "jobs").glob("*.toml"):
        assert f"`{path.stem}`" in section, f"docs/tune.md#bundled-jobs does not name {path.stem}"
        assert tomllib.loads(path.read_text())["name"] == path.stem


def test_links_and_paths_lead_somewhere() -> None:
    for name in DOCUMENTS:
        text = (ROOT / name).read_text()
        for target in re.findall(r"\]\(([^)#]+)\)", text):
            assert target.startswith("http") or (ROOT / name).parent.joinpath(target).exists(), (
                f"{name} links to {target}"
            )
        for anchor in re.findall(r"\]\(#([^)]+)\)", text):
            assert anchor in anchors(text), f"{name} links to #{anchor}"
        if name in HISTORY:
            continue  # entries keep the paths of their day
        for path in re.findall(r"`((?:cutekernels|tests|autotune|db|bench|docs)/[\w/.-]+)`", text):
            assert (ROOT / path).exists(), f"{name} mentions {path}"


def test_decisions_are_short_and_dated() -> None:
    text = (ROOT / "DECISIONS.md").read_text()
    _, *entries = re.split(r"^### ", text, flags=re.MULTILINE)
    assert entries
    for entry in entries:
        title, *lines = entry.partition("\n## ")[0].strip().splitlines()
        assert re.search(r"\(\d{4}-\d\d-\d\d(?:(?:,| to) \d{4}-\d\d-\d\d)*\)$", title), title
        assert 0 < len(lines) <= 10, title
    assert len(text) <= 25_000


def test_the_changelog_has_a_line_a_change() -> None:
    lines = (ROOT / "CHANGELOG.md").read_text().splitlines()
    assert len(lines) <= 120
    assert next(line for line in lines if line.startswith("## ")).startswith("## 0.3.0")


def test_notes_that_the_code_names_are_there() -> None:
    for folder in ("cutekernels", "autotune", "db", "bench", "tests"):
        for path in (ROOT / folder).rglob("*.py"):
            for name, anchor in re.findall(r"(docs/[\w/]+\.md)#?([\w-]*)", path.read_text()):
                note = ROOT / name
                assert note.is_file(), f"{path} names {name}"
                assert not anchor or anchor in anchors(note.read_text()), f"{path} names {name}#{anchor}"
