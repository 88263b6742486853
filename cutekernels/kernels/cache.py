"""The largest result that CuTe kernels store for the L2 to keep: docs/notes/norms.md#kept-results.

Triton kernels take it from ``rates.of(gpu).kept_bytes`` as a constexpr.
"""

KEPT_BYTES = 4 << 20  # H200, 2026-11-22
