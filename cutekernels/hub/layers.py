"""Layers as the ``kernels`` package takes them: without state, each ``forward`` put into a module of the model's own.

What no kernel computes of a module (another type, another activation, hooks) is left to the class that the module has.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from cutekernels.errors import UnsupportedProblem
from cutekernels.integrations.transformers.families import activation_of, gate_of
from cutekernels.nn.mlp import gate_mul, projected, unhooked
from cutekernels.ops.attention.api import attention
from cutekernels.ops.norms.api import rms_norm
from cutekernels.ops.rope.api import rope
from cutekernels.ops.shared.dtypes import DTYPES


def _multiplied(x: Tensor, weight: object) -> bool:
    """Whether a kernel multiplies ``x`` by ``weight``: plain parameters of its type, on a GPU 16-bit ones."""
    if not isinstance(weight, Tensor) or type(weight) not in (Tensor, nn.Parameter) or weight.dtype != x.dtype:
        return False
    return x.device.type == "cpu" or x.dtype in DTYPES.values()


def _own(module: Any, *given: Any, **options: Any) -> Any:
    """What the module's own class computes."""
    return type(module).forward(module, *given, **options)


class RMSNorm(nn.Module):
    """``weight * x / rms(x)``, rounded in front of the product, as Llama's."""

    has_backward = True
    can_torch_compile = True

    def forward(self, hidden_states: Tensor) -> Tensor:
        """The norm over the last dimension."""
        me: Any = self
        weight, eps = getattr(me, "weight", None), getattr(me, "variance_epsilon", None)
        eps = getattr(me, "eps", None) if eps is None else eps
        if not isinstance(weight, Tensor) or not isinstance(eps, float) or weight.dtype != hidden_states.dtype:
            return _own(me, hidden_states)  # type: ignore[no-any-return]
        return rms_norm(hidden_states, weight, eps=eps, rounding="huggingface")


class SwiGLUMLP(nn.Module):
    """``down_proj(silu(gate_proj(x)) * up_proj(x))``."""

    has_backward = True
    can_torch_compile = True

    def forward(self, x: Tensor) -> Tensor:
        """The MLP; its projections are called, with whatever hooks and adapters they have."""
        me: Any = self
        act = activation_of(me)
        hooked = isinstance(act, nn.Module) and not unhooked(act)
        if hooked or gate_of(act) != "silu":
            return _own(me, x)  # type: ignore[no-any-return]
        return me.down_proj(gate_mul("silu", me.gate_proj(x), me.up_proj(x)))  # type: ignore[no-any-return]


class Linear(nn.Module):
    """``x @ weight.T + bias``."""

    has_backward = True
    can_torch_compile = True

    def forward(self, input: Tensor) -> Tensor:
        """The product."""
        me: Any = self
        if not _multiplied(input, getattr(me, "weight", None)):
            return _own(me, input)  # type: ignore[no-any-return]
        return projected(input, me.weight, me.bias, name="Linear")


class rotary_pos_emb(nn.Module):
    """Queries and keys behind the rotary embedding, whole heads at a time."""

    has_backward = True
    can_torch_compile = True

    def forward(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
        """``q`` and ``k`` ``(B, H, S, D)``, ``cos`` and ``sin`` ``(B or 1, S, D)``."""
        known = q.dim() == k.dim() == 4 and cos.dim() == 3 and cos.dtype in (q.dtype, torch.float32)
        if not known or unsqueeze_dim != 1 or cos.shape[-1] != q.shape[-1]:
            return _own(self, q, k, cos, sin, unsqueeze_dim)  # type: ignore[no-any-return]
        turned = rope(q.transpose(1, 2), k.transpose(1, 2), cos.detach(), sin.detach())
        return turned[0].transpose(1, 2), turned[1].transpose(1, 2)


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    deterministic: bool = False,
    s_aux: Tensor | None = None,
) -> Tensor:
    """Attention under flash-attention's names, by which transformers calls a kernel of the hub: q ``(B, SQ, HQ, D)``, k
    and v ``(B, SKV, HKV, D)``. Gradients are deterministic in any case; ``s_aux``: sinks.

    Raises:
        UnsupportedProblem: dropout, or what :func:`cutekernels.attention` does not take.
    """
    out: Tensor = attention(q, k, v, **_options(dropout_p, softmax_scale, causal, window_size, softcap, s_aux))
    return out


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    deterministic: bool = False,
    s_aux: Tensor | None = None,
) -> Tensor:
    """The same of packed sequences: q ``(TOTAL_Q, HQ, D)``, k and v ``(TOTAL_KV, HKV, D)``."""
    options = _options(dropout_p, softmax_scale, causal, window_size, softcap, s_aux)
    out: Tensor = attention(q, k, v, cu_seqlens_q=cu_seqlens_q, cu_seqlens_kv=cu_seqlens_k, **options)
    return out


def _options(
    dropout: float, scale: float | None, causal: bool, window: tuple[int, int], softcap: float, sinks: Tensor | None
) -> dict[str, Any]:
    """Options of :func:`cutekernels.attention`; -1 is no limit of a window, 0 no softcap."""
    if dropout:
        raise UnsupportedProblem(f"attention has no dropout; it is {dropout}: set config.attention_dropout to 0")
    left, right = (None if one < 0 else one for one in window)
    right = None if causal else right
    limits = None if left is None and right is None else (left, right)
    return {"scale": scale, "causal": causal, "window": limits, "softcap": softcap or None, "sinks": sinks}
