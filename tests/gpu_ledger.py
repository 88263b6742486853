"""Ledger of GPU tests: one line of ``gpu_ledger.tsv`` a file of GPU tests, stale once what it covers has changed.

    python -m tests.gpu_ledger                 # stale files, the longest first, and why
    python -m tests.gpu_ledger --files         # their paths alone, for pytest's command line
    python -m tests.gpu_ledger --count         # one line, for `make test`
    python -m tests.gpu_ledger merge FILE      # lines that came back from a card

    python -m pytest -p tests.gpu_ledger --gpu-ledger FILE --commit SHA -m "gpu and not slow" $(...  --files)

The last writes lines, on a card. A line is written when the last of its file's tests has ended, so that a test which
hangs costs its own file's line alone, and only where all tests marked ``gpu`` and not ``slow`` ran (all marked ``gpu``
where there are no others): ``-k``, ``-x`` or one test's name leave the line as it was. Workers are handed few tests at
a time, so files end one after the other, and a run that is cut off has cost the last ones' lines: 27 of 56 files had
one where 93 % of their tests had ended in larger portions. ``--commit`` is for a copy of the checkout without ``.git``.

What a file covers is found in its imports: the test file, what it takes from ``tests/``, and every file of the product
that these reach by imports, lazy ones and dotted names in texts included, or by the name of an op. What each op's call
goes through (all that ``dispatch`` reaches: about 35 files of settings, rules, database and backends) counts for test
files outside the folders of families alone, or one line there would make every file stale. Comments, docstrings and
empty lines are not hashed.
"""

from __future__ import annotations

import argparse
import hashlib
import re
import sys
from collections import defaultdict
from dataclasses import asdict, dataclass, field, fields
from datetime import UTC, datetime
from pathlib import Path

import pytest

from cutekernels.ops import registry
from tests.imports import ROOT, code, reached

LEDGER = Path(__file__).with_suffix(".tsv")
TRUNK = "cutekernels/dispatch.py"
EXPECTED = "gpu-tests-of-file"  # a report's property: how many tests its file has
FEW = 2  # tests that a worker is handed at a time

_GPU = "mark.gpu"
PRODUCTS = ("gemm", "quantized", "norm_linear")  # folders of tests of the family of products


@dataclass(frozen=True)
class Line:
    """How the tests of one file ended on a card, and the hash of what they cover."""

    file: str
    passed: int
    failed: int
    skipped: int
    seconds: float  # of all its tests, one after another
    commit: str
    card: str
    date: str
    sources: str


def read(path: Path) -> dict[str, Line]:
    """The lines of a ledger by their file; none where it does not exist."""
    if not path.exists():
        return {}
    heading, *rows = path.read_text().splitlines()
    names = [f.name for f in fields(Line)]
    if heading.split("\t") != names:
        raise ValueError(f"{path} is no ledger: its first line is {heading!r}, not the names {' '.join(names)}")
    kinds = {"passed": int, "failed": int, "skipped": int, "seconds": float}
    values = (dict(zip(names, row.split("\t"), strict=True)) for row in rows)
    lines = (Line(**{k: kinds.get(k, str)(v) for k, v in each.items()}) for each in values)
    return {line.file: line for line in lines}


def write(path: Path, lines: dict[str, Line]) -> None:
    rows = ["\t".join(map(str, asdict(lines[file]).values())) for file in sorted(lines)]
    fresh = path.with_suffix(".new")
    fresh.write_text("\n".join(["\t".join(f.name for f in fields(Line)), *rows]) + "\n")
    fresh.replace(path)


def covered(file: str) -> set[str]:
    """The sources that a test file's result stands for."""
    family = Path(file).parent.name in (*registry.FAMILIES, *PRODUCTS)
    return reached([file]) - (reached([TRUNK]) if family else set())


def sources(file: str) -> str:
    """A hash of what a test file covers."""
    digest = hashlib.sha256()
    for each in sorted(covered(file)):
        digest.update(f"{each}\0{code(each)}\0".encode())
    return digest.hexdigest()[:16]


def gpu_files() -> list[str]:
    """Test files with tests marked ``gpu``, by themselves or by a fixture of their folder's conftest."""
    found = set()
    for path in (ROOT / "tests").rglob("conftest.py"):
        marked = re.findall(rf"@pytest\.fixture\([^\n]*{_GPU}[^\n]*\)\s*def (\w+)", code(str(path.relative_to(ROOT))))
        takes = re.compile(rf"def test_\w+\([^)]*\b(?:{'|'.join(marked)})\b") if marked else None
        found |= {test for test in path.parent.rglob("test_*.py") if takes and takes.search(test.read_text())}
    for test in (ROOT / "tests").rglob("test_*.py"):
        if _GPU in test.read_text() and _GPU in code(str(test.relative_to(ROOT))):
            found.add(test)
    return sorted(str(test.relative_to(ROOT)) for test in found)


def stale(lines: dict[str, Line]) -> dict[str, str]:
    """Files of GPU tests that a card has to see, with the reason: those never seen first, then the longest."""
    reasons = {}
    for file in gpu_files():
        line = lines.get(file)
        if line is None:
            reasons[file] = "never ran"
        elif line.failed:
            reasons[file] = f"{line.failed} failed on {line.date}, {line.commit}"
        elif line.sources != sources(file):
            reasons[file] = f"changed since {line.date}, {line.commit}"
    return dict(sorted(reasons.items(), key=lambda each: -lines[each[0]].seconds if each[0] in lines else -1e9))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--gpu-ledger", metavar="FILE", help="write how each file of GPU tests ended into FILE")
    parser.addoption("--commit", help="the commit under test, where .git was left behind")


def pytest_configure(config: pytest.Config) -> None:
    path = config.getoption("--gpu-ledger")
    if path is None or hasattr(config, "workerinput"):
        return
    from cutekernels import environment

    commit = config.getoption("--commit") or environment.commit()
    if not commit:
        raise pytest.UsageError("--gpu-ledger: no commit is known outside a checkout; name it by --commit")
    config.pluginmanager.register(Recorder(Path(path), commit), "gpu-ledger")
    if hasattr(config.option, "maxschedchunk"):  # xdist's
        config.option.maxschedchunk = config.option.maxschedchunk or FEW


@pytest.hookimpl(tryfirst=True)  # before -m and -k take tests away
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Each GPU test's reports say how many its file has; of a file that was named in part, none do."""
    in_part = {arg.partition("::")[0] for arg in config.args if "::" in arg}
    files: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("gpu"):
            files[item.nodeid.partition("::")[0]].append(item)
    for file, marked in files.items():
        wanted = [item for item in marked if not item.get_closest_marker("slow")] or marked
        if file not in in_part and str(ROOT / file) not in in_part and not config.getoption("lf", False):
            for item in wanted:
                item.user_properties.append((EXPECTED, len(wanted)))


@dataclass
class Recorder:
    """In the process that prints: counts how tests end, and writes a file's line when all of its tests have ended."""

    path: Path
    commit: str
    outcomes: dict[str, dict[str, str]] = field(default_factory=lambda: defaultdict(dict))
    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    expected: dict[str, int] = field(default_factory=dict)
    ended: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        file = report.nodeid.partition("::")[0]
        expected = dict(report.user_properties).get(EXPECTED)
        crashed = report.when not in ("setup", "call", "teardown")  # its worker died, and xdist says so
        if expected is None and not crashed:
            return
        if expected is not None:
            self.expected[file] = expected
        says = report.outcome != "passed" or report.when == "call"
        if says and self.outcomes[file].get(report.nodeid) != "failed":
            self.outcomes[file][report.nodeid] = report.outcome
        self.seconds[file] += report.duration
        if crashed or report.when == "teardown":
            self.ended[file].add(report.nodeid)
            if len(self.ended[file]) == self.expected.get(file):
                self.record(file)

    def record(self, file: str) -> None:
        ends = list(self.outcomes[file].values())
        counts = {outcome: ends.count(outcome) for outcome in ("passed", "failed", "skipped")}
        if counts["passed"] or counts["failed"]:  # else no card saw anything
            seconds, date = round(self.seconds[file], 1), datetime.now(UTC).date().isoformat()
            line = Line(file, *counts.values(), seconds, self.commit, card(), date, sources(file))
            write(self.path, read(self.path) | {file: line})


def card() -> str:
    from cutekernels import gpu

    return gpu.detect().name


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser("python -m tests.gpu_ledger", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--files", action="store_true", help="the paths of stale files alone")
    parser.add_argument("--count", action="store_true", help="one line: how many are stale")
    verbs = parser.add_subparsers(dest="verb")
    verbs.add_parser("merge", help="take lines from a card's ledger").add_argument("file", type=Path)
    args = parser.parse_args(argv)
    lines = read(LEDGER)
    if args.verb == "merge":
        came = read(args.file)
        known = gpu_files()
        lines = {file: line for file, line in (lines | came).items() if file in known}
        write(LEDGER, lines)
        print(f"{len(came)} files merged into {LEDGER.name}")
    reasons = stale(lines)
    if args.files:
        print(*reasons, sep="\n")
        return
    print(f"GPU tests stale: {len(reasons)} of {len(gpu_files())} files")
    for file, reason in () if args.count else reasons.items():
        print(f"{lines[file].seconds if file in lines else 0:7.0f} s  {file}: {reason}")


if __name__ == "__main__":
    sys.exit(main())
