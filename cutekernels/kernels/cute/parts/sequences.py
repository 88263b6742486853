"""Tiles of heads: the order in which CTAs take them, their sequences, and the addresses of a head's rows."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr

from cutekernels.kernels.cute.parts.heads import WIDEST


@dataclass(frozen=True)
class HeadOrder:
    """The order in which CTAs take tiles: heads in bands, and in a band the heaviest tiles of all its heads first.

    ``"rows"``: a band is one head, whose K and V are then read together. ``"heads"``: one band of all, so that the
    heaviest tiles come first everywhere. ``"l2"``: as many heads as have their K and V in ``l2_bytes``.
    """

    order: str
    l2_bytes: int

    def band(self, heads: Int32, group: Int32, bytes_per_head: Int64) -> Int32:
        """Heads in a band; ``group`` of them share the ``bytes_per_head`` that they walk."""
        if self.order == "rows":
            return Int32(1)
        if self.order == "heads":
            return heads
        fitting = cutlass.max(Int64(self.l2_bytes) // cutlass.max(bytes_per_head, Int64(1)), Int64(1))
        return cutlass.max(Int32(cutlass.min(fitting * Int64(group), Int64(heads))), Int32(1))

    @cute.jit
    def place(self, block: Int32, heads: Int32, tiles: Int32, band: Int32) -> tuple[Int32, Int32]:
        """``(tile, head)`` of a CTA; every block below ``heads * tiles`` has its own."""
        # Within a band the last tiles of all its heads come first; the last band may have fewer heads.
        at = block // (band * tiles)
        first = at * band
        width = cutlass.min(band, heads - first)
        inside = block - first * tiles
        return tiles - 1 - inside // width, first + inside % width


@dataclass(frozen=True)
class Head:
    """The rows of one head in global memory; strides are in elements."""

    rows: cute.Pointer  # the first one
    stride: Int32  # from row to row
    between: Int64  # from head to head


@dataclass(frozen=True)
class HeadTile:
    """A tile of X's rows of one head: its sequence, and where the sequence's rows of X and of Y lie."""

    batch: Int32
    head: Int32
    tile: Int32  # in the sequence
    begin_x: Int32  # of the sequence, in a varlen tensor
    begin_y: Int32
    seq_x: Int32
    seq_y: Int32


@dataclass(frozen=True)
class Ends:
    """Where sequences end, in global memory; what a kind of sequences does not have is None."""

    mCuX: cute.Tensor | None  # (B + 1,) of varlen X
    mCuY: cute.Tensor | None  # (B + 1,) of varlen Y, or a cache's lengths (B,)
    mTable: cute.Tensor | None = None  # (B, MAX_PAGES) of a cache in pages


@dataclass(frozen=True)
class Sequences:
    """Tensors ``(B, S, H, D)``, or ``varlen`` ones ``(TOTAL, H, D)`` with the sequences' ends in ``(B + 1,)``.

    K and V may be in a cache, of pages unless ``page_size`` is 0; then their ends are the sequences' lengths ``(B,)``.

    Ends may be anything: they are clamped to the tensors, and one below its predecessor counts as equal to it. Rows
    before the first sequence and behind the last belong to two more sequences, which see nothing. Lengths too are
    clamped to the cache's room.
    """

    varlen: bool
    page_size: int | None = None  # None: no cache

    @property
    def cached(self) -> bool:
        return self.page_size is not None

    @property
    def rows_mode(self) -> int:
        """The mode of rows; that of heads is the next."""
        return 0 if self.varlen else 1

    def grid(self, mX: cute.Tensor, mCu: cute.Tensor | None, rows: int) -> tuple[Int32, Int32]:
        """Tiles of ``rows`` of a head, no fewer than there are, and heads; of all sequences together."""
        heads = mX.shape[self.rows_mode + 1]
        if self.varlen:
            return mX.shape[0] // rows + (mCu.shape[0] + 1), heads
        return cute.ceil_div(mX.shape[1], rows), heads * mX.shape[0]

    def room(self, mY: cute.Tensor, mTable: cute.Tensor | None) -> Int32:
        """Most rows of a sequence of K and V."""
        return mTable.shape[1] * self.page_size if self.page_size else mY.shape[1]

    def length(self, mX: cute.Tensor, mCu: cute.Tensor | None, mTable: cute.Tensor | None = None) -> Int32:
        """Rows of a sequence of K and V; their mean where varlen."""
        if self.cached:
            return self.room(mX, mTable)
        if self.varlen:
            return mX.shape[0] // cutlass.max(mCu.shape[0] - 1, Int32(1))
        return mX.shape[1]

    @cute.jit
    def locate(self, tile: Int32, layer: Int32, rows: int, mX: cute.Tensor, mY: cute.Tensor, ends: Ends) -> HeadTile:
        """Position of ``tile`` of ``rows`` of X; ``layer`` counts heads, of all sequences unless they are varlen."""
        batch, head = Int32(0), layer
        begin_x, begin_y = Int32(0), Int32(0)
        if const_expr(self.varlen):
            batch, tile, begin_x, seq_x = self.find(ends.mCuX, mX.shape[0], tile, rows)
            seq_y = Int32(0)
            # Rows before the first sequence and behind the last have no keys.
            if batch >= 0 and batch < ends.mCuY.shape[0] - 1:
                begin_y = cutlass.min(cutlass.max(ends.mCuY[batch], Int32(0)), mY.shape[0])
                seq_y = cutlass.min(cutlass.max(ends.mCuY[batch + 1], begin_y), mY.shape[0]) - begin_y
        else:
            # Layers count heads, batch by batch.
            heads = mX.shape[2]
            batch = layer // heads
            head = layer - batch * heads
            seq_x, seq_y = mX.shape[1], mY.shape[1]
            if const_expr(self.cached):
                seq_y = cutlass.min(cutlass.max(ends.mCuY[batch], Int32(0)), self.room(mY, ends.mTable))
        return HeadTile(batch, head, tile, begin_x, begin_y, seq_x, seq_y)

    @cute.jit
    def head(self, mX: cute.Tensor, batch: Int32, begin: Int32, head: Int32) -> Head:
        """The rows of one head, from row ``begin`` of a varlen tensor on, else of batch ``batch``."""
        stride = mX.layout.stride
        at = const_expr(self.rows_mode)
        # Offsets of sequences and heads have 64 bits; those between rows of a tile have 32 (HeadRows).
        if const_expr(self.varlen):
            offset = Int64(begin) * Int64(stride[0])
        else:
            offset = Int64(batch) * Int64(stride[0])
        heads = Int64(stride[at + 1])
        rows = cute.assume(Int32(stride[at]), divby=WIDEST)
        return Head(mX.iterator + (offset + Int64(head) * heads), rows, cute.assume(heads, divby=WIDEST))

    @cute.jit
    def find(self, mCu: cute.Tensor, total: Int32, tile: Int32, rows: int) -> tuple[Int32, Int32, Int32, Int32]:
        """``(sequence, tile in it, its begin, its length)`` of tiles of ``rows``, in the order of ``total`` rows.

        Sequence -1 are the rows before the first, and that behind the last the rest; surplus tiles lie behind its end.
        """
        # Every CTA searches for itself, sequence by sequence: a tile's number falls by the tiles of those passed.
        sequences = mCu.shape[0] - 1
        sequence, begin = Int32(-1), Int32(0)
        end = cutlass.min(cutlass.max(mCu[0], Int32(0)), total)
        tiles = (end + rows - 1) // rows
        while tile >= tiles and sequence < sequences:
            tile = tile - tiles
            sequence = sequence + 1
            begin = end
            end = total
            if sequence < sequences:
                end = cutlass.min(cutlass.max(mCu[sequence + 1], begin), total)
            tiles = (end - begin + rows - 1) // rows
        return sequence, tile, begin, end - begin
