"""Tensors of a checkpoint's file, mapped by the safetensors library, which checks a header against the file's own size.

Nothing of a file is trusted: a header that the library takes and no tensor here can have is refused as a whole, before
a tensor is read, and nothing in it is executed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from cutekernels.errors import UnsupportedProblem
from cutekernels.ops.shared.checks import quote

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
    "U16": torch.uint16, "U32": torch.uint32, "U64": torch.uint64, "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu,
}  # fmt: skip
_MOST_WORDS = 200  # of the library's message, which may name a tensor as a hostile file does
_MOST_ELEMENTS = 2**60  # with zeros counted as ones: beyond it strides would overflow


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor in a file."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class TensorFile:
    """One file, mapped into memory. ``entries``: what it holds, by name.

    Raises:
        UnsupportedProblem: no regular file, one that is truncated, or one whose header is not that of its bytes.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        if not path.is_file():  # a pipe, which would block, is none either
            raise UnsupportedProblem(f"{path} is no regular file: download the checkpoint again")
        with path.open("rb") as file:  # the library does not say why it may not read one
            size = file.seek(0, 2)
        try:
            self._file = safe_open(path, framework="pt")
        except SafetensorError as error:
            words = repr(str(error).removeprefix("Error while deserializing header: ")[:_MOST_WORDS])[1:-1]
            raise self._refusal(f"{words}, of {size} bytes") from error
        names: list[str] = self._file.keys()
        self.entries = {name: self._entry(name) for name in names}

    def read(self, name: str) -> Tensor:
        """A tensor over the file's own pages; copy what is to stay."""
        found: Tensor = self._file.get_tensor(name)
        return found

    def _entry(self, name: str) -> Entry:
        if not name.isprintable():  # it would act on a terminal in a message
            raise self._refusal(f"it names a tensor {quote(name)}")
        given = self._file.get_slice(name)
        kind, shape = given.get_dtype(), given.get_shape()
        if kind not in DTYPES:
            raise self._refusal(f"{quote(name)} is of dtype {quote(kind)}, which is none of {', '.join(DTYPES)}")
        if math.prod(max(1, n) for n in shape) >= _MOST_ELEMENTS:
            raise self._refusal(f"{quote(name)} has the shape {quote(shape)}")
        return Entry(DTYPES[kind], tuple(shape))

    def _refusal(self, what: str) -> UnsupportedProblem:
        return UnsupportedProblem(f"{self.path} is no whole safetensors file: {what}; download it again")
