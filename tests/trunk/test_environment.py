"""Versions are read without importing the packages."""

from __future__ import annotations

import subprocess
import sys
from datetime import datetime
from importlib import metadata
from pathlib import Path

import pytest

from cutekernels import environment
from tests.processes import python

KEYS = {"driver", "cuda", "dsl", "ptxas", "triton", "torch", "python", "commit"}


def test_collect_names_everything_and_is_text() -> None:
    facts = environment.collect()
    assert set(facts) == KEYS
    assert all(type(value) is str for value in facts.values())
    assert facts["torch"] == metadata.version("torch")
    assert facts["triton"] == metadata.version("triton")
    assert facts["dsl"] == metadata.version("nvidia-cutlass-dsl-libs-base")
    assert facts["python"].split(".")[:2] == [str(v) for v in sys.version_info[:2]]
    assert facts["ptxas"].split(".")[0].isdigit(), "Triton's wheel carries a ptxas"


def test_collect_hands_out_copies() -> None:
    environment.collect()["torch"] = "planted"
    assert environment.collect()["torch"] != "planted"


def test_cuda_version_is_torchs_own() -> None:
    import torch

    assert environment.cuda_version() == (torch.version.cuda or "")


def test_nothing_heavy_is_imported() -> None:
    code = (
        "import sys; from cutekernels import environment; environment.collect(); "
        "print([m for m in ('torch', 'triton', 'cutlass', 'sqlalchemy') if m in sys.modules])"
    )
    done = python(code)
    assert done.stdout.strip() == "[]"


def test_absent_things_are_empty(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert environment.package_version("no-such-distribution-at-all") == ""
    monkeypatch.setattr(environment, "_package_root", lambda name: None)
    assert environment.ptxas() is None
    assert environment.ptxas_version() == ""
    assert environment.cuda_version() == ""
    monkeypatch.setattr(environment, "_HERE", tmp_path / "environment.py")
    assert environment.commit() == "", "outside a checkout"


def test_commit_tells_dirty_checkouts_and_ignores_a_strangers_repository(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def git(*words: str) -> str:
        command = ["git", "-C", str(tmp_path), "-c", "user.name=t", "-c", "user.email=t@t", *words]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    source = tmp_path / "environment.py"
    source.write_text("one\n")
    other = tmp_path / "other.py"
    other.write_text("theirs\n")
    git("init", "-q")
    git("add", "other.py")
    git("commit", "-q", "-m", "theirs")
    monkeypatch.setattr(environment, "_HERE", source)
    assert environment.commit() == "", "inside a repository that does not track us"
    git("add", "environment.py")
    git("commit", "-q", "-m", "ours")
    assert environment.commit() == git("rev-parse", "--short=12", "HEAD")
    source.write_text("two\n")
    assert environment.commit().endswith("-dirty")


def test_stamp_adds_gpu_date_and_a_given_commit() -> None:
    stamp = environment.stamp("h200", commit="abc123")
    assert set(stamp) == KEYS | {"date", "gpu"}
    assert (stamp["gpu"], stamp["commit"]) == ("h200", "abc123")
    assert datetime.fromisoformat(stamp["date"]).utcoffset() is not None
    assert environment.stamp("h200")["commit"] == environment.collect()["commit"]


def test_a_package_without_its_metadata_has_no_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "version", lambda name: None)
    assert environment.package_version("torch") == ""
