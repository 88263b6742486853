"""Ray on logical GPUs of this machine, with a toy timer: a killed actor, a killed node, a mixed cluster."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cutekernels.autotune import ray_fleet
from cutekernels.autotune.fleet import SlotLost
from cutekernels.autotune.job import Job
from cutekernels.autotune.ray_fleet import RayFleet
from cutekernels.autotune.report import TaskReport, TuneReport
from cutekernels.autotune.run import tune
from cutekernels.db.storage.store import Store
from cutekernels.errors import CuteKernelsError, JobError, UnknownGpu
from tests.tuner.rays import CRASHES
from tests.tuner.toys import task

ray: Any = pytest.importorskip("ray")
ROOT = Path(__file__).parents[2]
SHORT = Job("short", tuple(task(4, f"m={m} n=64") for m in (1, 2, 4, 8, 16, 32)))


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where the toy GPUs look for their speed and their fate."""
    folder = tmp_path_factory.mktemp("rays")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ray_fleet, "SERVICE", "tests.tuner.rays:service")
        patch.setenv("TOY_HOME", str(folder))
        patch.delenv("TOY_KIND", raising=False)
        patch.delenv("CUDA_VISIBLE_DEVICES", raising=False)  # "" hides the logical GPUs too
        patch.setenv("PYTHONPATH", str(ROOT))
        patch.setenv("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        yield folder


@pytest.fixture(scope="module")
def cluster(home: Path) -> Iterator[None]:
    """One node with four logical GPUs."""
    ray.init(num_cpus=8, num_gpus=4, include_dashboard=False, log_to_driver=False, logging_level="error")
    yield
    ray.shutdown()


@pytest.fixture
def four(home: Path, cluster: None) -> Path:
    (home / "measure_s").write_text("0.05")
    return home


class Watch:
    """How many tasks of a run have ended."""

    def __init__(self) -> None:
        self.ended = 0

    def begin(self, *rest: object) -> None: ...

    def trial(self, *rest: object) -> None: ...

    def end(self, report: TaskReport) -> None:
        self.ended += 1


def check(db: Path, report: TuneReport, job: Job, kinds: tuple[str, ...] = ("h200",)) -> None:
    """Nothing lost, nothing twice: each problem has a winner for each kind; each config one row of the search."""
    assert report.ok, [t.message for t in report.tasks]
    wanted = sorted((kind, str(t.problem)) for kind in kinds for t in job.tasks)
    assert sorted((t.gpu, t.problem) for t in report.tasks) == wanted
    with Store(db) as store:
        trials, winners = store.trials(), store.winners()
    assert sorted((w.gpu.name, w.problem) for w in winners) == wanted
    assert {t.environment.driver for t in trials} == {"580.1"}, "rows name the versions of their node"
    for key, statuses in _rows(trials).items():
        finals = sum(statuses.values()) - 1
        assert finals <= 1, (key, statuses)
        assert statuses == {"crashed": 1} if key[2] == str(CRASHES) else set(statuses) == {"ok"}, (key, statuses)


def _rows(trials: list[Any]) -> dict[tuple[str, str, str], Counter[str]]:
    found: dict[tuple[str, str, str], Counter[str]] = {}
    for t in trials:
        found.setdefault((t.gpu.name, t.problem, t.config), Counter())[t.status] += 1
    return found


def test_four_gpus_work_side_by_side_and_a_killed_actor_loses_nothing(four: Path, tmp_path: Path) -> None:
    (four / "meet").mkdir()
    (four / "die").touch()
    report = tune(SHORT, db=str(tmp_path / "t.db"), fleet=RayFleet("auto"))
    assert not (four / "die").exists(), "one actor died in the middle of a task"
    check(tmp_path / "t.db", report, SHORT)
    assert len(list(four.glob("gpu [0-3] of *"))) == 4, "each actor sees a GPU of its own"


@pytest.mark.slow
def test_a_driver_that_is_ended_goes_on(four: Path, tmp_path: Path) -> None:
    """From the command line, by a process of its own that joins the cluster."""
    job = tmp_path / "toys.toml"
    job.write_text('name = "toys"\ntrials = 4\n[[tasks]]\nop = "toy"\n[tasks.grid]\nm = [1, 2, 4, 8, 16, 32]\nn = 65\n')
    address = ray.get_runtime_context().gcs_address
    words = [sys.executable, "-m", "tests.tuner.fleets", str(job), "--ray", address, "--db", str(tmp_path / "t.db")]
    first = subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert first.stdout is not None
    for line in first.stdout:
        if "[1/6]" in line:
            break
    first.terminate()
    said, _ = first.communicate(timeout=200)
    assert first.returncode == 143, said
    again = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=200, check=False)
    assert again.returncode == 0, again.stderr
    with Store(tmp_path / "t.db") as store:
        assert len(store.winners()) == 6


def test_a_node_with_another_version_is_refused(four: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RayFleet, "patience_s", 0.0)
    (four / "other version").touch()
    try:
        with pytest.raises(CuteKernelsError, match="the node has cutekernels 0.0.1"):
            tune(SHORT, db=str(tmp_path / "t.db"), fleet=RayFleet("auto"))
    finally:
        (four / "other version").unlink()


class Unusable:
    """A service on a machine whose GPU Ray has, and CUDA has not."""

    def __init__(self, jobs: int, lanes: int | None) -> None:
        raise UnknownGpu("no CUDA device is visible")


@pytest.mark.parametrize("gpus", ["unusable", "none"])
def test_a_cluster_without_a_usable_gpu_ends_the_run_in_one_line(
    gpus: str, four: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_fleet, "SERVICE", f"{__name__}:Unusable")
    if gpus == "none":
        monkeypatch.setattr(RayFleet, "seats", lambda self: [])
    begin = time.monotonic()
    with pytest.raises(CuteKernelsError) as raised:
        tune(SHORT, db=str(tmp_path / "t.db"), fleet=RayFleet("auto"))
    words = str(raised.value)
    assert "there is no GPU to tune on" in words and "\n" not in words and "\x1b" not in words
    assert gpus == "none" or "no CUDA device is visible" in words
    assert time.monotonic() - begin < 60, "120 s are for a GPU that was lost"


def test_the_budget_holds_while_a_gpu_is_waited_for(
    four: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    over = threading.Event()

    def late(self: RayFleet, seat: Any) -> None:
        over.wait(120)
        raise SlotLost("too late")

    monkeypatch.setattr(RayFleet, "open", late)
    begin = time.monotonic()
    try:
        with pytest.raises(
            CuteKernelsError, match="the time ended before a GPU was ready; give it a larger --budget-s"
        ):
            tune(SHORT, db=str(tmp_path / "t.db"), fleet=RayFleet("auto"), budget_s=30, began=begin - 29)
        assert time.monotonic() - begin < 60
    finally:
        over.set()  # threads that still wait end here, and not in another test


@pytest.mark.slow
def test_a_mixed_cluster_whose_node_dies(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three nodes, two kinds of GPU; a node of the kind that has two is removed in the middle."""
    from ray.cluster_utils import Cluster

    (home / "measure_s").write_text("0.1")
    ray.shutdown()  # the other tests' cluster
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "num_gpus": 0, "include_dashboard": False})
    try:

        def node(kind: str, gpus: int) -> Any:
            monkeypatch.setenv("TOY_KIND", kind)  # the node's processes inherit it
            label = {"accelerator_type:" + kind.upper(): 1}
            return cluster.add_node(num_cpus=2, num_gpus=gpus, resources=label)

        node("h200", 1)
        doomed = node("h200", 2)
        node("l40s", 1)
        cluster.wait_for_nodes()
        ray.init(address=cluster.address, log_to_driver=False, logging_level="error")
        removed = []

        class Kills(Watch):
            def trial(self, *rest: object) -> None:
                if self.ended >= 2 and not removed:
                    removed.append(doomed)
                    cluster.remove_node(doomed, allow_graceful=False)

        report = tune(SHORT, db=str(tmp_path / "t.db"), fleet=RayFleet("auto"), watcher=Kills())
        assert removed
        check(tmp_path / "t.db", report, SHORT, ("h200", "l40s"))
    finally:
        ray.shutdown()
        cluster.shutdown()


def test_the_last_line_of_a_traceback_is_told() -> None:
    error = RuntimeError(
        "\x1b[36mray::_Actor\x1b[39m died\nTraceback (most recent call last):\n  File x\nValueError: no room\n"
    )
    assert ray_fleet._reason(error) == "RuntimeError: ValueError: no room"


@pytest.mark.parametrize(
    ("mode", "words"), [("", "asks for a token, set RAY_AUTH_MODE=token"), ("token", "RAY_AUTH_TOKEN as")]
)
def test_a_cluster_that_takes_no_client_may_ask_for_a_token(
    mode: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray 2.60 tells a missing token in its log alone; what it raises names only the address."""
    ray.shutdown()
    monkeypatch.setenv("RAY_AUTH_MODE", mode)
    monkeypatch.setattr(ray_fleet, "_reach", lambda address: None)
    joined: list[str] = []

    def init(address: str, **rest: object) -> None:
        joined.append(address)
        raise ConnectionError(f"Failed to connect to Ray cluster at {address}")

    monkeypatch.setattr(ray, "init", init)
    with pytest.raises(JobError, match=f"Failed to connect.*{words}"):
        RayFleet("head")
    assert joined == ["head:6379"]


@pytest.mark.parametrize("address", ["127.0.0.1:1", "auto"])
def test_no_cluster_is_misuse(address: str) -> None:
    ray.shutdown()  # the other tests' cluster
    with pytest.raises(JobError, match=f"no Ray cluster at '{address}'.*`ray start --head` begins one"):
        RayFleet(address)


@pytest.mark.parametrize("address", ["", " ", ":6379"])
def test_an_address_without_a_host_is_misuse(address: str) -> None:
    with pytest.raises(JobError, match=f"--ray takes auto, or .*; it is '{address}'"):
        RayFleet(address)
