"""The kernels of a patched model's first prompt, compiled side by side before it runs."""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor

from cutekernels import dispatch
from cutekernels.ahead import compile_first, prompt_of
from cutekernels.integrations.transformers import attention
from cutekernels.ops.shared.calls import Recorder

_one_at_a_time = threading.RLock()
_CHANGING = {"dynamic", "longrope"}  # rotary embeddings that keep what a call computed


def watch(model: torch.nn.Module) -> None:
    model.register_forward_pre_hook(_prepare, with_kwargs=True)


def unwatch(model: torch.nn.Module) -> None:
    attention.unhook(model, _prepare)


def _prepare(model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> None:
    """Once, before the first call that nobody traces, where it takes no gradient and may be made on fakes too.
    Behind ``warmup``, which makes it on fakes, there is nothing left to prepare. ``kwargs`` is left out in a thread
    whose call has begun when another one takes this hook off.
    """
    if torch.compiler.is_compiling():
        return
    with _one_at_a_time:  # others wait for kernels that they need as well
        if _prepare not in model._forward_pre_hooks.values():
            return
        unwatch(model)
        if dispatch.recording():
            return
        ids: Any = args[0] if args else (kwargs or {}).get("input_ids")
        if _is_prompt(ids) and not torch.is_grad_enabled() and not _is_watched(model):
            calls = "first", *ids.shape
            compile_first(model, calls, lambda: prompt_of(model, Recorder(), *ids.shape), ids.device)


def _is_prompt(ids: Any) -> bool:
    return isinstance(ids, Tensor) and ids.is_cuda and ids.dim() == 2 and not ids.is_floating_point()


def _is_watched(model: torch.nn.Module) -> bool:
    """Whether a call on fakes would be seen: by hooks of others, wrappers that move weights, other ranks, or calls of
    other threads, in what a module keeps.
    """
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return True
    tables = [table for m in model.modules() for table in (m._forward_hooks, m._forward_pre_hooks)]
    hooked = any(hook not in attention.HOOKS for table in tables for hook in table.values())
    kinds = [getattr(module, "rope_type", None) for module in model.modules()]
    changing = any(_CHANGING & ({*kind.values()} if isinstance(kind, dict) else {kind}) for kind in kinds)
    return hooked or changing or any("_hf_hook" in vars(module) for module in model.modules())
