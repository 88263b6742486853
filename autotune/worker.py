"""The measuring process: loads a compiled config, verifies it, times it. One problem at a time, one GPU.

It is a spawned :class:`~cutekernels.isolate.Child`, because a wrong candidate can hang or fault, which ruins the CUDA
context of its process. Requests are ``Warm``, ``Prepare``, ``Load`` and ``Measure``, in this order; each
carries everything needed, so a fresh process can answer in place of one that died. A candidate passes three checks:

1. its outputs are poisoned with NaN, launched into once, and compared with the op's reference (``verify.py``);
2. it is timed, interleaved with the others of the request, over input sets that keep the L2 cold (``measure.py``);
3. after its first timing the outputs are poisoned again and one timed round is repeated and compared, which catches a
   data race that a single launch does not show, or a launch that a graph captured wrongly.

After a failure the device is synchronized; where that fails too, the process exits, and the parent sees one death
rather than an error for each later candidate.
"""

from __future__ import annotations

import gc
import os
import sys
import traceback
from contextlib import suppress
from functools import partial
from importlib import import_module
from typing import Any

import torch

from cutekernels import compile as compiler
from cutekernels import gpu as gpus
from cutekernels.autotune.requests import VENDOR, Load, Measure, Outcome, Prepare, Warm
from cutekernels.conditions import Watch
from cutekernels.errors import UnknownGpu
from cutekernels.measure import GraphRound, Launch, l2_rotation, time_interleaved
from cutekernels.op import Config, Op, Problem
from cutekernels.ops import registry
from cutekernels.verify import Judge, poison

for _library in ("cutlass.cute", "triton"):  # while the process starts, so that no request waits for them
    with suppress(ImportError):  # told by the first kernel that needs it
        import_module(_library)

DEVICE_LOST = 70  # exit code: the CUDA context is unusable
RESTED = 0.5  # duty where arithmetic is the limit: docs/notes/trunk.md#rest (H200 and H100, 2026-11-25)
_MEMORY_SHARE = 0.5  # share of free memory for input sets; references and graphs need the rest


def answer(request: Warm | Prepare | Load | Measure) -> dict[str, Outcome] | None:
    """Entry point of the process: outcomes by config for :class:`Measure`, None for all else."""
    try:
        if isinstance(request, Measure):
            return _bench(request.prepare).measure(request)
        if isinstance(request, Load):
            _bench(request.measure.prepare).load(request.measure)
        elif isinstance(request, Prepare):
            _bench(request)
        else:
            torch.zeros(1, device="cuda").add_(1)
            torch.cuda.synchronize()
        return None
    except Exception:
        try:
            torch.cuda.synchronize()
        except Exception:  # noqa: BLE001  a sticky error: every later call in this process would fail with it
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(DEVICE_LOST)
        raise


_current: tuple[Prepare, _Bench] | None = None


def _bench(request: Prepare) -> _Bench:
    global _current
    if _current is None or _current[0] != request:
        _release()
        _current = (request, _Bench(request))
    return _current[1]


def _release() -> None:
    """Drop the previous problem's tensors and graphs before the next one's are made."""
    global _current
    _current = None
    gc.collect()
    torch.cuda.empty_cache()


class _Bench:
    """One problem's input sets, reference and prepared candidates."""

    def __init__(self, request: Prepare) -> None:
        spec = request.gpu
        if not gpus.present(spec):
            raise UnknownGpu(
                f"the job tunes for {spec.name}, the GPU here is {gpus.detect().name}: name it with --gpu auto"
            )
        gpus.act_as(spec)
        self.gpu = spec
        self.op: Op[Any, Any] = registry.get(request.op)
        self.problem: Problem = self.op.Problem.parse(request.problem)
        work = self.op.work(self.problem)
        # Seeds 1000 apart: the search and the final round share no input set.
        begin = request.seed * 1000
        args = self.op.sample(self.problem, "cuda", begin)
        first = self._with_outputs(args)
        set_bytes = sum(t.nbytes for part in first for t in part if isinstance(t, torch.Tensor))
        varied = self.op.variant(self.problem, args, begin)
        kept = sum(t.nbytes for t in args if isinstance(t, torch.Tensor) and any(t is v for v in varied or ()))
        room = int(torch.cuda.mem_get_info()[0] * _MEMORY_SHARE) // max(1, set_bytes - kept)
        kinds = self.op.sample_kinds
        wanted = l2_rotation(set_bytes if varied is None else min(set_bytes, int(work.bytes)), spec.l2_bytes)
        count = max(1, min(-(-wanted // kinds) * kinds, room + 1))
        others = (self._another(args, begin + i) for i in range(1, count))
        self.sets = [first, *map(self._with_outputs, others)]
        # A problem that accumulates in less than fp32 says so in a plain field called "accumulate".
        accumulate = getattr(self.problem, "accumulate", "fp32")
        expected = self.op.reference(self.problem, *first[1])
        self._duty = RESTED if work.by_arithmetic(spec) else 1.0
        self._judge = Judge(expected, work.flops, accumulate, work.depth, self.op.partial)
        self._rounds: dict[str, GraphRound] = {}
        self._errors: dict[str, float] = {}
        self._repeated: set[str] = set()  # configs that passed the third check
        self._vendor: GraphRound | None = None

    def _another(self, args: tuple[Any, ...], seed: int) -> tuple[Any, ...]:
        varied = self.op.variant(self.problem, args, seed)
        return self.op.sample(self.problem, "cuda", seed) if varied is None else varied

    def _with_outputs(self, args: tuple[Any, ...]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        return self.op.outputs(self.problem, *args), args

    def load(self, request: Measure) -> None:
        """The first check of configs that are new, and a graph of each right one; lets go of those not asked for."""
        self._rounds = {text: r for text, r in self._rounds.items() if text in request.configs}
        for text in request.configs:
            if text not in self._errors:
                self._first_check(text)
            elif self._errors[text] <= 1 and text not in self._rounds:
                self._rounds[text] = GraphRound(self._launches(self.op.Config.parse(text)))
        if request.final and self._vendor is None:
            self._vendor = self._vendor_round()

    def measure(self, request: Measure) -> dict[str, Outcome]:
        self.load(request)  # a no-op after Load; a fresh process may skip that request
        rounds = {text: self._rounds[text] for text in request.configs if text in self._rounds}
        race = request.race if all(text in rounds for text in request.race) else ()
        watch = Watch.current() if request.final else None
        timed_too = {VENDOR: self._vendor} if request.final and self._vendor is not None else {}
        samples = {}
        if rounds:
            samples = time_interleaved(
                rounds | timed_too, rounds=request.rounds, budget_us=request.budget_us, race=race,
                duty=self._duty if request.duty is None else request.duty,
                after_round=watch,
            )  # fmt: skip
        seen = watch.seen if watch else None
        for text in [text for text in rounds if text not in self._repeated]:
            poison(self.sets[0][0])
            torch.cuda.synchronize()  # a round has a stream of its own, which large fills would outlast
            rounds[text]()
            self._errors[text] = max(self._errors[text], self._error())
            self._repeated.add(text)
        found = {t: Outcome(self._errors[t], samples[t].us if t in samples else (), seen) for t in request.configs}
        return found | {name: Outcome(0.0, samples[name].us) for name in timed_too if name in samples}

    def _vendor_round(self) -> GraphRound | None:
        """The vendor's call, ready to be timed; None where the op has none or it fails: it decides nothing. None too of
        a stand-in, to whose instructions it would not keep.
        """
        call = None if self.gpu.confined_to else self.op.vendor(self.problem)
        if call is None:
            return None
        try:
            return GraphRound([partial(call, *outputs, *args) for outputs, args in self.sets])
        except RuntimeError as error:  # no kernel for these arguments, no memory left
            print(f"the vendor's call is left out: {error}", file=sys.stderr)
            return None

    def _first_check(self, text: str) -> None:
        """A single launch into poisoned outputs. Correct configs are captured for timing."""
        launches = self._launches(self.op.Config.parse(text))
        poison(self.sets[0][0])
        launches[0]()
        torch.cuda.synchronize()
        self._errors[text] = self._error()
        if self._errors[text] <= 1:
            self._rounds[text] = GraphRound(launches)

    def _launches(self, config: Config) -> list[Launch]:
        kernel = compiler.get(self.op, self.problem, config, self.gpu)
        launch = self.op.bind(self.problem, config, kernel)
        return [partial(launch, *outputs, *args) for outputs, args in self.sets]

    def _error(self) -> float:
        return self._judge.worst_error(self.sets[0][0])
