"""Quantized projections as transformers has loaded them: which are read, and what to do about others.

Classes and attributes are told by name, so that none of the libraries they come from is needed. Machete, Marlin and
Exllama repack a weight when it is loaded, and others keep it in a layout of their own: those are not taken over.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cutekernels.errors import UnsupportedProblem
from cutekernels.integrations.transformers.families import gate_of
from cutekernels.quant import (
    QuantizedStack,
    QuantizedWeight,
    from_awq,
    from_bitsandbytes,
    from_compressed_tensors,
    from_fp8,
    from_gptq,
    from_torchao,
    stack,
)

REMEDY = "load the checkpoint itself by cutekernels.models.load(path)"
ANEW = "load the model anew by from_pretrained and do this before its first call, or " + REMEDY
_TORCHAO = ("Int4Tensor", "Int4TilePackedTo4dTensor", "Float8Tensor")
_GPTQMODEL = {  # kernels of gptqmodel that keep the checkpoint's tensors
    "TorchLinear": "gptq",
    "TritonV2Linear": "gptq",
    "AwqTorchLinear": "awq",
    "AwqGEMMLinear": "awq",
    "AwqGEMMTritonLinear": "awq",
}
_STORED = (torch.float8_e4m3fn, torch.int8)  # as compressed-tensors keeps a weight that it has not decompressed
_COMPRESSED = (
    "weight", "weight_packed", "weight_scale", "weight_global_scale", "weight_shape", "weight_zero_point",
    "weight_g_idx",
)  # fmt: skip
_LIBRARIES = {  # parts of the module's name of a class whose weights are quantized
    "aqlm", "auto_gptq", "autoawq", "awq", "bitnet", "bitsandbytes", "compressed_tensors", "eetq", "fbgemm_fp8",
    "finegrained_fp8", "fp_quant", "ggml", "gguf", "gptqmodel", "higgs", "hqq", "mxfp4", "quanto",
    "torchao", "vptq",
}  # fmt: skip


def layout_of(module: Any) -> str:
    """In which layout a projection, or experts, hold quantized weights that are read here, or ""."""
    if hasattr(module, "base_layer"):  # an adapter's, which shows the weight that it stands before
        return ""
    if "quantized_layout" in module.__dict__:  # of a patched one
        return module.__dict__["quantized_layout"]  # type: ignore[no-any-return]
    cls, weight = type(module), getattr(module, "weight", None)
    kind = cls.__name__
    if isinstance(weight, QuantizedWeight):  # nn.QuantizedLinear
        return "cutekernels"
    if kind == "FP8Linear" and hasattr(module, "weight_scale_inv"):
        return "fp8"
    if kind == "FP8Experts" and hasattr(module, "gate_up_proj_scale_inv"):
        return "fp8-experts"
    if kind == "CompressedTensorsFP8Linear":
        return "fp8-rows"
    if kind == "Linear4bit" and getattr(weight, "quant_state", None) is not None:
        return "bitsandbytes"
    if cls.__module__.startswith("gptqmodel."):
        return _GPTQMODEL.get(kind, "")
    if cls is not torch.nn.Linear:
        return ""
    if "weight_packed" in module._parameters:
        return "compressed-tensors"
    if hasattr(module, "quantization_scheme") and getattr(weight, "dtype", None) in _STORED:
        return "compressed-tensors"
    return "torchao" if type(weight).__name__ in _TORCHAO else ""


def quantized_weight(module: Any, dtype: torch.dtype | None = None) -> QuantizedWeight | None:
    """The weight of a projection, packed anew; None where it is not quantized, or in no layout that is read.

    The module keeps its own, so that until it goes there are two; but for :class:`cutekernels.nn.QuantizedLinear`,
    whose weight it is, and for a patched projection, which has it already.

    Args:
        module: of a model that transformers has loaded. One of compressed-tensors must not have been called: it then
            holds the decompressed weight.
        dtype: of activations; the format's own by default.

    Raises:
        UnsupportedProblem: tensors that contradict each other, options that are not read.
    """
    there = module.weight if layout_of(module) == "cutekernels" else module.__dict__.get("packed")
    if isinstance(there, QuantizedWeight):
        return there if dtype in (None, there.dtype) else there.to(dtype=dtype)
    return read_weight(module, dtype)


def read_weight(module: Any, dtype: torch.dtype | None = None) -> QuantizedWeight | None:
    """:func:`quantized_weight`, read of the module's tensors."""
    layout = layout_of(module)
    if layout == "fp8":
        block = module.block_size
        return from_fp8(_data(module.weight), _data(module.weight_scale_inv), block and tuple(block), dtype=dtype)
    if layout == "fp8-rows":
        scale = _data(module.weight_scale)
        scale = scale.reshape(-1, 1) if scale.numel() > 1 else scale.reshape(1)
        weights = {"num_bits": 8, "type": "float", "strategy": "channel"}
        return from_compressed_tensors({"weight": _data(module.weight), "weight_scale": scale}, weights, dtype=dtype)
    if layout == "bitsandbytes":
        if getattr(module.weight, "quant_state", None) is None:
            raise UnsupportedProblem(
                "bitsandbytes' weight is a Params4bit with its quant_state, and this one has none: load the quantized "
                "model by from_pretrained"
            )
        if getattr(module.weight.quant_state, "packing_format_for_cpu", False):
            raise UnsupportedProblem(
                f"bitsandbytes has packed it for its CPU kernel at the first call: move the model to a GPU, or {REMEDY}"
            )
        return from_bitsandbytes(module.weight, dtype=dtype)
    if layout == "compressed-tensors":
        own = module._parameters | module._buffers
        tensors = {name: _data(own[name]) for name in _COMPRESSED if own.get(name) is not None}
        weights = module.quantization_scheme.weights
        plain = weights if isinstance(weights, dict) else weights.model_dump(mode="json")
        return from_compressed_tensors(tensors, plain, dtype=dtype)
    if layout in ("gptq", "awq"):
        return _of_gptqmodel(module, layout, dtype)
    return from_torchao(module.weight, dtype=dtype) if layout == "torchao" else None


def _of_gptqmodel(module: Any, layout: str, dtype: torch.dtype | None) -> QuantizedWeight:
    for what, broken in (
        ("four bits in words of 32", module.bits != 4 or module.qweight.dtype != torch.int32),
        ("no adapter of its own", getattr(module, "adapter", None) is not None),
        ("no rotation of its input", getattr(module, "had_K", None) is not None),
    ):
        if broken:
            raise UnsupportedProblem(f"a projection of gptqmodel is read with {what}: {REMEDY}")
    tensors = _data(module.qweight), _data(module.qzeros), _data(module.scales)
    if layout == "awq":
        return from_awq(*tensors, module.group_size, dtype=dtype)
    return from_gptq(*tensors, module.group_size, _data(module.g_idx), module.qzero_format(), dtype=dtype)


def quantized_experts(module: Any, dtype: torch.dtype | None = None) -> tuple[QuantizedStack, QuantizedStack] | None:
    """Gate and up, and down, of a mixture's experts, packed anew; None where they are in no layout that is read.

    Raises:
        UnsupportedProblem: a bias, another gate than SiLU's, blocks or elements that are not read.
    """
    if layout_of(module) != "fp8-experts":
        return None
    if getattr(module, "has_bias", False) or not getattr(module, "has_gate", True) or gate_of(module.act_fn) != "silu":
        raise UnsupportedProblem(f"experts in FP8 have the gate of SiLU and no biases, and these do not: {REMEDY}")
    if any(getattr(module, name, None) is not None for name in ("limit", "swiglu_alpha", "gate_softcap", "up_softcap")):
        raise UnsupportedProblem(f"experts in FP8 have a plain gate, and these clamp theirs: {REMEDY}")
    block = module.block_size and tuple(module.block_size)
    up, down = (
        stack([from_fp8(w, s, block, dtype=dtype) for w, s in zip(_data(weight), _data(scale), strict=True)])
        for weight, scale in (
            (module.gate_up_proj, module.gate_up_proj_scale_inv),
            (module.down_proj, module.down_proj_scale_inv),
        )
    )
    return up, down


def is_quantized(module: Any) -> bool:
    """Whether a projection's weight is quantized, in whatever layout."""
    if layout_of(module) or hasattr(module, "quantization_scheme"):
        return True
    kinds = type(module), type(getattr(module, "weight", None))
    return any(set(kind.__module__.split(".")) & _LIBRARIES for kind in kinds)


def is_decompressed(module: Any) -> bool:
    """Whether compressed-tensors has put a plain weight in the place of a projection's quantized one.

    It does so at a model's first call, and leaves its scheme there, and a forward that may round activations.
    """
    status = getattr(module, "quantization_status", None)
    return hasattr(module, "weight") and getattr(status, "value", status) == "decompressed"


def is_undecoded(module: Any) -> bool:
    """Whether a module is experts or a projection whose quantized weight nothing here decodes."""
    if hasattr(module, "quantization_scheme") and getattr(module, "weight", None) is not None:
        return module.weight.dtype in _STORED and not layout_of(module)  # else compressed-tensors has decompressed it
    layout = layout_of(module)
    known = hasattr(module, "in_features") and not hasattr(module, "base_layer")
    return layout == "fp8-experts" or (known and not layout and is_quantized(module))


def why_left(module: Any) -> str:
    """Why ``patch`` leaves a quantized module in no layout that is read, and the remedy; "" for no projection."""
    layout = layout_of(module)
    if layout == "fp8-experts":
        return "its experts are quantized, and patch keeps the model's own: a models.Decoder multiplies by them"
    if not hasattr(module, "in_features") or layout == "cutekernels" or hasattr(module, "base_layer"):
        return ""
    if is_decompressed(module):
        return f"compressed-tensors has decompressed it at the model's first call: {ANEW}"
    return f"it is quantized ({said_kind(module)}) in a layout that is not read: {REMEDY} for a models.Decoder"


def said_kind(module: Any) -> str:
    """Which library's class a projection or its weight is of."""
    if hasattr(module, "quantization_scheme"):
        return "by compressed_tensors"
    kind = type(module.weight if type(module).__module__.startswith("torch.nn.") else module)
    return f"{kind.__module__}.{kind.__qualname__}"


def _data(t: Tensor) -> Tensor:
    return t.detach()
