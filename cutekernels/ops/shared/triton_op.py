"""An op over declared operands with a Triton kernel.

What remains to an op beside what :mod:`declared_op` leaves to it: ``constants`` and ``grid``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar

from cutekernels.op import C, P
from cutekernels.ops.shared.declared_op import DeclaredOp, Part
from cutekernels.ops.shared.dtypes import BYTES
from cutekernels.ops.shared.operands import Named
from cutekernels.rules import Ruled

if TYPE_CHECKING:
    from torch import Tensor

    from cutekernels.backends import Artifact
    from cutekernels.gpu import GpuSpec
    from cutekernels.ops.shared.paths import Fire


class TritonOp(Ruled, DeclaredOp[P, C]):
    """Its kernel takes ``<operand>_ptr`` of results and inputs, the ``sizes``, ``<operand>_<stride>`` of each, the
    ``scalars``, the ``extras`` and constexprs, in this order, in NamedTuples or one by one: see
    :class:`~cutekernels.backends.triton.Values`.
    """

    kernel: ClassVar[str]
    """``module:function`` in ``cutekernels.kernels.triton``."""
    sizes: ClassVar[Mapping[str, str]]
    """Run-time numbers of the kernel and their types; :meth:`numbers` has their values."""
    constexprs: ClassVar[tuple[str, ...]] = ()
    """Knobs, and properties of the problem, that the kernel takes as constexprs: ``block`` as ``BLOCK``."""
    extras: ClassVar[Mapping[str, str]] = {}
    """Parameters behind the scalars, and their types, that only an op's own ``bind`` passes: a workspace, a phase."""

    # -- hooks

    def grid(self, p: P, c: C) -> tuple[int, int, int]:
        """Programs along each axis."""
        raise NotImplementedError

    def constants(self, p: P, c: C) -> dict[str, int | bool | str]:
        """The kernel's constexprs, but for those that follow from operands: by default the ``constexprs``."""
        return {name.upper(): getattr(c if hasattr(c, name) else p, name) for name in self.constexprs}

    def numbers(self, p: P, c: C) -> tuple[int, ...]:
        """The values of ``sizes``: the problem's fields of those names. But for those of :meth:`measure_sizes`."""
        return tuple([getattr(p, name) for name in self.sizes])

    def measure_sizes(self, named: Named) -> tuple[int, ...]:
        """The values of the last ``sizes`` where those are extents of operands that the problem does not have."""
        return ()

    def divisible(self, p: P, c: C) -> dict[str, int]:
        """Divisors of ``sizes`` that kernels may assume, and of addresses that need not be multiples of ``p.align``."""
        return {}

    def strides(self, p: P, name: str, t: Tensor) -> Sequence[int]:
        """The strides of operand ``name`` that the kernel gets."""
        return self.operands[name].walk(t)

    def build_options(self, p: P, c: C) -> dict[str, Any]:
        """Options of Triton's compiler."""
        return {"num_warps": c.warps}  # type: ignore[attr-defined]

    # -- kernels

    def launch_arguments(self, p: P, c: C) -> tuple[dict[str, str], dict[str, Any], dict[str, int]]:
        """A launch's arguments: their types in order, the values that ``p`` tells of some, and divisors of others."""
        signature: dict[str, str] = {}
        constants: dict[str, Any] = {}
        divisible = self.divisible(p, c)
        promised = getattr(p, "align", 1) if getattr(p, "layout", "") != "strided" else None
        kinds = {name: self.kind(p, name) for name in self.operands}
        for name, kind in kinds.items():
            # Kernels make e4m3's bits themselves: Triton does not convert to it on every GPU.
            signature[f"{name}_ptr"] = "*u8" if kind == "fp8" else f"*{kind}"
            if kind is None:
                constants[f"{name}_ptr"] = 0
            elif self.operands[name].laid and promised is not None:
                divisible.setdefault(f"{name}_ptr", promised)
        signature |= self.sizes
        aligned = getattr(self.Problem, "aligns_rows", None)
        if aligned in self.sizes and promised is not None:
            divisible[aligned] = p.vec  # type: ignore[attr-defined, index]
        for name, kind in kinds.items():
            operand = self.operands[name]
            for i, step in enumerate(operand.strides):
                signature[f"{name}_{step}"] = "i64"
                if kind is None:
                    constants[f"{name}_{step}"] = 0
                elif operand.laid and promised is not None:
                    if i == len(operand.strides) - 1 >= len(operand.axes) - 1:
                        constants[f"{name}_{step}"] = 1
                    elif getattr(p, "layout", "") == "dense":
                        constants[f"{name}_{step}"] = 0
                    else:
                        divisible[f"{name}_{step}"] = max(1, promised // BYTES[kind])
        signature |= dict(self.scalar_types) | dict(self.extras)
        return signature, constants, divisible

    def compiler(self, c: C) -> str:
        return "triton"

    def build(self, p: P, c: C, gpu: GpuSpec) -> Artifact:
        from cutekernels.backends.triton import Values, compile_kernel

        signature, constants, divisible = self.launch_arguments(p, c)
        constants |= self.constants(p, c)
        module, _, function = self.kernel.partition(":")
        kernel = getattr(import_module(f"cutekernels.kernels.triton.{module}"), function)
        constants = {name: constants[name] for name in sorted(constants, key=list(Values.of(kernel).paths).index)}
        return compile_kernel(
            kernel,
            signature=signature | dict.fromkeys(constants, "constexpr"),
            constexprs=constants,
            divisible={name: n for name, n in divisible.items() if name not in constants},
            options=self.build_options(p, c),
            gpu=gpu,
        )

    def bind(self, p: P, c: C, kernel: Callable[..., Any]) -> Callable[..., None]:
        grid = self.grid(p, c)
        if 0 in grid:
            return lambda *operands: None
        numbers = self.numbers(p, c)
        strided = {name: len(operand.strides) for name, operand in self.operands.items()}

        def following(*operands: Tensor | None) -> list[int]:
            found = [*numbers, *self.measure_sizes(dict(zip(strided, operands, strict=True)))]
            for (name, steps), t in zip(strided.items(), operands, strict=True):
                found += [0] * steps if t is None or not steps else self.strides(p, name, t)[:steps]
            return found

        return Launch(kernel, grid, len(strided), following)


if TYPE_CHECKING:
    TritonPart = TritonOp
else:
    TritonPart = Part


class Launch:
    """``launch(*results, *inputs, *scalars)`` over one kernel: what most ops' ``bind`` returns.

    The kernel takes the operands' addresses (0 for an absent one), then ``numbers(*operands)``, which follow from
    their shapes and strides alone, then the scalars.
    """

    __slots__ = ("_grid", "_kernel", "_numbers", "_operands")

    def __init__(
        self,
        kernel: Callable[..., Any],
        grid: tuple[int, int, int],
        operands: int,
        numbers: Callable[..., Sequence[int]],
    ) -> None:
        self._kernel = kernel
        self._grid = grid
        self._operands = operands
        self._numbers = numbers

    def __call__(self, *args: Any) -> None:
        operands = args[: self._operands]
        addresses = [0 if t is None else t.data_ptr() for t in operands]
        self._kernel(self._grid, *addresses, *self._numbers(*operands), *args[self._operands :])

    def ending(self, *extras: int) -> Launch:
        """The same with ``extras`` behind the numbers, of an op without scalars."""
        numbers = self._numbers
        return Launch(self._kernel, self._grid, self._operands, lambda *operands: [*numbers(*operands), *extras])

    def settle(self, operands: Sequence[Tensor | None], scalars: int) -> Fire:
        """The launch by addresses, for operands that lie as these do, on the current device."""
        numbers = self._numbers(*operands)
        settle = getattr(self._kernel, "settle", None)
        if settle is not None:
            return settle(self._grid, numbers, len(operands) + scalars)  # type: ignore[no-any-return]
        kernel, grid = self._kernel, self._grid
        return lambda addresses, scalars: kernel(grid, *addresses, *numbers, *scalars)
