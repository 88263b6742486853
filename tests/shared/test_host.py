"""Host time of a call on the CPU, with and without gradients."""

from __future__ import annotations

from functools import partial

import pytest
import torch

import cutekernels as ck
from tests.host_cost import host_cost

MOST = 120.0
"""In keys of a tensor: 74 to 86 on 2026-12-01, beside other work too; by torch's dispatcher 149 with gradients."""


@pytest.mark.parametrize("gradients", [False, True])
def test_linear_costs_the_host_no_more_than_before(gradients: bool) -> None:
    x, weight = torch.randn(4, 8), torch.randn(8, 8, requires_grad=gradients)
    assert host_cost(partial(ck.linear, x, weight), calls=20, chunks=20) < MOST
