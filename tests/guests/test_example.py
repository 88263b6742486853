"""The example's fused MoE: right in Triton's interpreter, compiled ahead for a GPU that is not here, well described."""

from __future__ import annotations

import json
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from typer.testing import CliRunner

from cutekernels import cli, guests, verify
from cutekernels import gpu as gpus
from cutekernels.autotune import job, runtime
from cutekernels.autotune.run import tune
from cutekernels.autotune.runtime import LocalRuntime, Spares
from cutekernels.autotune.space import space
from cutekernels.autotune.turns import Turns
from cutekernels.db.store import Store
from cutekernels.errors import CompileError, UnsupportedProblem
from cutekernels.guests import triton_ahead
from cutekernels.guests.block_fp8 import BlockFp8Linear, BlockFp8Problem
from cutekernels.guests.fused_moe import FusedMoe, FusedMoeConfig, FusedMoeProblem
from tests.interpreted import kernel_tests

ROOT = Path(__file__).parents[2]
H200, RTX5090 = gpus.lookup("h200"), gpus.lookup("rtx5090")
SMALL = "BLOCK_SIZE_M=16 BLOCK_SIZE_N=32 BLOCK_SIZE_K=32 GROUP_SIZE_M=8 num_warps=4 num_stages=3"
CASES: dict[str, dict[str, Any]] = {
    "one token": {"problem": "m=1 experts=5 n=32 k=64 top_k=2 dtype=fp16"},
    "ragged extents": {"problem": "m=37 experts=6 n=40 k=72 top_k=3 dtype=fp16", "config": SMALL},
    "all to one": {"problem": "m=20 experts=4 n=32 k=32 top_k=1 dtype=fp16", "ids": 3, "config": SMALL},
    "a power of two": {"problem": "m=9 experts=8 n=32 k=32 top_k=8 dtype=fp16"},
}
PLANTED: dict[str, dict[str, Any]] = {
    "experts": CASES["ragged extents"] | {"planted": "experts"},
    "place": CASES["all to one"] | {"planted": "place"},
}
interpreted, test_kernel_numerics, test_a_planted_bug_is_caught = kernel_tests(
    str(Path(__file__).with_name("cases.py")), CASES, PLANTED
)

QWEN = FusedMoeProblem.parse("m=64 experts=128 n=768 k=2048 top_k=8")


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FusedMoe:
    monkeypatch.syspath_prepend(str(ROOT))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    loaded = guests.load("examples.fused_moe:fused_moe")
    assert isinstance(loaded, FusedMoe)
    return loaded


def test_what_is_compiled_ahead_is_what_a_launch_finds(example: FusedMoe, tmp_path: Path) -> None:
    """Launches of another number of tokens, their kernels' arguments real tensors, compile no product again."""
    from examples import fused_moe

    config = example.default(QWEN, H200)
    facts = example.compile(QWEN, config, H200)
    assert 0 < facts.registers <= 255 and facts.smem_bytes > 0
    ahead = products(tmp_path)
    assert ahead == 2
    small = QWEN.replace(m=3, experts=9)
    args = example.sample(small, "cpu", 0)
    launching = mock.patch.object(
        type(fused_moe.experts), "__getitem__", lambda kernel, grid: partial(launched, kernel)
    )
    with launching:
        fused_moe.experts.device_caches.clear()
        with triton_ahead.target(H200):
            example.call(small, config, *example.outputs(small, *args), *args)
    assert products(tmp_path) == ahead


def launched(kernel: Any, *args: Any, **options: Any) -> Any:
    """A launch up to the point where it needs a GPU."""
    return kernel.run(*args, grid=(1,), warmup=True, **options)


def products(folder: Path) -> int:
    """Kernels called ``experts`` in Triton's cache."""
    return sum(file.name == "experts.cubin" for file in (folder / "triton").rglob("*.cubin"))


@pytest.mark.slow
def test_it_is_tuned_and_exported_whole(example: FusedMoe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real compilers, for an H200, beside a measuring process on the CPU, in Triton's interpreter."""
    monkeypatch.setattr(gpus, "detect", lambda device=None: H200)
    monkeypatch.setattr(runtime, "WORKER_TARGET", "tests.guests.toy:answer_interpreted")
    db, problem = str(tmp_path / "tuned.db"), FusedMoeProblem.parse("m=2 experts=3 n=32 k=32 top_k=2 dtype=fp16")
    with LocalRuntime(1, spares=Spares(0, {}, Turns())) as machine:
        report = tune(job.Job("moe", (job.Task(example, problem, 3),)), db=db, runtime=machine)
    assert report.ok, report.as_json()
    with Store(db) as store:
        rows = store.trials(op=example.name)
    assert len({t.config for t in rows}) == 3 and {t.status for t in rows} == {"ok"}
    assert all(t.registers and t.smem_bytes for t in rows), "facts of the compiler"
    words = ["db", "export", str(tmp_path / "tables"), "--format", "sglang", "--op", example.name, "--db", db]
    assert CliRunner().invoke(cli.app, [*words, "--device-name", "NVIDIA H200"]).exit_code == 0
    (table,) = (tmp_path / "tables").rglob("*H200.json")
    (winner,) = (task.winner for task in report.tasks)
    assert winner is not None
    assert json.loads(table.read_text()) == {"2": FusedMoeConfig.parse(winner.config).as_dict()}


def test_a_config_that_triton_refuses_is_its_own_verdict(example: FusedMoe) -> None:
    def refused() -> Any:
        from triton.runtime.errors import PTXASError

        raise PTXASError("no such instruction")

    with pytest.raises(CompileError, match="sm_90a: PTXASError"):
        triton_ahead.facts(H200, [refused])


def test_its_job_tunes_the_batch_sizes_of_the_engines_tables(example: FusedMoe) -> None:
    found = job.load(ROOT / "examples" / "fused_moe.toml", guests=["examples.fused_moe:fused_moe"])
    assert [task.problem.m for task in found.tasks][::6] == [1, 32, 512]  # type: ignore[attr-defined]
    assert len(found.tasks) == 18 and {task.op for task in found.tasks} == {example}


@pytest.mark.parametrize("text", [*FusedMoe.suite, "m=7 experts=8 n=14336 k=4096 top_k=2"])
@pytest.mark.parametrize("spec", [H200, RTX5090], ids=str)
def test_the_moes_space(text: str, spec: gpus.GpuSpec) -> None:
    moe = guests.load("cutekernels.guests.vllm:fused_moe")
    problem = FusedMoeProblem.parse(text)
    default = moe.default(problem, spec)
    assert moe.why_not(problem, default, spec) is None
    found = space(moe, problem, spec)
    assert default in found.valid and len(found.valid) > 50
    assert all((problem.block_k or 256) >= c.BLOCK_SIZE_K for c in found.valid)
    shapes = Counter((c.BLOCK_SIZE_M, c.BLOCK_SIZE_N, c.BLOCK_SIZE_K) for c in found.openers([]))
    assert shapes.most_common(1)[0][1] == 1, "the first candidates are of different tiles"
    best = min(found.estimates_us)
    assert moe.work(problem).floor_us(spec) <= best <= moe.estimate_us(problem, default, spec)


@pytest.mark.parametrize(
    ("m", "vllm", "sglang"),  # vLLM since 0.17; SGLang, and vLLM before
    [
        (8, (16, 64, 128, 1, 4, 4), (16, 32, 64, 1, 4, 3)),
        (64, (32, 64, 128, 1, 4, 3), (16, 32, 64, 1, 4, 3)),
        (129, (64, 128, 64, 1, 8, 3), (64, 64, 32, 8, 4, 3)),
        (16512, (128, 128, 64, 16, 8, 3), (64, 64, 32, 8, 4, 3)),
    ],
)
def test_a_tie_keeps_what_the_engine_runs_without_a_table(
    m: int, vllm: tuple[int, ...], sglang: tuple[int, ...]
) -> None:
    problem = FusedMoeProblem(m, 128, 768, 2048, 8)
    for engine, config in (("vllm", vllm), ("sglang", sglang)):
        moe = guests.load(f"cutekernels.guests.{engine}:fused_moe")
        assert moe.default(problem, H200) == FusedMoeConfig(*config)
        assert moe.why_not(problem, moe.default(problem, H200), H200) is None
    fp8 = problem.replace(dtype="fp8_w8a8", block_n=128, block_k=128)
    products = [guests.load(f"cutekernels.guests.{engine}:block_fp8_linear") for engine in ("vllm", "sglang")]
    linear = BlockFp8Problem(m, 4096, 7168)
    assert [p.default(linear, H200).num_stages for p in products] == [2, 3]
    in_blocks = {
        m: guests.load("cutekernels.guests.vllm:fused_moe").default(fp8.replace(m=m), H200) for m in (16, 17, 65)
    }
    assert [(c.BLOCK_SIZE_M, c.GROUP_SIZE_M) for c in in_blocks.values()] == [(16, 1), (16, 32), (64, 32)]


def test_problems_that_are_none() -> None:
    for text, why in (
        ("m=1 experts=4 n=8 k=8 top_k=5", "top_k is from 1"),
        ("m=1 experts=4 n=8 k=8 top_k=2 dtype=fp8_w8a8", "comes with block_n and block_k"),
        ("m=1 experts=4 n=8 k=8 top_k=2 block_n=128 block_k=128", "no other dtype does"),
        ("m=1 experts=4 n=8 k=8 top_k=2 block_n=128", "no other dtype does"),
        ("m=0 experts=4 n=8 k=8 top_k=2", "at least 1"),
        ("m=1 experts=4 n=192 k=256 top_k=2 dtype=fp8_w8a8 block_n=64 block_k=128", "n and k are whole blocks"),
    ):
        with pytest.raises(UnsupportedProblem, match=why):
            FusedMoeProblem.parse(text)
    with pytest.raises(UnsupportedProblem, match="whole blocks of block_k=128"):
        BlockFp8Problem.parse("m=1 n=128 k=200")


def test_references_of_fp8_know_their_scales() -> None:
    """A plain torch loop within the tolerance; one scale that is off by half is outside."""
    moe = guests.load("cutekernels.guests.vllm:fused_moe")
    problem = FusedMoeProblem.parse("m=9 experts=4 n=128 k=256 top_k=2 dtype=fp8_w8a8 block_n=128 block_k=128")
    args = moe.sample(problem, "cpu", 0)
    (expected,) = moe.reference(problem, *args)
    work = moe.work(problem)
    x, w1, w2, weights, ids, s1, s2 = args
    s1_off = s1.clone()
    s1_off[:, 0] *= 1.5
    off = moe.reference(problem, x, w1, w2, weights, ids, s1_off, s2)
    coarse = moe.reference(problem, x.to(torch.float8_e4m3fn).to(x.dtype), *args[1:])
    assert verify.worst_error(coarse, (expected,), work.flops, depth=work.depth) <= 1
    assert verify.worst_error(off, (expected,), work.flops, depth=work.depth) > 1


def test_the_block_fp8_product() -> None:
    linear = guests.load("cutekernels.guests.sglang:block_fp8_linear")
    assert isinstance(linear, BlockFp8Linear)
    problem = BlockFp8Problem.parse("m=3 n=192 k=256")
    x, w, sx, sw = args = linear.sample(problem, "cpu", 0)
    assert (sx.shape, sw.shape) == ((3, 2), (2, 2))
    work, (expected,) = linear.work(problem), linear.reference(problem, *args)
    whole = (x.float() * sx.repeat_interleave(128, 1)) @ (
        w.float() * sw.repeat_interleave(128, 0)[:192].repeat_interleave(128, 1)
    ).T
    assert verify.worst_error((whole.bfloat16(),), (expected,), work.flops, depth=work.depth) <= 1
    half = (x[:, :128].float() * sx[:, :1]) @ (w[:, :128].float() * sw.repeat_interleave(128, 0)[:192, :1]).T
    assert verify.worst_error((half.bfloat16(),), (expected,), work.flops, depth=work.depth) > 1
    for spec in (H200, RTX5090):
        assert linear.why_not(problem, linear.default(problem, spec), spec) is None
        assert len(list(linear.valid(problem, spec))) > 20
    assert FusedMoeConfig is linear.Config
