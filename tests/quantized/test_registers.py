"""Warpgroup bodies of packed weights write no register that a product under way still reads."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from cutekernels import gpu
from cutekernels.ops.moe.packed_experts import QuantizedGroupedProblem
from cutekernels.ops.moe.quantized import QUANTIZED_GROUPED_GEMM
from cutekernels.ops.quantized.op import QUANTIZED_LINEAR
from cutekernels.ops.quantized.problem import QuantizedProblem
from tests import sass
from tests.compiled import cubin

H100 = gpu.lookup("h100-sxm")
ONE = [
    "m=1024 n=4096 k=4096",
    "m=300 n=448 k=712 group=32 zeros=1 scale=bf16",
    "m=900 n=448 k=712 code=e2m1 group=32 scale=e8m0",
    "m=700 n=384 k=520 code=e4m3 group=0 scale=fp32",
]
EXPERTS = [
    "rows=3000 n=448 k=712 experts=20 group=32 activation=silu_mul",
    "rows=3000 n=448 k=712 experts=20 code=e2m1 group=32 scale=e8m0",
    "rows=5000 n=384 k=520 experts=5 code=e4m3 scale_rows=128 scale=fp32 activation=silu_mul",
]


def of_warpgroup(op: Any, problem: Any, tile_k: int) -> list[Any]:
    return [c for c in op.valid(problem, H100) if c.body == "warpgroup" and c.tile_k == tile_k]


def check(op: Any, problem: Any, tile_k: int, folder: Path) -> None:
    found = of_warpgroup(op, problem, tile_k)
    for config in random.Random(str(problem)).sample(found, min(2, len(found))):
        code = sass.instructions(cubin(op.build(problem, config, H100)), folder)
        assert any(opcode.startswith("HGMMA") for opcode, _ in code)
        assert sass.overwritten(code) == [], config


@pytest.mark.parametrize("tile_k", [64, 128])
@pytest.mark.parametrize("text", ONE)
def test_one_product(text: str, tile_k: int, tmp_path: Path) -> None:
    check(QUANTIZED_LINEAR, QuantizedProblem.parse(text), tile_k, tmp_path)


@pytest.mark.parametrize("text", EXPERTS)
def test_a_product_for_each_expert(text: str, tmp_path: Path) -> None:
    check(QUANTIZED_GROUPED_GEMM, QuantizedGroupedProblem.parse(text), 128, tmp_path)


def test_such_a_write_is_found() -> None:
    """The second batch is decoded into the first one's registers, on the path that skips the third."""
    loop = [
        ("LABEL", ".L_x_1"), ("WARPGROUP.DEPBAR.LE", "gsb0, 0x1"), ("LOP3.LUT", "R4, R9, 0xf, R8, 0xea, !PT"),
        ("HGMMA.64x8x16.F32.BF16", "R24, R4, gdesc[UR8], R24, gsb0"),
    ]  # fmt: skip
    skipped = [("BRA", "`(.L_x_2)"), ("WARPGROUP.DEPBAR.LE", "gsb0, 0x1"), ("LOP3.LUT", "R12, R9, 0xf, R8, 0xea, !PT")]
    second = [("HGMMA.64x8x16.F32.BF16", "R24, R12, gdesc[UR8], R24, gsb0"), ("LABEL", ".L_x_2"), ("BRA", "`(.L_x_1)")]
    assert sass.overwritten([*loop, *skipped, *second]) == ["LOP3.LUT R4, R9, 0xf, R8, 0xea, !PT"]
    assert sass.overwritten([*loop, *skipped[1:], *second]) == []
