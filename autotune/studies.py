"""Where studies are stored: Optuna's own storage, one study for each task, which optuna-dashboard opens.

Beside an SQLite database it is a journal, ``<database>.studies``; in PostgreSQL the schema ``cutekernels_studies``.
The rows of the database are the truth: a study with a trial without a row is deleted, and one that lacks a row's trial
gets it. So the journal is never synced to the disk, may be removed, and begins anew where it has grown large.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import optuna
from filelock import FileLock
from optuna.distributions import distribution_to_json
from optuna.storages import BaseStorage, InMemoryStorage, JournalStorage, RDBStorage
from optuna.storages.journal import BaseJournalBackend, JournalFileBackend

from cutekernels import settings
from cutekernels.autotune.history import TaskHistory
from cutekernels.autotune.space import Space
from cutekernels.autotune.study import Attempt, abandon, add
from cutekernels.db.storage import engine, sqlite
from cutekernels.db.storage.store import Trial
from cutekernels.errors import StoreError, StoreUnreachable

SUFFIX, SCHEMA = ".studies", "cutekernels_studies"
MOST_BYTES = 16 << 20  # of a journal, which every run reads whole: about 2 s


def attempt_of(trial: Trial) -> Attempt:
    """A row as a study takes it."""
    value = 1 / trial.ratio if trial.status == "ok" and trial.ratio else None
    return Attempt(value, trial.status, trial.id)


def place(url: str) -> str:
    """The argument of ``optuna-dashboard`` for the database at ``url``: a file, or a URL with its password."""
    path = sqlite.path_of(url)
    return _with_schema(url) if path is None else f"{path}{SUFFIX}"


class Studies:
    """The studies of the database at ``url``; None: in memory. Shared by the lanes of a run."""

    def __init__(self, url: str | None = None) -> None:
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._file: BinaryIO | None = None
        path = None if url is None else sqlite.path_of(url)
        if url is None:
            self.storage: BaseStorage = InMemoryStorage()
        elif path is None:
            self.storage = _relational(url)
        else:
            self.storage = self._journal(path)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
        if isinstance(self.storage, RDBStorage):
            self.storage.remove_session()
            self.storage.engine.dispose()

    def study(self, history: TaskHistory, space: Space, rows: Iterable[Trial]) -> optuna.Study:
        """The study of one task, whose finished trials are ``rows``; no trial of it is waiting or running."""
        with translated():
            return self._study(history.name, space, list(rows), history)

    def _study(self, name: str, space: Space, rows: list[Trial], history: TaskHistory) -> optuna.Study:
        described = json.dumps({n: distribution_to_json(d) for n, d in space.distributions.items()})
        digest = hashlib.sha256(described.encode()).hexdigest()[:16]
        study = optuna.create_study(storage=self.storage, study_name=name, load_if_exists=True)
        have = {t.user_attrs["row"] for t in study.get_trials(deepcopy=False) if "row" in t.user_attrs}
        if study.user_attrs.get("space", digest) != digest or have - {row.id for row in rows}:
            optuna.delete_study(study_name=name, storage=self.storage)
            study, have = optuna.create_study(storage=self.storage, study_name=name), set()
        if "space" not in study.user_attrs:
            study.set_user_attr("space", digest)
        abandon(study)
        for row in rows:
            if row.id not in have:
                add(study, space, history.config_of(row), attempt_of(row))
        return study

    def _journal(self, database: Path) -> BaseStorage:
        path = Path(f"{database}{SUFFIX}")
        with engine.file_errors(str(path)):
            self._file = file = path.open("ab")
            alone = _lock_file(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if alone and os.fstat(file.fileno()).st_size > MOST_BYTES:
                file.truncate(0)
            _lock_file(file, fcntl.LOCK_SH)  # as long as this run lives
        try:
            return JournalStorage(_Journal(path, database))
        except Exception as error:  # noqa: BLE001  whatever Optuna raises for a file that it cannot read
            settings.logger("autotune").warning("%s cannot be read (%r); it begins anew", path, error)
            if not alone:
                return InMemoryStorage()
            file.truncate(0)
            return JournalStorage(_Journal(path, database))


@contextmanager
def translated() -> Iterator[None]:
    """Turn an error of Optuna's storage into a StoreError."""
    try:
        yield
    except optuna.exceptions.StorageInternalError as error:
        cause = error.__cause__ or error
        kind = StoreUnreachable if engine.is_away(cause) else StoreError
        raise kind(f"the study cannot be stored: {str(cause).splitlines()[0]}") from error


class _Journal(BaseJournalBackend):
    """Optuna's journal file for writers that may be killed: what one of them left of a line is cut off."""

    def __init__(self, path: Path, database: Path) -> None:
        self._path, self._lock = path, FileLock(f"{database}.lock")
        self._reader = JournalFileBackend(str(path))

    def read_logs(self, log_number_from: int) -> Iterator[dict[str, Any]]:
        return self._reader.read_logs(log_number_from)

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        lines = "".join(json.dumps(log, separators=(",", ":")) + "\n" for log in logs).encode()
        with engine.file_errors(str(self._path)), self._lock, self._path.open("r+b") as file:
            if file.seek(0, os.SEEK_END):
                file.seek(-1, os.SEEK_END)
                if file.read() != b"\n":
                    file.seek(0)
                    file.truncate(file.read().rfind(b"\n") + 1)
                    file.seek(0, os.SEEK_END)
            file.write(lines)


def _lock_file(file: BinaryIO, kind: int) -> bool:
    try:
        fcntl.flock(file, kind)
    except BlockingIOError:
        return False
    return True


def _with_schema(url: str) -> str:
    parsed = engine.postgres_url(url)
    options = f"{parsed.query.get('options', '')} -csearch_path={SCHEMA}".strip()
    return engine.in_utf8(parsed.update_query_dict({"options": options})).render_as_string(hide_password=False)


def _relational(url: str) -> BaseStorage:
    """The schema and Optuna's tables, made by one process at a time."""
    with engine.making_schema(url, SCHEMA):
        return RDBStorage(_with_schema(url), {"pool_pre_ping": True})  # the server may have restarted
