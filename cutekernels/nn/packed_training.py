"""Products with joined weights that train: one product for several parameters, and a gradient for each of them.

The joined weight is memory that the parameters share (:mod:`cutekernels.nn.packing`), and no node of autograd's graph:
a Function takes the parameters too, so that their gradients, rows of one product, and their versions are autograd's.

In graphs (``torch.compile``) the Function is the body of a composite op, which AOTAutograd opens. Its products are
private ops of the parameters alone, which look at each call whether these lie side by side: graphs do not see that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from cutekernels.errors import UnsupportedProblem
from cutekernels.nn.mlp import Gate, gate_mul
from cutekernels.nn.packing import together
from cutekernels.ops.activations import api as activations
from cutekernels.ops.activations.op import GELU_MUL_BACKWARD, SILU_MUL_BACKWARD
from cutekernels.ops.linear import linear
from cutekernels.ops.products.api import gemm, launch_into
from cutekernels.ops.shared.calls import call, define
from cutekernels.ops.shared.paths import LIBRARY, transformed
from cutekernels.torch_names import keeps_graph, unsafe_view


def projections(
    x: Tensor, joined: Tensor, bias: Tensor | None, weights: Sequence[Tensor], biases: Sequence[Tensor]
) -> Any:
    """``x @ weight.T + bias`` of all ``weights``, side by side, by one product with ``joined``, which has their rows.

    ``bias`` are the ``biases`` side by side, or None and no biases.
    """
    if torch.compiler.is_compiling():
        return torch.ops.cutekernels.projections(x, weights, biases)
    if transformed():
        return _projections(x, weights, biases)
    return _project(x, joined, bias, len(weights), *weights, *biases)


def mlp(x: Tensor, gate: Gate, joined: Tensor, gate_weight: Tensor, up_weight: Tensor, down: Tensor) -> Any:
    """``(act(x @ gate.T) * (x @ up.T)) @ down.T``. The backward computes what ``down`` multiplies again, from the
    gate and up that it needs anyway, so that it is not saved.
    """
    if torch.compiler.is_compiling():
        return torch.ops.cutekernels.trained_mlp(x, gate, gate_weight, up_weight, down)
    if transformed():
        return _trained_mlp(x, gate, gate_weight, up_weight, down)
    return _multiply(x, gate, joined, gate_weight, up_weight, down)


class _Projections(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, joined: Tensor | None, bias: Tensor | None, n: int, *parameters: Tensor) -> Any:
        weights, biases = parameters[:n], parameters[n:]
        ctx.joined, ctx.sizes = joined, list(map(len, weights))
        ctx.save_for_backward(x, *parameters)  # the parameters for their versions: joined has one of its own
        y = _product(_rows(x), weights, biases) if joined is None else linear(x, joined, bias)
        return unsafe_view(y, (*x.shape[:-1], sum(ctx.sizes)))

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> Any:
        _refuse_second("projections")
        x, *parameters = ctx.saved_tensors
        n, needs = len(ctx.sizes), ctx.needs_input_grad
        d = _rows(upstream)
        dx = _back(ctx, d, parameters[:n]).view(x.shape) if needs[0] else None
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
        ctx: Any, x: Tensor, gate: Gate, joined: Tensor | None, gate_weight: Tensor, up_weight: Tensor, down: Tensor
    ) -> Tensor:
        rows, weights = _rows(x), (gate_weight, up_weight)
        gate_up = _product(rows, weights, ()) if joined is None else linear(rows, joined)
        ctx.gate, ctx.joined = gate, joined
        ctx.save_for_backward(x, gate_up, gate_weight, up_weight, down)
        hidden = gate_mul(gate, gate_up).view(*x.shape[:-1], len(gate_weight))
        return linear(hidden, down)  # no view, which callers could not change in place

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> Any:
        _refuse_second("an MLP")
        x, gate_up, gate_weight, up_weight, down = ctx.saved_tensors
        needs_x, _, _, needs_gate, needs_up, needs_down = ctx.needs_input_grad
        d = _rows(upstream)
        ddown = gemm(d.t(), gate_mul(ctx.gate, gate_up)) if needs_down else None
        dgate_up = _through_gate(ctx.gate, gemm(d, down), gate_up, last=ctx.joined is not None and not keeps_graph())
        dx = _back(ctx, dgate_up, (gate_weight, up_weight)).view(x.shape) if needs_x else None
        dgate = dup = None
        if needs_gate or needs_up:
            dgate, dup = gemm(dgate_up.t(), _rows(x)).split(len(gate_weight))
        return dx, None, None, dgate if needs_gate else None, dup if needs_up else None, ddown


_project: Any = _Projections.apply
_multiply: Any = _Mlp.apply


# ---- in graphs ------------------------------------------------------------------------------------------


def _side_by_side(parts: Sequence[Tensor]) -> Tensor:
    """The parameters' values side by side: the memory that they share, while they lie in it."""
    whole = together(parts)
    return torch.cat(list(parts)) if whole is None else whole


def _multiply_into(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor], out: Tensor) -> None:
    launch_into(x, _side_by_side(weights).t(), None, _side_by_side(biases) if biases else None, out)


def _multiply_all(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor]) -> Tensor:
    return linear(x, _side_by_side(weights), _side_by_side(biases) if biases else None)


def _return_into(d: Tensor, weights: Sequence[Tensor], out: Tensor) -> None:
    launch_into(d, _side_by_side(weights), None, None, out)


def _product_dx(d: Tensor, weights: Sequence[Tensor]) -> Tensor:
    return gemm(d, _side_by_side(weights))


def _product_of(inputs: str, into: Any, made: Any, width: Callable[[Sequence[Tensor]], int]) -> Any:
    """The private op with these ``inputs``, of which the second are the weights; ``width``: the result's columns.
    Inductor plans the result's memory.
    """
    name, n = inputs.partition("(")[0], inputs.count(",") + 1

    def made_into(*args: Any) -> None:
        args[n].copy_(made(*args[:n]))

    def fake(x: Tensor, weights: Sequence[Tensor], *rest: Any) -> Tensor:
        return x.new_empty((x.shape[0], width(weights)))

    written = define(f"{name}_out{inputs[len(name) :]}, Tensor(a!) out) -> ()", into, made_into, lambda *args: None)
    return define(f"_{inputs}) -> Tensor", made, made, fake, into=written, inputs=n)


_product: Any = _product_of(
    "projections(Tensor x, Tensor[] weights, Tensor[] biases", _multiply_into, _multiply_all,
    lambda weights: sum(map(len, weights)),
)  # fmt: skip
_product_back: Any = _product_of(
    "projections_dx(Tensor d, Tensor[] weights", _return_into, _product_dx, lambda weights: weights[0].shape[1]
)


def _back(ctx: Any, d: Tensor, weights: Sequence[Tensor]) -> Tensor:
    """The gradient of what was multiplied, of ``d``, that of all the results side by side."""
    return _product_back(d, weights) if ctx.joined is None else gemm(d, ctx.joined)


def _projections(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor]) -> Any:
    if transformed():  # the Function is not written for torch.func
        return torch.cat([linear(x, w, biases[i] if biases else None) for i, w in enumerate(weights)], dim=-1)
    return _project(x, None, None, len(weights), *weights, *biases)


def _trained_mlp(x: Tensor, gate: Gate, gate_weight: Tensor, up_weight: Tensor, down: Tensor) -> Any:
    if transformed():
        return linear(gate_mul(gate, linear(x, gate_weight), linear(x, up_weight)), down)
    return _multiply(x, gate, None, gate_weight, up_weight, down)


LIBRARY.define("projections(Tensor x, Tensor[] weights, Tensor[] biases) -> Tensor")
LIBRARY.impl("projections", _projections, "CompositeImplicitAutograd")
LIBRARY.define("trained_mlp(Tensor x, str gate, Tensor gate_weight, Tensor up_weight, Tensor down) -> Tensor")
LIBRARY.impl("trained_mlp", _trained_mlp, "CompositeImplicitAutograd")


# ---- pieces ---------------------------------------------------------------------------------------------


def _through_gate(gate: Gate, dhidden: Tensor, gate_up: Tensor, *, last: bool) -> Tensor:
    """The gradient of gate and up side by side, in their place where the ``last`` backward pass reads them."""
    options = () if gate == "silu" else ("tanh" if gate == "gelu_tanh" else "none",)
    if not last:
        path = activations.JOINED_BACKWARD["gelu_mul" if options else "silu_mul"]
        return path(dhidden, gate_up, *options, None)  # type: ignore[no-any-return]
    places = gate_up.chunk(2, dim=-1)
    call(GELU_MUL_BACKWARD if options else SILU_MUL_BACKWARD, (dhidden, *places), options, out=places)
    return gate_up


def _rows(t: Tensor) -> Tensor:
    return t.reshape(t.numel() // max(1, t.shape[-1]), t.shape[-1])


def _refuse_second(what: str) -> None:
    if torch.is_grad_enabled():
        raise UnsupportedProblem(
            f"{what} of a patched model has no second derivative (create_graph=True): call cutekernels.unpatch first"
        )
