"""Words in which CTAs of one launch tell the others of a row: 64 bits a row, behind one that counts launches.

Their kernel's part is ``GridSquares`` in ``kernels/cute/parts/statistics.py``. Nobody clears them, since they name
their launch; so launches one after the other may share them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cutekernels.ops.gemm.skinny import MOST_TOKENS
from cutekernels.ops.shared.per_stream import PerStream, Reserve

_WORDS = 1 + MOST_TOKENS

reserve = Reserve(4096 * _WORDS, torch.int64)  # of captured launches: not the skinny tickets', which are left zero


def _fresh() -> Tensor:
    return torch.zeros(_WORDS, device="cuda", dtype=torch.int64)


words: PerStream[Tensor] = PerStream(_fresh, lambda: reserve.take(_WORDS))
