"""Scales of a cache in e4m3, one of each token and head: powers of two, a byte each, which ``kv_append`` writes.

They lie by page (or sequence), head and slot, ``(PAGES, HKV, PAGE_SIZE)``, so that those of a head are neighbours; the
last extent is rounded up to a multiple of 16, since kernels copy 16 at a time. Byte ``b`` is ``2^(b - 127)``, as in
torch's float8_e8m0fnu, and 255 is NaN.

A head's power is the least with which its largest finite number is at most 448, e4m3's largest, so that nothing is
clamped, but no less than 2^-64, which a head of zeros has: kernels sum probabilities over powers of V in fp32, whose
range that halves. Of fp16 numbers it is 2^-15 at least, which loses nothing: e4m3's step is then fp16's own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cutekernels.errors import UnsupportedProblem

if TYPE_CHECKING:
    import torch
    from torch import Tensor

BIAS = 127
NAN = 255
LEAST, LEAST_OF_FP16 = -64, -15
TOGETHER = 16  # scales that lie in one aligned piece of memory
_LARGEST_OF_FP16 = 61440.0  # of four binary digits, as e4m3's: the next number is 65536
_LARGEST = 240.0 * 2.0**120  # of bf16 and fp32: the next one is 2^128


def places(slots: int) -> int:
    """The last extent of the scales of ``slots`` tokens."""
    return -(-slots // TOGETHER) * TOGETHER


def shape(cache: Tensor) -> tuple[int, int, int]:
    """Shape of the scales of a cache ``(PAGES, PAGE_SIZE, HKV, D)``."""
    return cache.shape[0], cache.shape[2], places(cache.shape[1])


def check(name: str, t: Tensor, cache: Tensor) -> None:
    """Refuses what are no scales of tokens and heads of ``cache``."""
    import torch

    wanted = shape(cache)
    if t.shape != wanted or t.dtype != torch.uint8 or t.device != cache.device:
        raise UnsupportedProblem(
            f"{name} of a cache in float8_e4m3fn must be uint8 {wanted}, (PAGES or B, HKV, slots up to a multiple of "
            f"{TOGETHER}), on {cache.device}; it is {t.dtype}, {tuple(t.shape)}, on {t.device}"
        )
    if t.stride(2) != 1:
        raise UnsupportedProblem(
            f"{name} must have slots side by side; its strides are {t.stride()}: allocate it contiguous"
        )


def check_aligned(name: str, t: Tensor) -> None:
    """Refuses scales that kernels cannot copy ``TOGETHER`` at a time."""
    strides = [s for n, s in zip(t.shape[:2], t.stride()[:2], strict=True) if n > 1]
    if any(s % TOGETHER for s in strides) or t.data_ptr() % TOGETHER:
        raise UnsupportedProblem(
            f"{name} must have {TOGETHER}-byte aligned rows; its strides are {t.stride()} and it begins "
            f"{t.data_ptr() % TOGETHER} bytes behind a multiple of {TOGETHER}: allocate it contiguous"
        )


def powers(scales: Tensor, dtype: torch.dtype) -> Tensor:
    """The numbers that bytes are."""
    import torch

    exponents = scales.to(torch.int32) - BIAS
    found = torch.ldexp(torch.ones_like(exponents, dtype=dtype), exponents)
    return found.masked_fill(scales == NAN, float("nan"))


def by_slot(scales: Tensor, slots: int, dtype: torch.dtype) -> Tensor:
    """:func:`powers` as factors of a cache: ``(PAGES, PAGE_SIZE, HKV, 1)``."""
    return powers(scales[..., :slots], dtype).transpose(1, 2).unsqueeze(-1)


def by_head(scales: Tensor) -> Tensor:
    """Bytes (PAGES, PAGE_SIZE, HKV) as a cache has them, NaN behind the last slot."""
    found = scales.new_full((scales.shape[0], scales.shape[2], places(scales.shape[1])), NAN)
    found[..., : scales.shape[1]] = scales.transpose(1, 2)
    return found


def quantized(x: Tensor) -> tuple[Tensor, Tensor]:
    """``x`` (..., HKV, D) in e4m3, rounded to nearest even, and the bytes of its scales (..., HKV).

    What is not finite becomes NaN. Numbers that would be rounded to one that their type lacks become the next below.
    """
    import torch

    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    finite = wide.isfinite()
    largest = wide.abs().where(finite, 0.0).amax(-1) if x.shape[-1] else wide.new_zeros(x.shape[:-1])
    mantissa, exponent = torch.frexp(largest)  # the mantissa is below 1, and 448 is 0.875 * 2^9
    exponent = exponent - 9 + (mantissa > 0.875)
    least = LEAST_OF_FP16 if x.dtype == torch.float16 else LEAST
    exponent = exponent.where(largest > 0, least).clamp(least, NAN - BIAS)
    if x.dtype != torch.float64:
        largest_code = _LARGEST_OF_FP16 if x.dtype == torch.float16 else _LARGEST
        wide = wide.clamp(-largest_code, largest_code)
    codes = torch.ldexp(wide, -exponent.unsqueeze(-1)).masked_fill(~finite, float("nan"))
    return codes.to(torch.float8_e4m3fn), (exponent + BIAS).to(torch.uint8)
