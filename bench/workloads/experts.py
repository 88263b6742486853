"""Mixtures of experts: one grouped product, and the whole FFN of a layer from tokens to tokens.

The peers are torch's grouped product between a sort and a scatter, compiled or not, a loop over experts, which waits
for the host, and for one product a Triton kernel.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.baselines import DTYPES, Absent, Contender, Inputs, Launch, Workload, compiled, eager
from bench.suites import Case, Suite, suite
from bench.workloads.declared import workload
from cutekernels.op import Work
from cutekernels.ops.moe.ffn import moe_ffn
from cutekernels.ops.products.grouped import GROUPED_GEMM, GroupedProblem
from cutekernels.ops.products.grouped_api import grouped_gemm
from cutekernels.ops.products.groups import SPREADS, expected_experts

MODELS = {  # experts, top_k, hidden, intermediate
    "qwen3-30b-a3b": (128, 8, 2048, 768),
    "mixtral-8x7b": (8, 2, 4096, 14336),
    "deepseek-v2-lite": (64, 6, 2048, 1408),
    "gpt-oss-20b": (32, 4, 2880, 2880),
}
TABLE = ("qwen3-30b-a3b", "mixtral-8x7b")
TOKENS = (1, 4, 16, 64, 256, 1024, 4096, 16384)


# ---- one product ----------------------------------------------------------------------------------------


_PRODUCTS = {
    f"{model} {way}, {t} tokens": {"rows": t * top_k, "n": n, "k": k, "experts": experts}
    for model, (experts, top_k, hidden, inner) in MODELS.items()
    for way, n, k in (("gate_up", 2 * inner, hidden), ("down", hidden, inner))
    for t in TOKENS[::2]
}


def _product_inputs(case: Case, problem: Any, device: str, seed: int) -> Inputs:
    """Rows spread evenly. All input sets of a case share the weights, of which few rows hit few experts'."""
    first = _product_sample(problem, device)
    args = first if seed == 0 else GROUPED_GEMM.variant(problem, first, seed * len(SPREADS))
    results = GROUPED_GEMM.outputs(problem, *args)
    return Inputs(args[:3], results, read_bytes=int(_product_work(case).bytes) - results[0].nbytes, args=args)


def _product_work(case: Case) -> Work:
    """The op's own, but that rows spread evenly alone."""
    p = GroupedProblem.parse(case.problem)
    moved = 2 * (p.rows * (p.n + p.k) + expected_experts(SPREADS[0], p.rows, p.experts) * p.n * p.k)
    return dataclasses.replace(GROUPED_GEMM.work(p), bytes=moved)


@lru_cache(maxsize=1)
def _product_sample(problem: Any, device: str) -> tuple[Any, ...]:
    return GROUPED_GEMM.sample(problem, device, 0)


def _loop(x: Tensor, w: Tensor, offsets: Tensor) -> Tensor:
    ends = offsets.tolist()
    return torch.cat([F.linear(x[ends[e] : ends[e + 1]], w[e]) for e in range(w.shape[0])])


def _triton(case: Case) -> Callable[..., Any]:
    from bench.workloads.grouped_triton import grouped  # Triton's import takes a second

    return grouped


def _group(x: Tensor, w: Tensor, offsets: Tensor) -> Tensor:
    return torch._grouped_mm(x, w.mT, offs=offsets[1:])


# ---- the FFN --------------------------------------------------------------------------------------------


def _layers(*models: str) -> Suite:
    """The problem is that of gate and up."""
    shapes = {
        f"{model}, {t} tokens": {"rows": t * top_k, "n": 2 * inner, "k": hidden, "experts": experts}
        for model, (experts, top_k, hidden, inner) in MODELS.items()
        if model in models
        for t in TOKENS
    }
    return suite("moe_ffn", GroupedProblem, shapes)


def top_k_of(case: Case) -> int:
    return MODELS[case.label.partition(",")[0]][1]


def routed(case: Case, p: Any, device: str, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """x, ids, weights: each token's experts are drawn evenly without repetition."""
    draw = torch.Generator(device).manual_seed(seed)
    top_k = top_k_of(case)
    tokens = p.rows // top_k
    weights, ids = torch.rand((tokens, p.experts), generator=draw, device=device).softmax(-1).topk(top_k, dim=-1)
    x = torch.randn((tokens, p.k), generator=draw, device=device, dtype=DTYPES[p.dtype])
    return x, ids.int(), weights


def layer_work(case: Case, p: Any, inner: int, expert_bytes: float) -> Work:
    """Three products of a row, and the experts that tokens hit, in expectation: a token's are different ones."""
    top_k = top_k_of(case)
    tokens = p.rows // top_k
    hit = p.experts * (1 - (1 - top_k / p.experts) ** tokens)
    return Work(6.0 * p.rows * inner * p.k, 4.0 * tokens * p.k + hit * expert_bytes, depth=float(max(p.k, inner)))


def layer_truth(x: Tensor, up: Tensor, down: Tensor, ids: Tensor, weights: Tensor) -> tuple[Tensor, ...]:
    out = torch.zeros_like(x, dtype=torch.float64)
    for e in range(up.shape[0]):
        at, slot = torch.where(ids == e)
        gate, value = F.linear(x[at].double(), up[e].double()).chunk(2, -1)
        y = F.linear(F.silu(gate) * value, down[e].double())
        out.index_add_(0, at, weights[at, slot, None].double() * y)
    return (out,)


def _layer_inputs(case: Case, p: Any, device: str, seed: int) -> Inputs:
    """x, gate and up, down, ids, weights."""
    x, *routes = routed(case, p, device, seed)
    read = int(_layer_work(case).bytes) - x.nbytes
    return Inputs((x, *_layer_weights(p, device), *routes), (torch.empty_like(x),), read_bytes=read)


@lru_cache(maxsize=1)
def _layer_weights(p: Any, device: str) -> tuple[Tensor, Tensor]:
    """Weights of gate and up, and of down. All input sets of a case share them: few tokens read few experts'."""
    draw = torch.Generator(device).manual_seed(0)
    normal = partial(torch.randn, generator=draw, device=device, dtype=DTYPES[p.dtype])
    inner = p.n // 2
    up, down = normal((p.experts, p.n, p.k)).mul_(p.k**-0.5), normal((p.experts, p.k, inner)).mul_(inner**-0.5)
    return up, down


def _layer_work(case: Case) -> Work:
    p = GroupedProblem.parse(case.problem)
    return layer_work(case, p, p.n // 2, 3.0 * p.n * p.k)


def _layer_grouped(x: Tensor, up: Tensor, down: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """torch's grouped product between a sort and a combine."""
    experts, (tokens, top_k) = up.shape[0], ids.shape
    order = torch.argsort(ids.flatten(), stable=True)
    edges = torch.arange(experts, device=ids.device, dtype=ids.dtype)
    ends = torch.searchsorted(ids.flatten()[order], edges, right=True, out_int32=True)
    gate, value = torch._grouped_mm(x[order // top_k], up.mT, offs=ends).chunk(2, -1)
    y = torch._grouped_mm(F.silu(gate) * value, down.mT, offs=ends)
    back = torch.empty_like(order).scatter_(0, order, torch.arange(order.numel(), device=order.device))
    return (y[back].view(tokens, top_k, -1) * weights.unsqueeze(-1)).sum(1).to(x.dtype)


def _layer_loop(x: Tensor, up: Tensor, down: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """The loop over the experts that are hit, as transformers writes it."""
    out = torch.zeros_like(x, dtype=torch.float32)
    for e in ids.unique().tolist():
        at, slot = torch.where(ids == e)
        gate, value = F.linear(x[at], up[e]).chunk(2, -1)
        out.index_add_(0, at, F.linear(F.silu(gate) * value, down[e]) * weights[at, slot, None])
    return out.to(x.dtype)


def _where(peer: Contender, why: str, takes: Callable[[Tensor], bool]) -> Contender:
    """``peer``, absent for a reason where it does not take tokens like x."""

    def bind(case: Case, sets: Sequence[Inputs]) -> Sequence[Launch]:
        if not takes(sets[0].operands[0]):
            raise Absent(why)
        return peer.bind(case, sets)

    return dataclasses.replace(peer, bind=bind)


def _peers(grouped: Callable[..., Any], loop: Callable[..., Any]) -> tuple[Contender, ...]:
    torchs = (compiled(lambda case: grouped), eager(lambda case: grouped, "torch._grouped_mm"))
    why = "torch._grouped_mm takes bf16 on a GPU"
    return (
        *[_where(peer, why, lambda x: x.is_cuda and x.dtype == torch.bfloat16) for peer in torchs],
        # A contender that waits for the host cannot be captured, and so not timed.
        _where(eager(lambda case: loop), "its loop over experts waits for the host", lambda x: not x.is_cuda),
    )


_TRITON = _where(eager(_triton, "triton"), "Triton's kernels need a GPU", lambda x: x.is_cuda)
WORKLOADS = (
    workload(
        GROUPED_GEMM,
        {"llm": suite("grouped_gemm", GroupedProblem, _PRODUCTS)},
        (*_peers(_group, _loop), _TRITON),
        grouped_gemm,
        confined=(_TRITON,),
        inputs=_product_inputs,
        work=_product_work,
    ),
    Workload(
        op="moe_ffn",
        poses="grouped_gemm",
        suites={"layers": _layers(*TABLE), "llm": _layers(*MODELS)},
        inputs=_layer_inputs,
        truth=lambda case, i: layer_truth(*i.operands),
        ours=lambda case, sets, config: [partial(moe_ffn, *i.operands) for i in sets],  # each op by its own config
        peers=_peers(_layer_grouped, _layer_loop),
        work=_layer_work,
        configured=False,
    ),
)
