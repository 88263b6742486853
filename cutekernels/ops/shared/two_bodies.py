"""Ops with a CuTe body beside Triton's: :class:`TwoBodies` chooses by the config's ``body``, :class:`CuteBody` has the
rules of the one in CuTe.

The default is Triton's. A config of CuTe's is served where a measurement crowned it, and nowhere else.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar, Generic

from cutekernels.columns import Columns
from cutekernels.op import C, P, Scalar
from cutekernels.ops.shared.coefficients import STREAMING
from cutekernels.ops.shared.triton_op import TritonOp, TritonPart
from cutekernels.rules import Ruled, foreign, of_problem, values_of

if TYPE_CHECKING:
    from cutekernels.backends import Artifact
    from cutekernels.gpu import GpuSpec
    from cutekernels.ops.shared.paths import Fire

BODIES = ("triton", "cute")


class CuteBody(Ruled, ABC, Generic[P, C]):
    """An op's knowledge of its CuTe body. ``rules`` of problems and configs as an op has them."""

    module: ClassVar[str]
    """In ``cutekernels.kernels.cute.rowwise``; it has ``Operands``, the body's tensors in the op's order."""
    knobs: ClassVar[Mapping[str, tuple[Scalar, ...]]]
    """Values of the knobs that the body has. Others keep their first value."""
    shapes: ClassVar[Mapping[str, Mapping[str, str | int]]]
    """Modes of each operand that the body sees: the stride's name, or "" for contiguous ones, and the extent."""

    @abstractmethod
    def body(self, kernels: Any, p: P, c: C, gpu: GpuSpec) -> Any:
        """The body, of the module ``kernels``."""

    @of_problem
    def columns_contiguous(self, p: P, gpu: GpuSpec) -> str | None:
        if p.layout != "strided":  # type: ignore[attr-defined]
            return None
        return "body=cute takes rows of contiguous elements; layout is strided: take body=triton"

    def values(self, op: TritonOp[P, C]) -> dict[str, tuple[Any, ...]]:
        """Values of every knob."""
        return values_of(op.Config, body=("cute",), **self.knobs)


class TwoBodies(TritonPart[P, C]):
    """The part of a Triton op whose config has ``body``, with the body in CuTe. Put it before the family's part."""

    cute: ClassVar[CuteBody[Any, Any]]

    def failures(self, p: P, c: C, gpu: GpuSpec, *x: Any) -> Iterator[str]:
        if not _in_cute(c):
            yield from super().failures(p, c, gpu, *x)
            return
        yield from self.cute.failures_of("problem", p, gpu)  # before knobs, which another problem would not help
        yield from foreign(c, self.cute.values(self))
        yield from self.cute.failures_of("config", c, gpu)
        yield from self.cute.failures_of("both", p, c, gpu)

    def valid(self, p: P, gpu: GpuSpec) -> Iterator[C]:
        for values in (self.Config.space() | {"body": ("triton",)}, self.cute.values(self)):
            yield from (c for c in Columns.span(self.Config, values) if self.why_not(p, c, gpu) is None)

    def estimate_us(self, p: P, c: C, gpu: GpuSpec) -> float:
        estimate: Callable[[P, C, GpuSpec], float] = super().estimate_us  # type: ignore[safe-super]
        own = estimate(p, c, gpu)
        return STREAMING.cute * max(own, estimate(p, self.default(p, gpu), gpu)) if _in_cute(c) else own

    def compiler(self, c: C) -> str:
        return "dsl" if _in_cute(c) else super().compiler(c)

    def build(self, p: P, c: C, gpu: GpuSpec) -> Artifact:
        if not _in_cute(c):
            return super().build(p, c, gpu)
        from cutlass import Float32, Int8, Int32, Int64
        from cutlass.cute import AddressSpace
        from cutlass.cute.runtime import make_ptr

        from cutekernels.backends import cute as backend
        from cutekernels.kernels.cute.rowwise.entry import ByAddress, Laid

        kernels = import_module(f"cutekernels.kernels.cute.rowwise.{self.cute.module}")
        signature, known, divisors = self.launch_arguments(p, c)
        integers = {"i32": Int32, "i64": Int64}

        def argument(name: str, kind: str) -> Any:
            if not kind.startswith("*"):
                return integers.get(kind, Float32)(1)
            to = kind[1:]
            if to == "None":
                return make_ptr(Int8, 16, AddressSpace.gmem)
            element = integers.get(to) or backend.type_of(to)
            align = max(divisors.get(name, 1), element.width // 8)
            return make_ptr(element, 16, AddressSpace.gmem, assumed_align=align)

        def layout_of(name: str) -> Laid | None:
            if self.kind(p, name) is None:
                return None
            modes = self.cute.shapes[name]
            strides = tuple([f"{name}_{stride}" if stride else 1 for stride in modes])
            return Laid(f"{name}_ptr", tuple(modes.values()), strides)

        numbers = {name: n for name, n in divisors.items() if not name.endswith("_ptr") and name not in known}
        entry = ByAddress(
            self.cute.body(kernels, p, c, gpu),
            kernels.Operands,
            tuple([layout_of(name) for name in self.operands]),
            tuple(signature),
            len(self.scalar_types),
            tuple((name, value) for name, value in known.items() if not name.endswith("_ptr")),
            tuple((name, n) for name, n in numbers.items() if n > 1),
        )
        arguments = [argument(name, kind) for name, kind in signature.items()]
        return backend.compile(entry, *[Int32(1)] * 3, *arguments, gpu=gpu, names_stream=True)

    def bind(self, p: P, c: C, kernel: Callable[..., Any]) -> Callable[..., None]:
        return super().bind(p, c, _AsTriton(kernel) if _in_cute(c) else kernel)


class _AsTriton:
    """A CuTe kernel that is called as Triton's are: ``kernel(grid, *args)`` on the current device and its stream."""

    __slots__ = ("_device", "_kernel", "_stream")

    def __init__(self, kernel: Callable[..., Any]) -> None:
        from cutekernels import torch_names

        self._kernel = kernel
        self._device, self._stream = torch_names.current_device, torch_names.current_stream

    def __call__(self, grid: tuple[int, int, int], *args: Any) -> None:
        self._kernel(*grid, *args, self._stream(self._device()))

    def settle(self, grid: tuple[int, int, int], numbers: Sequence[Any], others: int) -> Fire:
        """See ``TritonKernel.settled``."""
        kernel, stream, device = self._kernel, self._stream, self._device()

        def fire(addresses: list[int], scalars: tuple[Any, ...]) -> None:
            kernel(*grid, *addresses, *numbers, *scalars, stream(device))

        return fire


def _in_cute(c: Any) -> bool:
    return bool(c.body == "cute")
