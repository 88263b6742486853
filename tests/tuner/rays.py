"""A toy GPU for Ray's actors: the law of ``toys.py`` with real time. Environment variables plan its failures."""

from __future__ import annotations

import os
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from cutekernels import environment
from cutekernels.autotune.requests import Measure, Outcome, Prepare
from cutekernels.autotune.turns import Turns
from cutekernels.backends import Facts
from cutekernels.compilers import Compile
from cutekernels.db.storage.store import Environment
from cutekernels.gpu import lookup
from cutekernels.isolate import ChildDied
from tests.tuner.toys import DEFAULT, ToyConfig, ToyMachine

CRASHES = ToyConfig(32, 8, True)


def service(jobs: int, lanes: int | None) -> ToyService:
    """Named by ``ray_fleet.SERVICE`` in the tests."""
    return ToyService()


class ToyService:
    """One logical GPU. The first process that finds ``$TOY_HOME/die`` at its fifth measurement takes it and dies.

    Where there is a folder ``$TOY_HOME/meet``, nothing is measured until four are about to.
    """

    def __init__(self) -> None:
        self.home = Path(os.environ["TOY_HOME"])
        self.gpu = lookup(os.environ.get("TOY_KIND", "h200"))
        own = Environment.of(environment.collect())
        other = (self.home / "other version").exists()
        self.environment = replace(own, driver="580.1", version="0.0.1" if other else own.version)
        self.width = 2
        self.machine = ToyMachine(noise=0.0005)
        self.threads = ThreadPoolExecutor(2)
        self.lanes, self.turns = [self, self], Turns()
        self.seen = os.environ.get("CUDA_VISIBLE_DEVICES", "none")
        (self.home / f"gpu {self.seen} of {os.environ.get('TOY_KIND', '')}").touch()

    def compile(self, request: Compile) -> Future[Facts]:
        return self.threads.submit(lambda: Facts(64, 0, 1024))

    def prepare(self, request: Prepare) -> None:
        pass

    def refresh(self) -> None:
        pass

    def close(self) -> None:
        pass

    def measure(self, request: Measure) -> dict[str, Outcome]:
        with self.turns.alone():
            return self._timed(request)

    def _timed(self, request: Measure) -> dict[str, Outcome]:
        time.sleep(float((self.home / "measure_s").read_text()))
        if (meet := self.home / "meet").exists():
            (meet / str(os.getpid())).touch()
            end = time.monotonic() + 100
            while len(list(meet.iterdir())) < 4:
                assert time.monotonic() < end, "fewer than four GPUs are at work"
                time.sleep(0.01)
        if len(self.machine.measured) == 4:
            try:
                (self.home / "die").unlink()
            except FileNotFoundError:
                pass
            else:
                os._exit(1)
        if str(CRASHES) in request.configs and str(DEFAULT) != request.configs[-1] and request.prepare.seed == 0:
            raise ChildDied("toy", -11, "segfault")
        return self.machine.measure(request)
