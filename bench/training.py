"""``python -m bench training``: steps of training (forward, loss, backward, AdamW) and the loss alone, beside peers.

Suites:

- ``step``: models of random bf16 weights and their published sizes, or some of their layers. Wall time, the host's
  included, until the GPU is idle; ``memory_gib`` is the most that was allocated, weights, gradients and moments
  included. Contenders hold moments of one type, the parameters' own, and take turns. CUDA graphs are those of
  ``torch.compile(mode="reduce-overhead")``;
- ``loss``: the last layer and its loss alone, forward and backward;
- ``curve``: ``STEPS`` steps of a small model on one batch, beside plain runs from other seeds' weights: ``error`` is
  the distance of a loss curve from the plain one's over the largest distance of the seeds' from it.
"""

from __future__ import annotations

import gc
import importlib
import sys
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain
from operator import attrgetter
from statistics import median
from typing import Annotated, Any

import torch
import torch.nn.functional as F
import typer
from torch import Tensor

import cutekernels as ck
from bench import wall
from bench.models import build
from bench.rows import Row
from bench.wall import Commit, DryRun, Match, Out, Rounds
from cutekernels import environment, terminal

STEPS = 200
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@dataclass(frozen=True)
class TrainingCase:
    """``batch`` sequences of ``tokens``; ``layers`` of a model, 0 for all. Of the loss: ``tokens`` x K x V.

    ``checkpointing``: each layer's activations are recomputed in the backward pass. ``documents``: so many texts of
    one length stand side by side in a sequence, and ``position_ids`` tell them apart; 0 for none.
    """

    suite: str
    model: str
    batch: int
    tokens: int
    layers: int = 0
    checkpointing: bool = False
    documents: int = 0
    k: int = 0
    classes: int = 0

    def __str__(self) -> str:
        if self.suite == "loss":
            return f"{self.tokens} x {self.k} x {self.classes}"
        words = [self.model, f"{self.layers} layers" if self.layers else "", f"{self.batch} x {self.tokens}"]
        words += [f"{self.documents} documents" if self.documents else "", "checkpointing" * self.checkpointing]
        return ", ".join(filter(None, words))


CASES = (
    TrainingCase("step", "qwen2.5-0.5b", 4, 512),
    TrainingCase("step", "qwen2.5-0.5b", 1, 256),
    TrainingCase("step", "qwen2.5-1.5b", 4, 1024),
    TrainingCase("step", "qwen2.5-1.5b", 4, 2048),
    TrainingCase("step", "qwen2.5-7b", 2, 2048, layers=4),
    TrainingCase("step", "qwen3-30b-a3b", 2, 2048, layers=2),
    *[
        TrainingCase("step", "qwen2.5-1.5b", 1, tokens, checkpointing=checkpointing)
        for tokens in (16384, 32768)
        for checkpointing in (False, True)
    ],
    TrainingCase("step", "qwen2.5-1.5b", 1, 16384, documents=16),
    TrainingCase("loss", "", 1, 4096, k=4096, classes=128256),
    TrainingCase("loss", "", 1, 8192, k=3584, classes=152064),
    TrainingCase("loss", "", 1, 2048, k=896, classes=151936),
    TrainingCase("curve", "qwen2.5-0.5b", 2, 128, layers=2),
)

Step = Callable[[], Tensor]  # returns the loss, which the GPU may still compute


# ---- steps of a model -----------------------------------------------------------------------------------


def _stepping(model: Any, called: Any, optimizer: Any, case: TrainingCase) -> Step:
    draw = torch.Generator("cuda").manual_seed(7)
    ids = torch.randint(0, model.config.vocab_size, (case.batch, case.tokens), generator=draw, device="cuda")
    words = {"input_ids": ids, "labels": ids, "use_cache": False}
    if case.documents:
        words["position_ids"] = torch.arange(case.tokens, device="cuda")[None] % (case.tokens // case.documents)

    def step() -> Tensor:
        torch.compiler.cudagraph_mark_step_begin()
        optimizer.zero_grad()
        loss: Tensor = called(**words).loss
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def _liger(model: Any) -> None:
    monkey_patch = importlib.import_module("liger_kernel.transformers.monkey_patch")
    names = vars(sys.modules[type(model).__module__])
    before = dict(names)
    monkey_patch._apply_liger_kernel_to_instance(model)
    names.update(before)  # it puts its classes into transformers' module too


_adamw = partial(torch.optim.AdamW, lr=1e-4, fused=True)


def _step(
    case: TrainingCase,
    seed: int = 0,
    *,
    change: Callable[[Any], object] = lambda model: None,
    optimizer: Callable[[Any], Any] = _adamw,
    mode: str | None = None,
) -> Step:
    model = build(case.model, torch.device("cuda"), torch.bfloat16, layers=case.layers, seed=seed).train()
    change(model)
    if case.checkpointing:
        model.gradient_checkpointing_enable()
    called = model if mode is None else torch.compile(model, mode=mode)
    return _stepping(model, called, optimizer(model.parameters()), case)


_fused: Any = lambda p: ck.optim.FusedAdamW(p, lr=1e-4, moments_dtype=torch.bfloat16)  # noqa: E731
_ours = partial(_step, change=lambda model: ck.patch(model))
MODELS: dict[str, Callable[[TrainingCase], Step]] = {
    "plain": _step,
    "plain, compiled": partial(_step, mode="default"),
    "plain, compiled with CUDA graphs": partial(_step, mode="reduce-overhead"),
    "liger": partial(_step, change=_liger),
    "cutekernels": partial(_ours, optimizer=_fused),
    "cutekernels, torch's AdamW": _ours,
    "cutekernels, compiled": partial(_ours, optimizer=_fused, mode="default"),
    "cutekernels, compiled with CUDA graphs": partial(_ours, optimizer=_fused, mode="reduce-overhead"),
}


# ---- the loss alone -------------------------------------------------------------------------------------


def _loss(case: TrainingCase, function: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Step:
    draw = torch.Generator("cuda").manual_seed(7)
    x = torch.randn(case.tokens, case.k, generator=draw, device="cuda").bfloat16().requires_grad_()
    weight = (torch.randn(case.classes, case.k, generator=draw, device="cuda") * case.k**-0.5).bfloat16()
    weight.requires_grad_()
    targets = torch.randint(0, case.classes, (case.tokens,), generator=draw, device="cuda")

    def step() -> Tensor:
        x.grad = weight.grad = None
        loss = function(x, weight, targets)
        loss.backward()
        return loss.detach()

    return step


def _whole(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy((x @ weight.t()).float(), targets)


_LIGER = "liger_kernel.ops.cutedsl.ops.fused_linear_cross_entropy_sm90:LigerFusedLinearCrossEntropySM90Function.apply"


def _import(place: str) -> Any:
    module, _, name = place.partition(":")
    return attrgetter(name)(importlib.import_module(module))


LOSSES: dict[str, Callable[[TrainingCase], Step]] = {
    "plain, compiled": lambda case: _loss(case, torch.compile(_whole, dynamic=False)),
    "liger": lambda case: _loss(case, _import(_LIGER)),
    "quack": lambda case: _loss(case, _import("quack.linear_cross_entropy:chunked_linear_cross_entropy")),
    "cutekernels": lambda case: _loss(case, ck.linear_cross_entropy),
    "cutekernels, linear_logprob": lambda case: _loss(case, lambda x, w, t: -ck.linear_logprob(x, w, t).mean()),
}


# ---- timing ---------------------------------------------------------------------------------------------


def _time(step: Step) -> float:
    torch.cuda.synchronize()
    begin = time.perf_counter()
    step()
    torch.cuda.synchronize()
    return (time.perf_counter() - begin) * 1e6


def run(
    case: TrainingCase, rounds: int, stamp: dict[str, str], contenders: Collection[str] | None = None
) -> Iterator[Row]:
    """A row of each contender, or of those that are named.

    Contenders live side by side and take their samples in turns, as far as memory allows; those that it has no room
    for come after the others are gone.
    """
    every = LOSSES if case.suite == "loss" else MODELS
    waiting = {name: make for name, make in every.items() if not contenders or name in contenders}
    times: dict[str, list[float]] = {}
    memory: dict[str, float] = {}
    failed: dict[str, Exception] = {}
    names = list(waiting)
    while waiting:
        gc.collect()
        torch.cuda.empty_cache()
        steps: dict[str, Step] = {}
        for name, make in list(waiting.items()):
            before = torch.cuda.memory_allocated()
            free = torch.cuda.get_device_properties(0).total_memory - before
            if steps and 2.5 * max(memory[other] for other in steps) * 2**30 > free:
                break
            del waiting[name]
            torch.cuda.reset_peak_memory_stats()
            try:
                steps[name] = make(case)
                for _ in range(3):
                    steps[name]()
                torch.cuda.synchronize()
                memory[name] = (torch.cuda.max_memory_allocated() - before) / 2**30
            except Exception as error:  # noqa: BLE001 - another project's failure is a row
                steps.pop(name, None)
                failed[name] = error.with_traceback(None)  # whose frames would keep the model
        for _ in range(rounds):
            for name, step in steps.items():
                times.setdefault(name, []).append(_time(step))
        steps.clear()
    torch.compiler.reset()
    base = times.get("plain" if case.suite == "step" else "plain, compiled")
    for name in names:
        place = ("training", case.suite, str(case), str(case))
        if name in failed:
            yield wall.untimed(place, name, failed[name], stamp=stamp)
            continue
        speedup = median(base) / median(times[name]) if base else None
        yield wall.timed(place, name, times[name], memory_gib=memory[name], speedup=speedup, stamp=stamp)


def curves(case: TrainingCase, stamp: dict[str, str]) -> Iterator[Row]:
    """How far loss curves lie from the plain one: of other seeds' weights, and of ours with the same weights."""

    def curve(step: Step) -> tuple[Tensor, float]:
        begin = time.perf_counter()
        losses = torch.stack([step() for _ in range(STEPS)]).cpu()
        return losses, (time.perf_counter() - begin) * 1e6 / STEPS

    plain, us = curve(_step(case))
    spread = max(float((curve(_step(case, seed))[0] - plain).abs().max()) for seed in (1, 2, 3))
    common: dict[str, Any] = {"l2": "warm", "rounds": STEPS, "stamp": stamp}
    place = ("training", "curve", str(case), str(case), 1.0, 0.0)
    yield Row(*place, "plain", "ok", median_us=us, error=0.0, **common)
    for name in ("cutekernels", "cutekernels, torch's AdamW"):
        losses, us = curve(MODELS[name](case))
        yield Row(*place, name, "ok", median_us=us, error=float((losses - plain).abs().max()) / spread, **common)


@app.command()
def command(
    match: Match = None,
    rounds: Rounds = 20,
    contender: Annotated[list[str] | None, typer.Option(help="Only contenders of one of these names.")] = None,
    out: Out = None,
    dry_run: DryRun = False,
    commit: Commit = None,
) -> None:
    """Time steps of training and losses beside their peers, and record a row of each case and contender."""
    some = wall.chosen(CASES, match, lambda case: f"{case.suite} {case}")
    if unknown := set(contender or ()) - {*MODELS, *LOSSES}:
        terminal.fail(f"--contender is one of {'; '.join({**MODELS, **LOSSES})}; it is {min(unknown)!r}", code=2)
    if dry_run:
        for case in some:
            terminal.show(f"{case.suite} {case}: {'; '.join(LOSSES if case.suite == 'loss' else MODELS)}")
        return
    gpu = wall.detect_gpu()
    path = (out or wall.RESULTS / gpu.name / "training") / "training.jsonl"
    stamp = environment.stamp(gpu.name, commit)
    found = (curves(case, stamp) if case.suite == "curve" else run(case, rounds, stamp, contender) for case in some)
    wall.record(chain.from_iterable(found), path, wall.table)
