"""Runs tests of what leans on other packages on their lowest, their newest and an engine's versions.

    make test-versions                             # all of NAMES, and both engines resolved beside the project
    python -m tests.versions lowest tests/db       # one, on other tests

Each has a virtual environment, ``.venv-versions/NAME``, built again when what it asks for changes; remove it to take up
what came out since. uv resolves them in seconds, where pip takes half an hour: "lowest" pins what the project declares
at its lower bound, "vllm" has the versions that the newest vLLM comes with, and the rest is left alone. torch is PyPI's
build with CUDA's libraries, without which it does not load. What cannot be had fails with uv's reason.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path

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
    """Requirements that a user's installation may have: the project's dependencies and those of its extras."""
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
    """A requirement that cannot be had. Its message is uv's reason."""


def uv(*words: str | Path, given: str = "") -> str:
    """The stdout of uv, with ``given`` on its stdin. Raises Unoffered."""
    tool = HOME / "uv" / "bin" / "uv"
    if not tool.is_file():
        subprocess.run([sys.executable, "-m", "venv", HOME / "uv"], check=True)
        pip = [tool.with_name("python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "uv"]
        if subprocess.run(pip, check=False).returncode:
            raise Unoffered("pip cannot install uv")
    done = subprocess.run([tool, "--quiet", *words], cwd=ROOT, input=given, capture_output=True, text=True, check=False)
    if done.returncode:
        raise Unoffered(" ".join(done.stderr.split()) or f"uv ended with {done.returncode}")
    return done.stdout


def resolved(*requirements: str) -> dict[str, str]:
    """The versions, by name, of all that would be installed into an empty environment. Raises Unoffered."""
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    words = ["pip", "compile", "--python-version", python, "--no-header", "--no-annotate", "-"]
    return dict(re.findall(r"^([\w.-]+)==([^\s;]+)", uv(*words, given="\n".join(requirements)), re.M))


def constraints(name: str) -> list[str]:
    """The constraints of the environment ``name``. Raises Unoffered."""
    if name == "lowest":
        return lowest(declared())
    bounds = {named(row): re.sub(r"\[.*?\]", "", row) for row in declared()}  # constraints have no extras
    theirs = resolved(name) if name in ENGINES else {}
    return sorted({**bounds, **{own: f"{own}=={theirs[own]}" for own in bounds if own in theirs}}.values())


def named(requirement: str) -> str:
    """The package that a requirement is of."""
    return re.split(r"[\[<>=]", requirement)[0]


def environment(name: str) -> Path:
    """The Python of the environment ``name``, installed if need be. Raises Unoffered."""
    folder = HOME / name
    listed, stamp = HOME / f"{name}.txt", folder / "installed.txt"
    text = "".join(f"{pin}\n" for pin in constraints(name))
    python = folder / "bin" / "python"
    if not stamp.is_file() or stamp.read_text() != text:
        HOME.mkdir(exist_ok=True)
        listed.write_text(text)
        subprocess.run([sys.executable, "-m", "venv", "--clear", "--without-pip", folder], check=True)
        uv("pip", "install", "--python", python, "-c", listed, "-e", f".[{EXTRAS}]")
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
    names = sorted(set(map(named, declared())))
    subprocess.run([python, "-c", _VERSIONS, *names], check=True)
    command = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not gpu and not slow", "-W", "default"]
    command += ["-n", os.environ.get("WORKERS", "2"), "--dist", "loadfile", *tests]
    return subprocess.run(command, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, check=False).returncode == 0


def resolves(engine: str) -> bool:
    """Whether the project installs beside the newest ``engine``, all of whose versions stay."""
    try:
        alone = resolved(engine)
        found = resolved(f"cutekernels @ {ROOT.as_uri()}", f"{engine}=={alone[engine]}")
    except Unoffered as error:
        print(f"beside {engine}: {error}", flush=True)
        return False
    moved = [f"{name} {alone[name]} -> {found.get(name)}" for name in SHARED if found.get(name) != alone.get(name)]
    print(f"beside {engine} {alone[engine]}:", ", ".join(moved or [f"{n} {found[n]}" for n in SHARED]), flush=True)
    return not moved


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
