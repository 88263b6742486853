"""Shipped winners are usable by this version: known GPU, current revision, valid configs, their origin told."""

from __future__ import annotations

from pathlib import Path

import pytest

from cutekernels import dispatch, gpu
from cutekernels.db.storage import lines, snapshot
from cutekernels.db.storage.trial import Trial
from cutekernels.op import Config
from cutekernels.ops import registry
from tests.shipping import text_of

SHIPPED = snapshot.shipped_gpus()


def trials(name: str) -> list[Trial]:
    text = text_of(Path(snapshot.__file__).parents[1] / f"shipped/{name}.jsonl.xz")
    found = [trial for _, trial in lines.parsed(text.splitlines())]
    assert all(isinstance(trial, Trial) for trial in found)
    return found  # type: ignore[return-value]


def config_of(trial: Trial) -> Config:
    op = registry.get(trial.op)
    return op.Config.parse(op.spell(trial.revision, trial.problem, trial.config))


def test_something_is_shipped() -> None:
    assert "h200" in SHIPPED


@pytest.mark.parametrize("name", SHIPPED)
def test_rows_are_winners_of_their_gpu(name: str) -> None:
    rows = trials(name)
    assert rows and len({(t.op, t.problem) for t in rows}) == len(rows)
    for trial in rows:
        spec, op = gpu.lookup(trial.gpu.name), registry.get(trial.op)
        assert spec.name == name
        assert trial.revision in op.revisions, "tune again: the op's revision was raised"
        problem, config = op.Problem.parse(trial.problem), config_of(trial)
        assert problem == problem.bucket()
        assert op.why_not(problem, config, spec) is None
        assert (trial.origin, trial.status) == ("measured", "ok")
        assert trial.median_us is not None and trial.error is not None and trial.error <= 1


@pytest.mark.parametrize("name", SHIPPED)
def test_the_dispatcher_takes_them(name: str) -> None:
    spec = gpu.lookup(name)
    known = snapshot.load(spec.name)
    for trial in trials(name):
        op = registry.get(trial.op)
        problem = op.Problem.parse(trial.problem)
        choice = dispatch.resolve(op, problem, spec, known)
        assert (choice.origin, choice.config) == ("tuned", config_of(trial))


@pytest.mark.parametrize("name", SHIPPED)
def test_none_is_faster_than_the_roofline(name: str) -> None:
    """Rates are the data sheet's, which no clock exceeds: there is nothing to grant."""
    spec = gpu.lookup(name)
    for t in trials(name):
        assert t.median_us is not None
        op = registry.get(t.op)
        share = op.work(op.Problem.parse(t.problem)).floor_us(spec) / t.median_us
        assert 0 < share <= 1, f"{t.op} [{t.problem}] at {share:.3f} of the roofline: its work counts too much"


def test_what_bf16_was_tuned_for_serves_fp16() -> None:
    spec = gpu.lookup("h200")
    op = registry.get("gemm")
    for text in ("m=128 n=18944 k=3584 b_major=k", "m=16 n=4096 k=4096"):
        found = [dispatch.resolve(op, op.Problem.parse(text + words), spec) for words in ("", " dtype=fp16")]
        assert [choice.origin for choice in found] == ["tuned", "tuned"]
        assert found[0].config == found[1].config
