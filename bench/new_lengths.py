"""``python -m bench models --model qwen2.5-7b --suite new-lengths``: prompts of lengths that a process has not met.

Each of 60 lengths is read twice, one after the other: what the second call saves is what a new length costs. Behind
``warmup``, and cold: an empty cache and nothing in memory, over the first twelve. Times are as in ``bench.models``.
"""

from __future__ import annotations

import os
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import quantiles
from typing import Any
from unittest.mock import patch

import torch

import cutekernels
from bench import wall
from bench.rows import Row
from cutekernels import compile as compiler
from cutekernels import dispatch
from cutekernels.models import Decoder

SUITE = "new-lengths"
MOST = 4096
LENGTHS = tuple(random.Random(58).sample(range(1, MOST + 1), 60))
COLD = 12  # lengths that a cold contender reads: each may compile for seconds
FIRST = 1000  # tokens of the prompt that a process begins with, before all others

Read = Callable[[list[int]], object]


@dataclass(frozen=True)
class Contender:
    """``prepare`` gives what reads prompts, of a model within what ``within`` does to it, and how."""

    prepare: Callable[[Any], tuple[Any, Read]]
    within: Callable[[Any], AbstractContextManager[Any]] = nullcontext
    warmup: bool = False
    cold: bool = False

    def ready(self, model: Any) -> Read:
        reader, read = self.prepare(model)
        if self.warmup:
            cutekernels.warmup(reader, tokens=(1, MOST))
        return read


def forward(model: Any) -> tuple[Any, Read]:
    """The logits behind a prompt, and its keys and values."""

    @torch.no_grad()
    def read(ids: list[int]) -> object:
        prompt = torch.tensor([ids], device=model.device)
        return model(prompt, use_cache=True, logits_to_keep=1).logits.argmax(-1).tolist()

    return model, read


def decoder(model: Any) -> tuple[Any, Read]:
    made = Decoder.from_transformers(model, max_batch=1, max_tokens=MOST + 1)
    return made, lambda ids: made.generate([ids], max_new_tokens=1, stop=())


CONTENDERS = {
    "cutekernels, cold": Contender(decoder, cold=True),
    "cutekernels patched, cold": Contender(forward, cutekernels.patch, cold=True),
    "transformers": Contender(forward),
    "cutekernels patched": Contender(forward, cutekernels.patch, warmup=True),
    "cutekernels": Contender(decoder, warmup=True),
}


@contextmanager
def cold() -> Iterator[None]:
    """An empty disk cache, and neither plans nor kernels in memory."""
    with tempfile.TemporaryDirectory() as folder, patch.dict(os.environ, CUTEKERNELS_CACHE=str(Path(folder) / "cache")):
        _forget_kernels()
        try:
            yield
        finally:
            _forget_kernels()


def _forget_kernels() -> None:
    compiler._loaded.clear()
    dispatch.reload()


def run(
    name: str, model: Any, stamp: dict[str, str], contenders: Mapping[str, Contender] = CONTENDERS
) -> Iterator[Row]:
    """Rows of each contender: getting ready and the first prompt; then of all lengths sum, median, p90 and worst."""
    for title, contender in contenders.items():
        wall.forget()  # or the allocator would have blocks of the very lengths that the contender before has read
        with cold() if contender.cold else nullcontext():
            lengths = LENGTHS[:COLD] if contender.cold else LENGTHS
            for label, ms, note in _time_lengths(model, contender, lengths):
                place = (name, SUITE, f"lengths={len(lengths)} of={label}", f"{len(lengths)} lengths, {label}")
                yield wall.timed(place, title, [1e3 * ms], stamp=stamp, reason=note)


def _time_lengths(model: Any, contender: Contender, lengths: tuple[int, ...]) -> Iterator[tuple[str, float, str]]:
    """Label, milliseconds and note of each row."""
    with contender.within(model):
        read, ready = _time_call(lambda: contender.ready(model), model.device)
        vocabulary = model.config.vocab_size
        _, start = _time_call(lambda: read(_prompt(vocabulary, FIRST)), model.device)
        yield "ready", *ready
        yield f"ready and {FIRST} tokens", ready[0] + start[0], start[1]
        before, first, again = _objects(), list[float](), list[float]()
        for tokens in lengths:
            for times in (first, again):
                times.append(_time_call(partial(read, _prompt(vocabulary, tokens)), model.device)[1][0])
        compiled = _objects() - before
    yield "sum", sum(first), f"{compiled} compiled"
    yield "median", _part(first, 50), ""
    yield "p90", _part(first, 90), ""
    yield "worst", max(first), ""
    yield "sum of second calls", sum(again), ""
    layers = model.config.num_hidden_layers
    more = [max(0.0, (one - two) / layers) for one, two in zip(first, again, strict=True)]
    yield "first over second, a layer, median", _part(more, 50), ""
    yield "first over second, a layer, p90", _part(more, 90), ""


def _time_call(call: Callable[[], Any], device: torch.device) -> tuple[Any, tuple[float, str]]:
    """Result of a call, its milliseconds until the GPU is idle, and how many kernels it compiled."""
    before, begin = _objects(), time.perf_counter()
    found = call()
    wall.wait(device)
    ms = 1e3 * (time.perf_counter() - begin)
    compiled = _objects() - before
    return found, (ms, f"{compiled} compiled" if compiled else "")


def _objects() -> int:
    """Kernels in the disk cache."""
    return sum(1 for _ in compiler.directory().glob("*.json"))


def _part(values: list[float], percent: int) -> float:
    return quantiles(values, n=100, method="inclusive")[percent - 1]


def _prompt(vocabulary: int, tokens: int) -> list[int]:
    return random.Random(tokens).choices(range(vocabulary), k=tokens)
