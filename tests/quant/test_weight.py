"""QuantizedWeight itself: what it refuses, how it moves, and that copies are equal."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace
from typing import Any

import pytest
import torch

from cutekernels import quant
from cutekernels.errors import UnsupportedProblem
from cutekernels.quant import QuantizedWeight, weight
from cutekernels.quant.assembly import packed_group
from tests.quant import golden


def sample() -> QuantizedWeight:
    """With zeros and act-order."""
    tensors = golden.gptq(golden.case(24, 128, 32, act_order=True), 1)
    return quant.from_gptq(tensors["qweight"], tensors["qzeros"], tensors["scales"], 32, tensors["g_idx"])


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda w: pickle.loads(pickle.dumps(w)), copy.copy])
def test_copies_are_equal(duplicate: Any) -> None:
    one = sample()
    two = duplicate(one)
    assert two is not one
    assert (two.packed is one.packed) == (duplicate is copy.copy)
    assert torch.equal(two.dequantize(), one.dequantize())
    assert repr(two) == repr(one)
    golden.same(two.tensors(), one.tensors())


def test_weights_are_equal_by_identity() -> None:
    one = sample()
    assert one == one
    assert one != copy.copy(one)
    assert len({one, copy.copy(one)}) == 2


def test_it_says_what_it_is() -> None:
    one = sample()
    assert repr(one) == "QuantizedWeight(gptq int4 g32, zeros, order, 24 x 128, float16, 0.00538 MB on cpu)"
    assert one.nbytes == 2 * 2048 + 4 * 64 * 2 + 4 * 64 + 128 * 4
    assert (one.bits, one.device.type) == (4, "cpu")


def test_to_changes_the_device_of_what_is_stored_and_the_dtype_of_what_is_returned() -> None:
    one = sample()
    two = one.to(dtype=torch.bfloat16)
    assert two.packed is one.packed
    assert two.scales.dtype == torch.float16
    assert two.dequantize().dtype == torch.bfloat16
    assert torch.equal(two.dequantize(torch.float16), one.dequantize())
    assert one.to(torch.float32).dequantize().dtype == torch.float32
    golden.same(two.tensors(), one.tensors())
    there = one.to("meta")
    tensors = (there.packed, there.scales, there.zeros, there.order)
    assert all(tensor is not None and tensor.device.type == "meta" for tensor in tensors)


def test_dequantize_refuses_other_types() -> None:
    with pytest.raises(UnsupportedProblem, match="to fp16, bf16 or fp32, not torch.float64"):
        sample().dequantize(torch.float64)


def test_pieces_give_what_the_whole_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    made = [quant.quantize(torch.randn(300, 200), scheme) for scheme in ("int4_g64", "fp8_block", "int8_channel")]
    whole = [each.dequantize() for each in made]
    monkeypatch.setattr(weight, "_CHUNK_ELEMENTS", 1)
    assert all(torch.equal(each.dequantize(), values) for each, values in zip(made, whole, strict=True))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"code": "int3"}, "code of a QuantizedWeight is one of int4, nf4, e2m1, int8, e4m3, not 'int3'"),
        ({"group": 48}, "group of a QuantizedWeight is one of 0, 32, 64, 128, not 48"),
        ({"scale_rows": 2}, "scale_rows of a QuantizedWeight is one of 1, 128, not 2"),
        ({"format": "gguf"}, "format of a QuantizedWeight"),
        ({"dtype": torch.int8}, "dtype of a QuantizedWeight"),
        ({"shape": (24, 0)}, "both at least 1"),
        ({"shape": (65, 128)}, "packed of a 65 x 128 weight in int4"),
        ({"packed": torch.zeros(1, 2, 2048)}, "contiguous uint8 of shape \\(1, 2, 2048\\), not float32"),
        ({"scales": torch.ones(4, 63).half()}, "scales of a 24 x 128 weight"),
        ({"scales": torch.ones(64, 4).half().t()}, "not strided float16"),
        ({"scales": torch.ones(4, 64).double()}, "scales of a 24 x 128 weight"),
        ({"zeros": torch.ones(4, 64)}, "zeros of a 24 x 128 weight"),
        ({"order": torch.arange(128)}, "order of a 24 x 128 weight"),
        ({"order": torch.arange(128, dtype=torch.int32, device="meta")}, "on one device"),
        ({"code": "nf4"}, "zeros and offsets are of int4, not of nf4"),
        ({"offsets": torch.ones(4, 64).half()}, "zeros or offsets, not both"),
        ({"group": 128, "scale_rows": 128}, "blocks of e4m3, not of int4"),
    ],
)
def test_fields_that_contradict_each_other_are_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(UnsupportedProblem, match=said) as caught:
        replace(sample(), **changes)
    assert "\n" not in str(caught.value)
    assert ";" in str(caught.value)  # the remedy


def test_weights_made_by_hand_are_written_in_our_format_only() -> None:
    one = replace(sample(), details={})
    with pytest.raises(UnsupportedProblem, match='put together by hand; give it format="cutekernels"'):
        one.tensors()
    ours = replace(one, format="cutekernels")
    config = {"quant_method": "cutekernels", "scheme": "int4_g32"}
    assert torch.equal(quant.read(ours.tensors(), config).dequantize(), one.dequantize())


@pytest.mark.parametrize(
    ("group", "k", "found"),
    [
        (32, 64, (32, 1)),
        (64, 100, (64, 1)),
        (128, 128, (0, 1)),
        (256, 1024, (128, 2)),
        (-1, 64, (0, 1)),
        (384, 400, (128, 3)),
    ],
)
def test_groups(group: int, k: int, found: tuple[int, int]) -> None:
    assert packed_group(group, k) == found


@pytest.mark.parametrize("group", [16, 48, 96, 192])
def test_other_groups_are_refused(group: int) -> None:
    with pytest.raises(UnsupportedProblem, match=f"not {group} of K=1024; quantize"):
        packed_group(group, 1024)
