"""Job files: TOML that lists what to tune, read into a tuple of :class:`Task`.

::

    name = "llama-3-8b"          # required; the name in reports
    trials = 40                  # attempts per task, the default config included; default 40
    budget_s = 900               # seconds for the whole job; default none

    [[tasks]]
    op = "gemm"                  # a name of the ops' registry
    problems = ["m=4096 n=4096 k=4096", "m=16 n=11008 k=4096 dtype=fp16"]

    [[tasks]]
    op = "gemm"
    trials = 20                  # overrides the job's
    [tasks.grid]                 # every combination of the values below
    m = [1, 16, 256, 2048]
    "n k" = [[4096, 4096], [14336, 4096]]      # fields that vary together
    b_major = "k"                # a single value needs no brackets

A task is an op and a *bucketed* problem: problems that share a bucket are one task, and the first one's ``trials``
counts. The file is untrusted input: unknown keys, wrong types, and fields or values that the op does not declare raise
a :class:`~cutekernels.errors.JobError` that names file, key, value and remedy. This module reads and checks;
nothing is tuned here.
"""

from __future__ import annotations

import errno
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from importlib import resources
from itertools import product
from pathlib import Path
from typing import Any

from cutekernels.errors import JobError, UnsupportedProblem, near
from cutekernels.op import Op, Problem

DEFAULT_TRIALS = 40
MOST_TASKS = 10_000
MOST_WRITTEN = 3 * MOST_TASKS  # some may be the same
_DEEPEST = 16  # levels of tables and lists
MOST_TRIALS = 1_000_000
_LONGEST = 400  # characters of a message, and of a job's name
MOST_SECONDS = 366 * 86400.0
_JOB_KEYS = ("name", "trials", "budget_s", "tasks")
_TASK_KEYS = ("op", "trials", "problems", "grid")

FindOp = Callable[[str], Op[Any, Any]]


@dataclass(frozen=True)
class Task:
    """One search: the best config of ``op`` for ``problem``, which is its own bucket."""

    op: Op[Any, Any]
    problem: Problem
    trials: int

    def __str__(self) -> str:
        return f"{self.op.name} [{self.problem}]"


@dataclass(frozen=True)
class Job:
    """A checked job file."""

    name: str
    tasks: tuple[Task, ...]
    budget_s: float | None = None
    source: str = ""
    ranked: bool = False  # whether the tasks stand in the order in which to begin them

    def with_trials(self, trials: int) -> Job:
        """The job with so many attempts for each task. Raises JobError for a number that is none."""
        checked = checked_trials(trials, "trials")
        return replace(self, tasks=tuple(replace(task, trials=checked) for task in self.tasks))


def bundled() -> tuple[str, ...]:
    """Names of the job files that come with the package."""
    folder = resources.files("cutekernels.autotune") / "jobs"
    return tuple(sorted(f.name.removesuffix(".toml") for f in folder.iterdir() if f.name.endswith(".toml")))


def bundled_text(name: str) -> str:
    """The text of a job file that comes with the package."""
    return (resources.files("cutekernels.autotune") / "jobs" / f"{name}.toml").read_text(encoding="utf-8")


def load(job: str | Path, *, find: FindOp | None = None) -> Job:
    """The job in a file, or the bundled one of that name (``"demo"``).

    Raises:
        JobError: no such file, or the file breaks a rule.
    """
    path = Path(job)
    try:
        text = path.read_text(encoding="utf-8-sig") if path.is_file() else None
    except UnicodeDecodeError as error:
        raise JobError(f"{_quote(str(path))}: a job file is UTF-8 text; {_quote(error)}") from error
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:  # no file can be called so
            raise JobError(f"{_quote(str(path))}: {error.strerror}; name a job file that can be read") from error
        text = None
    if text is not None:
        return parse(text, str(path), find=find)
    if str(job) in bundled():
        return parse(bundled_text(str(job)), f"{job}.toml (bundled)", find=find)
    names = bundled()
    raise JobError(
        f"{_quote(str(job))} is neither a file nor a bundled job. {near(str(job), names)}Bundled: {', '.join(names)}"
    )


def parse(text: str, source: str, *, find: FindOp | None = None) -> Job:
    """The job that ``text`` describes; errors name ``source``, and ``find`` looks an op up by name."""
    try:
        data = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # Python's limits on digits and nesting, beside TOML's own rules
        raise JobError(f"{source}: not TOML: {error}") from error
    _refuse_endless(data, source)
    _refuse_unknown(data, _JOB_KEYS, source)
    name = data.get("name")
    if not isinstance(name, str) or not name.strip() or len(name) > _LONGEST:
        raise JobError(
            f'{source}: name must be a text of 1 to {_LONGEST} characters, e.g. name = "my-model"; it is {_quote(name)}'
        )
    trials = checked_trials(data.get("trials", DEFAULT_TRIALS), f"{source}: trials")
    budget_s = data.get("budget_s")
    timed = isinstance(budget_s, int | float) and not isinstance(budget_s, bool)
    if budget_s is not None and not (timed and 0 < budget_s < MOST_SECONDS):
        raise JobError(
            f"{source}: budget_s must be a number of seconds above 0, at most a year; it is {_quote(budget_s)}"
        )
    entries = data.get("tasks")
    if not isinstance(entries, list) or not entries or not all(isinstance(entry, dict) for entry in entries):
        raise JobError(f"{source}: tasks must be at least one [[tasks]] table; it is {_quote(entries)}")
    tasks: dict[tuple[str, Problem], Task] = {}
    written = 0
    for number, entry in enumerate(entries, 1):
        for task in _tasks(entry, f"{source}: tasks[{number}]", trials, find or _find_op):
            tasks.setdefault((task.op.name, task.problem), task)
            written += 1
            if written > MOST_WRITTEN:
                raise JobError(
                    f"{source}: a job names at most {MOST_WRITTEN} problems, repeated ones counted; tasks[{number}] "
                    "passes that: split the file"
                )
    if len(tasks) > MOST_TASKS:
        raise JobError(f"{source}: a job has at most {MOST_TASKS} tasks; these are {len(tasks)}: split the file")
    return Job(name, tuple(tasks.values()), None if budget_s is None else float(budget_s), source)


def _find_op(name: str) -> Op[Any, Any]:
    from cutekernels.ops import registry

    return registry.get(name)


def _refuse_endless(data: Mapping[str, Any], source: str) -> None:
    """Refuse what TOML's own rules let through and no message could quote: huge integers, endless nesting."""
    level: list[object] = [data]
    for _ in range(_DEEPEST):
        inner = [v for value in level for v in (value.values() if isinstance(value, dict) else value)]  # type: ignore[attr-defined]
        if any(isinstance(v, int) and not -(2**63) <= v < 2**63 for v in inner):
            raise JobError(f"{source}: an integer has 64 bits at most; one has more")
        level = [v for v in inner if isinstance(v, dict | list)]
        if not level:
            return
    raise JobError(f"{source}: tables and lists nest {_DEEPEST} levels at most: a job needs five")


def _refuse_unknown(table: Mapping[str, Any], keys: tuple[str, ...], where: str) -> None:
    for key in table:
        if key not in keys:
            raise JobError(f"{where}: unknown key {_quote(key)} = {_quote(table[key])}; known: {', '.join(keys)}")


def _cut(error: Exception) -> str:
    """An error's message, of which a hostile file may make thousands of characters."""
    text = str(error)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def _quote(value: object) -> str:
    """``value`` for a message: shortened, and named where it is too long or too deep for ``repr``."""
    try:
        text = repr(value)
    except (ValueError, RecursionError) as error:
        return f"a value that cannot be shown ({error})"
    return text if len(text) <= 120 else f"{text[:100]}... ({len(text)} characters)"


def is_empty(problem: Problem) -> bool:
    """Whether an extent is 0, so that there is nothing to tune."""
    return any(getattr(problem, f.name) == 0 != f.default for f in fields(problem) if "bucket" in f.metadata)


def checked_trials(value: object, where: str) -> int:
    """``value``, if it is a number of attempts; the JobError otherwise names ``where``."""
    if type(value) is not int or not 1 <= value <= MOST_TRIALS:
        raise JobError(f"{where} must be a whole number from 1 up to {MOST_TRIALS}; it is {_quote(value)}")
    return value


def _tasks(entry: Mapping[str, Any], where: str, trials: int, find: FindOp) -> Iterable[Task]:
    _refuse_unknown(entry, _TASK_KEYS, where)
    if not isinstance(entry.get("op"), str):
        raise JobError(f'{where}.op must name an op, e.g. op = "gemm"; it is {_quote(entry.get("op"))}')
    try:
        op = find(entry["op"])
    except UnsupportedProblem as error:
        raise JobError(f"{where}.op = {_quote(entry['op'])}: {_cut(error)}") from error
    trials = checked_trials(entry.get("trials", trials), f"{where}.trials")
    texts = list(_problem_texts(entry, where, op.Problem.extent_names()))
    if not texts:
        raise JobError(f'{where} holds no problem: give problems = ["{op.suite[0]}"] or a [tasks.grid]')
    for key, text in texts:
        try:
            problem = op.Problem.parse(text)
        except UnsupportedProblem as error:
            raise JobError(f"{where}.{key}: {_quote(text)} is no problem of {op.name}: {_cut(error)}") from error
        if is_empty(problem):
            raise JobError(f"{where}.{key}: {_quote(text)} has an empty extent, so there is nothing to tune: remove it")
        yield Task(op, problem.bucket(), trials)


def _problem_texts(entry: Mapping[str, Any], where: str, extents: Sequence[str]) -> Iterable[tuple[str, str]]:
    problems = entry.get("problems", [])
    if not isinstance(problems, list) or not all(isinstance(text, str) for text in problems):
        raise JobError(
            f'{where}.problems must be a list of texts such as "m=16 n=4096 k=4096"; it is {_quote(problems)}'
        )
    yield from ((f"problems[{number}]", text) for number, text in enumerate(problems, 1))
    grid = entry.get("grid")
    if grid is None:
        return
    if not isinstance(grid, dict) or not grid:
        raise JobError(f"{where}.grid must be a table of field = [values]; it is {_quote(grid)}")
    axes = [_axis(key, value, f"{where}.grid", extents) for key, value in grid.items()]
    size = 1
    for axis in axes:
        size *= len(axis)
    if size > MOST_TASKS:
        raise JobError(f"{where}.grid spans {size} problems; at most {MOST_TASKS}: shorten its lists")
    yield from (("grid", " ".join(words)) for words in product(*axes))


def _axis(key: str, value: object, where: str, extents: Sequence[str]) -> list[str]:
    """The texts of one grid axis: ``m`` with [1, 16] -> ["m=1", "m=16"]; ``"n k"`` with [[2, 3]] -> ["n=2 k=3"]."""
    fields = key.split()
    values = value if isinstance(value, list) else [value]
    if not fields or not values:
        raise JobError(f"{where}.{_quote(key)} must be a value or a non-empty list of values; it is {_quote(value)}")
    texts = []
    for entry in values:
        row = entry if len(fields) > 1 else [entry]
        if not isinstance(row, list) or len(row) != len(fields) or not all(isinstance(v, int | str) for v in row):
            wanted = f"a list of {len(fields)} values, one per field" if len(fields) > 1 else "a whole number or a text"
            raise JobError(f"{where}.{_quote(key)}: each value must be {wanted}; one is {_quote(entry)}")
        for field, v in zip(fields, row, strict=True):
            if isinstance(v, bool) and field in extents:
                raise JobError(f"{where}.{_quote(key)}: {field} is an extent, a whole number; one is {_quote(v)}")
        try:
            words = [f"{f}={int(v) if isinstance(v, bool) else v}" for f, v in zip(fields, row, strict=True)]
        except ValueError as error:
            raise JobError(f"{where}.{_quote(key)}: {_cut(error)}") from error
        texts.append(" ".join(words))
    return texts
