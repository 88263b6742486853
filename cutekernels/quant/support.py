"""Which elements have kernels on which GPUs, and which formats are read, as data.

A GPU is a compute capability here, never a name. Everything that is refused has its remedy.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import torch

from cutekernels.gpu import ARCHITECTURES
from cutekernels.quant.weight import QuantizedWeight


@dataclass(frozen=True, slots=True)
class Support:
    """Kernels for a kind of element. ``since``: the lowest compute capability that has them."""

    code: str
    since: tuple[int, int]
    remedy: str


_BF16 = "use the weight's dequantize() there"
SUPPORT = (
    Support("int4", (8, 0), _BF16),
    Support("int8", (8, 0), _BF16),
    Support("e4m3", (8, 0), _BF16),  # decoded by shifts: no converting instruction is needed
    Support("nf4", (8, 0), _BF16),
    Support("e2m1", (8, 0), _BF16),
)
_BY_CODE = {row.code: row for row in SUPPORT}

_OTHER = "convert it with llm-compressor to W4A16 or FP8, or load the model in bf16"
REFUSED = {  # quant_method of a config, or format of compressed-tensors: what to do instead
    "aqlm": _OTHER,
    "bitnet": _OTHER,
    "eetq": _OTHER,
    "fbgemm_fp8": _OTHER,
    "fp_quant": _OTHER,
    "gguf": "take the safetensors checkpoint that the GGUF file was made from",
    "higgs": _OTHER,
    "hqq": _OTHER,
    "marlin-24": "decompress it with compressed-tensors, and quantize anew",
    "mxfp4-pack-quantized": _OTHER,
    "mxfp6-pack-quantized": _OTHER,
    "mxfp8-quantized": _OTHER,
    "nvfp4": _OTHER,
    "quanto": _OTHER,
    "quark": _OTHER,
    "quip": _OTHER,
    "spqr": _OTHER,
    "vptq": _OTHER,
}


READS = {  # format: the elements that its weights may have
    "awq": ("int4",),
    "gptq": ("int4",),
    "compressed-tensors": ("int4", "int8", "e4m3", "e2m1"),
    "fp8": ("e4m3",),
    "bitsandbytes": ("nf4",),
    "torchao": ("int4", "e4m3"),
    "mxfp4": ("e2m1",),
    "modelopt": ("e2m1",),
    "cutekernels": ("int4", "int8", "e4m3", "e2m1"),
}


@dataclass(frozen=True, slots=True)
class Row:
    """A line of :func:`table`. ``reason``: why not, with the remedy; None: there are kernels."""

    format: str
    code: str
    capability: tuple[int, int]
    reason: str | None


def table(capabilities: Iterable[tuple[int, int]] = tuple(ARCHITECTURES)) -> list[Row]:
    """Every format that is read, on every compute capability: has it kernels, or what to do instead."""
    return [
        Row(format, code, capability, _too_old(_BY_CODE[code], capability))
        for format, codes in READS.items()
        for code in codes
        for capability in capabilities
    ]


def _too_old(row: Support, capability: tuple[int, int]) -> str | None:
    if capability >= row.since:
        return None
    major, minor = row.since
    return (
        f"kernels for {row.code} need compute capability {major}.{minor}, not {capability[0]}.{capability[1]}; "
        f"{row.remedy}"
    )


class Coded(Protocol):
    """A ``QuantizedWeight`` or a ``Scheme``."""

    @property
    def code(self) -> str: ...


def why_not(weight_or_scheme: Coded, capability: tuple[int, int] | None = None) -> str | None:
    """Why no kernel multiplies such a weight on a GPU, with the remedy; None where one does.

    Args:
        weight_or_scheme: a ``QuantizedWeight``, or the ``Scheme`` of a model.
        capability: of the GPU; None: that of the weight's GPU, or of this machine's. Without one, kernels are assumed.
    """
    if not weight_or_scheme.code:  # a Scheme of plain weights
        return None
    row = _BY_CODE.get(weight_or_scheme.code)
    if row is None:
        return f"elements are {', '.join(_BY_CODE)}, not {weight_or_scheme.code}; {_OTHER}"
    if isinstance(weight_or_scheme, QuantizedWeight):
        if weight_or_scheme.offsets is not None:
            return (
                "torchao's float zero points are added behind the product, which no kernel does; quantize the weight's "
                'dequantize() anew with cutekernels.quant.quantize(weight, "int4_g128", symmetric=False)'
            )
        if weight_or_scheme.shape[1] % 8:
            return (
                "kernels read activations 16 bytes at a time, so K is a multiple of 8, not "
                f"{weight_or_scheme.shape[1]}; "
                "use the weight's dequantize() there, or pad K before quantizing"
            )
        if capability is None and weight_or_scheme.device.type == "cuda":
            capability = torch.cuda.get_device_capability(weight_or_scheme.device)
    if capability is None and torch.cuda.is_available():
        capability = torch.cuda.get_device_capability()
    return None if capability is None else _too_old(row, capability)
