"""Files of 0.2.0, as ``python -m tests.upgrade --keep tests/db/0.2.0.tar.xz`` packed it, under today's code."""

from __future__ import annotations

import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import cutekernels
from cutekernels.ops import registry
from tests import upgrade


@pytest.fixture
def left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a database, studies and a lock."""
    with tarfile.open(Path(__file__).with_name("0.2.0.tar.xz")) as packed:
        packed.extractall(tmp_path, filter="data")
    monkeypatch.setenv("CUTEKERNELS_DB", str(tmp_path / upgrade.DATABASE))
    return tmp_path


def test_its_winners_serve(left: Path) -> None:
    said = upgrade.check_winners(left, upgrade.opened(left))
    assert said == "31 rows and 7 winners are there; 5 serve, as before"


def test_its_lock_is_whole_and_serves(left: Path) -> None:
    assert upgrade.check_lock(left, upgrade.opened(left)).startswith("whole; 5 of its winners serve, as before")


def test_its_killed_job_goes_on(left: Path) -> None:
    """No task of the three begun is spared: their kernels are others now."""
    said = upgrade.check_job(left, upgrade.opened(left))
    assert said == "5 tasks done; of 3 begun 0 go on and 3, of other sources, anew"


@pytest.mark.parametrize("check", [upgrade.check_winners, upgrade.check_lock])
def test_a_revision_without_its_translation_is_caught(
    check: Callable[[Path, dict[str, Any]], str], left: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(registry.get("gemm")), "earlier", {})
    with pytest.raises(AssertionError, match="op +gemm"):
        check(left, upgrade.opened(left))
    cutekernels.reload()


def test_lost_rows_are_caught(left: Path) -> None:
    made = upgrade.opened(left)
    made["trials"].append(made["trials"][0][:-1] + "0")
    with pytest.raises(AssertionError, match="rows are lost"):
        upgrade.check_winners(left, made)
