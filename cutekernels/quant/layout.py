"""The packed layout of quantized weights: tiles of 64 rows x 64 of K in the order of tensor core fragments.

A tile is four strips of 16 rows. Lane ``l`` of a warp holds, for each of a strip's four k-blocks of 16, the eight
elements that it has of an A fragment of mma.m16n8k16 (wgmma m64k16: the strip is the warp): row ``l // 4 + 8 h``,
k ``2 (l % 4) + 8 c + e``, where ``h``, ``c`` and ``e`` are 0 or 1. Bytes of a tile, slowest index first::

    4 bits   [strip 4][lane 32][k-block 4][e 2][c 2]                 h = 0 in the low nibble, h = 1 in the high one
    8 bits   [strip 4][half 2][lane 32][k-block 2][c 2][e 2][h 2]    k-block ``2 half + b``

Floats spread the bits of each 16, so that decoding moves most codes at once. e2m1, four codes of (sign, exponent,
mantissa): of codes 0, 1 and 2 exponent and mantissa to bits 0, 3 and 6 and up, signs to 9, 12 and 15; of code 3 to what
is left. e4m3: of the high byte to where bf16 has sign, exponent and mantissa, bits 15 and 4 to 10; of the low one the
last four to bits 0 to 3, the others, the sign first, to 11 to 14.

Scales of 16 elements (NVFP4's, a byte each: :func:`pack_scales`) stand four to a word, that of 64 of K: of rows r and
r + 8 and two neighbours of K, words of a strip as ``[r 8][pair 2]``, so that two rows' are one run of eight bytes.

So a lane's share of a strip (4 bits) or of half a strip (8 bits) is one run of 16 bytes, and a warp reads 512 in a row.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cutekernels.errors import UnsupportedProblem

if TYPE_CHECKING:
    from torch import Tensor

BITS = {"int4": 4, "nf4": 4, "e2m1": 4, "int8": 8, "e4m3": 8}  # by code
TILE = 64  # rows and elements of K
TILE_BYTES = {4: 2048, 8: 4096}
_CHUNK_ELEMENTS = 32 << 20  # a chunk has up to four byte-sized temporaries

# Places of bits 0 to 15 of four codes, or of two, of floats; and the reverse.
_SPREAD = {
    "e2m1": (0, 1, 2, 9, 3, 4, 5, 12, 6, 7, 8, 15, 10, 11, 13, 14),
    "e4m3": (0, 1, 2, 3, 12, 13, 14, 11, 4, 5, 6, 7, 8, 9, 10, 15),
}
_GATHERED = {code: tuple(places.index(i) for i in range(16)) for code, places in _SPREAD.items()}

# Indices of a tile's elements within (rows, K) as (strip, h, lane // 4) x (k-block, c, lane % 4, e).
_SPLIT = (4, 2, 8, 4, 2, 4, 2)


def tiles(shape: tuple[int, int]) -> tuple[int, int]:
    """The number of tiles along N and along K of a weight of ``shape``."""
    return -(-shape[0] // TILE), -(-shape[1] // TILE)


def step_of(group: int) -> int:
    """The elements of K that a number of a table of scales in groups of ``group`` is for: of 16 four share a word."""
    return TILE if group == 16 else group


def packed_shape(shape: tuple[int, int], code: str) -> tuple[int, int, int]:
    """The shape of ``pack``'s result for a weight of ``shape``."""
    return *tiles(shape), TILE_BYTES[BITS[code]]


def pack(codes: Tensor, code: str, fill: int | Tensor = 0) -> Tensor:
    """``codes`` in the packed layout: uint8 ``(ceil(N / 64), ceil(K / 64), 2048 or 4096)``, on the same device.

    Args:
        codes: ``(N, K)``, uint8, one element a byte. Any strides.
        code: ``"int4" | "nf4" | "e2m1"`` (0 to 15), or ``"int8" | "e4m3"``.
        fill: the code of the padding along K: one for all, or one per row, uint8 ``(N,)``. Rows are padded with 0.

    Raises:
        UnsupportedProblem: another code, codes of another type or shape, or beyond its bits.
    """
    import torch
    from torch import Tensor

    _check(codes, code)
    n, k = codes.shape
    rows, columns = tiles((n, k))
    packed = torch.empty(packed_shape((n, k), code), dtype=torch.uint8, device=codes.device)
    step = max(1, _CHUNK_ELEMENTS // (columns * TILE * TILE))
    for first in range(0, rows, step):
        last = min(first + step, rows)
        chunk = codes[first * TILE : last * TILE]
        if chunk.shape != ((last - first) * TILE, columns * TILE):
            padded = torch.zeros((last - first) * TILE, columns * TILE, dtype=torch.uint8, device=codes.device)
            padded[: chunk.shape[0], :k] = chunk
            if k < columns * TILE:
                edge = fill[first * TILE : last * TILE, None] if isinstance(fill, Tensor) else fill
                padded[: chunk.shape[0], k:] = edge
            chunk = padded
        packed[first:last] = spread(_pack_tiles(chunk, last - first, columns, BITS[code]), code)
    return packed


def unpack(packed: Tensor, code: str, n: int, k: int) -> Tensor:
    """The codes that ``pack`` was given: uint8 ``(n, k)``, contiguous, on the same device.

    Raises:
        UnsupportedProblem: ``packed`` is not of the shape or type that ``pack`` gives for ``(n, k)``.
    """
    import torch

    _check_code(code)
    expected = packed_shape((n, k), code)
    if packed.dtype != torch.uint8 or packed.shape != expected:
        raise UnsupportedProblem(
            f"a packed weight of {n} x {k} elements in {code} is uint8 {expected}, "
            f"not {packed.dtype} {tuple(packed.shape)}; pass what `pack` returned"
        )
    rows, columns = tiles((n, k))
    codes = torch.empty(n, k, dtype=torch.uint8, device=packed.device)
    step = max(1, _CHUNK_ELEMENTS // (columns * TILE * TILE))
    for first in range(0, rows, step):
        last = min(first + step, rows)
        chunk = _unpack_tiles(gather(packed[first:last], code), last - first, columns, BITS[code])
        codes[first * TILE : last * TILE] = chunk[: n - first * TILE, :k]
    return codes


def spread(packed: Tensor, code: str) -> Tensor:
    """``packed`` as it lies in memory, of codes that follow one another."""
    return _move_bits(packed, _SPREAD[code]) if code in _SPREAD else packed


def gather(packed: Tensor, code: str) -> Tensor:
    """The reverse of :func:`spread`."""
    return _move_bits(packed, _GATHERED[code]) if code in _GATHERED else packed


def has_nan(packed: Tensor) -> bool:
    """Whether an element of a packed e4m3 weight is NaN: all but the sign's bit set."""
    import torch

    halves = packed.view(torch.int16)
    masks = [sum(1 << place for place in _SPREAD["e4m3"][first : first + 7]) for first in (0, 8)]
    return any(bool(((halves & mask) == mask).any()) for mask in masks)


def pack_scales(scales: Tensor) -> Tensor:
    """Bytes ``(K / 16, N)``, 64 dividing N, as int32 ``(K / 64, N)``.

    Words have bytes (row h, k-block b) in the order ``2 h + b``, 4 bits to the left and round, so that those of b = 0
    are four bits above the ends of both halves.
    """
    import torch

    groups, rows = scales.shape
    whole = torch.nn.functional.pad(scales, (0, 0, 0, -groups % 4)).reshape(-1, 2, 2, rows // 16, 2, 8)
    words = dense(whole.permute(0, 3, 5, 1, 4, 2).flatten(-2)).view(torch.int32).reshape(-1, rows)
    return (words << 4) | (words >> 28 & 15)


def unpack_scales(words: Tensor) -> Tensor:
    """The bytes that :func:`pack_scales` was given, those of whole words."""
    import torch

    rows = words.shape[1]
    whole = dense((words >> 4 & 0x0FFFFFFF) | (words << 28)).view(torch.uint8).reshape(-1, rows // 16, 8, 2, 2, 2)
    return whole.permute(0, 3, 5, 1, 4, 2).reshape(-1, rows)


def dense(tensor: Tensor) -> Tensor:
    """``tensor`` with the strides of a new one: ``contiguous()`` leaves any in extents of 1, which ``view`` refuses."""
    import torch

    stride, strides = 1, []
    for extent in reversed(tensor.shape):
        strides.append(stride)
        stride *= max(extent, 1)
    return (
        tensor if tensor.stride() == tuple(reversed(strides)) else tensor.clone(memory_format=torch.contiguous_format)
    )


def _move_bits(packed: Tensor, places: tuple[int, ...]) -> Tensor:
    """``packed`` with bit i of each 16 at ``places[i]``, in chunks: it takes little memory beside the result."""
    import torch

    masks: dict[int, int] = {}  # what a shift to the left brings
    for i, place in enumerate(places):
        masks[place - i] = masks.get(place - i, 0) | 1 << place
    moved = torch.empty_like(packed, memory_format=torch.contiguous_format)
    halves = (packed if packed.storage_offset() % 2 == 0 else packed.clone()).contiguous().view(torch.int16)
    halves, found = halves.view(-1), moved.view(torch.int16).view(-1)
    for first in range(0, halves.numel(), _CHUNK_ELEMENTS):
        part, into = halves[first : first + _CHUNK_ELEMENTS], found[first : first + _CHUNK_ELEMENTS]
        into.zero_()
        for by, mask in masks.items():
            into |= (part << by if by > 0 else part >> -by) & (mask - (mask >> 15 << 16))
    return moved


def _check_code(code: str) -> None:
    if code not in BITS:
        raise UnsupportedProblem(f"code is one of {', '.join(BITS)}, not {code!r}; quantize to one of these")


def _check(codes: Tensor, code: str) -> None:
    import torch

    _check_code(code)
    if codes.dtype != torch.uint8 or codes.dim() != 2 or 0 in codes.shape:
        raise UnsupportedProblem(
            f"codes are uint8 of shape (N, K), not {codes.dtype} {tuple(codes.shape)}; "
            "view int8 and e4m3 as torch.uint8, and pass a weight's matrix"
        )
    if BITS[code] == 4 and int(codes.amax()) > 15:
        raise UnsupportedProblem(f"codes of {code} are 0 to 15, not {int(codes.amax())}; view bytes as int8 or e4m3")


def _pack_tiles(codes: Tensor, rows: int, columns: int, bits: int) -> Tensor:
    # (tile_n, strip, h, lane // 4, tile_k, k-block, c, lane % 4, e)
    split = codes.reshape(rows, *_SPLIT[:3], columns, *_SPLIT[3:])
    if bits == 4:
        nibbles = split.permute(2, 0, 4, 1, 3, 7, 5, 8, 6)  # (h, tile_n, tile_k, strip, lane, k-block, e, c)
        data: Tensor = nibbles[0] | (nibbles[1] << 4)
        return data.reshape(rows, columns, TILE_BYTES[4])
    halves: Tensor = split.unflatten(5, (2, 2))  # the k-block as (half, b)
    return halves.permute(0, 4, 1, 5, 3, 8, 6, 7, 9, 2).reshape(rows, columns, TILE_BYTES[8])


def _unpack_tiles(packed: Tensor, rows: int, columns: int, bits: int) -> Tensor:
    import torch

    if bits == 4:
        # (tile_n, tile_k, strip, lane // 4, lane % 4, k-block, e, c), then h
        data = packed.reshape(rows, columns, 4, 8, 4, 4, 2, 2)
        split = torch.stack((data & 15, data >> 4)).permute(1, 3, 0, 4, 2, 6, 8, 5, 7)
    else:
        # (tile_n, tile_k, strip, half, lane // 4, lane % 4, b, c, e, h)
        data = packed.reshape(rows, columns, 4, 2, 8, 4, 2, 2, 2, 2)
        split = data.permute(0, 2, 9, 4, 1, 3, 6, 7, 5, 8)
    return split.reshape(rows * TILE, columns * TILE)
