"""Calls met before: what lets ``gemm`` go from its arguments to a launch in about a microsecond.

Two tables, both keyed by what a plan depends on and neither trusted for what the launch itself checks. ``calls`` is
keyed by shapes, strides and scalars. ``recent`` is keyed by b's address alone: weights stay where they are and are
met again in the same company, which one of torch's compiled guards (types, dtypes, devices, sizes, strides and
dispatch keys of all tensors) confirms in 0.3 us, where making and looking up the first key takes 1.0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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


class Recent(NamedTuple):
    """A :class:`Call` as it was last made with one b. ``guard(*tensors)``: they are as they were then."""

    guard: Callable[..., bool]
    launch: Callable[..., Any]
    span_a: int
    span_b: int
    span: int
    shape: tuple[int, ...]
    bits: int
    activation: str | None
    accumulate: str


calls: dict[tuple[Any, ...], Call] = {}
recent: dict[int, Recent] = {}  # by b's address, complemented for calls without out
_changes: dict[int, int] = {}


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
    changes = _changes.get(address, 0)
    if TensorGuards is None or changes > MOST_CHANGES or any(t.requires_grad for t in tensors):
        return
    if len(_changes) >= MOST_CALLS:
        recent.clear()
        _changes.clear()
    _changes[address] = changes + 1
    recent[address] = Recent(guard_of(tensors), *call)


def guard_of(tensors: Sequence[Tensor]) -> Callable[..., bool]:
    """``guard(*others)``: whether they are as ``tensors`` are in all but address and values."""
    sizes, strides = [list(t.shape) for t in tensors], [list(t.stride()) for t in tensors]
    return TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check  # type: ignore[no-any-return]
