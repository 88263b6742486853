"""Which elements have kernels where."""

from __future__ import annotations

import pytest
import torch

from cutekernels import quant
from cutekernels.gpu import ARCHITECTURES
from cutekernels.quant import support
from cutekernels.quant.layout import BITS
from cutekernels.quant.support import REFUSED, SUPPORT
from cutekernels.quant.weight import FORMATS
from tests.processes import python


def test_every_element_has_kernels_on_every_target() -> None:
    assert {row.code for row in SUPPORT} == set(BITS)
    for scheme in ("int4_g128", "fp8_block", "int8_channel"):
        weight = quant.quantize(torch.randn(4, 64), scheme)
        assert all(quant.why_not(weight, capability) is None for capability in ARCHITECTURES)


def test_the_table_has_every_format_on_every_target() -> None:
    rows = support.table()
    assert {row.format for row in rows} == set(FORMATS) - {"int8"}  # which no reader makes
    assert {row.capability for row in rows} == set(ARCHITECTURES)
    assert all(row.reason is None for row in rows)
    assert all(row.reason is not None for row in support.table([(7, 0), (7, 5)]))


@pytest.mark.parametrize("scheme", ["int4_g128", "fp8_block"])
def test_older_gpus_are_refused_with_a_remedy(scheme: str) -> None:
    weight = quant.quantize(torch.randn(4, 64), scheme)
    reason = quant.why_not(weight, (7, 5))
    assert reason is not None
    assert reason.endswith("need compute capability 8.0, not 7.5; use the weight's dequantize() there")


def test_kernels_want_multiples_of_8() -> None:
    reason = quant.why_not(quant.quantize(torch.randn(4, 100), "int4"), (9, 0))
    assert reason is not None
    assert "K is a multiple of 8, not 100" in reason


def test_refused_formats_have_remedies() -> None:
    assert all(REFUSED.values())


def test_importing_it_loads_no_torch() -> None:
    code = "import sys, cutekernels as ck; ck.quant; sys.exit('torch' in sys.modules)"
    python(code)
