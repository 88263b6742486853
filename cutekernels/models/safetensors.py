"""Reads safetensors files: the length of a header (8 bytes, little endian), the header (JSON), the tensors' bytes.

Nothing of a file is trusted: a header is checked as a whole, against the file's own size, before a tensor is read, and
nothing in it is executed. The library of the same name is not needed.
"""

from __future__ import annotations

import json
import math
import mmap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cutekernels.errors import UnsupportedProblem
from cutekernels.ops.shared.checks import said

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
    "U16": torch.uint16, "U32": torch.uint32, "U64": torch.uint64, "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu,
}  # fmt: skip
_NO_RESERVE = 0x4000  # MAP_NORESERVE of Linux, which Python 3.11 has no name for
_LENGTH = 8  # bytes that hold the header's length
_MOST_HEADER = 100_000_000  # bytes, as the format has it
_MOST_ELEMENTS = 2**60  # with zeros counted as ones: beyond it strides would overflow


@dataclass(frozen=True)
class Entry:
    """A tensor in a file, and the bytes of the file that it has."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def bytes(self) -> int:
        return self.end - self.begin


class TensorFile:
    """One file, mapped into memory. ``entries``: what it holds, by name.

    Raises:
        UnsupportedProblem: no regular file, one that is truncated, or one whose header is not that of its bytes.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        if not path.is_file():  # a pipe, which would block, is none either
            raise UnsupportedProblem(f"{path} is no regular file: download the checkpoint again")
        with path.open("rb") as file:
            size = file.seek(0, 2)
            if size < _LENGTH:
                raise self._broken(f"it has {size} bytes, and a header begins with {_LENGTH}")
            # Private pages that are never written, and that no memory is set aside for: torch has no tensors over
            # memory that it may not write.
            self._map = mmap.mmap(file.fileno(), size, mmap.MAP_PRIVATE | _NO_RESERVE, mmap.PROT_READ | mmap.PROT_WRITE)
        self.entries = self._read_header(size)

    def read(self, name: str) -> Tensor:
        """A tensor over the file's own pages; copy what is to stay. Raises KeyError where there is none."""
        entry = self.entries[name]
        if not entry.bytes:
            return torch.empty(entry.shape, dtype=entry.dtype)
        first = entry.begin // mmap.PAGESIZE * mmap.PAGESIZE
        self._map.madvise(mmap.MADV_WILLNEED, first, entry.end - first)  # read ahead, more than a fault at a time
        raw = torch.frombuffer(self._map, dtype=torch.uint8, count=entry.bytes, offset=entry.begin)
        if entry.begin % entry.dtype.itemsize:
            raw = raw.clone()  # no type lies at an odd address
        return raw.view(entry.dtype).view(entry.shape)

    def forget(self, name: str) -> None:
        """Give the pages of a tensor back to the system, which reads them again where they are asked for again."""
        entry = self.entries[name]
        first = -(-entry.begin // mmap.PAGESIZE) * mmap.PAGESIZE
        last = entry.end // mmap.PAGESIZE * mmap.PAGESIZE
        if last > first:
            self._map.madvise(mmap.MADV_DONTNEED, first, last - first)

    # ---- the header

    def _read_header(self, size: int) -> dict[str, Entry]:
        length = int.from_bytes(self._map[:_LENGTH], "little")
        first = _LENGTH + length
        if length > _MOST_HEADER or first > size:
            raise self._broken(f"its header has {length} bytes, the file {size}, and a header {_MOST_HEADER} at most")
        try:
            header = json.loads(self._map[_LENGTH:first].decode(), object_pairs_hook=_no_name_twice)
        except (ValueError, RecursionError) as error:
            raise self._broken(f"its header is no JSON, {said(str(error))}") from error
        if not isinstance(header, dict):
            raise self._broken("its header is no JSON object")
        header.pop("__metadata__", None)
        odd = [name for name in header if not name.isprintable()]  # it would act on a terminal in a message
        if odd:
            raise self._broken(f"it names a tensor {said(odd[0])}")
        entries = {name: self._entry(name, given, first) for name, given in header.items()}
        at = first
        for name, entry in sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end)):
            if entry.begin != at:
                raise self._broken(f"{said(name)} begins at byte {entry.begin}, and what lies before ends at {at}")
            at = entry.end
        if at != size:
            raise self._broken(f"its tensors end at byte {at}, and the file at {size}")
        return entries

    def _entry(self, name: str, given: Any, first: int) -> Entry:
        if not isinstance(given, dict) or given.keys() != {"dtype", "shape", "data_offsets"}:
            raise self._broken(f"{said(name)} has no dtype, shape and data_offsets alone")
        kind, shape, offsets = given["dtype"], given["shape"], given["data_offsets"]
        if not isinstance(kind, str) or kind not in DTYPES:
            raise self._broken(f"{said(name)} is of dtype {said(kind)}, which is none of {', '.join(DTYPES)}")
        if not _whole(shape) or math.prod(max(1, n) for n in shape) >= _MOST_ELEMENTS:
            raise self._broken(f"{said(name)} has the shape {said(shape)}")
        if not _whole(offsets) or len(offsets) != 2:
            raise self._broken(f"{said(name)} has the offsets {said(offsets)}")
        begin, end = offsets
        if end - begin != math.prod(shape) * DTYPES[kind].itemsize:
            raise self._broken(f"{said(name)} has {end - begin} bytes for {kind} of {said(shape)}")
        return Entry(DTYPES[kind], tuple(shape), first + begin, first + end)

    def _broken(self, what: str) -> UnsupportedProblem:
        return UnsupportedProblem(f"{self.path} is no whole safetensors file: {what}; download it again")


def _no_name_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name stands in it twice")
    return found


def _whole(given: object) -> bool:
    """Whether it is a list of whole numbers, none below 0."""
    return isinstance(given, list) and all(type(n) is int and n >= 0 for n in given)
