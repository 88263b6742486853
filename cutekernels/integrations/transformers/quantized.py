"""Quantized projections that transformers has loaded, patched onto our kernels.

While one is patched, the largest of its own tensors, that of its codes, is not in memory: state dicts, ``unpatch`` and
who reads the attribute get it back, bit for bit, from the weight that was packed anew.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from cutekernels.errors import UnsupportedProblem
from cutekernels.integrations.transformers.checkpoints import layout_of, quantized_weight, read_weight
from cutekernels.integrations.transformers.families import Family, shared_parameters
from cutekernels.integrations.transformers.modules import Patched, swapped
from cutekernels.integrations.transformers.projections import computes, parameter, sharded
from cutekernels.nn.quantized import applied
from cutekernels.ops.linear import linear
from cutekernels.ops.products.packed_api import check_kernels
from cutekernels.ops.shared.dtypes import DTYPES
from cutekernels.quant.weight import QuantizedWeight

_CODES = {  # the tensor of a layout that has its codes
    "fp8": "weight", "fp8-rows": "weight", "bitsandbytes": "weight", "compressed-tensors": "weight_packed",
    "gptq": "qweight", "awq": "qweight", "torchao": "weight",
}  # fmt: skip
_OTHERS = ("", "cutekernels", "fp8-experts")
# What compressed-tensors tells its projections by, to decompress them at the model's first call: set aside.
_TOLD = ("forward", "quantization_scheme")
_HOOK = "ct_decompress_hook"  # the attribute of such a model
_OWN = ("packed", "quantized_layout", "codes", "empties", "seen", "aside")  # what a patched projection has besides


class Quantized(Patched):
    """A projection over its weight packed anew. Activations stay in 16 bits, whatever the original rounds them to.

    Attributes:
        packed: the weight.
        codes: the name of the module's own tensor that has the codes: the largest.
        empties: whether that one is empty meanwhile. Who reads the attribute gets a tensor made for them.
        seen: that tensor; another one in its place has been put there by somebody, PEFT's merge say.
        aside: attributes that the module has when it is not patched.
    """

    packed: QuantizedWeight
    codes: str
    empties: bool
    seen: Tensor
    aside: dict[str, Any]

    def __getattr__(self, name: str) -> Any:
        value = super().__getattr__(name)  # type: ignore[misc]
        return _filled(self) if name == self.__dict__.get("codes") and _is_empty(self) else value

    def __getstate__(self) -> dict[str, Any]:
        """Without the method that gptqmodel has compiled: in a copy it would read the original's tensors."""
        return {name: value for name, value in self.__dict__.items() if name != "dequantize_weight"}

    def forward(self, x: Tensor) -> Tensor:
        """The product."""
        me: Any = self
        weight = _outside_graphs(me) if is_replaced(me) else self.packed
        bias, given = parameter(me, "bias"), x.dtype
        if not computes(x.device, given) and not torch.is_autocast_enabled(x.device.type):
            lower = me.__dict__.get("compute_dtype")  # to which bitsandbytes casts
            if lower not in DTYPES.values():
                plain = weight.dequantize(torch.float32).to(given)
                return torch.nn.functional.linear(x, plain, None if bias is None else bias.to(given))
            x = x.to(lower)
        if bias is not None and bias.dtype not in (x.dtype, torch.float32):
            bias = bias.to(x.dtype)
        return linear(x, weight, bias).to(given) if x.dtype != given else linear(x, weight, bias)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        current(self)
        result = super()._apply(fn, recurse)  # type: ignore[misc]
        self.packed = applied(self.packed, fn)
        self.__dict__["seen"] = _own(self)  # __setattr__ would register a parameter
        return result

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        fill(self)
        try:
            super()._save_to_state_dict(destination, prefix, keep_vars)  # type: ignore[misc]
        finally:
            empty(self)
        if keep_vars and self.empties:
            destination[prefix + self.codes] = _filled(self)

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any], strict: bool, *lists: list[str]
    ) -> None:
        me: Any = self
        current(me)
        fill(me)
        kept = [
            (own, name, t, t.detach().clone())
            for own in (me._parameters, me._buffers)
            for name, t in own.items()
            if t is not None
        ]
        try:
            super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, *lists)  # type: ignore[misc]
            self.packed = _read(me, self.packed.dtype)
        except UnsupportedProblem as error:
            lists[-1].append(f"{prefix}weight: {error}")
            for own, name, t, value in kept:
                t.data = value
                own[name] = t
        finally:
            empty(me, owned=not local_metadata.get("assign_to_params_buffers", False))


def take(model: torch.nn.Module, family: Family) -> dict[int, str]:
    """Patch the quantized projections whose layout is read. By a module's id: "" where it was, else why it was not.

    compressed-tensors decompresses a model as a whole, so that of its projections all are patched or none.
    """
    layouts = [(module, layout) for module in model.modules() if (layout := layout_of(module)) not in _OTHERS]
    dtype, shared = compute_dtype(model), shared_parameters(model)
    reasons = {}
    for module, layout in layouts:
        found = _reading(module, dtype)
        reasons[id(module)] = found if isinstance(found, str) else ""
        if not isinstance(found, str):
            own: Any = type(module)
            module.__class__ = swapped(Quantized, own, family)
            told = _TOLD if layout == "compressed-tensors" else ()
            codes = _CODES[layout] if hasattr(module, _CODES[layout]) else "weight"
            # torchao's is a subclass, which nothing makes again; one that another module has too stays for that one
            empties = layout != "torchao" and id(getattr(module, codes)) not in shared
            aside = {key: module.__dict__.pop(key) for key in told if key in module.__dict__}
            module.__dict__ |= {
                "packed": found, "quantized_layout": layout, "codes": codes, "empties": empties, "aside": aside,
            }  # fmt: skip
            empty(module)
    compressed = [module for module, layout in layouts if layout == "compressed-tensors"]
    reason = next(filter(None, (reasons[id(module)] for module in compressed)), "")
    for module in compressed if reason else ():
        reasons[id(module)] = reason
        if isinstance(module, Quantized):
            put_back(module)
            module.__class__ = module.original
    for module in model.modules() if compressed and not reason else ():
        handle = module.__dict__.get(_HOOK)
        if handle is not None:
            module.__dict__[_HOOK] = handle, module._forward_pre_hooks.pop(handle.id, None)
    return reasons


def _reading(module: Any, dtype: torch.dtype) -> QuantizedWeight | str:
    """The weight of a projection of a model that computes in ``dtype``, or why it cannot be patched."""
    own = [t for t in (*module._parameters.values(), *module._buffers.values()) if t is not None]
    if any(hasattr(t, "placements") for t in own) or sharded(module):
        return "it is quantized and sharded: load it whole, on one device"
    if any(t.is_meta for t in own):
        return "it is quantized and on the meta device: load it first"
    if "forward" in module.__dict__ and (hasattr(module, "_hf_hook") or layout_of(module) != "compressed-tensors"):
        return "its forward has been replaced (by device_map's hooks, say): load the model on one device"
    lower = module.__dict__.get("compute_dtype")  # to which bitsandbytes casts
    if reason := why_not_computed(own[0].device, lower if lower in DTYPES.values() else dtype):
        return reason
    try:
        weight = read_weight(module)
        assert weight is not None
        check_kernels(torch.empty(1, weight.shape[1], device=weight.device), weight)
    except UnsupportedProblem as error:
        return f"it is quantized, and {error}"
    return weight


# ---- the tensor of the codes ----------------------------------------------------------------------------


def _own(module: Any) -> Any:
    """The tensor of the codes, as it is."""
    name = module.__dict__["codes"]
    return module._parameters[name] if name in module._parameters else module._buffers[name]


def _is_empty(module: Any) -> bool:
    return bool(module.__dict__["empties"]) and _own(module).numel() == 0


def _like(t: Tensor, data: Tensor) -> Tensor:
    """A tensor of ``data`` that has the class and attributes of ``t``: bitsandbytes' state."""
    made = copy.copy(t)
    made.data = data
    return made


def _filled(module: Any) -> Tensor:
    """The tensor of the codes with them, made anew; the module's own stays empty."""
    return _like(_own(module), module.packed.tensors()[module.codes])


def is_replaced(module: Any) -> bool:
    """Whether the tensor of a patched projection's codes has been replaced or filled."""
    own = _own(module)
    return own.numel() != 0 if module.empties else own is not module.seen


def current(module: Any) -> QuantizedWeight:
    """The weight of a patched projection, read again where :func:`is_replaced`."""
    if not is_replaced(module):
        return module.packed  # type: ignore[no-any-return]
    own = _own(module)
    try:
        weight = _read(module, module.packed.dtype)
    except UnsupportedProblem as error:
        raise UnsupportedProblem(
            f"the weight of a patched projection was replaced by one that is not read ({error}): call "
            "cutekernels.unpatch(model), and patch it again"
        ) from error
    if isinstance(own, torch.nn.Parameter):  # any other is there for this call alone
        module.packed = weight
        empty(module, owned=False)
    return weight


# A graph breaks at a replaced weight, and is made anew with the one that was packed.
_outside_graphs: Callable[[Any], QuantizedWeight] = torch.compiler.disable(current)


def _read(module: Any, dtype: torch.dtype) -> QuantizedWeight:
    """The weight that a patched projection's own tensors have, the codes among them."""
    told = {key: value for key, value in module.aside.items() if key not in module.__dict__ and key != "forward"}
    module.__dict__.update(told)
    try:
        weight = read_weight(module, dtype)
    finally:
        for key in told:
            del module.__dict__[key]
    assert weight is not None
    return weight


def empty(module: Any, *, owned: bool = True) -> None:
    """Empty the tensor of the codes. ``owned``: no caller has it too, as that of ``assign=True``."""
    name, own = module.__dict__["codes"], _own(module)
    if module.__dict__["empties"] and name in module._buffers:
        module._buffers[name] = own.new_empty(0)
    elif module.__dict__["empties"] and owned:
        own.data = own.data.new_empty(0)
    elif module.__dict__["empties"]:
        module._parameters[name] = _like(own, own.data.new_empty(0))
    module.__dict__["seen"] = _own(module)


def fill(module: Any) -> None:
    """Undo :func:`empty`."""
    if _is_empty(module):
        tensor = module.packed.tensors()[module.codes]
        if module.codes in module._buffers:
            module._buffers[module.codes] = tensor
        else:
            _own(module).data = tensor


def put_back(module: Any) -> None:
    """Give a patched projection the tensors and attributes that it had."""
    if "codes" in module.__dict__:
        fill(module)
        aside = module.__dict__["aside"]
        if "forward" in aside and "_old_forward" in module.__dict__:  # accelerate has hooked the patched one since
            module.__dict__["_old_forward"] = aside.pop("forward")
        module.__dict__.update(aside)
    for name in _OWN:
        module.__dict__.pop(name, None)


def give_back(module: Any) -> None:
    """Have compressed-tensors decompress a model again at its first call."""
    held = module.__dict__.get(_HOOK)
    if isinstance(held, tuple):
        module.__dict__[_HOOK], hook = held
        module._forward_pre_hooks[held[0].id] = hook


def compute_dtype(model: Any) -> torch.dtype:
    """The type of a model's activations: that of its embeddings, which QLoRA's preparation makes fp32."""
    table: Any = next((m for m in model.modules() if isinstance(m, torch.nn.Embedding)), None)
    if table is not None:
        return table.weight.dtype  # type: ignore[no-any-return]
    return getattr(model.config, "dtype", None) or torch.float32


def why_not_computed(device: torch.device, dtype: torch.dtype) -> str:
    """Why kernels take nothing of a model that computes in ``dtype``, or ""."""
    if computes(device, dtype):
        return ""
    return f"on a GPU kernels take fp16 and bf16, and the model computes in {dtype}: load it with dtype=torch.bfloat16"


def decoded(model: torch.nn.Module) -> None:
    """Put a plain Linear in fp32 in the place of each quantized projection whose layout is read."""
    made: dict[Any, torch.nn.Linear] = {}
    for name, module in list(model.named_modules(remove_duplicate=False)):
        if layout_of(module) in ("", "fp8-experts"):
            continue
        projection: Any = module
        if module not in made:
            weight = quantized_weight(projection, torch.float32)
            assert weight is not None
            n, k = weight.shape
            made[module] = plain = torch.nn.Linear(k, n, bias=projection.bias is not None, device="meta")
            plain.weight = torch.nn.Parameter(weight.dequantize(), requires_grad=False)
            if projection.bias is not None:
                plain.bias = torch.nn.Parameter(projection.bias.detach().float(), requires_grad=False)
        model.set_submodule(name, made[module])
