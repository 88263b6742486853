"""Shipped winners are usable by this version: known GPU, current revision, valid configs, their origin told."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

import pytest

from cutekernels import dispatch, gpu
from cutekernels.autotune import departures
from cutekernels.autotune.job import load
from cutekernels.autotune.search import prune_reason
from cutekernels.backends import Facts
from cutekernels.db.storage import lines, snapshot
from cutekernels.db.storage.trial import Trial
from cutekernels.op import Config
from cutekernels.ops import registry
from tests.shipping import text_of

PREDICTED = ("rtx5090",)
MODELS = ("llama-3-8b", "mistral-7b", "qwen2.5-7b", "qwen3-8b")
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
    assert {"h200", *PREDICTED} <= set(SHIPPED)


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
        assert (trial.origin, trial.status) == ("predicted" if name in PREDICTED else "measured", "ok")
        assert trial.median_us is not None
        if trial.origin == "measured":
            assert trial.error is not None and trial.error <= 1
        else:
            facts = Facts(trial.registers or 0, trial.stack_bytes or 0, trial.smem_bytes or 0)
            assert trial.registers and prune_reason(facts, op, spec) is None, "compiled, without spilling"
            assert trial.samples is trial.error is trial.ratio_low is None, "nothing was measured"
            assert trial.message.startswith(f"{trial.ratio:.2f} times as fast by the model")


@pytest.mark.parametrize("name", SHIPPED)
def test_the_dispatcher_takes_them(name: str) -> None:
    spec = gpu.lookup(name)
    known = snapshot.load(spec.name)
    for trial in trials(name):
        op = registry.get(trial.op)
        problem = op.Problem.parse(trial.problem)
        choice = dispatch.resolve(op, problem, spec, known)
        if trial.origin == "measured":
            assert (choice.origin, choice.config) == ("tuned", config_of(trial))
        else:
            assert (choice.origin, choice.config) == ("predicted", config_of(trial))
            assert trial.message and trial.message in choice.note


@pytest.mark.parametrize("name", PREDICTED)
def test_predictions_that_serve_are_shipped(name: str) -> None:
    """Each reason is one that holds today: the model's gain is that much."""
    wanted = {(t.op.name, str(t.problem)) for job in MODELS for t in load(job).tasks}
    rows = trials(name)
    assert {(t.op, t.problem) for t in rows} <= wanted
    spec = gpu.lookup(name)
    for trial in rows:
        op = registry.get(trial.op)
        problem, config = op.Problem.parse(trial.problem), config_of(trial)
        found = departures.reason(op, problem, spec, op.default(problem, spec), config)
        if trial.revision == op.revision:
            assert found == trial.message
        else:  # in its own words
            assert found.partition(";")[0] == trial.message.partition(";")[0] != ""


@pytest.mark.parametrize("name", SHIPPED)
def test_none_is_faster_than_the_roofline(name: str) -> None:
    """Rates are the data sheet's, which no clock exceeds: there is nothing to grant."""
    spec = gpu.lookup(name)
    for t in trials(name):
        assert t.median_us is not None
        op = registry.get(t.op)
        share = op.work(op.Problem.parse(t.problem)).floor_us(spec) / t.median_us
        assert 0 < share <= 1, f"{t.op} [{t.problem}] at {share:.3f} of the roofline: its work counts too much"


def test_predictions_are_small() -> None:
    sizes = [len((files("cutekernels.db") / "shipped" / f"{name}.jsonl.xz").read_bytes()) for name in PREDICTED]
    assert sum(sizes) < 3_000


def test_what_bf16_was_tuned_for_serves_fp16() -> None:
    spec = gpu.lookup("h200")
    op = registry.get("gemm")
    for text in ("m=128 n=18944 k=3584 b_major=k", "m=16 n=4096 k=4096"):
        found = [dispatch.resolve(op, op.Problem.parse(text + words), spec) for words in ("", " dtype=fp16")]
        assert [choice.origin for choice in found] == ["tuned", "tuned"]
        assert found[0].config == found[1].config
