"""Rules as records, and the one engine that spans configs, filters them and takes the best.

A rule is a method; a decorator says what it reads, and its name is the method's. One of problems, or of an op of one
body (:class:`Ruled`, without ``x``), may return what is wrong, or None. Those of configs in a :class:`Schedule` are
expressions (``columns.py``), asked for one config or for all at once, and yield where they are broken with a message::

    class Multistage(Schedule):
        @of_config
        def most_warps(self, c, gpu, x):
            yield c.warps > 8, "{} warps are more than 8", c.warps

A subclass has its bases' rules in their order, replaces one by its name, and drops it by ``most_warps = None``. What a
rule reads decides when it is asked: a problem's once, a config's once for all problems (:meth:`Schedule.fitting` keeps
what passes), those of both for each problem. ``x`` is what a call asks beside the problem.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, NamedTuple, Self, TypeVar

from cutekernels import rates
from cutekernels.columns import Columns, round_off, smaller
from cutekernels.op import Config

if TYPE_CHECKING:
    from cutekernels.gpu import GpuSpec

Reads = Literal["problem", "config", "both"]
Broken = Iterable[tuple[Any, ...]]  # masks, each with a message and the values that it names
Among = Mapping[Any, tuple[Any, ...]]  # knobs confined to some values, as :meth:`Columns.spanned` takes them
EVERY: Among = {}
_MARK = "_reads"


class Rule(NamedTuple):
    """``why_not(schedule, *what it reads, gpu, x)`` is its message, or where it is broken."""

    name: str
    reads: Reads
    why_not: Callable[..., str | Broken | None]


F = TypeVar("F", bound=Callable[..., "str | Broken | None"])


def _reading(reads: Reads) -> Callable[[F], F]:
    def mark(function: F) -> F:
        setattr(function, _MARK, reads)
        return function

    return mark


of_problem, of_config, of_both = _reading("problem"), _reading("config"), _reading("both")

P = TypeVar("P")
C = TypeVar("C")
X = TypeVar("X")


class Ruled:
    """The owner of rules as methods: an op of one body, or a :class:`Schedule`."""

    rules: ClassVar[tuple[Rule, ...]] = ()
    _of: ClassVar[dict[str, tuple[Callable[..., str | Broken | None], ...]]] = {}

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        found: dict[str, Rule | None] = {}
        for base in reversed(cls.__mro__):
            for name, value in vars(base).items():
                if (reads := getattr(value, _MARK, None)) is not None:
                    found[name] = Rule(name, reads, value)
                elif name in found and value is None:
                    found[name] = None
        cls.rules = tuple(rule for rule in found.values() if rule is not None)
        cls._of = {r: tuple(x.why_not for x in cls.rules if x.reads == r) for r in ("problem", "config", "both")}

    def why_not(self, p: Any, c: Any, gpu: GpuSpec, *x: Any) -> str | None:
        """The first rule that ``c`` breaks for ``p`` on ``gpu``, in words."""
        return next(self.failures(p, c, gpu, *x), None)

    def failures(self, p: Any, c: Any, gpu: GpuSpec, *x: Any) -> Iterator[str]:
        """A message for each broken rule."""
        yield from self.failures_of("problem", p, gpu, *x)
        yield from self.failures_of("config", c, gpu, *x)
        yield from self.failures_of("both", p, c, gpu, *x)

    def failures_of(self, reads: Reads, *read: Any) -> Iterator[str]:
        """Failures of the rules that read exactly ``read``: ``p``, ``c`` or both, then ``gpu`` and ``x``."""
        for rule in self._of[reads]:
            found = rule(self, *read)
            if isinstance(found, str):
                yield found
            elif found is not None:
                yield from (text.format(*values) for broken, text, *values in found if broken)


class Schedule(Ruled, ABC, Generic[P, C, X]):
    """Configs of one body: their knobs, rules and model. One frozen object each."""

    name: ClassVar[str]
    """Its value of the config's ``body``."""
    config: ClassVar[Any]
    """The class of its configs: a :class:`BodiesConfig`, unless ``span`` and ``foreign_knobs`` are its own."""
    narrowed: ClassVar[Among] = EVERY
    """Values of knobs in place of the config's ``bodies``."""

    # -- rules

    def failures(self, p: P, c: C, gpu: GpuSpec, *x: X) -> Iterator[str]:
        """A message for each knob of another body and each broken rule."""
        yield from self.foreign_knobs(c)
        yield from self.failures_of("problem", p, gpu, *x)
        yield from self.failures_of("config", c, gpu, *(self.class_of(p, own) for own in x))
        yield from self.failures_of("both", p, c, gpu, *x)

    def class_of(self, p: P, x: X) -> Any:
        """A stand-in for ``x`` that rules of configs read: the same for as many problems as may be."""
        return x

    def foreign_knobs(self, c: C) -> Iterator[str]:
        """The knobs of ``c`` whose values belong to other bodies (:func:`foreign`): none of a spanned config."""
        return c.foreign(self.narrowed)  # type: ignore[attr-defined, no-any-return]

    def refusal(self, p: P, gpu: GpuSpec, x: X) -> str | None:
        """Why no config of this body takes ``p``, as far as ``p`` alone can tell."""
        return next(self.failures_of("problem", p, gpu, x), None)

    def unbroken(self, reads: Reads, c: Columns, *read: Any) -> Any:
        """A mask of those that keep all rules that read as much."""
        import numpy as np

        kept = np.ones(len(c), bool)
        for rule in self._of[reads]:
            for broken, *_ in rule(self, *read) or ():  # type: ignore[str-unpack]
                kept &= np.logical_not(broken)
        return kept

    # -- the engine

    def span(self, among: Among = EVERY) -> Columns:
        """Every config in a fixed order, some knobs confined to ``among``."""
        return self.config.span(self.name, {**self.narrowed, **among})  # type: ignore[no-any-return]

    def fitting(self, gpu: GpuSpec, x: X, among: Among = EVERY) -> Columns:
        """The configs that no rule of configs forbids."""
        return _fitting(self, gpu, x, tuple(among.items()))

    def suiting(self, p: P, gpu: GpuSpec, x: X, c: Columns) -> Any:
        """A mask of those that no rule between problems and configs forbids."""
        return self.unbroken("both", c, p, c, gpu, x)

    def valid(self, p: P, gpu: GpuSpec, x: X) -> Iterator[C]:
        """The configs that no rule forbids."""
        if self.refusal(p, gpu, x) is None:
            fitting = self.fitting(gpu, self.class_of(p, x))
            yield from map(self.drawn, fitting.taken(self.suiting(p, gpu, x, fitting)))

    def drawn(self, c: Any) -> C:
        """A config of :meth:`spanned` as the op has it."""
        return c  # type: ignore[no-any-return]

    @abstractmethod
    def times_us(self, p: P, c: Any, gpu: GpuSpec, x: X) -> Any:
        """The model: an expression."""

    def estimate_us(self, p: P, c: Any, gpu: GpuSpec, x: X) -> Any:
        """The model's time of a config, or of columns, as times are compared."""
        return round_off(self.times_us(p, c, gpu, x))

    # -- choice

    def usual(self, p: P, gpu: GpuSpec, x: X) -> Among:
        """Values of knobs that the default is chosen among; the rules ask again."""
        return {}

    def usually(self, p: P, c: Columns, gpu: GpuSpec, x: X) -> Any:
        """A mask of those of them that the default may be."""
        return True

    def preference(self, p: P, c: Any, x: X) -> tuple[Any, ...]:
        """Expressions by which configs of one estimate are told apart, the least preferred; then their texts are."""
        return ()

    def text(self, p: P, c: C) -> str:
        """The properties that tell apart the last."""
        return str(c)

    def candidates(self, p: P, gpu: GpuSpec, x: X) -> tuple[Columns, Any]:
        """Configs that the default is chosen among, and a mask of those that may be."""
        c = self.fitting(gpu, self.class_of(p, x), self.usual(p, gpu, x))
        return c, self.suiting(p, gpu, x, c) & self.usually(p, c, gpu, x)

    def best(self, p: P, gpu: GpuSpec, x: X) -> tuple[float, C] | None:
        """The model's time and choice; None where the body does not take ``p``."""
        if self.refusal(p, gpu, x) is not None:
            return None
        c, kept = self.candidates(p, gpu, x)
        return self.least(p, c, x, kept, self.estimate_us(p, c, gpu, x)) if kept.any() else None

    def least(self, p: P, c: Columns, x: X, kept: Any, us: Any) -> tuple[float, C]:
        """The least of ``us`` among those ``kept``, with its config, the preferred one of equals."""
        import numpy as np

        us = np.where(kept, us, np.inf)
        tied = c.taken(us == us.min())
        rows = np.arange(len(tied))
        for key in self.preference(p, tied, x):
            own = np.broadcast_to(key, len(tied))[rows]
            rows = rows[own == own.min()]
        return float(us.min()), min(map(self.drawn, tied.taken(rows)), key=lambda c: self.text(p, c))


class BodiesConfig(Config):
    """Config of several bodies: ``bodies`` has each one's knobs and their values; of others it takes the first."""

    bodies: ClassVar[Mapping[str, Mapping[str, tuple[Any, ...]]]]
    body: str

    @classmethod
    @cache
    def values(cls, body: str) -> dict[str, tuple[Any, ...]]:
        """Values of every knob under ``body``."""
        return values_of(cls, **cls.bodies[body], body=(body,))

    @classmethod
    def span(cls, body: str, among: Among = EVERY) -> Columns:
        """Every config of ``body``, some knobs confined to ``among``."""
        together = [name for key in among if isinstance(key, tuple) for name in key]
        own = {name: values for name, values in cls.values(body).items() if name not in together}
        return Columns.span(cls, own | dict(among))

    @classmethod
    def every(cls) -> Iterator[Self]:
        """The whole space: each body's own."""
        for body in cls.bodies:
            yield from cls.span(body)

    def foreign(self, narrowed: Among = EVERY) -> Iterator[str]:
        """The knobs whose values belong to other bodies than its own; ``narrowed`` replaces those of some knobs."""
        return foreign(self, {**self.values(self.body), **narrowed})


def values_of(kind: Any, **own: tuple[Any, ...]) -> dict[str, tuple[Any, ...]]:
    """Values of all knobs of a config, in the order of its fields: a body's ``own``, or the first alone."""
    return {name: own.get(name, values[:1]) for name, values in kind.space().items()}


def foreign(c: Any, values: Mapping[str, tuple[Any, ...]]) -> Iterator[str]:
    """The knobs of ``c`` that have none of these values."""
    for name, allowed in values.items():
        if (value := getattr(c, name)) not in allowed:
            yield f"body={c.body} takes {name} from {', '.join(map(str, allowed))}; it is {value}"


@rates.remember
def _fitting(schedule: Schedule[Any, Any, Any], gpu: GpuSpec, x: Any, among: tuple[Any, ...]) -> Columns:
    c = schedule.span(dict(among))
    return c.taken(schedule.unbroken("config", c, c, gpu, x))


# ---- rules that several ops have in common ----------------------------------------------------------------


def occupancy_rules(gpu: GpuSpec, *, ctas: Any, most: int, warps: Any, registers: Any, smem: Any) -> Broken:
    """The rules that ``ctas`` CTAs on an SM break: they fit, and up to ``most`` no further one would."""
    yield from overflows(gpu, ctas=ctas, warps=warps, registers=registers, smem=smem)
    full: Any = False
    for broken, *_ in overflows(gpu, ctas=ctas + 1, warps=warps, registers=registers, smem=smem):
        full = full | broken
    room = (ctas < most) & (full == 0)
    yield room, "ctas_per_sm={} leaves room for one more CTA on an SM: take {}", ctas, ctas + 1


def overflows(gpu: GpuSpec, *, ctas: Any, warps: Any, registers: Any, smem: Any) -> Broken:
    """The resources of an SM that ``ctas`` CTAs exceed; ``registers`` per thread, ``smem`` bytes per CTA."""
    left = smaller(gpu.MAX_REGISTERS_PER_THREAD, gpu.REGISTERS_PER_SM // (32 * warps * ctas))
    threads, block, whole = 32 * warps, gpu.smem_per_block_bytes, gpu.smem_per_sm_bytes
    yield registers > left, "a thread needs about {} registers; {} CTAs of {} leave {}", registers, ctas, threads, left
    yield smem > block, "{} bytes of shared memory are more than a block's {}", smem, block
    beyond = ctas * (smem + gpu.SMEM_RESERVED_BYTES) > whole
    yield beyond, "{} CTAs of {} bytes of shared memory exceed an SM's {}", ctas, smem, whole
    yield ctas * warps > gpu.max_warps, "{} CTAs of {} warps exceed an SM's {}", ctas, warps, gpu.max_warps


def no_warpgroups(schedule: object, p: object, gpu: GpuSpec, x: object) -> str | None:
    """The rule, of problems, of kernels by TMA and warpgroup MMA."""
    return None if gpu.has_tma and gpu.has_wgmma else f"{gpu.name} has no warpgroup MMA"
