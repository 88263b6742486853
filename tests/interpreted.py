"""Runs an op's Triton kernel on CPU tensors, in Triton's interpreter, through the op's own ``build`` and ``bind``.

Triton decides at decoration time whether a kernel is interpreted, so interpreted cases run in a child process with
TRITON_INTERPRET=1. A family's ``cases.py`` is the child's script: it reads cases as JSON on stdin and prints one
reply each (:func:`serve`). :func:`kernel_tests` makes the tests of these replies.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import json
import os
import runpy
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from cutekernels import gpu
from cutekernels.backends.triton import Values

H200 = gpu.lookup("h200")
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
of_each_dtype = pytest.mark.parametrize("dtype", [*DTYPES.values(), torch.float64], ids=str)
Case = dict[str, Any]
Reply = dict[str, Any]


# ---- the tests ------------------------------------------------------------------------------------------


def correct(reply: Reply) -> bool:
    """Whether errors are within tolerance and nothing outside of the results was written."""
    return bool(reply["ratio"] <= 1 and reply["outside"])


def kernel_tests(
    script: str,
    cases: Mapping[str, Case],
    planted: Mapping[str, Case],
    others: Mapping[str, Case] | None = None,
    correct: Callable[[Reply], bool] = correct,
) -> tuple[Any, Callable[..., None], Callable[..., None]]:
    """The fixture ``interpreted`` and two tests: replies to ``cases`` are correct, those to ``planted`` bugs are not.

    The cases are one test, which names those that are wrong: one process has run them all. The fixture maps each
    case's name to its reply; ``others`` are cases that the test file judges itself.
    """
    everything = {**cases, **planted, **(others or {})}
    assert len(everything) == len(cases) + len(planted) + len(others or {}), "two cases of one name"

    @pytest.fixture(scope="session")
    def interpreted() -> dict[str, Reply]:
        return dict(zip(everything, replies(script, list(everything.values())), strict=True))

    def test_kernel_numerics(interpreted: dict[str, Reply]) -> None:
        wrong = {case: interpreted[case] for case in cases if not correct(interpreted[case])}
        assert not wrong, f"{len(wrong)} of {len(cases)} cases: {wrong}"

    @pytest.mark.parametrize("bug", planted)
    def test_a_planted_bug_is_caught(interpreted: dict[str, Reply], bug: str) -> None:
        assert not correct(interpreted[bug]), interpreted[bug]

    return interpreted, test_kernel_numerics, test_a_planted_bug_is_caught


def replies(script: str, cases: Any) -> Any:
    """Output of ``script``, read as JSON, when run under the interpreter with ``cases`` as JSON on its stdin."""
    nursery = _nursery()
    assert nursery.stdin is not None and nursery.stdout is not None
    with tempfile.TemporaryDirectory() as folder:
        said = Path(folder, "stderr")
        Path(folder, "stdin").write_text(json.dumps(cases))
        nursery.stdin.write(json.dumps([script, folder, {**os.environ, **_ENVIRONMENT}]) + "\n")
        nursery.stdin.flush()
        code = nursery.stdout.readline()
        assert code == "0\n", said.read_text()[-4000:] if said.exists() else "the process that forks has ended"
        return json.loads(Path(folder, "stdout").read_text())


_ENVIRONMENT = {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


@cache
def _nursery() -> subprocess.Popen[str]:
    """The process of which one is forked for each script: torch and Triton are imported once, not by each."""
    program, env = "from tests.interpreted import nurse; nurse()", os.environ | _ENVIRONMENT
    made = subprocess.Popen([sys.executable, "-c", program], stdin=-1, stdout=-1, text=True, env=env)
    atexit.register(made.communicate)  # which ends its stdin, and it
    return made


# ---- the child process ----------------------------------------------------------------------------------


def nurse() -> None:
    """The nursery's main function."""
    import triton.runtime.interpreter  # noqa: F401

    gc.freeze()
    for line in sys.stdin:
        script, folder, environment = json.loads(line)
        if child := os.fork():
            print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
            continue
        os.environ.update(environment)
        os.dup2(os.open(f"{folder}/stderr", os.O_WRONLY | os.O_CREAT), 2)
        sys.stdin, sys.stdout = open(f"{folder}/stdin"), open(f"{folder}/stdout", "w")  # noqa: SIM115
        try:
            runpy.run_path(script, run_name="__main__")
            sys.stdout.flush()
        except BaseException:  # noqa: BLE001  the fork ends here, whatever it met
            traceback.print_exc()
            os._exit(1)
        os._exit(0)


def serve(reply_to: Callable[[Case], Reply], faults: Mapping[str, tuple[Any, Any]] | None = None) -> None:
    """The child's main function: reads cases from stdin and prints their replies.

    ``faults``: (module, replacement) for each function that a case may have replaced, named by its ``"planted"``.
    """
    _make_fast()
    gc.freeze()
    gc.set_threshold(50_000)
    found = []
    for case in json.load(sys.stdin):
        name = case.get("planted")
        if name is None:
            replacing: Any = nullcontext()
        else:
            module, fault = (faults or {})[name]
            replacing = mock.patch.object(module, name, fault)
        with replacing:
            found.append(reply_to(case))
    json.dump(found, sys.stdout)


def _make_fast() -> None:
    """Spares the interpreter what it does anew at each operation.

    Triton patches its language in every call of a device function, builds a table of types for every look-up, makes,
    wraps and compares each tensor's shape, looks for constants within everything, and promotes operands of one type. It
    computes each sum of integers in 64 bits too, whose overflow it reports in its debug mode alone, which is off. A
    reduction by a function of the kernel's own goes by halves, as on a GPU, where the interpreter goes from element to
    element.
    """
    from triton.language import core, semantic
    from triton.runtime import interpreter

    patch, unpatched = interpreter._patch_lang, SimpleNamespace(restore=lambda: None)
    np_dtype, init, equal = interpreter._get_np_dtype, core.tensor.__init__, core.tuple.__eq__
    unwrap, block_init = core._unwrap_if_constexpr, core.block_type.__init__
    promote = semantic.TritonSemantic.binary_op_type_checking_impl
    convert, nested, truth = (
        interpreter._implicit_cvt,
        (list, tuple, core.tuple),
        (core.constexpr(False), core.constexpr(True)),
    )
    modules: set[int] = set()
    dtypes: dict[str, Any] = {}
    shapes: dict[tuple[int, ...], dict[str, Any]] = {}
    blocks: dict[tuple[Any, ...], dict[str, Any]] = {}

    def patch_once(fn: Any) -> Any:
        if id(fn.__globals__) not in modules:
            modules.add(id(fn.__globals__))
            patch(fn)
        return unpatched

    def known_dtype(kind: Any) -> Any:
        name = kind.scalar.name
        if name not in dtypes:
            dtypes[name] = np_dtype(kind)
        return dtypes[name]

    def known_shape(self: Any, handle: Any, type: Any) -> None:
        shape = type.shape if type.is_block() else ()
        if shape in shapes:
            self.__dict__ |= shapes[shape] | {"handle": handle, "type": type, "dtype": type.scalar}
        else:
            init(self, handle, type)
            shapes[shape] = {k: v for k, v in vars(self).items() if k not in ("handle", "type", "dtype")}

    def unwrapped(o: Any) -> Any:
        if type(o) is core.constexpr:
            return o.value
        return unwrap(o) if isinstance(o, nested) else o

    def known_block(self: Any, element_ty: Any, shape: Any) -> None:
        pointer = (element_ty.const, element_ty.address_space) if element_ty.is_ptr() else None
        key = (element_ty.name, pointer, *map(unwrapped, shape))
        if key not in blocks:
            block_init(self, element_ty, shape)
            blocks[key] = self.__dict__
        else:
            self.__dict__ = blocks[key]

    def same(a: Any, b: Any) -> Any:
        return truth[a is b or a.values == b.values] if type(b) is core.tuple else equal(a, b)

    def by_halves(self: Any, inputs: Any) -> Any:
        assert self.axis is not None
        types = [t.dtype for t in inputs]
        parts = [t.handle.data.swapaxes(0, self.axis) for t in inputs]
        while (half := len(parts[0]) // 2) > 0:
            pairs = [
                self.to_tensor(p[at], kind)
                for at in (slice(half), slice(half, None))
                for p, kind in zip(parts, types, strict=True)
            ]
            found = self.combine_fn.fn(*pairs)
            parts = [t.handle.data for t in (found if isinstance(found, tuple) else (found,))]
        parts = [
            p.swapaxes(0, self.axis) if self.keep_dims else p.swapaxes(0, self.axis).squeeze(self.axis) for p in parts
        ]
        return [self.to_tensor(p, kind) for p, kind in zip(parts, types, strict=True)]

    def promoted(self: Any, lhs: Any, rhs: Any, *flags: bool, **more: bool) -> Any:
        if type(lhs) is core.tensor and type(rhs) is core.tensor and len(flags) < 4:  # the fourth is of a division
            one, other = lhs.type, rhs.type
            # Blocks of one type have one dictionary: see known_block.
            if (one is other or vars(one) is vars(other)) and not lhs.dtype.is_ptr():
                return lhs, rhs
        return promote(self, lhs, rhs, *flags, **more)

    assert not interpreter.InterpreterOptions().debug
    semantic.TritonSemantic.binary_op_sanitize_overflow_impl = lambda self, lhs, rhs, binary_op: None
    semantic.TritonSemantic.binary_op_type_checking_impl = promoted
    # A group's values: those compiled in stay what they are.
    interpreter._implicit_cvt = lambda arg: arg.value if type(arg) is core.constexpr else convert(arg)
    interpreter._patch_lang, interpreter._get_np_dtype = patch_once, known_dtype
    interpreter.ReduceOps.generic_reduce = by_halves
    core.tensor.__init__, core.block_type.__init__ = known_shape, known_block
    core._unwrap_if_constexpr = unwrapped
    core.tuple.__eq__ = same
    for name, place in {"create_masked_load": 2, "create_masked_store": 3, "create_atomic_rmw": 4}.items():
        setattr(interpreter.InterpreterBuilder, name, _masked(getattr(interpreter.InterpreterBuilder, name), place))


def _masked(method: Callable[..., Any], place: int) -> Callable[..., Any]:
    """``method``, whose mask may be of integers: a block's and a scalar's conjunction is, which Triton 3.9 refuses."""

    def masked(*args: Any) -> Any:
        args[place].data = args[place].data.astype(bool, copy=False)
        return method(*args)

    return masked


def fill(memory: Tensor, generator: torch.Generator, mean: float = 0.0) -> Tensor:
    """Fills ``memory`` with normal numbers, 2 % of them 40 times as large."""
    values = torch.randn(memory.shape, generator=generator) + mean
    values[torch.rand(memory.shape, generator=generator) < 0.02] *= 40
    return memory.copy_(values)


def nan_outside(view: Tensor, memory: Tensor) -> bool:
    """Whether ``memory``, filled with NaN before ``view`` of it was written, is still NaN everywhere else."""
    outside = torch.ones_like(memory, dtype=torch.bool)
    outside.as_strided(view.shape, view.stride(), view.storage_offset()).fill_(False)
    return bool(memory[outside].isnan().all())


def _at(address: int, kind: str) -> Tensor:
    """The first element of the scratch memory at ``address``."""
    return torch.frombuffer((ctypes.c_char * 8).from_address(address), dtype=_SCRATCH[kind], count=1)


_SCRATCH = {"*i32": torch.int32, "*i64": torch.int64, "*fp32": torch.float32}


def in_triton(op: Any, problem: Any, spec: gpu.GpuSpec = H200) -> list[Any]:
    """The valid configs whose body is Triton's: the interpreter runs no other."""
    return [c for c in op.valid(problem, spec) if getattr(c, "body", "triton") == "triton"]


def build_arguments(op: Any, problem: Any, config: Any, spec: gpu.GpuSpec = H200) -> dict[str, Any]:
    """The arguments of ``compile_kernel`` in ``op.build``, the kernel itself as ``fn``."""
    with mock.patch("cutekernels.backends.triton.compile_kernel") as compiling:
        op.build(problem, config, spec)
    (fn,) = compiling.call_args.args
    return {**compiling.call_args.kwargs, "fn": fn}


def grouped(fn: Any, names: Mapping[str, Any]) -> dict[str, Any]:
    """A kernel's parameters of its values by name; in groups, those compiled in are marked as constexprs."""
    import triton.language as tl

    values = Values.of(fn)
    given = values.defaults | dict(names)
    inside = {n: tl.constexpr(v) for n, v in given.items() if n.isupper() and len(values.paths[n]) > 1}
    return values.grouped(given | inside)


def interpret(
    op: Any,
    results: Sequence[Tensor],
    inputs: Sequence[Tensor | None],
    scalars: Sequence[float] = (),
    *,
    config: str | None = None,
    edit: dict[str, int] | None = None,
    spec: gpu.GpuSpec = H200,
    **options: Any,
) -> str:
    """Launches ``op`` under the interpreter; returns the text of its problem.

    ``config`` is text, None for the op's default. ``edit`` adds to run-time integers, to plant bugs; "then.rows" is the
    argument ``rows`` of an op that the launch itself runs, which is interpreted too. Constants and divisibility that
    ``build`` promised the compiler are checked against what ``bind`` passes. Scratch memory begins as NaN.
    """
    problem = op.problem(*results, *inputs, **options)
    chosen = op.default(problem, spec) if config is None else op.Config.parse(config)
    op.check(problem, chosen, spec)
    built = build_arguments(op, problem, chosen, spec)
    tensors = {t.data_ptr(): t.as_strided((1,), (1,)) for t in (*results, *inputs) if t is not None and t.numel()}
    tensors[0] = torch.empty(1, dtype=torch.int32)  # where empty operands point, of which nothing is read
    tensors = {at: t if t.dtype != torch.float8_e4m3fn else t.view(torch.uint8) for at, t in tensors.items()}

    def kernel(grid: tuple[int, int, int], *args: Any) -> None:
        names = dict(zip(built["signature"], args, strict=False))
        constants = built["constexprs"]
        for name, value in constants.items():
            passed = names.get(name, value)
            if name.endswith("_ptr"):  # an absent operand
                assert passed in (0, None), (name, passed)
            else:
                assert passed == value or name.endswith("_row"), (name, passed, value)  # the pitch of a single row
        for name, divisor in built["divisible"].items():
            assert names[name] % divisor == 0 or name.endswith("_row"), (name, names[name], divisor)
        names = {n: v + edit.get(n, 0) if edit else v for n, v in names.items()} | constants
        names |= {
            n: tensors[v] if v in tensors else _at(v, built["signature"][n])
            for n, v in names.items()
            if n.endswith("_ptr") and n not in constants
        }
        built["fn"][grid](**grouped(built["fn"], names), num_warps=built["options"].get("num_warps", 4))

    from cutekernels.ops.norms import passes

    def scratch(like: Tensor, *shape: int) -> Tensor:
        return torch.full(shape, float("nan"))

    healthy = passes.scratch, passes.run, gpu.detect
    passes.scratch, gpu.detect = scratch, lambda device=None: spec  # type: ignore[assignment]
    then = {name.removeprefix("then."): n for name, n in (edit or {}).items() if name.startswith("then.")}
    passes.run = lambda op, results, inputs: interpret(op, results, inputs, edit=then)  # type: ignore[assignment]
    try:
        op.bind(problem, chosen, kernel)(*results, *inputs, *scalars)
    finally:
        passes.scratch, passes.run, gpu.detect = healthy  # type: ignore[assignment]
    return str(problem)
