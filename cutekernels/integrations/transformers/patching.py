"""``patch`` and ``unpatch``: a transformers model onto our kernels, and off them again."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch

from cutekernels.errors import UnsupportedProblem
from cutekernels.integrations.transformers import (
    attention,
    checkpoints,
    modules,
    projections,
    quantized,
    rules,
    structure,
    tensor_parallel,
)
from cutekernels.integrations.transformers.families import Family, family_of, is_listed, shared_parameters
from cutekernels.ops.shared.checks import check_flag, said

_BEFORE = "_cutekernels_attention"  # the attribute of a patched model: the attention it had


@dataclass
class Report:
    """What :func:`patch` did. Also its context manager: leaving the block takes the model off the kernels.

    Attributes:
        model: the patched model.
        patched: patched modules, by kind.
        fused: modules whose projections are one product where no gradient of the weights is taken.
        left: ``(module, reason)`` of what stayed as it was.
    """

    model: torch.nn.Module
    patched: Counter[str] = field(default_factory=Counter)
    fused: Counter[str] = field(default_factory=Counter)
    left: list[tuple[str, str]] = field(default_factory=list)

    def __enter__(self) -> Report:
        return self

    def __exit__(self, *error: object) -> None:
        unpatch(self.model)

    def __str__(self) -> str:
        lines = [
            f"{kind}: {n} patched" + (f", {f} fused" if (f := self.fused[kind]) else "")
            for kind, n in self.patched.items()
        ]
        reasons: dict[str, list[str]] = {}
        for name, reason in self.left:
            reasons.setdefault(reason, []).append(name)
        lines += [f"left as they were, since {why}: {_some(names)}" for why, names in reasons.items()]
        return "\n".join(lines)


def patch(model: torch.nn.Module, *, unlisted: bool = False) -> Report:
    """Put a transformers model's norms, projections, MLPs, rotary embeddings and attention onto our kernels.

    ::

        with ck.patch(model) as report:
            model.generate(**inputs)
        print(report)

    Outside a ``with`` the model stays patched until :func:`unpatch`. Parameters keep their names, values and identity:
    state dicts, optimizers and PEFT adapters are not touched. Weights that multiply one input (q, k and v; gate and
    up) are moved side by side in memory, and multiplied as one where no gradient of them is taken. They move once,
    here, and stay there: :func:`unpatch` and a second patch move nothing. A CUDA graph captured before the move reads
    memory that is freed, so capture after it. Modules keep their hooks; those with hooks on their projections or
    adapters keep their own projections.

    Quantized projections are packed anew, if their layout is read, and multiplied without decoding the whole weight;
    activations stay in 16 bits. The largest of their own tensors is then not in memory; state dicts have it, and
    :func:`unpatch` puts it back, bit for bit. A weight that is replaced meanwhile (PEFT's merge) is packed at the next
    call.

    Args:
        model: of Llama, Mistral, Mixtral, Qwen2, Qwen2-MoE, Qwen3, Qwen3-MoE, Phi-3, Phi-4, Granite, OLMo2,
            SmolLM3, Starcoder2, GLM4, Cohere2, gpt-oss, DeepSeek-V2, Gemma 2, or the text part of Gemma 3 or
            Qwen2.5-VL, in fp16 or bf16 on a GPU, on the CPU of any type. Patch it before ``torch.compile``.
        unlisted: take any other model too: its norms, projections, MLPs and rotary embeddings are found by structure,
            and each is compared with its own forward on random input before it is replaced. Attention, and whatever
            differs, stays the model's own. In evaluation mode, which training may follow.

    Returns:
        A :class:`Report` of what was patched, and what was not and why.

    Raises:
        UnsupportedProblem: another architecture, or a model that is patched already; with ``unlisted`` what is no
            module, or in training mode.
        ImportError: transformers is not installed.
    """
    check_flag("patch", "unlisted", unlisted)
    if unlisted and not is_listed(model):
        return _patch_unlisted(model)
    family = family_of(
        model,
        "patch",
        "run its attention here by cutekernels.register_attention() and "
        'model.set_attn_implementation("cutekernels"), its experts by register_experts() and '
        'set_experts_implementation("cutekernels"), let cutekernels.patch(model, unlisted=True) find what it can, or '
        "replace its layers by cutekernels.nn modules",
    )
    _refuse_patched(model)
    attention.register_attention()
    roles = {cls: role for role, cls in family.classes().items()}
    mixins: dict[str, Any] = {
        "linear": modules.Linear,
        "norm": modules.LayerNorm if family.layer_norm else modules.Norm,
        "mlp": modules.PlainMlp if not family.gated else modules.Mlp if family.joined_mlp else modules.PackedMlp,
        "attention": modules.Attention if family.joined_qkv else modules.PackedAttention,
        "layer": (
            modules.SandwichLayer
            if family.norms[1] is not None
            else modules.ScaledLayer
            if family.multipliers
            else modules.Layer
        ),
        "experts": modules.Experts,
        "causal": modules.CausalLM,
    }
    if family.norms[2] is None:  # no residual is added in front of a norm: the layer's own forward is as good
        roles.pop(family.classes()["layer"])
    report = Report(model)
    routers: list[Any] = [m for m in model.modules() if hasattr(m, "experts") and hasattr(m, "gate")]
    chosen = {id(m.experts): getattr(m.gate, "top_k", 1) for m in routers}
    try:
        packed = quantized.take(model, family)
        for name, module in model.named_modules():
            left = packed.get(id(module))
            if left:
                report.left.append((name, left))
            elif left is not None:
                report.patched["quantized"] += 1
            if left is not None:
                continue
            role = "linear" if type(module) is torch.nn.Linear else roles.get(type(module))
            reason = (
                checkpoints.why_left(module)
                if role in ("linear", None) and checkpoints.is_quantized(module)
                else _other(module)
                if role is None
                else rules.why_not(role, module, family, chosen.get(id(module), 1))
            )
            if reason:
                report.left.append((name, reason))
            if role is None or reason:
                continue
            mixin: Any = mixins[role]
            if role == "linear" and tensor_parallel.is_sharded(module.weight):
                mixin = tensor_parallel.ShardedLinear
            original: Any = type(module)
            module.__class__ = modules.swapped(mixin, original, family)
            tensor_parallel.rebind(module)
            report.patched[role] += 1
        _pack(model, report)
        _route(model, family, report)
        for module in _bodies(model) if family.causal else ():
            attention.watch(module)
    except BaseException:
        unpatch(model)
        raise
    return report


def _patch_unlisted(model: Any) -> Report:
    """:func:`patch` of what structure tells."""
    if not isinstance(model, torch.nn.Module):
        raise UnsupportedProblem(f"patch takes a torch.nn.Module; got {said(model)}: pass the model")
    _refuse_patched(model)
    if any(module.training for module in model.modules()):
        raise UnsupportedProblem(
            "patch(unlisted=True) compares modules in evaluation mode, and this model is in training mode: call "
            "model.eval() first, and model.train() behind it"
        )
    found = structure.find(model)
    report = Report(model, left=found.left)
    try:
        for role, module, (mixin, family) in found.replaced:
            original: Any = type(module)
            module.__class__ = modules.swapped(mixin, original, family)
            report.patched[role] += 1
        _pack(model, report)
    except BaseException:
        unpatch(model)
        raise
    return report


def _refuse_patched(model: Any) -> None:
    if is_patched(model):
        raise UnsupportedProblem("the model is patched already: call cutekernels.unpatch(model) first")


def _pack(model: torch.nn.Module, report: Report) -> None:
    """Move weights of one input side by side, where they can be."""
    shared = shared_parameters(model)
    for name, module in model.named_modules():
        if isinstance(module, modules.Fused):
            if any(isinstance(getattr(module, part), quantized.Quantized) for part in module.parts):
                continue  # each a product of its own
            own = [p for part in module.parts for p in getattr(module, part).parameters()]
            module.shared = any(id(p) in shared for p in own)
            reason = module.pack()
            if reason:
                report.left.append((f"{name}.{'/'.join(module.parts)}", reason))
            else:
                report.fused["attention" if isinstance(module, modules.Attention) else "mlp"] += 1


def unpatch(model: torch.nn.Module) -> None:
    """Undo :func:`patch`: every module has its class and attention again. No-op where nothing is patched.

    Weights that :func:`patch` moved side by side stay there, as a second :func:`patch` or a ``Decoder`` wants them.

    Args:
        model: the patched model, or what holds it: PEFT's model, a compiled one, any module.

    Raises:
        UnsupportedProblem: ``model`` is no module, or a class with ``super()`` in its methods was put in front of a
            patched one. Nothing is changed then.
    """
    if not isinstance(model, torch.nn.Module):
        raise UnsupportedProblem(f"unpatch takes a torch.nn.Module; got {said(model)}: pass the model that was patched")
    found: list[Any] = list(model.modules())  # Any: a patched module is of both its classes
    classes = {cls: modules.unswapped(cls) for cls in set(map(type, found))}  # raises before anything is changed
    for module in _bodies(model):
        attention.unwatch(module)
    for module in reversed(found):  # a model behind those inside it, so that its attention counts
        if isinstance(module, modules.Patched):
            if isinstance(module, quantized.Quantized):
                quantized.put_back(module)
            module.__class__ = classes[type(module)]
            tensor_parallel.rebind(module)
            for name in ("packed", "sources", "views", "shared"):
                module.__dict__.pop(name, None)
            for name, value in module.__dict__.items():  # what a wrapper has kept of the patched forward (accelerate's)
                of = getattr(getattr(value, "__func__", None), "__module__", None) or ""
                if of.rpartition(".")[0] == __package__:
                    module.__dict__[name] = getattr(module.__class__, value.__name__).__get__(module)
        quantized.give_back(module)
        before = module.__dict__.pop(_BEFORE, None)
        if before is not None:
            module.set_attn_implementation(before)


def is_patched(model: torch.nn.Module) -> bool:
    return any(isinstance(module, modules.Patched) for module in model.modules())


def _other(module: Any) -> str:
    """The reason to leave a projection that is no ``torch.nn.Linear``, nor an adapter around one; "" for any other."""
    if not hasattr(module, "in_features") or any(type(x) is torch.nn.Linear for x in module.modules()):
        return ""
    return f"it is no torch.nn.Linear but a {projections.kind_of(type(module))}"


def _bodies(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The text parts in ``model``: what has layers between an embedding and a last norm."""
    return [m for m in model.modules() if hasattr(m, "embed_tokens") and hasattr(m, "layers") and hasattr(m, "norm")]


def _route(model: Any, family: Family, report: Report) -> None:
    """Attention by name, where the model's options allow it."""
    if family.attention_left:
        report.left.append(("attention", family.attention_left))
        return
    model = next((m for m in model.modules() if hasattr(type(m), "set_attn_implementation")), model)  # in a wrapper
    config = model.config
    for rule, broken in (
        ("attention_dropout is not 0", getattr(config, "attention_dropout", 0.0)),
        ("config asks for output_attentions", getattr(config, "output_attentions", False)),
    ):
        if broken:
            report.left.append(("attention's core", rule))
            return
    dtype = quantized.computed(model)
    for name, module in model.named_modules():
        rule = rules.why_no_core(module, module.family, dtype) if isinstance(module, modules.Attention) else ""
        if rule:
            report.left.append((f"{name}'s core", rule))
            return
    if config._attn_implementation != attention.NAME:
        model.__dict__[_BEFORE] = config._attn_implementation
        model.set_attn_implementation(attention.NAME)


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
