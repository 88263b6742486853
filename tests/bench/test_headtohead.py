"""Suites of an op's bodies beside each other: the fastest config of each is found, and a body without one is told."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from bench import headtohead, run, workloads
from bench.baselines import Absent, absent
from bench.suites import Case
from cutekernels import compilers, rope
from cutekernels.errors import CompileError
from cutekernels.gpu import lookup
from cutekernels.ops import registry

H200 = lookup("h200")
OPS = ("rms_norm", "rope", "silu_mul")


def fastest(monkeypatch: pytest.MonkeyPatch, name: str, text: str, fails: str = "no") -> dict[str, tuple[Any, str]]:
    """The choice for an op where a config's time is 10 us for each element of a thread away from 16."""
    op = registry.get(name)

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
        op,
        op.Problem.parse(text),
        H200,
        lambda c: [1 + 10 * abs(c.block_rows * c.block_cols // (32 * c.warps) - 16)],
        Round,  # type: ignore[arg-type]
    )
    return {body: (config, origin) for body, config, origin in chosen}


@pytest.mark.parametrize(("op", "bodies"), [("rms_norm", ["triton", "cute"]), ("silu_mul", ["triton"])])
def test_each_body_has_the_fastest_of_its_configs(op: str, bodies: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    found = fastest(monkeypatch, op, "rows=2048 cols=4096")
    assert list(found) == bodies
    for body, (config, origin) in found.items():
        assert getattr(config, "body", "triton") == body
        assert config.block_rows * config.block_cols == 16 * 32 * config.warps
        assert origin.startswith("fastest of ")


def test_a_body_without_a_config_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    config, reason = fastest(monkeypatch, "rms_norm", "rows=2048 cols=4096 layout=strided")["cute"]
    assert config is None
    assert "layout is strided: take body=triton" in reason
    with pytest.raises(Absent, match="strided"):
        absent("cutekernels (cute)", reason).bind(Case("rms_norm", "", ""), [])
    config, reason = fastest(monkeypatch, "rms_norm", "rows=2048 cols=4096", "body=cute")["cute"]
    assert config is None
    assert "compiles: ptxas" in reason


@pytest.mark.parametrize("op", OPS)
def test_the_suite_has_the_references_shapes(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cases = workloads.cases(op, headtohead.SUITE, dtype="fp16")
    published = "published" if op == "silu_mul" else "reference"
    assert cases == workloads.cases(op, published, dtype="fp16")
    small = {"rope": {"seq": 6, "batch": 2}}.get(op, {"rows": 24, "cols": 64})
    registered, problem = run.parse_case(cases[0])
    case = Case(op, str(problem.replace(**small)), cases[0].label)
    in_cute = {"rms_norm": "", "rope": "tokens=1 heads=8 warps=1", "silu_mul": "block=256 warps=1"}
    bodies = [("triton", registered.default(run.parse_case(case)[1], H200), "fastest of 1"), ("cute", None, "no")]
    monkeypatch.setattr(headtohead, "chosen", lambda op, *_: bodies[: len(op.Config.space().get("body", [op]))])
    monkeypatch.setattr(headtohead, "fastest", lambda configs, *_: configs[0])
    plan = run.RunPlan(headtohead.SUITE, H200, {}, device="cpu", alone=True)
    ours = run.contenders(case, plan)
    assert [w.name for w in ours] == ["cutekernels (triton)", "cutekernels (cute)"]
    assert [w.config for w in ours] == [str(bodies[0][1]), in_cute[op]]


@pytest.mark.parametrize(("layout", "vec", "shape"), [("dense", 8, (1, 24 * 66)), ("rows", 2, (24, 66))])
def test_the_example_takes_rows_as_they_lie(
    layout: str, vec: int, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows without gaps as one, else each; accesses as wide as addresses and pitches allow."""
    example = pytest.importorskip("examples.silu_mul_cute")
    case = Case("silu_mul", f"rows=24 cols=66 layout={layout}", "")
    workload, sets = workloads.get("silu_mul"), []
    sets.append(workload.inputs(case, run.parse_case(case)[1], "cpu", 0))
    seen: list[Any] = []

    def launcher(*words: Any) -> Any:
        seen.append(words)
        return lambda out, gate, up: seen.append(out.shape) or out.copy_(torch.nn.functional.silu(gate) * up)

    monkeypatch.setattr(example, "launcher", launcher)
    assert workload.cute is not None
    (launch,) = workload.cute(case, sets)["block=2048 warps=4"]
    torch.testing.assert_close(launch(), workload.truth(case, sets[0])[0].to(torch.bfloat16), rtol=0.02, atol=0.02)
    assert seen == [("bf16", vec, 2048, 4, -1), shape]


@pytest.mark.parametrize(("rotary", "interleaved", "vec"), [(64, False, 8), (64, True, 8), (20, False, 2)])
def test_the_example_turns_what_the_op_turns(
    rotary: int, interleaved: bool, vec: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Accesses divide runs that turn and runs that stay; the launch gets every operand in its place."""
    example = pytest.importorskip("examples.rope_cute")
    heads = "heads_q=4 heads_kv=2 head_dim=80"
    text = f"batch=2 seq=6 {heads} rotary={rotary} interleaved={int(interleaved)} align={2 * vec}"
    case, seen = Case("rope", text, ""), []
    workload, (_, problem) = workloads.get("rope"), run.parse_case(case)
    sets = [workload.inputs(case, problem, "cpu", 0)]

    def launcher(dtype: str, table: str, tile: Any, *words: Any) -> Any:
        seen.append((dtype, table, tile.vec, tile.block, *words))

        def launch(out_q: Any, out_k: Any, q: Any, k: Any, cos: Any, sin: Any) -> None:
            for out, turned in zip((out_q, out_k), rope(q, k, cos, sin, interleaved=interleaved), strict=True):
                out.copy_(turned)

        return launch

    monkeypatch.setattr(example, "launcher", launcher)
    assert workload.cute is not None
    (launch,) = workload.cute(case, sets)["tokens=1 heads=16 warps=4"]
    for turned, exact in zip(launch(), workload.truth(case, sets[0]), strict=True):
        torch.testing.assert_close(turned, exact.to(torch.bfloat16), rtol=0.02, atol=0.02)
    assert seen == [("bf16", "fp32", vec, 32 if rotary == 64 else 16, interleaved, True, -1)]
