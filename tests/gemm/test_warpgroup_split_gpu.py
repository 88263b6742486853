"""``split_k`` of the warpgroup schedule on a GPU that has it: shared tiles of any layout, the same bits, graphs."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

import cutekernels as ck
from cutekernels.kernels.activations import ACTIVATIONS
from cutekernels.ops.products.dense import GEMM
from cutekernels.ops.products.schedules.problem import GemmConfig, GemmProblem
from tests.gemm.test_gpu import assert_configs_right
from tests.gemm.test_skinny_gpu import assert_same_every_time
from tests.gemm.test_warpgroup_gpu import LAYOUTS, warpgroup
from tests.on_gpu import assert_no_workspace_is_shared

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("warpgroups")]


def sharing_configs(problem: GemmProblem, **values: Any) -> list[GemmConfig]:
    return [c for c in warpgroup(problem, **values) if c.split_k > 1]


def posed(rng: random.Random, layout: tuple[str, str, str], c: str) -> GemmProblem:
    """Ragged extents and a K of many k-tiles, any epilogue, batched or not."""
    batch = rng.choice((1, 1, 2))
    return GemmProblem(
        m=rng.choice((136, 200, 520, 1000, 1304)),
        n=rng.choice((136, 264, 520, 1000, 2504)),
        k=rng.choice((3000, 4872, 9000, 16392)),
        batch=batch,
        batched=batch > 1,
        a_major=layout[0],
        b_major=layout[1],
        out_major=layout[2],
        dtype=rng.choice(("bf16", "fp16")),
        c=layout[2] if c == "out" else c,
        bias=rng.choice(("none", "same", "fp32")),
        activation=rng.choice(tuple(ACTIVATIONS)),
    )


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("c", ["none", "out"])
def test_random_problems_and_configs(layout: tuple[str, str, str], c: str) -> None:
    rng = random.Random(f"split {layout}{c}")
    problem = posed(rng, layout, c)
    found = sharing_configs(problem)
    assert_configs_right(problem, *rng.sample(found, min(4, len(found))))


@pytest.mark.parametrize("split_k", [2, 3, 4])
@pytest.mark.parametrize("arrangement", [{"cluster_m": 2}, {"cluster_n": 2}, {"swap_ab": True}, {"raster": 8}])
def test_parts_alone_and_behind_full_waves(split_k: int, arrangement: dict[str, Any]) -> None:
    rng = random.Random(f"{split_k}{arrangement}")
    for m, n, k in ((256, 1536, 8960), (1000, 1536, 8960), (3000, 2504, 4104)):
        problem = GemmProblem(m, n, k, b_major="k")
        found = sharing_configs(problem, split_k=split_k, **arrangement)
        assert_configs_right(problem, *rng.sample(found, min(2, len(found))))


def test_the_same_bits_every_time() -> None:
    problem = GemmProblem.parse("m=600 n=1536 k=8960 b_major=k")
    assert_same_every_time(problem, random.Random(0).sample(sharing_configs(problem), 4))


def test_out_may_be_c() -> None:
    problem = GemmProblem(1000, 1304, 4104, c="n")
    a, b, c, _, _, _ = GEMM.sample(problem, "cuda", 0)
    expected = (0.5 * (a.double() @ b.double()) + 2.0 * c.double()).to(c.dtype)
    for config in random.Random(1).sample(sharing_configs(problem), 4):
        kept = c.clone()
        assert ck.gemm(a, b, kept, alpha=0.5, beta=2.0, out=kept, config=str(config)) is kept
        torch.testing.assert_close(kept, expected, rtol=2**-7, atol=0.1)


def test_dependent_launches_see_what_came_before() -> None:
    """A chain of dependent launches beside the same one that waits for each."""
    problem = GemmProblem.parse("m=256 n=2048 k=2048 b_major=k")
    ws = [torch.randn(2048, 2048, device="cuda", dtype=torch.bfloat16) / 45 for _ in range(4)]
    x0 = torch.randn(256, 2048, device="cuda", dtype=torch.bfloat16)

    def chain(configs: list[str], wait: bool) -> torch.Tensor:
        x = x0
        for i in range(16):
            x = ck.gemm(x, ws[i % 4].t(), config=configs[i % len(configs)])
            if wait:
                torch.cuda.synchronize()
        return x

    configs = [str(c) for c in random.Random(2).sample(sharing_configs(problem), 3)]
    want = chain(configs, wait=True)
    assert all(torch.equal(chain(configs, wait=False), want) for _ in range(10))


def test_graphs_and_streams_share_no_workspace() -> None:
    """Two configs in turns on each stream, in graphs and out of them, beside one another."""
    problem = GemmProblem.parse("m=300 n=1024 k=4096 b_major=k")
    configs = [str(c) for c in random.Random(3).sample(sharing_configs(problem), 2)]
    xs = [torch.randn(300, 4096, device="cuda", dtype=torch.bfloat16) for _ in range(4)]
    w = torch.randn(1024, 4096, device="cuda", dtype=torch.bfloat16)
    calls = [lambda x, out=None, config=c: ck.gemm(x, w.t(), out=out, config=config) for c in configs]
    assert_no_workspace_is_shared(xs, *calls)
