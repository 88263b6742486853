"""Parts of a job: shards that machines agree on without talking, one op's tasks, the queue of missed problems."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime

import pytest

from cutekernels.autotune import shards
from cutekernels.autotune.job import Job, Task, bundled, load
from cutekernels.db.storage.store import Request
from cutekernels.errors import JobError
from cutekernels.ops import registry
from tests.tuner.toys import H200, TOY, ToyProblem, task

JOB = Job("toys", tuple(task(trials, f"m={m} n=64") for m, trials in ((16, 4), (32, 40), (64, 8), (128, 8), (256, 8))))


@pytest.mark.parametrize("name", bundled())
def test_shards_cover_a_job_once_and_cost_about_the_same(name: str) -> None:
    job = load(name)
    for count in (1, 3, 8):
        parts = [shards.part(job, f"{i}/{count}") for i in range(1, count + 1)]
        assert sorted(str(t) for p in parts for t in p.tasks) == sorted(map(str, job.tasks))
        costs = [sum(map(shards.expected_s, p.tasks)) for p in parts]
        assert max(costs) - min(costs) <= max(map(shards.expected_s, job.tasks)) + 1e-6


def test_a_split_is_the_same_whatever_the_order_of_asking() -> None:
    assert shards.part(JOB, "2/3") == shards.part(replace(JOB), "2/3")
    kept = [str(t) for t in JOB.tasks]
    for i in (1, 2, 3):
        mine = [str(t) for t in shards.part(JOB, f"{i}/3").tasks]
        assert mine == sorted(mine, key=kept.index), "a shard keeps the job's order"


def test_the_dearest_task_has_the_least_company() -> None:
    assert [[t.trials for t in shards.part(JOB, f"{i}/2").tasks] for i in (1, 2)] == [[4, 40], [8, 8, 8]]


@pytest.mark.parametrize("text", ["0/4", "5/4", "1/0", "1", "a/b", "-1/4", "1/4/2", "1/99999999", "١/٤"])
def test_no_such_shard(text: str) -> None:
    with pytest.raises(JobError, match="from 1 to n"):
        shards.part(JOB, text)


def test_only_one_op() -> None:
    job = load("demo")
    assert {t.op.name for t in shards.only(job, "silu_mul").tasks} == {"silu_mul"}
    with pytest.raises(JobError, match="no task of an op 'rope'; its ops: gemm, silu_mul"):
        shards.only(job, "rope")


class TestRequested:
    @pytest.fixture(autouse=True)
    def _toys(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(registry, "get", {"toy": TOY}.__getitem__)
        monkeypatch.setattr(registry, "find", {"toy": TOY}.get)

    def request(self, problem: str, hits: int, gpu: str = "h200", revision: int = 3) -> Request:
        return Request(gpu, "toy", revision, problem, hits, datetime.now(UTC))

    def test_most_gpu_time_first(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(type(TOY), "estimate_us", lambda self, p, c, gpu: float(p.m))
        queue = [self.request("m=16 n=64", 10), self.request("m=1024 n=64", 9), self.request("m=64 n=64", 1)]
        job = shards.requested(queue, H200, trials=7)
        assert [str(t.problem) for t in job.tasks] == ["m=1024 n=64", "m=16 n=64", "m=64 n=64"]
        assert {t.trials for t in job.tasks} == {7} and job.ranked

    def test_what_this_version_cannot_tune_is_left_out(self) -> None:
        queue = [
            self.request("m=16 n=64", 1),
            self.request("m=32 n=64", 1, gpu="l40s"),
            self.request("m=64 n=64", 1, revision=2),
            self.request("colour=red", 1),
            self.request("m=0 n=64", 1),
        ]
        assert [str(t.problem) for t in shards.requested(queue, H200).tasks] == ["m=16 n=64"]
        why = [shards.left_out(request, H200) for request in queue]
        assert why[:3] == ["", "it is for l40s", "calls use winners of revision 3"]
        assert why[3].startswith("its problem is not one of this version's") and why[4] == "it has nothing to compute"

    def test_problems_of_one_bucket_are_one_task(self) -> None:
        queue = [self.request(str(ToyProblem(m, 64)), 1) for m in (1000, 1001)]
        assert len(shards.requested(queue, H200).tasks) == 1
        assert isinstance(shards.requested(queue, H200).tasks[0], Task)
