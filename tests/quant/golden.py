"""Checkpoints built element by element from the tables that define the formats: nothing here is of the package."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

AWQ_COLUMN_OF_NIBBLE = [0, 2, 4, 6, 1, 3, 5, 7]


@dataclass
class Case:
    """Integers and scales of a weight, and what it is worth."""

    q: list[list[int]]  # (N, K), 0 to 15
    z: list[list[int]]  # (groups, N)
    s: Tensor  # (groups, N)
    g_idx: list[int]

    def values(self, dtype: torch.dtype) -> Tensor:
        """``s * (q - z)``, exact in double, rounded once."""
        s = self.s.double().tolist()
        rows = [
            [s[self.g_idx[k]][n] * (q - self.z[self.g_idx[k]][n]) for k, q in enumerate(row)]
            for n, row in enumerate(self.q)
        ]
        return torch.tensor(rows, dtype=torch.float64).to(dtype)


def case(n: int, k: int, group: int, *, zeros: str = "all", act_order: bool = False, seed: int = 0) -> Case:
    """``zeros``: "all" (1 to 16), "v2" (0 to 15) or "none" (8). ``act_order``: groups scattered over K."""
    torch.manual_seed(seed)
    groups = 1 if group <= 0 else -(-k // group)
    g_idx = [0 if group <= 0 else i // group for i in range(k)]
    if act_order:
        g_idx = [g_idx[i] for i in torch.randperm(k).tolist()]
    low, high = {"all": (1, 17), "v2": (0, 16), "none": (8, 9)}[zeros]
    z = torch.randint(low, high, (groups, n))
    z[0, 0], z[-1, -1] = low, high - 1
    s = (torch.rand(groups, n) * 0.02 + 0.001) * torch.where(torch.rand(groups, n) < 0.1, -1.0, 1.0)
    return Case(torch.randint(0, 16, (n, k)).tolist(), z.tolist(), s.half(), g_idx)


def words(rows: int, columns: int, nibble: object) -> Tensor:
    """int32 words, from ``nibble(row, column, i)``."""
    assert callable(nibble)
    table = [[sum(nibble(r, c, i) << (4 * i) for i in range(8)) for c in range(columns)] for r in range(rows)]
    unsigned = torch.tensor(table, dtype=torch.int64)
    return torch.where(unsigned >= 1 << 31, unsigned - (1 << 32), unsigned).to(torch.int32)


def awq(c: Case) -> dict[str, Tensor]:
    n, k, groups = len(c.q), len(c.q[0]), len(c.z)
    column = AWQ_COLUMN_OF_NIBBLE
    return {
        "qweight": words(k, n // 8, lambda r, w, i: c.q[8 * w + column[i]][r]),
        "qzeros": words(groups, n // 8, lambda r, w, i: c.z[r][8 * w + column[i]]),
        "scales": c.s.clone(),
    }


def gptq(c: Case, version: int) -> dict[str, Tensor]:
    n, k, groups = len(c.q), len(c.q[0]), len(c.z)
    return {
        "qweight": words(k // 8, n, lambda r, w, i: c.q[w][8 * r + i]),
        "qzeros": words(groups, n // 8, lambda r, w, i: c.z[r][8 * w + i] - (1 if version == 1 else 0)),
        "scales": c.s.clone(),
        "g_idx": torch.tensor(c.g_idx, dtype=torch.int32),
    }


def packed(c: Case, *, symmetric: bool) -> dict[str, Tensor]:
    """compressed-tensors' pack-quantized."""
    n, k, groups = len(c.q), len(c.q[0]), len(c.z)
    tensors = {
        "weight_packed": words(n, -(-k // 8), lambda r, w, i: c.q[r][8 * w + i] if 8 * w + i < k else 0),
        "weight_scale": c.s.t().contiguous(),
        "weight_shape": torch.tensor([n, k]),
    }
    if not symmetric:
        zero = words(-(-n // 8), groups, lambda r, w, i: c.z[w][8 * r + i] if 8 * r + i < n else 0)
        tensors["weight_zero_point"] = zero
    return tensors


def holds(weight: Any, values: Tensor, tensors: dict[str, Tensor]) -> None:
    """A weight has these values, and is written as it was read."""
    assert torch.equal(weight.dequantize(), values)
    same(weight.tensors(), tensors)


def same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    """The same names, types, shapes and bits."""
    assert sorted(found) == sorted(wanted)
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype, name
        assert found[name].shape == tensor.shape, name
        assert found[name].is_contiguous(), name  # safetensors asks for that
        as_bytes = [
            t.clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8) for t in (found[name], tensor)
        ]
        assert torch.equal(*as_bytes), name
