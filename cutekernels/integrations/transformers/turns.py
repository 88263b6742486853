"""Forwards of transformers' own in which our ``rope`` turns queries and keys."""

from __future__ import annotations

import functools
import inspect
from types import CellType, FunctionType
from typing import Any

import torch
from torch import Tensor

from cutekernels.integrations.transformers.families import Family

TURN = "apply_rotary_pos_emb"  # the function of transformers' modules that turns queries and keys


def turning(original: Any, family: Family) -> Any:
    """``original``, which turns queries and keys, by ``rope`` where it is called as transformers calls it."""

    @functools.wraps(original)
    def turn(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *args: Any, unsqueeze_dim: int = 1, **kwargs: Any) -> Any:
        known = q.dim() == k.dim() == 4 and cos.dim() == 3 and cos.dtype in (q.dtype, torch.float32)
        if args or kwargs or unsqueeze_dim != 1 or not known:
            return original(q, k, cos, sin, *args, unsqueeze_dim=unsqueeze_dim, **kwargs)
        q, k = family.turned(q.transpose(1, 2), k.transpose(1, 2), cos, sin)
        return q.transpose(1, 2), k.transpose(1, 2)

    return turn


def turning_forward(original: Any, family: Family) -> Any:
    """``original``'s forward, in whose code the function that turns is :func:`turning`'s."""
    inner = inspect.unwrap(original.forward)
    return _with_inner(original.forward, _copy(inner, {TURN: turning(inner.__globals__[TURN], family)}))


def within_reach(forward: Any) -> bool:
    """Whether every decorator around a forward keeps what it wraps where :func:`_with_inner` finds it."""
    inner = getattr(forward, "__wrapped__", None)
    return inner is None or (any(_is_in(cell, inner) for cell in forward.__closure__ or ()) and within_reach(inner))


def _with_inner(forward: Any, made: Any) -> Any:
    """A decorated forward around ``made`` in the place of what it wraps in the end."""
    inner = getattr(forward, "__wrapped__", None)
    if inner is None:
        return made
    made = _with_inner(inner, made)
    cells = tuple(CellType(made) if _is_in(cell, inner) else cell for cell in forward.__closure__)
    return functools.update_wrapper(_copy(forward, {}, cells), made)


def _is_in(cell: CellType, function: Any) -> bool:
    try:
        return cell.cell_contents is function
    except ValueError:  # an empty one
        return False


def _copy(function: Any, names: dict[str, Any], cells: tuple[CellType, ...] | None = None) -> FunctionType:
    """A function of the same code, for which other globals, or cells, stand under some names."""
    known = function.__globals__
    if names:
        known = known | names
        known.pop("__name__", None)  # by which Dynamo would guard what the module of that name has
    closure = function.__closure__ if cells is None else cells
    made = FunctionType(function.__code__, known, function.__name__, function.__defaults__, closure)
    made.__kwdefaults__ = function.__kwdefaults__
    made.__annotations__, made.__doc__ = function.__annotations__, function.__doc__
    made.__qualname__, made.__module__ = function.__qualname__, function.__module__
    return made
