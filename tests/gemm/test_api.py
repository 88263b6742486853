"""``gemm`` and ``linear`` on the CPU: values, views, refusals, gradients, tracing. The warm path has its own file."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

import cutekernels as ck
from cutekernels.errors import UnsupportedProblem
from cutekernels.kernels.activations import ACTIVATIONS, TABLE
from cutekernels.ops.products.schedules.problem import GemmConfig
from tests.traced import Recording

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]
NAMES = [None, *ACTIVATIONS[1:]]


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64).to(dtype)


def close(actual: Tensor, expected: Tensor) -> None:
    """``actual`` is ``expected`` (fp64), rounded once to the type of ``actual``."""
    assert actual.shape == expected.shape
    torch.testing.assert_close(actual, expected.to(actual.dtype), rtol=torch.finfo(actual.dtype).eps, atol=1e-12)


# ---- values ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", NAMES)
def test_gemm_is_what_it_says(dtype: torch.dtype, activation: str | None) -> None:
    a, b, c, bias = (randn(*shape, dtype=dtype) for shape in ((9, 17), (17, 11), (9, 11), (11,)))
    z = 0.5 * (a.double() @ b.double()) + 2.0 * c.double() + bias.double()
    act = TABLE[activation or "none"].torch
    out = ck.gemm(a, b, c, alpha=0.5, beta=2.0, bias=bias, activation=activation)
    assert out.dtype == dtype
    close(out, act(z))
    x, w = randn(2, 3, 17, dtype=dtype), randn(11, 17, dtype=dtype)
    expected = act(x.double() @ w.double().t() + bias.double())
    close(ck.linear(x, w, bias, activation=activation), expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_defaults_are_a_plain_product(dtype: torch.dtype) -> None:
    a, b = randn(5, 7, dtype=dtype), randn(7, 3, dtype=dtype)
    close(ck.gemm(a, b), a.double() @ b.double())


def test_a_bias_may_be_fp32_beside_half_operands() -> None:
    a, b, bias = randn(4, 8, dtype=torch.bfloat16), randn(8, 6, dtype=torch.bfloat16), randn(6)
    close(ck.gemm(a, b, bias=bias), a.double() @ b.double() + bias.double())


def test_fp16_accumulation_is_an_option_for_fp16() -> None:
    a, b = randn(4, 8, dtype=torch.float16), randn(8, 6, dtype=torch.float16)
    torch.testing.assert_close(ck.gemm(a, b, accumulate="fp16"), a @ b, rtol=1e-2, atol=1e-2)


def test_every_layout_and_view() -> None:
    a, b, c = randn(6, 10), randn(10, 8), randn(6, 8)
    expected = a.double() @ b.double() + c.double()
    spread = torch.zeros(12, 30)
    spread[::2, ::3] = a
    for x in (a, a.t().contiguous().t(), spread[::2, ::3], a.flip(0).flip(0)):
        for y in (b, b.t().contiguous().t()):
            for z in (c, c.t().contiguous().t()):
                close(ck.gemm(x, y, z, beta=1.0), expected)
    close(ck.gemm(a[:1].expand(5, 10), b), (a[:1].double() @ b.double()).expand(5, 8))


def test_batches_and_broadcast() -> None:
    a, b, c = randn(3, 4, 6), randn(3, 6, 5), randn(3, 4, 5)
    close(ck.gemm(a, b, c, beta=2.0), a.double() @ b.double() + 2 * c.double())
    close(ck.gemm(a, b[0]), a.double() @ b[0].double())
    close(ck.gemm(a[0], b), a[0].double() @ b.double())
    close(ck.gemm(a.mT.contiguous().mT, b.transpose(0, 1).contiguous().transpose(0, 1)), a.double() @ b.double())
    close(ck.gemm(a[:1], b[0]), a[:1].double() @ b[0].double())


def test_linear_takes_any_rank() -> None:
    w = randn(5, 8)
    for shape in ((8,), (3, 8), (2, 3, 8), (2, 1, 3, 8), (0, 3, 8), (2, 0, 8)):
        x = randn(*shape)
        close(ck.linear(x, w), x.double() @ w.double().t())
    x = randn(3, 2, 8).transpose(0, 1)  # no single stride walks its rows
    close(ck.linear(x, w), x.double() @ w.double().t())
    close(ck.linear(x[..., ::2], w[:, ::2]), x[..., ::2].double() @ w[:, ::2].double().t())


def test_parameters_and_subclasses() -> None:
    x, w = randn(3, 8), Parameter(randn(5, 8))
    out = ck.linear(x, w)
    close(out.detach(), x.double() @ w.detach().double().t())
    assert out.requires_grad
    with torch.no_grad():
        assert not ck.gemm(x, w.t()).requires_grad

    class Tagged(Tensor):
        pass

    assert type(ck.gemm(x.as_subclass(Tagged), w.detach().t())) is Tagged


def test_empty_extents() -> None:
    c, bias = randn(4, 5), randn(5)
    assert ck.gemm(randn(0, 8), randn(8, 5)).shape == (0, 5)
    assert ck.gemm(randn(4, 8), randn(8, 0)).shape == (4, 0)
    assert ck.gemm(randn(0, 4, 8), randn(8, 5)).shape == (0, 4, 5)
    assert torch.equal(ck.gemm(randn(4, 0), randn(0, 5)), torch.zeros(4, 5))
    close(ck.gemm(randn(4, 0), randn(0, 5), c, beta=3.0, bias=bias), 3 * c.double() + bias.double())
    close(ck.linear(randn(2, 0), randn(5, 0), bias), bias.double().expand(2, 5))
    out = torch.full((4, 5), math.nan)
    assert torch.equal(ck.gemm(randn(4, 0), randn(0, 5), out=out), torch.zeros(4, 5))


def test_beta_zero_never_reads_c() -> None:
    a, b = randn(4, 6), randn(6, 5)
    expected = a.double() @ b.double()
    close(ck.gemm(a, b, torch.full((4, 5), math.nan), beta=0.0), expected)
    close(ck.gemm(a, b, torch.full((4, 5), math.inf)), expected)
    unread = torch.full((4, 5), math.nan, requires_grad=True)
    leaf = a.clone().requires_grad_()
    ck.gemm(leaf, b, unread).sum().backward()
    assert unread.grad is None
    assert leaf.grad is not None
    assert not leaf.grad.isnan().any()
    assert torch.ops.cutekernels.gemm(a, b, unread.detach(), None).isfinite().all()
    assert ck.gemm(a, b, unread.detach(), beta=1e-30).isnan().all(), "any other beta does"


def test_nan_passes_through_relu() -> None:
    a = torch.tensor([[math.nan, 1.0], [-1.0, 0.0]])
    out = ck.gemm(a, torch.eye(2), activation="relu")
    assert out[0].isnan().all()
    assert torch.equal(out[1], torch.zeros(2))


def test_config_is_ignored_on_the_cpu() -> None:
    a, b = randn(4, 6), randn(6, 5)
    values = {name: options[0] for name, options in GemmConfig.space().items()}
    for config in (GemmConfig(**values), str(GemmConfig(**values)), "tile_m=7"):  # type: ignore[arg-type]
        close(ck.gemm(a, b, config=config), a.double() @ b.double())


# ---- out= -----------------------------------------------------------------------------------------------


def test_out_is_written_and_returned() -> None:
    a, b = randn(4, 6), randn(6, 5)
    expected = a.double() @ b.double()
    for out in (torch.empty(4, 5), torch.empty(5, 4).t(), torch.empty(4, 10)[:, ::2], torch.empty(8, 5)[::2]):
        version = out._version
        assert ck.gemm(a, b, out=out) is out
        close(out, expected)
        assert out._version > version, "autograd must see that a saved tensor was overwritten"


def test_out_may_be_a_slice_beside_its_operands() -> None:
    buffer = randn(6, 30)
    a, b = buffer[:4, :6], randn(6, 8)
    before = buffer.clone()
    ck.gemm(a, b, out=buffer[:4, 10:18])
    close(buffer[:4, 10:18], before[:4, :6].double() @ b.double())
    before[:4, 10:18] = buffer[:4, 10:18]
    assert torch.equal(buffer, before), "nothing else was touched"


def test_out_may_be_c_itself() -> None:
    a, b, c = randn(4, 6), randn(6, 5), randn(4, 5)
    expected = a.double() @ b.double() + 2 * c.double()
    assert ck.gemm(a, b, c, beta=2.0, out=c) is c
    close(c, expected)


def test_linear_writes_into_out_of_any_layout() -> None:
    x, w, bias = randn(2, 3, 8), randn(5, 8), randn(5)
    expected = x.double() @ w.double().t() + bias.double()
    for out in (
        torch.empty(2, 3, 5),
        torch.empty(2, 3, 9)[..., 2:7],
        torch.empty(3, 2, 5).transpose(0, 1),  # no single stride walks its rows
        torch.empty(5, 3, 2).permute(2, 1, 0),
    ):
        assert ck.linear(x, w, bias, out=out) is out
        close(out, expected)
    flat = torch.empty(5)
    assert ck.linear(x[0, 0], w, bias, out=flat) is flat
    close(flat, expected[0, 0])


BUFFER = torch.zeros(16, 16)
SQUARE = torch.zeros(8, 8)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: ck.gemm(SQUARE, torch.zeros(8, 8), out=SQUARE), "out overlaps a: give it memory of its own"),
        (lambda: ck.gemm(torch.zeros(8, 8), SQUARE, out=SQUARE), "out overlaps b"),
        (lambda: ck.gemm(BUFFER[:8, :8], SQUARE, out=BUFFER[4:12, :8]), "out overlaps a"),
        (lambda: ck.gemm(BUFFER[:8, :8], SQUARE, out=BUFFER[:8, 7:15]), "out overlaps a"),
        (lambda: ck.gemm(SQUARE, torch.ones(8, 8), SQUARE.t(), beta=1.0, out=SQUARE), "out overlaps a"),
        (lambda: ck.gemm(torch.ones(8, 8), torch.ones(8, 8), SQUARE.t(), beta=1.0, out=SQUARE), "out overlaps c"),
        (lambda: ck.gemm(torch.ones(8, 8), torch.ones(8, 8), bias=SQUARE[3], out=SQUARE), "out overlaps bias"),
        (lambda: ck.gemm(SQUARE, torch.ones(8, 8), out=torch.zeros(1, 8).expand(8, 8)), "out must not overlap itself"),
        (lambda: ck.gemm(SQUARE, torch.ones(8, 8), out=torch.zeros(99).as_strided((8, 8), (4, 1))), "overlap itself"),
        (lambda: ck.linear(SQUARE, torch.ones(8, 8), out=SQUARE), "out overlaps a"),
        (
            lambda: ck.linear(
                BUFFER.view(4, 2, 32)[..., :8], torch.ones(8, 8), out=BUFFER.view(2, 4, 32)[..., 4:12].transpose(0, 1)
            ),
            "out overlaps x",
        ),
        (
            lambda: ck.linear(
                torch.ones(4, 2, 8), torch.ones(8, 8), BUFFER[0, :8], out=BUFFER.view(2, 4, 32)[..., :8].transpose(0, 1)
            ),
            "out overlaps bias",
        ),
    ],
)
def test_an_out_that_overlaps_is_refused(call: Callable[[], Tensor], said: str) -> None:
    with pytest.raises(UnsupportedProblem) as raised:
        call()
    assert said in str(raised.value)
    assert not BUFFER.any(), "refused before anything is written"
    assert not SQUARE.any(), "refused before anything is written"


@pytest.mark.parametrize(
    "out",
    [torch.empty(4, 6), torch.empty(5, 4), torch.empty(4, 5, dtype=torch.float64), torch.empty(4, 5, device="meta")],
)
def test_an_out_that_does_not_fit_is_refused(out: Tensor) -> None:
    said = r"out must be \(4, 5\), torch.float32; it is|takes out in float32|out is on meta, not cpu"
    with pytest.raises(UnsupportedProblem, match=said):
        ck.gemm(randn(4, 6), randn(6, 5), out=out)


def test_linear_casts_nothing_into_out() -> None:
    x, w = randn(2, 3, 8), randn(5, 8)
    for out in (torch.empty(2, 3, 5), torch.empty(3, 2, 5).transpose(0, 1)):
        with pytest.raises(UnsupportedProblem, match=r"out must be \(2, 3, 5\), torch.float32"):
            ck.linear(x, w, out=out.half())
    with pytest.raises(UnsupportedProblem, match=r"it is \(3, 2, 5\)"):
        ck.linear(x, w, out=torch.empty(3, 2, 5))


def test_out_is_not_differentiable_and_says_so() -> None:
    x, w = randn(2, 3, 8).requires_grad_(), randn(5, 8)
    calls: list[Callable[[], Tensor]] = [
        lambda: ck.linear(x, w, out=torch.empty(2, 3, 5)),
        lambda: ck.linear(x, w, out=torch.empty(3, 2, 5).transpose(0, 1)),
        lambda: ck.gemm(x[0], w.t(), out=torch.empty(3, 5)),
        lambda: ck.gemm(x[0].detach(), w.t(), out=torch.empty(3, 5, requires_grad=True)),
        lambda: ck.gemm(x[0].detach(), w.t(), bias=torch.ones(5, requires_grad=True), out=torch.empty(3, 5)),
    ]
    for call in calls:
        with pytest.raises(UnsupportedProblem, match=r"leave it out, or call under torch.no_grad\(\)"):
            call()
        with torch.no_grad():
            call()


# ---- refusals -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (
            lambda a, b: ck.gemm(a[0], b),
            "each extent the same wherever it stands; got a (8,), b (8, 6): a does not fit",
        ),
        (lambda a, b: ck.gemm(a.expand(2, 2, 4, 8), b), "got a (2, 2, 4, 8), b (8, 6): a does not fit"),
        (lambda a, b: ck.gemm(a[:, :7], b), "b does not fit: its k is 8, a's 7"),
        (lambda a, b: ck.gemm(a.expand(2, 4, 8), b.expand(3, 8, 6)), "b does not fit: its batch is 3, a's 2"),
        (lambda a, b: ck.gemm(a, b, beta=1.0), "beta=1.0 needs c"),
        (lambda a, b: ck.gemm(a, b, randn(6), beta=1.0), "c (6,): c does not fit"),
        (
            lambda a, b: ck.gemm(a, b, bias=randn(4)),
            "bias (n,), each extent the same wherever it stands; got a (4, 8), b (8, 6), bias (4,): bias does not fit",
        ),
        (lambda a, b: ck.gemm(a, b.double()), "gemm takes b in float32; got torch.float64: convert it"),
        (lambda a, b: ck.gemm(a, b, randn(4, 6).half(), beta=1.0), "takes c in float32; got torch.float16: convert it"),
        (lambda a, b: ck.gemm(a, b, bias=randn(6).half()), "takes bias in float32; got torch.float16: convert it"),
        (lambda a, b: ck.gemm(a, b.to("meta")), "b is on meta, not cpu: move it"),
        (
            lambda a, b: ck.gemm(a, b, activation="swish"),
            f"of {', '.join(ACTIVATIONS)}; it is 'swish'",
        ),
        (lambda a, b: ck.gemm(a, b, accumulate="bf16"), "accumulate must be one of fp32, fp16; it is 'bf16'"),
        (
            lambda a, b: ck.gemm(a, b, accumulate="fp16"),
            "is for fp16 operands; they are torch.float32",
        ),
        (
            lambda a, b: ck.gemm(a.int(), b.int()),
            "takes bfloat16, float16, float32, float64; got torch.int32: convert it",
        ),
        (lambda a, b: ck.linear(a, b[0]), "weight must be (N, K); its shape is (6,)"),
        (lambda a, b: ck.linear(a.expand(2, 4, 8), b), "with weight's K=6; its shape is (2, 4, 8)"),
        (lambda a, b: ck.linear(a, b), "weight's K=6; its shape is (4, 8): weight is (N, K), pass its t() of (6, 8)"),
        (lambda a, b: ck.linear(a, b.t().half()), "linear takes weight in x's torch.float32; got torch.float16"),
        (lambda a, b: ck.linear(a.to("meta"), b.t().half().to("meta")), "linear takes weight in x's torch.float32"),
        (lambda a, b: ck.linear(a, b.t().half(), out=randn(4, 6)), "linear takes weight in x's torch.float32"),
        (lambda a, b: ck.linear(torch.tensor(1.0), b), "x must be (..., K)"),
    ],
)
def test_refusals_say_rule_and_value(call: Callable[[Tensor, Tensor], Tensor], said: str) -> None:
    with pytest.raises(UnsupportedProblem) as raised:
        call(randn(4, 8), randn(8, 6))
    assert said in str(raised.value)


# ---- gradients ------------------------------------------------------------------------------------------


def leaves(*shapes: tuple[int, ...]) -> list[Tensor]:
    return [randn(*shape, dtype=torch.float64).requires_grad_() for shape in shapes]


@pytest.mark.parametrize("activation", NAMES)
def test_gradients_once_and_twice(activation: str | None) -> None:
    def call(a: Tensor, b: Tensor, c: Tensor, bias: Tensor) -> Tensor:
        return ck.gemm(a, b, c, alpha=1.5, beta=-0.5, bias=bias, activation=activation)

    inputs = leaves((3, 4), (4, 5), (3, 5), (5,))
    assert torch.autograd.gradcheck(call, inputs)
    assert torch.autograd.gradgradcheck(call, inputs)


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ((2, 3, 4), (2, 4, 5)),
        ((2, 3, 4), (4, 5)),
        ((3, 4), (2, 4, 5)),
        ((2, 3, 0), (0, 5)),
        ((0, 4), (4, 5)),
        ((0, 3, 4), (4, 5)),
    ],
)
def test_gradients_of_batches_broadcasts_and_empties(a: tuple[int, ...], b: tuple[int, ...]) -> None:
    inputs = leaves(a, b)
    assert torch.autograd.gradcheck(lambda x, y: ck.gemm(x, y, alpha=0.5, activation="silu"), inputs)
    assert torch.autograd.gradcheck(lambda x, y: ck.gemm(x.mT.contiguous().mT, y), inputs)


@pytest.mark.parametrize("shape", [(4,), (3, 4), (2, 3, 4)])
def test_gradients_of_linear(shape: tuple[int, ...]) -> None:
    inputs = leaves(shape, (5, 4), (5,))
    assert torch.autograd.gradcheck(lambda x, w, bias: ck.linear(x, w, bias, activation="gelu"), inputs)
    assert torch.autograd.gradcheck(lambda x, w, bias: ck.linear(x.flip(0), w, bias), inputs)


def test_gradients_keep_their_types_and_shapes() -> None:
    x = randn(2, 3, 8, dtype=torch.bfloat16).requires_grad_()
    w, bias = Parameter(randn(5, 8, dtype=torch.bfloat16)), Parameter(randn(5))
    ck.linear(x, w, bias, activation="silu").sum().backward()
    for t in (x, w, bias):
        assert t.grad is not None
        assert (t.grad.shape, t.grad.dtype) == (t.shape, t.dtype)


def test_only_what_needs_a_gradient_is_computed() -> None:
    a, b = randn(3, 4).requires_grad_(), randn(4, 5)
    out = ck.gemm(a, b)
    with Recording() as mode:
        out.backward(randn(3, 5))
    assert mode.seen.count("cutekernels._gemm.default") == 1
    assert a.grad is not None
    assert b.grad is None


# ---- tracing --------------------------------------------------------------------------------------------


def test_dispatch_modes_see_the_ops() -> None:
    a, b = randn(3, 4), randn(4, 5)
    out = torch.empty(3, 5)
    with Recording() as mode:
        ck.gemm(a, b)
        ck.gemm(a, b, out=out)
    assert mode.seen == ["cutekernels._gemm.default", "cutekernels.gemm_out.default"]


def test_opcheck() -> None:
    gemm, gemm_out = torch.ops.cutekernels.gemm.default, torch.ops.cutekernels.gemm_out.default
    a, b, c, bias = leaves((3, 4), (4, 5), (3, 5), (5,))
    torch.library.opcheck(gemm, (a, b, c, bias, 1.5, 0.5, "silu", "fp32"))
    torch.library.opcheck(gemm, (a, b.detach().t().contiguous().t(), None, None))
    for x, y in (((2, 3, 4), (2, 4, 5)), ((2, 3, 4), (4, 5)), ((3, 4), (2, 4, 5))):
        torch.library.opcheck(gemm, (*leaves(x, y), None, bias.detach(), 1.0, 0.0, "relu"))
    for out in (torch.empty(3, 5, dtype=torch.float64), torch.empty(5, 3, dtype=torch.float64).t()):
        plain = (a.detach(), b.detach(), None, bias.detach())
        torch.library.opcheck(gemm_out, (*plain, out, 1.0, 0.0, "gelu"))


def test_fakes_have_the_real_result_s_shape_type_and_strides() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    for dtype in (torch.bfloat16, torch.float16):
        for x, y in (((3, 4), (4, 5)), ((2, 3, 4), (4, 5)), ((3, 4), (2, 4, 5)), ((0, 4), (4, 5)), ((3, 0), (0, 5))):
            a, b = randn(*x, dtype=dtype), randn(*y, dtype=dtype)
            for left, right in ((a, b), (a.mT.contiguous().mT, b.mT.contiguous().mT)):
                real = ck.gemm(left, right)
                meta = ck.gemm(left.to("meta"), right.to("meta"))
                with FakeTensorMode() as mode:
                    fake = ck.gemm(mode.from_tensor(left), mode.from_tensor(right))
                for traced in (meta, fake):
                    assert (traced.shape, traced.dtype, traced.stride()) == (real.shape, real.dtype, real.stride())
    a = torch.empty(3, 4, device="meta", dtype=torch.bfloat16)
    with pytest.raises(UnsupportedProblem, match=r"out must be \(3, 3\)"):
        ck.gemm(a, a.t(), out=torch.empty(3, 4, device="meta", dtype=torch.bfloat16))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compile_without_a_graph_break(backend: str) -> None:
    def block(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
        h = ck.linear(x * 2, w, bias, activation="silu")
        return ck.gemm(h.flatten(0, 1), w, alpha=0.5) + 1

    def into(x: Tensor, w: Tensor, out: Tensor) -> Tensor:
        ck.linear(x * 2, w, out=out)
        return out + 1

    compiled = torch.compile(block, fullgraph=True, backend=backend)
    w, bias = randn(5, 8), randn(5)
    for rows in (3, 4, 5):  # the second shape recompiles with a symbolic extent
        x = randn(2, rows, 8)
        torch.testing.assert_close(compiled(x, w, bias), block(x, w, bias))
    x, w = randn(2, 3, 8).requires_grad_(), w.requires_grad_()
    ours = torch.autograd.grad(compiled(x, w, bias).sum(), (x, w))
    theirs = torch.autograd.grad(block(x, w, bias).sum(), (x, w))
    torch.testing.assert_close(ours, theirs)
    with torch.no_grad():
        out, expected = torch.empty(2, 3, 5), torch.empty(2, 3, 5)
        result = torch.compile(into, fullgraph=True, backend=backend)(x, w, out)
        torch.testing.assert_close(result, into(x, w, expected))
        torch.testing.assert_close(out, expected)


def test_functorch_maps_and_differentiates() -> None:
    a, b = randn(3, 4, 8), randn(3, 8, 5)
    torch.testing.assert_close(torch.func.vmap(ck.gemm)(a, b), a @ b)
    torch.testing.assert_close(torch.func.vmap(ck.linear, in_dims=(0, None))(a, b[0].t()), a @ b[0])
    wanted = torch.func.grad(lambda x: ((x @ b[0]) ** 2).sum())(a[0])
    torch.testing.assert_close(torch.func.grad(lambda x: (ck.gemm(x, b[0]) ** 2).sum())(a[0]), wanted)
    with pytest.raises(Exception, match="gemm has no gradient by torch.func .* within a graph"):  # torch wraps ours
        torch.compile(torch.func.grad(lambda x: ck.gemm(x, b[0]).sum()), backend="aot_eager")(a[0])


@pytest.mark.filterwarnings("ignore::UserWarning")  # nested tensors are a prototype
def test_linear_refuses_batches_that_are_not_dense() -> None:
    x, w = randn(2, 3, 8), randn(5, 8)
    for bad in (x.to_sparse(), torch.nested.nested_tensor(list(x))):
        with pytest.raises(UnsupportedProblem, match="linear takes x as a dense tensor"):
            ck.linear(bad, w)


@pytest.mark.parametrize("shape", [(2, 3, 8), (8,)])
@pytest.mark.parametrize("backend", [None, "aot_eager"])
def test_results_of_linear_may_be_modified_in_place(shape: tuple[int, ...], backend: str | None) -> None:
    def changed(x: Tensor, w: Tensor) -> Tensor:
        y = ck.linear(x, w)
        y += 1
        return y * y

    function: Any = changed if backend is None else torch.compile(changed, backend=backend, fullgraph=True)
    x, w = randn(*shape), randn(4, 8).requires_grad_()
    wanted = torch.autograd.grad((torch.nn.functional.linear(x, w) + 1).square().sum(), w)
    torch.testing.assert_close(torch.autograd.grad(function(x, w).sum(), w), wanted)


@pytest.mark.parametrize(("k", "n"), [(0, 4), (8, 0)])
def test_linear_without_elements_has_gradients(k: int, n: int) -> None:
    x, w = randn(2, 3, k).requires_grad_(), randn(n, k).requires_grad_()
    y = ck.linear(x, w)
    assert (y.shape, y.sum().item()) == ((2, 3, n), 0)
    dx, dw = torch.autograd.grad(y.sum(), (x, w))
    assert (dx.shape, dw.shape, dx.abs().sum().item(), dw.abs().sum().item()) == (x.shape, w.shape, 0, 0)
    assert torch.compile(ck.linear, backend="aot_eager")(x.detach(), w.detach()).shape == (2, 3, n)
