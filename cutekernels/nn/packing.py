"""Parameters of several projections moved side by side in memory, so that one product serves all of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_WHOLE = "_cutekernels_whole"  # the attribute of a part's storage: the tensor that the part is rows of


def side_by_side(parameters: Sequence[Tensor]) -> Tensor:
    """All rows in one tensor, whose memory each parameter then shares; their values stay.

    Parameters that lie so already stay where they are: they move once, and every later reader of a model finds them
    together.
    """
    rows = [p.data for p in parameters]
    with torch.inference_mode(False), torch.no_grad():
        whole = together(rows)
        if whole is None:
            whole = torch.cat(rows)
            memory = whole.untyped_storage()
            for p, own in zip(parameters, split(whole, [len(t) for t in rows]), strict=True):
                p.data = own
                place = own.untyped_storage()
                if place._cdata != memory._cdata:  # or the whole would hold itself
                    setattr(place, _WHOLE, whole)
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


def together(rows: Sequence[Tensor]) -> Tensor | None:
    """The tensor that :func:`side_by_side` made of ``rows``, while they lie there, or None."""
    whole: Tensor | None = getattr(rows[0].untyped_storage(), _WHOLE, None)
    if whole is None or len(whole) != sum(map(len, rows)):
        return None
    at, dtype = whole.data_ptr(), whole.dtype
    for t in rows:
        if t.data_ptr() != at or t.dtype != dtype or not t.is_contiguous():
            return None
        at += t.nbytes
    return whole if at == whole.data_ptr() + whole.nbytes else None
