"""Rotary embeddings: two models' queries and keys, both ways, and the rows that others published."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import import_module
from itertools import product
from typing import Any

import torch
from torch import Tensor

from bench.baselines import DTYPES, Absent, Contender, Inputs, Launch, Workload, compiled, each, eager
from bench.suites import Case, suite
from bench.workloads.declared import exact
from cutekernels.ops.rope.api import rope
from cutekernels.ops.rope.op import ROPE, RopeProblem

HEADS = {"llama-3-8b": (32, 8), "qwen2.5-7b": (28, 4)}  # of q, and of k and v
HEADS_FIRST = "heads first"  # in a label: operands lie as (B, H, S, D)
_CONTEXT = 8192  # positions that decoding starts from


WHOLE: dict[str, Any] = {"head_dim": 128, "rotary": 128}
_LLM = {
    f"{model} {batch}x{seq}": WHOLE
    | {"batch": batch, "seq": seq, "heads_q": q, "heads_kv": kv, "positions": "batch" if seq == 1 else "start"}
    for model, (q, kv) in HEADS.items()
    for batch, seq in ((1, 1), (16, 1), (64, 1), (1, 256), (1, 2048), (4, 4096))
}
# Gradients turn the other way round.
_BACKWARD = {name: words | {"inverse": True} for name, words in _LLM.items() if name.endswith(("1x2048", "4x4096"))}
_TOKENS = (512, 1024, 2048, 4096, 8192)
# One tensor of 32 heads; q and k; half of the channels, in halves and interleaved. They were published in fp16.
_REFERENCE = {
    **{f"q, {HEADS_FIRST}, {s}": WHOLE | {"batch": 1, "seq": s, "heads_q": 32} for s in _TOKENS},
    **{f"q and k, {s}": WHOLE | {"batch": 1, "seq": s, "heads_q": 32, "heads_kv": 32} for s in _TOKENS},
    **{
        f"64 of 128 {'interleaved' if interleaved else 'halves'}, {s}": WHOLE
        | {"batch": 8, "seq": s, "heads_q": 48, "rotary": 64, "interleaved": interleaved}
        for s in (1024, 4096, 8192, 16384)
        for interleaved in (True, False)
    },
}


def _inputs(case: Case, problem: RopeProblem, device: str, seed: int) -> Inputs:
    draw = torch.Generator(device).manual_seed(seed)
    normal = partial(torch.randn, generator=draw, device=device, dtype=DTYPES[problem.dtype])
    batch, seq, width = problem.batch, problem.seq, problem.head_dim
    if HEADS_FIRST in case.label:
        q, k = (normal((batch, h, seq, width)).transpose(1, 2) for h in (problem.heads_q, problem.heads_kv))
    else:
        q, k = (normal((batch, seq, h, width)) for h in (problem.heads_q, problem.heads_kv))
    starts = torch.empty(0, device=device, dtype=torch.long)
    if problem.positions == "batch":
        starts = torch.randint(0, _CONTEXT, (batch,), generator=draw, device=device)
    steps = torch.arange(_CONTEXT + 1 if starts.numel() else seq, device=device, dtype=torch.float32)
    angles = steps[:, None] * 10000.0 ** -(torch.arange(problem.half, device=device) / problem.half)
    # Nobody writes to given results here: they stand for the bytes that a call writes. Some change q and k in place.
    results = (torch.empty_like(q), torch.empty_like(k))
    tables = angles.cos(), angles.sin()
    return Inputs((q, k, *tables, starts), results, (q, k), args=(q, k, *tables, starts if starts.numel() else None, 0))


def _rotate(case: Case) -> Callable[..., Any]:
    problem = RopeProblem.parse(case.problem)
    interleaved = problem.interleaved

    def turned(x: Tensor, c: Tensor, s: Tensor) -> Tensor:
        half = c.shape[-1]
        head = x[..., : 2 * half].to(c.dtype)
        a, b = (head[..., ::2], head[..., 1::2]) if interleaved else (head[..., :half], head[..., half:])
        y = (a * c - b * s, b * c + a * s)
        z = torch.stack(y, -1).flatten(-2) if interleaved else torch.cat(y, -1)
        return torch.cat((z.to(x.dtype), x[..., 2 * half :]), -1)

    def rotated(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, starts: Tensor) -> tuple[Tensor, ...]:
        cos, sin = _at(q, cos, sin, starts)
        c, s = cos.unsqueeze(-2), (-sin if problem.inverse else sin).unsqueeze(-2)
        return (turned(q, c, s), turned(k, c, s)) if k.shape[2] else (turned(q, c, s),)

    return rotated


def _truth(case: Case, i: Inputs) -> tuple[Tensor, ...]:
    q, k = exact(ROPE, case, i)
    return (q, k) if k.shape[2] else (q,)


def _ours(case: Case, sets: Sequence[Inputs], config: Any, inplace: bool = False) -> Sequence[Launch]:
    problem = RopeProblem.parse(case.problem)

    def bind(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, starts: Tensor) -> Launch:
        if problem.inverse:  # what autograd runs
            text = None if config is None else str(config)
            return partial(torch.ops.cutekernels.rope, q, k, cos, sin, None, problem.interleaved, True, 0, text)
        options: Any = {"interleaved": problem.interleaved, "positions": starts if starts.numel() else None}
        call = partial(rope, q, k if k.shape[2] else None, cos, sin, **options, inplace=inplace, config=config)
        return lambda: tuple([t for t in call() if t is not None])

    return [bind(*i.operands) for i in sets]


def _in_place(case: Case, sets: Sequence[Inputs]) -> Sequence[Launch]:
    if RopeProblem.parse(case.problem).inverse:
        raise Absent("a gradient is not turned in place")
    return _ours(case, sets, None, inplace=True)


def _complex(case: Case) -> Callable[..., Launch]:
    """Plain torch again: each pair is a complex number in fp32, and turning it one product."""
    problem = RopeProblem.parse(case.problem)
    if problem.inverse or problem.positions != "start":
        raise Absent("it is there for the rows that others published")
    turning = problem.rotary

    def turned(x: Tensor, turns: Tensor) -> Tensor:
        head = x[..., :turning].float()
        pairs = head.unflatten(-1, (-1, 2)) if problem.interleaved else head.unflatten(-1, (2, -1)).transpose(-1, -2)
        product = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * turns)
        product = (product if problem.interleaved else product.transpose(-1, -2)).flatten(-2)
        return torch.cat((product.to(x.dtype), x[..., turning:]), -1)

    def bind(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, starts: Tensor) -> Launch:
        turns = torch.complex(cos, sin).unsqueeze(-2)
        return lambda: tuple([turned(t, turns) for t in (q, k) if t.shape[2]])

    return bind


def _liger(case: Case) -> Callable[..., Launch]:
    """In place too. Its tables are gathered ahead, which it is not charged for."""
    from liger_kernel.ops.rope import LigerRopeFunction

    problem = RopeProblem.parse(case.problem)
    if problem.inverse:
        raise Absent("its gradient is bound to its forward pass")
    if problem.interleaved or problem.rotary < problem.head_dim or not problem.heads_kv:
        raise Absent("liger turns all channels, as pairs of halves, of q and k together")

    def bind(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, starts: Tensor) -> Launch:
        tables = [torch.cat((t, t), -1) for t in _at(q, cos, sin, starts)]

        def launch() -> tuple[Tensor, ...]:
            turned = LigerRopeFunction.apply(q.transpose(1, 2), k.transpose(1, 2), *tables)
            return turned[0].transpose(1, 2), turned[1].transpose(1, 2)

        return launch

    return bind


def _cute(case: Case, sets: Sequence[Inputs]) -> Mapping[str, Sequence[Launch]]:
    """The example's kernel with as many heads a tile as there are, or fewer; compiled at its first launch."""
    problem = RopeProblem.parse(case.problem)
    if problem.inverse or problem.positions != "start":
        raise Absent("examples/rope_cute.py turns forward, from position 0")
    example = import_module("examples.rope_cute").rope

    def bind(i: Inputs, heads: int, warps: int) -> Launch:
        q, k, cos, sin, _ = i.operands
        call = partial(example, q, k if k.shape[2] else None, cos, sin, interleaved=problem.interleaved)
        return lambda: tuple([t for t in call(heads=heads, warps=warps) if t is not None])

    return {
        f"tokens=1 heads={heads} warps={warps}": [bind(i, heads, warps) for i in sets]
        for heads, warps in product((8, 16, 32), (1, 4))
    }


def _at(q: Tensor, cos: Tensor, sin: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
    """The tables' rows of each token of ``q``."""
    if not starts.numel():
        return cos[None], sin[None]
    rows = starts[:, None] + torch.arange(q.shape[1], device=q.device)
    return cos[rows], sin[rows]


_SHAPES: Any = {"llm": _LLM, "reference": _REFERENCE, "backward": _BACKWARD, "headtohead": _REFERENCE}
_SUITES = {name: suite("rope", RopeProblem, shapes) for name, shapes in _SHAPES.items()}
_PEERS = (
    compiled(_rotate),
    eager(_rotate),
    each("eager (complex)", _complex),
    each("liger (in place)", _liger),
    Contender("cutekernels (in place)", _in_place),
)
WORKLOADS = (Workload("rope", _SUITES, _inputs, _truth, _ours, _PEERS, streams=lambda case: (1, 1), cute=_cute),)
