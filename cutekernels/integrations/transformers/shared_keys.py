"""Attention whose layers may take the keys and values of an earlier one (Gemma 4)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cutekernels.integrations.transformers.modules import PackedAttention, Patched
from cutekernels.ops.norms.api import rms_norm


class BareNorm(Patched):
    """An RMS norm without a weight."""

    def forward(self, x: Tensor) -> Tensor:
        me: Any = self
        if x.is_cuda and x.dtype == torch.float64:
            return super().forward(x)  # type: ignore[misc, no-any-return]
        return rms_norm(x, eps=me.eps)


class SharedAttention(PackedAttention):
    """Attention with norms of queries, keys and values; a layer without a projection of values takes the keys' own, and
    one without either the keys and values that an earlier layer of its type has stored.
    """

    @property
    def parts(self) -> tuple[str, ...]:  # type: ignore[override]
        own: Any = self._modules  # type: ignore[attr-defined]
        return tuple(name for name in ("q_proj", "k_proj", "v_proj") if own.get(name) is not None)

    def operands(self, x: Tensor, tables: tuple[Tensor, Tensor], cache: Any, options: dict[str, Any]) -> Any:
        """As of :class:`Attention`; ``options`` has what layers share, which attention itself is not given."""
        me: Any = self
        shared = options.pop("shared_kv_states")
        q, *own = (t.view(*x.shape[:-1], -1, me.head_dim) for t in self.query_key_value(x))
        q = me.q_norm(q)
        if me.is_kv_shared_layer:
            q = self.family.turned(q, None, *tables)[0]
            k, v = shared[me.layer_type]
        else:
            q, k = self.family.turned(q, me.k_norm(own[0]), *tables)
            k, v = k.transpose(1, 2), me.v_norm(own[-1]).transpose(1, 2)
            if cache is not None:
                k, v = cache.update(k, v, me.layer_idx)
        if me.store_full_length_kv:
            shared[me.layer_type] = k, v
        return q.transpose(1, 2), k, v, None
