"""The kernels over blocks of logits: interpreted, compiled, their declarations; and on a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from cutekernels.errors import UnsupportedProblem
from cutekernels.ops.loss.rows import (
    LOGIT_STATISTICS,
    SCALE_GRADIENT,
    ScaleProblem,
)
from tests.interpreted import kernel_tests
from tests.loss import cases as loss_cases
from tests.loss.cases import CASES, OPS, PLANTED
from tests.on_gpu import computed, drawn
from tests.tolerance import FP32_ULP, worst_ratio

interpreted, test_kernel_numerics, test_a_planted_bug_is_caught = kernel_tests(loss_cases.__file__, CASES, PLANTED)


def test_operands_that_do_not_fit() -> None:
    with pytest.raises(UnsupportedProblem, match="align covers one element"):
        ScaleProblem(10, "fp32", 2)
    with pytest.raises(UnsupportedProblem, match="8 numbers"):
        state = torch.zeros(3, 7)
        LOGIT_STATISTICS.admit(
            (torch.zeros(3, 5), torch.zeros(3, dtype=torch.long), None, state),
            capped=False,
            moments=False,
            totals=False,
        )
    with pytest.raises(UnsupportedProblem, match="one number on the device"):
        SCALE_GRADIENT.admit((torch.zeros(3), torch.zeros(2)))


@pytest.mark.gpu
@pytest.mark.parametrize(("op", "text"), [(op, text) for op in OPS.values() for text in op.suite], ids=str)
def test_every_suite_with_default_and_random_configs(op: Any, text: str) -> None:
    problem = op.Problem.parse(text)
    args = op.sample(problem, "cuda", 11)
    (expected,) = op.reference(problem, *args)
    size = expected.double().abs() + 1
    if op is LOGIT_STATISTICS:  # its sums have terms of either sign
        size = size + args[0].double().abs().sum(1, keepdim=True)
    terms = problem.cols if op is LOGIT_STATISTICS else 64
    for config in drawn(op, problem, 4, text):
        (out,) = computed(op, problem, config, args)
        assert worst_ratio(out, expected, terms**0.5 * 4 * FP32_ULP * size) <= 1, config
