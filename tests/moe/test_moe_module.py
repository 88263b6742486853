"""``moe_ffn`` and ``nn.MoE`` beside transformers' own blocks, on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import cutekernels as ck
from cutekernels import nn
from cutekernels.errors import UnsupportedProblem
from tests.traced import Graphs

transformers = pytest.importorskip("transformers")

SIZES = {"hidden_size": 16, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "intermediate_size": 24}


def blocks() -> dict[str, Any]:
    from transformers.models.deepseek_v3 import modeling_deepseek_v3 as deepseek
    from transformers.models.glm4_moe import modeling_glm4_moe as glm
    from transformers.models.mixtral import modeling_mixtral as mixtral
    from transformers.models.qwen3_moe import modeling_qwen3_moe as qwen

    grouped = {"n_routed_experts": 8, "n_group": 4, "topk_group": 2, "n_shared_experts": 2}
    return {
        "qwen3": qwen.Qwen3MoeSparseMoeBlock(qwen.Qwen3MoeConfig(num_experts=8, norm_topk_prob=False, **SIZES)),
        "qwen3, renormalized": qwen.Qwen3MoeSparseMoeBlock(
            qwen.Qwen3MoeConfig(num_experts=8, norm_topk_prob=True, **SIZES)
        ),
        "mixtral": mixtral.MixtralSparseMoeBlock(mixtral.MixtralConfig(num_local_experts=4, **SIZES)),
        "deepseek v3": deepseek.DeepseekV3MoE(
            deepseek.DeepseekV3Config(routed_scaling_factor=2.5, **grouped, **SIZES)
        ),
        "glm 4": glm.Glm4MoeMoE(glm.Glm4MoeConfig(routed_scaling_factor=2.5, **grouped, **SIZES)),
    }  # fmt: skip


def block(name: str, dtype: torch.dtype) -> Any:
    made, draw = blocks()[name].to(dtype), torch.Generator().manual_seed(11)
    for p in (*made.parameters(), *made.buffers()):
        p.data = torch.randn(p.shape, generator=draw, dtype=torch.float64).to(p.dtype) / 4
    return made


NAMES = ("qwen3", "qwen3, renormalized", "mixtral", "deepseek v3", "glm 4")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", NAMES)
def test_it_computes_what_transformers_does(name: str, dtype: torch.dtype) -> None:
    theirs = block(name, dtype)
    ours = nn.MoE.from_transformers(theirs)
    x = torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)
    results, gradients = [], []
    for module in (theirs, ours):
        leaf = x.clone().requires_grad_()
        results.append(module(leaf))
        parameters = dict(module.named_parameters())
        wanted = [parameters[n] for n in ("gate.weight", "experts.gate_up_proj", "experts.down_proj")]
        gradients.append(torch.autograd.grad(results[-1].square().sum(), [leaf, *wanted]))
    torch.testing.assert_close(results[1], results[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_state_dicts_go_both_ways(name: str) -> None:
    theirs = block(name, torch.float32)
    ours = nn.MoE.from_transformers(theirs)
    saved = ours.state_dict()
    assert {k: tuple(v.shape) for k, v in saved.items()} == {k: tuple(v.shape) for k, v in theirs.state_dict().items()}
    theirs.load_state_dict(saved)
    of = {"shared_size": 48, "scoring": "sigmoid", "groups": (4, 2)} if name in ("deepseek v3", "glm 4") else {}
    fresh = nn.MoE(16, 24, ours.num_experts, 2, **of)
    fresh.load_state_dict(theirs.state_dict())
    x = torch.randn(3, 16, generator=torch.Generator().manual_seed(1))
    fresh.renormalize, fresh.scaling = ours.renormalize, ours.scaling
    torch.testing.assert_close(fresh(x), ours(x))


def test_parameters_are_shared_not_copied() -> None:
    theirs = block("qwen3", torch.float32)
    assert nn.MoE.from_transformers(theirs).experts.down_proj is theirs.experts.down_proj


def test_gradients_and_ids_of_no_expert() -> None:
    draw = torch.Generator().manual_seed(2)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=draw, dtype=torch.float64).requires_grad_()

    ids = torch.tensor([[0, 3], [3, -1], [0, 4], [9, 3]])
    leaves = (randn(4, 3), randn(5, 4, 3), randn(5, 3, 2), randn(4, 2), randn(5, 4), randn(5, 3))

    def f(x: Any, up: Any, down: Any, weights: Any, b1: Any, b2: Any) -> Any:
        return ck.moe_ffn(x, up, down, ids, weights, gate_up_bias=b1, down_bias=b2)

    assert torch.autograd.gradcheck(f, leaves)
    x, up, down, weights, b1, b2 = leaves
    exact = torch.zeros_like(x)
    for t in range(4):
        for j in range(2):
            e = int(ids[t, j])
            if 0 <= e < 5:
                gate, value = (up[e] @ x[t] + b1[e]).chunk(2)
                exact[t] += weights[t, j] * (down[e] @ (torch.nn.functional.silu(gate) * value) + b2[e])
    torch.testing.assert_close(f(*leaves), exact)


def test_compiles_whole() -> None:
    module, graphs = nn.MoE(16, 24, 8, 2), Graphs()
    x = torch.randn(3, 16)
    made = torch.compile(module, backend=graphs.backend, fullgraph=True)
    with torch.no_grad():
        torch.testing.assert_close(made(x), module(x))
    experts = ["moe_permute", "moe_gather", "grouped_gemm", "grouped_gemm", "moe_combine"]
    assert graphs.ops() == ["linear", "moe_route", *experts]
    made = torch.compile(module, backend=graphs.backend, fullgraph=True, dynamic=True)
    with torch.no_grad():
        for tokens in (5, 300):
            x = torch.randn(tokens, 16)
            torch.testing.assert_close(made(x), module(x))
    assert len(graphs.seen) == 2  # one for any number of tokens


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"top_k": 9}, "top_k"),
        ({"scoring": "relu"}, "softmax"),
        ({"scaling": 2.0}, "sigmoid"),
        ({"scoring": "sigmoid", "groups": (3, 1)}, "groups"),
        ({"scoring": "sigmoid", "groups": (2, 1, 1)}, "groups"),
        ({"groups": None}, "groups"),
        ({"num_experts": 513}, "from 1 to 512"),
        ({"num_experts": 64, "top_k": 33}, "from 1 to 32"),
        ({"dtype": torch.int32}, "floating-point"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(UnsupportedProblem, match=said):
        nn.MoE(**{"hidden_size": 8, "intermediate_size": 8, "num_experts": 8, "top_k": 2} | options)


@pytest.mark.parametrize("x", [None, [1.0], torch.zeros(2, 7), torch.tensor(1.0)])
def test_wrong_inputs_are_refused(x: Any) -> None:
    with pytest.raises(UnsupportedProblem, match=r"MoE takes x"):
        nn.MoE(8, 8, 4, 2)(x)


def test_other_blocks_are_refused() -> None:
    with pytest.raises(UnsupportedProblem, match="got Linear"):
        nn.MoE.from_transformers(torch.nn.Linear(2, 2))
    theirs = block("mixtral", torch.float32)
    theirs.jitter_noise = 0.1
    with pytest.raises(UnsupportedProblem, match="jitter"):
        nn.MoE.from_transformers(theirs)
    with pytest.raises(UnsupportedProblem, match="w_down"):
        ck.moe_ffn(torch.zeros(2, 4), torch.zeros(3, 6, 4), torch.zeros(3, 4, 2), torch.zeros(2, 1), torch.zeros(2, 1))


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_hooks_on_the_router_run(scoring: Any) -> None:
    module, x = nn.MoE(16, 24, 4, 2, scoring=scoring), torch.randn(5, 16)
    expected, ids = module.route(x)
    hook = module.gate.register_forward_hook(lambda gate, args, out: out + 0)  # one that looks only
    torch.testing.assert_close(module.route(x)[0], expected)
    hook.remove()
    module.gate.register_forward_hook(lambda gate, args, out: -out)
    assert not torch.equal(module.route(x)[1], ids)


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_adapters_of_the_router_run(scoring: Any) -> None:
    peft = pytest.importorskip("peft")
    module, x = nn.MoE(16, 24, 4, 2, scoring=scoring), torch.randn(5, 16)
    weights, ids = module.route(x)
    adapted = peft.inject_adapter_in_model(peft.LoraConfig(target_modules=["gate"], r=2), module)
    assert torch.equal(adapted.route(x)[1], ids), "it begins at nothing"
    with torch.no_grad():
        adapted.gate.lora_B["default"].weight.normal_()
    found = adapted.route(x)[0]
    assert not torch.allclose(found, weights)
    found.sum().backward()
    assert adapted.gate.lora_A["default"].weight.grad is not None


def test_x_of_another_dtype_is_named() -> None:
    with pytest.raises(UnsupportedProblem, match=r"MoE multiplies torch\.bfloat16 by a weight of torch\.float32"):
        nn.MoE(16, 24, 4, 2)(torch.randn(5, 16).bfloat16())
