"""GEMM's kernels compiled for GPUs that are not there: resources, instructions, and what each knob does to them."""

from __future__ import annotations

import random
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from cutekernels import gpu
from cutekernels.ops.products.dense import GEMM, SCHEDULES
from cutekernels.ops.products.schedules.multistage import MULTISTAGE, read_ahead, registers_per_thread
from cutekernels.ops.products.schedules.problem import GemmConfig, GemmProblem
from cutekernels.ops.products.schedules.schedule import PLAIN, extras_of
from tests import compiled
from tests.compiled import H200, TARGETS
from tests.gemm.cases import random_config

PROBLEMS = {
    "square": "m=4096 n=4096 k=4096",
    "fp16-accumulate": "m=512 n=1024 k=256 b_major=k c=n bias=fp32 activation=gelu dtype=fp16 accumulate=fp16",
    "unaligned": "m=77 n=129 k=131 a_align=1 b_align=1 out_align=1 c=n c_align=1 bias=same activation=silu dtype=fp16",
    "transposed": "m=384 n=512 k=320 batch=3 batched=1 a_major=m out_major=m c=m bias=same activation=relu",
    "wide": "m=130 n=200 k=64 wide=1 a_align=2 b_align=4 out_align=8 c=m c_align=2 activation=gelu_tanh",
}


@cache
def built(problem: GemmProblem, config: GemmConfig, target: str) -> Any:
    return GEMM.build(problem, config, gpu.lookup(target))


@cache
def program(problem: GemmProblem, config: GemmConfig) -> tuple[str, str]:
    """Kernel and launcher."""
    return compiled.program(GEMM.build, problem, config, H200)


def kernel(problem: GemmProblem, config: GemmConfig) -> str:
    return program(problem, config)[0]


def instructions(problem: GemmProblem, config: GemmConfig, target: str) -> set[str]:
    return set(compiled.opcodes(built(problem, config, target)))


# ---- resources ------------------------------------------------------------------------------------------


@compiled.paired(PROBLEMS)
def test_compiles_for_every_architecture_as_why_not_predicts(name: str, spec: gpu.GpuSpec) -> None:
    problem = GemmProblem.parse(PROBLEMS[name])
    default = GEMM.default(problem, spec)
    configs = (default, random_config(random.Random(name), problem, spec))
    for config in configs[: 1 + list(PROBLEMS).index(name) % 2]:
        facts = built(problem, config, spec.name).facts
        assert facts.smem_bytes == SCHEDULES[config.body].smem(config, extras_of(problem)).total_bytes, config
        assert facts.smem_bytes <= spec.smem_per_block_bytes
        assert 0 < facts.registers <= spec.MAX_REGISTERS_PER_THREAD
        # The config's promise: this many CTAs are resident. Registers are allocated by the 8.
        threads = SCHEDULES[config.body].threads(config)
        assert -(-facts.registers // 8) * 8 * threads * config.ctas_per_sm <= spec.REGISTERS_PER_SM
    assert built(problem, default, spec.name).facts.stack_bytes == 0, f"the default spills: {default}"


# ---- instructions ---------------------------------------------------------------------------------------


def multistage_default(problem: GemmProblem, spec: gpu.GpuSpec) -> GemmConfig:
    found = MULTISTAGE.best(problem, spec, PLAIN)
    assert found is not None
    return found[1]


@pytest.mark.parametrize("spec", TARGETS[::3], ids=lambda g: g.target)  # the first is compiled above
def test_an_aligned_problem_runs_on_tensor_cores_fed_by_16_byte_copies(spec: gpu.GpuSpec) -> None:
    problem = GemmProblem.parse(PROBLEMS["square"])
    found = instructions(problem, multistage_default(problem, spec), spec.name)
    assert "HMMA.16816.F32.BF16" in found
    assert {i for i in found if i.startswith("LDSM") and i.endswith(".4")}, "fragments come by ldmatrix.x4"
    copies = {i for i in found if i.startswith("LDGSTS")}
    assert copies
    assert all(i.endswith(".128") and ".BYPASS" in i for i in copies), copies
    assert {i for i in found if i.startswith("STG")} == {"STG.E.128"}
    assert not {i for i in found if i.startswith(("LDL", "STL"))}, "no local memory"


def test_fp16_accumulation_is_the_tensor_cores_own() -> None:
    problem = GemmProblem.parse(PROBLEMS["fp16-accumulate"])
    found = instructions(problem, multistage_default(problem, TARGETS[1]), "l40s")
    assert "HMMA.16816.F16" in found
    assert not {i for i in found if i.startswith("HMMA.16816.F32")}


def test_an_unaligned_problem_moves_single_elements() -> None:
    problem = GemmProblem.parse(PROBLEMS["unaligned"])
    found = instructions(problem, GEMM.default(problem, H200), "h200")
    assert "HMMA.16816.F32" in found
    assert not {i for i in found if i.startswith("LDGSTS")}, "cp.async takes 4 bytes or more"
    assert {i for i in found if i.startswith("STG")} == {"STG.E.U16"}


@pytest.mark.parametrize(("align", "bits"), [(4, ".64"), (2, "")])
def test_copies_are_as_wide_as_alignment_allows(align: int, bits: str) -> None:
    problem = GemmProblem.parse(f"m=64 n=64 k=64 a_align={align} b_align={align} out_align={align}")
    found = instructions(problem, multistage_default(problem, H200), "h200")
    copies = {i for i in found if i.startswith("LDGSTS")}
    assert copies
    assert {m[0] if (m := re.search(r"\.(64|128)$", i)) else "" for i in copies} == {bits}
    assert {i for i in found if i.startswith("STG")} == {f"STG.E{bits}"}


def test_the_kernel_depends_on_the_static_half_of_a_problem_alone() -> None:
    first, second = GemmProblem.parse("m=4096 n=4096 k=4096"), GemmProblem.parse("m=128 n=264 k=72")
    config = next(c for c in GEMM.valid(second, H200))
    assert first.static() == second.static()
    assert program(first, config) == program(second, config)


@pytest.mark.parametrize(
    "change", ["dtype=fp16", "a_major=m", "b_major=k", "c=n", "bias=same", "activation=silu", "batched=1", "wide=1"]
)
def test_every_static_field_changes_the_code(change: str) -> None:
    base = GemmProblem.parse("m=256 n=256 k=256")
    config = min((c for c in valid(str(base)) if c.body == "multistage"), key=compiled.area)  # compiles fast
    assert kernel(base, config) != kernel(GemmProblem.parse(f"{base} {change}"), config)


# ---- knobs ----------------------------------------------------------------------------------------------


@cache
def valid(text: str) -> tuple[GemmConfig, ...]:
    return tuple(c for c in GEMM.valid(GemmProblem.parse(text), H200) if not c.vendors)


def neighbours(text: str, knob: str) -> tuple[GemmConfig, GemmConfig] | None:
    """Two valid configs that differ in ``knob`` alone, if the rules leave any."""
    configs = [c for c in valid(text) if (c.body, knob) != ("skinny_warpgroup", "ctas_per_sm") or c.tile_n >= 128]
    return compiled.one_knob_apart(configs, knob)


@pytest.mark.parametrize("knob", [name for name in GemmConfig.space() if name != "body"])
def test_every_knob_changes_the_code(knob: str) -> None:
    texts = ("m=8192 n=4096 k=4096", "m=64 n=4096 k=4096 b_major=k")
    pairs = {text: pair for text in texts if (pair := neighbours(text, knob)) is not None}
    for text, (first, second) in pairs.items():
        problem = GemmProblem.parse(text)
        assert differ(problem, first, second, knob), f"{knob} changes nothing between [{first}] and [{second}]"
    # Where the rules tie a knob to the others, it must still do something by itself.
    assert pairs or changes_something(texts[0], knob), f"{knob} changes nothing"


def differ(problem: GemmProblem, first: GemmConfig, second: GemmConfig, knob: str) -> bool:
    """In their kernels; how many CTAs are resident is said at the launch."""
    parts = slice(2) if knob == "ctas_per_sm" else slice(1)
    return program(problem, first)[parts] != program(problem, second)[parts]


def test_the_bodies_differ() -> None:
    few, many = "m=64 n=4096 k=4096 b_major=k", "m=256 n=4096 k=4096 b_major=k"
    kernels = [next(c for c in (*valid(few), *valid(many)) if c.body == body) for body in SCHEDULES]
    assert len({kernel(GemmProblem.parse(few), c) for c in kernels}) == len(kernels) == 4


def changes_something(text: str, knob: str) -> bool:
    """Whether ``knob`` alone changes the code of a config with large tiles to a warp; no rules applied."""
    problem = GemmProblem.parse(text)
    warps = [c for c in valid(text) if c.body == "multistage"]
    hungry = sorted(warps, key=lambda c: (c.warp_tile[0] * c.warp_tile[1], c.warps, str(c)), reverse=True)
    return any(
        differ(problem, base, base.replace(**{knob: value}), knob)
        for base in hungry[:3]
        for value in GemmConfig.space()[knob]
    )


def test_more_ctas_per_sm_take_fewer_registers_and_longer_k_tiles_more() -> None:
    problem = GemmProblem.parse("m=4096 n=4096 k=4096")
    warps = [c for c in valid(str(problem)) if c.body == "multistage"]
    hungry = max(warps, key=lambda c: (c.warp_tile[0] * c.warp_tile[1], c.warps, str(c)))
    alone, crowded = (hungry.replace(ctas_per_sm=n) for n in (1, 3))
    assert built(problem, crowded, "h200").facts.registers < built(problem, alone, "h200").facts.registers
    deep = GemmConfig.parse("tile_m=64 tile_n=128 tile_k=64 warps_m=1 warps_n=4 stages=3 raster=8 ctas_per_sm=1")
    needed, taken = registers_per_thread(problem, deep), built(problem, deep, "h200").facts.registers
    assert needed < taken <= needed + read_ahead(deep)


# ---- files ----------------------------------------------------------------------------------------------


def test_an_artifact_saves_a_linkable_object(tmp_path: Path) -> None:
    problem = GemmProblem.parse("m=64 n=64 k=64")
    for spec in TARGETS[1:3]:
        path = tmp_path / f"{spec.name}.cute"
        built(problem, GEMM.default(problem, spec), spec.name).save(path)
        content = path.read_bytes()
        assert content.startswith(b"\x7fELF")
        assert b"cutekernels_launch" in content
