"""``tune grid``: problems that cover what calls ask for, most expected regret removed per second first.

A family's points fill its space: every combination of its axes, where the extents of weights are drawn inside their
cells by a Kronecker sequence, so that few points share one. A call at a point that nobody measured runs a neighbour's
winner, worse the further away it is, and from an octave and a half on the default (``dispatch.py``). A greedy order
takes, again and again, the point whose measurement removes most of that expected regret, of its own calls and of its
neighbours', for its cost. Measured winners that serve today count first: so the next run, hours or days later, goes on
where the last one ended.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import product

from cutekernels.autotune import shards
from cutekernels.autotune.job import Job, Task, checked_trials
from cutekernels.db.storage.snapshot import Snapshot
from cutekernels.dispatch import MAX_OCTAVES, adopt, octaves
from cutekernels.errors import JobError, UnsupportedProblem
from cutekernels.gpu import GpuSpec
from cutekernels.ops import registry

NAME = "grid"
TRIALS = 16  # replayed sweeps (H100, 430 configs each): the best of 16 is 0.4 % behind the best of all, of 32 0.36 %
LANES = 8  # tasks in work on a GPU at a time, by which a budget's are counted
_PRIOR = 2.0  # neighbours that the prior regret counts as
_JITTER = 0.5  # of a cell's width, in which an extent is drawn
_PLASTIC = (0.7548776662, 0.5698402910)  # powers of its inverse: a Kronecker sequence in two extents


@dataclass(frozen=True)
class ProductFamily:
    """Points of one op.

    Attributes:
        texts: of its problems.
        share: of the calls' time that the family stands for; all points of a family share it evenly.
        regret: of an untuned call, before anything is known, as 190 tunes on an H100 showed it (2026-11-27); of
            unusual and packed weights it is assumed. The database's own ratios soon outweigh it.
    """

    op: str
    texts: Callable[[], Iterator[str]]
    share: float
    regret: float


def _draw(center: float, at: float, low: int, high: int, count: int) -> int:
    """A multiple of 64 in the middle of ``center``'s cell, at the place ``at`` from 0 to 1."""
    width = (high / low) ** (1 / (count - 1))
    drawn = 64 * round(center * width ** (_JITTER * (at - 0.5)) / 64)
    return int(min(high, max(low, drawn)))


TOKENS = (1, 4, 16, 64, 128, 256, 384, 512, 768, 1024, 2048, 8192)  # dense where defaults lose
FEW = 128  # tokens up to which products mostly read weights, and defaults are near the best
MANY = 1024  # tokens beyond which tiles fill several waves, and defaults are near the best again
LEAST_WEIGHT, LONGEST = 1024, 8  # the extents of a usual weight: each at least, and one over the other at most
TRAINING = 512  # tokens from which products of training, in the other layouts, matter
LAYOUTS = ("b_major=k", "", "a_major=m", "a_major=m b_major=k")  # y = x w', dx = dy w, dw = dy' x, and the fourth


FORMATS = ("", "code=e4m3 group=0 scale=fp32", "code=e4m3 scale_rows=128 scale=fp32")  # int4 by 128; FP8: rows, blocks
DECODED = (1, 2, 4, 8, 16, 32, 64, 256)  # tokens of products with packed weights


def _products(kinds: Sequence[str], tokens: Sequence[int], low: int, count: int) -> Iterator[tuple[str, int, int, int]]:
    """Kinds, tokens and ``count`` times ``count`` weights for each, drawn in their cells from ``low`` on."""
    high = 32768
    weights = [low * (high / low) ** (i / (count - 1)) for i in range(count)]
    for number, (kind, m, n, k) in enumerate(product(kinds, tokens, weights, weights), 1):
        n, k = (_draw(x, number * g % 1, low, high, count) for x, g in zip((n, k), _PLASTIC, strict=True))
        yield kind, m, n, k


def _gemm(layouts: Sequence[str], tokens: range, usual: bool | None = None) -> Iterator[str]:
    """``usual``: only weights as models have them, or only the others."""
    for layout, m, n, k in _products(LAYOUTS, TOKENS, 512, 8):
        if layout in layouts and m in tokens:
            common = min(n, k) >= LEAST_WEIGHT and max(n, k) <= LONGEST * min(n, k)
            if usual in (None, common):
                yield f"m={m} n={n} k={k} {layout}".strip()


def _packed_products() -> Iterator[str]:
    for kind, m, n, k in _products(FORMATS, DECODED, 1024, 6):
        yield f"m={m} n={n} k={k} {kind}".strip()


_HEADS = ((32, 8), (28, 4), (64, 8), (16, 16))
_MOST_TOKENS = 65536


def _attention() -> Iterator[str]:
    for batch, seq, (q, kv), dim, causal in product(
        (1, 4, 16), (512, 1024, 2048, 4096, 8192, 16384), _HEADS, (128, 64), (1, 0)
    ):
        if batch * seq <= _MOST_TOKENS:
            yield f"batch={batch} seq_q={seq} seq_kv={seq} heads_q={q} heads_kv={kv} head_dim={dim} causal={causal}"


def _decode() -> Iterator[str]:
    lengths = (512, 1024, 2048, 4096, 8192, 16384, 32768)
    for batch, keys, (q, kv), page in product((1, 4, 16, 64, 128), lengths, _HEADS, (0, 16)):
        if batch * keys <= 32 * _MOST_TOKENS:
            yield f"batch={batch} seq_kv={keys} heads_q={q} heads_kv={kv} page_size={page}"


def _norms() -> Iterator[str]:
    for rows, cols in product((1, 4, 16, 64, 256, 1024, 4096, 16384), (1024, 1536, 2560, 3584, 5120, 8192)):
        yield f"rows={rows} cols={cols}"


def _grouped_products() -> Iterator[str]:
    """Products up, with their gate, and down of experts with the intermediate size ``n`` and the hidden size ``k``."""
    rows = (8, 32, 128, 512, 2048, 8192, 32768)
    for experts, n, k, r in product((8, 32, 128), (768, 2048, 6144), (2048, 4096, 7168), rows):
        yield f"rows={r} n={n} k={k} experts={experts} activation=silu_mul"
        yield f"rows={r} n={k} k={n} experts={experts}"


FAMILIES = (
    ProductFamily("gemm", partial(_gemm, LAYOUTS[:1], range(FEW + 1)), 0.15, 0.003),
    ProductFamily("gemm", partial(_gemm, LAYOUTS[:1], range(FEW + 1, MANY + 1), usual=True), 0.15, 0.039),
    ProductFamily("gemm", partial(_gemm, LAYOUTS[:1], range(FEW + 1, MANY + 1), usual=False), 0.05, 0.038),
    ProductFamily("gemm", partial(_gemm, LAYOUTS[:1], range(MANY + 1, TOKENS[-1] + 1)), 0.05, 0.005),
    ProductFamily("gemm", partial(_gemm, LAYOUTS[1:], range(TRAINING, TOKENS[-1] + 1)), 0.1, 0.026),
    ProductFamily("attention", _attention, 0.15, 0.025),
    ProductFamily("decode_attention", _decode, 0.1, 0.009),
    ProductFamily("rms_norm", _norms, 0.05, 0.026),
    ProductFamily("add_rms_norm", _norms, 0.05, 0.012),
    ProductFamily("grouped_gemm", _grouped_products, 0.05, 0.022),
    ProductFamily("quantized_linear", _packed_products, 0.1, 0.06),
)


_Measured = Mapping[tuple[object, ...], Sequence[tuple[object, float]]]


@dataclass(frozen=True)
class GridPlan:
    """The grid's tasks in order. ``removed``: of each, the expected regret that it takes away, weighted by its share.

    ``known`` of all points have a measured winner, and ``regret`` is expected of a call before the first task.
    """

    job: Job
    removed: tuple[float, ...]
    known: int
    regret: float

    def __str__(self) -> str:
        left = max(0.0, self.regret - sum(self.removed))
        return (
            f"{self.job.name}: {self.known} points have a measured winner; expected regret of a call "
            f"{self.regret:.1%}, and {left:.1%} after these {len(self.job.tasks)}"
        )


@cache
def points(family: ProductFamily) -> tuple[Task, ...]:
    """A family's points, each its own bucket."""
    op = registry.get(family.op)
    problems = dict.fromkeys(op.Problem.parse(text).bucket() for text in family.texts())
    return tuple(Task(op, problem, TRIALS) for problem in problems)


def plan(
    known: Snapshot,
    gpu: GpuSpec | None = None,
    *,
    op: str | None = None,
    shard: str | None = None,
    trials: int | None = None,
    budget_s: float | None = None,
    gpus: int = 1,
    families: Sequence[ProductFamily] = (),
    name: str = NAME,
) -> GridPlan:
    """The grid's next tasks.

    Args:
        known: winners that calls use now.
        gpu: whose rules decide which of them calls take; None to take all.
        op: only this op's.
        shard: only the I-th of N equal parts, ``"I/N"``, whatever is known.
        budget_s: only as many as ``gpus`` GPUs with eight lanes each may begin in this time.
        families: in place of :data:`FAMILIES`.
        name: of the job.

    Raises:
        JobError: no family is of ``op``, or ``shard`` or ``trials`` is none.
    """
    wanted = [f for f in families or FAMILIES if op in (None, f.op)]
    if not wanted:
        names = ", ".join(dict.fromkeys(f.op for f in families or FAMILIES))
        raise JobError(f"the {name} has no points of an op {str(op)[:60]!r}; it has some of {names}")
    attempts = TRIALS if trials is None else checked_trials(trials, "trials")
    found: list[tuple[float, float, Task]] = []
    count, regret = 0, 0.0
    whole = sum(f.share for f in wanted)
    for family in wanted:
        tasks = tuple(replace(task, trials=attempts) for task in points(family))
        if shard is not None:
            tasks = shards.part(Job(name, tasks), shard).tasks
        if tasks:
            order, expected, has = _order(family, tasks, _with_winners(family, known, gpu))
            weight = family.share / whole / len(tasks)
            found += [(removed * weight, cost, task) for removed, cost, task in order]
            regret += expected * weight
            count += has
    # Each family's order stands; between families the gains for a second are merged.
    found.sort(key=lambda row: -row[0] / row[1])
    if budget_s is not None:
        costs, spent, most = [cost for _, cost, _ in found], 0.0, 0
        while most < len(costs) and spent < budget_s * LANES * gpus:
            spent, most = spent + costs[most], most + 1
        found = found[:most]
    job = Job(name, tuple(task for _, _, task in found), ranked=True)
    return GridPlan(job, tuple(removed for removed, _, _ in found), count, regret)


def _order(
    family: ProductFamily, tasks: Sequence[Task], rows: _Measured
) -> tuple[list[tuple[float, float, Task]], float, int]:
    """Gain and cost of each task, in the greedy order, but for those known; the regret before; how many these."""
    near = [_near(task, rows) for task in tasks]
    defaults = [_default_regret(family, n) for n in near]  # of the default at each point
    away = [min((d for d, _ in n), default=math.inf) for n in near]  # octaves to the nearest measured one
    expected = [_regret(d, worst) for d, worst in zip(away, defaults, strict=True)]
    before, has = sum(expected), sum(d == 0 for d in away)
    neighbours = _neighbours(tasks)

    def removed(i: int) -> float:
        return sum(max(0.0, expected[j] - _regret(d, defaults[j])) for j, d in neighbours[i])

    costs = [shards.expected_s(task) for task in tasks]
    # Values only shrink as tasks are taken, so a task whose fresh value still leads the heap is the best one.
    heap = [(-removed(i) / costs[i], i) for i, d in enumerate(away) if d > 0]
    heapq.heapify(heap)
    order = []
    while heap:
        _, i = heapq.heappop(heap)
        fresh = removed(i)
        if heap and -fresh / costs[i] > heap[0][0]:
            heapq.heappush(heap, (-fresh / costs[i], i))
            continue
        for j, d in neighbours[i]:
            expected[j] = min(expected[j], _regret(d, defaults[j]))
        order.append((fresh, costs[i], tasks[i]))
    return order, before, has


def _regret(distance: float, default: float) -> float:
    """Regret of a call whose nearest winner is so many octaves away; ``default``: the default's regret there."""
    return default * min(1.0, distance / MAX_OCTAVES)


def _with_winners(
    family: ProductFamily, known: Snapshot, gpu: GpuSpec | None
) -> dict[tuple[object, ...], list[tuple[object, float]]]:
    """Problems with a measured winner by their static fields, each with the regret of its default."""
    op = registry.get(family.op)
    found: dict[tuple[object, ...], list[tuple[object, float]]] = {}
    for text, winner in known.of(op.name, op.revisions).items():
        if winner.origin != "measured":
            continue
        try:
            problem = op.Problem.parse(text)
        except UnsupportedProblem:
            continue  # stored before a field changed
        stored = winner.config, winner.revision, winner.problem, winner.median_us
        if gpu is not None and isinstance(adopt(op, problem, gpu, *stored), str):
            continue  # stored before a rule changed
        found.setdefault(problem.static(), []).append((problem, max(0.0, (winner.ratio or 1.0) - 1)))
    return found


def _near(task: Task, rows: _Measured) -> list[tuple[float, float]]:
    """Distance and default's regret of the measured problems within reach of a task's, its own among them."""
    same = rows.get(task.problem.static(), ())
    distances = ((octaves(task.problem, problem), regret) for problem, regret in same)  # type: ignore[arg-type]
    return [(d, regret) for d, regret in distances if d <= 2 * MAX_OCTAVES]


def _default_regret(family: ProductFamily, near: Sequence[tuple[float, float]]) -> float:
    """The default's regret at a point: the prior, and what neighbours measured, nearer ones counting more."""
    weights = [math.exp(-d / MAX_OCTAVES) for d, _ in near]
    seen = sum(w * regret for w, (_, regret) in zip(weights, near, strict=True))
    return (_PRIOR * family.regret + seen) / (_PRIOR + sum(weights))


def _neighbours(tasks: Sequence[Task]) -> list[list[tuple[int, float]]]:
    """For each task those whose calls its winner may serve, with their distance; itself is one."""
    places: dict[tuple[object, ...], list[tuple[int, tuple[float, ...]]]] = {}
    for i, task in enumerate(tasks):
        place = tuple(math.log2(extent or 0.5) for extent in task.problem.extents())
        places.setdefault(task.problem.static(), []).append((i, place))
    found: list[list[tuple[int, float]]] = [[] for _ in tasks]
    for group in places.values():
        group.sort(key=lambda entry: entry[1])  # so that a task's neighbours lie within a window
        for at, (i, place) in enumerate(group):
            for j, other in group[at:]:
                if other[0] - place[0] >= MAX_OCTAVES:
                    break
                distance = sum(abs(a - b) for a, b in zip(place, other, strict=True))
                if distance < MAX_OCTAVES:
                    found[i].append((j, distance))
                    if i != j:
                        found[j].append((i, distance))
    return found


def refuse_absent(spec: GpuSpec) -> None:
    """Raises JobError where the GPU is not in this machine: a grid is of measurements."""
    from cutekernels import gpu as gpus

    if not gpus.present(spec):
        raise JobError(f"tune grid measures: run it on a machine with the {spec.name}; --list shows its order anywhere")
