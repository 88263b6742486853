"""Probes: what ``cutekernels calibrate`` times to read a GPU's own rates, one for each rate that a model reads.

A model's constants are multiples of rates fitted on the H200, many of them under load and beside other work, where no
probe can look. So a reading is never taken for the rate: it is set beside the same probe's reading on an H200, and the
fitted rate moves in that proportion. On an H200 calibrating therefore changes a rate by no more than readings scatter,
and elsewhere a rate keeps the sense in which the models were fitted. A probe whose reading on an H200 nobody has taken
yet is shown, and stored as no rate.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from cutekernels import compile as compiler
from cutekernels import rates
from cutekernels.backends.triton import compile_kernel
from cutekernels.conditions import Watch
from cutekernels.gpu import GpuSpec
from cutekernels.measure import Launch, l2_rotation, time_interleaved
from cutekernels.ops import registry

_DRAM_WORDS = 1 << 27  # 512 MiB: many times every L2
_WARP_TILE = "tile_m=128 tile_n=256 tile_k=32 warps_m=2 warps_n=4 stages=4 raster=16 ctas_per_sm=1"
_GROUP_TILE = (
    "tile_m=128 tile_n=256 tile_k=64 warps_m=1 warps_n=1 stages=4 raster=8 ctas_per_sm=1 body=warpgroup cluster_m=2"
)
_CHUNKS = "block_rows=1 block_cols=2048 resident=0 warps={warps} per_sm=0 stages=1"

# Readings on an H200 that belong to its fitted row, from recorded runs, or because the row means the reading itself.
ON_H200 = {
    "warpgroup_flops_per_us": 2.0 * 8192**3 / 1369.84 / 132,  # bench/sweeps/h200/gemm_warpgroup, 2026-11-23
    "mma_flops_per_us": 2.0 * 4096**3 / 277.4 / 132,  # bench/results/h200/gemm_square_smem99, 2026-11-21
    "walked_us": (6.69969 - 3.97781) / 112,  # bench/sweeps/h200/memory_bound, 2026-11-22
    "clock_mhz": 1700.0,
    "smem_bytes_per_us": 128 * 1700.0,
    "dram_share": 0.92,
}


@dataclass
class Lab:
    """Times launches on the GPU at hand, warm and long enough to be sustained."""

    gpu: GpuSpec
    device: str = "cuda"
    watch: Watch = field(default_factory=Watch.current)

    def us(self, launches: Sequence[Launch], rounds: int = 9, least_us: float = 500.0) -> float:
        """Device time of one launch; the GPU's clock is looked at after each round."""
        timed = time_interleaved({"": launches}, rounds=rounds, least_us=least_us, after_round=self.watch)
        return timed[""].median

    def kernel_us(
        self, name: str, programs: int, numbers: Sequence[int] = (), *, words: int = 0, warps: int = 4, **constants: Any
    ) -> float:
        """Time of a kernel of ``kernels/triton/probes.py``; ``words`` of zeros are its source, where it has one."""
        import torch

        from cutekernels.kernels.triton import probes as kernels

        fn = getattr(kernels, name)
        room = programs * constants.get("BLOCK", 64)
        tensors = [torch.zeros(n, dtype=torch.int32, device=self.device) for n in (words, room) if n]
        types = (
            ["*i32"] * len(tensors) + ["i32" if n < 2**31 else "i64" for n in numbers] + ["constexpr"] * len(constants)
        )
        signature = dict(zip(fn.arg_names, types, strict=False))
        made = compile_kernel(
            fn,
            signature=signature,
            constexprs=constants,
            divisible={name: 16 for name, kind in signature.items() if kind == "*i32" or name in ("stride", "span")},
            options={"num_warps": warps},
            gpu=self.gpu,
        )
        launch = made.kernel()
        args = (*(t.data_ptr() for t in tensors), *numbers)
        return self.us([lambda: launch((programs, 1, 1), *args)])

    def op_us(self, name: str, problem: str, config: str, rounds: int = 9) -> float:
        """Time of one of our ops, its inputs out of the L2, as the recorded runs have it."""
        op = registry.get(name)
        p, c = op.Problem.parse(problem), op.Config.parse(config)
        kernel = op.bind(p, op.check(p, c, self.gpu), compiler.get(op, p, c, self.gpu))

        def launch(seed: int) -> tuple[int, Launch]:
            inputs = op.sample(p, self.device, seed)
            args = (*op.outputs(p, *inputs), *inputs)
            size = sum(t.numel() * t.element_size() for t in args if hasattr(t, "numel"))
            return size, lambda: kernel(*args)

        size, first = launch(0)
        others = [launch(seed)[1] for seed in range(1, l2_rotation(size, self.gpu.l2_bytes))]
        return self.us([first, *others], rounds)

    @cached_property
    def resident_words(self) -> int:
        """Words that stay in the L2."""
        return self.gpu.l2_bytes // 16 // 16384 * 16384

    def step_us(self, words: int) -> float:
        """A step of a chained walk in which each SM has 16 KiB under way."""
        block, count, steps = 4096, self.gpu.sm_count, 256
        numbers = (steps, count * block, words)
        return self.kernel_us("walk", count, numbers, words=words, warps=16, BLOCK=block, CHAINED=True) / steps


@dataclass(frozen=True)
class Probe:
    """How one rate is read.

    Attributes:
        rate: the field of :class:`~cutekernels.rates.Rates`.
        what: what is timed.
        read: the reading, in the rate's unit.
        needs: a capability of the GPU.
    """

    rate: str
    what: str
    read: Callable[[Lab], float]
    needs: str = ""

    def takes(self, gpu: GpuSpec) -> bool:
        """Whether ``gpu`` has what is timed."""
        return not self.needs or bool(getattr(gpu, self.needs))

    def rate_of(self, reading: float) -> float | None:
        """The rate in the models' sense that belongs to ``reading``; None where no H200's is known."""
        usual = ON_H200.get(self.rate)
        return None if usual is None else float(getattr(rates.FITTED, self.rate) * reading / usual)


# ---- readings -----------------------------------------------------------------------------------------------


def _flops(lab: Lab, extent: int, config: str, accumulate: str = "") -> float:
    """Flops per µs and SM of a product of squares; long enough that power and heat have settled."""
    words = f"m={extent} n={extent} k={extent}" + accumulate
    return 2.0 * extent**3 / lab.op_us("gemm", words, config, rounds=60) / lab.gpu.sm_count


def _launch(lab: Lab) -> float:
    return lab.kernel_us("alone", lab.gpu.sm_count)


def _dependent(lab: Lab) -> float:
    return _launch(lab) - lab.kernel_us("dependent", lab.gpu.sm_count, DEPENDENT=True)


def _block(lab: Lab) -> float:
    few, many = (lab.kernel_us("alone", n, warps=1) for n in (1 << 16, 1 << 17))
    return (many - few) / (1 << 16) * lab.gpu.sm_count


def _dram(lab: Lab) -> float:
    """The better of a copy and of reading alone."""
    block, words = 1024, _DRAM_WORDS
    copy = 8 * words / lab.kernel_us("walk", words // block, (1, block, words), words=words, BLOCK=block, CHAINED=False)
    count, block = 4 * lab.gpu.sm_count, 4096
    steps = words // (count * block)
    numbers = (steps, count * block, words)
    us = lab.kernel_us("walk", count, numbers, words=words, warps=8, BLOCK=block, CHAINED=False)
    return max(copy, 4 * steps * count * block / us) / (lab.gpu.dram_gbps * 1e3)


def _port(lab: Lab) -> float:
    """An eighth of the SMs, so that the L2 itself is no limit."""
    block, count, steps = 16384, max(1, lab.gpu.sm_count // 8), 512
    numbers = (steps, count * block, lab.resident_words)
    us = lab.kernel_us("walk", count, numbers, words=lab.resident_words, warps=32, BLOCK=block, CHAINED=False)
    return 4 * steps * block / us


def _walked(lab: Lab) -> float:
    """Twice as many elements to a thread, over two walks of a row."""
    one, two = (lab.op_us("rms_norm", "rows=16 cols=3584", _CHUNKS.format(warps=w)) for w in (1, 2))
    return (one - two) / (2 * 3584 / 32 / 2)


def _clock(lab: Lab) -> float:
    """Of all looks so far; products have run for most of them."""
    return lab.watch.seen.clock_mhz or 0.0


def _rounds(name: str, programs: int, numbers: tuple[int, ...], warps: int) -> Callable[[Lab], float]:
    """A kernel's time over its rounds, the first of its numbers."""
    return lambda lab: lab.kernel_us(name, programs, numbers, warps=warps) / numbers[0]


# Products first: they compile longest and make the GPU warm; the clock next, which is theirs.
PROBES = (
    Probe(
        "warpgroup_flops_per_us",
        "a product of 8192^3 by warpgroup MMA",
        lambda lab: _flops(lab, 8192, _GROUP_TILE, " b_major=k"),
        needs="has_wgmma",
    ),
    Probe("mma_flops_per_us", "a product of 4096^3 by warp MMA, fp32 sums", lambda lab: _flops(lab, 4096, _WARP_TILE)),
    Probe("clock_mhz", "the SM clock during these products, from the driver", _clock),
    Probe("smem_bytes_per_us", "128 bytes a clock, at that clock", lambda lab: 128 * _clock(lab)),
    Probe("launch_us", "an empty kernel in a graph of such", _launch),
    Probe("dependent_us", "the same less one launched as a dependent", _dependent, needs="has_pdl"),
    Probe("block_us", "65,536 more empty blocks of a warp", _block),
    Probe("dram_share", "the better of a copy and of reading, 512 MiB", _dram),
    Probe("dram_latency_us", "a step of a chained walk, 16 KiB an SM", lambda lab: lab.step_us(_DRAM_WORDS)),
    Probe("l2_latency_us", "the same in the L2", lambda lab: lab.step_us(lab.resident_words)),
    Probe("sm_bytes_per_us", "reading out of the L2 by an eighth of the SMs", _port),
    Probe("barrier_us", "a barrier of 8 warps", _rounds("gather", 1, (4096,), warps=8)),
    Probe("exchange_us", "a word there and back between two SMs", _rounds("exchange", 2, (512, 1 << 16), warps=1)),
    Probe("walked_us", "rms_norm of 16 x 3584 in chunks, by one warp less by two", _walked),
    Probe(
        "mma_fp16_flops_per_us",
        "a product of 4096^3 by warp MMA, fp16 sums",
        lambda lab: _flops(lab, 4096, _WARP_TILE, " dtype=fp16 accumulate=fp16"),
    ),
)
