"""Triton backend: compiled for any GPU on any machine, saved as a recipe, launched with little overhead.

The saved file is a *recipe* (JSON: function, signature, constexprs, target), not a binary: Triton keeps binaries in
a disk cache of its own under our cache directory, keyed by source, options and version. Loading a recipe therefore
recompiles only when one of those changed, or when what lies there has not the recipe's checksum.

A recipe is untrusted text: its shape and types are checked, and it can name nothing but a ``@triton.jit``
function of ``cutekernels.kernels.triton``.

Works with Triton 3.6 to 3.9, which agree on everything used here.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar

from cutekernels import settings
from cutekernels.backends import Artifact, Facts, own_directory
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
    facts: Facts | None = None
    sha256: str = ""  # of the binary and its metadata, see _checksum

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
        numbers = () if self.facts is None else (self.facts.registers, self.facts.stack_bytes, self.facts.smem_bytes)
        yield "facts are whole numbers", [n for n in numbers if type(n) is not int or n < 0]
        yield "the checksum is text", [] if isinstance(self.sha256, str) else [self.sha256]

    def jit_function(self) -> Any:
        """The ``@triton.jit`` function the recipe names. CompileError for anything else."""
        from triton.runtime.jit import JITFunction

        try:
            fn = getattr(import_module(self.module), self.function, None)
        except ImportError as error:
            raise CompileError(f"{self.module} cannot be imported: {error}; rebuild the cached kernel") from error
        if not isinstance(fn, JITFunction):
            raise CompileError(f"{self.module} has no Triton kernel {self.function!r}; rebuild the cached kernel")
        if list(fn.arg_names) != list(self.signature):
            raise CompileError(
                f"{self.function} takes ({', '.join(fn.arg_names)}), the recipe gives ({', '.join(self.signature)}); "
                "rebuild the cached kernel"
            )
        return fn

    def dump(self) -> str:
        facts = self.facts and [self.facts.registers, self.facts.stack_bytes, self.facts.smem_bytes]
        return json.dumps({**vars(self), "facts": facts}, indent=1)

    @classmethod
    def parse(cls, text: str) -> Recipe:
        """The recipe in ``text``. CompileError unless every field is there and legal."""
        try:
            values = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise CompileError(f"a Triton recipe is JSON: {error}; rebuild the cached kernel") from error
        expected = set(cls.__dataclass_fields__)
        if not isinstance(values, dict) or set(values) != expected:
            raise CompileError(
                f"a Triton recipe has the fields {', '.join(sorted(expected))}; rebuild the cached kernel"
            )
        facts = values.pop("facts")
        if not isinstance(facts, list) or len(facts) != 3:
            raise CompileError("a Triton recipe's facts are three numbers; rebuild the cached kernel")
        return cls(**values, facts=Facts(*facts))


# ---- compiling ------------------------------------------------------------------------------------------


def _directory() -> Path:
    """Directory of Triton's binaries, created 0700. CompileError where another user could have written them."""
    return own_directory(settings.load().cache_dir / "triton")


@contextmanager
def _triton_cache(anew: bool) -> Iterator[None]:
    """Triton's disk cache under our own directory, for the duration of one compile; ``anew`` only writes to it."""
    from triton import knobs

    directory = _directory()
    with _compiling, knobs.cache.scope(), knobs.compilation.scope():
        vars(knobs.compilation)["always_compile"] = anew
        # Like `knobs.cache.dir = ...`, which would also export TRITON_CACHE_DIR.
        vars(knobs.cache)["dir"] = str(directory)
        yield


def _checksum(compiled: Any) -> str:
    """A hash of the binary and of the metadata that a launch reads: shared memory, warps, name."""
    metadata = json.dumps(compiled.metadata._asdict(), sort_keys=True, default=str)
    return hashlib.sha256(compiled.asm["cubin"] + metadata.encode()).hexdigest()


def _verified(recipe: Recipe) -> Any:
    """Triton's ``CompiledKernel`` with the recipe's checksum; a damaged one in its disk cache is compiled again."""
    with suppress(CompileError):
        compiled = _compile(recipe, anew=False)
        if _checksum(compiled) == recipe.sha256:
            return compiled
    compiled = _compile(recipe, anew=True)
    if _checksum(compiled) != recipe.sha256:
        raise CompileError(f"{recipe.function} compiles to another binary than the recipe's; rebuild the cached kernel")
    return compiled


def _compile(recipe: Recipe, *, anew: bool) -> Any:
    """Triton's ``CompiledKernel``, from its disk cache where that has it, unless ``anew``."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    fn = recipe.jit_function()
    source = ASTSource(
        fn=fn,
        signature=recipe.signature,
        constexprs=recipe.constexprs,
        attrs={(fn.arg_names.index(name),): [["tt.divisibility", n]] for name, n in recipe.divisible.items()},
    )
    # Explicit: Triton 3.9 warns where it is left out, and 3.10 changes the default.
    options = {"enable_fp_fusion": True, **recipe.options}
    with _triton_cache(anew):
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
    if DEPENDENT in fn.arg_names:
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
    compiled = _compile(recipe, anew=True)  # nothing vouches for what Triton's cache may hold
    static = resource_usage(compiled.asm["cubin"])[compiled.metadata.name]
    # Triton requests all its shared memory at launch; the binary declares none.
    facts = replace(static, smem_bytes=static.smem_bytes + compiled.metadata.shared)
    return TritonArtifact(replace(recipe, facts=facts, sha256=_checksum(compiled)), compiled)


@dataclass(frozen=True, eq=False)
class TritonArtifact(Artifact):
    """One compiled Triton kernel and the recipe to rebuild it."""

    backend: ClassVar[str] = "triton"
    recipe: Recipe
    compiled: Any

    @property
    def facts(self) -> Facts:  # type: ignore[override]
        assert self.recipe.facts is not None
        return self.recipe.facts

    @property
    def ptx(self) -> str:
        return str(self.compiled.asm["ptx"])

    def save(self, path: Path) -> None:
        path.write_text(self.recipe.dump())

    @classmethod
    def load(cls, path: Path) -> Kernel:
        """The launchable kernel of the recipe in ``path``. CompileError for a damaged or hostile one."""
        try:
            text = path.read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise CompileError(f"{path} is not a readable Triton recipe: {error}") from error
        recipe = Recipe.parse(text)
        return launcher(recipe, _verified(recipe))

    def kernel(self) -> Kernel:
        return launcher(self.recipe, self.compiled)


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

    def __init__(self, recipe: Recipe, compiled: Any) -> None:
        import torch

        self._recipe = recipe
        self._current_device: Callable[[], int] = torch._C._cuda_getDevice if torch.cuda.is_available() else _no_cuda
        self._current_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", lambda _device: 0)
        types = list(recipe.signature.values())
        trailing = len(types) - max((i + 1 for i, t in enumerate(types) if t != "constexpr"), default=0)
        self._constants = (None,) * trailing
        self._needed = len(types) - trailing
        self._unclaimed = [compiled]
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

    def settled(self, grid: tuple[int, int, int], numbers: Sequence[Any], others: int) -> Fire:
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
                own = self._unclaimed.pop() if self._unclaimed else _verified(self._recipe)
                run = own.run  # loads the binary, and on Triton 3.6 builds the launcher of this signature
                self._owners.append(own)  # keeps the binary loaded
                self._loaded[device] = _entry(run, own.function, own.packed_metadata)
            return self._loaded[device]


def launcher(recipe: Recipe, compiled: Any) -> Kernel:
    """The launchable kernel over Triton's ``compiled``."""
    return TritonKernel(recipe, compiled)


def _entry(run: Any, function: int, metadata: Any) -> _Loaded:
    """The cheapest way to call ``run``, Triton's launcher of one kernel.

    It is a Python object that allocates scratch memory, which our kernels do not use, and passes everything on to a C
    function. Where that function's form is known, it is called directly.
    """
    import triton

    hooks = (None, None, None)  # launch metadata, on entering, on leaving
    form = _FORMS.get(".".join(triton.__version__.split(".")[:2]))
    if form is None or type(run).__name__ != "CudaLauncher" or run.global_scratch_size or run.profile_scratch_size:
        return run, (function, metadata, *hooks), False
    flags = (function, run.launch_cooperative_grid, run.launch_pdl)
    scratch = (None, None)
    if form == "flat":
        return run.launch, (*flags, *scratch, metadata, *hooks), False
    return run.launch, (*flags, metadata, *hooks, *scratch, run.arg_annotations, run.kernel_signature), True


# Form of the C function by Triton version: "flat" is one function per signature that takes each argument by itself,
# "packed" one function that takes a tuple and the types. Other versions go through Triton's own launcher.
_FORMS = {"3.6": "flat", "3.7": "packed"}


def _no_cuda() -> int:
    raise CompileError("no CUDA device is visible, so a compiled kernel cannot be launched; run it where a GPU is")
