"""``rope`` without a GPU: the kernel under Triton's interpreter, the declaration, the CPU path, the call path."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from cutekernels.errors import UnsupportedProblem
from cutekernels.ops.rope.api import rope
from cutekernels.ops.rope.op import ROPE, RopeProblem
from cutekernels.ops.shared import calls
from tests.compiled import half
from tests.interpreted import H200, kernel_tests, of_each_dtype
from tests.refusals import Calls, refused
from tests.rope import cases as rope_cases
from tests.rope.cases import CASES, KINDS, PLANTED, arrange, error_ratio, rows_of, table, truth, worst
from tests.traced import Graphs

# ---- the kernel, interpreted ----------------------------------------------------------------------------


INTERPRETED = half(CASES, r"[^4] interleaved=|inverse=|^inplace| i(32|64) ")
interpreted, test_kernel_numerics, test_a_planted_bug_is_caught = kernel_tests(
    rope_cases.__file__, INTERPRETED, PLANTED
)


def test_every_static_field_was_among_the_cases(interpreted: dict[str, dict[str, Any]]) -> None:
    problems = [RopeProblem.parse(interpreted[case]["problem"]) for case in INTERPRETED]
    assert {p.align for p in problems if p.layout == "rows"} == {2, 4, 8, 16}
    for name in ("dtype", "table", "interleaved", "inverse", "positions", "index", "layout"):
        seen = {getattr(p, name) for p in problems}
        assert len(seen) == len(RopeProblem.__dataclass_fields__[name].metadata["values"]), name


# ---- the declaration ------------------------------------------------------------------------------------


def test_there_are_few_configs() -> None:
    for text in ROPE.suite:
        assert 8 <= len(list(ROPE.valid(RopeProblem.parse(text), H200))) <= 80, text


def test_work_is_what_must_be_moved() -> None:
    problem = RopeProblem(2, 100, 32, 128, 64, 8)
    assert ROPE.work(problem).bytes == 2 * 2 * 2 * 100 * 40 * 128 + 2 * 4 * 100 * 32


@pytest.mark.parametrize(
    ("words", "rule"),
    [
        ("rotary=129", "in pairs, 2 to head_dim .*; it is 129 of 128"),
        ("rotary=130", "it is 130 of 128"),
        ("rotary=64 dtype=fp32 align=2", "one element of fp32"),
        ("rotary=64 dtype=fp32 table=same", "table=fp32, not same"),
        ("rotary=64 index=i32", "no index tensor"),
        ("rotary=72 align=16", "divides each run of channels, 72 of 128"),
        ("rotary=64 heads_q=65535", "end at 65535 in all; got 65535 [+] 1"),
    ],
)
def test_problems_that_are_none(words: str, rule: str) -> None:
    with pytest.raises(UnsupportedProblem, match=rule):
        RopeProblem.parse(f"batch=1 seq=1 heads_kv=1 head_dim=128 {words}" + " heads_q=1" * ("heads_q" not in words))


# ---- the function, on the CPU ---------------------------------------------------------------------------


@of_each_dtype
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_cpu_tensors_run_the_reference(dtype: torch.dtype, interleaved: bool, kind: str) -> None:
    q, k = arrange(kind, 2, 5, (3, 2), 24, dtype)
    cos, sin = table(9, 8)
    for positions in (None, 4, torch.tensor([4, 0]), torch.tensor([[3, 1, 8, 0, 0], [1, 2, 3, 4, 5]]).int()):
        results = rope(q, k, cos, sin, interleaved=interleaved, positions=positions)
        assert [r.dtype for r in results if r is not None] == [dtype] * 2
        start, places = (positions, None) if isinstance(positions, int) else (0, positions)
        assert worst(results, (q, k, cos, sin, places, start), interleaved=interleaved) <= 1
        assert all(r.is_contiguous() for r in results if r is not None)


def test_as_hugging_face_turns() -> None:
    """Its tables, of duplicated halves and gathered by position, and its formula, pairs of halves."""
    q, k = torch.randn(2, 7, 4, 16), torch.randn(2, 7, 2, 16)
    angles = torch.rand(2, 7, 8) * 6
    cos, sin = torch.cat((angles, angles), -1).cos(), torch.cat((angles, angles), -1).sin()

    def rotate_half(x: Tensor) -> Tensor:
        return torch.cat((-x[..., x.shape[-1] // 2 :], x[..., : x.shape[-1] // 2]), dim=-1)

    for c, s in ((cos, sin), (cos[:1], sin[:1])):
        results = rope(q, k, c, s)
        for result, x in zip(results, (q, k), strict=True):
            torch.testing.assert_close(result, x * c.unsqueeze(2) + rotate_half(x) * s.unsqueeze(2))


def test_q_alone() -> None:
    q, (cos, sin) = torch.randn(2, 5, 3, 16), table(5, 8)
    turned, none = rope(q, None, cos, sin)
    assert none is None
    assert torch.equal(turned, rope(q, q, cos, sin)[0])
    assert rope(q, None, cos, sin, inplace=True)[0] is q
    assert torch.equal(q, turned)


@pytest.mark.parametrize("shape", [(0, 5, 2, 8), (2, 0, 2, 8), (2, 5, 0, 8)], ids=str)
def test_nothing_to_turn(shape: tuple[int, ...]) -> None:
    q, (cos, sin) = torch.randn(shape), table(5, 4)
    turned = rope(q, torch.randn(*shape[:2], 1, 8), cos, sin)
    assert [t.shape for t in turned if t is not None] == [shape, (*shape[:2], 1, 8)]


@pytest.mark.parametrize("kind", ["dense", "joint", "heads first", "every other"])
def test_in_place(kind: str) -> None:
    (q, k), (cos, sin) = arrange(kind, 2, 5, (3, 2), 24, torch.float32), table(5, 8)
    expected = rope(q, k, cos, sin)
    turned = rope(q, k, cos, sin, inplace=True)
    assert turned[0] is q
    assert turned[1] is k
    assert all(torch.equal(a, b) for a, b in zip(turned, expected, strict=True) if a is not None and b is not None)


@refused
def test_refusals_say_the_rule() -> Calls:
    q, k, (cos, sin) = torch.randn(2, 5, 3, 16), torch.randn(2, 5, 1, 16), table(9, 8)
    wide = torch.cat((cos, cos), -1)[None, :5]
    far = torch.tensor([0, 5])
    return {
        r"q \(batch, seq, heads_q, head_dim\), .* got q \(5, 3, 16\)": lambda: rope(q[0], k[0], cos, sin),
        r"each extent the same .*, k \(2, 4, 1, 16\)": lambda: rope(q, k[:, :4], cos, sin),
        "takes k in float32; got torch.float64: convert": lambda: rope(q, k.double(), cos, sin),
        "takes bfloat16, float16, float32, float64; got torch.int32": lambda: rope(q.int(), k.int(), cos, sin),
        "takes cos in float32 or bfloat16; got torch.float16": lambda: rope(
            q.bfloat16(), k.bfloat16(), cos.half(), sin.half()
        ),
        r"cos \(9, 8\), sin \(8, 8\)": lambda: rope(q, k, cos, sin[:-1]),
        "of a head's 16": lambda: rope(q, k, *table(9, 9)),
        r"cos \(8,\), sin \(8,\)": lambda: rope(q, k, cos[0], sin[0]),
        "B or 1, S, R.*here S = 5": lambda: rope(q, k, wide[:, :4], wide[:, :4]),
        "neither positions nor interleaved": lambda: rope(q, k, wide, wide, interleaved=True),
        "fits neither positions": lambda: rope(q, k, wide, wide, positions=far),
        "beside positions": lambda: rope(q, k, wide, wide, positions=3),
        "positions 5 to 9 leave a table of 9 rows": lambda: rope(q, k, cos, sin, positions=5),
        "positions -1 to 3": lambda: rope(q, k, cos, sin, positions=-1),
        "positions 0 to 9 leave a table of 9 rows": lambda: rope(q, k, cos, sin, positions=far),
        "takes positions in int64 or int32": lambda: rope(q, k, cos, sin, positions=far.float()),
        r"positions \(batch, \[seq\]\), .* positions \(5,\)": lambda: rope(
            q, k, cos, sin, positions=torch.zeros(5).long()
        ),
        "no gradient for cos": lambda: rope(q, k, cos.clone().requires_grad_(), sin),
        "not differentiable": lambda: rope(q.clone().requires_grad_(), k, cos, sin, inplace=True),
        "overlap itself": lambda: rope(q[:1].expand(2, 5, 3, 16), k, cos, sin, inplace=True),
        "element upon element": lambda: rope(q, q[:, :, :1], cos, sin, inplace=True),
    }


def test_the_first_position_past_the_table_is_refused_before_a_launch() -> None:
    """On a GPU, whose kernel would give NaN: here tensors without data, which nothing else looks at."""
    q, (cos, sin) = torch.empty(2, 5, 3, 16, device="meta"), (t.to("meta") for t in table(9, 8))
    assert rope(q, None, cos, sin, positions=4)[0].shape == q.shape
    with pytest.raises(UnsupportedProblem, match="positions 5 to 9 leave a table of 9 rows"):
        rope(q, None, cos, sin, positions=5)
    with pytest.raises(UnsupportedProblem, match="positions 0 to 4 leave a table of 4 rows"):
        rope(q, None, cos[:4], sin[:4])


@pytest.mark.parametrize("interleaved", [False, True])
def test_gradients(interleaved: bool) -> None:
    cos, sin = table(4, 2, torch.float64)

    def turned(q: Tensor, k: Tensor) -> Any:
        return rope(q, k, cos, sin, interleaved=interleaved, positions=1)

    q, k = (torch.randn(2, 3, h, 6, dtype=torch.float64, requires_grad=True) for h in (2, 1))
    assert torch.autograd.gradcheck(turned, (q, k))
    assert torch.autograd.gradcheck(turned, (q, k.detach()))
    assert torch.autograd.gradgradcheck(turned, (q, k))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("gradient", [False, True])
def test_opcheck(gradient: bool) -> None:
    q, k = torch.randn(2, 5, 3, 16, requires_grad=gradient), torch.randn(2, 3, 5, 16).transpose(1, 2)
    cos, sin = table(9, 8)
    for positions in (None, torch.tensor([0, 3])):
        rest = (cos, sin, positions, False, False, 2 if positions is None else 0)
        torch.library.opcheck(torch.ops.cutekernels.rope.default, (q, k, *rest))
        if not gradient:
            torch.library.opcheck(torch.ops.cutekernels.rope_inplace.default, (q.clone(), k, *rest))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_traced_whole() -> None:
    """Tracing makes no graph break, in place or not, forward or backward, and one graph for every start."""
    graphs = Graphs()

    @torch.compile(fullgraph=True, backend=graphs.backend)
    def attend(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, start: int) -> Tensor:
        q, k = (t * 1 for t in (q, k))
        with torch.no_grad():
            copies = [t.clone() for t in (q, k)]
            rope(*copies, cos, sin, positions=start, inplace=True)
        turned, keys = rope(q, k, cos, sin, positions=start)
        assert keys is not None
        return (turned * keys).sum() + copies[0].sum()

    q, (cos, sin) = torch.randn(2, 3, 2, 8, requires_grad=True), table(40, 4)
    for start in (3, 7, 9, 11):
        result = attend(q, q.detach(), cos, sin, start)
        turned, keys = rope(q, q.detach(), cos, sin, positions=start)
        assert keys is not None
        torch.testing.assert_close(result, (turned * keys).sum() + turned.sum().detach())
    assert len(graphs.seen) <= 2, "recompiled for every start"
    assert graphs.ops() == ["rope_inplace", "rope"]
    result.backward()
    assert q.grad is not None


# ---- the GPU's path, on CPU tensors ---------------------------------------------------------------------


def run(*args: Any, inplace: bool = False, interleaved: bool = False) -> tuple[Tensor, ...]:
    *inputs, start = args
    results = tuple(inputs[:2]) if inplace else None
    return calls.run(ROPE, results, tuple(inputs), options=(interleaved, False), scalars=(start,))


def test_launch_poses_what_it_launches(launches: list[str]) -> None:
    q, k = arrange("joint", 2, 5, (3, 1), 24, torch.bfloat16)
    cos, sin = table(9, 8)
    args = (cos, sin, None, 2)
    expected = rope(q, k, cos, sin, positions=2)
    for got in (run(q, k, *args), run(q.transpose(1, 2).contiguous().transpose(1, 2), k, *args)):
        assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True) if b is not None)
    run(q, k[:, :, :0], *args)
    run(q[..., 1:21], k[..., 1:21], *args)
    run(q, k, *table(9, 8), torch.tensor([1, 2]), 0, interleaved=True)
    run(q, k, *table(5, 12, torch.bfloat16), torch.zeros(2, 5, dtype=torch.int32), 0, inplace=True)
    same = "rope batch=2 seq=5 heads_q=3 head_dim=24"
    assert launches[:2] == [f"{same} rotary=16 heads_kv=1"] * 2
    assert launches[-4:] == [
        "rope batch=2 seq=5 heads_q=3 head_dim=24 rotary=16",
        "rope batch=2 seq=5 heads_q=3 head_dim=20 rotary=16 heads_kv=1 align=2",
        f"{same} rotary=16 heads_kv=1 interleaved=1 positions=batch",
        f"{same} rotary=24 heads_kv=1 table=same positions=token index=i32 align=8",
    ]


def test_the_judge_sees_a_wrong_position() -> None:
    q, (cos, sin) = torch.randn(2, 5, 3, 16), table(9, 8)
    exact = truth(q, cos, sin, rows_of(2, 5, None, 0))
    assert error_ratio(rope(q, None, cos, sin)[0], *exact) <= 1
    assert error_ratio(rope(q, None, cos, sin, positions=1)[0], *exact) > 1000


@pytest.mark.parametrize(("dtype", "into"), [(torch.float16, torch.bfloat16), (torch.bfloat16, torch.float16)])
def test_autocast_to_the_other_half_changes_nothing(dtype: torch.dtype, into: torch.dtype) -> None:
    q, k, angles = torch.randn(2, 5, 3, 16).to(dtype), torch.randn(2, 5, 1, 16).to(dtype), torch.rand(9, 8)
    expected = rope(q, k, angles.cos(), angles.sin())
    with torch.autocast("cpu", dtype=into):
        assert all(map(torch.equal, rope(q, k, angles.cos(), angles.sin()), expected))
    with torch.autocast("cpu", dtype=into):
        rope(q, k, angles.cos(), angles.sin(), inplace=True)
    assert torch.equal(q, expected[0]) and torch.equal(k, expected[1])
