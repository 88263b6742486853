"""Requests that end early: cancelled, or left by an interrupt; numbers that no request has."""

from __future__ import annotations

from typing import Any

import pytest
from torch.utils._python_dispatch import TorchDispatchMode

from cutekernels.errors import UnsupportedProblem
from cutekernels.models import Decoder, Sampling
from tests.integrations import tiny
from tests.models.test_decoder import DRAWN, decoder, greedy, prompts

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")
PENALIZED = Sampling(temperature=1.2, presence_penalty=3.0, seed=2)


def finish(engine: Decoder) -> None:
    while not engine.idle:
        engine.step()


def check_empty(engine: Decoder) -> None:
    """No request is left, and no page is taken."""
    cache = engine._caches[0]
    assert engine.idle and engine.finished == []
    assert cache.free_pages == cache.k_cache.shape[0]
    assert all(int(layer.lengths.sum()) == int(layer.lost.sum()) == 0 for layer in engine._caches)


# ---- cancel ---------------------------------------------------------------------------------------------


def test_cancel_ends_waiting_running_and_finished_requests() -> None:
    model, given = tiny.model("llama"), prompts(10, 11, 12)
    engine = decoder(model, max_batch=1)
    first, second, third = (engine.add(prompt, max_new_tokens=20) for prompt in given)
    for _ in range(6):
        engine.step()
    assert engine.cancel(second) == [], "it waits"
    tokens = engine.cancel(first)
    assert 0 < len(tokens) < 20 and tokens == greedy(model, given[0], 20)[: len(tokens)], "it runs"
    finish(engine)
    assert engine.finished == [third]
    assert engine.cancel(third) == greedy(model, given[2], 20), "it is finished"
    check_empty(engine)


def test_a_cancelled_request_leaves_its_place_and_pages_and_no_token() -> None:
    """Those of the step in flight are not taken for tokens of the request that follows in its slot."""
    model, given = tiny.model("llama"), prompts(10, 11, 12)
    engine = decoder(model, max_batch=2, pages=4)
    first, second, third = (engine.add(prompt, max_new_tokens=20) for prompt in given)
    for _ in range(4):
        engine.step()
    engine.cancel(first)
    assert engine._caches[0].free_pages == 2
    finish(engine)
    assert [engine.result(n) for n in (second, third)] == [greedy(model, prompt, 20) for prompt in given[1:]]
    check_empty(engine)


def test_after_the_last_one_is_cancelled_the_decoder_is_idle() -> None:
    engine = decoder(tiny.model("llama"))
    numbers = [engine.add(prompt, max_new_tokens=20) for prompt in prompts(10, 11)]
    for _ in range(3):
        engine.step()
    for number in numbers:
        assert not engine.idle
        engine.cancel(number)
    check_empty(engine)


@pytest.mark.parametrize("method", ["result", "tokens_of", "cancel"])
def test_numbers_of_no_request_are_refused(method: str) -> None:
    engine = decoder(tiny.model("llama"))
    number = engine.add([1, 2, 3], max_new_tokens=2)
    for unknown in (99, number + 1):
        with pytest.raises(KeyError, match=f"there is no request {unknown}, or its result has been taken: pass"):
            getattr(engine, method)(unknown)
    for wrong in ([1], None, 0.0, True, "0", -1):
        with pytest.raises(UnsupportedProblem, match="a request's number as a whole number of at least 0; got"):
            getattr(engine, method)(wrong)
    if method == "result":
        with pytest.raises(KeyError, match=f"request {number} is not finished: step"):
            engine.result(number)
    finish(engine)
    engine.result(number)
    with pytest.raises(KeyError, match=f"no request {number}, or its result has been taken"):
        getattr(engine, method)(number)


# ---- interrupts -----------------------------------------------------------------------------------------


class Interrupted(TorchDispatchMode):
    """Raises KeyboardInterrupt in place of a torch op: the first one behind ``after`` others."""

    def __init__(self, after: int) -> None:
        super().__init__()
        self.left = after

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.left -= 1
        if self.left == -1:
            raise KeyboardInterrupt
        return func(*args, **(kwargs or {}))


def moments(engine: Decoder, *given: Any, **options: Any) -> range:
    """Eight moments of a call of ``generate``, counted in torch ops; the first steps look up more of them."""
    engine.generate(*given, **options)
    with Interrupted(10**9) as counted:
        engine.generate(*given, **options)
    whole = 10**9 - counted.left
    return range(3, whole, whole // 8 + 1)


@pytest.mark.parametrize("progress", [False, True], ids=["plain", "progress"])
def test_an_interrupted_generate_leaves_nothing(progress: bool) -> None:
    model, given = tiny.model("llama"), prompts(20, 5, 30)
    fresh, engine = (decoder(model, max_batch=2, chunk=16) for _ in range(2))
    expected = fresh.generate(given, max_new_tokens=4).tokens
    for after in moments(fresh, given, max_new_tokens=4):
        with pytest.raises(KeyboardInterrupt), Interrupted(after):
            engine.generate(given, max_new_tokens=4, progress=progress)
        check_empty(engine)
    assert engine.generate(given, max_new_tokens=4).tokens == expected
    check_empty(engine)


def test_an_interrupt_between_steps_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model, given = tiny.model("llama"), prompts(20, 5, 30)
    engine = decoder(model, max_batch=2)
    expected, step, left = engine.generate(given, max_new_tokens=6).tokens, engine.step, [4]

    def interrupted() -> None:
        step()
        left[0] -= 1
        if not left[0]:
            raise KeyboardInterrupt

    monkeypatch.setattr(engine, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine.generate(given, max_new_tokens=6)
    check_empty(engine)
    assert engine.generate(given, max_new_tokens=6).tokens == expected


@pytest.mark.parametrize("sampling", [DRAWN, PENALIZED], ids=["drawn", "penalty"])
def test_an_interrupted_step_costs_other_requests_no_token(sampling: Sampling) -> None:
    """They start anew: a prompt may be half in the cache, and one layer a token ahead of the next."""
    model, (first, second, third) = tiny.model("qwen3"), prompts(20, 5, 30)
    given = {"max_new_tokens": 4, "sampling": sampling}
    fresh, engine = (decoder(model, max_batch=2, chunk=16) for _ in range(2))
    expected = [fresh.generate([prompt], **given).tokens[0] for prompt in (first, second)]
    for after in moments(fresh, [first, second, third], **given):
        numbers = [engine.add(first, **given), engine.add(second, **given)]
        with pytest.raises(KeyboardInterrupt), Interrupted(after):
            engine.generate([third], **given)
        finish(engine)
        assert engine.finished == numbers
        assert [engine.result(number) for number in numbers] == expected, after
        check_empty(engine)


def test_an_interrupted_capture_does_not_stop_the_count_of_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step is captured while no slot counts, so an interrupt within it leaves none that does."""
    model, given = tiny.model("llama"), prompts(20, 5)
    engine = decoder(model)
    numbers = [engine.add(prompt, max_new_tokens=8) for prompt in given]
    for _ in range(3):
        engine.step()

    def capture(batch: int, greedy: bool) -> None:
        engine._counts.zero_()
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(engine, "_decode", capture)
        engine.step()
    finish(engine)
    assert [engine.result(n) for n in numbers] == [greedy(model, prompt, 8) for prompt in given]
