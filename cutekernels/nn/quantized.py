"""``QuantizedLinear``: a linear layer whose weight has four or eight bits."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from cutekernels.errors import UnsupportedProblem
from cutekernels.ops.linear import linear
from cutekernels.ops.shared.checks import check_tensor, quote
from cutekernels.quant import Scheme, quantize, read, read_config, write_config
from cutekernels.quant.formats import own
from cutekernels.quant.formats.nibbles import check
from cutekernels.quant.weight import FLOATS, TENSORS, QuantizedWeight

_HELD = tuple(name for name in TENSORS if name != "offsets")


class QuantizedLinear(torch.nn.Module):
    """``x @ weight.T + bias`` by :func:`cutekernels.linear`, over a weight that stays packed and has no gradient.

    Buffers ``packed``, ``scales``, ``zeros``, ``order`` and ``factors`` (None where it has none) are ``weight``'s.
    ``to(device)`` moves them; another dtype is that of activations and of the bias, and changes nothing that is stored.
    The state dict has the checkpoint's tensors in the format that the weight came from, under their own names
    (``qweight``, ``scales``, ...), so that a model with such layers, saved with the ``quantization_config`` that
    :func:`cutekernels.quant.write_config` makes, is read by :func:`cutekernels.models.load`. Loading takes them back.
    In another format than that of ``quantize`` a state dict is made anew, and takes memory as large again. Under FSDP
    every rank keeps the packed weight whole.

    Args:
        weight: of a reader of ``cutekernels.quant``, or of ``quantize``.
        bias: ``(N,)``, dtype of activations or fp32; a Parameter is kept as it is, another tensor is not trained.

    Shape: ``(..., K)`` to ``(..., N)``. Differentiable in the input and the bias.

    Raises:
        UnsupportedProblem: no ``QuantizedWeight``, one with torchao's offsets, a bias of another shape or device.
    """

    packed: Tensor
    scales: Tensor
    zeros: Tensor | None
    order: Tensor | None
    factors: Tensor | None
    bias: torch.nn.Parameter | None

    def __init__(self, weight: QuantizedWeight, bias: Tensor | None = None) -> None:
        super().__init__()
        if not isinstance(weight, QuantizedWeight):
            raise UnsupportedProblem(
                f"QuantizedLinear takes a QuantizedWeight; got {quote(weight)}: quantize it, or use from_linear"
            )
        if weight.offsets is not None:
            raise UnsupportedProblem(
                "QuantizedLinear takes weights without torchao's offsets, which no kernel adds; quantize the weight's "
                'dequantize() anew with cutekernels.quant.quantize(weight, "int4_g128", symmetric=False)'
            )
        if bias is not None:
            check_tensor("QuantizedLinear", "bias", bias)
            if tuple(bias.shape) != weight.shape[:1] or bias.device != weight.device or not bias.is_floating_point():
                raise UnsupportedProblem(
                    f"QuantizedLinear takes a floating bias of ({weight.shape[0]},) on {weight.device}; got "
                    f"{tuple(bias.shape)} {bias.dtype} on {bias.device}"
                )
            if not isinstance(bias, torch.nn.Parameter):
                bias = torch.nn.Parameter(bias, requires_grad=False)
        self.register_parameter("bias", bias)
        for name in _HELD:
            self.register_buffer(name, getattr(weight, name), persistent=False)
        self._whole = weight

    @classmethod
    def from_linear(
        cls, linear: torch.nn.Linear, scheme: str = "int4_g128", *, symmetric: bool = True
    ) -> QuantizedLinear:
        """``linear`` with its weight rounded to nearest, on its device; the bias stays its own Parameter.

        Args:
            linear: of fp16, bf16 or fp32.
            scheme, symmetric: as of :func:`cutekernels.quant.quantize`.
        """
        if not isinstance(linear, torch.nn.Linear):
            raise UnsupportedProblem(f"from_linear takes a torch.nn.Linear; got {quote(linear)}: pass one")
        return cls(quantize(linear.weight.detach(), scheme, symmetric=symmetric), linear.bias)

    @property
    def weight(self) -> QuantizedWeight:
        """The weight, over the module's own buffers."""
        whole, buffers = self._whole, self._buffers
        if (
            buffers["packed"] is not whole.packed
            or buffers["scales"] is not whole.scales
            or buffers["zeros"] is not whole.zeros
            or buffers["order"] is not whole.order
            or buffers["factors"] is not whole.factors
        ):  # replaced, by functional_call say
            whole = self._whole = replaced(whole, {name: buffers[name] for name in _HELD})
        return whole

    @property
    def in_features(self) -> int:
        """K."""
        return self._whole.shape[1]

    @property
    def out_features(self) -> int:
        """N."""
        return self._whole.shape[0]

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)

    def extra_repr(self) -> str:
        return f"{self.weight}, bias={self.bias is not None}"

    # ---- moved, saved, loaded

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> QuantizedLinear:
        weight, buffers = self.weight, self._buffers
        self._buffers = {}  # which super() would convert
        try:
            super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        finally:
            self._buffers = buffers
        self._put(applied(weight, fn))
        return self

    def _put(self, weight: QuantizedWeight) -> None:
        self._whole = weight
        for name in _HELD:
            self._buffers[name] = getattr(weight, name)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        save(self.weight, destination, prefix)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *how: Any) -> None:
        metadata, strict, missing_keys, _, error_msgs = how
        assign = bool(metadata.get("assign_to_params_buffers", False))
        weight = loaded(self.weight, state_dict, prefix, assign, strict, missing_keys, error_msgs)
        if weight is not None and weight.offsets is not None:
            error_msgs.append(f"{prefix}weight has torchao's offsets, which QuantizedLinear does not take.")
        elif weight is not None:
            self._put(weight)
        super()._load_from_state_dict(state_dict, prefix, *how)


# ---- what a module that holds a QuantizedWeight does with it --------------------------------------------


def replaced(weight: QuantizedWeight, tensors: dict[str, Any], dtype: torch.dtype | None = None) -> QuantizedWeight:
    """``weight`` with other tensors."""
    return dataclasses.replace(weight, **tensors, dtype=dtype or weight.dtype)


def applied(weight: QuantizedWeight, fn: Callable[[Tensor], Tensor]) -> QuantizedWeight:
    """``weight`` after ``Module._apply(fn)``: moved. A dtype becomes that of activations; what is stored keeps its own.

    ``fn`` sees bytes, which casts to floating types leave alone.
    """

    def moved(t: Tensor) -> Tensor:
        raw = fn(t.view(torch.uint8))
        return raw.view(t.dtype) if raw.dtype == torch.uint8 else t.to(raw.device)  # Module.type casts all

    tensors = {name: moved(t) for name in TENSORS if (t := getattr(weight, name)) is not None}
    asked = fn(torch.empty(0, dtype=weight.dtype, device=weight.device)).dtype
    return replaced(weight, tensors, asked if asked in FLOATS else torch.float32 if asked == torch.float64 else None)


def save(weight: QuantizedWeight, destination: dict[str, Any], prefix: str) -> None:
    """Adds the checkpoint's tensors of ``weight`` to a state dict."""
    destination.update({prefix + name: tensor for name, tensor in weight.tensors().items()})


def loaded(
    weight: QuantizedWeight,
    state_dict: dict[str, Any],
    prefix: str,
    assign: bool,
    strict: bool,
    missing_keys: list[str],
    error_msgs: list[str],
) -> QuantizedWeight | None:
    """The weight that a state dict has in the place of ``weight``; its names are taken out of the dict.

    In the memory of ``weight`` unless ``assign`` is set or something is of another shape; None where there is none, or
    where it is refused, with a sentence in ``error_msgs``.
    """
    scheme = None if weight.format == "cutekernels" else read_config(write_config(weight))
    names = own.NAMES if scheme is None else scheme.tensors
    tensors = {name: state_dict.pop(prefix + name) for name in names if prefix + name in state_dict}
    if not tensors:
        if strict:
            missing_keys.append(prefix + (own.PREFIX + "packed" if scheme is None else scheme.marks[0]))
        return None
    if weight.device.type == "meta" and not assign:
        error_msgs.append(f"{prefix}weight is on the meta device: pass assign=True.")
        return None
    try:
        for name, t in tensors.items():
            check(name, t, by="the state dict")
        if not assign:
            tensors = {name: t.to(weight.device) for name, t in tensors.items()}
        new = _own(weight, tensors) if scheme is None else _read(weight, tensors, scheme)
    except UnsupportedProblem as error:
        error_msgs.append(f"{prefix}weight: {error}")
        return None
    old = {name: getattr(weight, name) for name in TENSORS}
    given = {name: getattr(new, name) for name in TENSORS}
    if assign:
        return new
    if any(_look(old[name]) != _look(given[name]) for name in TENSORS):
        return replaced(new, {name: t if t is None else t.clone() for name, t in given.items()})
    with torch.no_grad():
        for name, t in old.items():
            if t is not None:
                t.copy_(given[name])
    return replaced(new, old)


def _look(t: Tensor | None) -> object:
    return None if t is None else (t.shape, t.dtype, t.device)


def _read(weight: QuantizedWeight, tensors: dict[str, Tensor], scheme: Scheme) -> QuantizedWeight:
    new = read(tensors, scheme, dtype=weight.dtype)
    if new.shape != weight.shape:
        raise UnsupportedProblem(f"the module is of {weight.shape}, and the state dict has {new.shape}: load its own")
    return new


def _own(weight: QuantizedWeight, tensors: dict[str, Tensor]) -> QuantizedWeight:
    """A weight of this package's own format, maybe several weights joined."""
    held = {name.removeprefix(own.PREFIX): t for name, t in tensors.items()}
    shape = tuple(held.pop("shape", torch.tensor(weight.shape)).flatten().tolist())
    if shape != weight.shape:
        raise UnsupportedProblem(f"the module is of {weight.shape}, and the state dict has {shape}: load its own")
    absent = [name for name in ("packed", "scales") if name not in held]
    if absent:
        raise UnsupportedProblem(f"the state dict lacks {own.PREFIX}{absent[0]}: load a whole one")
    held["packed"] = own.bytes_of(held["packed"], weight.code)
    new = replaced(weight, {name: held.get(name) for name in TENSORS})
    own.check_values(new)
    return new
