"""Shipped winners are usable by this version: known GPU, current revision, valid and measured configs."""

from __future__ import annotations

from importlib.resources import files

import pytest

from cutekernels import dispatch, gpu
from cutekernels.db import snapshot
from cutekernels.db.trial import Trial
from cutekernels.ops import registry

SHIPPED = sorted(f.name for f in (files("cutekernels.db") / "shipped").iterdir() if f.name.endswith(".jsonl"))


def trials(name: str) -> list[Trial]:
    text = (files("cutekernels.db") / "shipped" / name).read_text(encoding="utf-8")
    return [Trial.from_line(line) for line in text.splitlines()]


def test_something_is_shipped() -> None:
    assert "h200.jsonl" in SHIPPED


@pytest.mark.parametrize("name", SHIPPED)
def test_rows_are_winners_of_their_gpu(name: str) -> None:
    rows = trials(name)
    assert rows and len({(t.op, t.problem) for t in rows}) == len(rows)
    for trial in rows:
        spec, op = gpu.lookup(trial.gpu.name), registry.get(trial.op)
        assert f"{spec.name}.jsonl" == name
        assert trial.revision == op.revision, "tune again: the op's revision was raised"
        problem, config = op.Problem.parse(trial.problem), op.Config.parse(trial.config)
        assert problem == problem.bucket()
        assert op.why_not(problem, config, spec) is None
        assert (trial.origin, trial.status) == ("measured", "ok")
        assert trial.median_us is not None and trial.error is not None and trial.error <= 1


@pytest.mark.parametrize("name", SHIPPED)
def test_the_dispatcher_takes_them(name: str) -> None:
    spec = gpu.lookup(name.removesuffix(".jsonl"))
    known = snapshot.load(spec.name)
    for trial in trials(name):
        op = registry.get(trial.op)
        choice = dispatch.resolve(op, op.Problem.parse(trial.problem), spec, known)
        assert (choice.origin, str(choice.config)) == ("tuned", trial.config)


def test_what_bf16_was_tuned_for_serves_fp16() -> None:
    spec = gpu.lookup("h200")
    op = registry.get("gemm")
    for text in ("m=128 n=18944 k=3584 b_major=k", "m=16 n=4096 k=4096"):
        found = [dispatch.resolve(op, op.Problem.parse(text + words), spec) for words in ("", " dtype=fp16")]
        assert [choice.origin for choice in found] == ["tuned", "tuned"]
        assert found[0].config == found[1].config
