"""A ``Decoder`` reads the model's weights wherever they are: moved or replaced after it was made, or it refuses."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import cutekernels as ck
from cutekernels.errors import UnsupportedProblem
from tests.integrations import tiny
from tests.models.test_decoder import decoder, greedy, prompts

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")
(PROMPT,) = prompts(9)


def train(model: Any) -> None:
    """A step as an optimizer's: every weight changes where it lies."""
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn(p.shape, generator=generator).to(p.dtype), alpha=0.1)


def compare(model: Any) -> None:
    ck.compare(model, tiny.tokens())


def patch(model: Any) -> None:
    with ck.patch(model):
        model(tiny.tokens())


@pytest.mark.parametrize("change", [compare, patch])
def test_what_moves_nothing_leaves_a_decoder_and_its_graphs(change: Callable[[Any], None]) -> None:
    model = tiny.model("qwen2")
    engine = decoder(model)
    weights, places = engine._w, [p.data_ptr() for p in model.parameters()]
    change(model)
    train(model)
    assert engine.generate([PROMPT], max_new_tokens=8).tokens == [greedy(model, PROMPT, 8)]
    assert engine._w is weights and [p.data_ptr() for p in model.parameters()] == places


def move(model: Any) -> None:
    model.double().float()
    train(model)


def assign(model: Any) -> None:
    given = {name: t.clone() for name, t in model.state_dict().items()}
    model.load_state_dict(given, assign=True)
    train(model)


def set_data(name: str) -> Callable[[Any], None]:
    def change(model: Any) -> None:
        p = model.get_parameter(name)
        p.data = -2 * torch.flip(p.data, (0,))

    return change


def set_parameter(name: str) -> Callable[[Any], None]:
    def change(model: Any) -> None:
        owner, kind = model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]
        shape = owner.weight.shape[:1] if kind == "bias" else getattr(owner, kind).shape
        setattr(owner, kind, torch.nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(3))))

    return change


def set_module(name: str) -> Callable[[Any], None]:
    def change(model: Any) -> None:
        other = tiny.model("mixtral" if hasattr(model.model.layers[0].mlp, "experts") else "llama")
        train(other)
        model.set_submodule(name, other.get_submodule(name))

    return change


def set_correction(model: Any) -> None:
    drawn = torch.randn(8, generator=torch.Generator().manual_seed(3))
    model.model.layers[1].mlp.gate.e_score_correction_bias = drawn


def set_scalar(model: Any) -> None:
    model.model.layers[1].layer_scalar = torch.tensor([-0.4])


ATTENTION, EXPERTS = "model.layers.1.self_attn", "model.layers.1.mlp.experts"
CHANGES: dict[str, tuple[str, Callable[[Any], None]]] = {
    "move": ("llama", move),
    "assign": ("llama", assign),
    "data-of-a-joined-one": ("llama", set_data(f"{ATTENTION}.v_proj.weight")),
    "data-of-a-norm": ("llama", set_data("model.layers.1.input_layernorm.weight")),
    "data-of-experts": ("mixtral", set_data(f"{EXPERTS}.down_proj")),
    "parameter": ("llama", set_parameter("model.layers.0.mlp.up_proj.weight")),
    "parameter-of-the-head": ("llama", set_parameter("lm_head.weight")),
    "parameter-of-experts": ("mixtral", set_parameter(f"{EXPERTS}.gate_up_proj")),
    "bias": ("llama", set_parameter(f"{ATTENTION}.o_proj.bias")),
    "scalar-of-a-layer": ("gemma4", set_scalar),
    "correction-of-a-router": ("glm4-moe", set_correction),
    "head-of-a-model-with-towers": ("qwen3-vl", set_parameter("lm_head.weight")),
    "layer-of-a-model-with-towers": (
        "qwen3-vl",
        set_parameter("model.language_model.layers.0.mlp.up_proj.weight"),
    ),
    "module": ("llama", set_module(f"{ATTENTION}.v_proj")),
    "layer": ("llama", set_module("model.layers.1")),
    "embedding": ("llama", set_module("model.embed_tokens")),
    "all": ("mixtral", set_module("model")),
}


@pytest.mark.parametrize("name", CHANGES)
def test_weights_that_move_or_are_replaced_are_followed(name: str) -> None:
    family, change = CHANGES[name]
    model = tiny.model(family)
    engine = decoder(model)
    before = engine.generate([PROMPT], max_new_tokens=8).tokens
    engine._graphs[4, True] = None  # type: ignore[assignment]  # a captured step, which knows the old addresses
    change(model)
    assert engine.generate([PROMPT], max_new_tokens=8).tokens == [greedy(model, PROMPT, 8)] != before
    assert not engine._graphs
    train(model)
    weights = engine._w
    assert engine.generate([PROMPT], max_new_tokens=8).tokens == [greedy(model, PROMPT, 8)]
    assert engine._w is weights, "nothing has moved since"


def test_a_running_request_goes_on_with_the_new_weights() -> None:
    """Over the keys of those before, as in the middle of an optimizer's step in place."""
    model, twin = tiny.model("llama"), tiny.model("llama")
    results = []
    for one, change in ((model, move), (twin, train)):
        engine = decoder(one)
        number = engine.add(PROMPT, max_new_tokens=12)
        for _ in range(5):
            engine.step()
        change(one)
        while not engine.idle:
            engine.step()
        results.append(engine.result(number))
    assert results[0] == results[1] != greedy(tiny.model("llama"), PROMPT, 12)


def adapt(model: Any) -> None:
    peft = pytest.importorskip("peft")
    peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False))


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        (lambda m: m.double(), r"from 2 layers of .*float32 on cpu to 2 layers of .*float64 on cpu, which its cache"),
        (lambda m: m.to("meta"), "float32 on cpu to .*float32 on meta.*undo that, or make another decoder"),
        (lambda m: m.resize_token_embeddings(140), "131 and 131 tokens.* to .*140 and 140 tokens"),
        (lambda m: setattr(m.model, "layers", m.model.layers[:1]), "from 2 layers .* to 1 layers"),
        (adapt, r"cannot be read any more \(undo that, or make another decoder\): .*q_proj.*merge adapters"),
        (lambda m: setattr(m.model.layers[1], "mlp", torch.nn.Identity()), "'Identity' object has no attribute"),
    ],
    ids=["dtype", "meta", "vocabulary", "fewer-layers", "adapter", "module"],
)
@pytest.mark.filterwarnings("ignore:.*tied.*:UserWarning")
def test_what_cannot_be_followed_is_refused_at_every_step(change: Callable[[Any], Any], rule: str) -> None:
    model = tiny.model("llama")
    engine = decoder(model)
    change(model)
    for _ in range(2):
        with pytest.raises(UnsupportedProblem, match=f"changed since this decoder was made.*{rule}"):
            engine.generate([PROMPT], max_new_tokens=4)
    assert engine.idle


def test_after_the_change_is_undone_requests_go_on() -> None:
    model = tiny.model("llama")
    engine, expected = decoder(model), greedy(model, PROMPT, 8)
    number = engine.add(PROMPT, max_new_tokens=8)
    engine.step()
    model.double()
    with pytest.raises(UnsupportedProblem, match="float64"):
        engine.step()
    model.float()
    while not engine.idle:
        engine.step()
    assert engine.result(number) == expected


@pytest.fixture
def one_process() -> Iterator[None]:
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    yield
    dist.destroy_process_group()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("version", [1, 2])
def test_a_model_that_fsdp_shards_is_refused(version: int) -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

    model = tiny.model("llama")
    engine = decoder(model)
    cpu = torch.device("cpu")
    whole = FullyShardedDataParallel(model, device_id=cpu, use_orig_params=True) if version == 1 else fully_shard(model)
    with pytest.raises(UnsupportedProblem, match="changed since this decoder was made.*FSDP shards.*full_state_dict"):
        engine.generate([PROMPT], max_new_tokens=4)
    with pytest.raises(UnsupportedProblem, match="Decoder reads whole weights, and FSDP shards those of"):
        decoder(whole)


def test_a_default_device_does_not_slow_the_check_down() -> None:
    """Its mode sees every call of torch's functions."""
    engine, calls = decoder(tiny.model("llama")), []

    class Counted(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            calls.append(func)
            return func(*args, **(kwargs or {}))

    with Counted():
        assert not engine._source.moved()
    assert calls == []
