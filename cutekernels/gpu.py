"""The table of GPUs. Code elsewhere checks a capability, never a GPU's name.

Figures are from the vendor's datasheets (dense rates, fp32 accumulation unless said); analytical models and
rooflines use them, correctness never depends on them.
"""

from __future__ import annotations

import ctypes
import re
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from functools import cache
from importlib import import_module
from typing import Any

from cutekernels import settings
from cutekernels.errors import UnknownGpu, near

KIB = 1024
MIB = 1024 * KIB
GIB = 1024 * MIB
_COMPUTE_MODE, _EXCLUSIVE_PROCESS = 20, 3  # CU_DEVICE_ATTRIBUTE_COMPUTE_MODE, and one of its values


@dataclass(frozen=True, slots=True)
class Architecture:
    """Properties that all GPUs of one compute capability share."""

    target: str  # the compilers' name
    smem_per_sm_bytes: int
    smem_per_block_bytes: int
    max_warps: int  # resident on one SM
    has_tma: bool = False
    has_wgmma: bool = False
    has_pdl: bool = False  # programmatic dependent launch
    has_fp8: bool = True  # instructions that convert e4m3


ARCHITECTURES: dict[tuple[int, int], Architecture] = {
    (8, 0): Architecture("sm_80", 164 * KIB, 163 * KIB, 64, has_fp8=False),
    (8, 6): Architecture("sm_86", 100 * KIB, 99 * KIB, 48, has_fp8=False),
    (8, 9): Architecture("sm_89", 100 * KIB, 99 * KIB, 48),
    (9, 0): Architecture("sm_90a", 228 * KIB, 227 * KIB, 64, has_tma=True, has_wgmma=True, has_pdl=True),
    (12, 0): Architecture("sm_120a", 100 * KIB, 99 * KIB, 48, has_tma=True, has_pdl=True),
}
STOOD_FOR = {(8, 0): "a100", (8, 6): "rtx3090", (8, 9): "l40s", (12, 0): "rtx5090"}
"""Compute capabilities that another GPU may be confined to, each with a GPU that has it: see GpuSpec.stand_in."""
NO_TARGET = "sm_100a"  # none of these, yet one that compilers know


@dataclass(frozen=True, slots=True)
class GpuSpec:
    """One GPU model: its identity in the database, its limits and its peaks.

    ``name`` is the identity (lower case, no serials); ``boost_mhz`` scales rates measured on another GPU
    (``rates.py``); ``mma_tflops`` is the fp16/bf16 rate of warp-level MMA with fp32 accumulation,
    ``mma_fp16_tflops`` the same with fp16 accumulation, ``peak_tflops`` the best rate any instruction reaches.
    """

    name: str
    product: str
    capability: tuple[int, int]
    sm_count: int
    l2_bytes: int
    memory_bytes: int
    dram_gbps: float
    boost_mhz: float
    mma_tflops: float
    mma_fp16_tflops: float
    peak_tflops: float
    confined_to: tuple[int, int] | None = None  # another GPU's compute capability: see stand_in

    REGISTERS_PER_SM = 64 * KIB
    MAX_REGISTERS_PER_THREAD = 255
    TENSOR_CORES_PER_SM = 4
    SMEM_RESERVED_BYTES = KIB  # the driver's share of each resident block

    @property
    def arch(self) -> Architecture:
        own = ARCHITECTURES[self.capability]
        return own if self.confined_to is None else _architecture_as(own.target, self.confined_to)

    @property
    def runs_on(self) -> Architecture:
        """The architecture of the SMs that run: a stand-in confines a block's shared memory, not an SM's."""
        return ARCHITECTURES[self.capability]

    @property
    def target(self) -> str:
        return self.arch.target

    @property
    def smem_per_sm_bytes(self) -> int:
        return self.arch.smem_per_sm_bytes

    @property
    def smem_per_block_bytes(self) -> int:
        return self.arch.smem_per_block_bytes

    @property
    def base_name(self) -> str:
        """The name of the GPU itself, where this is one as a stand-in."""
        return self.name if self.confined_to is None else self.name.rpartition("-as-")[0]

    def stand_in(self, other: GpuSpec) -> GpuSpec:
        """This GPU confined to the instructions, the shared memory and the warps of ``other``, which nobody has here.

        SMs (:attr:`runs_on`), clocks, memory, caches and the compile target stay its own. In the database it is a GPU
        of its own, ``h200-as-a100``: its times are no A100's, but whether an A100's kernels are chosen well shows.

        Raises:
            UnknownGpu: ``other`` has what this GPU lacks, or all that it has.
        """
        label, own = STOOD_FOR.get(other.capability, other.name), ARCHITECTURES[self.capability]
        theirs = _architecture_as(own.target, other.capability)
        more = [f.name for f in fields(own) if f.name != "target" and getattr(theirs, f.name) > getattr(own, f.name)]
        if more:
            raise UnknownGpu(f"{self.name} cannot stand in for {label}, which has more: {', '.join(more)}")
        if theirs == own:
            raise UnknownGpu(f"{self.name} has what {label} has: a stand-in is for a GPU with less")
        peak = self.peak_tflops if theirs.has_wgmma else max(self.mma_tflops, self.mma_fp16_tflops)
        name = f"{self.base_name}-as-{label}"
        return replace(self, name=name, confined_to=other.capability, peak_tflops=peak)

    @property
    def bf16_tflops(self) -> float:
        """The dense bf16 rate with fp32 accumulation, by the fastest instruction: what data sheets compare."""
        return self.peak_tflops if self.has_wgmma else self.mma_tflops

    @property
    def max_warps(self) -> int:
        return self.arch.max_warps

    @property
    def has_tma(self) -> bool:
        return self.arch.has_tma

    @property
    def has_wgmma(self) -> bool:
        return self.arch.has_wgmma

    @property
    def has_pdl(self) -> bool:
        return self.arch.has_pdl

    @property
    def has_fp8(self) -> bool:
        return self.arch.has_fp8


@cache
def _architecture_as(target: str, capability: tuple[int, int]) -> Architecture:
    """The properties of a compute capability, with the compile target of a GPU that stands in for it."""
    return replace(ARCHITECTURES[capability], target=target)


def _row(
    name: str,
    product: str,
    capability: tuple[int, int],
    sm_count: int,
    l2_mib: int,
    memory_gib: int,
    dram_gbps: float,
    boost_mhz: float,
    mma_tflops: float,
    mma_fp16_tflops: float | None = None,
    peak_tflops: float | None = None,
) -> GpuSpec:
    fp16 = mma_tflops if mma_fp16_tflops is None else mma_fp16_tflops
    peak = max(mma_tflops, fp16) if peak_tflops is None else peak_tflops
    sizes = sm_count, l2_mib * MIB, memory_gib * GIB
    return GpuSpec(name, product, capability, *sizes, dram_gbps, boost_mhz, mma_tflops, fp16, peak)


# On Hopper warp MMA tops out near 63 % of the warpgroup rate (H200: about 620 of 989.5 TFLOP/s).
GPUS: tuple[GpuSpec, ...] = (
    _row("rtx5090", "NVIDIA GeForce RTX 5090", (12, 0), 170, 96, 32, 1792, 2407, 209.5, 419),
    _row("rtxpro6000", "NVIDIA RTX PRO 6000 Blackwell", (12, 0), 188, 128, 96, 1792, 2617, 503.8),
    _row("rtx4090", "NVIDIA GeForce RTX 4090", (8, 9), 128, 72, 24, 1008, 2520, 165.2, 330.3),
    _row("rtx3090", "NVIDIA GeForce RTX 3090", (8, 6), 82, 6, 24, 936, 1695, 71, 142),
    _row("l40s", "NVIDIA L40S", (8, 9), 142, 96, 48, 864, 2520, 362),
    _row("l4", "NVIDIA L4", (8, 9), 58, 48, 24, 300, 2040, 121),
    _row("a100-sxm-40gb", "NVIDIA A100-SXM4-40GB", (8, 0), 108, 40, 40, 1555, 1410, 312),
    _row("a100-sxm-80gb", "NVIDIA A100-SXM4-80GB", (8, 0), 108, 40, 80, 2039, 1410, 312),
    _row("a100-pcie-40gb", "NVIDIA A100-PCIE-40GB", (8, 0), 108, 40, 40, 1555, 1410, 312),
    _row("a100-pcie-80gb", "NVIDIA A100 80GB PCIe", (8, 0), 108, 40, 80, 1935, 1410, 312),
    _row("a10", "NVIDIA A10", (8, 6), 72, 6, 24, 600, 1695, 125),
    _row("h100-sxm", "NVIDIA H100 80GB HBM3", (9, 0), 132, 50, 80, 3350, 1980, 620, peak_tflops=989.5),
    _row("h100-pcie", "NVIDIA H100 PCIe", (9, 0), 114, 50, 80, 2039, 1755, 474, peak_tflops=756),
    _row("h200", "NVIDIA H200", (9, 0), 132, 60, 141, 4800, 1980, 620, peak_tflops=989.5),
)

ALIASES = {"a100": "a100-sxm-80gb", "h100": "h100-sxm"}

_WITHOUT_KERNELS = ("b100", "b200", "b300", "gb200", "gb300")  # sm_100 and sm_103

SIBLINGS = {"h200": "h100-sxm"}
"""GPUs with the SMs of another, whose winners were timed on them: docs/notes/trunk.md#siblings (H200, 2026-11-26)."""

_BY_NAME = {gpu.name: gpu for gpu in GPUS}
_BY_PRODUCT = {gpu.product.lower(): gpu for gpu in GPUS}


def lookup(name: str) -> GpuSpec:
    """The GPU called ``name`` (``"h200"``, or torch's ``"NVIDIA H200"``), or the machine's own for ``"auto"``.

    ``"h200-as-a100"`` is an H200 confined to what an A100 has (:meth:`GpuSpec.stand_in`).

    Raises:
        UnknownGpu: no such row, or ``auto`` where no CUDA device is present.
    """
    if not isinstance(name, str):
        raise UnknownGpu(f"a GPU is named by a text such as 'h200'; got {name!r:.60}")
    key = name.strip().lower()
    if is_auto(name):
        return detect()
    own, stands, other = key.partition("-as-")
    if stands:
        return lookup(own).stand_in(lookup(other))
    key = ALIASES.get(key, key)
    found = _BY_NAME.get(key) or _BY_PRODUCT.get(key)
    if found is not None:
        return found
    if key in _WITHOUT_KERNELS:
        raise UnknownGpu(f"no kernel here is compiled for the {name}: the README names the GPUs that have some")
    names = sorted([*_BY_NAME, *ALIASES])
    known = ", ".join(names)
    raise UnknownGpu(
        f"no GPU is called {name[:60]!r}. {near(key, names)}Known: {known}. "
        "A GPU outside the table is described by --gpu auto on its machine"
    )


def is_auto(name: str) -> bool:
    """Whether ``name`` stands for the machine's own GPU."""
    return name.strip().lower() == "auto"


def detect(device: int | None = None) -> GpuSpec:
    """The GPU in this machine: its row of the table, or a description from its device properties.

    Where the settings name another GPU that it shall stand in for, it is that stand-in.

    Raises:
        UnknownGpu: no CUDA device is visible, its compute capability has no compile target here, or it cannot stand in.
    """
    return _detect(device, settings.gpu_as())


@cache
def _detect(device: int | None, other: str | None) -> GpuSpec:
    # Without a driver there is none, and torch, whose import takes seconds, need not be asked.
    torch = None if _driver() is None else import_module("torch")
    if torch is None or not torch.cuda.is_available():
        raise UnknownGpu("no CUDA device is visible: run where a GPU is, or name one (--gpu a100, gpu='a100')")
    own = describe(torch.cuda.get_device_properties(torch.cuda.current_device() if device is None else device))
    return own if other is None else own.stand_in(lookup(other))


def present(spec: GpuSpec) -> bool:
    """Whether the machine's GPU is ``spec``, or can stand in as it."""
    try:
        return stands_for(spec, detect())
    except UnknownGpu:
        return False


def stands_for(spec: GpuSpec, own: GpuSpec) -> bool:
    """Whether what is measured on ``own`` holds for ``spec``: the same GPU, or ``own`` confined."""
    return spec == own or (own.confined_to is None and spec.base_name == own.name != spec.name)


def choose(name: str, stands_for: str | None) -> GpuSpec:
    """The GPU of :func:`lookup`; where ``stands_for`` names another, as its stand-in (see :func:`act_as`).

    Raises:
        UnknownGpu: as :func:`lookup`, or it cannot stand in.
    """
    spec = lookup(name)
    if stands_for is not None:
        spec = spec.stand_in(lookup(stands_for))
        act_as(spec)
    return spec


def act_as(spec: GpuSpec) -> None:
    """Let :func:`detect` give ``spec`` in this process and those that it starts from now on, where ``spec`` is a
    stand-in of the GPU here: the whole library then keeps to what it has.
    """
    if spec.confined_to is not None:
        with suppress(UnknownGpu):
            if _detect(None, None).name == spec.base_name:
                settings.stand_in_as(STOOD_FOR[spec.confined_to])


def sibling(gpu: GpuSpec) -> GpuSpec | None:
    """The GPU whose winners may serve ``gpu`` too."""
    name = SIBLINGS.get(gpu.name)
    return None if name is None else _BY_NAME[name]


def one_process(device: int | None = None) -> bool:
    """Whether the driver lets one process alone use a GPU of this machine: compute mode ``EXCLUSIVE_PROCESS``."""
    import torch

    driver = _driver()
    if driver is None:
        return False
    mode = ctypes.c_int()
    index = torch.cuda.current_device() if device is None else device
    if driver.cuInit(0) or driver.cuDeviceGetAttribute(ctypes.byref(mode), _COMPUTE_MODE, index):
        return False
    return mode.value == _EXCLUSIVE_PROCESS


def _driver() -> ctypes.CDLL | None:
    """CUDA's driver library, if the machine has one."""
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None


def identity(device: int | None = None) -> str | None:
    """An identity that tells a GPU of this machine from its twins, in every process; None where there is no GPU."""
    import torch

    if not torch.cuda.is_available():
        return None
    return str(torch.cuda.get_device_properties(torch.cuda.current_device() if device is None else device).uuid)


def describe(properties: Any) -> GpuSpec:
    """The spec for ``torch.cuda.get_device_properties(...)``: the table's row, else built from its attributes."""
    row = _BY_PRODUCT.get(properties.name.lower())
    if row is None:  # a product with a suffix, e.g. "... Blackwell Workstation Edition"
        row = next((g for p, g in _BY_PRODUCT.items() if properties.name.lower().startswith(p + " ")), None)
    capability = (properties.major, properties.minor)
    if row is not None and row.capability == capability and row.sm_count == properties.multi_processor_count:
        return row
    if capability not in ARCHITECTURES:
        known = ", ".join(f"{a}.{b}" for a, b in ARCHITECTURES)
        older = " and is older than all of them" if capability < min(ARCHITECTURES) else ""
        raise UnknownGpu(
            f"kernels are compiled for GPUs of compute capability {known}; {properties.name} has {capability[0]}."
            f"{capability[1]}{older}: use another GPU, or torch's own functions on this one"
        )
    # Unknown product: scale the largest GPU of its capability by SM count; bandwidth from the bus if torch reports it.
    kin = max((g for g in GPUS if g.capability == capability), key=lambda g: g.sm_count)
    scale = properties.multi_processor_count / kin.sm_count
    clock_khz = getattr(properties, "memory_clock_rate", 0)
    bus_bits = getattr(properties, "memory_bus_width", 0)
    gbps = 2 * clock_khz * 1e3 * bus_bits / 8 / 1e9 if clock_khz and bus_bits else kin.dram_gbps * scale
    slug = re.sub(r"[^a-z0-9]+", "-", properties.name.lower().removeprefix("nvidia ")).strip("-")
    return GpuSpec(
        name=f"{slug}-{properties.multi_processor_count}sm",
        product=properties.name,
        capability=capability,
        sm_count=properties.multi_processor_count,
        l2_bytes=getattr(properties, "L2_cache_size", kin.l2_bytes),
        memory_bytes=properties.total_memory,
        dram_gbps=gbps,
        boost_mhz=getattr(properties, "clock_rate", 0) / 1e3 or kin.boost_mhz,
        mma_tflops=kin.mma_tflops * scale,
        mma_fp16_tflops=kin.mma_fp16_tflops * scale,
        peak_tflops=kin.peak_tflops * scale,
    )
