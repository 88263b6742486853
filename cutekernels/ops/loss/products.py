"""Common ground of losses over a vocabulary: checks, and products, logits of a few tokens and classes at a time.

Tokens are taken in chunks, classes in blocks, so that no piece of the logits is over 64 MB. Three products of a block:
the logits ``x @ weight.T``, and with their gradient ``dz`` in the logits' place ``dz @ weight`` and ``dz.T @ x``.
Logits and dz are in x's type, each rounded once, as ``nn.Linear`` and autograd round them; sums are fp32.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from cutekernels.errors import UnsupportedProblem
from cutekernels.ops.loss.rows import LOGIT_GRADIENT, LOGIT_STATISTICS, MAXIMUM, TERMS
from cutekernels.ops.products.api import gemm
from cutekernels.ops.shared.calls import call, register
from cutekernels.ops.shared.checks import check_number, check_tensor
from cutekernels.ops.shared.dtypes import DTYPES
from cutekernels.ops.shared.paths import transformed

MOST_BYTES = 64_000_000  # of a block of logits
MOST_ROWS = 2048  # of a chunk: its products are as fast as those of more rows, and dweight is added up that often
_WIDTH = 256  # blocks have multiples of it: columns of the widest tiles
_ROWS = 128  # and chunks of this
_VECTOR = 8  # classes; a ragged last block is two, so that most of it moves by 16 bytes

_GPU_TYPES = tuple(DTYPES.values())
_INDICES = (torch.int64, torch.int32)
GREATEST = 3e38  # of a factor, which kernels take in fp32


# ---- checks ---------------------------------------------------------------------------------------------


def flatten(
    op: str, x: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor, tuple[int, ...]]:
    """``x`` as rows, the targets as a vector, and the shape of targets."""
    for name, t, optional in (
        ("x", x, False), ("weight", weight, False), ("targets", targets, False), ("bias", bias, True)
    ):  # fmt: skip
        check_tensor(op, name, t, optional=optional)
    check_type(op, x)
    if weight.dim() != 2 or x.dim() == 0 or x.shape[-1] != weight.shape[1]:
        raise UnsupportedProblem(
            f"{op} takes x (..., K) and weight (V, K); got {tuple(x.shape)} and {tuple(weight.shape)}"
        )
    if targets.shape != x.shape[:-1]:
        raise UnsupportedProblem(
            f"{op} takes a target for each row of x, {tuple(x.shape[:-1])}; got {tuple(targets.shape)}: shift and "
            "flatten both alike"
        )
    rows = math.prod(x.shape[:-1])
    return x.reshape(rows, x.shape[-1]), targets.reshape(rows), tuple(targets.shape)


def check_type(op: str, x: Tensor) -> None:
    lowered = x.device.type == "cuda" and torch.is_autocast_enabled("cuda")
    wide = (torch.float32, torch.float64) if x.device.type != "cuda" or lowered else ()
    if x.dtype not in (*_GPU_TYPES, *wide):
        raise UnsupportedProblem(
            f"{op} takes x in fp16 or bf16 (on the CPU fp32 and fp64 too); got {x.dtype}: cast it, or use autocast"
        )


def shape(op: str, temperature: object, softcap: object) -> tuple[float, float]:
    """``1 / temperature``, and the cap or 0."""
    check_number(op, "temperature", temperature, 1e-30, GREATEST)
    if softcap is not None:
        check_number(op, "softcap", softcap, 1e-30, GREATEST)
    return 1.0 / float(temperature), 0.0 if softcap is None else float(softcap)  # type: ignore[arg-type]


def check(
    op: str,
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None,
    class_weight: Tensor | None,
    *,
    ignore_index: int,
    first: int | None,
) -> None:
    """Raises UnsupportedProblem for operands that pose no problem. ``first``: of a shard; None for a whole vocabulary,
    whose targets are looked at where that is free: on the CPU.
    """
    check_type(op, x)
    if weight.dtype != x.dtype:
        raise UnsupportedProblem(f"{op} takes weight in x's type {x.dtype}; got {weight.dtype}: cast it")
    if x.dim() != 2 or weight.dim() != 2 or x.shape[1] != weight.shape[1]:
        raise UnsupportedProblem(f"{op} takes x (N, K) and weight (V, K); got {tuple(x.shape)}, {tuple(weight.shape)}")
    if not len(weight):
        raise UnsupportedProblem(f"{op} takes a vocabulary of one class at least; weight has none")
    if targets.dtype not in _INDICES or targets.shape != x.shape[:1]:
        raise UnsupportedProblem(
            f"{op} takes targets as int64 or int32, one for each row; got {targets.dtype} {tuple(targets.shape)}"
        )
    for name, t in (("bias", bias), ("class_weight", class_weight)):
        if t is not None and t.shape != weight.shape[:1]:
            raise UnsupportedProblem(f"{op} takes {name} as ({len(weight)},); got {tuple(t.shape)}")
    if bias is not None and bias.dtype not in (x.dtype, torch.float32):
        raise UnsupportedProblem(f"{op} takes bias in x's type {x.dtype} or fp32; got {bias.dtype}: cast it")
    for name, t in (("weight", weight), ("targets", targets), ("bias", bias), ("class_weight", class_weight)):
        if t is not None and t.device != x.device:
            raise UnsupportedProblem(f"{op} takes operands of one device; {name} is on {t.device}, x on {x.device}")
    if first is None and targets.device.type == "cpu" and targets.numel() and not torch.compiler.is_compiling():
        wrong = (targets != ignore_index) & ((targets < 0) | (targets >= len(weight)))
        if type(wrong) is Tensor and not transformed() and bool(wrong.any()):  # else it is seen within
            at = int(wrong.nonzero()[0])
            raise UnsupportedProblem(
                f"{op} takes targets from 0 to {len(weight) - 1}, or ignore_index={ignore_index}; target {at} is "
                f"{int(targets[at])}"
            )


def rows_contiguous(weight: Tensor) -> Tensor:
    return weight if weight.stride(1) == 1 or weight.shape[1] == 1 else weight.contiguous()


def class_weights(class_weight: Tensor | None, targets: Tensor, classes: int, dtype: torch.dtype) -> Tensor:
    """The weight of each row's target in ``dtype``; NaN for targets outside the classes, those of ignored rows too."""
    inside = (targets >= 0) & (targets < classes)
    if class_weight is None:
        return torch.where(inside, 1.0, torch.nan).to(dtype)
    return torch.where(inside, class_weight[targets.clamp(0, classes - 1).long()].to(dtype), torch.nan)


# ---- products -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Classifier:
    """Where logits come from: ``z = softcap(x @ weight.T + bias) / temperature``, of classes from ``first`` on.

    ``moments`` and ``totals``: which sums the loss needs beside the sum of exponentials (see ``rows.py``).
    """

    weight: Tensor  # (V, K)
    bias: Tensor | None  # (V,)
    class_weight: Tensor | None  # (V,) fp32, or fp64 beside fp64
    first: int
    ignore: int
    scale: float  # 1 / temperature
    cap: float  # 0 for none
    moments: bool
    totals: bool

    @property
    def options(self) -> tuple[bool, bool, bool]:
        return self.cap != 0.0, self.moments, self.totals

    @property
    def factor(self) -> float:
        """From a state's ``u`` to the logit ``z``: see ``kernels/triton/loss.py``."""
        return self.scale * (self.cap or 1.0)

    @property
    def shape(self) -> tuple[float, float]:
        """``scale`` and ``cap`` as kernels take them."""
        return self.scale, self.cap or 1.0

    def classes(self, begin: int, end: int) -> Tensor | None:
        return None if self.class_weight is None else self.class_weight[begin:end]

    def write_logits(self, x: Tensor, begin: int, end: int, out: Tensor) -> None:
        """The products of classes ``begin`` to ``end``: neither softcap nor temperature."""
        bias = None if self.bias is None else self.bias[begin:end]
        gemm(x, self.weight[begin:end].t(), bias=bias, out=out)


@dataclass
class Gradients:
    """Where gradients go; None for those nobody asked for.

    ``dweight`` is added up over chunks in its own type, ``dbias`` in fp32 or better.
    """

    dx: Tensor | None
    dweight: Tensor | None
    dbias: Tensor | None

    @classmethod
    def fresh(
        cls, x: Tensor, weight: Tensor, bias: Tensor | None, wants: Sequence[bool], *, wide: bool = False
    ) -> Gradients:
        """Memory for those of x, weight and bias that are wanted. ``wide``: that of weight in fp32 or better."""
        sums = torch.promote_types(x.dtype, torch.float32)
        wants_x, wants_weight, wants_bias = wants
        return cls(
            torch.empty_like(x) if wants_x else None,
            torch.empty_like(weight, dtype=sums if wide else weight.dtype) if wants_weight else None,
            torch.zeros_like(bias, dtype=sums) if wants_bias and bias is not None else None,
        )

    @property
    def wanted(self) -> bool:
        return self.dx is not None or self.dweight is not None or self.dbias is not None

    def of_rows(self, begin: int, end: int) -> Gradients:
        """Where those of some rows go."""
        return replace(self, dx=None if self.dx is None else self.dx[begin:end])

    def rounded(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """In the types of x, weight and bias: empty tensors for those nobody wants."""
        if self.dweight is not None and not len(x):
            self.dweight.zero_()
        return (
            x.new_empty(0) if self.dx is None else self.dx,
            x.new_empty(0) if self.dweight is None else self.dweight.to(weight.dtype),
            x.new_empty(0) if self.dbias is None or bias is None else self.dbias.to(bias.dtype),
        )


def fake_gradients(x: Tensor, weight: Tensor, bias: Tensor | None, wants: Sequence[bool]) -> tuple[Tensor, ...]:
    """Fakes of :meth:`Gradients.rounded`."""
    found = zip((x, weight, bias), wants, strict=True)
    return tuple(
        [
            torch.empty_like(t, memory_format=torch.contiguous_format) if t is not None and wanted else x.new_empty(0)
            for t, wanted in found
        ]
    )


def chunks(rows: int) -> Iterator[tuple[int, int]]:
    """Ranges of tokens, about equally many each."""
    count = -(-rows // MOST_ROWS)
    size = -(-rows // max(1, count) // _ROWS) * _ROWS
    for begin in range(0, rows, max(1, size)):
        yield begin, min(begin + size, rows)


def blocks(classes: int, rows: int, element_bytes: int) -> list[tuple[int, int]]:
    """Ranges of classes, about equally many each, that make at most MOST_BYTES with so many rows."""
    most = max(_WIDTH, MOST_BYTES // (max(1, rows) * element_bytes) // _WIDTH * _WIDTH)
    count = -(-classes // most)
    size = -(-classes // max(1, count) // _WIDTH) * _WIDTH
    found = [(begin, min(begin + size, classes)) for begin in range(0, classes, max(1, size))]
    if found:
        begin, end = found[-1]
        whole = begin + (end - begin) // _VECTOR * _VECTOR
        if begin < whole < end:
            found[-1:] = [(begin, whole), (whole, end)]
    return found


def fresh_state(x: Tensor, rows: int) -> Tensor:
    """The state of rows of which no class has been seen."""
    state = x.new_zeros((rows, TERMS), dtype=torch.promote_types(x.dtype, torch.float32))
    state.select(1, MAXIMUM).fill_(-torch.inf)
    return state


def read(x: Tensor, targets: Tensor, of: Classifier, state: Tensor, keep: bool) -> list[Tensor]:
    """Brings ``state`` (rows, TERMS) up to date with all classes. The blocks of logits, if they are to be kept."""
    rows, kept = len(x), []
    buffer: Tensor | None = None
    for begin, end in blocks(len(of.weight), rows, x.element_size()):
        if keep or buffer is None:
            buffer = x.new_empty(rows * (end - begin))
        logits = buffer[: rows * (end - begin)].view(rows, end - begin)
        of.write_logits(x, begin, end, logits)
        operands = (logits, targets, of.classes(begin, end), state)
        scalars = (of.first + begin, of.ignore, *of.shape)
        call(LOGIT_STATISTICS, operands, of.options, scalars, out=(_alias(state),))
        if keep:
            kept.append(logits)
    return kept


def differentiate(
    x: Tensor, targets: Tensor, of: Classifier, factors: Tensor, into: Gradients, first_chunk: bool, kept: list[Tensor]
) -> None:
    """Adds one chunk's gradients, whose rows have ``factors`` (rows, TERMS): the state's MAXIMUM, the logarithm of its
    SUM, a, b, t, s.

    ``kept``: its blocks of logits, which are used up; computed again where there are none.
    """
    ranges = blocks(len(of.weight), len(x), x.element_size())
    count = len(ranges) - (len(ranges) > 1 and ranges[-1][1] - ranges[-1][0] < _VECTOR)
    parts: Tensor | None = None
    before: Tensor | None = None
    widest = max([end - begin for begin, end in ranges], default=0)
    buffer = None if kept else x.new_empty(len(x) * widest)
    if into.dx is not None and count > 1:
        # A part of dx for each block, rounded once, then their sum in fp32: as exact as one product over all classes,
        # but for one rounding.
        parts = x.new_empty((count, *x.shape))
    for i in reversed(range(len(ranges))):  # the last blocks of logits may still be in the L2 cache
        begin, end = ranges[i]
        if buffer is None:
            dz = kept[i]
            kept[i] = x  # the block is free as soon as its products are issued
        else:
            dz = buffer[: len(x) * (end - begin)].view(len(x), end - begin)
            of.write_logits(x, begin, end, dz)
        operands = (dz, targets, of.classes(begin, end), factors)
        call(LOGIT_GRADIENT, operands, of.options, (of.first + begin, *of.shape), out=(_alias(dz),))
        if into.dx is not None:
            weight = of.weight[begin:end]
            if i == count:  # a ragged end's few classes, to which the block before adds its own
                before = gemm(dz, weight)
            else:
                beta = 0.0 if before is None else 1.0
                gemm(dz, weight, before, beta=beta, out=into.dx if parts is None else parts[i])
                before = None
        if into.dweight is not None:
            _add_product(dz, x, into.dweight[begin:end], first_chunk)
        if into.dbias is not None:
            into.dbias[begin:end] += dz.sum(0, dtype=into.dbias.dtype)
    if parts is not None and into.dx is not None:
        torch.sum(parts, 0, out=into.dx)  # halves are added in fp32


def _alias(t: Tensor) -> Tensor:
    """``t`` as a tensor of its own: calls with one tensor in two places are not replayed."""
    return t.detach()


def _add_product(dz: Tensor, x: Tensor, dweight: Tensor, first_chunk: bool) -> None:
    """``dweight += dz.T @ x``, or its first value."""
    if dweight.dtype == x.dtype:
        if first_chunk:
            gemm(dz.t(), x, out=dweight)
        else:
            gemm(dz.t(), x, dweight, beta=1.0, out=dweight)
    elif first_chunk:
        dweight.copy_(gemm(dz.t(), x))
    else:
        dweight += gemm(dz.t(), x)


register(LOGIT_STATISTICS)
register(LOGIT_GRADIENT)
