"""Every operand of ``kv_append`` refuses what is no fitting tensor, with UnsupportedProblem."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from cutekernels.errors import UnsupportedProblem
from cutekernels.ops.kv_append.api import kv_append

WRONG: dict[str, Callable[[Tensor], Any]] = {
    "list": lambda t: t.tolist(),
    "numpy": lambda t: t.numpy(),
    "sparse": lambda t: t.to_sparse(),
    "rank": lambda t: t[None, None],
    "device": lambda t: t.to("meta"),
    "dtype": lambda t: t.bool(),
}


def given() -> dict[str, Any]:
    angles = torch.rand(32, 8)
    return {
        "k": torch.randn(2, 5, 1, 16),
        "v": torch.randn(2, 5, 1, 16),
        "k_cache": torch.zeros(4, 16, 1, 16),
        "v_cache": torch.zeros(4, 16, 1, 16),
        "state": torch.zeros(3, 2, dtype=torch.int32),
        "page_table": torch.arange(4, dtype=torch.int32).view(2, 2),
        "counts": torch.tensor([1, 2], dtype=torch.int32),
        "q": torch.randn(2, 5, 3, 16),
        "cos": angles.cos(),
        "sin": angles.sin(),
    }


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("name", given())
def test_what_does_not_fit_is_refused(name: str, wrong: str) -> None:
    operands = given()
    operands[name] = WRONG[wrong](operands[name])
    with pytest.raises(UnsupportedProblem):
        kv_append(**operands)


@pytest.mark.parametrize("name", ["k", "v", "k_cache", "v_cache", "state"])
def test_none_is_refused(name: str) -> None:
    with pytest.raises(UnsupportedProblem, match=f"takes {name} as a torch.Tensor; got None"):
        kv_append(**given() | {name: None})
