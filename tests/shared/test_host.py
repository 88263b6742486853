"""Host time of a call on the CPU beside the same product by torch alone, with and without gradients."""

from __future__ import annotations

from statistics import median
from time import thread_time_ns

import pytest
import torch
import torch.nn.functional as F

import cutekernels as ck

MOST = 8.0
"""3.8 to 6.0 in 48 rounds of a shared machine on 2026-11-29; by way of torch's dispatcher about 15 with gradients."""


@pytest.mark.parametrize("gradients", [False, True])
def test_linear_costs_the_host_a_few_times_its_reference_in_fp64(gradients: bool) -> None:
    x, weight = torch.randn(4, 8), torch.randn(8, 8, requires_grad=gradients)

    def reference(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.linear(x.double(), weight.double()).to(x.dtype)

    def ns(function: object) -> int:
        begin = thread_time_ns()
        for _ in range(50):
            function(x, weight)  # type: ignore[operator]
        return thread_time_ns() - begin

    ratios = []
    for _ in range(5):
        both = [(ns(ck.linear), ns(reference)) for _ in range(20)]
        ratios.append(median(ours for ours, _ in both) / median(theirs for _, theirs in both))
    assert min(ratios) < MOST
