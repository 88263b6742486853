"""Generate with the decoder, all prompts at once and then request by request.

    python examples/decode.py [MODEL] [PROMPT...]    # a model of the Hub; without one a tiny random model

It prints, with other tokens:

    [222, 224, 382, 438]
    [289, 382, 152, 173]
    13 tokens a second, capturing graphs included on a GPU
    [422, 73, 73, 73]
"""

from __future__ import annotations

import sys

import torch
import transformers

from cutekernels.models import Decoder, Sampling


def load(name: str | None) -> tuple[torch.nn.Module, object]:
    """A model and its tokenizer, or a random model and none."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if name is not None:
        model = transformers.AutoModelForCausalLM.from_pretrained(name, dtype=torch.bfloat16)
        return model.eval().to(device), transformers.AutoTokenizer.from_pretrained(name)
    config = transformers.Qwen3Config(
        vocab_size=500,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
    )
    dtype = torch.bfloat16 if device == "cuda" else torch.float32  # GPUs take 16 bits alone
    return transformers.Qwen3ForCausalLM(config).eval().to(device, dtype), None


def main(name: str | None = None, *texts: str) -> None:
    """Generate for all prompts at once, then request by request."""
    model, tokenizer = load(name)
    decoder = Decoder.from_transformers(model, max_batch=8, max_tokens=512, tokenizer=tokenizer)
    prompts = list(texts) or (["The kernel of the matter is"] if tokenizer else [[1, 2, 3], [4, 5]])
    drawn = Sampling(temperature=0.7, top_p=0.9, seed=1)
    stop = None if tokenizer else ()  # a random model's end of a text means nothing
    result = decoder.generate(prompts, max_new_tokens=32, sampling=drawn, stop=stop)
    for row in result.texts or result.tokens:
        print(row)
    print(f"{result.tokens_per_second:.0f} tokens a second, capturing graphs included on a GPU")

    number = decoder.add(prompts[0], max_new_tokens=8, stop=stop)  # others may be added while it runs
    while not decoder.idle:
        decoder.step()
    print(decoder.result(number))


if __name__ == "__main__":
    if {"-h", "--help"} & set(sys.argv[1:]):
        sys.exit(__doc__)
    main(*sys.argv[1:])
