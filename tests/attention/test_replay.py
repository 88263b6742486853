"""Repeated attention calls around a recorded kernel: what it is handed, what goes through torch, what they cost.

The GPU's implementations run on CPU tensors here, up to the compiled kernel.
"""

from __future__ import annotations

import gc
import math
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import BaseTorchFunctionMode
from torch.utils._python_dispatch import BaseTorchDispatchMode

import cutekernels as ck
from cutekernels import dispatch, gpu, sdpa
from cutekernels.errors import InvalidConfig, UnsupportedProblem
from cutekernels.ops.attention import api as attend
from cutekernels.ops.attention import calls as attend_calls
from cutekernels.ops.attention.problem import score_factors
from cutekernels.ops.shared import paths, per_stream
from cutekernels.ops.shared.calls import implementations
from tests.attention.decode_cases import Workspace
from tests.attention.operands import BF16, INT32, decode, fp8, fused, packed, prefill, randn
from tests.host_cost import direct_anywhere, host_cost

where = Tensor.data_ptr
PATHS = {"attention": attend.ATTENTION_PATH, "decode_attention": attend.DECODE_PATH}


def facts(t: Tensor) -> tuple[Any, ...]:
    return t.data_ptr(), tuple(t.shape), t.stride(), t.dtype, t.tolist() if t.dtype == INT32 else None


class Seen:
    """Launches with their arguments, and how many calls went through torch."""

    def __init__(self) -> None:
        self.launches: list[tuple[Any, ...]] = []
        self.general = 0

    def kernel(self, *args: Any) -> None:
        """Notes each tensor's address, shape, strides and type, and the values of indices."""
        self.launches.append(tuple([facts(a) if isinstance(a, Tensor) else a for a in args]))

    def count(self, run: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any) -> Any:
            self.general += 1
            return run(*args)

        return counted


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Iterator[Seen]:
    made, spec = Seen(), gpu.lookup("h200")
    monkeypatch.setattr(dispatch.gpus, "detect", lambda device=None: spec)
    monkeypatch.setattr(dispatch.compiler, "get", lambda *args: made.kernel)
    monkeypatch.setattr(torch.cuda, "device", lambda index: nullcontext())
    monkeypatch.setattr(paths, "_current_device", lambda: -1)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(attend_calls, "direct", direct_anywhere())
    monkeypatch.setattr(per_stream, "StreamWorkspace", Workspace)
    library = torch.library.Library("cutekernels", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the CPU's are overridden
        for op, read in ((attend.ATTENTION, attend._read), (attend.DECODE_ATTENTION, attend._read_decode)):
            name = op.name
            for results, suffix in enumerate(("", "_out")):
                run = made.count(implementations(op, results, read)[0])
                library.impl(f"{name}{suffix}" if results else f"_{name}", run, "CPU", allow_override=True)
                if not results:
                    monkeypatch.setattr(PATHS[name], "_cpu", run)
    dispatch.reload()
    yield made
    library._destroy()
    dispatch.reload()


def both() -> tuple[tuple[Callable[..., Any], dict[str, Any]], ...]:
    return (ck.attention, prefill()), (ck.decode_attention, decode())


CALLS: dict[str, Callable[[], tuple[Callable[..., Any], dict[str, Any]]]] = {
    "plain": lambda: (ck.attention, prefill()),
    "causal, one query": lambda: (ck.attention, prefill(1) | {"causal": True, "scale": 0.5}),
    "one of everything": lambda: (ck.attention, prefill(1, (1, 1), 1)),
    "lse": lambda: (ck.attention, prefill() | {"return_lse": True, "softcap": 3.0}),
    "window": lambda: (ck.attention, prefill() | {"window": (3, None), "causal": True}),
    "mask": lambda: (ck.attention, prefill() | {"mask": torch.ones(1, 1, 6, 6, dtype=torch.bool)}),
    "heads first": lambda: (ck.attention, {n: randn(2, 3, 6, 16).transpose(1, 2) for n in "qkv"}),
    "fused": lambda: (ck.attention, fused()),
    "packed": lambda: (ck.attention, packed() | {"causal": True, "return_lse": True}),
    "out": lambda: (ck.attention, prefill() | {"out": randn(2, 6, 4, 16)}),
    "out, a slice": lambda: (ck.attention, prefill(1) | {"out": randn(2, 1, 4, 32)[..., 16:], "return_lse": True}),
    "decode": lambda: (ck.decode_attention, decode()),
    "decode, FP8": lambda: (ck.decode_attention, fp8(decode(pages=4))),
    "decode, a chunk in FP8": lambda: (ck.decode_attention, fp8(decode(20)) | {"sinks": randn(4)}),
    "decode, scales of tokens": lambda: (ck.decode_attention, fp8(decode(pages=4), True)),
    "decode, one sequence's scales": lambda: (ck.decode_attention, fp8(decode(batch=1, room=40), True)),
    "decode, a chunk, scales of tokens": lambda: (ck.decode_attention, fp8(decode(20), True) | {"sinks": randn(4)}),
    "decode, one sequence": lambda: (ck.decode_attention, decode(batch=1) | {"return_lse": True}),
    "decode, four dimensions": lambda: (ck.decode_attention, decode(1)),
    "decode, four queries": lambda: (ck.decode_attention, decode(4) | {"return_lse": True, "window": (5, None)}),
    "decode, split": lambda: (ck.decode_attention, decode(room=4096)),
    "decode, pages": lambda: (ck.decode_attention, decode(pages=7) | {"softcap": 2.0}),
    "decode, wide pages": lambda: (
        ck.decode_attention,
        decode(pages=7) | {"page_table": torch.ones(2, 9).int()[:, :2]},
    ),
    "decode, a chunk": lambda: (ck.decode_attention, decode(20) | {"sinks": randn(4)}),
    "decode, a chunk in pages": lambda: (ck.decode_attention, decode(20, pages=7) | {"window": (5, None)}),
    "sinks, every other": lambda: (ck.attention, prefill() | {"sinks": torch.zeros(8)[::2]}),
    "decode, out": lambda: (ck.decode_attention, decode() | {"out": randn(2, 4, 16)}),
    "decode, out, a slice": lambda: (ck.decode_attention, decode(3) | {"out": randn(2, 3, 4, 24)[..., :16]}),
}


@pytest.fixture(params=CALLS)
def call(request: pytest.FixtureRequest) -> tuple[Callable[..., Any], dict[str, Any]]:
    torch.manual_seed(7)
    return CALLS[request.param]()


def results(returned: Any) -> tuple[Tensor, ...]:
    return returned if isinstance(returned, tuple) else (returned,)


def twin(t: Any, memo: dict[int, Any]) -> Any:
    """Another tensor that looks the same, elsewhere."""
    if not isinstance(t, Tensor):
        return t
    if id(t) not in memo:
        reach = sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True)) + 1
        memo[id(t)] = t.new_zeros(reach).as_strided(t.shape, t.stride())
    return memo[id(t)]


# ---- the same launch ------------------------------------------------------------------------------------


def test_the_kernel_is_handed_what_the_general_path_hands_it(seen: Seen, call: Any) -> None:
    """With other tensors too: each argument's address, shape, strides and type, and every number."""
    function, given = call
    memo: dict[int, Any] = {}
    others = {name: twin(value, memo) for name, value in given.items()}
    for arguments in (given, others):
        paths.forget()
        before = seen.general
        cold = results(function(**arguments))
        assert seen.general == before + 1
        warmth = results(function(**(given if arguments is others else others)))
        again = results(function(**arguments))
        assert seen.general == before + 1, "a call like it is launched at once"
        first, _, third = seen.launches[-3:]
        lie = {where(t): name for name, t in arguments.items() if isinstance(t, Tensor)}
        handed = []
        for launch, made in ((first, cold), (third, again)):
            named = lie | {where(t): f"result {i}" for i, t in enumerate(made)}
            plain = launch[: -1 if "workspace" in launch else None]
            handed.append([(named.get(a[0], "a copy"), *a[1:]) if isinstance(a, tuple) else a for a in plain])
        assert handed[0] == handed[1]
        assert {a[0] for a in handed[1] if isinstance(a, tuple)} <= {*lie.values(), "result 0", "result 1", "a copy"}
        for made in (warmth, again):
            assert [(t.shape, t.stride(), t.dtype) for t in made] == [(t.shape, t.stride(), t.dtype) for t in cold]
        assert third[0][0] == where(again[0]), "what is returned was written"
        if "out" in arguments:
            assert again[0] is arguments["out"]
        copied = [a for a in handed[1] if isinstance(a, tuple) and a[0] == "a copy"]
        assert len(copied) == sum(n in arguments and not arguments[n].is_contiguous() for n in ("sinks",))


def test_scale_and_softcap_are_each_call_s_own(seen: Seen) -> None:
    given = prefill()
    numbers = [(0.5, 2.0), (0.25, 3.0), (1, 4)]
    for scale, softcap in numbers:
        ck.attention(**given, scale=scale, softcap=softcap)
    assert seen.general == 1
    assert [launch[-5:-2] for launch in seen.launches] == [score_factors(*pair) for pair in numbers]
    ck.attention(**given)
    assert seen.general == 2


def test_each_split_launch_asks_for_its_workspace(seen: Seen) -> None:
    """The stream decides which one it is, and whether a graph is being captured. A cluster asks for none."""
    for given in (decode(room=4096), decode(room=32768)):  # 4 splits, and more than a cluster has CTAs
        for _ in range(3):
            ck.decode_attention(**given)
    assert seen.general == 2
    assert {launch[-2:] for launch in seen.launches[:3]} == {(None, None)}
    assert sorted(name for name, _ in {launch[-2:] for launch in seen.launches[3:]}) == 3 * ["workspace"]


def test_out_counts_as_written(seen: Seen) -> None:
    """For autograd, which may have saved it."""
    for function, given in both():
        out = torch.empty_like(given["q"])
        for _ in range(3):
            version = out._version
            function(**given, out=out)
            assert out._version == version + 1


def test_nothing_of_a_call_is_held(seen: Seen) -> None:
    given = decode()
    for _ in range(2):
        out = ck.decode_attention(**given)
    refs = [weakref.ref(t) for t in (out, *given.values())]
    del given, out
    gc.collect()
    assert not any(ref() is not None for ref in refs)
    assert cached() == 1


# ---- other calls ----------------------------------------------------------------------------------------


def cached() -> int:
    return len(attend._CALLS.calls) + len(attend.DECODE_ATTENTION.calls.calls)


def spread(t: Tensor) -> Tensor:
    """The same rows, further apart."""
    return torch.cat([t, t], dim=-1)[..., : t.shape[-1]]


def each_is_its_own(seen: Seen, function: Callable[..., Any], ways: list[dict[str, Any]]) -> None:
    for again in (False, True):
        for i, given in enumerate(ways):
            function(**given)
            assert seen.general == (len(ways) if again else i + 1), f"call {i}"
    assert cached() == len(ways)


def test_another_call_is_another_entry(seen: Seen) -> None:
    base = prefill()
    ways = [
        base,
        {n: t[:1] for n, t in base.items()},
        {n: t.half() for n, t in base.items()},
        base | {"q": base["q"][:, :5]},
        base | {n: base[n][:, :5] for n in "kv"},
        base | {"q": base["q"][:, :, :2]},
        *[base | {n: spread(base[n])} for n in "qkv"],
        *[base | {"window": window} for window in ((2, None), (3, None), (None, 2))],
        base | {"causal": True},
        base | {"softcap": 2.0},
        base | {"return_lse": True},
        *[base | {"out": out} for out in (torch.empty(2, 6, 4, 16).to(BF16), spread(base["q"]))],
        *[base | {"mask": torch.ones(2, heads, 6, 6, dtype=torch.bool)} for heads in (1, 4)],
    ]
    each_is_its_own(seen, ck.attention, ways)


def test_another_decode_call_is_another_entry(seen: Seen) -> None:
    base, paged = decode(), decode(pages=7)
    ways = [
        base,
        paged,
        paged | {"page_table": paged["page_table"][:, :1].contiguous()},
        paged | {"page_table": torch.ones(2, 9).int()[:, :2]},
        base | {"window": (4, None)},
        base | {"window": (5, None)},
        base | {"softcap": 1.0},
        base | {"return_lse": True},
        base | {"out": torch.empty_like(base["q"])},
        base | {"k_cache": spread(base["k_cache"])},
        base | {"v_cache": spread(base["v_cache"])},
        base | {n: base[n][:, :16] for n in ("k_cache", "v_cache")},
        base | {"q": base["q"].unsqueeze(1).expand(2, 3, 4, 16)},
        {n: t[:1] for n, t in base.items()},
    ]
    each_is_its_own(seen, ck.decode_attention, ways)


def test_a_forced_config_is_its_own_call(seen: Seen) -> None:
    given = prefill(256)
    options = dict(zip(attend.ATTENTION.options, (False, "none", 0, 0, False, False), strict=True))
    p = attend.ATTENTION.problem(given["q"], *given.values(), *[None] * 4, **options)
    valid = [str(c) for c in attend.ATTENTION.valid(p, gpu.lookup("h200"))]
    bound: list[str] = []
    bind = attend.ATTENTION.bind
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            type(attend.ATTENTION), "bind", lambda self, p, c, kernel: bound.append(str(c)) or bind(p, c, kernel)
        )
        for config in (None, valid[0], valid[-1], None, valid[0], valid[-1]):
            ck.attention(**given, config=config)
    assert bound[1:] == [valid[0], valid[-1]]
    assert seen.general == 3
    for _ in range(2):
        with pytest.raises(InvalidConfig):
            ck.attention(**given, config="tile_q=3")


def unaligned(t: Tensor) -> Tensor:
    shifted = t.new_zeros(t.numel() + 8)[1 : t.numel() + 1].view(t.shape)
    return shifted.copy_(t)


@pytest.mark.parametrize("name", ["q", "k", "v", "out"])
def test_rows_that_are_not_aligned_are_copied_each_time(seen: Seen, name: str) -> None:
    given = prefill() | {"out": torch.empty(2, 6, 4, 16, dtype=BF16)}
    ck.attention(**given)
    odd = given | {name: unaligned(given[name])}
    place = ["out", "lse", "q", "k", "v"].index(name)
    for _ in range(3):
        ck.attention(**odd)
        assert seen.general == 2
        assert seen.launches[-1][place][0] not in (where(given[name]), where(odd[name]))
        assert seen.launches[-1][place][0] % 16 == 0
    ck.attention(**given)
    assert seen.general == 2


def test_results_behind_a_copy_are_written_each_time(seen: Seen, monkeypatch: pytest.MonkeyPatch) -> None:
    given, out = prefill(), unaligned(torch.zeros(2, 6, 4, 16, dtype=BF16))
    monkeypatch.setattr(seen, "kernel", lambda out, *rest: out.fill_(3))
    for _ in range(3):
        ck.attention(**given, out=out.zero_())
        assert (out == 3).all()
    assert seen.general == 1


def test_what_is_copied_is_copied_each_time(seen: Seen) -> None:
    across, given = prefill(), decode()
    across["k"] = across["k"].transpose(2, 3).contiguous().transpose(2, 3)
    given["cache_seqlens"] = torch.arange(4, dtype=INT32)[::2]
    for _ in range(3):
        ck.attention(**across)
        ck.decode_attention(**given)
        assert seen.general == 2
        assert seen.launches[-2][3][0] != where(across["k"])
        assert seen.launches[-1][5][1:] == ((2,), (1,), INT32, given["cache_seqlens"].tolist())
        given["cache_seqlens"] += 1


# ---- what is refused, and what torch should see ---------------------------------------------------------


@pytest.mark.parametrize("function", [ck.attention, ck.decode_attention])
def test_overlaps_are_refused_of_cached_calls_too(seen: Seen, function: Any) -> None:
    memory = randn(8192)
    size = 2 * 4 * 16
    q = memory[:size].view(2, 1, 4, 16)
    k, v = (memory[begin : begin + 2 * 32 * 2 * 16].view(2, 32, 2, 16) for begin in (1024, 4096))
    rest = () if function is ck.attention else (torch.full((2,), 9, dtype=INT32),)

    def into(begin: int) -> Tensor:
        return memory[begin : begin + size].view(2, 1, 4, 16)

    function(q, k, v, *rest, out=into(size))
    function(q, k, v, *rest, out=into(size + 8))
    assert seen.general == 1
    for begin in (0, 8, size - 8, 1024 - 8, 1024, 2048, 3072 - 8, 4096 - 8, 6144 - 8):
        with pytest.raises(UnsupportedProblem, match="out= overlaps an operand"):
            function(q, k, v, *rest, out=into(begin))
    assert len(seen.launches) == 2
    general = seen.general
    for begin in (1024 - size, 3072, 6144):
        function(q, k, v, *rest, out=into(begin))
    assert len(seen.launches) == 5
    assert seen.general == general


def test_an_index_that_out_would_overwrite_is_seen(seen: Seen) -> None:
    given, out = decode(), randn(2, 4, 16)
    for _ in range(2):
        ck.decode_attention(**given, out=out)
    given["cache_seqlens"] = out.view(INT32).flatten()[:2]
    with pytest.raises(UnsupportedProblem, match="out= overlaps an operand"):
        ck.decode_attention(**given, out=out)
    given = prefill() | {"mask": torch.ones(1, 1, 6, 6, dtype=torch.bool)}
    ck.attention(**given, out=out.new_empty(2, 6, 4, 16))
    memory = torch.empty(2 * 6 * 4 * 32, dtype=torch.bool)
    given["mask"] = memory[-36:].view(1, 1, 6, 6)
    with pytest.raises(UnsupportedProblem, match="out= overlaps an operand"):
        ck.attention(**given, out=memory.view(BF16).view(2, 6, 4, 16))


@pytest.mark.parametrize("scale", [0.0, -1.0, math.inf, math.nan])
def test_a_scale_out_of_range_is_refused_of_cached_calls_too(seen: Seen, scale: float) -> None:
    for function, given in both():
        function(**given)
        with pytest.raises(UnsupportedProblem, match="scale must be above 0"):
            function(**given, scale=scale)
        with pytest.raises(UnsupportedProblem, match="softcap must be"):
            function(**given, softcap=-1.0)
    assert len(seen.launches) == 2


def test_a_flag_that_is_no_bool_is_refused_of_cached_calls_too(seen: Seen) -> None:
    """Keys take 1 for True."""
    warm = (ck.attention, prefill(), "causal"), (ck.decode_attention, decode(), "return_lse")
    for function, given, name in warm:
        function(**given | {name: True})
        launched = len(seen.launches)
        with pytest.raises(UnsupportedProblem, match=f"takes {name} as a bool; got 1"):
            function(**given | {name: 1})
        assert len(seen.launches) == launched


def test_an_out_of_another_kind_is_refused_of_cached_calls_too(seen: Seen) -> None:
    for function, given in both():
        q = given["q"]
        function(**given, out=torch.empty_like(q))
        for bad in (q.half(), q[:1], q.flatten(), q.new_zeros(()), q[:1].clone().expand(q.shape), q.to("meta")):
            with pytest.raises(UnsupportedProblem, match="takes out in|; out is on|out must"):
                function(**given, out=bad)
    assert len(seen.launches) == 2


@pytest.mark.parametrize("name", ["q", "k", "v", "out"])
def test_gradients_go_through_torch(seen: Seen, name: str) -> None:
    given = prefill() | {"out": torch.empty(2, 6, 4, 16, dtype=BF16)}
    fresh = {n: t for n, t in given.items() if n != "out"}
    ck.attention(**given)
    ck.attention(**fresh)
    wanting = given | {name: given[name].clone().requires_grad_()}
    with pytest.raises(UnsupportedProblem, match="out= is not differentiable"):
        ck.attention(**wanting)
    if name != "out":
        wanting.pop("out")
        for _ in range(2):
            assert ck.attention(**wanting).requires_grad  # by the path's Function, whose kernel here is the CPU's
        assert seen.general == 2
    general = seen.general
    with torch.no_grad():
        ck.attention(**wanting)
        assert not ck.attention(**fresh).requires_grad
    assert seen.general == general


@pytest.mark.parametrize(
    "mode",
    [BaseTorchDispatchMode, BaseTorchFunctionMode, lambda: torch.autocast("cpu", BF16), lambda: torch.device("cpu")],
)
def test_under_a_mode_torch_sees_the_call(seen: Seen, mode: Callable[[], AbstractContextManager[Any]]) -> None:
    for function, given in both():
        function(**given)
        general = seen.general
        with mode():
            function(**given)
        assert seen.general == general + 1
        function(**given)
        assert seen.general == general + 1


class Other(Tensor):
    pass


@pytest.mark.parametrize(
    "other",
    [
        lambda t: t.as_subclass(Other),
        lambda t: torch._neg_view(t),
        lambda t: torch._efficientzerotensor(t.shape, dtype=t.dtype),
    ],
)
def test_tensors_that_are_not_plain_go_through_torch(seen: Seen, other: Callable[[Tensor], Tensor]) -> None:
    for function, given in both():
        for name in [n for n, t in given.items() if t.is_floating_point()]:
            function(**given)
            general = seen.general
            with suppress(UnsupportedProblem):  # a cache that is not there
                function(**given | {name: other(given[name])})
            assert seen.general == general + 1
            assert 0 not in [a[0] for a in seen.launches[-1] if isinstance(a, tuple)]


def test_what_no_key_can_be_made_of_is_refused(seen: Seen) -> None:
    given = prefill()
    ck.attention(**given)
    for odd, message in (({"k": given["k"].to_sparse()}, "layout"), ({"causal": []}, "causal as a bool")):
        with pytest.raises(UnsupportedProblem, match=message):
            ck.attention(**given | odd)


def test_another_device_is_another_key() -> None:
    """As far as a machine without devices can tell."""
    t = prefill()["q"]
    names = ("shape", "stride", "dtype", "is_neg", "data_ptr")
    there = SimpleNamespace(get_device=lambda: 1, **{name: getattr(t, name) for name in names})
    here, other = (paths.cache_key((None, (q, None), (), (), None)) for q in (t, there))
    assert here != other


@pytest.mark.filterwarnings("ignore")
def test_torch_s_tracers_record_the_op(seen: Seen) -> None:
    given = prefill()
    ck.attention(**given)
    traced = torch.jit.trace(lambda q: ck.attention(q, given["k"], given["v"]), given["q"], check_trace=False)
    assert "cutekernels::_attention" in str(traced.graph)
    graph = torch.fx.experimental.proxy_tensor.make_fx(lambda q: ck.attention(q, given["k"], given["v"]))(given["q"])
    assert "cutekernels._attention" in graph.code

    @torch.compile(fullgraph=True, backend="aot_eager")
    def model(q: Tensor) -> Any:
        return ck.attention(q * 2, given["k"], given["v"]), ck.decode_attention(q[:, :1] * 2, *rest)

    rest = decode()["k_cache"], decode()["v_cache"], decode()["cache_seqlens"]
    model(given["q"])
    general = seen.general
    many = torch.stack([given["q"]] * 3)
    torch.vmap(lambda q: ck.attention(q, given["k"], given["v"]))(many)
    assert seen.general == general + 3


def test_routed_calls_are_remembered_too(seen: Seen, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sdpa, "DEVICES", ("cpu",))
    given = [randn(2, 4, 6, 16) for _ in range(3)]
    with ck.route_sdpa() as routing:
        for _ in range(3):
            torch.nn.functional.scaled_dot_product_attention(*given, is_causal=True)
    assert (routing.routed, seen.general) == (3, 1)


def test_a_call_of_another_device_is_made_there(seen: Seen, monkeypatch: pytest.MonkeyPatch) -> None:
    given, entered = prefill(), []
    for _ in range(2):
        ck.attention(**given)
    monkeypatch.setattr(paths, "_current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "device", lambda index: nullcontext(entered.append(index)))
    ck.attention(**given)
    assert (seen.general, entered) == (1, [-1])


# ---- what is kept ---------------------------------------------------------------------------------------


def test_reload_forgets(seen: Seen, monkeypatch: pytest.MonkeyPatch) -> None:
    given = decode()
    for _ in range(2):
        ck.decode_attention(**given)
    newer: list[Any] = []
    monkeypatch.setattr(dispatch.compiler, "get", lambda *args: lambda *launched: newer.append(launched))
    ck.decode_attention(**given)
    assert (seen.general, len(seen.launches), len(newer)) == (1, 3, 0)
    ck.reload()
    assert not cached()
    for _ in range(2):
        ck.decode_attention(**given)
    assert (seen.general, len(seen.launches), len(newer)) == (2, 3, 2)


def test_calls_are_remembered_up_to_a_number(seen: Seen, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paths, "MOST_CALLS", 5)
    for seq in range(1, 23):
        ck.attention(**prefill(seq))
        assert cached() <= 5
    assert cached()


def test_a_launch_that_fails_is_not_remembered(seen: Seen, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any) -> None:
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(seen, "kernel", broken)
    with pytest.raises(RuntimeError, match="no such kernel"):
        ck.attention(**prefill())
    assert not cached()


@pytest.mark.parametrize("name", ["plain", "packed", "decode", "decode, pages"])
def test_a_warm_call_costs_the_host_less_than_42_keys(seen: Seen, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """All but the kernel. 16, 24, 26 and 27 on 2026-11-22, on a box where a key takes 1.1 us."""
    function, given = CALLS[name]()
    monkeypatch.setattr(seen, "kernel", lambda *args: None)
    function(**given)
    found = host_cost(partial(function, **given), calls=10, chunks=50)
    assert seen.general == 1
    assert found < 42
