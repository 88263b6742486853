"""bitsandbytes' nf4, written element by element from its definition."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import Tensor

from cutekernels import quant
from cutekernels.errors import UnsupportedProblem
from cutekernels.kernels.cute.parts.nf4 import NF4
from cutekernels.quant.formats import bitsandbytes
from tests.quant import golden

CROSSING = [(4, 96, 64), (3, 96, 64), (3, 224, 128), (2, 192, 128), (5, 32, 4096)]  # rows that end within a block
STATE = "quant_state.bitsandbytes__nf4"


def checkpoint(n: int, k: int, block: int, *, nested: bool, storage: torch.dtype = torch.uint8) -> dict[str, Tensor]:
    blocks = -(-n * k // block)
    flat = torch.randint(0, 16, (n * k,)).tolist()
    data = torch.tensor([(flat[i] << 4) | flat[i + 1] for i in range(0, n * k, 2)], dtype=torch.uint8)
    said: dict[str, Any] = {"quant_type": "nf4", "blocksize": block, "dtype": "bfloat16", "shape": [n, k]}
    tensors = {"weight": data.view(storage).reshape(-1, 1), "weight.quant_map": torch.tensor(NF4)}
    if nested:
        said |= {"nested_blocksize": 8, "nested_dtype": "float32", "nested_offset": 0.123456789}
        tensors["weight.absmax"] = torch.randint(0, 256, (blocks,), dtype=torch.uint8)
        tensors["weight.nested_absmax"] = torch.rand(-(-blocks // 8))
        tensors["weight.nested_quant_map"] = torch.linspace(-1, 1, 256)
    else:
        tensors["weight.absmax"] = torch.rand(blocks)
    tensors["weight." + STATE] = torch.tensor(list(json.dumps(said).encode()), dtype=torch.uint8)
    return tensors


def expected(tensors: dict[str, Tensor], n: int, k: int, block: int) -> Tensor:
    """``NF4[q] * absmax`` in fp32, element by element."""
    absmax = tensors["weight.absmax"]
    if "weight.nested_absmax" in tensors:
        table, outer = tensors["weight.nested_quant_map"], tensors["weight.nested_absmax"]
        offset = torch.tensor(0.123456789)
        absmax = torch.stack([table[int(q)] * outer[i // 8] + offset for i, q in enumerate(absmax)])
    values = torch.empty(n * k)
    data = tensors["weight"].flatten().view(torch.uint8).tolist()
    for i in range(n * k):
        q = data[i // 2] >> 4 if i % 2 == 0 else data[i // 2] & 15
        values[i] = NF4[q]
    return (values * absmax.repeat_interleave(block)[: n * k]).reshape(n, k)


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize(
    ("n", "k", "block"), [(1, 64, 64), (17, 128, 64), (3, 96, 32), (5, 256, 256), (4, 512, 256), *CROSSING]
)
def test_nf4(n: int, k: int, block: int, nested: bool) -> None:
    tensors = checkpoint(n, k, block, nested=nested)
    config = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    weight = quant.read(tensors, config)
    assert (weight.code, weight.dtype) == ("nf4", torch.bfloat16)
    values = expected(tensors, n, k, block)
    assert torch.equal(weight.dequantize(), values.bfloat16())
    assert torch.equal(weight.dequantize(torch.float32), values)
    golden.same(weight.tensors(), tensors)


@pytest.mark.parametrize("name", ["of_nibbles", "_absmax"])
def test_a_planted_bug_is_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Low nibble first, and scales of the neighbouring block."""
    if name == "_absmax":
        right = bitsandbytes._absmax
        monkeypatch.setattr(bitsandbytes, name, lambda *a: right(*a).roll(1))
    else:
        assemble = bitsandbytes.assemble
        monkeypatch.setattr(
            bitsandbytes,
            "assemble",
            lambda codes, *a, **o: assemble(codes.unflatten(1, (-1, 2)).flip(-1).flatten(1), *a, **o),
        )
    with pytest.raises(AssertionError):
        test_nf4(17, 128, 64, False)


def test_other_storage() -> None:
    tensors = checkpoint(4, 64, 64, nested=False, storage=torch.bfloat16)
    state = {name.removeprefix("weight."): tensor for name, tensor in tensors.items() if name != "weight"}
    weight = quant.from_bitsandbytes(tensors["weight"], state, dtype=torch.float16)
    golden.holds(weight, expected(tensors, 4, 64, 64).half(), tensors)


def _drop(name: str) -> Any:
    return lambda tensors: tensors.pop(name)


def _say(**changes: Any) -> Any:
    def change(tensors: dict[str, Tensor]) -> None:
        said = json.loads(bytes(tensors["weight." + STATE].tolist())) | changes
        tensors["weight." + STATE] = torch.tensor(list(json.dumps(said).encode()), dtype=torch.uint8)

    return change


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (_drop("weight.absmax"), "has absmax, and this one has"),
        (_drop("weight.quant_map"), "has quant_map, and this one has"),
        (lambda t: t.update(weight=t["weight"][:-1]), "has 256 bytes for shape \\(8, 64\\), not 255"),
        (lambda t: t.update({"weight.absmax": t["weight.absmax"][:-1]}), "absmax has shape \\(8,\\)"),
        (lambda t: t["weight.absmax"].fill_(float("nan")), "NaN or infinite"),
        (lambda t: t["weight.quant_map"].fill_(0), "sixteen values of nf4"),
        (lambda t: t["weight." + STATE].fill_(65), "is JSON with blocksize"),
        (_say(shape=[8]), "is JSON with blocksize"),
        (_say(shape=None), "is JSON with blocksize"),
        (_say(quant_type="fp4"), "says nf4"),
        (_say(shape=["x", "y"]), "says nf4"),
        (_say(dtype=[]), "says nf4"),
        (_say(blocksize=1e400), "says nf4"),
        (_say(blocksize=48), "blocks of 48 elements run on .* so that 32 divides K, which is 64"),
        (_say(shape=[4, 128, 1]), "is JSON with blocksize"),
        (_say(shape=[32, 16]), "blocks of 64 elements run on from row to row, .* 32 divides K, which is 16; quantize"),
    ],
)
def test_corrupt_layers_get_one_sentence(change: Any, said: str) -> None:
    tensors = checkpoint(8, 64, 64, nested=False)
    change(tensors)
    with pytest.raises(UnsupportedProblem, match=said) as caught:
        quant.read(tensors, {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"})
    assert "\n" not in str(caught.value)


def test_a_weight_that_is_not_quantized_yet() -> None:
    with pytest.raises(UnsupportedProblem, match="not quantized yet"):
        quant.from_bitsandbytes(torch.zeros(2, 2))
