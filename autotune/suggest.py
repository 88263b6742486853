"""The next config to try, out of the valid ones: never one that was tried or that breaks a rule.

Optuna keeps the study, its trials, ``ask`` and ``tell``; the sampler is ours, because Optuna's know knobs and no rules:
on ``gemm`` none of their proposals was valid. :class:`ListSampler` takes them from the list of valid configs in the
order of a :class:`~cutekernels.autotune.chooser.Chooser`. The study lives in memory; trials of earlier runs are
observed like those of this one, so a resumed search keeps what it had learned.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import optuna

from cutekernels.autotune.chooser import Chooser, spread
from cutekernels.gpu import GpuSpec
from cutekernels.op import Config, Op, Problem

MODEL_SEEDS = 8  # the best configs by the op's own model, of different shapes, are tried first


def is_shape(knob: str) -> bool:
    """Whether a knob belongs to the shape of a tile, over which seeds are spread."""
    return knob.startswith(("tile", "block"))


class ListSampler(optuna.samplers.BaseSampler):
    """Samples from a list: the relative search space is the whole space, and each sample a row of ``chooser``."""

    def __init__(self, valid: Sequence[Config], chooser: Chooser, distributions: dict[str, Any]) -> None:
        self._valid, self._chooser, self._distributions = valid, chooser, distributions

    def infer_relative_search_space(self, study: Any, trial: Any) -> dict[str, Any]:
        return self._distributions

    def sample_relative(self, study: Any, trial: Any, search_space: dict[str, Any]) -> dict[str, Any]:
        row = self._chooser.next()
        assert row is not None, "next() looks first"
        return {name: getattr(self._valid[row], name) for name in search_space}

    def sample_independent(self, study: Any, trial: Any, param_name: str, param_distribution: Any) -> Any:
        raise NotImplementedError("all knobs are sampled together")


@dataclass(frozen=True)
class Space:
    """What a task may try: the configs that ``why_not`` accepts, and the model's time of each."""

    valid: tuple[Config, ...]
    estimates_us: tuple[float, ...]

    def only(self, configs: Iterable[Config]) -> Space:
        """The same space with no other configs than these."""
        wanted = set(configs)
        kept = [i for i, c in enumerate(self.valid) if c in wanted]
        return Space(tuple(self.valid[i] for i in kept), tuple(self.estimates_us[i] for i in kept))

    def openers(self, first: Iterable[Config]) -> list[Config]:
        """The configs that a search begins with: ``first``, those that are valid, then the model's of many shapes."""
        if not self.valid:
            return []
        knobs, shapes = _described(self.valid)
        known = set(self.valid)
        rows = spread(knobs, shapes, self.estimates_us, MODEL_SEEDS)
        return list(dict.fromkeys([*(c for c in first if c in known), *(self.valid[row] for row in rows)]))


_enumerating = threading.Lock()


def space(op: Op[Any, Any], problem: Problem, gpu: GpuSpec) -> Space:
    """The space of one task, which takes up to seconds. The lock keeps two lanes from enumerating one space twice."""
    with _enumerating:
        return _space(op, problem, gpu)


@lru_cache(8)
def _space(op: Op[Any, Any], problem: Problem, gpu: GpuSpec) -> Space:
    valid = tuple(op.valid(problem, gpu))
    return Space(valid, tuple(op.estimate_us(problem, c, gpu) for c in valid))


def _described(valid: Sequence[Config]) -> tuple[list[tuple[Any, ...]], list[int]]:
    """The knobs of each config, and which of them belong to the shape of a tile."""
    names = list(valid[0].space()) if valid else []
    return [tuple(getattr(c, name) for name in names) for c in valid], [i for i, n in enumerate(names) if is_shape(n)]


class Suggester:
    """Candidates from ``valid``, the configs that ``why_not`` accepts, in the space's fixed order.

    Args:
        estimates_us: the op's own model's times, one for each valid config.
        seeds: configs to try before the model's; those that are not valid here are left out.
    """

    def __init__(
        self, kind: type[Config], valid: Sequence[Config], estimates_us: Sequence[float], seeds: Iterable[Config]
    ) -> None:
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._kind = kind
        self._rows = {config: row for row, config in enumerate(valid)}
        knobs, shapes = _described(valid)
        named = [self._rows[c] for c in seeds if c in self._rows]
        self._chooser = Chooser(knobs, estimates_us, [*named, *spread(knobs, shapes, estimates_us, MODEL_SEEDS)])
        self._distributions: dict[str, Any] = {
            name: optuna.distributions.CategoricalDistribution(vs) for name, vs in kind.space().items()
        }
        self._study = optuna.create_study(sampler=ListSampler(valid, self._chooser, self._distributions))
        self._asked: dict[Config, Any] = {}

    @property
    def untried(self) -> int:
        """Valid configs neither given out nor observed."""
        return self._chooser.untried

    def converged(self) -> bool:
        """Whether nothing untried is expected to gain half a percent."""
        return self._chooser.converged()

    def observe(self, config: Config, value: float | None) -> None:
        """Record a result: ``value`` is minimised; None for a config that gave no time."""
        if config in self._rows:
            self._chooser.observe(self._rows[config], value)
        state = optuna.trial.TrialState.PRUNED if value is None else optuna.trial.TrialState.COMPLETE
        trial = self._asked.pop(config, None)
        if trial is not None:
            self._study.tell(trial, value, state=state)
            return
        params = {name: getattr(config, name) for name in self._distributions}
        made = optuna.trial.create_trial(state=state, value=value, params=params, distributions=self._distributions)
        self._study.add_trial(made)

    def next(self) -> Config | None:
        """A valid config not given out before; None when there is none left."""
        if not self.untried:
            return None
        trial = self._study.ask(self._distributions)
        config = self._kind(**trial.params)
        self._asked[config] = trial
        return config
