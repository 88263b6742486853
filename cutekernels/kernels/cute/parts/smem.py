"""Shared memory of kernels: expressions of numbers or columns, read by ``why_not``, by models and by the kernels.

A test compiles kernels and holds these numbers to the cubin's.
"""

from __future__ import annotations

from dataclasses import dataclass

from cutekernels.columns import larger, smaller, where

ALIGNMENT = 1024  # span of a 128-byte swizzle pattern
SWIZZLED_ROWS, SWIZZLED = 8, 64  # its rows, and elements in a row
ELEMENT_BYTES = 2  # of operands and results
TILE = 64  # rows, and elements of K, of a packed tile


@dataclass(frozen=True, slots=True)
class GemmSmem:
    """Shared memory of a multistage GEMM: A and B stages, then the output tile in the same bytes.

    A persistent kernel keeps the output tile apart, since the next tile's loads begin before it has left.
    """

    tile_m: int
    tile_n: int
    tile_k: int
    stages: int
    persistent: bool = False

    @property
    def total_bytes(self) -> int:
        staged = (self.tile_m + self.tile_n) * self.tile_k * self.stages * ELEMENT_BYTES
        out = self.tile_m * self.tile_n * ELEMENT_BYTES
        return where(self.persistent, staged + out, larger(staged, out))


@dataclass(frozen=True, slots=True)
class SkinnySmem:
    """Shared memory of a skinny GEMM: stages of weight rows and tokens, later accumulators of warps in their place.

    With a norm in front, ``squaring`` warps have each a sum of squares for each token, and the stages hold the norm's
    weight too, ``gamma_bytes`` an element.
    """

    tile_m: int
    tile_n: int
    tile_k: int
    stages: int
    warps_k: int
    squaring: int = 0
    gamma_bytes: int = 0

    @property
    def staged_bytes(self) -> int:
        return (self.tile_m + self.tile_n) * self.tile_k * self.stages * ELEMENT_BYTES

    @property
    def squares_at(self) -> int:
        sums = (self.warps_k - 1) * self.tile_m * self.tile_n * 4
        return larger(self.staged_bytes, sums)

    @property
    def gamma_at(self) -> int:
        return self.squares_at + self.tile_n * self.squaring * 4

    @property
    def total_bytes(self) -> int:
        return self.gamma_at + self.tile_k * self.stages * self.gamma_bytes


@dataclass(frozen=True, slots=True)
class SkinnyWarpgroupSmem:
    """Shared memory of a skinny_warpgroup GEMM: stages of X and W, later the results in their place; an inbox for the
    accumulators that the other CTAs of a split tile's cluster send; sums of rows' squares; barriers.

    The inbox of two CTAs lies behind the stages, so each sends as soon as it is done. That of more, which is larger,
    takes the place of stages, behind the results (``inbox_in_stages``).

    With a norm in front, stages hold its weight too, ``gamma_bytes`` an element, and ``squares`` of rows have a sum for
    each CTA of the cluster. ``exclusive`` takes more than half of an SM's, so that no second CTA fits.
    """

    tile_m: int
    tile_n: int
    tile_k: int
    stages: int
    split: int
    gamma_bytes: int = 0
    squares: bool = False
    exclusive: bool = False
    GROUP_ROWS = 64  # of the MMA; a tile_m that is no multiple is rounded up
    GROUP_THREADS = 128  # that share those rows
    ACCUMULATORS_PER_BLOCK = 4  # of a thread, in 8 columns
    EXCLUSIVE_BYTES = 114 * 1024  # of an SM's 228 KiB; a CTA's own reserve comes on top
    SQUARING_WARPS = 3  # beside the one that loads: registers are allocated for four

    @property
    def stage_bytes(self) -> int:
        return ((self.tile_m + self.tile_n) * ELEMENT_BYTES + self.gamma_bytes) * self.tile_k

    @property
    def w_at(self) -> int:
        return self.stages * self.tile_m * self.tile_k * ELEMENT_BYTES

    @property
    def gamma_at(self) -> int:
        return self.w_at + self.stages * self.tile_n * self.tile_k * ELEMENT_BYTES

    def begin(self, cta: int) -> int:
        """First of a thread's accumulators that CTA ``cta`` of the cluster adds up: whole blocks of 8 columns."""
        return -(-self.tile_n // 8 * cta // self.split) * self.ACCUMULATORS_PER_BLOCK

    def count(self, cta: int) -> int:
        """Accumulators of a thread that CTA ``cta`` adds up."""
        return self.begin(cta + 1) - self.begin(cta)

    @property
    def share(self) -> int:
        """Accumulators of a thread that one CTA adds up at most."""
        return self.begin(1)

    @property
    def inbox_in_stages(self) -> bool:
        """Whether CTAs send only when the whole cluster has read its stages."""
        return self.split > 2

    @property
    def out_pitch(self) -> int:
        """Elements from one row of results to the next: 8 rows of a store lie in different banks."""
        return self.share // self.ACCUMULATORS_PER_BLOCK * 8 + 8

    @property
    def inbox_at(self) -> int:
        results = self.tile_m * self.out_pitch * ELEMENT_BYTES
        return where(self.inbox_in_stages, results, larger(self.stages * self.stage_bytes, results))

    @property
    def consumer_threads(self) -> int:
        """Consumer threads."""
        return self.rows // self.GROUP_ROWS * self.GROUP_THREADS

    @property
    def rows(self) -> int:
        """Rows that they multiply: whole consumer warp groups'."""
        return -(-self.tile_m // self.GROUP_ROWS) * self.GROUP_ROWS

    @property
    def squares_at(self) -> int:
        inbox_end = self.inbox_at + (self.split - 1) * self.share * self.consumer_threads * 4
        return larger(inbox_end, self.stages * self.stage_bytes)

    @property
    def barriers_at(self) -> int:
        """Two barriers a stage: full, then empty."""
        return self.squares_at + self.split * self.rows * 4 * self.squares

    @property
    def inbox_barrier_at(self) -> int:
        return self.barriers_at + 16 * self.stages

    @property
    def squares_barrier_at(self) -> int:
        return self.inbox_barrier_at + 8 * (self.split > 1)

    @property
    def total_bytes(self) -> int:
        return larger(self.squares_barrier_at + 8 * self.squares, self.EXCLUSIVE_BYTES * self.exclusive)


class BoxesSmem:
    """Boxes of results and bias for each consumer warp group, behind ``staged_bytes`` of stages; barriers follow.

    A box is 64 x 64 results on their way out; with C in front, a box brings its part of C first.
    """

    groups: int
    boxes: int  # of a group
    biased: bool
    staged_bytes: int
    BOX = 64  # rows and columns
    BOX_BYTES = BOX * BOX * 2
    BIASES = 256  # of a tile, at most
    PLACE_BYTES = 32  # of a ring of tiles: two barriers and four numbers
    PLACES = 4  # of a ring: tiles found ahead

    @property
    def boxes_at(self) -> int:
        return -(-self.staged_bytes // ALIGNMENT) * ALIGNMENT

    @property
    def biases_at(self) -> int:
        return self.boxes_at + self.groups * self.boxes * self.BOX_BYTES

    @property
    def barriers_at(self) -> int:
        return self.biases_at + self.groups * self.BIASES * 4 * self.biased


@dataclass(frozen=True)
class WarpgroupSmem(BoxesSmem):
    """Shared memory of a warpgroup GEMM: stages of both operands, boxes of results and bias, barriers, then a ring of
    ``places`` for tiles that are found on the device. Barriers are full and empty for each stage, then ``c_full`` for
    each box of each group, then ``order`` for each group.
    """

    tile_m: int
    tile_n: int
    tile_k: int
    stages: int
    groups: int
    boxes: int  # of a group
    biased: bool = False
    places: int = 0

    @staticmethod
    def sharing(tile_m: int, pingpong: bool) -> int:
        """Consumer groups that share a tile: one for each 64 rows up to three; of 256 rows two, with 128 each."""
        return where(pingpong, 1, where(tile_m <= 3 * 64, tile_m // 64, 2))

    @property
    def stage_bytes(self) -> int:
        return (self.tile_m + self.tile_n) * self.tile_k * ELEMENT_BYTES

    @property
    def columns_at(self) -> int:
        return self.stages * self.tile_m * self.tile_k * ELEMENT_BYTES

    @property
    def staged_bytes(self) -> int:
        return self.stages * self.stage_bytes

    @property
    def ring_at(self) -> int:
        """Numbers of a place are 16 bytes that begin where 16 divides."""
        end = self.barriers_at + 8 * (2 * self.stages + self.groups * self.boxes + self.groups)
        return end if self.places == 0 else -(-end // 16) * 16

    @property
    def total_bytes(self) -> int:
        return self.ring_at + self.places * self.PLACE_BYTES


@dataclass(frozen=True, slots=True)
class SkinnyPackedSmem:
    """Shared memory of a skinny product with a packed weight: stages of weight, tokens, scales and zero points; then
    accumulators of groups of warps.
    """

    tile_m: int  # tokens
    tile_n: int  # weight rows
    tile_k: int
    stages: int
    warps_k: int
    bits: int
    scale_bytes: int
    group: int  # elements of K that share a scale; 0: all
    scale_rows: int  # rows that share a scale: 1, or 128
    zeros: bool
    halves: int = 1  # 2 where half of the rows are gates
    VECTOR = 16

    @property
    def half_rows(self) -> int:
        """Weight rows of a half: neighbours in memory."""
        return self.tile_n // self.halves

    @property
    def half_blocks(self) -> int:
        """Runs of up to 64 rows of a half."""
        return larger(1, self.half_rows // TILE)

    @property
    def tile_bytes(self) -> int:
        """Bytes of a packed tile of 64 x 64."""
        return TILE * TILE * self.bits // 8

    @property
    def part_bytes(self) -> int:
        """Bytes of the CTA's rows of a packed tile."""
        return self.tile_bytes * smaller(self.half_rows, TILE) // TILE

    @property
    def run_bytes(self) -> int:
        """Bytes of up to 64 rows of a stage's weight; of all 64 contiguous in memory too."""
        return self.tile_k // TILE * self.part_bytes

    @property
    def x_at(self) -> int:
        return self.halves * self.half_blocks * self.run_bytes

    @property
    def groups(self) -> int:
        """Groups that a stage's scales belong to."""
        return larger(1, self.tile_k // self.group) if self.group else 0

    @property
    def zero_groups(self) -> int:
        """Groups that a stage's zero points belong to: one where all of K has the same."""
        return larger(1, self.groups) if self.zeros else 0

    @property
    def scales_at(self) -> int:
        return self.x_at + self.tile_m * self.tile_k * 2

    @property
    def zeros_at(self) -> int:
        per_group = self.tile_n * self.scale_bytes if self.scale_rows == 1 else 4 * self.halves
        return self.scales_at + -(-self.groups * per_group // self.VECTOR) * self.VECTOR

    @property
    def stage_bytes(self) -> int:
        end = self.zeros_at + self.zero_groups * self.tile_n
        return -(-end // 128) * 128  # a swizzled line of tokens

    @property
    def sums_at(self) -> int:
        return self.stages * self.stage_bytes

    @property
    def total_bytes(self) -> int:
        return self.sums_at + (self.warps_k - 1) * self.tile_m * self.tile_n * 4


@dataclass(frozen=True, slots=True)
class DequantizeSmem:
    """Shared memory of decoding a packed weight: a buffer of 64 x 64 decoded numbers for each tile of the CTA."""

    tiles: int

    def tile_bytes(self, bits: int) -> int:
        """Bytes of a packed tile."""
        return TILE * TILE * bits // 8

    @property
    def total_bytes(self) -> int:
        return self.tiles * TILE * TILE * ELEMENT_BYTES


@dataclass(frozen=True)
class WarpgroupPackedSmem(BoxesSmem):
    """Shared memory of a warpgroup product with a packed weight: stages of tokens; stages of packed weight, scales and
    zero points; boxes of results and bias for each consumer group; barriers; a ring of ``places`` for tiles that are
    found on the device; what a group leaves for another.
    """

    groups: int  # consumer warp groups, 64 weight rows each
    tile_n: int  # tokens
    tile_k: int
    stages: int
    boxes: int  # of a group
    biased: bool
    bits: int
    scale_bytes: int
    group: int  # elements of K that share a scale; 0: all
    scale_rows: int
    zeros: bool
    places: int = 0  # of a ring, for tiles that are found on the device
    exchanged: int = 0  # accumulators of a thread that one group leaves for another
    received: int = 0  # accumulators of a thread that a cluster's other CTAs send it

    @property
    def tile_bytes(self) -> int:
        """Bytes of a packed tile of 64 x 64."""
        return TILE * TILE * self.bits // 8

    @property
    def x_bytes(self) -> int:
        return self.tile_n * self.tile_k * 2

    @property
    def weight_bytes(self) -> int:
        """Bytes of one group's packed rows in a stage."""
        return self.tile_k // TILE * self.tile_bytes

    @property
    def strips(self) -> int:
        """Groups of K in a stage whose scales travel with it."""
        return larger(1, self.tile_k // self.group) if self.group and self.scale_rows == 1 else 0

    @property
    def scales_bytes(self) -> int:
        """Bytes of the scales of one group's rows in a stage."""
        return self.strips * TILE * self.scale_bytes

    @property
    def zero_strips(self) -> int:
        """Groups of K in a stage whose zero points travel with it: one where all of K has the same."""
        return larger(1, self.strips) if self.zeros else 0

    @property
    def zeros_bytes(self) -> int:
        return self.zero_strips * TILE

    @property
    def stage_bytes(self) -> int:
        return self.x_bytes + self.groups * (self.weight_bytes + self.scales_bytes + self.zeros_bytes)

    @property
    def packed_at(self) -> int:
        return self.stages * self.x_bytes

    @property
    def scales_at(self) -> int:
        """From the beginning of a stage's packed weight."""
        return self.groups * self.weight_bytes

    @property
    def zeros_at(self) -> int:
        return self.scales_at + self.groups * self.scales_bytes

    @property
    def packed_bytes(self) -> int:
        return -(-(self.zeros_at + self.groups * self.zeros_bytes) // 128) * 128

    @property
    def staged_bytes(self) -> int:
        return self.packed_at + self.stages * self.packed_bytes

    @property
    def total_bytes(self) -> int:
        return self.inbox_at + self.groups * self.received * 128 * 4

    @property
    def ring_at(self) -> int:
        return self.barriers_at + 16 * self.stages

    @property
    def exchange_at(self) -> int:
        return self.ring_at + self.places * self.PLACE_BYTES

    @property
    def inbox_barriers_at(self) -> int:
        return self.exchange_at + self.exchanged * 128 * 4

    @property
    def inbox_at(self) -> int:
        return self.inbox_barriers_at + where(self.received > 0, 32, 0)
