"""State dicts of ``FusedAdamW``: types that torch's distributed state dict and JSON take, and state dicts of before."""

from __future__ import annotations

import copy
import json
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

pytest.importorskip("triton")

from cutekernels.errors import UnsupportedProblem
from cutekernels.optim import FusedAdamW

KEPT: list[dict[str, Any]] = [
    {},
    {"moments_dtype": torch.bfloat16, "master_weights": True, "max_grad_norm": 0.5},
    {"moments_dtype": torch.float16},
    {"moments_dtype": "param"},
]
OPTIONS: list[dict[str, Any]] = [
    {},
    {"full_state_dict": True},
    {"cpu_offload": True},
    {"full_state_dict": True, "cpu_offload": True},
    {"flatten_optimizer_state_dict": True},
    {"flatten_optimizer_state_dict": True, "cpu_offload": True},
]


def model() -> torch.nn.Module:
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Linear(8, 6), torch.nn.Linear(6, 4)).bfloat16()


def train(net: torch.nn.Module, optimizer: torch.optim.Optimizer, seeds: range) -> None:
    for seed in seeds:
        optimizer.zero_grad()
        x = torch.randn(5, 8, generator=torch.Generator().manual_seed(seed)).to(next(net.parameters()).dtype)
        net(x).float().square().sum().backward()
        optimizer.step()


def assert_alike(one: torch.nn.Module, other: torch.nn.Module) -> None:
    for p, q in zip(one.parameters(), other.parameters(), strict=True):
        assert torch.equal(p, q)


def foreign(value: Any) -> list[Any]:
    """Values of ``value`` that are of no type that JSON and torch's distributed state dict both take."""
    if isinstance(value, list | tuple):
        return [each for one in value for each in foreign(one)]
    return [] if value is None or type(value) in (bool, int, float, str) else [value]


each_kind = pytest.mark.parametrize("kept", KEPT, ids=lambda kept: str(kept.get("moments_dtype", "defaults")))


def halfway(**kept: Any) -> tuple[Any, Any, FusedAdamW]:
    """A network after four steps, and its twin after two, with the optimizer that took them."""
    whole, net = model(), model()
    straight, before = (FusedAdamW(m.parameters(), lr=0.01, **kept) for m in (whole, net))
    train(whole, straight, range(4))
    train(net, before, range(2))
    return whole, net, before


@pytest.mark.filterwarnings("ignore")  # torch's own, of process groups that are not there
@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: " ".join(options) or "defaults")
@each_kind
def test_torchs_distributed_state_dict_resumes_bit_for_bit(kept: dict[str, Any], options: dict[str, Any]) -> None:
    if torch.distributed.is_initialized():
        pytest.skip("a process group is there")
    whole, net, before = halfway(**kept)
    saved = get_optimizer_state_dict(net, before, options=StateDictOptions(**options))
    again = model()
    again.load_state_dict(net.state_dict())
    after = FusedAdamW(again.parameters(), lr=0.5, **kept)
    set_optimizer_state_dict(again, after, copy.deepcopy(saved), options=StateDictOptions(**options))
    assert after.param_groups[0]["lr"] == 0.01
    train(again, after, range(2, 4))
    assert_alike(again, whole)


@each_kind
def test_groups_pass_through_json(kept: dict[str, Any]) -> None:
    whole, net, before = halfway(**kept)
    saved = before.state_dict()
    assert not foreign([list(group.values()) for group in saved["param_groups"]])
    saved["param_groups"] = json.loads(json.dumps(saved["param_groups"]))
    after = FusedAdamW(net.parameters(), **kept)
    after.load_state_dict(saved)
    assert after.param_groups[0]["betas"] == (0.9, 0.999)
    train(net, after, range(2, 4))
    assert_alike(net, whole)


def test_numpys_rate_of_a_schedule_is_saved_as_a_float() -> None:
    net = model()
    optimizer = FusedAdamW(net.parameters(), lr=0.25)
    train(net, optimizer, range(1))
    optimizer.param_groups[0]["lr"] = np.float32(0.125)  # as a schedule writes it, after the step
    rate = optimizer.state_dict()["param_groups"][0]["lr"]
    assert type(rate) is float and rate == 0.125


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: " ".join(options) or "defaults")
def test_through_torchs_optimizer_and_back(options: dict[str, Any]) -> None:
    net, whole = model().float(), model().float()
    straight = torch.optim.AdamW(whole.parameters(), lr=0.01, fused=True)
    optimizer: torch.optim.Optimizer = FusedAdamW(net.parameters(), lr=0.01)
    for step, kind in enumerate((torch.optim.AdamW, FusedAdamW, torch.optim.AdamW)):
        train(net, optimizer, range(step, step + 1))
        optimizer.zero_grad()  # else torch does not set up the other's state
        saved = get_optimizer_state_dict(net, optimizer, options=StateDictOptions(**options))
        optimizer = kind(net.parameters())
        set_optimizer_state_dict(net, optimizer, saved, options=StateDictOptions(**options))
    train(net, optimizer, range(3, 4))
    train(whole, straight, range(4))
    for p, q in zip(net.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


@each_kind
def test_options_of_its_own_pass_through_torchs_optimizer(kept: dict[str, Any]) -> None:
    net = model()
    ours = FusedAdamW(net.parameters(), lr=0.01, **kept)
    theirs = torch.optim.AdamW(net.parameters())
    back = FusedAdamW(net.parameters(), **kept)
    train(net, ours, range(2))
    theirs.load_state_dict(ours.state_dict())
    train(net, theirs, range(2, 3))
    back.load_state_dict(theirs.state_dict())
    train(net, back, range(3, 4))
    assert back.param_groups[0].keys() == ours.param_groups[0].keys()
    assert all(back.state[p]["step"] == 4 for p in net.parameters())


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_dtype_in_groups_of_before_loads(kind: torch.dtype) -> None:
    """Groups held dtypes until this version."""
    whole, net, before = halfway(moments_dtype=kind)
    saved = before.state_dict()
    saved["param_groups"][0]["moments_dtype"] = kind
    after = FusedAdamW(net.parameters(), moments_dtype=kind)
    after.load_state_dict(saved)
    assert not foreign([list(group.values()) for group in after.state_dict()["param_groups"]])
    train(net, after, range(2, 4))
    assert_alike(net, whole)
    pickled = after.__getstate__()
    pickled["param_groups"][0]["moments_dtype"] = kind
    restored = FusedAdamW.__new__(FusedAdamW)
    restored.__setstate__(pickled)
    assert restored.param_groups[0]["moments_dtype"] in ("fp32", "bf16", "fp16")


def test_decay_is_decoupled_whatever_was_loaded() -> None:
    param = torch.nn.Parameter(torch.ones(3))
    adam, ours = torch.optim.Adam([param], weight_decay=0.1), FusedAdamW([param], weight_decay=0.1)
    param.grad = torch.ones(3)
    adam.step()
    ours.load_state_dict(adam.state_dict())
    assert ours.state_dict()["param_groups"][0]["decoupled_weight_decay"] is True
    with pytest.raises(UnsupportedProblem, match="decoupled_weight_decay as True"):
        FusedAdamW([{"params": [param], "decoupled_weight_decay": False}])
