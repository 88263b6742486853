"""Heads whose first channels turn by their token's position: problems, configs and ops of such kernels.

A tile is ``tokens`` x ``heads`` x ``block`` pairs of channels. Blocks of channels that turn precede those that stay.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from cutekernels.errors import UnsupportedProblem
from cutekernels.gpu import GpuSpec
from cutekernels.op import Config, Problem, Scalar, knob, power_of_two
from cutekernels.ops.shared import streaming, tile_rules
from cutekernels.ops.shared.coefficients import STREAMING
from cutekernels.ops.shared.laid_out import LaidOut
from cutekernels.ops.shared.operands import Array, Operand, Sizes
from cutekernels.ops.shared.tile_rules import idle_rule
from cutekernels.ops.shared.triton_op import TritonPart
from cutekernels.rules import of_both

if TYPE_CHECKING:
    import torch
    from torch import Tensor

MAX_PROGRAMS = (1 << 31) - 1  # along a grid's first axis
MOST = (1 << 16) - 1  # along its others
DEPTH = 32.0  # terms several times the size of a typical result may cancel: 4 ulp of fp32 of that
_MAX_OPERAND_REGISTERS = 128
_TURN = 6.2831853


class RotaryProblem(LaidOut, Problem):
    """Heads of ``head_dim`` channels, the first ``rotary`` of which turn in pairs.

    ``table``: the cosines' and sines' type, fp32 or "same" as the operands', or "none" where nothing turns.
    ``interleaved``: pairs are neighbours, else channels ``i`` and ``i + rotary / 2``. ``align`` divides each run of
    channels that turn, and of those that stay, too.
    """

    batch: int
    seq: int
    heads_q: int
    heads_kv: int
    head_dim: int
    rotary: int
    table: str
    interleaved: bool

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rotary % 2 or self.rotary > self.head_dim or (self.rotary > 0) != (self.table != "none"):
            raise UnsupportedProblem(
                f"rotary counts channels in pairs, 2 to head_dim where there is a table, else 0; it is {self.rotary} "
                f"of {self.head_dim} with table={self.table}"
            )
        if sum(self.groups) > MOST or self.head_dim > MOST:
            raise UnsupportedProblem(
                f"heads and head_dim end at {MOST} in all; got {' + '.join(map(str, self.groups))} and {self.head_dim}"
            )
        if self.layout != "strided" and self.runs * self.itemsize % self.align:
            raise UnsupportedProblem(
                f"align divides each run of channels, {self.rotary} of {self.head_dim} turning; it is {self.align}"
            )
        if (self.dtype, self.table) == ("fp32", "same"):
            raise UnsupportedProblem("beside fp32 operands an fp32 table is called table=fp32, not same")

    @property
    def groups(self) -> tuple[int, ...]:
        """The heads of each operand."""
        return self.heads_q, self.heads_kv

    @property
    def half(self) -> int:
        return self.rotary // 2

    @property
    def runs(self) -> int:
        """The lengths of runs of channels that lie and turn together, their bits joined."""
        return runs(self.head_dim, self.rotary, self.interleaved)

    @property
    def block(self) -> int:
        """Pairs of channels in a tile: what covers all that turn, or all there are, from 8 to 256."""
        return max(8, min(256, power_of_two(self.half or -(-self.head_dim // 2))))

    @property
    def parts(self) -> int:
        """Blocks of channels, those that turn and those that stay."""
        return -(-self.half // self.block) + -(-(self.head_dim - self.rotary) // (2 * self.block))

    @property
    def pairs_per_access(self) -> int:
        return max(1, self.vec // 2) if self.interleaved or not self.rotary else self.vec


def runs(head_dim: int, rotary: int, interleaved: bool) -> int:
    """See :class:`RotaryProblem`."""
    return (rotary if interleaved else rotary // 2) | (head_dim - rotary)


@dataclass(frozen=True)
class RotaryConfig(Config):
    """One tile of ``tokens`` x ``heads`` x ``block`` pairs of channels per program."""

    tokens: int = knob(1, 2, 4, 8, 16)
    heads: int = knob(1, 2, 4, 8, 16, 32, 64)
    block: int = knob(8, 16, 32, 64, 128, 256)
    warps: int = knob(1, 2, 4, 8)


def Heads(heads: str, *, result: bool = False, strides: tuple[str, ...] = ("batch", "seq", "head", "dim")) -> Operand:
    """``(batch, seq, heads, head_dim)``."""
    return Array("batch", "seq", heads, "head_dim", strides=strides, result=result)


def Table(*, optional: bool = False, strides: tuple[str, ...] = ("batch", "row", "col")) -> Operand:
    """Cosines or sines: ``(T, R/2)`` by position, or ``(B or 1, S, R)`` by token, whose halves repeat."""
    return Array("tables?", "table_rows", "width", dtype="table", strides=strides, optional=optional, laid=True)


P = TypeVar("P", bound=RotaryProblem)
C = TypeVar("C", bound=RotaryConfig)


class RotaryOp(TritonPart[P, C]):
    """The part of an op with the inputs ``q``, ``k``, ``cos`` and ``sin``, and options that include ``interleaved``."""

    sizes = dict.fromkeys(
        ("seq", "seq_blocks", "heads_q", "heads_kv", "half", "head_dim", "half_blocks", "parts"), "i32"
    )
    constexprs: ClassVar[tuple[str, ...]] = ("tokens", "heads", "block", "interleaved")
    steps: ClassVar[tuple[tuple[int, int, int], ...]]
    """Tiles to choose from, largest first: warps, a thread's accesses, and the least number of programs per SM."""
    most_registers: ClassVar[int] = _MAX_OPERAND_REGISTERS
    """A default takes more warps where a thread's tile needs more."""

    # -- from tensors to problems

    def refuse(self, named: Mapping[str, Tensor | None], sizes: Sizes, **options: Any) -> None:
        """Refuses tables that fit neither positions nor tokens."""
        q, cos, sin = named["q"], named["cos"], named["sin"]
        if q is None or cos is None or sin is None:
            return
        if cos.shape != sin.shape:
            raise UnsupportedProblem(f"cos and sin have one shape; got {tuple(cos.shape)} and {tuple(sin.shape)}")
        if cos.dim() == 3:
            if cos.shape[0] not in (1, q.shape[0]) or cos.shape[1] != q.shape[1]:
                raise UnsupportedProblem(
                    f"a table of three dimensions is (B or 1, S, R), here S = {q.shape[1]}; got {tuple(cos.shape)}: "
                    "pass (T, R/2) and positions"
                )
            if options["interleaved"] or named.get("positions") is not None:
                raise UnsupportedProblem(
                    "a (B or 1, S, R) table is gathered already and its halves repeat, which fits neither positions "
                    "nor interleaved pairs: pass a (T, R/2) table"
                )
        rotary = turning(cos)
        if rotary % 2 or not 0 < rotary <= q.shape[3]:
            raise UnsupportedProblem(
                f"tables of width {cos.shape[-1]} turn {rotary} channels, of a head's {q.shape[3]}: an even number "
                "from 2 to that is possible"
            )

    def facts(self, named: Mapping[str, Tensor | None], sizes: Sizes) -> dict[str, Scalar]:
        cos = named["cos"]
        return {"rotary": 0 if cos is None else turning(cos)}

    def problem(self, *operands: Tensor | None, **options: Any) -> P:
        p = super().problem(*operands, **options)
        if p.batch * p.seq * p.parts > MAX_PROGRAMS:
            raise UnsupportedProblem(
                f"tokens times blocks of {2 * p.block} channels are at most {MAX_PROGRAMS} in a launch; "
                f"got {p.batch * p.seq} times {p.parts}: split the batch"
            )
        return p

    def layout(self, named: Mapping[str, Tensor | None], sizes: Sizes, found: Mapping[str, Any]) -> dict[str, Scalar]:
        laid = super().layout(named, sizes, found)
        if isinstance(align := laid.get("align"), int):
            main = named["q"]
            assert main is not None
            bits = align | runs(sizes["head_dim"], found["rotary"], found["interleaved"]) * main.element_size()
            laid["align"] = bits & -bits
        return laid

    # -- configs

    def blocks(self, p: P, heads: int) -> int:
        """Blocks of ``heads`` heads of all operands."""
        return sum([-(-n // heads) for n in p.groups])

    def registers(self, p: P, c: C) -> int:
        """Per thread, in fp32: the pair, its cosine and sine; in a strided layout 64-bit addresses of each."""
        return self._per_thread(c) * (10 if p.layout == "strided" else 4)

    def _per_thread(self, c: C) -> int:
        return c.tokens * c.heads * c.block // (32 * c.warps)

    @of_both
    def accesses(self, p: P, c: C, gpu: GpuSpec) -> str | None:
        pairs = 32 * c.warps * self._per_thread(c)
        return tile_rules.accesses(pairs, c.warps, p.pairs_per_access, unit="pairs") if c.warps > 1 else None

    @of_both
    def registers_of_operands(self, p: P, c: C, gpu: GpuSpec) -> str | None:
        need = self.registers(p, c)
        if need <= _MAX_OPERAND_REGISTERS:
            return None
        return f"a thread's tile takes {need} registers; at most {_MAX_OPERAND_REGISTERS}"

    @of_both
    def block_of_all_pairs(self, p: P, c: C, gpu: GpuSpec) -> str | None:
        if c.block == p.block:
            return None
        pairs = p.half or -(-p.head_dim // 2)
        return f"block={c.block} does not cover {pairs} pairs by a power of two from 8 to 256, {p.block}"

    no_idle_heads = idle_rule("heads", lambda p: max(p.groups), "{p.heads_q} and {p.heads_kv} heads")
    no_idle_tokens = idle_rule("tokens", "seq", "{} tokens")

    def tile(self, p: P, gpu: GpuSpec, waste: float, *, taller: int = 1) -> C:
        """The first of ``steps`` whose programs fill the GPU.

        Heads that divide all operands' come before many heads: ``waste`` is how many heads a tile may have for each
        that is there. ``taller``: heads of a tile beyond what the step says.
        """
        most = min(64, power_of_two(max(p.groups)))
        while most > 1 and self.blocks(p, most) * most > waste * sum(p.groups):
            most //= 2
        for warps, accesses, least in self.steps:
            pairs = 32 * warps * accesses * max(2, p.pairs_per_access)
            heads = max(1, min(most, pairs // p.block * taller))
            tokens = max(1, min(16, power_of_two(p.seq), pairs // (p.block * heads)))
            most_warps = max(1, tokens * heads * p.block // (32 * p.pairs_per_access))
            c = self.Config(tokens, heads, p.block, min(warps, power_of_two(most_warps)))
            if warps <= most_warps and self.programs(p, c) >= gpu.sm_count * least:
                break
        while c.warps < 8 and self._per_thread(c) * (10 if p.layout == "strided" else 4) > self.most_registers:
            c = c.replace(warps=2 * c.warps)
        return c

    def programs(self, p: P, c: C) -> int:
        x, y, z = self.grid(p, c)
        return x * y * z

    def loads(self, p: P, c: C) -> int:
        """The tiles of heads that a program takes one after another."""
        return 1

    def estimate_us(self, p: P, c: C, gpu: GpuSpec) -> float:
        idle = STREAMING.idle
        there = sum(p.groups) / max(1, self.blocks(p, c.heads) * c.heads)
        return streaming.estimate_us(
            gpu,
            self.work(p).bytes * (1 - idle + idle / (there or 1.0)),
            self.grid(p, c),
            c.warps,
            2 * c.tokens * c.heads * c.block * p.itemsize * there,
            loads=self.loads(p, c),
            registers=max(32, self.registers(p, c)),
            coalesced=p.layout != "strided",
            walked=2 * c.tokens * c.heads * c.block / (32 * c.warps),
        )

    # -- kernels

    def numbers(self, p: P, c: C) -> tuple[int, ...]:
        seq_blocks, half_blocks = -(-p.seq // c.tokens), -(-p.half // p.block)
        return p.seq, seq_blocks, p.heads_q, p.heads_kv, p.half, p.head_dim, half_blocks, p.parts

    def divisible(self, p: P, c: C) -> dict[str, int]:
        if p.layout == "strided":
            return {}
        return {"head_dim": p.vec} | ({"half": p.pairs_per_access} if p.rotary else {})

    def constants(self, p: P, c: C) -> dict[str, int | bool | str]:
        return super().constants(p, c) | {"SPREAD": c.tokens * c.block >= 32 * c.warps}

    # -- samples

    def draw(self, p: P, name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor | None:
        import torch

        if name not in ("cos", "sin"):
            return None
        same = torch.Generator(generator.device).manual_seed(generator.initial_seed())  # one angle for both
        angles = torch.rand(shape, generator=same, device=generator.device) * _TURN
        return angles.cos() if name == "cos" else angles.sin()


def turning(table: Tensor) -> int:
    """Channels that ``table`` turns."""
    return table.shape[-1] * (4 - table.dim())


def turned(x: Tensor, c: Tensor, s: Tensor, interleaved: bool) -> Tensor:
    """``x`` (B, S, H, D) with its first channels turned by cosines and sines of the same dimensions, in their type."""
    import torch

    half = c.shape[-1]
    head, rest = x[..., : 2 * half].to(c.dtype), x[..., 2 * half :]
    x1, x2 = (head[..., ::2], head[..., 1::2]) if interleaved else (head[..., :half], head[..., half:])
    y1, y2 = x1 * c - x2 * s, x2 * c + x1 * s
    y = torch.stack((y1, y2), dim=-1).flatten(-2) if interleaved else torch.cat((y1, y2), dim=-1)
    return torch.cat((y.to(x.dtype), rest), dim=-1)
