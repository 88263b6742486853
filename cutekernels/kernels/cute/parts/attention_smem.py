"""Shared memory of attention: expressions, read by ``why_not``. A test compares it with the cubin's."""

from __future__ import annotations

from dataclasses import dataclass

from cutekernels.columns import larger, where

BLOCK_KEYS, BLOCK_QUERIES = 16, 16  # of a block of dS in memory, which a warp holds as an A operand
PADDED = (32, 64, 96, 128, 192, 256)  # head dims of tiles in shared memory


def padded(head_dim: int) -> int:
    """The head dim of a tile that holds ``head_dim``."""
    return next(d for d in PADDED if d >= head_dim)


@dataclass(frozen=True, slots=True)
class MultistageAttentionSmem:
    """Shared memory of attention's prefill: the tile of queries, later of the output, then the stages of K and V."""

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


@dataclass(frozen=True, slots=True)
class WarpgroupAttentionSmem:
    """Shared memory of attention by warp groups: each group's queries, later its results, the stages of K, those of V,
    results where they have a ``separate_output``, the parts that a cluster's ``split`` CTAs send, then barriers.
    """

    groups: int
    tile_kv: int
    head_dim: int
    stages: int
    separate_output: bool = False
    split: int = 1
    element_bytes: int = 2
    GROUP_ROWS = 64
    GROUP_THREADS = 128
    QUEUE_BYTES = 24  # two barriers and a tile's number

    @property
    def group_bytes(self) -> int:
        return self.GROUP_ROWS * padded(self.head_dim) * self.element_bytes

    @property
    def stage_bytes(self) -> int:
        return self.tile_kv * padded(self.head_dim) * self.element_bytes

    @property
    def k_at(self) -> int:
        return self.groups * self.group_bytes

    @property
    def v_at(self) -> int:
        return self.k_at + self.stages * self.stage_bytes

    @property
    def behind_v(self) -> int:
        return self.v_at + self.stages * self.stage_bytes

    @property
    def results_at(self) -> int:
        return where(self.separate_output, self.behind_v, 0)

    @property
    def inbox_at(self) -> int:
        return self.behind_v + where(self.separate_output, self.groups * self.group_bytes, 0)

    @property
    def inbox_bytes(self) -> int:
        """fp32 parts of each group's rows, and four statistics of each thread from each CTA; none without a split."""
        rows, statistics = self.GROUP_ROWS * padded(self.head_dim), 4 * self.GROUP_THREADS * self.split
        return where(self.split > 1, 4 * self.groups * (rows + statistics), 0)

    @property
    def barriers_at(self) -> int:
        """Full and empty, of queries, K and V."""
        return self.inbox_at + self.inbox_bytes

    @property
    def inbox_barriers_at(self) -> int:
        """One of each group, behind the queue."""
        return self.barriers_at + 16 * (self.groups + 2 * self.stages) + self.QUEUE_BYTES

    @property
    def total_bytes(self) -> int:
        return self.inbox_barriers_at + where(self.split > 1, 8 * self.groups, 0)


@dataclass(frozen=True, slots=True)
class DecodeSmem:
    """Shared memory of attention's decode: a tile of queries, then the warps' stages of K and of V, a flag.

    The warps' accumulators in fp32, with their references and totals, later replace the stages. Where the ``clustered``
    CTAs of a cluster send each other theirs, the flag is a barrier and the inbox of their messages follows; it shares
    no bytes with the stages, since a peer may send while this CTA still multiplies. Beside a cache in e4m3 the rows'
    factors come last; with ``token_scales``, behind them, the warps' stages of these, then their numbers.
    """

    tile_kv: int
    head_dim: int
    stages: int
    warps: int
    clustered: int = 0  # CTAs of a cluster, 0 without one
    element_bytes: int = 2
    cache_bytes: int = 2  # of an element; 1: e4m3
    token_scales: bool = False  # of a cache in e4m3, one of each token and head
    ROWS = 16  # queries
    FLAG_BYTES = 16
    STATISTICS_BYTES = 2 * 4 * ROWS  # references and totals of the rows
    GROUP_BYTES = 8 * 4 * ROWS  # accumulators of 8 columns
    NUMBERS_BYTES = 3 * 4

    @property
    def q_bytes(self) -> int:
        return self.ROWS * padded(self.head_dim) * self.element_bytes

    @property
    def stage_bytes(self) -> int:
        """One stage of K or of V, all warps together."""
        return self.tile_kv * padded(self.head_dim) * self.cache_bytes

    @property
    def kv_bytes(self) -> int:
        return 2 * self.stage_bytes * self.stages

    @property
    def merge_bytes(self) -> int:
        """Accumulators, references and totals of each warp, added up at the end."""
        return self.warps * self.ROWS * (padded(self.head_dim) + 2) * 4

    @property
    def flag_at(self) -> int:
        return self.q_bytes + larger(self.kv_bytes, self.merge_bytes)

    @property
    def owned(self) -> int:
        """Groups of 8 columns that a CTA of a cluster adds up, at most."""
        return where(self.clustered > 0, -(-padded(self.head_dim) // (8 * larger(1, self.clustered))), 0)

    @property
    def inbox_at(self) -> int:
        return self.flag_at + self.FLAG_BYTES

    @property
    def total_bytes(self) -> int:
        return self.numbers_at + (self.NUMBERS_BYTES * self.tile_kv if self.token_scales else 0)

    @property
    def factors_at(self) -> int:
        """Factors of each row's scores, beside a cache in e4m3."""
        return self.inbox_at + self.clustered * (self.STATISTICS_BYTES + self.owned * self.GROUP_BYTES)

    @property
    def scales_at(self) -> int:
        return self.factors_at + (4 * self.ROWS if self.cache_bytes == 1 else 0)

    @property
    def numbers_at(self) -> int:
        """Three numbers of each key, from a block's scales."""
        return self.scales_at + (2 * self.tile_kv * self.stages if self.token_scales else 0)


@dataclass(frozen=True, slots=True)
class WarpgroupBackwardSmem:
    """Shared memory of attention's gradients by warp groups: each group's rows of the ``owned`` operands, later of its
    results, the stages of both walked operands, those of their ``stats`` (lse and delta of walked queries), barriers.
    """

    groups: int
    tile_walked: int
    head_dim: int
    stages: int
    owned: int
    stats: bool
    element_bytes: int = 2
    GROUP_ROWS = 64
    QUEUE_BYTES = 24

    @property
    def group_bytes(self) -> int:
        return self.GROUP_ROWS * padded(self.head_dim) * self.element_bytes

    @property
    def stage_bytes(self) -> int:
        """A stage of one walked operand."""
        return self.tile_walked * padded(self.head_dim) * self.element_bytes

    @property
    def walked_at(self) -> int:
        return self.owned * self.groups * self.group_bytes

    @property
    def stats_at(self) -> int:
        return self.walked_at + 2 * self.stages * self.stage_bytes

    @property
    def barriers_at(self) -> int:
        """Full and empty of the owned operands, both full and one empty of each stage, the queue."""
        return self.stats_at + (8 * self.tile_walked * self.stages if self.stats else 0)

    @property
    def total_bytes(self) -> int:
        return self.barriers_at + 8 * (2 + 3 * self.stages) + self.QUEUE_BYTES


@dataclass(frozen=True, slots=True)
class QueryGradientSmem:
    """Shared memory of dQ from dS: as many stages of K and of dS as fit, each group's results, barriers."""

    head_dim: int
    groups: int = 2
    ROWS = 64  # of K, of dS and of a group's results
    MOST_BYTES, MOST_STAGES = 227 * 1024, 8
    QUEUE_BYTES = 24

    @property
    def k_bytes(self) -> int:
        """A stage of K."""
        return 2 * self.ROWS * padded(self.head_dim)

    @property
    def results_bytes(self) -> int:
        """A group's."""
        return self.k_bytes

    @property
    def ds_bytes(self) -> int:
        """A stage of dS."""
        return 2 * self.groups * self.ROWS * self.ROWS

    @property
    def stage_bytes(self) -> int:
        return self.k_bytes + self.ds_bytes

    @property
    def stages(self) -> int:
        rest = self.MOST_BYTES - self.groups * self.results_bytes - self.QUEUE_BYTES - 16 * self.MOST_STAGES
        return min(self.MOST_STAGES, rest // self.stage_bytes)

    @property
    def ds_at(self) -> int:
        return self.stages * self.k_bytes

    @property
    def results_at(self) -> int:
        return self.stages * self.stage_bytes

    @property
    def barriers_at(self) -> int:
        return self.results_at + self.groups * self.results_bytes

    @property
    def total_bytes(self) -> int:
        return self.barriers_at + 16 * self.stages + self.QUEUE_BYTES
