"""A whole run on a toy GPU with real processes, locks and files, to be killed: ``python -m tests.tuner.kills DB``."""

from __future__ import annotations

import os
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from cutekernels import compile as compiler
from cutekernels import gpu as gpus
from cutekernels.autotune.job import Job, Task
from cutekernels.autotune.requests import Measure, Outcome
from cutekernels.backends import Facts
from tests.tuner.toys import H200, TOY, VALID, ToyConfig, ToyProblem, true_us

JOB = Job("kills", tuple(Task(TOY, ToyProblem(m, 64), len(VALID)) for m in (16, 32)))
TIMED = os.environ.get("TOY_TIMED", "")  # a file for the begin and the end of each measurement
WRONG = ToyConfig(128, 8, True)
BAD = ToyConfig(32, 1, False)  # does not compile


def fake_compile(request: tuple[str, str, str, Any]) -> Facts:
    """A compiler that works in the cache as the real one does: lock, temporary file, rename."""
    _op, problem, config, _gpu = request
    key = f"{abs(hash((problem, config))):032x}"[:32]
    with compiler._hold_key(key):
        with tempfile.NamedTemporaryFile(delete=False) as scrap:
            scrap.write(bytes(1000))
        time.sleep(0.01)
        if config == str(BAD):
            raise compiler.CompileError("an unsupported layout")
        compiler._replace(compiler.directory() / f"{key}.o", lambda file: file.write_text(config))
    return Facts(64, 0, 1024)


def fake_worker(request: Any) -> Any:
    """A timer: the toy GPU's law with noise; one config is wrong."""
    if not isinstance(request, Measure):
        return None
    begin = time.monotonic()
    time.sleep(0.01)
    if TIMED:
        with open(TIMED, "a") as timed:
            timed.write(f"{begin} {time.monotonic()}\n")
    noise = random.Random(time.time_ns())
    found = {}
    for text in request.configs:
        config = ToyConfig.parse(text)
        us = tuple(true_us(config) * noise.uniform(0.998, 1.002) for _ in range(request.rounds))
        found[text] = Outcome(9.0) if config == WRONG else Outcome(0.3, us)
    return found


def without_a_driver(identity: str | None = None) -> None:
    """The toy GPU, known without torch, whose import is half of what a coordinator costs."""
    gpus.detect = lambda device=None: H200  # type: ignore[assignment]
    gpus.identity = lambda device=None: identity
    gpus.one_process = lambda device=None: False


if __name__ == "__main__":
    from cutekernels.autotune import runtime  # here: the processes it starts import this module too, a dozen of them
    from cutekernels.autotune.fleet import LocalFleet
    from cutekernels.autotune.run import tune

    without_a_driver("toy")
    runtime.COMPILE_TARGET = "tests.tuner.kills:fake_compile"
    runtime.WORKER_TARGET = "tests.tuner.kills:fake_worker"
    tempfile.tempdir = None
    report = tune(JOB, "h200", db=sys.argv[1], fleet=LocalFleet(None, jobs=2, lanes=2))
    print([t.state for t in report.tasks], Path(sys.argv[1]).name)
    sys.exit(0 if report.ok else 1)
