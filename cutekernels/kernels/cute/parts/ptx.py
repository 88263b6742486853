"""PTX instructions that the DSL has no name for."""

from typing import Any

from cutlass import Float32, Int32, Int64
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


@dsl_user_op
def pure(text: str, *operands: Any, loc: object = None, ip: object = None) -> Any:
    """One instruction of 32-bit registers that only computes: ``$0`` is the result, ``$1, $2...`` the operands."""
    made = llvm.inline_asm(
        Int32.mlir_type,
        [operand.ir_value(loc=loc, ip=ip) for operand in operands],
        text,
        ",".join(["=r"] + ["r"] * len(operands)),
        has_side_effects=False,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
        loc=loc,
        ip=ip,
    )
    return Int32(made)


@dsl_user_op
def load_matrices(address: Int32, transposed: bool = False, *, loc: object = None, ip: object = None) -> list[Int32]:
    """ldmatrix.x4: four 8 x 8 matrices of 16-bit elements; lane i gives the shared address of row i % 8 of i // 8."""
    four = llvm.StructType.get_literal([Int32.mlir_type] * 4)
    made = llvm.inline_asm(
        four,
        [address.ir_value(loc=loc, ip=ip)],
        f"ldmatrix.sync.aligned.m8n8.x4{'.trans' if transposed else ''}.shared.b16 {{$0, $1, $2, $3}}, [$4];",
        "=r,=r,=r,=r,r",
        has_side_effects=True,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
        loc=loc,
        ip=ip,
    )
    return [Int32(llvm.extractvalue(Int32.mlir_type, made, [i], loc=loc, ip=ip)) for i in range(4)]


def copy_async(shared: Int32, source: Int64, bytes_: int) -> None:
    """cp.async of 4 or 16 bytes, those past L1 where 16."""
    cache = "cg" if bytes_ == 16 else "ca"
    instruction(f"cp.async.{cache}.shared.global [$0], [$1], {bytes_};", "r,l", shared, source)


def copy_async_or_zero(shared: Int32, source: Int64, bytes_: int, read: Int32) -> None:
    """cp.async of ``read`` bytes, and zeros up to ``bytes_``."""
    cache = "cg" if bytes_ == 16 else "ca"
    instruction(f"cp.async.{cache}.shared.global [$0], [$1], {bytes_}, $2;", "r,l,r", shared, source, read)


def in_register(value: int, count: Int32) -> Int32:
    """A constant in a register: ``count`` is a number that is not negative, which ptxas cannot know."""
    return pure(f"{{ .reg .b32 t; shr.u32 t, $1, 31; add.u32 $0, t, {value}; }}", count)


def copy_bulk(shared: Int32, source: Int64, bytes_: Int32, barrier: Int32) -> None:
    """A bulk copy of a multiple of 16 bytes, which completes so many bytes on the mbarrier; one thread's work."""
    text = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [$0], [$1], $2, [$3];"
    instruction(text, "r,l,r,r", shared, source, bytes_, barrier)


def count_released(address: Int64) -> None:
    """Adds 1 to a word of global memory; what this thread has seen written before is visible to who acquires it."""
    instruction("red.release.gpu.global.add.u32 [$0], 1;", "l", address)


def load_acquired(address: Int64) -> Int32:
    """A word of global memory; later reads see all that was released before it."""
    return Int32(instruction("ld.acquire.gpu.global.u32 $0, [$1];", "=r,l", address, result=Int32.mlir_type))


def kept_move(word: Int32) -> Int32:
    """``word`` in another virtual register, from this place among instructions with effects on."""
    return Int32(instruction("mov.b32 $0, $1;", "=r,r", word, result=Int32.mlir_type))


def pin(x: Float32) -> Float32:
    """``x``, held in its place among instructions with effects."""
    return Float32(instruction("mov.f32 $0, $1;", "=f,f", x, result=Float32.mlir_type))


@dsl_user_op
def mul_rn(x: Float32, y: Float32, *, loc: object = None, ip: object = None) -> Float32:
    """``x * y``, rounded: unlike ``*``, never contracted with a sum that follows."""
    made = llvm.inline_asm(
        Float32.mlir_type,
        [x.ir_value(loc=loc, ip=ip), y.ir_value(loc=loc, ip=ip)],
        "mul.rn.f32 $0, $1, $2;",
        "=f,f,f",
        has_side_effects=False,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
        loc=loc,
        ip=ip,
    )
    return Float32(made)
