"""Products of attention by consumer warp groups: 128 threads multiply 64 rows by wgmma, in ping-pong with others."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup
from cutlass.cute.nvgpu.warp import StMatrix8x8x16bOp

from cutekernels.kernels.cute.parts.fragments import span_bytes, swizzled
from cutekernels.kernels.cute.parts.warp_groups import GROUP, ROWS, wgmma


@dataclass(frozen=True)
class ConsumerThread:
    """A thread of a consumer warp group, for as long as the kernel runs."""

    thread: Int32  # in the group, 0 .. 127
    group: Int32  # among the consumer warp groups
    warp_mma: cute.TiledMma  # mma.sync's layout of four warps along M: where this thread's accumulators lie
    storage: cute.Pointer  # the CTA's shared memory


@dataclass(frozen=True)
class PingPong:
    """``groups`` start their products one after another, so that one's softmax runs behind another's products.

    Each group has a named barrier, from ``first_barrier`` on, of 256 threads: its own 128 wait for the 128 that arrive
    when the group before has started its products. With one group nobody waits.
    """

    groups: int
    first_barrier: int

    @cute.jit
    def start(self, group: Int32):
        """Group 0's threads arrive at group 0's barrier themselves: nobody has gone before."""
        if const_expr(self.groups > 1):  # noqa: SIM102  known when compiled
            if group == 0:
                cute.arch.barrier_arrive(barrier_id=self.first_barrier, number_of_threads=2 * GROUP)

    @cute.jit
    def wait(self, group: Int32):
        """Waits until the group before has started its products."""
        if const_expr(self.groups > 1):
            cute.arch.barrier(barrier_id=self.first_barrier + group, number_of_threads=2 * GROUP)

    @cute.jit
    def signal(self, group: Int32):
        """Tells the next group that this one's products have started; does not wait."""
        if const_expr(self.groups > 1):
            following = group + 1
            if following == self.groups:
                following = Int32(0)
            cute.arch.barrier_arrive(barrier_id=self.first_barrier + following, number_of_threads=2 * GROUP)


@dataclass(frozen=True)
class GroupProducts:
    """A warp group's ``S = X Y^T`` from shared memory and ``O += P Y`` with P in registers, for 64 rows of X.

    Y has ``tile`` rows of ``padded`` columns.
    """

    tile: int
    padded: int

    def xy_mma(self, dtype: type[cutlass.Numeric]) -> cute.TiledMma:
        """``X Y^T``: both operands K-major in shared memory."""
        return wgmma(dtype, self.tile)

    def py_mma(self, dtype: type[cutlass.Numeric]) -> cute.TiledMma:
        """``P Y``: P in registers, Y with its columns along N."""
        majors = (OperandMajorMode.K, OperandMajorMode.MN)
        return wgmma(dtype, self.padded, majors, source=warpgroup.OperandSource.RMEM)

    @cute.jit
    def multiply(
        self, tiled_mma: cute.TiledMma, acc: cute.Tensor, rA: cute.Tensor, rB: cute.Tensor, fresh: cutlass.Constexpr
    ):
        """Starts ``acc = A B^T`` where ``fresh``, else ``acc += A B^T``, as one wgmma group; the caller waits."""
        # Orders this thread's writes of registers (accumulators, P) before the wgmmas that read them.
        warpgroup.fence()
        atom = cute.make_mma_atom(tiled_mma.op)  # one of its own: its field changes within the product
        atom.set(warpgroup.Field.ACCUMULATE, not fresh)
        for kb in cutlass.range_constexpr(cute.size(rA, mode=[2])):
            cute.gemm(atom, acc, rA[None, None, kb], rB[None, None, kb], acc)
            atom.set(warpgroup.Field.ACCUMULATE, True)
        # wait_group(n) waits until at most the last n groups committed here are still running.
        warpgroup.commit_group()


@cute.jit
def store_rows(thread: Int32, rows: cute.Tensor, address: Int32, columns: cutlass.Constexpr[int]):
    """A warp group's 16-bit results, ((2, 2), 1, N / 8), to the swizzled buffer ``(64, columns)`` at ``address``."""
    span = const_expr(span_bytes(columns))
    lane, warp = thread % 32, thread // 32
    store = cute.make_copy_atom(StMatrix8x8x16bOp(False, 4), rows.element_type)
    # This lane's row of one of four 8 x 8 blocks, and its 16 bytes.
    address = swizzled(address + (warp * 16 + lane % 16) * span + lane // 16 * 16, span)
    for i in cutlass.range_constexpr(columns // 16):
        # 16 columns a step: the chunk in the swizzle pattern by an XOR, the pattern by an offset.
        offset = const_expr(i * 32)
        target = (address ^ (offset % span)) + (offset // span * ROWS * span)
        piece = cute.make_ptr(rows.element_type, target, cute.AddressSpace.smem, assumed_align=16)
        source = cute.make_tensor(rows.iterator + 8 * i, cute.make_layout(8))
        cute.copy(store, source, cute.make_tensor(piece, cute.make_layout(8)))


def as_warps(acc: cute.Tensor) -> cute.Tensor:
    """A warp group's accumulator ((2, 2, N / 8), 1, 1) in the form of four warps' along M, ((2, 2), 1, N / 8)."""
    (a, b, n), *_ = acc.layout.shape
    (sa, sb, sn), *_ = acc.layout.stride
    return cute.make_tensor(acc.iterator, cute.make_layout(((a, b), 1, n), stride=((sa, sb), 0, sn)))


@cute.jit
def round_to(acc: cute.Tensor, out: cute.Tensor):
    """``out = acc`` in the 16-bit type of ``out``, two values a conversion."""
    words = cute.recast_tensor(out, Int32)
    pair = cute.make_rmem_tensor(2, out.element_type)
    for i in cutlass.range_constexpr(cute.size(out) // 2):
        pair.store(cute.make_tensor(acc.iterator + 2 * i, cute.make_layout(2)).load().to(out.element_type))
        words[i] = cute.recast_tensor(pair, Int32)[0]
