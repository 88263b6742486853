"""Calls met before: what lets ``gemm`` go from its arguments to a launch in about a microsecond.

Two tables, both keyed by all that a plan depends on: a launch by addresses checks nothing. ``calls`` is
keyed by shapes, strides and scalars. ``recent`` is keyed by b's address alone: weights stay where they are and are
met again in the same company, which one of torch's compiled guards confirms in 0.3 us, where making and looking up
the first key takes 1.0. Where the buffers are the last call's too, the arithmetic that tells them apart is spared.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from importlib import import_module
from typing import Any, NamedTuple

from torch import Tensor

from cutekernels import dispatch

TensorGuards: Any
try:
    TensorGuards = import_module("torch._C._dynamo.guards").TensorGuards
except (ImportError, AttributeError):  # a torch that keeps them elsewhere: calls alone is a little slower
    TensorGuards = None

MOST_CALLS = 4096  # problems remembered; a caller with more shapes than this pays the slow path again
MOST_CHANGES = 16  # how often an address may be met in other company before it is let be


class Call(NamedTuple):
    """What a warm call needs: the launch, the bytes that a, b and out span, out's shape, and what tensors do not say.

    ``launch(out, a, b, c, bias, alpha, beta)``; where ``numbers`` are known, it has a ``kernel`` that takes addresses.
    ``bits``: the last four bits of the addresses, joined.
    """

    launch: Callable[..., Any]
    span_a: int
    span_b: int
    span: int
    shape: tuple[int, ...]
    bits: int
    activation: str | None
    accumulate: str
    numbers: tuple[int, ...] | None = None

    def fits(self, at_a: int, at_b: int, at: int) -> bool:
        """Whether out, at ``at``, is apart from a and b, and all are aligned as the launch was planned for."""
        return (
            (at_a | at_b | at) & 15 == self.bits
            and (at + self.span <= at_a or at_a + self.span_a <= at)
            and (at + self.span <= at_b or at_b + self.span_b <= at)
        )


class Recent(NamedTuple):
    """A :class:`Call` as it was last made with one b. ``guard(*tensors)``: they are as they were then.

    ``launch``: the call's, or where it has ``numbers`` its kernel's, of addresses.
    ``places``: a's and out's addresses at the last launch, which were found apart and as aligned as the call wants.
    """

    guard: Callable[..., bool]
    launch: Callable[..., Any]
    numbers: tuple[int, ...] | None
    device: int
    activation: str | None
    accumulate: str
    places: list[int]
    call: Call


calls: dict[tuple[Any, ...], Call] = {}
recent: dict[int, Recent] = {}  # by b's address, complemented for calls without out
_changes: dict[Hashable, int] = {}


def forget() -> None:
    calls.clear()
    recent.clear()
    _changes.clear()


dispatch.on_reload(forget)


def remember(key: tuple[Any, ...], call: Call) -> None:
    if len(calls) >= MOST_CALLS:
        forget()
    calls[key] = call


def expect(address: int, call: Call, *tensors: Tensor) -> None:
    """Has the next call with b at ``address`` look like this one, where torch has guards and nobody differentiates."""
    guard = None if any(t.requires_grad for t in tensors) else guard_for(address, tensors)
    if guard is not None:
        launch = call.launch if call.numbers is None else call.launch.kernel  # type: ignore[attr-defined]
        said = call.activation, call.accumulate
        keep(recent, address, Recent(guard, launch, call.numbers, tensors[0].get_device(), *said, [-1, -1], call))


def guard_for(key: Hashable, tensors: Sequence[Tensor]) -> Callable[..., bool] | None:
    """:func:`guard_of` the ``tensors`` last met under ``key``; None where those were others too often."""
    changes = _changes.get(key, 0)
    if TensorGuards is None or changes > MOST_CHANGES:
        return None
    keep(_changes, key, changes + 1)
    return guard_of(tensors)


def keep(table: dict[Any, Any], key: Hashable, value: object) -> None:
    """``table[key] = value``, in a table that begins anew when it is full."""
    if len(table) >= MOST_CALLS:
        table.clear()
    table[key] = value


def guard_of(tensors: Sequence[Tensor]) -> Callable[..., bool]:
    """``guard(*others)``: whether they are as ``tensors`` are in all but address and values.

    Types, dtypes, devices, sizes, strides and dispatch keys, and whether a gradient is wanted: calls under another
    mode of torch's (tracing, autograd, a dispatch mode, functorch) are other calls.
    """
    sizes, strides = [list(t.shape) for t in tensors], [list(t.stride()) for t in tensors]
    return TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check  # type: ignore[no-any-return]
