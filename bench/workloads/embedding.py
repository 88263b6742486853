"""Rows of a table by number, and the table's gradient, at the vocabularies of three models."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.baselines import Inputs, Launch, compiled, each, eager
from bench.suites import Case, Suite, suite
from bench.workloads.declared import workload
from cutekernels.ops.embedding.api import embedding
from cutekernels.ops.embedding.op import EMBEDDING, EMBEDDING_BACKWARD, EmbeddingProblem, grouped
from cutekernels.ops.shared.calls import call

TABLES = {"mistral-7b": (32000, 4096), "llama-3-8b": (128256, 4096), "qwen2.5-7b": (152064, 3584)}  # (V, D)


def _llm(op: str, *tokens: int) -> dict[str, Suite]:
    shapes = {
        f"{model}, {n} tokens": {"rows": n, "vocabulary": vocabulary, "cols": cols}
        for model, (vocabulary, cols) in TABLES.items()
        for n in tokens
    }
    return {"llm": suite(op, EmbeddingProblem, shapes)}


@lru_cache(maxsize=1)
def _table(problem: Any, device: str) -> Any:
    """One sample for all input sets of a case: its table is larger than the cache, and a call reads some rows of it."""
    return EMBEDDING.sample(problem, device, 0)


def _inputs(case: Case, problem: Any, device: str, seed: int) -> Inputs:
    ids, table = EMBEDDING.variant(problem, _table(problem, device), seed)
    out = table.new_empty((problem.rows, problem.cols))
    return Inputs((ids, table), (out,), read_bytes=ids.nbytes + out.nbytes)


def _inputs_backward(case: Case, problem: Any, device: str, seed: int) -> Inputs:
    dout, *_ = args = EMBEDDING_BACKWARD.sample(problem, device, seed)
    draw = torch.Generator(device).manual_seed(seed)
    ids = torch.randint(0, problem.vocabulary, (problem.rows,), generator=draw, device=device)
    results = EMBEDDING_BACKWARD.outputs(problem, *args)
    return Inputs((dout, ids), results, args=(dout, *grouped(ids, problem.vocabulary)))


def _plain_backward(case: Case) -> Callable[..., Any]:
    rows = EmbeddingProblem.parse(case.problem).vocabulary

    def gradient(dout: Tensor, ids: Tensor) -> Any:
        return torch.ops.aten.embedding_dense_backward(dout, ids, rows, -1, False)

    return gradient


def _ours_backward(case: Case, sets: Sequence[Inputs], config: Any) -> Sequence[Launch]:
    """The launches of autograd, into given results; the time includes the grouping of tokens by id."""
    rows = EmbeddingProblem.parse(case.problem).vocabulary

    def launch(i: Inputs) -> Any:
        dout, ids = i.operands
        return call(EMBEDDING_BACKWARD, (dout, *grouped(ids, rows)), config=config, out=i.results)

    return [partial(launch, i) for i in sets]


def _liger(case: Case) -> Callable[..., Launch]:
    from liger_kernel.ops.experimental.embedding import LigerEmbeddingFunction

    return lambda ids, table: partial(LigerEmbeddingFunction.apply, table, ids)


WORKLOADS = (
    workload(
        EMBEDDING,
        _llm("embedding", 1, 16, 256, 2048, 8192),
        (compiled(lambda case: F.embedding), eager(lambda case: F.embedding), each("liger", _liger)),
        embedding,
        inputs=_inputs,
        streams=lambda case: (1, 1),
    ),
    workload(
        EMBEDDING_BACKWARD,
        _llm("embedding_backward", 2048, 8192),
        (compiled(_plain_backward), eager(_plain_backward)),
        inputs=_inputs_backward,
        ours=_ours_backward,
    ),
)
