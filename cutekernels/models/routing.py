"""Experts and their routers, as ``config.json`` has them in each family."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

from cutekernels.errors import UnsupportedProblem
from cutekernels.ops.shared.checks import check_number, check_whole, quote

MOST, MOST_LAYERS = 2**31 - 1, 2000


@dataclass(frozen=True)
class Sigmoids:
    """A router that adds a correction to sigmoids: the factor of its weights, groups of experts as of ``nn.MoE``."""

    scaling: float
    groups: tuple[int, int]


@dataclass(frozen=True)
class Routed:
    """A mixture of experts, as ``config.json`` has it.

    Attributes:
        experts: how many.
        top_k: of a token.
        width: of an expert.
        renormalize: whether a token's weights are divided by their sum.
        activation: of ``moe_ffn``.
        limit: of a clamped gate.
        sigmoid: of a router of sigmoids; None for a softmax.
        shared: width of the experts that every token has, together; 0 for none.
        first: the first layer with experts; those in front of it have one MLP.
    """

    experts: int
    top_k: int
    width: int
    renormalize: bool
    activation: Literal["silu_mul", "swiglu_oai"] = "silu_mul"
    limit: float = 7.0
    sigmoid: Sigmoids | None = None
    shared: int = 0
    first: int = 0


def _router(raw: dict[str, Any], width: str, count: str = "") -> Routed:
    """``count``: the key of how many experts there are, where it is none of the common ones."""
    experts: int = raw[count] if count else raw.get("num_local_experts", raw.get("num_experts", 0))
    check_whole("config.json", count or "num_experts", experts, 1, 512)
    check_whole("config.json", "num_experts_per_tok", raw["num_experts_per_tok"], 1, min(experts, 32))
    check_whole("config.json", width, raw.get(width), 1, MOST)
    return Routed(experts, raw["num_experts_per_tok"], raw[width], bool(raw.get("norm_topk_prob", True)))


def mixtral(raw: dict[str, Any]) -> Routed:
    if raw.get("router_jitter_noise"):
        raise UnsupportedProblem("experts have no noise in their router; set router_jitter_noise of config.json to 0")
    return _silu(raw, _router(raw, "intermediate_size"))


def qwen3_moe(raw: dict[str, Any]) -> Routed:
    if raw["decoder_sparse_step"] != 1 or raw["mlp_only_layers"]:
        raise UnsupportedProblem(
            "load takes experts in every layer; config.json has decoder_sparse_step or mlp_only_layers: load it with "
            "transformers, and pass the model to Decoder.from_transformers"
        )
    return _silu(raw, _router(raw, "moe_intermediate_size"))


def glm4_moe(raw: dict[str, Any]) -> Routed:
    routed = _silu(raw, _router(raw, "moe_intermediate_size", "n_routed_experts"))
    for name, least, most in (
        ("n_shared_experts", 1, 2**15),
        ("first_k_dense_replace", 0, MOST_LAYERS),
        ("num_nextn_predict_layers", 0, MOST_LAYERS),
        ("n_group", 1, routed.experts),
        ("topk_group", 1, raw["n_group"]),
    ):
        check_whole("config.json", name, raw[name], least, most)
    check_number("config.json", "routed_scaling_factor", raw["routed_scaling_factor"])
    each, rest = divmod(routed.experts, raw["n_group"])
    if rest or each < 2 or routed.top_k > each * raw["topk_group"]:
        raise UnsupportedProblem(
            f"a token's {routed.top_k} of {routed.experts} experts are in topk_group={raw['topk_group']} of n_group="
            f"{raw['n_group']} groups of two experts or more; config.json has other numbers: mend it"
        )
    return replace(
        routed, sigmoid=Sigmoids(float(raw["routed_scaling_factor"]), (raw["n_group"], raw["topk_group"])),
        shared=raw["moe_intermediate_size"] * raw["n_shared_experts"], first=raw["first_k_dense_replace"],
    )  # fmt: skip


def _silu(raw: dict[str, Any], routed: Routed) -> Routed:
    if raw["hidden_act"] not in ("silu", "swish"):
        raise UnsupportedProblem(f"experts have the gate of SiLU; config.json has {quote(raw['hidden_act'])}")
    return routed


def gpt_oss(raw: dict[str, Any]) -> Routed:
    check_number("config.json", "swiglu_limit", raw["swiglu_limit"], 0.0)
    return replace(
        _silu(raw, _router(raw, "intermediate_size")), renormalize=True, activation="swiglu_oai",
        limit=float(raw["swiglu_limit"]),
    )  # fmt: skip
