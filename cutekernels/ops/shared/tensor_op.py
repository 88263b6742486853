"""Ops that are called with tensors: their declaration, and the way from a call's operands to a launch.

An op says what is special about it (:class:`TensorOp`). :func:`run` launches, :func:`register` defines the op in
``torch.ops.cutekernels`` and gives it its ``path``.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from cutekernels import dispatch
from cutekernels.errors import UnsupportedProblem
from cutekernels.op import C, Op, P, Scalar
from cutekernels.ops.shared.call_cache import Call, CallCache, Fire, empty_copy, forget, stand_ins
from cutekernels.ops.shared.checks import (
    DTYPE_NAMES,
    GPU_DTYPES,
    WIDEST_BYTES,
    check_alike,
    check_arguments,
    check_dtype,
    check_overlap,
    check_results,
    kinds_of,
    pairs_of,
    present,
    refuse_gradient,
)
from cutekernels.ops.shared.registration import Autocast, Gradient, Path, Remember, define, define_with_out, direct
from cutekernels.ops.shared.strides import matrix

__all__ = [  # what ops take from here, whichever file defines it
    "DTYPE_NAMES", "GPU_DTYPES", "WIDEST_BYTES", "ElementwiseOp", "Launch", "TensorOp", "check_alike", "check_dtype",
    "check_overlap", "check_results", "define", "direct", "forget", "present",
    "refuse_gradient", "register", "register_inplace", "register_updating", "run", "scratch",
]  # fmt: skip


class TensorOp(Op[P, C]):
    """An op called with tensors, compile-time options and run-time numbers, in this order.

    Its launch takes ``(*results, *inputs, *scalars)``; an absent optional tensor is None. ``options`` are fields of
    its Problem. ``schema`` lists inputs, options and scalars as torch writes them: ``"Tensor x, Tensor? weight, bool
    offset, float eps"``.
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
    flattens: ClassVar[bool] = True
    """Whether kernels take matrices: an operand whose leading dimensions no single stride walks is then copied."""
    path: Path
    """``path(*inputs, *options, *scalars, config)``: the results, differentiable. Set where the op is registered."""

    def __init__(self) -> None:
        self.calls = CallCache()
        self.kinds = kinds_of(self.schema)

    def takes(self, name: str, t: Tensor) -> bool:
        """Whether kernels take operand ``name`` as ``t`` lies; else a contiguous copy stands in for it."""
        return not self.flattens or matrix(t.shape, t.stride()) is not None

    @abstractmethod
    def admit(self, inputs: Sequence[Tensor | None], results: Sequence[Tensor] = (), **options: Any) -> None:
        """Raises UnsupportedProblem for operands that pose no problem. Called on the CPU and with fakes too."""

    @abstractmethod
    def fresh(self, *inputs: Tensor | None, **options: Any) -> tuple[Tensor, ...]:
        """New results, contiguous, on the inputs' device (meta included)."""

    @abstractmethod
    def problem(self, *operands: Tensor | None, **options: Any) -> P:
        """The problem that a launch's ``(*results, *inputs)`` pose. Raises UnsupportedProblem."""

    @abstractmethod
    def evaluate(self, *args: Any, **options: Any) -> tuple[Tensor, ...]:
        """The mathematics in plain PyTorch on ``(*inputs, *scalars)``: in fp32 or better, rounded once."""

    def update(self, results: Sequence[Tensor], args: Sequence[Any], **options: Any) -> None:
        """A launch that writes to ``results``, in plain PyTorch on ``(*inputs, *scalars)``."""
        for place, value in zip(results, self.evaluate(*args, **options), strict=True):
            place.copy_(value)

    def reference(self, p: P, *args: Any) -> tuple[Tensor, ...]:
        return self.evaluate(*args, **{name: getattr(p, name) for name in self.options})


class ElementwiseOp(TensorOp[P, C]):
    """An op over tensors of one shape, dtype and device."""

    def admit(self, inputs: Sequence[Tensor | None], results: Sequence[Tensor] = (), **options: Any) -> None:
        first, *rest = present(inputs)
        check_dtype(self, first)
        check_alike(self, first, [*rest, *results])
        check_results(results)

    def fresh(self, *inputs: Tensor | None, **options: Any) -> tuple[Tensor, ...]:
        first = present(inputs)[0]
        return tuple([first.new_empty(first.shape) for _ in self.results])


class Launch:
    """``launch(*results, *inputs, *scalars)`` over one kernel: what most ops' ``bind`` returns.

    The kernel takes the operands' addresses (0 for an absent one), then ``numbers(*operands)``, which follow from
    their shapes and strides alone, then the scalars.
    """

    __slots__ = ("_grid", "_kernel", "_numbers", "_operands")

    def __init__(
        self,
        kernel: Callable[..., Any],
        grid: tuple[int, int, int],
        operands: int,
        numbers: Callable[..., Sequence[int]],
    ) -> None:
        self._kernel = kernel
        self._grid = grid
        self._operands = operands
        self._numbers = numbers

    def __call__(self, *args: Any) -> None:
        operands = args[: self._operands]
        addresses = [0 if t is None else t.data_ptr() for t in operands]
        self._kernel(self._grid, *addresses, *self._numbers(*operands), *args[self._operands :])

    def settled(self, operands: Sequence[Tensor | None], scalars: int) -> Fire:
        """The launch by addresses, for operands that lie as these do, on the current device."""
        numbers = self._numbers(*operands)
        settle = getattr(self._kernel, "settled", None)
        if settle is not None:
            return settle(self._grid, numbers, len(operands) + scalars)  # type: ignore[no-any-return]
        kernel, grid = self._kernel, self._grid
        return lambda addresses, scalars: kernel(grid, *addresses, *numbers, *scalars)


def scratch(like: Tensor, *shape: int) -> Tensor:
    """fp32 memory for one launch, on the device of ``like``: what programs leave for a second pass."""
    return torch.empty(shape, dtype=torch.float32, device=like.device)


# ---- from operands to a launch --------------------------------------------------------------------------


def run(
    op: TensorOp[P, C],
    results: tuple[Tensor, ...] | None,
    inputs: tuple[Tensor | None, ...],
    *,
    options: tuple[Scalar, ...] = (),
    scalars: tuple[float, ...] = (),
    config: C | str | None = None,
) -> tuple[Tensor, ...]:
    """Checks, allocates unless ``results`` are given, and launches on the GPU that holds ``inputs``.

    Raises:
        UnsupportedProblem: what ``op.admit`` and ``op.problem`` refuse, and results that overlap inputs.
    """
    return (
        op.calls.replay(results, inputs, options, scalars, config)
        or op.calls.recall(results, inputs, options, scalars, config)
        or _first(op, results, inputs, options, scalars, config)
    )


def _first(
    op: TensorOp[P, C],
    results: tuple[Tensor, ...] | None,
    inputs: tuple[Tensor | None, ...],
    options: tuple[Scalar, ...],
    scalars: tuple[float, ...],
    config: C | str | None,
) -> tuple[Tensor, ...]:
    """The first call of its kind: checked, planned, made and cached."""
    given = (*(results or ()), *inputs)
    check_arguments(op.name, [kind for kind in op.kinds if not kind[0].startswith("Tensor")], (*options, *scalars))
    if any(t is not None and t.is_neg() for t in given):
        raise UnsupportedProblem(f"{op.name} reads memory as it lies, not negated: call resolve_neg() first")
    call = _planned(op, results, inputs, dict(zip(op.options, options, strict=True)), len(scalars), config)
    if results is not None:
        check_overlap(op, results, inputs)
    return op.calls.add(call, results, inputs, options, scalars, config)


def planned(op: TensorOp[P, C], inputs: tuple[Tensor | None, ...], results: tuple[Tensor, ...] | None = None) -> Call:
    """The call of ``inputs``, for an op without options and scalars; it allocates its results unless they are given."""
    return _planned(op, results, inputs, {}, 0, None)


def _planned(
    op: TensorOp[P, C],
    given: tuple[Tensor, ...] | None,
    inputs: tuple[Tensor | None, ...],
    options: dict[str, Scalar],
    scalars: int,
    config: C | str | None,
) -> Call:
    """Refuses what no kernel takes, and plans the rest."""
    op.admit(inputs, given or (), **options)
    fresh = () if given is not None else op.fresh(*[None if t is None else _dense(t) for t in inputs], **options)
    results = fresh if given is None else given
    pairs = () if given is None else pairs_of(op, given, inputs)
    if all(t.numel() == 0 for t in results):
        return Call.of(None, inputs, fresh, pairs)
    operands, n = (*results, *inputs), len(results)
    names = (*op.results, *op.inputs)
    copied = [t is not None and not op.takes(name, t) for name, t in zip(names, operands, strict=True)]
    posed = [_dense(t) if copy and t is not None else t for t, copy in zip(operands, copied, strict=True)]
    problem = op.problem(*posed, **options)
    device = present(inputs)[0].get_device()
    with torch.cuda.device(device):
        launch = dispatch.plan(op, problem, device, config).launch
        if any(copied):
            ways = [(empty_copy if i < n else _dense_copy) if copy else None for i, copy in enumerate(copied)]
            launch = stand_ins(launch, ways, [i for i in range(n) if copied[i]])
        settle = getattr(launch, "settled", None)
        fire = None if settle is None else settle(operands, scalars)
    return Call.of(launch, inputs, fresh, pairs, fire)


def _dense_copy(t: Tensor) -> Tensor:
    """``t`` contiguous in memory of its own: what is contiguous already may begin where no kernel takes it."""
    return t.clone(memory_format=torch.contiguous_format)


def _dense(t: Tensor) -> Tensor:
    """How an aligned contiguous copy of ``t`` looks, without its memory."""
    return torch.empty(t.shape, dtype=t.dtype, device="meta")


# ---- the way through torch ------------------------------------------------------------------------------


def register(
    library: torch.library.Library,
    op: TensorOp[Any, Any],
    *,
    gradient: Gradient | None = None,
    remember: Remember | None = None,
    autocast: Autocast | None = None,
    kept: Sequence[int] = (),
) -> None:
    """Defines ``op.name(schema, str? config=None) -> results`` and ``op.name + "_out"``, and sets ``op.path``.

    The second takes the results behind the inputs. Without ``gradient`` a backward is refused with a clear error.
    """
    words, n, r = op.schema.split(", "), len(op.inputs), len(op.results)
    returns = "Tensor" if r == 1 else "(" + ", ".join(["Tensor"] * r) + ")"
    op.path = define_with_out(
        library,
        op.name,
        ", ".join(words[:n]),
        ", ".join([*words[n:], "str? config=None"]),
        _implementations(op),
        results=op.results,
        returns=(returns, "()"),
        launches=_launched(op),
        gradient=gradient,
        remember=remember,
        autocast=autocast,
        kept=kept,
    )


def _launched(op: TensorOp[Any, Any]) -> tuple[Callable[..., Any], Callable[..., None]]:
    """``launch(*inputs, *options, *scalars, config)`` on a GPU, and the same with results behind the inputs.

    With as few calls on the way as there can be.
    """
    n, r = len(op.inputs), len(op.results)
    i = n + r
    m = n + len(op.options)
    k = m + len(op.scalars)
    replay, recall, single = op.calls.replay, op.calls.recall, len(op.results) == 1

    def launch(*args: Any) -> Any:
        call = None, args[:n], args[n:m], args[m:k], args[k]
        made = replay(*call) or recall(*call) or _first(op, *call)
        return made[0] if single else made

    def launch_into(*args: Any) -> None:
        call = args[n:i], args[:n], args[i : m + r], args[m + r : k + r], args[k + r]
        if replay(*call) is None and recall(*call) is None:
            _first(op, *call)

    return launch, launch_into


def register_inplace(library: torch.library.Library, op: TensorOp[Any, Any], updated: Sequence[int]) -> None:
    """Defines ``op.name + "_inplace"``, whose results are the inputs at ``updated``, for GPU, CPU and fakes.

    Takes the op's arguments and returns nothing. An absent input stands for an empty result.
    """
    words, n = op.schema.split(", "), len(op.inputs)
    for mark, i in zip("abcdefgh", updated, strict=False):
        kind, name = words[i].split(" ")
        words[i] = f"Tensor({mark}!){kind.removeprefix('Tensor')} {name}"

    arguments = f"_inplace({', '.join(words)}, str? config=None)"
    register_updating(library, op, arguments, n, lambda *inputs: (places(inputs, updated), inputs))


def register_updating(
    library: torch.library.Library,
    op: TensorOp[Any, Any],
    arguments: str,
    tensors: int,
    split: Callable[..., tuple[tuple[Tensor, ...], tuple[Tensor | None, ...]]],
) -> None:
    """Defines ``op.name + arguments -> ()``, for GPU, CPU and fakes: ``split(*tensors)`` is (results, inputs)."""

    def updating(f: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args: f(*split(*args[:tensors]), *args[tensors:])

    define(library, f"{op.name}{arguments} -> ()", *map(updating, _implementations(op)))


def places(inputs: Sequence[Tensor | None], updated: Sequence[int]) -> tuple[Tensor, ...]:
    """The inputs that are updated, as the results of a launch; an empty tensor in the place of an absent one."""
    first = inputs[updated[0]]
    assert first is not None
    return tuple([first.new_empty(0) if (t := inputs[i]) is None else t for i in updated])


def _implementations(op: TensorOp[Any, Any]) -> tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any]]:
    """``op`` on the GPU, on the CPU and of fakes, as :data:`~cutekernels.ops.shared.registration.Implementation`."""
    o, s = len(op.options), len(op.scalars)
    floating = [kind == "float" for kind, _ in op.kinds[len(op.kinds) - s :]]

    def returned(given: tuple[Tensor, ...] | None, results: tuple[Tensor, ...]) -> Any:
        return None if given is not None else results[0] if len(results) == 1 else results

    def admitted(given: tuple[Tensor, ...] | None, inputs: tuple[Any, ...], rest: tuple[Any, ...]) -> dict[str, Any]:
        options = dict(zip(op.options, rest[:o], strict=True))
        op.admit(inputs, given or (), **options)
        return options

    def cuda(given: tuple[Tensor, ...] | None, inputs: tuple[Any, ...], *rest: Any) -> Any:
        config = rest[o + s] if len(rest) > o + s else None
        return returned(given, run(op, given, inputs, options=rest[:o], scalars=rest[o : o + s], config=config))

    def cpu(given: tuple[Tensor, ...] | None, inputs: tuple[Any, ...], *rest: Any) -> Any:
        options = admitted(given, inputs, rest)
        args = (*inputs, *[float(x) if floats else x for x, floats in zip(rest[o : o + s], floating, strict=True)])
        if given is None:
            return returned(None, tuple([t.contiguous() for t in op.evaluate(*args, **options)]))
        check_overlap(op, given, inputs)
        op.update(given, args, **options)
        return None

    def fake(given: tuple[Tensor, ...] | None, inputs: tuple[Any, ...], *rest: Any) -> Any:
        options = admitted(given, inputs, rest)
        return None if given is not None else returned(None, op.fresh(*inputs, **options))

    return cuda, cpu, fake
