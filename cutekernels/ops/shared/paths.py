"""Paths of calls to their launch: a repeated one is replayed, others go straight to it or by way of torch.

Calls that repeat go from operands to a launch without checks, a problem or a plan. Each op has a :class:`CallCache` of
two tables. ``replay`` looks a call up by the address of its last operand (weights stay where they are) and has one of
torch's compiled guards confirm that all operands look as they did; ``recall`` looks it up by a key of all that a plan
depends on, which takes longer to make than a guard to run. Addresses are compared each time: their alignment, and that
results lie apart from what they must not overwrite. Host times: docs/notes/host.md.

Three ways of others lead to one launch (:class:`Path`):

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
from dataclasses import dataclass
from operator import xor
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function, forward_ad

from cutekernels import dispatch, torch_names
from cutekernels.errors import UnsupportedProblem
from cutekernels.ops.shared.dtypes import WIDEST_BYTES
from cutekernels.ops.shared.strides import Pair, collide

LIBRARY = torch.library.Library("cutekernels", "FRAGMENT")  # torch.ops.cutekernels.*
TensorGuards = torch_names.TensorGuards  # None: every call is recalled by its key

Tensors = tuple[Tensor, ...]
Inputs = tuple[Tensor | None, ...]
Given = tuple[Tensors | None, Inputs, tuple[Any, ...], tuple[Any, ...], Any]
"""A call's results, None for those to be allocated, its inputs, options, scalars and config."""
Fire = Callable[[list[int], tuple[Any, ...]], None]  # (addresses of the operands, scalars)

MOST_CALLS = 4096  # entries of a table, which begins anew when it is full
MOST_GUARDS = 4  # kept for one address: calls that take turns, the last one made first
MOST_CHANGES = 16  # guards made for one address; behind them its calls are recalled by their keys
_UNALIGNED = WIDEST_BYTES - 1

# Looked up once: each dotted name costs a call 30 ns.
_current_device = torch_names.current_device
_increment_version = torch_names.increment_version
_is_compiling = torch.compiler.is_compiling
traced_by_dynamo = torch.compiler.is_dynamo_compiling  # cheap, and a constant to Dynamo; guards refuse other tracers'
is_grad_enabled = torch.is_grad_enabled
any_requires_grad = torch_names.any_requires_grad
autocasting = torch_names.autocasting
_transforms = torch_names.transforms
_is_zero = torch_names.is_zero
_levels = torch_names.levels
_included, _QUIET = torch_names.included, torch_names.QUIET
_Parameter = torch.nn.Parameter
PLAIN = (Tensor, _Parameter)  # of other types, fakes among them, no address is to be read

Autocast = str | Callable[..., Any]  # "lower", "fp32", or a function of the op's arguments that returns others
Gradient = Callable[..., tuple[Any, ...]]  # (ctx, *gradients of results) -> a gradient or None for each argument
Remember = Callable[[Any, tuple[Any, ...], Any], None]  # (ctx, arguments, results)


# ---- calls that repeat ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Call:
    """Everything that options and the operands' shapes, strides, types and alignment decide about a call.

    ``launch(*results, *inputs, *scalars)``; None where there is nothing to compute. ``fire``: the same by addresses,
    where the kernel takes them. ``pairs``: operands to keep apart. ``fresh``: sizes and dtype (None for that of the
    input at ``like``) of the results that a call allocates.
    """

    device: int
    launch: Callable[..., None] | None
    fire: Fire | None
    pairs: tuple[Pair, ...]
    fresh: tuple[tuple[tuple[Any, ...], torch.dtype | None], ...]
    like: int

    @classmethod
    def of(
        cls,
        launch: Callable[..., None] | None,
        inputs: Inputs,
        fresh: Sequence[Tensor],
        pairs: tuple[Pair, ...] = (),
        fire: Fire | None = None,
    ) -> Call:
        """The call of ``inputs`` that allocates what looks like ``fresh``, contiguous."""
        like, first = next((i, t) for i, t in enumerate(inputs) if t is not None)
        made = [(tuple(t.shape) or ((),), None if t.dtype == first.dtype else t.dtype) for t in fresh]
        return cls(first.get_device(), launch, fire, pairs, tuple(made), like)

    def fits(self, operands: Inputs, addresses: list[int], known: list[int]) -> bool:
        """Whether ``addresses`` are aligned as ``known`` and apart as they must be. They are then the known ones."""
        for changed in map(xor, addresses, known):
            if changed & _UNALIGNED:
                return False
        for i, j, low, high, _ in self.pairs:  # written out: most spans do not meet
            if low < addresses[j] - addresses[i] < high and collide(self.pairs, operands, addresses):
                return False
        known[:] = addresses
        return True

    def run(self, results: Tensors | None, inputs: Inputs, addresses: list[int], scalars: tuple[Any, ...]) -> Tensors:
        """Allocates and launches on the current device."""
        written = results or ()
        for size, kind in self.fresh:
            like: Tensor = inputs[self.like]  # type: ignore[assignment]
            t = like.new_empty(*size) if kind is None else like.new_empty(*size, dtype=kind)
            addresses.insert(len(written), t.data_ptr())
            written += (t,)
        if self.fire is not None:
            self.fire(addresses, scalars)
        elif self.launch is not None:
            self.launch(*written, *inputs, *scalars)
        if results is not None:
            _increment_version(results)
        return written


# A call as it was last made with one last operand: (guard, options, config, absent, terms, known, call).
# ``guard(*operands)`` says whether all but those ``absent`` look as they did. ``terms`` are (an operand requires a
# gradient, device), None where no gradient and no other GPU is there. ``known``: addresses found aligned and apart.
Recent = tuple[
    Callable[..., bool], tuple[object, ...], object, list[int], tuple[bool, int] | None, list[int], Call
]  # fmt: skip


class CallCache:
    """The calls of one op. Takes ``results`` as the caller gave them, None for results to be allocated.

    ``options`` and ``config`` are part of what a plan depends on, ``scalars`` are each call's own.
    """

    __slots__ = ("_changes", "calls", "recent")

    def __init__(self) -> None:
        self.calls: dict[tuple[object, ...] | None, Call] = {}
        self.recent: dict[int, list[Recent]] = {}  # by the last operand's address, complemented where results are given
        self._changes: dict[int, int] = {}
        _caches.append(self)

    def forget(self) -> None:
        for table in (self.calls, self.recent, self._changes):
            table.clear()

    def replay(
        self,
        results: Tensors | None,
        inputs: Inputs,
        options: tuple[object, ...],
        scalars: tuple[Any, ...] = (),
        config: object = None,
        differentiated: Callable[..., Any] | None = None,
    ) -> Tensors | None:
        """The results of a call like one of the last with its last operand; None for others, and nothing was done.

        ``differentiated``: a Function around the launch, where gradients are wanted. It gets the found call behind the
        inputs, and returns one result or more.
        """
        if traced_by_dynamo() or _levels._current_level >= 0:
            return None
        operands = inputs if results is None else results + inputs
        try:
            addresses = [0 if t is None else t.data_ptr() for t in operands]
        except RuntimeError:  # a tensor without memory of its own
            return None
        last = addresses[-1] or next(filter(None, reversed(addresses)), 0)
        found = self.recent.get(last if results is None else ~last)
        if found is None:
            return None
        for guard, its_options, its_config, absent, terms, known, call in found:
            if its_options != options or its_config is not config:
                continue
            if terms is not None and (
                (terms[0] and differentiated is None and is_grad_enabled()) or terms[1] != _current_device()
            ):
                continue
            if not absent:
                if not guard(*operands):
                    continue
            elif [i for i, t in enumerate(operands) if t is None] != absent or not guard(
                *[t for t in operands if t is not None]
            ):
                continue
            if addresses != known and not call.fits(operands, addresses, known):
                continue
            if differentiated is not None:
                arguments = (*inputs, *options, *scalars, None)
                made = differentiated(*inputs, (call, inputs, addresses, scalars, arguments))
                return (made,) if len(call.fresh) == 1 else made
            if results is None or call.fire is None or call.fresh:
                return call.run(results, inputs, addresses, scalars)
            call.fire(addresses, scalars)
            _increment_version(results)
            return results
        return None

    def recall(self, given: Given) -> Tensors | None:
        """:meth:`replay` for a call like any that was added: by its key, on whatever device."""
        call = self.find(given)
        if call is None:
            return None
        operands = _operands(given)
        addresses = _addresses(operands)
        return None if collide(call.pairs, operands, addresses) else self._make(call, given, operands, addresses)

    def find(self, given: Given) -> Call | None:
        """The call that was added, or kept, for one like this."""
        if dispatch.recorders and dispatch.recording():
            return None
        try:
            return self.calls.get(cache_key(given))
        except (RuntimeError, TypeError):  # tensors without strides or memory, options without a hash
            return None

    def keep(self, call: Call, given: Given) -> None:
        """Has calls like this recalled as ``call`` from now on."""
        key = cache_key(given)
        if key is not None and not dispatch.recording():
            _keep(self.calls, key, call)

    def add(self, call: Call, given: Given) -> Tensors:
        """Makes ``call`` and has calls like it replayed from now on. Its operands have been checked."""
        hash(cache_key(given))  # options without a hash fail before anything is launched
        operands = _operands(given)
        made = self._make(call, given, operands, _addresses(operands))
        self.keep(call, given)
        return made

    def _make(self, call: Call, given: Given, operands: Inputs, addresses: list[int]) -> Tensors:
        """Runs ``call`` on its device and guards the next one of the same last operand."""
        results, inputs, options, scalars, config = given
        known = list(addresses)
        recorded = dispatch.recorders and dispatch.recording()
        if recorded or call.device == _current_device():  # a recorded call launches nothing; there may be no driver
            made = call.run(results, inputs, addresses, scalars)
        else:
            with torch.cuda.device(call.device):
                made = call.run(results, inputs, addresses, scalars)
        there = [t for t in operands if t is not None]
        if call.launch is None or len(set(map(id, there))) < len(there):  # no guard passes one tensor in two places
            return made
        if recorded:
            return made
        last = next(filter(None, reversed(known)), 0)
        place = last if results is None else ~last
        changes = self._changes.get(place, 0)
        if TensorGuards is None or changes > MOST_CHANGES:
            self.recent.pop(place, None)
        else:
            _keep(self._changes, place, changes + 1)
            graded = any(t.requires_grad for t in there)
            terms = (graded, call.device) if graded or torch.cuda.device_count() != 1 else None
            absent = [i for i, t in enumerate(operands) if t is None]
            recent = guard_of(there), options, config, absent, terms, known, call
            _keep(self.recent, place, [recent, *self.recent.get(place, ())[: MOST_GUARDS - 1]])
        return made


def _operands(given: Given) -> Inputs:
    return given[1] if given[0] is None else (*given[0], *given[1])


def _addresses(operands: Inputs) -> list[int]:
    return [0 if t is None else t.data_ptr() for t in operands]


_caches: list[CallCache] = []


def forget() -> None:
    """Drops every cached call."""
    for cache in _caches:
        cache.forget()


dispatch.on_reload(forget)


def cache_key(given: Given) -> tuple[object, ...] | None:
    """All that a plan depends on. None where memory does not hold an operand's values, so that torch has to step in."""
    facts: list[object] = [given[2], given[4]]
    for t in _operands(given):
        if t is None:
            facts.append(None)
            continue
        address = t.data_ptr()
        if t.is_neg() or (not address and t.numel()):
            return None
        facts += (t.shape, t.stride(), t.dtype, t.get_device(), address & _UNALIGNED)
    return tuple(facts)


def guard_of(tensors: Sequence[Tensor]) -> Callable[..., bool]:
    """``guard(*others)``: whether they are as ``tensors`` are in all but address and values.

    Types, dtypes, devices, sizes, strides, dispatch keys and ``requires_grad``: calls under another mode of torch's
    (tracing, inference, a dispatch mode, functorch) are other calls. Whether gradients are enabled it does not say.
    """
    sizes, strides = [list(t.shape) for t in tensors], [list(t.stride()) for t in tensors]
    return TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check  # type: ignore[no-any-return]


def stand_ins(
    launch: Callable[..., None], ways: Sequence[Callable[[Tensor], Tensor] | None], copied: Sequence[int] = ()
) -> Callable[..., None]:
    """``launch`` with ``ways[i](operand)`` in the place of operand ``i``; results ``copied`` are then written back."""
    if not any(ways):
        return launch

    def through(*args: Any) -> None:
        places = [t if way is None or t is None else way(t) for t, way in zip(args, ways, strict=False)]
        launch(*places, *args[len(ways) :])
        for i in copied:
            args[i].copy_(places[i])

    return through


def empty_copy(result: Tensor) -> Tensor:
    """Contiguous memory for a ``result`` that kernels do not write where it lies."""
    return torch.empty_like(result, memory_format=torch.contiguous_format)


def _keep(table: dict[Any, Any], key: object, value: object) -> None:
    if len(table) >= MOST_CALLS:
        table.clear()
    table[key] = value


# ---- the way through torch ------------------------------------------------------------------------------


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
    if _is_compiling() or autocasting() or (is_grad_enabled() and any_requires_grad(*tensors)):
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
        if traced_by_dynamo():
            return self.node(*args)
        tensors = args[: self._tensors]
        gpu = plain(tensors)
        if gpu is None or (self._rule is not None and autocasting()):
            return self.node(*args) if _is_compiling() else self.through_ops(*args)
        if is_grad_enabled() and any_requires_grad(*tensors):
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
        if _transforms() is not None or (is_grad_enabled() and any_requires_grad(*tensors)):
            return self._traced(*args)
        return self.op(*args)

    def _composite(self, *args: Any) -> Any:
        if _transforms() is not None and is_grad_enabled():
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


def without_autocast(cpu: Callable[..., Any]) -> Callable[..., Any]:
    """``cpu`` with autocast off: references choose their own types, and torch mixes no two halves."""

    def reference(*args: Any) -> Any:
        if not autocasting():
            return cpu(*args)
        with torch.autocast("cpu", enabled=False):
            return cpu(*args)

    return reference


def no_gradient(name: str) -> Gradient:
    """The backward of an op that has none. It stays connected: ``once_differentiable`` would give zeros."""

    def refuse(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        twice = ": its op is differentiable once; for second derivatives write it out in torch"
        raise UnsupportedProblem(f"{name} has no gradient{twice if 'backward' in name else ''}")

    return refuse
