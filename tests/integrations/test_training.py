"""Patched models in training: the loss without logits, and projections whose packed weights train."""

from __future__ import annotations

import copy
import inspect
import pickle
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd

pytest.importorskip("transformers")

import cutekernels as ck
from cutekernels.errors import UnsupportedProblem
from cutekernels.nn import packed_training
from tests.integrations import tiny


def both(family: str, **changes: Any) -> tuple[Any, Any]:
    """The same model twice, in training: plain, and patched."""
    plain = tiny.model(family, **changes).train()
    patched = copy.deepcopy(plain)
    ck.patch(patched)
    return plain, patched


def labelled() -> tuple[torch.Tensor, torch.Tensor]:
    ids = tiny.tokens()
    labels = ids.clone()
    labels[:, :5] = -100
    return ids, labels


def close(plain: Any, patched: Any) -> None:
    """Whether both models have the same gradients, but for rounding."""
    for (name, p), (_, q) in zip(plain.named_parameters(), patched.named_parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), name
        if p.grad is not None:
            assert (p.grad - q.grad).norm() <= 1e-5 * p.grad.norm() + 1e-9, name


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_the_loss_is_transformers_own_without_logits(family: str) -> None:
    plain, patched = both(family)
    ids, labels = labelled()
    routed = {"output_router_logits": True} if family in ("mixtral", "qwen3-moe", "qwen2-moe") else {}
    for more in ({}, {"num_items_in_batch": torch.tensor(17)}):
        results = [model(ids, labels=labels, **routed, **more) for model in (plain, patched)]
        assert results[1].logits is None
        assert isinstance(results[1], type(results[0]))
        assert torch.allclose(results[0].loss, results[1].loss, rtol=1e-5)
        for result in results:
            result.loss.backward()  # the second time gradients are added to those of the first
        if routed:
            assert torch.allclose(results[0].aux_loss, results[1].aux_loss, rtol=1e-5)
    close(plain, patched)


def test_who_wants_logits_gets_them() -> None:
    plain, patched = both("qwen2")
    ids, labels = labelled()
    expected = plain(ids, labels=labels)

    def same(result: Any) -> None:
        assert torch.allclose(result.logits, expected.logits, atol=1e-4)
        assert torch.allclose(result.loss, expected.loss, rtol=1e-5)

    same(patched(ids, labels=labels, skip_logits=False))
    same(patched.eval()(ids, labels=labels))
    assert patched(ids, labels=labels, skip_logits=True).logits is None
    patched.train()
    assert patched(ids).logits is not None
    assert patched(ids, labels=labels, logits_to_keep=20).logits.shape[1] == 20
    seen: list[Any] = []
    hook = patched.lm_head.register_forward_hook(lambda *args: seen.append(args))
    same(patched(ids, labels=labels))
    assert seen
    hook.remove()
    patched.loss_function = lambda logits, labels, **_: logits.sum()
    assert torch.allclose(patched(ids, labels=labels).loss, expected.logits.sum(), rtol=1e-4)


def test_logits_divided_by_a_negative_number_are_formed() -> None:
    """The loss without logits has a temperature, which is positive."""
    plain, patched = both("granite", logits_scaling=-0.5)
    ids, labels = labelled()
    found, expected = patched(ids, labels=labels), plain(ids, labels=labels)
    assert torch.allclose(found.logits, expected.logits, atol=1e-4)
    assert torch.allclose(found.loss, expected.loss, rtol=1e-5)


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_tuples_have_none_in_the_logits_place(family: str) -> None:
    """A loss is followed by logits: what indexes the tuple must not take a cache for them."""
    plain, patched = both(family)
    ids, labels = labelled()
    options: list[dict[str, Any]] = [
        {},
        {"use_cache": True},
        {"use_cache": False},
        {"output_hidden_states": True},
        {"use_cache": False, "output_hidden_states": True},
    ]
    if hasattr(plain.config, "output_router_logits"):
        options += [{"output_router_logits": True}, {"output_router_logits": True, "use_cache": False}]
    for chosen in options:
        expected = plain(ids, labels=labels, return_dict=False, **chosen)
        whole = patched(ids, labels=labels, **chosen)
        for found in (patched(ids, labels=labels, return_dict=False, **chosen), whole.to_tuple(), whole[:]):
            assert type(found) is tuple and len(found) == len(expected), chosen
            absent = [place for place, value in enumerate(found) if value is None]
            assert absent == [1 + ("aux_loss" in whole)]
            assert expected[absent[0]].shape[-1] == plain.config.vocab_size
            assert torch.allclose(found[0], expected[0], rtol=1e-5)
            for ours, theirs in zip(found, expected, strict=True):
                assert ours is None or type(ours) is type(theirs), chosen
        assert "logits" not in whole and whole.logits is None
        with_logits = patched(ids, labels=labels, return_dict=False, skip_logits=False, **chosen)
        assert torch.allclose(with_logits[absent[0]], expected[absent[0]], atol=1e-3)


def test_the_logits_place_is_kept_by_copies_pickles_and_trees() -> None:
    """As wrappers take outputs apart and put them together: accelerate's casts, pytree of DDP."""
    _, patched = both("llama")
    ids, labels = labelled()
    with torch.no_grad():
        output = patched(ids, labels=labels, use_cache=False, output_hidden_states=True)
    leaves, spec = torch.utils._pytree.tree_flatten(output)
    for again in (
        copy.deepcopy(output),
        pickle.loads(pickle.dumps(output)),
        type(output)(dict(output)),
        torch.utils._pytree.tree_unflatten(leaves, spec),
    ):
        assert again[1] is None and torch.equal(again[0], output[0]) and len(again[2]) == len(output.hidden_states)
        assert type(again) is type(output)


def test_arguments_of_all_kinds() -> None:
    plain, patched = both("llama")
    ids, labels = labelled()
    assert inspect.signature(patched.forward) == inspect.signature(plain.forward)  # trainers drop what is not in it
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    expected = plain(ids, mask, labels=labels, return_dict=False)
    found = patched(ids, mask, labels=labels, return_dict=False)
    assert isinstance(found, tuple)
    assert torch.allclose(found[0], expected[0], rtol=1e-5)
    shifted = torch.nn.functional.pad(labels, (0, 1), value=-100)[:, 1:]
    assert torch.allclose(patched(ids, mask, labels=labels, shift_labels=shifted).loss, expected[0], rtol=1e-5)
    hidden = patched(ids, labels=labels, output_hidden_states=True).hidden_states
    assert len(hidden) == len(plain(ids, output_hidden_states=True).hidden_states)


def test_a_step_between_forward_and_backward_is_seen() -> None:
    _, patched = both("llama")
    ids, labels = labelled()
    for part in ("q_proj", "up_proj"):
        loss = patched(ids, labels=labels).loss
        weight = next(p for name, p in patched.named_parameters() if part in name)
        with torch.no_grad():
            weight.add_(1.0)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_second_derivatives_are_refused() -> None:
    _, patched = both("llama")
    ids, labels = labelled()
    for part in ("mlp.gate_proj", "self_attn.k_proj"):
        weight = dict(patched.named_parameters())[f"model.layers.0.{part}.weight"]
        with pytest.raises((UnsupportedProblem, RuntimeError), match="second derivative|derivative|once"):
            torch.autograd.grad(patched(ids, labels=labels, skip_logits=False).loss, weight, create_graph=True)


@pytest.mark.parametrize("trained", ["q_proj", "gate_proj", "down_proj", "lm_head", "embed_tokens"])
def test_partly_frozen_models(trained: str) -> None:
    plain, patched = both("qwen2")
    ids, labels = labelled()
    for model in (plain, patched):
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(trained in name)
        model(ids, labels=labels).loss.backward()
    close(plain, patched)


def test_tied_embeddings_and_checkpointing() -> None:
    plain, patched = both("qwen2", tie_word_embeddings=True)
    ids, labels = labelled()
    for model in (plain, patched):
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable({"use_reentrant": False})
        model(ids, labels=labels).loss.backward()
    close(plain, patched)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_last_backward_pass_alone_writes_over_what_was_saved(
    checkpointing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, patched = both("llama")
    last: list[bool] = []
    through = packed_training._through_gate

    def seen(gate: Any, dhidden: torch.Tensor, gate_up: torch.Tensor, **how: bool) -> torch.Tensor:
        found = through(gate, dhidden, gate_up, **how)
        assert (found is gate_up) is how["last"]
        last.append(how["last"])
        return found

    monkeypatch.setattr(packed_training, "_through_gate", seen)
    layers = plain.config.num_hidden_layers
    for model in (plain, patched):
        if checkpointing:
            enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
            enable({"use_reentrant": False})
        hidden = model.model(labelled()[0]).last_hidden_state
        for retained in (True, True, False):
            torch.autograd.backward(hidden.square().mean(), retain_graph=retained)
    close(plain, patched)
    assert last == [False] * layers * 2 + [True] * layers


def test_what_down_multiplies_is_not_saved() -> None:
    plain, patched = both("llama")
    ids, labels = labelled()
    wide = plain.config.intermediate_size

    class Widths(torch.autograd.graph.saved_tensors_hooks):
        """The bytes of saved activations as wide as the MLP."""

        def __init__(self) -> None:
            self.kept: dict[int, int] = {}
            super().__init__(self.keep, lambda t: t)

        def keep(self, t: torch.Tensor) -> torch.Tensor:
            if t.shape[-1] in (wide, 2 * wide) and not t.requires_grad:  # no weight
                self.kept[t.data_ptr()] = t.numel()
            return t

    widths = Widths()
    with widths:
        patched(ids, labels=labels)
    layers = plain.config.num_hidden_layers
    assert sum(widths.kept.values()) == layers * 2 * wide * ids.numel()  # gate and up, not their product


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_compiled_in_training() -> None:
    torch.compiler.reset()
    plain, patched = both("gemma2")
    ids, labels = labelled()
    products: list[str] = []

    def kept(graph: Any, inputs: Any) -> Any:
        products.extend(str(node.target) for node in graph.graph.nodes if "projections" in str(node.target))
        return make_boxed_func(graph.forward)

    backend = aot_autograd(fw_compiler=kept, bw_compiler=kept)
    compiled = torch.compile(patched, backend=backend, fullgraph=True)
    result = compiled(ids, labels=labels)
    assert result.logits is None and result[1] is None
    result.loss.backward()
    plain(ids, labels=labels).loss.backward()
    close(plain, patched)
    each = 2 * plain.config.num_hidden_layers  # of attention and of the MLP
    ours = "cutekernels._projections.default", "cutekernels._projections_dx.default"
    assert [products.count(name) for name in ours] == [each, each]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_what_a_graph_of_training_holds() -> None:
    """Inputs are the model's own parameters; residuals' gradients are added by norms; a tied head's is scaled by torch,
    for Inductor to fuse with the embedding's.
    """
    torch.compiler.reset()
    plain, patched = both("qwen2", tie_word_embeddings=True)
    ids, labels = labelled()
    graphs: list[Any] = []

    def kept(graph: Any, inputs: Any) -> Any:
        graphs.append(graph.graph)
        return make_boxed_func(graph.forward)

    compiled = torch.compile(patched, backend=aot_autograd(fw_compiler=kept, bw_compiler=kept), fullgraph=True)
    compiled(ids, labels=labels).loss.backward()
    plain(ids, labels=labels).loss.backward()
    close(plain, patched)
    layers = plain.config.num_hidden_layers
    given = [node.meta["val"] for node in graphs[0].nodes if node.op == "placeholder"]
    assert sum(t.is_floating_point() for t in given) == len(list(plain.parameters())) + 1  # and rotary frequencies
    names = [str(node.target) for graph in graphs for node in graph.nodes]
    assert names.count("cutekernels._linear_cross_entropy.default") == 1
    assert not any("scale_gradient" in name for name in names)
    norms = [node for node in graphs[1].nodes if str(node.target) == "cutekernels._rms_norm_backward.default"]
    assert len(norms) == 2 * layers + 1
    assert [node.args[3] is None for node in norms] == [True] + [False] * (2 * layers)  # the last one has no residual
    added = [node.meta["val"].shape for node in graphs[1].nodes if str(node.target) == "aten.add.Tensor"]
    assert plain.model.embed_tokens.weight.shape in added and (*ids.shape, plain.config.hidden_size) not in added


def test_func_differentiates_with_respect_to_embeddings() -> None:
    plain, patched = both("llama")
    x = plain.get_input_embeddings()(tiny.tokens()).detach()
    grads = [torch.func.grad(lambda x, m=m: m(inputs_embeds=x).logits.square().mean())(x) for m in (plain, patched)]
    assert (grads[0] - grads[1]).norm() <= 1e-5 * grads[0].norm()


def test_graphs_multiply_by_the_memory_that_parameters_share() -> None:
    _, patched = both("qwen2")
    attention = patched.model.layers[0].self_attn
    weights = [getattr(attention, name).weight for name in attention.parts]
    shared = packed_training._side_by_side(weights)
    assert shared.data_ptr() == weights[0].data_ptr() and torch.equal(shared, torch.cat(weights))
    weights[1].data = weights[1].data.clone()
    moved = packed_training._side_by_side(weights)
    assert moved.data_ptr() != weights[0].data_ptr() and torch.equal(moved, shared)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_graph_follows_parameters_that_move() -> None:
    torch.compiler.reset()
    plain, patched = both("qwen2")
    ids, labels = labelled()
    compiled = torch.compile(patched, backend="aot_eager", fullgraph=True)
    compiled(ids, labels=labels).loss.backward()
    patched.zero_grad()
    for model in (plain, patched):  # as vector_to_parameters moves them
        for p in model.parameters():
            p.data = p.data * 1.5
    compiled(ids, labels=labels).loss.backward()
    plain(ids, labels=labels).loss.backward()
    close(plain, patched)


def test_an_optimizer_of_before_trains_what_patch_packed() -> None:
    plain, patched = tiny.model("llama").train(), tiny.model("llama").train()
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-2) for model in (plain, patched)]
    ck.patch(patched)
    ids, labels = labelled()
    for _ in range(3):
        for model, optimizer in zip((plain, patched), optimizers, strict=True):
            optimizer.zero_grad()
            model(ids, labels=labels).loss.backward()
            optimizer.step()
    for p, q in zip(plain.parameters(), patched.parameters(), strict=True):
        assert torch.allclose(p, q, atol=1e-3)
    ck.unpatch(patched)
    assert torch.allclose(patched(ids, labels=labels).loss, plain(ids, labels=labels).loss, rtol=1e-2)


def test_a_frozen_weight_that_changes_before_the_backward_is_seen() -> None:
    _, patched = both("llama")
    patched.requires_grad_(False)
    patched.model.embed_tokens.weight.requires_grad_(True)
    ids, labels = labelled()
    for part in ("gate_proj", "k_proj"):
        loss = patched(ids, labels=labels).loss
        with torch.no_grad():
            next(p for name, p in patched.named_parameters() if part in name).mul_(2.0)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_weights_for_one_call_leave_the_packed_ones_packed() -> None:
    _, patched = both("llama")
    ids, _ = labelled()
    doubled = {name: (p * 2).detach() for name, p in patched.named_parameters()}
    other = torch.func.functional_call(patched, doubled, (ids,)).logits
    assert not torch.allclose(other, patched(ids).logits)
    assert all(layer.mlp.packed is not None for layer in patched.model.layers)


@pytest.mark.parametrize("late", [False, True])
def test_hooks_on_an_activation_run(late: bool) -> None:
    plain, patched = tiny.model("llama"), tiny.model("llama")
    if late:
        ck.patch(patched)
    for model in (plain, patched):
        for layer in model.model.layers:
            layer.mlp.act_fn.register_forward_hook(lambda module, given, made: made * 1.5)
    if not late:
        assert any("activation has hooks" in why for _, why in ck.patch(patched).left)
    ids, _ = labelled()
    assert torch.allclose(plain(ids).logits, patched(ids).logits, atol=1e-4)


def test_gradients_of_some_packed_weights_have_memory_of_their_own() -> None:
    _, patched = both("llama")
    patched.requires_grad_(False)
    weight = patched.model.layers[0].self_attn.q_proj.weight.requires_grad_(True)
    ids, labels = labelled()
    patched(ids, labels=labels).loss.backward()
    assert weight.grad.untyped_storage().nbytes() == weight.grad.nbytes
