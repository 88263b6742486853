"""Runs tests of what leans on other packages on their lowest and on their newest declared versions.

    make test-versions                             # both
    python -m tests.versions lowest tests/db       # one, on other tests

Each has a virtual environment, ``.venv-versions/NAME``, built again when the declared versions change; remove it to
take up what came out since. pip resolves both as a user's would: "lowest" pins what the project declares at its lower
bound and leaves the rest alone. torch is PyPI's build with CUDA's libraries, without which it does not load.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
HOME = ROOT / ".venv-versions"
EXTRAS = "dev,pandas"
USERS = ("cu13", "postgres", "fleet", "report", "transformers", "pandas")  # extras whose lower bounds are kept
TESTS = (
    "tests/integrations",
    "tests/models",
    "tests/trunk/test_cli.py",
    "tests/trunk/test_terminal.py",
    "tests/trunk/test_backend_triton.py",
    "tests/trunk/test_compile.py",
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


def environment(name: str) -> Path:
    """The Python of the environment ``name``, installed if need be."""
    folder = HOME / name
    pins = lowest(declared()) if name == "lowest" else sorted(declared())
    constraints, stamp = HOME / f"{name}.txt", folder / "installed.txt"
    text = "".join(f"{pin}\n" for pin in pins)
    python = folder / "bin" / "python"
    if not stamp.is_file() or stamp.read_text() != text:
        HOME.mkdir(exist_ok=True)
        constraints.write_text(re.sub(r"\[.*?\]", "", text))  # pip takes no extras in constraints
        subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
        install = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "-c", constraints]
        subprocess.run([*install, "-e", f".[{EXTRAS}]"], cwd=ROOT, check=True)
        stamp.write_text(text)
    return python


def passes(name: str, tests: list[str]) -> bool:
    """Run ``tests`` in the environment ``name``, below the versions that it has.

    Warnings are shown and no errors, as on the locked versions: old packages warn of themselves and of newer ones.
    """
    python = environment(name)
    names = sorted({re.split(r"[\[<>=]", row)[0] for row in declared()})
    print(f"{name}:", flush=True)
    subprocess.run([python, "-c", _VERSIONS, *names], check=True)
    command = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not gpu and not slow", "-W", "default"]
    command += ["-n", os.environ.get("WORKERS", "2"), "--dist", "loadfile", *tests]
    return subprocess.run(command, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, check=False).returncode == 0


def main(words: list[str]) -> int:
    """0 if all environments named in ``words``, else both, pass the tests named there, else :data:`TESTS`."""
    names = [word for word in words if word in ("lowest", "newest")] or ["lowest", "newest"]
    tests = [word for word in words if word not in ("lowest", "newest")] or list(TESTS)
    failed = [name for name in names if not passes(name, tests)]
    print(f"failed on the {' and the '.join(failed)} versions" if failed else f"passed on: {', '.join(names)}")
    return len(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
