"""``FusedAdamW``'s plans: what they launch, what makes them anew, what a step costs the host. Kernels are stand-ins."""

from __future__ import annotations

import copy
import subprocess
import sys
import weakref
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from cutekernels.errors import UnsupportedProblem
from cutekernels.ops.optimizer.op import ADAMW_STEP
from cutekernels.ops.shared import calls
from cutekernels.optim import FusedAdamW
from cutekernels.optim import plan as plans
from tests.optimizer import host

OPTIONS: dict[str, Any] = {"lr": 0.01, "weight_decay": 0.1}


# ---- launches -------------------------------------------------------------------------------------------


def test_one_launch_for_each_kind(launches: list[tuple[int, ...]]) -> None:
    torch.manual_seed(4)
    plain = [torch.nn.Parameter(torch.randn(n)) for n in (5000, 3, 700)]
    half = [torch.nn.Parameter(torch.randn(n).bfloat16()) for n in (40, 2000)]
    awkward = [torch.nn.Parameter(torch.randn(31)[1:]), torch.nn.Parameter(torch.randn(9, 6)[:, ::2])]
    params = [*plain, *half, *awkward]
    twins = [torch.nn.Parameter(p.detach().float().clone(memory_format=torch.contiguous_format)) for p in params]
    ours = FusedAdamW(params, lr=0.01, master_weights=True)
    theirs = torch.optim.AdamW(twins, lr=0.01)
    for seed in range(4):
        draw = torch.Generator().manual_seed(seed)
        for p, q in zip(params, twins, strict=True):
            g = torch.randn(p.shape, generator=draw)
            p.grad = g.to(p.dtype)
            q.grad = p.grad.float()
        if seed == 2:
            params[0].grad = twins[0].grad = None
        ours.step()
        theirs.step()
    assert sorted(launches[:3]) == [(30,), (40, 2000), (5000, 3, 700)]
    assert (3, 700) in launches
    assert float(ours.state[params[0]]["step"]) == 3
    for p, q in zip(params, twins, strict=True):
        kept = ours.state[p].get("master", p)
        torch.testing.assert_close(kept.detach(), q.detach(), rtol=1e-5, atol=1e-6)
        assert torch.equal(p.detach(), kept.detach().to(p.dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_is_not_dense_is_updated_through_copies(
    dtype: torch.dtype, launches: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the kernel of one tensor, so that it has the bits of a dense parameter."""
    contiguous = []

    def launch(*args: Any) -> None:
        contiguous.append([t.is_contiguous() for t in args[:9] if t is not None])
        ADAMW_STEP.update(args[:4], args[4:], maximize=False)

    def launched(op: Any, inputs: Any, options: Any, scalars: Any, *, out: Any, in_place: bool) -> None:
        planned = calls.plan_call(op, inputs, out, options, len(scalars))
        assert planned.launch is not None and in_place
        planned.launch(*out, *inputs, *scalars)

    monkeypatch.setattr(calls.dispatch, "plan", lambda *args: SimpleNamespace(launch=launch))
    monkeypatch.setattr(plans, "call", launched)
    whole = torch.randn(9, 6).to(dtype)
    param, twin = torch.nn.Parameter(whole[:, ::2]), torch.nn.Parameter(whole[:, ::2].clone().contiguous())
    ours, other = (FusedAdamW([p], lr=0.01, master_weights=True, max_grad_norm=0.5) for p in (param, twin))
    for seed in range(3):
        g = torch.randn(9, 3, generator=torch.Generator().manual_seed(seed)).to(dtype)
        param.grad, twin.grad = g.clone(), g.clone()
        ours.step()
        other.step()
    assert contiguous == [[True] * (8 if dtype is torch.float32 else 9)] * 3
    torch.testing.assert_close(param, twin, rtol=1e-6, atol=1e-7)
    assert set(ours.state[param]) == set(other.state[twin])


def test_a_capture_needs_a_step_before(launches: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch) -> None:
    param = torch.nn.Parameter(torch.randn(50))
    optimizer = FusedAdamW([param], lr=torch.tensor(0.01))
    param.grad = torch.randn(50)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(UnsupportedProblem, match="run one step of these parameters before"):
        optimizer.step()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    optimizer.step()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    for _ in range(4):
        param.grad = torch.randn(50)
        optimizer.step()
    assert float(optimizer.state[param]["step"]) == 5
    with pytest.raises(UnsupportedProblem, match="of 4 steps at most"):
        optimizer.step()
    assert float(optimizer.state[param]["step"]) == 5


@pytest.mark.parametrize("kernels", [False, True])
def test_groups_are_checked_at_each_step(kernels: bool, request: pytest.FixtureRequest) -> None:
    if kernels:
        request.getfixturevalue("launches")
    params = [torch.nn.Parameter(torch.ones(8)) for _ in range(2)]
    optimizer = FusedAdamW([{"params": [p]} for p in params])
    for p in params:
        p.grad = torch.ones(8)
    for name, value, rule in (
        ("amsgrad", True, "takes amsgrad as False"),
        ("lr", -1.0, "lr as a finite number of at least 0"),
        ("betas", (0, 1), "below 1"),
    ):
        group = optimizer.param_groups[1]
        kept, group[name] = group[name], value
        with pytest.raises(UnsupportedProblem, match=rule):
            optimizer.step()
        group[name] = kept
    assert all(bool((p == 1).all()) for p in params)  # nor was the first group's
    group["lr"] = Fraction(1, 8)  # a number, if no float, as numpy.float32
    optimizer.step()
    assert not any(bool((p == 1).any()) for p in params)


# ---- what changes between steps -------------------------------------------------------------------------


class Pair:
    """Parameters trained by ours and by torch's, and how many plans ours has made."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **options: Any) -> None:
        torch.manual_seed(5)
        shapes = [(7, 5), (3,), (2, 3, 4), (11,), (4, 6)]
        self.ours = [torch.nn.Parameter(torch.randn(s)) for s in shapes]
        self.theirs = [torch.nn.Parameter(p.detach().clone()) for p in self.ours]
        groups = [[{"params": p[:2]}, {"params": p[2:], "lr": 0.03}] for p in (self.ours, self.theirs)]
        self.a, self.b = FusedAdamW(groups[0], **OPTIONS, **options), torch.optim.AdamW(groups[1], **OPTIONS)
        self.made = 0
        monkeypatch.setattr(plans, "operands", self._count(plans.operands))
        self.monkeypatch, self.seed = monkeypatch, 0

    def _count(self, real: Any) -> Any:
        def counted(*args: Any) -> Any:
            self.made += 1
            return real(*args)

        return counted

    def both(self) -> tuple[tuple[list[Any], Any], tuple[list[Any], Any]]:
        return (self.ours, self.a), (self.theirs, self.b)

    def step(self, *missing: int, lay: Callable[[Tensor], Tensor] = Tensor.clone) -> int:
        """One step with new gradients; returns how many parameters were planned anew."""
        self.seed += 1
        for params, _ in self.both():
            draw = torch.Generator().manual_seed(self.seed)
            for i, p in enumerate(params):
                g = torch.randn(p.shape, generator=draw).to(p.dtype)
                p.grad = None if i in missing else lay(g)
        made = self.made
        versions = [p._version for p in self.ours]
        for _, optimizer in self.both():
            optimizer.step()
        for i, (p, q) in enumerate(zip(self.ours, self.theirs, strict=True)):
            torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)
            assert (p._version > versions[i]) == (i not in missing)
        return self.made - made


@pytest.mark.usefixtures("launches")
def test_gradients_that_move_or_are_missing_keep_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair(monkeypatch)
    assert pair.step(3) == 4  # no state for one that never had a gradient
    assert pair.ours[3] not in pair.a.state
    assert pair.step() == 5
    alive = []
    for missing in ((), (0,), (1, 4), (2, 3, 4), (0, 1, 2, 3, 4), ()):
        assert pair.step(*missing) == 0
        alive += [p.grad for p in pair.ours]  # so that the next ones have other addresses
    pair.a.param_groups[0]["lr"] = pair.b.param_groups[0]["lr"] = 0.05
    assert pair.step() == 0
    assert pair.step(lay=lambda g: g.t().contiguous().t() if g.dim() == 2 else g.clone()) == 0  # lie otherwise: copied
    steps = [float(pair.a.state[p]["step"]) for p in pair.ours]
    assert steps == [float(pair.b.state[p]["step"]) for p in pair.theirs]


def _replace_data(pair: Pair) -> None:
    for params, _ in pair.both():
        params[0].data = params[0].data * 2


def _transpose_in_place(pair: Pair) -> None:
    for params, _ in pair.both():
        params[4].data = params[4].data.t().contiguous()
        params[4].grad = None  # of the old shape
    for params, optimizer in pair.both():
        optimizer.state.pop(params[4])


def _restride(pair: Pair) -> None:
    for params, _ in pair.both():
        params[0].data = params[0].data.t().contiguous().t()


def _offload(pair: Pair) -> None:
    for params, optimizer in pair.both():
        state = optimizer.state[params[2]]
        state["exp_avg"] = state["exp_avg"].clone()


def _offload_data(pair: Pair) -> None:
    for params, optimizer in pair.both():
        optimizer.state[params[2]]["exp_avg_sq"].data = optimizer.state[params[2]]["exp_avg_sq"].data.clone()


def _transpose_a_moment(pair: Pair) -> None:
    for params, optimizer in pair.both():
        state = optimizer.state[params[0]]
        state["exp_avg_sq"] = state["exp_avg_sq"].t().contiguous().t()


def _forget_one(pair: Pair) -> None:
    for params, optimizer in pair.both():
        optimizer.state.pop(params[1])


def _reload(pair: Pair) -> None:
    for _, optimizer in pair.both():
        saved = copy.deepcopy(optimizer.state_dict())
        saved["state"][0]["exp_avg"] += 1.0
        optimizer.load_state_dict(saved)


def _add_a_group(pair: Pair) -> None:
    for params, optimizer in pair.both():
        params.append(torch.nn.Parameter(torch.ones(6)))
        optimizer.add_param_group({"params": [params[-1]], "betas": (0.5, 0.9)})


def _another_parameter(pair: Pair) -> None:
    for params, optimizer in pair.both():
        params[1] = torch.nn.Parameter(torch.ones(3))
        optimizer.param_groups[0]["params"][1] = params[1]


def _maximize(pair: Pair) -> None:
    for _, optimizer in pair.both():
        optimizer.param_groups[1]["maximize"] = True


CHANGES = [
    _replace_data, _transpose_in_place, _restride, _offload, _offload_data, _transpose_a_moment, _forget_one, _reload,
    _add_a_group, _another_parameter, _maximize,
]  # fmt: skip


@pytest.mark.usefixtures("launches")
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_other_changes_make_a_new_plan(change: Callable[[Pair], None], monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair(monkeypatch)
    pair.step()
    assert pair.step() == 0
    change(pair)
    assert pair.step() > 0
    assert pair.step() == 0


@pytest.mark.usefixtures("launches")
def test_state_that_is_moved_away_is_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As trainers do who take the GPU's memory for something else between steps."""
    pair = Pair(monkeypatch)
    pair.step()
    state = pair.a.state[pair.ours[0]]
    gone = [weakref.ref(t) for t in state.values()]
    for name, t in state.items():
        state[name] = t.clone()
    del t
    assert [ref() for ref in gone] == [None] * 3
    state["note"] = "no tensor"
    assert pair.step() > 0
    assert pair.step() == 0


@pytest.mark.usefixtures("launches")
def test_state_of_parameters_without_gradients_may_be_anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair(monkeypatch)
    pair.step()
    state = pair.a.state[pair.ours[0]]
    kept = state["exp_avg"]
    state["exp_avg"] = kept.to("meta")
    pair.step(0)
    state["exp_avg"] = kept
    pair.step()
    assert pair.step() == 0


@pytest.mark.usefixtures("launches")
def test_a_gradient_that_loses_its_alignment_keeps_a_narrow_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair(monkeypatch)

    def skewed(g: Tensor) -> Tensor:
        return torch.cat((g.new_zeros(1), g.flatten()))[1:].view(g.shape)

    pair.step()
    assert pair.step(lay=skewed) == 5
    assert pair.step() == pair.step(lay=skewed) == 0


@pytest.mark.usefixtures("launches")
@pytest.mark.parametrize(
    ("spoil", "rule"),
    [
        (lambda p, s: setattr(p, "grad", p.grad.to_sparse()), "SparseAdam"),
        (lambda p, s: s.update(exp_avg=s["exp_avg"][:3]), "exp_avg is .* beside a parameter"),
        (lambda p, s: s.update(exp_avg=s["exp_avg"].to("meta")), "exp_avg is .* on meta beside a parameter .* on cpu"),
        (
            lambda p, s: s.update(exp_avg=s["exp_avg"].half()),
            "moments_dtype makes exp_avg torch.float32, and the state",
        ),
        (lambda p, s: s.update(step=s["step"].long()), "one number in fp32"),
        (lambda p, s: setattr(p.grad, "data", p.grad.data[:2]), "grad is .2, 5. on cpu beside a parameter .7, 5."),
    ],
)
def test_what_no_kernel_takes_is_refused_before_anything_is_updated(
    spoil: Any, rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = Pair(monkeypatch)
    pair.step()
    for p in pair.ours:
        p.grad = torch.ones_like(p)
    before = copy.deepcopy([p.detach() for p in pair.ours])
    spoil(pair.ours[0], pair.a.state[pair.ours[0]])
    with pytest.raises(UnsupportedProblem, match=rule):
        pair.a.step()
    assert all(torch.equal(p, q) for p, q in zip(pair.ours, before, strict=True))


def test_a_parameter_that_stands_twice_is_refused() -> None:
    param = torch.nn.Parameter(torch.ones(3))
    with pytest.warns(UserWarning, match="duplicate"):
        optimizer = FusedAdamW([param, param])
    param.grad = torch.ones(3)
    with pytest.raises(UnsupportedProblem, match="stands twice"):
        optimizer.step()


def test_parameters_over_one_memory_are_refused() -> None:
    whole = torch.ones(4, 6)
    apart = [torch.nn.Parameter(part) for part in (whole[:, :3], whole[:, 3:])]  # columns of one buffer
    for params in (apart, [*apart, torch.nn.Parameter(whole[2])]):
        optimizer = FusedAdamW(params)
        for param in params:
            param.grad = torch.ones_like(param)
        if params is apart:
            optimizer.step()
        else:
            with pytest.raises(UnsupportedProblem, match="share memory"):
                optimizer.step()


# ---- host time ------------------------------------------------------------------------------------------


def test_a_step_costs_the_host_less_than_torchs() -> None:
    command = [sys.executable, "-m", "tests.optimizer.host"]
    root = Path(__file__).parents[2]
    lines = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout.splitlines()
    for case, line in zip(host.CASES, lines, strict=True):
        ours, theirs = map(float, line.split())
        assert ours < 0.8 * theirs, case


@pytest.mark.usefixtures("launches")
@pytest.mark.parametrize(("number", "groups"), host.CASES)
def test_what_python_does_in_a_step_does_not_grow_with_the_parameters(
    number: int, groups: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plans.compiler, "get", lambda *args: lambda *launch: None)
    stepped, params = host.optimizer(FusedAdamW, number, groups)
    for _ in range(3):
        host.step(stepped, params)
    calls = 0

    def called(frame: Any, event: str, arg: Any) -> None:
        nonlocal calls
        calls += event == "call"

    sys.setprofile(called)
    stepped.step()
    sys.setprofile(None)
    assert calls < 120 + 40 * groups
