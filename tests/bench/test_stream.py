"""Streaming contenders: results, bytes moved, and the fraction that rows compute from the best of them."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from functools import reduce
from operator import xor
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from bench import rows, run, stream, workloads
from bench.baselines import Contender, Inputs
from bench.suites import Case
from cutekernels.gpu import lookup
from cutekernels.measure import Samples

H200 = lookup("h200")
SILU = Case("silu_mul", "rows=4 cols=64", "small")
# (reads, writes, words, programs that stay): a part of a block, whole blocks, more blocks than programs.
MOVES = [
    (1, 1, 16, 4),
    (2, 1, 4096 + 48, 4),
    (4, 3, 4096 * 3 + 16, 2),
    (1, 8, 1008, 1),
    (8, 1, 1008, 1),
]
READS = [(1, 0, 16, 4), (2, 0, 4096 * 3 + 16, 2)]


def _move(reads: int, writes: int, words: int, programs: int) -> list[bool]:
    """Whether each variant's results are the exclusive or of its sources, and nothing else is written."""
    if not writes:
        return _read(reads, words, programs)
    found = []
    for variant in stream.VARIANTS:
        draw = torch.Generator().manual_seed(words)
        source = torch.randint(-(1 << 31), 1 << 31, (reads, words), generator=draw, dtype=torch.int32)
        memory = torch.full((writes * words + 64,), 77, dtype=torch.int32)
        target = memory[: writes * words].view(writes, words)
        assert stream.move(variant, source, target, programs, dependent=False) is target
        expected = source[0].clone()
        for more in source[1:]:
            expected ^= more
        found.append(bool((target == expected).all() and (memory[writes * words :] == 77).all()))
    return found


def _read(reads: int, words: int, programs: int) -> list[bool]:
    """Whether the exclusive or of what each variant leaves is that of all words, and nothing else is written."""
    found = []
    for variant in stream.VARIANTS:
        draw = torch.Generator().manual_seed(words)
        source = torch.randint(-(1 << 31), 1 << 31, (reads, words), generator=draw, dtype=torch.int32)
        blocks = -(-words // variant.block)
        memory = torch.full((blocks + 64,), 77, dtype=torch.int32)
        stream.move(variant, source, memory[:blocks], programs, dependent=False)
        made = [reduce(xor, some.tolist()) for some in (source.flatten(), memory[:blocks])]
        found.append(made[0] == made[1] and bool((memory[blocks:] == 77).all()))
    return found


def test_every_variant_moves_everything_once() -> None:
    from tests.interpreted import replies

    cases = [*MOVES, *READS]
    assert replies(__file__, cases) == [[True] * len(stream.VARIANTS)] * len(cases)


def test_what_is_read_alone_has_all_bytes_of_the_case_and_a_word_for_each_block() -> None:
    case = workloads.cases("quantized_linear", "decode")[0]
    work = workloads.work(case)
    source, target = stream.arrays(case, 1, 0, torch.device("cpu"), 0)
    assert 0 <= source.nbytes - work.bytes <= 64
    assert target.dim() == 1
    assert target.numel() >= -(-source.shape[1] // min(v.block for v in stream.VARIANTS))


def test_the_arrays_hold_the_bytes_of_the_case_in_its_proportion() -> None:
    device = torch.device("cpu")
    for op, suite, dtype in (
        ("rms_norm", "llm", "bf16"),
        ("adamw_step", "sizes", "fp32"),
        ("moe_combine", "llm", "bf16"),
    ):
        case = workloads.cases(op, suite, dtype=dtype)[0]
        declared, problem = workloads.parse_case(case)
        proportion = workloads.get(op).streams
        assert proportion is not None
        reads, writes = proportion(case)
        source, target = stream.arrays(case, reads, writes, device, 0)
        least = declared.work(problem).bytes
        assert (source.shape[0], target.shape[0]) == (reads, writes)
        assert least <= source.nbytes + target.nbytes <= least + 64 * (reads + writes)
        assert source.shape[1] == target.shape[1]
        assert source.shape[1] % 16 == 0
        assert len(source.unique()) > min(1000, source.numel() // 2), "random, not zeros"


def test_streams_are_as_many_arrays_as_the_op_has() -> None:
    expected = {"rms_norm": (1, 1), "add_rms_norm": (2, 2), "silu_mul": (2, 1), "adamw_step": (4, 3)}
    for op, proportion in expected.items():
        streams = workloads.get(op).streams
        assert streams is not None
        (case, *_) = workloads.cases(op, next(iter(workloads.get(op).suites)), dtype="fp32")
        assert streams(case) == proportion
        names = [w.name for w in run.contenders(case, run.RunPlan("x", H200, {}, device="cpu"))]
        assert sum(n.startswith("streaming {}:{} (".format(*proportion)) for n in names) == len(stream.VARIANTS)


class _Clock:
    """A clock whose rounds last ``us``, one entry per prepared contender, in order."""

    def __init__(self, *us: float) -> None:
        self._us = iter(us)

    def prepare(self, launches: Sequence[Any], least_us: float) -> Any:
        us = next(self._us)

        def round_() -> float:
            return us

        round_.launches = 1  # type: ignore[attr-defined]
        return round_

    def cpu_us(self, launch: Any, *, calls: int, rounds: int) -> Samples:
        return Samples((1.0,))


def _idle(case: Case, sets: Sequence[Inputs]) -> Any:
    return [lambda: torch.empty(0) for _ in sets]


def timed(who: list[Contender], *us: float) -> list[Any]:
    """Rows of a case in which the contenders take these times."""
    clock = _Clock(*us)
    plan = run.RunPlan("llm", H200, {}, rounds=5, device="cpu", warm=True)
    return run.run_case(SILU, plan, who, run.Timer(clock.prepare, clock.cpu_us))


def test_rows_are_fractions_of_the_best_stream() -> None:
    who = [Contender(f"{stream.NAME} 2:1 ({n})", _idle, judged=False) for n in ("a", "b", "c")]
    found = timed([*who, Contender("peer", _idle, judged=False)], 12.0, 8.0, 10.0, 16.0)
    assert [r.stream_fraction for r in found] == pytest.approx([8 / 12, 1.0, 8 / 10, 0.5])


def test_without_a_stream_there_is_no_fraction() -> None:
    (row,) = timed([Contender("peer", _idle, judged=False)], 12.0)
    assert row.stream_fraction is None


def test_rows_written_before_there_were_streams_are_read(tmp_path: Any) -> None:
    found = timed([Contender("x", _idle, judged=False)], 12.0)
    path = tmp_path / "rows.jsonl"
    rows.write(path, found)
    expected = rows.read(path)
    header, *values = path.read_text().splitlines()
    old = json.loads(header)
    del old["common"]["stream_fraction"]
    path.write_text("\n".join([json.dumps(old), *values]) + "\n")
    assert rows.read(path) == expected


@pytest.mark.gpu
@pytest.mark.parametrize("case", [SILU, Case("rms_norm", "rows=32768 cols=8192", "large")], ids=lambda case: case.op)
def test_streams_on_the_gpu(case: Case) -> None:
    here = run.RunPlan("llm", lookup("auto"), {}, rounds=5)
    streams = workloads.get(case.op).streams
    assert streams is not None
    who = stream.contenders(*streams(case), here.gpu)
    found = run.run_case(case, here, who, run.Timer())
    assert [r.status for r in found] == ["ok"] * len(stream.VARIANTS), [r.reason for r in found]
    assert max(r.stream_fraction or 0 for r in found) == 1
    if case.label == "large":
        best = max(r.gbps or 0 for r in found)
        assert 0.5 * here.gpu.dram_gbps < best <= here.gpu.dram_gbps
    for reads, writes, words, programs in MOVES:
        for variant in stream.VARIANTS:
            source = torch.randint(-(1 << 31), 1 << 31, (reads, words), device="cuda", dtype=torch.int32)
            target = torch.empty(writes, words, device="cuda", dtype=torch.int32)
            stream.move(variant, source, target, programs, dependent=lookup("auto").has_pdl)
            expected = source[0].clone()
            for more in source[1:]:
                expected ^= more
            assert bool((target == expected).all()), (reads, writes, words, variant)


if __name__ == "__main__":
    print(json.dumps([_move(*case) for case in json.load(sys.stdin)]))
