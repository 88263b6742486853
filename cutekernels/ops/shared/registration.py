"""Ops of torch: their definition, and how calls reach them.

Three ways lead to one launch (:class:`Path`):

- plain tensors: the launch itself or, where a gradient is wanted, an ``autograd.Function`` around it; torch's
  dispatcher takes no part;
- graphs (torch.compile, export): the composite op ``cutekernels::name``, which AOTAutograd opens into the private op
  ``cutekernels::_name``. That one has no Autograd kernel, so a graph's call of it is one hop, or none where Inductor
  writes the launch into its code (``inductor.py``). Dynamo never traces the Function;
- whatever intercepts calls (subclasses, dispatch modes, torch.func, tangents, fake tensors): the composite's body.

Autocast rules are those of torch's own ops of the kind; results written to ``out=`` are never cast, as torch's are not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function, forward_ad

from cutekernels import torch_names
from cutekernels.errors import UnsupportedProblem
from cutekernels.ops.shared import inductor
from cutekernels.ops.shared.recording import recordable

LIBRARY = torch.library.Library("cutekernels", "FRAGMENT")  # torch.ops.cutekernels.*

# Looked up once: each dotted name costs a call 30 ns.
_is_compiling = torch.compiler.is_compiling
_traced_by_dynamo = torch.compiler.is_dynamo_compiling  # cheap, and a constant to Dynamo
_transforms = torch_names.transforms
_is_grad_enabled = torch.is_grad_enabled
_any_requires_grad = torch_names.any_requires_grad
autocasting = torch_names.autocasting
_is_zero = torch_names.is_zero
_levels = torch_names.levels
_included, _QUIET = torch_names.included, torch_names.QUIET
_Parameter = torch.nn.Parameter
PLAIN = (Tensor, _Parameter)  # of other types, fakes among them, no address is to be read

Autocast = str | Callable[..., Any]  # "lower", "fp32", or a function of the op's arguments that returns others
Implementation = Callable[..., Any]  # (results or None, inputs, *the other arguments, less defaults at the end)
Gradient = Callable[..., tuple[Any, ...]]  # (ctx, *gradients of results) -> a gradient or None for each argument
Remember = Callable[[Any, tuple[Any, ...], Any], None]  # (ctx, arguments, results)


def plain(tensors: Sequence[Tensor | None]) -> bool | None:
    """Where a call of ``tensors`` may launch at once: True on a GPU, False on the CPU; None where torch has to step in.

    Not asked here: autocast, and whether somebody traces by ``torch.compiler``.
    """
    gpu = None
    for t in tensors:
        if t is not None:
            kind = type(t)
            if (kind is not Tensor and kind is not _Parameter) or t.is_neg() or _is_zero(t):
                return None  # values that memory does not hold, or somebody else's
            if not t.is_cuda and (t.layout is not torch.strided or t.is_nested or t.is_quantized):
                return None  # references would take it; launches find that it has no address
            if gpu is None:
                gpu = t.is_cuda or (False if t.is_cpu else None)
    if _levels._current_level >= 0 or _included().raw_repr() not in _QUIET:
        return None
    return gpu


def undisturbed(*tensors: Tensor | None) -> bool | None:
    """:func:`plain`, where also nobody traces, casts or wants a gradient; else None."""
    if _is_compiling() or autocasting() or (_is_grad_enabled() and _any_requires_grad(*tensors)):
        return None
    return plain(tensors)


def direct(*tensors: Tensor | None) -> bool:
    """Whether a call may launch at once on a GPU."""
    return undisturbed(*tensors) is True


def transformed() -> bool:
    """Whether a transform of torch.func (vmap, grad) is active, whose wrappers do not say what autograd wants below."""
    return _transforms() is not None


class Path:
    """How calls of one op, as ``cutekernels::name`` declares its arguments, reach its launch.

    Args:
        schema: of the composite op: ``"name(Tensor x, float eps) -> Tensor"``.
        kernels: the launch on a GPU and the computation on the CPU, of all arguments; they return the results.
        op: the same as an op of torch, or a function of such ops, for graphs and tensors that are not plain.
        remember: ``(ctx, arguments, results)``, saves for the gradient.
        gradient: ``(ctx, *gradients of results)``; None for an op without one, which a backward refuses.
        autocast: the rule for floating-point tensors: ``"lower"`` as torch's products have it, ``"fp32"`` (on a GPU)
            as torch's norms have it, or a function from arguments to results in the op's place.
        kept: places of arguments that ``"lower"`` leaves in fp32.
    """

    def __init__(
        self,
        schema: str,
        kernels: tuple[Callable[..., Any], Callable[..., Any]],
        op: Callable[..., Any],
        *,
        remember: Remember | None = None,
        gradient: Gradient | None = None,
        autocast: Autocast | None = None,
        kept: Sequence[int] = (),
    ) -> None:
        self.name = schema.partition("(")[0]
        self._gpu, self._cpu = kernels[0], without_autocast(kernels[1])
        self.op = op
        self._rule, self._kept = autocast, kept
        LIBRARY.define(schema)
        LIBRARY.impl(self.name, self._composite, "CompositeImplicitAutograd")
        self.node = getattr(torch.ops.cutekernels, self.name).default
        arguments = self.node._schema.arguments
        self._defaults = tuple([a.default_value for a in arguments])
        self._tensors = sum("Tensor" in str(a.type) for a in arguments)
        keep = remember or _nothing
        backward = gradient or no_gradient(self.name)

        # In the form that torch.func takes, of ops.
        traced = _function(self.name, backward, forward=op, setup_context=keep)
        traced.generate_vmap_rule = True
        self._traced: Callable[..., Any] = traced.apply
        self.differentiated = _eager(self.name, self._gpu, keep, backward)
        self._differentiated_on_cpu = _eager(self.name, self._cpu, keep, backward)

    def __call__(self, *args: Any) -> Any:
        """The results for all of the op's arguments, differentiable where gradients are enabled."""
        if _traced_by_dynamo():
            return self.node(*args)
        tensors = args[: self._tensors]
        gpu = plain(tensors)
        if gpu is None or (self._rule is not None and autocasting()):
            return self.node(*args) if _is_compiling() else self.through_ops(*args)
        if _is_grad_enabled() and _any_requires_grad(*tensors):
            return self.differentiated(*args) if gpu else self._differentiated_on_cpu(*args)
        return self._gpu(*args) if gpu else self._cpu(*args)

    def through_ops(self, *args: Any) -> Any:
        """The op by way of torch's dispatcher, whoever intercepts it."""
        if autocasting() and self._rule is not None:
            if callable(self._rule):
                return self._rule(*args)
            args = self._cast(args)
        tensors = args[: self._tensors]
        refuse_duals(self.name, tensors)
        if _transforms() is not None or (_is_grad_enabled() and _any_requires_grad(*tensors)):
            return self._traced(*args)
        return self.op(*args)

    def _composite(self, *args: Any) -> Any:
        if _transforms() is not None and _is_grad_enabled():
            refuse_functional(self.name, args)
        return self.through_ops(*args, *self._defaults[len(args) :])

    def _cast(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        device = next(t for t in args if t is not None).device.type
        if self._rule == "fp32":
            if device != "cuda":
                return args
            kind = torch.float32
        elif not torch.is_autocast_enabled(device):
            return args
        else:
            kind = torch.get_autocast_dtype(device)
        return tuple([_cast(t, device, kind, i in self._kept) for i, t in enumerate(args)])


def _eager(name: str, kernel: Callable[..., Any], keep: Remember, backward: Gradient) -> Callable[..., Any]:
    """``kernel`` with a gradient, in the form whose apply is cheapest; never seen by Dynamo or torch.func."""

    def forward(ctx: Any, *args: Any) -> Any:
        if type(args[-1]) is tuple:  # a call that ``CallCache.replay`` found; autograd takes None beyond its arguments
            call, inputs, addresses, scalars, args = args[-1]
            made = call.run(None, inputs, addresses, scalars)
            made = made[0] if len(made) == 1 else made
        else:
            made = kernel(*args)
        keep(ctx, args, made)
        return made

    return torch_names.eager_apply(_function(name, backward, forward=forward))


def _function(name: str, backward: Gradient, **methods: Callable[..., Any]) -> Any:
    """A Function that autograd's graph calls ``name``."""
    return type(name, (Function,), {key: staticmethod(f) for key, f in (methods | {"backward": backward}).items()})


def _nothing(ctx: Any, args: tuple[Any, ...], output: Any) -> None:
    """Saves nothing: for an op without a gradient."""


def _cast(t: Any, device: str, dtype: torch.dtype, kept: bool) -> Any:
    if not isinstance(t, Tensor) or t.device.type != device or not t.is_floating_point():
        return t
    if t.dtype == torch.float64 or t.element_size() == 1:  # what is stored in FP8 has its scales
        return t
    return t if kept and t.dtype == torch.float32 else t.to(dtype)


def refuse_functional(name: str, args: Sequence[object]) -> None:
    """Refuses, within a graph, tensors that torch.func differentiates: AOTAutograd would lose their gradients."""
    if torch_names.differentiated_by_transform():
        raise UnsupportedProblem(
            f"{name} has no gradient by torch.func (grad, vjp, jacrev) within a graph: call the transformed function "
            "without torch.compile, or use autograd (torch.autograd.grad, Tensor.backward)"
        )


def refuse_duals(name: str, args: Sequence[object]) -> None:
    """Refuses tensors with a tangent, which the op would drop."""
    if _levels._current_level < 0:
        return
    for t in args:
        if isinstance(t, Tensor) and forward_ad.unpack_dual(t).tangent is not None:
            raise UnsupportedProblem(
                f"{name} has no forward-mode derivative (jvp, jacfwd, forward_ad); got a tensor with a tangent: "
                "use reverse mode (torch.autograd.grad), or write the op out in torch"
            )


def refuse_gradient(*tensors: Tensor | None) -> None:
    """Refuses a call with ``out=`` that autograd would differentiate, in either mode."""
    refuse_duals("out=", tensors)
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors):
        raise UnsupportedProblem("out= is not differentiable: leave it out, or call under torch.no_grad()")


def define(
    schema: str,
    cuda: Callable[..., Any],
    cpu: Callable[..., Any],
    fake: Callable[..., Any],
    *,
    into: Any = None,
    inputs: int = 0,
) -> Callable[..., Any]:
    """Defines one op of torch's with its three implementations, without autograd; returns it.

    One that writes to its arguments has no gradient; autograd passes it on. Torch leaves out defaults at the end.
    ``into``: the op that does the same with its results given behind that many ``inputs``.
    """
    declare: Callable[[str], object] = LIBRARY.define  # torch leaves both untyped
    implement: Callable[[str, Callable[..., object], str], object] = LIBRARY.impl
    name = schema.partition("(")[0]
    declare(schema)
    cpu = without_autocast(cpu)
    implement(name, cuda, "CUDA")
    implement(name, cpu, "CPU")
    op = getattr(torch.ops.cutekernels, name).default
    telling = inductor.lowered(op, cuda, cpu, fake, into, inputs)
    torch.library.register_fake(f"cutekernels::{name}", recordable(cuda, telling), lib=LIBRARY)
    if "!)" not in schema:
        torch.library.register_vmap(f"cutekernels::{name}", _one_by_one(op), lib=LIBRARY)
    else:
        written = [a.name if a.is_write else None for a in op._schema.arguments]

        def resolved(*args: Any) -> Any:
            for result, t in zip(written, args, strict=False):
                if result is not None and t is not None and (t.is_neg() or t.is_conj()):
                    raise UnsupportedProblem(
                        f"{name} writes to the memory of {result} as it lies; got a view of it that negates: "
                        "write to memory of its own, or call resolve_conj().resolve_neg() first"
                    )
            return op(*[t.resolve_conj().resolve_neg() if isinstance(t, Tensor) else t for t in args])

        implement(name, torch.library.fallthrough_kernel, "Autograd")
        implement(name, resolved, "Negative")
        implement(name, resolved, "Conjugate")
    return op  # type: ignore[no-any-return]


def _one_by_one(op: Callable[..., Any]) -> Callable[..., Any]:
    """The rule of vmap: a call for each entry of the batch."""

    def mapped(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Any, Any]:
        if not info.batch_size:
            raise UnsupportedProblem(f"{op} under vmap takes a batch of one entry at least; it has none: skip the call")
        made = []
        for i in range(info.batch_size):
            entry = [a if dim is None else a.select(dim, i) for a, dim in zip(args, in_dims, strict=True)]
            made.append(op(*entry))
        if isinstance(made[0], Tensor):
            return torch.stack(made), 0
        return tuple([torch.stack(each) for each in zip(*made, strict=True)]), (0,) * len(made[0])

    return mapped


def without_autocast(cpu: Callable[..., Any]) -> Callable[..., Any]:
    """``cpu`` with autocast off: references choose their own types, and torch mixes no two halves."""

    def reference(*args: Any) -> Any:
        if not autocasting():
            return cpu(*args)
        with torch.autocast("cpu", enabled=False):
            return cpu(*args)

    return reference


def define_with_out(
    name: str,
    inputs: str,
    options: str,
    implementations: Callable[[int], Sequence[Callable[..., Any]]],
    *,
    results: tuple[str, ...] = ("out",),
    returns: tuple[str, str] = ("Tensor", "()"),
    **path: Any,
) -> Path:
    """Defines ``name(inputs, options)`` and ``name_out(inputs, results, options)``; the path of the first.

    Args:
        name: of the op.
        inputs: its tensors, as a schema lists them.
        options: its other arguments.
        implementations: those on a GPU, on the CPU and of fakes, with so many results given behind the inputs.
        results: names of the results.
        returns: of the two.
        path: gradient, remember, autocast and kept, as :class:`Path` has them.
    """
    written = ", ".join([f"Tensor({chr(ord('a') + i)}!) {result}" for i, result in enumerate(results)])
    out = define(f"{name}_out({inputs}, {written}, {options}) -> {returns[1]}", *implementations(len(results)))
    schema, (cuda, cpu, fake) = f"{name}({inputs}, {options}) -> {returns[0]}", implementations(0)
    into = out if returns[1] == "()" else None
    op = define(f"_{schema}", cuda, cpu, fake, into=into, inputs=inputs.count(",") + 1)
    return Path(schema, (cuda, cpu), op, **path)


def splitting(inputs: int, *implementations: Implementation) -> Callable[[int], list[Callable[..., Any]]]:
    """``implementations`` for :func:`define_with_out`."""
    return lambda results: [with_results(f, inputs, results) for f in implementations]


def with_results(f: Implementation, inputs: int, results: int) -> Callable[..., Any]:
    """``f`` as torch calls it: with the inputs, that many results, and the other arguments."""
    if not results:
        return lambda *args: f(None, args[:inputs], *args[inputs:])
    behind = inputs + results
    return lambda *args: f(args[inputs:behind], args[:inputs], *args[behind:])


def no_gradient(name: str) -> Gradient:
    """The backward of an op that has none. It stays connected: ``once_differentiable`` would give zeros."""

    def refuse(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        twice = ": its op is differentiable once; for second derivatives write it out in torch"
        raise UnsupportedProblem(f"{name} has no gradient{twice if 'backward' in name else ''}")

    return refuse
