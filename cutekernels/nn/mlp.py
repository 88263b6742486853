"""The gated MLP of a transformer layer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch
from torch import Tensor

from cutekernels.errors import UnsupportedProblem
from cutekernels.nn.packing import split
from cutekernels.ops.activations.api import gelu_mul, silu_mul
from cutekernels.ops.linear import linear
from cutekernels.ops.norm_linear import linear_silu_mul
from cutekernels.ops.shared.checks import check_flag, check_tensor, check_whole, quote
from cutekernels.quant.weight import QuantizedWeight

Gate = Literal["silu", "gelu", "gelu_tanh"]

_HALVES = ("gate_proj", "up_proj")
_JOINED = "gate_up_proj"


class SwiGLU(torch.nn.Module):
    """``down_proj(silu(gate_proj(x)) * up_proj(x))``, with gate and up as one matrix product.

    The state dict matches Hugging Face's ``LlamaMLP``, ``Qwen2MLP`` and their like: ``gate_proj.weight``,
    ``up_proj.weight``, ``down_proj.weight``. In memory the first two are one parameter, ``gate_up_proj.weight`` of
    ``(2 * intermediate_size, hidden_size)``: saving splits it in its own memory, loading joins.

    Args:
        hidden_size: width of the input and of the result.
        intermediate_size: width of gate and up.
        bias: whether the projections add one.
        device: of the parameters.
        dtype: of the parameters; kernels take fp16 and bf16, CPU tensors any.

    Shape: ``(..., hidden_size)`` to the same. Differentiable in the input and the parameters, once.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        for name, size in (("hidden_size", hidden_size), ("intermediate_size", intermediate_size)):
            check_whole("SwiGLU", name, size, 1, 2**31 - 1)
        check_flag("SwiGLU", "bias", bias)
        self.hidden_size = hidden_size
        self.intermediate_size = intermediate_size
        self.gate_up_proj = torch.nn.Linear(hidden_size, 2 * intermediate_size, bias, device, dtype)
        self.down_proj = torch.nn.Linear(intermediate_size, hidden_size, bias, device, dtype)
        after_saving: Callable[[Any], object] = self.register_state_dict_post_hook  # torch leaves both untyped
        before_loading: Callable[[Any], object] = self.register_load_state_dict_pre_hook
        self._halves = _Half(self, 0), _Half(self, 1)  # in a tuple: no submodules, which would have parameters
        self._replaced: dict[str, Tensor] = {}
        after_saving(_separate)
        before_loading(_join)

    @property
    def gate_proj(self) -> _Half:
        """``weight`` and ``bias`` as the state dict names them: views of ``gate_up_proj``."""
        return self._halves[0]

    @property
    def up_proj(self) -> _Half:
        return self._halves[1]

    def forward(self, x: Tensor) -> Tensor:
        up, down = self.gate_up_proj, self.down_proj
        if not self._replaced:
            if plain(up) and plain(down):
                return swiglu(x, up.weight, down.weight, up.bias, down.bias)
            hidden = gated(x, up.weight, up.bias, name="SwiGLU") if plain(up) else silu_mul(up(x))
        elif plain(up):
            weight = torch.cat([half.weight for half in self._halves])
            biases = [half.bias for half in self._halves if half.bias is not None]
            hidden = gated(x, weight, torch.cat(biases) if biases else None, name="SwiGLU")
        else:
            raise UnsupportedProblem(
                f"SwiGLU was called with another {' or '.join(_HALVES)}, which the hooks or adapters of {_JOINED} do "
                f"not see: pass {_JOINED}'s weight in their place"
            )
        return project(hidden, down.weight, down.bias) if plain(down) else down(hidden)

    def named_children(self) -> Iterator[tuple[str, torch.nn.Module]]:
        """The halves too: torch's distributed checkpoints send each rank what they find under the names of children."""
        yield from super().named_children()
        yield from zip(_HALVES, self._halves, strict=True)

    def extra_repr(self) -> str:
        return f"{self.hidden_size}, {self.intermediate_size}, bias={self.down_proj.bias is not None}"


class _Half(torch.nn.Module):
    """The rows of ``gate_up_proj`` that belong to one projection, under the name that they are saved by.

    ``torch.func.functional_call`` puts other tensors in their place for one call, and the views back behind it: it
    writes to ``_parameters``. Assigned attributes would be neither trained nor saved, and are refused. Distributed
    checkpoints look the names up.
    """

    def __init__(self, owner: SwiGLU, which: int) -> None:
        super().__init__()
        self._owner, self._which = (owner,), which  # in a tuple: no submodule
        self._parameters = _Places(self)

    @property
    def weight(self) -> Tensor:
        return self._get("weight")

    @property
    def bias(self) -> Tensor | None:
        return None if self._owner[0].gate_up_proj.bias is None else self._get("bias")

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in ("weight", "bias"):
            super().__setattr__(name, value)
        elif not self._own(value) and (value is not None or getattr(self, name) is not None):
            half = _HALVES[self._which]
            raise UnsupportedProblem(
                f"{half}.{name} of SwiGLU is rows of {_JOINED}.{name}, or None with it, and cannot be replaced alone; "
                f"got {quote(value)}: write into it under torch.no_grad(), {half}.{name}.copy_(new)"
            )

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:
        """State under the half's name, for those who ask the half itself; a model's buffers are without it."""
        yield "weight", self.weight
        if self.bias is not None:
            yield "bias", self.bias

    def register_parameter(self, name: str, param: torch.nn.Parameter | None) -> None:
        if name in ("weight", "bias"):
            setattr(self, name, param)
        else:
            super().register_parameter(name, param)

    def _own(self, value: object) -> bool:
        return getattr(value, "_half_of_joined", None) == id(self)

    def _put(self, kind: str, value: Tensor) -> None:
        if self._own(value):
            self._owner[0]._replaced.pop(f"{self._which}.{kind}", None)
        else:
            self._owner[0]._replaced[f"{self._which}.{kind}"] = value

    def _get(self, kind: str) -> Tensor:
        owner = self._owner[0]
        given = owner._replaced.get(f"{self._which}.{kind}")
        if given is not None:
            return given
        view: Any = getattr(owner.gate_up_proj, kind).chunk(2)[self._which]
        view._half_of_joined = id(self)  # a number, or the module would be saved with the view
        return view  # type: ignore[no-any-return]


class _Places(dict[str, Any]):
    """``_parameters`` of a half: nothing to iterate over, while what is looked up by name is the half's."""

    def __init__(self, half: _Half) -> None:
        super().__init__()
        self._half = half

    def __contains__(self, name: object) -> bool:
        if name in ("weight", "bias"):
            return getattr(self._half, str(name)) is not None
        return super().__contains__(name)

    def __getitem__(self, name: str) -> Any:
        return getattr(self._half, name) if name in ("weight", "bias") else super().__getitem__(name)

    def __setitem__(self, name: str, value: Any) -> None:
        if name in ("weight", "bias"):
            self._half._put(name, value)
        else:
            super().__setitem__(name, value)


def has_no_hooks(module: Any) -> bool:
    """Whether a call of ``module`` is its class's forward and nothing else: no hooks, no forward of its own."""
    hooks = module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    return not hooks and "forward" not in module.__dict__


def plain(module: Any) -> bool:
    """Whether a projection's parameters are all there is to it: a ``torch.nn.Linear`` without hooks or adapters."""
    return type(module) is torch.nn.Linear and has_no_hooks(module)


def swiglu(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    *,
    config: Any = None,
) -> Tensor:
    """The module's forward pass over its parameters; a ``config`` is that of the gate alone (``silu_mul``)."""
    if config is None:
        return project(gated(x, gate_up, gate_up_bias, name="SwiGLU"), down, down_bias)
    return project(silu_mul(project(x, gate_up, gate_up_bias), config=config), down, down_bias)


def project(x: Tensor, weight: Tensor | QuantizedWeight, bias: Tensor | None = None, *, name: str = "SwiGLU") -> Tensor:
    """``x @ weight.T + bias`` for module ``name``."""
    check_tensor(name, "x", x)
    plain = isinstance(weight, Tensor)
    if plain and x.dtype != weight.dtype and not torch.is_autocast_enabled(x.device.type):
        raise UnsupportedProblem(
            f"{name} multiplies {x.dtype} by a weight of {weight.dtype}: bring x and all its weights to one dtype"
        )
    if x.dim() == 0 or x.shape[-1] != weight.shape[1]:
        raise UnsupportedProblem(f"{name} takes (..., {weight.shape[1]}); got {tuple(x.shape)}: project it first")
    return linear(x, weight, bias)


def gated(
    x: Tensor, gate_up: Tensor | QuantizedWeight, bias: Tensor | None = None, gate: Gate = "silu", *, name: str
) -> Tensor:
    """``act(x @ w_gate.T) * (x @ w_up.T)`` over the joint projection ``gate_up`` ``(2 * I, H)``, for module ``name``.

    One op where SiLU and no bias allow it, else the product and the gate.
    """
    if gate == "silu" and bias is None:
        return linear_silu_mul(x, gate_up)
    return gate_mul(gate, project(x, gate_up, bias, name=name))


def gate_mul(gate: Gate, x: Tensor, up: Tensor | None = None) -> Tensor:
    """``act(x) * up``; without ``up``, ``x`` is joined: both side by side."""
    if gate == "silu":
        return silu_mul(x, up)
    return gelu_mul(x, up, approximate="tanh" if gate == "gelu_tanh" else "none")


def _separate(module: SwiGLU, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any]) -> None:
    """Splits saved parameters into the halves that Hugging Face names."""
    for kind in ("weight", "bias"):
        joined = state_dict.pop(f"{prefix}{_JOINED}.{kind}", None)
        if joined is not None:
            for name, half in zip(_HALVES, split(joined, [len(joined) // 2] * 2), strict=True):
                state_dict[f"{prefix}{name}.{kind}"] = half


def _join(module: SwiGLU, state_dict: dict[str, Any], prefix: str, *how: Any) -> None:
    """Joins loaded halves side by side; a state dict that is joined already passes unchanged."""
    for kind in ("weight", "bias"):
        own = getattr(module.gate_up_proj, kind)
        names = [f"{prefix}{name}.{kind}" for name in _HALVES]
        found = [state_dict.pop(name) for name in names if name in state_dict]
        if not found:
            continue
        wanted = (module.intermediate_size, *(() if own is None else own.shape[1:]))
        if len(found) < 2:
            how[-1].append(f"{' and '.join(names)} come together: the state dict has only one of them")
        elif own is not None and any(t.shape != wanted for t in found):
            shapes = " and ".join(str(tuple(t.shape)) for t in found)
            how[-1].append(f"{' and '.join(names)} must be {wanted}; they are {shapes}")
        else:
            joined: Any = torch.cat(found)
            if hasattr(joined, "redistribute") and hasattr(own, "placements"):  # by FSDP: each rank keeps its own rows
                joined = joined.redistribute(own.device_mesh, own.placements)
            state_dict[f"{prefix}{_JOINED}.{kind}"] = joined
