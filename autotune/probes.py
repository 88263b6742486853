"""Probes: what ``cutekernels calibrate`` times to read a GPU's own rates, each with its reading on an H200.

A model's constants are multiples of rates fitted on the H200, many of them under load and beside other work, where no
probe can look. So a reading is never taken for the rate: it is set beside the same probe's reading on an H200, and the
fitted rate moves in that proportion. On an H200 calibrating therefore changes a rate by no more than readings scatter,
and elsewhere a rate keeps the sense in which the models were fitted. The other rates are scaled.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

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

    def reading_us(self, words: int, block: int, programs: int) -> float:
        """Time in which so many programs read so many words, once each, BLOCK at a time."""
        import torch

        from cutekernels.kernels.triton.probes import read

        steps = words // (programs * block)
        source = torch.zeros(words, dtype=torch.int32, device=self.device)
        target = torch.zeros(programs * block, dtype=torch.int32, device=self.device)
        types = ("*i32", "*i32", "i32", "i32", "constexpr")
        made = compile_kernel(
            read,
            signature=dict(zip(read.arg_names, types, strict=True)),
            constexprs={"BLOCK": block},
            divisible=dict.fromkeys(("source_ptr", "target_ptr", "stride"), 16),
            options={"num_warps": 8},
            gpu=self.gpu,
        )
        launch = made.kernel()
        args = (source.data_ptr(), target.data_ptr(), steps, programs * block)
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

    def rate_of(self, reading: float) -> float:
        """The rate in the models' sense that belongs to ``reading``."""
        return float(getattr(rates.FITTED, self.rate) * reading / ON_H200[self.rate])


# ---- readings -----------------------------------------------------------------------------------------------


def _flops(lab: Lab, extent: int, config: str, layout: str = "") -> float:
    """Flops per µs and SM of a product of squares; long enough that power and heat have settled."""
    words = f"m={extent} n={extent} k={extent}" + layout
    return 2.0 * extent**3 / lab.op_us("gemm", words, config, rounds=60) / lab.gpu.sm_count


def _dram(lab: Lab) -> float:
    """The better of a copy and of reading alone."""
    import torch

    source = torch.zeros(_DRAM_WORDS, dtype=torch.int32, device=lab.device)
    target = torch.empty_like(source)
    copy = lab.us([lambda: target.copy_(source)])
    read = lab.reading_us(_DRAM_WORDS, 4096, 4 * lab.gpu.sm_count)
    return 4 * _DRAM_WORDS * max(2 / copy, 1 / read) / (lab.gpu.dram_gbps * 1e3)


def _walk_twice(lab: Lab) -> float:
    """Twice as many elements to a thread, over two walks of a row."""
    one, two = (lab.op_us("rms_norm", "rows=16 cols=3584", _CHUNKS.format(warps=w)) for w in (1, 2))
    return (one - two) / (2 * 3584 / 32 / 2)


def _clock(lab: Lab) -> float:
    """The median clock so far, most of it under load, in MHz."""
    return lab.watch.seen.clock_mhz or 0.0


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
    Probe("dram_share", "the better of a copy and of reading, 512 MiB", _dram),
    Probe("walked_us", "rms_norm of 16 x 3584 in chunks, by one warp less by two", _walk_twice),
)
