"""The next token of each sequence, chosen on the device."""

from __future__ import annotations

from dataclasses import dataclass, fields
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor

from cutekernels.ops.sampling.api import check_temperature, sample_filter
from cutekernels.ops.shared.checks import check_number, check_whole

_MIX = (-7046029254386353131, -4658895280553007687, -7723592293110705685)  # of splitmix64, as signed numbers


@dataclass(frozen=True)
class Sampling:
    """How a request's tokens are chosen; greedy by default.

    Attributes:
        temperature: divides the logits; 0 takes the most likely token. The least other one is 1e-30.
        top_k, top_p, min_p: filters of :func:`cutekernels.sample_filter`; off by default.
        presence_penalty: is subtracted from the logits of tokens that the request has generated; from -1e6 to 1e6.
        seed: of the draw. The same seed gives the same tokens, whatever else is in the batch.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        for field in fields(self):  # numpy's numbers become Python's
            value: Any = getattr(self, field.name)
            kind, kinds = (int, Integral) if field.name in _TYPES else (float, Real)
            if type(value) not in (bool, int, float) and isinstance(value, kinds):
                object.__setattr__(self, field.name, kind(value))  # type: ignore[call-overload]
        check_number("Sampling", "temperature", self.temperature)
        check_temperature(self.temperature)
        for name in ("top_p", "min_p"):
            check_number("Sampling", name, getattr(self, name), 0.0, 1.0)
        check_number("Sampling", "presence_penalty", self.presence_penalty, -_PENALTY, _PENALTY)
        check_whole("Sampling", "top_k", self.top_k, 0, 2**31 - 1)
        check_whole("Sampling", "seed", self.seed, 0, SEEDS - 1)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0 and self.presence_penalty == 0


_PENALTY = 1e6  # over the least temperature it is still a number of fp32
SEEDS = 2**63
_TYPES = {"top_k": torch.int32, "seed": torch.int64}


class Choices:
    """The parameters of every sequence in the batch, on the device, and the tokens that each has generated."""

    def __init__(self, batch: int, vocabulary: int, device: torch.device) -> None:
        self._by_name = {
            f.name: torch.zeros(batch, dtype=_TYPES.get(f.name, torch.float32), device=device) for f in fields(Sampling)
        }
        self.seen = torch.zeros((batch, vocabulary), dtype=torch.bool, device=device)

    def put(self, slot: int, sampling: Sampling) -> None:
        """A new request in ``slot``; asynchronous."""
        for name, values in self._by_name.items():
            values[slot : slot + 1].fill_(getattr(sampling, name))
        self.seen[slot].zero_()

    def take(
        self, logits: Tensor, positions: Tensor, slots: slice, greedy: bool, *, out: Tensor | None = None
    ) -> Tensor:
        """The next token ``(B,)`` of the sequences in ``slots``, whose ``logits`` are ``(B, V)``.

        ``positions``: int32 ``(B,)``, of the tokens that the logits follow. ``greedy``: all of them are. ``out``: where
        to write, int64.
        """
        if greedy:
            return torch.argmax(logits, -1, out=out)
        own = {name: values[slots] for name, values in self._by_name.items()}
        seen = self.seen[slots]
        logits = logits.float() - own["presence_penalty"][:, None] * seen
        kept = sample_filter(
            logits, temperature=own["temperature"], top_k=own["top_k"], top_p=own["top_p"], min_p=own["min_p"]
        )
        mass = kept.softmax(-1).cumsum(-1)
        point = uniform(own["seed"], positions)[:, None] * mass[:, -1:]
        tokens = torch.argmax((mass > point).int(), -1, out=out)  # the first whose running sum exceeds the point
        seen.scatter_(1, tokens[:, None], True)
        return tokens


def uniform(seeds: Tensor, positions: Tensor) -> Tensor:
    """Numbers in [0, 1), fp32: a hash (splitmix64) of each seed and position, so that no other request counts."""
    x = seeds + (positions.long() + 1) * _MIX[0]
    for shift, factor in ((30, _MIX[1]), (27, _MIX[2])):
        x = (x ^ ((x >> shift) & ((1 << (64 - shift)) - 1))) * factor
    x = x ^ ((x >> 31) & ((1 << 33) - 1))
    return ((x >> 40) & ((1 << 24) - 1)).float() * 2.0**-24
