"""AdamW on a GPU: numerics against fp64, awkward memory, streams, graphs, and the optimizer beside torch's."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from cutekernels import adamw_step
from cutekernels.errors import InvalidConfig, UnsupportedProblem
from cutekernels.ops.optimizer.op import ADAMW_STEP, AdamWProblem
from cutekernels.optim import FusedAdamW
from tests.on_gpu import computed, drawn, needs_memory, traced
from tests.optimizer.cases import SETTINGS, operands, truth, worst

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("one_seed")]

AWKWARD = [
    "elements=1", "elements=7 dtype=bf16 align=2", "elements=131073 dtype=fp16 master=1 grad=fp32 rate=device",
    "elements=131073 dtype=bf16 moments=bf16", "elements=131073 moments=bf16 align=4",
    "elements=131073 dtype=fp16 moments=fp16 align=2 master=1",
]  # fmt: skip


@pytest.mark.parametrize("text", [*ADAMW_STEP.suite, *AWKWARD])
def test_every_suite_with_default_and_random_configs(text: str) -> None:
    problem = AdamWProblem.parse(text)
    args = ADAMW_STEP.sample(problem, "cuda", 11)
    start = args[0] if args[4] is None else args[4]
    settings: dict[str, Any] = {"lr": 0.01, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}
    exact = truth(start, *args[1:4], 3, maximize=problem.maximize, **settings)
    for config in drawn(ADAMW_STEP, problem, 4, text):
        results = computed(ADAMW_STEP, problem, config, args)
        ratio = worst(results, exact)
        assert ratio <= 1, f"[{problem}] [{config}] is off by {ratio:.3g} tolerances"


@pytest.mark.parametrize("step", [1, 2, 1000, 100000])
@pytest.mark.parametrize("on_device", [False, True])
def test_every_step_counts(step: int, on_device: bool) -> None:
    param, grad, exp_avg, exp_avg_sq, _ = operands(5000, "fp32", device="cuda")
    exact = truth(param, grad, exp_avg, exp_avg_sq, step, **SETTINGS)
    count = torch.tensor(float(step), device="cuda") if on_device else step
    rate = torch.tensor(SETTINGS["lr"], device="cuda") if on_device else SETTINGS["lr"]
    before = param._version
    adamw_step(param, grad, exp_avg, exp_avg_sq, step=count, **SETTINGS | {"lr": rate})
    assert worst((param, exp_avg, exp_avg_sq), exact) <= 1
    assert param._version > before


def test_any_strides() -> None:
    for lay in (
        lambda t: t.view(12, 25),
        lambda t: t.view(12, 25).t(),
        lambda t: t[::2],
        lambda t: t[1:],
        lambda t: t[:0],
    ):
        given = [lay(t) for t in operands(300, "fp32", device="cuda") if t is not None]
        given[1] = given[1].clone().contiguous()
        exact = truth(*given, 2, **SETTINGS)
        adamw_step(*given, step=2, **SETTINGS)
        assert worst((given[0], *given[2:]), exact) <= 1


def test_refusals() -> None:
    param, grad, exp_avg, exp_avg_sq, _ = operands(300, "fp32", device="cuda")
    with pytest.raises(UnsupportedProblem, match="one device"):
        adamw_step(param, grad.cpu(), exp_avg, exp_avg_sq, step=1)
    with pytest.raises(UnsupportedProblem, match="takes float32, bfloat16, float16; got torch.float64"):
        adamw_step(*(t.double() for t in (param, grad, exp_avg, exp_avg_sq)), step=1)
    with pytest.raises(UnsupportedProblem, match="overlaps an operand"):
        adamw_step(param[:-1], grad[1:], param[1:], exp_avg_sq[1:], step=1)
    with pytest.raises(InvalidConfig, match="at most 16 elements"):
        adamw_step(param, grad, exp_avg, exp_avg_sq, step=1, config="block=4096 warps=1 evict=normal")


@pytest.mark.slow
def test_more_than_two_billion_elements() -> None:
    needs_memory(40)
    n = (1 << 31) + 5001
    param, grad, exp_avg, exp_avg_sq = (torch.randn(n, device="cuda") for _ in range(4))
    exp_avg_sq.square_()
    parts = (slice(0, 1000), slice((1 << 31) - 1000, (1 << 31) + 1000), slice(n - 1000, n))
    exact = [truth(param[s], grad[s], exp_avg[s], exp_avg_sq[s], 2, **SETTINGS) for s in parts]
    adamw_step(param, grad, exp_avg, exp_avg_sq, step=2, **SETTINGS)
    for s, e in zip(parts, exact, strict=True):
        assert worst((param[s], exp_avg[s], exp_avg_sq[s]), e) <= 1


def test_runs_on_the_current_stream() -> None:
    param, grad, exp_avg, exp_avg_sq, _ = operands(1 << 20, "fp32", device="cuda")
    late = grad.clone()
    exact = truth(param, grad, exp_avg, exp_avg_sq, 2, **SETTINGS)
    adamw_step(*(t.clone() for t in (param, grad, exp_avg, exp_avg_sq)), step=2, **SETTINGS)
    grad.zero_()
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)
        grad.copy_(late)
        adamw_step(param, grad, exp_avg, exp_avg_sq, step=2, **SETTINGS)
    side.synchronize()
    assert worst((param, exp_avg, exp_avg_sq), exact) <= 1


@traced
def test_compiled_whole() -> None:
    @torch.compile(fullgraph=True)
    def update(p: Tensor, g: Tensor, m: Tensor, v: Tensor) -> Tensor:
        return adamw_step(p, g + 0, m, v, step=2, **SETTINGS) * 2

    p, g, m, v, _ = operands(5000, "fp32", device="cuda")
    exact = truth(p, g, m, v, 2, **SETTINGS)
    doubled = update(p, g, m, v)
    assert worst((p, m, v), exact) <= 1
    assert torch.equal(doubled, 2 * p)


# ---- the optimizer --------------------------------------------------------------------------------------

SHAPES = [(300, 70), (70,), (), (0, 4), (1000, 1000), (3, 5, 7, 9), (40_001,)]


def model(dtype: torch.dtype = torch.float32) -> list[torch.nn.Parameter]:
    torch.manual_seed(1)
    params = [torch.nn.Parameter(torch.randn(s, device="cuda").to(dtype)) for s in SHAPES]
    params.append(torch.nn.Parameter(torch.randn(50, 70, device="cuda").to(dtype).t()))
    params.append(torch.nn.Parameter(torch.randn(90, 40, device="cuda").to(dtype)[:, ::2]))
    params.append(torch.nn.Parameter(torch.randn(301, device="cuda").to(dtype)[1:]))
    return params


def grads(params: list[torch.nn.Parameter], seed: int, skip: int | None = None) -> None:
    draw = torch.Generator("cuda").manual_seed(seed)
    for i, p in enumerate(params):
        g = torch.randn(p.shape, generator=draw, device="cuda")
        p.grad = None if i == skip else g.to(p.dtype)


def network() -> torch.nn.Module:
    torch.manual_seed(2)
    return torch.nn.Sequential(torch.nn.Linear(40, 70), torch.nn.GELU(), torch.nn.Linear(70, 3)).cuda()


def close(ours: list[torch.nn.Parameter], theirs: list[torch.nn.Parameter]) -> None:
    for p, q in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p.detach().double(), q.detach().double(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("rate", [0.01, torch.tensor(0.01)], ids=["float", "tensor"])
def test_steps_as_torch_does(maximize: bool, rate: Any) -> None:
    ours, theirs = model(), model()
    lr = rate.cuda() if isinstance(rate, Tensor) else rate
    a = FusedAdamW(ours, lr=lr, weight_decay=0.1, maximize=maximize)
    b = torch.optim.AdamW(theirs, lr=0.01, weight_decay=0.1, maximize=maximize, foreach=False)
    for seed in range(6):
        for params, optimizer in ((ours, a), (theirs, b)):
            grads(params, seed, skip=seed if seed < 3 else None)
            optimizer.step()
    close(ours, theirs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_master_weights(dtype: torch.dtype) -> None:
    params = model(dtype)
    twins = [torch.nn.Parameter(p.detach().float()) for p in params]
    ours, theirs = FusedAdamW(params, lr=0.01, master_weights=True), torch.optim.AdamW(twins, lr=0.01, foreach=False)
    for seed in range(4):
        grads(params, seed)
        for p, q in zip(params, twins, strict=True):
            assert p.grad is not None
            q.grad = p.grad.float()
        ours.step()
        theirs.step()
    close([ours.state[p]["master"] for p in params], twins)
    for p in params:
        assert torch.equal(p.detach(), ours.state[p]["master"].to(dtype))
    again = [torch.nn.Parameter(p.detach().clone()) for p in params]
    loaded = FusedAdamW(again, lr=0.01, master_weights=True)
    loaded.load_state_dict(copy.deepcopy(ours.state_dict()))
    for found, optimizer in ((params, ours), (again, loaded)):
        grads(found, 9)
        optimizer.step()
    for p, q in zip(params, again, strict=True):
        assert torch.equal(p, q)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_replayed_from_a_graph() -> None:
    """A captured training step: gradients in the graph's memory, a learning rate and a step count that change."""
    ours, theirs = network(), network()
    lr = torch.tensor(0.01, device="cuda")
    a = FusedAdamW(ours.parameters(), lr=lr, capturable=True)
    b = torch.optim.AdamW(theirs.parameters(), lr=0.01, foreach=False)
    x, batches = torch.zeros(16, 40, device="cuda"), torch.randn(9, 16, 40, device="cuda")

    def eager(net: torch.nn.Module, optimizer: Any, batch: Tensor) -> None:
        optimizer.zero_grad(set_to_none=True)
        net(batch).square().mean().backward()
        optimizer.step()

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for i in range(3):
            x.copy_(batches[i])
            eager(ours, a, x)
            eager(theirs, b, batches[i])
    torch.cuda.current_stream().wait_stream(side)
    a.zero_grad(set_to_none=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ours(x).square().mean().backward()
        a.step()
    for i in range(3, 9):
        lr.fill_(0.01 / i)
        b.param_groups[0]["lr"] = 0.01 / i
        x.copy_(batches[i])
        graph.replay()
        eager(theirs, b, batches[i])
    torch.testing.assert_close(list(ours.parameters()), list(theirs.parameters()), rtol=1e-4, atol=1e-5)
    assert {float(s["step"]) for s in a.state.values()} == {9.0}
    # An eager step with other gradients goes on from there, and leaves the graph's table alone.
    eager(ours, a, batches[0])
    graph.replay()
    torch.cuda.synchronize()
    assert {float(s["step"]) for s in a.state.values()} == {11.0}


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_capture_needs_a_step_before() -> None:
    params = model()[:2]
    optimizer = FusedAdamW(params)
    grads(params, 1)
    with pytest.raises(UnsupportedProblem, match="run one step"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        optimizer.step()
    assert not optimizer.state
