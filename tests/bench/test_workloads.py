"""Workloads of norms, embedding and rope: operands pose the case, and contenders agree with the truth."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from bench import run, workloads
from bench.baselines import Absent, Contender, Inputs
from bench.suites import Case

_SIZES: dict[str, dict[str, Any]] = {
    "rms_norm add_rms_norm layer_norm rms_norm_backward layer_norm_backward": {"rows": 24, "cols": 64},
    "silu_mul gelu_mul bias_gelu swiglu": {"rows": 24, "cols": 64},
    "silu_mul_backward gelu_mul_backward bias_gelu_backward": {"rows": 24, "cols": 64},
    "moe_route moe_route_backward moe_gather moe_combine moe_combine_backward": {"tokens": 24},
    "embedding embedding_backward": {"rows": 24, "vocabulary": 32, "cols": 64},
    "rope kv_append": {"seq": 6, "batch": 2},
    "grouped_gemm moe_ffn": {"rows": 24, "n": 64, "k": 32, "experts": 8},
    "rms_norm_linear linear_silu_mul": {"m": 5, "n": 24, "k": 64},
    "attention attention_backward": {"batch": 2, "seq_q": 9, "seq_kv": 9},
    "decode_attention decode_attention_fp8": {"batch": 2, "seq_kv": 33},
    "column_sum": {"parts": 8, "cols": 64},
    "moe_permute": {"pairs": 24},
    "adamw_step": {"elements": 2048},
    "gemm": {"m": 8, "n": 24, "k": 64},
}
SMALL = {op: size for ops, size in _SIZES.items() for op in ops.split()}
GPU_ONLY = {("column_sum", "cutekernels"), ("rms_norm_backward", "torch's kernel")}
# Operands are the contenders', not the op's.
UNLIKE = (
    "rope", "kv_append", "embedding_backward", "swiglu", "moe_gather", "moe_ffn", "rms_norm_linear", "gemm",
    "attention", "attention_backward", "decode_attention", "decode_attention_fp8", "adamw_step",
)  # fmt: skip
PLAIN = ("eager", "eager (complex)", "eager (fp32 chain)", "eager (erf chain)", "torch's kernel", "naive", "cublas")


def small(case: Case) -> tuple[Case, Any, Inputs]:
    case = shrunken(case)
    problem = run.parse_case(case)[1]
    return case, problem, workloads.get(case.op).inputs(case, problem, "cpu", 0)


def shrunken(case: Case) -> Case:
    return dataclasses.replace(case, problem=str(run.parse_case(case)[1].replace(**SMALL[case.op])))


def kind(case: Case) -> tuple[Any, ...]:
    """The rest of a case that is made small; experts of a token are in its label."""
    model = case.label.partition(",")[0] if case.op == "moe_ffn" else ""
    return shrunken(case).problem, case.alpha, case.beta, model


def who(op: str) -> list[Contender]:
    plain = [peer for peer in workloads.get(op).peers if peer.name in PLAIN]
    return [c for c in (*plain, run.ours("cutekernels")) if (op, c.name) not in GPU_ONLY]


@pytest.mark.parametrize(
    ("op", "suite"),
    [(op, s) for op in SMALL for s in workloads.get(op).suites if s != "headtohead"],  # cases of another suite
)
def test_contenders_agree_with_the_truth(op: str, suite: str) -> None:
    cases = workloads.cases(op, suite, dtype="fp16")
    took_part = set()
    for case in {kind(c): c for c in cases}.values():
        for contender in who(op):
            shrunk, _, i = small(case)
            exact = workloads.get(op).truth(shrunk, i)
            for t in i.results:
                if t.is_floating_point():
                    t.fill_(float("nan"))
            try:
                written = contender.bind(shrunk, [i])[0]()
            except Absent:
                continue
            took_part.add(contender.name)
            for result, value in zip(written if isinstance(written, tuple) else (written,), exact, strict=True):
                torch.testing.assert_close(result.double(), value.double(), rtol=1e-2, atol=2e-2)
    assert took_part >= {p.name for p in who(op)} & {"eager", "cutekernels"}


def test_each_baseline_in_others_words_takes_part_in_their_rows() -> None:
    for op, suite, name in (
        ("rope", "reference", "eager (complex)"),
        ("silu_mul", "published", "eager (fp32 chain)"),
        ("bias_gelu", "published", "eager (erf chain)"),
        ("rms_norm", "reference", "torch's kernel"),
    ):
        (peer,) = [p for p in workloads.get(op).peers if p.name == name]
        for case in workloads.cases(op, suite, dtype="fp16"):
            shrunk, _, i = small(case)
            assert len(peer.bind(shrunk, [i])) == 1


def test_a_norm_of_a_sum_is_held_against_the_rounded_sum() -> None:
    case, _, i = small(workloads.cases("add_rms_norm", "llm", dtype="fp16")[0])
    y, u = workloads.get(case.op).truth(case, i)
    x, residual, weight = i.operands
    assert torch.equal(u, (x + residual).double())
    torch.testing.assert_close(y, torch.nn.functional.rms_norm(u, (64,), weight.double(), 1e-6))


@pytest.mark.parametrize("op", [op for op in SMALL if op not in UNLIKE])
def test_operands_pose_the_case(op: str) -> None:
    """A row's config is looked up for the same problem as the call it times."""
    for suite in workloads.get(op).suites:
        case, problem, i = small(workloads.cases(op, suite, dtype="fp16")[0])
        declared, _ = run.parse_case(case)
        options = {name: getattr(problem, name) for name in declared.options if hasattr(problem, name)}
        missing = [None] * (len(declared.inputs) - len(i.operands))
        assert declared.problem(*i.results, *i.operands, *missing, **options) == problem


def test_an_embedding_reads_some_rows_of_one_table() -> None:
    _, _, first = small(workloads.cases("embedding", "llm")[0])
    _, _, second = small(workloads.cases("embedding", "llm")[0])
    assert first.operands[1] is second.operands[1]
    assert first.bytes == 24 * 8 + 2 * 24 * 64 * 2


@pytest.mark.parametrize("op", ["grouped_gemm", "moe_ffn"])
def test_few_tokens_read_few_experts_of_one_set_of_weights(op: str) -> None:
    case = Case(op, "rows=8 n=64 k=32 experts=128", "qwen3-30b-a3b, 1 tokens")
    problem = run.parse_case(case)[1]
    first, second = (workloads.get(op).inputs(case, problem, "cpu", seed) for seed in (0, 1))
    weights = [t for t in first.operands if t.dim() == 3]
    assert weights and all(any(t is o for o in second.operands) for t in weights)
    assert not torch.equal(first.operands[0], second.operands[0])
    assert first.bytes == second.bytes == int(workloads.work(case).bytes)
    assert first.bytes < sum(t.nbytes for t in weights) / 8, "8 of 128 experts"


def test_a_chain_states_its_own_work_and_poses_the_problem_of_one_op() -> None:
    case = next(c for c in workloads.cases("swiglu", "published", dtype="fp16") if c.label == "32x512, hidden 4096")
    declared, problem = workloads.parse_case(case)
    assert declared.name == "silu_mul"
    work = workloads.work(case)
    assert work.flops == 6 * 16384 * 4096 * 6912
    assert work.bytes == 2 * (2 * 16384 * 4096 + 3 * 4096 * 6912)
    silu = dataclasses.replace(case, op="silu_mul")
    assert workloads.work(silu) == declared.work(problem)
