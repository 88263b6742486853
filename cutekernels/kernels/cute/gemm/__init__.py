"""GEMM bodies, one per schedule."""
