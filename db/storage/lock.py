"""Lock files: what calls use, frozen and hashed, so that many processes choose alike. Standard library only.

A lock holds the winners that serve on each GPU, those that travel with the package included, and calibrated rates.
Its first line says how many lines follow and their SHA-256; each of them is a row::

    {"cutekernels_lock": 1, "rows": 1, "sha256": "9f2c..."}
    ["winner", "h200", "gemm", 12, "m=16 n=4096 k=4096", "tile_m=64 ...", "measured", 11.2, 1.4, ""]

Where ``CUTEKERNELS_DB`` names one, nothing else is read, and one that is not whole raises: no default slips in.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cutekernels.errors import StoreError

SUFFIX = ".lock"  # of a file that is one
_VERSION = 1
_MOST_BYTES = 1 << 28
_BEYOND = 1 << 53  # every number of a row; NaN is no less
_KINDS: dict[str, tuple[tuple[type, ...], ...]] = {
    # gpu, op, revision, problem, config, origin, median_us, ratio, reason
    "winner": (
        (str,), (str,), (int,), (str,), (str,), (str,), (float, int, type(None)), (float, int, type(None)), (str,),
    ),
    "rate": ((str,), (str,), (int,), (float,)),  # gpu, name, revision, value
}  # fmt: skip
_AGAIN = "write it again with `cutekernels lock`, or copy it from where it is whole"


@dataclass(frozen=True)
class Lock:
    """A lock file's rows, of which each begins with its kind, and the hash of them all."""

    digest: str
    rows: tuple[tuple[Any, ...], ...]

    def of(self, kind: str, gpu: str) -> list[tuple[Any, ...]]:
        """The rows of one kind for one GPU, without these two."""
        return [row[2:] for row in self.rows if row[:2] == (kind, gpu)]


def is_one(place: str) -> bool:
    """Whether a path or URL of a database names a lock file."""
    return place.endswith(SUFFIX)


def path_of(url: str) -> Path:
    """The file behind the URL of a lock. Raises StoreError for a URL of a server."""
    _, _, path = url.partition("sqlite:///")
    if not path:
        raise StoreError(f"a lock is a file whose name ends with {SUFFIX}: give a path to one")
    return Path(path)


def text(rows: Iterable[tuple[Any, ...]]) -> str:
    """A lock file's contents."""
    lines = [json.dumps(row, allow_nan=False, separators=(",", ":")) for row in sorted(rows, key=lambda row: row[:5])]
    body = "".join(f"{line}\n" for line in lines)
    head = {"cutekernels_lock": _VERSION, "rows": len(lines), "sha256": hashlib.sha256(body.encode()).hexdigest()}
    return f"{json.dumps(head)}\n{body}"


def read(path: Path) -> Lock:
    """The lock at ``path``.

    Raises:
        StoreError: there is none, or it is not as it was written.
    """
    try:
        if path.exists() and not path.is_file():  # a pipe would be waited for
            raise StoreError(f"lock {path} is not a file; {_AGAIN}")
        with path.open("rb") as file:
            head, body = file.readline(4096), file.read(_MOST_BYTES)
    except OSError as error:
        raise StoreError(f"lock {path}: {error.strerror}; {_AGAIN}") from error
    try:
        told = json.loads(head)
        version, count, digest = told["cutekernels_lock"], told["rows"], told["sha256"]
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise StoreError(f"{path} is not a lock file: its first line says nothing of one; {_AGAIN}") from error
    if version != _VERSION:
        raise StoreError(f"lock {path} is of version {version!r:.20}, this cutekernels reads {_VERSION}; {_AGAIN}")
    if hashlib.sha256(body).hexdigest() != digest:
        raise StoreError(
            f"lock {path} is not as it was written: its rows have another hash than its head says; {_AGAIN}"
        )
    try:
        rows = tuple(_row(json.loads(line)) for line in body.decode().splitlines())
        if len(rows) != count:
            raise ValueError(f"{len(rows)} rows in place of {count!r:.20}")
    except (ValueError, RecursionError) as error:
        raise StoreError(f"lock {path}: {error}; {_AGAIN}") from error
    return Lock(digest, rows)


def _row(values: Any) -> tuple[Any, ...]:
    kinds = _KINDS.get(values[0]) if isinstance(values, list) and values and isinstance(values[0], str) else None
    if (
        kinds is None
        or len(values) != 1 + len(kinds)
        or any(type(v) not in k for v, k in zip(values[1:], kinds, strict=True))
        or not all(0 <= v < _BEYOND for v in values[1:] if isinstance(v, int | float))
    ):
        raise ValueError(f"{values!r:.80} is not a row of a lock")
    return tuple(values)
