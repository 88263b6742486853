"""``cutekernels studies``: Optuna's studies of all measured tasks, from the database's rows, for optuna-dashboard."""

from __future__ import annotations

from contextlib import closing
from typing import Annotated

import typer

from cutekernels import terminal
from cutekernels.terminal import As, Format

app = typer.Typer()


@app.command("studies")
def command(
    gpu: Annotated[str | None, typer.Option(help="Only this GPU: auto, h200, a100.")] = None,
    op: Annotated[str | None, typer.Option(help="Only this op, e.g. gemm.")] = None,
    format: As = Format.table,
    db: Annotated[str | None, typer.Option("--db", metavar="URL", help="Path or URL; default: CUTEKERNELS_DB.")] = None,
) -> None:
    """Write the Optuna study of each measured task from its rows, and say where optuna-dashboard finds them.

    A run keeps the studies of its own tasks; this brings back those of earlier runs or of a removed journal.
    """
    from cutekernels import gpu as gpus
    from cutekernels.autotune.history import TaskHistory
    from cutekernels.autotune.space import space
    from cutekernels.autotune.studies import Studies, place
    from cutekernels.db.storage.engine import shown, url_of
    from cutekernels.db.storage.store import Environment, Store
    from cutekernels.errors import UnknownGpu, UnsupportedProblem
    from cutekernels.ops import registry

    rows = []
    with Store(url_of(db), readonly=True) as store, closing(Studies(store.url)) as studies:
        wanted = None if gpu is None else gpus.lookup(gpu).name
        told: set[tuple[str, str, str]] = set()
        for key in store.tasks(gpu=wanted, op=None if op is None else registry.get(op).name, origin="measured"):
            try:
                declared, spec = registry.get(key.op), gpus.lookup(key.gpu)
                problem = declared.Problem.parse(key.problem)
            except (UnknownGpu, UnsupportedProblem) as error:
                terminal.say(f"{key.gpu} {key.op} [{key.problem}] is left out: {error}")
                continue
            task = key.gpu, key.op, key.problem
            if key.revision not in declared.revisions or task in told:
                continue  # its configs mean something else today, or stand with those of another revision
            told.add(task)
            history = TaskHistory(store, declared, problem, spec, Environment(), "measured")
            stored = history.stored()
            study = studies.study(history, space(declared, problem, spec), stored)
            best = min((t.value for t in study.get_trials(deepcopy=False) if t.value is not None), default=None)
            rows.append({"study": history.name, "trials": len(stored), "best over default": best})
    terminal.write(rows, format)
    found = place(store.url)
    terminal.say(f"{len(rows)} studies; optuna-dashboard {shown(found) if '://' in found else found}")
