"""``kv_append``'s kernel compiled without a GPU: its code, its resources, and what each knob changes."""

from __future__ import annotations

import random
import re
import subprocess
import tempfile

import pytest

pytest.importorskip("triton")

from cutekernels import gpu
from cutekernels.backends.cubin import cuobjdump
from cutekernels.ops.kv_append.op import KV_APPEND, KvAppendConfig, KvAppendProblem
from tests.triton_compiled import H200, TARGETS, accesses, built, check_knobs, check_resources, program

PREFILL = KvAppendProblem(1, 2048, 8, 128, 32, 128, page_size=16)


@pytest.mark.parametrize("spec", TARGETS, ids=lambda g: g.target)
def test_compiles_for_every_architecture(spec: gpu.GpuSpec) -> None:
    """The last problem of the suite by default, and another by a random config."""
    rng = random.Random(spec.name)
    last, other = (KvAppendProblem.parse(text) for text in (KV_APPEND.suite[-1], rng.choice(KV_APPEND.suite[:-1])))
    check_resources(KV_APPEND, last, KV_APPEND.default(last, spec), spec)
    check_resources(KV_APPEND, other, rng.choice(list(KV_APPEND.valid(other, spec))), spec)


@pytest.mark.parametrize(
    "words", ["", "interleaved=1", "dtype=fp32", "gathered=1 page_size=64", "counted=1", "cache=fp8"]
)
def test_the_largest_tiles_do_not_spill(words: str) -> None:
    problem = KvAppendProblem.parse(f"batch=1 seq=2048 heads_q=32 head_dim=192 rotary=128 heads_kv=8 {words}")
    worst = max(KV_APPEND.valid(problem, H200), key=lambda c: (c.tokens * c.heads * c.block / c.warps, c.tokens))
    check_resources(KV_APPEND, problem, worst)


def test_every_knob_changes_the_code_or_the_grid() -> None:
    base = KvAppendConfig(2, 8, 64, 4)
    changed = check_knobs(KV_APPEND, PREFILL, base)
    assert changed.keys() | {"block"} == {"", *KvAppendConfig.space()}  # a block follows from the number of channels


@pytest.mark.parametrize(
    ("words", "width"), [("", "v4.b32"), ("interleaved=1", "v4.b32"), ("align=8", "v2.b32"), ("align=4", "b32")]
)
def test_accesses_are_as_wide_as_alignment_allows(words: str, width: str) -> None:
    """Rows are accessed as wide as alignment allows; lengths, pages and tickets are single words."""
    problem = KvAppendProblem.parse(f"{PREFILL} {words}")
    spec = gpu.lookup("h200" if words in ("", "align=4") else "rtx5090")
    artifact = built(KV_APPEND, problem, KV_APPEND.default(problem, spec), spec)
    found = accesses(artifact.ptx)
    assert found == {width, "b32"}
    assert artifact.facts.registers <= 128


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


def test_compiled_code_does_not_depend_on_extents() -> None:
    config = KvAppendConfig(1, 4, 64, 1)
    other = KvAppendProblem(3, 77, 4, 250, 5, 122, page_size=16, align=2)
    assert program(KV_APPEND, PREFILL.replace(align=2), config) == program(KV_APPEND, other, config)
