"""Fields of queries and the meaning of stored texts, as the ops declare them: defaults, revisions, work, rules.

Texts of ops and fields that this version lacks stay texts: an older or a newer one wrote them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import MISSING, Field, dataclass, fields
from functools import cache, lru_cache
from typing import Any

from cutekernels import dispatch
from cutekernels import gpu as gpus
from cutekernels.db.storage.trial import Trial
from cutekernels.errors import InvalidConfig, UnknownGpu, UnsupportedProblem, near
from cutekernels.op import Op, Scalar, Work
from cutekernels.ops import registry

_CONDITION = re.compile(r"([A-Za-z_]\w*)(<=|>=|!=|=|<|>)([^\s<>=!]+)")
_COMPARE: dict[str, Callable[[Any, Any], bool]] = {
    "<": lambda a, b: a < b,
    "<=": lambda a, b: a <= b,
    ">": lambda a, b: a > b,
    ">=": lambda a, b: a >= b,
}
_Declared = Mapping[str, Field[Any]]


# ---- names ----------------------------------------------------------------------------------------------


def gpu_name(name: str, also: Iterable[str] = ()) -> str:
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


def op_name(name: str, also: Iterable[str] = ()) -> str:
    """``name``, if an op is called so; ``also`` are names that a database holds."""
    return name if name in set(also) else registry.get(name).name


# ---- conditions -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Condition:
    """One word of a query, such as ``m>=16``."""

    name: str
    relation: str
    text: str

    def holds(self, op: str, value: Scalar) -> bool:
        """Whether a row of ``op`` whose field has ``value`` matches. ``=`` finds the row that a call with it uses."""
        declared = _problem(op).get(self.name)
        try:
            wanted = _parse(declared, self.name, self.text) if declared else _loose(self.name, value, self.text)
            if self.relation in ("=", "!="):
                stored = {wanted} if declared is None else {wanted, *_stored_values(op, self.name, wanted)}
                return (value in stored) == (self.relation == "=")
            return _COMPARE[self.relation](value, wanted)
        except (UnsupportedProblem, TypeError):  # another op's value
            return False


def conditions(text: str, op: str | None = None) -> list[Condition]:
    """The conditions of a query such as ``"m>=16 n=4096 dtype=bf16"``.

    Raises:
        UnsupportedProblem: not conditions, or no op (``op``, if given) has such a field or value.
    """
    found = [_condition(word) for word in text.split()]
    if not found or (op is not None and registry.find(op) is None):
        return found
    among = [_problem(name) for name in ([op] if op else [each.name for each in registry.OPS])]
    for condition in found:
        owners = [declared[condition.name] for declared in among if condition.name in declared]
        if not owners:
            known = sorted({name for declared in among for name in declared})
            whose = f"problem of {op}" if op else "problem of any op"
            raise UnsupportedProblem(
                f"{condition.name!r} is not a field of a {whose}. {near(condition.name, known)}"
                f"Its fields: {', '.join(known)}"
            )
        errors = []
        for owner in owners:
            try:
                _parse(owner, condition.name, condition.text)
            except UnsupportedProblem as error:
                errors.append(error)
        if len(errors) == len(owners):
            raise errors[0]
        if condition.relation not in ("=", "!=") and all("values" in owner.metadata for owner in owners):
            word = f"{condition.name}{condition.relation}{condition.text}"
            raise UnsupportedProblem(f"{condition.name} is no extent: compare it with = or !=; it is {word!r}")
    return found


def _condition(word: str) -> Condition:
    match = _CONDITION.fullmatch(word)
    if match is None:
        raise UnsupportedProblem(
            f'a problem is asked for by fields with =, !=, <, <=, > or >=, "m>=16 dtype=bf16"; it is {word[:60]!r}'
        )
    return Condition(*match.groups())


def matches(op: str, problem: Mapping[str, Scalar], asked: Iterable[Condition]) -> bool:
    """Whether a row's problem, with its defaults written out, meets all conditions."""
    return all(c.name in problem and c.holds(op, problem[c.name]) for c in asked)


@cache
def _stored_values(op: str, name: str, value: Scalar) -> frozenset[Scalar]:
    """The values under which rows for ``value`` are stored: as the op's ``bucket`` has it, tried on its suite.

    Those of a head dim differ where the cache does.
    """
    declared = registry.get(op)
    bucket = _problem(op)[name].metadata.get("bucket")
    if bucket is not None:
        return frozenset([bucket(value)])
    found = set()
    for text in declared.suite:
        with suppress(UnsupportedProblem):
            found.add(getattr(declared.Problem.parse(text).replace(**{name: value}).bucket(), name))
    return frozenset(found)


def _parse(declared: Field[Any], name: str, text: str) -> Scalar:
    if "values" not in declared.metadata:
        return _extent(name, text)
    for value in declared.metadata["values"]:
        if text in (str(int(value) if isinstance(value, bool) else value), str(value)):
            return value  # type: ignore[no-any-return]
    allowed = ", ".join(map(str, declared.metadata["values"]))
    raise UnsupportedProblem(f"{name} must be one of {allowed}; it is {text[:40]!r}")


def _extent(name: str, text: str) -> int:
    if text.isascii() and text.isdigit() and len(text) <= 18:
        return int(text)
    raise UnsupportedProblem(f"{name} is an extent, a whole number from 0 up; it is {text[:40]!r}")


def _loose(name: str, value: Scalar, text: str) -> Scalar:
    """``text`` as a field of a row whose op or version is unknown here has it."""
    return _extent(name, text) if isinstance(value, int) else text


# ---- rows -----------------------------------------------------------------------------------------------


def problem(op: str, text: str) -> dict[str, Scalar]:
    """The fields of a problem's text, typed, defaults written out; a field this version lacks stays as text."""
    return _typed_values(text, _problem(op))


def spell(op: str, revision: int, problem: str, config: str) -> str:
    """A config's stored text in the words of the op's revision here."""
    declared = registry.find(op)
    return config if declared is None else declared.spell(revision, problem, config)


def config(op: str, text: str) -> dict[str, Scalar]:
    """The knobs of a config's text in today's words, typed, defaults written out."""
    declared = registry.find(op)
    return _typed_values(text, _fields(declared.Config) if declared else {})  # type: ignore[arg-type]


def is_default(op: str, name: str, value: Scalar) -> bool:
    """Whether a problem's field has its default."""
    declared = _problem(op).get(name)
    return declared is not None and declared.default == value


def revisions(op: str) -> tuple[int, ...]:
    """The op's revisions whose rows serve, the newest first; none for an op that this version lacks."""
    declared = registry.find(op)
    return () if declared is None else declared.revisions


def rates(gpu: str, op: str, text: str, us: float | None) -> dict[str, float | None]:
    """``tflops``, ``gbps`` and ``roofline``, the share of the GPU's roofline (1 is the roofline itself)."""
    found: dict[str, float | None] = {"tflops": None, "gbps": None, "roofline": None}
    work = _work(op, text) if us else None
    if work is None or not us:
        return found
    found |= {"tflops": work.flops / us / 1e6, "gbps": work.bytes / us / 1e3}
    with suppress(UnknownGpu):  # described on its own machine, not in the table
        found["roofline"] = work.floor_us(gpus.lookup(gpu)) / us
    # A database may hold a time of 5e-324 us.
    return {name: rate if rate is not None and math.isfinite(rate) else None for name, rate in found.items()}


def foreign(op: str, revision: int, problem: str) -> str:
    """Why a row's op, revision or problem is none that this version tunes and serves; "" where it is one."""
    declared, serving = registry.find(op), revisions(op)
    if declared is None:
        return "this version has no such op"
    if revision not in serving:
        newer = "a newer cutekernels wrote it, and here " if revision > max(serving) else ""
        return f"{newer}calls use winners of revision {' and '.join(map(str, sorted(serving)))}"
    try:
        declared.Problem.parse(problem)
    except UnsupportedProblem as error:
        return f"its problem is not one of this version's: {error}"
    return ""


def unusable(t: Trial) -> str:
    """Why calls use no such winner, whatever others there are; "" where they may. The dispatcher's own rules say it."""
    declared = registry.find(t.op)
    if (why := foreign(t.op, t.revision, t.problem)) or declared is None:
        return why
    found: Any
    us = t.median_us if t.origin == "measured" else None
    try:
        p, gpu = declared.Problem.parse(t.problem), gpus.lookup(t.gpu.name)
        found = dispatch.adopt(declared, p, gpu, t.config, t.revision, t.problem, us)
    except UnknownGpu:  # described on its own machine, not in the table: only the knobs can be looked at
        try:
            found = declared.Config.parse(declared.spell(t.revision, t.problem, t.config))
        except InvalidConfig as error:
            found = str(error)
    return found if isinstance(found, str) else ""


def false_time(t: Trial) -> str:
    """Why nothing can have run in a trial's time; "" where it may be true."""
    timed = t.status == "ok" and t.origin == "measured"
    return dispatch.too_fast(t.median_us, _floor_us(t.gpu.name, t.op, t.problem)) if timed else ""


@lru_cache(maxsize=4096)
def _floor_us(gpu: str, op: str, problem: str) -> float | None:
    declared: Op[Any, Any] | None = registry.find(op)
    with suppress(UnknownGpu):
        return None if declared is None else dispatch.floor_us(declared, problem, gpus.lookup(gpu))
    return None


def _work(op: str, text: str) -> Work | None:
    declared: Op[Any, Any] | None = registry.find(op)
    try:
        return None if declared is None else declared.work(declared.Problem.parse(text))
    except (UnsupportedProblem, InvalidConfig, ArithmeticError):
        return None


def _problem(op: str) -> _Declared:
    declared = registry.find(op)
    return {} if declared is None else _fields(declared.Problem)  # type: ignore[arg-type]


@cache
def _fields(kind: Any) -> _Declared:
    return {f.name: f for f in fields(kind)}


def _typed_values(text: str, declared: _Declared) -> dict[str, Scalar]:
    found: dict[str, Scalar] = {}
    for word in text.split():
        name, _, raw = word.partition("=")
        try:
            found[name] = _parse(declared[name], name, raw)
        except (KeyError, UnsupportedProblem):
            found[name] = int(raw) if raw.isascii() and raw.isdigit() and len(raw) <= 18 else raw
    return found | {name: f.default for name, f in declared.items() if f.default is not MISSING and name not in found}
