"""Each value of each body's knobs is valid for some problem: one that no rule ever lets through is no value."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from cutekernels.errors import InvalidConfig, UnsupportedProblem
from cutekernels.op import Config
from cutekernels.ops import registry
from cutekernels.ops.products import grouped
from cutekernels.ops.products.fused import NormLinearConfig
from cutekernels.ops.products.schedules.problem import BODIES, GemmConfig
from tests.compiled import H200, Value, unreached, values

SIZES = (1, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 512, 1024, 4096, 65536)
KINDS = list(dict.fromkeys(op.Config for op in registry.OPS))
LARGE = (GemmConfig, NormLinearConfig)  # a problem of theirs takes a second
# By op, what neither suites nor other sizes of one of their extents ask for.
FURTHER = {
    "gemm": (
        "m=8192 n=8192 k=4096",
        "m=192 n=512 k=4096 b_major=k",
        "m=192 n=4096 k=4096 b_major=k",
        "m=256 n=4096 k=4096 b_major=k",
        "m=256 n=64 k=512 dtype=fp16 accumulate=fp16",
        *(f"m={m} n=4096 k=4096 b_major=k" for m in (1, 16, 24, 32, 48, 64, 96, 128)),
        *(f"m=64 n={132 * tile} k=4096 b_major=k" for tile in BODIES["skinny_warpgroup"]["tile_n"]),
    ),
    "rope": ("batch=2 seq=9 heads_q=2 head_dim=256 rotary=256", "batch=2 seq=9 heads_q=2 head_dim=512 rotary=512"),
    "kv_append": (
        "batch=1 seq=1 heads_kv=8 head_dim=256 heads_q=32 rotary=256",
        "batch=1 seq=1 heads_kv=8 head_dim=512 heads_q=32 rotary=512",
    ),
    "rms_norm_linear": (
        *(f"m={m} n=4096 k=4096" for m in (1, 8, 16, 24, 32, 48, 64, 96, 128)),
        *(f"m=64 n={132 * tile} k=14336" for tile in BODIES["skinny_warpgroup"]["tile_n"]),
    ),
    "linear_silu_mul": ("m=128 n=512 k=512", "m=4096 n=4096 k=4096", "m=256 n=512 k=512"),
    "rms_norm": ("rows=2048 cols=16384", "rows=2048 cols=512"),
    "add_rms_norm": ("rows=2048 cols=16384", "rows=2048 cols=512"),
}

# Of grouped products, whose warpgroup bodies narrow gemm's lists.
GROUPED = {
    "grouped_gemm": (
        "rows=8192 n=4096 k=4096 experts=8",
        "rows=64 n=4096 k=4096 experts=8",
        "rows=8192 n=14336 k=4096 experts=8 activation=silu_mul",
        "rows=300 n=512 k=512 experts=8",
    ),
    "grouped_gemm_wgrad": ("rows=8192 n=4096 k=4096 experts=8", "rows=512 n=256 k=128 experts=8"),
}


def asked(kind: type) -> Iterator[tuple[Any, Any]]:
    """Problems of the ops with such configs: further ones, suites, and those with other sizes of each extent."""
    ops = [op for op in registry.OPS if op.Config is kind and op.name not in GROUPED]
    suites = [(op, op.Problem.parse(text)) for op in ops for text in op.suite]
    yield from ((op, op.Problem.parse(text)) for op in ops for text in FURTHER.get(op.name, ()))
    yield from suites
    for op, problem in () if kind in LARGE else suites:
        for extent in problem.extent_names():
            for size in SIZES:
                try:
                    yield op, problem.replace(**{extent: size})
                except UnsupportedProblem:
                    continue


def declared(kind: Any) -> set[Value]:
    """The values that bodies list, and those of the space that none lists; an op of one list has one for all bodies."""
    listed = values(kind.every(), apart=kind.every.__func__ is not Config.every.__func__)
    known = {(name, value) for _, name, value in listed}
    return listed | {("none", n, v) for n, space in kind.space().items() for v in space if (n, v) not in known}


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_each_value_of_each_knob_is_valid_for_some_problem(kind: Any) -> None:
    assert not unreached(declared(kind), asked(kind))


@pytest.mark.parametrize("name", GROUPED)
def test_each_value_that_grouped_products_narrow_is_valid_too(name: str) -> None:
    """Values of the warpgroup body alone, whose lists are its own; tiles are named as without swap_ab."""
    op: Any = registry.get(name)
    schedule = op.warpgroup
    missing = values(map(unswapped, schedule.span()))
    for text in GROUPED[name]:
        problem, extras = grouped._largest_product(op, op.Problem.parse(text))
        missing -= values(map(unswapped, schedule.valid(problem, H200, extras)))
    assert missing <= {("warpgroup", "swap_ab", True)}, "unswapped has none"


def unswapped(config: Any) -> Any:
    return config.transposed.replace(swap_ab=False) if config.swap_ab else config


def test_a_value_that_no_rule_lets_through_is_seen() -> None:
    """A body's, though another body takes it: raster=16 of skinny. AdamW's 8192 elements stood until 2026-11-28."""
    gemm, adamw = registry.get("gemm"), registry.get("adamw_step")
    quick = [(gemm, gemm.Problem.parse("m=8192 n=8192 k=4096"))]
    planted = {("multistage", "raster", 8), ("multistage", "raster", 32), ("skinny", "raster", 16)}
    assert unreached(planted, quick) == planted - {("multistage", "raster", 8)}
    with pytest.raises(InvalidConfig, match="block must be one of 256, 512, 1024, 2048, 4096; got '8192'"):
        adamw.Config.parse("block=8192 warps=8 evict=normal")
