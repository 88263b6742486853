"""From the tensors of a layer, by their names in a checkpoint, to a ``QuantizedWeight``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from cutekernels.errors import UnsupportedProblem
from cutekernels.quant.formats import awq, bitsandbytes, compressed_tensors, gptq, mxfp4, nvfp4, own, plain, torchao
from cutekernels.quant.formats.nibbles import check, known_only, short, take
from cutekernels.quant.scheme import Scheme, read_config
from cutekernels.quant.weight import QuantizedWeight


def read(
    tensors: Mapping[str, Tensor],
    config: Mapping[str, Any] | Scheme,
    *,
    dtype: torch.dtype | None = None,
    module: str | None = None,
) -> QuantizedWeight:
    """The weight of one linear layer.

    Args:
        tensors: the layer's, by their names in the checkpoint without the module's prefix; a bias is passed over.
        config: the model's ``quantization_config``, or what :func:`read_config` made of it.
        dtype: what ``dequantize`` returns: the model's; None: the format's own.
        module: the layer's name, for models whose layers are not quantized alike; without it the tensors decide.

    Raises:
        UnsupportedProblem: a format that is not read, a layer that is not quantized, and corrupt tensors.
    """
    scheme = config if isinstance(config, Scheme) else read_config(config)
    for name, tensor in tensors.items():
        if not isinstance(name, str):
            raise UnsupportedProblem(f"tensors have names, and one here is {name!r:.60}; pass those of the checkpoint")
        check(name, tensor, by=scheme.format)
    named = scheme.of(module) if module is not None else None
    if not scheme.holds(tensors) and not _is_subclass(tensors):
        weight = tensors.get("weight")
        what = (
            f"a weight in {short(weight.dtype)}" if weight is not None else f"{', '.join(sorted(tensors)) or 'nothing'}"
        )
        marks = dict.fromkeys(mark for each in scheme.schemes for mark in each.marks)
        rule = f"a quantized layer of {scheme.format} has {' or '.join(marks)}"
        if not marks:
            rule = f"this quantization_config of {scheme.format} says that weights are plain"
        raise UnsupportedProblem(
            f"{rule}, and this one has {what}; take it as it is if it is not quantized, or pass all of its tensors"
        )
    found = named if named is not None else _by_tensors(scheme, tensors)
    return _READERS[scheme.format](tensors, found, dtype)


def _is_subclass(tensors: Mapping[str, Tensor]) -> bool:
    weight = tensors.get("weight")
    return weight is not None and (type(weight).__name__ in torchao.CLASSES or hasattr(weight, "quant_state"))


def _by_tensors(scheme: Scheme, tensors: Mapping[str, Tensor]) -> Scheme:
    """The group whose code the tensors are in, where there are several."""
    if not scheme.others:
        return scheme
    weight = tensors.get("weight")
    for each in scheme.schemes:
        if each.code == "e2m1" and not tensors.keys().isdisjoint(each.marks):
            return each
        wanted = plain.DTYPES.get(each.code) if weight is not None else None
        if weight is None and "weight_packed" in each.marks and _width(tensors) == each.bits:
            return each
        if weight is not None and weight.dtype == wanted and "weight" in each.tensors:
            return each
    return scheme


def _width(tensors: Mapping[str, Tensor]) -> int:
    """Bits of an element of ``weight_packed``, as ``weight_shape`` has it."""
    words, shape = tensors.get("weight_packed"), tensors.get("weight_shape")
    if words is None or shape is None or words.dim() != 2 or shape.numel() != 2 or int(shape.flatten()[1]) < 1:
        return 0
    return 8 if words.shape[1] * 8 > int(shape.flatten()[1]) + 7 else 4


def _read_awq(tensors: Mapping[str, Tensor], scheme: Scheme, dtype: torch.dtype | None) -> QuantizedWeight:
    known_only(tensors, awq.NAMES, by="AWQ")
    qweight, qzeros, scales = (take(tensors, name, by="AWQ") for name in awq.NAMES)
    return awq.from_awq(qweight, qzeros, scales, scheme.group, dtype=dtype)


def _read_gptq(tensors: Mapping[str, Tensor], scheme: Scheme, dtype: torch.dtype | None) -> QuantizedWeight:
    known_only(tensors, gptq.NAMES, by="GPTQ")
    qweight, qzeros, scales = (take(tensors, name, by="GPTQ") for name in gptq.NAMES[:3])
    return gptq.from_gptq(qweight, qzeros, scales, scheme.group, tensors.get("g_idx"), scheme.version, dtype=dtype)


def _read_compressed(tensors: Mapping[str, Tensor], scheme: Scheme, dtype: torch.dtype | None) -> QuantizedWeight:
    held = {name: tensor for name, tensor in tensors.items() if name != "bias"}
    return compressed_tensors.from_compressed_tensors(held, scheme.detail or {}, dtype=dtype)


def _read_fp8(tensors: Mapping[str, Tensor], scheme: Scheme, dtype: torch.dtype | None) -> QuantizedWeight:
    name = next(name for name in plain.SCALES if name in tensors)
    known_only(tensors, ("weight", name, *plain.ACTIVATIONS), by="FP8")
    weight, scale = take(tensors, "weight", by="FP8"), take(tensors, name, by="FP8")
    extra = {name: tensors[name] for name in plain.ACTIVATIONS if name in tensors}
    block = scheme.block if name == plain.SCALES[0] else None  # AutoFP8 has no blocks
    return plain.from_fp8(weight, scale, block, dtype=dtype, extra=extra, name=name)


def _read_bitsandbytes(tensors: Mapping[str, Tensor], scheme: Scheme, dtype: torch.dtype | None) -> QuantizedWeight:
    del scheme  # the state says it all
    weight = take(tensors, "weight", by="bitsandbytes")
    state = {name.removeprefix("weight."): t for name, t in tensors.items() if name.startswith("weight.")}
    return bitsandbytes.from_bitsandbytes(weight, state or None, dtype=dtype)


def _read_torchao(tensors: Mapping[str, Tensor], scheme: Scheme, dtype: torch.dtype | None) -> QuantizedWeight:
    del scheme  # shapes and classes say it all
    if "weight" in tensors:
        return torchao.from_torchao(tensors["weight"], dtype=dtype)
    known_only(tensors, torchao.NAMES, by="torchao")
    return torchao.from_flattened(tensors, dtype=torch.bfloat16 if dtype is None else dtype)


def _read_mxfp4(tensors: Mapping[str, Tensor], scheme: Scheme, dtype: torch.dtype | None) -> QuantizedWeight:
    del scheme  # there is one way
    known_only(tensors, mxfp4.NAMES, by="MXFP4")
    blocks, scales = (take(tensors, name, by="MXFP4") for name in mxfp4.NAMES)
    return mxfp4.from_mxfp4(blocks, scales, dtype=dtype)


def _read_modelopt(tensors: Mapping[str, Tensor], scheme: Scheme, dtype: torch.dtype | None) -> QuantizedWeight:
    held = {name: tensor for name, tensor in tensors.items() if name != "bias"}
    return nvfp4.from_nvfp4(held, scheme.format, dtype=dtype)


def _read_own(tensors: Mapping[str, Tensor], scheme: Scheme, dtype: torch.dtype | None) -> QuantizedWeight:
    held = {name: tensor for name, tensor in tensors.items() if name != "bias"}
    return own.from_own(held, (scheme.detail or {})["scheme"], dtype=dtype)


_READERS: dict[str, Callable[[Mapping[str, Tensor], Scheme, torch.dtype | None], QuantizedWeight]] = {
    "awq": _read_awq,
    "gptq": _read_gptq,
    "compressed-tensors": _read_compressed,
    "fp8": _read_fp8,
    "bitsandbytes": _read_bitsandbytes,
    "torchao": _read_torchao,
    "mxfp4": _read_mxfp4,
    "modelopt": _read_modelopt,
    "cutekernels": _read_own,
}
