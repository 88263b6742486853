"""An op over declared operands with kernels in the CuTe DSL.

What remains to an op beside what :mod:`declared_op` leaves to it: ``body``, ``divisors`` of extents and, where its
kernels take more than operands, ``further`` and ``bind``.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from operator import methodcaller
from typing import TYPE_CHECKING, Any, ClassVar

from cutekernels.op import C, P, Scalar
from cutekernels.ops.shared.declared_op import DeclaredOp, Part
from cutekernels.ops.shared.dtypes import BYTES
from cutekernels.ops.shared.operands import Named, Operand, Sizes, extents_of
from cutekernels.ops.shared.strides import alignment

if TYPE_CHECKING:
    from torch import Tensor

    from cutekernels.backends import Artifact
    from cutekernels.gpu import GpuSpec


class CuteOp(DeclaredOp[P, C]):
    """Its bodies take results and inputs, those that are absent as None, then what is ``further``."""

    fixed: ClassVar[tuple[str, ...]] = ()
    """Extents that kernels are compiled for."""
    order: ClassVar[tuple[str, ...]] = ()
    """The operands in the order of a kernel that takes them in another; None for one that the op has not."""

    # -- hooks

    @abstractmethod
    def body(self, p: P, c: C, gpu: GpuSpec) -> Any:
        """The kernel body with its parts."""

    def divisors(self, p: P, c: C) -> Mapping[str, int]:
        """Divisors of extents, by their names."""
        return {}

    def same_extents(self, p: P, c: C) -> Mapping[str, str]:
        """Extents that are the same in kernels: the name of another by that of one."""
        return {}

    def further(self, p: P, c: C) -> Sequence[Any]:
        """Arguments behind the operands, as the compiler takes them: by default the numbers of a call."""
        from cutekernels.backends import cute as backend

        return [backend.type_of(kind)(1) for kind in self.scalar_types.values()]

    # -- kernels

    def fakes(self, p: P, c: C) -> list[Any]:
        """The operands of any launch of ``p`` as compilers see them. Extents of one name are one symbol."""
        from cutlass.cute import sym_int
        from cutlass.cute.runtime import make_fake_tensor

        from cutekernels.backends import cute as backend

        divisors, same, sizes = self.divisors(p, c), self.same_extents(p, c), self.sizes_in(p)
        extents: dict[str, Any] = {name: sizes[name] for name in self.fixed}

        def extent(axis: str) -> Any:
            first = extents_of(axis)[0]
            if first.unit or first.more:
                return sym_int()
            name = same.get(first.name, first.name)
            return extents.setdefault(name, sym_int(divisibility=divisors.get(name, 1)))

        def fake(name: str) -> Any:
            operand, kind = self.operands.get(name), name in self.operands and self.kind(p, name)
            if operand is None or not kind:
                return None
            axes = [axis for axis in operand.axes if not axis.endswith("?") or axis[:-1] not in self.missing(p)]
            element, shape = backend.type_of(kind), tuple(map(extent, axes))
            if operand.flat:
                shape = (sym_int(operand.bits),)
            align = self.elements(p, c, name)
            apart = align if operand.strides else 1
            bits = 64 if getattr(p, "wide", False) else operand.bits
            if kind == "fp8":  # two in an element of 16 bits
                shape, apart = (*shape[:-1], shape[-1] // 2), apart // 2
            steps = [sym_int(bits, divisibility=apart) for _ in shape]
            if not operand.strided:
                steps[self.contiguous(p, operand)] = 1
            return make_fake_tensor(element, shape, stride=tuple(steps), assumed_align=align * BYTES[kind])

        return [fake(name) for name in self.order or self.operands]

    def contiguous(self, p: P, operand: Operand) -> int:
        """The place of an operand's contiguous axis."""
        return -1 if operand.major is None or getattr(p, operand.major) == operand.names[-1] else -2

    def elements(self, p: P, c: C, name: str) -> int:
        """How many elements divide an operand's address and outer strides."""
        align, kind = self.operands[name].align, self.kind(p, name)
        assert kind is not None
        return int(getattr(p, align)) if isinstance(align, str) else max(1, (align or 1) // BYTES[kind])

    def build(self, p: P, c: C, gpu: GpuSpec) -> Artifact:
        from cutekernels.backends import cute as backend

        return backend.compile(self.body(p, c, gpu), *self.fakes(p, c), *self.further(p, c), gpu=gpu)

    def bind(self, p: P, c: C, kernel: Callable[..., Any]) -> Callable[..., Any]:
        return kernel

    # -- from tensors to problems, and back

    def takes(self, name: str, t: Tensor) -> bool:
        operand = self.operands[name]
        if operand.strided:
            return True
        if operand.align is None:
            return operand.taken(t)
        if not operand.strides:
            return operand.is_aligned(t) and t.is_contiguous()
        return operand.is_aligned(t) and (t.stride(-1) == 1 or (operand.major is not None and t.stride(-2) == 1))

    def views(self, named: Named, **options: Any) -> Mapping[str, Callable[[Tensor], Tensor] | None]:
        found: dict[str, Callable[[Tensor], Tensor]] = {}
        for name, t in named.items():
            operand = self.operands[name]
            spread = any(axis.endswith("|1") for axis in operand.axes)
            if t is not None and (operand.canonical or spread) and self.takes(name, t):
                seen = operand.seen(t, self._pose(named, **options)[0] if spread else {})
                if seen != (t.shape, t.stride()):
                    found[name] = methodcaller("as_strided", *seen)
        return found

    def layout(self, named: Named, sizes: Sizes, found: Mapping[str, Any]) -> dict[str, Scalar]:
        """Contiguous axes, and for each field that tells an alignment the most elements of its values that fit."""
        declared, bits = self.Problem.__dataclass_fields__, dict[str, int]()
        lies: dict[str, Scalar] = {}
        for name, operand in self.operands.items():
            t = named.get(name)
            if t is not None and isinstance(operand.align, str):
                bits[operand.align] = bits.get(operand.align, 0) | alignment(t)
            if t is not None and operand.major is not None:
                last, values = operand.names[-1], declared[operand.major].metadata["values"]
                lies[operand.major] = last if t.stride(-1) == 1 else next(v for v in values if v not in (last, "none"))
        return lies | {f: max(v for v in declared[f].metadata["values"] if not b % v) for f, b in bits.items()}

    def place(self, p: P, name: str, result: Tensor) -> Tensor:
        return self.arrange(p, name, result) if result.dim() else result

    def arrange(self, p: P, name: str, values: Tensor) -> Tensor:
        operand = self.operands[name]
        if not isinstance(operand.align, str):
            return values
        align, across = getattr(p, operand.align), self.contiguous(p, operand) == -2
        return (place_rows(values.mT, align).mT if across else place_rows(values, align)).copy_(values)


if TYPE_CHECKING:
    CutePart = CuteOp
else:
    CutePart = Part


def place_rows(t: Tensor, align: int) -> Tensor:
    """Memory as large as ``t`` whose pitch divides by ``align`` elements, and by no more where that is less than 8."""
    cols = t.shape[-1]
    pitch = -(-cols // 8) * 8 + (0 if align >= 8 else align)
    return t.new_empty((*t.shape[:-1], pitch))[..., :cols]
