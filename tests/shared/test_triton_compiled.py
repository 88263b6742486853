"""Every Triton op compiled without a GPU: for each GPU, its resources, its knobs. No family asks this again."""

from __future__ import annotations

import math
import random
import re
from itertools import combinations
from typing import Any

import pytest

pytest.importorskip("triton")

from cutekernels import gpu
from cutekernels.ops import registry
from cutekernels.ops.norms.rows import NormOp
from cutekernels.ops.shared.triton_op import TritonOp
from tests.interpreted import in_triton
from tests.triton_compiled import H200, check_knobs, check_resources, in_turns, program

OPS = {op.name: op for op in registry.OPS if isinstance(op, TritonOp)}
# Bytes of stack: a thread of sample_filter keeps up to 32 sums of 64 bits in 128 registers, and words that are seldom
# used; eight strided rows of a warp spill, far from the default.
STACK = {"sample_filter": 32, "moe_route_backward": 104}
NO_SPILL = 16  # bytes of stack that ptxas takes here and there with registers to spare

# By op a problem, and configs that together leave another value to every knob, but to those that stand behind them.
KNOBS: dict[str, tuple[str, tuple[str, ...], set[str]]] = {
    "silu_mul": ("rows=2048 cols=11008 layout=rows", ("block_rows=2 block_cols=1024 warps=4 evict=normal",), set()),
    "silu_mul_backward": (
        "rows=2048 cols=11008 layout=strided", ("block_rows=16 block_cols=32 warps=4 evict=normal",), set()),
    "bias_gelu": ("rows=2048 cols=11008", ("block_rows=2 block_cols=1024 warps=4 evict=normal",), set()),
    "bias_gelu_backward": ("rows=2048 cols=11008", ("block_rows=2 block_cols=1024 warps=4 evict=normal",), set()),
    "embedding": ("rows=2048 vocabulary=32000 cols=4096", ("block_rows=2 block_cols=1024 warps=4",), set()),
    "embedding_backward": ("rows=2048 vocabulary=32000 cols=4096", ("block_rows=2 block_cols=1024 warps=4",), set()),
    # A block follows from the number of channels.
    "kv_append": ("batch=1 seq=2048 heads_kv=8 head_dim=128 heads_q=32 rotary=128 page_size=16",
                  ("tokens=2 heads=8 block=64 warps=4",), {"block"}),
    "rope": ("batch=1 seq=2048 heads_q=32 head_dim=128 rotary=128 heads_kv=8",
             ("tokens=2 heads=8 block=64 warps=4",), {"block", "body"}),
    "logit_statistics": ("rows=2048 cols=15232", ("block=2048 warps=4",), set()),
    "logit_gradient": ("rows=2048 cols=15232", ("block=2048 warps=4",), set()),
    "scale_gradient": (f"elements={1 << 22}", ("block=2048 warps=4 programs=1024",), set()),
    "adamw_step": ("elements=1000000", ("block=1024 warps=4 evict=normal",), set()),
    "moe_route": ("tokens=4096 experts=128 dtype=fp32", ("tokens=4 warps=4 method=rounds",), set()),
    "moe_route_backward": ("tokens=4096 experts=128", ("tokens=4 warps=4",), set()),
    "moe_permute": ("pairs=4000 experts=60", ("block=256 programs=32 passes=1 warps=4",), set()),
    "moe_gather": ("tokens=2048 cols=4096", ("block=2048 warps=4",), set()),
    "moe_combine": ("tokens=2048 cols=4096 weighted=1", ("block=2048 warps=4",), set()),
    "moe_combine_backward": ("tokens=2048 cols=4096 weighted=1", ("block=2048 warps=4",), set()),
    "moe_dispatch": ("tokens=16 cols=4096 experts=128", ("block=2048 warps=4",), set()),
    "sample_filter": ("rows=4 cols=128256 dtype=fp32 by_k=1 by_p=1", ("block=2048 warps=8 depth=1 splits=1",), set()),
}  # fmt: skip


def stack_of(op: Any) -> int:
    return NO_SPILL if isinstance(op, NormOp) or op.name.startswith("column_sum") else STACK.get(op.name, 0)


def each(config: Any) -> float:
    """Elements of a tile to a warp."""
    sizes = [getattr(config, name) for name in type(config).space() if re.match("block|tokens|heads", name)]
    return math.prod(sizes) / config.warps


@in_turns(OPS)
def test_compiles_for_every_architecture(op: Any, spec: gpu.GpuSpec) -> None:
    """A problem by default, and another by a random config."""
    rng = random.Random(op.name + spec.name)
    first, second = (op.Problem.parse(rng.choice(op.suite)) for _ in range(2))
    check_resources(op, first, op.default(first, spec), spec, stack=stack_of(op))
    check_resources(op, second, rng.choice([*in_triton(op, second, spec)]), spec, stack=stack_of(op))


@pytest.mark.parametrize("op", OPS.values(), ids=OPS.keys())
def test_the_largest_tiles_do_not_spill(op: Any) -> None:
    """Rules on registers keep every valid config free of spills."""
    problems = [op.Problem.parse(text) for text in op.suite]
    whole = max(problems, key=lambda p: math.prod(getattr(p, name) for name in p.extent_names()))
    strided = [p for p in problems if getattr(p, "layout", "") == "strided"]
    for problem in (whole, *strided[:1]):
        check_resources(op, problem, max(in_triton(op, problem), key=each), stack=stack_of(op))


@pytest.mark.parametrize("name", KNOBS)
def test_every_knob_changes_the_code_or_the_launches(name: str) -> None:
    op: Any = OPS[name]
    text, bases, behind = KNOBS[name]
    problem = op.Problem.parse(text)

    def launch(config: Any) -> Any:
        return op.grid(problem, config), str(getattr(config, "passes", 1))

    changed: set[str] = set()
    for base in bases:
        changed |= check_knobs(op, problem, op.Config.parse(base), launch=launch).keys()
    assert changed == {"", *op.Config.space()} - behind


def alike(op: Any) -> tuple[Any, Any, Any]:
    """Two problems of other extents and one static half, of the suite or smaller, and a config of both."""
    problems = [op.Problem.parse(text) for text in op.suite]
    for problem in problems[:]:
        for name in problem.extent_names():
            size = getattr(problem, name)
            problems += [problem.replace(**{name: size // 2 // 64 * 64 or 64})] if size > 128 else []
    pairs = ((a, b) for a, b in combinations(problems, 2) if a != b and a.static() == b.static())
    return next((a, b, c) for a, b in pairs for c in in_triton(op, a) if op.why_not(b, c, H200) is None)


@pytest.mark.parametrize("op", OPS.values(), ids=OPS.keys())
def test_compiled_code_does_not_depend_on_extents(op: Any) -> None:
    first, second, config = alike(op)
    assert program(op, first, config) == program(op, second, config)
