"""Arguments that make no sense, one at a time, to every public function: each is refused with an error of ours."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import cutekernels as ck
from cutekernels.errors import CuteKernelsError, UnsupportedProblem
from cutekernels.ops.kv_append.api import kv_append
from tests.public_calls import Made, calls

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
FINITE = {"2.5", "10**30"}
SIGNED = FINITE | {"-1", "-1.5"}
ANY = SIGNED | {"nan", "inf", "-inf"}  # alpha and beta: the formula takes what IEEE 754 does
SHAPES = {"rank", "extent", "meta"}
# What is documentedly legal, by (call, argument) or by argument alone.
LEGAL: dict[str, set[str]] = {
    "eps": FINITE, "lr": FINITE, "weight_decay": FINITE, "temperature": FINITE | {"int"},
    "rope_theta": FINITE, "weight_offset": SIGNED, "alpha": ANY, "beta": ANY, "step": {"10**30", "int", "0-d"},
    "top_k": {"int"}, "adamw_step, half.lr": {"int", "0-d", "list"}, "positions": {"None", "int"},
    "embedding.ids": {"0-d", "rank", "extent"},
    "embedding.table": {"extent"}, "moe_permute.ids": SHAPES | {"0-d"}, "moe_route.logits": SHAPES,
    "moe_gather.x": {"extent"}, "moe_gather.inverse": {"extent"}, "moe_combine.rows": {"extent"},
    "sample_filter.logits": SHAPES, "sample_filter, rows.logits": {"extent"}, "silu_mul, packed.gate": SHAPES,
    "RMSNorm.hidden_size": {"list"}, "RMSNorm.eps": FINITE | {"None"},
    "z_loss": FINITE, "softcap": FINITE | {"None"}, "num_items_in_batch": FINITE | {"None"},
    "class_weight": {"None"}, "linear_logprob_shard.ignore_index": {"-1"},
    "scale": FINITE | {"None"}, "attention, masked.mask": {"bool"}, "page_table": {"extent"},
    "layer_norm.x": {"rank"}, "SwiGLU.forward.x": {"rank"}, "LayerNorm.forward.x": {"rank"},
}  # fmt: skip
OPTIONAL = {
    "activation", "bias", "out", "norm", "norm_weight", "rstd", "residual", "k", "positions", "heads", "rope_scaling",
    "weights", "master", "rms_norm.weight", "add_rms_norm.weight", "layer_norm.weight",
    "gate_up_bias", "down_bias", "rope_theta", "partial_rotary_factor", "RMSNorm.eps",
    "linear_cross_entropy.accumulate", "sinks", "mask", "counts", "KVCache.page_table",
    "kv_append, rotated.q",
}  # fmt: skip
NEEDED = {
    "fold.norm_weight",
    "bias_gelu.bias",
    "add_rms_norm.residual",
    "SwiGLU.bias",
    "LinearCrossEntropy.bias",
    "moe_ffn.weights",
    "kv_append in FP8.k",
    "kv_append.k",
    "kv_append, rotated.k",
    "attention.k",
    "attention, packed.k",
    "attention, masked.k",
}
FLAGS = {
    "exact", "norm", "renormalize", "interleaved", "inplace", "maximize", "master_weights", "bias",
    "elementwise_affine", "entropy", "causal", "return_lse", "check",
}  # fmt: skip
# Functions of several ops, and modules: a message may name one of those and its operand.
COMPOSED = re.compile(".*(gemm|linear|moe_ffn|forward|AdamW)")


def _paged() -> dict[str, Any]:
    caches = {name: torch.randn(6, 16, 2, 16) for name in ("k_cache", "v_cache")}
    return caches | {"page_table": torch.arange(6, dtype=torch.int32).view(2, 3)}


def every() -> dict[str, Made]:
    """``calls()``, and those that give attention, ``kv_append`` and ``rope`` other operands."""
    qkv = {name: torch.randn(2, 8, heads, 16) for name, heads in (("q", 4), ("k", 2), ("v", 2))}
    ends = {f"cu_seqlens_{of}": torch.tensor([0, 7, 16], dtype=torch.int32) for of in ("q", "kv")}
    turned = {name: torch.rand(32, 8) for name in ("cos", "sin")}
    seen = {"cache_seqlens": torch.tensor([40, 17], dtype=torch.int32)}
    return calls() | {
        "attention, packed": (ck.attention, {k: v.flatten(0, 1) for k, v in qkv.items()} | ends | {"check": True}),
        "attention, masked": (ck.attention, {
            **qkv, "mask": torch.ones(2, 4, 8, 8, dtype=torch.bool), "out": torch.empty(2, 8, 4, 16), "softcap": 2.0,
            "return_lse": False}),
        "decode_attention, paged": (ck.decode_attention, {
            "q": torch.randn(2, 2, 4, 16), **_paged(), **seen, "out": torch.empty(2, 2, 4, 16)}),
        "decode_attention, a chunk": (ck.decode_attention, {
            "q": torch.randn(2, 20, 4, 16), **_paged(), **seen, "sinks": torch.zeros(4)}),
        "kv_append, rotated": (kv_append, {
            "k": torch.randn(2, 5, 2, 16), "v": torch.randn(2, 5, 2, 16), **_paged(), **turned,
            "state": torch.zeros(3, 2, dtype=torch.int32), "counts": torch.tensor([1, 2], dtype=torch.int32),
            "q": torch.randn(2, 5, 4, 16), "interleaved": False}),
        "rope, in place": (ck.rope, {"q": qkv["q"], "k": qkv["k"], **turned, "inplace": True}),
        "KVCache": (ck.KVCache, _paged()),
    }  # fmt: skip


def tensors(t: Tensor) -> Iterator[tuple[str, object]]:
    yield from {"None": None, "list": t.tolist(), "numpy": t.float().numpy(), "str": "x", "int": 3}.items()
    fp8 = t.is_floating_point() and t.element_size() == 1  # which torch has neither sparse nor nested
    if not fp8:
        yield "sparse", t.to_sparse()
    yield "complex", t.to(torch.complex64)
    yield "fp8", t.to(torch.float8_e5m2 if fp8 else torch.float8_e4m3fn)
    yield "bool", t.bool()
    yield "other kind", t.long() if t.is_floating_point() else t.float()
    yield "0-d", t.flatten()[0]
    yield "rank", t[None, None, None]
    yield "extent", torch.cat([t, t, t], -1) if t.dim() else torch.ones(3)
    yield "meta", t.to("meta")
    if t.is_floating_point():
        yield "quantized", torch.quantize_per_tensor(t.float(), 0.1, 0, torch.qint8)
    if t.dim() > 1 and not fp8:
        yield "nested", torch.nested.nested_tensor([t[0]] * 3)


def scalars() -> Iterator[tuple[str, object]]:
    yield from {
        "None": None, "str": "sideways", "list": [1], "nan": math.nan, "inf": math.inf, "-inf": -math.inf, "-1": -1,
        "-1.5": -1.5, "2.5": 2.5, "True": True, "10**30": 10**30, "complex": 1j, "tuple": (1, 2, 3),
        "tensor": torch.ones(2, 2),
    }.items()  # fmt: skip


def legal(name: str, argument: str, label: str) -> bool:
    both = f"{name}.{argument}"
    if label == "None":
        return (argument in OPTIONAL and both not in NEEDED) or both in OPTIONAL or "None" in LEGAL.get(argument, ())
    if label == "True":
        return argument in FLAGS
    return label in LEGAL.get(both, LEGAL.get(argument, ()))


NAMES = list(every())


@pytest.mark.parametrize("name", NAMES)
def test_every_bad_argument_is_refused(name: str) -> None:
    function, good = every()[name]

    def call(**changed: object) -> None:
        function(**{key: t.clone() if isinstance(t, Tensor) else t for key, t in good.items()} | changed)

    call()
    wrong = []
    for argument, value in good.items():
        for label, bad in tensors(value) if isinstance(value, Tensor) else scalars():
            try:
                call(**{argument: bad})
            except CuteKernelsError as error:
                named = argument.partition("_")[0] in str(error) or name.partition(",")[0].split()[0] in str(error)
                if legal(name, argument, label) and label != "meta":
                    wrong.append(f"{argument} = {label}: refused: {error}")
                if not named and not COMPOSED.match(name):
                    wrong.append(f"{argument} = {label}: {error}: which argument?")
            except Exception as error:  # noqa: BLE001 - every other kind is a finding
                wrong.append(f"{argument} = {label}: {type(error).__name__}: {error}")
            else:
                if not legal(name, argument, label):
                    wrong.append(f"{argument} = {label}: accepted")
    assert not wrong, "\n".join(wrong)


def test_there_are_many_bad_calls() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = [
            (name, argument, label)
            for name in NAMES
            for argument, value in every()[name][1].items()
            for label, _ in (tensors(value) if isinstance(value, Tensor) else scalars())
        ]
    assert sum(not legal(*one) for one in found) >= 2000


def _eight(*shape: int) -> Tensor:
    return torch.ones(*shape).to(torch.float8_e4m3fn)


@pytest.mark.parametrize(
    "call",
    [
        lambda: ck.gemm(_eight(4, 8), _eight(8, 8)),
        lambda: ck.gemm(torch.ones(()), torch.ones(())),
        lambda: ck.linear(torch.ones(()), torch.ones(4, 4)),
        lambda: ck.rms_norm(_eight(4, 8)),
        lambda: ck.fold(torch.ones(4).int(), torch.ones(4, 4).int()),
        lambda: ck.moe_route(torch.ones(()), 1),
        lambda: ck.sample_filter(torch.ones(())),
        lambda: ck.rms_norm(torch.ones(4, 8), eps=-1),
        lambda: ck.rms_norm(torch.ones(4, 8), weight_offset=math.nan),
    ],
)
def test_alike_but_wrong(call: Callable[[], Any]) -> None:
    with pytest.raises(UnsupportedProblem):
        call()


def _negated(t: Tensor) -> Tensor:
    """``t``'s shape and type, in memory that torch reads negated."""
    return torch.zeros(*t.shape, dtype=torch.complex64).conj().imag


@pytest.mark.parametrize("name", [name for name in calls() if isinstance(calls()[name][1].get("out"), Tensor)])
def test_negated_results_are_refused(name: str) -> None:
    function, good = calls()[name]
    wide = {key: t.float() if isinstance(t, Tensor) and t.is_floating_point() else t for key, t in good.items()}
    function(**wide)
    with pytest.raises(UnsupportedProblem, match="writes to the memory of .* as it lies.*: write to memory of its own"):
        function(**wide | {"out": _negated(wide["out"])})


def test_negated_operands_are_read_as_they_are() -> None:
    x, out = _negated(torch.empty(3, 8)).add_(1.0), torch.empty(3, 8)
    assert x.is_neg()
    assert torch.equal(ck.rms_norm(x, out=out), ck.rms_norm(torch.ones(3, 8)))


def test_conjugate_results_are_refused() -> None:
    with pytest.raises(UnsupportedProblem, match="gemm_out writes to the memory of out"):
        ck.gemm(torch.ones(3, 8), torch.ones(8, 8), out=torch.zeros(3, 8, dtype=torch.complex64).conj())


def test_ints_beyond_every_float_are_refused() -> None:
    found = 0
    for name in NAMES:
        function, good = every()[name]
        for argument, value in good.items():
            if isinstance(value, int | float):
                for many in (10**400, -(10**5000)):  # Python refuses to write the second one out
                    found += 1
                    with pytest.raises(CuteKernelsError):
                        function(**good | {argument: many})
    assert found >= 40
