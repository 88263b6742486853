"""Shared by the tests of ``adamw_step``: tolerances, operands, and cases for Triton's interpreter.

This file is also the script of the child process that runs the cases (see ``tests/interpreted.py``).
"""

from __future__ import annotations

import random
from itertools import product
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from cutekernels.kernels.triton import optimizer as kernels
from cutekernels.ops.optimizer.op import ADAMW_COUNT, ADAMW_SQUARES, ADAMW_STEP, ADAMW_TABLE, AdamWProblem, Hyper
from tests.interpreted import DTYPES, H200, build_arguments, grouped, interpret, serve
from tests.tolerance import FP32_ULP, worst_ratio

SETTINGS = {"lr": 0.02, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}


# ---- tolerances -----------------------------------------------------------------------------------------


def truth(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    step: int,
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    maximize: bool = False,
) -> list[tuple[Tensor, Tensor]]:
    """Parameter and moments after a step of torch.optim.AdamW in fp64, each with the size of its terms."""
    p, m, v = (t.double().clone() for t in (param, exp_avg, exp_avg_sq))
    one = torch.nn.Parameter(p)
    one.grad = grad.double()
    torchs = torch.optim.AdamW(
        [one], lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, maximize=maximize, foreach=False
    )
    torchs.state[one] = {"step": torch.tensor(step - 1.0), "exp_avg": m, "exp_avg_sq": v}
    torchs.step()
    of_m = exp_avg.double().abs() + (1 - betas[0]) * (grad.double() - exp_avg.double()).abs()
    # Where the moment's terms cancel, what is left of their rounding moves the parameter as far as they would.
    moved = lr / (1 - betas[0] ** step) * of_m / ((v / (1 - betas[1] ** step)).sqrt() + eps)
    sizes = (p.abs() + param.double().abs() + moved, of_m, v.abs())
    return list(zip((one.detach(), m, v), sizes, strict=True))


def error_ratio(actual: Tensor, exact: Tensor, magnitude: Tensor) -> float:
    """The largest error over its tolerance: an ulp, and 8 ulp of fp32 of the terms (hyperparameters are in fp32)."""
    return worst_ratio(actual, exact, 8 * FP32_ULP * magnitude)


def worst(results: Any, exact: list[tuple[Tensor, Tensor]]) -> float:
    """``results``: parameter, moments and, where there is one, the master copy."""
    param, exp_avg, exp_avg_sq, *master = results
    pairs = [*zip((param, exp_avg, exp_avg_sq), exact, strict=True), *((m, exact[0]) for m in master if m.numel())]
    return max(error_ratio(r, *e) for r, e in pairs)


# ---- operands -------------------------------------------------------------------------------------------


def operands(
    n: int,
    dtype: str,
    grad: str = "same",
    master: bool = False,
    skew: int = 0,
    device: str = "cpu",
    moments: str = "fp32",
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """Operands (param, grad, exp_avg, exp_avg_sq, master) after some steps with gradients of many sizes."""

    def place_as(t: Tensor, kind: torch.dtype) -> Tensor:
        memory = torch.empty(n + skew, dtype=kind, device=device)
        return memory[skew:].copy_(t)

    sizes = 10.0 ** (6 * torch.rand(n, device=device) - 4)
    g = torch.randn(n, device=device) * sizes
    copy = place_as(torch.randn(n, device=device), torch.float32) if master else None
    param = place_as(torch.randn(n, device=device) if copy is None else copy, DTYPES[dtype])
    avg, sq = place_as(torch.randn(n, device=device) * sizes, DTYPES[moments]), place_as(sizes**2, DTYPES[moments])
    return param, place_as(g, DTYPES[dtype] if grad == "same" else torch.float32), avg, sq, copy


# ---- the child process ----------------------------------------------------------------------------------


def child_case(case: dict[str, Any]) -> dict[str, Any]:
    torch.manual_seed(3)
    step, settings = case.get("step", 3), SETTINGS | case.get("settings", {})
    settings["betas"] = tuple(settings["betas"])
    maximize = bool(case.get("maximize"))
    if "sizes" in case:
        return table_case(case, step, settings, maximize)
    kinds = {name: case[name] for name in ("dtype", "grad", "master", "skew", "moments") if name in case}
    given = operands(case["n"], **kinds)
    if case.get("zero"):
        for t in given:
            if t is not None:
                t.zero_()
    param, grad, exp_avg, exp_avg_sq, master = given
    before = [None if t is None else t.clone() for t in given]
    exact = truth(param if master is None else master, grad, exp_avg, exp_avg_sq, step, maximize=maximize, **settings)
    results = [param, exp_avg, exp_avg_sq, param.new_empty(0) if master is None else master]
    if not case.get("inplace"):
        results = [torch.full_like(torch.empty(t.numel() + 9, dtype=t.dtype), float("nan"))[:-9] for t in results]
        for r in results:
            r.as_strided((9,), (1,), r.numel()).fill_(96.0)  # no NaN: what is read past the end may be one
    on_device = case.get("on device")
    count = torch.tensor(float(step)) if on_device else None
    rate = torch.tensor(settings["lr"]) if on_device else None
    hyper = Hyper.of(**settings, step=None if on_device else step)
    if on_device:
        hyper = hyper._replace(lr=float("nan"))
    inputs = (*given, count, rate)
    problem = interpret(
        ADAMW_STEP, results, inputs, hyper, config=case.get("config"), edit=case.get("edit"), maximize=maximize
    )
    outside = True
    if not case.get("inplace"):
        outside = all(bool((r.as_strided((9,), (1,), r.numel()) == 96.0).all()) for r in results)
        outside &= all(a is None or torch.equal(a, b) for a, b in zip(before, given, strict=True))
    return {"ratio": worst(results, exact), "outside": outside, "problem": problem}


def table_case(case: dict[str, Any], step: int, settings: dict[str, Any], maximize: bool) -> dict[str, Any]:
    """Tensors of several sizes, each at a step of its own, through the kernels that read a table, in their order."""
    sizes, missing, max_norm = case["sizes"], case.get("missing", ()), case.get("max_norm")
    kinds = {"dtype": case["dtype"], "grad": case.get("grad", "same"), "master": bool(case.get("master"))}
    kinds["moments"] = case.get("moments", "fp32")
    every = [operands(n, **kinds, skew=case.get("skew", 0)) for n in sizes]
    steps = [torch.tensor(float(step + i - (i not in missing))) for i in range(len(sizes))]
    if "poison" in case:
        every[0][1][0] = float(case["poison"])
    used = [o[1].double() for i, o in enumerate(every) if i not in missing]
    norm = torch.cat([torch.zeros(1).double(), *used]).norm()
    scale = 1.0 if max_norm is None else torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    before = [[None if t is None else t.clone() for t in o] for o in every]
    exact = [
        truth(o[0] if o[4] is None else o[4], o[1].double() * scale, *o[2:4], step + i, maximize=maximize, **settings)
        for i, o in enumerate(every)
    ]
    align = 16 if not case.get("skew") else 2 if kinds["dtype"] != "fp32" else 4
    problem = AdamWProblem(sum(sizes), **kinds, maximize=maximize, step="device", align=align)
    config = ADAMW_TABLE.Config.parse(case["config"]) if "config" in case else ADAMW_TABLE.default(problem, H200)
    rows = [
        [*(0 if t is None else t.data_ptr() for t in (o[0], *o[2:], s)), o[0].numel(), 0, 0]
        for o, s in zip(every, steps, strict=True)
    ]
    chunks = [[i, j] for i, n in enumerate(sizes) for j in range(-(-n // config.block))]
    table, where = torch.tensor(rows), torch.tensor(chunks, dtype=torch.int32)
    grads = torch.tensor([0 if i in missing else o[1].data_ptr() or 1 for i, o in enumerate(every)])
    sums, found = torch.full((min(3, len(chunks)),), float("nan")), torch.zeros(())

    def launch(op: Any, programs: int, **given: Any) -> None:
        built = build_arguments(op, problem, config)
        constants = built["constexprs"]
        assert list(built["signature"])[: len(given)] == list(given)
        built["fn"][(programs, 1, 1)](**grouped(built["fn"], given | constants))

    tables = {"table_ptr": table, "grads_ptr": grads}
    launch(ADAMW_COUNT, -(-len(sizes) // config.block), **tables, tensors=len(sizes))
    tables["chunks_ptr"] = where
    launch(ADAMW_SQUARES, len(sums), **tables, sums_ptr=sums, chunks=len(chunks) - case.get("chunks forgotten", 0))
    found.copy_(sums.sum().sqrt())
    ratios = [float((found - norm).abs() / (norm * 1e-6 + 1e-30))] if norm.isfinite() else [0.0]
    assert norm.isfinite() or torch.equal(found.double().nan_to_num(1.5), norm.nan_to_num(1.5))
    found += case.get("norm is off", 0.0)
    clip = {"norm": 0 if max_norm is None else found.data_ptr(), "max_norm": max_norm or 0.0}
    launch(ADAMW_TABLE, len(chunks), **tables, rate_ptr=0, **clip, **Hyper.of(**settings)._asdict())
    outside = [float(s) for s in steps] == [step + i for i in range(len(sizes))]
    for i, (o, e) in enumerate(zip(every, exact, strict=True)):
        if i in missing:
            outside &= all(a is None or torch.equal(a, b) for a, b in zip(o, before[i], strict=True))
        elif "poison" in case:
            outside &= torch.equal(o[0].isnan(), e[0][0].isnan())
        elif o[0].numel():
            ratios.append(worst((o[0], o[2], o[3], *([] if o[4] is None else [o[4]])), e))
    return {"ratio": max(ratios), "outside": outside, "problem": str(problem)}


@triton.jit
def uncorrected(step_ptr, c1, c2, ON_DEVICE: tl.constexpr):
    return 1.0, 1.0


def numerics_cases() -> dict[str, dict[str, Any]]:
    cases: dict[str, dict[str, Any]] = {}
    for dtype, grad, master, skew in product(DTYPES, ("same", "fp32"), (False, True), (0, 1)):
        if dtype == "fp32" and (grad == "fp32" or master):
            continue
        kind = {"dtype": dtype, "grad": grad, "master": master, "skew": skew}
        cases[f"{dtype} {grad=} {master=} {skew=}"] = {"n": 1029, **kind}
        cases[f"table {dtype} {grad=} {master=} {skew=}"] = {"sizes": [5, 1029, 256], **kind}
    for dtype, moments, skew in product(DTYPES, ("bf16", "fp16"), (0, 1)):
        kind = {"dtype": dtype, "moments": moments, "skew": skew, "master": dtype == "fp16"}
        cases[f"{dtype} {moments=} {skew=}"] = {"n": 1029, **kind}
        cases[f"table {dtype} {moments=} {skew=}"] = {"sizes": [5, 1029], "max_norm": 0.5, **kind}
    tables = {"sizes": [5, 1029, 0, 700, 256], "dtype": "bf16"}
    for max_norm in (0.0, 1.0, 1e9, float("inf")):
        cases[f"clipped to {max_norm}"] = tables | {"max_norm": max_norm}
        cases[f"clipped to {max_norm}, fp32"] = tables | {"max_norm": max_norm, "dtype": "fp32", "skew": 1}
    for poison in ("nan", "inf"):
        cases[f"clipped with {poison}"] = tables | {"poison": poison, "max_norm": 1.0}
    cases["some are missing"] = tables | {"missing": [1, 2], "max_norm": 2.0}
    cases["all but one are missing"] = tables | {"missing": [0, 1, 2, 3], "master": True}
    for n in (1, 3, 255, 256, 257, 3000):
        cases[f"n={n}"] = {"n": n, "dtype": "fp32"}
    for step in (1, 2, 10, 1000, 100000):
        cases[f"step {step} on the device"] = {"n": 300, "dtype": "fp32", "step": step, "on device": True}
        cases[f"step {step}"] = {"n": 300, "dtype": "fp32", "step": step}
    base = {"n": 300, "dtype": "fp32"}
    cases["in place"] = base | {"inplace": True}
    cases["in place with a master copy"] = {"n": 300, "dtype": "bf16", "master": True, "inplace": True}
    cases["maximize"] = base | {"maximize": True}
    cases["table maximize"] = {"sizes": [300], "dtype": "fp32", "maximize": True}
    cases["all zero"] = base | {"zero": True}
    cases["no decay, no momentum"] = base | {"settings": {"weight_decay": 0.0, "betas": (0.0, 0.0)}}
    cases["no momentum on the device"] = base | {"settings": {"betas": (0.0, 0.5)}, "on device": True}
    cases["a large eps"] = base | {"settings": {"eps": 1.0, "betas": (0.5, 0.9999)}, "on device": True}
    cases["table with nothing in it"] = {"sizes": [0, 1, 0, 17], "dtype": "fp32"}
    rng = random.Random(2)
    for dtype in DTYPES:
        problem = AdamWProblem(5000, dtype)
        for config in rng.sample(list(ADAMW_STEP.valid(problem, H200)), 2):
            cases[f"{dtype} [{config}]"] = {"n": 5000, "dtype": dtype, "config": str(config)}
            cases[f"table {dtype} [{config}]"] = {"sizes": [5000, 9], "dtype": dtype, "config": str(config)}
    return cases


CASES = numerics_cases()
PLANTED = {
    "an element forgotten": {"n": 301, "dtype": "fp32", "edit": {"elements": -1}},
    "written past the end": {"n": 301, "dtype": "fp32", "edit": {"elements": 1}},
    "no bias correction": {"n": 301, "dtype": "fp32", "planted": "_corrections"},
    "no bias correction in a table": {"sizes": [301], "dtype": "fp32", "planted": "_corrections"},
    "a beta of 1": {"n": 301, "dtype": "fp32", "edit": {"w1": -0.1}},
    "another norm": {"sizes": [301, 9], "dtype": "fp32", "max_norm": 1.0, "norm is off": 0.1},
    "a sum forgotten": {"sizes": [301, 9], "dtype": "fp32", "max_norm": 1e9, "chunks forgotten": 1},
    "decay forgotten": {"n": 301, "dtype": "fp32", "edit": {"weight_decay": -0.1}},
}


if __name__ == "__main__":
    serve(child_case, {"_corrections": (kernels, uncorrected)})
