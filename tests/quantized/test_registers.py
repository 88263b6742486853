"""How registers are found that a product under way still reads and something writes: kernels have none.

Those of the warpgroup bodies of packed weights are looked at where they are compiled: ``test_compiled.py``, and
``test_quantized_experts.py`` for experts.
"""

from __future__ import annotations

from pathlib import Path

from cutekernels import gpu
from cutekernels.ops.products.packed import QUANTIZED_GROUPED_GEMM, QuantizedGroupedProblem
from tests import sass
from tests.compiled import cubin

H100 = gpu.lookup("h100-sxm")


def test_the_rule_that_refuses_64_is_needed(tmp_path: Path) -> None:
    """Configs that the rule of ``tile_k`` leaves out do write such registers."""
    problem = QuantizedGroupedProblem.parse("rows=3000 n=448 k=712 experts=20 code=e2m1 group=32 scale=e8m0")
    found = (c for c in QUANTIZED_GROUPED_GEMM.valid(problem, H100) if (c.body, c.tile_k) == ("warpgroup", 128))
    smaller = (c.replace(tile_k=64, stages=8) for c in found)
    config = next(c for c in smaller if "products under way" in str(QUANTIZED_GROUPED_GEMM.why_not(problem, c, H100)))
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
