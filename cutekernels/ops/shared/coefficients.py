"""The numbers of the models of norms and of other ops that stream rows: docs/notes/streaming.md."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Streaming:
    """Numbers of all ops whose bytes are the limit (H200, 2026-11-23)."""

    uncoalesced: float = 4.0  # factor of DRAM's time: neighbouring threads use an eighth to a half of a sector
    chunked: float = 0.97  # factor of the bytes: rows walked in chunks come from the caches the second time
    idle: float = 0.2  # share of a head's cost: one of a tile that is not there
    ragged: float = 0.5  # power by which a row's last block, in part empty, counts
    hidden: float = 2.5  # exponent of the mean of DRAM's time and the waits for loads, which it hides
    cute: float = 1.25  # factor of the default's estimate: no model puts an unmeasured config of CuTe's first


@dataclass(frozen=True)
class Filter:
    """Instructions of a warp in the passes over a row of logits; no sweep of them is recorded."""

    pass_us: float = 0.3  # us: from one pass to the next within a launch
    first: int = 12  # instructions: an element in the pass for the maximum
    top_k: int = 4  # instructions: an element in a pass that counts
    top_p: int = 45  # instructions: an element in a pass that adds probabilities
    last: int = 30  # instructions: an element in the pass that writes
    digit: int = 2  # instructions: an element, for each digit of a count; twice as many for one of a sum


STREAMING, FILTER = Streaming(), Filter()
