"""A guest, whole: a fused MoE in Triton in the usual design, described so that the tuner takes it.

    PYTHONPATH=. cutekernels tune examples/fused_moe.toml --guest examples.fused_moe:fused_moe --gpu auto
    cutekernels db export tables --format vllm --op examples.fused_moe:fused_moe

``python examples/fused_moe.py`` compares the kernel with torch on the GPU; with ``TRITON_INTERPRET=1`` in the
environment on the CPU. Problem, space, inputs and reference are those of ``cutekernels/guests/fused_moe.py``; the
kernels and how they are called stand here.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from cutekernels.backends import Facts
from cutekernels.gpu import GpuSpec
from cutekernels.guests import triton_ahead
from cutekernels.guests.fused_moe import FusedMoe, FusedMoeConfig, FusedMoeProblem

# ---- kernels --------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["pairs", "blocks"])
def count(ids, begins, block_experts, used, pairs, blocks, E: tl.constexpr, LANES: tl.constexpr, ROWS: tl.constexpr):
    """Of one program: where each expert's rows begin, padded to ``ROWS``, and the expert of each block of rows."""
    lane = tl.arange(0, LANES)
    counts = tl.zeros((LANES,), tl.int32)
    for start in range(0, pairs, 1024):
        at = start + tl.arange(0, 1024)
        counts += tl.histogram(tl.load(ids + at, at < pairs, LANES - 1), LANES)
    counts = tl.where(lane < E, counts, 0)  # the last lane, no expert's, counted what is no pair
    ends = tl.cumsum((counts + ROWS - 1) // ROWS)  # in blocks
    tl.store(begins + lane, (ends - (counts + ROWS - 1) // ROWS) * ROWS, lane < E)
    tl.store(used, tl.max(ends))
    for start in range(0, blocks, 32):
        at = start + tl.arange(0, 32)
        expert = tl.sum(((ends[None, :] <= at[:, None]) & (lane < E)[None, :]).to(tl.int32), 1)
        tl.store(block_experts + at, expert, at < blocks)


@triton.jit(do_not_specialize=["pairs"])
def place(ids, begins, rows, pairs):
    """Puts each pair into the next free row of its expert; rows that stay as they were are padding."""
    pair = tl.program_id(0) * 256 + tl.arange(0, 256)
    real = pair < pairs
    expert = tl.load(ids + pair, real, 0)
    tl.store(rows + tl.atomic_add(begins + expert, 1, real), pair, real)


@triton.jit(do_not_specialize=["pairs", "blocks"])
def experts(
    x,
    w,
    out,
    weights,
    rows,
    block_experts,
    used,
    pairs,
    blocks,
    n,
    k,
    TOP_K: tl.constexpr,  # pairs that share a row of x
    WEIGHTED: tl.constexpr,
    BLOCK_SIZE_M: tl.constexpr,
    BLOCK_SIZE_N: tl.constexpr,
    BLOCK_SIZE_K: tl.constexpr,
    GROUP_SIZE_M: tl.constexpr,
):
    """``out[pair] = x[pair // TOP_K] @ w[expert].T``, times the pair's weight: a tile of a block's rows a program."""
    tiles_n = tl.cdiv(n, BLOCK_SIZE_N)
    # A band of GROUP_SIZE_M blocks shares its experts' columns in the L2.
    band = GROUP_SIZE_M * tiles_n
    first = tl.program_id(0) // band * GROUP_SIZE_M
    height = tl.minimum(blocks - first, GROUP_SIZE_M)
    block = first + tl.program_id(0) % band % height
    tile = tl.program_id(0) % band // height
    if block >= tl.load(used):
        return
    pair = tl.load(rows + block * BLOCK_SIZE_M + tl.arange(0, BLOCK_SIZE_M)).to(tl.int64)
    real = pair < pairs
    expert = tl.load(block_experts + block).to(tl.int64)
    col = tile * BLOCK_SIZE_N + tl.arange(0, BLOCK_SIZE_N)
    depth = tl.arange(0, BLOCK_SIZE_K)
    a = x + (pair // TOP_K)[:, None] * k + depth[None, :]
    b = w + expert * n * k + (col % n)[None, :] * k + depth[:, None]
    total = tl.zeros((BLOCK_SIZE_M, BLOCK_SIZE_N), tl.float32)
    for done in range(0, k, BLOCK_SIZE_K):
        inside = depth < k - done
        left = tl.load(a, real[:, None] & inside[None, :], 0.0)
        right = tl.load(b, inside[:, None], 0.0)
        total = tl.dot(left, right, total)
        a += BLOCK_SIZE_K
        b += BLOCK_SIZE_K
    if WEIGHTED:
        total *= tl.load(weights + pair, real, 0.0)[:, None]
    to = out + pair[:, None] * n + col[None, :]
    tl.store(to, total.to(out.dtype.element_ty), real[:, None] & (col < n)[None, :])


@triton.jit
def gated(out, h, n, BLOCK: tl.constexpr):
    """``out = silu(gate) * up`` of rows ``[gate, up]``."""
    row, col = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(h + row * 2 * n + col, col < n, 0.0).to(tl.float32)
    up = tl.load(h + row * 2 * n + n + col, col < n, 0.0).to(tl.float32)
    tl.store(out + row * n + col, (gate * tl.sigmoid(gate) * up).to(out.dtype.element_ty), col < n)


# ---- the call -------------------------------------------------------------------------------------------


def run(out: Tensor, x: Tensor, w1: Tensor, w2: Tensor, weights: Tensor, ids: Tensor, c: FusedMoeConfig) -> None:
    """``out[t] = sum_j weights[t, j] * down_e(silu(gate_e(x[t])) * up_e(x[t]))``; nothing waits for the host."""
    (m, top_k), (e, width, k), pairs = ids.shape, w1.shape, ids.numel()
    blocks = min(triton.cdiv(pairs, c.BLOCK_SIZE_M) + min(e, pairs), pairs)  # more there never are
    index = partial(torch.empty, dtype=torch.int32, device=x.device)
    rows = torch.full((blocks * c.BLOCK_SIZE_M,), pairs, dtype=torch.int32, device=x.device)
    begins, block_experts, used = index(e), index(blocks), index(1)
    lanes = triton.next_power_of_2(e + 1)
    count[(1,)](ids, begins, block_experts, used, pairs, blocks, e, lanes, c.BLOCK_SIZE_M)
    place[(triton.cdiv(pairs, 256),)](ids, begins, rows, pairs)
    hidden, inner, parts = (x.new_empty((pairs, columns)) for columns in (width, width // 2, k))
    tail = (weights, rows, block_experts, used, pairs, blocks)
    options = c.as_dict()
    grid = blocks * triton.cdiv(width, c.BLOCK_SIZE_N)
    experts[(grid,)](x, w1, hidden, *tail, width, k, top_k, False, **options)
    gated[(pairs, triton.cdiv(width // 2, 1024))](inner, hidden, width // 2, 1024)
    grid = blocks * triton.cdiv(k, c.BLOCK_SIZE_N)
    experts[(grid,)](inner, w2, parts, *tail, k, width // 2, 1, True, **options)
    torch.sum(parts.view(m, top_k, k), 1, out=out)


# ---- the description ------------------------------------------------------------------------------------


class ExampleMoe(FusedMoe):
    """The kernels above, in bf16 and fp16."""

    distributions = ("triton",)

    def why_not(self, p: FusedMoeProblem, c: FusedMoeConfig, gpu: GpuSpec) -> str | None:
        return "this kernel takes bf16 and fp16 alone" if p.block_k else super().why_not(p, c, gpu)

    def call(self, p: FusedMoeProblem, c: FusedMoeConfig, *tensors: Any) -> None:
        out, x, w1, w2, weights, ids, _, _ = tensors
        run(out, x, w1, w2, weights, ids, c)

    def compile(self, p: FusedMoeProblem, c: FusedMoeConfig, gpu: GpuSpec) -> Facts:
        kind = torch.float16 if p.dtype == "fp16" else torch.bfloat16
        types = (kind, kind, kind, torch.float32, torch.int32, torch.int32, torch.int32, p.pairs, p.pairs)
        products = ((2 * p.n, p.k, p.top_k, False), (p.k, p.n, 1, True))
        return triton_ahead.facts(
            gpu, [partial(experts.warmup, *types, *shape, grid=(1,), **c.as_dict()) for shape in products]
        )


def fused_moe() -> FusedMoe:
    """``examples.fused_moe:fused_moe``."""
    return ExampleMoe()


def main() -> None:
    from cutekernels import gpu, verify

    device = "cuda" if torch.cuda.is_available() else "cpu"
    moe, spec = fused_moe(), gpu.lookup("auto" if device == "cuda" else "h200")
    text = "m=16 experts=128 n=768 k=2048 top_k=8" if device == "cuda" else "m=5 experts=6 n=64 k=96 top_k=2 dtype=fp16"
    problem = FusedMoeProblem.parse(text)
    args = moe.sample(problem, device, seed=0)
    outputs, work = moe.outputs(problem, *args), moe.work(problem)
    moe.call(problem, moe.default(problem, spec), *outputs, *args)
    error = verify.worst_error(outputs, moe.reference(problem, *args), work.flops, depth=work.depth)
    print(f"[{problem}]: error {error:.3f} times the tolerance")


if __name__ == "__main__":
    main()
