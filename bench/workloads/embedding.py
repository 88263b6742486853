"""Rows of a table by number, and the table's gradient, at the vocabularies of three models."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.baselines import DTYPES, Absent, Contender, Inputs, Launch, Workload, compiled, eager
from bench.suites import Case
from cutekernels.ops.embedding.api import embedding
from cutekernels.ops.embedding.op import EmbeddingProblem, grouped

TABLES = {"mistral-7b": (32000, 4096), "llama-3-8b": (128256, 4096), "qwen2.5-7b": (152064, 3584)}  # (V, D)


def _cases(op: str, tokens: Sequence[int], dtype: str, accumulate: str) -> list[Case]:
    return [
        Case(op, str(EmbeddingProblem(n, vocabulary, cols, str(dtype))), f"{model}, {n} tokens")
        for model, (vocabulary, cols) in TABLES.items()
        for n in tokens
    ]


@lru_cache(maxsize=1)
def _table(vocabulary: int, cols: int, dtype: str, device: str) -> Tensor:
    """One for all input sets of a case: it is larger than the cache, and no call reads more than some rows of it."""
    draw = torch.Generator(device).manual_seed(0)
    return torch.randn((vocabulary, cols), generator=draw, device=device, dtype=DTYPES[dtype])


def _ids(problem: Any, device: str, draw: torch.Generator) -> Tensor:
    return torch.randint(0, problem.vocabulary, (problem.rows,), generator=draw, device=device)


def _inputs(case: Case, problem: Any, device: str, seed: int) -> Inputs:
    table = _table(problem.vocabulary, problem.cols, problem.dtype, device)
    ids = _ids(problem, device, torch.Generator(device).manual_seed(seed))
    out = table.new_empty((problem.rows, problem.cols))
    return Inputs((ids, table), (out,), read_bytes=ids.nbytes + out.nbytes)


def _inputs_backward(case: Case, problem: Any, device: str, seed: int) -> Inputs:
    draw = torch.Generator(device).manual_seed(seed)
    dout = torch.randn((problem.rows, problem.cols), generator=draw, device=device, dtype=DTYPES[problem.dtype])
    return Inputs((dout, _ids(problem, device, draw)), (dout.new_empty((problem.vocabulary, problem.cols)),))


def _truth_backward(case: Case, i: Inputs) -> tuple[Tensor, ...]:
    (dout, ids), (dtable,) = i.operands, i.results
    return (dout.new_zeros(dtable.shape, dtype=torch.float64).index_add_(0, ids, dout.double()),)


# ---- contenders -----------------------------------------------------------------------------------------


def _plain(case: Case) -> Callable[..., Any]:
    return F.embedding


def _plain_backward(case: Case) -> Callable[..., Any]:
    rows = EmbeddingProblem.parse(case.problem).vocabulary

    def gradient(dout: Tensor, ids: Tensor) -> Any:
        return torch.ops.aten.embedding_dense_backward(dout, ids, rows, -1, False)

    return gradient


def _ours(case: Case, sets: Sequence[Inputs], config: Any) -> Sequence[Launch]:
    return [partial(embedding, *i.operands, config=config) for i in sets]


def _ours_backward(case: Case, sets: Sequence[Inputs], config: Any) -> Sequence[Launch]:
    """What autograd runs, into given results: tokens are grouped by id first, which is part of the time."""
    rows = EmbeddingProblem.parse(case.problem).vocabulary
    text = None if config is None else str(config)

    def launch(i: Inputs) -> Tensor:
        dout, ids = i.operands
        torch.ops.cutekernels.embedding_backward_out(dout, *grouped(ids, rows), i.out, text)
        return i.out

    return [partial(launch, i) for i in sets]


def _liger(case: Case, sets: Sequence[Inputs]) -> Sequence[Launch]:
    try:
        from liger_kernel.ops.experimental.embedding import LigerEmbeddingFunction
    except ImportError as error:
        raise Absent(f"liger-kernel does not import: {error}") from error
    return [partial(LigerEmbeddingFunction.apply, table, ids) for ids, table in (i.operands for i in sets)]


WORKLOADS = (
    Workload(
        op="embedding",
        suites={"llm": partial(_cases, "embedding", (1, 16, 256, 2048, 8192))},
        inputs=_inputs,
        truth=lambda case, i: (i.operands[1][i.operands[0]].double(),),
        ours=_ours,
        peers=(compiled(_plain), eager(_plain), Contender("liger", _liger)),
        streams=lambda case: (1, 1),
    ),
    Workload(
        op="embedding_backward",
        suites={"llm": partial(_cases, "embedding_backward", (2048, 8192))},
        inputs=_inputs_backward,
        truth=_truth_backward,
        ours=_ours_backward,
        peers=(compiled(_plain_backward), eager(_plain_backward)),
    ),
)
