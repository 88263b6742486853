"""Cached calls of ``gemm`` around a stubbed launch: what replays, what does not, what is refused, what it costs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

import cutekernels as ck
from cutekernels.errors import UnsupportedProblem
from cutekernels.ops import linear as layers
from cutekernels.ops.products import api as matmul
from cutekernels.ops.products.dense import GEMM, AddressedLaunch
from cutekernels.ops.shared import paths
from cutekernels.ops.shared.paths import Call
from cutekernels.ops.shared.strides import pairs
from tests.gpu_path import launching
from tests.host_cost import direct_anywhere, host_cost
from tests.traced import Recording

BF16 = torch.bfloat16


def randn(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.randn(*shape).to(dtype)


@pytest.fixture
def cached(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Adds the call ``gemm(a, b, **options)``, whose launch is ``launch``, for tensors on the CPU."""
    monkeypatch.setattr(paths, "_current_device", lambda: -1)
    monkeypatch.setattr(matmul, "direct", direct_anywhere())

    def put(launch: Callable[..., None], a: Tensor, b: Tensor, **options: Any) -> None:
        paths.forget()
        c, bias, out = (options.get(name) for name in ("c", "bias", "out"))
        plain = c is None and bias is None
        inputs, calls = ((a, b), matmul.CALLS) if plain else ((a, b, c, bias), matmul.FUSED_CALLS)
        results = None if out is None else (out,)
        apart = () if out is None else pairs(1, (out, *inputs), in_place=(3,))
        call = Call.of(lambda *args: None, inputs, (a @ b,) if out is None else (), apart)
        said = options.get("activation") or "none", options.get("accumulate", "fp32")
        calls.add(call, (results, inputs, said, (1.0, 0.0), None))
        calls.recent.clear()
        ((key, call),) = calls.calls.items()
        calls.calls[key] = replace(call, launch=launch)

    yield put
    paths.forget()


@pytest.fixture
def guarded(cached: Callable[..., None]) -> Callable[..., list[Any]]:
    """Makes the call twice, so that b's address is known, and takes the keys away. Launches are listed."""

    def put(a: Tensor, b: Tensor, **options: Any) -> list[Any]:
        launches: list[Any] = []
        cached(lambda *args: launches.append(args), a, b, **options)
        ck.gemm(a, b, **options)
        assert len(matmul.CALLS.recent) == 1
        matmul.CALLS.calls.clear()
        ck.gemm(a, b, **options)
        assert len(launches) == 2
        launches.clear()
        return launches

    return put


def test_a_cached_call_is_one_lookup_and_the_launch(cached: Callable[..., None]) -> None:
    a, b, out = randn(4, 8), randn(8, 6), torch.zeros(4, 6, dtype=BF16)
    calls: list[tuple[Any, ...]] = []
    cached(lambda *args: calls.append(args), a, b, out=out)
    version = out._version
    for left, right in ((a, b), (a.clone(), b.clone()), (a, Parameter(b, requires_grad=False))):
        assert ck.gemm(left, right, alpha=0.5, out=out) is out
        launched = calls.pop()
        assert launched[0] is out
        assert launched[1] is left
        assert launched[2] is right
        assert launched[3:] == (0.5, 0.0)
    assert not out.any(), "nothing but the stub ran"
    assert out._version == version + 3
    cached(lambda *args: calls.append(args), a, b)
    fresh = ck.gemm(a, b)
    assert (fresh.shape, fresh.dtype) == ((4, 6), BF16)
    assert calls.pop()[0] is fresh


def test_torchs_op_checks_a_call_once(cached: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled graphs and autograd call the op: a repeated call is looked up before its arguments are checked."""
    a, b = randn(4, 8), randn(8, 6)
    launches: list[tuple[Any, ...]] = []
    cached(lambda *args: launches.append(args), a, b)
    with pytest.raises(UnsupportedProblem, match="needs c"):  # no key holds beta
        matmul._gemm_launch(a, b, None, None, 1.0, 0.5)
    assert not launches

    def unwanted(*args: Any) -> Any:
        raise AssertionError("checked again")

    monkeypatch.setattr(matmul, "_check", unwanted)
    for left in (a, a.clone(), a.clone()):
        made = matmul._gemm_launch(left, b, randn(4, 6), None, 0.5)  # beta is 0: C is not read
        assert launches.pop() == (made, left, b, 0.5, 0.0)
    with pytest.raises(AssertionError, match="checked again"):
        matmul._gemm_launch(randn(5, 8), b, None, None)


@pytest.mark.parametrize("into", [False, True])
def test_a_known_weight_needs_no_key(guarded: Callable[..., list[Any]], into: bool) -> None:
    a, b, out = randn(16, 8), randn(8, 8), torch.zeros(16, 8, dtype=BF16)
    options: dict[str, Any] = {"out": out} if into else {}
    launches = guarded(a, b, **options)
    version = out._version
    other = a.clone()
    result = ck.gemm(other, b, alpha=0.25, **options)
    ((target, left, right, *rest),) = launches
    assert target is result
    assert left is other
    assert right is b
    assert rest == [0.25, 0.0]
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
    with pytest.raises(UnsupportedProblem, match="torch.Tensor"):
        ck.gemm("a", b, **options)  # type: ignore[arg-type]
    assert not launches
    ck.gemm(a, b, **options)
    assert len(launches) == 1


def test_overlap_is_refused_when_a_weight_is_guarded(guarded: Callable[..., list[Any]]) -> None:
    memory = torch.zeros(256, dtype=BF16)
    a, b, out = memory[:64].view(8, 8), memory[64:128].view(8, 8), memory[128:192].view(8, 8)
    launches = guarded(a, b, out=out)
    for bad in (a, b, memory[56:120].view(8, 8), memory[120:184].view(8, 8)):
        with pytest.raises(UnsupportedProblem, match="overlaps"):
            ck.gemm(a, b, out=bad)
    assert not launches


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
def test_another_problem_is_another_entry(cached: Callable[..., None], other: Callable[..., Any]) -> None:
    a, b = randn(4, 8), randn(8, 6)
    calls: list[Any] = []
    cached(lambda *args: calls.append(args), a, b)
    left, right, options = other(a, b)
    ck.gemm(left, right, **options)
    assert not calls
    cached(lambda *args: calls.append(args), a, b, out=torch.empty(4, 6, dtype=BF16))
    ck.gemm(left, right, out=torch.empty(len(left), 6, dtype=left.dtype), **options)
    assert not calls


def test_c_of_a_cached_call_lies_beside_out_or_in_its_place_and_nowhere_else(cached: Callable[..., None]) -> None:
    a, b, memory = randn(4, 8), randn(8, 6), randn(9, 6)
    out, c = memory[:4], memory[4:8]
    calls: list[tuple[Any, ...]] = []
    cached(lambda *args: calls.append(args), a, b, c=c, beta=2.0, out=out)
    for third in (c, out, memory[:4], c.clone()):
        assert ck.gemm(a, b, third, beta=2.0, out=out) is out
        assert calls.pop()[3] is third
    with pytest.raises(UnsupportedProblem, match="out overlaps c"):
        ck.gemm(a, b, memory[1:5], beta=2.0, out=out)
    assert not calls


def test_gradients_and_modes_go_through_torch(cached: Callable[..., None]) -> None:
    a, b = randn(4, 8), randn(8, 6)
    calls: list[Any] = []
    cached(lambda *args: calls.append(args), a, b)
    leaf = a.clone().requires_grad_()
    assert ck.gemm(leaf, b).requires_grad
    assert ck.gemm(a, Parameter(b)).requires_grad
    with Recording() as mode:
        ck.gemm(a, b)
    assert mode.seen == ["cutekernels._gemm.default"]
    assert not calls
    with torch.no_grad():
        ck.gemm(leaf, b)
    assert len(calls) == 1


def test_overlap_is_refused_of_cached_calls_too(cached: Callable[..., None]) -> None:
    memory = torch.zeros(256, dtype=BF16)
    a, b, out = memory[:64].view(8, 8), memory[64:128].view(8, 8), memory[128:192].view(8, 8)
    calls: list[Any] = []
    cached(lambda *args: calls.append(args), a, b, out=out)
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
    cached(lambda *args: calls.append(args), a, b, bias=bias, out=out)
    ck.gemm(a, b, bias=bias, out=out)
    assert len(calls) == 2
    with pytest.raises(UnsupportedProblem, match="overlaps bias"):
        ck.gemm(a, b, bias=out[3], out=out)
    assert len(calls) == 2


@pytest.mark.parametrize("error", [ValueError, TypeError, RuntimeError])
def test_what_a_launch_refuses_the_general_path_explains(cached: Callable[..., None], error: type[Exception]) -> None:
    a, b = randn(4, 8), randn(8, 6)

    def launch(*args: Any) -> None:
        raise error("argument #2: mismatched dtype")

    for options in ({}, {"out": torch.empty(4, 6, dtype=BF16)}):
        cached(launch, a, b, **options)
        # Nothing was wrong with this one: it is computed.
        torch.testing.assert_close(ck.gemm(a, b, **options), (a.double() @ b.double()).to(BF16))
        with pytest.raises(UnsupportedProblem, match="takes b in bfloat16; got torch.float16"):
            ck.gemm(a, b.half(), **options)


def test_reload_forgets_cached_calls(cached: Callable[..., None]) -> None:
    a, b = randn(4, 8), randn(8, 6)
    cached(lambda *args: None, a, b)
    ck.gemm(a, b)
    assert matmul.CALLS.calls
    assert matmul.CALLS.recent
    ck.reload()
    assert not matmul.CALLS.calls
    assert not matmul.CALLS.recent


def test_a_warm_call_costs_the_host_less_than_3_8_keys(cached: Callable[..., None]) -> None:
    """The dispatcher around a launch that does nothing. 2.4 on 2026-11-22, on a box where a key takes 1.1 us."""
    a, b = randn(64, 64), randn(64, 64)
    out = torch.empty(64, 64, dtype=BF16)
    launched = 0

    def launch(*args: Any) -> None:
        nonlocal launched
        launched += 1

    cached(launch, a, b, out=out)
    gemm = ck.gemm
    found = host_cost(partial(gemm, a, b, out=out), calls=100, chunks=200)
    assert launched == 7 * 20_000
    assert found < 3.8


@pytest.mark.parametrize("into", [False, True])
@pytest.mark.parametrize("form", ["plain", "fused", "batched", "one batch", "strided", "narrow", "rows apart", "empty"])
def test_a_first_call_is_posed_planned_and_launched(form: str, into: bool) -> None:
    """Its launch stands in: it computes the product of what it is handed."""
    a, b, options = randn(6, 8), randn(8, 5), {}
    out = torch.empty(6, 5, dtype=BF16)
    if form == "fused":
        options = {"c": randn(6, 5), "beta": 0.5, "bias": randn(5), "activation": "silu"}
    elif form in ("batched", "one batch"):
        a, out = randn(3, 6, 8), torch.empty(3, 6, 5, dtype=BF16)
        b = randn(3, 8, 5) if form == "batched" else b
    elif form == "strided":
        a, b = randn(6, 16)[:, ::2], randn(16, 10)[::2, ::2]
    elif form == "narrow":
        a, b, out = randn(512, 1025)[:, :1023], randn(1023, 600), torch.empty(512, 600, dtype=BF16)
    elif form == "rows apart":
        out = torch.empty(6, 10, dtype=BF16)[:, ::2]
    elif form == "empty":
        a, out = a[:0], out[:0]
    launched: list[str] = []

    def launch_of(op: Any, problem: Any) -> Callable[..., None]:
        def launch(out: Tensor, a: Tensor, b: Tensor, c: Any, bias: Any, alpha: float, beta: float) -> None:
            assert GEMM.problem(out, a, b, c, bias, activation=problem.activation, accumulate="fp32") == problem
            launched.append(str(problem))
            out.copy_(GEMM.evaluate(a, b, c, bias, alpha, beta, activation=problem.activation)[0])

        return launch

    expected = ck.gemm(a, b, **options)
    version = out._version
    known = form in ("plain", "fused", "batched") or (form == "rows apart" and not into)
    arguments = (a, b, options.get("c"), options.get("bias"))
    scalars = 1.0, options.get("beta", 0.0), options.get("activation", "none")
    with launching(launch_of):
        for _ in range(3):
            if into:
                matmul.launch_into(*arguments, out, *scalars)
            made = out if into else matmul._gemm_launch(*arguments, *scalars)
            torch.testing.assert_close(made, expected)
        assert bool(matmul.CALLS.calls or matmul.FUSED_CALLS.calls) is known
    assert len(launched) == (0 if form == "empty" else 3)
    assert out._version > version or not into or form == "empty"


@pytest.mark.parametrize("addressed", [False, True])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("shape", [(6, 16), (2, 3, 16), (16,)])
def test_linear_repeats_its_product_s_launch(
    shape: tuple[int, ...], biased: bool, addressed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight, bias = Parameter(randn(8, 16)), Parameter(randn(8)) if biased else None
    monkeypatch.setattr(layers.LINEAR_PATH, "_cpu", layers._linear_launch)
    monkeypatch.setattr(layers.LINEAR_PATH, "_differentiated_on_cpu", layers.LINEAR_PATH.differentiated)
    monkeypatch.setattr(layers, "first_call", lambda *args, first=layers.first_call: checked.append(1) or first(*args))
    checked: list[int] = []
    told: list[tuple[Any, ...]] = []

    def launch_of(op: Any, problem: Any) -> Any:
        if addressed:
            return AddressedLaunch(lambda *args: told.append(args), problem.along)

        def launch(out: Tensor, a: Tensor, b: Tensor, c: None, bias: Any, alpha: float, beta: float) -> None:
            out.copy_(GEMM.evaluate(a, b, c, bias, alpha, beta, activation=problem.activation)[0])

        return launch

    with launching(launch_of):
        for gradients, activation in [(g, act) for act in (None, "relu") for g in (False, True, True, False, False)]:
            with torch.set_grad_enabled(gradients):
                x = randn(*shape).requires_grad_()
                y = ck.linear(x, weight, bias, activation=activation)
            assert y.shape == (*shape[:-1], 8)
            assert (y.grad_fn is not None) is gradients
            if addressed:
                addresses = [None if t is None else t.data_ptr() for t in (y, x, weight, bias)]
                assert told.pop()[:7] == (*addresses, x.numel() // 16, 8, 16)
                assert not told
                continue
            expected = torch.nn.functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
            expected = expected if activation is None else expected.relu()
            torch.testing.assert_close(y, expected.to(BF16))
            if gradients:
                leaves = [x, weight] if bias is None else [x, weight, bias]
                found = torch.autograd.grad(y.sum(), leaves)
                wanted = torch.autograd.grad(expected.sum(), leaves)
                torch.testing.assert_close(found, wanted, rtol=2e-2, atol=1e-2)
        assert len(checked) == 2, "once for each activation"
