"""Readers of the formats that checkpoints have, a file per family: each gives a ``QuantizedWeight``."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from cutekernels.errors import UnsupportedProblem
from cutekernels.quant.formats import awq, bitsandbytes, compressed_tensors, gptq, mxfp4, own, plain, torchao
from cutekernels.quant.layout import dense
from cutekernels.quant.weight import QuantizedWeight

_WRITERS: dict[str, Callable[[QuantizedWeight], dict[str, Tensor]]] = {
    "awq": awq.write,
    "gptq": gptq.write,
    "compressed-tensors": compressed_tensors.write,
    "fp8": plain.write,
    "bitsandbytes": bitsandbytes.write,
    "torchao": torchao.write,
    "mxfp4": mxfp4.write,
    "cutekernels": own.write,
}


def write(weight: QuantizedWeight) -> dict[str, Tensor]:
    """The checkpoint's tensors of ``weight``, in the format that it came from.

    Raises:
        UnsupportedProblem: a weight that no reader made, unless it is in this package's own format.
    """
    if weight.format not in _WRITERS or (weight.format != "cutekernels" and "group" not in weight.details):
        raise UnsupportedProblem(
            f"a weight is written in the format that a reader of cutekernels.quant read, and this one of "
            f'{weight.format} was put together by hand; give it format="cutekernels"'
        )
    return {name: dense(tensor) for name, tensor in _WRITERS[weight.format](weight).items()}
