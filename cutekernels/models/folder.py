"""A checkpoint's folder as Hugging Face lays it out: ``config.json``, ``generation_config.json``, safetensors."""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

from torch import Tensor

from cutekernels.errors import UnsupportedProblem
from cutekernels.models.safetensors import Entry, TensorFile
from cutekernels.ops.shared.checks import quote

_CONFIG, _GENERATION = "config.json", "generation_config.json"
_MODELOPT = "hf_quant_config.json"  # of NVIDIA's older checkpoints, in the place of quantization_config
_WHOLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_MOST_JSON = 2**28  # bytes of a JSON file; an index of 100,000 tensors has 10 MB


class Folder:
    """A checkpoint's contents. Headers are read and checked here, tensors by :meth:`read`.

    Attributes:
        config: of ``config.json``.
        generation: of ``generation_config.json``, or None where there is no such file.
        entries: every tensor, by name.
        surplus: those that the index does not name, beside tensors that it does.

    Raises:
        UnsupportedProblem: no folder, files that are missing or broken, or that lie outside of it.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        if not isinstance(path, str | os.PathLike):
            raise UnsupportedProblem(f"load takes the path of a checkpoint's folder; got {quote(path)}: pass one")
        self.path = Path(path)
        try:
            self._read_headers(path)
        except OSError as error:  # no permission, a name that is too long
            raise UnsupportedProblem(
                f"{quote(str(error.filename or path))} cannot be read, {error.strerror}: pass a folder that can"
            ) from error

    def _read_headers(self, path: str | os.PathLike[str]) -> None:
        if not self.path.is_dir():
            raise UnsupportedProblem(
                f"load takes the folder of a checkpoint, with {_CONFIG} and safetensors, and {quote(str(path))} is "
                "none: download the model first (hf download NAME --local-dir FOLDER) and pass the folder"
            )
        self.config = read_json(self.path / _CONFIG)
        quantizer = self.path / _MODELOPT
        if not self.config.get("quantization_config") and quantizer.exists():
            self.config["quantization_config"] = {"quant_method": "modelopt", **read_json(quantizer)}
        generation = self.path / _GENERATION
        self.generation = read_json(generation) if generation.exists() else None
        self._files, self.surplus = self._open()
        self.entries: dict[str, Entry] = {name: file.entries[name] for name, file in self._files.items()}

    def read(self, name: str) -> Tensor:
        """A tensor over the pages of its file; copy what is to stay."""
        return self._files[name].read(name)

    def _open(self) -> tuple[dict[str, TensorFile], set[str]]:
        """The file of each tensor (the only one, or as the index has it), and the tensors that the index does not name.

        Another shard may hold a tensor too that the index names; of those that it does not name only one may.
        """
        places = self._index() if (self.path / _INDEX).exists() else {}
        if (self.path / _WHOLE).exists() and _WHOLE not in places.values():  # beside an index that a later save left
            whole = TensorFile(self.path / _WHOLE)
            return dict.fromkeys(whole.entries, whole), set()
        if not places:
            pickled = sorted(p.name for p in self.path.glob("*.bin"))
            hint = f"; {pickled[0]} may hold code, and is not read: save the model as safetensors" if pickled else ""
            raise UnsupportedProblem(
                f"{self.path} has neither {_WHOLE} nor {_INDEX}{hint or ': download the checkpoint again'}"
            )
        names = sorted(set(places.values()))
        absent = [name for name in names if not (self.path / name).exists()]
        if absent:
            shown = ", ".join(map(quote, absent[:8])) + f" and {len(absent) - 8} more" * (len(absent) > 8)
            raise UnsupportedProblem(f"{self.path} lacks {shown} of {len(names)} shards: download the checkpoint again")
        files = {name: TensorFile(self.path / name) for name in names}
        for tensor, name in places.items():
            if tensor not in files[name].entries:
                raise UnsupportedProblem(
                    f"{_INDEX} has {quote(tensor)} in {name}, which does not hold it: download {self.path} again"
                )
        held = Counter(tensor for file in files.values() for tensor in file.entries)
        surplus = {tensor for tensor, count in held.items() if tensor not in places and count == 1}
        unnamed = {tensor: file for file in files.values() for tensor in surplus & file.entries.keys()}
        return {tensor: files[name] for tensor, name in places.items()} | unnamed, surplus

    def _index(self) -> dict[str, str]:
        """The shard of each tensor."""
        places = read_json(self.path / _INDEX).get("weight_map")
        if not isinstance(places, dict) or not places:
            raise UnsupportedProblem(f"{_INDEX} of {self.path} has no weight_map: download it again")
        for name in places.values():
            plain = isinstance(name, str) and name.endswith(".safetensors") and not set(name) & {"/", "\\", "\0"}
            if not plain:
                raise UnsupportedProblem(
                    f"{_INDEX} of {self.path} names the shard {quote(name)}, and a shard is a .safetensors file of the "
                    "folder itself: do not use this checkpoint"
                )
        return places


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object. Raises UnsupportedProblem for anything else."""
    if not path.is_file():
        raise UnsupportedProblem(f"{path} is missing, or no regular file: download the checkpoint again")
    try:
        with path.open("rb") as file:
            text = file.read(_MOST_JSON + 1)
        if len(text) > _MOST_JSON:
            raise ValueError(f"more than {_MOST_JSON} bytes")
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UnsupportedProblem(f"{path} is no JSON, {quote(str(error))}: download it again") from error
    if not isinstance(found, dict):
        raise UnsupportedProblem(f"{path} is no JSON object: download it again")
    return found
