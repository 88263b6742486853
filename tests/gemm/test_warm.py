"""The warm path of ``gemm`` around a stubbed launch: what hits it, what leaves it, what it refuses, what it costs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils._python_dispatch import TorchDispatchMode

import cutekernels as ck
from cutekernels.errors import UnsupportedProblem
from cutekernels.ops.gemm import api as matmul
from cutekernels.ops.shared import call_cache
from tests.host_cost import host_cost

BF16 = torch.bfloat16


def randn(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.randn(*shape).to(dtype)


class Recording(TorchDispatchMode):
    """Notes the ops that reach dispatch."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


class Keys(dict[Any, Any]):
    """A warm table that is always cold and remembers what it was asked."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[Any] = []

    def __missing__(self, key: Any) -> Any:
        self.asked.append(key)
        raise KeyError(key)


@pytest.fixture
def warmed(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Puts an entry whose launch is ``launch`` where ``gemm(a, b, **options)`` looks for its own."""
    monkeypatch.setattr(matmul, "_one_gpu", True)

    def put(launch: Callable[..., None], a: Tensor, b: Tensor, **options: Any) -> None:
        table = Keys()
        monkeypatch.setattr(call_cache, "calls", table)
        out = ck.gemm(a, b, **options)
        (key,) = table.asked
        spans = tuple(t.numel() * t.element_size() for t in (a, b, out))
        call_cache.forget()
        address = a.data_ptr() | b.data_ptr() | (out.data_ptr() if "out" in options else 0)
        said = options.get("activation"), options.get("accumulate", "fp32")
        call = call_cache.Call(launch, *spans, tuple(out.shape), address & 15, *said)
        monkeypatch.setattr(call_cache, "calls", {key: call})

    return put


def test_a_warm_call_is_one_lookup_and_the_launch(warmed: Callable[..., None]) -> None:
    a, b, out = randn(4, 8), randn(8, 6), torch.zeros(4, 6, dtype=BF16)
    calls: list[tuple[Any, ...]] = []
    warmed(lambda *args: calls.append(args), a, b, out=out)
    out.zero_()
    version = out._version
    for left, right in ((a, b), (a.clone(), b.clone()), (a, Parameter(b, requires_grad=False))):
        assert ck.gemm(left, right, alpha=0.5, out=out) is out
        launched = calls.pop()
        assert launched[0] is out
        assert launched[1] is left
        assert launched[2] is right
        assert launched[3:] == (None, None, 0.5, 0.0)
    assert not out.any(), "nothing but the stub ran"
    assert out._version == version + 3
    warmed(lambda *args: calls.append(args), a, b)
    fresh = ck.gemm(a, b)
    assert (fresh.shape, fresh.dtype) == ((4, 6), BF16)
    assert calls.pop()[0] is fresh


@pytest.fixture
def met_again(warmed: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Any]]:
    """Makes the call twice, so that its b is expected, and takes the other table away. Launches are listed."""

    def put(a: Tensor, b: Tensor, **options: Any) -> list[Any]:
        launches: list[Any] = []
        warmed(lambda *args: launches.append(args), a, b, **options)
        ck.gemm(a, b, **options)
        assert len(call_cache.recent) == 1
        monkeypatch.setattr(call_cache, "calls", {})
        ck.gemm(a, b, **options)
        assert len(launches) == 2
        launches.clear()
        return launches

    return put


@pytest.mark.parametrize("into", [False, True])
def test_a_weight_met_again_needs_no_key(met_again: Callable[..., list[Any]], into: bool) -> None:
    a, b, out = randn(16, 8), randn(8, 8), torch.zeros(16, 8, dtype=BF16)
    options: dict[str, Any] = {"out": out} if into else {}
    launches = met_again(a, b, **options)
    version = out._version
    other = a.clone()
    result = ck.gemm(other, b, alpha=0.25, **options)
    ((target, left, right, *rest),) = launches
    assert target is result
    assert left is other
    assert right is b
    assert rest == [None, None, 0.25, 0.0]
    assert out._version == version + into
    launches.clear()
    # Everything else about a call is noticed.
    aligned = torch.zeros(16 * 8 + 1, dtype=BF16)[1:].view(16, 8)
    for left, changes in (
        (a[:8], {}),
        (aligned, {}),
        (a.half(), {}),
        (a.t().contiguous().t(), {}),
        (a.clone().requires_grad_(), {}),
        (a, {"activation": "relu"}),
        (a, {"config": "tile_m=64"}),
        (a, {"bias": b[0].clone()}),
        (a, {"c": out.clone(), "beta": 1.0}),
    ):
        given = ({"out": torch.zeros(len(left), 8, dtype=BF16)} if into else {}) | changes
        try:
            ck.gemm(left, b, **given)
        except UnsupportedProblem:
            assert left.dtype != BF16 or left.requires_grad
    with Recording() as mode:
        ck.gemm(a, b, **options)
    assert mode.seen
    with pytest.raises((TypeError, RuntimeError, AttributeError)):
        ck.gemm("a", b, **options)  # type: ignore[arg-type]
    assert not launches
    ck.gemm(a, b, **options)
    assert len(launches) == 1


def test_overlap_is_refused_when_a_weight_is_met_again(met_again: Callable[..., list[Any]]) -> None:
    memory = torch.zeros(256, dtype=BF16)
    a, b, out = memory[:64].view(8, 8), memory[64:128].view(8, 8), memory[128:192].view(8, 8)
    launches = met_again(a, b, out=out)
    for bad in (a, b, memory[56:120].view(8, 8), memory[120:184].view(8, 8)):
        with pytest.raises(UnsupportedProblem, match="overlaps"):
            ck.gemm(a, b, out=bad)
    assert not launches


def test_an_address_met_in_ever_other_shapes_is_let_be(monkeypatch: pytest.MonkeyPatch) -> None:
    call = call_cache.Call(lambda *args: None, 0, 0, 0, (), 0, None, "fp32")
    call_cache.forget()
    for rows in range(1, 3 * call_cache.MOST_CHANGES):
        call_cache.expect(7, call, randn(rows, 8))
    assert call_cache.recent[7].guard(randn(call_cache.MOST_CHANGES + 1, 8))
    call_cache.forget()
    monkeypatch.setattr(call_cache, "TensorGuards", None)
    call_cache.expect(7, call, randn(4, 8))
    assert not call_cache.recent


@pytest.mark.parametrize(
    "other",
    [
        lambda a, b: (a[:3], b, {}),
        lambda a, b: (a.half(), b.half(), {}),
        lambda a, b: (a.t().contiguous().t(), b, {}),
        lambda a, b: (a, b.t().contiguous().t(), {}),
        lambda a, b: (a, b, {"activation": "relu"}),
        lambda a, b: (a, b, {"bias": torch.ones(6, dtype=BF16)}),
        lambda a, b: (a, b, {"c": torch.ones(4, 6, dtype=BF16), "beta": 1.0}),
        lambda a, b: (a, b, {"config": "tile_m=64"}),
        lambda a, b: (torch.zeros(33, dtype=BF16)[1:].view(4, 8), b, {}),  # 2-byte aligned
    ],
)
def test_another_problem_is_another_entry(warmed: Callable[..., None], other: Callable[..., Any]) -> None:
    a, b = randn(4, 8), randn(8, 6)
    calls: list[Any] = []
    warmed(lambda *args: calls.append(args), a, b)
    left, right, options = other(a, b)
    ck.gemm(left, right, **options)
    assert not calls
    warmed(lambda *args: calls.append(args), a, b, out=torch.empty(4, 6, dtype=BF16))
    ck.gemm(left, right, out=torch.empty(len(left), 6, dtype=left.dtype), **options)
    assert not calls


def test_c_is_read_warm_beside_out_or_in_its_place_and_nowhere_else(warmed: Callable[..., None]) -> None:
    a, b, memory = randn(4, 8), randn(8, 6), randn(9, 6)
    out, c = memory[:4], memory[4:8]
    calls: list[tuple[Any, ...]] = []
    warmed(lambda *args: calls.append(args), a, b, c=c, beta=2.0, out=out)
    for third in (c, out, memory[:4], c.clone()):
        assert ck.gemm(a, b, third, beta=2.0, out=out) is out
        assert calls.pop()[3] is third
    with pytest.raises(UnsupportedProblem, match="out overlaps c"):
        ck.gemm(a, b, memory[1:5], beta=2.0, out=out)
    assert not calls


def test_gradients_and_modes_leave_the_warm_path(warmed: Callable[..., None]) -> None:
    a, b = randn(4, 8), randn(8, 6)
    calls: list[Any] = []
    warmed(lambda *args: calls.append(args), a, b)
    leaf = a.clone().requires_grad_()
    assert ck.gemm(leaf, b).requires_grad
    assert ck.gemm(a, Parameter(b)).requires_grad
    with Recording() as mode:
        ck.gemm(a, b)
    assert mode.seen == ["cutekernels.gemm.default"]
    assert not calls
    with torch.no_grad():
        ck.gemm(leaf, b)
    assert len(calls) == 1


def test_overlap_is_refused_when_warm_too(warmed: Callable[..., None]) -> None:
    memory = torch.zeros(256, dtype=BF16)
    a, b, out = memory[:64].view(8, 8), memory[64:128].view(8, 8), memory[128:192].view(8, 8)
    calls: list[Any] = []
    warmed(lambda *args: calls.append(args), a, b, out=out)
    ck.gemm(a, b, out=out)
    assert len(calls) == 1
    for bad, said in (
        (a, "overlaps a"),
        (b, "overlaps b"),
        (memory[56:120].view(8, 8), "overlaps"),
        (memory[120:184].view(8, 8), "overlaps b"),
    ):
        with pytest.raises(UnsupportedProblem, match=said):
            ck.gemm(a, b, out=bad)
    bias = torch.zeros(8, dtype=BF16)
    warmed(lambda *args: calls.append(args), a, b, bias=bias, out=out)
    ck.gemm(a, b, bias=bias, out=out)
    assert len(calls) == 2
    with pytest.raises(UnsupportedProblem, match="overlaps bias"):
        ck.gemm(a, b, bias=out[3], out=out)
    assert len(calls) == 2


@pytest.mark.parametrize("error", [ValueError, TypeError, RuntimeError])
def test_what_a_launch_refuses_the_general_path_explains(warmed: Callable[..., None], error: type[Exception]) -> None:
    a, b = randn(4, 8), randn(8, 6)

    def launch(*args: Any) -> None:
        raise error("argument #2: mismatched dtype")

    for options in ({}, {"out": torch.empty(4, 6, dtype=BF16)}):
        warmed(launch, a, b, **options)
        # Nothing was wrong with this one: it is computed.
        torch.testing.assert_close(ck.gemm(a, b, **options), (a.double() @ b.double()).to(BF16))
        with pytest.raises(UnsupportedProblem, match="b must have a's dtype"):
            ck.gemm(a, b.half(), **options)


def test_reload_forgets_warm_entries() -> None:
    call = call_cache.Call(lambda: None, 0, 0, 0, (), 0, None, "fp32")
    call_cache.remember(("a key",), call)
    call_cache.expect(1, call, randn(4, 8))
    assert call_cache.calls
    assert call_cache.recent
    ck.reload()
    assert not call_cache.calls
    assert not call_cache.recent


def test_a_warm_call_costs_the_host_less_than_3_8_keys(warmed: Callable[..., None]) -> None:
    """The dispatcher around a launch that does nothing. 2.4 on 2026-11-22, on a box where a key takes 1.1 us."""
    a, b = randn(64, 64), randn(64, 64)
    out = torch.empty(64, 64, dtype=BF16)
    launched = 0

    def launch(*args: Any) -> None:
        nonlocal launched
        launched += 1

    warmed(launch, a, b, out=out)
    gemm = ck.gemm
    found = host_cost(partial(gemm, a, b, out=out), calls=100, chunks=200)
    assert launched == 7 * 20_000
    assert found < 3.8
