"""``kv_append`` without a GPU: the kernel under Triton's interpreter, the declaration, the CPU path, the call path."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from cutekernels import verify
from cutekernels.errors import UnsupportedProblem
from cutekernels.ops.kv_append.api import kv_append
from cutekernels.ops.kv_append.op import KV_APPEND, LOST, KvAppendProblem
from cutekernels.ops.shared import calls
from tests.compiled import half
from tests.interpreted import H200, kernel_tests
from tests.kv_append import cases as kv_append_cases
from tests.kv_append.cases import CASES, PLANTED, judge, posed, right
from tests.refusals import Calls, refused
from tests.rope.cases import table

# ---- the kernel, interpreted ----------------------------------------------------------------------------


INTERPRETED = half(CASES, r"interleaved=|^fp8 [\d.e-]+ |^fp8 whole")
interpreted, test_kernel_numerics, test_a_planted_bug_is_caught = kernel_tests(
    kv_append_cases.__file__, INTERPRETED, PLANTED, correct=right
)


def test_every_static_field_was_among_the_cases(interpreted: dict[str, dict[str, Any]]) -> None:
    problems = [KvAppendProblem.parse(interpreted[case]["problem"]) for case in INTERPRETED]
    for name in (n for n, f in KvAppendProblem.__dataclass_fields__.items() if "values" in f.metadata):
        seen = {getattr(p, name) for p in problems}
        assert len(seen) == len(KvAppendProblem.__dataclass_fields__[name].metadata["values"]), name


# ---- the declaration ------------------------------------------------------------------------------------


def test_there_are_few_configs() -> None:
    for text in KV_APPEND.suite:
        assert 5 <= len(list(KV_APPEND.valid(KvAppendProblem.parse(text), H200))) <= 80, text


@pytest.mark.parametrize("text", KV_APPEND.suite)
def test_what_a_tuner_poisons_is_written_whole(text: str) -> None:
    problem = KvAppendProblem.parse(text).bucket()
    inputs = KV_APPEND.sample(problem.replace(batch=min(problem.batch, 3), seq=min(problem.seq, 40)), "cpu", 3)
    small = problem.replace(batch=inputs[1].shape[0], seq=inputs[1].shape[1])
    for t in KV_APPEND.reference(small, *inputs):
        assert not (t.isnan().any() if t.is_floating_point() else (t < 0).any())


@pytest.mark.parametrize("text", KV_APPEND.suite)
def test_a_judge_accepts_what_is_right_and_sees_a_stray_row(text: str) -> None:
    """Tokens need not fill the last page of a sample: its other rows stay as they were poisoned."""
    problem = KvAppendProblem.parse(text)
    problem = problem.replace(batch=min(problem.batch, 3), seq=min(problem.seq, 77))
    inputs, work = KV_APPEND.sample(problem, "cpu", 3), KV_APPEND.work(problem)
    expected = KV_APPEND.reference(problem, *inputs)
    results = tuple(t.clone() for t in expected)

    def error() -> float:
        return verify.worst_error(results, expected, work.flops, depth=work.depth, partial=KV_APPEND.partial)

    assert error() == 0
    unwritten = expected[1].isnan().flatten(2).all(-1)
    if problem.page_size == 32:
        assert unwritten.any()
    if unwritten.any():
        page, slot = unwritten.nonzero()[0].tolist()
        results[1][page, slot] = 1.0
        assert error() == float("inf")


def test_work_is_what_must_be_moved() -> None:
    problem = KvAppendProblem(2, 100, 8, 128, 32, 64)
    assert KV_APPEND.work(problem).bytes == 2 * 2 * 2 * 100 * 48 * 128 + 2 * 4 * 100 * 32 + 16


@pytest.mark.parametrize(
    ("words", "rule"),
    [
        ("rotary=63", "in pairs, 2 to head_dim where there is a table, else 0; it is 63 of 128"),
        ("rotary=130", "it is 130 of 128"),
        ("rotary=64 table=none", "with table=none"),
        ("", "it is 0 of 128 with table=fp32"),
        ("heads_q=4 table=none", "nothing turns"),
        ("rotary=64 interleaved=1 gathered=1", "its pairs are no neighbours"),
        ("dtype=fp32 table=none align=2", "one element of fp32"),
        ("rotary=64 dtype=fp32 table=same", "table=fp32, not same"),
        ("rotary=72", "divides each run of channels, 72 of 128"),
        ("rotary=64 heads_q=65535", "end at 65535 in all; got 65535 [+] 1 [+] 1"),
    ],
)
def test_problems_that_are_none(words: str, rule: str) -> None:
    with pytest.raises(UnsupportedProblem, match=rule):
        KvAppendProblem.parse(f"batch=1 seq=1 heads_kv=1 head_dim=128 {words}")


FP8 = torch.float8_e4m3fn

# ---- the function, on the CPU ---------------------------------------------------------------------------


def called(
    results: list[Tensor], inputs: tuple[Any, ...], how: Callable[..., None], interleaved: bool = False
) -> Callable[[], bool]:
    """Calls ``how``, which has the public function's parameters, to update the results in place.

    Returns a function that says whether they are right.
    """
    before = tuple([t.clone() for t in (*results[1:3], *results[4:])])
    copies = tuple([None if t is None else t.clone() for t in inputs])
    _, k_cache, v_cache, _, *scales = results
    q, k, v, state, pages, counts, cos, sin = inputs
    k_scale, v_scale = scales if scales[0].dim() > 1 else (None, None)
    turns = q if q.shape[2] else None
    how(
        k,
        v,
        k_cache,
        v_cache,
        state,
        k_scale=k_scale,
        v_scale=v_scale,
        page_table=pages,
        counts=counts,
        q=turns,
        cos=cos,
        sin=sin,
        interleaved=interleaved,
    )
    results[0], results[3] = q, state
    return lambda: right(judge(before, tuple(results), copies, interleaved))


@pytest.mark.parametrize("case", [c for c, given in CASES.items() if "outside of" not in c and "config" not in given])
def test_cpu_tensors_run_the_reference(case: str) -> None:
    results, inputs, _ = posed(CASES[case])
    assert called(results, inputs, kv_append, bool(CASES[case].get("interleaved")))()


def test_a_position_outside_of_the_table_raises_where_a_token_is_kept() -> None:
    k, (cos, sin) = torch.randn(2, 3, 1, 8), table(6, 4)
    cache = torch.zeros(2, 9, 1, 8)
    state = torch.tensor([[4, 3], [0, 0], [0, 0]], dtype=torch.int32)
    with pytest.raises(UnsupportedProblem, match="leave a table of 6 rows"):
        kv_append(k, k, cache, cache.clone(), state, cos=cos, sin=sin)
    kv_append(k, k, cache, cache.clone(), state, cos=cos, sin=sin, counts=torch.tensor([2, 3], dtype=torch.int32))
    assert state.tolist() == [[6, 6], [0, 0], [0, 0]]


@pytest.mark.parametrize(("batch", "seq"), [(0, 3), (2, 0)])
@pytest.mark.parametrize("paged", [False, True])
def test_nothing_to_append(paged: bool, batch: int, seq: int) -> None:
    k = torch.randn(batch, seq, 2, 8)
    cache = torch.zeros(4 if paged else batch, 16, 2, 8)
    state = torch.full((3, batch), 2, dtype=torch.int32)
    state[2] = 0
    expected = state.clone()
    pages = torch.zeros(batch, 2, dtype=torch.int32) if paged else None
    kv_append(k, k, cache, cache.clone(), state, page_table=pages)
    assert torch.equal(state, expected)
    assert (cache == 0).all()


@refused
def test_refusals_say_the_rule() -> Calls:
    q, k, (cos, sin) = torch.randn(2, 5, 3, 16), torch.randn(2, 5, 1, 16), table(9, 8)
    caches = torch.zeros(2, 9, 1, 16), torch.zeros(2, 9, 1, 16)
    state, pages = torch.zeros(3, 2, dtype=torch.int32), torch.zeros(2, 2, dtype=torch.int32)
    numbers = torch.zeros(2, dtype=torch.int32)
    codes = [c.to(FP8) for c in caches]
    scales = [torch.zeros(2, 1, 16, dtype=torch.uint8) for _ in caches]
    return {
        r"k \(5, 1, 16\), v .*: q does not fit": lambda: kv_append(k[0], k[0], *caches, state),
        r"v \(2, 4, 1, 16\), .*: v does not fit": lambda: kv_append(k, k[:, :4], *caches, state),
        "takes v in float32; got torch.float64": lambda: kv_append(k, k.double(), *caches, state),
        "takes bfloat16, float16, float32, float64; got torch.int32": lambda: kv_append(
            k.int(), k.int(), *caches, state
        ),
        "at least one head": lambda: kv_append(*(t[:, :, :0] for t in (k, k, *caches)), state),
        "cos and sin come together": lambda: kv_append(k, k, *caches, state, cos=cos),
        r"cos \(9, 8\), sin \(8, 8\): sin does not fit": lambda: kv_append(k, k, *caches, state, cos=cos, sin=sin[1:]),
        "which needs cos and sin: leave it out": lambda: kv_append(k, k, *caches, state, q=q),
        "interleaved says which channels": lambda: kv_append(k, k, *caches, state, interleaved=True),
        r"got q \(2, 3, 3, 16\), k \(2, 5, .*: k does not fit": lambda: kv_append(
            k, k, *caches, state, q=q[:, :3], cos=cos, sin=sin
        ),
        "takes state in int32; got torch.int64": lambda: kv_append(k, k, *caches, state.long()),
        r"rows contiguous; .* strides \(1, 3\)": lambda: kv_append(k, k, *caches, state.t().contiguous().t()),
        "takes counts in int32; got torch.int64": lambda: kv_append(k, k, *caches, state, counts=numbers.long()),
        r"counts \(1,\): counts does not fit": lambda: kv_append(k, k, *caches, state, counts=numbers[:1]),
        "page_table does not fit": lambda: kv_append(k, k, *caches, state, page_table=pages[0]),
        "not 9": lambda: kv_append(k, k, *caches, state, page_table=pages),
        "pages need a page_table": lambda: kv_append(k, k, *(c[:1] for c in caches), state),
        r"heads_kv = 1, head_dim = 16, .*: k_cache does not fit": lambda: kv_append(
            k, k, *(c[..., :8] for c in caches), state
        ),
        "v_cache does not fit": lambda: kv_append(k, k, caches[0], caches[1][:, :8], state),
        "channels side by side": lambda: kv_append(k, k, *(torch.zeros(2, 9, 1, 32)[..., ::2] for _ in caches), state),
        "k_cache must not overlap itself": lambda: kv_append(
            k, k, caches[0][:1].expand(2, -1, -1, -1), caches[1], state
        ),
        "overlaps an operand": lambda: kv_append(k, k, caches[0], caches[0], state),
        "out= overlaps an operand": lambda: kv_append(k, k.clone(), *caches, state, q=k, cos=cos, sin=sin),
        "overlaps an operand other": lambda: kv_append(caches[0][:, : k.shape[1]], k, *caches, state),
        "kv_append is not differentiable": lambda: kv_append(k.clone().requires_grad_(), k, *caches, state),
        r"k_scale and v_scale belong .*k_cache is torch.float32, and k_scale is given": lambda: kv_append(
            k, k, *caches, state, k_scale=scales[0]
        ),
        "v_scale belong .* k_cache is torch.float8_e4m3fn, and k_scale is missing": lambda: kv_append(
            k, k, *codes, state
        ),
        "takes k_scale in uint8; got torch.float32": lambda: kv_append(
            k, k, *codes, state, k_scale=torch.ones(1), v_scale=torch.ones(1)
        ),
        r"v_scale of .* must be uint8 \(2, 1, 16\), .*; it is torch.uint8, \(2, 1, 9\)": lambda: kv_append(
            k, k, *codes, state, k_scale=scales[0], v_scale=scales[1][..., :9]
        ),
        r"k_scale must have slots side by side; its strides are \(32, 32, 2\)": lambda: kv_append(
            k, k, *codes, state, k_scale=torch.zeros(2, 1, 32, dtype=torch.uint8)[..., ::2], v_scale=scales[1]
        ),
        "write to memory of its own": lambda: kv_append(k, k, *codes, state, k_scale=scales[0], v_scale=scales[0]),
        "heads of a cache in FP8 have up to 512": lambda: KvAppendProblem(1, 1, 1, 528, table="none", cache="fp8"),
        "no gradient for cos": lambda: kv_append(k, k, *caches, state, cos=cos.clone().requires_grad_(), sin=sin),
    }


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("queries", [False, True])
def test_opcheck(queries: bool) -> None:
    k, cache, (cos, sin) = torch.randn(2, 3, 1, 16), torch.randn(2, 9, 1, 16), table(9, 8)
    q = torch.randn(2, 3, 2, 16) if queries else None
    state = torch.tensor([[4, 3], [0, 0], [0, 0]], dtype=torch.int32)
    args = (q, k, k.clone(), cache, cache.clone(), state, None, None, None, None, cos, sin, False)
    torch.library.opcheck(torch.ops.cutekernels.kv_append.default, args)


# ---- the GPU's path, on CPU tensors ---------------------------------------------------------------------


def test_launch_poses_what_it_launches(launches: list[str]) -> None:
    """Operands whose channels are not contiguous are copied; caches never are."""

    def run(k: Any, v: Any, k_cache: Any, v_cache: Any, state: Any, **rest: Any) -> None:
        queries = k[:, :, :0] if rest["q"] is None else rest["q"]
        inputs = (queries, k, v, state, rest["page_table"], rest["counts"], rest["cos"], rest["sin"])
        scales = [torch.empty(0, dtype=torch.uint8) for _ in range(2)]
        calls.run(KV_APPEND, (queries, k_cache, v_cache, state, *scales), inputs, options=(rest["interleaved"],))

    base = CASES["joint 16 interleaved=False"]
    for kind in ("joint", "every other", "transposed channels", "misaligned"):
        results, inputs, _ = posed(base | {"kind": kind})
        assert called(results, inputs, run)(), kind
    same = "kv_append batch=2 seq=5 heads_kv=2 head_dim=16 heads_q=3 rotary=16 page_size=16"
    assert launches == [same, same, same, f"{same} align=2"]


def test_the_judge_sees_a_token_lost() -> None:
    results, inputs, _ = posed(CASES["dense 0 interleaved=False"])
    are_right = called(results, inputs, kv_append)
    assert are_right()
    results[3][LOST, 1] += 1
    assert not are_right()
