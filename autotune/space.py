"""The configs that a task may try, those that ``why_not`` accepts, as parameters of an Optuna study.

A parameter is a knob of one branch, ``warpgroup.tile_m``: ``body`` comes first, and each body has parameters of its
own, whose categories are the values that it takes in some valid config. A name has one distribution in a whole study.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

from optuna.distributions import CategoricalDistribution

from cutekernels.gpu import GpuSpec
from cutekernels.op import Op, Problem, Scalar

MODEL_SEEDS = 8  # the best configs by the op's own model, of different shapes, are tried first
_BRANCH = "body"  # the knob whose values have parameters of their own
_SHAPE = ("tile", "block")  # beginnings of the knobs over which the model's seeds are spread

Params = dict[str, Scalar]
Node = dict[tuple[str, Scalar], Any]
"""The next parameter's name and each value that is valid there -> the next node, or at last a config."""


@dataclass(frozen=True)
class Space:
    """``valid`` configs in the space's fixed order, ``values`` of their ``knobs``, and a ``model`` of their times."""

    valid: tuple[Any, ...]
    knobs: tuple[str, ...]
    values: tuple[tuple[Scalar, ...], ...]
    model: Callable[[Any], float]

    @cached_property
    def estimates_us(self) -> tuple[float, ...]:
        """The model's time of each config: most of a large space's seconds, so asked for where it is read; by two lanes
        at once, twice.
        """
        return tuple(map(self.model, self.valid))

    @cached_property
    def params(self) -> dict[Any, Params]:
        """The parameters of each config: its branch, where there are several, and the knobs that vary in it."""
        at = self.knobs.index(_BRANCH) if _BRANCH in self.knobs else None
        branches: dict[Scalar, list[int]] = {}
        for row, values in enumerate(self.values):
            branches.setdefault("" if at is None else values[at], []).append(row)
        found: dict[int, Params] = {}
        for branch, rows in branches.items():
            varied = [i for i in range(len(self.knobs)) if i != at and len({self.values[r][i] for r in rows}) > 1]
            names = [(f"{branch}.{self.knobs[i]}" if branch else self.knobs[i], i) for i in varied]
            for row in rows:
                first: Params = {_BRANCH: branch} if len(branches) > 1 else {}
                found[row] = first | {name: self.values[row][i] for name, i in names}
        return {config: found[row] for row, config in enumerate(self.valid)}

    @cached_property
    def distributions(self) -> dict[str, CategoricalDistribution]:
        values: dict[str, dict[Scalar, None]] = {}
        for params in self.params.values():
            for name, value in params.items():
                values.setdefault(name, {})[value] = None
        return {name: CategoricalDistribution(tuple(seen)) for name, seen in values.items()}

    @cached_property
    def tree(self) -> Any:
        """The valid configs, parameter by parameter: a :data:`Node`; a space of one config is that config."""
        root: Node = {}
        for config, params in self.params.items():
            if not params:
                return config
            *steps, last = params.items()
            node = root
            for step in steps:
                node = node.setdefault(step, {})
            node[last] = config
        return root

    @property
    def branches(self) -> list[Scalar]:
        """The values of the branching knob; empty where all configs have the same parameters."""
        return [value for name, value in self.tree if name == _BRANCH] if isinstance(self.tree, dict) else []

    def openers(self, first: Iterable[Any]) -> list[Any]:
        """The configs that a search begins with: ``first``, those that are valid, then the model's of many shapes."""
        return list(dict.fromkeys([*(c for c in first if c in self.params), *self._spread(MODEL_SEEDS)]))

    def _spread(self, count: int) -> list[Any]:
        """The ``count`` best by the model, each of another shape while there are shapes left, bodies in turn."""
        shape = [i for i, knob in enumerate(self.knobs) if knob.startswith(_SHAPE)]
        bodies: dict[tuple[Scalar, ...], dict[tuple[Scalar, ...], list[Any]]] = {}
        for row in sorted(range(len(self.valid)), key=lambda i: (self.estimates_us[i], i)):
            values = self.values[row]
            body = bodies.setdefault(tuple(v for v in values if isinstance(v, str)), {})
            body.setdefault(tuple(values[i] for i in shape), []).append(self.valid[row])
        found: list[Any] = []
        for depth in range(len(self.valid)):
            ranks = [[group[depth] for group in body.values() if depth < len(group)] for body in bodies.values()]
            for turn in range(max(map(len, ranks))):
                found += [rank[turn] for rank in ranks if turn < len(rank)]
            if len(found) >= count or not any(ranks):
                break
        return found[:count]


_enumerating = threading.Lock()


def space(op: Op[Any, Any], problem: Problem, gpu: GpuSpec) -> Space:
    """The space of one task, which takes up to seconds. The lock keeps two lanes from enumerating one space twice."""
    with _enumerating:
        return _space(op, problem, gpu)


@lru_cache(8)
def _space(op: Op[Any, Any], problem: Problem, gpu: GpuSpec) -> Space:
    valid, knobs = tuple(op.valid(problem, gpu)), tuple(op.Config.space())
    values = tuple(tuple(getattr(c, name) for name in knobs) for c in valid)
    return Space(valid, knobs, values, lambda c: op.estimate_us(problem, c, gpu))
