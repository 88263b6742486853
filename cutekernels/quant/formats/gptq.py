"""GPTQ of four bits: words along K, zeros along N, groups by ``g_idx``.

``qweight`` int32 ``(K / 8, N)``: nibble i of row r is K index ``8 r + i``. ``qzeros`` int32 ``(K / g, N / 8)``: nibble
i of column c is row ``8 c + i``; version 1 stores ``z - 1``, so a stored 15 is z = 16, version 2 stores z. ``scales``
fp16 ``(K / g, N)``. ``g_idx`` int32 ``(K,)``: the group of each K index. An element is
``s[g_idx[k], n] * (q - z[g_idx[k], n])``.

With act-order ``g_idx`` is not monotone: columns are permuted so that groups become runs, and ``order`` says how.
Old files without act-order have zeros alone, which vLLM and Exllama take for none.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cutekernels.errors import UnsupportedProblem
from cutekernels.quant.assembly import assemble, check_group, groups_of, unassemble
from cutekernels.quant.formats.nibbles import expect, matrix, of_words, to_words
from cutekernels.quant.weight import QuantizedWeight

NAMES = ("qweight", "qzeros", "scales", "g_idx")


def from_gptq(
    qweight: Tensor,
    qzeros: Tensor,
    scales: Tensor,
    group: int,
    g_idx: Tensor | None = None,
    version: int = 1,
    *,
    dtype: torch.dtype | None = None,
) -> QuantizedWeight:
    """A weight from GPTQ's tensors.

    Args:
        group: elements of K that share a scale; -1 for all.
        g_idx: the group of each element of K; None, and zeros alone: ``k // group``.
        version: 1 (``checkpoint_format`` "gptq") where zeros are stored less one, 2 ("gptq_v2") where they are not.
        dtype: of the weight's ``dequantize``; that of ``scales`` if None.

    Raises:
        UnsupportedProblem: tensors that contradict each other or the format.
    """
    if version not in (1, 2):
        raise UnsupportedProblem(f'GPTQ has versions 1 and 2, not {version!r}; "gptq" is 1, "gptq_v2" is 2')
    check_group(group, by="GPTQ")
    rows, n = matrix("qweight", qweight, (torch.int32,), by="GPTQ")
    k = 8 * rows
    groups = groups_of(group, k)
    why = f"K={k}, N={n} and groups of {group}"
    if n % 8:
        raise UnsupportedProblem(
            f"GPTQ stores zeros of eight rows in a word, so N is a multiple of 8, not {n}; "
            "pad the layer before quantizing"
        )
    expect("qzeros", qzeros, (torch.int32,), (groups, n // 8), why, by="GPTQ")
    expect("scales", scales, (torch.float16, torch.bfloat16, torch.float32), (groups, n), why, by="GPTQ")
    codes = of_words(qweight).permute(0, 2, 1).reshape(k, n).t()
    order = None
    details: dict[str, Any] = {"version": version, "g_idx": None}
    if g_idx is not None:
        expect("g_idx", g_idx, (torch.int32, torch.int64), (k,), why, by="GPTQ")
        details |= {"g_idx": g_idx.dtype, "unset": groups > 1 and not bool(g_idx.any())}
        order = None if details["unset"] else order_of(g_idx, group, by="GPTQ")
        codes = codes if order is None else codes[:, order]
    return assemble(
        codes,
        "int4",
        scales,
        group=group,
        zeros=of_words(qzeros).flatten(-2) + (1 if version == 1 else 0),
        order=order,
        dtype=scales.dtype if dtype is None else dtype,
        format="gptq",
        details=details,
    )


def order_of(g_idx: Tensor, group: int, *, by: str) -> Tensor | None:
    """The permutation of K that makes groups runs, or None where they are.

    Raises:
        UnsupportedProblem: groups that do not have ``group`` members each, the last one the rest.
    """
    runs = group_index(g_idx.numel(), group, g_idx.device)
    if torch.equal(g_idx.long(), runs):
        return None
    order = torch.argsort(g_idx, stable=True)
    if not torch.equal(g_idx[order].long(), runs):
        raise UnsupportedProblem(
            f"each group of {by}'s g_idx has {group} members, the last one the rest, and here some have not; "
            "check group_size in the config, or quantize anew"
        )
    return order


def group_index(k: int, group: int, device: torch.device) -> Tensor:
    """``g_idx`` of a weight without act-order, int64."""
    index = torch.arange(k, device=device)
    return torch.zeros_like(index) if group <= 0 else index // group


def unordered(codes: Tensor, weight: QuantizedWeight) -> tuple[Tensor, Tensor]:
    """``(codes, g_idx)`` with columns as the checkpoint has them."""
    index = group_index(weight.shape[1], weight.details["group"], weight.device)
    if weight.order is None:
        return codes, index
    order = weight.order.long()
    return torch.empty_like(codes).index_copy_(1, order, codes), torch.empty_like(index).index_copy_(0, order, index)


def write(weight: QuantizedWeight) -> dict[str, Tensor]:
    """The tensors that :func:`from_gptq` read."""
    codes, scales, zeros, _ = unassemble(weight)
    assert zeros is not None
    n, k = weight.shape
    codes, index = unordered(codes, weight)
    stored = zeros - (1 if weight.details["version"] == 1 else 0)
    tensors = {
        "qweight": to_words(codes.t().reshape(k // 8, 8, n).permute(0, 2, 1)),
        "qzeros": to_words(stored.unflatten(-1, (-1, 8))),
        "scales": scales,
    }
    if weight.details["g_idx"] is not None:
        tensors["g_idx"] = (index * (not weight.details["unset"])).to(weight.details["g_idx"])
    return tensors
