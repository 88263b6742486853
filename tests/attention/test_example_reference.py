"""``examples/attention_reference.py``: both references, torch's attention and ours agree."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
import torch

import cutekernels as ck

EXAMPLE = Path(__file__).parents[2] / "examples" / "attention_reference.py"
REFERENCES = runpy.run_path(str(EXAMPLE))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("queries", "keys", "heads", "heads_kv"), [(1, 1, 1, 1), (70, 70, 4, 2), (5, 130, 2, 1), (130, 5, 2, 2)]
)
def test_the_references_agree(queries: int, keys: int, heads: int, heads_kv: int, causal: bool) -> None:
    """Lengths that are no multiples of a block, grouped heads, and queries that see no key."""
    draw = torch.Generator().manual_seed(2)
    q = torch.randn(2, queries, heads, 16, generator=draw, dtype=torch.float64)
    k, v = (torch.randn(2, keys, heads_kv, 16, generator=draw, dtype=torch.float64) for _ in range(2))
    expected = REFERENCES["naive"](q, k, v, causal=causal)
    for rows, cols in ((64, 64), (3, 7), (256, 256)):
        found = REFERENCES["blocked"](q, k, v, causal=causal, rows=rows, cols=cols)
        torch.testing.assert_close(found, expected, atol=1e-12, rtol=1e-12)
    ours = ck.attention(q.float(), k.float(), v.float(), causal=causal)
    torch.testing.assert_close(ours, expected.float(), atol=2e-6, rtol=1e-5)
    if queries == keys:
        heads_first = [t.transpose(1, 2) for t in (q, k, v)]
        torchs = torch.nn.functional.scaled_dot_product_attention(*heads_first, is_causal=causal, enable_gqa=True)
        torch.testing.assert_close(torchs.transpose(1, 2), expected, atol=1e-12, rtol=1e-12)
