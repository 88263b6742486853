"""The example's fused MoE on a GPU: right with many configs, and tuned by the real processes."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from cutekernels import gpu as gpus
from cutekernels import guests, verify
from cutekernels.autotune.job import Job, Task
from cutekernels.autotune.run import tune
from cutekernels.db.store import Store
from cutekernels.guests import tables
from cutekernels.guests.fused_moe import FusedMoe, FusedMoeProblem

pytestmark = pytest.mark.gpu
ROOT = Path(__file__).parents[2]
NAME = "examples.fused_moe:fused_moe"


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FusedMoe:
    monkeypatch.syspath_prepend(str(ROOT))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    loaded = guests.load(NAME)
    assert isinstance(loaded, FusedMoe)
    return loaded


@pytest.mark.parametrize(
    "text",
    [
        "m=1 experts=16 n=768 k=512 top_k=8",
        "m=37 experts=16 n=200 k=264 top_k=3",
        "m=512 experts=16 n=768 k=512 top_k=8 dtype=fp16",
        "m=64 experts=8 n=128 k=256 top_k=1",
    ],
)
def test_right_with_many_configs(example: FusedMoe, text: str) -> None:
    spec, problem = gpus.detect(), FusedMoeProblem.parse(text)
    args, work = example.sample(problem, "cuda", 5), example.work(problem)
    expected, outputs = example.reference(problem, *args), example.outputs(problem, *args)
    valid = list(example.valid(problem, spec))
    for config in (example.default(problem, spec), *random.Random(text).sample(valid, 5)):
        verify.poison(outputs)
        example.bind(problem, config, print)(*outputs, *args)
        torch.cuda.synchronize()
        assert verify.worst_error(outputs, expected, work.flops, depth=work.depth) <= 1, config


def test_a_bug_fails_the_judge(example: FusedMoe) -> None:
    """One expert's weights are another's: an eighth of each token's result at most."""
    spec, problem = gpus.detect(), FusedMoeProblem.parse("m=64 experts=16 n=768 k=512 top_k=8")
    args, work = list(example.sample(problem, "cuda", 5)), example.work(problem)
    expected, outputs = example.reference(problem, *args), example.outputs(problem, *args)
    args[2] = args[2].clone()
    args[2][3] = args[2][4]
    example.call(problem, example.default(problem, spec), *outputs, *args)
    assert verify.worst_error(outputs, expected, work.flops, depth=work.depth) > 1


def test_tuned_and_exported(example: FusedMoe, tmp_path: Path) -> None:
    db, problems = str(tmp_path / "tuned.db"), [f"m={m} experts=16 n=256 k=512 top_k=4" for m in (4, 256)]
    job = Job("guests", tuple(Task(example, FusedMoeProblem.parse(text), 6) for text in problems))
    report = tune(job, db=db)
    assert report.ok, report.as_json()
    with Store(db) as store:
        rows = store.trials(op=NAME)
        (table,) = tables.tables("vllm", store.winners(op=NAME), op=NAME)
    assert {t.status for t in rows} <= {"ok", "pruned"}, [t.message for t in rows]
    assert any(t.registers for t in rows), "compiled ahead"
    assert sorted(table.rows) == [4, 256]
    name = torch.cuda.get_device_name()
    assert ("NVIDIA_H200" if "H200" in name else name.replace(" ", "_")) in table.path
