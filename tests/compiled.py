"""Compiled CuTe kernels as tests look at them: which to compile, machine code, disassembly, opcodes."""

from __future__ import annotations

import inspect
import math
import random
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, wraps
from itertools import count
from typing import Any, ParamSpec, TypeVar

import pytest

from cutekernels import gpu
from cutekernels.backends.cubin import cuobjdump
from cutekernels.op import Config

H200 = gpu.lookup("h200")
P = ParamSpec("P")
T = TypeVar("T")
TARGETS = [gpu.lookup(name) for name in ("a100", "l40s", "h200", "rtx5090")]


# ---- what to compile ------------------------------------------------------------------------------------


def pairs(problems: Iterable[Any]) -> list[tuple[Any, gpu.GpuSpec]]:
    """Each problem with one of the GPUs, in turns.

    What a kernel is built of changes with the GPU and with the problem, hardly ever with a pair of them.
    """
    return [(p, TARGETS[i % len(TARGETS)]) for i, p in enumerate(problems)]


def paired(names: Iterable[str]) -> Any:
    """Parameters ``(name, spec)``, as :func:`pairs` makes them."""
    made = [pytest.param(n, spec, id=f"{n}-{spec.target}") for n, spec in pairs(names)]
    return pytest.mark.parametrize(("name", "spec"), made)


def in_turns(ops: Mapping[str, Any]) -> Any:
    """Parameters ``(op, spec)``: each op with two of the GPUs, so that each GPU has every other op."""
    pairs = [(name, op, TARGETS[(i + j) % 4]) for i, (name, op) in enumerate(ops.items()) for j in (0, 2)]
    made = [pytest.param(op, spec, id=f"{name}-{spec.target}") for name, op, spec in pairs]
    return pytest.mark.parametrize(("op", "spec"), made)


def half(cases: Mapping[str, T], names: str) -> dict[str, T]:
    """``cases`` without every other one of those whose name the pattern ``names`` finds.

    By the parity of a number's bits, so that cases made of a product of factors keep each value of each factor.
    """
    number = count()
    return {n: c for n, c in cases.items() if not re.search(names, n) or next(number).bit_count() % 2 == 0}


def once(build: Callable[P, T]) -> Callable[P, T]:
    """``build`` with what it made kept, like ``functools.cache``, which takes a default given in full for another."""
    kept, signature = cache(build), inspect.signature(build)

    @wraps(build)
    def built(*args: P.args, **named: P.kwargs) -> T:
        bound = signature.bind(*args, **named)
        bound.apply_defaults()
        return kept(*bound.args)

    return built


def area(config: Config) -> int:
    """The product of a config's tiles: the smaller, the faster it compiles."""
    return math.prod(getattr(config, name) for name in config.space() if name.startswith("tile"))


def having(configs: Iterable[Any], **values: Any) -> list[Any]:
    """Those of ``configs`` whose knobs have these values."""
    return [c for c in configs if all(getattr(c, name) == value for name, value in values.items())]


def smaller(configs: Sequence[Any], rng: random.Random) -> Any:
    """A random config of the half with the smaller tiles."""
    return rng.choice(sorted(configs, key=area)[: (len(configs) + 1) // 2])


def one_knob_apart(configs: Sequence[Any], knob: str, others: tuple[str, ...] = ()) -> tuple[Any, Any] | None:
    """Two of ``configs`` that differ in ``knob``, and otherwise at most in ``others``; None where no two do.

    They have the smallest tiles, so that most knobs share the first of them, and it is compiled once. A bound on
    registers, ``ctas_per_sm``, is felt by the largest.
    """
    sign = -1 if knob == "ctas_per_sm" else 1
    alike: dict[tuple[Any, ...], list[Any]] = {}
    for config in sorted(configs, key=lambda c: sign * area(c)):
        rest = tuple(getattr(config, name) for name in config.space() if name not in (knob, *others))
        alike.setdefault(rest, []).append(config)
    found = [(g[0], c) for g in alike.values() if (c := next((c for c in g if differ(g[0], c, knob)), None))]
    return min(found, key=lambda pair: max(sign * area(c) for c in pair)) if found else None


Value = tuple[str, str, Any]  # body, knob, value


def values(configs: Iterable[Any], apart: bool = True) -> set[Value]:
    """The values that ``configs`` have, of each body, or of any."""
    return {(getattr(c, "body", "") if apart else "", name, value) for c in configs for name, value in vars(c).items()}


def unreached(missing: set[Value], problems: Iterable[tuple[Any, Any]]) -> set[Value]:
    """Those of ``missing`` that no valid config of ``problems``, pairs with an op, has on an H200: it runs all bodies.

    The search ends with the last one found. Values of the body "" may be any body's.
    """
    left = set(missing)
    for op, problem in problems:
        wanted: dict[str, set[str]] = {}
        for body, name, _ in left:
            wanted.setdefault(body, set()).add(name)
        for config in op.valid(problem, H200) if left else ():
            for body in ("", getattr(config, "body", "")):
                left -= {(body, name, getattr(config, name)) for name in wanted.get(body, ())}
    return left


def differ(first: Any, second: Any, knob: str) -> bool:
    return getattr(first, knob) != getattr(second, knob)


# ---- what was compiled ----------------------------------------------------------------------------------


def cubin(artifact: Any) -> bytes:
    """The ELF file of a CuTe artifact's kernel."""
    return artifact._function.artifacts.CUBIN  # type: ignore[no-any-return]


class _Stopped(BaseException):
    """Carries a program out of a compiler, past those who report what it says."""


def handed(owner: Any, stage: str, build: Callable[P, object], *args: P.args, **named: P.kwargs) -> tuple[Any, ...]:
    """The first argument that ``build(...)`` hands to ``owner``'s method ``stage``, which it does not enter."""

    def stop(self: Any, module: Any, *rest: Any, **named: Any) -> None:
        raise _Stopped(str(module), *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, stage, stop)
        with pytest.raises(_Stopped) as stopped:
            build(*args, **named)
    return stopped.value.args


def program(build: Callable[P, object], *args: P.args, **named: P.kwargs) -> tuple[str, str]:
    """The kernel and the launcher that ``build(...)`` traces, as they go to the DSL's compiler.

    A third of a compile; alike they are alike as machine code. Names are left out: they hold the config.
    """
    from cutlass.base_dsl.compiler import Compiler

    text = handed(Compiler, "compile", build, *args, **named)[0]
    kernel, _, launcher = re.sub(r"@[\w:@.]+", "", text).partition("func.func")
    assert "cuda.kernel" in kernel and "cuda.launch" in launcher, "the DSL's programs look different"
    return kernel, launcher


def run_static(collect: Callable[[], None]) -> None:
    """Runs plain Python, of which all is static, where the DSL's functions work."""
    import cutlass.cute as cute

    @cute.jit
    def look() -> None:
        collect()

    cute.compile(look, options="--gpu-arch=sm_90a")


def sass(elf: bytes) -> str:
    """The disassembly of a cubin."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(elf)
        file.flush()
        command = [str(cuobjdump()), "-sass", file.name]
        return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout


def opcodes(artifact: Any) -> Counter[str]:
    """Opcodes with their modifiers, counted."""
    lines = sass(cubin(artifact))
    found = Counter(re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+ )?([A-Z][\w.]+)", lines, re.MULTILINE))
    assert found["EXIT"], lines[:500]
    return found
