"""The judge of results: the same sums in another order pass, every planted bug fails."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from cutekernels import verify
from cutekernels.errors import WrongResult

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


def test_overflow_that_the_reference_shares_is_right_and_nan_never() -> None:
    inf = torch.tensor([math.inf, 1.0]).half()
    nan = torch.tensor([math.nan, 1.0]).half()
    assert verify.error_ratio(inf, inf) == 0
    assert verify.error_ratio(-inf, inf) == math.inf
    assert verify.error_ratio(torch.tensor([65504.0, 1.0]).half(), inf) == math.inf
    assert verify.error_ratio(nan, nan) == math.inf


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
