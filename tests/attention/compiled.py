"""Attention's kernels compiled for GPUs that are not there: their loops, and what tests of each op have in common."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from cutekernels import gpu
from cutekernels.op import Config, Op, Problem
from tests import compiled
from tests.compiled import H200, TARGETS, paired

__all__ = ["A100", "H200", "L40S", "RTX5090", "TARGETS", "paired"]
A100, L40S, _, RTX5090 = TARGETS
_LINE = re.compile(r"^\s+/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+ )?([A-Z][\w.]+)([^;]*);", re.MULTILINE)


@compiled.once
def built(op: Op[Any, Any], problem: Problem, config: Config, target: str = "h200") -> Any:
    return op.build(problem, config, gpu.lookup(target))


@compiled.once
def program(op: Op[Any, Any], problem: Problem, config: Config) -> tuple[str, str]:
    """Kernel and launcher."""
    return compiled.program(op.build, problem, config, H200)


def kernel(op: Op[Any, Any], problem: Problem, config: Config) -> str:
    return program(op, problem, config)[0]


def loops(op: Op[Any, Any], problem: Problem, config: Config, target: str, products: int) -> list[Counter[str]]:
    """The opcodes of each loop with so many products, in the order of the code.

    Rescaling lies behind the loop and jumps back into it, which looks like a loop with fewer products.
    """
    lines = _LINE.findall(compiled.sass(compiled.cubin(built(op, problem, config, target))))
    places = [int(at, 16) for at, _, _ in lines]
    found = []
    for end, (_, opcode, operands) in zip(places, lines, strict=True):
        jump = re.search(r"0x([0-9a-f]+)", operands) if opcode == "BRA" else None
        if jump and (begin := int(jump[1], 16)) < end:
            body = Counter(name for place, (_, name, _) in zip(places, lines, strict=True) if begin <= place <= end)
            if count(body, "HMMA") == products:
                found.append(body)
    assert found, f"no loop has {products} products"
    return found


def count(body: Counter[str], prefix: str) -> int:
    return sum(n for op, n in body.items() if op.startswith(prefix))


def facts(op: Op[Any, Any], problem: Problem, config: Any, spec: gpu.GpuSpec, smem_bytes: int) -> Any:
    """The facts of a kernel whose resources are as ``why_not`` predicts."""
    found = built(op, problem, config, spec.name).facts
    assert found.smem_bytes == smem_bytes, config
    assert found.smem_bytes <= spec.smem_per_block_bytes
    assert -(-found.registers // 8) * 8 * config.threads * config.ctas_per_sm <= spec.REGISTERS_PER_SM
    return found


def depends_on_statics_alone(op: Op[Any, Any], first: Problem, second: Problem, config: Config) -> None:
    assert first.static() == second.static()
    assert program(op, first, config) == program(op, second, config)


def changes_the_code(op: Op[Any, Any], base: Problem, change: str) -> None:
    """A static field: without ``change``, the code is another, of a config that compiles fast."""
    field = change.partition("=")[0] + "="
    words = [word for word in str(base).split() if not word.startswith(field)]
    other = type(base).parse(" ".join([*words, change]))
    config = next(c for c in smallest_first(op, base) if op.why_not(other, c, H200) is None)
    assert kernel(op, base, config) != kernel(op, other, config)


@cache
def smallest_first(op: Op[Any, Any], problem: Problem) -> tuple[Any, ...]:
    """The valid configs on an H200, the smallest tiles first."""
    return tuple(sorted(op.valid(problem, H200), key=lambda c: (compiled.area(c), str(c))))


def knob_changes_the_code(
    op: Op[Any, Any],
    problems: Sequence[Any],
    knob: str,
    smem_bytes: Callable[[Any, Any], int],
    others: tuple[str, ...] = (),
) -> None:
    """Two configs that differ in ``knob`` alone, or in ``others`` too that follow from it; the second's shared memory,
    where it is another, is as predicted.

    They are of the first of ``problems`` whose rules leave two values. Where no rules leave two of ctas_per_sm, the one
    that fits is compared with one that does not.
    """
    pairs = ((p, compiled.one_knob_apart(smallest_first(op, p), knob, others)) for p in problems)
    problem, pair = next((found for found in pairs if found[1]), (problems[-1], None))
    if pair is None:
        assert knob == "ctas_per_sm"
        bounded = [c for c in op.valid(problem, H200) if getattr(c, "body", "multistage") == "multistage"]
        fits = max(bounded, key=lambda c: (c.threads, c.ctas_per_sm))
        pair = fits, fits.replace(ctas_per_sm=fits.ctas_per_sm % 3 + 1)
    elif smem_bytes(problem, pair[0]) != smem_bytes(problem, pair[1]):
        facts(op, problem, pair[1], H200, smem_bytes(problem, pair[1]))
    # Order and grid of CTAs are numbers that the host computes; how many are resident is said at the launch.
    parts = slice(2) if knob in ("order", "grid", "ctas_per_sm") else slice(1)
    first, second = (program(op, problem, config)[parts] for config in pair)
    assert first != second, f"{knob} changes nothing: {pair[0]} and {pair[1]}"
