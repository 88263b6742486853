"""How registers are found that a product under way still reads and something writes: kernels have none.

Those of the warpgroup bodies of packed weights are looked at where they are compiled: ``test_compiled.py``, and
``test_quantized_experts.py`` for experts.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from cutekernels import gpu
from cutekernels.ops.products.packed import QUANTIZED_GROUPED_GEMM, QUANTIZED_LINEAR
from tests import sass
from tests.compiled import cubin

H100 = gpu.lookup("h100-sxm")
KINDS = (
    "", "group=32 zeros=1 scale=fp32", "code=e4m3 scale_rows=128 scale=fp32", "code=int8 group=64 scale=bf16",
    "code=nf4 group=64", "code=e2m1 group=32 scale=e8m0", "code=e2m1 group=16 scale=ue5m3 factors=1",
    "code=e4m3 group=0 scale=fp32", "code=int8 group=0 scale=fp32",
)  # fmt: skip


@pytest.mark.parametrize("seed", range(8))
def test_products_under_way_keep_their_registers(seed: int, tmp_path: Path) -> None:
    """Configs of two batches under way, drawn from all: of one weight or experts, gates, clusters, shared tiles."""
    draw = random.Random(seed)
    op, extents = draw.choice(
        [
            (QUANTIZED_LINEAR, "m=96 n=2048 k=4096"),
            (QUANTIZED_LINEAR, "m=512 n=8192 k=4096"),
            (QUANTIZED_GROUPED_GEMM, "rows=3000 n=448 k=712 experts=20"),
        ]
    )
    kind, gate = draw.choice(KINDS), draw.choice(["", "activation=silu_mul"])
    problem = op.Problem.parse(f"{extents} {kind} {gate}")
    ahead = (c for c in op.valid(problem, H100) if c.scaled == "weights" or problem.group == 0)
    configs = [c for c in ahead if c.body == "warpgroup" and c.tile_k == 64]
    assert all(c.stages > 2 for c in configs), "two stages are both read by the batches under way"
    code = sass.instructions(cubin(op.build(problem, draw.choice(configs), H100)), tmp_path)
    assert sass.overwritten(code) == []


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
    load = ("LDS", "R6, [R12]")  # ahead of the wait for the batch before last, which has R4 to R7
    label, wait, *rest = loop(12)
    assert sass.overwritten([label, load, wait, *rest]) == [" ".join(load)]
