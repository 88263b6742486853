"""Fixtures and hooks for every test: its own database and cache directory, and a GPU where it is marked ``gpu``.

Nothing here imports torch unless a test marked ``gpu`` was collected.
"""

from __future__ import annotations

import gc
import os
import re
from collections.abc import Iterator
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

import pytest

pytest.register_assert_rewrite("tests.interpreted", "tests.on_gpu", "tests.triton_compiled")

# Files that compile many kernels, judge whole sweeps or start many processes. They begin first, so that no worker is
# left with one at the end while the others idle; `make test-quick` leaves them out.
LONG = re.compile(
    "compiled|warpgroup|grouped|test_(cached|few_tiles|sinks|skinny|transformers|ray|kills|fleet|kv_append"
    "|judge|regret|backend_triton)"
)


@cache
def _has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[Any]:
    """Modules and tests live to the end: the garbage collector is off while they come, and never looks at them again.

    It took a quarter of the collection, and 0.5 s at each full pass of the tests. What they import and what ops
    remember live on as well, a million objects, so that further passes are few.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.set_threshold(50_000, 20, 20)
        gc.enable()


@pytest.hookimpl(tryfirst=True)  # before -m selects by these marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long files first. ``gpu`` tests are skipped where there is no CUDA device, whichever way they were selected."""
    items.sort(key=lambda item: LONG.search(item.path.name) is None)
    for item in items:
        if LONG.search(item.path.name):
            item.add_marker(pytest.mark.sweep)
    marked = [item for item in items if item.get_closest_marker("gpu") is not None]
    if marked and _has_cuda():
        import cutekernels.ops  # noqa: F401  registers the torch ops
        from cutekernels import compilers

        compilers.MOST = 2  # each worker of pytest may start as many for a model's first call
    else:
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(scope="session")
def _folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    parent = tmp_path_factory.mktemp("own")
    return (parent / str(number) for number in count())


@pytest.fixture(scope="session")
def _kernels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The compiled kernels of a run's GPU tests: the first worker that needs one builds it for all."""
    base = tmp_path_factory.getbasetemp()
    return (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "kernels"


@pytest.fixture(autouse=True)
def _own_database_and_cache(
    request: pytest.FixtureRequest, _folders: Iterator[Path], _kernels: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No test reads or writes the user's tuned-config database or compiled kernels.

    A test that asks for ``tmp_path`` has its own there. To name one pytest lists those of all tests before, which took
    4 ms after 3,000 of them; the others do without. GPU tests of ops and models share their kernels.
    """
    asked = "tmp_path" in request.fixturenames
    own = request.getfixturevalue("tmp_path") if asked else next(_folders)
    own.mkdir(exist_ok=asked)
    shared = request.node.get_closest_marker("gpu") and request.path.parent.name not in ("trunk", "tuner")
    monkeypatch.setenv("CUTEKERNELS_DB", str(own / "tuned.db"))
    monkeypatch.setenv("CUTEKERNELS_CACHE", str(_kernels if shared else own / "cache"))
    monkeypatch.delenv("CUTEKERNELS_LOG", raising=False)


@pytest.fixture
def one_seed() -> Iterator[None]:
    """For files of GPU tests: random numbers are the same each time."""
    import torch

    torch.manual_seed(7)
    yield
    torch.cuda.empty_cache()


@pytest.fixture
def warpgroups() -> None:
    """For files of GPU tests of warpgroup bodies."""
    from cutekernels import gpu

    if not gpu.detect().has_wgmma:
        pytest.skip("no warpgroup MMA here")


@pytest.fixture
def shipped(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty folder that stands in for ``db/shipped``: what we ship changes, a test's expectations do not.

    Calls keep what they read of it, so that is forgotten before the test and after it.
    """
    from cutekernels import dispatch
    from cutekernels.db.storage import snapshot

    folder = tmp_path_factory.mktemp("package") / "shipped"
    folder.mkdir()
    monkeypatch.setattr(snapshot, "files", lambda package: folder.parent)
    dispatch.reload()
    yield folder
    dispatch.reload()


@pytest.fixture
def launches() -> Iterator[list[str]]:
    """The launches of Triton ops called with CPU tensors: see :func:`tests.gpu_path.recorded`."""
    from tests.gpu_path import recorded

    with recorded() as seen:
        yield seen


@pytest.fixture
def narrow_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """stdout is a terminal of 80 columns without colours."""
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "dumb")
