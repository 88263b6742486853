"""Asking the database and the models from the command line: names, columns, limits, hints."""

from __future__ import annotations

import csv
import io
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from cutekernels import cli, dispatch, environment, gpu
from cutekernels.db.questions import html_report
from cutekernels.db.storage.store import Environment, Store
from cutekernels.db.storage.uuid7 import uuid7
from cutekernels.errors import UnsupportedProblem
from cutekernels.ops import registry
from tests.command_line import invoke
from tests.db.trials import L40S, trial
from tests.shipping import ship

ROOT = Path(__file__).parents[2]


def shown(*words: str) -> str:
    result = invoke(cli.app, *words)
    assert result.exit_code == 0, (result.stderr, result.exception)
    return result.stdout


def test_a_query_has_a_limit_after_its_order() -> None:
    times = [row["median_us"] for row in json.loads(shown("db", "query", "--gpu", "h200", "--format", "json"))]
    few = json.loads(shown("db", "query", "--gpu", "h200", "--sort", "-median_us", "--limit", "3", "--format", "json"))
    assert [row["median_us"] for row in few] == sorted((t for t in times if t), reverse=True)[:3]


def test_torchs_names_of_gpus_are_taken() -> None:
    assert gpu.lookup("NVIDIA H200") == gpu.lookup("nvidia h200") == gpu.lookup("h200")
    assert {gpu.lookup(g.product) for g in gpu.GPUS} <= set(gpu.GPUS)
    assert shown("db", "query", "--gpu", "NVIDIA H200", "--limit", "1") == shown(
        "db", "query", "--gpu", "h200", "--limit", "1"
    )


@pytest.mark.parametrize(
    "line",
    [
        "db query --gpu h200 --gpu a100",
        "tune demo --gpu h200 --gpu=a100",
        "explain gemm m=16 --gpu h200 --gpu h200",
        "db history --limit 3 --limit 4",
    ],
)
def test_an_option_that_stands_twice_is_refused(line: str) -> None:
    result = invoke(cli.app, *line.split())
    assert result.exit_code == 2 and re.search(r"--\w+ stands 2 times: give it once", result.stderr)


def test_a_field_in_capitals_gets_a_hint() -> None:
    with pytest.raises(UnsupportedProblem, match=r"'M=16' is not a field of GemmProblem. Did you mean 'm'\?"):
        registry.get("gemm").Problem.parse("M=16 n=64 k=64")
    for text in ("m=16,n=64,k=64", "m n=64 k=64"):
        with pytest.raises(UnsupportedProblem, match="is not NAME=VALUE: write m=16 n=64, with spaces"):
            registry.get("gemm").Problem.parse(text)


def test_another_database_is_explained(tmp_path: Path) -> None:
    config = str(registry.get("gemm").default(registry.get("gemm").Problem.parse("m=48 n=80 k=80"), gpu.lookup("h200")))
    with Store(tmp_path / "other.db") as store:
        one = trial(config, problem="m=48 n=80 k=80", revision=registry.get("gemm").revision)
        store.record([one])
        store.crown(one.id)
    asked = ("explain", "gemm", "m=48 n=80 k=80", "--gpu", one.gpu.name)
    assert "(database)" in shown(*asked, "--db", str(tmp_path / "other.db")) and "(database)" not in shown(*asked)
    result = invoke(cli.app, *asked, "--db", str(tmp_path / "none.db"))
    assert result.exit_code and "there is none" in str(result.exception)


def test_a_gpu_without_measured_winners_gets_one_sentence(shipped: Path, tmp_path: Path) -> None:
    gemm, l40s = registry.get("gemm"), gpu.lookup("l40s")
    p = "m=48 n=80 k=80"
    config = str(gemm.default(gemm.Problem.parse(p), l40s))
    one = trial(config, problem=p, revision=gemm.revision, gpu=L40S, origin="predicted", message="a better wave")

    def told(*more: str) -> list[str]:
        queried = invoke(cli.app, "db", "query", "--gpu", "l40s", *more).stderr
        explained = invoke(cli.app, "explain", "gemm", p, "--gpu", "l40s", "--format", "json", *more)
        dispatch.reload()
        return ["".join(queried.splitlines()[-1:]), json.loads(explained.stdout)[0].get("note", "")]

    end = "each op's default; `cutekernels tune JOB` on such a GPU measures, "
    end += "`--gpu l40s` on a machine without one predicts"
    assert told() == [f"no measured winner serves l40s and no prediction is shipped: calls there use {end}"] * 2
    ship(shipped, "l40s", one.as_line())
    some = f"no measured winner serves l40s: calls there use 1 prediction, of which 1 shipped, and otherwise {end}"
    assert told() == [some] * 2
    with Store(tmp_path / "t.db") as store:
        here = Environment(dsl=environment.compilers()["dsl"])
        measured = replace(one, id=uuid7(), origin="measured", median_us=2.0, environment=here)
        store.record([measured])
        store.crown(measured.id)
    assert told("--db", str(tmp_path / "t.db")) == ["", ""]


def test_queries_and_histories_have_the_same_columns(tmp_path: Path) -> None:
    with Store(tmp_path / "t.db") as store:
        one = trial(
            "tile_m=128 tile_n=128 tile_k=64 warps_m=2 warps_n=2 stages=3 raster=1 ctas_per_sm=1",
            baseline_us=3.0,
            environment=Environment(version="0.3", commit="abc", host="linux-x86_64-16cpu node7"),
        )
        store.record([one])
        store.crown(one.id)
    at = ("--db", str(tmp_path / "t.db"), "--format", "csv")
    winners = next(csv.DictReader(io.StringIO(shown("db", "query", "--local", *at))))
    trials = next(csv.DictReader(io.StringIO(shown("db", "history", *at))))
    assert set(trials) - set(winners) <= {"status", "samples", "registers", "stack_bytes", "smem_bytes", "message"}
    (shown_,) = json.loads(shown("db", "show", one.id, "--db", str(tmp_path / "t.db"), "--format", "json"))
    assert {"gpu", "problem_text", "config_text", "vendor_us", "hardware"} <= set(shown_)
    assert shown_["host"] == trials["host"] == winners["host"] == "linux-x86_64-16cpu node7"
    assert shown_["problem"]["m"] == 16 and shown_["hardware"]["sm_count"] == 132 and shown_["gpu"] == "h200"
    assert "node7" not in shown("db", "export", "--db", str(tmp_path / "t.db")), "a name of this network"
    for verb in (("requests",), ("diff", str(tmp_path / "t.db"), "shipped", "--op", "gemm")):
        with Store(tmp_path / "t.db") as store:
            store.note_requests([("h200", "gemm", 2, "m=64 n=64 k=64", 1)])
        words = verb if verb[0] == "diff" else (*verb, "--db", str(tmp_path / "t.db"))
        (row, *_) = csv.DictReader(io.StringIO(shown("db", *words, "--format", "csv")))
        assert "problem_text" in row and not {"problem", "a_config", "b_config"} & set(row)
    both = set(trials) & set(winners)
    assert {"gpu", "problem_text", "config_text", "vendor_us", "problem_m", "config_tile_m"} <= both
    assert {name: trials[name] for name in both - {"created_at"}} == {
        name: winners[name] for name in both - {"created_at"}
    }


def test_each_op_has_a_colour_of_its_own() -> None:
    colours = dict(html_report._colours({op.name: None for op in registry.OPS}))
    assert len(set(colours.values())) == len(colours) == len(registry.OPS) > 30
