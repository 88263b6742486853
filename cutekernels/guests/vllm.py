"""vLLM's fused MoE and block FP8 product as guests. vLLM is imported where they are called."""

from __future__ import annotations

from importlib import import_module
from inspect import signature
from typing import Any

from cutekernels.gpu import GpuSpec
from cutekernels.guests.block_fp8 import BlockFp8Linear
from cutekernels.guests.fused_moe import FusedMoe, FusedMoeConfig, FusedMoeProblem

_MOE = "vllm.model_executor.layers.fused_moe"


class VllmFusedMoe(FusedMoe):
    """``fused_experts`` of vLLM, with its ``override_config``."""

    distributions = ("vllm", "triton")

    def default(self, p: FusedMoeProblem, gpu: GpuSpec) -> FusedMoeConfig:
        """What vLLM runs where it finds no table, from its 0.17 on; before that it ran what SGLang runs."""
        if p.block_k:
            return FusedMoeConfig(16 if p.m <= 64 else 64, p.block_n, p.block_k, 1 if p.m <= 16 else 32, 4, 3)
        rows = next((rows for most, rows in ((32, 16), (96, 32), (512, 64)) if p.m <= most), 128)
        columns, step = (64, 128) if p.m <= 64 else (128, 64)
        band = 16 if p.m // p.experts > 128 else 1
        return FusedMoeConfig(rows, columns, step, band, 4 if p.m <= 128 else 8, 4 if p.m <= 32 else 3)

    def begin(self) -> None:
        import_module(f"{_MOE}.fused_moe")

    def call(self, p: FusedMoeProblem, c: FusedMoeConfig, *tensors: Any) -> None:
        fused_experts = import_module(f"{_MOE}.fused_moe").fused_experts
        out, x, w1, w2, weights, ids, s1, s2 = tensors
        with c.handed() as config, import_module(_MOE).override_config(config):
            out.copy_(fused_experts(x, w1, w2, weights, ids, **_quantization(p, fused_experts, s1, s2)))


def _quantization(p: FusedMoeProblem, fused_experts: Any, s1: Any, s2: Any) -> dict[str, Any]:
    """How this version's ``fused_experts`` is told about fp8: a config object, or flags in versions before 0.11."""
    import torch

    if not p.block_k:
        return {}
    shape = [p.block_n, p.block_k]
    if "quant_config" in signature(fused_experts).parameters:
        quant_config = import_module(f"{_MOE}.config").FusedMoEQuantConfig
        made = quant_config.make(torch.float8_e4m3fn, w1_scale=s1, w2_scale=s2, block_shape=shape)
        return {"quant_config": made}
    return {"use_fp8_w8a8": True, "w1_scale": s1, "w2_scale": s2, "block_shape": shape}


class VllmBlockFp8Linear(BlockFp8Linear):
    """vLLM's Triton product."""

    distributions = ("vllm", "triton")
    product = "vllm.model_executor.layers.quantization.utils.fp8_utils"
    renamed = "w8a8_triton_block_scaled_mm"


def fused_moe() -> FusedMoe:
    """``cutekernels.guests.vllm:fused_moe``."""
    return VllmFusedMoe()


def block_fp8_linear() -> BlockFp8Linear:
    """``cutekernels.guests.vllm:block_fp8_linear``."""
    return VllmBlockFp8Linear()
