"""Rows of a K or V cache, contiguous or in pages, into shared memory that belongs to one warp or to a CTA.

Nothing here waits: fetches start cp.async copies, which the caller commits, waits for and makes visible by a barrier.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, Uint32, const_expr
from cutlass.cute.nvgpu import cpasync

from cutekernels.kernels.cute.parts.float8 import Float8Load, unsigned
from cutekernels.kernels.cute.parts.fragments import span_bytes
from cutekernels.kernels.cute.parts.heads import WIDEST, HeadRows, SwizzledRows, shared_vector, vector

GRAIN = 16  # keys per entry of the page table at least: the smallest page


@dataclass(frozen=True)
class CacheHead:
    """A head of a cache: its first row (of the sequence, where there are no pages), and strides in elements."""

    rows: cute.Pointer
    between_pages: Int64
    between_rows: Int64  # of a page


@dataclass(frozen=True)
class SeenKeys:
    """The keys of a sequence that some query sees."""

    first: Int32
    last: Int32


@dataclass(frozen=True)
class CacheRows(SwizzledRows):
    """Tiles of one head and sequence, copied and read by one warp.

    Without pages (``page_size = 0``) a sequence is one page. Tiles begin at multiples of ``GRAIN`` keys. Keys that no
    query sees are never read: the nearest key that is seen is read in their place, so that the rest of the cache
    reaches no accumulator.
    """

    page_size: int

    @property
    def copying(self) -> int:
        return 32

    @property
    def paged(self) -> bool:
        return self.page_size > 0

    @property
    def grains(self) -> int:
        return self.rows // GRAIN

    def columns(self) -> list[int]:
        """The columns of this lane's vectors of a row, beyond its first."""
        return [j * self.along * WIDEST for j in range(self.padded // (self.along * WIDEST))]

    def place(self, row: int, column: int) -> tuple[int, int]:
        """The way from the lane's first vector to another: the XOR with its address, then the offset (bytes).

        Four rows on, half a pattern of 128 bytes, the swizzle's XOR changes one bit; eight rows on, none.
        """
        # The swizzle's XOR of a row's number, then patterns of columns, each with all rows.
        span = span_bytes(self.padded)
        offset = (column // (self.along * WIDEST) * self.rows + row) * span
        return ((row * span) >> 3) & (span - 16), offset

    @cute.jit
    def look_up(self, pages: cute.Tensor, gTable: cute.Tensor | None, token: Int32, last: Int32):
        """Fills ``pages`` (grains,) with those of the tile at ``token``, from the sequence's row of the page table."""
        if const_expr(self.paged):
            # A page has at least GRAIN keys, so that one entry serves as many.
            for g in cutlass.range_constexpr(self.grains):
                pages[g] = gTable[cutlass.min(token + g * GRAIN, last) // self.page_size]

    @cute.jit
    def confine(self, pages: cute.Tensor, count: Int32):
        """Entries that name none of the cache's ``count`` pages become its last page.

        Called right before :meth:`fetch`, not by :meth:`look_up`, where it would wait for the load.
        """
        if const_expr(self.paged):
            for g in cutlass.range_constexpr(self.grains):
                pages[g] = Int32(cutlass.min(Uint32(pages[g]), Uint32(count - 1)))

    @cute.jit
    def fetch(self, lane: Int32, head: CacheHead, pages: cute.Tensor, token: Int32, seen: SeenKeys, address: Int32):
        """Starts the copy of the tile at ``token`` into the buffer of ``address``."""
        dtype = head.rows.dtype
        atom = cute.make_copy_atom(cpasync.CopyG2SOp(cpasync.LoadCacheMode.GLOBAL), dtype, num_bits_per_copy=128)
        own, column = lane // self.along, lane % self.along * WIDEST
        for i in cutlass.range_constexpr(0, self.rows, self.across):
            # Keys that are not seen are never read; the nearest one that is takes their place.
            key = cutlass.min(cutlass.max(token + own + i, seen.first), seen.last)
            if const_expr(self.paged):
                page = Int64(pages[i // GRAIN]) * head.between_pages
                source = head.rows + (page + Int64(key % self.page_size) * head.between_rows + column)
            else:
                source = head.rows + (Int64(key) * head.between_rows + column)
            for j in self.columns():
                flip, offset = self.place(i, j)
                sX = shared_vector(dtype, (address ^ flip) + offset)
                if const_expr(self.ragged(j)):
                    if column + j < self.head_dim:
                        cute.copy(atom, vector(source + j), sX)
                else:
                    cute.copy(atom, vector(source + j), sX)

    @cute.jit
    def clear_padding(self, lane: Int32, dtype: cutlass.Constexpr, address: Int32):
        """Zeros the columns of a buffer that no copy fills."""
        column = lane % self.along * WIDEST
        for i in cutlass.range_constexpr(0, self.rows, self.across):
            for j in self.columns():
                if const_expr(self.ragged(j)):
                    beyond = column + j >= self.head_dim
                    if beyond:
                        flip, offset = self.place(i, j)
                        shared_vector(dtype, (address ^ flip) + offset).fill(0.0)


@dataclass(frozen=True)
class CacheSteps:
    """The way from row to row of a cache, in the place of a stride; strides are in elements."""

    between_pages: Int64
    between_rows: Int64  # of a page
    pages: cute.Tensor  # this thread's pages of a tile, in registers
    count: Int32  # the cache's pages
    first: Int32  # the first key that is seen
    scales: cute.Pointer | None = None  # of the head's tokens, a biased exponent each
    between_scales: Int64 | None = None  # from page to page


@dataclass(frozen=True)
class CacheTiles(HeadRows):
    """Tiles of one head and sequence, copied by ``threads`` as :class:`HeadRows` are, with ``CacheSteps`` for a stride.

    Where a window limits the left side (``clipped``), the first key that is seen is read in the place of those before
    it, whose pages may be gone. Tiles begin at multiples of ``rows``; pages and tiles are powers of two. e4m3, two
    numbers to an element of the cache, is loaded and converted by ``float8``, without cp.async.
    """

    page_size: int
    clipped: bool
    float8: Float8Load | None = None

    @property
    def paged(self) -> bool:
        return self.page_size > 0

    @property
    def rows_per_page(self) -> int:
        """Rows of the tile from one entry of a thread's pages to the next."""
        return min(self.rows, max(self.across, self.page_size)) if self.paged else self.rows

    @cute.jit
    def look_up(self, tid: Int32, steps: CacheSteps, gTable: cute.Tensor | None, token: Int32, last: Int32):
        """Has ``steps`` hold the pages of the tile at ``token``, from the sequence's row of the page table."""
        if const_expr(self.paged):
            # Where a page has fewer rows than a step of the threads, each thread has pages of its own.
            own = tid // self.along if const_expr(self.page_size < self.across) else Int32(0)
            for e in cutlass.range_constexpr(self.rows // self.rows_per_page):
                key = cutlass.min(cutlass.max(token + own + e * self.rows_per_page, steps.first), last)
                steps.pages[e] = gTable[key // self.page_size]

    @cute.jit
    def fetch(
        self, tid: Int32, head: cute.Pointer, steps: CacheSteps, token: Int32, address: Int32, rows: Int32 | None
    ):
        """Starts the copy of the tile at ``token``, whose pages ``steps`` hold, into the buffer of ``address``.

        The first ``rows`` rows of the tile exist (None: all do); the others become zeros. Entries that name no page
        become the last page.
        """
        dtype = head.dtype if self.float8 is None else self.float8.dtype
        per_element = const_expr(1 if self.float8 is None else 2)
        atom = cute.make_copy_atom(cpasync.CopyG2SOp(cpasync.LoadCacheMode.GLOBAL), dtype, num_bits_per_copy=128)
        own, column = tid // self.along, tid % self.along * WIDEST
        for i in cutlass.range_constexpr(0, self.rows, self.across):
            key = token + own + i
            if const_expr(self.clipped):
                key = cutlass.max(key, steps.first)
            source = head + column // per_element
            if const_expr(self.paged):
                page = Int32(cutlass.min(Uint32(steps.pages[i // self.rows_per_page]), Uint32(steps.count - 1)))
                source = source + Int64(page) * steps.between_pages
                key = key % self.page_size
            source = source + Int64(key) * steps.between_rows
            power = None
            if const_expr(steps.scales is not None):
                # Keys that do not exist have no scale.
                at = Int64(key)
                if const_expr(self.paged):
                    at = at + Int64(page) * steps.between_scales
                gScale = cute.make_tensor(steps.scales + at, cute.make_layout(1))
                exponent = Int32(0)
                there = own + i < rows if const_expr(rows is not None) else Boolean(True)
                if there:
                    exponent = unsigned(gScale[0])
                power = self.float8.power(exponent)
            # This thread's vectors of the row: none beyond the head, zeros for a row that does not exist.
            for j, offset in self.columns(i):
                sX, gX = shared_vector(dtype, address + offset), source + j // per_element
                exists = own + i < rows if const_expr(rows is not None) else Boolean(True)
                if const_expr(rows is not None or self.ragged(j)):
                    if exists and column + j < self.head_dim:
                        self.copy(atom, gX, sX, power)
                    elif not exists:
                        sX.fill(0.0)
                else:
                    self.copy(atom, gX, sX, power)
            if const_expr(self.float8 is not None):
                # Nobody waits for data: without it all rows' loads are hoisted together, and spill.
                cute.arch.sync_warp()

    @cute.jit
    def copy(self, atom: cute.CopyAtom, source: cute.Pointer, sX: cute.Tensor, power: Int32 | None):
        """One vector of eight numbers."""
        if const_expr(self.float8 is None):
            cute.copy(atom, vector(source), sX)
        else:
            self.float8.copy(source, sX, power)

    def columns(self, row: int) -> list[tuple[int, int]]:
        """This thread's vectors of row ``row``, relative to its first: ``(column, offset in the buffer in bytes)``."""
        return [(j, offset) for i, j, offset in self.vectors() if i == row]
