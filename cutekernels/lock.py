"""Locks for many processes: :func:`verify` that all of them read the same one. ``cutekernels lock`` writes it.

Ranks of one job should choose the same configs, or their results differ in last bits and the slowest is waited for. A
lock (``CUTEKERNELS_DB=winners.lock``) is a file of winners that nothing writes to; this module compares its hash.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from cutekernels import settings
from cutekernels.db.storage import snapshot
from cutekernels.db.storage.lock import is_one, path_of, read, text
from cutekernels.errors import StoreError
from cutekernels.gpu import SIBLINGS, lookup

__all__ = ["compare", "digest", "verify", "write"]


def digest() -> str:
    """The SHA-256 of the lock that this process reads, as its file has it now.

    Raises:
        StoreError: the settings name no lock, it is not whole, or it changed after calls had read it.
    """
    url = settings.load().database_url
    if not is_one(url):
        raise StoreError(f"{settings.DB_VARIABLE} names no lock: write one with `cutekernels lock` and name it there")
    found = read(path_of(url)).digest
    for gpu, held in snapshot.all_held().items():
        if held.digest != found:
            raise StoreError(
                f"the lock changed after calls on {gpu} had read it ({held.digest[:12]}, now {found[:12]}): "
                "call cutekernels.reload()"
            )
    return found


def verify(group: Any = None) -> str:
    """Raise on every rank unless all ranks of a process group read the same lock with the same package.

    A collective: call it on all ranks, once, after ``torch.distributed`` is initialized. No op calls it.

    Args:
        group: a process group; None for the default one. Without ``torch.distributed`` this process alone is checked.

    Returns:
        The lock's SHA-256.

    Raises:
        StoreError: a rank has another lock or another version of this package, or one that is missing or not whole;
            the message names the ranks.
    """
    import torch.distributed as dist

    import cutekernels

    try:
        mine, error = digest(), ""
    except StoreError as failed:  # told to the others, which would wait for this rank
        mine, error = "", str(failed)
    if not (dist.is_available() and dist.is_initialized()):
        if error:
            raise StoreError(error)
        return mine
    told: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(told, (mine, cutekernels.__version__, error), group=group)
    broken = [f"rank {rank}: {why}" for rank, (_, _, why) in enumerate(told) if why]
    if broken:
        raise StoreError("; ".join(broken[:3]) + (f"; and {len(broken) - 3} more" if len(broken) > 3 else ""))
    if len({one[:2] for one in told}) > 1:
        by: dict[str, list[int]] = {}
        for rank, (lock, version, _) in enumerate(told):
            by.setdefault(f"lock {lock[:12]} with cutekernels {version}", []).append(rank)
        each = "; ".join(f"{what} on ranks {', '.join(map(str, ranks[:8]))}" for what, ranks in by.items())
        raise StoreError(f"ranks read different winners: {each}. Give all of them one lock and one version")
    return mine


def write(
    target: str | os.PathLike[str], gpus: Iterable[str], database: str | os.PathLike[str] | None = None
) -> tuple[str, int]:
    """Freeze what calls on ``gpus`` use, their siblings' winners too, into the file ``target``; its hash, and how many
    rows it has.
    """
    from cutekernels.db.storage.engine import file_errors, url_of
    from cutekernels.db.storage.store import replace_file

    target = os.fspath(target) if isinstance(target, os.PathLike) else target
    if not isinstance(target, str) or not is_one(target):
        raise StoreError(f"a lock's name ends with .lock; {target!r} does not")
    if isinstance(gpus, str):
        raise StoreError(f"gpus is a list of GPUs' names; got {gpus!r:.60}: pass [{gpus!r:.60}]")
    database = os.fspath(database) if isinstance(database, os.PathLike) else database
    rows = _rows(dict.fromkeys(name for own in gpus for name in (own, SIBLINGS.get(own, own))), database)
    path = path_of(url_of(target))
    with file_errors(target):
        replace_file(path, text(rows))
    return read(path).digest, len(rows)


def compare(file: str, database: str | None = None) -> list[dict[str, Any]]:
    """Differences of a lock from what would be frozen now, from a database and the shipped winners: rows of its GPUs
    that are in one alone, and those with other values, of which the config is the first. Times and ratios are compared
    by their first four digits: shipped winners have no more.
    """
    frozen, now = ({row[:5] if row[0] == "winner" else row[:4]: row for row in rows} for rows in _both(file, database))
    found = []
    for key in sorted(frozen.keys() | now.keys(), key=str):
        mine, other = (tuple(map(_told, rows[key][len(key) :])) if key in rows else None for rows in (frozen, now))
        if mine != other:
            state = "only in the lock" if other is None else "only in the database" if mine is None else "other values"
            told = dict(zip(("kind", "gpu", "op", "revision", "problem_text"), (*key, ""), strict=False))
            found.append(told | {"state": state, "lock": " ".join(mine or ()), "database": " ".join(other or ())})
    return found


def _told(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _both(file: str, database: str | None) -> tuple[Sequence[tuple[Any, ...]], Sequence[tuple[Any, ...]]]:
    frozen = read(Path(file)).rows
    return frozen, _rows(dict.fromkeys(row[1] for row in frozen), database)


def _rows(gpus: Iterable[str], database: str | None) -> list[tuple[Any, ...]]:
    """Rows of a lock: the winners and rates that calls on ``gpus`` use."""
    from cutekernels.ops import registry

    rows: list[tuple[Any, ...]] = []
    for gpu in gpus:
        known = snapshot.load(gpu, database, strict=True)
        if not known.table:  # none of a GPU of the table is no mistake
            lookup(gpu)
        for name in dict.fromkeys(op for op, _ in known.table):
            op = registry.find(name)
            revisions = op.revisions if op else ()
            tables = [known.of(name, revisions)]  # of a problem's rows under several revisions, the one that serves
            tables += [table for (of, r), table in known.table.items() if of == name and r not in revisions]
            rows += [("winner", gpu, *w[:-1]) for table in tables for w in table.values()]
        rows += [("rate", gpu, name, revision, value) for (name, revision), value in known.rates.items()]
    return rows
