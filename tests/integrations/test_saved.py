"""Checkpoints of packed weights: every writer finds every tensor, once, and parts stay parts of one memory."""

from __future__ import annotations

import copy
import gc
import io
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

import cutekernels as ck
from cutekernels import nn
from cutekernels.integrations.transformers import modules
from cutekernels.nn.packing import side_by_side, split
from tests.integrations import tiny
from tests.integrations.test_transformers import close
from tests.integrations.tiny import tokens

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")  # transformers' and peft's own
TYPES = [torch.float32, torch.bfloat16, torch.float16]


def packed(how: str, dtype: torch.dtype = torch.float32) -> tuple[Any, Any]:
    """A module with weights side by side in memory, and what keeps them together."""
    if how == "SwiGLU":
        return nn.SwiGLU(8, 4, bias=True, dtype=dtype), None
    if how == "MoE":
        return nn.MoE(8, 4, 4, 2, shared_size=3, dtype=dtype), None
    model = tiny.model("qwen2", dtype)
    decoder = ck.models.Decoder.from_transformers(model, max_tokens=64, max_batch=1) if "decoder" in how else None
    if "patch" in how:
        ck.patch(model)
    return model, decoder


HOW = ["SwiGLU", "MoE", "patch", "decoder", "decoder and patch"]


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("how", HOW)
def test_safetensors_and_accelerate_save_every_weight(how: str, dtype: torch.dtype, tmp_path: Path) -> None:
    files, other = pytest.importorskip("safetensors.torch"), pytest.importorskip("accelerate.utils")
    model, held = packed(how, dtype)
    state = {name: t.clone() for name, t in model.state_dict().items()}
    files.save_model(model, tmp_path / "safetensors")
    other.save(model.state_dict(), str(tmp_path / "accelerate"), safe_serialization=True)
    files.save_file(model.state_dict(), tmp_path / "file")
    for name in ("safetensors", "accelerate", "file"):
        saved = files.load_file(tmp_path / name)
        assert saved.keys() == state.keys(), name
        assert all(torch.equal(saved[key], t) for key, t in state.items()), name
    del held


def test_an_accelerator_saves_a_patched_model(tmp_path: Path) -> None:
    accelerate, files = pytest.importorskip("accelerate"), pytest.importorskip("safetensors.torch")
    model, _ = packed("patch")
    accelerate.Accelerator(cpu=True).save_model(model, tmp_path)
    assert files.load_file(tmp_path / "model.safetensors").keys() == model.state_dict().keys()


def size(saved: Any) -> int:
    file = io.BytesIO()
    torch.save(saved, file)
    return file.tell()


def test_torch_saves_no_byte_twice() -> None:
    """Nor the whole with a part of it."""
    plain, (patched, _) = tiny.model("qwen2"), packed("patch")
    assert size(patched.state_dict()) == size(plain.state_dict())
    name = "model.layers.0.self_attn.k_proj.weight"
    assert size(patched.state_dict()[name]) == size(plain.state_dict()[name])
    module = nn.SwiGLU(64, 64)
    assert size(module.state_dict()) < 4 * 3 * 64 * 64 + 4096


# ---- one memory -----------------------------------------------------------------------------------------


def addresses(model: torch.nn.Module) -> list[int]:
    return [p.data_ptr() for p in model.parameters()]


def test_what_is_saved_is_the_memory_that_is_used() -> None:
    model, _ = packed("patch")
    ids, state = tokens(), model.state_dict()
    with torch.no_grad():
        for name in ("self_attn.v_proj.weight", "self_attn.k_proj.bias", "mlp.up_proj.weight"):
            state[f"model.layers.0.{name}"].mul_(3)
        assert model.model.layers[0].mlp.fused() is not None
        ours = model(ids).logits
        ck.unpatch(model)
        close(ours, model(ids).logits)
    half = nn.SwiGLU(8, 4)
    half.state_dict()["up_proj.weight"].zero_()
    assert not half.gate_up_proj.weight[4:].any() and half.gate_up_proj.weight[:4].any()


def test_calls_that_move_nothing_leave_weights_where_they_are() -> None:
    model, _ = packed("patch")
    before, whole = addresses(model), model.model.layers[0].mlp.packed[0]
    model.to("cpu").to(torch.float32).float()
    model.load_state_dict(copy.deepcopy(model.state_dict()))
    assert addresses(model) == before
    assert model.model.layers[0].mlp.packed[0] is whole


def test_a_second_reader_moves_nothing() -> None:
    model, decoder = packed("decoder")
    before = addresses(model)
    ck.patch(model)
    assert addresses(model) == before
    del decoder
    ck.unpatch(model)
    gc.collect()
    ck.patch(model)
    model.float()
    assert addresses(model) == before
    assert model.model.layers[0].mlp.packed[0].data_ptr() == model.model.layers[0].mlp.gate_proj.weight.data_ptr()


def test_parts_outlive_the_whole() -> None:
    for dtype in (*TYPES, torch.float64, torch.float8_e4m3fn):
        parts = [torch.nn.Parameter(torch.ones(n, 3).to(dtype), requires_grad=False) for n in (4, 1, 2)]
        whole = side_by_side(parts)
        assert side_by_side(parts) is whole
        assert side_by_side(parts[:2]) is not whole and side_by_side([parts[2], parts[0]]) is not whole
        del whole
        gc.collect()
        [torch.zeros(7, 3).to(dtype) for _ in range(8)]  # would take the memory, were it free
        assert all((p.float() == 1).all() for p in parts)
        assert all(p.untyped_storage().nbytes() == p.nbytes for p in parts)


def test_neighbours_in_memory_are_no_parts() -> None:
    """Tensors of one storage that another made, which may free it."""
    given = torch.ones(6, 3)
    parts = list(given.split([2, 4]))
    assert side_by_side(parts).data_ptr() != given.data_ptr()


def test_copies_pickles_and_loads_of_parts() -> None:
    model, _ = packed("patch")
    state = model.state_dict()
    for other in (copy.deepcopy(state), pickle.loads(pickle.dumps(state))):
        assert all(torch.equal(other[name], t) and other[name].data_ptr() != t.data_ptr() for name, t in state.items())
    double = copy.deepcopy(model).double()
    assert double.model.layers[0].self_attn.packed[0].dtype is torch.float64
    double.load_state_dict(state)
    with torch.no_grad():
        close(double(tokens()).logits.float(), model(tokens()).logits)
        given = {name: t.clone() for name, t in state.items()} | {"lm_head.weight": 2 * state["lm_head.weight"]}
        close(torch.func.functional_call(model, given, (tokens(),)).logits, 2 * model(tokens()).logits)


def test_weights_in_shared_memory_stay_there() -> None:
    model, _ = packed("patch")
    ids = tokens()
    with torch.no_grad():
        expected = model(ids).logits
        model.share_memory()
        before = addresses(model)
        close(model(ids).logits, expected)
        assert addresses(model) == before and all(p.is_shared() for p in model.parameters())
        ck.unpatch(model)
        report = ck.patch(model)
        assert addresses(model) == before and not report.fused
        assert any("shared with other processes" in reason for _, reason in report.left)


def _scale(model: Any, results: Any) -> None:
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.mul_(3)
        results.put(model(tokens()).logits.tolist())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_another_process_runs_the_same_weights() -> None:
    model, _ = packed("patch")
    context = torch.multiprocessing.get_context("spawn")
    results = context.Queue()
    process = context.Process(target=_scale, args=(model, results))
    process.start()
    try:
        theirs = torch.tensor(results.get(timeout=120))
    finally:
        process.join(20)
        process.kill()
    with torch.no_grad():
        close(model(tokens()).logits, theirs)
        assert model.model.layers[0].mlp.up_proj.weight.is_shared()


# ---- tensors without memory, and gradients --------------------------------------------------------------


def test_saved_variables_keep_their_gradients() -> None:
    module = nn.SwiGLU(8, 4)
    state: dict[str, Tensor] = module.state_dict(keep_vars=True)
    (2 * state["up_proj.weight"]).sum().backward()
    grad = module.gate_up_proj.weight.grad
    assert grad is not None and (grad[4:] == 2).all() and not grad[:4].any()


def test_tensors_without_memory_are_split_too() -> None:
    shapes = {"gate_proj.weight": (4, 8), "up_proj.weight": (4, 8), "down_proj.weight": (8, 4)}
    assert {name: t.shape for name, t in nn.SwiGLU(8, 4, device="meta").state_dict().items()} == shapes
    with FakeTensorMode():
        assert {name: t.shape for name, t in nn.SwiGLU(8, 4).state_dict().items()} == shapes
    parts = [torch.empty(n, 3, device="meta") for n in (2, 4)]
    assert side_by_side(parts).shape == (6, 3) and [len(p) for p in parts] == [2, 4]
    columns = torch.arange(12.0).view(3, 4).T
    assert all(torch.equal(a, b) for a, b in zip(split(columns, [1, 3]), columns.split([1, 3]), strict=True))


@pytest.mark.skipif(
    torch.__version__ < "2.12" or torch.__version__ >= "2.14",
    reason="torch 2.11 and 2.14 trace no module's state_dict, their own included",
)
def test_a_state_dict_in_a_compiled_function() -> None:
    module = nn.SwiGLU(8, 4)

    def total() -> Tensor:
        return torch.stack([t.sum() for t in module.state_dict().values()]).sum()

    torch.testing.assert_close(torch.compile(total, fullgraph=True, backend="aot_eager")(), total())


# ---- FSDP -----------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore")
def test_weights_that_fsdp_shards_are_read_where_it_puts_them() -> None:
    """Between steps of training too, when each call has them elsewhere; ``unpatch`` leaves FSDP's classes."""
    import torch.distributed as dist
    from torch.distributed.fsdp import FSDPModule, fully_shard

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    try:
        pair = tiny.model("llama"), tiny.model("llama")
        ck.patch(pair[1])
        for model in pair:
            for layer in model.model.layers:
                fully_shard(layer)
            fully_shard(model)
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.05) for m in pair]

        def check() -> None:
            for model, optimizer in zip(pair, optimizers, strict=True):
                model(tokens(), labels=tokens()).loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            with torch.no_grad():
                close(pair[1](tokens()).logits, pair[0](tokens()).logits)

        for _ in range(3):
            check()
        assert not any(m.packed or m.views for m in pair[1].modules() if isinstance(m, modules.Fused))
        ck.unpatch(pair[1])
        assert not any(isinstance(m, modules.Patched) for m in pair[1].modules())
        assert all(isinstance(m, FSDPModule) for m in (pair[1], *pair[1].model.layers))
        assert all(type(m).forward.__module__.startswith("transformers.") for m in pair[1].model.layers)
        check()
        pair[1].model.layers[0].reshard()
    finally:
        dist.destroy_process_group()
