"""Host time of a call beside torch's own on the CPU, in one loop: what a call adds, with and without gradients."""

from __future__ import annotations

from statistics import median
from time import thread_time_ns

import pytest
import torch
import torch.nn.functional as F

import cutekernels as ck

MOST = {False: 22.0, True: 13.0}
"""13.5 and 8 on 2026-11-26, most of it the reference in fp64; by way of torch's dispatcher 25 with gradients."""


@pytest.mark.parametrize("gradients", [False, True])
def test_linear_costs_the_host_a_few_times_what_torch_s_does(gradients: bool) -> None:
    x, weight = torch.randn(4, 8), torch.randn(8, 8, requires_grad=gradients)

    def ns(function: object) -> int:
        begin = thread_time_ns()
        for _ in range(50):
            function(x, weight)  # type: ignore[operator]
        return thread_time_ns() - begin

    ratios = []
    for _ in range(5):
        both = [(ns(ck.linear), ns(F.linear)) for _ in range(20)]
        ratios.append(median(ours for ours, _ in both) / median(theirs for _, theirs in both))
    assert min(ratios) < MOST[gradients]
