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
from cutekernels.integrations.transformers.families import activation_of, gate_of
from cutekernels.integrations.transformers.modules import Patched
from cutekernels.integrations.transformers.projections import multiplied, parameter
from cutekernels.integrations.transformers.tensor_parallel import is_planned, is_sharded
from cutekernels.nn.mlp import has_no_hooks
from cutekernels.ops.moe.api import moe_combine, moe_gather, moe_permute
from cutekernels.ops.moe.ffn import moe_ffn
from cutekernels.ops.products.grouped_api import grouped_gemm


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
    return grouped_experts(module, hidden_states, top_k_index, top_k_weights)


def grouped_experts(module: Any, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """A module of experts: ``moe_ffn`` where they are Mixtral's, else products around the module's gate."""
    gate_up, down = parameter(module, "gate_up_proj"), parameter(module, "down_proj")
    own = module.__dict__  # what is missing there torch would search in Python
    turned, has_bias = own.get("is_transposed", False), "gate_up_proj_bias" in own["_parameters"] or own.get("has_bias")
    if not (turned or has_bias or _own_gate(module)) and _is_plain_silu(activation_of(module)):
        return moe_ffn(x, gate_up, down, ids, weights)
    _, offsets, inverse = moe_permute(ids, len(gate_up))
    biases = [parameter(module, f"{name}_bias") if has_bias else None for name in ("gate_up_proj", "down_proj")]
    both = grouped_gemm(moe_gather(x, inverse), gate_up.mT if turned else gate_up, offsets, biases[0])
    if hasattr(module, "_apply_gate"):
        hidden = module._apply_gate(both)
    else:  # of old versions
        gate, up = both.chunk(2, dim=-1)
        hidden = activation_of(module)(gate) * up
    out = grouped_gemm(hidden, down.mT if turned else down, offsets, biases[1])
    return moe_combine(out, inverse, weights.to(torch.promote_types(weights.dtype, torch.float32)))


def _is_plain_silu(act: Any) -> bool:
    return gate_of(act) == "silu" and (act is torch.nn.functional.silu or has_no_hooks(act))


def _own_gate(module: Any) -> bool:
    """Whether a module of experts has a gate of its own in the place of transformers'."""
    home = "transformers.integrations.moe"
    return getattr(getattr(type(module), "_apply_gate", None), "__module__", home) != home


def why_not_experts(module: Any) -> str:
    """Why ``moe_ffn`` does not compute what a module of experts does, or ""."""
    weights: list[Any] = [getattr(module, name, None) for name in ("gate_up_proj", "down_proj")]
    kinds = torch.nn.Parameter, Tensor  # in a planned module's forward its share stands in the place of a parameter
    plain = all(type(w) in kinds or (is_sharded(w) and is_planned(module)) for w in weights)
    if not plain or any(w.dim() != 3 or w.dtype.itemsize < 2 for w in weights):
        stored = [p for p in module.parameters() if p.dtype.itemsize < 2]
        if stored or is_quantized(module):
            return f"its experts are quantized: {QUANTIZED} for a models.Decoder, which multiplies them packed"
        return "its experts' weights are no plain parameters"
    if not getattr(module, "is_concatenated", True) and not _own_gate(module):
        return "its experts' gate and up are interleaved, and kernels take one behind the other"
    if getattr(module, "has_post_expert_norm", False):
        return "its experts have a norm of their own"
    return ""


class Experts(Patched):
    """A module of experts as ``patch`` leaves it."""

    gate_up_proj: Tensor
    down_proj: Tensor

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """The chosen experts' results, weighted and added up, of indices and weights by whatever name; the router and
        the gate stay the original's.
        """
        if not multiplied(hidden_states, parameter(self, "gate_up_proj")):
            return super().forward(hidden_states, *args, **kwargs)  # type: ignore[misc, no-any-return]
        ids, weights = sorted((*args, *kwargs.values()), key=Tensor.is_floating_point)
        return grouped_experts(self, hidden_states, ids, weights)
