"""``rope`` on a GPU: numerics against fp64, awkward memory, streams, graphs, tracing, gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from cutekernels import rope
from cutekernels.errors import UnsupportedProblem
from cutekernels.ops.rope.op import ROPE, RopeProblem
from tests.on_gpu import computed, drawn, needs_memory, normal, traced
from tests.rope.cases import DTYPES, error_ratio, rows_of, table, truth, worst

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("one_seed")]

AWKWARD = [
    "batch=1 seq=1 heads_q=1 head_dim=2 rotary=2 heads_kv=1 align=2",
    "batch=5 seq=9 heads_q=7 head_dim=33 rotary=14 align=2 positions=token",
    "batch=2 seq=33 heads_q=3 head_dim=96 rotary=96 heads_kv=2 interleaved=1 dtype=fp32 positions=batch",
    "batch=1 seq=40 heads_q=2 head_dim=600 rotary=528 heads_kv=70 dtype=fp16",
    "batch=3 seq=11 heads_q=4 head_dim=40 rotary=32 heads_kv=4 interleaved=1 layout=strided inverse=1",
    "batch=300 seq=1 heads_q=12 head_dim=64 rotary=64 heads_kv=2 positions=batch index=i32 table=same",
]


def right(results: Any, q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, positions: Any = None) -> bool:
    start, places = (positions, None) if isinstance(positions, int) else (0, positions)
    if k is None:
        results, k = (*results[:1], q[:, :, :0]), q[:, :, :0]
    return worst(results, (q, k, cos, sin, places, start)) <= 1


# ---- kernels --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", [*ROPE.suite, *AWKWARD])
def test_every_suite_with_default_and_random_configs(text: str) -> None:
    problem = RopeProblem.parse(text)
    options = {"interleaved": problem.interleaved, "inverse": problem.inverse}
    args = ROPE.sample(problem, "cuda", 11)
    for config in drawn(ROPE, problem, 5, text):
        results = computed(ROPE, problem, config, args)
        assert ROPE.problem(*results, *args[:-1], **options).static() == problem.static()
        ratio = worst(results, args, **options)
        assert ratio <= 1, f"[{problem}] [{config}] is off by {ratio:.3g} tolerances"


def test_as_exact_as_torch_in_fp32() -> None:
    q, (cos, sin) = normal(2, 256, 8, 128, dtype=torch.float32) * 8, table(256, 64, device="cuda")
    exact, magnitude = truth(q, cos, sin, rows_of(2, 256, None, 0).cuda())
    turned, _ = rope(q, None, cos, sin)
    c, s = cos[:, None], sin[:, None]
    a, b = q.chunk(2, -1)
    torchs = torch.cat((a * c - b * s, b * c + a * s), -1)
    ours, theirs = (((t.double() - exact).abs() / magnitude.clamp_min(1e-30)).max() for t in (turned, torchs))
    assert ours <= 2 * theirs


# ---- positions ------------------------------------------------------------------------------------------


def test_positions_of_every_kind() -> None:
    q, k, (cos, sin) = normal(4, 9, 5, 64), normal(4, 9, 1, 64), table(131072, 32, device="cuda")
    starts = torch.tensor([0, 131063, 7, 70000], device="cuda")
    each = torch.randint(0, 131072, (4, 9), device="cuda")
    for positions in (None, 0, 131063, starts, starts.int(), each, each.int(), each.t().contiguous().t(), each[0, :4]):
        assert right(
            rope(q, k, cos, sin, positions=positions),
            q,
            k,
            cos,
            sin,
            positions or 0 if positions is None else positions,
        )


def test_positions_outside_of_the_table_are_nan_and_never_read() -> None:
    whole = torch.full((3000, 32), 3.0e38, device="cuda")
    cos, sin = whole[1000:1010], whole[1500:1510]
    cos[:], sin[:] = table(10, 32, device="cuda")
    q = normal(2, 4, 3, 80)
    each = torch.tensor([[0, -1, 9, 10], [1 << 40, 3, -(1 << 40), 1 << 62]], device="cuda")
    turned, _ = rope(q, None, cos, sin, positions=each)
    legal = (each >= 0) & (each < 10)
    exact = truth(q, cos, sin, each.where(legal, 0))
    assert turned[~legal][..., :64].isnan().all()
    assert torch.equal(turned[..., 64:], q[..., 64:])
    assert error_ratio(turned[legal], exact[0][legal], exact[1][legal]) <= 1


def test_hugging_face_s_tables() -> None:
    q, k, angles = normal(2, 7, 4, 64), normal(2, 7, 2, 64), torch.rand(2, 7, 32, device="cuda") * 6
    cos, sin = (f(torch.cat((angles, angles), -1)).bfloat16() for f in (torch.cos, torch.sin))
    for c, s in ((cos, sin), (cos[:1], sin[:1])):
        for result, x in zip(rope(q, k, c, s), (q, k), strict=True):
            for entry in range(2):
                at = entry if c.shape[0] > 1 else 0
                rows = torch.arange(7, device="cuda")[None]
                exact = truth(x[entry : entry + 1], c[at, :, :32].float(), s[at, :, :32].float(), rows)
                assert result is not None
                assert error_ratio(result[entry : entry + 1], *exact) <= 1


# ---- memory ---------------------------------------------------------------------------------------------


def test_any_strides() -> None:
    cos, sin = table(60, 32, device="cuda")
    joint = normal(3, 50, (8 + 2 * 2) * 64).unflatten(-1, (-1, 64))
    columns = normal(3, 64, 4, 64).transpose(1, 3)  # of channels
    for q, k in [
        (joint[:, :, :8], joint[:, :, 8:10]),
        (joint[:, 7:31, :8], joint[:, 7:31, 8:10]),
        (normal(2, 8, 33, 64).transpose(1, 2), normal(2, 2, 33, 64).transpose(1, 2)),
        (columns[:, :30], columns[:, 30:60, :1]),
        (normal(1, 33, 1, 64).expand(4, 33, 5, 64), normal(4, 33, 2, 128)[..., ::2]),
        (normal(1, 1, 1, 1).expand(2, 9, 3, 64), normal(2, 9, 3, 66)[..., 1:65]),
        (normal(2, 9, 3, 65)[..., 1:], normal(2, 9, 3, 65)[..., :64]),
    ]:
        assert right(rope(q, k, cos, sin), q, k, cos, sin), (q.stride(), k.stride())
    wide_cos, wide_sin = table(60, 64, device="cuda")
    for c, s in [
        (wide_cos[:, ::2], wide_sin[:, ::2]),
        (wide_cos[:, 1:33], wide_sin[:, 1:33]),
        (cos.t().contiguous().t(), sin),
    ]:
        q = normal(2, 9, 3, 64)
        assert right(rope(q, None, c, s), q, None, c, s)


@pytest.mark.parametrize("rotary", [128, 64, 36])
def test_in_place(rotary: int) -> None:
    cos, sin = table(60, rotary // 2, device="cuda")
    joint = normal(3, 50, 12, 128)
    before = joint.clone()
    q, k = joint[:, :, :8], joint[:, :, 8:10]
    expected, version = rope(q, k, cos, sin, positions=4), q._version
    assert rope(q, k, cos, sin, positions=4, inplace=True) == (q, k)
    for a, b in zip((q, k), expected, strict=True):
        assert torch.equal(a, b)
    assert torch.equal(joint[:, :, 10:], before[:, :, 10:])
    assert q._version > version
    with pytest.raises(UnsupportedProblem, match="element upon element"):
        rope(q, q[:, :, 1:3], cos, sin, inplace=True)


@pytest.mark.parametrize("shape", [(0, 3, 2, 8), (2, 0, 2, 8), (2, 3, 0, 8)], ids=str)
def test_empty(shape: tuple[int, ...]) -> None:
    q, k, (cos, sin) = normal(*shape), normal(*shape[:2], 1, 8), table(3, 4, device="cuda")
    turned, keys = rope(q, k, cos, sin)
    assert turned.shape == shape
    assert right((turned, keys), q, k, cos, sin)


@pytest.mark.slow
def test_more_than_two_billion_elements() -> None:
    needs_memory(24)
    cos, sin = table(131072, 64, device="cuda")
    q = normal(4, 131072, 33, 128)
    turned, _ = rope(q, None, cos, sin)
    for entry, begin in ((0, 0), (3, 131072 - 200)):
        part = (slice(entry, entry + 1), slice(begin, begin + 200))
        rows = torch.arange(begin, begin + 200, device="cuda")[None]
        assert error_ratio(turned[part], *truth(q[part], cos, sin, rows)) <= 1
    # Heads that are far apart: the offset of a head alone passes 2^31.
    far = q.view(-1)[: (1 << 31) + 64 * 128].as_strided((1, 64, 3, 128), (0, 128, 1 << 30, 1))
    assert right(rope(far, None, cos, sin), far, None, cos, sin)
    channels = q.view(-1)[: (1 << 31) + 64].as_strided((1, 8, 2, 4), (0, 8, 2, 716_000_000))
    assert right(rope(channels, None, cos[:, :2], sin[:, :2]), channels, None, cos[:, :2], sin[:, :2])


# ---- launches -------------------------------------------------------------------------------------------


def test_captured_in_a_graph() -> None:
    q, k, (cos, sin) = normal(4, 1, 8, 128), normal(4, 1, 2, 128), table(64, 64, device="cuda")
    positions = torch.zeros(4, device="cuda", dtype=torch.long)
    keys = k.clone()
    rope(q, k, cos, sin, positions=positions)
    rope(q.clone(), keys, cos, sin, positions=positions, inplace=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        turned = rope(q, k, cos, sin, positions=positions)
        rope(q.clone(), keys, cos, sin, positions=positions, inplace=True)
    for step in (5, 63):
        positions.fill_(step)
        q.normal_()
        keys.copy_(k)
        graph.replay()
        assert right(turned, q, k, cos, sin, positions)
        assert torch.equal(keys, turned[1])


# ---- gradients and tracing ------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("arrangement", ["dense", "expanded gradient", "heads first"])
def test_gradients(dtype: torch.dtype, interleaved: bool, arrangement: str) -> None:
    cos, sin = table(40, 24, device="cuda")
    q, k = (normal(2, h, 33, 64, dtype=dtype).transpose(1, 2).detach() for h in (5, 2))
    if arrangement != "heads first":
        q, k = q.contiguous(), k.contiguous()
    q.requires_grad_()
    k.requires_grad_()
    results = rope(q, k, cos, sin, interleaved=interleaved, positions=3)
    douts = [torch.randn_like(r) for r in results if r is not None]
    if arrangement == "expanded gradient":
        douts = [d[:1, :1, :1, :1].expand_as(d) for d in douts]
    torch.autograd.backward(results, douts)
    args = (*douts, cos, sin, None, 3)
    assert worst((q.grad, k.grad), args, interleaved=interleaved, inverse=True) <= 1


@traced
def test_compiled_whole() -> None:
    @torch.compile(fullgraph=True)
    def turned(joint: Tensor, cos: Tensor, sin: Tensor, start: int) -> tuple[Tensor, Tensor]:
        heads = (joint + 1).unflatten(-1, (6, 64))
        q, k = rope(heads[:, :, :4], heads[:, :, 4:5], cos, sin, positions=start)
        assert k is not None
        q = q.clone()
        rope(q, None, cos, sin, positions=start, inplace=True)
        return q, k

    joint, (cos, sin) = normal(2, 33, 6 * 64), table(64, 32, device="cuda")
    for start in (0, 3, 5):
        got = turned(joint, cos, sin, start)
        heads = (joint + 1).unflatten(-1, (6, 64))
        q, k = rope(heads[:, :, :4], heads[:, :, 4:5], cos, sin, positions=start)
        assert torch.equal(got[1], k)
        assert torch.equal(got[0], rope(q, None, cos, sin, positions=start)[0])


@traced
def test_compiled_gradient() -> None:
    @torch.compile(fullgraph=True)
    def loss(q: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return (rope(q, None, cos, sin)[0] * 2).sum()

    q, (cos, sin) = normal(2, 33, 3, 64, dtype=torch.float32).requires_grad_(), table(64, 32, device="cuda")
    loss(q, cos, sin).backward()
    assert q.grad is not None
    twos = torch.full_like(q, 2.0).detach()
    assert worst((q.grad, twos[:, :, :0]), (twos, twos[:, :, :0], cos, sin, None, 0), inverse=True) <= 1


@traced
def test_opcheck() -> None:
    q, k, (cos, sin) = normal(2, 9, 3, 64).requires_grad_(), normal(2, 9, 1, 64), table(64, 32, device="cuda")
    rest = (cos, sin, None, False, False, 2)
    torch.library.opcheck(torch.ops.cutekernels.rope.default, (q, k, *rest))
    torch.library.opcheck(torch.ops.cutekernels.rope_inplace.default, (q.detach(), k, *rest))
