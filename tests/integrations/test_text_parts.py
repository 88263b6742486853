"""The text part of a model that sees images, patched by its family's row: the same logits and tokens of the whole."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import cutekernels as ck
from tests import every_model
from tests.integrations import tiny
from tests.integrations.test_transformers import close

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")
IMAGE, START, END = 128, 129, 130  # tokens


def gemma3() -> tuple[Any, dict[str, Tensor]]:
    """Tokens of an image see one another."""
    own = {"sliding_window": 8, "query_pre_attn_scalar": 16, "layer_types": ["sliding_attention", "full_attention"]}
    config = transformers.Gemma3Config(
        text_config=tiny.TEXT | own, vision_config=tiny.VISION | {"image_size": 28, "patch_size": 14},
        mm_tokens_per_image=4, image_token_index=IMAGE, boi_token_index=START, eoi_token_index=END,
    )  # fmt: skip
    kinds = torch.zeros(1, 20, dtype=torch.long)
    kinds[:, 5:9] = 1
    return transformers.Gemma3ForConditionalGeneration(config), {
        "pixel_values": torch.randn(1, 3, 28, 28), "token_type_ids": kinds,
    }  # fmt: skip


def gemma4() -> tuple[Any, dict[str, Tensor]]:
    """Tokens of an image see one another; layers share keys, and see a second embedding of each token."""
    own = every_model._GEMMA | {"sliding_window": 8, "global_head_dim": 32, "use_bidirectional_attention": "vision"}
    vision = tiny.VISION | {
        "num_key_value_heads": 2, "head_dim": 16, "global_head_dim": 16, "patch_size": 4, "pooling_kernel_size": 2,
        "position_embedding_size": 64,
    }  # fmt: skip
    config = tiny.configured(
        "Gemma4", text_config=tiny.TEXT | own, vision_config=vision, audio_config=None,
        image_token_id=IMAGE, boi_token_id=START, eoi_token_id=END,
    )  # fmt: skip
    kinds = torch.zeros(1, 20, dtype=torch.long)
    kinds[:, 5:9] = 1
    rows = torch.stack(torch.meshgrid(torch.arange(4), torch.arange(4), indexing="ij"), -1).view(1, 16, 2)
    return transformers.Gemma4ForConditionalGeneration(config), {
        "pixel_values": torch.randn(1, 16, 3 * 4 * 4), "image_position_ids": rows, "mm_token_type_ids": kinds,
    }  # fmt: skip


def qwen_vl(config: Any, head_dim: dict[str, int], vision: dict[str, Any]) -> tuple[Any, dict[str, Tensor]]:
    """Positions of an image's tokens are of time, height and width."""
    text = {name: value for name, value in tiny.COMMON.items() if name != "head_dim"} | head_dim
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
    sizes = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 64}
    made = config(
        text_config=text | {"rope_parameters": rope}, vision_config=sizes | vision | {"patch_size": 4},
        image_token_id=IMAGE, vision_start_token_id=START, vision_end_token_id=END, video_token_id=127,
    )  # fmt: skip
    kinds = torch.zeros(1, 20, dtype=torch.long)
    kinds[:, 5:9] = 1
    name = config.__name__.replace("Config", "ForConditionalGeneration")
    return getattr(transformers, name)(made), {
        "pixel_values": torch.randn(16, 3 * 2 * 4 * 4), "image_grid_thw": torch.tensor([[1, 4, 4]]),
        "mm_token_type_ids": kinds,
    }  # fmt: skip


def qwen25_vl() -> tuple[Any, dict[str, Tensor]]:
    return qwen_vl(transformers.Qwen2_5_VLConfig, {}, {"window_size": 16, "fullatt_block_indexes": [0]})


def qwen3_vl() -> tuple[Any, dict[str, Tensor]]:
    """An image's features are added between the first layers, too."""
    own = {"num_position_embeddings": 16, "deepstack_visual_indexes": [0]}
    return qwen_vl(transformers.Qwen3VLConfig, {"head_dim": 16}, own)


@pytest.mark.parametrize("make", [gemma3, gemma4, qwen25_vl, qwen3_vl])
@pytest.mark.parametrize("whole", [True, False])
def test_a_text_part_is_patched_by_its_row(make: Any, whole: bool) -> None:
    torch.manual_seed(5)
    model, image = make()
    for path, parameter in model.named_parameters():
        torch.nn.init.normal_(parameter, std=0.02 if path.endswith("norm.bias") else 0.15)
    model.eval()
    ids = tiny.tokens(1, 20) % 127
    seen = ids.clone()
    seen[:, 4], seen[:, 5:9], seen[:, 9] = START, IMAGE, END
    masks = torch.tensor([[0] * 3 + [1] * 17]), torch.ones(1, 20, dtype=torch.long)
    greedy = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None}

    def results() -> list[Tensor]:
        found = [model(ids).logits, model(seen, attention_mask=masks[1], **image).logits]
        return [*found, model(ids, attention_mask=masks[0]).logits[:, 3:]]

    def generated() -> list[Tensor]:
        given = ({}, image)
        return [
            model.generate(x, attention_mask=masks[1], **own, **greedy)
            for x, own in zip((ids, seen), given, strict=True)
        ]

    with torch.no_grad():
        expected, tokens = results(), generated()
        assert not torch.allclose(expected[0], expected[1], atol=1e-2), "the image counts"
        with ck.patch(model if whole else model.model.language_model) as report:
            assert report.fused["mlp"] >= 2 and report.patched["causal"] == whole
            old = "three tables" in str(report)  # Qwen2.5-VL's in 5.4
            layers = model.config.get_text_config().num_hidden_layers
            assert report.patched["attention"] == layers * (not old)
            assert any(".language_model" in path for path, _ in report.left) == old, str(report)
            for ours, theirs in zip(results(), expected, strict=True):
                close(ours, theirs)
            assert all(torch.equal(a, b) for a, b in zip(generated(), tokens, strict=True))
