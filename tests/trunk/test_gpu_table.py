"""The GPU table: names, aliases, and GPUs that are not in it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import fields, replace
from types import SimpleNamespace
from typing import Any

import pytest

from cutekernels import cli, dispatch, settings
from cutekernels import gpu as gpus
from cutekernels.errors import CuteKernelsError, UnknownGpu
from cutekernels.gpu import ALIASES, ARCHITECTURES, GPUS, KIB, GpuSpec, describe, lookup
from cutekernels.installation import Machine
from cutekernels.ops import registry

ASKED_FOR = {"rtx5090", "rtx4090", "rtx3090", "rtxpro6000", "l40s", "l4", "a10", "h100-sxm", "h100-pcie", "h200"} | {
    f"a100-{form}-{memory}" for form in ("sxm", "pcie") for memory in ("40gb", "80gb")
}


def properties(spec: GpuSpec, **changes: Any) -> SimpleNamespace:
    """Device properties as torch reports them for ``spec``."""
    major, minor = spec.capability
    said = {
        "name": spec.product,
        "major": major,
        "minor": minor,
        "multi_processor_count": spec.sm_count,
        "L2_cache_size": spec.l2_bytes,
        "total_memory": spec.memory_bytes,
    }
    return SimpleNamespace(**(said | changes))


def test_the_table_has_every_gpu_that_was_asked_for() -> None:
    assert [g.name for g in GPUS] == list(dict.fromkeys(g.name for g in GPUS)), "names are identities"
    assert {g.name for g in GPUS} >= ASKED_FOR


@pytest.mark.parametrize("gpu", GPUS, ids=lambda g: g.name)
def test_a_row_is_plausible(gpu: GpuSpec) -> None:
    assert lookup(gpu.name) is gpu
    assert lookup(f" {gpu.name.upper()} ") is gpu
    assert gpu.arch is ARCHITECTURES[gpu.capability]
    assert gpu.name == gpu.name.lower()
    assert " " not in gpu.name
    assert gpu.smem_per_block_bytes + gpu.SMEM_RESERVED_BYTES == gpu.smem_per_sm_bytes
    assert 0 < gpu.mma_tflops <= gpu.peak_tflops
    assert gpu.mma_tflops <= gpu.mma_fp16_tflops <= gpu.peak_tflops
    assert gpu.l2_bytes < gpu.memory_bytes
    assert 100 < gpu.dram_gbps < 10_000
    assert 1000 < gpu.boost_mhz < 4000


def test_a_row_states_its_clock() -> None:
    with pytest.raises(TypeError, match="mma_tflops"):
        gpus._row("h300", "NVIDIA H300", (9, 0), 140, 60, 141, 5000, 620)  # type: ignore[call-arg]


def test_the_rate_that_is_listed_accumulates_in_fp32() -> None:
    rates = {name: lookup(name).bf16_tflops for name in ("rtx4090", "rtx5090", "a100", "l40s", "h100", "h200")}
    assert rates == {"rtx4090": 165.2, "rtx5090": 209.5, "a100": 312, "l40s": 362, "h100": 989.5, "h200": 989.5}


def test_capabilities_are_asked_not_names() -> None:
    assert not lookup("a100").has_tma
    assert lookup("h200").has_tma
    assert lookup("h200").has_wgmma
    assert lookup("rtx5090").has_tma
    assert not lookup("rtx5090").has_wgmma
    assert lookup("l40s").smem_per_block_bytes == 99 * KIB


@pytest.mark.parametrize("alias", ALIASES)
def test_aliases_lead_to_rows(alias: str) -> None:
    assert lookup(alias).name == ALIASES[alias]


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(
        UnknownGpu, match=r"no GPU is called 'h300'. Did you mean 'h200'\? Known: .*h200.*--gpu auto"
    ) as raised:
        lookup("h300")
    assert isinstance(raised.value, CuteKernelsError)
    assert isinstance(raised.value, LookupError)


def test_auto_without_a_gpu_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    gpus._detect.cache_clear()
    try:
        with pytest.raises(UnknownGpu, match="no CUDA device is visible: run where a GPU is, or name one"):
            lookup("auto")
    finally:
        gpus._detect.cache_clear()


@pytest.mark.parametrize("gpu", GPUS, ids=lambda g: g.name)
def test_a_device_is_recognised_by_its_product(gpu: GpuSpec) -> None:
    assert describe(properties(gpu)) is gpu
    assert describe(properties(gpu, name=gpu.product + " Workstation Edition")).capability == gpu.capability


def test_a_gpu_outside_the_table_is_described_from_its_properties() -> None:
    found = describe(properties(lookup("rtx4090"), name="NVIDIA GeForce RTX 4070 Ti", multi_processor_count=60))
    assert found not in GPUS
    assert found.name == "geforce-rtx-4070-ti-60sm"
    assert found.product == "NVIDIA GeForce RTX 4070 Ti"
    assert found.target == lookup("rtx4090").target
    assert found.sm_count == 60
    assert 0 < found.mma_tflops < lookup("rtx4090").mma_tflops


def test_rates_of_memory_and_clock_are_those_that_torch_tells() -> None:
    told = properties(
        lookup("rtx4090"), name="NVIDIA X", multi_processor_count=60, memory_clock_rate=10_501_000, memory_bus_width=192
    )
    assert describe(told).dram_gbps == pytest.approx(504, rel=0.01)
    assert describe(told).boost_mhz == lookup("rtx4090").boost_mhz
    told.clock_rate = 2_610_000
    assert describe(told).boost_mhz == 2610


def test_a_slice_of_a_gpu_is_not_the_gpu() -> None:
    """MIG: the product's name with fewer SMs must not look up winners of the whole."""
    found = describe(properties(lookup("h200"), multi_processor_count=60))
    assert found.name != "h200"
    assert found.sm_count == 60


T4 = properties(lookup("a10"), name="Tesla T4", major=7, minor=5)
B200 = properties(lookup("h200"), name="NVIDIA B200", major=10, minor=0)


@pytest.mark.parametrize(("told", "rule"), [(T4, r"7\.5 and is older than all of them: use"), (B200, r"10\.0: use")])
def test_an_unknown_capability_is_refused(told: Any, rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By every op before anything compiles, and by the doctor."""
    import torch

    rule = rf"compiled for GPUs of compute capability 8\.0, .*; {told.name} has {rule} another GPU, or torch's own"
    monkeypatch.setattr(gpus, "_driver", object)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: told)
    gpus._detect.cache_clear()
    try:
        for op in registry.OPS:
            with pytest.raises(UnknownGpu, match=rule):
                dispatch.plan(op, op.Problem.parse(op.suite[0]), 63)
        found = cli._gpu(Machine(driver="580.65"))
    finally:
        gpus._detect.cache_clear()
    assert found.state == "broken" and re.search(rule, found.value) and "use another GPU" in found.remedy


def test_specs_are_values() -> None:
    assert replace(lookup("h200"), name="other") != lookup("h200")
    with pytest.raises(AttributeError):
        lookup("h200").name = "x"  # type: ignore[misc]


LACKS = {  # what a Hopper card may not use as a stand-in
    "a100": ["smem_per_sm_bytes", "smem_per_block_bytes", "has_tma", "has_wgmma", "has_pdl", "has_fp8"],
    "l40s": ["smem_per_sm_bytes", "smem_per_block_bytes", "max_warps", "has_tma", "has_wgmma", "has_pdl"],
    "rtx5090": ["smem_per_sm_bytes", "smem_per_block_bytes", "max_warps", "has_wgmma"],
}


@pytest.mark.parametrize("card", LACKS)
@pytest.mark.parametrize("own", ["h200", "h100-pcie"])
def test_a_stand_in_has_its_own_speed_and_the_others_instructions(own: str, card: str) -> None:
    gpu, spec, other = lookup(own), lookup(f"{own}-as-{card}"), lookup(card)
    assert (spec.name, spec.base_name, spec) == (f"{own}-as-{card}", own, gpu.stand_in(other))
    differs = [f.name for f in fields(gpu.arch) if getattr(spec.arch, f.name) != getattr(gpu.arch, f.name)]
    assert differs == LACKS[card]
    assert all(getattr(spec.arch, name) == getattr(other.arch, name) for name in differs)
    assert (spec.target, spec.bf16_tflops, spec.runs_on) == ("sm_90a", gpu.mma_tflops, gpu.arch)
    assert replace(spec, name=own, confined_to=None, peak_tflops=gpu.peak_tflops) == gpu


def test_alike_gpus_have_one_stand_in() -> None:
    assert lookup("h200-as-a100-pcie-40gb") == lookup("H200-as-A100") == lookup("h200-as-l40s").stand_in(lookup("a100"))
    assert lookup("h200-as-rtx4090") == lookup("h200-as-l40s") != lookup("h200-as-rtx3090")


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("a100-as-l40s", "a100-sxm-80gb cannot stand in for l40s, which has more: has_fp8"),
        ("l40s-as-a100", "l40s cannot stand in for a100, which has more: smem_per_sm_bytes, smem_per_block_bytes"),
        ("h200-as-h100", "h200 has what h100-sxm has: a stand-in is for a GPU with less"),
        ("h200-as-a1000", "no GPU is called 'a1000'"),
    ],
)
def test_what_cannot_stand_in_is_refused(name: str, why: str) -> None:
    with pytest.raises(UnknownGpu, match=re.escape(why)):
        lookup(name)


@pytest.fixture
def on_h200(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A machine with an H200 as torch tells of it."""
    import torch

    monkeypatch.setenv(settings.GPU_AS_VARIABLE, "")
    monkeypatch.setattr(gpus, "_driver", object)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties(lookup("h200")))
    gpus._detect.cache_clear()
    yield
    gpus._detect.cache_clear()


@pytest.mark.usefixtures("on_h200")
def test_the_setting_makes_this_gpu_a_stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in = lookup("h200-as-a100")
    assert gpus.present(lookup("h200")) and gpus.present(stand_in) and not gpus.present(lookup("a100"))
    monkeypatch.setenv("CUTEKERNELS_GPU_AS", "a100")
    assert gpus.detect() == lookup("auto") == stand_in
    assert gpus.present(stand_in) and not gpus.present(lookup("h200")) and not gpus.present(lookup("h200-as-l40s"))
    monkeypatch.setenv("CUTEKERNELS_GPU_AS", "b200")
    with pytest.raises(UnknownGpu, match="no kernel here is compiled for the b200"):
        gpus.detect()


@pytest.mark.usefixtures("on_h200")
def test_a_chosen_stand_in_is_taken_for_the_gpu_from_then_on() -> None:
    assert gpus.choose("auto", None) == gpus.detect() == lookup("h200")
    assert gpus.choose("auto", "l40s") == gpus.detect() == lookup("h200-as-l40s")
    assert gpus.choose("h200", "a100") == gpus.detect() == lookup("h200-as-a100")
    assert gpus.choose("h100", "l40s").name == "h100-sxm-as-l40s", "another GPU, which is absent"
    assert gpus.detect().name == "h200-as-a100"
