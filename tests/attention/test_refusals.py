"""Bad calls of attention's public functions: each is refused by an error of this package, which names what is wrong."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from cutekernels import KVCache
from cutekernels.errors import InvalidConfig, UnsupportedProblem
from cutekernels.ops.attention.api import attention, decode_attention
from cutekernels.ops.kv_append.api import kv_append

BF16 = torch.bfloat16


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def prefill() -> dict[str, Any]:
    return {name: torch.randn(2, 8, heads, 16, dtype=BF16) for name, heads in (("q", 4), ("k", 2), ("v", 2))}


def packed() -> dict[str, Any]:
    tensors = {name: t.flatten(0, 1) for name, t in prefill().items()}
    return tensors | {"cu_seqlens_q": ints(0, 7, 16), "cu_seqlens_kv": ints(0, 9, 16)}


def decoding() -> dict[str, Any]:
    caches = {name: torch.randn(6, 16, 2, 16, dtype=BF16) for name in ("k_cache", "v_cache")}
    return {
        "q": torch.randn(2, 2, 4, 16, dtype=BF16),
        **caches,
        "cache_seqlens": ints(40, 17),
        "page_table": ints(0, 1, 2, 3, 4, 5).view(2, 3),
    }


def appending() -> dict[str, Any]:
    angles = torch.rand(32, 8)
    return {
        "k": torch.randn(2, 5, 2, 16),
        "v": torch.randn(2, 5, 2, 16),
        "k_cache": torch.zeros(6, 16, 2, 16),
        "v_cache": torch.zeros(6, 16, 2, 16),
        "state": torch.zeros(3, 2, dtype=torch.int32),
        "page_table": ints(0, 1, 2, 3, 4, 5).view(2, 3),
        "counts": ints(1, 2),
        "q": torch.randn(2, 5, 4, 16),
        "cos": angles.cos(),
        "sin": angles.sin(),
    }


def room() -> dict[str, Any]:
    return {"batch": 2, "room": 64, "heads": 2, "head_dim": 16, "device": "cpu"}


def pooled() -> KVCache:
    return KVCache.paged(**room(), pages=3)


def values(function: Any, given: Callable[[], Any], op: str, **wrong: list[Any]) -> Iterator[Any]:
    yield from (pytest.param(function, given, op, name, bad, id=f"{op}-{name}") for name, bad in wrong.items())


NAN, INF = math.nan, math.inf
NUMBERS = [0.0, -1.0, NAN, INF, -INF, True, "1", [1.0], 1j, torch.ones(2)]
SIDES: list[Any] = [
    3, "ab", (1,), (1, 2, 3), (0.9, 0.9), (0.9, None), (None, 0.5), (True, None), (-1, 0), (0, -2), (2**30, None),
    ("1", None), (NAN, None), ([1], None), (torch.tensor(0.5), None), {},
]  # fmt: skip
LEFTS = [3, "ab", (1,), (1, 2, 3), (0.9, None), (True, None), (-1, None), (3, 1), (3, 0.5), (3, False), ("1", None)]
FLAGS = [1, "yes", [], None, 0.0]
CONFIGS = [3, [], {}, complex(1)]
SIZES = [-1, 1.5, "2", None, True]

CALLS = [
    *values(
        attention, prefill, "attention",
        window=SIDES, scale=NUMBERS, softcap=NUMBERS, causal=FLAGS, return_lse=FLAGS, config=CONFIGS,
    ),
    *values(
        decode_attention, decoding, "decode",
        window=LEFTS, scale=NUMBERS, softcap=NUMBERS, return_lse=FLAGS, config=CONFIGS,
    ),
    *values(kv_append, appending, "kv_append", interleaved=FLAGS, config=CONFIGS),
    *values(
        KVCache.contiguous, room, "contiguous",
        batch=SIZES, room=SIZES, heads=[0, *SIZES], head_dim=[0, *SIZES],
        dtype=[None, "bf16", torch.int32, torch.complex64], device=["nowhere", 1.5, []],
    ),
    *values(
        KVCache.paged, room, "paged",
        batch=SIZES, room=SIZES, heads=[0, *SIZES], head_dim=[0, *SIZES], dtype=[None, "bf16", torch.int32],
        device=["nowhere", 1.5], page_size=[0, 1, 17, 16.0, None, "16", True], pages=[-1, 1.5, "2", True],
        page_table=[[[0]], 3, torch.zeros(2, 4), torch.zeros(2, 3, dtype=torch.int32)],
    ),
    *values(lambda tokens: pooled().reserve(tokens), dict, "reserve", tokens=[
        -1, 65, 1.5, "2", None, True, [1], [1, 2, 3], [1, "2"], [1.0, 2], [1, None], torch.ones(2), 64,
    ]),
    *values(lambda sequences: pooled()[sequences], dict, "getitem", sequences=[
        1.5, "0", None, [0], (0, 1), slice(0, 2, 2), slice(None, None, -1), True, slice("a", None),
    ]),
]  # fmt: skip


@pytest.mark.parametrize(("function", "given", "op", "name", "bad"), CALLS)
def test_bad_values_are_refused_by_rule_value_and_remedy(
    function: Any, given: Callable[[], Any], op: str, name: str, bad: list[Any]
) -> None:
    for value in bad:
        with pytest.raises((UnsupportedProblem, InvalidConfig)) as refusal:
            function(**given() | {name: value})
        message = str(refusal.value)
        assert name.partition("_")[0] in message or op in message, message


@pytest.mark.parametrize("option", ["scale", "softcap"])
def test_tensors_are_no_numbers(option: str) -> None:
    for grad in (False, True):
        with pytest.raises(
            UnsupportedProblem, match=rf"{option} must be a number, and has no gradient.*: pass its item"
        ):
            attention(**prefill() | {option: torch.tensor(0.5, requires_grad=grad)})


def test_an_endless_number_is_not_written_out() -> None:
    with pytest.raises(UnsupportedProblem, match="scale must be a number; it is an int of 16610 bits"):
        attention(**prefill(), scale=10**5000)


@pytest.mark.parametrize("check", ["x", 1, 0, None])
@pytest.mark.parametrize(("function", "given"), [(attention, packed), (decode_attention, decoding)])
def test_check_is_a_bool(function: Any, given: Callable[[], Any], check: Any) -> None:
    with pytest.raises(UnsupportedProblem, match="takes check as a bool"):
        function(**given(), check=check)
