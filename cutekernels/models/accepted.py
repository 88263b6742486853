"""Which models a decoder takes. It reads weights and calls no module, so what a module does of its own is refused."""

from __future__ import annotations

import re
from types import MethodType
from typing import Any

import torch

from cutekernels.errors import UnsupportedProblem
from cutekernels.integrations.transformers.checkpoints import ANEW, is_decompressed, is_quantized, layout_of, said_kind
from cutekernels.integrations.transformers.checkpoints import REMEDY as QUANTIZED
from cutekernels.integrations.transformers.families import FAMILIES, Family, family_of, shared_parameters
from cutekernels.integrations.transformers.patching import is_patched
from cutekernels.integrations.transformers.projections import kind_of, sharded
from cutekernels.integrations.transformers.rules import WIDEST_HEAD
from cutekernels.integrations.transformers.tensor_parallel import is_planned
from cutekernels.models.config import DecoderConfig
from cutekernels.models.language import Language, language_of
from cutekernels.models.loaded import LoadedModel
from cutekernels.models.ropes import KINDS
from cutekernels.ops.attention.problem import WIDEST
from cutekernels.ops.shared.checks import quote

REMEDY = "generate with the model itself, its attention by cutekernels.route_sdpa()"
_PATCH = "generate with the model itself under cutekernels.patch, which honours it"
_JOINED = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
_MULTIPLY = "self_attn", "mlp", "shared_expert", "shared_experts"
# Tensors of a checkpoint that a decoder needs not: tables of old ones, and scales of caches, activations and results,
# of each of which there are several names: llm-compressor's, AutoFP8's and vLLM's (k_proj.output_scale is its k_scale).
IGNORED = re.compile(
    r"\.(?:rotary_emb\.inv_freq|(?:q|output|prob_output)_(?:scale|zero_point)|[kv]_zero_point)$"
    r"|\.self_attn\.(?:(?:attn|k_proj|v_proj|qkv_proj)\.)?(?:[kv]|kv|prob)_scale$"
)
_OF_CACHES = ("q_scale", "k_scale", "v_scale", "kv_scale")  # parameters of quantizers, of any type
_LACKS = {  # options of Gemma 4 by which layers are more than a Decoder computes
    "num_kv_shared_layers": "layers that take an earlier one's keys and values",
    "hidden_size_per_layer_input": "second embedding of each token, for every layer",
    "enable_moe_block": "experts beside an MLP",
}
_COMPILED = "_orig_mod"  # the submodule of what torch.compile returns for a module
# Hooks that stay after output_hidden_states and change nothing, and those that decompress before a model's first call.
_HARMLESS = ("transformers.utils.output_capturing", "compressed_tensors.")


def check_model(model: Any) -> tuple[Family, dict[str | None, Any]]:
    """The family and the rotary parameters of a model whose weights can be read: transformers' own, or ``load``'s.

    Raises:
        UnsupportedProblem: a model of another family, one that is patched, wrapped or lies on several devices, modules
            with hooks, forwards or classes of their own, a head_dim or rotary tables that no op has.
    """
    loaded, model = isinstance(model, LoadedModel), language_of(model)
    family = FAMILIES[model.config.model_type] if loaded else _family_of(model)
    decompressed = next((path for path, module in model.named_modules() if is_decompressed(module)), None)
    if decompressed is not None:
        raise UnsupportedProblem(
            f"Decoder cannot read {decompressed} any more, which compressed-tensors has decompressed at the model's "
            f"first call: {ANEW}"
        )
    for path, module in model.named_modules():
        path = path.replace(f"{_COMPILED}.", "")
        if not loaded:
            _check_class(path, module, family)
        _check_forward(path or "the model", module)
    whole = model.whole if isinstance(model, Language) else model
    if not loaded and not hasattr(type(getattr(whole, _COMPILED, whole)), "set_attn_implementation"):
        raise UnsupportedProblem(
            f"Decoder takes a model of transformers itself; this is a {kind_of(type(model))} around one: merge its "
            f"adapters (merge_and_unload), or {_PATCH}"
        )
    plain = [
        (path, p)
        for path, p in model.named_parameters()
        if path.rpartition(".")[2] not in _OF_CACHES and not layout_of(model.get_submodule(path.rpartition(".")[0]))
    ]
    packed = [path for path, p in plain if p.dtype.itemsize < 2 or not p.is_floating_point()]
    if packed:
        raise UnsupportedProblem(
            f"Decoder cannot read {packed[0]} as it has been loaded, quantized: load the model dequantized (of its "
            f"experts kernels take fp16 and bf16), or, if it has none, {QUANTIZED}"
        )
    if len({p.device for p in model.parameters()}) != 1 or len({p.dtype for _, p in plain}) != 1:
        raise UnsupportedProblem("Decoder takes a model on one device and of one dtype: move it with model.to(...)")
    if model.device.type == "cuda" and model.dtype not in (torch.float16, torch.bfloat16):
        raise UnsupportedProblem(
            f"Decoder takes fp16 and bf16 on a GPU; this model is {model.dtype}: convert it, model.to(torch.bfloat16)"
        )
    shared = shared_parameters(model)
    for path, p in model.named_parameters(remove_duplicate=False):
        if id(p) in shared and ["", *path.split(".")][-2] in _JOINED:
            raise UnsupportedProblem(
                f"Decoder moves the weights of one input side by side; {path} belongs to another module too: {_PATCH}"
            )
    if not getattr(model.config, "is_causal", True):
        raise UnsupportedProblem(
            "Decoder's tokens see earlier ones alone; this model's config has is_causal=False: set it to True, or call "
            "the model itself under cutekernels.patch, which honours it"
        )
    for name, what in _LACKS.items() if family.shares_keys else ():
        if value := _option(model.config, name):
            raise UnsupportedProblem(
                f"Decoder has no {what}; this model's config has {name}={quote(value)}: generate with the model itself "
                "under cutekernels.patch"
            )
    kinds = dict.fromkeys((layer.self_attn.head_dim, _groups(layer.self_attn)) for layer in model.model.layers)
    head_dim = max((kind[0] for kind in kinds), default=0)
    if head_dim % WIDEST or not 0 < head_dim <= WIDEST_HEAD:
        raise UnsupportedProblem(
            f"Decoder takes a head_dim that is a multiple of {WIDEST} up to {WIDEST_HEAD}; this model's is {head_dim}: "
            "generate with the model itself under cutekernels.patch"
        )
    if len(kinds) > 1:
        raise UnsupportedProblem(
            "Decoder's layers have heads alike; this model's have (head_dim, queries a key) of "
            f"{' and '.join(map(str, kinds))}: generate with the model itself under cutekernels.patch"
        )
    ropes = _ropes(model.config)
    for parameters in ropes.values():
        kind = parameters.get("rope_type", "default")
        if kind not in KINDS:
            raise UnsupportedProblem(
                f"Decoder takes rotary tables that do not depend on the length; rope_type is {kind}: {REMEDY}"
            )
    return family, ropes


def _option(config: Any, name: str) -> Any:
    """An option of a model's config, or of ``config.json``."""
    return config.raw[name] if isinstance(config, DecoderConfig) else getattr(config, name, None)


def _groups(attention: Any) -> int | None:
    """How many queries have one key; None where all layers are alike."""
    found: int | None = attention.__dict__.get("num_key_value_groups")
    return found


def _family_of(model: Any) -> Family:
    """The family of a model of transformers for causal language modelling."""
    kind = model.config.model_type if isinstance(model, Language) else ""
    family = FAMILIES[kind] if kind in FAMILIES else family_of(model, "Decoder", REMEDY, head=True)
    if family.undecoded:
        raise UnsupportedProblem(
            f"Decoder does not take {type(model).__name__}: {family.undecoded}; generate with the model itself under "
            "cutekernels.patch"
        )
    if not hasattr(model, "lm_head"):
        raise UnsupportedProblem(
            f"Decoder takes models for causal language modelling; {type(model).__name__} has no lm_head: {REMEDY}"
        )
    if is_patched(model):
        raise UnsupportedProblem("Decoder reads a plain model, and this one is patched: call cutekernels.unpatch first")
    return family


def _ropes(config: Any) -> dict[str | None, Any]:
    """The config's rotary parameters: by type of layer where layers differ, else under None."""
    parameters, types = config.rope_parameters, getattr(config, "layer_types", None) or ()
    return {kind: own for kind, own in parameters.items() if kind in types} or {None: parameters}


def _check_class(path: str, module: torch.nn.Module, family: Family) -> None:
    """Refuses a module with a weight whose class computes something else with it: quantized, or with an adapter."""
    parent, name = ["", *path.split(".")][-2:]
    expected: type | None = None
    if name in ("lm_head", "c_fc", "shared_expert_gate") or (parent in _MULTIPLY and name.endswith("_proj")):
        expected = torch.nn.Linear
    elif name == "norm" or name.endswith(("_norm", "_layernorm")):
        expected = family.classes()["norm"]
    elif name == "embed_tokens":
        expected = torch.nn.Embedding  # Gemma's scale theirs
    if expected is torch.nn.Linear and layout_of(module):
        return
    if expected is not None and is_quantized(module):
        raise UnsupportedProblem(
            f"Decoder cannot read {path} as it has been loaded, quantized ({said_kind(module)}): {QUANTIZED}"
        )
    if expected is None or type(module) is expected:
        return
    if name != "embed_tokens" or not isinstance(module, torch.nn.Embedding):
        raise UnsupportedProblem(
            f"Decoder reads {path} as a {kind_of(expected)}; it is a {kind_of(type(module))}: merge adapters "
            f"(merge_and_unload), or {_PATCH}"
        )


def _check_forward(path: str, module: torch.nn.Module) -> None:
    """Refuses a module that does more or something else than its class does, or has its weights elsewhere."""
    if sharded(module):
        raise UnsupportedProblem(
            f"Decoder reads whole weights, and FSDP shards those of {path}: load a plain model with "
            "get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))"
        )
    if is_planned(module):
        raise UnsupportedProblem(
            f"Decoder reads whole weights, and tensor parallelism shards those of {path}: load the model without "
            "tp_plan, or call it itself under cutekernels.patch"
        )
    if hasattr(module, "_hf_hook"):
        raise UnsupportedProblem(
            f"Decoder takes a model on one device, without accelerate's hooks; {path} has one (of a device_map over "
            "several devices or with offloading): load the model on one device, or call "
            "accelerate.hooks.remove_hook_from_module(model, recurse=True)"
        )
    hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
    own = [hook for hook in hooks if not getattr(hook, "__module__", "").startswith(_HARMLESS)]
    if own:
        called = getattr(own[0], "__qualname__", type(own[0]).__qualname__)
        raise UnsupportedProblem(
            f"Decoder calls no module, so forward hooks would not run; {path} has one, {called}: remove the hook, or "
            f"{_PATCH}"
        )
    if "forward" not in module.__dict__ or _COMPILED in module._modules or layout_of(module) == "compressed-tensors":
        return
    forward = getattr(module.forward, "_torchdynamo_orig_callable", module.forward)
    if forward != MethodType(type(module).forward, module):
        raise UnsupportedProblem(
            f"Decoder computes what the classes of transformers do; {path} has a forward of its own: delete the "
            f"attribute (del module.forward), or {_PATCH}"
        )
