"""Per-row mailboxes between the CTAs of one launch: 64 bits a row, behind one that counts launches.

The kernel's side is ``GridSquares`` in ``kernels/cute/parts/statistics.py``. A message names its launch, so mailboxes
are never cleared, and consecutive launches share them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cutekernels.ops.gemm.problem import MOST_TOKENS
from cutekernels.ops.shared.per_stream import PerStream, Reserve

_COUNT = 1 + MOST_TOKENS

reserve = Reserve(4096 * _COUNT, torch.int64)  # for captured launches; apart from tickets, which are left zero


def _fresh() -> Tensor:
    return torch.zeros(_COUNT, device="cuda", dtype=torch.int64)


MAILBOXES: PerStream[Tensor] = PerStream(_fresh, lambda: reserve.take(_COUNT))
