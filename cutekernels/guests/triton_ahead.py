"""Compiles a guest's Triton kernels ahead, in a process that sees no GPU, into Triton's own cache on disk.

The measuring process launches the same kernels with the same types and constants, and finds them there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from cutekernels.backends import Facts
from cutekernels.backends.cubin import resource_usage
from cutekernels.backends.triton import WARP_SIZE
from cutekernels.errors import CompileError
from cutekernels.gpu import GpuSpec


@dataclass(frozen=True)
class _Target:
    """What Triton asks of a driver before it compiles: the GPU to compile for, and a device to remember it under.

    A number for each architecture: a kernel keeps its compiler's backend by the device.
    """

    target: Any

    def get_current_target(self) -> Any:
        return self.target

    def get_current_device(self) -> int:
        return int(self.target.arch)

    def get_current_stream(self, device: int) -> int:
        return 0


@contextmanager
def target(gpu: GpuSpec) -> Iterator[None]:
    """Makes ``kernel.warmup(...)`` compile for ``gpu``. For a process of its own: Triton has one driver a process."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime.driver import driver

    before = driver._active
    driver.set_active(_Target(GPUTarget("cuda", gpu.capability[0] * 10 + gpu.capability[1], WARP_SIZE)))
    try:
        yield
    finally:
        driver._active = before


def facts(gpu: GpuSpec, warmups: Iterable[Callable[[], Any]]) -> Facts:
    """The most of each resource of the kernels that ``warmups`` compile, ``kernel.warmup`` with its arguments each.

    Raises:
        CompileError: Triton or ptxas refuses one.
    """
    from triton.errors import TritonError

    found = []
    with target(gpu):
        for warmup in warmups:
            try:
                kernel = warmup()
            except (TritonError, RuntimeError) as error:  # RuntimeError: a pass of the compiler failed
                raise CompileError(
                    f"Triton could not compile for {gpu.target}: {type(error).__name__}: {error}"
                ) from error
            usage = resource_usage(kernel.asm["cubin"])[kernel.metadata.name]
            # Triton requests all its shared memory at launch; the binary declares none.
            found.append(Facts(usage.registers, usage.stack_bytes, usage.smem_bytes + kernel.metadata.shared))
    return Facts(max(f.registers for f in found), max(f.stack_bytes for f in found), max(f.smem_bytes for f in found))
