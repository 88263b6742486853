"""Words and bytes of four-bit elements, and the checks that all readers make of a checkpoint's tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from cutekernels.errors import UnsupportedProblem
from cutekernels.quant.layout import dense

_BESIDE = {"bias", "k_scale", "v_scale", "kv_scale", "output_scale", "output_zero_point"}


def of_words(words: Tensor) -> Tensor:
    """The nibbles of int32 ``words``, lowest first: uint8 ``(..., 8)``."""
    return of_bytes(dense(words).view(torch.uint8)).reshape(*words.shape, 8)


def to_words(nibbles: Tensor) -> Tensor:
    """int32 words of uint8 ``nibbles`` ``(..., 8)``, lowest first."""
    return dense(to_bytes(nibbles)).view(torch.int32).squeeze(-1)


def of_bytes(data: Tensor) -> Tensor:
    """The nibbles of uint8 ``data``, low before high: the last extent doubles."""
    return torch.stack((data & 15, data >> 4), dim=-1).flatten(-2)


def to_bytes(nibbles: Tensor) -> Tensor:
    """Bytes of uint8 ``nibbles``, low before high: the last extent halves."""
    return nibbles[..., 0::2] | (nibbles[..., 1::2] << 4)


def check(name: str, tensor: object, *, by: str) -> None:
    """Refuses what is no tensor with values in memory."""
    if isinstance(tensor, Tensor) and tensor.layout is torch.strided and tensor.device.type != "meta":
        return
    found = f"one of {tensor.layout} on {tensor.device}" if isinstance(tensor, Tensor) else type(tensor).__name__
    raise UnsupportedProblem(f"{by}'s {name} is a dense tensor with values, not {found}; pass one")


def extents(name: str, tensor: Tensor, *, by: str) -> tuple[int, ...]:
    """The whole numbers of a tensor that holds a shape."""
    if tensor.is_floating_point() or tensor.is_complex():
        raise UnsupportedProblem(
            f"{by}'s {name} holds whole numbers, not {short(tensor.dtype)}; download the checkpoint again"
        )
    return tuple(int(extent) for extent in tensor.flatten().tolist())


def expect(
    name: str, tensor: Tensor, dtypes: Sequence[torch.dtype], shape: tuple[int, ...], why: str, *, by: str
) -> None:
    """Refuses a ``tensor`` of another type or shape, in one sentence: ``why`` says where ``shape`` comes from."""
    check(name, tensor, by=by)
    if tensor.dtype not in dtypes:
        kinds = " or ".join(short(dtype) for dtype in dtypes)
        raise UnsupportedProblem(
            f"{by}'s {name} is {kinds}, not {short(tensor.dtype)}; check that the checkpoint is of this format"
        )
    if tuple(tensor.shape) != shape:
        raise UnsupportedProblem(
            f"{by}'s {name} has shape {shape} for {why}, not {tuple(tensor.shape)}; "
            "check the group size of the config, or download the checkpoint again"
        )


def matrix(name: str, tensor: Tensor, dtypes: Sequence[torch.dtype], *, by: str) -> tuple[int, int]:
    """The shape of ``tensor``, refused where it is no matrix, is empty or is of another type."""
    check(name, tensor, by=by)
    if tensor.dim() != 2 or 0 in tensor.shape:
        raise UnsupportedProblem(
            f"{by}'s {name} is a matrix, not of shape {tuple(tensor.shape)}; pass the tensors of one linear layer"
        )
    expect(name, tensor, dtypes, tuple(tensor.shape), "it", by=by)
    return tensor.shape[0], tensor.shape[1]


def take(tensors: Mapping[str, Tensor], name: str, *, by: str) -> Tensor:
    """``tensors[name]``, or one sentence that says what is there."""
    if name not in tensors:
        found = ", ".join(sorted(tensors)) or "nothing"
        raise UnsupportedProblem(
            f"a layer of {by} has {name}, and this one has {found}; pass all tensors of the layer, without its prefix"
        )
    check(name, tensors[name], by=by)
    return tensors[name]


def known_only(tensors: Mapping[str, Tensor], names: Sequence[str], *, by: str) -> None:
    """Refuses tensors that the format does not have; a bias and scales of a cache are the layer's own."""
    for name in sorted(set(tensors) - set(names) - _BESIDE):
        raise UnsupportedProblem(
            f"a layer of {by} has no tensor {name}, and this one has: pass the tensors of one layer, by their names "
            f"there ({', '.join(names)}), and check quantization_config"
        )


def short(dtype: torch.dtype) -> str:
    """``float16`` of ``torch.float16``."""
    return str(dtype).removeprefix("torch.")
