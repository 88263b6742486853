"""Scales, zero points and factors of a consumer group's rows, for the warpgroup bodies of packed weights."""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from cutekernels.kernels.cute.parts.boxes import Corner
from cutekernels.kernels.cute.parts.packed import PackedWeights, Weight, load_words, shared_number
from cutekernels.kernels.cute.parts.smem import TILE, WarpgroupPackedSmem
from cutekernels.kernels.cute.products.packed_values import Consumer, Extents


class PackedScales:
    """The part of a body that multiplies by them."""

    smem: WarpgroupPackedSmem
    weights: PackedWeights
    all_rows: Any
    first_row: Any

    @cute.jit
    def own_row(self, consumer: Consumer) -> Int32:
        """A thread's first row of its group's 64; the other is 8 further."""
        return consumer.thread // 32 * 16 + consumer.thread % 32 // 4

    @cute.jit
    def load_factors(self, consumer: Consumer, stage: Int32, factors: cute.Tensor):
        """Scales of rows r and r + 8, for each group of K in the stage; of e2m1 bits, two words or of ``power``."""
        size = const_expr(self.weights.scale_bytes)
        first = stage + self.smem.scales_at + consumer.group * (self.smem.strips * TILE * size)
        for i in cutlass.range_constexpr(self.smem.strips):
            if const_expr(self.weights.factors):
                at = first + (i * TILE + self.own_row(consumer) + consumer.thread % 32 // 4) * size
                load_words(at, cute.recast_tensor(factors, Int32)[None, i])
            for r in cutlass.range_constexpr(0 if self.weights.factors else 2):
                at = first + (i * TILE + self.own_row(consumer) + 8 * r) * size
                found = shared_number(self.weights.scale_type, at)
                if const_expr(self.weights.code == "e2m1"):
                    cute.recast_tensor(factors, Int32)[r, i] = self.weights.power(found.to(Int32))
                else:
                    factors[r, i] = found.to(Float32)

    def block_scales(self, weight: Weight, of: Extents, row: Int32, k_tile: Int32) -> cute.Pointer:
        """Address of the scale of a 128 x 128 block."""
        blocks = self.all_rows(weight, of, self.weights.scale_rows)
        group = k_tile * self.smem.tile_k // self.weights.group
        block = cutlass.min(row // self.weights.scale_rows, blocks - 1)
        return weight.mS.iterator + cute.crd2idx((group, block), weight.mS.layout)

    @cute.jit
    def block_scale(self, consumer: Consumer, corner: Corner, k_tile: Int32) -> Float32:
        """The scale of a 128 x 128 block, from memory: the same for all threads of a group."""
        found = Float32(0.0)
        if const_expr(self.weights.scale_rows > 1):
            weight, of = consumer.cta.weight, consumer.cta.of
            row = self.first_row(of, corner, consumer.group)
            found = self.block_scales(weight, of, row, k_tile).load().to(Float32)
        return found

    @cute.jit
    def load_shifts(self, consumer: Consumer, stage: Int32, strip: cutlass.Constexpr[int], shifts: cute.Tensor):
        """The numbers added to codes of rows r and r + 8, from zero points."""
        first = stage + self.smem.zeros_at + (consumer.group * self.smem.zero_strips + strip) * TILE
        for r in cutlass.range_constexpr(2):
            at = first + self.own_row(consumer) + 8 * r
            shifts[r] = self.weights.shift(shared_number(cutlass.Uint8, at).to(Int32))

    @cute.jit
    def promote(self, consumer: Consumer, factors: cute.Tensor):
        """``acc += scale * part``."""
        for j in cutlass.range_constexpr(self.smem.tile_n // 8):
            for r in cutlass.range_constexpr(2):
                for i in cutlass.range_constexpr(2):
                    at = const_expr(4 * j + 2 * r + i)
                    consumer.acc[at] = consumer.acc[at] + factors[r] * consumer.part[at]

    @cute.jit
    def row_factors(self, consumer: Consumer, first: Int32) -> cute.Tensor:
        """Scales of all of K, or factors, of rows r and r + 8 of a group's, which begin with row ``first``."""
        weight, of = consumer.cta.weight, consumer.cta.of
        table = weight.mF if const_expr(self.weights.factors) else weight.mS
        factors = cute.make_rmem_tensor(2, Float32)
        factors.fill(0.0)
        for r in cutlass.range_constexpr(2):
            row = first + self.own_row(consumer) + 8 * r
            if row < self.all_rows(weight, of, 1):
                factors[r] = table[0, row].to(Float32)
        return factors

    @cute.jit
    def scale_by(self, consumer: Consumer, factors: cute.Tensor):
        """Those on the tile's accumulators."""
        for r in cutlass.range_constexpr(2):
            for j in cutlass.range_constexpr(self.smem.tile_n // 8):
                for i in cutlass.range_constexpr(2):
                    at = const_expr(4 * j + 2 * r + i)
                    consumer.acc[at] = consumer.acc[at] * factors[r]
