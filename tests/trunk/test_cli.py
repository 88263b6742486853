"""The command line's root: mounting, help, exit codes, explain and doctor. Each room tests its own verbs."""

from __future__ import annotations

import csv
import io
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import Result

from cutekernels import cli, environment, installation
from cutekernels import gpu as gpus
from cutekernels.errors import CuteKernelsError, InvalidConfig, JobError, StoreError, UnknownGpu, UnsupportedProblem
from cutekernels.installation import Cuda, Machine
from tests.command_line import invoke
from tests.cpu_time import least_s, yardstick_s
from tests.processes import python

VERBS = ("tune", "db", "bench", "explain", "gpus", "jobs", "doctor")


def test_what_an_installation_for_queries_lacks_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    def tunes() -> None:
        raise ModuleNotFoundError("No module named 'optuna'", name="optuna")

    with pytest.raises(SystemExit) as ended:
        cli.ended(tunes)
    assert ended.value.code == 1
    said = " ".join(capsys.readouterr().err.split())
    assert "needs optuna" in said and "pip install -e ." in said


def run(*words: str) -> Result:
    return invoke(cli.app, *words)


def script(*words: str) -> subprocess.CompletedProcess[str]:
    """The installed script's ``main``, in a process of its own."""
    code = "import sys; from cutekernels.cli import main; sys.argv[0] = 'cutekernels'; main()"
    return python(code, *words, check=False)


class TestRoot:
    def test_help_names_every_verb(self) -> None:
        result = run("--help")
        assert result.exit_code == 0
        for verb in VERBS:
            assert f" {verb} " in result.stdout

    def test_help_loads_no_verb_and_is_quick(self) -> None:
        code = (
            "import sys\nfrom cutekernels.cli import app\n"
            "try:\n    app(['--help'])\nexcept SystemExit:\n    pass\n"
            "heavy = ('torch', 'triton', 'cutlass', 'sqlalchemy', 'optuna', 'cutekernels.autotune', 'cutekernels.db')\n"
            "print([m for m in heavy if m in sys.modules], file=sys.stderr)"
        )
        took_s, stderr = least_s(code)
        assert stderr == "[]"
        assert took_s < 2 * yardstick_s(), "0.6 yardsticks"

    @pytest.mark.parametrize("verb", VERBS)
    def test_every_verb_has_help(self, verb: str) -> None:
        result = run(verb, "--help")
        assert result.exit_code == 0, result.output
        assert f" {verb} " in result.stdout

    def test_no_verb_shows_help_and_an_unknown_one_is_misuse(self) -> None:
        assert "explain" in run().output
        result = run("frobnicate")
        assert result.exit_code == 2
        assert "frobnicate" in result.output

    @pytest.mark.parametrize(("word", "meant"), [("tunne", "tune"), ("dbb", "db"), ("docter", "doctor")])
    def test_a_misspelt_verb_gets_a_suggestion(self, word: str, meant: str) -> None:
        result = run(word)
        assert result.exit_code == 2
        assert f"Did you mean '{meant}'?" in result.output

    @pytest.mark.parametrize("verb", [(), *((verb,) for verb in VERBS), ("db", "query")])
    def test_h_is_help(self, verb: tuple[str, ...]) -> None:
        assert run(*verb, "-h").stdout == run(*verb, "--help").stdout != ""

    @pytest.mark.parametrize("error", [UnsupportedProblem, InvalidConfig, UnknownGpu, JobError])
    def test_a_word_that_is_wrong_is_misuse(self, error: type[Exception], monkeypatch: Any) -> None:
        def broken() -> None:
            raise error("no such thing")

        monkeypatch.setattr(cli, "app", broken)
        with pytest.raises(SystemExit) as raised:
            cli.main()
        assert raised.value.code == 2

    @pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full here")
    def test_a_full_disk_is_one_line(self) -> None:
        code = "import sys; from cutekernels.cli import main; sys.argv = ['cutekernels', 'gpus']; main()"
        with open("/dev/full", "w") as full:
            done = subprocess.run([sys.executable, "-c", code], stdout=full, stderr=subprocess.PIPE, text=True)
        assert (done.returncode, done.stderr) == (1, "No space left on device\n")

    def test_gpus_and_jobs_are_listed(self) -> None:
        found = {row["gpu"]: row for row in json.loads(run("gpus", "--format", "json").stdout)}
        assert found["a100-sxm-80gb"]["alias"] == "a100"
        jobs = {row["job"]: row for row in json.loads(run("jobs", "--format", "json").stdout)}
        assert jobs["demo"]["problems"] == 4
        assert jobs["demo"]["ops"] == "gemm silu_mul"
        assert jobs["grid"]["problems"] > 2000 and "gemm" in jobs["grid"]["ops"].split()

    def test_version(self) -> None:
        assert run("--version").stdout.strip() == f"cutekernels {environment.package_version('cutekernels')}"

    def test_a_wrong_environment_variable_is_one_line_and_misuse(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("CUTEKERNELS_LOG", "loud")
        done = script("doctor")
        assert done.returncode == 2
        assert done.stderr.strip() == "CUTEKERNELS_LOG must be one of debug, info, warning, error; it is 'loud'"

    def test_our_errors_are_one_line_and_exit_code_1(self, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
        def broken() -> None:
            raise StoreError("the database\n  cannot be read")

        monkeypatch.setattr(cli, "app", broken)
        with pytest.raises(SystemExit) as raised:
            cli.main()
        assert raised.value.code == 1
        assert capsys.readouterr().err == "the database cannot be read\n"

    def test_an_installed_copy_says_where_the_benchmarks_are(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        monkeypatch.setattr(cli, "__file__", str(tmp_path / "cutekernels" / "cli.py"))
        result = run("bench", "gemm")
        assert result.exit_code == 1
        assert "python -m bench" in result.stderr


class TestExplain:
    def test_a_table_tells_config_origin_and_what_was_asked(self) -> None:
        result = run("explain", "gemm", "m=4096 n=4096 k=4096", "--gpu", "l40s")
        assert result.exit_code == 0, result.output
        for word in ("tile_m=", "default", "NVIDIA L40S", "nobody tuned the bucket", "roofline"):
            assert word in result.stdout

    def test_json_and_csv_say_the_same(self) -> None:
        words = ("explain", "silu_mul", "rows=16 cols=14336", "--gpu", "rtx5090", "--format")
        (row,) = json.loads(run(*words, "json").stdout)
        (line,) = csv.DictReader(io.StringIO(run(*words, "csv").stdout))
        assert row == line
        assert row["problem"] == "rows=16 cols=14336"
        assert row["origin"] in ("tuned", "nearest", "predicted", "default")

    def test_a_given_config_is_explained_instead(self) -> None:
        (row,) = json.loads(run("explain", "gemm", "m=64 n=64 k=64", "--gpu", "a100", "--format", "json").stdout)
        words = ("explain", "gemm", "m=64 n=64 k=64", "--gpu", "a100", "--config", row["config"], "--format", "json")
        (forced,) = json.loads(run(*words).stdout)
        assert forced["origin"] == "forced"
        assert forced["config"] == row["config"]

    @pytest.mark.parametrize(
        ("words", "said"),
        [
            (("conv", "m=1", "--gpu", "h200"), "no op is called 'conv'. The ops: gemm"),
            (("gemm", "m=1 n=2", "--gpu", "h200"), "needs k"),
            (("gemm", "m=1 n=2 k=3 depth=4", "--gpu", "h200"), "'depth=4' is not a field"),
            (("gemm", "m=8 n=8 k=8", "--gpu", "h300"), "no GPU is called 'h300'"),
            (("gemm", "m=8 n=8 k=8", "--gpu", "h200", "--config", "tile_m=7"), "must be one of"),
        ],
    )
    def test_mistakes_are_our_errors(self, words: tuple[str, ...], said: str) -> None:
        result = run("explain", *words)
        assert isinstance(result.exception, CuteKernelsError)
        assert said in str(result.exception)
        assert result.stdout == ""

    def test_a_mistake_is_one_line_on_stderr(self) -> None:
        done = script("explain", "conv", "m=1", "--gpu", "h200")
        assert (done.returncode, done.stdout) == (2, "")
        assert re.fullmatch(r"no op is called 'conv'\. The ops: gemm(, \w+)+\n", done.stderr)

    def test_a_missing_argument_is_misuse(self) -> None:
        assert run("explain", "gemm").exit_code == 2


def states(findings: list[cli.Finding]) -> dict[str, str]:
    return {f.what: f.state for f in findings}


def nothing_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    """No CUDA device, whatever this machine has."""

    def unknown(name: str) -> Any:
        raise UnknownGpu("no CUDA device is visible")

    monkeypatch.setattr(gpus, "lookup", unknown)


def database() -> cli.Finding:
    return next(f for f in cli.diagnose() if f.what == "database")


class TestDoctor:
    @pytest.fixture(autouse=True)
    def _no_dsl_import(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A stub for the DSL's import of three seconds, which is tested once below."""
        monkeypatch.setattr(cli, "_dsl_import", lambda version: cli.Finding("dsl import", "ok", "not tried"))

    def test_this_machine_is_healthy(self) -> None:
        result = run("doctor", "--format", "json")
        found = {row["what"]: row for row in json.loads(result.stdout)}
        assert result.exit_code == 0, result.stdout
        assert found["torch"]["value"] == environment.package_version("torch")
        assert Path(found["ptxas"]["value"]).is_file()
        assert Path(found["cuobjdump"]["value"]).is_file()
        assert "made on first use" in found["database"]["value"]
        assert not {row["state"] for row in found.values()} - {"ok", "absent"}

    def test_a_table_has_every_finding(self) -> None:
        shown = run("doctor").stdout
        for finding in cli.diagnose():
            assert finding.what in shown

    def test_a_cache_that_others_can_write_is_broken(self) -> None:
        cache = Path(os.environ["CUTEKERNELS_CACHE"])
        cache.mkdir(mode=0o700)
        assert states(cli.diagnose())["cache"] == "ok"
        cache.chmod(0o770)
        result = run("doctor", "--format", "csv")
        assert result.exit_code == 1
        (row,) = [r for r in csv.DictReader(io.StringIO(result.stdout)) if r["what"] == "cache"]
        assert row["state"] == "broken"
        assert "mode 0770" in row["value"]
        assert f"chmod 700 {cache}" in row["remedy"]

    def test_a_cache_of_somebody_else_is_broken(self, monkeypatch: pytest.MonkeyPatch) -> None:
        Path(os.environ["CUTEKERNELS_CACHE"]).mkdir(mode=0o700)
        monkeypatch.setattr(os, "getuid", lambda: 12345)
        assert states(cli.diagnose())["cache"] == "broken"

    def test_a_cache_that_is_a_file_is_broken(self) -> None:
        Path(os.environ["CUTEKERNELS_CACHE"]).write_text("")
        assert states(cli.diagnose())["cache"] == "broken"

    def test_a_database_is_opened_and_counted(self) -> None:
        from cutekernels.db.storage.store import Store

        with Store():
            pass
        finding = database()
        assert finding.state == "ok" and "(0 local winners)" in finding.value

    def test_a_damaged_database_is_broken(self) -> None:
        path = Path(os.environ["CUTEKERNELS_DB"])
        path.write_bytes(b"not a database at all" * 100)
        finding = database()
        assert finding.state == "broken"
        assert "CUTEKERNELS_DB" in finding.remedy
        assert path.exists(), "a doctor looks; it repairs nothing"

    def test_a_database_that_cannot_be_made_is_broken(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "file").touch()
        monkeypatch.setenv("CUTEKERNELS_DB", str(tmp_path / "file" / "tuned.db"))
        finding = database()
        assert finding.state == "broken" and "cannot be made" in finding.value

    def test_another_gpu_of_no_name_is_misuse(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("CUTEKERNELS_GPU_AS", "nonsense")
        result = run("gpus")
        assert result.exit_code == 2 and "CUTEKERNELS_GPU_AS: no GPU is called 'nonsense'" in result.stderr

    def test_an_unreachable_server_is_broken_and_its_password_unsaid(self, monkeypatch: pytest.MonkeyPatch) -> None:
        pytest.importorskip("psycopg")
        monkeypatch.setenv("CUTEKERNELS_DB", "postgresql+psycopg://tuner:hush@127.0.0.1:1/tuned?connect_timeout=2")
        finding = database()
        assert finding.state == "broken"
        assert "hush" not in finding.value + finding.remedy

    def test_packages_and_tools_that_are_missing_or_excluded_are_broken(self, monkeypatch: pytest.MonkeyPatch) -> None:
        version = environment.package_version
        facts = environment.collect() | {"triton": "", "torch": "2.10.1+cu128", "dsl": "4.9.0"}
        other = {"optuna": "", "transformers": "6.0", "typer": "0.20.0rc1"}
        monkeypatch.setattr(environment, "collect", lambda: facts)
        monkeypatch.setattr(environment, "ptxas", lambda: None)
        monkeypatch.setattr(environment, "package_version", lambda name: other.get(name, version(name)))
        found = {f.what: f for f in cli.diagnose() if f.state == "broken"}
        assert found.keys() == {"triton", "torch", "dsl", "optuna", "transformers", "ptxas"}
        assert found["transformers"].remedy == "pip install 'transformers<6,>=5.17'"
        assert found["ptxas"].remedy.endswith(f"triton=={version('triton')}")
        assert installation.excludes("a!=2", "2.0") and not installation.excludes("a!=2", "2.0.1")

    def test_a_driver_without_a_visible_gpu_is_broken(self, monkeypatch: pytest.MonkeyPatch) -> None:
        nothing_visible(monkeypatch)
        assert cli._gpu(Machine()).state == "absent"
        finding = cli._gpu(Machine(driver="580.1"))
        assert finding.state == "broken"
        assert "CUDA_VISIBLE_DEVICES" in finding.remedy

    def test_what_does_not_go_together_is_one_line_with_its_remedy(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """No second line, that no GPU is visible, beside the cause of it."""
        nothing_visible(monkeypatch)
        old = Machine(driver="550.54.15", driver_cuda=Cuda(12, 9), torch="2.13.0", torch_cuda=Cuda(13, 0), dsl=(12, 13))
        monkeypatch.setattr(installation, "this_machine", lambda: old)
        result = run("doctor", "--format", "json")
        assert result.exit_code == 1
        (broken,) = [row for row in json.loads(result.stdout) if row["state"] == "broken"]
        assert broken["what"] == "torch and driver"
        assert "CUDA 13.0" in broken["value"] and "550.54.15" in broken["value"]
        assert "whl/cu126" in broken["remedy"]
        told = {row["what"]: row["value"] for row in json.loads(result.stdout)}
        assert told["driver"] == "550.54.15 (CUDA 12.9)"


class TestDslImport:
    def test_it_works_here(self) -> None:
        assert cli._dsl_import("").state == "ok"

    @pytest.mark.parametrize(
        ("code", "said"),
        [("raise ImportError('no libcuda')", "no libcuda"), ("import os; os.abort()", "exit code -6")],
    )
    def test_an_import_that_fails_or_aborts_is_a_finding(
        self, monkeypatch: pytest.MonkeyPatch, code: str, said: str
    ) -> None:
        monkeypatch.setattr(cli, "_DSL_IMPORT", code)
        finding = cli._dsl_import("4.8.1")
        assert finding.state == "broken"
        assert said in finding.value
        assert shlex.split(finding.remedy)[-1].partition("==")[2] == "4.8.1"
        assert shlex.split(cli._dsl_import("9.9").remedy)[-1].endswith("<4.9,>=4.8.0"), "not what the bounds exclude"

    def test_one_that_hangs_is_a_finding(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(cli, "_DSL_IMPORT", "import time; time.sleep(60)")
        monkeypatch.setattr(cli, "_DSL_IMPORT_DEADLINE_S", 0.5)
        assert "still importing" in cli._dsl_import("").value


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_text_that_stdout_lacks_is_escaped(encoding: str) -> None:
    code = "from cutekernels.cli import ended; ended(lambda: print('\\u03bcs \\u00b5s'))"
    run = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | {"PYTHONIOENCODING": encoding}, capture_output=True, timeout=60
    )
    assert (run.returncode, run.stderr) == (0, b"")
    assert run.stdout == "\u03bcs \u00b5s\n".encode(encoding, "backslashreplace")
