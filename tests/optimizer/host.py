"""A step's CPU time in a process of its own, where nothing that other tests left stands in the caches or the heap.

``python -m tests.optimizer.host`` prints the least milliseconds of a step of ours and of torch's for each case.
"""

from __future__ import annotations

import gc
import time
from typing import Any

import pytest
import torch

from cutekernels.optim import FusedAdamW
from cutekernels.optim import plan as plans
from tests.optimizer.conftest import stand_ins

CASES = ((290, 1), (290, 4), (3000, 1))  # parameters, groups
# Ours clips but launches nothing; torch's arithmetic stands for its launches.
KINDS: dict[Any, dict[str, Any]] = {FusedAdamW: {"max_grad_norm": 1.0}, torch.optim.AdamW: {"fused": True}}


def optimizer(kind: Any, number: int, groups: int) -> tuple[Any, list[torch.nn.Parameter]]:
    """An optimizer of ``KINDS`` over small parameters in ``groups`` groups, and the parameters."""
    params = [torch.nn.Parameter(torch.ones(4, 1 + i % 5)) for i in range(number)]
    return kind([{"params": params[i::groups]} for i in range(groups)], **KINDS[kind]), params


def step(stepped: Any, params: list[torch.nn.Parameter]) -> float:
    """CPU milliseconds of one step with new gradients."""
    for p in params:
        p.grad = torch.ones_like(p)
    begin = time.thread_time()
    stepped.step()
    return 1e3 * (time.thread_time() - begin)


def main() -> None:
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        stand_ins(patch)
        patch.setattr(plans.compiler, "get", lambda *args: lambda *launch: None)
        for number, groups in CASES:
            pairs = [optimizer(kind, number, groups) for kind in KINDS]
            for pair in pairs:
                step(*pair)
            gc.disable()
            rounds = [[step(*pair) for pair in pairs] for _ in range(12_000 // number + 11)]
            gc.enable()
            print(*map(min, zip(*rounds, strict=True)))


if __name__ == "__main__":
    main()
