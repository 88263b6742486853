"""Resource usage of a compiled binary: registers, stack and static shared memory, per kernel.

It is read with the ``cuobjdump`` in Triton's wheel (about 3 ms a call), so neither a CUDA toolkit nor a GPU is
needed. Both backends use it; each adds the dynamic shared memory of a launch, which is not in the binary.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from cutekernels.backends import Facts
from cutekernels.errors import CompileError, CompilerKilled

# From compute capability 9.0 on, a cubin with this section counts the driver's share of each block
# (GpuSpec.SMEM_RESERVED_BYTES) as the kernel's. Facts never count it.
_RESERVED_SECTION = b".nv.shared.reserved."
_RESERVED_BYTES = 1024

_USAGE = re.compile(
    r"^\s*Function (?P<name>[^\n]+?):\s*\n"
    r"\s*REG:(?P<reg>\d+) STACK:(?P<stack>\d+) SHARED:(?P<shared>\d+) LOCAL:(?P<local>\d+)",
    re.MULTILINE,
)
_TIMEOUT_S = 60


@cache
def cuobjdump() -> Path:
    """The path of ``cuobjdump``, found without importing Triton. CompileError where Triton is not installed."""
    spec = find_spec("triton")
    for root in (spec.submodule_search_locations if spec else None) or ():
        tool = Path(root) / "backends" / "nvidia" / "bin" / "cuobjdump"
        if tool.is_file():
            return tool
    raise CompileError("cuobjdump comes with Triton's wheel, and none is installed; pip install triton")


def resource_usage(cubin: bytes) -> dict[str, Facts]:
    """Registers and stack per thread and static shared memory per block, by kernel name.

    Stack includes spills and run-time-indexed arrays. The driver's reserved KiB of shared memory is left out.

    Raises:
        CompileError: ``cubin`` is not a CUDA binary, or holds no kernel.
        CompilerKilled: the tool could not run, or was killed.
    """
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        try:
            command = [str(cuobjdump()), "--dump-resource-usage", file.name]
            done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=_TIMEOUT_S)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise CompilerKilled(f"{cuobjdump()} did not run: {error}") from error
    if done.returncode < 0:
        raise CompilerKilled(f"{cuobjdump()} was ended by signal {-done.returncode}")
    reserved = _RESERVED_BYTES if _RESERVED_SECTION in cubin else 0
    usage = {
        match["name"]: Facts(
            registers=int(match["reg"]),
            stack_bytes=int(match["stack"]) + int(match["local"]),
            smem_bytes=max(0, int(match["shared"]) - reserved),
        )
        for match in _USAGE.finditer(done.stdout)
    }
    if done.returncode or not usage:
        said = (done.stderr or done.stdout).strip() or "nothing"
        raise CompileError(f"cuobjdump found no kernel in {len(cubin)} bytes of cubin; it said: {said[:300]}")
    return usage
