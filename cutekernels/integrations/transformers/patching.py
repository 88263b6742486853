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
    experts,
    first_call,
    modules,
    projections,
    quantized,
    rules,
    shared_keys,
    structure,
    tensor_parallel,
    whole,
)
from cutekernels.integrations.transformers.families import FAMILIES, Family, family_of, is_listed, shared_parameters
from cutekernels.ops.shared.checks import check_flag, quote

_BEFORE = "_cutekernels_attention"  # the attribute of a patched model: the attention it had


@dataclass
class Report:
    """Report of :func:`patch`. Also its context manager: leaving the block takes the model off the kernels.

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


def patch(model: torch.nn.Module, *, unlisted: bool = True) -> Report:
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
        model: in fp16 or bf16 on a GPU, on the CPU of any type. Patch it before ``torch.compile``. Where it or a part
            of it is of a family of ``docs/transformers.md``, that is patched as the family's layers are known to be.
            Elsewhere norms, projections, MLPs, experts and rotary embeddings are found by structure, attention where
            transformers dispatches it by name, and the loss; each is compared with the model's own on random input,
            in training mode too, before it is replaced. What differs stays the model's own.
        unlisted: whether models of no such family are taken.

    Returns:
        A :class:`Report` of what was patched, and what was not and why.

    Raises:
        UnsupportedProblem: no module, a model that is patched already, or with ``unlisted=False`` one of no family.
        ImportError: transformers is not installed.
    """
    check_flag("patch", "unlisted", unlisted)
    if not isinstance(model, torch.nn.Module):
        raise UnsupportedProblem(f"patch takes a torch.nn.Module; got {quote(model)}: pass the model")
    known = is_listed(model)
    if not unlisted and not known:
        family_of(model, "patch", "leave unlisted=False away, and what structure tells is compared and patched")
    if is_patched(model):
        raise UnsupportedProblem("the model is patched already: call cutekernels.unpatch(model) first")
    report = Report(model)
    training = [module for module in model.modules() if module.training]
    try:
        rest: Any = model
        for module in training:  # where parametrizations change nothing by being read
            module.training = False
        parts = {"": rest} if known else _listed_parts(model)
        if known:  # in front of attention's hook, which is to be the last one of a text part alone
            first_call.watch(model)
        for path, part in parts.items():
            _patch_family(part, FAMILIES[part.config.model_type], report, path)
        if not known:
            _patch_structure(rest, report, {id(m) for part in parts.values() for m in part.modules()})
    except BaseException:
        unpatch(model)
        raise
    finally:
        for module in training:
            module.training = True
    return report


def _listed_parts(model: torch.nn.Module) -> dict[str, Any]:
    """Models of a family inside another one, by path; none inside another."""
    found = dict[str, Any]()
    for path, module in model.named_modules():
        if is_listed(module) and not any(path.startswith(f"{outer}.") for outer in found):
            found[path] = module
    return found


def _patch_family(model: Any, family: Family, report: Report, path: str) -> None:
    """:func:`patch` of a model, or of a part at ``path``, by its family's row."""
    attention.register_attention()
    roles = {cls: role for role, cls in family.classes().items()}
    mixins: dict[str, Any] = {
        "linear": modules.Linear,
        "norm": modules.LayerNorm if family.layer_norm else modules.Norm,
        "gated_norm": modules.GatedNorm,
        "mlp": modules.PlainMlp if not family.gated else modules.Mlp if family.joined_mlp else modules.PackedMlp,
        "attention": (
            shared_keys.SharedAttention
            if family.shares_keys
            else modules.Attention
            if family.joined_qkv
            else modules.PackedAttention
        ),
        "layer": (
            modules.SandwichLayer
            if family.norms[1] is not None
            else modules.ScaledLayer
            if family.multipliers
            else modules.Layer
        ),
        "experts": experts.Experts,
        "causal": modules.CausalLM,
    }
    if family.norms[2] is None:  # no residual is added in front of a norm: the layer's own forward is as good
        roles.pop(family.classes()["layer"])
    routers: list[Any] = [m for m in model.modules() if hasattr(m, "experts") and hasattr(m, "gate")]
    chosen = {id(m.experts): getattr(m.gate, "top_k", 1) for m in routers}
    usual = getattr(model.config, "top_k_experts", None) or 1  # Gemma 4's, whose routers do not say it
    packed = quantized.take(model, family)
    for name, module in model.named_modules(prefix=path):
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
            else rules.why_not(role, module, family, chosen.get(id(module), usual))
        )
        if reason:
            report.left.append((name, reason))
        if role is None or reason:
            continue
        mixin: Any = mixins[role]
        if role == "norm" and rules.is_bare(module):
            mixin = shared_keys.BareNorm
        if role == "linear" and tensor_parallel.is_sharded(module.weight):
            mixin = tensor_parallel.ShardedLinear
        _swap(module, role, (mixin, family), report)
        tensor_parallel.rebind(module)
    _pack(list(model.named_modules(prefix=path)), report)
    _route(model, family, report)
    for module in _bodies(model) if family.causal else ():
        attention.watch(module)


def _patch_structure(model: torch.nn.Module, report: Report, apart: set[int]) -> None:
    """:func:`patch` of what structure tells, in evaluation mode. ``apart``: ``id`` of modules patched by their row."""
    found = structure.find(model, apart)
    report.left += found.left
    for role, module, guess in found.replaced:
        _swap(module, role, guess, report)
    _pack([(path, module) for path, module in model.named_modules() if id(module) not in apart], report)
    owners = (m for m in model.modules() if hasattr(type(m), "set_attn_implementation"))
    owner: Any = next((m for m in owners if id(m) not in apart), None)
    if owner is None:
        report.left += [] if apart else [("attention", whole.NO_MODEL)]
        return
    body = whole.decoder_of(owner)
    if id(body) not in apart:
        attention.register_attention()
        compared = whole.attention_of(owner, body)
        if isinstance(compared, str):
            report.left.append(("attention", compared))
        else:
            report.patched["attention"] += compared[0]
            names = {id(m): path for path, m in model.named_modules()}
            report.left += [(f"{names[key]}'s core", reason) for key, reason in compared[1].items()]
            body.__dict__[_BEFORE] = body.config._attn_implementation
            body.set_attn_implementation(attention.NAME)
    if body is not owner:
        report.left.append(("attention of what is not text", "only that of tokens can be compared"))
    family = whole.loss_of(owner)
    if isinstance(family, str):
        report.left.append(("the loss", family))
    else:
        _swap(owner, "causal", (modules.CausalLM, family), report)


def _swap(module: Any, role: str, guess: tuple[Any, Family], report: Report) -> None:
    """Put a class of ours in front of a module's own."""
    original: Any = type(module)
    module.__class__ = modules.swapped(guess[0], original, guess[1])
    report.patched[role] += 1


def _pack(named: list[tuple[str, Any]], report: Report) -> None:
    """Move weights of one input side by side, where they can be."""
    shared = shared_parameters(report.model)
    for name, module in named:
        if isinstance(module, modules.Fused):
            if len(module.parts) < 2 or any(
                isinstance(getattr(module, part), quantized.Quantized) for part in module.parts
            ):
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
        raise UnsupportedProblem(
            f"unpatch takes a torch.nn.Module; got {quote(model)}: pass the model that was patched"
        )
    found: list[Any] = list(model.modules())  # Any: a patched module is of both its classes
    classes = {cls: modules.unswapped(cls) for cls in set(map(type, found))}  # raises before anything is changed
    for module in _bodies(model):
        attention.unwatch(module)
    for module in found:
        first_call.unwatch(module)
    for module in reversed(found):  # a model behind those inside it, so that its attention counts
        if isinstance(module, modules.Patched):
            if isinstance(module, quantized.Quantized):
                quantized.put_back(module)
            module.__class__ = classes[type(module)]
            tensor_parallel.rebind(module)
            for name in ("packed", "sources", "views", "shared"):
                module.__dict__.pop(name, None)
        quantized.give_back(module)
        module.__dict__.pop(attention.LEFT, None)
        before = module.__dict__.pop(_BEFORE, None)
        if before is not None:
            module.set_attn_implementation(before)
            for config in {id(m.config): m.config for m in module.modules() if hasattr(m, "config")}.values():
                if getattr(config, "_attn_implementation", None) == attention.NAME:  # of a layer copied while patched
                    config._attn_implementation = before
    for module in found:
        for name, value in list(module.__dict__.items()):  # what a wrapper has kept of a patched forward (accelerate's)
            of = getattr(getattr(value, "__func__", None), "__module__", None) or ""
            if of.rpartition(".")[0] == __package__ and hasattr(type(value.__self__), value.__name__):
                module.__dict__[name] = getattr(type(value.__self__), value.__name__).__get__(value.__self__)


def is_patched(model: torch.nn.Module) -> bool:
    return any(isinstance(module, modules.Patched) or _BEFORE in module.__dict__ for module in model.modules())


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
    dtype = quantized.compute_dtype(model)
    layers = [(name, module) for name, module in model.named_modules() if isinstance(module, modules.Attention)]
    reasons = [(name, module, rules.why_no_core(module, module.family, dtype)) for name, module in layers]
    left = [(name, module, rule) for name, module, rule in reasons if rule]
    windowed = any(family.window_of(module) is not None for _, module, _ in left)  # which masks then have not
    together = len(left) == len(layers) or windowed or config._attn_implementation not in ("sdpa", attention.NAME)
    if left and together:
        report.left += [(f"{name}'s core", rule) for name, _, rule in left[:1]]
        return
    for name, module, rule in left:
        report.left.append((f"{name}'s core", rule))
        module.__dict__[attention.LEFT] = True
    if config._attn_implementation != attention.NAME:
        model.__dict__[_BEFORE] = config._attn_implementation
        model.set_attn_implementation(attention.NAME)


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
