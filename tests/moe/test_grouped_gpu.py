"""Grouped products on a GPU: numerics against fp64, ragged groups, wrong offsets, isolation, determinism, graphs."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

import cutekernels as ck
import cutekernels.ops.library  # as ops of torch
from cutekernels import compile as compiler
from cutekernels import gpu, nn, verify
from cutekernels.ops.products.grouped import GROUPED_GEMM, GROUPED_GEMM_WGRAD
from cutekernels.ops.products.grouped import GroupedProblem as Problem
from cutekernels.ops.products.groups import SPREADS, sample_offsets
from tests.compiled import having
from tests.on_gpu import computed, drawn, graph_of, normal

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("one_seed")]
OPS = (GROUPED_GEMM, GROUPED_GEMM_WGRAD)
AWKWARD = [
    (GROUPED_GEMM, "rows=1 n=8 k=8 experts=1"),
    (GROUPED_GEMM, "rows=129 n=264 k=40 experts=1023 bias=same activation=gelu"),
    (GROUPED_GEMM, "rows=500 n=96 k=200 experts=7 weight=n align=4 dtype=fp16 bias=fp32 activation=gelu_tanh"),
    (GROUPED_GEMM, "rows=65 n=30 k=34 experts=33 weight=n align=2 activation=relu"),
    (GROUPED_GEMM, "rows=300 n=712 k=264 experts=6 activation=silu_mul"),
    (GROUPED_GEMM, "rows=300 n=712 k=264 experts=6 weight=n bias=fp32 activation=silu_mul"),
    (GROUPED_GEMM_WGRAD, "rows=0 n=16 k=24 experts=3"),
    (GROUPED_GEMM_WGRAD, "rows=129 n=264 k=40 experts=50 dtype=fp16"),
    (GROUPED_GEMM_WGRAD, "rows=65 n=30 k=34 experts=9 align=2"),
]
WRONG = [(-5, 3, 2**31 - 1), (9, 4, 2), (2**31 - 1, -(2**31), 7), (-(2**31),) * 3, (500, 600, 700), (0, 2**31 - 1, 0)]
CASES = [(op, text) for op in OPS for text in op.suite] + AWKWARD


def ends(*values: int) -> Tensor:
    return torch.tensor(values, device="cuda", dtype=torch.int32)


@pytest.mark.parametrize("seed", range(len(SPREADS)), ids=SPREADS)
@pytest.mark.parametrize(("op", "text"), CASES, ids=str)
def test_every_suite_and_spread_with_default_and_random_configs(op: Any, text: str, seed: int) -> None:
    problem = Problem.parse(text)
    inputs = op.sample(problem, "cuda", seed)
    options = {name: getattr(problem, name) for name in op.options}
    results = op.outputs(problem, *inputs)
    assert op.problem(*results, *inputs, **options) == problem
    expected, work = op.reference(problem, *inputs), op.work(problem)
    for config in drawn(op, problem, 3, text):
        results = computed(op, problem, config, inputs)
        found = verify.worst_error(results, expected, work.flops, depth=work.depth)
        assert found <= 1, f"{op.name} [{problem}] [{config}] is off by {found:.3g} tolerances"


def some(op: Any, problem: Problem, body: str, count: int, seed: int) -> list[str]:
    """Texts of valid configs of ``body``; the test is skipped where there are none."""
    found = [c for c in op.valid(problem, gpu.detect()) if c.body == body]
    if not found:
        pytest.skip(f"no body={body} here")
    return [str(c) for c in random.Random(seed).sample(found, count)]


def assert_nan_stays(spoilt: Tensor, clean: Tensor) -> None:
    """The rows 41 to 170 are NaN, and the others are as if there were none."""
    assert spoilt[41:170].isnan().all()
    assert torch.equal(torch.cat([spoilt[:41], spoilt[170:]]), torch.cat([clean[:41], clean[170:]]))


def replayed(x: Tensor, experts: Any, count: int, spread: str) -> tuple[Tensor, Tensor]:
    """The result of a graph whose offsets have changed since it was captured, the same each time; and the offsets."""
    draw = torch.Generator("cuda").manual_seed(1)
    offsets = sample_offsets(len(x), count, "uniform", draw)
    ck.grouped_gemm(x, experts, offsets)
    graph, out = graph_of(lambda: ck.grouped_gemm(x, experts, offsets))
    offsets.copy_(sample_offsets(len(x), count, spread, draw))
    graph.replay()
    first = out.clone()
    graph.replay()
    assert torch.equal(first, out)
    assert torch.equal(first, ck.grouped_gemm(x, experts, offsets))
    return first, offsets


BODIES = pytest.mark.parametrize("body", ["multistage", "warpgroup"])


@BODIES
def test_nan_stays_with_its_expert_and_its_row(body: str) -> None:
    x, w, offsets = normal(300, 72), normal(6, 136, 72), ends(0, 40, 41, 41, 170, 290, 300)
    wgrad, clean_x = torch.ops.cutekernels.grouped_gemm_wgrad, x.clone()
    clean = ck.grouped_gemm(x, w, offsets)
    x[41:170] = float("nan")
    for config in some(GROUPED_GEMM_WGRAD, SMALL, body, 6, 1):
        clean_dw, dw = wgrad(clean, clean_x, offsets, config), wgrad(clean, x, offsets, config)
        assert dw[3].isnan().all()
        assert torch.equal(dw[[0, 1, 2, 4, 5]], clean_dw[[0, 1, 2, 4, 5]])
        spoilt_dw = wgrad(torch.where(x[:, :1].isnan(), x[:, :1], clean), clean_x, offsets, config)
        assert torch.equal(spoilt_dw[[0, 1, 2, 4, 5]], clean_dw[[0, 1, 2, 4, 5]])
        exact = GROUPED_GEMM_WGRAD.evaluate(clean, clean_x, offsets)
        assert verify.worst_error((clean_dw,), exact, 2.0 * 300 * 136 * 72, depth=300.0) <= 1
    spoilt_w = w.clone()
    spoilt_w[3] = float("nan")
    for config in some(GROUPED_GEMM, SMALL, body, 3, 2):
        clean, spoilt = (ck.grouped_gemm(*args, offsets, config=config) for args in ((clean_x, w), (x, spoilt_w)))
        assert_nan_stays(spoilt, clean)


def test_rows_of_no_expert_are_zero() -> None:
    """The multistage body here; the warpgroup body has a test of its own."""
    x, w, offsets = normal(200, 64), normal(3, 136, 64), ends(70, 75, 75, 130)
    x[:70], x[130:] = float("nan"), float("nan")
    out = torch.full((200, 136), 5.0, device="cuda", dtype=torch.bfloat16)
    (config,) = some(GROUPED_GEMM, Problem.parse("rows=200 n=136 k=64 experts=3 bias=fp32"), "multistage", 1, 3)
    ck.grouped_gemm(x, w, offsets, torch.ones(3, 136, device="cuda"), out=out, config=config)
    assert (out[:70] == 0).all()
    assert (out[130:] == 0).all()
    assert not out[70:130].isnan().any()


@pytest.mark.parametrize(
    "values",
    WRONG,
)
@BODIES
def test_wrong_offsets_touch_nothing_outside(values: tuple[int, ...], body: str) -> None:
    """Guards around every operand keep their values; sanitizers would see reads (docs/notes/moe.md)."""
    memory = torch.full((3, 300, 64), 9.0, device="cuda", dtype=torch.bfloat16)
    x, out = memory[0, 100:200], memory[1, 100:200]
    w, before = normal(2, 64, 64), memory.clone()
    problem = Problem.parse("rows=100 n=64 k=64 experts=2")
    for config in some(GROUPED_GEMM, problem, body, 2, 4):
        ck.grouped_gemm(x, w, ends(*values), out=out, config=config)
    for config in some(GROUPED_GEMM_WGRAD, problem, body, 2, 5):
        torch.ops.cutekernels.grouped_gemm_wgrad(out, x, ends(*values), config)
    torch.cuda.synchronize()
    memory[1, 100:200] = before[1, 100:200]
    assert torch.equal(memory, before)


def test_many_garbage_offsets() -> None:
    """Sums of tiles that overflow 32 bits name no tile."""
    big = 2**31 - 1
    x, w = normal(4096, 64), normal(1023, 64, 64)
    garbage = ends(*[big if i % 2 else -big for i in range(1024)])
    held = garbage.clamp(0, len(x)).cummax(0).values.int()  # what the kernel makes of them
    assert torch.equal(ck.grouped_gemm(x, w, garbage), ck.grouped_gemm(x, w, held))


@pytest.mark.parametrize("spread", SPREADS)
def test_a_graph_follows_its_offsets(spread: str) -> None:
    """One captured graph serves whatever routing its buffers hold, and each replay has the same bits."""
    x, w = normal(512, 128), normal(16, 256, 128)
    first, offsets = replayed(x, w, 16, spread)
    exact = GROUPED_GEMM.evaluate(x, w, offsets, None, activation="none")
    assert verify.worst_error((first,), exact, 2.0 * 512 * 256 * 128, depth=128.0) <= 1


def test_weights_beyond_2_to_31_elements() -> None:
    w = torch.zeros((1000, 2048, 1088), device="cuda", dtype=torch.bfloat16)
    x, offsets = normal(64, 1088), torch.zeros(1001, device="cuda", dtype=torch.int32)
    w[998], offsets[999:] = normal(2048, 1088), 64
    assert w.numel() > 2**31
    out = ck.grouped_gemm(x, w, offsets)
    exact = (x.double() @ w[998].double().mT).to(torch.bfloat16)
    assert verify.worst_error((out,), (exact,), 2.0 * 64 * 2048 * 1088, depth=1088.0) <= 1


@pytest.mark.parametrize("tokens", [1, 7, 300])
def test_moe_is_what_the_cpu_says_and_the_same_each_time(tokens: int) -> None:
    module = nn.MoE(128, 96, 16, 4, device="cuda", dtype=torch.bfloat16)
    weights, ids = module.route(x := normal(tokens, 128))
    args = (x, module.experts.gate_up_proj, module.experts.down_proj, ids, weights)
    found = []
    for device, kind in (("cuda", None), ("cuda", None), ("cpu", torch.float64)):
        leaves = [t.detach().to(device=device, dtype=kind if t.is_floating_point() else None) for t in args]
        leaves = [t.requires_grad_() if t.is_floating_point() else t for t in leaves]
        out = ck.moe_ffn(*leaves)
        found.append([out, *torch.autograd.grad(out.square().sum(), [leaves[i] for i in (0, 1, 2, 4)])])
    for first, second, exact in zip(*found, strict=True):
        assert torch.equal(first, second)
        error = (first.double().cpu() - exact).norm() / exact.norm()
        assert error < 0.02  # roundings to bf16 between six ops, each at most 2^-9 of its result


# ---- the warpgroup body ---------------------------------------------------------------------------------

SMALL = Problem.parse("rows=300 n=136 k=72 experts=6")
ARRANGED = (
    {"swap_ab": False, "pingpong": False, "cluster_m": 1, "cluster_n": 1},
    {"swap_ab": False, "pingpong": True, "cluster_m": 1, "cluster_n": 1},
    {"swap_ab": False, "cluster_m": 2},
    {"swap_ab": False, "cluster_n": 2},
    {"swap_ab": True, "tile_m": 16},
    {"swap_ab": True, "tile_m": 48, "pingpong": True},
    {"swap_ab": True, "tile_m": 112},
    {"swap_ab": True, "cluster_n": 2},
)


def arranged(problem: Problem, **values: Any) -> list[Any]:
    """Warpgroup configs of ``problem``; the test is skipped where there are none."""
    spec = gpu.detect()
    if not (spec.has_tma and spec.has_wgmma):
        pytest.skip("no warpgroup MMA here")
    return having(GROUPED_GEMM.valid(problem, spec), body="warpgroup", **values)


@pytest.mark.parametrize("values", ARRANGED, ids=str)
@pytest.mark.parametrize("seed", range(len(SPREADS)), ids=SPREADS)
def test_arrangements_over_many_tiles(values: dict[str, Any], seed: int) -> None:
    """More tiles than CTAs in groups of any length, so that the ring and the stages go round several times."""
    rng = random.Random(f"{values}{seed}")
    for words in ("", "weight=n", "bias=same activation=silu", "dtype=fp16 bias=fp32 activation=gelu"):
        rows, n, k = (rng.choice(sizes) for sizes in ((1000, 3000, 5000), (520, 1304, 2048), (8, 72, 264, 1000)))
        problem = Problem.parse(f"rows={rows} n={n} k={k} experts={rng.choice((3, 40, 130, 300))} {words}")
        inputs = GROUPED_GEMM.sample(problem, "cuda", seed)
        expected, work = GROUPED_GEMM.reference(problem, *inputs), GROUPED_GEMM.work(problem)
        config = rng.choice(arranged(problem, **values))
        results = GROUPED_GEMM.outputs(problem, *inputs)
        launch = GROUPED_GEMM.bind(problem, config, compiler.get(GROUPED_GEMM, problem, config, gpu.detect()))
        verify.poison(results)
        launch(*results, *inputs)
        found = verify.worst_error(results, expected, work.flops, depth=work.depth)
        assert found <= 1, f"[{problem}] [{config}] is off by {found:.3g} tolerances"
        first = results[0].clone()
        launch(*results, *inputs)
        assert torch.equal(first, results[0])


@pytest.mark.parametrize("values", ARRANGED, ids=str)
def test_a_warpgroup_s_ragged_ends(values: dict[str, Any]) -> None:
    """NaN stays with its expert, rows of no expert are zero, and an empty group is nobody's."""
    for config in random.Random(str(values)).sample(arranged(SMALL, **values), 2):
        x, w, offsets = normal(300, 72), normal(6, 136, 72), ends(0, 40, 41, 41, 170, 290, 300)
        clean = ck.grouped_gemm(x, w, offsets, config=str(config))
        w[3], x[41:170] = float("nan"), float("nan")
        spoilt = ck.grouped_gemm(x, w, offsets, config=str(config))
        assert_nan_stays(spoilt, clean)
        x, offsets = normal(300, 72), ends(70, 75, 75, 75, 75, 100, 210)
        x[:70], x[210:] = float("nan"), float("nan")
        out = torch.full((300, 136), 5.0, device="cuda", dtype=torch.bfloat16)
        ck.grouped_gemm(x, normal(6, 136, 72), offsets, out=out, config=str(config))
        assert (out[:70] == 0).all()
        assert (out[210:] == 0).all()
        assert not out[70:210].isnan().any()


@pytest.mark.parametrize("values", ARRANGED, ids=str)
@pytest.mark.parametrize(
    "offsets",
    WRONG,
)
def test_a_warpgroup_touches_nothing_outside(values: dict[str, Any], offsets: tuple[int, ...]) -> None:
    config = str(random.Random(str(values)).choice(arranged(SMALL, **values)))
    memory = torch.full((3, 700, 136), 9.0, device="cuda", dtype=torch.bfloat16)
    x, out = memory[0, 100:400, :72], memory[1, 100:400]
    w, before = normal(2, 136, 72), memory.clone()
    ck.grouped_gemm(x, w, ends(*offsets), out=out, config=config)
    big = 2**31 - 1
    ck.grouped_gemm(x, normal(1023, 136, 72), ends(*[big if i % 2 else -big for i in range(1024)]), config=config)
    torch.cuda.synchronize()
    memory[1, 100:400] = before[1, 100:400]
    assert torch.equal(memory, before)


def test_ends_that_fall_count_as_the_largest_before_them() -> None:
    x, w = normal(300, 72), normal(6, 136, 72)
    wrong, right = ends(20, 90, 40, 400, 7, 8, 9), ends(20, 90, 90, 300, 300, 300, 300)
    for config in random.Random(4).sample(arranged(SMALL), 4):
        made = [ck.grouped_gemm(x, w, offsets, config=str(config)) for offsets in (wrong, right)]
        assert torch.equal(*made)


DEEP = ({"pingpong": False}, {"pingpong": True}, {"cluster_m": 2}, {"cluster_n": 2}, {"swap_ab": True})


@pytest.mark.parametrize("values", DEEP, ids=str)
@pytest.mark.parametrize("seed", range(len(SPREADS)), ids=SPREADS)
def test_gradients_of_weights_over_many_tiles(values: dict[str, Any], seed: int) -> None:
    """More tiles than CTAs, of any depth, none and less than a k-tile too."""
    rng = random.Random(f"{values}{seed}")
    for words in ("", "dtype=fp16"):
        rows, n, k = (rng.choice(sizes) for sizes in ((90, 1000, 9000), (520, 1304, 2048), (72, 264, 1000)))
        problem = Problem.parse(f"rows={rows} n={n} k={k} experts={rng.choice((3, 40, 130))} {words}")
        inputs = GROUPED_GEMM_WGRAD.sample(problem, "cuda", seed)
        expected, work = GROUPED_GEMM_WGRAD.reference(problem, *inputs), GROUPED_GEMM_WGRAD.work(problem)
        found = [c for c in GROUPED_GEMM_WGRAD.valid(problem, gpu.detect()) if c.body == "warpgroup"]
        if not found:
            pytest.skip("no warpgroup MMA here")
        config = rng.choice([c for c in found if all(getattr(c, n) == v for n, v in values.items())])
        dweight = torch.full_like(expected[0], float("nan"))
        launch = compiler.get(GROUPED_GEMM_WGRAD, problem, config, gpu.detect())
        bound = GROUPED_GEMM_WGRAD.bind(problem, config, launch)
        bound(dweight, *inputs)
        error = verify.worst_error((dweight,), expected, work.flops, depth=work.depth)
        assert error <= 1, f"[{problem}] [{config}] is off by {error:.3g} tolerances"
        again = torch.full_like(dweight, float("nan"))
        bound(again, *inputs)
        assert torch.equal(dweight, again)


@pytest.mark.parametrize("values", [{"swap_ab": False}, {"swap_ab": True}, {"pingpong": True}], ids=str)
def test_a_gate_in_the_epilogue(values: dict[str, Any]) -> None:
    for seed, words in enumerate(("rows=1000 n=712 k=264 experts=7", "rows=64 n=64 k=72 experts=20 dtype=fp16")):
        problem = Problem.parse(f"{words} activation=silu_mul")
        inputs = GROUPED_GEMM.sample(problem, "cuda", seed)
        expected, work = GROUPED_GEMM.reference(problem, *inputs), GROUPED_GEMM.work(problem)
        for config in random.Random(seed).sample(arranged(problem, **values), 3):
            out = ck.grouped_gemm(*inputs, activation="silu_mul", config=str(config))
            assert verify.worst_error((out,), expected, work.flops, depth=float(problem.k)) <= 1, str(config)
