"""All gradients of attention as one problem: rules, the fused kernel compiled, its order of turns, the fold of dQ."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
import torch

from cutekernels import gpu
from cutekernels.ops.attention.together import (
    ATTENTION_GRADIENTS,
    CHAIN,
    OWN,
    AttentionGradientsConfig,
    AttentionGradientsProblem,
    smem,
    unfold,
)
from tests.attention.compiled import H200, built
from tests.compiled import cubin, sass

LONG = AttentionGradientsProblem.parse("batch=4 seq_q=4096 seq_kv=4096 heads_q=16 heads_kv=16")
FUSED = AttentionGradientsConfig("fused", 2, "rows")


@pytest.mark.parametrize("name", ["h200", "a100", "l40s", "rtx5090"])
def test_the_default_is_the_chain_everywhere(name: str) -> None:
    for text in ATTENTION_GRADIENTS.suite:
        p = AttentionGradientsProblem.parse(text)
        assert ATTENTION_GRADIENTS.default(p, gpu.lookup(name)) == CHAIN
        assert ATTENTION_GRADIENTS.why_not(p, CHAIN, gpu.lookup(name)) is None


@pytest.mark.parametrize(
    ("options", "config", "rule"),
    [
        ("mask=1", FUSED, "takes no mask"),
        ("varlen=1", FUSED, "takes no varlen"),
        ("softcap=1", FUSED, "takes no softcap"),
        ("head_dim=80", FUSED, "head dims of 40 to 64 and of 104 to 128; it is 80"),
        ("head_dim=64", FUSED.replace(stages=3), "bytes of shared memory"),
        ("", CHAIN.replace(order="l2"), "path=chain has no knobs"),
    ],
)
def test_a_config_breaks_a_rule(options: str, config: AttentionGradientsConfig, rule: str) -> None:
    p = AttentionGradientsProblem.parse(f"{LONG} {options}")
    assert rule in str(ATTENTION_GRADIENTS.why_not(p, config, H200))


def test_few_keys_and_other_gpus() -> None:
    few = LONG.replace(seq_kv=100)
    assert "more than one tile" in str(ATTENTION_GRADIENTS.why_not(few, FUSED.replace(order="l2"), H200))
    many = LONG.replace(batch=1 << 14)
    assert "tiles of queries" in str(ATTENTION_GRADIENTS.why_not(many, FUSED, H200))
    for name in ("a100", "l40s", "rtx5090"):
        assert "no warpgroup MMA" in str(ATTENTION_GRADIENTS.why_not(LONG, FUSED, gpu.lookup(name)))


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("options", ["", "causal=1", "window=both window_left=100 window_right=5 dtype=fp16"])
def test_compiles_as_why_not_predicts(head_dim: int, options: str) -> None:
    p = AttentionGradientsProblem.parse(f"{LONG} head_dim={head_dim} {options}")
    facts = built(ATTENTION_GRADIENTS, p, FUSED).facts
    assert facts.smem_bytes == smem(p, FUSED).total_bytes
    assert facts.stack_bytes <= (0 if head_dim == 128 or not options else 64)


@pytest.mark.parametrize(("head_dim", "waits"), [(64, 6), (128, 4)])
def test_ptxas_serializes_nothing(head_dim: int, waits: int) -> None:
    """A wait for each S, each dP, dQ, and the rest; serialized products have one each."""
    text = sass(cubin(built(ATTENTION_GRADIENTS, LONG.replace(head_dim=head_dim), FUSED)))
    assert text.count("WARPGROUP.DEPBAR") == waits
    assert "UBLKRED" in text and "UBLKCP" in text


@pytest.mark.parametrize("head_dim", [48, 64, 112, 128])
def test_dq_is_unfolded_from_the_threads_order(head_dim: int) -> None:
    """Against the layout of a wgmma accumulator, thread by thread."""
    batch, seq, heads = 2, 150, 3
    by_rows = head_dim <= 64
    tile = 128 if by_rows else 64
    tiles = -(-seq // tile)
    dq = torch.randn(batch, seq, heads, head_dim)
    sums = torch.full((batch, heads, tiles, 2, 64 * 64), float("nan"))
    for group in range(2):
        for thread in range(128):
            warp, lane = divmod(thread, 32)
            for value in range(32):
                row = warp * 16 + lane // 4 + value // 2 % 2 * 8
                column = value // 4 * 8 + lane % 4 * 2 + value % 2
                at = value // 4 * 512 + thread * 4 + value % 4
                row, column = (row + 64 * group, column) if by_rows else (row, column + 64 * group)
                for t in range(tiles):
                    if t * tile + row < seq and column < head_dim:
                        sums[:, :, t, group, at] = dq[:, t * tile + row, :, column]
    out = torch.empty_like(dq)
    unfold(sums.flatten(), out)
    assert torch.equal(out, dq)


# ---- turns ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Walks:
    """The fused kernel's walks and turns, by the formulas of ``ith`` and ``turn_of`` and of ``BandMask.blocks``."""

    seq_q: int
    seq_kv: int
    tile: int
    left: int | None  # as queries see keys
    right: int | None
    heads: int
    band: int
    ctas: int

    @property
    def tiles(self) -> int:
        return -(-self.seq_kv // OWN)

    @property
    def from_diagonal(self) -> bool:
        return self.band * self.tiles <= min(self.ctas, self.tiles * self.heads)

    @property
    def rotates(self) -> bool:
        return self.left is None and self.right is None

    @property
    def sides(self) -> tuple[int | None, int | None]:
        """As keys see queries."""
        shift = self.seq_kv - self.seq_q
        return None if self.right is None else self.right - shift, None if self.left is None else self.left + shift

    def walk(self, n: int) -> list[int]:
        left, right = self.sides
        whole = -(-self.seq_q // self.tile) * self.tile
        last = min(n * OWN + OWN, self.seq_kv) - 1
        end = -(-max(0, whole if right is None else min(whole, last + right + 1)) // self.tile)
        first = min((0 if left is None else max(0, n * OWN - left)) // self.tile, end)
        blocks = list(range(first, end))
        if self.rotates and self.from_diagonal:
            begin = min(n * OWN // self.tile, end - 1)
            blocks = blocks[begin:] + blocks[:begin]
        return blocks

    def turn(self, n: int, block: int) -> tuple[int, int]:
        left, right = self.sides
        query, first, end = block * self.tile, 0, self.tiles
        if right is not None:
            first = max(query - right, 0) // OWN
        if left is not None:
            end = -(-min(query + self.tile + left, self.seq_kv) // OWN)
        if not self.from_diagonal:
            return n - first, end - first
        start = min(query // OWN, end - 1) if self.rotates else end - 1
        return (start - n if n <= start else start - first + end - n), end - first


def random_walks(rng: random.Random) -> Walks:
    seq_q, seq_kv = rng.randint(1, 1500), rng.randint(1, 1500)
    left, right = rng.choice([(None, None), (None, 0), (rng.randint(0, 700), rng.randint(0, 300)), (99, None)])
    heads = rng.randint(1, 6)
    band = rng.choice([1, heads, rng.randint(1, heads)])
    return Walks(
        seq_q, rng.choice([seq_q, seq_kv]), rng.choice([64, 128]), left, right, heads, band, rng.randint(1, 40)
    )


@pytest.mark.parametrize("seed", range(300))
def test_every_turn_comes_once_and_nobody_waits_for_ever(seed: int) -> None:
    w = random_walks(random.Random(seed))
    walks = [w.walk(n) for n in range(w.tiles)]
    for block in range(-(-w.seq_q // w.tile)):
        keys = [n for n in range(w.tiles) if block in walks[n]]
        turns = [w.turn(n, block) for n in keys]
        assert sorted(turn for turn, _ in turns) == list(range(len(keys)))
        assert all(count == len(keys) for _, count in turns)
    # CTAs draw tiles in bands of heads, the first keys of all heads first, and take a step when it is their turn.
    drawn = [
        (n, head)
        for begin in range(0, w.heads, w.band)
        for n in range(w.tiles)
        for head in range(begin, min(w.heads, begin + w.band))
    ]
    waiting = iter(drawn)
    at_work = [[*tile, 0] for _, tile in zip(range(w.ctas), waiting, strict=False)]
    marks: dict[tuple[int, int], int] = {}
    while at_work:
        moved = False
        for cta in list(at_work):
            n, head, done = cta
            if done < len(walks[n]):
                turn, turns = w.turn(n, walks[n][done])
                if marks.get((head, walks[n][done]), 0) == turn:
                    marks[head, walks[n][done]] = (turn + 1) % turns
                    cta[2] += 1
                    moved = True
            if cta[2] == len(walks[n]):
                at_work.remove(cta)
                at_work += [[*tile, 0] for tile in [next(waiting, None)] if tile is not None]
                moved = True
        assert moved, "a deadlock"
    assert not any(marks.values()), "zero again for the next launch"
