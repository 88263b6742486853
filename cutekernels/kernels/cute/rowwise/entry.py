"""A body called as Triton's kernels are: the grid, addresses, sizes and strides, then scalars; all of them numbers."""

from dataclasses import dataclass
from typing import Any

import cutlass.cute as cute


@dataclass(frozen=True)
class Laid:
    """One tensor: which of a launch's arguments say where it is and how it lies."""

    address: str
    shape: tuple[str | int, ...]  # names of sizes, or extents
    strides: tuple[str | int, ...]


@dataclass(frozen=True)
class ByAddress:
    """``body(grid, tensors, *scalars, stream)``, called with a grid, the arguments ``names``, and a stream.

    TVM-FFI passes a number in a fraction of a tensor's time, and callers have read addresses and strides already.
    Nothing is checked here: numbers must keep what ``known`` (values) and ``divisors`` promise of them.
    """

    body: Any
    operands: type  # the body's tensors by name
    laid: tuple[Laid | None, ...]  # None: an absent one
    names: tuple[str, ...]
    scalars: int  # the last of them
    known: tuple[tuple[str, int], ...]
    divisors: tuple[tuple[str, int], ...]

    @cute.jit
    def __call__(self, *arguments: Any):
        self.body(arguments[:3], self.tensors(arguments[3:]), *arguments[-1 - self.scalars :])

    def tensors(self, arguments: Any) -> Any:
        """Runs while the entry is traced."""
        found: dict[Any, Any] = dict(zip(self.names, arguments, strict=False))
        found |= {name: cute.assume(found[name], divby=n) for name, n in self.divisors}
        found |= dict(self.known)

        def tensor(o: Laid) -> cute.Tensor:
            shape, stride = (tuple([found.get(i, i) for i in modes]) for modes in (o.shape, o.strides))
            return cute.make_tensor(found[o.address], cute.make_layout(shape, stride=stride))

        return self.operands(*[None if o is None else tensor(o) for o in self.laid])
