"""Seeded problems of many queries over a cache: ragged and empty sequences, pages, windows, every kind of head dim."""

from __future__ import annotations

import math
import random
from typing import Any

import torch
from torch import Tensor

from cutekernels.gpu import GpuSpec
from cutekernels.ops.attention.cache import CACHE_ATTENTION, CacheProblem, draw_tables
from cutekernels.ops.attention.config import AttentionConfig
from cutekernels.ops.attention.problem import sample_sinks

ROOMS = (17, 64, 65, 129, 1000)
QUERIES = (17, 64, 100, 300)
HEAD_DIMS = (32, 40, 64, 80, 96, 128, 192, 256)


def random_problem(
    rng: random.Random, rooms: tuple[int, ...] = ROOMS, queries: tuple[int, ...] = QUERIES
) -> CacheProblem:
    page_size = rng.choice((0, 0, 16, 32, 64, 256))
    room, heads_kv = rng.choice(rooms), rng.choice((1, 2))
    window = rng.choice(("none", "none", "left"))
    return CacheProblem(
        batch=rng.choice((1, 2, 3)),
        seq_q=rng.choice(queries),
        seq_kv=-(-room // page_size) * page_size if page_size else room,
        heads_q=heads_kv * rng.choice((1, 4, 7)),
        heads_kv=heads_kv,
        window_left=rng.choice((0, 5, 64, 200)) if window == "left" else 0,
        head_dim=rng.choice(HEAD_DIMS),
        dtype=rng.choice(("bf16", "fp16")),
        window=window,
        softcap=rng.random() < 0.2,
        lse=rng.random() < 0.5,
        sinks=rng.choice(("none", "none", "same", "fp32")),
        page_size=page_size,
    )


def random_config(rng: random.Random, p: CacheProblem, gpu: GpuSpec, body: str | None = None) -> AttentionConfig:
    return rng.choice([c for c in CACHE_ATTENTION.valid(p, gpu) if body in (None, c.body)])


def arguments(p: CacheProblem, lengths: Tensor, seed: int) -> tuple[Any, ...]:
    """The op's, NaN wherever no query sees a token; pages that only such tokens are in do not exist."""
    generator = torch.Generator(device=lengths.device).manual_seed(seed)
    q, k, v, lengths, table, *scales = draw_tables(p, lengths, generator)
    if p.window == "left":
        for b, length in enumerate(lengths.tolist()):
            gone = max(0, length - p.seq_q - p.window_left)
            whole = gone // p.page_size * p.page_size if p.page_size else gone
            for t in (k, v):
                if table is None:
                    t[b, :gone] = math.nan
                else:
                    t[table[b, : whole // p.page_size].long()] = math.nan
                    if gone > whole:
                        t[int(table[b, whole // p.page_size]), : gone - whole] = math.nan
    sinks = sample_sinks(p.sinks, p.dtype, p.heads_q, p.pairs / max(1, p.seq_q), generator)
    return q, k, v, lengths, table, sinks, *scales, p.head_dim**-0.5, 2.0 if p.softcap else 0.0


def without_unseen_pages(p: CacheProblem, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments with entries of the page table that no query sees a token of made hostile."""
    q, k, v, lengths, table, *rest = args
    if table is None:
        return args
    table = table.clone()
    for b, length in enumerate(lengths.tolist()):
        gone = max(0, length - p.seq_q - p.window_left) if p.window == "left" else 0
        table[b, : gone // p.page_size] = -(2**31)
        table[b, -(-length // p.page_size) :] = 2**31 - 1
    return q, k, v, lengths, table, *rest
