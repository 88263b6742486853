"""Every operand of the public functions refuses what is no fitting tensor, with UnsupportedProblem."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from cutekernels.errors import UnsupportedProblem
from cutekernels.ops.activations.api import bias_gelu, gelu_mul, silu_mul

WRONG: dict[str, Callable[[Tensor], Any]] = {
    "list": lambda t: t.tolist(),
    "numpy": lambda t: t.numpy(),
    "sparse": lambda t: t.to_sparse(),
    "rank": lambda t: t[None, None],
    "device": lambda t: t.to("meta"),
    "dtype": lambda t: t.int(),
}
CALLS: dict[str, tuple[Callable[..., Any], dict[str, tuple[int, ...]]]] = {
    "silu_mul": (silu_mul, {"gate": (4, 6), "up": (4, 6), "out": (4, 6)}),
    "silu_mul packed": (silu_mul, {"gate": (4, 12), "out": (4, 6)}),
    "gelu_mul": (gelu_mul, {"gate": (4, 6), "up": (4, 6), "out": (4, 6)}),
    "bias_gelu": (bias_gelu, {"x": (4, 6), "bias": (6,), "out": (4, 6)}),
}
NONE = [
    ("silu_mul", "gate"),
    ("silu_mul packed", "gate"),
    ("gelu_mul", "gate"),
    ("bias_gelu", "x"),
    ("bias_gelu", "bias"),
]


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize(("call", "name"), [(call, name) for call, (_, shapes) in CALLS.items() for name in shapes])
def test_what_does_not_fit_is_refused(call: str, name: str, wrong: str) -> None:
    function, shapes = CALLS[call]
    operands: dict[str, Any] = {n: torch.randn(shape) for n, shape in shapes.items()}
    operands[name] = WRONG[wrong](operands[name])
    with pytest.raises(UnsupportedProblem):
        function(**operands)


@pytest.mark.parametrize(("call", "name"), NONE)
def test_none_is_refused(call: str, name: str) -> None:
    function, shapes = CALLS[call]
    operands: dict[str, Any] = {n: torch.randn(shape) for n, shape in shapes.items()}
    with pytest.raises(UnsupportedProblem, match=f"takes {name} as a torch.Tensor; got None"):
        function(**operands | {name: None})
