"""Products with packed weights that train: one product for several parameters, and a gradient for each of them.

The packed weight is memory that the parameters share (:mod:`cutekernels.nn.packing`), and no node of autograd's graph:
a Function takes the parameters too, so that their gradients, rows of one product, and their versions are autograd's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from cutekernels.errors import UnsupportedProblem
from cutekernels.nn.mlp import Gate, gate_mul
from cutekernels.ops.activations import api as activations
from cutekernels.ops.gemm.api import gemm, linear


def projections(
    x: Tensor, packed: Tensor, bias: Tensor | None, weights: Sequence[Tensor], biases: Sequence[Tensor]
) -> Any:
    """``x @ weight.T + bias`` of each of ``weights``, by one product with ``packed``, their rows side by side.

    ``bias`` are the ``biases`` side by side, or None and no biases.
    """
    return _project(x, packed, bias, len(weights), *weights, *biases)


def mlp(x: Tensor, gate: Gate, packed: Tensor, gate_weight: Tensor, up_weight: Tensor, down: Tensor) -> Any:
    """``(act(x @ gate.T) * (x @ up.T)) @ down.T``. The backward computes what ``down`` multiplies again, from the
    gate and up that it needs anyway, so that it is not saved.
    """
    return _multiply(x, gate, packed, gate_weight, up_weight, down)


class _Projections(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, packed: Tensor, bias: Tensor | None, n: int, *parameters: Tensor) -> Any:
        ctx.packed, ctx.sizes = packed, [len(weight) for weight in parameters[:n]]
        ctx.save_for_backward(x, *parameters)  # the parameters for their versions: packed has one of its own
        return linear(x, packed, bias).split(ctx.sizes, dim=-1)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> Any:
        _refuse_second("projections")
        x, *parameters = ctx.saved_tensors
        n, needs = len(ctx.sizes), ctx.needs_input_grad
        d = torch.cat([_rows(g) for g in upstream], dim=1)
        dx = gemm(d, ctx.packed).view(x.shape) if needs[0] else None
        dweights: Sequence[Tensor | None] = [None] * n
        dbiases: Sequence[Tensor | None] = [None] * (len(parameters) - n)
        if all(needs[4 : 4 + n]):
            dweights = gemm(d.t(), _rows(x)).split(ctx.sizes)
        elif any(needs[4 : 4 + n]):  # each in memory of its own, and no other
            parts = zip(d.split(ctx.sizes, dim=1), needs[4 : 4 + n], strict=True)
            dweights = [gemm(part.t(), _rows(x)) if need else None for part, need in parts]
        if any(needs[4 + n :]):
            dbiases = d.sum(0, dtype=parameters[-1].dtype).split(ctx.sizes)
        wanted = [t if need else None for t, need in zip([*dweights, *dbiases], needs[4:], strict=True)]
        return dx, None, None, None, *wanted


class _Mlp(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, gate: Gate, packed: Tensor, gate_weight: Tensor, up_weight: Tensor, down: Tensor
    ) -> Tensor:
        gate_up = linear(_rows(x), packed)
        ctx.gate, ctx.packed = gate, packed
        ctx.save_for_backward(x, gate_up, gate_weight, up_weight, down)
        return linear(gate_mul(gate, gate_up), down).view(*x.shape[:-1], len(down))

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> Any:
        _refuse_second("an MLP")
        x, gate_up, gate_weight, _, down = ctx.saved_tensors
        needs_x, _, _, needs_gate, needs_up, needs_down = ctx.needs_input_grad
        d = _rows(upstream)
        ddown = gemm(d.t(), gate_mul(ctx.gate, gate_up)) if needs_down else None
        dgate_up = _through_gate(ctx.gate, gemm(d, down), gate_up)
        dx = gemm(dgate_up, ctx.packed).view(x.shape) if needs_x else None
        dgate = dup = None
        if needs_gate or needs_up:
            dgate, dup = gemm(dgate_up.t(), _rows(x)).split(len(gate_weight))
        return dx, None, None, dgate if needs_gate else None, dup if needs_up else None, ddown


_project: Any = _Projections.apply
_multiply: Any = _Mlp.apply


def _through_gate(gate: Gate, dhidden: Tensor, gate_up: Tensor) -> Tensor:
    if gate == "silu":
        return activations.PACKED_BACKWARD["silu_mul"](dhidden, gate_up, None)  # type: ignore[no-any-return]
    approximate = "tanh" if gate == "gelu_tanh" else "none"
    return activations.PACKED_BACKWARD["gelu_mul"](dhidden, gate_up, approximate, None)  # type: ignore[no-any-return]


def _rows(t: Tensor) -> Tensor:
    return t.reshape(t.numel() // max(1, t.shape[-1]), t.shape[-1])


def _refuse_second(what: str) -> None:
    if torch.is_grad_enabled():
        raise UnsupportedProblem(
            f"{what} of a patched model has no second derivative (create_graph=True): call cutekernels.unpatch first"
        )
