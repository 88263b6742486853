"""Types of elements by their names in problems. Their sizes are known without torch, whose own types are looked up."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, ValuesView
from functools import cached_property
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

BYTES = {"bf16": 2, "fp16": 2, "fp32": 4, "i32": 4, "i64": 8, "fp8": 1, "u8": 1, "ue5m3": 4, "e8m0": 1, "bool": 1}
_TORCH = {
    "bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "i32": "int32", "i64": "int64", "fp8": "float8_e4m3fn",
    "u8": "uint8", "ue5m3": "int32", "e8m0": "uint8", "bool": "bool",
}  # fmt: skip
WIDEST_BYTES = 16  # one thread's widest access; alignment beyond it gains nothing


class Dtypes(Mapping[str, "torch.dtype"]):
    """torch's types by name. The first value that is asked for imports torch."""

    def __init__(self, *names: str) -> None:
        self._known = names

    @cached_property
    def _types(self) -> dict[str, torch.dtype]:
        import torch

        return {name: getattr(torch, _TORCH[name]) for name in self._known}

    @cached_property
    def names(self) -> dict[torch.dtype, str]:
        """Their names by type."""
        return {dtype: name for name, dtype in self._types.items()}

    def __getitem__(self, name: str) -> torch.dtype:
        return self._types[name]

    def values(self) -> ValuesView[torch.dtype]:
        return self._types.values()

    def __contains__(self, name: object) -> bool:
        return name in self._known

    def __iter__(self) -> Iterator[str]:
        return iter(self._known)

    def __len__(self) -> int:
        return len(self._known)


# e8m0: a power of two, its exponent; ue5m3: four numbers in a word, each with five bits of exponent, three of mantissa
TYPES = Dtypes("bf16", "fp16", "fp32", "ue5m3", "i32", "i64", "fp8", "u8", "e8m0", "bool")
GPU_DTYPES = Dtypes("bf16", "fp16", "fp32")
DTYPES = Dtypes("bf16", "fp16")  # of products and attention
