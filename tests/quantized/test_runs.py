"""How bodies of packed weights deal out work, simulated: who leaves a part of a tile, who waits for it."""

from __future__ import annotations

import random
from collections import Counter, defaultdict

import pytest

from cutekernels import gpu
from cutekernels.ops.products.schedules.packed_problem import QuantizedConfig, QuantizedProblem
from cutekernels.ops.products.schedules.packed_skinny import PACKED_SKINNY
from cutekernels.ops.products.schedules.packed_warpgroup import PACKED_WARPGROUP
from cutekernels.ops.products.schedules.schedule import PackedSchedule


@pytest.mark.parametrize(
    ("schedule", "name"),
    [*[(PACKED_SKINNY, name) for name in ("h100", "a100", "l40s", "rtx5090")], (PACKED_WARPGROUP, "h200")],
    ids=lambda each: getattr(each, "name", each),
)
def test_every_part_of_a_tile_is_left_once_and_waited_for_by_a_later_cta(schedule: PackedSchedule, name: str) -> None:
    """As the bodies walk and finish. Run r is that of CTA ``ctas - 1 - r``: later runs start earlier."""
    draw, spec, dealt = random.Random(name), gpu.lookup(name), 0
    while dealt < 15:
        n, k = 8 * draw.randrange(8, 2500), 8 * draw.randrange(8, 2500)
        p = QuantizedProblem(m=draw.choice((1, 16, 100, 300)), n=n, k=k)
        c, kept = schedule.candidates(p, spec, None)
        shared = list(c.taken(kept & c.stream_k))
        if shared:
            dealt += 1
            _follow(schedule, p, draw.choice(shared), spec)


def _follow(schedule: PackedSchedule, p: QuantizedProblem, c: QuantizedConfig, spec: gpu.GpuSpec) -> None:
    k_tiles = -(-p.k // c.tile_k)
    ctas, *rounds, share = schedule.grid(p, c, spec)
    tiles = schedule.tiles(p, c) - sum(rounds) * ctas  # the first are whole, as many of each CTA
    assert ctas <= spec.sm_count * c.ctas_per_sm, "all of them may run at once"
    left: Counter[int] = Counter()  # parts by run: each has room for one
    posted: dict[int, set[int]] = defaultdict(set)  # runs that left a part of a tile
    awaited: dict[int, range] = {}
    stored: Counter[int] = Counter()
    for run in range(ctas):
        first, end = run * share, min(run * share + share, tiles * k_tiles)
        assert first < end or sum(rounds), "no CTA is idle"
        ends = [u for u in range(first, end) if u % k_tiles == k_tiles - 1 or u == end - 1]
        for at, unit in enumerate(ends):
            tile, begin = unit // k_tiles, unit // k_tiles * k_tiles
            if run * share > begin:
                left[run] += 1
                posted[tile].add(run)
                assert at == 0, "a run leaves its part before it waits for any"
            else:
                if unit % k_tiles < k_tiles - 1:
                    awaited[tile] = range(run + 1, (begin + k_tiles - 1) // share + 1)
                    assert at == len(ends) - 1, "a run waits at its end"
                stored[tile] += 1
    assert stored == Counter(range(tiles))
    assert max(left.values(), default=0) <= 1
    assert {tile: set(runs) for tile, runs in awaited.items()} == dict(posted)
