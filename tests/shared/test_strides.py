"""Strides: flattening into rows, self-overlap, and how two views of one buffer lie to each other."""

from __future__ import annotations

from itertools import product

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from cutekernels.ops.shared import strides


@st.composite
def views(draw: st.DrawFn, size: int = 60) -> Tensor:
    """Any view of one small buffer."""
    shape = draw(st.lists(st.integers(0, 4), min_size=1, max_size=3))
    strided = draw(st.lists(st.integers(0, 9), min_size=len(shape), max_size=len(shape)))
    reach = sum((n - 1) * s for n, s in zip(shape, strided, strict=True) if n)
    return BUFFER.as_strided(shape, strided, draw(st.integers(0, max(0, size - reach - 1))))


BUFFER = torch.zeros(256, dtype=torch.int16)


def addresses(t: Tensor) -> list[int]:
    return [
        t.data_ptr() + 2 * sum(i * s for i, s in zip(at, t.stride(), strict=True))
        for at in product(*map(range, t.shape))
    ]


@given(view=views())
@settings(deadline=None)
def test_matrix_and_self_overlap(view: Tensor) -> None:
    found = strides.matrix(view.shape, view.stride())
    if found is not None:
        rows, cols, row_stride, col_stride = found
        walked = [view.data_ptr() + 2 * (r * row_stride + c * col_stride) for r in range(rows) for c in range(cols)]
        assert walked == addresses(view)
    every = addresses(view)
    if len(set(every)) < len(every):
        assert strides.overlaps_itself(view)
    if view.is_contiguous() and view.numel():
        assert found is not None
        assert not strides.overlaps_itself(view)


@given(out=views(), t=views())
@settings(deadline=None, max_examples=400)
def test_relation_never_misses_an_overlap(out: Tensor, t: Tensor) -> None:
    said = strides.relation(out, t)
    if said == "apart":
        assert not set(addresses(out)) & set(addresses(t))
    elif said == "same":
        assert addresses(out) == addresses(t)


@given(data=st.data(), pitch=st.integers(1, 12))
def test_relation_is_exact_between_slices_of_one_buffer(data: st.DataObject, pitch: int) -> None:
    def rows_of() -> Tensor:
        rows, width = data.draw(st.integers(1, 4)), data.draw(st.integers(1, pitch))
        return BUFFER.as_strided((rows, width), (pitch, 1), data.draw(st.integers(0, 60)))

    out, t = rows_of(), rows_of()
    shared = bool(set(addresses(out)) & set(addresses(t)))
    assert (strides.relation(out, t) != "apart") == shared


def test_relation_of_what_lies_interleaved() -> None:
    """Heads of a joint projection, whatever is sliced off around them; real and imaginary parts."""
    buffer = torch.zeros(2, 5, 3 * 8)  # (batch, seq, channels of q, k and v)
    for joint in (buffer, buffer[:, 1:4]):
        q, k = joint[..., :16].unflatten(-1, (4, 4)), joint[..., 16:20].unflatten(-1, (1, 4))
        assert strides.relation(q, k) == strides.relation(k, q) == "apart"
        assert strides.relation(q, q.transpose(1, 2)) == "overlap"
        assert strides.relation(q, joint[..., 15:19]) == "overlap"
    pairs = torch.zeros(3, 7, 2)
    assert strides.relation(pairs[..., 0], pairs[..., 1]) == "apart"
    assert strides.relation(pairs[:, 1:, 0], pairs[:, :-1, 1]) == "apart"
    assert strides.relation(pairs[:, 1:, 0], pairs[:, :-1, 0]) == "overlap"
    storage = torch.zeros(2, 4, 6, 8)  # (batch, heads, seq, channels), read as (batch, seq, heads, channels)
    heads = storage.transpose(1, 2)
    assert strides.relation(heads[:, :, :3], heads[:, :, 3:]) == "apart"
