"""``load``: a checkpoint from its folder into a model that a ``Decoder`` takes, by this library and torch alone."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from cutekernels.errors import UnsupportedProblem
from cutekernels.models.accepted import IGNORED, check_model
from cutekernels.models.architectures import LayerPart
from cutekernels.models.arguments import free_bytes
from cutekernels.models.config import check_ends, read_config
from cutekernels.models.folder import Folder
from cutekernels.models.loaded import LoadedModel
from cutekernels.models.stored import PLAIN, Blank, Reading, Stored
from cutekernels.models.stored_experts import StoredExperts
from cutekernels.ops.shared.checks import check_flag, check_place, quote
from cutekernels.quant import Scheme
from cutekernels.quant import read_config as read_scheme

_TABLE = "embed_tokens.weight"
_LAYER = re.compile(r"model\.layers\.(\d+)\.(.*)")
_DTYPES = {str(one).removeprefix("torch."): one for one in PLAIN}


def load(
    path: str | os.PathLike[str],
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    progress: bool = True,
) -> LoadedModel:
    """A checkpoint in Hugging Face's layout, for :class:`Decoder`. Needs no transformers.

    ::

        model = ck.models.load("Qwen2.5-7B-Instruct", dtype=torch.bfloat16)
        decoder = ck.models.Decoder.from_transformers(model)

    Files are mapped, checked as a whole, and copied to the device a tensor at a time: beside the model itself no more
    than one layer's projection is in memory. Quantized projections stay packed.

    Args:
        path: a folder with ``config.json`` and ``model.safetensors``, or shards and their index, of Llama, Mistral,
            Mixtral, Qwen2, Qwen3, Qwen3-MoE, Qwen3-VL (its text), gpt-oss (in MXFP4), GLM-4.5 to 4.7, Phi-3, Granite,
            OLMo2, SmolLM3, Starcoder2, GLM4, Cohere2, Gemma 2, Gemma 3 (text) or Gemma 4 (its text, without heads of
            512). Nothing is downloaded.
        device: of the weights; the current GPU where there is one, else the CPU.
        dtype: of the weights and of what is computed; the config's own by default.
        progress: a bar with bytes, where stderr is a terminal.

    Raises:
        UnsupportedProblem: no such folder; a file that is missing, truncated or broken; a model of another family, with
            options that no op has, or with tensors that its config does not ask for; more than the device has memory
            for; fp32 on a GPU.
    """
    check_flag("load", "progress", progress)
    check_place(dtype, device, optional=True)
    place = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if device is None else device)
    return _build(Folder(path), place, dtype, progress)


def outline(path: str | os.PathLike[str], *, dtype: torch.dtype | None = None) -> LoadedModel:
    """A checkpoint's model for recording its calls: on the CPU, one layer of each kind, and plain weights of no value.

    Quantized weights alone are read, since their layout depends on what they hold. Raises what :func:`load` does.
    """
    check_place(dtype, None, optional=True)
    return _build(Folder(path), torch.device("cpu"), dtype, progress=False, outline=True)


def _build(
    folder: Folder, place: torch.device, dtype: torch.dtype | None, progress: bool, outline: bool = False
) -> LoadedModel:
    config = read_config(folder.config)
    check_ends("generation_config.json", (folder.generation or {}).get("eos_token_id"))
    dtype = dtype or _own_dtype(folder, config.body_path)
    if dtype not in PLAIN or ((place.type == "cuda" or outline) and dtype.itemsize != 2):
        raise UnsupportedProblem(
            f"load takes fp16 and bf16 on a GPU, on the CPU fp32 and fp64 too; this would be {dtype} on {place}: pass "
            "dtype=torch.bfloat16"
        )
    with torch.inference_mode(False), torch.no_grad():
        model = LoadedModel(config, folder.generation, dtype)
        check_model(model)
        return _fill(model, folder, place, dtype, progress, outline)


def _own_dtype(folder: Folder, body: str) -> torch.dtype:
    """As the config says, or the checkpoint's embeddings are, at the path ``body``, or a head that they are tied to."""
    text = folder.config.get("text_config")
    for config in (folder.config, text if isinstance(text, dict) else {}):
        said_one = config.get("dtype", config.get("torch_dtype"))
        if isinstance(said_one, str) and said_one in _DTYPES:
            return _DTYPES[said_one]
    names = f"{body}.{_TABLE}", _TABLE, "lm_head.weight"
    table = next((folder.entries[name] for name in names if name in folder.entries), None)
    return table.dtype if table is not None and table.dtype in PLAIN else torch.bfloat16


def _fill(
    model: LoadedModel, folder: Folder, device: torch.device, dtype: torch.dtype, progress: bool, outline: bool
) -> LoadedModel:
    """``model`` with the weights of ``folder``, all of whose names and shapes are checked before the first is read."""
    scheme = read_scheme(folder.config["quantization_config"]) if folder.config.get("quantization_config") else None
    stored = _by_module(folder, model)
    tied = _tied_head(model, folder, stored)
    modules = [_module(model, path, part, stored, scheme) for path, part in model.parts.items() if path != tied]
    for module in modules:
        module.check(folder)
    if outline:
        modules = _one_of_each(model, modules, folder)
    room, need = free_bytes(device), sum(module.bytes(folder, dtype) for module in modules)
    if need > room:
        raise UnsupportedProblem(f"the weights of {folder.path} take {need} bytes, and {device} has {room}: see dtype=")
    total = sum(folder.entries[name].bytes for names in stored.values() for name in names.values())
    with _bar(progress, total) as advance:
        for module in modules:
            module.put(model, (Blank if outline else Reading)(folder, device, dtype, advance))
    if tied is not None:
        model.lm_head.weight = model.model.embed_tokens.weight  # type: ignore[union-attr]
    return model.to(device).eval()  # tables of one number


def _one_of_each(model: LoadedModel, modules: list[Stored], folder: Folder) -> list[Stored]:
    """The modules outside of layers, those of the first layer of each kind and of the last, whose MLP a prompt's last
    token alone goes through: ``model`` then has these layers alone.
    """
    layers: Any = model.model.layers
    kinds: list[list[Any]] = [[own.self_attn.layer_type, own.self_attn.sliding_window] for own in layers]
    parts: list[list[Stored]] = [[] for _ in layers]
    others = []
    for module in modules:
        found = _LAYER.match(module.path)
        if found is None:
            others.append(module)
            continue
        entries = [folder.entries[name] for names in module.tensors for _, name in sorted(names.items())]
        kinds[int(found[1])].append([found[2], [(entry.shape, entry.dtype) for entry in entries]])
        parts[int(found[1])].append(module)
    first = [i for i, kind in enumerate(kinds) if kind not in kinds[:i] or i == len(kinds) - 1]
    held = [layers[i] for i in first]
    read = [
        replace(m, path=f"model.layers.{at}.{m.path.split('.', 3)[3]}") for at, i in enumerate(first) for m in parts[i]
    ]
    model.model.layers = torch.nn.ModuleList(held)
    return [*others, *read]


# ---- names ----------------------------------------------------------------------------------------------


def _by_module(folder: Folder, model: LoadedModel) -> dict[str, dict[str, str]]:
    """The names of each stored module's tensors, by what stands behind the module's own: ``{"weight": ...}``.

    Raises:
        UnsupportedProblem: a tensor of no module: the model is not what its config says.
    """
    stored: dict[str, dict[str, str]] = {}
    parts: dict[str, list[str]] = {}
    for path, part in model.parts.items():
        for one in _stored_names(model, path, part):
            stored[one] = {}
            parts.setdefault(one, []).append(part.tensor)
    # Saved from the model without its head, names have nothing in front.
    front = f"{model.config.body_path}." if _TABLE in folder.entries else ""
    for name in folder.entries:
        if IGNORED.search(name) or model.config.is_unread(name):
            continue
        module, suffix = front + name, ""
        while module and module not in stored:
            module, _, last = module.rpartition(".")
            suffix = f"{last}.{suffix}" if suffix else last
        if not module or not suffix or not _holds(parts, module, suffix):
            if name in folder.surplus:
                continue
            raise UnsupportedProblem(
                f"{folder.path} has a tensor {quote(name)}, of no module of a {model.config.model_type} for causal "
                "language modelling: load it with transformers"
            )
        stored[module][suffix] = name
    return stored


def _holds(parts: dict[str, list[str]], module: str, suffix: str) -> bool:
    """Whether a tensor belongs to one of the parts that are stored in ``module``."""
    return any(not own or suffix == own or (own.endswith("_") and suffix.startswith(own)) for own in parts[module])


def _stored_names(model: LoadedModel, path: str, part: LayerPart) -> list[str]:
    """Names in the checkpoint of what is at ``path``."""
    front = path.removesuffix(part.path)
    names = [f"{front}{name}".rstrip(".") for name in part.stored]  # a layer's own tensors have no module
    return [re.sub(r"^model\.", f"{model.config.body_path}.", name) for name in names]


def _module(
    model: LoadedModel, path: str, part: LayerPart, stored: dict[str, dict[str, str]], scheme: Scheme | None
) -> Stored:
    """The stored tensors of the module at ``path``."""
    sizes, names = model.config.sizes(), _stored_names(model, path, part)
    columns = () if part.columns is None else (sizes[part.columns],)
    rows = [sizes[one] for one in part.rows]
    held = [stored[n] for n in names]
    parent, _, last = path.rpartition(".")
    experts, width = (
        (sizes["experts"], "rows" if last == "gate_up_proj" else "columns") if parent.endswith(".experts") else (0, "")
    )
    if part.tensor.endswith("_"):
        start = part.tensor
        own = [{s.removeprefix(start): full for s, full in one.items() if s.startswith(start)} for one in held]
        return StoredExperts(path, names, own, rows, columns, True, scheme, experts, width)
    if part.tensor:
        held = [{"weight": one[part.tensor]} if part.tensor in one else {} for one in held]
    return Stored(path, names, held, rows, columns, model.config.has_bias(part), scheme, experts, width)


def _tied_head(model: LoadedModel, folder: Folder, stored: dict[str, dict[str, str]]) -> str | None:
    """The head's path, where its weight is the embedding's.

    As in transformers, what is stored apart and differs is not tied. A config that does not say and a checkpoint
    without a head leave nothing else. Of two names for one tensor safetensors' save_model keeps the head's.
    """
    head, table = stored["lm_head"], stored[f"{model.config.body_path}.embed_tokens"]
    said_so = model.config.tied
    if said_so is None:
        said_so = not head
    if not said_so:
        return None
    if head.keys() == {"weight"} and not table:
        table["weight"] = head.pop("weight")
    if not head:
        return "lm_head"
    if head.keys() != {"weight"} or table.keys() != {"weight"}:
        return None
    names = head["weight"], table["weight"]
    if len({(folder.entries[name].shape, folder.entries[name].dtype) for name in names}) > 1:
        return None
    if not torch.equal(*map(folder.read, names)):
        return None
    head.clear()
    return "lm_head"


# ---- progress -------------------------------------------------------------------------------------------


@contextmanager
def _bar(shown: bool, total: int) -> Iterator[Callable[[int], None]]:
    """A callback for each number of bytes that has been read: it moves a bar on a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    console = Console(stderr=True)
    columns = TextColumn("load"), BarColumn(), DownloadColumn(), TransferSpeedColumn()
    with Progress(*columns, console=console, transient=True, disable=not (shown and console.is_terminal)) as bar:
        task = bar.add_task("", total=total)
        yield lambda n: bar.advance(task, n)
