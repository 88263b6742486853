"""The requests of a decoder: which wait, which run and in which slot of the batch, and what they have generated."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any

from cutekernels.errors import UnsupportedProblem
from cutekernels.kv_cache import KVCache
from cutekernels.models.arguments import is_token, stop_tokens
from cutekernels.models.sampling import Sampling
from cutekernels.ops.shared.checks import check_whole, quote


@dataclass(eq=False)
class Request:
    """One prompt. ``launched``: tokens that steps have been started for; ``slot``: its row of the batch."""

    number: int
    prompt: list[int]
    most: int
    sampling: Sampling
    stop: frozenset[int]
    slot: int = -1
    launched: int = 0
    done: bool = False
    tokens: list[int] = field(default_factory=list)


class Requests:
    """Slots and pages for requests, first come first served.

    A request starts when a slot is free and pages for its prompt and all of its tokens are, so a running request never
    runs out of room. Any thread may add, take and look up requests; one at a time does what concerns slots and pages.
    """

    def __init__(self, cache: KVCache, most: int, vocabulary: int) -> None:
        """``most``: tokens of a request; the last page of a sequence may have room for more."""
        self._cache, self.vocabulary = cache, vocabulary
        self._room = min(most, cache.free_pages * cache.page_size)
        self._waiting: deque[Request] = deque()
        self._slots: list[Request | None] = [None] * cache.batch
        self._known: dict[int, Request] = {}
        self._next = 0
        self._lock = threading.Lock()  # of the four above, held for no more than their change

    def add(self, prompt: list[Any], most: Any, sampling: Sampling, stop: Sequence[int] | Set[int]) -> Request:
        """Queue a request. Raises UnsupportedProblem for one that could never run."""
        bad = [token for token in prompt if not is_token(token, self.vocabulary)]
        if bad or not prompt:
            found = f"one is {quote(bad[0])}" if bad else "it is empty"
            raise UnsupportedProblem(f"a prompt is token ids from 0 to {self.vocabulary - 1}; {found}: tokenize it")
        if type(most) is not bool and isinstance(most, Integral):  # numpy's too
            most = int(most)
        if type(most) is not int or most < 1:
            raise UnsupportedProblem(f"max_new_tokens is an integer from 1 up; it is {most!r}")
        prompt = list(map(int, prompt))
        need = len(prompt) + most
        if need > self._room:
            raise UnsupportedProblem(
                f"a prompt of {len(prompt)} tokens and {most} new ones are {need}, and the cache holds {self._room} of "
                "a request: shorten it, or make the decoder with more max_tokens or pages"
            )
        stop = stop_tokens(stop, self.vocabulary)
        with self._lock:
            request = Request(self._next, prompt, most, sampling, stop)
            self._next += 1
            self._known[request.number] = request
            self._waiting.append(request)
        return request

    def cancel(self, number: int) -> list[int]:
        """Forget a request, waiting, running or finished; its tokens so far."""
        with self._lock:
            request = self._request(number)
            if request in self._waiting:
                self._waiting.remove(request)
        if request.slot >= 0 and not request.done:
            self._end(request)
        request.done = True
        with self._lock:
            self._known.pop(number, None)
        return request.tokens

    def restart(self) -> None:
        """Queue every request that is not done anew, in the order they came; all slots and pages are free."""
        self._cache.reset()
        with self._lock:
            self._slots = [None] * len(self._slots)
            self._waiting = deque(request for request in self._known.values() if not request.done)
            for request in self._waiting:
                request.slot, request.launched = -1, 0
                request.tokens.clear()

    def admitted(self) -> Iterator[Request]:
        """Requests that can start now, each with its slot and pages."""
        while self._waiting and None in self._slots:
            request, slot = self._waiting[0], self._slots.index(None)
            size = self._cache.page_size
            if -(-(len(request.prompt) + request.most) // size) > self._cache.free_pages:
                return
            self._cache[slot].reserve(len(request.prompt) + request.most)
            with self._lock:
                self._waiting.popleft()
                request.slot, self._slots[slot] = slot, request
            yield request

    @property
    def waiting(self) -> list[Request]:
        """Requests that have not started, in the order they came."""
        with self._lock:
            return [*self._waiting]

    def running(self) -> list[Request]:
        """Requests that have tokens to come which no step has been started for."""
        return [r for r in self._slots if r is not None and r.launched < r.most]

    def receive(self, request: Request, token: int) -> None:
        """A token of a request; behind the last one, its slot and pages are free."""
        if request.done:
            return  # a step that was started before the end was known
        request.tokens.append(token)
        if token in request.stop or len(request.tokens) == request.most:
            self._end(request)

    def _end(self, request: Request) -> None:
        self._cache[request.slot].reset()
        request.done = True  # before its place is free: who finds nothing running finds it finished
        self._slots[request.slot] = None

    def all_done(self, numbers: Iterable[int]) -> bool:
        with self._lock:
            return all(self._known[number].done for number in numbers if number in self._known)

    @property
    def all_finished(self) -> bool:
        with self._lock:
            return not self._waiting and all(r is None for r in self._slots)

    @property
    def finished(self) -> list[int]:
        with self._lock:
            return [number for number, request in self._known.items() if request.done]

    def take(self, number: int) -> list[int]:
        """The tokens of a finished request, which is forgotten."""
        with self._lock:
            if not self._request(number).done:
                raise KeyError(f"request {number} is not finished: step until it is, or read tokens_of({number})")
            return self._known.pop(number).tokens

    def tokens_of(self, number: int) -> list[int]:
        return list(self._request(number).tokens)

    def _request(self, number: int) -> Request:
        check_whole("Decoder", "a request's number", number, 0)
        if number not in self._known:
            raise KeyError(
                f"there is no request {number}, or its result has been taken: pass a number that add returned"
            )
        return self._known[number]
