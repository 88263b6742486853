"""Packed sequences whose ends are not what they should be: refused on the CPU, harmless to kernels.

The kernels' own search for a tile's sequence is compiled for the host and runs there.
"""

from __future__ import annotations

import random
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("cutlass")

import cutlass
from cutlass import Int32, cute
from cutlass.cute.runtime import from_dlpack

from cutekernels.errors import UnsupportedProblem
from cutekernels.kernels.cute.parts.sequences import Ends, Sequences
from cutekernels.ops.attention.api import attention
from cutekernels.ops.attention.op import ATTENTION
from cutekernels.ops.attention.problem import AttentionProblem
from tests.attention.cases import rows

TILE = 16
MOST = 2**31 - 1
ENDS = {  # by what is wrong, over 40 rows
    "begins late": [3, 20, 40],
    "begins before": [-1, 20, 40],
    "ends early": [0, 20, 39],
    "ends behind": [0, 20, 41],
    "falls": [0, 30, 20, 40],
    "falls at the end": [0, 41, 40],
    "nothing": [0, 0, 0],
    "noise": [-(2**31), MOST, 7, -5, 40],
}


# ---- values ---------------------------------------------------------------------------------------------


def ints(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def packed(side: str, ends: list[int]) -> Any:
    right = ints([0, *[40] * (len(ends) - 1)])
    cu_q, cu_kv = (ints(ends), right) if side == "cu_seqlens_q" else (right, ints(ends))
    return *[rows(40, 2, 16, seed=s) for s in range(3)], {"cu_seqlens_q": cu_q, "cu_seqlens_kv": cu_kv}


@pytest.mark.parametrize("check", [False, True])
@pytest.mark.parametrize("wrong", ENDS)
@pytest.mark.parametrize("side", ["cu_seqlens_q", "cu_seqlens_kv"])
def test_wrong_ends_are_refused_on_the_cpu(side: str, wrong: str, check: bool) -> None:
    *qkv, given = packed(side, ENDS[wrong])
    with pytest.raises(UnsupportedProblem, match=rf"{side} must run from 0 to 40, .*never fall; .*: pass"):
        attention(*qkv, **given, check=check)
    lse = rows(2, 40, seed=4)
    options = (False, -1, -1, 0.25, 0.0)
    with pytest.raises(UnsupportedProblem, match=rf"{side} must run from 0 to 40"):
        torch.ops.cutekernels.attention_backward(qkv[0], None, *qkv, qkv[0], lse, None, *given.values(), None, *options)


def test_right_ends_are_taken_with_a_check_too() -> None:
    q, k, v, given = packed("cu_seqlens_q", [0, 0, 17, 40])
    given["cu_seqlens_kv"] = ints([0, 5, 5, 40])
    torch.testing.assert_close(attention(q, k, v, **given, check=True), attention(q, k, v, **given))
    torch.testing.assert_close(
        attention(q[None], k[None], v[None], check=True)[0], attention(q[None], k[None], v[None])[0]
    )


def test_rows_of_no_sequence_have_nothing_in_the_reference() -> None:
    p = AttentionProblem(2, 20, 20, 2, 2, head_dim=16, varlen=True, lse=True)
    q, k, v, given = packed("cu_seqlens_q", [5, 20, 30])
    out, lse = ATTENTION.reference(p, q, k, v, None, given["cu_seqlens_q"], ints([0, 40, 40]), None, 0.25, 0.0)
    empty = torch.tensor([*[True] * 5, *[False] * 15, *[True] * 20])
    assert (out[empty] == 0).all()
    assert (lse[:, empty] == -torch.inf).all()
    assert (out[~empty] != 0).any(-1).all()


# ---- the kernels' search --------------------------------------------------------------------------------


@cute.jit
def _locate(
    mX: cute.Tensor, mY: cute.Tensor, mCuX: cute.Tensor, mCuY: cute.Tensor, mFound: cute.Tensor,
    sequences: cutlass.Constexpr,
):  # fmt: skip
    tiles, _ = sequences.grid(mX, mCuX, TILE)
    mFound[0, 0] = tiles
    for i in cutlass.range(tiles):
        at = sequences.locate(i, Int32(0), TILE, mX, mY, Ends(mCuX, mCuY))
        mFound[i + 1, 0] = at.batch
        mFound[i + 1, 1] = at.tile
        mFound[i + 1, 2] = at.begin_x
        mFound[i + 1, 3] = at.begin_y
        mFound[i + 1, 4] = at.seq_x
        mFound[i + 1, 5] = at.seq_y


@cache
def compiled(*ranks: int) -> Any:
    tensors = [torch.zeros((2,) * rank, dtype=torch.int32) for rank in ranks]
    return cute.compile(_locate, *map(_operand, tensors), Sequences(True))


def _operand(t: Tensor) -> Any:
    return from_dlpack(t).mark_layout_dynamic(leading_dim=t.dim() - 1)


def located(total_x: int, total_y: int, ends_x: list[int], ends_y: list[int]) -> list[list[int]]:
    """``(sequence, tile, begin of X, of Y, length of X, of Y)`` of each tile of the grid."""
    found = torch.zeros(total_x // TILE + len(ends_x) + 2, 6, dtype=torch.int32)
    lead = [torch.zeros(total, 1, 8, dtype=torch.int32) for total in (total_x, total_y)]
    operands = (*lead, ints(ends_x), ints(ends_y), found)
    compiled(*[t.dim() for t in operands])(*map(_operand, operands))
    return found[1 : 1 + int(found[0, 0])].tolist()  # type: ignore[no-any-return]


def random_ends(rng: random.Random, total: int, sequences: int) -> list[int]:
    kinds = (lambda: rng.randint(0, total), lambda: rng.randint(-5, total + 5), lambda: rng.choice([-MOST - 1, MOST]))
    return [rng.choice(kinds)() for _ in range(sequences + 1)]


@pytest.mark.parametrize("seed", range(60))
def test_whatever_the_ends_each_row_has_one_tile_and_none_is_out_of_range(seed: int) -> None:
    rng = random.Random(seed)
    total_x, total_y, sequences = rng.randint(1, 200), rng.randint(1, 200), rng.randint(1, 6)
    ends_x, ends_y = (random_ends(rng, total, sequences) for total in (total_x, total_y))
    if seed % 3 == 0:
        ends_x.sort()
    taken = [0] * total_x
    for sequence, tile, begin_x, begin_y, seq_x, seq_y in located(total_x, total_y, ends_x, ends_y):
        assert 0 <= begin_x <= begin_x + seq_x <= total_x
        assert 0 <= begin_y <= begin_y + seq_y <= total_y
        for row in range(tile * TILE, min(seq_x, (tile + 1) * TILE)):
            taken[begin_x + row] += 1
            if not 0 <= sequence < sequences:
                assert seq_y == 0, "rows of no sequence see nothing"
                assert begin_x + row < max(0, ends_x[0]) or begin_x + row >= max(ends_x)
    assert taken == [1] * total_x


@pytest.mark.parametrize("seed", range(20))
def test_right_ends_give_each_sequence_its_rows(seed: int) -> None:
    rng = random.Random(seed)
    total_x, total_y, sequences = rng.randint(1, 200), rng.randint(1, 200), rng.randint(1, 6)
    cuts = [sorted(rng.randint(0, total) for _ in range(sequences - 1)) for total in (total_x, total_y)]
    ends_x, ends_y = [0, *cuts[0], total_x], [0, *cuts[1], total_y]
    tiles = located(total_x, total_y, ends_x, ends_y)
    wanted = [
        [i, tile, begin, ends_y[i], end - begin, ends_y[i + 1] - ends_y[i]]
        for i, (begin, end) in enumerate(pairwise(ends_x))
        for tile in range(-(-(end - begin) // TILE))
    ]
    assert [found for found in tiles if found[1] * TILE < found[4]] == wanted
