"""From a warp group's accumulators to out: boxes of 64 x 64 through swizzled shared memory and TMA stores."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import cpasync
from cutlass.cute.nvgpu.warp import LdMatrix8x8x16bOp, StMatrix8x8x16bOp

from cutekernels.kernels.cute.parts.epilogue import Activation, silu_mul
from cutekernels.kernels.cute.parts.ptx import instruction
from cutekernels.kernels.cute.parts.smem import WarpgroupSmem

BOX = WarpgroupSmem.BOX
FIRST_BARRIER = 1  # named barriers of the groups, one each; 0 is the CTA's


@cute.jit
def wide(sums: cute.Tensor, i: cutlass.Constexpr[int]) -> Float32:
    """One of a thread's sums in fp32. Fp16 ones are unpacked by an instruction of ours: seeing through it, the compiler
    would keep them unpacked in the mainloop too.
    """
    if const_expr(sums.element_type is Float32):
        return sums[i]
    text = "{ .reg .b16 h<2>; mov.b32 {h0, h1}, $1; cvt.f32.f16 $0, h" + str(i % 2) + "; }"
    word = cute.recast_tensor(sums, Int32)[i // 2]
    return Float32(instruction(text, "=f,r", word, result=Float32.mlir_type))


@cute.jit
def kept(x: Float32) -> Float32:
    """``x``, in its place among instructions with effects."""
    return Float32(instruction("mov.f32 $0, $1;", "=f,f", x, result=Float32.mlir_type))


@dataclass(frozen=True)
class ResultBoxes:
    """``out = activation(alpha * acc + beta * c + bias)`` for one group's rows of a tile, ``boxes`` buffers.

    A group has ``count`` boxes of a tile: ``panels`` of 64 rows, ``pitch`` apart, by ``columns``. Where 64 does not
    divide ``columns``, the last box begins early and writes some results twice; never with C, which out may be.
    Fewer columns than 64 are one narrow box.
    ``rows_contiguous``: out's rows are its contiguous extent, so boxes are transposed on their way (stmatrix.trans).
    ``bias`` runs along ``"n"`` or ``"m"``, or is ``"none"``.
    ``gate`` likewise: along it a tile has gates, then as many that they multiply, and out is ``silu(gate) * up``
    instead; ``columns`` and ``panels`` are out's.
    """

    dtype: type[cutlass.Numeric]
    columns: int
    panels: int
    pitch: int
    boxes: int
    rows_contiguous: bool
    source: bool
    bias: str
    activation: Activation
    gate: str = "none"

    @property
    def sums(self) -> int:
        """A thread's sums of a panel."""
        return self.columns // 2 * (2 if self.gate == "n" else 1)

    @property
    def apart(self) -> int:
        """How far behind a gate's sum a thread holds that of what it multiplies."""
        return self.panels * self.sums if self.gate == "m" else self.columns // 2

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of a box."""
        return BOX, min(BOX, self.columns)

    @property
    def blocks(self) -> int:
        """Blocks of 8 columns in a box."""
        return self.shape[1] // 8

    @property
    def across(self) -> int:
        return -(-self.columns // BOX)

    @property
    def count(self) -> int:
        return self.panels * self.across

    def layout(self) -> cute.ComposedLayout:
        """A box in shared memory."""
        plain = cute.make_layout(self.shape, stride=(1, BOX) if self.rows_contiguous else (BOX, 1))
        return cute.make_composed_layout(cute.make_swizzle(3, 4, 3), 0, plain)

    def offset(self, box: int) -> tuple[int, int]:
        """The first row and column of a group's ``box``."""
        panel, across = divmod(box, self.across)
        return panel * self.pitch, min(across * BOX, self.columns - self.shape[1])

    @cute.jit
    def copies(self, tma: cute.CopyAtom, tX: cute.Tensor, at_boxes: cute.Pointer, corner: tuple[Int32, Int32, Int32]):
        """Box by box, ``(shared (TMA, box), global (TMA))`` of this group's part of a tile."""
        tX = tX[None, None, corner[2]] if const_expr(cute.rank(tX) == 3) else tX
        layout = self.layout()
        at = cute.recast_ptr(at_boxes, layout.inner, self.dtype)
        shape = (*self.shape, self.boxes)
        stride = (1, BOX, BOX * BOX) if const_expr(self.rows_contiguous) else (BOX, 1, BOX * BOX)
        sX = cute.make_tensor(at, cute.make_layout(shape, stride=stride))
        pairs = []
        for box in cutlass.range_constexpr(self.count):
            down, right = self.offset(box)
            moved = cute.domain_offset((corner[0] + down, corner[1] + right), tX)
            gX = cute.local_tile(moved, self.shape, (0, 0))
            pairs.append(
                cpasync.tma_partition(
                    tma, 0, cute.make_layout(1), cute.group_modes(sX, 0, 2), cute.group_modes(gX, 0, 2)
                )
            )
        return pairs

    @cute.jit
    def begin(
        self,
        member: Int32,
        corner: tuple[Int32, Int32, Int32],
        top: Int32,
        at_boxes: cute.Pointer,
        at_bias: cute.Pointer,
        landed: cute.Pointer,
        used: Int32,
        operands: tuple,
    ):
        """Before the mainloop: the first loads of C, and the bias into shared memory."""
        _, tD, tma_c, tC, mBias, _, _ = operands[:7]
        if const_expr(self.source):  # noqa: SIM102  known when compiled
            if member < 32:
                cute.arch.cp_async_bulk_wait_group(0, read=True)
                pairs = self.copies(tma_c, tC, at_boxes, corner)
                fetch = self.fetch
                for box in cutlass.range_constexpr(min(self.boxes, self.count)):
                    fetch(tma_c, pairs, box, landed, used)
        if const_expr(self.bias != "none"):
            along = const_expr(1 if self.bias == "n" else 0)
            extent = cute.size(tD, mode=[along])
            start = corner[1] if const_expr(self.bias == "n") else top
            for i in cutlass.range_constexpr(2):
                at = start + i * 128 + member
                value = Float32(0.0)
                if at < extent:
                    value = mBias[at].to(Float32)
                at_bias[i * 128 + member] = value

    @cute.jit
    def fetch(self, tma_c: cute.CopyAtom, pairs: list, box: cutlass.Constexpr[int], landed: cute.Pointer, used: Int32):
        """The load of a box of C."""
        buffer = (used + box) % self.boxes
        shared, there = pairs[box]
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(landed + buffer, BOX * BOX * 2)
        cute.copy(tma_c, there, shared[None, buffer], tma_bar_ptr=landed + buffer)

    @cute.jit
    def deliver(
        self,
        member: Int32,
        group: Int32,
        acc: cute.Tensor,  # ((2, 2, N / 8), panels, 1)
        corner: tuple[Int32, Int32, Int32],
        below: Int32,
        at_boxes: cute.Pointer,
        at_bias: cute.Pointer,
        landed: cute.Pointer,
        used: Int32,
        operands: tuple,
    ):
        """The end of a tile."""
        tma_d, tD, tma_c, tC, _, alpha, beta = operands[:7]
        lane, warp = member % 32, member // 32
        half, right = lane // 8 % 2, lane // 16
        # The 16 bytes that this lane gives stmatrix: a row of one of four 8 x 8 blocks, swizzled.
        if const_expr(self.rows_contiguous):
            line, chunk = right * 8 + lane % 8, warp * 2 + half
        else:
            line, chunk = warp * 16 + half * 8 + lane % 8, right
        store = cute.make_copy_atom(StMatrix8x8x16bOp(self.rows_contiguous, 4), self.dtype)
        load = cute.make_copy_atom(LdMatrix8x8x16bOp(self.rows_contiguous, 4), self.dtype)
        pairs = self.copies(tma_d, tD, at_boxes, corner)
        sources = None
        if const_expr(self.source):
            sources = self.copies(tma_c, tC, at_boxes, corner)
        at_plain = cute.recast_ptr(at_boxes, dtype=self.dtype)
        values = cute.make_rmem_tensor((2, 2, self.blocks), Float32)
        rC = cute.make_rmem_tensor((2, 2, self.blocks), self.dtype)
        rD = cute.make_rmem_tensor((2, 2, self.blocks), self.dtype)
        activate, fetch, spread = self.activation.apply, self.fetch, self.spread
        take, send = self.take, self.send
        for box in cutlass.range_constexpr(self.count):
            panel = const_expr(box // self.across)
            down, column = self.offset(box)
            buffer = (used + box) % self.boxes
            pieces = []
            for i in cutlass.range_constexpr(self.blocks // 2):
                if const_expr(self.rows_contiguous):
                    at = (line + 16 * i) * BOX + (chunk ^ (line % 8)) * 8
                else:
                    at = line * BOX + ((chunk + 2 * i) ^ (line % 8)) * 8
                piece = at_plain + (buffer * (BOX * BOX) + at)
                piece = cute.make_ptr(self.dtype, piece.toint(), cute.AddressSpace.smem, assumed_align=16)
                pieces.append(cute.make_tensor(piece, cute.make_layout(8)))
            if const_expr(self.source):
                cute.arch.mbarrier_wait(landed + buffer, ((used + box) // self.boxes) & 1)
                for i in cutlass.range_constexpr(self.blocks // 2):
                    cute.copy(load, pieces[i], cute.make_tensor(rC.iterator + 8 * i, cute.make_layout(8)))
            else:
                if member < 32:
                    cute.arch.cp_async_bulk_wait_group(self.boxes - 1, read=True)
                cute.arch.barrier(barrier_id=FIRST_BARRIER + group, number_of_threads=128)
            take(acc, values, panel, column)
            x = values.load() if const_expr(self.gate != "none") else alpha * values.load()
            if const_expr(self.source):
                x = x + beta * rC.load().to(Float32)
            if const_expr(self.bias != "none"):
                if const_expr(self.source and box == 0):
                    cute.arch.barrier(barrier_id=FIRST_BARRIER + group, number_of_threads=128)
                x = x + spread(lane, warp, at_bias, below + down, column).load()
            rD.store(activate(x).to(self.dtype))
            for i in cutlass.range_constexpr(self.blocks // 2):
                cute.copy(store, cute.make_tensor(rD.iterator + 8 * i, cute.make_layout(8)), pieces[i])
            cute.arch.fence_proxy("async.shared", space="cta")
            cute.arch.barrier(barrier_id=FIRST_BARRIER + group, number_of_threads=128)
            send(member, box, buffer, pairs, corner, at_plain, operands)
            if member < 32:
                cute.arch.cp_async_bulk_commit_group()
                if const_expr(self.source and box + self.boxes < self.count):
                    cute.arch.cp_async_bulk_wait_group(0, read=True)
                    fetch(tma_c, sources, box + self.boxes, landed, used)

    @cute.jit
    def take(
        self, acc: cute.Tensor, values: cute.Tensor, panel: cutlass.Constexpr[int], column: cutlass.Constexpr[int]
    ):
        """A thread's results of a box, or its sums: ``values`` (2, 2, N / 8)."""
        for j in cutlass.range_constexpr(self.blocks):
            for v in cutlass.range_constexpr(4):
                at = const_expr(panel * self.sums + column // 2 + 4 * j + v)
                x = wide(acc, at)
                if const_expr(self.gate != "none"):
                    x = silu_mul(x, wide(acc, at + self.apart))
                elif const_expr(self.columns < BOX):
                    x = kept(x)  # so few sums LLVM would round before the wait for them, and ptxas serialize products
                values[v % 2, v // 2, j] = x

    @cute.jit
    def send(
        self,
        member: Int32,
        box: cutlass.Constexpr[int],
        buffer: Int32,
        pairs: list,
        corner: tuple[Int32, Int32, Int32],
        at_plain: cute.Pointer,
        operands: tuple,
    ):
        """Starts the store of a box."""
        if member < 32:
            shared, there = pairs[box]
            cute.copy(operands[0], shared[None, buffer], there)

    @cute.jit
    def spread(
        self, lane: Int32, warp: Int32, at_bias: cute.Pointer, down: Int32, column: cutlass.Constexpr[int]
    ) -> cute.Tensor:
        """The bias of a thread's results in a box: ``(2, 2, N / 8)``, broadcast."""
        if const_expr(self.bias == "n"):
            biases = cute.make_rmem_tensor((2, self.blocks), Float32)
            for j in cutlass.range_constexpr(self.blocks):
                for v in cutlass.range_constexpr(2):
                    biases[v, j] = at_bias[column + 8 * j + 2 * (lane % 4) + v]
            return cute.make_tensor(biases.iterator, cute.make_layout((2, 2, self.blocks), stride=(1, 0, 2)))
        biases = cute.make_rmem_tensor(2, Float32)
        for v in cutlass.range_constexpr(2):
            biases[v] = at_bias[down + warp * 16 + v * 8 + lane // 4]
        return cute.make_tensor(biases.iterator, cute.make_layout((2, 2, self.blocks), stride=(0, 1, 0)))

    @cute.jit
    def finish(self, member: Int32):
        """After the last tile: shared memory must outlive the stores that read it."""
        if member < 32:
            cute.arch.cp_async_bulk_wait_group(0, read=True)


@dataclass(frozen=True)
class GroupBoxes(ResultBoxes):
    """Boxes of rows that belong to one of many groups: ``operands`` end with out ``(T, N)`` and the group's end.

    A box whose rows all lie in front of that end leaves by TMA, another by 16 bytes a thread, row by row.
    ``swapped``: out's rows are columns of the tile.
    """

    swapped: bool = False

    @cute.jit
    def send(
        self,
        member: Int32,
        box: cutlass.Constexpr[int],
        buffer: Int32,
        pairs: list,
        corner: tuple[Int32, Int32, Int32],
        at_plain: cute.Pointer,
        operands: tuple,
    ):
        mOut, end = operands[7:]
        down, right = self.offset(box)
        lines = const_expr(self.shape[1 if self.swapped else 0])  # rows of out in a box, each 64 columns
        row, column = corner[0] + down, corner[1] + right
        if const_expr(self.swapped):
            row, column = column, row
        if row + lines <= end:
            if member < 32:
                shared, there = pairs[box]
                cute.copy(operands[0], shared[None, buffer], there)
        else:
            columns = mOut.shape[1]
            for i in cutlass.range_constexpr(lines * BOX // 8 // 128):
                piece = member + i * 128
                line, chunk = piece // (BOX // 8), piece % (BOX // 8)
                if row + line < end and column + chunk * 8 < columns:
                    at = buffer * (BOX * BOX) + line * BOX + (chunk ^ (line % 8)) * 8
                    to = Int64(row + line) * mOut.stride[0] + (column + chunk * 8)
                    eight = cute.make_layout(8)
                    cute.autovec_copy(
                        cute.make_tensor((at_plain + at).align(16), eight),
                        cute.make_tensor((mOut.iterator + to).align(16), eight),
                    )
