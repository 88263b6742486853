"""The launch of a norm's gradient: its kernel, which leaves a part of each sum per program, and the sums of those."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from cutekernels.ops.shared.calls import plan_call, run
from cutekernels.ops.shared.paths import Fire
from cutekernels.ops.shared.triton_op import Launch, TritonOp


def scratch(like: Tensor, *shape: int) -> Tensor:
    """fp32 memory for one launch, on the device of ``like``: the parts that the first pass leaves."""
    return like.new_empty(shape, dtype=torch.float32)


def _flat(t: Tensor | None, like: Tensor) -> Tensor:
    """A stand-in for ``t`` flattened, on the device of ``like``."""
    assert t is not None
    return like.new_empty(t.numel(), dtype=t.dtype)


class BothPasses:
    """``launch(*results, *inputs, *scalars)``: the first pass, which leaves parts, and the sums of those.

    ``sums``: the ops that add up the parts of one result, and of two alike. ``summed``: which results are sums.
    ``shape``: of all their parts, one matrix for each.
    """

    def __init__(
        self,
        first: Callable[..., None],
        sums: tuple[TritonOp[Any, Any], TritonOp[Any, Any]],
        results: int,
        summed: Sequence[int],
        shape: tuple[int, int, int],
    ) -> None:
        self._first, self._results, self._summed, self._shape = first, results, summed, shape
        self._sum, self._pair = sums

    def _places(self, args: Sequence[Any], parts: Sequence[Any]) -> list[Any]:
        """The operands of the first pass, whose results are the parts."""
        places = [args[0], *[None] * (self._results - 1), *args[self._results :]]
        for i, part in zip(self._summed, parts, strict=True):
            places[i] = part
        return places

    def _sums(self, args: Sequence[Any], parts: Tensor) -> list[tuple[TritonOp[Any, Any], list[int], Tensor]]:
        """The second pass: ops, which results each writes, and what it adds up. Alike results take one launch."""
        if len(self._summed) == 2 and args[1].dtype == args[2].dtype:
            return [(self._pair, [1, 2], parts.flatten(0, 1))]
        return [(self._sum, [i], part) for i, part in zip(self._summed, parts.unbind(), strict=True)]

    def __call__(self, *args: Any) -> None:
        if not self._summed:
            self._first(*self._places(args, ()))
            return
        parts = scratch(args[0], *self._shape)
        self._first(*self._places(args, parts.unbind()))
        for op, written, part in self._sums(args, parts):
            run(op, tuple([args[i].view(-1) for i in written]), (part,))

    def settle(self, operands: Sequence[Tensor | None], scalars: int) -> Fire | None:
        """Both passes by addresses, for operands that lie as these do, on the current device."""
        if not isinstance(self._first, Launch):
            return None
        n, summed, shape = self._results, self._summed, self._shape
        like = operands[n]  # results may be placeholders without memory
        assert like is not None
        if not summed:
            alone = self._first.settle(self._places(operands, ()), scalars)
            return lambda addresses, scalars: alone([addresses[0], *[0] * (n - 1), *addresses[n:]], scalars)
        parts, device = scratch(like, *shape), like.device
        first = self._first.settle(self._places(operands, parts.unbind()), scalars)
        sums = []
        for op, written, part in self._sums(operands, parts):
            results = tuple([_flat(operands[i], like) for i in written])
            fire = plan_call(op, (part,), results).fire
            if fire is None:
                return None
            sums.append((fire, written, part.data_ptr() - parts.data_ptr()))
        size = parts[0].numel() * parts.element_size()

        def fire_both(addresses: list[int], scalars: tuple[Any, ...]) -> None:
            base = torch.empty(shape, dtype=torch.float32, device=device)
            begin = base.data_ptr()
            places = [addresses[0], *[0] * (n - 1), *addresses[n:]]
            for k, i in enumerate(summed):
                places[i] = begin + k * size
            first(places, scalars)
            for fire, written, offset in sums:
                fire([*[addresses[i] for i in written], begin + offset], ())

        return fire_both
