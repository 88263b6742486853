"""Compiled kernels: built once per (op, static problem, config, architecture, sources), then loaded in milliseconds.

A stale compiled object is *wrong*, so its key hashes everything it was made from: the static half of the problem,
the config, the target, the kernel sources and the compilers' versions. Nothing is ever invalidated; a changed
source simply has another key.

The cache directory is native code, so it must be the user's own: created 0700, its owner and mode checked before
anything in it is loaded. An entry is two files, ``<key>.<backend>`` and ``<key>.json`` (facts and checksum), each
written to ``<key>.new/`` and renamed into its place under a per-key lock, ``<key>.lock``. What is no regular file is
not read. A damaged entry is looked at again under the lock, since another process may be renaming its second file, and
then rebuilt, as is one that does not load. Lock and folder last as long as the build; those of a killed process are
removed by :func:`tidy`.

A build that fails for want of space, rights or memory raises :class:`~cutekernels.errors.CacheUnusable` or
:class:`~cutekernels.errors.CompilerKilled`, never a plain CompileError, which is a verdict on the config.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import importlib
import json
import os
import re
import shutil
import stat
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from cutekernels import settings
from cutekernels.backends import Artifact, Facts, own_directory
from cutekernels.environment import package_version
from cutekernels.errors import CacheUnusable, CompileError, CompilerKilled
from cutekernels.isolate import OUT_OF_MEMORY

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
_REACHED = ("ops", "kernels", "backends", "quant")
# Files that no build runs: they call what was built, or users call them.
_CALLS = re.compile(
    r"(__main__|ahead|cli|compilers|installation|introspection|kv_cache|lock|sdpa|terminal)\.py"
    r"|ops/(library|linear|norm_linear|products/(backward|chain|gradients)|\w+/(\w+_)?api|shared/(calls|inductor|paths))\.py"
)
_FAMILY = re.compile(rb"cutekernels\.ops(?:\.| import )(\w+)")  # named by an import

_STARVED = (errno.ENOMEM, errno.EAGAIN, errno.EMFILE, errno.ENFILE)
_UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EFBIG, errno.EIO)
_NO_SPACE = re.compile(
    "|".join(os.strerror(number) for number in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG))
)
_PROBE_BYTES = 1 << 16  # about an object's size
_OURS = re.compile(r"[0-9a-f]{32}|run-[0-9]+-[0-9a-f]{8}")  # what locks and their folders are called for
_TOOL_KILLED = re.compile(r"error code -(9|15)\b")  # Triton's words for a ptxas that a signal ended

_LONG_S = 1.0  # a compile that one notices within a call

T = TypeVar("T")

_lock = threading.RLock()
_loaded: dict[str, Callable[..., Any]] = {}
_told = False  # of a long compile within a call
_log = settings.logger("compile")


def get(op: Op[Any, Any], p: Any, c: Any, gpu: GpuSpec) -> Callable[..., Any]:
    """The launchable kernel: from memory, else from disk, else built and kept on disk.

    Raises:
        CompileError: it does not compile; CacheUnusable, CompilerKilled: the machine's fault.
    """
    key = cache_key(op, p, c, gpu)
    with _lock:
        if key not in _loaded:
            begin = time.monotonic()

            def fresh(artifact: Artifact) -> Callable[..., Any]:
                _tell(op, p, time.monotonic() - begin)
                return artifact.kernel()

            _loaded[key] = _obtain(op, p, c, gpu, key, _kernel, fresh)
        return _loaded[key]


def prepare(op: Op[Any, Any], p: Any, c: Any, gpu: GpuSpec) -> Facts:
    """Makes sure the object is in the disk cache, without loading it; needs no GPU. Raises CompileError."""
    return _obtain(op, p, c, gpu, cache_key(op, p, c, gpu), _facts, lambda artifact: artifact.facts)


def ready(key: str) -> bool:
    """Whether :func:`get` finds the object of this key in memory or, undamaged, on disk."""
    with suppress(_Damaged):
        return key in _loaded or _entry(key) is not None
    return False


def _tell(op: Op[Any, Any], p: Any, seconds: float) -> None:
    """Names the remedy for a long compile within a call, once per process."""
    global _told
    if seconds >= _LONG_S and not _told:
        _told = True
        _log.info(
            "a call waited %.1f s for %s [%s] to compile; cutekernels.warmup([(%r, %r), ...]) compiles ahead of calls, "
            "several kernels side by side (said once per process)",
            *(seconds, op.name, p, op.name, str(p)),
        )


def cache_key(op: Op[Any, Any], p: Any, c: Any, gpu: GpuSpec) -> str:
    """Names a compiled object by all it was made from."""
    made_from = [op.name, str(gpu), p.static(), str(c), source_fingerprint(type(op))]
    return hashlib.sha256(json.dumps(made_from).encode()).hexdigest()[:32]


@cache
def source_fingerprint(op: type) -> str:
    """A hash of every source that ``build`` of an ``op`` can reach, and of the compilers' versions.

    That is all of the package below its users (ops, kernels, backends, quant and the modules beside), but for the path
    of calls and for families of ops that the op's own does not name, and the files of the op's classes where they lie
    elsewhere. It is coarse on purpose: a key that misses one file serves a wrong kernel, one that has too many
    compiles again.
    """
    digest = hashlib.sha256()
    for file, content in sorted(_sources(op).items()):
        digest.update(str(file).removeprefix(str(_PACKAGE)).encode() + b"\0" + content + b"\0")
    for compiler in _COMPILERS:
        digest.update(f"{compiler} {package_version(compiler)}\0".encode())
    return digest.hexdigest()


def _sources(op: type) -> dict[Path, bytes]:
    """The files of :func:`source_fingerprint`."""
    files = {file for folder in _REACHED for file in (_PACKAGE / folder).rglob("*.py")} | set(_PACKAGE.glob("*.py"))
    found = {file: file.read_bytes() for file in files if not _CALLS.fullmatch(str(file.relative_to(_PACKAGE)))}
    families = _families(op, found)
    found = {file: content for file, content in found.items() if _family(file) in families}
    homes = {Path(sys.modules[base.__module__].__file__ or "") for base in op.__mro__ if base is not object}
    return found | {file: file.read_bytes() for file in homes - found.keys() if file.is_file()}


def _families(op: type, sources: Mapping[Path, bytes]) -> set[str]:
    """Families of ops that the op's own names, with those that they name; all, of an op from elsewhere."""
    files: dict[str, list[bytes]] = {}
    for file, content in sources.items():
        files.setdefault(_family(file), []).append(content)
    own = re.match(rf"{__package__}\.ops\.(\w+)\.", op.__module__)
    if own is None:
        return set(files)
    found, left = set[str](), {own[1], "shared", ""}
    while left:
        found |= left
        left = {n.decode() for f in left for text in files.get(f, ()) for n in _FAMILY.findall(text)} - found
    return found


def _family(file: Path) -> str:
    """The folder of ``ops`` that a file lies in; "" of other files."""
    parts = file.relative_to(_PACKAGE).parts if _PACKAGE in file.parents else ()
    return parts[1] if parts[:1] == ("ops",) and len(parts) > 2 else ""


def directory() -> Path:
    """The directory of compiled objects, created 0700 if missing.

    Raises:
        CacheUnusable: it cannot be made, belongs to someone else, or others may write to it.
    """
    root = settings.load().cache_dir
    own_directory(root)  # whoever may write here could put another directory in the place of the next
    return own_directory(root / "objects")


def _backend(name: str) -> type[Artifact]:
    module, _, attribute = _BACKENDS[name].partition(":")
    return getattr(importlib.import_module(module), attribute)  # type: ignore[no-any-return]


class _Damaged(Exception):
    """An entry is not as it was written, or does not load."""


class _Entry(NamedTuple):
    path: Path
    facts: Facts
    backend: str


def _entry(key: str) -> _Entry | None:
    """The entry of this key, None where there is none. Raises _Damaged."""
    root = directory()
    try:
        record = json.loads(_read(root / f"{key}.json"))
        path = root / f"{key}.{record['backend']}"
        if record["backend"] not in _BACKENDS or _checksum(path, record["facts"]) != record["sha256"]:
            raise ValueError("its checksum differs")
        return _Entry(path, Facts(**record["facts"]), record["backend"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise _Damaged(f"is damaged ({error})") from error


def _facts(key: str) -> Facts | None:
    entry = _entry(key)
    return None if entry is None else entry.facts


def _kernel(key: str) -> Callable[..., Any] | None:
    entry = _entry(key)
    try:
        return None if entry is None else _backend(entry.backend).load(entry.path)
    except (CompileError, ImportError, OSError) as error:
        raise _Damaged(f"does not load ({error})") from error


def _obtain(
    op: Op[Any, Any],
    p: Any,
    c: Any,
    gpu: GpuSpec,
    key: str,
    taken: Callable[[str], T | None],
    fresh: Callable[[Artifact], T],
) -> T:
    """A kernel ``taken`` from the entry of this key; where that is missing or no good, from a ``fresh`` artifact.

    Nothing is loaded under the lock: loading may wait for kernels that run, such as a collective, which may wait for
    another rank, which may wait for the lock.
    """
    for again in (False, True):
        damage = None
        try:
            found = taken(key)
            if found is not None:
                return found
        except _Damaged as error:
            damage = error
        with _hold_key(key):
            if not again and ready(key):
                continue  # another process has built it, or renamed its second file, meanwhile
            if damage is not None:
                _log.warning("the cached kernel %s %s; building it again", key, damage)
            artifact = _build(op, p, c, gpu, key)
            break
    try:
        return fresh(artifact)
    except OSError as error:  # loading takes temporary files
        raise _unwritable(error) from error


def _build(op: Op[Any, Any], p: Any, c: Any, gpu: GpuSpec, key: str) -> Artifact:
    """A fresh artifact, kept as the entry of this key, whose lock is held."""
    made_from = {"op": op.name, "static": dict(p.static()), "config": str(c), "target": gpu.target}
    try:
        artifact = op.build(p, c, gpu)
        _keep(artifact, made_from, key)
    except ImportError as error:
        raise CompilerKilled(f"the compiler does not import: {error}; see `cutekernels doctor`") from error
    except (CompileError, OSError, MemoryError) as error:
        raise _cause(error) from error
    return artifact


def _cause(error: BaseException) -> BaseException:
    """``error``, or what the machine did that is behind it: no space, no rights, no memory, a killed compiler."""
    link: BaseException | None = error
    while link is not None:
        number = link.errno if isinstance(link, OSError) else None
        if isinstance(link, CacheUnusable | CompilerKilled):
            return link
        if isinstance(link, MemoryError) or number in _STARVED or _is_kill(str(link)):
            return CompilerKilled(f"the compiler ran out of memory or was killed: {link or type(link).__name__}")
        if number in _UNWRITABLE or (link is error and number is not None) or _NO_SPACE.search(str(link)):
            return _unwritable(link)
        link = link.__cause__ or link.__context__
    try:  # whatever words the compiler has for a full disk
        for folder in (directory(), tempfile.gettempdir()):
            with tempfile.TemporaryFile(dir=folder) as probe:
                probe.write(bytes(_PROBE_BYTES))
                probe.flush()
    except OSError as full:
        return _unwritable(full)
    return error


def _is_kill(message: str) -> bool:
    return bool(_TOOL_KILLED.search(message) or OUT_OF_MEMORY.search(message))


@contextmanager
def _hold_key(key: str) -> Iterator[None]:
    """Holds the key against other processes, with an empty folder ``<key>.new``."""
    root = directory()
    lock, fresh = root / f"{key}.lock", root / f"{key}.new"
    try:
        held = _flock(lock)
        _remove(fresh)  # of a process that was killed
        fresh.mkdir(mode=0o700)
    except OSError as error:
        raise _unwritable(error) from error
    assert held is not None
    try:
        yield
    finally:
        _unlock(held, lock, fresh)


def _flock(lock: Path, wait: bool = True) -> int | None:
    """A descriptor that holds the file ``lock``, made if missing; without ``wait``, None while another holds it.

    The holder removes the file, so whoever waited for it must look whether what it holds is still there. Whatever else
    lies in its place is removed: it cannot be held.
    """
    while True:
        with suppress(FileNotFoundError):
            if not stat.S_ISREG(os.lstat(lock).st_mode):
                _remove(lock)
        held = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(held, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(held), os.stat(lock)):
                    return held
        except BlockingIOError:
            os.close(held)
            return None
        except BaseException:
            os.close(held)
            raise
        os.close(held)


def _unlock(held: int, lock: Path, fresh: Path) -> None:
    shutil.rmtree(fresh, ignore_errors=True)
    with suppress(OSError):
        lock.unlink()
    os.close(held)


def tidy() -> None:
    """Removes locks and folders that killed processes left in the cache, by their names. Raises CacheUnusable."""
    for lock in directory().glob("*.lock"):
        if _OURS.fullmatch(lock.stem) is None:
            continue
        with suppress(OSError):
            held = _flock(lock, wait=False)
            if held is not None:
                _unlock(held, lock, lock.with_suffix(".new"))


@contextmanager
def scratch() -> Iterator[Path]:
    """An empty folder in the cache for a run's temporary files; :func:`tidy` removes it where the run was killed."""
    name = f"run-{os.getpid()}-{os.urandom(4).hex()}"
    with _hold_key(name):
        yield directory() / f"{name}.new"


def _unwritable(error: BaseException) -> CacheUnusable:
    place = settings.load().cache_dir
    return CacheUnusable(
        f"the kernel cache {place} cannot be written: {error}; free space, or set {settings.CACHE_VARIABLE}, TMPDIR"
    )


def _keep(artifact: Artifact, made_from: dict[str, Any], key: str) -> None:
    root = directory()
    path = root / f"{key}.{artifact.backend}"
    _replace(path, artifact.save)
    facts = asdict(artifact.facts)
    record = {
        "backend": artifact.backend,
        "facts": facts,
        "sha256": _checksum(path, facts),
        "made_from": made_from,
    }
    _replace(root / f"{key}.json", lambda file: file.write_text(json.dumps(record, indent=1)))


def _checksum(path: Path, facts: Any) -> str:
    """Checksum of a compiled object and of the facts beside it."""
    return hashlib.sha256(_read(path) + json.dumps(facts, sort_keys=True).encode()).hexdigest()


def _read(path: Path) -> bytes:
    """The content of a regular file. ValueError for anything else: opening a FIFO would wait for its writer."""
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK)) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise ValueError(f"{path.name} is no regular file")
        return file.read()


def _remove(path: Path) -> None:
    """Removes whatever lies there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _replace(path: Path, write: Callable[[Path], object]) -> None:
    """Writes a file into ``<key>.new`` and renames it into place, so that nobody ever sees half of it."""
    fresh = path.with_suffix(".new") / path.name
    write(fresh)
    with fresh.open("rb") as file:
        os.fsync(file.fileno())
    if path.is_dir():  # anything else is replaced as it is
        _remove(path)
    fresh.replace(path)


def _after_fork() -> None:
    global _lock
    _lock = threading.RLock()
    _loaded.clear()


os.register_at_fork(after_in_child=_after_fork)
