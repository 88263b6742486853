"""``python -m bench host`` without a GPU: what it lists, and rows of small cases in every way."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from bench import host
from tests.command_line import invoke


def test_a_dry_run_lists_cases_and_contenders() -> None:
    listed = invoke(host.app, "--dry-run", "--match", "rms_norm", "--match", "attention").output
    assert listed.splitlines()[0] == "rms_norm: torch, liger, cutekernels"
    assert listed.count("torch, flash-attn-4, cutekernels") == 2


def test_a_case_has_rows_in_all_of_its_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "CALLS", 2)
    monkeypatch.setattr(host, "CHAIN", 2)
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    monkeypatch.setattr(torch.compiler, "reset", lambda: None)
    made: Any = host._rows
    monkeypatch.setattr(host, "_rows", lambda *shape, rows=512, **how: made(*shape, rows=4, **how))
    some = [case for case in host.cases() if case.op in ("rms_norm", "rope")]
    rows = [*host.run(some, 1, torch.device("cpu"), torch.float32, {"gpu": "cpu"})]
    timed = {(r.op, r.problem) for r in rows if r.contender == "cutekernels" and r.status == "ok" and r.median_us}
    ways = {"rms_norm": ("no_grad", "forward", "backward", "out", "graph"), "rope": ("no_grad", "forward", "backward")}
    assert timed == {(op, way) for op, own in ways.items() for way in own}
    counts = [r.config for r in rows if r.contender == "cutekernels" and r.problem in ("no_grad", "forward")]
    assert len(counts) == 4 and all(int(c.removeprefix("entered=")) > 1 for c in counts)
    assert {r.status for r in rows if r.contender != "cutekernels"} <= {"ok", "absent"}
    assert host.table(rows).row_count == len(timed)


def test_functions_of_the_package_are_counted() -> None:
    assert host.entered(partial(torch.zeros, 2)) == 0
    assert host.entered(partial(host.ck.silu_mul, torch.zeros(2, 4), torch.zeros(2, 4))) > 1
