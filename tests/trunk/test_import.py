"""Importing the package is cheap: nothing heavy is loaded until a function is accessed."""

from __future__ import annotations

import subprocess
import sys

from tests.cpu_time import children_s

HEAVY = ("torch", "cutlass", "triton", "sqlalchemy", "alembic", "optuna", "numpy", "typer", "rich")


def _loaded(code: str) -> list[str]:
    script = f"import sys; {code}; print(' '.join(m for m in {HEAVY!r} if m in sys.modules))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return done.stdout.split()


def test_import_loads_nothing_heavy() -> None:
    assert _loaded("import cutekernels; dir(cutekernels); cutekernels.__version__") == []


def test_the_rooms_below_the_ops_load_nothing_heavy() -> None:
    rooms = "errors settings gpu op measure verify isolate environment backends dispatch compile db.snapshot"
    assert _loaded("import " + ", ".join(f"cutekernels.{room}" for room in rooms.split())) == []


def test_import_is_fast() -> None:
    """Less than 0.15 s of CPU time more than the interpreter itself, best of three."""

    def best(code: str) -> float:
        times = []
        for _ in range(3):
            begin = children_s()
            subprocess.run([sys.executable, "-c", code], check=True)
            times.append(children_s() - begin)
        return min(times)

    assert best("import cutekernels") - best("pass") < 0.15


def test_public_names_are_there_and_others_are_not() -> None:
    import cutekernels

    for name in cutekernels.__all__:
        assert getattr(cutekernels, name) is not None
        assert name in dir(cutekernels)
    assert not hasattr(cutekernels, "no_such_function")
