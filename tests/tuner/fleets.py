"""The command line of ``tune`` on four toy GPUs, with real processes: ``python -m tests.tuner.fleets JOB ...``."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from typing import Any

from cutekernels.backends import Facts
from tests.tuner import kills
from tests.tuner.toys import TOY

MEASURE_S = float(os.environ.get("TOY_MEASURE_S", "0.01"))


def fake_compile(request: tuple[str, str, str, Any]) -> Facts:
    """A compiler without a cache: shards of one machine would wait for each other's locks."""
    return Facts(64, 0, 1024)


def fake_worker(request: Any) -> Any:
    """The toy GPU; says on which one it ran by a file named after it."""
    time.sleep(MEASURE_S)
    seen = os.environ.get("TOY_SEEN")
    if seen:
        with open(os.path.join(seen, os.environ.get("CUDA_VISIBLE_DEVICES", "none")), "a") as file:
            file.write(f"{os.getpid()}\n")
    return kills.fake_worker(request)


if __name__ == "__main__":
    from cutekernels.autotune import (
        cli,
        fleet,
        job,
        ray_fleet,
        runtime,
    )  # here, for the many processes that need none of them

    kills.without_a_driver()
    fleet.visible = lambda: ["0", "1", "2", "3"]
    job._find_op = lambda name: TOY
    runtime.COMPILE_TARGET = "tests.tuner.fleets:fake_compile"
    runtime.WORKER_TARGET = "tests.tuner.fleets:fake_worker"
    ray_fleet.SERVICE = "tests.tuner.rays:service"
    tempfile.tempdir = None
    cli.app(sys.argv[1:])
