"""The two products of attention's loops by mma.sync, with fragments that ldmatrix reads by one address per thread.

Nothing here waits: the caller's cp.async waits and barriers make a buffer complete before its products.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from cutekernels.kernels.cute.parts.fragments import load_fragments, span_bytes, swizzled
from cutekernels.kernels.cute.parts.mma import WarpMma
from cutekernels.kernels.cute.parts.softmax import as_operand


class Source(NamedTuple):
    """A buffer as a thread reads it."""

    copy: cute.TiledCopy
    tensor: cute.Tensor  # the buffer without its swizzle, of which only the layout counts
    layout: cute.Layout  # this thread's partition (CPY, CPY_X, CPY_Y), without the swizzle
    address: Int32  # of this thread's row of fragment 0
    span: int  # bytes of a row of the swizzle pattern


class Sources(NamedTuple):
    x: Source
    y: Source
    yt: Source


@dataclass(frozen=True)
class Products:
    """``X Y^T`` over the head dim and ``P Y`` over the rows of Y, for X of a CTA's own rows and Y of those it walks.

    ``x_in_registers``: X's fragments stay there; else each product reads them from shared memory again.
    """

    xy: WarpMma
    py: WarpMma
    x_in_registers: bool

    def tiled_mma(self, dtype: type[cutlass.Numeric]) -> cute.TiledMma:
        return self.xy.tiled_mma(dtype)

    def sources(
        self, tid: Int32, tiled_mma: cute.TiledMma, x: Any, layout_x: Any, y: Any, yt: Any, layout_y: Any
    ) -> Sources:
        """The buffers at pointers ``x``, ``y`` (for ``X Y^T``) and ``yt`` (for ``P Y``), of ``(rows, D, STAGE)``."""
        # Buffers without their swizzle: layouts alone, since load_fragments swizzles addresses.
        dtype = x.dtype
        uX, uY, uYt = [
            cute.make_tensor(at, of.outer)[None, None, 0] for at, of in ((x, layout_x), (y, layout_y), (yt, layout_y))
        ]
        span = span_bytes(cute.size(uX, mode=[1]))
        uYt = cute.make_tensor(yt, cute.select(uYt.layout, mode=[1, 0]))  # (D, rows)
        copies = (*self.xy.fragment_copies(tiled_mma, dtype), self.py.fragment_copies(tiled_mma, dtype)[1])
        tensors = (uX, uY, uYt)
        parts = [copy.get_slice(tid).partition_S(tensor) for copy, tensor in zip(copies, tensors, strict=True)]
        addresses = [swizzled(part.iterator.toint().to(Int32), span) for part in parts]
        layouts = [part.layout for part in parts]
        return Sources(*map(Source, copies, tensors, layouts, addresses, (span,) * 3))

    @cute.jit
    def load(self, tid: Int32, fragments: tuple[cute.Tensor, ...], source: cutlass.Constexpr, pitch: int):
        """All fragments of the source's buffer, and of those that follow it ``pitch`` bytes after one another."""
        for kb in cutlass.range_constexpr(cute.size(fragments[0], mode=[2])):
            for i in cutlass.range_constexpr(len(fragments)):
                tSrX = source.copy.get_slice(tid).retile(fragments[i])
                load_fragments(source.copy, source.address + i * pitch, source.layout, source.span, tSrX, kb)

    @cute.jit
    def multiply(
        self,
        tid: Int32,
        acc: cute.Tensor,  # ((2, 2), MMA_M, MMA_Y)
        rX: cute.Tensor,  # (MMA, MMA_M, MMA_D)
        sources: cutlass.Constexpr,
        at_x: Int32,
        at_y: Int32,
        tiled_mma: cute.TiledMma,
    ):
        """``acc += X Y^T``, of buffers ``at_x`` and ``at_y`` bytes behind the sources'."""
        from_x, from_y = sources.x.address + at_x, sources.y.address + at_y
        thr_mma = tiled_mma.get_slice(tid)
        rY = thr_mma.make_fragment_B(thr_mma.partition_B(sources.y.tensor))  # (MMA, MMA_Y, MMA_D)
        tSrX = sources.x.copy.get_slice(tid).retile(rX)  # (CPY, CPY_X, CPY_D)
        tSrY = sources.y.copy.get_slice(tid).retile(rY)  # (CPY, CPY_Y, CPY_D)
        for kb in cutlass.range_constexpr(cute.size(rY, mode=[2])):
            # 16 columns of the head dim a step; X's are read again unless they stay in registers.
            if const_expr(not self.x_in_registers):
                load_fragments(sources.x.copy, from_x, sources.x.layout, sources.x.span, tSrX, kb)
            load_fragments(sources.y.copy, from_y, sources.y.layout, sources.y.span, tSrY, kb)
            cute.gemm(tiled_mma, acc, rX[None, None, kb], rY[None, None, kb], acc)

    @cute.jit
    def add(
        self,
        tid: Int32,
        acc: cute.Tensor,  # ((2, 2), MMA_M, MMA_D)
        rP: cute.Tensor,  # ((2, 2), MMA_M, MMA_Y)
        sources: cutlass.Constexpr,
        at_y: Int32,
        tiled_mma: cute.TiledMma,
    ):
        """``acc += P Y``, of a buffer ``at_y`` bytes behind the source's."""
        from_yt = sources.yt.address + at_y
        thr_mma = tiled_mma.get_slice(tid)
        rY = thr_mma.make_fragment_B(thr_mma.partition_B(sources.yt.tensor))  # (MMA, MMA_D, MMA_Y)
        tOrY = sources.yt.copy.get_slice(tid).retile(rY)  # (CPY, CPY_D, CPY_Y)
        tOrP = as_operand(rP)  # ((2, 2, 2), MMA_M, MMA_Y / 2)
        # P's accumulators are A's fragments already; Y is read transposed, 16 rows of it a step.
        for kb in cutlass.range_constexpr(cute.size(rY, mode=[2])):
            load_fragments(sources.yt.copy, from_yt, sources.yt.layout, sources.yt.span, tOrY, kb)
            cute.gemm(tiled_mma, acc, tOrP[None, None, kb], rY[None, None, kb], acc)


def warp_products(warps: int, x_in_registers: bool) -> Products:
    """Products of ``warps`` that share Y and divide X's rows."""
    plain, transposed = (WarpMma(warps, 1, cutlass.Float32, True, k_major) for k_major in (True, False))
    return Products(plain, transposed, x_in_registers)
