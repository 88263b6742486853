"""Importing the package is cheap: nothing heavy is loaded until a function is accessed."""

from __future__ import annotations

import ast

import pytest

from tests.cpu_time import least_s, yardstick_s
from tests.processes import python

HEAVY = ("torch", "cutlass", "triton", "sqlalchemy", "alembic", "optuna", "numpy", "typer", "rich", "transformers")


def _loaded(code: str) -> list[str]:
    script = f"import sys; {code}; print(' '.join(m for m in {HEAVY!r} if m in sys.modules))"
    done = python(script)
    return done.stdout.split()


def test_import_loads_nothing_heavy() -> None:
    assert _loaded("import cutekernels; dir(cutekernels); cutekernels.__version__") == []


@pytest.mark.parametrize(
    ("code", "others"),
    [
        ("cutekernels.linear", ("packed", "packed_api", "grouped", "grouped_api", "norm", "backward", "dequantize")),
        ("from cutekernels.ops import registry; registry.get('gemm')", ("packed", "grouped", "norm", "api")),
        ("cutekernels.grouped_gemm", ("packed", "packed_api", "norm")),
    ],
)
def test_a_product_loads_no_other_kind(code: str, others: tuple[str, ...]) -> None:
    script = f"import sys, cutekernels; {code}; print(' '.join(sys.modules))"
    done = python(script)
    assert not {f"cutekernels.ops.products.{other}" for other in others} & set(done.stdout.split())


def test_the_rooms_below_the_ops_load_nothing_heavy() -> None:
    rooms = "errors settings gpu op measure verify isolate environment backends dispatch compile db.storage.snapshot"
    assert _loaded("import " + ", ".join(f"cutekernels.{room}" for room in rooms.split())) == []


EVERY_DECLARATION = """
from cutekernels import gpu
from cutekernels.ops import registry
h200 = gpu.lookup('h200')
for op in registry.OPS:
    p = op.Problem.parse(op.suite[0])
    c = op.default(p.bucket(), h200)
    op.why_not(p, c, h200), op.estimate_us(p, c, h200), op.work(p), p.static(), list(op.chained(p, c, h200))
"""


def test_declarations_their_rules_and_models_need_no_torch() -> None:
    assert _loaded(f"exec({EVERY_DECLARATION!r})") == ["numpy"], "for choices: columns.py"


@pytest.mark.parametrize(
    ("verb", "may_load"),
    [
        (["explain", "gemm", "m=16 n=4096 k=4096", "--gpu", "h200"], {"typer", "rich", "numpy"}),
        (["tune", "llama-3-8b", "--list", "--gpu", "h200"], {"typer", "rich", "numpy"}),
        (["db", "query", "--gpu", "h200", "--op", "gemm", "--limit", "1"], {"typer", "rich", "sqlalchemy"}),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_a_verb_that_reads_declarations_loads_those_it_needs_and_is_quick(verb: list[str], may_load: set[str]) -> None:
    code = (
        "import sys\nfrom cutekernels.cli import main\nsys.argv[0] = 'cutekernels'\n"
        "try:\n    main()\nexcept SystemExit as ended:\n    assert not ended.code\n"
        f"print([m for m in {(*HEAVY, 'cutekernels.ops.attention')!r} if m in sys.modules], file=sys.stderr)"
    )
    took_s, stderr = least_s(code, *verb)
    assert set(ast.literal_eval(stderr.splitlines()[-1])) <= may_load
    assert took_s < 4 * yardstick_s(), "0.9 to 2.4 yardsticks"


def test_import_is_fast() -> None:
    assert least_s("import cutekernels")[0] - least_s("pass")[0] < 0.3 * yardstick_s(), "0.13 yardsticks"


def test_public_names_are_there_and_others_are_not() -> None:
    import cutekernels

    for name in cutekernels.__all__:
        assert getattr(cutekernels, name) is not None
        assert name in dir(cutekernels)
    assert not hasattr(cutekernels, "no_such_function")
