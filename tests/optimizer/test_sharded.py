"""``FusedAdamW`` and ``SwiGLU`` under FSDP2 and distributed checkpoints, in two gloo processes on the CPU."""

from __future__ import annotations

import socket
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from cutekernels.nn import RMSNorm, SwiGLU
from cutekernels.optim import FusedAdamW


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp, self.head = RMSNorm(8), SwiGLU(8, 6, bias=True), torch.nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.mlp(self.norm(x)))
        return y


def _model() -> Model:
    torch.manual_seed(0)
    return Model()


def _train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for seed in range(steps):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(seed))
        optimizer.zero_grad()
        model(x).square().sum().backward()
        optimizer.step()


def _full(model: torch.nn.Module) -> dict[str, Tensor]:
    return {name: p.full_tensor() if hasattr(p, "full_tensor") else p for name, p in model.named_parameters()}


def _check_full_states(rank: int, whole: Model) -> None:
    """A state dict of whole tensors, of rank 0 alone or of every rank, loads into sharded, empty and plain models."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
    from torch.distributed.fsdp import fully_shard

    for kind in ("sharded", "meta", "plain"):
        with torch.device("meta" if kind == "meta" else "cpu"):
            model = Model()
        if kind != "plain":
            fully_shard(model.mlp)
            fully_shard(model)
        for sent in (True, False):
            given = {name: t.clone() * (2 - sent) for name, t in whole.state_dict().items()}
            options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=sent)
            set_model_state_dict(model, given if rank == 0 or not sent else {}, options=options)
            full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
            for name, t in whole.state_dict().items():
                torch.testing.assert_close(full[name], t * (2 - sent), msg=lambda text, n=name: f"{n}: {text}")
        assert all(hasattr(p, "placements") == (kind != "plain") for p in model.parameters())


def _check_loads_beside_masters() -> None:
    """Masters see what a DTensor's own operations write: its part's version does not tell."""
    from torch.distributed.fsdp import fully_shard

    model = torch.nn.Linear(8, 4, dtype=torch.bfloat16)
    fully_shard(model)
    optimizer = FusedAdamW(model.parameters(), lr=1e-3, weight_decay=0.0, master_weights=True)
    for written in (None, None, 5.0):
        if written is not None:
            with torch.no_grad():
                model.weight.copy_(torch.full_like(model.weight, written))
        model(torch.ones(2, 8, dtype=torch.bfloat16)).float().sum().backward()
        optimizer.step()
    torch.testing.assert_close(model.weight.full_tensor().float(), torch.full((4, 8), 5.0), atol=0.05, rtol=0)  # type: ignore[operator]


def _shards(rank: int, port: int, folder: str) -> None:
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    try:
        options: dict[str, Any] = {"lr": 0.01, "weight_decay": 0.1, "max_grad_norm": 0.5}
        whole = _model()
        alone = FusedAdamW(whole.parameters(), **options)
        _train(whole, alone, 4)

        model = _model()
        fully_shard(model.mlp)
        fully_shard(model)
        optimizer = FusedAdamW(model.parameters(), **options)
        _train(model, optimizer, 2)
        moments = optimizer.state[model.mlp.gate_up_proj.weight]["exp_avg"]
        assert hasattr(moments, "placements") and moments.placements == model.mlp.gate_up_proj.weight.placements  # type: ignore[attr-defined]
        weights, states = get_state_dict(model, optimizer)
        assert "mlp.gate_proj.weight" in weights and "mlp.gate_up_proj.weight" not in weights
        dcp.save({"model": weights, "optimizer": states}, checkpoint_id=folder)

        again = _model()
        fully_shard(again.mlp)
        fully_shard(again)
        resumed = FusedAdamW(again.parameters(), **options)
        weights, states = get_state_dict(again, resumed)
        dcp.load({"model": weights, "optimizer": states}, checkpoint_id=folder)
        set_state_dict(again, resumed, model_state_dict=weights, optim_state_dict=states)
        for trained, its_optimizer in ((model, optimizer), (again, resumed)):
            for seed in (2, 3):
                x = torch.randn(4, 8, generator=torch.Generator().manual_seed(seed))
                its_optimizer.zero_grad()
                trained(x).square().sum().backward()
                its_optimizer.step()
            torch.testing.assert_close(its_optimizer.grad_norm, alone.grad_norm)
            for name, value in _full(trained).items():
                torch.testing.assert_close(value, whole.get_parameter(name), msg=lambda text, n=name: f"{n}: {text}")
        _check_full_states(rank, whole)
        _check_loads_beside_masters()
    except Exception:
        Path(folder, f"error{rank}").write_text(traceback.format_exc())
        raise
    finally:
        dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_two_processes_train_save_and_resume(tmp_path: Path) -> None:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    context = torch.multiprocessing.get_context("spawn")
    processes = [context.Process(target=_shards, args=(rank, port, str(tmp_path))) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
        if process.is_alive():
            process.kill()
    errors = "\n".join(path.read_text() for path in tmp_path.glob("error*"))
    assert not errors, errors
    assert [process.exitcode for process in processes] == [0, 0]


def test_saved_names_can_be_looked_up() -> None:
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

    model, other = _model(), Model()
    set_model_state_dict(other, get_model_state_dict(model))
    x = torch.randn(3, 8)
    assert torch.equal(model(x), other(x))
