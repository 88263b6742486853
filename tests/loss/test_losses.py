"""``linear_cross_entropy`` and ``linear_logprob`` on the CPU: values, gradients, refusals, graphs."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.flop_counter import FlopCounterMode

import cutekernels as ck
from cutekernels.errors import UnsupportedProblem
from cutekernels.ops.loss import products
from cutekernels.ops.loss.products import blocks, chunks
from tests.loss.cases import LOGITS, LOSSES, cross_entropy, extreme_loss, logits_of, logprob
from tests.refusals import Calls, refused


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several chunks and blocks for a few tokens: three times 8, of 256 classes."""
    monkeypatch.setattr(products, "MOST_ROWS", 8)
    monkeypatch.setattr(products, "_ROWS", 8)
    monkeypatch.setattr(products, "MOST_BYTES", 8 * 256 * 8)


def operands(rows: int = 21, classes: int = 523, k: int = 12, dtype: torch.dtype = torch.float64) -> tuple[Tensor, ...]:
    torch.manual_seed(rows + classes)
    x = torch.randn(rows, k, dtype=dtype, requires_grad=True)
    weight = torch.randn(classes, k, dtype=dtype, requires_grad=True)
    bias = torch.randn(classes, dtype=dtype, requires_grad=True)
    targets = torch.randint(0, classes, (rows,))
    targets[1::4] = -100
    return x, weight, bias, targets


def gradients(value: Any, inputs: tuple[Tensor, ...], upstream: Any) -> tuple[Tensor, ...]:
    return torch.autograd.grad(value, inputs, upstream)


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "sum": {"reduction": "sum"},
    "none": {"reduction": "none"},
    "smoothed": {"label_smoothing": 0.1},
    "z-loss": {"z_loss": 0.02},
    "capped": {"softcap": 3.0, "temperature": 0.7},
    "weighted": {"weighted": True},
    "items": {"num_items_in_batch": 50, "z_loss": 0.01},
    "everything": {"weighted": True, "label_smoothing": 0.2, "z_loss": 0.01, "softcap": 5.0, "temperature": 1.3},
    "everything, summed": {"weighted": True, "label_smoothing": 0.2, "z_loss": 0.01, "reduction": "sum"},
    "everything, each": {"weighted": True, "label_smoothing": 0.2, "z_loss": 0.01, "softcap": 5.0, "reduction": "none"},
}


@pytest.mark.parametrize("classes", [1, 17, 523])
@pytest.mark.parametrize("name", OPTIONS)
def test_cross_entropy_is_torchs(name: str, classes: int) -> None:
    x, weight, bias, targets = operands(classes=classes)
    given = dict(OPTIONS[name])
    class_weight = torch.rand(classes, dtype=x.dtype) + 0.5 if given.pop("weighted", False) else None
    shaped = {key: given.pop(key) for key in ("softcap", "temperature") if key in given}
    loss = ck.linear_cross_entropy(x, weight, targets, bias, class_weight=class_weight, **given, **shaped)
    exact = cross_entropy(logits_of(x, weight, bias, **shaped), targets, class_weight=class_weight, **given)
    assert torch.allclose(loss, exact, rtol=1e-12)
    upstream = torch.randn_like(exact)
    found, expected = (gradients(value, (x, weight, bias), upstream) for value in (loss, exact))
    assert all(torch.allclose(a, b, rtol=1e-9, atol=1e-11) for a, b in zip(found, expected, strict=True))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", ["plain", "items", "everything", "everything, summed"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16], ids=str)
def test_in_a_graph_it_is_what_it_is_outside(name: str, dtype: torch.dtype) -> None:
    torch.compiler.reset()
    x, weight, bias, targets = operands()
    x, weight, bias = (t.detach().to(dtype).requires_grad_() for t in (x, weight, bias))
    given = dict(OPTIONS[name])
    class_weight = torch.rand(len(weight)).to(dtype) + 0.5 if given.pop("weighted", False) else None
    graph = torch.compile(ck.linear_cross_entropy, backend="aot_eager", fullgraph=True)
    both = [f(x, weight, targets, bias, class_weight=class_weight, **given) for f in (graph, ck.linear_cross_entropy)]
    torch.testing.assert_close(*both, rtol=1e-6 if dtype == torch.float16 else 1e-12, atol=0.0)
    found, expected = (gradients(value, (x, weight, bias), torch.full_like(value, 0.3)) for value in both)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b)


def test_one_graph_takes_any_number_of_rows() -> None:
    torch.compiler.reset()
    x, weight, bias, targets = operands()
    counted = CompileCounterWithBackend("aot_eager")
    graph = torch.compile(ck.linear_cross_entropy, backend=counted, fullgraph=True, dynamic=True)
    for rows in range(5, 10):
        loss = graph(x[:rows].detach().requires_grad_(), weight, targets[:rows], bias)
        torch.testing.assert_close(loss, ck.linear_cross_entropy(x[:rows], weight, targets[:rows], bias))
    assert counted.frame_count <= 2, "one where an extent is another one's too"


@pytest.mark.parametrize("shaped", [{}, {"softcap": 4.0, "temperature": 0.6}], ids=str)
def test_logprob_takes_any_upstream_gradient(shaped: dict[str, float]) -> None:
    x, weight, bias, targets = operands()
    made = ck.linear_logprob(x, weight, targets, bias=bias, entropy=True, **shaped)
    exact = logprob(logits_of(x, weight, bias, **shaped), targets)
    alone = ck.linear_logprob(x, weight, targets, bias=bias, **shaped)
    assert torch.equal(alone, made.logp)
    assert all(torch.allclose(a, b, rtol=1e-12) for a, b in zip(made, exact, strict=True))
    upstream = [torch.randn(len(x), dtype=x.dtype) for _ in made]
    upstream[0][::3] = 0
    found, expected = (gradients(values, (x, weight, bias), upstream) for values in (made, exact))
    assert all(torch.allclose(a, b, rtol=1e-9, atol=1e-11) for a, b in zip(found, expected, strict=True))


def test_a_sharded_vocabulary_adds_up() -> None:
    x, weight, bias, targets = operands()
    parts = [
        ck.linear_logprob_shard(x, weight[a:b], targets, first=a, bias=bias[a:b]) for a, b in ((0, 200), (200, 523))
    ]
    lses = torch.stack([part.lse for part in parts])
    lse = lses.logsumexp(0)
    logp = sum(part.target_logit for part in parts) - lse
    entropy = lse - sum(torch.exp(part.lse - lse) * part.mean_logit for part in parts)
    counted = targets != -100
    exact = logprob(logits_of(x, weight, bias), targets)
    assert torch.allclose(logp[counted], exact[0][counted], rtol=1e-12)
    assert torch.allclose(entropy[counted], exact[2][counted], rtol=1e-12)
    upstream = torch.randn_like(logp) * counted
    both = [(logp, entropy), (exact[0], exact[2])]
    found, expected = (gradients(values, (x, weight, bias), [upstream, upstream]) for values in both)
    assert all(torch.allclose(a, b, rtol=1e-9, atol=1e-11) for a, b in zip(found, expected, strict=True))


def test_gradcheck() -> None:
    x, weight, bias, targets = operands(5, 7, 3)
    for function in (
        lambda x, w, b: ck.linear_logprob(x, w, targets, bias=b, temperature=0.8, softcap=3.0, entropy=True),
        lambda x, w, b: ck.linear_cross_entropy(x, w, targets, b, reduction="none", label_smoothing=0.1, z_loss=0.1),
    ):
        assert torch.autograd.gradcheck(function, (x, weight, bias))
    with pytest.raises((UnsupportedProblem, RuntimeError), match="second|no gradient|differentiable|once"):
        (dx,) = torch.autograd.grad(ck.linear_logprob(x, weight, targets).sum(), x, create_graph=True)
        dx.sum().backward()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_half_types_are_as_exact_as_torch(dtype: torch.dtype) -> None:
    x, weight, bias, targets = (t.detach().to(dtype) if t.is_floating_point() else t for t in operands())
    inputs = [t.requires_grad_() for t in (x, weight, bias)]
    wide = [t.detach().double().requires_grad_() for t in inputs]
    loss = ck.linear_cross_entropy(x, weight, targets, bias)
    assert loss.dtype == torch.float32
    exact = cross_entropy(logits_of(*wide), targets)
    # One rounding of each logit and one of each product.
    assert torch.allclose(loss.double(), exact, rtol=4 * torch.finfo(dtype).eps)
    loss.backward()
    exact.backward()
    for mine, true in zip(inputs, wide, strict=True):
        assert mine.grad is not None
        assert true.grad is not None
        assert mine.grad.dtype == dtype
        assert (mine.grad.double() - true.grad).norm() <= 8 * torch.finfo(dtype).eps * true.grad.norm()


def test_pieces_cover_everything_once() -> None:
    for rows in (0, 1, 7, 8, 9, 40, 41):
        found = list(chunks(rows))
        assert [i for a, b in found for i in range(a, b)] == list(range(rows))
        assert all(b - a <= 8 for a, b in found)
    for classes in (1, 7, 8, 255, 256, 257, 1000, 5003):
        found = blocks(classes, 8, 8)
        assert [i for a, b in found for i in range(a, b)] == list(range(classes))
        assert all((b - a) * 8 * 8 <= products.MOST_BYTES for a, b in found)
        assert all((b - a) % 8 == 0 for a, b in found[:-1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("loss", LOSSES)
def test_extreme_logits(loss: str, dtype: torch.dtype) -> None:
    """ln V of equal logits near 1e30, say, as torch has it: a log-sum-exp there has no digits for it."""
    ratios = {logits: extreme_loss(logits, loss, dtype) for logits in LOGITS}
    assert {logits: ratio for logits, ratio in ratios.items() if not ratio <= 1} == {}


def test_bias_by_place_and_by_name() -> None:
    x, weight, bias, targets = operands()
    for loss, more in (
        (ck.linear_cross_entropy, {}),
        (ck.linear_logprob, {}),
        (ck.linear_logprob_shard, {"first": 0}),
    ):
        found: Any = [loss(x, weight, targets, bias, **more), loss(x, weight, targets, bias=bias, **more)]  # type: ignore[operator]
        one, other = (made[1] if isinstance(made, tuple) else made for made in found)
        assert torch.equal(one, other)


def test_nobody_counts_and_nothing_is_there() -> None:
    x, weight, bias, targets = operands()
    targets.fill_(-100)
    loss = ck.linear_cross_entropy(x, weight, targets, bias)
    assert loss.isnan()  # as torch's
    loss.backward()
    assert not any(t.grad.any() for t in (x, weight, bias))
    assert ck.linear_cross_entropy(x, weight, targets, reduction="sum") == 0
    assert not ck.linear_logprob(x, weight, targets).any()
    for reduction in ("sum", "none"):
        empty = ck.linear_cross_entropy(x[:0], weight, targets[:0], reduction=reduction)
        weight.grad = None
        empty.sum().backward()
        assert not weight.grad.any()
    assert ck.linear_logprob(x[:0].view(0, 1, 12), weight, targets[:0].view(0, 1)).shape == (0, 1)


def test_leading_dimensions_and_other_ignored_targets() -> None:
    x, weight, _, targets = operands(24)
    shaped = ck.linear_cross_entropy(x.view(2, 3, 4, 12), weight, targets.view(2, 3, 4), reduction="none")
    assert torch.equal(shaped.view(-1), ck.linear_cross_entropy(x, weight, targets, reduction="none"))
    other = torch.where(targets == -100, 3, targets)
    expected = cross_entropy(logits_of(x, weight), other, ignore_index=3)
    assert torch.allclose(ck.linear_cross_entropy(x, weight, other.int(), ignore_index=3), expected)


def test_only_what_is_wanted_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight, bias, targets = operands()
    count = 0
    whole = products.gemm

    def counted(*args: Any, **kwargs: Any) -> Tensor:
        nonlocal count
        count += 1
        return whole(*args, **kwargs)

    monkeypatch.setattr(products, "gemm", counted)
    pieces = sum(len(blocks(len(weight), b - a, 8)) for a, b in chunks(len(x)))
    for wanted, each in (((), 1), ((x,), 2), ((weight,), 2), ((bias,), 1), ((x, weight, bias), 3)):
        count = 0
        given = [t if any(t is w for w in wanted) else t.detach() for t in (x, weight, bias)]
        loss = ck.linear_cross_entropy(given[0], given[1], targets, given[2])
        assert loss.requires_grad == bool(wanted)
        assert count == each * pieces
    with torch.no_grad():
        assert not ck.linear_cross_entropy(x, weight, targets).requires_grad


def test_the_mean_runs_backward_once_and_gives_its_memory_away() -> None:
    x, weight, _, targets = operands()
    loss = ck.linear_cross_entropy(x, weight, targets)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="reduction='none'"):
        loss.backward()
    again = ck.linear_cross_entropy(x, weight, targets, reduction="none").sum()
    again.backward(retain_graph=True)
    again.backward()


def test_weights_gradient_in_fp32() -> None:
    x, weight, _, targets = (t.detach().bfloat16() if t.is_floating_point() else t for t in operands(400, 40))
    weight.requires_grad_()
    wide = weight.detach().double().requires_grad_()
    cross_entropy(logits_of(x.double(), wide), targets).backward()
    errors = []
    for kind in (None, torch.float32):
        weight.grad = None
        ck.linear_cross_entropy(x, weight, targets, accumulate=kind).backward()
        assert weight.grad.dtype == torch.bfloat16
        errors.append((weight.grad.double() - wide.grad).norm() / wide.grad.norm())
    assert errors[1] < 0.8 * errors[0]  # fifty chunks


@refused
def test_refusals_say_the_rule() -> Calls:
    x, weight, bias, targets = (t.detach() for t in operands(4, 9, 3))
    loss, logp = ck.linear_cross_entropy, ck.linear_logprob
    return {
        "targets from 0 to 8": lambda: loss(x, weight, torch.tensor([0, 9, 1, 1])),
        "target 1 is -3": lambda: logp(x, weight, torch.tensor([0, -3, 1, 1])),
        "int64 or int32": lambda: loss(x, weight, targets.double()),
        "a target for each row": lambda: loss(x, weight, targets[:3]),
        r"x \(..., K\) and weight \(V, K\)": lambda: loss(x, weight.t(), targets),
        "one class at least": lambda: loss(x, weight[:0], targets),
        "weight in x's type": lambda: loss(x, weight.float(), targets),
        "bias as": lambda: loss(x, weight, targets, bias[:4]),
        "bias in x's type": lambda: loss(x, weight, targets, bias.half()),
        "mean, sum or none": lambda: loss(x, weight, targets, reduction="average"),
        "label_smoothing as": lambda: loss(x, weight, targets, label_smoothing=1.5),
        "softcap as": lambda: loss(x, weight, targets, softcap=0.0),
        "temperature as": lambda: logp(x, weight, targets, temperature=0),
        "ignore_index as": lambda: logp(x, weight, targets, ignore_index=None),
        "class_weight as": lambda: loss(x, weight, targets, class_weight=torch.ones(3)),
        "no gradient with respect to class_weight": lambda: loss(
            x, weight, targets, class_weight=torch.ones(9, requires_grad=True)
        ),
        "accumulate as": lambda: loss(x, weight, targets, accumulate=torch.int8),
        "accumulate with reduction mean or sum": lambda: loss(
            x.bfloat16(), weight.bfloat16(), targets, accumulate=torch.float32, reduction="none"
        ),
        "for reduction='mean' alone": lambda: loss(x, weight, targets, reduction="sum", num_items_in_batch=3),
        "num_items_in_batch as one number": lambda: loss(x, weight, targets, num_items_in_batch=torch.ones(2)),
        "first as": lambda: ck.linear_logprob_shard(x, weight, targets, first=-1),
        "one device": lambda: loss(x, weight, targets.to("meta")),
    }


def test_gradients_of_each_sample() -> None:
    """Targets that torch.func maps over have no values to look at."""
    x, weight, targets = torch.randn(6, 8), torch.randn(10, 8), torch.arange(6)

    def of_one(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda w, row, target: function(row[None], w, target[None])

    ours, theirs = [
        torch.func.vmap(torch.func.grad(of_one(f)), in_dims=(None, 0, 0))(weight, x, targets)
        for f in (ck.linear_cross_entropy, lambda row, w, t: F.cross_entropy(row @ w.T, t))
    ]
    torch.testing.assert_close(ours, theirs)


def test_a_bias_of_fp32_beside_fp64() -> None:
    x, weight, bias, targets = operands(9, 20, 4, torch.float64)
    narrow = bias.detach().float().requires_grad_()
    ck.linear_cross_entropy(x, weight, targets, narrow).backward()
    (expected,) = torch.autograd.grad(ck.linear_cross_entropy(x, weight, targets, bias), bias)
    torch.testing.assert_close(narrow.grad, expected.float(), atol=1e-5, rtol=1e-4)


# ---- torch.library, graphs ------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_opcheck() -> None:
    x, weight, bias, targets = operands(9, 20, 4, torch.float32)
    ops, checked = torch.ops.cutekernels, torch.library.opcheck
    sums = (0, -100, 0.0, 1.0, True, False, False)
    checked(ops.linear_logprob.default, (x, weight, targets, bias, None, *sums))
    options = (True, -100, 0.1, 0.01, 0.0, 1.0, False, True, True, True)
    utils = ("test_schema", "test_faketensor")  # its gradients are handed out once
    checked(ops.linear_cross_entropy.default, (x, weight, targets, bias, None, None, *options), test_utils=utils)


def test_autocast_and_checkpointing() -> None:
    x, weight, bias, targets = (t.detach().float() if t.is_floating_point() else t for t in operands())
    for t in (x, weight, bias):
        t.requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        loss = ck.linear_cross_entropy(x, weight, targets, bias)
    loss.backward()
    assert weight.grad.dtype == torch.float32
    lowered = ck.linear_cross_entropy(x.bfloat16(), weight.bfloat16(), targets, bias)
    assert torch.equal(loss, lowered)
    function = torch.utils.checkpoint.checkpoint
    again = function(ck.linear_cross_entropy, x, weight, targets, use_reentrant=False)
    once = ck.linear_cross_entropy(x, weight, targets)
    assert torch.equal(*[torch.autograd.grad(value, weight)[0] for value in (again, once)])


def test_the_module_holds_the_weight() -> None:
    x, weight, bias, targets = operands()
    module = ck.nn.LinearCrossEntropy(
        12, 523, bias=True, dtype=x.dtype, softcap=3.0, temperature=0.7, label_smoothing=0.1
    )
    module.load_state_dict({"weight": weight, "bias": bias})
    loss = module(x, targets)
    exact = cross_entropy(logits_of(x, module.weight, module.bias, 3.0, 0.7), targets, label_smoothing=0.1)
    assert torch.allclose(loss, exact)
    assert torch.allclose(module.logits(x), logits_of(x, weight, bias, 3.0, 0.7))
    loss.backward()
    assert module.weight.grad is not None
    assert module.bias.grad is not None


def test_few_tokens_that_count_do_not_overflow_fp16() -> None:
    torch.manual_seed(3)
    x, weight = (
        torch.randn(4096, 16).mul_(4).half().requires_grad_(),
        torch.randn(40, 16).mul_(0.02).half().requires_grad_(),
    )
    targets = torch.full((4096,), -100)
    targets[:4] = 5
    ck.linear_cross_entropy(x, weight, targets).backward()
    wide = weight.detach().double().requires_grad_()
    cross_entropy(logits_of(x.detach().double(), wide), targets).backward()
    assert torch.allclose(weight.grad.double(), wide.grad, rtol=0.01, atol=0.01)


def test_second_derivatives_of_a_mean_are_refused() -> None:
    x, weight, _, targets = operands()
    for mode in (nullcontext(), FlopCounterMode(display=False)):  # torch steps in between, and nothing is in place
        with mode, pytest.raises(UnsupportedProblem, match="second derivative"):
            torch.autograd.grad(ck.linear_cross_entropy(x, weight, targets), x, create_graph=True)


def test_torch_func_pulls_back_once() -> None:
    x, weight, _, targets = (t.detach() for t in operands())

    def of(x: Tensor) -> Tensor:
        return ck.linear_cross_entropy(x, weight, targets)

    loss, pull = torch.func.vjp(of, x)
    exact = torch.func.grad(lambda x: F.cross_entropy(x @ weight.T, targets))(x)
    torch.testing.assert_close(pull(2 * torch.ones_like(loss))[0], 2 * exact)
    with pytest.raises(UnsupportedProblem, match="has no gradient"):
        torch.func.grad(lambda x: torch.func.grad(of)(x).sum())(x)


def test_accumulation_in_fp32_holds_under_autocast() -> None:
    x, weight, _, targets = (t.detach().float() if t.is_floating_point() else t for t in operands(400, 40))
    weight.requires_grad_()
    exact = torch.autograd.grad(cross_entropy(logits_of(x.double(), weight.double()), targets), weight)[0]
    errors = []
    for kind in (None, torch.float32):
        with torch.autocast("cpu", torch.bfloat16):
            loss = ck.linear_cross_entropy(x, weight, targets, accumulate=kind)
        errors.append((torch.autograd.grad(loss, weight)[0].double() - exact).norm())
    assert errors[1] < 0.9 * errors[0]
