"""``compare``: how far a model's results are from fp32, patched and plain."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from cutekernels.errors import UnsupportedProblem
from cutekernels.integrations.transformers import checkpoints
from cutekernels.integrations.transformers.families import by_part, is_whole
from cutekernels.integrations.transformers.patching import is_patched, patch, unpatch
from cutekernels.integrations.transformers.quantized import decoded
from cutekernels.integrations.transformers.tensor_parallel import is_planned
from cutekernels.ops.shared.checks import check_flag, check_tensor, quote


@dataclass(frozen=True)
class Comparison:
    """Root-mean-square errors against fp32, relative to the fp32 result's own root mean square.

    Attributes:
        plain: of the model as transformers runs it, for ``"logits"``, and for each decoder layer where asked.
        patched: the same of the patched model.
        greedy: share of positions whose most likely token is the fp32 model's: plain, patched.
    """

    plain: dict[str, float]
    patched: dict[str, float]
    greedy: tuple[float, float]

    def __str__(self) -> str:
        rows = [f"{name:<24} {self.plain[name]:>10.2e} {self.patched[name]:>10.2e}" for name in self.plain]
        head = f"{'error against fp32':<24} {'plain':>10} {'patched':>10}"
        return "\n".join(
            [head, *rows, f"{'same most likely token':<24} {self.greedy[0]:>10.2%} {self.greedy[1]:>10.2%}"]
        )


def compare(model: torch.nn.Module, inputs: Tensor | Mapping[str, Tensor], *, layers: bool = False) -> Comparison:
    """Run a model patched, plain and in fp32 on the same inputs, and compare the results.

    A copy runs, which takes as much memory as the model, and twice that in fp32, where quantized weights are decoded.
    The model is left as it was, patched or not: none of its parameters moves, so graphs and decoders that read them
    stay valid.

    Args:
        model: as :func:`patch` takes it.
        inputs: token ids ``(B, S)``, int64 or int32, on the model's device; or the keyword arguments of the model's
            forward pass, ``inputs_embeds`` among them where ``input_ids`` are not. Positions that ``attention_mask``,
            ``(B, S)``, hides are not compared.
        layers: compare the results of each decoder layer too.

    Returns:
        A :class:`Comparison`, which prints as a table.

    Raises:
        UnsupportedProblem: a model that :func:`patch` does not take, without a language model's head or weights, or
            with quantized weights in a layout that is not read; inputs that are not as above, or on another device
            than the model.
    """
    check_flag("compare", "layers", layers)
    _check_model(model)
    given = _checked(model, inputs)
    twin = copy.deepcopy(model)
    if is_patched(twin):
        unpatch(twin)
        ours = _results(model, given, layers)
    else:
        with patch(twin):
            ours = _results(twin, given, layers)
    plain = _results(twin, given, layers)  # at which libraries decompress and repack weights: the model's own stay
    if any(map(checkpoints.is_quantized, model.modules())):
        del twin
        twin = copy.deepcopy(model)
        unpatch(twin)
        decoded(twin)
    wide = {k: v.float() if isinstance(v, Tensor) and v.is_floating_point() else v for k, v in given.items()}
    torch.nn.Module.float(twin)  # transformers' own refuses what was quantized
    exact = _results(twin, wide, layers)
    seen = given.get("attention_mask")
    seen = (
        torch.ones(exact["logits"].shape[:2], dtype=torch.bool, device=exact["logits"].device)
        if seen is None
        else seen.bool()
    )
    best = [results["logits"].argmax(-1)[seen] for results in (exact, plain, ours)]
    return Comparison(
        {name: _error(plain[name][seen], exact[name][seen]) for name in exact},
        {name: _error(ours[name][seen], exact[name][seen]) for name in exact},
        (float((best[1] == best[0]).double().mean()), float((best[2] == best[0]).double().mean())),
    )


def _check_model(model: Any) -> None:
    """Refuses what has no logits for each position, and what a copy of the model would not compute by itself."""
    remedy = "pass a model for causal language modelling, loaded by from_pretrained"
    if not is_whole(model):
        raise UnsupportedProblem(
            f"compare takes models of transformers; this is a {type(model).__name__}: {by_part(model, True) or remedy}"
        )
    if model.config.is_encoder_decoder:
        raise UnsupportedProblem(f"compare takes decoders alone; {type(model).__name__} has an encoder: {remedy}")
    if model.get_output_embeddings() is None:
        raise UnsupportedProblem(
            f"compare takes models with an lm_head or another head of tokens; {type(model).__name__} has none: {remedy}"
        )
    if any(p.is_meta for p in model.parameters()):
        raise UnsupportedProblem(
            f"compare takes a model with weights, and this one has some on the meta device: {remedy}"
        )
    for name, module in model.named_modules():
        if checkpoints.is_undecoded(module):
            raise UnsupportedProblem(
                f"compare decodes quantized weights to fp32, and those of {name} are in a layout that is not decoded "
                f"({checkpoints.said_kind(module)}): compare the model that was quantized"
            )
        if is_planned(module):
            raise UnsupportedProblem(
                f"compare runs a copy of the model, and tensor parallelism binds {name} to the original: load the "
                "model without tp_plan to compare it"
            )
        if isinstance(module.__dict__.get("forward"), FunctionType) and "_orig_mod" not in module._modules:
            raise UnsupportedProblem(
                f"compare runs a copy of the model, and {name or 'the model'} has a function for its forward, which in "
                "the copy would call the original: delete the attribute (del module.forward), compare, and put it back"
            )


def _checked(model: Any, inputs: Any) -> dict[str, Any]:
    """The keyword arguments of a forward pass."""
    given = {"input_ids": inputs} if isinstance(inputs, Tensor) else inputs
    known = isinstance(given, Mapping) and all(isinstance(name, str) for name in given)
    ids, embeds = (given.get(name) if known else None for name in ("input_ids", "inputs_embeds"))
    tokens = embeds if ids is None else ids
    if not isinstance(tokens, Tensor) or (ids is not None and embeds is not None):
        raise UnsupportedProblem(
            "compare needs inputs: token ids in a tensor, or the keyword arguments of a forward pass with a tensor for "
            f"either input_ids or inputs_embeds; got {quote(inputs)}: pass tokenizer(text, return_tensors='pt')"
        )
    table = model.get_input_embeddings().weight
    for name, value in given.items():
        if isinstance(value, Tensor):
            check_tensor("compare", name, value)
            if value.device != table.device:
                raise UnsupportedProblem(
                    f"compare takes inputs on the model's device, {table.device}; {name} is on {value.device}: "
                    "move it with .to(model.device)"
                )
    if given.get("past_key_values") is not None or given.get("cache") is not None:
        raise UnsupportedProblem("compare runs the model three times, and a cache grows each time: pass all tokens")
    _check_tokens(tokens, table, embedded=ids is None)
    _check_mask(given.get("attention_mask"), tokens.shape[:2])
    return dict(given)


def _check_tokens(t: Tensor, table: Tensor, embedded: bool) -> None:
    """Refuses what is no token ids ``(B, S)``, or no rows of the embedding ``table`` ``(B, S, H)``."""
    vocabulary, width = table.shape
    if embedded:
        fits, what = t.is_floating_point() and t.ndim == 3 and t.shape[-1] == width, f"inputs_embeds (B, S, {width})"
    else:
        fits, what = t.dtype in (torch.int32, torch.int64) and t.ndim == 2, "token ids (B, S), int64 or int32"
    if not fits or not t.numel():
        raise UnsupportedProblem(
            f"compare takes {what}, at least one; got {tuple(t.shape)} {t.dtype}: tokenize a text that is not empty"
        )
    if not embedded and not 0 <= int(t.min()) <= int(t.max()) < vocabulary:
        raise UnsupportedProblem(
            f"compare takes token ids from 0 to {vocabulary - 1}; they go from {int(t.min())} to {int(t.max())}: "
            "use the model's own tokenizer"
        )


def _check_mask(mask: Any, shape: torch.Size) -> None:
    """Refuses a mask that does not say of each token whether it counts, or that leaves none."""
    if mask is not None and (not isinstance(mask, Tensor) or mask.shape != shape or not mask.any()):
        raise UnsupportedProblem(
            f"compare takes attention_mask as a tensor {tuple(shape)} with ones for tokens that count, one at least; "
            f"got {quote(mask)}: pass the tokenizer's, or none"
        )


def _results(model: Any, given: dict[str, Any], layers: bool) -> dict[str, Tensor]:
    """Logits, and the results of the decoder's layers, ``(B, S, ...)``, in evaluation mode."""
    found: dict[str, Tensor] = {}

    def keeper(name: str) -> Callable[..., None]:
        def keep(module: Any, args: Any, result: Any) -> None:
            found[name] = (result[0] if isinstance(result, tuple) else result).detach()

        return keep

    handles = []
    if layers:
        handles = [x.register_forward_hook(keeper(f"layer {i}")) for i, x in enumerate(_layers(model))]
    training = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            found["logits"] = model(**given).logits
    finally:
        for module, mode in training:
            module.training = mode
        for handle in handles:
            handle.remove()
    return found


def _layers(model: Any) -> torch.nn.ModuleList:
    """The decoder's layers, by whatever name."""
    body = model.get_decoder()
    if isinstance(own := getattr(body, "layers", None), torch.nn.ModuleList):
        return own
    count = getattr(body.config.get_text_config(), "num_hidden_layers", None)
    found = [part for part in body.children() if isinstance(part, torch.nn.ModuleList) and len(part) == count]
    if len(found) != 1:
        raise UnsupportedProblem(
            f"compare finds no one list of {count} layers in {type(model).__name__}: leave layers=True away"
        )
    return found[0]


def _error(actual: Tensor, exact: Tensor) -> float:
    exact = exact.double()
    return float((actual.double() - exact).square().mean().sqrt() / exact.square().mean().sqrt().clamp_min(1e-30))
