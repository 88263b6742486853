"""Grouped products without a GPU: values, gradients, refusals, and the kernels compiled for four architectures."""

from __future__ import annotations

import math
import random
from enum import StrEnum
from functools import cache
from itertools import pairwise
from typing import Any
from unittest import mock

import pytest
import torch

import cutekernels as ck
from bench.judge import SWEEPS, load
from bench.judge import recorded as recorded_rows
from cutekernels import gpu
from cutekernels.errors import InvalidConfig, UnsupportedProblem
from cutekernels.kernels.activations import ACTIVATIONS
from cutekernels.ops.moe.rows import MOE_DISPATCH
from cutekernels.ops.products.grouped import GROUPED_GEMM, GROUPED_GEMM_WGRAD
from cutekernels.ops.products.grouped import GroupedProblem as Problem
from cutekernels.ops.products.groups import SPREADS, expected_experts, sample_offsets
from cutekernels.ops.products.schedules.multistage import MULTISTAGE
from cutekernels.ops.products.schedules.problem import GemmConfig
from cutekernels.ops.products.schedules.schedule import PLAIN
from cutekernels.ops.shared import calls
from tests import compiled
from tests.compiled import TARGETS
from tests.gpu_path import recorded

OPS = {op.name: op for op in (GROUPED_GEMM, GROUPED_GEMM_WGRAD)}
OFFSETS = torch.tensor([1, 4, 4, 9, 9, 11], dtype=torch.int32)  # two empty groups; rows 0, 11 and 12 belong to none


def posed(*, dtype: torch.dtype = torch.float64, grad: bool = True) -> tuple[torch.Tensor, ...]:
    draw = torch.Generator().manual_seed(3)
    shapes = ((13, 6), (5, 7, 6), (5, 7))
    return tuple([torch.randn(s, generator=draw, dtype=torch.float64).to(dtype).requires_grad_(grad) for s in shapes])


# ---- values ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("activation", [None, *ACTIVATIONS[1:]])
def test_each_row_meets_its_expert(activation: str | None) -> None:
    x, w, b = posed(grad=False)
    out = ck.grouped_gemm(x, w, OFFSETS, b, activation=activation)
    for r in range(13):
        e = next((e for e in range(5) if OFFSETS[e] <= r < OFFSETS[e + 1]), None)
        exact = torch.zeros(7) if e is None else ck.gemm(x[r : r + 1], w[e].T, bias=b[e], activation=activation)[0]
        torch.testing.assert_close(out[r], exact.to(out.dtype))


def test_a_gate_is_the_product_and_silu_mul() -> None:
    x, w, b = posed(grad=False)
    w, b = torch.cat([w, -w.flip(1)], 1), torch.cat([b, b], 1)
    out = ck.grouped_gemm(x, w, OFFSETS, b, activation="silu_mul")
    torch.testing.assert_close(out, ck.silu_mul(ck.grouped_gemm(x, w, OFFSETS, b)))
    with pytest.raises(UnsupportedProblem, match="gate and up"):
        ck.grouped_gemm(x, w[:, :13], OFFSETS, activation="silu_mul")


def test_without_gradients_an_ffn_is_the_same() -> None:
    draw = torch.Generator().manual_seed(5)
    x, up = torch.randn(9, 8, generator=draw), torch.randn(6, 12, 8, generator=draw, requires_grad=True)
    down, ids = torch.randn(6, 8, 6, generator=draw), torch.randint(0, 6, (9, 2), generator=draw)
    weights = torch.rand(9, 2, generator=draw)
    kept = ck.moe_ffn(x, up, down, ids, weights)
    with torch.no_grad():
        torch.testing.assert_close(ck.moe_ffn(x, up, down, ids, weights), kept.detach(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("tokens", "graded", "few"), [(0, 0, 1), (85, 0, 1), (86, 0, 0), (85, 1, 0)])
def test_few_pairs_are_dispatched_where_no_gradient_is_kept(tokens: int, graded: int, few: int) -> None:
    draw = torch.Generator().manual_seed(5)
    x, up = (torch.randn(shape, generator=draw, dtype=torch.float64) for shape in [(86, 8), (6, 12, 8)])
    down, ids = torch.randn(6, 8, 6, generator=draw, dtype=torch.float64), torch.randint(-1, 7, (86, 3), generator=draw)
    weights = torch.rand(86, 3, generator=draw)
    whole = ck.moe_ffn(x, up, down, ids, weights)
    given = x[:tokens].clone().requires_grad_(bool(graded))
    with mock.patch.object(MOE_DISPATCH, "evaluate", wraps=MOE_DISPATCH.evaluate) as dispatched:
        out = ck.moe_ffn(given, up, down, ids[:tokens], weights[:tokens])
    assert dispatched.call_count == few
    torch.testing.assert_close(out, whole[:tokens])
    by_func = torch.func.grad(lambda x: ck.moe_ffn(x, up, down, ids[:tokens], weights[:tokens]).sum())(given.detach())
    if graded:
        torch.testing.assert_close(torch.autograd.grad(out.sum(), given)[0], by_func)


def test_it_is_the_product_between_permute_and_combine() -> None:
    draw = torch.Generator().manual_seed(5)
    x, w = torch.randn(9, 8, generator=draw), torch.randn(6, 4, 8, generator=draw)
    ids = torch.randint(0, 6, (9, 2), generator=draw)
    _, offsets, inverse = ck.moe_permute(ids, 6)
    out = ck.moe_combine(ck.grouped_gemm(ck.moe_gather(x, inverse), w, offsets), inverse)
    exact = torch.einsum("tkno,to->tn", w.double()[ids], x.double())
    torch.testing.assert_close(out.double(), exact, rtol=1e-5, atol=1e-5)


def test_strides_and_out() -> None:
    x, w, b = posed(grad=False)
    exact = ck.grouped_gemm(x, w, OFFSETS, b)
    out = torch.full((13, 9), 7.0, dtype=x.dtype)
    assert ck.grouped_gemm(x.T.contiguous().T, w.mT.contiguous().mT, OFFSETS, b, out=out[:, :7]).shape == (13, 7)
    torch.testing.assert_close(out[:, :7], exact)
    assert (out[:, 7:] == 7).all()


@pytest.mark.parametrize(
    "offsets", [[0, 4, 3, 9, 9, 11], [0, 1, 2, 3, 4, 14], [-1, 1, 2, 3, 4, 5]], ids=["falls", "behind", "before"]
)
def test_wrong_offsets_are_refused_on_the_cpu(offsets: list[int]) -> None:
    x, w, _ = posed(grad=False)
    with pytest.raises(UnsupportedProblem, match="offsets must stay from 0 to 13"):
        ck.grouped_gemm(x, w, torch.tensor(offsets, dtype=torch.int32))


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"offsets": OFFSETS.long()}, "takes offsets in int32; got torch.int64: convert it"),
        ({"offsets": OFFSETS[:-1]}, r"got .*offsets \(\d,\).*: offsets does not fit"),
        ({"x": torch.zeros(13, 5, dtype=torch.float64)}, "takes x"),
        ({"weight": torch.zeros(5, 7, 6)}, "takes weight in float64; got torch.float32: convert it"),
        ({"bias": torch.zeros(5, 6, dtype=torch.float64)}, "bias does not fit"),
        ({"activation": "swish"}, "activation must be one of"),
        ({"out": torch.zeros(13, 8, dtype=torch.float64)}, r"out must be \(13, 7\)"),
        ({"x": None}, "torch.Tensor"),
    ],
)
def test_misfits_are_refused(changed: dict[str, Any], said: str) -> None:
    x, w, b = posed(grad=False)
    with pytest.raises(UnsupportedProblem, match=said):
        ck.grouped_gemm(**{"x": x, "weight": w, "offsets": OFFSETS, "bias": b} | changed)


# ---- gradients and tracing ------------------------------------------------------------------------------


@pytest.mark.parametrize("activation", [None, *ACTIVATIONS[1:], "silu_mul"])
def test_gradients(activation: str | None) -> None:
    def f(*args: Any) -> Any:
        w, b = (torch.cat([t, 2 * t], 1) if activation == "silu_mul" else t for t in args[1:])
        return ck.grouped_gemm(args[0], w, OFFSETS, b, activation=activation)

    assert torch.autograd.gradcheck(f, posed())
    if activation is None:
        assert torch.autograd.gradgradcheck(f, posed())


def test_the_gradient_of_a_wider_bias_is_rounded_once() -> None:
    x, w, dy = torch.randn(600, 8).bfloat16(), torch.randn(4, 8, 8).bfloat16(), torch.rand(600, 8).bfloat16()
    bias, offsets = torch.zeros(4, 8, requires_grad=True), torch.tensor([3, 250, 250, 250, 590], dtype=torch.int32)
    ck.grouped_gemm(x, w, offsets, bias).backward(dy)
    expected = torch.stack([dy[a:b].double().sum(0) for a, b in pairwise(offsets.tolist())])
    assert bias.grad is not None
    torch.testing.assert_close(bias.grad.double(), expected, rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("trained", [False, True])
def test_the_ffn_is_one_graph_where_gradients_are_on(trained: bool) -> None:
    draw = torch.Generator().manual_seed(5)
    x = torch.randn(5, 16, generator=draw, dtype=torch.float64)
    up = torch.randn(4, 32, 16, generator=draw, dtype=torch.float64, requires_grad=trained)
    down = torch.randn(4, 16, 16, generator=draw, dtype=torch.float64)
    ids, weights = torch.randint(0, 4, (5, 2), generator=draw), torch.rand(5, 2, generator=draw, dtype=torch.float64)
    made = torch.compile(lambda *a: ck.moe_ffn(*a), backend="aot_eager", fullgraph=True)
    y, expected = made(x, up, down, ids, weights), ck.moe_ffn(x, up, down, ids, weights)
    torch.testing.assert_close(y, expected)
    assert y.requires_grad == trained
    if trained:
        found, wanted = (torch.autograd.grad(t.sum(), up)[0] for t in (y, expected))
        torch.testing.assert_close(found, wanted)


def test_opcheck_and_compile() -> None:
    x, w, b = posed()
    torch.library.opcheck(torch.ops.cutekernels.grouped_gemm, (x, w, OFFSETS, b, "silu"))
    torch.library.opcheck(
        torch.ops.cutekernels.grouped_gemm_wgrad, (torch.randn(13, 5, dtype=torch.float64), x, OFFSETS)
    )
    made = torch.compile(lambda *a: ck.grouped_gemm(a[0], a[1], OFFSETS, a[2]), backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(made(x, w, b), ck.grouped_gemm(x, w, OFFSETS, b))


def test_vmap_takes_one_entry_after_the_other() -> None:
    x, w, _ = posed(grad=False)
    many = torch.vmap(lambda x: ck.grouped_gemm(x, w, OFFSETS))(torch.stack([x, -x]))
    torch.testing.assert_close(many[1], -ck.grouped_gemm(x, w, OFFSETS))


def test_a_call_on_a_gpu_poses_what_its_operands_are() -> None:
    x, w, b = posed(dtype=torch.bfloat16, grad=False)
    x, w = torch.cat([x, x[:, :2]], 1), torch.cat([w, w[..., :2]], 2)  # K = 8, N = 7
    with recorded() as seen:
        for weight in (w, w.mT.contiguous().mT, w[:, :, ::2].repeat_interleave(2, 2)[..., ::2]):
            calls.run(GROUPED_GEMM, None, (x[:, : weight.shape[2]], weight, OFFSETS, b), options=("none",))
        calls.run(GROUPED_GEMM_WGRAD, None, (x, x.T.contiguous().T, OFFSETS))
    assert seen == [
        "grouped_gemm rows=13 n=7 k=8 experts=5 bias=same align=1",
        "grouped_gemm rows=13 n=7 k=8 experts=5 weight=n bias=same align=1",
        "grouped_gemm rows=13 n=7 k=4 experts=5 bias=same align=1",
        "grouped_gemm_wgrad rows=13 n=8 k=8 experts=5",
    ]


def test_an_activation_may_be_an_enum_of_strings() -> None:
    class Name(StrEnum):
        silu = "silu"

    x, w, _ = posed(dtype=torch.bfloat16, grad=False)
    y = ck.grouped_gemm(x, w, OFFSETS, activation=Name.silu)  # type: ignore[arg-type]
    assert torch.equal(y, ck.grouped_gemm(x, w, OFFSETS, activation="silu"))
    with recorded() as seen:
        for name in (Name.silu, "silu"):
            calls.run(GROUPED_GEMM, None, (x, w, OFFSETS, None), options=(name,))
    assert seen[0] == seen[1] and seen[0].endswith("activation=silu align=1")


# ---- the declaration ------------------------------------------------------------------------------------


def test_samples_spread_as_their_seed_says() -> None:
    draw = torch.Generator().manual_seed(0)
    counts = {spread: sample_offsets(1000, 16, spread, draw).diff() for spread in SPREADS}
    assert all(int(c.sum()) == 1000 for c in counts.values())
    assert counts["one"].max() == 1000
    assert counts["uniform"].max() < 110 < counts["zipf"].max() < 500


@pytest.mark.parametrize(("rows", "experts"), [(2, 8), (8, 128), (128, 128), (512, 64)])
def test_the_least_bytes_are_of_the_experts_that_samples_hit(rows: int, experts: int) -> None:
    """``work`` counts matrices that a timing's samples read: a roofline of more is above 1."""
    draw, hit, samples = torch.Generator().manual_seed(0), [], 200
    for spread in SPREADS:
        drawn = [int((sample_offsets(rows, experts, spread, draw).diff() > 0).sum()) for _ in range(samples)]
        hit.append(sum(drawn) / samples)
        spared = max(1.0, (experts - hit[-1]) ** 0.5)  # over a sample's standard deviation
        assert hit[-1] == pytest.approx(expected_experts(spread, rows, experts), abs=5 * spared / samples**0.5)
    problem = Problem(rows, 64, 4096, experts)
    weights = GROUPED_GEMM.work(problem).bytes - 2 * rows * (64 + 4096)
    assert weights == pytest.approx(2 * 64 * 4096 * sum(hit) / 3, rel=0.04)
    gradients = GROUPED_GEMM_WGRAD.work(problem).bytes - 2 * rows * (64 + 4096)
    assert gradients == 2 * 64 * 4096 * experts, "those of experts without rows are written too, as zeros"


def test_samples_that_share_weights_hit_another_expert_each() -> None:
    """All rows to the same one would find it in the L2 cache."""
    problem = Problem(40, 8, 8, 64)
    args = GROUPED_GEMM.sample(problem, "cpu", 2)
    chosen = {int(GROUPED_GEMM.variant(problem, args, seed)[2].diff().argmax()) for seed in range(2, 26, 3)}
    assert len(chosen) > 4


def test_variants_share_weights_and_spread_anew() -> None:
    problem = Problem.parse("rows=40 n=24 k=16 experts=5 bias=fp32")
    args = GROUPED_GEMM.sample(problem, "cpu", 0)
    for seed, spread in enumerate(SPREADS):
        other = GROUPED_GEMM.variant(problem, args, seed)
        assert other[1] is args[1] and other[3] is args[3]
        assert GROUPED_GEMM.problem(*GROUPED_GEMM.outputs(problem, *other), *other, activation="none") == problem
        assert (int(other[2].diff().max()) == 40) == (spread == "one")
    assert not torch.equal(other[0], args[0])


def test_a_grid_holds_every_tile() -> None:
    """However rows spread, tiles are no more than a launch's CTAs."""
    rng = random.Random(2)
    for _ in range(300):
        rows, experts, tile = rng.randrange(1, 400), rng.randrange(1, 40), rng.choice([32, 64, 128])
        ends = sorted(rng.randrange(rows + 1) for _ in range(experts + 1))
        sizes = [b - a for a, b in zip([0, *ends], [*ends, rows], strict=True)]
        problem = Problem(rows, 8, 8, experts)
        config = GemmConfig.parse(
            f"tile_m={tile} tile_n=32 tile_k=32 warps_m=1 warps_n=1 stages=2 raster=1 ctas_per_sm=1"
        )
        assert sum(-(-size // tile) for size in sizes) <= GROUPED_GEMM.blocks(problem, config)


def test_other_bodies_are_refused() -> None:
    problem, spec = Problem(2048, 1536, 2048, 128), TARGETS[2]
    config = GROUPED_GEMM.default(problem, spec)
    for changes in ({"persistent": True}, {"body": "skinny"}):
        with pytest.raises(InvalidConfig, match="multistage"):
            GROUPED_GEMM.check(problem, config.replace(**changes), spec)


def test_the_multistage_model_knows_that_rows_choose_at_random() -> None:
    """Equal shares of rows were 30 % off, root mean square; half of the experts need a second tile of 128 rows."""
    h200, off = TARGETS[2], []
    for (op, text), us in load(SWEEPS / "h200" / "grouped_warpgroup.jsonl.xz").items():
        for config in map(GemmConfig.parse, us if op == GROUPED_GEMM.name else ()):
            if config.body == "multistage":
                off.append(math.log(GROUPED_GEMM.estimate_us(Problem.parse(text), config, h200) / us[str(config)]))
    assert len(off) == 32
    assert math.sqrt(sum(x * x for x in off) / len(off)) < 0.21
    even = Problem.parse("rows=16384 n=768 k=2048 experts=128")
    taller = GemmConfig.parse("tile_m=256 tile_n=128 tile_k=32 warps_m=4 warps_n=2 stages=4 raster=16 ctas_per_sm=1")
    fitting = taller.replace(tile_m=128, warps_m=2, ctas_per_sm=2)
    shares = [MULTISTAGE.estimate_us(GROUPED_GEMM.one(even), c, h200, PLAIN) for c in (fitting, taller)]
    chosen = [GROUPED_GEMM.estimate_us(even, c, h200) for c in (fitting, taller)]
    assert chosen[0] / shares[0] > 1.2 * chosen[1] / shares[1]
    assert GROUPED_GEMM.estimate_us(even.replace(rows=0), fitting, h200) == 0.0


@pytest.mark.parametrize("spec", [t for t in TARGETS if not t.has_wgmma], ids=lambda g: g.target)
@pytest.mark.parametrize("text", ["rows=128 n=1536 k=2048 experts=128", "rows=2 n=14336 k=4096 experts=8"])
def test_where_weights_are_the_limit_the_default_does_the_least_work(spec: gpu.GpuSpec, text: str) -> None:
    """A row or so an expert: no taller tile than need be, and 256 bytes of a row at a time."""
    problem = Problem.parse(text)
    default = GROUPED_GEMM.default(problem, spec)
    assert (default.tile_m, default.tile_k) == (32, 128)
    tile = GemmConfig.parse("tile_m=32 tile_n=128 tile_k=128 warps_m=1 warps_n=4 stages=2 raster=1 ctas_per_sm=1")
    tiles = [tile, *(tile.replace(tile_k=k, stages=6, ctas_per_sm=2) for k in (64, 32))]
    many = problem.replace(n=8 * problem.n)  # all waves are as long as DRAM takes
    times = [GROUPED_GEMM.estimate_us(many, c, spec) for c in tiles]
    assert times[1] / times[0] == pytest.approx(1 / 0.95, rel=0.01)
    assert times[2] / times[1] == pytest.approx(1.07, rel=0.01)
    wide = problem.replace(weight="n")  # rows of k-tiles are then as long as the tile is wide
    assert "lies along K" in str(GROUPED_GEMM.why_not(wide, default, spec))
    assert GROUPED_GEMM.default(wide, spec).tile_k <= 64
    shorter = [default.replace(tile_k=k, stages=6, ctas_per_sm=3) for k in (64, 32)]
    half, quarter = (GROUPED_GEMM.estimate_us(wide, c, spec) for c in shorter)
    assert quarter < 1.01 * half


def test_the_multistage_default_keeps_up_with_triton_on_warp_mma() -> None:
    """Recorded on an H100: 25 products, 1 to 4096 tokens; Qwen3's down projection of one token is the worst."""
    h100, runs = gpu.lookup("h100"), dict[tuple[str, int], dict[str, float]]()
    for row in recorded_rows(SWEEPS / "h100-sxm" / "grouped_multistage.jsonl.xz"):
        runs.setdefault((row["problem"], row["run"]), {})[row.get("config", "triton")] = row["us"]
    speed = []
    for (text, _), measured in runs.items():
        problem = Problem.parse(text)
        default = GROUPED_GEMM.best(problem, h100, MULTISTAGE)
        if str(default) in measured:  # the other run of a problem had other configs
            speed.append(measured["triton"] / measured[str(default)])
    assert len(speed) == 25
    assert math.prod(speed) ** (1 / len(speed)) >= 1.01
    assert sorted(speed)[1] >= 0.93


# ---- kernels --------------------------------------------------------------------------------------------


@cache
def built(op: str, text: str, config: GemmConfig, target: str) -> Any:
    return OPS[op].build(Problem.parse(text), config, gpu.lookup(target))


@compiled.in_turns({name: name for name in OPS})
def test_compiles_for_every_architecture(op: str, spec: gpu.GpuSpec) -> None:
    for text in (OPS[op].suite[1], *OPS[op].suite[-2:]):
        config = OPS[op].default(Problem.parse(text), spec)
        facts = built(op, text, config, spec.name).facts
        assert facts.stack_bytes == 0
        assert facts.smem_bytes <= spec.smem_per_block_bytes
        assert -(-facts.registers // 8) * 8 * 32 * config.warps * config.ctas_per_sm <= spec.REGISTERS_PER_SM


def test_code_depends_on_no_extent() -> None:
    problems = [Problem.parse(t) for t in (GROUPED_GEMM.suite[1], "rows=8192 n=4096 k=14336 experts=8")]
    config = GROUPED_GEMM.default(problems[0], TARGETS[2])
    first, second = (compiled.program(GROUPED_GEMM.build, p, config, TARGETS[2]) for p in problems)
    assert first == second
