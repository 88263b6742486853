"""``cutekernels warmup``: the kernels of a checkpoint's calls, compiled where no GPU is needed."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from cutekernels import terminal
from cutekernels.errors import UnsupportedProblem

app = typer.Typer(add_completion=False)


@app.command()
def warmup(
    folder: Annotated[Path, typer.Argument(help="A checkpoint, with config.json and safetensors.")],
    tokens: Annotated[str, typer.Option(metavar="LOW:HIGH", help="Numbers of tokens in a prompt.")] = "1:4096",
    gpu: Annotated[str, typer.Option(help="auto, or a name such as a100, l40s, rtx5090, h200.")] = "auto",
    max_batch: Annotated[int, typer.Option(help="Requests that the Decoder runs at a time.")] = 8,
    max_tokens: Annotated[int | None, typer.Option(help="Of a request, as the Decoder's; default: HIGH.")] = None,
    kv_cache: Annotated[str | None, typer.Option(help="fp8, as the Decoder's; default: the model's type.")] = None,
    dtype: Annotated[str | None, typer.Option(help="bfloat16 or float16; default: the checkpoint's.")] = None,
    jobs: Annotated[int | None, typer.Option(help="Compiling processes; default: as CPUs and memory allow.")] = None,
) -> None:
    """Compile ahead every kernel that a Decoder of this checkpoint needs, for whatever number of tokens."""
    import torch

    from cutekernels import gpu as gpus
    from cutekernels import introspection
    from cutekernels.ahead import prepare
    from cutekernels.models.decoder import Decoder
    from cutekernels.models.loading import outline

    low, colon, high = tokens.partition(":")
    if not (colon and low.isdecimal() and high.isdecimal()):
        raise UnsupportedProblem(f"--tokens is LOW:HIGH, such as 1:4096; got {tokens!r}")
    span = introspection.check_tokens((int(low), int(high)))
    spec = gpus.lookup(gpu)
    types = {None: None, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if dtype not in types:
        raise UnsupportedProblem(f"--dtype is bfloat16 or float16; got {dtype!r}")
    most = span[1] if max_tokens is None else max_tokens
    cache: Any = kv_cache  # checked there
    model = outline(folder, dtype=types[dtype])
    decoder = Decoder.from_transformers(model, max_batch=max_batch, max_tokens=most, kv_cache=cache)
    terminal.say(f"{spec.name}: {prepare(decoder, span, spec, jobs)}")
