"""Keys and values in e4m3 on their way into the products of warp MMA: fp16 in registers, exact.

Two numbers lie where others have one of 16 bits, so copies and ldmatrix are those of a head half as wide. ldmatrix of
8 x 8 such elements gives a lane 4 numbers in a word, which become two registers of fp16 operands:

    K, not transposed: four neighbouring columns of a row. The MMA's pairs of columns 2t and 8 + 2t of 16 are then the
        head's columns 4t and 4t + 2, so Q's columns are put in that order once (:class:`Float8Queries`).
    V, transposed: two neighbouring columns of two rows. The MMA's columns of two neighbouring groups of 8 are then the
        even and the odd ones of 16, and so are the accumulators' (``DecodeAttentionBody.merge_warps`` sorts them).

Instructions for a word: 2 or 3 where the GPU converts e4m3, else about 11.
"""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float16, Float32, Int32, const_expr

from cutekernels.kernels.cute.parts.fragments import load_fragments, span_bytes, swizzled
from cutekernels.kernels.cute.parts.products import Products, Source, Sources
from cutekernels.kernels.cute.parts.ptx import load_matrices, pure
from cutekernels.kernels.cute.parts.softmax import as_operand, by_rows

ROWS = 16  # queries of a tile
_SIGNS = -0x7FFF8000  # 0x80008000


@dataclass(frozen=True)
class Float8:
    """e4m3 to fp16, NaN too. ``paired``: the GPU converts two at a time."""

    paired: bool

    @property
    def undone(self) -> float:
        """The factor of decoded numbers: shifted bits lack the difference of the exponents' biases."""
        return 1.0 if self.paired else 2.0**8

    def neighbours(self, word: Int32) -> tuple[Int32, Int32]:
        """Bytes 0 and 1, and bytes 2 and 3."""
        if self.paired:
            return self.convert(word)
        zero = Int32(0)
        return tuple([self.shift(pure(f"prmt.b32 $0, $1, $2, {order};", word, zero)) for order in (0x1404, 0x3424)])

    def alternate(self, word: Int32) -> tuple[Int32, Int32]:
        """Bytes 0 and 2, and bytes 1 and 3."""
        if self.paired:
            return self.convert(pure("prmt.b32 $0, $1, $1, 0x3120;", word))
        return self.shift(word << 8), self.shift(word)

    def convert(self, word: Int32) -> tuple[Int32, Int32]:
        """Bytes 0 and 1, and bytes 2 and 3, by the GPU's instruction."""
        text = "{{ .reg .b16 lo, hi; mov.b32 {{lo, hi}}, $1; cvt.rn.f16x2.e4m3x2 $0, {}; }}"
        return pure(text.format("lo"), word), pure(text.format("hi"), word)

    def shift(self, word: Int32) -> Int32:
        """Bytes 1 and 3, over 2^8: sign, exponent and mantissa in their places; subnormal numbers are fp16's too."""
        size = (word >> 1) & 0x3F803F80
        # NaN alone, all ones, carries into the exponent's highest bit, which makes it fp16's.
        nan = (size + 0x00800080) & 0x40004000
        return (word & _SIGNS) | size | nan


@dataclass(frozen=True)
class Float8Load:
    """Vectors of eight numbers from global to shared memory, as numbers of ``dtype`` there. Not asynchronous."""

    float8: Float8
    dtype: type[cutlass.Numeric]
    scaled: bool = False  # numbers are times a power of two of their row

    @property
    def undone(self) -> float:
        """The factor of numbers in shared memory."""
        return 1.0 if self.scaled else self.float8.undone

    def power(self, exponent: Int32) -> Int32:
        """Two of ``dtype``: the power of two of a biased exponent, exact where ``dtype`` has it; 255 is no power."""
        if self.dtype is not Float16:
            return exponent * 0x00800080
        return pure("{ .reg .f32 p; mov.b32 p, $1; cvt.rn.f16x2.f32 $0, p, p; }", exponent << 23)

    def times(self, pair: Int32, power: Int32) -> Int32:
        """Two numbers of ``dtype`` times ``power``."""
        kind = "f16x2" if self.dtype is Float16 else "bf16x2"
        return pure(f"{{ .reg .b32 zero; mov.b32 zero, 0x80008000; fma.rn.{kind} $0, $1, $2, zero; }}", pair, power)

    @cute.jit
    def copy(self, source: cute.Pointer, sX: cute.Tensor, power: Int32 | None):
        """The eight bytes at ``source``, times ``power`` where ``scaled``, to the 16 of ``sX``."""
        words = cute.make_rmem_tensor(2, Int32)
        gX = cute.make_tensor(cute.recast_ptr(source.align(8), dtype=Int32), cute.make_layout(2))
        cute.autovec_copy(gX, words)
        four = cute.make_rmem_tensor(4, Int32)
        for i in cutlass.range_constexpr(2):
            pair = self.float8.neighbours(words[i])
            for h in cutlass.range_constexpr(2):
                four[2 * i + h] = pair[h] if const_expr(self.dtype is Float16) else bf16_of(pair[h])
                if const_expr(self.scaled):
                    # Shifted bits first become their number, which fp16 holds and its product with a small power not.
                    if const_expr(not self.float8.paired):
                        four[2 * i + h] = self.times(four[2 * i + h], self.power(Int32(127 + 8)))
                    four[2 * i + h] = self.times(four[2 * i + h], power)
        cute.autovec_copy(four, cute.make_tensor(cute.recast_ptr(sX.iterator, dtype=Int32), cute.make_layout(4)))


@dataclass(frozen=True)
class Float8Products(Products):
    """:class:`Products` of Y in e4m3 and X, P in fp16: ``sources`` has addresses in the place of Y's layouts."""

    float8: Float8
    rows: int  # of Y
    columns: int  # of Y, a multiple of 64

    def sources(
        self, tid: Int32, tiled_mma: cute.TiledMma, x: Any, layout_x: Any, y: Any, yt: Any, layout_y: Any
    ) -> Sources:
        """See :meth:`Products.sources`. A lane gives row ``tid % 16`` of the first or second 16 bytes to ldmatrix."""
        own = super().sources(tid, tiled_mma, x, layout_x, x, x, layout_x).x
        row, chunk, span = tid % 16, tid // 16, span_bytes(self.columns // 2)
        found = [
            Source(
                own.copy, own.tensor, own.layout, swizzled(at.toint().to(Int32) + (row * span + chunk * 16), span), span
            )
            for at in (y, yt)
        ]
        return Sources(own, *found)

    def words(self, address: Int32, rows16: int, columns32: int, transposed: bool) -> list[Int32]:
        """16 rows of 32 columns, as matrices of 8 rows: both of the first 16 columns, then of the others."""
        span = span_bytes(self.columns // 2)
        pattern, chunk = divmod(columns32 * 32, span)
        return load_matrices((address ^ chunk) + (pattern * self.rows + rows16 * 16) * span, transposed)

    @cute.jit
    def multiply(
        self,
        tid: Int32,
        acc: cute.Tensor,  # ((2, 2), 1, MMA_Y)
        rX: cute.Tensor,  # (MMA, 1, MMA_D)
        sources: cutlass.Constexpr,
        at_x: Int32,
        at_y: Int32,
        tiled_mma: cute.TiledMma,
    ):
        from_x, from_y = sources.x.address + at_x, sources.y.address + at_y
        tSrX = sources.x.copy.get_slice(tid).retile(rX)  # (CPY, CPY_X, CPY_D)
        for j in cutlass.range_constexpr(self.columns // 32):
            # A step of ldmatrix has two k-blocks of 16 columns.
            blocks = [cute.make_rmem_tensor((2, self.rows // 8), Int32) for _ in range(2)]
            for i in cutlass.range_constexpr(self.rows // 16):
                words = self.words(from_y, i, j, False)
                for m in cutlass.range_constexpr(4):
                    pair = self.float8.neighbours(words[m])
                    for h in cutlass.range_constexpr(2):
                        blocks[m // 2][h, 2 * i + m % 2] = pair[h]
            for i in cutlass.range_constexpr(2):
                kb = const_expr(2 * j + i)
                if const_expr(not self.x_in_registers):
                    load_fragments(sources.x.copy, from_x, sources.x.layout, sources.x.span, tSrX, kb)
                cute.gemm(tiled_mma, acc, rX[None, None, kb], operand_b(blocks[i]), acc)

    @cute.jit
    def add(
        self,
        tid: Int32,
        acc: cute.Tensor,  # ((2, 2), 1, MMA_D)
        rP: cute.Tensor,  # ((2, 2), 1, MMA_Y)
        sources: cutlass.Constexpr,
        at_y: Int32,
        tiled_mma: cute.TiledMma,
    ):
        from_yt = sources.yt.address + at_y
        tOrP = as_operand(rP)  # ((2, 2, 2), 1, MMA_Y / 2)
        for kb in cutlass.range_constexpr(self.rows // 16):
            block = cute.make_rmem_tensor((2, self.columns // 8), Int32)
            for j in cutlass.range_constexpr(self.columns // 32):
                words = self.words(from_yt, kb, j, True)
                for m in cutlass.range_constexpr(4):
                    # Rows 8 * (m % 2) on, of even and of odd columns.
                    pair = self.float8.alternate(words[m])
                    for odd in cutlass.range_constexpr(2):
                        block[m % 2, 4 * j + m // 2 * 2 + odd] = pair[odd]
            cute.gemm(tiled_mma, acc, tOrP[None, None, kb], operand_b(block), acc)


def operand_b(words: cute.Tensor) -> cute.Tensor:
    """Words (2, MMA_N) as the B operand ((2, 2), MMA_N) of m16n8k16."""
    layout = cute.make_layout(((2, 2), cute.size(words, mode=[1])), stride=((1, 2), 4))
    return cute.make_tensor(cute.recast_ptr(words.iterator, dtype=Float16), layout)


@dataclass(frozen=True)
class Float8Queries:
    """A tile of 16 queries in shared memory, turned into what :class:`Float8Products` multiplies.

    bf16 becomes fp16 times a power of two of each row, its factor, so that the row's largest number is below 2^15:
    nothing overflows, and what is lost is below 2^-39 of that number. An infinity stays one, and is no largest number.
    """

    float8: Float8
    threads: int
    columns: int  # a multiple of 64

    @cute.jit
    def convert(self, tid: Int32, at_q: cute.Pointer, at_factors: cute.Pointer, dtype: cutlass.Constexpr):
        """Turns the tile in its place; ``threads / 16`` neighbours have a row, each groups of 16 columns."""
        each = const_expr(self.threads // ROWS)
        groups = const_expr(self.columns // 16)
        row, own = tid // each, tid % each
        rounds = const_expr(-(-groups // each))
        words = cute.make_rmem_tensor((8, rounds), Int32)
        words.fill(0)
        line = at_q.toint().to(Int32) + row * 128
        flip = row % 8 * 16
        largest = Int32(0)
        for i in cutlass.range_constexpr(rounds):
            group = own + i * each
            if group < groups:
                for chunk in cutlass.range_constexpr(2):
                    place = line + group // 4 * (ROWS * 128) + ((group % 4 * 32 + chunk * 16) ^ flip)
                    cute.autovec_copy(four_words(place), cute.make_tensor(words[None, i].iterator + 4 * chunk, 4))
            if const_expr(dtype is not Float16):
                for w in cutlass.range_constexpr(8):
                    for h in cutlass.range_constexpr(2):
                        size = (words[w, i] >> (16 * h)) & 0x7FFF
                        largest = cutlass.max(largest, size if size < 0x7F80 else Int32(0))
        power = Float32(1.0)
        if const_expr(dtype is not Float16):
            # The threads of a row are lanes of one warp; powers of two by their exponents' bits.
            step = const_expr(1)
            while const_expr(step < each):
                largest = cutlass.max(largest, cute.arch.shuffle_sync_bfly(largest, offset=step))
                step = const_expr(2 * step)
            exponent = cutlass.max(largest >> 7, Int32(20))
            power = power_of_two(268 - exponent)
            if own == 0:
                cute.make_tensor(cute.recast_ptr(at_factors, dtype=Float32) + row, cute.make_layout(1))[0] = (
                    power_of_two(exponent - 14)
                )
        for i in cutlass.range_constexpr(rounds):
            group = own + i * each
            if group < groups:
                for chunk in cutlass.range_constexpr(2):
                    # Pairs of columns in the MMA's order: 0, 4, 8, 12, then 2, 6, 10, 14.
                    four = cute.make_rmem_tensor(4, Int32)
                    for w in cutlass.range_constexpr(4):
                        word = words[2 * w + chunk, i]
                        four[w] = word if const_expr(dtype is Float16) else halves_of(word, power)
                    place = line + group // 4 * (ROWS * 128) + ((group % 4 * 32 + chunk * 16) ^ flip)
                    cute.autovec_copy(four, four_words(place))

    @cute.jit
    def factors(self, lane: Int32, at_factors: cute.Pointer, dtype: cutlass.Constexpr) -> cute.Tensor | None:
        """Factors of the scores of a lane's two rows; None where they are 1."""
        found = None
        if const_expr(dtype is not Float16):
            found = cute.make_rmem_tensor(2, Float32)
            stored = cute.make_tensor(cute.recast_ptr(at_factors, dtype=Float32), cute.make_layout(ROWS))
            for r in cutlass.range_constexpr(2):
                found[r] = stored[lane // 4 + 8 * r]
        return found

    @cute.jit
    def unscale(self, acc_s: cute.Tensor, factors: cute.Tensor):
        """Scores as of the queries that were given."""
        scores = by_rows(acc_s)
        for r in cutlass.range_constexpr(2):
            for c in cutlass.range_constexpr(cute.size(scores, mode=[1])):
                scores[r, c] = scores[r, c] * factors[r]


def four_words(address: Int32) -> cute.Tensor:
    """16 bytes of shared memory."""
    return cute.make_tensor(
        cute.make_ptr(Int32, address, cute.AddressSpace.smem, assumed_align=16), cute.make_layout(4)
    )


def unsigned(byte: Any) -> Int32:
    """A byte of a tensor as a number from 0 to 255."""
    return byte.to(Int32) & 0xFF


def power_of_two(exponent: Int32) -> Float32:
    """The fp32 number of a biased exponent."""
    bits = cute.make_rmem_tensor(1, Int32)
    bits[0] = exponent << 23
    return cute.recast_tensor(bits, Float32)[0]


def halves_of(word: Int32, power: Float32) -> Int32:
    """Two bf16 numbers times a power of two, as fp16."""
    bits = cute.make_rmem_tensor(1, Float32)
    bits[0] = power
    return pure(
        "{ .reg .f32 lo, hi, p; .reg .b32 t; mov.b32 p, $2; shl.b32 t, $1, 16; mov.b32 lo, t; "
        "and.b32 t, $1, 0xffff0000; mov.b32 hi, t; mul.rn.f32 lo, lo, p; mul.rn.f32 hi, hi, p; "
        "cvt.rn.f16x2.f32 $0, hi, lo; }",
        word,
        cute.recast_tensor(bits, Int32)[0],
    )


def bf16_of(pair: Int32) -> Int32:
    """Two fp16 numbers with as few digits as e4m3's, as bf16."""
    return pure(
        "{ .reg .b16 a, b; .reg .f32 lo, hi; mov.b32 {a, b}, $1; cvt.f32.f16 lo, a; cvt.f32.f16 hi, b; "
        "cvt.rn.bf16x2.f32 $0, hi, lo; }",
        pair,
    )
