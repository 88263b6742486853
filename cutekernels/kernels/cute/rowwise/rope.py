"""Rotary position embedding of q and k: ``(x1 cos - x2 sin, x2 cos + x1 sin)`` of pairs of a head's channels.

Roles: a CTA has ``tokens`` x ``heads`` x ``block`` pairs of q or of k. Along x the grid walks blocks of pairs, first
    those that turn, then those that are copied, of one tile of tokens after the other; along y q's heads, then k's.
    A thread has ``pairs`` neighbours of one token in ``heads * tokens * units / threads`` heads: one vector of
    cosines for all.

One thread: load cosines and sines of its token's position, and channels of all its heads (all before the first is
    waited for); turn; store. Threads never meet.

Numbers: fp32, rounded once. A position outside of the tables makes its token NaN; nothing is read there.

Ends: heads, tokens and channels that do not exist are neither read nor stored. ``out`` may be the input.

Refuses (``ops/rope/cute.py``): strided channels.
"""

from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, const_expr

from cutekernels.kernels.cute.parts.dependent import pdl_launch, pdl_wait


class Operands(NamedTuple):
    """Tensors of a launch."""

    mOQ: cute.Tensor  # (batch, seq, heads, channels), as the next three
    mOK: cute.Tensor
    mQ: cute.Tensor
    mK: cute.Tensor
    mCos: cute.Tensor  # (batch, position, half), as the next
    mSin: cute.Tensor
    mPos: cute.Tensor | None  # (batch, seq)


@dataclass(frozen=True)
class Place:
    """A thread's share of a head: ``vec`` channels from ``d`` on, a second run ``apart``, all before ``end``."""

    head: Int32  # the first
    d: Int32
    apart: Int32
    end: Int32


@dataclass(frozen=True)
class Rope:
    """The body."""

    tokens: int
    heads: int
    block: int  # pairs
    threads: int
    vec: int  # channels that divide their runs, strides and addresses
    interleaved: bool  # a pair is two neighbouring channels, else channels i and i + half
    inverse: bool  # turns back: the gradient
    positions: str  # "start": one for all, "batch": a first one each, "token"
    dependent: bool  # whether it is launched as a dependent of the kernel before (PDL)

    @property
    def pairs(self) -> int:  # of a thread, in one head
        return max(1, self.vec // 2) if self.interleaved else self.vec

    @property
    def units(self) -> int:  # threads along a block of pairs
        return self.block // self.pairs

    @cute.jit
    def __call__(self, grid: cute.Shape, m: Operands, start: Int64, stream: cuda.CUstream):
        self.kernel(m, start).launch(grid=grid, block=[self.threads, 1, 1], use_pdl=self.dependent, stream=stream)

    @cute.kernel
    def kernel(self, m: Operands, start: Int64):
        tid, _, _ = cute.arch.thread_idx()
        cta, heads_block, _ = cute.arch.block_idx()
        seq, half, channels = m.mQ.shape[1], m.mCos.shape[2], m.mQ.shape[3]
        half_blocks, seq_blocks = cute.ceil_div(half, self.block), cute.ceil_div(seq, self.tokens)
        parts = half_blocks + cute.ceil_div(channels - 2 * half, 2 * self.block)
        part, tile, unit = cta % parts, cta // parts, tid % self.units
        batch, token = tile // seq_blocks, tile % seq_blocks * self.tokens + tid // self.units % self.tokens
        if const_expr(self.dependent):
            pdl_launch()
            pdl_wait()

        # -- this thread's channels: two runs, or a run of neighbouring pairs
        pair, turns = part * self.block + unit * self.pairs, part < half_blocks
        d, apart, end = 2 * pair, Int32(self.vec), 2 * half
        if const_expr(not self.interleaved):
            d, apart = pair, half
        if not turns:
            d = end + (part - half_blocks) * 2 * self.block + unit * self.vec
            apart, end = Int32(self.units * self.vec), channels
        elif pair >= half:
            d = end

        # -- cosines and sines, NaN where the tables have no such position
        rT = cute.make_rmem_tensor((self.pairs, 2), m.mCos.element_type)
        rT.fill(float("nan"))
        if turns and pair < half and token < seq:
            position = start + token
            if const_expr(self.positions != "start"):
                position = m.mPos[batch, token].to(Int64) + (token if self.positions == "batch" else 0)
            if position >= 0 and position < m.mCos.shape[1]:
                for i, mT in enumerate((m.mCos, m.mSin)):
                    gT = cute.local_tile(mT[batch, position, None], (self.pairs,), (part * self.units + unit,))
                    cute.autovec_copy(gT, rT[None, i])

        # -- heads of q, then those of k
        q_blocks = cute.ceil_div(m.mQ.shape[2], self.heads)
        head = tid // (self.units * self.tokens)
        if token < seq:
            if heads_block < q_blocks:
                place = Place(heads_block * self.heads + head, d, apart, end)
                self.turn(m.mOQ[batch, token, None, None], m.mQ[batch, token, None, None], place, rT, turns)
            else:
                place = Place((heads_block - q_blocks) * self.heads + head, d, apart, end)
                self.turn(m.mOK[batch, token, None, None], m.mK[batch, token, None, None], place, rT, turns)

    @cute.jit
    def turn(self, mO: cute.Tensor, mX: cute.Tensor, place: Place, rT: cute.Tensor, turns: Boolean):
        """Turns, or copies, the thread's channels of all its heads of one token. mO, mX ``(heads, channels)``."""
        heads = const_expr(self.heads * self.tokens * self.units // self.threads)
        rX = cute.make_rmem_tensor((self.vec, 2 * self.pairs // self.vec, heads), mX.element_type)
        self.move(mX, rX, place, False)
        if turns:
            # The two channels of a pair are neighbours, or in one place of the two runs.
            steps = const_expr((2, 1) if self.interleaved else (1, self.pairs))
            c, s = rT[None, 0].load().to(Float32), rT[None, 1].load().to(Float32)
            if const_expr(self.inverse):
                s = -s
            for i in cutlass.range_constexpr(heads):
                pair = cute.make_tensor(rX[None, None, i].iterator, cute.make_layout((self.pairs, 2), stride=steps))
                x1, x2 = pair[None, 0].load().to(Float32), pair[None, 1].load().to(Float32)
                pair[None, 0].store((x1 * c - x2 * s).to(mX.element_type))
                pair[None, 1].store((x2 * c + x1 * s).to(mX.element_type))
        self.move(mO, rX, place, True)

    @cute.jit
    def move(self, mX: cute.Tensor, rX: cute.Tensor, place: Place, stores: cutlass.Constexpr[bool]):
        """Loads or stores the thread's runs, those that exist. mX ``(heads, channels)``, rX ``(vec, runs, heads)``."""
        for r, i in product(range(rX.shape[1]), range(rX.shape[2])):
            head = place.head + i * (self.threads // (self.units * self.tokens))
            d = place.d + r * place.apart
            if head < mX.shape[0] and d < place.end:
                begin = mX[head, None].iterator + cute.assume(d, divby=self.vec)
                gX = cute.make_tensor(begin, cute.make_layout(self.vec))
                if const_expr(stores):
                    cute.autovec_copy(rX[None, r, i], gX)
                else:
                    cute.autovec_copy(gX, rX[None, r, i])
