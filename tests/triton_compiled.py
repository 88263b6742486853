"""Triton kernels compiled on a machine without a GPU: their code, their resources, and what each knob changes."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from cutekernels import gpu
from tests.compiled import H200, TARGETS, handed, in_turns, once

__all__ = ["H200", "TARGETS", "in_turns"]


@once
def built(op: Any, problem: Any, config: Any, spec: gpu.GpuSpec = H200) -> Any:
    """The artifact that ``op.build`` compiles for ``spec``."""
    return op.build(problem, config, spec)


@once
def program(op: Any, problem: Any, config: Any) -> str:
    """The kernel for an H200 as Triton's passes leave it, before LLVM and ptxas: half of a compile.

    Beside it stands the bound on registers, which is ptxas's.
    """
    from triton.backends.nvidia.compiler import CUDABackend

    text, _, options, *_ = handed(CUDABackend, "make_llir", op.build, problem, config, H200)
    return f"{text} {options.maxnreg}"


def accesses(ptx: str, kind: str = "ld|st") -> set[str]:
    """The widths of loads and stores of global memory, such as ``v4.b32``."""
    return set(re.findall(rf"(?:{kind})\.global\S*?\.((?:v\d\.)?b\d+)\b", ptx))


def check_resources(op: Any, problem: Any, config: Any, spec: gpu.GpuSpec = H200, *, stack: int = 0) -> Any:
    """Asserts that the compiled kernel can be launched and takes at most ``stack`` bytes of it; returns its facts."""
    facts = built(op, problem, config, spec).facts
    assert facts.stack_bytes <= stack, (str(problem), str(config), facts)
    assert facts.registers * 32 * config.warps <= 64 * 1024, (str(problem), str(config), facts)
    assert facts.smem_bytes <= spec.smem_per_block_bytes, (str(problem), str(config), facts)
    return facts


def check_knobs(
    op: Any, problem: Any, base: Any, *, most: int | None = 1, launch: Callable[[Any], Any] | None = None
) -> dict[str, list[str]]:
    """Asserts that every change of one knob of ``base`` changes the program or the launch, the grid unless told.

    At most ``most`` valid values of each knob are tried, but of ``body``: another one is not Triton's. Returns the
    programs of each knob's values, of knobs that have another valid value, and under "" that of ``base`` itself.
    """
    launch = launch or (lambda config: op.grid(problem, config))
    op.check(problem, base, H200)
    found = {"": [program(op, problem, base)]}
    seen = {(found[""][0], launch(base))}
    for knob, values in type(base).space().items():
        if knob == "body":
            continue
        others = [base.replace(**{knob: v}) for v in values if v != getattr(base, knob)]
        for config in [c for c in others if op.why_not(problem, c, H200) is None][:most]:
            made = (program(op, problem, config), launch(config))
            assert made not in seen, f"{knob} changes nothing in {config}"
            seen.add(made)
            found.setdefault(knob, []).append(made[0])
    return found
