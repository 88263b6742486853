"""Runs tests of what leans on other packages on their lowest, their newest and an engine's versions.

    make test-versions                             # all of NAMES, and both engines resolved beside the project
    python -m tests.versions lowest tests/db       # one, on other tests

Each has a virtual environment, ``.venv-versions/NAME``, built again when what it asks for changes; remove it to take up
what came out since. pip resolves them as a user's would: "lowest" pins what the project declares at its lower bound,
"vllm" what the newest vLLM that pip offers requires, and they leave the rest alone. torch is PyPI's build with CUDA's
libraries, without which it does not load. What pip cannot offer fails with pip's reason.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
HOME = ROOT / ".venv-versions"
NAMES = ("lowest", "newest", "vllm")
ENGINES = ("vllm", "sglang")
SHARED = ("torch", "triton", "nvidia-cutlass-dsl")  # packages that an engine pins and the project asks for
EXTRAS = "dev,pandas"
USERS = ("cu13", "postgres", "fleet", "report", "transformers", "pandas")  # extras whose lower bounds are kept
TESTS = (
    "tests/integrations",
    "tests/models",
    "tests/trunk/test_cli.py",
    "tests/trunk/test_terminal.py",
    "tests/trunk/test_backend_triton.py",
    "tests/trunk/test_compile.py",
    "tests/shared",
    "tests/gemm/test_warm.py",
    "tests/attention/test_replay.py",
    "tests/norms/test_compiled.py::test_compiles_for_every_architecture",
    "tests/db/test_cli.py",
    "tests/db/test_store.py",
    "tests/db/test_sqlite.py",
    "tests/db/test_postgres.py",
    "tests/db/test_report.py",
    "tests/tuner/test_job_cli.py",
    "tests/tuner/test_search.py",
    "tests/tuner/test_ray.py",
)
_VERSIONS = """
import sys
from importlib.metadata import version
print(*(f"{name} {version(name)}" for name in sys.argv[1:]), sep=", ")
"""


def declared() -> list[str]:
    """What a user's installation may ask for: the project's dependencies and those of its extras."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    return [*project["dependencies"], *(row for name in USERS for row in extras[name])]


def lowest(requirements: list[str]) -> list[str]:
    """``name==bound`` for each of ``requirements``. Raises ValueError for one without a lower bound."""
    pins = {}
    for requirement in requirements:
        found = re.match(r"([\w.-]+)(?:\[[\w,-]+\])?>=([\w.]+)", requirement)
        if found is None:
            raise ValueError(f"{requirement} has no lower bound: declare the lowest version that passes, name>=version")
        pins[found[1]] = f"{found[1]}=={found[2]}"
    return sorted(pins.values())


class Unoffered(Exception):
    """pip cannot offer what was asked for. Its message is pip's reason."""


def pip(python: str | Path, *words: str | Path) -> None:
    """Runs ``python -m pip install``. Raises Unoffered."""
    command = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *words]
    done = subprocess.run(command, cwd=ROOT, stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        reasons = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        raise Unoffered(" ".join(reasons) or f"pip ended with {done.returncode}")


def offered(*requirements: str) -> dict[str, dict[str, Any]]:
    """The metadata, by name, of all that pip would install into an empty environment. Raises Unoffered."""
    HOME.mkdir(exist_ok=True)
    report = HOME / "report.json"
    pip(sys.executable, "--dry-run", "--ignore-installed", "--report", report, *requirements)
    return {row["metadata"]["name"].lower(): row["metadata"] for row in json.loads(report.read_text())["install"]}


def pins(requirements: Sequence[str]) -> list[str]:
    """Those of a package's ``requirements`` that this machine's installation has, as constraints."""
    parsed = [Requirement(row) for row in requirements]
    return sorted({f"{r.name}{r.specifier}" for r in parsed if r.marker is None or r.marker.evaluate({"extra": ""})})


def constraints(name: str) -> list[str]:
    """What pip keeps to in the environment ``name``. Raises Unoffered."""
    if name == "lowest":
        return lowest(declared())
    mine = [re.sub(r"\[.*?\]", "", row) for row in declared()]  # pip takes no extras in constraints
    return sorted({*mine, *(pins(offered("--no-deps", name)[name]["requires_dist"]) if name in ENGINES else ())})


def environment(name: str) -> Path:
    """The Python of the environment ``name``, installed if need be. Raises Unoffered."""
    folder = HOME / name
    listed, stamp = HOME / f"{name}.txt", folder / "installed.txt"
    text = "".join(f"{pin}\n" for pin in constraints(name))
    python = folder / "bin" / "python"
    if not stamp.is_file() or stamp.read_text() != text:
        HOME.mkdir(exist_ok=True)
        listed.write_text(text)
        subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
        pip(python, "-c", listed, "-e", f".[{EXTRAS}]")
        stamp.write_text(text)
    return python


def passes(name: str, tests: Sequence[str]) -> bool:
    """Run ``tests`` in the environment ``name``, below the versions that it has.

    Warnings are shown and no errors, as on the locked versions: old packages warn of themselves and of newer ones.
    """
    print(f"{name}:", flush=True)
    try:
        python = environment(name)
    except Unoffered as error:
        print(f"not to be had: {error}", flush=True)
        return False
    names = sorted({re.split(r"[\[<>=]", row)[0] for row in declared()})
    subprocess.run([python, "-c", _VERSIONS, *names], check=True)
    command = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not gpu and not slow", "-W", "default"]
    command += ["-n", os.environ.get("WORKERS", "2"), "--dist", "loadfile", *tests]
    return subprocess.run(command, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, check=False).returncode == 0


def resolves(engine: str) -> bool:
    """Whether pip installs the project beside the newest ``engine``, which it would otherwise set back by years."""
    try:
        newest = offered("--no-deps", engine)[engine]["version"]
        found = offered(".", f"{engine}=={newest}")
    except Unoffered as error:
        print(f"beside {engine}: {error}", flush=True)
        return False
    print(f"beside {engine} {newest}:", ", ".join(f"{name} {found[name]['version']}" for name in SHARED), flush=True)
    return True


def main(words: list[str]) -> int:
    """0 if all environments named in ``words``, else all, pass the tests named there, else :data:`TESTS`."""
    names = [word for word in words if word in NAMES]
    tests = [word for word in words if word not in NAMES] or TESTS
    failed = [name for name in names or NAMES if not passes(name, tests)]
    failed += [f"resolution beside {engine}" for engine in ENGINES if not words and not resolves(engine)]
    print(f"failed: {', '.join(failed)}" if failed else f"passed: {', '.join(names or NAMES)}")
    return len(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
