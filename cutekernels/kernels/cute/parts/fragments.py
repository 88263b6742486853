"""Fragments from swizzled shared memory with one address per thread.

A row of a swizzle pattern is 64 or 128 bytes; its 16-byte chunks change places by an XOR with the row's number. A
thread's rows differ by multiples of 8, so the XOR is the same for all of them: one address leads to every vector by an
XOR with a constant (the chunk) and a constant offset (rows, patterns). A swizzled pointer would take a shift and a LOP3
for each vector: 180 of an attention block's 930 instructions on an H200.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr


def span_bytes(columns: int) -> int:
    """A swizzle pattern's row, in a K-major buffer whose rows have ``columns`` 16-bit elements, a multiple of 32."""
    return 128 if columns % 64 == 0 else 64


def swizzled(linear: Int32, span: int) -> Int32:
    """The swizzled offset of the bytes at ``linear``, in a buffer that begins at a multiple of 1024."""
    return linear ^ ((linear >> 3) & (span - 16))


@cute.jit
def load_fragments(
    copy: cute.TiledCopy,
    address: Int32,
    layout: cutlass.Constexpr,
    span: cutlass.Constexpr,
    tXrX: cute.Tensor,
    y: cutlass.Constexpr,
):
    """ldmatrix of fragments ``(.., .., y)`` into ``tXrX`` (CPY, CPY_X, CPY_Y).

    ``address`` is that of this thread's row of fragment 0, ``layout`` the buffer's partition (CPY, CPY_X, CPY_Y)
    without its swizzle.
    """
    element_bytes = const_expr(tXrX.element_type.width // 8)
    for x in cutlass.range_constexpr(cute.size(tXrX, mode=[1])):
        offset = const_expr(cute.crd2idx((0, x, y), layout) * element_bytes)
        chunk = const_expr(offset % span)
        pointer = cute.make_ptr(
            tXrX.element_type, (address ^ chunk) + (offset - chunk), cute.AddressSpace.smem, assumed_align=16
        )
        cute.copy(copy, cute.make_tensor(pointer, cute.select(layout, mode=[0])), tXrX[None, x, y])


def shared_tensor(at: cute.Pointer, layout: cute.ComposedLayout, dtype: type[cutlass.Numeric]) -> cute.Tensor:
    """A tensor of a swizzled ``layout`` in shared memory at ``at``."""
    return cute.make_tensor(cute.recast_ptr(at, layout.inner, dtype), layout.outer)
