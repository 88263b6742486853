"""``nn.RotaryEmbedding``: frequencies and rotation of Hugging Face's module, tables, moves between types."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

pytest.importorskip("triton")

from cutekernels.errors import UnsupportedProblem
from cutekernels.nn import RotaryEmbedding
from cutekernels.ops.rope.api import rope

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def published(theta: float, width: int, scaling: dict[str, Any] | None) -> list[float]:
    """Frequency by frequency, as the papers and model cards define them."""
    found = []
    for i in range(width // 2):
        f = theta ** (-2 * i / width)
        if scaling is not None and scaling["rope_type"] == "linear":
            f /= scaling["factor"]
        elif scaling is not None:
            length, wave = scaling["original_max_position_embeddings"], 2 * math.pi / f
            low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
            if wave > length / low:
                f /= scaling["factor"]
            elif wave > length / high:
                smooth = (length / wave - low) / (high - low)
                f = (1 - smooth) * f / scaling["factor"] + smooth * f
        found.append(f)
    return found


@pytest.mark.parametrize(
    "scaling", [None, {"rope_type": "linear", "factor": 4.0}, LLAMA3], ids=["default", "linear", "llama3"]
)
@pytest.mark.parametrize("factor", [1.0, 0.5])
def test_frequencies(scaling: dict[str, Any] | None, factor: float) -> None:
    module = RotaryEmbedding(128, rope_theta=500000.0, partial_rotary_factor=factor, rope_scaling=scaling)
    exact = torch.tensor(published(500000.0, int(128 * factor), scaling))
    torch.testing.assert_close(module.inv_freq, exact, rtol=1e-5, atol=0.0)
    assert not module.state_dict()


def test_turns_as_hugging_face_does() -> None:
    module = RotaryEmbedding(16)
    q, k = torch.randn(2, 9, 3, 16), torch.randn(2, 9, 1, 16)

    def rotate_half(x: Tensor) -> Tensor:
        return torch.cat((-x[..., 8:], x[..., :8]), dim=-1)

    for positions in (None, 5, torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6, 5]]).expand(2, 9), torch.tensor([7, 0])):
        steps = torch.arange(9)
        rows = steps + (positions or 0) if not isinstance(positions, Tensor) else positions
        if isinstance(positions, Tensor) and positions.dim() == 1:
            rows = positions[:, None] + steps
        angles = rows[..., None].float() * module.inv_freq
        cos, sin = (f(torch.cat((angles, angles), -1)).unsqueeze(-2) for f in (torch.cos, torch.sin))
        for turned, x in zip(module(q, k, positions), (q, k), strict=True):
            torch.testing.assert_close(turned, x * cos + rotate_half(x) * sin)


def test_tables_grow_and_are_kept() -> None:
    module = RotaryEmbedding(8, max_positions=16)
    q = torch.randn(1, 4, 1, 8)
    module(q)
    first = module.tables()
    assert first[0].shape == (16, 4)
    assert module.tables()[0] is first[0]
    module(q, positions=60)
    assert module.tables()[0].shape == (64, 4)
    torch.testing.assert_close(module.tables()[0][:16], first[0])


def test_tables_of_fakes_are_not_kept() -> None:
    module, q = RotaryEmbedding(8), torch.randn(1, 4, 2, 8)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        module(mode.from_tensor(q))
    assert type(module(q)[0]) is torch.Tensor


def test_frequencies_stay_fp32() -> None:
    module = RotaryEmbedding(64)
    before = module.inv_freq.clone()
    module.to(torch.bfloat16)
    assert torch.equal(module.inv_freq, before)
    assert module.tables()[0].dtype == torch.float32
    q = torch.randn(1, 4, 2, 64).bfloat16()
    assert module(q)[0].dtype == torch.bfloat16


@pytest.mark.parametrize("made_on", ["meta", "cpu"])
def test_frequencies_are_there_after_to_empty(made_on: str) -> None:
    expected = RotaryEmbedding(8, rope_scaling=LLAMA3)
    with torch.device(made_on):
        module = RotaryEmbedding(8, rope_scaling=LLAMA3)
    module._apply(lambda t: torch.full_like(t, math.nan, device="cpu"))  # to_empty, with memory that shows
    assert torch.equal(module.inv_freq, expected.inv_freq)
    module.to_empty(device="cpu")
    assert torch.equal(module.inv_freq, expected.inv_freq)
    q = torch.randn(1, 4, 2, 8)
    assert torch.equal(module(q)[0], expected(q)[0])
    assert module.to("meta").inv_freq.is_meta


def test_in_place_and_differentiable_after_inference() -> None:
    module = RotaryEmbedding(8)
    q = torch.randn(1, 4, 2, 8)
    with torch.inference_mode():
        expected = module(q)[0].clone()
    x = q.clone().requires_grad_()
    turned = module(x)[0]
    turned.sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(turned.detach(), expected)
    assert module(q, inplace=True)[0] is q
    torch.testing.assert_close(q, expected)


@pytest.mark.parametrize(
    ("options", "rule"),
    [
        ({"head_dim": 7}, "in pairs"),
        ({"head_dim": 8, "partial_rotary_factor": 1.5}, "1.5 of 8 is 12"),
        ({"head_dim": 8, "rope_theta": 0.0}, "positive"),
        ({"head_dim": 8, "rope_scaling": {"rope_type": "yarn"}}, "one of default, linear, llama3; it is 'yarn'"),
        ({"head_dim": 8, "rope_scaling": {"type": "linear"}}, "needs factor, a positive number; it is None"),
        ({"head_dim": 8, "rope_scaling": LLAMA3 | {"high_freq_factor": 1.0}}, "above low_freq_factor"),
    ],
)
def test_refusals(options: dict[str, Any], rule: str) -> None:
    with pytest.raises(UnsupportedProblem, match=rule):
        RotaryEmbedding(**options)


def test_far_positions_build_no_long_table() -> None:
    module, q = RotaryEmbedding(8), torch.randn(1, 3, 2, 8)
    start = 2**20 + 5
    turned, _ = module(q, positions=start)
    angles = torch.outer(torch.arange(start, start + 3).float(), module.inv_freq)
    torch.testing.assert_close(turned, rope(q, None, angles.cos(), angles.sin())[0])
    assert module.tables()[0].shape[0] == 2048


@pytest.mark.parametrize("positions", [2**24, 10**9, 10**30, -1, True, 1.5])
def test_positions_out_of_range_are_refused(positions: object) -> None:
    with pytest.raises(UnsupportedProblem, match="positions"):
        RotaryEmbedding(8)(torch.randn(1, 3, 2, 8), positions=positions)


def test_tables_are_bounded() -> None:
    with pytest.raises(UnsupportedProblem, match="below 16777216"):
        RotaryEmbedding(8).tables(10**9)
    with pytest.raises(UnsupportedProblem, match="max_positions"):
        RotaryEmbedding(8, max_positions=10**9)


@pytest.mark.gpu
def test_on_a_gpu() -> None:
    module, q = RotaryEmbedding(128, max_positions=64), torch.randn(2, 9, 4, 128)
    expected = module(q)[0]
    turned = module.cuda()(q.cuda())[0]
    torch.testing.assert_close(turned.cpu(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("more", [{"rope_type": "default"}, LLAMA3])
def test_the_dictionary_of_transformers_5_holds_theta_and_the_share_that_turns(more: dict[str, Any]) -> None:
    found = RotaryEmbedding(16, rope_scaling={**more, "rope_theta": 5e5, "partial_rotary_factor": 0.5})
    expected = RotaryEmbedding(16, rope_theta=5e5, partial_rotary_factor=0.5, rope_scaling=more)
    assert (found.rope_theta, found.rotary) == (5e5, 8)
    assert torch.equal(found.inv_freq, expected.inv_freq)
    RotaryEmbedding(16, rope_theta=5e5, rope_scaling={**more, "rope_theta": 5e5})  # the same twice
    with pytest.raises(UnsupportedProblem, match=r"rope_theta=10000\.0 and rope_scaling 500000\.0: pass one"):
        RotaryEmbedding(16, rope_theta=10000.0, rope_scaling={**more, "rope_theta": 5e5})


def test_keys_that_mean_something_else_are_refused() -> None:
    with pytest.raises(UnsupportedProblem, match="rope_type is one of .*; it is 'yarn'"):
        RotaryEmbedding(16, rope_scaling={"rope_type": "yarn", "factor": 4.0, "beta_fast": 32})
    with pytest.raises(UnsupportedProblem, match="mrope_section is none of them"):
        RotaryEmbedding(16, rope_scaling={"rope_type": "default", "mrope_section": [2, 3, 3]})
