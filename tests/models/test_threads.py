"""One ``Decoder`` in several threads: whole calls of ``generate`` in turn, and ``add`` beside a loop of steps."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from cutekernels.errors import UnsupportedProblem
from cutekernels.models.fair_lock import FairLock
from tests.integrations import tiny
from tests.models.test_decoder import DRAWN, decoder, prompts
from tests.models.test_requests import check_empty, finish

GIVEN = prompts(5, 20, 9, 12, 17, 7)
LIMIT_S = 120


@pytest.fixture(autouse=True)
def other_threads_soon() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def at_once(*functions: Callable[[], Any]) -> list[Any]:
    """The result or the error of each function, in a thread of its own."""
    results: list[Any] = [None] * len(functions)
    barrier = threading.Barrier(len(functions))

    def run(i: int) -> None:
        barrier.wait()
        try:
            results[i] = functions[i]()
        except (UnsupportedProblem, RuntimeError, LookupError, AssertionError) as error:
            results[i] = error

    threads = [threading.Thread(target=run, args=(i,), daemon=True) for i in range(len(functions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    assert not any(thread.is_alive() for thread in threads)
    return results


def test_six_threads_generate_what_one_does() -> None:
    engine = decoder(tiny.model("llama"), max_batch=2, pages=6)
    calls = [
        lambda i=i: engine.generate(GIVEN[i:] + GIVEN[:i], max_new_tokens=6, sampling=DRAWN if i % 2 else None).tokens
        for i in range(6)
    ]
    assert at_once(*calls) == [call() for call in calls]
    check_empty(engine)


def test_requests_come_from_threads_beside_a_loop_of_steps() -> None:
    """Numbers are unique, results those of one thread, and a cancelled request is gone."""
    engine = decoder(tiny.model("llama"), max_batch=2)
    expected = [engine.generate([prompt], max_new_tokens=6).tokens[0] for prompt in GIVEN]
    added = threading.Semaphore(0)

    def add() -> list[int]:
        numbers = [engine.add(prompt, max_new_tokens=6) for prompt in GIVEN]
        assert set(engine.finished) >= {n for n in numbers if len(engine.tokens_of(n)) == 6}
        gone = engine.add(GIVEN[0], max_new_tokens=100)
        engine.cancel(gone)
        added.release()
        return numbers

    def step() -> None:
        left = 5
        while left or not engine.idle:
            engine.step()
            left -= added.acquire(blocking=False)

    *numbers, none = at_once(*[add] * 5, step)
    assert none is None
    assert len({n for row in numbers for n in row}) == 30
    assert [[engine.result(n) for n in row] for row in numbers] == [expected] * 5
    check_empty(engine)


def test_add_waits_for_no_step_and_generate_for_no_request_of_others() -> None:
    engine = decoder(tiny.model("llama"))
    with engine._alone:  # as a step has it
        (number,) = at_once(lambda: engine.add(GIVEN[0], max_new_tokens=100))
    assert len(engine.generate([GIVEN[1]], max_new_tokens=4).tokens[0]) == 4
    assert 0 < len(engine.tokens_of(number)) < 100 and engine.finished == []
    finish(engine)
    assert len(engine.result(number)) == 100


def test_who_waits_comes_before_who_asks_again() -> None:
    lock, order = FairLock(), []

    def wait() -> None:
        with lock:
            order.append("waited")

    with lock, lock:
        thread = threading.Thread(target=wait, daemon=True)
        thread.start()
        while not lock._waiting:
            pass
    with lock:
        order.append("asked again")
    thread.join(LIMIT_S)
    assert order == ["waited", "asked again"]


def test_an_interrupted_wait_leaves_no_place_in_the_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    lock = FairLock()

    def interrupted(ready: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(lock._changed, "wait_for", interrupted)
        with lock:
            pass
    with lock:
        assert at_once(lambda: lock._owner)[0] == threading.get_ident()
    assert lock._owner is None and not lock._waiting
