"""The experts of a layer with packed weights, from tokens to tokens, beside ``moe_ffn`` with the same in bf16.

Gates are SwiGLU's in all models: gpt-oss's own, clamped, has no fused counterpart in bf16.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from bench.baselines import DTYPES, Absent, Contender, Inputs, Launch, Workload
from bench.suites import Case, suite
from bench.workloads.experts import MODELS, layer_truth, layer_work, routed
from bench.workloads.quantized_peers import nibbles, rows_of
from cutekernels.op import Work
from cutekernels.ops.activations.api import silu_mul
from cutekernels.ops.moe.api import moe_combine, moe_gather, moe_permute
from cutekernels.ops.moe.ffn import moe_ffn
from cutekernels.ops.products.dequantize import rows_of_scale
from cutekernels.ops.products.packed import QUANTIZED_LINEAR, QuantizedGroupedProblem
from cutekernels.quant import QuantizedStack, QuantizedWeight

INT4: dict[str, Any] = {}
BLOCK: dict[str, Any] = {"code": "e4m3", "scale_rows": 128, "scale": "fp32"}
MXFP4: dict[str, Any] = {"code": "e2m1", "group": 32, "scale": "e8m0"}
LAYERS = (  # as their checkpoints are quantized
    ("gpt-oss-20b", "mxfp4", MXFP4),
    ("qwen3-30b-a3b", "int4 g128", INT4),
    ("qwen3-30b-a3b", "e4m3 block", BLOCK),
    ("mixtral-8x7b", "int4 g128", INT4),
)
TOKENS = (1, 4, 16, 64, 256, 1024, 4096)


_CASES = {  # the problem is that of gate and up
    f"{model}, {form}, {t} tokens": {"rows": t * top_k, "n": inner, "k": hidden, "experts": experts, **words}
    for model, form, words in LAYERS
    for experts, top_k, hidden, inner in [MODELS[model]]
    for t in TOKENS
}


def _parts(p: Any) -> tuple[Any, Any]:
    """The problems of gate and up, and of down."""
    return p, p.replace(n=p.k, k=p.n, activation="none")


def _draw(p: Any, device: str) -> Iterator[tuple[Any, Any, Tensor, Tensor]]:
    """For each part: its problem, the problem of all experts as one weight, that weight's codes and scales."""
    for each in _parts(p):
        whole = each.one.replace(n=each.experts * each.weight_rows)
        yield each, whole, *QUANTIZED_LINEAR.sample(whole.replace(m=0), device, 0)[1:3]


@lru_cache(maxsize=1)
def _stacks(p: Any, device: str) -> list[QuantizedStack]:
    """All input sets of a case share them: few tokens read few experts'."""
    return [
        QuantizedStack(
            QuantizedWeight(
                one.code, one.group, rows_of_scale(scales, one.n), (one.n, one.k), packed, scales, dtype=DTYPES[p.dtype]
            ),
            p.experts,
        )
        for _, one, packed, scales in _draw(p, device)
    ]


@lru_cache(maxsize=1)
def _dense(p: Any, device: str) -> list[Tensor]:
    return [stack.dequantize() for stack in _stacks(p, device)]


def _inputs(case: Case, p: Any, device: str, seed: int) -> Inputs:
    x, *routes = routed(case, p, device, seed)
    return Inputs((x, *routes), (torch.empty_like(x),), read_bytes=int(_work(case).bytes) - x.nbytes)


def _work(case: Case) -> Work:
    p = QuantizedGroupedProblem.parse(case.problem)
    return layer_work(case, p, p.n, sum(each.one.weight_bytes for each in _parts(p)))


def _truth(case: Case, i: Inputs) -> tuple[Tensor, ...]:
    stacks = _stacks(QuantizedGroupedProblem.parse(case.problem), str(i.out.device))
    return layer_truth(i.operands[0], *[stack.dequantize(torch.float32) for stack in stacks], *i.operands[1:])


def _launches(weights_of: Any, case: Case, sets: Sequence[Inputs], config: Any = None) -> Sequence[Launch]:
    """``moe_ffn``, a chain of ops, each with its own config."""
    p = QuantizedGroupedProblem.parse(case.problem)
    up, down = weights_of(p, str(sets[0].operands[0].device))
    return [partial(moe_ffn, i.operands[0], up, down, *i.operands[1:]) for i in sets]


# ---- Humming --------------------------------------------------------------------------------------------


@lru_cache(maxsize=1)
def _layers(p: Any, device: str) -> list[Any]:
    """Humming's layers of gate and up, and of down, with the codes and scales of :func:`_stacks`."""
    from humming.layer import HummingLayer

    made = []
    for each, *whole in _draw(p, device):
        rows = rows_of(*whole)
        config = {"dtype": "uint4", "group_size": each.group}
        sizes = {"shape_n": each.weight_rows, "shape_k": each.k, "num_experts": each.experts}
        layer = HummingLayer(**sizes, weight_config=config, torch_dtype=DTYPES[each.dtype]).to(device)
        weight = nibbles(rows.codes).view(torch.int32).view(each.experts, each.weight_rows, -1)
        layer.load_from_tensors({"weight": weight, "weight_scale": rows.scales.view(*weight.shape[:2], -1)})
        layer.transform()
        made.append(layer)
    return made


def _humming(case: Case, sets: Sequence[Inputs]) -> Sequence[Launch]:
    """Its grouped products by its own heuristics, between our permutation, gate and combination."""
    p = QuantizedGroupedProblem.parse(case.problem)
    if (p.code, p.group) != ("int4", 128):
        raise Absent("it is called for int4 in groups of 128")
    up, down = _layers(p, str(sets[0].operands[0].device))
    grouped = {"gemm_type": "grouped_contiguous"}

    def ffn(x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        _, offsets, inverse = moe_permute(ids, p.experts)
        layout = {"expert_layout": offsets.long(), "compute_config": grouped}
        hidden = silu_mul(up(moe_gather(x, inverse), **layout))
        return moe_combine(down(hidden, **layout), inverse, weights)

    return [partial(ffn, *i.operands) for i in sets]


WORKLOADS = (
    Workload(
        op="quantized_moe_ffn",
        poses="quantized_grouped_gemm",
        suites={"layers": suite("quantized_moe_ffn", partial(QuantizedGroupedProblem, activation="silu_mul"), _CASES)},
        inputs=_inputs,
        truth=_truth,
        ours=partial(_launches, _stacks),
        configured=False,
        peers=(Contender("our ops in bf16", partial(_launches, _dense)), Contender("humming", _humming)),
        work=_work,
    ),
)
