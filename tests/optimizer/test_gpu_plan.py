"""``FusedAdamW``'s launches on a GPU: clipping, 16-bit moments, gradients that move or are missing, shards, graphs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from cutekernels.errors import UnsupportedProblem
from cutekernels.optim import FusedAdamW
from tests.on_gpu import graph_of
from tests.optimizer.test_clip import OPTIONS, twins
from tests.optimizer.test_gpu import close, grads, model, network

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("one_seed")]


def share(ours: list[torch.nn.Parameter], theirs: list[torch.nn.Parameter]) -> None:
    for p, q in zip(ours, theirs, strict=True):
        q.grad = None if p.grad is None else p.grad.double()


def test_the_norm_has_the_same_bits_each_time() -> None:
    params = model(torch.bfloat16)
    optimizer = FusedAdamW(params, max_grad_norm=1.0)
    norms = set()
    for _ in range(5):
        grads(params, 3)  # of one seed, at other addresses
        optimizer.step()
        norms.add(float(optimizer.grad_norm))  # type: ignore[arg-type]
    assert len(norms) == 1


def test_steps_in_flight_keep_their_addresses() -> None:
    """The host runs ahead by many steps: each launch reads the gradients that were sent for it."""
    ours = model()
    theirs = twins(ours)
    a, b = FusedAdamW(ours, **OPTIONS), torch.optim.AdamW(theirs, foreach=False, **OPTIONS)
    for seed in range(2):
        grads(ours, seed)
        a.step()
        share(ours, theirs)
        b.step()
    held: list[Any] = []
    torch.cuda.synchronize()
    torch.cuda._sleep(400_000_000)
    for seed in range(2, 14):
        grads(ours, seed, skip=seed % 9)
        held.append([p.grad for p in ours])  # no address comes back
        a.step()
    for gradients in held:
        for q, g in zip(theirs, gradients, strict=True):
            q.grad = None if g is None else g.double()
        b.step()
    close(ours, theirs)


def test_state_that_went_to_the_cpu_and_back() -> None:
    ours = model(torch.bfloat16)
    theirs = model(torch.bfloat16)
    optimizers = [FusedAdamW(params, max_grad_norm=1.0, **OPTIONS) for params in (ours, theirs)]
    for seed in range(4):
        for params, optimizer in zip((ours, theirs), optimizers, strict=True):
            grads(params, seed)
            optimizer.step()
        before = torch.cuda.memory_allocated()
        states = optimizers[0].state.values()
        for state in states:
            for name, t in state.items():
                state[name] = t.cpu()
        del t
        assert torch.cuda.memory_allocated() < before - 4_000_000
        with pytest.raises(UnsupportedProblem, match="on cpu beside a parameter"):
            optimizers[0].step()
        for state in states:
            for name, t in state.items():
                state[name] = t.cuda()
    for p, q in zip(ours, theirs, strict=True):
        assert torch.equal(p, q)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_graph_clips_by_the_norm_of_each_replay() -> None:
    ours = [torch.nn.Parameter(torch.ones(300, 7, device="cuda"))]
    theirs = twins(ours)
    a = FusedAdamW(ours, max_grad_norm=1.0, moments_dtype=torch.float32, **OPTIONS)
    b = torch.optim.AdamW(theirs, foreach=False, **OPTIONS)
    given = torch.zeros(300, 7, device="cuda")

    def theirs_step(g: Tensor) -> Tensor:
        theirs[0].grad = g.double()
        norm = torch.nn.utils.clip_grad_norm_(theirs, 1.0)
        b.step()
        return norm

    given.normal_()
    ours[0].grad = given
    a.step()
    theirs_step(given)
    graph, _ = graph_of(lambda: a.step())
    norm = a.grad_norm
    assert norm is not None
    for scale in (0.001, 1.0, 30.0):
        given.normal_().mul_(scale)
        graph.replay()
        torch.testing.assert_close(norm.double(), theirs_step(given), rtol=2e-6, atol=0)
    torch.testing.assert_close(ours[0].double(), theirs[0], rtol=1e-5, atol=1e-6)


@pytest.mark.filterwarnings("ignore")
def test_shards_of_fsdp(mesh: Any) -> None:
    """One rank: launches over local parts, and the norm by way of NCCL."""
    from torch.distributed.fsdp import fully_shard

    ours, theirs = network(), network()
    fully_shard(ours[0], mesh=mesh)  # type: ignore[index]
    fully_shard(ours, mesh=mesh)
    a = FusedAdamW(ours.parameters(), max_grad_norm=0.5, **OPTIONS)
    b = torch.optim.AdamW(theirs.parameters(), foreach=False, **OPTIONS)
    for seed in range(4):
        x = torch.randn(16, 40, device="cuda", generator=torch.Generator("cuda").manual_seed(seed))
        for net in (ours, theirs):
            net(x).square().sum().backward()
        a.step()
        norm = torch.nn.utils.clip_grad_norm_(theirs.parameters(), 0.5)
        b.step()
        assert a.grad_norm is not None
        torch.testing.assert_close(a.grad_norm, norm, rtol=1e-5, atol=0)
        a.zero_grad()
        b.zero_grad()
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(p.full_tensor(), q, rtol=1e-4, atol=1e-5)  # type: ignore[attr-defined]


def test_gradients_in_buckets() -> None:
    """Views of one buffer, as of DistributedDataParallel: their addresses are aligned to an element alone."""
    ours = model()[:3] + model()[4:7]
    theirs = twins(ours)
    a, b = FusedAdamW(ours, max_grad_norm=1.0, **OPTIONS), torch.optim.AdamW(theirs, foreach=False, **OPTIONS)
    for seed in range(4):
        grads(ours, seed)
        bucket = torch.cat([torch.zeros(seed, device="cuda"), *[p.grad.flatten() for p in ours if p.grad is not None]])
        at = seed
        for p in ours:
            p.grad = bucket[at : at + p.numel()].view(p.shape)
            at += p.numel()
        share(ours, theirs)
        a.step()
        torch.nn.utils.clip_grad_norm_(theirs, 1.0)
        b.step()
    close(ours, theirs)
