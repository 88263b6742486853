"""How a model is quantized: its ``quantization_config``, read once."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from cutekernels.errors import UnsupportedProblem, near
from cutekernels.quant.formats import awq, bitsandbytes, compressed_tensors, gptq, mxfp4, nvfp4, own, plain, torchao
from cutekernels.quant.layout import BITS
from cutekernels.quant.support import REFUSED

_HEAD = ("lm_head",)  # what transformers leaves alone where a config names nothing
_PATTERN = "re:"  # compressed-tensors: a regular expression behind it, else the whole name
_CLASSES = ("Linear", "Module")  # of a projection, as compressed-tensors matches them
_SPECIAL = frozenset("*+?^$()[]{}|\\")  # what makes a name of AutoRound's a regular expression
_ANY = ((_CLASSES[0], 0),)


@dataclass(frozen=True, slots=True)
class Scheme:
    """How a model's linear layers are quantized.

    Attributes:
        format: as ``QuantizedWeight.format``.
        code: what an element is: ``"int4"``, ``"int8"``, ``"e4m3"``, ``"e2m1"`` or ``"nf4"``; "" where no weight is
            quantized (of compressed-tensors: activations or a cache alone).
        group: elements along K that share a scale, as the format says; -1: all of K, or what the tensors say.
        block: rows and columns that share a scale, or None.
        symmetric: whether zeros are 8 in every group, as the config has it.
        version: of GPTQ's zeros: 1 or 2.
        tensors: the names that a layer's tensors may have, behind the module's prefix.
        marks: names of which a quantized layer has one.
        ignored: the names of tensors that a layer which is not quantized may have besides, and that nothing reads.
        rules: patterns of modules, each with the number of its scheme in ``schemes``, or -1 where the modules are not
            quantized. The first that fits counts; modules that fit none are not quantized.
        others: further schemes, of modules that are quantized otherwise.
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
    ignored: tuple[str, ...] = ()
    rules: tuple[tuple[str, int], ...] = _ANY
    others: tuple[Scheme, ...] = ()
    detail: Mapping[str, Any] | None = field(default=None, hash=False)

    @property
    def bits(self) -> int:
        """Bits of an element: 4 or 8; 16 where no weight is quantized."""
        return BITS.get(self.code, 16)

    @property
    def schemes(self) -> tuple[Scheme, ...]:
        """This one and the others."""
        return self, *self.others

    def of(self, module: str) -> Scheme | None:
        """The scheme of the linear layer called ``module`` (``model.layers.0.mlp.up_proj``); None: not quantized."""
        which = next((number for pattern, number in self.rules if _matches(pattern, module)), -1)
        return None if which < 0 else self.schemes[which]

    def quantizes(self, module: str) -> bool:
        """Whether the linear layer called ``module`` is quantized, as the config has it."""
        return self.of(module) is not None

    def holds(self, names: Iterable[str]) -> bool:
        """Whether a layer with tensors of these ``names``, without its prefix, is quantized: the file's own word."""
        found = set(names)
        return any(not found.isdisjoint(scheme.marks) for scheme in self.schemes)


def _matches(pattern: str, module: str) -> bool:
    """Whether a pattern of ``Scheme.rules`` is for ``module``."""
    if pattern.startswith(_PATTERN):
        return re.match(pattern.removeprefix(_PATTERN), module) is not None
    return pattern == module or pattern in _CLASSES


def _all_but(names: Iterable[str]) -> tuple[tuple[str, int], ...]:
    """Rules that leave out ``names`` as transformers matches them: a whole part from the start, or the name's end."""
    skipped = [
        (rf"{_PATTERN}(?:(?:{name})(?:(?<=\.)|(?=\.|$))|.*{re.escape(name)}$)", -1)
        for name in names
        if isinstance(name, str)
    ]
    return *skipped, *_ANY


def read_config(quantization_config: Mapping[str, Any] | Any) -> Scheme:
    """A model's ``quantization_config``, read.

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
    method = str(method).lower().removeprefix("intel/")  # intel/auto-round, of older versions
    if method not in _CONFIGS:
        known = ", ".join(_CONFIGS)
        remedy = REFUSED.get(method, f"{near(method, _CONFIGS)}Convert the checkpoint to one of these")
        raise UnsupportedProblem(f"quant_method is one of {known}, not {method[:60]!r}; {remedy}")
    try:
        scheme = _CONFIGS[method](config)
        for pattern, _ in scheme.rules:
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


def _either(config: Mapping[str, Any], names: tuple[str, ...], otherwise: Any) -> Any:
    """The value of the first of ``names`` that is there."""
    return next((config[name] for name in names if name in config), otherwise)


def _change(base: Scheme, config: Mapping[str, Any], change: Mapping[str, Any], name: str) -> Scheme | None:
    """``base`` as ``change`` has it for modules called ``name``; None where those are not quantized."""
    bits = change.get("bits", 4)
    if bits >= 16:
        return None
    _only(config, f"bits of {name[:60]!r}", bits, (4,), "quantize all layers with four bits, or leave some out")
    return replace(
        base, group=int(change.get("group_size", base.group)), symmetric=bool(change.get("sym", base.symmetric))
    )


def _with(base: Scheme, rules: Iterable[tuple[str, Scheme | None]], last: Iterable[tuple[str, int]]) -> Scheme:
    """``base`` with schemes of its own for some modules; ``last``: rules behind those."""
    others: list[Scheme] = []
    numbered: list[tuple[str, int]] = []
    for pattern, scheme in rules:
        if scheme is not None and scheme != base:
            others.append(scheme)
        numbered.append((pattern, -1 if scheme is None else 0 if scheme == base else len(others)))
    return replace(base, rules=(*numbered, *last), others=tuple(others))


def _awq(config: Mapping[str, Any]) -> Scheme:
    bits = _either(config, ("w_bit", "bits"), 4)  # AutoAWQ's own names, and transformers'
    _only(config, "w_bit" if "w_bit" in config else "bits", bits, (4,), "quantize with four bits")
    version = str(
        getattr(config.get("version"), "value", config.get("version") or config.get("format") or "gemm")
    ).lower()
    _only(config, "version", version, ("gemm",), "take a checkpoint of version gemm")
    _only(config, "backend", str(config.get("backend") != "llm-awq"), ("True",), "take a checkpoint of AutoAWQ")
    return Scheme(
        "awq",
        "int4",
        int(_either(config, ("q_group_size", "group_size"), 128)),
        symmetric=not config.get("zero_point", True),
        tensors=awq.NAMES,
        marks=("qweight",),
        rules=_all_but([*_HEAD, *(config.get("modules_to_not_convert") or ())]),
    )


def _gptq(config: Mapping[str, Any]) -> Scheme:
    _only(config, "bits", config.get("bits"), (4,), "quantize with four bits")
    kind = str(config.get("checkpoint_format") or config.get("format") or "gptq").lower()
    _only(config, "checkpoint_format", kind, ("gptq", "gptq_v2"), "take a checkpoint in GPTQ's own format")
    if config.get("is_marlin_format"):
        raise UnsupportedProblem(
            "GPTQ is read in its own format, not in Marlin's; take the checkpoint before repacking"
        )
    base = Scheme(
        "gptq",
        "int4",
        int(config.get("group_size", 128)),
        symmetric=bool(config.get("sym", True)),
        version=2 if kind == "gptq_v2" else 1,
        tensors=gptq.NAMES,
        marks=("qweight",),
    )
    rules: list[tuple[str, Scheme | None]] = []
    for pattern, change in (config.get("dynamic") or {}).items():  # gptqmodel's: the first that fits counts
        left_out = pattern.startswith("-:")
        scheme = None if left_out else _change(base, config, change or {}, pattern)
        rules.append((_PATTERN + (pattern[2:] if left_out else pattern.removeprefix("+:")), scheme))
    inside = [name for part in config.get("modules_in_block_to_quantize") or () for name in _as_list(part)]
    targets = tuple((rf"{_PATTERN}.*\.{re.escape(name)}$", 0) for name in inside) or _ANY
    return _with(base, rules, (*(() if config.get("lm_head") else _all_but(_HEAD)[:-1]), *targets))


def _auto_round(config: Mapping[str, Any]) -> Scheme:
    """AutoRound's own format, as vLLM reads it: layers are GPTQ's (version 1) or AWQ's."""
    packing = config.get("packing_format", "auto_round:auto_gptq")
    known = ("auto_round:auto_gptq", "auto_round:auto_awq")
    _only(config, "packing_format", packing, known, "export it from AutoRound in one of these formats")
    _only(config, "data_type", config.get("data_type", "int"), ("int",), "quantize with W4A16")
    _only(config, "bits", config.get("bits"), (4,), "quantize with four bits")
    size, symmetric = int(config.get("group_size", 128)), bool(config.get("sym", True))
    if packing == known[0]:
        base = _gptq({"bits": 4, "group_size": size, "sym": symmetric})
    else:
        base = _awq({"bits": 4, "group_size": size, "zero_point": not symmetric})
    extra = config.get("extra_config") or {}
    named = [(name, _change(base, config, change, name)) for name, change in extra.items()]
    exact = [(name, scheme) for name, scheme in named if not set(name) & _SPECIAL]
    patterns = [(f"{_PATTERN}.*(?:{name})", scheme) for name, scheme in named if set(name) & _SPECIAL]
    blocks = _either(config, ("block_name_to_quantize", "to_quant_block_names"), None)
    blocks = blocks.split(",") if isinstance(blocks, str) else blocks
    started = tuple(
        (_PATTERN + re.escape(name.strip()), 0) for part in blocks or () for name in _as_list(part) if name.strip()
    )
    return _with(base, (*exact, *patterns), started or base.rules)


def _as_list(part: Any) -> list[str]:
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
    schemes: list[Scheme] = []
    targets: dict[str, int] = {}  # of two groups with one target the last one counts
    for group in dict(config.get("config_groups") or {}).values():
        weights = group.get("weights")
        if weights:
            schemes.append(_config_group(group, weights, str(group.get("format") or config.get("format")), config))
        targets |= dict.fromkeys(group.get("targets") or (), len(schemes) - 1 if weights else -1)
    skipped = [(name, -1) for name in config.get("ignore") or ()]
    rules = (*skipped, *sorted(targets.items(), key=_precedence))
    ignored: tuple[str, ...] = plain.ACTIVATIONS
    if _is_decompressed(config):
        ignored += tuple({*compressed_tensors.PACKED, *compressed_tensors.PLAIN} - {"weight", "weight_packed"})
    first, *others = schemes or [Scheme("compressed-tensors", "")]  # activations or a cache alone
    return replace(first, others=tuple(others), rules=rules, ignored=ignored)


def _is_decompressed(config: Mapping[str, Any]) -> bool:
    """Whether a model was saved after its first call: with plain weights, and what is left beside them."""
    return config.get("quantization_status") == "decompressed"


def _precedence(target: tuple[str, int]) -> tuple[int, str]:
    """The library's order over all groups: a module's name, then regular expressions, then classes; by the alphabet."""
    name, _ = target
    return (2 if name in _CLASSES else 1 if _PATTERN in name else 0), name


def _config_group(group: Mapping[str, Any], weights: Mapping[str, Any], form: str, config: Mapping[str, Any]) -> Scheme:
    forms = ("pack-quantized", "float-quantized", "int-quantized", "naive-quantized", "nvfp4-pack-quantized")
    _only(config, "format", form, forms, REFUSED.get(form, "take a checkpoint in one of these formats"))
    bits, kind = int(weights.get("num_bits", 8)), str(weights.get("type", "int"))
    if form == "nvfp4-pack-quantized":
        found, wanted = (kind, bits, weights.get("group_size")), ("float", 4, nvfp4.GROUP)
        _only(config, "weights of nvfp4-pack-quantized", found, (wanted,), "quantize with NVFP4A16")
        return _nvfp4("compressed-tensors")
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
    mark = "weight_packed" if packed else "weight_scale"
    return Scheme(
        "compressed-tensors",
        code,
        int(size) if size and strategy in ("group", None) else -1,
        shape,
        symmetric=bool(weights.get("symmetric", True)),
        tensors=(*(compressed_tensors.PACKED if packed else compressed_tensors.PLAIN), *plain.ACTIVATIONS),
        marks=() if _is_decompressed(config) and not packed else (mark,),
        detail={**weights, "block_structure": None if shape is None else list(shape)},
    )


def _nvfp4(format: str) -> Scheme:
    return Scheme(
        format,
        "e2m1",
        nvfp4.GROUP,
        tensors=(*nvfp4.NAMES[format], *nvfp4.BESIDE),
        marks=nvfp4.NAMES[format][2:],
        ignored=nvfp4.BESIDE,
    )


def _modelopt(config: Mapping[str, Any]) -> Scheme:
    """NVIDIA's, as ``config.json`` has it, or ``hf_quant_config.json``. Names that it leaves out are shell patterns."""
    said = config.get("quantization") or config
    remedy = "take the same model in NVFP4, in compressed-tensors or in FP8"
    _only(config, "quant_algo", said.get("quant_algo"), ("NVFP4", "W4A16_NVFP4"), remedy)
    size = said.get("group_size", nvfp4.GROUP)
    _only(config, "group_size", size, (nvfp4.GROUP,), remedy)
    names = _either(said, ("ignore", "exclude_modules"), None) or ()
    return replace(_nvfp4("modelopt"), rules=(*[(_PATTERN + fnmatch.translate(name), -1) for name in names], *_ANY))


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
        marks=plain.SCALES if "weight_block_size" in config else plain.SCALES[::-1],  # AutoFP8 has no blocks
        ignored=plain.ACTIVATIONS,
        rules=_all_but(_HEAD if names is None else names),
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
        rules=_all_but(_HEAD if names is None else names),
    )


def _mxfp4(config: Mapping[str, Any]) -> Scheme:
    return Scheme(
        "mxfp4",
        "e2m1",
        mxfp4.GROUP,
        tensors=mxfp4.NAMES,
        marks=("blocks",),
        rules=_all_but([*_HEAD, *(config.get("modules_to_not_convert") or ())]),
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
        rules=_all_but(head if names is None else names),
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
        rules=_all_but(config.get("modules_to_not_convert") or ()),
        detail={"scheme": name},
    )


_CONFIGS: dict[str, Callable[[Mapping[str, Any]], Scheme]] = {
    "awq": _awq,
    "gptq": _gptq,
    "auto-round": _auto_round,
    "compressed-tensors": _compressed_tensors,
    "fp8": _fp8,
    "bitsandbytes": _bitsandbytes,
    "torchao": _torchao,
    "mxfp4": _mxfp4,
    "modelopt": _modelopt,
    "cutekernels": _own,
}
