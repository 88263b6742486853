"""The vendor's calls compute what the op's reference does, on the samples that the tuner times."""

from __future__ import annotations

import pytest
import torch

from cutekernels.ops.attention.op import ATTENTION, AttentionProblem
from cutekernels.ops.gemm.op import GEMM, GemmProblem
from cutekernels.verify import worst_error


@pytest.mark.parametrize(
    "text",
    [
        "m=32 n=48 k=64",
        "m=32 n=48 k=64 b_major=k c=n dtype=fp16",
        "m=32 n=48 k=64 a_major=m out_major=m bias=same",
        "m=32 n=48 k=64 batched=1 batch=3 c=n",
        "m=32 n=48 k=64 batched=1 batch=3 bias=same",
    ],
)
def test_products(text: str) -> None:
    p = GemmProblem.parse(text)
    args = GEMM.sample(p, "cpu", 0)
    outputs = GEMM.outputs(p, *args)
    outputs[0].fill_(float("nan"))
    call = GEMM.vendor(p)
    assert call is not None
    call(*outputs, *args)
    assert worst_error(outputs, GEMM.reference(p, *args), GEMM.work(p).flops) <= 1


@pytest.mark.parametrize("more", ["", "causal=1", "mask=1"])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2)], ids=["mha", "gqa"])
def test_attention(more: str, heads: tuple[int, int]) -> None:
    p = AttentionProblem.parse(f"batch=2 seq_q=32 seq_kv=32 heads_q={heads[0]} heads_kv={heads[1]} head_dim=64 {more}")
    args = ATTENTION.sample(p, "cpu", 0)
    call = ATTENTION.vendor(p)
    assert call is not None
    found = call(*ATTENTION.outputs(p, *args), *args)
    assert isinstance(found, torch.Tensor)
    work = ATTENTION.work(p)
    assert worst_error((found.transpose(1, 2),), ATTENTION.reference(p, *args), work.flops, "fp32", work.depth) <= 1


@pytest.mark.parametrize(
    "text", ["m=32 n=48 k=64 activation=gelu", "m=32 n=48 k=64 bias=fp32", "m=32 n=48 k=64 c=n bias=same"]
)
def test_products_that_take_more_than_one_call_have_none(text: str) -> None:
    assert GEMM.vendor(GemmProblem.parse(text)) is None


@pytest.mark.parametrize(
    "more", ["varlen=1", "softcap=1", "window=left window_left=8", "seq_q=16 causal=1", "causal=1 mask=1"]
)
def test_attention_that_torch_lacks_has_none(more: str) -> None:
    fields = {"batch": "2", "seq_q": "32", "seq_kv": "32", "heads_q": "4", "heads_kv": "4", "head_dim": "64"}
    fields |= dict(word.split("=") for word in more.split())
    p = AttentionProblem.parse(" ".join(f"{name}={value}" for name, value in fields.items()))
    assert ATTENTION.vendor(p) is None
