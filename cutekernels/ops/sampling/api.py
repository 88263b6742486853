"""``sample_filter``: the public function, and its registration with torch."""

from __future__ import annotations

from torch import Tensor

from cutekernels.errors import UnsupportedProblem
from cutekernels.ops.sampling.op import SAMPLE_FILTER, SampleFilterConfig
from cutekernels.ops.shared.calls import call, register
from cutekernels.ops.shared.checks import quote

_INFINITE = 3.4e38
_LEAST = 1e-30  # logits up to 3e8 over it are finite in fp32
_INT32 = (1 << 31) - 1


def sample_filter(
    logits: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    top_k: int | Tensor = 0,
    top_p: float | Tensor = 1.0,
    min_p: float | Tensor = 0.0,
    config: SampleFilterConfig | str | None = None,
) -> Tensor:
    """Logits scaled by temperature, with -inf for each token that top-k, top-p or min-p rules out.

    Filters come in the order of Hugging Face's: temperature; the k largest logits; of what is left, the most probable
    tokens whose masses reach ``top_p``; of all, those at least ``min_p`` times as probable as the first. What all keep
    stays, ties together. ``softmax`` of the result is what to sample from.

    Args:
        logits: ``(..., V)``, fp16, bf16 or fp32 (on the CPU fp64 too), V up to 2^30, with ``top_p``
            2^22; any strides.
        temperature: divides the logits; 0 keeps the first of the largest logits alone. The least other number is
            1e-30, so that quotients are finite in fp32 and bf16; in fp16 those beyond 65504 are infinite.
        top_k: how many to keep; 0, or V and more, for all.
        top_p: the share of the mass to keep, from 0 to 1; 1 for all.
        min_p: the least probability, as a share of the largest, from 0 to 1; 0 for none.
            Each of the four is a number or one for each row: a tensor of the logits' leading shape and device, int32
            for ``top_k`` and fp32 for the others, with numbers as above (not checked: that would wait for the GPU; a
            temperature that is not positive is greedy, with one from 0 to 1e-30 quotients may be infinite).
        config: overrides the tuned choice, as a :class:`SampleFilterConfig` or its text. Ignored on the CPU.

    Returns:
        ``(..., V)``, dtype of ``logits``, contiguous; the quotient is rounded once. Not differentiable.

    Raises:
        UnsupportedProblem: a dtype no kernel takes, a number out of range, a tensor of another shape or type.
        InvalidConfig: ``config`` breaks a rule of the op.
    """
    tensors: list[Tensor | None] = []
    numbers: list[float] = []
    for name, given, neutral, high in (
        ("temperature", temperature, 1.0, _INFINITE),
        ("top_k", top_k, 0, _INT32),
        ("top_p", top_p, 1.0, 1.0),
        ("min_p", min_p, 0.0, 1.0),
    ):
        if isinstance(given, Tensor):
            tensors.append(given)
            numbers.append(neutral)
        elif (
            isinstance(given, type(neutral) if name == "top_k" else int | float)
            and type(given) is not bool
            and 0 <= given <= high
        ):
            tensors.append(None)
            numbers.append(type(neutral)(given))
        else:
            kind = "whole number" if name == "top_k" else "number"
            got = quote(given)
            raise UnsupportedProblem(f"{name} is a {kind} from 0 to {high:g}, or a tensor of them; it is {got}")
    check_temperature(numbers[0])
    # Branches make bools of comparisons, which are traced where the numbers are.
    by_k = True if tensors[1] is not None or numbers[1] > 0 else False  # noqa: SIM210
    by_p = True if tensors[2] is not None or numbers[2] < 1 else False  # noqa: SIM210
    by_min_p = True if tensors[3] is not None or numbers[3] > 0 else False  # noqa: SIM210
    options, scalars = (by_k, by_p, by_min_p), tuple(numbers)
    return call(SAMPLE_FILTER, (logits, *tensors), options, scalars, config=config)[0]


def check_temperature(temperature: float) -> None:
    """Refuses a number that logits in fp32 cannot be divided by."""
    if temperature != 0 and not _LEAST <= temperature <= _INFINITE:
        raise UnsupportedProblem(
            f"temperature is a number from {_LEAST:g} to {_INFINITE:g}, which divides the logits within the range of "
            f"fp32, or 0, which is greedy; it is {temperature!r}: pass 0"
        )


register(SAMPLE_FILTER)  # it has no gradient: what is sampled is not differentiated
