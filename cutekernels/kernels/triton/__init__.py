"""Triton kernels of the elementwise and row-wise ops.

Here lives ``@triton.jit`` code and nothing else: shapes, rules and launches belong to the op. A recipe in
the disk cache may name functions of this package only (see ``cutekernels.backends.triton``).

Conventions: pointers first, then run-time integers (all 64 bit, so no offset wraps past 2^31 elements),
then constexprs in capitals. Arithmetic is in fp32 and each result is rounded once.
"""
