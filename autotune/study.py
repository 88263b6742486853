"""The search of one task as an Optuna study: which config to try next, and when to end.

Every proposal comes from ``study.ask``; seeds are enqueued trials. A proposal that breaks a rule is told ``FAIL``
before anything compiles, and one that was tried before is told the value that it has. Where studies are stored, and how
they follow the database's rows, is in ``studies.py``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import optuna
from optuna.trial import Trial, TrialState, create_trial

from cutekernels.autotune.samplers import Valid
from cutekernels.autotune.space import Space

IMPROVEMENT = 0.005  # of the best value: a smaller one does not prolong a search
PATIENCE = 12  # attempts in a row without an improvement that end a search
MOST_REPEATS = 256  # proposals in a row that bring nothing new: the sampler has no more to say


@dataclass(frozen=True)
class Attempt:
    """A config's outcome. ``value``: its time over the default's, None without a time; ``row``: its row's id."""

    value: float | None
    status: str = "ok"
    row: str = ""

    @property
    def state(self) -> TrialState:
        """Optuna's word for it."""
        if self.value is not None:
            return TrialState.COMPLETE
        return TrialState.PRUNED if self.status == "pruned" else TrialState.FAIL

    @property
    def attributes(self) -> dict[str, str]:
        """User attributes of the attempt's trial."""
        return {"status": self.status} | ({"row": self.row} if self.row else {})


class Study:
    """Configs of ``space``, each given out once.

    Args:
        study: Optuna's.
        sampler: draws what follows the seeds.
        seeds: configs to try first, in this order.
        known: attempts of earlier runs, the oldest first, which the study has as trials.
    """

    def __init__(
        self, study: optuna.Study, sampler: Valid, space: Space, seeds: Iterable[Any], known: Mapping[Any, Attempt]
    ) -> None:
        self._study, self._sampler, self._space = study, sampler, space
        self._study.sampler = sampler
        self._known = {config: attempt for config, attempt in known.items() if config in space.params}
        self._asked: dict[Any, Trial] = {}
        self._seeds = [config for config in dict.fromkeys(seeds) if config not in self._known]
        self._exhausted = self._enqueued = False

    @property
    def untried(self) -> int:
        """Valid configs neither given out nor observed."""
        return len(self._space.valid) - len(self._known) - len(self._asked)

    @property
    def seeded(self) -> bool:
        """Whether every seed was given out."""
        return all(config in self._known or config in self._asked for config in self._seeds)

    def converged(self) -> bool:
        """Whether the latest attempts improved on nothing, or the sampler has nothing new."""
        if not self.untried or self._exhausted:
            return True
        return self.seeded and since_improved(attempt.value for attempt in self._known.values()) >= PATIENCE

    def next(self) -> Any | None:
        """A valid config not given out before; None where the sampler has none, as when all are given out."""
        if not self._enqueued:
            self._enqueued = True
            for config in self._seeds:
                self._study.enqueue_trial(self._space.params[config])
        for _ in range(MOST_REPEATS if self.untried else 0):
            trial = self._study.ask()
            config = self._config_of(trial)
            if config is None:
                self._tell(trial, Attempt(None, "invalid"))
            elif config in self._asked:
                self._tell(trial, Attempt(None, "in work"))
            elif config in self._known:
                self._tell(trial, self._known[config], repeats=True)
            else:
                self._asked[config] = trial
                return config
        self._exhausted = not self._asked
        return None

    def observe(self, config: Any, attempt: Attempt) -> None:
        """Record what became of a config that was given out, or of one that was measured once more."""
        self._known[config] = attempt
        trial = self._asked.pop(config, None)
        if trial is None:
            add(self._study, self._space, config, attempt)
        else:
            self._tell(trial, attempt)

    def close(self) -> None:
        """End the trials that were given out and came to nothing, and those that nobody asked for."""
        for trial in self._asked.values():
            self._tell(trial, Attempt(None, "interrupted"))
        self._asked.clear()
        abandon(self._study)

    def _config_of(self, trial: Trial) -> Any | None:
        """The config of a trial's parameters; None where no valid one has them."""
        node = self._space.tree
        while isinstance(node, dict):
            ((name, _), *_) = node
            self._sampler.allowed = [value for _, value in node]
            value = trial.suggest_categorical(name, self._space.distributions[name].choices)
            node = node.get((name, value))
        return node

    def _tell(self, trial: Trial, attempt: Attempt, *, repeats: bool = False) -> None:
        for name, value in attempt.attributes.items():
            trial.set_user_attr("repeats" if repeats and name == "row" else name, value)
        self._study.tell(trial, attempt.value, state=attempt.state)


def since_improved(values: Iterable[float | None]) -> int:
    """How many values have come since the last one that improved on those before it."""
    best, since = float("inf"), 0
    for value in values:
        since = 0 if value is not None and value < best * (1 - IMPROVEMENT) else since + 1
        best = best if value is None else min(best, value)
    return since


def add(study: optuna.Study, space: Space, config: Any, attempt: Attempt) -> None:
    """A finished trial that nobody asked the study for; one of a config outside the space has no parameters."""
    params = space.params.get(config, {})
    study.add_trial(
        create_trial(
            state=attempt.state,
            value=attempt.value,
            params=params,
            distributions={name: space.distributions[name] for name in params},
            user_attrs=attempt.attributes,
        )
    )


def abandon(study: optuna.Study) -> None:
    """End trials that are waiting or running: whoever was at them is gone."""
    for trial in study.get_trials(deepcopy=False, states=(TrialState.WAITING, TrialState.RUNNING)):
        study._storage.set_trial_state_values(trial._trial_id, TrialState.FAIL)
