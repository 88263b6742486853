"""Values of index tensors, for which the host waits. Every refusal names rule, value and remedy."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cutekernels.errors import UnsupportedProblem

if TYPE_CHECKING:
    from torch import Tensor


def check_ends(q: Tensor, k: Tensor, cu_q: Tensor, cu_kv: Tensor) -> None:
    """Refuses varlen sequences' ends that do not run from 0 to the tensors' rows without falling. Waits once."""
    import torch

    both = torch.stack((cu_q, cu_kv)).tolist()
    for name, ends, rows in zip(("cu_seqlens_q", "cu_seqlens_kv"), both, (q.shape[0], k.shape[0]), strict=True):
        falls = next((i for i in range(1, len(ends)) if ends[i] < ends[i - 1]), None)
        if falls is not None:
            value = f"entry {falls} is {ends[falls]}, behind {ends[falls - 1]}"
        elif ends[0] != 0 or ends[-1] != rows:
            value = f"it runs from {ends[0]} to {ends[-1]}"
        else:
            continue
        raise UnsupportedProblem(
            f"{name} must run from 0 to {rows}, the tensor's rows, and never fall; {value}: pass the cumulative "
            "sums of the sequences' lengths, and slices of the tensors without the rows of no sequence"
        )


def check_pages(table: Tensor, lengths: Tensor, pages: int, size: int, seq_q: int, left: int) -> None:
    """Refuses a page table that names no page where a query sees a token. Waits once."""
    import torch

    begins = torch.arange(table.shape[1], device=table.device) * size
    ends = lengths.clamp(0, table.shape[1] * size).unsqueeze(-1)
    used = begins < ends
    if left >= 0:
        used &= begins + size > ends - seq_q - left
    bad = used & ((table < 0) | (table >= pages))
    if bad.any():
        b, entry = bad.nonzero()[0].tolist()
        raise UnsupportedProblem(
            f"page_table must name one of {pages} pages for each that cache_seqlens uses; entry {entry} of sequence "
            f"{b} is {int(table[b, entry])}, and the sequence has {int(lengths[b])} tokens: reserve pages first"
        )


def check_lengths(lengths: Tensor, room: int) -> None:
    """Refuses lengths that a cache has no room for. Waits once."""
    bad = (lengths < 0) | (lengths > room)
    if bad.any():
        b = int(bad.nonzero()[0])
        raise UnsupportedProblem(
            f"cache_seqlens must be from 0 to {room}, the cache's room; sequence {b} has {int(lengths[b])} tokens: "
            "make room for more"
        )
