"""Calls that used to surface an error of Python's or torch's own, or were accepted without a word."""

from __future__ import annotations

from collections.abc import Callable
from decimal import Decimal

import pytest
import torch

import cutekernels as ck
from cutekernels.errors import CuteKernelsError
from cutekernels.models import Sampling
from cutekernels.nn import MoE, RMSNorm, RotaryEmbedding

X, W = torch.randn(4, 8), torch.randn(16, 8)
CALLS: dict[str, tuple[Callable[[], object], str]] = {
    "warmup of a number": (lambda: ck.warmup(3), "pairs of an op's name"),  # type: ignore[arg-type]
    "warmup of names": (lambda: ck.warmup(["gemm"]), "pairs of an op's name"),  # type: ignore[list-item]
    "warmup of a text": (lambda: ck.warmup("gemm"), "pairs of an op's name"),  # type: ignore[arg-type]
    "a pair of one": (lambda: ck.warmup([("gemm",)]), "pairs of an op's name"),  # type: ignore[list-item]
    "explain a number": (lambda: ck.explain("gemm", 3, gpu="h200"), "problem as a string"),  # type: ignore[arg-type]
    "explain a list": (lambda: ck.explain(["gemm"], "m=1", gpu="h200"), "op as a string"),  # type: ignore[arg-type]
    "explain on two GPUs": (lambda: ck.explain("gemm", "m=1", gpu="h200", gpu_name="a100"), "takes one GPU"),
    "explain on no GPU": (lambda: ck.explain("gemm", "m=1", gpu=None), "gpu as a string"),  # type: ignore[arg-type]
    "a seed of 70 bits": (lambda: Sampling(seed=2**70), "from 0 to 9223372036854775807; got 1180591620717411303424"),
    "trials of a part 3": (lambda: ck.db.open().trials(part=3), "part must be a text"),  # type: ignore[arg-type]
    "the latest -1 trials": (lambda: ck.db.open().trials(latest=-1), "latest is a number of trials from 1 up"),
    "tables to a text": (lambda: RotaryEmbedding(8).tables("x"), "positions as a whole number"),  # type: ignore[arg-type]
    "tables to -5": (lambda: RotaryEmbedding(8).tables(-5), "positions as a whole number"),
    "a wider head": (lambda: RotaryEmbedding(8)(torch.randn(1, 2, 1, 16)), "heads of 8 channels"),
    "a true factor": (
        lambda: RotaryEmbedding(8, rope_scaling={"rope_type": "linear", "factor": True}),
        "a positive number",
    ),
    "an endless factor": (
        lambda: RotaryEmbedding(8, rope_scaling={"rope_type": "linear", "factor": float("inf")}),
        "a positive number",
    ),
    "a norm of ints": (lambda: RMSNorm(8, dtype=torch.int32), "floating-point type"),
    "experts nowhere": (lambda: MoE(8, 8, 4, 2, device="nope"), "device must be one that torch has"),
    "a cache beyond memory": (
        lambda: ck.KVCache.contiguous(2**40, 2**40, 2, 8, device="cpu"),
        "fewer than 2\\^48 elements",
    ),
    "an eps of Decimal NaN": (lambda: ck.rms_norm(X, eps=Decimal("NaN")), "eps"),  # type: ignore[arg-type]
    "an empty activation": (lambda: ck.linear(X, W, activation=""), "activation"),
    "a config that is a number": (lambda: ck.gemm(X, W.T, config=3), "of GemmConfig or its text"),  # type: ignore[arg-type]
    "c of words": (lambda: ck.gemm(X, W.T, "junk", beta=0.0), "takes c as a torch.Tensor"),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("name", CALLS)
def test_a_wrong_call_names_its_rule(name: str) -> None:
    call, rule = CALLS[name]
    with pytest.raises(CuteKernelsError, match=rule):
        call()


def test_an_empty_result_overlaps_nothing() -> None:
    out = torch.empty(0).expand(2, 0)[..., None]
    assert ck.rms_norm(torch.randn(2, 0, 1), out=out).shape == (2, 0, 1)


def test_weights_of_empty_heads_have_empty_gradients() -> None:
    x, w = torch.randn(3, 2, 0, requires_grad=True), torch.randn(2, 0, requires_grad=True)
    ck.rms_norm(x, w).sum().backward()
    assert w.grad is not None and w.grad.shape == (2, 0)
