"""On a GPU: the timer agrees with the roofline and itself, the worker survives what candidates do to it."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from cutekernels import gpu as gpus
from cutekernels.autotune import cli, worker
from cutekernels.autotune.requests import Measure, Prepare
from cutekernels.db.storage.store import Store
from cutekernels.isolate import Child, ChildDied, ChildTimeout
from cutekernels.measure import GraphRound, cpu_us_per_call, l2_rotation, time_interleaved
from tests.command_line import invoke
from tests.tuner.toys import BEST, DEFAULT, ToyConfig

pytestmark = pytest.mark.gpu

MIB = 1 << 20


def copies(mib: int, sets: int) -> list[Callable[[], object]]:
    pairs = [
        (torch.randn(mib * MIB // 4, device="cuda"), torch.empty(mib * MIB // 4, device="cuda")) for _ in range(sets)
    ]
    # A kernel, not copy_: that becomes a memcpy node, whose engine changes with the size.
    return [partial(torch.mul, x, 1.5, out=out) for x, out in pairs]


class TestTimer:
    def test_a_large_copy_runs_at_a_believable_bandwidth(self) -> None:
        gpu = gpus.detect()
        us = time_interleaved({"copy": copies(512, 1)}, rounds=10)["copy"].median
        gbps = 2 * 512 * MIB / us / 1e3
        assert 0.5 * gpu.dram_gbps < gbps < 1.02 * gpu.dram_gbps

    def test_rotation_keeps_the_l2_cold(self) -> None:
        l2 = gpus.detect().l2_bytes
        mib = max(1, l2 // MIB // 8)
        cold = copies(mib, l2_rotation(2 * mib * MIB, l2))
        out = time_interleaved({"cold": cold, "warm": cold[:1]}, rounds=15)
        assert out["warm"].ratio(out["cold"]).low > 1.1

    def test_the_same_kernel_twice_is_told_apart_by_nobody(self) -> None:
        launches = copies(64, 4)
        out = time_interleaved({"a": launches, "b": launches}, rounds=30)
        ratio = out["a"].ratio(out["b"])
        assert 0.98 < ratio.value < 1.02
        assert ratio.high - ratio.low < 0.05

    def test_twice_the_bytes_takes_twice_as_long(self) -> None:
        out = time_interleaved({"one": copies(256, 2), "two": copies(512, 2)}, rounds=15)
        assert out["one"].ratio(out["two"]).value == pytest.approx(2, rel=0.1)

    def test_short_kernels_fill_their_replay(self) -> None:
        x = torch.randn(1024, device="cuda")
        timed = GraphRound([lambda: x.mul_(1.0)], least_us=200)
        us = timed()
        assert timed.launches * us > 100
        assert 0.3 < us < 10, "no launch gaps, no host time"

    def test_launches_really_run(self) -> None:
        count = torch.zeros(1, device="cuda")
        timed = GraphRound([lambda: count.add_(1)])
        before = float(count)
        timed()
        assert float(count) - before in (timed.launches, 2 * timed.launches)

    def test_host_time_is_not_device_time(self) -> None:
        x = torch.randn(64 * MIB, device="cuda")
        assert cpu_us_per_call(lambda: x.mul_(1.0), calls=50, rounds=5).median < 60


# What the children below run: the worker, with toy kernels in place of compiled ones.


def _illegal_address(out: Any, x: Any) -> None:
    index = torch.full_like(x, 1 << 40, dtype=torch.int64)
    torch.gather(x, 1, index, out=out)  # a device-side assert: the context is lost


def _hangs(out: Any, x: Any) -> None:
    torch.cuda._sleep(1 << 40)


def toy_worker(request: Any) -> Any:
    """``worker.answer`` over toy kernels: doubling, right, wrong, faulting and hanging."""
    from tests.tuner.test_worker import Doubling

    class OnDevice(Doubling):
        def sample(self, p: Any, device: str, seed: int) -> Any:
            return tuple(t.to(device) for t in super().sample(p, device, seed))

    def kernel(op: Any, p: Any, c: ToyConfig, gpu: Any) -> Any:
        if c.tile == 128:
            return _illegal_address if c.fast else _hangs
        factor = 2.5 if c.fast else 2
        return lambda out, x: torch.mul(x, factor, out=out)

    worker.registry.get = lambda name: OnDevice()  # type: ignore[assignment]
    worker.compiler.get = kernel
    return worker.answer(request)


class TestWorker:
    def test_right_wrong_faulting_hanging(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.syspath_prepend(str(Path(__file__).parents[2]))
        prepare = Prepare("toy", "m=2048 n=4096", gpus.detect())
        right, wrong = DEFAULT, ToyConfig(32, 1, True)
        faults, hangs = ToyConfig(128, 8, True), ToyConfig(128, 8, False)
        with Child("tests.tuner.test_gpu:toy_worker") as child:
            child.ask(prepare, 120)
            out = child.ask(Measure(prepare, (str(right), str(wrong))), 60)
            assert out[str(right)].right and len(out[str(right)].us) == 20
            assert out[str(wrong)].error > 1 and out[str(wrong)].us == ()
            with pytest.raises(ChildDied, match=f"code {worker.DEVICE_LOST}"):
                child.ask(Measure(prepare, (str(right), str(faults))), 60)
            with pytest.raises(ChildTimeout):
                child.ask(Measure(prepare, (str(hangs),)), 8)
            again = child.ask(Measure(prepare, (str(right),)), 120)
            assert again[str(right)].right
        assert BEST not in (right, wrong)


def test_a_real_task_from_job_file_to_winner_and_resume(tmp_path: Path) -> None:
    """silu_mul, small: tuned, crowned, resumed without a measurement, through the command line."""
    job = tmp_path / "small.toml"
    job.write_text('name = "small"\ntrials = 5\n[[tasks]]\nop = "silu_mul"\nproblems = ["rows=512 cols=4096"]\n')
    db = str(tmp_path / "t.db")

    def tune() -> Any:
        result = invoke(cli.app, str(job), "--db", db, "--format", "json")
        assert result.exit_code == 0, result.output
        return json.loads(result.stdout)

    first = tune()
    task = first["tasks"][0]
    assert (first["origin"], task["state"], task["origin"]) == ("measured", "tuned", "measured")
    assert task["ratio"] >= 1 and task["ratio_low"] >= 1
    with Store(db) as store:
        (winner,) = store.winners()
        assert winner.error is not None and 0 <= winner.error <= 1
        assert winner.samples is not None and winner.samples >= 5
    second = tune()
    assert (second["measured"], second["tasks"][0]["state"]) == (0, "done")
