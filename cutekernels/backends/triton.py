"""Triton backend: compiled for any GPU on any machine, saved with its binary, launched with little overhead.

The saved file is one line of JSON (the recipe: function, signature, constexprs, target; and Triton's metadata of a
launch), then the cubin. Loading it compiles nothing. Triton's own disk cache is not used: the hash it names a kernel by
leaves out the constexpr globals of functions it calls that were not hashed before, so that hash, and nothing else of
the metadata or of the binary, depends on what was compiled before it in the process. It is replaced by the cubin's.

A saved file's recipe is checked nevertheless: shape and types, and it can name nothing but a ``@triton.jit`` function
of ``cutekernels.kernels.triton``.

Works with Triton 3.6 to 3.9. What of Triton's is private is at the end of the file, each with the public way around it.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import os
import re
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar

from cutekernels.backends import Artifact, Facts, environment
from cutekernels.backends.cubin import resource_usage
from cutekernels.errors import CompileError
from cutekernels.gpu import ARCHITECTURES, GpuSpec

KERNEL_PACKAGE = "cutekernels.kernels.triton"
WARP_SIZE = 32

Constant = int | bool | str | float
Kernel = Callable[..., None]

_TYPES = frozenset(
    ["constexpr", "i1", "i8", "i16", "i32", "i64", "u8", "u16", "u32", "u64", "fp32"]
    + ["*" + t for t in ("i1", "i8", "u8", "i16", "i32", "i64", "fp16", "bf16", "fp32", "fp64")]
)
_OPTIONS: dict[str, type] = {
    "num_warps": int,
    "num_stages": int,
    "maxnreg": int,
    "enable_fp_fusion": bool,
    "launch_pdl": bool,
}
DEPENDENT = "DEPENDENT"  # the last parameter of every kernel, see kernels/triton/dependent.py
_CAPABILITIES = frozenset(major * 10 + minor for major, minor in ARCHITECTURES)

_compiling = threading.Lock()


def _after_fork() -> None:
    global _compiling
    _compiling = threading.Lock()


os.register_at_fork(after_in_child=_after_fork)


# ---- a kernel's values ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Values:
    """The values a kernel takes, by name in the order of its launch.

    A parameter annotated with a NamedTuple is a group: each field is a value of the field's name, and of a field that
    is a NamedTuple itself, each inner field is one named ``field_inner``. Ops and launches know values, not groups.
    """

    parameters: dict[str, Any]  # with the NamedTuple of a group
    paths: dict[str, tuple[int, ...]]  # of each value: the parameter, the field in it
    defaults: dict[str, Constant]  # of values that a recipe may leave out, which are constexprs then

    @classmethod
    def of(cls, fn: Any) -> Values:
        """The values of a ``@triton.jit`` function."""
        found = cls({}, {}, {})
        for at, one in enumerate(inspect.signature(fn.fn).parameters.values()):
            found.parameters[one.name] = one.annotation
            found._add(one.annotation, "" if _fields(one.annotation) else one.name, (at,), one.default)
        return found

    def _add(self, kind: Any, name: str, path: tuple[int, ...], default: Any) -> None:
        fields = _fields(kind)
        if not fields:
            self.paths[name] = path
            if default is not _NO_DEFAULT:
                self.defaults[name] = default
            return
        given = kind._field_defaults if default is _NO_DEFAULT else default._asdict()
        for at, (field, inner) in enumerate(fields.items()):
            self._add(inner, f"{name}_{field}" if name else field, (*path, at), given.get(field, _NO_DEFAULT))

    def grouped(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """``values``, one for each name, as the kernel's parameters."""

        def group(kind: Any, name: str) -> Any:
            fields = _fields(kind)
            if not fields:
                return values[name]
            return kind(*[group(inner, f"{name}_{field}" if name else field) for field, inner in fields.items()])

        return {name: group(kind, "" if _fields(kind) else name) for name, kind in self.parameters.items()}


_NO_DEFAULT = inspect.Parameter.empty


def _fields(kind: Any) -> dict[str, Any]:
    """The fields of a NamedTuple with their annotations; of anything else none."""
    return {name: kind.__annotations__.get(name) for name in getattr(kind, "_fields", ())}


# ---- recipes --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Recipe:
    """Everything Triton needs to compile one kernel.

    ``signature`` maps every argument, in order, to its type (``"constexpr"`` for one whose value is in ``constexprs``,
    which any argument may be). ``divisible`` promises that a pointer (in bytes) or an integer argument is a multiple
    of a power of two, which lets Triton widen loads.
    """

    module: str
    function: str
    signature: dict[str, str]
    constexprs: dict[str, Constant]
    divisible: dict[str, int]
    options: dict[str, Constant]
    capability: int

    def __post_init__(self) -> None:
        for rule, broken in self._rules():
            if broken:
                raise CompileError(f"a Triton recipe breaks a rule: {rule}; got {', '.join(map(repr, broken))}")

    def _rules(self) -> Iterator[tuple[str, Sequence[object]]]:
        """Each rule with the values that break it; a rule may rely on those before it."""
        for text in (self.module, self.function):
            yield "module and function are text", [] if isinstance(text, str) else [text]
        inside = re.fullmatch(rf"{re.escape(KERNEL_PACKAGE)}(\.[a-z][a-z0-9_]*)+", self.module)
        yield f"the module is inside {KERNEL_PACKAGE}", [] if inside else [self.module]
        public = re.fullmatch(r"[a-z][a-z0-9_]*", self.function)
        yield "the function is a public identifier", [] if public else [self.function]
        for table in (self.signature, self.constexprs, self.divisible, self.options):
            named = isinstance(table, dict) and all(isinstance(key, str) for key in table)
            yield "signature, constexprs, divisible and options map names to values", [] if named else [table]
        types = self.signature.values()
        yield "argument types are Triton's", [t for t in types if not isinstance(t, str) or t not in _TYPES]
        constants = {n for n, t in self.signature.items() if t == "constexpr"}
        yield "each constexpr has one value", sorted(constants ^ set(self.constexprs))
        scalar = (int, bool, str, float)
        yield "constexprs are numbers, strings or bools", [v for v in self.constexprs.values() if type(v) not in scalar]
        yield "only run-time arguments are divisible", sorted(set(self.divisible) - (set(self.signature) - constants))
        divisors = self.divisible.values()
        yield "divisors are powers of two", [d for d in divisors if type(d) is not int or d < 1 or d & (d - 1)]
        wrong = [(n, v) for n, v in self.options.items() if type(v) is not _OPTIONS.get(n)]
        yield f"options are {', '.join(_OPTIONS)}", wrong
        known = type(self.capability) is int and self.capability in _CAPABILITIES
        yield f"the target is one of {sorted(_CAPABILITIES)}", [] if known else [self.capability]

    def jit_function(self) -> Any:
        """The ``@triton.jit`` function the recipe names. CompileError for anything else."""
        from triton.runtime.jit import JITFunction

        try:
            fn = getattr(import_module(self.module), self.function, None)
        except ImportError as error:
            raise CompileError(f"{self.module} cannot be imported: {error}; rebuild the cached kernel") from error
        if not isinstance(fn, JITFunction):
            raise CompileError(f"{self.module} has no Triton kernel {self.function!r}; rebuild the cached kernel")
        values = Values.of(fn)
        taken = [name for name in values.paths if name in self.signature or name not in values.defaults]
        if taken != list(self.signature):
            raise CompileError(
                f"{self.function} takes ({', '.join(taken)}), the recipe gives ({', '.join(self.signature)}); "
                "rebuild the cached kernel"
            )
        return fn

    def source(self) -> Any:
        """Triton's ``ASTSource`` of a launch: the types of all values in a row. CompileError as above."""
        from triton.compiler import ASTSource

        places = {name: (at,) for at, name in enumerate(self.signature)}
        return ASTSource(self.jit_function(), self.signature, {places[n]: v for n, v in self.constexprs.items()})

    def grouped_source(self) -> Any:
        """Triton's ``ASTSource`` to compile: types as the kernel groups its values. CompileError as above."""
        from triton.compiler import ASTSource

        fn = self.jit_function()
        values = Values.of(fn)
        omitted = {name: value for name, value in values.defaults.items() if name not in self.signature}
        signature = values.grouped(dict.fromkeys(omitted, "constexpr") | self.signature)
        constants = {values.paths[name]: value for name, value in (omitted | self.constexprs).items()}
        divisible = {values.paths[name]: [["tt.divisibility", n]] for name, n in self.divisible.items()}
        return ASTSource(fn, signature, constants, divisible)


# ---- binaries -------------------------------------------------------------------------------------------

_LAUNCHED: dict[str, type] = {"name": str, "shared": int, "num_warps": int, "target": dict}  # of all versions


@dataclass(frozen=True)
class Binary:
    """A compiled kernel: its recipe, Triton's metadata of a launch, the cubin."""

    recipe: Recipe
    metadata: dict[str, Any]
    cubin: bytes

    def dump(self) -> bytes:
        header = {"recipe": asdict(self.recipe), "metadata": self.metadata}
        return json.dumps(header).encode() + b"\n" + self.cubin

    @classmethod
    def parse(cls, data: bytes) -> Binary:
        """The binary in ``data``. CompileError unless every field is there and legal."""
        header, _, cubin = data.partition(b"\n")
        try:
            values = json.loads(header)
        except (ValueError, RecursionError) as error:
            raise CompileError(f"a saved Triton kernel begins with JSON: {error}; rebuild the cached kernel") from error
        if not isinstance(values, dict) or set(values) != {"recipe", "metadata"}:
            raise CompileError("a saved Triton kernel has a recipe and metadata; rebuild the cached kernel")
        recipe, metadata = values["recipe"], values["metadata"]
        expected = set(Recipe.__dataclass_fields__)
        if not isinstance(recipe, dict) or set(recipe) != expected:
            raise CompileError(
                f"a Triton recipe has the fields {', '.join(sorted(expected))}; rebuild the cached kernel"
            )
        if not isinstance(metadata, dict) or any(type(metadata.get(n)) is not t for n, t in _LAUNCHED.items()):
            raise CompileError(f"a kernel's metadata has {', '.join(_LAUNCHED)}; rebuild the cached kernel")
        return cls(Recipe(**recipe), metadata, cubin)

    def compiled(self) -> Any:
        """A new ``CompiledKernel`` of Triton's, which belongs to one device once it is loaded; compiles nothing.

        It reads files, as Triton's cache keeps them, or is compiled again where Triton does so no more. CompileError
        for a recipe or a binary that Triton cannot take.
        """
        from triton.compiler import CompiledKernel

        if not _from_files():
            return _compile(self.recipe)
        source = self.recipe.source()
        with tempfile.TemporaryDirectory(prefix="cutekernels-") as folder:
            group = {f"{source.name[:150]}{end}": Path(folder, f"kernel{end}") for end in (".json", ".cubin")}
            (described, code) = group.values()
            described.write_text(json.dumps(self.metadata))
            code.write_bytes(self.cubin)
            made = CompiledKernel.__new__(CompiledKernel)
            made.module = None  # what __del__ reads from Triton 3.8 on, where __init__ has failed too
            try:
                made.__init__(source, {name: str(path) for name, path in group.items()}, self.metadata["hash"])
            except Exception as error:  # whatever Triton makes of metadata that is not its own
                raise CompileError(f"Triton does not take the saved {self.recipe.function}: {error!r}") from error
            return made

    @property
    def spread(self) -> Callable[..., tuple[Any, ...]]:
        """From the values of a launch, in a row, to the arguments of :meth:`compiled`."""
        if _from_files():
            return lambda *values: values
        values, names = Values.of(self.recipe.jit_function()), list(self.recipe.signature)
        none = dict.fromkeys(values.paths)
        return lambda *row: (*values.grouped(none | dict(zip(names, row, strict=True))).values(),)


# ---- compiling ------------------------------------------------------------------------------------------


@contextmanager
def _kept_in(folder: str) -> Iterator[None]:
    """This thread's compilations go into ``folder``, and read no cache.

    Other threads, in which torch.compile may be at work, keep their cache.
    """
    managers = _managers()
    if managers is None:  # Triton's cache then: never read, since its keys leave out what a kernel depends on
        with _compiling, environment("TRITON_ALWAYS_COMPILE", "1"):
            yield
        return
    knobs, base, file_manager = managers

    class KernelFolder(base):  # type: ignore[misc,valid-type]
        def get_file(self, filename: str) -> str | None:
            return None

        def get_group(self, filename: str) -> dict[str, str] | None:
            return None

        def put(self, data: Any, filename: str, binary: bool = True) -> str:
            path = Path(folder, filename)
            path.write_bytes(data if isinstance(data, bytes) else str(data).encode())
            return str(path)

        def put_group(self, filename: str, group: dict[str, str]) -> None:
            pass

    own = threading.get_ident()
    with _compiling:
        theirs = knobs.manager_class or file_manager
        values = vars(knobs)
        before = values.get("manager_class")

        def chosen(key: str, **role: bool) -> Any:  # of dumps and overrides, which users ask for by name, in any thread
            return KernelFolder(key) if threading.get_ident() == own and not role else theirs(key, **role)

        values["manager_class"] = chosen  # like an assignment, which would also export TRITON_CACHE_MANAGER
        try:
            yield
        finally:
            values.pop("manager_class", None)
            if before is not None:
                values["manager_class"] = before


def _compile(recipe: Recipe) -> Any:
    """Triton's ``CompiledKernel``, compiled anew."""
    import triton
    from triton.backends.compiler import GPUTarget

    source = recipe.grouped_source()
    # Explicit: Triton 3.9 warns where it is left out, and 3.10 changes the default.
    options = {"enable_fp_fusion": True, **recipe.options}
    with tempfile.TemporaryDirectory(prefix="cutekernels-") as folder, _kept_in(folder):
        try:
            return triton.compile(source, target=GPUTarget("cuda", recipe.capability, WARP_SIZE), options=options)
        except Exception as error:
            inner: BaseException = error  # only the last cause names an error in a function that the kernel calls
            while inner.__cause__ is not None:
                inner = inner.__cause__
            raise CompileError(
                f"Triton could not compile {recipe.function} for compute capability {recipe.capability / 10}: "
                f"{type(inner).__name__}: {inner}"
            ) from error


def compile_kernel(
    fn: Any,
    *,
    signature: Mapping[str, str],
    constexprs: Mapping[str, Constant],
    divisible: Mapping[str, int],
    options: Mapping[str, Constant],
    gpu: GpuSpec,
) -> TritonArtifact:
    """Compile ``fn``, a ``@triton.jit`` function of ``cutekernels.kernels.triton``, for ``gpu``. Needs no GPU.

    Arguments are those of :class:`Recipe`, without those that follow from the GPU: kernels with a parameter DEPENDENT
    are launched as dependents of the preceding kernel where the GPU supports it. ``options`` are Triton's
    ``num_warps``, ``num_stages``, ``maxnreg`` and ``enable_fp_fusion`` (default True).

    Raises:
        CompileError: Triton or ptxas refused, or an argument breaks one of the recipe's rules.
    """
    major, minor = gpu.capability
    types, constants, chosen = dict(signature), dict(constexprs), dict(options)
    if DEPENDENT in Values.of(fn).paths:
        types[DEPENDENT], constants[DEPENDENT], chosen["launch_pdl"] = "constexpr", gpu.has_pdl, gpu.has_pdl
    recipe = Recipe(
        fn.__module__,
        fn.__name__,
        types,
        constants,
        {name: divisor for name, divisor in divisible.items() if divisor > 1},
        chosen,
        major * 10 + minor,
    )
    compiled = _compile(recipe)
    cubin = compiled.asm["cubin"]
    static = resource_usage(cubin)[compiled.metadata.name]
    # Triton requests all its shared memory at launch; the binary declares none.
    facts = replace(static, smem_bytes=static.smem_bytes + compiled.metadata.shared)
    # As JSON, which Triton writes and reads its metadata as too.
    metadata = json.loads(json.dumps(compiled.metadata._asdict() | {"hash": _digest(cubin)}, default=vars))
    return TritonArtifact(Binary(recipe, metadata, cubin), facts, compiled.asm.get("ptx", ""))


def _digest(cubin: bytes) -> str:
    return hashlib.sha256(cubin).hexdigest()


@dataclass(frozen=True, eq=False)
class TritonArtifact(Artifact):
    """One compiled Triton kernel."""

    backend: ClassVar[str] = "triton"
    binary: Binary
    facts: Facts
    ptx: str

    def save(self, path: Path) -> None:
        path.write_bytes(self.binary.dump())

    @classmethod
    def load(cls, path: Path) -> Kernel:
        """The launchable kernel in ``path``. CompileError for a damaged or hostile one."""
        try:
            data = path.read_bytes()
        except OSError as error:
            raise CompileError(f"{path} is not a readable Triton kernel: {error}") from error
        return TritonKernel(Binary.parse(data))

    def kernel(self) -> Kernel:
        return TritonKernel(self.binary)


# ---- launching ------------------------------------------------------------------------------------------

Fire = Callable[[list[int], tuple[Any, ...]], None]
_Loaded = tuple[Callable[..., None], tuple[Any, ...], bool]  # (function, what follows the stream, arguments as one)


class TritonKernel:
    """``kernel(grid, *args)``: launches on the current device and torch's current stream of it.

    ``grid`` is three ints; a zero in it launches nothing. ``args`` follow the signature: pointers as
    ``tensor.data_ptr()`` (an int saves Triton a method call and a driver query per tensor) and numbers. A value in a
    constexpr's place is ignored; constexprs at the end may be left out.

    Binaries belong to a device, so each device loads its own at its first launch. Where CUDA is initialized, the
    current device's binary is loaded at once, so that the first launch can be captured in a graph. Triton's launch
    hooks are not called.
    """

    def __init__(self, binary: Binary) -> None:
        import torch

        from cutekernels import torch_names

        self._binary = binary
        self._unclaimed = [binary.compiled()]  # at once: what Triton cannot take is no kernel
        self._current_device = torch_names.current_device if torch.cuda.is_available() else _no_cuda
        self._current_stream = torch_names.current_stream
        types = list(binary.recipe.signature.values())
        trailing = len(types) - max((i + 1 for i, t in enumerate(types) if t != "constexpr"), default=0)
        self._constants = (None,) * trailing
        self._needed = len(types) - trailing
        self._loaded: dict[int, _Loaded] = {}
        self._owners: list[Any] = []
        self._loading = threading.Lock()
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            self._load(self._current_device())

    def __call__(self, grid: tuple[int, int, int], *args: Any) -> None:
        device = self._current_device()
        launch, head, packed = self._loaded.get(device) or self._load(device)
        args += self._constants[len(args) - self._needed :]
        if packed:
            launch(*grid, self._current_stream(device), *head, args)
        else:
            launch(*grid, self._current_stream(device), *head, *args)

    def settle(self, grid: tuple[int, int, int], numbers: Sequence[Any], others: int) -> Fire:
        """``kernel(grid, *addresses, *numbers, *scalars)`` as ``fire(addresses, scalars)``, for the current device.

        ``others`` is the number of addresses and scalars. The caller makes sure that the device is current when it
        fires; the stream is looked up at each launch.
        """
        device = self._current_device()
        launch, head, packed = self._loaded.get(device) or self._load(device)
        current_stream = self._current_stream
        x, y, z = grid
        constants = self._constants[len(numbers) + others - self._needed :]

        def fire_packed(addresses: list[int], scalars: tuple[Any, ...]) -> None:
            launch(x, y, z, current_stream(device), *head, (*addresses, *numbers, *scalars, *constants))

        def fire(addresses: list[int], scalars: tuple[Any, ...]) -> None:
            launch(x, y, z, current_stream(device), *head, *addresses, *numbers, *scalars, *constants)

        chosen = fire_packed if packed else fire
        vars(chosen)["owner"] = self  # keeps the binary loaded
        return chosen

    def _load(self, device: int) -> _Loaded:
        with self._loading:
            if device not in self._loaded:
                own = self._unclaimed.pop() if self._unclaimed else self._binary.compiled()
                self._owners.append(own)  # keeps the binary loaded
                self._loaded[device] = _entry(own, self._binary.spread)  # loads it, and Triton 3.6 builds its launcher
            return self._loaded[device]


def _entry(own: Any, spread: Callable[..., tuple[Any, ...]]) -> _Loaded:
    """The cheapest way to launch ``own``, a CompiledKernel that is loaded.

    Triton's public way, ``own[grid](...)``, makes a function and passes everything on to a Python object that allocates
    scratch memory, which our kernels do not use; that one calls a C function. Where its form is known, it is called
    directly.
    """
    run, form = own.run, _form()
    scratch = ("global_scratch_size", "profile_scratch_size", "gsan_enabled")
    if form is None or type(run).__name__ != "CudaLauncher" or any(getattr(run, name, 0) for name in scratch):

        def launch(x: int, y: int, z: int, stream: int, *args: Any) -> None:
            own[x, y, z](*spread(*args), stream=stream)

        return launch, (), False
    hooks = (None, None, None)  # launch metadata, on entering, on leaving
    flags = (own.function, run.launch_cooperative_grid, run.launch_pdl)
    if form == "flat":
        return run.launch, (*flags, None, None, own.packed_metadata, *hooks), False
    tail = (own.packed_metadata, *hooks, None, None, run.arg_annotations, run.kernel_signature)
    return run.launch, (*flags, *tail), True


# ---- private names --------------------------------------------------------------------------------------

# Form of the C function by Triton version: "flat" is one function per signature that takes each argument by itself,
# "packed" one function that takes a tuple and the types. Other versions are launched the public way. That of 3.8
# is predicted: read from its source, launched on no card.
_FORMS = {"3.6": "flat", "3.7": "packed", "3.8": "packed", "3.9": "packed"}
_OF_LAUNCHER = {"launch", "launch_cooperative_grid", "launch_pdl"}
_OF_PACKED = {"arg_annotations", "kernel_signature"}


def _form() -> str | None:
    """The form of this Triton's launcher; None where its version, or a name of it, is not known."""
    import triton
    from triton.backends.nvidia import driver

    form = _FORMS.get(".".join(triton.__version__.split(".")[:2]))
    code = getattr(getattr(driver, "CudaLauncher", object).__init__, "__code__", None)
    names = code.co_names if code is not None else ()  # one in C tells none
    return form if {*_OF_LAUNCHER, *(_OF_PACKED if form == "packed" else ())} <= set(names) else None


def _from_files() -> bool:
    """Whether this Triton makes its CompiledKernel of files."""
    from triton import compiler

    return [*inspect.signature(compiler.CompiledKernel).parameters] == ["src", "metadata_group", "hash"]


def _managers() -> tuple[Any, type, type] | None:
    """``knobs.cache`` and Triton's classes of a cache; None where they have moved."""
    try:
        from triton.knobs import cache as knobs
        from triton.runtime.cache import CacheManager, FileCacheManager
    except ImportError:
        return None
    return (knobs, CacheManager, FileCacheManager) if hasattr(knobs, "manager_class") else None


def absent() -> dict[str, str]:
    """Private names that this Triton lacks, with what follows."""
    import triton

    found = {}
    if _form() is None:
        found[f"the launcher of Triton {triton.__version__}"] = "each launch goes Triton's public, slower way"
    if not _from_files():
        found["triton.compiler.CompiledKernel of files"] = "kernels are compiled again in each process"
    if _managers() is None:
        found["triton.knobs.cache.manager_class"] = "kernels that are compiled are in Triton's own cache too"
    return found


def _no_cuda() -> int:
    raise CompileError("no CUDA device is visible, so a compiled kernel cannot be launched; run it where a GPU is")
