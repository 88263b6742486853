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
from operator import and_
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor
from torch.optim import Optimizer

from cutekernels import compile as compiler
from cutekernels import dispatch
from cutekernels import gpu as gpus
from cutekernels.errors import UnsupportedProblem
from cutekernels.ops.optimizer import op as adamw
from cutekernels.ops.optimizer.op import ADAMW_STEP, AdamWConfig, AdamWProblem
from cutekernels.ops.shared.calls import call, places
from cutekernels.optim.operands import (
    Operands,
    alike,
    clip_scale,
    operands,
    ranks_beside,
    refuse_shared,
    shard,
    wide_dtype,
)

_COUNTED = 256  # tensors per program that counts steps
_MOST_SUMS = 2048  # programs that sum squares: a constant, so that the norm has the same bits on every GPU
_SPARES = 4  # steps that one capture may hold
_NOWHERE = 16  # the address of an empty gradient, which counts a step; 0 is a missing one


def has_kernels(param: Tensor) -> bool:
    return param.is_cuda


class GroupSettings(NamedTuple):
    """A group's values in a step, and what was made of them. ``rate``: the learning rate, where it is on the GPU."""

    values: list[Any]
    lr: float | Tensor
    rate: Tensor | None
    hyper: adamw.Hyper
    maximize: bool
    clips: bool
    kept: tuple[bool, str]
    """Master weights, and the moments' type."""


class Step(NamedTuple):
    """Settings by group, and by row gradients, their addresses, and the parts of parameters that this rank holds.

    A gradient that is missing is on the meta device, and its address is 0.
    """

    settings: Sequence[GroupSettings]
    grads: list[Tensor]
    addresses: list[int]
    written: list[Tensor]


_Kinds = dict[tuple[Any, ...], list[tuple[Tensor, Operands]]]
"""Parameters by group, whether they are aligned, and types."""


class Launch(NamedTuple):
    """Kernels over the chunks of one group's tensors of one kind. ``squares`` is None where nothing is clipped."""

    group: int
    chunks: Tensor
    update: Callable[..., None]
    squares: Callable[..., None] | None
    sums: int

    @classmethod
    def of(cls, group: int, first: int, aligned: bool, tensors: list[Operands], settings: GroupSettings) -> Launch:
        """Chooses and compiles the kernels, and cuts ``tensors``, the table's rows from ``first`` on, into blocks."""
        o, sizes = tensors[0], [o.param.numel() for o in tensors]
        inputs = (o.param, o.param if o.grad.is_meta else o.grad, *o[2:], None)
        ADAMW_STEP.admit(inputs, maximize=settings.maximize)
        problem = ADAMW_STEP.problem(*places(inputs, adamw.UPDATED), *inputs, maximize=settings.maximize).replace(
            elements=sum(sizes),
            rate="host" if settings.rate is None else "device",
            align=16 if aligned else o.param.element_size(),
        )
        # Tuned as one tensor of as many elements, whose step the host knows.
        plain = problem.replace(step="host", rate="host", maximize=False)
        spec = gpus.detect(o.param.device.index)
        config: Any = dispatch.resolve(ADAMW_STEP, plain, spec).config
        blocks = torch.tensor([-(-n // config.block) for n in sizes], device="cpu")
        which = torch.arange(len(sizes), device="cpu").repeat_interleave(blocks)
        within = torch.arange(len(which), device="cpu") - (blocks.cumsum(0) - blocks)[which]
        chunks = torch.stack((first + which, within), dim=1).to(o.param.device, torch.int32)
        update = compiler.get(adamw.ADAMW_TABLE, problem, config, spec)
        squares = compiler.get(adamw.ADAMW_SQUARES, plain, config, spec) if settings.clips else None
        return cls(group, chunks, update, squares, min(_MOST_SUMS, len(chunks)))


class DeviceTable:
    """Launches on one device, over one table of the plan's rows from ``first`` on."""

    def __init__(self, first: int, ranks: tuple[Any, ...], kinds: _Kinds, settings: Sequence[GroupSettings]) -> None:
        tensors = [o for found in kinds.values() for _, o in found]
        self.device, self.ranks = tensors[0].param.device, ranks
        self.rows = slice(first, first + len(tensors))
        self.launches: list[Launch] = []
        # Pinned memory for columns that are sent while a graph is captured, which must not allocate any.
        self.spares: list[Tensor] = []
        with torch.cuda.device(self.device):
            self.table = torch.tensor([o.row() for o in tensors], device=self.device)
            counting = AdamWProblem(0), AdamWConfig(_COUNTED, 1, "normal")
            self.count = compiler.get(adamw.ADAMW_COUNT, *counting, gpus.detect(self.device.index))
            row = 0
            for (group, aligned, *_), found in kinds.items():
                alike = [o for _, o in found]
                if any(o.param.numel() for o in alike):
                    self.launches.append(Launch.of(group, row, aligned, alike, settings[group]))
                row += len(found)

    def begin(self, optimizer: Optimizer, step: Step) -> tuple[Tensor, Tensor]:
        """Sends the column of addresses and counts steps. At its replays, a graph sends the second tensor again."""
        column = torch.frombuffer(array("q", step.addresses[self.rows]), dtype=torch.int64)
        if torch.cuda.is_current_stream_capturing():
            if not self.spares:
                refuse_capture()
            staging = self.spares.pop().copy_(column)
        else:
            # torch gives this out again once the copy from it has ended: steps never wait for one another.
            staging = column.pin_memory()
            self.spares += [column.pin_memory() for _ in range(_SPARES - len(self.spares))]
        sent = staging.to(self.device, non_blocking=True)
        self.count((-(-len(column) // _COUNTED), 1, 1), self.table.data_ptr(), sent.data_ptr(), len(column))
        return sent, staging

    def squares(self, begun: tuple[Tensor, Tensor]) -> Tensor:
        """The sum of the gradients' squares on this rank."""
        partial = torch.empty(sum([each.sums for each in self.launches]), dtype=torch.float32, device=self.device)
        tables, place = (self.table.data_ptr(), begun[0].data_ptr()), partial.data_ptr()
        for each in self.launches:
            assert each.squares is not None
            each.squares((each.sums, 1, 1), *tables, each.chunks.data_ptr(), place, len(each.chunks))
            place += each.sums * partial.element_size()
        return partial.sum()

    def update(self, begun: Any, step: Step, norm: Tensor | None, max_norm: float) -> None:
        norm = None if norm is None else norm.to(self.device, torch.float32)
        tables = self.table.data_ptr(), begun[0].data_ptr()
        for each in self.launches:
            its = step.settings[each.group]
            rate = None if its.rate is None else its.rate.to(self.device)
            scalars = [0 if t is None else t.data_ptr() for t in (rate, norm)]
            each.update((len(each.chunks), 1, 1), *tables, each.chunks.data_ptr(), *scalars, max_norm, *its.hyper)


class Loop:
    """Parameters that no table takes: on the CPU, by the op's reference; on a GPU those that are not dense, by copies.

    So a parameter has the same bits however it lies.
    """

    def __init__(self, first: int, ranks: tuple[Any, ...], kinds: _Kinds, settings: Sequence[GroupSettings]) -> None:
        self.params = [(group, param) for (group, *_), found in kinds.items() for param, _ in found]
        self.rows, self.ranks, self.device = slice(first, first + len(self.params)), ranks, -1

    def begin(self, optimizer: Optimizer, step: Step) -> list[tuple[int, Operands]]:
        """Counts steps; returns the group and the operands of each parameter that has a gradient."""
        params = compress(self.params, step.addresses[self.rows])
        begun = [(group, operands(p, optimizer.param_groups[group], optimizer.state[p])) for group, p in params]
        for _, o in begun:
            o.step.add_(1.0)
        return begun

    def squares(self, begun: list[tuple[int, Operands]]) -> Tensor:
        return torch.stack([o.grad.to(wide_dtype(o.grad)).square().sum() for _, o in begun]).sum()

    def update(self, begun: Any, step: Step, norm: Tensor | None, max_norm: float) -> None:
        for group, o in begun:
            its = step.settings[group]
            if norm is not None:
                o = o._replace(grad=o.grad.to(wide_dtype(o.grad)) * clip_scale(norm, max_norm).to(o.grad.device))
            inputs = *o, None if its.rate is None else its.rate.to(o.grad.device)
            out = places(inputs, adamw.UPDATED)
            if has_kernels(o.param) and o.param.dtype != torch.float64:
                call(ADAMW_STEP, inputs, (its.maximize,), tuple(its.hyper), out=out, in_place=True)
            else:
                ADAMW_STEP.update(out, (*inputs, *its.hyper), maximize=its.maximize)


_Written = tuple[int, Any]  # how often a parameter was written to, and a reference to its storage


class StepPlan:
    """Rows are the parameters that are updated, those of a launch side by side.

    It refers to parameters, and to nothing else that belongs to the optimizer: state that is moved elsewhere is freed.
    """

    def __init__(self, optimizer: Optimizer, settings: Sequence[GroupSettings], before: StepPlan | None) -> None:
        params = [param for group in optimizer.param_groups for param in group["params"]]
        self.narrow: set[int] = set() if before is None else before.narrow  # ids of parameters that were unaligned once
        self.idle: list[Tensor] = []  # those without a gradient that have no row
        if len(set(map(id, params))) < len(params):
            raise UnsupportedProblem(
                "a parameter stands twice in the groups, and would be updated twice: leave one out"
            )
        if any(has_kernels(param) and param.grad is not None for param in params):
            refuse_capture()
        homes: dict[tuple[bool, torch.device, tuple[Any, ...]], _Kinds] = {}
        for number, group in enumerate(optimizer.param_groups):
            for param in group["params"]:
                o = _operands(param, group, optimizer)
                if o is None:
                    self.idle.append(param)
                    continue
                if any(t is not None and t.data_ptr() % 16 for t in o[:5]):
                    self.narrow.add(id(param))
                is_tabled = has_kernels(param) and bool(ADAMW_STEP.views(o._asdict()))  # as kernels take them
                home = is_tabled, o.param.device, ranks_beside(param)
                types = o.param.dtype, o.grad.dtype, o.exp_avg.dtype, o.master is not None
                kinds = homes.setdefault(home, {})
                kinds.setdefault((number, id(param) not in self.narrow, *types), []).append((param, o))
        refuse_shared([o.param for kinds in homes.values() for found in kinds.values() for _, o in found])
        rows: list[tuple[Tensor, Operands]] = []
        self.tables: list[DeviceTable | Loop] = []
        self.masks: list[int] = []  # bits that a gradient's address may not have
        # Tables first: they may refuse a capture, before a loop has counted a step.
        for (is_tabled, _, ranks), kinds in sorted(homes.items(), key=lambda item: not item[0][0]):
            self.tables.append((DeviceTable if is_tabled else Loop)(len(rows), ranks, kinds, settings))
            for (_, aligned, *_), found in kinds.items():
                self.masks += [15 if aligned and is_tabled else 0] * len(found)
                rows += found
        self.rows = [param for param, _ in rows]
        self.sharded = any(hasattr(param, "placements") for param in self.rows)
        self.blanks = [torch.empty_like(o.param, dtype=o.grad.dtype, device="meta") for _, o in rows]
        self.layouts = _layouts(self.blanks)[2:]
        self.facts: list[Any] = []
        # Masters take over what others wrote since, which a version, an address or a storage tells.
        masters = [(i, param, o) for i, (param, o) in enumerate(rows) if o.master is not None]
        self.masters = {i: (id(param), o.param.data_ptr()) for i, param, o in masters}
        known = {} if before is None else dict(zip(before.masters.values(), before.versions, strict=True))
        self.versions: list[_Written | None] = [known.get(key) for key in self.masters.values()]

    def check(self, optimizer: Optimizer, settings: Sequence[GroupSettings]) -> Step | None:
        """The step's tensors, or None where the plan does not hold: where facts are not those of the first check.

        Facts hold identities of the state alone, so that what others move away is freed at once. What takes an old
        one's place and identity at the same address is as good.
        """
        params = chain.from_iterable([group["params"] for group in optimizer.param_groups])
        states = list(optimizer.state.values())
        kept: list[Any] = [*chain.from_iterable(map(dict.values, states))]
        ids = list(map(id, chain(params, optimizer.state, states, kept)))
        written = self.rows
        grads: list[Any] = [param.grad for param in written]
        if [1 for g in grads if g is None]:
            grads = [blank if g is None else g for g, blank in zip(grads, self.blanks, strict=True)]
        if self.sharded:
            written, kept = [shard(p, p) for p in written], [shard(t, t) for t in kept]
            grads = [shard(g, p) for g, p in zip(grads, self.rows, strict=True)]
        try:
            addresses = [*map(Tensor.data_ptr, written), *map(Tensor.data_ptr, kept)]
        except TypeError:  # what is no tensor is not ours
            addresses = [t.data_ptr() for t in chain(written, kept) if isinstance(t, Tensor)]
        dtypes, sizes, *layouts = _layouts(grads)
        flags = [(each.rate is None, each.maximize, each.clips, each.kept) for each in settings]
        facts = [flags, ids, addresses, _layouts(written), dtypes, sizes]
        self.facts = self.facts or facts
        if facts != self.facts or [1 for param in self.idle if param.grad is not None]:
            return None
        # Gradients that lie otherwise are copied. Their addresses are the column that kernels read.
        if layouts != self.layouts:
            if [1 for g in grads if g.is_sparse] or [g.shape for g in grads] != [p.shape for p in written]:
                return None
            grads = list(map(alike, grads, written))
        column = list(map(Tensor.data_ptr, grads))
        if not all(column):
            column = [at or (0 if g.is_meta else _NOWHERE) for g, at in zip(grads, column, strict=True)]
        return None if any(map(and_, column, self.masks)) else Step(settings, grads, column, written)

    def run(self, optimizer: Optimizer, step: Step, limit: float | None) -> tuple[Tensor | None, list[Any]]:
        """Updates parameters and state. Returns the norm of the gradients where they are clipped to ``limit``, and
        what a graph that captures this reads at each replay.
        """
        tables = [table for table in self.tables if any(step.addresses[table.rows])]
        capturing = any(isinstance(each, DeviceTable) for each in tables) and torch.cuda.is_current_stream_capturing()
        if capturing and any(isinstance(each.lr, Tensor) and not has_kernels(each.lr) for each in step.settings):
            raise UnsupportedProblem("a CUDA graph would keep a learning rate that is on the CPU: move it to the GPU")
        # Masters take over what others wrote; their low bits stay where that is nothing new.
        versions = [_writes(self.rows[i], step.written[i]) for i in self.masters]
        for i, version, last in zip(self.masters, versions, self.versions, strict=True):
            if version != last and step.addresses[i]:
                param = step.written[i]
                master = shard(optimizer.state[self.rows[i]]["master"], self.rows[i])
                master.copy_(torch.where(master.to(param.dtype) == param, master, param.to(master.dtype)))
        begun: list[Any] = []
        squares: list[Tensor] = []
        for table in tables:
            with torch.cuda.device(table.device):  # no-op for -1
                begun.append(table.begin(optimizer, step))
                if limit is not None:
                    squares.append(table.squares(begun[-1]))
                    for group in table.ranks:
                        torch.distributed.all_reduce(squares[-1], group=group)
        norm = None
        if limit is not None:
            squares = squares or [torch.zeros((), device="cpu")]
            norm = reduce(lambda total, more: total + more.to(total.device), squares).sqrt()
        for table, each in zip(tables, begun, strict=True):
            with torch.cuda.device(table.device):  # no-op for -1
                table.update(each, step, norm, float(limit or 0.0))
        torch.autograd.graph.increment_version(list(compress(step.written, step.addresses)))
        rows = zip(self.masters, self.versions, strict=True)
        self.versions = [_writes(self.rows[i], step.written[i]) if step.addresses[i] else last for i, last in rows]
        return norm, [self, step, [*map(dict, optimizer.state.values())], begun, norm] if capturing else []


def _writes(param: Tensor, local: Tensor) -> _Written:
    """A count of what was written to a parameter, by itself or to the part of it that this rank holds, and its
    storage, which tells values assigned to ``param.data`` at the old ones' address.
    """
    count = local._version if local is param else param._version + local._version
    return count, ref(local.untyped_storage())


def _layouts(tensors: list[Tensor]) -> list[list[Any]]:
    """Types, numbers of elements and strides of tensors: all that kernels assume beside addresses.

    Shapes and strides are of those alone that are not contiguous. An update of contiguous ones does not depend on
    shapes; and a tuple for each tensor would keep Python's garbage collector busy.
    """
    contiguous = list(map(Tensor.is_contiguous, tensors))
    found: list[list[Any]] = [[t.dtype for t in tensors], list(map(Tensor.numel, tensors)), contiguous]
    if not all(contiguous):
        found.append(
            [each or t.is_sparse or (t.shape, t.stride()) for t, each in zip(tensors, contiguous, strict=True)]
        )
    return found


def _operands(param: Tensor, group: dict[str, Any], optimizer: Optimizer) -> Operands | None:
    """None for a parameter without a gradient whose state is not ready for one, for whatever reason."""
    if param.grad is None and "step" not in optimizer.state.get(param, {}):
        return None
    try:
        return operands(param, group, optimizer.state[param])
    except UnsupportedProblem:
        if param.grad is not None:
            raise
        return None


def refuse_capture() -> None:
    if torch.cuda.is_current_stream_capturing():
        raise UnsupportedProblem(
            "a captured step has been taken before, outside: run one step of these parameters before each capture "
            f"(of {_SPARES} steps at most), which compiles the kernel and prepares memory that the graph will read"
        )
