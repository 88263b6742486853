"""Kernels over caches in FP8 compiled for GPUs that are not there: resources, conversions, and no spills."""

from __future__ import annotations

import pytest

from cutekernels import gpu
from cutekernels.ops.attention.cache import CACHE_ATTENTION, CacheProblem
from cutekernels.ops.attention.decode import DECODE_ATTENTION, DecodeProblem
from tests.attention import compiled
from tests.attention.compiled import count
from tests.attention.test_decode_compiled import loop
from tests.compiled import pairs

DECODE = (
    "batch=32 seq_kv=4096 heads_q=32 heads_kv=8 cache=fp8",
    "batch=32 seq_kv=4096 heads_q=32 heads_kv=8 cache=fp8_tokens",
    "batch=1 seq_kv=32768 heads_q=32 heads_kv=8 page_size=16 cache=fp8_tokens",
    "batch=2 seq_kv=900 heads_q=8 heads_kv=2 head_dim=256 softcap=1 window_left=9 window=1 sinks=fp32 cache=fp8_tokens",
    "batch=2 seq_kv=2000 heads_q=32 heads_kv=1 seq_q=4 head_dim=80 dtype=fp16 page_size=16 lse=1 cache=fp8",
)
PREFILL = (
    "batch=1 seq_q=512 seq_kv=8192 heads_q=32 heads_kv=8 page_size=16 cache=fp8_tokens",
    "batch=2 seq_q=30 seq_kv=784 heads_q=8 heads_kv=2 head_dim=80 dtype=fp16 window_left=9 window=left"
    " cache=fp8_tokens",
    "batch=1 seq_q=512 seq_kv=8192 heads_q=32 heads_kv=8 page_size=16 cache=fp8",
)


@pytest.mark.parametrize(("text", "spec"), pairs(DECODE), ids=lambda x: getattr(x, "target", None))
def test_decode_converts_each_number_once_and_spills_nothing(text: str, spec: gpu.GpuSpec) -> None:
    problem = DecodeProblem.parse(text)
    config = DECODE_ATTENTION.default(problem, spec)
    facts = compiled.facts(DECODE_ATTENTION, problem, config, spec, config.smem(problem).total_bytes)
    assert facts.stack_bytes == 0
    if problem.head_dim == 128:
        body = loop(problem, config, spec.name)
        pairs_of_lane = 2 * config.rows * problem.width // 2 // 32
        assert count(body, "F2FP.F16.E4M3.UNPACK_B") == (pairs_of_lane if spec.has_fp8 else 0)
        assert count(body, "LDGSTS") == 2 * config.rows * problem.width // 16 // 32 + problem.of_tokens
        assert count(body, "BAR") == count(body, "LDL") == 0


@pytest.mark.parametrize(("text", "spec"), pairs(PREFILL), ids=lambda x: getattr(x, "target", None))
def test_prefill_spills_nothing(text: str, spec: gpu.GpuSpec) -> None:
    problem = CacheProblem.parse(text)
    config = CACHE_ATTENTION.default(problem, spec)
    facts = compiled.facts(CACHE_ATTENTION, problem, config, spec, config.smem(problem).total_bytes)
    assert facts.stack_bytes == 0
    assert config.body == "multistage"


def test_a_cache_in_fp8_asks_for_nearly_half_the_bytes_and_time() -> None:
    for name in ("h100-sxm", "l40s", "rtx5090"):
        spec = gpu.lookup(name)
        for text in [t for t in DECODE if "heads_q=32 heads_kv=8" in t]:
            ours = DecodeProblem.parse(text)
            plain = ours.replace(cache="same")
            assert DECODE_ATTENTION.work(ours).bytes < 0.51 * DECODE_ATTENTION.work(plain).bytes
            times = [DECODE_ATTENTION.estimate_us(p, DECODE_ATTENTION.default(p, spec), spec) for p in (plain, ours)]
            assert times[0] > 1.6 * times[1], (name, times)
