"""``ck.patch`` on tiny models of every family: the same logits, tokens and gradients, and nothing left behind."""

from __future__ import annotations

import copy
import gc
import pickle
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._subclasses import FakeTensorMode
from transformers import DynamicCache
from transformers.masking_utils import causal_mask_function

import cutekernels as ck
from cutekernels.errors import UnsupportedProblem
from cutekernels.integrations.transformers import attention, modules, projections
from tests.integrations import tiny
from tests.integrations.tiny import FAMILIES, tokens
from tests.traced import Graphs

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")  # transformers' and peft's own
LEFT = torch.tensor([[0] * 7 + [1] * 13, [1] * 20])
RIGHT = LEFT.flip(1)


def close(actual: Tensor, expected: Tensor, seen: Tensor | None = None) -> None:
    """Equal but for what fp32 rounds."""
    actual, expected = actual.detach(), expected.detach()
    if seen is not None:
        actual, expected = actual[seen.bool()], expected[seen.bool()]
    size = float(expected.abs().max())
    assert float((actual - expected).abs().max()) <= 64 * 2.0**-23 * max(1.0, size)


def snapshot(model: Any) -> dict[str, Any]:
    return {
        "classes": [(name, type(m)) for name, m in model.named_modules()],
        "parameters": [(name, id(p), p.detach().clone(), p.data_ptr()) for name, p in model.named_parameters()],
        "attention": model.config._attn_implementation,
        "attributes": [(name, sorted(m.__dict__)) for name, m in model.named_modules()],
    }


# ---- results --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_transformers(family: str) -> None:
    model, ids = tiny.model(family), tokens()
    masks = {"none": None, "ones": torch.ones_like(ids), "left": LEFT, "right": RIGHT}
    with torch.no_grad():
        expected = {name: model(ids, attention_mask=mask).logits for name, mask in masks.items()}
        with ck.patch(model):
            assert (model.config._attn_implementation == "cutekernels") == (family != "deepseek-v2")
            for name, mask in masks.items():
                close(model(ids, attention_mask=mask).logits, expected[name], mask)
        assert torch.equal(model(ids).logits, expected["none"])


@pytest.mark.parametrize("family", FAMILIES)
def test_a_forward_searches_modules_for_children_alone(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch looks up a module's parameters, and what a module has not, in Python: a microsecond each."""
    model, ids, search = tiny.model(family), tokens(), torch.nn.Module.__getattr__
    package: str = str(Path(ck.__file__).parent)
    others: set[tuple[str, str]] = set()

    def searched(self: torch.nn.Module, name: str) -> Any:
        caller = sys._getframe(1).f_code
        if caller.co_filename.startswith(package) and name not in self._modules:
            others.add((caller.co_qualname, name))
        return search(self, name)

    with torch.no_grad(), ck.patch(model), monkeypatch.context() as patch:
        patch.setattr(torch.nn.Module, "__getattr__", searched)
        model(ids)
    assert not others


def test_a_part_of_each_head_turns() -> None:
    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
    model, ids = tiny.model("phi3", rope_parameters=rope), tokens()
    with torch.no_grad():
        expected = model(ids).logits
        with ck.patch(model):
            close(model(ids).logits, expected)


@pytest.mark.parametrize("cache", [None, "static"])
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_are_those_of_transformers(family: str, cache: str | None) -> None:
    model, ids = tiny.model(family), tokens()
    options = {"max_new_tokens": 16, "do_sample": False, "attention_mask": LEFT, "cache_implementation": cache}
    expected = model.generate(ids, **options)
    with ck.patch(model):
        assert torch.equal(model.generate(ids, **options), expected)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2"])
def test_several_tokens_over_a_cache(family: str) -> None:
    """A prompt in two parts, as assisted decoding and chunked prefill do."""
    model, ids = tiny.model(family), tokens()
    with torch.no_grad(), ck.patch(model):
        whole = model(ids).logits
        first = model(ids[:, :11], use_cache=True)
        second = model(ids[:, 11:], past_key_values=first.past_key_values)
    close(second.logits, whole[:, 11:])


def test_padding_is_a_byte_of_each_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """A padded prompt, whole or in two parts, makes no mask of queries by keys; the caller's own is read as it is."""
    masks: list[Any] = []

    def attend(q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None = None, **options: Any) -> Tensor:
        masks.append((mask, options.get("causal")))
        return ck.attention(q, k, v, mask=mask, **options)

    monkeypatch.setattr(attention, "attention", attend)
    for family in ("llama", "gemma2"):
        model, ids = tiny.model(family), tokens()
        with torch.no_grad():
            expected = model(ids, attention_mask=LEFT).logits
            with ck.patch(model):
                close(model(ids, attention_mask=LEFT).logits, expected, LEFT)
                first = model(ids[:, :11], attention_mask=LEFT[:, :11], use_cache=True)
                second = model(ids[:, 11:], attention_mask=LEFT, past_key_values=first.past_key_values)
        close(first.logits, expected[:, :11], LEFT[:, :11])
        close(second.logits, expected[:, 11:])
        compact = [mask is not None and mask.stride(2) == 0 and bool(causal) for mask, causal in masks]
        # A window's cache has no more keys than it needs: the second part's mask is another.
        assert compact == [*[True] * 4, family == "llama", True], family
        masks.clear()
    model, ids = tiny.model("llama"), tokens()
    both_ways = LEFT.bool()[:, None, None].expand(-1, -1, 20, -1)
    with torch.no_grad():
        expected = model(ids, attention_mask=both_ways).logits
        with ck.patch(model):
            close(model(ids, attention_mask=both_ways).logits, expected, LEFT)
    assert not any(causal for _, causal in masks)
    more = {"max_new_tokens": 8, "cache_implementation": "static", "do_sample": False}
    with torch.no_grad():
        stray = tiny.model("llama", sliding_window=6)  # its masks have one, its attention none
        for mask in (LEFT, torch.ones_like(LEFT)):
            found = stray.generate(ids, attention_mask=mask, **more)
            with ck.patch(stray):
                assert torch.equal(stray.generate(ids, attention_mask=mask, **more), found)
        expected = model(ids, attention_mask=LEFT).logits
        with ck.patch(model):
            close(model(ids, attention_mask=torch.cat([LEFT, LEFT])).logits, expected, LEFT)
        # Traces other than the compiler's would keep what the values of one mask say.
        asked = {"batch_size": 2, "q_length": 20, "kv_length": 20, "mask_function": causal_mask_function}
        seen = LEFT.bool()
        with FakeTensorMode() as fake:
            mask = attention.make_mask(config=model.config, attention_mask=fake.from_tensor(seen), **asked)
        assert mask is not None
        assert (mask.dtype, mask.shape) == (torch.bool, (2, 1, 20, 20))


@pytest.mark.parametrize("name", ["past_key_values", "cache"])  # before transformers 5.24, and since
def test_either_name_of_the_cache_is_taken(name: str) -> None:
    model = tiny.model("llama")
    x, turn = torch.randn(1, 3, 64), (torch.ones(1, 3, 16), torch.zeros(1, 3, 16))
    with torch.no_grad(), ck.patch(model):
        cache = DynamicCache(config=model.config)
        for length in (3, 6):
            model.model.layers[0].self_attn(x, turn, None, **{name: cache})
            assert cache.get_seq_length() == length


def test_attention_with_arguments_of_another_version_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """An argument that is not known would be dropped without a word, as the cache was when it had another name."""
    model = tiny.model("llama")
    kind, ids = type(model.model.layers[0].self_attn), tokens()
    forward = kind.forward
    expected = model(ids).logits

    def renamed(self: Any, hidden_states: Tensor, position_embeddings: Any, kv: Any = None, **kwargs: Any) -> Any:
        return forward(self, hidden_states, position_embeddings, **kwargs)

    monkeypatch.setattr(kind, "forward", renamed)
    with ck.patch(model) as report:
        left = dict(report.left)
        close(model(ids).logits, expected)
    assert "calls it with kv, which no kernel knows" in left["model.layers.0.self_attn"]
    assert report.patched["mlp"] and not report.patched["attention"]


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_are_those_of_transformers(family: str, checkpointing: bool) -> None:
    model, ids = tiny.model(family), tokens()
    model.train()
    if checkpointing:
        model.gradient_checkpointing_enable()

    def gradients() -> dict[str, Tensor]:
        model.zero_grad()
        model(ids, labels=ids, attention_mask=RIGHT).loss.backward()
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    expected = gradients()
    with ck.patch(model):
        ours = gradients()
    assert ours.keys() == expected.keys()
    for name, gradient in expected.items():
        close(ours[name], gradient)


def test_hidden_states_and_a_frozen_base() -> None:
    model, ids = tiny.model("qwen2"), tokens()
    expected = model(ids, output_hidden_states=True).hidden_states
    model.requires_grad_(False)
    with ck.patch(model):
        for ours, theirs in zip(model(ids, output_hidden_states=True).hidden_states, expected, strict=True):
            close(ours, theirs)


@contextmanager
def compiled(family: str, layers: int = 2, **options: Any) -> Iterator[tuple[Any, Tensor, Tensor]]:
    """A patched model compiled without graph breaks, tokens, and the plain model's logits."""
    torch.compiler.reset()
    model, ids = tiny.model(family, num_hidden_layers=layers), tokens()
    with torch.no_grad():
        expected = model(ids).logits
        with ck.patch(model):
            yield torch.compile(model, fullgraph=True, backend="aot_eager", **options), ids, expected


@pytest.mark.parametrize(("family", "layers", "cached"), [("mistral", 1, False), ("gemma2", 2, True)])
def test_a_compiled_prompt_reads_no_mask(family: str, layers: int, cached: bool) -> None:
    """transformers writes out the causal band of every traced call."""
    graphs = Graphs()
    torch.compiler.reset()
    model, ids = tiny.model(family, num_hidden_layers=layers), tokens()
    with torch.no_grad():
        plain, padded = (model(ids, attention_mask=mask).logits for mask in (None, LEFT))
        with ck.patch(model):
            ours = torch.compile(model, fullgraph=True, backend=aot_autograd(fw_compiler=graphs.backend))
            close(ours(ids, use_cache=cached).logits, plain)
            if not cached:
                ours = torch.compile(model, fullgraph=True, backend="aot_eager")
                close(ours(ids, attention_mask=LEFT).logits[LEFT.bool()], padded[LEFT.bool()])
    assert tiny.masks_of(graphs.seen[0]) == [None] * model.config.num_hidden_layers


def test_a_compiled_prompt_of_a_text_part_alone_reads_no_mask() -> None:
    """Its own call has another hook of the patch, which adds no positions."""
    graphs = Graphs()
    torch.compiler.reset()
    model, ids = tiny.model("mistral", num_hidden_layers=1).model, tokens()
    with torch.no_grad():
        plain = model(ids, use_cache=False).last_hidden_state
        with ck.patch(model):
            ours = torch.compile(model, fullgraph=True, backend=aot_autograd(fw_compiler=graphs.backend))
            close(ours(ids, use_cache=False).last_hidden_state, plain)
    assert [mask for graph in graphs.seen for mask in tiny.masks_of(graph)] == [None]


def test_compiled_sequences_in_one_row_stay_apart() -> None:
    """Positions that a caller gives may begin anew: the mask is written out."""
    torch.compiler.reset()
    model, ids = tiny.model("llama", num_hidden_layers=1), tokens()[:1]
    positions = torch.cat([torch.arange(5), torch.arange(ids.shape[1] - 5)])[None]
    with torch.no_grad():
        expected = model(ids, position_ids=positions, use_cache=False).logits
        assert not torch.allclose(expected, model(ids, use_cache=False).logits, atol=1e-3)
        with ck.patch(model):
            ours = torch.compile(model, fullgraph=True, backend="aot_eager")
            for _ in range(2):
                close(ours(ids, position_ids=positions, use_cache=False).logits, expected)
                close(ours(ids, use_cache=False).logits, model(ids, use_cache=False).logits)


@pytest.mark.parametrize("way", ["hook", "wrapper"])
def test_positions_that_come_late_are_seen(way: str) -> None:
    torch.compiler.reset()
    model, ids = tiny.model("llama", num_hidden_layers=1), tokens()[:1]
    positions = torch.cat([torch.arange(5), torch.arange(ids.shape[1] - 5)])[None]
    with torch.no_grad():
        expected = model(ids, position_ids=positions, use_cache=False).logits
        with ck.patch(model):
            body = model.model
            if way == "hook":
                body.register_forward_pre_hook(lambda m, a, k: (a, k | {"position_ids": positions}), with_kwargs=True)
            else:
                inner = body.forward
                body.forward = lambda *a, **k: inner(*a, **k | {"position_ids": positions})
            close(torch.compile(model, backend="aot_eager")(ids, use_cache=False).logits, expected)
            body.__dict__.pop("forward", None)


def test_compiled_for_any_length() -> None:
    with compiled("qwen3") as (model, ids, expected):
        for length in (9, 20):
            some = ids[:, :length].contiguous()
            torch._dynamo.mark_dynamic(some, 1)  # an error where the graph holds for one length alone
            close(model(some, use_cache=False).logits, expected[:, :length])


def test_compiled_over_a_cache() -> None:
    """Over a static one: ``test_static_cache.py``."""
    with compiled("llama", layers=1, dynamic=False) as (model, ids, expected):
        cache = DynamicCache(config=model.config)
        for begin, end in ((0, 12), (12, 20)):
            close(model(ids[:, begin:end], past_key_values=cache).logits, expected[:, begin:end])


def test_exported_for_any_length() -> None:
    class Logits(torch.nn.Module):
        def __init__(self, model: Any) -> None:
            super().__init__()
            self.model = model

        def forward(self, ids: Tensor) -> Tensor:
            return self.model(ids, use_cache=False).logits  # type: ignore[no-any-return]

    model, ids = tiny.model("llama"), tokens()
    with torch.no_grad():
        expected = model(ids).logits
        with ck.patch(model):
            shapes, nine = {"ids": {1: torch.export.Dim("length", min=2, max=64)}}, ids[:, :9].contiguous()
            program = torch.export.export(Logits(model), (nine,), dynamic_shapes=shapes, strict=False)
            close(program.module()(ids), expected)


# ---- parameters -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_unpatch_restores_everything(family: str) -> None:
    model = tiny.model(family)
    before = snapshot(model)
    state = {name: t.clone() for name, t in model.state_dict().items()}
    ck.patch(model)
    assert list(model.state_dict()) == list(state)
    assert all(torch.equal(t, state[name]) for name, t in model.state_dict().items())
    places = [p.data_ptr() for p in model.parameters()]
    ck.unpatch(model)
    after = snapshot(model)
    for what in ("classes", "attributes", "attention"):
        assert after[what] == before[what]
    for ours, theirs in zip(after["parameters"], before["parameters"], strict=True):
        assert ours[:2] == theirs[:2]
        assert torch.equal(ours[2], theirs[2])
    ck.unpatch(model)  # nothing to do
    gc.collect(1)  # what the patch left is young
    with ck.patch(model):
        pass
    assert [p.data_ptr() for p in model.parameters()] == places, "the first patch alone moves them"


def test_an_optimizer_made_before_updates_the_packed_weights() -> None:
    model, ids = tiny.model("llama"), tokens()
    twin = copy.deepcopy(model)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, twin)]
    ck.patch(model)
    for _ in range(2):
        for m, optimizer in zip((model, twin), optimizers, strict=True):
            optimizer.zero_grad()
            m(ids, labels=ids).loss.backward()
            optimizer.step()
    with torch.no_grad():  # through the packed weights now
        close(model(ids).logits, twin(ids).logits)


def test_moves_casts_and_loads_keep_projections_together() -> None:
    model, ids = tiny.model("qwen2"), tokens()
    other = tiny.model("qwen2")
    for parameter in other.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    ck.patch(model)
    model.double().float()
    for assign in (False, True):
        model.load_state_dict(other.state_dict(), assign=assign)
        with torch.no_grad():
            close(model(ids).logits, other(ids).logits)
    mlp = model.model.layers[0].mlp
    assert mlp.packed[0].data_ptr() == mlp.gate_proj.weight.data_ptr()
    assert mlp.up_proj.weight.data_ptr() == mlp.packed[0][96:].data_ptr()


def test_copies_and_pickles_are_patched_and_apart() -> None:
    model, ids = tiny.model("qwen3"), tokens()
    with torch.no_grad():
        expected = model(ids).logits
        ck.patch(model)
        for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            mlp = twin.model.layers[0].mlp
            assert isinstance(mlp, modules.Mlp)
            assert mlp.packed[0].data_ptr() == mlp.gate_proj.weight.data_ptr()
            assert mlp.packed[0].data_ptr() != model.model.layers[0].mlp.packed[0].data_ptr()
            close(twin(ids).logits, expected)
            ck.unpatch(twin)
            close(twin(ids).logits, expected)


def test_a_patched_model_is_saved_as_a_plain_one(tmp_path: Path) -> None:
    model, ids = tiny.model("llama"), tokens()
    with torch.no_grad():
        expected = model(ids).logits
        with ck.patch(model):
            model.save_pretrained(tmp_path)
        loaded = type(model).from_pretrained(tmp_path)
        assert torch.equal(loaded(ids).logits, expected)


@pytest.mark.parametrize("order", ["patch first", "adapter first"])
def test_lora(order: str) -> None:
    """Targets are found by name; projections with adapters keep their own products."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj", "gate_proj"], init_lora_weights=False)
    ids = tokens()

    def adapted(model: Any) -> Any:
        torch.manual_seed(1)
        return peft.get_peft_model(model, config)

    expected = adapted(tiny.model("llama"))(ids, labels=ids)
    model = tiny.model("llama")
    if order == "patch first":
        ck.patch(model)
        ours = adapted(model)
    else:
        ours = adapted(model)
        report = ck.patch(ours.base_model.model)
        assert any("projections are of" in reason for _, reason in report.left)
    with torch.no_grad():
        close(ours(ids).logits, expected.logits)
    result = ours(ids, labels=ids)
    close(result.logits, expected.logits)
    result.loss.backward()
    grads = [p.grad for p in ours.parameters() if p.requires_grad]
    assert all(g is not None and g.isfinite().all() for g in grads)


# ---- what is refused, and what is reported --------------------------------------------------------------

WHOLE: dict[str, dict[str, int]] = {  # linear: in two layers, and the head
    "phi3": {"layer": 2, "attention": 2, "mlp": 2, "norm": 5, "linear": 9},
    "granite": {"layer": 2, "attention": 2, "mlp": 2, "norm": 5, "linear": 15},
    "olmo2": {"attention": 2, "mlp": 2, "norm": 9, "linear": 15},
    "smollm3": {"layer": 2, "attention": 2, "mlp": 2, "norm": 5, "linear": 15},
    "starcoder2": {"layer": 2, "attention": 2, "mlp": 2, "norm": 5, "linear": 13},
    "qwen2-moe": {"layer": 2, "attention": 2, "mlp": 2, "experts": 2, "norm": 5, "linear": 17},
}


@pytest.mark.parametrize("family", WHOLE)
def test_a_family_is_patched_as_a_whole(family: str) -> None:
    model = tiny.model(family)
    with ck.patch(model) as report:
        assert report.patched == {**WHOLE[family], "causal": 1}
        assert not report.left
        packed = 0 if family in ("phi3", "starcoder2") else 2
        assert report.fused["mlp"] == packed
        assert report.fused["attention"] == (0 if family == "phi3" else 2)
    result = ck.compare(model.bfloat16(), {"input_ids": tokens(), "attention_mask": RIGHT})
    assert 1e-4 < result.patched["logits"] <= 1.5 * result.plain["logits"] < 0.2


@pytest.mark.parametrize(
    ("family", "option", "left"),
    [("phi3", "resid_pdrop", ["layers.0"]), ("starcoder2", "residual_dropout", ["layers.0.self_attn", "layers.0.mlp"])],
)
def test_layers_with_dropout_are_left(family: str, option: str, left: list[str]) -> None:
    model, ids = tiny.model(family, **{option: 0.5}).train(), tokens()

    def loss() -> Tensor:
        torch.manual_seed(1)
        return model(ids, labels=ids).loss  # type: ignore[no-any-return]

    expected = loss()
    with ck.patch(model) as report:
        close(loss(), expected)
    reasons = dict(report.left)
    assert all(reasons[f"model.{name}"] == "it has dropout, which no kernel has" for name in left)


def test_what_is_done_to_a_layers_dropouts_later_is_done() -> None:
    model, ids, seen = tiny.model("phi3").train(), tokens(), []
    with ck.patch(model):
        first = model.model.layers[0]
        first.resid_attn_dropout.register_forward_hook(lambda *_: seen.append(1))
        first.resid_mlp_dropout.p = 0.5
        torch.manual_seed(1)
        found = model(ids).logits
    torch.manual_seed(1)
    close(found, model(ids).logits)
    assert seen == [1, 1] and not torch.equal(model(ids).logits, found)


def test_the_report_names_what_is_left() -> None:
    model = tiny.model("mixtral")
    model.model.layers[0].mlp.experts.has_post_expert_norm = True
    model.model.layers[1].self_attn.q_proj.register_forward_hook(lambda *_: None)
    with ck.patch(model) as report:
        text = str(report)
    assert report.patched == {"layer": 2, "attention": 2, "linear": 9, "norm": 5, "experts": 1, "causal": 1}
    assert report.fused == {"attention": 1}
    assert "its experts have a norm of their own: model.layers.0.mlp.experts" in text
    assert "its projections have hooks: model.layers.1.self_attn.q_proj/k_proj/v_proj" in text


def test_products_and_attention_in_fp32_on_a_gpu_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU's tensors, of which the CPU's stand in here: kernels multiply 16-bit types alone."""
    with FakeTensorMode():
        wide, half = (torch.empty(2, 2, dtype=d, device="cuda") for d in (torch.float32, torch.bfloat16))
        assert projections.multiplied(half, half)
        assert not (projections.multiplied(wide, wide) or projections.multiplied(half, wide))
    model = tiny.model("llama")
    for file in (modules, projections):
        monkeypatch.setattr(file, "multiplied", lambda x, weight: False)
    expected = model(tokens()).logits
    with ck.patch(model) as report:
        left = dict(report.left)
        assert "linear" not in report.patched
        assert report.patched["norm"] == 5
        assert {name for name in left if name.endswith("_proj")} >= {"model.layers.0.self_attn.q_proj"}
        assert left["model.layers.0.self_attn's core"] == left["lm_head"]
        assert left["lm_head"] == "on a GPU kernels multiply fp16 and bf16, and its weights are torch.float32"
        assert model.config._attn_implementation != "cutekernels"
        close(model(tokens()).logits, expected)


def test_an_unknown_activation_and_dropout_are_left() -> None:
    model = tiny.model("llama", hidden_act="relu", attention_dropout=0.1)
    ids = tokens()
    expected = model(ids).logits
    with ck.patch(model) as report:
        close(model(ids).logits, expected)
    assert ("attention's core", "attention_dropout is not 0") in report.left
    assert any("no kernel has the gate of ReLU" in reason for _, reason in report.left)


KINDS = ["none", "text", "number", "tensor"]


def test_other_models_are_refused_where_that_is_asked_for() -> None:
    layer = tiny.model("llama").model.layers[0].self_attn
    for model in (torch.nn.Linear(4, 4), layer):
        with pytest.raises(UnsupportedProblem, match=f"model_type is one of llama.*this is a {type(model).__name__}"):
            ck.patch(model, unlisted=False)
    assert not any(isinstance(m, modules.Patched) for m in layer.modules())


@pytest.mark.parametrize("model", [None, "x", 1, torch.ones(2)], ids=KINDS)
def test_only_modules_are_unpatched(model: Any) -> None:
    with pytest.raises(UnsupportedProblem, match="unpatch takes a torch.nn.Module; got .*: pass the model"):
        ck.unpatch(model)
    ck.unpatch(torch.nn.Linear(4, 4))


def test_patching_twice_is_refused_and_changes_nothing() -> None:
    model, ids = tiny.model("llama"), tokens()
    with torch.no_grad():
        expected = model(ids).logits
        with ck.patch(model):
            with pytest.raises(UnsupportedProblem, match="patched already"):
                ck.patch(model)
            close(model(ids).logits, expected)
        assert torch.equal(model(ids).logits, expected)


def test_an_error_inside_the_block_restores_the_model() -> None:
    model = tiny.model("llama")
    before = snapshot(model)
    with pytest.raises(ZeroDivisionError), ck.patch(model):
        _ = 1 / 0
    assert snapshot(model)["classes"] == before["classes"]


def test_masks_that_are_not_bool_and_position_biases_are_refused() -> None:
    model, ids = tiny.model("llama"), tokens()
    with ck.patch(model):
        with pytest.raises(UnsupportedProblem, match=r"bool masks; this one is torch\.float32"):
            model(ids, attention_mask=torch.zeros(2, 1, 20, 20))
        with pytest.raises(UnsupportedProblem, match="no position bias"):
            model(ids, position_bias=torch.zeros(4))
