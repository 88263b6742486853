"""This package's own format: the packed tensors as they are, of weights that ``quantize`` made.

``quantization_config`` is ``{"quant_method": "cutekernels", "scheme": "int4_g128"}``.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from cutekernels.errors import UnsupportedProblem
from cutekernels.quant import layout
from cutekernels.quant.assembly import check_scales
from cutekernels.quant.formats.nibbles import extents, known_only, take
from cutekernels.quant.weight import FLOATS, TENSORS, QuantizedWeight

PREFIX = "weight."
NAMES = tuple(PREFIX + name for name in (*TENSORS, "shape"))
SCHEMES = {  # code, group, scale_rows
    "int4": ("int4", 0, 1),
    "int4_g32": ("int4", 32, 1),
    "int4_g64": ("int4", 64, 1),
    "int4_g128": ("int4", 128, 1),
    "fp8_channel": ("e4m3", 0, 1),
    "fp8_block": ("e4m3", 128, 128),
    "int8_channel": ("int8", 0, 1),
    "mxfp4": ("e2m1", 32, 1),
}


def from_own(tensors: Mapping[str, Tensor], scheme: str, *, dtype: torch.dtype | None = None) -> QuantizedWeight:
    """A weight from the tensors that ``tensors()`` of a weight of ``quantize`` gave.

    Raises:
        UnsupportedProblem: an unknown scheme, and tensors that contradict it.
    """
    if scheme not in SCHEMES:
        raise UnsupportedProblem(f"a scheme is one of {', '.join(SCHEMES)}, not {scheme!r}; check the config's scheme")
    code, group, scale_rows = SCHEMES[scheme]
    known_only(tensors, NAMES, by="cutekernels")
    packed, scales, shape = (take(tensors, PREFIX + name, by="cutekernels") for name in ("packed", "scales", "shape"))
    packed = bytes_of(packed, code)
    check_scales(scales, code, group)
    said = extents("weight.shape", shape, by="cutekernels")
    if len(said) != 2:
        raise UnsupportedProblem(f"weight.shape is (N, K), not {said}; download the checkpoint again")
    n, k = said
    group = 0 if scale_rows == 1 and group >= k and code != "e2m1" else group
    weight = QuantizedWeight(
        code,
        group,
        scale_rows,
        (n, k),
        packed,
        scales,
        tensors.get(PREFIX + "zeros"),
        tensors.get(PREFIX + "order"),
        dtype or (scales.dtype if scales.dtype in FLOATS[:2] else torch.bfloat16),
        "cutekernels",
        {"scheme": scheme},
        tensors.get(PREFIX + "offsets"),
        tensors.get(PREFIX + "factors"),
    )
    check_values(weight)
    return weight


def bytes_of(packed: Tensor, code: str) -> Tensor:
    """The stored ``packed`` as a weight holds it. Raises UnsupportedProblem where it is of elements of another kind."""
    stored = _stored_type(code)
    if code == "e4m3" and packed.dtype == torch.uint8:  # of version 0.2.0
        return layout.spread(packed, code)
    if packed.dtype != stored:
        raise UnsupportedProblem(
            f"weight.packed of {code} elements is {stored}, not {packed.dtype}; load what was saved with this scheme"
        )
    return packed.view(torch.uint8)


def _stored_type(code: str) -> torch.dtype:
    """The type that ``weight.packed`` has in files: it tells int8 from e4m3, whose bytes and scales look alike, and
    e4m3 whose bits are spread over each 16 from that of version 0.2.0, in bytes.
    """
    return {"int8": torch.int8, "e4m3": torch.int16}.get(code, torch.uint8)


def check_values(weight: QuantizedWeight) -> None:
    """Raises UnsupportedProblem for values that no weight has."""
    check_scales(weight.scales, weight.code, weight.group)
    order, k = weight.order, weight.shape[1]
    if order is not None and not torch.equal(order.long().sort().values, torch.arange(k, device=order.device)):
        raise UnsupportedProblem(f"weight.order is a permutation of {k} columns, and here it is not; download it again")
    if weight.zeros is not None and int(weight.zeros.amax()) > 16:
        raise UnsupportedProblem(f"zeros are 0 to 16, not {int(weight.zeros.amax())}; download the checkpoint again")
    if weight.code == "e4m3" and layout.has_nan(weight.packed):
        raise UnsupportedProblem(
            "e4m3 weights hold numbers, not the NaN codes 0x7f and 0xff; download the checkpoint again or quantize anew"
        )


def write(weight: QuantizedWeight) -> dict[str, Tensor]:
    """The packed tensors."""
    tensors = {
        "packed": weight.packed.view(_stored_type(weight.code)),
        "scales": weight.scales,
        "shape": torch.tensor(weight.shape),
    }
    held = {name: getattr(weight, name) for name in TENSORS[2:]}
    tensors |= {name: t for name, t in held.items() if t is not None}
    return {PREFIX + name: tensor for name, tensor in tensors.items()}
