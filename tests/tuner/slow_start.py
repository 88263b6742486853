"""A toy GPU's processes with the delays of real ones, scaled down: a start, a context, a compile, inputs, a timing."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from cutekernels.autotune.requests import Load, Measure, Prepare, Warm
from cutekernels.backends import Facts
from tests.tuner.kills import fake_worker

START_S, COMPILE_S, CONTEXT_S, LOAD_S, TIME_S = 0.4, 0.1, 0.1, 0.08, 0.04
PREPARE_S = float(os.environ.get("TOY_PREPARE_S", "0.05"))
time.sleep(START_S)

_context = False


def compile_slowly(request: tuple[str, str, str, Any]) -> Facts:
    """A compiler, whose work is said in a log."""
    _log("compile", COMPILE_S, " ".join(request[:3]))
    return Facts(64, 0, 1024)


def measure_slowly(request: Warm | Prepare | Load | Measure) -> Any:
    """A worker; final rounds, as the real ones, take longer."""
    global _context
    if not _context:
        _log("context", CONTEXT_S)
        _context = True
    if isinstance(request, Prepare):
        _meet("preparing")
        _log("prepare", PREPARE_S, request.problem)
    if isinstance(request, Load):
        _meet("loading")
        _log("load", LOAD_S, request.measure.prepare.problem)
    if isinstance(request, Measure):
        _log("time", TIME_S * (2 if request.final else 1), request.prepare.problem)
    return fake_worker(request)


def _log(what: str, seconds: float, text: str = "") -> None:
    """A line of work done: what, the process, when it began and ended, on what."""
    began = time.monotonic()
    time.sleep(seconds)
    with open(os.environ["TOY_LOG"], "a") as file:
        file.write(f"{what} {os.getpid()} {began} {time.monotonic()} {text}\n")


def _meet(what: str) -> None:
    """Waits until as many processes are at it as ``TOY_MEET`` says, however slow the machine."""
    count, end = int(os.environ.get("TOY_MEET", "1")), time.monotonic() + 60
    folder = Path(f"{os.environ['TOY_LOG']}.{what}")
    folder.mkdir(exist_ok=True)
    (folder / str(os.getpid())).touch()
    while len(list(folder.iterdir())) < count:
        assert time.monotonic() < end, "alone"
        time.sleep(0.01)
