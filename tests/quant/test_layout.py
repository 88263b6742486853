"""The packed layout against an element by element walk over its definition."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from cutekernels.errors import UnsupportedProblem
from cutekernels.quant import layout, quantize
from cutekernels.quant.formats import own
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
    packed = pack(codes, f"int{bits}")
    expected = torch.zeros(packed_shape((70, 130), f"int{bits}"), dtype=torch.int32)
    for row in range(70):
        for k in range(130):
            *place, shift = locate(row, k, bits)
            expected[tuple(place)] += int(codes[row, k]) << shift
    assert torch.equal(packed, expected.to(torch.uint8))


@pytest.mark.parametrize("code", layout.BITS)
@pytest.mark.parametrize("n", [1, 17, 100, 192])
@pytest.mark.parametrize("k", [64, 100, 256, 4096])
def test_unpack_undoes_pack(code: str, n: int, k: int) -> None:
    codes = torch.randint(0, 1 << layout.BITS[code], (k, n), dtype=torch.uint8).t()
    assert torch.equal(unpack(pack(codes, code), code, n, k), codes)


def test_chunks_give_what_one_piece_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    codes = torch.randint(0, 16, (300, 200), dtype=torch.uint8)
    fill = torch.arange(300, dtype=torch.uint8) % 16
    whole = pack(codes, "int4", fill)
    monkeypatch.setattr(layout, "_CHUNK_ELEMENTS", 1)
    assert torch.equal(pack(codes, "int4", fill), whole)
    assert torch.equal(unpack(whole, "int4", 300, 200), codes)


def test_padding_along_k_has_each_rows_own_code() -> None:
    codes, fill = torch.zeros(3, 40, dtype=torch.uint8), torch.tensor([3, 8, 15], dtype=torch.uint8)
    padded = unpack(pack(codes, "int4", fill), "int4", 64, 64)
    assert torch.equal(padded[:3, 40:], fill[:, None].expand(3, 24))
    assert not padded[3:].any()


def test_codes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(UnsupportedProblem, match="0 to 15, not 16"):
        pack(torch.full((2, 2), 16, dtype=torch.uint8), "nf4")
    with pytest.raises(UnsupportedProblem, match="one of int4, .*, not 8"):  # what tells e4m3 from int8
        pack(torch.zeros(2, 2, dtype=torch.uint8), 8)  # type: ignore[arg-type]
    with pytest.raises(UnsupportedProblem, match="uint8 of shape"):
        pack(torch.zeros(2, 2), "int8")
    with pytest.raises(UnsupportedProblem, match="pass what `pack` returned"):
        unpack(torch.zeros(1, 1, 2048, dtype=torch.uint8), "e4m3", 64, 64)


def test_files_of_fp8_are_told_from_older_ones() -> None:
    """Version 0.2.0 wrote codes in a row, as bytes; today's are the weight's memory, in 16 bits."""
    weight = quantize(torch.randn(100, 200), "fp8_channel")
    stored = own.write(weight)
    packed = stored["weight.packed"]
    assert packed.dtype == torch.int16 and packed.data_ptr() == weight.packed.data_ptr()
    older = pack(unpack(weight.packed, "e4m3", 100, 200), "int8")
    odd = torch.cat((torch.zeros(1, dtype=torch.uint8), older.flatten()))[1:].view(older.shape)  # at an odd address
    for given in (packed, older, odd):
        assert torch.equal(own.from_own(stored | {"weight.packed": given}, "fp8_channel").packed, weight.packed)
    assert not torch.equal(older, weight.packed)
    for at in range(2):  # either code of 16 bits
        older[0, 0, 4 + at] = 0x7F
        for given in (older, layout.spread(older, "e4m3").view(torch.int16)):
            with pytest.raises(UnsupportedProblem, match="NaN codes"):
                own.from_own(stored | {"weight.packed": given}, "fp8_channel")
        older[0, 0, 4 + at] = 0


@pytest.mark.parametrize("code", ["e2m1", "e4m3"])
def test_every_16_bits_come_back(code: str) -> None:
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.uint8).view(1, 1, -1)
    assert torch.equal(layout.gather(layout.spread(every, code), code), every)
    assert not torch.equal(layout.spread(every, code), every)


def test_tensors_without_values_leave_nothing_behind() -> None:
    with FakeTensorMode():
        unpack(torch.empty(1, 1, 4096, dtype=torch.uint8), "e4m3", 64, 64)
    assert torch.equal(unpack(pack(torch.ones(64, 64, dtype=torch.uint8), "e4m3"), "e4m3", 64, 64), torch.ones(64, 64))
