"""Ops that are called with tensors: their declaration.

An op says what is special about it (:class:`TensorOp`); how calls reach its launch is in ``calls.py``.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

from cutekernels.op import C, Op, P
from cutekernels.ops.shared.checks import kinds_of
from cutekernels.ops.shared.strides import matrix

if TYPE_CHECKING:
    from torch import Tensor

    from cutekernels.ops.shared.call_cache import CallCache, Fire
    from cutekernels.ops.shared.registration import Path


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
        self.kinds = kinds_of(self.schema)
        self.others = [kind for kind in self.kinds if not kind[0].startswith("Tensor")]

    @cached_property
    def calls(self) -> CallCache:
        """Its calls that repeat."""
        from cutekernels.ops.shared.call_cache import CallCache

        return CallCache()

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

    def ending(self, *extras: int) -> Launch:
        """The same with ``extras`` behind the numbers, of an op without scalars."""
        numbers = self._numbers
        return Launch(self._kernel, self._grid, self._operands, lambda *operands: [*numbers(*operands), *extras])

    def settle(self, operands: Sequence[Tensor | None], scalars: int) -> Fire:
        """The launch by addresses, for operands that lie as these do, on the current device."""
        numbers = self._numbers(*operands)
        settle = getattr(self._kernel, "settle", None)
        if settle is not None:
            return settle(self._grid, numbers, len(operands) + scalars)  # type: ignore[no-any-return]
        kernel, grid = self._kernel, self._grid
        return lambda addresses, scalars: kernel(grid, *addresses, *numbers, *scalars)
