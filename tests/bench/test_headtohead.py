"""Suites of an op's bodies beside each other: the fastest config of each is found, and a body without one is told."""

from __future__ import annotations

from typing import Any

import pytest

from bench import headtohead, run, workloads
from bench.baselines import Absent
from bench.suites import Case
from cutekernels import compilers
from cutekernels.errors import CompileError
from cutekernels.gpu import lookup
from cutekernels.ops.activations.op import SILU_MUL

H200 = lookup("h200")
OPS = ("rms_norm", "rope", "silu_mul")


def fastest(monkeypatch: pytest.MonkeyPatch, text: str, fails: str = "nothing") -> dict[str, tuple[Any, str]]:
    """What is chosen for silu_mul where a config's time is 10 us for each element of a thread away from 16."""

    def compiled(requests: Any, jobs: Any = None) -> list[CompileError | None]:
        return [CompileError("ptxas") if fails in config else None for _, _, config, _ in requests]

    class Round:
        launches = 1

        def __init__(self, launches: Any, least_us: float) -> None:
            (self.us,) = launches

        def __call__(self) -> float:
            return float(self.us)

    monkeypatch.setattr(compilers, "side_by_side", compiled)
    chosen = headtohead.chosen(
        SILU_MUL,
        SILU_MUL.Problem.parse(text),
        H200,
        lambda c: [1 + 10 * abs(c.block_cols // (32 * c.warps) - 16)],
        Round,  # type: ignore[arg-type]
    )
    return {body: (config, origin) for body, config, origin in chosen}


def test_each_body_has_the_fastest_of_its_configs(monkeypatch: pytest.MonkeyPatch) -> None:
    found = fastest(monkeypatch, "rows=2048 cols=4096")
    assert list(found) == ["triton", "cute"]
    for body, (config, origin) in found.items():
        assert config.body == body
        assert config.block_cols == 16 * 32 * config.warps
        assert origin.startswith("fastest of ")


def test_a_body_without_a_config_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    config, reason = fastest(monkeypatch, "rows=2048 cols=4096 layout=strided")["cute"]
    assert config is None
    assert "layout is strided: take body=triton" in reason
    with pytest.raises(Absent, match="strided"):
        headtohead.absent("cutekernels (cute)", reason).bind(Case("silu_mul", "", ""), [])
    config, reason = fastest(monkeypatch, "rows=2048 cols=4096", "body=cute")["cute"]
    assert config is None
    assert "compiles: ptxas" in reason


@pytest.mark.parametrize("op", OPS)
def test_the_suite_has_the_references_shapes(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cases = workloads.cases(op, headtohead.SUITE, dtype="fp16")
    published = "published" if op == "silu_mul" else "reference"
    assert cases == workloads.cases(op, published, dtype="fp16")
    small = {"rope": {"seq": 6, "batch": 2}}.get(op, {"rows": 24, "cols": 64})
    registered, problem = run.posed(cases[0])
    case = Case(op, str(problem.replace(**small)), cases[0].label)
    monkeypatch.setattr(
        headtohead, "chosen", lambda op, p, *_: [("triton", op.default(p, H200), "fastest of 1"), ("cute", None, "no")]
    )
    plan = run.Plan(headtohead.SUITE, H200, {}, device="cpu", alone=True)
    ours = run.contenders(case, plan)
    assert [w.name for w in ours] == ["cutekernels (triton)", "cutekernels (cute)"]
    assert ours[0].config == str(registered.default(run.posed(case)[1], H200))
