"""The timer of the tuner and the benchmarks: device time per launch.

How a time is measured, and the reason for each step:

* A candidate is a list of no-argument launches, one per *input set*. Sets rotate, and :func:`l2_rotation` gives the
  number for which an input has left the L2 cache before it is read again (a 26 MB weight otherwise stays there, and
  the cache's speed is measured). One set alone measures a *warm* L2.
* The launches are captured in a CUDA graph that is replayed whole: no launch gaps, no Python. A graph holds enough
  launches to run ``least_us``; an untimed replay before it hides the latency of starting the graph and leaves the
  caches in the state that the timed one leaves.
* Candidates take turns, in a new random order each round, so that drift of clocks and temperature affects all alike; a
  comparison is paired by round: :meth:`Samples.ratio` is the median of per-round ratios with a bootstrap interval.
* The caller chooses the inputs' values: random, never zeros (zeros run up to 15 % faster).

Statistics and scheduling are plain Python over a :class:`Round`; only :class:`GraphRound` touches a GPU, and torch is
imported there. Correctness of results is judged in ``verify.py``.
"""

from __future__ import annotations

import gc
import math
import random
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from statistics import median
from typing import Any, Protocol

Launch = Callable[[], object]

L2_FACTOR = 3  # rotated bytes over L2 bytes: replacement is not strictly least-recently-used
MOST_SETS = 512  # limit for tiny inputs, whose rotation would take too long to set up
LEAST_ROUNDS = 5  # rounds before a candidate or the run may stop, whatever the budget
_RACE_MARGIN = 0.97  # a contender stops early when the upper end of its ratio's interval is below this
_RACE_EVERY = 5  # rounds between verdicts: a bootstrap costs as much as a round
_LEAD_BELOW_US = 5000.0  # longer replays need no untimed one: starting a graph takes a few µs
_MOST_LAUNCHES = 8192  # in one graph
_RESAMPLES = 1000


# ---- statistics ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Ratio:
    """A speed-up and its confidence interval, of 95 % where nothing else is said."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"


@dataclass(frozen=True)
class Samples:
    """Device time of one launch in µs, one sample per round."""

    us: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.us:
            raise ValueError("Samples needs at least one round; got none")

    @cached_property
    def median(self) -> float:
        return median(self.us)

    @cached_property
    def p20(self) -> float:
        return self.quantile(0.2)

    @cached_property
    def p80(self) -> float:
        return self.quantile(0.8)

    def ratio(self, other: Samples, confidence: float = 0.95) -> Ratio:
        """``time(other) / time(self)``: above 1, ``self`` is the faster one.

        The samples must come from one :func:`time_interleaved`: sample ``i`` of both is the same round. Where one
        of them left the race early, the rounds they shared count. The interval is a percentile bootstrap over
        rounds, with a fixed seed: the same samples always give the same verdict.
        """
        ratios = sorted(theirs / mine for mine, theirs in zip(self.us, other.us, strict=False))
        medians = sorted((ratios[a] + ratios[b]) / 2 for a, b in _middles(len(ratios)))
        tail = (1 - confidence) / 2
        return Ratio(median(ratios), quantile(medians, tail), quantile(medians, 1 - tail))

    def quantile(self, q: float) -> float:
        """The time below which a share ``q`` of the samples lies."""
        return quantile(sorted(self.us), q)


@cache
def _middles(count: int) -> tuple[tuple[int, int], ...]:
    """Resamples of ``count`` sorted numbers: the ranks of the two in the middle of each."""
    draw = random.Random(0)
    ranks = (sorted(draw.choices(range(count), k=count)) for _ in range(_RESAMPLES))
    return tuple((r[(count - 1) // 2], r[count // 2]) for r in ranks)


def quantile(ordered: Sequence[float], q: float) -> float:
    """The value below which a share ``q`` of the ``ordered`` ones lies, between two of them by a line."""
    position = q * (len(ordered) - 1)
    below = math.floor(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


# ---- scheduling ------------------------------------------------------------------------------------------


def l2_rotation(set_bytes: int, l2_bytes: int) -> int:
    """Number of input sets of ``set_bytes`` (inputs and outputs) that keeps the L2 cache cold.

    Their bytes are at least three times the L2, up to 512 sets: below ``3 * l2_bytes / 512`` per set (350 KB on an
    H200) inputs are partly cached, as such small ones are in practice.
    """
    if set_bytes <= 0:
        return 1
    return max(1, min(MOST_SETS, math.ceil(L2_FACTOR * l2_bytes / set_bytes)))


class Round(Protocol):
    """A prepared candidate: each call runs ``launches`` launches and returns the µs of one."""

    launches: int

    def __call__(self) -> float: ...


MakeRound = Callable[[Sequence[Launch], float], Round]


def time_interleaved(
    candidates: Mapping[str, Sequence[Launch] | Round],
    *,
    rounds: int = 20,
    least_us: float = 200.0,
    budget_us: float | None = None,
    race: Sequence[str] = (),
    rest_s: float = 0.0,
    duty: float = 1.0,
    after_round: Callable[[], object] | None = None,
    seed: int = 0,
    prepare: MakeRound | None = None,
) -> dict[str, Samples]:
    """Device time per launch of each candidate, measured in interleaved rounds.

    Args:
        candidates: by name, one launch per rotated input set; or a :class:`Round` prepared before.
        rounds: samples per candidate.
        least_us: least duration of one replay; short kernels are repeated inside the graph.
        budget_us: stop after this much timed device time, all candidates together, but not before five rounds.
        race: names of a leader and of its contenders. A contender that is clearly slower than the leader (the upper
            end of its interval below 0.97) stops early and has fewer samples; without any left, all stop.
        rest_s: idle time before each sample: 0 measures sustained load, where power throttles heavy kernels; 0.05
            a short burst at full clock. docs/notes/trunk.md#rest (H200, 2026-11-21).
        duty: share of the time that the device is busy: 0.5 rests before a sample for as long as the last one took.
        after_round: called after each round, before the next one's work.
        seed: for the order of candidates within a round.
        prepare: makes a :class:`Round` of launches; :class:`GraphRound` except in tests.

    Returns:
        :class:`Samples` by name, in the order of ``candidates``.
    """
    if rounds < 1:
        raise ValueError(f"rounds must be at least 1; it is {rounds}")
    if not 0 < duty <= 1:
        raise ValueError(f"duty must be above 0 and at most 1; it is {duty}")
    for name in race:
        if name not in candidates:
            raise ValueError(f"race takes names of candidates ({', '.join(candidates)}); it holds {name!r}")
    contenders = set(race[1:])
    make = GraphRound if prepare is None else prepare
    ready: dict[str, Round] = {n: c if callable(c) else make(c, least_us) for n, c in candidates.items()}
    times: dict[str, list[float]] = {name: [] for name in ready}
    running = list(ready)
    order = random.Random(seed)
    spent_us = last_us = 0.0
    for done in range(1, rounds + 1):
        order.shuffle(running)
        for name in running:
            rest = rest_s + last_us * 1e-6 * (1 / duty - 1)
            if rest:
                time.sleep(rest)
            us = ready[name]()
            times[name].append(us)
            last_us = us * ready[name].launches
            spent_us += last_us
        if after_round is not None:
            after_round()
        if budget_us is not None and spent_us >= budget_us and done >= LEAST_ROUNDS:
            break
        if contenders and done % _RACE_EVERY == 0 and done < rounds:
            leader = Samples(tuple(times[race[0]]))
            lost = {n for n in contenders if Samples(tuple(times[n])).ratio(leader).high < _RACE_MARGIN}
            running = [n for n in running if n not in lost]
            contenders -= lost
            if not contenders:
                break
    return {name: Samples(tuple(us)) for name, us in times.items()}


# ---- the GPU ---------------------------------------------------------------------------------------------


class GraphRound:
    """Launches captured in a CUDA graph; each call replays it and returns the device µs of one launch.

    The launches run on torch's current stream, once before the capture (module loading and lazy initialisation
    are illegal inside it); their allocations live in the graph's own pool. Their results are kept until the capture
    ends, so that every launch writes to memory of its own: a result in reused memory would be overwritten in the L2
    cache and never reach DRAM.
    """

    def __init__(self, launches: Sequence[Launch], least_us: float = 200.0) -> None:
        import torch

        cuda: Any = torch.cuda  # torch's own annotations stop here
        if not launches:
            raise ValueError("a candidate has at least one launch; got none")
        self._kept = tuple(launches)  # the graph holds raw pointers: the tensors must outlive it
        self._stream = cuda.Stream()
        self._start = cuda.Event(enable_timing=True)
        self._end = cuda.Event(enable_timing=True)
        self._lead = True
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for launch in launches:
                launch()
        self._stream.synchronize()
        most = max(1, _MOST_LAUNCHES // len(launches))
        passes, replay_us = 1, self._captured_us(passes=1)
        # May take two passes: a short graph's time is mostly its start, so the first guess is too low.
        while replay_us < least_us / 2 and passes < most:
            passes = min(math.ceil(passes * least_us / max(replay_us, 1e-3)), most)
            replay_us = self._captured_us(passes)
        self._lead = replay_us < _LEAD_BELOW_US

    def _captured_us(self, passes: int) -> float:
        """Capture ``passes`` passes and return the duration of one replay."""
        self._capture(passes)
        self()  # the first replay uploads the graph
        return self() * self.launches

    def _capture(self, passes: int) -> None:
        import torch

        self.launches = passes * len(self._kept)
        graph = torch.cuda.CUDAGraph()
        # A collection during the capture might free a dead graph's memory, which is illegal inside one.
        collecting = gc.isenabled()
        gc.disable()
        try:
            with torch.cuda.graph(graph, stream=self._stream):
                results = [launch() for _ in range(passes) for launch in self._kept]
            del results
        finally:
            if collecting:
                gc.enable()
        self._graph: Any = graph

    def __call__(self) -> float:
        import torch

        with torch.cuda.stream(self._stream):
            if self._lead:
                self._graph.replay()
            self._start.record()
            self._graph.replay()
            self._end.record()
        self._end.synchronize()
        return float(self._start.elapsed_time(self._end)) * 1000 / self.launches


# ---- the host --------------------------------------------------------------------------------------------


def cpu_us_per_call(
    fn: Launch,
    *,
    calls: int = 200,
    rounds: int = 15,
    synchronize: Callable[[], object] | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> Samples:
    """Host time of one call in µs: a loop of ``calls``, the device drained before and after, outside the clock.

    ``calls`` stays well under the driver's queue depth (about 1000 launches), past which a call waits for the
    device and the number is the kernel's.
    """
    drain = _device_synchronize() if synchronize is None else synchronize
    for _ in range(10):
        fn()
    times = []
    for _ in range(rounds):
        drain()
        begin = clock()
        for _ in range(calls):
            fn()
        end = clock()
        times.append((end - begin) * 1e6 / calls)
    drain()
    return Samples(tuple(times))


def _device_synchronize() -> Callable[[], object]:
    torch = sys.modules.get("torch")  # a caller that never loaded it has nothing on a device
    if torch is not None and torch.cuda.is_available():
        return torch.cuda.synchronize  # type: ignore[no-any-return]
    return lambda: None
