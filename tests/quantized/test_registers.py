"""Warpgroup bodies of packed weights write no register that a product under way still reads."""

from __future__ import annotations

import random
from functools import cache
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


@cache
def valid(op: Any, problem: Any) -> list[Any]:
    return [c for c in op.valid(problem, H100) if c.body == "warpgroup"]


def of_warpgroup(op: Any, problem: Any, tile_k: int) -> list[Any]:
    return [c for c in valid(op, problem) if c.tile_k == tile_k]


def check(op: Any, problem: Any, tile_k: int, folder: Path) -> None:
    config = random.Random(str(problem)).choice(of_warpgroup(op, problem, tile_k))
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


@pytest.mark.parametrize("text", EXPERTS[:2])
def test_the_rule_that_refuses_64_is_needed(text: str, tmp_path: Path) -> None:
    """What the rule of ``tile_k`` leaves out does write such registers."""
    problem = QuantizedGroupedProblem.parse(text)
    smaller = [c.replace(tile_k=64, stages=8) for c in of_warpgroup(QUANTIZED_GROUPED_GEMM, problem, 128)]
    reasons = {c: str(QUANTIZED_GROUPED_GEMM.why_not(problem, c, H100)) for c in smaller}
    config = next(c for c, reason in reasons.items() if "products under way" in reason)
    code = sass.instructions(cubin(QUANTIZED_GROUPED_GEMM.build(problem, config, H100)), tmp_path)
    assert sass.overwritten(code)


def test_such_a_write_is_found() -> None:
    """A batch decoded into the registers of the other, which runs."""
    first = [
        ("LABEL", ".L_x_1"), ("WARPGROUP.DEPBAR.LE", "gsb0, 0x1"), ("LOP3.LUT", "R4, R9, 0xf, R8, 0xea, !PT"),
        ("HGMMA.64x8x16.F32.BF16", "R24, R4, gdesc[UR8], R24, gsb0"),
    ]  # fmt: skip
    write, product = "LOP3.LUT R{}, R9, 0xf, R8, 0xea, !PT", "R24, R{}, gdesc[UR8], R24, gsb0"

    def loop(register: int, wait: str = "gsb0, 0x1") -> list[tuple[str, str]]:
        opcode, operands = write.format(register).split(" ", 1)
        batch = [("WARPGROUP.DEPBAR.LE", wait), (opcode, operands), ("HGMMA.64x8x16", product.format(register))]
        return [*first, *batch, ("BRA", "`(.L_x_1)")]

    assert sass.overwritten(loop(12)) == []
    assert sass.overwritten(loop(4, "gsb0, 0x0")) == [write.format(4)]  # the next round's first batch
    assert sass.overwritten(loop(6)) == [write.format(6)]
