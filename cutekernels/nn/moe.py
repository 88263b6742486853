"""The sparse MLP of a transformer layer: router, experts, and experts that every token shares."""

from __future__ import annotations

from typing import Any, Literal, Self

import torch
from torch import Tensor

from cutekernels.errors import UnsupportedProblem
from cutekernels.nn.mlp import SwiGLU, plain, project
from cutekernels.nn.packed_experts import PackedExperts
from cutekernels.ops.moe.api import moe_route
from cutekernels.ops.moe.ffn import moe_ffn
from cutekernels.ops.products.epilogue import GATES, LIMIT
from cutekernels.ops.shared.checks import check_flag, check_number, check_place, check_tensor, check_whole, check_word
from cutekernels.quant import QuantizedStack, quantize, stack

_MOST_EXPERTS, _MOST_CHOSEN = 512, 32  # of moe_route
_REMEDY = "call the block itself"
SIGMOID = ("DeepseekV3MoE", "Glm4MoeMoE")
_BLOCKS = ("Qwen3MoeSparseMoeBlock", "MixtralSparseMoeBlock", *SIGMOID)


def route_by_sigmoid(
    scores: Tensor, correction: Tensor, top_k: int, *, renormalize: bool, scaling: float, groups: tuple[int, int]
) -> tuple[Tensor, Tensor]:
    """``(weights, ids)`` ``(..., top_k)`` of each token's experts, by the sigmoids of a router ``(..., E)``.

    ``correction`` ``(E,)`` takes part in the choice alone; the rest as of :class:`MoE`.
    """
    choice = (scores + correction).detach()
    of, among = groups
    if of > 1:
        grouped = choice.unflatten(-1, (of, -1))
        best = grouped.topk(2, dim=-1).values.sum(-1).topk(among, dim=-1, sorted=False).indices
        open_groups = torch.zeros_like(grouped[..., 0], dtype=torch.bool).scatter_(-1, best, True)
        choice = grouped.masked_fill(~open_groups.unsqueeze(-1), -torch.inf).flatten(-2)
    ids = choice.topk(top_k, dim=-1, sorted=False).indices
    weights = scores.gather(-1, ids)
    if renormalize:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return weights * scaling, ids


class MoE(torch.nn.Module):
    """A mixture of SwiGLU experts behind a router.

    The state dict matches transformers 5's ``Qwen3MoeSparseMoeBlock``, ``MixtralSparseMoeBlock`` and, with
    ``scoring="sigmoid"``, ``DeepseekV3MoE`` and ``Glm4MoeMoE``: ``gate.weight`` ``(E, H)``, ``experts.gate_up_proj``
    ``(E, 2 * I, H)``, ``experts.down_proj`` ``(E, H, I)``, ``gate.e_score_correction_bias`` and ``shared_experts.*``.

    Args:
        hidden_size: H, width of the input and of the result.
        intermediate_size: I, width of an expert.
        num_experts: E, up to 512.
        top_k: experts of a token, up to 32.
        scoring: ``"softmax"``, or ``"sigmoid"`` in fp32 with a correction bias that takes part in the choice alone.
        renormalize: whether a token's weights are divided by their sum.
        scaling: factor of the weights behind that; for ``"sigmoid"``.
        groups: (how many groups the experts form, how many of them a token may choose from); for ``"sigmoid"``.
        shared_size: width of the shared experts together; 0 for none.
        activation: of the experts: ``"swiglu_oai"`` is gpt-oss's clamped gate, with ``limit``.
        bias: of the router and the experts, as gpt-oss has them: ``gate.bias``, ``experts.gate_up_proj_bias`` and
            ``experts.down_proj_bias``.
        limit: of ``"swiglu_oai"``.
        device: of the parameters.
        dtype: of the parameters; kernels take fp16 and bf16, CPU tensors any.

    Shape: ``(..., H)`` to the same. Differentiable in the input and the parameters, once.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        num_experts: int,
        top_k: int,
        *,
        scoring: Literal["softmax", "sigmoid"] = "softmax",
        renormalize: bool = True,
        scaling: float = 1.0,
        groups: tuple[int, int] = (1, 1),
        shared_size: int = 0,
        activation: Literal["silu_mul", "swiglu_oai"] = "silu_mul",
        bias: bool = False,
        limit: float = LIMIT,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        sizes = {"hidden_size": hidden_size, "intermediate_size": intermediate_size, "num_experts": num_experts}
        for name, size in sizes.items():
            check_whole("MoE", name, size, 1, 2**31 - 1)
        check_whole("MoE", "num_experts", num_experts, 1, _MOST_EXPERTS)
        check_whole("MoE", "top_k", top_k, 1, min(num_experts, _MOST_CHOSEN))
        check_whole("MoE", "shared_size", shared_size, 0, 2**31 - 1)
        check_word("MoE", "scoring", scoring)
        check_flag("MoE", "renormalize", renormalize)
        check_flag("MoE", "bias", bias)
        check_word("MoE", "activation", activation)
        check_number("MoE", "limit", limit, 0.0)
        if activation not in GATES:
            raise UnsupportedProblem(f"MoE takes activation as {' or '.join(GATES)}; got {activation!r}: pass one")
        check_number("MoE", "scaling", scaling)
        if scoring not in ("softmax", "sigmoid"):
            raise UnsupportedProblem(f"MoE takes scoring as 'softmax' or 'sigmoid'; got {scoring!r}: pass one")
        if not (isinstance(groups, tuple | list) and len(groups) == 2):
            raise UnsupportedProblem(
                f"MoE takes groups as (how many, how many a token chooses from); got {groups!r}: pass (1, 1) for none"
            )
        check_place(dtype, device, optional=True)
        if scoring == "softmax" and (scaling != 1.0 or tuple(groups) != (1, 1)):
            raise UnsupportedProblem(
                f"MoE takes scaling={scaling} and groups={groups} with scoring='sigmoid' only: leave them out"
            )
        of, among = groups
        check_whole("MoE", "groups[0]", of, 1, num_experts)
        check_whole("MoE", "groups[1]", among, 1, of)
        if num_experts % of or top_k > num_experts // of * among or (of > 1 and num_experts // of < 2):
            raise UnsupportedProblem(
                f"MoE chooses {top_k} of {num_experts} experts in {among} of {of} groups: take groups that divide the "
                "experts into at least two each, and enough of them"
            )
        self.hidden_size, self.intermediate_size = hidden_size, intermediate_size
        self.num_experts, self.top_k = num_experts, top_k
        self.scoring, self.renormalize, self.scaling, self.groups = scoring, renormalize, scaling, (of, among)
        self.activation, self.limit = activation, limit
        kind: dict[str, Any] = {"device": device, "dtype": dtype}
        self.gate = torch.nn.Linear(hidden_size, num_experts, bias=bias, **kind)
        if scoring == "sigmoid":
            zeros = torch.zeros(num_experts, device=device, dtype=torch.float32)
            self.gate.register_buffer("e_score_correction_bias", zeros)
        self.experts: Any = _Experts(hidden_size, intermediate_size, num_experts, bias, **kind)
        self.shared_experts = SwiGLU(hidden_size, shared_size, **kind) if shared_size else None

    @classmethod
    def from_transformers(cls, block: Any) -> Self:
        """A module over the parameters of transformers' ``block``: the same tensors, those of shared experts copied.

        Raises:
            UnsupportedProblem: another block, experts of another activation, noise in the router.
        """
        name = type(block).__name__
        if name not in _BLOCKS:
            raise UnsupportedProblem(
                f"MoE.from_transformers takes {', '.join(_BLOCKS)}; got {name}: make an MoE and load its weights, or "
                f"{_REMEDY}"
            )
        made = cls.routed_part(block)
        if name in SIGMOID:
            width = block.shared_experts.down_proj.weight.shape[1]
            shared = SwiGLU(made.hidden_size, width, device="meta", dtype=block.gate.weight.dtype)
            shared.to_empty(device=block.gate.weight.device)
            shared.load_state_dict(block.shared_experts.state_dict())
            made.shared_experts = shared.train(block.training)
        return made

    @classmethod
    def routed_part(cls, block: Any) -> Self:
        """The same of any block that routes as one of these does, without the experts that its tokens share."""
        name = type(block).__name__
        if getattr(block, "jitter_noise", 0):
            raise UnsupportedProblem(
                f"MoE has no noise in its router; {name} has jitter_noise={block.jitter_noise}: set it to 0, or "
                f"{_REMEDY}"
            )
        names = ("gate_up_proj", "down_proj")
        if any(type(getattr(block.experts, n, None)) is not torch.nn.Parameter for n in names):
            raise UnsupportedProblem(
                f"MoE takes experts whose {' and '.join(names)} are plain parameters; {type(block.experts).__name__}'s "
                "are not: merge adapters, load without quantization"
            )
        activation = type(block.experts.act_fn).__name__
        if not activation.startswith("SiLU"):
            raise UnsupportedProblem(f"MoE's experts have the activation SiLU; {name} has {activation}: {_REMEDY}")
        sigmoid = name in SIGMOID
        experts, rows, hidden = block.experts.gate_up_proj.shape
        if experts > _MOST_EXPERTS or block.gate.top_k > _MOST_CHOSEN:
            raise UnsupportedProblem(
                f"MoE takes up to {_MOST_EXPERTS} experts, {_MOST_CHOSEN} of them for a token; {name} has {experts} "
                f"and {block.gate.top_k}: {_REMEDY}"
            )
        made = cls(
            hidden, rows // 2, experts, block.gate.top_k,
            scoring="sigmoid" if sigmoid else "softmax",
            renormalize=bool(getattr(block.gate, "norm_topk_prob", True)),
            scaling=float(block.gate.routed_scaling_factor) if sigmoid else 1.0,
            groups=(block.gate.num_group, block.gate.topk_group) if sigmoid else (1, 1),
            device="meta", dtype=block.experts.gate_up_proj.dtype,
        )  # fmt: skip
        made.gate.weight = block.gate.weight
        made.experts.gate_up_proj, made.experts.down_proj = block.experts.gate_up_proj, block.experts.down_proj
        if sigmoid:
            made.gate.e_score_correction_bias = block.gate.e_score_correction_bias
        return made.train(block.training)

    @torch.no_grad()
    def pack_experts(self, gate_up: QuantizedStack | str = "int4_g128", down: QuantizedStack | None = None) -> Self:
        """Puts packed experts in the place of the parameters, which are then no longer trained.

        Args:
            gate_up: ``(E, 2 * I, H)``, gate's rows before up's: of a reader of ``cutekernels.quant``; or a scheme of
                :func:`cutekernels.quant.quantize`, to which the module's own experts are rounded.
            down: ``(E, H, I)``, beside a stack.

        Raises:
            UnsupportedProblem: stacks of other sizes, sizes that are no multiples of 64, a scheme beside a stack.
        """
        own = self.experts
        if isinstance(gate_up, str):
            if down is not None or not isinstance(own, _Experts):
                raise UnsupportedProblem(
                    "pack_experts rounds parameters to a scheme, or takes two stacks; got a scheme and a stack, or "
                    "experts that are packed already: pass both stacks"
                )
            scheme = gate_up
            gate_up, down = (
                stack([quantize(w, scheme) for w in p.detach()]) for p in (own.gate_up_proj, own.down_proj)
            )
        packed = PackedExperts(gate_up, down)  # type: ignore[arg-type]  # which refuses None
        expected = self.num_experts, 2 * self.intermediate_size, self.hidden_size
        if packed.gate_up_proj.shape != expected:
            raise UnsupportedProblem(f"this MoE has gate_up_proj {expected}; got {packed.gate_up_proj.shape}")
        for name in ("gate_up_proj_bias", "down_proj_bias"):
            if (bias := getattr(own, name, None)) is not None:
                packed.register_parameter(name, bias)
        self.experts = packed
        return self

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """``(weights, ids)`` of each token's experts, ``(..., top_k)``."""
        if self.scoring == "softmax":
            logits = project(x, self.gate.weight, self.gate.bias, name="MoE") if plain(self.gate) else self.gate(x)
            return moe_route(logits, self.top_k, renormalize=self.renormalize)
        wide = torch.promote_types(x.dtype, torch.float32)
        correction: Any
        if plain(self.gate):
            bias = None if self.gate.bias is None else self.gate.bias.to(wide)
            scores = torch.nn.functional.linear(x.to(wide), self.gate.weight.to(wide), bias).sigmoid()
            correction = self.gate.e_score_correction_bias
        else:  # its hooks too, or an adapter's in front of it
            parameters = {name: p.to(wide) for name, p in self.gate.named_parameters()}
            scores = torch.func.functional_call(self.gate, parameters, (x.to(wide),)).sigmoid()
            (correction,) = (b for name, b in self.gate.named_buffers() if name.endswith("e_score_correction_bias"))
        return route_by_sigmoid(
            scores, correction, self.top_k, renormalize=self.renormalize, scaling=self.scaling, groups=self.groups
        )

    def forward(self, x: Tensor) -> Tensor:
        check_tensor("MoE", "x", x)
        if x.dim() == 0 or x.shape[-1] != self.hidden_size:
            raise UnsupportedProblem(
                f"MoE takes x (..., {self.hidden_size}), its hidden_size; got {tuple(x.shape)}: project it first"
            )
        weights, ids = self.route(x)
        experts = self.experts
        out = moe_ffn(
            x, experts.gate_up_proj, experts.down_proj, ids, weights,
            gate_up_bias=getattr(experts, "gate_up_proj_bias", None),
            down_bias=getattr(experts, "down_proj_bias", None), activation=self.activation, limit=self.limit,
        )  # fmt: skip
        return out if self.shared_experts is None else out + self.shared_experts(x)

    def extra_repr(self) -> str:
        sizes = f"{self.hidden_size}, {self.intermediate_size}, num_experts={self.num_experts}, top_k={self.top_k}"
        return f"{sizes}, scoring={self.scoring!r}, renormalize={self.renormalize}"


class _Experts(torch.nn.Module):
    """The experts' matrices under the names they are saved by."""

    def __init__(self, hidden: int, intermediate: int, experts: int, bias: bool, **kind: Any) -> None:
        super().__init__()
        self.gate_up_proj = torch.nn.Parameter(torch.empty((experts, 2 * intermediate, hidden), **kind))
        self.down_proj = torch.nn.Parameter(torch.empty((experts, hidden, intermediate), **kind))
        for weight in [*self.parameters()]:
            torch.nn.init.uniform_(weight, -(weight.shape[-1] ** -0.5), weight.shape[-1] ** -0.5)  # as nn.Linear
        if bias:
            self.gate_up_proj_bias = torch.nn.Parameter(torch.zeros((experts, 2 * intermediate), **kind))
            self.down_proj_bias = torch.nn.Parameter(torch.zeros((experts, hidden), **kind))
