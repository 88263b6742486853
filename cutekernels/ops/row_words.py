"""Words in which CTAs of one launch tell the others of a row: 64 bits a row, behind one that counts launches.

Their kernel's part is ``GridSquares`` in ``kernels/cute/parts/statistics.py``. Nobody clears them, since they name
their launch; so launches one after the other may share them, and launches of one stream do. A launch captured in a
graph has words of its own (of 4096, taken in turn), since graphs replay on any stream.
"""

from __future__ import annotations

import threading

import torch
from torch import Tensor

from cutekernels.ops.gemm_skinny import MOST_TOKENS

_SLOTS = 4096  # of one device, for captured launches

_lock = threading.Lock()
_by_stream: dict[tuple[int, int], Tensor] = {}
_reserves: dict[int, Tensor] = {}
_taken: dict[int, int] = {}


def prepare(device: int) -> None:
    """Allocates what captured launches will take: nothing can be zeroed once for all while they are captured."""
    with _lock:
        if device not in _reserves:
            _reserves[device] = torch.zeros((_SLOTS, 1 + MOST_TOKENS), device=f"cuda:{device}", dtype=torch.int64)
            torch.cuda.current_stream(device).synchronize()  # whoever takes some may do so on another stream


def words() -> Tensor:
    """int64 (1 + MOST_TOKENS,) of the current device and stream."""
    device = torch.cuda.current_device()
    if torch.cuda.is_current_stream_capturing():
        with _lock:
            slot = _taken[device] = (_taken.get(device, -1) + 1) % _SLOTS
            return _reserves[device][slot]
    key = device, torch._C._cuda_getCurrentRawStream(device)
    found = _by_stream.get(key)
    if found is None:
        found = _by_stream[key] = torch.zeros(1 + MOST_TOKENS, device="cuda", dtype=torch.int64)
    return found
