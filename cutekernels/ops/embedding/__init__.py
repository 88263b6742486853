"""Rows of a table by id: ``embedding``."""

from __future__ import annotations

from cutekernels.ops.embedding.op import EMBEDDING, EMBEDDING_BACKWARD

OPS = (EMBEDDING, EMBEDDING_BACKWARD)
