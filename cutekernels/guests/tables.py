"""Tables that vLLM's and SGLang's loaders read, from the winners of guests: which rows, under which names.

A fused MoE's table is ``E=128,N=768,device_name=NVIDIA_H200,dtype=fp8_w8a8,block_shape=[128,128].json``, a block FP8
product's ``N=4096,K=7168,device_name=...``: an object of batch sizes, as text, with six numbers each. Names follow the
engines' public source; where the two differ, :class:`Engine` says how. Rows are data from a database: their texts are
parsed here, and no module is imported for them.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from cutekernels import gpu as gpus
from cutekernels.db.store import Trial, replace_file
from cutekernels.errors import StoreError, UnknownGpu

KEYS = ("BLOCK_SIZE_M", "BLOCK_SIZE_N", "BLOCK_SIZE_K", "GROUP_SIZE_M", "num_warps", "num_stages")
_SHAPES = {  # a kind of table: the fields of its problems, and the letters that its name has for some of them
    "moe": ({"m", "experts", "n", "k", "top_k"}, {"E": "experts", "N": "n"}),
    "linear": ({"m", "n", "k"}, {"N": "n", "K": "k"}),
}
_DEFAULTS: dict[str, dict[str, str | int]] = {  # of fields that a row's text leaves out
    "moe": {"dtype": "bf16", "block_n": 0, "block_k": 0},
    "linear": {"dtype": "fp8_w8a8", "block_n": 128, "block_k": 128},
}
FIELDS = sorted({"dtype", "block_n", "block_k"}.union(*(needs for needs, _ in _SHAPES.values())))
_UNNAMED = ("bf16", "fp16")  # types of tables whose name has none
_NUMBER = re.compile(r"[1-9][0-9]{0,8}")
_DEVICE = re.compile(r"[^\x00-\x20/\x7f]{1,100}")


@dataclass(frozen=True)
class Engine:
    """How one engine names a table.

    Attributes:
        guests: beginning of the ops whose rows are its own, unless another op is asked for.
        spaced: whether there is a space in a block's shape.
        folder: where tables of one Triton version lie, below the folder that its variable names.
        variable: the environment variable that names a folder of MoE tables.
        linear: its own folder, which alone is searched for tables of block FP8 products.
    """

    guests: str
    spaced: bool
    folder: str
    variable: str
    linear: str

    def device(self, kind: str, product: str) -> str:
        """A GPU's name in a file's name."""
        if self.spaced:
            return product.replace(" ", "_")
        words = re.sub(r"[\s/]+", "_", product)
        # vLLM has one name for a family, for its MoE alone.
        return "NVIDIA_H200" if kind == "moe" and "H200" in words.split("_") else words

    def name(self, kind: str, problem: Mapping[str, str | int], product: str) -> str:
        """The file's name."""
        words = [f"{letter}={problem[field]}" for letter, field in _SHAPES[kind][1].items()]
        words.append(f"device_name={self.device(kind, product)}")
        words += [] if problem["dtype"] in _UNNAMED else [f"dtype={problem['dtype']}"]
        n, k = problem["block_n"], problem["block_k"]
        words += [f"block_shape=[{n},{' ' * self.spaced}{k}]"] if n and k else []
        return ",".join(words) + ".json"


ENGINES = {
    "vllm": Engine(
        "cutekernels.guests.vllm:", False, "", "VLLM_TUNED_CONFIG_FOLDER",
        "vllm/model_executor/layers/quantization/utils/configs",
    ),
    "sglang": Engine(
        "cutekernels.guests.sglang:", True, "configs/triton_{triton}", "SGLANG_MOE_CONFIG_DIR",
        "sglang/srt/layers/quantization/configs",
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Table:
    """One file: its path below the folder that is asked for, and the winner of each batch size."""

    path: str
    kind: str
    rows: Mapping[int, Trial]

    def text(self) -> str:
        """What the engine's loader reads."""
        entries = {str(m): _config(self.rows[m]) for m in sorted(self.rows)}
        return json.dumps(entries, indent=4) + "\n"

    def certificate(self) -> str:
        """The evidence for each entry: the whole row, with the final that chose it."""
        entries = {str(m): self.rows[m].as_row() for m in sorted(self.rows)}
        return json.dumps(entries, indent=1) + "\n"


def tables(format: str, winners: Iterable[Trial], *, op: str | None = None, device: str | None = None) -> list[Table]:
    """The tables that ``winners`` make for ``format``, ``"vllm"`` or ``"sglang"``.

    Args:
        op: the guest whose rows they are, ``module:function``; None for the engine's ready ones.
        device: the GPU's name as torch has it there; None for the product that the GPU table has.

    Raises:
        StoreError: there are no such rows, or they do not make one table for each name.
    """
    engine = ENGINES[format]
    found: dict[str, tuple[str, dict[int, Trial]]] = {}
    for t in winners:
        if t.origin != "measured" or (t.op != op if op is not None else not t.op.startswith(engine.guests)):
            continue
        problem = fields(t)
        kind = "moe" if "experts" in problem else "linear"
        if not problem or _config(t) is None:
            if op is None:
                continue
            raise StoreError(f"{t.op} [{t.problem}] with [{t.config}] is no row of a fused MoE or a block FP8 product")
        product = _product(t.gpu.name) if device is None else device
        name, folder = engine.name(kind, problem, product), ""
        if not _DEVICE.fullmatch(engine.device(kind, product)):
            raise StoreError(f"a device's name has 1 to 100 characters, none of them '/'; it is {product[:60]!r}")
        if kind == "moe" and engine.folder:
            triton = t.environment.triton
            if not re.fullmatch(r"\d+(\.\d+)*", triton, re.ASCII):  # SGLang fails on a folder of any other version
                raise StoreError(
                    f"{format} finds tables by the version of Triton, numbers as 3.7.1; that of [{t.problem}] is "
                    f"{triton!r}: tune it again with a release of Triton"
                )
            folder = engine.folder.format(triton=triton.replace(".", "_"))
        _, rows = found.setdefault(f"{folder}/{name}".lstrip("/"), (kind, {}))
        _add(rows, int(problem["m"]), t, name)
    if not found:
        whose = op or f"a guest {engine.guests}..."
        raise StoreError(f"the database has no measured winner of {whose} for a table of {format}: tune it first")
    return [Table(path, kind, rows) for path, (kind, rows) in sorted(found.items())]


def write(folder: Path, made: Iterable[Table]) -> list[Path]:
    """Writes each table, after its certificate; the paths of the tables. No file is ever half-written.

    Raises:
        StoreError: a table is there that lacks a certificate, the engine's own or another tuner's; nothing is written.
    """
    made, written = list(made), []
    for table in made:
        path = folder / table.path
        if os.path.lexists(path) and not _certificate(path).exists():
            raise StoreError(
                f"{path} was not exported here, for it has no certificate: name another folder, or move it"
            )
    for table in made:
        path = folder / table.path
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(_certificate(path), table.certificate())
        replace_file(path, table.text())
        written.append(path)
    return written


def _certificate(path: Path) -> Path:
    return path.with_suffix(".certificate.json")


def _add(rows: dict[int, Trial], m: int, t: Trial, name: str) -> None:
    """Adds a row to its table, in which everything but ``m`` is the same. Raises StoreError."""
    for other in rows.values():
        mine, theirs = (" ".join(w for w in x.problem.split() if not w.startswith("m=")) for x in (t, other))
        if mine != theirs:
            raise StoreError(
                f"{name} would hold rows of two layers, [{theirs}] and [{mine}]: choose one with --problem"
            )
        sources = [f"{x.op} on {x.gpu.name} with Triton {x.environment.triton or 'unknown'}" for x in (other, t)]
        if len(set(sources)) > 1:
            raise StoreError(
                f"{name} would hold rows of {' and of '.join(sources)}: "
                f"choose with --gpu or --op, or tune the older again"
            )
    if m in rows and t.revision < rows[m].revision:
        return
    rows[m] = t


def fields(t: Trial) -> dict[str, str | int]:
    """The fields of a row's problem, with their defaults; none for a problem that no table is of."""
    words = _words(t.problem)
    dtype = words.pop("dtype", "any")
    if not re.fullmatch(r"[a-z][a-z0-9_]*", dtype) or not all(map(_NUMBER.fullmatch, words.values())):
        return {}
    named = {name: int(value) for name, value in words.items()} | ({} if dtype == "any" else {"dtype": dtype})
    for kind, (needs, _) in _SHAPES.items():
        if needs <= named.keys() <= needs | _DEFAULTS[kind].keys():
            return _DEFAULTS[kind] | named
    return {}


def _config(t: Trial) -> dict[str, int] | None:
    """The entry of a row, None for a config that has other knobs."""
    words = _words(t.config)
    if words.keys() != set(KEYS) or not all(map(_NUMBER.fullmatch, words.values())):
        return None
    return {key: int(words[key]) for key in KEYS}


def _words(text: str) -> dict[str, str]:
    """A problem's or a config's fields as text; none where one stands twice."""
    pairs = [word.partition("=")[::2] for word in text.split()]
    return dict(pairs) if len(dict(pairs)) == len(pairs) else {}


def _product(name: str) -> str:
    """The product's name of a GPU of the database: the machine's own, as torch has it, or that of the GPU table."""
    with suppress(UnknownGpu):
        if gpus.detect().name == name:
            return str(import_module("torch").cuda.get_device_name())
    try:
        return gpus.lookup(name).product
    except UnknownGpu:
        raise StoreError(
            f"no product of {name} is known: give its name with --device-name, as torch.cuda.get_device_name() has it"
        ) from None
