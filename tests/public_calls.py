"""One valid call on the CPU of each public function and module, its arguments by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import cutekernels as ck
from cutekernels import nn, optim
from cutekernels.ops.kv_append.api import kv_append


def _randn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=dtype)


def _ints(*values: int, shape: tuple[int, ...] | None = None) -> Tensor:
    made = torch.tensor(values, dtype=torch.int32)
    return made if shape is None else made.view(shape)


Made = tuple[Callable[..., Any], dict[str, Any]]


def calls() -> dict[str, Made]:
    """``(function, arguments)`` by name. Every argument that a caller may give is there."""
    x, w = _randn(4, 8), _randn(8)
    square, heads = _randn(8, 8), _randn(2, 3, 4, 8)
    cos, sin = _randn(16, 4), _randn(16, 4)
    norm = {"eps": 1e-6, "weight_offset": 0.0, "rounding": "once"}
    moments = {"param": x.clone(), "grad": x.clone(), "exp_avg": x * 0, "exp_avg_sq": x * 0}
    inverse = _ints(0, 2, 4, 6, 1, 3, 5, 7, shape=(4, 2))
    caches = {"k_cache": _randn(2, 16, 2, 8), "v_cache": _randn(2, 16, 2, 8)}
    fp8 = {name: _randn(2, 16, 2, 16).to(torch.float8_e4m3fn) for name in caches} | {
        name: torch.ones(2) for name in ("k_scale", "v_scale")
    }
    of_tokens = fp8 | {name: torch.full((2, 2, 16), 127, dtype=torch.uint8) for name in ("k_scale", "v_scale")}
    # fmt: off
    return {
        "gemm": (ck.gemm, {
            "a": x, "b": square, "c": _randn(4, 8), "alpha": 1.0, "beta": 0.5, "bias": w, "activation": "relu",
            "accumulate": "fp32", "out": _randn(4, 8)}),
        "linear": (ck.linear, {"x": x, "weight": square, "bias": w, "activation": "silu", "out": _randn(4, 8)}),
        "rms_norm_linear": (ck.rms_norm_linear, {
            "x": x, "norm_weight": w, "weight": square, "bias": w.clone(), "eps": 1e-6, "residual": _randn(4, 8),
            "activation": None, "exact": False}),
        "rms_norm_linear, fused": (ck.rms_norm_linear, {
            "x": x, "norm_weight": w, "weight": square, "bias": w.clone(), "eps": 1e-6, "rstd": _randn(4).abs(),
            "activation": None, "out": _randn(4, 8)}),
        "linear_silu_mul": (ck.linear_silu_mul, {
            "x": x, "w_gate_up": square, "norm_weight": w, "eps": 1e-6, "norm": True, "out": _randn(4, 4)}),
        "fold": (ck.fold, {"norm_weight": w, "weight": square}),
        "rms_norm": (ck.rms_norm, {"x": x, "weight": w, **norm, "out": _randn(4, 8)}),
        "add_rms_norm": (ck.add_rms_norm, {"x": x, "residual": _randn(4, 8), "weight": w, **norm}),
        "layer_norm": (ck.layer_norm, {"x": x, "weight": w, "bias": w.clone(), "eps": 1e-5}),
        "silu_mul": (ck.silu_mul, {"gate": x, "up": _randn(4, 8), "out": _randn(4, 8)}),
        "silu_mul, packed": (ck.silu_mul, {"gate": x}),
        "gelu_mul": (ck.gelu_mul, {"gate": x, "up": _randn(4, 8), "approximate": "tanh", "out": _randn(4, 8)}),
        "bias_gelu": (ck.bias_gelu, {"x": x, "bias": w, "approximate": "none", "out": _randn(4, 8)}),
        "embedding": (ck.embedding, {"ids": _ints(1, 2), "table": square}),
        "linear_cross_entropy": (ck.linear_cross_entropy, {
            "x": x, "weight": _randn(6, 8), "targets": _ints(1, 0, 5, -100), "bias": _randn(6), "reduction": "mean",
            "ignore_index": -100, "label_smoothing": 0.1, "z_loss": 0.01, "softcap": 3.0, "temperature": 0.5,
            "class_weight": _randn(6).abs(), "num_items_in_batch": 4, "accumulate": torch.float32}),
        "linear_logprob": (ck.linear_logprob, {
            "x": x, "weight": _randn(6, 8), "targets": _ints(1, 0, 5, -100), "bias": _randn(6), "temperature": 0.5,
            "softcap": 3.0, "ignore_index": -100, "entropy": True}),
        "linear_logprob_shard": (ck.linear_logprob_shard, {
            "x": x, "weight": _randn(6, 8), "targets": _ints(1, 0, 9, -100), "first": 3, "bias": _randn(6),
            "temperature": 0.5, "softcap": 3.0, "ignore_index": -100}),
        "moe_route": (ck.moe_route, {"logits": x, "top_k": 2, "renormalize": True}),
        "moe_permute": (ck.moe_permute, {"ids": inverse % 3, "num_experts": 3}),
        "moe_ffn": (ck.moe_ffn, {
            "x": x, "w_gate_up": _randn(2, 6, 8), "w_down": _randn(2, 8, 3), "ids": inverse % 2,
            "weights": _randn(4, 2), "gate_up_bias": _randn(2, 6), "down_bias": _randn(2, 8)}),
        "grouped_gemm": (ck.grouped_gemm, {
            "x": x, "weight": _randn(2, 8, x.shape[1]), "offsets": _ints(0, 3, 4), "bias": _randn(2, 8),
            "activation": "silu"}),
        "moe_gather": (ck.moe_gather, {"x": x, "inverse": inverse}),
        "moe_combine": (ck.moe_combine, {"rows": _randn(8, 8), "inverse": inverse, "weights": _randn(4, 2)}),
        "rope": (ck.rope, {
            "q": heads, "k": heads.clone(), "cos": cos, "sin": sin, "interleaved": False, "positions": 3,
            "inplace": False}),
        "rope, positions": (ck.rope, {
            "q": heads, "k": heads.clone(), "cos": cos, "sin": sin, "positions": _ints(1, 2)}),
        "sample_filter": (ck.sample_filter, {
            "logits": x, "temperature": 0.5, "top_k": 2, "top_p": 0.9, "min_p": 0.1}),
        "sample_filter, rows": (ck.sample_filter, {
            "logits": x, "temperature": _randn(4).abs(), "top_k": _ints(1, 2, 3, 4), "top_p": _randn(4).sigmoid(),
            "min_p": _randn(4).sigmoid()}),
        "adamw_step": (ck.adamw_step, {
            **moments, "step": 1, "lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1,
            "maximize": False}),
        "adamw_step, half": (ck.adamw_step, {
            **moments, "param": x.bfloat16(), "grad": x.bfloat16(), "master": x.clone(), "step": torch.ones(()),
            "lr": torch.ones(())}),
        "attention": (ck.attention, {
            "q": heads, "k": _randn(2, 5, 2, 8), "v": _randn(2, 5, 2, 8), "causal": True, "scale": 0.5,
            "sinks": _randn(4)}),
        "decode_attention": (ck.decode_attention, {
            "q": _randn(2, 4, 8), **caches, "cache_seqlens": _ints(3, 4), "scale": 0.5, "sinks": _randn(4)}),
        "decode_attention in FP8": (ck.decode_attention, {
            "q": _randn(2, 4, 16), **fp8, "cache_seqlens": _ints(3, 4)}),
        "decode_attention in FP8, scales of tokens": (ck.decode_attention, {
            "q": _randn(2, 4, 16), **of_tokens, "cache_seqlens": _ints(3, 4)}),
        "kv_append in FP8": (kv_append, {
            "k": _randn(2, 1, 2, 16), "v": _randn(2, 1, 2, 16), **of_tokens, "state": torch.zeros(3, 2).int()}),
        "kv_append": (kv_append, {
            "k": _randn(2, 1, 2, 8), "v": _randn(2, 1, 2, 8), **caches, "state": torch.zeros(3, 2).int()}),
        "LinearCrossEntropy": (nn.LinearCrossEntropy, {"in_features": 8, "out_features": 6, "bias": True}),
        "LinearCrossEntropy.forward": (nn.LinearCrossEntropy(8, 6), {
            "x": x, "targets": _ints(1, 0, 5, -100), "class_weight": _randn(6).abs(), "num_items_in_batch": 4}),
        "SwiGLU": (nn.SwiGLU, {"hidden_size": 8, "intermediate_size": 4, "bias": True}),
        "RMSNorm": (nn.RMSNorm, {
            "hidden_size": 8, "eps": 1e-6, "heads": 2, "weight_offset": 0.0, "rounding": "once",
            "elementwise_affine": True}),
        "RotaryEmbedding": (nn.RotaryEmbedding, {
            "head_dim": 8, "rope_theta": 1e4, "partial_rotary_factor": 1.0, "max_positions": 64, "interleaved": False,
            "rope_scaling": {
                "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32}}),
        "FusedAdamW": (optim.FusedAdamW, {
            "params": [torch.nn.Parameter(x.clone())], "lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8,
            "weight_decay": 0.1, "maximize": False, "master_weights": False}),
        "SwiGLU.forward": (nn.SwiGLU(8, 4), {"x": x}),
        "RMSNorm.forward": (nn.RMSNorm(8), {"x": x, "residual": _randn(4, 8)}),
        "LayerNorm.forward": (nn.LayerNorm((4, 8)), {"x": _randn(3, 4, 8)}),
        "RotaryEmbedding.forward": (nn.RotaryEmbedding(8), {
            "q": heads, "k": heads.clone(), "positions": 3, "inplace": False}),
    }
    # fmt: on
