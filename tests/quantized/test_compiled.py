"""Code of quantized products, compiled without a GPU: defaults of each kind, on the four targets in turn."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch

from cutekernels import gpu
from cutekernels.kernels.cute.parts.packed import MOVES_8_BF16, MOVES_8_FP16, MOVES_BF16, MOVES_FP16
from cutekernels.ops.products.packed import QUANTIZED_LINEAR
from cutekernels.ops.products.schedules.packed_problem import QuantizedConfig, QuantizedProblem
from cutekernels.ops.products.schedules.packed_skinny import PACKED_SKINNY
from cutekernels.ops.products.schedules.packed_warpgroup import PACKED_WARPGROUP
from cutekernels.quant import layout
from cutekernels.quant.weight import E2M1
from tests import sass
from tests.compiled import cubin

GPUS = ("a100-sxm-80gb", "l40s", "h200", "rtx5090")
# One of each way through the warpgroup body: sums of groups, two batches under way, scales of both kinds, shared tiles,
# clusters, two CTAs to an SM, gates.
WARPGROUP = (
    (
        "m=512 n=4096 k=4096 zeros=1",
        "tile_m=128 tile_n=128 tile_k=128 stages=5 stream_k=1 scaled=accumulators raster=1",
    ),
    (
        "m=512 n=4096 k=4096 group=32",
        "tile_m=64 tile_n=192 tile_k=128 stages=6 stream_k=0 scaled=accumulators raster=8",
    ),
    ("m=512 n=4096 k=4096 scale=bf16", "tile_m=256 tile_n=128 tile_k=64 stages=5 stream_k=1 scaled=weights raster=1"),
    (
        "m=512 n=4096 k=4096 code=e2m1 group=16 scale=ue5m3 factors=1",
        "tile_m=192 tile_n=128 tile_k=128 stages=3 stream_k=1 scaled=weights raster=1",
    ),
    (
        "m=512 n=4096 k=4096 code=e4m3 scale_rows=128 scale=fp32",
        "tile_m=160 tile_n=192 tile_k=128 stages=3 stream_k=1 scaled=weights raster=8",
    ),
    (
        "m=512 n=4096 k=4096 code=int8 group=0 scale=fp32 bias=fp32",
        "tile_m=256 tile_n=128 tile_k=64 stages=5 stream_k=0 scaled=accumulators raster=8",
    ),
    (
        "m=96 n=2560 k=6912 group=64 bias=same",
        "tile_m=96 tile_n=128 tile_k=128 stages=4 stream_k=0 scaled=accumulators raster=1 split_k=5",
    ),
    (
        "m=64 n=2560 k=6912 code=e4m3 group=0 scale=fp32",
        "tile_m=64 tile_n=64 tile_k=128 stages=3 stream_k=0 scaled=accumulators raster=1 ctas_per_sm=2 split_k=5",
    ),
    (
        "m=64 n=2048 k=2048",
        "tile_m=64 tile_n=64 tile_k=64 stages=8 stream_k=0 scaled=weights raster=1 split_k=3 warps_k=2",
    ),
    (
        "m=32 n=2048 k=2048 group=32 zeros=1",
        "tile_m=32 tile_n=64 tile_k=128 stages=6 stream_k=0 scaled=accumulators raster=1 "
        "ctas_per_sm=2 split_k=4 warps_k=2",
    ),
    (
        "m=2048 n=4096 k=4096 code=e2m1 group=32 scale=e8m0",
        "tile_m=256 tile_n=128 tile_k=64 stages=5 stream_k=0 scaled=weights raster=8",
    ),
    (
        "m=512 n=8192 k=4096 activation=silu_mul",
        "tile_m=224 tile_n=128 tile_k=64 stages=5 stream_k=1 scaled=weights raster=1",
    ),
    (
        "m=64 n=2560 k=6912 group=32 zeros=1 activation=silu_mul",
        "tile_m=64 tile_n=128 tile_k=128 stages=6 stream_k=0 scaled=accumulators raster=1 split_k=5",
    ),
)


def frame(p: QuantizedProblem, c: QuantizedConfig) -> int:
    return int(QUANTIZED_LINEAR.schedules[c.body].smem(p, c).total_bytes)


@pytest.mark.parametrize(
    ("name", "text"), [(GPUS[i % len(GPUS)], QUANTIZED_LINEAR.suite[n]) for i, n in enumerate((1, 4, 6, 7, 8, 10, 11))]
)
def test_defaults_compile_without_spills_in_the_shared_memory_that_rules_count(name: str, text: str) -> None:
    spec, p = gpu.lookup(name), QuantizedProblem.parse(text)
    c = QUANTIZED_LINEAR.default(p, spec)
    facts = QUANTIZED_LINEAR.build(p, c, spec).facts
    assert facts.stack_bytes == 0
    assert facts.smem_bytes == frame(p, c)


@pytest.mark.parametrize(("text", "knobs"), WARPGROUP)
def test_ways_through_the_warpgroup_body_compile(text: str, knobs: str, tmp_path: Path) -> None:
    """No register is written that a product under way still reads. Groups that take turns have stages of their own: one
    bit of phase does not tell a stage's second fill from a first that the other group reads.
    """
    spec, p = gpu.lookup("h200"), QuantizedProblem.parse(text)
    others = " ".join(f"{name}=1" for name in ("ctas_per_sm", "warps_k") if name not in knobs)
    c = QuantizedConfig.parse(f"body=warpgroup {knobs} {others} pdl=1 warps_n=1 prefetch_l2=0")
    assert QUANTIZED_LINEAR.why_not(p, c, spec) is None
    if c.warps_k > 1:
        odd = replace(c, stages=7)
        assert "take a multiple of warps_k=2" in str(QUANTIZED_LINEAR.why_not(p, replace(odd, tile_m=16), spec))
        with pytest.raises(ValueError, match="7 stages pass from group to group"):
            QUANTIZED_LINEAR.body(p, odd, spec)
    built = QUANTIZED_LINEAR.build(p, c, spec)
    assert built.facts.stack_bytes == 0
    assert built.facts.smem_bytes == frame(p, c)
    code = sass.instructions(cubin(built), tmp_path)
    assert any(opcode.startswith("HGMMA") for opcode, _ in code)
    assert sass.overwritten(code) == []


def test_grids_deal_out_all_units_once() -> None:
    spec = gpu.lookup("h200")
    for text in ("m=1 n=3584 k=18944", "m=33 n=1000 k=520", "m=200 n=5120 k=13824", "m=4096 n=4096 k=4096"):
        p = QuantizedProblem.parse(text)
        for c in list(QUANTIZED_LINEAR.valid(p, spec))[::97]:
            k_tiles, tiles = -(-p.k // c.tile_k), QUANTIZED_LINEAR.schedules[c.body].tiles(p, c)
            if c.body == PACKED_SKINNY.name:
                ctas, share = PACKED_SKINNY.grid(p, c, spec)
                assert (ctas - 1) * share < tiles * k_tiles <= ctas * share
                assert c.stream_k or share % k_tiles == 0, "whole tiles alone"
            else:
                ctas, rounds, share = PACKED_WARPGROUP.grid(p, c, spec)
                assert ctas <= spec.sm_count * c.ctas_per_sm
                assert c.split_k == 1 or ctas == tiles * c.split_k, "a cluster has one tile"
                rest = tiles - rounds * ctas
                assert not c.stream_k or (rest >= 0 and rest * k_tiles <= ctas * share)


def test_e4m3_is_exact_in_registers() -> None:
    """The decoder's shifts and masks, in Python, on words as they are packed: each code in each place."""
    codes = torch.arange(64 * 64, dtype=torch.int32).view(64, 64) * 7 % 256
    codes = torch.where(codes % 128 == 127, codes - 1, codes).to(torch.uint8)  # no NaN
    packed = layout.pack(codes, "e4m3")
    assert torch.equal(layout.unpack(packed, "e4m3", 64, 64), codes)
    words = packed.view(torch.int32)[0, 0].view(4, 2, 32, 2, 2).long()  # (strip, half, lane, k-block, c)
    values = codes.view(torch.float8_e4m3fn).double()
    for dtype, moves, bias in ((torch.bfloat16, MOVES_8_BF16, 120), (torch.float16, MOVES_8_FP16, 8)):
        for h in range(2):
            moved = sum(((words << by if by > 0 else words >> -by) & mask * 0x10001) for by, mask in moves[h])
            for e in range(2):
                found = (moved >> 16 * e & 0xFFFF).to(torch.uint16).view(dtype).double() * 2.0**bias
                for strip, half, lane, kb, c in product(range(4), range(2), range(32), range(2), range(2)):
                    row, k = 16 * strip + lane // 4 + 8 * h, 16 * (2 * half + kb) + 2 * (lane % 4) + 8 * c + e
                    assert found[strip, half, lane, kb, c] == values[row, k]


def test_powers_of_two_times_e2m1_are_exact_in_registers() -> None:
    """The decoder's shifts and masks, in Python, on words as they are packed: each code in each place, each power."""
    codes = torch.arange(64 * 64, dtype=torch.uint8).view(64, 64) * 7 % 16
    packed = layout.pack(codes, "e2m1")
    assert torch.equal(layout.unpack(packed, "e2m1", 64, 64), codes)
    words = packed.view(torch.int32)[0, 0].view(4, 32, 4).long()  # (strip, lane, k-block)
    for dtype, moves, bias in ((torch.bfloat16, MOVES_BF16, 126), (torch.float16, MOVES_FP16, 14)):
        for p in range(4):
            moved = sum(((words << by if by > 0 else words >> -by) & mask * 0x10001) for by, mask in moves[p])
            for e in range(2):
                found = (moved >> 16 * e & 0xFFFF).to(torch.uint16).view(dtype).double() * 2.0**bias
                for lane in range(32):
                    rows, k = torch.arange(4) * 16 + lane // 4 + p % 2 * 8, torch.arange(4) * 16 + lane % 4 * 2 + e
                    expected = torch.tensor(E2M1).double()[codes[rows][:, k + p // 2 * 8].long()]
                    assert torch.equal(found[:, lane], expected)
    scales = 48 + torch.arange(4 * 64, dtype=torch.uint8).view(4, 64) % 143  # e4m3 above 0
    numbers = torch.exp2(scales.double().div(8).floor() - 15) * (1 + scales % 8 / 8)
    words = layout.pack_scales(scales).view(4, 8, 2).long() & 0xFFFFFFFF  # (strip, lane // 4, pair of k-blocks)
    assert torch.equal(layout.unpack_scales(layout.pack_scales(scales)), scales)
    for dtype, left, mask, magic, bias in (
        (torch.bfloat16, 0, 0x0FF00FF0, 0x70007000, -112), (torch.float16, 3, 0x7F807F80, 0, 0),
    ):  # fmt: skip
        for kb in range(4):
            by = (left - 8 * (kb % 2)) % 32
            word = (words[:, :, kb // 2] << by | words[:, :, kb // 2] >> 32 - by) & mask | magic
            for h in range(2):
                found = (word >> 16 * h & 0xFFFF).to(torch.uint16).view(dtype).double() * 2.0**bias
                assert torch.equal(found, numbers[kb].view(4, 2, 8)[:, h])
    for byte in range(153):
        power = torch.tensor([byte * 0x00800080 + 0x33003300], dtype=torch.uint32).view(torch.bfloat16)
        assert power.double().tolist() == [2.0 ** (byte - 25)] * 2
