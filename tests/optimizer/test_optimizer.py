"""``adamw_step`` and ``FusedAdamW`` without a GPU: kernels under the interpreter, the declaration, the CPU path."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from cutekernels import adamw_step
from cutekernels.errors import UnsupportedProblem
from cutekernels.ops.optimizer.op import ADAMW_STEP, AdamWProblem, Hyper
from cutekernels.ops.shared.calls import ways_of
from cutekernels.optim import FusedAdamW
from tests.compiled import half
from tests.interpreted import kernel_tests
from tests.optimizer import cases as optimizer_cases
from tests.optimizer.cases import CASES, PLANTED, SETTINGS, operands, truth, worst
from tests.refusals import Calls, refused

# ---- the kernels, interpreted ---------------------------------------------------------------------------


interpreted, test_kernel_numerics, test_a_planted_bug_is_caught = kernel_tests(
    optimizer_cases.__file__, half(CASES, r"skew=|block=|^step |^clipped to"), PLANTED
)


# ---- the declaration ------------------------------------------------------------------------------------


def test_work_is_what_must_be_moved() -> None:
    assert ADAMW_STEP.work(AdamWProblem(10)).bytes == 280
    assert ADAMW_STEP.work(AdamWProblem(10, "bf16")).bytes == 220
    assert ADAMW_STEP.work(AdamWProblem(10, "bf16", master=True)).bytes == 280
    assert ADAMW_STEP.work(AdamWProblem(10, "bf16", "fp32", master=True)).bytes == 300


@pytest.mark.parametrize(
    ("words", "rule"),
    [("grad=fp32", "grad=same"), ("master=1", "their own master"), ("align=2", "one element of fp32; it is 2")],
)
def test_problems_that_are_none(words: str, rule: str) -> None:
    with pytest.raises(UnsupportedProblem, match=rule):
        AdamWProblem.parse(f"elements=5 {words}")


def test_small_differences_survive_fp32() -> None:
    hyper = Hyper.of(1e-3, (0.9, 0.999), 1e-8, 0.0)
    assert hyper.w2 == pytest.approx(0.001, rel=1e-12)
    assert float(torch.tensor(hyper.w2)) == pytest.approx(0.001, rel=1e-7)
    assert float(1 - torch.tensor(0.999)) != pytest.approx(0.001, rel=1e-6)


# ---- the function, on the CPU ---------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("master", [False, True])
@pytest.mark.parametrize("count", [1, 7, torch.tensor(7.0)], ids=str)
def test_cpu_tensors_run_the_reference(dtype: str, master: bool, count: Any) -> None:
    given = operands(300, dtype, master=master and dtype != "fp32")
    param, grad, exp_avg, exp_avg_sq, copied = given
    exact = truth(param if copied is None else copied, grad, exp_avg, exp_avg_sq, int(count), **SETTINGS)
    found = adamw_step(param, grad, exp_avg, exp_avg_sq, step=count, master=copied, **SETTINGS)
    assert found is param
    assert worst((param, exp_avg, exp_avg_sq, *([] if copied is None else [copied])), exact) <= 1


@pytest.mark.parametrize(
    "lay",
    [
        lambda t: t.view(12, 25)[:1],
        lambda t: t.view(12, 25),
        lambda t: t.view(12, 25).t(),
        lambda t: t[::2],
        lambda t: t[:1],
    ],
)
def test_any_strides(lay: Callable[[Tensor], Tensor]) -> None:
    given = [lay(t) for t in operands(300, "fp32") if t is not None]
    others = [lay(t.clone()) for t in operands(300, "fp32") if t is not None]
    given[1] = given[1].clone().contiguous()  # a gradient that lies otherwise
    exact = truth(*given, 2, **SETTINGS)
    adamw_step(*given, step=2, **SETTINGS)
    assert worst((given[0], *given[2:]), exact) <= 1
    assert others[0].shape == given[0].shape


@pytest.mark.parametrize(
    ("lay", "copied"),
    [(lambda t: t, 0), (Tensor.t, 0), (lambda t: t[:, ::2], 9), (lambda t: t.t() if t.dtype == torch.half else t, 3)],
)
def test_kernels_take_any_order_of_dimensions_that_all_operands_have(lay: Any, copied: int) -> None:
    """Others are copied, but for those that are contiguous: here the parameter, its result and its gradient."""
    half, wide = torch.ones(6, 4, dtype=torch.half), torch.ones(6, 4)
    operands = [half, wide, wide, wide, half, half, wide, wide, wide]
    named = dict(zip((*ADAMW_STEP.results, *ADAMW_STEP.inputs), map(lay, operands), strict=False))
    ways = ways_of(ADAMW_STEP, named | {"step": torch.ones(()), "lr": None})
    assert len(ways) - ways.count(None) == copied


def overlapping() -> dict[str, tuple[Tensor, ...]]:
    g, s, t = torch.ones(4, 6), torch.rand(8, 12), torch.zeros(4, 6)
    return {
        "param in the first moment": (s[:4, ::2], g, s[2:6, ::2], t),
        "the moments are one": (t, g, s[:4, ::2], s[:4, ::2]),
        "one address for many": (torch.rand(4, 6), g, t, torch.zeros(1, 6).expand(4, 6)),
        "the gradient": (t, s[1:5, ::2], s[:4, ::2], torch.rand(4, 6)),
    }


@pytest.mark.parametrize("what", overlapping())
def test_overlap_is_refused_before_anything_is_copied(what: str) -> None:
    given = overlapping()[what]
    before = [t.clone() for t in given]
    with pytest.raises(UnsupportedProblem, match="overlap"):
        adamw_step(*given, step=1)
    assert all(torch.equal(a, b) for a, b in zip(given, before, strict=True))


def test_operands_side_by_side_in_one_buffer() -> None:
    given = torch.rand(4, 6, 4).unbind(2)
    exact = truth(*given, 2, **SETTINGS)
    adamw_step(*given, step=2, **SETTINGS)
    assert worst((given[0], *given[2:]), exact) <= 1
    fakes = [torch.empty(4, 6, device="meta").t() for _ in range(3)]
    adamw_step(torch.empty(6, 4, device="meta"), *fakes, step=1)


def test_a_device_step_below_one_counts_as_one() -> None:
    given = [t for t in operands(40, "fp32") if t is not None]
    others = [t.clone() for t in given]
    adamw_step(*given, step=torch.tensor(0.0), **SETTINGS)
    adamw_step(*others, step=torch.tensor(1.0), **SETTINGS)
    assert all(torch.equal(a, b) for a, b in zip(given, others, strict=True))
    assert all(t.isfinite().all() for t in given)


def _sparse_step() -> None:
    param = torch.nn.Parameter(torch.randn(4))
    param.grad = torch.randn(4).to_sparse()
    FusedAdamW([param]).step()


@refused
def test_refusals_say_the_rule() -> Calls:
    p, g, m, v, _ = (t for t in operands(6, "fp32"))
    half = p.bfloat16()
    return {
        "got param .6,., grad .5,": lambda: adamw_step(p, g[:5], m, v, step=1),
        "takes bfloat16": lambda: adamw_step(p.int(), g, m, v, step=1),
        "takes exp_avg in float32 or bfloat16 or float16; got": lambda: adamw_step(half, g, m.double(), v, step=1),
        "both moments have one dtype": lambda: adamw_step(half, g, m.bfloat16(), v, step=1),
        "takes grad in bfloat16 or float32; got torch.float16": lambda: adamw_step(half, g.half(), m, v, step=1),
        "their own master copy": lambda: adamw_step(p, g, m, v, step=1, master=p.clone()),
        "takes step as a whole number of at least 1; got 0": lambda: adamw_step(p, g, m, v, step=0),
        "step as a whole number of at least 1; got None": lambda: adamw_step(p, g, m, v, step=None),  # type: ignore[arg-type]
        "step as a whole number of at least 1; got nan": lambda: adamw_step(p, g, m, v, step=float("nan")),  # type: ignore[arg-type]
        "step as a whole number of at least 1; got 1.5": lambda: adamw_step(p, g, m, v, step=1.5),  # type: ignore[arg-type]
        "step as a whole number of at least 1; got True": lambda: adamw_step(p, g, m, v, step=True),
        "one number in fp32": lambda: adamw_step(p, g, m, v, step=torch.tensor([1.0, 2.0])),
        "from 0 to below 1": lambda: adamw_step(p, g, m, v, step=1, betas=(0.9, 1.0)),
        "takes lr as a finite number of at least 0; got -1": lambda: adamw_step(p, g, m, v, step=1, lr=-1),
        "takes eps as a finite number of at least 0; got nan": lambda: adamw_step(p, g, m, v, step=1, eps=float("nan")),
        "layout torch.sparse_coo: call to_dense": lambda: adamw_step(p, g.to_sparse(), m, v, step=1),
        "not differentiable": lambda: adamw_step(p.clone().requires_grad_(), g, m, v, step=1),
        "overlaps an operand": lambda: adamw_step(p[:4], g[:4], p[1:5], v[:4], step=1),
        "overlap itself": lambda: ADAMW_STEP.admit((p,) * 4 + (None,) * 3, (p[:1].expand(6), p, p, p), maximize=False),
        "FusedAdamW takes amsgrad as False": lambda: FusedAdamW([p], amsgrad=True),
        "betas are from 0": lambda: FusedAdamW([p], betas=(0.9, 2.0)),
        "takes weight_decay as a finite number of at least 0": lambda: FusedAdamW(
            [{"params": [p], "weight_decay": -0.1}]
        ),
        "a learning rate is one number": lambda: FusedAdamW([p], lr=torch.ones(2)),
        "a learning rate is a real number": lambda: FusedAdamW([p], lr=torch.tensor(1j)),
        "takes lr as a finite number of at least 0; got -1.0": lambda: FusedAdamW([p], lr=torch.tensor(-1.0)),
        "takes lr in float32; got torch.float64": lambda: adamw_step(p, p, p, p, lr=torch.ones(1).double(), step=1),
        "its elements share memory": lambda: _step(torch.ones(1).expand(2)),
        "of 16 bits or more; got torch.int64": lambda: _step(torch.ones(2, dtype=torch.int64)),
        "torch.optim.SparseAdam": _sparse_step,
    }


def _step(values: Tensor) -> None:
    """A step of a parameter that is refused, behind one that is not and keeps its values."""
    params = [torch.ones(3).requires_grad_(), values]
    for param in params:
        param.grad = torch.ones_like(param)
    try:
        FusedAdamW(params).step()
    finally:
        assert torch.equal(params[0], torch.ones(3))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_opcheck() -> None:
    for dtype, master, count in (("fp32", False, None), ("bf16", True, torch.tensor(2.0))):
        given, numbers = operands(20, dtype, master=master), Hyper.of(**SETTINGS, step=2 if count is None else None)
        torch.library.opcheck(torch.ops.cutekernels.adamw_step_inplace.default, (*given, count, None, False, *numbers))
        torch.library.opcheck(torch.ops.cutekernels.adamw_step.default, (*given, count, None, True, *numbers))


# ---- the optimizer, on the CPU --------------------------------------------------------------------------


def model(odd: bool = True) -> list[torch.nn.Parameter]:
    """``odd``: with parameters that do not lie as their gradients do, which torch's fused kernel gets wrong."""
    torch.manual_seed(1)
    shapes = [(7, 5), (3,), (), (0, 4), (2, 3, 4, 5)]
    params = [torch.nn.Parameter(torch.randn(s, dtype=torch.float64)) for s in shapes]
    if odd:
        params.append(torch.nn.Parameter(torch.randn(5, 7, dtype=torch.float64).t()))
        params.append(torch.nn.Parameter(torch.randn(9, 4, dtype=torch.float64)[:, ::2]))
    return params


def grads(params: list[torch.nn.Parameter], seed: int, skip: int | None = None) -> None:
    draw = torch.Generator().manual_seed(seed)
    for i, p in enumerate(params):
        p.grad = None if i == skip else torch.randn(p.shape, generator=draw, dtype=torch.float64).to(p.dtype)


@pytest.mark.parametrize("maximize", [False, True])
def test_steps_as_torch_does(maximize: bool) -> None:
    ours, theirs = model(), model()
    options: dict[str, Any] = {"lr": 0.01, "weight_decay": 0.1, "maximize": maximize}
    a, b = FusedAdamW(ours, **options), torch.optim.AdamW(theirs, **options)
    schedules = [torch.optim.lr_scheduler.StepLR(o, 2, 0.5) for o in (a, b)]
    for seed in range(5):
        for params, optimizer, schedule in zip((ours, theirs), (a, b), schedules, strict=True):
            grads(params, seed, skip=seed if seed < 3 else None)
            optimizer.step()
            schedule.step()
    for p, q in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-9, atol=1e-12)


def test_groups_and_closures() -> None:
    ours, theirs = model(), model()
    groups = [
        [{"params": p[:2], "lr": 0.1, "betas": (0.5, 0.9)}, {"params": p[2:], "weight_decay": 0.0}]
        for p in (ours, theirs)
    ]
    a, b = FusedAdamW(groups[0]), torch.optim.AdamW(groups[1])
    grads(ours, 1)
    grads(theirs, 1)
    assert a.step(lambda: torch.tensor(4.0, requires_grad=True) * 2) == 8
    b.step()
    for p, q in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-9, atol=1e-12)
    assert ours[0]._version > 0


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"exp_avg": torch.ones(1)}, r"exp_avg of parameter 1 is of shape \(3, 4\); the state has .* shape \(1,\)"),
        ({"exp_avg_sq": None}, "exp_avg_sq of parameter 1 is of shape .* has None"),
        ({"master": torch.ones(4)}, "master of parameter 1"),
        ({"step": torch.ones(2)}, "step of parameter 1"),
        ("exp_avg_sq", "exp_avg_sq of parameter 1 is .* the state has None: load the whole state"),
    ],
)
def test_state_of_another_model_is_refused_whole(change: Any, rule: str) -> None:
    """Moments that fit by broadcasting too; what was there before stays."""
    params = [torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(3, 4))]
    optimizer = FusedAdamW(params)
    grads(params, 0)
    optimizer.step()
    before, wrong = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(optimizer.state_dict())
    wrong["state"][0]["exp_avg"].zero_()
    if isinstance(change, str):
        del wrong["state"][1][change]
    else:
        wrong["state"][1] |= change
    with pytest.raises(UnsupportedProblem, match=rule):
        optimizer.load_state_dict(wrong)
    for number, state in before["state"].items():
        for name, t in state.items():
            assert torch.equal(optimizer.state_dict()["state"][number][name], t)


def test_master_weights_keep_what_rounding_loses() -> None:
    """Steps below half an ulp of bf16 move the parameter only if a master copy accumulates them."""
    moved = {}
    for master in (False, True):
        param = torch.nn.Parameter(torch.full((8,), 256.0).bfloat16())
        optimizer = FusedAdamW([param], lr=0.01, weight_decay=0.0, master_weights=master)
        for _ in range(200):
            param.grad = torch.ones_like(param)
            optimizer.step()
        moved[master] = float(256 - param.detach()[0].float())
    assert moved[False] == 0.0
    assert moved[True] == pytest.approx(2.0, abs=0.1)


def test_copies_and_pickles() -> None:
    params = model()
    optimizer = FusedAdamW(params)
    grads(params, 0)
    optimizer.step()
    twin = copy.deepcopy(optimizer)
    assert twin.state_dict()["state"].keys() == optimizer.state_dict()["state"].keys()
    twin.step()


@pytest.mark.parametrize("options", [{"fused": True}, {"foreach": False}, {"fused": None, "differentiable": False}])
def test_options_of_torchs_adamw_are_taken(options: dict[str, Any]) -> None:
    ours, theirs = (torch.nn.Parameter(torch.ones(8)) for _ in range(2))
    for p, optimizer in ((ours, FusedAdamW([ours], **options)), (theirs, torch.optim.AdamW([theirs]))):
        p.grad = torch.linspace(-1, 1, 8)
        optimizer.step()
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("options", [{"fused": False}, {"foreach": True}, {"differentiable": True}, {"fused": 1}])
def test_options_that_this_optimizer_is_not_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedProblem, match=f"takes {next(iter(options))} as .*use torch.optim.AdamW"):
        FusedAdamW([torch.nn.Parameter(torch.ones(8))], **options)


def test_hooks_around_loading_have_their_say() -> None:
    """A pre-hook's result is loaded, in full precision, and a post-hook's changes stay."""
    params = [torch.nn.Parameter(torch.randn(40).bfloat16())]
    optimizer = FusedAdamW(params, master_weights=True)
    grads(params, 1)
    optimizer.step()
    saved, third = optimizer.state_dict(), torch.full((40,), 1 / 3)

    def before(_: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
        more = {"step": torch.tensor(7.0), "exp_avg": third, "master": 2 * third}
        return state_dict | {"state": {0: state_dict["state"][0] | more}}

    def behind(o: Any) -> None:
        assert torch.equal(o.state[params[0]]["exp_avg"], third)
        o.state[params[0]]["exp_avg_sq"].fill_(5.0)

    optimizer.register_load_state_dict_pre_hook(before)
    optimizer.register_load_state_dict_post_hook(behind)
    for _ in range(2):
        optimizer.load_state_dict(saved)
        state = optimizer.state[params[0]]
        assert float(state["step"]) == 7
        assert torch.equal(state["exp_avg"], third) and torch.equal(state["master"], 2 * third)
        assert bool((state["exp_avg_sq"] == 5).all()) and state["exp_avg_sq"].dtype == torch.float32


def test_a_refused_group_is_not_kept() -> None:
    param, late = (torch.nn.Parameter(torch.ones(8)) for _ in range(2))
    optimizer = FusedAdamW([param])
    with pytest.raises(UnsupportedProblem, match="takes lr as a finite number of at least 0"):
        optimizer.add_param_group({"params": [late], "lr": -1.0})
    assert len(optimizer.param_groups) == 1
    saved = optimizer.state_dict()
    saved["param_groups"][0] |= {"amsgrad": True, "lr": 0.5}
    with pytest.raises(UnsupportedProblem, match="takes amsgrad as False"):
        optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["lr"] == 1e-3 and not optimizer.param_groups[0]["amsgrad"]
    optimizer.add_param_group({"params": [late]})
    assert len(optimizer.param_groups) == 2
