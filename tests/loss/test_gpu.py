"""The losses on a GPU: against fp64 beside torch's own error, outliers, determinism, memory, graphs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import cutekernels as ck
from tests.loss.cases import LOGITS, LOSSES, cross_entropy, extreme_loss, logits_of, logprob

pytestmark = pytest.mark.gpu
DTYPES = (torch.bfloat16, torch.float16)


def operands(rows: int, classes: int, k: int, dtype: torch.dtype, spread: float = 2.0) -> tuple[Tensor, ...]:
    torch.manual_seed(rows + classes)
    x = torch.randn(rows, k, device="cuda", dtype=dtype)
    weight = (torch.randn(classes, k, device="cuda") * k**-0.5 * spread).to(dtype)
    bias = torch.randn(classes, device="cuda").to(dtype)
    targets = torch.randint(0, classes, (rows,), device="cuda")
    targets[1::7] = -100
    return x.requires_grad_(), weight.requires_grad_(), bias.requires_grad_(), targets


def error(found: Tensor, exact: Tensor) -> float:
    found, exact = found.detach().double(), exact.detach()
    return float((found - exact).norm() / exact.norm().clamp_min(1e-30))


def check(ours: Any, plain: Any, inputs: tuple[Tensor, ...], upstream: list[Tensor]) -> None:
    """Values and gradients of ``ours()`` are at most twice as wrong as those of ``plain(type)`` in x's type."""
    kind = inputs[0].dtype
    results = []
    for function in (ours, lambda: plain(kind), lambda: plain(torch.float64)):
        values = function()
        gradients = torch.autograd.grad(values, inputs, [g.to(v.dtype) for g, v in zip(upstream, values, strict=True)])
        results.append([*values, *gradients])
    least = 4 * torch.finfo(kind).eps / 2  # two roundings of its own
    for mine, theirs, exact in zip(*results, strict=True):
        assert error(mine, exact) <= max(2 * error(theirs, exact), least)


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "sum": {"reduction": "sum"},
    "none": {"reduction": "none"},
    "everything": {"weighted": True, "label_smoothing": 0.2, "z_loss": 0.01, "softcap": 5.0, "temperature": 1.3},
    "everything, each": {"weighted": True, "label_smoothing": 0.2, "z_loss": 0.01, "softcap": 5.0, "reduction": "none"},
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "classes", "k"), [(5, 17, 64), (300, 5003, 128), (70, 50257, 72), (4500, 4096, 136)])
@pytest.mark.parametrize("name", OPTIONS)
def test_cross_entropy(name: str, rows: int, classes: int, k: int, dtype: torch.dtype) -> None:
    x, weight, bias, targets = operands(rows, classes, k, dtype)
    given = dict(OPTIONS[name])
    class_weight = torch.rand(classes, device="cuda") + 0.5 if given.pop("weighted", False) else None
    shaped = {key: given.pop(key) for key in ("softcap", "temperature") if key in given}

    def plain(kind: torch.dtype) -> tuple[Tensor]:
        z = logits_of(x.to(kind), weight.to(kind), bias.to(kind))
        z = z if kind == torch.float64 else z.float()
        if "softcap" in shaped:
            z = shaped["softcap"] * torch.tanh(z / shaped["softcap"])
        z = z / shaped.get("temperature", 1.0)
        return (cross_entropy(z, targets, class_weight=class_weight, **given),)

    upstream = torch.randn(targets.shape if given.get("reduction") == "none" else (), device="cuda").abs() + 0.1
    check(
        lambda: (ck.linear_cross_entropy(x, weight, targets, bias, class_weight=class_weight, **given, **shaped),),
        plain,
        (x, weight, bias),
        [upstream],
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "classes", "k"), [(33, 151936, 64), (2500, 3001, 128)])
def test_logprob(rows: int, classes: int, k: int, dtype: torch.dtype) -> None:
    x, weight, bias, targets = operands(rows, classes, k, dtype)

    def plain(kind: torch.dtype) -> tuple[Tensor, ...]:
        z = logits_of(x.to(kind), weight.to(kind), bias.to(kind))
        return logprob((z if kind == torch.float64 else z.float()) / 0.7, targets)

    upstream = [torch.randn(rows, device="cuda") for _ in range(3)]
    upstream[0][::3] = 0
    check(
        lambda: ck.linear_logprob(x, weight, targets, bias=bias, temperature=0.7, entropy=True),
        plain,
        (x, weight, bias),
        upstream,
    )


def test_extreme_logits_and_targets_outside() -> None:
    x, weight, _, targets = operands(64, 1000, 64, torch.bfloat16, 2000.0)
    z = logits_of(x.double(), weight.double())
    loss = ck.linear_cross_entropy(x, weight, targets)
    exact = cross_entropy(z, targets)
    assert abs(loss.item() / exact.item() - 1) < 0.01
    loss.backward()
    assert x.grad.isfinite().all()
    assert weight.grad.isfinite().all()
    targets[3], targets[9] = 1000, -7
    each = ck.linear_logprob(x, weight, targets)
    assert each[[3, 9]].isnan().all()
    assert each.isnan().sum() == 2
    assert ck.linear_cross_entropy(x, weight, targets).isnan()


def test_small_gradients_of_fp16_do_not_vanish() -> None:
    x, weight, _, targets = operands(4096, 8192, 64, torch.float16, 0.2)
    loss = ck.linear_cross_entropy(x, weight, targets)
    (loss * 65536).backward()
    wide = [t.detach().double().requires_grad_() for t in (x, weight)]
    (cross_entropy(logits_of(*wide), targets) * 65536).backward()
    for mine, true in zip((x, weight), wide, strict=True):
        assert error(mine.grad, true.grad) < 0.01


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_the_same_bits_each_time_in_graphs_too(reduction: Any) -> None:
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):  # where autograd's own events may be captured
        x, weight, bias, targets = operands(3000, 40001, 256, torch.bfloat16)

        def step() -> tuple[Tensor, ...]:
            loss = ck.linear_cross_entropy(x, weight, targets, bias, reduction=reduction).sum()
            return loss, *torch.autograd.grad(loss, (x, weight, bias))

        first, second = step(), step()
        with torch.cuda.graph(graph, stream=stream):
            captured = step()
        graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(first, captured, strict=True))


def test_memory_is_that_of_the_gradients() -> None:
    x, weight, _, targets = operands(4096, 65536, 1024, torch.bfloat16)
    for _ in range(2):
        x.grad = weight.grad = None
        ck.linear_cross_entropy(x, weight, targets).backward()
    x.grad = weight.grad = None
    torch.cuda.synchronize()
    torch.cuda.memory._record_memory_history(max_entries=100_000)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    ck.linear_cross_entropy(x, weight, targets).backward()
    peak = torch.cuda.max_memory_allocated() - before
    trace = torch.cuda.memory._snapshot()["device_traces"][0]
    torch.cuda.memory._record_memory_history(enabled=None)
    assert peak - x.nbytes - weight.nbytes < 0.5e9
    sizes = [entry["size"] for entry in trace if entry["action"] == "alloc"]
    assert max(size for size in sizes if size not in (weight.nbytes, x.nbytes)) <= 64_000_000 + 512
    assert sizes.count(weight.nbytes) == 1  # the optimizer gets the memory that the forward wrote


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_compiled() -> None:
    x, weight, bias, targets = operands(600, 3000, 128, torch.bfloat16)
    compiled = torch.compile(ck.linear_cross_entropy, fullgraph=True)
    both = []
    for function in (compiled, ck.linear_cross_entropy):
        loss = function(x, weight, targets, bias)
        both.append((loss, *torch.autograd.grad(loss, (x, weight, bias))))
    assert all(error(a, b.double()) < 1e-2 for a, b in zip(*both, strict=True))


@pytest.mark.parametrize("loss", LOSSES)
def test_logits_near_the_ends_of_fp32(loss: str) -> None:
    with torch.device("cuda"):
        ratios = {logits: extreme_loss(logits, loss, torch.bfloat16) for logits in LOGITS}
    assert {logits: ratio for logits, ratio in ratios.items() if not ratio <= 4} == {}
