"""Extents of zero, one at a time, in problems and in calls: each is a problem with an answer, or refused as none."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
from torch import Tensor

from cutekernels import gpu
from cutekernels.errors import UnsupportedProblem
from cutekernels.op import Op
from cutekernels.ops import registry
from tests.public_calls import calls

H200 = gpu.lookup("h200")
LEAST = {"decode_attention": {"heads_kv", "seq_q"}, "cache_attention": {"heads_kv"}, "grouped_gemm": {"experts"}}


@pytest.mark.parametrize("op", registry.OPS, ids=lambda op: op.name)
def test_a_problem_has_a_default_or_is_refused(op: Op[Any, Any]) -> None:
    refused = set()
    unlike = [*{p.static(): p for p in map(op.Problem.parse, op.suite)}.values()]
    for problem in unlike[::2]:
        for name in problem.extent_names():
            try:
                empty = problem.replace(**{name: 0})
                empty.bucket()
            except UnsupportedProblem:
                refused.add(name)
                continue
            config = op.default(empty, H200)
            assert op.why_not(empty, config, H200) is None, name
            assert op.estimate_us(empty, config, H200) >= 0, name
            assert op.work(empty).floor_us(H200) >= 0, name
    assert LEAST.get(op.name, set()) <= refused


def emptied(given: dict[str, Any], size: int) -> dict[str, Any]:
    """The arguments without any of ``size``, in every tensor that has it."""

    def without(t: Tensor) -> Tensor:
        return t.new_empty([0 if n == size else n for n in t.shape])

    return {name: without(value) if isinstance(value, Tensor) else value for name, value in given.items()}


@pytest.mark.parametrize("name", calls())
def test_a_call_answers_or_is_refused(name: str) -> None:
    good = calls()[name][1]
    sizes = {n for value in good.values() if isinstance(value, Tensor) for n in value.shape}
    for size in sizes:
        function, given = calls()[name]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                function(**emptied(given, size))
            except UnsupportedProblem:
                continue


@pytest.mark.parametrize("name", ["attention", "decode_attention"])
def test_no_heads_of_keys_are_refused(name: str) -> None:
    function, given = calls()[name]
    keys = [key for key in given if key.startswith(("k", "v")) and isinstance(given[key], Tensor)]
    given |= {key: given[key][:, :, :0] for key in keys}
    assert len(keys) == 2
    with pytest.raises(UnsupportedProblem, match="heads"):
        function(**given)
