"""CuTe DSL backend: cross-compiled for any GPU on any machine, saved as an object file, launched through TVM-FFI.

``compile`` takes a kernel body and fake tensors; the resulting object holds the host launcher and the device code
for one architecture. An object built on a CPU-only machine loads on the GPU in milliseconds. The DSL keeps state
per process and is not thread-safe, so compiling is under one lock, or better in child processes (a bad tile shape
can abort its process).
"""

from __future__ import annotations

import re
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

from cutekernels.backends import Artifact, Facts, environment
from cutekernels.backends.cubin import resource_usage
from cutekernels.environment import package_version
from cutekernels.errors import CompileError
from cutekernels.gpu import NO_TARGET, GpuSpec

_SYMBOL = "cutekernels_launch"
_ARCH_VARIABLE = "CUTE_DSL_ARCH"  # the DSL's environment variable, read when it is imported and once per compile

# For processes that compile and see no GPU. Without it the DSL and TVM-FFI ask the driver for one, which can take
# seconds. The architecture is none of a kernel's, so that objects are not loaded here.
WITHOUT_GPU = {"CUDA_VISIBLE_DEVICES": "", _ARCH_VARIABLE: NO_TARGET, "TVM_FFI_DISABLE_TORCH_C_DLPACK": "1"}

_compiling = threading.Lock()


def import_without_torch() -> None:
    """Imports TVM-FFI for a process that compiles and launches nothing: it would import torch, 2 s of CPU, first."""
    if "torch" in sys.modules:
        return
    sys.modules["torch"] = None  # type: ignore[assignment]  # its import fails, which TVM-FFI allows
    try:
        import tvm_ffi  # noqa: F401
    finally:
        del sys.modules["torch"]


# The host program stores the launch's dynamic shared memory into field 2 of the cudaLaunchConfig.
_LAUNCH_SMEM = re.compile(
    r"(?P<field>%\d+) = llvm\.getelementptr %\d+\[0, 2\] : \(!llvm\.ptr\) -> !llvm\.ptr, "
    r"!llvm\.struct<\(array<3 x i32>, array<3 x i32>, i64, ptr, ptr, i32\)>\s+"
    r"llvm\.store (?P<value>%\w+), (?P=field) : i64"
)


def type_of(name: str) -> Any:
    """The DSL's type of elements by their name in problems; ``"e8m0"`` is a byte, ``"ue5m3"`` a word, ``"fp8"`` two
    numbers in 16 bits.
    """
    import cutlass

    return {
        "bf16": cutlass.BFloat16, "fp16": cutlass.Float16, "fp32": cutlass.Float32, "i32": cutlass.Int32,
        "i64": cutlass.Int64, "u8": cutlass.Uint8, "e8m0": cutlass.Uint8, "ue5m3": cutlass.Int32,
        "bool": cutlass.Uint8, "fp8": cutlass.Int16,
    }[name]  # fmt: skip


def matrix(kind: Any, rows: Any, columns: Any, align: int) -> Any:
    """A fake of contiguous rows; ``align`` elements divide their address and pitch."""
    import cutlass
    from cutlass.cute.runtime import make_fake_tensor

    stride = (cutlass.cute.sym_int(divisibility=align), 1)
    return make_fake_tensor(kind, (rows, columns), stride=stride, assumed_align=align * kind.width // 8)


def dense(kind: Any, *shape: Any, align: int | None = None, bits: int = 32) -> Any:
    """A fake of contiguous rows, strides of so many ``bits`` apart, aligned to so many bytes or as an element is.

    None stands for an extent of a call.
    """
    import cutlass
    from cutlass.cute.runtime import make_fake_tensor

    sym = cutlass.cute.sym_int
    extents = tuple([sym() if extent is None else extent for extent in shape])
    stride = (*[sym(bits) for _ in shape[1:]], 1)
    return make_fake_tensor(kind, extents, stride=stride, assumed_align=align or kind.width // 8)


def bias(name: str, dtype: Any, *shape: Any, bits: int = 32) -> Any:
    """A fake bias of ``"same"`` type as the product, or in ``"fp32"``; None of ``"none"``."""
    import cutlass

    return None if name == "none" else dense(cutlass.Float32 if name == "fp32" else dtype, *shape, bits=bits)


class CuteArtifact(Artifact):
    """One compiled kernel, in memory."""

    backend: ClassVar[str] = "cute"

    def __init__(self, function: Any, facts: Facts) -> None:
        self._function = function
        self._object: bytes | None = None  # as last saved
        self.facts = facts

    def save(self, path: Path) -> None:
        self._function.export_to_c(str(path), _SYMBOL)
        self._object = path.read_bytes()

    @classmethod
    def load(cls, path: Path) -> Callable[..., Any]:
        import cutlass.cute as cute

        try:
            module = cute.runtime.load_module(str(path), enable_tvm_ffi=True)
            return getattr(module, _SYMBOL)  # type: ignore[no-any-return]
        except Exception as error:  # the loader raises any exception of the JIT linker
            raise CompileError(f"{path} is not a compiled kernel this DSL can load: {error}") from error

    def kernel(self) -> Callable[..., Any]:
        """As a later process loads it: a second host program, in memory, would take an eighth of a build more."""
        with tempfile.TemporaryDirectory(prefix="cutekernels-") as folder:
            path = Path(folder) / "kernel.o"
            if self._object is None:
                self.save(path)
            else:
                path.write_bytes(self._object)
            return self.load(path)


def compile(body: Any, *args: Any, gpu: GpuSpec, names_stream: bool = False) -> CuteArtifact:
    """Compile ``body(*args, stream)`` for ``gpu``; ``args`` are the DSL's fake tensors, scalars and None.

    The stream is torch's current one; with ``names_stream`` it is the last argument of each launch, an int.

    Raises:
        CompileError: the DSL or ptxas refused; its message is quoted.
    """
    import cutlass.cute as cute
    from cutlass.cute.runtime import make_fake_stream

    stream = make_fake_stream(use_tvm_ffi_env_stream=not names_stream)
    # The variable reaches what the compile option does not, where there is no GPU to query.
    own = environment(_ARCH_VARIABLE, gpu.target)
    engine = {"no_jit_engine": True} if _is_known() else {}  # where a GPU is: what is launched is loaded
    with _compiling, own, tempfile.TemporaryDirectory(prefix="cutekernels-") as dump:
        options = f"--enable-tvm-ffi --gpu-arch={gpu.target} --keep-cubin --dump-dir={dump}"
        try:
            with warnings.catch_warnings():
                # Long unrolled loops are intended: the masks of an unaligned tile hold a flag per element.
                warnings.simplefilter("ignore")
                function = cute.compile(body, *args, stream, options=options, **engine)
        except Exception as error:
            raise CompileError(
                f"{type(body).__name__} does not compile for {gpu.target}: {_first_lines(error)}"
            ) from error
    return CuteArtifact(function, _facts(function))


def _facts(function: Any) -> Facts:
    kernels = list(resource_usage(function.artifacts.CUBIN).values())
    dynamic = _dynamic_smem(str(function.ir_module)) if _is_known() else [0] * len(kernels)
    if not kernels or len(dynamic) != len(kernels):
        raise CompileError(
            f"expected one launch per kernel, found {len(dynamic)} for {len(kernels)}; has the DSL changed?"
        )
    return Facts(
        registers=max(k.registers for k in kernels),
        stack_bytes=max(k.stack_bytes for k in kernels),
        smem_bytes=max(k.smem_bytes for k in kernels) + max(dynamic),
    )


def _is_known() -> bool:
    """Whether this version's host programs and private options are known here."""
    return package_version("nvidia-cutlass-dsl").startswith("4.8.")


def absent() -> dict[str, str]:
    """Private parts of the DSL that this version lacks, each with the consequence."""
    if _is_known():
        return {}
    name = f"the host program of CuTe DSL {package_version('nvidia-cutlass-dsl')}"
    return {name: "a config with too much shared memory is found when it is launched"}


def _dynamic_smem(host: str) -> list[int]:
    """Bytes of dynamic shared memory of each launch in a host program."""
    found = []
    for launch in _LAUNCH_SMEM.finditer(host):
        constant = host.rfind(f"{launch['value']} = llvm.mlir.constant(", 0, launch.start())
        number = re.match(r"\((\d+) : i64\)", host[host.index("(", constant) :]) if constant >= 0 else None
        if number is None:
            raise CompileError("the launch's shared memory is not a constant in the host program; has the DSL changed?")
        found.append(int(number[1]))
    return found


def _first_lines(error: Exception) -> str:
    text = re.sub(r"\x1b\[[0-9;]*m", "", str(error))
    return " ".join(text.split())[:400]
