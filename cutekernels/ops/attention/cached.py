"""``cache_attention``: many queries over a cache, as a chunk of a prompt has, by the kernels of ``op.py``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from cutekernels.op import Work, plain
from cutekernels.ops.attention.cache import PAGE_SIZES, CachedOp, cache_bytes, check_cache_dim, check_room, elements
from cutekernels.ops.attention.config import AttentionConfig
from cutekernels.ops.attention.op import PrefillOp
from cutekernels.ops.attention.problem import (
    CACHES,
    AttentionProblem,
    depth,
    launch_blind,
    score_factors,
    since_revision_1,
    tuned_cache,
)
from cutekernels.ops.shared.cute_op import CuteOp

if TYPE_CHECKING:
    from torch import Tensor


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

    # -- kernel

    def bind(self, p: CacheProblem, c: AttentionConfig, kernel: Callable[..., Any]) -> Callable[..., Any]:
        from cutekernels.ops.shared.per_stream import StreamWorkspace

        if p.seq_kv == 0:
            return launch_blind(p.lse, 6 + p.lse)
        limits = p.limits
        counter = StreamWorkspace(0, 1) if c.dynamic_scheduler else None  # one ticket, no partial sums

        def launch(*args: Any) -> None:
            out, lse = args[0], args[1].view(-1) if p.lse else None
            q, k, v, lengths, table, sinks, *scales, scale, softcap = args[1 + p.lse :]
            if out.numel() == 0:
                return
            tickets = () if c.body == "multistage" else (None if counter is None else counter.get()[1],)
            factors, last = score_factors(scale, softcap), () if c.by_groups else scales
            operands = out, lse, q, *elements(k, v), None, None, lengths, table, sinks
            kernel(*operands, *tickets, *factors, *limits, *last)

        return launch

    def problem(self, *operands: Tensor | None, **options: Any) -> CacheProblem:
        sides = {False: "none", True: "left"}
        window = sides.get(options["window"], options["window"])
        return super().problem(*operands, **options | {"window": window})

    def work(self, p: CacheProblem) -> Work:
        flops = 4.0 * p.batch * p.heads_q * p.pairs * p.head_dim
        return Work(flops=flops, bytes=float(p.work_bytes), depth=depth(p))


CACHE_ATTENTION = CacheAttention()
