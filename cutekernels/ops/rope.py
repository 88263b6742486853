"""``rope``: rotary position embedding of queries and keys in one launch.

The rotation is orthogonal, so its gradient is the same op with the angles negated (``inverse``): there is no backward
op, and the op is differentiable as often as anyone likes. Below the declaration stand the public function and its
registration with torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import or_
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from cutekernels.errors import UnsupportedProblem
from cutekernels.op import Config, Problem, Work, exact, extent, knob, ladder, plain, power_of_two
from cutekernels.ops.shared import tensor_op
from cutekernels.ops.shared.tensor_op import DTYPE_NAMES, GPU_DTYPES, WIDEST_BYTES, TensorOp, register_inplace

if TYPE_CHECKING:
    from cutekernels.backends import Artifact
    from cutekernels.gpu import GpuSpec


# ---- declaration ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RopeProblem(Problem):
    """q of (batch, seq, heads_q, head_dim) and k of heads_kv heads; the first ``rotary`` channels of a head turn.

    ``table``: the cosines' and sines' type, fp32 or "same" as q's. ``positions``: from one start, from a start per
    batch entry, or one per token, in integers of type ``index``. ``layout``: "rows" where the channels of a head are
    contiguous, tables included, else "strided". ``align``: bytes that divide every address, pitch and run of channels;
    nothing depends on it where the layout is strided.
    """

    batch: int = extent(ladder)
    seq: int = extent(ladder)
    heads_q: int = extent(exact)
    head_dim: int = extent(exact)
    rotary: int = extent(exact)
    heads_kv: int = extent(exact, default=0)
    dtype: str = plain("bf16", "fp16", "fp32")
    table: str = plain("fp32", "same")
    interleaved: bool = plain(False, True)
    inverse: bool = plain(False, True)
    positions: str = plain("start", "batch", "token")
    index: str = plain("i64", "i32")
    layout: str = plain("rows", "strided")
    align: int = plain(16, 8, 4, 2)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rotary % 2 or not 0 < self.rotary <= self.head_dim:
            raise UnsupportedProblem(
                f"rotary counts channels in pairs, 2 to head_dim; it is {self.rotary} of {self.head_dim}"
            )
        if self.heads_q + self.heads_kv > _MOST or self.head_dim > _MOST:
            raise UnsupportedProblem(
                f"heads and head_dim end at {_MOST} in all; got {self.heads_q} + {self.heads_kv} and {self.head_dim}"
            )
        if self.align < self.itemsize:
            raise UnsupportedProblem(
                f"align covers one element of {self.dtype}, {self.itemsize} bytes; it is {self.align}"
            )
        if self.layout == "rows" and self.runs % self.align:
            raise UnsupportedProblem(
                f"align divides each run of channels, {self.rotary} of {self.head_dim} turning; it is {self.align}"
            )
        if (self.dtype, self.table) == ("fp32", "same"):
            raise UnsupportedProblem("beside fp32 operands an fp32 table is called table=fp32, not same")
        if self.positions == "start" and self.index != "i64":
            raise UnsupportedProblem("positions=start has no index tensor: leave index out")

    @property
    def itemsize(self) -> int:
        return GPU_DTYPES[self.dtype].itemsize

    @property
    def runs(self) -> int:
        """Bytes of each run of channels that lie and turn together, their bits joined."""
        return ((self.rotary if self.interleaved else self.half) | (self.head_dim - self.rotary)) * self.itemsize

    @property
    def vec(self) -> int:
        """Elements in one access."""
        return 1 if self.layout == "strided" else self.align // self.itemsize

    @property
    def half(self) -> int:
        return self.rotary // 2

    @property
    def block(self) -> int:
        """Pairs of channels in a tile: what covers them, from 8 to 256."""
        return max(8, min(256, power_of_two(self.half)))

    @property
    def parts(self) -> int:
        """Blocks of channels, those that rotate and those that are only copied."""
        return -(-self.half // self.block) + -(-(self.head_dim - self.rotary) // (2 * self.block))

    @property
    def pairs_per_access(self) -> int:
        return max(1, self.vec // 2) if self.interleaved else self.vec

    @property
    def table_dtype(self) -> str:
        return self.dtype if self.table == "same" else "fp32"


@dataclass(frozen=True)
class RopeConfig(Config):
    """One tile of ``tokens`` x ``heads`` x ``block`` pairs of channels per program."""

    tokens: int = knob(1, 2, 4, 8, 16)
    heads: int = knob(1, 2, 4, 8, 16, 32, 64)
    block: int = knob(8, 16, 32, 64, 128, 256)
    warps: int = knob(1, 2, 4, 8)


_MAX_OPERAND_REGISTERS = 128
_MAX_GRID = (1 << 31) - 1  # its first axis
_MOST = (1 << 16) - 1  # its second
_DEPTH = 32.0  # terms several times the size of a typical result may cancel: 4 ulp of fp32 of that
_WASTE, _WASTE_TORN = 1.25, 1.5  # of a tile's heads, those that are not there


def _walk(t: Tensor, dims: int) -> list[int]:
    """The strides of the last ``dims`` dimensions; 0 along those of one element, which are never walked."""
    return [s if n != 1 else 0 for n, s in zip(t.shape[-dims:], t.stride()[-dims:], strict=True)]


def _table_walk(t: Tensor) -> list[int]:
    """Strides of (batch, row, column) of a table without or with a batch; a lone column reads as contiguous."""
    batch = _walk(t, 3)[0] if t.dim() == 3 else 0
    return [batch, _walk(t, 2)[0], t.stride(-1) if t.shape[-1] != 1 else 1]


class Rope(TensorOp[RopeProblem, RopeConfig]):
    """``(x1 cos - x2 sin, x2 cos + x1 sin)`` over pairs. Arguments: q, k, cos, sin, positions, start.

    ``k`` may have no heads. ``cos`` and ``sin``: (T, R/2), or (B or 1, S, R) whose second halves repeat the first.
    """

    name = "rope"
    revision = 1
    Problem = RopeProblem
    Config = RopeConfig
    suite = (
        "batch=1 seq=1 heads_q=32 head_dim=128 rotary=128 heads_kv=8",
        "batch=16 seq=1 heads_q=28 head_dim=128 rotary=128 heads_kv=4 positions=batch",
        "batch=64 seq=1 heads_q=32 head_dim=128 rotary=128 heads_kv=8 positions=token index=i32",
        "batch=3 seq=77 heads_q=5 head_dim=80 rotary=20 heads_kv=1 align=4 dtype=fp16",
        "batch=2 seq=33 heads_q=3 head_dim=64 rotary=64 heads_kv=3 layout=strided",
        "batch=2 seq=130 heads_q=6 head_dim=128 rotary=64 interleaved=1 table=same",
        "batch=1 seq=512 heads_q=32 head_dim=128 rotary=128 dtype=fp16",
        "batch=1 seq=2048 heads_q=32 head_dim=128 rotary=128 heads_kv=8",
        "batch=1 seq=2048 heads_q=28 head_dim=128 rotary=128 heads_kv=4 inverse=1",
        "batch=1 seq=2048 heads_q=28 head_dim=128 rotary=128 heads_kv=4 dtype=fp32",
        "batch=4 seq=4096 heads_q=32 head_dim=128 rotary=128 heads_kv=8",
        "batch=8 seq=1024 heads_q=48 head_dim=128 rotary=64 dtype=fp16",
        "batch=8 seq=1024 heads_q=48 head_dim=128 rotary=64 dtype=fp16 interleaved=1",
    )
    results = ("out_q", "out_k")
    inputs = ("q", "k", "cos", "sin", "positions")
    options = ("interleaved", "inverse")
    scalars = ("start",)
    schema = (
        "Tensor q, Tensor k, Tensor cos, Tensor sin, Tensor? positions, bool interleaved, bool inverse, SymInt start"
    )
    flattens = False

    # -- calls

    def admit(self, inputs: Sequence[Tensor | None], results: Sequence[Tensor] = (), **options: Any) -> None:
        q, k, cos, sin, positions = inputs
        assert q is not None and k is not None and cos is not None and sin is not None
        tensor_op.check_dtype(self, q)
        tensor_op.check_alike(self, q, [k], ("dtype", "device"))
        tensor_op.check_alike(self, q, [cos, sin], ("device",))
        if q.dim() != 4 or k.dim() != 4 or (q.shape[:2], q.shape[3]) != (k.shape[:2], k.shape[3]):
            raise UnsupportedProblem(
                "q is (B, S, Hq, D) and k (B, S, Hkv, D), of the same B, S and D; "
                f"got {tuple(q.shape)} and {tuple(k.shape)}"
            )
        self._check_tables(q, cos, sin, options["interleaved"], positions)
        if positions is not None:
            tensor_op.check_alike(self, q, [positions], ("device",))
            if positions.dtype not in (torch.int64, torch.int32) or positions.shape not in (q.shape[:1], q.shape[:2]):
                raise UnsupportedProblem(
                    f"positions are (B,) or (B, S) = {tuple(q.shape[:2])} int32 or int64; "
                    f"got {tuple(positions.shape)} {positions.dtype}"
                )
        for out, t in zip(results, (q, k), strict=bool(results)):
            tensor_op.check_alike(self, t, [out])
        tensor_op.check_results(results)

    def _check_tables(self, q: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, positions: Tensor | None) -> None:
        tensor_op.check_alike(self, cos, [sin], ("shape", "dtype"))
        if cos.dtype != q.dtype and cos.dtype != torch.float32:
            raise UnsupportedProblem(f"cos and sin are fp32 or of q's type, {q.dtype}; got {cos.dtype}: convert them")
        if cos.dim() == 2:
            rotary = 2 * cos.shape[1]
        elif cos.dim() == 3:
            rotary = cos.shape[2]
            if cos.shape[0] not in (1, q.shape[0]) or cos.shape[1] != q.shape[1]:
                raise UnsupportedProblem(
                    f"a table of three dimensions is (B or 1, S, R), here S = {q.shape[1]}; got {tuple(cos.shape)}: "
                    "pass (T, R/2) and positions"
                )
            if interleaved or positions is not None:
                raise UnsupportedProblem(
                    "a (B or 1, S, R) table is gathered already and its halves repeat, which fits neither positions "
                    "nor interleaved pairs: pass a (T, R/2) table"
                )
        else:
            raise UnsupportedProblem(f"cos and sin are (T, R/2) or (B or 1, S, R); got {tuple(cos.shape)}")
        if rotary % 2 or not 0 < rotary <= q.shape[3]:
            raise UnsupportedProblem(
                f"tables of width {cos.shape[-1]} turn {rotary} channels, of a head's {q.shape[3]}: an even number "
                "from 2 to that is possible"
            )

    def fresh(self, *inputs: Tensor | None, **options: Any) -> tuple[Tensor, ...]:
        q, k = inputs[:2]
        assert q is not None and k is not None
        return q.new_empty(q.shape), k.new_empty(k.shape)

    def problem(self, *operands: Tensor | None, **options: Any) -> RopeProblem:
        out_q, out_k, q, k, cos, sin, positions = operands
        assert q is not None and k is not None and cos is not None and sin is not None
        assert out_q is not None and out_k is not None
        if q.dtype not in DTYPE_NAMES:
            raise UnsupportedProblem(f"{self.name} on a GPU takes {', '.join(DTYPE_NAMES.values())}; got {q.dtype}")
        batch, seq, heads_q, head_dim = q.shape
        heads_kv, rotary = k.shape[2], cos.shape[-1] * (4 - cos.dim())
        given = [t for t in (out_q, q, out_k, k) if t.numel()]
        tables = (cos, sin)
        contiguous = all(n == 1 or s == 1 for t in (*given, *tables) for n, s in [(t.shape[-1], t.stride(-1))])
        facts: dict[str, Any] = {
            "dtype": DTYPE_NAMES[q.dtype],
            "table": "fp32" if cos.dtype == torch.float32 else "same",
            "positions": "start" if positions is None else ("batch", "token")[positions.dim() - 1],
            "index": "i32" if positions is not None and positions.dtype == torch.int32 else "i64",
            "layout": "rows" if contiguous else "strided",
        }
        if contiguous:
            item = q.element_size()
            run = rotary if options["interleaved"] else rotary // 2
            bits = WIDEST_BYTES | (run | head_dim - rotary) * item
            for t in given:
                bits |= t.data_ptr() | item * reduce(or_, _walk(t, 4)[:3])
            for t in tables:
                bits |= t.data_ptr() | t.element_size() * reduce(or_, _table_walk(t)[:2])
            facts["align"] = bits & -bits
        p = RopeProblem(batch, seq, heads_q, head_dim, rotary, heads_kv, **facts, **options)
        if batch * seq * p.parts > _MAX_GRID:
            raise UnsupportedProblem(
                f"tokens times blocks of {2 * p.block} channels are at most {_MAX_GRID} in a launch; "
                f"got {batch * seq} times {p.parts}: split the batch"
            )
        return p

    def evaluate(self, *args: Any, **options: Any) -> tuple[Tensor, ...]:
        q, k, cos, sin, positions, start = args
        wide = torch.float64  # the two terms of an element may cancel, and leave nothing but the reference's own error
        tables = []
        for table in (cos, sin):
            if table.dim() == 3:
                chosen = table[..., : table.shape[2] // 2]
            else:
                chosen = table[_rows(q, table, positions, start)]
            tables.append(chosen.to(wide).unsqueeze(-2))
        c, s = tables
        return tuple(_turned(t, c, -s if options["inverse"] else s, options["interleaved"]) for t in (q, k))

    # -- configs

    def _blocks(self, p: RopeProblem, heads: int) -> int:
        return -(-p.heads_q // heads) + -(-p.heads_kv // heads)

    def why_not(self, p: RopeProblem, c: RopeConfig, gpu: GpuSpec) -> str | None:
        threads = 32 * c.warps
        per_thread = c.tokens * c.heads * c.block // threads
        if c.warps > 1 and per_thread < p.pairs_per_access:
            return f"{threads} threads of {p.pairs_per_access} pairs an access need {threads * p.pairs_per_access}"
        # In fp32: the pair, its cosine and sine; where nothing is known of the strides, 64-bit addresses of each.
        registers = per_thread * (10 if p.layout == "strided" else 4)
        if registers > _MAX_OPERAND_REGISTERS:
            return f"a thread's tile takes {registers} registers; at most {_MAX_OPERAND_REGISTERS}"
        if c.block != p.block:
            return f"block={c.block} does not cover {p.half} pairs by a power of two from 8 to 256, {p.block}"
        if c.heads > power_of_two(max(p.heads_q, p.heads_kv)):
            return f"heads={c.heads} idles most of a tile with {p.heads_q} and {p.heads_kv} heads"
        if c.tokens > power_of_two(p.seq):
            return f"tokens={c.tokens} idles most of a tile with {p.seq} tokens"
        return None

    def default(self, p: RopeProblem, gpu: GpuSpec) -> RopeConfig:
        # 32 bytes of a thread where that fills the GPU, else 16, else smaller blocks; heads that divide both q's and
        # k's before many heads, unless a tile reads its tokens in part: then all heads of a token, which lie together.
        block = p.block
        most = min(64, power_of_two(max(p.heads_q, p.heads_kv)))
        torn = p.rotary < p.head_dim and p.layout == "rows"
        while most > 1 and self._blocks(p, most) * most > (_WASTE_TORN if torn else _WASTE) * (p.heads_q + p.heads_kv):
            most //= 2
        for warps, accesses in ((4, 2), (4, 1), (2, 1), (1, 1)):
            pairs = 32 * warps * accesses * max(2, p.pairs_per_access)
            heads = max(1, min(most, pairs // block * (2 if torn else 1)))
            tokens = max(1, min(16, power_of_two(p.seq), pairs // (block * heads)))
            filled = tokens * heads * block
            c = RopeConfig(tokens, heads, block, power_of_two(max(1, min(warps, filled // (32 * p.pairs_per_access)))))
            if self._programs(p, c) >= gpu.sm_count * (8 if accesses == 2 else 1):
                break
        while c.warps < 8 and self._crowded(p, c):
            c = c.replace(warps=2 * c.warps)
        return c

    def _crowded(self, p: RopeProblem, c: RopeConfig) -> bool:
        return c.tokens * c.heads * c.block // (32 * c.warps) * (10 if p.layout == "strided" else 4) > 96

    def _programs(self, p: RopeProblem, c: RopeConfig) -> int:
        x, y, z = self.grid(p, c)
        return x * y * z

    def grid(self, p: RopeProblem, c: RopeConfig) -> tuple[int, int, int]:
        return p.batch * -(-p.seq // c.tokens) * p.parts, self._blocks(p, c.heads), 1

    def estimate_us(self, p: RopeProblem, c: RopeConfig, gpu: GpuSpec) -> float:
        """Bytes over bandwidth, stretched where too few bytes are in flight or the last wave is thin."""
        programs = max(1, self._programs(p, c))
        resident = min(24, gpu.max_warps // c.warps)
        waves = max(1.0, programs / (gpu.sm_count * resident))
        busy = min(1.0, programs / gpu.sm_count) if waves == 1 else waves / -(-waves // 1)
        tile = 2 * c.tokens * c.heads * c.block * p.itemsize
        used = (p.heads_q + p.heads_kv) / max(1, self._blocks(p, c.heads) * c.heads)
        in_flight = gpu.sm_count * min(resident, programs / gpu.sm_count) * tile * used
        needed = gpu.dram_gbps * 1e3 * 0.8
        memory = self.work(p).bytes / (gpu.dram_gbps * 1e3 * 0.92) * (1.0 if p.layout == "rows" else 4.0)
        issue = programs / gpu.sm_count * 0.05
        # A cosine and a sine for each thread's pairs, from the L1 or L2 cache.
        tables = programs / gpu.sm_count * c.tokens * c.block * 8 / 64e3
        return 1.7 + max(issue, tables + memory / max(0.05, min(1.0, in_flight / needed) * max(0.5, busy)))

    def work(self, p: RopeProblem) -> Work:
        elements = p.batch * p.seq * (p.heads_q + p.heads_kv)
        table = 2 * p.seq * p.half * (4 if p.table == "fp32" else p.itemsize)
        moved = float(2 * elements * p.head_dim * p.itemsize + table)
        return Work(flops=float(elements * p.half * 6), bytes=moved, depth=_DEPTH)

    # -- kernels

    def build(self, p: RopeProblem, c: RopeConfig, gpu: GpuSpec) -> Artifact:
        from cutekernels.backends.triton import compile_kernel
        from cutekernels.kernels.triton import rope as kernels

        tensors = ("out_q", "out_k", "q", "k")
        signature = {f"{name}_ptr": f"*{p.dtype}" for name in tensors}
        signature |= dict.fromkeys(["cos_ptr", "sin_ptr"], f"*{p.table_dtype}")
        divisible = {} if p.layout == "strided" else dict.fromkeys(signature, p.align)
        signature |= {"positions_ptr": f"*{p.index}"}
        names = ("seq", "seq_blocks", "heads_q", "heads_kv", "half", "head_dim", "half_blocks", "parts")
        signature |= dict.fromkeys(names, "i32") | {"table_rows": "i64"}
        constants: dict[str, int | bool | str] = {}
        for name in tensors:
            signature |= {f"{name}_{d}": "i64" for d in ("batch", "seq", "head", "dim")}
            if p.layout == "rows":
                divisible |= {f"{name}_{d}": p.vec for d in ("batch", "seq", "head")}
                constants[f"{name}_dim"] = 1
        for name in ("cos", "sin"):
            signature |= {f"{name}_{d}": "i64" for d in ("batch", "row", "col")}
            if p.layout == "rows":
                pitch = max(1, p.align // GPU_DTYPES[p.table_dtype].itemsize)
                divisible |= {f"{name}_{d}": pitch for d in ("batch", "row")}
                constants[f"{name}_col"] = 1
        if p.layout == "rows":
            divisible["half"] = max(1, p.vec // 2) if p.interleaved else p.vec
            divisible["head_dim"] = p.vec
        signature |= {"positions_batch": "i64", "positions_seq": "i64", "start": "i64"}
        if p.positions == "start":
            constants |= {"positions_ptr": 0, "positions_batch": 0, "positions_seq": 0}
        constants |= {
            "TOKENS": c.tokens,
            "HEADS": c.heads,
            "BLOCK": c.block,
            "SPREAD": c.tokens * c.block >= 32 * c.warps,
            "POSITIONS": p.positions,
            "INTERLEAVED": p.interleaved,
            "INVERSE": p.inverse,
        }
        return compile_kernel(
            kernels.rope,
            signature=signature | dict.fromkeys(constants, "constexpr"),
            constexprs=constants,
            divisible=divisible,
            options={"num_warps": c.warps},
            gpu=gpu,
        )

    def bind(self, p: RopeProblem, c: RopeConfig, kernel: Callable[..., Any]) -> Callable[..., None]:
        grid = self.grid(p, c)
        if 0 in grid:
            return lambda *operands: None
        sizes = (p.seq, -(-p.seq // c.tokens), p.heads_q, p.heads_kv, p.half, p.head_dim)
        blocks = (-(-p.half // p.block), p.parts)

        def numbers(*operands: Tensor | None) -> list[int]:
            *turned, cos, sin, positions = operands
            assert cos is not None and sin is not None
            found = [*sizes, *blocks, cos.shape[-2]]
            for t in turned:
                assert t is not None
                found += [*_walk(t, 4)[:3], t.stride(-1) if t.shape[-1] != 1 else 1]
            for t in (cos, sin):
                found += _table_walk(t)
            return [*found, *([0, 0] if positions is None else [*_walk(positions, positions.dim()), 0][:2])]

        return tensor_op.Launch(kernel, grid, len(self.results) + len(self.inputs), numbers)

    # -- samples

    def outputs(self, p: RopeProblem, *args: Any) -> tuple[Tensor, ...]:
        q, k = args[:2]
        pitch = p.head_dim if p.layout == "strided" else -(-p.head_dim // p.vec) * p.vec
        return tuple(t.new_empty((*t.shape[:-1], pitch))[..., : p.head_dim] for t in (q, k))

    def sample(self, p: RopeProblem, device: str, seed: int) -> tuple[Any, ...]:
        generator = torch.Generator(device).manual_seed(seed)
        dtype, skew = GPU_DTYPES[p.dtype], p.align % WIDEST_BYTES // p.itemsize  # elements off a 16-byte boundary
        strided = p.layout == "strided"
        placed = []
        for heads in (p.heads_q, p.heads_kv):
            pitch = 2 * p.head_dim if strided else -(-p.head_dim // p.vec) * p.vec
            strides = (p.seq * heads * pitch, heads * pitch, pitch, 2 if strided else 1)
            memory = torch.randn(
                p.batch * p.seq * heads * pitch + skew, generator=generator, device=device, dtype=dtype
            )
            placed.append(memory.as_strided((p.batch, p.seq, heads, p.head_dim), strides, skew))
        rows = p.seq + 5 if p.positions == "start" else 2 * p.seq + 5
        start, positions = 5, None
        if p.positions != "start":
            start = 0
            shape = (p.batch,) if p.positions == "batch" else (p.batch, p.seq)
            kind = torch.int32 if p.index == "i32" else torch.int64
            positions = torch.randint(0, p.seq + 5, shape, generator=generator, device=device, dtype=kind)
        angles = torch.rand((rows, p.half), generator=generator, device=device) * 6.2831853
        tables = [t.to(GPU_DTYPES[p.table_dtype]) for t in (angles.cos(), angles.sin())]
        if not strided:  # a pitch and an address that are multiples of align
            width = -(-p.half // 16) * 16
            tables = [torch.nn.functional.pad(t, (0, width - p.half))[:, : p.half] for t in tables]
        return (*placed, *tables, positions, start)


def _rows(q: Tensor, table: Tensor, positions: Tensor | None, start: int) -> Tensor:
    """Each token's row of the table, (S,) or (B, S). Raises UnsupportedProblem for one that is not there."""
    steps = torch.arange(q.shape[1], device=q.device)
    if positions is None:
        rows = start + steps
    else:
        rows = positions.long() if positions.dim() == 2 else positions.long()[:, None] + steps
    if rows.numel() and (int(rows.min()) < 0 or int(rows.max()) >= table.shape[0]):
        raise UnsupportedProblem(
            f"positions {int(rows.min())} to {int(rows.max())} leave a table of {table.shape[0]} rows: "
            "build a longer one"
        )
    return rows


def _turned(x: Tensor, c: Tensor, s: Tensor, interleaved: bool) -> Tensor:
    half = c.shape[-1]
    head, rest = x[..., : 2 * half].to(c.dtype), x[..., 2 * half :]
    x1, x2 = (head[..., ::2], head[..., 1::2]) if interleaved else (head[..., :half], head[..., half:])
    y1, y2 = x1 * c - x2 * s, x2 * c + x1 * s
    y = torch.stack((y1, y2), dim=-1).flatten(-2) if interleaved else torch.cat((y1, y2), dim=-1)
    return torch.cat((y.to(x.dtype), rest), dim=-1)


ROPE = Rope()
OPS = (ROPE,)


# ---- the function ---------------------------------------------------------------------------------------


def rope(
    q: Tensor,
    k: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    *,
    interleaved: bool = False,
    positions: Tensor | int | None = None,
    inplace: bool = False,
    config: RopeConfig | str | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Turns each pair ``(x1, x2)`` of channels into ``(x1 cos - x2 sin, x2 cos + x1 sin)``: in fp32, rounded once.

    The cosines and sines are those of the token's position. A pair is channels ``i`` and ``i + R/2`` of a head, or
    ``2i`` and ``2i + 1`` if interleaved; channels from R on are copied.

    Args:
        q: ``(B, S, Hq, D)``, fp16, bf16 or fp32 (on the CPU fp64 too). Any strides: views of a joint QKV projection
            and of ``(B, Hq, S, D)`` storage are fast.
        k: ``(B, S, Hkv, D)``, dtype and device of ``q``; None to turn ``q`` alone.
        cos: ``(T, R/2)`` with R <= D, fp32 or of q's dtype: a row per position. Or ``(B or 1, S, R)``, a row per
            token whose halves repeat, as Hugging Face's modules make it; its second half is not read.
        sin: shape and dtype of ``cos``.
        interleaved: pairs of neighbours (GPT-J, Llama's original) instead of halves (NeoX, Hugging Face).
        positions: of the tokens. None: 0 to S - 1; an int: from there on; ``(B,)``: from there on in each batch
            entry; ``(B, S)``: of each token. Tensors are int32 or int64 on q's device and are not waited for: a
            position outside of the table gives NaN on a GPU, and raises on the CPU.
        inplace: write to ``q`` and ``k`` themselves. Not differentiable.
        config: overrides the tuned choice, as a :class:`RopeConfig` or its text. Ignored on the CPU.

    Returns:
        Contiguous ``(B, S, Hq, D)`` and ``(B, S, Hkv, D)``, or ``q`` and ``k``; None in the place of None.
        Differentiable in ``q`` and ``k``.

    Raises:
        UnsupportedProblem: a dtype no kernel takes, shapes, dtypes or devices that do not fit, a position outside of
            the table (where it is an int), a gradient asked of ``cos``, ``sin`` or in place.
        InvalidConfig: ``config`` breaks a rule of the op.
    """
    start, places = (0, positions) if positions is None or isinstance(positions, Tensor) else (positions, None)
    if places is None and cos.dim() == 2 and q.dim() == 4 and (start < 0 or start + q.shape[1] > cos.shape[0]):
        raise UnsupportedProblem(
            f"positions {start} to {start + q.shape[1] - 1} leave a table of {cos.shape[0]} rows: build a longer one"
        )
    if start and cos.dim() == 3:
        raise UnsupportedProblem("a (B or 1, S, R) table is gathered already: pass a (T, R/2) table beside positions")
    keys = q.new_empty((*q.shape[:2], 0, *q.shape[3:])) if k is None else k
    operands = (q, keys, cos, sin, places)
    results = (q, keys) if inplace else None
    turned: tuple[Tensor, ...] | None = tensor_op.eager(ROPE, results, operands, (interleaved, False), (start,), config)
    if turned is None:
        refuse_table_gradient(cos, sin)
        text = None if config is None else str(config)
        if inplace:
            tensor_op.refuse_gradient(q, keys)
            torch.ops.cutekernels.rope_inplace(q, keys, cos, sin, places, interleaved, False, start, text)
            turned = (q, keys)
        else:
            turned = torch.ops.cutekernels.rope(q, keys, cos, sin, places, interleaved, False, start, text)
    return turned[0], None if k is None else turned[1]


def refuse_table_gradient(*tables: Tensor) -> None:
    if torch.is_grad_enabled() and any(t.requires_grad for t in tables):
        raise UnsupportedProblem("rope has no gradient for cos and sin: detach them")


# ---- torch.library --------------------------------------------------------------------------------------


def register(library: torch.library.Library) -> None:
    """Defines the ops of this file in ``library``: ``rope``, its gradient, and ``rope_inplace``."""
    tensor_op.register(library, ROPE, backward=_gradient, setup_context=_remember)
    register_inplace(library, ROPE, updated=(0, 1))


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    _, _, cos, sin, positions, ctx.interleaved, ctx.inverse, ctx.start, *_ = inputs
    ctx.save_for_backward(cos, sin, positions)


def _gradient(ctx: Any, dq: Tensor, dk: Tensor) -> tuple[Any, ...]:
    cos, sin, positions = ctx.saved_tensors
    if ctx.needs_input_grad[2] or ctx.needs_input_grad[3]:
        refuse_table_gradient(cos, sin)
    tables = (cos, sin, positions, ctx.interleaved, not ctx.inverse, ctx.start)
    return (*torch.ops.cutekernels.rope(dq, dk, *tables), *[None] * 7)
