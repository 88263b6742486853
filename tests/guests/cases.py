"""Child of ``test_example.py``: the example's fused MoE in Triton's interpreter (``tests/interpreted.py``)."""

from __future__ import annotations

from typing import Any

from cutekernels import gpu, verify
from cutekernels.guests.fused_moe import FusedMoeConfig, FusedMoeProblem
from examples import fused_moe
from tests.interpreted import serve

H200 = gpu.lookup("h200")


def reply(case: dict[str, Any]) -> dict[str, Any]:
    moe, problem = fused_moe.fused_moe(), FusedMoeProblem.parse(case["problem"])
    config = FusedMoeConfig.parse(case["config"]) if "config" in case else moe.default(problem, H200)
    args = moe.sample(problem, "cpu", seed=3)
    if "ids" in case:
        args[4].copy_(args[4].new_tensor(case["ids"]))
    outputs, work = moe.outputs(problem, *args), moe.work(problem)
    verify.poison(outputs)
    moe.call(problem, config, *outputs, *args)
    error = verify.worst_error(outputs, moe.reference(problem, *args), work.flops, depth=work.depth)
    return {"ratio": error, "outside": True}


class Unweighted:
    """A bug in the place of ``experts``: the routers' weights are not applied."""

    def __getitem__(self, grid: Any) -> Any:
        return lambda *args, **options: REAL[grid](*args[:12], False, **options)


class LosesAPair:
    """A bug in the place of ``place``: the first pair is lost."""

    def __getitem__(self, grid: Any) -> Any:
        def launch(ids: Any, begins: Any, rows: Any, pairs: int) -> None:
            PLACE[grid](ids, begins, rows, pairs)
            rows[0] = pairs

        return launch


REAL, PLACE = fused_moe.experts, fused_moe.place

if __name__ == "__main__":
    faults = {"experts": (fused_moe, Unweighted()), "place": (fused_moe, LosesAPair())}
    serve(reply, faults)
