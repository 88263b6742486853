"""Scratch memory of launches: one piece for each stream, whose launches follow one another.

A launch captured in a graph has a piece of its own, since graphs replay on any stream.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


class PerStream(Generic[T]):
    """``fresh()`` for each device and stream, once; ``captured()`` for each launch that a graph captures."""

    def __init__(self, fresh: Callable[[], T], captured: Callable[[], T]) -> None:
        self._fresh, self._captured = fresh, captured
        self._by_stream: dict[tuple[int, int], T] = {}

    def get(self) -> T:
        """The piece of the current device and stream."""
        if torch.cuda.is_current_stream_capturing():
            return self._captured()
        device = torch.cuda.current_device()
        key = device, torch._C._cuda_getCurrentRawStream(device)
        found = self._by_stream.get(key)
        if found is None:
            found = self._by_stream[key] = self._fresh()
        return found


class Reserve:
    """``count`` zeros (int32) of each device, taken in turn by captured launches, whose own cannot be zeroed once."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._lock = threading.Lock()
        self._zeros: dict[int, Tensor] = {}
        self._taken: dict[int, int] = {}

    def prepare(self) -> None:
        """Allocates the zeros of the current device, before any capture."""
        with self._lock:
            self._of(torch.cuda.current_device())

    def take(self, count: int) -> Tensor:
        """The next ``count`` zeros of the current device, contiguous; behind the last ones the first ones again."""
        device = torch.cuda.current_device()
        with self._lock:
            begin = self._taken.get(device, 0)
            if begin + count > self._count:
                begin = 0
            self._taken[device] = begin + count
            return self._of(device)[begin : begin + count]

    def _of(self, device: int) -> Tensor:
        if device not in self._zeros:
            self._zeros[device] = torch.zeros(self._count, device=f"cuda:{device}", dtype=torch.int32)
            torch.cuda.current_stream(device).synchronize()  # they may be taken on another stream
        return self._zeros[device]


_tickets = Reserve(1 << 20)  # for captured launches; each leaves its tickets zero


class Workspace(PerStream[tuple[Tensor, Tensor]]):
    """Partial sums and tickets for launches of one size.

    A captured launch has partial sums in the graph's own memory and tickets that no other launch has. Tickets are zero
    between launches: the last CTA of a tile clears its own.
    """

    def __init__(self, partials: int, tickets: int) -> None:
        def fresh() -> tuple[Tensor, Tensor]:
            return torch.empty(partials, device="cuda"), torch.zeros(tickets, device="cuda", dtype=torch.int32)

        def captured() -> tuple[Tensor, Tensor]:
            return torch.empty(partials, device="cuda"), _tickets.take(tickets)

        super().__init__(fresh, captured)
        _tickets.prepare()
