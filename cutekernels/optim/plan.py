"""Launches of a step of ``FusedAdamW``: planned once, and checked at each step against all it was made of.

A check is a few passes of C functions over lists (identities, addresses, types), 1 us per parameter; where it fails, a
plan is made anew. Gradients may have new addresses at each step, or be missing: their addresses are the one column that
is sent each time.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import reduce
from itertools import chain, compress
from operator import is_, or_
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from cutekernels import compile as compiler
from cutekernels import dispatch
from cutekernels import gpu as gpus
from cutekernels.errors import UnsupportedProblem
from cutekernels.ops.optimizer.op import (
    ADAMW_COUNT,
    ADAMW_SQUARES,
    ADAMW_STEP,
    ADAMW_TABLE,
    AdamWConfig,
    AdamWProblem,
    Hyper,
)
from cutekernels.optim.operands import Kind, Mesh, Operands, alike, mesh_of, operands, shard, take_over

_ROW_BYTES = 64
_ADDRESS_BYTES = 8
_COUNTED = 256  # tensors per program that counts steps
_MOST_SUMS = 2048  # programs that sum squares: a constant, so that the norm has the same bits on every GPU
_SPARES = 4  # steps that one capture may hold
_NOWHERE = 16  # the address of an empty gradient, which counts a step; 0 is a missing one


def has_kernels(param: Tensor) -> bool:
    return param.is_cuda


class Stepped(Protocol):
    """The optimizer, as a plan sees it."""

    param_groups: list[dict[str, Any]]
    state: Any
    max_grad_norm: float | None


@dataclass(frozen=True, slots=True)
class GroupSettings:
    """A group's values in a step: flags that plans depend on, and numbers that they do not."""

    rate: Tensor | None
    """The learning rate, where it is on the GPU."""
    maximize: bool
    master_weights: bool
    moments_dtype: str
    hyper: Hyper
    lr_device: torch.device | None
    """Where the learning rate is, if it is a tensor."""

    @property
    def flags(self) -> tuple[Any, ...]:
        return self.rate is not None, self.maximize, self.master_weights, self.moments_dtype


@dataclass(slots=True)
class Launch:
    """Tensors of one group and kind: the rows from ``first`` on of their device's table."""

    group: int
    first: int
    chunks: Tensor
    update: Callable[..., None] | None = None
    squares: Callable[..., None] | None = None

    @property
    def sums(self) -> int:
        return min(_MOST_SUMS, len(self.chunks))


@dataclass(slots=True)
class DeviceTable:
    """Launches on one device, over one table. Its rows are those from ``first`` to ``last`` of the plan."""

    device: torch.device
    first: int
    last: int
    table: Tensor
    count: Callable[..., None]
    launches: list[Launch] = field(default_factory=list)
    meshes: list[tuple[Mesh | None, int]] = field(default_factory=list)
    """Each with how many launches it has; they follow one another."""
    spares: list[Tensor] = field(default_factory=list)
    """Pinned memory for columns that are sent while a graph is captured, which must not allocate any."""

    def send(self, addresses: list[int], capturing: bool) -> tuple[Tensor, Tensor | None]:
        """The column of ``addresses`` on the device, and what a graph will read at each replay to make it."""
        column = torch.frombuffer(array("q", addresses), dtype=torch.int64)
        if capturing:
            staging = self.spares.pop().copy_(column)
            return staging.to(self.device, non_blocking=True), staging
        while len(self.spares) < _SPARES:
            self.spares.append(torch.empty(len(addresses), dtype=torch.int64, device="cpu", pin_memory=True))
        # torch gives pinned memory out again once the copies from it have ended: steps never wait for one another.
        return column.pin_memory().to(self.device, non_blocking=True), None

    def count_steps(self, column: int) -> None:
        tensors = self.last - self.first
        self.count((-(-tensors // _COUNTED), 1, 1), self.table.data_ptr(), column, tensors)

    def sum_squares(self, column: int) -> list[Tensor]:
        """Sums of squares of the gradients that ``column`` has the addresses of, over all ranks: one per mesh."""
        found = []
        launches = iter(self.launches)
        for mesh, count in self.meshes:
            ours = [next(launches) for _ in range(count)]
            partial = torch.empty(sum(launch.sums for launch in ours), dtype=torch.float32, device=self.device)
            place = partial.data_ptr()
            for launch in ours:
                if launch.squares is not None:
                    grads = column + launch.first * _ADDRESS_BYTES
                    table = self.table.data_ptr() + launch.first * _ROW_BYTES
                    chunks = launch.chunks
                    launch.squares((launch.sums, 1, 1), table, grads, chunks.data_ptr(), place, len(chunks))
                    place += launch.sums * partial.element_size()
            total = partial.sum()
            found.append(total if mesh is None else mesh.sum_over(total))
        return found

    def update(self, column: int, settings: Sequence[GroupSettings], norm: Tensor | None, max_norm: float) -> None:
        address = 0 if norm is None else norm.data_ptr()
        for launch in self.launches:
            if launch.update is not None:
                rate, hyper = settings[launch.group].rate, settings[launch.group].hyper
                rate = None if rate is None else rate.to(self.device)
                launch.update(
                    (len(launch.chunks), 1, 1),
                    self.table.data_ptr() + launch.first * _ROW_BYTES,
                    column + launch.first * _ADDRESS_BYTES,
                    launch.chunks.data_ptr(),
                    0 if rate is None else rate.data_ptr(),
                    address,
                    max_norm,
                    *hyper,
                )


class StepPlan:
    """Rows are the parameters that kernels update, those of a launch side by side.

    It refers to parameters, and to nothing else that belongs to the optimizer: state that is moved elsewhere is freed.
    """

    def __init__(self, optimizer: Stepped, settings: Sequence[GroupSettings], before: StepPlan | None) -> None:
        clips = optimizer.max_grad_norm is not None
        self.flags = clips, [each.flags for each in settings]
        self.params = [param for group in optimizer.param_groups for param in group["params"]]
        self.narrow: set[int] = set() if before is None else before.narrow  # ids of parameters that were unaligned once
        self.alone: list[tuple[Tensor, int]] = []  # on the CPU, with their groups
        self.idle: list[Tensor] = []  # those without a gradient that no launch holds a row for
        if len(set(map(id, self.params))) < len(self.params):
            raise UnsupportedProblem(
                "a parameter stands twice in the groups, and would be updated twice: leave one out"
            )
        kinds: _Kinds = {}
        for number, group in enumerate(optimizer.param_groups):
            for param in group["params"]:
                if not has_kernels(param):
                    self.alone.append((param, number))
                elif (o := _operands(param, group, optimizer)) is None:
                    self.idle.append(param)
                else:
                    kind = o.kind(id(param) in self.narrow)
                    if not kind.aligned:
                        self.narrow.add(id(param))
                    kinds.setdefault((kind.device, mesh_of(param), number, kind), []).append((param, o))
        self._note(optimizer, [pair for found in _together(kinds) for pair in kinds[found]], before)
        self.tables = _tables(kinds, settings, clips)
        begins = [table.first + launch.first for table in self.tables for launch in table.launches]
        aligned = [kind.aligned for *_, kind in _together(kinds)]
        spans = zip(begins, [*begins[1:], len(self.rows)], aligned, strict=False)
        self.aligned = [slice(begin, end) for begin, end, each in spans if each]

    def _note(self, optimizer: Stepped, rows: list[tuple[Tensor, Operands]], before: StepPlan | None) -> None:
        """Notes down what :meth:`gradients` compares."""
        self.rows = [param for param, _ in rows]
        self.sharded = any(hasattr(param, "placements") for param in self.rows)
        operands = [o for _, o in rows]
        written = [o.written for o in operands]
        self.ids, kept = _state_of(optimizer)
        self.foreign = not all(isinstance(t, Tensor) for t in kept)
        self.pointers = self._addresses(written, kept)
        self.looks = _looks(written)
        grads = [o.param if o.grad is None else o.grad for o in operands]
        self.grad_looks = _looks([o.param for o in operands])._replace(dtypes=[g.dtype for g in grads])
        self.has_empty = not all(self.grad_looks.numels)
        self.dense = {i: o.param for i, o in enumerate(operands) if o.home is not None}  # copies, written back
        # Masters take over what others wrote since, which a version or an address tells that is not the last step's.
        self.mastered = [i for i, o in enumerate(operands) if o.master is not None]
        known = {} if before is None else before.versions_of()
        self.versions = [known.get((id(self.rows[i]), self.pointers[i])) for i in self.mastered]

    def versions_of(self) -> dict[tuple[int, int], int | None]:
        """Versions after their last steps of parameters with a master copy, by their ids and addresses."""
        pairs = zip(self.mastered, self.versions, strict=True)
        return {(id(self.rows[i]), self.pointers[i]): version for i, version in pairs}

    def _addresses(self, written: list[Tensor], kept: list[Any]) -> list[int]:
        """Where the parameters and the state are. What is no tensor there is not ours."""
        if self.foreign:
            kept = [t for t in kept if isinstance(t, Tensor)]
        if self.sharded:
            kept = [shard(t, t) for t in kept]
        return [*map(Tensor.data_ptr, written), *map(Tensor.data_ptr, kept)]

    # -- at each step

    def gradients(self, optimizer: Stepped, settings: Sequence[GroupSettings]) -> StepGradients | None:
        """The gradients by row, or None where the plan no longer holds."""
        # What the plan was made of: groups, parameters, state.
        if self.flags != (optimizer.max_grad_norm is not None, [each.flags for each in settings]):
            return None
        params = [*chain.from_iterable([group["params"] for group in optimizer.param_groups])]
        if len(params) != len(self.params) or not all(map(is_, params, self.params)):
            return None
        ids, kept = _state_of(optimizer)
        if ids != self.ids or [1 for param in self.idle if param.grad is not None]:
            return None
        written = [shard(p, p) for p in self.rows] if self.sharded else self.rows
        if self._addresses(written, kept) != self.pointers or _looks(written) != self.looks:
            return None
        # Gradients: of which parameters, and whether they lie as planned.
        grads = [param.grad for param in self.rows]
        there = [g is not None for g in grads]
        present: list[Tensor] = [g for g in grads if g is not None]
        looks = self.grad_looks
        whole = len(present) == len(grads)
        if not whole:
            looks = _Looks(*[list(compress(each, there)) for each in looks])
        if self.sharded:
            present = [shard(g, p) for g, p in zip(present, compress(self.rows, there), strict=True)]
        if [1 for g in present if g.layout is not torch.strided]:
            return None
        found = _looks(present)
        if found.dtypes != looks.dtypes or found.numels != looks.numels:
            return None
        if found.contiguous != looks.contiguous or found.strides != looks.strides:
            places = [self.dense.get(i, param) for i, param in enumerate(written) if there[i]]
            if [g.shape for g in present] != [place.shape for place in places]:
                return None
            present = [alike(g, place) for g, place in zip(present, places, strict=True)]
        # Their addresses, the column that kernels read.
        addresses = list(map(Tensor.data_ptr, present))
        if self.has_empty:
            addresses = [address or _NOWHERE for address in addresses]
        if not whole:
            filled = iter(addresses)
            addresses = [next(filled) if each else 0 for each in there]
        if any(reduce(or_, addresses[part], 0) % 16 for part in self.aligned):
            return None
        return StepGradients(present, addresses, there, written, kept)

    def check_capture(self, settings: Sequence[GroupSettings]) -> None:
        """Refuses a step that a graph could not replay, before anything is done."""
        for table in self.tables:
            places = [settings[launch.group].lr_device for launch in table.launches]
            if any(place is not None and place.type != table.device.type for place in places):
                raise UnsupportedProblem(
                    "a CUDA graph would keep a learning rate that is on the CPU: move it to the GPU"
                )
            if not table.spares:
                refuse_capture()

    def prepare(self, optimizer: Stepped, grads: StepGradients) -> None:
        """Brings what others wrote to parameters into master copies, and into copies of those that are not dense."""
        versions = [grads.written[i]._version for i in self.mastered]
        if versions != self.versions:
            for i, version, last in zip(self.mastered, versions, self.versions, strict=True):
                if grads.there[i] and version != last:
                    param = self.rows[i]
                    take_over(shard(optimizer.state[param]["master"], param), grads.written[i])
        for i, dense in self.dense.items():
            if grads.there[i]:
                dense.copy_(grads.written[i])

    def finish(self, grads: StepGradients) -> None:
        """Writes copies back, tells autograd of the update, and notes the parameters' versions."""
        for i, dense in self.dense.items():
            if grads.there[i]:
                grads.written[i].copy_(dense)
        torch.autograd.graph.increment_version(list(compress(grads.written, grads.there)))
        last = self.versions
        self.versions = [
            grads.written[i]._version if grads.there[i] else version
            for i, version in zip(self.mastered, last, strict=True)
        ]


@dataclass(frozen=True, slots=True)
class StepGradients:
    """A step's gradients, and what else its launches work on."""

    present: list[Tensor]
    """Those that are there, lying as their parameters."""
    addresses: list[int]
    """By row, 0 for a missing one."""
    there: list[bool]
    """Which rows have one."""
    written: list[Tensor]
    """The rows' parameters, or the parts of them that this rank holds."""
    kept: list[Any]
    """The optimizer's state."""


def _state_of(optimizer: Stepped) -> tuple[list[int], list[Any]]:
    """The identities of all that the optimizer's state is made of, and its values.

    Identities alone, so that state which others move away is freed at once. What takes an old one's place and identity
    at the same address is as good.
    """
    states = list(optimizer.state.values())
    kept = [*chain.from_iterable(map(dict.values, states))]
    ids = list(map(id, chain(optimizer.state, states, kept)))
    return ids, kept


class _Looks(NamedTuple):
    """Properties of tensors, beside their addresses, that kernels assume."""

    dtypes: list[torch.dtype]
    numels: list[int]
    contiguous: list[bool]
    strides: list[Any]
    """Shapes and strides of those that are not contiguous. An update of contiguous ones does not depend on shapes; and
    a tuple for each tensor would keep Python's garbage collector busy."""


def _looks(tensors: list[Tensor]) -> _Looks:
    contiguous = list(map(Tensor.is_contiguous, tensors))
    strides: list[Any] = []
    if not all(contiguous):
        strides = [None if each else (t.shape, t.stride()) for t, each in zip(tensors, contiguous, strict=True)]
    return _Looks([t.dtype for t in tensors], list(map(Tensor.numel, tensors)), contiguous, strides)


# ---- making a plan --------------------------------------------------------------------------------------

_Kinds = dict[tuple[torch.device, Mesh | None, int, Kind], list[tuple[Tensor, Operands]]]


def _operands(param: Tensor, group: dict[str, Any], optimizer: Stepped) -> Operands | None:
    """None for a parameter without a gradient whose state is not ready for one, for whatever reason."""
    if param.grad is not None:
        refuse_capture()
        return operands(param, group, optimizer.state[param])
    if "step" not in optimizer.state.get(param, {}):
        return None
    try:
        return operands(param, group, optimizer.state[param])
    except UnsupportedProblem:
        return None


def _together(kinds: _Kinds) -> list[tuple[torch.device, Mesh | None, int, Kind]]:
    """Kinds by device, and by mesh there, else in the order of the parameters."""
    devices = list(dict.fromkeys(device for device, *_ in kinds))
    meshes = list(dict.fromkeys(mesh for _, mesh, *_ in kinds))
    return sorted(kinds, key=lambda kind: (devices.index(kind[0]), meshes.index(kind[1])))


def _tables(kinds: _Kinds, settings: Sequence[GroupSettings], clips: bool) -> list[DeviceTable]:
    tables: list[DeviceTable] = []
    order = _together(kinds)
    row = 0
    for device in dict.fromkeys(device for device, *_ in order):
        ours = [found for found in order if found[0] == device]
        every = [o for found in ours for _, o in kinds[found]]
        with torch.cuda.device(device):
            spec = gpus.detect(device.index)
            numbers = array("q", [number for o in every for number in o.row()])
            on_device = torch.frombuffer(numbers, dtype=torch.int64).pin_memory().to(device, non_blocking=True)
            counting = AdamWProblem(0), AdamWConfig(_COUNTED, 1, "normal")
            count = ADAMW_COUNT.bind(*counting, compiler.get(ADAMW_COUNT, *counting, spec))
            table = DeviceTable(device, row, row + len(every), on_device, count)
            first = 0
            for found in ours:
                _, mesh, group, kind = found
                tensors = [o for _, o in kinds[found]]
                table.launches.append(_launch(tensors, kind, group, first, settings[group], clips, spec))
                if not table.meshes or table.meshes[-1][0] != mesh:
                    table.meshes.append((mesh, 0))
                table.meshes[-1] = (mesh, table.meshes[-1][1] + 1)
                first += len(tensors)
        tables.append(table)
        row = table.last
    return tables


def _launch(
    tensors: list[Operands],
    kind: Kind,
    group: int,
    first: int,
    settings: GroupSettings,
    clips: bool,
    spec: gpus.GpuSpec,
) -> Launch:
    """Chooses and compiles the kernels, and cuts the tensors into their blocks."""
    sizes = [o.param.numel() for o in tensors]
    problem = tensors[0].problem(kind, sum(sizes), settings.rate is not None, settings.maximize)
    # Tuned as one tensor of as many elements, whose step the host knows.
    plain = problem.replace(step="host", rate="host", maximize=False)
    config: Any = dispatch.resolve(ADAMW_STEP, plain, spec).config
    blocks = torch.tensor([-(-n // config.block) for n in sizes], device="cpu")
    which = torch.repeat_interleave(torch.arange(len(sizes), device="cpu"), blocks)
    within = torch.arange(len(which), device="cpu") - torch.repeat_interleave(blocks.cumsum(0) - blocks, blocks)
    launch = Launch(group, first, torch.stack((which, within), dim=1).to(kind.device, torch.int32))
    if sum(sizes):
        launch.update = ADAMW_TABLE.bind(problem, config, compiler.get(ADAMW_TABLE, problem, config, spec))
        if clips:
            launch.squares = ADAMW_SQUARES.bind(plain, config, compiler.get(ADAMW_SQUARES, plain, config, spec))
    return launch


def refuse_capture() -> None:
    if torch.cuda.is_current_stream_capturing():
        raise UnsupportedProblem(
            "a captured step has been taken before, outside: run one step of these parameters before each capture "
            f"(of {_SPARES} steps at most), which compiles the kernel and prepares memory that the graph will read"
        )
