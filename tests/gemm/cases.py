"""Seeded GEMM problems for tests: every layout, ragged extents, every epilogue."""

from __future__ import annotations

import math
import random

from cutekernels.gpu import GpuSpec
from cutekernels.kernels.activations import ACTIVATIONS
from cutekernels.ops.products.dense import GEMM
from cutekernels.ops.products.schedules.problem import GemmConfig, GemmProblem

RAGGED = (1, 2, 3, 7, 8, 15, 16, 17, 31, 33, 48, 63, 64, 65, 96, 127, 128, 129, 200, 255, 256, 257, 384, 500, 641)


def align_of(length: int, rng: random.Random) -> int:
    """A legal alignment for a contiguous extent: usually the widest."""
    widest = math.gcd(length, 8) or 8
    return widest if rng.random() < 0.7 else rng.choice([a for a in (1, 2, 4, 8) if a <= widest])


def random_problem(rng: random.Random, extents: tuple[int, ...] = RAGGED) -> GemmProblem:
    m, n, k = (rng.choice(extents) for _ in range(3))
    a_major, b_major, out_major = rng.choice("km"), rng.choice("nk"), rng.choice("nnm")
    c = rng.choice(("none", "none", "n", "m"))
    dtype = rng.choice(("bf16", "fp16"))
    of = {"m": m, "n": n, "k": k}
    batched = rng.random() < 0.25
    return GemmProblem(
        m=m,
        n=n,
        k=k,
        batch=rng.choice((1, 2, 5)) if batched else 1,
        dtype=dtype,
        a_major=a_major,
        b_major=b_major,
        out_major=out_major,
        c=c,
        bias=rng.choice(("none", "same", "fp32")),
        activation=rng.choice(tuple(ACTIVATIONS)),
        accumulate="fp16" if dtype == "fp16" and rng.random() < 0.2 else "fp32",
        a_align=align_of(of[a_major], rng),
        b_align=align_of(of[b_major], rng),
        c_align=8 if c == "none" else align_of(of[c], rng),
        out_align=align_of(of[out_major], rng),
        batched=batched,
        wide=rng.random() < 0.1,
    )


def random_config(rng: random.Random, problem: GemmProblem, gpu: GpuSpec) -> GemmConfig:
    return rng.choice([c for c in GEMM.valid(problem, gpu) if not c.vendors])
