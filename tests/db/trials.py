"""Invented trials for tests of the database, distinguished by their configs."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

from cutekernels.db.storage.trial import Environment, Gpu, Trial

H200 = Gpu("h200", "sm_90a", 132, 232448, 60 << 20, 141 << 30)
L40S = Gpu("l40s", "sm_89", 142, 101376, 96 << 20, 48 << 30)
BOX = Environment(driver="580.95", cuda="13.0", dsl="4.3", ptxas="13.0", triton="3.6", torch="2.11")


def trial(config: str = "tile_m=128", **changes: Any) -> Trial:
    """A measured, good H200 trial, but for ``changes``."""
    values: dict[str, Any] = {
        "gpu": H200,
        "environment": BOX,
        "op": "gemm",
        "revision": 1,
        "problem": "m=16 n=64 k=32",
        "origin": "measured",
        "status": "ok",
        "median_us": 12.5,
    }
    return Trial.new(config=config, **(values | changes))


def edit(path: Path | str, *statements: str | tuple[str, tuple[Any, ...]]) -> None:
    """Executes statements, some with parameters, past the store."""
    with closing(sqlite3.connect(path)) as connection:
        for each in statements:
            connection.execute(*([each] if isinstance(each, str) else each))
        connection.commit()
