"""``dequantize``: the kernel under Triton's interpreter, and the op."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from cutekernels.errors import UnsupportedProblem
from cutekernels.ops.quantized.decode import DEQUANTIZE
from tests.interpreted import kernel_tests
from tests.quantized import cases
from tests.quantized.cases import CASES, KINDS, PLANTED, make

interpreted, test_kernel_numerics, test_a_planted_bug_is_caught = kernel_tests(cases.__file__, CASES, PLANTED)


@pytest.mark.parametrize("kind", KINDS.values(), ids=str)
def test_the_reference_is_the_definition(kind: cases.Kind) -> None:
    made = make(129, 200, kind)
    weight = made.weight()
    found = DEQUANTIZE.path(
        weight.packed, weight.scales, weight.zeros, kind.code, kind.group, 129, 200, 72, "bf16", 64, None
    )
    assert torch.equal(found, made.exact()[:, 64:136].float().bfloat16())
    assert torch.equal(weight.dequantize(torch.float32), made.exact().float())


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("kind", [cases.Kind(group=64, zeros=True), cases.Kind("e4m3", 128, 128)], ids=str)
def test_opcheck(kind: cases.Kind) -> None:
    weight = make(40, 136, kind).weight()
    given = weight.packed, weight.scales, weight.zeros
    options = kind.code, kind.group, 40, 136, 72, "fp16", 64
    torch.library.opcheck(torch.ops.cutekernels.dequantize.default, (*given, *options))
    out = torch.empty(40, 72, dtype=torch.float16)
    torch.library.opcheck(torch.ops.cutekernels.dequantize_out.default, (*given, out, *options))


def test_refusals() -> None:
    weight = make(40, 136).weight()

    def called(packed: torch.Tensor, scales: torch.Tensor, *options: object) -> None:
        DEQUANTIZE.path(packed, scales, None, *options, None)

    good = "int4", 128, 40, 136, 72, "bf16", 64
    called(weight.packed, weight.scales, *good)
    for change, message in (
        ({0: "int5"}, "code must be one of"),
        ({2: 300}, "packed must be uint8"),
        ({3: 300}, "packed must be uint8"),
        ({1: 64}, "scales must be"),
        ({4: 0}, "columns must be"),
        ({5: "fp32"}, "dtype must be"),
    ):
        options = [change.get(i, value) for i, value in enumerate(good)]
        with pytest.raises(UnsupportedProblem, match=message) as error:
            called(weight.packed, weight.scales, *options)
        assert "\n" not in str(error.value)
    with pytest.raises(UnsupportedProblem, match="packed must be uint8"):
        called(weight.packed.int(), weight.scales, *good)
    with pytest.raises(UnsupportedProblem, match="scales must be"):
        called(weight.packed, weight.scales.double(), *good)
