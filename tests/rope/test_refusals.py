"""Every operand of ``rope`` refuses what is no fitting tensor, with UnsupportedProblem."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from cutekernels.errors import UnsupportedProblem
from cutekernels.ops.rope.api import rope

WRONG: dict[str, Callable[[Tensor], Any]] = {
    "list": lambda t: t.tolist(),
    "numpy": lambda t: t.numpy(),
    "sparse": lambda t: t.to_sparse(),
    "rank": lambda t: t[None, None],
    "device": lambda t: t.to("meta"),
    "dtype": lambda t: t.bool(),
}


def given() -> dict[str, Any]:
    angles = torch.rand(9, 8)
    return {
        "q": torch.randn(2, 5, 3, 16),
        "k": torch.randn(2, 5, 1, 16),
        "cos": angles.cos(),
        "sin": angles.sin(),
        "positions": torch.tensor([0, 2]),
    }


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("name", given())
def test_what_does_not_fit_is_refused(name: str, wrong: str, inplace: bool) -> None:
    operands = given()
    operands[name] = WRONG[wrong](operands[name])
    with pytest.raises(UnsupportedProblem):
        rope(**operands, inplace=inplace)


@pytest.mark.parametrize("name", ["q", "cos", "sin"])
def test_none_is_refused(name: str) -> None:
    with pytest.raises(UnsupportedProblem, match=f"takes {name} as a torch.Tensor; got None"):
        rope(**given() | {name: None})
