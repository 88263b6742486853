"""Every public call under ``torch.compile``: one graph without a break, the same results, the same gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from tests.public_calls import calls

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
WITHOUT = ("sample_filter", "adamw_step", "decode_attention", "kv_append")  # a gradient
ONES = ("cos", "sin", "class_weight", "k_scale", "v_scale")  # floating arguments that take no gradient


def copies(given: dict[str, Any], gradients: bool) -> dict[str, Any]:
    """The arguments without ``out``; floating ones want gradients, those that a call writes to are its own."""
    found = {name: value.clone() if isinstance(value, Tensor) else value for name, value in given.items()}
    if gradients:
        found.pop("out", None)
        for name, value in found.items():
            if isinstance(value, Tensor) and value.is_floating_point() and name not in ONES:
                value.requires_grad_()
    return found


def outcome(function: Any, given: dict[str, Any]) -> list[Tensor]:
    """The result of a call, and what it leaves in its arguments or their gradients."""
    made = [t for t in tree_leaves(function(**given)) if isinstance(t, Tensor)]
    wanted = [t for t in made if t.requires_grad]
    if wanted:
        sum(t.float().square().sum() for t in wanted).backward()  # type: ignore[union-attr]
        return [*made, *(t.grad for t in given.values() if isinstance(t, Tensor) and t.grad is not None)]
    return [*made, *(t for t in given.values() if isinstance(t, Tensor))]


FUNCTIONS = [name for name, (function, _) in calls().items() if not isinstance(function, type)]
CASES = [(name, gradients) for name in FUNCTIONS for gradients in {False, not name.startswith(WITHOUT)}]


@pytest.mark.parametrize(("name", "gradients"), CASES)
def test_a_call_is_one_graph(name: str, gradients: bool) -> None:
    function, given = calls()[name]
    torch._dynamo.reset()
    traced = torch.compile(lambda **named: function(**named), fullgraph=True, backend="aot_eager")
    found, expected = (outcome(f, copies(given, gradients)) for f in (traced, function))
    torch.testing.assert_close(found, expected, equal_nan=True)
