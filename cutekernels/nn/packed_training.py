"""Products with joined weights that train: one product for several parameters, and a gradient for each of them.

The joined weight is memory that the parameters share (:mod:`cutekernels.nn.packing`), and no node of autograd's graph:
a Function takes the parameters too, so that their gradients, rows of one product, and their versions are autograd's.

In graphs (``torch.compile``) the Function is the body of a composite op, which AOTAutograd opens. Its products are
private ops, which look at each call whether the parameters still lie in the joined weight: graphs do not see that.
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
from cutekernels.ops.gemm.api import gemm, launch_into, linear
from cutekernels.ops.shared.registration import LIBRARY, define, transformed


def projections(
    x: Tensor, joined: Tensor, bias: Tensor | None, weights: Sequence[Tensor], biases: Sequence[Tensor]
) -> Any:
    """``x @ weight.T + bias`` of each of ``weights``, by one product with ``joined``, their rows side by side.

    ``bias`` are the ``biases`` side by side, or None and no biases.
    """
    if torch.compiler.is_compiling():
        return torch.ops.cutekernels.projections(x, joined, bias, weights, biases)
    return _project(x, joined, bias, len(weights), False, *weights, *biases)


def mlp(x: Tensor, gate: Gate, joined: Tensor, gate_weight: Tensor, up_weight: Tensor, down: Tensor) -> Any:
    """``(act(x @ gate.T) * (x @ up.T)) @ down.T``. The backward computes what ``down`` multiplies again, from the
    gate and up that it needs anyway, so that it is not saved.
    """
    if torch.compiler.is_compiling():
        return torch.ops.cutekernels.trained_mlp(x, gate, joined, gate_weight, up_weight, down)
    return _multiply(x, gate, joined, gate_weight, up_weight, down, False)


class _Projections(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, joined: Tensor, bias: Tensor | None, n: int, graph: bool, *parameters: Tensor
    ) -> Any:
        weights, biases = parameters[:n], parameters[n:]
        ctx.joined, ctx.graph, ctx.sizes = joined, graph, [len(weight) for weight in weights]
        ctx.save_for_backward(x, *parameters)  # the parameters for their versions: joined has one of its own
        y = _product(_rows(x), joined, bias, weights, biases) if graph else linear(x, joined, bias)
        return y.view(*x.shape[:-1], len(joined)).split(ctx.sizes, dim=-1)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> Any:
        _refuse_second("projections")
        x, *parameters = ctx.saved_tensors
        n, needs = len(ctx.sizes), ctx.needs_input_grad
        d = torch.cat([_rows(g) for g in upstream], dim=1)
        dx = _back(ctx, d, parameters[:n]).view(x.shape) if needs[0] else None
        dweights: Sequence[Tensor | None] = [None] * n
        dbiases: Sequence[Tensor | None] = [None] * (len(parameters) - n)
        if all(needs[5 : 5 + n]):
            dweights = gemm(d.t(), _rows(x)).split(ctx.sizes)
        elif any(needs[5 : 5 + n]):  # each in memory of its own, and no other
            parts = zip(d.split(ctx.sizes, dim=1), needs[5 : 5 + n], strict=True)
            dweights = [gemm(part.t(), _rows(x)) if need else None for part, need in parts]
        if any(needs[5 + n :]):
            dbiases = d.sum(0, dtype=parameters[-1].dtype).split(ctx.sizes)
        wanted = [t if need else None for t, need in zip([*dweights, *dbiases], needs[5:], strict=True)]
        return dx, None, None, None, None, *wanted


class _Mlp(Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        gate: Gate,
        joined: Tensor,
        gate_weight: Tensor,
        up_weight: Tensor,
        down: Tensor,
        graph: bool,
    ) -> Tensor:
        rows, weights = _rows(x), (gate_weight, up_weight)
        gate_up = _product(rows, joined, None, weights, ()) if graph else linear(rows, joined)
        ctx.gate, ctx.joined, ctx.graph = gate, joined, graph
        ctx.save_for_backward(x, gate_up, gate_weight, up_weight, down)
        hidden = gate_mul(gate, gate_up).view(*x.shape[:-1], len(gate_weight))
        return linear(hidden, down)  # no view, which callers could not change in place

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> Any:
        _refuse_second("an MLP")
        x, gate_up, gate_weight, up_weight, down = ctx.saved_tensors
        needs_x, _, _, needs_gate, needs_up, needs_down, _ = ctx.needs_input_grad
        d = _rows(upstream)
        ddown = gemm(d.t(), gate_mul(ctx.gate, gate_up)) if needs_down else None
        dgate_up = _through_gate(ctx.gate, gemm(d, down), gate_up)
        dx = _back(ctx, dgate_up, (gate_weight, up_weight)).view(x.shape) if needs_x else None
        dgate = dup = None
        if needs_gate or needs_up:
            dgate, dup = gemm(dgate_up.t(), _rows(x)).split(len(gate_weight))
        return dx, None, None, dgate if needs_gate else None, dup if needs_up else None, ddown, None


_project: Any = _Projections.apply
_multiply: Any = _Mlp.apply


# ---- in graphs ------------------------------------------------------------------------------------------


def _whole(joined: Tensor, parts: Sequence[Tensor]) -> Tensor:
    """The parameters' values side by side: ``joined``, where they lie in it."""
    at = joined.data_ptr()
    for t in parts:
        if t.data_ptr() != at:
            return torch.cat(list(parts))
        at += t.nbytes
    return joined


def _multiply_into(
    x: Tensor, joined: Tensor, bias: Tensor | None, weights: Sequence[Tensor], biases: Sequence[Tensor], out: Tensor
) -> None:
    whole = None if bias is None else _whole(bias, biases)
    launch_into(x, _whole(joined, weights).t(), None, whole, out)


def _multiplied(
    x: Tensor, joined: Tensor, bias: Tensor | None, weights: Sequence[Tensor], biases: Sequence[Tensor]
) -> Tensor:
    return linear(x, _whole(joined, weights), None if bias is None else _whole(bias, biases))


def _return_into(d: Tensor, joined: Tensor, weights: Sequence[Tensor], out: Tensor) -> None:
    launch_into(d, _whole(joined, weights), None, None, out)


def _product_dx(d: Tensor, joined: Tensor, weights: Sequence[Tensor]) -> Tensor:
    return gemm(d, _whole(joined, weights))


def _product_of(inputs: str, into: Any, made: Any, width: int) -> Any:
    """The private op with these ``inputs``, of which the second is the joined weight; ``width``: its dimension that
    the result's columns are. Inductor plans the result's memory.
    """
    name, n = inputs.partition("(")[0], inputs.count(",") + 1

    def made_into(*args: Any) -> None:
        args[n].copy_(made(*args[:n]))

    def fake(x: Tensor, joined: Tensor, *rest: Any) -> Tensor:
        return x.new_empty((x.shape[0], joined.shape[width]))

    written = define(f"{name}_out{inputs[len(name) :]}, Tensor(a!) out) -> ()", into, made_into, lambda *args: None)
    return define(f"_{inputs}) -> Tensor", made, made, fake, into=written, inputs=n)


_product: Any = _product_of(
    "projections(Tensor x, Tensor joined, Tensor? bias, Tensor[] weights, Tensor[] biases",
    _multiply_into, _multiplied, 0,
)  # fmt: skip
_product_back: Any = _product_of(
    "projections_dx(Tensor d, Tensor joined, Tensor[] weights", _return_into, _product_dx, 1
)


def _back(ctx: Any, d: Tensor, weights: Sequence[Tensor]) -> Tensor:
    """The gradient of what was multiplied, of ``d``, that of all the results side by side."""
    return _product_back(d, ctx.joined, weights) if ctx.graph else gemm(d, ctx.joined)


def _projections(
    x: Tensor, joined: Tensor, bias: Tensor | None, weights: Sequence[Tensor], biases: Sequence[Tensor]
) -> Any:
    if transformed():  # the Function is not written for torch.func
        return [linear(x, w, biases[i] if biases else None) for i, w in enumerate(weights)]
    return list(_project(x, joined, bias, len(weights), True, *weights, *biases))


def _trained_mlp(x: Tensor, gate: Gate, joined: Tensor, gate_weight: Tensor, up_weight: Tensor, down: Tensor) -> Any:
    if transformed():
        return linear(gate_mul(gate, linear(x, gate_weight), linear(x, up_weight)), down)
    return _multiply(x, gate, joined, gate_weight, up_weight, down, True)


LIBRARY.define("projections(Tensor x, Tensor joined, Tensor? bias, Tensor[] weights, Tensor[] biases) -> Tensor[]")
LIBRARY.impl("projections", _projections, "CompositeImplicitAutograd")
LIBRARY.define(
    "trained_mlp(Tensor x, str gate, Tensor joined, Tensor gate_weight, Tensor up_weight, Tensor down) -> Tensor"
)
LIBRARY.impl("trained_mlp", _trained_mlp, "CompositeImplicitAutograd")


# ---- pieces ---------------------------------------------------------------------------------------------


def _through_gate(gate: Gate, dhidden: Tensor, gate_up: Tensor) -> Tensor:
    if gate == "silu":
        return activations.JOINED_BACKWARD["silu_mul"](dhidden, gate_up, None)  # type: ignore[no-any-return]
    approximate = "tanh" if gate == "gelu_tanh" else "none"
    return activations.JOINED_BACKWARD["gelu_mul"](dhidden, gate_up, approximate, None)  # type: ignore[no-any-return]


def _rows(t: Tensor) -> Tensor:
    return t.reshape(t.numel() // max(1, t.shape[-1]), t.shape[-1])


def _refuse_second(what: str) -> None:
    if torch.is_grad_enabled():
        raise UnsupportedProblem(
            f"{what} of a patched model has no second derivative (create_graph=True): call cutekernels.unpatch first"
        )
