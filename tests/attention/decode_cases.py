"""Seeded decode problems for tests: ragged and empty sequences, pages, several queries, every kind of head dim."""

from __future__ import annotations

import random
from typing import Any

import torch

from cutekernels.gpu import GpuSpec
from cutekernels.ops.attention.cache import draw_tables
from cutekernels.ops.attention.decode import DECODE_ATTENTION, DecodeConfig, DecodeProblem
from cutekernels.ops.attention.problem import sample_sinks

ROOMS = (1, 7, 64, 65, 129, 1000)
HEAD_DIMS = (32, 40, 64, 72, 80, 96, 128, 192, 256)
GROUPS = (1, 4, 7, 8, 20)


def random_problem(
    rng: random.Random, rooms: tuple[int, ...] = ROOMS, sinks: tuple[str, ...] = ("none",)
) -> DecodeProblem:
    page_size = rng.choice((0, 0, 16, 64, 256))
    room = rng.choice(rooms)
    window = rng.random() < 0.3
    heads_kv = rng.choice((1, 2))
    return DecodeProblem(
        batch=rng.choice((1, 2, 3)),
        seq_kv=-(-room // page_size) * page_size if page_size else room,
        heads_q=heads_kv * rng.choice(GROUPS),
        heads_kv=heads_kv,
        seq_q=rng.choice((1, 1, 4, 16)),
        window_left=rng.choice((0, 5, 64, 200)) if window else 0,
        head_dim=rng.choice(HEAD_DIMS),
        dtype=rng.choice(("bf16", "fp16")),
        page_size=page_size,
        window=window,
        softcap=rng.random() < 0.2,
        lse=rng.random() < 0.5,
        sinks=rng.choice(sinks),
    )


def random_config(rng: random.Random, problem: DecodeProblem, gpu: GpuSpec) -> DecodeConfig:
    return rng.choice(list(DECODE_ATTENTION.valid(problem, gpu)))


def arguments(p: DecodeProblem, lengths: torch.Tensor, seed: int) -> tuple[Any, ...]:
    """The arguments of ``sample``, for sequences of these lengths."""
    generator = torch.Generator(device=lengths.device).manual_seed(seed)
    sinks = sample_sinks(p.sinks, p.dtype, p.heads_q, p.keys, generator)
    operands = draw_tables(p, lengths, generator)
    return (*operands[:5], sinks, *operands[5:], p.head_dim**-0.5, 2.0 if p.softcap else 0.0)


class Workspace:
    """Workspace of split launches, numbered by calls of :meth:`get`."""

    asked = 0

    def __init__(self, partials: int, tickets: int) -> None:
        pass

    def get(self) -> tuple[str, int]:
        Workspace.asked += 1
        return "workspace", Workspace.asked
