"""Compiled kernels: built once per (op, static problem, config, architecture, sources), then loaded in milliseconds.

A stale compiled object is *wrong*, so its key hashes everything it was made from: the static half of the problem,
the config, the target, the kernel sources and the compilers' versions. Nothing is ever invalidated; a changed
source simply has another key.

The cache directory is native code, so it must be the user's own: created 0700, its owner and mode checked before
anything in it is loaded. An entry is two files, ``<key>.<backend>`` and ``<key>.json`` (facts and checksum), each
written beside its place and renamed into it under a per-key lock; a truncated or damaged one is rebuilt.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cutekernels import settings
from cutekernels.backends import Artifact, Facts, own_directory
from cutekernels.environment import package_version
from cutekernels.errors import CompileError

if TYPE_CHECKING:
    from cutekernels.gpu import GpuSpec
    from cutekernels.op import Op

_BACKENDS = {
    "cute": "cutekernels.backends.cute:CuteArtifact",
    "triton": "cutekernels.backends.triton:TritonArtifact",
    "chained": "cutekernels.backends.chained:Chained",
}
_COMPILERS = ("nvidia-cutlass-dsl", "apache-tvm-ffi", "triton")
_PACKAGE = Path(__file__).parent
_REACHED = ("ops", "kernels", "backends")

_lock = threading.RLock()
_loaded: dict[str, Callable[..., Any]] = {}
_log = settings.logger("compile")


def get(op: Op[Any, Any], p: Any, c: Any, gpu: GpuSpec) -> Callable[..., Any]:
    """The launchable kernel: from memory, else from disk, else built and kept on disk.

    Raises:
        CompileError: it does not compile, or the cache directory is not this user's own.
    """
    key = cache_key(op, p, c, gpu)
    with _lock:
        if key not in _loaded:
            _loaded[key] = _load(key) or _build(op, p, c, gpu, key)[1]()
        return _loaded[key]


def prepare(op: Op[Any, Any], p: Any, c: Any, gpu: GpuSpec) -> Facts:
    """Makes sure the object is in the disk cache, without loading it; needs no GPU. Raises CompileError."""
    key = cache_key(op, p, c, gpu)
    entry = _entry(key)
    return entry[1] if entry is not None else _build(op, p, c, gpu, key)[0]


def compile_task(request: tuple[str, str, str, str]) -> Facts:
    """:func:`prepare` for a child process; ``request`` is ``(op name, problem, config, GPU name)`` as text."""
    registry = importlib.import_module("cutekernels.ops.registry")
    from cutekernels import gpu as gpus

    name, problem, config, gpu_name = request
    op = registry.get(name)
    return prepare(op, op.Problem.parse(problem), op.Config.parse(config), gpus.lookup(gpu_name))


def cache_key(op: Op[Any, Any], p: Any, c: Any, gpu: GpuSpec) -> str:
    """Names a compiled object by all it was made from."""
    made_from = [op.name, str(gpu), p.static(), str(c), source_fingerprint(type(op))]
    return hashlib.sha256(json.dumps(made_from).encode()).hexdigest()[:32]


@cache
def source_fingerprint(op: type) -> str:
    """A hash of every source that ``build`` of an ``op`` can reach, and of the compilers' versions.

    That is all of the package below its users (ops, kernels, backends, and the modules beside this one), and the files
    of the op's classes where they lie elsewhere. It is coarse on purpose: a key that misses one file serves a wrong
    kernel, one that has too many compiles again.
    """
    homes = {Path(sys.modules[base.__module__].__file__ or "") for base in op.__mro__ if base is not object}
    own = {file for folder in _REACHED for file in (_PACKAGE / folder).rglob("*.py")} | set(_PACKAGE.glob("*.py"))
    digest = hashlib.sha256()
    for file in sorted({file for file in homes if file.is_file() and _PACKAGE not in file.parents} | own):
        digest.update(str(file).removeprefix(str(_PACKAGE)).encode() + b"\0" + file.read_bytes() + b"\0")
    for compiler in _COMPILERS:
        digest.update(f"{compiler} {package_version(compiler)}\0".encode())
    return digest.hexdigest()


def directory() -> Path:
    """The directory of compiled objects, created 0700 if missing.

    Raises:
        CompileError: it belongs to someone else, or others may write to it.
    """
    root = settings.load().cache_dir
    own_directory(root)  # whoever may write here could put another directory in the place of the next
    return own_directory(root / "objects")


def _backend(name: str) -> type[Artifact]:
    module, _, attribute = _BACKENDS[name].partition(":")
    return getattr(importlib.import_module(module), attribute)  # type: ignore[no-any-return]


def _entry(key: str) -> tuple[Path, Facts, str] | None:
    """``(object, facts, backend)`` of an undamaged entry, else None."""
    root = directory()
    try:
        record = json.loads((root / f"{key}.json").read_text())
        path = root / f"{key}.{record['backend']}"
        if record["backend"] not in _BACKENDS or hashlib.sha256(path.read_bytes()).hexdigest() != record["sha256"]:
            raise ValueError("its checksum differs")
        return path, Facts(**record["facts"]), record["backend"]
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        _log.warning("the cached kernel %s is damaged (%s); building it again", key, error)
        return None


def _load(key: str) -> Callable[..., Any] | None:
    entry = _entry(key)
    if entry is None:
        return None
    path, _, backend = entry
    try:
        return _backend(backend).load(path)
    except CompileError as error:
        _log.warning("the cached kernel %s does not load (%s); building it again", key, error)
        with suppress(OSError, CompileError), _locked(key):
            (directory() / f"{key}.json").unlink(missing_ok=True)  # else the builder would find it sound
        return None


def _build(op: Op[Any, Any], p: Any, c: Any, gpu: GpuSpec, key: str) -> tuple[Facts, Callable[[], Callable[..., Any]]]:
    with _locked(key):
        entry = _entry(key)  # another process may have built it while this one waited
        if entry is not None:
            path, facts, backend = entry
            return facts, lambda: _backend(backend).load(path)
        artifact = op.build(p, c, gpu)
        made_from = {"op": op.name, "static": dict(p.static()), "config": str(c), "target": gpu.target}
        try:
            _keep(artifact, made_from, key)
        except OSError as error:
            raise _unwritable(error) from error
    return artifact.facts, artifact.kernel


@contextmanager
def _locked(key: str) -> Iterator[None]:
    """Holds the key against other processes."""
    from filelock import FileLock

    lock = FileLock(directory() / f"{key}.lock", mode=0o600)
    try:
        lock.acquire()
    except OSError as error:
        raise _unwritable(error) from error
    try:
        yield
    finally:
        lock.release()


def _unwritable(error: OSError) -> CompileError:
    place = settings.load().cache_dir
    return CompileError(
        f"the kernel cache {place} cannot be written: {error}; free it or set {settings.CACHE_VARIABLE}"
    )


def _keep(artifact: Artifact, made_from: dict[str, Any], key: str) -> None:
    root = directory()
    path = root / f"{key}.{artifact.backend}"
    _replace(path, artifact.save)
    record = {
        "backend": artifact.backend,
        "facts": asdict(artifact.facts),
        "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        "made_from": made_from,
    }
    _replace(root / f"{key}.json", lambda file: file.write_text(json.dumps(record, indent=1)))


def _replace(path: Path, write: Callable[[Path], object]) -> None:
    """Writes a file beside ``path`` and renames it into place, so that nobody ever sees half of it."""
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".new-") as scratch:
        fresh = Path(scratch) / path.name
        write(fresh)
        with fresh.open("rb") as file:
            os.fsync(file.fileno())
        fresh.replace(path)


def _after_fork() -> None:
    global _lock
    _lock = threading.RLock()
    _loaded.clear()


os.register_at_fork(after_in_child=_after_fork)
