"""gpt-oss's attention, whose sinks transformers passes to the registered function."""

from __future__ import annotations

import pytest
import torch

transformers = pytest.importorskip("transformers")
if not hasattr(transformers, "GptOssForCausalLM"):
    pytest.skip("a transformers without gpt-oss", allow_module_level=True)

from cutekernels.integrations.transformers.attention import NAME, register_attention  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


@pytest.mark.parametrize("padded", [False, True])
def test_logits_are_those_of_eager_attention(padded: bool) -> None:
    register_attention()
    torch.manual_seed(0)
    config = transformers.GptOssConfig(
        hidden_size=64, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=16, num_local_experts=4, num_experts_per_tok=2, vocab_size=131, sliding_window=8,
        layer_types=["sliding_attention", "full_attention"], attn_implementation="eager",
    )  # fmt: skip
    model = transformers.GptOssForCausalLM(config).eval()
    for layer in model.model.layers:
        torch.nn.init.normal_(layer.self_attn.sinks, 1.0, 2.0)
    ids = torch.randint(0, 131, (2, 20))
    seen = torch.ones(2, 20, dtype=torch.int64)
    if padded:
        seen[0, :5] = 0
    with torch.no_grad():
        expected = model(ids, attention_mask=seen).logits
        model.set_attn_implementation(NAME)
        ours = model(ids, attention_mask=seen).logits
        for layer in model.model.layers:
            layer.self_attn.sinks.zero_()
        others = model(ids, attention_mask=seen).logits
    own = seen.bool()
    torch.testing.assert_close(ours[own], expected[own], rtol=1e-4, atol=1e-5)
    assert float((others[own] - expected[own]).abs().max()) > 0.01, "sinks that change nothing would hide errors"
