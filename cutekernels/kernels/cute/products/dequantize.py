"""Columns of a packed weight as a matrix of 16-bit numbers: ``out[r, c] = dequantized weight[r, first + c]``.

Limited by what it writes, so the kernel keeps many CTAs resident, each with little to do: no loop, one load of the
packed bytes, rows stored as whole lines of 128 bytes.

Roles:
    A CTA of four warps has ``tiles`` packed tiles of 64 x 64, neighbours along K. Warp w has strip w of each, 16 rows,
    and no other warp reads or writes what it does: warps never wait for one another.

One warp: loads the 16 or 32 bytes that are each lane's own in all its tiles, its rows' scales and zero points; then,
    tile by tile, decodes pairs, multiplies, rounds, leaves pairs in shared memory in their rows, and stores rows from
    there. The 16-byte chunks of a row are swizzled by an XOR with the row: neither side meets a bank twice.

Numbers: ``QuantizedWeight.dequantize``'s in every bit. Integers less their zero points, e4m3 and e2m1 are exact in
    fp16; nf4's table is fp32, a value in each lane, looked up by a shuffle. A product with the fp32 scale is rounded to
    fp32, then once to out's type.

Ends: tiles behind the last are read as the last, groups behind K too; rows and columns behind out's are not stored. An
    ``out`` whose rows are not 16-byte aligned is stored element by element.

Dependent launch (PDL): CTAs are set up while the previous kernel still runs. The next may start when a CTA's loads are
    under way; it waits for the stores itself.

Refuses (``ops/products/dequantize.py``): packed bytes that are not 16-byte aligned.
"""

from dataclasses import dataclass
from struct import pack, unpack
from typing import ClassVar, NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.memory import SmemAllocator

from cutekernels.kernels.cute.parts.dependent import pdl_launch, pdl_wait
from cutekernels.kernels.cute.parts.launch import Launched
from cutekernels.kernels.cute.parts.nf4 import NF4
from cutekernels.kernels.cute.parts.packed import PackedWeights, Weight, kind_of, power_of_two, product16, ue5m3
from cutekernels.kernels.cute.parts.ptx import pure
from cutekernels.kernels.cute.parts.results import store_16
from cutekernels.kernels.cute.parts.smem import TILE, DequantizeSmem

STRIP = 16  # rows of a warp
VECTOR = 16  # bytes
LINE = 128  # bytes of a tile's row
HALF_WARPS = 0x100F  # shuffles within 16 lanes, by the low four bits of a number


class Strip(NamedTuple):
    """A warp's rows of one tile."""

    shared: Int32  # where they lie in shared memory
    row: Int32  # the first, of out
    column: Int32  # the tile's first, of out


class PackedCodes(NamedTuple):
    """A lane's part of one tile: codes, and the numbers of rows r and r + 8 in each of the tile's groups."""

    words: cute.Tensor  # (4 runs,)
    factors: cute.Tensor  # (2, groups), fp32
    shifts: cute.Tensor  # (2, groups), of int4's zero points


@dataclass(frozen=True)
class Dequantize(Launched):
    """The body."""

    weights: PackedWeights  # decoded to fp16: all but nf4 are exact there, whatever out's type
    tiles: int
    out_align: int  # elements
    dependent: bool
    threads: ClassVar[int] = 128
    ctas_per_sm: ClassVar[int] = 0  # no bound on registers

    @property
    def smem(self) -> DequantizeSmem:
        return DequantizeSmem(self.tiles)

    @property
    def runs(self) -> int:
        """Runs of 16 bytes that a lane has of a strip."""
        return self.weights.bits // 4

    @property
    def tile_groups(self) -> int:
        """Groups of a tile."""
        return TILE // self.weights.group if 0 < self.weights.group < TILE else 1

    @cute.jit
    def __call__(
        self,
        mD: cute.Tensor,  # (N, columns)
        mW: cute.Tensor,  # (N / 64, K / 64, bytes)
        mS: cute.Tensor,  # (groups, N padded to 64), or of 128 x 128 blocks
        mZ: cute.Tensor | None,  # bytes, as the scales
        mF: cute.Tensor | None,  # (2, N padded to 64): factors, and divisors or 1
        first: Int32,  # column of the weight, a multiple of 64
        stream: cuda.CUstream,
    ):
        n, columns = mD.shape
        grid = [cute.ceil_div(columns, TILE * self.tiles), cute.ceil_div(n, TILE), 1]
        self.launch((mD, Weight(mW, mS, mZ, mF), first), grid, stream)

    @cute.kernel
    def kernel(self, mD: cute.Tensor, weight: Weight, first: Int32):
        tid, _, _ = cute.arch.thread_idx()
        cta_k, cta_n, _ = cute.arch.block_idx()
        warp, lane = cute.arch.make_warp_uniform(tid // 32), tid % 32
        base = SmemAllocator().allocate(self.smem.total_bytes, byte_alignment=LINE).toint().to(Int32)
        row = cta_n * TILE + warp * STRIP
        tiles_k, groups = cute.size(weight.mW, mode=[1]), cute.size(weight.mS, mode=[0])
        known = nf4_of(lane) if const_expr(self.weights.code == "nf4") else self.weights.constant(first)
        if const_expr(self.dependent):
            pdl_wait()

        # -- loads, all of them before the first is waited for
        words = cute.make_rmem_tensor((4 * self.runs, self.tiles), Int32)
        factors = cute.make_rmem_tensor((2, self.tile_groups, self.tiles), Float32)
        shifts = cute.make_rmem_tensor((2, self.tile_groups, self.tiles), Int32)
        shifts.fill(self.weights.symmetric)
        tile_bytes = const_expr(self.smem.tile_bytes(self.weights.bits))
        for t in cutlass.range_constexpr(self.tiles):
            tile = cutlass.min((first >> 6) + (cta_k * self.tiles + t), tiles_k - 1)
            source = weight.mW.iterator.toint() + (Int64(cta_n) * tiles_k + tile) * tile_bytes
            source = source + (warp * (tile_bytes // 4) + lane * VECTOR)
            for i in cutlass.range_constexpr(self.runs):
                place = cute.make_ptr(Int32, source + i * 32 * VECTOR, cute.AddressSpace.gmem, assumed_align=VECTOR)
                own = cute.make_tensor(words[None, t].iterator + 4 * i, cute.make_layout(4))
                cute.autovec_copy(cute.make_tensor(place, cute.make_layout(4)), own)
            for g in cutlass.range_constexpr(self.tile_groups):
                group = tile if const_expr(self.weights.factors) else self.group_of(tile, g, groups)
                # A lane has rows r and r + 8.
                for h in cutlass.range_constexpr(2):
                    at = (row + lane // 4 + 8 * h) >> (self.weights.scale_rows.bit_length() - 1)
                    if const_expr(self.weights.factors):
                        word = weight.mS[group, row + lane // 4 * 2 + g // 2]
                        scale = ue5m3(word, 2 * h + g % 2).bitcast(Float32)
                        factors[h, g, t] = (
                            scale * (weight.mF[0, at] if weight.mF[1, at] == 1.0 else Float32(1.0))
                        ) / weight.mF[1, at]
                    elif const_expr(self.weights.code == "e2m1"):
                        cute.recast_tensor(factors, Int32)[h, g, t] = power_of_two(weight.mS[group, at].to(Int32))
                    else:
                        factors[h, g, t] = weight.mS[group, at].to(Float32)
                    if const_expr(self.weights.zeros):
                        shifts[h, g, t] = self.weights.shift(weight.mZ[group, at].to(Int32))
        if const_expr(self.dependent):
            pdl_launch()

        # -- tile by tile
        for t in cutlass.range_constexpr(self.tiles):
            column = (cta_k * self.tiles + t) * TILE
            strip = Strip(base + t * (TILE * LINE) + warp * (STRIP * LINE), row, column)
            # Each tile has a buffer of its own, so no lane waits before it writes.
            if column < cute.size(mD, mode=[1]):
                coded = PackedCodes(words[None, t], factors[None, None, t], shifts[None, None, t])
                self.decode(lane, strip.shared, coded, known, mD.element_type)
                # All lanes' pairs are in shared memory before any lane reads the warp's rows.
                cute.arch.sync_warp()
                if const_expr(self.out_align == 8):
                    self.store_lines(lane, strip, mD)
                else:
                    self.store_elements(lane, strip, mD)

    @cute.jit
    def group_of(self, tile: Int32, number: cutlass.Constexpr[int], groups: Int32) -> Int32:
        """The group of K that the tile's ``number``-th belongs to, without a division."""
        group = Int32(0)
        if const_expr(self.weights.group == 32):
            group = cutlass.min(2 * tile + number, groups - 1)
        elif const_expr(self.weights.group > 0):
            group = cutlass.min(tile >> (self.weights.group // TILE - 1), groups - 1)  # of 64, or of 128
        return group

    @cute.jit
    def decode(
        self,
        lane: Int32,
        shared: Int32,
        coded: PackedCodes,
        known: Int32,
        dtype: cutlass.Constexpr[type[cutlass.Numeric]],
    ):
        """A strip's numbers to its rows in shared memory. ``known``: a constant, or the lane's value of the table."""
        # A lane's pairs of a k-block: rows r and r + 8 of chunk 2 kb, then of chunk 2 kb + 1; r is lane // 4.
        line = shared + lane // 4 * LINE + lane % 4 * 4 + lane // 4 * VECTOR
        pairs = cute.make_rmem_tensor(4, Int32)
        block_words = const_expr(self.weights.words)
        scales = cute.recast_tensor(coded.factors, Int32)
        for kb in cutlass.range_constexpr(4):
            group = const_expr(kb * self.tile_groups // 4)
            block = cute.make_tensor(coded.words.iterator + kb * block_words, cute.make_layout(block_words))
            if const_expr(self.weights.code != "nf4"):
                self.weights.decode(block, coded.shifts[None, group], known, pairs)
            for p in cutlass.range_constexpr(4):
                if const_expr(self.weights.code == "nf4"):
                    # Elements 0 and 1 of pair p are nibbles p and p + 4.
                    low = cute.arch.shuffle_sync(known, block[0] >> (4 * p), mask_and_clamp=HALF_WARPS)
                    high = cute.arch.shuffle_sync(known, block[0] >> (4 * p + 16), mask_and_clamp=HALF_WARPS)
                    pair = product32(low, high, scales[p % 2, group], dtype)
                else:
                    pair = product16(pairs[p], scales[p % 2, group], dtype)
                at = (line ^ ((2 * kb + p // 2) * VECTOR)) + p % 2 * (8 * LINE)
                place = cute.make_ptr(Int32, at, cute.AddressSpace.smem, assumed_align=4)
                cute.make_tensor(place, cute.make_layout(1))[0] = pair

    @cute.jit
    def store_lines(self, lane: Int32, strip: Strip, mD: cute.Tensor):
        """Rows of 128 bytes, four a store of the warp; all are read before the first is stored."""
        n, columns = mD.shape
        taken = cute.make_rmem_tensor((4, 4), Int32)
        column = strip.column + lane % 8 * 8
        for i in cutlass.range_constexpr(4):
            row = 4 * i + lane // 8
            at = strip.shared + row * LINE + ((lane % 8) ^ (row & 7)) * VECTOR
            place = cute.make_ptr(Int32, at, cute.AddressSpace.smem, assumed_align=VECTOR)
            cute.autovec_copy(cute.make_tensor(place, cute.make_layout(4)), taken[None, i])
        first = strip.row + lane // 8
        target = mD.iterator + (Int64(first) * mD.stride[0] + column)
        for i in cutlass.range_constexpr(4):
            if first + 4 * i < n and column < columns:
                store_16(target + Int64(mD.stride[0]) * (4 * i), taken[None, i])

    @cute.jit
    def store_elements(self, lane: Int32, strip: Strip, mD: cute.Tensor):
        """Rows of any alignment: a lane has elements ``lane`` and ``lane + 32`` of each."""
        n, columns = mD.shape
        for row in cutlass.range_constexpr(STRIP):
            for i in cutlass.range_constexpr(2):
                chunk, column = lane // 8 + 4 * i, strip.column + lane + 32 * i
                at = strip.shared + row * LINE + (chunk ^ (row & 7)) * VECTOR + lane % 8 * 2
                place = cute.make_ptr(mD.element_type, at, cute.AddressSpace.smem, assumed_align=2)
                if strip.row + row < n and column < columns:
                    target = mD.iterator + (Int64(strip.row + row) * mD.stride[0] + column)
                    cute.make_tensor(target, cute.make_layout(1))[0] = cute.make_tensor(place, cute.make_layout(1))[0]


def product32(low: Int32, high: Int32, factor: Int32, dtype: type[cutlass.Numeric]) -> Int32:
    """:func:`product16` of two fp32 numbers, given as their bits."""
    return pure(
        "{ .reg .f32 lo, hi, s; mov.b32 lo, $1; mov.b32 hi, $2; mov.b32 s, $3; mul.rn.f32 lo, lo, s; "
        f"mul.rn.f32 hi, hi, s; cvt.rn.{kind_of(dtype)}x2.f32 $0, hi, lo; }}",
        low,
        high,
        factor,
    )


def nf4_of(lane: Int32) -> Int32:
    """The bits of nf4's value number ``lane % 16``: each bit of the lane halves the candidates."""
    values = [Int32(unpack("<i", pack("<f", value))[0]) for value in NF4]
    for bit in range(4):
        text = (
            f"{{ .reg .pred p; .reg .b32 t; and.b32 t, $3, {1 << bit}; setp.ne.u32 p, t, 0; selp.b32 $0, $2, $1, p; }}"
        )
        values = [pure(text, values[2 * i], values[2 * i + 1], lane) for i in range(len(values) // 2)]
    return values[0]
