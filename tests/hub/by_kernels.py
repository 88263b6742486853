"""A model whose layers the ``kernels`` package takes from a repository: ``python -m tests.hub.by_kernels REPOSITORY``.

Prints JSON: the largest differences from the same model patched, and where its layers' forwards are from.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch

import cutekernels as ck
from cutekernels.hub.tree import LAYERS
from tests.integrations import tiny

LEFT = torch.tensor([[0] * 7 + [1] * 13, [1] * 20])


def results(model: Any) -> list[torch.Tensor]:
    ids = tiny.tokens()
    options = {"max_new_tokens": 12, "do_sample": False, "attention_mask": LEFT}
    with torch.no_grad():
        found = [model(ids).logits, model(ids, attention_mask=LEFT).logits[LEFT.bool()]]
    return [*found, model.generate(ids, **options).float()]


def main(repository: str) -> None:
    warnings.simplefilter("ignore")
    os.environ["LOCAL_KERNELS"] = f"cutekernels/kernels={repository}"
    import kernels
    import transformers
    from transformers.models.llama import modeling_llama

    transformers.logging.set_verbosity_error()  # type: ignore[attr-defined]
    plain = tiny.model("llama")
    expected = results(plain)
    with ck.patch(plain):
        patched = results(plain)
    for cls, name in ((modeling_llama.LlamaMLP, "SwiGLUMLP"), (torch.nn.Linear, "Linear")):
        kernels.replace_kernel_forward_from_hub(cls, name)
    repositories = {x: {"cpu": kernels.LocalLayerRepository(Path(repository), layer_name=x)} for x in LAYERS}
    kernels.register_kernel_mapping(repositories)
    with tempfile.TemporaryDirectory() as folder:
        plain.save_pretrained(folder)
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, use_kernels=True).eval()
    model.set_attn_implementation("cutekernels/kernels", allow_all_kernels=True)
    ours = results(model)
    turn: Any = modeling_llama.apply_rotary_pos_emb
    forwards = {type(m).__name__: m.forward.__func__.__module__ for m in model.modules() if "forward" in m.__dict__}
    forwards["rotary_pos_emb"] = turn.forward.__func__.__module__
    apart = [float((a - b).abs().max()) for a, b in zip(ours, patched, strict=True)]
    print(json.dumps({"apart": apart, "size": float(expected[0].abs().max()), "forwards": forwards}))


if __name__ == "__main__":
    main(sys.argv[1])
