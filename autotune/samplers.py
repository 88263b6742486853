"""Optuna's samplers by name, for a search among valid configs; one that cannot take the search's space is refused."""

from __future__ import annotations

import random
import warnings
from collections.abc import Collection, Sequence
from importlib.util import find_spec
from typing import Any

from optuna.exceptions import ExperimentalWarning
from optuna.samplers import (
    BaseSampler,
    GPSampler,
    NSGAIIISampler,
    NSGAIISampler,
    RandomSampler,
    TPESampler,
)

from cutekernels.errors import JobError, near

DEFAULT = "random"
MOST_DRAWS = 64  # of one parameter, for a value that the ones before it allow
KNOWN: dict[str, Any] = {
    "random": RandomSampler,
    "tpe": TPESampler,
    "gp": GPSampler,
    "nsgaii": NSGAIISampler,
    "nsgaiii": NSGAIIISampler,
}
_TAKEN_APART = ("gp", "nsgaii", "nsgaiii")  # they see the parameters that all trials have, and draw others by chance
_NUMBERS = "takes numbers alone, and a knob is a category"
_REFUSED = {"cmaes": _NUMBERS, "qmc": _NUMBERS, "bruteforce": "ends its study itself, which optimize() alone allows"}
_LIBRARIES = {"gp": "scipy"}  # which Optuna imports in the middle of a search


def checked(name: str) -> str:
    """The canonical form of a sampler's name. Raises JobError for one that no search can use."""
    short = name.lower().removesuffix("sampler").replace("-", "").replace("_", "")
    if short in _REFUSED:
        raise JobError(f"--sampler {short} {_REFUSED[short]}: use {DEFAULT} or tpe")
    if short not in KNOWN:
        raise JobError(
            f"no sampler {name[:40]!r} that a search could use. {near(short, KNOWN)}Known: {', '.join(KNOWN)}"
        )
    return short


def make(name: str, seed: int, branches: Sequence[Any]) -> Valid:
    """The sampler called ``name`` for a space of ``branches``. Raises JobError where it cannot take that space."""
    short = checked(name)
    if short in _TAKEN_APART and len(branches) > 1:
        raise JobError(
            f"--sampler {short} sees only parameters that all trials share, and each body has its own "
            f"({', '.join(map(str, branches))}): use {DEFAULT} or tpe"
        )
    library = _LIBRARIES.get(short)
    if library is not None and find_spec(library) is None:
        raise JobError(f"--sampler {short} needs {library}, which is not installed: pip install {library}, or use tpe")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ExperimentalWarning)
        return Valid(KNOWN[short](seed=seed), seed)


class Valid(BaseSampler):
    """A sampler of Optuna's that draws a parameter again while the value breaks a rule, then takes one that does not.

    ``allowed``: values of the next parameter that some valid config has, after those drawn so far; the study's walk
    keeps it. What a sampler draws for all parameters together stands as it is.
    """

    def __init__(self, inner: BaseSampler, seed: int = 0) -> None:
        self.inner = inner
        self._chance = random.Random(seed)
        self.allowed: Collection[Any] = ()

    def infer_relative_search_space(self, study: Any, trial: Any) -> dict[str, Any]:
        return self.inner.infer_relative_search_space(study, trial)

    def sample_relative(self, study: Any, trial: Any, search_space: dict[str, Any]) -> dict[str, Any]:
        return self.inner.sample_relative(study, trial, search_space)

    def sample_independent(self, study: Any, trial: Any, param_name: str, param_distribution: Any) -> Any:
        for _ in range(MOST_DRAWS):
            value = self.inner.sample_independent(study, trial, param_name, param_distribution)
            if value in self.allowed:
                return value
        # It is sure of a value that the ones before rule out: without this it would propose that for ever.
        return self._chance.choice(sorted(self.allowed, key=str)) if self.allowed else value

    def before_trial(self, study: Any, trial: Any) -> None:
        self.inner.before_trial(study, trial)

    def after_trial(self, study: Any, trial: Any, state: Any, values: Any) -> None:
        self.inner.after_trial(study, trial, state, values)
