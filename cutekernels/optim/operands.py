"""The tensors of one parameter's update: this rank's part of each, lying alike where the parameter is dense."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from cutekernels.errors import UnsupportedProblem
from cutekernels.ops.shared.dtypes import GPU_DTYPES
from cutekernels.ops.shared.strides import is_dense, walk

MOMENTS = ("exp_avg", "exp_avg_sq")


class Operands(NamedTuple):
    """In the order of the op. ``grad`` is on the meta device where there is none."""

    param: Tensor
    grad: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    master: Tensor | None
    step: Tensor

    @property
    def is_dense(self) -> bool:
        """Whether all lie densely and alike, as kernels take them."""
        return all(t is None or (is_dense(t) and walk(t) == walk(self.param)) for t in self[:5])

    def row(self) -> list[int]:
        """The tensor's row of a table, as kernels read it."""
        tensors = (self.param, self.exp_avg, self.exp_avg_sq, self.master, self.step)
        return [*[0 if t is None else t.data_ptr() for t in tensors], self.param.numel(), 0, 0]


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
    kind, wide, local = moments_dtype(param, group), wide_dtype(param), shard(param, param)
    if "step" not in state:
        state["step"] = torch.zeros((), dtype=torch.float32, device=param.device)
    for name in MOMENTS:
        if name not in state:
            state[name] = torch.zeros_like(param, dtype=kind)
        elif state[name].dtype != kind:
            raise UnsupportedProblem(
                f"moments_dtype makes {name} {kind}, and the state has {state[name].dtype}: "
                "change it by a new FusedAdamW, whose load_state_dict converts"
            )
    if group.get("master_weights") and param.dtype != wide and "master" not in state:
        state["master"] = torch.empty_like(param, dtype=wide).copy_(param)
    names = (*MOMENTS, "master") if "master" in state and param.dtype != wide else MOMENTS
    for name in names:  # the parameter may lie otherwise by now, by channels for one
        state[name] = alike(state[name], param)
    found = {name: shard(state[name], param) for name in names}
    if grad is not None:
        found["grad"] = alike(shard(grad, param), local)
    for name, t in found.items():
        if t.shape != local.shape or t.device != local.device:
            raise UnsupportedProblem(
                f"{name} is {tuple(t.shape)} on {t.device} beside a parameter {tuple(local.shape)} on {local.device}: "
                "bring both to one shape and device"
            )
    step = state["step"]
    if step.dtype != torch.float32 or step.numel() != 1 or step.device != local.device:
        raise UnsupportedProblem(
            f"state['step'] is one number in fp32 on {local.device}; got shape {tuple(step.shape)} in {step.dtype} on "
            f"{step.device}: load_state_dict converts"
        )
    moments = [found[name] for name in MOMENTS]
    missing = torch.empty_like(local, device="meta")
    return Operands(local, found.get("grad", missing), moments[0], moments[1], found.get("master"), step)


def alike(t: Tensor, param: Tensor) -> Tensor:
    """``t``, copied where it does not lie as a dense ``param``."""
    if walk(t) == walk(param) or t.shape != param.shape or not is_dense(param):
        return t
    return torch.empty_like(param, dtype=t.dtype).copy_(t)


def shard(t: Any, param: Any) -> Tensor:
    """The part of ``t`` that this rank holds, cut as ``param``: the update is elementwise."""
    if not hasattr(t, "placements"):
        return t  # type: ignore[no-any-return]
    if hasattr(param, "placements") and t.placements != param.placements:
        t = t.redistribute(placements=param.placements)
    return t.to_local()  # type: ignore[no-any-return]


class Mesh(NamedTuple):
    """Ranks that hold parts of a tensor: the dimensions of a device mesh over which it is sharded."""

    mesh: Any
    dims: tuple[int, ...]

    @classmethod
    def of(cls, param: Any) -> Mesh | None:
        """None for a tensor that every rank holds whole."""
        if not hasattr(param, "placements"):
            return None
        dims = tuple([i for i, placement in enumerate(param.placements) if not placement.is_replicate()])
        return cls(param.device_mesh, dims) if dims else None

    def sum_over(self, squares: Tensor) -> Tensor:
        for dim in self.dims:
            torch.distributed.all_reduce(squares, group=self.mesh.get_group(dim))
        return squares


def clip_scale(norm: Tensor, max_norm: float) -> Tensor:
    """The factor of torch.nn.utils.clip_grad_norm_: NaN for a norm that is NaN."""
    return torch.clamp(max_norm / (norm + 1e-6), max=1.0)
