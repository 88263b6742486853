"""Parameters of several projections moved side by side in memory, so that one product serves all of them."""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakValueDictionary

import torch
from torch import Tensor

_WHOLES: WeakValueDictionary[tuple[torch.device, int], Tensor] = WeakValueDictionary()  # by device and address


def side_by_side(parameters: Sequence[Tensor]) -> Tensor:
    """All rows in one tensor, whose memory each parameter then shares; their values stay.

    Parameters that lie so already stay where they are: a second reader of a model takes no memory.
    """
    rows = [p.data for p in parameters]
    with torch.inference_mode(False), torch.no_grad():
        whole = _together(rows)
        if whole is None:
            whole = torch.cat(rows)
            for p, own in zip(parameters, split(whole, [len(t) for t in rows]), strict=True):
                p.data = own
            if not whole.is_meta:  # no addresses there
                _WHOLES[whole.device, whole.data_ptr()] = whole
    return whole


def split(whole: Tensor, sizes: Sequence[int]) -> Sequence[Tensor]:
    """Successive rows of ``whole``, in its memory, each as the only tensor of its storage.

    Writers of checkpoints (safetensors, accelerate) take tensors of one storage for copies of each other, and drop
    all but one. A part's storage keeps the whole one alive. Tensors without plain memory, on meta or of a subclass,
    and those that gradients flow into are split into views.
    """
    rows: Sequence[Tensor] = whole.split(list(sizes))
    plain = type(whole) in (Tensor, torch.nn.Parameter) and not whole.is_meta and whole.is_contiguous()
    if not plain or whole.requires_grad or torch.compiler.is_compiling():
        return rows
    memory, size = whole.untyped_storage(), whole.element_size()
    starts = [t.storage_offset() * size for t in rows]
    return [
        whole.new_empty(0).set_(memory[start : start + t.numel() * size], 0, t.shape, t.stride())
        for start, t in zip(starts, rows, strict=True)
    ]


def _together(rows: list[Tensor]) -> Tensor | None:
    """The tensor that :func:`side_by_side` made of ``rows``, while somebody holds it and they lie there, or None."""
    first = rows[0]
    whole = None if first.is_meta else _WHOLES.get((first.device, first.data_ptr()))
    if whole is None:
        return None
    whole._fix_weakref()  # type: ignore[attr-defined]  # as torch.utils.weak does
    if len(whole) != sum(map(len, rows)):
        return None
    for t, own in zip(rows, whole.split([len(t) for t in rows]), strict=True):
        place = t.data_ptr(), t.dtype, t.shape, t.stride()
        if place != (own.data_ptr(), own.dtype, own.shape, own.stride()):
            return None
    return whole
