"""From a call's tensors to a launch, for ops whose kernels are Triton's: what every such op would write alike.

An op says what is special about it (:class:`TensorOp`); :func:`run` is the way to the GPU, :func:`register` the way
to ``torch.ops.cutekernels``, :func:`direct` tells a public function which of the two a call may take. What shapes,
strides and types imply, the plan included, is remembered: the warm path is one dict lookup.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from cutekernels import dispatch
from cutekernels.errors import UnsupportedProblem
from cutekernels.op import C, Op, P, Scalar
from cutekernels.ops.shared.call_cache import guard_for, keep
from cutekernels.ops.shared.strides import matrix, overlaps_itself, relation, span_bytes

GPU_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
DTYPE_NAMES = {dtype: name for name, dtype in GPU_DTYPES.items()}
WIDEST_BYTES = 16  # one thread's widest access; what alignment beyond is worth nothing


# ---- what an op declares --------------------------------------------------------------------------------


class TensorOp(Op[P, C]):
    """An op called with tensors, compile-time options and run-time numbers, in this order.

    Its launch takes ``(*results, *inputs, *scalars)``; an absent optional tensor is None. ``options`` are fields of
    its Problem. ``schema`` is what follows the name in torch's: ``"Tensor x, Tensor? weight, bool offset, float
    eps"``, the inputs, options and scalars by their names.
    """

    results: ClassVar[tuple[str, ...]]
    inputs: ClassVar[tuple[str, ...]]
    options: ClassVar[tuple[str, ...]] = ()
    scalars: ClassVar[tuple[str, ...]] = ()
    schema: ClassVar[str]
    in_place: ClassVar[bool] = True
    """Whether a result may be an input itself, element upon element. No other overlap is ever allowed."""
    flattens: ClassVar[bool] = True
    """Whether kernels see matrices: an operand whose leading dimensions no single stride walks is then copied."""

    def takes(self, name: str, t: Tensor) -> bool:
        """Whether kernels take operand ``name`` as ``t`` lies; else a contiguous copy stands in for it."""
        return not self.flattens or matrix(t.shape, t.stride()) is not None

    @abstractmethod
    def admit(self, inputs: Sequence[Tensor | None], results: Sequence[Tensor] = (), **options: Any) -> None:
        """Raises UnsupportedProblem for operands that pose no problem. Asked on the CPU and of fakes too."""

    @abstractmethod
    def fresh(self, *inputs: Tensor | None, **options: Any) -> tuple[Tensor, ...]:
        """New results, contiguous, on the inputs' device (meta included)."""

    @abstractmethod
    def problem(self, *operands: Tensor | None, **options: Any) -> P:
        """Reads the problem off a launch's ``(*results, *inputs)``. Raises UnsupportedProblem."""

    @abstractmethod
    def evaluate(self, *args: Any, **options: Any) -> tuple[Tensor, ...]:
        """The mathematics in plain PyTorch on ``(*inputs, *scalars)``: in fp32 or better, rounded once."""

    def reference(self, p: P, *args: Any) -> tuple[Tensor, ...]:
        return self.evaluate(*args, **{name: getattr(p, name) for name in self.options})


class ElementwiseOp(TensorOp[P, C]):
    """An op over tensors of one shape, dtype and device."""

    def admit(self, inputs: Sequence[Tensor | None], results: Sequence[Tensor] = (), **options: Any) -> None:
        first, *rest = present(inputs)
        check_dtype(self, first)
        check_alike(self, first, [*rest, *results])
        check_results(results)

    def fresh(self, *inputs: Tensor | None, **options: Any) -> tuple[Tensor, ...]:
        first = present(inputs)[0]
        return tuple([first.new_empty(first.shape) for _ in self.results])


# ---- the way to the GPU ---------------------------------------------------------------------------------

Fire = Callable[[list[int], tuple[Any, ...]], None]  # (addresses of the operands, scalars)
_MAX_WALKS = 64  # sets of strides that one launch remembers


class Launch:
    """``launch(*results, *inputs, *scalars)`` over one kernel: what most ops' ``bind`` returns.

    The kernel takes the operands' addresses (0 for an absent one), then ``numbers(*operands)``, which must follow
    from their shapes and strides alone, then the scalars. :func:`run`, which remembers calls by those, settles the
    numbers once and launches with addresses it has read already.
    """

    __slots__ = ("_grid", "_kernel", "_known", "_numbers", "_operands")

    def __init__(
        self,
        kernel: Callable[..., Any],
        grid: tuple[int, int, int],
        operands: int,
        numbers: Callable[..., Sequence[int]],
    ) -> None:
        self._kernel = kernel
        self._grid = grid
        self._operands = operands
        self._numbers = numbers
        self._known: dict[tuple[object, ...], Sequence[int]] = {}

    def __call__(self, *args: Any) -> None:
        operands = args[: self._operands]
        walks = tuple([None if t is None else (t.shape, t.stride()) for t in operands])
        numbers = self._known.get(walks)
        if numbers is None:
            if len(self._known) >= _MAX_WALKS:
                self._known.clear()
            numbers = self._known[walks] = self._numbers(*operands)
        addresses = [0 if t is None else t.data_ptr() for t in operands]
        self._kernel(self._grid, *addresses, *numbers, *args[self._operands :])

    def settled(self, operands: Sequence[Tensor | None], scalars: int) -> Fire:
        """The launch for operands that lie as these do, on the current device."""
        numbers = self._numbers(*operands)
        settle = getattr(self._kernel, "settled", None)
        if settle is not None:
            return settle(self._grid, numbers, len(operands) + scalars)  # type: ignore[no-any-return]
        kernel, grid = self._kernel, self._grid
        return lambda addresses, scalars: kernel(grid, *addresses, *numbers, *scalars)


@dataclass(frozen=True, slots=True)
class _Call:
    """What follows from the shapes, strides, types and alignment of a call's operands."""

    device: int
    launch: Callable[..., None] | None = None  # by tensors; None where there is nothing to compute
    fire: Fire | None = None  # by addresses, where the op's launch can
    apart: tuple[tuple[int, int, int, int], ...] = ()  # (i, j, span of i, span of j) of operands to be kept apart


@dataclass(slots=True)
class _Recent:
    """A :class:`_Call` as an op last made it with one last operand. ``guard(*operands)``: they are as they were then,
    but for those ``absent``.

    ``begins``: the operands' addresses at the last launch, which were found aligned and apart as the call wants them.
    """

    guard: Callable[..., bool]
    absent: list[int]
    options: tuple[Scalar, ...]
    config: object
    bits: int
    begins: list[int]
    call: _Call
    named: dict[str, Scalar]  # the options


# Calls by what a plan depends on; and by (op, last operand's address), whose company one of torch's compiled guards
# confirms in less than half the time that the key to the first table takes to make.
_CALLS: dict[tuple[object, ...], _Call] = {}
_RECENT: dict[tuple[str, int], _Recent] = {}
_ALIGNED = WIDEST_BYTES - 1
_current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", lambda: -1)
_increment_version = torch._C._increment_version
_traced_by_dynamo = torch.compiler.is_dynamo_compiling


def forget() -> None:
    """Of calls made before: what they came to know."""
    _CALLS.clear()
    _RECENT.clear()


dispatch.on_reload(forget)


def again(
    op: TensorOp[P, C],
    results: tuple[Tensor, ...] | None,
    inputs: tuple[Tensor | None, ...],
    options: tuple[Scalar, ...] = (),
    scalars: tuple[float, ...] = (),
    config: C | str | None = None,
) -> tuple[Tensor, ...] | None:
    """:func:`run` for a call that only repeats one; None for any other, and nothing was done."""
    if _traced_by_dynamo():
        return None
    operands = inputs if results is None else (*results, *inputs)
    try:
        begins = [0 if t is None else t.data_ptr() for t in operands]
    except RuntimeError:  # what has no memory of its own
        return None
    recent = _RECENT.get(_company(op, begins, results is None))
    if recent is None or recent.options != options or recent.config is not config:
        return None
    given: Sequence[Tensor | None] = operands
    if 0 in begins:  # guards know nothing of absent tensors
        if [i for i, t in enumerate(operands) if t is None] != recent.absent:
            return None
        given = present(operands)
    elif recent.absent:
        return None
    call = recent.call
    if not recent.guard(*given) or call.fire is None or call.device != _current_device():
        return None
    if begins != recent.begins:
        if _bits(begins) != recent.bits or (results is not None and _meeting(call, begins)):
            return None
        recent.begins = begins
    if results is None:
        results = op.fresh(*inputs, **recent.named)
        call.fire([*[t.data_ptr() for t in results], *begins], scalars)
    else:
        call.fire(begins, scalars)
        _increment_version(results)
    return results


def run(
    op: TensorOp[P, C],
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
    found = again(op, results, inputs, options, scalars, config)
    if found is not None:
        return found
    operands = inputs if results is None else (*results, *inputs)
    begins = [0 if t is None else t.data_ptr() for t in operands]
    rest = (options, config, _bits(begins))
    call = _met(op, results, inputs, rest, len(scalars))
    company = _company(op, begins, results is None)
    named = dict(zip(op.options, options, strict=True))
    if results is None:
        results = op.fresh(*inputs, **named)
        begins[:0] = [t.data_ptr() for t in results]
    else:
        for i, j in _meeting(call, begins):
            _refuse_overlap(op, results, inputs, i, j)
        _increment_version(results)
    if call.launch is not None:
        if _current_device() == call.device:
            if call.fire is not None:
                call.fire(begins, scalars)
            else:
                call.launch(*results, *inputs, *scalars)
        else:
            with torch.cuda.device(call.device):
                if call.fire is not None:
                    call.fire(begins, scalars)
                else:
                    call.launch(*results, *inputs, *scalars)
    given = present(operands)
    if call.fire is not None and len(set(map(id, given))) == len(given):  # no guard knows one tensor in two places
        guard = guard_for(company, given)
        if guard is not None:
            absent = [i for i, t in enumerate(operands) if t is None]
            keep(_RECENT, company, _Recent(guard, absent, options, config, rest[2], [], call, named))
        else:
            _RECENT.pop(company, None)
    return results


def _company(op: TensorOp[P, C], begins: Sequence[int], fresh: bool) -> tuple[str, int]:
    """What a call is remembered by: the op, its last operand's address, and whether results were given."""
    address = begins[-1] or next(filter(None, reversed(begins)), 0)
    return op.name, address if fresh else ~address


def _bits(begins: Sequence[int]) -> int:
    """What the operands' addresses have in their last bits, joined."""
    bits = 0
    for begin in begins:
        bits |= begin
    return bits & _ALIGNED


def _meeting(call: _Call, begins: Sequence[int]) -> list[tuple[int, int]]:
    """The operands to be kept apart whose extents meet."""
    return [(i, j) for i, j, span, other_span in call.apart if -other_span < begins[j] - begins[i] < span]


def _met(
    op: TensorOp[P, C],
    results: tuple[Tensor, ...] | None,
    inputs: tuple[Tensor | None, ...],
    rest: tuple[Any, ...],
    scalars: int,
) -> _Call:
    """The call that such operands made before, or the first of their kind."""
    operands = inputs if results is None else (*results, *inputs)
    facts: list[object] = [op.name, rest]
    for t in operands:
        # A contiguous tensor's strides follow from its shape, but for those that are never taken.
        facts += (None,) if t is None else (t.shape, t.is_contiguous() or t.stride(), t.dtype, t.get_device())
        if t is not None and t.is_neg():  # of which a guard takes note too
            raise UnsupportedProblem(f"{op.name} reads memory as it lies, not negated: call resolve_neg() first")
    key = tuple(facts)
    call = _CALLS.get(key)
    if call is None:
        options, config, _ = rest
        call = _first(op, results, inputs, dict(zip(op.options, options, strict=True)), scalars, config)
        keep(_CALLS, key, call)
    return call


def _first(
    op: TensorOp[P, C],
    results: tuple[Tensor, ...] | None,
    inputs: tuple[Tensor | None, ...],
    options: dict[str, Scalar],
    scalars: int,
    config: C | str | None,
) -> _Call:
    """Refuses what no kernel takes, reads the problem off the rest, and plans it."""
    op.admit(inputs, results or (), **options)
    given = present(inputs)
    device = given[0].get_device()
    apart = () if results is None else _pairs(len(results), (*results, *inputs))
    if results is None:
        results = op.fresh(*[None if t is None else _dense(t) for t in inputs], **options)
    if all(t.numel() == 0 for t in results):
        return _Call(device, apart=apart)
    operands = (*results, *inputs)
    names = (*op.results, *op.inputs)
    copied = [t is not None and not op.takes(name, t) for name, t in zip(names, operands, strict=True)]
    posed = [_dense(t) if copy and t is not None else t for t, copy in zip(operands, copied, strict=True)]
    problem = op.problem(*posed, **options)
    with torch.cuda.device(device):
        launch = dispatch.plan(op, problem, device, config).launch
        if any(copied):
            return _Call(device, _through_copies(launch, copied, len(results)), apart=apart)
        fire = launch.settled(operands, scalars) if isinstance(launch, Launch) else None
    return _Call(device, launch, fire, apart)


def _pairs(results: int, operands: Sequence[Tensor | None]) -> tuple[tuple[int, int, int, int], ...]:
    """Each result beside every operand after it, with their extents in bytes; empty ones touch nothing."""
    spans = [0 if t is None else span_bytes(t) for t in operands]
    return tuple(
        [
            (i, j, spans[i], spans[j])
            for i in range(results)
            for j in range(i + 1, len(operands))
            if spans[i] and spans[j]
        ]
    )


def scratch(like: Tensor, *shape: int) -> Tensor:
    """fp32 memory for one launch, on the device of ``like``: what programs leave for a second pass."""
    return torch.empty(shape, dtype=torch.float32, device=like.device)


def _dense(t: Tensor) -> Tensor:
    """How an aligned contiguous copy of ``t`` looks, without its memory."""
    return torch.empty(t.shape, dtype=t.dtype, device="meta")


def _through_copies(launch: Callable[..., None], copied: list[bool], results: int) -> Callable[..., None]:
    """``launch`` with contiguous copies in the place of operands that are no matrix."""

    def copying(*args: Any) -> None:
        places = list(args)
        for i, copy in enumerate(copied):
            if copy:
                t = args[i]
                places[i] = (
                    torch.empty_like(t, memory_format=torch.contiguous_format) if i < results else t.contiguous()
                )
        launch(*places)
        for t, place in zip(args[:results], places, strict=False):
            if place is not t:
                t.copy_(place)

    return copying


# ---- what an op's admit() is made of --------------------------------------------------------------------


def present(tensors: Sequence[Tensor | None]) -> list[Tensor]:
    return [t for t in tensors if t is not None]


def check_dtype(op: Op[Any, Any], t: Tensor) -> None:
    """Refuses a type that no kernel takes."""
    allowed = [*GPU_DTYPES.values(), torch.float64] if t.device.type == "cpu" else list(GPU_DTYPES.values())
    if t.dtype not in allowed:
        names = ", ".join(str(d).removeprefix("torch.") for d in allowed)
        raise UnsupportedProblem(f"{op.name} on {t.device.type} takes {names}; got {t.dtype}")


def check_alike(
    op: Op[Any, Any], first: Tensor, others: Sequence[Tensor], what: Sequence[str] = ("shape", "dtype", "device")
) -> None:
    """Refuses operands that differ from ``first``."""
    for t in others:
        for name in what:
            if getattr(t, name) != getattr(first, name):
                raise UnsupportedProblem(
                    f"{op.name} takes operands of one {name}; got {getattr(first, name)} and {getattr(t, name)}: "
                    "expand or convert one explicitly"
                )


def check_results(results: Sequence[Tensor]) -> None:
    """Refuses results with two elements at one address."""
    if any(map(overlaps_itself, results)):
        raise UnsupportedProblem("out= must not overlap itself: an expanded tensor has one address for many elements")


def check_overlap(op: TensorOp[P, C], results: Sequence[Tensor], inputs: Sequence[Tensor | None]) -> None:
    """Refuses results that share memory with an input or with one another, but as ``op.in_place`` allows."""
    operands = (*results, *inputs)
    begins = [0 if t is None else t.data_ptr() for t in operands]
    for i, j, span, other_span in _pairs(len(results), operands):
        if -other_span < begins[j] - begins[i] < span:
            _refuse_overlap(op, results, inputs, i, j)


def _refuse_overlap(
    op: TensorOp[P, C], results: Sequence[Tensor], inputs: Sequence[Tensor | None], i: int, j: int
) -> None:
    """Raises unless result ``i`` and operand ``j``, whose extents meet, lie as they may."""
    t = (*results, *inputs)[j]
    assert t is not None
    found = relation(results[i], t)
    if found == "overlap" or (found == "same" and (j < len(results) or not op.in_place)):
        raise UnsupportedProblem(_OVERLAP[op.in_place])


_OVERLAP = {
    True: "out= overlaps an operand other than element upon element, so that inputs would be overwritten before they "
    "are read: write to memory of its own, or to the input itself",
    False: "out= overlaps an operand, which would be overwritten before it is read: write to memory of its own",
}


# ---- the way through torch ------------------------------------------------------------------------------

# Looked up once: each dotted name costs a warm call 30 ns.
_is_compiling = torch.compiler.is_compiling
_dispatch_modes = torch._C._len_torch_dispatch_stack
_transforms = torch._C._functorch.peek_interpreter_stack
_is_grad_enabled = torch.is_grad_enabled
_Parameter = torch.nn.Parameter


def direct(*tensors: Tensor | None) -> bool:
    """Whether a call may go straight to :func:`run`: on a GPU, nobody tracing, differentiating or intercepting it."""
    if _is_compiling() or _dispatch_modes() or _transforms() is not None:
        return False
    grad = _is_grad_enabled()
    for t in tensors:
        if t is not None:
            kind = type(t)
            if (kind is not Tensor and kind is not _Parameter) or not t.is_cuda or (grad and t.requires_grad):
                return False
    return True


def eager(
    op: TensorOp[P, C],
    results: tuple[Tensor, ...] | None,
    inputs: tuple[Tensor | None, ...],
    options: tuple[Scalar, ...] = (),
    scalars: tuple[float, ...] = (),
    config: C | str | None = None,
) -> tuple[Tensor, ...] | None:
    """:func:`run` where a call may go straight to it; None, and nothing was done, where it must go through torch."""
    found = again(op, results, inputs, options, scalars, config)
    if found is None and direct(*inputs, *(results or ())):
        return run(op, results, inputs, options=options, scalars=scalars, config=config)
    return found


def refuse_gradient(*tensors: Tensor | None) -> None:
    """For calls with ``out=``."""
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors):
        raise UnsupportedProblem("out= is not differentiable: leave it out, or call under torch.no_grad()")


def register(
    library: torch.library.Library,
    op: TensorOp[Any, Any],
    *,
    backward: Callable[..., Any] | None = None,
    setup_context: Callable[..., None] | None = None,
) -> None:
    """Defines ``op.name(schema, str? config=None) -> results`` and ``op.name + "_out"``, for GPU, CPU and fakes.

    The second takes the results behind the inputs. Without ``backward`` a gradient is refused with a clear error.
    """
    n, o = len(op.inputs), len(op.options)
    r = len(op.results)

    def tidy(results: tuple[Tensor, ...]) -> Any:
        return results[0] if r == 1 else results

    def split(args: tuple[Any, ...]) -> tuple[tuple[Any, ...], tuple[Any, ...], tuple[Any, ...], Any]:
        tail = n + o + len(op.scalars)
        return args[:n], args[n : n + o], args[n + o : tail], args[tail] if len(args) > tail else None

    def admitted(args: tuple[Any, ...], results: tuple[Tensor, ...] = ()) -> dict[str, Any]:
        options = dict(zip(op.options, args[n : n + o], strict=True))
        op.admit(args[:n], results, **options)
        return options

    def cuda(*args: Any) -> Any:
        inputs, options, scalars, config = split(args)
        return tidy(run(op, None, inputs, options=options, scalars=scalars, config=config))

    def cpu(*args: Any) -> Any:
        options = admitted(args)
        inputs, _, scalars, _ = split(args)
        return tidy(tuple([t.contiguous() for t in op.evaluate(*inputs, *scalars, **options)]))

    def fake(*args: Any) -> Any:
        return tidy(op.fresh(*args[:n], **admitted(args)))

    def apart(args: tuple[Any, ...]) -> tuple[tuple[Any, ...], tuple[Tensor, ...]]:
        """The arguments of the functional form, and the results among ``args``."""
        return (*args[:n], *args[n + r :]), args[n : n + r]

    def out_cuda(*args: Any) -> None:
        args, results = apart(args)
        inputs, options, scalars, config = split(args)
        run(op, results, inputs, options=options, scalars=scalars, config=config)

    def out_cpu(*args: Any) -> None:
        args, results = apart(args)
        options = admitted(args, results)
        inputs, _, scalars, _ = split(args)
        check_overlap(op, results, inputs)
        for place, value in zip(results, op.evaluate(*inputs, *scalars, **options), strict=True):
            place.copy_(value)

    def out_fake(*args: Any) -> None:
        args, results = apart(args)
        admitted(args, results)

    words = op.schema.split(", ")
    places = [f"Tensor({chr(ord('a') + i)}!) {name}" for i, name in enumerate(op.results)]
    returns = "Tensor" if r == 1 else "(" + ", ".join(["Tensor"] * r) + ")"
    define(library, f"{op.name}({op.schema}, str? config=None) -> {returns}", cuda, cpu, fake)
    schema = f"{op.name}_out({', '.join([*words[:n], *places, *words[n:]])}, str? config=None) -> ()"
    define(library, schema, out_cuda, out_cpu, out_fake)
    torch.library.register_autograd(
        f"cutekernels::{op.name}", backward or no_gradient(op.name), setup_context=setup_context, lib=library
    )


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


def no_gradient(name: str) -> Callable[..., Any]:
    """What autograd runs for an op that has none."""

    def refuse(ctx: Any, *grads: Tensor) -> None:
        raise UnsupportedProblem(f"{name} has no gradient{_AGAIN if 'backward' in name else ''}")

    return refuse


_AGAIN = ": its op is differentiable once; for second derivatives write it out in torch"
