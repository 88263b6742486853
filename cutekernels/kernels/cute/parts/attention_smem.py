"""How much shared memory attention takes: plain arithmetic, read by ``why_not``. A test holds it to the cubin's."""

from __future__ import annotations

from dataclasses import dataclass

PADDED = (32, 64, 96, 128, 192, 256)  # head dims that tiles in shared memory have


def padded(head_dim: int) -> int:
    """The head dim of a tile that holds ``head_dim``."""
    return next(d for d in PADDED if d >= head_dim)


@dataclass(frozen=True, slots=True)
class PrefillSmem:
    """Shared memory of attention's prefill: the tile of queries, which the output leaves through, then K's and V's."""

    tile_q: int
    tile_kv: int
    head_dim: int
    stages: int
    element_bytes: int = 2

    @property
    def q_bytes(self) -> int:
        return self.tile_q * padded(self.head_dim) * self.element_bytes

    @property
    def kv_bytes(self) -> int:
        return 2 * self.tile_kv * padded(self.head_dim) * self.stages * self.element_bytes

    @property
    def total_bytes(self) -> int:
        return self.q_bytes + self.kv_bytes
