"""An op over declared operands with a Triton kernel. All that follows from the operands is derived here.

What remains to an op: its problem and config, ``constants``, ``grid``, its rules, default and reference, and what is
special about it (hooks below, each with what most ops want).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar

from cutekernels.errors import UnsupportedProblem
from cutekernels.op import C, P, Scalar, Work
from cutekernels.ops.shared.checks import check_dtype, check_tensor
from cutekernels.ops.shared.dtypes import BYTES, GPU_DTYPES, TYPES, WIDEST_BYTES
from cutekernels.ops.shared.operands import (
    Leads,
    Looks,
    Named,
    Operand,
    Sizes,
    bits_of,
    misfit,
    shape_of,
    sizes_of,
)
from cutekernels.ops.shared.strides import overlaps_itself
from cutekernels.ops.shared.tensor_op import Launch, TensorOp
from cutekernels.rules import Ruled

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from cutekernels.backends import Artifact
    from cutekernels.gpu import GpuSpec

_SCHEMA_TYPES = {"fp32": "float", "i32": "int", "i64": "SymInt"}


class LaidOut:
    """The part of a problem that says how its operands lie: mixed into problems with these fields.

    ``layout``: "dense", where a problem has that, if all operands are contiguous and their rows one long one; "rows"
    where the elements of each row are contiguous; "strided" for the rest. ``align``: bytes that divide the address and
    pitch of every laid operand (dense: the address); nothing depends on it where the layout is strided.
    """

    dtype: str
    layout: str
    align: int
    aligns_rows: ClassVar[str | None] = None
    """The extent whose bytes ``align`` divides too: a row's length, where kernels assume it."""

    most: ClassVar[Mapping[str, int]] = {}
    """The largest extents, by name, that grids and offsets allow."""

    def __post_init__(self) -> None:
        super().__post_init__()  # type: ignore[misc]
        for name, limit in self.most.items():
            if getattr(self, name) > limit:
                raise UnsupportedProblem(f"{name} is at most {limit}; it is {getattr(self, name)}: split the call")
        if self.align < self.itemsize:
            raise UnsupportedProblem(
                f"align covers one element of {self.dtype}, {self.itemsize} bytes; it is {self.align}"
            )
        if self.aligns_rows is not None:
            row = getattr(self, self.aligns_rows) * self.itemsize
            if self.layout == "strided" and self.align != WIDEST_BYTES:
                raise UnsupportedProblem(
                    f"nothing depends on align in a strided layout: leave it at 16; it is {self.align}"
                )
            if self.layout != "strided" and row % self.align:
                raise UnsupportedProblem(f"rows of {row} bytes are not aligned to {self.align}: lower align")

    @property
    def itemsize(self) -> int:
        return BYTES[self.dtype]

    @property
    def vec(self) -> int:
        """Elements in one access."""
        return 1 if self.layout == "strided" else self.align // self.itemsize

    def pitch(self, cols: int, itemsize: int) -> int:
        """Elements from row to row of ``cols`` elements in memory that lies as promised."""
        vec = 1 if self.layout in ("dense", "strided") else max(1, self.align // itemsize)
        return -(-cols // vec) * vec


class TritonOp(Ruled, TensorOp[P, C]):
    """An op whose tensors are :class:`~cutekernels.ops.shared.operands.Operand` attributes of its class.

    The kernel's values, in this order: ``<operand>_ptr`` of results and inputs, the ``sizes``, ``<operand>_<stride>``
    of each, the ``scalars``, the ``extras``, constexprs. It takes them in NamedTuples or one by one, see
    :class:`~cutekernels.backends.triton.Values`.
    """

    kernel: ClassVar[str]
    """``module:function`` in ``cutekernels.kernels.triton``."""
    sizes: ClassVar[Mapping[str, str]]
    """Run-time numbers of the kernel and their types; :meth:`numbers` has their values."""
    scalar_types: ClassVar[Mapping[str, str]] = {}
    """Numbers of a call and their types."""
    scalar_samples: ClassVar[Mapping[str, float]] = {}
    extras: ClassVar[Mapping[str, str]] = {}
    """Parameters behind the scalars, and their types, that only an op's own ``bind`` passes: a workspace, a phase."""
    operands: ClassVar[dict[str, Operand]] = {}
    flattens = False  # each operand says for itself, in ``takes``

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        own = {name: value for name, value in vars(cls).items() if isinstance(value, Operand)}
        if own:
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

    # -- hooks

    def grid(self, p: P, c: C) -> tuple[int, int, int]:
        """Programs along each axis."""
        raise NotImplementedError

    def constants(self, p: P, c: C) -> Mapping[str, int | bool | str]:
        """The kernel's constexprs, but for those that follow from operands."""
        raise NotImplementedError

    def numbers(self, p: P, c: C) -> tuple[int, ...]:
        """The values of ``sizes``: the problem's fields of those names. But for those :meth:`measured`."""
        return tuple([getattr(p, name) for name in self.sizes])

    def measure_sizes(self, named: Mapping[str, Tensor | None]) -> tuple[int, ...]:
        """The values of the last ``sizes`` where those are extents of operands that the problem does not have."""
        return ()

    def divisible(self, p: P, c: C) -> dict[str, int]:
        """Divisors of ``sizes`` that kernels may assume."""
        return {}

    def derive(self, sizes: Sizes) -> None:
        """Adds extents that follow from others. Raises ValueError where those given contradict."""

    def refuse(self, named: Mapping[str, Tensor | None], sizes: Sizes, **options: Any) -> None:
        """Raises UnsupportedProblem for what is special about the op."""

    def facts(self, named: Mapping[str, Tensor | None], sizes: Sizes) -> Mapping[str, Scalar]:
        """Fields of the problem that do not follow from the operands' declarations."""
        return {}

    def leads_in(self, p: P) -> dict[str, tuple[int, ...]]:
        """The leading dimensions that a sample has in the place of flattened axes; by default one for each."""
        return {}

    def draw(self, p: P, name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor | None:
        """Random values of input ``name``, contiguous; None for standard normal ones."""
        return None

    def arrange(self, p: P, name: str, values: Tensor) -> Tensor:
        """A sample's ``values`` of the laid input ``name`` in memory that poses ``p``."""
        return place_as(values, p)

    def strides(self, p: P, name: str, t: Tensor) -> Sequence[int]:
        """The strides of operand ``name`` that the kernel gets."""
        return self.operands[name].walk(t)

    def result(self, name: str, named: Named, sizes: Sizes, leads: Leads, **options: Any) -> Looks:
        """The shape of result ``name``, and the types it may have: the first one where it is allocated here."""
        operand = self.operands[name]
        return shape_of(operand, sizes, leads), self._type(operand, self._main(named).dtype)

    def build_options(self, p: P, c: C) -> dict[str, Any]:
        """Options of Triton's compiler."""
        return {"num_warps": c.warps}  # type: ignore[attr-defined]

    # -- from tensors to problems

    def takes(self, name: str, t: Tensor) -> bool:
        return self.operands[name].taken(t)

    def _by_name(self, inputs: Sequence[Any], results: Sequence[Any] = ()) -> dict[str, Tensor | None]:
        names = (*(self.results if results else ()), *self.inputs)
        return dict(zip(names, (*results, *inputs), strict=True))

    def _integers(self, options: Mapping[str, Any]) -> Sizes:
        return {name: value for name, value in options.items() if type(value) is int}

    def _pose(self, named: Mapping[str, Tensor | None], **options: Any) -> tuple[Sizes, dict[str, torch.Size]]:
        """Extents and leading dimensions of the inputs, what follows from them included."""
        declared, known = {name: self.operands[name] for name in named}, self._integers(options)
        read = {name: t for name, t in named.items() if not self.operands[name].result}
        sizes, leads = sizes_of(self.name, {name: declared[name] for name in read}, read, known)
        try:
            self.derive(sizes)
        except ValueError as error:
            raise UnsupportedProblem(f"{misfit(self.name, declared, named, known)}: {error}") from None
        return sizes, leads

    def _type(self, operand: Operand, main: torch.dtype) -> tuple[torch.dtype, ...]:
        """Types that ``operand`` may have."""
        if operand.dtype in TYPES:
            return (TYPES[operand.dtype],)
        if operand.dtype == "dtype":
            return (main,)
        import torch

        wide = torch.float64 if main == torch.float64 else torch.float32
        if operand.dtype == "wide":
            return (wide,)
        values = self.Problem.__dataclass_fields__[operand.dtype].metadata["values"]
        kinds = {"same": (main,), "fp32": (wide, torch.float32)}
        return tuple([t for value in values if value != "none" for t in kinds.get(value) or (TYPES[value],)])

    def _main(self, named: Mapping[str, Tensor | None]) -> Tensor:
        """The operand whose type is the op's: the first one declared so, inputs before results, else the first."""
        given = [(self.operands[name], t) for name, t in named.items() if t is not None]
        given.sort(key=lambda item: item[0].result)
        return next((t for o, t in given if o.dtype == "dtype"), given[0][1])

    def admit(self, inputs: Sequence[Tensor | None], results: Sequence[Tensor] = (), **options: Any) -> None:
        named = self._by_name(inputs, results)
        named = {name: named[name] for name in (*self.inputs, *named)}  # inputs are looked at first
        for name, t in named.items():
            check_tensor(self.name, name, t, optional=self.operands[name].optional)
        main = self._main(named)
        if any(operand.dtype == "dtype" for operand in self.operands.values()):
            check_dtype(self, main)
        for name, t in named.items():
            if t is None:
                continue
            allowed = self._type(self.operands[name], main.dtype)
            if t.dtype not in allowed:
                kinds = " or ".join(str(kind).removeprefix("torch.") for kind in dict.fromkeys(allowed))
                raise UnsupportedProblem(f"{self.name} takes {name} in {kinds}; got {t.dtype}: convert it")
            if t.device != main.device:
                raise UnsupportedProblem(
                    f"{self.name} takes operands of one device; {name} is on {t.device}, not {main.device}: move it"
                )
        for name in self.options:
            declared = self.Problem.__dataclass_fields__[name].metadata
            if "values" in declared and not any(
                options[name] == v and type(options[name]) is type(v) for v in declared["values"]
            ):
                values = ", ".join(map(str, declared["values"]))
                raise UnsupportedProblem(f"{self.name}: {name} must be one of {values}; it is {options[name]!r}")
        sizes, leads = self._pose(named, **options)
        self.refuse(named, sizes, **options)
        for name, out in zip(self.results, results, strict=bool(results)):
            shape, types = self.result(name, named, sizes, leads, **options)
            if out.shape != shape or out.dtype not in types:
                raise UnsupportedProblem(
                    f"{self.name} writes {name} {tuple(shape)} in {types[0]}; got {tuple(out.shape)} in {out.dtype}"
                )
            if overlaps_itself(out):
                raise UnsupportedProblem(
                    f"{name} must not overlap itself: an expanded tensor has one address for many elements"
                )

    def fresh(self, *inputs: Tensor | None, **options: Any) -> tuple[Tensor, ...]:
        named = self._by_name(inputs)
        main = self._main(named)
        sizes, leads = self._pose(named, **options)
        found = [self.result(name, named, sizes, leads, **options) for name in self.results]
        return tuple([main.new_empty(shape, dtype=types[0]) for shape, types in found])

    def problem(self, *operands: Tensor | None, **options: Any) -> P:
        named = dict(zip((*self.results, *self.inputs), operands, strict=True))
        main = self._main(named)
        sizes, _ = self._pose(named, **options)
        declared = self.Problem.__dataclass_fields__
        found: dict[str, Any] = {name: sizes[name] for name in declared if name in sizes}
        if "dtype" in declared:
            if main.dtype not in GPU_DTYPES.names:
                raise UnsupportedProblem(
                    f"{self.name} on a GPU takes {', '.join(GPU_DTYPES.names.values())}; got {main.dtype}"
                )
            found["dtype"] = GPU_DTYPES.names[main.dtype]
        for name, operand in self.operands.items():
            t = named[name]
            if operand.given is not None:
                found[operand.given] = t is not None
            elif operand.dtype in declared and operand.dtype != "dtype":
                found[operand.dtype] = self._type_word(operand, t, main.dtype)
        found |= {**self.facts(named, sizes), **options}
        return self.Problem(**found, **self.layout(named, sizes, found))

    def _type_word(self, operand: Operand, t: Tensor | None, main: torch.dtype) -> str:
        """The type of ``t`` as the operand's field of the problem has it: the first of its values that means that."""
        values = self.Problem.__dataclass_fields__[operand.dtype].metadata["values"]
        if t is None:
            return "none" if "none" in values else str(values[0])
        return next(str(v) for v in values if v != "none" and (main if v == "same" else TYPES[v]) == t.dtype)

    def layout(self, named: Mapping[str, Tensor | None], sizes: Sizes, found: Mapping[str, Any]) -> dict[str, Scalar]:
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

    # -- kernels

    def kind(self, p: P, name: str) -> str | None:
        """The type of an operand's elements for the kernel; None for one that is absent."""
        operand = self.operands[name]
        if operand.given is not None and not getattr(p, operand.given):
            return None
        if operand.dtype in TYPES or operand.dtype == "wide":
            return "fp32" if operand.dtype == "wide" else operand.dtype
        value: str = getattr(p, operand.dtype)
        return None if value == "none" else str(getattr(p, "dtype", None)) if value == "same" else value

    def launch_arguments(self, p: P, c: C) -> tuple[dict[str, str], dict[str, Any], dict[str, int]]:
        """A launch's arguments: their types in order, the values that ``p`` tells of some, and divisors of others."""
        signature: dict[str, str] = {}
        constants: dict[str, Any] = {}
        divisible = self.divisible(p, c)
        promised = getattr(p, "align", 1) if getattr(p, "layout", "") != "strided" else None
        kinds = {name: self.kind(p, name) for name in self.operands}
        for name, kind in kinds.items():
            # Kernels make e4m3's bits themselves: Triton does not convert to it on every GPU.
            signature[f"{name}_ptr"] = "*u8" if kind == "fp8" else f"*{kind}"
            if kind is None:
                constants[f"{name}_ptr"] = 0
            elif self.operands[name].laid and promised is not None:
                divisible[f"{name}_ptr"] = promised
        signature |= self.sizes
        aligned = getattr(self.Problem, "aligns_rows", None)
        if aligned in self.sizes and promised is not None:
            divisible[aligned] = p.vec  # type: ignore[attr-defined, index]
        for name, kind in kinds.items():
            operand = self.operands[name]
            for i, step in enumerate(operand.strides):
                signature[f"{name}_{step}"] = "i64"
                if kind is None:
                    constants[f"{name}_{step}"] = 0
                elif operand.laid and promised is not None:
                    if i == len(operand.strides) - 1 >= len(operand.axes) - 1:
                        constants[f"{name}_{step}"] = 1
                    elif getattr(p, "layout", "") == "dense":
                        constants[f"{name}_{step}"] = 0
                    else:
                        divisible[f"{name}_{step}"] = max(1, promised // BYTES[kind])
        signature |= dict(self.scalar_types) | dict(self.extras)
        return signature, constants, divisible

    def compiler(self, c: C) -> str:
        return "triton"

    def build(self, p: P, c: C, gpu: GpuSpec) -> Artifact:
        from cutekernels.backends.triton import Values, compile_kernel

        signature, constants, divisible = self.launch_arguments(p, c)
        constants |= self.constants(p, c)
        module, _, function = self.kernel.partition(":")
        kernel = getattr(import_module(f"cutekernels.kernels.triton.{module}"), function)
        constants = {name: constants[name] for name in sorted(constants, key=list(Values.of(kernel).paths).index)}
        return compile_kernel(
            kernel,
            signature=signature | dict.fromkeys(constants, "constexpr"),
            constexprs=constants,
            divisible={name: n for name, n in divisible.items() if name not in constants},
            options=self.build_options(p, c),
            gpu=gpu,
        )

    def bind(self, p: P, c: C, kernel: Callable[..., Any]) -> Callable[..., None]:
        grid = self.grid(p, c)
        if 0 in grid:
            return lambda *operands: None
        numbers = self.numbers(p, c)
        strided = {name: len(operand.strides) for name, operand in self.operands.items()}

        def following(*operands: Tensor | None) -> list[int]:
            found = [*numbers, *self.measure_sizes(dict(zip(strided, operands, strict=True)))]
            for (name, steps), t in zip(strided.items(), operands, strict=True):
                found += [0] * steps if t is None or not steps else self.strides(p, name, t)[:steps]
            return found

        return Launch(kernel, grid, len(strided), following)

    # -- what a problem looks like

    def sizes_in(self, p: P) -> Sizes:
        """Extents by name, as a problem has them."""
        sizes = {f.name: value for f in fields(p) if type(value := getattr(p, f.name)) is int}
        self.derive(sizes)
        return sizes

    def outputs(self, p: P, *args: Any) -> tuple[Tensor, ...]:
        fresh = self.fresh(*args[: len(self.inputs)], **{name: getattr(p, name) for name in self.options})
        placed = []
        for name, t in zip(self.results, fresh, strict=True):
            operand, pitch = self.operands[name], 0
            if hasattr(p, "pitch") and operand.laid and operand.strides and t.dim() > 1:
                pitch = p.pitch(t.shape[-1], t.element_size())
            placed.append(t.new_empty((*t.shape[:-1], pitch))[..., : t.shape[-1]] if pitch > t.shape[-1] else t)
        return tuple(placed)

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
            shape = shape_of(operand, sizes, leads)
            values = self.draw(p, name, shape, generator)
            if values is None:
                values = torch.randn(shape, generator=generator, device=device, dtype=torch.float32)
            values = values.to(TYPES[kind])
            args.append(self.arrange(p, name, values) if operand.laid else values)
        return (*args, *[self.scalar_samples[name] for name in self.scalars])

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


def place_as(values: Tensor, p: Any, rows_apart: int = 1) -> Tensor:
    """``values`` in memory that lies as ``p`` promises and no better: its layout, and align but no multiple of it.

    ``rows_apart``: how many rows there is room for from one to the next.
    """
    item, n = values.element_size(), values.shape[-1] if values.dim() else 1
    if p.layout == "strided":
        memory = values.new_empty((*values.shape, 2))[..., 0]
        return memory.copy_(values)
    pitch = p.pitch(n, item) * rows_apart
    rows = values.numel() // max(1, n)
    skew = p.align % WIDEST_BYTES // item
    memory = values.new_empty(rows * pitch + skew)[skew:].view(*values.shape[:-1], pitch)[..., :n]
    return memory.copy_(values)
