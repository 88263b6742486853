"""The root of the command line: ``explain`` and ``doctor`` are here, ``tune``, ``db`` and ``bench`` are mounted.

Data goes to stdout, messages to stderr. Exit code 0: done; 1: failed, with one line of explanation; 2: misused: a verb,
option, op, GPU, problem, config, job or environment variable that is none; 141: stdout's reader is gone (SIGPIPE). A
closed stdout is a failure of what writes to it.

A mounted verb is imported when it is called, and commands import what they need in their bodies, so that
``cutekernels --help`` loads neither torch nor a DSL. A new verb gets a line in ``_MOUNTED``, or a command here if it
has no room of its own.
"""

from __future__ import annotations

import errno
import importlib
import io
import math
import os
import re
import signal
import stat
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from difflib import get_close_matches
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import typer
import typer.main
from rich.table import Table
from rich.text import Text
from typer.core import TyperCommand, TyperGroup

from cutekernels import environment, installation, settings, terminal
from cutekernels.backends import is_own
from cutekernels.errors import (
    CompileError,
    CuteKernelsError,
    InvalidConfig,
    JobError,
    StoreError,
    UnknownGpu,
    UnsupportedProblem,
)
from cutekernels.terminal import As, Format

_MOUNTED = {  # verb: (its Typer app, its line in --help)
    "tune": ("cutekernels.autotune.cli:app", "Tune a job's problems for one GPU and store the winners."),
    "studies": ("cutekernels.autotune.studies_cli:app", "Make Optuna's studies from stored rows, for its dashboard."),
    "calibrate": ("cutekernels.autotune.calibrate:app", "Measure this GPU's own rates, which the models then use."),
    "warmup": ("cutekernels.models.cli:app", "Compile ahead the kernels of a checkpoint, for any number of tokens."),
    "db": (
        "cutekernels.db.questions.cli:app",
        "Look into the tuned-config database; export, import and merge winners.",
    ),
    "bench": ("bench.__main__:app", "Time an op's suites beside its peers (from a checkout)."),
}


class _Closed(io.RawIOBase):
    """In the place of a stdout that the caller closed: the first write fails, what is left then goes nowhere."""

    told = False

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        if not self.told:
            self.told = True
            raise OSError(errno.EBADF, "stdout is closed, and there is something to write to it")
        return len(data)


class _Verbs(TyperGroup):
    """Lists mounted verbs by name and help, and imports one when it is called."""

    def list_commands(self, ctx: Any) -> list[str]:
        return [*_MOUNTED, *super().list_commands(ctx)]

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        _refuse_repeats(self, ctx, args)
        return list(super().parse_args(ctx, args))

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name in _MOUNTED:
            return TyperCommand(cmd_name, help=_MOUNTED[cmd_name][1])
        return super().get_command(ctx, cmd_name)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        near = get_close_matches(args[0], self.list_commands(ctx), n=1) if args else []
        if near and args[0] not in self.list_commands(ctx) and not args[0].startswith("-"):
            ctx.fail(f"No such command {args[0]!r}. Did you mean {near[0]!r}?")  # Typer's own knows no mounted verb
        name, command, rest = super().resolve_command(ctx, args)
        return name, _command(name) if name in _MOUNTED else command, rest


def _refuse_repeats(command: Any, ctx: Any, words: list[str]) -> None:
    """Refuse an option that stands twice: the parser would silently take the last."""
    rest = words[: words.index("--")] if "--" in words else words
    while hasattr(command, "list_commands"):
        at = next((i for i, word in enumerate(rest) if word in command.list_commands(ctx)), None)
        if at is None:
            return
        command = _command(rest[at]) if rest[at] in _MOUNTED else command.get_command(ctx, rest[at])
        rest = rest[at + 1 :]
    for option in (p for p in command.params if p.param_type_name == "option" and not p.multiple):
        given = [word for word in rest if word.partition("=")[0] in (*option.opts, *option.secondary_opts)]
        if len(given) > 1:
            ctx.fail(f"{option.opts[0]} stands {len(given)} times: give it once")


app = typer.Typer(
    cls=_Verbs,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},  # of every verb
)
_MISUSE = (UnsupportedProblem, InvalidConfig, UnknownGpu, JobError)
# Packages that an installation for queries alone lacks.
_WHOLE = ("torch", "triton", "cutlass", "tvm_ffi", "optuna", "numpy", "safetensors")
_UNREAD = 128 + signal.SIGPIPE  # as shells report it


def main() -> None:
    """The ``cutekernels`` script."""
    ended(app)


def ended(call: Callable[[], object]) -> None:
    """Run a script. A failure is one line on stderr, with exit code 1, or 2 where a word was wrong."""
    _fill_standard_streams()
    with suppress(AttributeError):  # a stream of the caller's
        sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]  # what its encoding lacks
    try:
        try:
            call()
        finally:
            sys.stdout.flush()  # a full disk fails here, not in the interpreter's last moments
    except CuteKernelsError as error:
        terminal.fail(str(error), code=2 if isinstance(error, _MISUSE) else 1)
    except KeyboardInterrupt:  # before or behind what the command line catches
        sys.exit(128 + signal.SIGINT)
    except ModuleNotFoundError as error:
        if error.name not in _WHOLE:
            raise
        terminal.fail(f"this needs {error.name}; an installation for queries lacks it: pip install -e . in a checkout")
    except SystemExit as end:
        if isinstance(end.__context__, BrokenPipeError):  # typer and rich end with 1 then
            sys.exit(_UNREAD)
        raise
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what is left in the buffer goes nowhere
        if isinstance(error, BrokenPipeError):
            sys.exit(_UNREAD)
        terminal.fail(f"{error.strerror or error}{f': {error.filename}' if error.filename else ''}")


def _fill_standard_streams() -> None:
    """Open /dev/null where the caller closed a standard stream, lest a database gets its number and their text."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.dup2(os.open(os.devnull, os.O_RDWR), number)  # the lowest free number: often the same one
            os.set_inheritable(number, True)
            setattr(sys, name, open(number, "w" if number else "r", closefd=False))  # noqa: SIM115
            if name == "stdout":  # children write to nobody, we say that we cannot write
                sys.stdout = io.TextIOWrapper(io.BufferedWriter(_Closed()), encoding="utf-8")


def _command(verb: str) -> Any:
    module, _, attribute = _MOUNTED[verb][0].partition(":")
    if module.startswith("bench"):
        _reach_bench()
    found = typer.main.get_command(getattr(importlib.import_module(module), attribute))
    if verb == "db":  # one verb of it measures, which its own room, far below the tuner's, cannot
        inner = importlib.import_module("cutekernels.autotune.check")
        vars(found)["commands"]["check"] = typer.main.get_command(inner.app)
    return found


def _reach_bench() -> None:
    root = Path(__file__).resolve().parents[1]
    if not (root / "bench" / "__main__.py").is_file():
        terminal.fail("the benchmarks are not installed: `pip install -e .` in a checkout, then `python -m bench`")
    sys.path.insert(0, str(root))


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"cutekernels {environment.package_version('cutekernels')}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print it.")] = False,
) -> None:
    """LLM kernels in CuTe DSL and Triton, tuned per GPU: tune them, list the winners, see which one a call takes."""
    try:
        settings.load()
        settings.log_level()
        if (other := settings.gpu_as()) is not None:
            from cutekernels.gpu import lookup

            lookup(other)
    except (ValueError, UnknownGpu) as error:  # an environment variable is set wrongly
        terminal.fail(f"{settings.GPU_AS_VARIABLE}: {error}" if isinstance(error, UnknownGpu) else str(error), code=2)


# ---- explain ------------------------------------------------------------------------------------------------


@app.command()
def explain(
    op: Annotated[str, typer.Argument(help="An op's name, e.g. gemm.")],
    problem: Annotated[str, typer.Argument(help='A problem as text, e.g. "m=4096 n=4096 k=4096 dtype=bf16".')],
    gpu: Annotated[str, typer.Option(help="auto, or a name such as a100, l40s, rtx5090, h200.")] = "auto",
    config: Annotated[str | None, typer.Option(help="Explain this config, as text, instead of the chosen one.")] = None,
    db: Annotated[
        str | None, typer.Option("--db", metavar="URL", help="Path or URL, or a lock; default: CUTEKERNELS_DB.")
    ] = None,
    format: As = Format.table,
) -> None:
    """Show which config a call takes on a GPU, its source, and what else was considered. Compiles nothing."""
    from cutekernels import introspection

    rows = introspection.explain(op, problem, gpu=gpu, config=config, database=db).rows
    if format is not Format.table:
        terminal.write([dict(rows)], format)
        return
    table = Table.grid(padding=(0, 2))
    for name, value in rows:
        table.add_row(Text(name, style="bold"), Text(value, overflow="fold"))
    terminal.show(table)


# ---- lock ---------------------------------------------------------------------------------------------------


@app.command()
def lock(
    file: Annotated[str, typer.Argument(help="The lock to write; its name ends with .lock.")] = "winners.lock",
    gpu: Annotated[
        str | None, typer.Option(help="Only what this GPU uses: auto, h200, a100; default: all with winners.")
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Write nothing; read FILE, print its hash; with --db compare.")
    ] = False,
    db: Annotated[str | None, typer.Option("--db", metavar="URL", help="Path or URL; default: CUTEKERNELS_DB.")] = None,
) -> None:
    """Freeze the winners that calls use into a file with a hash, for CUTEKERNELS_DB; print the hash.

    --check --db URL lists where FILE differs from what would be frozen now, with exit code 1.
    """
    from cutekernels import lock as locks
    from cutekernels.db.storage import lock as files
    from cutekernels.db.storage.engine import shown
    from cutekernels.gpu import lookup

    if check:
        if gpu is not None:
            terminal.fail("--check reads the whole lock, of all its GPUs: leave --gpu out", code=2)
        found = files.read(Path(file))
        typer.echo(found.digest)
        terminal.say(f"{file}: {len(found.rows)} rows, as they were written")
        if db is not None and (rows := locks.compare(file, db)):
            terminal.write(rows, Format.table)
            other = shown(db) if "://" in db else db
            terminal.fail(f"{file} differs from {other} in {len(rows)} rows; `cutekernels lock` writes it again")
        return
    digest, count = locks.write(file, _gpus_with_winners(db) if gpu is None else [lookup(gpu).name], db)
    typer.echo(digest)
    terminal.say(f"{file}: {count} rows; {settings.DB_VARIABLE}={file} makes calls read it and nothing else")


def _gpus_with_winners(db: str | None) -> list[str]:
    from cutekernels import db as database
    from cutekernels.db.storage.snapshot import shipped_gpus

    with database.open(db) as opened:
        return sorted({*shipped_gpus(), *(w.gpu for w in opened.winners())})


# ---- what is known ------------------------------------------------------------------------------------------


@app.command()
def gpus(format: As = Format.table) -> None:
    """List the GPUs that --gpu takes, with their data sheets' figures; bf16_tflops: dense, accumulated in fp32."""
    from cutekernels.gpu import ALIASES, GPUS

    also: dict[str, list[str]] = {}
    for alias, name in ALIASES.items():
        also.setdefault(name, []).append(alias)
    rows = [
        {
            "gpu": g.name,
            "alias": " ".join(also.get(g.name, [])),
            "target": g.target,
            "sms": g.sm_count,
            "memory_gib": g.memory_bytes >> 30,
            "dram_gbps": g.dram_gbps,
            "bf16_tflops": g.bf16_tflops,
        }
        for g in GPUS
    ]
    terminal.write(rows, format)


@app.command()
def jobs(format: As = Format.table) -> None:
    """List the bundled tuning jobs that `tune` takes by name, and the grid."""
    from cutekernels.autotune import grid
    from cutekernels.autotune.job import bundled, bundled_text

    rows = []
    for name in bundled():
        job = tomllib.loads(bundled_text(name))
        tasks = job.get("tasks", [])
        ops = dict.fromkeys(task["op"] for task in tasks)
        count = sum(len(t.get("problems", ())) + _combinations(t.get("grid")) for t in tasks)
        rows.append({"job": name, "problems": count, "ops": " ".join(ops)})
    count = sum(len(grid.points(family)) for family in grid.FAMILIES)
    ops = dict.fromkeys(family.op for family in grid.FAMILIES)
    rows.append({"job": grid.NAME, "problems": count, "ops": " ".join(ops)})
    terminal.write(rows, format)


def _combinations(grid: dict[str, Any] | None) -> int:
    return 0 if grid is None else math.prod(len(v) if isinstance(v, list) else 1 for v in grid.values())


# ---- doctor -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Finding:
    """Result of one check. ``absent`` is no fault: a machine without a GPU compiles and predicts."""

    what: str
    state: str  # ok | absent | untested | broken
    value: str
    remedy: str = ""


_DSL_IMPORT = "import cutlass.cute"
_DSL_IMPORT_DEADLINE_S = 120
_STYLES = {"ok": "green", "absent": "yellow", "untested": "yellow", "broken": "red"}


@app.command()
def doctor(format: As = Format.table) -> None:
    """Check versions, GPU, cache, database and compilers. Exit code 1 if something is broken."""
    findings = diagnose()
    if format is Format.table:
        _write_findings(findings)
    else:
        terminal.write([asdict(f) for f in findings], format)
    raise typer.Exit(1 if any(f.state == "broken" for f in findings) else 0)


def diagnose() -> list[Finding]:
    """All checks of ``doctor``, in the order they are printed."""
    facts = environment.collect()
    return [
        Finding("cutekernels", "ok", environment.package_version("cutekernels") or "not installed, run from source"),
        Finding("python", "ok", facts["python"]),
        *_packages(facts),
        _dsl_import(facts["dsl"]),
        *_dsl_wheels(machine := installation.this_machine(), facts["dsl"]),
        *_private_names(),
        *_driver_and_gpu(machine),
        _cache_dir(settings.load().cache_dir),
        _database(settings.load().database_url),
        _tool("ptxas", environment.ptxas()),
        _cuobjdump(),
        *_rates(),
        *_drift(),
    ]


def _packages(facts: Mapping[str, str]) -> Iterator[Finding]:
    """The three that kernels need; others that are absent, or of versions that the declared bounds exclude."""
    rows, ours = installation.requirements(), {"torch": "torch", "triton": "triton", "nvidia-cutlass-dsl": "dsl"}
    for name in dict.fromkeys([*ours, *sorted(rows)]):
        what, row = ours.get(name, name), rows.get(name, "")
        version = facts[what] if name in ours else environment.package_version(name)
        if not version:
            remedy = "pip install -e . in the checkout installs all" if name in ours else f"pip install '{row}'"
            yield Finding(what, "broken", "not installed", remedy)
        elif installation.excludes(row, version):
            yield Finding(what, "broken", version, f"pip install '{row}'")
        elif name in ours:
            yield Finding(what, "ok", version)


def _dsl_import(version: str) -> Finding:
    # In a child process: a native abort during the import must become a finding.
    try:
        done = subprocess.run(
            [sys.executable, "-c", _DSL_IMPORT], capture_output=True, text=True, timeout=_DSL_IMPORT_DEADLINE_S
        )
    except subprocess.TimeoutExpired:
        return Finding("dsl import", "broken", f"still importing after {_DSL_IMPORT_DEADLINE_S} s", "reinstall the DSL")
    if done.returncode == 0:
        return Finding("dsl import", "ok", f"{_DSL_IMPORT} works")
    said = done.stderr.strip().splitlines()
    row = installation.requirements().get("nvidia-cutlass-dsl", "nvidia-cutlass-dsl")
    same = row if not version or installation.excludes(row, version) else f"{re.split('[<>!=]', row)[0]}=={version}"
    remedy = f"pip install --force-reinstall '{same}'"
    return Finding("dsl import", "broken", said[-1] if said else f"exit code {done.returncode}", remedy)


def _dsl_wheels(machine: installation.Machine, version: str) -> list[Finding]:
    """Which of the DSL's wheels came last, where two have files in common."""
    findings = []
    for overlap in installation.overlaps():
        misfit = overlap.misfit(machine, version)
        findings.append(Finding(**asdict(misfit)) if misfit else Finding("dsl wheels", "ok", str(overlap)))
    return findings


def _private_names() -> list[Finding]:
    """Private names of others that calls would use and that these versions lack."""
    findings = []
    for module in ("cutekernels.torch_names", "cutekernels.backends.triton", "cutekernels.backends.cute"):
        with suppress(ImportError, metadata.PackageNotFoundError):  # what does not import has its own finding
            for name, follows in importlib.import_module(module).absent().items():
                findings.append(Finding("private name", "absent", f"{name}: {follows}", "calls are right, and slower"))
    return findings


def _driver_and_gpu(machine: installation.Machine) -> list[Finding]:
    """The driver, what does not go together with it, and the GPU unless that is why none is seen."""
    misfits = [Finding(p.what, p.state, p.value, p.remedy) for p in installation.problems(machine)]
    if not any(misfit.what == "driver" for misfit in misfits):
        runs = f"{machine.driver} (CUDA {machine.driver_cuda or 'unknown'})"
        driver = Finding("driver", "ok", runs) if machine.driver else Finding("driver", "absent", "no NVIDIA driver")
        misfits.insert(0, driver)
    gpu = _gpu(machine)
    explained = gpu.state == "broken" and any(misfit.state == "broken" for misfit in misfits)
    return misfits if explained else [*misfits, gpu]


def _gpu(machine: installation.Machine) -> Finding:
    from cutekernels.gpu import lookup

    try:
        gpu = lookup("auto")
    except UnknownGpu as error:
        if machine.driver:
            import torch

            remedy = "check CUDA_VISIBLE_DEVICES and the driver"
            if torch.cuda.is_available():  # one that no kernel is compiled for
                remedy = "use another GPU; CPU tensors run the reference"
            return Finding("gpu", "broken", str(error), remedy)
        return Finding("gpu", "absent", "none; kernels compile for a named GPU, and CPU tensors run the reference")
    except ImportError as error:
        return Finding("gpu", "broken", f"torch does not import: {error}", "reinstall torch")
    return Finding("gpu", "ok", f"{gpu.name} ({gpu.product}, {gpu.sm_count} SMs, {gpu.target})")


def _cache_dir(path: Path) -> Finding:
    remedy = f"compiled code is loaded from a directory of one's own: set {settings.CACHE_VARIABLE}"
    if not os.path.lexists(path):
        parent = next(p for p in path.parents if os.path.exists(p))
        if os.access(parent, os.W_OK | os.X_OK):
            return Finding("cache", "ok", f"{path} (made on first use)")
        return Finding("cache", "broken", f"{path} cannot be made in {parent}", remedy)
    if not path.is_dir():
        return Finding("cache", "broken", f"{path} is not a directory", remedy)
    status = path.stat()
    value = f"{path} (mode {status.st_mode & 0o7777:04o})"
    if is_own(status):
        remedy = f"others may read it: chmod 700 {path}" if status.st_mode & 0o077 else ""
        return Finding("cache", "ok", value, remedy)
    if status.st_uid != os.getuid():
        value = f"{path} belongs to uid {status.st_uid}, this is uid {os.getuid()}"
        return Finding("cache", "broken", value, remedy)
    return Finding("cache", "broken", value, f"others could plant code there: chmod 700 {path}")


def _database(url: str) -> Finding:
    from cutekernels import db
    from cutekernels.db.storage import lock, sqlite
    from cutekernels.db.storage.engine import shown

    path = settings.load().database_path
    try:
        if lock.is_one(url):
            return Finding("database", "ok", f"{path} (a lock of {len(lock.read(lock.path_of(url)).rows)} rows)")
        if path is not None and sqlite.is_absent(path):
            above = next(p for p in path.absolute().parents if os.path.lexists(p))
            if not (above.is_dir() and os.access(above, os.W_OK | os.X_OK)):
                value = f"{path} cannot be made: {above} is no folder that this user may write to"
                return Finding("database", "broken", value, f"set {settings.DB_VARIABLE} to another place")
            return Finding("database", "ok", f"{path} (made on first use)")
        with db.open(url, shipped=False) as opened:
            assert opened.store is not None
            found = opened.store.winners()
            winners, refused = len(found), len(opened.refused(found))
    except StoreError as error:
        return Finding("database", "broken", str(error), f"set {settings.DB_VARIABLE}, or move the file away")
    remedies = ["`cutekernels db doctor` says why; tune their problems again"] if refused else []
    among = f"winners, of which calls refuse {refused}" if refused else "local winners"
    if path is not None and (open_ := [p for p in (path, path.parent) if _open_to_all(p)]):
        remedies.append(f"every user may write winners there: chmod o-w {' '.join(map(str, open_))}")
    return Finding("database", "ok", f"{shown(url)} ({winners} {among})", "; ".join(remedies))


def _open_to_all(path: Path) -> bool:
    """Whether all users may write to a file, or replace those in a folder."""
    mode = path.stat().st_mode
    return bool(mode & stat.S_IWOTH) and not (stat.S_ISDIR(mode) and mode & stat.S_ISVTX)


def _tool(name: str, path: Path | None) -> Finding:
    if path is None:
        version = environment.package_version("triton")
        again = f"--force-reinstall --no-deps triton=={version}" if version else "triton"
        return Finding(name, "broken", "not found", f"it comes with Triton's wheel: pip install {again}")
    return Finding(name, "ok", str(path))


def _cuobjdump() -> Finding:
    from cutekernels.backends import cubin

    try:
        return _tool("cuobjdump", cubin.cuobjdump())
    except CompileError:
        return _tool("cuobjdump", None)


def _rates() -> list[Finding]:
    """This GPU's rates as the models would scale them, beside those that `calibrate` stored."""
    from cutekernels import rates
    from cutekernels.autotune.calibrate import unit_of
    from cutekernels.gpu import lookup

    try:
        gpu = lookup("auto")
    except (UnknownGpu, ImportError):
        return []
    scaled, found = rates.scaled(gpu), rates.rates_for(gpu)
    if not found:
        source = "fitted on this GPU" if scaled.measured else "scaled from an H200's"
        return [Finding("rates", "ok", f"{source}, none calibrated", "`cutekernels calibrate` measures this GPU's own")]
    findings = []
    for name in rates.NAMES:
        value, refused = found.get(name, (None, None))
        told = "not calibrated" if value is None else f"calibrated {value:.5g}"
        remedy = "" if refused is None else f"{refused}: not used; calibrate again"
        state = "ok" if refused is None else "absent"
        findings.append(Finding(name, state, f"scaled {getattr(scaled, name):.5g} {unit_of(name)}, {told}", remedy))
    return findings


def _drift() -> list[Finding]:
    """How many winners of this GPU were measured under another Triton or DSL."""
    from cutekernels import db
    from cutekernels.gpu import lookup

    try:
        with db.open() as opened:
            found = [w for w in opened.winners(gpu=lookup("auto").name, origin="measured") if w.serves]
    except (UnknownGpu, ImportError, StoreError):  # each has its own finding
        return []
    moved = Counter(environment.drift(w.environment) for w in found)
    return [
        Finding("winners", "untested", f"{count} of {len(found)} {note}", "`cutekernels db check` times them again")
        for note, count in moved.items()
        if note
    ]


def _write_findings(findings: Iterable[Finding]) -> None:
    table = Table("what", "state", "found", "remedy", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for f in findings:
        table.add_row(f.what, Text(f.state, style=_STYLES[f.state]), Text(f.value, overflow="fold"), Text(f.remedy))
    terminal.show(table)
