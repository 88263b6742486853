"""Quantized projections that transformers has loaded, patched onto our kernels.

While one is patched, the largest of its own tensors is not in memory: state dicts and ``unpatch`` get it back, bit for
bit, from the weight that was packed anew.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from cutekernels.errors import UnsupportedProblem
from cutekernels.integrations.transformers.checkpoints import layout_of, quantized_weight, read_weight
from cutekernels.integrations.transformers.families import Family
from cutekernels.integrations.transformers.modules import Patched, swapped
from cutekernels.integrations.transformers.projections import sharded
from cutekernels.nn.quantized import applied
from cutekernels.ops.gemm.api import linear
from cutekernels.ops.quantized.api import check_kernels
from cutekernels.ops.shared.dtypes import DTYPES
from cutekernels.quant.weight import QuantizedWeight

_LARGEST = {  # the tensor of a layout that ``QuantizedWeight.tensors`` has as the module does: torchao's is a subclass
    "fp8": "weight", "fp8-rows": "weight", "bitsandbytes": "weight", "compressed-tensors": "weight_packed",
    "gptq": "qweight", "awq": "qweight",
}  # fmt: skip
_OTHERS = ("", "cutekernels", "fp8-experts")
# What compressed-tensors tells its projections by, to decompress them at the model's first call: set aside.
_TOLD = ("forward", "quantization_scheme")
_HOOK = "ct_decompress_hook"  # the attribute of such a model


class Quantized(Patched):
    """A projection over its weight packed anew. Activations stay in 16 bits, whatever the original rounds them to.

    Attributes:
        packed: the weight.
        largest: the name of the module's own tensor that is empty meanwhile, or "".
        aside: attributes that the module has when it is not patched.
    """

    packed: QuantizedWeight
    largest: str
    aside: dict[str, Any]

    def forward(self, x: Tensor) -> Tensor:
        """The product."""
        bias = self.bias  # type: ignore[attr-defined]
        if bias is not None and bias.dtype not in (x.dtype, torch.float32):
            bias = bias.to(x.dtype)
        return linear(x, self.packed, bias)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        result = super()._apply(fn, recurse)  # type: ignore[misc]
        self.packed = applied(self.packed, fn)
        return result

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)  # type: ignore[misc]
        if self.largest:
            destination[prefix + self.largest] = self.packed.tensors()[self.largest]

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any], strict: bool, *lists: list[str]
    ) -> None:
        put_back(self)
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, *lists)  # type: ignore[misc]
        try:
            weight = read_weight(self, self.packed.dtype)
            assert weight is not None
            self.packed = weight
        except UnsupportedProblem as error:
            lists[-1].append(f"{prefix}weight: {error}")
        set_aside(self, owned=not local_metadata.get("assign_to_params_buffers", False))


def take(model: torch.nn.Module, family: Family) -> dict[int, str]:
    """Patch the quantized projections whose layout is read. By a module's id: "" where it was, else why it was not.

    compressed-tensors decompresses a model as a whole, so that of its projections all are patched or none.
    """
    layouts = [(module, layout) for module in model.modules() if (layout := layout_of(module)) not in _OTHERS]
    reasons = {}
    for module, layout in layouts:
        found = _reading(module)
        reasons[id(module)] = found if isinstance(found, str) else ""
        if not isinstance(found, str):
            own: Any = type(module)
            module.__class__ = swapped(Quantized, own, family)
            module.__dict__ |= {"packed": found, "quantized_layout": layout}
            set_aside(module)
    compressed = [module for module, layout in layouts if layout == "compressed-tensors"]
    reason = next(filter(None, (reasons[id(module)] for module in compressed)), "")
    for module in compressed if reason else ():
        reasons[id(module)] = reason
        if isinstance(module, Quantized):
            put_back(module)
            module.__class__ = module.original
            del module.__dict__["packed"], module.__dict__["quantized_layout"]
    for module in model.modules() if compressed and not reason else ():
        handle = module.__dict__.get(_HOOK)
        if handle is not None:
            module.__dict__[_HOOK] = handle, module._forward_pre_hooks.pop(handle.id, None)
    return reasons


def _reading(module: Any) -> QuantizedWeight | str:
    """The weight of a projection, or why it cannot be patched."""
    own = [t for t in (*module._parameters.values(), *module._buffers.values()) if t is not None]
    if any(hasattr(t, "placements") for t in own) or sharded(module):
        return "it is quantized and sharded"
    if any(t.is_meta for t in own):
        return "it is quantized and on the meta device: load it first"
    if "forward" in module.__dict__ and (hasattr(module, "_hf_hook") or layout_of(module) != "compressed-tensors"):
        return "its forward has been replaced (by device_map's hooks, say)"
    try:
        weight = read_weight(module)
        assert weight is not None
        check_kernels(torch.empty(1, weight.shape[1], device=weight.device), weight)
    except UnsupportedProblem as error:
        return f"it is quantized, and {error}"
    return weight


def set_aside(module: Any, *, owned: bool = True) -> None:
    """Empty the largest tensor of a patched projection. ``owned``: no caller has it too, as that of ``assign=True``."""
    layout = module.__dict__["quantized_layout"]
    name = _LARGEST.get(layout, "")
    if name == "weight_packed" and name not in module._parameters:
        name = "weight"
    if not owned and name in module._parameters:
        if layout == "bitsandbytes":  # whose parameter has the quantizer's state
            name = ""
        else:
            module._parameters[name] = torch.nn.Parameter(module._parameters[name].detach(), requires_grad=False)
    module.__dict__["largest"] = name
    if name in module._buffers:
        module._buffers[name] = module._buffers[name].new_empty(0)
    elif name:
        module._parameters[name].data = module._parameters[name].data.new_empty(0)
    told = _TOLD if layout == "compressed-tensors" else ()
    module.__dict__["aside"] = {key: module.__dict__.pop(key) for key in told if key in module.__dict__}


def put_back(module: Any) -> None:
    """Undo :func:`set_aside`."""
    name = module.__dict__.pop("largest")
    module.__dict__.update(module.__dict__.pop("aside"))
    if name:
        tensor = module.packed.tensors()[name]
        if name in module._buffers:
            module._buffers[name] = tensor
        else:
            module._parameters[name].data = tensor


def give_back(module: Any) -> None:
    """Have compressed-tensors decompress a model again at its first call."""
    held = module.__dict__.get(_HOOK)
    if isinstance(held, tuple):
        module.__dict__[_HOOK], hook = held
        module._forward_pre_hooks[held[0].id] = hook


def computed(projection: Any, dtype: torch.dtype | None) -> str:
    """Why kernels do not take what a model of ``dtype`` multiplies by a patched projection, or ""."""
    if projection.packed.device.type == "cpu" or dtype in (None, *DTYPES.values()):
        return ""
    return f"on a GPU kernels take fp16 and bf16, and the model computes in {dtype}"


def decoded(model: torch.nn.Module) -> None:
    """Put a plain Linear in fp32 in the place of each quantized projection whose layout is read."""
    for name, module in list(model.named_modules()):
        if layout_of(module) in ("", "fp8-experts"):
            continue
        projection: Any = module
        weight = quantized_weight(projection, torch.float32)
        assert weight is not None
        n, k = weight.shape
        plain = torch.nn.Linear(k, n, bias=projection.bias is not None, device="meta")
        plain.weight = torch.nn.Parameter(weight.dequantize(), requires_grad=False)
        if projection.bias is not None:
            plain.bias = torch.nn.Parameter(projection.bias.detach().float(), requires_grad=False)
        model.set_submodule(name, plain)
