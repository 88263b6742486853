"""Packed weights of four and eight bits to a matrix of 16-bit numbers, tile by tile."""

import triton
import triton.language as tl

from cutekernels.kernels.triton.dependent import pdl_wait

_TWO_120: tl.constexpr = tl.constexpr(2.0**120)


@triton.jit
def dequantize(
    out_ptr,
    packed_ptr,
    scales_ptr,
    zeros_ptr,
    rows,
    columns,
    groups,
    scale_pitch,
    tiles_k,
    out_pitch,
    first,
    CODE: tl.constexpr,
    GROUP: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    ZEROS: tl.constexpr,
    DEPENDENT: tl.constexpr = False,
):
    """``out[r, c] = dequantized weight[r, first + c]``, computed in fp32 and rounded once.

    Grid: (ceil(columns / 64), ceil(rows / 64)). A program has one packed tile of 64 x 64, in the order of MMA fragments
    (``quant/layout.py``); ``first`` is a multiple of 64. scales and zeros are (groups, scale_pitch).
    Masks: rows and columns behind the ends are neither scaled nor stored.
    """
    pdl_wait(DEPENDENT)
    tile_n, tile_k = tl.program_id(1).to(tl.int64), tl.program_id(0) + first // 64
    r = tl.arange(0, 64)[:, None]
    c = tl.arange(0, 64)[None, :]
    # The lane that holds (r, c) in strip r // 16, its k-block, and its place there.
    lane = (r % 8) * 4 + c % 8 // 2
    strip, below, block, right, odd = r // 16, r % 16 // 8, c // 16, c % 16 // 8, c % 2
    if CODE == "int4" or CODE == "nf4":
        at = strip * 512 + lane * 16 + block * 4 + odd * 2 + right
        byte = tl.load(packed_ptr + (tile_n * tiles_k + tile_k) * 2048 + at).to(tl.int32)
        q = (byte >> (4 * below)) & 15
    else:
        at = strip * 1024 + block // 2 * 512 + lane * 16 + block % 2 * 8 + right * 4 + odd * 2 + below
        q = tl.load(packed_ptr + (tile_n * tiles_k + tile_k) * 4096 + at).to(tl.int32)
    row = tile_n * 64 + r
    column = tl.program_id(0) * 64 + c
    there = (row < rows) & (column < columns)
    # The scale of the element's group; groups behind K do not exist.
    group = tl.minimum((first + column) // GROUP, groups - 1) if GROUP > 0 else column * 0
    at = group.to(tl.int64) * scale_pitch + row // SCALE_ROWS
    scale = tl.load(scales_ptr + at, mask=there, other=0.0).to(tl.float32)
    if CODE == "int4":
        if ZEROS:
            value = (q - tl.load(zeros_ptr + at, mask=there, other=0).to(tl.int32)).to(tl.float32)
        else:
            value = (q - 8).to(tl.float32)
    elif CODE == "int8":
        value = (q - (q & 128) * 2).to(tl.float32)
    elif CODE == "e4m3":
        # Sign, exponent and mantissa at their places in fp32; its other bias by an exact product.
        bits = ((q & 128) << 24) | ((q & 127) << 20)
        value = bits.to(tl.float32, bitcast=True) * _TWO_120
    else:
        # bitsandbytes' table, by bisection of the code's bits.
        b3, b2, b1, b0 = (q & 8) != 0, (q & 4) != 0, (q & 2) != 0, (q & 1) != 0
        v0 = tl.where(b0, -0.6961928009986877, -1.0)
        v2 = tl.where(b0, -0.39491748809814453, -0.5250730514526367)
        v4 = tl.where(b0, -0.18477343022823334, -0.28444138169288635)
        v6 = tl.where(b0, 0.0, -0.09105003625154495)
        v8 = tl.where(b0, 0.16093020141124725, 0.07958029955625534)
        v10 = tl.where(b0, 0.33791524171829224, 0.24611230194568634)
        v12 = tl.where(b0, 0.5626170039176941, 0.44070982933044434)
        v14 = tl.where(b0, 1.0, 0.7229568362236023)
        low = tl.where(b2, tl.where(b1, v6, v4), tl.where(b1, v2, v0))
        high = tl.where(b2, tl.where(b1, v14, v12), tl.where(b1, v10, v8))
        value = tl.where(b3, high, low)
    value = value * scale
    tl.store(out_ptr + row * out_pitch + column, value.to(out_ptr.dtype.element_ty), mask=there)
