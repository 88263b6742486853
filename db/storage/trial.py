"""Trial: one attempt at one problem with one config on one GPU, with its rules and its text form.

A trial is validated when it is made, whatever its source: the tuner, a row of a database, a line of an untrusted
export. Problems and configs are text to this package; only their length and characters are checked.

As text a trial is one JSON object on one line, complete in itself, fields that are None left out::

    {"id": "019ab...", "created_at": "2026-11-21T02:20:00+00:00", "gpu": {"name": "h200", ...},
     "environment": {"driver": "580.95", ...}, "op": "gemm", "revision": 1, "problem": "m=4096 n=4096 k=4096",
     "config": "tile_m=128 ...", "origin": "measured", "status": "ok", "median_us": 212.3, ...}

Lines are read with ``json`` alone: nothing is evaluated or unpickled, unknown and repeated fields are refused.
"""

from __future__ import annotations

import json
import math
import os
import platform
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from datetime import UTC, datetime, timedelta
from importlib import metadata
from reprlib import repr as short_repr
from typing import Any, NoReturn, Self

from cutekernels.db.storage.certificate import Certificate
from cutekernels.db.storage.uuid7 import is_uuid7, uuid7
from cutekernels.errors import StoreError

PROVENANCE = ("version", "commit", "host")  # fields of Environment that older trials lack
ORIGINS = ("measured", "predicted")
STATUSES = ("ok", "invalid", "compile_error", "wrong_result", "crashed", "timeout", "pruned")

INT32_MAX = 2**31 - 1
INT64_MAX = 2**63 - 1
TEXT_LIMIT = 1000  # of a problem or a config; PostgreSQL's indexes take up to 2,700 bytes
MESSAGE_LIMIT = 4000
CLOCK_SKEW = timedelta(days=1)  # of the clocks of two machines
LINE_LIMIT = 64 * 1024

Rule = Callable[[object], str | None]


# ---- rules: None for a valid value, else a description of valid ones ----------------------------------------


def text(pattern: str, meaning: str) -> Rule:
    compiled = re.compile(pattern)
    return lambda v: None if type(v) is str and compiled.fullmatch(v) else meaning


def _one_of(values: tuple[str, ...]) -> Rule:
    return lambda v: None if type(v) is str and v in values else f"one of {', '.join(values)}"


def _whole(low: int, high: int, *, optional: bool = False) -> Rule:
    meaning = f"a whole number from {low} to {high}" + (", or absent" if optional else "")
    return lambda v: None if (optional and v is None) or (type(v) is int and low <= v <= high) else meaning


def _number(v: object) -> str | None:
    if v is None or (type(v) is float and math.isfinite(v) and v >= 0) or (type(v) is int and 0 <= v < 2**53):
        return None
    return "a finite number from 0 up, or absent"


def moment(v: object) -> str | None:
    return None if isinstance(v, datetime) and v.utcoffset() is not None else "a moment with its UTC offset"


def _id(v: object) -> str | None:
    return None if type(v) is str and is_uuid7(v) else "a version 7 UUID in lower case with dashes"


def _instance(kind: type) -> Rule:
    return lambda v: None if type(v) is kind else f"a {kind.__name__}"


_CONTROL = r"\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff"  # unsafe for a terminal or PostgreSQL
_WORDS = rf"[ -~]{{0,{TEXT_LIMIT}}}"
_WORDS_MEANING = f"printable ASCII, at most {TEXT_LIMIT} characters"

gpu_name_rule = text(r"[a-z0-9][a-z0-9._-]{0,99}", "a GPU's name: lower case letters, digits, '.', '_', '-'")
op_rule = text(r"[a-z][a-z0-9_]{0,63}", "an op's name: lower case letters, digits and '_'")
revision_rule = _whole(0, INT32_MAX)
problem_rule = text(_WORDS, _WORDS_MEANING)
REQUEST_RULES: dict[str, Rule] = {
    "gpu": gpu_name_rule,
    "op": op_rule,
    "revision": revision_rule,
    "problem": problem_rule,
    "hits": _whole(1, INT64_MAX),  # a sum
    "last_seen": moment,
}


def broken_request(values: Mapping[str, object]) -> str | None:
    """The first rule that a stored request breaks, with its field and value; None for a sound one."""
    for name, rule in REQUEST_RULES.items():
        meaning = rule(values[name])
        if meaning is not None:
            return f"{name} must be {meaning}; it is {short_repr(values[name])}"
    return None


def require(name: str, value: object, rule: Rule) -> None:
    """Raise StoreError with the field, the rule and the value, where the value breaks the rule."""
    meaning = rule(value)
    if meaning is not None:
        raise StoreError(f"{name} must be {meaning}; it is {short_repr(value)}")


def _require_all(record: object, rules: Mapping[str, Rule]) -> None:
    for name, rule in rules.items():
        require(name, getattr(record, name), rule)


# ---- records ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU model by its attributes; never a serial number. ``name`` is its part of the tuning key."""

    name: str
    target: str
    sm_count: int
    smem_per_block_bytes: int
    l2_bytes: int
    memory_bytes: int

    def __post_init__(self) -> None:
        _require_all(self, _GPU_RULES)


@dataclass(frozen=True, slots=True)
class Environment:
    """Versions a measurement depends on; ``""`` where something was absent.

    ``version`` and ``commit`` are this package's own, ``host`` is the class of the machine and its name, which exports
    leave out.
    """

    driver: str = ""
    cuda: str = ""
    dsl: str = ""
    ptxas: str = ""
    triton: str = ""
    torch: str = ""
    version: str = ""
    commit: str = ""
    host: str = ""

    def __post_init__(self) -> None:
        _require_all(self, _ENVIRONMENT_RULES)

    @property
    def anonymous(self) -> Self:
        """Without the machine's name."""
        return replace(self, host=self.host.partition(" ")[0])

    @classmethod
    def of(cls, versions: Mapping[str, str]) -> Self:
        """The entries of ``versions`` that this record has; others are left out. Adds this version and host."""
        node = re.sub(r"[^A-Za-z0-9._-]", "", platform.node())[:60]  # its name, as far as a row can hold it
        host = f"{platform.system().lower()}-{platform.machine()}-{os.cpu_count() or 0}cpu {node}"
        known = {"version": _own_version(), "host": host.strip()} | dict(versions)
        return cls(**{f.name: known.get(f.name, "") for f in fields(cls)})


def _own_version() -> str:
    try:
        return metadata.version("cutekernels")
    except metadata.PackageNotFoundError:
        return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One attempt. Never changed once recorded. Make one with :meth:`new`.

    ``ratio`` is time(default) / time(this), so above 1 is faster than the default, with its 95 % interval where it was
    measured;
    ``baseline_us`` the vendor library's time in the same run; ``error`` the largest error over the tolerance;
    ``sources`` a hash of the sources of its kernel, ``""`` in older rows; ``certificate`` of a final's winner only.
    """

    id: str = field(default_factory=uuid7)
    created_at: datetime = field(default_factory=lambda: datetime.now(UTC))
    gpu: Gpu
    environment: Environment
    op: str
    revision: int
    problem: str
    config: str
    origin: str
    status: str
    median_us: float | None = None
    p20_us: float | None = None
    p80_us: float | None = None
    samples: int | None = None
    ratio: float | None = None
    ratio_low: float | None = None
    ratio_high: float | None = None
    baseline_us: float | None = None
    error: float | None = None
    registers: int | None = None
    stack_bytes: int | None = None
    smem_bytes: int | None = None
    message: str = ""
    sources: str = ""
    certificate: Certificate | None = None

    def __post_init__(self) -> None:
        _require_all(self, TRIAL_RULES)

    @classmethod
    def new(cls, *, message: str = "", **values: Any) -> Self:
        """A trial of this moment with a fresh id; ``values`` are the other fields, of which measurements may be absent.

        Values are made storable: control characters and the middle of a long message are removed, and a measurement
        that is NaN or infinite (a kernel wrote one) is stored as absent.
        """
        for name in MEASUREMENTS:
            if isinstance(values.get(name), float) and not math.isfinite(values[name]):
                values[name] = None
        return cls(message=storable(message), **values)

    @property
    def key(self) -> tuple[str, str, int, str]:
        """The tuning key: one winner each."""
        return self.gpu.name, self.op, self.revision, self.problem

    def as_row(self) -> dict[str, Any]:
        """Plain JSON values, fields in the declared order, those that are None left out."""
        row: dict[str, Any] = {}
        for f in fields(self):
            value = getattr(self, f.name)
            if isinstance(value, Gpu | Environment):
                values = {g.name: getattr(value, g.name) for g in fields(value)}
                row[f.name] = {name: v for name, v in values.items() if v != "" or name not in PROVENANCE}
            elif isinstance(value, Certificate):
                row[f.name] = value.as_row()
            elif isinstance(value, datetime):
                row[f.name] = value.astimezone(UTC).isoformat()
            elif value is not None and (f.name, value) != ("sources", ""):
                row[f.name] = value
        return row

    def as_line(self) -> str:
        """The trial as one line of JSON, without the line's end."""
        return json.dumps(self.as_row(), allow_nan=False)

    @classmethod
    def from_line(cls, line: str) -> Self:
        """The trial that ``line`` describes. Raises StoreError with the first rule the line breaks."""
        return cls.from_row(parse_json(line))

    @classmethod
    def from_row(cls, row: object) -> Self:
        """The trial that a parsed JSON object describes. Raises StoreError with the first rule it breaks."""
        values = _require_fields(row, "a trial", {f.name for f in fields(cls)}, REQUIRED)
        values["gpu"] = Gpu(**_require_fields(values["gpu"], "gpu", set(_GPU_RULES), set(_GPU_RULES)))
        values["environment"] = Environment(
            **_require_fields(values["environment"], "environment", set(_ENVIRONMENT_RULES))
        )
        if values.get("certificate") is not None:
            values["certificate"] = Certificate.from_row(values["certificate"])
        try:
            created_at = datetime.fromisoformat(values["created_at"])
            if created_at.utcoffset() is None:  # it would mean another moment in each time zone
                raise ValueError("no offset")
            values["created_at"] = created_at.astimezone(UTC)
        except (TypeError, ValueError, OverflowError):
            raise StoreError(
                "created_at must be an ISO 8601 moment with its UTC offset, 2026-11-21T02:20:00+00:00; "
                f"it is {short_repr(values['created_at'])}"
            ) from None
        return cls(**values)


_GPU_RULES: dict[str, Rule] = {
    "name": gpu_name_rule,
    "target": text(r"[a-z0-9_]{1,20}", "a compile target such as sm_80"),
    "sm_count": _whole(1, INT32_MAX),
    "smem_per_block_bytes": _whole(0, INT64_MAX),
    "l2_bytes": _whole(0, INT64_MAX),
    "memory_bytes": _whole(0, INT64_MAX),
}
_version = text(r"[ -~]{0,100}", "a version in printable ASCII, at most 100 characters")
_ENVIRONMENT_RULES: dict[str, Rule] = {f.name: _version for f in fields(Environment)}
_count = _whole(0, INT64_MAX, optional=True)
MEASUREMENTS = ("median_us", "p20_us", "p80_us", "ratio", "ratio_low", "ratio_high", "baseline_us", "error")
COUNTS = ("samples", "registers", "stack_bytes", "smem_bytes")
TRIAL_RULES: dict[str, Rule] = {
    "id": _id,
    "created_at": moment,
    "gpu": _instance(Gpu),
    "environment": _instance(Environment),
    "op": op_rule,
    "revision": revision_rule,
    "problem": problem_rule,
    "config": text(_WORDS, _WORDS_MEANING),
    "origin": _one_of(ORIGINS),
    "status": _one_of(STATUSES),
    **dict.fromkeys(MEASUREMENTS, _number),
    **dict.fromkeys(COUNTS, _count),
    "message": text(
        rf"[^{_CONTROL}]{{0,{MESSAGE_LIMIT}}}", f"text without control characters, at most {MESSAGE_LIMIT} characters"
    ),
    "sources": text(r"[0-9a-f]{0,64}", "a hash in hexadecimal, at most 64 digits"),
    "certificate": lambda v: None if v is None or type(v) is Certificate else "a certificate, or absent",
}
REQUIRED = {"id", "created_at", "gpu", "environment", "op", "revision", "problem", "config", "origin", "status"}


def storable(message: str) -> str:
    """``message`` without characters unsafe for a terminal or a database; the middle of a long one is left out."""
    clean = re.sub(rf"\x1b\[[0-9;]*[A-Za-z]|[{_CONTROL}]", "", message).strip()
    if len(clean) <= MESSAGE_LIMIT:
        return clean
    gap = "\n[...]\n"
    head = MESSAGE_LIMIT // 4
    return clean[:head] + gap + clean[len(clean) - (MESSAGE_LIMIT - head - len(gap)) :]


# ---- reading untrusted JSON ---------------------------------------------------------------------------------


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        raise ValueError("a field stands twice")
    return values


def parse_json(line: str) -> object:
    """Parses an untrusted line. Raises StoreError where it is no JSON, or has a field twice."""
    if len(line) > LINE_LIMIT:
        raise StoreError(f"a line must be at most {LINE_LIMIT} characters")
    try:
        return json.loads(line, parse_constant=_refuse_constant, object_pairs_hook=_once)
    except (ValueError, RecursionError) as error:
        raise StoreError(f"not a JSON object: {error}; pass a file that `db export` wrote") from None


def _require_fields(
    row: object, what: str, known: set[str], needed: set[str] | frozenset[str] = frozenset()
) -> dict[str, Any]:
    if not isinstance(row, dict):
        raise StoreError(f"{what} must be a JSON object; it is {short_repr(row)}")
    unknown = row.keys() - known
    if unknown:
        raise StoreError(f"{what} has no field {short_repr(min(unknown))}; was this written by a newer cutekernels?")
    missing = needed - row.keys()
    if missing:
        raise StoreError(f"{what} needs {', '.join(sorted(missing))}")
    return dict(row)
