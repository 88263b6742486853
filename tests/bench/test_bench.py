"""Benchmarks without a GPU: suites, rows, contenders, and a whole run on a fake clock."""

from __future__ import annotations

import dataclasses
import json
import lzma
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bench import __main__ as command
from bench import plots, rows, run, workloads
from bench.baselines import Absent, Contender, Inputs
from bench.rows import Row, steepest
from bench.suites import Case
from bench.workloads import gemm as gemm_workload
from cutekernels import dispatch
from cutekernels.gpu import GpuSpec, lookup
from cutekernels.measure import Samples
from tests.command_line import invoke
from tests.db.trials import trial as db_trial

H200 = lookup("h200")
SUITES = [(op, suite) for op in workloads.OPS for suite in workloads.get(op).suites]
STAMP = {"date": "2026-11-21T00:00:00+00:00", "gpu": "h200", "commit": "abc"}
SMALL = Case("gemm", "m=24 n=16 k=32 c=n", "small", 0.5, 2.0)


class Clock:
    """A stand-in for the GPU: counts launches, and reports times of its own."""

    def __init__(self, us: float = 10.0) -> None:
        self.us = us
        self.launched = 0

    def prepare(self, launches: Sequence[Any], least_us: float) -> Any:
        for launch in launches:
            launch()
        self.launched += len(launches)
        return _Round(self.us)

    def cpu_us(self, launch: Any, *, calls: int, rounds: int) -> Samples:
        launch()
        return Samples((1.5,) * rounds)


class _Round:
    launches = 1

    def __init__(self, us: float) -> None:
        self._us = us

    def __call__(self) -> float:
        return self._us


def constant(value: Any) -> Any:
    return lambda: value


def timer(clock: Clock) -> run.Timer:
    return run.Timer(clock.prepare, clock.cpu_us)


def plan(gpu: GpuSpec = H200, **changes: Any) -> run.RunPlan:
    return run.RunPlan("square", gpu, STAMP, rounds=5, device="cpu", warm=True, **changes)


class TestSuites:
    @pytest.mark.parametrize("op", workloads.OPS)
    def test_every_case_poses_a_valid_problem_that_a_default_solves(self, op: str) -> None:
        suites = workloads.get(op).suites
        for suite, dtype in [*((suite, "bf16") for suite in suites), (next(iter(suites)), "fp16")]:
            cases = workloads.cases(op, suite, dtype=dtype)
            assert len({(c.problem, c.alpha, c.beta) for c in cases}) == len({c.label for c in cases}) == len(cases)
            solved = cases[:: max(1, len(cases) // 6)]  # a default takes up to 0.2 s
            for case in cases:
                declared, problem = run.parse_case(case)
                assert getattr(problem, "dtype", dtype) == dtype  # numbers of experts have none
                assert str(problem) == case.problem, "already in canonical form"
                if case in solved:
                    assert declared.why_not(problem, declared.default(problem, H200), H200) is None

    def test_the_suites_are_what_their_names_say(self) -> None:
        assert [c.label for c in workloads.cases("gemm", "square")] == ["512", "1024", "2048", "4096", "8192"]
        assert len(workloads.cases("gemm", "alphabeta")) == 20
        llm = workloads.cases("gemm", "llm")
        assert len(llm) == 2 * 4 * 3
        assert all("b_major=k" in c.problem for c in llm)
        for case in workloads.cases("gemm", "alphabeta"):
            assert ("c=n" in case.problem) == (case.beta != 0)

    def test_match_narrows_and_names_are_checked(self) -> None:
        assert [c.label for c in workloads.cases("gemm", "square", match="4096")] == ["4096"]
        with pytest.raises(
            ValueError,
            match="gemm has no suite 'cube'; it has square, llm, decode, tokens, ",
        ):
            workloads.cases("gemm", "cube")
        with pytest.raises(ValueError, match="no suite for 'conv'"):
            workloads.cases("conv", "square")

    @pytest.mark.parametrize("words", ["", " b_major=k", " c=n", " dtype=fp16"])
    def test_the_call_poses_the_cases_problem(self, words: str) -> None:
        """A row's config is looked up for the same problem as the call it times."""
        from cutekernels.ops.products.dense import GEMM

        case = Case("gemm", f"m=24 n=16 k=32{words}", "x", beta=float("c=n" in words))
        problem = run.parse_case(case)[1]
        i = workloads.get(case.op).inputs(case, problem, "cpu", 0)
        a, b, *c = i.operands
        assert GEMM.problem(i.out, a, b, c[0] if c else None, None, activation="none", accumulate="fp32") == problem


class TestRows:
    def row(self, **changes: Any) -> Row:
        values = {"op": "gemm", "suite": "square", "problem": "m=1 n=1 k=1", "label": "1", "alpha": 1.0, "beta": 0.0}
        return Row(**values | {"contender": "x", "status": "ok", "median_us": 1.0, "stamp": STAMP} | changes)

    def test_rows_survive_their_file(self, tmp_path: Path) -> None:
        some = [self.row(), self.row(status="absent", median_us=None, reason="not installed")]
        path = tmp_path / "h200" / "gemm_square.jsonl"
        rows.write(path, some)
        assert rows.read(path) == some
        header, first, second = map(json.loads, path.read_text().splitlines())
        assert header["common"]["stamp"]["gpu"] == "h200"
        assert header["columns"] == ["status", "reason", "median_us"]
        assert [first, second] == [["ok", "", 1.0], ["absent", "not installed"]]

    def test_a_stamp_stands_once_where_rows_of_one_run_follow_each_other(self, tmp_path: Path) -> None:
        some = [self.row(contender=c, stamp=STAMP | {"commit": c[0]}) for c in ("a1", "a2", "b1")]
        rows.write(tmp_path / "rows.jsonl", some)
        assert rows.read(tmp_path / "rows.jsonl") == some
        assert (tmp_path / "rows.jsonl").read_text().count('"commit"') == 2

    def test_an_absent_peer_has_one_row_of_a_suite(self, tmp_path: Path) -> None:
        path = tmp_path / "rows.jsonl"
        absent = [self.row(label=label, status="absent", median_us=None, reason="not installed") for label in "12"]
        other = self.row(label="2", contender="y", status="absent", median_us=None, reason="not installed")
        timed = [self.row(label=label, contender="z") for label in "12"]
        rows.write(path, [absent[0], timed[0], absent[1], timed[1], other])
        assert rows.read(path) == [absent[0], *timed, other]

    def test_a_reason_may_hold_any_text(self, tmp_path: Path) -> None:
        some = [self.row(status="failed", median_us=None, reason=text) for text in ("a\u2028b\x85c", "\ud800", "d")]
        rows.write(tmp_path / "rows.jsonl", some)
        assert rows.read(tmp_path / "rows.jsonl") == some

    def test_numbers_keep_four_digits(self, tmp_path: Path) -> None:
        rows.write(tmp_path / "rows.jsonl", [self.row(median_us=1234.56, p20_us=0.00123456, sets=123456)])
        (found,) = rows.read(tmp_path / "rows.jsonl")
        assert (found.median_us, found.p20_us, found.sets) == (1235.0, 0.001235, 123456)

    @pytest.mark.parametrize(
        "text",
        [
            "", "[" * 100_000, "[]", '{"common": {}}', '{"common": {"us": 1}, "columns": []}',
            '{"common": {}, "columns": ["op", "op"]}',
        ],
    )  # fmt: skip
    def test_a_file_without_a_header_is_named(self, tmp_path: Path, text: str) -> None:
        (tmp_path / "rows.jsonl").write_text(text)
        with pytest.raises(ValueError, match=r"rows.jsonl:1 is not the header"):
            rows.read(tmp_path / "rows.jsonl")

    def test_every_recorded_file_reads(self) -> None:
        for path in plots.RESULTS.rglob("*.jsonl*"):
            gpu = path.relative_to(plots.RESULTS).parts[0]
            assert {(r.stamp["gpu"], bool(r.stamp["commit"])) for r in rows.read(path)} == {(gpu, True)}, path

    def test_a_later_run_replaces_the_file_and_leaves_nothing_beside_it(self, tmp_path: Path) -> None:
        path = tmp_path / "rows.jsonl"
        rows.write(path, [self.row(), self.row()])
        packed = path.with_name("rows.jsonl.xz")
        packed.write_bytes(lzma.compress(path.read_bytes()))
        assert rows.read(packed) == rows.read(path) and rows.suite_of(packed) == rows.suite_of(path) == "rows"
        assert rows.files(tmp_path) == [path, packed]
        rows.write(path, [self.row(label="2")])
        assert [r.label for r in rows.read(path)] == ["2"]
        assert list(tmp_path.iterdir()) == [path]

    def test_the_steepest_row_is_measured_by_its_neighbours(self) -> None:
        """Per weight; a number of tokens without both neighbours, or with a failed one, is skipped."""
        wide = [self.row(problem=f"m={m} n=2 k=1", median_us=us) for m, us in {1: 5.0, 2: 6.0, 3: 9.0, 4: 9.5}.items()]
        narrow = [self.row(problem=f"m={m} n=1 k=1", median_us=us) for m, us in {8: 1.0, 9: 1.2, 10: 1.0}.items()]
        failed = [self.row(problem=f"m={m} n=3 k=1", median_us=us) for m, us in {1: 1.0, 2: 9.0}.items()]
        failed += [self.row(problem="m=3 n=3 k=1", status="failed", median_us=None, reason="no")]
        found = {r.problem: times for r, times in steepest([*failed, *wide, *reversed(narrow)])}
        assert found == {"m=3 n=2 k=1": pytest.approx(18 / 15.5), "m=9 n=1 k=1": pytest.approx(1.2)}

    def test_an_interrupted_write_keeps_the_old_rows(self, tmp_path: Path) -> None:
        path = tmp_path / "rows.jsonl"
        rows.write(path, [self.row()])

        def broken() -> Any:
            yield self.row(label="new")
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            rows.write(path, broken())
        assert [r.label for r in rows.read(path)] == ["1"]
        assert list(tmp_path.iterdir()) == [path]

    @pytest.mark.parametrize(
        "changes",
        [{"status": "fine"}, {"median_us": None}, {"status": "failed"}, {"status": "failed", "median_us": None}],
    )
    def test_a_row_is_timed_or_says_why_not(self, changes: dict[str, Any]) -> None:
        with pytest.raises(ValueError, match=r"status must|have a time|says why"):
            self.row(**changes)

    @pytest.mark.parametrize("value", ["zz", [1], True])
    def test_a_time_is_a_number(self, value: Any) -> None:
        with pytest.raises(ValueError, match="median_us is a number or null; it is"):
            self.row(median_us=value)

    def test_a_file_that_is_no_text_is_named(self, tmp_path: Path) -> None:
        (tmp_path / "rows.jsonl").write_bytes(b"\xff\xfe")
        with pytest.raises(ValueError, match=r"rows.jsonl:1 is not the header"):
            rows.read(tmp_path / "rows.jsonl")

    def test_a_line_that_is_no_row_is_named(self, tmp_path: Path) -> None:
        path = tmp_path / "rows.jsonl"
        rows.write(path, [self.row()])
        path.write_text(path.read_text() + '["gemm"]\n')
        with pytest.raises(ValueError, match=r"rows.jsonl:3 is not a benchmark row"):
            rows.read(path)


class TestOperands:
    @pytest.mark.parametrize(
        "case", [SMALL, Case("gemm", "m=24 n=16 k=32 b_major=k", "linear"), Case("silu_mul", "rows=4 cols=64", "silu")]
    )
    def test_ours_and_the_plain_peers_agree_with_fp64(self, case: Case) -> None:
        problem = run.parse_case(case)[1]
        i = workloads.get(case.op).inputs(case, problem, "cpu", 0)
        (truth,) = workloads.get(case.op).truth(case, i)
        assert truth.dtype is torch.float64
        peer = next(p for p in workloads.get(case.op).peers if p.name in ("cublas", "eager"))
        for contender in (run.ours("cutekernels"), peer):
            (launch,) = contender.bind(case, [i])
            torch.testing.assert_close(launch().double(), truth, rtol=2e-2, atol=2e-2)

    def test_seeds_differ_and_repeat(self) -> None:
        problem = run.parse_case(SMALL)[1]
        draw = partial(workloads.get("gemm").inputs, SMALL, problem, "cpu")
        assert torch.equal(draw(1).operands[0], draw(1).operands[0])
        assert not torch.equal(draw(1).operands[0], draw(2).operands[0])
        assert draw(1).bytes == 2 * (24 * 32 + 32 * 16 + 24 * 16 * 2)


class TestCase:
    def test_every_contender_has_a_row_and_ours_its_config(self) -> None:
        clock = Clock()
        who = run.contenders(SMALL, plan())
        found = run.run_case(SMALL, plan(), who, timer(clock))
        assert [r.contender for r in found][:3] == ["cublas", "quack (untuned)", "cutekernels"]
        cublas, quack, ours = found[:3]
        assert (ours.status, ours.origin) == ("ok", "default")
        assert "tile_m=" in ours.config
        assert ours.median_us == ours.p20_us == ours.p80_us == 10.0
        flops = 2 * 24 * 16 * 32
        assert ours.tflops == pytest.approx(flops / 10 / 1e6, rel=0.2)
        assert ours.mma_fraction == pytest.approx(ours.tflops / H200.mma_tflops)
        assert 0 < (ours.roofline_fraction or 0) < 1
        assert ours.speedup == ours.speedup_low == 1.0
        assert (ours.cpu_us, ours.rounds, ours.sets, ours.l2) == (1.5, 5, 1, "warm")
        assert ours.error is not None
        assert ours.error <= 1
        assert cublas.error_vs_torch == 1.0
        assert ours.stamp == STAMP
        if quack.status == "absent":
            assert "quack" in quack.reason

    def test_what_goes_wrong_with_one_becomes_its_row(self) -> None:
        def absent(case: Case, sets: Sequence[Inputs]) -> Any:
            raise Absent("not installed")

        def failing(case: Case, sets: Sequence[Inputs]) -> Any:
            raise RuntimeError("no kernel\n  image")

        def lazy(case: Case, sets: Sequence[Inputs]) -> Any:
            return [lambda i=i: i.out for i in sets]  # returns what nobody wrote

        def wrong(case: Case, sets: Sequence[Inputs]) -> Any:
            return [lambda i=i: i.out.copy_(workloads.get("gemm").truth(case, i)[0] * 1.1) for i in sets]

        who = [workloads.get("gemm").peers[0], *(Contender(f.__name__, f) for f in (absent, failing, lazy, wrong))]
        found = {r.contender: r for r in run.run_case(SMALL, plan(), who, timer(Clock()))}
        assert found["cublas"].status == "ok"
        assert (found["absent"].status, found["absent"].reason) == ("absent", "not installed")
        assert (found["failing"].status, found["failing"].reason) == ("failed", "RuntimeError: no kernel image")
        assert found["lazy"].status == "wrong_result"
        assert found["wrong"].status == "wrong_result"
        assert "times the tolerance" in found["wrong"].reason
        assert found["wrong"].median_us is None

    def test_results_in_place_and_several_of_them(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Each contender gets the operands as drawn; one that is only timed is not judged."""

        def draw(case: Case, problem: Any, device: str, seed: int) -> Inputs:
            x = torch.randn(24, 16, generator=torch.Generator().manual_seed(seed))
            return Inputs((x,), (x, torch.empty(24, 16, dtype=torch.int64)), updated=(x,))

        def exact(case: Case, i: Inputs) -> tuple[torch.Tensor, ...]:
            return 2 * i.operands[0].double(), i.operands[0].sign().long()

        def doubling(sign: int, case: Case, sets: Sequence[Inputs]) -> Any:
            def launch(i: Inputs) -> tuple[torch.Tensor, ...]:
                i.results[1].copy_(sign * i.operands[0].sign())
                return i.operands[0].mul_(2), i.results[1]

            return [partial(launch, i) for i in sets]

        toy = dataclasses.replace(workloads.get("gemm"), inputs=draw, truth=exact)
        monkeypatch.setattr(workloads, "get", lambda op: toy)
        who = [Contender("a", partial(doubling, 1)), Contender("b", partial(doubling, 1))]
        who += [Contender("timed only", partial(doubling, -1), judged=False), Contender("wrong", partial(doubling, -1))]
        found = run.run_case(SMALL, plan(), who, timer(Clock()))
        assert [r.status for r in found] == ["ok", "ok", "ok", "wrong_result"]
        assert [r.error for r in found] == [0, 0, None, None]
        assert found[2].gbps is not None

    def test_without_the_baseline_there_is_no_speedup(self) -> None:
        def absent(case: Case, sets: Sequence[Inputs]) -> Any:
            raise Absent("not installed")

        _, ours = run.run_case(SMALL, plan(), [Contender("peer", absent), run.ours("mine")], timer(Clock()))
        assert ours.status == "ok"
        assert ours.speedup is None
        assert ours.error_vs_torch is None

    def test_cold_l2_rotates_inputs(self) -> None:
        tiny = dataclasses.replace(H200, l2_bytes=4096)
        cold = dataclasses.replace(plan(), gpu=tiny, warm=False)
        clock = Clock()
        (row,) = run.run_case(SMALL, cold, [run.ours("mine")], timer(clock))
        assert row.l2 == "cold"
        assert row.sets == clock.launched == 3  # 3 x 4096 bytes over sets of 4096

    def test_fp16_accumulation_is_set_for_the_peer_too_and_reset(self) -> None:
        flags: Any = torch.backends.cuda.matmul
        seen = []

        def peer(case: Case, sets: Sequence[Inputs]) -> Any:
            seen.append(flags.allow_fp16_accumulation)
            raise Absent("seen")

        before = flags.allow_fp16_accumulation
        for words in (" accumulate=fp16", ""):
            case = Case("gemm", f"m=8 n=8 k=8 dtype=fp16{words}", "x")
            run.run_case(case, plan(), [Contender("peer", peer)], timer(Clock()))
        assert seen == [True, False]
        assert flags.allow_fp16_accumulation == before

    def test_a_run_writes_after_each_case(self, tmp_path: Path) -> None:
        path = tmp_path / "gemm_square.jsonl"
        lengths = []
        cases = [SMALL, Case("gemm", "m=8 n=8 k=8", "8")]
        found = run.run(cases, plan(), path, timer(Clock()), lambda some: lengths.append(len(rows.read(path))))
        rows.write(tmp_path / "all.jsonl", found)
        assert rows.read(path) == rows.read(tmp_path / "all.jsonl")
        assert 0 < lengths[0] < lengths[1] == len(rows.read(path))


class TestOurs:
    def test_a_winner_is_taken_and_set_beside_the_default(self, monkeypatch: pytest.MonkeyPatch) -> None:
        op, problem = run.parse_case(SMALL)
        default = op.default(problem, H200)
        other = next(c for c in op.valid(problem, H200) if c != default)
        monkeypatch.setattr(dispatch, "resolve", lambda *_: SimpleNamespace(config=other, origin="tuned"))
        ours = [w for w in run.contenders(SMALL, plan()) if rows.is_ours(w.name)]
        assert [w.name for w in ours] == ["cutekernels", "cutekernels (default)"]
        assert [w.origin for w in ours] == ["tuned", "default"]
        assert [w.config for w in ours] == [str(other), str(default)]

    def test_a_stand_in_has_peers_of_the_same_instructions(self) -> None:
        """Others are absent and say so; ours are configs without warpgroup MMA, and cuBLAS is none of them."""
        stand_in = lookup("h200-as-a100")
        who = run.contenders(SMALL, plan(gpu=stand_in))
        assert who[0].name == "triton, MMA of a warp"
        with pytest.raises(Absent, match="not known to keep to what h200-as-a100 has"):
            next(w for w in who if w.name == "cublas").bind(SMALL, [])
        op, problem = run.parse_case(SMALL)
        vendors = next(c for c in op.valid(problem, H200) if c.vendors)
        for config in (op.Config.parse(w.config) for w in who if rows.is_ours(w.name)):
            assert op.why_not(problem, config, stand_in) is None
        assert "would not keep to what" in str(op.why_not(problem, vendors, stand_in))

    @pytest.mark.parametrize("op", ["attention", "attention_backward", "decode_attention"])
    def test_flash_attention_2_is_the_baseline_of_a_stand_in(self, op: str) -> None:
        case = next(iter(workloads.cases(op, next(iter(workloads.get(op).suites)))))
        first, *others = run.contenders(case, plan(gpu=lookup("h200-as-l40s")))
        assert first.name == "torch sdpa flash"
        assert first.name not in [other.name for other in others]

    def test_an_example_adds_a_contender_that_says_why_it_cannot_scale(self) -> None:
        who = run.contenders(SMALL, plan(example=Path("tensorop_gemm.py")))
        (example,) = [w for w in who if w.name.startswith("nvidia")]
        with pytest.raises(Absent, match="neither alpha nor beta"):
            example.bind(dataclasses.replace(SMALL, alpha=2.0), [])


def _trial(op: Any, problem: Any, config: Any, median_us: float, smem_bytes: int) -> Any:
    return dataclasses.replace(
        db_trial(),
        op=op.name,
        revision=op.revision,
        problem=str(problem.bucket()),
        config=str(config),
        median_us=median_us,
        smem_bytes=smem_bytes,
    )


class TestCommand:
    @pytest.fixture
    def on_the_cpu(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Everything but the GPU: a small case, on the CPU, with a fake clock."""
        monkeypatch.setattr(command, "cases_of", lambda *_, **__: [SMALL])
        monkeypatch.setattr(command, "detect_gpu", lambda stands_for: H200)
        monkeypatch.setattr(run, "Timer", constant(timer(Clock())))
        monkeypatch.setattr(run, "RunPlan", partial(run.RunPlan, device="cpu"))

    def run(self, *words: str) -> Any:
        return invoke(command.app, *words)

    @pytest.mark.parametrize("op", workloads.OPS)
    def test_a_dry_run_lists_every_case_and_writes_nothing(self, op: str, tmp_path: Path) -> None:
        suite = next(iter(workloads.get(op).suites))  # of the others, TestSuites sees the cases
        result = self.run(op, "--suite", suite, "--dry-run", "--out", str(tmp_path))
        assert result.exit_code == 0, result.output
        cases = workloads.cases(op, suite)
        assert f"{op}, {len(cases)} cases: " in result.stderr
        listed = result.stdout.split()  # what is long goes on in a second line
        assert all(case.label.split()[0] in listed and case.problem.split()[0] in listed for case in cases)
        assert list(tmp_path.iterdir()) == []

    def test_a_dry_run_of_ours_alone_lists_no_peer(self) -> None:
        result = self.run("gemm", "--suite", "square", "--alone", "--dry-run")
        assert result.exit_code == 0, result.output
        assert "cublas" not in result.output
        assert "cublas" in self.run("gemm", "--suite", "square", "--dry-run").stderr

    def test_without_a_gpu_nothing_is_measured(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        result = self.run("gemm", "--out", str(tmp_path))
        assert result.exit_code == 1
        assert "no CUDA device is visible" in result.stderr
        assert "--dry-run" in result.stderr
        assert list(tmp_path.iterdir()) == []

    @pytest.mark.parametrize(
        "words",
        [
            ("gemm", "--suite", "cube"),
            ("gemm", "--alone", "--example", "tensorop_gemm.py"),
            ("conv",),
            ("gemm", "--match", "nothing at all"),
            ("gemm", "--dtype", "fp32", "--dry-run"),
            ("gemm", "--accumulate", "fp16", "--dry-run"),
        ],
    )
    def test_misuse(self, words: tuple[str, ...]) -> None:
        result = self.run(*words)
        assert result.exit_code == 2, result.output
        assert result.stderr

    @pytest.mark.usefixtures("on_the_cpu")
    def test_a_whole_run(self, tmp_path: Path) -> None:
        result = self.run("gemm", "--suite", "alphabeta", "--out", str(tmp_path), "--warm", "--commit", "abc123")
        assert result.exit_code == 0, result.output
        path = tmp_path / "gemm_alphabeta_warm.jsonl"
        found = rows.read(path)
        assert {r.stamp["commit"] for r in found} == {"abc123"}
        assert path.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
        ours, theirs = result.stdout.split("published by others, on their GPUs")
        assert "cutekernels" in ours
        assert "L40S" in theirs
        assert "cutekernels" not in theirs

    @pytest.mark.usefixtures("on_the_cpu")
    def test_ours_alone_has_no_speedup(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        """Every number of tokens is timed, and the steepest step is named."""
        cases = [
            dataclasses.replace(SMALL, problem=SMALL.problem.replace("m=24", f"m={m}"), label=f"{m}") for m in (7, 8, 9)
        ]
        assert len({c.problem for c in cases}) == 3
        monkeypatch.setattr(command, "cases_of", lambda *_, **__: cases)
        result = self.run("gemm", "--suite", "tokens", "--alone", "--out", str(tmp_path), "--no-plots")
        assert result.exit_code == 0, result.output
        found = rows.read(tmp_path / "gemm_tokens_alone.jsonl")
        assert all(r.contender.startswith("cutekernels") and r.median_us for r in found)
        assert all(r.speedup is None and r.error_vs_torch is None for r in found)
        assert "8 is the steepest" in result.stdout

    @pytest.mark.usefixtures("on_the_cpu")
    def test_ours_going_wrong_fails_the_run(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        def broken(*_: Any, **__: Any) -> Any:
            raise RuntimeError("illegal address")

        monkeypatch.setattr(gemm_workload, "gemm", broken)
        result = self.run("gemm", "--suite", "square", "--out", str(tmp_path), "--no-plots")
        assert result.exit_code == 1
        assert "one of ours failed" in result.stderr
        assert "illegal address" in result.stdout
        assert not list(tmp_path.glob("*.png"))

    def test_each_thing_measured_has_a_file_of_its_own(self) -> None:
        name = partial(command.run_name, "gemm", "square")
        plain = {"dtype": "bf16", "accumulate": "fp32", "match": "", "warm": False}
        assert name(**plain) == "gemm_square"
        variants = [
            {"dtype": "fp16"},
            {"accumulate": "fp16"},
            {"match": "m=16"},
            {"alone": True},
            {"warm": True},
            {"rest_ms": 50.0},
        ]
        names = [name(**plain | change) for change in variants]
        assert len({*names, name(**plain)}) == len(variants) + 1
        assert not any(set(n) & set("/= ") for n in names)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "case",
    [Case("gemm", "m=512 n=256 k=256 c=n", "x", 2.0, 3.0), Case("silu_mul", "rows=512 cols=1024", "x")],
    ids=lambda case: case.op,
)
def test_a_case_on_the_gpu(case: Case) -> None:
    here = run.RunPlan("square", lookup("auto"), STAMP, rounds=5)
    found = {r.contender: r for r in run.run_case(case, here, run.contenders(case, here), run.Timer())}
    ours = found["cutekernels"]
    assert ours.status == "ok", ours.reason
    assert ours.sets > 1
    assert 0 < (ours.median_us or 0) < 1000
    assert 0 < (ours.cpu_us or 0) < 1000
    assert (ours.error or 0) <= 1
    if case.op == "gemm":
        assert found["cublas"].status == "ok"
        assert ours.speedup is not None
        assert (ours.error_vs_torch or 0) <= 2
