"""Problems of every number of tokens from a few that were recorded, and the choices that calls take of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace

import pytest

from cutekernels import dispatch
from cutekernels import gpu as gpus
from cutekernels.lengths import Chosen, Line, Posed, lines
from cutekernels.ops import registry

H200 = gpus.lookup("h200")


def posed(*texts: str) -> list[Posed]:
    found = []
    for text in texts:
        name, _, problem = text.partition(" ")
        op = registry.get(name)
        found.append((op, op.Problem.parse(problem)))
    return found


def growing(t: int) -> list[Posed]:
    return posed(f"rms_norm rows={t} cols=64", f"gemm m={3 * t + 8} n=128 k=64", f"gemm m={t} n=128 k=64")


def with_a_step(t: int) -> list[Posed]:
    return posed(f"gemm m={t} n=128 k=64") if t <= 17 else posed(f"gemm m={t} n=64 k=64", f"silu_mul rows={t} cols=64")


def by_alignment(t: int) -> list[Posed]:
    return posed(f"gemm m={t} n=64 k=64 out_align={8 if t % 8 == 0 else 1}")


def padded(t: int) -> list[Posed]:
    return posed(f"silu_mul rows={-(-t // 16) * 16} cols=64")


def alone(t: int) -> list[Posed]:
    return posed("gemm m=1 n=64 k=64 b_major=k" if t == 1 else f"gemm m={t} n=64 k=64", "silu_mul rows=1 cols=64")


@pytest.mark.parametrize("record", [growing, with_a_step, by_alignment, padded, alone])
def test_lines_have_the_problems_of_every_number_of_tokens(record: Callable[[int], Sequence[Posed]]) -> None:
    asked = []

    def recorded(t: int) -> Sequence[Posed]:
        asked.append(t)
        return record(t)

    found = lines(recorded, 1, 100)
    for t in range(1, 101):
        for op, p in record(t):
            assert any(line.op == op.name and line.tokens_of(p) is not None for line in found), (t, str(p))
    assert len(asked) == len(set(asked))
    if record in (growing, with_a_step, alone):
        assert len(asked) <= 20
        assert len(found) == {growing: 6, with_a_step: 4, alone: 3}[record], "one token stands alone"


def test_a_problem_beside_a_line_is_not_on_it() -> None:
    (_, first), (_, other) = posed("gemm m=10 n=64 k=64", "gemm m=12 n=64 k=128")
    line = Line("gemm", first, (("m", 2),), 5, 8)
    assert [line.tokens_of(line.at(t)) for t in (5, 6, 8)] == [5, 6, 8]
    for p in (first.replace(m=11), first.replace(m=8), first.replace(m=18), other):
        assert line.tokens_of(p) is None, str(p)
    assert [(part.low, part.high, str(part.first)) for part in line.parts(3)] == [
        (5, 7, "m=10 n=64 k=64"), (8, 8, "m=16 n=64 k=64"),
    ]  # fmt: skip


def test_calls_take_what_was_chosen_until_winners_are_read_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    op = registry.get("silu_mul")
    first = op.Problem.parse("rows=1 cols=512")
    one, other = [str(c) for c in op.valid(first, H200)][:2]
    monkeypatch.setattr(gpus, "detect", lambda device=None: H200)
    monkeypatch.setattr(dispatch.compiler, "get", lambda op, p, c, gpu: SimpleNamespace())
    monkeypatch.setattr(type(op), "bind", lambda self, p, c, kernel: kernel)
    dispatch.reload()
    line = Line("silu_mul", first, (("rows", 1),), 1, 64)
    dispatch.choose_ahead(H200, [Chosen(line, [1, 10], [(one, "default"), (other, "nearest")])])
    try:
        for rows, config, origin in ((1, one, "default"), (9, one, "default"), (10, other, "nearest")):
            plan = dispatch.plan(op, first.replace(rows=rows), 0)
            assert (str(plan.config), plan.origin) == (config, origin)
        assert str(dispatch.plan(op, first.replace(rows=9), 0, other).config) == other, "the caller's own"
        assert dispatch.plan(op, first.replace(rows=65), 0).note != "chosen by warmup"
    finally:
        dispatch.reload()
    assert dispatch.plan(op, first.replace(rows=9), 0).note != "chosen by warmup"
    dispatch.reload()
