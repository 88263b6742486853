"""``QuantizedWeight``: the weight of a linear layer as kernels read it, and as its format defines it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from cutekernels.errors import UnsupportedProblem
from cutekernels.kernels.cute.parts.nf4 import NF4
from cutekernels.quant import layout

FORMATS = {  # each with its file in formats/, whose write() gives the checkpoint's tensors of a weight
    "awq": "awq",
    "gptq": "gptq",
    "compressed-tensors": "compressed_tensors",
    "fp8": "plain",
    "bitsandbytes": "bitsandbytes",
    "torchao": "torchao",
    "mxfp4": "mxfp4",
    "modelopt": "nvfp4",
    "cutekernels": "own",
}
GROUPS = (0, 32, 64, 128)  # 0: all of K
GROUPS_E2M1 = (16, 32)  # NVFP4's and MXFP4's
SCALE_ROWS = (1, 128)
FLOATS = (torch.float16, torch.bfloat16, torch.float32)
EXPONENTS = torch.uint8  # scales of MXFP4: byte b is 2 ** (b - 127)
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
NF4_ZERO = NF4.index(0.0)
_TABLES = {"nf4": NF4, "e2m1": E2M1}
TENSORS = ("packed", "scales", "zeros", "order", "offsets", "factors")
_CHUNK_ELEMENTS = 8 << 20  # fp32 temporaries of dequantize: 32 MB each


@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False, repr=False)
class QuantizedWeight:
    """The weight of a linear layer, ``(N, K)``, in codes of four or eight bits and scales.

    An element is worth ``s * (q - z)`` (int4), ``s * q`` (int8 and e4m3), ``s * NF4[q]`` or (MXFP4, whose scales are
    exponents) ``2 ** (s - 127) * E2M1[q]``, computed in fp32 and rounded once to ``dtype``: with scales of 16 bits of
    integers and of e4m3, the exact product rounded; MXFP4 is exact in bf16. NVFP4 has a factor besides, of rows:
    ``fp32(s * f) * E2M1[q]``, or ``fp32(s / d) * E2M1[q]`` where a checkpoint has a divisor.

    Attributes:
        code: what an element is: ``"int4"``, ``"int8"``, ``"e4m3"``, ``"e2m1"`` or ``"nf4"``.
        group: the elements along K that share a scale: 32, 64, 128, or 0 for all of K; of e2m1 32, or 16 (NVFP4).
        scale_rows: the rows that share a scale: 1, or 128 with groups of 128 (blocks).
        shape: ``(N, K)``.
        packed: the codes, as :func:`cutekernels.quant.layout.pack` lays them out.
        scales: ``(groups, N rounded up to 64)``, or ``(ceil(K / 128), ceil(N / 128))`` for blocks, in the format's own
            dtype; of MXFP4 exponents, uint8. Of rows that are padding: 0. Of groups of 16 :func:`ue5m3`, as
            ``layout.pack_scales`` has them: int32 ``(ceil(K / 64), N rounded up to 64)``.
        zeros: of int4: z, 0 to 16, uint8, of the shape of ``scales``. None: 8 everywhere.
        order: int32 ``(K,)``: column j of ``packed`` is column ``order[j]`` of the weight (GPTQ's act-order).
        offsets: of int4 from torchao: added behind the product, of shape and dtype of ``scales``. None: 0 everywhere.
        dtype: what :meth:`dequantize` returns: fp16, bf16 or fp32.
        format: where the weight came from, one of ``FORMATS``.
        details: what :meth:`tensors` needs to write the format back; its tensors are small and stay on the CPU.
        factors: of groups of 16, fp32 ``(2, N rounded up to 64)``: of each row f, and d or 1 where none divides; f is
            1 / d where one does.

    Raises:
        UnsupportedProblem: fields that contradict each other. Values of tensors are not looked at here: readers do.
    """

    code: str
    group: int
    scale_rows: int
    shape: tuple[int, int]
    packed: Tensor
    scales: Tensor
    zeros: Tensor | None = None
    order: Tensor | None = None
    dtype: torch.dtype = torch.bfloat16
    format: str = "cutekernels"
    details: Mapping[str, Any] = field(default_factory=dict)
    offsets: Tensor | None = None
    factors: Tensor | None = None

    def __post_init__(self) -> None:
        _check_fields(self)

    @property
    def bits(self) -> int:
        """Bits of an element: 4 or 8."""
        return layout.BITS[self.code]

    @property
    def device(self) -> torch.device:
        """Where the tensors are."""
        return self.packed.device

    @property
    def nbytes(self) -> int:
        """The memory of all tensors that a product reads."""
        return sum(t.nbytes for name in TENSORS if (t := getattr(self, name)) is not None)

    def __repr__(self) -> str:
        group = "channel" if self.group == 0 else f"g{self.group}" if self.scale_rows == 1 else "block 128x128"
        extra = "".join(f", {name}" for name in ("zeros", "order", "offsets") if getattr(self, name) is not None)
        dtype = str(self.dtype).removeprefix("torch.")
        return (
            f"QuantizedWeight({self.format} {self.code} {group}{extra}, {self.shape[0]} x {self.shape[1]}, {dtype}, "
            f"{self.nbytes / 1e6:.3g} MB on {self.device})"
        )

    def to(
        self,
        device: torch.device | str | int | torch.dtype | None = None,
        dtype: torch.dtype | None = None,
        *,
        non_blocking: bool = False,
    ) -> QuantizedWeight:
        """This weight on ``device``; ``dtype`` changes what :meth:`dequantize` returns, and nothing that is stored."""
        if isinstance(device, torch.dtype):  # .to(torch.bfloat16), as of a Tensor
            device, dtype = None, device
        changed: dict[str, Any] = {} if dtype is None else {"dtype": dtype}
        if device is not None:
            for name in TENSORS:
                tensor = getattr(self, name)
                if tensor is not None:
                    changed[name] = tensor.to(device, non_blocking=non_blocking)
        return replace(self, **changed)

    @torch.no_grad()
    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """The weight of the checkpoint, ``(N, K)``: in ``self.dtype`` as its format defines it, bit for bit.

        Args:
            dtype: fp16, bf16 or fp32 instead: the same fp32 values, rounded once to it.
        """
        out_dtype = self.dtype if dtype is None else dtype
        if out_dtype not in FLOATS:
            raise UnsupportedProblem(f"weights are dequantized to fp16, bf16 or fp32, not {out_dtype}; cast the result")
        n, k = self.shape
        out = torch.empty(n, k, dtype=out_dtype, device=self.device)
        table = torch.tensor(_TABLES[self.code], device=self.device) if self.code in _TABLES else None
        step = max(128, _CHUNK_ELEMENTS // k // 128 * 128)
        for first in range(0, n, step):
            rows = min(step, n - first)
            tile = first // layout.TILE
            part = self.packed[tile : tile + -(-rows // layout.TILE)]
            codes = layout.unpack(part, self.code, rows, k)
            values = _values(self.code, codes, table)
            if self.code == "int4":
                values -= 8.0 if self.zeros is None else self._spread(self.zeros, first, rows)
            values *= self._spread(self.scales, first, rows)
            if self.offsets is not None:  # torchao rounds the product too
                values = values.to(out_dtype).float() + self._spread(self.offsets, first, rows)
            if self.order is None:
                out[first : first + rows] = values
            else:
                out[first : first + rows, self.order.long()] = values.to(out_dtype)
        return out

    def tensors(self) -> dict[str, Tensor]:
        """The checkpoint's tensors in the format that the weight came from, by their names there, bit for bit.

        Raises:
            UnsupportedProblem: a weight that no reader made, unless it is in this package's own format.
        """
        if self.format != "cutekernels" and "group" not in self.details:
            raise UnsupportedProblem(
                f"a weight is written in the format that a reader of cutekernels.quant read, and this one of "
                f'{self.format} was put together by hand; give it format="cutekernels"'
            )
        writer = import_module(f"cutekernels.quant.formats.{FORMATS[self.format]}")
        return {name: layout.dense(tensor) for name, tensor in writer.write(self).items()}

    def _spread(self, table: Tensor, first: int, rows: int) -> Tensor:
        """``table`` for each element of ``rows`` rows from ``first``, fp32: ``(rows, K)`` or ``(rows, 1)``."""
        if self.group == 16:
            part = layout.unpack_scales(table[:, first : first + -(-rows // layout.TILE) * layout.TILE])[:, :rows]
        elif self.scale_rows == 1:
            part = table[:, first : first + rows]
        else:
            part = table[:, first // 128 : -(-(first + rows) // 128)].repeat_interleave(128, 1)[:, :rows]
        if self.factors is not None:
            (factor, divisor), part = self.factors[:, first : first + rows, None], ue5m3(part.t())
            part = torch.where(divisor == 1, part * factor, part / divisor)
        else:
            part = powers_of_two(part.t()) if self.code == "e2m1" else part.t().float()
        return part if self.group == 0 else part.repeat_interleave(self.group, 1)[:, : self.shape[1]]


def powers_of_two(scales: Tensor) -> Tensor:
    """``2 ** (b - 127)`` of bytes b, fp32; of 0 a subnormal number. Byte 255 is NaN, which readers refuse."""
    bits = scales.int()
    return torch.where(bits == 0, 1 << 22, bits << 23).view(torch.float32)


def ue5m3(scales: Tensor) -> Tensor:
    """The numbers of bytes of five bits of exponent and three of mantissa, fp32: all are normal, 0 is 2 ** -15."""
    return ((scales.int() + (112 << 3)) << 20).view(torch.float32)


def _values(code: str, codes: Tensor, table: Tensor | None) -> Tensor:
    """The numbers that ``codes`` stand for before zeros and scales, fp32."""
    if table is not None:
        return table[codes.int()]
    if code == "int4":
        return codes.float()
    return codes.view(torch.int8 if code == "int8" else torch.float8_e4m3fn).float()


def scales_shape(group: int, scale_rows: int, shape: tuple[int, int]) -> tuple[int, int]:
    """The shape of ``scales`` for a weight of ``shape``."""
    n, k = shape
    if scale_rows == 128:
        return -(-k // 128), -(-n // 128)
    return (1 if group == 0 else -(-k // layout.step_of(group))), -(-n // layout.TILE) * layout.TILE


def _check_fields(w: QuantizedWeight) -> None:
    """One sentence for the first rule that ``w`` breaks."""
    for name, value, known in (
        ("code", w.code, tuple(layout.BITS)),
        ("group", w.group, GROUPS_E2M1 if w.code == "e2m1" else GROUPS),
        ("scale_rows", w.scale_rows, SCALE_ROWS),
        ("format", w.format, FORMATS),
        ("dtype", w.dtype, FLOATS),
    ):
        if value not in known:
            raise UnsupportedProblem(
                f"{name} of a QuantizedWeight is one of {', '.join(map(str, known))}, not {value!r}; "
                "use a reader of cutekernels.quant, or quantize()"
            )
    if len(w.shape) != 2 or min(w.shape) < 1:
        raise UnsupportedProblem(
            f"shape is (N, K), both at least 1, not {tuple(w.shape)}; pass a linear layer's weight"
        )
    if w.scale_rows == 128 and (w.group != 128 or w.code != "e4m3"):
        raise UnsupportedProblem(
            f"scales of 128 rows are those of 128 x 128 blocks of e4m3, not of {w.code} in groups of {w.group}; "
            "repeat them to rows"
        )
    if (w.factors is not None) != (w.group == 16):
        raise UnsupportedProblem("factors are of groups of 16 elements, which all have them; pass both, or neither")
    table = scales_shape(w.group, w.scale_rows, w.shape)
    expected: dict[str, tuple[tuple[int, ...], tuple[torch.dtype, ...]]] = {
        "packed": (layout.packed_shape(w.shape, w.code), (torch.uint8,)),
        "scales": (table, (torch.int32,) if w.group == 16 else (EXPONENTS,) if w.code == "e2m1" else FLOATS),
        "zeros": (table, (torch.uint8,)),
        "order": ((w.shape[1],), (torch.int32,)),
        "offsets": (table, (w.scales.dtype,)),
        "factors": ((2, table[1]), (torch.float32,)),
    }
    for name, (shape, dtypes) in expected.items():
        tensor = getattr(w, name)
        if tensor is None:
            continue
        if tuple(tensor.shape) != shape or tensor.dtype not in dtypes or not tensor.is_contiguous():
            kinds = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
            found = f"{'' if tensor.is_contiguous() else 'strided '}{str(tensor.dtype).removeprefix('torch.')}"
            raise UnsupportedProblem(
                f"{name} of a {w.shape[0]} x {w.shape[1]} weight in {w.code} is contiguous {kinds} of shape {shape}, "
                f"not {found} {tuple(tensor.shape)}; use a reader of cutekernels.quant"
            )
        if tensor.device != w.packed.device:
            raise UnsupportedProblem(
                f"the tensors of a weight are on one device, not packed on {w.packed.device} and {name} on "
                f"{tensor.device}; move the weight with .to()"
            )
    if w.code != "int4" and (w.zeros is not None or w.offsets is not None):
        raise UnsupportedProblem(f"zeros and offsets are of int4, not of {w.code}; pass None")
    if w.zeros is not None and w.offsets is not None:
        raise UnsupportedProblem("a weight has zeros or offsets, not both; pass None for one of them")
