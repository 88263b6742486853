"""``sample_filter`` without a GPU: its kernel under Triton's interpreter, the declaration, the CPU path, tracing."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

import cutekernels
from cutekernels.errors import UnsupportedProblem
from cutekernels.kernels.triton import sampling as kernels
from cutekernels.ops.sampling import op
from cutekernels.ops.sampling.op import SampleFilterProblem, _masses
from tests.interpreted import kernel_tests, of_each_dtype
from tests.refusals import Calls, refused
from tests.sampling import cases as sampling_cases
from tests.sampling.cases import CASES, PLANTED, fault, logits_of, numbers_of

sample_filter = cutekernels.sample_filter


# ---- the kernel, interpreted ----------------------------------------------------------------------------


def kept_exactly(reply: dict[str, Any]) -> bool:
    """Whether the kernel kept what the definition and the CPU keep, and wrote nothing behind its result."""
    return bool(not reply["fault"] and reply["as on the CPU"] and reply["outside"])


interpreted, test_kernel_numerics, test_a_planted_bug_is_caught = kernel_tests(
    sampling_cases.__file__, CASES, PLANTED, correct=kept_exactly
)


# ---- the declaration ------------------------------------------------------------------------------------


def test_a_parameter_needs_its_filter() -> None:
    with pytest.raises(UnsupportedProblem, match="top_ks=1 are parameters of a filter"):
        SampleFilterProblem.parse("rows=1 cols=8 top_ks=1")


def test_state_and_stages_are_those_of_the_kernel() -> None:
    assert kernels._ROUNDS.value == op._ROUNDS
    assert kernels._ROUNDS.value * kernels._STEPS.value + len(kernels.Limits._fields) == op._STATE
    last = [kernels._MOVE.value, kernels._SEARCH.value, kernels._WRITE.value]
    problem = SampleFilterProblem.parse("rows=1 cols=8 by_p=1")
    assert op.SAMPLE_FILTER.stages(problem, narrows=True, greedy=False) == [*range(last[0]), *last]


def test_masses_are_exponentials() -> None:
    """Masses are right to 2 ulp of fp32 and one unit; far below the maximum they are 0."""
    d = -torch.logspace(-8, 1.5, 20_000)
    exact = torch.exp(d.double()) * 2.0**40
    assert ((_masses(d).double() - exact).abs() <= 2.0**-22 * exact + 1).all()
    assert _masses(torch.tensor([0.0, -64.0, -1e30, float("-inf")])).tolist() == [1 << 40, 0, 0, 0]


# ---- the function, on the CPU ---------------------------------------------------------------------------


def test_cpu_keeps_what_the_definition_keeps() -> None:
    wrong = {}
    for name, case in CASES.items():
        logits = logits_of(case)
        tensors, scalars, each = numbers_of(case, logits.shape[0])
        names = ("temperature", "top_k", "top_p", "min_p")
        given = {n: s if t is None else t for n, t, s in zip(names, tensors, scalars, strict=True)}
        wrong[name] = fault(sample_filter(logits, **given), logits, each)  # type: ignore[arg-type]
    assert not any(wrong.values()), wrong


@of_each_dtype
def test_any_leading_shape(dtype: torch.dtype) -> None:
    logits = torch.randn(2, 3, 50, dtype=torch.float64).to(dtype)
    top_k = torch.tensor([[1, 2, 3], [4, 5, 0]], dtype=torch.int32)
    out = sample_filter(logits, top_k=top_k, temperature=0.5)
    assert out.dtype is dtype
    assert out.shape == logits.shape
    flat = sample_filter(logits.view(6, 50), top_k=top_k.view(6), temperature=0.5)
    assert torch.equal(out.view(6, 50), flat)
    if dtype.itemsize > 2:  # without ties
        assert out.isfinite().sum(-1).tolist() == [[1, 2, 3], [4, 5, 50]]
    one = sample_filter(logits[0, 0], top_k=1)
    assert one.isfinite().sum() >= 1


def test_as_a_sort_would() -> None:
    """The usual implementation, with softmax, sort and cumsum, on logits without ties."""
    logits = torch.randn(16, 2000) * 2
    scaled = logits.double() / torch.tensor(0.7).double()
    kth = scaled.topk(100, dim=-1).values[:, -1:]
    masked = scaled.masked_fill(scaled < kth, float("-inf"))
    values, order = masked.sort(dim=-1, descending=True)
    p = values.softmax(-1)
    dropped = (p.cumsum(-1) - p >= 0.8).scatter(-1, order, p.cumsum(-1) - p >= 0.8)
    masked = masked.masked_fill(dropped, float("-inf"))
    p = masked.softmax(-1)
    masked = masked.masked_fill(p < 0.01 * p.amax(-1, keepdim=True), float("-inf"))
    out = sample_filter(logits, temperature=0.7, top_k=100, top_p=0.8, min_p=0.01)
    assert torch.equal(out.isneginf(), masked.isneginf())
    torch.testing.assert_close(out, masked.float())


@pytest.mark.parametrize("shape", [(0, 8), (4, 0), (0,)])
def test_empty(shape: tuple[int, ...]) -> None:
    assert sample_filter(torch.empty(shape), top_k=3, top_p=0.5).shape == shape


@refused
def test_refusals_say_the_rule() -> Calls:
    x = torch.randn(4, 6)
    return {
        "temperature is a number from 0 to": lambda: sample_filter(x, temperature=-1.0),
        "number from 1e-30 to 3.4e.38.*it is 1e-45: pass 0": lambda: sample_filter(x, temperature=1e-45),
        "top_p is a number from 0 to 1, or a tensor": lambda: sample_filter(x, top_p=1.5),
        "min_p is a number from 0 to 1.*nan": lambda: sample_filter(x, min_p=float("nan")),
        "top_p sums up to 4194304 columns": lambda: sample_filter(torch.zeros(1, (1 << 22) + 1), top_p=0.5),
        "top_k is a whole number.*-3": lambda: sample_filter(x, top_k=-3),
        "top_k is a whole number.*2.9": lambda: sample_filter(x, top_k=2.9),  # type: ignore[arg-type]
        "got torch.int64": lambda: sample_filter(x.long()),
        "takes logits .*got logits ..": lambda: sample_filter(x[0, 0]),
        "takes top_ks in int32; got torch.int64": lambda: sample_filter(x, top_k=torch.ones(4).long()),
        "got logits .4, 6., top_ps .3,": lambda: sample_filter(x, top_p=torch.ones(3)),
    }


def test_the_least_temperature_leaves_finite_numbers() -> None:
    out = sample_filter(torch.tensor([[3e8, -3e8, 1.0]]), temperature=1e-30)
    assert out.isfinite().all()
    assert out.softmax(-1).tolist() == [[1.0, 0.0, 0.0]]


def test_gradients_are_refused() -> None:
    out = sample_filter(torch.randn(3, 5, requires_grad=True), top_k=2)
    with pytest.raises(UnsupportedProblem, match="no gradient"):
        out[0].max().backward()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_traced_numbers() -> None:
    logits = torch.randn(4, 60)
    changing = torch.compile(sample_filter, fullgraph=True, backend="eager")
    for p in (0.9, 0.8, 1.0):  # the second value makes it a traced number
        torch.testing.assert_close(changing(logits, top_p=p), sample_filter(logits, top_p=p))
