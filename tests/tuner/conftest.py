"""Fixtures of the tuner's tests: a database, and a machine with an H200 or without a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cutekernels import gpu as gpus
from cutekernels.errors import UnknownGpu


@pytest.fixture
def db(tmp_path: Path) -> str:
    return str(tmp_path / "t.db")


@pytest.fixture
def store(db: str) -> Iterator[Any]:
    from cutekernels.db.storage.store import Store

    with Store(db) as one:
        yield one


@pytest.fixture
def on_h200(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = gpus.lookup("h200")
    monkeypatch.setattr(gpus, "detect", lambda device=None: spec)


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def detect(device: int | None = None) -> Any:
        raise UnknownGpu("no CUDA device is visible")

    monkeypatch.setattr(gpus, "detect", detect)
