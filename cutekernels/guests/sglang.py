"""SGLang's fused MoE and block FP8 product as guests. SGLang is imported where they are called."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from importlib import import_module
from inspect import signature
from typing import Any

from cutekernels.errors import CompileError
from cutekernels.gpu import GpuSpec
from cutekernels.guests.block_fp8 import BlockFp8Linear, BlockFp8Problem
from cutekernels.guests.fused_moe import FusedMoe, FusedMoeConfig, FusedMoeProblem

_LAYERS = "sglang.srt.layers"
_HOMES = (f"{_LAYERS}.moe.moe_runner.triton_utils", f"{_LAYERS}.moe.fused_moe_triton")  # of the MoE, the newest first


class SglangFusedMoe(FusedMoe):
    """``fused_experts`` of SGLang, with its ``override_config``."""

    distributions = ("sglang", "triton")

    def begin(self) -> None:
        import_module(f"{_home()}.fused_moe")
        _serving()

    def call(self, p: FusedMoeProblem, c: FusedMoeConfig, *tensors: Any) -> None:
        home = _home()
        fused_experts = import_module(f"{home}.fused_moe").fused_experts
        out, x, w1, w2, weights, ids, s1, s2 = tensors
        more: dict[str, Any] = {}
        if "moe_runner_config" in signature(fused_experts).parameters:
            more["moe_runner_config"] = import_module(f"{_LAYERS}.moe.moe_runner").MoeRunnerConfig(inplace=False)
        if p.block_k:
            more |= {"use_fp8_w8a8": True, "w1_scale": s1, "w2_scale": s2, "block_shape": [p.block_n, p.block_k]}
        routed = import_module(f"{_LAYERS}.moe.topk").StandardTopKOutput(weights, ids, weights)
        with c.handed() as config, import_module(home).override_config(config):
            out.copy_(fused_experts(x, w1, w2, routed, **more))


def _home() -> str:
    """The package of the fused MoE in the SGLang that is installed."""
    reasons = []
    for home in _HOMES:
        try:
            if hasattr(import_module(home), "override_config"):
                return home
            reasons.append(f"{home} has no override_config")
        except ModuleNotFoundError as error:  # of the home, or of what it imports
            reasons.append(f"{home}: {error}")
    raise CompileError(f"no fused MoE is where SGLang keeps it: {'; '.join(reasons)}")


@cache
def _serving() -> None:
    """Server arguments, which newer versions read at each call and which only a server has."""
    args = import_module("sglang.srt.server_args")
    if hasattr(args, "set_global_server_args_for_scheduler"):
        args.set_global_server_args_for_scheduler(args.ServerArgs(model_path="dummy"))


class SglangBlockFp8Linear(BlockFp8Linear):
    """SGLang's Triton product."""

    distributions = ("sglang", "triton")
    product = f"{_LAYERS}.quantization.fp8_kernel"
    renamed = "w8a8_block_fp8_matmul_triton"

    def default(self, p: BlockFp8Problem, gpu: GpuSpec) -> FusedMoeConfig:
        """What SGLang runs where it finds no table: a stage more than vLLM."""
        return replace(super().default(p, gpu), num_stages=3)


def fused_moe() -> FusedMoe:
    """``cutekernels.guests.sglang:fused_moe``."""
    return SglangFusedMoe()


def block_fp8_linear() -> BlockFp8Linear:
    """``cutekernels.guests.sglang:block_fp8_linear``."""
    return SglangBlockFp8Linear()
