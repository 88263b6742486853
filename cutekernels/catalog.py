"""Catalog: what the command line needs to know of the ops, without importing torch.

Fields, defaults and revisions are declared in ``cutekernels.ops``, whose import loads torch and takes seconds. They
travel with the package in ``catalog.json``, which ``python -m cutekernels.catalog`` writes, with the work of every
shipped winner's problem and a digest of every shipped winner that calls take. What is not there is asked of the ops: a
missing, stale or unreadable file costs their import and nothing else. A query writes nothing.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import MISSING, dataclass, fields
from importlib import import_module
from pathlib import Path
from typing import Any

from cutekernels import gpu as gpus
from cutekernels import op as declarations
from cutekernels.errors import InvalidConfig, UnknownGpu, UnsupportedProblem, near

SHIPPED = Path(__file__).with_name("catalog.json")
Scalar = int | str | bool
_CONDITION = re.compile(r"([A-Za-z_]\w*)(<=|>=|!=|=|<|>)([^\s<>=!]+)")
_COMPARE: dict[str, Callable[[Any, Any], bool]] = {
    "<": lambda a, b: a < b,
    "<=": lambda a, b: a <= b,
    ">": lambda a, b: a > b,
    ">=": lambda a, b: a >= b,
}


@dataclass(frozen=True, slots=True)
class Field:
    """One field of a problem or a config. ``values`` is None for an extent, ``bucket`` names its rounding.

    ``folded`` maps values that share the tuning of another one: ``{"fp16": "bf16"}``.
    """

    name: str
    default: Scalar | None
    values: tuple[Scalar, ...] | None
    bucket: str
    folded: Mapping[str, Scalar]

    def parse(self, text: str) -> Scalar:
        """The value ``text`` names. Raises UnsupportedProblem for any other."""
        if self.values is None:
            if text.isascii() and text.isdigit() and len(text) <= 18:
                return int(text)
            raise UnsupportedProblem(f"{self.name} is an extent, a whole number from 0 up; it is {text[:40]!r}")
        for value in self.values:
            if text == str(int(value) if isinstance(value, bool) else value) or text == str(value):
                return value
        allowed = ", ".join(map(str, self.values))
        raise UnsupportedProblem(f"{self.name} must be one of {allowed}; it is {text[:40]!r}")

    def stored(self, value: Scalar) -> set[Scalar]:
        """Values under which a row for ``value`` may be stored: itself, its bucket, the value it is folded into."""
        if self.values is None and isinstance(value, int):
            return {value, getattr(declarations, self.bucket, declarations.exact)(value)}
        return {value, self.folded.get(str(value), value)}


@dataclass(frozen=True, slots=True)
class Declared:
    """One op's declaration: its revision and the fields of its problems and configs."""

    revision: int
    problem: tuple[Field, ...]
    config: tuple[Field, ...]


@dataclass(frozen=True, slots=True)
class Condition:
    """One word of a query, such as ``m>=16``."""

    name: str
    relation: str
    text: str

    def holds(self, field: Field, value: Scalar) -> bool:
        """Whether a row whose field has ``value`` matches. ``=`` finds the row that a call with this value uses."""
        wanted = field.parse(self.text)
        if self.relation in ("=", "!="):
            return (value in field.stored(wanted)) == (self.relation == "=")
        return _COMPARE[self.relation](value, wanted)


class Catalog:
    """Ops, GPUs and the meaning of the texts that a database stores."""

    def __init__(self) -> None:
        found = _read(SHIPPED, _fingerprint()) or {"ops": _declare(), "work": {}, "taken": {}}
        self.ops = {name: _declared(row) for name, row in found["ops"].items()}
        self._known_work: dict[str, dict[str, Any]] = found["work"]
        self._taken = frozenset(digest for digests in found["taken"].values() for digest in digests.split())

    # ---- names ----------------------------------------------------------------------------------------------

    def gpu(self, name: str, also: Iterable[str] = ()) -> str:
        """The GPU's name in the database: aliases and any case; ``also`` are names that a database holds."""
        if name.strip().lower() in set(also):
            return name.strip().lower()
        try:
            return gpus.lookup(name).name
        except UnknownGpu as error:
            if gpus.is_auto(name):
                raise
            hint = "" if "Did you mean" in str(error) else near(name.lower(), also)
            raise UnknownGpu(f"{hint}{error}") from None

    def op(self, name: str, also: Iterable[str] = ()) -> str:
        """``name``, if an op is called so; ``also`` are names that a database holds."""
        known = [*self.ops, *also]
        if name in known:
            return name
        raise UnsupportedProblem(f"no op is called {name[:60]!r}. {near(name, known)}The ops: {', '.join(self.ops)}")

    def conditions(self, text: str, op: str | None = None) -> list[Condition]:
        """The conditions of a query such as ``"m>=16 n=4096 dtype=bf16"``.

        Raises:
            UnsupportedProblem: not conditions, or no op (``op``, if given) has such a field or value.
        """
        found = []
        ops = {op: self.ops[op]} if op in self.ops else self.ops
        if op is not None and op not in self.ops:
            return [_condition(word) for word in text.split()]
        for word in text.split():
            condition = _condition(word)
            owners = [f for declared in ops.values() for f in declared.problem if f.name == condition.name]
            if not owners:
                known = sorted({f.name for declared in ops.values() for f in declared.problem})
                whose = f"problem of {op}" if op else "problem of any op"
                raise UnsupportedProblem(
                    f"{condition.name!r} is not a field of a {whose}. {near(condition.name, known)}"
                    f"Its fields: {', '.join(known)}"
                )
            errors = []
            for owner in owners:
                try:
                    owner.parse(condition.text)
                except UnsupportedProblem as error:
                    errors.append(error)
            if len(errors) == len(owners):
                raise errors[0]
            if condition.relation not in ("=", "!=") and all(f.values is not None for f in owners):
                raise UnsupportedProblem(f"{condition.name} is no extent: compare it with = or !=; it is {word!r}")
            found.append(condition)
        return found

    # ---- rows -----------------------------------------------------------------------------------------------

    def matches(self, op: str, problem: Mapping[str, Scalar], conditions: Iterable[Condition]) -> bool:
        """Whether a row's problem, with its defaults written out, meets all conditions."""
        declared = self.ops.get(op)
        known = {f.name: f for f in declared.problem} if declared else {}
        for condition in conditions:
            if condition.name not in problem:
                return False
            value = problem[condition.name]
            field = known.get(condition.name) or _loose(condition.name, value)
            try:
                if not condition.holds(field, value):
                    return False
            except (UnsupportedProblem, TypeError):  # another op's value
                return False
        return True

    def problem(self, op: str, text: str) -> dict[str, Scalar]:
        """The fields of a problem's text, typed, defaults written out; a field this version lacks stays as text."""
        return _typed(text, self.ops[op].problem if op in self.ops else ())

    def config(self, op: str, text: str) -> dict[str, Scalar]:
        """The knobs of a config's text, typed, defaults written out."""
        return _typed(text, self.ops[op].config if op in self.ops else ())

    def is_default(self, op: str, name: str, value: Scalar) -> bool:
        """Whether a problem's field has its default."""
        return any(f.name == name and f.default == value for f in self.ops[op].problem) if op in self.ops else False

    def revision(self, op: str) -> int | None:
        """The op's revision; None for an op that this version lacks."""
        return self.ops[op].revision if op in self.ops else None

    def rates(self, gpu: str, op: str, problem: str, us: float | None) -> dict[str, float | None]:
        """``tflops``, ``gbps`` and ``roofline``, the share of the GPU's roofline (1 is the roofline itself)."""
        nothing: dict[str, float | None] = {"tflops": None, "gbps": None, "roofline": None}
        work = self._work(op, problem) if us else None
        if work is None or not us:
            return nothing
        flops, moved = work
        found: dict[str, float | None] = {"tflops": flops / us / 1e6, "gbps": moved / us / 1e3, "roofline": None}
        with suppress(UnknownGpu):  # described on its own machine, not in the table
            found["roofline"] = declarations.Work(flops, moved).floor_us(gpus.lookup(gpu)) / us
        # A database may hold a time of 5e-324 us.
        return {name: rate if rate is not None and math.isfinite(rate) else None for name, rate in found.items()}

    def _work(self, op: str, problem: str) -> tuple[float, float] | None:
        known = self._known_work.setdefault(op, {})
        if problem not in known:
            known[problem] = _work(op, problem) if op in self.ops else None
        return known[problem]  # type: ignore[no-any-return]

    def refusal(self, gpu: str, op: str, problem: str, config: str) -> str:
        """Why calls refuse a winner of the op's current revision, by the dispatcher's rule; "" where they take it."""
        if op not in self.ops or _digest(gpu, op, problem, config) in self._taken:
            return ""
        return _refusal(gpu, op, problem, config)


def _condition(word: str) -> Condition:
    match = _CONDITION.fullmatch(word)
    if match is None:
        raise UnsupportedProblem(
            f'a problem is asked for by fields with =, !=, <, <=, > or >=, "m>=16 dtype=bf16"; it is {word[:60]!r}'
        )
    return Condition(*match.groups())


def _loose(name: str, value: Scalar) -> Field:
    """A field of a row whose op or version is unknown here."""
    return Field(name, None, None if isinstance(value, int) else (value,), "exact", {})


def _typed(text: str, declared: Iterable[Field]) -> dict[str, Scalar]:
    values: dict[str, Scalar] = {f.name: f.default for f in declared if f.default is not None}
    known = {f.name: f for f in declared}
    ordered: dict[str, Scalar] = {}
    for word in text.split():
        name, _, raw = word.partition("=")
        try:
            ordered[name] = known[name].parse(raw)
        except (KeyError, UnsupportedProblem):
            ordered[name] = int(raw) if raw.isascii() and raw.isdigit() and len(raw) <= 18 else raw
    return ordered | {name: value for name, value in values.items() if name not in ordered}


# ---- the declarations of the ops ----------------------------------------------------------------------------


def _fingerprint() -> str:
    """Hash of the sources that the declarations come from, the same wherever the package is installed."""
    root = Path(__file__).parent
    files = sorted([root / "op.py", root / "catalog.py", *(root / "ops").rglob("*.py")])
    digest = hashlib.sha256()
    for file in files:
        digest.update(f"{file.relative_to(root).as_posix()}\0".encode() + file.read_bytes())
    return digest.hexdigest()[:16]


def _read(path: Path, fingerprint: str) -> dict[str, Any] | None:
    try:
        kept = json.loads(path.read_text())
        for row in kept["ops"].values():
            _declared(row)
        assert isinstance(kept["work"], dict)
        assert all(isinstance(digests, str) for digests in kept["taken"].values())
        assert kept["sources"] == fingerprint
    except (OSError, ValueError, KeyError, TypeError, AttributeError, AssertionError, RecursionError):
        return None
    return kept  # type: ignore[no-any-return]


def _declared(row: dict[str, Any]) -> Declared:
    def field(name: str, default: Any, values: Any, bucket: str, folded: dict[str, Any]) -> Field:
        return Field(name, default, None if values is None else tuple(values), bucket, folded)

    return Declared(row["revision"], tuple(field(*f) for f in row["problem"]), tuple(field(*f) for f in row["config"]))


def _declare() -> dict[str, Any]:
    """Every op's declaration as plain JSON values. Imports torch."""
    return {
        op.name: {
            "revision": op.revision,
            "problem": [_plain(f, _folded(op, f)) for f in fields(op.Problem)],
            "config": [_plain(f, {}) for f in fields(op.Config)],
        }
        for op in import_module("cutekernels.ops.registry").OPS
    }


def _plain(f: Any, folded: dict[str, Scalar]) -> list[Any]:
    values = f.metadata.get("values")
    bucket = f.metadata["bucket"].__name__ if "bucket" in f.metadata else ""
    return [f.name, None if f.default is MISSING else f.default, values and list(values), bucket, folded]


def _folded(op: Any, f: Any) -> dict[str, Scalar]:
    """Values of one field that the op's ``bucket`` turns into others, found by trying each on the op's suite."""
    found: dict[str, Scalar] = {}
    for value in f.metadata.get("values", ()):
        for text in op.suite:
            try:
                stored = getattr(op.Problem.parse(text).replace(**{f.name: value}).bucket(), f.name)
            except UnsupportedProblem:
                continue
            if stored != value:
                found[str(value)] = stored
                break
    return found


def _work(op: str, problem: str) -> tuple[float, float] | None:
    declared = import_module("cutekernels.ops.registry").get(op)
    try:
        work = declared.work(declared.Problem.parse(problem))
    except (UnsupportedProblem, InvalidConfig, ArithmeticError):
        return None
    return float(work.flops), float(work.bytes)


def _refusal(gpu: str, op: str, problem: str, config: str) -> str:
    from cutekernels import dispatch

    declared = import_module("cutekernels.ops.registry").get(op)
    try:
        posed, spec = declared.Problem.parse(problem), gpus.lookup(gpu)
        found = dispatch.adopted(declared, posed, spec, config)
    except UnsupportedProblem as error:
        return f"its problem is not one of this version's: {error}"
    except UnknownGpu:  # described on its own machine, not in the table: only the knobs can be looked at
        try:
            found = declared.Config.parse(config)
        except InvalidConfig as error:
            found = str(error)
    return found if isinstance(found, str) else ""


def _digest(gpu: str, op: str, problem: str, config: str) -> str:
    return hashlib.sha256("\0".join((gpu, op, problem, config)).encode()).hexdigest()[:16]


def ship() -> dict[str, Any]:
    """What ``catalog.json`` holds: the declarations, and the work and the digests of all shipped winners."""
    from cutekernels.db import snapshot

    work: dict[str, Any] = {}
    taken: dict[str, list[str]] = {}
    for t in (t for gpu in snapshot.shipped_gpus() for t in snapshot.shipped(gpu)):
        work.setdefault(t.op, {})[t.problem] = _work(t.op, t.problem)
        if not _refusal(t.gpu.name, t.op, t.problem, t.config):
            taken.setdefault(t.op, []).append(_digest(t.gpu.name, t.op, t.problem, t.config))
    digests = {op: " ".join(sorted(found)) for op, found in taken.items()}
    return {"sources": _fingerprint(), "ops": _declare(), "work": work, "taken": digests}


def _text(kept: dict[str, Any]) -> str:
    """JSON with one line for each op, so that a change of one op is one changed line."""
    parts = [f'"sources": {json.dumps(kept["sources"])}']
    for part in ("ops", "work", "taken"):
        lines = ",\n".join(f"{json.dumps(op)}: {json.dumps(row)}" for op, row in kept[part].items())
        parts.append(f'"{part}": {{\n{lines}\n}}')
    return "{" + ",\n".join(parts) + "}\n"


if __name__ == "__main__":
    import sys

    if "--check" not in sys.argv:
        SHIPPED.write_text(_text(ship()))
    elif _read(SHIPPED, _fingerprint()) is None:
        sys.exit(f"{SHIPPED.name} is of other sources: run `python -m cutekernels.catalog`")
