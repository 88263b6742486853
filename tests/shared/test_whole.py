"""Whole programs around the ops: torch.export, and the numerical gradients of everything differentiable."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import cutekernels as ck
from cutekernels import nn
from cutekernels.kernels.activations import ACTIVATIONS

F64 = torch.float64
INVERSE = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7], dtype=torch.int32).view(4, 2)


class Block(torch.nn.Module):
    """Most ops that a transformer layer runs."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.second = nn.RMSNorm(32), nn.LayerNorm(32)
        self.qkv, self.mlp = torch.nn.Linear(32, 96, bias=False), nn.SwiGLU(32, 48)
        self.rotary = nn.RotaryEmbedding(8, max_positions=16)
        self.table = torch.nn.Parameter(torch.randn(10, 32))

    def forward(self, ids: Tensor) -> Tensor:
        x = ck.embedding(ids, self.table)
        q, k, v = ck.linear(self.norm(x), self.qkv.weight).view(*ids.shape, 12, 8).split(4, 2)
        q, k = self.rotary(q, k)
        seen = ck.attention(q, k, v, causal=True)
        assert isinstance(seen, Tensor)
        x = x + seen.flatten(2)
        normed = self.second(x)
        found: Tensor = x + self.mlp(normed) + ck.rms_norm_linear(x, None, ck.gemm(self.table.t(), self.table))
        return found


@pytest.mark.filterwarnings("ignore::FutureWarning")  # torch's own
def test_a_block_exports() -> None:
    torch.manual_seed(0)
    block, ids = Block().eval(), torch.tensor([[1, 2, 3], [4, 5, 6]])
    program = torch.export.export(block, (ids,))
    names = {str(node.target) for node in program.graph.nodes}
    for name in ("rms_norm", "layer_norm", "linear", "rope", "attention", "embedding", "silu_mul_packed"):
        assert f"cutekernels.{name}.default" in names
    with torch.no_grad():
        torch.testing.assert_close(program.module()(ids), block(ids))
        torch.testing.assert_close(program.run_decompositions().module()(ids), block(ids))


def _randn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=F64)


GRADIENTS: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...]]] = {
    **{
        f"gemm {name}": (
            lambda a, b, c, bias, name=name: ck.gemm(a, b, c, alpha=0.7, beta=0.3, bias=bias, activation=name),
            (_randn(3, 4), _randn(4, 5), _randn(3, 5), _randn(5)),
        )
        for name in (None, *ACTIVATIONS[1:])
    },
    "gemm, one batch": (ck.gemm, (_randn(2, 3, 4), _randn(4, 5))),
    "linear": (ck.linear, (_randn(2, 3, 4), _randn(5, 4), _randn(5))),
    "rms_norm": (lambda x, w: ck.rms_norm(x, w, weight_offset=1.0), (_randn(3, 6), _randn(6))),
    "add_rms_norm": (ck.add_rms_norm, (_randn(3, 6), _randn(3, 6), _randn(6))),
    "layer_norm": (ck.layer_norm, (_randn(3, 6), _randn(6), _randn(6))),
    "rms_norm_linear": (
        lambda x, n, w, b: ck.rms_norm_linear(x, n, w, b, activation="silu"),
        (_randn(3, 6), _randn(6), _randn(4, 6), _randn(4)),
    ),
    "rms_norm_linear, residual": (
        lambda x, n, w, r: ck.rms_norm_linear(x, n, w, residual=r),
        (_randn(3, 6), _randn(6), _randn(4, 6), _randn(3, 6)),
    ),
    "rms_norm_linear, the op": (
        lambda x, n, w, b: torch.ops.cutekernels.rms_norm_linear(x, n, w, b, None, "gelu", 1e-6),
        (_randn(3, 6), _randn(6), _randn(4, 6), _randn(4)),
    ),
    "linear_silu_mul": (
        lambda x, w, n: ck.linear_silu_mul(x, w, norm_weight=n), (_randn(3, 6), _randn(4, 6), _randn(6))
    ),
    "linear_silu_mul, the op": (
        lambda x, w: torch.ops.cutekernels.linear_silu_mul(x, w, None, False, 1e-6), (_randn(3, 6), _randn(4, 6))
    ),
    "fold": (ck.fold, (_randn(6), _randn(4, 6))),
    "silu_mul": (ck.silu_mul, (_randn(3, 4), _randn(3, 4))),
    "silu_mul, packed": (ck.silu_mul, (_randn(3, 8),)),
    "gelu_mul": (ck.gelu_mul, (_randn(3, 4), _randn(3, 4))),
    "gelu_mul, tanh": (lambda x: ck.gelu_mul(x, approximate="tanh"), (_randn(3, 8),)),
    "bias_gelu": (ck.bias_gelu, (_randn(3, 4), _randn(4))),
    "bias_gelu, tanh": (lambda x, b: ck.bias_gelu(x, b, approximate="tanh"), (_randn(3, 4), _randn(4))),
    "embedding": (lambda table: ck.embedding(torch.tensor([[0, 2], [2, 1]]), table), (_randn(4, 3),)),
    "rope": (
        lambda q, k: ck.rope(q, k, torch.linspace(0, 1, 12).view(6, 2).double(), torch.ones(6, 2, dtype=F64)),
        (_randn(1, 3, 2, 4), _randn(1, 3, 1, 4)),
    ),
    "moe_route": (lambda x: ck.moe_route(x, 2)[0], (_randn(3, 5),)),
    "moe_route, not renormalized": (lambda x: ck.moe_route(x, 2, renormalize=False)[0], (_randn(3, 5),)),
    "grouped_gemm": (
        lambda x, w, b: ck.grouped_gemm(x, w, torch.tensor([0, 3, 3, 5], dtype=torch.int32), b, activation="silu"),
        (_randn(6, 4), _randn(3, 5, 4), _randn(3, 5)),
    ),
    "moe_ffn": (
        lambda x, up, down, w: ck.moe_ffn(x, up, down, INVERSE % 3, w),
        (_randn(4, 3), _randn(3, 4, 3), _randn(3, 3, 2), _randn(4, 2)),
    ),
    "moe_gather": (lambda x: ck.moe_gather(x, INVERSE), (_randn(4, 3),)),
    "moe_combine": (lambda rows, w: ck.moe_combine(rows, INVERSE, w), (_randn(8, 3), _randn(4, 2))),
    "attention": (
        lambda q, k, v: ck.attention(q, k, v, causal=True, softcap=3.0, return_lse=True),
        (_randn(1, 3, 2, 8), _randn(1, 4, 1, 8), _randn(1, 4, 1, 8)),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients_are_the_numerical_ones(name: str) -> None:
    function, given = GRADIENTS[name]
    leaves = [t.clone().requires_grad_() for t in given]
    assert torch.autograd.gradcheck(function, leaves, eps=1e-6, atol=1e-6, fast_mode=False)
