"""Repeated attention calls on a GPU: the bits of first calls, wherever operands lie, on streams and in graphs."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import cutekernels as ck
from cutekernels import gpu
from cutekernels.errors import UnsupportedProblem
from cutekernels.ops.attention.decode import DECODE_ATTENTION, DecodeProblem
from cutekernels.ops.attention.op import ATTENTION
from cutekernels.ops.shared import paths
from cutekernels.ops.shared.paths import CallCache
from tests.on_gpu import graph_of

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("one_seed")]
BF16, INT32 = torch.bfloat16, torch.int32


@pytest.fixture
def general(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The calls that are posed and planned."""
    made: list[str] = []

    run = CallCache.add  # both ways in, light and torch's, end there
    names = {id(ATTENTION.calls): "attention", id(DECODE_ATTENTION.calls): "decode"}

    def counted(calls: CallCache, *args: Any) -> Any:
        if id(calls) in names:
            made.append(names[id(calls)])
        return run(calls, *args)

    monkeypatch.setattr(CallCache, "add", counted)
    paths.forget()
    return made


def randn(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=BF16)


def ints(*values: int) -> Tensor:
    return torch.tensor(values, device="cuda", dtype=INT32)


def prefill(**options: Any) -> Callable[[], tuple[Any, dict[str, Any]]]:
    return lambda: (ck.attention, {"q": randn(2, 300, 8, 64)} | {n: randn(2, 300, 2, 64) for n in "kv"} | options)


def masked() -> tuple[Any, dict[str, Any]]:
    return ck.attention, prefill()()[1] | {"mask": torch.rand(1, 1, 300, 300, device="cuda") < 0.7}


def packed() -> tuple[Any, dict[str, Any]]:
    given = {"q": randn(600, 8, 64), "k": randn(600, 2, 64), "v": randn(600, 2, 64), "causal": True}
    return ck.attention, given | dict.fromkeys(("cu_seqlens_q", "cu_seqlens_kv"), ints(0, 100, 101, 600))


def heads_first() -> tuple[Any, dict[str, Any]]:
    return ck.attention, {n: randn(2, 4, 300, 64).transpose(1, 2) for n in "qkv"}


def decode(*queries: int, splits: int = 0, page_size: int = 0, **options: Any) -> Callable[[], tuple[Any, Any]]:
    def make() -> tuple[Any, dict[str, Any]]:
        shape = (3 * 2048 // page_size, page_size, 2, 128) if page_size else (3, 2048, 2, 128)
        given = {"q": randn(3, *queries, 8, 128), "k_cache": randn(*shape), "v_cache": randn(*shape)}
        given["cache_seqlens"] = ints(2048, 1, 777)
        if page_size:
            order = torch.randperm(shape[0], device="cuda").to(INT32)
            given["page_table"] = order.view(3, -1)
        if splits:
            options["config"] = split(splits, queries[0] if queries else 1, page_size, options.get("return_lse", False))
        return ck.decode_attention, given | options

    return make


def split(splits: int, seq_q: int, page_size: int, lse: bool) -> str:
    p, spec = DecodeProblem(3, 2048, 8, 2, seq_q, page_size=page_size, lse=lse), gpu.detect()
    fitting = [c for c in DECODE_ATTENTION.valid(p, spec) if c.splits == splits]
    return str(min(fitting, key=lambda c: DECODE_ATTENTION.estimate_us(p, c, spec)))


CALLS = {
    "causal": prefill(causal=True),
    "lse": prefill(return_lse=True, softcap=20.0),
    "window": prefill(causal=True, window=(70, None)),
    "mask": masked,
    "packed": packed,
    "heads first": heads_first,
    "decode": decode(),
    "decode, lse": decode(return_lse=True),
    "decode, window": decode(window=(100, None)),
    "decode, four queries": decode(4),
    "decode, splits": decode(splits=8),
    "decode, pages": decode(page_size=16),
    "decode, pages and splits": decode(page_size=16, splits=4, return_lse=True),
}


@pytest.fixture(params=CALLS)
def call(request: pytest.FixtureRequest) -> tuple[Any, dict[str, Any]]:
    return CALLS[request.param]()


def results(returned: Any) -> list[Tensor]:
    return list(returned) if isinstance(returned, tuple) else [returned]


def same(a: Any, b: Any) -> bool:
    return all(torch.equal(x, y) for x, y in zip(results(a), results(b), strict=True))


def elsewhere(given: dict[str, Any]) -> dict[str, Any]:
    """Tensors that lie alike, with other values; fewer tokens, in other pages."""
    others = {}
    for name, t in given.items():
        if not isinstance(t, Tensor) or t.dtype != BF16:
            others[name] = t.clone() if isinstance(t, Tensor) else t
        else:
            others[name] = torch.empty_strided(t.shape, t.stride(), device="cuda", dtype=BF16).normal_()
    if "cache_seqlens" in given:
        others["cache_seqlens"] = ints(1000, 2048, 5)
    if "page_table" in given:
        others["page_table"] = given["page_table"].flip(0, 1).contiguous()
    if "cu_seqlens_q" in given:
        others |= dict.fromkeys(("cu_seqlens_q", "cu_seqlens_kv"), ints(0, 300, 550, 600))
    return others


def cold(function: Any, given: dict[str, Any]) -> Any:
    """A first call, which is then forgotten."""
    paths.forget()
    returned = function(**given)
    paths.forget()
    return returned


def test_other_operands_give_what_the_general_path_gives(call: Any, general: list[str]) -> None:
    function, given = call
    ways = [given, elsewhere(given), elsewhere(given)]
    expected = [cold(function, way) for way in ways]
    assert not same(expected[0], expected[1])
    function(**given)
    before = len(general)
    for _ in range(2):
        for way, right in zip(ways, expected, strict=True):
            assert same(function(**way), right)
            out = torch.full_like(results(right)[0], math.nan)
            assert same(function(**way, out=out), right)
            assert torch.equal(out, results(right)[0])
    assert len(general) == before + 1, "once more, for out"


def test_with_gradients_off_and_on(general: list[str]) -> None:
    function, given = CALLS["causal"]()
    expected = cold(function, given)
    wanting = given | {"q": given["q"].clone().requires_grad_()}
    for _ in range(2):
        with torch.no_grad():
            assert torch.equal(function(**wanting), expected)
        with torch.inference_mode():
            assert torch.equal(function(**given), expected)
        graded = function(**wanting)
        torch.testing.assert_close(graded, expected, rtol=2e-2, atol=2e-2)  # a kernel that gives lse may be another
        (grad,) = torch.autograd.grad(graded.sum(), wanting["q"])
        assert grad.isfinite().all()


def test_on_other_streams(call: Any, general: list[str]) -> None:
    """At once: what split launches share is the stream's own."""
    function, given = call
    ways = [given, elsewhere(given)]
    expected = [cold(function, way) for way in ways]
    function(**given)
    before, streams = len(general), [torch.cuda.Stream() for _ in range(2)]
    torch.cuda.synchronize()
    made: list[list[Any]] = [[], []]
    for _ in range(20):
        for stream, way, list_ in zip(streams, ways, made, strict=True):
            with torch.cuda.stream(stream):
                list_.append(function(**way))
    torch.cuda.synchronize()
    for right, list_ in zip(expected, made, strict=True):
        assert all(same(returned, right) for returned in list_)
    assert len(general) == before


def test_in_a_graph(call: Any, general: list[str]) -> None:
    """Captured warm, replayed with other contents, beside warm calls on another stream."""
    function, given = call
    other, eager = elsewhere(given), elsewhere(given)
    expected, beside = cold(function, other), cold(function, eager)
    function(**given)
    before, graph = len(general), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = function(**given)
    assert len(general) == before
    for name, t in given.items():
        if isinstance(t, Tensor):
            t.copy_(other[name])
    torch.cuda.synchronize()
    aside, made = torch.cuda.Stream(), []
    for _ in range(10):
        for t in results(captured):
            t.fill_(math.nan)
        graph.replay()
        with torch.cuda.stream(aside):
            made.append(function(**eager))
    torch.cuda.synchronize()
    assert same(captured, expected)
    assert all(same(returned, beside) for returned in made)
    assert len(general) == before


def test_first_met_in_a_graph(general: list[str]) -> None:
    """A call cached while it was captured holds nothing of the graph."""
    function, given = CALLS["decode, splits"]()
    expected = cold(function, given)
    graph, captured = graph_of(lambda: function(**given))
    before = len(general)
    returned = [function(**given) for _ in range(3)]
    assert len(general) == before
    graph.replay()
    torch.cuda.synchronize()
    assert all(same(t, expected) for t in (*returned, captured))
    del graph, captured
    assert same(function(**given), expected)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:The CUDA Graph is empty")  # of torch's own code
def test_compiled_to_a_cuda_graph() -> None:
    """Scratch that launches keep is not in the memory of the graph that met them first, whose replays find it again."""

    def run(q: Tensor, k: Tensor, v: Tensor, one: Tensor, lengths: Tensor, x: Tensor, weight: Tensor) -> Any:
        prompt = ck.attention(q, k, v, causal=True)
        token = ck.decode_attention(one, k, v, lengths)
        return prompt, token, ck.linear(x, weight)

    given = [randn(1, 2048, heads, 128) for heads in (32, 8, 8)]
    given += [randn(1, 32, 128), ints(2048), randn(4, 18944), randn(3584, 18944) / 128]
    compiled = torch.compile(run, mode="reduce-overhead", fullgraph=True)
    for _ in range(4):  # plain, recorded, replayed
        torch.compiler.cudagraph_mark_step_begin()
        assert same(compiled(*given), run(*given))
        given[0].neg_()


def test_refusals_and_copies_when_warm(general: list[str]) -> None:
    function, given = CALLS["causal"]()
    out = torch.empty_like(given["q"])
    expected = cold(function, given)
    for _ in range(2):
        function(**given, out=out)
        function(**given)
    with pytest.raises(UnsupportedProblem, match="out= overlaps an operand"):
        function(**given, out=given["q"])
    with pytest.raises(UnsupportedProblem, match="scale must be above 0"):
        function(**given, scale=-1.0)
    with pytest.raises(UnsupportedProblem, match="device"):
        function(**given | {"k": given["k"].cpu()})
    shifted = torch.empty(given["q"].numel() + 1, device="cuda", dtype=BF16)[1:].view(given["q"].shape)
    before = len(general)
    for _ in range(2):
        assert torch.equal(function(**given | {"q": shifted.copy_(given["q"])}), expected)
        shifted.fill_(math.nan)
        function(**given, out=shifted)
        assert torch.equal(shifted, expected)
    assert len(general) == before + 2
    negated = torch._neg_view(-given["q"])
    assert torch.equal(function(**given | {"q": negated}), expected)


def test_after_reload(call: Any, general: list[str]) -> None:
    function, given = call
    expected = function(**given)
    ck.reload()
    for _ in range(2):
        assert same(function(**given), expected)
    assert len(general) == 2


def test_a_cache_that_grows(general: list[str]) -> None:
    """Each token's call is the one before, with other lengths."""
    cache = ck.KVCache.paged(2, 512, heads=2, head_dim=64, pages=64, dtype=BF16, device="cuda")
    cache.reserve(64)
    k, v, q = randn(2, 64, 2, 64), randn(2, 64, 2, 64), randn(2, 64, 8, 64)
    whole = ck.attention(q, k, v, causal=True)
    general.clear()
    for i in range(64):
        cache.append(k[:, i : i + 1], v[:, i : i + 1])
        out = ck.decode_attention(q[:, i], **cache.view())
        torch.testing.assert_close(out, whole[:, i], rtol=2e-2, atol=2e-2)
    assert general == ["decode"]


def test_routed_calls(general: list[str]) -> None:
    q, k, v = (randn(2, 4, 300, 64) for _ in range(3))
    with ck.route_sdpa() as routing:
        made = [functional.scaled_dot_product_attention(q, k, v, is_causal=True) for _ in range(3)]
    assert routing.routed == 3
    assert len(general) == 1
    assert all(torch.equal(t, made[0]) for t in made)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_on_another_device(call: Any, general: list[str]) -> None:
    function, given = call
    expected = cold(function, given)
    there = {name: t.to("cuda:1") if isinstance(t, Tensor) else t for name, t in given.items()}
    for way in (given, there, given, there):
        assert same([t.to("cuda:0") for t in results(function(**way))], expected)
    with torch.cuda.device(1):
        before = len(general)
        assert same([t.to("cuda:0") for t in results(function(**there))], expected)
        assert len(general) == before
        assert same(function(**given), expected)
        assert len(general) == before
