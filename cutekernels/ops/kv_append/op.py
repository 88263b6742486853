"""New keys and values into a cache, behind each sequence's end: the declaration.

Keys, and queries beside them, are turned by their positions on the way. Only the device knows where a token goes:
in the sequence's length and in its row of the page table. ``cutekernels.kv_cache`` holds the tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cutekernels.errors import UnsupportedProblem
from cutekernels.op import Scalar, Work, exact, extent, knob, ladder, plain, power_of_two
from cutekernels.ops.attention import token_scales
from cutekernels.ops.attention.cache import PAGE_SIZES, check_page_size
from cutekernels.ops.rope.op import ROPE
from cutekernels.ops.rope.rotary import DEPTH, MAX_PROGRAMS, Heads, RotaryConfig, RotaryOp, RotaryProblem, Table
from cutekernels.ops.shared.laid_out import place_as
from cutekernels.ops.shared.operands import Array, Leads, Looks, Named, Sizes, Vector, sizes_of
from cutekernels.ops.shared.triton_op import TritonOp
from cutekernels.rules import of_both

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from cutekernels.gpu import GpuSpec

LENGTHS, LOST, TICKETS = range(3)  # the rows of a state


# ---- declaration ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class KvAppendProblem(RotaryProblem):
    """``seq`` tokens for each of ``batch`` sequences: k and v of heads_kv heads, and q of heads_q that turns beside k.

    ``gathered``: tables have a row per token, not per position. ``counted``: each sequence has its own number of new
    tokens. ``page_size=0`` is a contiguous cache. ``cache="fp8"``: caches are e4m3, with a scale of each token's head.
    Channels are contiguous. The rest: :class:`~cutekernels.ops.rope.rotary.RotaryProblem`.
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
    cache: str = plain("same", "fp8")
    layout = "rows"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.rotary and (self.heads_q or self.gathered or self.interleaved):
            raise UnsupportedProblem("without a table nothing turns: leave heads_q, gathered and interleaved out")
        if self.gathered and self.interleaved:
            raise UnsupportedProblem("a gathered table's halves repeat: its pairs are no neighbours")
        if self.cache == "fp8" and self.head_dim > _WIDEST_FP8:
            raise UnsupportedProblem(
                f"heads of a cache in FP8 have up to {_WIDEST_FP8} channels, which a program holds together; not "
                f"{self.head_dim}: keep it in 16 bits"
            )

    def bucket(self) -> KvAppendProblem:
        """One tuning serves caches with and without pages, and tokens counted or not."""
        return super().bucket().replace(page_size=0, counted=False)

    @property
    def groups(self) -> tuple[int, ...]:
        return self.heads_q, self.heads_kv, self.heads_kv

    @property
    def block(self) -> int:
        """In FP8 pairs that cover a head, whose largest number decides its scale."""
        if self.cache == "same":
            return super().block
        return max(8, power_of_two(-(-self.head_dim // 2)))

    @property
    def runs_held(self) -> int:
        """Tiles of channels that a program holds: in FP8 those that turn and those that stay."""
        return 1 if self.cache == "same" else max(1, self.parts)


@dataclass(frozen=True)
class KvAppendConfig(RotaryConfig):
    """One tile of ``tokens`` x ``heads`` x ``block`` pairs of channels per program.

    ``whole``: a program takes all heads of its tokens, those of q, k and v, one tile after the other.
    """

    whole: bool = knob(False, True, added=True)


_WHOLE_PER_SM = 3  # least programs per SM for programs of all heads
_WASTE = 1.25  # heads of a tile for each that is there
_WIDEST_FP8 = 512
_SPARE = 16  # a sample's room for tokens beyond the new ones
_CACHES = ("k_cache", "v_cache")
_SCALES = ("k_scale", "v_scale")
_TOKENS = ("batch", "seq", "head")
_SLOTS = ("page", "slot", "head")


class KvAppend(RotaryOp[KvAppendProblem, KvAppendConfig], TritonOp[KvAppendProblem, KvAppendConfig]):
    """Places rows of k and v in caches, k and q turned on the way.

    The caches are results that the caller has filled: only the new tokens' rows are written. ``q`` may have no heads.
    ``state``: int32 (3, B), the sequences' lengths, tokens that found no room, and tickets, which are zero
    between launches. ``cos`` and ``sin``: as ``rope`` takes them. Beside caches in e4m3 stand the scales of the new
    tokens' heads (``ops/attention/token_scales.py``), else tensors without elements.
    """

    name = "kv_append"
    revision = 1
    in_place_pairs = frozenset({("out_q", "q"), ("out_state", "state")})  # a program turns k after another stored q
    partial = True  # rows behind the last token of a sample's last page
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
        "batch=16 seq=1 heads_kv=4 head_dim=128 heads_q=28 rotary=128 page_size=16 cache=fp8",
        "batch=1 seq=2048 heads_kv=8 head_dim=128 heads_q=32 rotary=128 cache=fp8",
    )
    kernel = "kv_append:kv_append"
    out_q = Heads("heads_q", result=True, strides=_TOKENS)
    k_cache = Array("pages", "slots", "heads_kv", "head_dim", dtype="cache", strides=_SLOTS, result=True, laid=True)
    v_cache = Array("pages", "slots", "heads_kv", "head_dim", dtype="cache", strides=_SLOTS, result=True, laid=True)
    out_state = Array("words", "batch", dtype="i32", strides=("row",), result=True)
    k_scale = Array("pages", "heads_kv", "places", dtype="u8", strides=("page", "head"), result=True)
    v_scale = Array("pages", "heads_kv", "places", dtype="u8", strides=("page", "head"), result=True)
    q = Heads("heads_q", strides=_TOKENS)
    k = Heads("heads_kv", strides=_TOKENS)
    v = Heads("heads_kv", strides=_TOKENS)
    state = Array("words", "batch", dtype="i32", strides=("row",))
    page_table = Array("batch", "entries", dtype="i32", strides=("batch", "entry"), optional=True)
    counts = Vector("batch", dtype="i32", stride="step", given="counted")
    cos = Table(optional=True, strides=("batch", "row"))
    sin = Table(optional=True, strides=("batch", "row"))
    options = ("interleaved",)
    schema = (
        "Tensor(a!)? q, Tensor k, Tensor v, Tensor(b!) k_cache, Tensor(c!) v_cache, Tensor(d!) state, "
        "Tensor(e!)? k_scale, Tensor(f!)? v_scale, "
        "Tensor? page_table, Tensor? counts, Tensor? cos, Tensor? sin, bool interleaved"
    )
    sizes = RotaryOp.sizes | dict.fromkeys(("room", "pages", "angles"), "i64")
    constexprs = (*RotaryOp.constexprs, "whole", "page_size", "counted", "gathered")
    steps = ((4, 2, 8), (4, 1, 1), (1, 2, 1), (1, 1, 1))

    # -- from tensors to problems

    def _pose(self, named: Mapping[str, Tensor | None], **options: Any) -> tuple[Sizes, dict[str, torch.Size]]:
        sizes, leads = super()._pose(named, **options)
        if _CACHES[0] not in named:
            return sizes, leads
        known = {name: sizes[name] for name in ("heads_kv", "head_dim")}
        caches = {name: self.operands[name] for name in _CACHES}
        found, _ = sizes_of(self.name, caches, {name: named[name] for name in _CACHES}, known)
        return sizes | found, leads

    def refuse(self, named: Mapping[str, Tensor | None], sizes: Sizes, **options: Any) -> None:
        state, table, cos = named["state"], named["page_table"], named["cos"]
        assert state is not None
        if not sizes["heads_kv"] or not sizes["head_dim"]:
            raise UnsupportedProblem("a token has at least one head of k and v, and a head one channel")
        if (cos is None) != (named["sin"] is None):
            raise UnsupportedProblem("cos and sin come together: pass both, or neither to turn nothing")
        if cos is None and sizes["heads_q"]:
            raise UnsupportedProblem("q is taken to be turned beside k, which needs cos and sin: leave it out")
        if cos is None and options["interleaved"]:
            raise UnsupportedProblem("interleaved says which channels turn together, which needs cos and sin")
        super().refuse(named, sizes, **options)
        if sizes["words"] != 3 or (sizes["batch"] > 1 and state.stride(1) != 1):
            raise UnsupportedProblem(
                f"state is (3, B), rows contiguous; it is {tuple(state.shape)} with strides {state.stride()}"
            )
        if "pages" not in sizes:
            return
        if table is not None:
            check_page_size(sizes["slots"])
        elif sizes["pages"] != sizes["batch"]:
            raise UnsupportedProblem(
                f"a cache without pages has the batch's {sizes['batch']} sequences; it has {sizes['pages']}: pages "
                "need a page_table"
            )
        for name in _CACHES:
            t = named[name]
            if t is not None and sizes["head_dim"] > 1 and t.stride(3) != 1:
                raise UnsupportedProblem(f"{name} has its channels side by side; its strides are {t.stride()}")
        for scale, name in zip(_SCALES, _CACHES, strict=True):
            t, cache = named[scale], named[name]
            assert t is not None and cache is not None
            if cache.element_size() == 1 and t.dim() > 1:
                token_scales.check(scale, t, cache)
            elif (cache.element_size() == 1) != (t.dim() > 1):
                raise UnsupportedProblem(
                    f"k_scale and v_scale belong to caches in float8_e4m3fn, both to both; {name} is {cache.dtype}, "
                    f"and {scale} is {'given' if t.dim() > 1 else 'missing'}"
                )

    def result(self, name: str, named: Named, sizes: Sizes, leads: Leads, **options: Any) -> Looks:
        shape, types = super().result(name, named, sizes | {"places": 0}, leads, **options)
        cache = named[name.replace("scale", "cache")] if name in _SCALES else None
        if cache is None:
            return shape, types
        return token_scales.shape(cache) if cache.element_size() == 1 else (0,), types

    def fresh(self, *inputs: Tensor | None, **options: Any) -> tuple[Tensor, ...]:
        raise UnsupportedProblem("kv_append writes to caches that are there: pass them")

    def facts(self, named: Mapping[str, Tensor | None], sizes: Sizes) -> dict[str, Scalar]:
        cos = named["cos"]
        return super().facts(named, sizes) | {
            "gathered": cos is not None and cos.dim() == 3,
            "page_size": 0 if named["page_table"] is None else sizes["slots"],
        }

    def evaluate(self, *args: Any, **options: Any) -> tuple[Tensor, ...]:
        """The rows to place: q and k, turned, and v."""
        import torch

        q, k, v, state, _, counts, cos, sin, *_ = args
        number = torch.full_like(state[LENGTHS], k.shape[1]) if counts is None else counts
        return _turn(q, k, v, state[LENGTHS].long(), number, cos, sin, **options)

    def update(self, results: Sequence[Tensor], args: Sequence[Any], **options: Any) -> tuple[Tensor, ...]:
        """A launch in plain PyTorch. Raises UnsupportedProblem for positions without a row of ``cos``."""
        import torch

        out_q, *caches, out_state, k_scale, v_scale = results
        q, k, v, state, table, counts, cos, sin = args
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
        found = kept.long().cumprod(1).sum(1)  # tokens ahead of the first without a place
        turned, *rows = _turn(q, k, v, starts, found, cos, sin, **options)
        out_q.copy_(turned)
        page, slot = page[kept], slot[kept]
        for cache, scale, x in zip(caches, (k_scale, v_scale), rows, strict=True):
            row = x[kept]
            if scale.numel():
                row, scale[page, :, slot] = token_scales.quantized(row)
            cache[page, slot] = row
        after = starts + found, state[LOST].long() + number - found, torch.zeros_like(starts)
        out_state.copy_(torch.stack(after))
        return ()

    # -- configs

    def registers(self, p: KvAppendProblem, c: KvAppendConfig) -> int:
        """Programs of all heads also hold the next tile's pairs, in their own type; in FP8 all channels of a head."""
        return super().registers(p, c) // 4 * (4 + (p.itemsize // 2 if c.whole else 0)) * p.runs_held

    @of_both
    def heads_together(self, p: KvAppendProblem, c: KvAppendConfig, gpu: GpuSpec) -> str | None:
        least = min(8, max(4, power_of_two(p.heads_kv)), power_of_two(max(p.groups)))
        if not c.whole or c.heads >= least:
            return None
        return f"a program of all heads takes them {least} at a time or more, as they lie together; not {c.heads}"

    @of_both
    def most_programs(self, p: KvAppendProblem, c: KvAppendConfig, gpu: GpuSpec) -> str | None:
        programs = self.grid(p, c)[0]
        if not c.whole or programs <= MAX_PROGRAMS:
            return None
        return f"whole=1 and tokens={c.tokens} make {programs} programs; a grid ends at {MAX_PROGRAMS}"

    def default(self, p: KvAppendProblem, gpu: GpuSpec) -> KvAppendConfig:
        # Large problems take all heads, two tiles under way: docs/notes/kv_append.md (H200, 2026-11-22)
        c = self.tile(p, gpu, _WASTE)
        whole = c.replace(whole=True, warps=min(8, 2 * c.warps))
        many = c.tokens > 1 and self.programs(p, whole) >= gpu.sm_count * _WHOLE_PER_SM
        return whole if many and self.why_not(p, whole, gpu) is None else c

    def grid(self, p: KvAppendProblem, c: KvAppendConfig) -> tuple[int, int, int]:
        tiles, parts = p.batch * -(-p.seq // c.tokens), p.parts if p.cache == "same" else 1
        return (tiles * parts, 1, 1) if c.whole else (tiles, self.blocks(p, c.heads), parts)

    def loads(self, p: KvAppendProblem, c: KvAppendConfig) -> int:
        return self.blocks(p, c.heads) if c.whole else 1

    def work(self, p: KvAppendProblem) -> Work:
        tokens = p.batch * p.seq
        rows = 2 * p.batch if p.gathered else 2  # of the tables, per token of a sequence
        angles = rows * p.seq * p.half * (4 if p.table == "fp32" else p.itemsize)
        moved = 2 * tokens * sum(p.groups) * p.head_dim * p.itemsize + angles + 8 * p.batch
        if p.cache == "fp8":
            moved -= 2 * tokens * p.heads_kv * (p.head_dim * (p.itemsize - 1) - 1)
        return Work(flops=float(tokens * (p.heads_q + p.heads_kv) * p.half * 6), bytes=float(moved), depth=DEPTH)

    # -- kernels

    def kind(self, p: KvAppendProblem, name: str) -> str | None:
        absent = (name == "page_table" and not p.page_size) or (name in _SCALES and p.cache == "same")
        return None if absent else super().kind(p, name)

    def numbers(self, p: KvAppendProblem, c: KvAppendConfig) -> tuple[int, ...]:
        found = super().numbers(p, c)
        return found if p.cache == "same" else (*found[:-1], 1)

    def strides(self, p: KvAppendProblem, name: str, t: Tensor) -> Sequence[int]:
        return super().strides(p, name, t) if self.kind(p, name) else (0, 0, 0)

    def measure_sizes(self, named: Mapping[str, Tensor | None]) -> tuple[int, ...]:
        cache, table, cos = named["k_cache"], named["page_table"], named["cos"]
        assert cache is not None
        pages, size = cache.shape[:2]
        return size if table is None else size * table.shape[1], pages, 0 if cos is None else cos.shape[-2]

    def constants(self, p: KvAppendProblem, c: KvAppendConfig) -> dict[str, int | bool | str]:
        return super().constants(p, c) | {
            "THREADS": 32 * c.warps,
            "TURNING": p.rotary > 0,
            "FP8": p.cache == "fp8",
            "RUNS": p.runs_held,
        }

    def bind(self, p: KvAppendProblem, c: KvAppendConfig, kernel: Callable[..., Any]) -> Callable[..., None]:
        if 0 in self.grid(p, c):
            return lambda *operands: operands[3].copy_(operands[9])  # the state
        return super().bind(p, c, kernel)

    # -- samples

    def sizes_in(self, p: KvAppendProblem) -> Sizes:
        """Without pages a sample appends the first tokens of every sequence; pages are shared, sequences end to end."""
        tables = (p.batch, p.seq, p.rotary) if p.gathered else (1, p.seq + p.page_size + 5, p.half)
        sizes = super().sizes_in(p) | dict(zip(("tables", "table_rows", "width"), tables, strict=True))
        return sizes | {"words": 3, "entries": -(-p.seq // p.page_size) + 1 if p.page_size else 0}

    def draw(self, p: KvAppendProblem, name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor | None:
        import torch

        device = generator.device
        first = torch.arange(p.batch, device=device) * p.seq
        if name == "state":
            state = torch.zeros(shape, dtype=torch.int64, device=device)
            state[LENGTHS] = first % p.page_size if p.page_size else 0
            return state
        if name == "page_table":
            pages = -(-p.batch * p.seq // p.page_size)
            order = torch.randperm(pages, generator=generator, device=device)
            entries = torch.arange(shape[1], device=device) + (first // p.page_size)[:, None]
            return order[entries.clamp_max(max(0, pages - 1))] if pages else entries
        if name == "counts":  # fewer would leave rows of the sample's pages unwritten, which no judge could accept
            return torch.full(shape, p.seq, device=device)
        if name == "k" and p.cache == "fp8" and p.rotary:
            # No largest number near 1.75 * 2^n, where keys that turned with other rounding would have another scale.
            k = torch.randn(shape, generator=generator, device=device).clamp_(-2.0, 2.0)
            k[..., 0], k[..., 1 if p.interleaved else p.half] = 6.0, 0.0
            return k
        values = super().draw(p, name, shape, generator)
        if values is None or not p.gathered:
            return None if values is None else values[0]
        return torch.cat((values[..., : p.half], values[..., : p.half]), -1)

    def outputs(self, p: KvAppendProblem, *args: Any) -> tuple[Tensor, ...]:
        """New caches. Those without pages show the new tokens' rows alone, so that all that is visible is written."""
        import torch

        q, k, _, state, table, *_ = args
        pages = p.batch if table is None else int(table.max()) + 1 if table.numel() else 0
        slots = p.seq + _SPARE if table is None else p.page_size
        kind = k.dtype if p.cache == "same" else torch.float8_e4m3fn
        caches = [place_as(k.new_empty((pages, slots, p.heads_kv, p.head_dim), dtype=kind), p) for _ in _CACHES]
        if table is None:
            caches = [cache[:, : p.seq] for cache in caches]
        shape = (0,) if p.cache == "same" else token_scales.shape(caches[0])
        scales = [torch.empty(shape, dtype=torch.uint8, device=k.device) for _ in _SCALES]
        return place_as(torch.empty_like(q), p), *caches, torch.empty_like(state), *scales

    def reference(self, p: KvAppendProblem, *args: Any) -> tuple[Tensor, ...]:
        results = self.outputs(p, *args)
        for t in results[1:3]:
            t.fill_(float("nan"))
        for t in results[4:]:
            t.fill_(0)
        self.update(results, args, interleaved=p.interleaved)
        return results


def _turn(
    q: Tensor, k: Tensor, v: Tensor, starts: Tensor, number: Tensor, cos: Tensor | None, sin: Tensor | None,
    interleaved: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    """q and k turned by positions from ``starts`` on, and v. Only the first ``number`` tokens' must be in the table."""
    import torch

    if cos is None or sin is None:
        return q, k, v
    places = None
    if cos.dim() == 2:
        steps = torch.arange(k.shape[1], device=k.device)
        places = starts[:, None] + steps
        places = places.where(steps < number[:, None], places.clamp(max=max(0, cos.shape[0] - 1)))
    return *ROPE.evaluate(q, k, cos, sin, places, 0, interleaved=interleaved, inverse=False), v


KV_APPEND = KvAppend()
OPS = (KV_APPEND,)
