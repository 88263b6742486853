"""The packed layout against an element by element walk over its definition."""

from __future__ import annotations

import pytest
import torch

from cutekernels.errors import UnsupportedProblem
from cutekernels.quant import layout
from cutekernels.quant.layout import pack, packed_shape, unpack


def locate(row: int, k: int, bits: int) -> tuple[int, int, int, int]:
    """Tile along N, tile along K, byte, shift of an element, by the contract's text alone."""
    strip, r, block, kk = row % 64 // 16, row % 16, k % 64 // 16, k % 16
    for lane in range(32):
        for pair in range(4):
            for high in range(2):
                if r == lane // 4 + 8 * (pair % 2) and kk == 2 * (lane % 4) + 8 * (pair // 2) + high:
                    if bits == 4:
                        nibble = pair + 4 * high
                        byte = (strip * 32 + lane) * 16 + block * 4 + nibble // 2
                        return row // 64, k // 64, byte, 4 * (nibble % 2)
                    half, word = block // 2, 2 * (block % 2) + pair // 2
                    within = (0 if pair % 2 == 0 else 1) + 2 * high
                    return row // 64, k // 64, ((strip * 2 + half) * 32 + lane) * 16 + word * 4 + within, 0
    raise AssertionError("no lane holds it")


@pytest.mark.parametrize("bits", [4, 8])
def test_every_element_of_a_tile_stands_where_the_definition_says(bits: int) -> None:
    codes = torch.randint(0, 1 << bits, (70, 130), dtype=torch.uint8)
    packed = pack(codes, bits)
    expected = torch.zeros(packed_shape((70, 130), bits), dtype=torch.int32)
    for row in range(70):
        for k in range(130):
            *place, shift = locate(row, k, bits)
            expected[tuple(place)] += int(codes[row, k]) << shift
    assert torch.equal(packed, expected.to(torch.uint8))


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("n", [1, 17, 100, 192])
@pytest.mark.parametrize("k", [64, 100, 256, 4096])
def test_unpack_undoes_pack(bits: int, n: int, k: int) -> None:
    codes = torch.randint(0, 1 << bits, (k, n), dtype=torch.uint8).t()
    assert torch.equal(unpack(pack(codes, bits), bits, n, k), codes)


def test_chunks_give_what_one_piece_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    codes = torch.randint(0, 16, (300, 200), dtype=torch.uint8)
    fill = torch.arange(300, dtype=torch.uint8) % 16
    whole = pack(codes, 4, fill)
    monkeypatch.setattr(layout, "_CHUNK_ELEMENTS", 1)
    assert torch.equal(pack(codes, 4, fill), whole)
    assert torch.equal(unpack(whole, 4, 300, 200), codes)


def test_padding_along_k_has_each_rows_own_code() -> None:
    codes, fill = torch.zeros(3, 40, dtype=torch.uint8), torch.tensor([3, 8, 15], dtype=torch.uint8)
    padded = unpack(pack(codes, 4, fill), 4, 64, 64)
    assert torch.equal(padded[:3, 40:], fill[:, None].expand(3, 24))
    assert not padded[3:].any()


def test_codes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(UnsupportedProblem, match="0 to 15, not 16"):
        pack(torch.full((2, 2), 16, dtype=torch.uint8), 4)
    with pytest.raises(UnsupportedProblem, match="4 or 8 bits, not 3"):
        pack(torch.zeros(2, 2, dtype=torch.uint8), 3)
    with pytest.raises(UnsupportedProblem, match="uint8 of shape"):
        pack(torch.zeros(2, 2), 8)
    with pytest.raises(UnsupportedProblem, match="pass what `pack` returned"):
        unpack(torch.zeros(1, 1, 2048, dtype=torch.uint8), 8, 64, 64)
