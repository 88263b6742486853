"""Ops of torch: their definition, and when a public function may do without them.

Forward-mode derivatives, and gradients of torch.func, are refused where torch differentiates, below every transform,
so that no way around it exists. vmap may stand inside of autograd.
Autocast rules are those of torch's own ops of the kind; results written to ``out=`` are never cast, as torch's are not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from cutekernels.errors import UnsupportedProblem

# Looked up once: each dotted name costs a call 30 ns.
_is_compiling = torch.compiler.is_compiling
_dispatch_modes = torch._C._len_torch_dispatch_stack
_transforms = torch._C._functorch.peek_interpreter_stack
_GRAD = torch._C._functorch.TransformType.Grad
_is_grad_enabled = torch.is_grad_enabled
autocasting = torch._C._is_any_autocast_enabled
_Parameter = torch.nn.Parameter

_AUTOCAST_CPU = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)

Autocast = str | Callable[..., Any]  # "lower", "fp32", or a function of the op's arguments that runs in its place
Implementation = Callable[..., Any]  # (results or None, inputs, *the other arguments, less defaults at the end)


def direct(*tensors: Tensor | None) -> bool:
    """Whether a call may launch at once: on a GPU, nobody tracing, differentiating or intercepting it."""
    if _is_compiling() or _dispatch_modes() or _transforms() is not None or autocasting():
        return False
    if forward_ad._current_level >= 0:
        return False
    grad = _is_grad_enabled()
    for t in tensors:
        if t is not None:
            kind = type(t)
            if (kind is not Tensor and kind is not _Parameter) or not t.is_cuda or (grad and t.requires_grad):
                return False
    return True


def transformed() -> bool:
    """Whether a transform of torch.func (vmap, grad) is active, whose wrappers do not say what autograd wants below."""
    return _transforms() is not None


class Library(torch.library.Library):
    """The ops of this package. Whatever autograd is told of one, its derivatives by torch.func are refused."""

    def impl(self, op_name: Any, fn: Any, dispatch_key: str = "", **options: Any) -> Any:
        if dispatch_key != "Autograd":
            return super().impl(op_name, fn, dispatch_key, **options)  # type: ignore[no-untyped-call]

        op = getattr(torch.ops.cutekernels, op_name.rpartition("::")[2]).default

        def refusing(keyset: Any, *args: Any) -> Any:
            refuse_duals(op_name, args)
            if _transforms() is None and not (_is_grad_enabled() and torch._C._any_requires_grad(*args)):
                return _below_autograd(op, keyset, *args)  # as torch's own kernel does, two frames deeper
            refuse_functional(op_name, args)
            return fn(keyset, *args)

        return super().impl(op_name, refusing, dispatch_key, **options)  # type: ignore[no-untyped-call]


def _below_autograd(op: Any, keyset: Any, *args: Any) -> Any:
    with torch._C._AutoDispatchBelowAutograd():
        return op.redispatch(keyset & torch._C._after_autograd_keyset, *args)


def refuse_duals(name: str, args: Sequence[object]) -> None:
    """Refuses tensors with a tangent, which the op would drop."""
    if forward_ad._current_level >= 0:
        for t in args:
            if isinstance(t, Tensor) and forward_ad.unpack_dual(t).tangent is not None:
                raise UnsupportedProblem(
                    f"{name} has no forward-mode derivative (jvp, jacfwd, forward_ad); got a tensor with a tangent: "
                    "use reverse mode (torch.autograd.grad), or write the op out in torch"
                )


def refuse_functional(name: str, args: Sequence[object]) -> None:
    """Refuses tensors that torch.func differentiates: register_autograd's functions are autograd's alone."""
    if _transforms() is None or not _is_grad_enabled() or not torch._C._any_requires_grad(*args):
        return
    if any(one.key() == _GRAD for one in torch._C._functorch.get_interpreter_stack() or ()):
        raise UnsupportedProblem(
            f"{name} has no gradient by torch.func (grad, vjp, jacrev, hessian); got a tensor that one differentiates: "
            "use autograd (torch.autograd.grad, Tensor.backward)"
        )


def define(
    library: torch.library.Library,
    schema: str,
    cuda: Callable[..., Any],
    cpu: Callable[..., Any],
    fake: Callable[..., Any],
) -> None:
    """Defines one op of torch's with its three implementations.

    One that writes to its arguments has no gradient; here autograd is told to pass it on.
    """
    declare: Callable[[str], object] = library.define  # torch leaves both untyped
    implement: Callable[[str, Callable[..., object], str], object] = library.impl
    name = schema.partition("(")[0]
    declare(schema)
    implement(name, cuda, "CUDA")
    implement(name, without_autocast(cpu), "CPU")
    torch.library.register_fake(f"cutekernels::{name}", fake, lib=library)
    if "!)" in schema:
        op = getattr(torch.ops.cutekernels, name).default
        written = [a.name if a.is_write else None for a in op._schema.arguments]

        def resolved(*args: Any) -> Any:
            for result, t in zip(written, args, strict=False):
                if result is not None and t is not None and (t.is_neg() or t.is_conj()):
                    raise UnsupportedProblem(
                        f"{name} writes to the memory of {result} as it lies; got a view of it that negates: "
                        "write to memory of its own, or call resolve_conj().resolve_neg() first"
                    )
            return op(*[t.resolve_conj().resolve_neg() if isinstance(t, Tensor) else t for t in args])

        library.impl(name, partial(_below_autograd, op), "Autograd", with_keyset=True)
        implement(name, resolved, "Negative")
        implement(name, resolved, "Conjugate")


def without_autocast(cpu: Callable[..., Any]) -> Callable[..., Any]:
    """``cpu`` with autocast off: references choose their own types, and torch mixes no two halves."""

    def reference(*args: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(_AUTOCAST_CPU):
            return cpu(*args)

    return reference


def cast_under_autocast(library: torch.library.Library, name: str, rule: Autocast, kept: Sequence[int] = ()) -> None:
    """Gives the op ``name`` an autocast rule. The arguments at ``kept`` may stay fp32.

    ``"lower"``: floating-point operands are cast to autocast's type, as those of torch's products are. ``"fp32"``: on
    CUDA they are cast to fp32, as those of torch's norms are; elsewhere torch has no rule for norms.
    """
    op = getattr(torch.ops.cutekernels, name).default
    for device in ("cuda",) if rule == "fp32" else ("cuda", "cpu"):
        key = f"Autocast{device.upper()}"
        below = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))

        def kernel(keyset: Any, *args: Any, device: str = device, below: Any = below) -> Any:
            if callable(rule):
                return rule(*args)
            kind = torch.float32 if rule == "fp32" else torch.get_autocast_dtype(device)
            cast = [_cast(t, device, kind, i in kept) for i, t in enumerate(args)]
            with torch._C._ExcludeDispatchKeyGuard(below):
                return op(*cast)

        library.impl(name, kernel, key, with_keyset=True)


def _cast(t: Any, device: str, dtype: torch.dtype, kept: bool) -> Any:
    if not isinstance(t, Tensor) or t.device.type != device or not t.is_floating_point():
        return t
    return t if t.dtype == torch.float64 or (kept and t.dtype == torch.float32) else t.to(dtype)


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
    autocast: Autocast | None = None,
    kept: Sequence[int] = (),
) -> None:
    """Defines ``name(inputs, options)`` and ``name_out(inputs, results, options)`` for GPU, CPU and fakes.

    ``returns`` are those of the two. ``autocast`` and ``kept``: the first one's, see :func:`cast_under_autocast`.
    Without ``backward`` a gradient is refused with a clear error.
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
    if autocast is not None:
        cast_under_autocast(library, name, autocast, kept)


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
