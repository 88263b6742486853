"""TMA loads of heads' rows: tiles of queries, and blocks of keys or values, of one tensor or in pages of a cache."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint32, const_expr
from cutlass.cute.nvgpu import cpasync

from cutekernels.kernels.cute.parts.sequences import Sequences


@dataclass(frozen=True)
class TmaOperand:
    """An operand that TMA loads: the copy, the tensor of its coordinates, and its stages in shared memory."""

    tma: cute.CopyAtom
    tX: cute.Tensor  # (S, D, H[, B]), or (D, S, H[, B]) transposed
    sX: cute.Tensor  # (ROWS, D, STAGE), or (D, ROWS, STAGE) transposed


@dataclass(frozen=True)
class TmaBlocks:
    """Blocks of one head's rows, as TMA sees them in global memory and in shared memory."""

    tma: cute.CopyAtom
    source: cute.Tensor  # (TMA, block), or (TMA, box of a page, page)
    target: cute.Tensor  # (TMA, STAGE), or (TMA, box of a block, STAGE)


@dataclass(frozen=True)
class Pages:
    """A sequence's row of the page table, its last key, and the cache's number of pages; None where there are none."""

    gTable: cute.Tensor | None
    last: Int32
    count: Int32


@dataclass(frozen=True)
class HeadLoads:
    """Loads of tiles of ``padded`` columns; blocks of keys have ``tile_kv`` rows, in a whole number of boxes."""

    tile_kv: int
    padded: int
    sequences: Sequences

    @property
    def box(self) -> int:
        """Keys that one TMA load brings: a block, or its part in one page."""
        return min(self.tile_kv, self.sequences.page_size or self.tile_kv)

    def make_tma(self, mX: cute.Tensor, layout: cute.ComposedLayout, transposed: bool):
        """The TMA load of rows of heads, and its tensor ``(S, D, H[, B])``, or ``(D, S, H[, B])`` where ``transposed``.

        Of a cache in pages, S is the rows of a page, and B the pages.
        """
        # Heads and batch entries behind rows and columns, which a box has.
        order = [0, 2, 1] if self.sequences.varlen else [1, 3, 2, 0]
        if transposed:
            order[:2] = order[1], order[0]
        one = cute.slice_(layout, (None, None, 0))
        mX = cute.make_tensor(mX.iterator, cute.select(mX.layout, mode=order))
        return cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileG2SOp(), mX, one, cute.product_each(one.shape))

    @cute.jit
    def rows_of(
        self,
        operand: TmaOperand,
        rows: cutlass.Constexpr[int],
        begin: Int32,
        head: Int32,
        batch: Int32,
        transposed: cutlass.Constexpr[bool],
    ) -> TmaBlocks:
        """Blocks of ``rows`` of a head from row ``begin`` on, ``(TMA, block)``, to ``(TMA, STAGE)``."""
        # The head's rows, from the tile's first one on; TMA writes zeros behind the tensor's last.
        tX, sX = operand.tX, operand.sX
        tX = tX[None, None, head] if const_expr(self.sequences.varlen) else tX[None, None, head, batch]
        if const_expr(transposed):
            gX = cute.local_tile(cute.domain_offset((0, begin), tX), (self.padded, rows), (0, None))
        else:
            gX = cute.local_tile(cute.domain_offset((begin, 0), tX), (rows, self.padded), (None, 0))
        target, source = cpasync.tma_partition(
            operand.tma, 0, cute.make_layout(1), cute.group_modes(sX, 0, 2), cute.group_modes(gX, 0, 2)
        )
        return TmaBlocks(operand.tma, source, target)

    @cute.jit
    def keys_of(
        self, operand: TmaOperand, begin: Int32, head: Int32, batch: Int32, transposed: cutlass.Constexpr[bool]
    ) -> TmaBlocks:
        """Blocks as of :meth:`rows_of`; in pages ``(TMA, box of a page, page)`` to ``(TMA, box of a block, STAGE)``."""
        if const_expr(not self.sequences.page_size):
            blocks = self.rows_of(operand, self.tile_kv, begin, head, batch, transposed)
        else:
            # A page's number comes from the table at run time, so it stays a mode of the source.
            tiler, boxes = (self.box, self.padded), (None, 0, None)
            if const_expr(transposed):
                tiler, boxes = tiler[::-1], (0, None, None)
            target, source = cpasync.tma_partition(
                operand.tma,
                0,
                cute.make_layout(1),
                cute.group_modes(cute.local_tile(operand.sX, tiler, boxes), 0, 2),
                cute.group_modes(cute.local_tile(operand.tX[None, None, head, None], tiler, boxes), 0, 2),
            )
            blocks = TmaBlocks(operand.tma, source, target)
        return blocks

    @cute.jit
    def load(self, blocks: TmaBlocks, block: Int32, stage: Int32, full: cute.Pointer, pages: Pages):
        """Starts the loads of a block of K or V into ``stage``, one or one of each page; bytes arrive on ``full``.

        Entries of the page table that name no page become the last page; keys behind the sequence's last are read from
        its last page.
        """
        tma, source, target = blocks.tma, blocks.source, blocks.target
        if const_expr(not self.sequences.page_size):
            cute.copy(tma, source[None, block], target[None, stage], tma_bar_ptr=full + stage)
        else:
            size = const_expr(self.sequences.page_size)
            # Part by part: the page of its first token, and the box in that page.
            for part in cutlass.range_constexpr(self.tile_kv // self.box):
                token = block * self.tile_kv + part * self.box
                page = pages.gTable[cutlass.min(token, pages.last) // size]
                page = Int32(cutlass.min(Uint32(page), Uint32(pages.count - 1)))
                inside = token % size // self.box
                cute.copy(tma, source[None, inside, page], target[None, part, stage], tma_bar_ptr=full + stage)
