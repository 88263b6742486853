"""PTX instructions that the DSL has no name for."""

from typing import Any

from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import dsl_user_op


@dsl_user_op
def instruction(
    text: str, constraints: str, *operands: Any, result: Any = None, loc: object = None, ip: object = None
) -> Any:
    """One instruction, which the compiler neither drops nor reorders.

    ``$0, $1...`` in ``text`` are a value of MLIR's type ``result``, if one is given, then ``operands``.
    ``constraints`` name their registers as in LLVM: ``r`` for 32 bits, ``l`` for 64, ``=r`` for a result.
    """
    return llvm.inline_asm(
        result,
        [operand.ir_value(loc=loc, ip=ip) for operand in operands],
        text,
        constraints,
        has_side_effects=True,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
        loc=loc,
        ip=ip,
    )
