"""New keys and values into a cache, behind each sequence's end: the declaration. Public function in ``append.py``.

Keys, and queries beside them, are turned by their positions on the way (``rope.py``). Where a token goes is known on
the device alone: in the sequence's length and in its row of the page table. ``cutekernels.kv_cache`` holds the tensors.
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
from cutekernels.ops.attention.decode import PAGE_SIZES, check_page_size
from cutekernels.ops.rope import ROPE
from cutekernels.ops.shared import tensor_op
from cutekernels.ops.shared.strides import overlaps_itself
from cutekernels.ops.shared.tensor_op import DTYPE_NAMES, GPU_DTYPES, WIDEST_BYTES, TensorOp

if TYPE_CHECKING:
    from cutekernels.backends import Artifact
    from cutekernels.gpu import GpuSpec

LENGTHS, LOST, TICKETS = range(3)  # the rows of a state


# ---- declaration ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class KvAppendProblem(Problem):
    """``seq`` tokens for each of ``batch`` sequences: k and v of heads_kv heads, and q of heads_q that turns beside k.

    The first ``rotary`` channels of a head turn. ``table``: the cosines' and sines' type, fp32 or "same" as k's, or
    "none" where nothing turns; ``gathered``: it has a row per token, not per position. ``counted``: each sequence has
    its own number of new tokens. ``page_size=0`` is a contiguous cache. ``align``: bytes that divide every address,
    pitch and run of channels.
    """

    batch: int = extent(ladder)
    seq: int = extent(ladder)
    heads_kv: int = extent(exact)
    head_dim: int = extent(exact)
    heads_q: int = extent(exact, default=0)
    rotary: int = extent(exact, default=0)
    dtype: str = plain("bf16", "fp16", "fp32")
    table: str = plain("fp32", "same", "none")
    gathered: bool = plain(False, True)
    interleaved: bool = plain(False, True)
    counted: bool = plain(False, True)
    page_size: int = plain(0, *PAGE_SIZES)
    align: int = plain(16, 8, 4, 2)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.turning != (self.rotary > 0) or self.rotary % 2 or self.rotary > self.head_dim:
            raise UnsupportedProblem(
                f"rotary counts channels in pairs, 2 to head_dim where there is a table, else 0; it is {self.rotary} "
                f"of {self.head_dim} with table={self.table}"
            )
        if not self.turning and (self.heads_q or self.gathered or self.interleaved):
            raise UnsupportedProblem("without a table nothing turns: leave heads_q, gathered and interleaved out")
        if self.gathered and self.interleaved:
            raise UnsupportedProblem("a gathered table's halves repeat: its pairs are no neighbours")
        if self.heads_q + 2 * self.heads_kv > _MOST or self.head_dim > _MOST:
            raise UnsupportedProblem(
                f"heads and head_dim end at {_MOST}; got {self.heads_q} + 2 x {self.heads_kv} and {self.head_dim}"
            )
        if self.align < self.itemsize:
            raise UnsupportedProblem(
                f"align covers one element of {self.dtype}, {self.itemsize} bytes; it is {self.align}"
            )
        if self.runs % self.align:
            raise UnsupportedProblem(
                f"align divides each run of channels, {self.rotary} of {self.head_dim} turning; it is {self.align}"
            )
        if (self.dtype, self.table) == ("fp32", "same"):
            raise UnsupportedProblem("beside fp32 operands an fp32 table is called table=fp32, not same")

    def bucket(self) -> KvAppendProblem:
        """One tuning serves caches with and without pages, and tokens counted or not."""
        return super().bucket().replace(page_size=0, counted=False)

    @property
    def turning(self) -> bool:
        return self.table != "none"

    @property
    def itemsize(self) -> int:
        return GPU_DTYPES[self.dtype].itemsize

    @property
    def half(self) -> int:
        return self.rotary // 2

    @property
    def runs(self) -> int:
        """Bytes of each run of channels that lie and turn together, their bits joined."""
        return _runs(self.head_dim, self.rotary, self.interleaved) * self.itemsize

    @property
    def vec(self) -> int:
        """Elements in one access."""
        return self.align // self.itemsize

    @property
    def pairs_per_access(self) -> int:
        return max(1, self.vec // 2) if self.interleaved or not self.turning else self.vec

    @property
    def table_dtype(self) -> str:
        return self.dtype if self.table == "same" else "fp32"

    @property
    def block(self) -> int:
        """Pairs of channels in a tile: all that turn, or all there are, up to 256."""
        return max(8, min(256, power_of_two(self.half or -(-self.head_dim // 2))))

    @property
    def parts(self) -> int:
        """Blocks of channels, those that turn and those that do not."""
        return -(-self.half // self.block) + -(-(self.head_dim - self.rotary) // (2 * self.block))


def _runs(head_dim: int, rotary: int, interleaved: bool) -> int:
    return head_dim | rotary | (0 if interleaved else rotary // 2)


@dataclass(frozen=True)
class KvAppendConfig(Config):
    """One tile of ``tokens`` x ``heads`` x ``block`` pairs of channels per program.

    ``whole``: a program takes all heads of its tokens, those of q, k and v, one tile after the other.
    """

    tokens: int = knob(1, 2, 4, 8, 16)
    heads: int = knob(1, 2, 4, 8, 16, 32, 64)
    block: int = knob(8, 16, 32, 64, 128, 256)
    warps: int = knob(1, 2, 4, 8)
    whole: bool = knob(False, True, added=True)


_MAX_OPERAND_REGISTERS = 128
_MAX_TOKENS = (1 << 31) - 1  # the grid's first axis
_MOST = (1 << 16) - 1  # its others
_DEPTH = 32.0  # see ``rope``
_WHOLE_PER_SM = 3  # programs, from which on each takes all heads of its tokens
_WASTE = 1.25  # of a tile's heads, those that are not there
_SPARE = 16  # tokens that a sample's sequences have room for beyond their new ones
_PLACED = ("k_cache", "v_cache")
_ROWS = ("out_q", *_PLACED, "q", "k", "v")


class KvAppend(TensorOp[KvAppendProblem, KvAppendConfig]):
    """Arguments: q, k, v, state, page table, counts, cos, sin. Results: q turned, the caches, the new state.

    Of the caches only the new tokens' rows are written: they are results that the caller has filled. ``q`` may have no
    heads. ``state``: int32 (3, B), the sequences' lengths, tokens that found no room, and tickets, which are zero
    between launches. ``cos`` and ``sin``: as ``rope`` takes them.
    """

    name = "kv_append"
    revision = 1
    Problem = KvAppendProblem
    Config = KvAppendConfig
    suite = (
        "batch=1 seq=1 heads_kv=8 head_dim=128 heads_q=32 rotary=128",
        "batch=16 seq=1 heads_kv=4 head_dim=128 heads_q=28 rotary=128 page_size=16",
        "batch=64 seq=1 heads_kv=8 head_dim=128 heads_q=32 rotary=128 counted=1 page_size=64",
        "batch=64 seq=1 heads_kv=8 head_dim=128 table=none",
        "batch=3 seq=77 heads_kv=1 head_dim=80 heads_q=5 rotary=20 align=4 dtype=fp16 page_size=32",
        "batch=2 seq=130 heads_kv=3 head_dim=128 heads_q=6 rotary=64 table=same interleaved=1",
        "batch=2 seq=33 heads_kv=2 head_dim=64 rotary=64 gathered=1 dtype=fp32",
        "batch=1 seq=2048 heads_kv=8 head_dim=128 heads_q=32 rotary=128",
        "batch=1 seq=2048 heads_kv=8 head_dim=128 heads_q=32 rotary=128 page_size=16",
        "batch=4 seq=4096 heads_kv=8 head_dim=128 table=none page_size=256",
    )
    results = ("out_q", *_PLACED, "out_state")
    inputs = ("q", "k", "v", "state", "page_table", "counts", "cos", "sin")
    options = ("interleaved",)
    schema = (
        "Tensor(a!)? q, Tensor k, Tensor v, Tensor(b!) k_cache, Tensor(c!) v_cache, Tensor(d!) state, "
        "Tensor? page_table, Tensor? counts, Tensor? cos, Tensor? sin, bool interleaved"
    )
    flattens = False

    # -- calls

    def takes(self, name: str, t: Tensor) -> bool:
        return name not in (*_ROWS, "cos", "sin") or t.shape[-1] == 1 or t.stride(-1) == 1

    def admit(self, inputs: Sequence[Tensor | None], results: Sequence[Tensor] = (), **options: Any) -> None:
        q, k, v, state, table, counts, cos, sin = inputs
        assert q is not None and k is not None and v is not None and state is not None
        tensor_op.check_dtype(self, k)
        tensor_op.check_alike(self, k, [q, v], ("dtype", "device"))
        tensor_op.check_alike(self, k, tensor_op.present((state, table, counts, cos, sin)), ("device",))
        if k.dim() != 4 or v.shape != k.shape:
            raise UnsupportedProblem(f"k and v are (B, S, Hkv, D), alike; got {tuple(k.shape)} and {tuple(v.shape)}")
        if 0 in k.shape[2:]:
            raise UnsupportedProblem(f"a token has at least one head and one channel; got k {tuple(k.shape)}")
        if (cos is None) != (sin is None):
            raise UnsupportedProblem("cos and sin come together: pass both, or neither to turn nothing")
        if cos is not None:
            ROPE.admit((q, k, cos, sin, None), interleaved=options["interleaved"])
        elif q.dim() != 4 or q.shape[2]:
            raise UnsupportedProblem("q is taken to be turned beside k, which needs cos and sin: leave it out")
        elif options["interleaved"]:
            raise UnsupportedProblem("interleaved says which channels turn together, which needs cos and sin")
        batch = k.shape[0]
        if state.dtype != torch.int32 or state.shape != (3, batch) or (batch > 1 and state.stride(1) != 1):
            raise UnsupportedProblem(
                f"state is int32 {(3, batch)}, rows contiguous; it is {state.dtype} {tuple(state.shape)} with strides "
                f"{state.stride()}"
            )
        if counts is not None and (counts.dtype != torch.int32 or counts.shape != (batch,)):
            raise UnsupportedProblem(f"counts are int32 ({batch},); got {counts.dtype} {tuple(counts.shape)}")
        if table is not None and (table.dtype != torch.int32 or table.dim() != 2 or table.shape[0] != batch):
            raise UnsupportedProblem(
                f"page_table is int32 ({batch}, MAX_PAGES); got {table.dtype} {tuple(table.shape)}"
            )
        if results:
            self._check_results(k, q, table, state, results)

    def _check_results(
        self, k: Tensor, q: Tensor, table: Tensor | None, state: Tensor, results: Sequence[Tensor]
    ) -> None:
        out_q, k_cache, v_cache, out_state = results
        tensor_op.check_alike(self, q, [out_q])
        tensor_op.check_alike(self, state, [out_state])
        tensor_op.check_results((out_q, out_state))
        for name, t in zip(_PLACED, (k_cache, v_cache), strict=True):
            tensor_op.check_alike(self, k, [t], ("dtype", "device"))
            form = f"({k.shape[0]}, T_MAX" if table is None else "(PAGES, PAGE_SIZE"
            fits = t.dim() == 4 and t.shape[2:] == k.shape[2:] and (table is not None or t.shape[0] == k.shape[0])
            if not fits:
                raise UnsupportedProblem(
                    f"{name} is {form}, {k.shape[2]}, {k.shape[3]}); got {tuple(t.shape)}"
                    + (": pages need a page_table" if table is None else "")
                )
            if table is not None:
                check_page_size(t.shape[1])
            if (t.shape[3] > 1 and t.stride(3) != 1) or overlaps_itself(t):
                raise UnsupportedProblem(
                    f"{name} has its channels side by side and each token in memory of its own; its strides are "
                    f"{t.stride()}"
                )
        if k_cache.shape != v_cache.shape:
            raise UnsupportedProblem(
                f"k_cache and v_cache have one shape; got {tuple(k_cache.shape)} and {tuple(v_cache.shape)}"
            )

    def fresh(self, *inputs: Tensor | None, **options: Any) -> tuple[Tensor, ...]:
        raise UnsupportedProblem("kv_append writes to caches that are there: pass them")

    def problem(self, *operands: Tensor | None, **options: Any) -> KvAppendProblem:
        out_q, k_cache, v_cache, _, q, k, v, _, table, counts, cos, sin = operands
        assert out_q is not None and k_cache is not None and v_cache is not None
        assert q is not None and k is not None and v is not None
        if k.dtype not in DTYPE_NAMES:
            raise UnsupportedProblem(f"{self.name} on a GPU takes {', '.join(DTYPE_NAMES.values())}; got {k.dtype}")
        batch, seq, heads_kv, head_dim = k.shape
        if batch * seq > _MAX_TOKENS:
            raise UnsupportedProblem(f"a launch takes up to {_MAX_TOKENS} tokens; got {batch * seq}: split the batch")
        rotary = 0 if cos is None else cos.shape[-1] * (4 - cos.dim())
        item = k.element_size()
        bits = WIDEST_BYTES | _runs(head_dim, rotary, options["interleaved"]) * item
        for t in (out_q, k_cache, v_cache, q, k, v):
            if t.numel():
                bits |= t.data_ptr() | item * reduce(or_, _walk(t))
        facts: dict[str, Any] = {"table": "none"}
        if cos is not None and sin is not None:
            for t in (cos, sin):
                bits |= t.data_ptr() | t.element_size() * reduce(or_, _walk(t))
            facts["table"] = "fp32" if cos.dtype == torch.float32 else "same"
            facts["gathered"] = cos.dim() == 3
        return KvAppendProblem(
            batch,
            seq,
            heads_kv,
            head_dim,
            q.shape[2],
            rotary,
            DTYPE_NAMES[k.dtype],
            counted=counts is not None,
            page_size=0 if table is None else k_cache.shape[1],
            align=bits & -bits,
            **facts,
            **options,
        )

    def evaluate(self, *args: Any, **options: Any) -> tuple[Tensor, ...]:
        """The rows to be placed: q and k, turned, and v."""
        q, k, v, state, _, counts, cos, sin = args
        number = torch.full_like(state[LENGTHS], k.shape[1]) if counts is None else counts
        return _turned(q, k, v, state[LENGTHS].long(), number, cos, sin, **options)

    def update(self, results: Sequence[Tensor], inputs: Sequence[Any], **options: Any) -> None:
        """What a launch does, in plain PyTorch. Raises UnsupportedProblem for positions that ``cos`` has no row of."""
        out_q, *caches, out_state = results
        q, k, v, state, table, counts, cos, sin = inputs
        (batch, seq), (pages, size) = k.shape[:2], caches[0].shape[:2]
        room = size if table is None else size * table.shape[1]
        steps = torch.arange(seq, device=k.device)
        starts = state[LENGTHS].long().clamp(0, room)
        number = torch.full_like(starts, seq) if counts is None else counts.long().clamp(0, seq)
        at = starts[:, None] + steps
        kept = (steps < number[:, None]) & (at < room)
        if table is None or not table.shape[1]:
            page, slot = torch.arange(batch, device=k.device)[:, None].expand(batch, seq), at
        else:
            page, slot = table.long().gather(1, (at // size).where(kept, 0)), at % size
            kept = kept & (page >= 0) & (page < pages)
        found = kept.long().cumprod(1).sum(1)  # tokens ahead of the first that has no place
        turned, *rows = _turned(q, k, v, starts, found, cos, sin, **options)
        out_q.copy_(turned)
        for cache, row in zip(caches, rows, strict=True):
            cache[page[kept], slot[kept]] = row[kept]
        lost = state[LOST].long() + number - found
        out_state.copy_(torch.stack((starts + found, lost, torch.zeros_like(starts))))

    # -- configs

    def _blocks(self, p: KvAppendProblem, heads: int) -> int:
        return -(-p.heads_q // heads) + 2 * -(-p.heads_kv // heads)

    def why_not(self, p: KvAppendProblem, c: KvAppendConfig, gpu: GpuSpec) -> str | None:
        threads = 32 * c.warps
        per_thread = c.tokens * c.heads * c.block // threads
        if c.warps > 1 and per_thread < p.pairs_per_access:
            return f"{threads} threads of {p.pairs_per_access} pairs an access need {threads * p.pairs_per_access}"
        # In fp32: the pair, its cosine and sine; a program of all heads has the next pair as it is loaded.
        registers = per_thread * (4 + (p.itemsize // 2 if c.whole else 0))
        if registers > _MAX_OPERAND_REGISTERS:
            return f"a thread's tile takes {registers} registers; at most {_MAX_OPERAND_REGISTERS}"
        if c.block != p.block:
            return f"a block covers what its pairs of channels leave of a power of two, {p.block}; it is {c.block}"
        if c.heads > power_of_two(max(p.heads_q, p.heads_kv)):
            return f"heads={c.heads} idles most of a tile with {p.heads_q} and {p.heads_kv} heads"
        if c.tokens > power_of_two(p.seq):
            return f"tokens={c.tokens} idles most of a tile with {p.seq} tokens"
        least = min(8, max(4, power_of_two(p.heads_kv)), power_of_two(max(p.heads_q, p.heads_kv)))
        if c.whole and c.heads < least:
            return f"a program of all heads takes them {least} at a time or more, as they lie together; not {c.heads}"
        if c.whole and self.grid(p, c)[0] > _MAX_TOKENS:
            return f"whole=1 and tokens={c.tokens} make {self.grid(p, c)[0]} programs; a grid ends at {_MAX_TOKENS}"
        return None

    def default(self, p: KvAppendProblem, gpu: GpuSpec) -> KvAppendConfig:
        # 32 bytes of a thread where that fills the GPU, else 16, else 32 of fewer threads, else smaller blocks. A token
        # of each of 64 sequences, 8 heads to a program, H200: two warps 3.08 us, one 2.42 (2026-11-22).
        most = min(64, power_of_two(max(p.heads_q, p.heads_kv)))
        while most > 1 and self._blocks(p, most) * most > _WASTE * (p.heads_q + 2 * p.heads_kv):
            most //= 2
        for warps, accesses, least in ((4, 2, 8), (4, 1, 1), (1, 2, 1), (1, 1, 1)):
            pairs = 32 * warps * accesses * max(2, p.pairs_per_access)
            heads = max(1, min(most, pairs // p.block))
            tokens = max(1, min(16, power_of_two(p.seq), pairs // (p.block * heads)))
            most_warps = max(1, tokens * heads * p.block // (32 * p.pairs_per_access))
            c = KvAppendConfig(tokens, heads, p.block, min(warps, power_of_two(most_warps)))
            if warps <= most_warps and self._programs(p, c) >= gpu.sm_count * least:
                break
        while c.warps < 8 and c.tokens * c.heads * c.block // (32 * c.warps) * 4 > _MAX_OPERAND_REGISTERS:
            c = c.replace(warps=2 * c.warps)
        whole = c.replace(whole=True, warps=min(8, 2 * c.warps))  # two tiles are under way: 16.0 -> 15.1 us, 1 x 2048
        many = c.tokens > 1 and self._programs(p, whole) >= gpu.sm_count * _WHOLE_PER_SM
        return whole if many and self.why_not(p, whole, gpu) is None else c

    def _programs(self, p: KvAppendProblem, c: KvAppendConfig) -> int:
        x, y, z = self.grid(p, c)
        return x * y * z

    def grid(self, p: KvAppendProblem, c: KvAppendConfig) -> tuple[int, int, int]:
        tiles = p.batch * -(-p.seq // c.tokens)
        return (tiles * p.parts, 1, 1) if c.whole else (tiles, self._blocks(p, c.heads), p.parts)

    def estimate_us(self, p: KvAppendProblem, c: KvAppendConfig, gpu: GpuSpec) -> float:
        """Bytes over bandwidth, stretched where too few bytes are in flight or the last wave is thin; and tickets."""
        programs = max(1, self._programs(p, c))
        blocks = self._blocks(p, c.heads)
        tiles = programs * blocks if c.whole else programs
        resident = min(24, gpu.max_warps // c.warps)
        waves = max(1.0, programs / (gpu.sm_count * resident))
        busy = min(1.0, programs / gpu.sm_count) if waves == 1 else waves / -(-waves // 1)
        tile = 2 * c.tokens * c.heads * c.block * p.itemsize * (2 if c.whole else 1)  # and the next
        used = (p.heads_q + 2 * p.heads_kv) / max(1, blocks * c.heads)
        in_flight = gpu.sm_count * min(resident, programs / gpu.sm_count) * tile * used
        memory = self.work(p).bytes / (gpu.dram_gbps * 1e3 * 0.92)
        issue = (programs * 0.03 + tiles * 0.02) / gpu.sm_count
        tables = programs / gpu.sm_count * c.tokens * c.block * 8 / 64e3 if p.turning else 0.0
        shares = programs / max(1, p.batch)
        ticket = 0.2 + shares * 0.001 if shares > 1 else 0.0
        steps = 0.6 * (blocks - 1) if c.whole else 0.0  # one behind the other, which only many programs hide
        needed = gpu.dram_gbps * 1e3 * 0.8
        streamed = tables + memory / max(0.05, min(1.0, in_flight / needed) * max(0.5, busy))
        return 1.9 + ticket + max(issue, streamed, steps)

    def work(self, p: KvAppendProblem) -> Work:
        tokens = p.batch * p.seq
        rows = 2 * p.batch if p.gathered else 2  # of the tables, per token of a sequence
        angles = rows * p.seq * p.half * GPU_DTYPES[p.table_dtype].itemsize
        moved = 2 * tokens * (p.heads_q + 2 * p.heads_kv) * p.head_dim * p.itemsize + angles + 8 * p.batch
        return Work(flops=float(tokens * (p.heads_q + p.heads_kv) * p.half * 6), bytes=float(moved), depth=_DEPTH)

    # -- kernels

    def build(self, p: KvAppendProblem, c: KvAppendConfig, gpu: GpuSpec) -> Artifact:
        from cutekernels.backends.triton import compile_kernel
        from cutekernels.kernels.triton import kv_append as kernels

        rows, places, angles = ("batch", "seq", "head"), ("page", "slot", "head"), ("batch", "row")
        operands: dict[str, tuple[str, tuple[str, ...]]] = {  # types, and the strides that kernels take
            "out_q": (p.dtype, rows),
            "k_cache": (p.dtype, places),
            "v_cache": (p.dtype, places),
            "out_state": ("i32", ("row",)),
            "q": (p.dtype, rows),
            "k": (p.dtype, rows),
            "v": (p.dtype, rows),
            "state": ("i32", ("row",)),
            "table": ("i32", ("batch", "entry")),
            "counts": ("i32", ("step",)),
            "cos": (p.table_dtype, angles),
            "sin": (p.table_dtype, angles),
        }
        signature = {f"{name}_ptr": f"*{kind}" for name, (kind, _) in operands.items()}
        sizes = ("seq", "seq_blocks", "heads_q", "heads_kv", "half", "head_dim", "half_blocks", "parts")
        signature |= dict.fromkeys(sizes, "i32") | dict.fromkeys(("room", "pages", "angles"), "i64")
        signature |= {f"{name}_{step}": "i64" for name, (_, steps) in operands.items() for step in steps}
        divisible = {"head_dim": p.vec}
        pitches = dict.fromkeys(_ROWS, p.vec)
        if p.turning:
            divisible["half"] = max(1, p.vec // 2) if p.interleaved else p.vec
            pitches |= dict.fromkeys(("cos", "sin"), max(1, p.align // GPU_DTYPES[p.table_dtype].itemsize))
        for name, pitch in pitches.items():
            divisible |= {f"{name}_ptr": p.align} | {f"{name}_{step}": pitch for step in operands[name][1]}
        absent = {"table": p.page_size == 0, "counts": not p.counted, "cos": not p.turning, "sin": not p.turning}
        constants: dict[str, int | bool | str] = {f"{name}_ptr": 0 for name, gone in absent.items() if gone}
        constants |= {
            "TOKENS": c.tokens,
            "HEADS": c.heads,
            "BLOCK": c.block,
            "SPREAD": c.tokens * c.block >= 32 * c.warps,
            "WHOLE": c.whole,
            "THREADS": 32 * c.warps,
            "PAGE_SIZE": p.page_size,
            "COUNTED": p.counted,
            "TURNING": p.turning,
            "GATHERED": p.gathered,
            "INTERLEAVED": p.interleaved,
        }
        return compile_kernel(
            kernels.kv_append,
            signature=signature | dict.fromkeys(constants, "constexpr"),
            constexprs=constants,
            divisible=divisible,
            options={"num_warps": c.warps},
            gpu=gpu,
        )

    def bind(self, p: KvAppendProblem, c: KvAppendConfig, kernel: Callable[..., Any]) -> Callable[..., None]:
        grid = self.grid(p, c)
        if 0 in grid:
            return lambda *operands: operands[3].copy_(operands[7])
        blocks = (-(-p.half // p.block), p.parts)
        sizes = (p.seq, -(-p.seq // c.tokens), p.heads_q, p.heads_kv, p.half, p.head_dim, *blocks)

        def numbers(*operands: Tensor | None) -> list[int]:
            out_q, k_cache, v_cache, out_state, q, k, v, state, table, counts, cos, sin = operands
            assert k_cache is not None and state is not None and out_state is not None
            pages, size = k_cache.shape[:2]
            found = [
                *sizes,
                size if table is None else size * table.shape[1],
                pages,
                0 if cos is None else cos.shape[-2],
            ]
            for t in (out_q, k_cache, v_cache):
                assert t is not None
                found += _walk(t)
            found.append(out_state.stride(0))
            for t in (q, k, v):
                assert t is not None
                found += _walk(t)
            found += [state.stride(0), *((0, 0) if table is None else table.stride())]
            found.append(0 if counts is None else counts.stride(0))
            for t in (cos, sin):
                found += [0, 0] if t is None else [0, 0, *_walk(t)][-2:]
            return found

        return tensor_op.Launch(kernel, grid, len(self.results) + len(self.inputs), numbers)

    # -- samples

    def outputs(self, p: KvAppendProblem, *args: Any) -> tuple[Tensor, ...]:
        """New caches, in which sequences without pages have room for the new tokens alone: nothing stays unwritten."""
        q, k, _, state, table, *_ = args
        if table is None:
            caches = [_laid(p, k, p.batch, p.seq + _SPARE, p.heads_kv)[:, : p.seq] for _ in _PLACED]
        else:
            pages = int(table.max()) + 1 if table.numel() else 0
            caches = [_laid(p, k, pages, p.page_size, p.heads_kv) for _ in _PLACED]
        return _laid(p, q, p.batch, p.seq, p.heads_q), *caches, torch.empty_like(state)

    def sample(self, p: KvAppendProblem, device: str, seed: int) -> tuple[Any, ...]:
        """Without pages, the first tokens of every sequence. In pages, which sequences share, one behind the other."""
        generator = torch.Generator(device).manual_seed(seed)
        placed = [
            _laid(p, torch.empty(0, dtype=GPU_DTYPES[p.dtype], device=device), p.batch, p.seq, heads)
            for heads in (p.heads_q, p.heads_kv, p.heads_kv)
        ]
        for t in placed:
            t.copy_(torch.randn(t.shape, generator=generator, device=device))
        state = torch.zeros((3, p.batch), dtype=torch.int32, device=device)
        table = counts = cos = sin = None
        if p.page_size:
            first = torch.arange(p.batch, device=device) * p.seq
            state[LENGTHS] = (first % p.page_size).int()
            pages = -(-p.batch * p.seq // p.page_size)
            order = torch.randperm(pages, generator=generator, device=device)
            entries = torch.arange(-(-p.seq // p.page_size) + 1, device=device) + (first // p.page_size)[:, None]
            table = order[entries.clamp_max(max(0, pages - 1))].int() if pages else entries.int()
        if p.counted:
            counts = torch.randint(0, p.seq + 1, (p.batch,), generator=generator, device=device).int()
        if p.turning:
            shape = (p.batch, p.seq, p.half) if p.gathered else (p.seq + p.page_size + 5, p.half)
            angles = torch.rand(shape, generator=generator, device=device) * 6.2831853
            tables = [t.to(GPU_DTYPES[p.table_dtype]) for t in (angles.cos(), angles.sin())]
            if p.gathered:
                tables = [torch.cat((t, t), -1) for t in tables]
            width = tables[0].shape[-1]
            padding = -(-width // 16) * 16 - width  # a pitch that is a multiple of align
            cos, sin = (torch.nn.functional.pad(t, (0, padding))[..., :width] for t in tables)
        return (*placed, state, table, counts, cos, sin)

    def reference(self, p: KvAppendProblem, *args: Any) -> tuple[Tensor, ...]:
        results = self.outputs(p, *args)
        for t in results[1:3]:
            t.fill_(float("nan"))
        self.update(results, args, interleaved=p.interleaved)
        return results


def _turned(
    q: Tensor, k: Tensor, v: Tensor, starts: Tensor, number: Tensor, cos: Tensor | None, sin: Tensor | None,
    interleaved: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    """q and k turned by positions from ``starts`` on, and v. Only the first ``number`` tokens' must be in the table."""
    if cos is None or sin is None:
        return q, k, v
    places = None
    if cos.dim() == 2:
        steps = torch.arange(k.shape[1], device=k.device)
        places = starts[:, None] + steps
        places = places.where(steps < number[:, None], places.clamp(max=max(0, cos.shape[0] - 1)))
    return *ROPE.evaluate(q, k, cos, sin, places, 0, interleaved=interleaved, inverse=False), v


def _walk(t: Tensor) -> list[int]:
    """The strides of all but the last dimension; 0 along those of one element, which are never walked."""
    return [s if n != 1 else 0 for n, s in zip(t.shape[:-1], t.stride()[:-1], strict=True)]


def _laid(p: KvAppendProblem, like: Tensor, outer: int, inner: int, heads: int) -> Tensor:
    """New memory ``(outer, inner, heads, head_dim)`` as aligned as the problem says, and no better."""
    skew = p.align % WIDEST_BYTES // p.itemsize  # elements off a 16-byte boundary
    pitch = -(-p.head_dim // p.vec) * p.vec
    memory = like.new_empty(outer * inner * heads * pitch + skew)
    return memory[skew:].view(outer, inner, heads, pitch)[..., : p.head_dim]


KV_APPEND = KvAppend()
