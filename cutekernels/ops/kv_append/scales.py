"""Scales of a cache in FP8: what stored numbers are multiplied by, one for each head of keys and of values."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from cutekernels.errors import UnsupportedProblem
from cutekernels.ops.attention.problem import E4M3_MAX
from cutekernels.ops.rope.rotary import turning
from cutekernels.ops.shared.checks import said

HEADROOM = 4.0  # times the first prompt's largest number: costs no digit of what is above 1e-4 of that number


@dataclass(slots=True)
class CacheScales:
    """fp32 ``(HKV,)`` of keys and of values; 1 until they are ``known``. All parts of a cache share them."""

    k: Tensor
    v: Tensor
    known: bool = False

    @classmethod
    def unknown(cls, heads: int, device: torch.device) -> CacheScales:
        return cls(*torch.ones((2, heads), dtype=torch.float32, device=device))

    def put(self, k: object, v: object) -> None:
        """Takes numbers, or tensors of one number or of one for each head. Both are checked before either counts."""
        found = [_checked(name, value, self.k) for name, value in (("k_scale", k), ("v_scale", v))]
        for place, value in zip((self.k, self.v), found, strict=True):
            place.copy_(value)
        self.known = True

    def forget(self) -> None:
        """Leaves them to the next append: the one that was measured has been refused."""
        self.k.fill_(1.0)
        self.v.fill_(1.0)
        self.known = False

    def measure(
        self, k: Tensor, v: Tensor, cos: Tensor | None, sin: Tensor | None, interleaved: bool, counts: Tensor | None
    ) -> None:
        """Takes them from the tokens ``(B, S, HKV, D)`` that are about to be appended; none leave them unknown.

        Asynchronous but for ``counts``, which the host reads. A pair of channels that turn is as large as it can become
        at any position.
        """
        if k.is_cuda and torch.cuda.is_current_stream_capturing():
            raise UnsupportedProblem(
                "a captured append needs the cache's scales, which the first one takes from its tokens: append once "
                "ahead of the capture, or call set_scales"
            )
        kept = None
        if counts is not None:
            kept = torch.arange(k.shape[1], device=k.device) < counts[:, None]
            if not kept.any():
                return
        with torch.no_grad():
            for place, x in ((self.k, _turned_sizes(k, cos, sin, interleaved)), (self.v, _sizes(v))):
                if kept is not None:
                    x = x * kept[:, :, None, None]
                largest = x.amax((0, 1, 3))
                scale = largest * (HEADROOM / E4M3_MAX)
                place.copy_(torch.where(largest > 0, scale, torch.ones_like(scale)))
        self.known = True


def _sizes(x: Tensor) -> Tensor:
    """``|x|`` in fp32; 0 for what is not finite."""
    size = x.detach().float().abs()
    return size.masked_fill(~size.isfinite(), 0.0)


def _turned_sizes(x: Tensor, cos: Tensor | None, sin: Tensor | None, interleaved: bool) -> Tensor:
    """:func:`_sizes`, for channels that turn the largest that their pair may become."""
    sizes = _sizes(x)
    if cos is None or sin is None:
        return sizes
    width = turning(cos)
    first, second = (sizes[..., :width:2], sizes[..., 1:width:2]) if interleaved else sizes[..., :width].chunk(2, -1)
    longest = torch.hypot(cos.float(), sin.float()).amax()  # not 1 where a table has attention's factor
    return torch.cat((torch.hypot(first, second) * longest, sizes[..., width:]), -1)


def _checked(name: str, value: object, like: Tensor) -> Tensor:
    heads = len(like)
    try:
        found = torch.as_tensor(value, dtype=torch.float32).detach().flatten()
    except (TypeError, ValueError, RuntimeError) as error:
        raise UnsupportedProblem(f"{name} is a number, or one for each of {heads} heads; got {said(value)}") from error
    if found.numel() not in (1, heads) or not bool((found.isfinite() & (found > 0)).all()):
        numbers = found.tolist() if found.numel() <= 4 else f"{found.numel()} of them"
        raise UnsupportedProblem(
            f"{name} is a number above 0, or one for each of {heads} heads; got {numbers}: what is stored is a key or "
            "value over it; leave both out to take them from the first prompt"
        )
    return found.to(like.device).expand(heads)
