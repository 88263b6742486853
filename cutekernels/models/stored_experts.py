"""gpt-oss's tensors of all experts of a layer together: MXFP4, gate and up in turns, biases."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from cutekernels.errors import UnsupportedProblem
from cutekernels.models.folder import Folder
from cutekernels.models.loaded import LoadedModel, Weighted
from cutekernels.models.stored import Reading, Stored
from cutekernels.quant import QuantizedWeight, concatenate, experts_from_mxfp4, from_mxfp4, why_not
from cutekernels.quant.join import padded
from cutekernels.quant.layout import TILE


@dataclass(frozen=True)
class StoredExperts(Stored):
    """``blocks``, ``scales`` and ``bias`` of all experts' projections, which are rows of one weight in the model.

    ``width`` is "rows" of ``gate_up_proj``, whose gates and up take turns.
    """

    @property
    def halves(self) -> int:
        return 2 if self.width == "rows" else 1

    def check(self, folder: Folder) -> None:
        (found,), (rows,), (columns,) = self.tensors, self.rows, self.columns
        if self.scheme is None or self.scheme.format != "mxfp4" or "blocks" not in found:
            raise UnsupportedProblem(
                f"load takes gpt-oss's experts in MXFP4, and {folder.path} has them otherwise: download the checkpoint "
                "of OpenAI itself"
            )
        if columns % 32 or (self.width != "rows" and rows % TILE):
            raise UnsupportedProblem(
                f"{self.names[0]} has {rows} rows of {columns} in each expert of {self.path.rpartition('.')[2]}; "
                f"MXFP4's blocks are of 32 columns, and kernels take multiples of {TILE} rows: use a checkpoint in 16 "
                "bits"
            )
        expected = {
            "blocks": (self.experts, rows, columns // 32, 16),
            "scales": (self.experts, rows, columns // 32),
            "bias": (self.experts, rows),
        }
        if found.keys() != expected.keys():
            raise UnsupportedProblem(
                f"{self.path} has {', '.join(sorted(found))}, and MXFP4 is {', '.join(expected)}: download the "
                "checkpoint again"
            )
        for suffix, shape in expected.items():
            entry = folder.entries[found[suffix]]
            if entry.shape != shape or (entry.dtype == torch.uint8) != (suffix != "bias"):
                raise UnsupportedProblem(
                    f"{found[suffix]} is {entry.dtype} of shape {entry.shape}, and config.json asks for {shape}: check "
                    "that both are of one checkpoint"
                )

    def put(self, model: LoadedModel, reading: Reading) -> None:
        module, (found,), (rows,), (columns,) = model.get_submodule(self.path), self.tensors, self.rows, self.columns
        assert isinstance(module, Weighted)
        blocks, scales = reading.as_stored(found["blocks"]), reading.as_stored(found["scales"])
        bias = torch.empty(self.experts, rows, dtype=reading.dtype, device=reading.device)
        reading.into(bias, found["bias"])
        bias = torch.cat([bias[:, i :: self.halves] for i in range(self.halves)], 1)
        if self.tile == (rows // self.halves, columns):
            weight = experts_from_mxfp4(blocks, scales, interleaved=self.halves == 2, dtype=reading.dtype).weight
        else:
            weight, bias = self._pad(blocks, scales, bias, reading.dtype)
        reason = why_not(weight) if reading.device.type == "cuda" else None
        if reason is not None:
            raise UnsupportedProblem(f"{self.names[0]}: {reason}")
        module.put("weight", weight)
        module.put("bias", bias.flatten())

    def _pad(self, blocks: Tensor, scales: Tensor, bias: Tensor, dtype: torch.dtype) -> tuple[QuantizedWeight, Tensor]:
        """The weight and the bias of a width that fills no tile, which zeros fill."""
        parts = [
            padded(from_mxfp4(own[i :: self.halves], powers[i :: self.halves], dtype=dtype), *self.tile)
            for own, powers in zip(blocks, scales, strict=True)
            for i in range(self.halves)
        ]
        weight = concatenate(parts)
        assert weight is not None
        bias = bias.unflatten(1, (self.halves, -1))
        return weight, torch.nn.functional.pad(bias, (0, self.tile[0] - bias.shape[2]))
