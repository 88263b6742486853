"""Ops that update operands where they lie, as torch knows them: ``<op>_inplace``, whose schema says what it mutates."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from cutekernels.ops.shared import tensor_op
from cutekernels.ops.shared.tensor_op import TensorOp


def places(inputs: Sequence[Tensor | None], updated: Sequence[int]) -> tuple[Tensor, ...]:
    """The inputs that are updated, as the results of a launch; nothing in the place of an absent one."""
    found = []
    for i in updated:
        t = inputs[i]
        if t is None:
            first = inputs[updated[0]]
            assert first is not None
            t = first.new_empty(0)
        found.append(t)
    return tuple(found)


def register(library: torch.library.Library, op: TensorOp[Any, Any], updated: Sequence[int]) -> None:
    """Defines ``op.name + "_inplace"``, whose results are the inputs at ``updated``, for GPU, CPU and fakes.

    Takes the op's arguments and returns nothing. An absent input stands for an empty result.
    """
    define: Callable[[str], object] = library.define  # torch leaves both untyped
    implement: Callable[[str, Callable[..., object], str], object] = library.impl
    n, o, s = len(op.inputs), len(op.options), len(op.scalars)
    words = op.schema.split(", ")
    for mark, i in zip("abcdefgh", updated, strict=False):
        kind, name = words[i].split(" ")
        words[i] = f"Tensor({mark}!){kind.removeprefix('Tensor')} {name}"

    def cuda(*args: Any) -> None:
        inputs, options, scalars = args[:n], args[n : n + o], args[n + o : n + o + s]
        config = args[n + o + s] if len(args) > n + o + s else None
        tensor_op.run(op, places(inputs, updated), inputs, options=options, scalars=scalars, config=config)

    def fake(*args: Any) -> None:
        options = dict(zip(op.options, args[n : n + o], strict=True))
        op.admit(args[:n], places(args[:n], updated), **options)

    def cpu(*args: Any) -> None:
        fake(*args)
        inputs = args[:n]
        results = places(inputs, updated)
        tensor_op.check_overlap(op, results, inputs)
        options = dict(zip(op.options, args[n : n + o], strict=True))
        values = op.evaluate(*inputs, *args[n + o : n + o + s], **options)
        for place, value in zip(results, values, strict=True):
            place.copy_(value)

    name = f"{op.name}_inplace"
    define(f"{name}({', '.join(words)}, str? config=None) -> ()")
    implement(name, cuda, "CUDA")
    implement(name, cpu, "CPU")
    torch.library.register_fake(f"cutekernels::{name}", fake, lib=library)
