"""An op over declared operands: all that follows from them, whichever language its kernels are written in.

What remains to an op: its problem and config, its kernels, its rules, default and reference, and what is special about
it (hooks below, each with what most ops want).
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

from cutekernels.errors import UnsupportedProblem
from cutekernels.op import C, Op, P, Scalar, Work
from cutekernels.ops.shared.checks import check_dtype, check_tensor, kinds_of
from cutekernels.ops.shared.dtypes import BYTES, GPU_DTYPES, TYPES, WIDEST_BYTES
from cutekernels.ops.shared.laid_out import place_as
from cutekernels.ops.shared.operands import Leads, Looks, Named, Operand, Sizes, bits_of, shape_of, sizes_of
from cutekernels.ops.shared.strides import overlaps_itself

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from cutekernels.gpu import GpuSpec
    from cutekernels.ops.shared.paths import CallCache, Path

_SCHEMA_TYPES = {"fp32": "float", "i32": "int", "i64": "SymInt"}


class DeclaredOp(Op[P, C]):
    """An op called with tensors, compile-time options and run-time numbers, in this order.

    Its tensors are :class:`~cutekernels.ops.shared.operands.Operand` attributes of its class. Its launch takes
    ``(*results, *inputs, *scalars)``; an absent optional tensor is None. ``options`` are fields of its Problem.

    A declaration has no state but its cache of calls and the extents of the last one, which is replaced whole: any
    thread may ask it, and call it.
    """

    results: ClassVar[tuple[str, ...]]
    inputs: ClassVar[tuple[str, ...]]
    options: ClassVar[tuple[str, ...]] = ()
    scalars: ClassVar[tuple[str, ...]] = ()
    schema: ClassVar[str]
    in_place: ClassVar[bool] = True
    """Whether a result may be an input itself, element upon element. No other overlap is ever allowed."""
    in_place_pairs: ClassVar[frozenset[tuple[str, str]] | None] = None
    """The results, each with the input that it may be, where ``in_place`` is not for any input."""
    path: Path
    """``path(*inputs, *options, *scalars, config)``: the results, differentiable. Set where the op is registered."""

    scalar_types: ClassVar[Mapping[str, str]] = {}
    """Numbers of a call and their types."""
    scalar_samples: ClassVar[Mapping[str, float]] = {}
    operands: ClassVar[dict[str, Operand]] = {}
    beyond: ClassVar[tuple[str, ...]] = ()
    """Options that may have values beyond a problem's where no kernel runs."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        declared = ({n: v for n, v in vars(base).items() if isinstance(v, Operand)} for base in cls.__mro__)
        if own := next(filter(None, declared), None):  # of the first class that declares some: a family's part may
            cls.operands = dict(sorted(own.items(), key=lambda item: not item[1].result))
            cls.results = tuple(name for name, operand in cls.operands.items() if operand.result)
            cls.inputs = tuple(name for name, operand in cls.operands.items() if not operand.result)
        cls.scalars = tuple(cls.scalar_types)
        if cls.operands and hasattr(cls, "Problem") and "schema" not in vars(cls):
            kinds = {f.name: f.type for f in fields(cls.Problem)}
            words = [f"Tensor{'?' if cls.operands[name].optional else ''} {name}" for name in cls.inputs]
            words += [f"{kinds[name]} {name}" for name in cls.options]
            words += [f"{_SCHEMA_TYPES[kind]} {name}" for name, kind in cls.scalar_types.items()]
            cls.schema = ", ".join(words)

    def __init__(self) -> None:
        self.kinds = kinds_of(self.schema)
        self.others = [kind for kind in self.kinds if not kind[0].startswith("Tensor")]
        self._last_pose: Any = ((), {}, {})

    @cached_property
    def calls(self) -> CallCache:
        """Its calls that repeat."""
        from cutekernels.ops.shared.paths import CallCache

        return CallCache()

    # -- hooks

    def derive(self, sizes: Sizes, **options: Any) -> None:
        """Adds extents that follow from others and from options. Raises ValueError where those given contradict."""

    def refuse(self, named: Named, sizes: Sizes, **options: Any) -> None:
        """Raises UnsupportedProblem for what is special about the op."""

    def check_indices(self, inputs: Any, *, on_gpu: bool = False, **options: Any) -> None:
        """Refuses wrong values of index tensors that the CPU would read, or of all, as the GPU reads them."""

    def facts(self, named: Named, sizes: Sizes) -> Mapping[str, Scalar]:
        """Fields of the problem that do not follow from the operands' declarations."""
        return {}

    def draw_scalars(self, p: P, generator: torch.Generator) -> tuple[Any, ...]:
        """A sample's numbers."""
        return tuple([self.scalar_samples[name] for name in self.scalars])

    def missing(self, p: P) -> tuple[str, ...]:
        """Axes that may be missing and are, in ``p``."""
        return ()

    def leads_in(self, p: P) -> dict[str, tuple[int, ...]]:
        """The leading dimensions that a sample has in the place of flattened axes; by default one for each."""
        return {}

    def draw(self, p: P, name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor | None:
        """Random values of input ``name``, contiguous; None for standard normal ones."""
        return None

    def arrange(self, p: P, name: str, values: Tensor) -> Tensor:
        """A sample's ``values`` of the laid input ``name`` in memory that poses ``p``."""
        return place_as(values, p)

    def place(self, p: P, name: str, result: Tensor) -> Tensor:
        """Memory for ``result`` that lies as ``p`` says."""
        operand, pitch = self.operands[name], 0
        if hasattr(p, "pitch") and operand.laid and operand.strides and result.dim() > 1:
            pitch = p.pitch(result.shape[-1], result.element_size())
        if pitch <= result.shape[-1]:
            return result
        return result.new_empty((*result.shape[:-1], pitch))[..., : result.shape[-1]]

    def result(self, name: str, named: Named, sizes: Sizes, leads: Leads, **options: Any) -> Looks:
        """The shape of result ``name``, and the types it may have: the first one where it is allocated here."""
        operand = self.operands[name]
        return shape_of(operand, sizes, leads), self.types_of(operand.dtype, self._dtype(named, options))

    @abstractmethod
    def evaluate(self, *args: Any, **options: Any) -> tuple[Tensor, ...]:
        """The mathematics in plain PyTorch on ``(*inputs, *scalars)``: in fp32 or better, rounded once."""

    # -- from tensors to problems

    def results_of(self, **options: Any) -> tuple[str, ...]:
        """The results of a call: all of them, unless options say otherwise. A call may be given the first ones."""
        return self.results

    def serving(self, inputs: Sequence[Tensor | None]) -> DeclaredOp[Any, Any]:
        """The op that plans and launches admitted ``inputs``: this one, or another of the same operands and options."""
        return self

    def views(self, named: Named, **options: Any) -> Mapping[str, Callable[[Tensor], Tensor] | None]:
        """Functions from operands, by their names, to the views that stand in for them; None for one taken as it is."""
        return {}

    def takes(self, name: str, t: Tensor) -> bool:
        """Whether kernels take operand ``name`` as ``t`` lies; else a contiguous copy stands in for it."""
        return self.operands[name].taken(t)

    def _by_name(self, inputs: Sequence[Any], results: Sequence[Any] = (), **options: Any) -> dict[str, Tensor | None]:
        names = (*self.results_of(**options)[: len(results)], *self.inputs)
        return dict(zip(names, (*results, *inputs), strict=True))

    def _integers(self, options: Mapping[str, Any]) -> Sizes:
        import torch

        kinds: Any = (int, torch.SymInt)
        return {name: n for name, n in options.items() if isinstance(n, kinds) and not isinstance(n, bool)}

    def _pose(self, named: Named, **options: Any) -> tuple[Sizes, dict[str, torch.Size]]:
        """Extents and leading dimensions of the inputs, what follows from them included."""
        import torch

        given = {name: named[name] for name in self.inputs if name in named}
        plain = (torch.Tensor, torch.nn.Parameter)
        # Each step of a first call asks: the last answer is kept. Comparing extents of fakes would make guards.
        asked = [(name, None if t is None else t.shape) for name, t in given.items()], options
        keeps = all(t is None or type(t) in plain for t in given.values())
        kept = self._last_pose
        if not keeps or kept[0] != asked:
            declared = {name: self.operands[name] for name in given}
            derive = partial(self.derive, **options)
            kept = asked, *sizes_of(self.name, declared, given, self._integers(options), derive)
            self._last_pose = kept if keeps else self._last_pose
        return dict(kept[1]), kept[2]

    def types_of(self, dtype: str, main: torch.dtype) -> tuple[torch.dtype, ...]:
        """Types of an operand's ``dtype``."""
        if "|" in dtype:
            return tuple([kind for each in dtype.split("|") for kind in self.types_of(each, main)])
        if dtype in TYPES:
            return (TYPES[dtype],)
        if dtype == "dtype":
            return (main,)
        import torch

        wide = torch.float64 if main == torch.float64 else torch.float32
        if dtype == "wide":
            return (wide,)
        if dtype == "sums":
            return (torch.float32, torch.float64)
        values = self.Problem.__dataclass_fields__[dtype].metadata["values"]
        kinds = {"same": (main,), "fp32": (wide, torch.float32)}
        return tuple([t for value in values if value != "none" for t in kinds.get(value) or (TYPES[value],)])

    def _main(self, named: Named) -> Tensor:
        """The operand whose type is the op's: the first one declared so, inputs before results, else the first."""
        names = [name for name in (*self.inputs, *self.results) if named.get(name) is not None]
        found = named[next((name for name in names if self.operands[name].dtype == "dtype"), names[0])]
        assert found is not None
        return found

    def _dtype(self, named: Named, options: Mapping[str, Any]) -> torch.dtype:
        """The type of the op: its option ``dtype``, or that of the main operand."""
        return TYPES[options["dtype"]] if "dtype" in options else self._main(named).dtype

    def admit(self, inputs: Sequence[Tensor | None], results: Sequence[Tensor] = (), **options: Any) -> None:
        """Raises UnsupportedProblem for operands that pose no problem. Called on the CPU and with fakes too."""
        named = self._by_name(inputs, results, **options)
        named = {name: named[name] for name in (*self.inputs, *named)}  # inputs are looked at first
        for name, t in named.items():
            check_tensor(self.name, name, t, optional=self.operands[name].optional)
        main = self._main(named)
        self._check_options(main, options)
        if "dtype" not in options and any(operand.dtype == "dtype" for operand in self.operands.values()):
            check_dtype(self, main)
        dtype = self._dtype(named, options)
        for name, t in named.items():
            if t is None:
                continue
            allowed = self.types_of(self.operands[name].dtype, dtype)
            if self.operands[name].dtype == "sums" and t.is_cuda:
                allowed = allowed[:1]
            if t.dtype not in allowed:
                kinds = " or ".join(str(kind).removeprefix("torch.") for kind in dict.fromkeys(allowed))
                raise UnsupportedProblem(f"{self.name} takes {name} in {kinds}; got {t.dtype}: convert it")
            if t.device != main.device:
                raise UnsupportedProblem(
                    f"{self.name} takes operands of one device; {name} is on {t.device}, not {main.device}: move it"
                )
        sizes, leads = self._pose(named, **options)
        self.refuse(named, sizes, **options)
        for name, out in zip(self.results_of(**options), results, strict=False):
            shape, types = self.result(name, named, sizes, leads, **options)
            if out.shape != shape or out.dtype not in types:
                raise UnsupportedProblem(
                    f"{self.name}: {name} must be {tuple(shape)}, {types[0]}; it is {tuple(out.shape)}, {out.dtype}"
                )
            if overlaps_itself(out):
                raise UnsupportedProblem(
                    f"{name} must not overlap itself: an expanded tensor has one address for many elements"
                )

    def _check_options(self, main: Tensor, options: Mapping[str, Any]) -> None:
        for name in self.options:
            declared = self.Problem.__dataclass_fields__[name].metadata
            if "values" not in declared or (name in self.beyond and not main.is_cuda):
                continue
            given = options[name]
            if not any(given == v and (isinstance(v, str) or type(given) is type(v)) for v in declared["values"]):
                values = ", ".join(map(str, declared["values"]))
                raise UnsupportedProblem(f"{self.name}: {name} must be one of {values}; it is {options[name]!r}")

    def fresh(self, *inputs: Tensor | None, **options: Any) -> tuple[Tensor, ...]:
        """New results, contiguous, on the inputs' device (meta included)."""
        named = self._by_name(inputs, **options)
        main = self._main(named)
        sizes, leads = self._pose(named, **options)
        found = [self.result(name, named, sizes, leads, **options) for name in self.results_of(**options)]
        return tuple([main.new_empty(shape, dtype=types[0]) for shape, types in found])

    def problem(self, *operands: Tensor | None, **options: Any) -> P:
        """The problem that a launch's ``(*results, *inputs)`` pose. Raises UnsupportedProblem."""
        named = dict(zip((*self.results_of(**options), *self.inputs), operands, strict=True))
        main = self._main(named)
        sizes, _ = self._pose(named, **options)
        declared = self.Problem.__dataclass_fields__
        found: dict[str, Any] = {name: sizes[name] for name in declared if name in sizes}
        dtype = self._dtype(named, options)
        if "dtype" in declared and "dtype" not in options:
            taken = declared["dtype"].metadata["values"]
            if GPU_DTYPES.names.get(main.dtype) not in taken:
                raise UnsupportedProblem(f"{self.name} on a GPU takes {', '.join(taken)}; got {main.dtype}")
            found["dtype"] = GPU_DTYPES.names[main.dtype]
        for name, operand in self.operands.items():
            t = named.get(name)
            if operand.given is not None:
                field, _, word = operand.given.partition("=")
                found[field] = t is not None if not word else declared[field].default if t is None else word
            elif operand.dtype in declared and operand.dtype != "dtype":
                found[operand.dtype] = self._type_word(operand, t, dtype)
        # The words of an enum are those of its values.
        words = {name: str.__str__(option) for name, option in options.items() if isinstance(option, str)}
        found |= {**self.facts(named, sizes), **options, **words}
        return self.Problem(**found, **self.layout(named, sizes, found))

    def _type_word(self, operand: Operand, t: Tensor | None, main: torch.dtype) -> str:
        """The type of ``t`` as the operand's field of the problem has it: the first of its values that means that."""
        values = self.Problem.__dataclass_fields__[operand.dtype].metadata["values"]
        if t is None:
            return "none" if "none" in values else str(values[0])
        return next(str(v) for v in values if v != "none" and (main if v == "same" else TYPES[v]) == t.dtype)

    def layout(self, named: Named, sizes: Sizes, found: Mapping[str, Any]) -> dict[str, Scalar]:
        """The fields ``layout`` and ``align``, where the problem has them."""
        declared = {f.name: f for f in fields(self.Problem)}
        values = declared["layout"].metadata["values"] if "layout" in declared else ()
        laid = [(self.operands[name], t) for name, t in named.items() if self.operands[name].laid and t is not None]
        laid = [(operand, t) for operand, t in laid if t.numel()]
        if values and any(operand.walk(t)[-1] != 1 for operand, t in laid):
            return {"layout": "strided"}
        dense = "dense" in values and all(t.is_contiguous() for _, t in laid)
        layout: dict[str, Scalar] = {"layout": "dense" if dense else "rows"} if values else {}
        if "align" in declared:
            bits = WIDEST_BYTES
            aligned = getattr(self.Problem, "aligns_rows", None)
            if aligned is not None:
                bits |= sizes[aligned] * BYTES[found["dtype"]]
            for operand, t in laid:
                bits |= bits_of(operand, t, pitches=not dense)
            layout["align"] = bits & -bits
        return layout

    # -- what a problem looks like

    def options_of(self, p: P) -> dict[str, Any]:
        """A call's options."""
        return {name: getattr(p, name) for name in self.options}

    def kind(self, p: P, name: str) -> str | None:
        """The type of an operand's elements for the kernel; None for one that is absent."""
        operand = self.operands[name]
        if operand.given is not None:
            field, _, word = operand.given.partition("=")
            if getattr(p, field) != (word or True):
                return None
        if operand.major is not None and getattr(p, operand.major) == "none":
            return None
        if operand.dtype in TYPES or operand.dtype in ("wide", "sums"):
            return operand.dtype if operand.dtype in TYPES else "fp32"
        value: str = getattr(p, operand.dtype)
        return None if value == "none" else str(getattr(p, "dtype", None)) if value == "same" else value

    def sizes_in(self, p: P) -> Sizes:
        """Extents by name, as a problem has them."""
        sizes = {f.name: value for f in fields(p) if type(value := getattr(p, f.name)) is int}
        self.derive(sizes, **self.options_of(p))
        return sizes

    def outputs(self, p: P, *args: Any) -> tuple[Tensor, ...]:
        fresh = self.fresh(*args[: len(self.inputs)], **self.options_of(p))
        names = self.results_of(**self.options_of(p))
        return tuple([self.place(p, name, t) for name, t in zip(names, fresh, strict=True)])

    def sample(self, p: P, device: str, seed: int) -> tuple[Any, ...]:
        import torch

        generator = torch.Generator(device).manual_seed(seed)
        sizes, leads = self.sizes_in(p), self.leads_in(p)
        args: list[Any] = []
        for name in self.inputs:
            kind, operand = self.kind(p, name), self.operands[name]
            if kind is None:
                args.append(None)
                continue
            shape = shape_of(operand, sizes, leads, self.missing(p))
            values = self.draw(p, name, shape, generator)
            if values is None:
                values = torch.randn(shape, generator=generator, device=device, dtype=torch.float32)
            values = values.to(TYPES[kind])
            args.append(self.arrange(p, name, values) if operand.laid else values)
        return (*args, *self.draw_scalars(p, generator))

    def bytes(self, p: P) -> float:
        """Bytes of all operands, each moved once."""
        sizes, leads, total = self.sizes_in(p), self.leads_in(p), 0
        for name, operand in self.operands.items():
            kind = self.kind(p, name)
            if kind is not None:
                total += math.prod(shape_of(operand, sizes, leads)) * BYTES[kind]
        return float(total)

    def work(self, p: P) -> Work:
        return Work(flops=0.0, bytes=self.bytes(p))

    def default(self, p: P, gpu: GpuSpec) -> C:
        """The model's best of all that are valid: for small spaces."""
        return min(self.valid(p, gpu), key=lambda c: (self.estimate_us(p, c, gpu), str(c)))

    def update(self, results: Sequence[Tensor], args: Sequence[Any], **options: Any) -> tuple[Tensor, ...]:
        """A launch that writes to ``results``, in plain PyTorch on ``(*inputs, *scalars)``; returns the others."""
        made = self.evaluate(*args, **options)
        for place, value in zip(results, made, strict=False):
            place.copy_(value)
        return made[len(results) :]

    def reference(self, p: P, *args: Any) -> tuple[Tensor, ...]:
        return self.evaluate(*args, **{name: getattr(p, name) for name in self.options})


class Part:
    """The base of what ops of a family share: operands, rules, models, arguments of kernels. An op inherits from its
    family's part and from ``TritonOp`` or ``CuteOp`` side by side, and is four classes deep.

    To type checkers a part is an op, so that its methods may ask ``self``: see ``TritonPart`` and ``CutePart``. As it
    runs, ``Part[P, SomeConfig]`` is ``Generic[P]``, and of no type variables ``object``.
    """

    def __class_getitem__(cls, kinds: tuple[object, ...]) -> Any:
        free = tuple(kind for kind in kinds if isinstance(kind, TypeVar))
        return Generic[free] if free else object  # type: ignore[index]
