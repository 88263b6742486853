"""Round a model's projections to four and eight bits, save it, and generate from the packed checkpoint.

    python examples/quantize.py

It prints, with figures of the random weights:

    int4_g32      0.28 of the bytes of bf16, largest error 0.31
    fp8_block     0.50 of the bytes of bf16, largest error 0.16
    int8_channel  0.50 of the bytes of bf16, largest error 0.02
    saved 14 packed projections, 8 tokens from the checkpoint
"""

from __future__ import annotations

import tempfile

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import cutekernels as ck


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    dense = torch.randn(256, 512, device=device, dtype=torch.bfloat16)
    for scheme in ("int4_g32", "fp8_block", "int8_channel"):
        weight = ck.quant.quantize(dense, scheme)
        error = (weight.dequantize().double() - dense.double()).abs().max().item()
        print(f"{scheme:13s} {weight.nbytes / dense.nbytes:.2f} of the bytes of bf16, largest error {error:.2f}")

    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=500, **sizes)).eval().to(device, torch.bfloat16)
    packed = [n for n, m in model.named_modules() if isinstance(m, torch.nn.Linear) and n != "lm_head"]
    for name in packed:
        linear = model.get_submodule(name)
        assert isinstance(linear, torch.nn.Linear)
        model.set_submodule(name, ck.nn.QuantizedLinear.from_linear(linear, "int4_g32"))
    model.config.quantization_config = ck.quant.write_config(model)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        decoder = ck.models.Decoder.from_pretrained(folder, device=device, max_batch=2, max_tokens=128)
    tokens = decoder.generate([[1, 2, 3]], max_new_tokens=8, stop=()).tokens[0]
    print(f"saved {len(packed)} packed projections, {len(tokens)} tokens from the checkpoint")


if __name__ == "__main__":
    main()
