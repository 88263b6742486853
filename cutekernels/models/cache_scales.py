"""Scales of a cache in FP8 that a checkpoint holds: ``cache = value / scale``, a number a layer or one a head.

Names, behind a layer's ``self_attn``: ``k_scale`` and ``v_scale``, as compressed-tensors writes them; the same of
``k_proj`` and ``v_proj``, or of ``qkv_proj``; ``kv_scale``, deprecated, of both.
"""

from __future__ import annotations

import re
from typing import Any

from torch import Tensor

from cutekernels.models.folder import Folder
from cutekernels.models.loaded import LoadedModel

SCALES = re.compile(r"^model\.layers\.(\d+)\.self_attn\.(?:(k_proj|v_proj|qkv_proj)\.)?(k_scale|v_scale|kv_scale)$")
_PLACES = {"k_scale": ("k_proj", "qkv_proj"), "v_scale": ("v_proj", "qkv_proj")}


def put_scales(model: LoadedModel, folder: Folder) -> None:
    """Gives the layers of ``model`` the scales of ``folder``: ``self_attn.k_scale`` and ``v_scale``."""
    names = [(name, found) for name in folder.entries if (found := SCALES.match(name))]
    for name, found in sorted(names, key=lambda item: item[1][3] != "kv_scale"):  # the deprecated one gives way
        layers: Any = model.model.layers
        if int(found[1]) < len(layers):
            value = folder.read(name).float().clone()
            for kind in _PLACES if found[3] == "kv_scale" else [found[3]]:
                setattr(layers[int(found[1])].self_attn, kind, value)


def cache_scales(attention: Any) -> tuple[Tensor | None, Tensor | None]:
    """The scales that an attention module has, of keys and of values."""
    k, v = (_scale(attention, kind, *places) for kind, places in _PLACES.items())
    return k, v


def _scale(attention: Any, kind: str, *places: str) -> Tensor | None:
    own = [getattr(module, kind, None) for module in (attention, *[getattr(attention, name, None) for name in places])]
    found = [t.detach() for t in (*own, getattr(attention, "kv_scale", None)) if isinstance(t, Tensor)]
    return found[0] if found else None
