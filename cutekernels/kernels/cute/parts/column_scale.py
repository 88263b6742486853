"""An epilogue with an operand of its own: a factor for each column of out, as a weight whose rows have scales needs."""

from dataclasses import dataclass
from typing import Any

from cutekernels.kernels.cute.parts.epilogue import Epilogue, EpilogueOperands


@dataclass(frozen=True)
class ColumnScale(Epilogue):
    """``activation(alpha * rows * factors[n] * acc + beta * c + bias)``; ``operands.own`` are the factors (N,)."""

    def product(self, acc: Any, at: Any, operands: EpilogueOperands) -> Any:
        return Epilogue.product(self, acc, at, operands) * at.columns(operands.own)
