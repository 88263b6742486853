"""``KVCache``: keys and values of a batch of sequences on the device, with their lengths and page tables."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import index
from typing import Any, Literal, SupportsIndex, TypedDict

import torch
from torch import Tensor

from cutekernels.errors import UnsupportedProblem
from cutekernels.ops.attention import token_scales
from cutekernels.ops.attention.cache import check_cache_dim, check_page_size
from cutekernels.ops.kv_append.api import kv_append
from cutekernels.ops.kv_append.op import LENGTHS, LOST, KvAppendConfig
from cutekernels.ops.shared.checks import check_place, check_tensor

CacheDtype = torch.dtype | Literal["fp8"]
FP8 = torch.float8_e4m3fn
NO_PAGE = -1  # an entry of a page table without a page
_VIEWS = ("_state", "_lengths", "_lost")


class CacheView(TypedDict):
    """A cache as ``decode_attention(q, **cache.view())`` takes it."""

    k_cache: Tensor
    v_cache: Tensor
    cache_seqlens: Tensor
    page_table: Tensor | None
    k_scale: Tensor | None
    v_scale: Tensor | None


@dataclass(frozen=True, slots=True)
class _Pool:
    """Pages, on the host: the free ones, and each sequence's, in the order of its tokens."""

    free: list[int]
    held: list[list[int]]

    def __getitem__(self, sequences: slice) -> _Pool:
        return _Pool(self.free, self.held[sequences])


class KVCache:
    """The keys and values of one layer: contiguous ``(B, T_MAX, HKV, D)``, or in pages ``(PAGES, PAGE_SIZE, HKV, D)``.

    ::

        cache = KVCache.contiguous(8, 4096, heads=8, head_dim=128)
        q = cache.append(k, v, q=q, cos=cos, sin=sin)
        out = decode_attention(q, **cache.view())

    Lengths are on the device and :meth:`append` updates them there, so that the host never waits and a captured graph
    serves any lengths. ``lengths`` may be written to: ``cache.lengths -= rejected`` drops speculated tokens. What is
    assigned is copied there.

    Tokens without room are not written: a sequence ends at its last token that has a place, and ``lost`` counts those
    behind it. Call :meth:`check` now and then, or keep count on the host.

    Pages come from one of three places. By default each sequence permanently owns all of its pages. With ``pages``,
    which may be fewer than that takes, :meth:`reserve` allocates them from a free list on the host and :meth:`reset`
    frees them. With ``page_table`` the caller allocates them; an entry without a page is :data:`NO_PAGE`. Layers with
    equal page numbers share a table: reserve and reset in the cache that made it, and reset in the others.

    ``cache[i]`` and ``cache[i:j]`` are caches of these sequences, in the same memory: to fill or reset one alone.

    With ``dtype="fp8"`` (float8_e4m3fn) :meth:`append` stores each token's heads over a power of two of their own,
    rounded to nearest even, and ``decode_attention`` multiplies by it again: half the bytes are kept and read, beside a
    byte for each scale. Nothing is calibrated, nothing is clamped, and no token depends on another: what is read
    differs from what was appended by at most ``e(x) = max(|x| / 16, largest / 2^17)``, ``largest`` that of the token's
    head. What is not finite becomes NaN. A result of attention then differs from one over the unrounded cache by at
    most ``max e(v) + (exp(2 d) - 1) max |v|``, where ``d``, the largest error of a score, is at most ``softmax_scale *
    sum(|q| e(k))``; of normal random numbers it differs by 4 % in the root mean square.

    Attributes:
        k_cache: the keys.
        v_cache: the values, of the same shape.
        lengths: int32 ``(B,)``, tokens of each sequence.
        lost: int32 ``(B,)``, tokens of each sequence that found no room.
        k_scale, v_scale: of a cache in FP8, uint8 ``(B, HKV, T_MAX)`` or ``(PAGES, HKV, PAGE_SIZE)``, the last
            rounded up to a multiple of 16: byte ``b`` is the factor ``2^(b - 127)`` of a token's head. None in others.
        page_table: int32 ``(B, MAX_PAGES)``, or None.
    """

    def __init__(
        self,
        k_cache: Tensor,
        v_cache: Tensor,
        page_table: Tensor | None = None,
        *,
        k_scale: Tensor | None = None,
        v_scale: Tensor | None = None,
    ) -> None:
        """A cache in existing memory, with no tokens in it.

        Args:
            k_cache: ``(B, T_MAX, HKV, D)``, or with a page table ``(PAGES, PAGE_SIZE, HKV, D)`` with a page size of 16,
                32, 64, 128 or 256. D contiguous.
            v_cache: shape, dtype and device of ``k_cache``.
            page_table: int32 ``(B, MAX_PAGES)``, the page of each ``PAGE_SIZE`` tokens of a sequence.
            k_scale, v_scale: of a cache in float8_e4m3fn, as the attributes are; allocated if left out.
        """
        for name, t in (("k_cache", k_cache), ("v_cache", v_cache), ("page_table", page_table)):
            check_tensor("KVCache", name, t, optional=name == "page_table")
        if k_cache.dim() != 4 or any(getattr(v_cache, n) != getattr(k_cache, n) for n in ("shape", "dtype", "device")):
            raise UnsupportedProblem(
                f"k_cache and v_cache are alike and have four dimensions; got {_look(k_cache)} and {_look(v_cache)}: "
                "allocate both with one shape, dtype and device"
            )
        batch = k_cache.shape[0]
        if page_table is not None:
            if page_table.dim() != 2 or page_table.dtype != torch.int32 or page_table.device != k_cache.device:
                raise UnsupportedProblem(
                    f"page_table is int32 (B, MAX_PAGES), on {k_cache.device}; got {_look(page_table)}: convert it"
                )
            check_page_size(k_cache.shape[1])
            batch = page_table.shape[0]
        with torch.inference_mode(False):
            states = torch.zeros((1, 3, batch), dtype=torch.int32, device=k_cache.device)
        self._set(k_cache, v_cache, page_table, states, 0, None, _scales_of(k_cache, k_scale, v_scale))

    def _set(
        self, k: Tensor, v: Tensor, page_table: Tensor | None, states: Tensor, layer: int, pool: _Pool | None,
        scales: tuple[Tensor | None, Tensor | None],
    ) -> None:  # fmt: skip
        """``states``: ``(LAYERS, 3, B)``, of which this cache's is number ``layer``."""
        self.k_cache, self.v_cache, self.page_table = k, v, page_table
        self.k_scale, self.v_scale = scales
        self._states, self._layer, self._pool = states, layer, pool
        self._look_up()

    def _look_up(self) -> None:
        self._state = self._states[self._layer]
        self._lengths, self._lost = self._state[LENGTHS], self._state[LOST]

    def __getstate__(self) -> dict[str, Any]:
        """Without the views, which would each come back in memory of their own; layers have ``_states`` in common."""
        return {name: value for name, value in self.__dict__.items() if name not in _VIEWS}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._look_up()

    @classmethod
    @torch.inference_mode(False)  # or nothing could be appended outside of it
    def contiguous(
        cls,
        batch: int,
        room: int,
        heads: int,
        head_dim: int,
        *,
        dtype: CacheDtype = torch.bfloat16,
        device: torch.device | str = "cuda",
    ) -> KVCache:
        """New memory for ``room`` tokens of each of ``batch`` sequences."""
        _check_sizes(batch=(batch, 0), room=(room, 0), heads=(heads, 1), head_dim=(head_dim, 1))
        kind = _kind(dtype, device)
        k, v = (torch.empty((batch, room, heads, head_dim), dtype=kind, device=device) for _ in range(2))
        return cls(k, v)

    @classmethod
    @torch.inference_mode(False)
    def paged(
        cls,
        batch: int,
        room: int,
        heads: int,
        head_dim: int,
        *,
        page_size: int = 16,
        pages: int | None = None,
        page_table: Tensor | None = None,
        dtype: CacheDtype = torch.bfloat16,
        device: torch.device | str = "cuda",
    ) -> KVCache:
        """New pages for up to ``room`` tokens of each of ``batch`` sequences.

        Args:
            batch: sequences.
            room: tokens that a sequence's row of the table has entries for, rounded up to whole pages.
            heads: of keys and values.
            head_dim: channels of a head.
            page_size: tokens in a page: 16, 32, 64, 128 or 256.
            pages: the number of pages, which :meth:`reserve` then allocates. If left out, all that ``batch`` sequences
                of ``room`` tokens need; without a ``page_table``, each sequence then owns its pages permanently.
            page_table: int32 ``(batch, room / page_size)``, for a caller who allocates pages.
            dtype: fp16, bf16 or ``"fp8"``, to attend to; fp32 too, to append to.
            device: the device of all tensors.
        """
        _check_sizes(
            batch=(batch, 0), room=(room, 0), heads=(heads, 1), head_dim=(head_dim, 1), page_size=(page_size, 1),
            pages=(0 if pages is None else pages, 0),
        )  # fmt: skip
        kind = _kind(dtype, device)
        check_page_size(page_size)
        check_tensor("KVCache", "page_table", page_table, optional=True)
        entries = -(-room // page_size)
        if page_table is not None and page_table.shape != (batch, entries):
            raise UnsupportedProblem(
                f"{batch} sequences of {room} tokens in pages of {page_size} have a page_table {(batch, entries)}; got "
                f"{tuple(page_table.shape)}: pass one of that shape, or leave it out"
            )
        count = batch * entries if pages is None else pages
        shape = (count, page_size, heads, head_dim)
        k, v = (torch.empty(shape, dtype=kind, device=device) for _ in range(2))
        pool = None
        if page_table is None and pages is None:
            page_table = torch.arange(count, dtype=torch.int32, device=device).view(batch, entries)
        elif page_table is None:
            page_table = torch.full((batch, entries), NO_PAGE, dtype=torch.int32, device=device)
            pool = _Pool(list(range(count))[::-1], [[] for _ in range(batch)])
        cache = cls(k, v, page_table)
        cache._pool = pool
        return cache

    @classmethod
    @torch.inference_mode(False)
    def layers(
        cls,
        layers: int,
        batch: int,
        room: int,
        heads: int,
        head_dim: int,
        *,
        pages: int,
        page_size: int = 16,
        dtype: CacheDtype = torch.bfloat16,
        device: torch.device | str = "cuda",
    ) -> list[KVCache]:
        """The caches of a model's layers, with one page table: :meth:`reserve` and :meth:`reset` in the first one,
        or in ``first[i]``, act on all. Arguments as of :meth:`paged`; ``pages`` is the number of each layer.
        """
        _check_sizes(layers=(layers, 1))
        first = cls.paged(batch, room, heads, head_dim, page_size=page_size, pages=pages, dtype=dtype, device=device)
        states = torch.zeros((layers, *first._state.shape), dtype=torch.int32, device=first.k_cache.device)
        found = [first]
        for _ in range(layers - 1):
            k, v = torch.empty_like(first.k_cache), torch.empty_like(first.v_cache)
            found.append(cls(k, v, first.page_table))
        for layer, cache in enumerate(found):
            scales = cache.k_scale, cache.v_scale
            cache._set(cache.k_cache, cache.v_cache, cache.page_table, states, layer, cache._pool, scales)
        return found

    # -- what there is

    @property
    def lengths(self) -> Tensor:
        return self._lengths

    @lengths.setter
    def lengths(self, value: Tensor) -> None:
        _write("lengths", self._lengths, value)

    @property
    def lost(self) -> Tensor:
        return self._lost

    @lost.setter
    def lost(self, value: Tensor) -> None:
        _write("lost", self._lost, value)

    @property
    def batch(self) -> int:
        return self._state.shape[1]

    @property
    def page_size(self) -> int:
        """Tokens in a page; 0 without pages."""
        return 0 if self.page_table is None else self.k_cache.shape[1]

    @property
    def room(self) -> int:
        """Capacity of a sequence, in tokens."""
        return self.k_cache.shape[1] * (1 if self.page_table is None else self.page_table.shape[1])

    @property
    def free_pages(self) -> int:
        """Pages left for :meth:`reserve`."""
        return len(self._pages().free)

    def view(self) -> CacheView:
        """The arguments of ``decode_attention`` beside q: ``decode_attention(q, **cache.view())``."""
        return {
            "k_cache": self.k_cache,
            "v_cache": self.v_cache,
            "cache_seqlens": self.lengths,
            "page_table": self.page_table,
            "k_scale": self.k_scale,
            "v_scale": self.v_scale,
        }

    def __len__(self) -> int:
        return self.batch

    def __getitem__(self, sequences: int | slice) -> KVCache:
        """The cache of one sequence or of several in a row, in the same memory and with the same lengths."""
        parts = (sequences.start, sequences.stop, sequences.step) if isinstance(sequences, slice) else (sequences,)
        if not all(_whole(n) or (n is None and isinstance(sequences, slice)) for n in parts):
            raise UnsupportedProblem(
                f"sequences are an integer or a slice of integers; got {sequences!r}: pass i, or i:j"
            )
        if not isinstance(sequences, slice):
            first = sequences + self.batch if sequences < 0 else sequences
            if not 0 <= first < self.batch:
                raise IndexError(f"there are {self.batch} sequences; got {sequences}: count from 0")
            sequences = slice(first, first + 1)
        if sequences.step not in (None, 1):
            raise UnsupportedProblem(f"sequences of a part lie in a row; got a step of {sequences.step}: pass i:j")
        part = object.__new__(type(self))
        table, pool, states = self.page_table, self._pool, self._states[..., sequences]
        scales = self.k_scale, self.v_scale
        if table is None:
            own_k, own_v = self.k_cache[sequences], self.v_cache[sequences]
            k_scale, v_scale = (None if t is None else t[sequences] for t in scales)
            part._set(own_k, own_v, None, states, self._layer, None, (k_scale, v_scale))
        else:
            own = None if pool is None else pool[sequences]
            part._set(self.k_cache, self.v_cache, table[sequences], states, self._layer, own, scales)
        return part

    def __repr__(self) -> str:
        pages = f", pages of {self.page_size}" if self.page_table is not None else ""
        kind = str(self.k_cache.dtype).removeprefix("torch.")
        heads, width = self.k_cache.shape[2:]
        return f"<KVCache of {self.batch} x {self.room} tokens{pages}, {heads} x {width} {kind}>"

    # -- tokens

    def append(
        self,
        k: Tensor,
        v: Tensor,
        *,
        q: Tensor | None = None,
        cos: Tensor | None = None,
        sin: Tensor | None = None,
        interleaved: bool = False,
        counts: Tensor | None = None,
        config: KvAppendConfig | str | None = None,
    ) -> Tensor | None:
        """Writes each sequence's new tokens behind its last one and updates ``lengths``, in one launch, asynchronously.

        With ``cos`` and ``sin``, keys are turned on the way, and queries beside them, as :func:`cutekernels.rope` does
        with ``positions=lengths``.

        Args:
            k: ``(B, S, HKV, D)``, dtype (beside FP8 fp16, bf16 or fp32) and device of the cache. Any strides; D
                contiguous is fast.
            v: shape of ``k``.
            q: ``(B, S, HQ, D)``, turned in place.
            cos: ``(T, R/2)`` with R <= D, fp32 or of k's dtype: a row per position. Or ``(B or 1, S, R)``, a row per
                token whose halves repeat, as Hugging Face's modules make it. None: nothing is turned.
            sin: shape and dtype of ``cos``.
            interleaved: pairs of neighbours (GPT-J, Llama's original) instead of halves (NeoX, Hugging Face).
            counts: int32 ``(B,)``, on the device: how many of its S tokens each sequence appends, its first ones. 0
                leaves a sequence as it is. None: all.
            config: overrides the tuned choice, as a :class:`KvAppendConfig` or its text. Ignored on the CPU.

        Returns:
            ``q``.

        Raises:
            UnsupportedProblem: shapes, dtypes or devices that do not fit, q without ``cos``, operands that overlap, a
                call that needs gradients; on the CPU a position without a row in ``cos`` (on a GPU NaN).
            InvalidConfig: ``config`` breaks a rule of the op.
        """
        kv_append(
            k, v, self.k_cache, self.v_cache, self._state, k_scale=self.k_scale, v_scale=self.v_scale,
            page_table=self.page_table, counts=counts, q=q, cos=cos, sin=sin, interleaved=interleaved, config=config,
        )  # fmt: skip
        return q

    def check(self) -> None:
        """Waits for the device. Raises UnsupportedProblem if tokens found no room since the last :meth:`reset`."""
        lost = {b: n for b, n in enumerate(self.lost.tolist()) if n}
        if lost:
            raise UnsupportedProblem(
                f"tokens found no room, by sequence: {lost}: reserve pages ahead of append, or make room for more than "
                f"{self.room} tokens"
            )

    def reset(self) -> None:
        """Drops all tokens, and frees pages that :meth:`reserve` took. ``cache[i].reset()`` for one sequence."""
        (self._state if self._layer else self._states).zero_()  # the first layer empties all
        if self._pool is not None:
            assert self.page_table is not None
            for held in self._pool.held:
                self._pool.free.extend(reversed(held))
                held.clear()
            self.page_table.fill_(NO_PAGE)

    def reserve(self, tokens: int | Sequence[int]) -> None:
        """Allocates pages so that sequences have room for ``tokens`` tokens in all, one number or one for each.

        The page table is written in place, in stream order and asynchronously: captured graphs stay valid, but do not
        include the write. Call it before appending.

        Raises:
            UnsupportedProblem: too few pages are free, in which case none was taken; more tokens than the table has
                entries for; a cache that allocates no pages.
        """
        pool, size = self._pages(), self.page_size
        wanted: list[int] = list(tokens) if isinstance(tokens, Iterable) else [tokens] * self.batch
        if len(wanted) != self.batch or not all(_whole(n) and 0 <= n <= self.room for n in wanted):
            raise UnsupportedProblem(
                f"reserve takes a number of tokens up to {self.room}, or one for each of {self.batch} sequences; got "
                f"{tokens}: reserve no more than the page table has entries for"
            )
        missing = [max(0, -(-n // size) - len(held)) for n, held in zip(wanted, pool.held, strict=True)]
        if sum(missing) > len(pool.free):
            raise UnsupportedProblem(
                f"{sum(missing)} more pages of {size} tokens are needed and {len(pool.free)} are free: reset a sequence"
            )
        free = iter(reversed(pool.free))
        places = [
            (b, len(held) + i, next(free))
            for b, (more, held) in enumerate(zip(missing, pool.held, strict=True))
            for i in range(more)
        ]
        if places:
            assert self.page_table is not None
            pinned = self.page_table.is_cuda
            listed = torch.tensor(places, device="cpu", pin_memory=pinned).t()
            rows, entries, numbers = listed.to(self.page_table.device, non_blocking=pinned)
            self.page_table[rows, entries] = numbers.int()
            for b, _, page in places:  # once the table has them
                pool.held[b].append(page)
            del pool.free[-len(places) :]

    def _pages(self) -> _Pool:
        if self._pool is None:
            raise UnsupportedProblem(
                "this cache hands out no pages: it has none, or sequences have theirs for good, or the page table is "
                "the caller's; KVCache.paged(..., pages=n) has a free list"
            )
        return self._pool


def _kind(dtype: CacheDtype, device: torch.device | str) -> torch.dtype:
    """torch's type for a cache's."""
    kind = FP8 if isinstance(dtype, str) and dtype == "fp8" else dtype
    check_place(kind, device)
    assert isinstance(kind, torch.dtype)
    if kind.itemsize == 1 and kind != FP8:
        raise UnsupportedProblem(f'a cache of one byte a number is in float8_e4m3fn; got {kind}: pass dtype="fp8"')
    return kind


def _scales_of(
    cache: Tensor, k_scale: Tensor | None, v_scale: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:  # fmt: skip
    """The scales of a cache: none in 16 bits; in FP8 those given, or new memory."""
    given = {"k_scale": k_scale, "v_scale": v_scale}
    for name, t in given.items():
        check_tensor("KVCache", name, t, optional=True)
    if (k_scale is None) != (v_scale is None) or (k_scale is not None and cache.dtype != FP8):
        there = " and ".join(name for name, t in given.items() if t is not None)
        raise UnsupportedProblem(
            f"k_scale and v_scale come together, of a cache in {FP8}; got {there} beside {cache.dtype}: pass both, or "
            "neither"
        )
    if cache.dtype != FP8:
        return None, None
    check_cache_dim("fp8", cache.shape[3])
    if k_scale is None or v_scale is None:
        with torch.inference_mode(False):
            made = [torch.empty(token_scales.shape(cache), dtype=torch.uint8, device=cache.device) for _ in range(2)]
        return made[0], made[1]
    for name, t in (("k_scale", k_scale), ("v_scale", v_scale)):
        token_scales.check(name, t, cache)
        token_scales.check_aligned(name, t)
    return k_scale, v_scale


def _write(name: str, place: Tensor, value: Tensor) -> None:
    """Copies what is assigned to an attribute to its place in the state, where kernels and graphs read it."""
    if value is place:  # cache.lengths -= n has written already
        return
    check_tensor("KVCache", name, value)
    if any(getattr(value, n) != getattr(place, n) for n in ("shape", "dtype", "device")):
        raise UnsupportedProblem(f"{name} takes {_look(place)}; got {_look(value)}: convert it, or write to a part")
    place.copy_(value)


def _look(t: Tensor) -> str:
    return f"{tuple(t.shape)} {t.dtype} on {t.device}"


def _whole(n: object) -> bool:
    """Whether ``n`` is an integer, and no bool."""
    if isinstance(n, bool) or not isinstance(n, SupportsIndex):
        return False
    try:
        index(n)
    except TypeError:  # a tensor of something else
        return False
    return True


_MOST_ELEMENTS = 1 << 48


def _check_sizes(**sizes: tuple[object, int]) -> None:
    """Refuses sizes that are no integers or below the least."""
    for name, (size, least) in sizes.items():
        if not isinstance(size, int) or isinstance(size, bool) or size < least:
            raise UnsupportedProblem(f"{name} must be an integer from {least} on; it is {size!r}: pass another")
    if math.prod(size for size, _ in sizes.values()) >= _MOST_ELEMENTS:  # type: ignore[misc]
        told = ", ".join(f"{name}={size}" for name, (size, _) in sizes.items())
        raise UnsupportedProblem(f"a cache holds fewer than 2^48 elements; {told} are more: make it smaller")
