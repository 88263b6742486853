"""A checkpoint's tensors of a module, plain or quantized, and how it comes into its place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from cutekernels.errors import UnsupportedProblem
from cutekernels.models.folder import Folder
from cutekernels.models.loaded import Apart, LoadedModel, Weighted
from cutekernels.ops.shared.checks import quote
from cutekernels.quant import QuantizedWeight, Scheme, concatenate, read, why_not
from cutekernels.quant.join import kind, padded
from cutekernels.quant.layout import TILE

PLAIN = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_MARKS = (  # of quantized layers
    "qweight", "qzeros", "weight_packed", "weight_scale", "weight_scale_inv", "weight_scale_2", "weight.absmax",
    "_weight_qdata",
)  # fmt: skip


@dataclass(frozen=True)
class Reading:
    """Where weights come from and go to. ``advance`` takes each number of bytes that has been read."""

    folder: Folder
    device: torch.device
    dtype: torch.dtype
    advance: Callable[[int], None]

    def into(self, out: Tensor, name: str) -> None:
        """Copy a tensor, and convert it on the way."""
        out.copy_(self.folder.read(name))
        self._count_bytes(name)

    def as_stored(self, name: str) -> Tensor:
        """A tensor on the device, of its own type."""
        found = self.folder.read(name)
        found = found.clone() if self.device.type == "cpu" else found.to(self.device)
        self._count_bytes(name)
        return found

    def _count_bytes(self, name: str) -> None:
        self.advance(self.folder.entries[name].bytes)


class Blank(Reading):
    """Leaves plain tensors as they were allocated."""

    def into(self, out: Tensor, name: str) -> None:
        pass


@dataclass(frozen=True)
class Stored:
    """The tensors that a checkpoint has of one module of ``LoadedModel``.

    Attributes:
        path: of the module.
        names: of the stored modules whose rows it has.
        tensors: of each, by what stands behind the module's name.
        rows: of each.
        columns: none for a vector.
        bias: whether the config has one.
        scheme: of a quantized model.
        experts: of how many experts they are, whose weights are to be one; 0: of none.
        width: which of an expert's ``rows`` or ``columns`` kernels take in whole tiles, and padding fills: "rows" of
            gate and up, "columns" of down.
    """

    path: str
    names: list[str]
    tensors: list[dict[str, str]]
    rows: list[int]
    columns: tuple[int, ...]
    bias: bool
    scheme: Scheme | None
    experts: int = 0
    width: str = ""

    @property
    def halves(self) -> int:
        """Projections in each of ``names``, their rows in turns."""
        return 1

    @property
    def tile(self) -> tuple[int, int]:
        """``(rows, columns)`` of an expert's projection with its width rounded up to tiles of 64.

        To 128 where a scale is that of a block, in all projections of a model alike: down's columns are gate's rows.
        """
        unit = 128 if self.scheme is not None and any(each.block for each in self.scheme.schemes) else TILE
        rows, (columns,) = self.rows[0] // self.halves, self.columns
        if self.width == "rows":
            return -(-rows // unit) * unit, columns
        return rows, -(-columns // unit) * unit

    def packed(self, i: int) -> bool:
        """Whether the ``i``-th stored module is quantized."""
        return self.scheme is not None and self.scheme.holds(self.tensors[i])

    def bytes(self, folder: Folder, dtype: torch.dtype) -> int:
        """Bytes of memory that it takes."""
        entries = [folder.entries[name] for found in self.tensors for name in found.values()]
        return sum(e.bytes // e.dtype.itemsize * dtype.itemsize if e.dtype in PLAIN else e.bytes for e in entries)

    def check(self, folder: Folder) -> None:
        """Raises UnsupportedProblem for tensors that are missing, too many, or not those of the config."""
        for i, (name, found, rows) in enumerate(zip(self.names, self.tensors, self.rows, strict=True)):
            packed = self.packed(i)
            if not packed:
                self._check_plain(folder, name, found)
                _check(folder, f"{name}.weight", found.get("weight"), (rows, *self.columns))
            elif len(self.columns) != 1 or self.path == "model.embed_tokens":
                raise UnsupportedProblem(
                    f"{name} is quantized, and load takes projections that are: load it dequantized"
                )
            if self.bias or not packed:
                _check(folder, f"{name}.bias", found.get("bias"), (rows,) if self.bias else None)

    def _check_plain(self, folder: Folder, name: str, found: dict[str, str]) -> None:
        """Refuses a stored module that is not quantized by its tensors, and has some of one that is."""
        known = {"weight", "bias", *(() if self.scheme is None else self.scheme.ignored)}
        stored = folder.entries[found["weight"]].dtype if "weight" in found else None
        beside = sorted(found.keys() - known)
        if self.scheme is None:
            packed = next((suffix for suffix in _MARKS if suffix in found), None)
            if packed is not None:
                raise UnsupportedProblem(
                    f"{found[packed]} is quantized, and config.json has no quantization_config: add its quantizer's"
                )
        else:
            marks = list(dict.fromkeys(mark for each in self.scheme.schemes for mark in each.marks))
            coded = stored is not None and stored not in PLAIN
            if coded or not {*beside}.isdisjoint(_MARKS) or (stored is None and beside):
                has = ", ".join(beside if stored is None else [f"weight in {stored}", *beside])
                lacks = f"has no {' or '.join(marks)}" if marks else "is quantized against its quantization_config"
                raise UnsupportedProblem(
                    f"{name} {lacks}, and has {has}: download the checkpoint again, or check that its tensors and the "
                    f"quantization_config of config.json ({self.scheme.format}) are of one checkpoint"
                )
        if beside:
            raise UnsupportedProblem(
                f"{quote(found[beside[0]])} is none of {name}'s tensors, as config.json has it: check its "
                "quantization_config, and that both are of one checkpoint"
            )

    def put(self, model: LoadedModel, reading: Reading) -> None:
        """Read all of it, in its place in ``model``."""
        module = model.get_submodule(self.path)
        assert isinstance(module, Weighted)
        packed = [self.packed(i) for i in range(len(self.names))]
        if not any(packed):
            dtype = module.weight.dtype  # fp32 in models of any type, of a wide one
            for kind in ("weight", "bias") if self.bias else ("weight",):
                module.put(kind, self._rows(kind, range(len(self.names)), replace(reading, dtype=dtype)))
            return
        weights = [self._read(i, reading) if one else None for i, one in enumerate(packed)]
        if self.experts:
            weights = [None if w is None else padded(w, *self.tile) for w in weights]
        whole = concatenate([w for w in weights if w is not None]) if all(packed) else None
        if self.experts and (whole is None or self.tile[0] % TILE):
            raise UnsupportedProblem(_unlike(self.names, weights))
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

    def _rows(self, kind: str, which: Sequence[int], reading: Reading) -> Tensor:
        """Plain weights or biases of some of the stored modules, in one tensor."""
        rows, columns = [self.rows[i] for i in which], self.columns if kind == "weight" else ()
        whole = torch.empty((sum(rows), *columns), dtype=reading.dtype, device=reading.device)
        for own, i in zip(whole.split(rows), which, strict=True):
            reading.into(own, self.tensors[i][kind])
        return whole

    def _read(self, i: int, reading: Reading) -> QuantizedWeight:
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
        reason = why_not(weight) if reading.device.type == "cuda" else None
        if reason is not None:
            raise UnsupportedProblem(f"{name}: {reason}")
        return weight


def _check(folder: Folder, name: str, stored: str | None, shape: tuple[int, ...] | None) -> None:
    """Refuses a tensor that is missing, or another one than the config asks for; no ``shape``: there is to be none."""
    if stored is None and shape is not None:
        raise UnsupportedProblem(f"{folder.path} lacks {name}, of shape {shape}: download the checkpoint again")
    if stored is None:
        return
    entry = folder.entries[stored]
    if shape is None or entry.shape != shape or entry.dtype not in PLAIN:
        raise UnsupportedProblem(
            f"{stored} is {entry.dtype} of shape {entry.shape}, and config.json asks for "
            f"{'none' if shape is None else f'a float of {shape}'}: check that both are of one checkpoint"
        )


def _unlike(names: Sequence[str], weights: Sequence[QuantizedWeight | None]) -> str:
    """Why experts' projections are not one weight: the first of them that has not what the others have."""
    kinds = [None if w is None else kind(w) for w in weights]
    usual = max(kinds, key=kinds.count)
    odd = next((i for i, one in enumerate(kinds) if one != usual), None)
    if odd is not None:
        shown = ["in 16 bits" if w is None else repr(w) for w in (weights[odd], weights[kinds.index(usual)])]
        return (
            f"{names[odd]} is {shown[0]}, and {names[kinds.index(usual)]} is {shown[1]}: experts of a layer are "
            "quantized alike; take a checkpoint whose experts are, or one in 16 bits"
        )
    first = weights[0]
    assert first is not None
    unit = max(TILE, first.scale_rows)
    if first.shape[0] % unit:
        blocks = unit > TILE
        return (
            f"{names[0]} has {first.shape[0]} rows, and quantized experts have multiples of {unit}"
            f"{' in blocks of 128 x 128' if blocks else ''}: take a checkpoint of the model in 16 bits"
            f"{', or one with a scale for each row' if blocks and not first.shape[0] % TILE else ''}"
        )
    moved = next((n for n, w in zip(names, weights, strict=True) if w is not None and w.order is not None), names[0])
    return (
        f"{moved} orders its columns (GPTQ's act-order) as other experts do not, and all of a layer have one input: "
        "take a checkpoint without act-order (desc_act=false)"
    )
