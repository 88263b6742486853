"""Triton kernels of the elementwise and row-wise ops.

Here lives ``@triton.jit`` code and nothing else: shapes, rules and launches belong to the op. A recipe in
the disk cache may name functions of this package only (see ``cutekernels.backends.triton``).

A kernel takes its values in NamedTuples, in the order of a launch: ``at`` (pointers), ``n`` (sizes), ``by`` (strides),
``of`` (numbers of a call), ``how`` (what is compiled in, in capitals). They are handed down whole. A field with a
default is one that not every kernel of a file has; it is a constexpr where it is missing. Run-time integers are 64 bits
wide, so that no offset wraps past 2^31 elements. Arithmetic is in fp32 and each result is rounded once.

Names: ``at.x_ptr`` is an operand's first element; its strides, in elements, are ``by.x.row``, ``by.x.col`` and so on,
named after the axis. A stride that the op promises to be 1 arrives as a constexpr. ``dx`` is the gradient of x.
``there`` and ``inside`` are masks of rows and elements that exist; what they leave out is neither read nor written.
A kernel's docstring says its formula, then grid and schedule; kernels in one file share what the file's says.
"""
