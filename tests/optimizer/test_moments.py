"""``FusedAdamW(moments_dtype=...)``: numbers, memory, state dicts."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from cutekernels.errors import UnsupportedProblem
from cutekernels.optim import FusedAdamW

OPTIONS: dict[str, Any] = {"lr": 0.01, "weight_decay": 0.1}
SHAPES = [(40, 3), (7,), (0, 4)]


def model(device: str, dtype: torch.dtype = torch.bfloat16) -> list[torch.nn.Parameter]:
    draw = torch.Generator().manual_seed(4)
    return [torch.nn.Parameter(torch.randn(s, generator=draw).to(device, dtype)) for s in SHAPES]


def train(optimizer: torch.optim.Optimizer, params: list[torch.nn.Parameter], seeds: range) -> None:
    for seed in seeds:
        draw = torch.Generator().manual_seed(seed)
        for p in params:
            p.grad = torch.randn(p.shape, generator=draw).to(p.device, p.dtype)
        optimizer.step()


def name_of(moments: torch.dtype | str) -> str:
    """As groups hold it."""
    return {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", "param": "param"}[moments]


def kinds(optimizer: torch.optim.Optimizer) -> set[torch.dtype]:
    return {s[name].dtype for s in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("moments", ["param", torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_moments_are_rounded_once_a_step(dtype: torch.dtype, moments: Any, device: str) -> None:
    """Beside a step of torch's in fp64 from the same state, whose moments are rounded afterwards."""
    params = model(device, dtype)
    optimizer = FusedAdamW(params, moments_dtype=moments, master_weights=True, **OPTIONS)
    kind = dtype if moments == "param" else moments
    train(optimizer, params, range(3))
    assert kinds(optimizer) == {kind}
    twins = [torch.nn.Parameter(optimizer.state[p].get("master", p).detach().double()) for p in params]
    theirs = torch.optim.AdamW(twins, **OPTIONS)
    theirs.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    draw = torch.Generator().manual_seed(9)
    for p, q in zip(params, twins, strict=True):
        p.grad = torch.randn(p.shape, generator=draw).to(device, dtype)
        q.grad = p.grad.double()
    optimizer.step()
    theirs.step()
    rtol = max(torch.finfo(kind).eps, 1e-5)
    for p, q in zip(params, twins, strict=True):
        for name in ("exp_avg", "exp_avg_sq"):
            exact = theirs.state[q][name]
            torch.testing.assert_close(optimizer.state[p][name].double(), exact, rtol=rtol, atol=1e-6)
        kept = optimizer.state[p].get("master", p).detach().double()
        torch.testing.assert_close(kept, q.detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("moments", ["param", torch.bfloat16], ids=str)
def test_a_state_dict_resumes_bit_for_bit(moments: Any, device: str) -> None:
    whole, params = model(device), model(device)
    straight, before = (FusedAdamW(p, moments_dtype=moments, **OPTIONS) for p in (whole, params))
    train(straight, whole, range(6))
    train(before, params, range(3))
    after = FusedAdamW(params, moments_dtype=moments, **OPTIONS)
    file = io.BytesIO()
    torch.save(before.state_dict(), file)
    after.load_state_dict(torch.load(io.BytesIO(file.getvalue()), weights_only=True))
    train(after, params, range(3, 6))
    assert kinds(after) == {torch.bfloat16}
    assert all(torch.equal(p, q) for p, q in zip(params, whole, strict=True))
    assert kinds(copy.deepcopy(after)) == {torch.bfloat16}
    assert copy.deepcopy(after).param_groups[0]["moments_dtype"] == name_of(moments)


@pytest.mark.parametrize("moments", [torch.float32, torch.bfloat16], ids=str)
def test_loading_converts_to_what_this_optimizer_keeps(moments: Any, device: str) -> None:
    params = model(device)
    other = torch.float32 if moments == torch.bfloat16 else torch.bfloat16
    for source in (FusedAdamW(params, moments_dtype=other, **OPTIONS), torch.optim.AdamW(params, **OPTIONS)):
        train(source, params, range(2))
        ours = FusedAdamW(params, moments_dtype=moments, **OPTIONS)
        ours.load_state_dict(source.state_dict())
        assert kinds(ours) == {moments}
        assert ours.param_groups[0].get("moments_dtype", "fp32") == name_of(moments)
        for p in params:
            assert torch.equal(ours.state[p]["exp_avg"], source.state[p]["exp_avg"].to(moments))
        train(ours, params, range(2, 3))
        theirs = torch.optim.AdamW(params, **OPTIONS)
        theirs.load_state_dict(ours.state_dict())  # torch's keep the parameters' type
        assert kinds(theirs) == {torch.bfloat16}
        train(theirs, params, range(3, 4))


def test_groups_have_their_own(device: str) -> None:
    params = model(device)
    optimizer = FusedAdamW([{"params": params[:1], "moments_dtype": "param"}, {"params": params[1:]}])
    train(optimizer, params, range(2))
    assert [optimizer.state[p]["exp_avg"].dtype for p in params[:2]] == [torch.bfloat16, torch.float32]
    optimizer.param_groups[0]["moments_dtype"] = torch.float32
    with pytest.raises(UnsupportedProblem, match=r"moments_dtype makes exp_avg torch.float32, and the state has"):
        train(optimizer, params, range(2, 3))


def test_fp64_parameters_have_moments_of_their_own_or_fewer_bits() -> None:
    for moments, kind in ((torch.float32, torch.float64), ("param", torch.float64), (torch.bfloat16, torch.bfloat16)):
        params = model("cpu", torch.float64)
        optimizer = FusedAdamW(params, moments_dtype=moments, **OPTIONS)  # type: ignore[arg-type]
        train(optimizer, params, range(2))
        assert kinds(optimizer) == {kind}


@pytest.mark.parametrize("moments", [torch.float64, torch.int32, torch.float8_e4m3fn, "fp8", None, 16, []], ids=str)
def test_types_that_no_kernel_takes_are_refused(moments: Any) -> None:
    param = torch.nn.Parameter(torch.ones(3))
    with pytest.raises(UnsupportedProblem, match=r'moments_dtype is torch.float32, .* or "param"; got'):
        FusedAdamW([param], moments_dtype=moments)
