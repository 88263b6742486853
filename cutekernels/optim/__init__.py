"""``FusedAdamW``: torch's AdamW over a table of all parameters, updated in a launch per group and kind of parameter.

Kernels read the step counts on the device (one per parameter, as ``torch.optim.AdamW`` with ``fused=True`` keeps
them), the norm that gradients are clipped by, and the learning rate too where it is a tensor. So steps never wait for
the device, and replay correctly from a CUDA graph. What a step launches is planned once (``plan.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import zip_longest
from numbers import Real
from operator import is_
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from cutekernels.errors import UnsupportedProblem
from cutekernels.ops.optimizer.api import check_hyper
from cutekernels.ops.optimizer.op import Hyper
from cutekernels.ops.shared.checks import check_flag, check_number, quote
from cutekernels.ops.shared.dtypes import GPU_DTYPES
from cutekernels.optim.operands import state_dtypes
from cutekernels.optim.plan import GroupSettings, StepPlan

__all__ = ["FusedAdamW"]

_FLAGS = ("maximize", "master_weights", "capturable")
_FIXED: dict[str, tuple[bool | None, ...]] = {
    "fused": (None, True),
    "foreach": (None, False),
    "amsgrad": (False,),
    "differentiable": (False,),
    "decoupled_weight_decay": (True,),
}
_HYPER = ("lr", "betas", "eps", "weight_decay", "moments_dtype", "max_grad_norm", *_FLAGS, *_FIXED)


class FusedAdamW(torch.optim.Optimizer):
    """:class:`torch.optim.AdamW` in one launch per group and kind of parameter (its dtypes and alignment).

    State and ``state_dict`` are those of ``torch.optim.AdamW`` with ``fused=True``: either loads what the other saved.
    A master copy comes along under the key ``master``. Loading converts moments to the type that this optimizer keeps
    them in; torch's converts them to the parameters'. Groups hold numbers, names, None and ``betas`` alone (and a
    learning rate that is a tensor), which distributed checkpoints and JSON take; ``moments_dtype`` and
    ``master_weights`` stand there where they were given, so that groups otherwise have torch's keys.

    Clipping belongs to the optimizer and not to a call, so that loops that call ``step()`` alone (trainers, schedulers,
    gradient scalers) clip too; ``max_grad_norm`` may be set to another number between steps, and state dicts leave it
    out. Gradients themselves stay as they are.

    Args:
        params: as for any optimizer: tensors, or groups of them. fp32, bf16 or fp16 (on the CPU fp64 too). One that is
            not dense, as a slice of columns, is updated by itself, through copies.
        lr: the learning rate, a float or a tensor of one number; one on the GPU is read at each replay of a CUDA graph.
        betas: decay rates of the moments.
        eps: added to the denominator.
        weight_decay: decoupled from the gradient.
        maximize: ascend.
        master_weights: keep an fp32 copy of each bf16 or fp16 parameter, and round it to the parameter at each step.
            Values that others have written to the parameter since, or assigned to its ``.data``, are taken over, but
            for those written in place through ``.data`` or by a CUDA graph, which nothing tells of.
        moments_dtype: fp32 (fp64 beside fp64 parameters), ``torch.bfloat16``, ``torch.float16`` or "param", the
            parameter's own, as torch has it; or a name as groups hold it, "fp32", "bf16" or "fp16". 16 bits halve the
            moments' memory; each is rounded to nearest once a step, when it is stored. bf16 loses changes of less than
            1 part in 512: at ``betas[1] = 0.999`` second moments never fall. fp16 loses those of gradients below 5e-3,
            whose steps are then up to 30 times too large.
        max_grad_norm: clip gradients by their norm over all groups and, sharded, over all ranks, as
            :func:`torch.nn.utils.clip_grad_norm_` does: times ``min(1, max_grad_norm / (norm + 1e-6))``, in fp32. A
            norm that is NaN makes parameters NaN, as there; ``float("inf")`` measures the norm and clips nothing. The
            last step's norm is ``grad_norm``, a tensor on the device that is not waited for, the same bits each time.
        capturable: accepted for compatibility. Steps can always be captured in a CUDA graph, after one that was not.
        fused: None or True, as this optimizer is; accepted for compatibility.
        foreach: None or False.
        amsgrad: must be False.
        differentiable: must be False.

    Raises:
        UnsupportedProblem: hyper-parameters out of range, amsgrad; in ``step``, sparse or complex gradients and
            operands that no kernel takes.
    """

    grad_norm: Tensor | None = None
    """The gradients' norm before the last step clipped them; None before the first step and without max_grad_norm."""
    max_grad_norm: float | None = None
    _plan: StepPlan | None = None
    _settings: Sequence[GroupSettings] = ()
    _captured: Sequence[Any] = ()  # what graphs read at each replay: it lives as long as the optimizer

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        capturable: bool = False,
        foreach: bool | None = None,
        differentiable: bool = False,
        fused: bool | None = None,
        master_weights: bool = False,
        moments_dtype: torch.dtype | Literal["param", "fp32", "bf16", "fp16"] = torch.float32,
        max_grad_norm: float | None = None,
    ) -> None:
        defaults: dict[str, Any] = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        defaults |= {"amsgrad": amsgrad, "maximize": maximize, "foreach": foreach, "capturable": capturable}
        defaults |= {"differentiable": differentiable, "fused": fused, "decoupled_weight_decay": True}
        # Torch's distributed state dict refuses groups that have other keys than the loading optimizer's.
        if master_weights is not False:
            defaults["master_weights"] = master_weights
        if moments_dtype is not torch.float32:
            defaults["moments_dtype"] = moments_dtype
        _check_max_norm(max_grad_norm)
        _normalize_group(defaults)
        self.max_grad_norm = max_grad_norm
        try:
            super().__init__(params, defaults)
        except TypeError as reason:
            raise UnsupportedProblem(f"FusedAdamW takes params as tensors, or groups of them: {reason}") from None

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        try:
            _normalize_group(self.param_groups[-1])
        except UnsupportedProblem:
            self.param_groups.pop()
            raise

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"max_grad_norm": self.max_grad_norm}

    def __setstate__(self, state: dict[str, Any]) -> None:
        # Before anything is taken over.
        for group, own in zip_longest(state["param_groups"], getattr(self, "param_groups", ())):
            if own is not None:  # how this optimizer keeps its state, whatever the saved one did
                group.pop("moments_dtype", None)
                group |= {name: own[name] for name in ("moments_dtype", "master_weights") if name in own} | group
            group |= {"fused": True, "foreach": None, "decoupled_weight_decay": True}  # whichever of torch's saved it
            _normalize_group(group)
        super().__setstate__(state)
        self.grad_norm, self._plan = None, None

    def state_dict(self) -> dict[str, Any]:
        for group in self.param_groups:  # a schedule may have written numpy's numbers since the last step
            _normalize_group(group)
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        new: dict[Tensor, dict[str, Any]] = {}

        def convert(_: Any, given: dict[str, Any]) -> dict[str, Any]:
            """Takes from ``given``, behind the caller's hooks, what torch would cast to the parameters' type."""
            others = dict(given["state"])
            for saved, group in zip(given["param_groups"], self.param_groups, strict=False):
                for key, param in zip(saved["params"], group["params"], strict=False):
                    if found := others.pop(key, None):
                        new[param] = found | _load_state(key, param, found, group)
            return given | {"state": others}

        with (
            self.register_load_state_dict_pre_hook(convert),
            self.register_load_state_dict_post_hook(lambda _: self.state.update(new), prepend=True),
        ):
            super().load_state_dict(state_dict)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Updates every parameter that has a gradient. ``closure`` is evaluated first, with gradients enabled."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        _check_max_norm(self.max_grad_norm)
        self._settings = [  # of all groups, before the first is updated
            _settings_of(group, self.max_grad_norm is not None, last)
            for group, last in zip_longest(self.param_groups, self._settings[: len(self.param_groups)])
        ]
        found = None if self._plan is None else self._plan.check(self, self._settings)
        if found is None:
            self._plan = StepPlan(self, self._settings, self._plan)
            found = self._plan.check(self, self._settings)
        assert self._plan is not None and found is not None, "a new plan holds"
        self.grad_norm, captured = self._plan.run(self, found, self.max_grad_norm)
        self._captured = [*self._captured, *captured]
        return loss


def _load_state(key: Any, param: Tensor, found: dict[str, Any], group: dict[str, Any]) -> dict[str, Any]:
    """The state ``found`` for ``param`` in the types that its group keeps. Refuses that of another parameter."""
    state = {}
    for name, dtype in state_dtypes(param, group).items():
        t, shape = found.get(name), () if name == "step" else param.shape
        if name == "step" and (isinstance(t, Real) or (isinstance(t, Tensor) and t.numel() == 1)):
            state[name] = torch.tensor(float(t), dtype=dtype, device=param.device)
        elif isinstance(t, Tensor) and t.shape == shape:
            state[name] = torch.empty_like(param, dtype=dtype).copy_(t)
        elif name in found or name != "master":
            raise UnsupportedProblem(
                f"{name} of parameter {key} is of shape {tuple(shape)}; the state has {quote(t)}: load the whole state "
                "of this model's optimizer, or leave the parameter out of it"
            )
    return state


def _settings_of(group: dict[str, Any], clips: bool, last: GroupSettings | None) -> GroupSettings:
    """Checked settings of a group: the last ones, unless a value is another object or may have changed."""
    values = [*map(group.get, _HYPER), clips]
    if last is not None and all(map(is_, values, last.values)) and not isinstance(last.lr, Tensor):
        return last
    _normalize_group(group)
    lr = group["lr"]
    rate = lr.to(torch.float32) if isinstance(lr, Tensor) and lr.is_cuda else None
    hyper = Hyper.of(0.0 if rate is not None else float(lr), group["betas"], group["eps"], group["weight_decay"])
    kept = group.get("master_weights", False), group.get("moments_dtype", "fp32")
    values = [*map(group.get, _HYPER), clips]
    return GroupSettings(values, lr, rate, hyper, group.get("maximize", False), clips, kept)


def _check_max_norm(max_grad_norm: float | None) -> None:
    if max_grad_norm is not None:
        check_number("FusedAdamW", "max_grad_norm", max_grad_norm, finite=False)
        if not max_grad_norm >= 0.0:
            raise UnsupportedProblem(f"max_grad_norm is 0 or more, or None; it is {max_grad_norm}: None does not clip")


def _normalize_group(group: dict[str, Any]) -> None:
    """Checks a group's values; those of other types become the types that state dicts may hold.

    numpy's learning rate of a schedule becomes a float, betas of a file's list a tuple, a dtype its name.
    """
    lr = group["lr"]
    if isinstance(lr, Tensor) and lr.numel() != 1:
        raise UnsupportedProblem(f"a learning rate is one number; got a tensor of shape {tuple(lr.shape)}")
    rate = lr if isinstance(lr, int) else float(lr) if isinstance(lr, Real) else lr
    if isinstance(lr, Tensor) and (lr.is_meta or lr.is_complex() or lr.dtype == torch.bool):
        raise UnsupportedProblem(f"a learning rate is a real number; got {lr.dtype} on {lr.device}")
    known = lr.item() if isinstance(lr, Tensor) and lr.device.type == "cpu" else rate  # one on a GPU is not waited for
    check_hyper(0.0 if isinstance(known, Tensor) else known, group["betas"], group["eps"], group["weight_decay"])
    for name in _FLAGS:
        check_flag("FusedAdamW", name, group.get(name, False))
    for name, taken in _FIXED.items():
        value = group.get(name, taken[0])
        if not any(value is one for one in taken):
            raise UnsupportedProblem(
                f"FusedAdamW takes {name} as {' or '.join(map(str, taken))}; got {value!r}: use torch.optim.AdamW"
            )
    kind = group.get("moments_dtype", "fp32")
    moments = GPU_DTYPES.names.get(kind) if isinstance(kind, torch.dtype) else kind
    if not isinstance(moments, str) or moments not in ("param", *GPU_DTYPES):
        raise UnsupportedProblem(
            f'moments_dtype is torch.float32, torch.bfloat16, torch.float16 or "param"; got {quote(kind)}'
        )
    if group.get("max_grad_norm") is not None:
        raise UnsupportedProblem(
            "gradients are clipped by one norm over all groups, and a group has a max_grad_norm of its own: "
            "give it to FusedAdamW, or use torch.nn.utils.clip_grad_norm_ for each group"
        )
    group.update(lr=rate, betas=tuple(group["betas"]), fused=True, foreach=None)
    if "moments_dtype" in group:
        group["moments_dtype"] = moments
