"""torch's private names that calls use, each with the public way around it.

They are quicker, never needed: a torch that lacks one gets slower calls, and :data:`ABSENT` says which. No other file
names anything of torch's that begins with an underscore (tests/trunk/test_private_names.py).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function, forward_ad

ABSENT: dict[str, str] = {}
"""Private names that this torch lacks, with what follows."""


def _find(path: str, otherwise: Any, follows: str) -> Any:
    """``path`` in torch; ``otherwise``, and a line in :data:`ABSENT`, where nothing has that name."""
    found: Any = torch
    for name in path.split("."):
        found = getattr(found, name, None)
    if found is None:
        ABSENT[f"torch.{path}"] = follows
        return otherwise
    return found


# ---- device and stream ----------------------------------------------------------------------------------

_HOST = "a public function, a slower one, stands in"

current_device: Callable[[], int] = lambda: -1  # noqa: E731  of a CPU build: the index of its tensors
current_stream: Callable[[int], int] = lambda device: 0  # noqa: E731
if torch.backends.cuda.is_built():
    current_device = _find("_C._cuda_getDevice", torch.cuda.current_device, _HOST)
    current_stream = _find(
        "_C._cuda_getCurrentRawStream", lambda device: torch.cuda.current_stream(device).cuda_stream, _HOST
    )


# ---- who intercepts a call ------------------------------------------------------------------------------


def _any_requires_grad(*tensors: Tensor | None) -> bool:
    return any(t is not None and t.requires_grad for t in tensors)


def _autocasting() -> bool:
    return torch.is_autocast_enabled("cuda") or torch.is_autocast_enabled("cpu")


_probe = torch.empty(0)


def _in_transform() -> bool | None:
    """True or, as the stack's peek has it, None. Every transform of torch.func refuses ``requires_grad_``."""
    try:
        _probe.requires_grad_(False)
    except RuntimeError:
        return True
    return None


any_requires_grad: Callable[..., bool] = _find("_C._any_requires_grad", _any_requires_grad, _HOST)
autocasting: Callable[[], bool] = _find("_C._is_any_autocast_enabled", _autocasting, _HOST)
function_modes: Callable[[], int] = _find(
    "_C._len_torch_function_stack", lambda: torch.overrides.has_torch_function((None,)), _HOST
)
"""How many of torch's function modes are active; True for some."""
transforms: Callable[[], object] = _find("_C._functorch.peek_interpreter_stack", _in_transform, _HOST)
"""The innermost active transform of torch.func (vmap, grad); None without one."""

_ANY = "ops in graphs refuse every transform of torch.func, vmap too"
_Grad = _find("_C._functorch.TransformType.Grad", None, _ANY)
_stack = _find("_C._functorch.get_interpreter_stack", None, _ANY)


def differentiated_by_transform() -> bool:
    """Whether a transform of torch.func that differentiates is active."""
    if _Grad is None or _stack is None:
        return transforms() is not None
    return any(one.key() == _Grad for one in _stack() or ())


_DISPATCHER = "calls go through torch's dispatcher"

is_zero: Callable[[Tensor], bool] = _find("Tensor._is_zerotensor", lambda t: True, _DISPATCHER)
"""Whether a tensor is one of zeros without memory; True where torch does not say."""

_level = _find("autograd.forward_ad._current_level", None, _DISPATCHER)
levels: Any = SimpleNamespace(_current_level=0) if _level is None else forward_ad
"""``_current_level``: of forward-mode differentiation, -1 outside; 0, as if inside, where torch does not say."""

_Key, _Keys = _find("_C.DispatchKey", None, _DISPATCHER), _find("_C.DispatchKeySet", None, _DISPATCHER)
included: Any = _find("_C._dispatch_tls_local_include_set", None, _DISPATCHER)
"""The dispatch keys that this thread includes: modes, vmap, tracers and jit each add one."""
QUIET: frozenset[int] = frozenset()
"""``raw_repr()`` of :data:`included` where nobody intercepts."""
if _Key is None or _Keys is None or included is None:
    included = lambda: SimpleNamespace(raw_repr=lambda: None)  # noqa: E731  in no set
else:
    _inference = _Keys(_Key.BackendSelect)
    QUIET = frozenset([_inference.raw_repr(), (_inference | _Keys(_Key.ADInplaceOrView)).raw_repr()])


# ---- autograd -------------------------------------------------------------------------------------------

increment_version: Callable[[Sequence[Tensor]], None] = _find(
    "_C._increment_version", torch.autograd.graph.increment_version, _HOST
)
unwrap: Callable[[Tensor], Tensor] = _find("_C._functorch.unwrap_if_dead", lambda t: t.view_as(t), _HOST)
"""The tensor in a wrapper whose transform has ended, of the same memory."""

keeps_graph: Callable[[], bool] = _find(
    "_C._autograd._get_current_graph_task_keep_graph", lambda: True, "an MLP's gradients take memory of their own"
)
"""Whether the backward pass that runs may be followed by another over the same graph; True where torch does not say."""

_apply = _find("_C._FunctionBase.apply", None, "a call with a gradient goes through torch.func")


def eager_apply(function: type[Function]) -> Callable[..., Any]:
    """``function.apply`` without its way into torch.func, which costs 1 us."""
    return function.apply if _apply is None else super(Function, function).apply  # type: ignore[misc]


# ---- tensors --------------------------------------------------------------------------------------------

without_overrides: Callable[[], AbstractContextManager[None]] = _find(
    "_C.DisableTorchFunction", nullcontext, "a decoder's step is slower under a default device"
)
unsafe_view: Callable[..., Tensor] = _find(
    "ops.aten._unsafe_view", lambda t, shape: t.new_empty(shape).copy_(t.view(shape)), "linear copies its result"
)
"""A tensor in another shape that autograd takes for no view, so that it may be modified in place."""

fake_tensors: Any = _find("_subclasses.fake_tensor", None, "warmup records no function's calls; give it problems")
"""The module of tensors without memory; None where it has moved."""

TensorGuards: Any = _find("_C._dynamo.guards.TensorGuards", None, "a call that repeats is recalled by a key")
"""Confirms in 0.3 us that operands look as they did."""


# ---- Inductor -------------------------------------------------------------------------------------------

_INDUCTOR = {
    "ir": ("IRNode", "TensorBox", "FallbackKernel", "convert_shape_to_inductor"),
    "lowering": ("lowerings", "empty_strided", "register_lowering"),
    "virtualized": ("V",),
}


def inductor() -> Any:
    """Inductor's modules that a lowering is written with, by name; None where a name of theirs has moved."""
    try:
        found = {name: import_module(f"torch._inductor.{name}") for name in _INDUCTOR}
    except ImportError:
        return None
    complete = all(hasattr(found[name], one) for name, names in _INDUCTOR.items() for one in names)
    return SimpleNamespace(**found) if complete else None


def absent() -> dict[str, str]:
    """:data:`ABSENT` and Inductor's names, whose modules take seconds to load and are read as text."""
    moved = {}
    for name, names in _INDUCTOR.items():
        module = f"torch._inductor.{name}"
        spec = find_spec(module)
        text = "" if spec is None or spec.loader is None else spec.loader.get_source(module)  # type: ignore[attr-defined]
        loaded = sys.modules.get(module)
        for one in names:
            if not (hasattr(loaded, one) if loaded else one in text):
                moved[f"{module}.{one}"] = "compiled graphs call ops through the dispatcher"
    return ABSENT | moved
