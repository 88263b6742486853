"""``FusedAdamW``: torch's AdamW over one table of all parameters, updated in a launch per kind of parameter.

Kernels read the step counts on the device (one per parameter, as ``torch.optim.AdamW`` with ``fused=True`` keeps
them), and the learning rate too where it is a tensor. So steps never wait for the device, and replay correctly from a
CUDA graph. Address tables are kept from step to step and sent again only where an address changed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from cutekernels import compile as compiler
from cutekernels import dispatch
from cutekernels import gpu as gpus
from cutekernels.errors import UnsupportedProblem
from cutekernels.ops.optimizer import ADAMW_STEP, ADAMW_TABLE, AdamWProblem, Hyper, adamw_step, check_hyper
from cutekernels.ops.shared.checks import check_flag
from cutekernels.ops.shared.strides import is_dense, walk

__all__ = ["FusedAdamW"]

_ROW = 8  # 64-bit numbers per tensor in a table, as the kernel reads them
_SPARES = 4  # steps that one capture may hold
_MOMENTS = ("exp_avg", "exp_avg_sq")


class FusedAdamW(torch.optim.Optimizer):
    """:class:`torch.optim.AdamW` in one launch per group and kind of parameter (its dtypes and alignment).

    Moments are fp32 whatever the parameters' type. State and ``state_dict`` are those of ``torch.optim.AdamW`` with
    ``fused=True``: either loads what the other saved (a master copy comes along under the key ``master``).

    Args:
        params: as for any optimizer: tensors, or groups of them. fp32, bf16 or fp16 (on the CPU fp64 too).
        lr: the learning rate, a float or a tensor of one number; one on the GPU is read at each replay of a CUDA graph.
        betas: decay rates of the moments.
        eps: added to the denominator.
        weight_decay: decoupled from the gradient.
        maximize: ascend.
        master_weights: keep an fp32 copy of each bf16 or fp16 parameter, and round it to the parameter at each step.
            Values that others have written to the parameter since are taken over, but for those written through
            ``.data`` or by a CUDA graph, which nothing tells of.
        capturable: accepted for compatibility. Steps can always be captured in a CUDA graph, after one that was not.
        fused: None or True, as this optimizer is; accepted for compatibility.
        foreach: None or False.
        amsgrad: must be False.
        differentiable: must be False.

    Raises:
        UnsupportedProblem: hyper-parameters out of range, amsgrad; in ``step``, sparse or complex gradients and
            operands that no kernel takes.
    """

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
        defaults = {
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
            "master_weights": master_weights,
        }
        self._tables: dict[tuple[Any, ...], _Table] = {}
        self._versions: dict[Tensor, int] = {}  # of parameters with a master copy, after the last step
        self._captured: list[Any] = []  # what graphs read at each replay: it lives as long as the optimizer
        try:
            super().__init__(params, defaults)
        except TypeError as reason:
            raise UnsupportedProblem(f"FusedAdamW takes params as tensors, or groups of them: {reason}") from None
        for group in self.param_groups:
            _check_group(group)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        try:
            _check_group(self.param_groups[-1])
        except UnsupportedProblem:
            self.param_groups.pop()
            raise

    def __setstate__(self, state: dict[str, Any]) -> None:
        own = [group.get("master_weights", False) for group in getattr(self, "param_groups", ())]
        for number, group in enumerate(state["param_groups"]):  # before anything is taken over
            group.setdefault("maximize", False)
            group.setdefault("master_weights", own[number] if number < len(own) else False)  # torch's has none
            group["fused"], group["foreach"] = True, None  # how the state lies, wherever it came from
            _check_group(group)
        super().__setstate__(state)
        self._tables, self._versions, self._captured = {}, {}, getattr(self, "_captured", [])

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        given: list[dict[str, Any]] = []  # what the caller's hooks made of it
        hooks = (
            self.register_load_state_dict_pre_hook(lambda _, last: given.append(last)),
            self.register_load_state_dict_post_hook(lambda _: self._widen(given[0]), prepend=True),
        )
        try:
            super().load_state_dict(state_dict)
        finally:
            for hook in hooks:
                hook.remove()

    def _widen(self, given: dict[str, Any]) -> None:
        """Takes state from ``given`` again, which torch has cast to the parameters' type."""
        for saved, group in zip(given["param_groups"], self.param_groups, strict=True):
            for key, param in zip(saved["params"], group["params"], strict=True):
                found = given["state"].get(key, {})
                state = self.state[param] if found else {}
                for name in (*_MOMENTS, "master"):
                    if name in found:
                        like = torch.empty_like(param, dtype=_wide(param))
                        state[name] = like.copy_(found[name])
                if "step" in found:
                    state["step"] = torch.as_tensor(float(found["step"]), dtype=torch.float32, device=param.device)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Updates every parameter that has a gradient. ``closure`` is evaluated first, with gradients enabled."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:  # all of them before the first is updated
            _check_group(group)
        for number, group in enumerate(self.param_groups):
            kinds: dict[tuple[Any, ...], list[_Operands]] = {}
            updated = [param for param in group["params"] if param.grad is not None]
            for param in updated:
                operands = self._operands(param, group)
                kinds.setdefault(operands.kind, []).append(operands)
            for kind, found in kinds.items():
                if _has_kernels(found[0].param):
                    self._launch((number, *kind), found, group)
                else:
                    for o in found:
                        _alone(o, group)
                for o in found:
                    if o.home is not None:
                        o.home.copy_(o.param)
                torch.autograd.graph.increment_version([o.home if o.home is not None else o.param for o in found])
            if group["master_weights"]:
                self._versions.update((param, _shard(param, param)._version) for param in updated)
        return loss

    def _operands(self, param: Tensor, group: dict[str, Any]) -> _Operands:
        """A parameter beside its gradient and state, all lying alike."""
        grad = param.grad
        assert grad is not None
        if grad.is_sparse or grad.layout != torch.strided or param.is_complex():
            raise UnsupportedProblem(
                f"FusedAdamW takes dense real parameters; got {param.dtype} with a gradient of {grad.layout}: "
                "use torch.optim.SparseAdam, or view complex numbers as real ones"
            )
        if param.is_meta:
            raise UnsupportedProblem("FusedAdamW updates values, and a parameter is on the meta device: move it first")
        state = self.state[param]
        if "step" not in state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=param.device)
        wide = _wide(param)
        for name in _MOMENTS:
            if name not in state:
                state[name] = torch.zeros_like(param, dtype=wide)
        if group["master_weights"] and param.dtype != wide and "master" not in state:
            state["master"] = torch.empty_like(param, dtype=wide).copy_(param)
        master = state.get("master") if param.dtype != wide else None
        if master is not None and self._versions.get(param) != _shard(param, param)._version:  # written to by others
            master.copy_(torch.where(master.to(param.dtype) == param, master, param.to(wide)))
        exp_avg, exp_avg_sq = (state[name] for name in _MOMENTS)
        param, grad, exp_avg, exp_avg_sq = (_shard(t, param) for t in (param, grad, exp_avg, exp_avg_sq))
        master = None if master is None else _shard(master, param)
        home: Tensor | None = None
        if not is_dense(param) or walk(param) != walk(exp_avg):
            home, param = param, torch.empty_like(exp_avg, dtype=param.dtype).copy_(param)
        if walk(grad) != walk(param):
            grad = torch.empty_like(param, dtype=grad.dtype).copy_(grad)
        return _Operands(param, grad, exp_avg, exp_avg_sq, master, state["step"], home)

    def _launch(self, kind: tuple[Any, ...], found: list[_Operands], group: dict[str, Any]) -> None:
        lr, device = group["lr"], found[0].param.device
        if isinstance(lr, Tensor) and lr.device.type != device.type and torch.cuda.is_current_stream_capturing():
            raise UnsupportedProblem("a CUDA graph would keep a learning rate that is on the CPU: move it to the GPU")
        rate = lr.to(device, torch.float32) if isinstance(lr, Tensor) and lr.is_cuda else None
        with torch.cuda.device(device):
            table = self._tables.get(kind)
            if table is None:
                table = self._tables[kind] = _Table()
            sizes = tuple([o.param.numel() for o in found])
            if table.sizes != sizes or (table.rate, table.maximize) != (rate is not None, group["maximize"]):
                table.plan(found[0], sizes, rate is not None, group["maximize"])
            numbers = table.send(found, self._captured)
            torch._foreach_add_([o.step for o in found], 1.0)
            if table.launch is not None:
                hyper = Hyper.of(
                    0.0 if rate is not None else float(lr), group["betas"], group["eps"], group["weight_decay"]
                )
                table.launch(numbers, table.chunks, rate, *hyper)


@dataclass(frozen=True, slots=True)
class _Operands:
    """The tensors of one parameter's update. ``home``: the parameter, where ``param`` is a dense copy of it."""

    param: Tensor
    grad: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    master: Tensor | None
    step: Tensor
    home: Tensor | None

    @property
    def kind(self) -> tuple[Any, ...]:
        """What one launch's parameters have in common."""
        bits = 0
        for t in (self.param, self.grad, self.exp_avg, self.exp_avg_sq, self.master):
            bits |= 0 if t is None else t.data_ptr()
        return self.param.device, self.param.dtype, self.grad.dtype, self.master is not None, bits % 16 == 0

    def row(self) -> list[int]:
        tensors = (self.param, self.grad, self.exp_avg, self.exp_avg_sq, self.master, self.step)
        return [*[0 if t is None else t.data_ptr() for t in tensors], self.param.numel(), 0]


@dataclass(slots=True)
class _Table:
    """Where one launch finds its tensors, in device memory, and the launch itself."""

    sizes: tuple[int, ...] = ()
    rate: bool = False
    maximize: bool = False
    launch: Callable[..., None] | None = None
    chunks: Tensor | None = None
    rows: list[int] = field(default_factory=list)
    numbers: Tensor | None = None
    spare: list[Tensor] = field(default_factory=list)  # pinned memory, for tables sent while a graph is captured

    def plan(self, first: _Operands, sizes: tuple[int, ...], rate: bool, maximize: bool) -> None:
        """Chooses and compiles the kernel, and cuts the tensors into its blocks."""
        _refuse_capture()
        problem = _problem(first, sum(sizes), rate, maximize)
        spec = gpus.detect(first.param.device.index)
        # Tuned as one tensor of as many elements, whose step the host knows.
        config: Any = dispatch.resolve(
            ADAMW_STEP, problem.replace(step="host", rate="host", maximize=False), spec
        ).config
        self.sizes, self.rate, self.maximize, self.rows = sizes, rate, maximize, []
        self.launch = None
        if sum(sizes):
            kernel = compiler.get(ADAMW_TABLE, problem, config, spec)
            self.launch = ADAMW_TABLE.bind(problem, config, kernel)
        blocks = torch.tensor([-(-n // config.block) for n in sizes], device="cpu")
        tensors = torch.repeat_interleave(torch.arange(len(sizes), device="cpu"), blocks)
        within = torch.arange(len(tensors), device="cpu") - torch.repeat_interleave(blocks.cumsum(0) - blocks, blocks)
        device = first.param.device
        self.chunks = torch.stack((tensors, within), dim=1).to(device, torch.int32)
        self.numbers = torch.empty((len(sizes), _ROW), dtype=torch.int64, device=device)

    def send(self, found: list[_Operands], captured: list[Any]) -> Tensor:
        """The table of ``found`` on the device. ``captured`` collects what a graph will read."""
        rows = [number for o in found for number in o.row()]
        assert self.numbers is not None
        if torch.cuda.is_current_stream_capturing():
            # The graph copies at each replay, from memory that nobody may touch again, to memory of its own.
            if not self.spare:
                _refuse_capture()
            staging = self.spare.pop()
            staging.copy_(torch.tensor(rows, device="cpu"))
            numbers = torch.empty_like(self.numbers)
            numbers.view(-1).copy_(staging, non_blocking=True)
            captured += [staging, numbers, self.chunks, found]
            return numbers
        if rows != self.rows:
            self.numbers.view(-1).copy_(torch.tensor(rows, device="cpu").pin_memory(), non_blocking=True)
            self.rows = rows
        while len(self.spare) < _SPARES:
            self.spare.append(torch.empty(len(rows), dtype=torch.int64, device="cpu", pin_memory=True))
        return self.numbers


def _has_kernels(param: Tensor) -> bool:
    return param.is_cuda


def _alone(o: _Operands, group: dict[str, Any]) -> None:
    """One parameter on the CPU."""
    adamw_step(
        o.param,
        o.grad,
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


def _refuse_capture() -> None:
    if torch.cuda.is_current_stream_capturing():
        raise UnsupportedProblem(
            "a captured step has been taken before, outside: run one step of these parameters before each capture "
            f"(of {_SPARES} steps at most), which compiles the kernel and prepares memory that the graph will read"
        )


def _problem(o: _Operands, elements: int, rate: bool, maximize: bool) -> AdamWProblem:
    """What one launch poses. Raises UnsupportedProblem for operands that no kernel takes."""
    inputs = (o.param, o.grad, o.exp_avg, o.exp_avg_sq, o.master, o.step, None)
    ADAMW_STEP.admit(inputs, maximize=maximize)
    results = (o.param, o.exp_avg, o.exp_avg_sq, o.master)
    found = ADAMW_STEP.problem(*results, *inputs, maximize=maximize)
    aligned = o.kind[-1]
    return found.replace(
        elements=elements, rate="device" if rate else "host", align=16 if aligned else o.param.element_size()
    )


def _shard(t: Any, param: Any) -> Tensor:
    """The part of ``t`` that this rank holds, cut as ``param``: the update is elementwise."""
    if not hasattr(t, "placements"):
        return t  # type: ignore[no-any-return]
    if hasattr(param, "placements") and t.placements != param.placements:
        t = t.redistribute(placements=param.placements)
    return t.to_local()  # type: ignore[no-any-return]


def _wide(param: Tensor) -> torch.dtype:
    return torch.promote_types(param.dtype, torch.float32)


def _check_group(group: dict[str, Any]) -> None:
    lr = group["lr"]
    if isinstance(lr, Tensor) and lr.numel() != 1:
        raise UnsupportedProblem(f"a learning rate is one number; got a tensor of shape {tuple(lr.shape)}")
    rate = lr if isinstance(lr, int) else float(lr) if isinstance(lr, Real) else lr  # numpy's too, from a schedule
    check_hyper(0.0 if isinstance(lr, Tensor) else rate, group["betas"], group["eps"], group["weight_decay"])
    for name in ("maximize", "master_weights", "amsgrad", "capturable"):
        check_flag("FusedAdamW", name, group.get(name, False))
    for name in ("amsgrad", "differentiable"):
        if group.get(name):
            raise UnsupportedProblem(f"FusedAdamW has no {name}: use torch.optim.AdamW for it")
