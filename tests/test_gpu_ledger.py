"""The ledger of GPU tests: what makes a line, and what makes it stale. No card: its name is a toy's."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import gpu_ledger, imports

GPU = "pytest.mark.{}".format("gpu")  # in pieces: this file has no GPU tests
COMMANDS = {
    "tests/norms/test_all.py": f"import pytest\npytestmark = {GPU}\n"
    "@pytest.mark.parametrize('n', range(3))\ndef test_n(n): assert n < 3\ndef test_skips(): pytest.skip('no')\n",
    "tests/norms/test_fails.py": f"import pytest\n@{GPU}\ndef test_wrong(): assert False\n"
    f"@{GPU}\ndef test_right(): pass\n@{GPU}\n@pytest.mark.slow\ndef test_slow(): assert False\n",
    "tests/norms/test_cpu.py": "def test_cpu(): pass\n",
    "tests/norms/test_skips.py": f"import pytest\n@{GPU}\ndef test_skips(): pytest.skip('two GPUs')\n",
    "tests/norms/test_judge.py": f"import pytest\n@{GPU}\n@pytest.mark.slow\ndef test_slow(): pass\n",
}
TREE = {
    "cutekernels/__init__.py": "",
    "cutekernels/__init__.pyi": "from cutekernels.ops.norms.api import rms_norm as rms_norm\n",
    "cutekernels/dispatch.py": "from cutekernels import settings\n",
    "cutekernels/settings.py": "SPEED = 1\n",
    "cutekernels/ops/norms/api.py": "from cutekernels import dispatch\nBODY = 'cutekernels.kernels.norm:Body'\n",
    "cutekernels/ops/rope/__init__.py": "",
    "cutekernels/kernels/norm.py": "def kernel():\n    return 1  # one\n",
    "tests/norms/cases.py": "CASES = 3\n",
    "tests/norms/conftest.py": f"import pytest\n@pytest.fixture(params=['a', pytest.param('b', marks={GPU})])\n"
    "def device(request): return request.param\n",
    "tests/norms/test_gpu.py": "import cutekernels as ck\nimport pytest\nfrom tests.norms.cases import CASES\n"
    f"@{GPU}\ndef test_it(): ck.rms_norm\n",
    "tests/norms/test_device.py": "def test_it(device): pass\n",
    "tests/norms/test_text.py": f"def test_it(monkeypatch): pass  # {GPU}\n",
    "tests/tuner/test_gpu.py": f"from cutekernels import dispatch\nimport pytest\n@{GPU}\ndef test_it(): 'rope'\n",
}
NORMS, TUNER = "tests/norms/test_gpu.py", "tests/tuner/test_gpu.py"


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A checkout of a few files."""
    monkeypatch.setattr(gpu_ledger, "ROOT", tmp_path)
    monkeypatch.setattr(gpu_ledger, "LEDGER", tmp_path / "ledger.tsv")
    monkeypatch.setattr(gpu_ledger, "card", lambda: "toy")
    plant(tmp_path, TREE)
    with imports.tree_at(tmp_path):
        yield tmp_path


def plant(root: Path, files: dict[str, str]) -> None:
    for file, text in files.items():
        (root / file).parent.mkdir(parents=True, exist_ok=True)
        (root / file).write_text(text)


def line(file: str, **values: object) -> gpu_ledger.Line:
    return gpu_ledger.Line(**{
        **dict.fromkeys(("passed", "failed", "skipped"), 0), "seconds": 1.0, "commit": "abc", "card": "toy",
        "date": "2026-11-28", "file": file, "sources": gpu_ledger.sources(file) if file in TREE else "", **values,
    })  # fmt: skip


def test_what_a_file_covers_is_found(tree: Path) -> None:
    assert gpu_ledger.gpu_files() == ["tests/norms/test_device.py", NORMS, TUNER]
    assert gpu_ledger.covered(NORMS) == {
        NORMS, "tests/norms/cases.py", "cutekernels/__init__.py", "cutekernels/ops/norms/api.py",
        "cutekernels/kernels/norm.py",
    }  # fmt: skip
    assert gpu_ledger.covered(TUNER) >= {"cutekernels/settings.py", "cutekernels/ops/rope/__init__.py"}


@pytest.mark.parametrize(
    ("file", "text", "stale"),
    [
        ("cutekernels/kernels/norm.py", "def kernel():\n    return 2  # one\n", [NORMS]),
        ("cutekernels/kernels/norm.py", '"""Says."""\n\n\ndef kernel():\n    """One."""\n    return 1\n', []),
        ("cutekernels/kernels/norm.py", "def kernel():\n    return '# one'\n", [NORMS]),
        ("tests/norms/cases.py", "CASES = 4\n", [NORMS]),
        ("cutekernels/settings.py", "SPEED = 2\n", [TUNER]),
        ("cutekernels/ops/rope/__init__.py", "OPS = ()\n", [TUNER]),
    ],
)
def test_stale_once_code_that_it_covers_changes(tree: Path, file: str, text: str, stale: list[str]) -> None:
    lines = {test: line(test, passed=1) for test in gpu_ledger.gpu_files()}
    assert not gpu_ledger.stale(lines)
    plant(tree, {file: text})
    with imports.tree_at(tree):
        assert list(gpu_ledger.stale(lines)) == stale


def test_the_stale_are_listed_longest_first_and_by_path(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    came = tree / "came.tsv"
    lines = [line(NORMS, failed=2, seconds=3.0), line(TUNER, sources="other", seconds=70.5), line("tests/test_gone.py")]
    gpu_ledger.write(gpu_ledger.LEDGER, {"tests/norms/test_device.py": line("tests/norms/test_device.py", passed=1)})
    gpu_ledger.write(came, {each.file: each for each in lines})
    gpu_ledger.main(["merge", str(came)])
    said = capsys.readouterr().out.splitlines()
    assert said[1:] == [
        "GPU tests stale: 2 of 3 files",
        f"     70 s  {TUNER}: changed since 2026-11-28, abc",
        f"      3 s  {NORMS}: 2 failed on 2026-11-28, abc",
    ]
    gpu_ledger.main(["--files"])
    assert capsys.readouterr().out.split() == [TUNER, NORMS]
    gpu_ledger.main(["--count"])
    assert capsys.readouterr().out == "GPU tests stale: 2 of 3 files\n"
    gpu_ledger.LEDGER.unlink()
    gpu_ledger.main(["--count"])
    assert capsys.readouterr().out == "GPU tests stale: 3 of 3 files\n"


def run(root: Path, *options: str) -> dict[str, gpu_ledger.Line]:
    """The ledger after pytest ran, in this process, over ``COMMANDS``."""
    ledger = root / "out.tsv"
    fixed = [
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "tests.gpu_ledger",
        "--gpu-ledger",
        str(ledger),
        "--rootdir",
        str(root),
    ]
    pytest.main([*fixed, "-c", str(root / "pytest.ini"), "--commit", "abc", "--import-mode=importlib", *options])
    return gpu_ledger.read(ledger)


@pytest.fixture
def suite(tree: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    plant(tree, COMMANDS | {"pytest.ini": "[pytest]\nmarkers =\n gpu\n slow\n"})
    for file in [
        *tree.rglob("conftest.py"),
        *(tree / "tests/tuner").iterdir(),
        *(tree / "tests/norms").glob("test_[dgt]*"),
    ]:
        file.unlink()
    monkeypatch.chdir(tree)
    return tree


def test_a_line_for_each_file_whose_tests_all_ran(suite: Path) -> None:
    lines = run(suite, "-m", "gpu and not slow", "tests")
    assert {file: counts(each) for file, each in lines.items()} == {
        "tests/norms/test_all.py": (3, 0, 1),
        "tests/norms/test_fails.py": (1, 1, 0),
    }
    assert {(each.commit, each.card) for each in lines.values()} == {("abc", "toy")}
    assert "tests/norms/test_all.py" not in gpu_ledger.stale(lines)
    assert set(run(suite, "-m", "gpu", "tests/norms/test_judge.py")) == {*lines, "tests/norms/test_judge.py"}


def test_workers_report_and_one_that_dies_costs_one_file(suite: Path) -> None:
    dies = f"import os, pytest\npytestmark = {GPU}\ndef test_right(): pass\ndef test_dies(): os._exit(1)\n"
    plant(suite, {"tests/norms/test_dies.py": dies})
    lines = run(suite, "-n", "1", "-m", "gpu and not slow", "tests/norms/test_dies.py", "tests/norms/test_all.py")
    assert counts(lines["tests/norms/test_all.py"]) == (3, 0, 1)
    assert counts(lines["tests/norms/test_dies.py"]) == (1, 1, 0)


def test_workers_are_handed_few_tests_at_a_time(suite: Path) -> None:
    """Slow tests of the first file are divided: its line is there before all of the second have ended."""
    head = f"import time, pathlib, pytest\npytestmark = {GPU}\n@pytest.mark.parametrize('i', range(40))\n"
    head += "def test_one(i):\n"
    known = f"i < 30 or 'test_first.py' in pathlib.Path({str(suite / 'out.tsv')!r}).read_text()"
    plant(
        suite,
        {
            "tests/norms/test_first.py": f"{head}    time.sleep(0.2 if i < 8 else 0)\n",
            "tests/norms/test_second.py": f"{head}    time.sleep(0.005)\n    assert {known}\n",
        },
    )
    lines = run(suite, "-n", "2", "-m", "gpu", "tests/norms/test_first.py", "tests/norms/test_second.py")
    assert [counts(each) for each in lines.values()] == [(40, 0, 0), (40, 0, 0)]


def counts(line: gpu_ledger.Line) -> tuple[int, int, int]:
    return line.passed, line.failed, line.skipped


@pytest.mark.parametrize(
    "options",
    [("-k", "not 2"), ("-x", "tests/norms/test_fails.py"), ("tests/norms/test_all.py::test_n",), ("-m", "not gpu")],
)
def test_a_part_of_a_file_makes_no_line(suite: Path, options: tuple[str, ...]) -> None:
    lines = run(suite, *options)
    assert "tests/norms/test_all.py" not in lines
    assert "tests/norms/test_fails.py" not in lines or options[0] == "-k"
    assert not re.search("test_cpu|test_skips", " ".join(lines))


def test_a_commit_is_needed(suite: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cutekernels.environment.commit", lambda: "")
    assert run(suite, "--commit", "") == {}
    assert "name it by --commit" in capsys.readouterr().err
