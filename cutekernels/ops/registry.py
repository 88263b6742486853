"""The ops, written out. One line per op in ``OPS``; the rest of the house finds them here."""

from __future__ import annotations

from typing import Any

import torch

from cutekernels.errors import UnsupportedProblem
from cutekernels.op import Op
from cutekernels.ops import (
    activations,
    append,
    attend,
    attend_backward,
    attend_decode,
    embedding,
    expert_rows,
    matmul,
    norm_gradients,
    norm_linear,
    norms,
    optimizer,
    permutation,
    rope,
    routing,
    sampling,
)
from cutekernels.ops.attention import ATTENTION
from cutekernels.ops.attention_backward import ATTENTION_BACKWARD
from cutekernels.ops.attention_decode import DECODE_ATTENTION
from cutekernels.ops.attention_delta import ATTENTION_DELTA
from cutekernels.ops.bias_gelu import BIAS_GELU, BIAS_GELU_BACKWARD
from cutekernels.ops.embedding import EMBEDDING, EMBEDDING_BACKWARD
from cutekernels.ops.expert_rows import MOE_COMBINE, MOE_COMBINE_BACKWARD, MOE_GATHER
from cutekernels.ops.gemm import GEMM
from cutekernels.ops.glu import GELU_MUL, GELU_MUL_BACKWARD, SILU_MUL, SILU_MUL_BACKWARD
from cutekernels.ops.kv_append import KV_APPEND
from cutekernels.ops.norm_gradients import COLUMN_SUM, COLUMN_SUM_PAIR, LAYER_NORM_BACKWARD, RMS_NORM_BACKWARD
from cutekernels.ops.norm_linear_op import LINEAR_SILU_MUL, RMS_NORM_LINEAR
from cutekernels.ops.norms import ADD_RMS_NORM, LAYER_NORM, RMS_NORM
from cutekernels.ops.optimizer import ADAMW_STEP
from cutekernels.ops.permutation import MOE_PERMUTE
from cutekernels.ops.rope import ROPE
from cutekernels.ops.routing import MOE_ROUTE, MOE_ROUTE_BACKWARD
from cutekernels.ops.sampling import SAMPLE_FILTER

OPS: tuple[Op[Any, Any], ...] = (
    GEMM,
    ATTENTION,
    ATTENTION_DELTA,
    ATTENTION_BACKWARD,
    DECODE_ATTENTION,
    RMS_NORM_LINEAR,
    LINEAR_SILU_MUL,
    SILU_MUL,
    SILU_MUL_BACKWARD,
    GELU_MUL,
    GELU_MUL_BACKWARD,
    BIAS_GELU,
    BIAS_GELU_BACKWARD,
    ROPE,
    KV_APPEND,
    ADAMW_STEP,
    EMBEDDING,
    EMBEDDING_BACKWARD,
    RMS_NORM,
    RMS_NORM_BACKWARD,
    ADD_RMS_NORM,
    LAYER_NORM,
    LAYER_NORM_BACKWARD,
    COLUMN_SUM,
    COLUMN_SUM_PAIR,
    MOE_ROUTE,
    MOE_ROUTE_BACKWARD,
    MOE_PERMUTE,
    MOE_GATHER,
    MOE_COMBINE,
    MOE_COMBINE_BACKWARD,
    SAMPLE_FILTER,
)

_BY_NAME = {op.name: op for op in OPS}

# How torch.compile and autograd reach the ops, as torch.ops.cutekernels.*; it lives as long as this module.
LIBRARY = torch.library.Library("cutekernels", "FRAGMENT")
for module in (
    matmul,
    attend,
    attend_backward,
    attend_decode,
    activations,
    rope,
    append,
    optimizer,
    embedding,
    norms,
    norm_gradients,
    norm_linear,
    routing,
    permutation,
    expert_rows,
    sampling,
):
    module.register(LIBRARY)


def get(name: str) -> Op[Any, Any]:
    """The op called ``name``. Raises UnsupportedProblem for any other."""
    if name not in _BY_NAME:
        raise UnsupportedProblem(f"no op is called {name!r}; the ops: {', '.join(_BY_NAME)}")
    return _BY_NAME[name]
