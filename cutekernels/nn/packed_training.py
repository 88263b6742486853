"""Products with packed weights that train: one product for several parameters, and a gradient for each of them.

The packed weight is memory that the parameters share (:mod:`cutekernels.nn.packing`), and no node of autograd's graph:
a Function takes the parameters too, so that their gradients, rows of one product, and their versions are autograd's.

In graphs (``torch.compile``) the Function is the body of a composite op, which AOTAutograd opens. It has the parameters
alone, and its products are private ops that look where the parameters lie at each call: a graph does not see them move.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from cutekernels.errors import UnsupportedProblem
from cutekernels.nn.mlp import Gate, gate_mul
from cutekernels.nn.packing import together
from cutekernels.ops.activations import api as activations
from cutekernels.ops.gemm.api import gemm, linear
from cutekernels.ops.shared.registration import LIBRARY, define, transformed


def projections(
    x: Tensor, packed: Tensor, bias: Tensor | None, weights: Sequence[Tensor], biases: Sequence[Tensor]
) -> Any:
    """``x @ weight.T + bias`` of each of ``weights``, by one product with ``packed``, their rows side by side.

    ``bias`` are the ``biases`` side by side, or None and no biases.
    """
    if torch.compiler.is_compiling():
        return torch.ops.cutekernels.projections(x, weights, biases)
    return _project(x, packed, bias, len(weights), *weights, *biases)


def mlp(x: Tensor, gate: Gate, packed: Tensor, gate_weight: Tensor, up_weight: Tensor, down: Tensor) -> Any:
    """``(act(x @ gate.T) * (x @ up.T)) @ down.T``. The backward computes what ``down`` multiplies again, from the
    gate and up that it needs anyway, so that it is not saved.
    """
    if torch.compiler.is_compiling():
        return torch.ops.cutekernels.trained_mlp(x, gate, gate_weight, up_weight, down)
    return _multiply(x, gate, packed, gate_weight, up_weight, down)


class _Projections(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, packed: Tensor | None, bias: Tensor | None, n: int, *parameters: Tensor) -> Any:
        ctx.packed, ctx.sizes = packed, [len(weight) for weight in parameters[:n]]
        ctx.save_for_backward(x, *parameters)  # the parameters for their versions: packed has one of its own
        y = _of_parts(x, parameters[:n], parameters[n:]) if packed is None else linear(x, packed, bias)
        return y.split(ctx.sizes, dim=-1)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> Any:
        _refuse_second("projections")
        x, *parameters = ctx.saved_tensors
        n, needs = len(ctx.sizes), ctx.needs_input_grad
        d = torch.cat([_rows(g) for g in upstream], dim=1)
        dx = _dx(d, ctx.packed, parameters[:n]).view(x.shape) if needs[0] else None
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
        ctx: Any, x: Tensor, gate: Gate, packed: Tensor | None, gate_weight: Tensor, up_weight: Tensor, down: Tensor
    ) -> Tensor:
        rows, weights = _rows(x), (gate_weight, up_weight)
        gate_up = _of_parts(rows, weights, ()) if packed is None else linear(rows, packed)
        ctx.gate, ctx.packed = gate, packed
        ctx.save_for_backward(x, gate_up, gate_weight, up_weight, down)
        return linear(gate_mul(gate, gate_up), down).view(*x.shape[:-1], len(down))

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> Any:
        _refuse_second("an MLP")
        x, gate_up, gate_weight, up_weight, down = ctx.saved_tensors
        needs_x, _, _, needs_gate, needs_up, needs_down = ctx.needs_input_grad
        d = _rows(upstream)
        ddown = gemm(d.t(), gate_mul(ctx.gate, gate_up)) if needs_down else None
        dgate_up = _through_gate(ctx.gate, gemm(d, down), gate_up)
        dx = _dx(dgate_up, ctx.packed, (gate_weight, up_weight)).view(x.shape) if needs_x else None
        dgate = dup = None
        if needs_gate or needs_up:
            dgate, dup = gemm(dgate_up.t(), _rows(x)).split(len(gate_weight))
        return dx, None, None, dgate if needs_gate else None, dup if needs_up else None, ddown


_project: Any = _Projections.apply
_multiply: Any = _Mlp.apply


# ---- in graphs ------------------------------------------------------------------------------------------


def _whole(parts: Sequence[Tensor]) -> Tensor:
    found = together(parts)
    return torch.cat(list(parts)) if found is None else found


def _multiplied(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor]) -> Tensor:
    with torch.no_grad():
        return linear(x, _whole(weights), _whole(biases) if biases else None)


def _multiplied_fake(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor]) -> Tensor:
    return x.new_empty((*x.shape[:-1], sum([len(weight) for weight in weights])))


def _returned(d: Tensor, weights: Sequence[Tensor]) -> Tensor:
    with torch.no_grad():
        return gemm(d, _whole(weights))


def _returned_fake(d: Tensor, weights: Sequence[Tensor]) -> Tensor:
    return d.new_empty((d.shape[0], weights[0].shape[1]))


_of_parts: Any = define(
    "_projections(Tensor x, Tensor[] weights, Tensor[] biases) -> Tensor", _multiplied, _multiplied, _multiplied_fake
)
_dx_of_parts: Any = define(
    "_projections_dx(Tensor d, Tensor[] weights) -> Tensor", _returned, _returned, _returned_fake
)


def _dx(d: Tensor, packed: Tensor | None, weights: Sequence[Tensor]) -> Tensor:
    return _dx_of_parts(d, weights) if packed is None else gemm(d, packed)


def _projections(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor]) -> Any:
    if transformed():  # the Function is not written for torch.func
        return [linear(x, w, biases[i] if biases else None) for i, w in enumerate(weights)]
    return list(_project(x, None, None, len(weights), *weights, *biases))


def _trained_mlp(x: Tensor, gate: Gate, gate_weight: Tensor, up_weight: Tensor, down: Tensor) -> Tensor:
    if transformed():
        return linear(gate_mul(gate, linear(x, gate_weight), linear(x, up_weight)), down)
    return _multiply(x, gate, None, gate_weight, up_weight, down)  # type: ignore[no-any-return]


LIBRARY.define("projections(Tensor x, Tensor[] weights, Tensor[] biases) -> Tensor[]")
LIBRARY.impl("projections", _projections, "CompositeImplicitAutograd")
LIBRARY.define("trained_mlp(Tensor x, str gate, Tensor gate_weight, Tensor up_weight, Tensor down) -> Tensor")
LIBRARY.impl("trained_mlp", _trained_mlp, "CompositeImplicitAutograd")


# ---- pieces ---------------------------------------------------------------------------------------------


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
