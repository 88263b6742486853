"""The next config to try: seeds first, then Optuna's sampler; never one that was tried or that breaks a rule.

Optuna knows knobs, not rules: it proposes from the full product of values. A proposal that ``why_not`` refuses, or
that was tried already, is replaced by the *nearest* untried valid config, so each call gives a fresh candidate until
the valid space is exhausted. The study lives in memory and holds results only; trials of earlier runs are observed
like those of this one, so a resumed search keeps what it had learned.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

from cutekernels.op import Config, Scalar


class Suggester:
    """Candidates from ``valid``, the configs that ``why_not`` accepts, in the space's fixed order.

    Attributes:
        refused: proposals outside ``valid`` since the last :meth:`take_refused`, each once.
    """

    def __init__(self, kind: type[Config], valid: Sequence[Config], seeds: Iterable[Config], seed: int = 0) -> None:
        import optuna

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._optuna = optuna
        self._kind = kind
        self._space = kind.space()
        self._spread: dict[str, Any] = {
            name: optuna.distributions.CategoricalDistribution(vs) for name, vs in self._space.items()
        }
        self._untried: dict[Config, tuple[int, ...]] = {c: self._ranks(c) for c in valid}
        self._valid = frozenset(valid)
        self._seeds = deque(seeds)
        self._seen_refused: set[Config] = set()
        self._refused: list[Config] = []
        self._study: Any = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=seed))

    @property
    def untried(self) -> int:
        return len(self._untried)

    def observe(self, config: Config, value: float | None) -> None:
        """Record a result: ``value`` is minimised; None for a config that gave no time."""
        self._untried.pop(config, None)
        state = self._optuna.trial.TrialState
        self._study.add_trial(
            self._optuna.trial.create_trial(
                # A pruned trial without a value counts as worse than any with one.
                state=state.PRUNED if value is None else state.COMPLETE,
                value=value,
                params={name: getattr(config, name) for name in self._space},
                distributions=self._spread,
            )
        )

    def next(self) -> Config | None:
        """A valid config not given out before; None when there is none left."""
        while self._seeds:
            config = self._seeds.popleft()
            if config not in self._valid:
                self._refuse(config)
            elif self._untried.pop(config, None) is not None:
                return config
        if not self._untried:
            return None
        trial = self._study.ask(self._spread)
        # Marked as failed, which the sampler ignores: observe() adds the result of the config really measured.
        self._study.tell(trial, state=self._optuna.trial.TrialState.FAIL)
        proposal = self._kind(**trial.params)
        if proposal not in self._valid:
            self._refuse(proposal)
        config = proposal if proposal in self._untried else self._nearest(proposal)
        del self._untried[config]
        return config

    def take_refused(self) -> list[Config]:
        """Proposals that broke a rule since the last call."""
        refused, self._refused = self._refused, []
        return refused

    def _refuse(self, config: Config) -> None:
        if config not in self._seen_refused:
            self._seen_refused.add(config)
            self._refused.append(config)

    def _nearest(self, proposal: Config) -> Config:
        mine = self._ranks(proposal)
        sizes = [max(1, len(values) - 1) for values in self._space.values()]

        def distance(item: tuple[Config, tuple[int, ...]]) -> float:
            # 1 per differing knob, plus the distance between the values in the knob's list, as a fraction.
            return sum((a != b) + abs(a - b) / size for a, b, size in zip(mine, item[1], sizes, strict=True))

        return min(self._untried.items(), key=distance)[0]

    def _ranks(self, config: Config) -> tuple[int, ...]:
        return tuple(_rank(values, getattr(config, name)) for name, values in self._space.items())


def _rank(values: tuple[Scalar, ...], value: Scalar) -> int:
    return next(i for i, v in enumerate(values) if v == value and type(v) is type(value))
