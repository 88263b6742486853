"""The final round of a task: who enters, who is tied, who wins, and the certificate.

Finalists: the search's top three, every config whose interval overlaps the best's, and today's winners (this
database's, and the one that travels with the package). They are timed beside the default in two fresh processes, each
with inputs of its own.

A config is *tied* with the fastest unless the fastest is shown to be more than half a percent faster, at 95 % for all
comparisons of the final together. Of the tied, what serves today wins, else the default, else the first in text order:
so that a new measurement displaces a winner only where it beats it, and two runs choose alike.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from cutekernels.autotune.requests import Outcome
from cutekernels.conditions import Conditions
from cutekernels.db.storage.certificate import QUANTILES, Certificate
from cutekernels.db.storage.store import Trial
from cutekernels.measure import Samples
from cutekernels.op import Config

PROCESSES = 2
ROUNDS, BUDGET_US = 30, 1_000_000.0  # in each process
LEAST, MOST = 3, 8  # challengers from the search
EFFECT = 1.005  # a smaller speed-up crowns nobody
_ERROR = 0.05  # chance that a final of equals finds a difference


def challengers(known: Mapping[Config, Trial], default: Config, serving: Sequence[Config]) -> list[Config]:
    """The configs to time beside the default, the fastest of the search first."""
    ok = {c: t for c, t in known.items() if t.status == "ok" and t.ratio and c != default}
    best = sorted(ok, key=lambda c: (-(ok[c].ratio or 0.0), str(c)))
    floor = ok[best[0]].ratio_low or 0.0 if best else 0.0
    tied = [c for i, c in enumerate(best[:MOST]) if i < LEAST or (ok[c].ratio_high or 0.0) >= floor]
    return list(dict.fromkeys([*tied, *(c for c in serving if c in ok)]))


def pooled(processes: Sequence[Mapping[str, Outcome]]) -> dict[str, Outcome]:
    """The outcomes of all processes as one: wrong where one was, rounds behind each other.

    A config that is right has as many rounds of each process as the others, so that samples of one index are of the
    same round, which :meth:`Samples.ratio` needs.
    """
    found = {}
    for name in [n for n in processes[0] if all(n in outcomes for outcomes in processes)]:
        each = [outcomes[name] for outcomes in processes]
        right = all(o.right for o in each)
        us = tuple(t for o in each for t in o.us) if right else ()
        found[name] = Outcome(max(o.error for o in each), us, each[-1].conditions)
    return found


@dataclass(frozen=True)
class Verdict:
    """The winner of a final, and all that are tied with the fastest, in text order."""

    winner: Config
    tied: tuple[Config, ...]


def decide(outcomes: Mapping[Config, Outcome], default: Config, serving: Sequence[Config]) -> Verdict:
    """The winner among the right outcomes, of which the default is one."""
    samples = {c: Samples(o.us) for c, o in outcomes.items() if o.right}
    assert default in samples
    confidence = 1 - _ERROR / max(1, len(samples) - 1)
    speed = {c: s.ratio(samples[default]).value for c, s in samples.items()}
    fastest = min(samples, key=lambda c: (-speed[c], str(c)))
    tied = [c for c, s in samples.items() if c == fastest or samples[fastest].ratio(s, confidence).low <= EFFECT]
    first = [c for c in (*serving, default) if c in tied]
    return Verdict(first[0] if first else min(tied, key=str), tuple(sorted(tied, key=str)))


def certificate(verdict: Verdict, outcomes: Mapping[Config, Outcome], default: Config) -> Certificate:
    """The evidence for the winner, as it is stored."""
    mine = outcomes[verdict.winner]
    return Certificate(
        default=str(default),
        tied=tuple(map(str, verdict.tied)),
        challengers=len(outcomes) - 1,
        processes=PROCESSES,
        quantiles_us=tuple(Samples(mine.us).quantile(q) for q in QUANTILES),
        **asdict(mine.conditions or Conditions()),
    )
