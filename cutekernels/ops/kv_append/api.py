"""``kv_append``: the public function, and its registration with torch."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from cutekernels.errors import UnsupportedProblem
from cutekernels.ops.kv_append.op import KV_APPEND, KvAppendConfig
from cutekernels.ops.rope.api import refuse_table_gradient
from cutekernels.ops.shared.calls import refuse_others, register_updating, run, text_of
from cutekernels.ops.shared.checks import check_flag, check_tensor
from cutekernels.ops.shared.paths import PLAIN, direct, refuse_duals


def kv_append(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    state: Tensor,
    *,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    page_table: Tensor | None = None,
    counts: Tensor | None = None,
    q: Tensor | None = None,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    interleaved: bool = False,
    config: KvAppendConfig | str | None = None,
) -> None:
    """Writes new tokens behind each sequence's end and moves the end: see :meth:`KVCache.append`, which runs this.

    Args:
        k: ``(B, S, Hkv, D)``, fp16, bf16 or fp32 (on the CPU fp64 too). Any strides; D contiguous is fast.
        v: shape and dtype of ``k``.
        k_cache: ``(B, T_MAX, Hkv, D)``, or ``(PAGES, PAGE_SIZE, Hkv, D)`` beside a ``page_table``; D contiguous. Dtype
            of ``k``, or float8_e4m3fn beside scales.
        v_cache: shape and dtype of ``k_cache``.
        state: int32 ``(3, B)``: lengths, tokens that found no room, and zeros. Updated.
        k_scale: uint8 ``(B, Hkv, T_MAX)`` or ``(PAGES, Hkv, PAGE_SIZE)``, the last rounded up to a multiple of 16, of
            a cache in float8_e4m3fn: numbers of a token's head are to be multiplied by ``2^(byte - 127)``, the least
            power of two with which the largest finite one, turned and rounded to k's type before, is at most 448 in the
            cache. What is not finite becomes NaN. Updated.
        v_scale: the same of ``v``.
        page_table: int32 ``(B, MAX_PAGES)``; an entry that is no page's number has no room.
        counts: int32 ``(B,)``: how many of its S tokens each sequence appends, the first ones; None for all.
        q: ``(B, S, Hq, D)``, turned in place beside ``k``.
        cos: ``(T, R/2)`` or ``(B or 1, S, R)``, as :func:`cutekernels.rope` takes it; None to turn nothing.
        sin: shape and dtype of ``cos``.
        interleaved: pairs of neighbours instead of halves.
        config: overrides the tuned choice, as a :class:`KvAppendConfig` or its text. Ignored on the CPU.

    Raises:
        UnsupportedProblem: a dtype no kernel takes, shapes, dtypes, devices or strides that do not fit, operands that
            overlap, operands that require gradients.
        InvalidConfig: ``config`` breaks a rule of the op.
    """
    check_tensor("kv_append", "k", k)
    if type(interleaved) is not bool:  # keys take 1 for True
        check_flag("kv_append", "interleaved", interleaved)  # type: ignore[unreachable]
    text = text_of(config, KvAppendConfig)
    queries = k.new_empty((*k.shape[:2], 0, *k.shape[3:])) if q is None else q
    operands = (queries, k, v, state, page_table, counts, cos, sin)
    try:
        scales = (k_scale, v_scale) if k_scale is not None and v_scale is not None else _scales(k, k_scale, v_scale)
        results = (queries, k_cache, v_cache, state, *scales)
        _refuse_gradient(queries, k, v, cos, sin)
        refuse_duals("kv_append", (k_cache, v_cache))
        if type(k) in PLAIN and KV_APPEND.calls.replay(results, operands, (interleaved,), (), config) is not None:
            return
        if direct(*operands, *results):
            run(KV_APPEND, results, operands, options=(interleaved,), config=config)
            return
    except (AttributeError, TypeError):
        given = [queries if t is None else t for t in (k_scale, v_scale)]
        refuse_others(KV_APPEND, operands, (queries, k_cache, v_cache, state, *given))
        raise
    refuse_others(KV_APPEND, operands, results)
    torch.ops.cutekernels.kv_append(
        q, k, v, k_cache, v_cache, state, k_scale, v_scale, page_table, counts, cos, sin, interleaved, text
    )  # fmt: skip


def _scales(k: Tensor, k_scale: Tensor | None, v_scale: Tensor | None) -> tuple[Tensor, Tensor]:
    """Scales as results of a launch: tensors without elements in the place of absent ones."""
    if k_scale is None and v_scale is None and direct(k):
        return _absent(k.device)
    first, second = (k.new_empty(0, dtype=torch.uint8) if t is None else t for t in (k_scale, v_scale))
    return first, second


@cache
def _absent(device: torch.device) -> tuple[Tensor, Tensor]:
    """Made once for a device, since each costs a call a microsecond."""
    with torch.inference_mode(False):
        first, second = (torch.empty(0, dtype=torch.uint8, device=device) for _ in range(2))
    return first, second


def _refuse_gradient(q: Tensor, k: Tensor, v: Tensor, cos: Tensor | None, sin: Tensor | None) -> None:
    refuse_duals("kv_append", (q, k, v, cos, sin))
    graded = q.requires_grad or k.requires_grad or v.requires_grad
    if torch.is_grad_enabled() and graded:
        raise UnsupportedProblem("kv_append is not differentiable: detach its operands, or call under torch.no_grad()")
    if cos is not None and sin is not None:
        refuse_table_gradient(cos, sin)


# ---- torch.library --------------------------------------------------------------------------------------


def _split(
    q: Tensor | None, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, state: Tensor, k_scale: Tensor | None,
    v_scale: Tensor | None, *rest: Tensor | None,
) -> tuple[tuple[Tensor, ...], tuple[Tensor | None, ...]]:  # fmt: skip
    """The results and inputs of a launch, from the tensors of torch's op. An absent q has no heads."""
    queries = k.new_empty((*k.shape[:2], 0, *k.shape[3:])) if q is None else q
    scales = [k.new_empty(0, dtype=torch.uint8) if t is None else t for t in (k_scale, v_scale)]
    return (queries, k_cache, v_cache, state, *scales), (queries, k, v, state, *rest)


register_updating(KV_APPEND, f"({KV_APPEND.schema}, str? config=None)", KV_APPEND.schema.count("Tensor"), _split)
