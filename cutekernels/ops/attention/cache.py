"""Attention over a cache: operands, their checks, and samples; and ``cache_attention``, of many queries, as a chunk of
a prompt has, by the kernels of ``op.py``.

Operands are as the caller has them: q and out ``(B, SQ, HQ, D)``, caches ``(B, T_MAX, HKV, D)``, or in
pages ``(PAGES, PAGE_SIZE, HKV, D)`` with a table ``(B, MAX_PAGES)`` of the pages of each sequence. Lengths are on the
device. The queries are a sequence's last tokens, so they see each other causally. Caches are of q's type, or e4m3
beside scales of k and of v: fp32 ``(HKV,)``, one of each head, or bytes ``(PAGES or B, HKV, slots)``, a power of two of
each token's head (``token_scales.py``). A number is what is stored times its scale.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from cutekernels.errors import UnsupportedProblem
from cutekernels.op import C, P, Work, plain
from cutekernels.ops.attention import token_scales
from cutekernels.ops.attention.config import AttentionConfig
from cutekernels.ops.attention.op import PrefillOp
from cutekernels.ops.attention.operands import AttentionOp, rows
from cutekernels.ops.attention.problem import (
    CACHES,
    E4M3_MAX,
    NO_SCALES,
    AttentionProblem,
    depth,
    sample_sinks,
    since_revision_1,
    tuned_cache,
)
from cutekernels.ops.shared.cute_op import CuteOp
from cutekernels.ops.shared.dtypes import DTYPES
from cutekernels.ops.shared.operands import Array, Named, Sizes, Vector

if TYPE_CHECKING:
    import torch
    from torch import Tensor

PAGE_SIZES = (16, 32, 64, 128, 256)
MOST_ROOM = 2**28  # keys of a sequence: 32-bit numbers count them, times the splits


class CachedOp(AttentionOp[P, C]):
    """Attention over a cache: its operands, and the problems that they pose."""

    options = ("window", "window_left", "softcap", "lse")
    out = rows("batch", "seq_q", "heads_q", result=True)
    lse = Array("batch", "heads_q", "seq_q", dtype="wide", strides=(), flat=True, result=True, given="lse")
    q = rows("batch", "seq_q", "heads_q")
    k_cache = rows("pages", "slots", "heads_kv", dtype="dtype|fp8")
    v_cache = rows("pages", "slots", "heads_kv", dtype="dtype|fp8")
    cache_seqlens = Array("batch", dtype="i32", strides=())
    page_table = Array("batch", "entries", dtype="i32", optional=True, align=4, bits=64)
    sinks = Vector("heads_q", dtype="sinks", optional=True, align=2, canonical=True)
    k_scale = Array("pages?", "heads_kv", "slots^16?", dtype="fp32|u8", optional=True, align=1, bits=64, canonical=True)
    v_scale = Array("pages?", "heads_kv", "slots^16?", dtype="fp32|u8", optional=True, align=1, bits=64, canonical=True)

    suffix = "_cache"
    any_rows = ("out", "k_cache", "v_cache", "k_scale", "v_scale")

    # -- calls

    def refuse(self, named: Named, sizes: Sizes, **options: Any) -> None:
        import torch

        super().refuse(named, sizes, **options)
        k, v, table, *scales = [named[name] for name in ("k_cache", "v_cache", "page_table", "k_scale", "v_scale")]
        assert k is not None and v is not None
        if k.dtype != v.dtype:
            raise UnsupportedProblem(f"k_cache and v_cache must have one dtype; they have {k.dtype} and {v.dtype}")
        if not sizes["seq_q"]:
            raise UnsupportedProblem("q must have a token of each sequence at least; it has none: skip the call")
        if table is not None:
            check_page_size(sizes["slots"])
        elif sizes["pages"] != sizes["batch"]:
            raise UnsupportedProblem(
                f"a cache without a page_table has a row for each of q's {sizes['batch']} sequences; it has "
                f"{sizes['pages']}: pages need a page_table"
            )
        if k.dtype == torch.float8_e4m3fn:
            check_cache_dim("fp8", sizes["head_dim"])
        for name, t in zip(("k_scale", "v_scale"), scales, strict=True):
            check_scale_of_cache(name, t, k)
        if len({None if t is None else t.dtype for t in scales}) > 1:
            raise UnsupportedProblem(
                f"k_scale and v_scale are both of heads, or both of tokens and heads; they are "
                f"{' and '.join(str(t.dtype) for t in scales if t is not None)}: pass two of one kind"
            )

    def takes(self, name: str, t: Tensor) -> bool:
        """A cache and its scales are not copied."""
        if name in ("k_cache", "v_cache") and not super().takes(name, t):
            raise UnsupportedProblem(
                f"{name} must have D contiguous and rows 16-byte aligned; its strides are {t.stride()} and it begins "
                f"{t.data_ptr() % 16} bytes behind a multiple of 16: a cache is not copied, allocate it so"
            )
        if name in ("k_scale", "v_scale") and t.dim() > 1:
            token_scales.check_aligned(name, t)
        return super().takes(name, t)

    def check_indices(self, inputs: Any, *, on_gpu: bool = False, **options: Any) -> None:
        q, k, _, lengths, table, *_ = inputs
        if on_gpu:  # the CPU takes longer ones as what there is room for
            check_lengths(lengths, room_of(k, table))
        if table is not None:
            left = options["window_left"] if options["window"] else -1
            check_pages(table, lengths, k.shape[0], k.shape[1], q.shape[1], left)

    def facts(self, named: Named, sizes: Sizes) -> dict[str, Any]:
        k, table, scale = named["k_cache"], named["page_table"], named["k_scale"]
        assert k is not None
        cache = "same" if scale is None else "fp8" if scale.dim() == 1 else "fp8_tokens"
        return {"seq_kv": room_of(k, table), "page_size": 0 if table is None else sizes["slots"], "cache": cache}

    # -- what a problem looks like

    def kind(self, p: P, name: str) -> str | None:
        cache: str = p.cache  # type: ignore[attr-defined]
        if name in ("k_cache", "v_cache"):
            return p.dtype if cache == "same" else "fp8"  # type: ignore[attr-defined]
        if name in ("k_scale", "v_scale"):
            return {"same": None, "fp8": "fp32", "fp8_tokens": "u8"}[cache]
        if name == "page_table" and not p.page_size:  # type: ignore[attr-defined]
            return None
        return super().kind(p, name)

    def missing(self, p: P) -> tuple[str, ...]:
        """Scales of heads alone are of no page or slot."""
        return () if p.cache == "fp8_tokens" else ("pages", "slots^16")  # type: ignore[attr-defined]

    def elements(self, p: P, c: C, name: str) -> int:
        return token_scales.TOGETHER if self.kind(p, name) == "u8" else super().elements(p, c, name)

    def sample(self, p: Any, device: str, seed: int) -> tuple[Any, ...]:
        """Sequences that nearly fill the cache, each of its own length; NaN wherever no sequence has a token."""
        import torch

        generator = torch.Generator(device=device).manual_seed(seed)
        spare = torch.randint(0, min(16, p.seq_kv // 2) + 1, (p.batch,), generator=generator, device=device)
        lengths = (p.seq_kv - spare).to(torch.int32)
        sinks = sample_sinks(p.sinks, p.dtype, p.heads_q, p.keys, generator)
        operands = draw_tables(p, lengths, generator)
        return (*operands[:5], sinks, *operands[5:], *self.draw_scalars(p, generator))

    # -- mathematics

    def evaluate(self, *args: Any, **options: Any) -> tuple[Tensor, ...]:
        from cutekernels.ops.attention import reference

        q, k, v, lengths, table, sinks, k_scale, v_scale, scale, cap = args
        left = options["window_left"] if options["window"] not in (False, "none") else None
        lengths = lengths.clamp(0, room_of(k, table))  # as kernels do, which cannot raise
        found = reference.decode(q, k, v, lengths, table, sinks, scale, cap, k_scale, v_scale, left=left)
        return found[: 1 + options["lse"]]


def check_room(keys: int) -> None:
    """Refuses a cache with room for longer sequences than kernels count."""
    if keys > MOST_ROOM:
        raise UnsupportedProblem(
            f"a sequence has room for up to {MOST_ROOM} keys, not {keys}: pass a part of the cache or its table"
        )


def check_cache_dim(cache: str, head_dim: int) -> None:
    """Refuses head dims whose rows no kernel reads from a cache in FP8."""
    if cache != "same" and head_dim % 16:
        raise UnsupportedProblem(
            f"a cache in FP8 has a head_dim that is a multiple of 16, for aligned rows; it is {head_dim}: keep it in "
            "fp16 or bf16"
        )


def cache_bytes(cache: str) -> int:
    """Bytes of an element."""
    return 2 if cache == "same" else 1


def check_scale_of_cache(name: str, t: Tensor | None, k: Tensor) -> None:
    """Refuses scales of a cache that has none, a cache in FP8 without them, and those of tokens that lie otherwise."""
    import torch

    if (t is None) != (k.dtype != torch.float8_e4m3fn):
        raise UnsupportedProblem(
            f"{name} belongs to a cache in float8_e4m3fn, as uint8 {token_scales.shape(k)}, one for each token and "
            f"head, or fp32 ({k.shape[2]},), one for each head; the cache is {k.dtype}, and {name} is "
            f"{'missing' if t is None else 'given'}"
        )
    if t is not None and (t.dim() > 1 or t.dtype == torch.uint8):
        token_scales.check(name, t, k)


def check_page_size(size: int) -> None:
    """Refuses a number of tokens that no page has."""
    if size not in PAGE_SIZES:
        raise UnsupportedProblem(f"a page has {', '.join(map(str, PAGE_SIZES))} tokens, not {size}")


def room_of(k: Tensor, table: Tensor | None) -> int:
    """Tokens that a sequence of a cache may have; none where there is no page."""
    return k.shape[1] if table is None else table.shape[1] * k.shape[1] if k.shape[0] else 0


def elements(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Caches as kernels take them: e4m3 as 16-bit elements of two numbers."""
    import torch

    return (k, v) if k.element_size() > 1 else (k.view(torch.int16), v.view(torch.int16))


def draw_tables(p: Any, lengths: Tensor, generator: torch.Generator) -> tuple[Any, ...]:
    """Random ``(q, k, v, lengths, page table or None)``: NaN in the caches wherever no sequence has a token. Behind
    them the scales of k and v, None or of caches in e4m3, whose numbers fill its range; V's of tokens differ by up to
    2^16, K's by 2^4.

    Pages lie in a random order. Entries of the table that a sequence does not need name a page of NaN.
    """
    import torch

    device = lengths.device

    def normal(*shape: int) -> Tensor:
        t = torch.empty(shape, device=device, dtype=DTYPES[p.dtype])
        return t.normal_(generator=generator)

    q = normal(p.batch, p.seq_q, p.heads_q, p.head_dim)
    size = p.page_size or p.seq_kv
    entries = -(-p.seq_kv // size) if p.page_size else 1
    table = None
    pages = p.batch
    if p.page_size:
        pages = p.batch * entries + 1
        order = torch.randperm(pages - 1, generator=generator, device=device).view(p.batch, entries)
        needed = torch.arange(entries, device=device) * size < lengths.unsqueeze(-1)
        table = order.masked_fill(~needed, pages - 1).to(torch.int32)
    caches = [normal(pages, size, p.heads_kv, p.head_dim) for _ in range(2)]
    filled = (torch.arange(entries * size, device=device) < lengths.unsqueeze(-1)).view(p.batch, entries, size)
    tokens = torch.zeros(pages, size, dtype=torch.bool, device=device)
    if table is None:
        tokens = filled[:, 0]
    else:
        tokens[table.long()[needed]] = filled[needed]
    for t in caches:
        t.masked_fill_(~tokens[..., None, None], math.nan)
    if p.cache == "same":
        return q, *caches, lengths, table, *NO_SCALES
    if p.cache == "fp8_tokens":
        scales = []
        for i, least in enumerate((-4, -16)):
            caches[i], found = token_scales.quantized(caches[i])
            found = found + torch.randint(least, 1, found.shape, generator=generator, device=device).to(torch.uint8)
            scales.append(token_scales.by_head(found.masked_fill(~tokens[..., None], token_scales.NAN)))
        return q, *caches, lengths, table, *scales
    sizes = torch.rand((2, p.heads_kv), generator=generator, device=device)
    scales = [(0.5 + own) * (4.0 / E4M3_MAX) for own in sizes]
    for i, own in enumerate(scales):
        bounded = (caches[i] / own[:, None]).clamp(-E4M3_MAX, E4M3_MAX)
        caches[i] = bounded.to(torch.float8_e4m3fn)
    return q, *caches, lengths, table, *scales


def check_pages(table: Tensor, lengths: Tensor, pages: int, size: int, seq_q: int, left: int) -> None:
    """Refuses a page table that names no page where a query sees a token. Waits once."""
    import torch

    begins = torch.arange(table.shape[1], device=table.device) * size
    ends = lengths.clamp(0, table.shape[1] * size).unsqueeze(-1)
    used = begins < ends
    if left >= 0:
        used &= begins + size > ends - seq_q - left
    bad = used & ((table < 0) | (table >= pages))
    if bad.any():
        b, entry = bad.nonzero()[0].tolist()
        raise UnsupportedProblem(
            f"page_table must name one of {pages} pages for each that cache_seqlens uses; entry {entry} of sequence "
            f"{b} is {int(table[b, entry])}, and the sequence has {int(lengths[b])} tokens: reserve pages first"
        )


def check_lengths(lengths: Tensor, room: int) -> None:
    """Refuses lengths that a cache has no room for. Waits once."""
    bad = (lengths < 0) | (lengths > room)
    if bad.any():
        b = int(bad.nonzero()[0])
        raise UnsupportedProblem(
            f"cache_seqlens must be from 0 to {room}, the cache's room; sequence {b} has {int(lengths[b])} tokens: "
            "make room for more"
        )


# ---- many queries ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CacheProblem(AttentionProblem):
    """A causal problem over a cache. ``seq_kv`` is the longest sequence that it has room for."""

    causal: bool = plain(True)
    window: str = plain("none", "left")
    mask: bool = plain(False)
    varlen: bool = plain(False)
    page_size: int = plain(0, *PAGE_SIZES)
    cache: str = plain(*CACHES)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_cache_dim(self.cache, self.head_dim)
        check_room(self.seq_kv)

    def bucket(self) -> Self:
        return super().bucket().replace(cache=tuned_cache(self.cache))

    @property
    def keys(self) -> float:
        """Keys that a query sees, on average."""
        return self.pairs / max(1, self.seq_q)

    @property
    def page(self) -> int | None:
        return self.page_size

    @property
    def cached_in(self) -> str:
        return self.cache

    @property
    def work_bytes(self) -> int:
        table = 4 * self.batch * -(-self.seq_kv // self.page_size) if self.page_size else 0
        of_row = (2 - cache_bytes(self.cache)) * self.head_dim - (self.cache == "fp8_tokens")
        saved = 2 * of_row * self.batch * self.seq_kv * self.heads_kv
        return self.bytes_moved - saved + 4 * self.batch + table


class CacheAttention(
    CachedOp[CacheProblem, AttentionConfig], PrefillOp[CacheProblem], CuteOp[CacheProblem, AttentionConfig]
):
    """Attention of many queries over a cache; ``decode_attention``, of the same operands, plans calls of either."""

    name = "cache_attention"
    revision = 2
    earlier = {1: since_revision_1}
    Problem = CacheProblem
    suite = (
        "batch=4 seq_q=2048 seq_kv=8192 heads_q=32 heads_kv=8 page_size=64",
        "batch=1 seq_q=512 seq_kv=8192 heads_q=32 heads_kv=8 page_size=16",
        "batch=1 seq_q=2048 seq_kv=8192 heads_q=32 heads_kv=8",
        "batch=2 seq_q=300 seq_kv=784 heads_q=8 heads_kv=2 window_left=200 window=left lse=1 page_size=16",
        "batch=3 seq_q=100 seq_kv=333 heads_q=4 heads_kv=4 head_dim=80 dtype=fp16 softcap=1 sinks=fp32",
        "batch=2 seq_q=130 seq_kv=768 heads_q=8 heads_kv=1 head_dim=256 page_size=256 lse=1 sinks=same",
        "batch=1 seq_q=2048 seq_kv=8192 heads_q=32 heads_kv=8 page_size=64 cache=fp8",
    )

    order = (
        *("out", "lse", "q", "k_cache", "v_cache", "mask", "cu_seqlens_q"),
        *("cache_seqlens", "page_table", "sinks", "k_scale", "v_scale"),
    )

    def kernels_order(self, *inputs: Tensor | None) -> tuple[tuple[Any, ...], tuple[Any, Any]]:
        q, k, v, lengths, table, sinks, k_scale, v_scale = inputs
        assert k is not None and v is not None
        return (q, *elements(k, v), None, None, lengths, table, sinks), (k_scale, v_scale)

    def problem(self, *operands: Tensor | None, **options: Any) -> CacheProblem:
        sides = {False: "none", True: "left"}
        window = sides.get(options["window"], options["window"])
        return super().problem(*operands, **options | {"window": window})

    def work(self, p: CacheProblem) -> Work:
        flops = 4.0 * p.batch * p.heads_q * p.pairs * p.head_dim
        return Work(flops=flops, bytes=float(p.work_bytes), depth=depth(p))


CACHE_ATTENTION = CacheAttention()
