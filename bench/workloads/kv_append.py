"""New keys and values into a cache, and q turned beside them: decode steps and prompts of two models."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bench.baselines import DTYPES, Contender, Inputs, Launch, Workload, compiled, eager
from bench.suites import Case, suite
from bench.workloads.rope import HEADS, WHOLE
from cutekernels.ops.kv_append.op import KV_APPEND, LENGTHS, KvAppendProblem
from cutekernels.ops.rope.api import rope
from cutekernels.ops.shared import calls

_SPARE = 64  # tokens that a sequence has room for beyond its new ones


_SIZES = ((1, 1, 0), (16, 1, 0), (64, 1, 0), (64, 1, 16), (1, 2048, 0), (1, 2048, 16), (4, 4096, 0))
_LLM = {
    f"{model} {batch}x{seq}" + (f" pages of {size}" if size else ""): WHOLE
    | {"batch": batch, "seq": seq, "heads_q": heads, "heads_kv": heads_kv, "page_size": size}
    for model, (heads, heads_kv) in HEADS.items()
    for batch, seq, size in _SIZES
}


def _inputs(case: Case, problem: KvAppendProblem, device: str, seed: int) -> Inputs:
    """The first tokens of every sequence: a call writes them to the same place each time."""
    draw = torch.Generator(device).manual_seed(seed)
    normal = partial(torch.randn, generator=draw, device=device, dtype=DTYPES[problem.dtype])
    batch, seq = problem.batch, problem.seq
    q, k, v = (normal((batch, seq, h, 128)) for h in (problem.heads_q, problem.heads_kv, problem.heads_kv))
    size = problem.page_size or seq + _SPARE
    entries = -(-(seq + _SPARE) // size) if problem.page_size else 1
    caches = [torch.zeros((batch * entries, size, problem.heads_kv, 128), device=device, dtype=q.dtype) for _ in "kv"]
    state = torch.zeros((3, batch), device=device, dtype=torch.int32)
    angles = torch.arange(seq, device=device)[:, None] * 10000.0 ** -(torch.arange(64, device=device) / 64)
    operands: tuple[Tensor, ...] = (q, k, v, *caches, state, angles.cos(), angles.sin())
    if problem.page_size:
        order = torch.randperm(batch * entries, generator=draw, device=device)
        operands = (*operands, order.int().view(batch, entries))
    # What is read and written of the caches is the new tokens alone, for which the last two results stand.
    read = sum(x.numel() * x.element_size() for x in (q, k, v, angles, angles))
    return Inputs(operands, tuple([torch.empty_like(x) for x in (q, k, v)]), tuple(caches), read_bytes=read)


def _rows(problem: KvAppendProblem, state: Tensor, table: Tensor | None) -> tuple[Tensor, Tensor]:
    """Page and slot of each new token, (B, S)."""
    at = state[LENGTHS].long()[:, None] + torch.arange(problem.seq, device=state.device)
    if table is None:
        return torch.arange(problem.batch, device=state.device)[:, None].expand_as(at), at
    return table.long().gather(1, at // problem.page_size), at % problem.page_size


def _place(case: Case) -> Callable[..., tuple[Tensor, ...]]:
    """Plain torch: turned, scattered to where each sequence ends. Lengths stay, so that a call can be repeated."""
    problem = KvAppendProblem.parse(case.problem)

    def append(
        q: Tensor, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, state: Tensor, cos: Tensor, sin: Tensor,
        table: Tensor | None = None,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        c, s = (t[state[LENGTHS].long()[:, None] + torch.arange(problem.seq, device=q.device)] for t in (cos, sin))

        def turned(x: Tensor) -> Tensor:
            a, b = x.to(c.dtype).chunk(2, -1)
            y = torch.cat((a * c.unsqueeze(2) - b * s.unsqueeze(2), b * c.unsqueeze(2) + a * s.unsqueeze(2)), -1)
            return y.to(x.dtype)

        at = _rows(problem, state, table)
        k_cache[at], v_cache[at] = turned(k), v
        return turned(q), k_cache, v_cache

    return append


def _truth(case: Case, i: Inputs) -> tuple[Tensor, ...]:
    wide = [t.double() if t.is_floating_point() else t for t in i.operands]  # copies: truth places nothing in ours
    return _place(case)(*wide)


def _ours(case: Case, sets: Sequence[Inputs], config: Any) -> Sequence[Launch]:
    """The launch that ``KVCache.append`` makes, with q and the new lengths beside the old: it can be repeated."""
    interleaved = KvAppendProblem.parse(case.problem).interleaved

    def bind(i: Inputs) -> Launch:
        q, k, v, k_cache, v_cache, state, cos, sin, *table = i.operands
        scales = [k.new_empty(0, dtype=torch.uint8) for _ in "kv"]  # none, in 16 bits
        results = (i.results[0], k_cache, v_cache, torch.empty_like(state), *scales)
        inputs = (q, k, v, state, table[0] if table else None, None, cos, sin)

        def launch() -> tuple[Tensor, ...]:
            if q.is_cuda:
                calls.run(KV_APPEND, results, inputs, options=(interleaved,), config=config)
            else:
                KV_APPEND.update(results, inputs, interleaved=interleaved)
            return results[:3]

        return launch

    return [bind(i) for i in sets]


def _in_two(case: Case, sets: Sequence[Inputs]) -> Sequence[Launch]:
    """Our rope, and torch's scattering."""
    problem = KvAppendProblem.parse(case.problem)

    def launch(i: Inputs) -> tuple[Tensor, ...]:
        q, k, v, k_cache, v_cache, state, cos, sin, *table = i.operands
        turned, keys = rope(q, k, cos, sin, positions=state[LENGTHS])
        at = _rows(problem, state, table[0] if table else None)
        assert keys is not None
        k_cache[at], v_cache[at] = keys, v
        return turned, k_cache, v_cache

    return [partial(launch, i) for i in sets]


WORKLOADS = (
    Workload(
        op="kv_append",
        suites={"llm": suite("kv_append", KvAppendProblem, _LLM)},
        inputs=_inputs,
        truth=_truth,
        ours=_ours,
        peers=(compiled(_place), eager(_place), Contender("rope + index_put", _in_two)),
        streams=lambda case: (1, 1),
    ),
)
