"""Packed weights of 4 and 8 bits: from 32-bit words to fragments of the activations' type, in registers.

A weight lies in the order in which a thread of an MMA holds it (``quant/layout.py``): 16 bytes are a lane's own.
A word of 4-bit codes is one k-block of 16: pair p (p = 0..3, as the registers of an A fragment) in nibbles p and p + 4;
of e2m1 the bits of each half are spread as ``quant/layout.py`` says, and ``MOVES_*`` brings them back.
Of 8-bit codes two words are one k-block: word i has pair 2i in bytes 0 and 2, pair 2i + 1 in bytes 1 and 3; of e4m3 the
bits of each half are spread, and ``MOVES_8_*`` brings them back.

Decoding is exact: integers, e4m3 and e2m1 are numbers of both 16-bit types. Only nf4's table is rounded to them, once.
Instructions for 8 weights: int4 11 (fp16 9), int8 14, e4m3 14 (fp16 22), e2m1 15 with its scale, nf4 about 30.

e2m1 has a power of two for each 32 of K (MXFP4), which multiplies decoded weights: in bf16 exactly. Or for each 16 of K
a number of ue5m3 (NVFP4), which has no subnormal ones: exactly too, in both types, always folded.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from cutekernels.kernels.cute.parts.nf4 import NF4
from cutekernels.kernels.cute.parts.ptx import in_register, pure

# Moves for each pair of e2m1: a shift to the left, and the mask of the bits that then lie where the type wants them.
MOVES_BF16 = (((6, 0x81C0),), ((3, 0x81C0),), ((0, 0x81C0),), ((-4, 0x00C0), (-5, 0x0100), (1, 0x8000)))
MOVES_FP16 = (
    ((9, 0x0E00), (6, 0x8000)),
    ((6, 0x0E00), (3, 0x8000)),
    ((3, 0x0E00), (0, 0x8000)),
    ((-1, 0x0600), (-2, 0x0800), (1, 0x8000)),
)
# The same for pairs of e4m3: of low bytes, then of high ones.
MOVES_8_BF16 = (((-4, 0x0700), (4, 0x80F0)), ((0, 0x87F0),))
MOVES_8_FP16 = (((-1, 0x3800), (7, 0x0780), (4, 0x8000)), ((3, 0x3F80), (0, 0x8000)))


@dataclass(frozen=True)
class Weight:
    """A packed weight in memory."""

    mW: cute.Tensor  # (N / 64, K / 64, bytes)
    mS: cute.Tensor  # (groups, N padded to 64), or of 128 x 128 blocks
    mZ: cute.Tensor | None  # bytes, as the scales
    mF: cute.Tensor | None  # (2, N padded to 64): factors of rows, and divisors or 1


@dataclass(frozen=True)
class PackedWeights:
    """How elements are coded, the type they become, and their scales."""

    code: str  # "int4", "int8", "e4m3", "e2m1" or "nf4"
    dtype: type[cutlass.Numeric]
    scale_type: type[cutlass.Numeric]  # of e2m1 a byte, an exponent; with ``factors`` a word of four ue5m3
    group: int  # elements of K that share a scale: 16 to 128; 0: all
    scale_rows: int  # rows that share a scale: 1, or 128
    zeros: bool
    factors: bool  # of rows, beside scales of groups
    folded: bool = False  # floats in bf16, times scales: the power of two that an exponent wants is part of the scale

    @property
    def undone(self) -> float:
        """The factor of products of folded weights: a part of the power, so scales may be large."""
        return 1.0 if not self.folded else 2.0**14 if self.factors else 2.0**24

    @property
    def by_rows(self) -> bool:
        """Whether rows have factors: scales of all of K, or those beside scales of groups."""
        return self.group == 0 or self.factors

    @property
    def scale_bytes(self) -> int:
        return self.scale_type.width // 8

    @property
    def bits(self) -> int:
        return 4 if self.code in ("int4", "nf4", "e2m1") else 8

    @property
    def words(self) -> int:
        """Words of a lane's k-block of 16."""
        return self.bits // 4

    @property
    def halves(self) -> bool:
        return self.dtype is cutlass.Float16

    @property
    def symmetric(self) -> int:
        """``shift`` of the zero point 8."""
        return -0x1BF71BF8 if self.halves else -0x3CF73CF8

    @cute.jit
    def shift(self, zero: Int32) -> Int32:
        """Added by ``decode`` to an int4 code with the magic exponent, twice in a word: minus (magic + zero)."""
        if const_expr(self.halves):
            return (zero | 0xE400) * 0x10001  # -(1024 + z)
        return (zero | 0xC300) * 0x10001  # -(128 + z)

    @property
    def magic(self) -> int:
        """An exponent, twice in a word, in whose mantissa's low bits an integer is that integer more."""
        return 0x64006400 if self.halves else 0x43004300

    @cute.jit
    def constant(self, count: Int32) -> Int32:
        """A constant in a register of its own: an instruction takes one immediate operand, and a second would be moved
        to a register each time. ``count`` is any number that is not negative.
        """
        if const_expr(self.factors):
            return in_register(0x70007000, count)
        return in_register(0x000F000F if self.code == "int4" else self.magic, count)

    @cute.jit
    def decode(self, words: cute.Tensor, shifts: cute.Tensor | None, constant: Int32, pairs: cute.Tensor):
        """One k-block: ``words`` (words,) to ``pairs`` (4,), both Int32. ``shifts`` (2,): of rows r and r + 8."""
        if const_expr(self.code == "int4"):
            self.decode_int4(words[0], shifts, constant, pairs)
        elif const_expr(self.code == "nf4"):
            self.decode_nf4(words[0], pairs)
        elif const_expr(self.code == "e2m1"):
            for p in cutlass.range_constexpr(4):
                pairs[p] = self.float4(words[0], p)
        else:
            for i in cutlass.range_constexpr(2):
                if const_expr(self.code == "int8"):
                    pairs[2 * i] = self.signed(words[i], constant)
                    pairs[2 * i + 1] = self.signed(words[i] >> 8, constant)
                else:
                    for p in cutlass.range_constexpr(2):
                        pairs[2 * i + p] = self.float8(words[i], p)

    @cute.jit
    def scale(self, factors: cute.Tensor, pairs: cute.Tensor):
        """A k-block times the fp32 scales of its rows r and r + 8.

        bf16: a scale is the sum of two bf16 numbers, ``high + low``, but for 2^-17 of it, and exactly where it is fp16.
        ``rn(q * high + rn(q * low))`` takes two instructions for two weights; through fp32 it would be five. fp16: by
        fp32, since ``low`` may be too small a number; each product is rounded once.
        """
        bits = cute.recast_tensor(factors, Int32)
        zero = Int32(-0x7FFF8000)  # -0.0 twice: keeps the sign of zero
        for r in cutlass.range_constexpr(2):
            if const_expr(self.halves):
                for p in cutlass.range_constexpr(r, 4, 2):
                    pairs[p] = product16(pairs[p], bits[r], self.dtype)
            else:
                fold = const_expr("mul.rn.f32 s, s, 0f6F800000; " if self.folded else "")  # 2^96
                high = pure("{ .reg .f32 s; mov.b32 s, $1; " + fold + "cvt.rn.bf16x2.f32 $0, s, s; }", bits[r])
                low = pure(
                    "{ .reg .f32 s, h; .reg .b32 t; mov.b32 s, $1; " + fold + "and.b32 t, $2, 0xffff0000; "
                    "mov.b32 h, t; sub.rn.f32 s, s, h; cvt.rn.bf16x2.f32 $0, s, s; }",
                    bits[r],
                    high,
                )
                for p in cutlass.range_constexpr(r, 4, 2):
                    rest = pure("fma.rn.bf16x2 $0, $1, $2, $3;", pairs[p], low, zero)
                    pairs[p] = pure("fma.rn.bf16x2 $0, $1, $2, $3;", pairs[p], high, rest)

    @cute.jit
    def scale16(self, factors: cute.Tensor, pairs: cute.Tensor):
        """:meth:`scale` by scales that are numbers of the activations' type: the same results, two products at once."""
        bits = cute.recast_tensor(factors, Int32)
        kind = kind_of(self.dtype)
        zero = Int32(-0x7FFF8000)  # -0.0 twice: keeps the sign of zero
        for r in cutlass.range_constexpr(2):
            if const_expr(self.halves):
                twice = pure("{ .reg .f32 s; mov.b32 s, $1; cvt.rn.f16x2.f32 $0, s, s; }", bits[r])
            else:
                twice = pure("prmt.b32 $0, $1, $1, 0x3232;", bits[r])
            for p in cutlass.range_constexpr(r, 4, 2):
                pairs[p] = pure(f"fma.rn.{kind}x2 $0, $1, $2, $3;", pairs[p], twice, zero)

    @cute.jit
    def decode_int4(self, word: Int32, shifts: cute.Tensor, mask: Int32, pairs: cute.Tensor):
        # A nibble in the low mantissa bits of a number with a magic exponent: 128 + q, or 1024 + q; then minus that
        # and the zero point, exact.
        for p in cutlass.range_constexpr(4):
            integer = ((word >> (4 * p)) & mask) | self.magic
            if const_expr(self.halves):
                pairs[p] = pure("add.rn.f16x2 $0, $1, $2;", integer, shifts[p % 2])
            else:
                pairs[p] = pure("fma.rn.bf16x2 $0, $1, $2, $3;", integer, Int32(0x3F803F80), shifts[p % 2])

    @cute.jit
    def signed(self, word: Int32, magic: Int32) -> Int32:
        """Two's complement bytes 0 and 2 of ``word``."""
        if const_expr(self.halves):
            integer = ((word ^ 0x00800080) & 0x00FF00FF) | magic  # 1024 + 128 + b
            return pure("add.rn.f16x2 $0, $1, $2;", integer, Int32(-0x1B7F1B80))  # 0xE480E480: -(1024 + 128)
        # bf16 has 8 bits: 128 + the low seven, minus 128 or, for a negative one, 256.
        low = (word & 0x007F007F) | magic
        sign = (word & 0x00800080) | magic
        return pure("fma.rn.bf16x2 $0, $1, $2, $3;", sign, Int32(-0x407F4080), low)  # 0xBF80BF80: -1

    @cute.jit
    def float8(self, word: Int32, p: cutlass.Constexpr[int]) -> Int32:
        """Pair ``p`` of e4m3: sign, exponent and mantissa moved to their places; the exponent's bias is made up for by
        a power of two, exact, subnormal numbers too.
        """
        moved = join_bits(word, (MOVES_8_FP16 if self.halves else MOVES_8_BF16)[p])
        if const_expr(self.folded):
            return moved
        # 2^8, or 2^120; -0.0 twice keeps the sign of zero.
        bias = Int32(0x5C005C00 if self.halves else 0x7B807B80)
        return pure(f"fma.rn.{kind_of(self.dtype)}x2 $0, $1, $2, $3;", moved, bias, Int32(-0x7FFF8000))

    @cute.jit
    def float4(self, word: Int32, p: cutlass.Constexpr[int]) -> Int32:
        """Pair ``p`` of e2m1, as :meth:`float8`."""
        moved = join_bits(word, (MOVES_FP16 if self.halves else MOVES_BF16)[p])
        if const_expr(self.folded):
            return moved
        # 2^14, or 2^126; -0.0 twice keeps the sign of zero.
        bias = Int32(0x74007400 if self.halves else 0x7E807E80)
        return pure(f"fma.rn.{kind_of(self.dtype)}x2 $0, $1, $2, $3;", moved, bias, Int32(-0x7FFF8000))

    @cute.jit
    def power(self, byte: Int32) -> Int32:
        """2 ** (byte - 127) as :meth:`times_powers` takes it: in fp32, or folded in bf16, twice in a word."""
        if const_expr(self.folded):
            return byte * 0x00800080 + 0x33003300  # 2^(byte - 127) * 2^126 / 2^24
        return power_of_two(byte)

    @cute.jit
    def times_powers(self, powers: cute.Tensor, pairs: cute.Tensor):
        """A k-block times the powers of two of its rows r and r + 8."""
        for p in cutlass.range_constexpr(4):
            if const_expr(self.folded):
                zero = Int32(-0x7FFF8000)
                pairs[p] = pure("fma.rn.bf16x2 $0, $1, $2, $3;", pairs[p], powers[p % 2], zero)
            else:
                pairs[p] = product16(pairs[p], powers[p % 2], self.dtype)

    @cute.jit
    def times_scales(self, words: cute.Tensor, kb: cutlass.Constexpr[int], magic: Int32, pairs: cute.Tensor):
        """A k-block of 64 of K times the ue5m3 scales of its rows r and r + 8, which a word of ``words`` (2,) has.

        A byte between an exponent's high bits and zeros is its scale times 2^112; in fp16 it is the scale itself.
        """
        left = const_expr((3 if self.halves else 0) - 8 * (kb % 2))
        word = words[kb // 2]
        if const_expr(left != 0):
            word = pure("shf.l.wrap.b32 $0, $1, $1, $2;", word, Int32(left % 32))
        both = word & 0x7F807F80 if const_expr(self.halves) else (word & 0x0FF00FF0) | magic
        for p in cutlass.range_constexpr(4):
            # A half for both: an instruction's own choice.
            pairs[p] = pure(
                "{ .reg .b16 l, h; .reg .b32 t; mov.b32 {l, h}, $2; "
                f"mov.b32 t, {'{h, h}' if p % 2 else '{l, l}'}; fma.rn.{kind_of(self.dtype)}x2 $0, $1, t, $3; }}",
                pairs[p],
                both,
                Int32(-0x7FFF8000),
            )

    @cute.jit
    def decode_nf4(self, word: Int32, pairs: cute.Tensor):
        """A byte permutation looks 4 nibbles up among 8 bytes: twice for 16 values, for low and high bytes."""
        table = [bits16(value, self.halves) for value in NF4]
        planes = [
            [int_of([(table[4 * i + j] >> (8 * byte)) & 0xFF for j in range(4)]) for i in range(4)] for byte in range(2)
        ]
        halves = []
        for s in cutlass.range_constexpr(2):
            nibbles = word >> (16 * s)
            low3 = nibbles & 0x7777
            upper = ((nibbles >> 1) & 0x4444) | 0x3210  # byte i of values 0..7, or of 8..15
            found = []
            for byte in cutlass.range_constexpr(2):
                t = planes[byte]
                first = pure("prmt.b32 $0, $1, $2, $3;", Int32(t[0]), Int32(t[1]), low3)
                second = pure("prmt.b32 $0, $1, $2, $3;", Int32(t[2]), Int32(t[3]), low3)
                found.append(pure("prmt.b32 $0, $1, $2, $3;", first, second, upper))
            # Elements 0, 1 and 2, 3 of this half as 16-bit numbers.
            halves.append([pure("prmt.b32 $0, $1, $2, $3;", found[0], found[1], Int32(c)) for c in (0x5140, 0x7362)])
        for p in cutlass.range_constexpr(4):
            choice = Int32(0x5410 if p % 2 == 0 else 0x7632)
            pairs[p] = pure("prmt.b32 $0, $1, $2, $3;", halves[0][p // 2], halves[1][p // 2], choice)


@cute.jit
def load_words(address: Int32, words: cute.Tensor):
    """Two or four words of shared memory."""
    place = cute.make_ptr(Int32, address, cute.AddressSpace.smem, assumed_align=4 * cute.size(words))
    cute.autovec_copy(cute.make_tensor(place, cute.make_layout(cute.size(words))), words)


def shared_number(kind: type[cutlass.Numeric], address: Int32) -> cutlass.Numeric:
    """A number of shared memory."""
    place = cute.make_ptr(kind, address, cute.AddressSpace.smem, assumed_align=kind.width // 8)
    return cute.make_tensor(place, cute.make_layout(1))[0]


def twos_complement(bits: int) -> int:
    """32 bits as a number of two's complement."""
    return bits - (bits >> 31 << 32)


def join_bits(word: Int32, moves: tuple[tuple[int, int], ...]) -> Int32:
    """The bits of ``word`` that ``moves`` takes, each a shift to the left and a mask of both halves, as one word."""
    found = Int32(0)
    for by, mask in moves:
        found = found | (shifted(word, by) & twos_complement(mask * 0x10001))
    return found


def shifted(word: Int32, by: int) -> Int32:
    """``word * 2 ** by``; bits that come in from above are the caller's to mask."""
    return word << by if by > 0 else word >> -by if by < 0 else word


def power_of_two(byte: Int32) -> Int32:
    """The bits of 2 ** (byte - 127) in fp32, of byte 0 a subnormal number."""
    return cutlass.max(byte << 23, Int32(0x00400000))


def ue5m3(word: Int32, number: int) -> Int32:
    """The bits in fp32 of a word's scale ``number``: 2 for row r + 8, and 1 for the second k-block."""
    byte = pure("shf.r.wrap.b32 $0, $1, $1, $2;", word, Int32((4 + 8 * number) % 32)) & 255
    return byte * 0x00100000 + 0x38000000


def kind_of(dtype: type[cutlass.Numeric]) -> str:
    """The type in PTX."""
    return "f16" if dtype is cutlass.Float16 else "bf16"


def product16(pair: Int32, factor: Int32, dtype: type[cutlass.Numeric]) -> Int32:
    """Two fp16 numbers times the bits of an fp32 factor, in fp32, rounded once to a pair of ``dtype``."""
    return pure(
        "{ .reg .b16 a, b; .reg .f32 lo, hi, s; mov.b32 {a, b}, $1; cvt.f32.f16 lo, a; cvt.f32.f16 hi, b; "
        f"mov.b32 s, $2; mul.rn.f32 lo, lo, s; mul.rn.f32 hi, hi, s; cvt.rn.{kind_of(dtype)}x2.f32 $0, hi, lo; }}",
        pair,
        factor,
    )


def bits16(value: float, halves: bool) -> int:
    """The 16 bits of ``value`` as fp16, or as bf16 rounded to nearest even."""
    import struct

    if halves:
        return int(struct.unpack("<H", struct.pack("<e", value))[0])
    bits = struct.unpack("<I", struct.pack("<f", value))[0]
    return int((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16)


def int_of(four: list[int]) -> int:
    """Four bytes as a signed 32-bit number."""
    return int.from_bytes(bytes(four), "little", signed=True)
