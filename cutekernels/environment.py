"""Versions of everything between the Python source and the GPU that a measurement ran on.

They are read without importing torch, Triton or the DSL, which take seconds: from package metadata, the driver's
from NVML, ptxas's from the binary in Triton's wheel. An absent one is ``""``. Anything new that can change a kernel's
speed gets a line in :func:`collect`.
"""

from __future__ import annotations

import ctypes
import importlib.util
import platform
import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from importlib import metadata
from pathlib import Path

_HERE = Path(__file__).resolve()
_DEADLINE_S = 10.0


def collect() -> dict[str, str]:
    """Versions by name: ``driver cuda dsl ptxas triton torch python commit``; ``""`` for an absent one."""
    return dict(_collect())


def compilers() -> dict[str, str]:
    """Versions of what compiles kernels, ``triton dsl``, as :func:`collect` has them."""
    dsl = package_version("nvidia-cutlass-dsl") or package_version("nvidia-cutlass-dsl-libs-base")
    return {"triton": package_version("triton"), "dsl": dsl}


def drift(then: Mapping[str, str], of: Sequence[str] = ("triton", "dsl")) -> str:
    """``measured under Triton 3.6.0, here 3.8.0``: compilers of other versions than ``then``'s; else ``""``."""
    here = compilers()
    moved = [name for name in of if then.get(name) and here[name] and then[name] != here[name]]
    if not moved:
        return ""
    words = [f"{'Triton' if name == 'triton' else 'CuTe DSL'} {then[name]}" for name in moved]
    return f"measured under {' and '.join(words)}, here {' and '.join(here[name] for name in moved)}"


def stamp(gpu: str, commit: str | None = None) -> dict[str, str]:
    """:func:`collect` with the GPU's name and the UTC time: what a benchmark row carries.

    Args:
        gpu: name of the GPU the rows were measured on.
        commit: the commit under test, for a copy of the checkout that left ``.git`` behind.
    """
    facts = collect()
    if commit is not None:
        facts["commit"] = commit
    return {"date": datetime.now(UTC).isoformat(timespec="seconds"), "gpu": gpu, **facts}


@cache
def _collect() -> tuple[tuple[str, str], ...]:
    return (
        ("driver", driver_version()),
        ("cuda", cuda_version()),
        ("dsl", compilers()["dsl"]),
        ("ptxas", ptxas_version()),
        ("triton", package_version("triton")),
        ("torch", package_version("torch")),
        ("python", platform.python_version()),
        ("commit", commit()),
    )


def package_version(distribution: str) -> str:
    """The installed version of ``distribution``; ``""`` where it is not installed, or has lost its metadata."""
    try:
        return metadata.version(distribution) or ""
    except metadata.PackageNotFoundError:
        return ""


@dataclass(frozen=True, slots=True)
class Driver:
    """NVML's words on the NVIDIA driver and its GPUs, without a CUDA context."""

    version: str = ""  # "" where none answers
    cuda: str = ""  # the newest CUDA it runs, e.g. "12.4"
    capabilities: tuple[tuple[int, int], ...] = ()  # of its GPUs
    error: int = 0  # NVML's code where the library is installed and does not start


@cache
def driver() -> Driver:
    """The NVIDIA driver; an empty :class:`Driver` without one."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return Driver()
    if error := nvml.nvmlInit_v2():
        return Driver(error=error)
    try:
        text, number = ctypes.create_string_buffer(96), ctypes.c_int()
        version = text.value.decode() if nvml.nvmlSystemGetDriverVersion(text, len(text)) == 0 else ""
        known = nvml.nvmlSystemGetCudaDriverVersion_v2(ctypes.byref(number)) == 0
        cuda = f"{number.value // 1000}.{number.value % 1000 // 10}" if known else ""
        return Driver(version, cuda, _capabilities(nvml))
    finally:
        nvml.nvmlShutdown()


def _capabilities(nvml: ctypes.CDLL) -> tuple[tuple[int, int], ...]:
    count, device, major, minor = ctypes.c_uint(), ctypes.c_void_p(), ctypes.c_int(), ctypes.c_int()
    found = []
    if nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)) == 0:
        for index in range(count.value):
            if nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(device)):
                continue  # one that this container or user may not see
            if nvml.nvmlDeviceGetCudaComputeCapability(device, ctypes.byref(major), ctypes.byref(minor)) == 0:
                found.append((major.value, minor.value))
    return tuple(found)


def driver_version() -> str:
    """The NVIDIA driver's version; ``""`` without a driver."""
    return driver().version


def kernel() -> str:
    """The release of the operating system's kernel; WSL2's names Microsoft."""
    return platform.release()


def cuda_version() -> str:
    """The CUDA version torch was built with; ``""`` for a CPU build."""
    root = _package_root("torch")
    version_file = root / "version.py" if root else None
    if version_file is None or not version_file.is_file():
        return ""
    found = re.search(r"^cuda\b[^=]*=\s*['\"]([\d.]+)['\"]", version_file.read_text(), re.MULTILINE)
    return found.group(1) if found else ""


def ptxas() -> Path | None:
    """The assembler in Triton's wheel. (The DSL carries its own inside; its version follows from the DSL's.)"""
    root = _package_root("triton")
    tool = root / "backends" / "nvidia" / "bin" / "ptxas" if root else None
    return tool if tool is not None and tool.is_file() else None


def ptxas_blackwell() -> Path | None:
    """The assembler that Triton takes for compute capability 10.0 and above."""
    tool = ptxas()
    newer = tool.with_name("ptxas-blackwell") if tool else None
    return newer if newer is not None and newer.is_file() else tool


def ptxas_version(tool: Path | None = None) -> str:
    """The version that ``tool``, else :func:`ptxas`, prints, e.g. ``"12.9.86"``; ``""`` without one."""
    tool = tool or ptxas()
    found = re.search(r"\bV(\d[\d.]*)", _output(str(tool), "--version")) if tool else None
    return found.group(1) if found else ""


def commit() -> str:
    """The commit of the checkout this package lies in, ``-dirty`` where tracked files changed; ``""`` outside one."""
    git = ("git", "-C", str(_HERE.parent))
    # The file must be tracked: a virtual environment may lie inside another repository.
    if not _output(*git, "ls-files", "--", _HERE.name).strip():
        return ""
    head = _output(*git, "rev-parse", "--short=12", "HEAD").strip()
    return f"{head}-dirty" if head and _output(*git, "status", "--porcelain", "--untracked-files=no").strip() else head


def _package_root(name: str) -> Path | None:
    spec = importlib.util.find_spec(name)  # finds a top-level package without running it
    return Path(spec.origin).parent if spec is not None and spec.origin else None


def _output(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_DEADLINE_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""
