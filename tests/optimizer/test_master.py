"""``FusedAdamW(master_weights=True)`` where others change the parameter, or its state."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from cutekernels.errors import UnsupportedProblem
from cutekernels.optim import FusedAdamW

OPTIONS: dict[str, Any] = {"lr": 0.01, "weight_decay": 0.0}


def parameter(value: float = 1.0) -> torch.nn.Parameter:
    param = torch.nn.Parameter(torch.full((8,), value).bfloat16())
    param.grad = torch.ones_like(param)
    return param


def steps(optimizer: torch.optim.Optimizer, number: int) -> None:
    for _ in range(number):
        optimizer.step()


def write(param: torch.nn.Parameter) -> None:
    with torch.no_grad():
        param.fill_(5.0)


def load(param: torch.nn.Parameter) -> None:
    holder = torch.nn.Module()
    holder.register_parameter("weight", param)
    holder.load_state_dict({"weight": torch.full((8,), 5.0).bfloat16()})


@pytest.mark.parametrize("change", [write, load])
def test_what_others_write_to_a_parameter_stays(change: Callable[[Any], None]) -> None:
    param = parameter()
    optimizer = FusedAdamW([param], master_weights=True, **OPTIONS)
    steps(optimizer, 3)
    change(param)
    optimizer.step()
    assert param[0].item() == pytest.approx(5 - 0.01, abs=0.02)
    assert optimizer.state[param]["master"][0].item() == pytest.approx(5 - 0.01, abs=0.001)


def test_values_assigned_at_the_old_address_are_taken_over() -> None:
    """An allocator hands out a freed block again: address and version are then those of the last step."""
    memory = bytearray(16)
    param = torch.nn.Parameter(torch.frombuffer(memory, dtype=torch.bfloat16))
    param.grad = torch.ones_like(param)
    optimizer = FusedAdamW([param], master_weights=True, **OPTIONS)
    steps(optimizer, 2)
    param.data = torch.frombuffer(memory, dtype=torch.bfloat16).fill_(5.0)
    optimizer.step()
    assert param[0].item() == pytest.approx(5 - 0.01, abs=0.02)


def test_what_is_written_before_a_step_without_a_gradient_stays() -> None:
    params = [parameter(), parameter()]
    optimizer = FusedAdamW(params, master_weights=True, **OPTIONS)
    optimizer.step()
    write(params[1])
    params[1].grad = None
    optimizer.step()
    params[1].grad = torch.ones_like(params[1])
    optimizer.step()
    assert params[1][0].item() == pytest.approx(5.0, abs=0.05)


def test_frozen_parameters_of_inference_mode_are_passed_over() -> None:
    with torch.inference_mode():
        frozen = torch.nn.Parameter(torch.ones(8).bfloat16(), requires_grad=False)
    param = parameter()
    FusedAdamW([param, frozen], master_weights=True, **OPTIONS).step()
    assert param[0].item() < 1


def test_elements_that_nobody_wrote_to_keep_their_low_bits() -> None:
    ours, expected = parameter(256.0), parameter(256.0)
    optimizer, other = (FusedAdamW([p], master_weights=True, **OPTIONS) for p in (ours, expected))
    for _ in range(50):
        with torch.no_grad():
            ours[0] = 5.0  # at each step, so that each step looks again
        steps(optimizer, 1)
        steps(other, 1)
    master = optimizer.state[ours]["master"]
    assert torch.equal(master[1:], other.state[expected]["master"][1:])
    assert master[1].item() == pytest.approx(256 - 0.5, abs=0.01)  # half an ulp of bf16


def test_a_master_copy_that_torch_has_trained_past_is_not_taken_back() -> None:
    param = parameter()
    ours = FusedAdamW([param], master_weights=True, **OPTIONS)
    ours.step()
    theirs = torch.optim.AdamW([param], **OPTIONS)
    theirs.load_state_dict(ours.state_dict())
    steps(theirs, 50)
    before = param[0].item()
    again = FusedAdamW([param], master_weights=True, **OPTIONS)
    again.load_state_dict(theirs.state_dict())
    again.step()
    assert before < 0.6
    assert param[0].item() == pytest.approx(before - 0.01, abs=0.01)


@pytest.mark.parametrize("first", ["model", "optimizer"])
def test_a_checkpoint_loads_in_either_order(first: str) -> None:
    param = parameter(256.0)
    optimizer = FusedAdamW([param], master_weights=True, **OPTIONS)
    steps(optimizer, 20)
    saved = copy.deepcopy((param.detach(), optimizer.state_dict()))
    steps(optimizer, 20)
    other = parameter(-3.0)
    loaded = FusedAdamW([other], master_weights=True, **OPTIONS)
    for part in ("model", "optimizer") if first == "model" else ("optimizer", "model"):
        if part == "model":
            with torch.no_grad():
                other.copy_(saved[0])
        else:
            loaded.load_state_dict(saved[1])
    steps(loaded, 20)
    assert torch.equal(loaded.state[other]["master"], optimizer.state[param]["master"])


def test_torchs_state_leaves_each_group_its_own() -> None:
    params = [parameter(), parameter()]
    theirs = torch.optim.AdamW([{"params": [p]} for p in params], **OPTIONS)
    theirs.step()
    groups = [{"params": [params[0]], "master_weights": True}, {"params": [params[1]], "master_weights": False}]
    for default in (False, True):
        ours = FusedAdamW(groups, master_weights=default, **OPTIONS)
        ours.load_state_dict(theirs.state_dict())
        assert [group["master_weights"] for group in ours.param_groups] == [True, False]


def test_parameters_without_values_are_refused() -> None:
    param = torch.nn.Parameter(torch.ones(8, device="meta"))
    param.grad = torch.ones(8, device="meta")
    with pytest.raises(UnsupportedProblem, match="a parameter is on the meta device: move it first"):
        FusedAdamW([param]).step()
