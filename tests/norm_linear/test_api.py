"""``rms_norm_linear`` and ``linear_silu_mul``: values against fp64, gradients, what they return and refuse."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import cutekernels as ck
from cutekernels import dispatch, gpu
from cutekernels.db.storage import snapshot as snapshots
from cutekernels.db.storage.snapshot import Snapshot, TunedConfig
from cutekernels.errors import InvalidConfig, UnsupportedProblem
from cutekernels.ops.activations.op import SILU_MUL
from cutekernels.ops.norms.op import RMS_NORM
from cutekernels.ops.products.dense import GEMM
from cutekernels.ops.products.fused import CHAIN, FUSED_SCHEDULES, NormLinearConfig, RmsNormLinearProblem, product_of
from cutekernels.ops.products.norm import LINEAR_SILU_MUL, RMS_NORM_LINEAR, NormLinear
from cutekernels.verify import worst_error
from tests.compiled import TARGETS

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
BF16 = torch.bfloat16
OPS: tuple[NormLinear, ...] = (RMS_NORM_LINEAR, LINEAR_SILU_MUL)


def randn(*shape: int, device: str = "cpu", dtype: torch.dtype = BF16, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape, device=device, dtype=torch.float32) * scale).to(dtype)


@pytest.fixture(autouse=True)
def one_seed() -> None:
    torch.manual_seed(11)


def normed(u: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    h = u.double() * torch.rsqrt(u.double().square().mean(-1, keepdim=True) + eps)
    return h if weight is None else h * weight.double()


def unfused(u: Tensor, norm_weight: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The result of torch's own kernels."""
    return F.linear(F.rms_norm(u, u.shape[-1:], norm_weight.to(u.dtype), eps), weight)


def close(ours: Tensor, exact: Tensor, theirs: Tensor, factor: float = 1.25) -> bool:
    """No further from the truth than ``factor`` times the unfused path."""
    error, bar = ((t.double() - exact).norm() for t in (ours, theirs))
    return bool(error <= factor * bar + 1e-3 * exact.norm() * torch.finfo(ours.dtype).eps)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rows", [1, 3, 64, 130])
@pytest.mark.parametrize("outliers", [False, True])
def test_values(device: str, rows: int, outliers: bool) -> None:
    x, g, w = randn(2, rows, 264, device=device), randn(264, device=device), randn(136, 264, device=device)
    if outliers:
        x[..., ::53] *= 1e4
    for eps in (1e-6, 1e-12):
        exact = normed(x, g, eps) @ w.double().t()
        y = ck.rms_norm_linear(x, g, w, eps=eps)
        assert isinstance(y, Tensor)
        assert (y.shape, y.dtype) == ((2, rows, 136), BF16)
        assert close(y, exact, unfused(x, g, w, eps))
        folded = ck.rms_norm_linear(x, None, ck.fold(g, w), eps=eps)
        assert isinstance(folded, Tensor)
        assert close(folded, exact, unfused(x, g, w, eps), 1.5)


@pytest.mark.parametrize("device", DEVICES)
def test_residual_rstd_bias_activation_and_out(device: str) -> None:
    x, r, g = randn(5, 128, device=device), randn(5, 128, device=device), randn(128, device=device, dtype=torch.float32)
    w, bias = randn(64, 128, device=device, scale=0.1), randn(64, device=device)
    u = x + r
    exact = F.silu(normed(u, g, 1e-6) @ w.double().t() + bias.double())
    out = torch.full((5, 80), 7.0, device=device, dtype=BF16)
    y, seen = ck.rms_norm_linear(x, g, w, bias, residual=r, activation="silu", out=out[:, :64])
    assert torch.equal(seen, u)
    assert y.data_ptr() == out.data_ptr()
    assert (out[:, 64:] == 7).all()
    torch.testing.assert_close(y.double(), exact, rtol=2e-2, atol=2e-2)
    rstd = torch.rsqrt(u.float().square().mean(-1) + 1e-6)
    given, seen = ck.rms_norm_linear(x, g, w, bias, residual=r, rstd=rstd, activation="silu")
    assert torch.equal(seen, u)
    torch.testing.assert_close(given.double(), exact, rtol=2e-2, atol=2e-2)
    doubled = ck.rms_norm_linear(u, g, w, rstd=2 * rstd)
    plain = ck.rms_norm_linear(u, g, w)
    assert isinstance(doubled, Tensor) and isinstance(plain, Tensor)
    assert torch.equal(doubled, 2 * plain) or close(doubled, 2 * plain.double(), 2.01 * plain)


@pytest.mark.parametrize("device", DEVICES)
def test_exact_rounds_where_hugging_face_does(device: str) -> None:
    x, g, w = randn(64, 256, device=device), randn(256, device=device), torch.eye(256, device=device, dtype=BF16)
    rstd = torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-6)
    chain = g * (x.float() * rstd).to(BF16)
    y = ck.rms_norm_linear(x, g, w, exact=True)  # an identity shows the operand itself
    given = ck.rms_norm_linear(x, g, w, exact=True, rstd=rstd[:, 0])
    assert isinstance(y, Tensor) and isinstance(given, Tensor)
    assert torch.equal(given, chain)
    assert (y != chain).double().mean() < 1e-3  # statistics summed in another order
    once = ck.rms_norm_linear(x, g, w)
    assert isinstance(once, Tensor)
    assert (once != chain).double().mean() > 0.05


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("norm", [False, True])
def test_gate_and_up_in_one_product(device: str, norm: bool) -> None:
    x, g = randn(3, 7, 96, device=device), randn(96, device=device)
    gate, up = randn(40, 96, device=device, scale=0.2), randn(40, 96, device=device, scale=0.2)
    both = torch.cat([gate, up])
    h = normed(x, g, 1e-6) if norm else x.double()
    exact = F.silu(h @ gate.double().t()) * (h @ up.double().t())
    y = ck.linear_silu_mul(x, both, norm_weight=g if norm else None)
    assert (y.shape, y.dtype) == ((3, 7, 40), BF16)
    torch.testing.assert_close(y.double(), exact, rtol=4e-2, atol=4e-2)
    out = torch.empty_like(y)
    assert ck.linear_silu_mul(x, both, norm_weight=g if norm else None, out=out) is out
    assert torch.equal(out, y)
    bare = ck.linear_silu_mul(x, both, norm=True)
    ones = ck.linear_silu_mul(x, both, norm_weight=torch.ones_like(g))
    assert torch.equal(bare, ones)


def test_gradients() -> None:
    double = {"dtype": torch.float64, "requires_grad": True}
    x, r, g = torch.randn(3, 6, **double), torch.randn(3, 6, **double), torch.randn(6, **double)  # type: ignore[arg-type]
    w, b = torch.randn(4, 6, **double), torch.randn(4, **double)  # type: ignore[arg-type]
    assert torch.autograd.gradcheck(
        lambda *t: ck.rms_norm_linear(t[0], t[1], t[2], t[3], activation="silu"), (x, g, w, b)
    )
    assert torch.autograd.gradcheck(lambda *t: ck.rms_norm_linear(t[0], t[2], t[3], residual=t[1]), (x, r, g, w))
    assert torch.autograd.gradcheck(lambda *t: ck.linear_silu_mul(t[0], t[1], norm_weight=t[2]), (x, w, g))


@pytest.mark.gpu
def test_gradients_on_a_gpu() -> None:
    x, g, w = randn(40, 256, device="cuda"), randn(256, device="cuda"), randn(128, 256, device="cuda", scale=0.1)
    grads = []
    for wide in (False, True):
        leaves = [(t.double() if wide else t.clone()).requires_grad_() for t in (x, g, w)]
        if wide:
            y: Any = F.linear(F.rms_norm(leaves[0], (256,), leaves[1], 1e-6), leaves[2])
        else:
            y = ck.rms_norm_linear(*leaves)
        (y * torch.arange(128, device="cuda")).sum().backward()
        grads.append([leaf.grad for leaf in leaves])
    for ours, truth in zip(*grads, strict=True):
        assert (ours.double() - truth).norm() <= 2e-2 * truth.norm()


def test_refusals() -> None:
    x, g, w = randn(4, 64), randn(64), randn(32, 64)
    for call, said in (
        (lambda: ck.rms_norm_linear(x, g, w.t()), "weight .N, K."),
        (lambda: ck.rms_norm_linear(x, g[:32], w), "norm_weight must be"),
        (lambda: ck.rms_norm_linear(x, g, w, rstd=torch.ones(3)), "rstd does not fit"),
        (lambda: ck.rms_norm_linear(x, g, w, rstd=torch.ones(4, dtype=BF16)), "takes rstd in float32 or float64"),
        (lambda: ck.rms_norm_linear(x, g, w, residual=x[:2], rstd=torch.ones(4)), "residual must have"),
        (lambda: ck.rms_norm_linear(x, g, w, residual=x[:2]), "each extent the same"),
        (lambda: ck.rms_norm_linear(x, g, w, activation="tanh"), "activation must be"),
        (lambda: ck.linear_silu_mul(x, w[:31]), "2 . I"),
        (lambda: ck.linear_silu_mul(x, w, norm_weight=g, norm=False), "norm=False"),
        (lambda: ck.fold(g[:3], w), "norm_weight must be"),
    ):
        with pytest.raises(UnsupportedProblem, match=said):
            call()


# ---- declarations ---------------------------------------------------------------------------------------


def few_weights(p: Any) -> Any:
    """Weights of the same layout: each extent with its remainder by 256."""
    return p.replace(n=256 + p.n % 256, k=256 + p.k % 256)


@pytest.mark.parametrize(
    ("op", "text", "spec"), [(op, text, TARGETS[i % len(TARGETS)]) for op in OPS for i, text in enumerate(op.suite)]
)
def test_declaration(op: NormLinear, text: str, spec: gpu.GpuSpec) -> None:
    p = op.Problem.parse(text)
    assert op.Problem.parse(str(p)) == p
    assert p.bucket().bucket() == p.bucket()
    assert op.why_not(p, op.default(p, spec), spec) is None
    assert op.estimate_us(p, CHAIN, spec) > 0
    p = few_weights(p)
    args = op.sample(p, "cpu", 0)
    outputs = op.outputs(p, *args)
    options = {name: getattr(p, name) for name in op.options}
    assert op.problem(*outputs, *args[: len(op.inputs)], **options) == p
    reference = op.reference(p, *args)
    assert [t.shape for t in reference] == [t.shape for t in outputs]


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_the_paths_a_problem_has(op: NormLinear) -> None:
    spec = gpu.lookup("h200")
    paths = {m: {c.path for c in op.valid(op.Problem.parse(f"m={m} n=1024 k=1024"), spec)} for m in (1, 128, 129, 4096)}
    beyond = {"chain"} if op is RMS_NORM_LINEAR else {"chain", "fused"}
    assert paths == {1: {"chain", "fused"}, 128: {"chain", "fused"}, 129: beyond, 4096: beyond}
    some = next(c for c in op.valid(op.Problem.parse("m=8 n=1024 k=1024"), spec) if c.path == "fused")
    for text, config, said in (
        ("m=8 n=1024 k=1024", CHAIN.replace(tile_m=32), "path=chain has no tile_m"),
        ("m=8 n=1024 k=1024 layout=any", some, "16-byte aligned"),
        ("m=256 n=1024 k=1024", some, "at most 128 rows"),
        ("m=8 n=1024 k=1024", some.replace(tile_m=16), "does not suit 8 tokens"),
    ):
        assert said in str(op.why_not(op.Problem.parse(text), config, spec))
    with pytest.raises(InvalidConfig, match="path must be one of chain, fused"):
        NormLinearConfig.parse(str(CHAIN).replace("chain", "both"))


def test_what_the_skinny_warpgroup_body_refuses() -> None:
    spec = gpu.lookup("h200")
    few = RMS_NORM_LINEAR.Problem.parse("m=64 n=18944 k=3584")
    config = RMS_NORM_LINEAR.default(few, spec)
    assert (config.path, config.body) == ("fused", "skinny_warpgroup")
    for words, said in (
        ("m=64 n=18944 k=3584 dtype=fp16", "the range of fp16"),
        ("m=64 n=18948 k=3584", "8 outputs at a time"),
        ("m=129 n=18944 k=3584", "128 tokens or fewer"),
        ("m=64 n=18944 k=3584 layout=any", "16-byte aligned"),
    ):
        problem = RMS_NORM_LINEAR.Problem.parse(words)
        assert said in " ".join(
            FUSED_SCHEDULES[config.body].failures(product_of(problem), config.product, spec, problem.extras)
        )
        assert RMS_NORM_LINEAR.default(problem, spec) == CHAIN
    unweighted = RMS_NORM_LINEAR.Problem.parse("m=64 n=18944 k=3584 dtype=fp16 norm_weight=none")
    assert RMS_NORM_LINEAR.why_not(unweighted, config, spec) is None, "nothing multiplies x"
    gated = LINEAR_SILU_MUL.Problem.parse("m=64 n=9472 k=3584 norm=1 norm_weight=same")
    assert "no gate behind" in str(LINEAR_SILU_MUL.why_not(gated, config, spec))
    assert "skinny_warpgroup takes warps_n from 1" in str(RMS_NORM_LINEAR.why_not(few, config.replace(warps_n=2), spec))
    assert "no warpgroup MMA" in str(RMS_NORM_LINEAR.why_not(few, config, gpu.lookup("a100")))


def test_one_row_without_leading_dimensions_is_posed_into_any_memory() -> None:
    x, weight = torch.zeros(64, dtype=BF16), torch.zeros(16, 64, dtype=BF16)
    y = torch.empty(32, dtype=BF16)[::2]
    posed = RMS_NORM_LINEAR.problem(y, x, None, weight, None, None, activation="none")
    gated = LINEAR_SILU_MUL.problem(y[:8], x, weight, None, norm=False)
    assert [posed.layout, gated.layout] == ["any", "any"]


@pytest.mark.parametrize(("n", "pitch", "layout"), [(256, 256, "aligned"), (256, 300, "inputs"), (255, 300, "aligned")])
def test_a_result_whose_rows_are_not_aligned_is_for_the_skinny_body(n: int, pitch: int, layout: str) -> None:
    def empty(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.bfloat16)

    operands = empty(16, 512), empty(512), empty(n, 512), None, None
    posed = RMS_NORM_LINEAR.problem(empty(16, pitch)[:, :n], *operands, activation="none")
    assert posed.layout == layout
    bodies = {c.body for c in RMS_NORM_LINEAR.valid(posed, gpu.lookup("h200")) if c.path == "fused"}
    assert bodies == ({"skinny", "skinny_warpgroup"} if (n, layout) == (256, "aligned") else {"skinny"})


def test_one_tuning_serves_both_types_where_its_config_can() -> None:
    spec = gpu.lookup("h200")
    both = [RMS_NORM_LINEAR.Problem.parse(f"m=64 n=18944 k=3584{words}") for words in ("", " dtype=fp16")]
    assert both[0].bucket() == both[1].bucket()
    fused = RMS_NORM_LINEAR.default(both[0], spec)
    assert [RMS_NORM_LINEAR.why_not(p, fused, spec) is None for p in both] == [True, False]


def test_the_default_is_fused_where_weighing_hides() -> None:
    spec = gpu.lookup("h200")

    def path(m: int, n: int, k: int = 3584) -> str:
        return RMS_NORM_LINEAR.default(RMS_NORM_LINEAR.Problem.parse(f"m={m} n={n} k={k}"), spec).path

    assert [path(m, 18944) for m in (1, 16, 64, 128)] == ["fused"] * 4
    assert [path(m, 3584) for m in (1, 8, 16, 32, 48, 64, 128)] == ["fused"] * 6 + ["chain"]
    assert [path(m, 4096, 4096) for m in (1, 16, 64, 128)] == ["fused"] * 3 + ["chain"]
    assert path(16, 2048, 4096) == "chain", "one CTA's share of W comes sooner than its tokens are weighed"
    assert path(16, 6144, 4096) == "fused", "two CTAs to a tile weigh for less than half of the product's time"
    assert path(64, 3584, 18944) == "chain", "they would for most of it"
    assert path(64, 37888) == "chain", "two waves of CTAs"


def test_rows_of_a_gate_come_by_eights() -> None:
    spec = gpu.lookup("h200")
    some = next(c for c in LINEAR_SILU_MUL.valid(LINEAR_SILU_MUL.Problem.parse("m=8 n=64 k=64"), spec) if c != CHAIN)
    reason = LINEAR_SILU_MUL.why_not(LINEAR_SILU_MUL.Problem.parse("m=8 n=68 k=64"), some, spec)
    assert "8 at a time" in str(reason)
    with pytest.raises(UnsupportedProblem, match="needs norm=1"):
        LINEAR_SILU_MUL.Problem.parse("m=1 n=8 k=8 norm_weight=same")


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_explain_says_which_path(op: NormLinear) -> None:
    said = str(ck.explain(op.name, "m=16 n=3584 k=3584", gpu="h200"))
    assert "path=" in said
    large = ck.explain(op.name, "m=4096 n=3584 k=3584", gpu="h200")
    assert str(large.choice.config).startswith("path=chain" if op is RMS_NORM_LINEAR else "path=fused")


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_a_chain_s_parts_are_what_it_calls(op: NormLinear) -> None:
    """Kernels compiled ahead for a chain are those that its ops look up, down to alignment."""
    for p in map(few_weights, map(op.Problem.parse, op.suite)):
        if p.layout != "aligned":
            continue
        args = op.sample(p, "cpu", 0)
        y = op.outputs(p, *args)[0]
        h = torch.empty(p.m, p.k, dtype=y.dtype)
        named = dict(zip(op.inputs, args, strict=False))
        g, w = named["norm_weight"], named.get("weight", named.get("w_gate_up"))
        z = torch.empty(p.m, w.shape[0], dtype=y.dtype)
        gate, up = z.chunk(2, -1) if op is LINEAR_SILU_MUL else (None, None)
        for part, posed in op.parts(p):
            if part is RMS_NORM:
                found = part.problem(h, args[0], g, rounding="once")
            elif part is SILU_MUL:
                found = part.problem(y, gate, up)
            else:
                out = z if op is LINEAR_SILU_MUL else y
                activation = getattr(p, "activation", "none")
                found = GEMM.problem(out, h, w.t(), None, named.get("bias"), activation=activation, accumulate="fp32")
            assert found == posed


def test_the_tolerance_grants_a_rounded_operand_and_no_more() -> None:
    """Both paths, their roundings written out, are right; a norm's weight that is wrong for one k-block is not."""
    for text in ("m=16 n=512 k=1024", "m=16 n=512 k=1024 dtype=fp16"):
        p = RMS_NORM_LINEAR.Problem.parse(text)
        args = x, g, w, _, _, eps = RMS_NORM_LINEAR.sample(p, "cpu", 0)
        work, expected = RMS_NORM_LINEAR.work(p), RMS_NORM_LINEAR.reference(p, *args)
        rstd = torch.rsqrt(x.double().square().mean(-1, keepdim=True) + eps)

        def wrong(y: Tensor) -> float:
            return worst_error((y.to(x.dtype),), expected, work.flops, depth=work.depth)  # noqa: B023

        fused = x.double() @ (w.float() * g.float()).to(w.dtype).double().t() * rstd
        chain = (x.double() * rstd * g.double()).to(x.dtype).double() @ w.double().t()
        assert max(wrong(fused), wrong(chain)) <= 1
        almost = g.clone()
        almost[512:528] = 1.0
        assert wrong(normed(x, almost, eps) @ w.double().t()) > 1


def test_each_square_is_counted_once() -> None:
    """The fragments of m16n8k16, written out: a B fragment, repeated, is an A fragment of the same tokens.

    The diagonal of ``x x^T`` then lies where ``TokenNorm.leave`` reads it, and of the warps that share a k-block one
    takes it, so that each (token, k) is counted once.
    """
    x = torch.randn(8, 16, dtype=torch.float64)
    lanes = range(32)
    b = {lane: [x[lane // 4, lane % 4 * 2 + v + 8 * half] for half in (0, 1) for v in (0, 1)] for lane in lanes}
    a = torch.empty(16, 16, dtype=torch.float64)
    for lane in lanes:  # ((2, 2, 2) : (1, 0, 2)) over b: neighbours, rows 8 apart (the same), k 8 apart
        for v, row_half, k_half in ((v, r, k) for v in (0, 1) for r in (0, 1) for k in (0, 1)):
            a[lane // 4 + 8 * row_half, lane % 4 * 2 + v + 8 * k_half] = b[lane][v + 2 * k_half]
    assert torch.equal(a, torch.cat([x, x]))
    d = a @ x.t()
    held = {}
    for lane in lanes:
        c = [d[lane // 4 + 8 * half, lane % 4 * 2 + v] for half in (0, 1) for v in (0, 1)]
        row = lane // 4
        if lane % 4 == row // 2:
            held[row] = c[row % 2]
    torch.testing.assert_close(torch.stack([held[row] for row in range(8)]), x.square().sum(-1))
    for warps_m, warps_k, tile_k in ((1, 4, 128), (2, 4, 128), (4, 2, 64), (4, 1, 64), (4, 2, 128)):
        blocks = tile_k // 16 // warps_k
        counted = torch.zeros(6 * tile_k // 16, dtype=torch.int64)
        for k_tile in range(6):
            for slice_k, warp in ((s, w) for s in range(warps_k) for w in range(warps_m)):
                for block in range(blocks):
                    if (k_tile * blocks + block) % warps_m == warp:
                        counted[k_tile * (tile_k // 16) + block * warps_k + slice_k] += 1
        assert (counted == 1).all()


@pytest.mark.parametrize("weighted", [False, True])
def test_registered_with_torch(weighted: bool) -> None:
    x, g, w = (t.requires_grad_() for t in (randn(4, 32, dtype=torch.float32), randn(32, dtype=torch.float32),
                                            randn(16, 32, dtype=torch.float32)))  # fmt: skip
    gamma = g if weighted else None
    rstd = torch.rand(4) + 0.5
    bias = randn(16, dtype=torch.float32).requires_grad_()
    torch.library.opcheck(torch.ops.cutekernels.rms_norm_linear.default, (x, gamma, w, bias, None, "silu", 1e-6))
    torch.library.opcheck(torch.ops.cutekernels.rms_norm_linear.default, (x, gamma, w, None, rstd, "none", 1e-6))
    torch.library.opcheck(torch.ops.cutekernels.linear_silu_mul.default, (x, w, gamma, weighted, 1e-6))


def test_the_op_has_the_gradients_of_the_chain() -> None:
    leaves = [randn(*shape, dtype=torch.float64).requires_grad_() for shape in ((3, 6), (6,), (4, 6))]
    x, g, w = leaves
    raw = torch.ops.cutekernels.rms_norm_linear(x, g, w, None, None, "silu", 1e-6)
    ours = torch.autograd.grad(raw.square().sum(), leaves)
    y = ck.rms_norm_linear(x, g, w, activation="silu")
    assert isinstance(y, Tensor)
    for a, b in zip(ours, torch.autograd.grad(y.square().sum(), leaves), strict=True):
        torch.testing.assert_close(a, b)


def test_no_second_derivative_within_vmap() -> None:
    """There the op is called, whose gradient is not recorded; elsewhere its parts are, which say so themselves."""
    weight, x = torch.randn(4, 8).double(), torch.randn(2, 3, 8).double().requires_grad_()
    y = torch.vmap(lambda row: ck.linear_silu_mul(row, weight))(x)
    with pytest.raises(UnsupportedProblem, match="linear_silu_mul within vmap is differentiable once: call its parts"):
        torch.autograd.grad(y.sum(), x, create_graph=True, retain_graph=True)
    (dx,) = torch.autograd.grad(y.sum(), x)
    torch.testing.assert_close(dx, torch.autograd.grad(ck.linear_silu_mul(x, weight).sum(), x)[0])


def test_more_refusals() -> None:
    x, g, w = randn(4, 64), randn(64), randn(32, 64)
    for call, said in (
        (lambda: ck.rms_norm_linear(x, g, w, residual=x, config=CHAIN), "config= is for one kernel"),
        (lambda: ck.rms_norm_linear(x, g, w.float()), "takes weight in bfloat16; got torch.float32: convert it"),
        (lambda: ck.rms_norm_linear(x, g, w, randn(31)), "bias does not fit"),
        (lambda: ck.rms_norm_linear(x, g, w, out=randn(4, 31)), r"out must be \(4, 32\)"),
        (lambda: ck.rms_norm_linear(x, g, w, out=x[:, :32]), "overlaps"),
        (lambda: ck.rms_norm_linear(x.int(), g, w.int()), "takes bfloat16"),
        (lambda: ck.linear_silu_mul(x, w, norm_weight=g[:3]), "norm_weight does not fit"),
    ):
        with pytest.raises(UnsupportedProblem, match=said):
            call()


@pytest.mark.parametrize("value", ["apart", "beside"])
def test_a_stored_winner_with_a_removed_knob_is_passed_over(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """``squares`` was a knob until 2026-11; ``explain`` tells why the row is not used."""
    p, h200 = RmsNormLinearProblem(m=64, n=3584, k=3584), gpu.lookup("h200")
    default = RMS_NORM_LINEAR.default(p, h200)
    key = RMS_NORM_LINEAR.name, RMS_NORM_LINEAR.revision
    row = TunedConfig(*key, str(p), f"{default} squares={value}", "measured", 8.0, 1.1, "", "database")
    table = {key: {row.problem: row}}
    monkeypatch.setattr(snapshots, "_held", {"h200": Snapshot(MappingProxyType(table))})
    told = dispatch.explain(RMS_NORM_LINEAR, p, h200)
    assert (told.choice.origin, told.choice.config) == ("default", default)
    assert "squares" in dict(told.rows)["asked: tuned"]
    with pytest.raises(InvalidConfig, match="squares"):
        NormLinearConfig.parse(row.config)
