"""The kernel repository on a GPU, beside an installed cutekernels: a model whose forwards are its layers'."""

from __future__ import annotations

from pathlib import Path
from types import MethodType
from typing import Any

import pytest
import torch
from transformers.models.llama import modeling_llama

from cutekernels.hub import tree
from tests.hub.alone import loaded
from tests.integrations import tiny
from tests.models.near_ties import widened

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("one_cache_one_seed"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]
LAYERS = {torch.nn.Linear: "Linear", modeling_llama.LlamaRMSNorm: "RMSNorm", modeling_llama.LlamaMLP: "SwiGLUMLP"}


def test_layers_are_no_further_from_fp32_than_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Norms, products, MLPs and rotary embedding as ``kernelize`` puts them in place; gradients too."""
    package, _ = loaded(tree.write(tmp_path / "repository"))
    model = tiny.model("llama", hidden_size=256, intermediate_size=384, head_dim=64)
    for parameter in model.parameters():
        parameter.data.mul_(0.5)
    model, ids = model.to("cuda", torch.bfloat16), tiny.tokens(4, 50).cuda()
    exact = widened(model)

    def results(m: Any) -> tuple[torch.Tensor, torch.Tensor]:
        m.zero_grad()
        out = m(ids, labels=ids)
        out.loss.backward()
        return out.logits.float(), torch.cat([p.grad.float().flatten() for p in m.parameters()])

    expected, theirs = results(exact), results(model)
    for module in model.modules():
        name = LAYERS.get(type(module))
        if name is not None:
            module.forward = MethodType(getattr(package.layers, name).forward, module)
    turn = package.layers.rotary_pos_emb()
    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", turn)
    ours = results(model)
    for own, other, true in zip(ours, theirs, expected, strict=True):
        assert 0 < (own - true).norm() <= 1.25 * (other - true).norm() < 0.3 * true.norm()


@pytest.mark.parametrize("packed", [False, True])
def test_attention_under_the_names_of_flash_attention(tmp_path: Path, packed: bool) -> None:
    package, _ = loaded(tree.write(tmp_path / "repository"))
    q, k, v = (torch.randn(2, 40, heads, 64, device="cuda", dtype=torch.bfloat16) for heads in (8, 2, 2))
    wide = [t.float().transpose(1, 2) for t in (q, k, v)]
    expected = torch.nn.functional.scaled_dot_product_attention(*wide, is_causal=True, enable_gqa=True).transpose(1, 2)
    theirs = torch.nn.functional.scaled_dot_product_attention(
        *(t.transpose(1, 2) for t in (q, k, v)), is_causal=True, enable_gqa=True
    ).transpose(1, 2)
    if packed:
        ends = torch.tensor([0, 40, 80], dtype=torch.int32, device="cuda")
        rows = (t.flatten(0, 1) for t in (q, k, v))
        ours = package.flash_attn_varlen_func(*rows, ends, ends, 40, 40, causal=True).view_as(q)
    else:
        ours = package.flash_attn_func(q, k, v, causal=True)
    assert (ours.float() - expected).norm() <= 2 * (theirs.float() - expected).norm()
