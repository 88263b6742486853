"""``linear`` and its chains with packed weights, on the CPU: numbers, gradients, layouts, graphs, refusals."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import cutekernels as ck
from cutekernels.errors import InvalidConfig, UnsupportedProblem
from cutekernels.kernels.activations import ACTIVATIONS, activated
from cutekernels.ops.products.packed_api import _pose_gate, gated, quantized_linear
from cutekernels.ops.shared.calls import Recorder
from cutekernels.quant import QuantizedWeight, quantize
from tests.quantized.cases import (
    BF16,
    COMMON,
    FP16,
    FP32,
    KINDS,
    Kind,
    error,
    make,
    product_of,
    shifted_edge,
    swapped_scales,
    wrong_nibble,
    wrong_zero,
)

ASYMMETRIC = Kind(group=64, zeros=True)


# ---- numbers --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS.values(), ids=str)
def test_every_kind_of_weight(kind: Kind) -> None:
    made = make(129, 200, kind)
    for dtype in (BF16, FP16, FP32, torch.float64):
        x = torch.randn(5, 200).to(dtype)
        y = ck.linear(x, made.weight())
        assert y.dtype == dtype
        assert error(y, product_of(x, made.exact()), 200) <= 1


@pytest.mark.parametrize("n, k", [(1, 1), (17, 8), (64, 64), (65, 63), (130, 129), (200, 300)])
@pytest.mark.parametrize("kind", COMMON.values(), ids=str)
def test_ragged_extents(kind: Kind, n: int, k: int) -> None:
    """K that 8 does not divide too, which kernels refuse."""
    made = make(
        n, k, kind if k > kind.group or kind.code == "e2m1" else Kind(kind.code, 0, zeros=kind.zeros, scale=kind.scale)
    )
    x = torch.randn(3, k).bfloat16()
    assert error(ck.linear(x, made.weight()), product_of(x, made.exact()), k) <= 1


@pytest.mark.parametrize("order", [False, True])
@pytest.mark.parametrize("activation", [None, *ACTIVATIONS[1:]])
@pytest.mark.parametrize("bias", [None, BF16, FP32])
def test_bias_activation_and_order(bias: torch.dtype | None, activation: Any, order: bool) -> None:
    made = make(129, 200, Kind(group=32, zeros=True, order=order))
    x, b = torch.randn(7, 200).bfloat16(), None if bias is None else torch.randn(129).to(bias)
    expected = product_of(x, made.exact(), b, activation)
    assert error(ck.linear(x, made.weight(), b, activation=activation), expected, 200) <= 1
    out = torch.empty(7, 260, dtype=BF16)[:, 1:130]
    assert ck.linear(x, made.weight(), b, activation=activation, out=out) is out
    assert error(out, expected, 200) <= 1


def test_planted_bugs_are_beyond_the_tolerance() -> None:
    made = make(128, 512, ASYMMETRIC)
    x = torch.randn(16, 512).bfloat16()
    y = ck.linear(x, made.weight())
    assert error(y, product_of(x, made.exact()), 512) <= 1
    for broken in (
        wrong_nibble(made, 127, 511), wrong_zero(made, 3, 7), swapped_scales(made, 40), shifted_edge(made, 1)
    ):  # fmt: skip
        assert error(y, product_of(x, broken.exact()), 512) > 1
    assert torch.equal(ck.linear(x, wrong_nibble(made, 5, 5).weight())[:, :5], y[:, :5]), (
        "a wrong code is of its row alone"
    )


def laid(x: Tensor) -> dict[str, Tensor]:
    """``x`` in memory that lies in other ways."""
    wide = torch.zeros(*x.shape[:-1], 2 * x.shape[-1] + 3, dtype=x.dtype)
    return {
        "dense": x,
        "sliced": wide[..., 3 : 3 + x.shape[-1]].copy_(x),
        "every second": wide.clone()[..., : 2 * x.shape[-1] : 2].copy_(x),
        "misaligned": torch.zeros(x.numel() + 1, dtype=x.dtype)[1:].view(x.shape).copy_(x),
        "transposed": x.transpose(0, -1).contiguous().transpose(0, -1),
    }


@pytest.mark.parametrize("order", [False, True])
@pytest.mark.parametrize("shape", [(200,), (1, 200), (6, 200), (2, 3, 200), (2, 0, 200), (0, 200), (1, 2, 3, 200)])
def test_shapes_and_strides(shape: tuple[int, ...], order: bool) -> None:
    made = make(72, 200, Kind(group=64, order=order))
    weight, b = made.weight(), torch.randn(72).bfloat16()
    x = torch.randn(shape).bfloat16()
    expected = product_of(x, made.exact(), b)
    for name, given in laid(x).items():
        assert torch.equal(given, x)
        y = ck.linear(given, weight, b)
        assert y.shape == (*shape[:-1], 72)
        assert y.is_contiguous()
        assert error(y, expected, 200) <= 1, name
    for name, out in laid(torch.zeros(*shape[:-1], 72, dtype=BF16)).items():
        assert ck.linear(x, weight, b, out=out) is out
        assert error(out, expected, 200) <= 1, name


def test_out_of_strides_that_no_matrix_has() -> None:
    made = make(72, 200)
    x, out = torch.randn(4, 3, 200), torch.zeros(3, 4, 72).transpose(0, 1)
    assert ck.linear(x, made.weight(), out=out) is out
    torch.testing.assert_close(out.double(), x.double() @ made.exact().t())


# ---- gradients ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [*COMMON.values(), Kind(group=32, zeros=True, order=True)], ids=str)
def test_the_gradient_of_x_is_that_of_the_dequantized_weight(kind: Kind) -> None:
    made = make(129, 200, kind)
    weight, dy = made.weight(), torch.randn(2, 3, 129)
    x, b = torch.randn(2, 3, 200, requires_grad=True), torch.randn(129, requires_grad=True)
    ck.linear(x, weight, b).backward(dy)
    assert x.grad is not None
    assert b.grad is not None
    torch.testing.assert_close(x.grad, dy @ weight.dequantize(FP32))
    torch.testing.assert_close(b.grad, dy.sum((0, 1)))


@pytest.mark.parametrize("activation", [name for name in ACTIVATIONS if name != "none"])
@pytest.mark.parametrize("order", [False, True])
def test_gradients_through_activations(activation: Any, order: bool) -> None:
    made = make(72, 136, Kind(group=32, zeros=True, order=order))
    weight, dy = made.weight(), torch.randn(5, 72).double()
    x, b = torch.randn(5, 136).double().requires_grad_(), torch.randn(72).double().requires_grad_()
    found = torch.autograd.grad(ck.linear(x, weight, b, activation=activation), (x, b), dy)
    dense = weight.dequantize(FP32).double()
    expected = torch.autograd.grad(activated(F.linear(x, dense, b), activation), (x, b), dy)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_gradients_of_x_or_of_bias_alone() -> None:
    made = make(72, 136, ASYMMETRIC)
    weight, dense = made.weight(), made.exact().float()
    x, b = torch.randn(5, 136), torch.randn(72)
    for wants_x, wants_b in ((True, False), (False, True)):
        x, b = x.detach().requires_grad_(wants_x), b.detach().requires_grad_(wants_b)
        ck.linear(x, weight, b).square().sum().backward()
        dy = 2 * F.linear(x, dense, b).detach()
        assert (x.grad is None) == (not wants_x)
        assert (b.grad is None) == (not wants_b)
        torch.testing.assert_close(x.grad if wants_x else b.grad, dy @ dense if wants_x else dy.sum(0))


# ---- chains ---------------------------------------------------------------------------------------------


def plain(made: Any, dtype: torch.dtype) -> Tensor:
    return made.exact().to(dtype)


@pytest.mark.parametrize("order", [False, True])
@pytest.mark.parametrize("tokens", [3, 200])
@pytest.mark.parametrize(
    "options",
    [{}, {"bias": True, "activation": "silu"}, {"residual": True}, {"residual": True, "rstd": True, "bias": True},
     {"exact": True}, {"rstd": True, "exact": True}, {"norm_weight": None, "eps": 0.1}],
    ids=str,
)  # fmt: skip
def test_rms_norm_linear_is_that_of_the_plain_weight(options: dict[str, Any], tokens: int, order: bool) -> None:
    made = make(72, 136, Kind(group=32, zeros=True, order=order))
    shape = (tokens // 3, 3, 136) if tokens % 3 == 0 else (tokens, 136)
    leaves = {
        "x": torch.randn(shape), "norm_weight": torch.rand(136) + 0.5, "bias": torch.randn(72),
        "residual": torch.randn(shape), "rstd": torch.rand(shape[:-1]) + 0.5,
    }  # fmt: skip
    given = {name: leaves[name] if value is True and name in leaves else value for name, value in options.items()}
    given = {"x": leaves["x"], "norm_weight": leaves["norm_weight"], **given}
    results = []
    for weight in (made.weight(), plain(made, FP32)):
        own = {
            name: t.clone().requires_grad_(name != "rstd") if isinstance(t, Tensor) else t for name, t in given.items()
        }
        made_results = ck.rms_norm_linear(weight=weight, **own)
        outputs = made_results if isinstance(made_results, tuple) else (made_results,)
        sum(y.square().sum() for y in outputs).backward()
        results.append([*outputs, *(t.grad for t in own.values() if isinstance(t, Tensor) and t.requires_grad)])
        if "residual" not in options:
            with torch.no_grad():
                out = torch.empty(*shape[:-1], 80)[..., :72]
                assert ck.rms_norm_linear(weight=weight, out=out, **own) is out
            results[-1].append(out)
    for ours, theirs in zip(*results, strict=True):
        # The plain weight's sums are fp32, ours fp64.
        torch.testing.assert_close(ours, theirs, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("norm", [{}, {"norm_weight": True}, {"norm": True, "eps": 0.1}], ids=str)
@pytest.mark.parametrize("tokens", [3, 200])
def test_linear_silu_mul_is_that_of_the_plain_weight(norm: dict[str, Any], tokens: int) -> None:
    made = make(144, 136, Kind(group=32, zeros=True, order=True))
    results = []
    for weight in (made.weight(), plain(made, FP32)):
        torch.manual_seed(0)
        x, gamma = torch.randn(tokens, 136, requires_grad=True), torch.rand(136, requires_grad=True)
        given = norm | ({"norm_weight": gamma} if "norm_weight" in norm else {})
        y = ck.linear_silu_mul(x, weight, **given)
        y.square().sum().backward()
        results.append([y, x.grad, *([gamma.grad] if "norm_weight" in norm else [])])
        with torch.no_grad():
            out = torch.empty(tokens, 72)
            assert ck.linear_silu_mul(x, weight, out=out, **given) is out
        results[-1].append(out)
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-5, atol=2e-5)


def test_a_recorded_gate_is_one_kernel_and_two() -> None:
    """Which of them a call takes is its GPU's and its tokens'."""
    weight = quantize(torch.randn(256, 136), "int4_g128")
    for tokens, both in ((8, False), (64, True)):
        with Recorder().calls() as noted:
            ck.linear_silu_mul(torch.empty(tokens, 136, dtype=BF16), weight)
        posed = [(op.name, getattr(p, "activation", "")) for op, p in noted]
        apart = [("quantized_linear", "none"), ("silu_mul", "")] if both else []
        assert posed == [("quantized_linear", "silu_mul"), *apart]


@pytest.mark.parametrize(
    ("dtype", "code", "scale", "posed"),
    [
        (BF16, "int4", FP16, "m=64 n=256 k=256 activation=silu_mul"),
        (FP16, "e2m1", torch.uint8, "m=64 n=256 k=256 code=e2m1 group=32 scale=e8m0 activation=silu_mul"),
        (FP32, "int4", FP16, None),
        (BF16, "int4", torch.float64, None),
    ],
)
def test_gates_are_posed_as_they_are_tuned(
    dtype: torch.dtype, code: str, scale: torch.dtype, posed: str | None
) -> None:
    """Types that no kernel takes have no problem: the op refuses them."""
    p = _pose_gate(64, 256, 256, dtype, code, 32 if code == "e2m1" else 128, 1, scale, False, False)
    assert (None if p is None else str(p)) == posed


def test_an_out_off_16_bytes_takes_two_kernels() -> None:
    weight, x = quantize(torch.randn(256, 136), "int4_g128"), torch.randn(64, 136)
    out = torch.empty(64 * 128 + 1)[1:].view(64, 128)
    assert gated(x, weight, out=out) is None
    torch.testing.assert_close(ck.linear_silu_mul(x, weight, out=out), ck.linear_silu_mul(x, weight))


@pytest.mark.parametrize("into", [BF16, FP16])
def test_autocast_lowers_activations(into: torch.dtype) -> None:
    made = make(72, 136, ASYMMETRIC)
    x, b = torch.randn(5, 136, requires_grad=True), torch.randn(72)
    with torch.autocast("cpu", into):
        y = ck.linear(x, made.weight(), b)
        z = ck.rms_norm_linear(x, None, made.weight(), b)
    assert y.dtype == z.dtype == into
    assert error(y.detach(), product_of(x.detach().to(into), made.exact(), b), 136) <= 1
    y.sum().backward()
    assert x.grad is not None and x.grad.dtype == FP32


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, of jvp
def test_transforms() -> None:
    made = make(72, 136, Kind(group=32, zeros=True, order=True))
    weight, dense, x = made.weight(), made.exact().float(), torch.randn(5, 136)
    pairs: list[tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = [
        (lambda t: ck.linear(t, weight, activation="silu"), lambda t: F.silu(t @ dense.t())),
        (lambda t: ck.rms_norm_linear(t, None, weight), lambda t: F.rms_norm(t, (136,), eps=1e-6) @ dense.t()),
    ]
    for ours, theirs in pairs:
        for transform in (
            lambda f: torch.func.grad(lambda t: f(t).square().sum()),
            lambda f: torch.func.vmap(f),
            lambda f: torch.func.vmap(torch.func.grad(lambda t: f(t).square().sum())),
            lambda f: lambda t: torch.func.jacrev(f)(t[0]),
        ):
            torch.testing.assert_close(transform(ours)(x), transform(theirs)(x), rtol=1e-4, atol=1e-4)
    with pytest.raises(UnsupportedProblem, match="no forward-mode derivative"):
        torch.func.jvp(lambda t: ck.linear(t, weight), (x,), (x,))


# ---- graphs ---------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("kind", [ASYMMETRIC, Kind("e4m3", 128, 128, scale=FP32)], ids=str)
@pytest.mark.parametrize("activation", ["none", "relu", "silu"])
def test_opcheck(kind: Kind, activation: str) -> None:
    weight = make(40, 136, kind).weight()
    x, b = torch.randn(3, 136), torch.randn(40)
    held = weight.packed, weight.scales, weight.zeros, weight.factors
    options = weight.code, weight.group, 40, activation
    op, checked = torch.ops.cutekernels.quantized_linear, torch.library.opcheck
    checked(op.default, (x, *held, None, *options))
    checked(op.default, (x.requires_grad_(), *held, b.requires_grad_(), *options))
    out = torch.empty(3, 40)
    checked(torch.ops.cutekernels.quantized_linear_out.default, (x.detach(), *held, b.detach(), out, *options))


@pytest.mark.parametrize(
    "kind", [ASYMMETRIC, Kind(group=32, order=True), Kind("nf4", 64), COMMON["e2m1 g16 int32"]], ids=str
)
def test_compiled_and_exported(kind: Kind) -> None:
    weight, norm = make(72, 136, kind).weight(), torch.rand(136)

    def layer(x: Tensor) -> Tensor:
        return (
            ck.linear_silu_mul(ck.rms_norm_linear(x, norm, weight).repeat(1, 2)[:, :136], weight)
            + ck.linear(x, weight, activation="silu")[:, :36]
        )

    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True, dynamic=True)
    for tokens in (3, 5):
        x, y = torch.randn(2, tokens, 136).requires_grad_(False).unbind()
        x, y = x.clone().requires_grad_(), x.clone().requires_grad_()
        results = []
        for function, leaf in ((layer, x), (compiled, y)):
            z = function(leaf)
            z.square().sum().backward()
            results.append((z, leaf.grad))
        for ours, theirs in zip(*results, strict=True):
            torch.testing.assert_close(ours, theirs)


# ---- refusals -------------------------------------------------------------------------------------------


def _offsets(weight: QuantizedWeight) -> QuantizedWeight:
    from dataclasses import replace

    return replace(weight, zeros=None, offsets=torch.ones_like(weight.scales))


X, OUT = torch.randn(5, 136), torch.empty(5, 72)
REFUSED: dict[str, tuple[Callable[[QuantizedWeight], Any], str]] = {
    "no tensor": (lambda w: ck.linear([1.0], w), "takes x as a torch.Tensor"),
    "another K": (lambda w: ck.linear(X[:, :64], w), r"x must be \(\.\.\., K\) with weight's K=136"),
    "no dimension": (lambda w: ck.linear(torch.tensor(1.0), w), r"x must be \(\.\.\., K\)"),
    "integers": (lambda w: ck.linear(X.int(), w), "takes bfloat16, float16, float32, float64; got torch.int32"),
    "an activation": (lambda w: ck.linear(X, w, activation="tanh"), "activation must be one of"),  # type: ignore[arg-type]
    "a bias of another shape": (lambda w: ck.linear(X, w, X[0]), r"takes bias \(columns,\) = \(72,\); got \(136,\)"),
    "a bias of another type": (lambda w: ck.linear(X, w, OUT[0].half()), "takes bias in float32; got torch.float16"),
    "a bias that is no tensor": (lambda w: ck.linear(X, w, 1.0), "takes bias as a torch.Tensor"),  # type: ignore[arg-type]
    "out of another shape": (lambda w: ck.linear(X, w, out=OUT[:3]), r"out must be \(5, 72\)"),
    "out of another type": (lambda w: ck.linear(X, w, out=OUT.half()), "takes out in float32; got torch.float16"),
    "out that overlaps itself": (lambda w: ck.linear(X, w, out=OUT[:1].expand(5, 72)), "must not overlap itself"),
    "out that is an input": (lambda w: ck.linear(S[:, :136], w, out=S[:, 100:172]), "overlaps an operand"),
    "out and gradients": (lambda w: ck.linear(X.clone().requires_grad_(), w, out=OUT), "not differentiable"),
    "another device": (lambda w: ck.linear(X.half().to("meta"), w), "packed is on cpu, not meta: move it"),
    "offsets": (lambda w: ck.linear(X, _offsets(w)), "torchao's float zero points"),
    "a weight of experts": (lambda w: ck.rms_norm_linear(X, X[0, :3], w), r"norm_weight must be \(K,\)"),
    "a config of the fused op": (lambda w: ck.rms_norm_linear(X, None, w, config="body=skinny"), "config= is for one"),
    "a config of the gate": (lambda w: ck.linear_silu_mul(X, w, config="body=skinny"), "config= is for one"),
    "out that is no tensor": (
        lambda w: ck.linear_silu_mul(X, make(128, 136).weight(), out=3),  # type: ignore[arg-type]
        "takes out as a torch.Tensor",
    ),
    "a norm of another K": (lambda w: ck.rms_norm_linear(X[:, :64], None, w), r"x must be \(\.\.\., K\)"),
    "a norm of no tensor": (lambda w: ck.rms_norm_linear(3.0, None, w), "takes x as a torch.Tensor"),  # type: ignore[call-overload]
    "no norm with a weight": (
        lambda w: ck.linear_silu_mul(X, w, norm_weight=X[0], norm=False), "norm=False takes no norm_weight"
    ),
}  # fmt: skip
S = torch.randn(5, 200)


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_are_one_sentence(name: str) -> None:
    call, message = REFUSED[name]
    with pytest.raises((UnsupportedProblem, InvalidConfig), match=message) as caught:
        call(make(72, 136).weight())
    assert "\n" not in str(caught.value)


def test_an_odd_number_of_rows_is_no_gate() -> None:
    with pytest.raises(UnsupportedProblem, match=r"w_gate_up must be \(2 \* I, K\)"):
        ck.linear_silu_mul(X, make(71, 136).weight())


def test_config_is_ignored_on_the_cpu() -> None:
    weight = make(72, 136).weight()
    assert torch.equal(quantized_linear(X, weight, config="body=skinny"), ck.linear(X, weight))


def test_what_is_contiguous_but_begins_where_no_kernel_reads_is_copied() -> None:
    """``Tensor.contiguous`` would return it as it is, misaligned."""
    from cutekernels.ops.shared.calls import _dense_copy

    misaligned = torch.arange(17.0)[1:]
    copied = _dense_copy(misaligned)
    assert copied.data_ptr() != misaligned.data_ptr() and torch.equal(copied, misaligned)
    assert _dense_copy(torch.randn(4, 6)[:, ::2]).is_contiguous()


@pytest.mark.parametrize("tokens", [1, 33])
def test_a_gate_behind_a_packed_weight_is_that_of_its_halves(tokens: int) -> None:
    """One op for few tokens, two for many; with a gradient, and straight through torch's op."""
    torch.manual_seed(3)
    weight = ck.quant.quantize(torch.randn(256, 128), "int4_g64")
    x = torch.randn(tokens, 128)
    gate, up = (x.double() @ weight.dequantize(torch.float32).double().t()).chunk(2, -1)
    want = (torch.nn.functional.silu(gate) * up).float()
    torch.testing.assert_close(ck.linear_silu_mul(x, weight), want, rtol=1e-4, atol=1e-3)
    leaf = x.clone().requires_grad_()
    op = torch.ops.cutekernels.quantized_linear
    y = op(leaf, weight.packed, weight.scales, None, None, None, weight.code, weight.group, 256, "silu_mul")
    torch.testing.assert_close(y, want, rtol=1e-4, atol=1e-3)
    y.sum().backward()
    plain = x.clone().requires_grad_()
    gate, up = (plain @ weight.dequantize(torch.float32).t()).chunk(2, -1)
    (torch.nn.functional.silu(gate) * up).sum().backward()
    torch.testing.assert_close(leaf.grad, plain.grad, rtol=1e-3, atol=1e-3)
