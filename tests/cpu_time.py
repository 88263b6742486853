"""A pytest plugin: CPU seconds of each test, its fixtures and the child processes that it waited for.

``pytest -p tests.cpu_time --cpu build/cpu.tsv`` writes one line a test when it ends; ``sort -rn`` finds the dearest.
Unlike ``--durations`` the figures hold on a machine that others use. Workers of xdist report to the process that
started them.
"""

from __future__ import annotations

import functools
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest


def cpu_s() -> float:
    """CPU seconds of this process and of the children it has waited for."""
    return time.process_time() + children_s()


def children_s() -> float:
    """CPU seconds of the child processes that this one has waited for."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def least_s(code: str, *arguments: str) -> tuple[float, str]:
    """CPU seconds of a child that runs ``code``, the least of three, and what it wrote to stderr."""
    times = []
    for _ in range(3):
        begin = children_s()
        done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True)
        times.append(children_s() - begin)
    return min(times), done.stderr.strip()


@functools.cache
def yardstick_s() -> float:
    """CPU seconds of a child that imports SQLAlchemy's ORM: 0.25 on a fast idle core, 0.9 on a slow shared one."""
    return least_s("import sqlalchemy.orm")[0]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--cpu", metavar="FILE", default=None, help="write the CPU seconds of each test to FILE")


def pytest_configure(config: pytest.Config) -> None:
    sums = _Workers() if hasattr(config, "workerinput") else _Sums(config.getoption("--cpu"))
    config.pluginmanager.register(sums, "cpu-sums")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[Any]:
    item.user_properties.append(("cpu-start", cpu_s()))
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[Any]:
    report = yield
    if call.when == "teardown":
        report.user_properties = [*report.user_properties, ("cpu-end", cpu_s())]
    return report


class _Workers:
    """In a worker: says at its end what the whole process took, collection and imports included."""

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        session.config.workeroutput["cpu"] = cpu_s()  # type: ignore[attr-defined]


class _Sums:
    """In the process that prints: adds up and writes."""

    def __init__(self, path: str | None) -> None:
        self.file = Path(path).open("w", buffering=1) if path else None  # noqa: SIM115  closed at the end
        self.tests: list[float] = []
        self.workers: list[float] = []

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any, error: object) -> None:
        self.workers.append(getattr(node, "workeroutput", {}).get("cpu", 0.0))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "teardown":
            properties = dict(report.user_properties)
            self.tests.append(properties["cpu-end"] - properties["cpu-start"])
            if self.file:
                self.file.write(f"{self.tests[-1]:.2f}\t{report.nodeid}\n")

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        total, tests = sum(self.workers) if self.workers else cpu_s(), sum(self.tests)
        terminalreporter.write_line(
            f"CPU: {total:.0f} s, of which {tests:.0f} s in {len(self.tests)} tests; the rest is imports and collection"
        )
        if self.file:
            self.file.close()
