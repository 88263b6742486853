"""From a warp group's accumulators to out: boxes of 64 x 64 through swizzled shared memory and TMA stores.

A consumer group has ``boxes`` buffers and uses them in turn, over all of its tiles: box i of a tile takes buffer
``(boxes_used + i) % boxes``. Its first warp issues all TMA copies; the group's named barrier is between that warp and
the other three. Without C, a box in order:

1. The first warp waits until the store that last used the buffer has read it (bulk group); named barrier.
2. Each warp writes its 16 rows by stmatrix; fence to the async proxy; named barrier.
3. The first warp starts the TMA store and commits it as a bulk group.

With C, ``load_inputs`` starts the loads of the first boxes before the mainloop. In place of 1 the group waits on the
buffer's ``c_full`` mbarrier and reads C where it will write the result, and behind 3 the first warp waits for its
stores and starts the load of the box that comes ``boxes`` later.

Ends: TMA stores clip at the ends of out. Rows that belong to another group are not stored by TMA (``GroupBoxes``).
"""

from dataclasses import dataclass, replace
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import cpasync
from cutlass.cute.nvgpu.warp import LdMatrix8x8x16bOp, StMatrix8x8x16bOp

from cutekernels.kernels.cute.parts.epilogue import Epilogue, EpilogueOperands, is_shared
from cutekernels.kernels.cute.parts.ptx import instruction, pin
from cutekernels.kernels.cute.parts.smem import WarpgroupSmem
from cutekernels.kernels.cute.parts.warp_groups import TmaTensor

BOX = WarpgroupSmem.BOX
FIRST_BARRIER = 1  # named barriers of the groups, one each; 0 is the CTA's


@cute.jit
def as_fp32(acc: cute.Tensor, i: cutlass.Constexpr[int]) -> Float32:
    """One of a thread's accumulators in fp32. Fp16 ones are unpacked by an instruction of ours: seeing through it, the
    compiler would keep them unpacked in the mainloop too.
    """
    if const_expr(acc.element_type is Float32):
        return acc[i]
    text = "{ .reg .b16 h<2>; mov.b32 {h0, h1}, $1; cvt.f32.f16 $0, h" + str(i % 2) + "; }"
    word = cute.recast_tensor(acc, Int32)[i // 2]
    return Float32(instruction(text, "=f,r", word, result=Float32.mlir_type))


@dataclass(frozen=True)
class Corner:
    """The first row and column of a tile, and its layer, in the tile's own orientation."""

    row: Int32
    column: Int32
    layer: Int32


@dataclass(frozen=True)
class BoxBuffers:
    """A consumer group's shared memory for its results."""

    thread: Int32  # 0 to 127, in the group
    group: Int32
    boxes: cute.Pointer
    bias: cute.Pointer  # fp32, as many as the tile's side has
    c_full: cute.Pointer  # mbarrier of each box
    first_row: Int32  # of the group, in a tile


@dataclass(frozen=True)
class BoxOperands:
    """Where results go, and what is added to them."""

    out: TmaTensor  # (M, N[, L])
    source: TmaTensor | None = None  # C, likewise
    mBias: cute.Tensor | None = None
    alpha: Float32 | None = None
    beta: Float32 | None = None
    mOut: cute.Tensor | None = None  # (T, N), of rows in groups
    end: Int32 | None = None  # of the tile's group of rows
    own: Any = None  # of a further epilogue


@dataclass(frozen=True)
class BoxCoordinates:
    """Coordinates of a thread's results of a box: (2, 2, N / 8)."""

    boxes: "ResultBoxes"
    buffers: BoxBuffers
    tD: cute.Tensor  # coordinates of out
    corner: Corner  # of the group's rows in out
    offset: tuple[int, int]  # of the box from there: rows, columns
    rC: cute.Tensor  # the box of C

    @property
    def gated(self) -> bool:
        return self.boxes.gate != "none"

    @cute.jit
    def columns(self, vector: cute.Tensor) -> cute.TensorSSA:
        return self.along(self.boxes.out_columns, vector)

    @cute.jit
    def rows(self, vector: cute.Tensor) -> cute.TensorSSA:
        return self.along(1 - self.boxes.out_columns, vector)

    @cute.jit
    def along(self, mode: cutlass.Constexpr[int], vector: cute.Tensor) -> cute.TensorSSA:
        """Values by row (mode 0) or column, each loaded once: of the tile from shared memory, or of all of out."""
        blocks = const_expr(self.boxes.blocks)
        lane, warp = self.buffers.thread % 32, self.buffers.thread // 32
        found = cute.make_rmem_tensor((2, blocks if mode == 1 else 1), Float32)
        if const_expr(not is_shared(vector)):
            found.fill(0.0)
        for j in cutlass.range_constexpr(found.shape[1]):
            for v in cutlass.range_constexpr(2):
                if const_expr(mode == 1):
                    at = self.offset[1] + 8 * j + 2 * (lane % 4) + v
                else:
                    at = self.offset[0] + warp * 16 + v * 8 + lane // 4
                if const_expr(is_shared(vector)):
                    first = Int32(0) if const_expr(mode == 1) else self.buffers.first_row
                    found[v, j] = vector[first + at].to(Float32)
                else:
                    place = at + (self.corner.column if const_expr(mode == 1) else self.corner.row)
                    if place < cute.size(self.tD, mode=[mode]):
                        found[v, j] = vector[place].to(Float32)
        stride = (1, 0, 2) if mode == 1 else (0, 1, 0)
        return cute.make_tensor(found.iterator, cute.make_layout((2, 2, blocks), stride=stride)).load()

    @cute.jit
    def elements(self, tC: cute.Tensor) -> cute.TensorSSA:
        """The box of C, which the caller has read from shared memory."""
        return self.rC.load().to(Float32)

    @cute.jit
    def halves(self, x: cute.TensorSSA) -> tuple[cute.TensorSSA, cute.TensorSSA]:
        rX = cute.make_rmem_tensor(x.shape, Float32)
        rX.store(x)
        return rX[None, None, None, 0].load(), rX[None, None, None, 1].load()


@dataclass(frozen=True)
class ResultBoxes:
    """``epilogue`` of one group's rows of a tile, then their way through ``boxes`` buffers.

    A group has ``count`` boxes of a tile: ``panels`` of 64 rows, ``pitch`` apart, by ``columns``. Where 64 does not
    divide ``columns``, the last box begins early and writes some results twice; never with C, which out may be.
    Fewer columns than 64 are one narrow box.
    ``rows_contiguous``: out's rows are its contiguous extent, so boxes are transposed on their way (stmatrix.trans).
    ``out_columns``: the mode of the tile that runs along out's columns, 0 where it is transposed.
    ``gate``: along ``"n"`` or ``"m"`` a tile has gates, then as many that they multiply; ``columns`` and ``panels`` are
    out's, and neither alpha, C nor bias apply.
    """

    dtype: type[cutlass.Numeric]
    columns: int
    panels: int
    pitch: int
    boxes: int
    rows_contiguous: bool
    source: bool
    biased: bool
    out_columns: int
    epilogue: Epilogue
    gate: str = "none"

    @property
    def panel_accumulators(self) -> int:
        """A thread's accumulators of a panel."""
        return self.columns // 2 * (2 if self.gate == "n" else 1)

    @property
    def gate_distance(self) -> int:
        """How far behind a gate's accumulator a thread holds that of what it multiplies."""
        return self.panels * self.panel_accumulators if self.gate == "m" else self.columns // 2

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of a box."""
        return BOX, min(BOX, self.columns)

    @property
    def blocks(self) -> int:
        """Blocks of 8 columns in a box."""
        return self.shape[1] // 8

    @property
    def values_shape(self) -> tuple[int, ...]:
        """A thread's accumulators of a box: gates, then what they multiply, or results."""
        return (2, 2, self.blocks) if self.gate == "none" else (2, 2, self.blocks, 2)

    @property
    def across(self) -> int:
        """Boxes side by side."""
        return -(-self.columns // BOX)

    @property
    def count(self) -> int:
        """A group's boxes of a tile."""
        return self.panels * self.across

    def layout(self) -> cute.ComposedLayout:
        """A box in shared memory."""
        plain = cute.make_layout(self.shape, stride=(1, BOX) if self.rows_contiguous else (BOX, 1))
        return cute.make_composed_layout(cute.make_swizzle(3, 4, 3), 0, plain)

    def tma(self, op: Any, mX: cute.Tensor) -> TmaTensor:
        """The TMA copy of boxes of ``mX``."""
        return TmaTensor(*cpasync.make_tiled_tma_atom(op, mX, self.layout(), self.shape))

    def offset(self, box: int) -> tuple[int, int]:
        """The first row and column of a group's ``box``."""
        panel, across = divmod(box, self.across)
        return panel * self.pitch, min(across * BOX, self.columns - self.shape[1])

    @cute.jit
    def corner(self, buffers: BoxBuffers, tile: Corner) -> Corner:
        """Where the group's rows of a tile begin."""
        return Corner(tile.row + buffers.first_row, tile.column, tile.layer)

    @cute.jit
    def copies(self, whole: TmaTensor, buffers: BoxBuffers, corner: Corner):
        """Box by box, ``(shared (TMA, box), global (TMA))`` of this group's part of a tile."""
        tX = whole.coordinates
        tX = tX[None, None, corner.layer] if const_expr(cute.rank(tX) == 3) else tX
        layout = self.layout()
        at = cute.recast_ptr(buffers.boxes, layout.inner, self.dtype)
        shape = (*self.shape, self.boxes)
        stride = (1, BOX, BOX * BOX) if const_expr(self.rows_contiguous) else (BOX, 1, BOX * BOX)
        sX = cute.make_tensor(at, cute.make_layout(shape, stride=stride))  # (64, N, box)
        pairs = []
        for box in cutlass.range_constexpr(self.count):
            down, right = self.offset(box)
            moved = cute.domain_offset((corner.row + down, corner.column + right), tX)
            gX = cute.local_tile(moved, self.shape, (0, 0))  # (64, N)
            pairs.append(
                cpasync.tma_partition(
                    whole.tma, 0, cute.make_layout(1), cute.group_modes(sX, 0, 2), cute.group_modes(gX, 0, 2)
                )
            )
        return pairs

    @cute.jit
    def load_inputs(self, buffers: BoxBuffers, operands: BoxOperands, tile: Corner, corner: Corner, boxes_used: Int32):
        """Before the mainloop of ``tile``, of which the group has the rows from ``corner`` on: starts the first loads
        of C, and puts the bias into shared memory.
        """
        if const_expr(self.source):  # noqa: SIM102  known when compiled
            if buffers.thread < 32:
                # The first warp waits until its stores of the tile before have read all boxes: C comes into them.
                cute.arch.cp_async_bulk_wait_group(0, read=True)
                pairs = self.copies(operands.source, buffers, corner)
                for box in cutlass.range_constexpr(min(self.boxes, self.count)):
                    self.load_c(buffers, operands, pairs, box, boxes_used)
        if const_expr(self.biased):
            # Nobody reads the bias of the tile before: all threads have passed the last box's barrier.
            extent = cute.size(operands.out.coordinates, mode=[self.out_columns])
            start = tile.column if const_expr(self.out_columns == 1) else tile.row
            for i in cutlass.range_constexpr(2):
                at = start + i * 128 + buffers.thread
                value = Float32(0.0)
                if at < extent:
                    value = operands.mBias[at].to(Float32)
                buffers.bias[i * 128 + buffers.thread] = value

    @cute.jit
    def load_c(
        self, buffers: BoxBuffers, operands: BoxOperands, pairs: list, box: cutlass.Constexpr[int], boxes_used: Int32
    ):
        """Starts the load of a box of C; the first warp's work."""
        buffer = (boxes_used + box) % self.boxes
        shared, there = pairs[box]
        with cute.arch.elect_one():
            # The only arrival on c_full, with the box's bytes: the whole group waits for them in store_tile.
            cute.arch.mbarrier_arrive_and_expect_tx(buffers.c_full + buffer, BOX * BOX * 2)
        cute.copy(operands.source.tma, there, shared[None, buffer], tma_bar_ptr=buffers.c_full + buffer)

    @cute.jit
    def store_tile(
        self, buffers: BoxBuffers, operands: BoxOperands, acc: cute.Tensor, corner: Corner, boxes_used: Int32
    ):
        """The end of a tile: ``acc`` ((2, 2, N / 8), panels, 1) to out, box by box, from ``corner`` on."""
        thread = buffers.thread
        lane, warp = thread % 32, thread // 32
        half, right = lane // 8 % 2, lane // 16
        # The 16 bytes that this lane gives stmatrix: a row of one of four 8 x 8 blocks, swizzled.
        if const_expr(self.rows_contiguous):
            line, chunk = right * 8 + lane % 8, warp * 2 + half
        else:
            line, chunk = warp * 16 + half * 8 + lane % 8, right
        store = cute.make_copy_atom(StMatrix8x8x16bOp(self.rows_contiguous, 4), self.dtype)
        load = cute.make_copy_atom(LdMatrix8x8x16bOp(self.rows_contiguous, 4), self.dtype)
        pairs = self.copies(operands.out, buffers, corner)
        plain = cute.recast_ptr(buffers.boxes, dtype=self.dtype)
        values = cute.make_rmem_tensor(self.values_shape, Float32)
        of_boxes = EpilogueOperands(own=operands.own)
        if const_expr(self.gate == "none"):
            of_boxes = replace(of_boxes, alpha=operands.alpha, beta=operands.beta)
        if const_expr(self.source):
            sources = self.copies(operands.source, buffers, corner)
            of_boxes = replace(of_boxes, mC=operands.source.coordinates)
        if const_expr(self.biased):
            sBias = cute.make_tensor(buffers.bias, cute.make_layout(WarpgroupSmem.BIASES))  # of the tile
            of_boxes = replace(of_boxes, mBias=sBias)
        rC = cute.make_rmem_tensor((2, 2, self.blocks), self.dtype)
        rD = cute.make_rmem_tensor((2, 2, self.blocks), self.dtype)
        for box in cutlass.range_constexpr(self.count):
            panel = const_expr(box // self.across)
            down, column = self.offset(box)
            buffer = (boxes_used + box) % self.boxes
            # This lane's 16 bytes of each two 8-column blocks of the box.
            pieces = []
            for i in cutlass.range_constexpr(self.blocks // 2):
                if const_expr(self.rows_contiguous):
                    at = (line + 16 * i) * BOX + (chunk ^ (line % 8)) * 8
                else:
                    at = line * BOX + ((chunk + 2 * i) ^ (line % 8)) * 8
                piece = plain + (buffer * (BOX * BOX) + at)
                piece = cute.make_ptr(self.dtype, piece.toint(), cute.AddressSpace.smem, assumed_align=16)
                pieces.append(cute.make_tensor(piece, cute.make_layout(8)))
            if const_expr(self.source):
                # All threads wait for the box of C; a warp reads the rows that it alone will overwrite.
                cute.arch.mbarrier_wait(buffers.c_full + buffer, ((boxes_used + box) // self.boxes) & 1)
                for i in cutlass.range_constexpr(self.blocks // 2):
                    cute.copy(load, pieces[i], cute.make_tensor(rC.iterator + 8 * i, cute.make_layout(8)))
            else:
                if thread < 32:
                    # The first warp waits until the store that last used this buffer has read it, ...
                    cute.arch.cp_async_bulk_wait_group(self.boxes - 1, read=True)
                # ... and the other three wait for the first. Biases of all threads are in shared memory, too.
                cute.arch.barrier(barrier_id=FIRST_BARRIER + buffers.group, number_of_threads=128)
            self.read_accumulators(acc, values, panel, column)
            coordinates = BoxCoordinates(self, buffers, operands.out.coordinates, corner, (down, column), rC)
            if const_expr(self.biased and self.source and box == 0):
                # Biases of all threads are in shared memory; without C the barrier above says so.
                cute.arch.barrier(barrier_id=FIRST_BARRIER + buffers.group, number_of_threads=128)
            rD.store(self.epilogue.apply(values.load(), coordinates, of_boxes).to(self.dtype))
            for i in cutlass.range_constexpr(self.blocks // 2):
                cute.copy(store, cute.make_tensor(rD.iterator + 8 * i, cute.make_layout(8)), pieces[i])
            # The TMA sees what this thread has written, ...
            cute.arch.fence_proxy("async.shared", space="cta")
            # ... and the first warp stores the box when all four have written their rows.
            cute.arch.barrier(barrier_id=FIRST_BARRIER + buffers.group, number_of_threads=128)
            first = Corner(corner.row + down, corner.column + column, corner.layer)
            self.store_box(buffers, operands, pairs[box], first, buffer)
            if thread < 32:
                cute.arch.cp_async_bulk_commit_group()
                if const_expr(self.source and box + self.boxes < self.count):
                    # The first warp waits until this box's store has read it: another box of C comes into its place.
                    cute.arch.cp_async_bulk_wait_group(0, read=True)
                    self.load_c(buffers, operands, sources, box + self.boxes, boxes_used)

    @cute.jit
    def read_accumulators(
        self, acc: cute.Tensor, values: cute.Tensor, panel: cutlass.Constexpr[int], column: cutlass.Constexpr[int]
    ):
        """A thread's accumulators of a box: ``values`` (2, 2, N / 8), or gates and what they multiply (.., 2)."""
        for j in cutlass.range_constexpr(self.blocks):
            for v in cutlass.range_constexpr(4):
                at = const_expr(panel * self.panel_accumulators + column // 2 + 4 * j + v)
                for half in cutlass.range_constexpr(2 if self.gate != "none" else 1):
                    x = as_fp32(acc, const_expr(at + half * self.gate_distance))
                    if const_expr(self.gate == "none" and self.columns < BOX):
                        # With so few accumulators LLVM hoists the rounding above the wait for the products, and ptxas
                        # then serializes the wgmmas.
                        x = pin(x)
                    values[v + 4 * j + 4 * self.blocks * half] = x

    @cute.jit
    def store_box(self, buffers: BoxBuffers, operands: BoxOperands, pair: tuple, first: Corner, buffer: Int32):
        """Starts the store of a box, whose first row and column are ``first``'s."""
        if buffers.thread < 32:
            shared, there = pair
            cute.copy(operands.out.tma, shared[None, buffer], there)

    @cute.jit
    def drain(self, thread: Int32):
        """After the last tile: shared memory must outlive the stores that read it."""
        if thread < 32:
            cute.arch.cp_async_bulk_wait_group(0, read=True)


@dataclass(frozen=True)
class GroupBoxes(ResultBoxes):
    """Boxes of rows that belong to one of many groups: ``operands`` have out and the group's end.

    A box whose rows all lie in front of that end leaves by TMA, another by 16 bytes a thread, row by row.
    ``swap_ab``: out's rows are columns of the tile.
    """

    swap_ab: bool = False

    @cute.jit
    def store_box(self, buffers: BoxBuffers, operands: BoxOperands, pair: tuple, first: Corner, buffer: Int32):
        """Starts the store of a box, or stores what of it belongs to the group."""
        mOut, end = operands.mOut, operands.end
        lines = const_expr(self.shape[1 if self.swap_ab else 0])  # rows of out in a box, each 64 columns
        row, column = (first.column, first.row) if const_expr(self.swap_ab) else (first.row, first.column)
        if row + lines <= end:
            # All rows are the group's: by TMA, which clips at out's last column.
            ResultBoxes.store_box(self, buffers, operands, pair, first, buffer)
        else:
            # The group's last rows: 16 bytes a thread, up to its end. The named barrier before the buffer's next use
            # keeps it until all threads have read.
            columns = mOut.shape[1]
            plain = cute.recast_ptr(buffers.boxes, dtype=self.dtype)
            for i in cutlass.range_constexpr(lines * BOX // 8 // 128):
                piece = buffers.thread + i * 128
                line, chunk = piece // (BOX // 8), piece % (BOX // 8)
                if row + line < end and column + chunk * 8 < columns:
                    at = buffer * (BOX * BOX) + line * BOX + (chunk ^ (line % 8)) * 8
                    to = Int64(row + line) * mOut.stride[0] + (column + chunk * 8)
                    eight = cute.make_layout(8)
                    cute.autovec_copy(
                        cute.make_tensor((plain + at).align(16), eight),
                        cute.make_tensor((mOut.iterator + to).align(16), eight),
                    )
