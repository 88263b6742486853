"""Appending keys and values to a cache: ``kv_append``."""

from __future__ import annotations

from cutekernels.ops.kv_append.op import OPS as OPS
