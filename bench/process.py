"""The order in which the tuner tried configs before Optuna's samplers did, for ``bench replay`` to compare them with.

Seeds, then the largest expected improvement of a Gaussian process over all valid configs. It is kept until sweeps of
whole spaces are recorded, which decide whether it comes back as a sampler of the study (``DECISIONS.md``).

A value is the logarithm of time over the default's time. The process models what the analytical model's estimate,
scaled to the values seen, leaves unexplained: its inputs are the knobs' positions in their lists of values, and one
coordinate for each value of a knob that is a name. A config being measured counts with its predicted value, so that
several are chosen at a time.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence

import numpy as np

from cutekernels.op import Scalar

LEAST_IMPROVEMENT = 0.005  # expected gain in log time below which nothing more is tried
LEAST_VALUES = 10  # before that the process has seen too little to say so
_NOISE = 0.01  # standard deviation of a value
_LENGTHS = (0.4, 0.8, 1.6)  # of the kernel, in knobs' ranges; the likeliest is taken
_PENALTY = 0.3  # in log time, above the worst: the value of a config that gave no time


class Chooser:
    """Positions in ``rows`` (the configs' knobs), each given out once.

    Args:
        estimates_us: the analytical model's times, one a row.
        first: positions to try first, in order.
    """

    def __init__(self, rows: Sequence[Sequence[Scalar]], estimates_us: Sequence[float], first: Iterable[int]) -> None:
        self._x = _features(rows)
        prior = np.log(np.maximum(np.asarray(estimates_us, dtype=float), 1e-9))
        self._prior = prior - prior.mean() if len(prior) else prior
        self._first = deque(first)
        self._values: dict[int, float | None] = {}
        self._given: set[int] = set()

    @property
    def untried(self) -> int:
        """Rows neither given out nor observed."""
        return len(self._x) - len(self._given)

    def observe(self, row: int, value: float | None) -> None:
        """Record a result: ``value`` is minimised; None for a config that gave no time."""
        self._given.add(row)
        self._values[row] = value

    def next(self) -> int | None:
        """A row not given out before; None when there is none left."""
        row = self._seed()
        if row is None and self.untried:
            row = int(self._improvement().argmax())
        if row is not None:
            self._given.add(row)
        return row

    def converged(self) -> bool:
        """Whether nothing untried is expected to gain :data:`LEAST_IMPROVEMENT`, or nothing is untried."""
        if not self.untried:
            return True
        seen = sum(value is not None for value in self._values.values())
        if seen < LEAST_VALUES or any(row not in self._given for row in self._first):
            return False
        return float(self._improvement().max()) < LEAST_IMPROVEMENT

    def _seed(self) -> int | None:
        while self._first:
            row = self._first.popleft()
            if row not in self._given:
                return row
        return None

    def _improvement(self) -> np.ndarray:
        """Expected improvement of each row over the best value; minus infinity for those given out."""
        times = [value for value in self._values.values() if value is not None]
        free = np.ones(len(self._x), dtype=bool)
        free[list(self._given)] = False
        if len(times) < 2:
            return np.where(free, -self._prior, -np.inf)
        worst = max(times) + _PENALTY
        seen = list(self._values)
        y = np.array([worst if (v := self._values[row]) is None else v for row in seen])
        # A line through (estimate, value), drawn towards slope 1, which the model claims.
        p = self._prior[seen]
        slope = (((p - p.mean()) * (y - y.mean())).sum() + 0.05) / (((p - p.mean()) ** 2).sum() + 0.05)
        slope = min(1.0, max(0.0, slope))
        trend = y.mean() + slope * (self._prior - p.mean())
        rest = y - trend[seen]
        variance = max(float(rest.var()), 4e-4)
        length = max(_LENGTHS, key=lambda s: _likelihood(_kernel(self._x[seen], self._x[seen], s), rest, variance))
        pending = [row for row in self._given if row not in self._values]
        known = self._x[seen]
        guessed, _ = _predict(self._x[pending], known, rest, length, variance)
        known = np.concatenate([known, self._x[pending]])
        mean, deviation = _predict(self._x, known, np.concatenate([rest, guessed]), length, variance)
        gain = min(times) - (trend + mean)
        z = gain / deviation
        density = np.exp(-0.5 * z * z) / math.sqrt(2 * math.pi)
        below = 0.5 * (1 + np.vectorize(math.erf)(z / math.sqrt(2)))
        return np.where(free, gain * below + deviation * density, -np.inf)


def _features(rows: Sequence[Sequence[Scalar]]) -> np.ndarray:
    columns = []
    for values in zip(*rows, strict=True):
        if any(isinstance(v, str) for v in values):
            names = sorted(set(map(str, values)))
            columns += [[float(str(v) == name) / math.sqrt(2) for v in values] for name in names if len(names) > 1]
        else:
            ranked = sorted({int(v) for v in values})
            size = max(1, len(ranked) - 1)
            if len(ranked) > 1:
                columns.append([ranked.index(int(v)) / size for v in values])
    return np.array(columns).T if columns else np.zeros((len(rows), 1))


def _kernel(a: np.ndarray, b: np.ndarray, length: float) -> np.ndarray:
    """Matérn 5/2."""
    squares = (a * a).sum(1)[:, None] + (b * b).sum(1)[None, :] - 2 * a @ b.T
    r = np.sqrt(5 * np.maximum(squares, 0.0)) / length
    return np.asarray((1 + r + r * r / 3) * np.exp(-r))


def _likelihood(k: np.ndarray, y: np.ndarray, variance: float) -> float:
    factor = np.linalg.cholesky(k * variance + np.eye(len(y)) * _NOISE**2)
    solved = np.linalg.solve(factor, y)
    return float(-0.5 * solved @ solved - np.log(np.diag(factor)).sum())


def _predict(
    x: np.ndarray, seen: np.ndarray, y: np.ndarray, length: float, variance: float
) -> tuple[np.ndarray, np.ndarray]:
    """Mean and standard deviation at each row of ``x``, after the values ``y`` at the rows ``seen``."""
    factor = np.linalg.cholesky(_kernel(seen, seen, length) * variance + np.eye(len(seen)) * _NOISE**2)
    across = np.linalg.solve(factor, _kernel(seen, x, length) * variance)
    mean = across.T @ np.linalg.solve(factor, y)
    left = np.maximum(variance - (across * across).sum(0), 1e-10)
    return mean, np.sqrt(left)
