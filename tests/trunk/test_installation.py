"""Parts that go together: each rule has a machine that breaks it and alone it, read from a driver that is faked."""

from __future__ import annotations

import ctypes
from base64 import urlsafe_b64encode
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from cutekernels import cli, environment, installation
from cutekernels.installation import RULES, Cuda, Machine, problems

H200, RTX5090 = (9, 0), (12, 0)
CURRENT = Machine(
    driver="580.95.05",
    driver_cuda=Cuda(13, 0),
    torch="2.13.0",
    torch_cuda=Cuda(13, 0),
    dsl=(12, 13),
    triton=Cuda(13, 1),
    capabilities=(H200,),
    has_device=True,
)
CUDA12 = replace(
    CURRENT, driver="575.57.08", driver_cuda=Cuda(12, 9), torch="2.13.0+cu126", torch_cuda=Cuda(12, 6), dsl=(12,)
)
DRIVER_12_4 = replace(CUDA12, driver="550.54.15", driver_cuda=Cuda(12, 4))
DRIVER_12_8 = replace(CUDA12, driver="570.86.15", driver_cuda=Cuda(12, 8))
TORCH_2_11 = replace(CUDA12, torch="2.11.0+cu128", torch_cuda=Cuda(12, 8), triton=Cuda(12, 9))
NO_DRIVER = replace(CURRENT, driver="", driver_cuda=None, capabilities=())
CPU = replace(NO_DRIVER, has_device=False, torch="2.13.0+cpu", torch_cuda=None)
WHEELS = "--index-url https://download.pytorch.org/whl/"
OLD_DSL = ("dsl and driver", "untested", "575.51.03", "driver 580 or newer")


class Case(NamedTuple):
    name: str
    machine: Machine
    expected: tuple[tuple[str, str, str, str], ...] = ()  # what, state, and a part of value and of remedy


CASES = (
    Case("CUDA 13 throughout", CURRENT),
    Case("CUDA 13, Blackwell", replace(CURRENT, capabilities=(RTX5090,))),
    Case("a driver newer than all", replace(CURRENT, driver="615.10", driver_cuda=Cuda(14, 0))),
    Case("CUDA 12 throughout", CUDA12),
    Case("CUDA 12 and 13 of the DSL, which takes what the driver runs", replace(CUDA12, dsl=(12, 13))),
    Case("CUDA 12, Blackwell, torch 2.11", replace(TORCH_2_11, capabilities=(RTX5090,))),
    Case("an older torch on a newer driver", replace(CURRENT, torch="2.13.0+cu126", torch_cuda=Cuda(12, 6))),
    Case("no GPU", CPU),
    Case("no GPU, torch with CUDA", replace(CPU, torch="2.13.0", torch_cuda=Cuda(13, 0))),
    Case("no torch, no driver", replace(CPU, torch="")),
    Case("the driver's library in a container without a GPU", replace(CPU, nvml_error=9)),
    Case(
        "an update of the driver before the reboot",
        replace(NO_DRIVER, nvml_error=18),
        (("driver", "broken", "NVML error 18", "reboot"),),
    ),
    Case("a GPU without a driver", NO_DRIVER, (("driver", "absent", "PCI bus", "driver 580 or newer"),)),
    Case(
        "WSL2 without a driver",
        replace(CPU, wsl=True),
        (("driver", "absent", "WSL2", "driver 580 or newer in Windows"),),
    ),
    Case(
        "CUDA 12.3",
        replace(CUDA12, driver="545.23.08", driver_cuda=Cuda(12, 3)),
        (("driver", "broken", "545.23.08 runs CUDA 12.3 at most; 12.4 is the oldest", "driver 580 or newer"),),
    ),
    Case(
        "CUDA 11 and torch for 13: one cause, one line",
        replace(CURRENT, driver="470.57.02", driver_cuda=Cuda(11, 4)),
        (("driver", "broken", "CUDA 11.4", "driver 580 or newer"),),
    ),
    Case(
        "CUDA 12.2 under WSL2",
        replace(CUDA12, driver="537.13", driver_cuda=Cuda(12, 2), wsl=True),
        (("driver", "broken", "CUDA 12.2", "in Windows, then `wsl --shutdown`"),),
    ),
    Case("CUDA 12.4", DRIVER_12_4, (OLD_DSL,)),
    Case(
        "CUDA 12.4 and PyPI's torch",
        replace(DRIVER_12_4, torch="2.13.0", torch_cuda=Cuda(13, 0)),
        (
            ("torch and driver", "broken", "for CUDA 13.0; the driver, 550.54.15, runs CUDA 12.4", WHEELS + "cu126"),
            OLD_DSL,
        ),
    ),
    Case(
        "CUDA 12.8 and PyPI's torch under WSL2",
        replace(DRIVER_12_8, torch="2.13.0", torch_cuda=Cuda(13, 0), wsl=True),
        (("torch and driver", "broken", "CUDA 13.0", "in Windows, then `wsl --shutdown`"), OLD_DSL),
    ),
    Case(
        "a CPU build of torch on a driver for CUDA 13",
        replace(CURRENT, torch="2.13.0+cpu", torch_cuda=None),
        (("torch and driver", "broken", "2.13.0+cpu is a CPU build", "pip install --force-reinstall torch"),),
    ),
    Case(
        "a CPU build of torch on a driver for CUDA 12",
        replace(CUDA12, torch="2.13.0+cpu", torch_cuda=None),
        (("torch and driver", "broken", "2.13.0+cpu is a CPU build", WHEELS + "cu126"),),
    ),
    Case(
        "Blackwell with torch for CUDA 12.6, driver for 13",
        replace(CURRENT, capabilities=(RTX5090,), torch="2.13.0+cu126", torch_cuda=Cuda(12, 6)),
        (("torch and gpu", "broken", "for CUDA 12.6", "pip install --force-reinstall torch"),),
    ),
    Case(
        "Blackwell with Triton 3.7, driver for CUDA 12",
        replace(TORCH_2_11, capabilities=(RTX5090,), triton=Cuda(13, 1)),
        (("triton and driver", "broken", "with CUDA 13.1", '"torch==2.11.*" ' + WHEELS + "cu128"),),
    ),
    Case(
        "the DSL for CUDA 13 alone on a driver for 12",
        replace(CUDA12, dsl=(13,)),
        (("dsl and driver", "broken", "for CUDA 13 alone", "pip install nvidia-cutlass-dsl"),),
    ),
    Case(
        "the DSL for CUDA 12 alone on a driver for 13",
        replace(CURRENT, dsl=(12,)),
        (("dsl and driver", "untested", "for CUDA 12 alone", 'pip install "nvidia-cutlass-dsl[cu13]"'),),
    ),
)


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_a_machine_has_these_problems_and_no_other(case: Case) -> None:
    found = problems(case.machine)
    assert [(p.what, p.state) for p in found] == [(what, state) for what, state, _, _ in case.expected]
    for problem, (_, _, value, remedy) in zip(found, case.expected, strict=True):
        assert value in problem.value
        assert remedy in problem.remedy
        assert "\n" not in problem.value + problem.remedy
        assert "None" not in problem.value + problem.remedy


def test_every_rule_is_broken_by_a_case() -> None:
    assert [r for r in RULES if not any(r.fails(case.machine) for case in CASES)] == []


class Nvml:
    """NVML as the loader hands it out, of a machine with two GPUs, one of which is not ours to see."""

    def __init__(self, starts: int = 0) -> None:
        self.starts, self.ended = starts, 0

    def nvmlInit_v2(self) -> int:
        return self.starts

    def nvmlShutdown(self) -> int:
        self.ended += 1
        return 0

    def nvmlSystemGetDriverVersion(self, text: Any, length: int) -> int:
        text.value = b"550.54.15"
        return 0

    def nvmlSystemGetCudaDriverVersion_v2(self, number: Any) -> int:
        number._obj.value = 12040
        return 0

    def nvmlDeviceGetCount_v2(self, count: Any) -> int:
        count._obj.value = 2
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, index: int, device: Any) -> int:
        return 4 if index == 0 else 0

    def nvmlDeviceGetCudaComputeCapability(self, device: Any, major: Any, minor: Any) -> int:
        major._obj.value, minor._obj.value = 8, 9
        return 0


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> Nvml:
    nvml = Nvml()
    monkeypatch.setattr(ctypes, "CDLL", lambda name: nvml)
    monkeypatch.setattr(environment, "driver", environment.driver.__wrapped__)
    return nvml


def test_facts_are_read_from_the_driver(loaded: Nvml, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "kernel", lambda: "5.15.153.1-microsoft-standard-WSL2")
    monkeypatch.setattr(environment, "cuda_version", lambda: "13.0")
    found = installation.this_machine()
    assert (found.driver, found.driver_cuda, found.capabilities) == ("550.54.15", (12, 4), ((8, 9),))
    assert (found.torch, found.torch_cuda) == (environment.package_version("torch"), (13, 0))
    assert found.wsl
    assert 12 in found.dsl, "the DSL always has its libraries for CUDA 12"
    assert loaded.ended == 1
    (broken,) = [problem for problem in problems(found) if problem.state == "broken"]
    assert broken.what == "torch and driver"


def test_a_driver_that_does_not_start_is_an_error_of_its_own(loaded: Nvml) -> None:
    loaded.starts = 18
    found = installation.this_machine()
    assert (found.driver, found.driver_cuda, found.nvml_error) == ("", None, 18)
    assert environment.driver_version() == ""


def test_the_assembler_is_the_one_that_triton_takes_for_blackwell() -> None:
    tool = environment.ptxas_blackwell()
    assert tool is not None and tool.name == "ptxas-blackwell"
    read = installation.this_machine().triton
    assert read is not None and environment.ptxas_version(tool).startswith(f"{read}.")


@pytest.mark.parametrize(
    ("vendor", "kind", "is_gpu"),
    [("0x10de", "0x030200", True), ("0x10de", "0x020700", False), ("0x8086", "0x030000", False)],
)
def test_a_gpu_is_seen_on_the_bus(tmp_path: Path, vendor: str, kind: str, is_gpu: bool) -> None:
    device = tmp_path / "0000:01:00.0"
    device.mkdir()
    (device / "vendor").write_text(vendor + "\n")
    (device / "class").write_text(kind + "\n")
    assert installation._has_device(tmp_path) is is_gpu
    assert not installation._has_device(tmp_path / "absent")


BASE, CU13 = "nvidia-cutlass-dsl-libs-base", "nvidia-cutlass-dsl-libs-cu13"


def installed(folder: Path, *order: str) -> list[str]:
    """The DSL's wheels unpacked one over the other, each with a file of its own and two in common."""
    for wheel in order:
        info = folder / f"{wheel.replace('-', '_')}-4.8.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {wheel}\nVersion: 4.8.0\n")
        rows = []
        for name, content in {"ir.so": wheel, "license": "same", f"{wheel}.py": wheel, "lib.a": wheel[::-1]}.items():
            (folder / name).write_text(content)
            digest = urlsafe_b64encode(sha256(content.encode()).digest()).decode().rstrip("=")
            rows.append(f"{name},sha256={digest},{len(content)}")
        (info / "RECORD").write_text("\n".join(rows))
    return [str(folder)]


@pytest.mark.parametrize(
    ("order", "cuda", "wanted"),
    [
        ((BASE, CU13), "13.0", None),
        ((BASE, CU13), "", None),
        ((CU13, BASE), "13.0", CU13),
        ((BASE, CU13), "12.9", BASE),
        ((CU13, BASE), "12.9", None),
    ],
)
def test_the_wheel_of_the_dsl_that_came_last_is_named(
    tmp_path: Path, order: tuple[str, ...], cuda: str, wanted: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    (overlap,) = installation.overlaps(installed(tmp_path, *order))
    assert str(overlap) == f"{order[1]} came last, with 2 of the 2 files that {order[0]} has too"
    monkeypatch.setattr(installation, "overlaps", lambda: [overlap])
    (finding,) = cli._dsl_wheels(Machine(driver_cuda=Cuda.read(cuda)), "4.8.0")
    assert finding.state == ("ok" if wanted is None else "broken")
    assert finding.remedy == ("" if wanted is None else f"pip install --force-reinstall --no-deps {wanted}==4.8.0")


def test_wheels_of_the_dsl_in_pieces_are_found(tmp_path: Path) -> None:
    path = installed(tmp_path, BASE, CU13)
    (tmp_path / "ir.so").unlink()
    (overlap,) = installation.overlaps(path)
    assert (overlap.last, overlap.mine, overlap.common) == (CU13, 1, 2)
    misfit = overlap.misfit(Machine(), "4.8.1")
    assert misfit is not None and misfit.remedy.endswith(f"{CU13}==4.8.1")
    for info in tmp_path.glob("*cu13*.dist-info"):
        (info / "RECORD").write_text("")
    assert installation.overlaps(path) == []
