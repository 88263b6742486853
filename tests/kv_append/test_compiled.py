"""``kv_append``'s kernel compiled without a GPU: its code, its resources, and what each knob changes."""

from __future__ import annotations

import re
import subprocess
import tempfile

import pytest

pytest.importorskip("triton")

from cutekernels import gpu
from cutekernels.backends.cubin import cuobjdump
from cutekernels.ops.kv_append.op import KV_APPEND, KvAppendProblem
from tests.triton_compiled import H200, TARGETS, built

PREFILL = KvAppendProblem(1, 2048, 8, 128, 32, 128, page_size=16)


@pytest.mark.parametrize("whole", [False, True])
def test_the_length_is_read_by_one_thread_which_has_it_before_a_ticket_is_taken(whole: bool) -> None:
    """The ticket has no fence: one thread reads the length and hands it on, so it cannot change before it is read."""
    for target in TARGETS[whole::2]:
        problem = PREFILL.replace(page_size=0)
        config = KV_APPEND.default(problem, target).replace(whole=whole)
        ptx = built(KV_APPEND, problem, KV_APPEND.check(problem, config, target), target).ptx
        ticket = ptx.index("atom.")
        assert "relaxed" in ptx[ticket : ticket + 40]
        assert not re.search(r"fence|membar|acq_rel", ptx)
        assert len(re.findall(r"ld\.global\.b32", ptx)) == 1
        read = re.search(r"@%p\d+ ld\.global\.b32 \{ (%r\d+) \}", ptx)
        assert read and read.end() < ptx.index("st.shared") < ptx.index("bar.sync") < ptx.index("ld.shared") < ticket


@pytest.mark.parametrize("spec", TARGETS, ids=lambda g: g.target)
def test_the_assembler_keeps_the_length_ahead_of_the_ticket(spec: gpu.GpuSpec) -> None:
    """Programs of one warp have no barrier, so the exchange within the warp must come between."""
    problem = KvAppendProblem.parse("batch=64 seq=1 heads_q=32 rotary=128 heads_kv=8 head_dim=128")
    config = KV_APPEND.default(problem, spec)
    assert config.warps == 1
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(built(KV_APPEND, problem, config, spec).binary.cubin)
        file.flush()
        code = subprocess.check_output([cuobjdump(), "--dump-sass", file.name], text=True)
    read, handed_on, ticket = (code.index(name) for name in (" LDG.E R", " REDUX.MAX", " ATOMG.E.ADD"))
    assert read < handed_on < ticket


def test_rows_are_on_their_way_before_the_length_is_waited_for() -> None:
    for whole in (False, True):
        config = KV_APPEND.default(PREFILL, H200).replace(whole=whole)
        ptx = built(KV_APPEND, PREFILL, config).ptx
        assert ptx.index("ld.global.v4") < ptx.index("bar.sync")
