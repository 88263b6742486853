"""A toy GPU's processes with the delays of real ones, scaled down: a start, a compile, inputs, a measurement."""

from __future__ import annotations

import os
import time
from typing import Any

from cutekernels.autotune.runtime import Measure, Prepare
from cutekernels.backends import Facts
from tests.tuner.kills import fake_worker

START_S, COMPILE_S, MEASURE_S = 0.6, 0.3, 0.05
time.sleep(START_S)


def compile_slowly(request: tuple[str, str, str, Any]) -> Facts:
    """A compiler, whose work is said in a log."""
    _log("compile", COMPILE_S, " ".join(request[:3]))
    return Facts(64, 0, 1024)


def measure_slowly(request: Prepare | Measure) -> Any:
    """A worker; final rounds, as the real ones, take longer."""
    _log("prepare" if isinstance(request, Prepare) else "measure", MEASURE_S)
    return fake_worker(request)


def _log(what: str, seconds: float, text: str = "") -> None:
    time.sleep(seconds)
    with open(os.environ["TOY_LOG"], "a") as file:
        file.write(f"{what} {seconds} {os.getpid()} {text}\n")
