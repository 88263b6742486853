"""Runs an op's Triton kernel on CPU tensors, in Triton's interpreter, through the op's own ``build`` and ``bind``.

Triton decides at decoration time whether a kernel is interpreted, so this works only in a process started with
TRITON_INTERPRET=1: a test module calls :func:`replies` with cases as JSON, and runs itself as the child's script.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from cutekernels import gpu

H200 = gpu.lookup("h200")


def replies(script: str, cases: Any, timeout_s: float = 600) -> Any:
    """What ``script`` prints as JSON when run under the interpreter with ``cases`` as JSON on its stdin."""
    done = subprocess.run(
        [sys.executable, script],
        input=json.dumps(cases),
        capture_output=True,
        text=True,
        timeout=timeout_s,
        env=os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout)


def _at(address: int, kind: str) -> Tensor:
    """The first element of memory that a launch took for itself."""
    return torch.frombuffer((ctypes.c_char * 8).from_address(address), dtype=_SCRATCH[kind], count=1)


_SCRATCH = {"*i32": torch.int32, "*i64": torch.int64, "*fp32": torch.float32}


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
    """Launches ``op`` interpreted; returns the problem it posed.

    ``config`` is text, None for the op's default. ``edit`` changes run-time integers, to plant bugs ("then.rows" one of
    an op that the launch runs). What ``build``
    promised the compiler (constants in an argument's place, divisibility) is checked against what ``bind`` passes.
    Scratch memory begins as NaN, and ops that the launch runs are interpreted too.
    """
    from cutekernels.backends import triton as backend

    problem = op.problem(*results, *inputs, **options)
    chosen = op.default(problem, spec) if config is None else op.Config.parse(config)
    op.check(problem, chosen, spec)
    built: dict[str, Any] = {}
    real = backend.compile_kernel
    backend.compile_kernel = lambda fn, **given: built.update(given, fn=fn)  # type: ignore[assignment]
    try:
        op.build(problem, chosen, spec)
    finally:
        backend.compile_kernel = real
    tensors = {t.data_ptr(): t.as_strided((1,), (1,)) for t in (*results, *inputs) if t is not None and t.numel()}

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
            if n.endswith("_ptr") and v
        }
        built["fn"][grid](**names, num_warps=built["options"].get("num_warps", 4))

    from cutekernels.ops.shared import tensor_op

    def scratch(like: Tensor, *shape: int) -> Tensor:
        return torch.full(shape, float("nan"))

    healthy = tensor_op.scratch, tensor_op.run, gpu.detect
    tensor_op.scratch, gpu.detect = scratch, lambda device=None: spec  # type: ignore[assignment]
    then = {name.removeprefix("then."): n for name, n in (edit or {}).items() if name.startswith("then.")}
    tensor_op.run = lambda op, results, inputs: interpret(op, results, inputs, edit=then)  # type: ignore[assignment]
    try:
        op.bind(problem, chosen, kernel)(*results, *inputs, *scalars)
    finally:
        tensor_op.scratch, tensor_op.run, gpu.detect = healthy  # type: ignore[assignment]
    return str(problem)
