"""AWQ, version "gemm": int4 in groups along K, words along N in an interleaved order, zeros as they are.

``qweight`` int32 ``(K, N / 8)``, ``qzeros`` int32 ``(K / g, N / 8)``: nibble i of column c is row ``8 c + ORDER[i]``.
``scales`` fp16 ``(K / g, N)``. An element is ``s * (q - z)``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cutekernels.errors import UnsupportedProblem
from cutekernels.quant.assembly import assemble, check_group, groups_of, unassemble
from cutekernels.quant.formats.nibbles import expect, matrix, of_words, to_words
from cutekernels.quant.weight import QuantizedWeight

ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the row, of eight, that nibble i holds
NIBBLE = (0, 4, 1, 5, 2, 6, 3, 7)  # the nibble that holds row i of eight
NAMES = ("qweight", "qzeros", "scales")


def from_awq(
    qweight: Tensor, qzeros: Tensor, scales: Tensor, group: int, *, dtype: torch.dtype | None = None
) -> QuantizedWeight:
    """A weight from AWQ's tensors ("gemm").

    Args:
        group: elements of K that share a scale; -1 for all.
        dtype: of the weight's ``dequantize``; that of ``scales`` if None.

    Raises:
        UnsupportedProblem: tensors that contradict each other or the format.
    """
    check_group(group, by="AWQ")
    k, words = matrix("qweight", qweight, (torch.int32,), by="AWQ")
    n, groups = 8 * words, groups_of(group, k)
    if 0 < group < k and k % group:
        raise UnsupportedProblem(
            f"AWQ's groups of {group} divide K, and qweight has {k} rows; "
            "check the group size of the config, or download the checkpoint again"
        )
    why = f"K={k}, N={n} and groups of {group}"
    expect("qzeros", qzeros, (torch.int32,), (groups, words), why, by="AWQ")
    expect("scales", scales, (torch.float16, torch.bfloat16, torch.float32), (groups, n), why, by="AWQ")
    return assemble(
        _rows(qweight).t(),
        "int4",
        scales,
        group=group,
        zeros=_rows(qzeros),
        dtype=scales.dtype if dtype is None else dtype,
        format="awq",
        details={},
    )


def write(weight: QuantizedWeight) -> dict[str, Tensor]:
    """The tensors that :func:`from_awq` read."""
    codes, scales, zeros, _ = unassemble(weight)
    assert zeros is not None
    return {"qweight": _words(codes.t()), "qzeros": _words(zeros), "scales": scales}


def _rows(words: Tensor) -> Tensor:
    """``(R, N)`` of words along N ``(R, N / 8)``."""
    return of_words(words)[..., list(NIBBLE)].flatten(-2)


def _words(rows: Tensor) -> Tensor:
    return to_words(rows.unflatten(-1, (-1, 8))[..., list(ORDER)])
