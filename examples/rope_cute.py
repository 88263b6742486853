"""A second kernel in CuTe to read: rotary embedding of q and k, ``(x1 cos - x2 sin, x2 cos + x1 sin)`` of pairs.

    python examples/rope_cute.py

On a CPU it prints what the compiler makes of it for an H200; on a GPU it compares results with torch's:

    1 token x 16 heads x 64 pairs a CTA of 4 warps: 48 registers a thread, 0 bytes of stack

``ck.rope`` is a kernel in Triton, in 0.94 to 1.00 of this one's time; ``python -m bench rope --suite headtohead`` times
both.

Roles: a CTA has ``tokens`` x ``heads`` x ``block`` pairs of q or of k. Along x the grid walks blocks of pairs, first
    those that turn, then those that are copied, of one tile of tokens after the other; along y q's heads, then k's.
    A thread has ``pairs`` neighbours of one token in ``heads * tokens * units / threads`` heads: one vector of
    cosines for all.

One thread: load cosines and sines of its token's position, and channels of all its heads (all before the first is
    waited for); turn; store. Threads never meet.

Numbers: fp32, rounded once.

Ends: heads, tokens and channels that do not exist are neither read nor stored. ``out`` may be the input.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import Any, NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import torch
from cutlass import Boolean, Float32, Int32, const_expr
from cutlass.cute.runtime import make_fake_tensor
from torch import Tensor

from cutekernels import gpu as gpus
from cutekernels.backends import cute as backend
from cutekernels.gpu import GpuSpec

TYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
WIDEST_BYTES = 16  # of an access


class Place(NamedTuple):
    """A thread's share of a head: ``vec`` channels from ``d`` on, a second run ``apart``, all before ``end``."""

    head: Int32  # the first
    d: Int32
    apart: Int32
    end: Int32


class Tile(NamedTuple):
    """A CTA's share, and how its threads access it."""

    tokens: int
    heads: int
    block: int  # pairs
    warps: int
    vec: int  # channels that divide their runs, strides and addresses


@dataclass(frozen=True)
class Rope:
    """The body, called with heads (batch, seq, heads, channels) and tables (seq, half) of contiguous channels."""

    tile: Tile
    interleaved: bool  # a pair is two neighbouring channels, else channels i and i + half
    dependent: bool  # whether it is launched as a dependent of the kernel before (PDL)

    @property
    def threads(self) -> int:
        return 32 * self.tile.warps

    @property
    def pairs(self) -> int:  # of a thread, in one head
        return max(1, self.tile.vec // 2) if self.interleaved else self.tile.vec

    @property
    def units(self) -> int:  # threads along a block of pairs
        return self.tile.block // self.pairs

    @cute.jit
    def __call__(
        self,
        mOQ: cute.Tensor,
        mOK: cute.Tensor | None,
        mQ: cute.Tensor,
        mK: cute.Tensor | None,
        mCos: cute.Tensor,
        mSin: cute.Tensor,
        stream: cuda.CUstream,
    ):
        heads = cute.ceil_div(mQ.shape[2], self.tile.heads)
        if const_expr(mK is not None):
            heads += cute.ceil_div(mK.shape[2], self.tile.heads)
        tiles = mQ.shape[0] * cute.ceil_div(mQ.shape[1], self.tile.tokens)
        self.kernel(mOQ, mOK, mQ, mK, mCos, mSin).launch(
            grid=[tiles * self.parts(mQ.shape[3], mCos.shape[1]), heads, 1],
            block=[self.threads, 1, 1],
            use_pdl=self.dependent,
            stream=stream,
        )

    def parts(self, channels: Int32, half: Int32) -> Int32:
        """Blocks of pairs, those that turn and those that are copied."""
        return cute.ceil_div(half, self.tile.block) + cute.ceil_div(channels - 2 * half, 2 * self.tile.block)

    @cute.kernel
    def kernel(
        self,
        mOQ: cute.Tensor,
        mOK: cute.Tensor | None,
        mQ: cute.Tensor,
        mK: cute.Tensor | None,
        mCos: cute.Tensor,
        mSin: cute.Tensor,
    ):
        tid, _, _ = cute.arch.thread_idx()
        cta, heads_block, _ = cute.arch.block_idx()
        t, seq, half, channels = self.tile, mQ.shape[1], mCos.shape[1], mQ.shape[3]
        half_blocks, seq_blocks = cute.ceil_div(half, t.block), cute.ceil_div(seq, t.tokens)
        parts = self.parts(channels, half)
        part, tile, unit = cta % parts, cta // parts, tid % self.units
        batch, token = tile // seq_blocks, tile % seq_blocks * t.tokens + tid // self.units % t.tokens
        if const_expr(self.dependent):
            # PDL: the next kernel may be set up; then wait until the one before has ended and its writes are visible.
            cute.arch.griddepcontrol_launch_dependents()
            cute.arch.griddepcontrol_wait()

        # -- this thread's channels: two runs, or a run of neighbouring pairs
        pair, turns = part * t.block + unit * self.pairs, part < half_blocks
        d, apart, end = 2 * pair, Int32(t.vec), 2 * half
        if const_expr(not self.interleaved):
            d, apart = pair, half
        if not turns:
            d = end + (part - half_blocks) * 2 * t.block + unit * t.vec
            apart, end = Int32(self.units * t.vec), channels
        elif pair >= half:
            d = end

        # -- cosines and sines
        rT = cute.make_rmem_tensor((self.pairs, 2), mCos.element_type)
        rT.fill(0.0)
        if turns and pair < half and token < seq:
            for i, mT in enumerate((mCos, mSin)):
                gT = cute.local_tile(mT[token, None], (self.pairs,), (part * self.units + unit,))
                cute.autovec_copy(gT, rT[None, i])

        # -- heads of q, then those of k
        q_blocks = cute.ceil_div(mQ.shape[2], t.heads)
        head = tid // (self.units * t.tokens)
        if token < seq:
            if heads_block < q_blocks:
                place = Place(heads_block * t.heads + head, d, apart, end)
                self.turn(mOQ[batch, token, None, None], mQ[batch, token, None, None], place, rT, turns)
            elif const_expr(mK is not None):
                place = Place((heads_block - q_blocks) * t.heads + head, d, apart, end)
                self.turn(mOK[batch, token, None, None], mK[batch, token, None, None], place, rT, turns)

    @cute.jit
    def turn(self, mO: cute.Tensor, mX: cute.Tensor, place: Place, rT: cute.Tensor, turns: Boolean):
        """Turns, or copies, the thread's channels of all its heads of one token. mO, mX ``(heads, channels)``."""
        heads = const_expr(self.tile.heads * self.tile.tokens * self.units // self.threads)
        rX = cute.make_rmem_tensor((self.tile.vec, 2 * self.pairs // self.tile.vec, heads), mX.element_type)
        self.move(mX, rX, place, False)
        if turns:
            # The two channels of a pair are neighbours, or in one place of the two runs.
            steps = const_expr((2, 1) if self.interleaved else (1, self.pairs))
            c, s = rT[None, 0].load().to(Float32), rT[None, 1].load().to(Float32)
            for i in cutlass.range_constexpr(heads):
                pair = cute.make_tensor(rX[None, None, i].iterator, cute.make_layout((self.pairs, 2), stride=steps))
                x1, x2 = pair[None, 0].load().to(Float32), pair[None, 1].load().to(Float32)
                pair[None, 0].store((x1 * c - x2 * s).to(mX.element_type))
                pair[None, 1].store((x2 * c + x1 * s).to(mX.element_type))
        self.move(mO, rX, place, True)

    @cute.jit
    def move(self, mX: cute.Tensor, rX: cute.Tensor, place: Place, stores: cutlass.Constexpr[bool]):
        """Loads or stores the thread's runs, those that exist. mX ``(heads, channels)``, rX ``(vec, runs, heads)``."""
        vec = const_expr(self.tile.vec)
        for r, i in product(range(rX.shape[1]), range(rX.shape[2])):
            head = place.head + i * (self.threads // (self.units * self.tile.tokens))
            d = place.d + r * place.apart
            if head < mX.shape[0] and d < place.end:
                begin = mX[head, None].iterator + cute.assume(d, divby=vec)
                gX = cute.make_tensor(begin, cute.make_layout(vec))
                if const_expr(stores):
                    cute.autovec_copy(rX[None, r, i], gX)
                else:
                    cute.autovec_copy(gX, rX[None, r, i])


def compiled(dtype: str, table: str, tile: Tile, interleaved: bool, keys: bool, spec: GpuSpec) -> Any:
    """The kernel for any number of batch entries, tokens, heads and channels that ``tile.vec`` divides."""
    vec = tile.vec
    each = max(1, vec // 2) if interleaved else vec

    def fake(kind: str, shape: tuple[Any, ...], divisor: int) -> Any:
        element = backend.type_of(kind)
        strides = (*[cute.sym_int(64, divisibility=divisor) for _ in shape[1:]], 1)
        align = min(WIDEST_BYTES, divisor * element.width // 8)
        return make_fake_tensor(element, shape, stride=strides, assumed_align=align)

    batch, seq, half = (cute.sym_int() for _ in range(3))
    channels = cute.sym_int(divisibility=vec)
    q, k = ((batch, seq, cute.sym_int(), channels) for _ in range(2))
    heads = [fake(dtype, shape, vec) if there else None for shape, there in ((q, True), (k, keys))]
    again = [fake(dtype, shape, vec) if there else None for shape, there in ((q, True), (k, keys))]
    tables = [fake(table, (seq, half), each) for _ in range(2)]
    return backend.compile(Rope(tile, interleaved, spec.has_pdl), *heads, *again, *tables, gpu=spec)


@cache
def launcher(dtype: str, table: str, tile: Tile, interleaved: bool, keys: bool, device: int) -> Callable[..., Any]:
    """The kernel for a GPU of this machine, ready for tensors ``(out_q, out_k, q, k, cos, sin)``."""
    return compiled(dtype, table, tile, interleaved, keys, gpus.detect(device)).kernel()


def rope(
    q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, *, interleaved: bool = False, heads: int = 16, warps: int = 4
) -> tuple[Tensor, Tensor | None]:
    """q (B, S, HQ, D) and k (B, S, HKV, D) turned by tables (S, R/2); contiguous channels, the first R of D turn."""
    out = torch.empty_like(q), None if k is None else torch.empty_like(k)
    half, size = cos.shape[1], q.element_size()
    tensors = [t for t in (q, k, *out) if t is not None]
    reach = [2 * half if interleaved else half, q.shape[3] - 2 * half, WIDEST_BYTES // size]
    vec = math.gcd(*reach, *[s for t in tensors for s in t.stride()[:3]], *[t.data_ptr() // size for t in tensors])
    block = max(8, 1 << (half - 1).bit_length())
    units = block // (max(1, vec // 2) if interleaved else vec)  # threads of a head: a warp has whole heads, or parts
    heads = max(heads, 32 // units)
    tile = Tile(1, heads, block, max(1, units // 32, min(warps, heads * units // 32)), vec)
    run = launcher(TYPES[q.dtype], TYPES[cos.dtype], tile, interleaved, k is not None, q.get_device())
    run(out[0], out[1], q, k, cos, sin)
    return out


def main() -> None:
    on_gpu = torch.cuda.is_available()
    spec = gpus.lookup("auto" if on_gpu else "h200")
    facts = compiled("bf16", "fp32", Tile(1, 16, 64, 4, 8), False, True, spec).facts
    told = f"{facts.registers} registers a thread, {facts.stack_bytes} bytes of stack"
    print(f"1 token x 16 heads x 64 pairs a CTA of 4 warps: {told}")
    if on_gpu:
        q, k = (torch.randn(2, 33, heads, 128, device="cuda", dtype=torch.bfloat16) for heads in (32, 8))
        for half in (64, 32):  # all of a head's channels turn, or half of them
            angles = torch.rand(33, half, device="cuda") * math.tau
            c, s = angles.cos()[:, None], angles.sin()[:, None]
            for x, y in zip((q, k), rope(q, k, angles.cos(), angles.sin()), strict=True):
                x1, x2, rest = x.float().tensor_split((half, 2 * half), dim=-1)
                expected = torch.cat((x1 * c - x2 * s, x2 * c + x1 * s, rest), -1)
                torch.testing.assert_close(y, expected.to(x.dtype))


if __name__ == "__main__":
    main()
