"""Shared by the tests of ``kv_append``: its truth, token by token, and cases for Triton's interpreter.

This file is also the script of the child process that runs the cases (see ``tests/interpreted.py``).
"""

from __future__ import annotations

import random
from itertools import product
from typing import Any

import torch
from torch import Tensor

from cutekernels.ops.attention import token_scales
from cutekernels.ops.kv_append.op import KV_APPEND, KvAppendProblem
from tests.interpreted import DTYPES, H200, interpret, serve
from tests.rope.cases import arrange, error_ratio, table
from tests.rope.cases import truth as turned

FILLING = 7.0  # value of memory that must not be written


def ends(state: Tensor, counts: list[int], room: int, pages: int, table: Tensor | None, size: int) -> Any:
    """The place of each token, ``{(sequence, token): (page, slot)}``, and the state after all of them."""
    places: dict[tuple[int, int], tuple[int, int]] = {}
    after = state.clone()
    for b, count in enumerate(counts):
        start = min(max(int(state[0, b]), 0), room)
        end: int | None = None
        for s in range(count):
            position = start + s
            legal = position < room
            page, slot = b, position
            if legal and table is not None:
                page, slot = int(table[b, position // size]), position % size
                legal = 0 <= page < pages
            if legal:
                places[b, s] = page, slot
            elif end is None:
                end = position
        end = start + count if end is None else end
        after[:3, b] = torch.tensor([end, int(state[1, b]) + start + count - end, 0])
    return places, after


def judge(
    before: tuple[Tensor, ...], results: tuple[Tensor, ...], inputs: tuple[Any, ...], interleaved: bool = False
) -> dict[str, Any]:
    """``before``: what k_cache and v_cache held, and their scales. Errors of turned rows over their tolerance; the rest
    bit for bit. In FP8 the tolerance is what :class:`KVCache` states.
    """
    out_q, k_cache, v_cache, out_state, *_ = results
    q, k, v, state, pages, counts, cos, sin = inputs
    batch, seq = k.shape[:2]
    size = k_cache.shape[1]
    room = size if pages is None else size * pages.shape[1]
    number = [seq] * batch if counts is None else [min(max(int(n), 0), seq) for n in counts]
    places, after = ends(state, number, room, k_cache.shape[0], pages, size)
    rows = state[0].long().clamp(0, room)[:, None] + torch.arange(seq, device=k.device)
    expected_k, expected_v = (t.clone() for t in before[:2])
    sizes_k = expected_k.double().abs()
    exact_q, exact_k = (q.double(), q.double().abs()), (k.double(), k.double().abs())
    if cos is not None:
        tables = [cos, sin]
        if cos.dim() == 3:  # a row per token
            tables = [t[..., : t.shape[2] // 2].expand(batch, -1, -1).flatten(0, 1) for t in tables]
            rows = torch.arange(batch * seq, device=k.device).view(batch, seq)
        legal = rows < tables[0].shape[0]
        exact_q, exact_k = (turned(x, *tables, rows.where(legal, 0), interleaved=interleaved) for x in (q, k))
        for value, _ in (exact_q, exact_k):
            value[..., : 2 * tables[0].shape[1]].masked_fill_(~legal[:, :, None, None], float("nan"))
    wide_k = expected_k.double()
    if k_cache.element_size() == 1:
        return fp8_reply(places, before, results, after, (exact_k[0].to(k.dtype), v, k.dtype)) | {
            "ratio of q": error_ratio(out_q, *exact_q)
        }
    for (b, s), (page, slot) in places.items():
        wide_k[page, slot], sizes_k[page, slot] = exact_k[0][b, s], exact_k[1][b, s]
        expected_v[page, slot] = v[b, s]
    return {
        "ratio": max(error_ratio(out_q, *exact_q), error_ratio(k_cache, wide_k, sizes_k)),
        "values": bool(torch.equal(v_cache.nan_to_num(-1.0), expected_v.nan_to_num(-1.0))),
        "state": bool(torch.equal(out_state, after)),
    }


def fp8_reply(
    places: Any, before: tuple[Tensor, ...], results: tuple[Tensor, ...], after: Tensor, exact: Any
) -> dict[str, Any]:
    """:func:`judge` of caches in e4m3: k within the bound, v and its scales bit for bit, nothing clamped."""
    ratio, values = 0.0, True
    written = torch.zeros(results[1].shape[:2], dtype=torch.bool)
    scales = [t.long() for t in results[4:]]
    for (b, s), (page, slot) in places.items():
        written[page, slot] = True
        for i, cache in enumerate(results[1:3]):
            codes, bytes_ = token_scales.quantized(exact[i][b, s])
            found, stored = scales[i][page, :, slot], cache[page, slot].double()
            number = torch.ldexp(exact[i][b, s].double(), (127 - found)[:, None])
            legal = number.isfinite()
            values &= bool((stored.isnan() == ~legal).all()) and bool((number[legal].abs() < 448 * (1 + 2.0**-8)).all())
            if i == 1:
                values &= bool(torch.equal(found, bytes_.long()))
                values &= bool(torch.equal(cache[page, slot].view(torch.uint8), codes.view(torch.uint8)))
            else:  # a key beside the limit may be on either side
                values &= bool(((found - bytes_.long()).abs() <= 1).all())
            # Half a step of e4m3, a whole one below 65536 in fp16, and half of bf16's where a number turned.
            step = torch.where((found == 135)[:, None] & (exact[2] == torch.float16), 2.0**-3, 2.0**-4)
            bound = number.abs() * (step + 2.0**-8 * (i == 0)) + 2.0**-10 * 1.001
            ratio = max([ratio, *((stored - number).abs() / bound)[legal].flatten().tolist()])
    for cache, old in zip(results[1:3], before[:2], strict=True):
        values &= bool(torch.equal(cache[~written].double().nan_to_num(-1.0), old[~written].double().nan_to_num(-1.0)))
    for scale, old in zip(results[4:], before[2:], strict=True):
        slots = written.shape[1]
        untouched = scale.transpose(1, 2)[:, :slots][~written], old.transpose(1, 2)[:, :slots][~written]
        values &= bool(torch.equal(*untouched)) and bool(torch.equal(scale[..., slots:], old[..., slots:]))
    return {"ratio": ratio, "values": values, "state": bool(torch.equal(results[3], after))}


def right(reply: dict[str, Any]) -> bool:
    return (
        max(reply["ratio"], reply.get("ratio of q", 0.0)) <= 1
        and reply["values"]
        and reply["state"]
        and reply.get("outside", True)
    )


# ---- the child process ----------------------------------------------------------------------------------


def posed(case: dict[str, Any]) -> tuple[list[Tensor], tuple[Any, ...], list[Tensor]]:
    """Results, inputs and the memory around the caches."""
    torch.manual_seed(5)
    batch, seq, (heads_q, heads_kv), width = (case[name] for name in ("batch", "seq", "heads", "width"))
    dtype, rotary, size = DTYPES[case["dtype"]], case["rotary"], case.get("page_size", 0)
    if not rotary:
        heads_q = 0
    q, k = arrange(case["kind"], batch, seq, (heads_q, heads_kv), width, dtype)
    v = arrange(case["kind"], batch, seq, (0, heads_kv), width, dtype)[1]
    cos = sin = counts = pages = None
    if rotary:
        rows = case.get("rows", 64)
        kind = DTYPES[case.get("table", "fp32")]
        cos, sin = table(batch * seq if case.get("gathered") else rows, rotary // 2, kind)
        if case.get("gathered"):
            cos, sin = (torch.cat((t, t), -1).view(batch, seq, rotary) for t in (cos, sin))
            if case["gathered"] == "one":
                cos, sin = cos[:1], sin[:1]
    if "counts" in case:
        counts = torch.tensor(case["counts"], dtype=torch.int32)
    room, number = case.get("room", 24), batch
    if size:
        number = batch * room // size + 2
        pages = torch.randperm(number)[: batch * room // size].view(batch, -1).int()
        for b, entry, page in case.get("holes", []):
            pages[b, entry] = page if page < 0 else number + page
    kind = dtype
    if case.get("fp8"):  # heads of every size, one of zeros, and what is not finite
        kind = torch.float8_e4m3fn
        sizes = case["fp8"] * 2.0 ** torch.randint(-9, 10, (*v.shape[:3], 1))
        k.mul_(sizes.flip(1).to(dtype)), v.mul_(sizes.to(dtype))
        v[0, 0, 0, 3:8] = torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0, 448.0], dtype=dtype)
        v[-1, -1, -1] = 0.0
        if case["fp8"] > 100:  # the largest of fp16
            v[-1, 0, 0, :4] = torch.tensor([65504.0, -65504.0, 61440.0, 65472.0], dtype=dtype)
    state = torch.zeros(3, batch, dtype=torch.int32)
    state[0] = torch.tensor(case.get("lengths", [3, 0, 5, 1][:batch]))
    state[1] = 4
    state[2] = case.get("ticket", 0)
    shape = (number + 2, size or room, heads_kv, width)
    memory = [torch.full(shape, FILLING, dtype=kind) for _ in range(2)]
    if case.get("fused caches"):
        joint = torch.full((*shape[:2], 2, *shape[2:]), FILLING, dtype=kind)
        memory = [joint[:, :, 0], joint[:, :, 1]]
    caches = [m[1:-1] for m in memory]
    out_q, out_state = torch.full(q.shape, float("nan"), dtype=dtype), torch.full_like(state, -9)
    if case.get("inplace"):
        out_q, out_state = q, state
    scales = [torch.full(token_scales.shape(t) if case.get("fp8") else (0,), 7, dtype=torch.uint8) for t in caches]
    return [out_q, *caches, out_state, *scales], (q, k, v, state, pages, counts, cos, sin), memory


def child_case(case: dict[str, Any]) -> dict[str, Any]:
    results, inputs, memory = posed(case)
    before = tuple([t.clone() for t in (*results[1:3], *results[4:])])
    copies = tuple([t.clone() if t is not None else None for t in inputs])
    flags = {"interleaved": bool(case.get("interleaved"))}
    problem = interpret(KV_APPEND, results, inputs, config=case.get("config"), edit=case.get("edit"), **flags)
    reply = judge(before, tuple(results), copies, **flags)
    reply["outside"] = all(bool((m[[0, -1]].double() == FILLING).all()) for m in memory)
    return reply | {"problem": problem}


_BASE = {"batch": 2, "seq": 5, "heads": (3, 2), "width": 16, "rotary": 16, "dtype": "bf16", "kind": "dense"}
_PAGED = _BASE | {"page_size": 16, "room": 48}
_WHOLE = "tokens={} heads=8 block=8 warps={} whole=1"


def numerics_cases() -> dict[str, dict[str, Any]]:
    cases: dict[str, dict[str, Any]] = {}
    for kind, size, interleaved in product(("dense", "joint", "heads first", "misaligned"), (0, 16), (False, True)):
        base = _PAGED if size else _BASE
        cases[f"{kind} {size} {interleaved=}"] = base | {"kind": kind, "interleaved": interleaved}
    for rotary, interleaved in product((0, 2, 6, 10, 22, 24), (False, True)):
        if rotary or not interleaved:
            more = {"rotary": rotary, "width": 24, "interleaved": interleaved}
            cases[f"{rotary} of 24 {interleaved=}"] = _BASE | more
    for width, rotary in ((15, 6), (12, 0), (1030, 1024), (520, 16)):
        cases[f"{rotary} of {width}"] = _BASE | {"rotary": rotary, "width": width, "seq": 2, "batch": 1}
    for size in (16, 32, 64, 128, 256):
        more = {
            "page_size": size,
            "room": 2 * size,
            "seq": 21 if size == 16 else 7,
            "lengths": [size - 4, 3],
            "rows": 600,
        }
        cases[f"over the edge of pages of {size}"] = _BASE | more
    for dtype, t, rotary in product(("fp16", "fp32", "bf16"), ("fp32", "same"), (16, 0)):
        if (dtype, t) != ("fp32", "same"):
            cases[f"{dtype} {t} {rotary}"] = _PAGED | {
                "dtype": dtype,
                "table": dtype if t == "same" else t,
                "rotary": rotary,
            }
    for gathered, size in product(("each", "one"), (0, 16)):
        cases[f"gathered {gathered} {size}"] = (_PAGED if size else _BASE) | {"gathered": gathered}
    for size in (0, 16):
        base = _PAGED if size else _BASE
        room = base.get("room", 24)
        cases[f"counted {size}"] = base | {"counts": [0, 3]}
        cases[f"wild counts {size}"] = base | {"counts": [-2, 99]}
        cases[f"full {size}"] = base | {"lengths": [room, room - 2], "inplace": True}
        cases[f"wild lengths {size}"] = base | {"lengths": [-7, room + 9], "inplace": True}
        cases[f"outside of the table of angles {size}"] = base | {"rows": 6, "lengths": [3, 0]}
        cases[f"in place {size}"] = base | {"inplace": True, "kind": "joint", "rotary": 10}
        cases[f"a sequence of its own {size}"] = base | {"batch": 1, "seq": 1, "heads": (0, 1), "rotary": 0}
        cases[f"one token of many sequences {size}"] = base | {"batch": 4, "seq": 1, "inplace": True}
        cases[f"fused caches {size}"] = base | {"fused caches": True}
    for name, holes in {
        "no page": [(0, 1, -1)],
        "a page too many": [(1, 0, 0)],
        "a hole": [(0, 0, -5), (1, 1, 7)],
    }.items():
        cases[name] = _PAGED | {"holes": holes, "seq": 20, "lengths": [12, 1]}
    cases["a thousand pages"] = _PAGED | {
        "room": 16 * 1000,
        "seq": 30,
        "lengths": [15020, 400],
        "holes": [(0, 940, -1)],
        "rows": 16000,
    }
    for size, rotary, interleaved in product((0, 16), (0, 8, 16), (False, True)):
        if rotary or not interleaved:  # all heads of a token, those of q, k and v, in blocks that do not divide them
            more = {"rotary": rotary, "interleaved": interleaved, "heads": (11, 9), "inplace": rotary == 8}
            base = (_PAGED if size else _BASE) | more | {"seq": 5, "lengths": [13, 0], "config": _WHOLE.format(2, 1)}
            cases[f"whole {size} {rotary} {interleaved=}"] = base
    for size in (0, 16):
        more = {"seq": 1, "config": _WHOLE.format(1, 1), "heads": (3, 9), "inplace": True, "batch": 3}
        cases[f"one program for a sequence {size}"] = (_PAGED if size else _BASE) | more
    for scale, size, rotary in product((1.0, 1e-30, 1000.0), (0, 16), (0, 8, 16)):
        more = {"fp8": scale, "rotary": rotary, "inplace": True, "interleaved": rotary == 8}
        cases[f"fp8 {scale} {size} {rotary}"] = (_PAGED if size else _BASE) | more
    for size, inplace in product((0, 16), (False, True)):
        more = {
            "heads": (11, 9),
            "inplace": inplace,
            "fp8": 1.0,
            "rotary": 8 * (1 + inplace),
            "config": _WHOLE.format(2, 1),
        }
        cases[f"fp8 whole {size} {inplace=}"] = (_PAGED if size else _BASE) | more
    for scale, dtype, rotary in product((1e-5, 1.0, 1000.0), ("fp16", "fp32"), (0, 6)):
        cases[f"fp8 {scale} {dtype} {rotary}"] = _BASE | {"fp8": scale, "rotary": rotary, "dtype": dtype, "width": 40}
    cases["fp8 fused caches"] = _BASE | {"fp8": 1.0, "fused caches": True, "inplace": True, "dtype": "fp16"}
    cases["fp8 counted holes"] = _PAGED | {"fp8": 1.0, "counts": [3, 5], "holes": [(0, 0, -1)], "inplace": True}
    more = {"holes": [(0, 1, -1)], "seq": 16, "lengths": [12, 1], "heads": (3, 9), "config": _WHOLE.format(16, 2)}
    cases["a hole in one tile"] = _PAGED | more
    rng = random.Random(11)
    for size, rotary, interleaved in product((0, 16), (16, 32), (False, True)):
        base = (_PAGED if size else _BASE) | {"width": 40, "rotary": rotary, "seq": 7, "interleaved": interleaved}
        p = KvAppendProblem(2, 7, 2, 40, 3, rotary, interleaved=interleaved, page_size=size)
        for config in rng.sample(list(KV_APPEND.valid(p, H200)), 2):
            cases[f"{size} {rotary} {interleaved=} [{config}]"] = base | {"config": str(config)}
    return cases


CASES = numerics_cases()
PLANTED = {
    "a head of q forgotten": _BASE | {"edit": {"heads_q": -1}},
    "a head of k and v forgotten": _BASE | {"edit": {"heads_kv": -1}},
    "a token forgotten": _BASE | {"edit": {"seq": -1}},
    "v read by k's pitch": _BASE | {"kind": "joint", "edit": {"v_seq": 16}},
    "a channel forgotten": _BASE | {"edit": {"half": -1}},
    "what does not turn forgotten": _BASE | {"edit": {"head_dim": -1}, "rotary": 8},
    "written past the room": _BASE | {"edit": {"room": 9}, "lengths": [0, 22]},
    "a page beyond the last": _PAGED | {"edit": {"pages": 1}, "holes": [(1, 0, 0)]},
    "one sequence's pages for all": _PAGED | {"edit": {"page_table_batch": -3}},
    "all tokens counted alike": _BASE | {"counts": [1, 3], "edit": {"counts_step": -1}},
    "moved by the first program": _BASE | {"ticket": 4, "inplace": True, "config": "tokens=1 heads=4 block=8 warps=1"},
    "a ticket too few": _BASE | {"ticket": -1},
    "one head's scale for all": _BASE | {"fp8": 1.0, "inplace": True, "edit": {"v_scale_head": -16}},
}


if __name__ == "__main__":
    serve(child_case)
