"""One AdamW update of one tensor, and the kernels that update all tensors in a table: the declarations.

``cutekernels.optim`` drives the table.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from cutekernels.errors import UnsupportedProblem
from cutekernels.op import Config, Problem, Scalar, Work, extent, knob, ladder, plain
from cutekernels.ops.shared import streaming
from cutekernels.ops.shared.dtypes import BYTES, WIDEST_BYTES
from cutekernels.ops.shared.operands import Array, Leads, Looks, Named, Sizes
from cutekernels.ops.shared.strides import is_dense, walk
from cutekernels.ops.shared.tile_rules import accesses_rule, elements_rule
from cutekernels.ops.shared.triton_op import TritonOp, TritonPart

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from cutekernels.gpu import GpuSpec


@dataclass(frozen=True)
class AdamWProblem(Problem):
    """``elements`` that lie densely in every operand. Master copies are fp32.

    ``grad``: the gradient's type, "same" as the parameter's or fp32. ``step`` and ``rate``: where the number of the
    step and the learning rate come from. ``align``: bytes that divide every address. ``moments``: both moments' type.
    """

    elements: int = extent(ladder)
    dtype: str = plain("fp32", "bf16", "fp16")
    grad: str = plain("same", "fp32")
    master: bool = plain(False, True)
    maximize: bool = plain(False, True)
    step: str = plain("host", "device")
    rate: str = plain("host", "device")
    align: int = plain(16, 4, 2)
    moments: str = plain("fp32", "bf16", "fp16")

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.dtype, self.grad) == ("fp32", "fp32"):
            raise UnsupportedProblem("beside fp32 parameters an fp32 gradient is called grad=same, not fp32")
        if (self.dtype, self.master) == ("fp32", True):
            raise UnsupportedProblem("fp32 parameters are their own master copy: leave master out")
        if self.align not in (WIDEST_BYTES, BYTES[self.dtype]):
            raise UnsupportedProblem(f"align is 16 or one element of {self.dtype}; it is {self.align}")

    @property
    def grad_dtype(self) -> str:
        return self.dtype if self.grad == "same" else "fp32"

    @property
    def vec(self) -> int:
        """Elements in one access: 16 bytes of the widest operand. More would have its stores cross threads."""
        if self.align != WIDEST_BYTES:
            return 1
        kinds = self.dtype, self.grad_dtype, self.moments, "fp32" if self.master else self.dtype
        return WIDEST_BYTES // max(BYTES[kind] for kind in kinds)


@dataclass(frozen=True)
class AdamWConfig(Config):
    """``block`` elements per program; ``evict="first"`` asks the caches to drop what is read and written once."""

    block: int = knob(256, 512, 1024, 2048, 4096)
    warps: int = knob(1, 2, 4, 8)
    evict: str = knob("normal", "first")


_TABLE = {"table_ptr": "*i64", "grads_ptr": "*i64", "chunks_ptr": "*i32"}
_EVICT = {"normal": "", "first": "evict_first"}
_NUMBERS = ("step", "rate")  # operands of one element
_MAX_PER_THREAD = 16  # elements: each takes an address, four values and what becomes of them
_DEPTH = 32.0  # a gradient and a moment several times the typical one may cancel: 4 ulp of fp32 of that
UPDATED = (0, 2, 3, 4)  # inputs that the in-place form writes to: those of the results' names


class Hyper(NamedTuple):
    """Numbers that every element's update needs of the hyper-parameters, in the kernels' order.

    ``c1`` and ``c2``: the bias corrections ``1 - beta1^t`` and ``sqrt(1 - beta2^t)``, or where the step t is on the
    device, the logarithms of the betas. Differences from 1 are taken in double precision: 1 - 0.999 in fp32 has
    four digits.
    """

    lr: float
    weight_decay: float
    w1: float
    beta2: float
    w2: float
    eps: float
    c1: float
    c2: float

    @classmethod
    def of(
        cls, lr: float, betas: tuple[float, float], eps: float, weight_decay: float, step: int | None = None
    ) -> Hyper:
        """``step``: counted from 1; None where it is on the device."""
        beta1, beta2 = betas
        if step is None:
            corrections = [math.log(beta) if beta > 0 else -1e4 for beta in betas]
        else:
            corrections = [1 - beta1**step, math.sqrt(1 - beta2**step)]
        return cls(lr, weight_decay, 1 - beta1, beta2, 1 - beta2, eps, *corrections)


class Update(TritonPart[AdamWProblem, AdamWConfig]):
    """One step of one tensor, with the numbers of :class:`Hyper`. The result of an absent master is empty."""

    revision = 1
    Problem = AdamWProblem
    Config = AdamWConfig
    suite = (
        "elements=1000",
        "elements=100003 align=4",
        "elements=1000000",
        "elements=1048577 dtype=bf16",
        "elements=1000003 dtype=fp16 grad=fp32 align=2 maximize=1",
        "elements=10000000 step=device rate=device",
        "elements=10000000 dtype=bf16 master=1",
        "elements=10000000 dtype=bf16 grad=fp32 master=1",
        "elements=50000000",
    )
    options = ("maximize",)
    out_param = Array("*elements", strides=(), result=True)
    out_exp_avg = Array("*elements", dtype="moments", strides=(), result=True)
    out_exp_avg_sq = Array("*elements", dtype="moments", strides=(), result=True)
    out_master = Array("*elements", dtype="wide", strides=(), result=True, given="master")
    param = Array("*elements", strides=())
    grad = Array("*elements", dtype="grad", strides=(), laid=True)
    exp_avg = Array("*elements", dtype="moments", strides=(), laid=True)
    exp_avg_sq = Array("*elements", dtype="moments", strides=(), laid=True)
    master = Array("*elements", dtype="wide", strides=(), laid=True, given="master")
    step = Array("*one", dtype="fp32", strides=(), given="step=device")
    rate = Array("*one", dtype="fp32", strides=(), given="rate=device")
    sizes = {"elements": "i64"}
    scalar_types = dict.fromkeys(Hyper._fields, "fp32")

    # -- calls

    def views(self, named: Named, **options: Any) -> Mapping[str, None]:
        """All operands are taken as they are where they lie densely and alike, whatever the order of dimensions."""
        runs = _runs(named)
        return dict.fromkeys(named if all(is_dense(t) and walk(t) == walk(runs[0]) for t in runs) else ())

    def derive(self, sizes: Sizes, **options: Any) -> None:
        sizes.setdefault("one", 1)

    def refuse(self, named: Named, sizes: Sizes, **options: Any) -> None:
        if sizes["one"] != 1:
            raise UnsupportedProblem(f"a step or lr on the device is one number in fp32; got {sizes['one']}")
        param, master = named["param"], named["master"]
        if master is not None and param is not None and param.dtype == master.dtype:
            raise UnsupportedProblem(f"{param.dtype} parameters are their own master copy: leave master out")
        exp_avg, exp_avg_sq = named["exp_avg"], named["exp_avg_sq"]
        if exp_avg is not None and exp_avg_sq is not None and exp_avg.dtype != exp_avg_sq.dtype:
            raise UnsupportedProblem(
                f"both moments have one dtype; got {exp_avg.dtype} and {exp_avg_sq.dtype}: convert one of them"
            )

    def admit(self, inputs: Sequence[Tensor | None], results: Sequence[Tensor] = (), **options: Any) -> None:
        present = results if inputs[4] is not None else results[:3]  # an absent master copy has an empty place
        super().admit(inputs, present, **options)

    def result(self, name: str, named: Named, sizes: Sizes, leads: Leads, **options: Any) -> Looks:
        """The looks of the input that it renews; empty for an absent master copy."""
        t = named[name.removeprefix("out_")]
        return (t.shape, (t.dtype,)) if t is not None else ((0,), (self._main(named).dtype,))

    def layout(self, named: Named, sizes: Sizes, found: Mapping[str, Any]) -> dict[str, Scalar]:
        aligned = all(t.data_ptr() % WIDEST_BYTES == 0 for t in _runs(named))
        return {"align": WIDEST_BYTES if aligned else BYTES[found["dtype"]]}

    def evaluate(self, *args: Any, **options: Any) -> tuple[Tensor, ...]:
        import torch

        param, grad, exp_avg, exp_avg_sq, master, step, rate, *numbers = args
        lr, weight_decay, w1, beta2, w2, eps, bias1, root = numbers
        if rate is not None:
            lr = rate.double()
        if step is not None:
            count = step.double().clamp_min(1)
            bias1, root = -torch.expm1(count * bias1), (-torch.expm1(count * root)).sqrt()
        g, p = grad.double(), (param if master is None else master).double()
        if options["maximize"]:
            g = -g
        m = exp_avg.double() + w1 * (g - exp_avg.double())
        v = exp_avg_sq.double() * beta2 + w2 * g * g
        p = p * (1 - lr * weight_decay) - lr / bias1 * (m / (v.sqrt() / root + eps))
        kept = param.new_empty(0) if master is None else p.to(master.dtype)
        return p.to(param.dtype), m.to(exp_avg.dtype), v.to(exp_avg_sq.dtype), kept

    # -- configs

    accesses = accesses_rule("block")
    most_elements = elements_rule("block", most=_MAX_PER_THREAD)

    def default(self, p: AdamWProblem, gpu: GpuSpec) -> AdamWConfig:
        # Blocks of 4 warps with an access a thread, or two where even those fill the GPU eight times over.
        warps = 4
        while warps > 1 and p.elements < gpu.sm_count * 32 * warps * p.vec:
            warps //= 2
        block = max(256, 32 * warps * p.vec)
        if p.elements >= 64 * gpu.sm_count * block and 2 * block <= 32 * warps * _MAX_PER_THREAD:
            block *= 2
        return AdamWConfig(block, warps, "normal")

    def grid(self, p: AdamWProblem, c: AdamWConfig) -> tuple[int, int, int]:
        return -(-p.elements // c.block), 1, 1

    def estimate_us(self, p: AdamWProblem, c: AdamWConfig, gpu: GpuSpec) -> float:
        return streaming.estimate_us(gpu, self.work(p).bytes, self.grid(p, c), c.warps, 16 * c.block)

    def work(self, p: AdamWProblem) -> Work:
        # Moments in and out, the gradient; the parameter in and out, or its copy in and out and itself out.
        item = BYTES[p.dtype]
        each = 4 * BYTES[p.moments] + BYTES[p.grad_dtype] + (8 + item if p.master else 2 * item)
        return Work(flops=float(15 * p.elements), bytes=float(each * p.elements), depth=_DEPTH)

    # -- kernels

    def constants(self, p: AdamWProblem, c: AdamWConfig) -> dict[str, int | bool | str]:
        found: dict[str, int | bool | str] = {"BLOCK": c.block, "VEC": p.vec, "EVICT": _EVICT[c.evict]}
        flags = {"MASTER": p.master, "MAXIMIZE": p.maximize}
        return found | flags | {"LR_ON_DEVICE": p.rate == "device", "STEP_ON_DEVICE": p.step == "device"}

    def divisible(self, p: AdamWProblem, c: AdamWConfig) -> dict[str, int]:
        kinds = {name: self.kind(p, name) for name in self.operands if name not in _NUMBERS}
        return {f"{name}_ptr": p.vec * BYTES[kind] for name, kind in kinds.items() if kind is not None}

    # -- samples: the third step of a parameter, its moments as two gradients of its kind would have left them

    def arrange(self, p: AdamWProblem, name: str, values: Tensor) -> Tensor:
        """``values`` at an address that is a multiple of ``p.align`` bytes and of no more."""
        skew = p.align % WIDEST_BYTES // values.element_size() or int(p.align < WIDEST_BYTES)
        return values.new_empty(values.numel() + skew)[skew:].copy_(values) if skew else values

    def place(self, p: AdamWProblem, name: str, result: Tensor) -> Tensor:
        return self.arrange(p, name, result)

    def draw(self, p: AdamWProblem, name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor | None:
        import torch

        if name in _NUMBERS:
            return torch.full(shape, 3.0 if name == "step" else 0.01, device=generator.device)
        scale = {"exp_avg": 0.1, "exp_avg_sq": 0.05}.get(name, 1.0)
        values = torch.randn(shape, generator=generator, device=generator.device) * scale
        return values.abs_().add_(0.05).square_() if name == "exp_avg_sq" else values

    def draw_scalars(self, p: AdamWProblem, generator: torch.Generator) -> tuple[Any, ...]:
        return Hyper.of(0.01, (0.9, 0.999), 1e-8, 0.1, 3 if p.step == "host" else None)


class AdamW(Update, TritonOp[AdamWProblem, AdamWConfig]):
    """One step of one tensor."""

    name = "adamw_step"
    kernel = "optimizer:adamw_step"


class Tabled(Update):
    """An op over all tensors in a table, in place. It borrows the config of one tensor of as many elements.

    A launch takes the grid and ``arguments``, tensors by their addresses.
    """

    arguments: ClassVar[dict[str, str]]

    def launch_arguments(
        self, p: AdamWProblem, c: AdamWConfig
    ) -> tuple[dict[str, str], dict[str, Any], dict[str, int]]:
        return dict(self.arguments), {}, {}


class AdamWTable(Tabled, TritonOp[AdamWProblem, AdamWConfig]):
    """:class:`AdamW` of all tensors in a table."""

    name = "adamw_table"
    kernel = "optimizer:adamw_table"
    arguments = _TABLE | {"rate_ptr": "*fp32", "norm": "i64", "max_norm": "fp32"} | dict.fromkeys(Hyper._fields, "fp32")

    def constants(self, p: AdamWProblem, c: AdamWConfig) -> dict[str, int | bool | str]:
        kinds = {"PARAM": p.dtype, "GRAD": p.grad_dtype, "MOMENTS": p.moments}
        return super().constants(p, c) | kinds | ({} if p.rate == "device" else {"rate_ptr": 0})


class AdamWSquares(Tabled, TritonOp[AdamWProblem, AdamWConfig]):
    """Sums of squares of a table's gradients, one per program."""

    name = "adamw_squares"
    kernel = "optimizer:adamw_squares"
    arguments = _TABLE | {"sums_ptr": "*fp32", "chunks": "i64"}

    def constants(self, p: AdamWProblem, c: AdamWConfig) -> dict[str, int | bool | str]:
        vec = WIDEST_BYTES // BYTES[p.grad_dtype] if p.align == WIDEST_BYTES else 1
        return {"BLOCK": c.block, "VEC": vec, "GRAD": p.grad_dtype}


class AdamWCount(Tabled, TritonOp[AdamWProblem, AdamWConfig]):
    """One more step of every tensor in a table that has a gradient."""

    name = "adamw_count"
    kernel = "optimizer:adamw_count"
    arguments = {"table_ptr": "*i64", "grads_ptr": "*i64", "tensors": "i32"}

    def constants(self, p: AdamWProblem, c: AdamWConfig) -> dict[str, int | bool | str]:
        return {"BLOCK": c.block}


def _runs(named: Named) -> list[Tensor]:
    """Operands of as many elements as the parameter, but for empty ones."""
    return [t for name, t in named.items() if name not in _NUMBERS and t is not None and t.numel()]


ADAMW_STEP = AdamW()
ADAMW_TABLE, ADAMW_SQUARES, ADAMW_COUNT = AdamWTable(), AdamWSquares(), AdamWCount()
