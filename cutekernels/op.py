"""Problem, Config, Op: the declaration everything else works from.

An op is *one* declaration. The dispatcher, the tuner, the benchmarks, the tests and the documentation read it;
none of them knows a particular op. A new one is a Problem, a Config and an Op in ``ops/``, a kernel in
``kernels/``, and one line in ``ops/registry.py``.

Problems and configs have one text form, used in job files, logs, the command line and the database::

    m=4096 n=11008 k=4096 dtype=bf16 b_major=n
    tile_m=128 tile_n=256 tile_k=64 stages=3

Fields that hold their default are left out, so a field added later does not change the meaning of old texts.
Text is parsed against the declared fields: an untrusted database cannot name a field or a value that the
dataclass does not allow.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields, replace
from functools import cache
from itertools import product
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Self, TypeVar

from cutekernels.errors import InvalidConfig, UnsupportedProblem, near

if TYPE_CHECKING:
    from torch import Tensor

    from cutekernels.backends import Artifact
    from cutekernels.gpu import GpuSpec

Scalar = int | str | bool
_SCALARS = frozenset((int, str, bool))
MOST_EXTENT = 2**62  # the bucket of an extent, the next power of two, still fits into an int64


# ---- fields ---------------------------------------------------------------------------------------------


def exact(extent: int) -> int:
    """One bucket per extent: for weight extents, of which a model has a handful."""
    return extent


def ladder(extent: int) -> int:
    """Two buckets per octave, rounded up: 1 2 3 4 6 8 12 16 24 32 48 64 96 ... for token counts."""
    if extent <= 2:
        return extent
    octave = 1 << (extent - 1).bit_length()
    return octave * 3 // 4 if extent <= octave * 3 // 4 else octave


def power_of_two(n: int) -> int:
    """The smallest power of two from ``n`` up; 1 for nothing."""
    return 1 << max(0, n - 1).bit_length()


def extent(bucket: Callable[[int], int] = exact, default: int | None = None) -> Any:
    """A run-time extent of a problem: any non-negative int; compiled kernels do not depend on it."""
    return field(default=MISSING if default is None else default, metadata={"bucket": bucket})


def plain(*values: Scalar) -> Any:
    """A compile-time property of a problem, one of ``values``; the first is the default."""
    return field(default=values[0], metadata={"values": values})


def knob(*values: Scalar, added: bool = False) -> Any:
    """A field of a config: ``values`` is what the tuner searches.

    ``added``: a knob that stored configs lack. Its default, the first value, must keep their meaning.
    """
    return field(default=values[0] if added else MISSING, metadata={"values": values})


@cache
def _choices(kind: type) -> tuple[tuple[str, dict[tuple[type, Scalar], Scalar]], ...]:
    """A record's fields that have values to choose from, and these by type and value: True is not 1."""
    chosen = (f for f in fields(kind) if "values" in f.metadata)
    return tuple((f.name, {(type(v), v): v for v in f.metadata["values"]}) for f in chosen)


@cache
def _in_order(kind: type) -> tuple[Field[Any], ...]:
    """A record's fields as texts have them: extents first, also behind those of a base class."""
    return tuple(sorted(fields(kind), key=lambda f: "bucket" not in f.metadata))


class _Record:
    """A frozen dataclass of ints, strings and bools with one canonical text form."""

    def _check_choices(self, error: type[ValueError]) -> None:
        for name, allowed in _choices(type(self)):  # type: ignore[arg-type]  # a class is hashable
            value = getattr(self, name)
            if type(value) not in _SCALARS or (type(value), value) not in allowed:
                raise error(f"{name} must be one of {', '.join(map(str, allowed.values()))}; it is {value!r}")

    def __str__(self) -> str:
        words = []
        for f in _in_order(type(self)):  # type: ignore[arg-type]
            value = getattr(self, f.name)
            if f.default is MISSING or value != f.default:
                words.append(f"{f.name}={int(value) if isinstance(value, bool) else value}")
        return " ".join(words)

    @classmethod
    def _values(cls, text: str, error: type[ValueError]) -> dict[str, Scalar]:
        known = {f.name: f for f in _in_order(cls)}  # type: ignore[arg-type]
        values: dict[str, Scalar] = {}
        for word in text.split():
            name, eq, raw = word.partition("=")
            if not eq or "," in raw:
                raise error(f"{word[:60]!r} is not NAME=VALUE: write m=16 n=64, with spaces between fields")
            if name not in known:
                raise error(
                    f"{word[:60]!r} is not a field of {cls.__name__}. {near(name, known)}Its fields: {', '.join(known)}"
                )
            if name in values:
                raise error(f"{name!r} stands twice in {text!r}")
            values[name] = _parse(known[name], raw, error)
        missing = [f.name for f in known.values() if f.default is MISSING and f.name not in values]
        if missing:
            raise error(f"{cls.__name__} needs {', '.join(missing)}; got {text!r}")
        return values

    def replace(self, **changes: Scalar) -> Self:
        """A copy with some fields changed."""
        return replace(self, **changes)  # type: ignore[type-var]


def respell(text: str, words: Mapping[str, str]) -> str:
    """``text`` with other names of fields, and other values where ``words`` has a whole word: ``"body=old"``."""
    found = []
    for word in text.split():
        name, eq, value = word.partition("=")
        found.append(words.get(word) or f"{words.get(name, name)}{eq}{value}")
    return " ".join(found)


def _parse(f: Field[Any], raw: str, error: type[ValueError]) -> Scalar:
    if "values" not in f.metadata:
        if not (raw.isascii() and raw.isdigit() and len(raw) <= len(str(MOST_EXTENT))):
            raise error(f"{f.name} is an extent, a whole number from 0 up; got {raw!r}")
        return int(raw)
    for value in f.metadata["values"]:
        if raw == str(int(value) if isinstance(value, bool) else value):
            return value  # type: ignore[no-any-return]
    raise error(f"{f.name} must be one of {', '.join(map(str, f.metadata['values']))}; got {raw!r}")


@dataclass(frozen=True)
class Problem(_Record):
    """A call without its data: extents and compile-time properties.

    Declare extents with :func:`extent` and the rest with :func:`plain`. Validated on construction.
    """

    def __post_init__(self) -> None:
        self._check_choices(UnsupportedProblem)
        for name in self.extent_names():
            value = getattr(self, name)
            if type(value) is not int or value < 0:
                raise UnsupportedProblem(f"{name} is an extent, a whole number from 0 up; it is {value!r}")
            if value > MOST_EXTENT:
                raise UnsupportedProblem(f"{name} is at most 2**62; it has {value.bit_length()} bits: split the call")

    @classmethod
    def parse(cls, text: str) -> Self:
        """The problem ``text`` describes. Raises UnsupportedProblem for an unknown field or value."""
        return cls(**cls._values(text, UnsupportedProblem))

    @classmethod
    @cache
    def extent_names(cls) -> tuple[str, ...]:
        return tuple(f.name for f in fields(cls) if "bucket" in f.metadata)

    def extents(self) -> tuple[int, ...]:
        return tuple(getattr(self, name) for name in self.extent_names())

    def static(self) -> tuple[tuple[str, Scalar], ...]:
        """The fields a compiled kernel depends on: all that are not extents, by name."""
        return tuple((f.name, getattr(self, f.name)) for f in fields(self) if "bucket" not in f.metadata)

    def bucket(self) -> Self:
        """The problem under which the tuned-config database stores this one (idempotent)."""
        rounded = {f.name: f.metadata["bucket"](getattr(self, f.name)) for f in fields(self) if "bucket" in f.metadata}
        return replace(self, **rounded)


@dataclass(frozen=True)
class Config(_Record):
    """How an op solves a problem: one value per knob. Declare each field with :func:`knob`."""

    def __post_init__(self) -> None:
        self._check_choices(InvalidConfig)

    @property
    def vendors(self) -> bool:
        """Whether it launches the vendor library's call (:meth:`Op.vendor`) in place of a kernel of ours.

        Such a config wins by measurement alone: it is no default and is not predicted. It serves a neighbouring problem
        only where the closest winners are all the vendor's (``dispatch.VENDOR_WINNERS``), and counts in no claim about
        our kernels.
        """
        return False

    @classmethod
    def parse(cls, text: str) -> Self:
        """The config ``text`` describes. Raises InvalidConfig for an unknown knob or value."""
        return cls(**cls._values(text, InvalidConfig))

    @classmethod
    def space(cls) -> dict[str, tuple[Scalar, ...]]:
        """Values the tuner may try, by knob."""
        return {f.name: f.metadata["values"] for f in fields(cls)}

    @classmethod
    def every(cls) -> Iterator[Self]:
        """The whole space in a fixed order, rules not applied."""
        space = cls.space()
        for values in product(*space.values()):
            yield cls.drawn(zip(space, values, strict=True))

    @classmethod
    def drawn(cls, values: Iterable[tuple[str, Scalar]]) -> Self:
        """A config of every knob's value, drawn from :meth:`space`: not checked again, since spaces are large."""
        made = object.__new__(cls)
        made.__dict__.update(values)
        return made


@dataclass(frozen=True, slots=True)
class Work:
    """Least work of a problem: floating-point operations, and bytes through device memory.

    ``depth``: terms in an output's longest sum, from which the tolerance is derived; None where it is the same
    for all outputs and follows from ``flops``.
    """

    flops: float
    bytes: float
    depth: float | None = None

    def floor_us(self, gpu: GpuSpec) -> float:
        """The roofline: no kernel runs faster than this on ``gpu``."""
        return max(self.flops / (gpu.peak_tflops * 1e6), self.bytes / (gpu.dram_gbps * 1e3))

    def by_arithmetic(self, gpu: GpuSpec) -> bool:
        """Whether arithmetic sets the roofline, rather than memory."""
        return self.floor_us(gpu) > self.bytes / (gpu.dram_gbps * 1e3)


P = TypeVar("P", bound=Problem)
C = TypeVar("C", bound=Config)


class Op(ABC, Generic[P, C]):
    """One operator: its problems, its configs, the rules between them, its kernels and its reference.

    ``args`` below are the op's tensors and scalars in one fixed order, the same for ``outputs``, ``sample``,
    ``reference`` and for the launch: ``launch(*outputs, *args)``. Absent optional tensors are None.

    **Ownership.** An op owns no tensor and no kernel: ``args`` and ``outputs`` are the caller's, and a launch keeps
    none of them; what ``build`` returns is kept by ``compile.py``, what ``bind`` returns by ``dispatch.py``.

    **Threads.** One instance serves a process, and its methods change nothing in it but caches: any thread may call any
    of them at any time, ``build`` in compiling processes too. Threads share a launch; each enqueues on its own current
    stream.
    """

    name: ClassVar[str]
    revision: ClassVar[int]
    """Incremented by hand when stored winners no longer apply (a kernel rewritten, a knob's meaning changed)."""
    earlier: ClassVar[Mapping[int, Callable[[str, str], str]]] = {}
    """Revisions that had other words for the same configs of the same kernels. For each a function of a problem's and a
    config's stored texts: the config's text in today's words. Rows of theirs serve as this revision's own do."""
    suite: ClassVar[tuple[str, ...]]
    """Typical problems for tests, ``bench`` and documentation, in text form."""
    Problem: type[P]
    Config: type[C]
    most_stack_bytes: ClassVar[int] = 256
    """Per-thread stack limit; the tuner skips candidates above it. A few words need not be spills; kilobytes are."""
    sample_kinds: ClassVar[int] = 1
    """Kinds of ``sample``, by the remainder of its seed: the tuner times as many inputs of each, where they fit."""
    partial: ClassVar[bool] = False
    """Whether launches leave elements of the outputs unwritten: ``reference`` has NaN there, and judges ask for it."""
    compile_s: ClassVar[float] = 1.0
    """CPU seconds of a compile, roughly: of several side by side the longest begin first."""

    @abstractmethod
    def why_not(self, p: P, c: C, gpu: GpuSpec) -> str | None:
        """The rule that ``c`` breaks for ``p`` on ``gpu``, or None. All constraints of the op are stated here."""

    @abstractmethod
    def default(self, p: P, gpu: GpuSpec) -> C:
        """The analytical choice for an untuned problem. ``why_not`` accepts it, for any problem and GPU."""

    @abstractmethod
    def estimate_us(self, p: P, c: C, gpu: GpuSpec) -> float:
        """The model's time for a valid config; it ranks candidates where no GPU can measure them."""

    @abstractmethod
    def build(self, p: P, c: C, gpu: GpuSpec) -> Artifact:
        """Compiles a kernel from ``p.static()``, ``c`` and ``gpu`` alone. Needs no GPU."""

    @abstractmethod
    def bind(self, p: P, c: C, kernel: Callable[..., Any]) -> Callable[..., Any]:
        """``launch(*outputs, *args)`` over the loaded ``kernel`` for this exact problem."""

    def chained(self, p: P, c: C, gpu: GpuSpec) -> Iterable[tuple[Op[Any, Any], Any]]:
        """Other ops' problems whose plans a launch takes on ``gpu``: compiled ahead together with this one."""
        return ()

    @abstractmethod
    def outputs(self, p: P, *args: Any) -> tuple[Tensor, ...]:
        """Allocates the results (meta tensors too: torch.compile's fake implementation uses it)."""

    @abstractmethod
    def sample(self, p: P, device: str, seed: int) -> tuple[Any, ...]:
        """Random arguments that pose ``p``: standard normal data, never zeros, never all-ones weights."""

    def variant(self, p: P, args: tuple[Any, ...], seed: int) -> tuple[Any, ...] | None:
        """Another sample that shares with ``args`` the tensors of which a launch reads a part that differs by sample:
        rows of a table, experts. Timings then rotate over as many as keep what launches read out of the L2 cache.
        None where a launch reads all that it is given.
        """
        return None

    @abstractmethod
    def reference(self, p: P, *args: Any) -> tuple[Tensor, ...]:
        """The same mathematics in plain PyTorch, in fp32 or better, rounded once to the output dtype."""

    @abstractmethod
    def work(self, p: P) -> Work:
        """Least flops and bytes."""

    def vendor(self, p: P) -> Callable[..., object] | None:
        """The vendor library's call for ``p``, on ``(*outputs, *args)``; None where it has none.

        The tuner times it beside the finalists, so that a winner's row says what it is compared with; an op may have a
        config that launches it (:attr:`Config.vendors`).
        """
        return None

    # -- derived from the declaration

    def __repr__(self) -> str:  # the same in every process, for test ids and messages
        return f"<op {self.name}>"

    @property
    def revisions(self) -> tuple[int, ...]:
        """Revisions whose stored rows serve, the newest first."""
        return self.revision, *sorted(self.earlier, reverse=True)

    def compiler(self, c: C) -> str:
        """The compiler of ``c``'s kernel, by its name in :func:`cutekernels.environment.collect`."""
        return "dsl"

    def spell(self, revision: int, problem: str, config: str) -> str:
        """The text of a config stored under ``revision``, in this revision's words. Stored rows are never rewritten."""
        translate = self.earlier.get(revision)
        if translate is None:
            return config
        text = translate(problem, config)
        try:
            return str(self.Config.parse(text))  # words in the order of the fields
        except InvalidConfig:
            return text  # for whoever reads it to refuse

    def read(self, p: P, text: str, gpu: GpuSpec) -> C:
        """The config that a caller names.

        Raises:
            InvalidConfig: the rule it breaks; where ``text`` is in the words of an earlier revision, today's too.
        """
        try:
            return self.check(p, self.Config.parse(text), gpu)
        except InvalidConfig as error:
            for revision in self.earlier:
                try:
                    now = self.check(p, self.Config.parse(self.spell(revision, str(p), text)), gpu)
                except InvalidConfig:
                    continue
                raise InvalidConfig(f"{error}. Revision {revision} spelled it so; now write [{now}]") from None
            raise

    def check(self, p: P, c: C, gpu: GpuSpec) -> C:
        """``c`` itself, or InvalidConfig with the rule it breaks."""
        reason = self.why_not(p, c, gpu)
        if reason is not None:
            raise InvalidConfig(f"{self.name} [{p}] on {gpu.name} cannot take [{c}]: {reason}")
        return c

    def valid(self, p: P, gpu: GpuSpec) -> Iterator[C]:
        """Every config that ``why_not`` accepts, in the space's fixed order."""
        return (c for c in self.Config.every() if self.why_not(p, c, gpu) is None)
