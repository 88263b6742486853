"""How fast the parts of a GPU are: what analytical models read, so that they hold no machine's numbers.

``gpu.py`` has what a datasheet says; this table has what only a measurement shows (launch, latencies, ports, barriers).
One row was fitted to measurements, on the H200; the H100's differs in one rate. Every other GPU's is scaled from the
first by clocks and sizes and says ``measured=False``, until ``cutekernels calibrate`` has measured the GPU: what its
database has then takes its place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Any, TypeVar

from cutekernels.columns import larger
from cutekernels.db.storage import snapshot
from cutekernels.gpu import GpuSpec, lookup


@dataclass(frozen=True, slots=True)
class Rates:
    """Times in µs and rates per µs of one GPU; those "per SM" are one streaming multiprocessor's."""

    measured: bool
    """Whether this row was measured on this GPU, at least in part, or scaled from the H200's."""
    clock_mhz: float
    """SM clock under sustained load."""
    launch_us: float
    """A kernel in a chain of kernels, beside the time its blocks take: launch, first block, last block's end."""
    dependent_us: float
    """The share of ``launch_us`` that programmatic dependent launch hides."""
    block_us: float
    """An SM starts a block this often."""
    dram_latency_us: float
    """From a load to its data, under load. Bandwidth times this is what must be in flight (Little's law)."""
    dram_share: float
    """The best stream's share of the datasheet's DRAM bandwidth."""
    l2_latency_us: float
    """From a load to its data where the L2 has it."""
    sm_bytes_per_us: float
    """Bytes that one SM pulls from the L2, at most."""
    smem_bytes_per_us: float
    """Bytes that one SM reads from shared memory."""
    warpgroup_flops_per_us: float
    """Rate of one SM by warpgroup MMA in a steady mainloop; 0 where there is none."""
    mma_flops_per_us: float
    """Rate of one SM by warp MMA with fp32 accumulation."""
    mma_fp16_flops_per_us: float
    """The same with fp16 accumulation."""
    barrier_us: float
    """A block-wide barrier between two stages of a pipeline."""
    walked_us: float
    """A thread's time for one element of a row that a loop walks in chunks, where no other program hides it."""
    exchange_us: float
    """A round of messages between the CTAs of a cluster, or between CTAs by way of the L2."""
    overlap: float
    """How far DRAM's time and an SM's hide each other: the exponent of their mean. From ALONE on the longer counts."""


ALONE = 16.0
"""Exponents from here on count as infinite, so that models keep their ties."""
REVISION = 1
"""Revision of what calibrated rates mean. Raise it when a fitted row or a probe changes: earlier ones then lapse."""
MOST_OFF = 3.0
"""Limit on a calibrated rate over the scaled one, and the inverse: beyond it, it is refused."""

# H200 SXM, 2026-11, by this project's own kernels (docs/notes): graph chains, cold L2, sustained load.
_H200 = Rates(
    measured=True,
    clock_mhz=1700,
    launch_us=1.5,
    dependent_us=0.63,
    block_us=0.16,
    dram_latency_us=0.8,
    dram_share=0.92,
    l2_latency_us=0.67,
    sm_bytes_per_us=99e3,
    smem_bytes_per_us=128 * 1700,
    warpgroup_flops_per_us=6.22e6,
    mma_flops_per_us=620e6 / 132,
    mma_fp16_flops_per_us=620e6 / 132,
    barrier_us=0.08,
    walked_us=0.022,
    exchange_us=0.63,
    overlap=ALONE,
)
# The H100's port was chosen on 191 products tuned there (2026-11-26): the model's choice among their measured configs
# is 8 % behind the best up to 128 tokens and 3.7 % from 512 on, with the H200's rate 14 and 4.7 %. Of sweeps on which
# it was not chosen, 47 products up to 128 tokens are 3 % behind (10), 8 of grouped_gemm_wgrad 8 % (7). Its overlap, on
# 540 products (2026-11-27): 2.7 % behind with 3, 3.2 with the longer time alone; 91 of 65 to 256 tokens 3.6 and 5.7.
_MEASURED = {"h200": _H200, "h100-sxm": replace(_H200, sm_bytes_per_us=84e3, overlap=3.0)}
FITTED = _H200
"""The row that the models' constants are multiples of."""


def both_us(one: Any, other: Any, exponent: float) -> Any:
    """The time of two things beside each other, each hidden by the other in part: their mean of that exponent."""
    if exponent >= ALONE:
        return larger(one, other)
    return (one**exponent + other**exponent) ** (1 / exponent)


F = TypeVar("F", bound=Callable[..., object])
_caches: list[Callable[[], None]] = []


def remember(function: F) -> F:
    """A cache of a function that reads rates, emptied when they may have changed."""
    made = cache(function)
    _caches.append(made.cache_clear)
    return made  # type: ignore[return-value]


def forget() -> None:
    """Empty all caches of what was made with rates; the database is read by ``db/storage/snapshot.py``."""
    for clear in _caches:
        clear()


@remember
def of(gpu: GpuSpec) -> Rates:
    """The rates of ``gpu``: calibrated ones where the database has them, else those of :func:`scaled`."""
    known = {}
    for name, (value, refused) in rates_for(gpu).items():
        if refused is None:
            known[name] = value
        else:
            snapshot.say(f"the calibrated {name} of {gpu.name} is {value:.4g}, {refused}: not used")
    return replace(scaled(gpu), measured=True, **known) if known else scaled(gpu)


_elsewhere: str | None = None


@contextmanager
def read_from(url: str) -> Iterator[None]:
    """Inside, calibrated rates are those of the database at ``url``, in place of those of the one that calls read."""
    global _elsewhere
    _elsewhere = url
    forget()
    try:
        yield
    finally:
        _elsewhere = None
        forget()


def rates_for(gpu: GpuSpec) -> dict[str, tuple[float, str | None]]:
    """Rates that the database of calls has for ``gpu``, or the one that it confines; each with why it is refused."""
    own, found = scaled(gpu), {}
    known = snapshot.snapshot_of(gpu.base_name) if _elsewhere is None else snapshot.load(gpu.base_name, _elsewhere)
    for (name, revision), value in sorted(known.rates.items()):
        if revision != REVISION or name not in NAMES:
            continue
        usual = getattr(own, name)
        far = not usual / MOST_OFF <= value <= usual * MOST_OFF
        found[name] = value, f"over {MOST_OFF:g} times off the scaled {usual:.4g}" if far else None
    return found


NAMES = tuple(f.name for f in fields(Rates) if f.name != "measured")


@cache
def scaled(gpu: GpuSpec) -> Rates:
    """The row fitted for ``gpu``, where there is one, else the H200's, scaled; less what a stand-in may not use."""
    fitted = _MEASURED.get(gpu.base_name)
    if fitted is not None:
        return replace(
            fitted,
            dependent_us=fitted.dependent_us if gpu.has_pdl else 0.0,
            warpgroup_flops_per_us=fitted.warpgroup_flops_per_us if gpu.has_wgmma else 0.0,
        )
    # Under load the H200 keeps 1700 of its boost's 1980 MHz, and so, it is assumed, do the others.
    faster = gpu.boost_mhz / lookup("h200").boost_mhz
    return replace(
        _H200,
        measured=False,
        clock_mhz=_H200.clock_mhz * faster,
        dependent_us=_H200.dependent_us if gpu.has_pdl else 0.0,
        l2_latency_us=_H200.l2_latency_us / faster,
        sm_bytes_per_us=_H200.sm_bytes_per_us * faster,
        smem_bytes_per_us=_H200.smem_bytes_per_us * faster,
        warpgroup_flops_per_us=_H200.warpgroup_flops_per_us * faster if gpu.has_wgmma else 0.0,
        mma_flops_per_us=gpu.mma_tflops * 1e6 / gpu.sm_count,
        mma_fp16_flops_per_us=gpu.mma_fp16_tflops * 1e6 / gpu.sm_count,
        barrier_us=_H200.barrier_us / faster,
        walked_us=_H200.walked_us / faster,
        exchange_us=_H200.exchange_us / faster,
    )
