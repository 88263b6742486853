"""Packed weights on a GPU, over the public calls: both bodies of ``quantized_linear``, its module.

``chosen`` names one config of a body for each number of tokens, so that tests of one kind of weight share a kernel:
extents are no part of what is compiled.
"""

from __future__ import annotations

import copy
import math
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

import cutekernels as ck
from cutekernels import gpu
from cutekernels.errors import UnsupportedProblem
from cutekernels.kernels.activations import ACTIVATIONS
from cutekernels.nn import QuantizedLinear
from cutekernels.ops.products.packed import QUANTIZED_LINEAR
from cutekernels.ops.products.packed_api import quantized_linear
from cutekernels.ops.products.schedules.packed_problem import QuantizedConfig, QuantizedProblem
from cutekernels.ops.products.schedules.problem import GATED
from cutekernels.ops.shared.calls import call
from cutekernels.quant import QuantizedWeight, quantize
from tests.on_gpu import assert_no_workspace_is_shared, graph_of
from tests.quantized.cases import (
    BF16,
    COMMON,
    E8M0,
    FP16,
    FP32,
    KINDS,
    UE5M3,
    Kind,
    Made,
    error,
    make,
    product_of,
    shifted_edge,
    swapped_scales,
    wrong_nibble,
    wrong_zero,
)

on_gpu = pytest.mark.gpu
shared = pytest.mark.usefixtures("one_seed")
BODIES = ("skinny", "warpgroup")
ASYMMETRIC = Kind(group=64, zeros=True)
FEW = {8: 64, 16: 64, 24: 64, 32: 64, 48: 64, 64: 64}  # tile_n by tile_m of the skinny body
K = 1096  # 8 or 9 k-tiles, the last one partly beyond it


def skinny(m: int, **changes: Any) -> QuantizedConfig:
    tile = next((tile for tile in FEW if tile >= m), 64)
    knobs = {
        "tile_m": tile, "tile_n": FEW[tile], "tile_k": 128, "stages": 4, "warps_n": 2, "warps_k": 2, "ctas_per_sm": 1,
    }  # fmt: skip
    return QuantizedConfig(**{**_first(knobs), "body": "skinny", **changes})


def warpgroup(m: int, kind: Kind, **changes: Any) -> QuantizedConfig:
    tile = 16 if m <= 32 else 64
    knobs = {"tile_m": tile, "tile_n": 128, "tile_k": 128 if kind.group in (0, 128) else 64, "stages": 4}
    if kind.code == "e2m1":
        knobs["scaled"] = "weights"
    return QuantizedConfig(**{**_first(knobs), "body": "warpgroup", **changes})


def _first(knobs: dict[str, Any]) -> dict[str, Any]:
    """``knobs``, and the first value of each other."""
    return {name: values[0] for name, values in QuantizedConfig.space().items()} | knobs


def posed(m: int, n: int, k: int, kind: Kind, out_align: int = 8) -> QuantizedProblem:
    scale = {FP16: "fp16", BF16: "bf16", FP32: "fp32", E8M0: "e8m0", UE5M3: "ue5m3"}[kind.scale]
    return QuantizedProblem(
        m=m, n=n, k=k, code=kind.code, group=kind.group, scale_rows=kind.scale_rows, scale=scale, zeros=kind.zeros,
        factors=scale == "ue5m3", out_align=out_align,
    )  # fmt: skip


def chosen(
    body: str,
    m: int,
    n: int,
    k: int,
    kind: Kind,
    spec: gpu.GpuSpec,
    *,
    bias: str = "none",
    activation: str = "none",
    **changes: Any,
) -> str:
    """A config that no rule refuses: the stages of a warpgroup are as many as fit."""
    if body == "skinny":
        variants = [skinny(m, **{"stages": stages, **changes}) for stages in (4, 6, 8, 3)]
    else:
        variants = [warpgroup(m, kind, **{"stages": stages, **changes}) for stages in range(8, 1, -1)]
    p = posed(m, n, k, kind, 8 if n % 8 == 0 else 1).replace(bias=bias, activation=activation)
    reasons = []
    for config in variants:
        reason = QUANTIZED_LINEAR.why_not(p, config, spec)
        if reason is None:
            return str(config)
        reasons.append(reason)
    raise AssertionError(f"{p}: {reasons}")


def forced(body: str, m: int, n: int, k: int, kind: Kind, **changes: Any) -> str:
    spec = gpu.detect()
    if body == "warpgroup" and not spec.has_wgmma:
        pytest.skip("warpgroup needs wgmma")
    return chosen(body, m, n, k, kind, spec, **changes)


GATES: dict[str, tuple[int, dict[str, Any]]] = {  # tokens, knobs
    "few": (37, {"tile_m": 48, "tile_k": 128}),
    "cluster": (64, {"tile_m": 64, "tile_k": 128, "split_k": 5, "pdl": True}),
    "shared": (700, {"tile_m": 64, "tile_k": 128, "stream_k": True, "pdl": True}),
    "in parts": (2600, {"tile_m": 256, "tile_k": 64, "scaled": "weights", "raster": 8}),  # two batches under way
}


def _cluster(m: int, tile_m: int, split_k: int, ctas_per_sm: int = 1, warps_k: int = 1) -> tuple[int, dict[str, Any]]:
    knobs = {"tile_m": tile_m, "split_k": split_k, "ctas_per_sm": ctas_per_sm, "warps_k": warps_k}
    return m, {"tile_n": 64, "tile_k": 128, "pdl": True, **knobs}


CLUSTERS = (  # tokens, knobs: 33 k-tiles, whose parts groups in turn have unequal shares of
    _cluster(5, 16, 8),
    _cluster(40, 48, 3),
    _cluster(64, 64, 4, 2),
    _cluster(64, 64, 5),
    _cluster(90, 96, 6),
    _cluster(5, 16, 8, warps_k=2),
    _cluster(20, 32, 4, 2, warps_k=2),
    _cluster(64, 64, 5, warps_k=2),
    _cluster(30, 32, 1, warps_k=2),
    _cluster(70, 32, 2, warps_k=2),
)


def config_of_gate(way: str, kind: Kind, spec: gpu.GpuSpec) -> str:
    m, knobs = GATES[way]
    scaled = {"scaled": "accumulators"} if kind.group == 0 else {}
    return chosen("warpgroup", m, 1920, 4104, kind, spec, activation=GATED, tile_n=128, **knobs | scaled)


@pytest.mark.parametrize("name", ["h100", "h200"])
def test_a_config_of_each_body_suits_what_is_tested_here(name: str) -> None:
    spec = gpu.lookup(name)
    for body, kind, m in product(BODIES, KINDS.values(), (1, 5, 17, 33, 64, 200, 1100)):
        for pdl in (False, True):
            chosen(body, m, 1000, K, kind, spec, pdl=pdl)
        chosen(body, m, 1000, K, kind, spec, stream_k=True)
    for kind, (m, knobs) in product(COMMON.values(), CLUSTERS):
        chosen("warpgroup", m, 840, 4104, kind, spec, bias="same", **knobs)
    for kind, way in product(COMMON.values(), GATES):
        config_of_gate(way, kind, spec)


def held(
    made: Made, x: Tensor, config: str | None, bias: Tensor | None = None, activation: str | None = None
) -> tuple[Tensor, float]:
    """The result, and its error over the tolerance."""
    y = quantized_linear(x, made.weight(), bias, activation=activation, config=config)
    return y, error(y, product_of(x, made.exact(), bias, activation), x.shape[-1])


def tokens(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.randn(shape, device="cuda").to(dtype)


# ---- numbers --------------------------------------------------------------------------------------------


@on_gpu
@shared
@pytest.mark.parametrize("kind", KINDS.values(), ids=str)
@pytest.mark.parametrize("body", BODIES)
def test_every_kind_of_weight(body: str, kind: Kind) -> None:
    """One kernel each; extents with a tail in N, and with one in K, in a group and in a tile."""
    for m, n, k in ((5, 1000, K), (8, 136, 200), (3, 64, 8), (7, 200, 520)):
        config = forced(body, m, n, k, kind)
        _, found = held(make(n, k, kind, "cuda"), tokens(m, k), config)
        assert found <= 1, f"{m} {n} {k} [{config}]: {found:.3g} times the tolerance"


@on_gpu
@shared
@pytest.mark.parametrize("kind", COMMON.values(), ids=str)
@pytest.mark.parametrize("body", BODIES)
def test_fp16_activations(body: str, kind: Kind) -> None:
    for m, n, k in ((5, 1000, K), (8, 136, 200)):
        _, found = held(make(n, k, kind, "cuda"), tokens(m, k, dtype=FP16), forced(body, m, n, k, kind))
        assert found <= 1


@on_gpu
@shared
@pytest.mark.parametrize("m", [1, 2, 7, 8, 9, 16, 17, 31, 32, 33, 48, 63, 64, 65, 100, 128, 200, 511, 1100])
@pytest.mark.parametrize("body", BODIES)
def test_tokens(body: str, m: int) -> None:
    made = make(1000, K, ASYMMETRIC, "cuda")
    _, found = held(made, tokens(m, K), forced(body, m, 1000, K, ASYMMETRIC))
    assert found <= 1


@on_gpu
@shared
@pytest.mark.parametrize("m", [1, 12, 40, 200, 1100])
@pytest.mark.parametrize("kind", COMMON.values(), ids=str)
def test_the_config_that_calls_take(kind: Kind, m: int) -> None:
    made, x, b = make(1000, K, kind, "cuda"), tokens(m, K), tokens(1000)
    y = ck.linear(x, made.weight(), b)
    assert error(y, product_of(x, made.exact(), b), K) <= 1


@on_gpu
@shared
@pytest.mark.parametrize("n", [1, 17, 129, 1001])
def test_rows_that_8_does_not_divide(n: int) -> None:
    """Whose results have rows that no 16 bytes align: the skinny body's alone."""
    for m, k in ((1, 200), (8, K)):
        _, found = held(make(n, k, ASYMMETRIC, "cuda"), tokens(m, k), forced("skinny", m, n, k, ASYMMETRIC))
        assert found <= 1


@on_gpu
@shared
@pytest.mark.parametrize("k", [8, 56, 64, 72, 128, 136, 192, 200, 256, 264, 1000, 2056])
@pytest.mark.parametrize("body", BODIES)
def test_k_tails(body: str, k: int) -> None:
    """A weight whose padding along K holds other codes than 0, and x whose next row is not its own."""
    made, x = make(200, k, ASYMMETRIC, "cuda"), tokens(8, k + 8)
    x[:, k:] = math.nan
    _, found = held(made, x[:, :k], forced(body, 8, 200, k, ASYMMETRIC))
    assert found <= 1


@on_gpu
@shared
@pytest.mark.parametrize("activation", [None, *ACTIVATIONS[1:]])
@pytest.mark.parametrize("bias", [None, BF16, FP32])
@pytest.mark.parametrize("body", BODIES)
def test_bias_and_activation(body: str, bias: torch.dtype | None, activation: str | None) -> None:
    made, x = make(1000, K, ASYMMETRIC, "cuda"), tokens(8, K)
    b = None if bias is None else torch.randn(1000, device="cuda").to(bias)
    _, found = held(made, x, forced(body, 8, 1000, K, ASYMMETRIC), b, activation)
    assert found <= 1


@on_gpu
@shared
@pytest.mark.parametrize("kind", COMMON.values(), ids=str)
@pytest.mark.parametrize("body", BODIES)
def test_outliers(body: str, kind: Kind) -> None:
    """A column of 1e4, as activations have: others must not be lost beside it more than fp32 sums lose."""
    made, x = make(1000, K, kind, "cuda"), tokens(8, K)
    x[:, 77] = 1e4
    _, found = held(made, x, forced(body, 8, 1000, K, kind))
    assert found <= 1
    x[1:, 77] = 0  # of one token: a row's tolerance is its own
    y, found = held(made, x, forced(body, 8, 1000, K, kind))
    assert found <= 1
    assert error(y[1:], product_of(x[1:], made.exact()), K) <= 1


@on_gpu
@shared
@pytest.mark.parametrize("body", BODIES)
def test_shared_tiles(body: str) -> None:
    """Stream-K: the k-tiles of a tile by several CTAs; the same bits every time."""
    for m, n, k in ((8, 1000, 4104), (200, 1000, K), (700, 2000, K)):  # the last with whole waves in front
        made, x, b = make(n, k, ASYMMETRIC, "cuda"), tokens(m, k), tokens(n)
        config = forced(body, m, n, k, ASYMMETRIC, stream_k=True, bias="same")
        first, found = held(made, x, config, b)
        assert found <= 1
        assert all(torch.equal(held(made, x, config, b)[0], first) for _ in range(5))


@on_gpu
@shared
@pytest.mark.parametrize("kind", COMMON.values(), ids=str)
def test_clusters(kind: Kind) -> None:
    """A tile's K in the CTAs of a cluster, one or two of them to an SM, and in groups that take turns; the same bits
    every time.
    """
    for m, knobs in CLUSTERS:
        made, x, b = make(840, 4104, kind, "cuda"), tokens(m, 4104), tokens(840)
        config = forced("warpgroup", m, 840, 4104, kind, bias="same", **knobs)
        first, found = held(made, x, config, b, "gelu")
        assert found <= 1, f"[{config}]: {found:.3g} times the tolerance"
        assert all(torch.equal(held(made, x, config, b, "gelu")[0], first) for _ in range(5))


@on_gpu
@shared
@pytest.mark.parametrize("kind", COMMON.values(), ids=str)
@pytest.mark.parametrize("way", GATES)
def test_gates_of_the_warpgroup_body(way: str, kind: Kind) -> None:
    """Gates and up that meet in shared memory, several tiles of a CTA behind one another; the same bits every time."""
    (m, _), n, k = GATES[way], 1920, 4104 if way == "cluster" else K
    if not gpu.detect().has_wgmma:
        pytest.skip("warpgroup needs wgmma")
    config, made, x = config_of_gate(way, kind, gpu.detect()), make(n, k, kind, "cuda"), tokens(m, k)
    exact = x.double() @ made.exact().t()
    want = (torch.nn.functional.silu(exact[:, : n // 2]) * exact[:, n // 2 :]).to(BF16)
    weight, options = made.weight(), (kind.code, kind.group, n, GATED)
    inputs = (x, weight.packed, weight.scales, weight.zeros, weight.factors, None)
    first, *again = [call(QUANTIZED_LINEAR, inputs, options, config=config)[0] for _ in range(6)]
    found = error(first, want, k, gated=True)
    assert found <= 1, f"[{config}]: {found:.3g} times the tolerance"
    assert all(torch.equal(y, first) for y in again)


@on_gpu
@shared
@pytest.mark.parametrize("kind", COMMON.values(), ids=str)
def test_many_tokens(kind: Kind) -> None:
    """Two batches of products under way, decoded into registers in turn, on a busy GPU; the same bits every time."""
    m, knobs = GATES["in parts"]
    scaled = {"scaled": "accumulators"} if kind.group == 0 else {}
    made, x = make(1920, K, kind, "cuda"), tokens(m, K)
    config = forced("warpgroup", m, 1920, K, kind, tile_n=128, **knobs | scaled)
    first, found = held(made, x, config)
    assert found <= 1, f"[{config}]: {found:.3g} times the tolerance"
    assert all(torch.equal(held(made, x, config)[0], first) for _ in range(20))


@on_gpu
@shared
@pytest.mark.parametrize("kind", [ASYMMETRIC, Kind("e4m3", 128, 128, scale=FP32)], ids=str)
@pytest.mark.parametrize("scaled", ["accumulators", "weights"])
def test_where_the_warpgroup_body_scales(scaled: str, kind: Kind) -> None:
    _, found = held(make(1000, K, kind, "cuda"), tokens(64, K), forced("warpgroup", 64, 1000, K, kind, scaled=scaled))
    assert found <= 1


@on_gpu
@shared
@pytest.mark.parametrize("body", BODIES)
def test_planted_bugs_are_beyond_the_tolerance(body: str) -> None:
    """A kernel over a broken weight stands for one that breaks a whole weight."""
    made, x = make(200, 512, ASYMMETRIC, "cuda"), tokens(16, 512)
    config = forced(body, 16, 200, 512, ASYMMETRIC)
    expected = product_of(x, made.exact())
    assert held(made, x, config)[1] <= 1
    for row, column in ((0, 0), (199, 511), (17, 63), (64, 64)):
        broken = wrong_nibble(made, row, column)
        y, found = held(broken, x, config)
        assert found <= 1
        assert error(y, expected, 512) > 1, f"nibble {row} {column}"
        assert torch.equal(y[:, torch.arange(200) != row], held(made, x, config)[0][:, torch.arange(200) != row])
    for name, broken in (("zero", wrong_zero(made, 199, 7)), ("scales", swapped_scales(made, 63))):
        y, found = held(broken, x, config)
        assert found <= 1
        assert error(y, expected, 512) > 1, name
    assert error(held(made, x, config)[0], product_of(x, shifted_edge(made, 1).exact()), 512) > 1, "a shifted edge"


# ---- memory ---------------------------------------------------------------------------------------------


@on_gpu
@shared
@pytest.mark.parametrize("body", BODIES)
def test_strided_and_misaligned_x(body: str) -> None:
    made = make(1000, K, ASYMMETRIC, "cuda")
    config, x = forced(body, 8, 1000, K, ASYMMETRIC), tokens(8, K)
    expected = quantized_linear(x, made.weight(), config=config)
    assert error(expected, product_of(x, made.exact()), K) <= 1
    wide = tokens(8, 2 * K + 8)
    laid = {
        "sliced": wide[:, 8 : 8 + K],
        "sliced at an odd element": wide[:, 3 : 3 + K],
        "an odd pitch": torch.empty(8 * (K + 1), device="cuda", dtype=BF16).view(8, K + 1)[:, :K],
        "every second": wide[:, : 2 * K : 2],
        "misaligned": torch.empty(8 * K + 1, device="cuda", dtype=BF16)[1:].view(8, K),
        "transposed": torch.empty(K, 8, device="cuda", dtype=BF16).t(),
    }
    for name, given in laid.items():
        assert torch.equal(quantized_linear(given.copy_(x), made.weight(), config=config), expected), name
    assert torch.equal(quantized_linear(x[:1].expand(8, K), made.weight(), config=config)[7], expected[0])
    assert torch.equal(quantized_linear(x.view(2, 4, K), made.weight(), config=config).view(8, 1000), expected)


@on_gpu
@shared
@pytest.mark.parametrize("body", BODIES)
def test_slices_of_out(body: str) -> None:
    """Nothing beside a slice is written, with a tail of rows and of tokens in the last tile."""
    made = make(136, 200, ASYMMETRIC, "cuda")
    x = tokens(5, 200)
    config = forced(body, 5, 136, 200, ASYMMETRIC)
    expected = quantized_linear(x, made.weight(), config=config)
    memory = torch.full((7, 160), math.nan, device="cuda", dtype=BF16)
    out = memory[1:6, 8:144]
    assert quantized_linear(x, made.weight(), config=config, out=out) is out
    assert torch.equal(out, expected)
    out.fill_(math.nan)
    assert bool(memory.isnan().all())


@on_gpu
@shared
def test_out_at_odd_addresses() -> None:
    made, x = make(129, 200, ASYMMETRIC, "cuda"), tokens(5, 200)
    expected = ck.linear(x, made.weight())
    for first in (1, 3):
        memory = torch.full((7, 160), math.nan, device="cuda", dtype=BF16)
        out = memory[1:6, first : first + 129]
        ck.linear(x, made.weight(), out=out)
        assert torch.equal(out, expected)
        out.fill_(math.nan)
        assert bool(memory.isnan().all())
    for out in (
        torch.empty(129, 5, device="cuda", dtype=BF16).t(),
        torch.empty(5, 258, device="cuda", dtype=BF16)[:, ::2],
    ):
        assert torch.equal(ck.linear(x, made.weight(), out=out), expected)


@on_gpu
@shared
def test_no_tokens() -> None:
    made = make(136, 200, ASYMMETRIC, "cuda")
    assert ck.linear(tokens(0, 200), made.weight()).shape == (0, 136)
    x = tokens(2, 0, 200).requires_grad_()
    ck.linear(x, made.weight()).sum().backward()
    assert x.grad is not None and x.grad.shape == x.shape


@on_gpu
@shared
@pytest.mark.parametrize("body", BODIES)
def test_act_order(body: str) -> None:
    kind = Kind(group=64, zeros=True, order=True)
    for m, n, k in ((5, 1000, K), (8, 136, 200)):
        _, found = held(make(n, k, kind, "cuda"), tokens(m, k), forced(body, m, n, k, kind))
        assert found <= 1


@on_gpu
@shared
def test_refusals() -> None:
    x, weight = tokens(5, 136), make(72, 136, device="cuda").weight()
    for refused, message in (
        (lambda: ck.linear(x.float(), weight), "fp16|float16"),
        (lambda: ck.linear(x, weight.to("cpu")), "weight|packed is on cpu, not cuda"),
        (lambda: ck.linear(x[:, :132].contiguous(), make(72, 132, device="cuda").weight()), "K is a multiple of 8"),
        (lambda: ck.linear(x, weight, x[0, :72].cpu()), "bias is on cpu, not cuda"),
    ):
        with pytest.raises(UnsupportedProblem, match=message) as error:
            refused()
        assert "\n" not in str(error.value)


# ---- repeated, captured, side by side -------------------------------------------------------------------


@on_gpu
@shared
@pytest.mark.parametrize("m", [8, 200])
@pytest.mark.parametrize("body", BODIES)
def test_the_same_bits_every_time(body: str, m: int) -> None:
    made, x = make(1000, K, ASYMMETRIC, "cuda"), tokens(m, K)
    config = forced(body, m, 1000, K, ASYMMETRIC)
    first = quantized_linear(x, made.weight(), config=config)
    assert all(torch.equal(quantized_linear(x, made.weight(), config=config), first) for _ in range(20))


@on_gpu
@shared
@pytest.mark.parametrize("stream_k", [False, True])
@pytest.mark.parametrize("body", BODIES)
def test_graphs_and_streams(body: str, stream_k: bool) -> None:
    """Replays follow x; two streams and their graphs share no workspace."""
    made = make(1000, 2056, ASYMMETRIC, "cuda")
    weight, config = made.weight(), forced(body, 8, 1000, 2056, ASYMMETRIC, stream_k=stream_k)
    xs = [tokens(8, 2056) for _ in range(2)]
    graphs, outs = assert_no_workspace_is_shared(xs, partial(quantized_linear, weight=weight, config=config))
    xs[0].copy_(xs[1])
    graphs[0].replay()
    torch.cuda.synchronize()
    assert torch.equal(*outs[0], *outs[1])


@on_gpu
@shared
@pytest.mark.parametrize("body", BODIES)
def test_dependent_launches_see_what_came_before(body: str) -> None:
    """A chain through activations whose kernels start early, eager and in one graph."""
    kind, n = Kind(group=128, scale=FP32), 1024
    weights = [make(n, n, kind, "cuda", seed=i).weight() for i in range(3)]
    if not gpu.detect().has_pdl:
        pytest.skip("no programmatic dependent launch")

    def chain(x: Tensor, pdl: bool) -> Tensor:
        config = forced(body, 8, n, n, kind, pdl=pdl, **({"prefetch_l2": 2} if pdl and body == "skinny" else {}))
        for weight in weights * 4:
            x = quantized_linear(x, weight, config=config)
        return x

    x = tokens(8, n)
    want = chain(x, False)
    assert all(torch.equal(chain(x, True), want) for _ in range(10))
    graph, out = graph_of(lambda: chain(x, True))
    for _ in range(10):
        out.zero_()
        graph.replay()
        assert torch.equal(out, want)


# ---- chains, the module ---------------------------------------------------------------------------------


@on_gpu
@shared
def test_chains() -> None:
    made = make(1024, K, ASYMMETRIC, "cuda")
    weight, dense = made.weight(), made.exact().to(BF16)
    for m in (5, 200):
        x, residual, gamma = tokens(m, K), tokens(m, K), torch.rand(K, device="cuda").to(BF16) + 0.5
        for options in ({}, {"exact": True}, {"bias": tokens(1024), "activation": "silu"}):
            h = ck.rms_norm(x, gamma, rounding="huggingface" if options.get("exact") else "once")
            more = {name: value for name, value in options.items() if name != "exact"}
            expected = product_of(h, made.exact(), more.get("bias"), more.get("activation"))
            assert error(ck.rms_norm_linear(x, gamma, weight, **options), expected, K) <= 1
        y, u = ck.rms_norm_linear(x, gamma, weight, residual=residual)
        h, v = ck.add_rms_norm(x, residual, gamma)
        assert torch.equal(u, v)
        assert error(y, product_of(h, made.exact()), K) <= 1
        gated = ck.linear_silu_mul(x, weight, norm_weight=gamma)
        plain = ck.silu_mul(ck.rms_norm(x, gamma) @ dense.t())
        torch.testing.assert_close(gated, plain, rtol=0.05, atol=0.05)


@on_gpu
@shared
def test_the_module() -> None:
    linear = torch.nn.Linear(K, 1000, device="cuda", dtype=BF16)
    layer = QuantizedLinear.from_linear(linear, "int4_g128")
    x = tokens(8, K)
    y = layer(x)
    assert torch.equal(y, ck.linear(x, quantize(linear.weight.detach(), "int4_g128"), linear.bias))
    moved = copy.deepcopy(layer).cpu()
    assert moved.weight.device.type == "cpu"
    back = QuantizedLinear(
        quantize(torch.randn(1000, K, device="cuda").to(BF16), "int4_g128"), linear.bias.detach().clone()
    )
    back.load_state_dict(moved.state_dict())
    assert torch.equal(back(x), y)
    assert torch.equal(moved.cuda()(x), y)
    assert copy.deepcopy(layer).half()(x.half()).dtype == FP16
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        out = back(x)
    back.packed.zero_()
    back.load_state_dict(moved.cpu().state_dict())  # in place: a graph has the addresses
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, y)


@on_gpu
@shared
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_compiled() -> None:
    layer = QuantizedLinear.from_linear(torch.nn.Linear(K, 1000, device="cuda", dtype=BF16), "int4_g128")
    x, gate = tokens(8, K), make(1024, K, ASYMMETRIC, "cuda").weight()
    with torch.no_grad():
        assert torch.equal(torch.compile(layer, fullgraph=True)(x), layer(x))
        one = torch.compile(lambda x: ck.linear_silu_mul(x, gate), fullgraph=True)
        for m in (8, 40, 300):
            x = tokens(m, K)
            torch.testing.assert_close(one(x), ck.linear_silu_mul(x, gate), rtol=0.02, atol=0.02)


@on_gpu
@shared
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_opcheck() -> None:
    weight: QuantizedWeight = make(136, 200, ASYMMETRIC, "cuda").weight()
    x = tokens(5, 200).requires_grad_()
    held_by = weight.packed, weight.scales, weight.zeros, weight.factors
    given = (x, *held_by, None, weight.code, weight.group, 136, "none")
    torch.library.opcheck(torch.ops.cutekernels.quantized_linear.default, given)
    options = weight.code, weight.group, 136, 200, 72, "bf16", 64
    torch.library.opcheck(torch.ops.cutekernels.dequantize.default, (*held_by, *options))
