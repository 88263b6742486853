"""The tensors of one parameter's update as kernels take them: this rank's part, dense, all lying alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cutekernels.errors import UnsupportedProblem
from cutekernels.ops.optimizer.op import ADAMW_STEP, AdamWProblem
from cutekernels.ops.shared.dtypes import GPU_DTYPES
from cutekernels.ops.shared.strides import is_dense, walk

MOMENTS = ("exp_avg", "exp_avg_sq")


class Kind(NamedTuple):
    """The common properties of one launch's parameters."""

    device: torch.device
    dtype: torch.dtype
    grad: torch.dtype
    moments: torch.dtype
    master: bool
    aligned: bool


@dataclass(frozen=True, slots=True)
class Operands:
    """``home``: the parameter, where ``param`` is a dense copy of it. ``grad`` is None where there is none yet."""

    param: Tensor
    grad: Tensor | None
    exp_avg: Tensor
    exp_avg_sq: Tensor
    master: Tensor | None
    step: Tensor
    home: Tensor | None

    @property
    def written(self) -> Tensor:
        """The tensor that others see changed."""
        return self.param if self.home is None else self.home

    @property
    def kept(self) -> tuple[Tensor, ...]:
        """All but the gradient."""
        kept = (self.param, self.exp_avg, self.exp_avg_sq, self.master, self.step)
        return tuple([t for t in kept if t is not None])

    def kind(self, narrow: bool = False) -> Kind:
        """``narrow``: take its addresses as unaligned, whatever they are."""
        grad = self.param if self.grad is None else self.grad
        bits = 0
        for t in (self.param, grad, self.exp_avg, self.exp_avg_sq, self.master):
            bits |= 0 if t is None else t.data_ptr()
        dtypes = self.param.dtype, grad.dtype, self.exp_avg.dtype
        return Kind(self.param.device, *dtypes, self.master is not None, bits % 16 == 0 and not narrow)

    def row(self) -> list[int]:
        """The tensor's row of a table, as kernels read it."""
        tensors = (self.param, self.exp_avg, self.exp_avg_sq, self.master, self.step)
        return [*[0 if t is None else t.data_ptr() for t in tensors], self.param.numel(), 0, 0]

    def problem(self, kind: Kind, elements: int, rate: bool, maximize: bool) -> AdamWProblem:
        """The problem of a launch of ``elements`` of this kind. Raises UnsupportedProblem where no kernel takes it."""
        grad = self.param if self.grad is None else self.grad
        inputs = (self.param, grad, self.exp_avg, self.exp_avg_sq, self.master, self.step, None)
        ADAMW_STEP.admit(inputs, maximize=maximize)
        results = (self.param, self.exp_avg, self.exp_avg_sq, self.master)
        return ADAMW_STEP.problem(*results, *inputs, maximize=maximize).replace(
            elements=elements,
            rate="device" if rate else "host",
            align=16 if kind.aligned else self.param.element_size(),
        )


def moments_dtype(param: Tensor, group: dict[str, Any]) -> torch.dtype:
    """The dtype that its group asks for, "param" or a type's name; the default, fp32, means fp64 beside fp64."""
    chosen = group.get("moments_dtype", "fp32")
    if chosen == "param":
        return param.dtype
    return wide_dtype(param) if chosen == "fp32" else GPU_DTYPES[chosen]


def wide_dtype(param: Tensor) -> torch.dtype:
    return torch.promote_types(param.dtype, torch.float32)


def operands(param: Tensor, group: dict[str, Any], state: dict[str, Any]) -> Operands:
    """A parameter beside its gradient and its ``state``, to which what is missing is added."""
    grad = param.grad
    if param.is_complex() or (grad is not None and (grad.is_sparse or grad.layout != torch.strided)):
        raise UnsupportedProblem(
            f"FusedAdamW takes dense real parameters; got {param.dtype} with a gradient of "
            f"{None if grad is None else grad.layout}: use torch.optim.SparseAdam, or view complex numbers as real ones"
        )
    if param.is_meta:
        raise UnsupportedProblem("FusedAdamW updates values, and a parameter is on the meta device: move it first")
    if "step" not in state:
        state["step"] = torch.zeros((), dtype=torch.float32, device=param.device)
    kind = moments_dtype(param, group)
    for name in MOMENTS:
        if name not in state:
            state[name] = torch.zeros_like(param, dtype=kind)
        elif state[name].dtype != kind:
            raise UnsupportedProblem(
                f"moments_dtype makes {name} {kind}, and the state has {state[name].dtype}: "
                "change it by a new FusedAdamW, whose load_state_dict converts"
            )
    wide = wide_dtype(param)
    if group.get("master_weights") and param.dtype != wide and "master" not in state:
        state["master"] = torch.empty_like(param, dtype=wide).copy_(param)
    local = shard(param, param)
    exp_avg, exp_avg_sq = (shard(state[name], param) for name in MOMENTS)
    master = shard(state["master"], param) if "master" in state and param.dtype != wide else None
    home: Tensor | None = None
    if not is_dense(local) or walk(local) != walk(exp_avg):
        home, local = local, torch.empty_like(exp_avg, dtype=local.dtype).copy_(local)
    grad = None if grad is None else alike(shard(grad, param), local)
    _check_alike(local, {"grad": grad, "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq, "master": master})
    step = state["step"]
    if step.dtype != torch.float32 or step.numel() != 1 or step.device != local.device:
        raise UnsupportedProblem(
            f"state['step'] is one number in fp32 on {local.device}; got shape {tuple(step.shape)} in {step.dtype} on "
            f"{step.device}: load_state_dict converts"
        )
    return Operands(local, grad, exp_avg, exp_avg_sq, master, step, home)


def _check_alike(param: Tensor, others: dict[str, Tensor | None]) -> None:
    for name, t in others.items():
        if t is None:
            continue
        if t.shape != param.shape or t.device != param.device:
            raise UnsupportedProblem(
                f"{name} is {tuple(t.shape)} on {t.device} beside a parameter {tuple(param.shape)} on {param.device}: "
                "bring both to one shape and device"
            )
        if walk(t) != walk(param) or not is_dense(t):
            raise UnsupportedProblem(
                f"{name} does not lie as its parameter, densely: its strides are {t.stride()}, the parameter's "
                f"{param.stride()}; load_state_dict makes state that does"
            )


def alike(grad: Tensor, param: Tensor) -> Tensor:
    """``grad``, copied where it does not lie as the dense ``param``."""
    if walk(grad) == walk(param) or grad.shape != param.shape:
        return grad
    return torch.empty_like(param, dtype=grad.dtype).copy_(grad)


def shard(t: Any, param: Any) -> Tensor:
    """The part of ``t`` that this rank holds, cut as ``param``: the update is elementwise."""
    if not hasattr(t, "placements"):
        return t  # type: ignore[no-any-return]
    if hasattr(param, "placements") and t.placements != param.placements:
        t = t.redistribute(placements=param.placements)
    return t.to_local()  # type: ignore[no-any-return]


def take_over(master: Tensor, param: Tensor) -> None:
    """Brings what others wrote to ``param`` into its master copy, whose low bits stay where they wrote nothing new."""
    master.copy_(torch.where(master.to(param.dtype) == param, master, param.to(master.dtype)))


# ---- the gradients' norm --------------------------------------------------------------------------------


class Mesh(NamedTuple):
    """Ranks that hold parts of a tensor: the dimensions of a device mesh over which it is sharded."""

    mesh: Any
    dims: tuple[int, ...]

    def sum_over(self, squares: Tensor) -> Tensor:
        for dim in self.dims:
            torch.distributed.all_reduce(squares, group=self.mesh.get_group(dim))
        return squares


def mesh_of(param: Any) -> Mesh | None:
    """None for a tensor that every rank holds whole."""
    if not hasattr(param, "placements"):
        return None
    dims = tuple([i for i, placement in enumerate(param.placements) if not placement.is_replicate()])
    return Mesh(param.device_mesh, dims) if dims else None


def norm_of(squares: Sequence[Tensor]) -> Tensor:
    """The norm over sums of squares, on the first one's device."""
    total = squares[0]
    for more in squares[1:]:
        total = total + more.to(total.device)
    return total.sqrt()


def clip_scale(norm: Tensor, max_norm: float) -> Tensor:
    """The factor of torch.nn.utils.clip_grad_norm_: NaN for a norm that is NaN."""
    return torch.clamp(max_norm / (norm + 1e-6), max=1.0)
