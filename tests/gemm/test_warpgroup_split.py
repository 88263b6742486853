"""``split_k`` of the warpgroup schedule: its rules, its choice, who adds whose parts (simulated), its machine code."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from pathlib import Path

import pytest

from cutekernels import gpu
from cutekernels.ops.products.dense import GEMM
from cutekernels.ops.products.schedules.problem import GemmConfig, GemmProblem
from cutekernels.ops.products.schedules.schedule import PLAIN
from cutekernels.ops.products.schedules.warpgroup import WARPGROUP, cluster_tiles, clusters_of, groups
from tests import sass
from tests.compiled import cubin

H100, H200 = gpu.lookup("h100-sxm"), gpu.lookup("h200")
FEW = GemmProblem.parse("m=1000 n=1536 k=8960 b_major=k")  # 32 tiles of clusters, of which 66 run at once
BASE = GemmConfig.parse(
    "tile_m=128 tile_n=192 tile_k=64 warps_m=1 warps_n=1 stages=5 raster=1 ctas_per_sm=1 body=warpgroup split_k=2 "
    "pdl=1 cluster_m=2"
)


# ---- rules and choice -----------------------------------------------------------------------------------


def test_the_base_is_valid() -> None:
    assert GEMM.why_not(FEW, BASE, H100) is None
    assert WARPGROUP.shares_tiles(BASE) and not WARPGROUP.shares_tiles(BASE.replace(split_k=1))
    assert len(WARPGROUP.workspace_types(BASE)) == 2, "partial sums and counters"


@pytest.mark.parametrize(
    ("problem", "change", "rule"),
    [
        ("", {"split_k": 3}, "the last wave has 32 tiles for 66 clusters"),
        ("", {"pingpong": True, "tile_n": 160}, "takes pingpong=0"),
        ("", {"pdl": False}, "pdl=1"),
        ("", {"raster": 8}, "orders several waves"),
        ("m=1000 n=1536 k=960 b_major=k", {}, "leaves less than 8 k-tiles"),
        ("m=2048 n=4224 k=8960 b_major=k", {"tile_n": 128, "stages": 6}, "the last wave has 0 tiles"),
        ("m=1000 n=1536 k=8960 b_major=k dtype=fp16 accumulate=fp16", {}, "accumulators in fp32"),
    ],
)
def test_a_config_breaks_a_rule(problem: str, change: dict[str, object], rule: str) -> None:
    p = GemmProblem.parse(problem) if problem else FEW
    assert rule in str(GEMM.why_not(p, BASE.replace(**change), H100))


def test_the_default_shares_few_tiles_of_a_long_k() -> None:
    for text in ("m=1024 n=512 k=16384 b_major=k", "m=512 n=2048 k=11008 b_major=k", "m=1536 n=8960 k=4096 a_major=m"):
        problem = GemmProblem.parse(text)
        config = GEMM.default(problem, H100)
        whole = [c for c in GEMM.valid(problem, H100) if c.split_k == 1 and not c.vendors]
        assert (config.body, config.split_k > 1) == ("warpgroup", True), text
        assert GEMM.estimate_us(problem, config, H100) < min(GEMM.estimate_us(problem, c, H100) for c in whole)
    for text in ("m=4096 n=4096 k=4096 b_major=k", "m=1024 n=4096 k=4096 b_major=k", "m=8192 n=1536 k=1536 b_major=k"):
        assert GEMM.default(GemmProblem.parse(text), H200).split_k == 1, text


# ---- parts ----------------------------------------------------------------------------------------------


def dealings() -> list[tuple[GemmProblem, GemmConfig]]:
    draw, found = random.Random(9), []
    split = [c for c in WARPGROUP.fitting(H100, PLAIN, WARPGROUP.usual(FEW, H100, PLAIN)) if c.split_k > 1]
    while len(found) < 24:
        m, n, k = draw.randrange(130, 5000), 8 * draw.randrange(20, 1200), 8 * draw.randrange(200, 3000)
        p = GemmProblem(m, n, k, b_major="k")
        found += [
            (p, c) for c in draw.sample(split, 200) if not list(WARPGROUP.failures_of("both", p, c, H100, PLAIN))
        ][:1]
    return found


@pytest.mark.parametrize("case", dealings(), ids=lambda case: f"{case[0].m}x{case[0].n}x{case[0].k} {case[1].split_k}")
def test_every_part_is_counted_at_an_owner_of_a_higher_number(case: tuple[GemmProblem, GemmConfig]) -> None:
    """As ``WarpgroupSplit.walk``, ``part``, ``leave`` and ``add_others`` go, for the clusters of a grid."""
    p, c = case
    tiles_m, tiles_n = cluster_tiles(p, c)
    tiles, room, k_tiles = tiles_m * tiles_n, clusters_of(c, H100), -(-p.k // c.tile_k)
    full = tiles // room * room
    count = full + (tiles - full) * c.split_k
    grid = min(count, room)
    multiplied: Counter[tuple[int, int]] = Counter()  # k-tiles of tiles
    posted: dict[int, set[int]] = defaultdict(set)  # at the owner's cluster
    owners: Counter[int] = Counter()
    for cluster in range(grid):
        for index in range(cluster, count, grid):
            tile, begin, walked = index, 0, k_tiles
            if index >= full:
                share = -(-k_tiles // c.split_k)
                tile = full + (index - full) // c.split_k
                begin = (c.split_k - 1 - (index - full) % c.split_k) * share
                walked = min(share, k_tiles - begin)
            assert walked > 0, "no part is empty"
            multiplied.update((tile, step) for step in range(begin, begin + walked))
            if begin:
                posted[cluster + begin // share].add(cluster)
            elif walked < k_tiles:
                owners[cluster] += 1
    assert multiplied == Counter({(tile, step): 1 for tile in range(tiles) for step in range(k_tiles)})
    assert max(owners.values()) == 1 and set(posted) == set(owners)
    for owner, others in posted.items():
        assert others == set(range(owner - c.split_k + 1, owner)), "those that add_others reads"


def test_a_workspace_holds_any_tile() -> None:
    """One for all launches of a stream: a part to a CTA, a counter to each of its groups."""
    from cutekernels.ops.products.schedules import warpgroup

    per_cta = 2 * 128 * warpgroup.MOST_ACCUMULATORS
    split = [c for c in WARPGROUP.fitting(H100, PLAIN, WARPGROUP.usual(FEW, H100, PLAIN)) if c.split_k > 1]
    assert max(c.tile_m * c.tile_n for c in split) <= per_cta
    assert max(groups(c) for c in split) <= 3


# ---- machine code ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text", ["", "m=300 n=5120 k=13824 b_major=k bias=same activation=silu", "m=768 n=896 k=4864 c=n"]
)
def test_products_are_not_serialized_nor_their_registers_written(text: str, tmp_path: Path) -> None:
    problem = GemmProblem.parse(text) if text else FEW
    found = [c for c in GEMM.valid(problem, H100) if c.body == "warpgroup" and c.split_k > 1]
    config = random.Random(text).choice(found)
    code = sass.instructions(cubin(GEMM.build(problem, config, H100)), tmp_path)
    waits = [opcode for opcode, _ in code if opcode.startswith("WARPGROUP.DEPBAR")]
    assert any(opcode.startswith("HGMMA") for opcode, _ in code)
    assert len(waits) == 2, "a k-tile before, and the last one"
    assert sass.overwritten(code) == [], config
