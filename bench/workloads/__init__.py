"""The families of ops, one module each: suites, operands, truth, how ours is called, and peers.

To benchmark another op, write its :class:`~bench.baselines.Workload` in the module of its family (or a new module):

* ``suites``: functions of ``(dtype, accumulate)`` that list :class:`~bench.suites.Case`; ``problem`` is the op's
  canonical text, and ``label`` is unique in its suite;
* ``inputs``: tensors that pose the problem. ``operands`` is what contenders are called with, ``results`` what ours
  writes to (they are poisoned before each contender is judged), ``updated`` the operands that a call changes in place
  (they get their first values back);
* ``truth``: a tuple with each result in fp64, of whole numbers in their own type. Where operands are updated it is
  asked before anything runs;
* ``ours``: one launch per input set. A launch returns a tensor or a tuple, in the order of ``truth``;
* ``peers``: the baseline first. ``baselines.compiled`` and ``baselines.eager`` wrap a plain function of the operands;
* ``streams``, where memory is the limit: arrays that a call reads and writes, for the streaming contenders.

Then give it a line in ``_HOMES``. An op without one is timed over its declaration's suite (``declared.py``). A backward
pass is an op of its own, with a Workload of its own. Modules are imported when one of their ops is asked for.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from bench.suites import Case

if TYPE_CHECKING:
    from bench.baselines import Workload
    from cutekernels.op import Op, Work

_HOMES = {
    "gemm": "gemm",
    "quantized_linear": "quantized",
    "quantized_linear_backward": "quantized",
    "dequantize": "quantized",
    "attention": "attention",
    "attention_backward": "attention_backward",
    "decode_attention": "attention_decode",
    "decode_attention_fp8": "attention_decode",
    "rms_norm_linear": "norm_linear",
    "linear_silu_mul": "norm_linear",
    "silu_mul": "activations",
    "gelu_mul": "activations",
    "bias_gelu": "activations",
    "silu_mul_backward": "activations",
    "gelu_mul_backward": "activations",
    "bias_gelu_backward": "activations",
    "swiglu": "mlp",
    "rope": "rope",
    "kv_append": "kv_append",
    "rms_norm": "norms",
    "rms_norm_backward": "norms",
    "add_rms_norm": "norms",
    "layer_norm": "norms",
    "layer_norm_backward": "norms",
    "column_sum": "norms",
    "adamw_step": "optimizer",
    "embedding": "embedding",
    "embedding_backward": "embedding",
    "moe_route": "routing",
    "moe_permute": "routing",
    "moe_gather": "routing",
    "moe_combine": "routing",
    "moe_route_backward": "routing",
    "moe_combine_backward": "routing",
    "grouped_gemm": "experts",
    "moe_ffn": "experts",
    "quantized_moe_ffn": "packed_experts",
    "sample_filter": "sampling",
}
OPS = tuple(_HOMES)


def get(op: str) -> Workload:
    """How ``op`` is benchmarked. ValueError for one that is not."""
    if op not in _HOMES:
        from bench.workloads import declared
        from cutekernels.ops import registry
        from cutekernels.ops.shared.triton_op import TritonOp

        registered = registry.find(op)
        if isinstance(registered, TritonOp):
            return declared.workload(registered)
        raise ValueError(f"no suite for {op!r}; there are some for {', '.join(OPS)}")
    found: dict[str, Workload] = {w.op: w for w in import_module(f"{__name__}.{_HOMES[op]}").WORKLOADS}
    return found[op]


def cases(op: str, suite: str, *, dtype: str = "bf16", accumulate: str = "fp32", match: str = "") -> list[Case]:
    """The cases of ``suite`` whose label or problem contains ``match``. ValueError for a name there is none of."""
    suites = get(op).suites
    if suite not in suites:
        raise ValueError(f"{op} has no suite {suite!r}; it has {', '.join(suites)}")
    return [c for c in suites[suite](dtype, accumulate) if match in c.label or match in c.problem]


def work(case: Case) -> Work:
    """The least that ``case`` needs."""
    stated = get(case.op).work
    if stated is not None:
        return stated(case)
    op, problem = posed(case)
    return op.work(problem)


def posed(case: Case) -> tuple[Op[Any, Any], Any]:
    """The op whose config ``case`` depends on, and its problem, parsed."""
    from cutekernels.ops import registry

    poses = get(case.op).poses if case.op in _HOMES else None  # an op may have no suite
    op = registry.get(poses or case.op)
    return op, op.Problem.parse(case.problem)
