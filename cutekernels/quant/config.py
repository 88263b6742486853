"""``write_config``: the ``quantization_config`` under which quantized weights are read again."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from cutekernels.errors import UnsupportedProblem
from cutekernels.quant.formats.own import SCHEMES
from cutekernels.quant.weight import QuantizedWeight

_ABOUT_ANY = ("desc_act", "bnb_4bit_use_double_quant")  # what holds of a model where it holds of a layer
_ABOUT_ALL = ("sym",)


def write_config(weights: QuantizedWeight | Iterable[QuantizedWeight] | Any) -> dict[str, Any]:
    """The entry of ``config.json`` for a model that holds ``weights``: what :func:`read_config` takes.

    Args:
        weights: one, several, or a ``torch.nn.Module``: those that its modules have as ``weight``.

    Raises:
        UnsupportedProblem: no weights, weights that no one config describes, or weights that are not in a format as
            checkpoints have it.
    """
    if isinstance(weights, QuantizedWeight):
        weights = [weights]
    elif hasattr(weights, "modules"):
        weights = [getattr(module, "weight", None) for module in weights.modules()]
    found = [_config_of(weight) for weight in weights if isinstance(weight, QuantizedWeight)]
    if not found:
        raise UnsupportedProblem(
            "write_config takes a model with quantized weights, and this one has none; quantize its projections with "
            "nn.QuantizedLinear.from_linear"
        )
    config = found[0]
    for other in found[1:]:
        for names, joined in ((_ABOUT_ANY, any), (_ABOUT_ALL, all)):
            config |= {name: joined((config[name], other[name])) for name in names if name in config and name in other}
        if config != {**other, **{name: config[name] for name in (*_ABOUT_ANY, *_ABOUT_ALL) if name in config}}:
            raise UnsupportedProblem(
                f"one quantization_config is of layers that are quantized alike, and here are {config} and {other}; "
                "quantize all of them alike"
            )
    return config


def _config_of(weight: QuantizedWeight) -> dict[str, Any]:
    if weight.format != "cutekernels" and "group" not in weight.details:
        raise UnsupportedProblem(
            f"a weight is saved in the format that a reader of cutekernels.quant read, and this one of {weight.format} "
            'was put together by hand; give it format="cutekernels"'
        )
    return {"quant_method": weight.format, **_CONFIGS[weight.format](weight)}


def _size(weight: QuantizedWeight) -> int:
    """Elements of a group; -1 for all of K."""
    size: int = weight.details["group"]
    return size if size > 0 else -1


def _awq(weight: QuantizedWeight) -> dict[str, Any]:
    return {"bits": 4, "group_size": _size(weight), "zero_point": True, "version": "gemm"}


def _gptq(weight: QuantizedWeight) -> dict[str, Any]:
    return {
        "bits": 4,
        "group_size": _size(weight),
        "desc_act": weight.order is not None,
        "sym": weight.zeros is None,
        "checkpoint_format": "gptq" if weight.details["version"] == 1 else "gptq_v2",
    }


def _compressed_tensors(weight: QuantizedWeight) -> dict[str, Any]:
    details, size = weight.details, _size(weight)
    if weight.code == "e2m1":
        four = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "symmetric": True, "group_size": size}
        return _group_config("nvfp4-pack-quantized", four)
    packed = "bits" in details
    strategy = "block" if "block" in details else "group" if size > 0 else "tensor" if details.get("one") else "channel"
    weights: dict[str, Any] = {
        "num_bits": details["bits"] if packed else 8,
        "type": "float" if weight.code == "e4m3" else "int",
        "strategy": strategy,
        "symmetric": not (packed and "zero_dtype" in details),
    }
    if strategy == "block":
        weights["block_structure"] = list(details["block"])
    elif strategy == "group":
        weights["group_size"] = size
    form = "pack-quantized" if packed else "float-quantized" if weight.code == "e4m3" else "int-quantized"
    return _group_config(form, weights)


def _group_config(form: str, weights: dict[str, Any]) -> dict[str, Any]:
    return {
        "quantization_status": "compressed",
        "format": form,
        "ignore": [],
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}},
    }


def _fp8(weight: QuantizedWeight) -> dict[str, Any]:
    size, details = _size(weight), weight.details
    if details["scale_name"] == "weight_scale":  # AutoFP8's
        return {"activation_scheme": "static" if "input_scale" in details["extra"] else "dynamic"}
    block = details.get("block", (1, size) if size > 0 else None)
    return {"activation_scheme": "dynamic", "weight_block_size": None if block is None else list(block)}


def _bitsandbytes(weight: QuantizedWeight) -> dict[str, Any]:
    nested = bool(weight.details["nested"])
    return {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": nested}


def _torchao(weight: QuantizedWeight) -> dict[str, Any]:
    if weight.code == "int4":
        kind: dict[str, Any] = {"_type": "Int4WeightOnlyConfig", "_data": {"group_size": _size(weight)}}
    else:
        kind = {"_type": "Float8WeightOnlyConfig"}
    return {"quant_type": {"default": kind}}


def _mxfp4(weight: QuantizedWeight) -> dict[str, Any]:
    del weight
    return {"modules_to_not_convert": []}


def _modelopt(weight: QuantizedWeight) -> dict[str, Any]:
    return {"quant_algo": "NVFP4", "group_size": weight.group, "ignore": []}


def _own(weight: QuantizedWeight) -> dict[str, Any]:
    kind = weight.code, weight.group, weight.scale_rows
    scheme = weight.details.get("scheme") or next((name for name, its in SCHEMES.items() if its == kind), None)
    if scheme is None:
        raise UnsupportedProblem(
            f"no scheme has {weight.code} in groups of {weight.group}, as {weight} is; save the weights that it was "
            "joined from"
        )
    return {"scheme": scheme}


_CONFIGS: dict[str, Callable[[QuantizedWeight], dict[str, Any]]] = {
    "awq": _awq,
    "gptq": _gptq,
    "compressed-tensors": _compressed_tensors,
    "fp8": _fp8,
    "bitsandbytes": _bitsandbytes,
    "torchao": _torchao,
    "mxfp4": _mxfp4,
    "modelopt": _modelopt,
    "cutekernels": _own,
}
