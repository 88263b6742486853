"""``load``: a checkpoint from its folder into a model that a ``Decoder`` takes, by this library and torch alone."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from cutekernels.errors import UnsupportedProblem
from cutekernels.models import architectures
from cutekernels.models.accepted import check_model
from cutekernels.models.architectures import Part
from cutekernels.models.arguments import free_bytes
from cutekernels.models.folder import Folder
from cutekernels.models.loaded import Apart, LoadedModel, Weighted
from cutekernels.ops.shared.checks import check_flag, check_place, said
from cutekernels.quant import QuantizedWeight, Scheme, concatenate, read, read_config

_PLAIN = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_DTYPES = {str(one).removeprefix("torch."): one for one in _PLAIN}
# Nothing that a decoder computes: tables of old checkpoints, and scales of caches in FP8, which ours are not.
_IGNORED = re.compile(r"\.(rotary_emb\.inv_freq|[kqv]_scale|kv_scale|[kv]_zero_point|output_scale)$")
_MARKS = ("qweight", "weight_packed", "weight_scale", "weight_scale_inv", "weight.absmax", "_weight_qdata")  # of layers


def load(
    path: str | os.PathLike[str],
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    progress: bool = True,
) -> LoadedModel:
    """A checkpoint in Hugging Face's layout, for :class:`Decoder`. Needs neither transformers nor safetensors.

    ::

        model = ck.models.load("Qwen2.5-7B-Instruct", dtype=torch.bfloat16)
        decoder = ck.models.Decoder.from_transformers(model)

    Files are mapped, checked as a whole, and copied to the device a tensor at a time: beside the model itself no more
    than one layer's projection is in memory. Quantized projections stay packed.

    Args:
        path: a folder with ``config.json`` and ``model.safetensors``, or shards and their index, of Llama, Mistral,
            Qwen2, Qwen3, Gemma 2 or Gemma 3 (text). Nothing is downloaded.
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
    folder = Folder(path)
    config = architectures.read_config(folder.config)
    place = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if device is None else device)
    dtype = dtype or _own_dtype(folder)
    if dtype not in _PLAIN or (place.type == "cuda" and dtype.itemsize != 2):
        raise UnsupportedProblem(
            f"load takes fp16 and bf16 on a GPU, on the CPU fp32 and fp64 too; this would be {dtype} on {place}: pass "
            "dtype=torch.bfloat16"
        )
    with torch.inference_mode(False), torch.no_grad():
        model = LoadedModel(config, folder.generation, dtype)
        check_model(model)
        return _filled(model, folder, place, dtype, progress)


def _own_dtype(folder: Folder) -> torch.dtype:
    """What the config says, or the checkpoint's embeddings are."""
    said_one = folder.config.get("dtype", folder.config.get("torch_dtype"))
    if isinstance(said_one, str) and said_one in _DTYPES:
        return _DTYPES[said_one]
    table = folder.entries.get("model.embed_tokens.weight")
    return table.dtype if table is not None and table.dtype in _PLAIN else torch.bfloat16


def _filled(
    model: LoadedModel, folder: Folder, device: torch.device, dtype: torch.dtype, progress: bool
) -> LoadedModel:
    """``model`` with the weights of ``folder``, all of whose names and shapes are checked before the first is read."""
    scheme = read_config(folder.config["quantization_config"]) if folder.config.get("quantization_config") else None
    stored = _by_module(folder, model)
    tied = _tied(model, folder, stored)
    modules = [_module(model, path, part, stored, scheme) for path, part in model.parts.items() if path != tied]
    for module in modules:
        module.check(folder)
    room, need = free_bytes(device), sum(_bytes(folder, names, dtype) for names in stored.values())
    if need > room:
        raise UnsupportedProblem(f"the weights of {folder.path} take {need} bytes, and {device} has {room}: see dtype=")
    total = sum(folder.entries[name].bytes for names in stored.values() for name in names.values())
    with _bar(progress, total) as advance:
        for module in modules:
            module.put(model, _Reading(folder, device, dtype, advance))
    if tied is not None:
        model.lm_head.weight = model.model.embed_tokens.weight  # type: ignore[union-attr]
    return model.to(device).eval()  # tables of one number


# ---- names ----------------------------------------------------------------------------------------------


def _by_module(folder: Folder, model: LoadedModel) -> dict[str, dict[str, str]]:
    """The names of each stored module's tensors, by what stands behind the module's own: ``{"weight": ...}``.

    Raises:
        UnsupportedProblem: a tensor of no module: the model is not what its config says.
    """
    stored: dict[str, dict[str, str]] = {one: {} for path, part in model.parts.items() for one in _stored(path, part)}
    for name in folder.entries:
        if _IGNORED.search(name):
            continue
        module, suffix = name, ""
        while module and module not in stored:
            module, _, last = module.rpartition(".")
            suffix = f"{last}.{suffix}" if suffix else last
        if not module or not suffix:
            raise UnsupportedProblem(
                f"{folder.path} has a tensor {said(name)}, of no module of a {model.config.model_type} for causal "
                "language modelling: load it with transformers"
            )
        stored[module][suffix] = name
    return stored


def _stored(path: str, part: Part) -> list[str]:
    """Names in the checkpoint of what is at ``path``."""
    front = path.removesuffix(part.path)
    return [f"{front}{name}" for name in part.stored]


def _module(
    model: LoadedModel, path: str, part: Part, stored: dict[str, dict[str, str]], scheme: Scheme | None
) -> _Module:
    sizes, names = model.config.sizes(), _stored(path, part)
    columns = () if part.columns is None else (sizes[part.columns],)
    rows = [sizes[one] for one in part.rows]
    return _Module(path, names, [stored[n] for n in names], rows, columns, model.config.has_bias(part), scheme)


def _tied(model: LoadedModel, folder: Folder, stored: dict[str, dict[str, str]]) -> str | None:
    """The head's path, where its weight is the embedding's.

    As in transformers, what is stored apart and differs is not tied. A config that does not say and a checkpoint
    without a head leave nothing else.
    """
    head, table = stored["lm_head"], stored["model.embed_tokens"]
    said_so = model.config.tied
    if said_so is None:
        said_so = not head
    if not said_so:
        return None
    if not head:
        return "lm_head"
    names = head.get("weight"), table.get("weight")
    if len(head) > 1 or None in names or folder.entries[names[0]].shape != folder.entries[names[1]].shape:  # type: ignore[index]
        return None
    if not torch.equal(*(folder.read(name) for name in names if name is not None)):
        return None
    head.clear()
    return "lm_head"


# ---- weights --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Reading:
    """Where weights come from and go to. ``advance`` takes each number of bytes that has been read."""

    folder: Folder
    device: torch.device
    dtype: torch.dtype
    advance: Callable[[int], None]

    def into(self, out: Tensor, name: str) -> None:
        """Copy a tensor, and convert it on the way."""
        out.copy_(self.folder.read(name))
        self._done(name)

    def as_stored(self, name: str) -> Tensor:
        """A tensor on the device, of its own type."""
        found = self.folder.read(name)
        found = found.clone() if self.device.type == "cpu" else found.to(self.device)
        self._done(name)
        return found

    def _done(self, name: str) -> None:
        self.folder.forget(name)
        self.advance(self.folder.entries[name].bytes)


@dataclass(frozen=True)
class _Module:
    """What is stored of one module of ``LoadedModel``; its shapes are checked before anything is read.

    Attributes:
        path: of the module.
        names: of the stored modules whose rows it has.
        tensors: of each, by what stands behind the module's name.
        rows: of each.
        columns: none for a vector.
        bias: whether the config has one.
        scheme: of a quantized model.
    """

    path: str
    names: list[str]
    tensors: list[dict[str, str]]
    rows: list[int]
    columns: tuple[int, ...]
    bias: bool
    scheme: Scheme | None

    def packed(self, i: int) -> bool:
        """Whether the ``i``-th stored module is quantized."""
        return self.scheme is not None and self.scheme.holds(self.tensors[i])

    def check(self, folder: Folder) -> None:
        """Raises UnsupportedProblem for tensors that are missing, too many, or not those of the config."""
        for i, (name, found, rows) in enumerate(zip(self.names, self.tensors, self.rows, strict=True)):
            if self.bias or not self.packed(i):
                _check(folder, f"{name}.bias", found.get("bias"), (rows,) if self.bias else None)
            packed = next((suffix for suffix in _MARKS if suffix in found), None)
            if self.scheme is None and packed is not None:
                raise UnsupportedProblem(
                    f"{found[packed]} is quantized, and config.json has no quantization_config: add its quantizer's"
                )
            if not self.packed(i):
                _check(folder, f"{name}.weight", found.get("weight"), (rows, *self.columns))
            elif len(self.columns) != 1 or self.path == "model.embed_tokens":
                raise UnsupportedProblem(
                    f"{name} is quantized, and load takes projections that are: load it dequantized"
                )
            unknown = found.keys() - {"weight", "bias"}
            if unknown and not self.packed(i):
                raise UnsupportedProblem(
                    f"{found[min(unknown)]} is none of {name}'s tensors, as config.json has it: check its "
                    "quantization_config, and that both are of one checkpoint"
                )

    def put(self, model: LoadedModel, reading: _Reading) -> None:
        """Read all of it, in its place in ``model``."""
        module = model.get_submodule(self.path)
        assert isinstance(module, Weighted)
        packed = [self.packed(i) for i in range(len(self.names))]
        if not any(packed):
            for kind in ("weight", "bias") if self.bias else ("weight",):
                module.put(kind, self._rows(kind, range(len(self.names)), reading))
            return
        weights = [self._read(i, reading) if one else None for i, one in enumerate(packed)]
        whole = concatenate([w for w in weights if w is not None]) if all(packed) else None
        if whole is not None:
            module.put("weight", whole)
            if self.bias:
                module.put("bias", self._rows("bias", range(len(self.names)), reading))
            return
        parts = []
        for i, (rows, weight) in enumerate(zip(self.rows, weights, strict=True)):
            part = Weighted((rows, *self.columns), self.bias, reading.dtype)
            part.put("weight", self._rows("weight", [i], reading) if weight is None else weight)
            if self.bias:
                part.put("bias", self._rows("bias", [i], reading))
            parts.append(part)
        parent, _, name = self.path.rpartition(".")
        setattr(model.get_submodule(parent), name, Apart(parts))

    def _rows(self, kind: str, which: Sequence[int], reading: _Reading) -> Tensor:
        """Plain weights or biases of some of the stored modules, in one tensor."""
        rows, columns = [self.rows[i] for i in which], self.columns if kind == "weight" else ()
        whole = torch.empty((sum(rows), *columns), dtype=reading.dtype, device=reading.device)
        for own, i in zip(whole.split(rows), which, strict=True):
            reading.into(own, self.tensors[i][kind])
        return whole

    def _read(self, i: int, reading: _Reading) -> QuantizedWeight:
        """The quantized weight of the ``i``-th stored module."""
        assert self.scheme is not None
        name, expected = self.names[i], (self.rows[i], *self.columns)
        tensors = {suffix: reading.as_stored(full) for suffix, full in self.tensors[i].items() if suffix != "bias"}
        bias = None if self.bias else self.tensors[i].get("bias")
        if bias is not None and bool(reading.as_stored(bias).any()):  # some quantizers store zeros where there is none
            raise UnsupportedProblem(f"{name} has a bias, and config.json says that it has none: check both")
        try:
            weight = read(tensors, self.scheme, dtype=reading.dtype, module=name)
        except UnsupportedProblem as error:
            raise UnsupportedProblem(f"{name}: {error}") from error
        if weight.shape != expected:
            raise UnsupportedProblem(f"{name} is quantized from {weight.shape}, and config.json asks for {expected}")
        return weight


def _check(folder: Folder, name: str, stored: str | None, shape: tuple[int, ...] | None) -> None:
    """Refuses a tensor that is missing, or another one than the config asks for; no ``shape``: there is to be none."""
    if stored is None and shape is not None:
        raise UnsupportedProblem(f"{folder.path} lacks {name}, of shape {shape}: download the checkpoint again")
    if stored is None:
        return
    entry = folder.entries[stored]
    if shape is None or entry.shape != shape or entry.dtype not in _PLAIN:
        raise UnsupportedProblem(
            f"{stored} is {entry.dtype} of shape {entry.shape}, and config.json asks for "
            f"{'none' if shape is None else f'a float of {shape}'}: check that both are of one checkpoint"
        )


def _bytes(folder: Folder, names: dict[str, str], dtype: torch.dtype) -> int:
    """Of a stored module on the device."""
    entries = [folder.entries[name] for name in names.values()]
    return sum(e.bytes // e.dtype.itemsize * dtype.itemsize if e.dtype in _PLAIN else e.bytes for e in entries)


# ---- progress -------------------------------------------------------------------------------------------


@contextmanager
def _bar(shown: bool, total: int) -> Iterator[Callable[[int], None]]:
    """What takes each number of bytes that has been read, under a bar on a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    console = Console(stderr=True)
    columns = TextColumn("load"), BarColumn(), DownloadColumn(), TransferSpeedColumn()
    with Progress(*columns, console=console, transient=True, disable=not (shown and console.is_terminal)) as bar:
        task = bar.add_task("", total=total)
        yield lambda n: bar.advance(task, n)
