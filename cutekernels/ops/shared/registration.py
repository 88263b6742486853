"""Ops of torch: their definition, and when a public function may do without them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from cutekernels.errors import UnsupportedProblem

# Looked up once: each dotted name costs a call 30 ns.
_is_compiling = torch.compiler.is_compiling
_dispatch_modes = torch._C._len_torch_dispatch_stack
_transforms = torch._C._functorch.peek_interpreter_stack
_is_grad_enabled = torch.is_grad_enabled
_Parameter = torch.nn.Parameter

Implementation = Callable[..., Any]  # (results or None, inputs, *the other arguments, less defaults at the end)


def direct(*tensors: Tensor | None) -> bool:
    """Whether a call may launch at once: on a GPU, nobody tracing, differentiating or intercepting it."""
    if _is_compiling() or _dispatch_modes() or _transforms() is not None:
        return False
    grad = _is_grad_enabled()
    for t in tensors:
        if t is not None:
            kind = type(t)
            if (kind is not Tensor and kind is not _Parameter) or not t.is_cuda or (grad and t.requires_grad):
                return False
    return True


def define(
    library: torch.library.Library,
    schema: str,
    cuda: Callable[..., Any],
    cpu: Callable[..., Any],
    fake: Callable[..., Any],
) -> None:
    """Defines one op of torch's with its three implementations."""
    declare: Callable[[str], object] = library.define  # torch leaves both untyped
    implement: Callable[[str, Callable[..., object], str], object] = library.impl
    name = schema.partition("(")[0]
    declare(schema)
    implement(name, cuda, "CUDA")
    implement(name, cpu, "CPU")
    torch.library.register_fake(f"cutekernels::{name}", fake, lib=library)


def define_with_out(
    library: torch.library.Library,
    name: str,
    inputs: str,
    options: str,
    implementations: tuple[Implementation, Implementation, Implementation],
    *,
    results: tuple[str, ...] = ("out",),
    returns: tuple[str, str] = ("Tensor", "()"),
    backward: Callable[..., Any] | None = None,
    setup_context: Callable[..., None] | None = None,
) -> None:
    """Defines ``name(inputs, options)`` and ``name_out(inputs, results, options)`` for GPU, CPU and fakes.

    ``returns`` are those of the two. Without ``backward`` a gradient is refused with a clear error.
    """
    n = inputs.count(",") + 1
    places = ", ".join([f"Tensor({chr(ord('a') + i)}!) {result}" for i, result in enumerate(results)])
    functional = [with_results(f, n, 0) for f in implementations]
    writing = [with_results(f, n, len(results)) for f in implementations]
    define(library, f"{name}({inputs}, {options}) -> {returns[0]}", *functional)
    define(library, f"{name}_out({inputs}, {places}, {options}) -> {returns[1]}", *writing)
    torch.library.register_autograd(
        f"cutekernels::{name}", backward or no_gradient(name), setup_context=setup_context, lib=library
    )


def with_results(f: Implementation, inputs: int, results: int) -> Callable[..., Any]:
    """``f`` as torch calls it: with the inputs, that many results, and the other arguments."""
    if not results:
        return lambda *args: f(None, args[:inputs], *args[inputs:])
    behind = inputs + results
    return lambda *args: f(args[inputs:behind], args[:inputs], *args[behind:])


def no_gradient(name: str) -> Callable[..., Any]:
    """The backward of an op that has none."""

    def refuse(ctx: Any, *grads: Tensor) -> None:
        twice = ": its op is differentiable once; for second derivatives write it out in torch"
        raise UnsupportedProblem(f"{name} has no gradient{twice if 'backward' in name else ''}")

    return refuse
