"""The tensors of one parameter's update: this rank's part of each, lying alike where the parameter is dense."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cutekernels.errors import UnsupportedProblem
from cutekernels.ops.shared.dtypes import GPU_DTYPES
from cutekernels.ops.shared.strides import is_dense, relation, span_bytes, walk

MOMENTS = ("exp_avg", "exp_avg_sq")


class Operands(NamedTuple):
    """As the op names and orders them. ``grad`` is on the meta device where there is none."""

    param: Tensor
    grad: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    master: Tensor | None
    step: Tensor

    def row(self) -> list[int]:
        """The tensor's row of a table, as kernels read it."""
        tensors = (self.param, self.exp_avg, self.exp_avg_sq, self.master, self.step)
        return [*[0 if t is None else t.data_ptr() for t in tensors], self.param.numel(), 0, 0]


def wide_dtype(param: Tensor) -> torch.dtype:
    return torch.promote_types(param.dtype, torch.float32)


def state_dtypes(param: Tensor, group: dict[str, Any]) -> dict[str, torch.dtype]:
    """Types of the state of a parameter in ``group``. Its moments_dtype "fp32", the default, is fp64 beside fp64."""
    chosen, wide = group.get("moments_dtype", "fp32"), wide_dtype(param)
    moments = param.dtype if chosen == "param" else wide if chosen == "fp32" else GPU_DTYPES[chosen]
    return {"step": torch.float32, **dict.fromkeys(MOMENTS, moments), "master": wide}


def operands(param: Tensor, group: dict[str, Any], state: dict[str, Any]) -> Operands:
    """A parameter beside its gradient and its ``state``, to which what is missing is added."""
    grad = param.grad
    is_real = param.is_floating_point() and param.dtype.itemsize > 1 and (grad is None or not grad.is_complex())
    if not is_real or (grad is not None and (grad.is_sparse or grad.layout != torch.strided)):
        raise UnsupportedProblem(
            f"FusedAdamW takes dense real parameters of 16 bits or more; got {param.dtype} with a gradient of "
            f"{None if grad is None else grad.layout}: use torch.optim.SparseAdam, or view complex numbers as real ones"
        )
    if not param.is_meta and any(n > 1 and by == 0 for n, by in zip(param.shape, param.stride(), strict=True)):
        raise UnsupportedProblem(
            f"a parameter of {tuple(param.shape)} has strides {param.stride()}: its elements share memory, and each "
            "would be updated several times; clone it"
        )
    if param.is_meta:
        raise UnsupportedProblem("FusedAdamW updates values, and a parameter is on the meta device: move it first")
    dtypes, local = state_dtypes(param, group), shard(param, param)
    has_master = param.dtype != dtypes["master"] and ("master" in state or group.get("master_weights", False))
    found = {} if grad is None else {"grad": alike(shard(grad, param), local)}
    if "step" not in state:
        state["step"] = torch.zeros((), dtype=torch.float32, device=param.device)
    for name in (*MOMENTS, "master") if has_master else MOMENTS:
        if name not in state:
            state[name] = torch.zeros_like(param, dtype=dtypes[name])
            if name == "master":
                state[name].copy_(param)
        elif state[name].dtype != dtypes[name]:
            raise UnsupportedProblem(
                f"{'moments_dtype' if name in MOMENTS else 'master_weights'} makes {name} {dtypes[name]}, and the "
                f"state has {state[name].dtype}: change it by a new FusedAdamW, whose load_state_dict converts"
            )
        state[name] = alike(state[name], param)  # which may lie otherwise by now, by channels for one
        found[name] = shard(state[name], param)
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
    missing = torch.empty_like(local, device="meta")
    avg, sq = (found[name] for name in MOMENTS)
    return Operands(local, found.get("grad", missing), avg, sq, found.get("master"), step)


def refuse_shared(params: Iterable[Tensor]) -> None:
    """Refuses two parameters over one memory: an update of one would be lost in the other's, or in its master."""
    reaching: list[Tensor] = []  # those that end behind the next one's beginning
    for t in sorted(filter(Tensor.numel, params), key=Tensor.data_ptr):
        reaching = [other for other in reaching if other.data_ptr() + span_bytes(other) > t.data_ptr()]
        for other in reaching:
            if relation(other, t) != "apart":
                raise UnsupportedProblem(
                    f"parameters of {tuple(other.shape)} and {tuple(t.shape)} share memory, and each would be updated "
                    "by itself: tie them by one nn.Parameter in both places, or leave one out"
                )
        reaching.append(t)


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


def ranks_beside(param: Any) -> tuple[Any, ...]:
    """Process groups over which ``param`` is sharded, one for each such dimension of its mesh."""
    placements = enumerate(getattr(param, "placements", ()))
    return tuple([param.device_mesh.get_group(i) for i, placement in placements if not placement.is_replicate()])


def clip_scale(norm: Tensor, max_norm: float) -> Tensor:
    """The factor of torch.nn.utils.clip_grad_norm_: NaN for a norm that is NaN."""
    return torch.clamp(max_norm / (norm + 1e-6), max=1.0)
