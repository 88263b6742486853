"""One path for calls: from operands to a launch, and the definition of ops in torch.

A public function calls :func:`call`: it replays a call like one before, or takes the op's path (``registration.py``),
whose end is :func:`run`, which checks, poses, plans, launches and remembers. :func:`register` defines the op in
``torch.ops.cutekernels``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from cutekernels import dispatch, torch_names
from cutekernels.errors import UnsupportedProblem
from cutekernels.op import C, P, Scalar
from cutekernels.ops.shared.call_cache import Call, Given, empty_copy, stand_ins
from cutekernels.ops.shared.checks import check_arguments, check_overlap, check_tensor, pairs_of, present
from cutekernels.ops.shared.declared_op import DeclaredOp
from cutekernels.ops.shared.registration import (
    PLAIN,
    define,
    define_with_out,
    direct,
    refuse_gradient,
)

# Looked up once: each dotted name costs a call 30 ns.
traced_by_dynamo = torch.compiler.is_dynamo_compiling
is_grad_enabled = torch.is_grad_enabled
any_requires_grad = torch_names.any_requires_grad


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
        text = None if config is None else str(config)
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
            text = None if config is None else str(config)
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
    return [
        views.get(name) if t is None or op.takes(name, t) else empty_copy if name in op.results else _dense_copy
        for name, t in named.items()
    ]


def _dense_copy(t: Tensor) -> Tensor:
    """``t`` contiguous in memory of its own: what is contiguous already may begin where no kernel takes it."""
    return t.clone(memory_format=torch.contiguous_format)


def _dense(t: Tensor) -> Tensor:
    """How an aligned contiguous copy of ``t`` looks, without its memory."""
    return torch.empty(t.shape, dtype=t.dtype, device="meta")


# ---- the way through torch ------------------------------------------------------------------------------


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
        partial(_implementations, op),
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

    define(f"{op.name}{arguments} -> ()", *map(updating, _implementations(op, len(op.results))))


def places(inputs: Sequence[Tensor | None], updated: Sequence[int]) -> tuple[Tensor, ...]:
    """The inputs that are updated, as the results of a launch; an empty tensor in the place of an absent one."""
    first = inputs[updated[0]]
    assert first is not None
    return tuple([first.new_empty(0) if (t := inputs[i]) is None else t for i in updated])


def _implementations(op: DeclaredOp[Any, Any], given: int) -> tuple[Callable[..., Any], ...]:
    """``op`` on the GPU, on the CPU and of fakes: ``(*inputs, *results, *options, *scalars, config)``, with so many
    results ``given``. Torch leaves out a config of None.
    """
    n = len(op.inputs)
    i, m = n + given, n + given + len(op.options)
    k, single = m + len(op.scalars), len(op.results) == 1
    replay, recall = op.calls.replay, op.calls.recall
    floating = [kind == "float" for kind, _ in op.others[len(op.options) :]]

    def split(args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Results, inputs, options by name and scalars of arguments that the op admits."""
        results, inputs, options = args[n:i], args[:n], dict(zip(op.options, args[i:m], strict=True))
        op.admit(inputs, results, **options)
        return results, inputs, options, args[m:k]

    def returned(made: tuple[Tensor, ...]) -> Any:
        return None if given else made[0] if single else made

    def cuda(*args: Any) -> Any:
        config = args[k] if len(args) > k else None
        call = args[n:i] if given else None, args[:n], args[i:m], args[m:k], config
        return returned(replay(*call) or recall(call) or _first(op, call))

    def cpu(*args: Any) -> Any:
        results, inputs, options, scalars = split(args)
        numbers = [float(x) if floats else x for x, floats in zip(scalars, floating, strict=True)]
        if not given:
            return returned(tuple([t.contiguous() for t in op.evaluate(*inputs, *numbers, **options)]))
        check_overlap(op, results, inputs)
        op.update(results, (*inputs, *numbers), **options)
        return None

    def fake(*args: Any) -> Any:
        _, inputs, options, _ = split(args)
        return None if given else returned(op.fresh(*inputs, **options))

    return cuda, cpu, fake
