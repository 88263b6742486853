"""``FusedAdamW``: torch's AdamW over a table of all parameters, updated in a launch per group and kind of parameter.

Kernels read the step counts on the device (one per parameter, as ``torch.optim.AdamW`` with ``fused=True`` keeps
them), the norm that gradients are clipped by, and the learning rate too where it is a tensor. So steps never wait for
the device, and replay correctly from a CUDA graph. What a step launches is planned once (``plan.py``).
"""

from __future__ import annotations

from collections.abc import Callable
from numbers import Real
from operator import is_
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from cutekernels.errors import UnsupportedProblem
from cutekernels.ops.optimizer.api import adamw_step, check_hyper
from cutekernels.ops.optimizer.op import Hyper
from cutekernels.ops.shared.checks import check_flag, check_number, quote
from cutekernels.ops.shared.dtypes import GPU_DTYPES
from cutekernels.optim.operands import (
    MOMENTS,
    clip_scale,
    mesh_of,
    moments_dtype,
    norm_of,
    operands,
    take_over,
    wide_dtype,
)
from cutekernels.optim.plan import GroupSettings, StepGradients, StepPlan

__all__ = ["FusedAdamW"]

_FLAGS = ("maximize", "master_weights", "amsgrad", "capturable", "differentiable")
_HYPER = ("lr", "betas", "eps", "weight_decay", "moments_dtype", "max_grad_norm", *_FLAGS)


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
        params: as for any optimizer: tensors, or groups of them. fp32, bf16 or fp16 (on the CPU fp64 too).
        lr: the learning rate, a float or a tensor of one number; one on the GPU is read at each replay of a CUDA graph.
        betas: decay rates of the moments.
        eps: added to the denominator.
        weight_decay: decoupled from the gradient.
        maximize: ascend.
        master_weights: keep an fp32 copy of each bf16 or fp16 parameter, and round it to the parameter at each step.
            Values that others have written to the parameter since are taken over, but for those written in place
            through ``.data`` or by a CUDA graph, which nothing tells of.
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

    grad_norm: Tensor | None
    """The gradients' norm before the last step clipped them; None before the first step and without max_grad_norm."""

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
        for name, value, taken in (
            ("fused", fused, (None, True)),
            ("foreach", foreach, (None, False)),
            ("differentiable", differentiable, (False,)),
        ):
            if not any(value is one for one in taken):
                raise UnsupportedProblem(
                    f"FusedAdamW takes {name} as {' or '.join(map(str, taken))}; got {value!r}: use torch.optim.AdamW"
                )
        defaults: dict[str, Any] = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "amsgrad": amsgrad,
            "maximize": maximize,
            "foreach": None,
            "capturable": capturable,
            "differentiable": False,
            "fused": True,
            "decoupled_weight_decay": True,
        }
        # Torch's distributed state dict refuses groups that have other keys than the loading optimizer's.
        if master_weights is not False:
            defaults["master_weights"] = master_weights
        if moments_dtype is not torch.float32:
            defaults["moments_dtype"] = moments_dtype
        self.max_grad_norm = max_grad_norm
        self._captured: list[Any] = []  # what graphs read at each replay: it lives as long as the optimizer
        self._forget()
        try:
            super().__init__(params, defaults)
        except TypeError as reason:
            raise UnsupportedProblem(f"FusedAdamW takes params as tensors, or groups of them: {reason}") from None
        _check_max_norm(max_grad_norm)
        for group in self.param_groups:
            _normalize_group(group)

    def _forget(self) -> None:
        """Drops what is known of parameters and their state."""
        self.grad_norm = None
        self._plan: StepPlan | None = None
        self._versions: dict[Tensor, int] = {}  # of the CPU's parameters with a master copy, after the last step
        self._checked: list[tuple[list[Any], GroupSettings]] = []  # a group's values, and what was made of them

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
        own = getattr(self, "param_groups", ())
        for number, group in enumerate(state["param_groups"]):  # before anything is taken over
            group.setdefault("maximize", False)
            if number < len(own):  # how this optimizer keeps its state, whatever the saved one did
                group.pop("moments_dtype", None)
                for name in ("moments_dtype", "master_weights"):
                    if name in own[number]:
                        group.setdefault(name, own[number][name])
            group["fused"], group["foreach"] = True, None
            _normalize_group(group)
        super().__setstate__(state)
        vars(self).setdefault("max_grad_norm", None)
        vars(self).setdefault("_captured", [])
        self._forget()

    def state_dict(self) -> dict[str, Any]:
        for group in self.param_groups:  # a schedule may have written numpy's numbers since the last step
            _normalize_group(group)
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        given: list[dict[str, Any]] = []  # what the caller's hooks made of it

        def check(_: Any, last: dict[str, Any]) -> None:
            given.append(last)
            self._check_state(last)

        hooks = (
            self.register_load_state_dict_pre_hook(check),
            self.register_load_state_dict_post_hook(lambda _: self._convert(given[0]), prepend=True),
        )
        try:
            super().load_state_dict(state_dict)
        finally:
            for hook in hooks:
                hook.remove()

    def _check_state(self, given: dict[str, Any]) -> None:
        """Refuses a state that is not its parameter's, before anything is taken over."""
        for saved, group in zip(given["param_groups"], self.param_groups, strict=False):
            for key, param in zip(saved["params"], group["params"], strict=False):
                found = given["state"].get(key, {})
                absent = {"step", *MOMENTS} - found.keys()
                if found and absent:
                    raise UnsupportedProblem(
                        f"the state of parameter {key} has step, {' and '.join(MOMENTS)}, and here it lacks "
                        f"{', '.join(sorted(absent))}: load a whole state of AdamW, or leave the parameter out of it"
                    )
                for name, shape in (*dict.fromkeys((*MOMENTS, "master"), param.shape).items(), ("step", ())):
                    t = found.get(name)
                    number = name == "step" and not isinstance(t, Tensor)
                    if name in found and not (isinstance(t, Real) if number else _has_shape(t, shape)):
                        raise UnsupportedProblem(
                            f"{name} of parameter {key} is of shape {tuple(shape)}; the state has {quote(t)}: load the "
                            "state of this model's optimizer"
                        )

    def _convert(self, given: dict[str, Any]) -> None:
        """Takes state from ``given`` again, which torch has cast to the parameters' type; moments in this group's."""
        for saved, group in zip(given["param_groups"], self.param_groups, strict=True):
            for key, param in zip(saved["params"], group["params"], strict=True):
                found = given["state"].get(key, {})
                state = self.state[param] if found else {}
                kinds = dict.fromkeys(MOMENTS, moments_dtype(param, group))
                for name, kind in (kinds | {"master": wide_dtype(param)}).items():
                    if name in found:
                        state[name] = torch.empty_like(param, dtype=kind).copy_(found[name])
                if "step" in found:
                    state["step"] = torch.as_tensor(float(found["step"]), dtype=torch.float32, device=param.device)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Updates every parameter that has a gradient. ``closure`` is evaluated first, with gradients enabled."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        _check_max_norm(self.max_grad_norm)
        settings = self._settings()  # of all groups, before the first is updated
        plan = self._plan
        grads = None if plan is None else plan.gradients(self, settings)
        if plan is None or grads is None:
            plan = self._plan = StepPlan(self, settings, plan)
            grads = plan.gradients(self, settings)
            assert grads is not None, "a new plan holds"
        alone = [_Alone(self, param, number) for param, number in plan.alone if param.grad is not None]
        if grads.present or alone:
            self._update(plan, grads, alone, settings)
        elif self.max_grad_norm is not None:
            self.grad_norm = torch.zeros((), device="cpu")
        return loss

    def _settings(self) -> list[GroupSettings]:
        """Checked settings of each group, renewed where a value is another object or may have changed."""
        del self._checked[len(self.param_groups) :]
        for number, group in enumerate(self.param_groups):
            values = [group.get(name) for name in _HYPER]
            if number < len(self._checked):
                last, _ = self._checked[number]
                constant = not isinstance(values[0], Tensor) and isinstance(values[1], tuple)
                if constant and all(map(is_, values, last)):
                    continue
            _normalize_group(group)
            values = [group.get(name) for name in _HYPER]
            self._checked[number : number + 1] = [(values, _settings_of(group))]
        return [settings for _, settings in self._checked]

    def _update(self, plan: StepPlan, grads: StepGradients, alone: list[_Alone], settings: list[GroupSettings]) -> None:
        clips, max_norm = self.max_grad_norm is not None, float(self.max_grad_norm or 0.0)
        capturing = bool(plan.tables) and torch.cuda.is_current_stream_capturing()
        if capturing:
            plan.check_capture(settings)
        plan.prepare(self, grads)
        # Addresses of gradients, step counts, sums of squares.
        columns, squares = [], []
        for table in plan.tables:
            with torch.cuda.device(table.device):
                column, staging = table.send(grads.addresses[table.first : table.last], capturing)
                columns.append(column)
                table.count_steps(column.data_ptr())
                if clips:
                    squares += table.sum_squares(column.data_ptr())
                if capturing:
                    self._captured.append((plan, grads, column, staging, settings))
        self.grad_norm = norm_of([*squares, *[each.squares() for each in alone]]) if clips else None
        if capturing:
            self._captured.append(self.grad_norm)
        # Updates, which clip as they go.
        for table, column in zip(plan.tables, columns, strict=True):
            with torch.cuda.device(table.device):
                norm = None if self.grad_norm is None else self.grad_norm.to(table.device, torch.float32)
                table.update(column.data_ptr(), settings, norm, max_norm)
        for each in alone:
            each.update(None if self.grad_norm is None else clip_scale(self.grad_norm, max_norm))
        plan.finish(grads)


class _Alone:
    """One parameter on the CPU, updated by itself."""

    def __init__(self, optimizer: FusedAdamW, param: Tensor, number: int) -> None:
        self.param, self.group, self.versions = param, optimizer.param_groups[number], optimizer._versions
        self.operands = operands(param, self.group, optimizer.state[param])
        written, master = self.operands.written, self.operands.master
        if master is not None and self.versions.get(param) != written._version:
            take_over(master, written)

    def squares(self) -> Tensor:
        """The sum of the gradient's squares, over all ranks."""
        assert self.operands.grad is not None
        grad = self.operands.grad
        squares = grad.to(wide_dtype(grad)).square().sum()
        mesh = mesh_of(self.param)
        return squares if mesh is None else mesh.sum_over(squares)

    def update(self, scale: Tensor | None) -> None:
        o, group = self.operands, self.group
        grad = o.grad
        assert grad is not None
        adamw_step(
            o.param,
            grad if scale is None else grad.to(wide_dtype(grad)) * scale.to(grad.device),
            o.exp_avg,
            o.exp_avg_sq,
            step=int(o.step) + 1,
            lr=float(group["lr"]),
            betas=group["betas"],
            eps=group["eps"],
            weight_decay=group["weight_decay"],
            maximize=group["maximize"],
            master=o.master,
        )
        o.step.add_(1.0)
        if o.home is not None:
            o.home.copy_(o.param)
        torch.autograd.graph.increment_version(o.written)
        if o.master is not None:
            self.versions[self.param] = o.written._version


def _has_shape(t: object, shape: tuple[int, ...]) -> bool:
    """Whether it is a tensor of this shape; of one number in any shape where that is ()."""
    return isinstance(t, Tensor) and (t.shape == shape or (not shape and t.numel() == 1))


def _settings_of(group: dict[str, Any]) -> GroupSettings:
    lr = group["lr"]
    rate = lr.to(torch.float32) if isinstance(lr, Tensor) and lr.is_cuda else None
    hyper = Hyper.of(0.0 if rate is not None else float(lr), group["betas"], group["eps"], group["weight_decay"])
    place = lr.device if isinstance(lr, Tensor) else None
    kept = group.get("master_weights", False), group.get("moments_dtype", "fp32")
    return GroupSettings(rate, group["maximize"], *kept, hyper, place)


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
    check_hyper(0.0 if isinstance(lr, Tensor) else rate, group["betas"], group["eps"], group["weight_decay"])
    for name in _FLAGS:
        if name != "differentiable":
            check_flag("FusedAdamW", name, group.get(name, False))
    for name in ("amsgrad", "differentiable"):
        if group.get(name):
            raise UnsupportedProblem(f"FusedAdamW has no {name}: use torch.optim.AdamW for it")
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
    group.update(lr=rate, betas=tuple(group["betas"]))
    if "moments_dtype" in group:
        group["moments_dtype"] = moments
