"""Mixtures of experts under the name ``"cutekernels"`` in transformers' ``ExpertsInterface``."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from cutekernels.errors import UnsupportedProblem
from cutekernels.integrations.transformers.attention import NAME, require_transformers
from cutekernels.integrations.transformers.checkpoints import REMEDY as QUANTIZED
from cutekernels.integrations.transformers.checkpoints import is_quantized
from cutekernels.integrations.transformers.families import gate_of
from cutekernels.integrations.transformers.tensor_parallel import is_planned, is_sharded
from cutekernels.ops.moe.ffn import moe_ffn


@cache
def register_experts() -> None:
    """Register :func:`cutekernels.moe_ffn` with transformers as experts of the name ``"cutekernels"``.

    ::

        ck.register_experts()
        model.set_experts_implementation("cutekernels")

    or ``from_pretrained(..., experts_implementation="cutekernels")``. A registered name holds for this process, in any
    model whose experts transformers dispatches by name; routers and shared experts stay the model's own. Calling it
    again does nothing.

    Raises:
        ImportError: transformers is not installed.
    """
    require_transformers("register_experts")
    from transformers.integrations.moe import ExpertsInterface

    ExpertsInterface.register(NAME, run_experts)


def run_experts(module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """The chosen experts' results, weighted and added up, as transformers calls it. An index that names no expert, as
    expert parallelism sends it, adds nothing.

    Raises:
        UnsupportedProblem: experts that no kernel has, and what ``moe_ffn`` does not take.
    """
    reason = why_not_experts(module)
    if reason:
        raise UnsupportedProblem(
            f'{type(module).__name__} cannot run as "{NAME}": {reason}. Call '
            'model.set_experts_implementation("grouped_mm"), or "eager"'
        )
    return moe_ffn(hidden_states, module.gate_up_proj, module.down_proj, top_k_index, top_k_weights)


def why_not_experts(module: Any) -> str:
    """Why ``moe_ffn`` does not compute what a module of experts does, or ""."""
    weights: list[Any] = [getattr(module, name, None) for name in ("gate_up_proj", "down_proj")]
    kinds = torch.nn.Parameter, Tensor  # in a planned module's forward its share stands in the place of a parameter
    plain = all(type(w) in kinds or (is_sharded(w) and is_planned(module)) for w in weights)
    if not plain or any(w.dim() != 3 or w.dtype.itemsize < 2 for w in weights) or getattr(module, "has_bias", False):
        stored = [p for p in module.parameters() if p.dtype.itemsize < 2]
        if stored or is_quantized(module):
            return f"its experts are quantized: {QUANTIZED} for a models.Decoder, which multiplies them packed"
        return "its experts' weights are no plain parameters, or have biases"
    if getattr(module, "is_transposed", False):
        return "its experts' weights are transposed"
    if not getattr(module, "is_concatenated", True):
        return "its experts' gate and up are interleaved, and kernels take one behind the other"
    if getattr(module, "has_post_expert_norm", False):
        return "its experts have a norm of their own"
    gating = getattr(getattr(type(module), "_apply_gate", None), "__module__", "transformers.integrations.moe")
    if gating != "transformers.integrations.moe":
        return "its experts have a gate of their own, and kernels that of SiLU"
    if gate_of(module.act_fn) != "silu":
        return f"its experts have the gate of {type(module.act_fn).__name__}, and kernels that of SiLU"
    return ""
