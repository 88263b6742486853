"""AWQ, GPTQ and packed compressed-tensors against checkpoints that were written element by element."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from cutekernels import quant
from cutekernels.errors import UnsupportedProblem
from cutekernels.quant import QuantizedWeight, assembly, layout
from cutekernels.quant.formats import awq, gptq, nibbles
from tests.quant import golden

COMPRESSED = [(1, 64, 32), (17, 100, -1), (100, 256, 64), (192, 256, 128), (3, 4096, 128)]
SHAPES = [(8, 64, 32), (24, 256, 64), (104, 256, 128), (192, 128, -1), (8, 4096, 128), (16, 512, 256), (64, 64, 128)]


@pytest.mark.parametrize(("n", "k", "group"), [*SHAPES, (8, 100, -1), (16, 100, 128), (16, 96, 32)])
@pytest.mark.parametrize("zeros", ["v2", "none"])
def test_awq(n: int, k: int, group: int, zeros: str) -> None:
    case = golden.case(n, k, group, zeros=zeros)
    tensors = golden.awq(case)
    weight = quant.from_awq(*tensors.values(), group)
    assert weight.shape == (n, k)
    assert weight.order is None
    assert (weight.zeros is None) == (zeros == "none")
    assert torch.equal(weight.dequantize(), case.values(torch.float16))
    assert torch.equal(weight.dequantize(torch.bfloat16), case.values(torch.bfloat16))
    golden.same(weight.tensors(), tensors)


@pytest.mark.parametrize(("n", "k", "group"), SHAPES)
@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("act_order", [False, True])
def test_gptq(n: int, k: int, group: int, version: int, act_order: bool) -> None:
    case = golden.case(n, k, group, zeros="all" if version == 1 else "v2", act_order=act_order)
    tensors = golden.gptq(case, version)
    *three, g_idx = tensors.values()
    weight = quant.from_gptq(*three, group, g_idx, version)
    assert (weight.order is not None) == (act_order and 0 < group < k)
    golden.holds(weight, case.values(torch.float16), tensors)


def test_gptq_without_g_idx_and_with_zeros_of_8() -> None:
    case = golden.case(16, 128, 32, zeros="none")
    tensors = golden.gptq(case, 1)
    assert set(tensors["qzeros"].flatten().tolist()) == {0x77777777}
    del tensors["g_idx"]
    weight = quant.from_gptq(*tensors.values(), 32)
    assert weight.zeros is None
    golden.holds(weight, case.values(torch.float16), tensors)


def test_the_packed_weight_is_the_contract_s_with_act_order() -> None:
    """``packed[:, j] * x[order[j]]``, groups in runs of the packed columns."""
    case = golden.case(8, 128, 32, zeros="all", act_order=True)
    weight = _gptq(case)
    assert weight.order is not None
    assert weight.zeros is not None
    assert weight.order.dtype == torch.int32
    codes = layout.unpack(weight.packed, "int4", 8, 128)
    x = torch.randn(128, dtype=torch.float64)
    sums = torch.zeros(8, dtype=torch.float64)
    for j in range(128):
        row = j // 32
        value = weight.scales[row, :8].double() * (codes[:, j].double() - weight.zeros[row, :8].double())
        sums += value * x[weight.order[j]]
    exact = torch.tensor(
        [[float(case.s[g, n]) * (case.q[n][k] - case.z[g][n]) for k, g in enumerate(case.g_idx)] for n in range(8)],
        dtype=torch.float64,
    )
    torch.testing.assert_close(sums, exact @ x)


def _gptq(case: golden.Case) -> QuantizedWeight:
    tensors = golden.gptq(case, 1)
    return quant.from_gptq(tensors["qweight"], tensors["qzeros"], tensors["scales"], 32, tensors["g_idx"])


@pytest.mark.parametrize(("n", "k", "group"), COMPRESSED)
@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_compressed_tensors(n: int, k: int, group: int, symmetric: bool, dtype: torch.dtype) -> None:
    case = golden.case(n, k, group, zeros="none" if symmetric else "v2")
    case.s = case.s.to(dtype)
    tensors = golden.packed(case, symmetric=symmetric)
    strategy = "channel" if group == -1 else "group"
    args = {"num_bits": 4, "type": "int", "strategy": strategy, "group_size": group, "symmetric": symmetric}
    weight = quant.from_compressed_tensors(tensors, args)
    assert weight.dtype == dtype
    golden.holds(weight, case.values(dtype), tensors)


def test_groups_have_a_size_or_are_all_of_k() -> None:
    three, four = golden.gptq(golden.case(24, 96, 96, zeros="all"), 1), golden.awq(golden.case(24, 96, 96, zeros="v2"))
    assert quant.from_gptq(three["qweight"], three["qzeros"], three["scales"], -1).shape == (24, 96)
    assert quant.from_awq(*four.values(), -1).shape == (24, 96)
    for group in (0, -5, 32.0, True, "32"):
        with pytest.raises(UnsupportedProblem, match="from 1, or -1 for all of K, not"):
            quant.from_gptq(three["qweight"], three["qzeros"], three["scales"], group)  # type: ignore[arg-type]
        with pytest.raises(UnsupportedProblem, match="from 1, or -1 for all of K, not"):
            quant.from_awq(*four.values(), group)  # type: ignore[arg-type]


def test_compressed_tensors_with_act_order() -> None:
    case = golden.case(17, 256, 64, zeros="v2", act_order=True)
    tensors = {**golden.packed(case, symmetric=False), "weight_g_idx": torch.tensor(case.g_idx, dtype=torch.int32)}
    weight = quant.from_compressed_tensors(tensors, {"num_bits": 4, "strategy": "group", "group_size": 64})
    assert weight.order is not None
    golden.holds(weight, case.values(torch.float16), tensors)


def test_compressed_tensors_with_zeros_that_are_not_packed() -> None:
    case = golden.case(17, 128, 32, zeros="v2")
    zero = (torch.tensor(case.z) - 8).to(torch.int8).t().contiguous()
    tensors = golden.packed(case, symmetric=True) | {"weight_zero_point": zero}
    weight = quant.from_compressed_tensors(tensors, {"num_bits": 4, "strategy": "group", "group_size": 32})
    golden.holds(weight, case.values(torch.float16), tensors)
    zero[3, 2] = -9
    with pytest.raises(UnsupportedProblem, match="-8 to 7"):
        quant.from_compressed_tensors(tensors, {"num_bits": 4, "strategy": "group", "group_size": 32})


def test_compressed_tensors_of_eight_bits_packed() -> None:
    q = torch.randint(-128, 128, (5, 102), dtype=torch.int8)
    stored = torch.nn.functional.pad(q.int() + 128, (0, 2)).reshape(5, 26, 4).tolist()
    table = [[sum(b << (8 * i) for i, b in enumerate(four)) for four in row] for row in stored]
    unsigned = torch.tensor(table, dtype=torch.int64)
    words = torch.where(unsigned >= 1 << 31, unsigned - (1 << 32), unsigned).to(torch.int32)
    scale = torch.rand(5, 1).bfloat16()
    tensors = {"weight_packed": words, "weight_scale": scale, "weight_shape": torch.tensor([5, 102])}
    weight = quant.from_compressed_tensors(tensors, {"num_bits": 8, "strategy": "channel"})
    assert weight.code == "int8"
    golden.holds(weight, (q.double() * scale.double()).bfloat16(), tensors)


def test_compressed_tensors_with_one_scale() -> None:
    case = golden.case(9, 64, -1, zeros="none")
    case.s = case.s[:, :1].expand(1, 9)
    tensors = golden.packed(case, symmetric=True) | {"weight_scale": case.s[0, :1].clone()}
    weight = quant.from_compressed_tensors(tensors, {"num_bits": 4, "strategy": "tensor"})
    golden.holds(weight, case.values(torch.float16), tensors)


def test_padding_is_worth_nothing() -> None:
    """Rows beyond N have scale 0, columns beyond K the code of their zero (15 where that is 16)."""
    case = golden.case(8, 72, 32, zeros="all")
    weight = _awq_like(case)
    assert not weight.scales[:, 8:].any()
    codes = layout.unpack(weight.packed, "int4", 64, 128)
    assert codes[:8, 72:].tolist() == [[min(z, 15)] * 56 for z in case.z[-1]]


def _awq_like(case: golden.Case) -> QuantizedWeight:
    return assembly.assemble(
        torch.tensor(case.q, dtype=torch.uint8),
        "int4",
        case.s,
        group=32,
        zeros=torch.tensor(case.z, dtype=torch.uint8),
        dtype=torch.float16,
        format="cutekernels",
        details={},
    )


# Planted bugs. Each reader agrees with its golden checkpoint, and with a bug it does not.


def _awq_agrees() -> bool:
    case = golden.case(24, 256, 64, zeros="v2", seed=1)
    return torch.equal(quant.from_awq(*golden.awq(case).values(), 64).dequantize(), case.values(torch.float16))


def _gptq_agrees() -> bool:
    case = golden.case(24, 256, 64, zeros="all", act_order=True, seed=2)
    tensors = golden.gptq(case, 1)
    weight = gptq.from_gptq(tensors["qweight"], tensors["qzeros"], tensors["scales"], 64, tensors["g_idx"])
    return torch.equal(weight.dequantize(), case.values(torch.float16))


def _swapped_nibbles(words: Tensor) -> Tensor:
    nibbles = words.contiguous().view(torch.uint8)
    return torch.stack((nibbles >> 4, nibbles & 15), dim=-1).reshape(*words.shape, 8)


def _with(change: Callable[[dict[str, Any]], None]) -> Callable[..., QuantizedWeight]:
    """``assemble`` on changed arguments."""

    def assemble(codes: Tensor, code: str, scales: Tensor, **options: Any) -> QuantizedWeight:
        options |= {"codes": codes, "scales": scales}
        change(options)
        return assembly.assemble(options.pop("codes"), code, options.pop("scales"), **options)

    return assemble


def _edge(options: dict[str, Any]) -> None:
    """The first column of each group counts to the one before."""
    options["codes"] = options["codes"].roll(-1, 1)


BUGS: dict[str, tuple[str, object]] = {
    "nibble order": ("of_words", _swapped_nibbles),
    "zero off by one": ("assemble", _with(lambda o: o.update(zeros=o["zeros"] + 1))),
    "zeros of version 2": ("assemble", _with(lambda o: o.update(zeros=(o["zeros"] - 1).clamp(min=0, max=15)))),
    "swapped scale rows": ("assemble", _with(lambda o: o.update(scales=o["scales"].flip(0)))),
    "swapped zero rows": ("assemble", _with(lambda o: o.update(zeros=o["zeros"].flip(0)))),
    "scales of neighbouring rows": ("assemble", _with(lambda o: o.update(scales=o["scales"].roll(1, 1)))),
    "group edge": ("assemble", _with(_edge)),
    "group of half the size": ("assemble", _with(lambda o: o.update(group=32, **_doubled(o)))),
}


def _doubled(options: dict[str, Any]) -> dict[str, Any]:
    """Groups of 32 with the scales of the groups of 64 cycled, as a wrong division would find them."""
    return {name: options[name].repeat(2, 1) for name in ("scales", "zeros")}


@pytest.mark.parametrize("bug", sorted(BUGS))
@pytest.mark.parametrize("reader", [awq, gptq])
def test_a_planted_bug_is_seen(bug: str, reader: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    agrees = _awq_agrees if reader is awq else _gptq_agrees
    assert agrees()
    name, value = BUGS[bug]
    monkeypatch.setattr(reader, name, value)
    assert not agrees()


def test_a_wrong_order_of_awq_s_columns_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(awq, "NIBBLE", awq.ORDER)
    assert not _awq_agrees()


def test_a_forgotten_order_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gptq, "order_of", lambda *_, **__: None)
    assert not _gptq_agrees()


def test_a_group_edge_in_dequantize_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    spread = QuantizedWeight._spread
    monkeypatch.setattr(QuantizedWeight, "_spread", lambda *args: spread(*args).roll(1, 1))
    assert not _awq_agrees()


def test_words_and_nibbles() -> None:
    words = torch.tensor([[0x76543210, -1]], dtype=torch.int32)
    assert nibbles.of_words(words).tolist() == [[[0, 1, 2, 3, 4, 5, 6, 7], [15] * 8]]
    assert torch.equal(nibbles.to_words(nibbles.of_words(words)), words)
