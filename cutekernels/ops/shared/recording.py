"""Problems that calls pose, recorded where no kernel runs: over fake tensors, on a machine without a GPU too.

Under a :class:`Recorder` an op's implementation for fakes takes the way of a call on a GPU, from checks to the problem,
which is noted in place of a plan. A fake has an address as torch's allocator gives them, so its problem is that of the
call which it stands for. Other threads go on meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from cutekernels import dispatch, torch_names
from cutekernels.errors import UnsupportedProblem
from cutekernels.lengths import Posed
from cutekernels.op import Op, Problem

_REMEDY = "warm up pairs of an op's name and a problem's text instead"
_APART = 1 << 48  # bytes between two fakes' memories, where no real tensor lies


class Recorder:
    """Notes what calls pose: ``with recorder.calls() as noted: model(ids)``, as often as one likes.

    Tensors made meanwhile are fakes; real ones stand for themselves, without their memory. Raises UnsupportedProblem
    for a call that depends on their values.
    """

    def __init__(self) -> None:
        if (fakes := torch_names.fake_tensors) is None:
            raise UnsupportedProblem(f"torch {torch.__version__} has its fake tensors elsewhere: {_REMEDY}")
        self._fakes = fakes.FakeTensorMode(allow_non_fake_inputs=True)  # remembers the fakes of a model's parameters
        self._unread = fakes.DataDependentOutputException, fakes.DynamicOutputShapeException

    @contextmanager
    def calls(self) -> Iterator[list[Posed]]:
        noted: list[Posed] = []

        def note(op: Op[Any, Any], p: Problem) -> dispatch.Plan:
            noted.append((op, p))
            return dispatch.Plan(_NO_CONFIG, _no_launch, "recorded", "")

        try:
            with dispatch.recorded_by(note), torch.no_grad(), self._fakes:
                yield noted
        except self._unread as error:
            raise UnsupportedProblem(
                f"a call that reads values of tensors cannot be recorded ({error}): {_REMEDY}"
            ) from error


def recordable(cuda: Callable[..., Any], fake: Callable[..., Any]) -> Callable[..., Any]:
    """``fake``, an op's implementation for fakes; that of a GPU while calls are recorded."""

    def either(*args: Any) -> Any:
        if not dispatch.recording():
            return fake(*args)
        with _addresses:
            return cuda(*args)

    return either


class _Addresses(TorchFunctionMode):
    """Gives each fake memory an address of its own."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.data_ptr and hasattr(args[0], "fake_device"):
            t = args[0]
            return t.untyped_storage()._cdata * _APART + t.storage_offset() * t.element_size()
        return func(*args, **(kwargs or {}))


def _no_launch(*args: Any) -> None:
    """In place of a kernel: nobody reads what it would write."""


_NO_CONFIG: Any = None
_addresses = _Addresses()
