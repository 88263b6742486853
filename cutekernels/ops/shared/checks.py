"""Checks that several ops make of their operands, and the types that kernels take."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from cutekernels.errors import UnsupportedProblem
from cutekernels.op import Op
from cutekernels.ops.shared.dtypes import GPU_DTYPES
from cutekernels.ops.shared.strides import Pair, collide, overlaps_itself, pairs, relation

if TYPE_CHECKING:
    from torch import Tensor


_OVERLAP = {
    True: "out= overlaps an operand other than element upon element, so that inputs would be overwritten before they "
    "are read: write to memory of its own, or to the input itself",
    False: "out= overlaps an operand, which would be overwritten before it is read: write to memory of its own",
}


INFINITE = math.inf
_GREATEST = sys.float_info.max


def check_tensor(op: str, name: str, t: object, *, optional: bool = False) -> None:
    """Refuses what is no dense tensor."""
    import torch

    if t is None and optional:
        return
    if not isinstance(t, torch.Tensor):
        kind = "None" if t is None else f"{type(t).__module__}.{type(t).__qualname__}"
        raise UnsupportedProblem(f"{op} takes {name} as a torch.Tensor; got {kind}: convert it")
    if t.layout is not torch.strided:
        raise UnsupportedProblem(f"{op} takes {name} as a dense tensor; got layout {t.layout}: call to_dense()")
    if t.is_quantized or t.is_nested:
        kind = "quantized tensor: call dequantize()" if t.is_quantized else "nested tensor: call to_padded_tensor()"
        raise UnsupportedProblem(f"{op} takes {name} as a dense tensor; got a {kind}")


def check_number(
    op: str, name: str, value: object, low: float = -math.inf, high: float = math.inf, *, finite: bool = True
) -> None:
    """Refuses what is no number from ``low`` to ``high``. A bool is none, nor is an int beyond every float."""
    import torch

    fits = isinstance(value, int | float | torch.SymInt | torch.SymFloat) and not isinstance(value, bool)
    if isinstance(value, int):
        fits = fits and -_GREATEST <= value <= _GREATEST
    if fits and finite:
        fits = low <= value <= high and -math.inf < value < math.inf  # type: ignore[operator]
    if not fits:
        kind = "finite number" if finite else "number"
        if high < math.inf:
            kind += f" from {low:g} to {high:g}"
        elif low > -math.inf:
            kind += f" of at least {low:g}"
        raise UnsupportedProblem(f"{op} takes {name} as a {kind}; got {quote(value)}")


def check_whole(op: str, name: str, value: object, low: int = -(2**63), high: int = 2**63 - 1) -> None:
    """Refuses what is no whole number from ``low`` to ``high``. A bool is none, nor is a float."""
    import torch

    if isinstance(value, bool) or not isinstance(value, int | torch.SymInt) or not low <= value <= high:
        beyond = isinstance(value, int) and value > high
        limits = f" of at least {low}" if high >= 2**62 and not beyond else f" from {low} to {high}"
        raise UnsupportedProblem(f"{op} takes {name} as a whole number{limits}; got {quote(value)}: pass an int")


def check_flag(op: str, name: str, value: object) -> None:
    """Refuses what is neither True nor False: 1 equals True, but not in a problem."""
    import torch

    if not isinstance(value, bool | torch.SymBool):
        raise UnsupportedProblem(f"{op} takes {name} as a bool; got {quote(value)}: pass True or False")


def check_word(op: str, name: str, value: object, *, optional: bool = False) -> None:
    if not isinstance(value, str) and not (optional and value is None):
        raise UnsupportedProblem(f"{op} takes {name} as a string{' or None' * optional}; got {quote(value)}")


def check_eps(op: str, eps: object) -> None:
    """Refuses an eps with which a norm is no norm. Callers ask first whether it is a float in range, which is cheap."""
    check_number(op, "eps", eps, 0.0)


def check_place(dtype: object, device: object, *, optional: bool = False) -> None:
    """Refuses a type that is no floating-point one (``optional``: None is one too), and a device that torch lacks."""
    import torch

    if not (optional and dtype is None) and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise UnsupportedProblem(f"dtype must be a floating-point type of torch; it is {dtype!r}: take torch.bfloat16")
    try:
        torch.empty(0, device=device)  # type: ignore[call-overload]
    except (AssertionError, RuntimeError, TypeError) as error:
        raise UnsupportedProblem(f"device must be one that torch has; it is {device!r}: {error}") from error


def quote(value: object) -> str:
    """``value`` in an error message: short, and never a tensor's elements."""
    import torch

    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, int) and value.bit_length() > 1024:  # Python may refuse to write it out
        return f"an int of {value.bit_length()} bits"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."


def kinds_of(schema: str) -> tuple[tuple[str, str], ...]:
    """``(kind, name)`` of each argument: ``("Tensor?", "bias")``."""
    found = [word.split(" ") for word in schema.split(", ") if word]
    return tuple([(kind, name.partition("=")[0]) for kind, name in found])


def check_arguments(op: str, kinds: Sequence[tuple[str, str]], args: Sequence[object]) -> None:
    """Refuses arguments of another kind than :func:`kinds_of` their schema, before torch does so in words of its own.

    Numbers may be infinite or NaN here: whether a formula takes those is the function's to say.
    """
    for (kind, name), value in zip(kinds, args, strict=False):
        if kind.startswith("Tensor"):
            check_tensor(op, name, value, optional=kind.endswith("?"))
        elif kind == "float":
            check_number(op, name, value, finite=False)
        elif kind in ("int", "SymInt"):
            check_whole(op, name, value)
        elif kind == "bool":
            check_flag(op, name, value)
        else:
            check_word(op, name, value, optional=kind.endswith("?"))


def present(tensors: Sequence[Tensor | None]) -> list[Tensor]:
    return [t for t in tensors if t is not None]


def check_dtype(op: Op[Any, Any], t: Tensor) -> None:
    """Refuses a type that neither a kernel takes nor, on the CPU, the reference."""
    import torch

    field = op.Problem.__dataclass_fields__.get("dtype")
    kinds = [GPU_DTYPES[name] for name in (field.metadata["values"] if field and t.is_cuda else GPU_DTYPES)]
    allowed = [*kinds, *([torch.float64] if t.device.type == "cpu" else [])]
    if t.dtype not in allowed:
        names = ", ".join(str(d).removeprefix("torch.") for d in allowed)
        raise UnsupportedProblem(f"{op.name} on {t.device.type} takes {names}; got {t.dtype}: convert it")


def check_alike(
    op: Op[Any, Any], first: Tensor, others: Sequence[Tensor], what: Sequence[str] = ("shape", "dtype", "device")
) -> None:
    """Refuses operands that differ from ``first``."""
    for t in others:
        for name in what:
            if getattr(t, name) != getattr(first, name):
                raise UnsupportedProblem(
                    f"{op.name} takes operands of one {name}; got {getattr(first, name)} and {getattr(t, name)}: "
                    "expand or convert one explicitly"
                )


def check_fits(out: Tensor, shape: Sequence[int], like: Tensor) -> None:
    """Refuses an ``out`` that is not of ``shape``, with the type and device of ``like``."""
    if tuple(out.shape) != tuple(shape) or out.dtype != like.dtype or out.device != like.device:
        raise UnsupportedProblem(
            f"out must be {tuple(shape)}, {like.dtype}, on {like.device}; it is {tuple(out.shape)}, {out.dtype}, on "
            f"{out.device}"
        )


def check_apart(out: Tensor, operands: Iterable[tuple[str, Tensor | None]], in_place: str = "") -> None:
    """Refuses an ``out`` that overlaps itself or an operand; that ``in_place`` it may be, element upon element."""
    if overlaps_itself(out):
        raise UnsupportedProblem(f"out must not overlap itself; its strides are {out.stride()}: give it dense memory")
    for name, t in operands:
        how = "apart" if t is None else relation(out, t)
        if how == "overlap" or (how == "same" and name != in_place):
            raise UnsupportedProblem(f"out overlaps {name}: give it memory of its own")


def check_results(results: Sequence[Tensor]) -> None:
    """Refuses results with two elements at one address."""
    if any(map(overlaps_itself, results)):
        raise UnsupportedProblem("out= must not overlap itself: an expanded tensor has one address for many elements")


def pairs_of(op: Any, results: Sequence[Tensor], inputs: Sequence[Tensor | None]) -> tuple[Pair, ...]:
    """The operands to keep apart: results from one another, and from inputs but as ``op.in_place`` allows."""
    operands, count = (*results, *inputs), len(results)
    found = pairs(count, operands, range(count, len(operands)) if op.in_place else ())
    if op.in_place_pairs is None:
        return found
    names = (*op.results, *op.inputs)
    return tuple([(i, j, low, high, (names[i], names[j]) in op.in_place_pairs) for i, j, low, high, _ in found])


def check_overlap(op: Any, results: Sequence[Tensor], inputs: Sequence[Tensor | None]) -> None:
    """Refuses results that share memory with an input or with one another, but as ``op.in_place`` allows."""
    operands = (*results, *inputs)
    addresses = [0 if t is None else t.data_ptr() for t in operands]
    if collide(pairs_of(op, results, inputs), operands, addresses):
        raise UnsupportedProblem(_OVERLAP[op.in_place])
