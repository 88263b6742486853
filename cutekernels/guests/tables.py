"""Tables that vLLM's and SGLang's loaders read, from the winners of guests: which rows, under which names.

A fused MoE's table is ``E=128,N=768,device_name=NVIDIA_H200,dtype=fp8_w8a8,block_shape=[128,128].json``, a block FP8
product's ``N=4096,K=7168,device_name=...``: an object of batch sizes, as text, with six numbers each. Names follow the
engines' public source; where the two differ, :class:`Engine` says how. Rows are data from a database: their texts are
parsed here, and no module is imported for them.
"""

from __future__ import annotations

import json
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
_OPTIONAL = {"dtype": "", "block_n": "0", "block_k": "0"}
_UNNAMED = ("bf16", "fp16")  # types of tables whose name has none
_FP8 = "fp8_w8a8"


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

    def device(self, product: str) -> str:
        """A GPU's name in a file's name."""
        if self.spaced:
            return product.replace(" ", "_")
        words = re.sub(r"[\s/]+", "_", product)
        return "NVIDIA_H200" if "H200" in words.split("_") else words  # vLLM: one name for a family

    def name(self, kind: str, problem: Mapping[str, str], product: str) -> str:
        """The file's name."""
        words = [f"{letter}={problem[field]}" for letter, field in _SHAPES[kind][1].items()]
        words.append(f"device_name={self.device(product)}")
        dtype = problem.get("dtype", "") or (_FP8 if kind == "linear" else "")
        words += [] if not dtype or dtype in _UNNAMED else [f"dtype={dtype}"]
        n, k = (int(problem.get(f"block_{side}", "0")) for side in "nk")
        if kind == "linear":
            n, k = n or 128, k or 128
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
        problem = _problem(t)
        kind = next((k for k, (needs, _) in _SHAPES.items() if needs | _OPTIONAL.keys() == problem.keys()), None)
        if kind is None or _config(t) is None:
            if op is None:
                continue
            raise StoreError(f"{t.op} [{t.problem}] with [{t.config}] is no row of a fused MoE or a block FP8 product")
        name = engine.name(kind, problem, device or _product(t.gpu.name))
        triton = t.environment.triton.replace(".", "_")
        if "/" in triton + engine.device(device or ""):
            raise StoreError(f"no file can be named for Triton {t.environment.triton!r} and the device {device!r}")
        folder = engine.folder.format(triton=triton) if kind == "moe" else ""
        _, rows = found.setdefault(f"{folder}/{name}".lstrip("/"), (kind, {}))
        _add(rows, int(problem["m"]), t, name)
    if not found:
        whose = op or f"a guest {engine.guests}..."
        raise StoreError(f"the database has no measured winner of {whose} for a table of {format}: tune it first")
    return [Table(path, kind, rows) for path, (kind, rows) in sorted(found.items())]


def write(folder: Path, made: Iterable[Table]) -> list[Path]:
    """Writes each table, after its certificate; the paths of the tables. No file is ever half-written."""
    written = []
    for table in made:
        path = folder / table.path
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path.with_suffix(".certificate.json"), table.certificate())
        replace_file(path, table.text())
        written.append(path)
    return written


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
            raise StoreError(f"{name} would hold rows of {' and of '.join(sources)}: name one, or tune the older again")
    if m in rows and t.revision < rows[m].revision:
        return
    rows[m] = t


def _problem(t: Trial) -> dict[str, str]:
    """The fields of a row's problem as text; those that a table's name may leave out have their defaults."""
    words = dict(word.partition("=")[::2] for word in t.problem.split())
    numbers = all(value.isascii() and value.isdigit() for name, value in words.items() if name != "dtype")
    sound = numbers and re.fullmatch(r"[a-z0-9_]*", words.get("dtype", ""))
    return _OPTIONAL | words if sound else {}


def _config(t: Trial) -> dict[str, int] | None:
    """The entry of a row, None for a config that has other knobs."""
    words = dict(word.partition("=")[::2] for word in t.config.split())
    if words.keys() != set(KEYS) or not all(value.isascii() and value.isdigit() for value in words.values()):
        return None
    return {key: int(words[key]) for key in KEYS}


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
