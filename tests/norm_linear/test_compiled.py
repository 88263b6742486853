"""The fused kernels of ``rms_norm_linear`` and ``linear_silu_mul``, compiled for GPUs that are not there."""

from __future__ import annotations

from collections import Counter
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from cutekernels import gpu
from cutekernels.backends.cute import CuteArtifact
from cutekernels.ops.products.dense import SCHEDULES
from cutekernels.ops.products.fused import NormLinearConfig
from cutekernels.ops.products.norm import LINEAR_SILU_MUL, RMS_NORM_LINEAR, NormLinear
from tests import compiled
from tests.sass import instructions, overwritten

OPS: dict[str, NormLinear] = {op.name: op for op in (RMS_NORM_LINEAR, LINEAR_SILU_MUL)}
PROBLEMS = [
    ("rms_norm_linear", "m=1 n=3584 k=3584"),
    ("rms_norm_linear", "m=64 n=3584 k=3584 norm_weight=fp32 bias=same activation=gelu"),
    ("rms_norm_linear", "m=100 n=513 k=328 dtype=fp16 bias=fp32"),
    ("rms_norm_linear", "m=8 n=4096 k=4096 norm_weight=none rstd=given activation=silu"),
    ("linear_silu_mul", "m=16 n=18944 k=3584 norm=1 norm_weight=same"),
    ("linear_silu_mul", "m=32 n=1000 k=520"),
]
MANY = ("linear_silu_mul", "m=1000 n=4096 k=4096")  # tokens, for warpgroup MMA


@compiled.once
def fused(name: str, text: str, target: str = "h200") -> tuple[NormLinearConfig, ...]:
    op = OPS[name]
    return tuple(c for c in op.valid(op.Problem.parse(text), gpu.lookup(target)) if c.path == "fused")


@compiled.once
def best(name: str, text: str, target: str = "h200") -> NormLinearConfig:
    """The config that the model would take."""
    op, spec = OPS[name], gpu.lookup(target)
    p = op.Problem.parse(text)
    return min(fused(name, text, target), key=lambda c: (op.estimate_us(p, c, spec), str(c)))


@compiled.once
def built(name: str, text: str, config: NormLinearConfig, target: str = "h200") -> CuteArtifact:
    op = OPS[name]
    artifact = op.build(op.Problem.parse(text), config, gpu.lookup(target))
    assert isinstance(artifact, CuteArtifact)
    return artifact


@compiled.once
def program(name: str, text: str, config: NormLinearConfig) -> tuple[str, str]:
    """Kernel and launcher."""
    return compiled.program(OPS[name].build, OPS[name].Problem.parse(text), config, compiled.H200)


def sass(artifact: CuteArtifact) -> str:
    return compiled.sass(compiled.cubin(artifact))


def opcodes(name: str, text: str, config: NormLinearConfig) -> Counter[str]:
    return compiled.opcodes(built(name, text, config))


@pytest.mark.parametrize(("case", "spec"), compiled.pairs(PROBLEMS), ids=lambda x: getattr(x, "target", None))
def test_compiles_for_every_architecture_as_predicted(case: tuple[str, str], spec: gpu.GpuSpec) -> None:
    name, text = case
    problem = OPS[name].Problem.parse(text)
    config = best(name, text, spec.name)
    facts = built(name, text, config, spec.name).facts
    assert facts.smem_bytes == SCHEDULES[config.body].smem(config.product, problem.extras).total_bytes, config
    assert facts.smem_bytes <= spec.smem_per_block_bytes
    assert facts.stack_bytes == 0, f"spills: {config}"


# The product's own, whose shared memory and instructions the tests around this one count; gemm's tests change each.
COUNTED = ("path", "tile_m", "tile_n", "tile_k", "warps_m", "warps_n", "warps_k", "stages")


@pytest.mark.parametrize("knob", [k for k in NormLinearConfig.space() if k not in COUNTED])
def test_every_other_knob_changes_the_code(knob: str) -> None:
    of_many = knob in ("raster", "pingpong", "cluster_m", "cluster_n")
    name, text = MANY if of_many else PROBLEMS[1]
    pair = compiled.one_knob_apart(fused(name, text), knob)
    if pair is None:  # tied to the problem or to the other knobs
        first = min(fused(name, text), key=lambda c: (compiled.area(c), str(c)))
        values = [v for v in NormLinearConfig.space()[knob] if v not in (getattr(first, knob), "warpgroup")]
        pair = first, first.replace(**{knob: values[0 if knob.startswith("tile") else -1]})
    first, second = pair
    parts = slice(2) if knob == "ctas_per_sm" else slice(1)  # how many are resident is said at the launch
    assert program(name, text, first)[parts] != program(name, text, second)[parts], f"{knob}: [{first}] and [{second}]"


@pytest.mark.parametrize(
    "change",
    ["dtype=fp16", "norm_weight=none", "norm_weight=fp32", "rstd=given", "bias=same", "bias=fp32", "activation=silu"],
)
def test_every_static_field_changes_the_code(change: str) -> None:
    name, text = PROBLEMS[0]
    config = best(name, text)
    assert program(name, text, config)[0] != program(name, f"{text} {change}", config)[0]


def test_squares_and_weights_cost_what_they_should() -> None:
    """Per k-block and warp: an MMA per 8 tokens for squares, 4 packed multiplications per 16 rows for the weight."""
    text, config = "m=8 n=3584 k=3584", NormLinearConfig("fused", 8, 32, 256, warps_k=4, stages=4)
    found = {
        change: opcodes("rms_norm_linear", f"{text} {change}", config)
        for change in ("", "rstd=given", "norm_weight=none rstd=given")
    }
    blocks = 256 // 16 // 4
    mma = {change: sum(n for op, n in ops.items() if op.startswith("HMMA")) for change, ops in found.items()}
    assert mma == {"": blocks * 3, "rstd=given": blocks * 2, "norm_weight=none rstd=given": blocks * 2}
    assert {c: ops["HMUL2.BF16_V2"] for c, ops in found.items()} == {
        "": blocks * 8, "rstd=given": blocks * 8, "norm_weight=none rstd=given": 0,
    }  # fmt: skip


def test_tokens_are_squared_and_weighed_beside_warpgroup_mma() -> None:
    """Per k-block and warp: 4 packed multiplications, half a load of the weight; no wait but ours. Of 64 rows, each of
    three warps beside squares 24 of 8 elements a lane, in 16 bytes, for 64 columns.
    """
    text = "m=64 n=18944 k=3584"
    config = RMS_NORM_LINEAR.default(RMS_NORM_LINEAR.Problem.parse(text), gpu.lookup("h200"))
    assert (config.body, config.tile_k) == ("skinny_warpgroup", 128)
    found = {change: opcodes("rms_norm_linear", f"{text} {change}", config) for change in ("", "norm_weight=none")}
    blocks, reads = 128 // 16, 24 // 4 * 2
    for change, ops in found.items():
        assert sum(n for op, n in ops.items() if op.startswith("HGMMA")) == blocks
        assert ops["LDSM.16.M88.4"] == blocks + (0 if change else blocks // 2)
        assert ops["HMUL2.BF16_V2"] == (0 if change else 4 * blocks)
        assert ops["FFMA"] >= 8 * reads
        assert ops["LDS.128"] >= reads
    # One wait before a stage's registers are overwritten and one at the end: the compiler adds none.
    assert found[""]["WARPGROUP.DEPBAR.LE"] == 2
    given = opcodes("rms_norm_linear", f"{text} rstd=given", config)
    assert given["FFMA"] < 8 * reads


@pytest.mark.parametrize(
    "change", ["", "norm_weight=none", "norm_weight=none rstd=given dtype=fp16", "norm_weight=fp32"]
)
def test_no_register_of_tokens_is_written_that_a_product_still_reads(change: str, tmp_path: Path) -> None:
    """Fragments of half a k-tile come while the products of the k-tile before run."""
    text = f"m=64 n=18944 k=3584 {change}"
    config = RMS_NORM_LINEAR.default(RMS_NORM_LINEAR.Problem.parse(text), gpu.lookup("h200"))
    assert config.body == "skinny_warpgroup"
    code = instructions(compiled.cubin(built("rms_norm_linear", text, config)), tmp_path)
    assert any(opcode.startswith("HGMMA") for opcode, _ in code)
    assert overwritten(code) == []


def test_a_chain_has_no_kernel_of_its_own(tmp_path: Any) -> None:
    op = RMS_NORM_LINEAR
    p = op.Problem.parse("m=300 n=64 k=64")
    artifact = op.build(p, op.default(p, gpu.lookup("h200")), gpu.lookup("h200"))
    artifact.save(tmp_path / "chain")
    with pytest.raises(AssertionError, match="no kernel of its own"):
        type(artifact).load(tmp_path / "chain")()


# ---- where things lie -----------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [8, 32])  # one tile of 8, two of 16
def test_fragments_lie_where_the_norm_looks(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """B fragments: token 8j + lane/4, k = lane%4*2 + {0, 1} and 8 more. Accumulators: rows 8 apart in one thread."""
    import cutlass
    import cutlass.cute as cute

    from cutekernels.kernels.cute.parts.mma import WarpMma

    found = []

    def collect() -> None:  # plain Python: all of it is static
        mma = WarpMma(2, 1, cutlass.Float32, True, True, 8 if tokens % 16 else 16).tiled_mma(cutlass.BFloat16)
        for thread in range(64):
            b = mma.get_slice(thread).partition_B(cute.make_identity_tensor((tokens, 32)))
            c = mma.get_slice(thread).partition_C(cute.make_identity_tensor((64, tokens)))
            for j, i in product(range(tokens // 8), range(8)):
                lane, rest, half, v = thread % 32, i // 4, i // 2 % 2, i % 2
                found.append((b[(v, half), j, rest], (8 * j + lane // 4, 16 * rest + lane % 4 * 2 + v + 8 * half)))
                row = 32 * rest + thread // 32 * 16 + lane // 4 + 8 * half
                found.append((c[(v, half), rest, j], (row, 8 * j + lane % 4 * 2 + v)))

    @cute.jit
    def look() -> None:
        collect()

    monkeypatch.setenv("CUTE_DSL_ARCH", "sm_90a")
    cute.compile(look)
    assert len(found) == 64 * tokens // 8 * 16
    assert all(tuple(map(int, at)) == wanted for at, wanted in found)


def test_fragments_of_tokens_lie_where_the_norm_looks() -> None:
    """A fragments: token lane/4 of a warp's 16 and 8 more, k as above; sums of the same two tokens in one thread."""
    import cutlass
    import cutlass.cute as cute
    from cutlass.cute.nvgpu import OperandMajorMode, warpgroup
    from cutlass.utils import hopper_helpers

    groups, found = 2, []

    def collect() -> None:
        k_major = OperandMajorMode.K
        mma = hopper_helpers.make_trivial_tiled_mma(
            cutlass.BFloat16, cutlass.BFloat16, k_major, k_major, cutlass.Float32, (groups, 1, 1), (64, 32),
            warpgroup.OperandSource.RMEM,
        )  # fmt: skip
        tokens = 64 * groups
        for thread in range(128 * groups):
            a = mma.get_slice(thread).partition_A(cute.make_identity_tensor((tokens, 16)))
            c = mma.get_slice(thread).partition_C(cute.make_identity_tensor((tokens, 32)))
            for i in range(8):
                lane, rest, half, v = thread % 32, i // 4, i // 2 % 2, i % 2
                token = thread // 32 * 16 + lane // 4 + 8 * half
                found.append((a[(v, half, rest), 0, 0], (token, 8 * rest + lane % 4 * 2 + v)))
                found.append((c[(v, half, rest), 0, 0], (token, 8 * rest + lane % 4 * 2 + v)))

    compiled.run_static(collect)
    assert len(found) == 128 * groups * 16
    assert all(tuple(map(int, at)) == wanted for at, wanted in found)
