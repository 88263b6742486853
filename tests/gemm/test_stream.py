"""The skinny schedules' other tiles and the even shares of ``body=stream``: rules, shares, compiled code."""

from __future__ import annotations

import random
from collections import Counter
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cutekernels import gpu
from cutekernels.autotune.search import MODEL_SEEDS, prune_reason
from cutekernels.kernels.cute.parts import stream
from cutekernels.op import ladder
from cutekernels.ops.gemm import skinny, specialized
from cutekernels.ops.gemm.launch import addressed
from cutekernels.ops.gemm.op import GEMM, GemmConfig, GemmProblem
from tests.gemm.test_compiled import TARGETS, built, code

H200 = gpu.lookup("h200")
NEW_TILES = (24, 48, 96, 128)


def decode(m: int, n: int = 18944, k: int = 3584) -> GemmProblem:
    return GemmProblem.parse(f"m={m} n={n} k={k} b_major=k")


@cache
def valid(p: GemmProblem, target: str) -> tuple[GemmConfig, ...]:
    return tuple(GEMM.valid(p, gpu.lookup(target)))


def candidates(p: GemmProblem, spec: gpu.GpuSpec, **values: Any) -> list[GemmConfig]:
    """Valid configs of the skinny schedules with ``values``."""
    few = [c for c in valid(p, spec.name) if c.body != "multistage"]
    return [c for c in few if all(getattr(c, name) == value for name, value in values.items())]


# ---- shares ---------------------------------------------------------------------------------------------


@given(tiles=st.integers(1, 400), k_tiles=st.integers(1, 60), ctas=st.integers(1, 400))
def test_stretches_cover_every_unit_once_and_shares_are_summed_in_order(tiles: int, k_tiles: int, ctas: int) -> None:
    """The walk of every CTA as the kernel does it, and what the last to arrive at a tile then reads."""
    units = tiles * k_tiles
    ctas = min(ctas, units)
    seen: Counter[int] = Counter()
    left: dict[int, tuple[int, range]] = {}  # by slot: the tile and its k-tiles
    arrived: Counter[int] = Counter()
    finished: set[int] = set()
    lengths = set()
    for cta in range(ctas):
        first, end = stream.begin(cta, ctas, units), stream.begin(cta + 1, ctas, units)
        lengths.add(end - first)
        for tile in range(first // k_tiles, (end - 1) // k_tiles + 1):
            low, high = max(first, tile * k_tiles), min(end, (tile + 1) * k_tiles)
            assert low < high, "each tile of the walk has a k-tile: a barrier between the sums of one and the next"
            seen.update(range(low, high))
            if high - low == k_tiles:
                finished.add(tile)
                continue
            at = stream.slot(cta, stream.owner(tile * k_tiles, ctas, units))
            assert 0 <= at < stream.SLOTS * ctas
            assert at not in left, "nobody else leaves sums there"
            left[at] = tile, range(low - tile * k_tiles, high - tile * k_tiles)
            arrived[tile] += 1
    assert lengths <= {units // ctas, units // ctas + 1}
    assert seen == Counter(range(units))
    assert finished.isdisjoint(arrived)
    assert finished | set(arrived) == set(range(tiles))
    for tile, shares in arrived.items():
        leader = stream.owner(tile * k_tiles, ctas, units)
        assert shares == stream.owner((tile + 1) * k_tiles - 1, ctas, units) - leader + 1
        read = [left[stream.slot(leader + s, leader)] for s in range(shares)]
        assert [t for t, _ in read] == [tile] * shares
        assert [k for _, ks in read for k in ks] == list(range(k_tiles)), "in the order of K"


# ---- rules ----------------------------------------------------------------------------------------------


def test_a_bucket_and_its_problems_take_the_same_tiles() -> None:
    for m in range(1, 129):
        p = decode(m)
        fitting = set(skinny.fitting_tiles(p))
        assert fitting - {skinny.usual_tile(p)} <= set(skinny.fitting_tiles(decode(ladder(m)))), m
        assert any(tile >= min(m, 64) for tile in fitting)
    assert {m: skinny.fitting_tiles(decode(m)) for m in (1, 16, 17, 24, 33, 48, 64, 65, 96, 97, 128)} == {
        1: [8], 16: [16], 17: [24, 32], 24: [24, 32], 33: [48, 64], 48: [48, 64], 64: [64], 65: [48, 64, 96],
        96: [48, 64, 96], 97: [64, 128], 128: [64, 128],
    }  # fmt: skip


@pytest.mark.parametrize("spec", gpu.GPUS, ids=lambda g: g.name)
def test_the_default_chooses_among_the_usual(spec: gpu.GpuSpec) -> None:
    for m in (1, 8, 17, 24, 32, 48, 64, 96, 128):
        for n, k in ((3584, 3584), (18944, 3584), (520, 328)):
            problem = decode(m, n, k)
            default = GEMM.default(problem, spec)
            few = m <= skinny.DEFAULT_TOKENS
            if spec.has_wgmma:
                few = m < specialized.least_tokens(problem, spec)
            beyond = "specialized" if spec.has_wgmma else "multistage"
            assert skinny.usual(default) if few else default.body == beyond


@pytest.mark.parametrize("tile", NEW_TILES)
def test_loaders_divide_every_tile(tile: int) -> None:
    for c in candidates(decode(tile), H200, tile_n=tile):
        for rows in (c.tile_m, c.tile_n):
            threads = skinny.loaders(rows, c)
            assert 0 < threads <= c.threads
            assert threads % (c.tile_k // 8) == 0
            assert rows % (threads // (c.tile_k // 8)) == 0


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("m=64 n=18944 k=3600 b_major=k", "body=stream takes K in whole k-tiles of 64; it is 3600"),
        ("m=64 n=512 k=512 b_major=k", "leaves less than two k-tiles to each of 132 CTAs"),
        ("m=48 n=18944 k=3584 b_major=k", None),
        ("m=16 n=18944 k=3584 b_major=k", "tile_n=64 does not suit 16 tokens: take 16"),
        ("m=64 n=8388480 k=64000 b_major=k", "more than body=stream counts"),
    ],
)
def test_what_stream_refuses(text: str, rule: str | None) -> None:
    p = GemmProblem.parse(text)
    (c, *_) = candidates(decode(64), H200, body="stream", tile_m=128, tile_k=64, ctas_per_sm=1)
    found = list(skinny.broken(p, c, H200))
    assert (not found) if rule is None else any(rule in message for message in found), found


@pytest.mark.parametrize("m", [48, 64, 96, 128])
@pytest.mark.parametrize("n", [3584, 18944])
def test_the_tuner_is_led_to_warpgroups(m: int, n: int) -> None:
    """By the model's seeds; what it then crowns, measurements say."""
    p = decode(m, n)
    by_model = sorted(valid(p, H200.name), key=lambda c: (GEMM.estimate_us(p, c, H200), str(c)))
    assert "specialized" in {c.body for c in by_model[:MODEL_SEEDS]}


def test_a_launch_has_a_workspace() -> None:
    p = decode(64)
    config = candidates(p, H200, body="stream")[0]
    assert config.shares_tiles
    assert config.split_k == 1
    assert not addressed(p, config)


def test_ctas_per_sm_is_the_size_of_the_grid(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which the kernel takes from the size of the workspace."""
    monkeypatch.setattr("torch.cuda.current_device", lambda: 0)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda device: SimpleNamespace(multi_processor_count=132))
    monkeypatch.setattr(skinny, "Workspace", lambda partials, tickets: (partials, tickets))
    p = decode(64)
    for ctas in (1, 2):
        config = candidates(p, H200, body="stream", tile_m=64, tile_n=64, ctas_per_sm=ctas)[0]
        assert skinny.workspace(p, config) == (132 * ctas * stream.SLOTS * 64 * 64, 18944 // 64)


# ---- compiled code --------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", TARGETS, ids=lambda g: g.target)
@pytest.mark.parametrize("body", ["skinny", "stream"])
@pytest.mark.parametrize("tile", NEW_TILES)
def test_compiles_as_predicted(tile: int, body: str, spec: gpu.GpuSpec) -> None:
    p = decode(tile)
    fitting = candidates(p, spec, body=body, tile_n=tile)
    if not fitting:
        assert spec.smem_per_block_bytes < H200.smem_per_block_bytes, "smem is what large tiles want for"
        return
    best = min(fitting, key=lambda c: (GEMM.estimate_us(p, c, spec), str(c)))
    others = [random.Random(f"{tile} {body}").choice(fitting)] if spec is H200 else []
    for config in (best, *others):
        facts = built(p, config, spec.name).facts
        assert facts.smem_bytes == config.smem.total_bytes, config
        assert prune_reason(facts, GEMM, spec) is None, config
        assert facts.stack_bytes <= 64, f"spills: {config}"
        assert -(-facts.registers // 8) * 8 * config.threads * config.ctas_per_sm <= spec.REGISTERS_PER_SM


@pytest.mark.parametrize("tile", NEW_TILES)
def test_a_tile_of_its_own_is_code_of_its_own(tile: int) -> None:
    p = decode(tile)
    config = candidates(p, H200, body="skinny", tile_n=tile)[0]
    usual = config.replace(tile_n=skinny.usual_tile(p))
    assert code(p, config) != code(p, usual)


def test_stream_is_not_the_skinny_schedule() -> None:
    p = decode(64)
    config = candidates(p, H200, body="stream", ctas_per_sm=1)[0]
    assert code(p, config) != code(p, config.replace(body="skinny"))
    assert config.smem.total_bytes >= config.replace(body="skinny").smem.total_bytes
