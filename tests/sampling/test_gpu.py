"""``sample_filter`` on a GPU: kept tokens against the CPU's, awkward memory, streams, graphs, tracing."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

import cutekernels
from cutekernels import compile as compiler
from cutekernels import gpu, verify
from cutekernels.errors import InvalidConfig, UnsupportedProblem
from cutekernels.ops.sampling.op import SAMPLE_FILTER, SampleFilterProblem
from tests.on_gpu import needs_memory, traced
from tests.sampling.cases import ALL, BY_ROW, CASES, DTYPES, FILTERS, fault, logits_of, numbers_of

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("one_seed")]

sample_filter = cutekernels.sample_filter
AWKWARD = [
    "rows=1 cols=1 by_k=1 by_p=1 by_min_p=1 align=2",
    "rows=3 cols=7 by_p=1 dtype=fp32 align=4",
    "rows=200 cols=1000 by_k=1 by_p=1 top_ks=1 top_ps=1 temperatures=1",
    "rows=2 cols=65537 by_k=1 by_p=1 dtype=fp32 align=4",
    "rows=2 cols=65537 by_k=1 by_p=1 by_min_p=1 dtype=fp16 layout=strided",
]


def normal(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, device="cuda").mul_(4).to(dtype)


def right(out: Tensor, logits: Tensor, **given: float | Tensor) -> bool:
    """The same tokens are kept as on the CPU; values differ by one rounding at most."""
    there = {n: v.cpu() if isinstance(v, Tensor) else v for n, v in given.items()}
    expected = sample_filter(logits.cpu(), **there)  # type: ignore[arg-type]
    return verify.error_ratio(out.cpu(), expected) <= 1


@pytest.mark.parametrize("text", [*SAMPLE_FILTER.suite, *AWKWARD])
def test_every_suite_with_default_and_random_configs(text: str) -> None:
    problem, spec = SampleFilterProblem.parse(text), gpu.detect()
    args = SAMPLE_FILTER.sample(problem, "cuda", 11)
    (out,) = SAMPLE_FILTER.outputs(problem, *args)
    options = {name: getattr(problem, name) for name in FILTERS}
    assert SAMPLE_FILTER.problem(out, *args[:5], **options) == problem
    (expected,) = SAMPLE_FILTER.reference(problem, *args)
    few = [t[:2].cpu() if isinstance(t, Tensor) else t for t in args]  # the reference, held to itself on the CPU
    (again,) = SAMPLE_FILTER.evaluate(*few, **options)
    assert torch.equal(expected[:2].cpu(), again)
    valid = list(SAMPLE_FILTER.valid(problem, spec))
    for config in [SAMPLE_FILTER.default(problem, spec), *random.Random(text).sample(valid, min(6, len(valid)))]:
        verify.poison([out])
        SAMPLE_FILTER.bind(problem, config, compiler.get(SAMPLE_FILTER, problem, config, spec))(out, *args)
        assert torch.equal(out.isneginf(), expected.isneginf()), f"[{problem}] [{config}] keeps other tokens"
        assert verify.error_ratio(out, expected) <= 1, f"[{problem}] [{config}]"


@pytest.mark.parametrize("case", CASES)
def test_keeps_what_the_definition_keeps(case: str) -> None:
    logits = logits_of(CASES[case])
    tensors, scalars, each = numbers_of(CASES[case], logits.shape[0])
    names = ("temperature", "top_k", "top_p", "min_p")
    given = {n: s if t is None else t.cuda() for n, t, s in zip(names, tensors, scalars, strict=True)}
    on_gpu = logits.cuda().t().contiguous().t() if CASES[case].get("kind") == "transposed" else logits.cuda()
    assert fault(sample_filter(on_gpu, **given).cpu(), logits, each) == ""  # type: ignore[arg-type]


def test_any_strides() -> None:
    top_p = torch.rand(6, 5, device="cuda")
    for logits, p in (
        (normal(5, 6, 300).transpose(0, 1), top_p),
        (normal(6, 5, 700)[..., 3:-100], top_p),
        (normal(6, 1, 300).expand(6, 5, 300), top_p.t().contiguous().t()),
        (normal(300), 0.5),
    ):
        given: dict[str, float | Tensor] = {"top_p": p, "top_k": 30, "temperature": 0.7}
        assert right(sample_filter(logits, **given), logits, **given)  # type: ignore[arg-type]


@pytest.mark.parametrize("shape", [(0, 8), (8, 0)])
def test_empty(shape: tuple[int, ...]) -> None:
    assert sample_filter(torch.empty(shape, device="cuda"), top_k=3, top_p=0.5).shape == shape


@pytest.mark.slow
def test_more_than_two_billion_elements() -> None:
    needs_memory(24)
    logits = torch.randn(17_000, 131_072, device="cuda", dtype=torch.bfloat16)
    out = sample_filter(logits, top_k=20, min_p=0.01)
    assert right(out[-2:], logits[-2:], top_k=20, min_p=0.01)
    assert right(out[16_384:16_386], logits[16_384:16_386], top_k=20, min_p=0.01)
    far = logits.view(-1)[: (1 << 31) + 2048].as_strided((3, 1024), (1 << 30, 1))
    assert right(sample_filter(far, top_p=0.5), far, top_p=0.5)


@pytest.mark.parametrize("rows", [1, 300])
def test_runs_on_the_current_stream(rows: int) -> None:
    logits, filled, side = torch.zeros(rows, 32000, device="cuda"), normal(rows, 32000), torch.cuda.Stream()
    sample_filter(logits, **ALL)
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)
        logits.copy_(filled)
        out = sample_filter(logits, **ALL)
    side.synchronize()
    assert right(out[:4], filled[:4], **ALL)


def test_refusals() -> None:
    with pytest.raises(UnsupportedProblem, match=r"got torch.float64"):
        sample_filter(normal(4, 8).double(), top_k=2)
    with pytest.raises(UnsupportedProblem, match="top_ps is on cpu, not cuda"):
        sample_filter(normal(4, 8), top_p=torch.rand(4))
    with pytest.raises(InvalidConfig, match="idle on rows of 8"):
        sample_filter(normal(4, 8), config="block=1024 warps=16 depth=1 splits=8")


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
def test_the_same_tokens_whatever_the_config(dtype: torch.dtype) -> None:
    logits = normal(2, 50_000, dtype=dtype)
    configs = [
        f"block={block} warps={warps} depth={depth} splits={splits}"
        for block, warps in ((1024, 8), (1024, 16), (2048, 8), (4096, 16))
        for depth, splits in ((1, 1), (2, 1), (2, 8))
    ]
    found = [sample_filter(logits, config=config, **ALL) for config in configs]
    assert all(torch.equal(f, found[0]) for f in found)


@traced
def test_compiled_whole_and_opcheck() -> None:
    @torch.compile(fullgraph=True)
    def sampled(logits: Tensor, top_p: Tensor) -> Tensor:
        return sample_filter(logits, **{**ALL, "top_p": top_p}).softmax(-1)  # type: ignore[arg-type]

    logits, top_p = normal(9, 6000), torch.rand(9, device="cuda")
    expected = sample_filter(logits, **{**ALL, "top_p": top_p}).softmax(-1)  # type: ignore[arg-type]
    torch.testing.assert_close(sampled(logits, top_p), expected)
    tensors = [t if t is None else t.cuda() for t in numbers_of(BY_ROW, 9)[0]]
    op = torch.ops.cutekernels.sample_filter.default
    torch.library.opcheck(op, (logits, *tensors, True, True, True, 1.0, 0, 1.0, 0.0))
