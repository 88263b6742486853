"""The families of ops, one module each: suites, operands, truth, how ours is called, and peers.

To benchmark another op, write its :class:`~bench.baselines.Workload` in the module of its family (or a new module) and
name it in ``_MODULES``; ``declared.workload`` takes inputs, truth and ours from the op's declaration. An op without one
is timed over its declaration's suite. A backward pass is an op of its own, with a Workload of its own. Modules are
imported when one of their ops is asked for.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from bench.suites import Case

if TYPE_CHECKING:
    from bench.baselines import Workload
    from cutekernels.op import Op, Work

_MODULES = {
    "gemm": "gemm",
    "quantized": "quantized_linear quantized_linear_backward dequantize",
    "attention": "attention",
    "attention_backward": "attention_backward",
    "attention_decode": "decode_attention decode_attention_fp8",
    "norm_linear": "rms_norm_linear linear_silu_mul",
    "activations": "silu_mul gelu_mul bias_gelu silu_mul_backward gelu_mul_backward bias_gelu_backward",
    "mlp": "swiglu",
    "rope": "rope",
    "kv_append": "kv_append",
    "norms": "rms_norm rms_norm_backward add_rms_norm layer_norm layer_norm_backward column_sum",
    "optimizer": "adamw_step",
    "embedding": "embedding embedding_backward",
    "routing": "moe_route moe_permute moe_gather moe_combine moe_route_backward moe_combine_backward",
    "experts": "grouped_gemm moe_ffn",
    "packed_experts": "quantized_moe_ffn",
    "sampling": "sample_filter",
}
_HOMES = {op: module for module, ops in _MODULES.items() for op in ops.split()}
OPS = tuple(_HOMES)


def get(op: str) -> Workload:
    """How ``op`` is benchmarked. ValueError for one that is not."""
    if op not in _HOMES:
        from bench.workloads import declared
        from cutekernels.ops import registry
        from cutekernels.ops.shared.triton_op import TritonOp

        registered = registry.find(op)
        if isinstance(registered, TritonOp):
            return declared.of_suite(registered)
        raise ValueError(f"no suite for {op!r}; there are some for {', '.join(OPS)}")
    found: dict[str, Workload] = {w.op: w for w in import_module(f"{__name__}.{_HOMES[op]}").WORKLOADS}
    return found[op]


def cases(op: str, suite: str, *, dtype: str = "bf16", accumulate: str = "fp32", match: str = "") -> list[Case]:
    """The cases of ``suite`` whose label or problem contains ``match``. ValueError for a name there is none of."""
    suites = get(op).suites
    if suite not in suites:
        raise ValueError(f"{op} has no suite {suite!r}; it has {', '.join(suites)}")
    return [c for c in suites[suite](str(dtype), str(accumulate)) if match in c.label or match in c.problem]


def work(case: Case) -> Work:
    """The least that ``case`` needs."""
    stated = get(case.op).work
    if stated is not None:
        return stated(case)
    op, problem = parse_case(case)
    return op.work(problem)


def parse_case(case: Case) -> tuple[Op[Any, Any], Any]:
    """The op whose config ``case`` depends on, and its problem, parsed."""
    from cutekernels.ops import registry

    poses = get(case.op).poses if case.op in _HOMES else None  # an op may have no suite
    op = registry.get(poses or case.op)
    return op, op.Problem.parse(case.problem)
