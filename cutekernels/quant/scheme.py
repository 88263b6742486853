"""How a model is quantized: its ``quantization_config``, read once."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from cutekernels.errors import UnsupportedProblem, near
from cutekernels.quant.formats import awq, bitsandbytes, compressed_tensors, gptq, mxfp4, own, plain, torchao
from cutekernels.quant.support import REFUSED
from cutekernels.quant.weight import BITS

_HEAD = ("lm_head",)  # what transformers leaves alone where a config names nothing
_EXACT = "re:"  # compressed-tensors: a regular expression behind it, else the whole name


@dataclass(frozen=True, slots=True)
class Scheme:
    """How a model's linear layers are quantized.

    Attributes:
        format: as ``QuantizedWeight.format``.
        code: what an element is: ``"int4"``, ``"int8"``, ``"e4m3"``, ``"e2m1"`` or ``"nf4"``.
        group: elements along K that share a scale, as the format says; -1: all of K, or what the tensors say.
        block: rows and columns that share a scale, or None.
        symmetric: whether zeros are 8 in every group, as the config has it.
        version: of GPTQ's zeros: 1 or 2.
        tensors: the names that a layer's tensors may have, behind the module's prefix.
        marks: names of which a quantized layer has one.
        skipped: patterns of modules that are not quantized.
        targets: patterns of modules that are, where not all linear layers are; behind ``skipped``.
        others: of compressed-tensors: further groups of modules, which are quantized otherwise.
        detail: what the format's reader takes besides.
    """

    format: str
    code: str
    group: int = -1
    block: tuple[int, int] | None = None
    symmetric: bool = True
    version: int = 1
    tensors: tuple[str, ...] = ()
    marks: tuple[str, ...] = ()
    skipped: tuple[str, ...] = ()
    targets: tuple[str, ...] = ()
    others: tuple[Scheme, ...] = ()
    detail: Mapping[str, Any] | None = field(default=None, hash=False)

    @property
    def bits(self) -> int:
        """Of an element: 4 or 8."""
        return BITS[self.code]

    def of(self, module: str) -> Scheme | None:
        """The scheme of the linear layer called ``module`` (``model.layers.0.mlp.up_proj``); None: not quantized."""
        if any(_matches(pattern, module) for pattern in self.skipped):
            return None
        for scheme in (self, *self.others):
            if not scheme.targets or any(_matches(pattern, module) for pattern in scheme.targets):
                return scheme
        return None

    def quantizes(self, module: str) -> bool:
        """Whether the linear layer called ``module`` is quantized, as the config has it."""
        return self.of(module) is not None

    def holds(self, names: Iterable[str]) -> bool:
        """Whether a layer with tensors of these ``names``, without its prefix, is quantized: the file's own word."""
        found = set(names)
        return any(not found.isdisjoint(scheme.marks) for scheme in (self, *self.others))


def _matches(pattern: str, module: str) -> bool:
    """Whether a pattern, which :func:`_hugging_face` or a config of compressed-tensors made, is for ``module``."""
    if pattern == "Linear":
        return True
    if pattern.startswith(_EXACT):
        return re.match(pattern.removeprefix(_EXACT), module) is not None
    return pattern == module


def _hugging_face(names: Iterable[str]) -> tuple[str, ...]:
    """Names as transformers matches them: a whole part from the start, a regular expression so, or the name's end."""
    return tuple(
        rf"{_EXACT}(?:(?:{name})(?:(?<=\.)|(?=\.|$))|.*{re.escape(name)}$)" for name in names if isinstance(name, str)
    )


def read_config(quantization_config: Mapping[str, Any] | Any) -> Scheme:
    """What a model's ``quantization_config`` says.

    Args:
        quantization_config: the entry of ``config.json``, or transformers' object of it.

    Raises:
        UnsupportedProblem: a format or an option that is not read, in one sentence with the remedy.
    """
    config = quantization_config
    if not isinstance(config, Mapping):
        if not hasattr(config, "to_dict"):
            raise UnsupportedProblem(
                f"quantization_config is a dict, not {type(config).__name__}; pass that entry of config.json"
            )
        config = config.to_dict()
    method = getattr(config.get("quant_method"), "value", config.get("quant_method"))
    if method is None and (config.get("load_in_4bit") or config.get("load_in_8bit")):
        method = "bitsandbytes"
    method = str(method).lower()
    if method not in _CONFIGS:
        known = ", ".join(_CONFIGS)
        remedy = REFUSED.get(method, f"{near(method, _CONFIGS)}Convert the checkpoint to one of these")
        raise UnsupportedProblem(f"quant_method is one of {known}, not {method[:60]!r}; {remedy}")
    try:
        scheme = _CONFIGS[method](config)
        for each in (scheme, *scheme.others):
            for pattern in (*each.skipped, *each.targets):
                _matches(pattern, "")
    except UnsupportedProblem:
        raise
    except re.error as error:
        raise UnsupportedProblem(
            f"names of modules in quantization_config are regular expressions, and one is not ({error}); "
            "mend config.json"
        ) from None
    except (TypeError, ValueError, AttributeError, LookupError, OverflowError) as error:
        raise UnsupportedProblem(
            f"quantization_config of {method} has an entry of another type than the format's ({error!r}); "
            "mend config.json"
        ) from None
    return scheme


def _only(config: Mapping[str, Any], name: str, value: Any, allowed: tuple[Any, ...], remedy: str) -> None:
    if value not in allowed:
        method = config.get("quant_method", "bitsandbytes")
        raise UnsupportedProblem(
            f"{name} of {getattr(method, 'value', method)} is {' or '.join(map(str, allowed))}, not {value!r}; {remedy}"
        )


def _awq(config: Mapping[str, Any]) -> Scheme:
    _only(config, "bits", config.get("bits", 4), (4,), "quantize with four bits")
    version = str(
        getattr(config.get("version"), "value", config.get("version") or config.get("format") or "gemm")
    ).lower()
    _only(config, "version", version, ("gemm",), "take a checkpoint of version gemm")
    _only(config, "backend", str(config.get("backend") != "llm-awq"), ("True",), "take a checkpoint of AutoAWQ")
    return Scheme(
        "awq",
        "int4",
        int(config.get("group_size", 128)),
        symmetric=not config.get("zero_point", True),
        tensors=awq.NAMES,
        marks=("qweight",),
        skipped=_hugging_face([*_HEAD, *(config.get("modules_to_not_convert") or ())]),
    )


def _gptq(config: Mapping[str, Any]) -> Scheme:
    _only(config, "bits", config.get("bits"), (4,), "quantize with four bits")
    kind = str(config.get("checkpoint_format") or config.get("format") or "gptq").lower()
    _only(config, "checkpoint_format", kind, ("gptq", "gptq_v2"), "take a checkpoint in GPTQ's own format")
    if config.get("is_marlin_format"):
        raise UnsupportedProblem(
            "GPTQ is read in its own format, not in Marlin's; take the checkpoint before repacking"
        )
    skipped = [] if config.get("lm_head") else list(_hugging_face(_HEAD))
    for pattern, change in (config.get("dynamic") or {}).items():
        if pattern.startswith("-:"):
            skipped.append(_EXACT + pattern[2:])
        elif change:
            raise UnsupportedProblem(
                f"dynamic of gptq leaves modules out (-:), and {pattern[:60]!r} changes how they are quantized; "
                "quantize all layers alike"
            )
    inside = [name for part in config.get("modules_in_block_to_quantize") or () for name in _listed(part)]
    return Scheme(
        "gptq",
        "int4",
        int(config.get("group_size", 128)),
        symmetric=bool(config.get("sym", True)),
        version=2 if kind == "gptq_v2" else 1,
        tensors=gptq.NAMES,
        marks=("qweight",),
        skipped=tuple(skipped),
        targets=tuple(rf"{_EXACT}.*\.{re.escape(name)}$" for name in inside),
    )


def _listed(part: Any) -> list[str]:
    return [part] if isinstance(part, str) else list(part)


def _compressed_tensors(config: Mapping[str, Any]) -> Scheme:
    for name in ("sparsity_config", "transform_config"):
        options = config.get(name) or {}
        if (
            options
            and options.get("format", "") != "dense"
            and (name == "sparsity_config" or options.get("config_groups"))
        ):
            raise UnsupportedProblem(
                f"weights of compressed-tensors are dense and untransformed, and this model has {name}; "
                "take a checkpoint without it"
            )
    groups = config.get("config_groups") or {}
    schemes = []
    for group in groups.values():
        weights = group.get("weights")
        if weights:
            schemes.append(_config_group(group, weights, str(group.get("format") or config.get("format")), config))
    if not schemes:
        raise UnsupportedProblem(
            "config_groups of compressed-tensors has weights in one group at least, and here none has; "
            "load the model as it is, its weights are not quantized"
        )
    first, *others = schemes
    return first if not others else replace(first, others=tuple(others))


def _config_group(group: Mapping[str, Any], weights: Mapping[str, Any], form: str, config: Mapping[str, Any]) -> Scheme:
    forms = ("pack-quantized", "float-quantized", "int-quantized", "naive-quantized")
    _only(config, "format", form, forms, REFUSED.get(form, "take a checkpoint in one of these formats"))
    bits, kind = int(weights.get("num_bits", 8)), str(weights.get("type", "int"))
    packed = form == "pack-quantized"
    code = {("int", 4): "int4" if packed else "int8", ("int", 8): "int8", ("float", 8): "e4m3"}.get((kind, bits))
    if code is None or (packed and kind != "int"):
        raise UnsupportedProblem(
            f"weights of {form} are int of 4 or 8 bits, or float of 8, not {kind} of {bits}; quantize with W4A16 or FP8"
        )
    strategy = weights.get("strategy")
    block = weights.get("block_structure")
    if isinstance(block, str):  # "128x128", of older versions
        block = [int(extent) for extent in block.split("x")]
    shape = None if block is None or strategy != "block" else (int(block[0]), int(block[1]))
    size = weights.get("group_size")
    return Scheme(
        "compressed-tensors",
        code,
        int(size) if size and strategy in ("group", None) else -1,
        shape,
        symmetric=bool(weights.get("symmetric", True)),
        tensors=(*(compressed_tensors.PACKED if packed else compressed_tensors.PLAIN), *plain.ACTIVATIONS),
        marks=("weight_packed",) if packed else ("weight_scale",),
        skipped=tuple(config.get("ignore") or ()),
        targets=tuple(group.get("targets") or ()),
        detail={**weights, "block_structure": None if shape is None else list(shape)},
    )


def _fp8(config: Mapping[str, Any]) -> Scheme:
    block = config.get("weight_block_size", (128, 128))
    names = config.get("modules_to_not_convert")
    names = config.get("ignored_layers") if names is None else names
    return Scheme(
        "fp8",
        "e4m3",
        -1 if block is None else int(block[1]),
        None if block is None else (int(block[0]), int(block[1])),
        tensors=(*plain.NAMES, *plain.ACTIVATIONS),
        marks=("weight_scale_inv",),
        skipped=_hugging_face(_HEAD if names is None else names),
    )


def _bitsandbytes(config: Mapping[str, Any]) -> Scheme:
    if config.get("load_in_8bit") or config.get("_load_in_8bit"):
        raise UnsupportedProblem(
            "weights of bitsandbytes are read in nf4, not in LLM.int8(); quantize with load_in_4bit=True, or use "
            'cutekernels.quant.quantize(weight, "int8_channel")'
        )
    _only(config, "bnb_4bit_quant_type", config.get("bnb_4bit_quant_type", "fp4"), ("nf4",), "quantize with nf4")
    names = config.get("llm_int8_skip_modules")
    return Scheme(
        "bitsandbytes",
        "nf4",
        64,
        tensors=bitsandbytes.NAMES,
        marks=("weight." + bitsandbytes.STATE, "weight.quant_map"),
        skipped=_hugging_face(_HEAD if names is None else names),
    )


def _mxfp4(config: Mapping[str, Any]) -> Scheme:
    return Scheme(
        "mxfp4",
        "e2m1",
        mxfp4.GROUP,
        tensors=mxfp4.NAMES,
        marks=("blocks",),
        skipped=_hugging_face([*_HEAD, *(config.get("modules_to_not_convert") or ())]),
    )


_TORCHAO = {
    "Int4WeightOnlyConfig": "int4",
    "Float8WeightOnlyConfig": "e4m3",
    "Float8DynamicActivationFloat8WeightConfig": "e4m3",
}


def _torchao(config: Mapping[str, Any]) -> Scheme:
    kind = config.get("quant_type")
    default = kind.get("default", kind) if isinstance(kind, Mapping) else kind
    name = str(default.get("_type") if isinstance(default, Mapping) else default)
    _only(config, "quant_type", name, tuple(_TORCHAO), "quantize with Int4WeightOnlyConfig or Float8WeightOnlyConfig")
    options = (default.get("_data") or {}) if isinstance(default, Mapping) else {}
    names = config.get("modules_to_not_convert")
    head = () if config.get("include_input_output_embeddings") else _HEAD
    return Scheme(
        "torchao",
        _TORCHAO[name],
        int(options.get("group_size", 128)) if _TORCHAO[name] == "int4" else -1,
        symmetric=False,
        tensors=torchao.NAMES,
        marks=(torchao.PREFIX + "qdata",),
        skipped=_hugging_face(head if names is None else names),
    )


def _own(config: Mapping[str, Any]) -> Scheme:
    name = config.get("scheme")
    _only(config, "scheme", name, tuple(own.SCHEMES), "check config.json")
    code, group, rows = own.SCHEMES[str(name)]
    return Scheme(
        "cutekernels",
        code,
        group or -1,
        (128, 128) if rows == 128 else None,
        symmetric=bool(config.get("symmetric", True)),
        tensors=own.NAMES,
        marks=(own.PREFIX + "packed",),
        skipped=_hugging_face(config.get("modules_to_not_convert") or ()),
        detail={"scheme": name},
    )


_CONFIGS: dict[str, Callable[[Mapping[str, Any]], Scheme]] = {
    "awq": _awq,
    "gptq": _gptq,
    "compressed-tensors": _compressed_tensors,
    "fp8": _fp8,
    "bitsandbytes": _bitsandbytes,
    "torchao": _torchao,
    "mxfp4": _mxfp4,
    "cutekernels": _own,
}
