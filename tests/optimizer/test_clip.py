"""``FusedAdamW(max_grad_norm=...)`` beside ``clip_grad_norm_`` and torch's AdamW in fp64."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from cutekernels.errors import UnsupportedProblem
from cutekernels.optim import FusedAdamW

OPTIONS: dict[str, Any] = {"lr": 0.01, "weight_decay": 0.1}
SHAPES = [(7, 5), (3,), (0, 4), (2, 3, 4), (11,)]


def model(device: str, dtype: torch.dtype = torch.float32) -> list[torch.nn.Parameter]:
    draw = torch.Generator().manual_seed(3)
    values = [torch.randn(s, generator=draw).to(device, dtype) for s in (*SHAPES, (6, 9))]
    values[-1] = values[-1][:, ::2]
    return [torch.nn.Parameter(t) for t in values]


def twins(params: list[torch.nn.Parameter]) -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(p.detach().double().clone()) for p in params]


def grads(ours: list[torch.nn.Parameter], theirs: list[torch.nn.Parameter], seed: int, missing: Any = ()) -> None:
    draw = torch.Generator().manual_seed(seed)
    for i, (p, q) in enumerate(zip(ours, theirs, strict=True)):
        g = (10.0**seed * torch.randn(p.shape, generator=draw)).to(p.device, p.dtype)
        p.grad, q.grad = (None, None) if i in missing else (g, g.double())


def groups(params: list[torch.nn.Parameter]) -> list[dict[str, Any]]:
    return [{"params": params[:2], "lr": 0.1, "maximize": True}, {"params": params[2:]}]


@pytest.mark.parametrize("max_norm", [0.0, 1.5, 30, float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_clips_as_torch_does(max_norm: float, dtype: torch.dtype, device: str) -> None:
    ours = model(device, dtype)
    theirs = twins(ours)
    a = FusedAdamW(groups(ours), max_grad_norm=max_norm, master_weights=True, **OPTIONS)
    b = torch.optim.AdamW(groups(theirs), **OPTIONS)
    assert a.grad_norm is None
    for seed, missing in ((0, ()), (1, (1,)), (-1, ()), (0, (0, 2, 3))):
        grads(ours, theirs, seed, missing)
        before = [None if p.grad is None else p.grad.clone() for p in ours]
        a.step()
        norm = torch.nn.utils.clip_grad_norm_(theirs, max_norm)
        b.step()
        assert a.grad_norm is not None
        torch.testing.assert_close(a.grad_norm.double(), norm, rtol=2e-6, atol=0)
        for p, q, g in zip(ours, theirs, before, strict=True):
            kept = a.state[p].get("master", p).detach() if p in a.state else p.detach()
            torch.testing.assert_close(kept.double(), q.detach(), rtol=1e-5, atol=1e-6)
            assert p.grad is g is None or torch.equal(p.grad, g)  # left as they are


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_norms_that_are_not_finite_do_what_torchs_do(poison: float, device: str) -> None:
    ours = model(device)
    theirs = twins(ours)
    a, b = FusedAdamW(ours, max_grad_norm=1.0, **OPTIONS), torch.optim.AdamW(theirs, **OPTIONS)
    grads(ours, theirs, 0)
    for p in (ours[3], theirs[3]):
        assert p.grad is not None
        p.grad[0, 0, 0] = poison
    a.step()
    norm = torch.nn.utils.clip_grad_norm_(theirs, 1.0)
    b.step()
    assert a.grad_norm is not None
    torch.testing.assert_close(a.grad_norm.double(), norm, equal_nan=True)
    for p, q in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p.double(), q, rtol=1e-5, atol=1e-6, equal_nan=True)
        assert bool(p.isnan().all()) or poison == float("inf")


def test_it_may_change_between_steps_and_survives_a_copy(device: str) -> None:
    ours = model(device)
    theirs = twins(ours)
    a, b = FusedAdamW(ours, **OPTIONS), torch.optim.AdamW(theirs, **OPTIONS)
    for seed, max_norm in enumerate((None, 0.5, 2.0, None)):
        a.max_grad_norm = max_norm
        grads(ours, theirs, seed)
        a.step()
        assert (a.grad_norm is None) == (max_norm is None)
        if max_norm is not None:
            torch.nn.utils.clip_grad_norm_(theirs, max_norm)
        b.step()
        for p, q in zip(ours, theirs, strict=True):
            torch.testing.assert_close(p.double(), q, rtol=1e-5, atol=1e-6)
    a.max_grad_norm = 0.25
    assert copy.deepcopy(a).max_grad_norm == 0.25
    a.load_state_dict(FusedAdamW(ours, max_grad_norm=4.0).state_dict())
    assert a.max_grad_norm == 0.25
    a.zero_grad()
    a.step()
    assert a.grad_norm is not None and float(a.grad_norm) == 0


@pytest.mark.parametrize("kernels", [False, True])
@pytest.mark.filterwarnings("ignore")
def test_shards_are_clipped_by_the_norm_over_all_ranks(
    mesh: Any, kernels: bool, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """One rank, where the sum over ranks is made to be that of four with the same gradients."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    if kernels:
        request.getfixturevalue("launches")

    def of_four(squares: torch.Tensor, group: Any) -> None:
        squares *= 4

    monkeypatch.setattr(torch.distributed, "all_reduce", of_four)
    places = [Shard(0), Replicate(), Shard(0), Shard(0), Shard(0)]
    whole = model("cpu")[:5]
    theirs = twins(whole)
    ours: list[Any] = [
        torch.nn.Parameter(distribute_tensor(p.detach().clone(), mesh, [place]))
        for p, place in zip(whole, places, strict=True)
    ]
    a, b = FusedAdamW(ours, max_grad_norm=1.0, **OPTIONS), torch.optim.AdamW(theirs, **OPTIONS)
    for seed, missing in ((0, ()), (1, (0,)), (0, ())):
        grads(whole, theirs, seed, missing)
        for p, w, place in zip(ours, whole, places, strict=True):
            p.grad = None if w.grad is None else distribute_tensor(w.grad, mesh, [place])
        a.step()
        squares = [
            q.grad.square().sum() * (1 if place.is_replicate() else 4)
            for q, place in zip(theirs, places, strict=True)
            if q.grad is not None
        ]
        norm = torch.stack(squares).sum().sqrt()
        torch.nn.utils.clip_grads_with_norm_(theirs, 1.0, norm)
        b.step()
        assert a.grad_norm is not None
        torch.testing.assert_close(a.grad_norm.double(), norm, rtol=2e-6, atol=0)
        for p, q in zip(ours, theirs, strict=True):
            torch.testing.assert_close(p.detach().to_local().double(), q.detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("max_norm", "rule"),
    [(-1.0, "0 or more"), (float("nan"), "0 or more"), (True, "as a number"), ("1", "as a number")],
)
def test_refusals(max_norm: Any, rule: str) -> None:
    param = torch.nn.Parameter(torch.ones(3))
    with pytest.raises(UnsupportedProblem, match=rule):
        FusedAdamW([param], max_grad_norm=max_norm)
    optimizer = FusedAdamW([param])
    optimizer.max_grad_norm = max_norm
    param.grad = torch.ones(3)
    with pytest.raises(UnsupportedProblem, match=rule):
        optimizer.step()
    assert bool((param == 1).all())
    with pytest.raises(UnsupportedProblem, match="one norm over all groups"):
        FusedAdamW([{"params": [param], "max_grad_norm": 1.0}])
