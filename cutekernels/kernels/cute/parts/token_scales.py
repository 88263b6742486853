"""Scales of a cache in e4m3, a biased exponent of each token and head, on their way to one warp's columns of scores.

Bytes come 16 at a time by cp.async, in the groups of the keys' own copies. Each lane turns those of one or two keys
into numbers, which lanes then read for their columns:

    factors     scores are to be multiplied by K's power
    logarithms  of V's power, added to scores of base 2, so that probabilities hold their value's scale. A row's
                reference then bounds what is multiplied with V, and no small scale underflows in 16 bits
    inverses    of V's power, what a probability is multiplied by to be added to the row's total

Where a sequence has no token bytes may be anything: their numbers are finite, and their scores are masked.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint8, const_expr

from cutekernels.kernels.cute.parts.float8 import power_of_two, unsigned
from cutekernels.kernels.cute.parts.ptx import copy_async
from cutekernels.kernels.cute.parts.softmax import OnlineSoftmax, by_rows

GRAIN = 16  # bytes of a copy, scales of as many keys
BIAS = 127


@dataclass(frozen=True)
class ScaleHead:
    """A lane's share of a head's scales: the address of K's or V's first one, and bytes from page to page."""

    first: Int64
    between_pages: Int64


@dataclass(frozen=True)
class ColumnNumbers:
    """Factors of a lane's columns of scores."""

    factors: cute.Tensor
    logarithms: cute.Tensor
    inverses: cute.Tensor


@dataclass(frozen=True)
class TokenScales:
    """Scales of tiles of ``rows`` keys, 16 or 32, copied and read by one warp: K's, then V's.

    A warp has ``stages`` buffers of ``2 * rows`` bytes, and one of ``3 * rows`` numbers.
    """

    rows: int
    stages: int
    page_size: int

    @property
    def grains(self) -> int:
        return self.rows // GRAIN

    @property
    def stage_bytes(self) -> int:
        return 2 * self.rows

    @cute.jit
    def head(self, lane: Int32, mK: cute.Tensor, mV: cute.Tensor, batch: Int32, head: Int32) -> ScaleHead:
        """The share of a lane: lanes copy K's grains, then V's."""
        starts, between = [], []
        for mX in (mK, mV):
            stride = mX.layout.stride
            start = mX.iterator.toint() + Int64(head) * Int64(stride[1])
            if const_expr(self.page_size == 0):
                start = start + Int64(batch) * Int64(stride[0])
            starts.append(start)
            between.append(Int64(stride[0]))
        of_v = lane >= self.grains
        return ScaleHead(starts[1] if of_v else starts[0], between[1] if of_v else between[0])

    @cute.jit
    def fetch(self, lane: Int32, head: ScaleHead, pages: cute.Tensor, token: Int32, last: Int32, address: Int32):
        """Starts the copy of the tile at ``token`` into the buffer of ``address``; ``pages`` are the keys' own."""
        if lane < 2 * self.grains:
            # A grain behind the last key is never read: the last key's takes its place.
            grain = lane % self.grains
            key = cutlass.min(token + grain * GRAIN, last) // GRAIN * GRAIN
            source = head.first
            if const_expr(self.page_size):
                page = pages[0]
                if const_expr(self.grains == 2):
                    page = pages[1] if grain == 1 else pages[0]
                source = source + Int64(page) * head.between_pages + Int64(key % self.page_size)
            else:
                source = source + Int64(key)
            copy_async(address + lane * GRAIN, source, GRAIN)

    @cute.jit
    def spread(self, lane: Int32, stage: Int32, numbers: Int32, scale: Float32):
        """Turns a buffer's bytes, which have arrived, into numbers; ``scale`` is part of the factors.

        The warp's barrier makes them visible.
        """
        if const_expr(self.rows == 32):
            self.put(numbers, lane, power_of_two(self.byte(stage, lane)) * scale)
            exponent = self.byte(stage, lane + 32)
            self.put(numbers, lane + 32, (exponent - BIAS).to(Float32))
            self.put(numbers, lane + 64, power_of_two(2 * BIAS - exponent))
        else:
            # Half of the lanes have K's, the others V's.
            exponent = self.byte(stage, lane)
            factor = power_of_two(exponent) * scale
            self.put(numbers, lane, factor if lane < 16 else (exponent - BIAS).to(Float32))
            if lane >= 16:
                self.put(numbers, lane + 16, power_of_two(2 * BIAS - exponent))

    def byte(self, stage: Int32, at: Int32) -> Int32:
        """A biased exponent of a number: 255, which is none, may be where no token is."""
        pointer = cute.make_ptr(Uint8, stage + at, cute.AddressSpace.smem, assumed_align=1)
        return cutlass.min(unsigned(cute.make_tensor(pointer, cute.make_layout(1))[0]), Int32(2 * BIAS))

    @cute.jit
    def put(self, numbers: Int32, at: Int32, value: Float32):
        pointer = cute.make_ptr(Float32, numbers + at * 4, cute.AddressSpace.smem, assumed_align=4)
        cute.make_tensor(pointer, cute.make_layout(1))[0] = value

    @cute.jit
    def apply(self, acc_s: cute.Tensor, numbers: ColumnNumbers, softmax: OnlineSoftmax, cap_outer: Float32):
        """Products become scores of base 2, capped where they are, plus the logarithms of their values' scales."""
        scores = by_rows(acc_s)
        for r in cutlass.range_constexpr(2):
            for c in cutlass.range_constexpr(cute.size(scores, mode=[1])):
                scores[r, c] = scores[r, c] * numbers.factors[c]
        if const_expr(softmax.capped):
            softmax.cap(acc_s, Float32(1.0), cap_outer)
        for r in cutlass.range_constexpr(2):
            for c in cutlass.range_constexpr(cute.size(scores, mode=[1])):
                scores[r, c] = scores[r, c] + numbers.logarithms[c]

    @cute.jit
    def read(self, lane: Int32, numbers: Int32) -> ColumnNumbers:
        """The numbers of a lane's columns of an accumulator m16n8: two neighbours of each 8."""
        found = [cute.make_rmem_tensor(self.rows // 4, Float32) for _ in range(3)]
        for kind in cutlass.range_constexpr(3):
            for n in cutlass.range_constexpr(self.rows // 8):
                address = numbers + (lane % 4) * 8 + const_expr(4 * (kind * self.rows + 8 * n))
                pair = cute.make_ptr(Float32, address, cute.AddressSpace.smem, assumed_align=8)
                target = cute.make_tensor(found[kind].iterator + 2 * n, cute.make_layout(2))
                cute.autovec_copy(cute.make_tensor(pair, cute.make_layout(2)), target)
        return ColumnNumbers(*found)
