"""Which parts go together: NVIDIA driver, CUDA build of torch, the DSL's libraries, Triton's assembler and the GPU.

``cutekernels doctor`` prints what :func:`problems` finds. A new rule is a row of :data:`RULES`.

CUDA runs older minor versions on any driver of the same major version, and nothing built for a newer major one
(docs.nvidia.com/deploy/cuda-compatibility). Wheels of torch: 2.11 has cu126, cu128 and cu130, 2.12 and 2.13 have cu126,
cu130 and cu132; PyPI's are cu130. The DSL loads its newest libraries that the driver runs.
"""

from __future__ import annotations

import hashlib
import re
import sys
from base64 import urlsafe_b64encode
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from itertools import combinations
from pathlib import Path
from typing import NamedTuple

from cutekernels import environment

_PCI = Path("/sys/bus/pci/devices")
_NVIDIA, _DISPLAY = "0x10de", "0x03"  # a PCI vendor; a class of PCI devices, by its first digits
_NVML_VERSIONS_DIFFER = 18
BLACKWELL = (10, 0)


class Cuda(NamedTuple):
    """A version of CUDA, written ``12.4``."""

    major: int
    minor: int

    def __str__(self) -> str:
        return f"{self.major}.{self.minor}"

    @classmethod
    def read(cls, text: str) -> Cuda | None:
        """The version in ``"12.4"`` or ``"12.9.86"``; None for ``""``."""
        parts = [int(part) for part in text.split(".")[:2]] if text else []
        return cls(parts[0], parts[1] if len(parts) > 1 else 0) if parts else None


OLDEST = Cuda(12, 4)  # driver that is supported
DSL_CU12 = Cuda(12, 9)  # driver that NVIDIA asks for, 575.51.03, for the DSL's CUDA 12 libraries


@dataclass(frozen=True, slots=True)
class Machine:
    """Facts that the rules compare. ``None``, ``""`` and ``()`` stand for absent ones."""

    driver: str = ""
    driver_cuda: Cuda | None = None  # the newest that it runs
    nvml_error: int = 0  # its library is installed and does not start
    torch: str = ""
    torch_cuda: Cuda | None = None  # None: a CPU build
    dsl: tuple[int, ...] = ()  # CUDA versions that the DSL has libraries for
    triton: Cuda | None = None  # its assembler for compute capability 10.0 and above
    capabilities: tuple[tuple[int, int], ...] = ()
    has_device: bool = False  # whether the PCI bus has an NVIDIA GPU
    wsl: bool = False

    @property
    def blackwell(self) -> bool:
        return max(self.capabilities, default=(0, 0)) >= BLACKWELL

    @property
    def supported(self) -> bool:
        """Whether there is a driver that is not too old, which rules about other parts presume."""
        return self.driver_cuda is not None and self.driver_cuda >= OLDEST

    def newer_than_driver(self, cuda: Cuda | None) -> bool:
        """Whether code built for ``cuda`` is of a newer major version than the driver runs."""
        return self.driver_cuda is not None and cuda is not None and cuda.major > self.driver_cuda.major

    @property
    def new_driver(self) -> str:
        """How to install a driver that runs everything."""
        if self.wsl:
            return "install NVIDIA's driver 580 or newer in Windows, then `wsl --shutdown`; none inside WSL2"
        return "install NVIDIA's driver 580 or newer"

    @property
    def fit_torch(self) -> str:
        """How to install the build of torch that this driver and GPU run."""
        if self.driver_cuda is not None and self.driver_cuda.major >= 13:
            return "pip install --force-reinstall torch"
        wanted, build = ('"torch==2.11.*"', "cu128") if self.blackwell else ("torch", "cu126")
        return f"pip install --force-reinstall {wanted} --index-url https://download.pytorch.org/whl/{build}"


def this_machine() -> Machine:
    """The facts of the machine at hand; imports neither torch nor a DSL."""
    driver = environment.driver()
    return Machine(
        driver=driver.version,
        driver_cuda=Cuda.read(driver.cuda),
        nvml_error=driver.error,
        torch=environment.package_version("torch"),
        torch_cuda=Cuda.read(environment.cuda_version()),
        dsl=tuple(n for n in (12, 13) if environment.package_version(f"nvidia-cutlass-dsl-libs-cu{n}")),
        triton=Cuda.read(environment.ptxas_version(environment.ptxas_blackwell())),
        capabilities=driver.capabilities,
        has_device=_has_device(_PCI),
        wsl="microsoft" in environment.kernel().lower(),
    )


def _has_device(bus: Path) -> bool:
    try:
        return any(
            (device / "vendor").read_text().strip() == _NVIDIA and (device / "class").read_text().startswith(_DISPLAY)
            for device in bus.iterdir()
        )
    except OSError:  # no such bus, or one that a container hides
        return False


@dataclass(frozen=True, slots=True)
class FitRule:
    """One thing that must fit another. ``value`` and ``remedy`` are templates over a :class:`Machine`, ``{m}``."""

    what: str
    state: str  # absent: no fault; untested: may work; broken: cannot
    fails: Callable[[Machine], bool]
    value: str
    remedy: str


@dataclass(frozen=True, slots=True)
class Misfit:
    """A rule that a machine breaks."""

    what: str
    state: str
    value: str
    remedy: str


RULES: tuple[FitRule, ...] = (
    FitRule(
        "driver",
        "broken",
        lambda m: m.nvml_error == _NVML_VERSIONS_DIFFER,
        "its library is of another version than its kernel module (NVML error {m.nvml_error})",
        "reboot (in Windows for WSL2: `wsl --shutdown`); in a container, start it again",
    ),
    FitRule(
        "driver",
        "absent",
        lambda m: not m.driver and m.nvml_error != _NVML_VERSIONS_DIFFER and m.has_device and not m.wsl,
        "none, though the PCI bus has an NVIDIA GPU",
        "{m.new_driver}; in a container: start it with --gpus all",
    ),
    FitRule(
        "driver",
        "absent",
        lambda m: not m.driver and m.nvml_error != _NVML_VERSIONS_DIFFER and m.wsl,
        "none that Windows hands to WSL2",
        "for an NVIDIA GPU: {m.new_driver}",
    ),
    FitRule(
        "driver",
        "broken",
        lambda m: m.driver_cuda is not None and not m.supported,
        f"{{m.driver}} runs CUDA {{m.driver_cuda}} at most; {OLDEST} is the oldest supported",
        "{m.new_driver}",
    ),
    FitRule(
        "torch and driver",
        "broken",
        lambda m: m.supported and bool(m.torch) and m.torch_cuda is None,
        "torch {m.torch} is a CPU build; the driver, {m.driver}, runs CUDA {m.driver_cuda}",
        "{m.fit_torch}",
    ),
    FitRule(
        "torch and driver",
        "broken",
        lambda m: m.supported and m.newer_than_driver(m.torch_cuda),
        "torch {m.torch} is built for CUDA {m.torch_cuda}; the driver, {m.driver}, runs CUDA {m.driver_cuda} at most",
        "{m.new_driver}, or: {m.fit_torch}",
    ),
    FitRule(
        "torch and gpu",
        "broken",
        lambda m: m.supported and m.blackwell and m.torch_cuda is not None and m.torch_cuda < (12, 8),
        "torch {m.torch} is built for CUDA {m.torch_cuda}; compute capability 10.0 and above needs 12.8 or newer",
        "{m.fit_torch}",
    ),
    FitRule(
        "triton and driver",
        "broken",
        lambda m: m.supported and m.blackwell and m.newer_than_driver(m.triton),
        "Triton assembles for this GPU with CUDA {m.triton}; the driver, {m.driver}, runs CUDA {m.driver_cuda} at most",
        "{m.new_driver}, or, for Triton 3.6: {m.fit_torch}",
    ),
    FitRule(
        "dsl and driver",
        "broken",
        lambda m: m.supported and bool(m.dsl) and all(m.newer_than_driver(Cuda(n, 0)) for n in m.dsl),
        "the DSL has libraries for CUDA {m.dsl[0]} alone; the driver, {m.driver}, runs CUDA {m.driver_cuda} at most",
        "pip install nvidia-cutlass-dsl, which brings those for CUDA 12, or {m.new_driver}",
    ),
    FitRule(
        "dsl and driver",
        "untested",
        lambda m: m.supported and m.driver_cuda is not None and m.driver_cuda.major >= 13 and m.dsl == (12,),
        "the DSL has libraries for CUDA 12 alone; the driver, {m.driver}, runs CUDA {m.driver_cuda}",
        'pip install "nvidia-cutlass-dsl[cu13]"',
    ),
    FitRule(
        "dsl and driver",
        "untested",
        lambda m: m.supported and m.driver_cuda is not None and m.driver_cuda < DSL_CU12 and 12 in m.dsl,
        f"the DSL's libraries for CUDA 12 ask for driver 575.51.03 (CUDA {DSL_CU12}) or newer; this is {{m.driver}} "
        "(CUDA {m.driver_cuda})",
        "{m.new_driver}",
    ),
)


@dataclass(frozen=True, slots=True)
class Overlap:
    """Two installed wheels of the DSL with files in common: ``last`` came last, ``mine`` of ``common`` are its own."""

    last: str
    other: str
    mine: int
    common: int

    def misfit(self, machine: Machine, version: str) -> Misfit | None:
        """The reinstallation to advise where the wheel for this driver is incomplete."""
        wants_cu13 = machine.driver_cuda is None or machine.driver_cuda.major >= 13
        fits = self.last
        if wants_cu13 != fits.endswith("-cu13") and "cu13" in f"{self.last}{self.other}":
            fits = self.other
        if fits == self.last and self.mine == self.common:
            return None
        remedy = f"pip install --force-reinstall --no-deps {fits}=={version}"
        return Misfit("dsl wheels", "broken", f"{self}; this machine needs those of {fits}", remedy)

    def __str__(self) -> str:
        return f"{self.last} came last, with {self.mine} of the {self.common} files that {self.other} has too"


def overlaps(path: Sequence[str] | None = None) -> list[Overlap]:
    """The DSL's wheels that overwrite each other's files, in ``path`` (default: where Python looks)."""
    wheels: dict[str, dict[str, metadata.FileHash]] = {}
    files: dict[str, Path] = {}
    for found in metadata.distributions(path=list(sys.path if path is None else path)):
        if (name := found.metadata["Name"] or "").startswith("nvidia-cutlass-dsl-libs-"):
            hashed = [(file, file.hash) for file in found.files or () if file.hash is not None]
            wheels.setdefault(name, {str(file): digest for file, digest in hashed})
            files |= {str(file): Path(str(file.locate())) for file, _ in hashed}
    both = []
    for one, two in combinations(sorted(wheels), 2):
        differ = [name for name, digest in wheels[one].items() if wheels[two].get(name, digest).value != digest.value]
        if differ:
            own = {wheel: sum(_lies(files[name], wheels[wheel][name]) for name in differ) for wheel in (one, two)}
            last, other = sorted(own, key=own.__getitem__, reverse=True)
            both.append(Overlap(last, other, own[last], len(differ)))
    return both


def _lies(file: Path, recorded: metadata.FileHash) -> bool:
    """Whether the file on the disk is the one that a wheel recorded."""
    try:
        with file.open("rb") as content:
            found = hashlib.file_digest(content, recorded.mode).digest()
    except OSError:  # gone: the other wheel was uninstalled
        return False
    return urlsafe_b64encode(found).decode().rstrip("=") == recorded.value


def problems(machine: Machine, rules: Sequence[FitRule] = RULES) -> list[Misfit]:
    """One entry for each rule that ``machine`` breaks."""
    return [
        Misfit(rule.what, rule.state, rule.value.format(m=machine), rule.remedy.format(m=machine))
        for rule in rules
        if rule.fails(machine)
    ]


def requirements() -> dict[str, str]:
    """Declared requirements by package: of the whole, and of extras whose packages are here. None from source."""
    found: dict[str, str] = {}
    with suppress(metadata.PackageNotFoundError):
        for row in metadata.requires("cutekernels") or ():
            bounds, _, extra = row.partition(";")
            name = re.split(r"[^\w.-]", bounds, maxsplit=1)[0]
            if not extra or (environment.package_version(name) and not re.search('"(bench|dev|docs)"', extra)):
                found.setdefault(name, bounds)
            if "[cu13]" in bounds and environment.package_version("nvidia-cutlass-dsl-libs-cu13"):
                found[name] = bounds
    return found


def excludes(requirement: str, version: str) -> bool:
    """Whether a requirement's bounds exclude a version, by its numbers: 2.13.0+cu126 and 2.13rc1 are 2.13."""
    here = _numbers(version)
    bounds = [(relation, _numbers(bound)) for relation, bound in re.findall(r"(>=|<|!=)([\d.]+)", requirement)]
    return any(here == bound if at == "!=" else (here < bound) == (at == ">=") for at, bound in bounds)


def _numbers(version: str) -> list[int]:
    found = re.findall(r"\d+", re.split(r"[^\d.]", version, maxsplit=1)[0])
    return [*map(int, found), 0, 0, 0][:4]
