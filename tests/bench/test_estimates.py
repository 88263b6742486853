"""The models' estimates against the recorded sweeps."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import pytest
from typer.testing import CliRunner

from bench import estimates
from cutekernels import gpu

H200 = gpu.lookup("h200")


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        ([1, 2, 3], [10, 20, 30], 1.0),
        ([1, 2, 3], [3, 2, 1], -1.0),
        ([1, 1, 2, 2], [1, 2, 3, 4], 0.894427),
        ([1, 1, 1], [1, 2, 3], None),
    ],
)
def test_rank_correlation(a: list[float], b: list[float], expected: float | None) -> None:
    found = estimates.spearman(a, b)
    assert found == (expected if expected is None else pytest.approx(expected))


load = cache(estimates.load)
real_judge = estimates.judge


@cache
def judged(op: str, problem: str, us: tuple[tuple[str, float], ...], spec: gpu.GpuSpec) -> estimates.Quality | None:
    return real_judge(op, problem, dict(us), spec)


def judge(op: str, problem: str, us: dict[str, float], spec: gpu.GpuSpec) -> estimates.Quality | None:
    """Quality of one problem's estimates, computed once for all tests that read the same rows."""
    return judged(op, problem, tuple(us.items()), spec)


def of_sweeps(body: str = "", file: str = "", spec: gpu.GpuSpec = H200) -> list[estimates.Quality]:
    """Today's models on the recorded sweeps or those of one file, of gemm's configs those of one body."""
    found = []
    for (op, problem), us in load(estimates.SWEEPS / spec.name / file).items():
        own = us if op != "gemm" else {config: t for config, t in us.items() if body in config}
        found.append(judge(op, problem, own, spec))
    return [q for q in found if q]


def test_eight_favourites_hold_a_config_within_5_percent_nine_times_in_ten() -> None:
    """On an H200: gemm and attention on warp groups, and every memory-bound op."""
    found = of_sweeps("body=warpgroup")
    assert len(found) >= 125
    assert sum(q.top <= estimates.NEAR for q in found) / len(found) >= 0.9
    for op, least in (("gemm", 0.8), ("attention", 0.65)):
        ranks = sorted(q.correlation or 0.0 for q in found if q.op == op)
        assert ranks[len(ranks) // 2] >= least, op


@pytest.mark.parametrize(("spec", "least"), [(H200, 0.8), (gpu.lookup("h100"), 0.5)], ids=lambda v: str(v))
def test_the_model_of_few_tokens_ranks(spec: gpu.GpuSpec, least: float) -> None:
    """Fitted to half of these problems, it ranks the other half as well: docs/notes/gemm.md#skinny_warpgroup-model."""
    found = [q for q in of_sweeps("body=skinny_warpgroup", spec=spec) if q.op == "gemm"]
    assert len(found) >= 15
    ranks = sorted(q.correlation or 0.0 for q in found)
    assert ranks[len(ranks) // 2] >= least
    assert all(q.top <= estimates.NEAR for q in found)


def test_favourites_hold_on_an_h100() -> None:
    """Eight favourites hold a config within 5 % of the best that searches tried for 139 of 152 problems."""
    found = of_sweeps(spec=gpu.lookup("h100"))
    assert len(found) >= 150
    assert sum(q.top <= estimates.NEAR for q in found) / len(found) >= 0.9
    defaults = sorted(q.default for q in found if q.op == "gemm" and q.default)
    assert len(defaults) >= 50
    assert defaults[len(defaults) // 2] <= 1.012
    assert defaults[int(0.95 * len(defaults))] <= 1.09


@pytest.mark.parametrize(
    ("of_searches", "defaults", "choices"),
    [(False, (30, 1.01, 1.06), (100, 1.01, 1.07)), (True, (55, 1.01, 1.08), (25, 1.03, 1.10))],
)
def test_gemms_defaults_are_near_the_best(
    of_searches: bool, defaults: tuple[int, float, float], choices: tuple[int, float, float]
) -> None:
    """On an H200. Of sweeps: nothing behind in the median, 3.4 % at the 95th percentile, sweeps of narrower spaces lack
    most; the model's choice among a sweep's configs on warp groups 0.3 and 6.7 %. Of searches, which go on from the
    model's favourites: 0.8 and 7.5 %, 2.9 and 9.5 %.
    """
    searched = {q.problem for q in of_sweeps(file="tuned.jsonl.xz")}

    def behind(body: str) -> list[estimates.Quality]:
        return [q for q in of_sweeps(body) if q.op == "gemm" and (q.problem in searched) == of_searches]

    for found, (least, middle, most) in (
        ([q.default for q in behind("") if q.default], defaults),
        ([q.choice for q in behind("body=warpgroup")], choices),
    ):
        assert len(found) >= least
        assert sorted(found)[len(found) // 2] <= middle
        assert sorted(found)[int(0.95 * len(found))] <= most


def test_configs_of_older_sweeps_are_passed_over() -> None:
    rows = {"block=256 gone=1": 1.0, "nonsense": 2.0}
    assert estimates.judge("rms_norm", "rows=16 cols=3584", rows, H200) is None


def test_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(estimates, "judge", judge)
    by_op = CliRunner().invoke(estimates.app, ["--format", "json"])
    assert {"gemm", "attention", "rms_norm"} <= {row["op"] for row in json.loads(by_op.stdout)}
    each = CliRunner().invoke(estimates.app, ["--every", "--format", "json"])
    assert len(json.loads(each.stdout)) > len(json.loads(by_op.stdout))
    assert CliRunner().invoke(estimates.app, ["--gpu", "nonsense"]).exit_code == 2
    assert CliRunner().invoke(estimates.app, ["--folder", str(tmp_path)]).exit_code == 2
