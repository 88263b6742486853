"""The body of ``rms_norm`` in CuTe, on a GPU: numerics against fp64, in place, empty, streams and graphs."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
pytest.importorskip("cutlass")

from cutekernels import gpu, rms_norm
from cutekernels.ops.norms.op import RMS_NORM
from tests.norms import cases
from tests.norms.cute_cases import CONFIG, RAGGED, in_cute
from tests.on_gpu import computed, graph_of, normal

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("one_seed")]


@pytest.mark.parametrize("text", (*RMS_NORM.suite, *RAGGED))
def test_random_configs_are_right(text: str) -> None:
    spec, problem = gpu.detect(), RMS_NORM.Problem.parse(text)
    found = in_cute(problem, spec)
    if not found:
        pytest.skip("refused by a rule")
    args = RMS_NORM.sample(problem, "cuda", 11)
    named = dict(zip([*RMS_NORM.inputs, *RMS_NORM.scalars], args, strict=True))
    named |= {name: getattr(problem, name) for name in RMS_NORM.options}
    for config in random.Random(text).sample(found, min(4, len(found))):
        results = computed(RMS_NORM, problem, config, args)
        exact = cases.truth(RMS_NORM.name, list(results), named)
        ratio = max(cases.error_ratio(r, *e) for r, e in zip(results, exact, strict=True))
        assert ratio <= 1, f"rms_norm [{problem}] [{config}] is off by {ratio:.3g} tolerances"


def normalised(t: Tensor, out: Tensor | None = None) -> Tensor:
    return rms_norm(t, t[0].clone(), out=out, config=CONFIG)


def test_out_upon_the_input() -> None:
    x = normal(333, 4096)
    expected = normalised(x)
    assert normalised(x, x) is x
    assert torch.equal(x, expected)


@pytest.mark.parametrize("shape", [(0, 4096), (3, 0, 4096)])
def test_empty(shape: tuple[int, ...]) -> None:
    x = normal(*shape)
    assert rms_norm(x, config=CONFIG).shape == shape


def test_streams_and_graphs() -> None:
    x, out = normal(64, 4096), normal(64, 4096)
    expected = normalised(x)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):  # the third call is one that repeats, by addresses
            normalised(x, out)
    stream.synchronize()
    assert torch.equal(out, expected)
    graph, _ = graph_of(lambda: normalised(x, out))
    out.zero_()
    x.mul_(2)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, normalised(x))
