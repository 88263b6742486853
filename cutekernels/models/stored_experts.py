"""What a checkpoint of gpt-oss stores of all experts of a layer together: MXFP4, gate and up in turns, biases."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from cutekernels.errors import UnsupportedProblem
from cutekernels.models.folder import Folder
from cutekernels.models.loaded import LoadedModel, Weighted
from cutekernels.models.stored import Reading, Stored
from cutekernels.quant import experts_from_mxfp4, why_not


@dataclass(frozen=True)
class StoredExperts(Stored):
    """``blocks``, ``scales`` and ``bias`` of all experts' projections, which are rows of one weight in the model.

    Attributes:
        experts: how many.
    """

    experts: int

    @property
    def interleaved(self) -> bool:
        return self.path.endswith("gate_up_proj")

    def check(self, folder: Folder) -> None:
        (found,), (rows,), (columns,) = self.tensors, self.rows, self.columns
        if self.scheme is None or self.scheme.format != "mxfp4" or "blocks" not in found:
            raise UnsupportedProblem(
                f"load takes gpt-oss's experts in MXFP4, and {folder.path} has them otherwise: download the checkpoint "
                "of OpenAI itself"
            )
        if columns % 32 or rows % (128 if self.interleaved else 64):
            raise UnsupportedProblem(
                f"{self.names[0]} has {rows} rows of {columns} in each expert; kernels take multiples of "
                f"{128 if self.interleaved else 64} and of 32"
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
        module, (found,), (rows,) = model.get_submodule(self.path), self.tensors, self.rows
        assert isinstance(module, Weighted)
        blocks, scales = reading.as_stored(found["blocks"]), reading.as_stored(found["scales"])
        stack = experts_from_mxfp4(blocks, scales, interleaved=self.interleaved, dtype=reading.dtype)
        reason = why_not(stack.weight) if reading.device.type == "cuda" else None
        if reason is not None:
            raise UnsupportedProblem(f"{self.names[0]}: {reason}")
        bias = torch.empty(self.experts, rows, dtype=reading.dtype, device=reading.device)
        reading.into(bias, found["bias"])
        if self.interleaved:
            bias = torch.cat((bias[:, 0::2], bias[:, 1::2]), 1)
        module.put("weight", stack.weight)
        module.put("bias", bias.flatten())
