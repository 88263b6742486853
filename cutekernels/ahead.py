"""Kernels of every number of tokens, chosen and compiled before calls meet them.

A model's calls are recorded for a few numbers of tokens (``ops/shared/calls.py``), which gives those of all
others (``lengths.py``). Processes choose the configs of all and compile the distinct kernels side by side into the disk
cache; what was chosen is kept there too, so that another process, or another node, begins with both.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import as_completed
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields, is_dataclass
from importlib import import_module
from pathlib import Path
from threading import Thread, get_ident
from typing import TYPE_CHECKING, Any, Protocol

from cutekernels import compile as compiler
from cutekernels import dispatch, rates, settings
from cutekernels import gpu as gpus
from cutekernels.backends import own_directory
from cutekernels.compilers import Compile, Compilers, Wanted, affordable, choose, kernels, side_by_side, together
from cutekernels.db.storage import snapshot
from cutekernels.environment import package_version
from cutekernels.errors import CacheUnusable, CompileError, CuteKernelsError, UnsupportedProblem
from cutekernels.gpu import GpuSpec, sibling
from cutekernels.isolate import ChildFailure
from cutekernels.lengths import Chosen, Line, Posed, lines
from cutekernels.op import Op
from cutekernels.ops import registry

if TYPE_CHECKING:
    import torch

    from cutekernels.ops.shared.calls import Recorder

_log = settings.logger("compile")
_CHUNK = 256  # numbers of tokens that a process chooses for at a time


@dataclass(frozen=True)
class Warmed:
    """The result of :func:`cutekernels.warmup` for a model.

    Attributes:
        problems: that its calls pose, over all numbers of tokens.
        kernels: that they need.
        compiled: those that were not in the disk cache.
        seconds: of the whole call.
    """

    problems: int
    kernels: int
    compiled: int
    seconds: float

    def __str__(self) -> str:
        return f"{self.kernels} kernels for {self.problems} problems, {self.compiled} compiled in {self.seconds:.1f} s"


def prepare(
    model: torch.nn.Module | Recorded,
    tokens: tuple[int, int],
    gpu: GpuSpec,
    jobs: int | None = None,
    progress: bool = True,
) -> Warmed:
    """Chooses for every problem of a model's calls, compiles what is missing, and has calls of this process take the
    choices.

    Raises:
        UnsupportedProblem: the model makes no call of this library's ops.
        CompileError: kernels do not compile; all others are ready then.
        CacheUnusable: no kernel could be compiled.
    """
    begin = time.monotonic()
    place = _place(model, tokens, gpu)
    compiled = 0
    chosen, keys = _read(place)
    if not chosen or not all(map(compiler.ready, keys)):
        chosen, keys, compiled = _choose_and_compile(lines_of(model, *tokens), gpu, jobs, progress)
        _write(place, chosen, keys)
    dispatch.choose_ahead(gpu, chosen)
    problems = sum(each.line.high - each.line.low + 1 for each in chosen)
    return Warmed(problems, len(keys), compiled, time.monotonic() - begin)


def compile_first(
    model: torch.nn.Module | Recorded, calls: object, record: Callable[[], Sequence[Posed]], device: torch.device
) -> None:
    """Compiles side by side what a model's first calls, as recorded, need and nobody has compiled: one after the other
    within the calls they would take as long as all of them together. What fails here is left to the calls.

    ``calls`` says which they are, so that a process which makes them again finds that all is there. A process that has
    warmed up any model for this GPU compiles no first calls.
    """
    loading = Thread(target=_import_dsl, daemon=True)
    try:
        spec = gpus.detect(device.index)
        place = _place(model, calls, spec)
        _, keys = _read(place)
        if dispatch.has_choices(spec) or (keys and all(map(compiler.ready, keys))):
            return
        loading.start()
        needed = _kernels_of(record(), spec)
        wanted = [request for key, (request, _) in needed.items() if not compiler.ready(key)]
        if len(wanted) > 1:
            _log.info(
                "%d kernels of first calls are compiled side by side; cutekernels.warmup does so ahead", len(wanted)
            )
        side_by_side(wanted, here=True)
        _write(place, [], [*needed])
    except Exception as error:  # noqa: BLE001  a model's own code on fakes may raise anything, and the call says it better
        level = logging.INFO if isinstance(error, CuteKernelsError) else logging.WARNING
        _log.log(level, "kernels of first calls are compiled as they meet them: %s: %s", type(error).__name__, error)
    finally:
        if loading.ident is not None:
            loading.join()


def _import_dsl() -> None:
    """Half a second, beside the recording; whoever compiles says what is wrong with it."""
    with suppress(Exception):
        import_module("cutlass.cute")


def compile_missing(posed: Sequence[Posed], gpu: GpuSpec, jobs: int | None = None) -> dict[Posed, CompileError]:
    """Puts the kernels of all problems into the disk cache; what went wrong, by the problem that needs the kernel."""
    missing = [each for key, each in _kernels_of(posed, gpu).items() if not compiler.ready(key)]
    failures = zip(missing, side_by_side([request for request, _ in missing], jobs), strict=True)
    return {pair: error for (_, users), error in failures if error is not None for pair in users}


def _kernels_of(posed: Sequence[Posed], gpu: GpuSpec) -> dict[str, tuple[Compile, list[Posed]]]:
    """The kernels of all problems by their names in the disk cache, each with the problems that need it."""
    found: dict[str, tuple[Compile, list[Posed]]] = {}
    for op, p in dict.fromkeys(posed):
        for key, request in kernels(op, p, dispatch.resolve(op, p, gpu).config, gpu).items():
            found.setdefault(key, (request, []))[1].append((op, p))
    return found


def _choose_and_compile(
    found: Sequence[Line], gpu: GpuSpec, jobs: int | None, progress: bool
) -> tuple[list[Chosen], list[str], int]:
    """The choices, the names of all kernels, and how many were compiled."""
    pieces: dict[Line, list[Chosen]] = {line: [] for line in found}
    beside: list[Chosen] = []
    wanted: Wanted = {}
    with Compilers(jobs or affordable()) as processes, _bar(progress) as advance:
        asked = {processes.submit((part, gpu)): (line, part) for line in found for part in line.parts(_CHUNK)}
        for future in as_completed(asked):
            line, part = asked[future]
            try:
                (piece, *more), needed = future.result()
            except ChildFailure:  # it is only slower here
                (piece, *more), needed = choose((part, gpu))
            pieces[line].append(piece)
            beside += more
            wanted |= needed
        missing = [request for key, request in wanted.items() if not compiler.ready(key)]
        failures = side_by_side(missing, processes=processes, advance=lambda: advance(len(missing)))
    failed = [failure for failure in failures if failure is not None]
    if failed:
        raise together(failed)
    return [*(_join(line, pieces[line]) for line in found), *beside], sorted(wanted), len(missing)


def _join(line: Line, pieces: list[Chosen]) -> Chosen:
    """The choices of a line from those of its parts."""
    whole = Chosen(line, [], [])
    for piece in sorted(pieces, key=lambda each: each.line.low):
        for begin, config in zip(piece.begins, piece.configs, strict=True):
            if not whole.configs or whole.configs[-1] != config:
                whole.begins.append(begin)
                whole.configs.append(config)
    return whole


# ---- calls of a model -----------------------------------------------------------------------------------


class Recorded(Protocol):
    """A model that knows the problems of its calls: a Decoder."""

    def lines(self, low: int, high: int) -> list[Line]:
        """Those of prompts of ``low`` to ``high`` tokens."""

    def identity(self) -> object:
        """All that decides what they are; its ``repr`` is the same in every process."""

    @property
    def device(self) -> torch.device:
        """The device that computes it."""


def device_of(model: torch.nn.Module | Recorded) -> torch.device:
    """The device that computes a model."""
    return next(iter(model.parameters())).device if hasattr(model, "parameters") else model.device


def lines_of(model: torch.nn.Module | Recorded, low: int, high: int) -> list[Line]:
    """Problems of a model's calls; of a patched transformers model prompts of ``low`` to ``high`` tokens, each in a
    batch of one, and a token behind each.

    Raises:
        UnsupportedProblem: it makes no call of this library's ops.
    """
    import torch

    from cutekernels.ops.shared.calls import Recorder

    if not isinstance(model, torch.nn.Module):
        return model.lines(low, high)
    recorder = Recorder()
    found = lines(lambda tokens: prompt_of(model, recorder, 1, tokens), low, high)
    if not found:
        raise UnsupportedProblem(
            f"a call of this {type(model).__name__} runs none of this library's ops: cutekernels.patch(model) first"
        )
    return found


def prompt_of(model: torch.nn.Module, recorder: Recorder, batch: int, tokens: int) -> list[Posed]:
    """The problems of a batch of prompts of a patched transformers model, and of a token behind each."""
    import torch

    with _take_fakes_back(model), recorder.calls() as noted:
        ids = torch.zeros(batch, tokens, dtype=torch.int64, device=device_of(model))
        with _alike_once(model):
            kept = getattr(model(ids), "past_key_values", None)
        if kept is not None:
            with _alike_once(model):
                model(ids[:, :1], past_key_values=kept)
    return noted


@contextmanager
def _take_fakes_back(model: torch.nn.Module) -> Iterator[None]:
    """Gives each module its own attributes and buffers back, in place of the fakes that a call may leave there."""
    before = [(held, dict(held)) for module in model.modules() for held in (vars(module), module._buffers)]
    try:
        yield
    finally:
        for held, then in before:  # what other threads have set meanwhile stays
            for name in [name for name, value in held.items() if hasattr(value, "fake_device")]:
                if name in then:
                    held[name] = then[name]
                else:
                    del held[name]


@contextmanager
def _alike_once(model: Any) -> Iterator[None]:
    """Lets the first of layers alike compute alone; the others return what it returned."""
    import torch

    changed = []
    for layers in [m for m in model.modules() if isinstance(m, torch.nn.ModuleList)]:
        returned: dict[Any, Any] = {}
        for layer in layers:
            if len(layers) > 1 and "forward" not in vars(layer):
                layer.forward = _first_of(layer.forward, _kind(layer), returned)
                changed.append(layer)
    try:
        yield
    finally:
        for layer in changed:
            del layer.forward


def _first_of(forward: Callable[..., Any], kind: Any, returned: dict[Any, Any]) -> Callable[..., Any]:
    def once(*args: Any, **options: Any) -> Any:
        if not dispatch.recording():  # a real call, of another thread
            return forward(*args, **options)
        place = kind, tuple(tuple(t.shape) for t in args if hasattr(t, "shape"))
        if place not in returned:
            returned[place] = forward(*args, **options)
        return returned[place]

    return once


def _kind(layer: Any) -> tuple[Any, ...]:
    """Properties that layers with the same problems share: classes, plain attributes, shapes and types."""
    found: list[Any] = []
    for module in layer.modules():
        plain = {name: v for name, v in vars(module).items() if isinstance(v, bool | int | float | str)}
        plain.pop("layer_idx", None)
        tensors = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
        found.append((type(module), tuple(sorted(plain.items())), tuple((n, t.shape, t.dtype) for n, t in tensors)))
    return tuple(found)


def structure(value: Any) -> Any:
    """``value``, of tensors, modules, dataclasses and plain values, without what tensors hold."""
    import torch

    if isinstance(value, torch.Tensor):
        return "tensor", tuple(value.shape), value.stride(), value.dtype, value.storage_offset() * value.itemsize % 16
    if isinstance(value, torch.nn.Module):
        return _kind(value)
    if is_dataclass(value):
        return type(value).__qualname__, *(structure(getattr(value, field.name)) for field in fields(value))
    if isinstance(value, dict):
        return tuple((name, structure(each)) for name, each in value.items())
    if isinstance(value, tuple | list):
        return tuple(map(structure, value))
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return getattr(value, "__qualname__", type(value).__qualname__)


# ---- what the disk cache keeps of it --------------------------------------------------------------------


def _place(model: torch.nn.Module | Recorded, calls: object, gpu: GpuSpec) -> Path:
    """The file of choices, named by all that they depend on: the model, its calls, the winners, rates, our sources."""
    own: Any = getattr(model, "identity", None)
    made_of = (
        own()
        if own is not None
        else [structure(model), str(getattr(model, "config", "")), package_version("transformers")]
    )
    known = [snapshot.snapshot_of(each.name) for each in (gpu, sibling(gpu)) if each is not None]
    winners = sorted(repr(row) for each in known for table in each.table.values() for row in table.values())
    digest = hashlib.sha256(repr([made_of, calls, str(gpu), rates.of(gpu), winners]).encode())
    digest.update(compiler.source_fingerprint(Op).encode())
    for file in sorted(Path(__file__).parent.rglob("*.py")):
        digest.update(file.read_bytes())
    return own_directory(compiler.directory().parent / "choices") / f"{digest.hexdigest()[:32]}.json"


def _read(place: Path) -> tuple[list[Chosen], list[str]]:
    """Choices and kernels' names from the file; none where it is missing or not as it was written."""
    try:
        rows, keys = json.loads(place.read_text())
        chosen = []
        for op, first, slopes, low, high, begins, configs in rows:
            line = Line(op, registry.get(op).Problem.parse(first), tuple(map(tuple, slopes)), low, high)
            chosen.append(Chosen(line, begins, [tuple(each) for each in configs]))
    except (OSError, ValueError, TypeError):
        return [], []
    return chosen, keys


def _write(place: Path, chosen: Sequence[Chosen], keys: Sequence[str]) -> None:
    rows = [[c.line.op, str(c.line.first), c.line.slopes, c.line.low, c.line.high, c.begins, c.configs] for c in chosen]
    fresh = place.with_suffix(f".{os.getpid()}-{get_ident()}")
    try:
        fresh.write_text(json.dumps([rows, keys]))
        fresh.replace(place)
    except OSError as error:
        raise CacheUnusable(f"{place} cannot be written: {error}") from error


# ---- progress -------------------------------------------------------------------------------------------


@contextmanager
def _bar(shown: bool) -> Iterator[Callable[[int], None]]:
    """A callback for one more kernel done, of so many in all: it moves a bar on a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = TextColumn("compile"), BarColumn(), MofNCompleteColumn(), TextColumn("kernels"), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True, disable=not (shown and console.is_terminal)) as bar:
        task = bar.add_task("", total=None)
        yield lambda total: bar.update(task, advance=1, total=total)
