"""Memory of streams and of captured launches, on the CPU: streams and captures are told of, not there."""

from __future__ import annotations

import threading
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from cutekernels.ops.shared import per_stream
from cutekernels.ops.shared.per_stream import PerStream, Reserve

zeros, empty = torch.zeros, torch.empty


@pytest.fixture
def at(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Where the caller is: ``device``, ``stream``, ``capturing``."""
    here = SimpleNamespace(device=0, stream=11, capturing=False, waited=0)

    def wait() -> None:
        here.waited += 1

    monkeypatch.setattr(torch.cuda, "current_device", lambda: here.device)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: here.capturing)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(synchronize=wait))
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    monkeypatch.setattr("cutekernels.torch_names.current_stream", lambda _: here.stream)
    # What there is of a real GPU's stays as it is.
    monkeypatch.setattr(per_stream, "_tickets", Reserve(1024))
    monkeypatch.setattr(torch, "zeros", lambda *shape, device, **options: zeros(*shape, **options))
    monkeypatch.setattr(torch, "empty", lambda *shape, device, **options: empty(*shape, **options))
    return here


def test_launches_of_a_stream_share_and_captured_ones_do_not(at: SimpleNamespace) -> None:
    made: list[str] = []

    def make(kind: str) -> str:
        made.append(kind)
        return f"{kind} {len(made)}"

    shared = PerStream(lambda: make("fresh"), lambda: make("captured"))
    assert shared.get() == shared.get() == "fresh 1"
    at.stream = 12
    assert shared.get() == "fresh 2"
    at.device = 1
    assert shared.get() == "fresh 3"
    at.capturing = True
    assert (shared.get(), shared.get()) == ("captured 4", "captured 5")
    at.device, at.stream, at.capturing = 0, 11, False
    assert shared.get() == "fresh 1"


def test_what_is_kept_is_made_on_another_thread(at: SimpleNamespace) -> None:
    """A graph's memory pool takes what its own thread allocates."""
    shared = PerStream(threading.get_ident, threading.get_ident)
    assert shared.get() != threading.get_ident()
    at.capturing = True
    assert shared.get() == threading.get_ident()


def test_a_reserve_is_taken_in_turn(at: SimpleNamespace) -> None:
    """Each device's own, allocated once and waited for; what no longer fits begins anew."""
    reserve = Reserve(8)
    reserve.prepare()
    reserve.prepare()
    assert at.waited == 1
    first, second, third = reserve.take(3), reserve.take(3), reserve.take(3)
    assert [t.storage_offset() for t in (first, second, third)] == [0, 3, 0]
    assert first.dtype == torch.int32
    assert not torch.cat((first, second)).any()
    first.fill_(7)
    assert third.tolist() == [7, 7, 7], "the same memory"
    at.device = 1
    assert not reserve.take(8).any()
    assert at.waited == 2


def test_the_workspaces_of_splits(at: SimpleNamespace) -> None:
    workspace = per_stream.StreamWorkspace(5, 2)
    partials, tickets = workspace.get()
    assert (len(partials), tickets.dtype, tickets.tolist()) == (5, torch.int32, [0, 0])
    assert all(a is b for a, b in zip(workspace.get(), (partials, tickets), strict=True))
    at.capturing = True
    captured = [workspace.get()[1] for _ in range(2)]
    assert len({t.data_ptr() for t in (tickets, *captured)}) == 3
    assert [len(t) for t in captured] == [2, 2]
