"""Each op's Triton kernel moves as many bytes at once as the problem's ``align`` promises."""

from __future__ import annotations

import re
from typing import Any

import pytest

from cutekernels.ops import registry
from cutekernels.ops.shared.laid_out import LaidOut
from cutekernels.ops.shared.triton_op import TritonOp
from tests.interpreted import H200, in_triton
from tests.shared.test_triton_compiled import each
from tests.triton_compiled import accesses, built

WIDTHS = {16: "v4.b32", 8: "v2.b32", 4: "b32"}
LAID_OUT = [op for op in registry.OPS if isinstance(op, TritonOp) and issubclass(op.Problem, LaidOut)]


def narrow(op: Any, problem: Any) -> set[str]:
    """Loads ("ld") and stores ("st") that are narrower than ``problem`` promises.

    By default, or else where a thread has most elements. A copy to shared memory counts as a load.
    """
    found, width, configs = {"ld", "st"}, WIDTHS[problem.align], in_triton(op, problem)
    for config in (op.default(problem, H200), max(configs, key=each)):
        if found and config in configs:
            ptx = built(op, problem, config).ptx
            found -= {kind for kind in found if width in accesses(ptx, kind)}
            found -= {"ld"} if re.search(rf"cp\.async\.c[ag]\.\S+ .*, 0x{problem.align:x}\b", ptx) else set()
    return found


def aligned(op: Any) -> Any:
    """The first problem with the longest rows, of those of its suite with 16-bit elements aligned to 16 bytes."""
    problems = [op.Problem.parse(text) for text in op.suite]
    wide = [p for p in problems if p.align == 16 and getattr(p, "layout", "") != "strided" and p.itemsize == 2]
    return max(wide, key=lambda p: getattr(p, p.aligns_rows or "", 0))


# What no row of aligned elements is: sums, and single values for a row.
NARROW = {
    "column_sum": {"st"},
    "column_sum_pair": {"st"},
    "logit_statistics": {"st"},
    "moe_route": {"st"},
    "moe_route_backward": {"ld"},
}


@pytest.mark.parametrize("align", [16, 8])
@pytest.mark.parametrize("op", LAID_OUT, ids=lambda op: op.name)
def test_accesses_are_as_wide_as_the_problem_promises(op: Any, align: int) -> None:
    assert narrow(op, aligned(op).replace(align=align)) == NARROW.get(op.name, set())


def test_an_op_that_does_not_say_how_its_rows_end_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    op = registry.get("moe_gather")
    monkeypatch.setattr(op.Problem, "aligns_rows", None)
    assert narrow(op, aligned(op).replace(top_k=3)) == {"ld", "st"}
