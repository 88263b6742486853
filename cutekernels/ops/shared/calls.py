"""The body of public functions, from operands to a launch, and the definition of ops in torch.

A public function calls :func:`call`: it replays a call like one before, or takes the op's path (``paths.py``), whose
end is :func:`run`, which checks, poses, plans, launches and remembers. :func:`register` defines the op in
``torch.ops.cutekernels``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from cutekernels import dispatch, torch_names
from cutekernels.errors import InvalidConfig, UnsupportedProblem
from cutekernels.lengths import Posed
from cutekernels.op import C, Config, Op, P, Problem, Scalar
from cutekernels.ops.shared import inductor
from cutekernels.ops.shared.checks import check_arguments, check_overlap, check_tensor, pairs_of, present
from cutekernels.ops.shared.declared_op import DeclaredOp
from cutekernels.ops.shared.paths import (
    LIBRARY,
    PLAIN,
    Call,
    Given,
    Path,
    any_requires_grad,
    direct,
    empty_copy,
    is_grad_enabled,
    refuse_gradient,
    stand_ins,
    traced_by_dynamo,
    without_autocast,
)

Implementation = Callable[..., Any]  # (results or None, inputs, *the other arguments, less defaults at the end)


def call(
    op: DeclaredOp[Any, Any],
    inputs: tuple[Tensor | None, ...],
    options: tuple[Scalar, ...] = (),
    scalars: tuple[float, ...] = (),
    *,
    config: object = None,
    out: tuple[Tensor, ...] | None = None,
    in_place: bool = False,
) -> tuple[Tensor, ...]:
    """The body of a public function: replays a call, or takes the op's path.

    ``in_place``: ``out`` are inputs, which torch's op ``<name>_inplace`` updates.

    Raises:
        UnsupportedProblem: operands that pose no problem, gradients together with ``out``.
        InvalidConfig: ``config`` breaks a rule of the op.
    """
    if traced_by_dynamo():
        refuse_others(op, inputs, out, (*options, *scalars))
        text = text_of(config, op.Config)
        if out is None:
            results = getattr(torch.ops.cutekernels, op.name)(*inputs, *options, *scalars, text)
            return (results,) if len(op.results) == 1 else tuple(results)
    else:
        try:
            graded = is_grad_enabled() and any_requires_grad(*inputs)
            if type(inputs[0]) in PLAIN and not (graded and out is not None):
                differentiated = op.path.differentiated if graded else None
                found = op.calls.replay(out, inputs, options, scalars, config, differentiated)
                if found is not None:
                    return found
            if not inputs[0].is_cuda:  # type: ignore[union-attr]
                refuse_others(op, inputs, out, (*options, *scalars))
            text = text_of(config, op.Config)
            if out is None:
                results = op.path(*inputs, *options, *scalars, text)
                return (results,) if len(op.results) == 1 else results
            if direct(*inputs, *out):
                return run(op, out, inputs, options=options, scalars=scalars, config=config)
        except UnsupportedProblem:
            raise
        except (AttributeError, TypeError, RuntimeError):
            refuse_others(op, inputs, out, (*options, *scalars))
            raise
        refuse_others(op, inputs, out, (*options, *scalars))
    refuse_gradient(*inputs, *out)
    name, places = (f"{op.name}_inplace", ()) if in_place else (f"{op.name}_out", out)
    getattr(torch.ops.cutekernels, name)(*inputs, *places, *options, *scalars, text)
    return out


def text_of(config: object, kind: type[Config]) -> str | None:
    """A config as torch's ops take it. Another one than ``kind`` or a text is refused; what reads a text judges it."""
    if config is not None and not isinstance(config, (str, kind)):
        raise InvalidConfig(f"config must be of {kind.__name__} or its text; it is {config!r}: leave it out to choose")
    return None if config is None else str(config)


def refuse_others(
    op: DeclaredOp[Any, Any], inputs: Sequence[object], out: Sequence[object] | None, rest: Sequence[object] = ()
) -> None:
    """Refuses arguments of another kind than ``op`` declares, before torch does so in words of its own."""
    declared = getattr(op, "operands", {})
    for name, t in (*zip(op.inputs, inputs, strict=True), *zip(op.results, out or (), strict=False)):
        optional = ("Tensor?", name) in op.kinds or (name in declared and declared[name].optional)
        check_tensor(op.name, name, t, optional=optional)
    check_arguments(op.name, op.others, rest)


# ---- from operands to a launch --------------------------------------------------------------------------


def run(
    op: DeclaredOp[P, C],
    results: tuple[Tensor, ...] | None,
    inputs: tuple[Tensor | None, ...],
    *,
    options: tuple[Scalar, ...] = (),
    scalars: tuple[float, ...] = (),
    config: C | str | None = None,
) -> tuple[Tensor, ...]:
    """Checks, allocates unless ``results`` are given, and launches on the GPU that holds ``inputs``.

    Raises:
        UnsupportedProblem: what ``op.admit`` and ``op.problem`` refuse, and results that overlap inputs.
    """
    call = results, inputs, options, scalars, config
    return op.calls.replay(*call) or op.calls.recall(call) or _first(op, call)


def _first(op: DeclaredOp[Any, Any], call: Given) -> tuple[Tensor, ...]:
    """The first call of its kind: checked, planned, made and cached."""
    results, inputs, options, scalars, config = call
    check_arguments(op.name, op.others, (*options, *scalars))
    if any(t.is_neg() for t in present((*(results or ()), *inputs))):
        raise UnsupportedProblem(f"{op.name} reads memory as it lies, not negated: call resolve_neg() first")
    first = plan_call(op, inputs, results, options, len(scalars), config)
    if results is not None:
        check_overlap(op, results, inputs)
    return op.calls.add(first, call)


def plan_call(
    op: DeclaredOp[P, C],
    inputs: tuple[Tensor | None, ...],
    given: tuple[Tensor, ...] | None = None,
    options: tuple[Scalar, ...] = (),
    scalars: int = 0,
    config: C | str | None = None,
) -> Call:
    """The call of ``inputs``; it allocates its results unless they are ``given``. Refuses what no kernel takes."""
    chosen = dict(zip(op.options, options, strict=True))
    op.admit(inputs, given or (), **chosen)
    op = op.serving(inputs)
    written, wanted = given or (), op.results_of(**chosen)
    fresh: tuple[Tensor, ...] = ()
    if len(written) < len(wanted):
        fresh = op.fresh(*[None if t is None else _dense(t) for t in inputs], **chosen)[len(written) :]
    results, names = (*written, *fresh), (*wanted, *op.inputs)
    pairs = () if given is None else pairs_of(op, given, inputs)
    if all(t.numel() == 0 for t in results):
        return Call.of(None, inputs, fresh, pairs)
    operands, n = (*results, *inputs), len(results)
    ways = ways_of(op, dict(zip(names, operands, strict=True)), **chosen)
    copied = [way in (empty_copy, _dense_copy) for way in ways]
    posed = [_dense(t) if copy and t is not None else t for t, copy in zip(operands, copied, strict=True)]
    problem = op.problem(*posed, **chosen)
    device = present(inputs)[0].get_device()
    with torch.cuda.device(device):
        launch = dispatch.plan(op, problem, device, config).launch
        launch = stand_ins(launch, ways, [i for i in range(n) if copied[i]])
        settle = getattr(launch, "settle", None)
        fire = None if settle is None else settle(operands, scalars)
    return Call.of(launch, inputs, fresh, pairs, fire)


def ways_of(
    op: DeclaredOp[Any, Any], named: Mapping[str, Tensor | None], **options: Any
) -> list[Callable[[Tensor], Tensor] | None]:
    """Functions to what stands in for operands that kernels do not take as they are: copies, or views."""
    views = op.views(named, **options)

    def way(name: str, t: Tensor | None) -> Callable[[Tensor], Tensor] | None:
        if t is None or name in views or op.takes(name, t):
            return views.get(name)
        return empty_copy if name in op.results else _dense_copy

    return [way(name, t) for name, t in named.items()]


def _dense_copy(t: Tensor) -> Tensor:
    """``t`` contiguous in memory of its own: what is contiguous already may begin where no kernel takes it."""
    return t.clone(memory_format=torch.contiguous_format)


def _dense(t: Tensor) -> Tensor:
    """How an aligned contiguous copy of ``t`` looks, without its memory."""
    return torch.empty(t.shape, dtype=t.dtype, device="meta")


# ---- definition in torch --------------------------------------------------------------------------------


def register(op: DeclaredOp[Any, Any], **path: Any) -> None:
    """Defines ``op.name(schema, str? config=None) -> results`` and ``op.name + "_out"``, and sets ``op.path``.

    The second takes the results behind the inputs. ``path``: gradient, remember, autocast and kept, as :class:`Path`
    has them.
    """
    words, n, r = op.schema.split(", "), len(op.inputs), len(op.results)
    op.path = define_with_out(
        op.name,
        ", ".join(words[:n]),
        ", ".join([*words[n:], "str? config=None"]),
        partial(implementations, op),
        results=op.results,
        returns=("Tensor" if r == 1 else f"({', '.join(['Tensor'] * r)})", "()"),
        **path,
    )


def register_inplace(op: DeclaredOp[Any, Any], updated: Sequence[int]) -> None:
    """Defines ``op.name + "_inplace"``, whose results are the inputs at ``updated``, for GPU, CPU and fakes.

    Takes the op's arguments and returns nothing. An absent input stands for an empty result.
    """
    words, n = op.schema.split(", "), len(op.inputs)
    for mark, i in zip("abcdefgh", updated, strict=False):
        kind, name = words[i].split(" ")
        words[i] = f"Tensor({mark}!){kind.removeprefix('Tensor')} {name}"

    arguments = f"_inplace({', '.join(words)}, str? config=None)"
    register_updating(op, arguments, n, lambda *inputs: (places(inputs, updated), inputs))


def register_updating(
    op: DeclaredOp[Any, Any],
    arguments: str,
    tensors: int,
    split: Callable[..., tuple[tuple[Tensor, ...], tuple[Tensor | None, ...]]],
) -> None:
    """Defines ``op.name + arguments -> ()``, for GPU, CPU and fakes: ``split(*tensors)`` is (results, inputs)."""

    def updating(f: Callable[..., Any]) -> Callable[..., Any]:
        def update(*args: Any) -> None:
            results, inputs = split(*args[:tensors])
            f(*inputs, *results, *args[tensors:])

        return update

    define(f"{op.name}{arguments} -> ()", *map(updating, implementations(op, len(op.results))))


def places(inputs: Sequence[Tensor | None], updated: Sequence[int]) -> tuple[Tensor, ...]:
    """The inputs that are updated, as the results of a launch; an empty tensor in the place of an absent one."""
    first = inputs[updated[0]]
    assert first is not None
    return tuple([first.new_empty(0) if (t := inputs[i]) is None else t for i in updated])


def implementations(
    op: DeclaredOp[Any, Any], given: int, read: Callable[..., tuple[Any, Any, Any]] | None = None
) -> tuple[Callable[..., Any], ...]:
    """``op`` on the GPU, on the CPU and of fakes: ``(*inputs, *results, *arguments)``, with ``given`` results. They
    return those behind, empty where options leave one out.

    ``arguments`` are options, scalars and the config, which torch leaves out where it is None, unless ``read`` makes
    those of them.
    """
    n, r = len(op.inputs), len(op.results)
    i, m = n + given, n + given + len(op.options)
    k = m + len(op.scalars)
    replay, recall = op.calls.replay, op.calls.recall
    floating = [kind == "float" for kind, _ in op.others[len(op.options) :]]

    @cache
    def kinds_behind(count: int, main: torch.dtype) -> list[torch.dtype]:
        return [op.types_of(op.operands[name].dtype, main)[0] for name in op.results[count:]]

    def returned(made: tuple[Tensor, ...], inputs: tuple[Any, ...]) -> Any:
        if given == r:
            return None
        if len(made) < r:
            main: Tensor = inputs[0]
            made += tuple([main.new_empty(0, dtype=kind) for kind in kinds_behind(len(made), main.dtype)])
        return made[given] if given + 1 == r else made[given:]

    def arguments_behind(args: tuple[Any, ...]) -> tuple[Any, Any, Any]:
        """Options, scalars and the config."""
        if read is not None:
            return read(*args[i:])
        return args[i:m], args[m:k], args[k] if len(args) > k else None

    def cuda(*args: Any) -> Any:
        inputs, results = args[:n], args[n:i] if given else None
        if read is None:  # :func:`arguments_behind`, written out: graphs call it
            call = results, inputs, args[i:m], args[m:k], args[k] if len(args) > k else None
        else:
            call = results, inputs, *read(*args[i:])
        made = replay(*call) or recall(call) or _first(op, call)
        return made[0] if r == 1 > given else returned(made, inputs)

    def cpu(*args: Any) -> Any:
        inputs, results, (options, scalars, _) = args[:n], args[n:i], arguments_behind(args)
        chosen = dict(zip(op.options, options, strict=True))
        op.admit(inputs, results, **chosen)
        if given:
            check_overlap(op, results, inputs)
        op.check_indices(inputs, **chosen)
        numbers = [float(x) if floats else x for x, floats in zip(scalars, floating, strict=True)]
        if given:
            return returned((*results, *op.update(results, (*inputs, *numbers), **chosen)), inputs)
        return returned(tuple([t.contiguous() for t in op.evaluate(*inputs, *numbers, **chosen)]), inputs)

    def fake(*args: Any) -> Any:
        inputs, results, (options, _, _) = args[:n], args[n:i], arguments_behind(args)
        chosen = dict(zip(op.options, options, strict=True))
        op.admit(inputs, results, **chosen)
        fresh = op.fresh(*inputs, **chosen)[given:] if given < r else ()
        return returned((*results, *fresh), inputs)

    return cuda, cpu, fake


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


# ---- problems that calls pose, recorded where no kernel runs ---------------------------------------------

_REMEDY = "warm up pairs of an op's name and a problem's text instead"
_APART = 1 << 48  # bytes between two fakes' memories, where no real tensor lies


class Recorder:
    """Notes what calls pose: ``with recorder.calls() as noted: model(ids)``, as often as one likes.

    Meanwhile an op's implementation for fakes takes the way of a call on a GPU, from checks to the problem, which is
    noted in place of a plan: on a machine without a GPU too. A fake has an address as torch's allocator gives them, so
    its problem is that of the call which it stands for. Other threads go on meanwhile.

    Tensors made meanwhile are fakes; real ones stand for themselves, without their memory. Raises UnsupportedProblem
    for a call that depends on their values.
    """

    def __init__(self) -> None:
        if (fakes := torch_names.fake_tensors) is None:
            raise UnsupportedProblem(f"torch {torch.__version__} has its fake tensors elsewhere: {_REMEDY}")
        self._fakes = fakes.FakeTensorMode(allow_non_fake_inputs=True)  # remembers the fakes of a model's parameters
        self._unread = fakes.DataDependentOutputException, fakes.DynamicOutputShapeException

    @contextmanager
    def calls(self) -> Iterator[list[Posed]]:
        noted: list[Posed] = []

        def note(op: Op[Any, Any], p: Problem) -> dispatch.Plan:
            noted.append((op, p))
            return dispatch.Plan(_NO_CONFIG, _no_launch, "recorded", "")

        try:
            with dispatch.recorded_by(note), torch.no_grad(), self._fakes:
                yield noted
        except self._unread as error:
            raise UnsupportedProblem(
                f"a call that reads values of tensors cannot be recorded ({error}): {_REMEDY}"
            ) from error


def recordable(cuda: Callable[..., Any], fake: Callable[..., Any]) -> Callable[..., Any]:
    """``fake``, an op's implementation for fakes; that of a GPU while calls are recorded."""

    def either(*args: Any) -> Any:
        if not dispatch.recording():
            return fake(*args)
        with _addresses:
            return cuda(*args)

    return either


class _Addresses(TorchFunctionMode):
    """Gives each fake memory an address of its own."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.data_ptr and hasattr(args[0], "fake_device"):
            t = args[0]
            return t.untyped_storage()._cdata * _APART + t.storage_offset() * t.element_size()
        return func(*args, **(kwargs or {}))


def _no_launch(*args: Any) -> None:
    """In place of a kernel: nobody reads what it would write."""


_NO_CONFIG: Any = None
_addresses = _Addresses()
