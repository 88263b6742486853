"""GEMMs launched by addresses: which they are, what their kernels are told, and that the warm path tells the same."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import cutekernels as ck
from cutekernels import gpu, torch_names
from cutekernels.errors import UnsupportedProblem
from cutekernels.ops.products import api as matmul
from cutekernels.ops.products.dense import GEMM, SCHEDULES, AddressedLaunch
from cutekernels.ops.shared import paths
from cutekernels.ops.shared.paths import Call
from cutekernels.ops.shared.strides import pairs

BF16 = torch.bfloat16
H200 = gpu.lookup("h200")
STREAM = 7000


def posed(out: Tensor, a: Tensor, b: Tensor) -> Any:
    return GEMM.problem(out, a, b, None, None, activation="none", accumulate="fp32")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("m=64 n=64 k=64", True),
        ("m=64 n=64 k=64 activation=silu a_major=m", True),
        ("m=64 n=64 k=64 c=n", False),
        ("m=64 n=64 k=64 bias=same", True),
        ("m=64 n=64 k=64 bias=fp32 a_align=1", True),
        ("m=64 n=64 k=64 batch=3 batched=1", False),
        ("m=64 n=64 k=64 wide=1", False),
    ],
)
def test_which_kernels_take_addresses(text: str, expected: bool) -> None:
    p = GEMM.Problem.parse(text)
    assert p.addressed is expected
    assert not SCHEDULES[GEMM.default(p, H200).body].shares_tiles(GEMM.default(p, H200))


def test_shared_tiles_take_tensors() -> None:
    p = GEMM.Problem.parse("m=16 n=256 k=8192 b_major=k")
    shared = [c for c in GEMM.valid(p, H200) if c.split_k > 1]
    by_workspace = {c.body: SCHEDULES[c.body].shares_tiles(c) for c in shared}
    assert by_workspace == {"skinny": True, "skinny_warpgroup": False}  # whose splits meet in a cluster


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[Any, ...]]]:
    """The arguments of each kernel call."""
    monkeypatch.setattr(torch_names, "current_stream", lambda device: STREAM)
    monkeypatch.setattr(paths, "_current_device", lambda: -1)
    paths.forget()
    yield []
    paths.forget()


def launch_of(told: list[tuple[Any, ...]], out: Tensor, a: Tensor, b: Tensor) -> AddressedLaunch:
    return AddressedLaunch(lambda *args: told.append(args), posed(out, a, b).along)


def matrix(rows: int, columns: int, along: int, pitch: int) -> Tensor:
    """(rows, columns) with extent ``along`` contiguous."""
    if along == 1:
        return torch.randn(rows, pitch, dtype=BF16)[:, :columns]
    return torch.randn(columns, pitch, dtype=BF16).t()[:rows]


@pytest.mark.parametrize("along_out", [0, 1])
@pytest.mark.parametrize("along_a", [0, 1])
@pytest.mark.parametrize("along_b", [0, 1])
def test_a_kernel_is_told_addresses_extents_and_pitches(
    told: list[tuple[Any, ...]], along_out: int, along_a: int, along_b: int
) -> None:
    out, a, b = matrix(8, 24, along_out, 40), matrix(8, 16, along_a, 48), matrix(16, 24, along_b, 56)
    launch_of(told, out, a, b)(out, a, b, None, None, 0.5, 0.0)
    assert told == [(out.data_ptr(), a.data_ptr(), b.data_ptr(), None, 8, 24, 16, 40, 48, 56, 0.5, 0.0, STREAM)]


def test_a_bias_is_told_behind_b(told: list[tuple[Any, ...]]) -> None:
    a, b, out = matrix(8, 16, 1, 48), matrix(16, 24, 0, 16), torch.empty(8, 24, dtype=BF16)
    bias = torch.randn(24, dtype=BF16)
    launch = launch_of(told, out, a, b)
    launch(out, a, b, None, bias, 0.5, 0.0)
    fire, rest = launch.settle(out, a, b, True), (("none", "fp32"), (0.5, 0.0), None)
    inputs = (a, b, None, bias)
    matmul.FUSED_CALLS.add(Call.of(launch, inputs, (), pairs(1, (out, *inputs)), fire), ((out,), inputs, *rest))
    ck.gemm(a, b, bias=bias, alpha=0.5, out=out)
    addresses = [t.data_ptr() for t in (out, a, b, bias)]
    assert told == [(*addresses, 8, 24, 16, 24, 48, 16, 0.5, 0.0, STREAM)] * 3


def test_a_stride_that_is_never_taken_is_not_told(told: list[tuple[Any, ...]]) -> None:
    a = torch.randn(64, dtype=BF16).as_strided((1, 16), (2**40, 1))
    b, out = torch.randn(16, 24, dtype=BF16), torch.empty(1, 24, dtype=BF16)
    launch_of(told, out, a, b)(out, a, b, None, None, 1.0, 0.0)
    assert told[0][4:10] == (1, 24, 16, 0, 0, 24)


def test_the_warm_path_tells_what_the_launch_tells(told: list[tuple[Any, ...]]) -> None:
    """With out and without, through the same buffers and through others; other operands are other calls."""
    a, b, out = matrix(8, 16, 1, 48), matrix(16, 24, 0, 16), torch.empty(8, 24, dtype=BF16)
    launch = launch_of(told, out, a, b)
    fire, rest = launch.settle(out, a, b, False), (("none", "fp32"), (1.0, 0.0), None)
    matmul.CALLS.add(Call.of(launch, (a, b), (), pairs(1, (out, a, b)), fire), ((out,), (a, b), *rest))
    matmul.CALLS.add(Call.of(launch, (a, b), (out,), (), fire), (None, (a, b), *rest))
    told.clear()
    others = matrix(8, 16, 1, 48), torch.empty(8, 24, dtype=BF16)
    for left, target in ((a, out), (a, out), others, (a, None)):
        version = out._version
        found = ck.gemm(left, b, alpha=0.5, out=target)
        assert [args[:7] for args in told] == [(found.data_ptr(), left.data_ptr(), b.data_ptr(), None, 8, 24, 16)]
        told.clear()
        if target is not None:
            assert found is target
            assert out._version == version + (target is out)
    launch(out, a, b, None, None, 0.5, 0.0)
    expected = told.pop()
    ck.gemm(a, b, alpha=0.5, out=out)
    assert told.pop() == expected
    ck.gemm(a[:4], b, out=torch.empty(4, 24, dtype=BF16))  # on a CPU: computed by the reference
    ck.gemm(a.half(), b.half(), out=out.half())
    with pytest.raises(UnsupportedProblem, match="takes b in bfloat16; got torch.float16"):
        ck.gemm(a, b.half(), out=out)
    with pytest.raises(UnsupportedProblem, match="overlaps"):
        ck.gemm(a, b, out=a.as_strided((8, 24), (24, 1)))
    with pytest.raises(UnsupportedProblem, match="needs c"):  # no key and no guard knows of beta
        ck.gemm(a, b, beta=2.0, out=out)
    assert not told
