"""``embedding``: kernels interpreted and compiled, the declaration, the CPU path; and on a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from cutekernels import embedding
from cutekernels.errors import UnsupportedProblem
from cutekernels.ops.embedding.op import EMBEDDING, EmbeddingProblem
from tests.embedding import cases as embedding_cases
from tests.embedding.cases import CASES, KINDS, OPS, PLANTED, error_ratio, gradient, laid
from tests.interpreted import kernel_tests, of_each_dtype
from tests.on_gpu import computed, drawn, needs_memory
from tests.refusals import Calls, refused

# ---- kernels, interpreted and compiled ------------------------------------------------------------------


interpreted, test_kernel_numerics, test_a_planted_bug_is_caught = kernel_tests(embedding_cases.__file__, CASES, PLANTED)


# ---- the declaration ------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["rows", "strided"])
def test_variants_share_the_table(layout: str) -> None:
    problem = EmbeddingProblem.parse(f"rows=40 vocabulary=50 cols=128 layout={layout}")
    args = EMBEDDING.sample(problem, "cpu", 3)
    ids, table = EMBEDDING.variant(problem, args, 4)
    assert table is args[1] and not torch.equal(ids, args[0]) and 0 <= int(ids.min()) <= int(ids.max()) < 50
    assert EMBEDDING.problem(*EMBEDDING.outputs(problem, ids, table), ids, table) == problem


def test_a_problem_too_large() -> None:
    with pytest.raises(UnsupportedProblem, match="split the call"):
        EmbeddingProblem(1 << 31, 5, 5)


# ---- the function, on the CPU ---------------------------------------------------------------------------


@of_each_dtype
@pytest.mark.parametrize("shape", [(), (7,), (2, 3), (0,), (2, 0, 3)], ids=str)
def test_cpu_tensors_run_the_reference(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    ids, table = torch.randint(0, 9, shape), torch.randn(9, 5).to(dtype)
    for given_ids in (ids, ids.int()):
        assert torch.equal(embedding(given_ids, table), torch.nn.functional.embedding(ids, table))


@refused
def test_refusals_say_the_rule() -> Calls:
    ids, table = torch.tensor([1, 4]), torch.randn(4, 3)
    return {
        "ids 1 to 4 leave a table of 4 rows": lambda: embedding(ids, table),
        "ids -1 to 1": lambda: embedding(torch.tensor([1, -1]), table),
        "ids in int64 or int32": lambda: embedding(ids.float(), table),
        r"table \(vocabulary, cols\)": lambda: embedding(ids, table[0]),
        "takes bfloat16": lambda: embedding(ids, table.long()),
        "one device": lambda: embedding(ids, table.to("meta")),
    }


def test_gradients() -> None:
    ids, table = torch.tensor([[1, 0, 1], [4, 1, 4]]), torch.randn(6, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda t: embedding(ids, t), (table,))
    (grad,) = torch.autograd.grad(embedding(ids, table).sum(), table, create_graph=True)
    assert grad[5].eq(0).all()
    (grad,) = torch.autograd.grad(embedding(torch.tensor(2), table).sum(), table)
    assert grad.sum(1).tolist() == [0, 0, 3, 0, 0, 0]


# ---- on a GPU -------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize(("op", "text"), [(op, text) for op in OPS.values() for text in op.suite], ids=str)
def test_every_suite_with_default_and_random_configs(op: Any, text: str) -> None:
    problem = EmbeddingProblem.parse(text)
    args = op.sample(problem, "cuda", 11)
    (expected,) = op.reference(problem, *args)
    for config in drawn(op, problem, 4, text):
        (out,) = computed(op, problem, config, args)
        if op is EMBEDDING:
            assert torch.equal(out, expected), config
        else:
            ids = torch.empty(problem.rows, dtype=torch.long, device="cuda")
            ids[args[1]] = torch.searchsorted(args[2], torch.arange(problem.rows, device="cuda"), right=True) - 1
            assert error_ratio(out, *gradient(ids, args[0], problem.vocabulary), 64) <= 1, config


@pytest.mark.gpu
def test_any_strides_and_ids_outside_of_the_table() -> None:
    for kind in KINDS:
        table = laid(kind, 50, 130, torch.bfloat16).cuda()
        if kind == "transposed":
            table = table.t().contiguous().t()
        ids = torch.randint(0, 50, (7, 9), device="cuda")
        assert torch.equal(embedding(ids.t(), table), table[ids.t()])
        ids[0, 0], ids[3, 3] = -1, 1 << 50
        out = embedding(ids, table)
        assert out[0, 0].isnan().all()
        assert out[3, 3].isnan().all()
        assert torch.equal(out[1], table[ids[1]])
    assert embedding(torch.empty(0, 3, dtype=torch.long, device="cuda"), table).shape == (0, 3, 130)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_gradients_on_a_gpu_are_right_and_always_the_same(dtype: torch.dtype) -> None:
    ids = torch.randint(0, 40, (30, 50), device="cuda")
    ids[:20] = 3  # one id many times
    table = torch.randn(41, 200, device="cuda", dtype=dtype, requires_grad=True)
    dout = torch.randn(30, 50, 200, device="cuda", dtype=dtype)
    found = [torch.autograd.grad(embedding(ids, table), table, dout)[0] for _ in range(3)]
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])
    assert error_ratio(found[0], *gradient(ids.reshape(-1), dout.reshape(-1, 200), 41), 1100) <= 1
    expanded = torch.autograd.grad(embedding(ids, table).sum(), table)[0]
    assert torch.equal(expanded[40], torch.zeros_like(expanded[40]))


@pytest.mark.gpu
@pytest.mark.slow
def test_more_than_two_billion_elements() -> None:
    needs_memory(24)
    table = torch.randn(140_000, 16_384, device="cuda", dtype=torch.bfloat16)
    ids = torch.randint(0, 140_000, (150_000,), device="cuda")
    out = embedding(ids, table)
    for part in (slice(0, 100), slice(131_000, 131_200), slice(149_900, None)):
        assert torch.equal(out[part], table[ids[part]])
