"""``python -m bench training``: steps of training (forward, loss, backward, AdamW) and the loss alone, beside peers.

Suites:

- ``step``: models of random bf16 weights and their published sizes, or some of their layers. Wall time, the host's
  included, until the GPU is idle; ``memory_gib`` is the most that was allocated, weights, gradients and moments
  included. Contenders hold moments of one type, the parameters' own, and take turns;
- ``loss``: the last layer and its loss alone, forward and backward;
- ``curve``: ``STEPS`` steps of a small model on one batch, beside plain runs from other seeds' weights: ``error`` is
  the distance of a loss curve from the plain one's over the largest distance of the seeds' from it.
"""

from __future__ import annotations

import gc
import importlib
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
import torch.nn.functional as F
import typer
from rich.table import Table
from torch import Tensor

import cutekernels as ck
from bench.models import CONFIGS
from bench.rows import Row, write
from cutekernels import environment, terminal
from cutekernels import gpu as gpus
from cutekernels.errors import UnknownGpu

HERE = Path(__file__).parent
STEPS = 200
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

_SMALL: dict[str, dict[str, Any]] = {
    "qwen2.5-0.5b": {
        "vocab_size": 151936, "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
        "num_attention_heads": 14, "num_key_value_heads": 2, "tie_word_embeddings": True,
    },
    "qwen2.5-1.5b": {
        "vocab_size": 151936, "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28,
        "num_attention_heads": 12, "num_key_value_heads": 2, "tie_word_embeddings": True,
    },
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """``batch`` sequences of ``tokens``; ``layers`` of a model, 0 for all. Of the loss: ``tokens`` x K x V."""

    suite: str
    model: str
    batch: int
    tokens: int
    layers: int = 0
    k: int = 0
    classes: int = 0

    def __str__(self) -> str:
        if self.suite == "loss":
            return f"{self.tokens} x {self.k} x {self.classes}"
        some = f", {self.layers} layers" if self.layers else ""
        return f"{self.model}{some}, {self.batch} x {self.tokens}"


CASES = (
    Case("step", "qwen2.5-0.5b", 4, 512),
    Case("step", "qwen2.5-0.5b", 1, 256),
    Case("step", "qwen2.5-1.5b", 4, 2048),
    Case("step", "qwen2.5-7b", 2, 2048, layers=4),
    Case("step", "qwen3-30b-a3b", 2, 2048, layers=2),
    Case("loss", "", 1, 4096, k=4096, classes=128256),
    Case("loss", "", 1, 8192, k=3584, classes=152064),
    Case("loss", "", 1, 2048, k=896, classes=151936),
    Case("curve", "qwen2.5-0.5b", 2, 128, layers=2),
)

Step = Callable[[], Tensor]  # returns the loss, which the GPU may still compute


# ---- steps of a model -----------------------------------------------------------------------------------


def build(case: Case, seed: int = 0) -> Any:
    """The model, in training."""
    import transformers

    name, own = CONFIGS[case.model] if case.model in CONFIGS else ("Qwen2", _SMALL[case.model])
    config = getattr(transformers, f"{name}Config")(**({"max_position_embeddings": 32768} | own))
    config.num_hidden_layers = case.layers or config.num_hidden_layers
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[: config.num_hidden_layers]
    torch.manual_seed(seed)
    kind = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("cuda"):
            return getattr(transformers, f"{name}ForCausalLM")(config).train()
    finally:
        torch.set_default_dtype(kind)


def _stepping(model: Any, called: Any, optimizer: Any, case: Case) -> Step:
    draw = torch.Generator("cuda").manual_seed(7)
    ids = torch.randint(0, model.config.vocab_size, (case.batch, case.tokens), generator=draw, device="cuda")

    def step() -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = called(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def _plain(case: Case, seed: int = 0) -> Step:
    model = build(case, seed)
    return _stepping(model, model, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True), case)


def _compiled(case: Case) -> Step:
    model = build(case)
    return _stepping(model, torch.compile(model), torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True), case)


def _liger(case: Case) -> Step:
    monkey_patch = importlib.import_module("liger_kernel.transformers.monkey_patch")
    model = build(case)
    names = vars(sys.modules[type(model).__module__])
    before = dict(names)
    monkey_patch._apply_liger_kernel_to_instance(model)
    names.update(before)  # it puts its classes into transformers' module too
    return _stepping(model, model, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True), case)


def _ours(case: Case, seed: int = 0, compile: bool = False, fused: bool = True) -> Step:
    model = build(case, seed)
    ck.patch(model)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    if fused:
        optimizer = ck.optim.FusedAdamW(model.parameters(), lr=1e-4, moments_dtype=torch.bfloat16)
    return _stepping(model, torch.compile(model) if compile else model, optimizer, case)


MODELS: dict[str, Callable[[Case], Step]] = {
    "plain": _plain,
    "plain, compiled": _compiled,
    "liger": _liger,
    "cutekernels": _ours,
    "cutekernels, torch's AdamW": lambda case: _ours(case, fused=False),
    "cutekernels, compiled": lambda case: _ours(case, compile=True),
}


# ---- the loss alone -------------------------------------------------------------------------------------


def _loss(case: Case, function: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Step:
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


def _liger_loss(case: Case) -> Step:
    name = "liger_kernel.ops.cutedsl.ops.fused_linear_cross_entropy_sm90"
    apply = importlib.import_module(name).LigerFusedLinearCrossEntropySM90Function.apply
    return _loss(case, apply)


def _quack_loss(case: Case) -> Step:
    function = importlib.import_module("quack.linear_cross_entropy").chunked_linear_cross_entropy
    return _loss(case, function)


def _whole(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy((x @ weight.t()).float(), targets)


LOSSES: dict[str, Callable[[Case], Step]] = {
    "plain, compiled": lambda case: _loss(case, torch.compile(_whole, dynamic=False)),
    "liger": _liger_loss,
    "quack": _quack_loss,
    "cutekernels": lambda case: _loss(case, ck.linear_cross_entropy),
    "cutekernels, linear_logprob": lambda case: _loss(case, lambda x, w, t: -ck.linear_logprob(x, w, t).mean()),
}


# ---- timing ---------------------------------------------------------------------------------------------


def _forget() -> None:
    torch.compiler.reset()
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()


def _timed(step: Step) -> float:
    torch.cuda.synchronize()
    begin = time.perf_counter()
    step()
    torch.cuda.synchronize()
    return (time.perf_counter() - begin) * 1e6


def run(case: Case, rounds: int, stamp: dict[str, str], skip: str = "") -> Iterator[Row]:
    """A row of each contender but those with ``skip`` in their name.

    Contenders live side by side and take their samples in turns, as far as memory allows; those that it has no room
    for come after the others are gone.
    """
    every = LOSSES if case.suite == "loss" else MODELS
    waiting = {name: make for name, make in every.items() if not skip or skip not in name}
    times: dict[str, list[float]] = {}
    memory: dict[str, float] = {}
    failed: dict[str, tuple[str, str]] = {}
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
                status = "absent" if isinstance(error, ImportError) else "failed"
                failed[name] = status, f"{type(error).__name__}: {error}"[:200]
        for _ in range(rounds):
            for name, step in steps.items():
                times.setdefault(name, []).append(_timed(step))
        steps.clear()
    torch.compiler.reset()
    base = times.get("plain" if case.suite == "step" else "plain, compiled")
    for name in names:
        common = ("training", case.suite, str(case), str(case), 1.0, 0.0, name)
        if name in failed:
            yield Row(*common, *failed[name], stamp=stamp)
            continue
        found = sorted(times[name])
        yield Row(
            *common, "ok", l2="warm", rounds=len(found), median_us=median(found), p20_us=found[len(found) // 5],
            p80_us=found[-1 - len(found) // 5], memory_gib=memory[name],
            speedup=median(base) / median(found) if base else None, stamp=stamp,
        )  # fmt: skip


def curves(case: Case, stamp: dict[str, str]) -> Iterator[Row]:
    """How far loss curves lie from the plain one: of other seeds' weights, and of ours with the same weights."""

    def curve(step: Step) -> tuple[Tensor, float]:
        begin = time.perf_counter()
        losses = torch.stack([step() for _ in range(STEPS)]).cpu()
        return losses, (time.perf_counter() - begin) * 1e6 / STEPS

    plain, us = curve(_plain(case))
    spread = max(float((curve(_plain(case, seed))[0] - plain).abs().max()) for seed in (1, 2, 3))
    common = ("training", "curve", str(case), str(case), 1.0, 0.0)
    yield Row(*common, "plain", "ok", l2="warm", rounds=STEPS, median_us=us, error=0.0, stamp=stamp)
    for name, make in {name: MODELS[name] for name in ("cutekernels", "cutekernels, torch's AdamW")}.items():
        losses, us = curve(make(case))
        error = float((losses - plain).abs().max()) / spread
        yield Row(*common, name, "ok", l2="warm", rounds=STEPS, median_us=us, error=error, stamp=stamp)


# ---- command line ---------------------------------------------------------------------------------------


@app.command()
def command(
    match: Annotated[list[str] | None, typer.Option(help="Only cases with one of these in suite or sizes.")] = None,
    rounds: Annotated[int, typer.Option(min=5, help="Samples of each contender.")] = 20,
    skip: Annotated[str, typer.Option(help="Leave out contenders with this in their name: compiled, say.")] = "",
    out: Annotated[Path | None, typer.Option(help="Folder; default bench/results/<gpu>/training.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List the cases and contenders; time nothing.")] = False,
    commit: Annotated[str | None, typer.Option(help="The commit under test, where .git was left behind.")] = None,
) -> None:
    """Time steps of training and losses beside their peers, and record a row of each case and contender."""
    some = [case for case in CASES if not match or any(each in f"{case.suite} {case}" for each in match)]
    if not some:
        terminal.fail(f"no case has {' or '.join(map(repr, match or ()))} in it; --dry-run lists them", code=2)
    if dry_run:
        for case in some:
            terminal.show(f"{case.suite} {case}: {'; '.join(LOSSES if case.suite == 'loss' else MODELS)}")
        return
    try:
        gpu = gpus.lookup("auto")
    except UnknownGpu:
        terminal.fail("no CUDA device is visible, and times are only taken on one; --dry-run lists what would be timed")
    path = (out or HERE / "results" / gpu.name / "training") / "training.jsonl"
    rows: list[Row] = []
    stamp = environment.stamp(gpu.name, commit)
    for case in some:
        for row in curves(case, stamp) if case.suite == "curve" else run(case, rounds, stamp, skip):
            rows.append(row)
            write(path, rows)
            terminal.say(f"{row.suite} {row.label}: {row.contender} {row.median_us or row.reason}")
    terminal.show(table(rows))
    terminal.say(f"{len(rows)} rows in {path}")


def table(rows: list[Row]) -> Table:
    """All rows, failed ones too."""
    shown = Table("suite", "case", "contender", title=f"training on {rows[0].stamp.get('gpu', '?')}, wall time")
    for column in ("median ms", "p20 to p80", "GiB", "speedup", "error"):
        shown.add_column(column, justify="right")
    shown.add_column("reason", overflow="fold")
    for r in rows:
        times = [us / 1e3 for us in (r.median_us, r.p20_us, r.p80_us) if us is not None]
        spread = f"{times[1]:.2f} to {times[2]:.2f}" if len(times) == 3 else ""
        numbers = ["" if x is None else f"{x:.2f}" for x in (r.memory_gib, r.speedup, r.error)]
        shown.add_row(
            r.suite, r.label, r.contender, f"{times[0]:.2f}" if times else r.status, spread, *numbers, r.reason
        )
    return shown
