"""Scratch memory of launches: one piece for each stream, whose launches follow one another.

A launch captured in a graph has a piece of its own, since graphs replay on any stream. Pieces that are kept are
allocated by a thread of their own: torch.compile's CUDA graphs run a function once before they capture it, send what
its thread allocates to the graph's memory pool, and refuse what outlives the run there.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Generic, TypeVar

import torch
from torch import Tensor

from cutekernels import torch_names

T = TypeVar("T")


def _apart(fresh: Callable[[], T], device: int) -> T:
    """``fresh()`` on another thread, its memory ready for any stream of ``device``."""

    def ready() -> T:
        with torch.cuda.device(device):
            made = fresh()
            torch.cuda.current_stream().synchronize()
        return made

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(ready).result()


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
        key = device, torch_names.current_stream(device)
        found = self._by_stream.get(key)
        if found is None:
            found = self._by_stream[key] = _apart(self._fresh, device)
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
            self._zeros[device] = _apart(lambda: torch.zeros(self._count, device="cuda", dtype=torch.int32), device)
        return self._zeros[device]


_tickets = Reserve(1 << 20)  # for captured launches; each leaves its tickets zero


class StreamWorkspace(PerStream[tuple[Tensor, Tensor]]):
    """Partial sums and tickets for launches of one size.

    A captured launch has partial sums in the graph's own memory and tickets that no other launch has. Tickets are zero
    between launches: the CTA that adds up a tile clears its own.
    """

    def __init__(self, partials: int, tickets: int) -> None:
        def fresh() -> tuple[Tensor, Tensor]:
            return torch.empty(partials, device="cuda"), torch.zeros(tickets, device="cuda", dtype=torch.int32)

        def captured() -> tuple[Tensor, Tensor]:
            return torch.empty(partials, device="cuda"), _tickets.take(tickets)

        super().__init__(fresh, captured)
        _tickets.prepare()
