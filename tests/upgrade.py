"""Files of an earlier version under today's: ``python -m tests.upgrade [COMMIT or WHEEL]``; else of 0.2.0.

It builds both wheels, installs each in an environment of its own (dependencies are those of the running one), and runs
this file twice: as ``make FOLDER`` by the earlier version, as ``check FOLDER`` by today's. ``--keep FILE`` packs what
``tests/db/test_upgrade.py`` opens. Both halves use nothing but the package, and of it what both versions have.

What is made: a database with measured rows of a job that was killed in its third task, predicted ones, imported ones,
and one of a revision that no longer serves; the job's studies; a lock; a cache of compiled kernels; and ``made.json``,
what the earlier version said of them.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from importlib import import_module
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
FIRST = "dafb6e87"  # 0.2.0: the last commit before its changelog was closed
TASKS = (
    ("rms_norm", "rows=16 cols=4096"),
    ("gemm", "m=16 n=4096 k=4096 b_major=k"),
    ("gemm", "m=4096 n=4096 k=4096"),
    ("quantized_linear", "m=1 n=3584 k=3584"),
    ("attention", "batch=1 seq_q=1024 seq_kv=1024 heads_q=28 heads_kv=4 causal=1 lse=1"),
)
DONE = 2  # tasks before the one in which the job is killed
PREDICTED = (
    ("gemm", "m=64 n=4096 k=4096 b_major=k"),
    ("rope", "batch=1 seq=1024 heads_q=32 head_dim=128 rotary=128 dtype=fp16"),
)
IMPORTED = (("rope", 1), ("silu_mul", 1), ("dequantize", 1))  # and their revisions: dequantize has its second
KERNELS = (*TASKS, ("silu_mul", "rows=16 cols=4096"))
GPUS = "h200", "l40s"
REQUEST = "h200", "gemm", "m=48 n=4096 k=4096", 7
RATE = "h200", "copy_gbps", 4000.0
TRIALS = 6
REWRITTEN: tuple[str, ...] = ()  # ops with other kernels since, whose earlier winners serve no more
DATABASE, LOCK, MADE = "tuned.db", "winners.lock", "made.json"
KEPT = DATABASE, f"{DATABASE}.studies", LOCK, MADE, "h200.toml"


class StandIn:
    """A GPU whose times follow from the texts of configs. ``killed``: it kills its process in the midst of a task."""

    width = 2

    def __init__(self, killed: bool = False) -> None:
        self.killed, self.measured = killed, dict[str, int]()

    def compile(self, op: Any, problem: Any, config: Any, gpu: Any) -> Future[Any]:
        from cutekernels.backends import Facts

        done: Future[Any] = Future()
        done.set_result(Facts(64, 0, 1024))
        return done

    def prepare(self, request: Any) -> None:
        pass

    def measure(self, request: Any) -> dict[str, Any]:
        try:
            from cutekernels.autotune.requests import Outcome
        except ImportError:  # 0.2.0
            from cutekernels.autotune.runtime import Outcome
        task = f"{request.prepare.op} {request.prepare.problem}"
        self.measured[task] = self.measured.get(task, 0) + 1
        if self.killed and len(self.measured) == DONE + 1:
            if self.measured[task] == 4:
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(0.6)  # rows wait for a second before they are stored
        return {
            text: Outcome(0.3, tuple(_us(request.prepare, text) * (1 + i % 5 / 1000) for i in range(request.rounds)))
            for text in request.configs
        }

    def refresh(self) -> None:
        pass


def _us(asked: Any, config: str) -> float:
    """One and a half to three times the roofline."""
    from cutekernels.ops import registry

    op = registry.get(asked.op)
    spread = int(hashlib.sha256(config.encode()).hexdigest()[:6], 16) / 0xFFFFFF
    return op.work(op.Problem.parse(asked.problem)).floor_us(asked.gpu) * (1.5 + 1.5 * spread)


def _tune(folder: Path, gpu: str = "h200", killed: bool = False) -> Any:
    from cutekernels import gpu as gpus
    from cutekernels.autotune.fleet import OneSlot
    from cutekernels.autotune.run import tune

    db, runtime = str(folder / DATABASE), StandIn(killed)
    if gpu == "h200":
        return tune(folder / f"{gpu}.toml", gpu, db=db, fleet=OneSlot(gpus.lookup(gpu), runtime))
    return tune(folder / f"{gpu}.toml", gpu, db=db, runtime=runtime, limit=3)


def _job(folder: Path, gpu: str, tasks: Sequence[tuple[str, str]]) -> None:
    each = (f'[[tasks]]\nop = "{op}"\nproblems = ["{problem}"]\n' for op, problem in tasks)
    (folder / f"{gpu}.toml").write_text(f'name = "{gpu}"\ntrials = {TRIALS}\n{"".join(each)}')


def _storage() -> Any:
    """The module of the store."""
    try:
        return import_module("cutekernels.db.storage.store")
    except ImportError:  # 0.2.0
        return import_module("cutekernels.db.store")


def _name(t: Any) -> list[Any]:
    """A winner as the earlier version and today's both tell it."""
    return [t.gpu.name, t.op, t.revision, t.problem, t.config, t.origin, t.id]


def _studies(folder: Path) -> dict[str, list[Any]]:
    """Trials of each study that Optuna finds beside the database."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    file = optuna.storages.journal.JournalFileBackend(str(folder / f"{DATABASE}.studies"))
    storage = optuna.storages.JournalStorage(file)
    names = optuna.get_all_study_names(storage)
    return {name: optuna.load_study(study_name=name, storage=storage).trials for name in names}


def _sources(op: str) -> str:
    from cutekernels import compile as compiler
    from cutekernels.ops import registry

    return compiler.source_fingerprint(type(registry.get(op)))


def _served(gpu: str, op: str, problem: str) -> tuple[str, str, str]:
    """Origin and config of a call, and all that ``explain`` says of it."""
    import cutekernels

    cutekernels.reload()
    told = cutekernels.explain(op, problem, gpu_name=gpu)
    return told.choice.origin, str(told.choice.config), str(told)


def _command(*words: str) -> str:
    """Output of the command line of the version that runs."""
    done = subprocess.run([sys.executable, "-I", "-m", "cutekernels", *words], capture_output=True, text=True)
    assert done.returncode == 0, f"cutekernels {' '.join(words)}: {done.stdout}{done.stderr}"
    return done.stdout


# ---- by the earlier version -----------------------------------------------------------------------------


def make(folder: Path) -> None:
    """Leave behind in ``folder`` what the module's docstring says."""
    import cutekernels
    from cutekernels import lock

    _job(folder, "h200", TASKS)
    _job(folder, "l40s", PREDICTED)
    killed = subprocess.run([sys.executable, "-I", __file__, "job", folder])
    assert killed.returncode == -signal.SIGKILL, "the job was to be killed"
    _tune(folder, "l40s")
    _import(folder)
    storage, db = _storage(), str(folder / DATABASE)
    with storage.Store(db) as store:
        gpu, name, value = RATE
        store.keep_rates([storage.Rate(gpu=gpu, name=name, revision=1, value=value, unit="GB/s")])
        store.note_requests([(*REQUEST[:2], 1, *REQUEST[2:])])
        trials, winners = store.trials(), store.winners()
    tuned = {op for op, _ in TASKS}
    digest, rows = lock.write(str(folder / LOCK), GPUS, db)
    made = {
        "version": cutekernels.__version__,
        "trials": sorted(t.id for t in trials),
        "winners": [_name(t) for t in winners],
        "served": [[*_name(t)[:4], *_served(t.gpu.name, t.op, t.problem)[:2]] for t in winners],
        "request": REQUEST,
        "rate": RATE,
        "studies": sorted(_studies(folder)),
        "measured": Counter(f"{t.op} {t.problem}" for t in trials if t.origin == "measured" and t.op in tuned),
        "lock": [digest, rows],
        "sources": {op: _sources(op) for op in sorted({op for op, _ in KERNELS})},
        "kernels": list(_kernels()),
    }
    (folder / MADE).write_text(json.dumps(made, indent=1))


def _import(folder: Path) -> None:
    """Rows of two ops that the job has not, and one of a revision that serves no more, through the command line."""
    from cutekernels import gpu as gpus
    from cutekernels.ops import registry

    db, file, gpu = str(folder / DATABASE), folder / "more.jsonl", gpus.lookup("h200")
    row = json.loads(_command("db", "export", "--gpu", "h200", "--db", db).splitlines()[0])
    lines = []
    for number, (op, revision) in enumerate(IMPORTED):
        declared = registry.get(op)
        p = declared.Problem.parse(declared.suite[0]).bucket()
        config = next(c for c in declared.valid(p, gpu) if c != declared.default(p, gpu))
        words = {"op": op, "revision": revision, "problem": str(p), "config": str(config), "certificate": None}
        us = 2 * declared.work(p).floor_us(gpu)
        times = {"median_us": us, "p20_us": us, "p80_us": us, "ratio": 1.1, "ratio_low": 1.05, "ratio_high": 1.15}
        lines.append(json.dumps(row | words | times | {"id": f"{row['id'][:-12]}{number:012x}"}))
    file.write_text("\n".join(lines))
    _command("db", "import", str(file), "--db", db)


def _kernels() -> Iterator[dict[str, str]]:
    """Defaults, compiled for each GPU into the cache of the settings."""
    from cutekernels import compile as compiler
    from cutekernels import gpu as gpus
    from cutekernels.ops import registry

    for name, problem in KERNELS:
        for gpu in map(gpus.lookup, GPUS):
            op = registry.get(name)
            p = op.Problem.parse(problem)
            c = op.default(p, gpu)
            compiler.prepare(op, p, c, gpu)
            yield {
                "op": name,
                "revision": op.revision,
                "problem": problem,
                "gpu": gpu.name,
                "config": str(c),
                "key": compiler.cache_key(op, p, c, gpu),
            }


# ---- by today's -----------------------------------------------------------------------------------------


def check_winners(folder: Path, made: dict[str, Any]) -> str:
    """Every row is there, each winner is one, and calls get the config that they got, in today's words."""
    with _storage().Store(folder / DATABASE) as store:
        assert {t.id for t in store.trials()} >= set(made["trials"]), "rows are lost"
        winners = [_name(t) for t in store.winners()]
        assert not [w for w in made["winners"] if w not in winners], "winners are lost"
        assert not store.broken_rows()
        assert [(r.gpu, r.op, r.problem, r.hits) for r in store.requests()] == [tuple(made["request"])]
        assert [(r.gpu, r.name, r.value) for r in store.rates()] == [tuple(made["rate"])]
    serve = _serving(made, "database")
    return f"{len(made['trials'])} rows and {len(winners)} winners are there; {serve} serve, as before"


def _serving(made: dict[str, Any], source: str) -> int:
    """The number of winners that served, and serve. Where none did, the default does."""
    from cutekernels import gpu as gpus
    from cutekernels.ops import registry

    number = 0
    for gpu, name, revision, problem, origin, config in made["served"]:
        op = registry.get(name)
        now = _served(gpu, name, problem)
        if origin == "default" or name in REWRITTEN:
            assert now[:2] == ("default", str(op.default(op.Problem.parse(problem), gpus.lookup(gpu)))), now[2]
        else:
            assert now[:2] == (origin, op.spell(revision, problem, config)) and f"({source})" in now[2], now[2]
            number += 1
    return number


def check_lock(folder: Path, made: dict[str, Any]) -> str:
    """It has the hash that it had, serves what the database did, and a comparison names what differs."""
    import cutekernels
    from cutekernels import lock
    from cutekernels.db.storage.lock import read

    file = folder / LOCK
    frozen = read(file)
    assert [frozen.digest, len(frozen.rows)] == made["lock"]
    before, os.environ["CUTEKERNELS_DB"] = os.environ["CUTEKERNELS_DB"], str(file)
    try:
        cutekernels.reload()
        assert lock.verify() == frozen.digest
        serve = _serving(made, "lock")
    finally:
        os.environ["CUTEKERNELS_DB"] = before
        cutekernels.reload()
    other = lock.compare(str(file), str(folder / DATABASE))
    differ = f"a lock of today has {len(other)} other rows of {len(frozen.rows)}"
    return f"whole; {serve} of its winners serve, as before; {differ}"


def check_job(folder: Path, made: dict[str, Any]) -> str:
    """The killed job runs to its end: rows of today's sources are not measured again, others stay beside."""
    from cutekernels import compile as compiler
    from cutekernels.ops import registry

    assert set(_studies(folder)) == set(made["studies"])
    alike = {op for op, sources in made["sources"].items() if sources == _sources(op)}
    report = _tune(folder)
    studies, resumed = _studies(folder), 0
    for t in report.tasks:
        begun = made["measured"].get(f"{t.op} {t.problem}", 0)
        assert t.state in ("tuned", "done") and t.winner is not None, t
        assert (t.resumed > 0) == (begun > 0 and t.op in alike), (t, begun)
        trials = studies[f"h200 {t.op} r{registry.get(t.op).revision} [{t.problem}]"]
        assert sum("row" in trial.user_attrs for trial in trials) >= TRIALS
        assert all(trial.state.is_finished() for trial in trials), "the one that was killed too"
        assert t.winner.sources == compiler.source_fingerprint(type(registry.get(t.op)))
        resumed += t.resumed > 0
    with _storage().Store(folder / DATABASE) as store:
        assert {t.id for t in store.trials()} >= set(made["trials"]), "rows are lost"
    begun = len(made["measured"])
    anew = f"{begun - resumed}, of other sources, anew"
    return f"{len(report.tasks)} tasks done; of {begun} begun {resumed} go on and {anew}"


def check_cache(folder: Path, made: dict[str, Any]) -> str:
    """A kernel is compiled again where its sources are others, and only there; what was compiled stays as it is."""
    from cutekernels import compile as compiler
    from cutekernels import gpu as gpus
    from cutekernels.ops import registry

    before = {file: file.read_bytes() for file in compiler.directory().iterdir()}
    found = 0
    for k in made["kernels"]:
        op, gpu = registry.get(k["op"]), gpus.lookup(k["gpu"])
        p = op.Problem.parse(k["problem"])
        c = op.check(p, op.Config.parse(op.spell(k["revision"], k["problem"], k["config"])), gpu)
        key = compiler.cache_key(op, p, c, gpu)
        assert (key == k["key"]) == (made["sources"][op.name] == _sources(op.name)) == compiler.ready(key), k
        found += compiler.ready(key)
        compiler.prepare(op, p, c, gpu)
        assert compiler.ready(key)
    assert before.items() <= {file: file.read_bytes() for file in compiler.directory().iterdir()}.items()
    return f"{found} of {len(made['kernels'])} kernels are found, the others, of other sources, compiled again"


CHECKS = (check_winners, check_lock, check_cache, check_job)


def opened(folder: Path) -> dict[str, Any]:
    """Answers of the earlier version on all that is in ``folder``."""
    return json.loads((folder / MADE).read_text())


# ---- both -----------------------------------------------------------------------------------------------


def wheel(earlier: str | None, folder: Path) -> Path:
    """A wheel of a commit, or of the working tree where None is given."""
    source = folder / "source"
    source.mkdir(parents=True)
    named = ["git", "-C", ROOT, *(["ls-files", "-z"] if earlier is None else ["archive", earlier])]
    listed = subprocess.run(named, check=True, capture_output=True).stdout
    if earlier is None:
        for name in filter(None, listed.decode().split("\0")):
            if (ROOT / name).is_file():
                (source / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / name, source / name)
    else:
        subprocess.run(["tar", "x", "-C", source], input=listed, check=True)
    _pip("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", folder, source)
    (made,) = folder.glob("*.whl")
    return made


def environment(made: Path, folder: Path) -> Path:
    """The Python of a new environment with a wheel. All else is that of the running one, but for its own package."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    python = folder / "bin" / "python"
    _pip("--python", python, "install", "--no-deps", made)
    (packages,) = folder.glob("lib/python*/site-packages")
    others = [path for path in sys.path if "-packages" in path]
    (packages / "others.pth").write_text("\n".join(others))
    asked = [python, "-I", "-c", "import cutekernels; print(cutekernels.__file__)"]
    told = subprocess.run(asked, check=True, capture_output=True, text=True).stdout
    assert Path(told).is_relative_to(packages), f"{python} imports {told}"
    return python


def _pip(*words: str | Path) -> None:
    subprocess.run([sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *words], check=True)


def upgrade(earlier: str, keep: Path | None) -> None:
    with tempfile.TemporaryDirectory() as name:
        home, left = Path(name), Path(name) / "left"
        left.mkdir()
        own = {"CUTEKERNELS_DB": str(left / DATABASE), "CUTEKERNELS_CACHE": str(left / "cache")}
        first = Path(earlier) if earlier.endswith(".whl") else wheel(earlier, home / "earlier")
        for role, made in (("make", first), ("check", wheel(None, home / "today"))):
            python = environment(made, home / role)
            subprocess.run([python, "-I", __file__, role, left], check=True, env=os.environ | own, cwd=home)
            if role == "make" and keep is not None:
                with tarfile.open(keep, "w:xz", preset=9) as packed:
                    for file in KEPT:
                        packed.add(left / file, file)


def main() -> None:
    role, *rest = sys.argv[1:] or [""]
    if role == "make":
        make(Path(rest[0]))
    elif role == "job":
        _tune(Path(rest[0]), killed=True)
    elif role == "check":
        for each in CHECKS:
            print(f"{each.__name__[6:]:<8} {each(Path(rest[0]), opened(Path(rest[0])))}", flush=True)
    else:
        parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
        parser.add_argument("earlier", nargs="?", default=FIRST, help="a commit, or a wheel's file")
        parser.add_argument("--keep", type=Path, help="pack what the earlier version made, but for its kernels")
        given = parser.parse_args()
        upgrade(given.earlier, given.keep)


if __name__ == "__main__":
    platform.node = lambda: "node"  # rows name it
    main()
