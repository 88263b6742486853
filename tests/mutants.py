"""Single-line bugs in central modules, each with the tests that should see it. Run by hand::

    python -m tests.mutants                   # the modules
    python -m tests.mutants final             # every bug of one, with the test that kills it
    python -m tests.mutants final dispatch:7,9  # and two of another

The tree is copied, a bug is put into the copy, and its module's tests run there until the first one fails, each time in
a fork of a process that has loaded the libraries and nothing of ours. Exit code 1 where a bug stays alive.
``tests/test_mutants.py`` sees that each bug's place is still in its file, once.
"""

from __future__ import annotations

import importlib
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
LIBRARIES = ("torch", "pytest", "sqlalchemy.dialects.sqlite", "alembic.command", "optuna", "typer.testing")
DEADLINE_S = 400


@dataclass(frozen=True)
class Module:
    """``bugs`` are (a text that the file holds once, what to write instead); ``tests`` run in this order."""

    file: str
    tests: tuple[str, ...]
    bugs: tuple[tuple[str, str], ...]


MODULES = {
    "dispatch": Module(
        "cutekernels/dispatch.py",
        (
            "tests/trunk/test_dispatch.py",
            "tests/db/test_serving.py",
            "tests/trunk/test_vendor.py",
            "tests/trunk/test_loop.py",
            "tests/trunk/test_rates.py",
        ),
        (
            ("MAX_OCTAVES = 1.5", "MAX_OCTAVES = 1.0"),
            ("MOST_TRIED = 4", "MOST_TRIED = 1"),
            ("MOST_BEHIND = 1.05", "MOST_BEHIND = 2.0"),
            ("    if forced is not None:\n        return _callers", "    if forced:\n        return _callers"),
            ("key = (op.name, p, device, None if forced", "key = (op.name, p, None, None if forced"),
            ("device, None if forced is None else str(forced))", "device, None)"),
            ('if choice.origin not in ("forced", "tuned"):', 'if choice.origin not in ("forced",):'),
            ("_missed[miss] = _missed.get(miss, 0) + 1", "_missed[miss] = 1"),
            ("op.revision, str(p.bucket())", "op.revision, str(p)"),
            ("if stamp == _watched:", "if stamp != _watched:"),
            ("        rates.forget()\n", ""),
            ("        _plans.clear()\n        _chosen", "        _chosen"),
            ('for name in (path, f"{path}-wal"):', "for name in (path,):"),
            ("    if known != before:\n", "    if known is not before:\n"),
            ('"tuned", "the bucket has only a prediction"', '"tuned", "nobody tuned the bucket"'),
            ('elif at_bucket.origin != "measured":', 'elif at_bucket.origin == "nothing":'),
            ("elif snapshots.may_serve(at_bucket.origin, at_bucket.reason):", "elif at_bucket.reason is not None:"),
            ("if isinstance(outcome, Choice) and outcome.config.vendors:", "if False:"),
            ("here / max(1.0, there)", "here"),
            ("if distance <= MAX_OCTAVES:", "if True:"),
            ("for distance, text, row in sorted(near, key=lambda n: n[:2]):", "for distance, text, row in near:"),
            ("if problem.static() == own.static() and problem != own:", "if problem.static() == own.static():"),
            ("        if not snapshots.may_serve(row.origin, row.reason):\n", "        if False:\n"),
            ("return math.log2(extent or 0.5)", "return math.log2(extent or 1)"),
            ("return op.why_not(p, config, gpu) or too_fast", "return too_fast"),
            ("floor_us(op, problem, gpu)) or config", "None) or config"),
            ("if known is not None and known[0] is table:", "if known is not None:"),
            ("_missed[miss] = _missed.get(miss, 0) + hits", "_missed[miss] = hits"),
            ('return Choice(op.check(p, config, gpu), "forced"', 'return Choice(config, "forced"'),
        ),
    ),
    "snapshot": Module(
        "db/storage/snapshot.py",
        ("tests/db/test_snapshot.py", "tests/db/test_untrusted.py", "tests/db/test_serving.py"),
        (
            ("WHERE winner.gpu = :gpu AND trial.status = 'ok'", "WHERE winner.gpu = :gpu"),
            ("WHERE winner.gpu = :gpu AND", "WHERE"),
            ("CASE trial.origin WHEN 'predicted' THEN trial.message ELSE '' END", "trial.message"),
            (
                "({str}, {int}, {str}, {str}, {str}, {float, type(None)},",
                "({str}, {int}, {str}, {str}, {str}, {float},",
            ),
            ("({str}, {int}, {str}, {str}, {str}", "({str}, {int}, {str, bytes}, {str}, {str}"),
            ("ELSE '' END, 'database'", "ELSE '' END, 'shipped'"),
            ("_held.get(gpu) or _held.setdefault(gpu, load(gpu))", "load(gpu)"),
            ("        _held.clear()\n", ""),
            ("        _held.update(known)\n", ""),
            ("if above is not row and _rank(row) > _rank(above):", "if above is not row:"),
            ("if above is not row and _rank(row) > _rank(above):", "if False:"),
            ('return origin == "measured", source', 'return origin == "", source'),
            ('return origin == "measured" or bool(reason)', "return True"),
            ("    if gpu_name_rule(gpu) is not None:", "    if False:"),
            ("if isinstance(trial, Trial) and trial.gpu.name != gpu:", "if False:"),
            ("            found.append(trial)\n", "            found.insert(0, trial)\n"),
            ("and sqlite.is_absent(path) and not named:", "and sqlite.is_absent(path):"),
            (" and 0 < value < math.inf", " and value < math.inf"),
            ("        and all(map(_from_0_up, columns[5:7]))\n", ""),
            ("        rows = [row for row in rows if _sound([row])]\n", ""),
            ("        and set(columns[4]) <= set(ORIGINS)\n", ""),
            ("        if not immutable or sqlite.stamp(path) == before:\n", "        if True:\n"),
            ("if version >= RATES_SINCE else []\n        except", "if False else []\n        except"),
            ("    if message in _said:\n        return\n", ""),
            ("    if not path.is_file():", "    if False:"),
            ("    if found not in READABLE:", "    if found is None:"),
            ('if "UTF-8" not in str(error):', "if True:"),
            ('return url.partition("://")[0] + "://..."', "return url"),
        ),
    ),
    "final": Module(
        "autotune/final.py",
        ("tests/tuner/test_final.py",),
        (
            ("confidence = 1 - _ERROR / max(1, len(samples) - 1)", "confidence = 1 - _ERROR"),
            ("_ERROR = 0.05", "_ERROR = 0.5"),
            ("EFFECT = 1.005", "EFFECT = 1.0"),
            ("EFFECT = 1.005", "EFFECT = 1.03"),
            ("LEAST, MOST = 3, 8", "LEAST, MOST = 2, 8"),
            ("LEAST, MOST = 3, 8", "LEAST, MOST = 3, 7"),
            ("LEAST, MOST = 3, 8", "LEAST, MOST = 3, 9"),
            ("PROCESSES = 2", "PROCESSES = 1"),
            ('if t.status == "ok" and t.ratio and c != default}', "if t.ratio and c != default}"),
            ('if t.status == "ok" and t.ratio and c != default}', 'if t.status == "ok" and t.ratio}'),
            ("key=lambda c: (-(ok[c].ratio or 0.0), str(c)))", "key=lambda c: ((ok[c].ratio or 0.0), str(c)))"),
            ("floor = ok[best[0]].ratio_low or 0.0", "floor = ok[best[0]].ratio or 0.0"),
            ("(ok[c].ratio_high or 0.0) >= floor]", "(ok[c].ratio or 0.0) >= floor]"),
            ("*(c for c in serving if c in ok)", ""),
            ("*(c for c in serving if c in ok)", "*serving"),
            ("right = all(o.right for o in each)", "right = any(o.right for o in each)"),
            ("Outcome(max(o.error for o in each), us", "Outcome(min(o.error for o in each), us"),
            ("each[-1].conditions)", "each[0].conditions)"),
            ("all(n in outcomes for outcomes in processes)", "True"),
            (
                "{c: Samples(o.us) for c, o in outcomes.items() if o.right}",
                "{c: Samples(o.us) for c, o in outcomes.items() if o.us}",
            ),
            (
                "fastest = min(samples, key=lambda c: (-speed[c], str(c)))",
                "fastest = min(samples, key=lambda c: (speed[c], str(c)))",
            ),
            (".ratio(s, confidence).low <= EFFECT]", ".ratio(s, confidence).high <= EFFECT]"),
            (".ratio(s, confidence).low <= EFFECT]", ".ratio(s, confidence).value <= EFFECT]"),
            ("for c in (*serving, default) if c in tied]", "for c in (default, *serving) if c in tied]"),
            ("for c in (*serving, default) if c in tied]", "for c in (*serving, default)]"),
            ("else min(tied, key=str), tuple", "else fastest, tuple"),
            ("mine = outcomes[verdict.winner]", "mine = outcomes[default]"),
            ("challengers=len(outcomes) - 1", "challengers=len(outcomes)"),
            ("tied=tuple(map(str, verdict.tied))", "tied=(str(verdict.winner),)"),
        ),
    ),
    "verify": Module(
        "cutekernels/verify.py",
        ("tests/trunk/test_verify.py",),
        (
            ("_ULPS = 1.5", "_ULPS = 0.4"),
            ("_ULPS = 1.5", "_ULPS = 6.0"),
            ("_FP32_ULPS = 16", "_FP32_ULPS = 1600000"),
            ("_K_STEP = 8 ", "_K_STEP = 1 "),
            ("_SIGMAS = 6.0", "_SIGMAS = 1.0"),
            ("_FALSE_ALARMS = 1e-6", "_FALSE_ALARMS = 0.5"),
            ('"fp16": 2.0**-10}', '"fp16": 2.0**-5}'),
            ("            out.fill_(math.nan)", "            out.fill_(0.0)"),
            ("out.fill_(torch.iinfo(out.dtype).min)", "out.fill_(0)"),
            ("_FALSE_ALARMS / (2 * max(1, draws))", "_FALSE_ALARMS / 2"),
            ("    if accumulate not in ACCUMULATE_EPS:", "    if not accumulate:"),
            ("steps = max(1.0, depth / _K_STEP)", "steps = depth / _K_STEP"),
            ('growth = steps if accumulate == "fp32" else 4 * math.sqrt(steps)', "growth = steps"),
            ("depth = flops / (2 * elements) if elements else 0.0", "depth = flops if elements else 0.0"),
            ("default=0.0)\n\n\nclass _Reference", "default=1.0)\n\n\nclass _Reference"),
            ("if actual.shape != expected.shape or actual.dtype", "if actual.dtype"),
            ("or actual.dtype != expected.dtype:", "and actual.dtype != expected.dtype:"),
            (".clamp_min(kind.smallest_normal)", ""),
            ("exponent - 1)", "exponent)"),
            (".clamp_min(self._typical)", ""),
            ("return 0.0 if torch.equal(ours, truth) else math.inf", "return 0.0"),
            ("same = (a == b) & a.isinf()", "same = a.isinf()"),
            ("(a.isnan() & b.isnan()) if self._partial", "b.isnan() if self._partial"),
            ("if self._partial else same, 0.0)", "if True else same, 0.0)"),
            ("nan=math.inf, posinf", "nan=0.0, posinf"),
            ("return b.square().masked_fill(~b.isfinite(), 0.0)", "return b.square()"),
            ("kept = keep and expected.numel() <= _KEPT", "kept = keep"),
        ),
    ),
    "op": Module(
        "cutekernels/op.py",
        ("tests/trunk/test_op.py", "tests/trunk/test_toy_op.py", "tests/db/test_shipped.py"),
        (
            ("MOST_EXTENT = 2**62", "MOST_EXTENT = 2**63"),
            ("    if extent <= 2:\n        return extent\n", ""),
            ("return octave * 3 // 4 if extent <= octave * 3 // 4 else octave", "return octave"),
            ("if extent <= octave * 3 // 4 else", "if extent < octave * 3 // 4 else"),
            ("return 1 << max(0, n - 1).bit_length()", "return 1 << n.bit_length()"),
            ("default=values[0] if added else MISSING", "default=values[0]"),
            ("{(type(v), v): v for v", "{(int, v): v for v"),
            (
                "if type(value) not in _SCALARS or (type(value), value) not in allowed:",
                "if value not in [v for _, v in allowed]:",
            ),
            ("if f.default is MISSING or value != f.default:", "if True:"),
            ('f"{f.name}={int(value) if isinstance(value, bool) else value}"', 'f"{f.name}={value}"'),
            ('if not eq or "," in raw:', 'if "," in raw:'),
            ("            if name in values:\n", "            if False:\n"),
            ("        if missing:\n", "        if False:\n"),
            ("(raw.isascii() and raw.isdigit()", "(raw.isdigit()"),
            ("and len(raw) <= len(str(MOST_EXTENT))):", "and len(raw) <= 18):"),
            ("and len(raw) <= len(str(MOST_EXTENT))):", "and len(raw) <= 30):"),
            ("if raw == str(int(value) if isinstance(value, bool) else value):", "if raw == str(value):"),
            ("if type(value) is not int or value < 0:", "if value < 0:"),
            ("if type(value) is not int or value < 0:", "if type(value) is not int:"),
            ("            if value > MOST_EXTENT:", "            if value >= MOST_EXTENT:"),
            ('if "bucket" not in f.metadata)', ")"),
            ('f.metadata["bucket"](getattr(self, f.name))', "getattr(self, f.name)"),
            ("return max(self.flops / (gpu", "return min(self.flops / (gpu"),
            ("self.bytes / (gpu.dram_gbps * 1e3))\n\n    def by", "self.bytes / (gpu.dram_gbps * 1e6))\n\n    def by"),
            ("return self.floor_us(gpu) > self.bytes", "return self.floor_us(gpu) >= self.bytes"),
            (
                "        if reason is not None:\n            raise InvalidConfig",
                "        if False:\n            raise InvalidConfig",
            ),
            ("for c in self.Config.every() if self.why_not(p, c, gpu) is None)", "for c in self.Config.every())"),
            ("for values in product(*space.values()):", "for values in zip(*space.values()):"),
        ),
    ),
}


def main(words: list[str]) -> int:
    if not words:
        for name, module in MODULES.items():
            print(f"{name:<10} {len(module.bugs)} bugs in {module.file}, seen by {' '.join(module.tests)}")
        return 0
    for library in LIBRARIES:
        importlib.import_module(library)
    sys.dont_write_bytecode = True
    alive = 0
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        copy = copied(Path(folder) / "tree")
        for word in words:
            name, _, numbers = word.partition(":")
            chosen = [int(n) for n in numbers.split(",")] if numbers else range(1, len(MODULES[name].bugs) + 1)
            module = MODULES[name]
            if not numbers and (broken := first_failure(copy, module.tests)) is not None:
                print(f"{name}: {broken} fails without any bug")
                return 1
            for i, (old, new) in enumerate(module.bugs, 1):
                if i in chosen:
                    begin = time.monotonic()
                    killer = killed_by(copy, module, old, new)
                    alive += killer is None
                    told = f"{old.strip()!r:.60} -> {new.strip()!r:.60}"
                    print(
                        f"{name}:{i:<3} {killer or 'ALIVE'}\n    {told} ({time.monotonic() - begin:.0f} s)", flush=True
                    )
    print(f"{alive} alive")
    return int(alive > 0)


def copied(copy: Path) -> Path:
    """A copy of the tree in which everything of ours is found below ``cutekernels``, before any installed one."""
    ignored = shutil.ignore_patterns(".*", "__pycache__", "build", "site", "results", "*.egg-info")
    shutil.copytree(ROOT, copy, ignore=ignored)
    for room in ("autotune", "db"):
        (copy / "cutekernels" / room).symlink_to(copy / room)
    return copy


def killed_by(copy: Path, module: Module, old: str, new: str) -> str | None:
    """The first test that fails with ``new`` in the place of ``old``; None where all pass."""
    file = copy / module.file
    right = file.read_text()
    assert right.count(old) == 1, old
    try:
        file.write_text(right.replace(old, new))
        return first_failure(copy, module.tests)
    finally:
        file.write_text(right)


class _First:
    """A plugin of pytest's that writes down the first failure."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def pytest_runtest_logreport(self, report: Any) -> None:
        self._note(report)

    def pytest_collectreport(self, report: Any) -> None:
        self._note(report)

    def _note(self, report: Any) -> None:
        if report.failed and not self._file.exists():
            self._file.write_text(report.nodeid)


def first_failure(copy: Path, tests: tuple[str, ...]) -> str | None:
    """Runs tests in a fork of this process, in the copy."""
    note = copy.parent / "failure"
    note.unlink(missing_ok=True)
    child = os.fork()
    if child == 0:
        _in_child(copy, tests, note)
    end = time.monotonic() + DEADLINE_S
    while (done := os.waitpid(child, os.WNOHANG)) == (0, 0):
        if time.monotonic() > end:
            os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return f"the deadline of {DEADLINE_S} s"
        time.sleep(0.05)
    if note.exists():
        return note.read_text()
    return None if done[1] == 0 else f"exit status {done[1]}"


def _in_child(copy: Path, tests: tuple[str, ...], note: Path) -> None:
    code = 99
    try:
        os.setpgid(0, 0)
        os.chdir(copy)
        silent = os.open(os.devnull, os.O_RDWR)
        for stream in range(3):
            os.dup2(silent, stream)
        os.environ |= {
            "PYTHONPATH": str(copy),
            "PYTHONDONTWRITEBYTECODE": "1",
            "HYPOTHESIS_STORAGE_DIRECTORY": str(note) + ".d",
        }
        sys.path[:] = [str(copy), *(path for path in sys.path if path not in ("", str(ROOT)))]
        for name in [n for n in sys.modules if n.split(".")[0] in ("tests", "cutekernels")]:
            del sys.modules[name]
        import pytest

        code = int(pytest.main(["-q", "-x", "-p", "no:cacheprovider", *tests], plugins=[_First(note)]))
    except BaseException:  # noqa: BLE001  a process's edge
        note.write_text(traceback.format_exc())
    finally:
        os._exit(code)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
