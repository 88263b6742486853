"""The judge of results: the same sums in another order pass, every planted bug fails."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch

from cutekernels import verify
from cutekernels.errors import WrongResult
from cutekernels.ops.attention.op import AttentionProblem, depth

M, N, K = 96, 64, 4096
FLOPS = 2.0 * M * N * K


@pytest.fixture(scope="module", params=["bf16", "fp16"])
def product(request: pytest.FixtureRequest) -> dict[str, Any]:
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[request.param]
    make = torch.Generator().manual_seed(5)
    a = torch.randn(M, K, generator=make).to(dtype)
    b = torch.randn(K, N, generator=make).to(dtype)
    return {"a": a, "b": b, "dtype": dtype, "expected": (a.double() @ b.double()).to(dtype)}


def judge(actual: Any, product: dict[str, Any], accumulate: str = "fp32") -> float:
    return verify.worst_error([actual], [product["expected"]], FLOPS, accumulate)


def kernel(product: dict[str, Any], k_from: int = 0, split: int = 32) -> Any:
    """fp32 accumulation over chunks of k, in the order a kernel would, without the final rounding."""
    out = torch.zeros(M, N)
    for k in range(k_from, K, split):
        out += product["a"][:, k : k + split].float() @ product["b"][k : k + split].float()
    return out


def test_fp32_accumulation_in_another_order_is_right(product: dict[str, Any]) -> None:
    assert judge(kernel(product).to(product["dtype"]), product) <= 1


def test_one_product_left_out_is_wrong(product: dict[str, Any]) -> None:
    assert judge(kernel(product, k_from=1, split=K).to(product["dtype"]), product) > 1.5


def test_an_accumulator_rounded_halfway_is_wrong(product: dict[str, Any]) -> None:
    half = K // 2
    first = (product["a"][:, :half].float() @ product["b"][:half].float()).to(product["dtype"])
    out = first.float() + product["a"][:, half:].float() @ product["b"][half:].float()
    assert judge(out.to(product["dtype"]), product) > 1.5


def test_three_ulps_off_in_one_element_is_wrong(product: dict[str, Any]) -> None:
    bits = product["expected"].clone().view(torch.int16)
    bits[3, 5] += 3
    assert judge(bits.view(product["dtype"]), product) > 1.5


@pytest.mark.parametrize("where", [(0, 0), (-1, -1)])
def test_an_unwritten_element_is_infinitely_wrong(product: dict[str, Any], where: tuple[int, int]) -> None:
    out = product["expected"].clone()
    verify.poison([out])
    value = product["expected"].clone()
    value[where] = out[where]
    assert judge(value, product) == math.inf


def test_swapped_neighbours_are_wrong(product: dict[str, Any]) -> None:
    out = product["expected"].clone()
    out[0, [0, 2]] = out[0, [2, 0]]
    assert judge(out, product) > 10


def test_fp16_accumulation_passes_only_where_it_was_asked_for(product: dict[str, Any]) -> None:
    if product["dtype"] is not torch.float16:
        pytest.skip("fp16 accumulation is for fp16")
    out = torch.zeros(M, N, dtype=torch.float16)
    for k in range(0, K, 16):
        out += (product["a"][:, k : k + 16].float() @ product["b"][k : k + 16].float()).half()
    assert judge(out, product, "fp16") <= 1
    assert judge(out, product, "fp32") > 1.5
    dropped = out - (product["a"][:, :256].float() @ product["b"][:256].float()).half()
    assert judge(dropped, product, "fp16") > 1.5


@pytest.fixture(scope="module")
def attended() -> dict[str, Any]:
    """The output of decode attention and what right kernels make of it, which differ in splits, tiles and scales."""
    rows, keys, head_dim = 1024, 1024, 128
    make = torch.Generator().manual_seed(3)
    k, v = (torch.randn(keys, head_dim, generator=make).bfloat16().float() for _ in range(2))
    q = torch.randn(rows, head_dim, generator=make).bfloat16().float()
    scores = q @ k.T / math.sqrt(head_dim)
    expected = (torch.softmax(scores.double(), -1) @ v.double()).bfloat16()
    results = []
    for splits, shift in itertools.product((1, 2, 4, 8), (0.0, 0.2, 0.4, 0.6, 0.8)):
        parts = scores.view(rows, splits, -1)
        most = parts.amax(-1, keepdim=True)
        p = torch.exp(parts - most - shift)
        sums = torch.einsum("rsk,skd->rsd", p.bfloat16().float(), v.view(splits, -1, head_dim))
        weights = torch.exp(most - most.amax(1, keepdim=True))
        results.append(((sums * weights).sum(1) / (p.sum(-1, keepdim=True) * weights).sum(1)).bfloat16())
    problem = AttentionProblem(rows, 1, keys, 1, 1, head_dim=head_dim)
    return {"expected": expected, "results": results, "depth": depth(problem)}


def judge_attended(actual: Any, attended: dict[str, Any]) -> float:
    return verify.worst_error([actual], [attended["expected"]], 0.0, depth=attended["depth"])


def test_no_right_attention_is_called_wrong(attended: dict[str, Any]) -> None:
    """The worst of 131072 errors lies 4.5 standard deviations out, and rows differ in size."""
    assert max(judge_attended(result, attended) for result in attended["results"]) <= 0.9


def test_a_bias_of_two_ulps_is_wrong(attended: dict[str, Any]) -> None:
    expected, right = attended["expected"], attended["results"][3]
    rms = float(expected.double().square().mean().sqrt())
    assert judge_attended((right.float() + 2 * 2.0**-7 * rms).bfloat16(), attended) > 1.5
    assert judge_attended((right.view(torch.int16) + 2).view(torch.bfloat16), attended) > 1.5
    loud = expected.abs() > 2 * rms
    assert judge_attended(torch.where(loud, (expected.view(torch.int16) + 2).view(torch.bfloat16), right), attended) > 1


def test_the_tolerance_follows_the_extreme_of_as_many_draws_as_there_are_outputs() -> None:
    draws = torch.randn(4_000_000, generator=torch.Generator().manual_seed(1))
    for count in (100, 10_000, 4_000_000):
        worst = float(draws[:count].abs().max())
        assert worst < verify.extreme(count) < worst + 4
        assert math.erfc(verify.extreme(count) / math.sqrt(2)) * count == pytest.approx(1e-6, rel=1e-6)
    small, large = (verify.accumulation_error(torch.ones(1).expand(n), 800) for n in (100, 4_000_000))
    assert large / small == pytest.approx(verify.extreme(4_000_000) / 6)


def test_growth_is_one_ulp_a_step(product: dict[str, Any]) -> None:
    """Neither more nor less: twice the allowance would hide what half of it must allow."""
    ones = torch.ones(1)
    assert verify.accumulation_error(ones, 4096, "fp32") == 4096 / 8 * 2.0**-23
    assert verify.accumulation_error(ones, 4096, "fp16") == 4 * math.sqrt(4096 / 8) * 2.0**-10
    assert verify.accumulation_error(ones, 1, "fp32") == 2.0**-23
    zeros = torch.tensor([[1.0] * 63 + [0.0]])  # an element that cancels shows the allowance itself
    step = verify.accumulation_error(zeros, 4096) * math.sqrt(63 / 64)
    off = zeros.clone()
    off[0, -1] = 1.01 * step
    assert verify.worst_error([off], [zeros], 0.0, depth=4096) > 1
    off[0, -1] = 0.99 * step
    assert verify.worst_error([off], [zeros], 0.0, depth=4096) <= 1


def test_large_rows_have_large_errors_and_small_rows_keep_the_typical_one() -> None:
    expected = torch.ones(64, 64)
    expected[0] *= 100
    expected[:, 0] = 0.0
    step = verify.accumulation_error(expected, 80_000)
    for row, allowed in ((0, 100.0), (5, 12.0)):
        off = expected.clone()
        off[row, 0] = step * allowed
        assert verify.error_ratio(off, expected, step) == pytest.approx(1, rel=0.1)


def test_an_overflow_does_not_excuse_the_others() -> None:
    expected = torch.ones(4, 8).half()
    expected[0, 0] = math.inf
    off = expected.clone()
    off[0, 1] = 2.0
    assert verify.worst_error([expected], [expected], 2.0 * 32 * 4096) == 0
    assert verify.worst_error([off], [expected], 2.0 * 32 * 4096) > 10


def test_overflow_that_the_reference_shares_is_right_and_nan_never() -> None:
    inf = torch.tensor([math.inf, 1.0]).half()
    nan = torch.tensor([math.nan, 1.0]).half()
    assert verify.error_ratio(inf, inf) == 0
    assert verify.error_ratio(-inf, inf) == math.inf
    assert verify.error_ratio(torch.tensor([65504.0, 1.0]).half(), inf) == math.inf
    assert verify.error_ratio(nan, nan) == math.inf


def test_what_no_launch_writes_must_stay_poisoned() -> None:
    expected = torch.tensor([math.nan, 1.0])
    assert verify.error_ratio(expected, expected, partial=True) == 0
    assert verify.error_ratio(torch.tensor([0.0, 1.0]), expected, partial=True) == math.inf, "a stray write"
    assert verify.error_ratio(torch.tensor([math.nan, math.nan]), expected, partial=True) == math.inf
    assert verify.worst_error([expected], [expected], 1.0, partial=True) == 0
    assert verify.worst_error([expected], [expected], 1.0) == math.inf


def test_zeros_subnormals_integers_and_empty() -> None:
    zero = torch.zeros(4, dtype=torch.bfloat16)
    assert verify.error_ratio(zero, zero) == 0
    assert verify.error_ratio(zero + 1e-3, zero) > 1e6
    whole = torch.arange(4)
    assert verify.error_ratio(whole, whole) == 0
    assert verify.error_ratio(whole.flip(0), whole) == math.inf
    verify.poison([whole, None])
    assert int(whole.max()) == torch.iinfo(torch.int64).min
    assert verify.worst_error([torch.empty(0, 3)], [torch.empty(0, 3)], 0.0) == 0
    assert verify.worst_error([zero, None], [None, zero], 0.0) == 0, "nothing to compare"


def test_a_wrong_shape_or_type_says_so() -> None:
    with pytest.raises(WrongResult, match=r"\(2, 3\)"):
        verify.error_ratio(torch.zeros(3, 2), torch.zeros(2, 3))
    with pytest.raises(WrongResult, match="bfloat16"):
        verify.error_ratio(torch.zeros(2), torch.zeros(2).bfloat16())
    with pytest.raises(ValueError, match="fp8"):
        verify.accumulation_error(torch.zeros(2), 4, "fp8")


def test_chunks_change_nothing(monkeypatch: pytest.MonkeyPatch, product: dict[str, Any]) -> None:
    out = kernel(product).to(product["dtype"])
    whole = judge(out, product)
    monkeypatch.setattr(verify, "_CHUNK", 1000)
    assert judge(out, product) == pytest.approx(whole)


@pytest.mark.parametrize("kept", [0, 1 << 28])
def test_a_judge_keeps_what_a_single_judgement_makes(
    monkeypatch: pytest.MonkeyPatch, product: dict[str, Any], kept: int
) -> None:
    """Tolerances are kept, or made anew where they would take too much memory; wrong outputs leave them as they are."""
    monkeypatch.setattr(verify, "_KEPT", kept)
    truth, right = product["expected"], kernel(product).to(product["dtype"])
    wrong = right.clone()
    wrong[0, 0] = math.nan
    one = verify.Judge([truth, None], FLOPS)
    assert (one._references[0]._tolerances is not None) is (kept > 0)  # type: ignore[union-attr]
    for out in (right, wrong, right):
        assert one.worst_error([out, None]) == verify.worst_error([out, None], [truth, None], FLOPS)
    assert one.worst_error([wrong, None]) == math.inf
