"""Launches of a step of ``FusedAdamW``: planned once, and checked at each step against all they were made of.

A check is a few passes of C functions over lists (identities, addresses, types), 1 us per parameter; where it fails, a
plan is made anew. Gradients may have new addresses at each step, or be missing: their addresses are the one column that
is sent each time.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from functools import reduce
from itertools import chain, compress
from operator import is_, or_
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from cutekernels import compile as compiler
from cutekernels import dispatch
from cutekernels import gpu as gpus
from cutekernels.errors import UnsupportedProblem
from cutekernels.ops.optimizer.op import (
    ADAMW_COUNT,
    ADAMW_SQUARES,
    ADAMW_STEP,
    ADAMW_TABLE,
    UPDATED,
    AdamWConfig,
    AdamWProblem,
    Hyper,
)
from cutekernels.ops.shared.calls import call, places
from cutekernels.optim.operands import Mesh, Operands, alike, clip_scale, operands, shard, wide_dtype

_ROW_BYTES = 64
_ADDRESS_BYTES = 8
_COUNTED = 256  # tensors per program that counts steps
_MOST_SUMS = 2048  # programs that sum squares: a constant, so that the norm has the same bits on every GPU
_SPARES = 4  # steps that one capture may hold
_NOWHERE = 16  # the address of an empty gradient, which counts a step; 0 is a missing one


def has_kernels(param: Tensor) -> bool:
    return param.is_cuda


class GroupSettings(NamedTuple):
    """A group's values in a step. ``rate``: the learning rate, where it is on the GPU."""

    lr: float | Tensor
    rate: Tensor | None
    hyper: Hyper
    flags: tuple[bool, bool, bool, bool, str]
    """All that plans depend on: whether there is a rate, maximize, whether gradients are clipped, master, moments."""


class Step(NamedTuple):
    """A step's tensors by row: gradients and their addresses, and the parts of parameters that this rank holds.

    A gradient that is missing is on the meta device, and its address is 0. ``kept``: the state, of whatever row.
    """

    grads: list[Tensor]
    addresses: list[int]
    written: list[Tensor]
    kept: list[Any]


_Kinds = dict[tuple[Any, ...], list[tuple[Tensor, Operands]]]
"""Parameters by group, whether they are aligned, and types."""


class Launch(NamedTuple):
    """Kernels over tensors of one group and kind: the rows from ``first`` on of their table."""

    group: int
    first: int
    chunks: Tensor
    sums: int
    update: Callable[..., None] | None
    squares: Callable[..., None] | None

    @classmethod
    def of(cls, group: int, first: int, aligned: bool, tensors: list[Operands], settings: GroupSettings) -> Launch:
        """Chooses and compiles the kernels, and cuts the tensors into their blocks."""
        o, sizes = tensors[0], [o.param.numel() for o in tensors]
        inputs = (o.param, o.param if o.grad.is_meta else o.grad, *o[2:], None)
        on_device, maximize, clips, *_ = settings.flags
        ADAMW_STEP.admit(inputs, maximize=maximize)
        problem = ADAMW_STEP.problem(o.param, *o[2:5], *inputs, maximize=maximize).replace(
            elements=sum(sizes),
            rate="device" if on_device else "host",
            align=16 if aligned else o.param.element_size(),
        )
        # Tuned as one tensor of as many elements, whose step the host knows.
        plain = problem.replace(step="host", rate="host", maximize=False)
        spec = gpus.detect(o.param.device.index)
        config: Any = dispatch.resolve(ADAMW_STEP, plain, spec).config
        blocks = torch.tensor([-(-n // config.block) for n in sizes], device="cpu")
        which = torch.repeat_interleave(torch.arange(len(sizes), device="cpu"), blocks)
        within = torch.arange(len(which), device="cpu") - torch.repeat_interleave(blocks.cumsum(0) - blocks, blocks)
        chunks = torch.stack((which, within), dim=1).to(o.param.device, torch.int32)
        update = compiler.get(ADAMW_TABLE, problem, config, spec) if sum(sizes) else None
        squares = compiler.get(ADAMW_SQUARES, plain, config, spec) if sum(sizes) and clips else None
        return cls(group, first, chunks, min(_MOST_SUMS, len(chunks)), update, squares)


class DeviceTable:
    """Launches on one device, over one table of the plan's rows from ``first`` on."""

    def __init__(self, first: int, mesh: Mesh | None, kinds: _Kinds, settings: Sequence[GroupSettings]) -> None:
        tensors = [o for found in kinds.values() for _, o in found]
        self.device, self.mesh = tensors[0].param.device, mesh
        self.rows = slice(first, first + len(tensors))
        self.launches: list[Launch] = []
        # Pinned memory for columns that are sent while a graph is captured, which must not allocate any.
        self.spares: list[Tensor] = []
        with torch.cuda.device(self.device):
            numbers = torch.frombuffer(array("q", [number for o in tensors for number in o.row()]), dtype=torch.int64)
            self.table = numbers.pin_memory().to(self.device, non_blocking=True)
            counting = AdamWProblem(0), AdamWConfig(_COUNTED, 1, "normal")
            self.count = compiler.get(ADAMW_COUNT, *counting, gpus.detect(self.device.index))
            row = 0
            for (group, aligned, *_), found in kinds.items():
                self.launches.append(Launch.of(group, row, aligned, [o for _, o in found], settings[group]))
                row += len(found)

    def begin(self, plan: StepPlan, optimizer: Optimizer, step: Step) -> tuple[Tensor, Tensor]:
        """Sends the column of addresses and counts steps. At its replays, a graph sends the second tensor again."""
        column = torch.frombuffer(array("q", step.addresses[self.rows]), dtype=torch.int64)
        if torch.cuda.is_current_stream_capturing():
            staging = self.spares.pop().copy_(column)
        else:
            while len(self.spares) < _SPARES:
                self.spares.append(torch.empty(len(column), dtype=torch.int64, device="cpu", pin_memory=True))
            # torch gives this out again once the copy from it has ended: steps never wait for one another.
            staging = column.pin_memory()
        sent = staging.to(self.device, non_blocking=True)
        self.count((-(-len(column) // _COUNTED), 1, 1), self.table.data_ptr(), sent.data_ptr(), len(column))
        return sent, staging

    def squares(self, begun: tuple[Tensor, Tensor]) -> list[Tensor]:
        """The sum of the gradients' squares, over all ranks."""
        partial = torch.empty(sum(launch.sums for launch in self.launches), dtype=torch.float32, device=self.device)
        place = partial.data_ptr()
        for launch in self.launches:
            if launch.squares is not None:
                launch.squares((launch.sums, 1, 1), *self._tables(launch, begun), place, len(launch.chunks))
                place += launch.sums * partial.element_size()
        total = partial.sum()
        return [total if self.mesh is None else self.mesh.sum_over(total)]

    def update(self, begun: Any, settings: Sequence[GroupSettings], norm: Tensor | None, max_norm: float) -> None:
        norm = None if norm is None else norm.to(self.device, torch.float32)
        for launch in self.launches:
            if launch.update is not None:
                rate, hyper = settings[launch.group].rate, settings[launch.group].hyper
                rate = None if rate is None else rate.to(self.device)
                scalars = [0 if t is None else t.data_ptr() for t in (rate, norm)]
                launch.update((len(launch.chunks), 1, 1), *self._tables(launch, begun), *scalars, max_norm, *hyper)

    def _tables(self, launch: Launch, begun: tuple[Tensor, Tensor]) -> tuple[int, int, int]:
        """Addresses of a launch's rows, gradients and chunks."""
        rows = self.table.data_ptr() + launch.first * _ROW_BYTES
        return rows, begun[0].data_ptr() + launch.first * _ADDRESS_BYTES, launch.chunks.data_ptr()


class Loop:
    """Parameters that no table takes: on the CPU, by the op's reference; on a GPU those that are not dense, by copies.

    So a parameter has the same bits however it lies.
    """

    def __init__(self, first: int, mesh: Mesh | None, kinds: _Kinds, settings: Sequence[GroupSettings]) -> None:
        groups = [group for (group, *_), found in kinds.items() for _ in found]
        self.groups, self.mesh, self.device = list(enumerate(groups, first)), mesh, -1

    def begin(self, plan: StepPlan, optimizer: Optimizer, step: Step) -> list[tuple[int, Operands]]:
        """Counts steps; returns the group and the operands of each parameter that has a gradient."""
        params = [(plan.rows[row], group) for row, group in self.groups if step.addresses[row]]
        begun = [(group, operands(p, optimizer.param_groups[group], optimizer.state[p])) for p, group in params]
        for _, o in begun:
            o.step.add_(1.0)
        return begun

    def squares(self, begun: list[tuple[int, Operands]]) -> list[Tensor]:
        sums = [o.grad.to(wide_dtype(o.grad)).square().sum() for _, o in begun]
        return sums if self.mesh is None else list(map(self.mesh.sum_over, sums))

    def update(self, begun: Any, settings: Sequence[GroupSettings], norm: Tensor | None, max_norm: float) -> None:
        for group, o in begun:
            _, rate, hyper, (_, maximize, *_) = settings[group]
            if norm is not None:
                o = o._replace(grad=o.grad.to(wide_dtype(o.grad)) * clip_scale(norm, max_norm).to(o.grad.device))
            rate = None if rate is None else rate.to(o.grad.device)
            if has_kernels(o.param) and o.param.dtype != torch.float64:
                out = places((*o, rate), UPDATED)
                call(ADAMW_STEP, (*o, rate), (maximize,), tuple(hyper), out=out, in_place=True)
            else:
                results = (o.param, o.exp_avg, o.exp_avg_sq, o.param.new_empty(0) if o.master is None else o.master)
                ADAMW_STEP.update(results, (*o, rate, *hyper), maximize=maximize)


class StepPlan:
    """Rows are the parameters that are updated, those of a launch side by side.

    It refers to parameters, and to nothing else that belongs to the optimizer: state that is moved elsewhere is freed.
    """

    def __init__(self, optimizer: Optimizer, settings: Sequence[GroupSettings], before: StepPlan | None) -> None:
        self.params = [param for group in optimizer.param_groups for param in group["params"]]
        self.narrow: set[int] = set() if before is None else before.narrow  # ids of parameters that were unaligned once
        self.idle: list[Tensor] = []  # those without a gradient that have no row
        if len(set(map(id, self.params))) < len(self.params):
            raise UnsupportedProblem(
                "a parameter stands twice in the groups, and would be updated twice: leave one out"
            )
        homes: dict[tuple[bool, torch.device, Mesh | None], _Kinds] = {}
        for number, group in enumerate(optimizer.param_groups):
            for param in group["params"]:
                o = _operands(param, group, optimizer)
                if o is None:
                    self.idle.append(param)
                    continue
                if any(t is not None and t.data_ptr() % 16 for t in o[:5]):
                    self.narrow.add(id(param))
                is_loop = not (has_kernels(param) and o.is_dense)
                kinds = homes.setdefault((is_loop, o.param.device, Mesh.of(param)), {})
                types = o.param.dtype, o.grad.dtype, o.exp_avg.dtype, o.master is not None
                kinds.setdefault((number, id(param) not in self.narrow, *types), []).append((param, o))
        rows: list[tuple[Tensor, Operands]] = []
        self.tables: list[DeviceTable | Loop] = []
        self.aligned: list[slice] = []
        for is_loop, device, mesh in sorted(homes, key=lambda home: home[0]):
            kinds = homes[is_loop, device, mesh]
            self.tables.append((Loop if is_loop else DeviceTable)(len(rows), mesh, kinds, settings))
            for (_, aligned, *_), found in kinds.items():
                self.aligned += [slice(len(rows), len(rows) + len(found))] * (aligned and not is_loop)
                rows += found
        # What check() compares.
        self.rows = [param for param, _ in rows]
        self.sharded = any(hasattr(param, "placements") for param in self.rows)
        self.blanks = [torch.empty_like(o.param, dtype=o.grad.dtype, device="meta") for _, o in rows]
        self.grad_layouts = _layouts(self.blanks)
        self.has_empty = not all(self.grad_layouts[1])
        self.facts, written, _ = self._facts(optimizer, settings)
        # Masters take over what others wrote since, which a version or an address tells that is not the last step's.
        self.mastered = [i for i, (_, o) in enumerate(rows) if o.master is not None]
        self.keys = [(id(self.rows[i]), written[i].data_ptr()) for i in self.mastered]
        known = {} if before is None else dict(zip(before.keys, before.versions, strict=True))
        self.versions: list[int | None] = [known.get(key) for key in self.keys]

    def _facts(
        self, optimizer: Optimizer, settings: Sequence[GroupSettings]
    ) -> tuple[list[Any], list[Tensor], list[Any]]:
        """Facts that the plan was made of, beside the list of parameters; the rows' own parts of them; the state.

        Facts hold identities of the state alone, so that what others move away is freed at once. What takes an old
        one's place and identity at the same address is as good.
        """
        states = list(optimizer.state.values())
        kept = [*chain.from_iterable(map(dict.values, states))]
        ids = list(map(id, chain(optimizer.state, states, kept)))
        written, local = self.rows, kept
        if self.sharded:
            written, local = [shard(p, p) for p in written], [shard(t, t) for t in kept]
        try:
            addresses = [*map(Tensor.data_ptr, written), *map(Tensor.data_ptr, local)]
        except TypeError:  # what is no tensor is not ours
            addresses = [t.data_ptr() for t in chain(written, local) if isinstance(t, Tensor)]
        return [[each.flags for each in settings], ids, addresses, _layouts(written)], written, kept

    def check(self, optimizer: Optimizer, settings: Sequence[GroupSettings]) -> Step | None:
        """The step's tensors, or None where the plan no longer holds."""
        params = [*chain.from_iterable([group["params"] for group in optimizer.param_groups])]
        if len(params) != len(self.params) or not all(map(is_, params, self.params)):
            return None
        facts, written, kept = self._facts(optimizer, settings)
        if facts != self.facts or [1 for param in self.idle if param.grad is not None]:
            return None
        # Gradients: whether they lie as planned, and their addresses, the column that kernels read.
        grads: list[Any] = [param.grad for param in self.rows]
        if [1 for g in grads if g is None]:
            grads = [blank if g is None else g for g, blank in zip(grads, self.blanks, strict=True)]
        if self.sharded:
            grads = [shard(g, p) for g, p in zip(grads, self.rows, strict=True)]
        if [1 for g in grads if g.layout is not torch.strided]:
            return None
        found = _layouts(grads)
        if found[:2] != self.grad_layouts[:2]:
            return None
        if found != self.grad_layouts:
            if [g.shape for g in grads] != [p.shape for p in written]:
                return None
            grads = list(map(alike, grads, written))
        addresses = list(map(Tensor.data_ptr, grads))
        if self.has_empty:
            addresses = [at or (0 if g.is_meta else _NOWHERE) for g, at in zip(grads, addresses, strict=True)]
        if any(reduce(or_, addresses[part], 0) % 16 for part in self.aligned):
            return None
        return Step(grads, addresses, written, kept)

    def run(
        self,
        optimizer: Optimizer,
        settings: Sequence[GroupSettings],
        step: Step,
        limit: float | None,
        captured: list[Any],
    ) -> Tensor | None:
        """Updates parameters and state; returns the norm of the gradients where they are clipped to ``limit``.

        ``captured`` keeps what a graph that captures this reads at each replay.
        """
        capturing = self._check_capture(settings)
        # Masters take over what others wrote; their low bits stay where that is nothing new.
        versions = [step.written[i]._version for i in self.mastered]
        for i, version, last in zip(self.mastered, versions, self.versions, strict=True):
            if version != last and step.addresses[i]:
                param = step.written[i]
                master = shard(optimizer.state[self.rows[i]]["master"], self.rows[i])
                master.copy_(torch.where(master.to(param.dtype) == param, master, param.to(master.dtype)))
        begun: list[Any] = []
        squares: list[Tensor] = []
        for table in self.tables:
            with torch.cuda.device(table.device):  # no-op for -1
                begun.append(table.begin(self, optimizer, step))
                squares += [] if limit is None else table.squares(begun[-1])
        norm = reduce(lambda total, more: total + more.to(total.device), squares).sqrt() if squares else None
        for table, each in zip(self.tables, begun, strict=True):
            with torch.cuda.device(table.device):  # no-op for -1
                table.update(each, settings, norm, float(limit or 0.0))
        torch.autograd.graph.increment_version(list(compress(step.written, step.addresses)))
        for j, i in enumerate(self.mastered):
            if step.addresses[i]:
                self.versions[j] = step.written[i]._version
        if capturing:
            captured.append((self, settings, step, begun, norm))
        return norm

    def _check_capture(self, settings: Sequence[GroupSettings]) -> bool:
        """Whether a graph is captured. A step that it could not replay is refused, before anything is done."""
        tables = [table for table in self.tables if isinstance(table, DeviceTable)]
        if not tables or not torch.cuda.is_current_stream_capturing():
            return False
        if any(isinstance(each.lr, Tensor) and not has_kernels(each.lr) for each in settings):
            raise UnsupportedProblem("a CUDA graph would keep a learning rate that is on the CPU: move it to the GPU")
        if not all(table.spares for table in tables):
            refuse_capture()
        return True


def _layouts(tensors: list[Tensor]) -> list[list[Any]]:
    """Types, numbers of elements and strides of tensors: all that kernels assume beside addresses.

    Shapes and strides are of those alone that are not contiguous. An update of contiguous ones does not depend on
    shapes; and a tuple for each tensor would keep Python's garbage collector busy.
    """
    contiguous = list(map(Tensor.is_contiguous, tensors))
    found: list[list[Any]] = [[t.dtype for t in tensors], list(map(Tensor.numel, tensors)), contiguous]
    if not all(contiguous):
        found.append([each or (t.shape, t.stride()) for t, each in zip(tensors, contiguous, strict=True)])
    return found


def _operands(param: Tensor, group: dict[str, Any], optimizer: Optimizer) -> Operands | None:
    """None for a parameter without a gradient whose state is not ready for one, for whatever reason."""
    if param.grad is not None:
        if has_kernels(param):
            refuse_capture()
        return operands(param, group, optimizer.state[param])
    if "step" not in optimizer.state.get(param, {}):
        return None
    try:
        return operands(param, group, optimizer.state[param])
    except UnsupportedProblem:
        return None


def refuse_capture() -> None:
    if torch.cuda.is_current_stream_capturing():
        raise UnsupportedProblem(
            "a captured step has been taken before, outside: run one step of these parameters before each capture "
            f"(of {_SPARES} steps at most), which compiles the kernel and prepares memory that the graph will read"
        )
