"""GEMM: the declaration. ``out = activation(alpha * a @ b + beta * c + bias)``; public functions in ``matmul.py``.

Operands are as the caller has them: a ``([B,] M, K)``, b ``([B,] K, N)``, c and out ``([B,] M, N)``. A field like
``b_major=k`` names the contiguous extent, so ``weight.t()`` of an ``(N, K)`` weight is ``b_major=k``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from cutekernels.errors import UnsupportedProblem
from cutekernels.kernels.cute.parts.smem import GemmSmem, SkinnySmem, SpecializedSmem
from cutekernels.op import Config, Op, Problem, Work, extent, knob, ladder, plain
from cutekernels.ops.gemm import multistage, skinny, specialized
from cutekernels.ops.gemm.launch import AddressedLaunch, addressed, contiguous
from cutekernels.ops.gemm.multistage import ELEMENT_BYTES

if TYPE_CHECKING:
    from cutekernels.backends import Artifact
    from cutekernels.gpu import GpuSpec

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda x: x,
    "relu": torch.relu,
    "gelu": torch.nn.functional.gelu,
    "gelu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
    "silu": torch.nn.functional.silu,
}
WIDEST = 8  # elements in 16 bytes


@dataclass(frozen=True)
class GemmProblem(Problem):
    """Extents, majors, alignments (elements), epilogue.

    ``wide`` asks for 64-bit strides: some operand spans 2^31 elements or more. ``c`` names C's contiguous extent,
    ``strided`` a C with none. Alignments divide the address, every stride but the contiguous one, and
    the contiguous extent.
    """

    m: int = extent(ladder)
    n: int = extent()
    k: int = extent()
    batch: int = extent(default=1)
    dtype: str = plain("bf16", "fp16")
    a_major: str = plain("k", "m")
    b_major: str = plain("n", "k")
    out_major: str = plain("n", "m")
    c: str = plain("none", "n", "m")
    bias: str = plain("none", "same", "fp32")
    activation: str = plain(*ACTIVATIONS)
    accumulate: str = plain("fp32", "fp16")
    a_align: int = plain(8, 4, 2, 1)
    b_align: int = plain(8, 4, 2, 1)
    c_align: int = plain(8, 4, 2, 1)
    out_align: int = plain(8, 4, 2, 1)
    batched: bool = plain(False, True)
    wide: bool = plain(False, True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.accumulate == "fp16" and self.dtype != "fp16":
            raise UnsupportedProblem(f"accumulate='fp16' is for fp16 operands; they are {self.dtype}")
        if self.batch != 1 and not self.batched:
            raise UnsupportedProblem(f"batch={self.batch} needs batched=1")
        contiguous = [("a", self.a_major), ("b", self.b_major), ("out", self.out_major)]
        if self.c != "none":
            contiguous.append(("c", self.c))
        for operand, major in contiguous:
            length, align = getattr(self, major), getattr(self, f"{operand}_align")
            if length % align:
                fits = math.gcd(length, WIDEST)
                raise UnsupportedProblem(
                    f"{major}={length} is contiguous in {operand}, so {operand}_align must divide it; "
                    f"it is {align}: write {operand}_align={fits}"
                )

    def bucket(self) -> GemmProblem:
        """The epilogue hardly moves the best tile, so one tuning serves every bias, activation and C; and both types,
        which take the same bytes and the same time (H200, 64 tokens, K = 3584: 3584 columns 8.78 and 8.79 us, 18944
        columns 35.3 and 35.2; 2026-11-22).
        """
        plain = super().bucket().replace(bias="none", activation="none", c="none", c_align=WIDEST, wide=False)
        return plain if self.accumulate == "fp16" else plain.replace(dtype="bf16")

    @property
    def transposed(self) -> bool:
        """Computed as ``out^T = b^T a^T``, so that the kernel's output rows are contiguous."""
        return self.out_major == "m"

    def sides(self) -> tuple[Side, Side]:
        """What the kernel sees: the operand of its tile rows and that of its tile columns."""
        a = Side(self.m, self.a_major == "k", self.a_align)
        b = Side(self.n, self.b_major == "k", self.b_align)
        return (b, a) if self.transposed else (a, b)


@dataclass(frozen=True, slots=True)
class Side:
    """One multiplied operand as the kernel sees it."""

    extent: int
    k_major: bool
    align: int


@dataclass(frozen=True)
class GemmConfig(Config):
    """The knobs of four schedules in ``kernels/cute/``: ``multistage.py``, ``specialized.py`` and, for a few
    tokens, ``skinny.py`` and ``gemm_stream.py``.
    """

    tile_m: int = knob(16, *specialized.TILES)
    tile_n: int = knob(8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
    tile_k: int = knob(32, 64, 128, 256)
    warps_m: int = knob(1, 2, 4)
    warps_n: int = knob(1, 2, 4)
    stages: int = knob(2, 3, 4, 5, 6, 8, 12)
    raster: int = knob(1, 8, 16)
    ctas_per_sm: int = knob(1, 2, 3)
    persistent: bool = knob(False, True, added=True)
    body: str = knob("multistage", "skinny", "stream", "specialized", added=True)
    warps_k: int = knob(1, 2, 4, 8, added=True)
    split_k: int = knob(1, 2, 4, added=True)
    pdl: bool = knob(False, True, added=True)
    ahead: int = knob(0, 1, 2, 4, 8, added=True)

    @classmethod
    def every(cls) -> Iterator[GemmConfig]:
        """The whole space: each schedule's own."""
        return iter(_every())

    @property
    def warps(self) -> int:
        return self.warps_m * self.warps_n * self.warps_k

    @property
    def threads(self) -> int:
        return specialized.threads(self) if self.body == "specialized" else 32 * self.warps

    @property
    def smem(self) -> GemmSmem | SkinnySmem | SpecializedSmem:
        if self.body == "specialized":
            return specialized.smem(self)
        if self.body == "multistage":
            return GemmSmem(self.tile_m, self.tile_n, self.tile_k, self.stages, self.persistent)
        return skinny.smem(self)

    @property
    def shares_tiles(self) -> bool:
        """Whether CTAs share a tile's K by way of a workspace."""
        return (self.split_k > 1 and self.body == "skinny") or self.body == "stream"

    @property
    def warp_tile(self) -> tuple[int, int]:
        return self.tile_m // self.warps_m, self.tile_n // self.warps_n


# What each schedule searches; a knob that is missing keeps its first value.
BODIES: dict[str, dict[str, tuple[Any, ...]]] = {
    "multistage": {
        "tile_m": (32, 64, 128, 256),
        "tile_n": (32, 64, 128, 256),
        "tile_k": (32, 64),
        "warps_m": (1, 2, 4),
        "warps_n": (1, 2, 4),
        "stages": (2, 3, 4, 6),
        "raster": (1, 8, 16),
        "ctas_per_sm": (1, 2, 3),
        "persistent": (False, True),
    },
    "skinny": {
        "tile_m": (16, 32, 64, 128),
        "tile_n": (8, 16, 24, 32, 48, 64, 96, 128),
        "tile_k": (64, 128, 256),
        "warps_m": (1, 2, 4),
        "warps_k": (1, 2, 4, 8),
        "stages": (3, 4, 5, 6, 8),
        "split_k": (1, 2, 4),
        "pdl": (False, True),
        "ahead": (0, 2, 4),
    },
    "stream": {
        "tile_m": (64, 128),
        "tile_n": (24, 32, 48, 64, 96, 128),
        "tile_k": (64, 128),
        "warps_m": (1, 2, 4),
        "warps_k": (1, 2, 4),
        "stages": (3, 4, 5, 6),
        "ctas_per_sm": (1, 2),
        "pdl": (False, True),
    },
    "specialized": {
        "tile_m": specialized.TILES,
        "tile_n": specialized.TOKEN_TILES,
        "tile_k": (64, 128),
        "stages": (2, 3, 4, 5, 6, 8, 12),
        "ctas_per_sm": (1, 2),
        "split_k": (1, 2),
        "pdl": (False, True),
        "ahead": (0, 1, 2, 4, 8),
    },
}


class Gemm(Op[GemmProblem, GemmConfig]):
    """Arguments: a, b, c or None, bias or None, alpha, beta. Result: out."""

    name = "gemm"
    revision = 1
    Problem = GemmProblem
    Config = GemmConfig
    suite = (
        "m=512 n=512 k=512",
        "m=4096 n=4096 k=4096",
        "m=4096 n=4096 k=4096 dtype=fp16 accumulate=fp16",
        "m=1024 n=1024 k=1024 b_major=k c=n bias=fp32 activation=gelu",
        "m=2048 n=4608 k=3584 b_major=k bias=same",
        "m=256 n=4096 k=14336 b_major=k activation=silu",
        "m=16 n=4096 k=4096 b_major=k",
        "m=1 n=4096 k=4096 b_major=k",
        "m=384 n=512 k=320 a_major=m b_major=n out_major=m c=m activation=relu dtype=fp16",
        "m=384 n=512 k=320 a_major=m b_major=k c=n activation=gelu_tanh",
        "m=100 n=300 k=500 a_align=4 b_align=4 out_align=4",
        "m=77 n=129 k=131 a_align=1 b_align=1 out_align=1 c=n c_align=1 bias=same dtype=fp16",
        "m=130 n=200 k=64 batch=7 batched=1",
    )

    # -- rules

    def why_not(self, p: GemmProblem, c: GemmConfig, gpu: GpuSpec) -> str | None:
        return next(self._broken(p, c, gpu), None)

    def _broken(self, p: GemmProblem, c: GemmConfig, gpu: GpuSpec) -> Iterator[str]:
        for name, allowed in _OWN_VALUES[c.body]:
            if getattr(c, name) not in allowed:
                yield f"body={c.body} takes {name} from {', '.join(map(str, allowed))}; it is {getattr(c, name)}"
        yield from _SCHEDULES[c.body].broken(p, c, gpu)

    def valid(self, p: GemmProblem, gpu: GpuSpec) -> Iterator[GemmConfig]:
        few, special = skinny.fitting_tiles(p), specialized.fitting_tiles(p)
        fitting = {"multistage": _SPACE["tile_n"], "skinny": few, "stream": few, "specialized": special}
        tiles = {(body, tile) for body in _bodies(p, gpu) for tile in fitting[body]}  # first the rule that most break
        return (c for c in _every() if (c.body, c.tile_n) in tiles and self.why_not(p, c, gpu) is None)

    # -- choice

    def default(self, p: GemmProblem, gpu: GpuSpec) -> GemmConfig:
        """The model's best of a shortlist."""
        return _default(self, p, gpu)

    def estimate_us(self, p: GemmProblem, c: GemmConfig, gpu: GpuSpec) -> float:
        """Its schedule's model."""
        return float(_SCHEDULES[c.body].estimate_us(p, c, gpu))

    # -- kernel

    def build(self, p: GemmProblem, c: GemmConfig, gpu: GpuSpec) -> Artifact:
        import cutlass
        from cutlass.cute.runtime import make_fake_tensor

        from cutekernels.backends import cute as backend

        body = multistage.body(p, c, gpu) if c.body == "multistage" else _SCHEDULES[c.body].body(p, c)
        dtype = {"bf16": cutlass.BFloat16, "fp16": cutlass.Float16}[p.dtype]
        cute = cutlass.cute
        if addressed(p, c):
            return self._addressed(p, body, dtype, gpu)
        extents = {name: cute.sym_int(divisibility=divisibility(p, name)) for name in "mnk"}
        batch = cute.sym_int()

        def operand(first: str, second: str, major: str, align: int) -> Any:
            pitch = cute.sym_int(64 if p.wide else 32, divisibility=align)
            stride: tuple[Any, ...] = (pitch, 1) if major == second else (1, pitch)
            shape: tuple[Any, ...] = (extents[first], extents[second])
            if p.batched:
                shape, stride = (batch, *shape), (cute.sym_int(64 if p.wide else 32, divisibility=align), *stride)
            return make_fake_tensor(dtype, shape, stride=stride, assumed_align=align * ELEMENT_BYTES)

        bias = None
        if p.bias != "none":
            kind = cutlass.Float32 if p.bias == "fp32" else dtype
            bias = make_fake_tensor(kind, (extents["n"],), stride=(1,), assumed_align=kind.width // 8)
        workspace: list[Any] = []
        if c.shares_tiles:
            whole = [(cutlass.Float32, 16), (cutlass.Int32, 4)]
            workspace = [make_fake_tensor(t, (cute.sym_int(),), stride=(1,), assumed_align=n) for t, n in whole]
        return backend.compile(
            body.shared if workspace else body,
            operand("m", "n", p.out_major, p.out_align),
            operand("m", "k", p.a_major, p.a_align),
            operand("k", "n", p.b_major, p.b_align),
            None if p.c == "none" else operand("m", "n", p.c, p.c_align),
            bias,
            cutlass.Float32(1.0),
            cutlass.Float32(0.0),
            *workspace,
            gpu=gpu,
        )

    def _addressed(self, p: GemmProblem, body: Any, dtype: Any, gpu: GpuSpec) -> Artifact:
        from cutlass import Float32, Int32
        from cutlass.cute import AddressSpace
        from cutlass.cute.runtime import make_ptr

        from cutekernels.backends import cute as backend
        from cutekernels.kernels.cute.addressed import Addressed, Operand

        aligns = (p.out_align, p.a_align, p.b_align)
        out, a, b = (Operand(along, align) for along, align in zip(contiguous(p), aligns, strict=True))
        m, n, k = (divisibility(p, name) for name in "mnk")
        return backend.compile(
            Addressed(body, out, a, b, (m, n, k)),
            *[make_ptr(dtype, 16, AddressSpace.gmem, assumed_align=o.align * ELEMENT_BYTES) for o in (out, a, b)],
            *[Int32(1) for _ in range(6)],
            Float32(1.0),
            Float32(0.0),
            gpu=gpu,
            names_stream=True,
        )

    def bind(self, p: GemmProblem, c: GemmConfig, kernel: Callable[..., Any]) -> Callable[..., Any]:
        if 0 in (p.m, p.n, p.batch):
            return _nothing
        if addressed(p, c):
            return AddressedLaunch(kernel, contiguous(p))
        return skinny.bind(p, c, kernel)  # a kernel's arguments are out, a, b, c, bias, alpha, beta already

    # -- mathematics

    def outputs(self, p: GemmProblem, *args: Any) -> tuple[Tensor, ...]:
        a = args[0]
        shape = (p.batch, p.m, p.n) if p.batched else (p.m, p.n)
        if p.out_major == "n":
            return (a.new_empty(padded(shape, p.out_align))[..., : p.n],)
        swapped = (*shape[:-2], p.n, p.m)
        return (a.new_empty(padded(swapped, p.out_align))[..., : p.m].mT,)

    def sample(self, p: GemmProblem, device: str, seed: int) -> tuple[Any, ...]:
        generator = torch.Generator(device=device).manual_seed(seed)
        lead = (p.batch,) if p.batched else ()

        def operand(first: int, second: int, contiguous_last: bool, align: int) -> Tensor:
            shape = (*lead, first, second) if contiguous_last else (*lead, second, first)
            t = torch.randn(padded(shape, align), generator=generator, device=device, dtype=torch.float32)
            t = t.to(DTYPES[p.dtype])[..., : shape[-1]]
            return t if contiguous_last else t.mT

        a = operand(p.m, p.k, p.a_major == "k", p.a_align)
        b = operand(p.k, p.n, p.b_major == "n", p.b_align)
        c = None if p.c == "none" else operand(p.m, p.n, p.c == "n", p.c_align)
        bias = None
        if p.bias != "none":
            bias = torch.randn(p.n, generator=generator, device=device, dtype=torch.float32)
            bias = bias if p.bias == "fp32" else bias.to(DTYPES[p.dtype])
        # A scale that keeps results near 1, where an activation is neither linear nor saturated.
        return a, b, c, bias, (1.0 / max(1, p.k)) ** 0.5, 0.0 if c is None else 0.5

    def reference(self, p: GemmProblem, *args: Any) -> tuple[Tensor, ...]:
        return (reference(*args, activation=p.activation),)

    def work(self, p: GemmProblem) -> Work:
        outputs = p.batch * p.m * p.n
        moved = p.batch * (p.m * p.k + p.k * p.n) + outputs * (1 if p.c == "none" else 2)
        bias = 0 if p.bias == "none" else p.n * (4 if p.bias == "fp32" else ELEMENT_BYTES)
        return Work(flops=2.0 * outputs * p.k, bytes=float(moved * ELEMENT_BYTES + bias))


GEMM = Gemm()


def reference(
    a: Tensor, b: Tensor, c: Tensor | None, bias: Tensor | None, alpha: float, beta: float, *, activation: str
) -> Tensor:
    """The same mathematics in plain PyTorch: in fp64 (fp32 would leave an error of its own), rounded once."""
    x = alpha * (a.double() @ b.double())
    if c is not None and beta != 0.0:
        x = x + beta * c.double()
    if bias is not None:
        x = x + bias.double()
    return ACTIVATIONS[activation](x).to(a.dtype)


# ---- arithmetic of the rules ----------------------------------------------------------------------------


def divisibility(p: GemmProblem, name: str) -> int:
    """What the compiled kernel may assume of an extent: the widest vector along it."""
    along = [(p.a_major, p.a_align), (p.b_major, p.b_align), (p.out_major, p.out_align)]
    if p.c != "none":
        along.append((p.c, p.c_align))
    return max((align for major, align in along if major == name), default=1)


def padded(shape: tuple[int, ...], align: int) -> tuple[int, ...]:
    """``shape`` with its last extent grown so that its pitch divides by ``align``, and by no more where that is < 8."""
    pitch = -(-shape[-1] // WIDEST) * WIDEST + (0 if align == WIDEST else align)
    return (*shape[:-1], pitch)


def _nothing(*args: Any) -> None:
    """The launch of an empty problem."""


_SPACE = GemmConfig.space()
# What each knob may be under a body, in the order of the fields.
_OWN_VALUES = {
    body: tuple((name, own.get(name, (body,) if name == "body" else values[:1])) for name, values in _SPACE.items())
    for body, own in BODIES.items()
}


@cache
def _every() -> tuple[GemmConfig, ...]:
    return tuple(c for body in BODIES for c in _spanned(body))


def _spanned(body: str, **among: tuple[Any, ...]) -> Iterator[GemmConfig]:
    """Every config of ``body``, some knobs confined to ``among``; ``ahead`` is for ``pdl`` alone."""
    values = dict(_OWN_VALUES[body]) | among
    for chosen in product(*values.values()):
        knobs = dict(zip(values, chosen, strict=True))
        if knobs["pdl"] or not knobs["ahead"]:
            yield GemmConfig(**knobs)


_SCHEDULES: dict[str, Any] = {
    "multistage": multistage,
    "skinny": skinny,
    "stream": skinny,
    "specialized": specialized,
}


# Of configs of one estimate; the least is preferred.
_PREFERENCES: dict[str, Callable[[GemmConfig], Any]] = {
    "skinny": skinny.preference,
    "specialized": specialized.preference,
}


def _bodies(p: GemmProblem, gpu: GpuSpec) -> set[str]:
    """The schedules that take ``p``, whatever the config."""
    few = next(skinny.refused(p), None) is None
    special = next(specialized.refused(p, gpu), None) is None
    return {"multistage"} | ({"skinny", "stream"} if few else set()) | ({"specialized"} if special else set())


@cache
def _default(op: Gemm, p: GemmProblem, gpu: GpuSpec) -> GemmConfig:
    """The model's best of one schedule, since their models do not compare: of skinny for few tokens, of specialized
    where it can be, of multistage.
    """
    bodies = _bodies(p, gpu)
    special = "specialized" in bodies
    few = specialized.least_tokens(p, gpu) if special else skinny.DEFAULT_TOKENS + 1
    preferred = (["skinny"] if p.m < few else []) + ["specialized", "multistage"]
    tiles = {"skinny": [skinny.usual_tile(p)], "specialized": specialized.fitting_tiles(p)}
    for body in (b for b in preferred if b in bodies):
        usual = (c for c in _shortlist(body) if c.tile_n in tiles.get(body, _SPACE["tile_n"]))
        candidates = [c for c in usual if op.why_not(p, c, gpu) is None]
        if candidates:
            among_equals = _PREFERENCES.get(body, str)
            return min(candidates, key=lambda c: (op.estimate_us(p, c, gpu), among_equals(c)))
    raise AssertionError(f"no config for {p} on {gpu.name}")


@cache
def _shortlist(body: str) -> tuple[GemmConfig, ...]:
    if body == "skinny":
        few = {"tile_n": skinny.USUAL_TILES, "tile_k": (128, 256), "stages": (3, 5, 8), "ahead": (0, 2, 4)}
        return tuple(_spanned(body, **few))
    if body == "specialized":
        return tuple(_spanned(body, stages=(4, 5, 6, 8, 12), ahead=(0, 1, 2, 4)))
    return tuple(
        GemmConfig(tile_m, tile_n, tile_k, warps_m, warps_n, stages, raster, ctas, persistent)
        for tile_m, tile_n, warps_m, warps_n in multistage.SHORTLIST
        for tile_k in (32, 64)
        for stages in (2, 3, 4, 6)
        for raster in (1, 8, 16)
        for ctas in (1, 2, 3)
        for persistent in (False, True)
    )
