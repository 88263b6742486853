"""Bad calls of attention's public functions: each is refused by an error of this package, which names what is wrong."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import pytest
import torch

pytest.importorskip("triton")

from cutekernels import KVCache
from cutekernels.errors import InvalidConfig, UnsupportedProblem
from cutekernels.ops.attention.api import attention
from cutekernels.ops.attention.decode_api import decode_attention
from cutekernels.ops.kv_append.api import kv_append

BF16 = torch.bfloat16

Change = Callable[[Any], Any]
NO_TENSOR: dict[str, Change] = {
    "none": lambda t: None,
    "list": lambda t: t.tolist(),
    "numpy": lambda t: numpy.zeros(tuple(t.shape)),
    "number": lambda t: 3,
    "text": lambda t: "q",
    "sparse": lambda t: t.to_sparse(),
}
MISFIT: dict[str, Change] = {
    "0-d": lambda t: t.flatten()[0],
    "1-d": lambda t: t.flatten() if t.dim() != 1 else t[None],
    "5-d": lambda t: t[(None,) * (5 - t.dim())],
    "shorter": lambda t: t[..., :-1] if t.dim() != 2 else t[:-1],
    "complex": lambda t: t.to(torch.complex64),
    "uint8": lambda t: t.to(torch.uint8),
    "meta": lambda t: t.to("meta"),
}
FP8: dict[str, Change] = {"fp8": lambda t: t.to(torch.float8_e4m3fn)}


OPTIONAL = ("mask", "cu_seqlens_q", "cu_seqlens_kv", "sinks", "out", "page_table", "counts")


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def prefill() -> dict[str, Any]:
    return {name: torch.randn(2, 8, heads, 16, dtype=BF16) for name, heads in (("q", 4), ("k", 2), ("v", 2))}


def packed() -> dict[str, Any]:
    tensors = {name: t.flatten(0, 1) for name, t in prefill().items()}
    return tensors | {"cu_seqlens_q": ints(0, 7, 16), "cu_seqlens_kv": ints(0, 9, 16)}


def masked() -> dict[str, Any]:
    return prefill() | {"mask": torch.ones(2, 4, 8, 8, dtype=torch.bool)}


def sinking() -> dict[str, Any]:
    return prefill() | {"sinks": torch.zeros(4)}


def into() -> dict[str, Any]:
    return prefill() | {"out": torch.empty(2, 8, 4, 16, dtype=BF16)}


def decoding() -> dict[str, Any]:
    caches = {name: torch.randn(6, 16, 2, 16, dtype=BF16) for name in ("k_cache", "v_cache")}
    return {
        "q": torch.randn(2, 2, 4, 16, dtype=BF16),
        **caches,
        "cache_seqlens": ints(40, 17),
        "page_table": ints(0, 1, 2, 3, 4, 5).view(2, 3),
    }


def chunk() -> dict[str, Any]:
    return decoding() | {"q": torch.randn(2, 20, 4, 16, dtype=BF16), "sinks": torch.zeros(4)}


def decoding_into() -> dict[str, Any]:
    return decoding() | {"out": torch.empty(2, 2, 4, 16, dtype=BF16)}


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


def memory() -> dict[str, Any]:
    return {name: appending()[name] for name in ("k_cache", "v_cache", "page_table")}


def pooled() -> KVCache:
    return KVCache.paged(**room(), pages=3)


def tensors(function: Any, given: Callable[[], Any], names: str, changes: dict[str, Change], op: str) -> Iterator[Any]:
    for name in names.split():
        for kind, change in changes.items():
            if kind == "none" and (name in OPTIONAL or (op, name) == ("kv_append", "q")):
                continue

            def call(name: str = name, change: Change = change) -> Any:
                arguments = given()
                return function(**arguments | {name: change(arguments[name])})

            yield pytest.param(call, (name.partition("_")[0], op), id=f"{op}-{name}-{kind}")


def values(function: Any, given: Callable[[], Any], op: str, **wrong: list[Any]) -> Iterator[Any]:
    for name, bad in wrong.items():
        for value in bad:

            def call(name: str = name, value: Any = value) -> Any:
                return function(**given() | {name: value})

            yield pytest.param(call, (name.partition("_")[0], op), id=f"{op}-{name}-{value!r}"[:60])


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
    *tensors(attention, prefill, "q k v", NO_TENSOR | MISFIT | FP8, "attention"),
    *tensors(attention, masked, "mask", NO_TENSOR | MISFIT, "attention"),
    *tensors(attention, packed, "cu_seqlens_q cu_seqlens_kv", NO_TENSOR | MISFIT, "attention"),
    *tensors(attention, sinking, "sinks", NO_TENSOR | MISFIT, "attention"),
    *tensors(attention, into, "out", NO_TENSOR | MISFIT, "attention"),
    *values(
        attention, prefill, "attention",
        window=SIDES, scale=NUMBERS, softcap=NUMBERS, causal=FLAGS, return_lse=FLAGS, config=CONFIGS,
    ),
    *tensors(decode_attention, decoding, "q k_cache v_cache cache_seqlens", NO_TENSOR | MISFIT, "decode"),
    *tensors(decode_attention, decoding, "page_table", NO_TENSOR | MISFIT, "decode"),
    *tensors(decode_attention, decoding_into, "out", NO_TENSOR | MISFIT, "decode"),
    *values(
        decode_attention, decoding, "decode",
        window=LEFTS, scale=NUMBERS, softcap=NUMBERS, return_lse=FLAGS, config=CONFIGS,
    ),
    *tensors(decode_attention, chunk, "q k_cache cache_seqlens page_table sinks", NO_TENSOR | MISFIT, "decode"),
    *tensors(kv_append, appending, " ".join(appending()), NO_TENSOR | MISFIT, "kv_append"),
    *values(kv_append, appending, "kv_append", interleaved=FLAGS, config=CONFIGS),
    *tensors(KVCache, memory, "k_cache v_cache", NO_TENSOR | MISFIT, "KVCache"),
    *tensors(KVCache, memory, "page_table", NO_TENSOR | {k: v for k, v in MISFIT.items() if k != "shorter"}, "KVCache"),
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


@pytest.mark.parametrize(("call", "names"), CALLS)
def test_a_bad_call_is_refused_by_rule_value_and_remedy(call: Callable[[], Any], names: tuple[str, str]) -> None:
    with pytest.raises((UnsupportedProblem, InvalidConfig)) as refusal:
        call()
    message = str(refusal.value)
    assert any(name in message for name in names), message


def test_the_table_is_long() -> None:
    assert len(CALLS) >= 120


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
