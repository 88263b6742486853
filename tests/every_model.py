"""Every causal model class of the installed transformers, tiny and patched: logits, loss, gradients, tokens.

python -m tests.every_model [KIND ...] [--part 1/8] > part1.tsv   # a line a model type
python -m tests.every_model --write part*.tsv                     # the table in docs/transformers.md
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import cutekernels as ck
from cutekernels.integrations.transformers.families import FAMILIES

PAGE = Path(__file__).parents[1] / "docs/transformers.md"
BEGIN, END = "<!-- every model -->", "<!-- end -->"
_LARGEST = 4e7
SIZES: dict[str, Any] = {
    "vocab_size": 131, "max_position_embeddings": 64, "n_positions": 64, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": None, "sliding_window": 8, "attention_chunk_size": 8, "use_cache": True, "is_decoder": True,
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "emb_dim", "embedding_size"), 64),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "decoder_ffn_dim", "encoder_ffn_dim", "n_inner", "d_inner"), 96),
    **dict.fromkeys(("num_hidden_layers", "num_layers", "n_layer", "n_layers", "decoder_layers", "encoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "n_kv_heads"), 2), "encoder_attention_heads": 4,
    **dict.fromkeys(("head_dim", "attention_head_dim", "v_head_dim"), 16),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk", "experts_per_token"), 2),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 48),
    **dict.fromkeys(("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob", "attn_dropout"), 0.0),
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads"), 4), **dict.fromkeys(("mamba_d_head", "mamba_head_dim"), 32),
    **dict.fromkeys(("mamba_d_state", "ssm_state_size", "state_size"), 16), "mamba_chunk_size": 8, "mamba_d_ssm": 128,
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 16), "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "shared_intermediate_size": 48, "embedding_size": 64,
}  # fmt: skip
_LATENT = {
    "kv_lora_rank": 24, "q_lora_rank": 24, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16,
    "head_dim": 8, "num_key_value_heads": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
}  # fmt: skip
_INDEXED = _LATENT | {"index_n_heads": 4, "index_head_dim": 16, "index_topk": 8}
_LINEAR = {"layer_types": ["linear_attention", "full_attention"]}
_SPARSE = {"mlp_layer_types": ["dense", "sparse"]}
_ROPE = {"rope_type": "default", "rope_theta": 1e4}
_HYBRID = {
    "num_hidden_layers": 3, "layers_block_type": ["linear_attention", "hybrid", "linear_attention"],
    "attention_hidden_size": 128, "attention_head_dim": 32,
}  # fmt: skip
_GEMMA = {
    "num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2, "num_kv_shared_layers": 2,
    "vocab_size_per_layer_input": 131, "hidden_size_per_layer_input": 16,
}  # fmt: skip
OWN: dict[str, dict[str, Any]] = {  # where the sizes above do not fit together
    "codegen": {"rotary_dim": 8},
    "gptj": {"rotary_dim": 8},
    **dict.fromkeys(("axk1", "axk2", "deepseek_v2", "deepseek_v3", "glm4_moe_lite"), _LATENT),
    **dict.fromkeys(("deepseek_v32", "glm_moe_dsa"), _INDEXED),
    "dots3_note": {"num_key_value_heads": 4},
    "dots3_note_text": {"num_key_value_heads": 4},
    **dict.fromkeys(("granitemoehybrid", "qwen3_5_text", "qwen3_5_moe_text", "qwen3_next", "qwen4_exp_text"), _LINEAR),
    **dict.fromkeys(("minicpm3", "youtu"), _LATENT),
    "bailing_hybrid": _LATENT | _LINEAR | _SPARSE | {"num_expert_group": 1, "layer_group_size": 2},
    "bamba": {"attn_layer_indices": [1]},
    "cohere_compass_text": {
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": dict.fromkeys(("sliding_attention", "full_attention"), _ROPE),
    },
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8},
        "ffn_config": {"ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "dots1": {"n_group": 1, "topk_group": 1, "n_shared_experts": 1},
    "gemma3n_text": _GEMMA | {"laurel_rank": 8, "activation_sparsity_pattern": [0.0] * 4},
    "gemma4_text": _GEMMA | {"global_head_dim": 512},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 8},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_dt_rank": 8, "use_mamba_kernels": False},
    "kimi_linear": _LATENT | _LINEAR | _SPARSE,
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "lfm3": {"layer_types": ["conv", "full_attention"]},
    "longcat_flash": _LATENT | {"expert_ffn_hidden_size": 48, "ffn_hidden_size": 96},
    "mamba2": {"head_dim": 32, "n_groups": 1, "chunk_size": 8},
    "mpt": {"attn_config": {"attn_pdrop": 0}},
    "nemotron_h": {"n_groups": 1, "chunk_size": 8, "moe_shared_expert_intermediate_size": 48},
    "recurrent_gemma": {"num_hidden_layers": 3, "attention_window_size": 8},
    "reformer": {"axial_pos_embds": False, "attn_layers": ["local", "local"]},
    "xmod": {"default_language": "en_XX"},
    "zamba": _HYBRID | {"mamba_dt_rank": 8},
    "zamba2": _HYBRID | {"n_mamba_heads": 8, "mamba_headdim": 16, "adapter_rank": 8, "hybrid_layer_ids": [1]},
    "zaya": {"num_experts_per_tok": 1, "router_hidden_size": 32},
}


def _options(cls: Any, own: dict[str, Any]) -> dict[str, Any]:
    """``SIZES`` that a config class knows, and its parts' likewise."""
    whole = cls()
    options = {k: v for k, v in SIZES.items() if k in dir(whole) and k not in cls.attribute_map and _is_set(cls, k)}
    for name, part in getattr(cls, "sub_configs", {}).items():
        kind = type(getattr(whole, name, None)) if part.__name__ == "AutoConfig" else part
        if kind is not type(None):
            options[name] = _options(kind, own.get(name, {})) | own.get(name, {})
    return options | own


def _is_set(cls: Any, name: str) -> bool:
    """Whether a config's attribute is no property that only reads."""
    own = getattr(cls, name, None)
    return not isinstance(own, property) or own.fset is not None


def built(kind: str) -> Any:
    torch.manual_seed(5)
    cls: Any = getattr(transformers, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind])
    config: Any = cls.config_class or CONFIG_MAPPING[kind]
    model = cls(config(**_options(config, OWN.get(config.model_type, {}))))
    total = sum(p.numel() for p in model.parameters())
    if total > _LARGEST:
        raise ValueError(f"{total / 1e6:.0f} M parameters in the smallest")
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.15)
    return model.eval()


def results(model: Any, ids: torch.Tensor) -> dict[str, Any]:
    """Results of a model: logits plain and padded, loss, gradients, tokens."""
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    found: dict[str, Any] = {}
    with torch.no_grad():
        found["logits"] = model(input_ids=ids).logits
        found["padded"] = model(input_ids=ids, attention_mask=mask).logits[mask.bool()]
        torch.manual_seed(0)
        model.train()
    model.zero_grad()
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    model.eval()
    found["loss"] = loss.detach()
    found["gradients"] = torch.cat(
        [p.grad.flatten() for _, p in sorted(model.named_parameters()) if p.grad is not None]
    )
    found["tokens"] = model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=12, do_sample=False)
    return found


def distances(ours: dict[str, Any], theirs: dict[str, Any]) -> dict[str, float]:
    """Results that differ by more than fp32 rounds, and by how much."""
    found = {}
    for name, expected in theirs.items():
        if ours[name].shape != expected.shape:
            found[name] = float("inf")
            continue
        size = 1.0 if name == "tokens" else max(1.0, float(expected.abs().max()))
        off = float((ours[name].double() - expected.double()).abs().max()) / size
        if not off <= (0.0 if name == "tokens" else 64 * 2.0**-23):
            found[name] = off
    return found


def tried(kind: str) -> tuple[str, Any]:
    """``(verdict, report)`` of a class: "right", or what went wrong; the report is None where nothing was patched."""
    try:
        model = built(kind)
        ids = torch.randint(2, 131, (2, 20), generator=torch.Generator().manual_seed(3))
        plain = results(model, ids)
    except Exception as error:  # noqa: BLE001  of transformers: the class is listed with these words
        return f"not tried: {_short(error)}", None
    report = ck.patch(model)
    wrong: dict[str, Any] = distances(results(model, ids), plain)
    if wrong:  # what the model itself rounds is no error
        ours = results(model, ids)
        ck.unpatch(model)
        exact = results(model.double(), ids)
        own, theirs = distances(ours, exact), distances(plain, exact)
        wrong = {k: f"{own[k]:.0e}" for k in wrong if own.get(k, 0) > 4 * theirs.get(k, 0)}
    return f"wrong: {wrong}" if wrong else "right", report


def _short(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:90]}"


def line(kind: str) -> str:
    """A model type's line: the verdict, by row or by structure, why attention and the loss are left."""
    try:
        verdict, report = tried(kind)
    except Exception as error:  # noqa: BLE001  ours: an error is a verdict too
        verdict, report = f"error: {_short(error)}", None
    left = {} if report is None else dict(report.left)
    by = "row" if report is not None and report.model.config.model_type in FAMILIES else "structure"
    return "\t".join([kind, verdict, by, left.get("attention", ""), left.get("the loss", "")])


def _short_reason(reason: str) -> str:
    """Without sizes and remedies."""
    return re.split(r" *[;:(]|, in training| by \d", reason)[0]


def table(lines: list[str]) -> str:
    """The lines as a table: model types by what became of them."""
    groups: dict[str, list[str]] = {}
    for kind, verdict, by, attention, loss in (one.split("\t") for one in lines):
        if verdict != "right":
            found = [verdict[:60] if "not tried" in verdict else verdict]
        elif by == "row":
            found = ["right, by its row of the table above"]
        elif not attention and not loss:
            found = ["right, by structure, with attention and the loss"]
        else:
            reasons = ("attention", attention), ("the loss", loss)
            found = [f"right, by structure; {what} stays: {_short_reason(why)}" for what, why in reasons if why]
        for one in found:
            groups.setdefault(one, []).append(kind)
    rows = [f"| {what} | {', '.join(f'`{kind}`' for kind in kinds)} |" for what, kinds in groups.items()]
    return "\n".join([f"| transformers {transformers.__version__} | model types |", "|---|---|", *sorted(rows)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kinds", nargs="*", help="model types; all by default")
    parser.add_argument("--part", default="1/1", help="2/4 takes the second of four slices")
    parser.add_argument("--write", metavar="FILE", nargs="+", help="write the table from what earlier runs printed")
    given = parser.parse_args()
    if given.write:
        lines = [one for file in given.write for one in Path(file).read_text().splitlines() if one.count("\t") == 4]
        before, _, rest = PAGE.read_text().partition(BEGIN)
        PAGE.write_text(before + BEGIN + "\n" + table(sorted(lines)) + "\n" + END + rest.partition(END)[2])
        return
    part, parts = map(int, given.part.split("/"))
    transformers.logging.set_verbosity_error()
    for kind in given.kinds or sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)[part - 1 :: parts]:
        print(line(kind), flush=True)


if __name__ == "__main__":
    sys.exit(main())
