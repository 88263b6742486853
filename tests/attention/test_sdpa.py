"""``route_sdpa`` on the CPU, where attention runs its reference: routed calls agree, the rest is torch's."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import nullcontext
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as imported_early

from cutekernels import sdpa
from cutekernels.errors import UnsupportedProblem
from cutekernels.sdpa import route_sdpa


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sdpa, "DEVICES", ("cpu",))


def qkv(seq_q: int = 9, seq_kv: int = 9, heads: int = 4, heads_kv: int = 4, head_dim: int = 16, batch: int = 2) -> Any:
    draw = torch.Generator().manual_seed(seq_q * 100 + seq_kv)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw, dtype=torch.float64)

    return normal(batch, heads, seq_q, head_dim), *(normal(batch, heads_kv, seq_kv, head_dim) for _ in range(2))


def agree(args: tuple[Any, ...], **options: Any) -> None:
    expected = F.scaled_dot_product_attention(*args, **options)
    with route_sdpa() as routing:
        out = imported_early(*args, **options)
    assert routing.routed == 1, routing
    assert not routing.passed_on
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)


# ---- what is routed -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("seq_q", "seq_kv"), list(product((1, 5, 9), (1, 5, 9))))
@pytest.mark.parametrize("heads_kv", [4, 2, 1])
def test_causal_is_from_the_top_left(on_cpu: None, seq_q: int, seq_kv: int, heads_kv: int) -> None:
    args = qkv(seq_q, seq_kv, heads_kv=heads_kv)
    agree(args, is_causal=True, enable_gqa=heads_kv != 4)
    agree(args, enable_gqa=True)


@pytest.mark.parametrize("shape", [(5, 7), (4, 5, 7), (2, 1, 5, 7), (2, 4, 5, 7), (1, 4, 1, 7), (2, 1, 1, 7), (5, 1)])
def test_masks_are_broadcast(on_cpu: None, shape: tuple[int, ...]) -> None:
    seen = torch.rand(shape, generator=torch.Generator().manual_seed(2)) < 0.7
    seen[..., 0] = True
    agree(qkv(5, 7), attn_mask=seen)
    agree((*qkv(5, 7), seen))


def test_scale_and_positional_arguments(on_cpu: None) -> None:
    agree(qkv(), scale=0.3)
    agree((*qkv(), None, 0.0, True))


@pytest.mark.parametrize(("seq_q", "seq_kv"), [(6, 6), (5, 9), (9, 5)])
def test_gradients(on_cpu: None, seq_q: int, seq_kv: int) -> None:
    found = []
    for routes in (False, True):
        args = [t.requires_grad_() for t in qkv(seq_q, seq_kv, heads_kv=2)]
        with route_sdpa() if routes else nullcontext():
            out = F.scaled_dot_product_attention(*args, is_causal=True, enable_gqa=True)
        out.square().sum().backward()
        found.append([t.grad for t in args])
    for ours, torchs in zip(*found, strict=True):
        torch.testing.assert_close(ours, torchs, rtol=1e-10, atol=1e-10)


def test_nothing_is_copied(on_cpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Tensor] = []

    def attention(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        given.extend((q, k, v, options["mask"]))
        return q

    monkeypatch.setattr(sdpa, "attention", attention)
    joint = torch.randn(2, 9, 3, 4, 16)
    args = (*joint.permute(2, 0, 3, 1, 4).unbind(0), torch.ones(1, 9, dtype=torch.bool))
    with route_sdpa():
        out = F.scaled_dot_product_attention(*args)
    assert [t.data_ptr() for t in given] == [t.data_ptr() for t in args]
    assert given[1].stride() == joint[:, :, 1].stride()
    assert out.shape == args[0].shape


def test_modules_and_torch_s_own_functions_are_routed(on_cpu: None) -> None:
    """A module of torch, made outside the block, is routed too."""
    layer = torch.nn.MultiheadAttention(32, 2, batch_first=True, dtype=torch.float64).train()
    x = torch.randn(2, 5, 32, dtype=torch.float64)
    with torch.no_grad():
        expected, _ = layer(x, x, x, need_weights=False)
        with route_sdpa() as routing:
            out, _ = layer(x, x, x, need_weights=False)
    assert routing.routed == 1
    torch.testing.assert_close(out, expected)


# ---- what is passed on ----------------------------------------------------------------------------------


def calls() -> dict[str, Callable[[], Any]]:
    sdpa_, (q, k, v) = F.scaled_dot_product_attention, qkv()
    few = qkv(heads_kv=1)
    return {
        "dropout": lambda: sdpa_(q, k, v, dropout_p=0.5),
        "other than four dimensions": lambda: sdpa_(q[0], k[0], v[0]),
        "a mask that is not bool": lambda: sdpa_(q, k, v, attn_mask=torch.zeros(9, 9, dtype=torch.float64)),
        "a mask beside is_causal": lambda: sdpa_(q, k, v, attn_mask=torch.ones(9, 9, dtype=torch.bool), is_causal=True),
        "channels that are not contiguous": lambda: sdpa_(q.mT.contiguous().mT, k, v),
        "empty tensors": lambda: sdpa_(q[:, :, :0], k, v),
        "heads that are broadcast": lambda: sdpa_(*few),
        "must be a multiple of 8 up to 256; it is 12": lambda: sdpa_(q[..., :12], k[..., :12], v[..., :12]),
        "must have one shape": lambda: sdpa_(q, k, v[..., :8]),
        "tensors of a class of their own": lambda: sdpa_(q.as_subclass(Own), k, v),
        "traced or transformed": lambda: torch.func.vmap(sdpa_)(q[None], k[None], v[None]),
        "autocast to another type": lambda: autocast(q.float(), k.float(), v.float()),
        "a scale that is a tensor": lambda: sdpa_(q, k, v, scale=torch.tensor(0.5)),
        "or a bool": lambda: sdpa_(q, k, v, scale=True),
        "scale must be above 0": lambda: sdpa_(q, k, v, scale=-1.0),
    }


class Own(torch.Tensor):
    pass


def autocast(*args: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return F.scaled_dot_product_attention(*args)


@pytest.mark.filterwarnings("ignore::UserWarning")  # vmap has no rule for torch's own kernel
@pytest.mark.parametrize("reason", calls())
def test_the_rest_is_torch_s_and_counted(on_cpu: None, reason: str) -> None:
    call = calls()[reason]
    torch.manual_seed(0)
    expected = call()
    torch.manual_seed(0)
    with route_sdpa() as routing:
        out = call()
    assert routing.routed == 0
    ((found, count),) = routing.passed_on.items()
    assert reason in found
    assert count == 1
    torch.testing.assert_close(out, expected)
    assert out.requires_grad == expected.requires_grad


def test_what_torch_refuses_torch_refuses(on_cpu: None) -> None:
    q, k, v = qkv()
    with route_sdpa() as routing, pytest.raises(RuntimeError):
        F.scaled_dot_product_attention(q, k[..., :8], v)
    assert routing.routed == 0
    with route_sdpa(), pytest.raises(TypeError, match="scaled_dot_product_attention"):
        F.scaled_dot_product_attention(q, k)


def test_arguments_that_a_later_torch_may_know_are_its_own() -> None:
    with pytest.raises(UnsupportedProblem, match="not known here"):
        sdpa._bind((1, 2, 3), {"window": 4})
    assert sdpa._bind((1, 2), {"value": 3, "is_causal": True}) == [1, 2, 3, None, 0.0, True, None, False]


def test_a_cpu_has_no_kernel_of_ours() -> None:
    with route_sdpa() as routing:
        F.scaled_dot_product_attention(*qkv())
        F.scaled_dot_product_attention(*qkv())
    assert routing.passed_on == {"not for tensors that are on no GPU": 2}


# ---- blocks ---------------------------------------------------------------------------------------------


def test_a_block_ends(on_cpu: None) -> None:
    with route_sdpa() as routing:
        F.scaled_dot_product_attention(*qkv())
    F.scaled_dot_product_attention(*qkv())
    assert routing.routed == 1
    with pytest.raises(ValueError, match="mine"), route_sdpa() as routing:
        raise ValueError("mine")
    F.scaled_dot_product_attention(*qkv())
    assert routing.routed == 0


def test_the_inner_block_is_asked_first(on_cpu: None) -> None:
    q, k, v = qkv()
    with route_sdpa() as outer:
        with route_sdpa() as inner:
            F.scaled_dot_product_attention(q, k, v)
            F.scaled_dot_product_attention(q, k, v, dropout_p=0.1)
        F.scaled_dot_product_attention(q, k, v)
    assert (inner.routed, outer.routed) == (1, 1)
    assert inner.passed_on == outer.passed_on == {"not for dropout": 1}


def test_other_threads_are_unaffected(on_cpu: None) -> None:
    """Threads, each with its own block or none, count their own calls alone."""
    seen: list[int] = []

    def work(routes: bool) -> None:
        if not routes:
            F.scaled_dot_product_attention(*qkv())
            return
        with route_sdpa() as own:
            for _ in range(3):
                F.scaled_dot_product_attention(*qkv())
        seen.append(own.routed)

    with route_sdpa() as routing:
        threads = [threading.Thread(target=work, args=(routes,)) for routes in (True, False)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert routing.routed == 0
    assert seen == [3]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_what_torch_compiles_is_let_be(on_cpu: None) -> None:
    compiled = torch.compile(lambda q, k, v: F.scaled_dot_product_attention(q * 2, k, v), backend="aot_eager")
    q, k, v = qkv()
    with route_sdpa() as routing, torch.no_grad():
        out = compiled(q, k, v)
    torch.testing.assert_close(out, F.scaled_dot_product_attention(q * 2, k, v))
    assert routing.routed + routing.passed_on.total() <= 1


BAD: dict[str, dict[str, Any]] = {
    "none": {"key": None},
    "list": {"value": [[1.0]]},
    "sparse": {"query": torch.randn(1, 2, 5, 8).to_sparse()},
    "0-d": {"query": torch.tensor(1.0)},
    "scale": {"scale": "1"},
    "scales": {"scale": [0.5]},
    "causal": {"is_causal": "yes"},
    "dropout": {"dropout_p": "0"},
    "gqa": {"enable_gqa": "yes"},
    "mask": {"attn_mask": [True]},
}


@pytest.mark.parametrize("bad", BAD)
def test_bad_calls_fail_with_torch_s_own_errors(on_cpu: None, bad: str) -> None:
    given = {name: torch.randn(1, 2, 5, 8) for name in ("query", "key", "value")} | BAD[bad]
    with pytest.raises(Exception) as plain:
        torch.nn.functional.scaled_dot_product_attention(**given)
    with route_sdpa() as routing, pytest.raises(plain.type) as routed:
        torch.nn.functional.scaled_dot_product_attention(**given)
    assert str(routed.value) == str(plain.value)
    assert routing.routed == 0
