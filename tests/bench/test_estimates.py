"""The models' estimates against the recorded sweeps."""

from __future__ import annotations

import json
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


def test_eight_favourites_hold_a_config_within_5_percent_nine_times_in_ten() -> None:
    """On an H200. Most of gemm's configs are the model's favourites, which are close in time: 0.798."""
    measured = estimates.load(estimates.SWEEPS / "h200")
    found = [q for key, us in measured.items() if (q := estimates.judge(*key, us, H200))]
    assert len(found) >= 39
    assert sum(q.top <= estimates.NEAR for q in found) / len(found) >= 0.9
    for op, least in (("gemm", 0.79), ("attention", 0.65)):
        ranks = sorted(q.correlation or 0.0 for q in found if q.op == op)
        assert ranks[len(ranks) // 2] >= least, op


def test_configs_of_older_sweeps_are_passed_over() -> None:
    rows = {"block=256 gone=1": 1.0, "nonsense": 2.0}
    assert estimates.judge("rms_norm", "rows=16 cols=3584", rows, H200) is None


def test_the_command_line(tmp_path: Path) -> None:
    by_op = CliRunner().invoke(estimates.app, ["--format", "json"])
    assert {"gemm", "attention", "rms_norm"} <= {row["op"] for row in json.loads(by_op.stdout)}
    each = CliRunner().invoke(estimates.app, ["--every", "--format", "json"])
    assert len(json.loads(each.stdout)) > len(json.loads(by_op.stdout))
    assert CliRunner().invoke(estimates.app, ["--gpu", "nonsense"]).exit_code == 2
    assert CliRunner().invoke(estimates.app, ["--folder", str(tmp_path)]).exit_code == 2
