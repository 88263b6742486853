"""Triton kernels of the elementwise and row-wise ops.

Here lives ``@triton.jit`` code and nothing else: shapes, rules and launches belong to the op. A recipe in
the disk cache may name functions of this package only (see ``cutekernels.backends.triton``).

Conventions: pointers first, then run-time integers (all 64 bit, so no offset wraps past 2^31 elements),
then constexprs in capitals. Arithmetic is in fp32 and each result is rounded once.

Names: ``x_ptr`` is an operand's first element; its strides, in elements, are ``x_row``, ``x_col`` and so on, named
after the axis. A stride that the op promises to be 1 arrives as a constexpr. ``dx`` is the gradient of x. ``there`` and
``inside`` are masks of rows and elements that exist; what they leave out is neither read nor written.
A kernel's docstring says its formula, then grid and schedule; kernels in one file share what the file's says.
"""
